"""Off-policy metrics: verl's numbers, numbers by hand, and the laws that make them readable."""

import json
from math import exp, inf, log, nan
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.estimators.drift import DRIFT_METRICS, gradient_noise, offpolicy_metrics

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures" / "verl_vectors.json").read_text())


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN["inputs"][name], dtype=torch.float64)


def batch(seed: int, rows: int = 4, width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old, rollout = -3 * torch.rand(2, rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[0, 0] = True
    return old, rollout, mask


def test_as_verl_where_it_has_the_metric() -> None:
    """verl adds 1e-8 to its counts, which shows in the ninth digit."""
    (case,) = [case for case in GOLDEN["cases"] if case["fn"] == "offpolicy_metrics"]
    found = offpolicy_metrics(golden("logp_old"), golden("logp_rollout"), golden("mask"))
    assert tuple(sorted(found)) == tuple(sorted(DRIFT_METRICS))
    for name, value in case["out"].items():
        assert found[name] == pytest.approx(value, abs=1e-8), name


# Two rows, three valid tokens: old probabilities ½, ¼ | ½, rollout's ¼, ½ | ¼. So ρ = 2, ½ | 2, Δ = ln 2 · (1, −1 | 1).
OLD = torch.tensor([[0.5, 0.25], [0.5, nan]], dtype=torch.float64).log()
ROLLOUT = torch.tensor([[0.25, 0.5], [0.25, nan]], dtype=torch.float64).log()
MASK = torch.tensor([[1, 1], [1, 0]])
BY_HAND = {
    # mean log-probs by row: old −1.5 ln 2, −ln 2; rollout −1.5 ln 2, −2 ln 2
    "training_log_ppl": 1.25 * log(2),
    "rollout_log_ppl": 1.75 * log(2),
    "training_ppl": (2**1.5 + 2) / 2,
    "rollout_ppl": (2**1.5 + 4) / 2,
    "log_ppl_diff": -log(2) / 2,  # (0 − ln 2) / 2
    "log_ppl_abs_diff": log(2) / 2,
    "log_ppl_diff_max": 0.0,
    "log_ppl_diff_min": -log(2),
    "ppl_ratio": (1 + 0.5) / 2,
    "kl": -log(2) / 3,
    "k3_kl": (2 + 0.5 + 2) / 3 - 1 - log(2) / 3,
    "chi2_token": (4 + 0.25 + 4) / 3 - 1,
    "chi2_seq": (1 + 4) / 2 - 1,  # products 1 and 2
    "chi2_row_p95": 1.125 + 0.95 * (3 - 1.125),  # rows: (4 + ¼)/2 − 1 = 1.125 and 4 − 1 = 3, between which it lies
    "tv": (1 + 0.5 + 1) / 3 / 2,
    "tv_p95": 0.5,  # of ½, ¼, ½
    "ratio_p99": 2.0,
    "ess": 1.5**2 / 2.75,  # mean 4.5/3, mean square 8.25/3
    "ess_seq": 1.5**2 / 2.5,  # products 1 and 2
    "ess_row": (1.25**2 / 2.125 + 1) / 2,
    "ess_row_min": 1.25**2 / 2.125,
    # p = ½, ¼, ½ and q = ¼, ½, ¼ mirror each other
    "probs_pearson": -1.0,
    "probs_diff_mean": 0.25,
    "probs_diff_max": 0.25,
}


def test_three_tokens_by_hand() -> None:
    found = offpolicy_metrics(OLD, ROLLOUT, MASK)
    assert found == {name: pytest.approx(value, abs=1e-14) for name, value in BY_HAND.items()}


def test_empty_rows_do_not_count_unlike_verl() -> None:
    """verl counts an empty row as one of perplexity exp(0) = 1 and ratio 1, which hides drift behind padding."""
    padding = torch.full((2, 2), nan, dtype=torch.float64)
    found = offpolicy_metrics(
        torch.cat([OLD, padding]), torch.cat([ROLLOUT, padding]), torch.cat([MASK, torch.zeros_like(MASK)])
    )
    assert found == offpolicy_metrics(OLD, ROLLOUT, MASK)
    verl_ppl_ratio, verl_chi2_seq = (1 + 0.5 + 1 + 1) / 4, (1 + 4 + 1 + 1) / 4 - 1
    assert verl_ppl_ratio == pytest.approx(0.875) and found["ppl_ratio"] == pytest.approx(0.75)
    assert verl_chi2_seq == pytest.approx(0.75) and found["chi2_seq"] == pytest.approx(1.5)


# --- laws -------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000))
def test_the_same_policy_shows_no_drift(seed: int) -> None:
    old, _, mask = batch(seed)
    found = offpolicy_metrics(old, old, mask)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "tv", "log_ppl_diff", "probs_diff_max"):
        assert found[name] == 0, name
    for name in ("ess", "ppl_ratio", "probs_pearson"):
        assert found[name] == pytest.approx(1), name


@given(seed=st.integers(0, 10_000))
def test_bounds_and_identities(seed: int) -> None:
    old, rollout, mask = batch(seed)
    found = offpolicy_metrics(old, rollout, mask)
    rho, p, q = (old - rollout)[mask].exp(), old[mask].exp(), rollout[mask].exp()
    assert found["k3_kl"] >= 0 and 0 < found["ess"] <= 1 + 1e-12 and abs(found["probs_pearson"]) <= 1 + 1e-12
    # E ρ² = E² ρ / ess
    assert found["chi2_token"] == pytest.approx(rho.mean().item() ** 2 / found["ess"] - 1)
    rows = [one.exp()[at] for one, at in zip(old - rollout, mask, strict=True) if at.any()]
    shares = [((row.sum() ** 2) / (len(row) * row.square().sum())).item() for row in rows]
    assert found["ess_row"] == pytest.approx(sum(shares) / len(shares)) and found["ess_row_min"] == pytest.approx(
        min(shares)
    )
    products = torch.stack([row.log().sum() for row in rows]).exp()
    assert found["ess_seq"] == pytest.approx((products.mean().square() / products.square().mean()).item())
    chi2 = torch.stack([row.square().mean() - 1 for row in rows])
    assert found["chi2_row_p95"] == pytest.approx(torch.quantile(chi2, 0.95).item())
    assert found["log_ppl_diff_min"] <= found["log_ppl_diff"] <= found["log_ppl_diff_max"]
    if len(p) > 2:
        assert found["probs_pearson"] == pytest.approx(torch.corrcoef(torch.stack([p, q]))[0, 1].item())
    # order of rows and what stands in masked places are of no interest
    swapped = [x.flip(0) for x in (old.masked_fill(~mask, nan), rollout.masked_fill(~mask, inf), mask)]
    assert offpolicy_metrics(*swapped) == pytest.approx(found, rel=1e-12, abs=1e-12)


def test_the_mean_over_draws_of_the_rollout_policy_is_the_divergence() -> None:
    """Every action of a vocabulary once is not a draw; weighted by q it is. kl = KL(q‖p), chi2 = χ²(p‖q), tv = TV."""
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    drawn = torch.tensor([[0, 1, 2, 2]])  # in proportion to q
    found = offpolicy_metrics(p.log()[drawn], q.log()[drawn], torch.ones(1, 4))
    assert found["kl"] == pytest.approx((q * (q / p).log()).sum().item())
    assert found["chi2_token"] == pytest.approx(((p - q) ** 2 / q).sum().item())
    assert found["tv"] == pytest.approx((p - q).abs().sum().item() / 2)


# --- lag --------------------------------------------------------------------------------------------------------------


def test_kl_and_chi2_grow_with_lag_in_their_buckets() -> None:
    """Δ = −0.1·lag, so kl of a bucket is 0.1 times its mean lag. Masked tokens may claim any lag."""
    lag = torch.tensor([[0, 0, 1, 2, 3], [4, 7, 8, 15, -5]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    rollout = torch.full((2, 5), -1.0, dtype=torch.float64)
    found = offpolicy_metrics(rollout - 0.1 * lag, rollout, mask, lag=lag)
    by_lag = {name: value for name, value in found.items() if "lag" in name}
    expected = {"0": [0.0], "1": [1], "2-3": [2, 3], "4-7": [4, 7], "8-15": [8, 15]}
    assert set(by_lag) == {f"{name}/lag_{label}" for name in ("kl", "chi2_token") for label in expected}
    for label, lags in expected.items():
        assert by_lag[f"kl/lag_{label}"] == pytest.approx(sum(lags) / len(lags) / 10)
        assert by_lag[f"chi2_token/lag_{label}"] == pytest.approx(
            sum(exp(-0.2 * each) for each in lags) / len(lags) - 1
        )


def test_buckets_without_tokens_are_left_out() -> None:
    rollout = torch.full((1, 2), -1.0)
    found = offpolicy_metrics(rollout, rollout, torch.ones(1, 2), lag=torch.tensor([[0, 40]]))
    assert [name for name in found if "kl/" in name] == ["kl/lag_0", "kl/lag_32-63"]


# --- edges ------------------------------------------------------------------------------------------------------------


def test_nothing_valid_is_all_zeros() -> None:
    assert offpolicy_metrics(OLD, ROLLOUT, torch.zeros(2, 2)) == dict.fromkeys(DRIFT_METRICS, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_impossible_and_certain_tokens_stay_finite(dtype: torch.dtype) -> None:
    old = torch.tensor([[-inf, 0.0, -1e4], [-inf, -inf, nan]], dtype=dtype)
    rollout = torch.tensor([[0.0, -inf, -1e4], [-inf, 0.0, nan]], dtype=dtype)
    lag = torch.tensor([[0, 1, 2], [3, 4, 5]])
    found = offpolicy_metrics(old, rollout, torch.tensor([[1, 1, 1], [1, 1, 0]]), lag=lag)
    assert all(abs(value) < inf for value in found.values())


@pytest.mark.parametrize(("rollout", "expected"), [(0.25, 1.0), (0.5, 0.0)])
def test_correlation_without_spread(rollout: float, expected: float) -> None:
    """One token, or equal probabilities: no correlation is defined; 1 when the two sides agree, else 0."""
    old = torch.tensor([[0.25, 0.25]], dtype=torch.float64).log()
    found = offpolicy_metrics(old, torch.full_like(old, rollout).log(), torch.ones(1, 2))
    assert found["probs_pearson"] == expected


def test_wrong_shapes_and_lags_are_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"logp_rollout \(2, 2\)"):
        offpolicy_metrics(x, x[:, :2], x)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        offpolicy_metrics(x[0], x[0], x[0])
    with pytest.raises(ValueError, match=r"lag \(2, 1\)"):
        offpolicy_metrics(x, x, torch.ones(2, 3), lag=torch.zeros(2, 1))
    with pytest.raises(ValueError, match="must not be negative, got -2"):
        offpolicy_metrics(x, x, torch.ones(2, 3), lag=torch.full((2, 3), -2))


# --- gradient noise ---------------------------------------------------------------------------------------------------


def test_gradient_noise_by_hand() -> None:
    """Gradients (1, 0) and (0, 1): mean (½, ½), signal ½, power 1, noise ½."""
    assert gradient_noise(torch.tensor([1.0, 1.0]), torch.tensor(0.5)) == {
        "proxy1_signal_strength": 0.5,
        "proxy2_total_power": 1.0,
        "proxy3_pure_noise": 0.5,
    }


@given(seed=st.integers(0, 1000), n=st.integers(2, 9))
def test_gradient_noise_is_the_variance_of_the_mean(seed: int, n: int) -> None:
    gradients_ND = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = gradient_noise(gradients_ND.square().sum(-1), gradients_ND.mean(0).square().sum())
    assert found["proxy3_pure_noise"] == pytest.approx(gradients_ND.var(0).sum().item() / n)


def test_gradient_noise_needs_two_gradients() -> None:
    with pytest.raises(ValueError, match=r"square_norms \(1,\) must be \[N\] with N ≥ 2"):
        gradient_noise(torch.ones(1), torch.ones(()))
