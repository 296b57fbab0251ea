"""Processes of the local runtime: one per engine, and the process launcher that forks them.

The launcher imports once what all engines need, and computes nothing. When it forks, it holds no thread, GPU or lock,
which would be broken in a copy. It never calls CUDA, not even to count GPUs: its forks could not use CUDA any more.
Libraries count GPUs while they are imported, so where only CUDA can count them, engines import by themselves.

It sleeps while engines work, notices dead engines, and adopts processes that engines leave behind. It ends when the
coordinator ends, and then ends all engines. If it is killed, the kernel kills engines.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle
from socket import socket
from typing import Any

from slipstream import processes
from slipstream.engines.shared_memory import Mapped, Records
from slipstream.errors import EngineError
from slipstream.runtimes.channel import Channel
from slipstream.runtimes.exchange import Answer, Call, EngineServer, failure_of, map_references


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings of an engine's process, which apply before the engine is built."""

    name: str
    threads: int
    directory: str
    gpus: str | None
    """Value of CUDA_VISIBLE_DEVICES; None leaves the variable unchanged."""


LIST_GPUS = "gpus"
"""Request to the launcher for the names of all GPUs."""


# --- the process launcher ---------------------------------------------------------------------------------------------


def run_launcher(control: Connection) -> None:
    """Serve requests: settings fork an engine, a pid kills one and returns its exit code, `LIST_GPUS` lists GPUs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):  # drop the handlers of the command line
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    engines: dict[int, BaseProcess] = {}
    processes.set_process_name("launcher")
    processes.adopt_orphans()
    processes.wake_with_parent()
    signal.signal(signal.SIGCHLD, lambda *_: reap(engines))
    if counts_without_cuda():
        import_for_engines()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            match control.recv():
                case int(pid):
                    engine = engines[pid]
                    engine.kill()  # the process may still run although its socket is closed
                    engine.join()
                    del engines[pid]  # only now: `reap` would treat it as an orphan
                    control.send(engine.exitcode)
                case str():  # LIST_GPUS
                    control.send(visible_gpus())
                case settings:
                    theirs = socket(fileno=recv_handle(control))
                    control.send(fork(settings, theirs, control, engines))
                    theirs.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for engine in engines.values():
        engine.kill()
    wait_for_all()


def import_for_engines() -> None:
    gc.disable()  # imported objects stay; collections would take a fifth of the import time
    import transformers.processing_utils  # noqa: F401  # the files of all models import it

    import slipstream.runtimes.build  # noqa: F401

    gc.freeze()  # collections in children skip these objects, so their memory pages stay shared
    gc.enable()


def counts_without_cuda() -> bool:
    """Return True if torch counts GPUs by NVML, or has no CUDA; False without NVML, for parts of GPUs (MIG) and AMD."""
    from torch import cuda

    return not cuda._is_compiled() or cuda._device_count_nvml() >= 0


def count_gpus() -> int:
    """Return the number of GPUs; where only CUDA can count them, a child counts."""
    from torch import cuda

    if counts_without_cuda():
        return cuda.device_count()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(cuda.device_count()))
    child.start()
    theirs.close()
    try:
        return int(ours.recv())
    except EOFError:
        raise EngineError("torch cannot count the GPUs: the process that asked CUDA for their number died") from None


def visible_gpus() -> list[str]:
    """Return GPU names as CUDA_VISIBLE_DEVICES lists them."""
    count = count_gpus()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def fork(settings: ProcessSettings, theirs: socket, control: Connection, engines: dict[int, BaseProcess]) -> int:
    args = settings, theirs, control, os.getpid()
    engine = multiprocessing.get_context("fork").Process(target=work, args=args, name=settings.name)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # it may end before it is in `engines`
    engine.start()
    assert engine.pid is not None
    engines[engine.pid] = engine
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    return engine.pid


def reap(engines: dict[int, BaseProcess]) -> None:
    """Collect ended children. The exit codes of engines are kept for the coordinator, those of orphans are not."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if engine := engines.get(ended.si_pid):
                engine.join()
            else:
                os.waitpid(ended.si_pid, 0)


def wait_for_all() -> None:
    """Wait for the processes that killed engines leave behind, such as graders; kill those that do not end."""
    until = time.monotonic() + processes.GRACE
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
            if time.monotonic() > until:
                for pid in processes.children(os.getpid()):
                    processes.kill(pid)


# --- an engine --------------------------------------------------------------------------------------------------------


def work(settings: ProcessSettings, ours: socket, control: Connection, launcher: int) -> None:
    """Build an engine and serve it until the coordinator closes the connection."""
    control.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    processes.set_process_name(settings.name)
    processes.die_with_parent()
    if os.getppid() != launcher:
        return
    os.setsid()  # Linux divides cores between sessions first: each engine gets a full share
    os.environ |= {"OMP_NUM_THREADS": str(settings.threads)}
    if settings.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.gpus
    os.chdir(settings.directory)  # relative paths in a config must have the same meaning here
    import torch

    torch.set_num_threads(settings.threads)
    asyncio.run(serve(settings.name, ours))


async def serve(name: str, ours: socket) -> None:
    def on_call(call: Call, memories: list[Mapped]) -> None:
        try:
            bodies = [unpack(memory) for memory in memories]
            host.accept(map_references(call, lambda body: bodies[body.bundle][body.index]))
        except Exception as error:  # unpickling can raise any exception: return it to the caller
            send_answer(failure_of(call.id, error), [])

    def send_answer(answer: Answer, memories: list[Mapped]) -> None:
        try:
            channel.send(answer, memories)
        except Exception as error:  # the same for pickling
            channel.send(failure_of(answer.id, error))

    host, channel, hung_up = EngineServer(name, send_answer, pack), Channel(ours, on_call), asyncio.Event()
    channel.attach(hung_up.set)
    await hung_up.wait()
    await host.close()
    channel.close()


async def pack(bodies: Sequence[Any]) -> list[Mapped]:
    """Return weights or records in shared memory; a thread copies weights that are not there yet."""
    import numpy as np

    match bodies:
        case []:
            return []
        case [np.ndarray() as weights]:
            return [await asyncio.to_thread(Mapped.of, weights)]
        case _:
            return [Records.of_values(bodies)]


def unpack(memory: Mapped) -> Any:
    return memory.values() if isinstance(memory, Records) else [memory.array()]


if __name__ == "__main__":
    run_launcher(Connection(int(sys.argv[1])))
    os._exit(0)  # skip exit handlers of libraries that were only imported
