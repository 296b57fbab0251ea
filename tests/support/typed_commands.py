"""Commands as a person types them, each in a process of its own: `python typed.py`.

Every line that comes is a command, as JSON; it is forked from here, where everything that it may import is imported
(`--bare`: next to nothing), and ends as a program ends. The answer is its exit status, what it wrote to its two
outputs, whether it imported torch, and the names of all processes that it left. Whatever loses its parent becomes a
child of this process, so nothing can hide.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from slipstream.cli import ENVIRONMENT, main

LIMIT = 60
"""Seconds after which a command hangs."""


@dataclass(frozen=True)
class Outcome:
    code: int
    """Negative: it was killed by this signal; by SIGALRM, because it hung."""
    out: str
    err: str
    torch: bool
    """It was imported."""
    left: Sequence[str]
    """Processes."""


class Typed:
    """Type commands one after the other, each at a prompt."""

    def __init__(self, *options: str) -> None:
        pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, __file__, *options]
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def begin(self, argv: Sequence[str], home: Path, environment: Mapping[str, str]) -> int:
        """Its pid."""
        return int(self._ask([argv, str(home), dict(environment)]))

    def end(self) -> Outcome:
        return Outcome(**self._ask([]))

    def __call__(self, argv: Sequence[str], home: Path, environment: Mapping[str, str]) -> Outcome:
        self.begin(argv, home, environment)
        return self.end()

    def _ask(self, what: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


# --- the process ------------------------------------------------------------------------------------------------------


def run(files: Sequence[IO[bytes]], argv: list[str], home: str, environment: dict[str, str]) -> NoReturn:
    os.setsid()
    signal.alarm(LIMIT)
    os.chdir(home)
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out, err, known = files
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    try:
        code = main(argv)
    except SystemExit as end:  # of argparse, after --help
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os.write(known.fileno(), b"torch" if "torch" in sys.modules else b"")
    os._exit(code)


def whole(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def serve() -> None:
    pid, files = 0, list[IO[bytes]]()
    for line in sys.stdin:
        if asked := json.loads(line):
            files = [tempfile.TemporaryFile() for _ in ("out", "err", "known")]  # noqa: SIM115
            pid = os.fork() or run(files, *asked)
            answer: Any = pid
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            remains = left()  # first: it may still write
            out, err, known = map(whole, files)
            answer = {"code": code, "out": out, "err": err, "torch": bool(known), "left": remains}
            for file in files:
                file.close()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    os.environ |= ENVIRONMENT | os.environ  # libraries read it as they are imported
    gc.disable()  # all that is loaded stays: no collection need look through it, neither now nor in a fork
    import slipstream.commands.samples
    import slipstream.runs.start
    from slipstream.processes import adopt_orphans
    from support.coordinators import left

    assert "torch" not in sys.modules
    if "--bare" not in sys.argv:
        import datasets  # noqa: F401

        import slipstream.commands.doctor
        import slipstream.commands.evaluate
        import slipstream.data.prompts as prompts
        import slipstream.engines.http.client as client
        import slipstream.estimators.catalogue
        import slipstream.runtimes.inline  # noqa: F401

        prompts.BUILT_IN_ROWS = 400  # a config without a limit reads all of them
        client.REQUEST_PAUSES = ()  # nobody waits for an endpoint that is not there
    gc.enable()
    gc.freeze()
    adopt_orphans()
    serve()
    os._exit(0)  # libraries that were only imported have nothing to say at the end
