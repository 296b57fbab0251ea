"""Ranks: the processes that share one learner, their rendezvous, and the sharding of its weights.

Every rank holds a slice of every weight, gradient and optimizer state (FSDP2). A layer is gathered only while it
computes. Losses are already divided by the counts of the whole step, so gradients are summed, not averaged.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from slipstream.engines.weights import whole

T = TypeVar("T")
Meeting = tuple[str, int]
"""Host and port of a store that all ranks can reach."""
LOOPBACK = "127.0.0.1"


class Ranks:
    def __init__(self, index: int = 0, size: int = 1, mesh: DeviceMesh | None = None) -> None:
        self.index, self.size, self.mesh = index, size, mesh

    def gathered(self, mine: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    def shard(self, root: nn.Module, layers: list[nn.Module]) -> None:
        """Shard the weights over the ranks; a layer's weights are gathered together, the rest with the root."""
        if self.size == 1:
            return
        for module in (*reversed(layers), root):  # inner modules first
            # also the root: else its weights would stay gathered after a pass without gradient, and become stale
            fully_shard(module, mesh=self.mesh, reshard_after_forward=True)
            sharded = cast(FSDPModule, module)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def on_first(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """Gather a state dict on the CPU of the first rank; all ranks must call this, and the others get no tensors."""
        found: dict[int, Tensor | None] = {}

        def collected(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: collected(part) for name, part in value.items()}
            if not isinstance(value, Tensor):
                return value
            if id(value) not in found:  # tied tensors stay tied
                gathered = whole(value.detach())
                found[id(value)] = gathered.cpu() if self.index == 0 else None
            return found[id(value)]

        return {name: collected(part) for name, part in state.items()}


def open_store(host: str) -> tuple[Any, Meeting]:
    """Open the store where ranks meet, at a free port of `host` only: torch by itself would listen on all addresses."""
    listening = socket.create_server((host, 0))
    port = int(listening.getsockname()[1])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, (host, port)


def join(meeting: Meeting, index: int, size: int, *, device: torch.device, patience: float) -> Ranks:
    """Join the ranks at `meeting`; `patience` is the timeout in seconds of every wait for another rank."""
    host, port = meeting
    if host == LOOPBACK:
        for library in ("GLOO", "NCCL"):  # received data is unpickled: other machines must not connect
            os.environ[f"{library}_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    limit = timedelta(seconds=patience)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=limit)
    return Ranks(index, size, init_device_mesh(device.type, (size,)))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that the model marks as indivisible: its decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def slice_of(tensor: Tensor, own: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor, laid out like `own`, without communication."""
    if not isinstance(own, DTensor):
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def part_of(tensor: Tensor, own: Tensor) -> Tensor:
    """Wrap this rank's local shard as a DTensor laid out like `own`, so that it can be gathered."""
    if not isinstance(own, DTensor):
        return tensor
    here = tensor.to(own.device)
    return DTensor.from_local(here, own.device_mesh, own.placements, shape=own.shape, stride=own.stride())
