"""A run, from the first prompt to the final student.

         one credit = one group; credits come back when its update is published
       ┌────────────────────────────────────────────────────────────────────────┐
prompts ─▶ admission ─▶ roll (Samplers) ─▶ mark (Scorers) ─▶ learn (Learner) ─▶ deliver ┘
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from slipstream.config.schema import Config
from slipstream.engines.asked import eval_sampling, rollout_sampling
from slipstream.engines.base import Engines, Sampler, Sampling
from slipstream.errors import NonFiniteError, Stalled, WorkerDied
from slipstream.pipeline.account import Account
from slipstream.pipeline.admission import Admission, Standing
from slipstream.pipeline.checkpoint import Checkpoints, save_whole
from slipstream.pipeline.evaluate import answers, summary
from slipstream.pipeline.pool import Pool, Worker, scorer_name
from slipstream.pipeline.publish import Samplers
from slipstream.pipeline.restarts import Restarts
from slipstream.pipeline.schedules import schedule_of
from slipstream.pipeline.stages import Flow, Steps, answered, learn, roll, watch
from slipstream.pipeline.trace import Trace
from slipstream.records import Handle, Prompt
from slipstream.runlog import RunLog
from slipstream.tasks.data import Prompts

STALLED_SAVE = 60.0
"""Seconds for a checkpoint when nothing moves any more: the learner may be what hangs."""


class Run:
    def __init__(
        self,
        config: Config,
        engines: Engines,
        prompts: Prompts,
        log: RunLog,
        *,
        held_out: Sequence[Prompt] = (),
        standing: Standing | None = None,
        restarts: Restarts | None = None,
        patience: float | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """`standing` is where an earlier part of the run ended, `restarts` what its workers went through. `patience` is
        not for virtual clocks."""
        self.config, self.engines, self.prompts, self.log, self.held_out = config, engines, prompts, log, held_out
        self.restarts = restarts or Restarts(config.runtime.restarts)
        self.restarts.recall(log.last)
        self.patience, self.say = patience, say
        self.admission = Admission(
            schedule_of(config.schedule, config.groups_per_update), updates=config.updates, standing=standing
        )
        self.checkpoints = Checkpoints(
            log.path / "checkpoints", every=config.checkpoint.every, keep=config.checkpoint.keep
        )
        self.flow: Flow | None = None
        self.task: asyncio.Task[Any] | None = None
        """The one that `stop` cancels."""
        self.at_once = False
        """Who stops the run does not wait for a checkpoint."""

    async def train(self) -> Path:
        """Make all updates; returns the directory of the final student."""
        try:
            with rare_collections():
                await self._update_all()
            final = self.log.path / "final"
            await save_whole(self.engines.learner, final)
            return final
        except BaseExceptionGroup as group:
            await self._stopped(_cause(group))
        except (asyncio.CancelledError, Exception) as error:
            await self._stopped(error)

    async def _update_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            flow = self.flow = self._flow(tasks)
            watchdog = tasks.create_task(watch(flow, self.patience)) if self.patience else None
            weights, expected = await self.engines.learner.export()
            await flow.samplers.publish(weights, expected, version=self.admission.version, mode="drain")
            await self._evaluate()
            for number in list(self.admission.rolling):
                flow.start(number, roll(flow, number))
            flow.advance()
            await learn(flow)
            for pool in flow.pools:
                pool.close()
            if watchdog:
                watchdog.cancel()

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def report(self) -> str:
        """Who waits for whom."""
        return self.flow.report() if self.flow else "engines are starting"

    def _flow(self, tasks: asyncio.TaskGroup) -> Flow:
        rewound, trace = self.restarts.began is not None, self._trace()
        these: Any = {"say": self.say, "tasks": tasks, "replace": self.engines.replace, "restarts": self.restarts}
        samplers = Samplers(self.engines.samplers, trace, stage="rollout", name="sampler", **these)
        teachers = self.engines.scorers
        scorers = {
            teacher: Pool(
                engines,
                trace,
                stage="score",
                name=scorer_name(teacher, teachers),
                work=f"scoring by {teacher}" if len(teachers) > 1 else "scoring",
                **these,
            )
            for teacher, engines in teachers.items()
        }
        learning = trace.track("learn", "learner")
        if rewound:
            trace.slice(learning, "gone", self.log.last.get("time", 0.0), trace.now())
        return Flow(
            samplers=samplers,
            scorers=scorers,
            learner=self.engines.learner,
            learning=learning,
            admission=self.admission,
            prompt=self.prompts.at,
            sampling=rollout_sampling(self.config),
            account=Account(self.log, trace, self.admission, self.restarts),
            trace=trace,
            tasks=tasks,
            passes=Steps(self.config.learner.minibatches, self.config.learner.epochs),
            after_step=self._checkpoint,
            after_publish=self._evaluate,
        )

    def _trace(self) -> Trace:
        """Its clock does not stand still between the death of a learner and what comes after it."""
        clock = asyncio.get_running_loop().time
        began = self.restarts.began
        before = self.log.last.get("time", 0.0) if began is None else clock() - began
        trace = Trace(self.log.trace, clock, before=before)
        self.restarts.began = trace.began
        return trace

    async def _stopped(self, cause: BaseException) -> NoReturn:
        """Save what can be gone on from, account for what was in flight, and raise one cause instead of a group.

        A loss or gradient that is not finite never reached the weights: they are as they were after the last update.
        Between two steps of one update they are of no version, and nothing is saved; nor is anything of a learner that
        is gone (the deaths of all others are the pools' business).
        """
        if self.flow:
            for number in self.admission.live:
                self.flow.account.dropped(number, "run stopped")
        if self.at_once or isinstance(cause, WorkerDied):
            raise cause
        if self.flow and self.flow.torn:
            self.say("nothing is saved: the update in hand has made some of its optimizer steps and not the others")
            raise cause from cause.__cause__
        limit = STALLED_SAVE if isinstance(cause, Stalled) else None
        try:
            path = await asyncio.wait_for(self.checkpoints.save(self.engines.learner, self.admission.standing), limit)
        except Exception as error:  # the learner itself may be what failed: the cause is what matters
            self.say(f"no checkpoint could be saved: {type(error).__name__}: {error}")
        else:
            if isinstance(cause, NonFiniteError):
                raise NonFiniteError(f"{cause}; the weights of update {self.admission.version} are in {path}") from None
        raise cause from cause.__cause__

    async def _checkpoint(self) -> None:
        if self.flow and self.checkpoints.due(self.admission.version):
            with self.flow.learning.busy("checkpoint", "other"):
                await self.checkpoints.save(self.engines.learner, self.admission.standing)

    async def _evaluate(self) -> None:
        every, rewards, update = self.config.eval.every, self.config.task.reward, self.admission.version
        flow = self.flow
        if not every or update % every or not rewards or flow is None or update in self.log.evaluated:
            return

        async def generate(prompt: Prompt, sampling: Sampling) -> list[Handle]:
            async def answer(worker: Worker[Sampler]) -> list[Handle]:
                return answered(await worker.engine.generate(prompt, sampling))

            group = await flow.samplers.call(f"held-out prompt {prompt.number}", answer)
            flow.moved = flow.trace.now()
            return group

        groups = await answers(generate, self.held_out, eval_sampling(self.config))
        self.log.metrics("eval", summary(groups, rewards[0]), update=update)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Nearly all that a run holds is alive; looking for garbage as often as Python does takes a third of its time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _cause(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
