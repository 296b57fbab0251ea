"""Reader of adapter directories in PEFT's format. Only config and shapes are read; the peft package is not needed.

adapter_config.json holds base model, rank and scale. adapter_model.safetensors holds two matrices A and B per layer.
ModelError refuses adapters that do anything else than add scale · B A to the weights of linear layers.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError, first_line

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PART = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
READ = {"peft_type", "base_model_name_or_path", "r", "lora_alpha"}
ANYTHING = {
    *("task_type", "inference_mode", "auto_mapping", "peft_version", "lora_dropout", "runtime_config"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the names of the weights suffice
    *("loftq_config", "eva_config", "megatron_core", "qalora_group_size"),  # of features that other keys refuse
}
"""Config keys that do not change the output of a trained adapter, whatever their value."""
NOTHING: tuple[Any, ...] = (None, False, {}, [], "none")
PLAIN_LORA = {"revision": ("main",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}
"""Allowed values of single config keys, besides `NOTHING`: they do not change the output of a trained adapter."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Adapter:
    path: Path
    base: str
    rank: int
    alpha: float
    layers: Mapping[str, tuple[int, int]]
    """Numbers of inputs and outputs of each layer that the adapter changes, by the layer's name in the base model."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(sorted({layer.rpartition(".")[2] for layer in self.layers}))


def is_adapter(name: str) -> bool:
    try:
        return (Path(name) / CONFIG).is_file()
    except OSError:  # no file has a name that long
        return False


def base_of(name: str) -> str:
    base = _config(Path(name)).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{name}: {CONFIG} names no base (base_model_name_or_path)")
    if is_adapter(base):
        raise ModelError(
            f"{name}: is an adapter of {base}, which is itself an adapter: merge {base} into its base first"
        )
    return base


def adapter_of(name: str) -> Adapter | None:
    """Read an adapter directory; return None if `name` is not an adapter but a model."""
    if not is_adapter(name):
        return None
    path, config, base = Path(name), _config(Path(name)), base_of(name)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{name}: is an adapter of type {config.get('peft_type')!r}; only LORA is supported")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or alpha <= 0:
        raise ModelError(f"{name}: {CONFIG} has r = {rank!r} and lora_alpha = {alpha!r}, which must be above 0")
    for key in sorted(config.keys() - READ - ANYTHING):
        if config[key] not in (*NOTHING, *PLAIN_LORA.get(key, ())):
            raise ModelError(
                f"{name}: {CONFIG} has {key} = {json.dumps(config[key])}, which is not supported: merge this adapter "
                "into its base, and use the merged model"
            )
    return Adapter(path, base, rank, float(alpha), dict(_layers(path, rank)))


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path / CONFIG}: cannot be read: {first_line(error)}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path / CONFIG}: is not a JSON object")
    return config


def _layers(path: Path, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name of each adapted layer, and the pair of its numbers of inputs and outputs."""
    parts: dict[str, dict[str, Shape]] = {}
    for name, shape in _shapes(path / WEIGHTS).items():
        if (match := PART.fullmatch(name)) is None:
            raise ModelError(f"{path / WEIGHTS}: holds {name!r}, which is neither matrix A nor B of a linear layer")
        parts.setdefault(match[1], {})[match[2]] = shape
    if not parts:
        raise ModelError(f"{path / WEIGHTS}: holds no weights")
    for layer, shapes in parts.items():
        match shapes:
            case {"A": (down, inputs), "B": (outputs, up)} if down == up == rank:
                yield layer, (inputs, outputs)
            case _:
                found = " and ".join(f"{part} {list(shape)}" for part, shape in sorted(shapes.items()))
                raise ModelError(f"{path / WEIGHTS}: {layer} has {found}, which does not fit an adapter of rank {rank}")


def _shapes(path: Path) -> dict[str, Shape]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; weights in any other file are not read") from None
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read: {first_line(error)}") from None
