"""Commands as processes of their own, and what is left of each when it has ended: `python coordinators.py`.

Every line that comes is a command, as JSON; it is forked from here, where everything is imported, and its pid is
answered; one that begins with `nohup` does not hear of its terminal's end. An empty line waits for it: the answer is
its exit status (of a signal: negative), and the names of all that it has left. Whatever loses its parent becomes a
child of this process, so nothing can hide.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from slipstream.cli import main

LATE = 30.0


def run(argv: list[str]) -> NoReturn:
    os.setsid()
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    if argv[0] == "nohup":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        del argv[0]
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


# --- who asks for them ------------------------------------------------------------------------------------------------


class Coordinators:
    def __init__(self, home: Path) -> None:
        self.home, self.temporary = home, home / "temporary"
        self.temporary.mkdir()
        command = [sys.executable, __file__]
        environment = os.environ | {"TMPDIR": str(self.temporary), "HOME": str(home)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=home, env=environment, stdin=pipe, stdout=pipe, text=True)

    def ask(self, line: str) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def begin(self, *command: str) -> int:
        return int(self.ask(json.dumps(command)))

    def train(self, *changes: str) -> int:
        subprocess.run(["rm", "-rf", str(self.home / "run")], check=True)
        return self.begin("train", "run.toml", "--skip-checks", *changes)

    def resume(self) -> int:
        return self.begin("resume", "run")

    def trains(self, *changes: str) -> int:
        """A run that has begun."""
        coordinator, until = self.train(*changes), time.monotonic() + 120
        while not (metrics := self.home / "run" / "metrics.jsonl").exists() or not metrics.read_text():
            assert time.monotonic() < until, self.output()
            time.sleep(0.02)
        return coordinator

    def running(self, *changes: str) -> dict[str, int]:
        """A run that has begun: its processes by their names."""
        coordinator = self.trains(*changes)
        (launcher,) = below(coordinator)
        engines = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in below(launcher)}
        (grader,) = below(engines["sampler"])
        return {"coordinator": coordinator, "launcher": launcher, **engines, "grader": grader}

    def end(self) -> int:
        """The exit status of the run; nothing is left of it."""
        status, left = self.ask("")
        assert not left, f"{', '.join(left)} of {self.output()}"
        assert not list(self.temporary.iterdir())
        return int(status)

    def output(self) -> str:
        return (self.home / "output").read_text()

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def below(pid: int) -> list[int]:
    """Whichever of its threads has started them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def open_files(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which we look
            found.add(str(link.readlink()))
    return found


def semaphores(pid: int) -> set[str]:
    """Files in shared memory that a process has mapped."""
    words = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {line[5] for line in words if len(line) > 5 and line[5].startswith("/dev/shm/")}


if __name__ == "__main__":
    gc.disable()  # all that is loaded stays: no collection need look through it, neither now nor in a fork
    import slipstream.runs.start
    import slipstream.runtimes.build  # noqa: F401
    from slipstream.processes import adopt_orphans

    gc.enable()
    gc.freeze()
    adopt_orphans()
    pid = 0
    for line in sys.stdin:
        if line.strip():
            pid = os.fork() or run(json.loads(line))
            answer: object = pid
        else:
            status, pid = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0
            answer = status, left()
        print(json.dumps(answer), flush=True)
    if pid:  # whoever asked has failed
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # libraries that were only imported have nothing to say at the end
