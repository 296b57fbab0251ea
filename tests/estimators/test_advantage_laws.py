"""Laws of all advantages: masks, rejected rows, order, declared scope, tool output, degenerate groups."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.estimators.advantage import advantage
from slipstream.estimators.tables.advantage import ADVANTAGES

WHITENED = {"gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}


def random_batch(seed: int, b: int = 8, t: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, a mask of which rows 1 and 6 are empty, groups of 4, 2, 1 and 1."""
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(b, t, generator=g, dtype=torch.float64)
    mask = (torch.rand(b, t, generator=g) < 0.7).double()
    mask[:, 0] = 1
    mask[[1, 6]] = 0
    return rewards, mask, torch.tensor([3, 3, 9, 3, 9, 1, 0, 3])


def needs(name: str, rewards: Tensor, seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed + 1)
    draw_BT, draw_B = (
        torch.rand(shape, generator=g, dtype=torch.float64) for shape in (rewards.shape, rewards.shape[:1])
    )
    match name:
        case "opob" | "opob_exact":
            return {"weights": draw_B, "grad_norm_squared": draw_B.flip(0) + 0.1}
        case "gdpo":
            return {"components": {"a": draw_B, "b": draw_B.flip(0)}, "component_weights": {"a": 3.0}}
        case "gae":
            return {"values": draw_BT, "bootstrap": draw_B, "turns": torch.zeros_like(draw_BT), "gamma": 0.9}
        case "grpo_turn":
            return {"turns": (torch.arange(rewards.shape[1]) // 2).double().expand(rewards.shape).clone()}
        case "remax":
            return {"greedy_rewards": draw_B}
        case "reinforce_plus_plus":
            return {"gamma": 0.9}
        case "optimal_token_baseline":
            return {"logp": draw_BT.log(), "sum_pi_squared": draw_BT, "weights": draw_BT + 0.5}
        case _:
            return {}


def rows_of(options: dict[str, Any], at: Tensor) -> dict[str, Any]:
    def cut(value: Any) -> Any:
        return value[at] if isinstance(value, Tensor) else value

    return {k: {n: cut(x) for n, x in v.items()} if isinstance(v, dict) else cut(v) for k, v in options.items()}


@pytest.mark.parametrize("name", ADVANTAGES)
@given(seed=st.integers(0, 10_000))
def test_masked_positions_and_labels_do_not_matter(name: str, seed: int) -> None:
    rewards, mask, groups = random_batch(seed)
    options = needs(name, rewards, seed)
    found = advantage(name, rewards, mask, groups=groups, **options)
    dirty = {k: v.masked_fill(mask == 0, math.nan) if getattr(v, "ndim", 0) == 2 else v for k, v in options.items()}
    again = advantage(name, rewards.masked_fill(mask == 0, math.nan), mask.bool(), groups=-groups, **dirty)
    torch.testing.assert_close(again, found)
    for each in found if isinstance(found, tuple) else [found]:
        assert (each[mask == 0] == 0).all() and each.isfinite().all()


@pytest.mark.parametrize("name", ADVANTAGES)
@given(seed=st.integers(0, 10_000))
def test_rejected_rows_might_as_well_not_be_there_and_order_does_not_matter(name: str, seed: int) -> None:
    rewards, mask, groups = random_batch(seed)
    options = needs(name, rewards, seed)
    whole = advantage(name, rewards, mask, groups=groups, **options)
    at = torch.tensor([7, 2, 0, 5, 4, 3])  # all but the empty ones
    found = advantage(name, rewards[at], mask[at], groups=groups[at], **rows_of(options, at))
    torch.testing.assert_close(found, whole[at])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_declared_scope_is_what_an_estimator_looks_at(name: str) -> None:
    """Row scope: each row by itself. Group scope: each group by itself. Batch scope: not even that."""
    rewards, mask, groups = random_batch(5)
    rewards[2] = 0  # gpg counts rows without reward
    options = needs(name, rewards, 5)
    whole = advantage(name, rewards, mask, groups=groups, **options)

    def apart(parts: list[Tensor]) -> bool:
        alive = [at for at in parts if mask[at].sum() > 1]
        found = [advantage(name, rewards[at], mask[at], groups=groups[at], **rows_of(options, at)) for at in alive]
        return all(torch.allclose(each, whole[at]) for each, at in zip(found, alive, strict=True))

    by_group = apart([(groups == label).nonzero().flatten() for label in groups.unique()])
    by_row = apart([torch.tensor([i]) for i in range(len(groups))])
    expected = {"row": (True, True), "group": (True, False), "batch": (False, False)}
    assert (by_group, by_row) == expected[ADVANTAGES[name].scope]


@pytest.mark.parametrize("name", ["grpo_turn", "reinforce_plus_plus", "gae", "remax", "optimal_token_baseline"])
@given(seed=st.integers(0, 10_000))
def test_tool_output_between_tokens_changes_nothing(name: str, seed: int) -> None:
    """Masked columns put in anywhere; the optimal token baseline has to be told that turns are not aligned."""
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randn(4, 6, generator=g, dtype=torch.float64)
    length = torch.randint(1, 7, (4, 1), generator=g)
    mask, groups = (torch.arange(6) < length).double(), torch.tensor([0, 0, 0, 1])
    options = needs(name, rewards, seed)
    packed = advantage(name, rewards, mask, groups=groups, **options)

    at = torch.stack([torch.randperm(9, generator=g)[:6].sort().values for _ in range(4)])

    def spread(x: Tensor) -> Tensor:
        return torch.full((4, 9), math.nan, dtype=x.dtype).scatter(1, at, x) if x.ndim == 2 else x

    wide_mask = torch.zeros(4, 9, dtype=mask.dtype).scatter(1, at, mask)
    wide = {k: spread(v) if isinstance(v, Tensor) else v for k, v in options.items()}
    if name == "optimal_token_baseline":
        wide["multi_turn"] = True
    found = advantage(name, spread(rewards), wide_mask, groups=groups, **wide)
    torch.testing.assert_close(found.gather(1, at), packed)


def test_rows_lined_up_by_position_or_by_number_of_the_token() -> None:
    """Two rows of two tokens, the second interrupted: by position the rows meet only at the first token."""
    rewards = torch.tensor([[0, 1, math.nan], [0, math.nan, 0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    options = {"logp": torch.full_like(rewards, 0.5).log(), "sum_pi_squared": torch.full_like(rewards, 0.5)}
    # equal weights: the first tokens' baseline is ½; so is the second's by number, by position each is its own baseline
    for multi_turn, second in ((True, (0.5, -0.5)), (False, (0.0, 0.0))):
        found = advantage(
            "optimal_token_baseline", rewards, mask, groups=torch.zeros(2), multi_turn=multi_turn, **options
        )
        expected = torch.tensor([[0.5, second[0], 0], [-0.5, 0, second[1]]], dtype=torch.float64)
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADVANTAGES)
def test_nothing_valid_is_zero_or_an_error_that_says_so(name: str) -> None:
    rewards, mask, groups = random_batch(0)
    options = needs(name, rewards, 0)
    if name in WHITENED:
        with pytest.raises(ValueError, match="at least two valid tokens, the mask has 0"):
            advantage(name, rewards, mask * 0, groups=groups, **options)
    else:
        assert (advantage(name, rewards, mask * 0, groups=groups, **options) == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_that_agree_are_finite_and_centred(name: str) -> None:
    rewards, mask = torch.full((4, 1), 0.1), torch.ones(4, 1)
    zero = {"weights": torch.zeros(4), "grad_norm_squared": torch.zeros(4)}
    options = zero if name.startswith("opob") else needs(name, rewards, 0)
    found = advantage(name, rewards, mask, groups=torch.zeros(4), **options)
    assert found.isfinite().all()
    if not options:
        torch.testing.assert_close(found, torch.zeros(4, 1), atol=1e-6, rtol=0)
