"""The store of groups that updates have learned from and may learn from again. Pure code: no tasks, clock or tensors.

An update takes the oldest stored groups, or draws groups in proportion to their priorities (experience replay). A group
leaves the store after its last use, when it is too old for the next update, or when the store is full. Draws are by
systematic sampling: with one uniform number for an update, each group is drawn with exactly its probability
min(1, c · priority^alpha), and never twice (Madow 1949). Importance weights follow PER (1511.05952). Uses by age, and
priorities by freshness and advantage, are the ideas of 2604.08706 and 2604.16918, whose texts were not at hand.

Guarantor of three promises: no group is used more than `most` times, none beyond the age bound, and each group that
was learned from leaves exactly once.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from slipstream.metrics import Metrics
from slipstream.records import derive_seed

MAX_HALVINGS = 30.0
"""Largest number of times that age halves a priority, so that no priority is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Experience replay as data of a schedule."""

    most: int
    """Largest number of updates that learn from a group."""
    groups: int
    """Largest number of stored groups of one update."""
    capacity: int
    """Largest number of groups in the store."""
    nbytes: float | None = None
    """Largest size of the store in bytes; None for no bound."""
    max_lag: int | None = None
    """Largest lag in updates at which a stored group is learned from; None for no bound."""
    order: Literal["age", "freshness", "advantage"] = "age"
    alpha: float = 1.0
    """Exponent of the priorities of groups."""
    beta: float = 0.0
    """Exponent of the importance weights."""
    half_life: float | None = None
    """Lag in updates that halves a priority; None if lag does not count."""


@dataclass(slots=True)
class Stored:
    """A group in the store."""

    version: int
    """Weights version of the group's oldest token."""
    uses: list[int]
    """Updates that learned from the group, in order."""
    priority: float = 1.0
    nbytes: int = 0


class Store:
    def __init__(self, reuse: Reuse | None, groups: dict[int, Stored], seed: int) -> None:
        """Continue with these stored groups, by number. `reuse` None: every group leaves after its first use."""
        self.reuse, self.groups, self.seed = reuse, groups, seed
        self.learning: dict[int, float] = {}
        """Groups that the update in progress learns from again, and their importance weights."""
        self.left: list[tuple[int, Stored]] = []
        """Groups that have left the store since `take_left`."""

    def chosen(self, version: int) -> dict[int, float]:
        """Return the stored groups that the update of the weights `version` learns from, and their weights."""
        if (reuse := self.reuse) is None or not self.groups:
            return {}
        numbers = sorted(self.groups, key=lambda number: (self.groups[number].uses[0], number))
        if reuse.order == "age":
            return dict.fromkeys(numbers[: reuse.groups], 1.0)
        priorities = [self._priority(self.groups[number], version) for number in numbers]
        odds = inclusion([priority**reuse.alpha for priority in priorities], reuse.groups)
        drawn = systematic(odds, derive_seed("reuse", self.seed, version) / 2**63)
        rarest = min((odds[i] for i in drawn), default=1.0)
        return {numbers[i]: (rarest / odds[i]) ** reuse.beta for i in drawn}

    def learn(self, chosen: dict[int, float], version: int) -> None:
        """Record that the update in progress learns from these groups; raise if one is older than promised."""
        for number in chosen:
            stored = self.groups[number]
            assert self.reuse is not None and len(stored.uses) < self.reuse.most
            if self._is_old(stored, version):
                raise RuntimeError(f"stored group {number} is {version - stored.version} updates old")
        self.learning = chosen

    def train(self, first: dict[int, Stored], update: int, *, last: bool) -> None:
        """Record the end of an update, which learned from the groups `first` for the first time.

        After the `last` update of the run, all groups leave.
        """
        for number in self.learning:
            self.groups[number].uses.append(update)
        self.learning = {}
        self.groups |= first
        for number, stored in list(self.groups.items()):
            if last or self.reuse is None or len(stored.uses) == self.reuse.most or self._is_old(stored, update):
                self.end(number)
        oldest = sorted(self.groups, key=lambda number: (self.groups[number].uses[0], number))
        while oldest and self._is_full():
            self.end(oldest.pop(0))

    def end(self, number: int) -> None:
        """Take a group out of the store; the number of its uses is final."""
        self.learning.pop(number, None)
        self.left.append((number, self.groups.pop(number)))

    def take_left(self) -> dict[int, Stored]:
        """Return the groups that have left since the last call."""
        left, self.left = dict(self.left), []
        return left

    @property
    def metrics(self) -> Metrics:
        """Return the size of the store, if there is one."""
        if self.reuse is None:
            return {}
        size = sum(stored.nbytes for stored in self.groups.values())
        return {"reuse/stored": float(len(self.groups)), "reuse/bytes": float(size)}

    def _is_full(self) -> bool:
        assert self.reuse is not None
        size = sum(stored.nbytes for stored in self.groups.values())
        return len(self.groups) > self.reuse.capacity or (self.reuse.nbytes is not None and size > self.reuse.nbytes)

    def _is_old(self, stored: Stored, version: int) -> bool:
        bound = self.reuse.max_lag if self.reuse is not None else None
        return bound is not None and version - stored.version > bound

    def _priority(self, stored: Stored, version: int) -> float:
        assert self.reuse is not None
        decay = 0.0 if self.reuse.half_life is None else max(version - stored.version, 0) / self.reuse.half_life
        return stored.priority * math.exp2(-min(decay, MAX_HALVINGS))


def inclusion(sizes: Sequence[float], count: int) -> list[float]:
    """Return probabilities min(1, c · size) whose sum is `count`; all are 1 if there are no more sizes than that."""
    if len(sizes) <= count:
        return [1.0] * len(sizes)
    certain = set[int]()
    while True:
        rest = sum(size for i, size in enumerate(sizes) if i not in certain)
        odds = [1.0 if i in certain else (count - len(certain)) * size / rest for i, size in enumerate(sizes)]
        if not (more := {i for i, each in enumerate(odds) if each > 1}):
            return odds
        certain |= more


def systematic(odds: Iterable[float], start: float) -> list[int]:
    """Return the indices whose cumulated probabilities pass start, start + 1, …; `start` is uniform in [0, 1)."""
    drawn, reached = list[int](), start
    for i, total in enumerate(accumulate(odds)):
        if total > reached + 1e-12:
            drawn.append(i)
            reached += 1
    return drawn
