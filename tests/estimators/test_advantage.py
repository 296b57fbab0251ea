"""Advantages: six tokens by hand, verl's values and where we differ, mistakes. Their laws: test_advantage_laws.py."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.estimators.advantage import advantage, whiten
from slipstream.estimators.tables.advantage import ADVANTAGES

# --- six tokens by hand -----------------------------------------------------------------------------------------------

# A group of two rows and a rejected one, and a row alone. S = 0, 3 and 2; lengths 3, 1 and 2.
NAN = math.nan
REWARDS = torch.tensor([[1, -1.5, 0.5], [3, NAN, NAN], [0, 2, NAN], [NAN] * 3], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
GROUPS = torch.tensor([5, 5, 7, 5])
SOFT = 2 * math.log((1 + math.exp(1.5)) / 2)
SIGMA = 3 / math.sqrt(2) + 1e-6  # of 0 and 3


def six(tokens: list[float], fill: float = 0.0) -> Tensor:
    a, b, c, d, e, f = tokens
    return torch.tensor([[a, b, c], [d, fill, fill], [e, f, fill], [fill] * 3], dtype=torch.float64)


def by_row(a: float, b: float, c: float) -> list[float]:
    return [a, a, a, b, c, c]


def whitened(tokens: list[float]) -> list[float]:
    mean, deviation = statistics.mean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    return [(x - mean) / deviation for x in tokens]


def per_row(a: float, b: float, c: float) -> Tensor:
    return torch.tensor([a, b, c, NAN], dtype=torch.float64)


PI = {
    "logp": six([0.5] * 3 + [0.25] + [0.5] * 2, NAN).log(),
    "sum_pi_squared": six([0.5] * 3 + [0.25] + [0.5] * 2, NAN),
}
LITERAL: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "grpo": ("grpo", {}, by_row(-1.5 / SIGMA, 1.5 / SIGMA, 2 / (1 + 1e-6))),
    "grpo, norm=False": ("grpo", {"norm": False}, by_row(-1.5, 1.5, 2)),
    "grpo_passk": ("grpo_passk", {}, by_row(0, 3 / SIGMA, 0)),
    # turn 0: 1 − 1.5 + 0.5 and 3; nobody else in the group has a turn 1, with −1.5 + 0.5
    "grpo_turn": (
        "grpo_turn",
        {"turns": six([0, 1, 1, 0, 0, 1], -1)},
        [-1.5 / SIGMA, *[-1 / (1 + 1e-6)] * 2, 1.5 / SIGMA, *[2 / (1 + 1e-6)] * 2],
    ),
    "rloo": ("rloo", {}, by_row(-3, 3, 0)),
    # Σ len·S / Σ len = (3·0 + 1·3)/4
    "opo": ("opo", {}, by_row(-0.75, 2.25, 2)),
    # w²‖g‖² = 2 and 4·1: (2·0 + 4·3)/6 = 2
    "opob": ("opob", {"weights": per_row(1, 2, 1), "grad_norm_squared": per_row(2, 1, 9)}, by_row(-2, 1, 2)),
    "opob_exact": ("opob_exact", {"grad_norm_squared": per_row(2, 4, 9)}, by_row(-2, 1, 2)),
    # three rows, two of them with a reward
    "gpg": ("gpg", {}, by_row(-1.5 * 1.5, 1.5 * 1.5, 1.5 * 2)),
    # grpo of `a` as above; of `b` 0 in the group, where all agree
    "gdpo": (
        "gdpo",
        {"components": {"a": per_row(0, 3, 2), "b": per_row(1, 1, 5)}, "component_weights": {"b": 0.5}},
        whitened(by_row(-1.5 / SIGMA, 1.5 / SIGMA, (2 + 0.5 * 5) / (1 + 1e-6))),
    ),
    # 0 and 3: 2 ln((1 + e^1.5)/2); a row alone is its own value
    "oapl": ("oapl", {"beta": 2.0}, by_row(-SOFT, 3 - SOFT, 0)),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}, whitened(by_row(-1.5, 1.5, 2))),
    # from the back: 0.5, −1.5 + 0.5/2, 1 − 1.25/2
    "reinforce_plus_plus": ("reinforce_plus_plus", {"gamma": 0.5}, whitened([0.375, -1.25, 0.5, 3, 1, 2])),
    # from the back: 0.5 + 1/2 − 0, −1.5 + 0 − 2 + 1/4, 1 + 2/2 − 1 − 3.25/4; 3 − 1; 2 − 1, 0 + 1/2 − 0.5 + 1/4
    "gae": (
        "gae",
        {"values": six([1, 2, 0, 1, 0.5, 1], NAN), "bootstrap": per_row(1, 0, 0), "turns": six([0] * 6, -1)}
        | {"gamma": 0.5, "lam": 0.5, "normalised": False},
        [0.1875, -3.25, 1, 2, 0.25, 1],
    ),
    # reward-to-go 0, −1, 0.5 and 3 and 2, 2
    "remax": ("remax", {"greedy_rewards": per_row(1, 1, 0.5)}, [-1, -2, -0.5, 2, 1.5, 1.5]),
    # w = 1 − 2π + Σπ² = 0.5 and 0.75: B_1 = (0·0.5 + 3·0.75)/1.25 = 1.8; afterwards the first row is alone
    "optimal_token_baseline": ("optimal_token_baseline", PI, [-1.8, -1, 0.5, 1.2, 2, 2]),
    # the second row's w is four times as large: B_1 = 3·3/3.5
    "optimal_token_baseline, weighted": (
        "optimal_token_baseline",
        PI | {"weights": six([1, 1, 1, 2, 1, 1], NAN)},
        [-9 / 3.5, -1, 0.5, 3 - 9 / 3.5, 2, 2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LITERAL)
def test_six_tokens_by_hand(case: str) -> None:
    name, options, expected = LITERAL[case]
    found = advantage(name, REWARDS, MASK, groups=GROUPS, **options)
    torch.testing.assert_close(found, six(expected), atol=1e-7, rtol=0)
    low = advantage(name, REWARDS.bfloat16(), MASK.bool(), groups=GROUPS, **options)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), six(expected), atol=1e-6, rtol=1e-6)


def test_oapl_goes_from_the_mean_to_the_best_without_overflow() -> None:
    rewards, mask = torch.tensor([[0.0], [1.0], [1.0], [2.0], [-900.0]]), torch.ones(5, 1)
    groups = torch.tensor([0, 0, 0, 0, 1])
    for beta, value in ((1e6, 1.0), (1e-3, 2 - 1e-3 * math.log(4))):
        found = advantage("oapl", rewards, mask, groups=groups, beta=beta)[:, 0]
        torch.testing.assert_close(
            found, torch.tensor([-value, 1 - value, 1 - value, 2 - value, 0.0]), atol=1e-4, rtol=0
        )
    with pytest.raises(ValueError, match="beta of the advantage oapl must be above 0, got 0"):
        advantage("oapl", rewards, mask, groups=groups, beta=0)


def test_every_estimator_has_a_literal_test() -> None:
    assert {name for name, _, _ in LITERAL.values()} == ADVANTAGES.keys()


def test_whiten_by_hand() -> None:
    """1, 2, 6: mean 3, unbiased variance (4 + 1 + 9)/2 = 7."""
    found = whiten(torch.tensor([[1, 2, NAN, 6]], dtype=torch.float64), torch.tensor([[1, 1, 0, 1]]))
    torch.testing.assert_close(found, torch.tensor([[-2, -1, 0, 3]], dtype=torch.float64) / math.sqrt(7 + 1e-8))


# --- verl's vectors ---------------------------------------------------------------------------------------------------

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures" / "verl_vectors.json").read_text())
INPUTS = {k: torch.tensor(v, dtype=torch.float64) for k, v in VECTORS["inputs"].items() if k != "groups"}
VERL_GROUPS = torch.tensor([ord(label) for label in VECTORS["inputs"]["groups"]])
CASES = [case for case in VECTORS["cases"] if case["fn"] == "advantage"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_verl(case: dict[str, Any]) -> None:
    options = {{"norm_adv_by_std_in_grpo": "norm"}.get(k, k): v for k, v in case["kw"].items()}
    if "sum_pi_squared" in case:
        options["sum_pi_squared"] = torch.tensor(case["sum_pi_squared"], dtype=torch.float64)
    if case["name"] == "optimal_token_baseline":
        options["logp"] = INPUTS["logp_old"]
    result = advantage(case["name"], INPUTS["rewards"], INPUTS["mask"], groups=VERL_GROUPS, **options)
    torch.testing.assert_close(result, torch.tensor(case["adv"], dtype=torch.float64), atol=1e-8, rtol=0)


def test_rejected_rows_leave_the_baseline_where_verl_keeps_them() -> None:
    """S = 1, 0 and a rejected 5: μ = ½ here, 2 in verl, whose group statistics do not look at the mask."""
    rewards, mask = torch.tensor([[1.0], [0.0], [5.0]]), torch.tensor([[1], [1], [0]])
    found = advantage("grpo", rewards, mask, groups=torch.zeros(3), norm=False)
    assert found.flatten().tolist() == [0.5, -0.5, 0.0]
    verl = (rewards - rewards.mean()) * mask
    assert verl.flatten().tolist() == [-1.0, -2.0, 0.0]


def test_returns_are_carried_over_tool_output_where_verl_drops_them() -> None:
    """Rewards 0, –, 1 with the middle masked: the first token's return is 1 here; verl resets there, and it gets 0."""
    rewards, mask = (
        torch.tensor([[0.0, NAN, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64),
        torch.tensor([[1, 0, 1], [1, 1, 1]]),
    )
    found = advantage("reinforce_plus_plus", rewards, mask, groups=torch.arange(2))
    a, b, *rest = whitened([1, 1, 0, 0, 0])
    torch.testing.assert_close(found, torch.tensor([[a, 0, b], rest], dtype=torch.float64))


# --- errors -----------------------------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    x, groups = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ValueError, match="unknown advantage 'grop'.*rloo.*did you mean 'grpo'"):
        advantage("grop", x, x, groups=groups)
    with pytest.raises(ValueError, match="unknown option of reinforce_plus_plus 'gama'.*did you mean 'gamma'"):
        advantage("reinforce_plus_plus", x, x, groups=groups, gama=1.0)
    with pytest.raises(ValueError, match="remax needs greedy_rewards"):
        advantage("remax", x, x, groups=groups)
    with pytest.raises(ValueError, match="rloo has no option 'norm'"):
        advantage("rloo", x, x, groups=groups, norm=False)
    with pytest.raises(ValueError, match=r"groups \(3,\) must be \[B\] with B = 2"):
        advantage("grpo", x, x, groups=x[0])
    with pytest.raises(ValueError, match=r"rewards \(2, 3\), mask \(2, 2\)"):
        advantage("grpo", x, x[:, :2], groups=groups)
    with pytest.raises(ValueError, match="greedy_rewards"):
        advantage("remax", x, x, groups=groups, greedy_rewards=x)
    with pytest.raises(ValueError, match="at least one"):
        advantage("gdpo", x, x, groups=groups, components={})
    with pytest.raises(ValueError, match="unknown component 'colour'.*did you mean 'color'"):
        advantage("gdpo", x, x, groups=groups, components={"color": groups}, component_weights={"colour": 1.0})
    with pytest.raises(ValueError, match="the mask has 1"):
        whiten(torch.zeros(1, 1), torch.ones(1, 1))


def test_the_table_is_complete_enough_to_make_docs_from() -> None:
    for name, estimator in ADVANTAGES.items():
        documentation = estimator.function.__doc__ or ""
        assert (
            "Baseline: " in documentation
            and "(" in documentation.splitlines()[0]
            and "Use this advantage " in documentation
        ), name
    assert ADVANTAGES["remax"].columns == {"greedy_rewards": "greedy_rewards"}
