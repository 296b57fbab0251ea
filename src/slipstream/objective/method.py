"""Objective of an update. Checks reject parts without effect, and ratios that would count twice (invariant 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from typing import NamedTuple

from slipstream.config.freshness import FreshnessConfig
from slipstream.config.losses import DistillationLoss
from slipstream.config.objective import PolicyConfig, ReferenceConfig
from slipstream.config.schema import Config, SamplerConfig
from slipstream.errors import ConfigError
from slipstream.estimators.control import adaptive_beta, ascended
from slipstream.estimators.options import unknown
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.correction import (
    ONE_PER_ROW,
    PRESETS,
    RATIO_TO_BEHAVIOR,
    RATIO_TO_OLD,
    CorrectionPreset,
    check_combination,
)
from slipstream.estimators.tables.policy import LOSSES, VARIANCE_COEF, scope_of
from slipstream.scope import Scope

TENSOR_OPTIONS = ("entropy", "generator", "lag", "positive", "proximal_logp", "spread", "turns")
"""Options of policy losses that the program computes and a config cannot set."""
DIVISORS = ("beta", "espo_share", "radius", "tau_neg", "tau_pos")
"""Options of policy losses and advantages that must be above 0."""
SIGNED = ("cov_low", "cov_high")
"""Options that may be below 0: bounds of a covariance. All others must be at least 0."""


class Coefficients(NamedTuple):
    """Coefficients of parts of the loss that may change between updates."""

    beta: float = 0.0
    """Coefficient of the KL to the reference."""
    variance: float = 0.0
    """Coefficient of the ratio's variance in the policy loss r2vpo."""


MEASURED = {"beta": "reference/kl", "variance": "policy/ratio_variance"}
"""Metric that each coefficient of `Coefficients` follows, if it changes."""
REPORTED = {"beta": "reference/beta", "variance": "policy/variance_coef"}
"""Metric that shows its value, if it changes."""


@dataclass(frozen=True, kw_only=True)
class Method:
    loss: DistillationLoss
    policy: PolicyConfig | None = None
    correction: CorrectionPreset = PRESETS["disabled"]
    reference: ReferenceConfig | None = None
    freshness: FreshnessConfig | None = None
    teachers: Mapping[str, float] = field(default_factory=dict)
    """Weights of teachers by name. A missing teacher has weight 1."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Weights of the rewards in the policy loss, by name."""
    temperature: float = 1.0
    """Sampling temperature, also used for policy losses, corrections and drift."""
    max_tokens: int = 1
    """Largest number of tokens of a response: the scale of seq-mean-token-sum-norm."""
    seed: int = 0

    @property
    def decoupled(self) -> bool:
        """Return whether the correction compares the sampler with the old policy, instead of the current one."""
        return self.correction.mode == "decoupled"

    @property
    def by_version(self) -> bool:
        """Return whether the old policy is computed with the stored weights that drew each token."""
        return self.decoupled and not self.keeps_old

    @property
    def keeps_old(self) -> bool:
        """Return whether the old policy is the learner before its last update, or an average of earlier weights."""
        return self.policy is not None and self.policy.old != "behavior"

    @property
    def old_decay(self) -> float:
        """Return the share of itself that the old policy keeps in every update."""
        return self.policy.old_decay if self.policy is not None and self.policy.old == "average" else 0.0

    def rejects(self, mode: str) -> bool:
        return mode in (self.correction.rs or {})

    @property
    def reads_snapshots(self) -> bool:
        """Return whether any part needs stored weights of the versions that drew the tokens."""
        return self.by_version or self.rejects("seq_max_kl") or self.replays

    @property
    def replays(self) -> bool:
        """Return whether the student's drift is computed with stored weights of the version that drew a sample."""
        return self.freshness is not None and self.freshness.drift == "snapshots"

    @property
    def anchored(self) -> bool:
        """Return whether the KL to the sampling policy is in the loss."""
        return self.freshness is not None and self.freshness.anchor > 0

    @property
    def weighs_policy(self) -> bool:
        return self.freshness is not None and "policy" in self.freshness.also

    @property
    def weighs_all(self) -> bool:
        """Return whether the weights' divisor may divide the gradient: all parts are weighted, or the divisor is 1."""
        fresh, reference = self.freshness, self.reference
        others = (self.policy is not None and not self.weighs_policy) or (reference and reference.into == "loss")
        undivided = fresh is None or fresh.weight == "equal" or (fresh.normalise == "off" and fresh.weight != "common")
        return undivided or not others

    @property
    def by_row(self) -> bool:
        """Return whether the policy loss needs whole rows."""
        if (policy := self.policy) is None:
            return False
        over_rows = (policy.aggregation or LOSSES[policy.loss].agg) == "seq-mean-token-mean"
        return over_rows or scope_of(policy.loss, policy.aggregation) == "row"

    @property
    def by_episode(self) -> bool:
        """Return whether the policy loss has ratios of whole sequences (episodes with all their branches)."""
        return self.policy is not None and LOSSES[self.policy.loss].scope == "row"

    @property
    def looks_first(self) -> bool:
        """Return whether decisions about the whole batch are needed before its first gradient."""
        others = self.policy is not None or self.correction.corrects or self.reference is not None
        return others or self.draws_first or self.extrapolates

    @property
    def extrapolates(self) -> bool:
        """Return whether the distillation loss compares the teacher with the reference, the student at the start."""
        return self.loss.weight > 0 and "reference" in self.loss.spec.takes

    @property
    def keeps_reference(self) -> bool:
        return self.reference is not None or self.extrapolates

    @property
    def hosts_reference(self) -> bool:
        """Return whether the weights of the reference are in host memory between uses."""
        return self.reference is not None and self.reference.host

    @property
    def chooses(self) -> bool:
        """Return whether the policy loss has batch scope: it first selects tokens from the whole batch."""
        return self.policy is not None and LOSSES[self.policy.loss].scope == "batch"

    @property
    def current_first(self) -> bool:
        """Return whether the learner's log-probs of the tokens are needed before its first step."""
        in_bypass = self.correction.corrects and not self.decoupled
        return self.chooses or self.proximal or in_bypass or self.rejects("negative_seq") or self.weighs_energy

    @property
    def weighs_energy(self) -> bool:
        return self.policy is not None and ADVANTAGES[self.policy.advantage].weighs_energy

    @property
    def exact_norms(self) -> bool:
        """Return whether the baseline needs the norm of each answer's gradient with respect to the weights."""
        return self.policy is not None and ADVANTAGES[self.policy.advantage].exact

    @property
    def draws_first(self) -> bool:
        """Return whether the learner's log-probs of all draws are needed before its first step."""
        return self.loss.weight > 0 and bool({"proximal", "keep"} & set(self.loss.spec.takes))

    @property
    def proximal(self) -> bool:
        return self.policy is not None and "proximal_logp" in LOSSES[self.policy.loss].takes

    @property
    def drops_alike(self) -> bool:
        return self.policy is not None and self.policy.drop_alike

    @property
    def by_lag(self) -> bool:
        return self.policy is not None and "lag" in LOSSES[self.policy.loss].takes

    @property
    def by_turn(self) -> bool:
        """Return whether the policy loss needs the number of each token's turn."""
        return self.policy is not None and "turns" in LOSSES[self.policy.loss].takes

    @property
    def by_entropy(self) -> bool:
        """Return whether the policy loss needs the entropy of the learner's distribution before the first step."""
        return self.policy is not None and "entropy" in LOSSES[self.policy.loss].takes

    @property
    def by_spread(self) -> bool:
        """Return whether the policy loss needs the root mean square of the advantages of a prompt's tokens."""
        return self.policy is not None and "spread" in LOSSES[self.policy.loss].takes

    @property
    def coefficients(self) -> Coefficients:
        """Return the coefficients of the first update."""
        beta = self.reference.weight if self.reference is not None else 0.0
        if self.policy is None or "variance" not in self.adaptive:
            return Coefficients(beta)
        return Coefficients(beta, self.policy.options.get("variance_coef", VARIANCE_COEF))

    @property
    def adaptive(self) -> dict[str, str]:
        """Return the setting that makes a coefficient change between updates, by the coefficient's name."""
        found = {}
        if self.reference is not None and self.reference.control == "adaptive":
            found["beta"] = "reference.control"
        if self.policy is not None and self.policy.variance_target is not None:
            found["variance"] = "policy.variance_target"
        return found

    def coefficients_after(self, now: Coefficients, *, measured: Mapping[str, float], samples: int) -> Coefficients:
        """Return the coefficients of the next update, after one with these metrics and this number of samples."""
        policy, reference = self.policy, self.reference
        beta, variance = now
        kl, ratio_variance = measured.get(MEASURED["beta"]), measured.get(MEASURED["variance"])
        if kl is not None and reference is not None and reference.target is not None and reference.horizon is not None:
            beta = adaptive_beta(beta=beta, kl=kl, samples=samples, target=reference.target, horizon=reference.horizon)
        if ratio_variance is not None and policy is not None and (bound := policy.variance_target) is not None:
            variance = ascended(coefficient=variance, value=ratio_variance, bound=bound, step=policy.variance_step)
        return Coefficients(beta, variance)

    @property
    def scopes(self) -> dict[str, Scope]:
        """Return the scope (tokens that a token's loss depends on) of each part, by its name in the config."""
        found: dict[str, Scope] = {"correction": self.correction.scope}
        if self.loss.weight:
            found[f"loss.kind = {self.loss.kind}"] = self.loss.scope
        if self.policy is not None:
            found[f"policy.loss = {self.policy.loss}"] = scope_of(self.policy.loss, self.policy.aggregation)
            batch = ADVANTAGES[self.policy.advantage].scope == "batch"
            found[f"policy.advantage = {self.policy.advantage}"] = "batch" if batch else "row"
        return found

    @property
    def over_samples(self) -> bool:
        """Return whether distillation and anchor are divided by the number of sequences."""
        return self.freshness is not None and self.freshness.over == "samples"

    @property
    def over_sequences(self) -> bool:
        """Return whether the policy loss is divided by sequences, not tokens; without policy loss `over_samples`."""
        if (policy := self.policy) is None:
            return self.over_samples
        return (policy.aggregation or LOSSES[policy.loss].agg).startswith("seq")

    def __str__(self) -> str:
        scaled = f" of {self.loss.spec.options['reward_scale']:g} · teacher/start" if self.extrapolates else ""
        parts = [f"{self.loss.weight:g} · {self.loss.kind}{scaled}"] if self.loss.weight else []
        if self.policy is not None:
            weights = {name: "" if weight == 1.0 else f"{weight:g} · " for name, weight in self.rewards.items()}
            rewards = " + ".join(f"{weight}{name}" for name, weight in weights.items())
            bound = f", variance up to {self.policy.variance_target:g}," if "variance" in self.adaptive else ""
            parts.append(f"{self.policy.weight:g} · {self.policy.loss}{bound} on {self.policy.advantage} of {rewards}")
        if self.reference is not None:
            steered = f", steered to {self.reference.target:g}" if "beta" in self.adaptive else ""
            parts.append(f"{self.reference.weight:g} · KL to the reference in the {self.reference.into}{steered}")
        if (fresh := self.freshness) is not None:
            if self.loss.weight:
                factors = {"freshness": "freshness · ", "lag": "1/(lag + 1) · ", "common": "mean freshness · "}
                parts[0] = f"{factors.get(fresh.weight, '')}{parts[0]}"
            if fresh.anchor:
                parts.append(f"{fresh.anchor:g} · KL to what drew")
        preset = next((name for name, preset in PRESETS.items() if preset == self.correction), "of your own")
        return f"loss: {' + '.join(parts)}; correction: {preset}"


def method_of(config: Config) -> Method:
    policy, preset = config.policy, _correction(config)
    _check_correction(config, preset)
    method = Method(
        loss=config.loss,
        policy=policy,
        correction=preset,
        reference=config.reference,
        freshness=config.freshness,
        teachers={name: teacher.weight for name, teacher in config.teachers.items()},
        rewards={name: policy.reward_weights.get(name, 1.0) for name in config.task.names} if policy else {},
        temperature=config.sampler.temperature,
        max_tokens=config.sampler.max_tokens,
        seed=config.seed,
    )
    if policy is not None:
        _check_policy(config, policy, method)
    _check_truncation(config, method)
    _check_router(config, method)
    if config.learner.snapshots and not (config.learner.exact_drift or method.reads_snapshots):
        raise ConfigError(
            "learner.snapshots does nothing: neither a decoupled correction, seq_max_kl, exact_drift nor "
            'freshness.drift = "snapshots" reads them'
        )
    return method


def _check_router(config: Config, method: Method) -> None:
    """Raise an error for a replay without effect, and for an auxiliary loss that would be divided twice."""
    learner = config.learner
    several = learner.minibatches * learner.epochs > 1 or learner.exact_drift
    if learner.router == "replay_old" and not (several or method.keeps_old or method.reads_snapshots):
        raise ConfigError(
            'learner.router = "replay_old" does nothing: the only pass of an update makes the same choices itself; '
            'write learner.epochs = 2, say, policy.old = "previous", or "replay_rollout"'
        )
    if learner.router_aux is None:
        return
    if config.freshness is not None:
        raise ConfigError("learner.router_aux has no freshness weights: drop it, or [freshness]")


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """Objective and learning rate of the supervised updates at the start of a run."""

    method: Method
    updates: int
    lr: float
    """Peak learning rate, after `warmup` updates."""
    warmup: int


def supervised_of(config: Config) -> Supervised | None:
    """Return the plan of the supervised updates: one loss, without policy loss, correction or freshness weights."""
    if (sft := config.sft) is None:
        return None
    loss, lr = sft.loss, config.learner.lr if sft.lr is None else sft.lr
    method = Method(
        loss=loss,
        teachers={name: teacher.weight for name, teacher in config.teachers.items() if loss.spec.cache != "none"},
        temperature=config.sampler.temperature,
        max_tokens=config.sampler.max_tokens,
        seed=config.seed,
    )
    return Supervised(method=method, updates=sft.updates, lr=lr, warmup=sft.warmup)


def _correction(config: Config) -> CorrectionPreset:
    given = config.correction
    preset = PRESETS[given.preset]
    names = ("is_level", "is_threshold", "ctpo_clip", "rs")
    changes = {name: value for name in names if (value := getattr(given, name)) is not None}
    try:
        found = replace(preset, is_normalize=given.is_normalize, verl_compat=given.verl_compat, **changes)
    except ValueError as error:
        raise ConfigError(f"correction: {error}") from None
    if given.is_threshold is not None and found.is_level is None:
        raise ConfigError(
            f"correction.is_threshold does nothing: preset {given.preset} has no importance weights; write "
            'correction.is_level = "token", say, or drop it'
        )
    if given.ctpo_clip is not None and found.is_level != "cumulative":
        raise ConfigError('correction.ctpo_clip does nothing: it is for correction.is_level = "cumulative"')
    bands = [bound for mode, bound in (found.rs or {}).items() if mode.endswith("k1") and isinstance(bound, tuple)]
    if given.verl_compat and all(isclose(low * high, 1.0, rel_tol=1e-12) for low, high in bands):
        raise ConfigError(
            "correction.verl_compat does nothing: it inverts bounds (L, U) of k1 rejection that are not (1/U, U)"
        )
    return found


def _check_correction(config: Config, preset: CorrectionPreset) -> None:
    given = config.correction
    name = f"correction.preset = {given.preset!r}"
    if given.is_level is not None:
        name += f" with is_level = {given.is_level!r}"
    if config.policy is None and preset.is_level is not None:
        raise ConfigError(
            f"{name} weighs a policy loss, and there is none: choose a preset that only rejects (…_rs), or add [policy]"
        )
    if config.policy is None and "negative_seq" in (preset.rs or {}):
        raise ConfigError(
            "correction.rs.negative_seq rejects answers whose advantage is negative, and without [policy] there is "
            "none: drop it, or add [policy]"
        )
    if config.learner.snapshots == 0 and "seq_max_kl" in (preset.rs or {}):
        raise ConfigError(
            "correction.rs.seq_max_kl compares with the weights that drew a token, and learner.snapshots = 0 keeps "
            "none: drop learner.snapshots, and as many are kept as needed"
        )
    try:
        if config.policy is not None:
            check_combination(config.policy.loss, preset, policy=True)
        elif preset.mode is not None:
            check_combination(config.loss.kind, preset)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _check_policy(config: Config, policy: PolicyConfig, method: Method) -> None:
    advantage = ADVANTAGES[policy.advantage]
    known = [name for name in LOSSES[policy.loss].takes if name not in TENSOR_OPTIONS]
    _check_options(f"policy.options of {policy.loss}", policy.options, known)
    _check_options(f"policy.advantage_options of {policy.advantage}", policy.advantage_options, advantage.settings)
    if method.keeps_old:
        named = f'policy.old = "{policy.old}"'
        if method.correction.mode is not None and not (method.decoupled and policy.old == "average"):
            raise ConfigError(f"{named} and correction.preset name two old policies: drop one")
        if policy.loss not in RATIO_TO_OLD | {"m2po", "dro"}:
            raise ConfigError(f"{named} does nothing: {policy.loss} has no ratio to an old policy")
    if policy.loss == "oapl" and (method.keeps_old or method.decoupled):
        key = "policy.old" if method.keeps_old else "correction.preset"
        value = policy.old if method.keeps_old else config.correction.preset
        raise ConfigError(
            f'policy.loss = "oapl" regresses the ratio to the policy that drew a row, and {key} = "{value}" compares '
            f"with another one: drop {key}"
        )
    if config.learner.perturbation is not None and config.has_agents and method.by_episode:
        raise ConfigError(
            f"[learner.perturbation] adds no noise to ratios of episodes with several branches, and policy.loss = "
            f'{policy.loss!r} has such ratios with [environment.gateway]: write policy.loss = "vanilla", or drop it'
        )
    if method.exact_norms:
        given, level = f"policy.advantage = {policy.advantage!r}", method.correction.is_level
        if config.learner.ranks > 1:
            raise ConfigError(
                f"{given} needs the gradient of each answer, and learner.ranks = {config.learner.ranks} sums those of "
                'all ranks: write advantage = "opob", or learner.ranks = 1'
            )
        if level is not None and level not in ONE_PER_ROW:
            raise ConfigError(
                f"{given} weighs answers, and correction.is_level = {level!r} has a weight for each token: write "
                'is_level = "sequence", or advantage = "opob"'
            )
        if mode := next((mode for mode in method.correction.rs or () if mode.startswith("token")), None):
            raise ConfigError(
                f"{given} needs the gradient of whole answers, and correction.rs.{mode} rejects single tokens: write "
                f'"{mode.replace("token", "seq_mean")}", or advantage = "opob"'
            )
    for name in policy.filters if not advantage.compares else ():
        raise ConfigError(
            f"policy.{name} drops groups whose rewards are alike, and policy.advantage = {policy.advantage!r} learns "
            f'from these, too: write advantage = "grpo", or drop policy.{name}'
        )
    if config.sampler.group == 1 and advantage.compares:
        raise ConfigError(
            f"policy.advantage = {policy.advantage!r} compares the answers to one prompt, and sampler.group = 1: "
            'write group = 8, say, or advantage = "reinforce_plus_plus"'
        )


def _check_options(where: str, given: Mapping[str, float], known: Sequence[str]) -> None:
    for name, value in given.items():
        if name not in known:
            raise ConfigError(str(unknown(where, name, known)) if known else f"{where}: it has none")
        if (value < 0 and name not in SIGNED) or (value == 0 and name in DIVISORS):
            least = "above 0" if name in DIVISORS else "at least 0"
            raise ConfigError(f"{where}: {name} = {value:g} must be {least}")


def _check_truncation(config: Config, method: Method) -> None:
    """Raise an error if a ratio compares the truncated sampling distribution with a whole distribution."""
    sampler, cut = config.sampler, config.sampler.truncation
    if not cut:
        return
    named = " and ".join(f"sampler.{name} = {getattr(sampler, name)}" for name in cut)
    leaves = f"{named} {'leaves' if len(cut) == 1 else 'leave'} out tokens of the sampling distribution"
    drop = ", ".join(f"{name} = {SamplerConfig.model_fields[name].default:g}" for name in cut)
    if config.loss.weight and config.loss.spec.cache == "student_topk":
        raise ConfigError(
            f'{leaves}, and loss.kind = "{config.loss.kind}" compares the {config.loss.spec.k} best of it, which may '
            f'be left out: write {drop}, or loss.kind = "reverse_kl_mc" with keep_mask = true'
        )
    if sampler.keep_mask or (comparison := _first_ratio_to_sampler(config, method)) is None:
        return
    holder, instead = comparison
    raise ConfigError(
        f"{leaves}, and {holder} the ratio of a whole distribution to it, which is below 1 before anything is learned: "
        f"write keep_mask = true, which records the sampling support, or {drop}, or {instead}"
    )


def _first_ratio_to_sampler(config: Config, method: Method) -> tuple[str, str] | None:
    """Return the first part that compares with the sampling policy, and a setting to write instead; or None."""
    loss, policy, reference = config.loss, method.policy, method.reference
    if loss.weight and loss.spec.compares:
        without = (
            "loss.importance = false, or another loss.kind"
            if "importance" in type(loss).model_fields
            else 'loss.kind = "forward_kl"'
        )
        return f'loss.kind = "{loss.kind}" weighs draws by', without
    if method.correction.is_level is not None or set(method.correction.rs or ()) - {"seq_max_kl"}:
        return f'correction.preset = "{config.correction.preset}" looks at', 'correction.preset = "disabled"'
    old_is_behavior = not (method.decoupled or method.keeps_old)
    if policy is not None and old_is_behavior and policy.loss in RATIO_TO_OLD | RATIO_TO_BEHAVIOR | {"dro"}:
        return f'policy.loss = "{policy.loss}" holds', 'policy.loss = "reinforce"'
    if (fresh := method.freshness) is not None and (fresh.anchor or not method.replays):
        without = 'freshness.drift = "snapshots" with anchor = 0'
        return "[freshness] estimates the KL by", without
    if reference is not None and reference.into == "loss" and reference.importance:
        return 'reference.into = "loss" weighs its KL by', "reference.importance = false"
    if reference is not None and reference.into == "reward" and old_is_behavior:
        return 'reference.into = "reward" penalises', "drop [reference]"
    return None


def quantisation_notes(config: Config, method: Method) -> list[str]:
    """Return a line about rollouts of the quantised student, and about the part of the loss with the ratio to it."""
    if (kind := config.sampler.quantisation) is None:
        return []
    if config.learner.quantised:
        return [f'sampler.quantisation = "{kind}": the learner computes with {kind} weights, too']
    comparison = _first_ratio_to_sampler(config, method)
    corrected = f"{comparison[0]} the ratio to it" if comparison else "nothing in the loss holds the ratio to it"
    said = f'sampler.quantisation = "{kind}": rollouts are of another policy, the student with {kind} weights; '
    return [said + corrected]


def whole_batch_reason(config: Config, method: Method) -> str:
    """Return why a periodic schedule learns only when all groups of an update are there; empty if it need not wait.

    Groups that are learned from as they come cannot be compared with later ones, and share one divisor (invariant 5).
    """
    if not config.schedule.learns_as_ready:
        return ""
    if config.learner.minibatches * config.learner.epochs > 1:
        return "learner.minibatches and learner.epochs make several steps of an update"
    if config.learner.router_aux is not None:
        return "learner.router_aux looks at the whole batch"
    for part, scope in method.scopes.items():
        if scope == "batch":
            return f"{part} looks at the whole batch"
    if method.policy is not None and method.policy.aggregation == "token-sum":
        return 'policy.aggregation = "token-sum" is divided by nothing'
    if not method.weighs_all:
        return "[freshness] divides by a mean over the weights of an update, and a part of the loss is not weighed"
    by_sequences = [method.over_samples] if method.loss.weight or method.anchored else []
    if method.policy is not None:
        by_sequences.append(method.over_sequences)
    if method.reference is not None and method.reference.into == "loss":
        by_sequences.append(False)
    return "parts of the loss are divided by tokens, and others by sequences" if len(set(by_sequences)) > 1 else ""


def schedule_notes(config: Config, method: Method) -> list[str]:
    reason = whole_batch_reason(config, method)
    return [f"periodic: an update learns when all its groups are scored, because {reason}"] if reason else []
