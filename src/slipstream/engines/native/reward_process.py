"""Settings of a reward model, and the parent's side of its process; this file imports no torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.children import Child
from slipstream.errors import EngineError
from slipstream.grades import Grades, Ungraded
from slipstream.rewards.functions import Answer, Unusable, number


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


class ModelProcess(Child):
    def __init__(self, settings: RewardModel) -> None:
        super().__init__("slipstream.engines.native.reward_model", settings)
        self.settings = settings

    def lost(self, how: str, *, late: bool) -> Exception:
        return EngineError(f"the reward model {self.settings.path} is not loaded after {how}") if late else EOFError()


class RewardModelProcess:
    """Grader of batches by the model in its process, which is started again after it has ended."""

    def __init__(self, settings: RewardModel) -> None:
        self.settings, self.lock, self.child = settings, threading.Lock(), ModelProcess(settings)

    async def grades(self, asked: Sequence[tuple[Any, Answer]]) -> list[Grades]:
        pairs = [(question, answer.text) for question, answer in asked]
        return await asyncio.to_thread(self._grades, pairs)

    def _grades(self, pairs: list[tuple[Any, str]]) -> list[Grades]:
        with self.lock:
            if self.child.ended:
                self.child.close()
                self.child = ModelProcess(self.settings)
            try:
                self.child.ready()
                self.child.connection.send(pairs)
                return [_grade(score) for score in self.child.receive(self.settings.timeout * len(pairs))]
            except TimeoutError:
                cause, what = "timeout", f"took more than {self.settings.timeout:g} s for a response (task.timeout)"
            except (EOFError, OSError):
                cause, what = "crash", f"ended its process: {self.child.end()}"
            self.child.close()
        return [Ungraded(cause, f"the reward model {self.settings.path} {what}")] * len(pairs)

    def close(self) -> None:
        self.child.close()


def _grade(score: float | Ungraded) -> Grades:
    if isinstance(score, Ungraded):
        return score
    try:
        return {"model": number(score)}
    except Unusable as error:
        return Ungraded(error.cause, f"the reward model {error}")
