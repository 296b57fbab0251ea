"""Snapshots: weights of other versions than the learner's current one.

Snapshots are the last few published versions, the old policy, the reference, and teachers that follow the
student. Only trained weights are stored; each rank stores its own shard, in host memory by default. For a pass with a
snapshot, its weights replace the model's weights, which are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.engines.native.ranks import part_of, slice_of
from slipstream.engines.weights import local

Version = int | str
REFERENCE, OLD = "reference", "old"


class Snapshots:
    def __init__(self, model: nn.Module, *, keep: int = 0) -> None:
        """Create an empty store for at most `keep` numbered versions; the oldest version is dropped first."""
        self.keep = keep
        self.trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.held: dict[Version, list[Tensor]] = {}

    @property
    def parameters(self) -> list[Tensor]:
        return [local(parameter) for parameter in self.trained.values()]

    def __contains__(self, version: Version) -> bool:
        return version in self.held

    @torch.no_grad()
    def take(self, version: Version, *, host: bool = True) -> None:
        device = torch.device("cpu") if host else None
        self.held[version] = [parameter.to(device or parameter.device, copy=True) for parameter in self.parameters]
        numbered = sorted(version for version in self.held if isinstance(version, int))
        for old in numbered[: max(0, len(numbered) - self.keep)]:
            del self.held[old]

    def copy(self, version: Version, copy: Version) -> None:
        """Store a copy of a snapshot under another name."""
        self.held[copy] = [tensor.clone() for tensor in self.held[version]]

    @torch.no_grad()
    def blend(self, version: Version, decay: float) -> None:
        """Set the weights of a snapshot to decay · snapshot + (1 − decay) · current weights."""
        for held, own in zip(self.held[version], self.parameters, strict=True):
            held.lerp_(own.to(held.device), 1 - decay)  # decay 0 gives exactly the current weights

    def state(self, version: Version) -> dict[str, Tensor]:
        """Return a snapshot as a state dict, sharded over the ranks like the model's weights."""
        held = zip(self.trained.items(), self.held[version], strict=True)
        return {name: part_of(tensor, own) for (name, own), tensor in held}

    def shards(self, version: Version) -> dict[str, Tensor]:
        """Return this rank's shards of a snapshot, where they are stored."""
        return dict(zip(self.trained, self.held[version], strict=True))

    @torch.no_grad()
    def copy_layer(self, version: Version, layer: nn.Linear) -> nn.Linear:
        """Return an unsharded copy of a layer with the weights of a snapshot; all ranks must call this."""
        made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        held = dict(zip(map(id, self.trained.values()), self.held[version], strict=True))
        for name, own in layer.named_parameters():  # a frozen weight is the same in all versions
            weight = part_of(held[id(own)], own) if id(own) in held else own.detach()
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            setattr(made, name, nn.Parameter(whole.to(own.device, copy=True), requires_grad=False))
        return made

    def put(self, version: Version, state: Mapping[str, Tensor], *, host: bool = False) -> None:
        """Store a state dict of unsharded weights as a snapshot, in host memory if `host`, else on the device."""
        slices = [local(slice_of(state[name], own)) for name, own in self.trained.items()]
        self.held[version] = [
            tensor.to("cpu" if host else own.device, own.dtype, copy=True)
            for tensor, own in zip(slices, self.parameters, strict=True)
        ]

    @contextmanager
    def under(self, version: Version) -> Iterator[None]:
        """Give the model the weights of a snapshot within this context, for passes without gradient."""
        with torch.no_grad():
            own = [parameter.clone() for parameter in self.parameters]
            torch._foreach_copy_(self.parameters, self.held[version])
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, own)
