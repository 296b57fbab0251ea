"""The coordinator of a run: it builds the pipeline, starts it, and ends with the final student.

A group in flight uses one credit (a permit). The credit returns when the weights of the group's update are published.
       ┌────────────────────────────────────────────────────────────────────────┐
prompts ─▶ admission ─▶ roll (Samplers) ─▶ mark (Scorers) ─▶ learn (Learner) ─▶ deliver ┘
            limits         generates          scores            updates         publishes

`admission` decides which groups may move. `stages` has the coroutines roll, mark, learn and deliver.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from slipstream.config.schedule import Async, ScheduleConfig
from slipstream.config.schema import Config
from slipstream.data.prompts import Prompts
from slipstream.engines.sampling_options import eval_sampling, rollout_sampling
from slipstream.errors import ConfigError, NonFiniteError, RunDirError, Stalled, Unhealthy, WorkerDied, first_line
from slipstream.metrics import Metrics
from slipstream.models.model_card import card
from slipstream.pipeline.admission import Admission, Standing
from slipstream.pipeline.attempts import Memory
from slipstream.pipeline.canary_rounds import Canaries, Watched
from slipstream.pipeline.checkpoint import Checkpoints, save_whole
from slipstream.pipeline.control import canary
from slipstream.pipeline.control.autopilot import Autopilot
from slipstream.pipeline.control.autoscale import Autoscale, Seen
from slipstream.pipeline.control.buffer_refresh import Buffer
from slipstream.pipeline.control.guards import Guards
from slipstream.pipeline.control.health import Health
from slipstream.pipeline.control.scaling import Room, asked, check_room
from slipstream.pipeline.evaluate import answers, summary
from slipstream.pipeline.ledger import Ledger
from slipstream.pipeline.pool import Pool, Worker, scorer_name
from slipstream.pipeline.publish import MovingTeacher, Samplers
from slipstream.pipeline.restarts import Restarts
from slipstream.pipeline.schedules import credits_of, schedule_of
from slipstream.pipeline.stages import (
    Flow,
    Recheck,
    Save,
    Steps,
    answered_members,
    go_on,
    hand_over,
    learn,
    move_teachers,
    watch,
)
from slipstream.pipeline.trace import Trace
from slipstream.pipeline.watchdog import ResponseWatch
from slipstream.protocols import Engines, Sampler, Sampling, of_teacher
from slipstream.records import Attempts, Group, Handle, Prompt, unfinished
from slipstream.run_dir.formats import resumable
from slipstream.run_dir.writing import Mark, RunLog

T = TypeVar("T")
HANDING_OVER = 30.0
"""Seconds that samplers get to return partial rollouts when a run stops; a response may have to be graded first."""
STALLED_SAVE = 60.0
"""Time limit in seconds for saving the checkpoint of a stalled run, because the learner itself may hang."""


class Run:
    def __init__(
        self,
        config: Config,
        engines: Engines,
        prompts: Prompts,
        log: RunLog,
        *,
        held_out: Mapping[str, Sequence[Prompt]] | None = None,
        standing: Standing | None = None,
        groups: Sequence[Group] = (),
        attempts: Mapping[str, Any] | None = None,
        canaries: Mapping[str, Any] | None = None,
        ends: Sequence[int] = (),
        restarts: Restarts | None = None,
        patience: float | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Prepare a run; `standing`, `groups`, `attempts`, `canaries` and `restarts` are the state of an earlier part.

        `standing` is the admission state, and `groups` are the groups in flight. `attempts` are the attempts remembered
        for each prompt, and `canaries` the reference answer of each teacher. `ends` are the student's end tokens.
        `patience` is the longest time in seconds without progress; None means no limit (for a virtual clock).
        """
        self.config, self.engines, self.prompts, self.log = config, engines, prompts, log
        self.held_out = held_out or {}
        self.restarts = restarts or Restarts(config.runtime.restarts)
        self.restarts.recall(log.last)
        self.patience, self.say, log.say = patience, say, say
        self.known, self.ends = canaries or {}, ends
        self.admission = admission_of(config, prompts, standing)
        self.held = {group[0].header.number: group for group in groups}
        assert self.held.keys() >= self.admission.waiting.keys() | self.admission.ready.keys()
        self.checkpoints = Checkpoints(
            log.path / "checkpoints",
            every=config.checkpoint.every,
            minutes=config.checkpoint.minutes,
            keep=config.checkpoint.keep,
            proof=config.health.proof,
        )
        self.memory = Memory(next(iter(config.task.names), ""), before=attempts)
        self.autoscale = Autoscale(config.most_workers) if config.most_workers else None
        self.flow: Flow | None = None
        self.autopilot = autopilot_of(config.schedule)
        self.most = config.schedule.most
        self.guards = Guards(config.guards, tau=self.most, batches=config.schedule.batches)
        for line in log.updates():
            self._decide(line)
        self.health = Health(config.health, say)
        self.health.recall(log.updates())
        self._apply_decisions()
        self.task: asyncio.Task[Any] | None = None
        """The task that `stop` cancels."""
        self.at_once = False
        """True if the run must stop without saving a checkpoint."""

    async def train(self) -> Path:
        """Make all updates and return the directory of the final student."""
        try:
            with rare_garbage_collection():
                await self._update_all()
            if self.checkpoints.at_end:
                await in_time(self._checkpoint()(), self.patience, "writing a checkpoint")
            final, model_card = self.log.path / "final", card(self.config.model_dump(mode="json"), self.log.path)
            writing = save_whole(self.engines.learner, final, {"README.md": model_card.encode()})
            await in_time(writing, self.patience, "writing the final student")
            return final
        except BaseExceptionGroup as group:
            await self._stopped(_cause(group))
        except (asyncio.CancelledError, Exception) as error:
            await self._stopped(error)

    async def _update_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            flow = self.flow = self._flow(tasks)
            self.checkpoints.last = flow.trace.now()
            watchdog = tasks.create_task(watch(flow, self.patience)) if self.patience else None
            weights, expected = await self.engines.learner.export()
            await flow.samplers.publish(weights, expected, version=self.admission.version, mode="drain")
            await asyncio.gather(*await move_teachers(flow, first=True))
            await flow.canaries.begin(self.admission.version)
            await self._evaluate()
            self._resize(self.restarts.sizes)
            go_on(flow)
            flow.advance()
            try:
                await learn(flow)
            except BaseException as error:
                if not (self.at_once or isinstance(error, WorkerDied)):
                    await self._hand_over(flow)
                raise
            for pool in flow.pools:
                pool.close()
            if watchdog:
                watchdog.cancel()

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def scale(
        self, changes: Sequence[str], check: Callable[[Mapping[str, int]], None]
    ) -> dict[str, dict[str, list[str]]]:
        """Change the number of workers and return the names of the workers by kind and state.

        `scaling.asked` parses `changes`. `check` raises if the machine has no room. On an error nothing is changed.
        """
        if not self.engines.takes:
            raise ConfigError('runtime.kind = "inline" has all workers in one process: write "local" or "ray"')
        if self.flow is None or self.flow.samplers.newest is None:
            raise ConfigError("the run is still starting: try again when it has started")
        if changes and (self.flow.ending or self.admission.finished):
            raise ConfigError("the run is ending")
        pools = self._scalable()
        now = {kind: pool.size for kind, pool in pools.items()}
        sizes = asked(changes, now)
        for kind in sizes.keys() & self.config.most_workers:
            raise ConfigError(f'{kind}: with replicas = "auto" the run chooses this number itself')
        check_room(sizes, now, self._room())
        check(now | sizes)
        self._resize(sizes)
        return {kind: pool.standing for kind, pool in pools.items()}

    @property
    def tau(self) -> float:
        """The current tau: at most (tau + 1) · `publish_every` batches may be in flight."""
        return (self.autopilot.tau if self.autopilot else self.most) - self.guards.lowered

    @property
    def publish_every(self) -> int:
        return self.autopilot.every if self.autopilot else self.admission.schedule.publish_every

    def _decide(self, line: Mapping[str, Any]) -> list[str]:
        """Pass the metrics of an update to guards and autopilot; return a message for each new decision."""
        messages = self.guards.look(line)
        if self.autopilot and "tau" in line and (new := self.autopilot.look(line)):
            messages.append(f"schedule: {new}")
        return messages

    def _apply_decisions(self) -> None:
        """Apply the decisions made after the last update."""
        if isinstance(self.config.schedule, Async):
            every = self.publish_every
            self.admission.allow(credits_of(self.tau, every, self.config.groups_per_update), every)
        if self.flow is not None:
            self.flow.lr = self.guards.lr

    def _control_metrics(self) -> Metrics:
        steers = self.autopilot or self.config.guards.kl
        metrics = {"tau": float(self.tau)} if steers else {}
        if self.autopilot and self.autopilot.rarest > self.autopilot.often:
            metrics["publish_every"] = float(self.publish_every)
        return self.guards.metrics | metrics | (self.flow.canaries.metrics if self.flow else {})

    def _after_update(self, line: Metrics) -> None:
        for message in self._decide(line):
            self.say(message)
        self._apply_decisions()
        self._autoscale(line)

    def _autoscale(self, line: Metrics) -> None:
        if self.autoscale is None or self.admission.finished:
            return
        pools = self._scalable()
        settled = not any(pool.coming or pool.leaving for pool in pools.values())
        seen = Seen(
            seconds=line["seconds/update"],
            waited=line["seconds/data"] + line["seconds/turn"],
            tokens=line["tokens"],
            busy={kind: sum(1 - line.get(f"idle/{w.name}", 0.0) for w in pool.workers) for kind, pool in pools.items()},
            sizes={kind: pool.size for kind, pool in pools.items()} if settled else {},
        )
        if change := self.autoscale.look(seen, self._room()):
            sizes = ", ".join(f"{kind} from {pools[kind].size} to {size}" for kind, size in change.sizes.items())
            self.say(f"replicas: {sizes}, because {change.why}")
            self._resize(change.sizes)

    def _scalable(self) -> dict[str, Pool[Any]]:
        assert self.flow is not None
        return {pool.kind: pool for pool in self.flow.pools if pool.kind in self.engines.takes}

    def _room(self) -> Room:
        return Room(self.engines.free(), self.engines.takes)

    def _resize(self, sizes: Mapping[str, int]) -> None:
        self.restarts.sizes |= sizes
        for kind, size in sizes.items():
            self._scalable()[kind].resize(size)

    def report(self) -> str:
        return self.flow.report() if self.flow else "engines are starting"

    def _flow(self, tasks: asyncio.TaskGroup) -> Flow:
        rewound, trace = self.restarts.began is not None, self._trace()
        shared: Any = {"say": self.say, "tasks": tasks, "engines": self.engines, "restarts": self.restarts}
        samplers = Samplers(self.engines.samplers, trace, kind="sampler", stage="rollout", name="sampler", **shared)
        teachers, configured = self.engines.scorers, self.config.teachers
        follow = {name: each.follow.period for name, each in configured.items() if each.follow is not None}
        kinds: dict[bool, type[Pool[Any]]] = {True: MovingTeacher, False: Pool}
        scorers = {
            teacher: kinds[teacher in follow](
                engines,
                trace,
                kind=f"teacher.{teacher}",
                stage="score",
                name=scorer_name(teacher, teachers),
                work=f"scoring by {teacher}" if len(teachers) > 1 else "scoring",
                **shared,
            )
            for teacher, engines in teachers.items()
        }
        learning = trace.track("learn", "learner")
        if rewound:
            trace.slice(learning, "gone", self.log.last.get("time", 0.0), trace.now())
        return Flow(
            samplers=samplers,
            scorers=scorers,
            follow=follow,
            canaries=self._canaries(samplers, scorers),
            shows={name: teacher.shows for name, teacher in configured.items()},
            relabel={name: teacher.relabel for name, teacher in configured.items()},
            memory=self.memory,
            learner=self.engines.learner,
            learning=learning,
            admission=self.admission,
            prompt=self.prompts.at,
            sampling=rollout_sampling(self.config),
            account=Ledger(self.log, trace, self.admission, self.restarts, self._control_metrics),
            trace=trace,
            tasks=tasks,
            health=self.health,
            buffer=self._buffer(),
            recheck={
                name: Recheck(teacher.recheck, teacher.promised, self.config.seed)
                for name, teacher in self.config.teachers.items()
            },
            silence={
                name: ResponseWatch(f"teacher {name}", self.say)
                for name, teacher in self.config.teachers.items()
                if teacher.base_url is not None
            },
            passes=Steps(self.config.learner.minibatches, self.config.learner.epochs),
            quoted=self.config.log.samples,
            look=self._after_update,
            lr=self.guards.lr,
            # after the last update `train` saves instead, so that the checkpoint includes the final evaluation
            due=lambda: (
                self.admission.version < self.config.updates
                and self.checkpoints.due(self.admission.version, trace.now())
            ),
            checkpoint=self._checkpoint,
            after_publish=self._published,
            held=self.held,
        )

    def _canaries(self, samplers: Samplers, scorers: Mapping[str, Pool[Any]]) -> Canaries:
        config, prompts, sampling, teachers = self.config, self.prompts, rollout_sampling(self.config), list[Watched]()
        exact = "bfloat16" not in (config.learner.dtype, config.learner.compute_dtype)
        for name, teacher in config.teachers.items():
            chosen = canary.prompts_of(prompts, name if len(config.teachers) > 1 else None, canary.TEXTS)
            texts, shown = canary.texts_of(chosen, sampling, self.ends), Attempts() if teacher.shows else None
            precise = teacher.exact and (exact or teacher.follow is None)
            teachers.append(Watched(name, of_teacher(scorers, name), texts, shown, precise))
            if name in self.known:
                teachers[-1].recall(self.known[name])
        return Canaries(
            config.health,
            self.engines.learner,
            samplers,
            list(scorers.values()),
            teachers,
            updates=config.updates,
            questions=canary.prompts_of(prompts, None, canary.DRAWN),
            sampling=sampling,
            exact=exact and config.sampler.dtype != "bfloat16",
            redo=lambda number, worker, roll: self.flow is not None and self.flow.redo(number, worker, roll=roll),
            last=self.log.last,
            say=self.say,
        )

    def _buffer(self) -> Buffer | None:
        if self.config.freshness is None:
            return None
        learner = self.config.learner
        steps = learner.minibatches * learner.epochs
        return Buffer(self.config.freshness, steps=steps, last=self.log.last, say=self.say)

    async def _hand_over(self, flow: Flow) -> None:
        """Collect partial rollouts for the checkpoint of a stopping run; print errors and a timeout, do not raise."""
        flow.ending = True
        try:
            await asyncio.wait_for(hand_over(flow), HANDING_OVER)
        except Exception as error:  # the error that stopped the run must still be raised
            why = (
                f"{HANDING_OVER:.0f} s were not enough"
                if isinstance(error, TimeoutError)
                else first_line(_cause(error))
            )
            self.say(f"partial rollouts are lost and will start again: {why}")

    def _trace(self) -> Trace:
        """Start the recording of busy times; its clock also counts the time between a learner's death and restart."""
        clock = asyncio.get_running_loop().time
        began = self.restarts.began
        before = self.log.time if began is None else clock() - began
        trace = Trace(self.log.trace, clock, before=before)
        self.restarts.began = trace.began
        return trace

    async def _stopped(self, cause: BaseException) -> NoReturn:
        """Save a checkpoint, record the groups in flight as dropped in the ledger, and raise `cause`.

        After a non-finite loss or gradient the weights are still those of the last update, and are saved. Nothing is
        saved between two steps of one update, because such weights belong to no version. Nothing is saved either if
        the disk or the learner failed, or if `at_once` is True. `resume` then uses the last saved checkpoint.
        """
        if isinstance(cause, RunDirError):
            raise cause from cause.__cause__
        mark = self._mark()  # taken before groups are recorded as dropped: a resumed run continues them
        if self.flow:
            for number in self.admission.live:
                self.flow.account.dropped(self.prompts.at(number), "run stopped")
        if self.at_once or isinstance(cause, WorkerDied):
            raise cause
        if self.flow and self.flow.torn:
            self.say("no checkpoint is saved: the current update may have made only some of its optimizer steps")
            raise cause from cause.__cause__
        limit = STALLED_SAVE if isinstance(cause, Stalled) else self.patience
        suspect = isinstance(cause, NonFiniteError) or (isinstance(cause, Unhealthy) and cause.harmful)
        try:
            path = await in_time(self._checkpoint(mark, stopping=True, suspect=suspect)(), limit, "saving")
        except Exception as error:  # the learner itself may have failed; `cause` must still be raised
            self.say(f"no checkpoint could be saved: {type(error).__name__}: {error}")
        else:
            if isinstance(cause, NonFiniteError | Unhealthy):
                version, saved = self.admission.version, self.checkpoints
                before = resumable(saved.directory, saved.proof)[-1:] if suspect else []
                what = "sound" if saved.proven(version) else "earlier"
                other = "".join(f", and {what} ones in {saved.directory / str(each)}" for each in before)
                message = f"{cause}; the weights of update {version} are in {path}{other}"
                raise type(cause)(message) from None
        raise cause from cause.__cause__

    def _mark(self) -> Mark:
        return self.log.mark(time=self.flow.trace.now() if self.flow else self.log.time)

    def _checkpoint(self, mark: Mark | None = None, *, stopping: bool = False, suspect: bool = False) -> Save:
        groups = [self.held[number] for number in self.admission.live if self.held.get(number)]
        standing, attempts, mark = self.admission.standing, self.memory.state, mark or self._mark()
        known = self.flow.canaries.state if self.flow else self.known
        extra: Any = {"attempts": attempts, "canaries": known, "stopping": stopping, "suspect": suspect}

        async def save() -> Path:
            return await self.checkpoints.save(self.engines.learner, standing, groups, mark, **extra)

        return save

    async def _published(self) -> None:
        assert self.flow is not None
        await self.flow.canaries.after_publish(self.admission.version)
        await self._evaluate()

    async def _evaluate(self) -> None:
        every, rewards, update = self.config.eval.every, self.config.task.names, self.admission.version
        flow = self.flow
        if not every or not rewards or flow is None or update == self.log.evaluated:
            return
        if update % every and update != self.config.updates:  # the final student is always evaluated
            return

        async def generate(prompt: Prompt, sampling: Sampling) -> list[Handle]:
            async def answer(worker: Worker[Sampler]) -> Group:
                found = await worker.engine.generate(prompt, sampling, group)
                return found if unfinished(found) else answered_members(found)

            group: Group = ()
            while unfinished(group):
                group = await flow.samplers.call(f"held-out prompt {prompt.number}", answer)
            flow.moved = flow.trace.now()
            return list(group)

        sampling, began = eval_sampling(self.config), flow.trace.now()
        found = {name: await answers(generate, prompts, sampling) for name, prompts in self.held_out.items()}
        for name, groups in found.items():  # no await here: a stopped run records all sets or none
            self.log.metrics("eval", summary(groups, rewards[0]), update=update, of=name)
        flow.account.evaluated(flow.trace.now() - began)


def admission_of(config: Config, prompts: Prompts, standing: Standing | None) -> Admission:
    """Return the admission state of a run, new or continued; its updates keep the mixture of prompt sources."""
    schedule = schedule_of(config.schedule, config.groups_per_update)
    return Admission(schedule, updates=config.updates, source=prompts.source, standing=standing)


def autopilot_of(schedule: ScheduleConfig) -> Autopilot | None:
    if isinstance(schedule, Async) and schedule.finds_tau:
        return Autopilot(schedule.tau_max, schedule.drift, often=schedule.often, rarest=schedule.rarest)
    return None


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Make garbage collection rare: most objects stay in use, and collection took a third of the time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def in_time(work: Coroutine[Any, Any, T], seconds: float | None, doing: str) -> T:
    """Await work by the learner; raise Stalled after `seconds` (None: no limit). No watchdog runs at this time."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise Stalled(f"the learner has not finished {doing} after {seconds:.0f} s") from None


def _cause(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
