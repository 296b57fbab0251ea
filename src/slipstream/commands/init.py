"""`slipstream init`: write a commented config for one of six situations."""

import shlex
import sys
from argparse import Namespace
from importlib.resources import files

from slipstream.errors import ConfigError, printable

SITUATIONS = {
    "distil": "a small model learns from a larger one, on its own answers",
    "reward": "the same, and answers are also graded (GRPO beside the teacher)",
    "tools": "a student calls Python functions, and learns from the whole episode",
    "agent": "an agent of yours talks to the student over an OpenAI-compatible API",
    "self": "a model is its own teacher, which sees the right answer",
    "one_gpu": "student and teacher share one GPU",
}
"""Description of each situation, by the name of its config in `starts`."""


def run(args: Namespace) -> None:
    situation = args.situation or ask()
    if args.file.exists():
        raise ConfigError(f"{args.file} exists: name another file, or remove it")
    try:
        args.file.write_text(config_for(situation), "utf-8")
    except OSError as error:
        raise ConfigError(f"{args.file} cannot be written: {error.strerror}") from None
    print(printable(f"{args.file}: {SITUATIONS[situation]}"))
    print(printable(f"next: slipstream config {shlex.quote(str(args.file))} --check"))


def config_for(situation: str) -> str:
    return (files("slipstream.commands") / "starts" / f"{situation}.toml").read_text("utf-8")


def ask() -> str:
    """Let the user choose a situation by its number or name."""
    names = list(SITUATIONS)
    if not sys.stdin.isatty():
        raise ConfigError(f"name a situation: --for {', '.join(names)}")
    for number, (name, what) in enumerate(SITUATIONS.items(), 1):
        print(f"{number}  {name:8} {what}")
    answer = input("which? ").strip()
    if answer.isdecimal() and 1 <= int(answer) <= len(names):
        return names[int(answer) - 1]
    if answer in names:
        return answer
    raise ConfigError(f"{answer!r} is none of {', '.join(names)}")
