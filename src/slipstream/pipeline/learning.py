"""The loop of the learner: it makes updates of scored groups, steers the run after each, and starts their publish."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from slipstream.config.learner import LearnerConfig
from slipstream.errors import NonFiniteError, RecordsLost
from slipstream.metrics import STAGE_ENDED, Metrics, over_steps
from slipstream.pipeline.canary_rounds import Canaries
from slipstream.pipeline.control.actions import Refresh
from slipstream.pipeline.control.buffer_refresh import Buffer
from slipstream.pipeline.groups import Groups
from slipstream.pipeline.publish import Publishing
from slipstream.pipeline.stages import Rollouts, Scoring
from slipstream.pipeline.trace import Track
from slipstream.protocols import Learner, SampleFreshness
from slipstream.records import ONE_COUNT, Batch, Counts, Group, total

T = TypeVar("T")
Save = Callable[[], Coroutine[Any, Any, Path]]
"""Save a checkpoint of the state at the moment when this function was made; return its directory."""


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
    on_update: Callable[[Metrics], None]
    """Called with the metrics of each update: controllers decide, and their actions are carried out."""
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
            await self._run_to_end(self._finish(update))
            moving = await self.publishing.move_teachers()
            save = None
            if self.checkpoint_due():
                await self._run_to_end(self.rollouts.pause())
                save = self.capture()
            if admission.gated:
                weights, expected = await self.publishing.export()
                self.groups.task_group.create_task(self.publishing.deliver(weights, expected, moving))
            else:
                self.groups.resume()
            if save is not None:  # the learner waits for this; the samplers do not
                with self.track.busy("checkpoint", "other"):
                    try:
                        await self._run_to_end(save())
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
        groups = tuple(map(self.groups.to_learn, numbers))
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
                await self._accumulate(update, batch, ONE_COUNT)
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
                steps = [
                    await self.learner.step(ONE_COUNT if admission.schedule.learn == "batch" else counts, self.lr())
                ]
            except NonFiniteError:
                self.torn = False
                raise
            while update.ahead:
                await self._accumulate(update, *update.ahead.popleft())
                steps.append(await self.learner.step(ONE_COUNT, self.lr()))
        update.seconds["learn"] += self.track.trace.now() - began
        batch, metrics = Batch(tuple(update.groups), update.number), over_steps(steps)
        buffer = self.buffer if update.number > admission.supervised else None
        weighed = [update.weighed[header.number, header.index] for header in batch.headers] if buffer else []
        refresh = await self._refresh_due(buffer, batch, weighed, metrics) if buffer else None
        self.torn = False  # no await from here on: an update is recorded completely, or not made
        new = list(admission.learning)
        admission.train({number: self.groups.measure(self.groups.responses[number]) for number in new})
        if buffer is not None:
            if refresh and admission.gated:
                self._refresh(buffer, refresh)
            metrics |= buffer.metrics
        self.track.tokens += counts.n_tokens
        self.canaries.record_trained({group[0].header.number for group in update.groups}, update.number)
        for number in new:
            self.groups.choice.note(self.groups.responses[number])
        self.groups.choice.update(admission.live)
        metrics |= ledger.reuse_metrics(batch.headers, new)
        self.groups.end_trained(update.weighed if buffer else {})
        ledger.write_samples(quotes, update=update.number)
        self._end_supervision(metrics)
        self.on_update(ledger.write_update(batch, metrics, update.seconds))

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

    async def _refresh_due(
        self, buffer: Buffer, batch: Batch, weighed: Sequence[SampleFreshness], metrics: Metrics
    ) -> Refresh | None:
        """Add freshness metrics to `metrics`; if they make a refresh due, pause the rollouts and return it."""
        admission, measured = self.groups.admission, list[SampleFreshness]()
        ready = Batch(tuple(self.groups.responses[number] for number in admission.ready), batch.update)
        if ready.groups and buffer.measures(batch.update):
            # lost records are handled when their groups are learned from
            with self.track.busy("freshness", "other"), suppress(RecordsLost):
                measured = await self.learner.weigh(ready)
        metrics |= buffer.measure(weighed)
        metrics |= buffer.level(ready.headers, measured, batch.update)
        if not admission.publishes_next or not (actions := buffer.on_update(metrics | {"version": batch.update})):
            return None
        await self.rollouts.pause()
        return actions[0]

    def _refresh(self, buffer: Buffer, refresh: Refresh) -> None:
        """Restart all groups that began under older weights than those of this update."""
        admission, ledger = self.groups.admission, self.groups.ledger
        before = ledger.counts["thrown_tokens"]
        if stale := admission.refresh(self.groups.responses):
            for number in stale:
                self.groups.discard(number)
            buffer.record_refresh(admission.version, tokens=ledger.counts["thrown_tokens"] - before)
            groups = f"{len(stale)} groups begin again"
            self.say(f"refresh after update {admission.version}: {groups}, {refresh.why}")

    async def _run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
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
