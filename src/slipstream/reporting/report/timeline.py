"""Figures from trace.json: a Gantt chart of updates in the middle, and busy shares over the whole run.

A run can have millions of events, so the chart is limited to UPDATES updates, and the shares to STEPS time steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slipstream.reporting.report.figures import Figure, Json, colour, number, numbers, plain
from slipstream.reporting.report.points import mean
from slipstream.reporting.report.runs import Reading
from slipstream.reporting.report.titles import shown
from slipstream.run_dir.reading import Line
from slipstream.run_dir.writing import TRACE

UPDATES, SLICES = 24, 2000
"""Limits of the Gantt chart: number of updates, and number of slices (activities of workers) per run."""
SIGHT = 6
"""Number of updates in the initial view."""
STEPS = 240
EPISODES, EVENTS = 14, 40
"""Largest number of episodes that are drawn, and of events that are read for each."""
SLICE, NAME, NESTED = b'{"ph": "X"', b'{"ph": "M"', (b'{"ph": "b", "cat": "episode"', b'{"ph": "e", "cat": "episode"')
"""First bytes of the trace events to read, in the format of pipeline/trace.py."""
WHOLE, DOES = b'"name": "episode ', ("turn", "step")
"""Name of the event of a whole episode, and names of its most important parts."""
ORDER = ("rollout", "score", "update", "export")
"""Activities in the order of their colours; other activities follow."""


class Slice(NamedTuple):
    worker: str
    name: str
    start: float
    seconds: float

    @property
    def kind(self) -> str:
        """Name of the activity without the number of an update or version."""
        return re.sub(r"\s+v?\d+$", "", self.name)


class Stretch(NamedTuple):
    start: float
    end: float
    sight: tuple[float, float]


def slices(run: Reading) -> list[Slice]:
    """Return the activities of all workers, sorted by start."""
    lines = run.run.picked(TRACE, lambda _, line: line.startswith((SLICE, NAME)))
    workers = {line["tid"]: str(line["args"].get("name", "")) for line in lines if line["name"] == "thread_name"}
    found = [
        Slice(workers.get(line["tid"], f"worker {line['tid']}"), str(line["name"]), line["ts"] / 1e6, line["dur"] / 1e6)
        for line in lines
        if line["ph"] == "X"
    ]
    return sorted(found, key=lambda each: each.start)


def stretch(run: Reading, found: Sequence[Slice]) -> Stretch:
    """Return the time range around the middle update to draw, with its initial view."""
    updates = run.columns["update"][0]
    middle = updates[len(updates) // 2]
    start, end = run.at(max(middle - UPDATES / 2, 0)), run.at(middle + UPDATES / 2)
    if middle <= UPDATES / 2:
        start = 0.0
    inside = [each for each in found if start <= each.start < end]
    if len(inside) > SLICES:
        first = (len(inside) - SLICES) // 2
        start, end = inside[first].start, inside[first + SLICES].start
    here = (run.at(middle - SIGHT / 2), run.at(middle + SIGHT / 2))
    sight = (max(here[0], start), min(here[1], end))
    return Stretch(start, end, sight if sight[0] < sight[1] else (start, end))


def gantt(runs: Sequence[Reading], found: Sequence[list[Slice]]) -> Figure:
    """Draw a row for every worker of every run; with several runs, time starts at each initial view."""
    several = len(runs) > 1
    rows = list[str]()
    bars: dict[str, list[tuple[str, float, float, str]]] = {}
    spans = list[tuple[float, float]]()
    for run, of_run in zip(runs, found, strict=True):
        whole = stretch(run, of_run)
        zero = whole.sight[0] if several else 0.0
        spans.append((whole.sight[0] - zero, whole.sight[1] - zero))
        inside = [each for each in of_run if each.start < whole.end and each.start + each.seconds > whole.start]
        for worker in dict.fromkeys(each.worker for each in sorted(inside, key=lambda each: rank(each.worker))):
            rows.append(f"{run.name} · {worker}" if several else worker)
        for each in inside:
            row = f"{run.name} · {each.worker}" if several else each.worker
            bars.setdefault(each.kind, []).append((row, each.start - zero, each.seconds, each.name))
    kinds = [kind for kind in ORDER if kind in bars] + [kind for kind in bars if kind not in ORDER]
    data: list[Json] = []
    for slot, kind in enumerate(kinds):
        names, starts, seconds, labels = zip(*bars[kind], strict=True)
        data.append({
            "type": "bar",
            "orientation": "h",
            "name": plain(kind),
            "y": [plain(name) for name in names],
            "base": [round(start, 4) for start in starts],
            "x": [round(each, 4) for each in seconds],
            "text": [plain(label) for label in labels],
            "textposition": "none",
            "hovertemplate": "%{text}: %{x:.3f} s<extra>%{y}</extra>",
            "marker": {"color": colour(slot), "line": {"width": 0.5, "color": "var(--paper)"}},
        })  # fmt: skip
    layout: Json = {
        "barmode": "overlay",
        "bargap": 0.25,
        "hovermode": "closest",
        "xaxis": {
            "title": {"text": "seconds" if several else "seconds since the run began"},
            "range": numbers([min(start for start, _ in spans), max(end for _, end in spans)]),
        },
        "yaxis": {
            "type": "category",
            "fixedrange": True,
            "categoryorder": "array",
            "categoryarray": [plain(row) for row in reversed(rows)],
            "range": [-0.5, len(rows) - 0.5],
        },
    }
    overlaps = ", ".join(
        f"{shown(run.digest['overlap/stages'])}" + (f" ({run.name})" if several else "") for run in runs if run.digest
    )
    title = "Activity of workers" + (f": {overlaps} busy stages on average" if overlaps else "")
    note = (
        f"Bars are work, gaps are idle time. The view shows about {SIGHT} updates from the middle of the run; "
        f"double-click to see all {UPDATES}. For the whole run open trace.json in ui.perfetto.dev."
    )
    height = 110 + 34 * len(rows)
    return Figure(title, note, data, layout, height=height, wide=True, legend=True, zoom=True)


def rank(worker: str) -> tuple[int, str]:
    """Return a sort key for workers: samplers, scorers, learner, others."""
    order = ("sampler", "scorer", "learner")
    return next((i for i, name in enumerate(order) if worker.startswith(name)), len(order)), worker


def busy(run: Reading, found: Sequence[Slice], *, named: bool) -> Figure:
    """Draw the busy share of every worker over the whole run."""
    end = max(each.start + each.seconds for each in found)
    steps = min(STEPS, max(1, len(run.metrics)))
    width = end / steps
    workers = sorted({each.worker for each in found}, key=rank)
    shares = {worker: [0.0] * steps for worker in workers}
    for each in found:
        step, at, left = min(int(each.start / width), steps - 1), each.start, each.seconds
        while left > 1e-9 and step < steps:
            part = min(left, (step + 1) * width - at) if step < steps - 1 else left
            shares[each.worker][step] += part / width
            step, at, left = step + 1, at + part, left - part
    values = [[number(min(share, 1.0)) for share in shares[worker]] for worker in reversed(workers)]
    trace: Json = {
        "type": "heatmap",
        "x": numbers([(step + 0.5) * width for step in range(steps)]),
        "y": [plain(worker) for worker in reversed(workers)],
        "z": values,
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "var(--s1/0.04)"], [1, "var(--s1)"]],
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y} at %{x:.1f} s: %{z:.0%} busy<extra></extra>",
    }
    means = {worker: mean(shares[worker]) for worker in workers}
    most = max(means, key=means.__getitem__)
    title = f"Busiest: {most}, {shown(min(means[most], 1.0), share=True)} of the time" + (
        f" ({run.name})" if named else ""
    )
    note = "Dark is busy, light is idle. The slowest stage should be dark all the time."
    layout = {"xaxis": {"title": {"text": "seconds since the run began"}}, "yaxis": {"type": "category"}}
    return Figure(title, note, [trace], layout | {"hovermode": "closest"}, height=110 + 28 * len(workers), wide=True)


def episodes(run: Reading) -> Figure | None:
    """Draw some episodes around the middle update, turn by turn; None without episodes."""
    updates = run.columns["update"][0]
    middle = run.at(updates[len(updates) // 2]) * 1e6
    room, begun = iter(range(EPISODES * EVENTS)), False

    def wanted(_: int, line: bytes) -> bool:
        nonlocal begun
        if not line.startswith(NESTED):
            return False
        begun = begun or (WHOLE in line and line.startswith(NESTED[0]) and stamp(line) >= middle)
        return begun and next(room, None) is not None

    lines = run.run.picked(TRACE, wanted)
    spans = paired(lines)
    if not spans:
        return None
    names = list(dict.fromkeys(name for name, *_ in spans))[:EPISODES]
    spans = [span for span in spans if span[0] in names]
    zero = {name: min(start for each, _, start, _ in spans if each == name) for name in names}
    found = {kind for _, kind, *_ in spans}
    kinds = [kind for kind in DOES if kind in found] + sorted(found - set(DOES))
    data: list[Json] = []
    for slot, kind in enumerate(kinds):
        mine = [span for span in spans if span[1] == kind]
        data.append({
            "type": "bar",
            "orientation": "h",
            "name": plain(kind),
            "y": [plain(f"group {name}") for name, *_ in mine],
            "base": [round(start - zero[name], 4) for name, _, start, _ in mine],
            "x": [round(end - start, 4) for *_, start, end in mine],
            "hovertemplate": "%{x:.3f} s<extra>%{y}: " + plain(kind) + "</extra>",
            "marker": {"color": colour(slot)},
        })  # fmt: skip
    layout: Json = {
        "barmode": "overlay",
        "bargap": 0.3,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "seconds since the episode began"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed", "fixedrange": True},
    }
    total = {kind: sum(end - start for _, k, start, end in spans if k == kind) for kind in kinds}
    all_of_it = sum(total.values()) or 1.0
    parts = ", ".join(f"{shown(seconds / all_of_it, share=True)} {kind}" for kind, seconds in total.items())
    title = f"Time of an episode: {parts}"
    note = (
        f"{len(names)} episodes from the middle of {run.name}. turn: the student generates; step: the environment runs."
    )
    return Figure(title, note, data, layout, height=110 + 20 * len(names), wide=True, legend=True)


def stamp(line: bytes) -> float:
    """Return the time of an event without parsing the whole line; −1 if unknown."""
    found = re.search(rb'"ts": (\d+)', line)
    return float(found[1]) if found else -1.0


def paired(lines: Iterable[Line]) -> list[tuple[str, str, float, float]]:
    """Return (episode, activity, start, end) for the parts of episodes."""
    begun, spans = dict[tuple[str, str], float](), list[tuple[str, str, float, float]]()
    for line in lines:
        key, at = (str(line["id"]), str(line["name"])), line["ts"] / 1e6
        if key[1].startswith("episode "):
            continue
        if line["ph"] == "b":
            begun[key] = at
        elif key in begun:
            spans.append((*key, begun.pop(key), at))
    return spans
