"""Policy losses: six tokens by hand, verl's values and where we differ, mistakes. Their laws: test_policy_laws.py."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.estimators.options import only
from slipstream.estimators.policy import policy_loss, prepare
from slipstream.estimators.tables.policy import POLICY_ALIASES, POLICY_LOSSES


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(loss: Tensor, logp: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logp)[0]


# --- six tokens by hand -----------------------------------------------------------------------------------------------

# Two rows, of four and two tokens. The ratio p / old is 1, 1.5, 0.5, 4 and 2, 0.9; the rows' products are 3 and 1.8.
P = [0.5, 0.45, 0.3, 0.8, 0.2, 0.36]
OLD = [0.5, 0.3, 0.6, 0.2, 0.1, 0.4]
A = [1.0, 1.0, -1.0, -2.0, 2.0, -1.0]
LN = [math.log(p) for p in P]
D = [math.log(p / old) for p, old in zip(P, OLD, strict=True)]
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
S0, S1 = 3**0.25, 1.8**0.5  # geometric means of the rows' ratios
G1 = math.exp((0.2 + math.log(0.9)) / 2)


def rows(six: list[float], fill: float = math.nan) -> Tensor:
    return torch.tensor([six[:4], [*six[4:], fill, fill]], dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def weighted(weights: list[float]) -> tuple[list[float], list[float]]:
    """Losses −w A log p and gradients −w A."""
    return [-w * a * ln for w, a, ln in zip(weights, A, LN, strict=True)], [
        -w * a for w, a in zip(weights, A, strict=True)
    ]


def phi(c1: float, c2: float, w: float) -> float:
    """VESPO's weight of a row with ratio w."""
    return w**c1 * math.exp(c2 * (1 - w))


def regression(beta: float) -> tuple[list[float], list[float]]:
    """OAPL: −(A − ½βS) δ and, from ½βS² − Σ A δ, −A + βS, with S the row's sum of δ: ln 3 and ln 1.8."""
    row_sums = [math.log(3)] * 4 + [math.log(1.8)] * 2
    losses = [-(a - beta / 2 * s) * d for a, s, d in zip(A, row_sums, D, strict=True)]
    return losses, [-a + beta * s for a, s in zip(A, row_sums, strict=True)]


R = [math.exp(d) for d in D]
GATE = [sigmoid(t * (math.exp(d) - 1)) for t, d in zip([1, 1, 1.05, 1.05, 1, 1.05], D, strict=True)]

LITERAL: dict[str, tuple[dict[str, Any], list[float], list[float], float]] = {
    # options, loss of each token, gradient of their sum, tokens at which the trust region acted
    # −A r clipped at 0.8 and 1.2; the fourth: max(2·4, 2·1.2) = 8, at most 2·3
    "vanilla": ({}, [-1, -1.2, 0.8, 6, -2.4, 0.9], [-1, 0, 0, 0, 0, 0.9], 4),
    "reinforce": ({}, *weighted([1] * 6), 0),
    "gpg": ({}, *weighted([1] * 6), 0),
    "cispo": ({}, *weighted([1, 1.2, 0.8, 1.2, 1.2, 0.9]), 4),
    # bad tokens at least 0.6 and at most 2, good ones at most 1.4
    "dispo": (
        {"clip_high_pos": 0.4, "clip_low_neg": 0.4, "clip_high_neg": 1.0},
        *weighted([1, 1.4, 0.6, 2, 1.4, 0.9]),
        4,
    ),
    # s = S0 or S1, both above 1.2: good tokens clipped; d s/dlogp = s/4 or s/2 at every token, from −A = 1 + 2 and 1
    "gspo": ({}, [-1.2, -1.2, S0, 2 * S0, -2.4, S1], [3 * S0 / 4] * 4 + [S1 / 2] * 2, 3),
    "gspo_token": ({}, [-1.2, -1.2, S0, 2 * S0, -2.4, S1], [0, 0, S0, 2 * S0, 0, S1], 3),
    # as gspo, but the second row's ratio S1 = 1.34 is outside of the band of bad tokens
    "tbpo": (
        {"clip_low": 0.2, "clip_high": 0.2, "band_high": 0.33},
        [-1.2, -1.2, S0, 2 * S0, -2.4, 0],
        [3 * S0 / 4] * 4 + [0] * 2,
        4,
    ),
    # uncertain are the second, fourth and fifth token. Parts: 1.5·4 and 1·0.5 with s = √6, √½, then 2 and 0.9. The mean
    # entropies, and so ε, are 0.7, 0.1 and 0.9, 0.2: s of good tokens is at most 1.7, then 1.9; of bad ones at least
    # 0.9. All parts of a row have one size, so their factors are 1
    "espo": (
        {"entropy": rows([0.1, 0.6, 0.1, 0.8, 0.9, 0.2]), "espo_share": 0.5, "espo_alpha": 1.0},
        [-(0.5**0.5), -1.7, 0.9, 2 * 6**0.5, -3.8, 0.9],
        [-(0.5**0.5), 0, 0, 2 * 6**0.5, 0, 0.9],
        3,
    ),
    # δ of good tokens at most 0.2, of bad ones at least −0.2: 0, 0.2, −0.2, ln 4 → R = 4^¼ = √2, Ā = −¼;
    # 0.2, ln 0.9 → R = G1, Ā = ½; the sum of a row's losses is n·(−Ā R), its gradient −Ā R where nothing was clipped
    "gmpo": (
        {},
        [2**0.5 / 4] * 4 + [-G1 / 2] * 2,
        [2**0.5 / 4, 0, 0, 2**0.5 / 4, 0, -G1 / 2],
        3,
    ),
    # −A g·4/τ; g′ = τ g(1 − g), dr/dlogp = r
    "sapo": (
        {},
        [-a * g * 4 / t for a, g, t in zip(A, GATE, [1, 1, 1.05, 1.05, 1, 1.05], strict=True)],
        [-a * 4 * g * (1 - g) * math.exp(d) for a, g, d in zip(A, GATE, D, strict=True)],
        0,
    ),
    # p − old = 0, 0.15, −0.3, 0.6, 0.1, −0.04: the third is bad and fell by more than 0.2; the fourth is bad and rose
    "dppo_tv": ({}, *weighted([1, 1.5, 0, 4, 2, 0.9]), 1),
    # of the third: 0.6 ln 2 + 0.4 ln(0.4/0.7) = 0.192 < 0.2
    "dppo_kl": ({}, *weighted([1, 1.5, 0.5, 4, 2, 0.9]), 0),
    # mean A = 0, mean log p = −0.925: covariance 0.232, 0.126, 0.279, −1.40, −1.37, 0.097; the first is in (0.2, 0.25)
    "clip_cov": (
        {"generator": seeded(), "cov_low": 0.2, "cov_high": 0.25},
        [0, -1.2, 0.8, 8, -2.4, 0.9],
        [0, 0, 0, 8, 0, 0.9],
        4,
    ),
    # one token, the third: + 0.1·|ln ½|
    "kl_cov": ({}, [-1, -1.5, 0.5 + 0.1 * math.log(2), 8, -4, 0.9], [-1, -1.5, 0.5 - 0.1, 8, -4, 0.9], 1),
    "dro": (
        {},
        [-a * ln + d * d / 4 for a, ln, d in zip(A, LN, D, strict=True)],
        [-a + d / 2 for a, d in zip(A, D, strict=True)],
        0,
    ),
    # −A r + 0.04 (r − 1)²; dr/dlogp = r
    "r2vpo": (
        {},
        [-a * r + 0.04 * (r - 1) ** 2 for a, r in zip(A, R, strict=True)],
        [(-a + 0.08 * (r - 1)) * r for a, r in zip(A, R, strict=True)],
        0,
    ),
    # λ = 0.3/√(2·0.045) = 1 and 2: −A r + λ (r ln r − r + 1), whose slope is −A r + λ r ln r
    "quatro": (
        {"spread": rows([0.3, 0.3, 0.3, 0.3, 0.6, 0.6]), "radius": 0.045},
        [-a * r + m * (r * d - r + 1) for a, r, d, m in zip(A, R, D, [1, 1, 1, 1, 2, 2], strict=True)],
        [r * (m * d - a) for a, r, d, m in zip(A, R, D, [1, 1, 1, 1, 2, 2], strict=True)],
        0,
    ),
    # harmful are 2, 3, 5, 6; the fourth alone exceeds the budget: (0 + ln² 4)/2 > 0.04
    "m2po": ({}, [-1, 0, 0, 8, 0, 0], [-1, 0, 0, 8, 0, 0], 4),
    # r = p/prox = 1, 0.9, 0.5, 1.6, –, 0.9; w = prox/old = 1, 5/3, 1, 2.5, 6 > 5, 1
    "decoupled_ppo": (
        {"proximal_logp": rows([0.5, 0.5, 0.6, 0.5, 0.6, 0.4]).log()},
        [-1, -1.5, 0.8, 8, 0, 0.9],
        [-1, -1.5, 0, 8, 0, 0.9],
        2,
    ),
    # α = 1, ½, ½, ¼ and 1, ½: r^α = 1, √1.5 > 1.2, √½ < 0.8, √2, 2 > 1.2, √0.9; w = r^(1−α) = 1, √1.5, √½, 2√2, 1, √0.9
    "a3po": (
        {"lag": rows([0, 2, 2, 4, 1, 2], fill=0.0)},
        [-1, -1.2 * 1.5**0.5, 0.8 * 0.5**0.5, 8, -2.4, 0.9],
        [-1, 0, 0, 8, 0, 0.9],
        3,
    ),
    # the bad row has w = min(1.8, 1)
    "topr": ({"positive": torch.tensor([True, False])}, *weighted([1] * 6), 2),
    # good: −A/r; bad: as vanilla
    "aspo": ({}, [-1, -2 / 3, 0.8, 6, -1, 0.9], [-1, -2 / 3, 0, 0, -1, 0.9], 2),
    # least ratio before: 1, 1, 1, 0.5 and 1, 2
    "minpro": ({}, *weighted([1, 1.5, 0.5, 2, 2, 1.8]), 0),
    # Σδ = 0, ln 1.5, ln 0.75, ln 3 and ln 2, ln 1.8, clipped to ±0.05√t
    "ctpo": (
        {},
        *weighted([math.exp(c * math.sqrt(t) / 20) for c, t in [(0, 1), (1, 2), (-1, 3), (1, 4), (1, 1), (1, 2)]]),
        5,
    ),
    # W = 3 and 1.8; good tokens have c1 = 2, c2 = 3, bad ones 3, 2
    "vespo": (
        {},
        *weighted([phi(2, 3, 3), phi(2, 3, 3), phi(3, 2, 3), phi(3, 2, 3), phi(2, 3, 1.8), phi(3, 2, 1.8)]),
        0,
    ),
    "oapl": ({"oapl_beta": 0.5}, *regression(0.5), 0),
    # turns 0, 0 and 1, 1 and 0, 0 have w = √1.5, √2, √1.8; good tokens of the first and third are beyond 1.2. c of the
    # others: 0.8, 1.2 with mean 1, and 0.9 beside 1.2 with mean 1.05
    "st_ppo": (
        {"turns": torch.tensor([[0, 0, 1, 1], [0, 0, -1, -1]])},
        *weighted([0, 0, 0.8 * math.sqrt(2), 1.2 * math.sqrt(2), 0, 0.9 / 1.05 * math.sqrt(1.8)]),
        3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_six_tokens_by_hand(name: str) -> None:
    hyper, losses, gradients, acted = LITERAL[name]
    logp = rows(P).log().requires_grad_()
    args = (logp, rows(OLD).log(), rows(A), MASK)
    loss, metrics = policy_loss(name, *args, agg="token-sum", **hyper)
    assert loss.item() == pytest.approx(sum(losses))
    torch.testing.assert_close(gradient(loss, logp), rows(gradients, fill=0.0))
    assert metrics["clip_fraction"].item() == pytest.approx(acted / 6)
    assert metrics["kl"].item() == pytest.approx(-sum(D) / 6)
    assert metrics["ratio"].item() == pytest.approx((1 + 1.5 + 0.5 + 4 + 2 + 0.9) / 6)
    assert metrics["ratio_max"].item() == pytest.approx(4)
    assert not any(value.requires_grad for value in metrics.values())

    by_row = name in ("gspo", "gspo_token", "tbpo", "espo", "gmpo", "sapo")
    own, _ = policy_loss(name, *args, **hyper)
    over_tokens = sum(losses) / (2 if name == "oapl" else 6)
    assert own.item() == pytest.approx((sum(losses[:4]) / 4 + sum(losses[4:]) / 2) / 2 if by_row else over_tokens)
    for i, expected in enumerate(losses if name != "gmpo" else []):  # one token at a time; gmpo weighs rows
        alone, _ = policy_loss(name, *args, agg="token-sum", weights=rows([float(i == j) for j in range(6)]), **hyper)
        assert alone.item() == pytest.approx(expected)


def test_weights_multiply_the_loss_last_and_gmpo_takes_their_geometric_mean() -> None:
    weights = [0.5, 2.0, 1.0, 0.25, 1.0, 4.0]
    logp = rows(P).log().requires_grad_()
    loss, _ = policy_loss("vanilla", logp, rows(OLD).log(), rows(A), MASK, agg="token-sum", weights=rows(weights))
    assert loss.item() == pytest.approx(sum(w * x for w, x in zip(weights, LITERAL["vanilla"][1], strict=True)))
    loss, _ = policy_loss("gmpo", logp, rows(OLD).log(), rows(A), MASK, weights=rows(weights))
    # (½·2·1·¼)^¼ = ¼^¼ and (1·4)^½ = 2; mean of the two rows
    assert loss.item() == pytest.approx((0.25**0.25 * 2**0.5 / 4 - 2 * G1 / 2) / 2)
    loss, _ = policy_loss("gmpo", logp, rows(OLD).log(), rows(A), MASK, weights=rows([0.0, *weights[1:]]))
    assert loss.item() == pytest.approx(-2 * G1 / 2 / 2)


def test_dual_clip_of_aspo_keeps_the_gradient() -> None:
    """r = 0.1 and A = 1: the flipped ratio 10 is cut to 3, value and gradient."""
    logp = torch.tensor([[math.log(0.05)]], requires_grad=True)
    loss, metrics = policy_loss("aspo", logp, torch.tensor([[math.log(0.5)]]), torch.ones(1, 1), torch.ones(1, 1))
    assert loss.item() == pytest.approx(-3) and gradient(loss, logp).item() == pytest.approx(-3)
    assert metrics["clip_fraction"].item() == 1


def test_topr_forgets_bad_rows_as_far_as_they_are_likely() -> None:
    """Policies swapped: the rows' ratios are 1/3 and 1/1.8, the second row is good."""
    logp = rows(OLD).log().requires_grad_()
    positive = torch.tensor([0, 1])
    loss, metrics = policy_loss("topr", logp, rows(P).log(), rows(A), MASK, agg="token-sum", positive=positive)
    torch.testing.assert_close(gradient(loss, logp), rows([-a / 3 for a in A[:4]] + [-a for a in A[4:]], fill=0.0))
    assert metrics["clip_fraction"].item() == 0


@pytest.mark.parametrize(
    ("budget", "masked", "left"),
    [
        (0.4, [], 1.2 / 4),  # 0.64, 0.36, 0.16 harmful, 0.04 not: the mean is 0.3
        (0.3, [], 0.3),
        (0.25, [0], 0.56 / 3),
        (0.1, [0, 1], 0.2 / 2),
        (0.05, [0, 1, 2], 0.04),
        (0.03, [0, 1, 2], 0.04),  # missed: the harmless one alone exceeds it
    ],
)
def test_m2po_masks_the_largest_until_the_budget_holds(budget: float, masked: list[int], left: float) -> None:
    delta = torch.tensor([[0.8, 0.6, -0.4, 0.2]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    chosen, metrics = prepare("m2po", delta, torch.zeros(1, 4), advantages, torch.ones(1, 4), budget=budget + 1e-9)
    assert chosen[0].nonzero().flatten().tolist() == masked
    assert metrics["second_moment"].item() == pytest.approx(left)
    assert metrics["budget_missed"].item() == (budget == 0.03)


def test_clip_cov_draws_its_share_with_the_given_generator() -> None:
    generator = seeded(3)
    logp, advantages = torch.randn(2, 50, generator=generator) - 3, torch.randn(2, 50, generator=generator)

    def draw(seed: int, **options: float) -> tuple[Tensor, dict[str, Tensor]]:
        return prepare("clip_cov", logp, logp, advantages, torch.ones(2, 50), generator=seeded(seed), **options)

    (one, metrics), (few, _), (all_, _) = draw(0), draw(0, cov_fraction=0.05), draw(0, cov_fraction=1.0)
    cov = (advantages - advantages.mean()) * (logp - logp.mean())
    assert torch.equal(all_, (cov > 1) & (cov < 5))
    assert metrics["cov_candidates"].item() == all_.sum().item() > 5
    assert one.sum().item() == 1 and few.sum().item() == 5 and (few <= all_).all()
    assert torch.equal(few, draw(0, cov_fraction=0.05)[0]) and not torch.equal(few, draw(1, cov_fraction=0.05)[0])


def test_gmpo_leaves_empty_rows_out_of_its_mean_where_verl_counts_them() -> None:
    mask = MASK * torch.tensor([[1], [0]])
    args = (rows(P).log(), rows(OLD).log(), rows(A), mask)
    assert policy_loss("gmpo", *args)[0].item() == pytest.approx(2**0.5 / 4)
    verl = policy_loss("gmpo", *args, n_sequences=2)[0].item()
    assert verl == pytest.approx(2**0.5 / 8)


def test_dppo_truncates_at_20_where_verl_truncates_at_3() -> None:
    """Among the ratios 1, 1.5, –, 4, 2, 0.9 only 4 is above 3."""
    logp = rows(P).log().requires_grad_()
    for options, weight in (({}, 4.0), ({"dppo_truncation": 3.0}, 3.0)):
        loss, _ = policy_loss("dppo_tv", logp, rows(OLD).log(), rows(A), MASK, agg="token-sum", **options)
        assert gradient(loss, logp)[0, 3].item() == pytest.approx(2 * weight)


def test_dispo_clips_four_ways() -> None:
    """The paper's bounds: good tokens within 0.8 and 11, bad ones within 0 and 101."""
    ratios, signs = [0.5, 20.0, 0.5, 200.0], [1.0, 1.0, -1.0, -1.0]
    logp = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([signs], dtype=torch.float64)
    loss, _ = policy_loss("dispo", logp, torch.zeros(1, 4), advantages, torch.ones(1, 4), agg="token-sum")
    torch.testing.assert_close(gradient(loss, logp), torch.tensor([[-0.8, -11, 0.5, 101]], dtype=torch.float64))


@pytest.mark.parametrize("beta", [1e-3, 0.5, 2.0])
def test_oapl_is_the_square_of_the_paper_divided_by_two_beta(beta: float) -> None:
    """(β ln(π/π_inf) − A)² of each row, whose minimum has ln(π/π_inf) = A/β whatever drew the row."""
    logp, answers = rows(P).log().requires_grad_(), torch.tensor([0.7, -1.1], dtype=torch.float64)
    advantages, valid = answers[:, None].expand(2, 4), MASK != 0
    loss, _ = policy_loss("oapl", logp, rows(OLD).log(), advantages, MASK, oapl_beta=beta)
    gap = (beta * (logp - rows(OLD).log()).where(valid, 0.0).sum(-1) - answers).square()
    assert loss.item() == pytest.approx(((gap - answers.square()) / (2 * beta)).mean().item())
    torch.testing.assert_close(gradient(loss, logp), gradient((gap / (2 * beta)).mean(), logp))
    reached = (rows(OLD).log() + answers[:, None] / beta / valid.sum(-1, keepdim=True)).requires_grad_()
    loss, _ = policy_loss("oapl", reached, rows(OLD).log(), advantages, MASK, oapl_beta=beta)
    torch.testing.assert_close(gradient(loss, reached), torch.zeros(2, 4, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_vespo_fades_on_both_sides_and_is_greatest_at_c1_by_c2(sign: float) -> None:
    """φ(1) = 1, φ′(W) = 0 at W = c1/c2 = ⅔ or 3/2, and both a forgotten and a runaway row have no weight."""
    ratio = torch.tensor([1.0, 2 / 3 if sign > 0 else 1.5, 1e-6, 40.0], dtype=torch.float64)
    logp = ratio.log()[:, None].requires_grad_()
    ones = torch.ones_like(logp)
    loss, _ = policy_loss("vespo", logp, torch.zeros_like(logp), sign * ones, ones, agg="token-sum")
    one, most, low, high = (-sign * gradient(loss, logp)).flatten().tolist()
    assert one == pytest.approx(1) and low < 1e-9 and high < 1e-9
    near = torch.tensor([0.98, 1.02], dtype=torch.float64) * ratio[1]
    assert all(phi(*((2, 3) if sign > 0 else (3, 2)), w) < most for w in near.tolist()) and most >= 1


# --- verl's vectors ---------------------------------------------------------------------------------------------------

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures" / "verl_vectors.json").read_text())
OUR_NAME = {"gspo": "gspo_token"}


CASES = [case for case in VECTORS["cases"] if case["fn"] == "policy_loss"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"] + "-weighted" * bool(case["weights"]))
def test_verl(case: dict[str, Any]) -> None:
    """Its means divide by a count + 1e-8, hence the tolerance."""
    name = OUR_NAME.get(case["name"], case["name"])
    inputs = {k: torch.tensor(v, dtype=torch.float64) for k, v in VECTORS["inputs"].items() if k != "groups"}
    logp = inputs["logp"].requires_grad_()
    weights = torch.tensor(case["weights"], dtype=torch.float64) if case["weights"] else None
    hyper = only(case["hyper"], POLICY_LOSSES[POLICY_ALIASES.get(name, name)].loss)
    args = (logp, inputs["logp_old"], inputs["advantages"], inputs["mask"])
    loss, _ = policy_loss(name, *args, weights=weights, **hyper)
    assert loss.item() == pytest.approx(case["loss"], abs=1e-8)
    torch.testing.assert_close(gradient(loss, logp), torch.tensor(case["grad"], dtype=torch.float64), atol=1e-8, rtol=0)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="unknown policy loss 'vanila'.*gspo_token.*did you mean 'vanilla'"):
        policy_loss("vanila", x, x, x, x)
    with pytest.raises(ValueError, match="unknown option of vanilla 'clip_hi'.*did you mean 'clip_high'"):
        policy_loss("vanilla", x, x, x, x, clip_hi=0.3)
    with pytest.raises(ValueError, match="reinforce has no option 'clip_low'"):
        policy_loss("reinforce", x, x, x, x, clip_low=0.3)
    with pytest.raises(ValueError, match="decoupled_ppo needs proximal_logp"):
        policy_loss("decoupled_ppo", x, x, x, x)
    with pytest.raises(ValueError, match="a3po needs lag"):
        policy_loss("a3po", x, x, x, x)
    with pytest.raises(ValueError, match=r"lag \(2, 1\)"):
        policy_loss("a3po", x, x, x, x, lag=x[:, :1])
    with pytest.raises(ValueError, match="clip_cov needs generator"):
        policy_loss("clip_cov", x, x, x, x)
    with pytest.raises(ValueError, match="unknown option of m2po 'budge'"):
        policy_loss("m2po", x, x, x, x, chosen=x > 0, budge=0.1)
    with pytest.raises(ValueError, match="vanilla has token scope"):
        prepare("vanilla", x, x, x, x)
    with pytest.raises(ValueError, match=r"advantages \(2, 1\)"):
        policy_loss("vanilla", x, x, x[:, :1], x)
    with pytest.raises(ValueError, match=r"must be \[B, T\]"):
        policy_loss("vanilla", x[0], x[0], x[0], x[0])
    with pytest.raises(ValueError, match=r"weights \(3,\)"):
        policy_loss("vanilla", x, x, x, x, weights=x[0])
    with pytest.raises(ValueError, match=r"positive \(3,\) must be \[B\] with B = 2"):
        policy_loss("topr", x, x, x, x, positive=x[0])


def test_the_table_is_complete_enough_to_make_docs_from() -> None:
    for name, method in POLICY_LOSSES.items():
        doc = method.loss.__doc__ or ""
        assert "(" in doc.splitlines()[0] and "Use this loss " in doc, name
        assert all(f"\n    {label}: " in doc for label in ("Trust region", "Importance", "Against")), name
        assert (method.choose is not None) == (method.scope == "batch")
    assert POLICY_LOSSES["clip_cov"].settings == ("clip_low", "clip_high", "cov_low", "cov_high", "cov_fraction")


def test_a_choice_that_was_cut_wrongly_is_refused() -> None:
    x, ones = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"chosen \(1, 3\)"):
        policy_loss("kl_cov", x, x, ones, ones, chosen=torch.zeros(1, 3, dtype=torch.bool))


@pytest.mark.parametrize("name", ["vanilla", "gspo", "m2po"])
def test_a_global_batch_of_which_nothing_is_left_is_zero(name: str) -> None:
    x, none = torch.zeros(2, 3), torch.zeros(2, 3)
    loss, metrics = policy_loss(name, x, x, x, none, n_tokens=0, n_sequences=0)
    assert loss.item() == 0 and all(value.isfinite().all() for value in metrics.values())
