"""Objective of an update: losses, correction and coefficients, the columns that they take, and their scopes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.config.freshness import FreshnessConfig
from slipstream.config.losses import DistillationLoss
from slipstream.config.objective import CriticConfig, PolicyConfig, ReferenceConfig
from slipstream.config.schema import Config
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.correction import PRESETS, CorrectionPreset
from slipstream.estimators.tables.policy import POLICY_LOSSES, VARIANCE_COEF, Mode, scope_of
from slipstream.objective.coefficients import MEASURED, Coefficients, adaptive_beta, ascended
from slipstream.scope import Scope

DRAWS_OF_OPERANDS = {"proximal": "proximal_draws", "reference": "reference_draws", "keep": "kept_draws"}
"""Columns of the operands of a distillation loss that are decided before the first gradient."""


@dataclass(frozen=True, kw_only=True)
class Method:
    loss: DistillationLoss
    policy: PolicyConfig | None = None
    critic: CriticConfig | None = None
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
    def keeps_old(self) -> bool:
        """Return whether the old policy is the learner before its last update, or an average of earlier weights."""
        return self.policy is not None and self.policy.keeps_old

    @property
    def old_decay(self) -> float:
        """Return the share of itself that the old policy keeps in every update."""
        return self.policy.old_decay if self.policy is not None and self.policy.old == "average" else 0.0

    @property
    def old(self) -> str:
        """Return the column of the old policy, or "behavior" for the policy that drew the tokens."""
        if self.keeps_old:
            return "old_snapshot"
        return "old_by_version" if self.decoupled else "behavior"

    @property
    def carried(self) -> set[str]:
        """Return the columns of micro-batches: those that the losses of their samples take."""
        names = set[str]()
        if self.loss.weight:
            names |= {DRAWS_OF_OPERANDS[name] for name in self.loss.spec.takes if name in DRAWS_OF_OPERANDS}
            names |= {"token_weights"} if self.loss.tokens != "all" else set()
        if self.policy is not None:
            names |= {"old", "advantages", *POLICY_LOSSES[self.policy.loss].columns}
            names |= {"weights"} if self.correction.is_level is not None else set()
            names |= {self.centre} if self.centre else set()
        if self.critic is not None:
            names |= {"values", "returns"}
        if self.reference is not None and self.reference.into == "loss":
            names.add("reference")
        return names

    @property
    def centre(self) -> str:
        """Return the column of score centering; "" without it."""
        return f"centre_of_{self.policy.centre}" if self.policy is not None and self.policy.centre else ""

    @property
    def columns(self) -> set[str]:
        """Return all columns that are taken: by losses, advantages and corrections (see `objective.columns`)."""
        names = self.carried
        if self.policy is not None:
            names |= {*ADVANTAGES[self.policy.advantage].columns.values()} | {self.old}
            names |= {"current"} if self.truncates_values else set()
            names |= {"turn_rewards"} if self.rewards_turns else set()
        if self.reference is not None:
            names.add("reference")
        if self.correction.corrects:
            names.add(self.old if self.decoupled else "current")
            names |= {"turns"} if self.correction.is_level == "turn" else set()
            names |= {"current"} if self.correction.rejects("negative_seq") else set()
            names |= {"rollout_kl"} if self.correction.rejects("seq_max_kl") else set()
        return names - {"behavior"}

    @property
    def rewards_turns(self) -> bool:
        """Return whether the rewards that an environment gives to turns are at the ends of these turns."""
        return self.policy is not None and "environment" in self.rewards and ADVANTAGES[self.policy.advantage].by_token

    @property
    def truncates_values(self) -> bool:
        """Return whether importance ratios of later steps are in the critic's returns."""
        options = self.policy.values_options if self.critic is not None and self.policy is not None else {}
        return bool(options and (options["rho"] or options["c"]))

    @property
    def reads_snapshots(self) -> bool:
        """Return whether any part needs stored weights of the versions that drew the tokens."""
        return self.replays or not self.columns.isdisjoint({"old_by_version", "rollout_kl"})

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
        return self.freshness is not None and "policy" in self.freshness.apply_to

    @property
    def weighs_all(self) -> bool:
        """Return whether the weights' divisor may divide the gradient: all parts are weighted, or the divisor is 1."""
        fresh, reference = self.freshness, self.reference
        others = (self.policy is not None and not self.weighs_policy) or (reference and reference.into == "loss")
        others = others or self.critic is not None
        undivided = fresh is None or fresh.weight == "equal" or (fresh.normalise == "off" and fresh.weight != "common")
        return undivided or not others

    @property
    def by_row(self) -> bool:
        """Return whether the policy loss needs whole rows."""
        if (policy := self.policy) is None:
            return False
        return self.aggregation == "seq-mean-token-mean" or scope_of(policy.loss, policy.aggregation) == "row"

    @property
    def by_episode(self) -> bool:
        """Return whether the policy loss has ratios of whole sequences (episodes with all their branches)."""
        return self.policy is not None and POLICY_LOSSES[self.policy.loss].scope == "row"

    @property
    def keeps_reference(self) -> bool:
        return not self.columns.isdisjoint({"reference", "reference_draws"})

    @property
    def hosts_reference(self) -> bool:
        """Return whether the weights of the reference are in host memory between uses."""
        return self.reference is not None and self.reference.host

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
        settings = {}
        if self.reference is not None and self.reference.control == "adaptive":
            settings["beta"] = "reference.control"
        if self.policy is not None and self.policy.variance_target is not None:
            settings["variance"] = "policy.variance_target"
        return settings

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
        scopes: dict[str, Scope] = {"correction": self.correction.scope}
        if self.loss.weight:
            scopes[f"loss.kind = {self.loss.kind}"] = self.loss.scope
        if self.policy is not None:
            scopes[f"policy.loss = {self.policy.loss}"] = scope_of(self.policy.loss, self.policy.aggregation)
            batch = ADVANTAGES[self.policy.advantage].scope == "batch"
            scopes[f"policy.advantage = {self.policy.advantage}"] = "batch" if batch else "row"
        return scopes

    @property
    def over_samples(self) -> bool:
        """Return whether distillation and anchor are divided by the number of sequences."""
        return self.freshness is not None and self.freshness.normalise_by == "samples"

    @property
    def over_sequences(self) -> bool:
        """Return whether the policy loss is divided by sequences, not tokens; without policy loss `over_samples`."""
        return self.over_samples if self.policy is None else self.aggregation.startswith("seq")

    @property
    def aggregation(self) -> Mode:
        """Return how the policy loss and the KL to the reference in the loss are reduced: without policy, by tokens."""
        if (policy := self.policy) is None:
            return "token-mean"
        return policy.aggregation or POLICY_LOSSES[policy.loss].agg

    def __str__(self) -> str:
        options = self.loss.spec.options
        scaled = f" of {options['reward_scale']:g} · teacher/start" if "reference_draws" in self.carried else ""
        placed = f" on {self.loss.tokens} tokens" if self.loss.tokens != "all" else ""
        kind = f"{self.loss.kind}{_changes(self.loss)}"
        parts = [f"{self.loss.weight:g} · {kind}{scaled}{placed}"] if self.loss.weight else []
        if self.policy is not None:
            weights = {name: "" if weight == 1.0 else f"{weight:g} · " for name, weight in self.rewards.items()}
            rewards = " + ".join(f"{weight}{name}" for name, weight in weights.items())
            bound = f", variance up to {self.policy.variance_target:g}," if "variance" in self.adaptive else ""
            centred = "centred " if self.policy.centre else ""
            loss = f"{centred}{self.policy.loss}{bound}"
            parts.append(f"{self.policy.weight:g} · {loss} on {self.policy.advantage} of {rewards}")
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


SHOWN_APART = {"kind", "weight", "m", "tokens", "reward_scale"}
"""Settings of a loss that its line shows in words, and the number of draws, which changes its variance alone."""


def _changes(loss: DistillationLoss) -> str:
    """Return the settings of a loss that are not its defaults, in brackets: they decide what is minimised."""
    names = loss.changed(*(name for name in type(loss).model_fields if name not in SHOWN_APART))
    given = ", ".join(f"{name} {json.dumps(getattr(loss, name)).strip(chr(34))}" for name in names)
    return f" ({given})" if given else ""


def method_of(config: Config) -> Method:
    policy = config.policy
    return Method(
        loss=config.loss,
        policy=policy,
        critic=config.critic,
        correction=config.correction.parts,
        reference=config.reference,
        freshness=config.freshness,
        teachers={name: teacher.weight for name, teacher in config.teachers.items()},
        rewards={name: policy.reward_weights.get(name, 1.0) for name in config.task.names} if policy else {},
        temperature=config.sampler.temperature,
        max_tokens=config.sampler.max_tokens,
        seed=config.seed,
    )


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
