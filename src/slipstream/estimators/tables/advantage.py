"""Table of advantages: scope, inputs, and descriptions for users who choose one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.estimators.options import Function, Options, formula, options_of

Scope = Literal["row", "group", "batch"]
"""Data that a token's advantage depends on. Groups are never split, so group scope costs no more than row scope."""


@dataclass(frozen=True, kw_only=True)
class Estimator:
    formula: str
    """Formula as module.function under slipstream.estimators.advantage."""
    settings: tuple[str, ...] = ()
    scope: Scope = "group"
    compares: bool = True
    """True if answers to one prompt are compared with each other. A single answer then has no advantage."""
    baseline: str
    evidence: tuple[str, ...] = ()
    """Options that are computed from the batch and not set by users."""
    exact: bool = False
    """True if gradient norms are with respect to the trained weights: one backward pass for each answer."""
    cost: str = "–"

    @property
    def function(self) -> Function:
        return formula(f"advantage.{self.formula}")

    @property
    def options(self) -> Options:
        return options_of(self.function)

    @property
    def weighs_energy(self) -> bool:
        """Return whether the baseline weights tokens by gradient energy (see `logit_energy`) of the current learner."""
        return not self.exact and not {"sum_pi_squared", "grad_norm_squared"}.isdisjoint(self.evidence)


ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator(
        formula="row.grpo",
        settings=("norm",),
        baseline="the group's mean, divided by its σ",
    ),
    "grpo_passk": Estimator(
        formula="row.grpo_passk",
        baseline="the second best of the group, divided by its σ",
    ),
    "rloo": Estimator(
        formula="row.rloo",
        baseline="the mean of the others in the group",
    ),
    "opo": Estimator(
        formula="row.opo",
        baseline="the group's mean weighted by length",
    ),
    "opob": Estimator(
        formula="row.opob",
        baseline="the group's mean weighted by w²‖g‖²",
        evidence=("grad_norm_squared",),
        cost="a pass over the batch for π and Σπ²; ‖g‖² is with respect to logits, not weights",
    ),
    "opob_exact": Estimator(
        formula="row.opob",
        baseline="as opob, with ‖g‖² of the weights",
        evidence=("grad_norm_squared",),
        exact=True,
        cost="a forward and a backward pass for each answer alone, before the update",
    ),
    "gpg": Estimator(
        formula="row.gpg",
        scope="batch",
        baseline="the group's mean, scaled by the share of rewarded rows",
    ),
    "gdpo": Estimator(
        formula="row.gdpo",
        scope="batch",
        baseline="each reward's group mean and σ, then whitened",
        evidence=("components", "component_weights"),
    ),
    "oapl": Estimator(
        formula="row.oapl",
        settings=("beta",),
        baseline="the group's soft maximum",
    ),
    "reinforce_plus_plus_baseline": Estimator(
        formula="row.reinforce_plus_plus_baseline",
        scope="batch",
        baseline="the group's mean, then whitened",
    ),
    "reinforce_plus_plus": Estimator(
        formula="token.reinforce_plus_plus",
        settings=("gamma",),
        scope="batch",
        compares=False,
        baseline="the batch mean of the discounted reward-to-go",
    ),
    "remax": Estimator(
        formula="token.remax",
        scope="row",
        compares=False,
        baseline="the greedy answer's reward",
        evidence=("greedy_rewards",),
        cost="one more greedy answer per prompt, which is graded but not trained on",
    ),
    "optimal_token_baseline": Estimator(
        formula="token.optimal_token_baseline",
        settings=("multi_turn",),
        baseline="the group's reward-to-go at each position, weighted by gradient energy",
        evidence=("logp", "sum_pi_squared", "weights"),
        cost="a pass over the batch for π and Σπ²",
    ),
}
