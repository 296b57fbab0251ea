"""Surrogates on draws of the behaviour policy: six tokens by hand, M2PO's mask, and what is refused.

Probabilities are powers of two, so every log is a multiple of L = ln 2 and the expected numbers are in units of L.
"""

import math

import pytest
import torch
from torch import Tensor

from slipstream.estimators.surrogate import decoupled_ppo, m2po_mask, mc_reverse_kl, second_moment_mask
from support.m2po import m2po

LN2 = math.log(2)


def powers(*exponents: float) -> Tensor:
    """Log-probs of 2^exponent, one draw per position."""
    return LN2 * torch.tensor(exponents, dtype=torch.float64)[:, None]


def check(loss: Tensor, logp: Tensor, values: list[float], slopes: list[float]) -> None:
    """Values and gradients, in units of L."""
    torch.testing.assert_close(loss, LN2 * torch.tensor(values, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(gradient[:, 0], LN2 * torch.tensor(slopes, dtype=torch.float64))


# ρ = 1, 2, ½, 2, ½, 1;   A_θ = log q/p = L (1, 1, 1, −1, −1, −1);   A_old = A_θ + log ρ = L (1, 2, 0, 0, −2, −1)
OLD = powers(-3, -3, -3, -3, -3, -3)
STUDENT = powers(-3, -2, -4, -2, -4, -3)
TEACHER = powers(-2, -1, -3, -3, -5, -4)


@pytest.mark.parametrize(
    ("options", "values", "slopes", "bounded"),
    [
        # −ρA
        ({}, [-1, -2, -0.5, 2, 0.5, 1], [-1, -2, -0.5, 2, 0.5, 1], [0, 0, 0, 0, 0, 0]),
        # −min(ρA, clip(ρ)A): 2·1 > 1.2·1 and −½ > −0.8 are clipped, ½·1 and −2 are already the minimum
        ({"clip": 0.2}, [-1, -1.2, -0.5, 2, 0.8, 1], [-1, 0, -0.5, 2, 0, 1], [0, 1, 0, 0, 1, 0]),
        ({"clip": (0.2, 1.5)}, [-1, -2, -0.5, 2, 0.8, 1], [-1, -2, -0.5, 2, 0, 1], [0, 0, 0, 0, 1, 0]),
        # −min(ρ, 1.5)A: the capped ones keep a gradient
        ({"ratio_cap": 1.5}, [-1, -1.5, -0.5, 1.5, 0.5, 1], [-1, -1.5, -0.5, 1.5, 0.5, 1], [0, 1, 0, 1, 0, 0]),
        # −ρA_old
        ({"advantage": "behavior"}, [-1, -4, 0, 0, 1, 1], [-1, -4, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]),
        ({"advantage": "behavior", "clip": 0.2}, [-1, -2.4, 0, 0, 1.6, 1], [-1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 1, 0]),
        # −A log p, and log p = −L (3, 2, 4, 2, 4, 3): one more L in the value
        (
            {"importance": False},
            [3 * LN2, 2 * LN2, 4 * LN2, -2 * LN2, -4 * LN2, -3 * LN2],
            [-1, -1, -1, 1, 1, 1],
            [0, 0, 0, 0, 0, 0],
        ),
    ],
)
def test_mc_reverse_kl_on_six_tokens(
    options: dict[str, object], values: list[float], slopes: list[float], bounded: list[float]
) -> None:
    logp = STUDENT.clone().requires_grad_()
    loss, metrics = mc_reverse_kl(logp, OLD, TEACHER, **options)  # type: ignore[arg-type]
    check(loss, logp, values, slopes)
    assert metrics["clip_fraction"].tolist() == bounded
    torch.testing.assert_close(metrics["ratio"], torch.tensor([1, 2, 0.5, 2, 0.5, 1]).double())
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("advantage", [-3.0, 2.0])
@pytest.mark.parametrize("loss", ["mc_reverse_kl", "capped", "decoupled_ppo", "m2po"])
def test_a_draw_is_pushed_the_way_of_its_advantage_however_far_the_ratio(loss: str, advantage: float) -> None:
    """−ρA, the ratio within e^±20, on a grid to e^±40: beyond the bound, too, a bad draw that became likely is held."""
    logp = torch.linspace(-40, 40, 801, dtype=torch.float64)[:, None].requires_grad_()
    old, logq = torch.zeros_like(logp), logp.detach() + advantage
    match loss:
        case "decoupled_ppo":  # clips far out: the ratio alone
            found, _ = decoupled_ppo(logp, old, old, logq, advantage="current", clip=1e12)
        case "m2po":
            found, _ = m2po(logp, old, logq, budget=math.inf)
        case _:
            found, _ = mc_reverse_kl(logp, old, logq, ratio_cap=9.0 if loss == "capped" else None)
    (slope,) = torch.autograd.grad(found.sum(), logp)
    ratio = logp.detach().clamp(-20, 20).exp().clamp(max=9.0 if loss == "capped" else math.inf)
    torch.testing.assert_close(slope, -ratio * advantage, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [0.5, 1.25, 2.0])
def test_a_scaled_reward_has_the_gradient_of_the_kl_to_the_extrapolated_teacher(scale: float) -> None:
    """By enumeration of all draws of a stale policy: KL(p ‖ q^λ p_ref^(1−λ)/Z), whose Z has no gradient."""
    torch.manual_seed(0)
    old, logq, reference = (torch.randn(1, 6, dtype=torch.float64).log_softmax(-1) for _ in range(3))
    logits = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    target = (scale * logq + (1 - scale) * reference).log_softmax(-1)
    logp = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((logp.exp() * (logp - target)).sum(), logits)
    columns = [x.T for x in (logits.log_softmax(-1), old, logq, reference)]
    loss, _ = mc_reverse_kl(*columns, reward_scale=scale)
    (found,) = torch.autograd.grad((old[0].exp() * loss).sum(), logits)
    torch.testing.assert_close(found, wanted)


def test_a_position_averages_its_draws() -> None:
    """The six tokens as the six draws of one position: (−1 − 2 − ½ + 2 + ½ + 1) L / 6 = 0, each slope over 6."""
    logp = STUDENT.T.clone().requires_grad_()
    loss, metrics = mc_reverse_kl(logp, OLD.T, TEACHER.T)
    assert loss.item() == pytest.approx(0, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(gradient, LN2 / 6 * torch.tensor([[-1, -2, -0.5, 2, 0.5, 1]]).double())
    assert metrics["ratio"].item() == pytest.approx(7 / 6) and metrics["ratio_max"].item() == pytest.approx(2)


# w = p_prox/p_old = 1, 2, 4, 8, 1, ½;   r = p/p_prox = 1, 2, ½, 1, ½, 2;   A_old = L (1, 1, −1, 1, −1, −1)
PROXIMAL = powers(-5 + 0, -5 + 1, -5 + 2, -5 + 3, -5 + 0, -5 - 1)
MOVED = powers(-5, -3, -4, -2, -6, -5)
BEHIND = powers(-5, -5, -5, -5, -5, -5)
TAUGHT = powers(-4, -4, -6, -4, -6, -6)


@pytest.mark.parametrize(
    ("advantage", "values", "slopes"),
    [
        # −w min(rA, clip(r)A): 1·1; 2·min(2, 1.2); 4·min(−½, −0.8); w = 8 is dropped; min(−½, −0.8); ½·min(−2, −1.2)
        ("behavior", [-1, -2.4, 3.2, 0, 0.8, 1], [-1, 0, 0, 0, 0, 1]),
        # A_prox = A_old − log w = L (1, 0, −3, −2, −1, 0)
        ("proximal", [-1, 0, 9.6, 0, 0.8, 0], [-1, 0, 0, 0, 0, 0]),
        # A_θ = A_prox − log r = L (1, −1, −2, −2, 0, −1): 2·min(−2, −1.2); 4·min(−1, −1.6); ½·min(−2, −1.2)
        ("current", [-1, 4, 6.4, 0, 0, 1], [-1, 4, 0, 0, 0, 1]),
    ],
)
def test_decoupled_ppo_on_six_tokens(advantage: str, values: list[float], slopes: list[float]) -> None:
    logp = MOVED.clone().requires_grad_()
    loss, metrics = decoupled_ppo(logp, BEHIND, PROXIMAL, TAUGHT, advantage=advantage)
    check(loss, logp, values, slopes)
    assert metrics["dropped_fraction"].tolist() == [0, 0, 0, 1, 0, 0]
    torch.testing.assert_close(metrics["weight"], torch.tensor([1, 2, 4, 0, 1, 0.5]).double())
    assert not any(value.requires_grad for value in metrics.values())


def test_decoupled_ppo_at_the_behaviour_policy_is_ppo() -> None:
    loss, _ = decoupled_ppo(STUDENT, OLD, OLD, TEACHER, clip=(0.2, 0.3))
    torch.testing.assert_close(loss, mc_reverse_kl(STUDENT, OLD, TEACHER, advantage="behavior", clip=(0.2, 0.3))[0])


# ρ = 1, 4, ½, 2, ½, 1 and A_θ as above: harmful are the second, (log ρ)² = 4L², and the fifth, L²; the mean is 7/6 L²
DRIFTED = powers(-3, -1, -4, -2, -4, -3)
LIKED = powers(-2, 0, -3, -3, -5, -4)


@pytest.mark.parametrize(
    ("budget", "kept", "left", "missed"),
    [
        (1.2, [1, 1, 1, 1, 1, 1], 7 / 6, 0),
        (0.7, [1, 0, 1, 1, 1, 1], 3 / 5, 0),  # without the largest: (0 + 1 + 1 + 1 + 0) / 5
        (0.55, [1, 0, 1, 1, 0, 1], 2 / 4, 0),  # without both: (0 + 1 + 1 + 0) / 4
        (0.4, [1, 0, 1, 1, 0, 1], 2 / 4, 1),  # the harmless ones alone exceed it
    ],
)
def test_m2po_on_six_tokens(budget: float, kept: list[int], left: float, missed: float) -> None:
    logp = DRIFTED.clone().requires_grad_()
    loss, metrics = m2po(logp, OLD, LIKED, budget=budget * LN2**2)
    values = [-1 * kept[0], -4 * kept[1], -0.5 * kept[2], 2 * kept[3], 0.5 * kept[4], 1 * kept[5]]
    check(loss, logp, values, values)
    for name, value in {
        "second_moment_before": 7 / 6 * LN2**2,
        "second_moment": left * LN2**2,
        "budget_missed": missed,
        "masked_fraction": 1 - sum(kept) / 6,
    }.items():
        torch.testing.assert_close(metrics[name], torch.full((6,), value).double())


def test_m2po_leaves_invalid_draws_out_of_mask_mean_and_loss() -> None:
    """If the second token is left out, the mean is 3/5 L², within the budget: the fifth stays. NaN has no effect."""
    logp, old, logq = (x.clone() for x in (DRIFTED, OLD, LIKED))
    for x in (logp, old, logq):
        x[1] = torch.nan
    logp.requires_grad_()
    loss, metrics = m2po(logp, old, logq, mask=torch.tensor([1, 0, 1, 1, 1, 1]), budget=0.7 * LN2**2)
    check(loss, logp, [-1, 0, -0.5, 2, 0.5, 1], [-1, 0, -0.5, 2, 0.5, 1])
    assert (metrics["masked_fraction"] == 0).all() and all(value.isfinite().all() for value in metrics.values())
    nothing, metrics = m2po(logp, old, logq, mask=torch.zeros(6))
    assert (nothing == 0).all() and (torch.autograd.grad(nothing.sum(), logp)[0] == 0).all()
    assert all(value.isfinite().all() for value in metrics.values())


def test_m2po_needs_the_whole_batch_once_and_can_then_be_cut_anywhere() -> None:
    logp = DRIFTED.clone().requires_grad_()
    (whole,) = torch.autograd.grad(m2po(logp, OLD, LIKED, budget=0.7 * LN2**2)[0].sum(), logp)
    keep, _ = m2po_mask(logp, OLD, LIKED, budget=0.7 * LN2**2)

    def cut_at(k: int, frozen: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for at in (slice(0, k), slice(k, 6)):
            options = {"mask": keep[at], "budget": math.inf} if frozen else {"budget": 0.7 * LN2**2}
            total = total + m2po(logp[at], OLD[at], LIKED[at], **options)[0].sum()  # type: ignore[arg-type]
        return torch.autograd.grad(total, logp)[0]

    for k in range(7):
        torch.testing.assert_close(cut_at(k, frozen=True), whole)
    # a part on its own sees another mean, here (1 + 1 + 1 + 0) / 4, and masks the fifth token as well
    assert not torch.equal(cut_at(2, frozen=False), whole)


def test_equal_tokens_leave_together_so_that_order_decides_nothing() -> None:
    """Two harmful tokens with the same ratio: one of them gone would do, but which? Neither is told apart."""
    log_ratio = torch.tensor([2.0, 2.0, 1.0, 0.0, 0.0]).double()
    advantage = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]).double()
    valid = torch.ones(5, dtype=torch.bool)
    keep, metrics = second_moment_mask(log_ratio, advantage, valid, budget=1.5)  # (4 + 1 + 0 + 0) / 4 would be enough
    assert keep.tolist() == [False, False, True, True, True] and metrics["second_moment"].item() == pytest.approx(1 / 3)
    order = torch.tensor([4, 1, 2, 0, 3])
    assert torch.equal(second_moment_mask(log_ratio[order], advantage[order], valid, budget=1.5)[0], keep[order])


def test_a_batch_of_harmful_tokens_only_may_lose_them_all_within_the_budget() -> None:
    keep, metrics = second_moment_mask(
        torch.tensor([0.1, 0.3]), torch.ones(2), torch.ones(2, dtype=torch.bool), budget=0.0
    )
    assert not keep.any() and metrics["budget_missed"].item() == 0 and metrics["second_moment"].item() == 0


def test_unknown_options_and_other_shapes_are_refused() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="'curent': choose one of current, behavior; did you mean 'current'"):
        mc_reverse_kl(x, x, x, advantage="curent")
    with pytest.raises(ValueError, match="choose one of behavior, proximal, current"):
        decoupled_ppo(x, x, x, x, advantage="old")
    with pytest.raises(ValueError, match=r"logq \(2, 1\)"):
        mc_reverse_kl(x, x, torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"proximal_logp \(1, 2\)"):
        decoupled_ppo(x, x, torch.zeros(1, 2), x)
    with pytest.raises(ValueError, match=r"mask \(3,\) must be \[N\] or \[N, M\]"):
        m2po(x, x, x, mask=torch.ones(3))


def test_vectors_are_not_taken_for_one_position() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="two dimensions"):
        mc_reverse_kl(x, x, x)
