"""Table of advantages: scope, inputs, and descriptions for users who choose one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.estimators.options import Function, Options, formula, options_of

Scope = Literal["row", "group", "batch"]
"""Data that a token's advantage depends on. Groups are never split, so group scope costs no more than row scope."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Advantage estimator and the description for users."""

    formula: str
    """Formula as module.function under slipstream.estimators.advantage."""
    settings: tuple[str, ...] = ()
    scope: Scope
    compares: bool
    """True if answers to one prompt are compared with each other. A single answer then has no advantage."""
    baseline: str
    use_when: str
    evidence: tuple[str, ...] = ()
    """Options that are computed from the batch and not set by users."""
    cost: str = "–"

    @property
    def function(self) -> Function:
        return formula(f"advantage.{self.formula}")

    @property
    def options(self) -> Options:
        """Return the options with defaults; `options.REQUIRED` marks options without a default."""
        return options_of(self.function)

    @property
    def weighs_energy(self) -> bool:
        """Return whether the baseline weights tokens by gradient energy (see `logit_energy`) of the current learner."""
        return not {"sum_pi_squared", "grad_norm_squared"}.isdisjoint(self.evidence)

    @property
    def needs_critic(self) -> bool:
        return "values" in self.evidence


ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator(
        formula="row.grpo",
        settings=("norm",),
        scope="group",
        compares=True,
        baseline="the group's mean, divided by its σ",
        use_when="the default: several answers per prompt, one reward each",
    ),
    "grpo_passk": Estimator(
        formula="row.grpo_passk",
        scope="group",
        compares=True,
        baseline="the second best of the group, divided by its σ",
        use_when="one right answer in k is enough",
    ),
    "rloo": Estimator(
        formula="row.rloo",
        scope="group",
        compares=True,
        baseline="the mean of the others in the group",
        use_when="as grpo, but unbiased and not divided by σ",
    ),
    "opo": Estimator(
        formula="row.opo",
        scope="group",
        compares=True,
        baseline="the group's mean weighted by length",
        use_when="training is strictly on-policy and lengths differ a lot",
    ),
    "opob": Estimator(
        formula="row.opob",
        scope="group",
        compares=True,
        baseline="the group's mean weighted by w²‖g‖²",
        use_when="rollouts are stale and few rows dominate the gradient",
        evidence=("grad_norm_squared",),
        cost="a pass over the batch for π and Σπ²; ‖g‖² is with respect to logits, not weights",
    ),
    "gpg": Estimator(
        formula="row.gpg",
        scope="batch",
        compares=True,
        baseline="the group's mean, scaled by the share of rewarded rows",
        use_when="with the loss gpg, if rewards are sparse",
    ),
    "gdpo": Estimator(
        formula="row.gdpo",
        scope="batch",
        compares=True,
        baseline="each reward's group mean and σ, then whitened",
        use_when="several rewards of different scale",
        evidence=("components", "component_weights"),
    ),
    "reinforce_plus_plus_baseline": Estimator(
        formula="row.reinforce_plus_plus_baseline",
        scope="batch",
        compares=True,
        baseline="the group's mean, then whitened",
        use_when="rewards nearly agree within groups, which makes grpo noisy",
    ),
    "reinforce_plus_plus": Estimator(
        formula="token.reinforce_plus_plus",
        settings=("gamma",),
        scope="batch",
        compares=False,
        baseline="the batch mean of the discounted reward-to-go",
        use_when="there is one answer per prompt and no critic",
    ),
    "remax": Estimator(
        formula="token.remax",
        scope="row",
        compares=False,
        baseline="the greedy answer's reward",
        use_when="there is one answer per prompt, and a greedy rollout is affordable",
        evidence=("greedy_rewards",),
        cost="one more greedy answer per prompt, which is graded but not trained on",
    ),
    "gae": Estimator(
        formula="token.gae",
        settings=("gamma", "lam"),
        scope="batch",
        compares=False,
        baseline="a critic, then whitened",
        use_when="there is a critic, and credit within an answer matters",
        evidence=("values",),
        cost="a critic, which is not available",
    ),
    "optimal_token_baseline": Estimator(
        formula="token.optimal_token_baseline",
        settings=("multi_turn",),
        scope="group",
        compares=True,
        baseline="the group's reward-to-go at each position, weighted by gradient energy",
        use_when="answers are long or stale; with multi_turn = true (TIR-OTB) if tool output is in between",
        evidence=("logp", "sum_pi_squared", "weights"),
        cost="a pass over the batch for π and Σπ²",
    ),
}
