"""Report page of one or several runs, section by section."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import slipstream
from slipstream.config.file import differing, flat, to_toml
from slipstream.metrics import collapse, peak_to_end
from slipstream.reporting.advice.tree import advise
from slipstream.reporting.report import charts, timeline
from slipstream.reporting.report import samples_html as quotes
from slipstream.reporting.report.figures import FEW
from slipstream.reporting.report.page import Html, Page, Part, Section, folded, paragraph, table
from slipstream.reporting.report.panels import panels
from slipstream.reporting.report.points import window
from slipstream.reporting.report.runs import Reading, changed, held_out_sets, in_use
from slipstream.reporting.report.samples_html import visible
from slipstream.reporting.report.titles import change, duration, shown
from slipstream.run_dir.writing import LEDGER

SAMPLES = 6
"""Number of samples in a report of one run; with several runs each has fewer."""
CAUSES = 8
"""Largest number of dropped groups that are listed for a run."""
NAMED = 5
"""Largest number of runs named in a title."""
STALENESS = "Lag of trained tokens: updates between sampling a token and training on it."
DRIFT = "Distance of the learner from the policy that sampled its tokens. The healthy range is shaded."
GUARDS = "Actions of the guards, which lower the learning rate or tau when metrics go wrong."
KEY = Html(
    '<p class="note key">Colour of a token: <span class="less" style="--a:.6">less likely</span> or '
    '<span class="more" style="--a:.6">more likely</span> to the teacher than to the student; strongest from '
    f"{quotes.FULL:g} nats on. Point at a token to see both log-probs.</p>"
)


def page(runs: Sequence[Reading], command: str) -> Page:
    names = [run.name for run in runs]
    several = len(runs) > 1
    lead = [] if several else [what(runs[0])]
    longest = max(len(run.metrics) for run in runs)
    if longest > FEW:
        lead.append(f"Thin lines show single updates, thick lines a moving mean over up to {window(longest)} updates.")
    return Page(
        kicker="Slipstream report",
        title=title_of(names),
        lead=" ".join(lead),
        sections=list(sections(runs)),
        legend=dict(enumerate(names)) if several else {},
        footer=made_by(command),
    )


def title_of(names: Sequence[str]) -> str:
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} others"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def what(run: Reading) -> str:
    """Return a line that names student, losses, teachers and schedule."""
    config = run.config
    teachers = ", ".join(config.model_of(each) for each in config.teachers.values())
    distilled = f" · {config.loss.kind} from {teachers}" if teachers else ""
    policy = f" · {config.policy.loss} on {', '.join(config.task.names)}" if config.policy else ""
    began = str(run.meta.get("started", ""))[:16].replace("T", " ")
    return f"{config.student}{distilled}{policy} · schedule {config.schedule.label} · started {began} UTC."


def sections(runs: Sequence[Reading]) -> Iterator[Section]:
    """Yield all sections of the report; the page leaves out sections without content."""
    traces = [timeline.slices(run) for run in runs]
    episodes = [timeline.episodes(run) for run in runs if run.values("episode/turns")]
    waits = [charts.waits(runs), charts.idle(runs), charts.places(runs), charts.publishes(runs)]
    yield Section("At a glance", "", [headlines(runs)])
    yield Section("Advice", "The result of slipstream advise.", list(advice(runs)))
    yield Section("Configuration", "Settings that differ from their default.", list(configuration(runs)))
    figures: tuple[tuple[str, str, str, Iterable[Part | None]], ...] = (
        ("Accuracy and rewards", "", "rewards", charts.held_out(runs)),
        ("Learning", "", "learning", ()),
        ("Overlap of the stages", "", "", overlap(runs, traces)),
        ("Throughput", "", "throughput", ()),
        ("Waits", "Time that stages spent waiting, and where groups waited.", "", waits),
        ("Staleness", STALENESS, "staleness", [charts.lags(runs), charts.drift_by_lag(runs)]),
        ("Drift", DRIFT, "drift", ()),
        ("Corrections", "Effects of importance weights and rejection.", "corrections", ()),
        ("Freshness", "Weights of stale samples.", "freshness", ()),
        ("Guards", GUARDS, "guards", ()),
        ("Noise", "", "noise", [charts.noise(runs)]),
        ("Lengths", "", "lengths", ()),
        ("Teachers", "", "teachers", ()),
        ("Episodes", "", "episodes", episodes),
    )
    for title, intro, name, others in figures:
        parts = [*others, *(panels(name, runs) if name else ())]
        yield Section(title, intro, [part for part in parts if part is not None])
    yield Section("Samples", "", list(samples(runs)))
    yield Section("Lost work", "", list(losses(runs)))


def headlines(runs: Sequence[Reading]) -> Html:
    rows = [[label, *cells] for label, cells in facts(runs) if any(cell for cell in cells)]
    if len(runs) == 1:
        items = "".join(f"<div><dt>{visible(label)}</dt><dd>{visible(cell)}</dd></div>" for label, cell in rows)
        return Html(f'<dl class="facts">{items}</dl>')
    return table(["", *(run.name for run in runs)], rows, numbers=len(runs) > 1)


def facts(runs: Sequence[Reading]) -> Iterator[tuple[str, list[str]]]:
    """Yield the most important facts: a label, and a value for each run (empty if unknown)."""
    unfinished = ["" if run.run.finished else f" of {run.config.updates}, not finished" for run in runs]
    yield "updates", [f"{len(run.metrics):,}{rest}" for run, rest in zip(runs, unfinished, strict=True)]
    yield "wall clock", [duration(run.values("time")[-1]) for run in runs]
    for each in held_out_sets(runs):
        measure, name = each
        what = measure if measure == "accuracy" else "held-out KL to the teacher"
        yield f"{what}{f' on {name}' if name else ''}", [held_out_of(run, each) for run in runs]
    labels = {name: name.replace("/", " ", 1) for run in runs for name in run.columns if name.startswith("reward/")}
    for name, label in labels.items():
        yield f"{label}, best less end", [ending(run.values(name)) for run in runs]
    for name, label in {**labels, "teacher/kl": "KL to the teacher"}.items():
        ends = [change(run.values(name)) if run.values(name) else None for run in runs]
        yield label, [f"{shown(end.first)} → {shown(end.last)}" if end else "" for end in ends]
    for name, label in (
        ("tokens_per_s", "tokens per second"),
        ("overlap/stages", "overlap of stages"),
        ("lag/mean", "mean lag, in updates"),
        ("lag/max", "largest lag"),
    ):
        yield label, [shown(run.digest[name]) if run.digest else "" for run in runs]
    yield "groups dropped or restarted", [shown(run.digest["lost"]) if run.digest else "" for run in runs]


def ending(rewards: Sequence[float]) -> str:
    """Format how far the end of a reward is below its best, and the update of a collapse; empty for short runs."""
    fell, at = peak_to_end(rewards), collapse(rewards)
    return "" if fell is None else shown(fell) + (f", collapsed at update {at}" if at is not None else "")


def held_out_of(run: Reading, key: tuple[str, str]) -> str:
    """Format the first and the last value of a measure on a held-out set; empty if the run has none."""
    if key not in run.held_out:
        return ""
    _, values, errors = run.held_out[key]
    if key[0] == "kl":
        return f"{shown(values[0])} → {shown(values[-1])}" + (f" ± {errors[-1]:.2g}" if errors[-1] else "")
    error = f" ± {100 * errors[-1]:.2g}" if errors[-1] else ""
    return f"{100 * values[0]:.3g} → {100 * values[-1]:.3g}{error} %"


def advice(runs: Sequence[Reading]) -> Iterator[Part]:
    found = [(run.name, advise(run.case)) for run in runs]
    rows = [
        [name, each.name, f"{each.metric} = {shown(each.value)}", each.cause, each.cli or each.run]
        for name, advice in found
        for each in advice.answers
    ]
    skip = 1 if len(runs) == 1 else 0
    if rows:
        yield table(["run", "finding", "seen", "cause", "write"][skip:], [row[skip:] for row in rows])
    calm = [name for name, advice in found if not advice.wrong]
    if calm:
        yield paragraph("Nothing is wrong." if skip else f"Nothing is wrong with {title_of(calm)}.")


def configuration(runs: Sequence[Reading]) -> Iterator[Part]:
    """Yield a table of the settings that differ from the default in any run; differences between runs come first."""
    found = [changed(run.config) for run in runs]
    apart = {name for run in runs[1:] for name, *_ in differing(runs[0].config, run.config)}
    defaults = {name: usual for each in found for name, (usual, _) in each.items() if name != "output"}
    settings = [flat(run.config.model_dump(mode="json")) | in_use(run.config) for run in runs]
    rows = [
        [name, *(written(each.get(name)) for each in settings), written(defaults[name])]
        for name in sorted(defaults, key=lambda name: (name not in apart, name))
    ]
    if len(runs) > 1 and apart:
        yield paragraph("The first rows are the settings that differ between the runs.")
    yield table(["setting", *(run.name if len(runs) > 1 else "value" for run in runs), "default"], rows)
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        yield folded(f"complete config.toml{of}, and its machine", f"{to_toml(run.config)}\n{machine(run)}")


def written(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def machine(run: Reading) -> str:
    meta = run.meta
    packages = [f"{name} {version}" for name, version in dict(meta.get("packages", {})).items()]
    of = [f"{name} {meta[name]}" for name in ("python", "platform", "cpus", "git", "started") if meta.get(name)]
    return "\n".join([begun(run), *of, *packages])


def begun(run: Reading) -> str:
    """Return the command line of the run; empty if unknown."""
    words = [str(word) for word in run.meta.get("command") or []]
    return shlex.join([Path(words[0]).name if words[0] != "-c" else "slipstream", *words[1:]]) if words else ""


def overlap(runs: Sequence[Reading], found: Sequence[list[timeline.Slice]]) -> Iterator[Part]:
    there = [(run, each) for run, each in zip(runs, found, strict=True) if each]
    if there:
        yield timeline.gantt([run for run, _ in there], [each for _, each in there])
    for run, each in there:
        yield timeline.busy(run, each, named=len(runs) > 1)


def samples(runs: Sequence[Reading]) -> Iterator[Part]:
    count = SAMPLES if len(runs) == 1 else max(2, SAMPLES // len(runs))
    found = [(run, quote) for run in runs for quote in quotes.chosen(run, count)]
    if found:
        yield KEY
    for run, quote in found:
        yield Html(quotes.sample(quote, run.name if len(runs) > 1 else ""))


def losses(runs: Sequence[Reading]) -> Iterator[Part]:
    figure = charts.lost(runs)
    if figure is None:
        yield paragraph("No group was lost: every submitted group was trained on, or was in flight at the end.")
        return
    yield figure
    rows = [[run.name, *cause] for run in runs for cause in causes(run)]
    if rows:
        yield table(["run", "group", "reason", "cause"], rows)


def causes(run: Reading) -> Iterable[list[str]]:
    """Return number, reason and cause of the first dropped groups."""
    room = iter(range(CAUSES))
    lines = run.run.picked(LEDGER, lambda _, line: b'"end": "dropped"' in line and next(room, None) is not None)
    return [[str(line["number"]), str(line["reason"]), str(line.get("cause", ""))] for line in lines]


def made_by(command: str) -> Html:
    return Html(f"Made by <code>{visible(command)}</code> with slipstream {slipstream.__version__}, plotly.js (MIT).")
