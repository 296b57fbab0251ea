"""The groups in flight: their responses, and the tasks that roll them out and score them.

`admission` decides which groups may move. `Groups.advance` starts every rollout and scoring that may start. It is
called after each change.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from statistics import fmean

from slipstream.data.choice import Choice
from slipstream.metrics import NO_ADVANTAGE
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.ledger import Ledger
from slipstream.pipeline.progress import Progress
from slipstream.pipeline.store import Reuse
from slipstream.protocols import SampleFreshness
from slipstream.records import Group, Prompt

LEAST_PRIORITY = 0.01
"""Addend of the priorities by advantage, so that each stored group can be drawn."""
Stage = Callable[[int], Coroutine[None, None, None]]
"""Coroutine that takes a group, by number, through one stage."""


class Groups:
    roll: Stage
    """Roll out a group. This attribute and `score` are set when the stages are connected."""
    score: Stage

    def __init__(
        self,
        admission: Admission,
        ledger: Ledger,
        choice: Choice,
        progress: Progress,
        task_group: asyncio.TaskGroup,
        responses: dict[int, Group],
        measure: Callable[[Group], tuple[float, int]],
    ) -> None:
        self.admission, self.ledger, self.choice = admission, ledger, choice
        self.progress, self.task_group = progress, task_group
        self.responses = responses
        """Current responses of each group, by group number, with partial rollouts; groups without tokens are absent."""
        self.measure = measure
        """Return the priority and the bytes of a group, for the store."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """Task of each group that is being rolled out or scored, by group number."""
        self.paused = True
        """True while no rollout may start; `resume` starts them later."""
        self.stopping = False
        """True if the run is stopping: paused rollouts do not continue."""

    def prompt(self, number: int) -> Prompt:
        """Return the prompt of a group; its `source` names the origin of its responses if the student draws none."""
        choice, supervised = self.choice, self.admission.supervising
        return choice.prompts.with_origin(choice.prompt(number), choice.row(number), supervised=supervised)

    def advance(self) -> None:
        """Start all rollouts and scoring that may start after a change, and let the learner check its waits again."""
        for number in self.admission.outdated():
            if self.admission.schedule.on_old == "drop":
                self.drop(number, "older than max_lag")
            else:
                self.restart(number)
        self._refill()
        self._roll(self.admission.submit())
        for number in self.admission.start_scoring():
            self._start(number, self.score)
        self.progress.note_change()

    def end_stage(self, number: int) -> None:
        self.tasks.pop(number, None)
        self.advance()

    def resume(self) -> None:
        """Continue paused rollouts in the order of submission; start what else may start."""
        if self.paused and not self.stopping:
            self.paused = False
            rolling = [number for number in self.admission.live if number in self.admission.rolling]
            self._roll(number for number in rolling if number not in self.tasks)
        self.advance()

    def _refill(self) -> None:
        """Replace groups without any advantage by further prompts."""
        dropped, begun = self.admission.refill()
        for number in dropped:
            self.choice.note(self.responses[number])
            self.ledger.counts["refilled_tokens"] += tokens_of(self.responses[number])
            self.discard(number)
            self.ledger.write_dropped(self.prompt(number), NO_ADVANTAGE)
        self._roll(begun)

    def to_learn(self, number: int) -> Group:
        """Return the responses of a group, with its importance weight if it was drawn from the store."""
        weight = self.admission.store.learning.get(number, 1.0)
        group = self.responses[number]
        return group if weight == 1 else [handle.with_header(weight=weight) for handle in group]

    def end_trained(self, weighed: Mapping[tuple[int, int], SampleFreshness]) -> None:
        """Record the end of all groups that have left the store, and forget their responses."""
        left = self.admission.store.take_left()
        ended = [(self.responses.pop(number), stored.uses) for number, stored in left.items()]
        self.ledger.write_trained(ended, weighed)
        for number in self.admission.store.groups:  # at the next use, a teacher's drift is that since this use
            group = self.responses[number]
            if any(handle.header.moved is not None for handle in group):
                self.responses[number] = [handle.with_header(moved=None, aligned=1.0) for handle in group]

    def end_stored(self, number: int) -> None:
        """End a group that an update has learned from, and that cannot be used again."""
        self.admission.store.end(number)
        self.end_trained({})

    def drop(self, number: int, reason: str, cause: str = "") -> None:
        """End a group without training on it; a group that an update has learned from ends as it is."""
        if number in self.admission.store.groups:
            self.end_stored(number)
        else:
            self.admission.drop(number, reason)
            self.discard(number)
            self.ledger.write_dropped(self.prompt(number), reason, cause)

    def restart(self, number: int) -> None:
        """Begin a group again; a group that an update has learned from ends instead."""
        if number in self.admission.store.groups:
            self.end_stored(number)
        else:
            self.discard(number)
            self.admission.restart(number)
            self._roll([number])

    def discard(self, number: int) -> None:
        """Discard the responses of a group, and cancel its rollout or scoring."""
        self.ledger.counts["thrown_tokens"] += tokens_of(self.responses.pop(number, ()))
        task = self.tasks.pop(number, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def redo(self, number: int, worker: str, *, roll: bool) -> bool:
        """Repeat a group's rollout (if `roll`) or scoring by this worker; return False if it is too late for that."""
        if roll and number in self.admission.live and number not in self.admission.learning:
            self.restart(number)
        elif not roll and self.admission.rescore(number):
            if (task := self.tasks.pop(number, None)) is not None:
                task.cancel()
        else:
            return False
        self.ledger.redone[number] = worker
        self.advance()
        return True

    def _roll(self, numbers: Iterable[int]) -> None:
        for number in () if self.paused else numbers:
            self._start(number, self.roll)

    def _start(self, number: int, stage: Stage) -> None:
        self.tasks[number] = self.task_group.create_task(stage(number))


def measured(weights: Mapping[str, float], reuse: Reuse | None, group: Group) -> tuple[float, int]:
    """Return priority and bytes of a group for the store; `weights` are those of the rewards in the policy loss."""
    if reuse is None:
        return 1.0, 0
    nbytes = sum(handle.header.nbytes for handle in group)
    if reuse.order != "advantage":
        return 1.0, nbytes
    episodes = {handle.header.episode: handle.header.rewards for handle in group}.values()
    rewards = [sum(weight * each[name] for name, weight in weights.items()) for each in episodes]
    return LEAST_PRIORITY + fmean(abs(reward - fmean(rewards)) for reward in rewards), nbytes


def tokens_of(group: Group) -> int:
    return sum(handle.header.tokens for handle in group)
