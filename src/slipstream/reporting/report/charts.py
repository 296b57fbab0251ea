"""Figures that combine several metrics: accuracy, waits, idle workers, lags, noise, lost work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import stdev

from slipstream.metric_names import below
from slipstream.reporting.report import figures, timeline
from slipstream.reporting.report.figures import Figure, Series
from slipstream.reporting.report.points import mean
from slipstream.reporting.report.runs import Reading
from slipstream.reporting.report.titles import course, duration, shown

LAGS = 32
"""Number of bars of the histogram; the last bar includes all larger lags."""
WAITS = {
    "learn": "learning",
    "data": "waiting for scored groups",
    "turn": "waiting for the schedule's order or age bound",
    "relabel": "waiting for teachers to score again",
    "weights": "waiting for a publish",
}
PUBLISH = {"wait": "waiting for requests to pause", "load": "loading weights", "rebuild": "recomputing prefixes"}
GROUPS = {
    "rolling": "being rolled out",
    "waiting": "waiting for a scorer",
    "scoring": "with a scorer",
    "ready": "waiting for the learner",
}


def accuracy(runs: Sequence[Reading]) -> Iterator[Figure]:
    """Draw the accuracy on every held-out set, over updates and over wall-clock time."""
    sets = dict.fromkeys(name for run in runs for name, *_ in run.accuracy())
    for name in sets:
        found = [
            (slot, run, updates, values, errors)
            for slot, run in enumerate(runs)
            for each, updates, values, errors in run.accuracy()
            if each == name
        ]
        label = f"Accuracy on {name}" if name else "Held-out accuracy"
        those = [run for _, run, *_ in found]
        note = "Error bars: one standard error over the held-out prompts, at most."
        for clock in (False, True):
            series = [
                Series(run.name, [run.at(u) for u in updates] if clock else updates, values, slot, errors)
                for slot, run, updates, values, errors in found
            ]
            ends = [
                f"{shown(each.y[-1], share=True)} after {duration(each.x[-1])}"
                if clock
                else f"{shown(each.y[0], share=True)} → {shown(each.y[-1], share=True)}"
                for each in series
            ]
            x, against = ("seconds since the run began", "wall clock") if clock else ("update", "updates")
            title = f"{label} against {against}: {named(ends, those)}"
            yield figures.curves(title, note, series, x=x, y="accuracy", share=True, marks=True)


def waits(runs: Sequence[Reading]) -> Figure:
    """Draw the learner's activities as shares of wall-clock time."""
    seconds = {run.name: sum(run.values("seconds/update")) for run in runs}
    parts = {
        label: [sum(run.values(f"seconds/{name}")) / seconds[run.name] for run in runs]
        for name, label in WAITS.items()
        if any(any(run.values(f"seconds/{name}")) for run in runs)
    }
    parts["other"] = [max(0.0, 1 - sum(values[i] for values in parts.values())) for i in range(len(runs))]
    busy = parts.get(WAITS["learn"], [0.0] * len(runs))
    title = "The learner was training " + named([f"{shown(share, share=True)} of the time" for share in busy], runs)
    note = "If it waits for scored groups, add samplers or scorers. If it waits for order or age, widen the bound."
    return figures.stacks(
        title, note, [run.name for run in runs], parts, x="share of time since the first update", share=True
    )


def publishes(runs: Sequence[Reading]) -> Figure | None:
    """Draw the seconds of a publish: waiting for requests to pause, loading, recomputing. None without publishes."""
    parts = {
        label: [mean(run.values(f"publish/{name}")) for run in runs]
        for name, label in PUBLISH.items()
        if any(run.values(f"publish/{name}") for run in runs)
    }
    if not parts:
        return None
    took = [sum(value for value in values if isfinite(value)) for values in zip(*parts.values(), strict=True)]
    title = "A sampler spent " + named([f"{shown(seconds)} s on a publish" for seconds in took], runs)
    return figures.stacks(title, "Mean over updates.", [run.name for run in runs], parts, x="seconds in a sampler")


def named(texts: Sequence[str], runs: Sequence[Reading]) -> str:
    """Join the text of each run, with the run's name if there are several."""
    if len(runs) == 1:
        return texts[0]
    return ", ".join(f"{each} ({run.name})" for each, run in zip(texts, runs, strict=True))


def places(runs: Sequence[Reading]) -> Figure | None:
    """Draw the mean number of groups in each stage at the end of an update; None without data."""
    parts = {
        label: [mean(run.values(f"groups/{name}")) for run in runs]
        for name, label in GROUPS.items()
        if all(run.values(f"groups/{name}") for run in runs)
    }
    if not parts or not any(map(any, parts.values())):
        return None
    most = max(parts, key=lambda label: parts[label][0])
    title = f"Most groups in flight were {most}" + (f" ({runs[0].name})" if len(runs) > 1 else "")
    note = "If most wait for a scorer, add scorers. If most wait for the learner, it is the slowest stage."
    return figures.stacks(title, note, [run.name for run in runs], parts, x="groups, mean over updates")


def idle(runs: Sequence[Reading]) -> Figure | None:
    """Draw the share of time in which each worker was idle; None without data."""
    names = sorted({name for run in runs for name in run.columns if name.startswith("idle/")}, key=by_stage)
    if not names:
        return None
    labels = [name.removeprefix("idle/") for name in names]
    series = [Series(run.name, [], [weighted(run, name) for name in names], slot) for slot, run in enumerate(runs)]
    flat = [(value, label, each.name) for each in series for value, label in zip(each.y, labels, strict=True)]
    value, label, name = max(each for each in flat if each[0] == each[0])
    whose = f"{label} of {name}" if len(runs) > 1 else label
    title = f"Most idle: {whose}, {shown(value, share=True)} of the time"
    note = "idle/WORKER over the whole run. It should be near 0 in the slowest stage."
    return figures.bars(title, note, labels, series, y="share of the time", share=True)


def by_stage(name: str) -> tuple[int, str]:
    return timeline.rank(name.removeprefix("idle/"))


def weighted(run: Reading, name: str) -> float:
    """Return the mean of a metric, weighted by the duration of the updates."""
    values, seconds = run.values(name), run.values("seconds/update")
    total = sum(seconds)
    return (
        sum(v * s for v, s in zip(values, seconds, strict=True)) / total
        if len(values) == len(seconds)
        else mean(values)
    )


def lags(runs: Sequence[Reading]) -> Figure | None:
    """Draw the distribution of the lags of trained tokens; None without data."""
    counts = [tokens_by_lag(run) for run in runs]
    if not any(counts):
        return None
    most = min(max(lag for count in counts for lag in count), LAGS)
    labels = [str(lag) if lag < LAGS else f"{LAGS} +" for lag in range(most + 1)]
    series = list[Series]()
    for slot, (run, count) in enumerate(zip(runs, counts, strict=True)):
        total = sum(count.values()) or 1.0
        shares = [0.0] * (most + 1)
        for lag, tokens in count.items():
            shares[min(lag, most)] += tokens / total
        series.append(Series(run.name, [], shares, slot))
    means = [sum(lag * n for lag, n in count.items()) / (sum(count.values()) or 1) for count in counts]
    most_of = [max(count, default=0) for count in counts]
    summary = named([f"{shown(a)} on average, {b} at most" for a, b in zip(means, most_of, strict=True)], runs)
    return figures.bars(
        f"Lag of trained tokens: {summary}", "Updates between sampling a token and training on it, over the whole run.",
        labels, series, x="lag, in updates", y="share of tokens", share=True,
    )  # fmt: skip


def tokens_by_lag(run: Reading) -> dict[int, float]:
    found = [(re.fullmatch(r"lag/tokens_(\d+)", name), values) for name, (_, values) in run.columns.items()]
    return {int(match[1]): sum(values) for match, values in found if match}


def drift_by_lag(runs: Sequence[Reading], metric: str = "drift/kl") -> Figure | None:
    """Draw the KL by lag: mean over updates and its standard error; None for fewer than two lags."""
    pattern = re.compile(rf"{metric}/lag_(\d+)(-\d+)?")
    found = {name: int(match[1]) for run in runs for name in run.columns if (match := pattern.fullmatch(name))}
    names = sorted(found, key=found.__getitem__)
    if len(names) < 2:
        return None
    series = list[Series]()
    for slot, run in enumerate(runs):
        values = [run.values(name) for name in names]
        errors = [stdev(each) / len(each) ** 0.5 if len(each) > 1 else None for each in values]
        series.append(Series(run.name, [], [mean(each) for each in values], slot, errors))
    labels = [name.rpartition("lag_")[2] for name in names]
    ends = series[0].y
    most = max(range(len(ends)), key=ends.__getitem__)
    title = f"KL by lag: {shown(ends[0])} at lag {labels[0]}, and at most {shown(ends[most])}, at lag {labels[most]}"
    title += f" ({runs[0].name})" if len(runs) > 1 else ""
    note = "drift/kl by lag: mean over updates ± one standard error. If it is not near 0 at lag 0, the engines differ."
    return figures.bars(title, note, labels, series, x="lag, in updates", y="nats per token")


def noise(runs: Sequence[Reading]) -> Figure | None:
    """Draw the noise of the gradient divided by its signal; None without data."""
    series = list[Series]()
    for slot, run in enumerate(runs):
        if "gradient/noise" in run.columns and "gradient/signal" in run.columns:
            updates, signals = run.columns["gradient/signal"]
            pairs = list(zip(updates, signals, run.values("gradient/noise"), strict=False))
            kept = [(update, noise / signal) for update, signal, noise in pairs if signal > 0]
            series.append(Series(run.name, [update for update, _ in kept], [ratio for _, ratio in kept], slot))
    if not any(each.y for each in series):
        return None
    return figures.curves(
        course("Gradient noise / signal", {each.name: each.y for each in series}),
        "gradient/noise / gradient/signal. Above 1 steps are mostly random: use larger batches or a lower lr.",
        series, x="update", y="noise / signal", band=below(1.0),
    )  # fmt: skip


def lost(runs: Sequence[Reading]) -> Figure | None:
    """Draw dropped groups by reason, and failed responses; None if nothing was lost."""
    kinds = {"dropped/": "{}", "failed/": "failed: {}", "ungraded/": "no reward: {}"}
    names: dict[str, str] = {}
    for run in runs:
        for name in run.columns:
            head, slash, tail = name.partition("/")
            if head + slash in kinds:
                names[name] = kinds[head + slash].format(tail)
    names |= {name: label for name, label in {"restarted": "restarted"}.items() if any(run.last(name) for run in runs)}
    labels = [label for name, label in names.items() if any(run.last(name) for run in runs)]
    if not labels:
        return None
    rows = [name for name, label in names.items() if label in labels]
    series = [Series(run.name, [], [run.last(name) or 0.0 for name in rows], slot) for slot, run in enumerate(runs)]
    thrown = named([f"{shown(run.last('thrown_tokens') or 0.0)} tokens" for run in runs], runs)
    return figures.bars(f"Lost work: {thrown}", "By reason, over the whole run.", labels, series, y="count")
