"""Proofs about the distillation estimators: expectations by exact enumeration of a small vocabulary, in float64.

A surrogate's gradient is −Σ_a w_a ∇log p(a) in expectation, with weights w that can be written down. `direction` turns
weights into that gradient, so every test below says what its estimator follows, and a biased one by how much: the
largest component of the bias, where the largest of the gradient itself is 0.197.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.estimators.divergence import dense, forward_kl_topk, kl_estimate, reverse_kl_topk
from slipstream.estimators.drift import rollout_kl_from_cache
from slipstream.estimators.surrogate import decoupled_ppo, mc_reverse_kl
from support.m2po import m2po

V = 5
WIDE = (1.0, 1e9)
"""A clip that never acts."""
Estimate = Callable[[Tensor, Tensor], Tensor]
"""(log-probs of the student over the vocabulary, ids of the M draws) → their loss."""


STUDENT, BEHAVIOR, PROXIMAL, LOGQ = torch.tensor(
    [
        [0.40, 0.25, 0.20, 0.10, 0.05],
        [0.20, 0.35, 0.10, 0.15, 0.20],
        [0.30, 0.20, 0.30, 0.15, 0.05],
        [0.55, 0.10, 0.15, 0.05, 0.15],  # likes the first and the last token better than the student does
    ],
    dtype=torch.float64,
).log()


def policies(stale: bool) -> tuple[Tensor, Tensor]:
    """Logits of the student (a leaf), and log-probs of the behaviour policy."""
    return STUDENT.clone().requires_grad_(), BEHAVIOR if stale else STUDENT


def dense_gradient(theta: Tensor, kind: str = "reverse", logq: Tensor = LOGQ) -> Tensor:
    return torch.autograd.grad(dense(theta.log_softmax(-1)[None], logq[None], kind=kind).sum(), theta)[0]  # type: ignore[arg-type]


def direction(theta: Tensor, weights_V: Tensor) -> Tensor:
    """−Σ_a w_a ∇log p(a)."""
    return torch.autograd.grad(-(weights_V.detach() * theta.log_softmax(-1)).sum(), theta)[0]


def gradients(estimate: Estimate, theta: Tensor, proposal: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The gradient for every m-tuple of draws, and the tuples' probabilities."""
    tuples = torch.tensor(list(itertools.product(range(V), repeat=m)))
    found = [torch.autograd.grad(estimate(theta.log_softmax(-1), ids), theta)[0] for ids in tuples]
    return torch.stack(found), proposal[tuples].sum(-1).exp()


def expected(estimate: Estimate, theta: Tensor, proposal: Tensor, m: int = 1) -> Tensor:
    found, chance = gradients(estimate, theta, proposal, m)
    return chance @ found


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-8, rtol=0)


def mc(old: Tensor, **options: object) -> Estimate:
    return lambda logp, ids: mc_reverse_kl(logp[ids][None], old[ids][None], LOGQ[ids][None], **options)[0].sum()  # type: ignore[arg-type]


def decoupled(old: Tensor, proximal: Tensor, **options: object) -> Estimate:
    return lambda logp, ids: decoupled_ppo(
        logp[ids][None],
        old[ids][None],
        proximal[ids][None],
        LOGQ[ids][None],
        **options,  # type: ignore[arg-type]
    )[0].sum()


# --- draws of the behaviour policy: whose gradient is it? -------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("stale", [False, True])
def test_current_without_clip_has_the_dense_gradient_whoever_drew(m: int, stale: bool) -> None:
    theta, old = policies(stale)
    same(expected(mc(old), theta, old, m), dense_gradient(theta))


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("stale", [False, True])
def test_a_baseline_of_the_other_draws_keeps_the_expected_gradient(m: int, stale: bool) -> None:
    theta, old = policies(stale)
    same(expected(mc(old, baseline=True), theta, old, m), dense_gradient(theta))


@pytest.mark.parametrize(("near", "less_noise"), [(False, True), (True, False)])
def test_a_baseline_takes_noise_from_a_student_that_is_far_from_its_teacher(near: bool, less_noise: bool) -> None:
    theta, old = policies(stale=True)
    teacher = LOGQ if near else torch.tensor([0.01, 0.01, 0.01, 0.01, 0.96], dtype=torch.float64).log()

    def spread(baseline: bool) -> Tensor:
        def estimate(logp: Tensor, ids: Tensor) -> Tensor:
            columns = [each[ids][None] for each in (logp, old, teacher)]
            return mc_reverse_kl(*columns, baseline=baseline)[0].sum()

        found, chance = gradients(estimate, theta, old, 3)
        centre: Tensor = chance @ found
        return chance @ (found - centre).square().sum(-1)

    assert bool(spread(True) < 0.8 * spread(False)) is less_noise


def test_a_baseline_changes_no_value_and_with_a_cap_removes_what_draws_share() -> None:
    """With capped weights E[w ∇log p] is not 0, so an advantage that all tokens share moves a student without it."""
    theta, old = policies(stale=True)
    ids = torch.tensor([4, 0, 2])
    assert torch.equal(mc(old, baseline=True)(theta.log_softmax(-1), ids), mc(old)(theta.log_softmax(-1), ids))

    def shared(baseline: bool) -> Estimate:
        """All tokens are 1 nat likelier under the teacher than under the student."""
        return lambda logp, ids: mc_reverse_kl(
            logp[ids][None], old[ids][None], logp[ids][None].detach() + 1.0, ratio_cap=1.1, baseline=baseline
        )[0].sum()

    same(expected(shared(True), theta, old, 2), torch.zeros(V, dtype=torch.float64))
    assert expected(shared(False), theta, old, 2).abs().max() > 0.02


@pytest.mark.parametrize("advantage", ["current", "behavior"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_all_four_variants_agree_on_policy(advantage: str, clip: float | None) -> None:
    theta, old = policies(stale=False)
    same(expected(mc(old, advantage=advantage, clip=clip), theta, old), dense_gradient(theta))


def test_the_bias_of_a_behaviour_advantage_is_a_pull_away_from_the_behaviour_policy() -> None:
    """A_old = A_θ + log p_θ/p_old, so its mean gradient is ∇KL(p‖q) − ∇KL(p‖p_old)."""
    theta, old = policies(stale=True)
    bias = expected(mc(old, advantage="behavior"), theta, old) - dense_gradient(theta)
    same(bias, -dense_gradient(theta, logq=old))
    assert dense_gradient(theta).abs().max().item() == pytest.approx(0.1968, abs=1e-4)
    assert bias.abs().max().item() == pytest.approx(0.1885, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({"clip": 0.2}, 0.1958),
        ({"clip": (0.2, 1.5)}, 0.1545),
        ({"ratio_cap": 1.1}, 0.0447),
        ({"importance": False}, 0.1646),
    ],
)
def test_what_clip_cap_and_no_importance_follow_when_stale(options: dict[str, object], bias: float) -> None:
    theta, old = policies(stale=True)
    p, a = theta.log_softmax(-1).exp().detach(), (LOGQ - theta.log_softmax(-1)).detach()
    ratio = p / old.exp()
    match options:
        case {"clip": clip}:
            low, high = clip if isinstance(clip, tuple) else (clip, clip)  # type: ignore[misc]
            silenced = ((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - low))
            weights = p * a * ~silenced
        case {"ratio_cap": cap}:
            weights = old.exp() * ratio.clamp(max=cap) * a  # type: ignore[call-overload]
        case _:
            weights = old.exp() * a
    found = expected(mc(old, **options), theta, old)
    same(found, direction(theta, weights))
    assert (found - dense_gradient(theta)).abs().max().item() == pytest.approx(bias, abs=1e-4)


@pytest.mark.parametrize("stale", [False, True])
def test_decoupled_ppo_with_the_current_advantage_is_the_dense_gradient_while_no_bound_acts(stale: bool) -> None:
    theta, old = policies(stale)
    for proximal in (theta.log_softmax(-1).detach(), PROXIMAL):
        estimate = decoupled(old, proximal, advantage="current", clip=WIDE, weight_cap=math.inf)
        same(expected(estimate, theta, old), dense_gradient(theta))


@pytest.mark.parametrize("advantage", ["behavior", "proximal", "current"])
def test_all_advantages_of_decoupled_ppo_agree_where_nothing_has_moved(advantage: str) -> None:
    theta, old = policies(stale=False)
    same(expected(decoupled(old, old, advantage=advantage), theta, old), dense_gradient(theta))


@pytest.mark.parametrize(("advantage", "bias"), [("behavior", 0.0883), ("proximal", 0.1495), ("current", 0.1272)])
def test_what_decoupled_ppo_follows_when_stale(advantage: str, bias: float) -> None:
    theta, old = policies(stale=True)
    logp = theta.log_softmax(-1).detach()
    a = LOGQ - {"behavior": old, "proximal": PROXIMAL, "current": logp}[advantage]
    ratio, weight = (logp - PROXIMAL).exp(), (PROXIMAL - old).exp()
    silenced = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8)) | (weight > 2)
    found = expected(decoupled(old, PROXIMAL, advantage=advantage, weight_cap=2.0), theta, old)
    same(found, direction(theta, logp.exp() * a * ~silenced))
    assert (found - dense_gradient(theta)).abs().max().item() == pytest.approx(bias, abs=1e-4)


@pytest.mark.parametrize(("budget", "bias"), [(0.15, 0.1042), (math.inf, 0.0)])
def test_m2po_follows_the_dense_gradient_less_what_it_masks(budget: float, bias: float) -> None:
    """One draw is a whole batch here: it is masked where it is harmful and (log ρ)² exceeds the budget."""
    theta, old = policies(stale=True)
    logp = theta.log_softmax(-1).detach()
    a, log_ratio = LOGQ - logp, logp - old
    masked = (a * log_ratio > 0) & (log_ratio**2 > budget)
    found = expected(
        lambda logp, ids: m2po(logp[ids][None], old[ids][None], LOGQ[ids][None], budget=budget)[0].sum(), theta, old
    )
    same(found, direction(theta, logp.exp() * a * ~masked))
    assert (found - dense_gradient(theta)).abs().max().item() == pytest.approx(bias, abs=1e-4)


def test_expected_loss_is_the_reverse_kl() -> None:
    theta, old = policies(stale=True)
    logp = theta.log_softmax(-1)
    loss, _ = mc_reverse_kl(logp[:, None], old[:, None], LOGQ[:, None])
    torch.testing.assert_close((old.exp() * loss).sum(), dense(logp[None], LOGQ[None], kind="reverse").sum())


# --- one drawn token --------------------------------------------------------------------------------------------------


def single(kind: str) -> Estimate:
    return lambda logp, ids: kl_estimate(logp[ids], LOGQ[ids], kind=kind).sum()


def test_which_divergence_the_single_sample_estimators_descend_on_policy() -> None:
    theta, old = policies(stale=False)
    for kind in ("k2", "k1+", "k3+", "mse"):
        same(expected(single(kind), theta, old), dense_gradient(theta))
    for kind in ("k3", "low_var_kl"):
        same(expected(single(kind), theta, old), dense_gradient(theta, "forward"))
    for kind in ("k1", "kl"):
        same(expected(single(kind), theta, old), torch.zeros(V).double())
    same(expected(single("abs"), theta, old), direction(theta, old.exp() * (LOGQ - old).sign()))


def test_stale_draws_bias_the_single_sample_estimators() -> None:
    theta, old = policies(stale=True)
    logp = theta.log_softmax(-1).detach()
    for kind in ("k2", "k1+", "k3+"):
        found = expected(single(kind), theta, old)
        same(found, direction(theta, old.exp() * (LOGQ - logp)))
        assert (found - dense_gradient(theta)).abs().max().item() == pytest.approx(0.1646, abs=1e-4)


def test_which_single_sample_estimators_have_the_reverse_kl_as_their_mean() -> None:
    logp = policies(stale=False)[1]
    kl = dense(logp[None], LOGQ[None], kind="reverse").item()
    means = {kind: (logp.exp() @ kl_estimate(logp, LOGQ, kind=kind)).item() for kind in ("k1", "k3", "k1+", "k3+")}
    assert means == pytest.approx(dict.fromkeys(means, kl), abs=1e-12)
    assert kl == pytest.approx(0.1736, abs=1e-4)
    assert (logp.exp() @ kl_estimate(logp, LOGQ, kind="k2")).item() == pytest.approx(0.1877, abs=1e-4)


def test_rollout_drift_from_the_cache_is_unbiased_in_value_and_gradient() -> None:
    theta, old = policies(stale=True)
    logp = theta.log_softmax(-1)
    value = (old.exp() * rollout_kl_from_cache(logp[:, None], old[:, None])).sum()
    torch.testing.assert_close(value, dense(logp[None], old[None], kind="reverse").sum())
    found = expected(lambda logp, ids: rollout_kl_from_cache(logp[ids][None], old[ids][None]).sum(), theta, old, m=2)
    same(found, dense_gradient(theta, logq=old))


# --- a support --------------------------------------------------------------------------------------------------------

SUPPORT = torch.tensor([0, 1, 3])


@pytest.mark.parametrize("stale", [False, True])
def test_reverse_kl_topk_follows_what_it_says(stale: bool) -> None:
    """Reweighted: −Σ_S p̃_θ Ã ∇log p̃_θ, the gradient of KL(p̃‖q̃). Plain: −Σ_S p̃_old Ã ∇log p̃_θ, the same on-policy."""
    theta, old = policies(stale)
    restricted = theta[SUPPORT].log_softmax(-1)
    a = (LOGQ[SUPPORT].log_softmax(-1) - restricted).detach()

    def follows(weights_K: Tensor) -> Tensor:
        return torch.autograd.grad(-(weights_K.detach() * restricted).sum(), theta, retain_graph=True)[0]

    logp, logq = theta.log_softmax(-1)[SUPPORT][None], LOGQ[SUPPORT][None]
    reweighted = torch.autograd.grad(reverse_kl_topk(logp, logq).sum(), theta, retain_graph=True)[0]
    plain = torch.autograd.grad(reverse_kl_topk(logp, logq, behavior_logp=old[SUPPORT][None]).sum(), theta)[0]
    same(reweighted, follows(restricted.exp() * a))
    same(plain, follows(old[SUPPORT].softmax(-1) * a))
    assert (plain - reweighted).abs().max().item() == pytest.approx(0.0575 if stale else 0.0, abs=1e-4)
    # what lies outside the support stays unseen, fresh or stale
    assert (reweighted - dense_gradient(theta)).abs().max().item() == pytest.approx(0.0946, abs=1e-4)


def test_top_k_forms_on_the_whole_vocabulary_are_the_dense_ones() -> None:
    theta, _ = policies(stale=False)
    logp, logq = theta.log_softmax(-1)[None], LOGQ[None]
    for options in ({"renormalise": False}, {"tail": True, "renormalise": False}, {"renormalise": True}):
        torch.testing.assert_close(forward_kl_topk(logp, logq, **options), dense(logp, logq, kind="forward"))
        torch.testing.assert_close(reverse_kl_topk(logp, logq, **options), dense(logp, logq, kind="reverse"))


# --- variance falls as 1/M --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [2, 3])
def test_variance_of_the_gradient_is_one_over_m_exactly(m: int) -> None:
    theta, old = policies(stale=True)

    def covariance(m: int) -> Tensor:
        found, chance = gradients(mc(old), theta, old, m)
        centred = found - chance @ found
        return (chance[:, None] * centred).T @ centred

    torch.testing.assert_close(covariance(m), covariance(1) / m, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("positions", [1, 7])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 32, 64])
def test_variance_of_the_loss_is_one_over_m(m: int, positions: int) -> None:
    """R_local (one position), and R_fixed: the mean over the positions of one fixed trajectory, all draws redrawn.

    Over n independent redraws the sample variance of a variable with variance v and fourth cumulant κ has the variance
    κ/n + 2v²/(n−1); both are sums over independent draws, divided by (positions·m)² and (positions·m)⁴. Five sigma.
    """
    n, generator = 8_000, torch.Generator().manual_seed(m)
    logp, old, logq = (torch.randn(3, positions, V, generator=generator).double()).log_softmax(-1)
    ones = [x.reshape(-1, 1) for x in (logp, old, logq)]
    value = mc_reverse_kl(*ones)[0].view(positions, V)
    centred = value - (old.exp() * value).sum(-1, keepdim=True)
    second, fourth = ((old.exp() * centred**k).sum(-1) for k in (2, 4))
    v = second.sum().item() * m / (positions * m) ** 2
    cumulant = (fourth - 3 * second**2).sum().item() * m / (positions * m) ** 4

    ids = torch.multinomial(old.exp(), n * m, replacement=True, generator=generator).view(positions, n, m)
    drawn = [x.gather(1, ids.view(positions, -1)).view(-1, m) for x in (logp, old, logq)]
    loss = mc_reverse_kl(*drawn)[0].view(positions, n).mean(0)
    assert abs(loss.var().item() - v) < 5 * math.sqrt(cumulant / n + 2 * v**2 / (n - 1))
