"""Commands as processes of their own, and what is left of each when it has ended: `python coordinators.py`.

Every line that comes is a command, as JSON; it is forked from here, where everything is imported, and its pid is
answered. An empty line waits for it: the answer is its exit status (of a signal: negative), and the names of all that
it has left. Whatever loses its parent becomes a child of this process, so nothing can hide.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from slipstream.cli import main

LATE = 10.0


def run(argv: list[str]) -> NoReturn:
    os.setsid()
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    code = main(argv)
    sys.stdout.flush()
    os._exit(code)


def left() -> list[str]:
    """Children that are still there when they have had their time."""
    until = time.monotonic() + LATE
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]
    return []


if __name__ == "__main__":
    import slipstream.commands.train  # noqa: F401
    from slipstream.runtimes.worker import PR_SET_CHILD_SUBREAPER, prctl

    prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = 0
    for line in sys.stdin:
        if line.strip():
            pid = os.fork() or run(json.loads(line))
            answer: object = pid
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            answer = status, left()
        print(json.dumps(answer), flush=True)
