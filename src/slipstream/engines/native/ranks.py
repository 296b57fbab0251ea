"""Ranks: the processes that train one model together, their rendezvous, the objects that they share, and their shards.

Every rank stores a slice of every weight, gradient and optimizer state (FSDP2). A layer's weights are gathered only
while the layer computes. Gradients are summed over ranks, not averaged: losses are divided by counts of the whole step.
"""

import gc
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from slipstream.engines.checksums import Bytes, raw
from slipstream.engines.native.resources import return_freed_memory
from slipstream.engines.shared_memory import Records
from slipstream.engines.weights import on_first_rank

T = TypeVar("T")
Meeting = tuple[str, int]
"""Host and port of the TCP store through which the ranks connect."""
LOOPBACK = "127.0.0.1"


class Ranks:
    def __init__(self, index: int = 0, size: int = 1, mesh: DeviceMesh | None = None) -> None:
        self.index, self.size, self.mesh = index, size, mesh

    def gathered(self, mine: T) -> list[T]:
        """Return every rank's value of `mine`, in rank order; all ranks must call this."""
        if self.size == 1:
            return [mine]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, mine)
        return values

    def shard(self, root: nn.Module, layers: list[nn.Module]) -> None:
        """Shard the weights over the ranks; each layer is gathered as a unit, and all other weights with `root`."""
        if self.size == 1:
            return
        for module in (*reversed(layers), root):  # inner modules first
            # reshard also the root: else its weights stay gathered after a pass without gradient and become stale
            fully_shard(module, mesh=self.mesh, reshard_after_forward=True)
            sharded = cast(FSDPModule, module)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def on_first(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Gather a state dict on the first rank's CPU; other ranks must also call this and get None for each tensor."""
        tensors: dict[int, Tensor | None] = {}

        def collected(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: collected(part) for name, part in value.items()}
            if not isinstance(value, Tensor):
                return value
            if id(value) not in tensors:  # tied tensors stay tied
                gathered = on_first_rank(value)
                tensors[id(value)] = gathered if self.index == 0 else None
            return tensors[id(value)]

        return {name: collected(part) for name, part in state.items()}


def open_store(host: str) -> tuple[Any, Meeting]:
    """Open the TCP store for the ranks at a free port of `host` only: torch by default listens on all addresses."""
    listening = socket.create_server((host, 0))
    port = int(listening.getsockname()[1])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, (host, port)


def connect(meeting: Meeting, limit: timedelta) -> TCPStore:
    host, port = meeting
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


def join(meeting: Meeting, index: int, size: int, *, device: torch.device, patience: float) -> Ranks:
    """Connect this rank to the others through `meeting`; `patience` is the timeout for each wait, in seconds."""
    host, _ = meeting
    if host == LOOPBACK:
        for library in ("GLOO", "NCCL"):  # received data is unpickled: other machines must not connect
            os.environ[f"{library}_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    limit = timedelta(seconds=patience)
    store = connect(meeting, limit)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=limit)
    return Ranks(index, size, init_device_mesh(device.type, (size,)))


def slice_of(tensor: Tensor, own: Tensor) -> Tensor:
    """Shard a whole tensor like `own`, without communication; return it unchanged if `own` is not sharded."""
    if not isinstance(own, DTensor):
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def part_of(tensor: Tensor, own: Tensor) -> Tensor:
    """Return this rank's shard as a DTensor like `own`, which can be gathered; unchanged if `own` is not sharded."""
    if not isinstance(own, DTensor):
        return tensor
    here = tensor.to(own.device)
    return DTensor.from_local(here, own.device_mesh, own.placements, shape=own.shape, stride=own.stride())


# --- shared objects ---------------------------------------------------------------------------------------------------
#
# The first process of a machine that asks for an object builds it, and writes it into anonymous shared memory. All
# processes map its parameters there. They have the same pages, and a write copies the page.


LOADING = timedelta(days=1)
"""Longest wait for another process's object; the death of that process ends the run earlier."""


class SharedObjects:
    def __init__(self, store: Store) -> None:
        self.store, self.memory = store, list[Records]()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.machine = f"{boot} {Path('/proc/self/ns/pid').readlink()}"

    def get(self, name: str, build: Callable[[], T]) -> T:
        """Return what `build` returns; it is called once on each machine.

        This object must live until all processes of the machine have called `get`.
        """
        key = f"{name} on {self.machine}"
        if self.store.add(f"{key}: asked", 1) > 1:
            self.store.wait([key], LOADING)
            path = self.store.get(key).decode()
            memory = Records(os.open(path, os.O_RDONLY), Path(path).stat().st_size)
        else:
            memory = Records.of_values(build(), ParameterPickler)
            gc.collect()  # what was built, for modules may refer to themselves
            return_freed_memory()
            self.memory.append(memory)
            self.store.set(key, memory.path)
        return cast("T", memory.values())


class ParameterPickler(pickle.Pickler):
    """Pickler that leaves the bytes of parameters where they are, as those of arrays."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, nn.Parameter):
            return NotImplemented
        return parameter_of, (raw(value.detach()), value.dtype, value.shape, value.requires_grad)


def parameter_of(data: Bytes, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(data).view(dtype).view(shape), requires_grad)
