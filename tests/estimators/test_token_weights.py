"""Weights of tokens by their position: six tokens by hand, and the laws that all methods share."""

import math

import pytest
import torch
from torch import Tensor

from slipstream.estimators.token_weights import Response, token_weights

# the fourth token is a tool's output: masked, and anything may stand there
MASK = torch.tensor([1, 1, 1, 0, 1, 1]).bool()
GAP = torch.tensor([0.5, -1.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
TURN = torch.tensor([0, 0, 1, 1, 2, 2])


def response(update: int = 1, mask: Tensor = MASK) -> Response:
    return Response(mask, GAP * mask, TURN, update)


def scaled(*weights: float) -> Tensor:
    """Return these weights divided by their mean over the five trained tokens."""
    weights_T = torch.tensor(weights, dtype=torch.float64)
    return weights_T / (weights_T.sum() / 5)


E = math.e


@pytest.mark.parametrize(
    ("name", "options", "update", "expected"),
    [
        ("first", {}, 1, scaled(1, 1, 0, 0, 0, 0)),  # 0.3 · 5 = 1.5, rounded up
        ("first", {"share": 1.0}, 1, scaled(1, 1, 1, 0, 1, 1)),
        ("last", {}, 1, scaled(0, 0, 0, 0, 1, 1)),
        ("last", {"share": 1.0}, 1, scaled(1, 1, 1, 0, 1, 1)),
        # sums before each token: 0, 0.5, −1, 1, 1, 2; below 0 they count as 0
        ("iw_opd", {"rate": 1.0}, 1, scaled(1, E**-0.5, 1, 0, E**-1, E**-2)),
        ("tcod_f2b", {"updates": 4}, 1, scaled(1, 1, 0, 0, 0, 0)),
        ("tcod_f2b", {"updates": 4}, 3, scaled(1, 1, 1, 0, 0, 0)),  # 1 + 2 · 2/4 turns
        ("tcod_f2b", {"updates": 4}, 5, scaled(1, 1, 1, 0, 1, 1)),
        ("tcod_b2f", {"updates": 4}, 1, scaled(0, 0, 0, 0, 1, 1)),
        ("tcod_b2f", {"updates": 4}, 3, scaled(0, 0, 1, 0, 1, 1)),
        ("tcod_b2f", {"updates": 4}, 99, scaled(1, 1, 1, 0, 1, 1)),
        ("tcod_f2b", {"turns": 2}, 1, scaled(1, 1, 1, 0, 0, 0)),
        # three turns of 2, 1 and 2 trained tokens: 5/6, 5/3 and 5/6 if each turn weighs as much
        ("turn_opd", {"updates": 4}, 1, scaled(1, 1, 1, 0, 1, 1)),
        ("turn_opd", {"updates": 4}, 3, scaled(11 / 12, 11 / 12, 4 / 3, 0, 11 / 12, 11 / 12)),
        ("turn_opd", {"updates": 4}, 9, scaled(1, 1, 2, 0, 1, 1)),
    ],
)
def test_six_tokens_by_hand(name: str, options: dict[str, float], update: int, expected: Tensor) -> None:
    torch.testing.assert_close(token_weights(name, response(update), **options), expected)


@pytest.mark.parametrize("name", ["first", "last", "iw_opd", "tcod_f2b", "tcod_b2f", "turn_opd"])
def test_a_response_of_which_nothing_is_trained_has_no_weights(name: str) -> None:
    assert not token_weights(name, response(mask=torch.zeros(6, dtype=torch.bool))).any()


def test_a_long_gap_is_bounded_and_an_unknown_option_is_refused() -> None:
    far = Response(torch.ones(2).bool(), torch.tensor([1e9, 0.0]), torch.zeros(2).long(), 1)
    assert token_weights("iw_opd", far, rate=1.0)[1] > 0, "e^−20 at least"
    with pytest.raises(ValueError, match="unknown option of first 'rate'"):
        token_weights("first", response(), rate=1.0)
