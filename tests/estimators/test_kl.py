"""KL terms by exact enumeration on a small vocabulary; controllers and guards by hand."""

import math

import pytest
import torch
from torch import Tensor

from slipstream.estimators.auxiliary import kl_loss, kl_reward
from slipstream.estimators.divergence import kl_estimate
from slipstream.objective.coefficients import adaptive_beta, ascended

V = 5


def policies(stale: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy (a leaf), log-probs of the policy that drew, and of the reference."""
    g = torch.Generator().manual_seed(2)
    theta, old, ref = (torch.randn(V, generator=g, dtype=torch.float64) for _ in range(3))
    return theta.requires_grad_(), (old if stale else theta.detach()).log_softmax(-1), ref.log_softmax(-1)


def gradient_of_kl(theta: Tensor, ref: Tensor, *, forward: bool = False) -> Tensor:
    logp = theta.log_softmax(-1)
    kl = (ref.exp() * (ref - logp)).sum() if forward else (logp.exp() * (logp - ref)).sum()
    return torch.autograd.grad(kl, theta)[0]


def expected_gradient(theta: Tensor, old: Tensor, ref: Tensor, *, corrected: bool, kind: str | None = None) -> Tensor:
    """Σ_a p_old(a)·∇ of the loss of a batch that is the one token a."""
    total = torch.zeros_like(theta)
    for a in range(V):
        logp, mask = theta.log_softmax(-1)[a].reshape(1, 1), torch.ones(1, 1)
        logp_old = old[a].reshape(1, 1) if corrected else None
        loss, _ = kl_loss(logp, ref[a].reshape(1, 1), mask, logp_old=logp_old, kind=kind)
        total += old[a].exp() * torch.autograd.grad(loss, theta)[0]
    return total


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("stale", [False, True])
def test_corrected_k3_has_the_gradient_of_the_kl_whoever_drew(stale: bool) -> None:
    theta, old, ref = policies(stale)
    assert close(expected_gradient(theta, old, ref, corrected=True), gradient_of_kl(theta, ref))


@pytest.mark.parametrize("stale", [-30.0, -2.0, 0.0, 2.0, 30.0])
def test_corrected_k3_never_pushes_away_from_the_reference(stale: float) -> None:
    """r·(log π − log π_ref) at every distance, far beyond the ratio of 13.6 at which the value is clamped."""
    logp = torch.linspace(-40, 0, 2001, dtype=torch.float64)[None].requires_grad_()
    old = logp.detach() - stale
    for reference in (-40.0, -2.0, 0.0):
        loss, _ = kl_loss(logp, torch.full_like(old, reference), torch.ones_like(old), logp_old=old, agg="token-sum")
        exact = math.exp(max(-20, min(20, stale))) * (logp.detach() - reference)
        torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], exact, rtol=1e-12, atol=1e-12)


def test_a_clamped_k3_by_hand() -> None:
    """log π = −4.7 against −2: r = e^−2.7, and k3 = e^2.7 − 3.7 = 11.2 counts as 10; the gradient is r·(−2.7)."""
    logp, ref = torch.tensor([[-4.7]], dtype=torch.float64).requires_grad_(), torch.tensor([[-2.0]])
    loss, _ = kl_loss(logp, ref, torch.ones(1, 1), logp_old=ref)
    assert loss.item() == pytest.approx(10 * math.exp(-2.7))
    assert torch.autograd.grad(loss, logp)[0].item() == pytest.approx(-2.7 * math.exp(-2.7))


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_the_kind_of_a_corrected_term_is_that_of_its_value(kind: str) -> None:
    theta, old, ref = policies(stale=True)
    assert close(expected_gradient(theta, old, ref, corrected=True, kind=kind), gradient_of_kl(theta, ref))
    logp = theta.detach().log_softmax(-1)[:, None]
    loss, _ = kl_loss(logp, ref[:, None], torch.ones(V, 1), logp_old=old[:, None], kind=kind, agg="token-sum")
    torch.testing.assert_close(loss, ((logp[:, 0] - old).exp() * kl_estimate(logp[:, 0], ref, kind=kind)).sum())


def test_the_ratio_of_corrected_k3_has_to_carry_its_gradient() -> None:
    """With sg(r) the expectation of r·∇k3 is the gradient of KL(ref‖π): another direction, still 0 at π = ref."""
    theta, old, ref = policies(stale=True)
    logp = theta.log_softmax(-1)
    weighted = old.exp() * (logp - old).exp().detach() * ((ref - logp).exp() - (ref - logp) - 1)
    assert close(torch.autograd.grad(weighted.sum(), theta)[0], gradient_of_kl(theta, ref, forward=True))


def test_k2_has_it_on_policy_only_and_plain_k3_has_that_of_the_forward_kl() -> None:
    theta, old, ref = policies(stale=False)
    assert close(expected_gradient(theta, old, ref, corrected=False), gradient_of_kl(theta, ref))
    assert close(
        expected_gradient(theta, old, ref, corrected=False, kind="k3"), gradient_of_kl(theta, ref, forward=True)
    )
    assert (gradient_of_kl(theta, ref, forward=True) - gradient_of_kl(theta, ref)).abs().max() > 0.05
    theta, old, ref = policies(stale=True)
    assert (expected_gradient(theta, old, ref, corrected=False) - gradient_of_kl(theta, ref)).abs().max() > 0.05


def test_k1_in_the_reward_becomes_the_gradient_of_the_kl() -> None:
    """A = r − β k1 with r = 0: Σ_a p(a)·A ∇log p = −β ∇KL."""
    theta, old, ref = policies(stale=False)
    logp = theta.log_softmax(-1)[:, None]
    rewards, metrics = kl_reward(torch.zeros(V, 1), logp, ref[:, None], torch.ones(V, 1), beta=0.3)
    assert not rewards.requires_grad
    (found,) = torch.autograd.grad((old.exp()[:, None] * rewards * logp).sum(), theta)
    assert close(found, -0.3 * gradient_of_kl(theta, ref))
    torch.testing.assert_close(metrics["kl_reward"], (logp.detach()[:, 0] - ref).mean())


@pytest.mark.parametrize(
    ("kind", "charged"),
    [("k1", -3.0), ("kl", -3.0), ("abs", 3.0), ("k2", 4.5), ("mse", 4.5), ("k3", 10.0), ("low_var_kl", 10.0)],
)
def test_only_k1_in_the_reward_rewards_what_the_reference_likes_better(kind: str, charged: float) -> None:
    """log π − log π_ref = −3: the others are a price of any difference. (k3 = e³ − 4 counts as 10.)"""
    x, one = torch.zeros(1, 1), torch.ones(1, 1)
    rewards, metrics = kl_reward(x, x - 3, x, one, beta=0.1, kind=kind)
    assert rewards.item() == pytest.approx(-0.1 * charged) and metrics["kl_reward"].item() == pytest.approx(charged)


def test_six_tokens_by_hand() -> None:
    """log p − log ref = 0, ln 2, −ln 2 and ln 2, 0, 0; the last position is masked."""
    p = torch.tensor([[0.5, 0.5, 0.25], [0.5, 0.1, math.nan]], dtype=torch.float64).log()
    ref = torch.tensor([[0.5, 0.25, 0.5], [0.25, 0.1, math.nan]], dtype=torch.float64).log()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    ln2 = math.log(2)
    p.requires_grad_()
    loss, metrics = kl_loss(p, ref, mask)
    assert loss.item() == metrics["kl_loss"].item() == pytest.approx(3 * ln2**2 / 2 / 5)
    expected = torch.tensor([[0, ln2, -ln2], [ln2, 0, 0]], dtype=torch.float64) / 5
    torch.testing.assert_close(torch.autograd.grad(loss, p)[0], expected)

    # twice as likely as when they were drawn: r = 2; k3 = e^u − u − 1 with u = −ln 2, ln 2, −ln 2
    k3 = 2 * (ln2 - 0.5) + (1 - ln2)
    loss, _ = kl_loss(p, ref, mask, logp_old=p.detach() - ln2, agg="token-sum")
    assert loss.item() == pytest.approx(2 * k3)

    rewards, metrics = kl_reward(torch.ones(2, 3), p, ref, mask, beta=0.1)
    expected = 1 - 0.1 * torch.tensor([[0, ln2, -ln2], [ln2, 0, 10]], dtype=torch.float64)
    torch.testing.assert_close(rewards, expected)
    assert metrics["kl_reward"].item() == pytest.approx(ln2 / 5)


def test_token_scope_a_batch_cut_anywhere_adds_up_with_global_counts() -> None:
    g = torch.Generator().manual_seed(0)
    p, ref, old = (-torch.rand(4, 3, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]])
    whole, _ = kl_loss(p, ref, mask, logp_old=old)
    rewards, _ = kl_reward(old, p, ref, mask, beta=0.1)
    for cut in ((slice(0, 1), slice(1, 4)), ((slice(None), slice(0, 1)), (slice(None), slice(1, 3)))):
        parts = [kl_loss(p[at], ref[at], mask[at], logp_old=old[at], n_tokens=6)[0] for at in cut]
        torch.testing.assert_close(sum(parts), whole)
        assert all(torch.equal(kl_reward(old[at], p[at], ref[at], mask[at], beta=0.1)[0], rewards[at]) for at in cut)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_impossible_and_certain_tokens_stay_finite(dtype: torch.dtype) -> None:
    edge = torch.tensor([-math.inf, -1e4, -1e-9, 0.0])
    p, ref = (x.reshape(4, 4).to(dtype) for x in torch.cartesian_prod(edge, edge).T)
    p.requires_grad_()
    for old, kind in ((None, None), (ref, None), (p, None), (ref, "k1"), (None, "abs"), (None, "k3+")):
        loss, _ = kl_loss(p, ref, torch.ones(4, 4), logp_old=old, kind=kind)
        assert loss.isfinite() and torch.autograd.grad(loss, p)[0].isfinite().all()
    assert kl_reward(torch.zeros(4, 4), p, ref, torch.ones(4, 4), beta=1.0)[0].isfinite().all()
    loss, _ = kl_loss(p, ref, torch.zeros(4, 4))
    assert loss.item() == 0 and (torch.autograd.grad(loss, p)[0] == 0).all()


def test_mistakes_are_named() -> None:
    x = torch.zeros(2, 3)
    for kind in ("k1", "kl"):
        with pytest.raises(ValueError, match="without the reference in it: use k2"):
            kl_loss(x, x, x, kind=kind)
    with pytest.raises(ValueError, match="unknown .*'k4'.*k3"):
        kl_loss(x, x, x, kind="k4")
    with pytest.raises(ValueError, match=r"logp_ref \(2, 2\)"):
        kl_loss(x, x[:, :2], x)
    with pytest.raises(ValueError, match=r"logp_old \(2, 2\)"):
        kl_loss(x, x, x, logp_old=x[:, :2])
    with pytest.raises(ValueError, match=r"rewards \(3,\)"):
        kl_reward(x[0], x, x, x, beta=0.1)


# --- controllers and guards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.1, 1.0),
        (0.11, 1 + 0.1 * 0.05),  # 10 % above target, 50 of 1000 samples
        (0.5, 1 + 0.2 * 0.05),  # at most 20 %
        (0.0, 1 - 0.2 * 0.05),
    ],
)
def test_adaptive_beta_by_hand(kl: float, factor: float) -> None:
    assert adaptive_beta(beta=0.3, kl=kl, samples=50, target=0.1, horizon=1000) == pytest.approx(0.3 * factor)


def test_dual_ascent_by_hand() -> None:
    assert ascended(coefficient=0.04, value=0.015, bound=0.01, step=2.0) == pytest.approx(0.05)
    assert ascended(coefficient=0.04, value=0.0, bound=0.01, step=2.0) == pytest.approx(0.02)
    assert ascended(coefficient=0.01, value=0.0, bound=0.01, step=2.0) == 0


def test_dual_ascent_after_an_outlier_needs_one_update_without_variance_to_return() -> None:
    """A ratio of e^8 at one of a thousand tokens: (e^8)²/1000 is near 9000."""
    raised = ascended(coefficient=0.04, value=9000.0, bound=0.01, step=2.0)
    assert raised == pytest.approx(0.06)
    assert ascended(coefficient=raised, value=0.0, bound=0.01, step=2.0) == pytest.approx(0.04)


def test_adaptive_beta_refuses_what_could_turn_its_sign() -> None:
    with pytest.raises(ValueError, match="horizon 10 above"):
        adaptive_beta(beta=0.3, kl=0.0, samples=50, target=0.1, horizon=10)
    with pytest.raises(ValueError, match="target 0"):
        adaptive_beta(beta=0.3, kl=0.0, samples=50, target=0, horizon=1000)


def test_weights_of_drawn_samples_multiply_the_kl_and_not_its_metric() -> None:
    """k2 of ln 2 in both rows is ln²2 / 2; its derivative by log π is ln 2. Weights are 1 and ¼, over two tokens."""
    logp = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    ref, mask, ln2 = torch.full_like(logp, -math.log(2)), torch.ones_like(logp), math.log(2)
    loss, metrics = kl_loss(logp, ref, mask, weights=torch.tensor([[1.0], [0.25]]))
    assert loss.item() == pytest.approx(1.25 * ln2**2 / 2 / 2) and metrics["kl_loss"].item() == pytest.approx(
        ln2**2 / 2
    )
    loss.backward()
    assert logp.grad is not None and logp.grad.flatten().tolist() == pytest.approx([ln2 / 2, ln2 / 8])


def test_a_draw_by_priority_with_its_weight_is_the_kl_of_all_samples_on_average() -> None:
    """Sample i of three is drawn with probability p_i and weight 1 / (3 p_i): the expected gradient is their mean's."""
    logp_B1 = torch.tensor([[-0.3], [-1.2], [-2.0]], dtype=torch.float64, requires_grad=True)
    old_B1, ref_B1 = torch.tensor([[-0.5], [-1.0], [-1.1]]).double(), torch.tensor([[-0.9], [-0.2], [-1.5]]).double()
    chances, mask_B1 = [0.6, 0.3, 0.1], torch.ones_like(logp_B1)
    loss, _ = kl_loss(logp_B1, ref_B1, mask_B1, logp_old=old_B1)
    (expected,) = torch.autograd.grad(loss, logp_B1)
    found = torch.zeros_like(expected)
    for i, chance in enumerate(chances):
        drawn, weights = torch.eye(3, dtype=torch.float64)[:, [i]], torch.full_like(mask_B1, 1 / (3 * chance))
        loss, _ = kl_loss(logp_B1, ref_B1, drawn, logp_old=old_B1, weights=weights, n_tokens=1)
        found += chance * torch.autograd.grad(loss, logp_B1)[0]
    torch.testing.assert_close(found, expected)
