"""Figures that are more than one metric over updates: accuracy, waits, idle workers, lags, noise, lost work."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isfinite
from statistics import stdev

from slipstream.metric_names import below
from slipstream.reporting.report import figures, timeline
from slipstream.reporting.report.figures import Figure, Series
from slipstream.reporting.report.findings import course, duration, shown
from slipstream.reporting.report.points import mean
from slipstream.reporting.report.runs import Reading

LAGS = 32
"""Bars of the histogram; what is older is in the last."""
WAITS = {
    "learn": "learning",
    "data": "waiting for scored groups",
    "turn": "waiting for order or age",
    "relabel": "waiting for teachers asked again",
    "weights": "waiting for a publish",
}
PUBLISH = {"wait": "until all stood still", "load": "loading weights", "rebuild": "running prefixes through them"}
GROUPS = {
    "rolling": "being rolled out",
    "waiting": "waiting for a scorer",
    "scoring": "with a scorer",
    "ready": "waiting for the learner",
}


def accuracy(runs: Sequence[Reading]) -> Iterator[Figure]:
    """Against updates and against the clock, for every held-out set."""
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
        note = "Bars are at most one standard error of the held-out prompts."
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
    """What the learner's time went into, as shares of the wall clock."""
    seconds = {run.name: sum(run.values("seconds/update")) for run in runs}
    parts = {
        label: [sum(run.values(f"seconds/{name}")) / seconds[run.name] for run in runs]
        for name, label in WAITS.items()
        if any(any(run.values(f"seconds/{name}")) for run in runs)
    }
    parts["the rest"] = [max(0.0, 1 - sum(values[i] for values in parts.values())) for i in range(len(runs))]
    busy = parts.get(WAITS["learn"], [0.0] * len(runs))
    title = "The learner learned " + named([f"{shown(share, share=True)} of the time" for share in busy], runs)
    note = "Waiting for scored groups: more samplers or scorers. For order or age: a wider bound."
    return figures.stacks(
        title, note, [run.name for run in runs], parts, x="share of the time from the first update on", share=True
    )


def publishes(runs: Sequence[Reading]) -> Figure | None:
    """What a publish took: until running requests stood still, to load, to go on."""
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


def named(told: Sequence[str], runs: Sequence[Reading]) -> str:
    """What is told of each run, with its name where there are several."""
    if len(runs) == 1:
        return told[0]
    return ", ".join(f"{each} ({run.name})" for each, run in zip(told, runs, strict=True))


def places(runs: Sequence[Reading]) -> Figure | None:
    """Where groups were, on average at the end of an update."""
    parts = {
        label: [mean(run.values(f"groups/{name}")) for run in runs]
        for name, label in GROUPS.items()
        if all(run.values(f"groups/{name}") for run in runs)
    }
    if not parts or not any(map(any, parts.values())):
        return None
    most = max(parts, key=lambda label: parts[label][0])
    title = f"Most groups in flight were {most}" + (f" ({runs[0].name})" if len(runs) > 1 else "")
    note = "Waiting for a scorer: more scorers. Waiting for the learner: it is the slowest."
    return figures.stacks(title, note, [run.name for run in runs], parts, x="groups, mean over updates")


def idle(runs: Sequence[Reading]) -> Figure | None:
    """What share of its time every worker had nothing to do."""
    names = sorted({name for run in runs for name in run.columns if name.startswith("idle/")}, key=by_stage)
    if not names:
        return None
    labels = [name.removeprefix("idle/") for name in names]
    series = [Series(run.name, [], [weighted(run, name) for name in names], slot) for slot, run in enumerate(runs)]
    flat = [(value, label, each.name) for each in series for value, label in zip(each.y, labels, strict=True)]
    value, label, name = max(each for each in flat if each[0] == each[0])
    whose = f"{label} of {name}" if len(runs) > 1 else label
    title = f"Most idle: {whose}, {shown(value, share=True)} of the time"
    note = "idle/WORKER, over the whole run: near 0 for the dearest."
    return figures.bars(title, note, labels, series, y="share of the time", share=True)


def by_stage(name: str) -> tuple[int, str]:
    """idle/WORKER, as work flows."""
    return timeline.rank(name.removeprefix("idle/"))


def weighted(run: Reading, name: str) -> float:
    """The mean over the time of updates."""
    values, seconds = run.values(name), run.values("seconds/update")
    total = sum(seconds)
    return (
        sum(v * s for v, s in zip(values, seconds, strict=True)) / total
        if len(values) == len(seconds)
        else mean(values)
    )


def lags(runs: Sequence[Reading]) -> Figure | None:
    """What share of the trained tokens was how old."""
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
    told = named([f"{shown(a)} on average, {b} at most" for a, b in zip(means, most_of, strict=True)], runs)
    return figures.bars(
        f"Lag of trained tokens: {told}", "Updates between a token and the one that learned from it, all of the run.",
        labels, series, x="lag, in updates", y="share of tokens", share=True,
    )  # fmt: skip


def tokens_by_lag(run: Reading) -> dict[int, float]:
    found = [(re.fullmatch(r"lag/tokens_(\d+)", name), values) for name, (_, values) in run.columns.items()]
    return {int(match[1]): sum(values) for match, values in found if match}


def drift_by_lag(runs: Sequence[Reading], metric: str = "drift/kl") -> Figure | None:
    """The KL of tokens of one lag: mean over updates, and its standard error."""
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
    note = "drift/kl by lag, mean over updates with its standard error. Near 0 at lag 0, or engines differ."
    return figures.bars(title, note, labels, series, x="lag, in updates", y="nats per token")


def noise(runs: Sequence[Reading]) -> Figure | None:
    """How much of a gradient is noise: the variance of its mean, over its square."""
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
        course("Noise in a gradient, over its signal", {each.name: each.y for each in series}),
        "gradient/noise over gradient/signal. Above 1 a step goes where chance leads: larger batches, or a lower rate.",
        series, x="update", y="noise / signal", band=below(1.0),
    )  # fmt: skip


def lost(runs: Sequence[Reading]) -> Figure | None:
    """Groups that were not trained on, by reason, and members that failed."""
    kinds = {"dropped/": "{}", "failed/": "failed: {}", "ungraded/": "no reward: {}"}
    names: dict[str, str] = {}
    for run in runs:
        for name in run.columns:
            head, slash, tail = name.partition("/")
            if head + slash in kinds:
                names[name] = kinds[head + slash].format(tail)
    names |= {
        name: label for name, label in {"restarted": "begun again"}.items() if any(run.last(name) for run in runs)
    }
    labels = [label for name, label in names.items() if any(run.last(name) for run in runs)]
    if not labels:
        return None
    rows = [name for name, label in names.items() if label in labels]
    series = [Series(run.name, [], [run.last(name) or 0.0 for name in rows], slot) for slot, run in enumerate(runs)]
    thrown = named([f"{shown(run.last('thrown_tokens') or 0.0)} tokens" for run in runs], runs)
    return figures.bars(f"Work that was thrown away: {thrown}", "By reason, all of the run.", labels, series, y="count")
