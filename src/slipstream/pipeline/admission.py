"""Credits, as a pure state machine: no task, clock or tensor. The unit is the group, known by its number.

    submit ─▶ rolling ─rolled─▶ waiting ─take─▶ scoring ─scored─▶ ready ─train─▶ trained ─publish─▶ (credit returned)
                 └──────────────── drop(reason) ─────┘ (credit returned)

Guarantor of invariant 1: a credit comes back only when its group has been trained on and the weights of that update
are published, so `submitted − published ≤ credits` always. Guarantor of invariant 2: every submitted group ends exactly
once, trained or dropped, and admission ends when submitted − dropped = updates · B.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from slipstream.pipeline.schedules import Schedule

Numbers = dict[int, None]
"""An ordered set: numbers in the order in which they came."""


class Admission:
    def __init__(self, schedule: Schedule, *, updates: int) -> None:
        self.schedule = schedule
        self.target = updates * schedule.groups
        self.live: dict[int, int] = {}
        """Groups between submission and training, in the order of submission: the batch each was submitted with."""
        self.rolling: Numbers = {}
        self.waiting: Numbers = {}
        self.scoring: Numbers = {}
        self.ready: Numbers = {}
        self.trained: Numbers = {}
        self.submitted = self.published = 0
        self.dropped: Counter[str] = Counter()
        self.gated = False
        """From the end of an update until its weights are in every sampler: nothing may start under old weights."""

    # --- what may happen -------------------------------------------------------------------------------------

    @property
    def in_use(self) -> int:
        return len(self.live) + len(self.trained)

    @property
    def remaining(self) -> int:
        """Groups that are still to be submitted; a drop adds one."""
        return self.target - (self.submitted - self.dropped.total())

    @property
    def finished(self) -> bool:
        return self.remaining == 0 and self.in_use == 0

    def quota(self) -> int:
        """How many groups may be submitted now."""
        if self.gated:
            return 0
        free = self.schedule.credits - self.in_use
        if self.schedule.submit == "stream":
            return min(free, self.remaining)
        # room for a whole batch, even where less remains: what is left after drops must not start beside another batch
        return min(self.schedule.groups, self.remaining) if free >= self.schedule.groups else 0

    def scorable(self) -> bool:
        """Whether the scoring of what waits may begin: at once, or when nothing rolls out any more."""
        return bool(self.waiting) and (self.schedule.score == "stream" or not self.rolling)

    def next_batch(self) -> list[int]:
        """The groups of the next update, in the order in which they are consumed; empty when it cannot begin yet.

        A batch that was submitted whole closes short when members of it were dropped.
        """
        groups = self.schedule.groups
        if self.schedule.submit == "batch":
            first = next(iter(self.live.values()), None)
            oldest = [number for number, batch in self.live.items() if batch == first]
        elif self.schedule.order == "submission":
            oldest = list(islice(self.live, groups))
        else:
            oldest = list(islice(self.ready, groups))
        complete = self.schedule.submit == "batch" or len(oldest) == groups
        return oldest if complete and all(number in self.ready for number in oldest) else []

    # --- what happens ----------------------------------------------------------------------------------------

    def submit(self) -> list[int]:
        """Take credits for as many groups as may start; returns their numbers."""
        numbers = list(range(self.submitted, self.submitted + self.quota()))
        for number in numbers:
            self.live[number] = numbers[0]
            self.rolling[number] = None
        self.submitted += len(numbers)
        return numbers

    def rolled(self, number: int) -> None:
        self._move(number, self.rolling, self.waiting)

    def take(self) -> list[int]:
        """Begin to score all that waits; returns the numbers."""
        assert self.scorable()
        numbers = list(self.waiting)
        for number in numbers:
            self._move(number, self.waiting, self.scoring)
        return numbers

    def scored(self, number: int) -> None:
        self._move(number, self.scoring, self.ready)

    def train(self, numbers: list[int]) -> None:
        """An update has consumed these groups. Their credits stay out until its weights are published."""
        for number in numbers:
            self._move(number, self.ready, self.trained)
            del self.live[number]
        self.gated = True

    def publish(self) -> None:
        """The weights of all updates so far are in every sampler."""
        self.published += len(self.trained)
        self.trained.clear()
        self.gated = False

    def drop(self, number: int, reason: str) -> None:
        """A group ends without being trained on, and its credit returns at once."""
        states = [state for state in (self.rolling, self.waiting, self.scoring) if number in state]
        assert states, f"group {number} cannot be dropped: it is not on its way to the learner"
        del states[0][number], self.live[number]
        self.dropped[reason] += 1

    def _move(self, number: int, before: Numbers, after: Numbers) -> None:
        assert number in before, f"group {number} is not where it should be"
        del before[number]
        after[number] = None
