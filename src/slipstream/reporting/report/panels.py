"""Table of the small figures that show one metric each, by section of the report.

The vocabulary has the meaning and the healthy range of a metric; this table has its title and the unit on the axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slipstream import metric_names as vocabulary
from slipstream.reporting.report import figures
from slipstream.reporting.report.figures import Figure, Series
from slipstream.reporting.report.runs import Reading
from slipstream.reporting.report.titles import course, inside


class Panel(NamedTuple):
    names: str
    """Regular expression for metric names; text matched by a group is inserted into the label."""
    label: str
    unit: str
    exact: bool = False
    """True for a metric that is set and not measured: it has no noise, so it is drawn without a moving mean."""

    @property
    def share(self) -> bool:
        return self.unit == SHARE


SHARE = "share"
PANELS: dict[str, tuple[Panel, ...]] = {
    "rewards": (
        Panel(r"reward/(exact|math)", "Reward {}", SHARE),
        Panel(r"reward/([\w/]+)", "Reward {}", "mean over responses"),
        Panel(r"policy/rows_moved", "Responses with an advantage", SHARE),
        Panel(r"policy/clip_fraction", "Clipped tokens", SHARE),
        Panel(r"policy/ratio_max", "Largest ratio p/p_old", "ratio"),
    ),
    "learning": (
        Panel(r"teacher/kl", "KL to the teacher", "nats per token"),
        Panel(r"teacher/forward_kl", "Forward KL on the teacher's answers", "nats per token"),
        Panel(r"loss", "Loss", "nats per token"),
        Panel(r"grad_norm", "Gradient norm", "before clipping"),
        Panel(r"student/entropy", "Entropy of the student", "nats per token"),
        Panel(r"student/repeated", "Repeated 4-grams in responses", SHARE),
        Panel(r"student/distinct", "Different tokens in responses", SHARE),
        Panel(r"lr", "Learning rate", "per step", True),
        Panel(r"sft", "Supervised updates", "1 if supervised", True),
        Panel(r"off_policy/(\w+)", "Trained tokens from {}", SHARE),
        Panel(r"reference/kl", "KL to the initial student", "nats per token"),
        Panel(r"distill/clip_fraction", "Clipped draws", SHARE),
        Panel(r"distill/masked_fraction", "Draws masked by m2po", SHARE),
        Panel(r"distill/dropped_fraction", "Draws above loss.weight_cap", SHARE),
        Panel(r"distill/student_mass", "Student's probability mass on the compared ids", SHARE),
        Panel(r"distill/teacher_mass", "Teacher's probability mass on the compared ids", SHARE),
        Panel(r"distill/overlap_ratio", "Teacher's top-k in the student's", SHARE),
    ),
    "throughput": (
        Panel(r"tokens_per_s", "Throughput", "tokens per second"),
        Panel(r"overlap/stages", "Overlap of the three stages", "busy seconds per second"),
        Panel(r"seconds/update", "Time of an update", "seconds"),
        Panel(r"seconds/publish", "Time of a publish", "seconds"),
        Panel(r"rows/filled", "Learner tokens that are not padding", SHARE),
    ),
    "staleness": (
        Panel(r"lag/mean", "Mean lag", "updates"),
        Panel(r"tau", "tau", "updates in flight", True),
    ),
    "drift": (
        Panel(r"drift/k3_kl", "KL to the sampling policy (k3)", "nats per token"),
        Panel(r"drift/chi2_token", "χ² of token-level weights", "variance"),
        Panel(r"drift/chi2_row_p95", "χ² of a response, 95th percentile", "variance"),
        Panel(r"drift/ess", "Effective sample size, tokens", SHARE),
        Panel(r"drift/chi2_seq", "χ² of sequence-level weights", "variance"),
        Panel(r"drift/ess_seq", "Effective sample size, responses", SHARE),
        Panel(r"drift/ess_row_min", "Smallest effective sample size of a response", SHARE),
        Panel(r"drift/tv", "Total variation to the sampling policy", "probability"),
        Panel(r"drift/probs_pearson", "Correlation with the sampling policy", "Pearson's r"),
        Panel(r"drift/rollout_kl", "Exact KL to the sampling policy", "nats per token"),
        Panel(r"mismatch/k3_kl", "KL between engines at the same version (k3)", "nats per token"),
        Panel(r"mismatch/probs_pearson", "Correlation of engines at the same version", "Pearson's r"),
    ),
    "corrections": (
        Panel(r"correction/ess", "Effective sample size of importance weights", SHARE),
        Panel(r"correction/rollout_is_mean", "Mean importance weight", "weight"),
        Panel(r"correction/rollout_is_std", "Spread of importance weights", "standard deviation"),
        Panel(r"correction/rollout_is_ratio_fraction_high", "Importance ratios above the threshold", SHARE),
        Panel(r"correction/rollout_rs_masked_fraction", "Rejected tokens", SHARE),
        Panel(r"correction/rollout_rs_seq_masked_fraction", "Responses with a rejected token", SHARE),
    ),
    "freshness": (
        Panel(r"freshness/f", "Freshness of trained samples", "f, from 0 to 1"),
        Panel(r"freshness/weight", "Freshness weight of a sample", "mean weight"),
        Panel(r"freshness/gated", "Samples with weight 0", SHARE),
        Panel(r"freshness/roll", "KL to the sampling policy, by sample", "nats per token"),
        Panel(r"freshness/sup", "KL to the teachers' earlier scores", "nats per token"),
        Panel(r"freshness/buffer_f", "Freshness of the buffer", "f, from 0 to 1"),
        Panel(r"freshness/refreshes", "Refreshes so far", "count", True),
    ),
    "guards": (
        Panel(r"guard/(?!kl)(\w+)", "Guard {}", "factor on the learning rate", True),
        Panel(r"guard/(kl)", "Guard {}", "updates below tau", True),
    ),
    "noise": (Panel(r"gradient/cosine", "Cosine of fresh and stale gradients", "cosine"),),
    "lengths": (
        Panel(r"length/mean", "Length of a response", "tokens"),
        Panel(r"length/trend", "Growth of the mean length", "ratio"),
        Panel(r"truncated", "Responses cut off", SHARE),
    ),
    "teachers": (
        Panel(r"teacher/(\w+)/kl", "KL to teacher {}", "nats per token"),
        Panel(r"teacher/(\w+)/loss", "Loss on teacher {}'s tokens", "nats per token"),
        Panel(r"teacher/(\w+)/share", "Teacher {}'s share of tokens", SHARE),
        Panel(r"teacher/(\w+)/version", "Version of teacher {}", "update", True),
        Panel(r"teacher/moved", "KL between new and old teacher scores", "nats per token"),
        Panel(r"teacher/invalid", "Responses with unusable scores", "count"),
        Panel(r"teacher/floored", "Tokens at the lowest log-prob (−100)", "count"),
    ),
    "episodes": (
        Panel(r"episode/turns", "Turns of an episode", "turns"),
        Panel(r"episode/calls", "Tool calls", "per episode"),
        Panel(r"episode/invalid", "Episodes with an invalid call", SHARE),
        Panel(r"episode/looped", "Episodes that repeat a call", SHARE),
        Panel(r"episode/out_of_turns", "Episodes out of turns", SHARE),
        Panel(r"episode/out_of_time", "Episodes out of time", SHARE),
        Panel(r"episode/seconds", "Waiting for the environment", "seconds per episode"),
        Panel(r"environment/([\w/]+)", "Environment: {}", "mean over episodes"),
    ),
}
OF_EVAL, OF_TIME = Panel(r"eval/(?:\w+/)?accuracy", "Held-out accuracy", SHARE), Panel("time", "Time", "seconds")
"""Measures of studies that are not metrics of updates."""
IDLE = (
    "guard/",
    "distill/clip",
    "distill/masked",
    "distill/dropped",
    "policy/clip",
    "teacher/invalid",
    "teacher/floored",
    "episode/looped",
    "episode/out_of",
    "freshness/refreshes",
)
"""Prefixes of metrics that are drawn only if something happened: a guard acted, or a count is not 0."""


def panels(section: str, runs: Sequence[Reading]) -> Iterator[Figure]:
    """Yield a figure for every metric of a section that any run has, except for metrics of IDLE without an event."""
    left = list(dict.fromkeys(name for run in runs for name in run.columns))
    for panel in PANELS[section]:
        for name in [name for name in left if re.fullmatch(panel.names, name)]:
            left.remove(name)
            usual = 1.0 if name.startswith("guard/") and name != "guard/kl" else 0.0
            if not name.startswith(IDLE) or any(value != usual for run in runs for value in run.values(name)):
                yield draw(name, runs)


def panel_of(name: str) -> Panel:
    """Return the panel of a metric, with the label filled in; without a panel, the label is the name."""
    for panel in [OF_EVAL, OF_TIME, *(panel for section in PANELS.values() for panel in section)]:
        if match := re.fullmatch(panel.names, name):
            return panel._replace(label=panel.label.format(*match.groups()))
    return Panel(name, name, "")


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


def draw(name: str, runs: Sequence[Reading]) -> Figure:
    panel = panel_of(name)
    (term,) = vocabulary.find(name)
    band = vocabulary.band(name)
    values = {run.name: run.values(name) for run in runs}
    health = f" {inside(band, values)}" if band else "" if term.healthy == "–" else f" Healthy: {term.healthy}."
    return figures.curves(
        ". ".join(course(label, part, share=panel.share) for label, part in by_stage(name, panel.label, runs)),
        f"{name}: {term.meaning}.{health}",
        [Series(run.name, *run.columns[name], slot) for slot, run in enumerate(runs) if name in run.columns],
        x="update",
        y=panel.unit,
        exact=panel.exact,
        share=panel.share,
        band=band,
    )
