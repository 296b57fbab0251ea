"""`slipstream watch`: full-screen view of an active run; one frame as plain text if there is no terminal."""

import os
import select
import signal
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from slipstream.console import Screen
from slipstream.reporting.terminal.panel import page, screen
from slipstream.reporting.terminal.watch import Watched

LOOK_INTERVAL = 1.0
"""Seconds between two reads of the run's files."""
HELP_LINE = "q quit   n, p next, previous sample   space "


def run(args: Namespace) -> None:
    watch(args.directory, Screen(), once=args.once)


def watch(path: Path, console: Console, *, once: bool = False) -> None:
    watched = Watched(path)
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(Group(*page(watched.view(), console.width)))
        return
    while show_until_quit(watched, console):
        os.kill(os.getpid(), signal.SIGSTOP)  # until the shell's `fg`


def show_until_quit(watched: Watched, console: Console) -> bool:
    """Show the run until the user quits (return False) or presses Ctrl-Z (return True)."""
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with unbuffered_keys() as keyboard, wakeup_signals() as (wake, caught), live:
        looked = time.monotonic()
        while True:
            turns = "hold" if not watched.turning.paused else "continue"
            view = watched.view(HELP_LINE + turns if keyboard is not None else "")
            live.update(Group(*screen(view, *console.size)), refresh=True)
            left = max(0.0, looked + LOOK_INTERVAL - time.monotonic())
            ready, _, _ = select.select([wake, *([keyboard] if keyboard is not None else [])], [], [], left)
            if wake in ready:
                os.read(wake, 1024)
                if signal.SIGTSTP in caught:
                    return True
            if keyboard in ready and keyboard is not None:
                typed = os.read(keyboard, 1024)
                if not typed or handle_keys(typed, watched):
                    return False
            if time.monotonic() >= looked + LOOK_INTERVAL:
                watched.look()
                looked = time.monotonic()


def handle_keys(keys: bytes, watched: Watched) -> bool:
    """Handle pressed keys; return True if one of them is quit."""
    for key in keys.decode(errors="replace"):
        match key:
            case "q" | "Q":
                return True
            case "n":
                watched.turning.step(+1)
            case "p":
                watched.turning.step(-1)
            case " ":
                watched.turning.paused = not watched.turning.paused
    return False


# --- terminal modes, restored at the end ------------------------------------------------------------------------------


@contextmanager
def unbuffered_keys() -> Iterator[int | None]:
    """Yield a file descriptor that delivers every key at once without echo, or None if stdin is no terminal."""
    if not sys.stdin or not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield keyboard
    finally:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@contextmanager
def wakeup_signals() -> Iterator[tuple[int, set[int]]]:
    """Yield a descriptor, readable after SIGWINCH (resize) or SIGTSTP (Ctrl-Z), and the set of received signals."""
    caught = set[int]()
    wake, end = os.pipe()
    os.set_blocking(end, False)
    noted = (signal.SIGWINCH, signal.SIGTSTP)
    before = {number: signal.signal(number, lambda number, _: caught.add(number)) for number in noted}
    before[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, signal.default_int_handler)
    waker = signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    try:
        yield wake, caught
    finally:
        signal.set_wakeup_fd(waker)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(end)
