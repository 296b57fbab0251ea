"""Policy losses, advantages and diagnostics against polgrad, an independent reference implementation (PyPI)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from polgrad import ALGORITHMS, PolicyLossConfig
from polgrad import policy_loss as reference_loss
from polgrad.advantages import GroupNormConfig, grpo_advantages, rloo_advantages
from polgrad.diagnostics import importance_ess, logprob_mismatch
from polgrad.kl import KLEstimator
from polgrad.kl import kl_estimate as reference_kl
from polgrad.testing import assert_conforms, random_batches
from torch import Tensor

from slipstream.estimators.advantage import advantage
from slipstream.estimators.correction import correct
from slipstream.estimators.divergence import kl_estimate
from slipstream.estimators.drift import offpolicy_metrics
from slipstream.estimators.policy import policy_loss

BATCHES = 32
SHAPES = ((4, 8), (2, 12), (1, 1))
NO_DUAL_CLIP = {"dual_clip": 1e9}
"""polgrad has PPO's clip only; ours also bounds the loss of tokens with a negative advantage."""


def ours(name: str, **options: Any) -> Callable[..., Tensor]:
    def loss(*, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        every = advantages[:, None].expand_as(logprobs)
        return policy_loss(name, logprobs, old_logprobs, every, response_mask, **options)[0]

    return loss


LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("vanilla", NO_DUAL_CLIP),
    "grpo": ("vanilla", NO_DUAL_CLIP | {"agg": "seq-mean-token-mean"}),
    "dapo": ("vanilla", NO_DUAL_CLIP | {"clip_high": 0.28}),
    "gspo": ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo_token": ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": ("cispo", {"clip_low": 1.0, "clip_high": 0.2}),
    "rloo": ("reinforce", {"agg": "seq-mean-token-sum"}),
    "reinforce_pp": ("vanilla", NO_DUAL_CLIP | {"agg": "seq-mean-token-mean"}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_loss_and_its_gradient_are_those_of_polgrad(name: str) -> None:
    loss, options = LOSSES[name]
    assert_conforms(ours(loss, **options), name, n_cases=BATCHES, shapes=SHAPES)


def test_dr_grpo_divides_by_the_length_that_it_is_given() -> None:
    reference = replace(ALGORITHMS["dr_grpo"].loss, norm_len=16)
    own = ours("vanilla", **NO_DUAL_CLIP, agg="seq-mean-token-sum-norm", scale=16.0)
    assert_conforms(own, reference, n_cases=BATCHES, shapes=SHAPES)


def test_grpo_with_truncated_importance_sampling_is_a_correction_and_a_loss() -> None:
    """polgrad's weight is min(π_old / π_rollout, 10) of each token, without gradient."""
    config: PolicyLossConfig = replace(ALGORITHMS["grpo_tis"].loss, kl=None)
    for batch in random_batches(BATCHES, SHAPES, seed=1):
        logp_BT = batch["logprobs"].clone().requires_grad_()
        old, rollout, mask = batch["old_logprobs"], batch["rollout_logprobs"], batch["response_mask"]
        weights = correct(old, rollout, mask, is_level="token", is_threshold=10.0).weights
        own = ours("vanilla", **NO_DUAL_CLIP, agg="seq-mean-token-mean", weights=weights)
        (found,) = torch.autograd.grad(own(logprobs=logp_BT, old_logprobs=old, **of_rows(batch)), logp_BT)
        given = {"logprobs": logp_BT, "old_logprobs": old, "rollout_logprobs": rollout, **of_rows(batch)}
        (expected,) = torch.autograd.grad(reference_loss(config, **given).loss, logp_BT)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def of_rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"advantages": batch["advantages"], "response_mask": batch["response_mask"]}


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_advantages_within_groups_are_those_of_polgrad(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = torch.ones(len(groups), 3, dtype=torch.bool)
    for _ in range(BATCHES):
        rewards = torch.rand(len(groups), generator=generator, dtype=torch.float64)
        at_end = torch.zeros_like(mask, dtype=torch.float64)
        at_end[:, -1] = rewards
        found = advantage(name, at_end, mask, groups=groups)[:, 0]
        small = GroupNormConfig(eps=1e-6)  # added to the deviation; papers do not give it
        expected = rloo_advantages(rewards, groups) if name == "rloo" else grpo_advantages(rewards, groups, small)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimates_of_kl_are_those_of_polgrad(kind: str) -> None:
    for batch in random_batches(BATCHES, SHAPES, seed=3):
        own = kl_estimate(batch["logprobs"], batch["ref_logprobs"], kind=kind)
        mask = batch["response_mask"]
        theirs = reference_kl(batch["logprobs"], batch["ref_logprobs"], KLEstimator(kind), response_mask=mask)
        torch.testing.assert_close(own * mask, theirs, rtol=1e-9, atol=1e-12)


def test_effective_sample_size_and_mismatch_are_those_of_polgrad() -> None:
    for batch in random_batches(BATCHES, SHAPES, seed=4):
        new, old, mask = batch["old_logprobs"], batch["rollout_logprobs"], batch["response_mask"]
        own, gap = offpolicy_metrics(new, old, mask), logprob_mismatch(new, old, mask)
        assert own["kl"] == pytest.approx(gap.kl_k1, rel=1e-6, abs=1e-9)
        assert own["k3_kl"] == pytest.approx(gap.kl_k3, rel=1e-6, abs=1e-9)
        for key, level in (("ess", "token"), ("ess_seq", "sequence")):
            assert own[key] == pytest.approx(importance_ess(new, old, mask, level=level).ess_ratio, rel=1e-6)
