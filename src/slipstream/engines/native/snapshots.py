"""Weights of other versions than the learner's own: the last few published, the one before, and the reference.

Only what is trained is kept, in host memory unless asked otherwise, each rank its own shard. A pass under one of them
copies it over the weights and then back, so whatever holds the weights (shards, adapters) needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Version = int | str
REFERENCE, PREVIOUS, _BEFORE = "reference", "previous", "at the beginning of this update"


class Snapshots:
    def __init__(self, model: nn.Module, *, keep: int = 0) -> None:
        """`keep`: how many numbered versions; the oldest leaves when there is one more."""
        self.keep = keep
        self.parameters = [local(parameter) for parameter in model.parameters() if parameter.requires_grad]
        self.held: dict[Version, list[Tensor]] = {}

    def __contains__(self, version: Version) -> bool:
        return version in self.held

    @torch.no_grad()
    def take(self, version: Version, *, host: bool = True) -> None:
        device = torch.device("cpu") if host else None
        self.held[version] = [parameter.to(device or parameter.device, copy=True) for parameter in self.parameters]
        numbered = sorted(version for version in self.held if isinstance(version, int))
        for old in numbered[: max(0, len(numbered) - self.keep)]:
            del self.held[old]

    def roll(self) -> None:
        """At the beginning of an update: PREVIOUS becomes what the weights were at the beginning of the one before."""
        before = self.held.pop(_BEFORE, None)
        self.take(_BEFORE, host=False)
        self.held[PREVIOUS] = before if before is not None else self.held[_BEFORE]

    @contextmanager
    def worn(self, version: Version) -> Iterator[None]:
        """The weights of that version, for passes without gradient."""
        with torch.no_grad():
            own = [parameter.clone() for parameter in self.parameters]
            torch._foreach_copy_(self.parameters, self.held[version])
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, own)


def local(tensor: Tensor) -> Tensor:
    """The part of it that lies here."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
