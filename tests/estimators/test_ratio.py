"""Importance ratios at every unit: six tokens by hand, laws that tie the units together, what each may depend on."""

from math import exp, inf, log, nan, sqrt
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.estimators.correction import (
    effective_sample_size,
    importance_ratio,
    normaliser,
    share,
    truncate,
    weight_metrics,
)
from slipstream.estimators.tables.correction import ONE_PER_ROW, PART_SCOPES, Unit

UNITS: tuple[Unit, ...] = get_args(Unit)

# ρ of six tokens; the fourth is a tool's output: masked, and anything may stand there
RHO = torch.tensor([[2.0, 0.5, 4.0, nan, 0.5, 3.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0, 1.0]])
TURNS = torch.tensor([[0, 0, 1, 7, 1, 1]])


def batch(seed: int = 0, rows: int = 4, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Log-ratios, a mask with holes and one empty row, turns."""
    generator = torch.Generator().manual_seed(seed)
    log_ratio = torch.randn(rows, width, generator=generator, dtype=torch.float64) / 2
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[1] = False
    mask[0, -2:] = True
    return log_ratio, mask, torch.randint(0, 3, (rows, width), generator=generator)


@pytest.mark.parametrize(
    ("unit", "c", "expected"),
    [
        ("token", inf, [2, 0.5, 4, 0, 0.5, 3]),
        # 2 · ½ · 4 · ½ · 3 = 6
        ("sequence", inf, [6, 6, 6, 0, 6, 6]),
        ("geometric", inf, [6**0.2, 6**0.2, 6**0.2, 0, 6**0.2, 6**0.2]),
        # least before: none, 2, ½, (masked), ½, ½
        ("prefix_min", inf, [1 * 2, 2 * 0.5, 0.5 * 4, 0, 0.5 * 0.5, 0.5 * 3]),
        ("cumulative", inf, [2, 1, 4, 0, 2, 6]),
        # c = ln 2 bounds the t-th token by 2^√t: 4 > 2^√3 = 3.3 and 6 > 2^√5 = 4.7 are clipped
        ("cumulative", log(2), [2, 1, 2 ** sqrt(3), 0, 2, 2 ** sqrt(5)]),
        # turn 0: 2 · ½; turn 1: 4 · ½ · 3; turn 7 has no valid token
        ("turn", inf, [1, 1, 6, 0, 6, 6]),
    ],
)
def test_six_tokens_by_hand(unit: Unit, c: float, expected: list[float]) -> None:
    found = importance_ratio(unit, RHO.log(), MASK, turns=TURNS, c=c)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("junk", [nan, inf, -inf, 1e4])
def test_masked_positions_hold_anything_and_get_no_gradient(unit: Unit, junk: float) -> None:
    log_ratio, mask, turns = batch()
    dirty = log_ratio.masked_fill(~mask, junk).requires_grad_()
    found = importance_ratio(unit, dirty, mask, turns=turns)
    assert torch.equal(found, importance_ratio(unit, log_ratio, mask, turns=turns))
    (gradient,) = torch.autograd.grad(found.sum(), dirty)
    assert gradient.isfinite().all() and (gradient[~mask] == 0).all() and (found[~mask] == 0).all()


@pytest.mark.parametrize("unit", UNITS)
def test_gradcheck(unit: Unit) -> None:
    log_ratio, mask, turns = batch()
    log_ratio.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: importance_ratio(unit, x, mask, turns=turns, c=1.0), log_ratio)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_extremes_are_bounded_by_e_to_the_20(unit: Unit, dtype: torch.dtype) -> None:
    """Every log-ratio is clamped, and so is every sum: ten tokens of +20 are e^20, as is one of +10 000."""
    log_ratio = torch.tensor([[20.0] * 10, [1e4, inf] + [0.0] * 8, [-inf] * 10], dtype=dtype).requires_grad_()
    found = importance_ratio(unit, log_ratio, torch.ones(3, 10), turns=torch.zeros(3, 10, dtype=torch.long), c=inf)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.max().item() == pytest.approx(exp(20), rel=1e-6) and found.min().item() >= exp(-20) * (1 - 1e-6)
    assert torch.autograd.grad(found.sum(), log_ratio)[0].isfinite().all()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("each", [-30.0, 30.0])
def test_the_bound_on_a_ratio_stops_no_gradient(unit: Unit, each: float) -> None:
    """Beyond ±20 the value stays and the slope is that of a ratio of e^±20: no token falls silent by being far away."""
    log_ratio = torch.full((1, 3), each, dtype=torch.float64).requires_grad_()
    found = importance_ratio(unit, log_ratio, torch.ones(1, 3), turns=torch.zeros(1, 3, dtype=torch.long), c=inf)
    torch.testing.assert_close(found, torch.full((1, 3), exp(20 if each > 0 else -20), dtype=torch.float64))
    (slope,) = torch.autograd.grad(found.sum(), log_ratio)
    assert (slope >= found.detach()).all()


def test_a_sum_in_low_precision_is_not_rounded_on_the_way() -> None:
    """1000 tokens of 2^−10: bfloat16 would stop counting at ¼."""
    log_ratio = torch.full((1, 1000), 2.0**-10, dtype=torch.bfloat16)
    found = importance_ratio("sequence", log_ratio, torch.ones(1, 1000))
    torch.testing.assert_close(found[0, 0].item(), exp(1000 / 1024), rtol=1e-6, atol=0)


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
def test_equal_policies_have_ratio_one(unit: Unit) -> None:
    _, mask, turns = batch()
    found = importance_ratio(unit, torch.zeros(mask.shape), mask, turns=turns)
    assert torch.equal(found, mask.float())


@pytest.mark.parametrize("unit", UNITS)
def test_a_single_token_is_its_own_unit(unit: Unit) -> None:
    log_ratio, mask = torch.tensor([[0.3, -0.7, nan]]), torch.tensor([[0, 1, 0]])
    found = importance_ratio(unit, log_ratio, mask, turns=torch.tensor([[4, 4, 4]]), c=inf)
    torch.testing.assert_close(found, torch.tensor([[0.0, exp(-0.7), 0.0]]))


@given(seed=st.integers(0, 10_000))
def test_the_units_agree_where_they_must(seed: int) -> None:
    log_ratio, mask, turns = batch(seed)
    valid, n = mask, mask.sum(-1, keepdim=True)

    def ratio(unit: Unit, **options: object) -> Tensor:
        return importance_ratio(unit, log_ratio, mask, **options)  # type: ignore[arg-type]

    token, sequence, cumulative = ratio("token"), ratio("sequence"), ratio("cumulative", c=inf)
    torch.testing.assert_close(ratio("geometric") ** n * mask, sequence)
    torch.testing.assert_close(cumulative[0, -1], sequence[0, -1])  # the last token of row 0 is valid
    torch.testing.assert_close(ratio("turn", turns=torch.zeros_like(turns)), sequence)
    torch.testing.assert_close(ratio("turn", turns=torch.arange(mask.shape[1]).expand_as(turns)), token)
    # a turn is a sequence of its own
    for turn in range(3):
        inside = mask & (turns == turn)
        alone = importance_ratio("sequence", log_ratio, inside)
        torch.testing.assert_close(ratio("turn", turns=turns)[inside], alone[inside])
    torch.testing.assert_close(importance_ratio("cumulative", -log_ratio, mask) * ratio("cumulative"), mask.double())
    # MinPRO holds at most one factor of the prefix: at least the product wherever all of the prefix is below 1
    shrinking = valid & (cumulative > 0) & (log_ratio.masked_fill(~mask, -1).cummax(-1).values <= 0)
    assert (ratio("prefix_min")[shrinking] >= cumulative[shrinking] - 1e-12).all()


@given(seed=st.integers(0, 10_000), at=st.integers(0, 6))
def test_an_observation_in_between_changes_nothing(seed: int, at: int) -> None:
    """A masked column put anywhere into the batch leaves every ratio as it was, t of ±c√t included."""
    log_ratio, mask, turns = batch(seed)
    rows = len(mask)

    def widened(x: Tensor, column: Tensor) -> Tensor:
        return torch.cat([x[:, :at], column, x[:, at:]], 1)

    wide = widened(log_ratio, torch.full((rows, 1), nan, dtype=torch.float64))
    wide_mask = widened(mask, torch.zeros(rows, 1, dtype=torch.bool))
    wide_turns = widened(turns, torch.full((rows, 1), 99))
    for unit in UNITS:
        found = importance_ratio(unit, wide, wide_mask, turns=wide_turns)
        found = torch.cat([found[:, :at], found[:, at + 1 :]], 1)
        torch.testing.assert_close(found, importance_ratio(unit, log_ratio, mask, turns=turns))


# --- scope ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
def test_scope_is_what_it_says(unit: Unit) -> None:
    """Row scope: the batch may be cut between rows. Token scope: inside them as well, and only then."""
    log_ratio, mask, turns = batch()
    turns = torch.zeros_like(turns)
    whole = importance_ratio(unit, log_ratio, mask, turns=turns)

    def cut(dim: int) -> Tensor:
        parts = [x.split(3, dim) for x in (log_ratio, mask, turns)]
        return torch.cat([importance_ratio(unit, x, m, turns=t) for x, m, t in zip(*parts, strict=True)], dim)

    torch.testing.assert_close(cut(0), whole)
    assert torch.allclose(cut(1), whole) == (PART_SCOPES[unit] == "token")


@pytest.mark.parametrize("unit", UNITS)
def test_some_units_have_one_ratio_per_row(unit: Unit) -> None:
    log_ratio, _, turns = batch()
    found = importance_ratio(unit, log_ratio, torch.ones_like(log_ratio), turns=turns)
    assert (found == found[:, :1]).all() == (unit in ONE_PER_ROW)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_truncation_and_band_by_hand() -> None:
    ratio = torch.tensor([[0.4, 0.5, 1.0, 2.0, 5.0, 5.1]])
    assert truncate(ratio, 2.0).tolist() == [[pytest.approx(x) for x in (0.4, 0.5, 1, 2, 2, 2)]]
    assert truncate(ratio, (0.5, 5.0)).tolist() == [[pytest.approx(x) for x in (0, 0.5, 1, 2, 5, 0)]]


def test_mean_over_tokens_and_over_rows_by_hand() -> None:
    weights = torch.tensor([[1.0, 2.0, 3.0], [8.0, nan, nan], [nan, nan, nan]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert normaliser(weights, mask).item() == (1 + 2 + 3 + 8) / 4
    assert normaliser(weights, mask, over_rows=True).item() == (2 + 8) / 2  # the empty row does not count
    assert normaliser(torch.zeros(1, 3), torch.ones(1, 3)).item() == 1.0
    assert normaliser(weights, torch.zeros(3, 3)).item() == 1.0


def test_effective_sample_size_by_hand() -> None:
    """Weights 1, 1, 4: mean 2, E[w²] = 6, so 4/6. Equal weights: 1. One of four left: ¼."""
    assert effective_sample_size(
        torch.tensor([[1.0, 1, 4, nan]]), torch.tensor([[1, 1, 1, 0]])
    ).item() == pytest.approx(4 / 6)
    assert effective_sample_size(torch.full((2, 2), 0.3).double(), torch.ones(2, 2)).item() == pytest.approx(1)
    assert effective_sample_size(torch.tensor([[0.0, 0, 5, 0]]), torch.ones(1, 4)).item() == 0.25
    assert effective_sample_size(torch.zeros(1, 4), torch.ones(1, 4)).item() == 0.0


def test_weight_metrics_by_hand() -> None:
    """Ratios ¼, 1, 3 | 4 with C = 2 become ¼, 1, 2 | 2: mean 5.25/4, two of four beyond 2, one below ½."""
    ratio = torch.tensor([[0.25, 1.0, 3.0], [4.0, nan, nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = weight_metrics(ratio, truncate(ratio, 2.0), mask, threshold=2.0, over_rows=False)
    mean = 5.25 / 4
    variance = ((0.25 - mean) ** 2 + (1 - mean) ** 2 + 2 * (2 - mean) ** 2) / 4
    assert {name: value.item() for name, value in found.items()} == {
        "rollout_is_mean": pytest.approx(mean),
        "rollout_is_std": pytest.approx(sqrt(variance)),
        "rollout_is_min": 0.25,
        "rollout_is_p99": 2.0,
        "rollout_is_max": 2.0,
        "rollout_is_ratio_fraction_high": 2 / 4,
        "rollout_is_ratio_fraction_low": 1 / 4,
    }
    hundred = torch.arange(1.0, 101.0)[None]
    assert weight_metrics(hundred, hundred, hundred, threshold=2.0, over_rows=False)["rollout_is_p99"] == 99
    of_rows = weight_metrics(ratio, truncate(ratio, 2.0), mask, threshold=2.0, over_rows=True)
    assert of_rows["rollout_is_ratio_fraction_high"] == 1 and of_rows["rollout_is_ratio_fraction_low"] == 0.5


def test_share_of_tokens_and_of_rows() -> None:
    hit, valid = torch.tensor([[1, 0], [0, 1], [1, 1]]).bool(), torch.tensor([[1, 1], [1, 0], [0, 0]]).bool()
    assert share(hit, valid).item() == pytest.approx(1 / 3)
    assert share(hit, valid, of_rows=True).item() == 0.5
    assert share(hit, torch.zeros_like(valid), of_rows=True).item() == 0.0


# --- failures ---------------------------------------------------------------------------------------------------------


def test_wrong_names_and_shapes_are_refused() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"unknown unit 'prefix-min'.*cumulative.*did you mean 'prefix_min'"):
        importance_ratio("prefix-min", x, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"log_ratio \(2, 3\), mask \(2, 2\)"):
        importance_ratio("token", x, torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"must be \[B, T\], one row per sample, got \(3,\)"):
        importance_ratio("sequence", x[0], x[0])
    for turns in (None, x):
        with pytest.raises(ValueError, match="needs turns.*integer"):
            importance_ratio("turn", x, x, turns=turns)
    with pytest.raises(ValueError, match=r"turns \(2, 1\)"):
        importance_ratio("turn", x, x, turns=torch.zeros(2, 1, dtype=torch.long))
