"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.pipeline.admission import Admission
from slipstream.vocabulary import label

SHARES = ("reward/exact", "reward/math")
"""Rewards that are 0 or 1. Of one's own, nobody knows."""
BLOCKS = "▁▂▃▄▅▆▇█"


class Progress:
    """A sink of the run log; the panel also looks at where the groups are."""

    def __init__(self, console: Console, *, updates: int, title: str, admission: Admission) -> None:
        self.console, self.updates, self.title, self.admission = console, updates, title, admission
        self.start = self.update = admission.version
        self.numbers = dict[str, float]()
        self.losses: list[float] = []
        self.began = time.monotonic()
        self.live = Live(get_renderable=self.panel, console=console, refresh_per_second=4)

    def __enter__(self) -> Progress:
        self.began = time.monotonic()
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the panel as it is; what is printed next comes below it."""
        if self.console.is_terminal:
            self.live.stop()

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.numbers |= numbers
        self.update = max(self.update, step)
        if "train/loss" in numbers:
            self.losses.append(numbers["train/loss"])
        if not self.console.is_terminal:
            self.console.print(self.line(numbers, step), highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass

    def line(self, numbers: Mapping[str, float], step: int) -> str:
        parts = [f"update {step}/{self.updates}", *(f"{name} {text}" for name, text in readings(numbers))]
        return "  ".join(parts)

    def panel(self) -> RenderableType:
        seconds = time.monotonic() - self.began
        made = self.update - self.start
        left = seconds / made * (self.updates - self.update) if made > 0 else None
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.title, style="bold"),
            f"update {self.update}/{self.updates}",
            ProgressBar(total=self.updates, completed=self.update, width=30),
            f"{seconds:.0f} s" + (f", {left:.0f} s to go" if left is not None else ""),
        )
        stages = "   ".join(f"{name} [cyan]{count}[/]" for name, count in self.stages())
        body = "   ".join(f"{name} [green]{text}[/]" for name, text in readings(self.numbers))
        lines: list[RenderableType] = [head, Text.from_markup(f"groups: {stages}"), Text.from_markup(body)]
        if len(self.losses) > 1:
            lines.append(Text(f"loss {sparkline(self.losses)}"))
        return Group(*lines)

    def stages(self) -> list[tuple[str, int]]:
        a = self.admission
        scoring = len(a.waiting) + len(a.scoring)
        return [
            ("rolling out", len(a.rolling)),
            ("scoring", scoring),
            ("scored", len(a.ready)),
            ("learning", len(a.learning)),
            ("dropped", a.dropped.total()),
        ]


def readings(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """The few numbers worth a look at every update."""
    found = []
    if "train/loss" in numbers:
        found.append((label("loss"), f"{numbers['train/loss']:.4f}"))
    rewards = {name: value for name, value in numbers.items() if re.fullmatch(r"reward/\w+", name)}
    found += [(label(name), f"{value:.1%}" if name in SHARES else f"{value:.3g}") for name, value in rewards.items()]
    if "lag/mean" in numbers:
        found.append((label("lag/mean"), f"{numbers['lag/mean']:.1f} (max {numbers['lag/max']:.0f})"))
    if "train/tokens_per_s" in numbers:
        found.append((label("tokens_per_s"), f"{numbers['train/tokens_per_s']:,.0f}"))
        found.append((label("samples_per_s"), f"{numbers['train/samples_per_s']:,.1f}"))
    for name, value in numbers.items():
        if held_out := re.fullmatch(r"eval/(?:(\w+)/)?accuracy", name):
            found.append((" ".join(filter(None, (label("accuracy"), held_out[1]))), f"{value:.1%}"))
    return found


def sparkline(values: list[float], width: int = 60) -> str:
    """The curve in one line, older values averaged together."""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[int((value - low) / span * (len(BLOCKS) - 1))] for value in means)
