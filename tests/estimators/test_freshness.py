"""Freshness: scores and weights by hand, the drift estimated from the cache, and the loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.estimators.divergence import dense
from slipstream.estimators.drift import aligned_mean, rollout_kl_from_cache, score, weight

LN2 = math.log(2)
kl = st.floats(0, 50)
lags = st.integers(0, 200)


def double(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- score and weight -------------------------------------------------------------------------------------------------


def test_score_by_hand() -> None:
    """exp(−1·√D_roll − 2·√D_sup) / (lag + 1)."""
    f = score(torch.tensor([0, 1, 3, 3]), double(0, 0.25, 0, 0.25), double(0, 0, 0.09, 0.09), alpha=1, beta=2)
    wanted = double(1, math.exp(-0.5) / 2, math.exp(-0.6) / 4, math.exp(-1.1) / 4)
    torch.testing.assert_close(f, wanted)
    torch.testing.assert_close(weight(f, threshold=0.15), double(0.85, wanted[1] - 0.15, 0, 0))
    assert score(3, 0.25, 0.0, alpha=1, beta=1).item() == pytest.approx(math.exp(-0.5) / 4)


def test_the_baselines_are_special_values() -> None:
    """Lag only: f = 1/(τ + 1), whatever has drifted. A frozen teacher on plain prefixes: a supervision drift of 0."""
    lag_only = score(torch.tensor([0, 1, 7]), double(9, 9, 9), 0.5, alpha=0, beta=0)
    torch.testing.assert_close(lag_only, double(1, 0.5, 0.125))
    torch.testing.assert_close(score(torch.tensor([0, 1]), double(0, 1), 0.0), double(1, math.exp(-1) / 2))


def test_a_sample_without_aligned_positions_has_no_freshness() -> None:
    """Even where drift is not looked at (alpha = beta = 0): its weight is 0 and it stays in the denominator."""
    drift = aligned_mean(double([1, 3, torch.nan], [5, 5, 5]), torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert drift.tolist() == [2.0, math.inf]
    for options in ({}, {"alpha": 0.0, "beta": 0.0}):
        f = score(torch.tensor([0, 0]), drift, 0.0, **options)
        assert f[0] > 0 and f[1] == 0
        assert score(torch.tensor([0, 0]), double(0, 0), drift, **options)[1] == 0


@settings(deadline=None, derandomize=True, max_examples=50)
@given(lags, kl, kl, st.integers(0, 5), st.floats(0, 5), st.floats(0, 5))
def test_older_and_further_is_never_fresher(
    lag: int, roll: float, sup: float, more: int, roll_more: float, sup_more: float
) -> None:
    f = score(lag, roll, sup)
    assert 0 <= score(lag + more, roll + roll_more, sup + sup_more) <= f <= 1
    assert weight(f) == max(f.item() - 0.02, 0)


def test_scores_and_weights_carry_no_gradient_and_rounding_below_zero_is_zero() -> None:
    drift = double(-1e-17, 0.5).requires_grad_()
    f = score(torch.tensor([0, 0]), drift, drift)
    assert not f.requires_grad and f[0] == 1
    assert not weight(double(0.5).requires_grad_()).requires_grad


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match=r"lag \(3,\), rollout_kl \(2,\)"):
        score(torch.zeros(3), torch.zeros(2), 0.0)


# --- rollout drift from the cache -------------------------------------------------------------------------------------


def test_rollout_drift_by_hand() -> None:
    """ρ = 2 and ½ in one row: (2 ln 2 − 1 + ½ − ½ ln 2) / 2, with the slopes ρ log ρ / 2."""
    logp = (LN2 * double([-1, -3])).requires_grad_()
    drift = rollout_kl_from_cache(logp, LN2 * double([-2, -2]))
    torch.testing.assert_close(drift, double((1.5 * LN2 - 0.5) / 2))
    torch.testing.assert_close(torch.autograd.grad(drift.sum(), logp)[0], double([LN2, -LN2 / 4]))


def test_rollout_drift_is_zero_at_the_same_policy_and_only_there() -> None:
    """Unless the two were processed differently: at another temperature there is drift at zero lag."""
    logits = double([1.0, 0.0, -1.0])
    same, warmer = logits.log_softmax(-1), (logits / 0.7).log_softmax(-1)
    assert rollout_kl_from_cache(same, same).item() == 0
    assert (rollout_kl_from_cache(warmer[0, :, None], same[0, :, None]) > 0).all()
    expected = (same.exp() * rollout_kl_from_cache(warmer.T, same.T)).sum()
    torch.testing.assert_close(expected, dense(warmer, same, kind="reverse").sum())


def test_rollout_drift_pulls_back_from_every_distance() -> None:
    """The slope is ρ log ρ, of a ratio within e^±20."""
    logp = torch.linspace(-60, 0, 3001, dtype=torch.float64)[:, None].requires_grad_()
    gap = logp.detach() + 30
    (slope,) = torch.autograd.grad(rollout_kl_from_cache(logp, torch.full_like(gap, -30.0)).sum(), logp)
    bounded = gap.clamp(-20, 20)
    torch.testing.assert_close(slope, bounded.exp() * bounded, rtol=1e-9, atol=1e-12)
    assert torch.equal(slope.sign(), gap.sign())


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-1e5, 0), st.floats(-1e5, 0)), min_size=1, max_size=6),
    st.floats(-1e-7, 1e-7),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_rollout_drift_is_never_negative(pairs: list[tuple[float, float]], nudge: float, dtype: torch.dtype) -> None:
    for logp, old in (double(*pairs).T, (double(*pairs)[:, 0], double(*pairs)[:, 0] + nudge)):
        leaf = logp[None].to(dtype).requires_grad_()
        drift = rollout_kl_from_cache(leaf, old[None].to(dtype))
        assert drift.isfinite().all() and (drift >= 0).all()
        assert torch.autograd.grad(drift.sum(), leaf)[0].isfinite().all()
