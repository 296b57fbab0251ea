"""Settings of a reward model, and the parent's side of its process; this file imports no torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import EngineError
from slipstream.records import Ungraded
from slipstream.rewards.functions import Answer, Grades, Unusable, number
from slipstream.user_code.process import STARTED, Child


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    path: str
    max_length: int
    """Largest number of tokens of a prompt with its response."""
    batch: int
    dtype: str
    device: str
    timeout: float
    """Maximum seconds for one response."""
    name: str = "model"

    def open(self) -> RewardModelProcess:
        """Start the process of the model."""
        return RewardModelProcess(self)


class RewardModelProcess:
    """Parent's side of the process. It is started again after it has ended."""

    def __init__(self, settings: RewardModel) -> None:
        self.settings, self.lock, self.ready = settings, threading.Lock(), False
        self.child = self._child()

    def _child(self) -> Child:
        self.ready = False
        return Child("slipstream.engines.native.reward_model", self.settings)

    async def grades(self, asked: Sequence[tuple[Any, Answer]]) -> list[Grades]:
        pairs = [(question, answer.text) for question, answer in asked]
        return await asyncio.to_thread(self._grades, pairs)

    def _grades(self, pairs: list[tuple[Any, str]]) -> list[Grades]:
        with self.lock:
            if self.child.ended:
                self.child = self._child()
            try:
                self._wait()
                self.child.connection.send(pairs)
                if self.child.connection.poll(self.settings.timeout * len(pairs)):
                    return [_grade(score) for score in self.child.connection.recv()]
                cause, what = "timeout", f"took more than {self.settings.timeout:g} s for a response (task.timeout)"
                self.child.close()
            except (EOFError, OSError):
                cause, what = "crash", f"ended its process: {self.child.end()}"
                self.child.close()
        return [Ungraded(cause, f"the reward model {self.settings.path} {what}")] * len(pairs)

    def _wait(self) -> None:
        if self.ready:
            return
        if not self.child.connection.poll(STARTED):
            raise EngineError(f"the reward model {self.settings.path} is not loaded after {STARTED:.0f} s")
        if (error := self.child.connection.recv()) is not None:
            raise error
        self.ready = True

    def close(self) -> None:
        self.child.close()


def _grade(score: float | Ungraded) -> Grades:
    if isinstance(score, Ungraded):
        return score
    try:
        return {"model": number(score)}
    except Unusable as error:
        return Ungraded(error.cause, f"the reward model {error}")
