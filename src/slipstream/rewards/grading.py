"""Grading processes, each of which grades one response at a time.

A reward may loop, crash or run out of memory on a model's text, so it does not run in engine processes. A response is
`Ungraded` if its grading takes too long, ends the process, raises, or returns no number. Other responses are graded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from slipstream.children import Child, ChildPool
from slipstream.errors import ConfigError, EngineError
from slipstream.grades import Grades, Ungraded
from slipstream.records import Group, Handle, Rollout, turns_of
from slipstream.rewards.functions import (
    MODEL_REWARDS,
    NO_SETTINGS,
    Answer,
    RewardSettings,
    check_installed,
    is_own,
    reward_of,
)

REPORT_TIME = 5.0
"""Seconds for which the parent waits after a timeout, so that the process can report the timeout itself."""


class GradingProcess(Child):
    """Parent's side of one grading process. Only one thread at a time may use this object."""

    def __init__(
        self,
        specs: Sequence[str],
        timeout: float,
        setting: str = "task.reward",
        sandbox: str | None = None,
        settings: RewardSettings | None = None,
    ) -> None:
        """Start a process that loads the functions `specs`, which the config names in `setting`."""
        super().__init__("slipstream.rewards.grader", (setting, tuple(specs), timeout, sandbox, settings))
        self.specs, self.timeout, self.setting = tuple(specs), timeout, setting

    @property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """Required fields of each function, known when the process is ready."""
        return dict(self.ready())

    def lost(self, how: str, *, late: bool) -> Exception:
        if late:
            return ConfigError(f"{self.setting} = {', '.join(map(repr, self.specs))}: its imports take more than {how}")
        own = ", ".join(filter(is_own, self.specs))
        return EngineError(f"no grading process can start ({how}), importing {own or 'nothing'}")

    def grades(self, answers: Sequence[Any]) -> list[Grades]:
        """Grade responses in order. Stop after one that ends the process or blocks it; later responses get no entry."""
        found: list[Grades] = []
        self.ready()
        try:
            self.connection.send(answers)
            while len(found) < len(answers):
                found.append(self.receive(self.timeout * len(self.specs) + REPORT_TIME))
        except TimeoutError:
            self.close()
            limit = f"{self.timeout:g} s (task.timeout) and did not stop"
            return [*found, Ungraded("timeout", f"{', '.join(self.specs)} took more than {limit}")]
        except (EOFError, OSError):
            return [*found, Ungraded("crash", f"{', '.join(self.specs)} ended its process: {self.end()}")]
        return found

    def end(self) -> str:
        """Kill the process if it still runs, close the connection, and describe how the process ended."""
        ending = super().end()
        self.close()
        return ending


def needs(
    specs: Sequence[str], sandbox: str | None = None, settings: RewardSettings | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the required fields of each reward, by reward; raise ConfigError if a reward cannot be used."""
    check_installed(specs)
    apart = {spec: needs_of_model(spec, settings or {}) for spec in specs if spec in MODEL_REWARDS}
    specs = [spec for spec in specs if spec not in MODEL_REWARDS]
    if sandbox is None and not any(map(is_own, specs)):
        return apart | {spec: reward_of(spec, settings=settings).needs for spec in specs}
    process = GradingProcess(specs, timeout=0.0, sandbox=sandbox, settings=settings)
    try:
        return apart | process.needs
    finally:
        process.close()


def needs_of_model(spec: str, settings: RewardSettings) -> tuple[str, ...]:
    """Return the required fields of a reward that no function computes."""
    if spec not in settings:
        raise ConfigError(f"task.reward = {spec!r}: {NO_SETTINGS.format(spec=spec)}")
    return ("ground_truth",) if "{ground_truth}" in settings[spec].get("prompt", "") else ()


class BatchGrader(Protocol):
    """Grader of whole groups, given pairs of a prompt (text or messages) and a response."""

    async def grades(self, asked: Sequence[tuple[Any, Answer]]) -> list[Grades]: ...

    def close(self) -> None: ...


class PoolGrader:
    """Grader of groups in several processes. If no rewards are configured, groups are returned without grades."""

    def __init__(
        self,
        rewards: Sequence[str],
        decode: Callable[[Any], str],
        *,
        processes: int = 1,
        timeout: float = 30.0,
        keeps_text: bool = False,
        sandbox: str | None = None,
        settings: RewardSettings | None = None,
        model_graders: Sequence[BatchGrader] = (),
    ) -> None:
        """Start the processes. `keeps_text`: also store the text of each response in its header."""
        check_installed(rewards)
        self.model_graders, self.rewards = model_graders, tuple(each for each in rewards if each not in MODEL_REWARDS)
        self.decode, self.keeps_text = decode, keeps_text
        start = partial(GradingProcess, self.rewards, timeout, sandbox=sandbox, settings=settings)
        self.processes = ChildPool(start, processes if self.rewards else 0)
        self.idle = SimpleQueue[int]()
        for place in range(len(self.processes.children)):
            self.idle.put(place)
        self.threads = ThreadPoolExecutor(max(1, processes), "grading")

    async def grade(self, group: Group) -> list[Handle]:
        if self.keeps_text:
            group = [Handle(replace(h.header, text=self.decode(h.body.tokens)), h.body) for h in group]
        if not self.rewards and not self.model_graders:
            return list(group)
        answers = [self._answer(handle.body) for handle in group]
        asked = [(answer.prompt if (asked := h.body.prompt.asked) is None else asked, answer)
                 for h, answer in zip(group, answers, strict=True)]  # fmt: skip
        calls: list[Awaitable[list[Grades]]] = [each.grades(asked) for each in self.model_graders]
        if self.rewards:
            calls.insert(0, asyncio.get_running_loop().run_in_executor(self.threads, self._grades, answers))
        found = zip(*await asyncio.gather(*calls), strict=True)
        return [with_grades(handle, merge_grades(parts)) for handle, parts in zip(group, found, strict=True)]

    def _answer(self, rollout: Rollout) -> Answer:
        prompt = rollout.prompt
        messages = [
            {"role": "assistant" if sampled else "observation", "content": self.decode(tokens)}
            for sampled, tokens in turns_of(rollout)
        ]
        if prompt.prefix is not None:  # a given beginning is a part of the answer
            messages = [{"role": "assistant", "content": self.decode(rollout.tokens)}]
        return Answer(
            text=next(message["content"] for message in reversed(messages) if message["role"] == "assistant"),
            messages=messages,
            tokens=rollout.tokens.tolist(),
            prompt=self.decode(prompt.tokens),
            ground_truth=prompt.ground_truth,
            meta=prompt.meta,
            data_source=prompt.data_source,
            finish=rollout.finish,
            outcome=rollout.outcome,
        )

    def _grades(self, answers: Sequence[Answer]) -> list[Grades]:
        """Grade responses in a free process. If a response ends the process, a new one grades the rest."""
        place, found = self.idle.get(), list[Grades]()
        try:
            while len(found) < len(answers) and not self.processes.closed:
                found += self.processes.ready(place).grades(answers[len(found) :])
            return found
        finally:
            self.idle.put(place)

    def close(self) -> None:
        self.processes.closed = True
        for process in self.processes.children:
            process.kill()
        for each in self.model_graders:
            each.close()
        self.threads.shutdown(cancel_futures=True)
        self.processes.close()


def merge_grades(parts: Sequence[Grades]) -> Grades:
    """Return all rewards of a response, or the first failure."""
    failed = next((part for part in parts if isinstance(part, Ungraded)), None)
    return failed or {name: reward for part in parts if isinstance(part, dict) for name, reward in part.items()}


def with_grades(handle: Handle, grades: Grades) -> Handle:
    if isinstance(grades, Ungraded):
        return Handle(replace(handle.header, ungraded=grades), handle.body)
    return Handle(replace(handle.header, rewards=grades), handle.body)
