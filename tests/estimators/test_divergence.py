"""Divergences by hand, against verl's golden vectors, and where their inputs contradict each other."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.estimators.divergence import (
    clamped,
    dense,
    entropy_gated,
    forward_kl_topk,
    generalised_kl_topk,
    kl_estimate,
    overlap_ratio,
    overlap_token_advantage,
    raised,
    ranked,
    reverse_kl_topk,
    shared_and_ranked,
    support_mass,
    with_tail,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures" / "verl_vectors.json").read_text())
LN2, LN3 = torch.tensor([2.0, 3.0]).double().log()


def golden(fn: str) -> list[dict[str, Any]]:
    return [case for case in GOLDEN["cases"] if case["fn"] == fn]


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Tensor, wanted: object) -> None:
    torch.testing.assert_close(found, double(wanted), atol=1e-8, rtol=0)


def logs(*rows: list[float]) -> Tensor:
    return double(rows).log()


# --- one drawn token --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("kl_estimate"), ids=lambda case: case["kind"])
def test_kl_estimates_are_verls(case: dict[str, Any]) -> None:
    logp, logq = double(GOLDEN["inputs"]["logp"]).requires_grad_(), double(GOLDEN["inputs"]["logp_old"])
    value = kl_estimate(logp, logq, kind=case["kind"])
    close(value, case["value"])
    close(torch.autograd.grad(value.sum(), logp)[0], case["grad"])


def test_kl_estimates_by_hand() -> None:
    """p = ½ and q = ¼, then the reverse: log p − log q = ±ln 2 and q/p = ½, 2."""
    p, q = torch.tensor([0.5, 0.25]).double(), torch.tensor([0.25, 0.5]).double()
    ln2 = LN2.item()
    values = {
        "k1": [ln2, -ln2],
        "abs": [ln2, ln2],
        "k2": [ln2**2 / 2, ln2**2 / 2],
        "k3": [0.5 - 1 + ln2, 2 - 1 - ln2],
        "k1+": [ln2, -ln2],
        "k3+": [0.5 - 1 + ln2, 2 - 1 - ln2],
    }
    slopes = {"k1": [1, 1], "abs": [1, -1], "k2": [ln2, -ln2], "k3": [0.5, -1], "k1+": [ln2, -ln2], "k3+": [ln2, -ln2]}
    for kind, value in values.items():
        logp = p.log().requires_grad_()
        found = kl_estimate(logp, q.log(), kind=kind)
        close(found, value)
        close(torch.autograd.grad(found.sum(), logp)[0], slopes[kind])


def test_aliases_are_the_estimators_they_name() -> None:
    logp, logq = logs([0.5, 0.1]), logs([0.3, 0.6])
    for alias, kind in {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.items():
        assert torch.equal(kl_estimate(logp, logq, kind=alias), kl_estimate(logp, logq, kind=kind))


def test_the_value_of_k3_is_clamped_at_ten_and_its_gradient_is_not() -> None:
    """u = 3: e³ − 4 = 16.1, clamped; slope 1 − e³. u = −30: clamped to −20, e⁻²⁰ + 19, clamped; slope 1 − e⁻²⁰."""
    logp = double([-4.0, 0.0]).requires_grad_()
    value = kl_estimate(logp, double([-1.0, -30.0]), kind="k3")
    close(value, [10.0, 10.0])
    close(torch.autograd.grad(value.sum(), logp)[0], [1 - math.exp(3), 1 - math.exp(-20)])


@pytest.mark.parametrize("kind", ["k2", "k3", "k1+", "k3+"])
def test_a_loss_on_one_token_pulls_to_the_teacher_at_every_distance(kind: str) -> None:
    """Where the student is below it, up; where it is above, down: in the whole range, clamps or not."""
    logp = torch.linspace(-60, 0, 3001, dtype=torch.float64).requires_grad_()
    gap = logp.detach() + 30
    (slope,) = torch.autograd.grad(kl_estimate(logp, torch.full_like(gap, -30.0), kind=kind).sum(), logp)
    exact = 1 - torch.exp(-gap.clamp(-20, 20)) if kind == "k3" else gap
    torch.testing.assert_close(slope, exact, rtol=1e-12, atol=1e-12)
    assert torch.equal(slope.sign(), gap.sign())


def test_the_floor_under_log_probs_stops_no_gradient() -> None:
    """A token the student has given up counts as e^−10000, and the forward KL still asks for it back, by q."""
    logp = double([[-2e4, 0.0], [-math.inf, 0.0]]).requires_grad_()
    value = forward_kl_topk(logp, logs([0.25, 0.75], [0.25, 0.75]))
    assert value.tolist() == pytest.approx([2500 + 0.25 * math.log(0.25) + 0.75 * math.log(0.75)] * 2)
    close(torch.autograd.grad(value.sum(), logp)[0], [[-0.25, -0.75]] * 2)


def test_wrong_kinds_are_named_with_the_nearest() -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="unknown KL estimate 'k3\\+\\+': choose one of k1, .*did you mean 'k3\\+'"):
        kl_estimate(x, x, kind="k3++")
    with pytest.raises(ValueError, match="'revers': choose one of forward, reverse, jsd; did you mean 'reverse'"):
        dense(x[None], x[None], kind="revers")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\], got 2"):
        dense(x[None], x[None], kind="jsd", beta=2)
    with pytest.raises(ValueError, match=r"logp \(2,\), logq \(1, 2\)"):
        kl_estimate(x, x[None], kind="k1")


# --- a support --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", golden("forward_kl_topk"))
def test_forward_kl_topk_and_masses_are_verls(case: dict[str, Any]) -> None:
    logits = double(case["student_logits"]).requires_grad_()
    ids, logq = torch.tensor(case["teacher_ids"]).flatten(0, 1), double(case["teacher_logp"]).flatten(0, 1)
    logp = logits.flatten(0, 1).log_softmax(-1).gather(1, ids)
    value = forward_kl_topk(logp, logq)
    close(value.view(logits.shape[:2]), case["value"])
    close(torch.autograd.grad(value.sum(), logits)[0], case["grad"])
    masses = support_mass(logp, logq)
    for name in ("student_mass", "teacher_mass"):
        for suffix in ("", "_min", "_max"):
            close(masses[name + suffix].view(logits.shape[:2]), case[name])
    assert not masses["student_mass"].requires_grad


def test_forward_kl_topk_by_hand() -> None:
    """p = (¼, ¼, ½), q = (½, ¼, ¼), support = the first two tokens."""
    logp, logq = logs([0.25, 0.25]), logs([0.5, 0.25])
    close(forward_kl_topk(logp, logq), [LN2 / 2])
    # the bucket holds ½ of p and ¼ of q: ¼ ln(¼ / ½) more
    close(forward_kl_topk(logp, logq, tail=True), [LN2 / 4])
    # p̃ = (½, ½), q̃ = (⅔, ⅓): ⅔ ln(4/3) + ⅓ ln(2/3) = (5/3) ln 2 − ln 3
    close(forward_kl_topk(logp, logq, renormalise=True), [5 / 3 * LN2 - LN3])


def test_reverse_kl_topk_by_hand() -> None:
    """p = (½, ¼, ¼), q = (¼, ¼, ½), support = the first two tokens, p_old = (¼, ½, ¼)."""
    logp, logq, old = logs([0.5, 0.25]), logs([0.25, 0.25]), logs([0.25, 0.5])
    close(reverse_kl_topk(logp, logq, renormalise=False), [LN2 / 2])
    # the bucket: ¼ ln(¼ / ½) more
    close(reverse_kl_topk(logp, logq, tail=True, renormalise=False), [LN2 / 4])
    # p̃ = (⅔, ⅓), q̃ = (½, ½): ⅔ ln(4/3) + ⅓ ln(2/3)
    close(reverse_kl_topk(logp, logq), [5 / 3 * LN2 - LN3])
    # plain: p̃_old = (⅓, ⅔), Ã = (ln ¾, ln 3/2): −⅓ ln ¾ ln ⅔ − ⅔ ln 3/2 ln ⅓
    plain = -(LN3 - 2 * LN2) * (LN2 - LN3) / 3 + (LN3 - LN2) * LN3 * 2 / 3
    close(reverse_kl_topk(logp, logq, behavior_logp=old), [plain])


def test_a_detached_mass_changes_the_gradient_alone() -> None:
    """p (log p − log q) for each id, without the p that the mass adds; 0 where both models agree."""
    p, logq = double([[0.5, 0.25]]), logs([0.25, 0.5])
    logp = p.log().requires_grad_()
    value = reverse_kl_topk(logp, logq, renormalise=False, detach_mass=True)
    torch.testing.assert_close(value, reverse_kl_topk(logp, logq, renormalise=False))
    close(torch.autograd.grad(value.sum(), logp)[0], [[0.5 * LN2, -0.25 * LN2]])
    agreed = logq.clone().requires_grad_()
    loss = reverse_kl_topk(agreed, logq, renormalise=False, detach_mass=True)
    close(torch.autograd.grad(loss.sum(), agreed)[0], [[0.0, 0.0]])


def test_the_generalised_kl_by_hand() -> None:
    """p = (½, ⅛), q = (¼, ¼) on two of many ids: ½ ln 2 − ½ + ¼ + ⅛ ln ½ − ⅛ + ¼ = (3 ln 2 − 1)/8."""
    logp, logq = logs([0.5, 0.125]).requires_grad_(), logs([0.25, 0.25])
    value = generalised_kl_topk(logp, logq)
    close(value, [(3 * math.log(2) - 1) / 8])
    (slope,) = torch.autograd.grad(value.sum(), logp)
    close(slope, [[0.5 * math.log(2), -0.125 * math.log(2)]])  # p (log p − log q)


def test_the_generalised_kl_is_least_where_both_agree_on_the_support() -> None:
    """The truncated reverse KL is not: there its gradient still pushes mass out of the support."""
    logq = torch.randn(20, 30, dtype=torch.float64).log_softmax(-1)[:, :5]
    for found, still in ((generalised_kl_topk, True), (lambda p, q: reverse_kl_topk(p, q, renormalise=False), False)):
        logp = logq.clone().requires_grad_()
        (slope,) = torch.autograd.grad(found(logp, logq).sum(), logp)
        assert bool((slope.abs() < 1e-12).all()) is still
    others = torch.randn(20, 30, dtype=torch.float64).log_softmax(-1)[:, :5]
    assert (generalised_kl_topk(others, logq) > 0).all()
    whole, wholeq = (torch.randn(9, 7, dtype=torch.float64).log_softmax(-1) for _ in "pq")
    torch.testing.assert_close(generalised_kl_topk(whole, wholeq), dense(whole, wholeq, kind="reverse"))


def test_forward_kl_is_added_where_the_teacher_is_unsure() -> None:
    """H(½, ½) = ln 2 = 0.69 and H(1/8, 7/8) = 0.38; KLs by `dense`. With a tail, (½, ¼) has H = 1.04."""
    logp, logq = logs([0.25, 0.75], [0.25, 0.75]), logs([0.5, 0.5], [0.125, 0.875])
    reverse, forward = (dense(logp, logq, kind=kind) for kind in ("reverse", "forward"))  # type: ignore[arg-type]
    value, metrics = entropy_gated(logp, logq, threshold=0.5, forward=2.0)
    torch.testing.assert_close(value, reverse + double([2.0, 0.0]) * forward)
    assert metrics["unsure"].tolist() == [1.0, 0.0]
    for threshold, unsure in ((0.0, [1.0, 1.0]), (0.7, [0.0, 0.0])):
        assert entropy_gated(logp, logq, threshold=threshold, forward=1.0)[1]["unsure"].tolist() == unsure
    part, partq = logs([0.5, 0.25]), logs([0.5, 0.25])
    for threshold, unsure in ((1.03, [1.0]), (1.05, [0.0])):
        assert entropy_gated(part, partq, threshold=threshold, forward=1.0, tail=True)[1]["unsure"].tolist() == unsure


def test_plain_top_k_by_its_gradient() -> None:
    """−p̃_old Ã at the log p̃ of each token, and through the renormalisation: −p̃_old Ã + p̃ Σ p̃_old Ã."""
    logp = logs([0.5, 0.25]).requires_grad_()
    loss = reverse_kl_topk(logp, logs([0.25, 0.25]), behavior_logp=logs([0.25, 0.5]))
    pulls = double([[1 / 3 * (LN3 - 2 * LN2), 2 / 3 * (LN3 - LN2)]])
    wanted = -pulls + double([[2 / 3, 1 / 3]]) * pulls.sum()
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logp)[0], wanted)


def test_completions_exclude_each_other() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="exclude each other"):
        forward_kl_topk(x, x, tail=True, renormalise=True)
    with pytest.raises(ValueError, match="exclude each other"):
        reverse_kl_topk(x, x, tail=True)
    with pytest.raises(ValueError, match=r"behavior_logp \(1, 2\)"):
        reverse_kl_topk(x, x, behavior_logp=torch.zeros(1, 2))


def test_the_tail_is_the_missing_mass() -> None:
    close(with_tail(logs([0.5, 0.25])).exp(), [[0.5, 0.25, 0.25]])
    full = with_tail(torch.zeros(1, 2))  # more than there is: nothing is left
    assert full[0, -1].item() == pytest.approx(math.log(torch.finfo(torch.float32).tiny))


def test_jsd_runs_from_forward_to_reverse() -> None:
    logp, logq = logs([0.5, 0.3, 0.2]), logs([0.2, 0.2, 0.6])
    assert torch.equal(dense(logp, logq, kind="jsd", beta=0), dense(logp, logq, kind="forward"))
    assert torch.equal(dense(logp, logq, kind="jsd", beta=1), dense(logp, logq, kind="reverse"))
    m = (0.3 * logq.exp() + 0.7 * logp.exp()).log()
    wanted = 0.3 * (logq.exp() * (logq - m)).sum(-1) + 0.7 * (logp.exp() * (logp - m)).sum(-1)
    torch.testing.assert_close(dense(logp, logq, kind="jsd", beta=0.3), wanted)


# --- what the support holds -------------------------------------------------------------------------------------------

STUDENT_IDS = torch.tensor([[7, 3, 1, 9], [1, 2, 3, 4], [4, 3, 2, 1], [5, 6, -1, -1]])
TEACHER_IDS = torch.tensor([[3, 8, 7, 2], [5, 6, 7, 8], [1, 2, 3, 4], [6, 0, -1, -1]])


def test_overlap_counts_shared_ids_and_no_padding() -> None:
    assert overlap_ratio(STUDENT_IDS, TEACHER_IDS).tolist() == [0.5, 0.0, 1.0, 0.25]


def test_overlap_advantage_by_hand() -> None:
    """Row 0 shares its first and third token: −½ ln(½/¼) and −⅛ ln(⅛/¼), their mean (−½ + ⅛) ln 2 / 2."""
    logq = logs([0.5, 0.25, 0.125, 0.125]).expand(4, 4)
    logp = logs([0.25, 0.25, 0.25, 0.25]).expand(4, 4)
    advantage, shared = overlap_token_advantage(STUDENT_IDS, TEACHER_IDS, logp, logq)
    # row 2 shares all four: −½ ln 2 + 2·⅛ ln 2 over 4; row 3 its first only: −½ ln 2
    close(advantage, [-3 / 16 * LN2, 0.0, -1 / 16 * LN2, -LN2 / 2])
    assert shared.tolist() == [True, False, True, True]
    with pytest.raises(ValueError, match="student_ids"):
        overlap_ratio(STUDENT_IDS[:2], TEACHER_IDS)


def test_clamps_of_verl_do_nothing_unless_asked_for() -> None:
    x = torch.tensor([-30.0, -2.0, 4.0])
    assert clamped(x) is x and raised(x) is x
    assert clamped(x, loss_max_clamp=3).tolist() == [-3, -2, 3]
    assert raised(x, log_prob_min_clamp=-10).tolist() == [-10, -2, 4]


def test_a_clamp_gives_no_probability_to_tokens_that_the_teacher_lacks() -> None:
    x = torch.tensor([-torch.inf, -30.0, -2.0])
    assert raised(x, log_prob_min_clamp=-10).tolist() == [-10, -10, -2]
    assert raised(x, log_prob_min_clamp=-10, absent=True).tolist() == [-torch.inf, -10, -2]


def test_two_vocabularies_are_compared_by_rank() -> None:
    """p = ½ ¼ ¼ and q = ¾ ⅛ ⅛ 0: |½ − ¾| + |¼ − ⅛| + |¼ − ⅛| + 0 = ½; the gradient by log p is p times the sign."""
    logp = double([[0.25, 0.5, 0.25]]).log().requires_grad_()
    logq = double([[0.125, 0.75, 0.125, 1e-300]]).log()
    loss = ranked(logp, logq)
    torch.testing.assert_close(loss, double([0.5]))
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(slope, double([[0.25, -0.5, 0.25]]))
    torch.testing.assert_close(ranked(logq, logp.detach()), loss.detach())


def test_shared_tokens_are_compared_exactly_and_others_by_rank() -> None:
    """Tokens 0 and 2 are shared; the student has ½ on its own token 1, the teacher ¼ and ⅛ on two of its own.

    p = ¼, q = ½ and p = ¼, q = ⅛, β = ½: m = ⅜ and 3/16. Half of ½ ln 4/3 + ¼ ln 2/3 + ⅛ ln 2/3 + ¼ ln 4/3.
    By rank |½ − ¼| + |0 − ⅛| = ⅜.
    """
    logp = double([[0.25, 0.5, 0.25]]).log().requires_grad_()
    logq = double([[0.5, 0.0, 0.125, 0.125, 0.25]]).log()
    exact = 0.5 * (0.75 * (2 * LN2 - LN3) + 0.375 * (LN2 - LN3))
    torch.testing.assert_close(shared_and_ranked(logp, logq), (exact + 0.375)[None])
    torch.testing.assert_close(shared_and_ranked(logp, logq, rest=2.0), (exact + 0.75)[None])
    (slope,) = torch.autograd.grad(shared_and_ranked(logp, logq).sum(), logp)
    assert slope.isfinite().all() and slope[0, 1] == 0.5, "less of the token that the teacher does not have"
    same = double([[0.25, 0.5, 0.25]]).log()
    other = double([[0.5, 0.25, 0.25]]).log()
    torch.testing.assert_close(shared_and_ranked(same, other, beta=0.3), dense(same, other, kind="jsd", beta=0.3))
    with pytest.raises(ValueError, match="beta must be above 0"):
        shared_and_ranked(same, other, beta=1.0)
