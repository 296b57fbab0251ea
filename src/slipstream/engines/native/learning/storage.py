"""The learner on disk: an ordinary model directory, and what it takes to go on, whatever the number of ranks then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.engines.native.lora import merged
from slipstream.engines.native.model import LanguageModel, load_model
from slipstream.engines.native.ranks import Ranks, slice_of
from slipstream.engines.weights import is_adapter


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
) -> None:
    """The first rank writes; all take part. Without an optimizer, only the model.

    `previous`: the weights before the last update, of what is trained, if the method compares with them. `beta`: what
    the KL to the reference will count, if it is steered.
    """
    state = ranks.on_first(lm.model.state_dict(keep_vars=True))
    moments = ranks.on_first(optimizer.state_dict()) if optimizer else {}
    before = ranks.on_first(dict(previous)) if optimizer else {}
    if ranks.index > 0:
        return
    lm.model.save_pretrained(path, state_dict=merged(state, lm.model))
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    if optimizer:
        adapters = {name: value for name, value in state.items() if is_adapter(name)}
        saved = {"optimizer": moments, "update": update, "adapters": adapters, "previous": before, "beta": beta}
        torch.save(saved, path / "learner.pt")


class Restored(NamedTuple):
    """What else a learner must know to go on, as far as it was saved."""

    update: int
    previous: dict[str, Tensor]
    beta: float | None


def restore(path: Path, lm: LanguageModel, optimizer: torch.optim.Optimizer, ranks: Ranks, *, lora: bool) -> Restored:
    """Every rank reads for itself; how many there were does not matter."""
    several = ranks.size > 1
    saved = torch.load(path / "learner.pt", map_location="cpu", mmap=several, weights_only=True)
    weights = saved["adapters"]  # with these, the base is what it was
    if not lora:
        dtype, device = str(lm.head.weight.dtype).removeprefix("torch."), "cpu" if several else str(lm.device)
        weights = load_model(str(path), dtype=dtype, device=device).model.state_dict()
    own = lm.model.state_dict()
    weights = {name: slice_of(weights[name], own[name]) for name in weights}
    lm.model.load_state_dict(weights, strict=not lora)
    restore_moments(optimizer, saved["optimizer"])
    return Restored(int(saved["update"]), saved.get("previous", {}), saved.get("beta"))


def restore_moments(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in saved["state"].items():
        own = parameters[index]
        # all but the number of steps is laid out as the weight
        state |= {name: slice_of(value, own) for name, value in state.items() if value.shape == own.shape}
    optimizer.load_state_dict(saved)
