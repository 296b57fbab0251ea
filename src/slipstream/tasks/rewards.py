"""How answers are graded, and the processes in which that happens.

A verifier may loop or crash on what a model writes, so it runs in processes of its own, one answer at a time, each
under a deadline. An answer that takes longer counts as wrong, and `timeout` says so; one that kills its process counts
as wrong, and `crash` says so. A grading process ends with its parent, however that ends.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import reprlib
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.util import find_spec
from math import isfinite
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.records import Group, Handle


def exact(text: str, truth: Any) -> float:
    return float(text.strip() == str(truth).strip())


def math(text: str, truth: Any) -> float:
    """Mathematically the same, by math-verify. Its own deadlines are off: ours holds for all verifiers."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its deadlines are off
    # as LaTeX first: read as prose, 2^{10} is its first number, 2
    gold = parse(f"${truth}$", parsing_timeout=None) or parse(str(truth), parsing_timeout=None)
    return float(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


def unfit(reward: str, truth: Any) -> str:
    """Why no answer could be found right by a reward; empty if one could."""
    if isinstance(truth, list):
        return next((why for each in truth if (why := _unfit(reward, each))), "" if truth else "the list is empty")
    return _unfit(reward, truth)


def _unfit(reward: str, truth: Any) -> str:
    if truth is None:
        return "there is none"
    if isinstance(truth, str):
        return "" if truth.strip() else "it is blank"
    if isinstance(truth, bool):
        return f'{truth} may be written in several ways: make it text, "yes" or "true"'
    if isinstance(truth, int):
        return ""
    if not isinstance(truth, float):
        return f"it is {reprlib.repr(truth)}, where text or a number is expected: name a part of it by data.answer"
    if not isfinite(truth):
        return f"it is {truth}"
    return "" if reward != "exact" else f'{truth} may be written in several ways: make it text, or write "math"'


REWARDS: dict[str, Callable[[str, Any], float]] = {"exact": exact, "math": math}


def check_installed(rewards: Sequence[str]) -> None:
    if "math" in rewards and find_spec("math_verify") is None:
        raise ConfigError("task.reward = 'math' needs math-verify: pip install 'slipstream[math]'")


class OutOfTime(BaseException):
    """Not an Exception: verifiers catch those (math-verify at thirty places) and go on."""


def grade_texts(rewards: Sequence[str], texts: Sequence[str], truth: Any, timeout: float) -> list[dict[str, float]]:
    """Runs in a grading process, on its main thread: the alarm interrupts whatever Python code is at work."""
    before = signal.signal(signal.SIGALRM, _out_of_time)
    try:
        return [merged(_grade(reward, text, truth, timeout) for reward in rewards) for text in texts]
    finally:
        signal.signal(signal.SIGALRM, before)


def _grade(reward: str, text: str, truth: Any, timeout: float) -> dict[str, float]:
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            return {reward: max(REWARDS[reward](text, each) for each in _each(truth))}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        return {reward: 0.0, "timeout": 1.0}


def _each(truth: Any) -> list[Any]:
    """Of several answers any is right."""
    return truth if isinstance(truth, list) else [truth]


def merged(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    return {name: value for part in parts for name, value in part.items()}


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def _pool(processes: int) -> ProcessPoolExecutor:
    """Spawned, as a fork would copy the threads' locks of torch and tokenizers."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin)


def _begin() -> None:
    """First of all in a grading process. Ctrl-C is the parent's to handle."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # a terminal sends them to every process
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The executor's workers would wait for work for ever: they hold the sending end of their own queue too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


class PoolGrader:
    """Grades whole groups by every reward; without any it hands them on."""

    def __init__(
        self, rewards: Sequence[str], decode: Callable[[Any], str], *, processes: int = 1, timeout: float = 30.0
    ) -> None:
        self.rewards, self.decode, self.processes, self.timeout = tuple(rewards), decode, processes, timeout
        self.pool: ProcessPoolExecutor | None = None
        if self.rewards:
            check_installed(self.rewards)
            self.pool = _pool(processes)
            self.pool.submit(int)  # the first worker starts while the models load

    async def grade(self, group: Group) -> list[Handle]:
        if self.pool is None:
            return list(group)
        pool, rollouts = self.pool, [handle.body for handle in group]
        texts, truth = [self.decode(rollout.tokens) for rollout in rollouts], rollouts[0].prompt.ground_truth
        try:
            graded = await self._graded(pool, texts, truth)
        except BrokenProcessPool:
            if self.pool is pool:
                self.pool = _pool(self.processes)
            graded = [await self._graded_alone(text, truth) for text in texts]
        return [
            Handle(replace(handle.header, rewards=rewards), handle.body)
            for handle, rewards in zip(group, graded, strict=True)
        ]

    async def _graded(self, pool: ProcessPoolExecutor, texts: Sequence[str], truth: Any) -> list[dict[str, float]]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, grade_texts, self.rewards, texts, truth, self.timeout)

    async def _graded_alone(self, text: str, truth: Any) -> dict[str, float]:
        """After a process died, and took with it all that its pool had in hand: was it this answer?"""
        pool = _pool(1)
        try:
            await asyncio.wrap_future(pool.submit(int))
        except BrokenProcessPool:
            raise SlipstreamError(
                "no grading process can start: a script that starts a run needs `if __name__ == '__main__':`"
            ) from None
        else:
            try:
                (rewards,) = await self._graded(pool, [text], truth)
            except BrokenProcessPool:
                return {**dict.fromkeys(self.rewards, 0.0), "crash": 1.0}
            return rewards
        finally:
            pool.shutdown(wait=False)  # a cancelled call does not hold up the loop until the answer's deadline

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
