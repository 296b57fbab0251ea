"""The groups in flight: their responses, and the tasks that roll them out and score them.

`admission` decides which groups may move. `Groups.advance` starts every rollout and scoring that may start. It is
called after each change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable

from slipstream.data.choice import Choice
from slipstream.metrics import NO_ADVANTAGE
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.ledger import Ledger
from slipstream.pipeline.progress import Progress
from slipstream.records import Group, Prompt

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
    ) -> None:
        self.admission, self.ledger, self.choice = admission, ledger, choice
        self.progress, self.task_group = progress, task_group
        self.responses = responses
        """Current responses of each group, by group number, with partial rollouts; groups without tokens are absent."""
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
        for number in self.admission.take():
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
            self.discard(number)
            self.ledger.dropped(self.prompt(number), NO_ADVANTAGE)
        self._roll(begun)

    def drop(self, number: int, reason: str, cause: str = "") -> None:
        self.admission.drop(number, reason)
        self.discard(number)
        self.ledger.dropped(self.prompt(number), reason, cause)

    def restart(self, number: int) -> None:
        self.discard(number)
        self.admission.restart(number)
        self._roll([number])

    def discard(self, number: int) -> None:
        """Discard the responses of a group, and cancel its rollout or scoring."""
        self.ledger.thrown += tokens_of(self.responses.pop(number, ()))
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


def tokens_of(group: Group) -> int:
    return sum(handle.header.tokens for handle in group)
