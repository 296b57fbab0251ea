"""The order of a run's prompts: epochs over the rows, a curriculum, and several sources mixed by their shares.

Everything here is a pure function of the seed and the prompt's number, so a run can continue from any number.
"""

import random
from collections.abc import Sequence

from slipstream.records import derive_seed


class Epochs:
    """Rows in epochs: every row once in each. With `difficulty`, a curriculum comes before the first epoch."""

    def __init__(
        self,
        rows: Sequence[int],
        *,
        seed: int,
        shuffle: bool = True,
        name: str = "",
        difficulty: Sequence[float] = (),
        curriculum_epochs: float = 1.0,
    ) -> None:
        """Order these rows. `name` is the source, whose epochs have their own order; `difficulty` has a value per row.

        A curriculum of `curriculum_epochs` has every row once per whole epoch, and a random part of the rows for the
        rest. It is sorted by difficulty, easiest first; rows of equal difficulty are in random order.
        """
        self.rows, self.shuffle, self.seed, self.name = rows, shuffle, seed, name
        self.curriculum: list[int] = []
        """Places in `rows` in the order of the curriculum."""
        if difficulty:
            drawn, places = self._random("ramp"), range(len(rows))
            whole, rest = divmod(max(round(curriculum_epochs * len(rows)), 1), len(rows))
            self.curriculum = [*places] * whole + drawn.sample(places, rest)
            drawn.shuffle(self.curriculum)
            self.curriculum.sort(key=difficulty.__getitem__)
        self._epoch, self._order = -1, list(range(len(rows)))

    def at(self, number: int) -> int:
        if number < len(self.curriculum):
            return self.rows[self.curriculum[number]]
        epoch, place = divmod(number - len(self.curriculum), len(self.rows))
        if self.shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.rows)))
            self._random("epoch", epoch).shuffle(self._order)
        return self.rows[self._order[place]]

    def visits(self, number: int) -> int:
        """Return how often the row at this place came before it."""
        if number < len(self.curriculum):
            return self.curriculum[:number].count(self.curriculum[number])
        epoch, place = divmod(number - len(self.curriculum), len(self.rows))
        row = self.rows.index(self.at(number)) if self.curriculum else place
        return epoch + self.curriculum.count(row)

    def _random(self, *what: int | str) -> random.Random:
        return random.Random(derive_seed(self.seed, *what, *([self.name] if self.name else [])))


class Mixture:
    """Several sources, each in its own order. Among the first n prompts, the count of a source is near n · share.

    The quota method of Balinski and Young decides: the count is always n · share, rounded down or up.
    """

    def __init__(self, orders: Sequence[Epochs], shares: Sequence[float] = ()) -> None:
        """Mix sources by their shares, in any unit; without shares all are equal."""
        shares = shares or [1.0] * len(orders)
        self.orders, self.shares = orders, [share / sum(shares) for share in shares]
        self._counts = [0] * len(orders)
        self._places: list[tuple[int, int]] = []
        """Source, and place in its order, of all prompts up to the highest number that was asked for."""

    def at(self, number: int) -> int:
        source, place = self.place(number)
        return self.orders[source].at(place)

    def visits(self, number: int) -> int:
        source, place = self.place(number)
        return self.orders[source].visits(place)

    def place(self, number: int) -> tuple[int, int]:
        """Return the source of a prompt, and the prompt's number among those of this source."""
        if len(self.orders) == 1:
            return 0, number
        while len(self._places) <= number:
            after, counts = len(self._places) + 1, self._counts
            below = [i for i, share in enumerate(self.shares) if counts[i] < after * share]
            source = max(below, key=lambda i: self.shares[i] / (counts[i] + 1))
            self._places.append((source, counts[source]))
            counts[source] += 1
        return self._places[number]


def shares_of(weights: Sequence[float], temperature: float) -> list[float]:
    """Return the shares of sources: weights to the power 1 / temperature, scaled to a sum of 1."""
    scaled = [(weight / max(weights)) ** (1 / temperature) for weight in weights]
    return [each / sum(scaled) for each in scaled]
