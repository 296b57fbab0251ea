"""The coordinator of a run: it builds the pipeline, starts it, and ends with the final student.

A group in flight uses one credit (a permit). The credit returns when the weights of the group's update are published.
       ┌─────────────────────────────────────────────────────────────────────────┐
prompts ─▶ admission ─▶ roll (Samplers) ─▶ score (Scorers) ─▶ learn (Learner) ─▶ deliver ┘
            limits         generates          scores             updates         publishes

`admission` decides which groups may move. `groups` stores the groups in flight and starts their coroutines. `stages`
has the coroutines roll and score, `learning` the loop of the learner, and `publish` has deliver. `Run._connect` gives
each stage what it needs. After every update the controllers of `steering` decide, and `Run._carry_out` does it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.config.base import HALVES
from slipstream.config.schema import Config
from slipstream.data.choice import AdaptiveChoice, Choice
from slipstream.data.prompts import Prompts
from slipstream.engines.sampling_options import eval_sampling, rollout_sampling
from slipstream.errors import ConfigError, Unhealthy, WorkerDied
from slipstream.metrics import Metrics
from slipstream.models.model_card import card
from slipstream.pipeline.admission import Admission, AdmissionState
from slipstream.pipeline.attempts import Memory
from slipstream.pipeline.canary_rounds import Canaries, Watched
from slipstream.pipeline.checkpoint import BEGINNING, Checkpoints, RunState, recorded_settings
from slipstream.pipeline.control import canary
from slipstream.pipeline.control.actions import Action, CheckTeachers, Resize, Say, SetLimits, SetRate, Stop
from slipstream.pipeline.control.buffer_refresh import Buffer
from slipstream.pipeline.control.scaling import Autoscale
from slipstream.pipeline.ending import Ending, cause_of
from slipstream.pipeline.evaluate import Evaluation
from slipstream.pipeline.failures import ResponseWatch, Restarts
from slipstream.pipeline.groups import Groups, measured
from slipstream.pipeline.learning import Learning, Save
from slipstream.pipeline.ledger import Ledger
from slipstream.pipeline.pool import Pool, scorer_name
from slipstream.pipeline.progress import Progress
from slipstream.pipeline.publish import NO_TEACHER, MovingTeacher, Publishing, Samplers, Teacher, TeacherSamplers
from slipstream.pipeline.replicas import Names, Replicas
from slipstream.pipeline.schedules import schedule_of
from slipstream.pipeline.stages import Rollouts, Scoring, has_zero_advantage
from slipstream.pipeline.steering import Steering
from slipstream.pipeline.suites import SuiteRuns
from slipstream.pipeline.trace import Trace
from slipstream.processes import RARE_COLLECTIONS, garbage_collection
from slipstream.protocols import Engines, Sampling, of_teacher
from slipstream.records import Prompt
from slipstream.run_dir.writing import LogPosition, RunLog

OBJECTS_PER_SAMPLE = 100
"""Upper estimate of the Python objects of a sample in flight; collections among them would free nothing."""


@dataclass(frozen=True)
class Pipeline:
    """The connected parts of a run that has started."""

    trace: Trace
    pools: Sequence[Pool[Any]]
    replicas: Replicas
    samplers: Samplers
    progress: Progress
    groups: Groups
    canaries: Canaries
    rollouts: Rollouts
    scoring: Scoring
    evaluation: Evaluation
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
        state: RunState = BEGINNING,
        held_out: Mapping[str, Sequence[Prompt]] | None = None,
        ends: Sequence[int] = (),
        restarts: Restarts | None = None,
        patience: float | None = None,
        whole_batches: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """Prepare a run that continues from `state`.

        `ends` are the student's end tokens. `restarts` are the restarts of workers so far. `patience` is the longest
        time in seconds without progress; None means no limit (for a virtual clock). `whole_batches`: the method needs
        all groups of an update at once, under every schedule.
        """
        self.config, self.engines, self.prompts, self.log = config, engines, prompts, log
        self.held_out, self.ends, self.patience = held_out or {}, ends, patience
        self.say, log.say = say, say
        self.restarts = restarts or Restarts(config.runtime.restarts)
        self.restarts.recall(log.last)
        self.references, self.notes = state.canaries, state.notes
        self.choice = choice_of(config, prompts, state.choice)
        self.admission = admission_of(config, self.choice, state.admission, whole_batches=whole_batches)
        prompts.move_rollouts(self.admission.first, config.updates - self.admission.supervised)
        self.responses = {group[0].header.number: group for group in state.groups}
        """Current responses of each group, by group number, with partial rollouts; groups without tokens are absent."""
        assert self.responses.keys() >= self.admission.waiting.keys() | self.admission.ready.keys()
        self.memory = Memory(next(iter(config.task.names), ""), before=state.attempts)
        self.checkpoints = Checkpoints(
            log.path / "checkpoints",
            every=config.checkpoint.every,
            minutes=config.checkpoint.minutes,
            keep=config.checkpoint.keep,
            proof=config.health.proof,
        )
        self.suites = SuiteRuns(config.eval.suite, config.learner.dtype, self.checkpoints.in_use, say)
        files = log, self.checkpoints, self.suites
        self.ending = Ending(engines.learner, *files, self._state, self._mark, patience, say)
        self.rate = 1.0
        """Factor on the learning rate of the next update."""
        self.steering = Steering(config.schedule, config.guards, config.health, config.new_groups, log)
        for action in self.steering.settings():
            self._carry_out(action)
        self.pipeline: Pipeline | None = None
        self.task: asyncio.Task[Any] | None = None
        self.at_once = False
        """True if the run must stop without saving a checkpoint."""

    async def train(self) -> Path:
        """Make all updates and return the directory of the final student."""
        try:
            in_flight = self.admission.schedule.held * self.config.sampler.group
            with garbage_collection(max(RARE_COLLECTIONS[0], OBJECTS_PER_SAMPLE * in_flight), *RARE_COLLECTIONS[1:]):
                await self._update_all()
            return await self.ending.complete(lambda: card(self.config.model_dump(mode="json"), self.log.path))
        except (asyncio.CancelledError, Exception, BaseExceptionGroup) as error:
            await self.suites.stop()
            learning = self.pipeline.learning if self.pipeline else None
            await self.ending.stop(cause_of(error), learning, at_once=self.at_once)

    async def _update_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            pipeline = self.pipeline = self._connect(tasks)
            self.checkpoints.last = pipeline.trace.now()
            earlier = [number for number in self.checkpoints.existing() if number < self.config.updates]
            self.suites.resume(earlier, self.log.path)
            watchdog = tasks.create_task(pipeline.progress.watch(self.patience)) if self.patience else None
            await pipeline.publishing.begin()
            await pipeline.canaries.begin(self.admission.version)
            await pipeline.evaluation.evaluate()
            pipeline.replicas.resize(self.restarts.sizes)
            pipeline.groups.resume()
            try:
                await pipeline.learning.learn()
            except BaseException as error:
                if not (self.at_once or isinstance(error, WorkerDied)):
                    await self.ending.hand_over(pipeline.learning)
                raise
            if watchdog:
                watchdog.cancel()
            await pipeline.canaries.finish(self.admission.version)
            for pool in pipeline.pools:
                pool.close()

    # --- requests from outside -----------------------------------------------------------------------------------

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def scale(self, changes: Sequence[str], check: Callable[[Mapping[str, int]], None]) -> Names:
        """Change the number of workers and return their names (`Replicas.scale`)."""
        if not self.engines.takes:
            raise ConfigError('runtime.kind = "inline" has all workers in one process: write "local" or "ray"')
        if self.pipeline is None or self.pipeline.samplers.newest is None:
            raise ConfigError("the run is still starting: try again when it has started")
        if changes and (self.pipeline.groups.stopping or self.admission.finished):
            raise ConfigError("the run is ending")
        return self.pipeline.replicas.scale(changes, self.config.most_workers, check)

    def report(self) -> str:
        return self.pipeline.progress.report() if self.pipeline else "engines are starting"

    # --- after every update --------------------------------------------------------------------------------------

    def _on_update(self, line: Metrics) -> None:
        for action in self.steering.on_update(line):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Say(text):
                self.say(text)
            case Stop(message, harmful):
                raise Unhealthy(message, harmful=harmful)
            case SetRate(factor):
                self.rate = factor
            case SetLimits(credits, publish_every):
                self.admission.set_limits(credits, publish_every)
            case Resize(sizes):
                assert self.pipeline is not None
                self.pipeline.replicas.resize(sizes)
            case CheckTeachers(update):
                assert self.pipeline is not None
                self.pipeline.canaries.check_teachers(update)

    async def _after_publish(self) -> None:
        assert self.pipeline is not None
        await self.pipeline.canaries.after_publish(self.admission.version)
        await self.pipeline.evaluation.evaluate()

    def _checkpoint_due(self) -> bool:
        """Return whether a checkpoint is due; after the last update `train` saves one with the final evaluation."""
        version = self.admission.version
        due = self.checkpoints.due(version, self._now()) or self.suites.due(version)
        return version < self.config.updates and due

    def _capture(self) -> Save:
        """Capture the state of the run now, and return the function that saves it and has it scored if that is due."""
        save, update = self.ending.capture(), self.admission.version

        async def saved() -> Path:
            checkpoint = await save()
            if self.suites.due(update):
                self.suites.start(checkpoint)
            return checkpoint

        return saved

    def _state(self) -> RunState:
        kept = [*self.admission.store.groups, *self.admission.live]
        groups = [self.responses[number] for number in kept if self.responses.get(number)]
        references = self.pipeline.canaries.state if self.pipeline else self.references
        notes = self.pipeline.groups.ledger.notes if self.pipeline else self.notes
        kinds = self.memory.state, references, self.choice.state, recorded_settings(self.config), notes
        return RunState(self.admission.state, groups, *kinds)

    def _mark(self) -> LogPosition:
        totals: Metrics = {}
        if self.pipeline:
            self.pipeline.trace.write_current()
            totals = self.pipeline.groups.ledger.totals | self.pipeline.canaries.metrics
        return self.log.mark(time=self._now(), totals=totals)

    def _now(self) -> float:
        return self.pipeline.trace.now() if self.pipeline else self.log.time

    # --- how the parts are connected -----------------------------------------------------------------------------

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
        replicas = Replicas(pools, self.engines, self.restarts, self.admission)
        track = trace.track("learn", "learner")
        if restarted:
            trace.slice(track, "gone", self.log.last.get("time", 0.0), trace.now())

        progress = Progress(trace, self.admission, pools)
        ledger = Ledger(
            self.log,
            trace,
            self.admission,
            self.restarts,
            lambda: self.steering.metrics | self.choice.metrics,
            self.engines.traffic,
            devices=1 if config.runtime.kind == "inline" else config.devices,
            size=config.sampler.group,
            several_teachers=len(config.teachers) > 1,
            notes=self.notes,
        )
        policy, sampling = config.policy, rollout_sampling(config)
        weights = {name: policy.reward_weights.get(name, 1.0) for name in config.task.names} if policy else {}
        measure = partial(measured, weights, self.admission.schedule.reuse)
        groups = Groups(self.admission, ledger, self.choice, progress, tasks, self.responses, measure)
        canaries = self._canaries(groups, samplers, checked, list(teachers.values()))
        autoscale = [Autoscale(config.most_workers, replicas.state)] if config.most_workers else []
        self.steering.controllers += [*autoscale, canaries]
        memory = self.memory if any(teacher.shows for teacher in teachers.values()) else None
        zero_advantage = partial(has_zero_advantage, weights, policy is not None and policy.advantage == "gdpo")
        options = partial(sampling_of, config, sampling, self.choice, self.admission)
        rollouts = Rollouts(groups, samplers, teacher_samplers, sampling, options, canaries, memory, zero_advantage)
        needed = config.sft is not None and config.sft.loss.spec.cache != "none"
        scoring = Scoring(groups, teachers, self.memory, config.seed, needed)
        groups.roll, groups.score = rollouts.roll, scoring.score
        evaluation = Evaluation(
            config.eval,
            partial(eval_sampling, config),
            self.held_out,
            "".join(config.task.names[:1]),
            samplers,
            scoring,
            groups,
            self.log,
        )
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
            lr=lambda: self.rate,
            on_update=self._on_update,
            checkpoint_due=self._checkpoint_due,
            capture=self._capture,
        )
        return Pipeline(
            trace,
            pools,
            replicas,
            samplers,
            progress,
            groups,
            canaries,
            rollouts,
            scoring,
            evaluation,
            publishing,
            learning,
        )

    def _trace(self) -> Trace:
        """Start the recording of busy times; its clock also counts the time between a learner's death and restart."""
        clock = asyncio.get_running_loop().time
        began = self.restarts.began
        before = self.log.time if began is None else clock() - began
        trace = Trace(self.log.trace, clock, before=before)
        self.restarts.began = trace.began
        return trace

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
            chosen = canary.prompts_of(prompts, teacher.name if len(teachers) > 1 else None, canary.CANARY_TEXTS)
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
        return Buffer(self.config.freshness, steps=learner.minibatches * learner.epochs, last=self.log.last)


def sampling_of(config: Config, sampling: Sampling, choice: Choice, admission: Admission, prompt: Prompt) -> Sampling:
    """Return the sampling options of a group: with logit fusion the teacher's share depends on update and prompt."""
    if config.sampler.fusion is None:
        return sampling
    update, difficulty = admission.live[prompt.number].version - admission.supervised + 1, 1.0
    if config.sampler.fusion.difficulty:
        difficulty = choice.difficulty(prompt.number)
    return replace(sampling, fusion=config.sampler.fusion.share(update, difficulty))


def choice_of(config: Config, prompts: Prompts, before: Mapping[str, Any] | None) -> Choice:
    data, reward = config.data, next(iter(config.task.names), "")
    if data.order != "adaptive":
        return Choice(prompts, before)
    return AdaptiveChoice(
        prompts,
        weight_by=data.adaptive.weight_by,
        reward=reward,
        half_life=data.adaptive.half_life,
        uniform_share=data.adaptive.uniform_share,
        before=before,
    )


def admission_of(config: Config, choice: Choice, state: AdmissionState, *, whole_batches: bool = False) -> Admission:
    schedule = schedule_of(config.schedule, config.groups_per_update, config.reuse)
    if config.schedule.learns_as_ready and whole_batches:
        schedule = replace(schedule, learn="batch", order="submission")
    return Admission(
        schedule,
        updates=config.updates,
        supervised=config.supervised_updates,
        source=choice.source,
        most_refilled=config.most_refilled,
        seed=config.seed,
        state=state,
    )
