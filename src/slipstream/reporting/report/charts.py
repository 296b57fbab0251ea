"""Figures that combine several metrics: accuracy, waits, idle workers, lags, noise, lost work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from statistics import stdev

from slipstream.metric_names import below
from slipstream.reporting.report import figures, timeline
from slipstream.reporting.report.figures import Figure, Series
from slipstream.reporting.report.points import mean
from slipstream.reporting.report.runs import Reading, held_out_sets
from slipstream.reporting.report.titles import course, duration, shown

SECONDS = "seconds since the run began"
LAGS = 32
"""Number of bars of the histogram; the last bar includes all larger lags."""
WAITS = {
    "learn": "learning",
    "data": "waiting for scored groups",
    "turn": "waiting for the schedule's order or age bound",
    "relabel": "waiting for teachers to score again",
    "weights": "waiting for a publish",
}
LOSSES = {"dropped/": "{}", "failed/": "failed: {}", "ungraded/": "no reward: {}", "restarted": "restarted"}
PUBLISH = {"wait": "waiting for requests to pause", "load": "loading weights", "rebuild": "recomputing prefixes"}
GROUPS = {
    "rolling": "being rolled out",
    "waiting": "waiting for a scorer",
    "scoring": "with a scorer",
    "ready": "waiting for the learner",
}


def held_out(runs: Sequence[Reading]) -> Iterator[Figure]:
    note = "Error bars: one standard error over the held-out prompts, at most."
    for key in held_out_sets(runs):
        measure, name = key
        share, kind = measure == "accuracy", "accuracy" if measure == "accuracy" else "KL to the teacher"
        y = kind if share else "nats per token"
        label = f"{kind[0].upper()}{kind[1:]} on {name}" if name else f"Held-out {kind}"
        found = [(slot, run, run.held_out[key]) for slot, run in enumerate(runs) if key in run.held_out]
        measured = [run for _, run, _ in found]
        series = [Series(run.name, each.updates, each.values, slot, each.errors) for slot, run, each in found]
        changes = [f"{shown(each.y[0], share=share)} → {shown(each.y[-1], share=share)}" for each in series]
        title = f"{label} against updates: {named(changes, measured)}"
        yield figures.curves(title, note, series, x="update", y=y, share=share, marks=True)
        series = [replace(each, x=[run.at(u) for u in each.x]) for each, run in zip(series, measured, strict=True)]
        ends = [f"{shown(each.y[-1], share=share)} after {duration(each.x[-1])}" for each in series]
        title = f"{label} against wall clock: {named(ends, measured)}"
        yield figures.curves(title, note, series, x=SECONDS, y=y, share=share, marks=True)


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
    found = {name.removeprefix("idle/") for run in runs for name in run.columns if name.startswith("idle/")}
    workers = sorted(found, key=timeline.rank)
    if not workers:
        return None
    series = [
        Series(run.name, [], [weighted(run, f"idle/{worker}") for worker in workers], slot)
        for slot, run in enumerate(runs)
    ]
    shares = [(share, worker, run.name) for run in series for share, worker in zip(run.y, workers, strict=True)]
    share, worker, name = max(each for each in shares if isfinite(each[0]))
    title = f"Most idle: {worker}{f' of {name}' if len(runs) > 1 else ''}, {shown(share, share=True)} of the time"
    note = "idle/WORKER over the whole run. It should be near 0 in the slowest stage."
    return figures.bars(title, note, workers, series, y="share of the time", share=True)


def weighted(run: Reading, name: str) -> float:
    """Return the mean of a metric, weighted by the duration of the updates."""
    values, seconds = run.values(name), run.values("seconds/update")
    if len(values) != len(seconds):
        return mean(values)
    return sum(value * time for value, time in zip(values, seconds, strict=True)) / sum(seconds)


def lags(runs: Sequence[Reading]) -> Figure | None:
    """Draw the distribution of the lags of trained tokens; None without data."""
    counts = [
        {
            int(name.removeprefix("lag/tokens_")): sum(values)
            for name, (_, values) in run.columns.items()
            if name.startswith("lag/tokens_")
        }
        for run in runs
    ]
    if not any(counts):
        return None
    last = min(max(lag for count in counts for lag in count), LAGS)
    series, summaries = list[Series](), list[str]()
    for slot, (run, count) in enumerate(zip(runs, counts, strict=True)):
        total = sum(count.values()) or 1.0
        shares = [0.0] * (last + 1)
        for lag, tokens in count.items():
            shares[min(lag, last)] += tokens / total
        series.append(Series(run.name, [], shares, slot))
        average = sum(lag * tokens for lag, tokens in count.items()) / total
        summaries.append(f"{shown(average)} on average, {max(count, default=0)} at most")
    title = f"Lag of trained tokens: {named(summaries, runs)}"
    note = "Updates between sampling a token and training on it, over the whole run."
    labels = [str(lag) if lag < LAGS else f"{LAGS} +" for lag in range(last + 1)]
    return figures.bars(title, note, labels, series, x="lag, in updates", y="share of tokens", share=True)


def drift_by_lag(runs: Sequence[Reading]) -> Figure | None:
    """Draw the KL by lag: mean over updates and its standard error; None for fewer than two lags."""
    pattern = re.compile(r"drift/kl/lag_(\d+)(-\d+)?")
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
    kl = series[0].y
    most = max(range(len(kl)), key=kl.__getitem__)
    title = f"KL by lag: {shown(kl[0])} at lag {labels[0]}, and at most {shown(kl[most])}, at lag {labels[most]}"
    title += f" ({runs[0].name})" if len(runs) > 1 else ""
    note = "drift/kl by lag: mean over updates ± one standard error. If it is not near 0 at lag 0, the engines differ."
    return figures.bars(title, note, labels, series, x="lag, in updates", y="nats per token")


def noise(runs: Sequence[Reading]) -> Figure | None:
    """Draw the noise of the gradient divided by its signal; None without data."""
    series = list[Series]()
    for slot, run in enumerate(runs):
        lines = [line for line in run.metrics if line.get("gradient/signal", 0.0) > 0 and "gradient/noise" in line]
        ratios = [line["gradient/noise"] / line["gradient/signal"] for line in lines]
        if ratios:
            series.append(Series(run.name, [line["update"] for line in lines], ratios, slot))
    if not series:
        return None
    title = course("Gradient noise / signal", {each.name: each.y for each in series})
    note = "gradient/noise / gradient/signal. Above 1 steps are mostly random: use larger batches or a lower lr."
    return figures.curves(title, note, series, x="update", y="noise / signal", band=below(1.0))


def lost(runs: Sequence[Reading]) -> Figure | None:
    """Draw dropped groups by reason, restarted groups, and failed responses; None if nothing was lost."""
    labels = dict[str, str]()
    for name in [name for run in runs for name in run.columns if run.last(name)]:
        kind, slash, reason = name.partition("/")
        if kind + slash in LOSSES:
            labels[name] = LOSSES[kind + slash].format(reason)
    if not labels:
        return None
    series = [Series(run.name, [], [run.last(name) or 0.0 for name in labels], slot) for slot, run in enumerate(runs)]
    tokens = named([f"{shown(run.last('thrown_tokens') or 0.0)} tokens" for run in runs], runs)
    note = "By reason, over the whole run."
    return figures.bars(f"Lost work: {tokens}", note, list(labels.values()), series, y="count")
