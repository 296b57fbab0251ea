"""How many workers of each kind there are to be: decided here, without a task or a clock."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from slipstream.errors import ConfigError, did_you_mean

CHANGE = re.compile(r"([\w.]+)=([+-]?)(\d+)", re.ASCII)


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
