"""A run, from the first prompt to the final student.

         one credit = one group; credits come back when its update is published
       ┌──────────────────────────────────────────────────────────────────────────┐
prompts ─▶ feed ─▶ roll (Sampler, Grader) ─▶ score (Scorer) ─▶ learn (Learner) ─▶ publish ┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from slipstream.config import Config
from slipstream.engines.base import Engines, Sampling
from slipstream.errors import NonFiniteError
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.checkpoint import Checkpoints, save_whole
from slipstream.pipeline.evaluate import answers, summary
from slipstream.pipeline.publish import publish
from slipstream.pipeline.schedules import schedule_of
from slipstream.pipeline.stages import Flow, feed, learn, score
from slipstream.records import Prompt
from slipstream.runlog import RunLog
from slipstream.tasks.data import Prompts


class Run:
    def __init__(
        self, config: Config, engines: Engines, prompts: Prompts, log: RunLog, *, held_out: Sequence[Prompt] = ()
    ) -> None:
        self.config, self.engines, self.prompts, self.log, self.held_out = config, engines, prompts, log, held_out
        self.flow: Flow | None = None
        self.admission = Admission(schedule_of(config), updates=config.updates)
        self.checkpoints = Checkpoints(
            log.path / "checkpoints", every=config.checkpoint.every, keep=config.checkpoint.keep
        )

    @property
    def version(self) -> int:
        return self.flow.version if self.flow else 0

    async def train(self) -> Path:
        """Make all updates; returns the directory of the final student."""
        flow = self.flow = Flow(
            engines=self.engines,
            admission=self.admission,
            prompt=self.prompts.at,
            sampling=rollout_sampling(self.config),
            log=self.log,
            began=asyncio.get_running_loop().time(),
        )
        await publish(self.engines, 0, "drain")
        await self._evaluate(0)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(feed(flow, tasks))
                tasks.create_task(score(flow, tasks))
                tasks.create_task(learn(flow, self._after_update))
        except BaseExceptionGroup as group:
            await self._stopped(group)
        final = self.log.path / "final"
        await save_whole(self.engines.learner, final, optimizer=False)
        return final

    async def _stopped(self, group: BaseExceptionGroup[BaseException]) -> None:
        """Account for what was in flight, and raise one cause instead of a group of them.

        A loss or gradient that is not finite never reached the weights: they are kept as they were after the last
        update.
        """
        for number in self.admission.live:
            self.log.ledger(number=number, end="dropped", reason="run stopped", version=self.version)
        cause: BaseException = group
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, NonFiniteError):
            path = await self.checkpoints.save(self.engines.learner, self.version)
            raise NonFiniteError(f"{cause}; the weights of update {self.version} are in {path}") from None
        raise cause from None

    async def _after_update(self, update: int) -> None:
        await self._evaluate(update)
        if self.checkpoints.due(update):
            await self.checkpoints.save(self.engines.learner, update)

    async def _evaluate(self, update: int) -> None:
        every, reward = self.config.eval.every, self.config.task.reward
        if not every or update % every or reward is None:
            return
        groups = await answers(self.engines.sampler, self.engines.grader, self.held_out, eval_sampling(self.config))
        self.log.metrics("eval", summary(groups, reward), update=update)


def rollout_sampling(config: Config) -> Sampling:
    sampler = config.sampler
    return Sampling(
        max_tokens=sampler.max_tokens,
        group=sampler.group,
        draws=config.loss.m if config.loss.kind == "reverse_kl_mc" else 1,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
        min_p=sampler.min_p,
    )


def eval_sampling(config: Config) -> Sampling:
    return Sampling(max_tokens=config.sampler.max_tokens, group=config.eval.n, temperature=config.eval.temperature)
