"""Anonymous shared memory: bytes that one process writes and others map, without a file or a name.

The learner exports weights into it, so that they travel to other processes of the machine without a further copy.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Mapped:
    """Bytes in anonymous shared memory, readable without a copy, and freed when no process uses them."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def empty(cls, size: int) -> Mapped:
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
