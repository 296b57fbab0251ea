"""How answers are graded, and the processes in which that happens.

A verifier may loop or crash on what a model writes, so it runs in processes of its own, one answer at a time, each
under a deadline. An answer that takes longer counts as wrong, and `timeout` says so.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.records import Group, Handle


def exact(text: str, truth: Any) -> float:
    return float(text.strip() == str(truth).strip())


def math(text: str, truth: Any) -> float:
    """Mathematically the same, by math-verify. Its own deadlines are off: ours holds for all verifiers."""
    from math_verify import parse, verify

    gold = parse(str(truth), parsing_timeout=None) or parse(f"${truth}$", parsing_timeout=None)
    return float(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


REWARDS: dict[str, Callable[[str, Any], float]] = {"exact": exact, "math": math}


def check_installed(reward: str) -> None:
    if reward == "math":
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise ConfigError("task.reward = 'math' needs math-verify: pip install 'slipstream[math]'") from None


def grade_texts(reward: str, texts: Sequence[str], truth: Any, timeout: float) -> list[dict[str, float]]:
    """Runs in a grading process, on its main thread: the alarm interrupts whatever Python code is at work."""
    signal.signal(signal.SIGALRM, _out_of_time)
    graded = []
    for text in texts:
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            graded.append({reward: REWARDS[reward](text, truth)})
        except TimeoutError:
            graded.append({reward: 0.0, "timeout": 1.0})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return graded


def _out_of_time(*_: object) -> None:
    raise TimeoutError


class PoolGrader:
    """Grades whole groups; without a reward it hands them on."""

    def __init__(
        self, reward: str | None, decode: Callable[[Any], str], *, processes: int = 1, timeout: float = 30.0
    ) -> None:
        self.reward, self.decode, self.timeout = reward, decode, timeout
        self.pool: ProcessPoolExecutor | None = None
        if reward is not None:
            check_installed(reward)
            # spawn: a fork would copy the threads' locks of torch and tokenizers
            self.pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
            self.pool.submit(int)  # the first worker starts while the models load

    async def grade(self, group: Group) -> list[Handle]:
        if self.pool is None or self.reward is None:
            return list(group)
        rollouts = [handle.body for handle in group]
        texts = [self.decode(rollout.tokens) for rollout in rollouts]
        truth = rollouts[0].prompt.ground_truth
        work = asyncio.get_running_loop().run_in_executor(
            self.pool, grade_texts, self.reward, texts, truth, self.timeout
        )
        try:
            graded = await work
        except BrokenProcessPool:
            raise SlipstreamError(
                f"a grading process died (out of memory?) on prompt {rollouts[0].prompt.id}, or this script starts a run "
                "without `if __name__ == '__main__':`"
            ) from None
        return [
            Handle(replace(handle.header, rewards=rewards), handle.body)
            for handle, rewards in zip(group, graded, strict=True)
        ]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
