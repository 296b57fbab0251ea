"""Rules about what lies between the policy that drew and the one that learns, upstream first.

Same-version tokens are read apart from stale ones. A difference between engines is a bug, and no correction removes it;
what grows with the lag is staleness; only then do variance and clipping mean anything.  (Liu, Off-Policy Drift in LLM
RL.)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from slipstream.config.losses import ReverseKLMC
from slipstream.config.schedule import Async, Replay, StepOff
from slipstream.config.schema import Config
from slipstream.estimators.tables.correction import PRESETS
from slipstream.reporting.advice.answer import Change, Found
from slipstream.reporting.advice.readings import Case, Level, Line, level, values_of

WATCHED, DRIFTED = 0.02, 0.05
"""KL below which there is no drift to speak of, and from which on it is to be mended."""
APART = 0.95
"""Correlation of probabilities below which two engines run different policies."""
LEAP = 0.5
"""Difference of one token's probability that no rounding makes."""
PERPLEXED = 0.05
"""By which a ratio of perplexities may be off 1."""
ROUNDED = 1e-3
"""KL of one version between two engines in float32, which has no excuse."""
MODERATE, BLOWN_UP = 0.3, 1.0
"""chi2_token from which on outliers are to be filtered, and from which on weights are mostly noise."""
WEIGHED, HOPELESS = 2.0, 4.0
"""chi2_token up to which rejection alone will do, and above which no correction does."""
HALF, THIRD = 0.5, 0.3
"""Effective sample sizes: variance has blown up, and that in spite of rejection."""
MASKED, TOO_MANY = 0.1, 0.25
"""Shares of tokens that are rejected: more than rejection alone should, and more than any correction may."""
TAIL = 10.0
"""Ratio of a single draw."""
CLIPPED = 0.2
CUT = 1e-3
"""Share of draws whose weights are cut, from which on staleness is no longer weighed away."""
LONG = 50
"""Tokens at which a ratio of 1.1 a token is 117 of a sequence."""
GEOMETRIC: Change = {"correction.rs": {"seq_mean_k1": [0.99, 1.01]}}
"""The bound of the decision tree, which is wider than that of the presets."""
REJECT: Change = {"correction.preset": "decoupled_geo_rs", **GEOMETRIC}


def compares(config: Config) -> bool:
    """Whether anything that is learned weighs by what drew: else drift costs no more than old prefixes."""
    return config.policy is not None or (config.loss.weight > 0 and config.loss.asks.compares)


def in_float32(config: Config) -> bool:
    learner, sampler = config.learner, config.sampler
    return sampler.engine == "native" and {sampler.dtype, learner.compute_dtype or learner.dtype} <= {
        "float32",
        "float64",
    }


def truncates(config: Config) -> bool:
    sampler = config.sampler
    return not sampler.keep_mask and (sampler.top_p < 1 or sampler.top_k > 0 or sampler.min_p > 0)


def fresher(config: Config) -> list[Change]:
    """Half as stale."""
    match config.schedule:
        case Async(tau="auto") as schedule:
            return [{"schedule.drift": schedule.drift / 2}]
        case Async(tau=float() | int() as tau) as schedule:
            every = schedule.often
            sooner: list[Change] = [{"schedule.publish_every": every // 2}] if every > 1 else []
            return [*sooner, {"schedule.tau": tau // 2 if tau >= 2 else 0}]
        case Replay(k=k) | StepOff(k=k) if k > 1:
            return [{"schedule.k": k // 2}]
        case Replay() | StepOff():
            return [{"schedule.kind": "periodic"}, {"schedule.kind": "sync"}]
    return []


def slower(config: Config, factor: float = 0.5) -> Change:
    return {"learner.lr": float(f"{config.learner.lr * factor:.2g}")}


def risen(case: Case) -> list[float]:
    """Return the limits that the KL to the teachers has crossed: a tenth above its best, or above what it was, or twice
    that of the first update, at which answers are short, as those are finished first."""
    now, known = case.kl_now, ((case.kl_best, 1.1), (case.kl_then, 1.1), (case.kl_first, 2.0))
    return [times * kl.mean for kl, times in known if now.above(kl) and now.mean > times * kl.mean]


# --- A: engines -------------------------------------------------------------------------------------------------------


def engines_differ(case: Case) -> Found | None:
    """Of one version. What truncation cut off differs, and is meant; so do keys of older weights, up to a point."""
    config, known, gap = case.config, case.agreement, case.same_kl
    exact = in_float32(config) and config.sampler.on_publish == "rebuild"
    seen = None if truncates(config) else apart(known, gap, ROUNDED if exact else DRIFTED, exact=exact)
    if seen is None:
        return None
    name, value, limit = seen
    decoupled = any(f"mismatch/{name}" in line for line in case.lines)
    metric = f"mismatch/{name}" if decoupled else "drift/kl/lag_0" if name == "kl" else f"drift/{name}"
    late = len(case.lines) > 1 and bool(known) and known[0].get("k3_kl", 0.0) < limit / 10
    return Found(
        metric=metric, value=value, limit=limit, changes=aligned(config),
        run=f"slipstream doctor {case.at}/config.toml", weight="watch" if limit == WATCHED else "wrong",
        why=UNPUBLISHED if late and name == "kl" else "",
    )  # fmt: skip


UNPUBLISHED = (
    "Sampler and learner agree at the first update and no more since (A): what is published is not what the sampler "
    "runs."
)


def apart(known: Sequence[Line], gap: Level, limit: float, *, exact: bool) -> tuple[str, float, float] | None:
    """Which number is beyond which limit. The largest difference counts by itself: a mean would hide one expert."""
    k3 = fmean(values_of(known, "k3_kl") or [0.0])
    if gap.over(limit) or (exact and k3 > limit):
        return "kl", max(gap.mean, k3), limit
    if k3 > ROUNDED:  # below, where all tokens are nearly certain, a correlation is one of rounding errors
        pearson, ratio = values_of(known, "probs_pearson"), values_of(known, "ppl_ratio")
        if level(pearson).under(APART) or (len(pearson) == 1 and pearson[0] < APART):
            return "probs_pearson", fmean(pearson), APART
        if level([abs(each - 1) for each in ratio]).over(PERPLEXED):
            return "ppl_ratio", fmean(ratio), 1 + PERPLEXED
    largest = [each for each in values_of(known, "probs_diff_max") if each > LEAP]
    if len(largest) >= 3 and len(largest) > len(known) / 2:
        return "probs_diff_max", max(largest), LEAP
    return ("kl", gap.mean, WATCHED) if gap.over(WATCHED) else None


def aligned(config: Config) -> list[Change]:
    """Systems first; and no correction while one looks."""
    learner, sampler = config.learner, config.sampler
    return [
        *([{"sampler.on_publish": "rebuild"}] if sampler.on_publish == "reuse" else []),
        *([{"sampler.dtype": learner.compute_dtype or learner.dtype}] if not in_float32(config) else []),
        *([{"sampler.dtype": "float32", "learner.dtype": "float32"}] if not in_float32(config) else []),
        *([{"correction.preset": "disabled"}] if config.correction.preset != "disabled" else []),
    ]


def nobody_knows(case: Case) -> Found | None:
    """Anti-pattern 1: drift is taken for learning before it is known whether the engines agree."""
    if case.agreement or not case.drift.over(DRIFTED) or case.same_kl.error < 1:
        return None
    return Found(
        metric="drift/k3_kl", value=case.drift.mean, limit=DRIFTED, run=f"slipstream doctor {case.at}/config.toml"
    )


# --- B: staleness -----------------------------------------------------------------------------------------------------


def stale(case: Case) -> Found | None:
    """By itself it is no harm: with ess above a half, and a student that learns, the tree says to go on."""
    if not case.drift.over(DRIFTED):
        return None
    thin = compares(case.config) and case.now("drift/ess").under(HALF)
    return Found(
        metric="drift/k3_kl", value=case.drift.mean, limit=DRIFTED,
        changes=[*fresher(case.config), slower(case.config)],
        weight="wrong" if worse(case) or (thin and not case.gained) else "watch",
    )  # fmt: skip


def worse(case: Case) -> bool:
    """The KL to the teachers is above its best by a tenth, beyond chance, and no reward is better for it; or rewards
    fell, and no KL did. A teacher that moves may move away, and a loss that follows the teacher is no reverse KL."""
    config = case.config
    moving = any(teacher.follow is not None for teacher in config.teachers.values())
    other = config.loss.kind in ("forward_kl", "jsd") and case.learned_loss
    further = bool(risen(case)) and not moving and not other
    return (further and not case.rewarded) or (case.fall is not None and not case.kl_then.above(case.kl_now))


def biased(case: Case) -> Found | None:
    """Draws of an older student that count as today's, or for less than they are: no longer its reverse KL."""
    loss, lag, cut = case.config.loss, case.now("lag/mean"), case.now("distill/clip_fraction")
    if not isinstance(loss, ReverseKLMC) or not loss.weight or not lag.mean >= 0.5 or not worse(case):
        return None
    if not loss.importance:
        return Found(metric="lag/mean", value=lag.mean, limit=0.5, changes=[{"loss.importance": True}])
    if not cut.over(CUT):
        return None
    uncut: Change = {f"loss.{name}": None for name in ("ratio_cap", "clip") if getattr(loss, name) is not None}
    return Found(metric="distill/clip_fraction", value=cut.mean, limit=CUT, changes=[uncut])


# --- C and D: variance ------------------------------------------------------------------------------------------------


def ess_of(case: Case) -> tuple[str, float, bool]:
    name = "correction/ess" if case.has("correction/ess") else "drift/ess"
    return name, case.now(name).mean, case.now(name).under(HALF)


def blown_up(case: Case) -> Found | None:
    if not compares(case.config):
        return None
    chi2 = case.now("drift/chi2_token")
    name, ess, thin = ess_of(case)
    noise, before = case.now("gradient/noise"), case.then("gradient/noise")
    louder = case.has("correction/rollout_is_mean") and noise.over(2 * before.mean) and noise.above(before)
    if thin:
        metric, value, limit = name, ess, HALF
    elif chi2.over(BLOWN_UP):
        metric, value, limit = "drift/chi2_token", chi2.mean, BLOWN_UP
    elif louder:
        metric, value, limit = "gradient/noise", noise.mean, 2 * before.mean
    else:
        return None
    return Found(
        metric=metric, value=value, limit=limit, changes=escalated(case, chi2.mean),
        weight="wrong" if louder or not case.gained else "watch",
    )  # fmt: skip


def escalated(case: Case, chi2: float) -> list[Change]:
    """Rejection; rejection and weights; and where more than a quarter would go, or chi2 is beyond them, the cause."""
    config, masked = case.config, case.now("correction/rollout_rs_masked_fraction").mean
    rejects = case.has("correction/rollout_rs_masked_fraction")
    if chi2 > HOPELESS or masked > TOO_MANY or (rejects and ess_of(case)[1] < THIRD):
        return [*fresher(config), slower(config)]
    if config.policy is None:
        return [{"loss.kind": "m2po"}, *fresher(config), slower(config)]
    if chi2 >= WEIGHED or masked > MASKED:
        return [{"correction.preset": "decoupled_geo_rs_token_tis", **GEOMETRIC}, *fresher(config)]
    if not rejects:
        return [REJECT, *fresher(config)]
    return [{"correction.preset": "decoupled_token_icepop"}, *fresher(config)]


def moderate(case: Case) -> Found | None:
    chi2 = case.now("drift/chi2_token")
    if not compares(case.config) or not chi2.over(MODERATE) or case.has("correction/rollout_rs_masked_fraction"):
        return None
    return Found(
        metric="drift/chi2_token", value=chi2.mean, limit=MODERATE, weight="watch",
        changes=[{"loss.kind": "m2po"} if case.config.policy is None else REJECT, *fresher(case.config)],
    )  # fmt: skip


def masks_too_much(case: Case) -> Found | None:
    name = "correction/rollout_rs_masked_fraction"
    if not (masked := case.now(name)).over(TOO_MANY):
        return None
    return Found(metric=name, value=masked.mean, limit=TOO_MANY, changes=[*bounded(case), *fresher(case.config)])


def bounded(case: Case) -> list[Change]:
    """The presets' geometric bounds are a tenth as wide as the tree's."""
    given = case.config.correction
    narrow = given.rs is None and "seq_mean_k1" in (PRESETS[given.preset].rs or {})
    return [GEOMETRIC] if narrow else []


def by_sequence(case: Case) -> Found | None:
    """Anti-pattern 2, and the length trap: products over a sequence grow exponentially with it."""
    preset, given = PRESETS[case.config.correction.preset], case.config.correction
    name, ess, thin = ess_of(case)
    if (given.is_level or preset.is_level) == "sequence" and thin:
        return Found(metric=name, value=ess, limit=HALF, changes=[{"correction.is_level": "token"}])
    summed = [mode for mode in (given.rs or preset.rs or {}) if mode.startswith("seq_sum")]
    lost, longest = case.now("correction/rollout_rs_seq_masked_fraction"), case.now("length/max")
    if summed and lost.over(MASKED) and longest.over(LONG):
        return Found(
            metric="correction/rollout_rs_seq_masked_fraction", value=lost.mean, limit=MASKED, changes=[GEOMETRIC]
        )
    return None


def tails(case: Case) -> Found | None:
    """Where a student learns all the same, a far tail is only a tail."""
    name, config = "distill/ratio_max", case.config
    if not config.loss.weight or not (ratio := case.now(name)).over(TAIL) or case.gained:
        return None
    return Found(
        metric=name, value=ratio.mean, limit=TAIL, weight="watch",
        changes=[{"loss.advantage": "current", "loss.clip": None}, {"loss.kind": "m2po"}],
    )  # fmt: skip


# --- E: clipping ------------------------------------------------------------------------------------------------------


def clipped(case: Case) -> Found | None:
    for name in ("policy/clip_fraction", "distill/clip_fraction"):
        clip = case.now(name)
        if clip.over(CLIPPED):
            rising = clip.above(case.then(name))
            once: list[Change] = [{"learner.epochs": 1}] if case.config.learner.epochs > 1 else []
            return Found(
                metric=name, value=clip.mean, limit=CLIPPED, changes=[*once, slower(case.config)],
                weight="wrong" if rising or worse(case) else "watch",
            )  # fmt: skip
    return None


USUAL = {"clip": 0.2, "clip_low": 0.2, "clip_high": 0.28}


def widened(case: Case) -> Found | None:
    """Anti-pattern 3."""
    policy = case.config.policy
    clip = case.now("policy/clip_fraction")
    if policy is None or not clip.over(CLIPPED):
        return None
    for name, usual in USUAL.items():
        if policy.options.get(name, usual) > usual:
            options = {key: value for key, value in policy.options.items() if key != name}
            return Found(
                metric="policy/clip_fraction", value=clip.mean, limit=CLIPPED, changes=[{"policy.options": options}]
            )
    return None
