"""Rules between policy loss, advantage, correction, snapshots and truncated sampling: no ratio counts twice."""

from collections.abc import Mapping, Sequence
from math import isclose

from slipstream.config.objective import PolicyConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.sections import Clashes, Sections
from slipstream.estimators.options import unknown
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.correction import DISTILLATION_RATIOS, ONE_PER_ROW, check_combination
from slipstream.estimators.tables.policy import POLICY_LOSSES

ABOVE = {"dual_clip": 1.0} | dict.fromkeys(
    ("beta", "dppo_truncation", "espo_share", "radius", "tau_neg", "tau_pos", "weight_cap"), 0.0
)
"""Numbers at which an option of a policy loss or advantage would divide by 0, or leave no gradient."""
SHARES = ("cov_fraction", "espo_share", "gamma", "lam")
COVARIANCES = {"cov_low": 1.0, "cov_high": 5.0}
"""Bounds of a covariance, which may be below 0, with their defaults."""


def correction(c: Sections) -> Clashes:
    section, preset = c.correction, c.correction.parts
    if section.is_threshold is not None and preset.is_level is None:
        yield (
            f"correction.is_threshold does nothing: preset {section.preset} has no importance weights; write "
            'correction.is_level = "token", say, or drop it'
        )
    if section.ctpo_clip is not None and preset.is_level != "cumulative":
        yield 'correction.ctpo_clip does nothing: it is for correction.is_level = "cumulative"'
    bands = [bound for mode, bound in (preset.rs or {}).items() if mode.endswith("k1") and isinstance(bound, tuple)]
    if section.verl_compat and all(isclose(low * high, 1.0, rel_tol=1e-12) for low, high in bands):
        yield "correction.verl_compat does nothing: it inverts bounds (L, U) of k1 rejection that are not (1/U, U)"
    name = f"correction.preset = {section.preset!r}"
    if section.is_level is not None:
        name += f" with is_level = {section.is_level!r}"
    if c.policy is None and preset.is_level is not None:
        yield (
            f"{name} weighs a policy loss, and there is none: choose a preset that only rejects (…_rs), or add [policy]"
        )
    if c.policy is None and preset.rejects("negative_seq"):
        yield (
            "correction.rs.negative_seq rejects answers whose advantage is negative, and without [policy] there is "
            "none: drop it, or add [policy]"
        )
    if c.learner.snapshots == 0 and preset.rejects("seq_max_kl"):
        yield (
            "correction.rs.seq_max_kl compares with the weights that drew a token, and learner.snapshots = 0 keeps "
            "none: drop learner.snapshots, and as many are kept as needed"
        )
    try:
        if c.policy is not None:
            check_combination(c.policy.loss, preset, ratio=POLICY_LOSSES[c.policy.loss].ratio)
        elif preset.mode is not None:
            check_combination(c.loss.kind, preset, ratio=DISTILLATION_RATIOS.get(c.loss.kind, "none"))
    except ValueError as error:
        yield f"{name}: {error}"


def policy(c: Sections) -> Clashes:
    if (policy := c.policy) is None:
        return
    loss, advantage = POLICY_LOSSES[policy.loss], ADVANTAGES[policy.advantage]
    yield from options(f"policy.options of {policy.loss}", policy.options, loss.settings)
    yield from options(f"policy.advantage_options of {policy.advantage}", policy.advantage_options, advantage.settings)
    yield from old_policy(c, policy)
    if c.learner.perturbation is not None and c.has_agents and loss.scope == "row":
        yield (
            f"[learner.perturbation] adds no noise to ratios of episodes with several branches, and policy.loss = "
            f'{policy.loss!r} has such ratios with [environment.gateway]: write policy.loss = "vanilla", or drop it'
        )
    if "norm_by_weights" in advantage.columns.values():
        yield from gradient_of_answers(c, f"policy.advantage = {policy.advantage!r}")
    by_turn = advantage.by_token and "environment" in c.task.names  # turns may differ where sums are alike
    for name in policy.filters if by_turn or not advantage.compares else ():
        yield (
            f"policy.{name} drops groups whose rewards are alike, and policy.advantage = {policy.advantage!r} learns "
            f'from these, too: write advantage = "grpo", or drop policy.{name}'
        )
    if c.sampler.group == 1 and advantage.compares:
        yield (
            f"policy.advantage = {policy.advantage!r} compares the answers to one prompt, and sampler.group = 1: "
            'write group = 8, say, or advantage = "reinforce_plus_plus"'
        )


def options(where: str, given: Mapping[str, float], known: Sequence[str]) -> Clashes:
    for name, value in given.items():
        if not known:
            yield f"{where}: it has none"
        elif name not in known:
            yield str(unknown(where, name, known))
        least = ABOVE.get(name)
        if value < 0 and name not in COVARIANCES if least is None else value <= least:
            yield f"{where}: {name} = {value:g} must be {'at least 0' if least is None else f'above {least:g}'}"
        if value > 1 and name in SHARES:
            yield f"{where}: {name} = {value:g} must be at most 1"
    low, high = ((COVARIANCES | dict(given))[name] for name in COVARIANCES)
    if "cov_low" in known and low >= high:
        yield f"{where}: no covariance is between cov_low = {low:g} and cov_high = {high:g}: raise cov_high"


def old_policy(c: Sections, policy: PolicyConfig) -> Clashes:
    mode, setting = c.correction.parts.mode, f'policy.old = "{policy.old}"'
    if policy.keeps_old:
        if mode is not None and not (mode == "decoupled" and policy.old == "average"):
            yield f"{setting} and correction.preset name two old policies: drop one"
        if POLICY_LOSSES[policy.loss].ratio not in ("old", "penalty"):
            yield f"{setting} does nothing: {policy.loss} has no ratio to an old policy"
    if policy.loss == "oapl" and (policy.keeps_old or mode == "decoupled"):
        key = "policy.old" if policy.keeps_old else "correction.preset"
        value = policy.old if policy.keeps_old else c.correction.preset
        yield (
            f'policy.loss = "oapl" regresses the ratio to the policy that drew a row, and {key} = "{value}" compares '
            f"with another one: drop {key}"
        )


def gradient_of_answers(c: Sections, given: str) -> Clashes:
    """Yield what prevents the gradient of every single answer, which an advantage needs."""
    preset = c.correction.parts
    if c.learner.ranks > 1:
        yield (
            f"{given} needs the gradient of each answer, and learner.ranks = {c.learner.ranks} sums those of "
            'all ranks: write advantage = "opob", or learner.ranks = 1'
        )
    if preset.is_level is not None and preset.is_level not in ONE_PER_ROW:
        yield (
            f"{given} weighs answers, and correction.is_level = {preset.is_level!r} has a weight for each token: write "
            'is_level = "sequence", or advantage = "opob"'
        )
    if mode := next((mode for mode in preset.rs or () if mode.startswith("token")), None):
        yield (
            f"{given} needs the gradient of whole answers, and correction.rs.{mode} rejects single tokens: write "
            f'"{mode.replace("token", "seq_mean")}", or advantage = "opob"'
        )


def truncation(c: Sections) -> Clashes:
    """Yield a ratio that compares the truncated sampling distribution with a whole distribution."""
    sampler, cut = c.sampler, c.sampler.truncation
    if not cut:
        return
    settings = " and ".join(f"sampler.{name} = {getattr(sampler, name)}" for name in cut)
    leaves = f"{settings} {'leaves' if len(cut) == 1 else 'leave'} out tokens of the sampling distribution"
    drop = ", ".join(f"{name} = {SamplerConfig.model_fields[name].default:g}" for name in cut)
    if c.loss.weight and c.loss.spec.cache == "student_topk":
        yield (
            f'{leaves}, and loss.kind = "{c.loss.kind}" compares the {c.loss.spec.k} best of it, which may '
            f'be left out: write {drop}, or loss.kind = "reverse_kl_mc" with keep_mask = true'
        )
    if c.loss.weight and c.loss.spec.merges:
        yield (
            f'{leaves}, and loss.kind = "{c.loss.kind}" multiplies its probabilities by those of whole distributions: '
            f'write {drop}, or loss.kind = "gold"'
        )
    elif not sampler.keep_mask and (comparison := first_ratio_to_sampler(c)) is not None:
        holder, instead = comparison
        yield (
            f"{leaves}, and {holder} the ratio of a whole distribution to it, which is below 1 before anything is "
            f"learned: write keep_mask = true, which records the sampling support, or {drop}, or {instead}"
        )


def first_ratio_to_sampler(c: Sections) -> tuple[str, str] | None:
    """Return the first part that compares with the sampling policy, and a setting to write instead; or None."""
    loss, policy, reference, preset = c.loss, c.policy, c.reference, c.correction.parts
    if loss.weight and loss.spec.compares:
        other = "common_topk" if any(teacher.spelling == "own" for teacher in c.teachers.values()) else "forward_kl"
        without = (
            "loss.importance = false, or another loss.kind"
            if "importance" in type(loss).model_fields
            else f'loss.kind = "{other}"'
        )
        return f'loss.kind = "{loss.kind}" weighs draws by', without
    if preset.is_level is not None or set(preset.rs or ()) - {"seq_max_kl"}:
        return f'correction.preset = "{c.correction.preset}" looks at', 'correction.preset = "disabled"'
    old_is_behavior = preset.mode != "decoupled" and (policy is None or not policy.keeps_old)
    if policy is not None and old_is_behavior and POLICY_LOSSES[policy.loss].ratio != "none":
        return f'policy.loss = "{policy.loss}" holds', 'policy.loss = "reinforce"'
    if policy is not None and policy.advantage == "gae":
        for name in ("rho", "c"):
            if policy.advantage_options.get(name):
                return f"policy.advantage_options.{name} of gae bounds", f"{name} = 0"
    if (fresh := c.freshness) is not None and (fresh.anchor or fresh.drift != "snapshots"):
        return "[freshness] estimates the KL by", 'freshness.drift = "snapshots" with anchor = 0'
    if reference is not None and reference.into == "loss" and reference.importance:
        return 'reference.into = "loss" weighs its KL by', "reference.importance = false"
    if reference is not None and reference.into == "reward" and old_is_behavior:
        return 'reference.into = "reward" penalises', "drop [reference]"
    return None


def snapshots(c: Sections) -> Clashes:
    """Yield settings of [learner] that need stored weights of earlier versions, or store them for nothing."""
    learner, keeps_old = c.learner, c.policy is not None and c.policy.keeps_old
    several = learner.minibatches * learner.epochs > 1 or learner.exact_drift
    if learner.router == "replay_old" and not (several or keeps_old or reads_snapshots(c)):
        yield (
            'learner.router = "replay_old" does nothing: the only pass of an update makes the same choices itself; '
            'write learner.epochs = 2, say, policy.old = "previous", or "replay_rollout"'
        )
    if learner.router_aux is not None and c.freshness is not None:
        yield "learner.router_aux has no freshness weights: drop it, or [freshness]"
    if learner.snapshots and not (learner.exact_drift or reads_snapshots(c)):
        yield (
            "learner.snapshots does nothing: neither a decoupled correction, seq_max_kl, exact_drift nor "
            'freshness.drift = "snapshots" reads them'
        )


def reads_snapshots(c: Sections) -> bool:
    """Return whether any part of the method needs stored weights of the versions that drew the tokens."""
    policy, preset, fresh = c.policy, c.correction.parts, c.freshness
    decoupled = preset.mode == "decoupled" and (preset.corrects if policy is None else not policy.keeps_old)
    return decoupled or preset.rejects("seq_max_kl") or (fresh is not None and fresh.drift == "snapshots")
