"""Objects that one process of a machine builds, and whose tensors its other processes map instead of building them.

The first process of a machine that asks for an object builds it, and copies its tensors into anonymous shared memory.
The others unpickle its structure. All have the same parameters in the same pages, and a write copies the page. Other
tensors are copied, because one buffer that outlives the parameters would keep all pages.
"""

from __future__ import annotations

import io
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]

from slipstream.engines.checksums import raw
from slipstream.engines.shared_memory import Mapped

T = TypeVar("T")
ALIGNED = 64
"""Multiple of bytes at which tensors begin."""
LOADING = timedelta(days=1)
"""Longest wait for another process's object; the death of that process ends the run earlier."""
Key = tuple[int, int, str, tuple[int, ...], bool, bool]
"""Number, offset, dtype and shape of a tensor, and whether it is a parameter and requires a gradient."""


class SharedObjects:
    def __init__(self, store: Store) -> None:
        self.store, self.memory = store, list[Mapped]()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.machine = f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"

    def get(self, name: str, build: Callable[[], T]) -> T:
        """Return what `build` returns; it is called once on each machine.

        This object must live until all processes of the machine have called `get`.
        """
        key = f"{name} on {self.machine}"
        if self.store.add(f"{key}: asked", 1) > 1:
            self.store.wait([key], LOADING)
            at, path = self.store.get(key).decode().split(maxsplit=1)
            return cast("T", read(path, int(at)))
        made = build()
        memory, size = write(made)
        self.memory.append(memory)
        self.store.set(key, f"{size} {memory.path}")
        return made


class Writer(pickle.Pickler):
    """Pickles an object without its tensors, and lists them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.keys: dict[int, Key] = {}
        self.tensors: list[Tensor] = []
        self.size = 0

    def persistent_id(self, value: Any) -> Key | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self.keys:
            dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
            is_parameter = isinstance(value, nn.Parameter)
            key = len(self.tensors), self.size, dtype, shape, is_parameter, value.requires_grad
            self.keys[id(value)] = key
            self.tensors.append(value)
            self.size += -(-value.nbytes // ALIGNED) * ALIGNED
        return self.keys[id(value)]


def write(made: object) -> tuple[Mapped, int]:
    """Move the tensors of an object into shared memory; return it, and the number of bytes that they have there."""
    file = io.BytesIO()
    writer = Writer(file)
    writer.dump(made)
    structure = file.getvalue()
    memory = Mapped.empty(writer.size + len(structure))
    body = memory.array(writable=True)
    body[writer.size :] = np.frombuffer(structure, np.uint8)
    flat = mapped(memory.path)
    for tensor, (_, offset, *_) in zip(writer.tensors, writer.keys.values(), strict=True):
        body[offset : offset + tensor.nbytes] = raw(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            tensor.data = view(flat, offset, tensor.dtype, tensor.shape)
    return memory, writer.size


def read(path: str, size: int) -> object:
    flat, known = mapped(path), dict[int, Tensor]()

    def tensor_of(key: Key) -> Tensor:
        number, offset, dtype, shape, is_parameter, requires_grad = key
        if number not in known:  # tied tensors stay tied
            tensor = view(flat, offset, getattr(torch, dtype), shape)
            known[number] = nn.Parameter(tensor, requires_grad) if is_parameter else tensor.clone()
        return known[number]

    reader = pickle.Unpickler(io.BytesIO(flat[size:].numpy().tobytes()))
    reader.persistent_load = tensor_of  # type: ignore[method-assign]
    return reader.load()


def mapped(path: str) -> Tensor:
    """Return the bytes of a file as copy-on-write pages."""
    return torch.from_numpy(np.memmap(path, np.uint8, mode="c"))


def view(flat: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    return flat[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
