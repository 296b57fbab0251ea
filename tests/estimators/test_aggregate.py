"""From per-token losses to one number: by hand, against verl, and cut in pieces."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.estimators.numerics import aggregate, histogram, percentile_99

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures" / "verl_vectors.json").read_text())
CASES = [case for case in GOLDEN["cases"] if case["fn"] == "aggregate"]
LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["mode"])
def test_modes_are_verls(case: dict[str, Any]) -> None:
    """verl adds 1e-8 to its counts, which shows in the tenth digit. Every row of these vectors holds a token."""
    loss, mask = torch.tensor(case["per_token"], dtype=torch.float64), torch.tensor(GOLDEN["inputs"]["mask"])
    assert aggregate(loss, mask, case["mode"]).item() == pytest.approx(case["loss"], abs=1e-8, rel=0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-sum", 1 + 2 + 4),
        ("token-mean", (1 + 2 + 4) / 3),
        ("seq-mean-token-sum", (3 + 4) / 2),
        ("seq-mean-token-sum-norm", (3 + 4) / 2 / 3),
        ("seq-mean-token-mean", (1.5 + 4) / 2),
    ],
)
def test_aggregation_by_hand(mode: str, expected: float) -> None:
    assert aggregate(LOSS, MASK, mode).item() == pytest.approx(expected)  # type: ignore[arg-type]


def test_empty_rows_are_no_sequences_unlike_verls() -> None:
    """The third row holds nothing: we divide by two rows, verl by three, which is to be had by saying so."""
    assert aggregate(LOSS, MASK, "seq-mean-token-sum").item() == pytest.approx((3 + 4) / 2)
    assert aggregate(LOSS, MASK, "seq-mean-token-sum", n_sequences=3).item() == pytest.approx((3 + 4) / 3)


def test_rows_of_one_sequence_share_its_mean() -> None:
    """A row in two halves: 1 and 2 are two tokens of one sequence."""
    loss, mask = torch.tensor([[1.0, 9.0], [2.0, 9.0], [4.0, 9.0]]), torch.tensor([[1, 0], [1, 0], [1, 0]])
    tokens = torch.tensor([2, 2, 1])
    found = aggregate(loss, mask, "seq-mean-token-mean", n_sequences=2, sequence_tokens=tokens)
    assert found.item() == pytest.approx((1.5 + 4) / 2)


def test_norm_divides_by_the_scale_given() -> None:
    assert aggregate(LOSS, MASK, "seq-mean-token-sum-norm", scale=7).item() == pytest.approx((3 + 4) / 2 / 7)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"])
def test_a_batch_cut_in_two_with_global_counts_adds_up(mode: str) -> None:
    whole = aggregate(LOSS, MASK, mode)  # type: ignore[arg-type]
    counts = {"n_tokens": 3, "n_sequences": 2} | ({"scale": 3} if mode.endswith("norm") else {})
    parts = [aggregate(LOSS[at], MASK[at], mode, **counts) for at in (slice(0, 1), slice(1, 3))]  # type: ignore[arg-type]
    torch.testing.assert_close(sum(parts), whole)


def test_masked_positions_count_for_nothing_whatever_they_hold() -> None:
    loss = LOSS.clone().masked_fill(MASK == 0, torch.nan).requires_grad_()
    total = aggregate(loss, MASK, "token-mean")
    (gradient,) = torch.autograd.grad(total, loss)
    assert total.isfinite() and (gradient[MASK == 0] == 0).all()


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_an_empty_batch_is_zero(mode: str) -> None:
    assert aggregate(LOSS, torch.zeros_like(MASK), mode).item() == 0.0  # type: ignore[arg-type]


def test_unknown_aggregation_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown aggregation 'mean'.*token-mean"):
        aggregate(LOSS, MASK, "mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_global_batch_of_which_nothing_is_left_is_zero(mode: str) -> None:
    nothing = aggregate(LOSS, torch.zeros_like(MASK), mode, n_tokens=0, n_sequences=0)  # type: ignore[arg-type]
    assert nothing.item() == 0.0


def test_the_norm_of_a_part_needs_the_length_of_the_whole() -> None:
    with pytest.raises(ValueError, match="needs scale="):
        aggregate(LOSS, MASK, "seq-mean-token-sum-norm", n_sequences=2)


def test_a_wrong_mode_meets_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'token-mean'"):
        aggregate(LOSS, MASK, "token_mean")  # type: ignore[arg-type]


def test_histograms_of_parts_give_the_percentile_of_the_whole() -> None:
    def count(ratios: torch.Tensor) -> torch.Tensor:
        return histogram(ratios, torch.ones_like(ratios, dtype=torch.bool))

    ratios = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).mul(0.3).exp()
    whole = percentile_99(count(ratios))
    assert whole == pytest.approx(ratios.quantile(0.99, interpolation="lower").item(), rel=0.0051)
    assert percentile_99(sum(map(count, ratios.split(7)), start=count(ratios[:0]))) == whole
    masked = torch.cat([ratios, torch.full((900,), 1e9)])
    assert percentile_99(histogram(masked, masked < 1e9)) == whole
    assert percentile_99(count(torch.tensor([1.0] * 99 + [50.0]))) == 1.0
    assert percentile_99(count(torch.tensor([1.0] * 98 + [50.0, 50.0]))) == pytest.approx(50, rel=0.005)
    assert percentile_99(count(torch.tensor([0.0, 1e30]))) == pytest.approx(math.e**20), "bounded as all ratios"
    assert percentile_99(count(torch.tensor([math.nan] * 3))) == pytest.approx(math.e**-20), "as ratio 0"
