"""Checkpoints of the learner: a Hugging Face model directory plus files for resuming on any number of ranks.

`learner.safetensors` contains optimizer state, adapters and further weights: those before the last update, those that
drew tokens of unfinished groups, and those of teachers that follow the student. `learner.json` contains numbers.
`record_files.py` stores the unfinished groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.engines.native.adapters import adapted_layers, write_adapter
from slipstream.engines.native.lora import merged
from slipstream.engines.native.model import LanguageModel, load_model
from slipstream.engines.native.ranks import Ranks, slice_of
from slipstream.engines.record_files import read_groups, write_groups
from slipstream.engines.weights import is_adapter
from slipstream.errors import RunDirError, first_line
from slipstream.records import Group

TENSORS, NUMBERS, ADAPTER = "learner.safetensors", "learner.json", "adapter"
Moments = dict[int, dict[str, Tensor]]
"""Optimizer state of each parameter, by index of the parameter in the optimizer."""


def save(
    path: Path,
    lm: LanguageModel,
    tokenizer: Any,
    ranks: Ranks,
    *,
    update: int,
    optimizer: torch.optim.Optimizer | None,
    previous: Mapping[str, Tensor],
    beta: float | None,
    groups: Sequence[Group] = (),
    versions: Mapping[int, Mapping[str, Tensor]],
    teachers: Mapping[str, tuple[int, Mapping[str, Tensor]]],
) -> None:
    """Save a checkpoint for resuming; if `optimizer` is None, save only the model, and its adapters in a subfolder.

    All ranks must call this; only the first rank writes. `previous`: weights before the last update, if the method
    needs them. `beta`: next coefficient of the KL to the reference, if it is adaptive. `groups`: unfinished groups, on
    the first rank. `versions`: stored weights that drew tokens of these groups. `teachers`: for each teacher that
    follows the student, the update after which it last changed, and its weights.
    """
    state = ranks.on_first(lm.model.state_dict(keep_vars=True))
    moments: Moments = ranks.on_first(optimizer.state_dict())["state"] if optimizer else {}
    before = ranks.on_first(dict(previous)) if optimizer else {}
    drew = {f"version {version}": ranks.on_first(dict(held)) for version, held in versions.items()}
    following = {f"teacher {name}": ranks.on_first(dict(held)) for name, (_, held) in teachers.items()}
    if ranks.index > 0:
        return
    with library_errors(path):
        lm.model.save_pretrained(path, state_dict=merged(state, lm.model))
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        if optimizer:
            adapters = {name: value for name, value in state.items() if is_adapter(name)}
            of_weights = {f"{index}.{name}": value for index, own in moments.items() for name, value in own.items()}
            parts = {"moments": of_weights, "adapters": adapters, "previous": before, **drew, **following}
            tensors = {f"{part}/{name}": value for part, held in parts.items() for name, value in held.items()}
            save_file({name: value.detach().contiguous() for name, value in tensors.items()}, path / TENSORS)
            moved = {name: version for name, (version, _) in teachers.items()}
            numbers = {"update": update, "beta": beta, "versions": list(versions), "teachers": moved}
            (path / NUMBERS).write_text(json.dumps(numbers))
        elif adapted_layers(lm.model):
            write_adapter(path / ADAPTER, lm.model, state, base=lm.name)
    if optimizer:
        write_groups(path, groups)


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors and tokenizers raise errors of their own types if the disk is full
        raise RunDirError(f"{path} cannot be written: {first_line(error)}") from None


class Restored(NamedTuple):
    """State that a learner needs for resuming in addition to weights and optimizer; fields as in `save`."""

    update: int
    previous: dict[str, Tensor]
    beta: float | None
    versions: dict[int, dict[str, Tensor]]
    teachers: dict[str, tuple[int, dict[str, Tensor]]]
    groups: Sequence[Group]


def restore(path: Path, lm: LanguageModel, optimizer: torch.optim.Optimizer, ranks: Ranks, *, lora: bool) -> Restored:
    """Load a checkpoint written by any number of ranks and return its state; only the first rank gets the groups."""
    saved = json.loads((path / NUMBERS).read_text())
    with safe_open(path / TENSORS, framework="pt") as file:

        def part(name: str) -> dict[str, Tensor]:
            keys = [key for key in file.keys() if key.startswith(f"{name}/")]  # noqa: SIM118 (no dict)
            return {key.removeprefix(f"{name}/"): file.get_tensor(key) for key in keys}

        weights = part("adapters")  # adapter training leaves the base unchanged
        moments: Moments = {}
        for name, value in part("moments").items():
            index, _, kind = name.partition(".")
            moments.setdefault(int(index), {})[kind] = value
        previous = part("previous")
        versions = {version: part(f"version {version}") for version in saved["versions"]}
        moved = saved.get("teachers", {})
        teachers = {name: (version, part(f"teacher {name}")) for name, version in moved.items()}
    if not lora:
        dtype, device = str(lm.head.weight.dtype).removeprefix("torch."), "cpu" if ranks.size > 1 else str(lm.device)
        weights = load_model(str(path), dtype=dtype, device=device).model.state_dict()
    own = lm.model.state_dict()
    weights = {name: slice_of(weights[name], own[name]) for name in weights}
    lm.model.load_state_dict(weights, strict=not lora)
    restore_moments(optimizer, moments)
    groups = [] if ranks.index else read_groups(path)
    return Restored(int(saved["update"]), previous, saved["beta"], versions, teachers, groups)


def restore_moments(optimizer: torch.optim.Optimizer, moments: Moments) -> None:
    """Load the moments into the optimizer; its learning rate, betas and weight decay do not change."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in moments.items():
        own = parameters[index]
        # every tensor except the step count is sharded like its weight
        state |= {name: slice_of(value, own) for name, value in state.items() if value.shape == own.shape}
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
