"""Laws of all distillation estimators: order, cuts, masks, numerics, and the text of the catalogue."""

import inspect
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.config.losses import DISTILLATION_LOSSES
from slipstream.estimators import divergence, surrogate
from slipstream.estimators.catalogue import catalogue
from slipstream.estimators.divergence import KL_KINDS, dense, forward_kl_topk, kl_estimate, reverse_kl_topk
from slipstream.estimators.drift import rollout_kl_from_cache
from slipstream.estimators.numerics import aggregate, zeroed
from slipstream.estimators.options import formula
from slipstream.estimators.surrogate import decoupled_ppo, m2po_mask, mc_reverse_kl
from slipstream.scope import Scope
from support.m2po import m2po

Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(student, behaviour policy, teacher), log-probs of any [N, M] actions → the loss of each position."""


def single(kind: str) -> Estimator:
    return lambda logp, old, logq: kl_estimate(logp[:, 0], logq[:, 0], kind=kind)


TOKEN_SCOPE: dict[str, Estimator] = {
    "current": lambda logp, old, logq: mc_reverse_kl(logp, old, logq)[0],
    "current, clip": lambda logp, old, logq: mc_reverse_kl(logp, old, logq, clip=(0.2, 0.28))[0],
    "current, cap": lambda logp, old, logq: mc_reverse_kl(logp, old, logq, ratio_cap=2.0)[0],
    "current, baseline": lambda logp, old, logq: mc_reverse_kl(logp, old, logq, baseline=logp.shape[-1] > 1)[0],
    "current, no importance": lambda logp, old, logq: mc_reverse_kl(logp, old, logq, importance=False)[0],
    "behavior": lambda logp, old, logq: mc_reverse_kl(logp, old, logq, advantage="behavior")[0],
    "decoupled, current": lambda logp, old, logq: decoupled_ppo(logp, old, old.roll(1, -1), logq, advantage="current")[
        0
    ],
    "decoupled, behavior": lambda logp, old, logq: decoupled_ppo(logp, old, old.roll(1, -1), logq)[0],
    "dense forward": lambda logp, old, logq: dense(logp, logq, kind="forward"),
    "dense reverse": lambda logp, old, logq: dense(logp, logq, kind="reverse"),
    "dense jsd": lambda logp, old, logq: dense(logp, logq, kind="jsd", beta=0.3),
    "forward": lambda logp, old, logq: forward_kl_topk(logp, logq),
    "forward, tail": lambda logp, old, logq: forward_kl_topk(logp, logq, tail=True),
    "forward, renormalised": lambda logp, old, logq: forward_kl_topk(logp, logq, renormalise=True),
    "reverse": lambda logp, old, logq: reverse_kl_topk(logp, logq, renormalise=False),
    "reverse, tail": lambda logp, old, logq: reverse_kl_topk(logp, logq, tail=True, renormalise=False),
    "reverse, renormalised": lambda logp, old, logq: reverse_kl_topk(logp, logq),
    "reverse, plain": lambda logp, old, logq: reverse_kl_topk(logp, logq, behavior_logp=old),
    "rollout drift": lambda logp, old, logq: rollout_kl_from_cache(logp, old),
    **{kind: single(kind) for kind in KL_KINDS},
}
ALL = TOKEN_SCOPE | {"m2po": lambda logp, old, logq: m2po(logp, old, logq)[0]}
each = pytest.mark.parametrize("name", ALL)
each_token_scope = pytest.mark.parametrize("name", TOKEN_SCOPE)
law = settings(deadline=None, derandomize=True, max_examples=15)
seeds, rows, draws = st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 4)


def batch(seed: int, n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of m of m + 2 tokens: student, behaviour policy, teacher."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, n, m + 2, generator=generator).double()
    logp, old, logq = logits.log_softmax(-1)[..., :m].unbind(0)
    return logp.clone().requires_grad_(), old, logq


def gradient(loss: Tensor, logp: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), logp)[0]


# --- order, cuts, masks -----------------------------------------------------------------------------------------------


@each
@law
@given(seeds, rows, draws)
def test_positions_may_come_in_any_order(name: str, seed: int, n: int, m: int) -> None:
    logp, old, logq = batch(seed, n, m)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    shuffled = logp.detach()[order].requires_grad_()
    loss, same = ALL[name](logp, old, logq), ALL[name](shuffled, old[order], logq[order])
    torch.testing.assert_close(same, loss[order])
    torch.testing.assert_close(gradient(same, shuffled), gradient(loss, logp)[order])


@each_token_scope
@law
@given(seeds, st.integers(2, 6), draws, st.data())
def test_token_scope_may_be_cut_anywhere_with_global_counts(
    name: str, seed: int, n: int, m: int, data: st.DataObject
) -> None:
    """Two micro-batches, two packings: the sum of the parts is the whole, in value and in gradient."""
    logp, old, logq = batch(seed, n, m)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    cut, count = data.draw(st.integers(0, n)), max(int(mask.sum()), 1)

    def total(at: slice) -> Tensor:
        loss = TOKEN_SCOPE[name](logp[at], old[at], logq[at])
        return aggregate(loss[None], mask[None, at], "token-mean", n_tokens=count)

    whole, parts = total(slice(None)), total(slice(0, cut)) + total(slice(cut, n))
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(gradient(parts, logp), gradient(whole, logp))


@law
@given(seeds, st.integers(2, 6), draws, st.data())
def test_m2po_may_be_cut_anywhere_once_its_mask_is_frozen(seed: int, n: int, m: int, data: st.DataObject) -> None:
    logp, old, logq = batch(seed, n, m)
    cut = data.draw(st.integers(0, n))
    keep, _ = m2po_mask(logp, old, logq)
    parts = [
        m2po(*(x[at] for x in (logp, old, logq)), mask=keep[at], budget=1e9)[0] for at in (slice(cut), slice(cut, n))
    ]
    whole = m2po(logp, old, logq)[0]
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.testing.assert_close(gradient(torch.cat(parts), logp), gradient(whole, logp))


def of_rows(estimator: Estimator, mask: Tensor, *spoiled: Tensor) -> Tensor:
    return estimator(*zeroed(mask, *spoiled))


def of_m2po(estimator: Estimator, mask: Tensor, *spoiled: Tensor) -> Tensor:
    """Its mean is over the batch, so it has to know who counts."""
    return m2po(*spoiled, mask=mask)[0]


@each
@law
@given(seeds, rows, draws, st.data())
def test_masked_positions_may_hold_anything(name: str, seed: int, n: int, m: int, data: st.DataObject) -> None:
    """NaN and infinity: exactly no gradient, and no effect on anybody else."""
    logp, old, logq = batch(seed, n, m)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    junk = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    spoiled = [x.detach().masked_fill(~mask[:, None], junk) for x in (logp, old, logq)]
    spoiled[0].requires_grad_()

    loss = (of_m2po if name == "m2po" else of_rows)(ALL[name], mask, *spoiled)
    total = aggregate(loss[None], mask[None], "token-mean")
    found = gradient(total, spoiled[0])
    assert loss.isfinite().all() and (found[~mask] == 0).all()
    if mask.any():
        alone = logp.detach()[mask].requires_grad_()
        wanted = ALL[name](alone, old[mask], logq[mask]).mean()
        torch.testing.assert_close(total, wanted)
        torch.testing.assert_close(found[mask], gradient(wanted, alone))


def test_blanked_takes_masks_of_positions_or_of_draws_and_names_shapes() -> None:
    x = torch.tensor([[1.0, torch.nan], [3.0, 4.0]], requires_grad=True)
    (found,) = zeroed(torch.tensor([[1, 0], [0, 1]]), x)
    assert found.tolist() == [[1, 0], [0, 4]] and gradient(found * torch.nan, x)[0, 1] == 0
    with pytest.raises(ValueError, match=r"keep \(3,\) must lead the shape \(2, 2\)"):
        zeroed(torch.ones(3), x)


# --- numerics ---------------------------------------------------------------------------------------------------------

EDGES = [-torch.inf, -1e30, -1e4, -25.0, -1.0, 0.0]
"""Impossible, absurd, at the floor, beyond the bound on ratios, ordinary, certain."""


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_values_and_gradients_are_finite_at_the_edges(name: str, dtype: torch.dtype) -> None:
    """Every combination of edges for student, behaviour and teacher, as single draws and beside an ordinary one."""
    grid = torch.tensor(list(itertools.product(EDGES, repeat=3)))
    for neighbours in ([], [-1.0], [0.0, -torch.inf]):
        logp, old, logq = (
            torch.cat([x[:, None], torch.tensor(neighbours).expand(len(grid), -1)], -1).to(dtype) for x in grid.T
        )
        logp.requires_grad_()
        loss = ALL[name](logp, old, logq)
        assert loss.dtype == torch.promote_types(dtype, torch.float32) and loss.shape == (len(grid),)
        assert loss.isfinite().all() and gradient(loss, logp).isfinite().all()


@each
def test_empty_and_single_batches(name: str) -> None:
    for n in (0, 1):
        logp, old, logq = batch(0, n, 3)
        loss = ALL[name](logp, old, logq)
        assert loss.shape == (n,)
        total = aggregate(loss[None], torch.zeros(1, n), "token-mean")
        assert total.item() == 0 and (gradient(total, logp) == 0).all()


def test_metrics_are_finite_at_the_edges_and_carry_no_gradient() -> None:
    logp, old, logq = (x[:, None] for x in torch.tensor(list(itertools.product(EDGES, repeat=3))).T)
    logp = logp.clone().requires_grad_()
    found = [
        mc_reverse_kl(logp, old, logq, clip=0.2)[1],
        decoupled_ppo(logp, old, logp.detach(), logq)[1],
        m2po(logp, old, logq)[1],
        divergence.support_mass(logp, logq),
    ]
    for metrics in found:
        for name, value in metrics.items():
            assert value.shape == (logp.shape if name == "ratio_p99" else (len(logp),))
            assert value.isfinite().all() and not value.requires_grad


# --- student = teacher ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [False, True])
def test_who_is_at_rest_when_student_equals_teacher(stale: bool) -> None:
    """Zero loss and zero gradient, draw by draw. k1 and the incomplete top-k forms move on, stale advantages too, and
    the drift from the policy that drew has nothing to do with the teacher."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(8, 5, generator=generator).double().requires_grad_()
    logp, old = theta.log_softmax(-1), torch.randn(8, 5, generator=generator).double().log_softmax(-1)
    old = old if stale else logp.detach()
    whole = {name for name in ALL if name.startswith("dense")}

    def moves(name: str) -> bool:
        columns = slice(None) if name in whole else slice(0, 3)
        loss = ALL[name](logp[:, columns], old[:, columns], logp.detach()[:, columns])
        slopes = torch.autograd.grad(loss.sum(), theta, retain_graph=True)[0]
        return bool(loss.abs().max() > 1e-12 or slopes.abs().max() > 1e-12)

    always, when_stale = {"forward", "reverse", "k1"}, {"behavior", "decoupled, behavior", "rollout drift"}
    assert {name for name in ALL if moves(name)} == always | (when_stale if stale else set())


# --- the catalogue ----------------------------------------------------------------------------------------------------


def public_losses(module: ModuleType) -> set[str]:
    own = (name for name, each in inspect.getmembers(module, inspect.isfunction) if each.__module__ == module.__name__)
    return {f"{module.__name__.split('.')[-1]}.{name}" for name in own if not name.startswith("_")}


def test_every_formula_is_of_a_loss_that_a_config_can_choose() -> None:
    """But for those of the freshness section."""
    variants: dict[str, list[dict[str, Any]]] = {
        "forward_kl": [{}, {"cache": "hidden"}],
        "jsd": [{}, {"cache": "teacher_topk"}],
        "k1": [{"use": "advantage"}],
    }
    asked = [
        row.model_validate({"kind": name} | changes).spec
        for name, row in DISTILLATION_LOSSES.items()
        for changes in variants.get(name, [{}])
    ]
    chosen = {spec.formula for spec in asked} | {spec.chooses for spec in asked if spec.chooses}
    helpers = {
        *(f"divergence.{name}" for name in ("with_tail", "support_mass", "overlap_ratio", "overlap_token_advantage")),
        *(f"divergence.{name}" for name in ("clamped", "raised")),
        *(f"surrogate.{name}" for name in ("clip_bounds", "second_moment_mask")),
    }
    assert chosen | helpers == public_losses(divergence) | public_losses(surrogate)
    for spec in asked:
        takes = list(inspect.signature(formula(spec.formula)).parameters.values())
        assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in takes[: len(spec.takes)])
        assert set(spec.options) <= {each.name for each in takes[len(spec.takes) :]}


def test_every_loss_has_a_description_of_one_line_each() -> None:
    entries = catalogue()["distillation"]
    assert set(KL_KINDS) < set(DISTILLATION_LOSSES) and list(DISTILLATION_LOSSES) == [entry.name for entry in entries]
    assert all(text and "\n" not in text for entry in entries for text in entry)
    assert all(row.scope in get_args(Scope) for row in DISTILLATION_LOSSES.values())
    assert {name for name, row in DISTILLATION_LOSSES.items() if row.scope != "token"} == {"m2po"}
