"""Grading processes, each of which grades one response at a time.

A reward may loop, crash or run out of memory on a model's text, so it does not run in engine processes. A response is
`Ungraded` if its grading takes too long, ends the process, raises, or returns no number. Other responses are graded.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

from slipstream.errors import ConfigError, EngineError
from slipstream.records import Group, Handle, Rollout, Ungraded, turns_of
from slipstream.rewards.functions import (
    APART,
    ELSEWHERE,
    Answer,
    Grades,
    Reward,
    RewardSettings,
    check_installed,
    grade,
    is_own,
    reward_of,
)
from slipstream.sandbox import sandbox_of
from slipstream.sandbox.base import Sandbox
from slipstream.user_code.process import STARTED, Child, begun

GRACE = 5.0
"""Seconds for which the parent waits after a timeout, so that the process can report the timeout itself."""


# --- in a grading process ---------------------------------------------------------------------------------------------


def serve(parent: Connection) -> None:
    """Load the functions that the parent names, send their required fields, and grade until the parent ends."""
    setting, specs, timeout, sandbox_name, settings = begun(parent)
    inbox = SimpleQueue[bytes]()
    threading.Thread(target=_hear, args=(parent, inbox), daemon=True).start()
    try:
        rewards = [reward_of(spec, setting, settings) for spec in specs]
        sandbox = sandbox_for(rewards, sandbox_name)
    except ConfigError as error:
        parent.send(error)
        return
    parent.send({reward.spec: reward.needs for reward in rewards})
    while True:
        for answer in pickle.loads(inbox.get()):
            parent.send(grade(rewards, answer if sandbox is None else replace(answer, sandbox=sandbox), timeout))


def sandbox_for(rewards: Sequence[Reward], name: str | None) -> Sandbox | None:
    """Return the sandbox that task.sandbox names, or None; raise ConfigError if setting and rewards disagree."""
    if name is None:
        for reward in rewards:
            if "sandbox" in inspect.signature(reward.function).parameters:  # **kwargs alone does not ask for a sandbox
                why = 'the function asks for a sandbox: write task.sandbox = "bubblewrap"'
                raise ConfigError(f"task.reward = {reward.spec!r}: {why}")
        return None
    if not any("sandbox" in reward.asks for reward in rewards):
        raise ConfigError("task.sandbox does nothing: no function of task.reward asks for 'sandbox'; drop it")
    return sandbox_of(name, "task.sandbox")


def _hear(parent: Connection, inbox: SimpleQueue[bytes]) -> None:
    with suppress(EOFError, OSError):
        while True:
            inbox.put(parent.recv_bytes())
    os.killpg(0, signal.SIGKILL)  # the parent has ended: kill this process and all that it started


# --- in the parent ----------------------------------------------------------------------------------------------------


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
        super().__init__("slipstream.rewards.grading", (setting, tuple(specs), timeout, sandbox, settings))
        self.specs, self.timeout, self.setting = tuple(specs), timeout, setting
        self.needs: dict[str, tuple[str, ...]] = {}

    def ready(self) -> None:
        """Wait until the process has loaded its functions; raise ConfigError if one of them cannot be used."""
        if self.needs:
            return
        try:
            if not self.connection.poll(STARTED):
                specs = ", ".join(map(repr, self.specs))
                raise ConfigError(f"{self.setting} = {specs}: its imports take more than {STARTED:.0f} s")
            answer = self.connection.recv()
        except (EOFError, OSError):
            own = ", ".join(filter(is_own, self.specs))
            raise EngineError(f"no grading process can start ({self.end()}), importing {own or 'nothing'}") from None
        if isinstance(answer, ConfigError):
            raise answer
        self.needs = answer

    def grades(self, answers: Sequence[Any]) -> list[Grades]:
        """Grade responses in order. Stop after one that ends the process or blocks it; later responses get no entry."""
        found: list[Grades] = []
        self.ready()
        try:
            self.connection.send(answers)
            while len(found) < len(answers):
                if not self.connection.poll(self.timeout * len(self.specs) + GRACE):
                    self.close()
                    limit = f"{self.timeout:g} s (task.timeout) and did not stop"
                    return [*found, Ungraded("timeout", f"{', '.join(self.specs)} took more than {limit}")]
                found.append(self.connection.recv())
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
    apart = {spec: needs_apart(spec, settings or {}) for spec in specs if spec in APART}
    specs = [spec for spec in specs if spec not in APART]
    if sandbox is None and not any(map(is_own, specs)):
        return apart | {spec: reward_of(spec, settings=settings).needs for spec in specs}
    process = GradingProcess(specs, timeout=0.0, sandbox=sandbox, settings=settings)
    try:
        process.ready()
    finally:
        process.close()
    return apart | process.needs


def needs_apart(spec: str, settings: RewardSettings) -> tuple[str, ...]:
    """Return the required fields of a reward that no function computes."""
    if spec not in settings:
        raise ConfigError(f"task.reward = {spec!r}: {ELSEWHERE.format(spec=spec)}")
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
        tells: bool = False,
        sandbox: str | None = None,
        settings: RewardSettings | None = None,
        apart: Sequence[BatchGrader] = (),
    ) -> None:
        """Start the processes. `tells`: also store the text of each response in its header."""
        check_installed(rewards)
        self.apart, self.rewards = apart, tuple(each for each in rewards if each not in APART)
        self.decode, self.timeout, self.tells = decode, timeout, tells
        self.closed, self.sandbox, self.settings = False, sandbox, settings
        self.processes = [self._process() for _ in range(processes if self.rewards else 0)]  # early: they start slowly
        self.idle = SimpleQueue[int]()
        for place in range(len(self.processes)):
            self.idle.put(place)
        self.threads = ThreadPoolExecutor(max(1, processes), "grading")

    def _process(self) -> GradingProcess:
        return GradingProcess(self.rewards, self.timeout, sandbox=self.sandbox, settings=self.settings)

    async def grade(self, group: Group) -> list[Handle]:
        if self.tells:
            group = [Handle(replace(h.header, said=self.decode(h.body.tokens)), h.body) for h in group]
        if not self.rewards and not self.apart:
            return list(group)
        answers = [self._answer(handle.body) for handle in group]
        asked = [(answer.prompt if (asked := h.body.prompt.asked) is None else asked, answer)
                 for h, answer in zip(group, answers, strict=True)]  # fmt: skip
        calls = [each.grades(asked) for each in self.apart]
        if self.rewards:
            calls.insert(0, self._in_processes(answers))
        found = zip(*await asyncio.gather(*calls), strict=True)
        return [with_grades(handle, merged(parts)) for handle, parts in zip(group, found, strict=True)]

    async def _in_processes(self, answers: Sequence[Answer]) -> list[Grades]:
        return await asyncio.get_running_loop().run_in_executor(self.threads, self._grades, answers)

    def _answer(self, rollout: Rollout) -> Answer:
        prompt = rollout.prompt
        messages = [
            {"role": "assistant" if sampled else "observation", "content": self.decode(tokens)}
            for sampled, tokens in turns_of(rollout)
        ]
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
            while len(found) < len(answers) and not self.closed:
                found += self._ready(place).grades(answers[len(found) :])
            return found
        finally:
            self.idle.put(place)

    def _ready(self, place: int) -> GradingProcess:
        """Return process number `place` when it is ready. If its start fails, start it once more."""
        for again in (True, False):
            if self.processes[place].ended:
                self.processes[place].close()
                self.processes[place] = self._process()
            try:
                self.processes[place].ready()
                break
            except (ConfigError, EngineError):
                self.processes[place].close()
                if self.closed or not again:
                    raise
        return self.processes[place]

    def close(self) -> None:
        self.closed = True
        for process in self.processes:
            process.kill()
        for each in self.apart:
            each.close()
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.close()


def merged(parts: Sequence[Grades]) -> Grades:
    """Return all rewards of a response, or the first failure."""
    failed = next((part for part in parts if isinstance(part, Ungraded)), None)
    return failed or {name: reward for part in parts if isinstance(part, dict) for name, reward in part.items()}


def with_grades(handle: Handle, grades: Grades) -> Handle:
    if isinstance(grades, Ungraded):
        return Handle(replace(handle.header, ungraded=grades), handle.body)
    return Handle(replace(handle.header, rewards=grades), handle.body)


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the parent may end before its first message
        serve(Connection(int(sys.argv[1])))
