"""Checkpoints of the learner: a Hugging Face model directory plus files for resuming on any number of ranks.

`learner.safetensors` contains optimizer state, adapters and further weights: those of the old policy, those that
drew tokens of unfinished groups, and those of teachers that follow the student. `learner.json` contains numbers.
`record_files.py` stores the unfinished groups.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.engines.native.adapters import adapted_layers, merged, write_adapter
from slipstream.engines.native.model import LanguageModel, load_model
from slipstream.engines.native.ranks import Ranks, slice_of
from slipstream.engines.record_files import read_groups, write_groups
from slipstream.engines.weights import is_adapter, local, on_first_rank
from slipstream.errors import RunDirError, first_line
from slipstream.objective.coefficients import Coefficients
from slipstream.records import Group

LEARNER_TENSORS, LEARNER_NUMBERS, ADAPTER_FOLDER = "learner.safetensors", "learner.json", "adapter"
Moments = dict[int, dict[str, Tensor]]
"""Optimizer state of each parameter, by index of the parameter in the optimizer."""


class State(NamedTuple):
    """State of a learner that is saved in addition to its weights and optimizer."""

    update: int
    previous: Mapping[str, Tensor]
    """Weights of the old policy, if the method keeps them: those before the last update, or an average."""
    coefficients: Mapping[str, float]
    """Next values of the coefficients that change between updates, by name."""
    versions: Mapping[int, Mapping[str, Tensor]]
    """Stored weights that drew tokens of `groups`."""
    teachers: Mapping[str, tuple[int, Mapping[str, Tensor]]]
    """For each teacher that follows the student, the update after which it last changed, and its weights."""
    earlier: Mapping[str, Mapping[int, Mapping[str, Tensor]]]
    """For each of these teachers, the weights of the earlier versions that scored `groups`."""
    perturbation: Mapping[str, Tensor]
    """Logarithms of the noise on the layers and their moments; empty without noise."""
    critic: Mapping[str, Tensor]
    """Value head of the critic and its moments, and those of its own model; empty without one."""
    loss_scale: tuple[float, int] | None
    """Loss scale, and the number of steps since its last change; None if the run had none."""
    groups: Sequence[Group]
    """Unfinished groups, on the first rank."""
    moments: Mapping[str, Tensor] = {}
    """State of the optimizer as a checkpoint holds it; set only in a state that was read from one."""


def save(
    path: Path,
    lm: LanguageModel,
    tokenizer: Any,
    ranks: Ranks,
    state: State,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Save a checkpoint for resuming; if `optimizer` is None, save only the model, and its adapters in a subfolder.

    All ranks must call this; only the first rank writes.
    """
    weights = ranks.on_first(lm.model.state_dict(keep_vars=True))
    parts: dict[str, Mapping[str, Tensor]] = {}
    if optimizer:
        parts["moments"] = moments_of(optimizer)
        parts["adapters"] = {name: value for name, value in weights.items() if is_adapter(name)}
        parts["perturbation"], parts["critic"] = state.perturbation, state.critic
        parts["previous"] = ranks.on_first(state.previous)
        parts |= {f"version {version}": ranks.on_first(old) for version, old in state.versions.items()}
        parts |= {f"teacher {name}": ranks.on_first(own) for name, (_, own) in state.teachers.items()}
        for name, versions in state.earlier.items():
            parts |= {f"earlier {version} {name}": ranks.on_first(own) for version, own in versions.items()}
    if ranks.index > 0:
        return
    try:
        lm.model.save_pretrained(path, state_dict=merged(weights, lm.model))
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        if optimizer:
            tensors = {f"{part}/{name}": value for part, own in parts.items() for name, value in own.items()}
            save_file({name: value.detach().contiguous() for name, value in tensors.items()}, path / LEARNER_TENSORS)
            moved = {name: version for name, (version, _) in state.teachers.items()}
            earlier = {name: list(versions) for name, versions in state.earlier.items()}
            numbers = {"update": state.update, "versions": list(state.versions), "teachers": moved}
            numbers |= state.coefficients
            (path / LEARNER_NUMBERS).write_text(
                json.dumps(numbers | {"earlier": earlier, "loss_scale": state.loss_scale})
            )
        elif adapted_layers(lm.model):
            write_adapter(path / ADAPTER_FOLDER, lm.model, weights, base=lm.name)
    except Exception as error:  # safetensors and tokenizers raise errors of their own types if the disk is full
        raise RunDirError(f"{path} cannot be written: {first_line(error)}") from None
    if optimizer:
        write_groups(path, state.groups)


def moments_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state in host memory, with None for sharded tensors on ranks other than the first."""
    moments: Moments = optimizer.state_dict()["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{name}": on_first_rank(parameters[i], local(value), value.dtype) if value.dim() else value.cpu()
        for i, own in moments.items()
        for name, value in own.items()
    }


def restore(path: Path, lm: LanguageModel, ranks: Ranks, *, lora: bool) -> State:
    """Load a checkpoint written by any number of ranks and return its state; only the first rank gets the groups."""
    saved = json.loads((path / LEARNER_NUMBERS).read_text())
    with safe_open(path / LEARNER_TENSORS, framework="pt") as file:

        def part(name: str) -> dict[str, Tensor]:
            keys = [key for key in file.keys() if key.startswith(f"{name}/")]  # noqa: SIM118 (no dict)
            return {key.removeprefix(f"{name}/"): file.get_tensor(key) for key in keys}

        weights = part("adapters")  # adapter training leaves the base unchanged
        moments, previous, perturbation, critic = map(part, ("moments", "previous", "perturbation", "critic"))
        versions = {version: part(f"version {version}") for version in saved["versions"]}
        moved = saved.get("teachers", {})
        teachers = {name: (version, part(f"teacher {name}")) for name, version in moved.items()}
        versions_of = {name: saved.get("earlier", {}).get(name, []) for name in moved}  # absent in older checkpoints
        earlier = {name: {v: part(f"earlier {v} {name}") for v in own} for name, own in versions_of.items()}
    if not lora:
        dtype = str(lm.head.weight.dtype).removeprefix("torch.")
        weights = load_model(str(path), dtype=dtype, device="cpu").model.state_dict()  # a GPU need not hold both
    own = lm.model.state_dict()
    weights = {name: slice_of(weights[name], own[name]) for name in weights}
    lm.model.load_state_dict(weights, strict=not lora)
    groups = [] if ranks.index else read_groups(path)
    update, loss_scale = int(saved["update"]), saved.get("loss_scale")
    coefficients = {name: saved[name] for name in Coefficients._fields if saved.get(name) is not None}
    return State(
        update, previous, coefficients, versions, teachers, earlier, perturbation, critic, loss_scale, groups, moments
    )


def not_saved(path: Path, content: str, key: str) -> RunDirError:
    return RunDirError(f"{path} does not hold {content}: write the {key} it was saved under, or begin a new run")
