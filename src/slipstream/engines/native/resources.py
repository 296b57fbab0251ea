"""Threads on which native engines compute, and host memory for tensors of an engine that waits.

PyTorch starts CPU threads for each thread that computes in parallel. OpenMP puts them to sleep after every operation
as soon as all of them together outnumber the CPUs, and waking them can cost more than the operation. So engines that
never work at once share one thread.

Memory that was freed and allocated again has new pages, which the system zeroes at the first access. On virtual
machines this can take longer than the work on the memory. So an engine's process keeps what it frees.

An engine has two memory spaces: the device for its tensors while it works, and host memory while it waits. On a CPU
both are host memory. The same code moves the values, so that tests need no GPU.
"""

import asyncio
import ctypes
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from slipstream.engines.weights import local

SHARED_THREAD: ContextVar[ThreadPoolExecutor | None] = ContextVar("thread", default=None)
"""Thread of the engines that are built in this context; None: each engine has its own."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Options of glibc's `mallopt`: its malloc.h has the numbers."""
KEPT, ALL = 2**30, 2**31 - 1
"""Bytes of the largest tensor whose memory is kept, and the largest number of bytes that `mallopt` takes."""


def compute_thread(name: str, threads: int) -> ThreadPoolExecutor:
    """Return an executor with one thread, on which operations use this number of CPU threads."""
    keep_freed_memory()
    return SHARED_THREAD.get() or ThreadPoolExecutor(1, name, initializer=torch.set_num_threads, initargs=(threads,))


@cache
def keep_freed_memory() -> None:
    """Let glibc reuse the memory of tensors, instead of returning it to the system."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries do not have it
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, KEPT)
        set_option(M_TRIM_THRESHOLD, ALL)
        set_option(M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return all free pages to the system now, after a large tensor that nothing will replace."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def one_thread(threads: int) -> Iterator[None]:
    """Give one thread to all engines that are built in this context."""
    token = SHARED_THREAD.set(compute_thread("engines", threads))
    try:
        yield
    finally:
        SHARED_THREAD.reset(token)


HOST = torch.device("cpu")


class Spaces:
    def __init__(self) -> None:
        self.offloaded: list[tuple[UntypedStorage, UntypedStorage]] = []
        """Storages that are empty on their device, each with the copy in host memory that has its values."""

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        """Move these tensors to host memory, with all tensors that share their storage; skip those that are there.

        If this or `to_device` fails, no value is lost, and a second call continues.
        """
        for tensor in tensors:
            if not local(tensor).untyped_storage().resizable():  # it maps a file
                tensor.data = tensor.detach().clone()
            if (storage := local(tensor).untyped_storage()).nbytes():
                copy: UntypedStorage = UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
                self.offloaded.append((storage, copy.copy_(storage)))
                storage.resize_(0)
        torch.cuda.empty_cache()  # else the next engine gets memory in pieces of the sizes of this one

    def to_device(self) -> None:
        while self.offloaded:
            storage, copy = self.offloaded[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self.offloaded.pop()


class Offloading:
    """Base of engines whose tensors can wait in host memory while another engine uses their device."""

    thread: ThreadPoolExecutor
    """Thread of the engine. Tensors move on it, so never during the engine's work."""
    turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Context in which the engine may use a device that it shares with others."""

    @cached_property
    def spaces(self) -> Spaces:
        return Spaces()

    def on_device(self) -> Iterable[Tensor]:
        """Return the tensors on the device that the engine needs later; drop those that it can make anew."""
        raise NotImplementedError

    def move_to_host(self) -> None:
        self.spaces.to_host(self.on_device())

    async def offload(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self.thread, self.move_to_host)

    async def reload(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self.thread, self.spaces.to_device)


def keep_on_host(width: int) -> AbstractContextManager[Any]:
    """Keep hidden states, which have `width` columns, in host memory from this context until the backward pass.

    With recomputation these are the inputs of all layers.
    """

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        hidden = tensor.dim() > 1 and tensor.shape[-1] == width and not isinstance(tensor, nn.Parameter)
        return (tensor.device, copied(tensor, HOST)) if hidden else tensor

    def unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else copied(kept[1], kept[0])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True)
