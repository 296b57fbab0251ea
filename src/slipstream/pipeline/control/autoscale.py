"""How many workers a run has where `replicas = "auto"` leaves it to the run. Pure: no task, no clock.

    the learner waits for groups         more come of all that would else hold it up, and stay if it got faster
    it does not, and workers are idle    as many of them leave
    in between                           nothing changes

Each change is an experiment. A size that proved too small, or too large, is not gone back to, so what is still possible
only narrows: noise can end that at a wrong size, but never makes sizes swing. What was learned is forgotten after 100
updates, 200, 400 …, for responses get longer or shorter as a student learns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from slipstream.pipeline.control.scaling import Room

WINDOW = 5
"""Updates that one decision looks at."""
SETTLING = 2
"""Updates after a change at which nobody looks: what they learned from was on its way before."""
SHORT, PLENTY = 0.1, 0.03
"""Shares of the time that the learner waits for groups: from the one on it has too few, below the other enough."""
FILLED = 0.7
"""How busy those are to be who stay when others leave."""
WORTH = 0.25
"""Of the speed that more workers promise, the part that they must bring to stay."""
MEMORY = 100
"""Updates until what was learned is forgotten for the first time."""


@dataclass(frozen=True)
class Seen:
    """What one update tells of who waited for whom."""

    seconds: float
    waited: float
    """Of these the learner, for groups."""
    tokens: float
    """From which it learned."""
    busy: Mapping[str, float]
    """How many workers of each kind had something to do, on average."""
    sizes: Mapping[str, int]
    """How many there are; of no kind, while any come or leave."""


@dataclass
class Known:
    """Of the sizes of one kind: up to `low` they are too small, from `high` on too large."""

    high: int
    low: int = 0


@dataclass(frozen=True)
class Change:
    sizes: Mapping[str, int]
    why: str


@dataclass(frozen=True)
class Trial:
    """More workers, and how many tokens a second make them worth it."""

    before: Mapping[str, int]
    after: Mapping[str, int]
    speed: float


class Autoscale:
    def __init__(self, most: Mapping[str, int]) -> None:
        """`most` workers of each kind that is decided here."""
        self.most = most
        self.known = self._nothing()
        self.sizes: Mapping[str, int] = {}
        self.window = deque[Seen](maxlen=WINDOW)
        self.settling, self.update, self.memory = 0, 0, MEMORY
        self.trial: Trial | None = None

    def look(self, seen: Seen, room: Room) -> Change | None:
        """After every update: what is to change, if anything."""
        self.update += 1
        if self.update == self.memory:
            self.memory *= 2
            self.known = self._nothing()
        if seen.sizes != self.sizes:
            self.sizes, self.settling = seen.sizes, SETTLING
            self.window.clear()
        elif self.settling:
            self.settling -= 1
        elif seen.sizes:
            self.window.append(seen)
        return self._decide(room) if len(self.window) == WINDOW else None

    def _nothing(self) -> dict[str, Known]:
        return {kind: Known(high=number + 1) for kind, number in self.most.items()}

    def _decide(self, room: Room) -> Change | None:
        seconds = sum(each.seconds for each in self.window)
        waits = sum(each.waited for each in self.window) / seconds
        speed = sum(each.tokens for each in self.window) / seconds
        busy = {kind: sum(each.busy[kind] * each.seconds for each in self.window) / seconds for kind in self.sizes}
        trial, self.trial = self.trial, None
        if trial and (speed < trial.speed or any(self.sizes[kind] != size for kind, size in trial.after.items())):
            return self._take_back(trial)
        if waits > SHORT:
            return self._more(waits, speed, busy, room)
        return self._fewer(busy) if waits < PLENTY else None

    def _more(self, waits: float, speed: float, busy: Mapping[str, float], room: Room) -> Change | None:
        """As many as it takes to be as fast as the learner, but not more than twice as fast."""
        faster, after = 1 / (1 - min(waits, 0.5)), dict(self.sizes)
        for kind, known in self.known.items():
            size = self.sizes[kind]
            most = min(known.high - 1, size + room.of(kind))
            after[kind] = max(size, int(min(ceil(busy[kind] * faster), most)))
            room = room.beside(kind, after[kind] - size)
        faster = min(faster, *(after[kind] / max(busy[kind], 1e-9) for kind in after))
        changed = {kind: size for kind, size in after.items() if size > self.sizes[kind]}
        if not changed or faster < 1 + SHORT:
            return None
        for kind in changed:
            self.known[kind].low = self.sizes[kind]
        self.trial = Trial({kind: self.sizes[kind] for kind in changed}, changed, speed * (1 + WORTH * (faster - 1)))
        return Change(changed, f"the learner waits for groups {waits:.0%} of the time")

    def _take_back(self, trial: Trial) -> Change | None:
        for kind, size in trial.before.items():
            self.known[kind] = Known(low=size - 1, high=size + 1)
        there = {kind: size for kind, size in trial.before.items() if self.sizes[kind] > size}
        return Change(there, "more of them brought too little") if there else None

    def _fewer(self, busy: Mapping[str, float]) -> Change | None:
        after = {kind: max(ceil(busy[kind] / FILLED), known.low + 1) for kind, known in self.known.items()}
        changed = {kind: size for kind, size in after.items() if size < self.sizes[kind]}
        for kind in changed:
            self.known[kind].high = self.sizes[kind]
        return Change(changed, "the learner does not wait and they are idle") if changed else None
