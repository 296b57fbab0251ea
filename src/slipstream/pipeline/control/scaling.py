"""The requested number of workers of each kind, and the room for them. Pure code: no tasks, no clock."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from slipstream.errors import ConfigError, did_you_mean

CHANGE = re.compile(r"([\w.]+)=([+-]?)(\d+)", re.ASCII)


@dataclass(frozen=True)
class Room:
    """The free resources, and the resources that one worker of each kind takes."""

    free: Mapping[str, float]
    takes: Mapping[str, Mapping[str, float]]

    def of(self, kind: str) -> float:
        """Return the number of workers of this kind that fit into the free resources."""
        taken = {what: each for what, each in self.takes[kind].items() if each}
        return max(0.0, min((self.free.get(what, 0.0) // each for what, each in taken.items()), default=inf))

    def beside(self, kind: str, number: int) -> Room:
        """Return the room that is left after `number` workers of a kind are added."""
        taken = self.takes[kind]
        return replace(self, free={what: there - number * taken.get(what, 0.0) for what, there in self.free.items()})


def asked(changes: Sequence[str], now: Mapping[str, int]) -> dict[str, int]:
    """Parse changes such as `sampler=+2`, `teacher.main=-1` or `sampler=3`; return the requested sizes by kind."""
    sizes: dict[str, int] = {}
    for change in changes:
        match = CHANGE.fullmatch(change)
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
        room = room.beside(kind, more)
