"""Rules about learning: step size, response length and completeness, entropy, and rewards."""

from __future__ import annotations

from math import sqrt
from statistics import median

from slipstream.reporting.advice.drift import DRIFTED, WATCHED, fresher, risen, slower, worse
from slipstream.reporting.advice.measurements import WINDOW, Case, Level, level, values_of
from slipstream.reporting.advice.rules import Change, Found
from slipstream.reporting.advice.teachers import ALIKE, PATIENCE

SPIKE = 10.0
"""Gradient norm, as a multiple of its median, that often comes before a collapse."""
SURGE, SHRUNK = 1.2, 0.2
"""Limits for the mean response length divided by that of 100 updates before."""
SURE, COLLAPSED = 0.1, 0.5
"""Entropy below which the student has collapsed: in nats, and as a share of the initial entropy."""
CUT_OFF = 0.1
"""Largest share of responses that may be cut off."""
AGREED = 0.2
"""Share of responses with an advantage other than 0, below which most groups have equal rewards."""
COVERED = 0.9
"""Smallest allowed probability mass of the token ids on which student and teacher are compared."""
GATED = 0.25
"""Largest share of samples with freshness weight 0."""
ANSWERS = 8
"""Responses per update below which the gradient is mostly noise."""
COLD = 0.5
"""Temperature below which almost only the most likely tokens are sampled."""


# --- steps ------------------------------------------------------------------------------------------------------------


def too_large(case: Case) -> Found | None:
    """Find steps that are too large: by drift within one update, or by a student that gets worse without drift."""
    leaps, harm, steps = case.moved.over(DRIFTED), worse(case), case.steps
    # the KL of a step grows with the square of its size; without a measured KL, try a tenth of the learning rate
    changes: list[Change] = [slower(case.config, sqrt(WATCHED / case.moved.mean) if leaps else 0.1)]
    if leaps:
        return Found(
            metric="drift/kl/lag_1", value=case.moved.mean, limit=DRIFTED, changes=changes,
            weight="wrong" if harm else "watch",
        )  # fmt: skip
    first, last = case.now("drift/k3_kl_first"), case.now("drift/k3_kl_last")
    if steps > 1 and last.above(first) and last.mean - first.mean > DRIFTED:
        once: Change = {"learner.epochs": 1} if case.config.learner.epochs > 1 else {"learner.minibatches": 1}
        return Found(
            metric="drift/k3_kl_last", value=last.mean, limit=first.mean + DRIFTED, changes=[once, *changes],
            weight="wrong" if harm else "watch",
        )  # fmt: skip
    if not harm or case.drift.over(DRIFTED):
        return None
    if (fall := case.fall) is not None:
        return Found(metric=fall.name, value=fall.now, limit=0.9 * fall.best, changes=changes)
    return Found(metric="teacher/kl", value=case.kl_now.mean, limit=min(risen(case)), changes=changes)


def poor_samples(case: Case) -> Found | None:
    """Find a small batch or a low temperature in a run whose student has not improved."""
    if case.gained or len(case.lines) < 2 * WINDOW:
        return None
    learner, sampler = case.config.learner, case.config.sampler
    if learner.batch_size < ANSWERS:
        more: Change = {"learner.batch_size": -(-32 // sampler.group) * sampler.group}
        return Found(metric="samples", value=learner.batch_size, limit=ANSWERS, changes=[more])
    if sampler.temperature < COLD:
        warmer: Change = {"sampler.temperature": 1.0}
        return Found(metric="sampler.temperature", value=sampler.temperature, limit=COLD, changes=[warmer])
    return None


def spikes(case: Case) -> Found | None:
    """Find repeated gradient norms far above their median."""
    norms = values_of(case.lines, "grad_norm")
    if len(norms) < 2 * WINDOW:
        return None
    usual = median(norms)
    high = [norm for norm in values_of(case.late, "grad_norm") if norm > SPIKE * usual > 0]
    if len(high) < 3:
        return None
    return Found(
        metric="grad_norm", value=max(high), limit=SPIKE * usual, changes=[slower(case.config)],
        weight="wrong" if worse(case) else "watch",
    )  # fmt: skip


def nothing_moves(case: Case) -> Found | None:
    now, then = case.kl_now, case.kl_then
    moved = now.above(then) or then.above(now) or case.rewarded or case.fall is not None
    if len(case.lines) < PATIENCE or moved or not now.over(ALIKE) or abs(now.mean - then.mean) > 0.1 * then.mean:
        return None
    return Found(
        metric="teacher/kl", value=now.mean, limit=0.9 * then.mean, changes=[slower(case.config, 2.0)], weight="watch"
    )


# --- responses --------------------------------------------------------------------------------------------------------


def lengths(case: Case) -> tuple[Level, Level]:
    """Return the mean length now, and that of 100 updates before, or of the earliest comparable updates."""
    start = max(len(case.before) - 100, 0)
    before = case.before[start : start + WINDOW]
    return case.now("length/mean"), level(values_of(before, "length/mean"))


def surges(case: Case) -> Found | None:
    now, before = lengths(case)
    limit = Level(SURGE * before.mean, SURGE * before.error)
    if not now.above(limit):
        return None
    learns = case.config.policy is None and case.kl_then.above(case.kl_now) and not case.now("truncated").over(CUT_OFF)
    return Found(
        metric="length/mean", value=now.mean, limit=limit.mean, weight="watch" if learns else "wrong",
        changes=[{**slower(case.config), "guards.length_surge": {}}, slower(case.config)],
    )  # fmt: skip


def shrinks(case: Case) -> Found | None:
    now, before = lengths(case)
    limit = Level(SHRUNK * before.mean, SHRUNK * before.error)
    if not limit.above(now):
        return None
    return Found(metric="length/mean", value=now.mean, limit=limit.mean, changes=[slower(case.config)])


def collapses(case: Case) -> Found | None:
    """Find a student whose entropy collapsed, unless it approaches a teacher, which may lower entropy correctly."""
    now, then, config = case.now("student/entropy"), case.then("student/entropy"), case.config
    taught = case.kl_then.above(case.kl_now) or (config.policy is None and not worse(case))
    if not now.under(SURE) or not now.under(COLLAPSED * then.mean) or taught:
        return None
    guard: Change = {"guards.entropy": {}}
    policy: list[Change] = (
        [] if config.policy is None else [{"policy.loss": "clip_cov", **guard}, {"reference.weight": 0.01}]
    )
    return Found(
        metric="student/entropy", value=now.mean, limit=min(SURE, COLLAPSED * then.mean),
        changes=[*policy, guard, slower(config)],
    )  # fmt: skip


def cut_off(case: Case) -> Found | None:
    cut = case.now("truncated")
    if not cut.over(CUT_OFF):
        return None
    return Found(
        metric="truncated", value=cut.mean, limit=CUT_OFF, weight="wrong" if cut.over(0.5) else "watch",
        changes=roomier(case),
    )  # fmt: skip


def roomier(case: Case) -> list[Change]:
    """Return a change to twice max_tokens, limited by the models' context after the longest prompt."""
    config, most = case.config, 2 * case.config.sampler.max_tokens
    if case.context is not None:
        prompts = config.sampler.longest - config.sampler.max_tokens if config.sampler.longest is not None else 0
        most = min(most, case.context - prompts)
    if most <= config.sampler.max_tokens:
        return []
    known = {f"teachers.{name}.longest": None for name, teacher in config.teachers.items() if teacher.longest}
    return [{"sampler.max_tokens": most, **({"sampler.longest": None} if config.sampler.longest else {}), **known}]


def unrewarded(case: Case) -> Found | None:
    for name in case.rewards:
        values = values_of(case.lines, name)
        if len(values) >= 2 * WINDOW and not any(values):
            return Found(
                metric=name, value=0.0, limit=0.0, run=f"slipstream samples {case.at} -n 5",
                weight="wrong" if case.config.policy is not None else "watch",
            )  # fmt: skip
    return None


def agreed(case: Case) -> Found | None:
    moved = case.now("policy/rows_moved")
    if not moved.under(AGREED):
        return None
    return Found(
        metric="policy/rows_moved", value=moved.mean, limit=AGREED,
        changes=[{"sampler.group": 2 * case.config.sampler.group}],
        weight="watch" if case.rewarded else "wrong",
    )  # fmt: skip


# --- support of the loss, and freshness of samples --------------------------------------------------------------------


def uncovered(case: Case) -> Found | None:
    loss = case.config.loss
    if not loss.weight or loss.asks.cache not in ("student_topk", "teacher_topk"):
        return None
    name = "distill/student_mass" if loss.asks.cache == "student_topk" else "distill/teacher_mass"
    if not (mass := case.now(name)).under(COVERED):
        return None
    larger = min(2 * loss.asks.k, case.vocabulary or 2 * loss.asks.k)
    return Found(metric=name, value=mass.mean, limit=COVERED, changes=[{"loss.k": larger}, {"loss.tail": True}])


def worth_nothing(case: Case) -> Found | None:
    if not (gated := case.now("freshness/gated")).over(GATED):
        return None
    fresh = case.config.freshness
    lower: list[Change] = [{"freshness.threshold": fresh.threshold / 2}] if fresh is not None else []
    return Found(
        metric="freshness/gated", value=gated.mean, limit=GATED, changes=[*fresher(case.config), *lower],
        weight="watch" if case.gained else "wrong",
    )  # fmt: skip
