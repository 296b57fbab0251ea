"""Report page of one or several runs, section by section."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from slipstream.config.file import differing, flat, to_toml
from slipstream.metrics import collapse, peak_to_end
from slipstream.reporting.advice.tree import advise
from slipstream.reporting.report import charts, timeline
from slipstream.reporting.report.figures import MARKED_POINTS, window
from slipstream.reporting.report.page import Facts, Folded, Page, Paragraph, Part, Samples, Section, Table
from slipstream.reporting.report.runs import Reading, changed_settings, held_out_sets, in_use
from slipstream.reporting.report.samples import STRONGEST, pick, sample_of
from slipstream.reporting.report.titles import change, duration, first_and_last, percent, setting_text, short
from slipstream.run_dir.writing import LEDGER, suite_lines, suite_scores

SAMPLES_SHOWN = 6
"""Number of samples in a report of one run; with several runs each has fewer."""
DROPS_LISTED = 8
"""Largest number of dropped groups that are listed for a run."""
RUNS_NAMED = 5
"""Largest number of runs named in a title."""
INTROS = {
    "Advice": "The result of slipstream advise.",
    "Configuration": "Settings that differ from their default.",
    "Waits": "Time that stages spent waiting, and where groups waited.",
    "Staleness": "Lag of trained tokens: updates between sampling a token and training on it.",
    "Drift": "Distance of the learner from the policy that sampled its tokens. The healthy range is shaded.",
    "Corrections": "Effects of importance weights and rejection.",
    "Freshness": "Weights of stale samples.",
    "Guards": "Actions of the guards, which lower the learning rate or tau when metrics go wrong.",
}
"""Sentences below the titles of sections."""


def page(runs: Sequence[Reading], command: str) -> Page:
    names = [run.name for run in runs]
    several = len(runs) > 1
    lead = [] if several else [description(runs[0])]
    longest = max(len(run.metrics) for run in runs)
    if longest > MARKED_POINTS:
        lead.append(f"Thin lines show single updates, thick lines a moving mean over up to {window(longest)} updates.")
    return Page(
        kicker="Slipstream report",
        title=title_of(names),
        lead=" ".join(lead),
        sections=list(sections(runs)),
        legend=dict(enumerate(names)) if several else {},
        command=command,
    )


def title_of(names: Sequence[str]) -> str:
    if len(names) > RUNS_NAMED:
        return f"{', '.join(names[:RUNS_NAMED])} and {len(names) - RUNS_NAMED} others"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def description(run: Reading) -> str:
    """Return a line that names student, losses, teachers and schedule."""
    config = run.config
    teachers = ", ".join(config.model_of(each) for each in config.teachers.values())
    distilled = f" · {config.loss.kind} from {teachers}" if teachers else ""
    policy = f" · {config.policy.loss} on {', '.join(config.task.names)}" if config.policy else ""
    began = str(run.meta.get("started", "")).replace("T", " ")
    return (
        f"{config.student}{distilled}{policy} · schedule {config.schedule.label} · started {began[:16]} {began[19:]}."
    )


def sections(runs: Sequence[Reading]) -> Iterator[Section]:
    """Yield all sections of the report; the page leaves out sections without content."""
    of_metrics, traces = charts.of_metrics, [timeline.slices(run) for run in runs]
    episodes = (timeline.episodes(run) for run in runs if run.values("episode/turns"))
    parts: dict[str, Iterable[Part | None]] = {
        "At a glance": [headlines(runs)],
        "Advice": advice(runs),
        "Configuration": configuration(runs),
        "Accuracy and rewards": (*charts.held_out(runs), *of_metrics("rewards", runs)),
        "Tasks of lm-evaluation-harness": tasks(runs),
        "Learning": of_metrics("learning", runs),
        "Overlap of the stages": overlap(runs, traces),
        "Throughput": of_metrics("throughput", runs),
        "Waits": [charts.waits(runs), charts.idle(runs), charts.places(runs), charts.publishes(runs)],
        "Staleness": (charts.lags(runs), charts.drift_by_lag(runs), *of_metrics("staleness", runs)),
        "Drift": of_metrics("drift", runs),
        "Corrections": of_metrics("corrections", runs),
        "Freshness": of_metrics("freshness", runs),
        "Guards": of_metrics("guards", runs),
        "Noise": (charts.noise(runs), *of_metrics("noise", runs)),
        "Lengths": of_metrics("lengths", runs),
        "Teachers": of_metrics("teachers", runs),
        "Episodes": (*episodes, *of_metrics("episodes", runs)),
        "Samples": samples(runs),
        "Lost work": losses(runs),
    }
    for title, each in parts.items():
        yield Section(title, INTROS.get(title, ""), [part for part in each if part is not None])


def headlines(runs: Sequence[Reading]) -> Part:
    rows = [(label, *cells) for label, cells in facts(runs) if any(cells)]
    if len(runs) == 1:
        return Facts([(label, cell) for label, cell in rows])
    return Table(["", *(run.name for run in runs)], rows, numbers=True)


def facts(runs: Sequence[Reading]) -> Iterator[tuple[str, list[str]]]:
    """Yield the most important facts: a label, and a value for each run (empty if unknown)."""
    unfinished = ["" if run.run.finished else f" of {run.config.updates}, not finished" for run in runs]
    yield "updates", [f"{len(run.metrics):,}{rest}" for run, rest in zip(runs, unfinished, strict=True)]
    yield "wall clock", [duration(times[-1]) if (times := run.values("time")) else "" for run in runs]
    for each in held_out_sets(runs):
        measure, name = each
        what = measure if measure == "accuracy" else "held-out KL to the teacher"
        yield f"{what}{f' on {name}' if name else ''}", [held_out_of(run, each) for run in runs]
    labels = {name: name.replace("/", " ", 1) for run in runs for name in run.columns if name.startswith("reward/")}
    for name, label in {**labels, "teacher/kl": "KL to the teacher"}.items():
        ends = [change(run.values(name)) if run.values(name) else None for run in runs]
        yield label, [f"{short(end.first)} → {short(end.last)}" if end else "" for end in ends]
    for name, label in labels.items():
        yield f"{label}, fall from best", [ending(*run.columns.get(name, ((), ()))) for run in runs]
    for name, label in (
        ("tokens_per_s", "tokens per second"),
        ("overlap/stages", "overlap of stages"),
        ("lag/mean", "mean lag, in updates"),
        ("lag/max", "largest lag"),
    ):
        yield label, [short(run.digest[name]) if run.digest else "" for run in runs]
    yield "groups dropped or restarted", [short(run.digest["lost"]) if run.digest else "" for run in runs]


def ending(updates: Sequence[float], rewards: Sequence[float]) -> str:
    """Format how far the end of a reward is below its best, and the update of a collapse; empty for short runs."""
    fell, at = peak_to_end(rewards), collapse(rewards)
    collapsed = "" if at is None else f", collapsed at update {updates[at - 1]:.0f}"
    return "" if fell is None else f"{short(fell)}{collapsed}"


def held_out_of(run: Reading, key: tuple[str, str]) -> str:
    """Format the first and the last value of a measure on a held-out set; empty if the run has none."""
    if key not in run.held_out:
        return ""
    _, values, errors = run.held_out[key]
    if key[0] == "kl" or not all(0 <= value <= 1 for value in values):
        return first_and_last([*map(short, values)]) + (f" ± {errors[-1]:.2g}" if errors[-1] else "")
    error = f" ± {100 * errors[-1]:.2g}" if errors[-1] else ""
    return f"{first_and_last([*map(percent, values)])}{error} %"


def advice(runs: Sequence[Reading]) -> Iterator[Part]:
    found = [(run.name, advise(run.case)) for run in runs]
    rows = [
        [name, each.name, f"{each.metric} = {short(each.value)}", each.cause, each.cli or each.run]
        for name, advice in found
        for each in advice.answers
    ]
    skip = 1 if len(runs) == 1 else 0
    if rows:
        yield Table(["run", "finding", "seen", "cause", "write"][skip:], [row[skip:] for row in rows])
    calm = [name for name, advice in found if not advice.wrong]
    if calm:
        yield Paragraph("Nothing is wrong." if skip else f"Nothing is wrong with {title_of(calm)}.")


def configuration(runs: Sequence[Reading]) -> Iterator[Part]:
    """Yield a table of the settings that differ from the default in any run; differences between runs come first."""
    found = [changed_settings(run.config) for run in runs]
    apart = {name for run in runs[1:] for name, *_ in differing(runs[0].config, run.config)}
    defaults = {name: usual for each in found for name, (usual, _) in each.items() if name != "output"}
    apart &= defaults.keys()
    settings = [flat(run.config.model_dump(mode="json")) | in_use(run.config) for run in runs]
    rows = [
        [name, *(setting_text(each.get(name)) for each in settings), setting_text(defaults[name])]
        for name in sorted(defaults, key=lambda name: (name not in apart, name))
    ]
    if len(runs) > 1 and apart:
        yield Paragraph("The first rows are the settings that differ between the runs.")
    yield Table(["setting", *(run.name if len(runs) > 1 else "value" for run in runs), "default"], rows)
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        yield Folded(f"complete config.toml{of}, and its machine", f"{to_toml(run.config)}\n{machine_text(run)}")


def machine_text(run: Reading) -> str:
    meta = run.meta
    packages = [f"{name} {version}" for name, version in dict(meta.get("packages", {})).items()]
    of = [f"{name} {meta[name]}" for name in ("python", "platform", "cpus", "git", "started") if meta.get(name)]
    return "\n".join([command_line(run), *of, *packages])


def command_line(run: Reading) -> str:
    """Return the command line of the run; empty if unknown."""
    words = [str(word) for word in run.meta.get("command") or []]
    return shlex.join([Path(words[0]).name if words[0] != "-c" else "slipstream", *words[1:]]) if words else ""


def overlap(runs: Sequence[Reading], found: Sequence[list[timeline.Slice]]) -> Iterator[Part]:
    there = [(run, each) for run, each in zip(runs, found, strict=True) if each]
    if there:
        yield timeline.gantt([run for run, _ in there], [each for _, each in there])
    for run, each in there:
        yield timeline.busy(run, each, named=len(runs) > 1)


def tasks(runs: Sequence[Reading]) -> Iterator[Part]:
    rows = [
        [run.name, line["suite"], str(line.get("update", "")), name, score]
        for run in runs
        for line in suite_lines(run.run.path)
        for name, score in suite_scores(line).items()
    ]
    if rows:
        yield Table(["run", "task", "update", "score", "value"], rows)


def samples(runs: Sequence[Reading]) -> Iterator[Part]:
    several = len(runs) > 1
    count = max(2, SAMPLES_SHOWN // len(runs)) if several else SAMPLES_SHOWN
    if found := [sample_of(quote, run.name if several else "") for run in runs for quote in pick(run, count)]:
        yield Samples(found, STRONGEST)


def losses(runs: Sequence[Reading]) -> Iterator[Part]:
    figure = charts.lost_work(runs)
    if figure is None:
        yield Paragraph("No group was lost: every submitted group was trained on, or was in flight at the end.")
        return
    yield figure
    rows = [[run.name, *cause] for run in runs for cause in causes(run)]
    if rows:
        yield Table(["run", "group", "reason", "cause"], rows)


def causes(run: Reading) -> Iterable[list[str]]:
    """Return number, reason and cause of the first dropped groups."""
    room = iter(range(DROPS_LISTED))
    lines = run.run.picked(LEDGER, lambda _, line: b'"end": "dropped"' in line and next(room, None) is not None)
    return [[str(line["number"]), str(line["reason"]), str(line.get("cause", ""))] for line in lines]
