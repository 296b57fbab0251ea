"""The coroutines that roll out and score groups. `admission` decides what may happen; `learning` and `publish` follow.

| coroutine | consumes         | produces        | waits for                       | is unblocked by         |
|-----------|------------------|-----------------|---------------------------------|-------------------------|
| roll      | one prompt       | a rolled group  | a sampler                       | –                       |
| score     | one rolled group | a scored group  | a scorer                        | –                       |
| learn     | scored groups    | updates         | a batch, its turn, the publish  | score, drop, deliver    |
| deliver   | one update       | new weights     | samplers                        | –                       |

`Groups.advance` starts every `roll` and `score` that may start. `Rollouts.pause` collects partial rollouts from the
samplers, before a checkpoint or a refresh of the buffer. `Groups.resume` sends them back to be continued.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from slipstream.errors import RecordsLost
from slipstream.pipeline.attempts import Memory
from slipstream.pipeline.canary_rounds import Canaries
from slipstream.pipeline.control import canary
from slipstream.pipeline.failures import GivenUp
from slipstream.pipeline.groups import Groups, tokens_of
from slipstream.pipeline.pool import Worker
from slipstream.pipeline.publish import MovingTeacher, Samplers, Teacher, TeacherSamplers
from slipstream.protocols import Relabeller, Sampler, Sampling, Scorer, of_teacher
from slipstream.records import NOT_DRAWN, Group, Handle, Prompt, derive_seed, given_group, unfinished

# --- rollout ----------------------------------------------------------------------------------------------------------


@dataclass
class Rollouts:
    groups: Groups
    samplers: Samplers
    teacher_samplers: Mapping[str, TeacherSamplers]
    """Samplers with a teacher's weights, by teacher; empty unless teachers generate responses."""
    sampling: Sampling
    options: Callable[[Prompt], Sampling]
    """Return the sampling options of a group."""
    canaries: Canaries
    memory: Memory | None
    """Memory of attempts; None if no teacher sees attempts."""
    zero_advantage: Callable[[Group], bool]
    """Return whether the rewards of a group are all alike, so that it has no advantage."""
    generating: set[int] = field(default_factory=set)
    """Numbers of the groups for which a sampler is generating now."""

    async def roll(self, number: int) -> None:
        """Generate all responses of a group; if a sampler returns them incomplete, the next call continues them."""
        groups, admission = self.groups, self.groups.admission
        try:
            while unfinished(group := await self._responses(number)):
                if group:
                    groups.responses[number] = group
                else:
                    groups.responses.pop(number, None)
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
            zero = own and admission.refilling.most > 0 and self.zero_advantage(group)
            admission.finish_rollout(number, oldest, zero_advantage=zero)
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

        A partial rollout is discarded first in two cases: schedule.publish is "restart", and it has tokens of older
        weights; or the student began it, and the teacher must draw it now, or the reverse. `resume --updates` may move
        a group of [mix] in this way.
        """
        groups, admission, ledger, number = self.groups, self.groups.admission, self.groups.ledger, prompt.number
        begun, newest = groups.responses.get(number, ()), self.samplers.version
        if groups.paused:
            return begun
        older = admission.schedule.publish == "restart" and any(handle.header.oldest < newest for handle in begun)
        if older or any(handle.header.source != prompt.source for handle in begun):
            ledger.counts["thrown_tokens"] += tokens_of(groups.responses.pop(number))
            begun = ()
        self.generating.add(number)
        try:
            rolled = await worker.engine.generate(prompt, self.options(prompt), begun)
        except RecordsLost:  # the partial rollout is lost, so the group starts again
            ledger.counts["thrown_tokens"] += tokens_of(begun)
            return ()
        finally:
            self.generating.discard(number)
            groups.progress.changed.set()
        runs = {run for handle in rolled for run in handle.header.versions}
        versions = {version for version, count in runs if count and version != NOT_DRAWN}
        if wrong := canary.version_fault(versions, admission.live[number].version, self.samplers.version):
            worker.since.pop(number, None)  # this call itself begins the group again, if the sampler is retired
            self.canaries.distrust(worker, wrong)
            if worker in self.samplers.retired:
                ledger.counts["thrown_tokens"] += tokens_of(rolled)
                groups.responses.pop(number, None)
                return ()
        if worker in self.samplers.retired:  # while it answered; another sampler continues from `begun`
            ledger.counts["thrown_tokens"] += tokens_of(rolled) - tokens_of(begun)
            return ()
        worker.track.tokens -= tokens_of(begun)
        if unfinished(rolled):
            worker.track.tokens += tokens_of(rolled)
            return rolled
        headers = [handle.header for handle in rolled]
        greedy_tokens = sum(header.greedy_tokens for header in headers)
        worker.track.tokens += greedy_tokens + tokens_of(rolled)
        ledger.counts["greedy_tokens"] += greedy_tokens
        ledger.count_ungraded(number, headers, self.samplers.say)
        ledger.count_failed(number, headers, self.samplers.say)
        group = gradable_members(rolled)
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
        raise GivenUp(group[0].header.missing_reason)
    return answered


def gradable_members(group: Group) -> list[Handle]:
    """Return the members that have an answer and no grading failure; raise GivenUp if there is no such member."""
    answered = answered_members(group)
    gradable = [handle for handle in answered if handle.header.ungraded is None]
    if not gradable:
        failures = {handle.header.ungraded.text for handle in answered if handle.header.ungraded is not None}
        raise GivenUp("; ".join(sorted(failures)))
    return gradable


def has_zero_advantage(weights: Mapping[str, float], each: bool, group: Group) -> bool:
    """Return whether all responses have the same sum of weighted rewards; if `each`, every reward must be the same."""
    rows = [[weight * handle.header.rewards[name] for name, weight in weights.items()] for handle in group]
    return len({tuple(row) if each else sum(row) for row in rows}) == 1


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
            self.groups.admission.finish_scoring(number)
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
            groups.ledger.count_unscored(group, teacher.pool.say)
            return gradable_members(group)

        try:
            group = groups.responses[number] = await teacher.pool.call(number, score_first)
            if is_rechecked(number, teacher.settings.recheck, self.seed):
                again = await teacher.pool.call(number, score)
                if teacher_versions(again) == teacher_versions(group):  # else the teacher's weights changed in between
                    groups.ledger.count_recheck(again, teacher.pool.say, promised=teacher.settings.promised)
        except (GivenUp, RecordsLost) as failure:
            self._handle_failure(number, failure)
        else:
            groups.admission.finish_scoring(number)
            groups.end_stage(number)

    async def score_other(self, group: Group, what: str) -> list[Handle]:
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
            groups.ledger.count_unscored(group, teacher.pool.say)
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
        return [handle.with_header(attempts=self.memory.attempts_for(handle.header, shows)) for handle in group]


def is_rechecked(number: int, share: float, seed: int) -> bool:
    """Return whether a teacher scores this group twice; `share` is the fraction of such groups, from 0 to 1."""
    return derive_seed("recheck", seed, number) < share * 2**63


def teacher_versions(group: Group) -> set[int]:
    return {handle.header.teacher_version for handle in group}
