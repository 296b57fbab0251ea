"""Jobs that run in separate processes, a fixed number in parallel; the failure of one job does not end other jobs.

Jobs are forked from a process that has already imported slow libraries. On macOS, whose frameworks do not survive a
fork, each job starts a new interpreter. Output of a job goes to its log. All jobs end when this process ends.
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
"""Longest time in seconds between two items that `run` yields."""
TRIES = 20
"""Number of attempts to start a process, TICK seconds apart, while multiprocessing replaces a killed forkserver."""
UNKNOWN = 255
"""Exit status that multiprocessing reports if the forkserver is gone; the process itself may still be alive."""
LOOK = 2.0
"""Seconds between two checks by a job that its parent process is alive."""
GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL for a job that is stopped."""
Tell = Callable[[Any], None]


@dataclass(frozen=True)
class Job:
    name: str
    work: Callable[[Tell], Any]
    """Function to run; the argument is a function that reports progress. `work` and the result must be picklable."""
    log: Path
    patience: float
    """Seconds without a message after which the job counts as hanging."""
    key: Any = None
    """Any value that identifies the job for the caller."""


@dataclass(frozen=True)
class Event:
    job: Job
    kind: Literal["begun", "moved", "done", "failed"]
    value: Any = None
    """Progress for kind "moved", result of the job for "done", error in one line for "failed"."""
    seconds: float = 0.0


@dataclass
class Running:
    job: Job
    process: BaseProcess
    heard: Connection
    began: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)
    """Time of the last message."""
    end: Event | None = None
    mute: bool = False
    """True if the job has closed its end of the connection."""

    def listen(self) -> Iterator[Event]:
        try:
            while not self.mute and self.heard.poll():
                kind, value = self.heard.recv()
                self.last = time.monotonic()
                event = Event(self.job, kind, value, self.last - self.began)
                if kind == "moved":
                    yield event
                else:
                    self.end = event
        except (EOFError, ConnectionError):
            self.mute = True

    def ended(self) -> Event:
        """Wait for the process to end; return the event that the job sent last, or a failure with its exit status."""
        self.process.join()
        self.heard.close()
        code = self.process.exitcode
        if code == UNKNOWN:
            self.stop(signal.SIGKILL)
        self.process.close()
        return self.end or self.fail(f"its process ended unexpectedly: {exit_text(code)}")

    def fail(self, why: str) -> Event:
        self.end = Event(self.job, "failed", why, time.monotonic() - self.began)
        return self.end

    def stop(self, number: int) -> None:
        """Send a signal to the job and to all processes that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, number) if self.alone() else os.kill(self.process.pid or 0, number)

    def alone(self) -> bool:
        """Return True if the process leads its own session, as it does once it has begun."""
        with suppress(ProcessLookupError):
            return os.getpgid(self.process.pid or 0) == self.process.pid
        return False

    def hangs(self) -> bool:
        return self.end is None and time.monotonic() - self.last > self.job.patience


def exit_text(code: int | None) -> str:
    if code == UNKNOWN:
        return "the process from which it was forked is gone"
    if code is None or code >= 0:
        return f"exit status {code}"
    hint = ", as the kernel does if memory runs out" if -code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


def run(jobs: Iterable[Job], at_a_time: int, *, preload: Sequence[str]) -> Generator[Event | None, None, None]:
    """Run jobs in order, `at_a_time` in parallel, and yield their events; closing the generator stops all jobs.

    While jobs run, yields None at least every `TICK` seconds. A job is read from `jobs` only when it can start.
    """
    make = multiprocessing.get_context("forkserver" if LINUX else "spawn")
    if LINUX:
        make.set_forkserver_preload(list(preload))
    waiting, running = iter(jobs), list[Running]()
    try:
        while True:
            while len(running) < at_a_time and (job := next(waiting, None)) is not None:
                running.append(start_job(job, make))
                yield Event(job, "begun")
            if not running:
                return
            wait([each.process.sentinel for each in running] + [each.heard for each in running if not each.mute], TICK)
            for each in list(running):
                over = not each.process.is_alive()  # before its last messages are read, so that none is lost
                yield from each.listen()
                if over:
                    running.remove(each)
                    yield each.ended()
                elif each.hangs():
                    each.fail(f"it hung: no message for {each.job.patience:.0f} s")
                    each.stop(signal.SIGKILL)
            yield None
    finally:
        stop(running)


def stop(running: Sequence[Running]) -> None:
    """Send SIGTERM to all jobs, then SIGKILL to those that are still alive after `GRACE` seconds."""
    for each in running:
        each.stop(signal.SIGTERM)
    until = time.monotonic() + GRACE
    for each in running:
        each.process.join(max(0.0, until - time.monotonic()))
        each.stop(signal.SIGKILL)
        each.ended()


def start_job(job: Job, make: Any) -> Running:
    heard, theirs = make.Pipe(duplex=False)
    process = make.Process(target=run_job, args=(job, theirs), name=job.name, daemon=False)
    start_process(process)
    theirs.close()
    return Running(job, process, heard)


def start_process(process: Any) -> None:
    """Start a process, and retry if the forkserver was killed, until multiprocessing has replaced it."""
    for _ in range(TRIES):
        try:
            process.start()
            return
        except (ConnectionError, EOFError) as error:
            died = error
            time.sleep(TICK)
    raise EngineError(f"{process.name}: no process can be started: {first_line(died)}")


# --- in the process of a job ------------------------------------------------------------------------------------------


def run_job(job: Job, tell: Connection) -> None:
    os.setsid()  # signals of the terminal go to the parent only
    be_called("cell")
    end_with_parent()
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 0
    try:
        tell.send(("done", job.work(lambda progress: tell.send(("moved", progress)))))
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
    os._exit(code)  # skips exit handlers of libraries


def end_with_parent() -> None:
    """End this process soon after its parent process has ended for any reason.

    A timer signal is used instead of a thread, because engines are forked from this process.
    """

    def look(*_: object) -> None:
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
