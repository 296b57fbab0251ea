"""`slipstream advise`: problems of a run and the settings that solve them, as text or as JSON."""

import json
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from slipstream.console import Screen
from slipstream.reporting.advice.measurements import Case
from slipstream.reporting.advice.tree import Advice, Answer, Weight, advise, read
from slipstream.run_dir.formats import resumable
from slipstream.run_dir.reading import RunDir

WEIGHT_LABELS: dict[Weight, tuple[str, str]] = {
    "wrong": ("error", "bold red"),
    "speed": ("lost time", "bold yellow"),
    "watch": ("warning", "bold cyan"),
    "tune": ("suggestion", "bold green"),
}


def run(args: Namespace) -> None:
    case = read(args.directory)
    advice = advise(case)
    if args.json:
        print(json.dumps(as_plain_data(args.directory, case, advice)))
    else:
        show(case, advice, args.directory, Screen())


def show(case: Case, advice: Advice, path: Path, console: Console) -> None:
    console.print(Text(f"{path}: {case.finished} of {case.config.updates} updates"), soft_wrap=True)
    console.print(Text(verdict(case, advice)), soft_wrap=True)
    for answer in advice.answers:
        label, style = WEIGHT_LABELS[answer.weight]
        console.print()
        console.print(Text.assemble((answer.name, style), f" ({label})"), soft_wrap=True)
        for name, text in answer_lines(answer):
            console.print(Text.assemble((f"  {name:9}", "dim"), text), soft_wrap=True)
    if any(answer.change for answer in advice.answers):
        console.print()
        hint = f"Add the text after `write` to `slipstream train CONFIG`.{continuation(case, path)}"
        console.print(Text(hint), soft_wrap=True)


def continuation(case: Case, path: Path) -> str:
    """Return how the run itself goes on with a change; empty if no checkpoint allows it."""
    if not resumable(path / "checkpoints", case.config.health.proof):
        return ""
    more = f" --updates N`, with N above {case.config.updates}" if RunDir(path).finished else "`"
    command = f"`slipstream resume {shlex.quote(str(path))} --change KEY"
    return f" Or change {path}/config.toml and continue the run with {command}{more}."


def verdict(case: Case, advice: Advice) -> str:
    if not advice.updates:
        return f"no advice yet: {'only supervised updates are' if case.finished else 'no update is'} finished"
    young = "" if advice.enough else f"; too few updates to see changes over time, which needs {advice.needs}"
    if not advice.wrong:
        return f"nothing is wrong{young}"
    return f"first problem to solve: {advice.wrong[0].name}{young}"


def answer_lines(answer: Answer) -> Iterator[tuple[str, str]]:
    yield "seen", f"{answer.metric} = {answer.value:.3g}, limit {answer.limit:.3g}"
    yield "rule", answer.when
    yield "cause", answer.cause
    if answer.change:
        yield "write", answer.cli
    elif answer.run:
        yield "run", answer.run
    yield "watch", answer.watch
    if answer.explains:
        yield "explains", ", ".join(answer.explains)


def as_plain_data(path: Path, case: Case, advice: Advice) -> dict[str, Any]:
    answers = [asdict(answer) | {"cli": answer.cli, "toml": answer.toml} for answer in advice.answers]
    return {
        "run": str(path),
        "updates": case.finished,
        "enough": advice.enough,
        "wrong": bool(advice.wrong),
        "answers": answers,
    }
