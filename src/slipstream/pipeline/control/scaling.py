"""The number of workers of each kind: as requested, or chosen for `replicas = "auto"`. Pure code: no tasks, no clock.

    the learner waits for groups                   add workers of every kind that is too slow
    the learner does not wait, workers are idle    remove the idle workers
    in between                                     change nothing

Each increase is a trial: it stays only if the run gets faster. A size that proved too small or too large is not tried
again. So noise can lead to a wrong size, but sizes never oscillate. Because the length of responses changes during
training, bounds are forgotten after 100 updates, 200, 400 and so on.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from slipstream.errors import ConfigError, did_you_mean
from slipstream.pipeline.control.actions import Action, Controller, Line, Resize, Say

CHANGE_PATTERN = re.compile(r"([\w.]+)=([+-]?)([0-9]{1,9})")
SCALING_WINDOW = 5
"""Number of updates that one decision averages."""
SETTLING_UPDATES = 2
"""Number of updates ignored after a change: their groups were in flight before it."""
TOO_FEW_GROUPS, ENOUGH_GROUPS = 0.1, 0.03
"""Shares of the time that the learner waits for groups: above the first it has too few, below the second enough."""
BUSY_TARGET = 0.7
"""Share of the time in which the remaining workers should be busy after others are removed."""
SPEEDUP_SHARE = 0.25
"""Part of the expected speed-up that added workers must bring to stay."""
SIZE_MEMORY = 100
"""Updates until the bounds found so far are forgotten for the first time."""


@dataclass(frozen=True)
class Room:
    """The free resources, and the resources that one worker of each kind takes."""

    free: Mapping[str, float]
    takes: Mapping[str, Mapping[str, float]]

    def of(self, kind: str) -> float:
        """Return the number of workers of this kind that fit into the free resources."""
        taken = {what: each for what, each in self.takes[kind].items() if each}
        return max(0.0, min((self.free.get(what, 0.0) // each for what, each in taken.items()), default=inf))

    def after_adding(self, kind: str, number: int) -> Room:
        """Return the room that is left after `number` workers of a kind are added."""
        taken = self.takes[kind]
        return replace(self, free={what: there - number * taken.get(what, 0.0) for what, there in self.free.items()})


def requested_sizes(changes: Sequence[str], now: Mapping[str, int]) -> dict[str, int]:
    """Parse changes such as `sampler=+2`, `teacher.main=-1` or `sampler=3`; return the requested sizes by kind."""
    sizes: dict[str, int] = {}
    for change in changes:
        match = CHANGE_PATTERN.fullmatch(change)
        if match is None:
            raise ConfigError(f"{change!r} is not a valid change: write sampler=+2, teacher.main=-1 or sampler=3")
        kind, sign, number = match[1], match[2], int(match[3])
        if kind not in now:
            raise ConfigError(f"{change}: no kind of worker is called {kind!r}; {did_you_mean(kind, now)}")
        if kind in sizes:
            raise ConfigError(f"{change}: {kind} is named twice")
        sizes[kind] = {"": number, "+": now[kind] + number, "-": now[kind] - number}[sign]
        if sizes[kind] < 1:
            raise ConfigError(f"{change}: there are {now[kind]}, and at least one must stay")
    return sizes


def check_room(sizes: Mapping[str, int], now: Mapping[str, int], room: Room) -> None:
    """Raise ConfigError if the added workers do not fit together; resources of leaving workers do not count as free."""
    for kind, size in sizes.items():
        more = max(0, size - now[kind])
        if more > room.of(kind):
            raise ConfigError(
                f"{kind}={size}: there is room for {room.of(kind):.0f} more, by the GPUs and CPUs that are free"
            )
        room = room.after_adding(kind, more)


# --- replicas = "auto" ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicaState:
    """The workers of every kind that can be added or removed."""

    names: Mapping[str, Sequence[str]]
    """Names of the workers that work, by kind."""
    sizes: Mapping[str, int]
    """Number of workers by kind; empty while any worker is starting or leaving."""
    room: Room


@dataclass(frozen=True)
class Observation:
    """Measurements of one update."""

    seconds: float
    waited: float
    """Seconds in which the learner waited for groups."""
    tokens: float
    busy: Mapping[str, float]
    """Average number of busy workers, by kind."""
    sizes: Mapping[str, int]
    """Number of workers by kind; empty while any worker is starting or leaving."""


@dataclass
class Bounds:
    """Bounds of the number of workers of one kind: sizes up to `low` are too small, sizes from `high` on too large."""

    high: int
    low: int = 0


@dataclass(frozen=True)
class Trial:
    """An increase on trial: sizes before and after, and the tokens per second that it must reach to stay."""

    before: Mapping[str, int]
    after: Mapping[str, int]
    speed: float


def observe(line: Line, state: ReplicaState) -> Observation:
    return Observation(
        seconds=line["seconds/update"],
        waited=line["seconds/data"] + line["seconds/turn"],
        tokens=line["tokens"],
        busy={kind: sum(1 - line.get(f"idle/{name}", 0.0) for name in names) for kind, names in state.names.items()},
        sizes=state.sizes,
    )


class Autoscale(Controller):
    def __init__(self, most: Mapping[str, int], state: Callable[[], ReplicaState | None] = lambda: None) -> None:
        """Set the largest number of workers of each kind that is set to "auto"; `state` returns None at the end."""
        self.most, self.state = most, state
        self.bounds = self._no_bounds()
        self.sizes: Mapping[str, int] = {}
        self.window = deque[Observation](maxlen=SCALING_WINDOW)
        self.settling, self.update, self.memory = 0, 0, SIZE_MEMORY
        self.trial: Trial | None = None

    def on_update(self, line: Line) -> list[Action]:
        if (state := self.state()) is None or (change := self.decide(observe(line, state), state.room)) is None:
            return []
        sizes = ", ".join(f"{kind} from {state.sizes[kind]} to {size}" for kind, size in change.sizes.items())
        return [Say(f"replicas: {sizes}, because {change.why}"), change]

    def decide(self, observation: Observation, room: Room) -> Resize | None:
        """Process the measurements of an update; return new numbers of workers, or None for no change."""
        self.update += 1
        if self.update == self.memory:
            self.memory *= 2
            self.bounds = self._no_bounds()
        if observation.sizes != self.sizes:
            self.sizes, self.settling = observation.sizes, SETTLING_UPDATES
            self.window.clear()
        elif self.settling:
            self.settling -= 1
        elif observation.sizes:
            self.window.append(observation)
        return self._decide(room) if len(self.window) == SCALING_WINDOW else None

    def _no_bounds(self) -> dict[str, Bounds]:
        return {kind: Bounds(high=number + 1) for kind, number in self.most.items()}

    def _decide(self, room: Room) -> Resize | None:
        seconds = sum(each.seconds for each in self.window)
        waits = sum(each.waited for each in self.window) / seconds
        speed = sum(each.tokens for each in self.window) / seconds
        busy = {kind: sum(each.busy[kind] * each.seconds for each in self.window) / seconds for kind in self.sizes}
        trial, self.trial = self.trial, None
        if trial and (speed < trial.speed or any(self.sizes[kind] != size for kind, size in trial.after.items())):
            return self._take_back(trial)
        if waits > TOO_FEW_GROUPS:
            return self._more(waits, speed, busy, room)
        return self._fewer(busy) if waits < ENOUGH_GROUPS else None

    def _more(self, waits: float, speed: float, busy: Mapping[str, float], room: Room) -> Resize | None:
        """Add workers until rollout and scoring keep up with the learner, to at most twice the current speed."""
        faster, after = 1 / (1 - min(waits, 0.5)), dict(self.sizes)
        for kind, known in self.bounds.items():
            size = self.sizes[kind]
            most = min(known.high - 1, size + room.of(kind))
            after[kind] = max(size, int(min(ceil(busy[kind] * faster), most)))
            room = room.after_adding(kind, after[kind] - size)
        faster = min(faster, *(after[kind] / max(busy[kind], 1e-9) for kind in after))
        changed = {kind: size for kind, size in after.items() if size > self.sizes[kind]}
        if not changed or faster < 1 + TOO_FEW_GROUPS:
            return None
        for kind in changed:
            self.bounds[kind].low = self.sizes[kind]
        self.trial = Trial(
            {kind: self.sizes[kind] for kind in changed}, changed, speed * (1 + SPEEDUP_SHARE * (faster - 1))
        )
        return Resize(changed, f"the learner waits for groups {waits:.0%} of the time")

    def _take_back(self, trial: Trial) -> Resize | None:
        for kind, size in trial.before.items():
            self.bounds[kind] = Bounds(low=size - 1, high=size + 1)
        there = {kind: size for kind, size in trial.before.items() if self.sizes[kind] > size}
        return Resize(there, "the added workers brought too little") if there else None

    def _fewer(self, busy: Mapping[str, float]) -> Resize | None:
        after = {kind: max(ceil(busy[kind] / BUSY_TARGET), known.low + 1) for kind, known in self.bounds.items()}
        changed = {kind: size for kind, size in after.items() if size < self.sizes[kind]}
        for kind in changed:
            self.bounds[kind].high = self.sizes[kind]
        return Resize(changed, "the learner does not wait and workers are idle") if changed else None
