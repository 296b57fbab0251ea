"""Rules about learning: step size, response length and completeness, entropy, rewards, and freshness of samples."""

from collections.abc import Sequence
from itertools import pairwise
from math import log, nan, sqrt
from statistics import fmean, median, quantiles

from slipstream.config.freshness import FreshnessConfig
from slipstream.reporting.advice.drift import KL_LIMIT, KL_WARNING, fresher, plain_gradient, risen, slower, worse
from slipstream.reporting.advice.measurements import WINDOW, Case, Change, Evidence, Level, level, values_of
from slipstream.reporting.advice.teachers import ALIKE_KL, LONG_RUN, REPETITIVE

SPIKE = 10.0
"""Gradient norm, as a multiple of its median, that often comes before a collapse."""
SURGE, SHRUNK = 1.2, 0.2
"""Limits for the mean response length divided by that of 100 updates before."""
LOW_ENTROPY, ENTROPY_SHARE = 0.1, 0.5
"""Entropy below which the student has collapsed: in nats, and as a share of the initial entropy."""
RUINED_SHARE = 0.1
"""Share of the entropy of the update before; below it, and with repetitions, an update has ruined the student."""
MANY_CUT_OFF = 0.1
"""Largest share of responses that may be cut off."""
FEW_ADVANTAGES = 0.2
"""Share of responses with an advantage other than 0, below which most groups have equal rewards."""
EXPLAINED = 0.0
"""Share of the variance of rewards that values explain, below which a constant would be better."""
COVERED_MASS = 0.9
"""Smallest allowed probability mass of the token ids on which student and teacher are compared."""
MANY_GATED = 0.25
"""Largest share of samples with freshness weight 0."""
FEW_RESPONSES = 8
"""Responses per update below which the gradient is mostly noise."""
QUANTILE_SAMPLES = 50
"""Smallest number of samples for a 10% quantile; half as many updates are enough."""
SAME_SETTING = 0.2
"""Relative difference between a setting and the suggestion, up to which no change is suggested."""
MEDIAN_WEIGHT, ANCHOR_SHARE = 0.5, 0.1
"""Suggested factor of the median sample's drift, and suggested anchor as a share of the distillation loss."""
KAPPAS = {"kappa_f": "buffer_f", "kappa_roll": "buffer_roll_coverage", "kappa_sup": "buffer_sup_coverage"}
"""Thresholds of a refresh, and the metrics that they apply to (freshness/...)."""
SLOWER_TEACHER = 20
"""Suggested factor of the updates between two steps of a teacher that follows the student."""
LOW_TEMPERATURE = 0.5
"""Temperature below which almost only the most likely tokens are sampled."""


# --- steps ------------------------------------------------------------------------------------------------------------


def ruined_at_once(case: Case) -> Evidence | None:
    """Find one of the first updates after which the student writes one repetition, and did not before."""
    for before, line in pairwise(case.lines[:WINDOW]):
        entropy, limit = line.get("student/entropy", nan), RUINED_SHARE * before.get("student/entropy", nan)
        repeats = before.get("student/repeated", nan) <= REPETITIVE < line.get("student/repeated", nan)
        if entropy < limit and repeats:
            return Evidence("student/entropy", entropy, limit, [slower(case.config, 0.1)])
    return None


def follows_down(case: Case) -> Evidence | None:
    """Find a reward that fell with a following teacher, and that neither large steps nor staleness explain."""
    follows = {name: each.follow for name, each in case.config.teachers.items() if each.follow is not None}
    if not follows or case.fall is None or large_step(case) is not None or case.drift.over(KL_LIMIT):
        return None
    changes: list[Change] = [
        {f"teachers.{name}.follow.{'every' if follow.ema else 'copy_every'}": SLOWER_TEACHER * follow.period}
        for name, follow in follows.items()
    ]
    return Evidence(*case.fall, changes)


def large_step(case: Case) -> Evidence | None:
    """Find a step that is measured to be too large, or that ruined the student at once."""
    if (ruined := ruined_at_once(case)) is not None:
        return ruined
    moved, harm = case.moved, worse(case)
    if moved.over(KL_LIMIT):  # which grows with the square of a step's size
        slow = slower(case.config, sqrt(KL_WARNING / moved.mean))
        return Evidence("drift/kl/lag_1", moved.mean, KL_LIMIT, [slow], error=harm)
    first, last = case.now("drift/k3_kl_first"), case.now("drift/k3_kl_last")
    if case.steps > 1 and last.above(first) and last.mean - first.mean > KL_LIMIT:
        once: Change = {"learner.epochs": 1} if case.config.learner.epochs > 1 else {"learner.minibatches": 1}
        slow = slower(case.config, 0.1)
        return Evidence("drift/k3_kl_last", last.mean, first.mean + KL_LIMIT, [once, slow], error=harm)
    return None


def too_large(case: Case) -> Evidence | None:
    if (found := large_step(case)) is not None:
        return found
    if not worse(case) or case.drift.over(KL_LIMIT):
        return None
    changes: list[Change] = [slower(case.config, 0.1)]
    if case.fall is not None:
        return Evidence(*case.fall, changes)
    return Evidence("teacher/kl", case.kl_now.mean, min(risen(case)), changes)


def poor_samples(case: Case) -> Evidence | None:
    if case.gained or len(case.lines) < 2 * WINDOW:
        return None
    learner, sampler = case.config.learner, case.config.sampler
    if learner.batch_size < FEW_RESPONSES:
        more: Change = {"learner.batch_size": -(-32 // sampler.group) * sampler.group}
        return Evidence("samples", learner.batch_size, FEW_RESPONSES, [more])
    if sampler.temperature < LOW_TEMPERATURE:
        return Evidence("sampler.temperature", sampler.temperature, LOW_TEMPERATURE, [{"sampler.temperature": 1.0}])
    return None


def spikes(case: Case) -> Evidence | None:
    norms = values_of(case.lines, "grad_norm")
    if len(norms) < 2 * WINDOW:
        return None
    usual = median(norms)
    high = [norm for norm in values_of(case.late, "grad_norm") if norm > SPIKE * usual > 0]
    if len(high) < 3:
        return None
    return Evidence("grad_norm", max(high), SPIKE * usual, [slower(case.config)], error=worse(case))


def no_progress(case: Case) -> Evidence | None:
    now, then = case.kl_now, case.kl_then
    moved = now.above(then) or then.above(now) or case.rewarded or case.fall is not None
    moved = moved or case.moving_teacher or case.learned_loss
    if len(case.lines) < LONG_RUN or moved or not now.over(ALIKE_KL) or abs(now.mean - then.mean) > 0.1 * then.mean:
        return None
    return Evidence("teacher/kl", now.mean, 0.9 * then.mean, [slower(case.config, 2.0)])


# --- responses --------------------------------------------------------------------------------------------------------


def lengths(case: Case) -> tuple[Level, Level]:
    """Return the mean length now, and that of 100 updates before, or of the earliest comparable updates."""
    start = max(len(case.before) - 100, 0)
    before = case.before[start : start + WINDOW]
    return case.now("length/mean"), level(values_of(before, "length/mean"))


def surges(case: Case) -> Evidence | None:
    now, before = lengths(case)
    limit = Level(SURGE * before.mean, SURGE * before.error)
    if not now.above(limit):
        return None
    cut = case.now("truncated").over(MANY_CUT_OFF)
    learns = case.config.policy is None and case.kl_then.above(case.kl_now) and not cut
    changes = [{**slower(case.config), "guards.length_surge": {}}, slower(case.config)]
    if case.config.policy is not None and case.config.guards.length_surge is not None:
        changes.insert(0, plain_gradient(case, "bypass_pg_geo_rs"))
    return Evidence("length/mean", now.mean, limit.mean, changes, error=not learns)


def shrinks(case: Case) -> Evidence | None:
    now, before = lengths(case)
    limit = Level(SHRUNK * before.mean, SHRUNK * before.error)
    if not limit.above(now):
        return None
    return Evidence("length/mean", now.mean, limit.mean, [slower(case.config)])


def collapses(case: Case) -> Evidence | None:
    """Find a student whose entropy collapsed, unless it approaches a teacher, which may lower entropy correctly."""
    now, then, config = case.now("student/entropy"), case.then("student/entropy"), case.config
    taught = case.kl_then.above(case.kl_now) or (config.policy is None and not worse(case))
    if not now.under(LOW_ENTROPY) or not now.under(ENTROPY_SHARE * then.mean) or taught:
        return None
    changes: list[Change] = [{"guards.entropy": {}}, slower(config)]
    if config.policy is not None:
        changes = [{"policy.loss": "clip_cov", "guards.entropy": {}}, {"reference.weight": 0.01}, *changes]
    return Evidence("student/entropy", now.mean, min(LOW_ENTROPY, ENTROPY_SHARE * then.mean), changes)


def cut_off(case: Case) -> Evidence | None:
    return case.above("truncated", MANY_CUT_OFF, roomier(case), error=case.now("truncated").over(0.5))


def roomier(case: Case) -> list[Change]:
    """Return a change to twice max_tokens, limited by the models' context after the longest prompt."""
    config, most = case.config, 2 * case.config.sampler.max_tokens
    if case.context is not None:
        prompts = config.sampler.max_length - config.sampler.max_tokens if config.sampler.max_length is not None else 0
        most = min(most, case.context - prompts)
    if most <= config.sampler.max_tokens:
        return []
    known = {f"teachers.{name}.max_length": None for name, teacher in config.teachers.items() if teacher.max_length}
    return [
        {"sampler.max_tokens": most, **({"sampler.max_length": None} if config.sampler.max_length else {}), **known}
    ]


def unrewarded(case: Case) -> Evidence | None:
    for name in case.rewards:
        values = values_of(case.lines, name)
        if len(values) >= 2 * WINDOW and not any(values) and name != "reward/overlong":  # a penalty is best at 0
            return Evidence(name, 0.0, 0.0, run=case.show_samples, error=case.config.policy is not None)
    return None


def equal_rewards(case: Case) -> Evidence | None:
    larger: Change = {"sampler.group": 2 * case.config.sampler.group}
    return case.below("policy/rows_moved", FEW_ADVANTAGES, [larger], error=not case.rewarded)


def blind_critic(case: Case) -> Evidence | None:
    if (critic := case.config.critic) is None:
        return None
    faster: Change = {"critic.lr": min(3 * critic.lr, 1.0)}
    return case.below("critic/explained_variance", EXPLAINED, [faster], error=False)


# --- support of the loss, and freshness of samples --------------------------------------------------------------------


def uncovered(case: Case) -> Evidence | None:
    loss = case.config.loss
    if not loss.weight or loss.spec.cache not in ("student_topk", "teacher_topk"):
        return None
    metric = "distill/student_mass" if loss.spec.cache == "student_topk" else "distill/teacher_mass"
    larger = min(2 * loss.spec.k, case.vocabulary or 2 * loss.spec.k)
    return case.below(metric, COVERED_MASS, [{"loss.k": larger}, {"loss.tail": True}])


def gated(case: Case) -> Evidence | None:
    fresh = case.config.freshness
    lower: list[Change] = [{"freshness.threshold": fresh.threshold / 2}] if fresh is not None else []
    return case.above("freshness/gated", MANY_GATED, [*fresher(case.config), *lower], error=not case.gained)


def freshness_coefficients(case: Case) -> Evidence | None:
    """Suggest alpha and beta from the drift of this run, an anchor from its losses, and a cooldown from its schedule.

    With a suggested coefficient c, the factor exp(−c·√D) of the median sample is never below `MEDIAN_WEIGHT`: at no lag
    up to tau, and in no `WINDOW` updates. Drift is largest while lag grows after the start. A coefficient for the
    later, smaller drift would leave hardly any weight to the samples of the start.
    """
    fresh, learner = case.config.freshness, case.config.learner
    if fresh is None:
        return None
    change = dict[str, float]()
    for name, drift in (("alpha", "roll"), ("beta", "sup")) if fresh.weight == "freshness" else ():
        if (most := largest_median(case, drift)) > 0:
            change[f"freshness.{name}"] = rounded(-log(MEDIAN_WEIGHT) / sqrt(most))
    loss, kl = (values_of(case.lines, name) for name in ("distill/loss", "freshness/roll"))
    if fresh.anchor and loss and kl and fmean(kl) > 0:
        change["freshness.anchor"] = rounded(ANCHOR_SHARE * abs(fmean(loss)) / fmean(kl))
    if fresh.refresh == "adaptive":
        change["freshness.cooldown"] = 2 * (lag_limit(case) + 1) * learner.minibatches * learner.epochs
    change = {key: value for key, value in change.items() if is_other(value, setting(fresh, key))}
    if len(case.lines) < QUANTILE_SAMPLES or not change:
        return None
    first = next(iter(change))
    return Evidence("freshness/roll", change[first], setting(fresh, first), [change])


def lag_limit(case: Case) -> float:
    """Return the usual largest lag in updates: tau, or the k of schedules that have one."""
    return max(case.config.schedule.max_tau, getattr(case.config.schedule, "k", 0))


def setting(fresh: FreshnessConfig, key: str) -> float:
    value: float = getattr(fresh, key.rpartition(".")[2])
    return value


def is_other(suggested: float, value: float) -> bool:
    return abs(suggested - value) > SAME_SETTING * max(suggested, value)


def largest_median(case: Case, drift: str) -> float:
    """Return the largest median of a drift (roll or sup in the ledger); 0 if it is unknown.

    A median is over the samples of one lag, up to the lag limit, in `WINDOW` updates; at least `WINDOW` are needed.
    """
    found, limit = dict[tuple[int, int], list[float]](), lag_limit(case)
    for line in case.ledger:
        for value, lag in zip(line.get(drift, ()), line.get("lag", ()), strict=False):
            if value is not None and 0 < lag <= limit:
                found.setdefault((lag, line["update"] // WINDOW), []).append(value)
    return max((median(values) for values in found.values() if len(values) >= WINDOW), default=0.0)


def freshness_thresholds(case: Case) -> Evidence | None:
    """Suggest active thresholds: 10% quantiles of freshness at the lag limit, and of buffer metrics.

    Other coefficients make other freshness, so they come first.
    """
    fresh, coefficients = case.config.freshness, freshness_coefficients(case)
    if fresh is None or (coefficients and {"freshness.alpha", "freshness.beta"} & coefficients.changes[0].keys()):
        return None
    aged = [(f, lag) for line in case.ledger for f, lag in zip(line.get("f", ()), line.get("lag", ()), strict=False)]
    known = [(f, lag) for f, lag in aged if f is not None]
    old = [f for f, lag in known if lag >= lag_limit(case)]
    values = old if len(old) >= QUANTILE_SAMPLES else [f for f, _ in known if f < 1]
    change = dict[str, float]()
    if fresh.weight == "freshness" and len(values) >= QUANTILE_SAMPLES:
        change["freshness.threshold"] = tenth(values)
    for name, metric in KAPPAS.items() if fresh.refresh == "adaptive" else ():
        seen = values_of(case.lines[len(case.lines) // 4 :], f"freshness/{metric}")
        if len(seen) >= QUANTILE_SAMPLES // 2 and min(seen) < 1:
            change[f"freshness.{name}"] = tenth(seen)
    if not any(is_other(value, setting(fresh, key)) for key, value in change.items()):
        return None
    first = next(iter(change))
    metric = "freshness/f" if first == "freshness.threshold" else f"freshness/{KAPPAS[first.rpartition('.')[2]]}"
    return Evidence(metric, change[first], setting(fresh, first), [change])


def tenth(values: Sequence[float]) -> float:
    """Return the 10% quantile, rounded to two digits."""
    return rounded(quantiles(values, n=10, method="inclusive")[0])


def rounded(value: float) -> float:
    return float(f"{value:.2g}")
