"""Jobs in processes of their own, so many at a time: whatever ends one ends nothing else, and is named.

They are forked from a process that has imported what all of them need, which takes seconds (on macOS, whose frameworks
do not survive a fork, each is started afresh). What a job prints is in its log. However this process ends, so do they.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import EngineError, SlipstreamError, first_line
from slipstream.linux import LINUX, be_called

TICK = 0.5
"""Seconds after which whoever looks at the jobs is told that nothing has happened."""
TRIES = 20
"""To fork from a process that was killed, a tick apart, until another has taken its place."""
UNKNOWN = 255
"""What multiprocessing takes for the exit status of a process that may still be there, but whose parent is not."""
LOOK = 2.0
"""Seconds after which a job looks whether anybody waits for it."""
GRACE = 10.0
"""Seconds in which a job that is told to stop may do so in order."""
Tell = Callable[[Any], None]


@dataclass(frozen=True)
class Job:
    name: str
    work: Callable[[Tell], Any]
    """What it does, told how to say how far it is; what it returns is its result. All of it can be pickled."""
    log: Path
    patience: float
    """Seconds without a word after which it hangs."""
    key: Any = None
    """What it is to whoever wants it done."""


@dataclass(frozen=True)
class Event:
    job: Job
    kind: Literal["begun", "moved", "done", "failed"]
    told: Any = None
    """How far it is, its result, or what went wrong, in a line."""
    seconds: float = 0.0


@dataclass
class Running:
    job: Job
    process: BaseProcess
    heard: Connection
    began: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)
    """When it was heard of."""
    end: Event | None = None
    mute: bool = False
    """It has closed its end of the connection."""

    def listen(self) -> Iterator[Event]:
        try:
            while not self.mute and self.heard.poll():
                kind, told = self.heard.recv()
                self.last = time.monotonic()
                event = Event(self.job, kind, told, self.last - self.began)
                if kind == "moved":
                    yield event
                else:
                    self.end = event
        except (EOFError, ConnectionError):
            self.mute = True

    def ended(self) -> Event:
        """How, once its process is gone: what it said itself, or what the system says of it."""
        self.process.join()
        self.heard.close()
        code = self.process.exitcode
        if code == UNKNOWN:
            self.stop(signal.SIGKILL)
        self.process.close()
        return self.end or self.fail(f"its process ended by itself: {how(code)}")

    def fail(self, why: str) -> Event:
        self.end = Event(self.job, "failed", why, time.monotonic() - self.began)
        return self.end

    def stop(self, number: int) -> None:
        """With all that was started in it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, number) if self.alone() else os.kill(self.process.pid or 0, number)

    def alone(self) -> bool:
        """In a session of its own, as it is once it has begun."""
        with suppress(ProcessLookupError):
            return os.getpgid(self.process.pid or 0) == self.process.pid
        return False

    def hangs(self) -> bool:
        return self.end is None and time.monotonic() - self.last > self.job.patience


def how(code: int | None) -> str:
    if code == UNKNOWN:
        return "the process from which it was forked is gone"
    if code is None or code >= 0:
        return f"exit status {code}"
    hint = ", as the kernel does where memory runs out" if -code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


def run(jobs: Iterable[Job], at_a_time: int, *, preload: Sequence[str]) -> Generator[Event | None, None, None]:
    """All of them, in their order, each made when its turn comes; an event that is none says that time has passed. Who
    stops listening stops them."""
    make = multiprocessing.get_context("forkserver" if LINUX else "spawn")
    if LINUX:
        make.set_forkserver_preload(list(preload))
    waiting, running = iter(jobs), list[Running]()
    try:
        while True:
            while len(running) < at_a_time and (job := next(waiting, None)) is not None:
                running.append(begun(job, make))
                yield Event(job, "begun")
            if not running:
                return
            wait([each.process.sentinel for each in running] + [each.heard for each in running if not each.mute], TICK)
            for each in list(running):
                over = not each.process.is_alive()  # before its last words are read
                yield from each.listen()
                if over:
                    running.remove(each)
                    yield each.ended()
                elif each.hangs():
                    each.fail(f"it hung: nothing was heard of it for {each.job.patience:.0f} s")
                    each.stop(signal.SIGKILL)
            yield None
    finally:
        stop(running)


def stop(running: Sequence[Running]) -> None:
    """At the same time; those that are late are killed."""
    for each in running:
        each.stop(signal.SIGTERM)
    until = time.monotonic() + GRACE
    for each in running:
        each.process.join(max(0.0, until - time.monotonic()))
        each.stop(signal.SIGKILL)
        each.ended()


def begun(job: Job, make: Any) -> Running:
    heard, theirs = make.Pipe(duplex=False)
    process = make.Process(target=live, args=(job, theirs), name=job.name, daemon=False)
    started(process)
    theirs.close()
    return Running(job, process, heard)


def started(process: Any) -> None:
    """The process from which it is forked begins anew if it was killed, as soon as it is seen to be gone."""
    for _ in range(TRIES):
        try:
            process.start()
            return
        except (ConnectionError, EOFError) as error:
            died = error
            time.sleep(TICK)
    raise EngineError(f"{process.name}: no process can be started: {first_line(died)}")


# --- in its process ---------------------------------------------------------------------------------------------------


def live(job: Job, tell: Connection) -> None:
    os.setsid()  # what a terminal sends goes to whoever began it
    be_called("cell")
    end_with_parent()
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 0
    try:
        tell.send(("done", job.work(lambda told: tell.send(("moved", told)))))
    except SlipstreamError as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        tell.send(("failed", " ".join(str(error).splitlines())))
        code = 2
    except BaseException as error:
        traceback.print_exc()
        tell.send(("failed", f"{type(error).__name__}: {first_line(error)}"))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # libraries that were imported have nothing to say at the end


def end_with_parent() -> None:
    """However that ends: the process from which this one is forked lives as long as this one, and no other thread may
    be here, from which the engines of a run are forked in turn."""

    def look(*_: object) -> None:
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
