"""Parts of the terminal display of a run: tables, bars and summary lines of its progress, and samples as text."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from slipstream.errors import printable
from slipstream.metric_names import Band
from slipstream.reporting.terminal.progress import (
    CURVE_POINTS,
    SPARK_BARS,
    SPEED,
    RunProgress,
    band_of,
    counts_text,
    displayed_names,
    row_of,
    sparkline,
    title_of,
)
from slipstream.run_dir.trackers import heading

Lines = list[Text]
BESIDE_CURVE = 36
"""Columns reserved for name and number next to a curve."""
BAR_WIDTH = 30
"""Largest width of a bar, in columns."""
STAGE_NAMES = ("rollout", "score", "learn")
SAMPLE_LINES, PROMPT_LINES = 6, 2
"""Largest number of lines of a response, and of the end of its prompt, in a small display."""
OBSERVATION = "│ "
"""Prefix of lines that an environment returned."""


def share_bar(share: float, width: int, full: str = "█", empty: str = "░", style: str = "cyan") -> Text:
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


def displayed_rows(course: RunProgress) -> list[Row]:
    """Return a row for each displayed metric that has a curve, and a last one for the recent speed."""
    rows = []
    for name in displayed_names(course.numbers):
        if name in course.curves:
            value, band = course.numbers[name], band_of(name)
            missed = band if band is not None and value not in band else None
            rows.append(Row(title_of(name), row_of(name).text(value), course.curves[name].points, missed))
    if course.recent and SPEED in course.curves:
        rows.append(Row(title_of(SPEED), f"{course.speed:,.0f}", course.curves[SPEED].points))
    return rows


def unhealthy_rows(course: RunProgress) -> list[Row]:
    """Return a row for each other metric whose recent mean is outside its healthy range."""
    shown, rows = set(displayed_names(course.numbers)), []
    for name in course.numbers:
        band, mean = band_of(name), course.mean(name)
        if band is not None and mean is not None and mean not in band and name not in shown:
            rows.append(Row(name.removeprefix("train/"), f"{mean:.3g}", course.curves[name].points, band))
    return rows


def choose_rows(rows: Sequence[Row], most: int) -> list[Row]:
    """Return at most `most` rows in their order; prefer the first two and those outside their healthy range."""
    places = sorted(range(len(rows)), key=lambda i: (i >= 2 and rows[i].missed is None, i))[:most]
    return [rows[i] for i in sorted(places)]


def row_lines(rows: Sequence[Row], width: int, longest: int) -> Lines:
    name_width = min(longest, max((cell_len(row.name) for row in rows), default=0))
    value_width = max((len(row.value) for row in rows), default=0)
    room = max(8, min(CURVE_POINTS // 2, width - BESIDE_CURVE))
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


def stage_shares(course: RunProgress) -> list[tuple[str, float]]:
    """Return the recent share of time in which each stage, and publishing, was busy."""
    shares = [(stage, course.share(f"busy/{stage}")) for stage in STAGE_NAMES if f"busy/{stage}" in course.numbers]
    if shares:
        shares.append(("publish", course.sum("seconds/publish") / max(course.sum("seconds/update"), 1e-9)))
    return shares


def stage_bars(bars: Sequence[tuple[str, float]], width: int, lines: int) -> Lines:
    """Return one line per stage, or a single line for all if there are fewer lines than stages."""
    longest = max(len(name) for name, _ in bars)
    if lines >= len(bars):
        room = max(1, min(BAR_WIDTH, width - longest - 8))
        return [Text(f"{n.ljust(longest)}  ").append_text(share_bar(x, room)).append(f" {x:4.0%}") for n, x in bars]
    line, room = Text(), min(10, (width - 3 * (len(bars) - 1)) // len(bars) - longest - 6)
    for name, share in bars:
        line.append("   " if line else "").append(f"{name} ")
        if room >= 3:
            line.append_text(share_bar(share, room)).append(" ")
        line.append(f"{share:.0%}")
    return [line]


def lag_text(course: RunProgress) -> str:
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
        bars.append(f"{name} {SPARK_BARS[round(height * (len(SPARK_BARS) - 1))]}")
    mean = sum(lag * count for lag, count in lags.items()) / lags.total()
    return f"lag {mean:.1f}, at most {max(lags)}:  {'  '.join(bars)}"


def wait_text(course: RunProgress) -> str:
    """Return the causes of the learner's recent waits, with shares of time; empty without data."""
    if "seconds/data" not in course.numbers:
        return ""
    whole = max(course.sum("seconds/update"), 1e-9)
    names = {
        "data": "data",
        "turn": "its turn",
        "relabel": "teachers to score again",
        "weights": "publishes and evaluations",
    }
    shares = {what: course.sum(f"seconds/{kind}") / whole for kind, what in names.items()}
    causes = [f"{share:.0%} for {what}" for what, share in shares.items() if share >= 0.005]
    return f"the learner waited {', '.join(causes) or 'for nothing'}"


def loss_text(course: RunProgress) -> str:
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
    texts = [
        f"{count:,.0f} {what}" + (f" ({counts_text(causes.items())})" if any(causes.values()) else "")
        for count, what, causes in losses
        if count
    ]
    texts += [f"{worker} died {count:.0f} ×" for worker, count in by_cause("restarts/").items()]
    return f"lost: {', '.join(texts)}" if texts else ""


# --- samples ----------------------------------------------------------------------------------------------------------


def sample_lines(quote: Mapping[str, Any], width: int, most: int, *, beside: str = "") -> list[Text]:
    """Return a sample in at most `most` lines: heading, end of the prompt, start and end of the response."""
    first, room = heading_line(quote, width, beside), most - 1
    if room < 2:
        return [first][:most]
    end = fold(printable_text(quote["prompt"])[-most * width :], width)[-min(max(PROMPT_LINES, most // 4), room - 1) :]
    response = response_lines(quote, width, room - len(end))
    return [
        first,
        *(Text(line, style="dim", no_wrap=True) for line in end),
        *(Text(line, style="dim" if line.startswith(OBSERVATION) else "", no_wrap=True) for line in response),
    ]


def response_lines(quote: Mapping[str, Any], width: int, most: int) -> list[str]:
    """Return the response in at most `most` lines; a single line shows only the beginning."""
    if quote.get("turns"):
        lines = list(turn_lines(quote, width))
    else:
        lines = fold_to(printable_text(quote["response"]), width, max(3, most))
    return [lines[0][: width - 1] + "…"] if len(lines) > most == 1 else cut_middle(lines, most)


def heading_line(quote: Mapping[str, Any], width: int, beside: str = "") -> Text:
    line = Text(f"── {printable(heading(quote))} ", style="dim", no_wrap=True)
    tail = f" {beside} ──" if beside else ""
    line.truncate(max(0, width - len(tail)), overflow="ellipsis")
    return line.append("─" * (width - len(tail) - line.cell_len) + tail)


def turn_lines(quote: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield the lines of an episode; observations have the prefix OBSERVATION."""
    for kind, text in quote["turns"]:
        stroke = OBSERVATION if kind == "seen" else ""
        for line in fold(printable_text(text), width - len(stroke)):
            yield stroke + line


def printable_text(text: str) -> str:
    return printable(text).expandtabs(4).strip("\n")


def fold_to(text: str, width: int, most: int) -> list[str]:
    """Fold text into at most `most` lines; a longer text loses its middle."""
    half = most * width  # upper bound for the characters in these lines
    return cut_middle(fold(text if len(text) <= 2 * half else f"{text[:half]}\n{text[-half:]}", width), most)


def cut_middle(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: (most - 1) // 2], "…", *lines[len(lines) - most // 2 :]]


def fold(text: str, width: int) -> list[str]:
    return [piece for line in text.split("\n") for piece in chop_cells(line, width) or [""]]
