"""The coordinator of a run: it builds the pipeline, starts it, and ends with the final student.

A group in flight uses one credit (a permit). The credit returns when the weights of the group's update are published.
       ┌─────────────────────────────────────────────────────────────────────────┐
prompts ─▶ admission ─▶ roll (Samplers) ─▶ score (Scorers) ─▶ learn (Learner) ─▶ deliver ┘
            limits         generates          scores             updates         publishes

`admission` decides which groups may move. `groups` stores the groups in flight and starts their coroutines. `stages`
has the coroutines roll, score, learn and deliver. `Run._connect` gives each stage what it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from slipstream.config.base import HALVES
from slipstream.config.schema import Config
from slipstream.data.choice import AdaptiveChoice, Choice
from slipstream.data.prompts import Prompts
from slipstream.engines.sampling_options import eval_sampling, rollout_sampling
from slipstream.errors import (
    ConfigError,
    NonFiniteError,
    RecordsLost,
    RunDirError,
    Stalled,
    Unhealthy,
    WorkerDied,
    first_line,
)
from slipstream.metrics import Metrics
from slipstream.models.model_card import card
from slipstream.pipeline.admission import Admission, AdmissionState
from slipstream.pipeline.attempts import Memory
from slipstream.pipeline.canary_rounds import Canaries, Watched
from slipstream.pipeline.checkpoint import Checkpoints, save_whole
from slipstream.pipeline.control import canary
from slipstream.pipeline.control.buffer_refresh import Buffer
from slipstream.pipeline.control.scaling import Autoscale, Room, Seen, check_room, requested_sizes
from slipstream.pipeline.evaluate import answers, summary
from slipstream.pipeline.groups import Groups
from slipstream.pipeline.ledger import Ledger
from slipstream.pipeline.pool import Pool, Worker, scorer_name
from slipstream.pipeline.progress import Progress
from slipstream.pipeline.publish import MovingTeacher, Samplers, TeacherSamplers
from slipstream.pipeline.restarts import Restarts
from slipstream.pipeline.schedules import schedule_of
from slipstream.pipeline.stages import (
    Learning,
    Publishing,
    Rollouts,
    Save,
    Scoring,
    answered_members,
    rewards_alike,
)
from slipstream.pipeline.steering import Steering
from slipstream.pipeline.teachers import NO_TEACHER, Teacher
from slipstream.pipeline.trace import Trace
from slipstream.pipeline.watchdog import ResponseWatch
from slipstream.processes import RARE, garbage_collection
from slipstream.protocols import Engines, Sampler, Sampling, of_teacher
from slipstream.records import Group, Handle, Prompt, unfinished
from slipstream.run_dir.formats import resumable
from slipstream.run_dir.writing import LogPosition, RunLog

T = TypeVar("T")
HANDING_OVER = 30.0
"""Seconds that samplers get to return partial rollouts when a run stops; a response may have to be graded first."""
OBJECTS = 100
"""Upper estimate of the Python objects of a sample in flight; collections among them would free nothing."""
STALLED_SAVE = 60.0
"""Time limit in seconds for saving the checkpoint of a stalled run, because the learner itself may hang."""


@dataclass(frozen=True)
class Pipeline:
    """The connected parts of a run that has started."""

    trace: Trace
    pools: Sequence[Pool[Any]]
    samplers: Samplers
    progress: Progress
    groups: Groups
    canaries: Canaries
    rollouts: Rollouts
    scoring: Scoring
    publishing: Publishing
    learning: Learning


class Run:
    def __init__(
        self,
        config: Config,
        engines: Engines,
        prompts: Prompts,
        log: RunLog,
        *,
        held_out: Mapping[str, Sequence[Prompt]] | None = None,
        standing: AdmissionState | None = None,
        groups: Sequence[Group] = (),
        attempts: Mapping[str, Any] | None = None,
        canaries: Mapping[str, Any] | None = None,
        choice: Mapping[str, Any] | None = None,
        ends: Sequence[int] = (),
        restarts: Restarts | None = None,
        patience: float | None = None,
        whole_batches: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """Prepare a run; `standing`, `groups`, `attempts`, `canaries`, `choice` and `restarts` are its earlier state.

        `standing` is the admission state, and `groups` are the groups in flight. `attempts` are the attempts remembered
        for each prompt, and `canaries` the reference answer of each teacher. `ends` are the student's end tokens.
        `patience` is the longest time in seconds without progress; None means no limit (for a virtual clock).
        `whole_batches`: the method needs all groups of an update at once, under every schedule.
        """
        self.config, self.engines, self.prompts, self.log = config, engines, prompts, log
        self.held_out = held_out or {}
        self.restarts = restarts or Restarts(config.runtime.restarts)
        self.restarts.recall(log.last)
        self.patience, self.say, log.say = patience, say, say
        self.references, self.ends = canaries or {}, ends
        self.choice = choice_of(config, prompts, choice)
        self.admission = admission_of(config, self.choice, standing, whole_batches=whole_batches)
        prompts.move_rollouts(self.admission.first, config.updates - self.admission.supervised)
        self.responses = {group[0].header.number: group for group in groups}
        """Current responses of each group, by group number, with partial rollouts; groups without tokens are absent."""
        assert self.responses.keys() >= self.admission.waiting.keys() | self.admission.ready.keys()
        self.checkpoints = Checkpoints(
            log.path / "checkpoints",
            every=config.checkpoint.every,
            minutes=config.checkpoint.minutes,
            keep=config.checkpoint.keep,
            proof=config.health.proof,
        )
        self.memory = Memory(next(iter(config.task.names), ""), before=attempts)
        self.autoscale = Autoscale(config.most_workers) if config.most_workers else None
        self.steering = Steering(config.schedule, config.guards, config.health, self.admission, log, say)
        self.pipeline: Pipeline | None = None
        self.task: asyncio.Task[Any] | None = None
        self.at_once = False
        """True if the run must stop without saving a checkpoint."""

    async def train(self) -> Path:
        """Make all updates and return the directory of the final student."""
        try:
            in_flight = self.admission.schedule.credits * self.config.sampler.group
            with garbage_collection(max(RARE[0], OBJECTS * in_flight), *RARE[1:]):
                await self._update_all()
            if self.checkpoints.at_end:
                await with_timeout(self._checkpoint()(), self.patience, "writing a checkpoint")
            final, model_card = self.log.path / "final", card(self.config.model_dump(mode="json"), self.log.path)
            writing = save_whole(self.engines.learner, final, {"README.md": model_card.encode()})
            await with_timeout(writing, self.patience, "writing the final student")
            return final
        except BaseExceptionGroup as group:
            await self._stopped(_cause(group))
        except (asyncio.CancelledError, Exception) as error:
            await self._stopped(error)

    async def _update_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            pipeline = self.pipeline = self._connect(tasks)
            self.checkpoints.last = pipeline.trace.now()
            watchdog = tasks.create_task(pipeline.progress.watch(self.patience)) if self.patience else None
            await pipeline.publishing.begin()
            await pipeline.canaries.begin(self.admission.version)
            await self._evaluate()
            self._resize(self.restarts.sizes)
            pipeline.groups.resume()
            try:
                await pipeline.learning.learn()
            except BaseException as error:
                if not (self.at_once or isinstance(error, WorkerDied)):
                    await self._hand_over(pipeline)
                raise
            for pool in pipeline.pools:
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

        `requested_sizes` parses `changes`. `check` raises if the machine has no room. On an error nothing is changed.
        """
        if not self.engines.takes:
            raise ConfigError('runtime.kind = "inline" has all workers in one process: write "local" or "ray"')
        if self.pipeline is None or self.pipeline.samplers.newest is None:
            raise ConfigError("the run is still starting: try again when it has started")
        if changes and (self.pipeline.groups.stopping or self.admission.finished):
            raise ConfigError("the run is ending")
        pools = self._scalable()
        now = {kind: pool.size for kind, pool in pools.items()}
        sizes = requested_sizes(changes, now)
        for kind in sizes.keys() & self.config.most_workers:
            raise ConfigError(f'{kind}: with replicas = "auto" the run chooses this number itself')
        check_room(sizes, now, self._room())
        check(now | sizes)
        self._resize(sizes)
        return {kind: pool.names_by_state for kind, pool in pools.items()}

    def _after_update(self, line: Metrics) -> None:
        self.steering.look(line)
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
        assert self.pipeline is not None
        return {pool.kind: pool for pool in self.pipeline.pools if pool.kind in self.engines.takes}

    def _room(self) -> Room:
        return Room(self.engines.free(), self.engines.takes)

    def _resize(self, sizes: Mapping[str, int]) -> None:
        self.restarts.sizes |= sizes
        for kind, size in sizes.items():
            self._scalable()[kind].resize(size)

    def report(self) -> str:
        return self.pipeline.progress.report() if self.pipeline else "engines are starting"

    def _connect(self, tasks: asyncio.TaskGroup) -> Pipeline:
        restarted, trace = self.restarts.began is not None, self._trace()
        config, learner = self.config, self.engines.learner
        shared: Any = {"say": self.say, "tasks": tasks, "engines": self.engines, "restarts": self.restarts}
        samplers = Samplers(self.engines.samplers, trace, kind="sampler", stage="rollout", name="sampler", **shared)
        teachers = {name: self._teacher(name, trace, shared) for name in self.engines.scorers}
        teacher_samplers = {
            name: TeacherSamplers(
                replicas, trace, kind=f"sampler.{name}", stage="rollout", name=f"sampler-{name}", **shared
            )
            for name, replicas in self.engines.teacher_samplers.items()
        }
        checked = [samplers, *(teacher.pool for teacher in teachers.values())]
        pools = [*checked, *teacher_samplers.values()]
        track = trace.track("learn", "learner")
        if restarted:
            trace.slice(track, "gone", self.log.last.get("time", 0.0), trace.now())

        progress = Progress(trace, self.admission, pools)
        ledger = Ledger(
            self.log,
            trace,
            self.admission,
            self.restarts,
            lambda: self.steering.metrics | canaries.metrics | self.choice.metrics,
            self.engines.traffic,
            devices=1 if config.runtime.kind == "inline" else config.devices,
        )
        groups = Groups(self.admission, ledger, self.choice, progress, tasks, self.responses)
        canaries = self._canaries(groups, samplers, checked, list(teachers.values()))
        memory = self.memory if any(teacher.shows for teacher in teachers.values()) else None
        policy, sampling = config.policy, rollout_sampling(config)
        weights = {name: policy.reward_weights.get(name, 1.0) for name in config.task.names} if policy else {}
        alike = partial(rewards_alike, weights, policy is not None and policy.advantage == "gdpo")
        rollouts = Rollouts(groups, samplers, teacher_samplers, sampling, canaries, memory, alike)
        needed = config.sft is not None and config.sft.loss.spec.cache != "none"
        scoring = Scoring(groups, teachers, self.memory, config.seed, needed)
        groups.roll, groups.score = rollouts.roll, scoring.score
        publishing = Publishing(learner, track, samplers, teachers.values(), groups, self._after_publish)
        learning = Learning(
            groups,
            rollouts,
            scoring,
            publishing,
            canaries,
            learner=learner,
            track=track,
            say=self.say,
            settings=config.learner,
            quoted=config.log.samples,
            until=config.sft.until if config.sft is not None else None,
            buffer=self._buffer(),
            lr=lambda: self.steering.lr,
            after_update=self._after_update,
            checkpoint_due=lambda: self._checkpoint_due(trace.now()),
            capture=self._checkpoint,
        )
        return Pipeline(trace, pools, samplers, progress, groups, canaries, rollouts, scoring, publishing, learning)

    def _teacher(self, key: str, trace: Trace, shared: Any) -> Teacher:
        """Return the teacher of the scorers under this key; without teachers it stands for `Unscored`."""
        names, several = self.config.teachers or {"": NO_TEACHER}, len(self.engines.scorers) > 1
        name = of_teacher({name: name for name in names}, key)
        settings = names[name]
        pool: type[Pool[Any]] = Pool if settings.follow is None else MovingTeacher
        scorers = pool(
            self.engines.scorers[key],
            trace,
            kind=f"teacher.{key}",
            stage="score",
            name=scorer_name(key, self.engines.scorers),
            work=f"scoring by {key}" if several else "scoring",
            **shared,
        )
        silence = None if settings.base_url is None else ResponseWatch(f"teacher {name}", self.say)
        return Teacher(name, settings, scorers, settings.shows, silence)

    def _canaries(
        self, groups: Groups, samplers: Samplers, pools: Sequence[Pool[Any]], teachers: Sequence[Teacher]
    ) -> Canaries:
        config, prompts, sampling = self.config, self.prompts, rollout_sampling(self.config)
        exact = HALVES.isdisjoint({config.learner.dtype, config.learner.compute_dtype})
        watched = list[Watched]()
        for teacher in teachers if config.teachers else ():
            chosen = canary.prompts_of(prompts, teacher.name if len(teachers) > 1 else None, canary.TEXTS)
            noise = teacher.settings.noise_limit
            precise = teacher.settings.exact and (exact or not teacher.follows)
            watched.append(Watched(teacher, canary.texts_of(chosen, sampling, self.ends), precise, noise))
            if teacher.name in self.references:
                watched[-1].recall(self.references[teacher.name])
        return Canaries(
            config.health,
            self.engines.learner,
            groups,
            samplers,
            pools,
            watched,
            updates=config.updates,
            questions=canary.prompts_of(prompts, None, canary.DRAWN),
            sampling=sampling,
            rounding=config.rounding,
            last=self.log.last,
            say=self.say,
        )

    def _buffer(self) -> Buffer | None:
        if self.config.freshness is None:
            return None
        learner = self.config.learner
        steps = learner.minibatches * learner.epochs
        return Buffer(self.config.freshness, steps=steps, last=self.log.last, say=self.say)

    async def _hand_over(self, pipeline: Pipeline) -> None:
        """Collect partial rollouts for the checkpoint of a stopping run; print errors and a timeout, do not raise."""
        pipeline.groups.stopping = True
        try:
            await asyncio.wait_for(pipeline.rollouts.pause(), HANDING_OVER)
        except Exception as error:  # the error that stopped the run must still be raised
            late = isinstance(error, TimeoutError)
            why = f"{HANDING_OVER:.0f} s were not enough" if late else first_line(_cause(error))
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
        if self.pipeline:
            for number in self.admission.live:
                self.pipeline.groups.ledger.dropped(self.choice.prompt(number), "run stopped")
        if self.at_once or isinstance(cause, WorkerDied):
            raise cause
        if self.pipeline and self.pipeline.learning.torn:
            self.say("no checkpoint is saved: the current update may have made only some of its optimizer steps")
            raise cause from cause.__cause__
        limit = STALLED_SAVE if isinstance(cause, Stalled) else self.patience
        suspect = isinstance(cause, NonFiniteError) or (isinstance(cause, Unhealthy) and cause.harmful)
        try:
            path = await with_timeout(self._checkpoint(mark, stopping=True, suspect=suspect)(), limit, "saving")
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

    def _checkpoint_due(self, now: float) -> bool:
        """Return whether a checkpoint is due; after the last update `train` saves one with the final evaluation."""
        version = self.admission.version
        return version < self.config.updates and self.checkpoints.due(version, now)

    def _mark(self) -> LogPosition:
        return self.log.mark(time=self.pipeline.trace.now() if self.pipeline else self.log.time)

    def _checkpoint(self, mark: LogPosition | None = None, *, stopping: bool = False, suspect: bool = False) -> Save:
        groups = [self.responses[number] for number in self.admission.live if self.responses.get(number)]
        standing, attempts, mark = self.admission.standing, self.memory.state, mark or self._mark()
        references = self.pipeline.canaries.state if self.pipeline else self.references
        extra: Any = {"attempts": attempts, "canaries": references, "choice": self.choice.state}
        extra |= {"stopping": stopping, "suspect": suspect}

        async def save() -> Path:
            return await self.checkpoints.save(self.engines.learner, standing, groups, mark, **extra)

        return save

    async def _after_publish(self) -> None:
        assert self.pipeline is not None
        await self.pipeline.canaries.after_publish(self.admission.version)
        await self._evaluate()

    async def _evaluate(self) -> None:
        config, rewards, update = self.config, self.config.task.names, self.admission.version
        pipeline = self.pipeline
        if not config.eval.every or pipeline is None or update == self.log.evaluated:
            return
        final = update == config.updates  # the final student is always evaluated
        due = {
            name: each for name, each in self.held_out.items() if final or update % config.eval.of(name, "every") == 0
        }
        if not due:
            return

        async def generate(prompt: Prompt, sampling: Sampling) -> list[Handle]:
            async def answer(worker: Worker[Sampler]) -> Group:
                found = await worker.engine.generate(prompt, sampling, group)
                return found if unfinished(found) else answered_members(found)

            group: Group = ()
            while unfinished(group):
                group = await pipeline.samplers.call(f"held-out prompt {prompt.number}", answer)
            if not rewards:
                try:
                    group = await pipeline.scoring.scored(group, f"answers to held-out prompt {prompt.number}")
                except RecordsLost:  # a worker died with the answers, so they are drawn again
                    return await generate(prompt, sampling)
            pipeline.progress.note_change()
            return list(group)

        began = pipeline.trace.now()
        found = {name: await answers(generate, each, eval_sampling(config, name)) for name, each in due.items()}
        for name, groups in found.items():  # no await here: a stopped run records all sets or none
            self.log.metrics("eval", summary(groups, "".join(rewards[:1])), update=update, of=name)
        pipeline.groups.ledger.evaluated(pipeline.trace.now() - began)


def choice_of(config: Config, prompts: Prompts, before: Mapping[str, Any] | None) -> Choice:
    data, reward = config.data, next(iter(config.task.names), "")
    if data.order != "adaptive":
        return Choice(prompts, before)
    settings: Any = {"by": data.adapt, "half_life": data.half_life, "floor": data.floor}
    return AdaptiveChoice(prompts, reward=reward, before=before, **settings)


def admission_of(
    config: Config, choice: Choice, standing: AdmissionState | None, *, whole_batches: bool = False
) -> Admission:
    schedule = schedule_of(config.schedule, config.groups_per_update)
    if config.schedule.learns_as_ready and whole_batches:
        schedule = replace(schedule, learn="batch", order="submission")
    return Admission(
        schedule,
        updates=config.updates,
        supervised=config.supervised_updates,
        source=choice.source,
        most_refilled=config.most_refilled,
        standing=standing,
    )


async def with_timeout(work: Coroutine[Any, Any, T], seconds: float | None, doing: str) -> T:
    """Await work by the learner; raise Stalled after `seconds` (None: no limit). No watchdog runs at this time."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise Stalled(f"the learner has not finished {doing} after {seconds:.0f} s") from None


def _cause(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
