"""Figures from trace.json: a Gantt chart of updates in the middle, and busy shares over the whole run.

A run can have millions of events, so the chart shows UPDATES updates, and the shares TIMELINE_STEPS time steps.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from slipstream.reporting.report.figures import Figure, Json, mean, number, numbers, plain, row_axes, row_bars
from slipstream.reporting.report.runs import Reading
from slipstream.reporting.report.titles import short
from slipstream.run_dir.reading import Line
from slipstream.run_dir.writing import TRACE

UPDATES, SLICES = 24, 2000
"""Limits of the Gantt chart: number of updates, and number of slices (activities of workers) per run."""
SIGHT = 6
"""Number of updates in the initial view."""
TIMELINE_STEPS = 240
EPISODES, EVENTS = 14, 40
"""Largest number of episodes that are drawn, and of events that are read for each."""
SLICE, NAME, NESTED = b'{"ph": "X"', b'{"ph": "M"', (b'{"ph": "b", "cat": "episode"', b'{"ph": "e", "cat": "episode"')
"""First bytes of the trace events to read, in the format of pipeline/trace.py."""
WHOLE = b'"name": "episode '
"""Part of the line of a whole episode's event, which no line of a turn or step has."""
ORDER = ("rollout", "score", "update", "export", "turn", "step")
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
    bars = list[Slice]()
    spans = list[tuple[float, float]]()
    for run, of_run in zip(runs, found, strict=True):
        whole = stretch(run, of_run)
        zero = whole.sight[0] if several else 0.0
        spans.append((whole.sight[0] - zero, whole.sight[1] - zero))
        inside = [each for each in of_run if each.start < whole.end and each.start + each.seconds > whole.start]
        prefix = f"{run.name} · " if several else ""
        rows += [prefix + worker for worker in sorted({each.worker for each in inside}, key=rank)]
        bars += [each._replace(worker=prefix + each.worker, start=each.start - zero) for each in inside]
    overlaps = ", ".join(
        f"{short(run.digest['overlap/stages'])}" + (f" ({run.name})" if several else "") for run in runs if run.digest
    )
    title = "Activity of workers" + (f": {overlaps} busy stages on average" if overlaps else "")
    shown = min(UPDATES, max(len(run.metrics) for run in runs))
    note = (
        f"Bars are work, gaps are idle time. The view shows about {SIGHT} updates from the middle of the run; "
        f"double-click to see all {shown}. For the whole run open trace.json in ui.perfetto.dev."
    )
    figure = activities(title, note, rows, bars, "seconds" if several else "seconds since the run began")
    figure.layout["xaxis"]["range"] = numbers([min(start for start, _ in spans), max(end for _, end in spans)])
    return replace(figure, height=110 + 34 * len(rows), zoom=True)


def activities(title: str, note: str, rows: Sequence[str], bars: Sequence[Slice], x: str) -> Figure:
    data = []
    for slot, kind in enumerate(kinds(bars)):
        own = [bar for bar in bars if bar.kind == kind]
        text = {
            "text": [plain(bar.name) for bar in own],
            "textposition": "none",
            "hovertemplate": "%{text}: %{x:.3f} s<extra>%{y}</extra>",
        }
        trace = row_bars(slot, kind, [bar.worker for bar in own], [round(bar.seconds, 4) for bar in own])
        trace["marker"]["line"] = {"width": 0.5, "color": "var(--paper)"}
        data.append(trace | text | {"base": [round(bar.start, 4) for bar in own]})
    layout = row_axes(x, list(map(plain, rows))) | {"barmode": "overlay", "bargap": 0.25}
    layout["yaxis"] |= {"fixedrange": True, "range": [-0.5, len(rows) - 0.5]}
    return Figure(title, note, data, layout, height=110 + 20 * len(rows), wide=True, legend=True)


def kinds(bars: Iterable[Slice]) -> list[str]:
    """Return all kinds of activity, those of ORDER first."""
    found = dict.fromkeys(bar.kind for bar in bars)
    return sorted(found, key=lambda kind: ORDER.index(kind) if kind in ORDER else len(ORDER))


def rank(worker: str) -> tuple[int, str]:
    """Return a sort key for workers: samplers, scorers, learner, others."""
    order = ("sampler", "scorer", "learner")
    return next((i for i, name in enumerate(order) if worker.startswith(name)), len(order)), worker


def busy(run: Reading, found: Sequence[Slice], *, named: bool) -> Figure:
    end = max(each.start + each.seconds for each in found)
    steps = min(TIMELINE_STEPS, max(1, len(run.metrics)))
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
    title = f"Busiest: {most}, {short(min(means[most], 1.0), share=True)} of the time"
    title += f" ({run.name})" if named else ""
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

    spans = paired(run.run.picked(TRACE, wanted))
    if not spans:
        return None
    rows = list(dict.fromkeys(each.worker for each in spans))[:EPISODES]
    began = {row: min(each.start for each in spans if each.worker == row) for row in rows}
    bars = [each._replace(start=each.start - began[each.worker]) for each in spans if each.worker in rows]
    seconds = {kind: sum(bar.seconds for bar in bars if bar.kind == kind) for kind in kinds(bars)}
    whole = sum(seconds.values()) or 1.0
    parts = [f"{short(part / whole, share=True)} {kind}" for kind, part in seconds.items()]
    note = (
        f"{len(rows)} episodes from the middle of {run.name}. turn: the student generates; step: the environment runs."
    )
    title = f"Time of an episode: {', '.join(parts)}"
    figure = activities(title, note, rows, bars, "seconds since the episode began")
    figure.layout["xaxis"]["rangemode"] = "tozero"
    return figure


def stamp(line: bytes) -> float:
    """Return the time of an event in µs without parsing the whole line; −1 if unknown."""
    found = re.search(rb'"ts": (\d+)', line)
    return float(found[1]) if found else -1.0


def paired(lines: Iterable[Line]) -> list[Slice]:
    """Return the parts of episodes, each with its group as worker."""
    begun, spans = dict[tuple[str, str], float](), list[Slice]()
    for line in lines:
        key, at = (str(line["id"]), str(line["name"])), line["ts"] / 1e6
        if line["ph"] == "b" and not key[1].startswith("episode "):
            begun[key] = at
        elif key in begun:
            start = begun.pop(key)
            spans.append(Slice(f"group {key[0]}", key[1], start, at - start))
    return spans
