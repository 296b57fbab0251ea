"""Evaluation of the current student on held-out prompts, by the samplers, graders and teachers that training uses.

With rewards it measures accuracy, without rewards the reverse KL to the teachers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from slipstream.metrics import Metrics, avg_at_n, kl_and_error, sample_metrics
from slipstream.protocols import Sampling
from slipstream.records import Handle, Prompt

Generate = Callable[[Prompt, Sampling], Awaitable[list[Handle]]]


async def answers(generate: Generate, prompts: Iterable[Prompt], sampling: Sampling) -> list[list[Handle]]:
    async def one(prompt: Prompt) -> list[Handle]:
        return await generate(prompt, sampling)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(prompt)) for prompt in prompts]
    return [task.result() for task in running]


def correctness(groups: Iterable[list[Handle]], reward: str) -> list[list[float]]:
    """Return the reward of each episode of each group; an answer that cannot be graded counts as 0."""
    return [list({h.header.episode: h.header.rewards.get(reward, 0.0) for h in group}.values()) for group in groups]


def summary(groups: list[list[Handle]], reward: str) -> Metrics:
    """Return the metrics of an evaluation by this reward; if it is empty, by the teachers' scores."""
    headers = [handle.header for group in groups for handle in group]
    if not reward:
        kl, error = kl_and_error([header for header in headers if header.trained_tokens])
        return {"kl": kl, "kl_error": error, **sample_metrics(headers)}
    ungraded = Counter(f"ungraded/{header.ungraded.cause}" for header in headers if header.ungraded is not None)
    return {"accuracy": avg_at_n(correctness(groups, reward)), **sample_metrics(headers), **ungraded}
