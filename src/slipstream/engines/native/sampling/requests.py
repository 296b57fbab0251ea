"""What a sampler is asked for, and who waits for the answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from slipstream.engines.base import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Handle, Ints, Prompt, Rollout

Told = tuple[asyncio.Future[Any], Any]
"""Whose future, and the answer."""


@dataclass(eq=False)
class Request:
    prompt: Prompt
    sampling: Sampling
    answer: asyncio.Future[list[Handle]]
    done: dict[int, Rollout] = field(default_factory=dict)

    @property
    def aborted(self) -> bool:
        """Nobody waits any more: whoever cancels `generate` cancels the future that it awaits."""
        return self.answer.cancelled()


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


@dataclass(eq=False)
class Publish:
    weights: WeightsRef
    mode: Mode
    answer: asyncio.Future[Loaded]
    called: float
    """When, on `time.perf_counter`: an engine works in real time, whatever clock the pipeline runs on."""
