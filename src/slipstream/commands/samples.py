"""`slipstream samples`: responses of the student in a run, as text."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from slipstream.console import Screen
from slipstream.errors import RunDirError
from slipstream.run_dir.reading import Line, RunDir
from slipstream.run_dir.trackers import ENDED

LISTED_TOKENS = 5
"""Number of listed tokens: those whose teacher log-prob is farthest below the student's log-prob."""


def run(args: Namespace) -> None:
    for quote in samples_of(args.directory, args.update)[-args.n :]:
        print_sample(quote, Screen())


def print_sample(quote: Line, console: Console) -> None:
    console.print(Text(head(quote), style="bold"), soft_wrap=True)
    for name, text in [("prompt", quote["prompt"]), *(quote.get("turns") or [("response", quote["response"])])]:
        console.print(Text(f"{name}:", style="cyan"))
        console.print(Text(text, style="dim" if name == "seen" else ""), soft_wrap=True)
    if (context := quote.get("context")) is not None:
        console.print(Text(f"teacher saw ({quote['context_id']}):", style="cyan"))
        console.print(Text(context), soft_wrap=True)
    for line in against_teacher(quote):
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print()


def samples_of(path: Path, update: int | None) -> list[Line]:
    found = RunDir(path).samples
    if not found:
        raise RunDirError(f"{path} has no samples yet: log.samples sets how many samples each update writes")
    of_update = [quote for quote in found if update in (None, quote["update"])]
    if not of_update:
        first, last = found[0]["update"], found[-1]["update"]
        raise RunDirError(f"{path} has no samples of update {update}: it has samples of updates {first} to {last}")
    return of_update


ORIGINS = {"data": "the data", "teacher": "the teacher", "file": "mix.path"}
"""Names of the authors of responses that the student did not draw, by `source`."""


def head(quote: dict[str, Any]) -> str:
    versions = [version for version, _ in quote["versions"]] or [0]
    drawn = f"version {versions[0]}" if len(set(versions)) == 1 else f"versions {min(versions)} to {max(versions)}"
    drawn = ORIGINS.get(quote.get("source", ""), drawn)
    rewards = "".join(f", {name} {value:.3g}" for name, value in quote["rewards"].items())
    return (
        f"update {quote['update']}: {quote['prompt_id']}, answer {quote.get('index', 0)}, "
        f"{len(quote['tokens'])} tokens by {drawn}, {ENDED.get(quote['finish'], quote['finish'])}{rewards}"
    )


def against_teacher(quote: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the mean gap between the student's and the teacher's log-probs, and on the largest gaps."""
    if quote["teacher_logp"] is None:
        return
    gaps = [
        (ours - theirs, place, token)
        for place, (token, ours, theirs) in enumerate(
            zip(quote["tokens"], quote["logp"], quote["teacher_logp"], strict=True)
        )
        if ours is not None and theirs is not None
    ]
    if not gaps:
        return
    largest = sorted(gaps, reverse=True)[:LISTED_TOKENS]
    worst = [f"{token!r} at {place} ({gap:.2f})" for gap, place, token in largest if gap > 0]
    of, mean = f" by {quote['teacher']}" if quote["teacher"] else "", fmean(gap for gap, *_ in gaps)
    side = "lower" if mean > 0 else "higher"
    yield f"scored{of}: log-probs of its tokens are {abs(mean):.3f} {side} than the student's"
    if worst:
        yield f"largest gaps: {', '.join(worst)}"
