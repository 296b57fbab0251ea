"""Laws of all policy losses: masks, order, the plain gradient at r = 1, declared scope, finite everywhere."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.estimators.policy import policy_loss, prepare
from slipstream.estimators.policy.token import Tokens
from slipstream.estimators.tables.policy import POLICY_LOSSES, scope_of

PULLING = {"dro", "kl_cov", "r2vpo", "quatro", "oapl"}
BATCH = [name for name in POLICY_LOSSES if POLICY_LOSSES[name].scope == "batch"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(loss: Tensor, logp: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logp)[0]


def random_batch(seed: int, *, stale: float = 0.3, b: int = 4, t: int = 6) -> tuple[Tensor, ...]:
    """Log-probs, old ones, advantages, and a mask with a gap, a short and an empty row."""
    g = seeded(seed)
    old = -torch.rand(b, t, generator=g, dtype=torch.float64) * 3 - 0.2
    logp = (old + stale * torch.randn(b, t, generator=g, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.randn(b, t, generator=g, dtype=torch.float64)
    mask = (torch.rand(b, t, generator=g) < 0.8).double()
    mask[0, 2], mask[1, 1:], mask[2] = 0, 0, 0
    mask[0, 0] = mask[3, :2] = 1
    return logp, old, advantages, mask


def needs(name: str, old: Tensor) -> dict[str, Any]:
    """Return the options that a method needs; clip_cov without chance; choices that have an effect."""
    match name:
        case "clip_cov":
            return {"generator": seeded(), "cov_low": 0.01, "cov_high": 50.0, "cov_fraction": 1.0}
        case "kl_cov":
            return {"cov_fraction": 0.3}
        case "m2po":
            return {"budget": 0.25}
        case "decoupled_ppo":
            return {"proximal_logp": old * 0.9}
        case "a3po":
            return {"lag": torch.arange(old.numel()).reshape(old.shape) % 4}
        case "topr":
            return {"positive": torch.arange(len(old)) % 2}
        case "quatro":
            return {"spread": torch.linspace(0.5, 2, old.numel()).reshape(old.shape)}
        case "espo":
            return {"entropy": torch.linspace(0, 1, old.numel()).reshape(old.shape), "espo_alpha": 0.5}
        case "st_ppo":
            return {"turns": torch.arange(old.shape[1]).expand_as(old) % 2}
        case _:
            return {}


def part(hyper: dict[str, Any], at: Any) -> dict[str, Any]:
    """The same piece of every tensor; of those with one entry per row, its rows."""
    of_rows = at[0] if isinstance(at, tuple) else at
    return {k: v[at if v.ndim == 2 else of_rows] if isinstance(v, Tensor) else v for k, v in hyper.items()}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=st.integers(0, 10_000))
def test_masked_positions_hold_anything_and_get_no_gradient(name: str, seed: int) -> None:
    logp, old, advantages, mask = random_batch(seed)
    dirty = [
        x.masked_fill(mask == 0, bad)
        for x, bad in zip((logp, old, advantages), (math.nan, math.inf, math.nan), strict=True)
    ]
    weights = torch.rand(mask.shape, generator=seeded(seed), dtype=torch.float64)
    results = []
    for x, o, a, w in ((logp, old, advantages, weights), (*dirty, weights.masked_fill(mask == 0, math.nan))):
        x.requires_grad_()
        loss, metrics = policy_loss(name, x, o, a, mask, weights=w, **needs(name, o))
        results.append((loss, gradient(loss, x), metrics))
    (clean, clean_gradient, clean_metrics), (found, found_gradient, metrics) = results
    assert torch.equal(found, clean) and torch.equal(found_gradient, clean_gradient)
    assert (found_gradient[mask == 0] == 0).all() and found_gradient.isfinite().all()
    assert all(torch.equal(metrics[key], clean_metrics[key]) for key in metrics)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    logp, old, advantages, mask = random_batch(seed)
    order = torch.randperm(len(logp), generator=seeded(seed))
    logp.requires_grad_()
    loss, _ = policy_loss(name, logp, old, advantages, mask, **needs(name, old))
    hyper = part(needs(name, old), order)
    shuffled, _ = policy_loss(name, logp[order], old[order], advantages[order], mask[order], **hyper)
    torch.testing.assert_close(shuffled, loss)
    torch.testing.assert_close(gradient(shuffled, logp), gradient(loss, logp))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_at_ratio_one_every_method_is_the_plain_policy_gradient(name: str) -> None:
    """One advantage per row, which gspo and gmpo need; clip_cov leaves out nothing that has a covariance under 1."""
    _, old, advantages, mask = random_batch(7)
    advantages = advantages[:, :1].expand_as(old) / 10
    logp = old.clone().requires_grad_()
    hyper = {} if POLICY_LOSSES[name].scope == "batch" else needs(name, old)
    if name in ("clip_cov", "decoupled_ppo"):
        hyper = {"generator": seeded()} if name == "clip_cov" else {"proximal_logp": old}
    if name == "topr":
        hyper = {"positive": torch.zeros(len(old))}
    if name == "espo":  # its two parts of a row have equal weight, whatever their sizes
        hyper["espo_share"] = 1.0
    loss, metrics = policy_loss(name, logp, old, advantages, mask, agg="seq-mean-token-mean", **hyper)
    plain, _ = policy_loss("reinforce", logp, old, advantages, mask, agg="seq-mean-token-mean")
    torch.testing.assert_close(gradient(loss, logp), gradient(plain, logp))
    assert metrics["kl"].item() == 0 and metrics["ratio"].item() == 1
    assert metrics["clip_fraction"].item() == 0 or name == "kl_cov"


@given(seed=st.integers(0, 10_000))
def test_gspo_token_is_gspo_where_a_row_has_one_advantage(seed: int) -> None:
    logp, old, advantages, mask = random_batch(seed)
    logp.requires_grad_()
    (one, _), (other, _) = (
        policy_loss(name, logp, old, advantages[:, :1].expand_as(old), mask) for name in ("gspo", "gspo_token")
    )
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(gradient(one, logp), gradient(other, logp))


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - PULLING))  # which pull back to the old policy too
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_token_goes_the_way_of_its_advantage_or_is_held_by_the_trust_region(name: str, sign: float) -> None:
    """Rows of one token each, their ratios from e^−40 to e^40: no numeric bound silences a token or turns it round."""
    logp = torch.linspace(-40, 40, 801, dtype=torch.float64)[:, None].requires_grad_()
    old, mask = torch.zeros_like(logp), torch.ones_like(logp)
    advantages, nobody = torch.full_like(logp, sign), torch.zeros_like(logp, dtype=torch.bool)
    hyper = {
        "clip_cov": {"chosen": nobody},
        "m2po": {"chosen": nobody},
        "decoupled_ppo": {"proximal_logp": old},
        "a3po": {"lag": torch.full_like(logp, 3)},
        "topr": {"positive": torch.full((len(logp),), sign > 0)},
        "st_ppo": {"turns": torch.zeros_like(logp, dtype=torch.int64)},
        "espo": {"entropy": torch.full_like(logp, 0.5)},
    }.get(name, {})
    loss, acted = POLICY_LOSSES[name].loss(Tokens(logp, old, advantages, mask != 0), **hyper)
    slope = gradient(loss.sum(), logp)
    assert (slope * sign <= 0).all()
    faded = (logp > 3) if name in ("sapo", "vespo") else nobody  # the sigmoid is flat there, and exp(−W) is 0
    assert (slope != 0)[~acted & ~faded].all()


@pytest.mark.parametrize("share, tokens, uncertain", [(0.07, 100, 7), (0.09, 300, 27), (0.2, 11, 3), (0.2, 1, 1)])
def test_espo_rounds_its_share_up_and_no_further(share: float, tokens: int, uncertain: int) -> None:
    """A part has equal weight: each of its tokens has n / (number of parts · size of the part)."""
    ones, parts = torch.ones(1, tokens), 1 + (tokens > uncertain)
    entropy = torch.linspace(1, 0, tokens)[None]
    loss, _ = POLICY_LOSSES["espo"].loss(
        Tokens(0 * ones, 0 * ones, -ones, ones != 0), entropy=entropy, espo_share=share
    )
    expected = torch.full((tokens,), tokens / parts / max(tokens - uncertain, 1))
    expected[:uncertain] = tokens / parts / uncertain
    torch.testing.assert_close(loss[0], expected)


@given(seed=st.integers(0, 10_000))
def test_dispo_with_equal_bounds_is_cispo(seed: int) -> None:
    logp, old, advantages, mask = random_batch(seed)
    logp.requires_grad_()
    bounds = {f"clip_{side}_{sign}": 0.2 for side in ("low", "high") for sign in ("pos", "neg")}
    (one, a), (other, b) = (
        policy_loss(name, logp, old, advantages, mask, **options)
        for name, options in (("dispo", bounds), ("cispo", {}))
    )
    assert torch.equal(one, other) and torch.equal(gradient(one, logp), gradient(other, logp))
    assert a["clip_fraction"] == b["clip_fraction"]


@given(seed=st.integers(0, 10_000), lag=st.integers(0, 5))
def test_a3po_is_decoupled_ppo_around_the_interpolated_policy(seed: int, lag: int) -> None:
    """Up to lag 1 the proximal policy is the old one: PPO without the dual clip."""
    logp, old, advantages, mask = random_batch(seed)
    logp.requires_grad_()
    near = 1 / max(lag, 1)
    proximal = (near * old + (1 - near) * logp).detach()
    found, _ = policy_loss("a3po", logp, old, advantages, mask, lag=torch.full_like(old, lag))
    expected, _ = policy_loss("decoupled_ppo", logp, old, advantages, mask, proximal_logp=proximal)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found, logp), gradient(expected, logp))
    if lag <= 1:
        ppo, _ = policy_loss("vanilla", logp, old, advantages, mask, dual_clip=math.inf)
        torch.testing.assert_close(found, ppo)


@given(seed=st.integers(0, 10_000))
def test_r2vpo_without_its_penalty_is_the_plain_ratio_and_with_it_the_variance_counts(seed: int) -> None:
    logp, old, advantages, mask = random_batch(seed)
    (free, _), (held, _) = (
        policy_loss("r2vpo", logp, old, advantages, mask, variance_coef=coef) for coef in (0.0, 0.5)
    )
    ratio = (logp - old).exp().where(mask != 0, 1.0)
    torch.testing.assert_close(free, -(advantages * ratio * mask).sum() / mask.sum())
    torch.testing.assert_close(held - free, 0.5 * (ratio - 1).square().sum() / mask.sum())


@given(seed=st.integers(0, 10_000), radius=st.sampled_from([1e-4, 1e-3]))
def test_quatro_has_its_minimum_at_the_edge_of_the_trust_region(seed: int, radius: float) -> None:
    """All answers to a prompt with probabilities μ: no slope at π ∝ μ·exp(A/λ), whose KL is the radius."""
    g = seeded(seed)
    old = torch.rand(1, 7, generator=g, dtype=torch.float64).log_softmax(-1)
    advantage = torch.randn(1, 7, generator=g, dtype=torch.float64)
    advantage = advantage - (old.exp() * advantage).sum()
    spread = (old.exp() * advantage.square()).sum().sqrt().expand_as(old)
    logits = (old + advantage * (2 * radius) ** 0.5 / spread).requires_grad_()
    logp = logits.log_softmax(-1)
    loss, _ = POLICY_LOSSES["quatro"].loss(
        Tokens(logp, old, advantage, torch.ones_like(old) != 0), spread=spread, radius=radius
    )
    kl = (logp.exp() * (logp - old)).sum().item()
    assert kl == pytest.approx(radius, rel=0.2)  # small radii: the next order is the third moment of A
    slope = gradient((old.exp() * loss).sum(), logits)
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-12, rtol=0)


@given(seed=st.integers(0, 10_000), factor=st.floats(0.1, 10))
def test_quatro_weighs_prompts_by_the_scale_of_their_rewards(seed: int, factor: float) -> None:
    logp, old, advantages, mask = random_batch(seed)
    spread = torch.full_like(old, 0.7)
    small, _ = policy_loss("quatro", logp, old, advantages, mask, spread=spread)
    large, _ = policy_loss("quatro", logp, old, factor * advantages, mask, spread=factor * spread)
    torch.testing.assert_close(large, factor * small)


# --- scope ------------------------------------------------------------------------------------------------------------

ROW_CUT, COLUMN_CUT = (slice(0, 4), slice(4, None)), ((slice(None), slice(0, 3)), (slice(None), slice(3, None)))


def in_two(name: str, cut: tuple[Any, Any], agg: str, frozen: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of losses over two pieces given the counts of the whole, its gradient, and the sum of clip fractions."""
    logp, old, advantages, mask = random_batch(11, stale=0.6, b=8)
    logp.requires_grad_()
    counts = {"n_tokens": float(mask.sum()), "n_sequences": float(mask.any(-1).sum())}
    hyper = needs(name, old) | frozen
    total, clipped = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for at in cut:
        loss, metrics = policy_loss(
            name, logp[at], old[at], advantages[at], mask[at], agg=agg, **counts, **part(hyper, at)
        )
        total, clipped = total + loss, clipped + metrics["clip_fraction"]
    return total, gradient(total, logp), clipped


def whole(name: str, agg: str) -> tuple[Tensor, Tensor, Tensor]:
    return in_two(name, (slice(None), slice(0, 0)), agg, {})


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_declared_scope_is_what_a_method_looks_at(name: str) -> None:
    """Token scope may be cut anywhere, row scope between rows, batch scope nowhere unless its choice is frozen."""
    aggs = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
    by_rows = all(same(in_two(name, ROW_CUT, agg, {}), whole(name, agg)) for agg in aggs)
    by_columns = same(in_two(name, COLUMN_CUT, "token-mean", {}), whole(name, "token-mean"))
    assert (by_rows, by_columns) == {"token": (True, True), "row": (True, False), "batch": (False, False)}[
        POLICY_LOSSES[name].scope
    ]


@pytest.mark.parametrize("name", BATCH)
def test_batch_scope_with_a_frozen_choice_may_be_cut_anywhere(name: str) -> None:
    logp, old, advantages, mask = random_batch(11, stale=0.6, b=8)
    chosen, _ = prepare(name, logp, old, advantages, mask, **needs(name, old))
    assert chosen.any() and not chosen.requires_grad
    for cut in (ROW_CUT, COLUMN_CUT):
        assert same(in_two(name, cut, "token-mean", {"chosen": chosen}), whole(name, "token-mean"))


def test_scope_with_aggregation() -> None:
    assert scope_of("vanilla") == "token" and scope_of("vanilla", "seq-mean-token-mean") == "row"
    assert scope_of("sapo") == "row" and scope_of("sapo", "token-mean") == "token"
    assert scope_of("m2po", "seq-mean-token-mean") == "batch" and scope_of("geo_mean") == "row"


# --- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_impossible_and_certain_tokens_stay_finite(name: str, dtype: torch.dtype) -> None:
    edge = torch.tensor([-math.inf, -1e4, -50.0, -1e-9, 0.0])
    logp, old = (x.reshape(5, 5).to(dtype) for x in torch.cartesian_prod(edge, edge).T)
    hyper = needs(name, old)
    for sign in (1.0, -1.0, 0.0):
        x = logp.clone().requires_grad_()
        advantages = torch.full_like(old, sign)
        loss, metrics = policy_loss(
            name, x, old, advantages, torch.ones(5, 5), weights=torch.ones(5, 5, dtype=dtype), **hyper
        )
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        assert loss.isfinite() and gradient(loss, x).isfinite().all()
        assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_batch_without_tokens_is_zero(name: str) -> None:
    logp, old, advantages, mask = random_batch(1)
    logp.requires_grad_()
    loss, metrics = policy_loss(name, logp, old, advantages, torch.zeros_like(mask), **needs(name, old))
    assert loss.item() == 0 and (gradient(loss, logp) == 0).all()
    assert all(value.isfinite() for value in metrics.values())


@given(seed=st.integers(0, 10_000))
def test_st_ppo_gives_a_turn_the_geometric_mean_of_its_ratios_as_its_mean_weight(seed: int) -> None:
    logp, old, advantages, mask = random_batch(seed)
    advantages = advantages[:, :1].expand_as(old)
    turns = torch.randint(0, 3, old.shape, generator=seeded(seed))
    logp.requires_grad_()
    loss, _ = policy_loss("st_ppo", logp, old, advantages, mask, agg="token-sum", turns=turns)
    slope = gradient(loss, logp)
    for row, turn in [(row, turn) for row in range(len(old)) for turn in range(3)]:
        its = (turns[row] == turn) & (mask[row] != 0)
        if its.any() and (good := float(advantages[row, 0])):
            ratio = float((logp.detach() - old)[row][its].mean().exp())
            held = ratio > 1.2 if good > 0 else ratio < 0.8
            mean = 0.0 if held else -good * ratio
            assert float(slope[row][its].mean()) == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("outlier", [300.0, -300.0])
@pytest.mark.parametrize(
    "name", [name for name in POLICY_LOSSES if POLICY_LOSSES[name].scope == "row" and name not in PULLING]
)
def test_one_outlier_counts_as_e_20_in_the_ratio_of_its_row(name: str, outlier: float) -> None:
    """Bounded before any mean or sum: then a log-ratio of 300 does to the other tokens what one of 20 does."""
    others, slopes = math.copysign(1, -outlier) * torch.linspace(0.1, 0.9, 39, dtype=torch.float64), []
    for first in (outlier, math.copysign(20, outlier)):
        logp = torch.full((1, 40), -400.0, dtype=torch.float64, requires_grad=True)
        old = -400 - torch.cat([torch.tensor([first]), others])[None]
        loss, _ = policy_loss(name, logp, old, -torch.ones_like(old), torch.ones_like(old), **needs(name, old))
        slopes.append(gradient(loss, logp))
    torch.testing.assert_close(slopes[0][:, 1:], slopes[1][:, 1:])
