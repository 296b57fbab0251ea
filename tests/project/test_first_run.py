"""docs/index.md as a person follows it: every file written, every command given, in their order, in one directory.

What is shown beneath a command must be among the lines that it prints; … stands for whatever is there.
"""

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.shell import Shell

PAGE = Path(__file__).parents[2] / "docs" / "index.md"
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = "8000"


@dataclass(frozen=True)
class Command:
    line: str
    shown: list[str]


def commands(block: str) -> Iterator[Command]:
    first, *others = block.replace("\\\n", " ").split("$ ")
    assert first == "", "it begins with a command"
    for part in others:
        line, *shown = part.splitlines()
        yield Command(line, shown)


def check(command: Command, printed: str) -> None:
    """The lines that are shown are there, in their order."""
    lines = iter(printed.splitlines())
    for shown in command.shown:
        pattern = ".*".join(map(re.escape, shown.split("…")))
        assert any(re.fullmatch(pattern, line) for line in lines), f"$ {command.line}\n{shown!r} is not in\n{printed}"


class Person:
    """Has two terminals: one for commands, and one for what goes on meanwhile."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.home, self.stack = home, stack
        self.shell = Shell(home)
        stack.callback(self.shell.close)

    def give(self, command: Command) -> None:
        words = shlex.split(command.line)
        if words[0] == "slipstream":
            self._shell(command, words[1:])
        elif words[-1] == "&":
            self._beside(command, [sys.executable if words[0] == "python" else words[0], *words[1:-1]])
        elif words[0] == "python":
            self._shell(command, words)
        else:
            done = subprocess.run(words, cwd=self.home, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            check(command, done.stdout)

    def _shell(self, command: Command, words: list[str]) -> None:
        outcome = self.shell(*words)
        refused = any(line.startswith("error:") for line in command.shown)
        assert outcome.code == (2 if refused else 0), outcome.err
        check(command, outcome.out + outcome.err)

    def _beside(self, command: Command, words: list[str]) -> None:
        """Until the end. It is ready when it has said what is shown."""
        process = self.stack.enter_context(
            subprocess.Popen(words, cwd=self.home, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
        self.stack.callback(process.kill)
        assert process.stdout
        check(command, "".join(process.stdout.readline() for _ in command.shown))


@pytest.mark.processes
def test_ten_steps_from_a_file_to_a_student(tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8").replace(PORT, str(free_port()))
    assert re.findall(r"^### (\d+)\.", page, re.MULTILINE) == [str(number) for number in range(1, 11)]
    with ExitStack() as stack:
        person = Person(tmp_path, stack)
        for kind, name, text in FENCE.findall(page):
            if name:
                (tmp_path / name).write_text(text)
            else:
                assert kind == "console", "a block is a file with a name, or commands"
                for command in commands(text):
                    person.give(command)


def test_every_page_is_listed() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)", PAGE.read_text("utf-8").partition("\n## ")[0]))
    assert linked == {path.name for path in PAGE.parent.glob("*.md")} - {PAGE.name}


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port: int = it.getsockname()[1]
        return port
