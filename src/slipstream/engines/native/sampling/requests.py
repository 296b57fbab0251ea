"""What a sampler is asked for, and who waits for the answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from slipstream.engines.native.sampling.parking import Lineage
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Group, Handle, Ints, Prompt, Rollout, handed_over, header_of

Told = tuple[asyncio.Future[Any], Any]
"""Whose future, and the answer."""


@dataclass(eq=False)
class Request:
    prompt: Prompt
    sampling: Sampling
    answer: asyncio.Future[list[Handle]]
    done: dict[int, Rollout] = field(default_factory=dict)
    """Members that are complete, by their place in the group."""
    begun: dict[int, Rollout] = field(default_factory=dict)
    """Those that are to be gone on with, or were until they left; not while they run."""
    released: bool = False
    draws: Sampling = field(init=False)
    """What decides how its tokens are drawn: one object for all requests that agree in that, however long they are."""

    def __post_init__(self) -> None:
        self.draws = the_same(replace(self.sampling, max_tokens=1, group=1, park=False))

    @property
    def ids(self) -> bytes:
        """Its prompt, to be compared."""
        return self.prompt.tokens.astype(np.int64).tobytes()

    @property
    def aborted(self) -> bool:
        """Nobody waits any more: whoever cancels `generate` cancels the future that it awaits."""
        return self.answer.cancelled()

    @property
    def left(self) -> list[int]:
        """The members that are still to be drawn."""
        return [place for place in range(self.sampling.group) if place not in self.done]

    def lineage(self, place: int) -> Lineage:
        """Of the member there."""
        return self.prompt.seed, self.prompt.first + place, self.sampling.temperature

    def group(self) -> list[Handle]:
        """The answer: all members, or what there is of them."""
        if self.left:
            have = self.done | self.begun
            return handed_over(have[place] for place in sorted(have))
        return [Handle(header_of(self.done[place]), self.done[place]) for place in range(self.sampling.group)]

    def forget(self) -> int:
        """Begin again; returns how many tokens that costs."""
        thrown = sum(len(rollout.tokens) for rollout in (self.done | self.begun).values())
        self.done.clear()
        self.begun.clear()
        return thrown


@lru_cache(64)
def the_same(sampling: Sampling) -> Sampling:
    return sampling


def requested(prompt: Prompt, sampling: Sampling, answer: asyncio.Future[list[Handle]], begun: Group = ()) -> Request:
    members = {handle.body.index - prompt.first: handle.body for handle in begun}
    request = Request(prompt, sampling, answer)
    for place, rollout in members.items():
        (request.begun if rollout.finish == "released" else request.done)[place] = rollout
    return request


@dataclass(eq=False)
class Row:
    """One running response: its place in the group, and how many positions its sequence has."""

    request: Request
    index: int
    length: int
    kept: list[Ints] = field(default_factory=list)
    """The ids that could have been drawn at each of its tokens, where they are asked for."""

    @property
    def tokens(self) -> int:
        return self.length - len(self.request.prompt.tokens)

    @property
    def lineage(self) -> Lineage:
        return self.request.lineage(self.index)


@dataclass(eq=False)
class Publish:
    weights: WeightsRef
    mode: Mode
    answer: asyncio.Future[Loaded]
    called: float
    """When, on `time.perf_counter`: an engine works in real time, whatever clock the pipeline runs on."""
