"""Jobs that run in separate processes, a fixed number in parallel; the failure of one job does not end other jobs.

Jobs are forked from a process that has already imported slow libraries. Output of a job goes to its log. All jobs end
when this process ends.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import EngineError, SlipstreamError, first_line
from slipstream.processes import GRACE, exit_text, kill, kill_group, set_process_name

TICK = 0.5
"""Longest time in seconds between two items that `run_jobs` yields."""
TRIES = 20
"""Number of attempts to start a process, TICK seconds apart, while multiprocessing replaces a killed forkserver."""
UNKNOWN_STATUS = 255
"""Exit status that multiprocessing reports if the forkserver is gone; the process itself may still be alive."""
LOOK = 2.0
"""Seconds between two checks by a job that its parent process is alive."""
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
    messages: Connection
    """Connection from the job; closed here when the job has closed its end."""
    began: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)
    """Time of the last message."""
    end: Event | None = None

    def receive(self) -> Iterator[Event]:
        try:
            while not self.messages.closed and self.messages.poll():
                kind, value = self.messages.recv()
                self.last = time.monotonic()
                event = Event(self.job, kind, value, self.last - self.began)
                if kind == "moved":
                    yield event
                else:
                    self.end = event
        except (EOFError, ConnectionError):
            self.messages.close()

    def ended(self) -> Event:
        """Wait for the process to end; return the event that the job sent last, or a failure with its exit status."""
        self.process.join()
        self.messages.close()
        code = self.process.exitcode or 0
        reason = exit_text(code)
        if code == UNKNOWN_STATUS:
            reason = "the process from which it was forked is gone"
            self.stop(signal.SIGKILL)
        elif code == -signal.SIGKILL:
            reason += ", as the kernel does if memory runs out"
        self.process.close()
        return self.end or self.fail(f"its process ended unexpectedly: {reason}")

    def fail(self, why: str) -> Event:
        self.end = Event(self.job, "failed", why, time.monotonic() - self.began)
        return self.end

    def stop(self, number: int) -> None:
        """Send a signal to the job and to all processes that it started."""
        assert self.process.pid is not None
        if not kill_group(self.process.pid, number):  # the job has not made its own session yet
            kill(self.process.pid, number)


def run_jobs(jobs: Iterable[Job], at_a_time: int, *, preload: Sequence[str]) -> Generator[Event | None, None, None]:
    """Run jobs in order, `at_a_time` in parallel, and yield their events; closing the generator stops all jobs.

    None is yielded after each check of all running jobs. A job is taken from `jobs` only when that job can start.
    """
    make = multiprocessing.get_context("forkserver")
    make.set_forkserver_preload(list(preload))
    waiting, running = iter(jobs), list[Running]()
    try:
        while True:
            while len(running) < at_a_time and (job := next(waiting, None)) is not None:
                running.append(start_job(job, make))
                yield Event(job, "begun")
            if not running:
                return
            open_ends = [one.messages for one in running if not one.messages.closed]
            wait([*(one.process.sentinel for one in running), *open_ends], TICK)
            for one in list(running):
                over = not one.process.is_alive()  # before its last messages are read, so that none is lost
                yield from one.receive()
                if over:
                    running.remove(one)
                    yield one.ended()
                elif one.end is None and time.monotonic() - one.last > one.job.patience:
                    one.fail(f"it hung: no message for {one.job.patience:.0f} s")
                    one.stop(signal.SIGKILL)
            yield None
    finally:
        for one in running:
            one.stop(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for one in running:
            one.process.join(max(0.0, deadline - time.monotonic()))
            one.stop(signal.SIGKILL)
            one.ended()


def start_job(job: Job, make: Any) -> Running:
    messages, job_end = make.Pipe(duplex=False)
    with job_end:
        process = make.Process(target=run_job, args=(job, job_end), name=job.name, daemon=False)
        for _ in range(TRIES):
            try:
                process.start()
                return Running(job, process, messages)
            except (ConnectionError, EOFError) as error:
                cause = error
                time.sleep(TICK)
    raise EngineError(f"{job.name}: no process can be started: {first_line(cause)}")


# --- in the process of a job ------------------------------------------------------------------------------------------


def run_job(job: Job, parent: Connection) -> None:
    os.setsid()  # signals of the terminal go to the parent only
    set_process_name("cell")
    end_with_parent()
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 0
    try:
        parent.send(("done", job.work(lambda progress: parent.send(("moved", progress)))))
    except SlipstreamError as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        parent.send(("failed", " ".join(str(error).splitlines())))
        code = 2
    except BaseException as error:
        traceback.print_exc()
        parent.send(("failed", f"{type(error).__name__}: {first_line(error)}"))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips exit handlers of libraries


def end_with_parent() -> None:
    """End this process soon after its parent process has ended for any reason.

    A timer signal is used instead of a thread, because engines are forked from this process. The parent-death signal
    does not serve, because the forkserver outlives the parent as long as any of its children lives.
    """

    def look(*_: object) -> None:
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)
