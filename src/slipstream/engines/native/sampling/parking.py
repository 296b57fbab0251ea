"""Parking: leave the KV cache of ended turns in unused slots, so that the next turn need not read its prompt again.

When a row with `Sampling.park` ends, keys and values of all its tokens except the newest stay in the cache. The next
request of the same lineage continues from them if its prompt begins with exactly these tokens. Rows use the first
slots, and parked sequences use later slots. New rows evict the oldest parked sequences if they need slots. So parking
needs no extra memory and delays no request.

This file only plans moves. Copy all moves of a returned list at once, because two slots may be exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.records import Ints

Lineage = tuple[int, int, float]
"""Identity of a sequence across turns: prompt seed, index in the group, temperature (different for greedy answers)."""


class Move(NamedTuple):
    """A copy of the first `length` positions from slot `source` to slot `target`."""

    source: int
    target: int
    length: int


@dataclass
class Parked:
    slot: int
    tokens: Ints
    """Tokens whose keys and values are stored in the slot."""


class Parking:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.parked: dict[Lineage, Parked] = {}
        """Parked sequences, the oldest first."""

    def known(self, lineage: Lineage, tokens: Ints) -> int:
        """Return how many prompt tokens are parked for a lineage; 0 if none. Drop a sequence that does not match."""
        if (parked := self.parked.get(lineage)) is None:
            return 0
        length = len(parked.tokens)
        if length < len(tokens) and np.array_equal(parked.tokens, tokens[:length]):
            return length
        del self.parked[lineage]
        return 0

    def park(self, leaving: Mapping[int, tuple[Lineage, Ints]], rows: int) -> list[Move]:
        """Park the sequences `leaving` (by slot) and return the moves; remaining rows use the first `rows` slots."""
        if not leaving:
            return []
        for lineage, _ in leaving.values():
            self.parked.pop(lineage, None)
        free = self._free(rows, {parked.slot for parked in self.parked.values()} | leaving.keys())
        moves = list[Move]()
        for slot, (lineage, tokens) in leaving.items():
            self.parked[lineage] = Parked(slot if slot >= rows else free.pop(), tokens)
            moves.append(Move(slot, self.parked[lineage].slot, len(tokens)))
        return real_moves(moves)

    def make_room(self, rows: int, resumed: Mapping[Lineage, int]) -> list[Move]:
        """Free the first `rows` slots and return the moves; `resumed` maps continued sequences to their new slots."""
        if not self.parked:
            return []
        moves = list[Move]()
        for lineage, slot in resumed.items():
            parked = self.parked.pop(lineage)
            moves.append(Move(parked.slot, slot, len(parked.tokens)))
        for lineage in list(self.parked)[: max(0, len(self.parked) - (self.slots - rows))]:
            del self.parked[lineage]
        free = self._free(rows, {parked.slot for parked in self.parked.values()})
        for parked in self.parked.values():
            if parked.slot < rows:
                source, parked.slot = parked.slot, free.pop()
                moves.append(Move(source, parked.slot, len(parked.tokens)))
        return real_moves(moves)

    def clear(self) -> None:
        self.parked.clear()

    def _free(self, rows: int, taken: set[int]) -> list[int]:
        return [slot for slot in range(rows, self.slots) if slot not in taken]


def real_moves(moves: Sequence[Move]) -> list[Move]:
    return [move for move in moves if move.source != move.target]
