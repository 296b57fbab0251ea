"""Sequences that ended and may go on, in slots that nobody needs: which these are, where they lie, and who moves.

What the model remembers of a sequence stays when its row leaves: the keys and values of all its tokens but the newest,
which no pass has seen. The next call of the same lineage goes on from there, if its prompt begins with just these
tokens. Rows fill the first slots, and parked sequences lie anywhere behind them; rows that come in take what slots they
need, if need be of those that were parked longest ago. So parking takes no memory and nobody waits for it.

No tensor is touched here: who moves is told, and all of it is to be copied at once, because slots change places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.records import Ints

Lineage = tuple[int, int, float]
"""Whose sequence it is: the seed of its prompt, its index in the group, and its temperature, because the greedy answer
to a prompt has the index of the first response."""


class Move(NamedTuple):
    """So many positions of one slot become those of another."""

    source: int
    target: int
    length: int


@dataclass
class Parked:
    slot: int
    tokens: Ints
    """Those that the model remembers there."""


class Parking:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.parked: dict[Lineage, Parked] = {}
        """The one parked longest ago comes first."""

    def known(self, lineage: Lineage, tokens: Ints) -> int:
        """With how many tokens of this prompt it can go on; one that has become another is dropped."""
        if (parked := self.parked.get(lineage)) is None:
            return 0
        length = len(parked.tokens)
        if length < len(tokens) and np.array_equal(parked.tokens, tokens[:length]):
            return length
        del self.parked[lineage]
        return 0

    def park(self, leaving: Mapping[int, tuple[Lineage, Ints]], rows: int) -> list[Move]:
        """Sequences in these slots, when so many rows stay, in the first slots. There is room: that of their own rows,
        which is where they stay if they can."""
        if not leaving:
            return []
        for lineage, _ in leaving.values():
            self.parked.pop(lineage, None)
        free = self._free(rows, {parked.slot for parked in self.parked.values()} | leaving.keys())
        moves = list[Move]()
        for slot, (lineage, tokens) in leaving.items():
            self.parked[lineage] = Parked(slot if slot >= rows else free.pop(), tokens)
            moves.append(Move(slot, self.parked[lineage].slot, len(tokens)))
        return moved(moves)

    def give_way(self, rows: int, going: Mapping[Lineage, int]) -> list[Move]:
        """So many rows will fill the first slots, among them those that go on, each in its slot."""
        if not self.parked:
            return []
        moves = list[Move]()
        for lineage, slot in going.items():
            parked = self.parked.pop(lineage)
            moves.append(Move(parked.slot, slot, len(parked.tokens)))
        for lineage in list(self.parked)[: max(0, len(self.parked) - (self.slots - rows))]:
            del self.parked[lineage]
        free = self._free(rows, {parked.slot for parked in self.parked.values()})
        for parked in self.parked.values():
            if parked.slot < rows:
                source, parked.slot = parked.slot, free.pop()
                moves.append(Move(source, parked.slot, len(parked.tokens)))
        return moved(moves)

    def clear(self) -> None:
        self.parked.clear()

    def _free(self, rows: int, taken: set[int]) -> list[int]:
        """The slots behind so many rows that nobody has."""
        return [slot for slot in range(rows, self.slots) if slot not in taken]


def moved(moves: Sequence[Move]) -> list[Move]:
    return [move for move in moves if move.source != move.target]
