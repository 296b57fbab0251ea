"""The loops of the pipeline, one short coroutine each. What may happen is decided in `admission`; here it is done.

| loop  | consumes               | produces               | waits for                      | is unblocked by      |
|-------|------------------------|------------------------|--------------------------------|----------------------|
| feed  | prompts                | groups that roll out   | credits                        | publish, drop        |
| roll  | one prompt             | a graded group         | sampler, grader                | –                    |
| score | graded groups          | groups that are scored | rollouts (all, where serial)   | roll, drop           |
| mark  | one graded group       | a scored group         | scorer                         | –                    |
| learn | scored groups          | updates                | a whole batch                  | mark, drop           |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from slipstream.engines.base import Engines, Sampling
from slipstream.metrics import Numbers, lag_metrics, sample_metrics
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.publish import publish
from slipstream.records import Batch, Group, Prompt
from slipstream.runlog import RunLog


class Signal:
    """Something has changed. Every wait has a name, and since when it lasts can be read at any time."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.waits: dict[str, float] = {}

    def notify(self) -> None:
        self._event.set()

    async def until(self, name: str, ready: Callable[[], bool]) -> None:
        self.waits[name] = asyncio.get_running_loop().time()
        try:
            while not ready():
                self._event.clear()
                await self._event.wait()
        finally:
            del self.waits[name]


@dataclass
class Flow:
    """What the loops share."""

    engines: Engines
    admission: Admission
    prompt: Callable[[int], Prompt]
    sampling: Sampling
    log: RunLog
    began: float
    """The clock when the run began."""
    version: int = 0
    held: dict[int, Group] = field(default_factory=dict)
    """The newest handles of every group that is live."""
    signal: Signal = field(default_factory=Signal)

    def drop(self, number: int, reason: str) -> None:
        self.admission.drop(number, reason)
        self.held.pop(number, None)
        self.log.ledger(number=number, end="dropped", reason=reason, version=self.version)
        self.signal.notify()


async def feed(flow: Flow, tasks: asyncio.TaskGroup) -> None:
    admission = flow.admission
    while not admission.finished:
        await flow.signal.until("feed: a credit", lambda: admission.quota() > 0 or admission.finished)
        for number in admission.submit():
            tasks.create_task(roll(flow, flow.prompt(number)))


async def roll(flow: Flow, prompt: Prompt) -> None:
    group: Group = await flow.engines.sampler.generate(prompt, flow.sampling)
    if any(handle.header.finish == "error" for handle in group):
        flow.drop(prompt.number, "rollout failed")
        return
    flow.held[prompt.number] = await flow.engines.grader.grade(group)
    flow.admission.rolled(prompt.number)
    flow.signal.notify()


async def score(flow: Flow, tasks: asyncio.TaskGroup) -> None:
    admission = flow.admission
    while not admission.finished:
        await flow.signal.until("score: rollouts", lambda: admission.scorable() or admission.finished)
        if admission.scorable():
            for number in admission.take():
                tasks.create_task(mark(flow, number))


async def mark(flow: Flow, number: int) -> None:
    flow.held[number] = await flow.engines.scorer.score(flow.held[number])
    flow.admission.scored(number)
    flow.signal.notify()


async def learn(flow: Flow, after_update: Callable[[int], Awaitable[None]]) -> None:
    """`after_update` runs while nothing else may start: evaluation and checkpoints."""
    admission, clock = flow.admission, asyncio.get_running_loop().time
    update, began = 0, clock()
    while not admission.finished:
        await flow.signal.until("learn: a scored batch", lambda: bool(admission.next_batch()) or admission.finished)
        numbers = admission.next_batch()
        if not numbers:
            continue
        update += 1
        fed = clock()
        batch = Batch(tuple(flow.held.pop(number) for number in numbers), update)
        learned = await learn_from(flow, batch)
        admission.train(numbers)
        account(flow, batch)
        stepped = clock()
        await publish(flow.engines, flow.version + 1, admission.schedule.publish)
        flow.version += 1
        published = clock()
        times = {
            "wait": fed - began,
            "learn": stepped - fed,
            "publish": published - stepped,
            "update": published - began,
        }
        tell(flow, batch, learned | {f"seconds/{name}": value for name, value in times.items()})
        await after_update(update)
        admission.publish()
        flow.signal.notify()
        began = clock()


async def learn_from(flow: Flow, batch: Batch) -> Numbers:
    learner = flow.engines.learner
    counts = await learner.prepare(batch)
    numbers = await learner.accumulate(batch, counts)
    return numbers | await learner.step()


def account(flow: Flow, batch: Batch) -> None:
    """How each group of the update ended."""
    for group in batch.groups:
        headers = [handle.header for handle in group]
        flow.log.ledger(
            number=headers[0].number,
            prompt=headers[0].prompt,
            end="trained",
            update=batch.update,
            version=flow.version,
            lag=max(flow.version - header.oldest for header in headers),
            tokens=[header.tokens for header in headers],
            rewards=[header.rewards for header in headers],
        )


def tell(flow: Flow, batch: Batch, numbers: Numbers) -> None:
    samples = sample_metrics(batch.headers)
    seconds = max(numbers["seconds/update"], 1e-9)
    line = {
        **numbers,
        **samples,
        **lag_metrics(batch.headers, flow.version - 1),
        "samples_per_s": samples["samples"] / seconds,
        "tokens_per_s": samples["tokens"] / seconds,
        "dropped": float(flow.admission.dropped.total()),
        "version": float(flow.version),
        "time": asyncio.get_running_loop().time() - flow.began,
    }
    flow.log.metrics("train", line, update=batch.update)
