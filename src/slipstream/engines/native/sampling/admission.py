"""Which waiting requests start, with their reads (token ranges to prefill), and the cached prefixes that they continue.

When a row with `Sampling.park` ends, keys and values of all its tokens except the newest stay in the cache. The next
request of the same lineage continues from them if its prompt begins with exactly these tokens: it need not read them
again. Rows use the first slots, and cached prefixes use later slots. New rows evict the oldest prefixes
if they need slots. So prefixes need no extra memory and delay no request.

This file only plans moves. Copy all moves of a returned list at once, because two slots may be exchanged.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.engines.native.sampling.decoding import Read
from slipstream.engines.native.sampling.requests import Lineage, Publish, Request, Row
from slipstream.records import Ints

Member = tuple[Request, list[int]]
"""A request, and the indices of some of its members (responses)."""


class Move(NamedTuple):
    """A copy of the first `length` positions from slot `source` to slot `target`."""

    source: int
    target: int
    length: int


@dataclass
class CachedPrefix:
    slot: int
    tokens: Ints
    """Tokens whose keys and values are stored in the slot."""


class PrefixCache:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.prefixes: dict[Lineage, CachedPrefix] = {}
        """Prefixes by lineage, the oldest first."""

    def known(self, lineage: Lineage, tokens: Ints) -> int:
        """Return how many prompt tokens are cached for a lineage; 0 if none. Drop a sequence that does not match."""
        if (prefix := self.prefixes.get(lineage)) is None:
            return 0
        length = len(prefix.tokens)
        if length < len(tokens) and np.array_equal(prefix.tokens, tokens[:length]):
            return length
        del self.prefixes[lineage]
        return 0

    def store(self, leaving: Mapping[int, tuple[Lineage, Ints]], rows: int) -> list[Move]:
        """Keep the sequences `leaving` (by slot) and return the moves; remaining rows use the first `rows` slots."""
        if not leaving:
            return []
        for lineage, _ in leaving.values():
            self.prefixes.pop(lineage, None)
        free = self._free(rows, {prefix.slot for prefix in self.prefixes.values()} | leaving.keys())
        moves = list[Move]()
        for slot, (lineage, tokens) in leaving.items():
            self.prefixes[lineage] = CachedPrefix(slot if slot >= rows else free.pop(), tokens)
            moves.append(Move(slot, self.prefixes[lineage].slot, len(tokens)))
        return real_moves(moves)

    def make_room(self, rows: int, resumed: Mapping[Lineage, int]) -> list[Move]:
        """Free the first `rows` slots and return the moves; `resumed` maps continued sequences to their new slots."""
        if not self.prefixes:
            return []
        moves = list[Move]()
        for lineage, slot in resumed.items():
            prefix = self.prefixes.pop(lineage)
            moves.append(Move(prefix.slot, slot, len(prefix.tokens)))
        for lineage in list(self.prefixes)[: max(0, len(self.prefixes) - (self.slots - rows))]:
            del self.prefixes[lineage]
        free = self._free(rows, {prefix.slot for prefix in self.prefixes.values()})
        for prefix in self.prefixes.values():
            if prefix.slot < rows:
                source, prefix.slot = prefix.slot, free.pop()
                moves.append(Move(source, prefix.slot, len(prefix.tokens)))
        return real_moves(moves)

    def clear(self) -> None:
        self.prefixes.clear()

    def _free(self, rows: int, taken: set[int]) -> list[int]:
        return [slot for slot in range(rows, self.slots) if slot not in taken]


def real_moves(moves: Sequence[Move]) -> list[Move]:
    return [move for move in moves if move.source != move.target]


@dataclass(frozen=True)
class Arrivals:
    """Requests that start now. Slot order: members that earlier calls began, new members, cached prefixes."""

    requests: Sequence[Request]
    """All admitted requests. Unfinished members in `Request.parts` continue from their last token."""
    fresh: Sequence[Sequence[Member]]
    """New members, which begin after their prompt. Each inner list has one prompt, which is read once for all."""
    resumed: Sequence[tuple[Request, int]]
    """Requests that continue a cached prefix, each with the number of prompt tokens that it covers."""

    @property
    def rows(self) -> int:
        return sum(len(request.left) for request in self.requests)

    def places(self, stop: int) -> dict[Lineage, int]:
        """Return the slot of each continued prefix: the last slots below `stop`."""
        first = stop - len(self.resumed)
        return {request.lineage(request.prompt.first): slot for slot, (request, _) in enumerate(self.resumed, first)}


def admit(
    waiting: deque[Request], publishing: deque[Publish], prefixes: PrefixCache, *, free: int, room: int
) -> Arrivals:
    """Remove requests from the queue that can start: at most `free` rows and `room` tokens; none if a publish waits."""
    fresh, resumed = dict[bytes, list[Member]](), dict[Lineage, tuple[Request, int]]()
    admitted = list[Request]()
    while waiting and not publishing:
        request = waiting[0]
        if request.aborted:
            waiting.popleft()
            continue
        ids, lineage = request.ids, request.lineage(request.prompt.first)
        alone = request.sampling.group == 1 and not request.parts and lineage not in resumed
        known = prefixes.known(lineage, request.prompt.tokens) if alone else 0
        unread = 0 if not known and ids in fresh else len(request.prompt.tokens) - known
        free, room = free - len(request.left), room - unread
        if free < 0 or (admitted and room < 0):
            break
        admitted.append(waiting.popleft())
        members = [index for index in request.left if index not in request.parts]
        if known:
            resumed[lineage] = request, known
        elif members:
            fresh.setdefault(ids, []).append((request, members))
    return Arrivals(
        sorted(admitted, key=lambda request: len(request.prompt.tokens)),
        sorted(fresh.values(), key=lambda same: len(same[0][0].prompt.tokens)),
        sorted(resumed.values(), key=lambda pair: len(pair[0].prompt.tokens) - pair[1]),
    )


def prefix_reads(rows: Mapping[int, Row], *, recurrent: bool) -> list[Read]:
    """Plan reads of all tokens of each row except the newest; equal prompts are read once unless `recurrent`."""
    ids = {request: request.ids for request in {row.request for row in rows.values()}}
    groups, reads = dict[bytes, list[int]](), list[Read]()
    for slot, row in rows.items():
        groups.setdefault(ids[row.request], []).append(slot)
    for members in groups.values():
        shared = 0 if len(members) == 1 or recurrent else len(rows[members[0]].request.prompt.tokens)
        if shared:
            reads.append(Read(members, 0, shared))
        rests = [Read((slot,), shared, rows[slot].length - 1) for slot in members]
        reads += [rest for rest in rests if rest.count]
    return sorted(reads, key=lambda read: (read.first > 0, read.count))
