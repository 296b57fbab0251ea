"""Rounds of canaries: test requests to every worker that find replicas whose answers are wrong, and stop them.

All workers are checked before the first rollout (`begin`), then every [health].canary updates. They are also checked at
the next opportunity after a worker joined or a stage recovered from failures. Fixed teachers are checked while the run
continues (`on_update`), and at its end (`finish`). Samplers and teachers that follow the student are checked after a
publish (`after_publish`), before the first rollout under the new weights: then the learner has the same weights. Other
replicas redo the work of a wrong replica since its last passed check (`Worker.since`).
"""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isinf
from typing import Any

import numpy as np

from slipstream.config.base import Rounding
from slipstream.config.running import HealthConfig
from slipstream.errors import RecordsLost, Unhealthy, WorkerDied, first_line
from slipstream.pipeline.control import canary
from slipstream.pipeline.control.actions import CheckTeachers, Controller, Line
from slipstream.pipeline.failures import is_final
from slipstream.pipeline.groups import Groups
from slipstream.pipeline.pool import Pool, Worker, begin_task
from slipstream.pipeline.publish import Samplers, Teacher
from slipstream.protocols import Learner, Metrics, Sampler, Sampling, Scorer
from slipstream.records import Attempts, Batch, Group, Prompt, Rollout, TextScores, derive_seed, unfinished

LAST_CHECK_TIMEOUT = 120.0
"""Limit in seconds on the check after the last update."""
Answers = Sequence[Sequence[TextScores]]
"""Answers of one replica: for each time it was asked, the scores of every text."""


@dataclass
class Watched:
    """A teacher that is checked, its canary texts, and the reference answers to compare with."""

    teacher: Teacher
    texts: list[Rollout]
    exact: bool
    """True for a teacher that computes in float32 on this machine."""
    noise: float
    """Largest noise at the start that is accepted."""
    reference: canary.Reference = field(default_factory=list)
    """Log-probs at the first check. Empty before it, and always for a teacher that follows the student."""
    limit: float = 0.0
    good: int = 0
    """The last update after which a replica of this teacher passed a check."""

    @property
    def is_rounded(self) -> bool:
        """Return whether the teacher runs here in 16 bits. Behind an endpoint single wrong answers would be hidden."""
        return not self.exact and self.teacher.settings.base_url is None

    @property
    def attempts(self) -> Attempts | None:
        return Attempts() if self.teacher.shows else None

    @property
    def state(self) -> dict[str, Any]:
        known = [None if each is None else each.tolist() for each in self.reference]
        return {"texts": self.digest, "reference": known, "limit": self.limit, "good": self.good}

    @property
    def digest(self) -> str:
        """Hash of the texts, which are of other prompts after a change of the data."""
        ids = (ids for text in self.texts for ids in (text.prompt.tokens, text.tokens))
        return hashlib.sha256(b"".join(each.astype(np.int64).tobytes() + b"/" for each in ids)).hexdigest()

    def recall(self, state: Mapping[str, Any]) -> None:
        """Take over the reference of an earlier part of the run, unless it is of other texts."""
        if state.get("texts", self.digest) != self.digest:  # older checkpoints do not say of which
            return
        self.reference = [None if each is None else np.array(each) for each in state["reference"]]
        self.limit, self.good = state["limit"], state["good"]


def fault_of(watched: Watched, worker: Worker[Scorer], far: canary.Difference) -> str:
    """Return what is wrong with a replica whose answers are too far from the reference."""
    name = watched.teacher.name
    if isinf(far.apart):
        return f"teacher {name} gives unusable scores of fixed texts by {worker.name}, at two requests: {far.said}"
    return (
        f"teacher {name} has changed: log-probs of fixed texts by {worker.name} are {far.apart:.2g} away from those at "
        f"the start (root mean square, limit {watched.limit:.2g}): {far.said}"
    )


async def scored_texts(scorer: Scorer, texts: Sequence[Rollout], attempts: Attempts | None, times: int) -> Answers:
    """Return `times` answers, each from one request for each text; the first of several is from one request for all.

    The rows that a text shares a pass with differ, so the answers show the rounding that depends on them.
    """
    answers: list[Sequence[TextScores]] = [await scorer.probe(texts, attempts)] if times > 1 else []
    while len(answers) < times:
        alone = await asyncio.gather(*(scorer.probe([text], attempts) for text in texts))
        answers.append([said for each in alone for said in each])
    return answers


class Canaries(Controller):
    def __init__(
        self,
        health: HealthConfig,
        learner: Learner,
        groups: Groups,
        samplers: Samplers,
        pools: Sequence[Pool[Any]],
        teachers: Collection[Watched],
        *,
        updates: int,
        questions: Sequence[Prompt],
        sampling: Sampling,
        rounding: Rounding,
        last: Mapping[str, float],
        say: Callable[[str], None],
    ) -> None:
        """Prepare the checks: samplers answer the prompts `questions`, and `teachers` score their canary texts.

        `rounding` is the coarsest number format of samplers and learner. `last` is the last metrics line before a
        resume.
        """
        self.every, self.updates, self.stops = health.canary, updates, health.stop
        self.learner, self.groups, self.samplers, self.pools, self.say = learner, groups, samplers, pools, say
        self.fixed = [watched for watched in teachers if not watched.teacher.follows]
        self.following = [watched for watched in teachers if watched.teacher.follows]
        self.questions, self.sampling, self.rounding = questions, canary.drawn_by(sampling), rounding
        self.counts = {name: round(last.get(f"canary/{name}", 0)) for name in ("retired", "redone", "trained")}
        self.distances = dict[str, float]()
        """Largest difference from the expected answers since the previous update, for "sampler" and for "teacher"."""
        self.start: Metrics | None = None
        """Comparison of the learner and the sampler furthest from it at the first check; None before it."""
        self.last_scored = self.last_sampled = 0
        """Update at the last check of fixed teachers, and at the last check of samplers and other teachers."""
        self.task: asyncio.Task[None] | None = None
        self.reported = set[str]()
        """Workers already reported as wrong. With health.stop = false, the last replica continues although wrong."""

    @property
    def state(self) -> dict[str, Any]:
        return {watched.teacher.name: watched.state for watched in self.fixed}

    @property
    def metrics(self) -> Metrics:
        values = self.counts | self.distances if self.every else {}
        return {f"canary/{name}": float(value) for name, value in values.items()}

    async def begin(self, update: int) -> None:
        if self.every:
            self.last_scored = self.last_sampled = update
            await self._ask_all(update, canary.FIRST_REQUESTS)
            await self._draw_all(update)

    def on_update(self, line: Line) -> list[CheckTeachers]:
        self.distances, update = {}, round(line["version"])
        idle, pools = self.task is None or self.task.done(), [watched.teacher.pool for watched in self.fixed]
        if not (pools and idle and self._due(update, self.last_scored, *pools)):
            return []
        self.last_scored = update
        return [CheckTeachers(update)]

    def check_teachers(self, update: int) -> None:
        """Check all fixed teachers while the run continues."""
        self.task = begin_task(self.groups.task_group, self._ask_all(update, 1))

    async def finish(self, update: int) -> None:
        """Wait for the check of fixed teachers after the last update, and repeat it once where it had no answer."""
        if not self.every:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_CHECK_TIMEOUT):
                if self.task is not None:
                    await self.task
                if self._unproven(update):
                    await self._ask_all(update, 1)
        for worker in self._unproven(update):
            self.say(
                f"{worker.name} was not checked after the last update: its answers after update {worker.good} may be "
                "those of a changed teacher"
            )

    def _unproven(self, update: int) -> list[Worker[Any]]:
        """Return the replicas of fixed teachers that no check after `update` updates has reached."""
        workers = [worker for watched in self.fixed for worker in watched.teacher.pool.workers]
        return [worker for worker in workers if worker.good < update and worker.name not in self.reported]

    async def after_publish(self, version: int) -> None:
        if self._due(version, self.last_sampled, self.samplers, *(watched.teacher.pool for watched in self.following)):
            self.last_sampled = version
            await self._draw_all(version)

    def _due(self, update: int, last: int, *pools: Pool[Any]) -> bool:
        new = any(worker.unproven for pool in pools for worker in pool.workers) or any(p.tries.recovered for p in pools)
        for pool in pools:
            pool.tries.recovered = False
        return bool(self.every) and (new or update - last >= self.every or last < update == self.updates)

    def record_trained(self, numbers: Collection[int], update: int) -> None:
        """Record in `Worker.since` that the groups `numbers` were learned from in this update."""
        for pool in self.pools:
            for worker in pool.workers:
                learned = dict.fromkeys(worker.since.keys() & numbers, update)
                worker.since = worker.since | learned if self.every else {}

    async def _ask_all(self, update: int, times: int) -> None:
        await asyncio.gather(*(self._ask(watched, update, times) for watched in self.fixed))

    async def _ask(self, watched: Watched, update: int, times: int) -> None:
        """Check all replicas of a fixed teacher; the answers to its first check become the reference."""
        teacher, texts = watched.teacher, watched.texts
        groups_before = {worker: list(worker.since) for worker in teacher.pool.workers}

        async def ask(worker: Worker[Scorer]) -> Any:  # so that a check that is cancelled at once has made no coroutine
            return await self._answers(
                teacher.pool, worker, [scored_texts(worker.engine, texts, watched.attempts, times)]
            )

        found = await asyncio.gather(*map(ask, groups_before))
        answers = {worker: said[0] for worker, said in zip(groups_before, found, strict=True) if said}
        inconsistent = self._set_reference(watched, answers) if answers and not watched.reference else {}
        for worker, each in answers.items():
            far = canary.farthest(texts, watched.reference, each)
            unusable = isinf(far.apart)  # a single such answer says nothing about the teacher's weights
            if unusable or (watched.is_rounded and watched.limit < far.apart <= canary.ASKED_AGAIN * watched.limit):
                requests = 1 if unusable else canary.FIRST_REQUESTS
                more = await self._answers(
                    teacher.pool, worker, [scored_texts(worker.engine, texts, watched.attempts, requests)]
                )
                if more is None:
                    continue
                said = more[0] if unusable else [canary.usual_of([*each, *more[0]])]
                far = canary.farthest(texts, watched.reference, said)
            self._note("teacher", far.apart)
            if far.apart <= watched.limit and worker not in inconsistent:
                watched.good = update
                self._good(worker, groups_before[worker], update)
                continue
            wrong = inconsistent.get(worker) or fault_of(watched, worker, far)
            worker.good = max(worker.good, watched.good if times > 1 else 0)
            self._bad(teacher.pool, worker, wrong, harmful=worker.good < update, roll=False)

    def _set_reference(self, watched: Watched, answers: Mapping[Worker[Scorer], Answers]) -> dict[Worker[Scorer], str]:
        """Set reference and limit from the first answers of the replicas; return messages about inconsistent ones."""
        name, texts = watched.teacher.name, watched.texts
        noise = {worker: canary.noise_of(texts, each) for worker, each in answers.items()}
        wrong = {worker: each for worker, each in noise.items() if each.apart > watched.noise}
        steady = [worker for worker in answers if worker not in wrong]
        watched.reference = canary.reference_of([said for worker in steady or answers for said in answers[worker]])
        largest = max((noise[worker].apart for worker in steady), default=0.0)
        watched.limit = canary.limit_of(largest, exact=watched.exact)
        if all(each is None for each in watched.reference):
            self.say(f"teacher {name} cannot score fixed texts: its changes will not be noticed")
        setting = f"; teachers.{name}.noise accepts more" if watched.teacher.settings.base_url is not None else ""
        return {
            worker: f"teacher {name} is inconsistent: log-probs of equal texts by {worker.name} are {each.apart:.2g} "
            f"away from their median (root mean square, limit {watched.noise:g}{setting}): {each.said}"
            for worker, each in wrong.items()
        }

    async def _answers(self, pool: Pool[Any], worker: Worker[Any], calls: Sequence[Coroutine[Any, Any, Any]]) -> Any:
        """Return a worker's answers to all requests; on failure return None, and check this worker again later."""
        try:
            return await asyncio.gather(*calls)
        except WorkerDied as error:
            pool.handle_death(worker, error)
        except RecordsLost:
            pass  # a later check repeats the requests
        except Exception as error:
            if is_final(error):
                raise
            self.say(f"{worker.name} did not answer its canary request, which will be repeated: {first_line(error)}")
        worker.unproven = True
        return None

    async def _draw_all(self, version: int) -> None:
        drawn = await asyncio.gather(*(self._draw(worker, version) for worker in list(self.samplers.workers)))
        if self.start is None and (known := [numbers for numbers, _ in filter(None, drawn)]):
            self.start = canary.worst(known)
        found = [handles for _, handles in filter(None, drawn)]
        if not (handles := next(iter(found), None)):
            return
        for watched in self.following:
            shown = [handle.with_header(attempts=watched.attempts) for handle in handles]
            await asyncio.gather(
                *(self._follow(watched, worker, shown, version) for worker in [*watched.teacher.pool.workers])
            )

    async def _draw(self, worker: Worker[Sampler], version: int) -> tuple[Metrics, Group] | None:
        """Check a sampler; if it agrees with the learner, return how well it does, and its canary answers.

        In 16 bits a single token can decide the KL of a few answers. So there the first check judges the median of
        several answers, and so do later checks whose first answer differs too much.
        """
        groups_before, found, wrong = list(worker.since), list[tuple[Metrics, Group]](), ""
        for number in range(canary.ROUNDS[self.rounding]):
            if (compared := await self._drawn(worker, version, number)) is None:
                return None
            found.append(compared)
            versions = {version for _, handles in found for handle in handles for version, _ in handle.header.versions}
            usual = canary.median([numbers for numbers, _ in found])
            wrong = canary.sampler_fault(usual, versions, version=version, rounding=self.rounding, start=self.start)
            if self.start is not None and not wrong:
                break
        if wrong:
            self.distrust(worker, wrong)
            return None
        self._good(worker, groups_before, version)
        return canary.worst([numbers for numbers, _ in found]), found[0][1]

    async def _drawn(self, worker: Worker[Sampler], version: int, number: int) -> tuple[Metrics, Group] | None:
        """Return a sampler's answers to all questions, compared with the learner; None if there is nothing to check."""
        asked = [replace(each, seed=derive_seed(each.seed, number)) if number else each for each in self.questions]
        calls = [worker.engine.generate(prompt, self.sampling) for prompt in asked]
        answers = await self._answers(self.samplers, worker, calls) or ()
        handles = [handle for group in answers if not unfinished(group) for handle in group]
        handles = [handle for handle in handles if handle.header.finish != "error" and handle.header.trained_tokens]
        if not handles:  # handed over, or every episode failed
            return None
        numbers = await self._compare(worker, handles, version)
        if numbers is None:
            return None
        numbers = canary.without_own_rounding(numbers)
        self._note("sampler", numbers["drift/k3_kl"])
        return numbers, handles

    async def _follow(self, watched: Watched, worker: Worker[Scorer], handles: Group, version: int) -> None:
        """Check a teacher that follows the student: compare its scores with the learner's, for equal weights."""
        groups_before, teacher = list(worker.since), watched.teacher
        for scored in await self._answers(teacher.pool, worker, [worker.engine.score(handles)]) or ():
            numbers = await self._compare(worker, scored, version, teacher.name)
            if numbers is None:
                continue
            apart = canary.worst_gap(numbers, scored)
            self._note("teacher", apart)
            if apart <= canary.FOLLOWING_LIMIT[watched.exact]:
                self._good(worker, groups_before, version)
                continue
            wrong = f"teacher {teacher.name} lacks the exported weights: a log-prob by {worker.name} is {apart:.2g} off"
            self._bad(teacher.pool, worker, wrong, harmful=False, roll=False)

    async def _compare(self, worker: Worker[Any], group: Group, version: int, teacher: str = "") -> Metrics | None:
        """Compare with the learner; return None if the group's records are lost, and check this worker again later."""
        try:
            return await self.learner.compare(Batch((group,), version + 1), teacher)
        except RecordsLost:
            worker.unproven = True
            return None

    def distrust(self, worker: Worker[Sampler], wrong: str) -> None:
        self._bad(self.samplers, worker, f"{worker.name} cannot be trusted: {wrong}", harmful=False, roll=True)

    def _note(self, kind: str, apart: float) -> None:
        self.distances[kind] = max(min(apart, canary.MAX_DISTANCE), self.distances.get(kind, 0.0))

    def _good(self, worker: Worker[Any], numbers: Sequence[int], update: int) -> None:
        worker.good, worker.unproven = update, False
        for number in numbers:
            worker.since.pop(number, None)

    def _bad(self, pool: Pool[Any], worker: Worker[Any], wrong: str, *, harmful: bool, roll: bool) -> None:
        """Retire a wrong replica and redo its work since its last passed check.

        The last replica is not retired. Then health.stop raises Unhealthy, and without it the replica continues.
        """
        if worker not in pool.workers:  # already stopped for another answer, or gone
            return
        updates = sorted(update for update in worker.since.values() if update)
        wrong += f" (found good after update {worker.good})"
        if updates:
            wrong += f"; {len(updates)} groups of its answers are in updates {updates[0]} to {updates[-1]}"
        others = len(pool.workers) + len(pool.coming) > 1
        if not others and self.stops:
            wrong += "; no other replica is left (health.stop = false goes on regardless)"
            raise Unhealthy(wrong, harmful=harmful or bool(updates))
        if others or worker.name not in self.reported:
            self.counts["trained"] += len(updates)
            self.say(f"health: {wrong}" + ("; it gets no more work" if others else ""))
        self.reported.add(worker.name)
        answered, worker.since, worker.unproven = worker.since, {}, False
        if others:
            pool.retire(worker)
            self.counts["retired"] += 1
            self.counts["redone"] += sum(self.groups.redo(number, worker.name, roll=roll) for number in answered)
