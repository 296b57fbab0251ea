"""Rules about the drift between the policy that sampled the tokens and the learner, causes before symptoms.

Tokens of the learner's own version are examined apart from stale tokens. A difference at the same version is a bug in
an engine, and no correction removes it. Drift that grows with the lag is staleness. Variance and clipping come last.
(Liu, Off-Policy Drift in LLM RL.)
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from slipstream.config.engines import ENGINES
from slipstream.config.losses import ReverseKLMC
from slipstream.config.schedule import Async, Replay, StepOff
from slipstream.config.schema import Config
from slipstream.estimators.tables.correction import PRESETS
from slipstream.reporting.advice.measurements import Case, Level, Line, level, values_of
from slipstream.reporting.advice.rules import Change, Found

WATCHED, DRIFTED = 0.02, 0.05
"""KL up to which drift is negligible, and KL above which it must be fixed."""
APART = 0.95
"""Correlation of two engines' token probabilities; below it, the engines run different policies."""
LEAP = 0.5
"""Difference of one token's probability that is too large for a rounding error."""
PERPLEXED = 0.05
"""Largest allowed distance of a ratio of perplexities from 1."""
ROUNDED = 1e-3
"""Largest allowed KL between two engines in float32 with the same weights."""
MODERATE, BLOWN_UP = 0.3, 1.0
"""chi2_token above which outliers should be rejected, and above which importance weights are mostly noise."""
WEIGHED, HOPELESS = 2.0, 4.0
"""chi2_token below which rejection alone is enough, and above which no correction is enough."""
HALF, THIRD = 0.5, 0.3
"""Effective sample sizes (as shares) below which the variance is too high: in general, and in spite of rejection."""
MASKED, TOO_MANY = 0.1, 0.25
"""Largest share of rejected tokens for rejection alone, and for any correction."""
TAIL = 10.0
"""Largest allowed importance ratio of a draw (an extra token sampled at the same position)."""
CLIPPED = 0.2
CUT = 1e-3
"""Largest share of clipped or capped importance weights at which the weights still correct staleness."""
LONG = 50
"""Sequence length in tokens from which products over a sequence are a problem: 1.1 per token gives 117."""
GEOMETRIC: Change = {"correction.rs": {"seq_mean_k1": [0.99, 1.01]}}
"""Geometric rejection with the bounds of the decision tree, which are wider than those of the presets."""
REJECT: Change = {"correction.preset": "decoupled_geo_rs", **GEOMETRIC}


def compares(config: Config) -> bool:
    """Return True if a loss uses the sampling policy's log-probs. If False, drift only makes prefixes stale."""
    return config.policy is not None or (config.loss.weight > 0 and config.loss.asks.compares)


def in_float32(config: Config) -> bool:
    learner, sampler = config.learner, config.sampler
    return ENGINES[sampler.engine].same_code_as_learner and {sampler.dtype, learner.compute_dtype or learner.dtype} <= {
        "float32",
        "float64",
    }


def truncates(config: Config) -> bool:
    sampler = config.sampler
    return not sampler.keep_mask and (sampler.top_p < 1 or sampler.top_k > 0 or sampler.min_p > 0)


def fresher(config: Config) -> list[Change]:
    """Return changes that halve the staleness, best first."""
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
    """Return the limits that the KL to the teachers exceeds, among 1.1 × best, 1.1 × early and 2 × first value."""
    # the last factor is larger because short responses finish first, and their KL is lower
    now, known = case.kl_now, ((case.kl_best, 1.1), (case.kl_then, 1.1), (case.kl_first, 2.0))
    return [times * kl.mean for kl, times in known if now.above(kl) and now.mean > times * kl.mean]


# --- engines ----------------------------------------------------------------------------------------------------------


def engines_differ(case: Case) -> Found | None:
    """Find log-probs that differ between sampler and learner at the same version, without truncated sampling."""
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
    "Sampler and learner agree at the first update and disagree since then: the sampler does not run the published "
    "weights."
)


def apart(known: Sequence[Line], gap: Level, limit: float, *, exact: bool) -> tuple[str, float, float] | None:
    """Return name, value and limit of the first metric beyond its limit; None if engines agree."""
    k3 = fmean(values_of(known, "k3_kl") or [0.0])
    if gap.over(limit) or (exact and k3 > limit):
        return "kl", max(gap.mean, k3), limit
    if k3 > ROUNDED:  # below this KL all tokens are nearly certain, and rounding errors dominate the correlation
        pearson, ratio = values_of(known, "probs_pearson"), values_of(known, "ppl_ratio")
        if level(pearson).under(APART) or (len(pearson) == 1 and pearson[0] < APART):
            return "probs_pearson", fmean(pearson), APART
        if level([abs(each - 1) for each in ratio]).over(PERPLEXED):
            return "ppl_ratio", fmean(ratio), 1 + PERPLEXED
    largest = [each for each in values_of(known, "probs_diff_max") if each > LEAP]  # means would hide one bad expert
    if len(largest) >= 3 and len(largest) > len(known) / 2:
        return "probs_diff_max", max(largest), LEAP
    return ("kl", gap.mean, WATCHED) if gap.over(WATCHED) else None


def aligned(config: Config) -> list[Change]:
    """Return changes that make the engines compute alike, then one that turns corrections off while debugging."""
    learner, sampler = config.learner, config.sampler
    return [
        *([{"sampler.on_publish": "rebuild"}] if sampler.on_publish == "reuse" else []),
        *([{"sampler.dtype": learner.compute_dtype or learner.dtype}] if not in_float32(config) else []),
        *([{"sampler.dtype": "float32", "learner.dtype": "float32"}] if not in_float32(config) else []),
        *([{"correction.preset": "disabled"}] if config.correction.preset != "disabled" else []),
    ]


def nobody_knows(case: Case) -> Found | None:
    """Find drift in a run that has no tokens on which to check that the engines agree."""
    if case.agreement or not case.drift.over(DRIFTED) or case.same_kl.error < 1:
        return None
    return Found(
        metric="drift/k3_kl", value=case.drift.mean, limit=DRIFTED, run=f"slipstream doctor {case.at}/config.toml"
    )


# --- staleness --------------------------------------------------------------------------------------------------------


def stale(case: Case) -> Found | None:
    """Find drift on stale tokens; only a warning if the student improves or the effective sample size is high."""
    if not case.drift.over(DRIFTED):
        return None
    thin = compares(case.config) and case.now("drift/ess").under(HALF)
    return Found(
        metric="drift/k3_kl", value=case.drift.mean, limit=DRIFTED,
        changes=[*fresher(case.config), slower(case.config)],
        weight="wrong" if worse(case) or (thin and not case.gained) else "watch",
    )  # fmt: skip


def worse(case: Case) -> bool:
    """Return True if the KL to the teachers rose and no reward rose, or if a reward fell and the KL did not fall.

    The KL does not count for teachers that follow the student, or for a forward KL or JSD loss that falls.
    """
    config = case.config
    moving = any(teacher.follow is not None for teacher in config.teachers.values())
    other = config.loss.kind in ("forward_kl", "jsd") and case.learned_loss
    further = bool(risen(case)) and not moving and not other
    return (further and not case.rewarded) or (case.fall is not None and not case.kl_then.above(case.kl_now))


def biased(case: Case) -> Found | None:
    """Find stale draws (sampled extra tokens) without correct importance weights: the loss is not the reverse KL."""
    loss, lag, cut = case.config.loss, case.now("lag/mean"), case.now("distill/clip_fraction")
    if not isinstance(loss, ReverseKLMC) or not loss.weight or not lag.mean >= 0.5 or not worse(case):
        return None
    if not loss.importance:
        return Found(metric="lag/mean", value=lag.mean, limit=0.5, changes=[{"loss.importance": True}])
    if not cut.over(CUT):
        return None
    uncut: Change = {f"loss.{name}": None for name in ("ratio_cap", "clip") if getattr(loss, name) is not None}
    return Found(metric="distill/clip_fraction", value=cut.mean, limit=CUT, changes=[uncut])


# --- variance ---------------------------------------------------------------------------------------------------------


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
    """Return changes by severity: rejection, rejection and importance weights, or less staleness as last resort."""
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
    """Return wider geometric bounds if the config uses the preset's bounds, which are a tenth as wide."""
    given = case.config.correction
    narrow = given.rs is None and "seq_mean_k1" in (PRESETS[given.preset].rs or {})
    return [GEOMETRIC] if narrow else []


def by_sequence(case: Case) -> Found | None:
    """Find weights or rejection by products over a sequence, which grow exponentially with its length."""
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
    """Find extreme importance ratios of draws, unless the student improves in spite of them."""
    name, config = "distill/ratio_max", case.config
    if not config.loss.weight or not (ratio := case.now(name)).over(TAIL) or case.gained:
        return None
    return Found(
        metric=name, value=ratio.mean, limit=TAIL, weight="watch",
        changes=[{"loss.advantage": "current", "loss.clip": None}, {"loss.kind": "m2po"}],
    )  # fmt: skip


# --- clipping ---------------------------------------------------------------------------------------------------------


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
    """Find a high clip fraction with a clip range that is wider than the default."""
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
