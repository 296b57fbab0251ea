"""Episodes of the toy model: a renderer of numbers, and a world that answers in numbers, as late and badly as told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.environments import Call, Message, Reply, Step
from slipstream.environments.episodes import Episodes, Limits
from slipstream.errors import EnvironmentFailed
from slipstream.records import Ints, derive_seed
from support import tabular_engines as toy

WIDE = Limits(turns=4, calls=100, turn_tokens=4, seconds=1e6, step_seconds=1e3)


class Numbers:
    """Token ids are the words of this student; an observation is the ids that it spells, behind the end of the turn."""

    def __init__(self, eos: int = toy.EOS) -> None:
        self.eos, self.stop_ids = eos, frozenset({eos})

    def parse(self, ids: Ints, *, cut: bool = False) -> Reply:
        said = [int(each) for each in ids if each != self.eos]
        return Reply(" ".join(map(str, said)), (Call("say", {"ids": said}),))

    def extend(self, ids: Ints, messages: Sequence[Message]) -> Ints:
        end = [] if ids[-1] == self.eos else [self.eos]
        seen = [int(each) for message in messages for each in message["content"].split()]
        return np.array([*end, *seen], np.int32)

    def insert(self, prompt: Ints, messages: Sequence[Message]) -> Ints:
        return np.concatenate([prompt, self.extend(np.array([self.eos]), messages)])

    def text(self, ids: Ints) -> str:
        return " ".join(map(str, ids))


@dataclass
class World:
    """The seconds of a step and its faults are drawn by the environment's seed and number."""

    seconds: Callable[[random.Random], float] = lambda rng: 0.0
    faults: float = 0.0
    """The share of steps that hang, crash or raise."""
    turns: int = 3
    """Replies after which it is done."""
    moody: bool = False
    """Every environment answers otherwise than the one before."""
    first: str = ""
    """Return the text that a student sees before its first turn."""
    closing: float = 0.0
    """Seconds that close takes."""
    opened: int = 0
    closed: int = 0
    dropped: int = 0
    ended: bool = False
    said: list[list[Reply]] = field(default_factory=list)
    """Numbers of every environment."""

    def place(self, *, alone: bool = False) -> Room:
        self.opened += 1
        self.said.append([])
        return Room(self, self.opened - 1)

    def close(self) -> None:
        self.ended = True

    def sampler(self, policy: Any, limits: Limits = WIDE, eos: int = toy.EOS) -> Episodes:
        return Episodes(policy, Numbers(eos), self, limits)


@dataclass
class Room:
    world: World
    number: int
    seed: int = 0

    async def ready(self) -> None:
        pass

    async def start(self, given: dict[str, Any]) -> list[Message]:
        self.seed = given["seed"]
        return [{"role": "user", "content": self.world.first}] if self.world.first else []

    async def step(self, reply: Reply) -> Step:
        said = self.world.said[self.number]
        said.append(reply)
        rng = random.Random(derive_seed(self.seed, len(said), self.number))
        await asyncio.sleep(self.world.seconds(rng))
        if rng.random() < self.world.faults:
            match rng.randrange(3):
                case 0:
                    await asyncio.Event().wait()
                case 1:
                    raise EnvironmentFailed("crash", "it is gone")
                case _:
                    raise EnvironmentFailed("error", "it raised")
        ids = reply.calls[0].arguments["ids"] if reply.calls else ()
        spoken = sum(ids, self.number if self.world.moody else 0)
        seen = f"{1 + spoken % 5} {2 + len(said) % 3}"
        done = len(said) == self.world.turns
        return Step(
            () if done else ({"role": "tool", "content": seen},),
            done,
            {"calls": float(len(said)), "own/spoken": spoken},
        )

    async def close(self) -> dict[str, float]:
        await asyncio.sleep(self.world.closing)
        self.world.closed += 1
        return {"reward": float(len(self.world.said[self.number]))}

    def drop(self) -> None:
        self.world.dropped += 1
