"""`slipstream watch` on a terminal: it takes all of it, follows its size, and gives it back however it ends."""

import fcntl
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.config.schedule import Async
from support.toy_runs import go

ENTERED, LEFT, CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
PATIENCE = 60.0
PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from slipstream.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    def __init__(self, home: Path, *words: str, columns: int, lines: int) -> None:
        self.ours, self.theirs = pty.openpty()
        self.seen = b""
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=home,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, *parts: bytes) -> bytes:
        """Return the output up to the place where all of these occurred, one after the other."""
        while (end := self._after(parts)) < 0:
            ready, _, _ = select.select([self.ours], [], [], PATIENCE)
            assert ready, f"no {parts} in {self.seen!r}"
            self.seen += os.read(self.ours, 1 << 16)
        found, self.seen = self.seen[:end], self.seen[end:]
        return found

    def _after(self, parts: tuple[bytes, ...]) -> int:
        end = 0
        for part in parts:
            at = self.seen.find(part, end)
            if at < 0:
                return -1
            end = at + len(part)
        return end

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    @property
    def clean(self) -> bool:
        return termios.tcgetattr(self.theirs) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    go(path, Async(), updates=6, every=90)
    return path


@pytest.fixture
def terminal(finished: Path, tmp_path: Path) -> Iterator[Terminal]:
    """On which a run is watched, in a small window."""
    shutil.copytree(finished, tmp_path / "run")
    terminal = Terminal(tmp_path, "watch", "run", columns=60, lines=15)
    terminal.until(ENTERED, b"update 6/6", b"finished", b"q quit")
    yield terminal
    terminal.close()


def test_keys_are_heard_sizes_are_followed_and_q_gives_the_terminal_back(terminal: Terminal) -> None:
    assert not terminal.clean
    terminal.type(b"n")
    terminal.until(b"held", b"space continue")
    terminal.resize(100, 30)
    drawn = terminal.until("━".encode(), b"gradient norm", "██".encode(), b"q quit").decode()
    assert LEFT.decode() not in drawn
    terminal.type(b"q")
    terminal.until(CURSOR, LEFT)
    assert terminal.process.wait(PATIENCE) == 0
    assert terminal.clean


@pytest.mark.parametrize("how, code, said", [(b"\x03", 130, b"interrupted"), (b"\x1c", 130, b"interrupted")])
def test_interrupted_it_gives_the_terminal_back(terminal: Terminal, how: bytes, code: int, said: bytes) -> None:
    """By Ctrl-C and by Ctrl-\\."""
    terminal.type(how)
    terminal.until(CURSOR, LEFT, said)
    assert terminal.process.wait(PATIENCE) == code
    assert terminal.clean


def test_an_error_gives_the_terminal_back_and_is_said_below(terminal: Terminal, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "run")
    terminal.until(CURSOR, LEFT, b"error: run/config.toml cannot be read any more: No such file or directory")
    assert terminal.process.wait(PATIENCE) == 2
    assert terminal.clean


def test_stopped_by_ctrl_z_it_gives_the_terminal_back_until_it_goes_on(terminal: Terminal) -> None:
    terminal.process.send_signal(signal.SIGTSTP)  # Ctrl-Z, where no shell looks after jobs
    terminal.until(CURSOR, LEFT)
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and terminal.clean
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until(ENTERED, b"q quit")
    assert not terminal.clean
    terminal.type(b"q")
    terminal.until(LEFT)
    assert terminal.process.wait(PATIENCE) == 0 and terminal.clean
