"""Anonymous shared memory: bytes that one process writes and others map, without a file or a name.

The learner exports weights into it, and other engines write records into it, so that both reach other processes of the
machine without a further copy. The kernel frees it with the last process that holds it, however that ends.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import weakref
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

ALIGNMENT = 64
"""Divisor of the position of each array in shared memory, in bytes."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Mapped:
    """Bytes in anonymous shared memory, readable without a copy, and freed when no process uses them."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def empty(cls, size: int) -> Self:
        made = cls(os.memfd_create("slipstream"), size)
        os.ftruncate(made.descriptor, size)
        return made

    @classmethod
    def of(cls, data: Bytes) -> Mapped:
        """Return the memory of an array that `array` returned, or a copy of any other array."""
        if (own := memory_of(data)) is not None:
            return own
        made = cls.empty(data.nbytes)
        if data.nbytes:
            made.array(writable=True)[:] = data
        return made

    @property
    def path(self) -> str:
        """Path under which other processes of this user can open the bytes while this process has them."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def array(self, *, writable: bool = False) -> Bytes:
        """Map the bytes into this process, which must have written some."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE * writable
        pages = Pages(self.descriptor, self.size, prot=protection)
        pages.memory = self
        return np.frombuffer(pages, np.uint8)


class Records(Mapped):
    """Pickled values in shared memory, whose arrays are read in place.

    index       number of further parts, and the size of each, as int64
    parts       the pickle, and the bytes of each array
    """

    @classmethod
    def of_values(cls, values: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> Records:
        parts = parts_of(values, pickler)
        index = np.array([len(parts), *(part.nbytes for part in parts)], np.int64)
        *starts, size = aligned_starts([index.nbytes, *index[1:]])
        made = cls.empty(size)
        for start, part in zip(starts, [memoryview(index.data).cast("B"), *parts], strict=True):
            while part:  # a call writes at most 2 GiB
                written = os.pwrite(made.descriptor, part, start)
                start, part = start + written, part[written:]
        return made

    def values(self) -> Any:
        """Return the values; their arrays use this memory as long as they live, and see no change of it."""
        pages = memoryview(mmap.mmap(self.descriptor, self.size, access=mmap.ACCESS_COPY))
        count = 1 + int(np.frombuffer(pages, np.int64, 1)[0])
        index = np.frombuffer(pages, np.int64, count)
        starts = aligned_starts([index.nbytes, *index[1:]])
        head, *buffers = (pages[start : start + size] for start, size in zip(starts[1:], index[1:], strict=False))
        return pickle.loads(head, buffers=buffers)


def parts_of(values: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> list[memoryview]:
    """Return the pickle of values, and the bytes of each of their arrays, which are not copied."""
    buffers, head = list[pickle.PickleBuffer](), io.BytesIO()
    pickler(head, protocol=5, buffer_callback=buffers.append).dump(values)
    return [head.getbuffer(), *(buffer.raw() for buffer in buffers)]


def aligned_starts(sizes: Sequence[int]) -> list[int]:
    """Return the start of each part at a multiple of ALIGNMENT, and the end of all."""
    starts: list[int] = np.cumsum([0, *(-size % ALIGNMENT + size for size in sizes)]).tolist()
    return starts


class Pages(mmap.mmap):
    """Mapped bytes, which know their memory."""

    memory: Mapped


def memory_of(data: Bytes) -> Mapped | None:
    """Return the shared memory whose bytes, all of them, an array is; None for other arrays."""
    base = data.base.obj if isinstance(data.base, memoryview) else None
    return base.memory if isinstance(base, Pages) and data.nbytes == base.memory.size else None


def empty(size: int) -> Bytes:
    """Return an array in shared memory; its values are zero."""
    return Mapped.empty(size).array(writable=True) if size else np.empty(0, np.uint8)
