"""Rewards of single turns: where they are in an episode, and what advantages make of them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.config.file import parse
from slipstream.objective.columns import COLUMNS, Episodes, SampleInputs
from slipstream.objective.method import Method, method_of
from slipstream.records import Prompt, Rollout, Scored, lineage, one_turn

TREE: dict[str, Any] = {
    "student": "tiny",
    "updates": 2,
    "environment": {"use": "table"},
    "sampler": {"max_tokens": 40, "group": 2},
    "loss": {"weight": 0.0},
    "learner": {"batch_size": 4},
    "policy": {"loss": "reinforce", "advantage": "grpo_turn", "advantage_options": {"norm": False}},
    "task": {"reward": "environment"},
}
TURNS = torch.tensor([0, 0, -1, 1, 1, -1, 2])
"""Three turns with an observation of one token behind each of the first two."""


def method(**changes: Any) -> Method:
    return method_of(parse(TREE | changes))


def row(episode: int, reward: float, turns: list[float], mask: Tensor = TURNS >= 0) -> SampleInputs:
    """An episode in which each of the turns 0, 1 and 2 has its reward, or less of them."""
    rewards = torch.tensor([*turns, *[0.0] * (3 - len(turns)), 0.0], dtype=torch.float64)[TURNS]
    columns = {"turns": TURNS, "turn_rewards": rewards}
    logps = torch.zeros(len(TURNS), dtype=torch.float64)
    names = {"environment": reward, "exact": 1.0}
    return SampleInputs(
        group=0, episode=episode, rewards=names, mask_T=mask, behavior_T=logps, columns=columns
    )  # fmt: skip


def episodes(rows: list[SampleInputs], **changes: Any) -> Episodes:
    made = method(**changes)
    return Episodes(rows, made, update=1, coefficients=made.coefficients)


def test_a_record_has_the_reward_of_a_turn_at_all_its_trained_tokens() -> None:
    def turn(n: int) -> Rollout:
        return one_turn(
            prompt, 0, actions=np.ones((n, 1), np.int32), action_logp=np.zeros((n, 1), np.float32),
            versions=np.zeros(n, np.int32), finish="eos",
        )  # fmt: skip

    prompt, seen = Prompt(id="p", number=0, tokens=np.array([1], np.int32)), np.array([2, 2], np.int32)
    of_turns = np.array([0.5, -1.0])
    rollout = lineage(prompt, 0, [turn(2), seen, turn(1), seen, turn(3)], finish="eos", turn_rewards=of_turns)
    (found_T,) = COLUMNS["turn_rewards"].compute(None, [Scored(rollout=rollout)])
    assert found_T.tolist() == [0.5, 0.5, 0, 0, -1, 0, 0, 0, 0, 0], "the last turn has none"
    with pytest.raises(ValueError, match="turn_rewards is .*nan"):
        lineage(prompt, 0, [turn(2)], finish="eos", turn_rewards=np.array([np.nan]))


def test_turns_are_rewarded_at_their_ends_and_the_rest_is_at_the_end_of_the_episode() -> None:
    found = episodes([row(0, 3.0, [1.0, 0.0, 2.0]), row(1, 1.0, [0.5, -1.0])])["rewards"]
    # 1 − 0.5 + 1 is what close() gave beyond the two turns
    assert found.tolist() == [[0, 1, 0, 0, 0, 0, 2], [0, 0.5, 0, 0, -1, 0, 1.5]]


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ([1, 0, 0, 0, 0, 0, 1], [1.5, 0, 0, 0, 0, 0, 2.5]),  # turn 1 is rejected: its 0.5 is at the end of turn 0
        ([0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 3.0, 0, 0]),  # nothing up to turn 0 is left, and its 1 is nobody's
    ],
)
def test_the_reward_of_a_rejected_turn_is_at_the_last_token_before_it(kept: list[int], expected: list[float]) -> None:
    """close() gave 1 beyond the turns, which is at the last token that is left."""
    whole = episodes([row(0, 4.0, [1.0, 0.5, 1.5])])
    assert whole.left(torch.tensor([kept]).bool())["rewards"].tolist() == [expected]


def test_a_row_without_a_turn_is_not_compared_there() -> None:
    """Turn 0 of the third episode is rejected: the others have rewards to go of 1 and 0, and a mean of 0.5."""
    rows = [row(0, 1.0, [1.0]), row(1, 0.0, [0.0]), row(2, 9.0, [0.0, 9.0])]
    mask = (TURNS >= 0).repeat(3, 1)
    mask[2, :2] = False
    found = episodes(rows).left(mask)["advantages"]
    assert found[:, 0].tolist() == [0.5, -0.5, 0]
    assert found[:, 3].tolist() == [-3, -3, 6]


def test_the_reward_of_the_environment_has_its_weight_and_other_rewards_are_at_the_end() -> None:
    policy = TREE["policy"] | {"reward_weights": {"environment": 2.0, "exact": 0.25}}
    found = episodes([row(0, 3.0, [1.0, 0.0, 2.0])], policy=policy, task={"reward": ["environment", "exact"]})
    assert found["rewards"].tolist() == [[0, 2, 0, 0, 0, 0, 4.25]]


@pytest.mark.parametrize("changes", [{"task": {"reward": "exact"}}, {"policy": {"loss": "reinforce"}}])
def test_without_the_reward_of_the_environment_or_with_one_advantage_for_all_tokens_turns_have_none(
    changes: dict[str, Any],
) -> None:
    found = episodes([row(0, 3.0, [1.0, 0.0, 2.0])], **changes)
    total = 1.0 if "task" in changes else 3.0
    assert found["rewards"].tolist() == [[0, 0, 0, 0, 0, 0, total]]
    assert "turn_rewards" not in method(**changes).columns


def test_advantages_of_turns_by_hand() -> None:
    """The rewards to go are 3, 2, 2 and 1, 0.5, 1.5, and the mean of both episodes is the baseline of each turn."""
    found = episodes([row(0, 3.0, [1.0, 0.0, 2.0]), row(1, 1.0, [0.5, -1.0])])["advantages"]
    expected = [[1, 1, 0, 0.75, 0.75, 0, 0.25], [-1, -1, 0, -0.75, -0.75, 0, -0.25]]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("by_turn", "expected"),
    [
        # from the back: 2 − 1; 0 + 1 − 0.5 + 0.5·1; 0 + 0.5 − 0.5 + 0.5·1; 1 + 0.5 − 0 + 0.5·0.5; 0 + 0 − 0 + 0.5·1.75
        (False, [0.875, 1.75, 0, 0.5, 1.0, 0, 1.0]),
        # turns: 2 − 1 = 1; 0 + 1 − 0.5 + 0.5·1 = 1; 1 + 0.5 − 0 + 0.5·1 = 2
        (True, [2.0, 2.0, 0, 1.0, 1.0, 0, 1.0]),
    ],
)
def test_gae_has_the_rewards_of_turns_by_token_and_by_turn(by_turn: bool, expected: list[float]) -> None:
    options = {"gamma": 1.0, "lam": 0.5, "by_turn": by_turn, "normalised": False}
    policy = {"loss": "reinforce", "advantage": "gae", "advantage_options": options}
    values = torch.tensor([0.0, 0.0, 9.0, 0.5, 0.5, 9.0, 1.0])
    one = row(0, 3.0, [1.0, 0.0, 2.0])
    columns = dict(one.columns) | {"values": values, "bootstrap": torch.tensor(0.0)}
    found = episodes([SampleInputs(**vars(one) | {"columns": columns})], policy=policy, critic={})["advantages"]
    assert found[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_values_of_the_discounted_rewards_to_come_explain_all_of_their_variance(gamma: float) -> None:
    """Turns of two, two and one tokens have the rewards 1, 0, 2, each at its last token."""
    options = {"gamma": gamma, "lam": 0.3, "normalised": False}
    policy = {"loss": "reinforce", "advantage": "gae", "advantage_options": options}
    rewards, to_come, exact = [0.0, 1.0, 0.0, 0.0, 2.0], 0.0, list[float]()
    for reward in reversed(rewards):
        to_come = reward + gamma * to_come
        exact.insert(0, to_come)
    values = torch.zeros(7)
    values[[0, 1, 3, 4, 6]] = torch.tensor(exact)
    one = row(0, 3.0, [1.0, 0.0, 2.0])
    columns = dict(one.columns) | {"values": values, "bootstrap": torch.tensor(0.0)}
    found = episodes([SampleInputs(**vars(one) | {"columns": columns})], policy=policy, critic={})
    assert found["returns"] is not None and found.metrics["critic/explained_variance"] == pytest.approx(1.0)
