"""Environments that reward single turns: what `step` may return, the reward of the episode, and training on them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream.environments import Reply, Step
from slipstream.environments.pool import EnvironmentPool, EnvironmentSettings
from slipstream.errors import EnvironmentFailed
from slipstream.protocols import Sampling
from slipstream.records import Prompt, Rollout, header_of
from slipstream.run_dir.writing import read_lines
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy
from support.toy_episodes import WIDE, Room, World

SOURCE = """
    from slipstream.environments import Step

    class Judged:
        def start(self, meta):
            self.turns = 0

        def step(self, reply):
            self.turns += 1
            rewards = {"nan": float("nan"), "word": "much", "inf": float("inf")}
            reward = rewards.get(reply.text, len(reply.text) % 3 / 2)
            return Step(({"role": "tool", "content": "1"},), self.turns == 3, {"long": len(reply.text)}, reward)
"""
GIVEN = {"id": "a", "prompt": "?", "ground_truth": 4, "meta": {}, "data_source": "x", "seed": 5}


@pytest.fixture
def judged(tmp_path: Path) -> str:
    (tmp_path / "judged.py").write_text(dedent(SOURCE))
    return f"{tmp_path / 'judged.py'}:Judged"


def test_a_step_may_have_a_reward_and_a_bad_one_fails_by_name(judged: str) -> None:
    async def main(pool: EnvironmentPool) -> None:
        episode = pool.place()
        await episode.ready()
        await episode.start(GIVEN)
        step = await episode.step(Reply("abcd"))
        assert (step.reward, step.done, step.metrics["own/long"]) == (0.5, False, 4.0)
        for text, why in (
            ("nan", "Judged.step returned nan for 'reward'"),
            ("inf", "Judged.step returned inf for 'reward'"),
            ("word", "Judged.step returned for 'reward' str 'much', which is not a number"),
        ):
            with pytest.raises(EnvironmentFailed, match=why) as found:
                await episode.step(Reply(text))
            assert found.value.cause == "error", "it is counted in failed/error, as that of close() is"
        episode.drop()

    pool = EnvironmentPool(EnvironmentSettings(judged, None, 200))
    try:
        asyncio.run(main(pool))
    finally:
        pool.close()


class Rewarding(World):
    """Rewards its first and third turn; `end` is what it returns at the end."""

    end: dict[str, float] = {}  # noqa: RUF012

    def place(self, *, alone: bool = False) -> Room:
        self.opened += 1
        self.said.append([])
        return RewardingRoom(self, self.opened - 1)


class RewardingRoom(Room):
    async def step(self, reply: Reply) -> Step:
        step = await super().step(reply)
        turn = len(self.world.said[self.number])
        return replace(step, reward={1: 0.5, 3: -2.0}.get(turn))

    async def close(self) -> dict[str, float]:
        await super().close()
        assert isinstance(self.world, Rewarding)
        return self.world.end


def played(turns: int, end: dict[str, float], limit: int = 9) -> Rollout:
    world = Rewarding(turns=turns)
    world.end = end
    sampler = world.sampler(toy.ToySampler(toy.random_table(8, seed=0)), replace(WIDE, turns=limit))
    prompt = Prompt(id="p", number=7, tokens=np.array([1, 2], np.int32), seed=5)
    (handle,), _ = virtual.run(sampler.generate(prompt, Sampling(max_tokens=40, group=1, draws=1)))
    rollout: Rollout = handle.body
    assert handle.header.outcome == header_of(rollout).outcome
    return rollout


@pytest.mark.parametrize(
    ("turns", "end", "limit", "of_turns", "reward"),
    [
        (3, {}, 9, [0.5, 0.0, -2.0], -1.5),
        (3, {}, 2, [0.5, 0.0], 0.5),  # a limit ends it: the sum so far
        (3, {"reward": 4.0}, 9, [0.5, 0.0, -2.0], 4.0),  # the end decides
        (3, {"reward": 4.0, "reward/form": 4.0}, 9, [0.5, 0.0, -2.0], 4.0),
    ],
)
def test_the_reward_of_an_episode_is_the_sum_of_its_turns_unless_its_end_has_one(
    turns: int, end: dict[str, float], limit: int, of_turns: list[float], reward: float
) -> None:
    rollout = played(turns, end, limit)
    assert rollout.turn_rewards is not None and rollout.turn_rewards.tolist() == of_turns
    assert rollout.outcome["reward"] == reward


def test_an_environment_without_rewards_of_turns_has_those_of_its_end_alone() -> None:
    world = World(turns=3)
    sampler = world.sampler(toy.ToySampler(toy.random_table(8, seed=0)))
    prompt = Prompt(id="p", number=7, tokens=np.array([1, 2], np.int32), seed=5)
    (handle,), _ = virtual.run(sampler.generate(prompt, Sampling(max_tokens=40, group=1, draws=1)))
    assert handle.body.turn_rewards is None and handle.body.outcome["reward"] == 3.0


@pytest.mark.parametrize(
    "method",
    [
        {"policy": {"advantage": "grpo_turn"}},
        {"policy": {"advantage": "gae", "advantage_options": {"by_turn": True}}, "critic": {}},
    ],
    ids=["grpo_turn", "gae"],
)
def test_a_student_is_trained_on_rewards_of_turns(tmp_path: Path, judged: str, method: dict[str, Any]) -> None:
    config: dict[str, Any] = {
        "student": "builtin:tool_student",
        "updates": 2,
        "output": str(tmp_path / "run"),
        "data": {"train": "builtin:table", "limit": 16},
        "environment": {"use": judged, "turn_tokens": 12, "turns": 3},
        "sampler": {"max_tokens": 60, "group": 4, "slots": 8},
        "loss": {"weight": 0.0},
        "task": {"reward": "environment"},
        "learner": {"batch_size": 8, "lr": 1e-3},
        "runtime": {"kind": "inline", "device": "cpu"},
        **method,
    }
    slipstream.train(config, quiet=True, checks=False)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["failed_samples"] for line in lines] == [0, 0]
    for line in lines:
        assert 0 < line["reward/environment"] <= 3 and line["policy/rows_moved"] > 0
        assert line["policy/reward"] == pytest.approx(line["reward/environment"])
