"""How many workers of each kind there are to be: decided here, without a task or a clock."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from slipstream.errors import ConfigError, did_you_mean

CHANGE = re.compile(r"([\w.]+)=([+-]?)(\d+)", re.ASCII)


@dataclass(frozen=True)
class Room:
    """For more of them: what is free, and what one of each kind takes of it."""

    free: Mapping[str, float]
    takes: Mapping[str, Mapping[str, float]]

    def of(self, kind: str) -> float:
        """How many more there could be."""
        taken = {what: each for what, each in self.takes[kind].items() if each}
        return max(0.0, min((self.free.get(what, 0.0) // each for what, each in taken.items()), default=inf))

    def beside(self, kind: str, number: int) -> Room:
        """What is left when so many of a kind have come."""
        taken = self.takes[kind]
        return replace(self, free={what: there - number * taken.get(what, 0.0) for what, there in self.free.items()})


def asked(changes: Sequence[str], now: Mapping[str, int]) -> dict[str, int]:
    """From `sampler=+2`, `teacher.main=-1` or `sampler=3`, and how many there are, to how many there are to be."""
    sizes: dict[str, int] = {}
    for change in changes:
        match = CHANGE.fullmatch(change)
        if match is None:
            raise ConfigError(f"{change!r} is no change: write sampler=+2, teacher.main=-1 or sampler=3")
        kind, sign, number = match[1], match[2], int(match[3])
        if kind not in now:
            raise ConfigError(f"{change}: no kind of worker is called {kind!r}; {did_you_mean(kind, now)}")
        if kind in sizes:
            raise ConfigError(f"{change}: {kind} is named twice")
        sizes[kind] = {"": number, "+": now[kind] + number, "-": now[kind] - number}[sign]
        if sizes[kind] < 1:
            raise ConfigError(f"{change}: there are {now[kind]}, and one must stay")
    return sizes


def check_room(sizes: Mapping[str, int], now: Mapping[str, int], room: Room) -> None:
    """All who come share what is free. What those have who leave is not free before they left."""
    for kind, size in sizes.items():
        more = max(0, size - now[kind])
        if more > room.of(kind):
            raise ConfigError(
                f"{kind}={size}: there is room for {room.of(kind):.0f} more, by the GPUs and CPUs that are free"
            )
        room = room.beside(kind, more)
