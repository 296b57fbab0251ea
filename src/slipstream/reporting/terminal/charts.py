"""Parts of the terminal display of a run: tables, bars and summary lines, computed from its progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from slipstream.metric_names import Band, label
from slipstream.reporting.terminal.layout import Lines
from slipstream.reporting.terminal.metric_formats import SPEED, band_of, displayed, listed, title_of, value_text
from slipstream.reporting.terminal.progress import BLOCKS, POINTS, RunProgress, sparkline

BESIDE = 36
"""Columns reserved for name and number next to a curve."""
BAR = 30
"""Largest width of a bar, in columns."""
STAGES = ("rollout", "score", "learn")
FULL, EMPTY = "█", "░"


def filled(share: float, width: int, full: str = FULL, empty: str = EMPTY, style: str = "cyan") -> Text:
    count = round(min(max(0.0, share), 1.0) * width)
    return Text(full * count, style=style).append(empty * (width - count), style="dim")


# --- metrics ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    name: str
    value: str
    points: Sequence[float]
    missed: Band | None = None
    """Healthy range that the value is outside of; None if it is inside or there is no range."""


def watched_rows(course: RunProgress) -> list[Row]:
    """Return a row for each displayed metric that has a curve, and a last one for the recent speed."""
    rows = []
    for name in displayed(course.numbers):
        if name in course.curves:
            value, band = course.numbers[name], band_of(name)
            missed = band if band is not None and value not in band else None
            rows.append(Row(title_of(name), value_text(name, value), course.curves[name].points, missed))
    if course.lately:
        rows.append(Row(label("tokens_per_s"), f"{course.speed:,.0f}", course.curves[SPEED].points))
    return rows


def outside(course: RunProgress) -> list[Row]:
    """Return a row for each other metric whose recent mean is outside its healthy range."""
    shown, rows = set(displayed(course.numbers)), []
    for name in course.numbers:
        band, mean = band_of(name), course.mean(name)
        if band is not None and mean is not None and mean not in band and name not in shown:
            rows.append(Row(name.removeprefix("train/"), f"{mean:.3g}", course.curves[name].points, band))
    return rows


def chosen(rows: Sequence[Row], most: int) -> list[Row]:
    """Return at most `most` rows in their order; prefer the first two and those outside their healthy range."""
    places = sorted(range(len(rows)), key=lambda i: (i >= 2 and rows[i].missed is None, i))[:most]
    return [rows[i] for i in sorted(places)]


def table(rows: Sequence[Row], width: int, longest: int) -> Lines:
    name_width = min(longest, max((cell_len(row.name) for row in rows), default=0))
    value_width = max((len(row.value) for row in rows), default=0)
    room = max(8, min(POINTS // 2, width - BESIDE))
    lines = []
    for row in rows:
        name = row.name if cell_len(row.name) <= name_width else set_cell_size(row.name, name_width - 1) + "…"
        line = Text(set_cell_size(name, name_width) + (" !" if row.missed else "  "))
        line.append(row.value.rjust(value_width), style="bold red" if row.missed else "green")
        line.append("  " + sparkline(row.points, room))
        healthy = f"  {row.missed}" if row.missed else ""
        if line.cell_len + len(healthy) <= width:
            line.append(healthy, style="dim")
        lines.append(line)
    return lines


# --- time, lag and lost work ------------------------------------------------------------------------------------------


def stages(course: RunProgress) -> list[tuple[str, float]]:
    """Return the recent share of time in which each stage, and publishing, was busy."""
    found = [(stage, course.share(f"busy/{stage}")) for stage in STAGES if f"busy/{stage}" in course.numbers]
    if found:
        found.append(("publish", course.sum("seconds/publish") / max(course.sum("seconds/update"), 1e-9)))
    return found


def stage_bars(bars: Sequence[tuple[str, float]], width: int, lines: int) -> Lines:
    """Return one line per stage, or a single line for all if there are fewer lines than stages."""
    longest = max(len(name) for name, _ in bars)
    if lines >= len(bars):
        room = max(1, min(BAR, width - longest - 8))
        return [Text(f"{n.ljust(longest)}  ").append_text(filled(x, room)).append(f" {x:4.0%}") for n, x in bars]
    line, room = Text(), min(10, (width - 3 * (len(bars) - 1)) // len(bars) - longest - 6)
    for name, share in bars:
        line.append("   " if line else "").append(f"{name} ")
        if room >= 3:
            line.append_text(filled(share, room)).append(" ")
        line.append(f"{share:.0%}")
    return [line]


def lags(course: RunProgress) -> str:
    """Return a histogram of token lags in one line, with powers of two as buckets; empty without tokens."""
    lags, buckets = course.lags, Counter[int]()
    for lag, count in lags.items():
        buckets[lag.bit_length()] += count
    if not lags:
        return ""
    bars = []
    for power in range(min(buckets), max(buckets) + 1):
        low, high = 1 << power >> 1, (1 << power) - 1
        height = buckets[power] / max(buckets.values())
        name = f"{low}-{high}" if high > low else str(low)
        bars.append(f"{name} {BLOCKS[round(height * (len(BLOCKS) - 1))]}")
    mean = sum(lag * count for lag, count in lags.items()) / lags.total()
    return f"lag {mean:.1f}, at most {max(lags)}:  {'  '.join(bars)}"


def waits(course: RunProgress) -> str:
    """Return the causes of the learner's recent waits, with shares of time; empty without data."""
    if "seconds/data" not in course.numbers:
        return ""
    whole = max(course.sum("seconds/update"), 1e-9)
    names = {"data": "data", "turn": "its turn", "relabel": "teachers to score again", "weights": "a publish"}
    shares = {what: course.sum(f"seconds/{kind}") / whole for kind, what in names.items()}
    found = [f"{share:.0%} for {what}" for what, share in shares.items() if share >= 0.005]
    return f"the learner waited {', '.join(found) or 'for nothing'}"


def lost(course: RunProgress) -> str:
    numbers = course.numbers

    def by_cause(prefix: str) -> dict[str, float]:
        return {name.removeprefix(prefix): count for name, count in numbers.items() if name.startswith(prefix)}

    ungraded = by_cause("ungraded/")
    losses: list[tuple[float, str, dict[str, float]]] = [
        (numbers.get("train/dropped", 0), "groups dropped", by_cause("dropped/")),
        (numbers.get("train/restarted", 0), "groups restarted", {}),
        (numbers.get("train/failed_samples", 0), "answers failed", by_cause("failed/")),
        (sum(ungraded.values()), "without a reward", ungraded),
        (numbers.get("train/thrown_tokens", 0), "tokens thrown away", {}),
    ]
    found = [
        f"{count:,.0f} {what}" + (f" ({listed(causes.items())})" if any(causes.values()) else "")
        for count, what, causes in losses
        if count
    ]
    found += [f"{worker} died {count:.0f} ×" for worker, count in by_cause("restarts/").items()]
    return f"lost: {', '.join(found)}" if found else ""
