"""What is wrong with a run and what to write instead, for a person or for a machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from slipstream.reporting.advice.answer import Answer, Weight
from slipstream.reporting.advice.read import read
from slipstream.reporting.advice.tree import Advice, advise

LOOKS: dict[Weight, tuple[str, str]] = {
    "wrong": ("wrong", "bold red"),
    "speed": ("takes time", "bold yellow"),
    "watch": ("worth an eye", "bold cyan"),
    "tune": ("suggested", "bold green"),
}


def advise_on(path: Path, console: Console, *, as_json: bool) -> None:
    case = read(path)
    advice = advise(case)
    if as_json:
        print(json.dumps(machine(path, advice)))
        return
    console.print(Text(f"{path}: {advice.updates} of {case.config.updates} updates"), soft_wrap=True)
    console.print(Text(verdict(advice)), soft_wrap=True)
    for answer in advice.answers:
        said, style = LOOKS[answer.weight]
        console.print()
        console.print(Text.assemble((answer.name, style), f" ({said})"), soft_wrap=True)
        for name, text in shown(answer):
            console.print(Text.assemble((f"  {name:9}", "dim"), text), soft_wrap=True)
    if any(answer.change for answer in advice.answers):
        console.print()
        console.print(Text(how(path)), soft_wrap=True)


def verdict(advice: Advice) -> str:
    if not advice.updates:
        return "nothing can be said yet: no update is made"
    young = "" if advice.enough else f"; too few updates to compare now with then, which needs {advice.needs}"
    if not advice.wrong:
        return f"nothing is wrong{young}"
    return f"{advice.wrong[0].name} comes first{young}"


def shown(answer: Answer) -> Iterator[tuple[str, str]]:
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


def how(path: Path) -> str:
    return (
        f"What to write goes behind `slipstream train CONFIG`; or into {path}/config.toml, and the run goes on with "
        f"`slipstream resume {path} --change KEY`."
    )


def machine(path: Path, advice: Advice) -> dict[str, Any]:
    answers = [asdict(answer) | {"cli": answer.cli, "toml": answer.toml} for answer in advice.answers]
    return {
        "run": str(path),
        "updates": advice.updates,
        "enough": advice.enough,
        "wrong": bool(advice.wrong),
        "answers": answers,
    }
