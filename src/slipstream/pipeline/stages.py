"""The coroutines that move groups, and the learner's loop. `admission` decides what may happen; this module does it.

| coroutine | consumes         | produces        | waits for                       | is unblocked by         |
|-----------|------------------|-----------------|---------------------------------|-------------------------|
| roll      | one prompt       | a rolled group  | a sampler                       | –                       |
| score     | one rolled group | a scored group  | a scorer                        | –                       |
| learn     | scored groups    | updates         | a batch, its turn, the publish  | score, drop, deliver    |
| deliver   | one update       | new weights     | samplers                        | –                       |

`Groups.advance` starts every `roll` and `score` that may start. `Rollouts.pause` collects partial rollouts from the
samplers, before a checkpoint or a refresh of the buffer. `Groups.resume` sends them back to be continued.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config.schema import LearnerConfig
from slipstream.errors import NonFiniteError, RecordsLost
from slipstream.metrics import STAGE_ENDED, Metrics, over_steps
from slipstream.pipeline.attempts import Memory
from slipstream.pipeline.canary_rounds import Canaries
from slipstream.pipeline.control import canary
from slipstream.pipeline.control.buffer_refresh import Buffer
from slipstream.pipeline.groups import Groups, tokens_of
from slipstream.pipeline.pool import Worker
from slipstream.pipeline.publish import MovingTeacher, Samplers, TeacherSamplers, publish_metrics
from slipstream.pipeline.retries import GivenUp
from slipstream.pipeline.teachers import Teacher
from slipstream.pipeline.trace import Track
from slipstream.protocols import (
    Fingerprint,
    Learner,
    Relabeller,
    SampleFreshness,
    Sampler,
    Sampling,
    Scorer,
    WeightsRef,
    of_teacher,
)
from slipstream.records import (
    NOT_DRAWN,
    ONE,
    Batch,
    Counts,
    Group,
    Handle,
    Prompt,
    derive_seed,
    given_group,
    total,
    unfinished,
)

T = TypeVar("T")
Save = Callable[[], Coroutine[Any, Any, Path]]
"""Save a checkpoint of the state at the moment when this function was made; return its directory."""


# --- rollout ----------------------------------------------------------------------------------------------------------


@dataclass
class Rollouts:
    groups: Groups
    samplers: Samplers
    teacher_samplers: Mapping[str, TeacherSamplers]
    """Samplers with a teacher's weights, by teacher; empty unless teachers generate responses."""
    sampling: Sampling
    canaries: Canaries
    memory: Memory | None
    """Memory of attempts; None if no teacher sees attempts."""
    alike: Callable[[Group], bool]
    """Return whether the rewards of a group are all alike, so that it has no advantage."""
    generating: set[int] = field(default_factory=set)
    """Numbers of the groups for which a sampler is generating now."""

    async def roll(self, number: int) -> None:
        """Generate all responses of a group; if a sampler returns them incomplete, the next call continues them."""
        groups, admission = self.groups, self.groups.admission
        try:
            while unfinished(group := await self._responses(number)):
                groups.responses[number] = group
                if groups.paused:
                    groups.tasks.pop(number, None)
                    return
        except GivenUp as failure:
            groups.drop(number, "rollout failed", str(failure))
        else:
            own = not group[0].header.source
            groups.responses[number] = self.memory.note(group) if self.memory and own else group
            trained = [handle.header.oldest for handle in group if handle.header.trained_tokens]
            oldest = min(trained, default=admission.live[number].version)
            admission.rolled(number, oldest, alike=own and admission.most_refilled > 0 and self.alike(group))
        groups.end_stage(number)

    async def _responses(self, number: int) -> Group:
        """Return responses of the student, of the prompt's teacher, or those that were known before the run."""
        prompt, choice = self.groups.prompt(number), self.groups.choice
        generate = partial(self._generate, prompt)
        match prompt.source:
            case "":
                return await self.samplers.call(number, generate)
            case "teacher":
                pool = of_teacher(self.teacher_samplers, prompt.teacher)
                group = await pool.call(f"group {number} by its teacher", generate)
                for cause in {handle.header.cause for handle in group if handle.header.cause}:
                    pool.say(cause)
                return group
            case _:
                return given_group(prompt, choice.prompts.responses(prompt, choice.row(number)))

    async def _generate(self, prompt: Prompt, worker: Worker[Sampler]) -> Group:
        """Let a sampler begin or continue the group of this prompt.

        If schedule.publish is "restart", a partial rollout with tokens of older weights is discarded first.
        """
        groups, admission, ledger, number = self.groups, self.groups.admission, self.groups.ledger, prompt.number
        begun, newest = groups.responses.get(number, ()), self.samplers.version
        if groups.paused:
            return begun
        if admission.schedule.publish == "restart" and any(handle.header.oldest < newest for handle in begun):
            ledger.thrown += tokens_of(groups.responses.pop(number))
            begun = ()
        self.generating.add(number)
        try:
            rolled = await worker.engine.generate(prompt, self.sampling, begun)
        except RecordsLost:  # the partial rollout is lost, so the group starts again
            ledger.thrown += tokens_of(begun)
            return ()
        finally:
            self.generating.discard(number)
            groups.progress.changed.set()
        runs = {run for handle in rolled for run in handle.header.versions}
        versions = {version for version, count in runs if count and version != NOT_DRAWN}
        if wrong := canary.misdated(versions, admission.live[number].version, self.samplers.version):
            self.canaries.distrust(worker, wrong)
        worker.track.tokens -= tokens_of(begun)
        if unfinished(rolled):
            worker.track.tokens += tokens_of(rolled)
            return rolled
        headers = [handle.header for handle in rolled]
        ledger.ungraded(number, headers, self.samplers.say)
        ledger.failed(number, headers, self.samplers.say)
        group = gradable_members(rolled)
        greedy_tokens = sum(header.greedy_tokens for header in headers)
        ledger.greedy_tokens += greedy_tokens
        worker.track.tokens += greedy_tokens + tokens_of(group)
        worker.track.trace.leaves(worker.track, number)
        worker.track.trace.episodes(headers)
        return [handle.with_header(spans=()) if handle.header.spans else handle for handle in group]

    async def pause(self) -> None:
        """Pause all rollouts until `Groups.resume`; samplers return partial rollouts after the current token."""
        self.groups.paused = True
        async with asyncio.TaskGroup() as tasks:
            for pool in (self.samplers, *self.teacher_samplers.values()):
                for worker in list(pool.workers):
                    tasks.create_task(pool.release_work(worker))
        await self.groups.progress.until("rollouts that are handed over", lambda: not self.generating)


def answered_members(group: Group) -> list[Handle]:
    """Return the members that have an answer, even one without a reward; raise GivenUp if no member has one."""
    answered = [handle for handle in group if handle.header.finish != "error"]
    if not answered:
        raise GivenUp(group[0].header.cause or "the engine could not answer it")
    return answered


def gradable_members(group: Group) -> list[Handle]:
    """Return the members that have an answer and no grading failure; raise GivenUp if there is no such member."""
    answered = answered_members(group)
    gradable = [handle for handle in answered if handle.header.ungraded is None]
    if not gradable:
        failures = {handle.header.ungraded.said for handle in answered if handle.header.ungraded is not None}
        raise GivenUp("; ".join(sorted(failures)))
    return gradable


def rewards_alike(weights: Mapping[str, float], apart: bool, group: Group) -> bool:
    """Return whether all responses have the same sum of weighted rewards; if `apart`, each reward must be the same."""
    given = [[weight * handle.header.rewards[name] for name, weight in weights.items()] for handle in group]
    return len({tuple(each) if apart else sum(each) for each in given}) == 1


# --- scoring ----------------------------------------------------------------------------------------------------------


@dataclass
class Scoring:
    groups: Groups
    teachers: Mapping[str, Teacher]
    memory: Memory
    seed: int
    supervised: bool
    """True if the supervised updates need teacher scores."""

    async def score(self, number: int) -> None:
        """Let a group's teacher score it, sometimes twice to compare the scores."""
        if self._skips:
            self.groups.admission.scored(number)
            self.groups.end_stage(number)
            return
        groups, teacher = self.groups, self._teacher_of(number)
        groups.responses[number] = self._with_attempts(groups.responses[number])

        async def score(worker: Worker[Scorer]) -> list[Handle]:
            with teacher.silence.waiting() if teacher.silence else nullcontext():
                group = await worker.engine.score(groups.responses[number])
            worker.track.tokens += tokens_of(group)
            return group

        async def score_first(worker: Worker[Scorer]) -> list[Handle]:
            group = await score(worker)
            groups.ledger.scored(group, teacher.pool.say)
            return gradable_members(group)

        try:
            group = groups.responses[number] = await teacher.pool.call(number, score_first)
            if is_rechecked(number, teacher.settings.recheck, self.seed):
                again = await teacher.pool.call(number, score)
                if teacher_versions(again) == teacher_versions(group):  # else the teacher's weights changed in between
                    groups.ledger.scored_again(again, teacher.pool.say, promised=teacher.settings.promised)
        except (GivenUp, RecordsLost) as failure:
            self._handle_failure(number, failure)
        else:
            groups.admission.scored(number)
            groups.end_stage(number)

    async def scored(self, group: Group, what: str) -> list[Handle]:
        """Return a group that is not trained on, with the scores of its teacher."""
        teacher, shown = of_teacher(self.teachers, group[0].header.teacher), self._with_attempts(group)

        async def score(worker: Worker[Scorer]) -> list[Handle]:
            return gradable_members(await worker.engine.score(shown))

        return await teacher.pool.call(what, score)

    def is_stale(self, number: int) -> bool:
        """Return whether to score a group again: always, never, or (stale) if teacher weights or attempts changed."""
        if self._skips:
            return False
        group, teacher = self.groups.responses[number], self._teacher_of(number)
        if teacher.settings.relabel != "stale":
            return teacher.settings.relabel == "always"
        if isinstance(teacher.pool, MovingTeacher) and teacher_versions(group) != {teacher.pool.version}:
            return True
        attempts = [handle.header.attempts for handle in self._with_attempts(group)]
        return attempts != [handle.header.attempts for handle in group]

    async def relabel(self, numbers: Sequence[int]) -> float:
        """Replace the scores of these groups by new ones; return the seconds that this took."""
        progress = self.groups.progress
        began = progress.trace.now()
        with progress.waiting("teachers that score again"):
            async with asyncio.TaskGroup() as tasks:
                for number in numbers:
                    tasks.create_task(self._relabel_one(number))
        self.groups.advance()
        return progress.trace.now() - began

    async def _relabel_one(self, number: int) -> None:
        groups, teacher = self.groups, self._teacher_of(number)
        before = groups.responses[number]
        shown = self._with_attempts(before)

        async def relabel(worker: Worker[Relabeller]) -> list[Handle]:
            group = await worker.engine.relabel(shown)
            worker.since[number] = 0
            groups.ledger.scored(group, teacher.pool.say)
            return gradable_members(group)

        try:
            group = await teacher.pool.call(f"group {number} again", relabel)
        except (GivenUp, RecordsLost) as failure:
            if groups.responses.get(number) is before:  # else the group was restarted meanwhile
                self._handle_failure(number, failure)
        else:
            if groups.responses.get(number) is before:
                groups.responses[number] = group

    def _handle_failure(self, number: int, failure: GivenUp | RecordsLost) -> None:
        """Drop a group that its teacher cannot score; restart a group whose records are lost."""
        if isinstance(failure, GivenUp):
            self.groups.drop(number, "scoring failed", str(failure))
            self.groups.advance()
        else:
            self._teacher_of(number).pool.say(f"group {number} begins again: {failure}")
            self.groups.restart(number)

    @property
    def _skips(self) -> bool:
        """Return whether groups get no scores now, because the loss of supervised updates needs none."""
        return self.groups.admission.supervising and not self.supervised

    def _teacher_of(self, number: int) -> Teacher:
        return of_teacher(self.teachers, self.groups.responses[number][0].header.teacher)

    def _with_attempts(self, group: Group) -> Group:
        """Return a group, with the earlier attempts that its teacher's context shows attached to every response."""
        if not (shows := of_teacher(self.teachers, group[0].header.teacher).shows):
            return group
        return [handle.with_header(attempts=self.memory.shown(handle.header, shows)) for handle in group]


def is_rechecked(number: int, share: float, seed: int) -> bool:
    """Return whether a teacher scores this group twice; `share` is the fraction of such groups, from 0 to 1."""
    return derive_seed("recheck", seed, number) < share * 2**63


def teacher_versions(group: Group) -> set[int]:
    return {handle.header.teacher_version for handle in group}


# --- publish ----------------------------------------------------------------------------------------------------------


@dataclass
class Publishing:
    learner: Learner
    track: Track
    samplers: Samplers
    teachers: Collection[Teacher]
    groups: Groups
    after_publish: Callable[[], Awaitable[None]]
    """Called when every sampler has the newest weights, before a group starts under them."""

    async def begin(self) -> None:
        """Give all samplers and all following teachers their first weights."""
        weights, expected = await self.export()
        await self.samplers.publish(weights, expected, version=self.groups.admission.version, mode="drain")
        await asyncio.gather(*await self.move_teachers(first=True))

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        with self.track.busy("export", "other"):
            return await self.learner.export(teacher)

    async def move_teachers(self, *, first: bool = False) -> list[asyncio.Task[None]]:
        """Start to publish weights to teachers that follow the student and are due (`first`: all); return the tasks."""
        version, moving = self.groups.admission.version, list[asyncio.Task[None]]()
        for teacher in self.teachers:
            follow = teacher.settings.follow
            if follow is not None and (first or version % follow.period == 0):
                weights, expected = await self.export(teacher.name)
                while first and weights.version < version - version % follow.period:
                    # after a resume, earlier versions, which scored groups in flight, come first
                    loaded = weights.version
                    await self._load(teacher, weights, expected, loaded)
                    weights, expected = await self.export(teacher.name)
                    if weights.version == loaded:  # the newest, if the period was changed
                        break
                due = weights.version if first else version
                moving.append(self.groups.task_group.create_task(self._move(teacher, weights, expected, due)))
        return moving

    async def _move(self, teacher: Teacher, weights: WeightsRef, expected: Fingerprint, version: int) -> None:
        clock = self.track.trace.now
        began = clock()
        await self._load(teacher, weights, expected, version)
        self.groups.ledger.moved(teacher.name, version, clock() - began)

    async def _load(self, teacher: Teacher, weights: WeightsRef, expected: Fingerprint, version: int) -> None:
        assert isinstance(teacher.pool, MovingTeacher)
        await teacher.pool.publish(weights, expected, version=version, mode="drain")

    async def deliver(self, weights: WeightsRef, expected: Fingerprint, moving: Sequence[asyncio.Task[None]]) -> None:
        """Publish to all samplers, and wait for moving teachers; then return credits and let groups start again."""
        admission, clock = self.groups.admission, self.track.trace.now
        began = clock()
        loaded = await self.samplers.publish(
            weights, expected, version=admission.version, mode=admission.schedule.publish
        )
        self.groups.ledger.published(publish_metrics(loaded, weights) | {"seconds/publish": clock() - began})
        await asyncio.gather(*moving)
        await self.after_publish()
        admission.publish()
        self.groups.resume()


# --- the learner ------------------------------------------------------------------------------------------------------


@dataclass
class Update:
    """An update in progress: its groups in learning order, and the seconds that its parts took."""

    number: int
    groups: list[Group] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    """Loss denominators of each group (numbers of tokens and episodes), after the rejection of tokens."""
    weighed: dict[tuple[int, int], SampleFreshness] = field(default_factory=dict)
    """Freshness of each sample, by group number and index; empty if the config has no freshness weights."""
    ahead: deque[tuple[Batch, Counts]] = field(default_factory=deque)
    """Mini-batches whose gradients are still to be computed, each for its own optimizer step."""
    relabelled: set[int] = field(default_factory=set)
    seconds: Metrics = field(default_factory=lambda: dict.fromkeys(("data", "turn", "learn", "weights"), 0.0))


@dataclass
class Learning:
    """The loop of the learner: it makes updates of scored groups, and starts their publish."""

    groups: Groups
    rollouts: Rollouts
    scoring: Scoring
    publishing: Publishing
    canaries: Canaries
    learner: Learner
    track: Track
    say: Callable[[str], None]
    settings: LearnerConfig
    quoted: int
    """Number of samples per update that are written to samples.jsonl."""
    until: float | None
    """Bound of the student's mass on the teacher's top-k that ends the supervised stage; None: no bound."""
    buffer: Buffer | None
    lr: Callable[[], float]
    """Return the factor on the learning rate of the next update."""
    after_update: Callable[[Metrics], None]
    """Called with the metrics of each update, to check them and to decide about the next one."""
    checkpoint_due: Callable[[], bool]
    capture: Callable[[], Save]
    """Capture the state now, and return the function that saves it later."""
    torn: bool = False
    """True while an update may have made only some of its optimizer steps: its weights belong to no version."""

    async def learn(self) -> None:
        admission, until = self.groups.admission, self.groups.progress.until
        while not admission.finished:
            update = Update(admission.version + 1)
            while not admission.full:
                await self._wait_for_groups(update)
                if admission.finished:
                    return
                learnable = [number for number in admission.learnable() if number not in update.relabelled]
                if stale := [number for number in learnable if self.scoring.is_stale(number)]:
                    update.relabelled.update(stale)
                    seconds = update.seconds.get("relabel", 0.0)
                    update.seconds["relabel"] = seconds + await self.scoring.relabel(stale)
                else:
                    await self._gather(update, admission.learn())
            update.seconds["weights"] += await until("weights in the samplers", lambda: not admission.gated)
            await self._unbroken(self._finish(update))
            moving = await self.publishing.move_teachers()
            self.canaries.after_update(admission.version, self.groups.task_group)
            save = None
            if self.checkpoint_due():
                await self._unbroken(self.rollouts.pause())
                save = self.capture()
            if admission.gated:
                weights, expected = await self.publishing.export()
                self.groups.task_group.create_task(self.publishing.deliver(weights, expected, moving))
            else:
                self.groups.resume()
            if save is not None:  # the learner waits for this; the samplers do not
                with self.track.busy("checkpoint", "other"):
                    try:
                        await self._unbroken(save())
                    except RecordsLost as error:
                        self.say(f"the checkpoint of update {admission.version} is lost: {error}")

    async def _wait_for_groups(self, update: Update) -> None:
        """Wait until the learner may take groups; if a publish blocks all work, the time counts as "weights"."""
        admission, until, seconds = self.groups.admission, self.groups.progress.until, update.seconds
        seconds["weights"] += await until(
            "weights in the samplers", lambda: admission.enough or admission.coming or not admission.gated
        )
        seconds["data"] += await until("scored groups", lambda: admission.enough or admission.finished)
        seconds["turn"] += await until(
            "groups whose turn it is", lambda: bool(admission.learnable()) or admission.finished
        )

    async def _gather(self, update: Update, numbers: list[int]) -> None:
        """Add groups to the update and compute their gradient; for a whole batch, only that of the first mini-batch.

        The total counts of an update are unknown while its groups arrive one by one. Then gradients are plain sums, and
        the optimizer step divides them by the total counts.
        """
        groups = tuple(self.groups.responses[number] for number in numbers)
        batch = Batch(groups, update.number, self.groups.admission.supervised)
        began = self.track.trace.now()
        with self.track.busy(f"update {update.number}"):
            for number in numbers:
                self.track.trace.arrives(self.track, number)
            try:
                counts = await self.learner.prepare(batch)
            except RecordsLost as error:  # it is unknown which group lost its records, so all of them start again
                self.say(f"update {update.number}: {len(numbers)} of its groups begin again: {error}")
                for number in numbers:
                    self.groups.restart(number)
                return
            update.groups += groups
            update.counts += counts
            if self.groups.admission.schedule.learn == "batch":
                update.ahead.extend(optimizer_steps(batch, counts, self.settings.minibatches, self.settings.epochs))
                await self._accumulate(update, *update.ahead.popleft())
            else:
                await self._accumulate(update, batch, ONE)
        update.seconds["learn"] += self.track.trace.now() - began

    async def _finish(self, update: Update) -> None:
        """Complete an update: make all its optimizer steps, then write its metrics, ledger entries and samples."""
        admission, ledger = self.groups.admission, self.groups.ledger
        began, counts = self.track.trace.now(), total(update.counts)
        # before the step: an error here must not leave a step without its records
        quotes = await self.learner.quote(spread_samples(update, self.quoted)) if self.quoted else []
        with self.track.busy(f"update {update.number}"):
            self.torn = True
            try:
                steps = [await self.learner.step(ONE if admission.schedule.learn == "batch" else counts, self.lr())]
            except NonFiniteError:
                self.torn = False
                raise
            while update.ahead:
                await self._accumulate(update, *update.ahead.popleft())
                steps.append(await self.learner.step(ONE, self.lr()))
        update.seconds["learn"] += self.track.trace.now() - began
        batch, metrics = Batch(tuple(update.groups), update.number), over_steps(steps)
        buffer = self.buffer if update.number > admission.supervised else None
        weighed = [update.weighed[header.number, header.index] for header in batch.headers] if buffer else []
        reason = await self._refresh_reason(buffer, batch, weighed, metrics) if buffer else None
        self.torn = False  # no await from here on: an update is recorded completely, or not made
        version = admission.version
        for number in admission.learning:
            del self.groups.responses[number]
        admission.train()
        if buffer is not None:
            if reason and admission.gated:
                self._refresh(buffer, reason)
            metrics |= buffer.metrics
        self.track.tokens += counts.n_tokens
        self.canaries.trained({group[0].header.number for group in update.groups}, update.number)
        for group in update.groups:
            self.groups.choice.note(group)
        self.groups.choice.update(admission.live)
        size = self.rollouts.sampling.group
        ledger.trained(update.groups, update=update.number, version=version, size=size, weighed=weighed)
        ledger.quoted(quotes, update=update.number)
        self._end_supervision(metrics)
        self.after_update(ledger.updated(batch, metrics, update.seconds))

    def _end_supervision(self, metrics: Metrics) -> None:
        """End the supervised stage after this update if it has passed the bound; drop the groups in flight."""
        groups, admission = self.groups, self.groups.admission
        mass = metrics.get("distill/student_mass", 0.0)
        if self.until is None or admission.version >= admission.supervised or not mass >= self.until:
            return
        for number in admission.end_supervision():
            groups.drop(number, STAGE_ENDED)
        groups.choice.prompts.move_rollouts(admission.first, admission.updates - admission.supervised)
        self.say(
            f"the supervised stage ends after update {admission.version}: the student's mass on the teacher's top-k is "
            f"{mass:.3f}"
        )

    async def _accumulate(self, update: Update, batch: Batch, counts: Counts) -> None:
        weighed = await self.learner.accumulate(batch, counts)
        if weighed:  # empty without freshness weights
            update.weighed |= {(h.number, h.index): each for h, each in zip(batch.headers, weighed, strict=True)}

    async def _refresh_reason(
        self, buffer: Buffer, batch: Batch, weighed: Sequence[SampleFreshness], metrics: Metrics
    ) -> str | None:
        """Add freshness metrics to `metrics`; return the reason for a refresh (rollouts are then paused) or None."""
        admission, measured = self.groups.admission, list[SampleFreshness]()
        ready = Batch(tuple(self.groups.responses[number] for number in admission.ready), batch.update)
        if ready.groups and buffer.measures(batch.update):
            # lost records are handled when their groups are learned from
            with self.track.busy("freshness", "other"), suppress(RecordsLost):
                measured = await self.learner.weigh(ready)
        metrics |= buffer.look(weighed)
        level, buffer_metrics = buffer.level(ready.headers, measured, batch.update)
        metrics |= buffer_metrics
        reason = buffer.why(level, batch.update) if admission.publishes_next else None
        if reason:
            await self.rollouts.pause()
        return reason

    def _refresh(self, buffer: Buffer, reason: str) -> None:
        """Restart all groups that began under older weights than those of this update."""
        admission, ledger = self.groups.admission, self.groups.ledger
        before = ledger.thrown
        if stale := admission.refresh(self.groups.responses):
            for number in stale:
                self.groups.discard(number)
            tokens = ledger.thrown - before
            buffer.done(admission.version, groups=len(stale), tokens=tokens, why=reason)

    async def _unbroken(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that a cancellation must not interrupt: an update happens with all its records, or not at all.

        After a cancellation the work continues to its end, except in a stalled run or after a second cancellation.
        """
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            try:
                if not self.groups.progress.stalled:
                    await asyncio.wait([task])
            finally:
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()
            raise


def optimizer_steps(
    batch: Batch, counts: Sequence[Counts], minibatches: int, epochs: int
) -> list[tuple[Batch, Counts]]:
    """Split an update into one mini-batch for each optimizer step; repeat them for every epoch (pass)."""
    of_group = iter(counts)
    return [(part, total(islice(of_group, len(part.groups)))) for part in batch.parts(minibatches)] * epochs


def spread_samples(update: Update, count: int) -> Batch:
    """Return `count` samples spread evenly over an update, each as a group of its own."""
    handles = [handle for group in update.groups for handle in group]
    count = min(count, len(handles))
    return Batch(tuple([handles[i * len(handles) // count]] for i in range(count)), update.number)
