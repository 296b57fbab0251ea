"""Distillation estimators by exact enumeration on a small vocabulary, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from slipstream.estimators.aggregate import aggregate
from slipstream.estimators.divergence import dense, forward_kl_topk
from slipstream.estimators.surrogate import mc_reverse_kl

V = 5


def three_policies(stale: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the student (a leaf), and log-probs of the behaviour policy and the teacher."""
    torch.manual_seed(1)
    theta = torch.randn(V, dtype=torch.float64).requires_grad_()
    old = torch.randn(V, dtype=torch.float64) if stale else theta.detach().clone()
    return theta, old.log_softmax(-1), torch.randn(V, dtype=torch.float64).log_softmax(-1)


def dense_gradient(theta: Tensor, logq: Tensor) -> Tensor:
    return torch.autograd.grad(dense(theta.log_softmax(-1)[None], logq[None], kind="reverse").sum(), theta)[0]


def expected_gradient(theta: Tensor, old: Tensor, logq: Tensor, *, m: int = 1, **options: object) -> Tensor:
    """Σ over all m-tuples of draws of their probability times the estimator's gradient."""
    total = torch.zeros_like(theta)
    for draws in itertools.product(range(V), repeat=m):
        ids = torch.tensor(draws)
        logp = theta.log_softmax(-1)[ids][None]
        loss, _ = mc_reverse_kl(logp, old[ids][None], logq[ids][None], **options)  # type: ignore[arg-type]
        total += old[ids].sum().exp() * torch.autograd.grad(loss.sum(), theta)[0]
    return total


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("stale", [False, True])
def test_current_without_clip_has_the_dense_gradient_whoever_drew(m: int, stale: bool) -> None:
    theta, old, logq = three_policies(stale)
    found = expected_gradient(theta, old, logq, m=m)
    torch.testing.assert_close(found, dense_gradient(theta, logq), atol=1e-8, rtol=0)


@pytest.mark.parametrize("advantage", ["current", "behavior"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_all_four_variants_agree_on_policy(advantage: str, clip: float | None) -> None:
    theta, old, logq = three_policies(stale=False)
    found = expected_gradient(theta, old, logq, advantage=advantage, clip=clip)
    torch.testing.assert_close(found, dense_gradient(theta, logq), atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    "options", [{"advantage": "behavior"}, {"clip": 0.2}, {"importance": False}, {"ratio_cap": 1.1}]
)
def test_the_others_are_biased_when_stale(options: dict[str, object]) -> None:
    theta, old, logq = three_policies(stale=True)
    bias = expected_gradient(theta, old, logq, **options) - dense_gradient(theta, logq)
    assert bias.abs().max() > 0.02


def test_expected_loss_is_the_reverse_kl() -> None:
    theta, old, logq = three_policies(stale=True)
    logp = theta.log_softmax(-1)
    loss, _ = mc_reverse_kl(logp[:, None], old[:, None], logq[:, None])
    kl = dense(logp[None], logq[None], kind="reverse")
    torch.testing.assert_close((old.exp() * loss).sum(), kl.sum())


@pytest.mark.parametrize("m", [1, 4, 16, 64])
def test_variance_of_the_loss_falls_as_one_over_m(m: int) -> None:
    theta, old, logq = three_policies(stale=True)
    generator = torch.Generator().manual_seed(m)
    one = mc_reverse_kl(theta.log_softmax(-1)[:, None], old[:, None], logq[:, None])[0].detach()
    exact = (old.exp() * one**2).sum() - (old.exp() * one).sum() ** 2
    ids = torch.multinomial(old.exp().expand(20_000, V), m, replacement=True, generator=generator)
    logp = theta.detach().log_softmax(-1)
    loss, _ = mc_reverse_kl(logp[ids], old[ids], logq[ids])
    assert loss.var().item() == pytest.approx(exact.item() / m, rel=0.06)


@pytest.mark.parametrize("stale", [False, True])
def test_student_equal_to_teacher_is_at_rest_with_current_only(stale: bool) -> None:
    theta, old, _ = three_policies(stale)
    logq = theta.detach().log_softmax(-1)
    for a in range(V):
        loss, _ = mc_reverse_kl(theta.log_softmax(-1)[a : a + 1, None], old[a : a + 1, None], logq[a : a + 1, None])
        assert loss.abs().max() < 1e-15
        assert torch.autograd.grad(loss.sum(), theta)[0].abs().max() < 1e-15
    moved = expected_gradient(theta, old, logq, advantage="behavior").abs().max()
    assert moved > 0.01 if stale else moved < 1e-12


def test_capped_draws_keep_a_gradient_and_clipped_ones_do_not() -> None:
    """ρ = e² for a draw that the teacher likes better than the student: 0.5·sg(A)·∇log p against nothing."""
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old, logq = torch.tensor([[-3.0]]).double(), torch.tensor([[-0.5]]).double()
    loss, metrics = mc_reverse_kl(logp, old, logq, ratio_cap=1.5)
    torch.testing.assert_close(loss, torch.tensor([-1.5 * 0.5]).double())
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logp)[0], torch.tensor([[-1.5 * 0.5]]).double())
    assert metrics["clip_fraction"].item() == 1.0
    loss, metrics = mc_reverse_kl(logp, old, logq, clip=(0.2, 0.28))
    torch.testing.assert_close(loss, torch.tensor([-1.28 * 0.5]).double())
    assert torch.autograd.grad(loss.sum(), logp)[0].item() == 0.0
    assert metrics["clip_fraction"].item() == 1.0


def test_impossible_and_certain_tokens_stay_finite() -> None:
    logp = torch.tensor([[-torch.inf, 0.0, -1e4]], requires_grad=True)
    old = torch.tensor([[0.0, -1e4, -1e4]])
    logq = torch.tensor([[-torch.inf, -torch.inf, 0.0]])
    for options in ({}, {"clip": 0.2}, {"ratio_cap": 2.0}, {"importance": False}, {"advantage": "behavior"}):
        loss, metrics = mc_reverse_kl(logp, old, logq, **options)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        assert loss.isfinite().all() and gradient.isfinite().all()
        assert all(value.isfinite().all() for value in metrics.values())


def test_options_that_contradict_each_other_are_refused() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="clip and ratio_cap"):
        mc_reverse_kl(x, x, x, clip=0.2, ratio_cap=2.0)
    with pytest.raises(ValueError, match="'current' or 'behavior', got 'old'"):
        mc_reverse_kl(x, x, x, advantage="old")
    with pytest.raises(ValueError, match=r"logq \(2, 1\)"):
        mc_reverse_kl(x, x, torch.zeros(2, 1))


# --- forward KL -------------------------------------------------------------------------------------------------------


def test_forward_kl_on_the_whole_vocabulary_is_the_dense_one() -> None:
    theta, _, logq = three_policies(stale=True)
    logp = theta.log_softmax(-1)[None]
    for options in ({}, {"tail": True}, {"renormalise": True}):
        torch.testing.assert_close(
            forward_kl_topk(logp, logq[None], **options), dense(logp, logq[None], kind="forward")
        )


def test_topk_by_hand() -> None:
    """p = (¼, ¼, ½), q = (½, ¼, ¼), support = the first two tokens."""
    logp = torch.tensor([[0.25, 0.25]]).double().log()
    logq = torch.tensor([[0.5, 0.25]]).double().log()
    ln2 = torch.tensor(2.0).double().log()
    torch.testing.assert_close(forward_kl_topk(logp, logq), 0.5 * ln2[None])
    # the bucket holds ½ of p and ¼ of q: ¼ ln(¼ / ½) more
    torch.testing.assert_close(forward_kl_topk(logp, logq, tail=True), 0.25 * ln2[None])
    # p̃ = (½, ½), q̃ = (⅔, ⅓): ⅔ ln(4/3) + ⅓ ln(2/3)
    expected = torch.tensor([2 / 3, 1 / 3]).double() @ torch.tensor([4 / 3, 2 / 3]).double().log()
    torch.testing.assert_close(forward_kl_topk(logp, logq, renormalise=True), expected[None])


def test_only_the_completed_forms_are_at_rest_when_student_equals_teacher() -> None:
    theta, _, _ = three_policies(stale=True)
    ids = torch.tensor([0, 2])
    logq = theta.detach().log_softmax(-1)[ids][None]

    def gradient(**options: bool) -> float:
        loss = forward_kl_topk(theta.log_softmax(-1)[ids][None], logq, **options).sum()
        return torch.autograd.grad(loss, theta)[0].abs().max().item()

    assert gradient() > 0.05
    assert gradient(tail=True) < 1e-12 and gradient(renormalise=True) < 1e-12


def test_topk_stays_finite_at_the_edges() -> None:
    logp = torch.tensor([[0.0, -torch.inf], [-torch.inf, -1e4]], requires_grad=True)
    logq = torch.tensor([[-torch.inf, 0.0], [0.0, -torch.inf]])
    for options in ({}, {"tail": True}, {"renormalise": True}):
        loss = forward_kl_topk(logp, logq, **options)
        assert loss.isfinite().all() and torch.autograd.grad(loss.sum(), logp)[0].isfinite().all()


def test_tail_and_renormalise_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        forward_kl_topk(torch.zeros(1, 1), torch.zeros(1, 1), tail=True, renormalise=True)


def test_jsd_runs_from_forward_to_reverse() -> None:
    theta, _, logq = three_policies(stale=True)
    logp, logq = theta.log_softmax(-1)[None], logq[None]
    assert torch.equal(dense(logp, logq, kind="jsd", beta=0), dense(logp, logq, kind="forward"))
    assert torch.equal(dense(logp, logq, kind="jsd", beta=1), dense(logp, logq, kind="reverse"))
    m = (0.3 * logq.exp() + 0.7 * logp.exp()).log()
    expected = 0.3 * (logq.exp() * (logq - m)).sum(-1) + 0.7 * (logp.exp() * (logp - m)).sum(-1)
    torch.testing.assert_close(dense(logp, logq, kind="jsd", beta=0.3), expected)


# --- aggregation ------------------------------------------------------------------------------------------------------

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-sum", 1 + 2 + 4),
        ("token-mean", (1 + 2 + 4) / 3),
        ("seq-mean-token-sum", (3 + 4) / 2),  # the empty row does not count
        ("seq-mean-token-sum-norm", (3 + 4) / 2 / 3),
        ("seq-mean-token-mean", (1.5 + 4) / 2),
    ],
)
def test_aggregation_by_hand(mode: str, expected: float) -> None:
    assert aggregate(LOSS, MASK, mode).item() == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"])
def test_a_batch_cut_in_two_with_global_counts_adds_up(mode: str) -> None:
    whole = aggregate(LOSS, MASK, mode)  # type: ignore[arg-type]
    counts = {"n_tokens": 3, "n_sequences": 2}
    parts = [aggregate(LOSS[at], MASK[at], mode, **counts) for at in (slice(0, 1), slice(1, 3))]  # type: ignore[arg-type]
    torch.testing.assert_close(sum(parts), whole)


def test_masked_positions_count_for_nothing_whatever_they_hold() -> None:
    loss = LOSS.clone().masked_fill(MASK == 0, torch.nan).requires_grad_()
    total = aggregate(loss, MASK, "token-mean")
    (gradient,) = torch.autograd.grad(total, loss)
    assert total.isfinite() and (gradient[MASK == 0] == 0).all()


def test_an_empty_batch_is_zero() -> None:
    assert aggregate(LOSS, torch.zeros_like(MASK), "token-mean").item() == 0.0


def test_unknown_aggregation_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown aggregation 'mean'.*token-mean"):
        aggregate(LOSS, MASK, "mean")  # type: ignore[arg-type]
