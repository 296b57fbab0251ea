"""Rules about the drift between the policy that sampled the tokens and the learner, causes before symptoms.

Tokens of the learner's own version are examined apart from stale tokens. A difference at the same version is a bug in
an engine, and no correction removes it. Drift that grows with the lag is staleness. Variance and clipping come last.
(Liu, Off-Policy Drift in LLM RL.)
"""

from collections.abc import Sequence
from math import ceil, exp, floor, isnan, log1p, sqrt
from statistics import fmean

from slipstream.config.engines import ENGINES
from slipstream.config.losses import KLEstimate, ReverseKLMC
from slipstream.config.objective import PolicyConfig
from slipstream.config.schedule import Async, Replay, StepOff
from slipstream.config.schema import Config
from slipstream.estimators.tables.correction import PRESETS
from slipstream.reporting.advice.measurements import Case, Change, Evidence, Level, Line, level, teacher_kl, values_of

FLIPPED = 0.02
"""Share of tokens and layers with other experts from which routers count as a cause of mismatch."""
KL_WARNING, KL_LIMIT = 0.02, 0.05
"""KL up to which drift is negligible, and KL above which it must be fixed."""
CORRELATION = 0.95
"""Correlation of two engines' token probabilities; below it, the engines run different policies."""
PROBABILITY_GAP = 0.5
"""Difference of one token's probability that is too large for a rounding error."""
PERPLEXITY_GAP = 0.05
"""Largest allowed distance of a ratio of perplexities from 1."""
KL_ROUNDING, KL_FLOAT32, KL_FEW = 1e-3, 1e-5, 1e-4
"""KL that rounding to 16 bits explains; largest allowed KL between two engines in float32 with the same weights, over
all tokens, and over the few tokens of one update."""
MODERATE, BLOWN_UP = 0.3, 1.0
"""chi2_token above which outliers should be rejected, and above which importance weights are mostly noise."""
WEIGHED, HOPELESS = 2.0, 4.0
"""chi2_token below which rejection alone is enough, and above which no correction is enough."""
LOW_ESS, LOWEST_ESS = 0.5, 0.3
"""Effective sample sizes (as shares) below which the variance is too high: in general, and in spite of rejection."""
MASKED, TOO_MANY = 0.1, 0.25
"""Largest share of tokens that a correction takes out, for rejection alone, and for any correction."""
SMALL_LR = 3e-3
"""Learning rate up to which the first updates, in the warm-up, are small steps."""
LARGE_RATIO = 10.0
"""Largest allowed importance ratio of a draw (an extra token sampled at the same position)."""
CLIPPED, SATURATED = 0.2, 0.4
"""Share of clipped tokens above which to take smaller steps, and above which to change the objective."""
CLIPPED_WEIGHTS = 1e-3
"""Largest share of clipped or capped importance weights at which the weights still correct staleness."""
LONG_RESPONSE = 50
"""Sequence length in tokens from which products over a sequence are a problem: 1.1 per token gives 117."""
EXPLODED = 100.0
"""chi2_seq from which weights of sequences are useless, even if truncation hides it."""
OLD_LAG = 4.0
"""Mean lag from which the proposed correction also rejects whole responses."""
LEAST_WIDTH = 0.01
"""Log-ratio at which geometric rejection begins without drift: the bounds of the decision tree are 0.99 and 1.01."""


def compares(config: Config) -> bool:
    """Return True if a loss uses the sampling policy's log-probs. If False, drift only makes prefixes stale."""
    return policy_of(config) is not None or (config.loss.weight > 0 and config.loss.spec.compares)


def in_float32(config: Config) -> bool:
    learner, sampler = config.learner, config.sampler
    types = {sampler.dtype, learner.compute_dtype or learner.dtype}
    quantised = sampler.quantisation is not None and not learner.quantised
    same = ENGINES[sampler.engine].same_code_as_learner and not quantised
    return same and types <= {"float32", "float64"}


def fresher(config: Config) -> list[Change]:
    """Return changes that halve the staleness, best first."""
    changes: list[Change] = []
    if config.reuse is not None and config.reuse.times > 1:
        changes.append({"reuse.times": config.reuse.times // 2})
    match config.schedule:
        case Async(tau="auto") as schedule:
            changes.append({"schedule.drift": schedule.drift / 2})
        case Async(tau=float() | int() as tau) as schedule:
            every = schedule.min_publish_every
            sooner: list[Change] = [{"schedule.publish_every": every // 2}] if every > 1 else []
            changes += [*sooner, {"schedule.tau": tau // 2 if tau >= 2 else 0}]
        case Replay(k=k) | StepOff(k=k) if k > 1:
            changes.append({"schedule.k": k // 2})
        case Replay() | StepOff():
            changes += [{"schedule.kind": "periodic"}, {"schedule.kind": "sync"}]
    return changes


def rejection(case: Case, compared: str = "drift") -> Change:
    """Return geometric rejection that keeps most rows at the present drift ("mismatch": at that of the engines).

    With σ² = log(1 + chi2) as the variance of a token's log-ratio, the mean over T tokens is about −σ²/2 ± σ/√T.
    """
    chi2, tokens = case.now(f"{compared}/chi2_token").mean, case.now("length/mean").mean
    variance = 0.0 if isnan(chi2) else log1p(min(max(chi2, 0.0), HOPELESS))
    width = max(variance / 2 + 2 * sqrt(variance / (1.0 if isnan(tokens) else max(tokens, 1.0))), LEAST_WIDTH)
    low, high = floor(1000 * exp(-width)) / 1000, ceil(1000 * exp(width)) / 1000
    return {"correction.rs": {"seq_mean_k1": [low, high]}}


def compared_by(case: Case) -> str:
    """Return which metrics the correction of the run changes: those of the engines, or those of stale tokens."""
    return "mismatch" if case.config.correction.parts.mode == "decoupled" else "drift"


def policy_of(config: Config) -> PolicyConfig | None:
    """Return the policy loss if the student learns from it."""
    return config.policy if config.policy is not None and config.policy.weight else None


def corrections(case: Case, *, weighs: bool = False, rejects: bool = False) -> list[Change]:
    """Return a correction of staleness by weights, rejection, or both; none if the loss takes none.

    It compares with the current policy ("bypass"): decoupled presets compare the engines at the version that drew.
    """
    rows = rejection(case) if rejects and case.config.correction.rs is None else {}
    policy = policy_of(case.config)
    match policy and policy.loss:
        case "vanilla" if rejects:  # its own ratio weighs the tokens
            return [{"correction.preset": "bypass_ppo_clip_geo_rs", **rows}]
        case "reinforce" | "gpg" if weighs and rejects:
            return [{"correction.preset": "bypass_pg_geo_rs_token_tis", **rows}]
        case "reinforce" | "gpg" if rejects:
            return [{"correction.preset": "bypass_pg_geo_rs", **rows}]
        case "reinforce" | "gpg":
            return [{"correction.preset": "bypass_pg_is", "correction.is_level": "token"}]
    return []


def plain_gradient(case: Case, preset: str) -> Change:
    """Return the change to a plain policy gradient with a preset that rejects."""
    return {"correction.preset": preset, "policy.loss": "reinforce", "policy.options": {}, **rejection(case)}


def slower(config: Config, factor: float = 0.5) -> Change:
    return {"learner.lr": float(f"{config.learner.lr * factor:.2g}")}


def risen(case: Case) -> list[float]:
    """Return the limits that the KL to the teachers exceeds, among 1.1 × best, 1.1 × early and 2 × first value."""
    # the last factor is larger because short responses finish first, and their KL is lower
    now, known = case.kl_now, ((case.kl_best, 1.1), (case.kl_then, 1.1), (case.kl_first, 2.0))
    return [times * kl.mean for kl, times in known if now.above(kl) and now.mean > times * kl.mean]


# --- engines ----------------------------------------------------------------------------------------------------------


def engines_differ(case: Case) -> Evidence | None:
    """Find log-probs that differ between sampler and learner at the same version, without truncated sampling."""
    config, lines = case.config, case.agreement
    sampler = config.sampler
    if not sampler.keep_mask and (sampler.top_p < 1 or sampler.top_k > 0 or sampler.min_p > 0):
        return None
    # a request that goes on after a publish reads keys and values of earlier weights
    exact = in_float32(config) and (sampler.on_publish == "rebuild" or config.schedule.serial)
    seen = difference(lines, case.same_kl, KL_FLOAT32 if exact else KL_LIMIT, exact)
    if seen is None and exact and case.steps == 1 and (largest := case.largest_same_kl) > KL_FEW:
        seen = "kl", largest, KL_FEW
    if seen is None:
        return None
    name, value, limit = seen
    decoupled = any(f"mismatch/{name}" in line for line in case.lines)
    metric = f"mismatch/{name}" if decoupled else "drift/kl/lag_0" if name == "kl" else f"drift/{name}"
    agreed = bool(lines) and lines[0].get("k3_kl", 0.0) < min(limit, KL_ROUNDING) / 10
    unpublished = name == "kl" and len(case.lines) > 1 and agreed
    return Evidence(
        metric, value, limit, aligned(config, routed=case.has("router/flips")),
        run=case.doctor, error=limit != KL_WARNING, other_cause=unpublished,
    )  # fmt: skip


def routers_flip(case: Case) -> Evidence | None:
    """Find experts that sampler and learner choose differently while their log-probs differ at the same version."""
    mismatch, flips = engines_differ(case), case.now("router/flips")
    if mismatch is None or not flips.over(FLIPPED) or case.config.learner.router == "replay_rollout":
        return None
    changes = [{"learner.router": "replay_rollout"}, {"correction.preset": "decoupled_token_icepop"}]
    return Evidence("router/flips", flips.mean, FLIPPED, changes, error=mismatch.error)


def difference(lines: Sequence[Line], kl: Level, limit: float, exact: bool) -> tuple[str, float, float] | None:
    """Return name, value and limit of the first metric beyond its limit; None if engines agree."""
    k3 = fmean(values_of(lines, "k3_kl") or [0.0])
    if kl.over(limit) or (exact and k3 > limit):
        return "kl", max(kl.mean, k3), limit
    if k3 > KL_ROUNDING:  # below this KL all tokens are nearly certain, and rounding errors dominate the correlation
        pearson, ratio = values_of(lines, "probs_pearson"), values_of(lines, "ppl_ratio")
        if level(pearson).under(CORRELATION) or (len(pearson) == 1 and pearson[0] < CORRELATION):
            return "probs_pearson", fmean(pearson), CORRELATION
        if level([abs(each - 1) for each in ratio]).over(PERPLEXITY_GAP):
            return "ppl_ratio", fmean(ratio), 1 + PERPLEXITY_GAP
    largest = [gap for gap in values_of(lines, "probs_diff_max") if gap > PROBABILITY_GAP]
    if len(largest) >= 3 and len(largest) > len(lines) / 2:  # a mean would hide one bad expert
        return "probs_diff_max", max(largest), PROBABILITY_GAP
    return ("kl", kl.mean, KL_WARNING) if kl.over(KL_WARNING) else None


def aligned(config: Config, *, routed: bool) -> list[Change]:
    """Return changes that make the engines compute alike, then one that turns corrections off while debugging.

    If the experts of the engines may differ (`routed`), IcePop is proposed before the last change.
    """
    learner, sampler, other = config.learner, config.sampler, not in_float32(config)
    icepop: list[Change] = [{"correction.preset": "decoupled_token_icepop"}]
    return [
        *([{"learner.quantised": True}] if sampler.quantisation is not None and not learner.quantised else []),
        *([{"sampler.quantisation": None, "learner.quantised": False}] if sampler.quantisation is not None else []),
        *([{"sampler.on_publish": "rebuild"}] if sampler.on_publish == "reuse" else []),
        *([{"sampler.dtype": learner.compute_dtype or learner.dtype}] if other else []),
        *([{"sampler.dtype": "float16", "learner.compute_dtype": "float16"}] if sampler.dtype == "bfloat16" else []),
        *([{"sampler.dtype": "float32", "learner.dtype": "float32"}] if other else []),
        *(icepop if routed else []),
        *([{"correction.preset": "disabled"}] if config.correction.preset != "disabled" else []),
    ]


def agreement_unknown(case: Case) -> Evidence | None:
    if case.agreement or not case.drift.over(KL_LIMIT) or case.same_kl.error < 1:
        return None
    return Evidence("drift/k3_kl", case.drift.mean, KL_LIMIT, run=case.doctor)


# --- staleness --------------------------------------------------------------------------------------------------------


def stale(case: Case) -> Evidence | None:
    if not case.drift.over(KL_LIMIT):
        return None
    low_ess = compares(case.config) and case.now("drift/ess").under(LOW_ESS)
    changes = [*fresher(case.config), *corrected(case), slower(case.config)]
    error = worse(case) or (low_ess and not case.gained)
    return Evidence("drift/k3_kl", case.drift.mean, KL_LIMIT, changes, error=error)


def corrected(case: Case) -> list[Change]:
    """Return a correction for a policy loss that has none: token weights, and rejection for old or long responses."""
    if case.config.correction.preset != "disabled":
        return []
    hard = case.now("lag/mean").mean >= OLD_LAG or case.now("length/max").mean > LONG_RESPONSE
    return corrections(case, weighs=True, rejects=hard)


def worse(case: Case) -> bool:
    """Return True if the KL to the teachers rose and no reward rose, or if a reward fell and the KL did not fall.

    The KL does not count for teachers that follow the student, for a loss that goes beyond the teacher, or for a loss
    with a forward KL or JSD that falls.
    """
    config = case.config
    other = config.loss.kind in ("forward_kl", "jsd", "eopd") and case.learned_loss
    other |= "reference" in config.loss.spec.takes
    further = bool(risen(case)) and not case.moving_teacher and not other
    return (further and not case.rewarded) or (case.fall is not None and not case.kl_then.above(case.kl_now))


def wrong_direction(case: Case) -> Evidence | None:
    """Find a student that moves away from its teachers from the first updates on, by small steps."""
    if case.moving_teacher or case.config.supervised_updates or case.config.learner.lr > SMALL_LR:
        return None
    if case.gained or case.rewarded or case.config.data.order == "curriculum":  # its prompts become harder
        return None
    begin, before = case.lines[:3], teacher_kl(case.lines[:3])
    for then in (case.lines[6:9], case.lines[9:12]):
        after = teacher_kl(then)
        losses = [values_of(lines, "distill/loss") for lines in (begin, then)]
        rises = len(then) == 3 and all(losses) and fmean(losses[1]) > fmean(losses[0]) and after.above(before)
        if rises and after.mean >= (limit := 1.2 * before.mean):
            return Evidence("teacher/kl", after.mean, limit, [slower(case.config, 0.1)])
    return None


def wrong_weights(case: Case) -> Evidence | None:
    loss, lag = case.config.loss, case.now("lag/mean")
    if not loss.weight or not lag.mean >= 0.5 or not worse(case):
        return None
    if isinstance(loss, KLEstimate) and loss.use == "loss":
        return Evidence("lag/mean", lag.mean, 0.5, [{"loss.kind": "reverse_kl_mc"}])
    if not isinstance(loss, ReverseKLMC):
        return None
    if not loss.importance:
        return Evidence("lag/mean", lag.mean, 0.5, [{"loss.importance": True}])
    uncut: Change = {f"loss.{name}": None for name in ("ratio_cap", "clip") if getattr(loss, name) is not None}
    return case.above("distill/clip_fraction", CLIPPED_WEIGHTS, [uncut])


# --- variance ---------------------------------------------------------------------------------------------------------


def ess_of(case: Case) -> tuple[str, Level]:
    """Return name and level of the effective sample size: of the weights applied, or of the ratios.

    Decoupled weights leave staleness to the loss, so that the smaller one counts.
    """
    parts = case.config.correction.parts
    weighs = parts.is_level is not None and case.has("correction/ess")
    names = ["correction/ess"] if weighs else ["drift/ess"]
    if weighs and parts.mode == "decoupled" and case.has("drift/ess"):
        names.append("drift/ess")
    name = min(names, key=lambda each: case.now(each).mean)
    return name, case.now(name)


def discarded(case: Case) -> tuple[str, Level]:
    """Return the share of tokens without effect, rejected or outside of IcePop's band, and the largest metric in it."""
    parts, names = case.config.correction.parts, list[str]()
    if parts.rs:
        names.append("correction/rollout_rs_masked_fraction")
    if parts.is_level is not None and isinstance(parts.is_threshold, tuple):
        names += [f"correction/rollout_is_ratio_fraction_{side}" for side in ("high", "low")]
    shares = [sum(line.get(name, 0.0) for name in names) for line in case.late if any(name in line for name in names)]
    return max(names, key=lambda name: case.now(name).mean, default=""), level(shares)


def blown_up(case: Case) -> Evidence | None:
    if not compares(case.config):
        return None
    chi2 = case.now("drift/chi2_token")
    name, ess = ess_of(case)
    noise, before = case.now("gradient/noise"), case.then("gradient/noise")
    louder = case.has("correction/rollout_is_mean") and noise.over(2 * before.mean) and noise.above(before)
    if ess.under(LOW_ESS):
        seen = name, ess.mean, LOW_ESS
    elif chi2.over(BLOWN_UP):
        seen = "drift/chi2_token", chi2.mean, BLOWN_UP
    elif louder:
        seen = "gradient/noise", noise.mean, 2 * before.mean
    else:
        return None
    return Evidence(*seen, escalated(case, chi2.mean), error=louder or not case.gained)


def escalated(case: Case, chi2: float) -> list[Change]:
    """Return changes by severity: rejection, rejection and importance weights, or less staleness as last resort."""
    config, masked = case.config, discarded(case)[1].mean
    rejects = bool(config.correction.parts.rs)
    if chi2 > HOPELESS or masked > TOO_MANY or (rejects and ess_of(case)[1].mean < LOWEST_ESS):
        return [*fresher(config), slower(config)]
    policy = policy_of(config)
    if policy is None:
        return [{"loss.kind": "m2po"}, *fresher(config), slower(config)]
    if rejects and policy.loss not in ("reinforce", "gpg"):
        return [*fresher(config), slower(config)]
    if chi2 >= WEIGHED or masked > MASKED:
        return [*corrections(case, weighs=True, rejects=True), *fresher(config)]
    if not rejects:
        return [*corrections(case, rejects=True), *fresher(config)]
    return [{"correction.preset": "bypass_pg_token_icepop"}, *fresher(config)]


def moderate(case: Case) -> Evidence | None:
    if not compares(case.config) or case.config.correction.parts.rs:
        return None
    policy = policy_of(case.config)
    exact: list[Change] = [{"loss.kind": "m2po"}] if policy is None else corrections(case, rejects=True)
    return case.above("drift/chi2_token", MODERATE, [*exact, *fresher(case.config)])


def rejects_too_much(case: Case) -> Evidence | None:
    given, (name, share) = case.config.correction, discarded(case)
    if not share.over(TOO_MANY):
        return None
    narrow = given.rs is None and "seq_mean_k1" in (PRESETS[given.preset].rs or {})
    wider = [rejection(case, compared_by(case))] if narrow else []
    return Evidence(name, share.mean, TOO_MANY, [*wider, *fresher(case.config)])


def by_sequence(case: Case) -> Evidence | None:
    preset, given = PRESETS[case.config.correction.preset], case.config.correction
    ess = case.now("correction/ess")
    by_token: list[Change] = [{"correction.is_level": "token"}]
    if (given.is_level or preset.is_level) == "sequence":
        if ess.under(LOW_ESS):
            return Evidence("correction/ess", ess.mean, LOW_ESS, by_token)
        if seen := case.above(f"{compared_by(case)}/chi2_seq", EXPLODED, by_token):
            return seen
    summed = any(mode.startswith("seq_sum") for mode in given.rs or preset.rs or {})
    if not summed or not case.now("length/max").over(LONG_RESPONSE):
        return None
    return case.above("correction/rollout_rs_seq_masked_fraction", MASKED, [rejection(case, compared_by(case))])


def tails(case: Case) -> Evidence | None:
    if not case.config.loss.weight or case.gained:
        return None
    return case.above(
        "distill/ratio_max", LARGE_RATIO, [{"loss.advantage": "current", "loss.clip": None}, {"loss.kind": "m2po"}]
    )


# --- clipping ---------------------------------------------------------------------------------------------------------


def clipped(case: Case) -> Evidence | None:
    changes: list[Change] = [{"learner.epochs": 1}] if case.config.learner.epochs > 1 else []
    if (policy := case.config.policy) is not None and case.now("policy/clip_fraction").over(SATURATED):
        # the objective's own unit is the response: its ratio is far nearer to 1, and so are its clips (2507.18071)
        whole = {"policy.loss": "gspo", "policy.options": {"clip_low": 3e-4, "clip_high": 4e-4}}
        geometric = policy.loss in ("gspo", "gspo_token", "gmpo")
        changes.append(plain_gradient(case, "bypass_pg_geo_rs_token_tis") if geometric else whole)
    for name in ("policy/clip_fraction", "distill/clip_fraction"):
        rising = case.now(name).above(case.then(name))
        evidence = case.above(name, CLIPPED, [*changes, slower(case.config)], error=rising or worse(case))
        if evidence is not None:
            return evidence
    return None


WIDEST_CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def widened(case: Case) -> Evidence | None:
    given = case.config.policy.options if case.config.policy is not None else {}
    for name, widest in WIDEST_CLIP.items():
        if given.get(name, widest) > widest:
            options = {key: value for key, value in given.items() if key != name}
            return case.above("policy/clip_fraction", CLIPPED, [{"policy.options": options}])
    return None
