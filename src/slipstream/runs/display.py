"""Display of an active run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from slipstream.pipeline.admission import Admission
from slipstream.reporting.terminal.panel import View, inline
from slipstream.reporting.terminal.progress import RunProgress, SampleSelector, counts_text, key_readings

FIRST_LINE = 5.0
"""Seconds of waiting until the first line about it, where no text can be replaced. Each further wait doubles."""
LINE_EVERY = 5.0
"""Smallest number of seconds between the printed lines of two updates where no panel can be shown."""


class Progress:
    """Sink of the run log that prints progress; the panel also shows in which stage the groups are."""

    every = 1

    def __init__(
        self,
        console: Console,
        *,
        updates: int,
        title: str,
        admission: Admission,
        evaluates: bool = False,
        before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the display; `before` is the seconds that the run took before a resume."""
        self.console, self.updates, self.title, self.evaluates = console, updates, title, evaluates
        self.admission, self.before, self.clock = admission, before, clock
        self.start = self.update = admission.version
        self.course, self.turning = RunProgress(), SampleSelector(clock)
        self.began = self.updated = clock()
        self.printed = float("-inf")
        """Time when the line of an update was printed last."""
        self.live = Live(get_renderable=self.panel, console=console, refresh_per_second=2) if is_live(console) else None

    def __enter__(self) -> Progress:
        self.began = self.updated = self.clock()
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Freeze the panel; later output appears below it."""
        if self.live:
            self.live.stop()

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add the earlier lines of the run's metrics.jsonl to the display of a resumed run."""
        for line in lines:
            self.course.recall(line)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.course.remember(numbers)
        shown = not self.live
        if step > self.update:
            self.update, self.updated = step, self.clock()
            self.course.add_update(numbers)
            shown = shown and (step == self.updates or self.updated >= self.printed + LINE_EVERY)
            self.printed = self.updated if shown else self.printed
        if shown:
            self.console.print(self.line(numbers, step), soft_wrap=True)

    def samples(self, quotes: Sequence[Mapping[str, Any]], step: int) -> None:
        self.turning.gather(quotes, newest=quotes)

    def close(self) -> None:
        pass

    def line(self, numbers: Mapping[str, float], step: int) -> str:
        parts = [f"update {step}/{self.updates}", *(f"{name} {text}" for name, text in key_readings(numbers))]
        return "  ".join(parts)

    def panel(self) -> RenderableType:
        return Group(*inline(self.view(), self.console.width, self.console.height - 1))

    def view(self) -> View:
        quote = self.turning.now()
        return View(
            title=self.title,
            update=self.update,
            updates=self.updates,
            elapsed=self.before + self.clock() - self.began,
            left=self.course.left(self.updates - self.update, self.clock() - self.updated),
            doing=self.doing(),
            course=self.course,
            quotes=[quote] if quote else [],
        )

    def doing(self) -> str:
        where = counts_text(self.stages())
        if self.update > self.start:
            return f"{'supervised updates, ' * self.admission.supervising}groups: {where or 'none'}"
        first = "samplers load the first weights" + self.evaluates * " and answer held-out prompts"
        kind = "supervised updates" if self.admission.supervising else "rollouts"
        return f"first {kind}: {where}" if where else first

    def stages(self) -> list[tuple[str, int]]:
        a = self.admission
        return [
            ("rolling out", len(a.rolling)),
            ("scoring", len(a.waiting) + len(a.scoring)),
            ("scored", len(a.ready)),
            ("learning", len(a.learning)),
            ("dropped", a.dropped.total()),
        ]


def is_live(console: Console) -> bool:
    """Return True if printed text can be replaced: the console is a terminal that can move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def waiting(console: Console, doing: str) -> Iterator[Callable[[str], None]]:
    """Show the current activity and its duration in one line; the yielded function sets a new activity.

    Where the console cannot replace text, lines appear after 5, 10, 20, … s. The cursor stays: a killed process could
    not restore it.
    """
    began, now = time.monotonic(), [doing]

    def line() -> Text:
        text = f"{now[0]}, {time.monotonic() - began:.0f} s"
        return Text(text, style="dim", no_wrap=True, overflow="ellipsis")

    def print_lines(ended: threading.Event) -> None:
        pause = FIRST_LINE
        while not ended.wait(pause):
            console.print(line().plain, soft_wrap=True, markup=False)
            pause = time.monotonic() - began

    if not is_live(console):
        ended = threading.Event()
        printer = threading.Thread(target=print_lines, args=(ended,), name="waiting", daemon=True)
        printer.start()
        try:
            yield lambda text: now.__setitem__(0, text)
        finally:
            ended.set()
            printer.join()
        return
    with Live(get_renderable=line, console=console, refresh_per_second=2, transient=True):
        console.show_cursor(True)
        yield lambda text: now.__setitem__(0, text)
