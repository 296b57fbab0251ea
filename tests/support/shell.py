"""The command line in a real process that has everything imported: what a command costs is what it does.

So do scripts: `python FILE`.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# every line is one command; what each writes to its two outputs is caught at the file descriptors
SHELL = """
import json, os, runpy, sys, tempfile
from slipstream.cli import main

def work(argv):
    if argv[:1] != ["python"]:
        return main(argv)
    runpy.run_path(argv[1], run_name="__main__")
    return 0

def run(argv):
    saved, files = [os.dup(1), os.dup(2)], [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
    for descriptor, file in zip((1, 2), files):
        os.dup2(file.fileno(), descriptor)
    try:
        try:
            code = work(argv)
        except SystemExit as exit:
            code = exit.code
        sys.stdout.flush(), sys.stderr.flush()
    finally:
        for descriptor, copy in zip((1, 2), saved):
            os.dup2(copy, descriptor)
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read().decode())
    return code, *texts

if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line))) + "\\n")
        sys.stdout.flush()
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    written: list[str]
    """Files that are new."""


class Shell:
    """One real process, so that torch is loaded once, that runs commands in a directory of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "shell.py").write_text(SHELL)
        self.process = subprocess.Popen(
            [sys.executable, "shell.py"], cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def files(self) -> set[str]:
        return {str(path.relative_to(self.home)) for path in self.home.rglob("*")}

    def __call__(self, *argv: str) -> Outcome:
        assert self.process.stdin and self.process.stdout
        before = self.files()
        self.process.stdin.write(json.dumps(argv) + "\n")
        self.process.stdin.flush()
        code, out, err = json.loads(self.process.stdout.readline())
        return Outcome(code, out, err, sorted(self.files() - before))

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
