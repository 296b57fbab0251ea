"""Numbers as text, and titles of figures: sentences made from the numbers that a figure shows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import floor, hypot, inf, isfinite, log10
from statistics import fmean
from typing import Any

from slipstream.metric_names import Band
from slipstream.statistics import standard_error

COMPARED_UPDATES = 10
"""Number of updates at the start and at the end of a run that are compared."""
MIN_ERRORS_TO_REPORT = 2.0
"""Number of standard errors beyond which a change is significant."""


@dataclass(frozen=True, slots=True)
class Change:
    first: float
    last: float
    error: float
    """Standard error of the difference, computed as if updates were independent."""

    @property
    def is_significant(self) -> bool:
        return abs(self.last - self.first) > MIN_ERRORS_TO_REPORT * self.error


def change(values: Sequence[float]) -> Change:
    """Return the change from the mean of the first to that of the last COMPARED_UPDATES values, or between halves."""
    count = max(1, min(COMPARED_UPDATES, len(values) // 2))
    first, last = values[:count], values[-count:]
    errors = [standard_error(part) for part in (first, last)]
    return Change(fmean(first), fmean(last), hypot(*(inf if error is None else error for error in errors)))


def short(value: float, *, share: bool = False) -> str:
    """Format a number with three significant digits and a separator for thousands."""
    if not isfinite(value):
        return "unknown"
    if share:
        return f"{percent(value)} %"
    if value and abs(value) < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{round(100 * share, 9) + 0.0:.3g}"  # without rounding errors, so that equal shares have equal texts


def first_and_last(texts: Sequence[str]) -> str:
    """Return the first and the last of several texts; a single one alone."""
    return " → ".join([*texts[:1], *texts[1:][-1:]])


def setting_text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def mean_text(mean: float | None, error: float | None, *, share: bool = False) -> str:
    """Format a mean and its standard error with the digits that are significant."""
    if mean is None:
        return "–"
    if error is None:
        return short(mean, share=share)
    scale, unit = (100.0, " %") if share else (1.0, "")
    mean, error = mean * scale, error * scale
    if error <= abs(mean) * 1e-9:
        return f"{short(mean)} ± 0{unit}"
    digits = max(1 - floor(log10(error)), 0)
    return f"{mean:,.{digits}f} ± {error:.{digits}f}{unit}" if digits <= 6 else f"{mean:.3g} ± {error:.2g}{unit}"


def course(label: str, runs: Mapping[str, Sequence[float]], *, share: bool = False, where: str = "in every run") -> str:
    """Return a title: the trend in a single run, or the final values of several; equal ones end with `where`."""
    say = partial(short, share=share)
    known = {name: values for name, values in runs.items() if values}
    ends = {name: change(values) for name, values in known.items()}
    if len(ends) == 1:
        ((name, end),) = ends.items()
        if len(set(map(say, known[name]))) == 1:
            return f"{label} stayed at {say(end.last)}"
        if end.is_significant:
            return f"{label} {'rose' if end.last > end.first else 'fell'} from {say(end.first)} to {say(end.last)}"
        return f"{label}: {say(fmean(known[name]))} on average, no clear trend"
    last = {name: end.last for name, end in ends.items()}
    if len(set(map(say, last.values()))) == 1:
        return f"{label} ended at {say(next(iter(last.values())))} {where}"
    if len(last) <= 3:
        return f"{label} ended at " + ", ".join(f"{say(value)} ({name})" for name, value in last.items())
    least, most = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
    return f"{label} ended between {say(last[least])} ({least}) and {say(last[most])} ({most})"


def inside(band: Band, runs: Mapping[str, Sequence[float]]) -> str:
    """Return a sentence on how many updates were in the healthy range."""
    counts = {name: (sum(value in band for value in values), len(values)) for name, values in runs.items() if values}
    if all(count == total for count, total in counts.values()):
        updates = "all updates"
    else:
        of = "" if len(counts) == 1 else " ({})"
        updates = ", ".join(f"{count} of {total} updates{of.format(name)}" for name, (count, total) in counts.items())
    return f"Healthy in {updates}: {band}."
