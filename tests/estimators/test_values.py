"""Returns and losses of a critic, against hand computations and the formulas written out as sums."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.objective import CriticConfig
from slipstream.engines.native.learning.critic import ValueHead
from slipstream.engines.native.ranks import Ranks
from slipstream.estimators.values import lambda_returns, value_loss

PLAIN: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "by_turn": False, "rho": 0.0, "c": 0.0}
NAN = math.nan


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


EPISODE: dict[str, Any] = {
    "rewards_BT": row(0, 0, NAN, NAN, 0, NAN, 2),
    "values_BT": row(1.0, 0.5, NAN, NAN, 1.5, NAN, 1.0),
    "mask_BT": row(1, 1, 0, 0, 1, 0, 1),
}
"""Two drawn tokens, two of a tool, a drawn one, one of a tool, and a drawn one that ends the episode: three turns."""
TURNS = row(0, 0, -1, -1, 1, -1, 2)


def test_an_episode_with_tools_by_token() -> None:
    """γ = ½, λ = ½. d = 2 − 1, 0 + 1/2 − 1.5, 0 + 1.5/2 − 0.5, 0 + 0.5/2 − 1, from the back."""
    options = PLAIN | {"gamma": 0.5, "lam": 0.5}
    found, returns = lambda_returns(**EPISODE, turns=TURNS, bootstrap=torch.zeros(1), **options)
    last, third = 1.0, -1 + 0.25 * 1.0
    second = 0.25 + 0.25 * third
    first = -0.75 + 0.25 * second
    torch.testing.assert_close(found, row(first, second, 0, 0, third, 0, last))
    torch.testing.assert_close(returns, row(1 + first, 0.5 + second, 0, 0, 1.5 + third, 0, 1 + last))


def test_an_episode_with_tools_by_turn() -> None:
    """The first turn has two tokens and the value of the first, 1. d = 2 − 1, 0 + 1/2 − 1.5, 0 + 1.5/2 − 1."""
    options = PLAIN | {"gamma": 0.5, "lam": 0.5, "by_turn": True}
    found, returns = lambda_returns(**EPISODE, turns=TURNS, bootstrap=torch.zeros(1), **options)
    second = -1 + 0.25 * 1.0
    first = -0.25 + 0.25 * second
    torch.testing.assert_close(found, row(first, first, 0, 0, second, 0, 1))
    torch.testing.assert_close(returns, row(1 + first, 1 + first, 0, 0, 1.5 + second, 0, 2))


def test_what_a_limit_has_cut_goes_on_with_the_value_of_its_end() -> None:
    """With λ = γ = 1 every return is the reward of 2 and the value 3 behind the end; advantages are the rest."""
    found, returns = lambda_returns(**EPISODE, turns=TURNS, bootstrap=torch.tensor([3.0]), **PLAIN)
    torch.testing.assert_close(returns, row(5, 5, 0, 0, 5, 0, 5))
    torch.testing.assert_close(found, row(4, 4.5, 0, 0, 3.5, 0, 4))


@given(seed=st.integers(0, 999), lam=st.sampled_from([1.0, 0.8]), rho=st.sampled_from([0.7, 1.0, 3.0]))
def test_v_trace_is_the_sum_of_its_paper(seed: int, lam: float, rho: float) -> None:
    """v_s = V_s + Σ_{t≥s} γ^{t−s} (Π_{s≤i<t} λ c_i) ρ_t d_t, with ratios cut at c̄ and ρ̄ (1802.01561, equation 1)."""
    g = torch.Generator().manual_seed(seed)
    rewards, values, logs = (torch.randn(1, 5, generator=g, dtype=torch.float64) for _ in range(3))
    end, gamma, c, mask = 0.3, 0.9, 0.9, torch.ones(1, 5)
    columns: dict[str, Any] = {"bootstrap": row(end)[0], "turns": torch.zeros(1, 5), "log_ratios": logs}
    options = {"gamma": gamma, "lam": lam, "by_turn": False, "rho": rho, "c": c}
    found, returns = lambda_returns(rewards, values, mask, **columns, **options)
    r, v, w = rewards[0].tolist(), [*values[0].tolist(), end], logs[0].exp().tolist()
    d = [r[t] + gamma * v[t + 1] - v[t] for t in range(5)]

    def target(s: int) -> float:
        total = v[s]
        for t in range(s, 5):
            path = math.prod(lam * min(c, w[i]) for i in range(s, t))
            total += gamma ** (t - s) * path * min(rho, w[t]) * d[t]
        return total

    targets = [*(target(s) for s in range(5)), end]
    assert returns[0].tolist() == pytest.approx(targets[:5])
    ahead = [d[s] + gamma * lam * (targets[s + 1] - v[s + 1]) for s in range(5)]
    assert found[0].tolist() == pytest.approx(ahead)
    if lam == 1:
        assert ahead == pytest.approx([r[s] + gamma * targets[s + 1] - v[s] for s in range(5)]), "as in the paper"


def test_a_turn_has_the_product_of_its_ratios() -> None:
    """Two turns of ratio 2 · ½ = 1 and 4: cut at ρ̄ = 2, the second return is V + 2 (r − V)."""
    episode = {"rewards_BT": row(0, 0, 1), "values_BT": row(0, 7, 0.5), "mask_BT": row(1, 1, 1)}
    columns = {"turns": row(0, 0, 1), "bootstrap": torch.zeros(1), "log_ratios": row(2, 0.5, 4).log()}
    _, returns = lambda_returns(**episode, **columns, **PLAIN | {"rho": 2.0, "c": 1.0, "by_turn": True})
    torch.testing.assert_close(returns, row(0.5 + 1.0, 0.5 + 1.0, 0.5 + 2 * 0.5))


def test_a_value_that_moved_too_far_has_no_gradient() -> None:
    """ε = 0.2. By hand: ½ (0.5² + max(0.5², 0.8²) + 0.1²) / 4; the second value has left its band to the return."""
    values = torch.tensor([0.5, 0.5, 0.1, 9.0], requires_grad=True)
    old, returns = torch.tensor([0.5, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, NAN])
    mask = torch.tensor([True, True, True, False])
    loss, metrics = value_loss(values, old, returns, mask, clip=0.2, n_tokens=4)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (0.25 + 0.64 + 0.01) / 4)
    assert values.grad is not None and values.grad.tolist() == pytest.approx([-0.5 / 4, 0.0, 0.1 / 4, 0.0])
    assert metrics["clip_fraction"].item() == 0.25
    assert value_loss(values, old, returns, mask, clip=None, n_tokens=4)[0].item() == pytest.approx(0.51 / 8)
    third = torch.full_like(values, 1 / 3)
    weighted, _ = value_loss(values, old, returns, mask, clip=None, n_tokens=4, weight_N=third)
    assert weighted.item() == pytest.approx(0.51 / 24)


def test_a_value_head_stays_where_it_is_without_any_gradient() -> None:
    """Momentum alone must not move it: an update may have no token of the student."""
    head = ValueHead(CriticConfig(lr=0.1), 3, torch.empty(0), Ranks())
    head(torch.ones(5, 3)).sum().backward()
    head.step(1.0)
    before = head.weight.detach().clone()
    assert before.any()
    (0 * head(torch.ones(5, 3)).sum()).backward()
    head.step(1.0)
    assert torch.equal(head.weight, before)


def test_a_value_head_reaches_the_known_values_of_a_table() -> None:
    """A walk over five states that ends left with 0 and right with 1 begins at state s with the value (s + 1) / 6."""
    head = ValueHead(CriticConfig(lr=0.02, clip=1e9), 5, torch.empty(0), Ranks())
    g = torch.Generator().manual_seed(0)
    for _ in range(300):
        states, mask = torch.zeros(64, 40, dtype=torch.long), torch.zeros(64, 40)
        rewards, at = torch.zeros(64, 40), torch.randint(5, (64,), generator=g)
        alive = torch.ones(64, dtype=torch.bool)
        for t in range(40):
            states[:, t], mask[:, t] = at.clamp(0, 4), alive.float()
            at = at + torch.where(torch.rand(64, generator=g) < 0.5, 1, -1)
            rewards[:, t] = (alive & (at == 5)).float()
            alive &= (at >= 0) & (at < 5)
        hidden = torch.nn.functional.one_hot(states, 5).float()
        with torch.no_grad():
            old = head(hidden)
        bootstrap = head(torch.nn.functional.one_hot(at.clamp(0, 4), 5).float()).detach() * alive
        columns = {"turns": torch.zeros(64, 40), "bootstrap": bootstrap}
        _, returns = lambda_returns(rewards, old, mask, **columns, **PLAIN | {"lam": 0.9})
        loss, _ = value_loss(head(hidden), old, returns, mask != 0, clip=None, n_tokens=float(mask.sum()))
        loss.backward()
        head.step(1.0)
    values = head(torch.eye(5)).tolist()
    assert values == pytest.approx([(s + 1) / 6 for s in range(5)], abs=0.06)
