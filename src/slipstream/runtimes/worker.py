"""The processes of the local runtime: one for each engine, and the nursery, from which they are forked.

The nursery imports what all engines need, once, and computes nothing: when it forks there is no thread, no GPU and no
lock in it that a copy could be left with. It sleeps while engines work, hears when one dies, and is the parent of
whatever they leave behind. It ends with the coordinator, however that ends, and takes all of them along; should it be
killed itself, the kernel kills them.

On macOS, whose frameworks do not survive a fork, engines are started afresh.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle
from pathlib import Path
from socket import socket
from typing import Any

from slipstream.linux import LINUX, adopt_orphans, be_called, die_with_parent, wake_with_parent
from slipstream.runtimes.channel import Channel, Mapped, Packed, Parcel
from slipstream.runtimes.exchange import Answer, Body, Call, Host, failed, renamed

GRACE = 5.0
"""Seconds in which what killed engines leave behind ends by itself: graders."""


@dataclass(frozen=True, slots=True)
class Birth:
    """What an engine's process is told before it is anything."""

    name: str
    threads: int
    directory: str
    gpus: str | None
    """CUDA_VISIBLE_DEVICES; none leaves it as it is."""


GPUS = "gpus"
"""What the nursery is asked for the names of all."""


# --- the nursery ------------------------------------------------------------------------------------------------------


def nurse(control: Connection) -> None:
    """Answer the coordinator until it is gone: a `Birth`, and a socket, by a pid; a pid by how that process ended;
    `GPUS` by their names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):  # what the command line heeds is not for us
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    engines: dict[int, BaseProcess] = {}
    be_called("nursery")
    adopt_orphans()
    wake_with_parent()
    if LINUX:
        signal.signal(signal.SIGCHLD, lambda *_: reap(engines))
        gc.disable()  # all of it stays; collections would be a fifth of what this costs
        import slipstream.runtimes.build  # noqa: F401
    gc.freeze()  # no collection of a child need look through this again, and its pages stay shared
    gc.enable()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            match control.recv():
                case int(pid):
                    engine = engines[pid]
                    engine.kill()  # it may only have stopped listening
                    engine.join()
                    del engines[pid]  # not before: `reap` would take it for something that was left behind
                    control.send(engine.exitcode)
                case str():  # GPUS
                    control.send(visible_gpus())
                case birth:
                    theirs = socket(fileno=recv_handle(control))
                    control.send(fork(birth, theirs, control, engines))
                    theirs.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for engine in engines.values():
        engine.kill()
    wait_for_all()


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them. Counting them wakes none."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def fork(birth: Birth, theirs: socket, control: Connection, engines: dict[int, BaseProcess]) -> int:
    make = multiprocessing.get_context("fork").Process if LINUX else multiprocessing.get_context("spawn").Process
    engine = make(target=work, args=(birth, theirs, control, os.getpid()), name=birth.name)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # it may end before we know its name
    engine.start()
    assert engine.pid is not None
    engines[engine.pid] = engine
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    return engine.pid


def reap(engines: dict[int, BaseProcess]) -> None:
    """How an engine ended is kept for who asks; of what engines left behind, nobody will."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if engine := engines.get(ended.si_pid):
                engine.join()
            else:
                os.waitpid(ended.si_pid, 0)


def wait_for_all() -> None:
    """Until this process has no child; those that are late are killed."""
    until = time.monotonic() + GRACE
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
            if LINUX and time.monotonic() > until:
                for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)


# --- an engine --------------------------------------------------------------------------------------------------------


def work(birth: Birth, ours: socket, control: Connection, nursery: int) -> None:
    """Build an engine and serve it until the coordinator hangs up."""
    control.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    be_called(birth.name)
    die_with_parent()
    if LINUX and os.getppid() != nursery:
        return
    os.setsid()  # Linux shares cores out by session first: engines get what as many programs would
    os.environ |= {"OMP_NUM_THREADS": str(birth.threads)}
    if birth.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = birth.gpus
    os.chdir(birth.directory)  # relative paths in a config mean the same here
    import torch

    torch.set_num_threads(birth.threads)
    asyncio.run(serve(birth.name, ours))


async def serve(name: str, ours: socket) -> None:
    def heard(call: Call, parcels: list[Parcel]) -> None:
        try:
            bodies = [opened(parcel) for parcel in parcels]
            host.accept(renamed(call, lambda body: found(bodies, body)))
        except Exception as error:  # whatever unpickling raises is the caller's to hear
            tell(failed(call.id, error), [])

    def tell(answer: Answer, parcels: list[Parcel]) -> None:
        try:
            channel.send(answer, parcels)
        except Exception as error:  # whatever pickling raises, too
            channel.send(failed(answer.id, error))

    host, channel, hung_up = Host(name, tell, packed), Channel(ours, heard), asyncio.Event()
    channel.attach(hung_up.set)
    await hung_up.wait()
    await host.close()
    channel.close()


async def packed(bodies: Sequence[Any]) -> list[Parcel]:
    """Weights into memory that all may read, beside the loop, which goes on; records together."""
    import numpy as np

    match bodies:
        case []:
            return []
        case [np.ndarray() as weights]:
            return [await asyncio.to_thread(Mapped.of, weights.data)]
        case _:
            return [Packed(pickle.dumps(bodies, protocol=5))]


def opened(parcel: Parcel) -> Any:
    import numpy as np

    match parcel:
        case Mapped():
            return [np.frombuffer(parcel.read_only(), np.uint8)]
        case Packed(data):
            return pickle.loads(data)


def found(bodies: Sequence[Any], body: Body) -> Any:
    return bodies[body.bundle][body.index]


if __name__ == "__main__":
    nurse(Connection(int(sys.argv[1])))
    os._exit(0)  # libraries that were only imported have nothing to say at the end
