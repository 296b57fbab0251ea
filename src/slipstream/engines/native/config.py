"""Read facts about a model from its config files, without loading weights."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError, first_line
from slipstream.models.resolve import check_reachable, model_path

LENGTH_ROPES = ("longrope", "dynamic")
SIZE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""Fields of config.json that must be positive if their value is an integer."""
EXPERT_FIELDS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts"
"""Names that families have for the number of experts."""
PASS_INTERVAL, PASS_SHARE = 0.05, 8
"""A scorer waits PASS_INTERVAL seconds between two passes, unless more than token_budget / PASS_SHARE tokens wait."""
ADMISSION_SHARE = 8
"""A native sampler admits new requests only when at least 1 / ADMISSION_SHARE of all slots are free."""


def depends_on_length(kind: Any) -> bool:
    """Return True if this rope type selects its factors by sequence length; a dict has one type per kind of layer."""
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(each in str(one) for one in kinds for each in LENGTH_ROPES)


def check_there(name: str) -> None:
    """Raise a ModelError if a local directory holds neither model nor adapter, or the hub does not answer."""
    check_reachable(name)
    path = Path(model_path(name))
    if path.is_dir() and not any((path / file).exists() for file in ("config.json", "adapter_config.json")):
        raise ModelError(f"{name}: no model there: the directory has no config.json")


def load_config(name: str) -> Any:
    """Return a copy of a model's config, with its sizes checked; an unchanged file is read only once."""
    path = model_path(name)
    check_there(name)
    file = Path(path, "config.json").absolute()
    try:
        config = deepcopy(_config(path, file, file.stat().st_mtime_ns if file.exists() else 0))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: cannot read its model config: {first_line(error)}") from None
    for field in SIZE_FIELDS:
        value = getattr(config.get_text_config(), field, None)
        if isinstance(value, int) and value < 1:
            raise ModelError(
                f"{name}: {field} = {value} in its config.json, but it must be 1 or more: write the value that the "
                "model was trained with"
            )
    text = config.get_text_config()
    pad, rows = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and pad >= rows:
        raise ModelError(
            f"{name}: pad_token_id = {pad} in its config.json is beyond vocab_size = {rows}: write the values that the "
            "model was trained with"
        )
    return config


@cache
def _config(path: str, file: Path, written: int) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def generation_of(name: str) -> Any:
    """Return a model's generation config; if the model has no such file, derive it from the model config."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model_path(name))
    except OSError:
        return GenerationConfig.from_model_config(load_config(name))


def context_length(config: Any) -> int:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    stretched = float(rope.get("factor", 1.0)) if rope.get("rope_type") == "dynamic" else 1.0
    return int(stretched * (getattr(text, "max_position_embeddings", None) or 1 << 30))


def fully_attended(config: Any) -> int | None:
    """Return the length up to which a sparse attention selects every key; None: the model selects none.

    Beyond it an index chooses keys. Its scores pass a ReLU, so many are 0, and the shape of a pass breaks the ties.
    """
    text = config.get_text_config()
    rates: dict[str, int] = getattr(text, "compress_rates", None) or {}
    keys = getattr(text, "index_topk", None)
    return keys and keys * rates.get("compressed_sparse_attention", 1)


def vocabulary_of(model: str) -> int:
    return int(load_config(model).get_text_config().vocab_size)


def experts_of(config: Any) -> int:
    """Return the number of experts among which routers choose; 0 for a model without experts."""
    counts = [getattr(config.get_text_config(), name, None) for name in EXPERT_FIELDS]
    return next((count for count in counts if isinstance(count, int) and count > 1), 0)


def width_of(model: str) -> int:
    return int(load_config(model).get_text_config().hidden_size)


def position_note(config: Any, max_length: int) -> str | None:
    """Return a note for the user if rope factors depend on the sequence length, else None."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    each = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    chosen = [part for part in each if depends_on_length(part.get("rope_type"))]
    if not chosen:
        return None
    kind = chosen[0]["rope_type"]
    original = chosen[0].get("original_max_position_embeddings") or text.max_position_embeddings
    side = "long" if max_length > original else "short"
    return (
        f"{kind} positions: a run uses the factors for {max_length} tokens ({side}: the original context is {original})"
    )
