"""An adapter directory, as PEFT writes it: what it says of itself, read without peft and without a weight.

adapter_config.json names base, rank and scale; adapter_model.safetensors holds two matrices, A and B, for each layer.
What would change other layers, or these by anything else than scale · B A, is refused by name.
"""

from __future__ import annotations

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
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the weights say it themselves
    *("loftq_config", "eva_config", "megatron_core", "qalora_group_size"),  # of what is refused where it is used
}
"""Keys that change nothing of what an adapter computes once it is trained."""
NOTHING: tuple[Any, ...] = (None, False, {}, [], "none")
PLAIN = {"revision": ("main",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva")}
"""Of other keys, what changes nothing either."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Adapter:
    path: Path
    base: str
    rank: int
    alpha: float
    layers: Mapping[str, tuple[int, int]]
    """Inputs and outputs of each layer that has one, by its name in the base."""

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
    """The model that an adapter stands on."""
    base = _config(Path(name)).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{name}: {CONFIG} names no base (base_model_name_or_path)")
    if is_adapter(base):
        raise ModelError(f"{name}: is an adapter of {base}, which is one itself: merge that into its base first")
    return base


def adapter_of(name: str) -> Adapter | None:
    """Nothing for what is a model."""
    if not is_adapter(name):
        return None
    path, said, base = Path(name), _config(Path(name)), base_of(name)
    rank, alpha = said.get("r"), said.get("lora_alpha")
    if said.get("peft_type") != "LORA":
        raise ModelError(f"{name}: is an adapter of type {said.get('peft_type')!r}; LORA is what runs here")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or alpha <= 0:
        raise ModelError(f"{name}: {CONFIG} says r = {rank!r} and lora_alpha = {alpha!r}, which must be above 0")
    for key in sorted(said.keys() - READ - ANYTHING):
        if said[key] not in (*NOTHING, *PLAIN.get(key, ())):
            raise ModelError(
                f"{name}: {CONFIG} says {key} = {json.dumps(said[key])}, which does not run here: merge this adapter "
                "into its base, and take that"
            )
    return Adapter(path, base, rank, float(alpha), dict(_layers(path, rank)))


def _config(path: Path) -> dict[str, Any]:
    try:
        said = json.loads((path / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path / CONFIG}: cannot be read: {first_line(error)}") from None
    if not isinstance(said, dict):
        raise ModelError(f"{path / CONFIG}: is no object")
    return said


def _layers(path: Path, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each with the shape of its weight, turned: inputs, outputs."""
    parts: dict[str, dict[str, Shape]] = {}
    for name, shape in _shapes(path / WEIGHTS).items():
        if (found := PART.fullmatch(name)) is None:
            raise ModelError(f"{path / WEIGHTS}: holds {name!r}, which is neither A nor B of a linear layer")
        parts.setdefault(found[1], {})[found[2]] = shape
    if not parts:
        raise ModelError(f"{path / WEIGHTS}: holds no weights")
    for layer, shapes in parts.items():
        match shapes:
            case {"A": (down, inputs), "B": (outputs, up)} if down == up == rank:
                yield layer, (inputs, outputs)
            case _:
                said = " and ".join(f"{part} {list(shape)}" for part, shape in sorted(shapes.items()))
                raise ModelError(f"{path / WEIGHTS}: {layer} has {said}, which is no adapter of rank {rank}")


def _shapes(path: Path) -> dict[str, Shape]:
    """Of every tensor, from the head of the file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("it is damaged")
            head = json.loads(file.read(size))
        return {name: tuple(each["shape"]) for name, each in head.items() if name != "__metadata__"}
    except FileNotFoundError:
        raise ModelError(f"{path}: is not there; weights in any other file are not read") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {first_line(error)}") from None
