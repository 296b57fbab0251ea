"""Several ranks that act as one learner: assignment of groups to ranks, and handling of a failed rank.

    prepare     the groups of each optimizer step are assigned to ranks by cost, and stay there
    accumulate  each rank computes the gradient of its groups; a rank without groups computes a dummy batch
    all else    the same call goes to every rank, and the first answer counts (`quote`: each answers for its groups)

Ranks compute together, so all must receive the same calls in the same order and no call may be withdrawn. If a caller
is cancelled, its call continues and the next call waits for it. When a single rank fails or dies, the state of the
others is unknown: from then on every call fails.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from slipstream.engines.native.packing import cost
from slipstream.errors import EngineError, RecordsLost, SlipstreamError, WorkerDied
from slipstream.protocols import Learner, Proxy, Quote, SampleFreshness
from slipstream.records import Batch, Counts, Group

T = TypeVar("T")
RANK_ERRORS = 5.0
"""Seconds after one rank's error in which the other ranks may raise their errors."""


class RankedLearner(Proxy, Learner):
    def __init__(self, ranks: Sequence[Learner], *, hidden: int, minibatches: int = 1, packing: bool = True) -> None:
        """Combine ranks; `hidden` is the width of the model, which costs depend on."""
        self.ranks, self.hidden, self.minibatches, self.packing = ranks, hidden, minibatches, packing
        self.update = 0
        self.homes: dict[int, int] = {}
        """Rank to which each group of this update is assigned, by group number."""
        self.loads = [0.0] * len(ranks)
        """Total cost of the groups of this update, for each rank."""
        self.last: asyncio.Task[Any] | None = None
        self.failed: BaseException | None = None

    async def prepare(self, batch: Batch) -> list[Counts]:
        if batch.update != self.update:
            self.update, self.homes, self.loads = batch.update, {}, [0.0] * len(self.ranks)
        for part in batch.parts(self.minibatches):
            costs = [group_cost(group, self.hidden, self.packing) for group in part.groups]
            for group, each, rank in zip(part.groups, costs, shared_out(costs, self.loads), strict=True):
                self.homes[number_of(group)] = rank
                self.loads[rank] += each
        parts = self._split(batch)
        counts = [iter(found) for found in await self._all(lambda rank: self.ranks[rank].prepare(parts[rank]))]
        return [next(counts[self.homes[number_of(group)]]) for group in batch.groups]

    async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
        parts = self._split(batch)
        found = await self._all(lambda rank: self.ranks[rank].accumulate(parts[rank], counts))
        weighed = [iter(each) for each in found]
        return [next(weighed[self.homes[header.number]]) for header in batch.headers] if any(found) else []

    async def quote(self, batch: Batch) -> list[Quote]:
        parts = self._split(batch)
        return [each for found in await self._all(lambda rank: self.ranks[rank].quote(parts[rank])) for each in found]

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Make the same call to every rank, and return the answer of the first."""
        return (await self._all(lambda rank: getattr(self.ranks[rank], method)(*args, **options)))[0]

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        await self._all(lambda rank: self.ranks[rank].save(path, () if rank else groups, optimizer=optimizer))

    def _split(self, batch: Batch) -> list[Batch]:
        parts: list[list[Group]] = [[] for _ in self.ranks]
        for group in batch.groups:
            parts[self.homes[number_of(group)]].append(group)
        return [replace(batch, groups=tuple(groups)) for groups in parts]

    async def _all(self, call: Callable[[int], Awaitable[T]]) -> list[T]:
        if self.last is not None and not self.last.done():
            await asyncio.wait([self.last])
        if self.failed is not None:
            raise copy(self.failed)
        self.last = asyncio.create_task(self._together(call))
        found: list[T] = await asyncio.shield(self.last)
        return found

    async def _together(self, call: Callable[[int], Awaitable[T]]) -> list[T]:
        tasks = [asyncio.ensure_future(call(rank)) for rank in range(len(self.ranks))]
        done, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = errors_of(done)
        if late and not any(isinstance(error, WorkerDied) for error in errors):
            _, late = await asyncio.wait(tasks, timeout=RANK_ERRORS)
        errors += [error for error in errors_of(set(tasks) - late) if error not in errors]
        if not errors:
            return [task.result() for task in tasks]
        if len(errors) < len(tasks) or not all_agree(errors):
            self.failed = next((error for error in errors if isinstance(error, WorkerDied)), errors[0])
            if isinstance(self.failed, RecordsLost):  # other ranks had their records and have advanced
                self.failed = WorkerDied(str(self.failed))
            for task in late:
                task.cancel()
        raise self.failed or errors[0]


def errors_of(done: Iterable[asyncio.Future[T]]) -> list[BaseException]:
    return [error for task in done if (error := task.exception()) is not None]


def all_agree(errors: Sequence[BaseException]) -> bool:
    """Return True if all ranks raised the same recoverable error at the same point, so that they can continue."""
    first = errors[0]
    same = all(type(error) is type(first) for error in errors)
    return same and isinstance(first, SlipstreamError) and not isinstance(first, EngineError)


def number_of(group: Group) -> int:
    return group[0].header.number


def group_cost(group: Group, hidden: int, packing: bool) -> float:
    """Return the compute cost of a group; rows with `packing` compute its prompt once."""
    headers = [handle.header for handle in group]
    saved = sum(cost(header.prompt_tokens, hidden) for header in headers[1:]) if packing else 0.0
    return sum(cost(header.prompt_tokens + header.tokens, hidden) for header in headers) - saved


def shared_out(costs: Sequence[float], earlier: Sequence[float]) -> list[int]:
    """Return a rank for each cost: the largest first, each to the rank with the least load (ties: least `earlier`)."""
    loads, chosen = [0.0] * len(earlier), [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        chosen[i] = min(range(len(earlier)), key=lambda rank: (loads[rank], earlier[rank]))
        loads[chosen[i]] += costs[i]
    return chosen
