"""Figures of runs: one for each metric that has a title, and those that combine several metrics."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite, nan

from slipstream.metric_names import Metric, below, describe, patterns
from slipstream.reporting.report import figures, timeline
from slipstream.reporting.report.figures import Figure, Series, mean
from slipstream.reporting.report.runs import Reading, held_out_sets
from slipstream.reporting.report.titles import course, duration, first_and_last, inside, short
from slipstream.statistics import standard_error

RUN_SECONDS = "seconds since the run began"
MAX_LAG = 32
"""Largest lag with a bar of its own in the histogram; the last bar includes all larger lags."""
WAITS = {
    "learn": "learning",
    "data": "waiting for scored groups",
    "turn": "waiting for the schedule's order or age bound",
    "relabel": "waiting for teachers to score again",
    "weights": "waiting for publishes and evaluations",
}
LOST_WORK = {"dropped/": "{}", "failed/": "failed: {}", "ungraded/": "no reward: {}", "restarted": "restarted"}
PUBLISH_PARTS = {"wait": "waiting for requests to pause", "load": "loading weights", "rebuild": "recomputing prefixes"}
PLACES = {
    "rolling": "being rolled out",
    "waiting": "waiting for a scorer",
    "scoring": "with a scorer",
    "ready": "waiting for the learner",
}


# --- one metric -------------------------------------------------------------------------------------------------------


def of_metrics(section: str, runs: Sequence[Reading]) -> Iterator[Figure]:
    """Yield a figure for every metric of a section that any run has, unless it has its idle value all the time."""
    names = dict.fromkeys(name for run in runs for name in run.columns)
    drawn = [pattern for pattern, row in patterns() if row.section == section]
    described = [describe(name) for pattern in drawn for name in names if pattern.fullmatch(name)]
    for row in filter(None, described):
        if row.idle is None or any(value != row.idle for run in runs for value in run.values(row.names)):
            yield of_metric(row, runs)


def measure_row(measure: str) -> Metric:
    """Return the row of a study's measure; a measure without a title has its name as title."""
    of_set, _, name = (
        measure.removeprefix("eval/").rpartition("/") if measure.startswith("eval/") else ("", "", measure)
    )
    row = describe(name)
    if not row or not row.title:
        return Metric(measure, "", "–", "", title=measure)
    return replace(row, title=f"{row.title} on {of_set}") if of_set else row


def of_metric(row: Metric, runs: Sequence[Reading]) -> Figure:
    name = row.names
    values = {run.name: run.values(name) for run in runs}
    health = f" {inside(row.band, values)}" if row.band else "" if row.healthy == "–" else f" Healthy: {row.healthy}."
    return figures.curves(
        ". ".join(course(label, part, share=row.is_share) for label, part in by_stage(name, row.title, runs)),
        f"{name}: {row.meaning}.{health}",
        [Series(run.name, *run.columns[name], slot) for slot, run in enumerate(runs) if name in run.columns],
        x="update",
        y=row.unit,
        exact=row.exact,
        share=row.is_share,
        band=row.band,
    )


def by_stage(name: str, label: str, runs: Sequence[Reading]) -> list[tuple[str, dict[str, list[float]]]]:
    """Return the label and the values of each stage of a run, if the metric spans both; else those of whole runs."""
    supervised = {
        update for run in runs for update, value in zip(*run.columns.get("sft", ([], [])), strict=True) if value
    }
    parts: dict[str, list[float]] = {"supervised": [], "later": []}
    for update, value in zip(*runs[0].columns.get(name, ([], [])), strict=True):
        parts["supervised" if update in supervised else "later"].append(value)
    if len(runs) == 1 and all(parts.values()) and name != "sft":
        return [(f"{label} in {stage} updates", {runs[0].name: part}) for stage, part in parts.items()]
    return [(label, {run.name: run.values(name) for run in runs})]


# --- several metrics --------------------------------------------------------------------------------------------------


def held_out(runs: Sequence[Reading]) -> Iterator[Figure]:
    note = "Error bars: one standard error over the held-out prompts."
    for key in held_out_sets(runs):
        measure, name = key
        found = [(slot, run, run.held_out[key]) for slot, run in enumerate(runs) if key in run.held_out]
        share = measure == "accuracy" and all(0 <= value <= 1 for *_, each in found for value in each.values)
        kind = "KL to the teacher" if measure == "kl" else "accuracy" if share else "reward"
        y = "nats per token" if measure == "kl" else kind
        label = f"{kind[0].upper()}{kind[1:]} on {name}" if name else f"Held-out {kind}"
        measured = [run for _, run, _ in found]
        series = [Series(run.name, each.updates, each.values, slot, each.errors) for slot, run, each in found]
        changes = [first_and_last([short(y, share=share) for y in each.y]) for each in series]
        title = f"{label} against updates: {per_run(changes, measured)}"
        yield figures.curves(title, note, series, x="update", y=y, share=share, marks=True)
        series = [replace(each, x=[run.at(u) for u in each.x]) for each, run in zip(series, measured, strict=True)]
        ends = [f"{short(each.y[-1], share=share)} after {duration(each.x[-1])}" for each in series]
        title = f"{label} against wall clock: {per_run(ends, measured)}"
        yield figures.curves(title, note, series, x=RUN_SECONDS, y=y, share=share, marks=True)


def waits(runs: Sequence[Reading]) -> Figure | None:
    """Draw the learner's activities as shares of wall-clock time; None if the time of a run is unknown."""
    seconds = {run.name: sum(run.values("seconds/update")) for run in runs}
    if not all(seconds.values()):
        return None
    parts = {
        label: [sum(run.values(f"seconds/{name}")) / seconds[run.name] for run in runs]
        for name, label in WAITS.items()
        if any(any(run.values(f"seconds/{name}")) for run in runs)
    }
    parts["other"] = [max(0.0, 1 - sum(values[i] for values in parts.values())) for i in range(len(runs))]
    busy = parts.get(WAITS["learn"], [0.0] * len(runs))
    title = "The learner was training " + per_run([f"{short(share, share=True)} of the time" for share in busy], runs)
    note = "If it waits for scored groups, add samplers or scorers. If it waits for order or age, widen the bound."
    return figures.stacks(
        title, note, [run.name for run in runs], parts, x="share of time since the first update", share=True
    )


def publishes(runs: Sequence[Reading]) -> Figure | None:
    """Draw the seconds of a publish: waiting for requests to pause, loading, recomputing. None without publishes."""
    parts = {
        label: [mean(run.values(f"publish/{name}")) for run in runs]
        for name, label in PUBLISH_PARTS.items()
        if any(run.values(f"publish/{name}") for run in runs)
    }
    if not parts:
        return None
    took = [sum(value for value in values if isfinite(value)) for values in zip(*parts.values(), strict=True)]
    title = "A sampler spent " + per_run([f"{short(seconds)} s on a publish" for seconds in took], runs)
    return figures.stacks(title, "Mean over updates.", [run.name for run in runs], parts, x="seconds in a sampler")


def per_run(texts: Sequence[str], runs: Sequence[Reading]) -> str:
    """Join the text of each run, with the run's name if there are several."""
    if len(runs) == 1:
        return texts[0]
    return ", ".join(f"{each} ({run.name})" for each, run in zip(texts, runs, strict=True))


def places(runs: Sequence[Reading]) -> Figure | None:
    """Draw the mean number of groups in each stage at the end of an update; None without data."""
    parts = {
        label: [mean(run.values(f"groups/{name}")) for run in runs]
        for name, label in PLACES.items()
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
        Series(run.name, [], [weighted_mean(run, f"idle/{worker}") for worker in workers], slot)
        for slot, run in enumerate(runs)
    ]
    shares = [(share, worker, run.name) for run in series for share, worker in zip(run.y, workers, strict=True)]
    share, worker, name = max(each for each in shares if isfinite(each[0]))
    title = f"Most idle: {worker}{f' of {name}' if len(runs) > 1 else ''}, {short(share, share=True)} of the time"
    note = "idle/WORKER over the whole run. It should be near 0 in the slowest stage."
    return figures.bars(title, note, workers, series, y="share of the time", share=True)


def weighted_mean(run: Reading, name: str) -> float:
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
    last = min(max(lag for count in counts for lag in count), MAX_LAG)
    series, summaries = list[Series](), list[str]()
    for slot, (run, count) in enumerate(zip(runs, counts, strict=True)):
        total = sum(count.values()) or 1.0
        shares = [0.0] * (last + 1)
        for lag, tokens in count.items():
            shares[min(lag, last)] += tokens / total
        series.append(Series(run.name, [], shares, slot))
        average = sum(lag * tokens for lag, tokens in count.items()) / total
        summaries.append(f"{short(average)} on average, {max(count, default=0)} at most")
    title = f"Lag of trained tokens: {per_run(summaries, runs)}"
    note = "Updates between sampling a token and training on it, over the whole run."
    labels = [str(lag) if lag < MAX_LAG else f"{MAX_LAG} +" for lag in range(last + 1)]
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
        errors = [standard_error(each) for each in values]
        series.append(Series(run.name, [], [mean(each) for each in values], slot, errors))
    labels = [name.rpartition("lag_")[2] for name in names]
    kl = {label: each for label, each in zip(labels, series[0].y, strict=True) if isfinite(each)}
    first, most = next(iter(kl), labels[0]), max(kl, key=kl.__getitem__, default=labels[0])
    ends = (f"{short(kl.get(each, nan))} at lag {each}" for each in (first, most))
    title = f"KL by lag: {', and at most '.join(ends)}"
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


def lost_work(runs: Sequence[Reading]) -> Figure | None:
    """Draw dropped groups by reason, restarted groups, failed responses, thrown tokens; None if nothing was lost."""
    labels = dict[str, str]()
    for name in [name for run in runs for name in run.columns if run.last(name)]:
        kind, slash, reason = name.partition("/")
        if kind + slash in LOST_WORK:
            labels[name] = LOST_WORK[kind + slash].format(reason)
    if not labels and any(run.last("thrown_tokens") for run in runs):  # a publish threw them, and kept the groups
        labels["thrown_tokens"] = "tokens thrown away"
    if not labels:
        return None
    series = [Series(run.name, [], [run.last(name) or 0.0 for name in labels], slot) for slot, run in enumerate(runs)]
    tokens = per_run([f"{short(run.last('thrown_tokens') or 0.0)} tokens" for run in runs], runs)
    note = "By reason, over the whole run."
    return figures.bars(f"Lost work: {tokens}", note, list(labels.values()), series, y="count")
