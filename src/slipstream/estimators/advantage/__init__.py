"""Advantages of tokens from their rewards: how much better a sample did than could be expected.

`groups` labels the rows: rows with the same label answer the same prompt. Rows without valid tokens (empty or rejected)
count nowhere: not in a group's size, nor its baseline. A lone row has nothing to be compared with: its baseline is 0.
Rewards at masked positions count for nothing; results are 0 there. Arithmetic is in float64; results have the dtype of
the rewards, float32 at least.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.estimators.advantage import row as advantage_row
from slipstream.estimators.advantage import token as advantage_token
from slipstream.estimators.advantage.grouping import whiten
from slipstream.estimators.numerics import blanked, unknown
from slipstream.estimators.options import Options, check_options, options_of
from slipstream.estimators.ratio import same_rows

__all__ = ["ADVANTAGES", "Estimator", "advantage", "whiten"]

Scope = Literal["row", "group", "batch"]
"""What an advantage depends on. The group is what travels the pipeline, so group scope goes wherever row scope does."""
Result = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """An advantage estimator, and what to know before choosing it."""

    function: Callable[..., Result]
    scope: Scope
    baseline: str
    use_when: str
    evidence: tuple[str, ...] = ()
    """Options that are tensors, found out about the batch."""
    cost: str = "–"

    @property
    def options(self) -> Options:
        """Its options with their defaults (`options.REQUIRED` where there is none)."""
        return options_of(self.function)

    @property
    def settings(self) -> list[str]:
        """Options that a person chooses."""
        return [name for name in self.options if name not in self.evidence]

    @property
    def needs_critic(self) -> bool:
        return "values" in self.evidence


def advantage(name: str, rewards_BT: Tensor, mask_BT: Tensor, *, groups: Tensor, **kw: Any) -> Any:
    """The advantages [B, T] by an estimator of `ADVANTAGES`; `gae` returns (advantages, returns).

    `kw` are the estimator's options. A ValueError names what is unknown, missing or of the wrong shape.
    """
    if name not in ADVANTAGES:
        raise unknown("advantage", name, ADVANTAGES)
    function = ADVANTAGES[name].function
    same_rows(rewards=rewards_BT, mask=mask_BT)
    if groups.shape != mask_BT.shape[:1]:
        raise ValueError(f"groups {tuple(groups.shape)} must be [B] with B = {len(mask_BT)}")
    check_options(name, kw, function)
    dtype = torch.promote_types(rewards_BT.dtype, torch.float32)
    valid_BT = mask_BT != 0
    (rewards,) = blanked(valid_BT, rewards_BT.detach().double())
    result = function(rewards, valid_BT, torch.unique(groups, return_inverse=True)[1], **kw)
    if isinstance(result, tuple):
        return tuple((each * valid_BT).to(dtype) for each in result)
    return (result * valid_BT).to(dtype)


ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator(
        function=advantage_row.grpo,
        scope="group",
        baseline="the group's mean, over its σ",
        use_when="several answers per prompt, one reward each: the default",
    ),
    "grpo_passk": Estimator(
        function=advantage_row.grpo_passk,
        scope="group",
        baseline="the second best of the group, over its σ",
        use_when="one right answer in k is enough",
    ),
    "rloo": Estimator(
        function=advantage_row.rloo,
        scope="group",
        baseline="the mean of the others in the group",
        use_when="as grpo, unbiased and not divided by σ",
    ),
    "opo": Estimator(
        function=advantage_row.opo,
        scope="group",
        baseline="the group's mean weighted by length",
        use_when="strictly on-policy, lengths differ a lot",
    ),
    "opob": Estimator(
        function=advantage_row.opob,
        scope="group",
        baseline="the group's mean weighted by w²‖g‖²",
        use_when="stale rollouts, where few rows dominate",
        evidence=("weights", "grad_norm_squared"),
        cost="a pass over the batch for π and Σπ²; ‖g‖² is by the logits, not by the weights",
    ),
    "gpg": Estimator(
        function=advantage_row.gpg,
        scope="batch",
        baseline="the group's mean, scaled by the share of rewarded rows",
        use_when="with the loss gpg, sparse rewards",
    ),
    "gdpo": Estimator(
        function=advantage_row.gdpo,
        scope="batch",
        baseline="each reward's group mean and σ, then whitened",
        use_when="several rewards of different scale",
        evidence=("components", "component_weights"),
    ),
    "reinforce_plus_plus_baseline": Estimator(
        function=advantage_row.reinforce_plus_plus_baseline,
        scope="batch",
        baseline="the group's mean, then whitened",
        use_when="groups that nearly agree make grpo noisy",
    ),
    "reinforce_plus_plus": Estimator(
        function=advantage_token.reinforce_plus_plus,
        scope="batch",
        baseline="the batch mean of the discounted reward-to-go",
        use_when="one answer per prompt, no critic",
    ),
    "remax": Estimator(
        function=advantage_token.remax,
        scope="row",
        baseline="the greedy answer's reward",
        use_when="one answer per prompt, a greedy rollout is affordable",
        evidence=("greedy_rewards",),
        cost="one more answer to every prompt, greedy, graded and never trained on",
    ),
    "gae": Estimator(
        function=advantage_token.gae,
        scope="batch",
        baseline="a critic, then whitened",
        use_when="there is a critic, credit within an answer matters",
        evidence=("values",),
        cost="a critic, which is not there",
    ),
    "optimal_token_baseline": Estimator(
        function=advantage_token.optimal_token_baseline,
        scope="group",
        baseline="the group's reward-to-go at each position, weighted by gradient energy",
        use_when="long answers, stale rollouts; with multi_turn = true (TIR-OTB) where tools answer in between",
        evidence=("logp", "sum_pi_squared", "weights"),
        cost="a pass over the batch for π and Σπ²",
    ),
}
