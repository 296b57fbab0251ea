"""Parts of the terminal display of a run: tables, bars and summary lines, computed from its progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from slipstream.metric_names import Band, label
from slipstream.reporting.terminal.layout import Lines
from slipstream.reporting.terminal.metric_formats import SPEED, band_of, listed, named, told, watched
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
    """Return a row for each displayed metric: its name, newest value and curve."""
    rows = []
    for name in watched(course.numbers):
        if name in course.curves:
            value, band = course.numbers[name], band_of(name)
            missed = band if band is not None and value not in band else None
            rows.append(Row(named(name), told(name, value), course.curves[name].points, missed))
    if course.lately:
        rows.append(Row(label("tokens_per_s"), f"{course.speed:,.0f}", course.curves[SPEED].points))
    return rows


def outside(course: RunProgress) -> list[Row]:
    """Return a row for each other metric whose recent mean is outside its healthy range."""
    shown, rows = set(watched(course.numbers)), []
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
    counts = dict[int, int]()
    for lag, count in course.lags.items():
        counts[lag.bit_length()] = counts.get(lag.bit_length(), 0) + count
    if not counts:
        return ""
    bars = "  ".join(
        f"{lag_name(power)} {BLOCKS[round(counts.get(power, 0) / max(counts.values()) * (len(BLOCKS) - 1))]}"
        for power in range(min(counts), max(counts) + 1)
    )
    return f"lag {mean_of(course.lags.items()):.1f}, at most {max(course.lags)}:  {bars}"


def lag_name(power: int) -> str:
    low, high = 1 << power >> 1, (1 << power) - 1
    return str(low) if high <= low else f"{low}-{high}"


def mean_of(counts: Iterable[tuple[int, int]]) -> float:
    counts = list(counts)
    return sum(lag * count for lag, count in counts) / sum(count for _, count in counts)


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

    def parts(prefix: str) -> str:
        found = listed((name.removeprefix(prefix), n) for name, n in numbers.items() if name.startswith(prefix))
        return found and f" ({found})"

    ungraded = sum(n for name, n in numbers.items() if name.startswith("ungraded/"))
    found = [
        f"{count:,.0f} {what}{why}"
        for count, what, why in (
            (numbers.get("train/dropped", 0), "groups dropped", parts("dropped/")),
            (numbers.get("train/restarted", 0), "groups restarted", ""),
            (numbers.get("train/failed_samples", 0), "answers failed", parts("failed/")),
            (ungraded, "without a reward", parts("ungraded/")),
            (numbers.get("train/thrown_tokens", 0), "tokens thrown away", ""),
        )
        if count
    ]
    deaths = [
        f"{name.removeprefix('restarts/')} died {n:.0f} ×"
        for name, n in numbers.items()
        if name.startswith("restarts/")
    ]
    return "lost: " + ", ".join([*found, *deaths]) if found or deaths else ""
