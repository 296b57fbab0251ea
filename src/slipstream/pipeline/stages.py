"""The coroutines that move groups, and the learner's loop. `admission` decides what may happen; this module does it.

| coroutine | consumes         | produces        | waits for                       | is unblocked by         |
|-----------|------------------|-----------------|---------------------------------|-------------------------|
| roll      | one prompt       | a rolled group  | a sampler                       | –                       |
| mark      | one rolled group | a scored group  | a scorer                        | –                       |
| learn     | scored groups    | updates         | a batch, its turn, the publish  | mark, drop, deliver     |
| deliver   | one update       | new weights     | samplers                        | –                       |

`Flow.advance` starts every roll and mark that may start, and is called after each change. Before a checkpoint,
`hand_over` collects partial rollouts from the samplers. `go_on` sends them back to be continued under the new weights.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from slipstream.errors import NonFiniteError, RecordsLost, Stalled, WorkerDied
from slipstream.metrics import Metrics, over_steps
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.attempts import Memory
from slipstream.pipeline.canary_rounds import Canaries
from slipstream.pipeline.control import canary
from slipstream.pipeline.control.buffer_refresh import Buffer
from slipstream.pipeline.control.health import Health
from slipstream.pipeline.ledger import Ledger
from slipstream.pipeline.pool import Pool, Worker
from slipstream.pipeline.publish import MovingTeacher, Samplers, publish_metrics
from slipstream.pipeline.retries import GivenUp
from slipstream.pipeline.trace import Trace, Track
from slipstream.pipeline.watchdog import ResponseWatch
from slipstream.protocols import (
    Fingerprint,
    Learner,
    Loaded,
    Relabeller,
    Sampler,
    Sampling,
    Scorer,
    Weighed,
    WeightsRef,
    of_teacher,
)
from slipstream.records import ONE, Batch, Counts, Group, Handle, Prompt, derive_seed, total, unfinished

T = TypeVar("T")


@dataclass(frozen=True)
class Steps:
    """The split of an update into mini-batches, with one optimizer step each, and the number of passes over them."""

    minibatches: int = 1
    epochs: int = 1

    def of(self, batch: Batch, counts: Sequence[Counts]) -> list[tuple[Batch, Counts]]:
        parts = batch.parts(self.minibatches)
        of_group = iter(counts)
        return [(part, total(islice(of_group, len(part.groups)))) for part in parts] * self.epochs


Save = Callable[[], Coroutine[Any, Any, Path]]
"""Save a checkpoint of the state at the moment when this function was made; return its directory."""


@dataclass(frozen=True)
class Recheck:
    """The choice of groups that a teacher scores twice, to compare the two answers."""

    share: float
    """Fraction of groups that are scored twice, from 0 to 1."""
    promised: float
    """Largest difference of the log-probs, as root mean square, that rounding explains."""
    seed: int

    def chooses(self, number: int) -> bool:
        return derive_seed("recheck", self.seed, number) < self.share * 2**63


@dataclass
class Flow:
    """The state that the coroutines share."""

    samplers: Samplers
    scorers: Mapping[str, Pool[Any]]
    canaries: Canaries
    follow: Mapping[str, int]
    """Interval in updates at which each teacher that follows the student gets new weights, by teacher name."""
    shows: Mapping[str, Sequence[str]]
    """Fields of `Attempts` in the context of each teacher, by teacher name."""
    relabel: Mapping[str, str]
    """When each teacher scores a group again before the learner uses it (never, stale, always), by teacher name."""
    memory: Memory
    learner: Learner
    learning: Track
    admission: Admission
    prompt: Callable[[int], Prompt]
    sampling: Sampling
    account: Ledger
    trace: Trace
    tasks: asyncio.TaskGroup
    passes: Steps
    quoted: int
    """Number of samples per update that are written to samples.jsonl."""
    look: Callable[[Metrics], None]
    """Called with the metrics of each update, so that guards, autopilot and autoscaler can decide."""
    due: Callable[[], bool]
    """Return whether a checkpoint is due at the end of this update."""
    checkpoint: Callable[[], Save]
    """Capture the state now, and return the function that saves it later."""
    health: Health
    buffer: Buffer | None
    recheck: Mapping[str, Recheck]
    silence: Mapping[str, ResponseWatch]
    """Warns if an endpoint does not answer; one entry for each teacher with an endpoint, by teacher name."""
    after_publish: Callable[[], Awaitable[None]]
    """Called when every sampler has the newest weights, before a group starts under them."""
    held: dict[int, Group] = field(default_factory=dict)
    """Current responses of each group, by group number, with partial rollouts; groups without tokens are absent."""
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Task of each group that is being rolled out or scored, by group number."""
    drawing: set[int] = field(default_factory=set)
    """Numbers of the groups for which a sampler is generating now."""
    still: bool = True
    """True while rollouts are paused; `go_on` continues them."""
    ending: bool = False
    """True if the run is stopping: paused rollouts do not continue."""
    lr: float = 1.0
    """Factor on the learning rate of the next update."""
    moved: float = 0.0
    """Time of the last change, in seconds of the trace's clock."""
    torn: bool = False
    """True while an update may have made only some of its optimizer steps: its weights belong to no version."""
    stalled: bool = False
    """True if the run is being stopped because nothing has changed for too long."""
    waits: dict[str, float] = field(default_factory=dict)
    """Time at which each current wait of the learner began, by the name of the wait."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pools(self) -> list[Pool[Any]]:
        return [self.samplers, *self.scorers.values()]

    def start(self, number: int, work: Callable[[Flow, int], Coroutine[Any, Any, None]]) -> None:
        self.running[number] = self.tasks.create_task(work(self, number))

    def begin(self, numbers: Iterable[int]) -> None:
        """Start the rollouts of these groups; while rollouts are paused, `go_on` starts them later."""
        for number in () if self.still else numbers:
            self.start(number, roll)

    def advance(self) -> None:
        """Start all rollouts and scoring that may start after a change, and let `until` check its conditions again."""
        for number in self.admission.outdated():
            self.renew(number)
        self.begin(self.admission.submit())
        for number in self.admission.take():
            self.start(number, mark)
        self.moved = self.trace.now()
        self.changed.set()

    async def until(self, name: str, ready: Callable[[], bool]) -> float:
        """Wait until `ready` returns true, and return the seconds waited; reports show the wait under this name."""
        began = self.waits[name] = self.trace.now()
        try:
            while not ready():
                self.changed.clear()
                await self.changed.wait()
        finally:
            del self.waits[name]
        return self.trace.now() - began

    def drop(self, number: int, reason: str, cause: str = "") -> None:
        self.admission.drop(number, reason)
        self.forget(number)
        self.account.dropped(self.prompt(number), reason, cause)

    def forget(self, number: int) -> None:
        """Discard the responses of a group, and cancel its rollout or scoring."""
        self.account.thrown += tokens_of(self.held.pop(number, ()))
        task = self.running.pop(number, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def renew(self, number: int) -> None:
        """Drop or restart a group that is older than max_lag, depending on `schedule.on_old`."""
        if self.admission.schedule.on_old == "drop":
            self.drop(number, "older than max_lag")
        else:
            self.restart(number)

    def redo(self, number: int, worker: str, *, roll: bool) -> bool:
        """Repeat a group's rollout (if `roll`) or scoring by this worker; return False if it is too late for that."""
        if roll and number in self.admission.live and number not in self.admission.learning:
            self.restart(number)
        elif not roll and self.admission.rescore(number):
            if (task := self.running.pop(number, None)) is not None:
                task.cancel()
        else:
            return False
        self.account.redone[number] = worker
        self.advance()
        return True

    def restart(self, number: int) -> None:
        self.forget(number)
        self.admission.restart(number)
        self.begin([number])

    def report(self) -> str:
        now, a = self.trace.now(), self.admission
        places = ("rolling", "waiting", "scoring", "ready", "learning", "trained")
        counts = ", ".join(f"{len(getattr(a, place))} {place}" for place in places)
        return "\n".join([
            f"after {now:.1f} s, {now - self.moved:.1f} s after the last change, at version {a.version}",
            f"groups: {counts}; {a.in_use} of {a.credits} credits in use" + (", publish pending" if a.gated else ""),
            *(f"learner waits for {name}, for {now - since:.1f} s" for name, since in self.waits.items()),
            *(line for pool in self.pools for line in pool.report()),
            *self.trace.report(),
        ])  # fmt: skip


# --- rollout and scoring of a group -----------------------------------------------------------------------------------


async def roll(flow: Flow, number: int) -> None:
    """Generate all responses of a group; if a sampler returns them incomplete, the next call continues them.

    If schedule.publish is "restart", a partial rollout with tokens of older weights is discarded first.
    """
    prompt = flow.prompt(number)

    async def generate(worker: Worker[Sampler]) -> Group:
        begun = flow.held.get(number, ())
        if flow.still:
            return begun
        if flow.admission.schedule.publish == "restart" and any(h.header.oldest < flow.samplers.version for h in begun):
            flow.account.thrown += tokens_of(flow.held.pop(number))
            begun = ()
        flow.drawing.add(number)
        try:
            rolled = await worker.engine.generate(prompt, flow.sampling, begun)
        except RecordsLost:  # the partial rollout is lost, so the group starts again
            flow.account.thrown += tokens_of(begun)
            return ()
        finally:
            flow.drawing.discard(number)
            flow.changed.set()
        if wrong := canary.misdated(versions_of(rolled), flow.admission.live[number].version, flow.samplers.version):
            flow.canaries.distrust(worker, wrong)
        worker.track.tokens -= tokens_of(begun)
        if unfinished(rolled):
            worker.track.tokens += tokens_of(rolled)
            return rolled
        flow.account.ungraded(number, [handle.header for handle in rolled], flow.samplers.say)
        flow.account.failed(number, [handle.header for handle in rolled], flow.samplers.say)
        group = gradable_members(rolled)
        beside = sum(handle.header.greedy_tokens for handle in rolled)
        flow.account.greedy_tokens += beside
        worker.track.tokens += beside + tokens_of(group)
        flow.trace.leaves(worker.track, number)
        flow.trace.episodes(handle.header for handle in rolled)
        return [Handle(replace(handle.header, spans=()), handle.body) for handle in group]

    try:
        while unfinished(group := await flow.samplers.call(number, generate)):
            flow.held[number] = group
            if flow.still:
                flow.running.pop(number, None)
                return
    except GivenUp as failure:
        flow.drop(number, "rollout failed", str(failure))
    else:
        flow.held[number] = flow.memory.note(group) if any(flow.shows.values()) else group
        trained = [handle.header.oldest for handle in group if handle.header.trained_tokens]
        flow.admission.rolled(number, min(trained, default=flow.admission.live[number].version))
    flow.running.pop(number, None)
    flow.advance()


def versions_of(group: Group) -> set[int]:
    return {version for handle in group for version, count in handle.header.versions if count}


def tokens_of(group: Group) -> int:
    return sum(handle.header.tokens for handle in group)


async def hand_over(flow: Flow) -> None:
    """Pause all rollouts until `go_on`; samplers stop after the current token and return partial rollouts."""
    flow.still = True

    async def release(worker: Worker[Sampler]) -> None:
        try:
            await worker.engine.release()
        except WorkerDied as error:
            flow.samplers.handle_death(worker, error)

    async with asyncio.TaskGroup() as tasks:
        for worker in list(flow.samplers.workers):
            tasks.create_task(release(worker))
    await flow.until("rollouts that are handed over", lambda: not flow.drawing)


def go_on(flow: Flow) -> None:
    """Continue the rollouts after `hand_over`, in the order of submission."""
    if not flow.still or flow.ending:
        return
    flow.still = False
    rolling = [number for number in flow.admission.live if number in flow.admission.rolling]
    flow.begin(number for number in rolling if number not in flow.running)


def answered_members(group: Group) -> list[Handle]:
    """Return the members that have an answer, even one without a reward; raise GivenUp if no member has one."""
    found = [handle for handle in group if handle.header.finish != "error"]
    if not found:
        raise GivenUp(group[0].header.cause or "the engine could not answer it")
    return found


def gradable_members(group: Group) -> list[Handle]:
    """Return the members that have an answer and no grading failure; raise GivenUp if there is no such member."""
    there = answered_members(group)
    found = [handle for handle in there if handle.header.ungraded is None]
    if not found:
        raise GivenUp("; ".join(sorted({h.header.ungraded.said for h in there if h.header.ungraded is not None})))
    return found


async def mark(flow: Flow, number: int) -> None:
    """Let a group's teacher score it, sometimes twice to compare the scores; drop the group if scoring fails."""
    teacher = flow.held[number][0].header.teacher
    scorers = of_teacher(flow.scorers, teacher)
    if shows := shown_to(flow, teacher):
        flow.held[number] = with_attempts(flow, flow.held[number], shows)

    async def score(worker: Worker[Scorer]) -> list[Handle]:
        with flow.silence[teacher].waiting() if teacher in flow.silence else nullcontext():
            group = await worker.engine.score(flow.held[number])
        worker.track.tokens += tokens_of(group)
        return group

    async def first(worker: Worker[Scorer]) -> list[Handle]:
        group = await score(worker)
        flow.account.scored(group, scorers.say)
        return gradable_members(group)

    try:
        flow.held[number] = await scorers.call(number, first)
        if flow.recheck and (recheck := of_teacher(flow.recheck, teacher)).chooses(number):
            again = await scorers.call(number, score)
            if teacher_of(again) == teacher_of(flow.held[number]):  # else the teacher's weights changed in between
                flow.account.scored_again(again, scorers.say, promised=recheck.promised)
    except GivenUp as failure:
        flow.drop(number, "scoring failed", str(failure))
    except RecordsLost as error:
        scorers.say(f"group {number} begins again: {error}")
        flow.restart(number)
        return
    else:
        flow.admission.scored(number)
    flow.running.pop(number, None)
    flow.advance()


def shown_to(flow: Flow, teacher: str) -> Sequence[str]:
    return of_teacher(flow.shows, teacher) if flow.shows else ()


def with_attempts(flow: Flow, group: Group, shows: Sequence[str]) -> Group:
    """Attach to every response the earlier attempts for its teacher's context; `shows` names their fields."""
    if not shows:
        return group
    return [Handle(replace(h.header, attempts=flow.memory.shown(h.header, shows)), h.body) for h in group]


def teacher_of(group: Group) -> set[int]:
    """Return the versions of the teacher weights that scored a group."""
    return {handle.header.teacher_version for handle in group}


# --- the learner ------------------------------------------------------------------------------------------------------


@dataclass
class Update:
    """An update in progress: its groups in learning order, and the seconds that its parts took."""

    number: int
    groups: list[Group] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    """Loss denominators of each group (numbers of tokens and episodes), after the rejection of tokens."""
    weighed: dict[tuple[int, int], Weighed] = field(default_factory=dict)
    """Freshness of each sample, by group number and index; empty if the config has no freshness weights."""
    ahead: deque[tuple[Batch, Counts]] = field(default_factory=deque)
    """Mini-batches whose gradients are still to be computed, each for its own optimizer step."""
    relabelled: set[int] = field(default_factory=set)
    seconds: Metrics = field(default_factory=lambda: dict.fromkeys(("data", "turn", "learn", "weights"), 0.0))


async def learn(flow: Flow) -> None:
    admission = flow.admission
    while not admission.finished:
        update = Update(admission.version + 1)
        while not admission.full:
            await until_enough(flow, update)
            update.seconds["turn"] += await flow.until(
                "groups whose turn it is", lambda: bool(admission.learnable()) or admission.finished
            )
            if admission.finished:
                return
            if stale := to_relabel(flow, update):
                await relabel(flow, update, stale)
            else:
                await gather(flow, update, admission.learn())
        update.seconds["weights"] += await flow.until("weights in the samplers", lambda: not admission.gated)
        await unbroken(flow, finish(flow, update))
        moving = await move_teachers(flow)
        flow.canaries.after_update(admission.version, flow.tasks)
        save = None
        if flow.due():
            await unbroken(flow, hand_over(flow))
            save = flow.checkpoint()
        if admission.gated:
            with flow.learning.busy("export", "other"):
                weights, expected = await flow.learner.export()
            publishing = flow.samplers.publish(
                weights, expected, version=admission.version, mode=admission.schedule.publish
            )
            flow.tasks.create_task(deliver(flow, publishing, moving))
        else:
            go_on(flow)
            flow.advance()
        if save is not None:  # the learner waits for this; the samplers do not
            with flow.learning.busy("checkpoint", "other"):
                try:
                    await unbroken(flow, save())
                except RecordsLost as error:
                    flow.samplers.say(f"the checkpoint of update {admission.version} is lost: {error}")


async def until_enough(flow: Flow, update: Update) -> None:
    """Wait until enough groups are scored; if a publish blocks all work, count the time as a wait for weights."""
    admission = flow.admission
    update.seconds["weights"] += await flow.until(
        "weights in the samplers", lambda: admission.enough or admission.coming or not admission.gated
    )
    update.seconds["data"] += await flow.until("scored groups", lambda: admission.enough or admission.finished)


def to_relabel(flow: Flow, update: Update) -> list[int]:
    """Return the groups that must be scored again before the learner may use them; empty if there are none."""
    if all(how == "never" for how in flow.relabel.values()):
        return []
    return [
        number
        for number in flow.admission.learnable()
        if number not in update.relabelled and needs_relabel(flow, flow.held[number])
    ]


def needs_relabel(flow: Flow, group: Group) -> bool:
    """Return whether to score a group again: always, never, or (stale) if teacher weights or attempts changed."""
    teacher = group[0].header.teacher
    if (how := of_teacher(flow.relabel, teacher)) != "stale":
        return how == "always"
    scorers, shows = of_teacher(flow.scorers, teacher), shown_to(flow, teacher)
    if isinstance(scorers, MovingTeacher) and teacher_of(group) != {scorers.version}:
        return True
    return [h.header.attempts for h in with_attempts(flow, group, shows)] != [h.header.attempts for h in group]


async def relabel(flow: Flow, update: Update, numbers: Sequence[int]) -> None:
    """Replace the scores of these groups by new ones; drop a group if its teacher cannot score it any more."""
    began = flow.waits["teachers that score again"] = flow.trace.now()
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in numbers:
                tasks.create_task(relabel_one(flow, update, number))
    finally:
        del flow.waits["teachers that score again"]
    update.seconds["relabel"] = update.seconds.get("relabel", 0.0) + flow.trace.now() - began
    flow.advance()


async def relabel_one(flow: Flow, update: Update, number: int) -> None:
    group = flow.held[number]
    teacher = group[0].header.teacher
    scorers, shows = of_teacher(flow.scorers, teacher), shown_to(flow, teacher)
    asked = with_attempts(flow, group, shows)

    async def again(worker: Worker[Relabeller]) -> list[Handle]:
        found = await worker.engine.relabel(asked)
        worker.since[number] = 0
        flow.account.scored(found, scorers.say)
        return gradable_members(found)

    update.relabelled.add(number)
    try:
        found = await scorers.call(f"group {number} again", again)
    except (GivenUp, RecordsLost) as failure:
        if flow.held.get(number) is not group:  # the group was restarted meanwhile
            return
        if isinstance(failure, GivenUp):
            flow.drop(number, "scoring failed", str(failure))
        else:
            scorers.say(f"group {number} begins again: {failure}")
            flow.restart(number)
    else:
        if flow.held.get(number) is group:
            flow.held[number] = found


async def gather(flow: Flow, update: Update, numbers: list[int]) -> None:
    """Add groups to the update and compute their gradient; for a whole batch, only that of the first mini-batch.

    The total counts of an update are unknown while its groups arrive one by one. Then gradients are plain sums, and
    the optimizer step divides them by the total counts.
    """
    groups = tuple(flow.held[number] for number in numbers)
    batch, began = Batch(groups, update.number), flow.trace.now()
    with flow.learning.busy(f"update {update.number}"):
        for number in numbers:
            flow.trace.arrives(flow.learning, number)
        try:
            counts = await flow.learner.prepare(batch)
        except RecordsLost as error:  # it is unknown which group lost its records, so all of them start again
            flow.samplers.say(f"update {update.number}: {len(numbers)} of its groups begin again: {error}")
            for number in numbers:
                flow.restart(number)
            return
        update.groups += groups
        update.counts += counts
        if flow.admission.schedule.learn == "batch":
            update.ahead.extend(flow.passes.of(batch, counts))
            await accumulate(flow, update, *update.ahead.popleft())
        else:
            await accumulate(flow, update, batch, ONE)
    update.seconds["learn"] += flow.trace.now() - began


async def finish(flow: Flow, update: Update) -> None:
    """Complete an update: make all its optimizer steps, then write its metrics, ledger entries and samples."""
    began, counts = flow.trace.now(), total(update.counts)
    # before the step: an error here must not leave a step without its records
    quotes = await flow.learner.quote(spread_samples(update, flow.quoted)) if flow.quoted else []
    with flow.learning.busy(f"update {update.number}"):
        try:
            flow.torn = True
            steps = [await flow.learner.step(ONE if flow.admission.schedule.learn == "batch" else counts, flow.lr)]
        except NonFiniteError:
            flow.torn = False
            raise
        while update.ahead:
            await accumulate(flow, update, *update.ahead.popleft())
            steps.append(await flow.learner.step(ONE, flow.lr))
    update.seconds["learn"] += flow.trace.now() - began
    batch, numbers = Batch(tuple(update.groups), update.number), over_steps(steps)
    weighed = [update.weighed[header.number, header.index] for header in batch.headers] if flow.buffer else []
    why = await refresh_reason(flow, flow.buffer, batch, weighed, numbers) if flow.buffer else None
    flow.torn = False  # no await from here on: an update is recorded completely, or not made
    version = flow.admission.version
    for number in flow.admission.learning:
        del flow.held[number]
    flow.admission.train()
    if flow.buffer is not None:
        refresh_buffer(flow, flow.buffer, why)
        numbers |= flow.buffer.metrics
    flow.learning.tokens += counts.n_tokens
    flow.canaries.trained({group[0].header.number for group in update.groups}, update.number)
    flow.account.trained(
        update.groups, update=update.number, version=version, size=flow.sampling.group, weighed=weighed
    )
    flow.account.quoted(quotes, update=update.number)
    line = flow.account.updated(batch, numbers, update.seconds)
    flow.health.look(line)
    flow.look(line)


async def accumulate(flow: Flow, update: Update, batch: Batch, counts: Counts) -> None:
    weighed = await flow.learner.accumulate(batch, counts)
    if flow.buffer is not None:
        update.weighed |= {(h.number, h.index): each for h, each in zip(batch.headers, weighed, strict=True)}


async def refresh_reason(
    flow: Flow, buffer: Buffer, batch: Batch, weighed: Sequence[Weighed], numbers: Metrics
) -> str | None:
    """Add freshness metrics to `numbers`; return the reason for a buffer refresh (rollouts are then paused) or None."""
    measured = list[Weighed]()
    ready = Batch(tuple(flow.held[number] for number in flow.admission.ready), batch.update)
    if ready.groups and buffer.measures(batch.update):
        # lost records are handled when their groups are learned from
        with flow.learning.busy("freshness", "other"), suppress(RecordsLost):
            measured = await flow.learner.weigh(ready)
    numbers |= buffer.look(weighed)
    level, found = buffer.level(ready.headers, measured, batch.update)
    numbers |= found
    why = buffer.why(level, batch.update) if flow.admission.publishes_next else None
    if why:
        await hand_over(flow)
    return why


def refresh_buffer(flow: Flow, buffer: Buffer, why: str | None) -> None:
    """If there is a reason `why`, restart all groups that began under older weights than those of this update."""
    if not (why and flow.admission.gated):
        return
    before = flow.account.thrown
    if stale := flow.admission.refresh(flow.held):
        for number in stale:
            flow.forget(number)
        tokens = flow.account.thrown - before
        buffer.done(flow.admission.version, groups=len(stale), tokens=tokens, why=why)


def spread_samples(update: Update, count: int) -> Batch:
    """Return `count` samples spread evenly over an update, each as a group of its own."""
    handles = [handle for group in update.groups for handle in group]
    count = min(count, len(handles))
    return Batch(tuple([handles[i * len(handles) // count]] for i in range(count)), update.number)


async def move_teachers(flow: Flow, *, first: bool = False) -> list[asyncio.Task[None]]:
    """Start to publish weights to teachers that follow the student and are due (`first`: all); return the tasks."""
    version, moving = flow.admission.version, list[asyncio.Task[None]]()
    for name, every in flow.follow.items():
        if first or version % every == 0:
            with flow.learning.busy("export", "other"):
                weights, expected = await flow.learner.export(name)
            due = weights.version if first else version
            moving.append(flow.tasks.create_task(teach(flow, name, weights, expected, due)))
    return moving


async def teach(flow: Flow, name: str, weights: WeightsRef, expected: Fingerprint, version: int) -> None:
    began, teacher = flow.trace.now(), flow.scorers[name]
    assert isinstance(teacher, MovingTeacher)
    await teacher.publish(weights, expected, version=version, mode="drain")
    flow.account.moved(name, version, flow.trace.now() - began)


async def deliver(flow: Flow, publishing: Awaitable[list[Loaded]], moving: Sequence[asyncio.Task[None]]) -> None:
    """Wait until all samplers have the new weights, then return credits and let groups start again."""
    began = flow.trace.now()
    numbers = publish_metrics(await publishing)
    flow.account.published(numbers | {"seconds/publish": flow.trace.now() - began})
    await asyncio.gather(*moving)
    await flow.after_publish()
    flow.admission.publish()
    go_on(flow)
    flow.advance()


async def unbroken(flow: Flow, work: Coroutine[Any, Any, T]) -> T:
    """Run work that a cancellation must not interrupt: an update happens with all its records, or not at all.

    After a cancellation the work continues to its end, except in a stalled run or after a second cancellation.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            if not flow.stalled:
                await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
        raise


async def watch(flow: Flow, patience: float) -> None:
    """Stop the run when nothing changes for `patience` seconds. Guarantor of invariant 9: every wait has a bound."""
    while True:
        await asyncio.sleep(patience / 10)
        if flow.trace.now() - flow.moved > patience:
            flow.stalled = True
            raise Stalled(f"nothing has moved for {patience:.0f} s (runtime.patience)\n{flow.report()}")
