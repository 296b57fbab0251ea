"""Objects that one process of a machine builds, and whose parameters its other processes map.

The first process of a machine that asks for an object builds it, and copies its parameters into anonymous shared
memory. The others unpickle the rest. All have the same parameters in the same pages, and a write copies the page.
"""

from __future__ import annotations

import io
import pickle
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
"""Multiple of bytes at which parameters begin."""
LOADING = timedelta(days=1)
"""Longest wait for another process's object; the death of that process ends the run earlier."""
Place = tuple[int, torch.dtype, tuple[int, ...], bool]
"""Offset, dtype and shape of a parameter, and whether it requires a gradient."""


class SharedObjects:
    def __init__(self, store: Store) -> None:
        self.store, self.memory = store, list[Mapped]()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.machine = f"{boot} {Path('/proc/self/ns/pid').readlink()}"

    def get(self, name: str, build: Callable[[], T]) -> T:
        """Return what `build` returns; it is called once on each machine.

        This object must live until all processes of the machine have called `get`.
        """
        key = f"{name} on {self.machine}"
        if self.store.add(f"{key}: asked", 1) > 1:
            self.store.wait([key], LOADING)
            size, path = self.store.get(key).decode().split(maxsplit=1)
            return cast("T", Reader(np.memmap(path, np.uint8, mode="c"), int(size)).load())
        made = build()
        memory, start = move_parameters(made)
        self.memory.append(memory)
        self.store.set(key, f"{start} {memory.path}")
        return made


def move_parameters(made: object) -> tuple[Mapped, int]:
    """Move the parameters of an object into shared memory; return it, and the offset of the rest, which is pickled."""
    file = io.BytesIO()
    writer = Writer(file)
    writer.dump(made)
    rest = np.frombuffer(file.getvalue(), np.uint8)
    memory = Mapped.empty(writer.size + len(rest))
    body, pages = memory.array(writable=True), np.memmap(memory.path, np.uint8, mode="c")
    body[writer.size :] = rest
    for parameter, place in writer.found.values():
        body[place[0] : place[0] + parameter.nbytes] = raw(parameter.detach())
        parameter.data = view(pages, place)
    return memory, writer.size


class Writer(pickle.Pickler):
    """Pickles an object without its parameters, and finds a place for each of them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: dict[int, tuple[nn.Parameter, Place]] = {}
        self.size = 0

    def persistent_id(self, value: Any) -> Place | None:
        if not isinstance(value, nn.Parameter) or not value.numel():
            return None
        if id(value) not in self.found:
            self.found[id(value)] = value, (self.size, value.dtype, tuple(value.shape), value.requires_grad)
            self.size += -(-value.nbytes // ALIGNED) * ALIGNED
        return self.found[id(value)][1]


class Reader(pickle.Unpickler):
    def __init__(self, pages: Any, size: int) -> None:
        super().__init__(io.BytesIO(pages[size:].tobytes()))
        self.pages, self.parameters = pages, dict[int, nn.Parameter]()

    def persistent_load(self, place: Place) -> nn.Parameter:
        if place[0] not in self.parameters:  # tied parameters stay tied
            self.parameters[place[0]] = nn.Parameter(view(self.pages, place), place[3])
        return self.parameters[place[0]]


def view(pages: Any, place: Place) -> Tensor:
    offset, dtype, shape, _ = place
    return torch.frombuffer(pages, dtype=dtype, count=int(np.prod(shape)), offset=offset).view(shape)
