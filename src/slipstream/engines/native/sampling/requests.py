"""Requests to a sampler (one per group of responses), their running rows, and the futures of the callers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from slipstream.engines.native.sampling.drafts import Lookup
from slipstream.engines.native.sampling.parking import Lineage
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Group, Handle, Ints, Prompt, Rollout, handed_over, header_of

FutureResult = tuple[asyncio.Future[Any], Any]
"""A caller's future, and the result to set in this future."""


@dataclass(eq=False)
class Request:
    prompt: Prompt
    sampling: Sampling
    answer: asyncio.Future[list[Handle]]
    done: dict[int, Rollout] = field(default_factory=dict)
    """Complete responses, by index in the group."""
    begun: dict[int, Rollout] = field(default_factory=dict)
    """Unfinished responses that are not running, by index in the group: to be continued here or returned on release."""
    released: bool = False
    draws: Sampling = field(init=False)
    """Sampling options that affect the choice of a token; requests with equal options share one object."""

    def __post_init__(self) -> None:
        self.draws = interned(replace(self.sampling, max_tokens=1, group=1, park=False))

    @property
    def ids(self) -> bytes:
        """Token ids of the prompt as bytes, to compare prompts."""
        return self.prompt.tokens.astype(np.int64).tobytes()

    @property
    def aborted(self) -> bool:
        """True if the caller of `generate` was cancelled."""
        return self.answer.cancelled()

    @property
    def left(self) -> list[int]:
        return [place for place in range(self.sampling.group) if place not in self.done]

    def lineage(self, place: int) -> Lineage:
        return self.prompt.seed, self.prompt.first + place, self.sampling.temperature

    def group(self) -> list[Handle]:
        """Return handles of all responses; if some are incomplete, only responses that exist, marked as released."""
        if self.left:
            have = self.done | self.begun
            return handed_over(have[place] for place in sorted(have))
        return [Handle(header_of(self.done[place]), self.done[place]) for place in range(self.sampling.group)]

    def forget(self) -> int:
        """Drop the stored responses so that the request starts again; return their number of tokens."""
        thrown = sum(len(rollout.tokens) for rollout in (self.done | self.begun).values())
        self.done.clear()
        self.begun.clear()
        return thrown


@lru_cache(64)
def interned(sampling: Sampling) -> Sampling:
    return sampling


def new_request(prompt: Prompt, sampling: Sampling, answer: asyncio.Future[list[Handle]], begun: Group = ()) -> Request:
    members = {handle.body.index - prompt.first: handle.body for handle in begun}
    done = {place: rollout for place, rollout in members.items() if rollout.finish != "released"}
    return Request(prompt, sampling, answer, done, {place: r for place, r in members.items() if place not in done})


@dataclass(eq=False)
class Row:
    """One running response: index in the group, and length in tokens, prompt included."""

    request: Request
    index: int
    length: int
    kept: list[Ints] = field(default_factory=list)
    """Sampling support: the token ids that could be drawn at each position; empty if not requested."""
    lookup: Lookup | None = None
    """All tokens of the row, if drafts for it are looked up in them; None without speculation."""

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
    """Time of the call from `time.perf_counter`: engines use real time even if the pipeline uses a virtual clock."""
