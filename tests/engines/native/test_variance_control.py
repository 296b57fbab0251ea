"""Exact gradient norms (VCPO), projected gradients (GAC) and an averaged old policy, against computations by hand."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.objective import PolicyConfig
from slipstream.engines.native.learning.learner import NativeLearner, key_of
from slipstream.engines.native.learning.step import PREVIOUS_GRADIENT, project, store_gradient
from slipstream.engines.native.ranks import Ranks
from slipstream.estimators.tables.correction import PRESETS
from slipstream.objective.method import Method
from slipstream.records import Batch, Handle, Scored, header_of, total
from support.engines import native_learner
from support.learners import roll_out
from support.tiny_models import make_model, wrap

NOTHING = ReverseKLMC(weight=0.0)
VCPO = Method(
    loss=NOTHING,
    policy=PolicyConfig(loss="reinforce", advantage="opob_exact"),
    correction=PRESETS["bypass_pg_is"],
    rewards={"exact": 1.0},
)


def graded() -> list[list[Handle]]:
    """Two groups of answers that slightly other weights drew, and whose rewards differ."""
    model, groups = make_model(seed=0, dtype=torch.float64), []
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    for group in roll_out(model)[:2]:
        found = []
        for i, handle in enumerate(group):
            rollout = replace(handle.body, rewards={"exact": float(i % 2) + 0.1 * i})
            found.append(Handle(header_of(rollout), rollout))
        groups.append(found)
    return groups


def learner_of(method: Method, **options: Any) -> NativeLearner:
    config = LearnerConfig(dtype="float64", token_budget=1000, lr=1e-2, clip_norm=1e9)
    return native_learner(
        wrap(make_model(seed=0, dtype=torch.float64)), method=method, config=config, updates=9, **options
    )


def flat(learner: NativeLearner) -> Tensor:
    return torch.cat([each.detach().flatten().clone() for each in learner.lm.model.parameters()])


def log_prob(model: Any, rollout: Any) -> Tensor:
    ids = torch.tensor([*rollout.prompt.tokens.tolist(), *rollout.tokens.tolist()])
    logp_TV = model(ids[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1].double().log_softmax(-1)
    emitted_T = logp_TV.gather(1, torch.from_numpy(rollout.tokens).long()[:, None])[:, 0]
    return emitted_T[torch.from_numpy(rollout.loss_mask)].sum()


def norm_of(model: Any, *rollouts: Any) -> tuple[float, float]:
    """Log-prob of an answer, and the squared norm of its gradient."""
    logp = torch.stack([log_prob(model, rollout) for rollout in rollouts]).sum()
    grads = torch.autograd.grad(logp, list(model.parameters()))
    return logp.item(), sum(float(grad.square().sum()) for grad in grads)


def test_opob_subtracts_the_mean_weighted_by_true_gradient_norms() -> None:
    """b = Σ w²‖∂ log π/∂θ‖² R / Σ w²‖…‖² in each group, w the truncated ratio of the answer to what drew it."""
    groups, learner = graded(), learner_of(VCPO)
    batch = Batch(tuple(map(tuple, groups)), 1)
    asyncio.run(learner.prepare(batch))
    model = make_model(seed=0, dtype=torch.float64)
    for group in groups:
        rewards, influence = [], []
        for handle in group:
            logp, norm = norm_of(model, handle.body)
            drew = float(handle.body.logp[handle.body.loss_mask].sum())
            rewards.append(handle.body.rewards["exact"])
            influence.append(min(math.exp(logp - drew), 2.0) ** 2 * norm)
        base = sum(w * r for w, r in zip(influence, rewards, strict=True)) / sum(influence)
        for handle, reward in zip(group, rewards, strict=True):
            found = learner.now.constants[key_of(handle.header)].columns["advantages"]
            assert found is not None
            torch.testing.assert_close(found, torch.full_like(found, reward - base), rtol=1e-5, atol=1e-6)
        assert abs(base - sum(rewards) / len(rewards)) > 1e-3, "the norms matter"
    learner.close()


def test_the_norm_of_an_episode_is_that_of_the_sum_over_its_branches_and_gradients_stay() -> None:
    one, other = (handle.body for handle in graded()[0][:2])
    learner, model = learner_of(VCPO), make_model(seed=0, dtype=torch.float64)
    marks = [torch.full_like(each, float(i)) for i, each in enumerate(learner.lm.model.parameters())]
    for each, mark in zip(learner.lm.model.parameters(), marks, strict=True):
        each.grad = mark.clone()
    found = learner.passes.gradient_norms([[Scored(rollout=one), Scored(rollout=other)], [Scored(rollout=one)]])
    assert found == pytest.approx([norm_of(model, one, other)[1], norm_of(model, one)[1]], rel=1e-6)
    for each, mark in zip(learner.lm.model.parameters(), marks, strict=True):
        assert each.grad is not None and torch.equal(each.grad, mark)
    learner.close()


# --- projection -------------------------------------------------------------------------------------------------------


def two(before: list[float], now: list[float], limit: float) -> tuple[list[float], float]:
    """Return the projected gradient and the cosine before."""
    weight = torch.nn.Parameter(torch.zeros(len(now), dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.tensor(before, dtype=torch.float64)
    optimizer.step()
    store_gradient(optimizer)
    weight.grad = torch.tensor(now, dtype=torch.float64)
    found = project(optimizer, Ranks(), limit=limit)
    assert optimizer.state[weight][PREVIOUS_GRADIENT].tolist() == now, "as it was before its projection"
    return weight.grad.tolist(), found["gradient/cosine_previous"]


def test_the_shared_part_is_reduced_to_the_limit() -> None:
    # (3, 4) has 3 along (2, 0) and 4 across; cosine 0.6
    assert two([2, 0], [3, 4], 0.0) == (pytest.approx([0, 4]), pytest.approx(0.6))
    # 3/5 below 0.6: nothing; at cosine 1/√2 the part along is as long as that across
    assert two([2, 0], [3, 4], 0.7)[0] == [3, 4]
    assert two([2, 0], [8, 4], 1 / math.sqrt(2))[0] == pytest.approx([4, 4])
    assert two([2, 0], [-3, 4], 0.0)[0] == [-3, 4], "opposed gradients stay"
    assert two([1, 0], [5, 0], 0.0)[0] == pytest.approx([0, 0])


@given(seed=st.integers(0, 1000), limit=st.floats(0, 0.95))
def test_the_cosine_after_is_the_limit_and_what_is_across_stays(seed: int, limit: float) -> None:
    draws = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before, now = draws[0], draws[1] + 2 * draws[0]
    found = torch.tensor(two(before.tolist(), now.tolist(), limit)[0], dtype=torch.float64)
    unit = before / before.norm()
    torch.testing.assert_close(found - (found @ unit) * unit, now - (now @ unit) * unit)
    whole = float(torch.cosine_similarity(now, before, dim=0))
    cosine = float(torch.cosine_similarity(found, before, dim=0))
    assert cosine == pytest.approx(min(whole, limit), abs=1e-9)


def test_the_learner_projects_the_first_step_of_each_update() -> None:
    """The first moments of AdamW show the gradient: m2 = β m1 + (1 − β) g2, g2 orthogonal to g1."""
    learner, groups = learner_of(VCPO, cosine_limit=0.0), graded()

    async def update(number: int) -> dict[str, float]:
        batch = Batch(tuple(map(tuple, groups)), number)
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        return await learner.step()

    def moment() -> Tensor:
        return torch.cat([state["exp_avg"].flatten().clone() for state in learner.steps.optimizer.state.values()])

    async def both() -> tuple[dict[str, float], Tensor, dict[str, float], Tensor]:
        return await update(1), moment(), await update(2), moment()

    first, m1, second, m2 = asyncio.run(both())
    beta = learner.config.betas[0]
    g1, g2 = m1 / (1 - beta), (m2 - beta * m1) / (1 - beta)
    assert "gradient/cosine_previous" not in first and second["gradient/cosine_previous"] > 0.02
    assert float(torch.cosine_similarity(g1, g2, dim=0)) == pytest.approx(0, abs=1e-6)
    assert second["grad_norm"] == pytest.approx(float(g2.norm()), rel=1e-6)
    learner.close()


# --- an averaged old policy -------------------------------------------------------------------------------------------


def test_the_old_policy_is_the_average_of_the_weights_before_each_update() -> None:
    """θ̄ = ¾ θ̄ + ¼ θ before each update; the third compares with ¾ θ0 + ¼ θ1 and weighs answers by it."""
    method = replace(VCPO, policy=PolicyConfig(old="average", old_decay=0.75), correction=PRESETS["decoupled_token_is"])
    learner, weights = learner_of(method), list[Tensor]()
    groups = graded()

    async def work() -> None:
        for number in (1, 2, 3):
            weights.append(flat(learner))
            batch = Batch(tuple(map(tuple, groups)), number)
            counts = total(await learner.prepare(batch))
            if number < 3:
                await learner.accumulate(batch, counts)
                await learner.step()

    asyncio.run(work())
    assert float((weights[0] - weights[1]).abs().max()) > 1e-3
    average = make_model(seed=0, dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(0.75 * weights[0] + 0.25 * weights[1], average.parameters())
    for handle in (handle for group in groups for handle in group):
        frozen, rollout = learner.now.constants[key_of(handle.header)], handle.body
        mask = torch.from_numpy(rollout.loss_mask)
        old_T, weight_T = frozen.columns["old"], frozen.columns["weights"]
        assert float(old_T[mask].sum()) == pytest.approx(log_prob(average, rollout).item(), rel=1e-6)
        ratio = (old_T - torch.from_numpy(rollout.logp).double()).exp().clamp(max=2.0)
        torch.testing.assert_close(weight_T[mask], ratio[mask])
    learner.close()
