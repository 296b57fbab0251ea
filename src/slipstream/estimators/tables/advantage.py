"""The table of advantages: what each depends on, what it is given, and what to know before choosing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.estimators.options import Function, Options, formula, options_of

Scope = Literal["row", "group", "batch"]
"""What an advantage depends on. The group is what travels the pipeline, so group scope goes wherever row scope does."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An advantage estimator, and what to know before choosing it."""

    formula: str
    """module.function, under slipstream.estimators.advantage."""
    settings: tuple[str, ...] = ()
    """Options that a person chooses."""
    scope: Scope
    compares: bool
    """The answers to one prompt, with each other: alone, one has no advantage."""
    baseline: str
    use_when: str
    evidence: tuple[str, ...] = ()
    """Options that are tensors, found out about the batch."""
    cost: str = "–"

    @property
    def function(self) -> Function:
        return formula(f"advantage.{self.formula}")

    @property
    def options(self) -> Options:
        """Its options with their defaults (`options.REQUIRED` where there is none)."""
        return options_of(self.function)

    @property
    def weighs_energy(self) -> bool:
        """Its baseline weighs tokens by how much gradient they have: π and Σπ² of the learner as it is."""
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
        baseline="the group's mean, over its σ",
        use_when="several answers per prompt, one reward each: the default",
    ),
    "grpo_passk": Estimator(
        formula="row.grpo_passk",
        scope="group",
        compares=True,
        baseline="the second best of the group, over its σ",
        use_when="one right answer in k is enough",
    ),
    "rloo": Estimator(
        formula="row.rloo",
        scope="group",
        compares=True,
        baseline="the mean of the others in the group",
        use_when="as grpo, unbiased and not divided by σ",
    ),
    "opo": Estimator(
        formula="row.opo",
        scope="group",
        compares=True,
        baseline="the group's mean weighted by length",
        use_when="strictly on-policy, lengths differ a lot",
    ),
    "opob": Estimator(
        formula="row.opob",
        scope="group",
        compares=True,
        baseline="the group's mean weighted by w²‖g‖²",
        use_when="stale rollouts, where few rows dominate",
        evidence=("grad_norm_squared",),
        cost="a pass over the batch for π and Σπ²; ‖g‖² is by the logits, not by the weights",
    ),
    "gpg": Estimator(
        formula="row.gpg",
        scope="batch",
        compares=True,
        baseline="the group's mean, scaled by the share of rewarded rows",
        use_when="with the loss gpg, sparse rewards",
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
        use_when="groups that nearly agree make grpo noisy",
    ),
    "reinforce_plus_plus": Estimator(
        formula="token.reinforce_plus_plus",
        settings=("gamma",),
        scope="batch",
        compares=False,
        baseline="the batch mean of the discounted reward-to-go",
        use_when="one answer per prompt, no critic",
    ),
    "remax": Estimator(
        formula="token.remax",
        scope="row",
        compares=False,
        baseline="the greedy answer's reward",
        use_when="one answer per prompt, a greedy rollout is affordable",
        evidence=("greedy_rewards",),
        cost="one more answer to every prompt, greedy, graded and never trained on",
    ),
    "gae": Estimator(
        formula="token.gae",
        settings=("gamma", "lam"),
        scope="batch",
        compares=False,
        baseline="a critic, then whitened",
        use_when="there is a critic, credit within an answer matters",
        evidence=("values",),
        cost="a critic, which is not there",
    ),
    "optimal_token_baseline": Estimator(
        formula="token.optimal_token_baseline",
        settings=("multi_turn",),
        scope="group",
        compares=True,
        baseline="the group's reward-to-go at each position, weighted by gradient energy",
        use_when="long answers, stale rollouts; with multi_turn = true (TIR-OTB) where tools answer in between",
        evidence=("logp", "sum_pi_squared", "weights"),
        cost="a pass over the batch for π and Σπ²",
    ),
}
