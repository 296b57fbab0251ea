"""GPUs that a run needs, by kind of worker, and the checks that they fit the machines.

A worker never spans machines: all its GPUs are on one. So the sum must fit, the largest worker must fit the largest
machine, and there must be a distribution of the workers over the machines that leaves none out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from slipstream.config.running import RuntimeConfig
from slipstream.errors import ConfigError
from slipstream.plan.engine_plans import EnginesPlan
from slipstream.plan.placement import GIB

MOST_SEARCHED = 100
"""Largest number of blocks of GPUs for which all distributions are tried."""


class Gpus(NamedTuple):
    """GPUs that a run will have, on other machines than this one."""

    machines: tuple[int, ...]
    """Number of GPUs of each machine."""
    memory: float | None
    """Memory of each GPU in bytes; None if it is not known."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Gpus:
        """Parse the GPUs of each machine: 8, or 8x80 with the GiB of each GPU."""
        found = [re.fullmatch(r"([1-9]\d{0,2})(?:x([1-9]\d{0,4}))?", word) for word in words]
        memories = {match and match[2] for match in found}
        if None in found or len(memories) > 1:
            raise ConfigError(
                f"--gpus {' '.join(words)}: write the number of GPUs of each machine (1 to 999), for example 8 8; or "
                "also the GiB of each GPU, equal on all machines, for example 8x80 8x80"
            )
        (gib,) = memories
        return cls(tuple(int(match[1]) for match in found if match), int(gib) * GIB if gib else None)

    def room(self, runtime: RuntimeConfig) -> tuple[float, float] | None:
        """Return the bytes of memory of one GPU and of all GPUs; inline engines share one. None if it is not known."""
        if self.memory is None:
            return None
        return self.memory, self.memory * (1 if runtime.kind == "inline" else sum(self.machines))


class Crew(NamedTuple):
    """All workers of one kind."""

    kind: str
    workers: int
    each: int
    """GPUs of each worker."""
    key: str = ""
    """Config key that sets the number of workers; "" if no key does."""

    def __str__(self) -> str:
        return f"{self.kind} {self.workers}" + (f" × {self.each} = {self.workers * self.each}" if self.each > 1 else "")


def crews_of(plan: EnginesPlan) -> list[Crew]:
    """Return the workers that each need a GPU or more; with `runtime.time_share`, learner and samplers use the same."""
    ranks, rolls = plan.learner.settings.ranks, plan.sampler
    students = [
        Crew("learner", ranks, 1),
        Crew("sampler", rolls.replicas, rolls.devices, "sampler.replicas"),
    ]
    if plan.runtime.time_share:
        students = [Crew("learner and sampler in turn", max(ranks, rolls.replicas * rolls.devices), 1)]
    crews = [
        *students,
        *(Crew(f"sampler of teacher {name}", own.replicas, own.devices) for name, own in plan.teacher_samplers.items()),
        *(
            Crew(f"teacher {name}", own.replicas, own.devices, f"teachers.{name}.replicas")
            for name, own in plan.scorers.items()
        ),
    ]
    return [crew for crew in crews if crew.each]


def needed(crews: Sequence[Crew]) -> int:
    return sum(crew.workers * crew.each for crew in crews)


def sum_line(crews: Sequence[Crew]) -> str:
    return f"{needed(crews)} GPUs are needed ({', '.join(map(str, crews))})"


def problem(crews: Sequence[Crew], machines: Sequence[int]) -> str:
    """Return the reason why these workers do not fit machines with these numbers of GPUs; empty if they fit."""
    if needed(crews) > sum(machines):
        return f"{sum_line(crews)}, there are {sum(machines)}"
    largest = max(crews, key=lambda crew: crew.each)
    if largest.each > max(machines):
        return (
            f"each {largest.kind} needs {largest.each} GPUs on one machine, and the largest machine has {max(machines)}"
        )
    blocks = Counter[int]()
    for crew in crews:
        blocks[crew.each] += crew.workers
    if not fits(blocks, machines):
        several = ", ".join(str(crew) for crew in crews if crew.each > 1)
        return (
            f"the GPUs of a worker must be on one machine, and machines with {', '.join(map(str, machines))} GPUs have "
            f"no room for {several}, although {sum(machines)} GPUs are enough in all"
        )
    return ""


def fits(blocks: Mapping[int, int], machines: Sequence[int]) -> bool:
    """Return True if so many blocks of each size fit into the machines, each block into one of them.

    With more than MOST_SEARCHED blocks of sizes that do not divide each other, only one distribution is tried.
    """
    sizes = sorted(blocks, reverse=True)
    if any(larger % smaller for larger, smaller in pairwise(sizes)):
        each = tuple(size for size in sizes for _ in range(blocks[size]) if size > 1)
        return _first_fit(each, machines) or (len(each) <= MOST_SEARCHED and _fit(each, tuple(sorted(machines))))
    # a block takes the room of a whole number of smaller ones, wherever it is: no distribution is better than another
    taken = 0
    for size in sizes:
        taken += size * blocks[size]
        if taken > size * sum(gpus // size for gpus in machines):
            return False
    return True


def _first_fit(sizes: Sequence[int], machines: Sequence[int]) -> bool:
    """Return True if blocks of these sizes fit if each goes to the first machine with room for it."""
    free = list(machines)
    for size in sizes:
        place = next((i for i, room in enumerate(free) if room >= size), None)
        if place is None:
            return False
        free[place] -= size
    return True


@cache
def _fit(sizes: tuple[int, ...], free: tuple[int, ...]) -> bool:
    """Return True if blocks of these sizes, largest first, fit into the free GPUs of the machines."""
    if not sizes:
        return True
    rest = (
        tuple(sorted((*free[:i], each - sizes[0], *free[i + 1 :])))
        for i, each in enumerate(free)
        if each >= sizes[0] and each not in free[:i]
    )
    return any(_fit(sizes[1:], each) for each in rest)


def unused_line(crews: Sequence[Crew], machines: Sequence[int]) -> str:
    """Return a line about GPUs that no worker uses, with the numbers of workers that would use them; empty if none."""
    left = sum(machines) - needed(crews)
    keys = []
    for crew in crews:
        counts = range(left // crew.each, 0, -1)
        count = next((n for n in counts if not problem([*crews, Crew("", n, crew.each)], machines)), 0)
        if count and crew.key:
            keys.append(f"{crew.key} = {crew.workers + count}")
    return f"{left} of {sum(machines)} GPUs are unused: there is room for {' or '.join(keys)}" if keys else ""
