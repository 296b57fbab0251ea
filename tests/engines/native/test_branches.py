"""Learning from an agent's branches equals learning from each of its calls, weighted by episode."""

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.objective import PolicyConfig
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.sessions import Session
from slipstream.objective.method import Method
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Batch, Group, Handle, Ints, Prompt, Rollout, derive_seed, header_of, one_turn, total
from support.engines import native_learner, native_scorer
from support.tiny_models import EOS, VOCAB, make_model, wrap


class Dice:
    """Draws from nobody, and keeps what it said, call by call."""

    def __init__(self) -> None:
        self.calls: list[Rollout] = []

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        rng = np.random.default_rng(derive_seed(prompt.seed, prompt.first, prompt.offset))
        n = int(rng.integers(1, 5))
        actions = rng.integers(2, VOCAB, (n, 2)).astype(np.int32)
        logp = rng.uniform(-3.5, -2.5, (n, 2)).astype(np.float32)
        rollout = one_turn(
            prompt, prompt.first, actions=actions, action_logp=logp, versions=np.zeros(n, np.int32), finish="eos"
        )
        self.calls.append(rollout)
        return [Handle(header_of(rollout), rollout)]

    async def release(self, numbers: Collection[int] = ()) -> None: ...

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        return Loaded("")


class Mute:
    """A tokenizer that is never called, because these agents speak token ids."""

    stop_ids = frozenset({EOS})

    def visible(self, ids: Ints) -> str:
        return ""


async def session(seed: int, index: int) -> tuple[list[Rollout], list[Rollout]]:
    """The lineages of an episode, and its calls: gone on with, and begun from the middle and from elsewhere."""
    rng, dice = random.Random(seed), Dice()
    prompt = Prompt(id="p", number=0, tokens=np.array([2, 3, 4], np.int32), seed=seed)
    renderer: Any = Mute()
    limits = Limits(turns=99, calls=99, turn_tokens=None, seconds=60.0, step_seconds=10.0)
    made = Session(dice, renderer, prompt, Sampling(max_tokens=100), index, limits, VOCAB)
    known = [prompt.tokens]
    for _ in range(5):
        ids = rng.choice([known[-1], known[-1], rng.choice(known), np.array([5, 6, 7], np.int32)])
        await made.generate(np.append(ids, rng.randrange(2, VOCAB)).astype(np.int32))
        call = dice.calls[-1]
        known.append(np.concatenate([call.prompt.tokens, call.tokens, [EOS]]).astype(np.int32))
    calls = [replace(call, index=index + 4 * n, episode=index, branch=n) for n, call in enumerate(dice.calls)]
    return made.rollouts("eos", 4, {}), calls


METHODS = {
    "draws": Method(loss=ReverseKLMC(m=2)),
    "rewards": Method(loss=ReverseKLMC(m=2, weight=0.5), policy=PolicyConfig(loss="vanilla"), rewards={"exact": 1.0}),
    "episodes": Method(
        loss=ReverseKLMC(m=2, weight=0.0),
        policy=PolicyConfig(loss="reinforce", aggregation="seq-mean-token-mean"),
        rewards={"exact": 1.0},
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_lineages_teach_what_their_calls_would(name: str) -> None:
    model, teacher = (make_model("phi", seed=seed, dtype=torch.float64) for seed in range(2))

    async def gradients(rows: Sequence[Rollout]) -> list[torch.Tensor]:
        scorer = native_scorer(wrap(teacher))
        learner = native_learner(wrap(model), method=METHODS[name], config=LearnerConfig(token_budget=200), updates=1)
        rows = [replace(row, rewards={"exact": float(row.episode % 2)}) for row in rows]
        batch = Batch((tuple(await scorer.score([Handle(header_of(row), row) for row in rows])),), 1)
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        found = [p.grad.clone() for p in learner.lm.model.parameters() if p.grad is not None]
        scorer.close()
        learner.close()
        return found

    async def main() -> None:
        both = [await session(seed, seed) for seed in range(4)]
        lineages, calls = ([row for each in both for row in each[n]] for n in range(2))
        assert len(lineages) < len(calls) == 20 and len(lineages) > 4
        assert sum(row.trained_tokens for row in lineages) == sum(len(call.tokens) for call in calls)
        one, other = await gradients(lineages), await gradients(calls)
        assert one and any(each.any() for each in one)
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)

    asyncio.run(main())
