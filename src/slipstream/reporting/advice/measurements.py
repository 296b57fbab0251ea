"""Numbers of a run with their standard errors, as input of the rules, and the evidence that a rule applies.

A mean alone raises false alarms: an update has only a few hundred tokens, and ratios have long tails. So every number
is a `Level` (mean and standard error), and a limit counts as crossed only beyond SURE_ERRORS standard errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from math import hypot, inf, sqrt
from statistics import fmean
from typing import Any, NamedTuple

from slipstream.config.schema import Config
from slipstream.metrics import WINDOW as WINDOW
from slipstream.statistics import standard_error

Line = Mapping[str, Any]
"""A line of metrics.jsonl, ledger.jsonl or samples.jsonl."""
Change = Mapping[str, Any]
"""New values of settings, by dotted name."""
SURE_ERRORS = 3.0
"""Standard errors beyond which a difference is significant."""
KL_TOKENS = 64
"""Smallest number of tokens from which a KL is estimated."""


@dataclass(frozen=True)
class Level:
    mean: float
    error: float = inf

    def over(self, limit: float) -> bool:
        return self.mean - SURE_ERRORS * self.error > limit

    def under(self, limit: float) -> bool:
        return self.mean + SURE_ERRORS * self.error < limit

    def above(self, other: Level) -> bool:
        return self.mean - other.mean > SURE_ERRORS * hypot(self.error, other.error)


UNKNOWN_LEVEL = Level(float("nan"))
"""A level that is neither over nor under any limit."""


def level(values: Sequence[float]) -> Level:
    """Return the mean and standard error of values.

    No value gives UNKNOWN_LEVEL, fewer than WINDOW values an infinite error.
    """
    if not values:
        return UNKNOWN_LEVEL
    error = standard_error(values)
    return Level(fmean(values), inf if error is None or len(values) < WINDOW else error)


def pooled_kl(pairs: Iterable[tuple[float, float]]) -> Level:
    """Return the token-weighted mean of (KL, tokens) pairs; the error assumes log-ratio variance 2·KL per token."""
    known = [(kl, tokens) for kl, tokens in pairs if tokens]
    tokens = sum(count for _, count in known)
    if tokens < KL_TOKENS:
        return UNKNOWN_LEVEL
    mean = sum(kl * count for kl, count in known) / tokens
    return Level(mean, sqrt(2 * max(mean, 0.0) / tokens))


class Fall(NamedTuple):
    metric: str
    value: float
    limit: float
    """90% of the best value."""


@dataclass(frozen=True)
class Evidence:
    """Evidence that a rule applies to a run."""

    metric: str
    value: float
    limit: float
    changes: Sequence[Change] = ()
    """Possible changes, best first. The first one that the config allows is proposed."""
    _: KW_ONLY
    run: str = ""
    """Command to run if no change is possible; empty if no command helps."""
    other_cause: bool = False
    """True for the other cause of the rule, False for its usual one."""
    error: bool = True
    """False if a rule for errors only warns in this run."""


@dataclass(frozen=True)
class Case:
    config: Config
    lines: Sequence[Line]
    """Lines of metrics.jsonl, one for each update after the supervised stage."""
    evaluations: Sequence[Line] = ()
    supervised: Line = field(default_factory=dict)
    """Last line of the supervised stage, at which the counters of `lines` stood; empty without [sft]."""
    samples: Sequence[Line] = ()
    ledger: Sequence[Line] = ()
    at: str = "RUN"
    """Path of the run, as shown to the user."""
    context: int | None = None
    """Context length in tokens that student and teachers all support; None if unknown."""
    vocabulary: int | None = None
    """Vocabulary size of the student; None if unknown."""
    large: bool = False
    """True if the student's matrices are large enough for bfloat16 to be faster on some CPUs."""

    @property
    def finished(self) -> int:
        """Number of finished updates, those of the supervised stage included."""
        return int((self.lines[-1] if self.lines else self.supervised).get("update", 0))

    @property
    def doctor(self) -> str:
        return f"slipstream doctor {self.at}/config.toml"

    @property
    def show_samples(self) -> str:
        return f"slipstream samples {self.at} -n 5"

    @property
    def moving_teacher(self) -> bool:
        return any(teacher.follow is not None for teacher in self.config.teachers.values())

    # --- windows of updates -------------------------------------------------------------------------------------------

    @property
    def late(self) -> Sequence[Line]:
        """The last WINDOW updates, or the last half of a shorter run."""
        return self.lines[-max(min(WINDOW, len(self.lines) // 2), 1) :]

    @cached_property
    def filled(self) -> int:
        """Number of first updates that are not comparable, because only short responses had finished."""
        oldest = max(values_of(self.lines, "lag/max"), default=0.0)
        return int(oldest) + 1 if oldest else 0

    @property
    def before(self) -> Sequence[Line]:
        """The comparable updates before `late`."""
        return self.lines[self.filled : len(self.lines) - len(self.late)]

    @property
    def early(self) -> Sequence[Line]:
        return self.before[:WINDOW]

    @property
    def windows(self) -> list[Sequence[Line]]:
        """Consecutive windows of WINDOW updates in `before`."""
        starts = range(0, len(self.before) - WINDOW + 1, WINDOW)
        return [self.before[start : start + WINDOW] for start in starts] or [self.early]

    @property
    def first_samples(self) -> list[Line]:
        return [sample for sample in self.samples if sample["update"] <= WINDOW]

    @property
    def too_short(self) -> bool:
        """True if the run is too short to judge its speed."""
        return len(self.lines) < WINDOW

    @property
    def steps(self) -> int:
        """Optimizer steps per update."""
        return self.config.learner.minibatches * self.config.learner.epochs

    # --- numbers ------------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        return any(name in line for line in self.late)

    def now(self, name: str) -> Level:
        return level(values_of(self.late, name))

    def then(self, name: str) -> Level:
        return level(values_of(self.early, name))

    def above(
        self, metric: str, limit: float, changes: Sequence[Change] = (), *, error: bool = True
    ) -> Evidence | None:
        """Return evidence if a metric is significantly above its limit now."""
        now = self.now(metric)
        return Evidence(metric, now.mean, limit, changes, error=error) if now.over(limit) else None

    def below(
        self, metric: str, limit: float, changes: Sequence[Change] = (), *, error: bool = True
    ) -> Evidence | None:
        now = self.now(metric)
        return Evidence(metric, now.mean, limit, changes, error=error) if now.under(limit) else None

    def last(self, name: str) -> float:
        """Return what a counter has counted in `lines`; 0 if there is no such counter."""
        begun: float = self.supervised.get(name, 0.0)
        return next((line[name] for line in reversed(self.lines) if name in line), begun) - begun

    @property
    def running(self) -> Sequence[Line]:
        """All updates except the first ones, which fill the pipeline, and those delayed by an evaluation."""
        delayed = {line["update"] + 1 for line in self.evaluations}
        return [line for line in self.lines[min(5, len(self.lines) // 2) :] if line["update"] not in delayed]

    def usual(self, name: str) -> float:
        values = values_of(self.running, name)
        return fmean(values) if values else 0.0

    def share(self, name: str, of: str = "seconds/update") -> float:
        """Return the sum of one metric divided by the sum of another; 0 if the latter is 0."""
        whole = sum(values_of(self.running, of))
        return sum(values_of(self.running, name)) / whole if whole else 0.0

    # --- the student and its teachers ---------------------------------------------------------------------------------

    @cached_property
    def rewards(self) -> list[str]:
        return sorted({name for line in self.late for name in line if name.startswith("reward/")})

    @property
    def gained(self) -> bool:
        """True if a reward or held-out accuracy rose since the start, or the KL to the teachers fell."""
        return self.rewarded or (self.kl_now.mean < self.kl_then.mean and self.kl_then.above(self.kl_now))

    @property
    def rewarded(self) -> bool:
        accuracies = accuracy_of(self.evaluations).values()
        return any(self.now(name).above(self.then(name)) for name in self.rewards) or any(
            levels[-1].above(levels[0]) for levels in accuracies
        )

    @property
    def fall(self) -> Fall | None:
        """First reward or held-out accuracy that fell significantly, by 10% from its best; None if nothing fell."""
        courses = [(name, [level(values_of(w, name)) for w in (*self.windows, self.late)]) for name in self.rewards]
        courses += [("accuracy", levels) for levels in accuracy_of(self.evaluations).values()]
        for name, levels in courses:
            best, now = max(levels, key=lambda each: each.mean), levels[-1]
            limit = best.mean - 0.1 * abs(best.mean)
            if best.above(now) and now.mean < limit:
                return Fall(name, now.mean, limit)
        return None

    @property
    def learned_loss(self) -> bool:
        """True if the distillation loss (which may differ from the reverse KL) decreased."""
        return self.then("distill/loss").above(self.now("distill/loss"))

    @property
    def kl_now(self) -> Level:
        return teacher_kl(self.late)

    @property
    def kl_then(self) -> Level:
        return teacher_kl(self.early)

    @property
    def kl_first(self) -> Level:
        """Largest KL to a teacher at the first update: that of the initial student."""
        line = self.lines[0]
        known = [Level(line[name], line.get(f"{name}_error", inf)) for name in kl_names(line)]
        return max(known, key=lambda kl: kl.mean, default=UNKNOWN_LEVEL)

    @property
    def kl_best(self) -> Level:
        return min((teacher_kl(window) for window in self.windows), key=lambda kl: kl.mean, default=UNKNOWN_LEVEL)

    @property
    def diverged_early(self) -> bool:
        """True if the student moved away from the teachers in the first updates, so that it is not comparable."""
        return teacher_kl(self.lines[:WINDOW]).above(self.kl_first)

    # --- drift --------------------------------------------------------------------------------------------------------

    @property
    def agreement(self) -> list[Line]:
        """Drift metrics at the same version, for every update in which all tokens allow the comparison."""
        return [found for line in self.lines if (found := same_version(line, self.steps)) is not None]

    @property
    def same_kl(self) -> Level:
        """KL between sampler and learner at the same version, over all tokens that allow the comparison."""
        return pooled_kl(same_version_kl(line, self.steps) for line in self.lines)

    @property
    def largest_same_kl(self) -> float:
        """Largest amount of the KL at lag 0 in one update, however few tokens it has; 0 if there are none."""
        return max(map(abs, values_of(self.lines, "drift/kl/lag_0")), default=0.0)

    @property
    def moved(self) -> Level:
        """KL that a single update causes: drift at lag 1. Unknown with several optimizer steps per update."""
        lines = self.lines[-2 * WINDOW :]
        of_one = pooled_kl((line.get("drift/kl/lag_1", 0.0), line.get("lag/tokens_1", 0.0)) for line in lines)
        return of_one if self.steps == 1 else UNKNOWN_LEVEL

    @property
    def drift(self) -> Level:
        """k3 estimate of the KL to the sampling policy, over recent updates with stale tokens."""
        stale = [line for line in self.late if line.get("lag/mean", 0.0) >= 0.5 or self.steps > 1]
        return level(values_of(stale, "drift/k3_kl"))


def values_of(lines: Sequence[Line], name: str) -> list[float]:
    return [float(line[name]) for line in lines if name in line]


def teacher_kl(lines: Sequence[Line]) -> Level:
    """Return the mean reverse KL to the teachers; its error is the larger of recorded error and scatter of updates."""
    values = [line[name] for line in lines for name in kl_names(line)]
    if not values:
        return UNKNOWN_LEVEL
    recorded = hypot(*(line.get(f"{name}_error", inf) for line in lines for name in kl_names(line))) / len(values)
    scatter = (standard_error(values) or 0.0) if len(values) >= WINDOW else 0.0
    return Level(fmean(values), max(recorded, scatter) if len(values) >= 3 else inf)


def kl_names(line: Line) -> list[str]:
    return [name for name in line if name.startswith("teacher/") and name.endswith("/kl")]


def same_version(line: Line, steps: int) -> Line | None:
    """Return an update's drift metrics at the same version, without name prefix; None if tokens cannot be compared."""
    if line.get("old_logp_missing") == 0.0:
        return {name.removeprefix("mismatch/"): value for name, value in line.items() if name.startswith("mismatch/")}
    if line.get("lag/max") == 0.0 and steps == 1 and "drift/kl" in line:
        return {name.removeprefix("drift/"): value for name, value in line.items() if name.startswith("drift/")}
    return None


def same_version_kl(line: Line, steps: int) -> tuple[float, float]:
    """Return the KL at the same version and its number of tokens; (0, 0) if unknown."""
    tokens = sum(count for name, count in line.items() if name.startswith("lag/tokens_"))
    if line.get("old_logp_missing") == 0.0 and "mismatch/kl" in line:
        return line["mismatch/kl"], tokens
    if steps == 1:
        return line.get("drift/kl/lag_0", 0.0), line.get("lag/tokens_0", 0.0) if "drift/kl/lag_0" in line else 0.0
    if line.get("lag/max") == 0.0 and "drift/kl_first" in line:
        return line["drift/kl_first"], tokens / steps
    return 0.0, 0.0


def accuracy_of(evaluations: Sequence[Line]) -> dict[str, list[Level]]:
    """Return accuracies by held-out set; those of older runs have binomial errors, as if samples were independent."""
    by_set: dict[str, list[Level]] = {}
    for line in evaluations:
        mean, count = line.get("accuracy", -1.0), line.get("samples", 0.0)
        if count and ("accuracy_error" in line or 0 <= mean <= 1):
            error = line.get("accuracy_error", sqrt(max(mean * (1 - mean), 0.0) / count))
            by_set.setdefault(line.get("set", ""), []).append(Level(mean, max(error, 1 / count)))
    return by_set
