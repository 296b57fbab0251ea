"""The command line: read the arguments by the table of commands, run the command, and report how it ended."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import slipstream
from slipstream.commands.common import note
from slipstream.commands.table import COMMANDS, Option
from slipstream.errors import ConfigError, HungUp, SlipstreamError, Terminated, did_you_mean
from slipstream.processes import leave_closed_terminal

COMMANDS_BY_NAME = {command.name: command for command in COMMANDS}
FLAGS = {"--help"}.union(*(command.flags for command in COMMANDS if command.takes))
"""Options of commands that take settings; every other argument of theirs that begins with -- is a setting."""
OVERRIDES = "--a.b VALUE overrides a setting, for example --learner.lr 1e-5; `slipstream config` lists all settings"

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
}
"""Defaults of environment variables: one thread, as engines set their own thread counts, and no library warnings."""
SIGNAL_NAMES: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGHUP: "hung up", signal.SIGTERM: "terminated"}
SIGNAL_OF: dict[type[BaseException], int] = {
    KeyboardInterrupt: signal.SIGINT,
    HungUp: signal.SIGHUP,
    Terminated: signal.SIGTERM,
}


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are a `ConfigError`, which is printed in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    os.environ |= ENVIRONMENT | os.environ
    received: list[int] = []
    try:
        with stoppable(received):
            words, changes = split_overrides(sys.argv[1:] if argv is None else argv)
            return run(parser(words).parse_args(words, argparse.Namespace(overrides=changes)))
    except SlipstreamError as error:
        note(" ".join(["error:", *str(error).splitlines()]))
        return 2
    except PermissionError as error:  # files of another user
        if error.filename is None:
            raise
        note(f"error: {error.filename}: {error.strerror}")
        return 2
    except (KeyboardInterrupt, Terminated) as stopped:
        number = received[0] if received else SIGNAL_OF[type(stopped)]
        print(SIGNAL_NAMES[number], file=sys.stderr)
        return 128 + number
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def stoppable(received: list[int]) -> Iterator[None]:
    """Let SIGTERM and SIGHUP, unless ignored (nohup), stop a command as Ctrl-C does; `received` gets their numbers."""

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGHUP:
            leave_closed_terminal()
        handler = signal.getsignal(signal.SIGINT)  # handler of a running event loop; not callable in a background job
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    here = threading.current_thread() is threading.main_thread()
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(n) == signal.SIG_DFL]
    for number in heeded:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command that the first word names, or of all commands, which takes longer to build."""
    named = [COMMANDS_BY_NAME[word] for word in words[:1] if word in COMMANDS_BY_NAME]
    top = Parser(
        prog="slipstream",
        description="On-policy distillation: train a student on its own rollouts, scored token by token by a teacher.",
    )
    top.add_argument("--version", action="version", version=f"slipstream {slipstream.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in named or COMMANDS:
        settings = {"epilog": OVERRIDES if command.takes else None, **command.settings}
        add_options(commands.add_parser(command.name, help=command.help, **settings), command.options)
    return top


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    groups: dict[str, Any] = {"": parser}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_mutually_exclusive_group()
        groups[option.group].add_argument(*option.names, **option.settings)


def run(args: argparse.Namespace) -> int:
    """Run a command; `args.overrides` has its settings of the command line, `args.settings` its Config if it takes one.

    The config is read before the command's file is imported, so that a mistake is reported at once.
    """
    command = COMMANDS_BY_NAME[args.command]
    if command.takes == "config":
        from slipstream.commands.config import load_config
        from slipstream.models.resolve import DEMO

        args.settings = load_config(getattr(args, "config", None) or DEMO, args.overrides)
    status: int | None = getattr(import_module(f"slipstream.commands.{command.file}"), command.function)(args)
    return status or 0


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split arguments into those for argparse and settings written as `--a.b value` or `--a.b=value`."""
    if not words or words[0] not in COMMANDS_BY_NAME or not COMMANDS_BY_NAME[words[0]].takes:
        return list(words), []
    arguments, changes, rest = [words[0]], list[tuple[str, str]](), list(words[1:])
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--" or word.partition("=")[0] in FLAGS:
            arguments.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        if not equals and not rest:
            hint = did_you_mean(word, FLAGS)
            raise ConfigError(f"--{key} needs a value" + (f"; {hint}" if hint.startswith("did") else ""))
        changes.append((key, value if equals else rest.pop(0)))
    return arguments, changes
