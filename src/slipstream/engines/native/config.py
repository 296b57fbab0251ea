"""What a model says of itself before a weight of it is loaded."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError, first_line
from slipstream.models.resolve import check_reachable, model_path

KINDS = ("longrope", "dynamic")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""What a config.json says in positive numbers, where it says it in one."""
PASSES_APART, ENOUGH = 0.05, 8
"""Seconds between two passes of a scorer, if little waits: less than this part of a micro-batch."""
GATHERED = 8
"""This part of a sampler's slots must be free before some are filled."""


def by_length(kind: Any) -> bool:
    """Whether this rope type, or one of those of several kinds of layers, chooses by length."""
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(each in str(one) for one in kinds for each in KINDS)


def check_there(name: str) -> None:
    """A directory holds a model, or adapters of one; hub names are for their library to find."""
    check_reachable(name)
    path = Path(model_path(name))
    if path.is_dir() and not any((path / file).exists() for file in ("config.json", "adapter_config.json")):
        raise ModelError(f"{name}: no model there: the directory has no config.json")


def load_config(name: str) -> Any:
    """A copy for whoever asks, and many do; a file is read once."""
    path = model_path(name)
    check_there(name)
    file = Path(path, "config.json").absolute()
    try:
        config = deepcopy(_config(path, file, file.stat().st_mtime_ns if file.exists() else 0))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: cannot read a model config there: {first_line(error)}") from None
    for field in SIZES:
        value = getattr(config.get_text_config(), field, None)
        if isinstance(value, int) and value < 1:
            raise ModelError(
                f"{name}: {field} = {value} in its config.json, which must be 1 or more: write what the model was "
                "trained with"
            )
    return config


@cache
def _config(path: str, file: Path, written: int) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def generation_of(name: str) -> Any:
    """Its generation config; where it has none, what its config says of that."""
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


def vocabulary_of(model: str) -> int:
    return int(load_config(model).get_text_config().vocab_size)


def width_of(model: str) -> int:
    return int(load_config(model).get_text_config().hidden_size)


def position_note(config: Any, longest: int) -> str | None:
    """What a person should know of its positions; nothing where they mean the same whatever the length."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    each = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    chosen = [part for part in each if by_length(part.get("rope_type"))]
    if not chosen:
        return None
    kind = chosen[0]["rope_type"]
    original = chosen[0].get("original_max_position_embeddings") or text.max_position_embeddings
    side = "long" if longest > original else "short"
    return (
        f"{kind} positions: one set of factors, that of {longest} tokens ({side}: the original context is {original})"
    )
