"""Threads on which native engines compute: one for each engine, or one for all engines that never work at once.

PyTorch starts CPU threads for each thread that computes in parallel. OpenMP puts them to sleep after every operation
as soon as all of them together outnumber the CPUs, and waking them can cost more than the operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch

SHARED: ContextVar[ThreadPoolExecutor | None] = ContextVar("thread", default=None)
"""Thread of the engines that are built in this context; None: each engine has its own."""


def compute_thread(name: str, threads: int) -> ThreadPoolExecutor:
    """Return an executor with one thread, on which operations use this number of CPU threads."""
    return SHARED.get() or ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(threads,))


@contextmanager
def one_thread(threads: int) -> Iterator[None]:
    """Give one thread to all engines that are built in this context."""
    token = SHARED.set(compute_thread("engines", threads))
    try:
        yield
    finally:
        SHARED.reset(token)
