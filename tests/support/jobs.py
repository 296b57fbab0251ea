"""Jobs that end in every way there is, for processes that import nothing else."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError
from slipstream.studies.cells import Event, Job, run_jobs


def counts(to: int, tell: Any) -> int:
    for number in range(to):
        tell(number)
    print("counted")
    return to


def refuses(tell: Any) -> None:
    raise ModelError("student: there is none")


def fails(tell: Any) -> None:
    raise KeyError("nobody")


def is_killed(tell: Any) -> None:
    tell("about to")
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(tell: Any) -> None:
    os._exit(3)


def hangs(tell: Any) -> None:
    """And heeds no request to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(os.getpid())
    time.sleep(1000)


def names_its_parent(tell: Any) -> None:
    tell((os.getpid(), os.getppid()))
    time.sleep(1000)


def waits(tell: Any) -> None:
    tell(os.getpid())
    time.sleep(1000)


def first(log: Path) -> None:
    """Says who waits, and is killed by whoever reads that."""
    for event in run_jobs([Job("waits", waits, log, 100.0)], 1, preload=()):
        if event is not None and event.kind == "moved":
            print(event.value, flush=True)


def orphaned(log: Path) -> None:
    """Kills what the first of two is forked from, and says how both end."""
    todo = [Job("orphan", names_its_parent, log, 100.0), Job("next", partial(counts, 1), log, 100.0)]
    for event in run_jobs(todo, 1, preload=()):
        match event:
            case Event(Job("orphan"), "moved", (pid, parent)):
                print(pid)
                os.kill(parent, signal.SIGKILL)
            case Event(_, "done" | "failed", told):
                print(told)


if __name__ == "__main__":
    {"first": first, "orphaned": orphaned}[sys.argv[1]](Path(sys.argv[2]))
