"""Which samples are computed together: a plan in integers, without a tensor of a model.

A micro-batch is a few rows of about the same length. A row is a sequence of items, and an item is a prompt and the
responses that continue it: one of them, or with shared prompts as many of its group as fit, so that the prompt is
computed once. Nothing of one item ever sees another (rows.py), so any cut gives the same answer; this file looks for a
cheap one.

Rows are filled best-fit-decreasing. They are as long as the longest item, or twice that: longer rows are filled better,
shorter ones mask less attention away, and which of the two is cheaper depends on the model's width. Rows go to
micro-batches by their cost, which for long rows is mostly attention and not their number of tokens.

A model that cannot keep items apart takes one sample a row, right-padded: with causal attention no real token ever sees
a pad, and no mask is needed.

Shapes: B rows, L positions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from numpy.typing import NDArray

from slipstream.records import Rollout

Array = NDArray[Any]
MOST_PADDED = 1.25
"""A micro-batch of several unpacked samples costs at most this times its real tokens."""
ROW_LENGTHS = (1, 2)
"""A row is one of these times as long as the longest item."""


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt and the responses that continue it, by their lengths; `members` are the indices of their samples."""

    prompt: int
    responses: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)

    @property
    def apart(self) -> int:
        """Tokens of its samples, each with a prompt of its own."""
        return len(self.responses) * self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass; without `packed`, one sample each, of a model that must not be given a mask."""

    rows: tuple[tuple[Item, ...], ...]
    packed: bool = True

    @property
    def members(self) -> list[int]:
        """Indices of the samples, in the order in which their predictions come."""
        return [member for row in self.rows for item in row for member in item.members]

    @property
    def length(self) -> int:
        """Of the longest row, to which the others are padded."""
        return max(map(_tokens, self.rows), default=0)

    @property
    def computed(self) -> int:
        """Tokens that go through the model, padding included."""
        return len(self.rows) * self.length

    @property
    def real(self) -> int:
        return sum(map(_tokens, self.rows))


def pack(
    rollouts: Sequence[Rollout],
    *,
    budget: int,
    hidden: int,
    shared_prompt: bool = False,
    packing: bool = True,
    parts: int = 1,
) -> list[MicroBatch]:
    """At least `parts` micro-batches of at most `budget` tokens, padding included, that cost about the same.

    A sample longer than the budget is a micro-batch of its own. If there are more parts than rows, some are empty.
    `hidden` is the model's width, on which the cost of attention relative to all else depends.
    """
    if packing:
        items = shared(rollouts, budget) if shared_prompt else [_single(rollouts, i) for i in range(len(rollouts))]
        batches = spread(fill(items, budget, hidden, parts), budget, hidden, parts)
    else:
        members = micro_batches([full_length(rollout) for rollout in rollouts], budget)
        batches = [MicroBatch(tuple((_single(rollouts, i),) for i in batch), packed=False) for batch in members]
    return batches + [MicroBatch((), packing)] * (parts - len(batches))


def _single(rollouts: Sequence[Rollout], i: int) -> Item:
    return Item(len(rollouts[i].prompt.tokens), (len(rollouts[i].tokens),), (i,))


def _tokens(row: Iterable[Item]) -> int:
    return sum(item.tokens for item in row)


def shared(rollouts: Sequence[Rollout], budget: int) -> list[Item]:
    """One item per prompt; more of them, each with the prompt, where its responses are too many for the budget.

    A branch may begin with other tokens than the rest of its group.
    """
    groups: dict[tuple[int, bytes], list[int]] = {}
    for i, rollout in enumerate(rollouts):
        groups.setdefault((rollout.prompt.number, rollout.prompt.tokens.tobytes()), []).append(i)
    items = []
    for group in groups.values():
        prompt = len(rollouts[group[0]].prompt.tokens)
        for chosen in best_fit([len(rollouts[i].tokens) for i in group], budget - prompt):
            members = tuple(group[i] for i in sorted(chosen))
            items.append(Item(prompt, tuple(len(rollouts[i].tokens) for i in members), members))
    return items


def fill(items: Sequence[Item], budget: int, hidden: int, parts: int = 1) -> list[tuple[Item, ...]]:
    """Rows of items, of the length that costs least; not so long that there are fewer rows than parts."""
    sizes = [item.tokens for item in items]
    longest, most = max(sizes, default=0), -(-sum(sizes) // parts)
    lengths = [min(budget, max(longest, min(times * longest, most))) for times in ROW_LENGTHS]
    filled = {length: best_fit(sizes, length) for length in lengths}
    best = min(filled, key=lambda length: len(filled[length]) * cost(length, hidden))
    return [tuple(items[i] for i in row) for row in filled[best]]


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices: the largest first, each into the fullest bin with room for it, else into a new one."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(rooms, (sizes[i], 0))
        if at < len(rooms):
            room, chosen = rooms.pop(at)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(i)
        insort(rooms, (room - sizes[i], chosen))
    return bins


def cost(tokens: int, hidden: int) -> float:
    """Of a row, in tokens that need no attention: its share of the operations grows as tokens / 6·hidden."""
    return tokens * (1 + tokens / (6 * hidden))


def spread(rows: Sequence[tuple[Item, ...]], budget: int, hidden: int, parts: int = 1) -> list[MicroBatch]:
    """As few micro-batches as the budget allows: the longest row first, each to the one that costs least so far."""
    ordered = sorted(rows, key=_tokens, reverse=True)
    for number in count(max(parts, -(-sum(map(_tokens, rows)) // budget))):
        batches: list[list[tuple[Item, ...]]] = [[] for _ in range(number)]
        costs = [0.0] * number
        for row in ordered:
            # the first row of a micro-batch is its longest
            open_ = [i for i, held in enumerate(batches) if not held or (len(held) + 1) * _tokens(held[0]) <= budget]
            if not open_:
                break
            chosen = min(open_, key=costs.__getitem__)
            batches[chosen].append(row)
            costs[chosen] += cost(_tokens(row), hidden)
        else:
            return [MicroBatch(tuple(batch)) for batch in batches]
    raise AssertionError("a micro-batch for each row is always enough")


def micro_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of samples, longest first, in batches that are padded to at most `budget` tokens and MOST_PADDED."""
    batch: list[int] = []
    longest = tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padded = (len(batch) + 1) * longest
        if batch and (padded > budget or padded > MOST_PADDED * (tokens + lengths[i])):
            yield batch
            batch, tokens = [], 0
        if not batch:
            longest = lengths[i]
        batch.append(i)
        tokens += lengths[i]
    if batch:
        yield batch


def full_length(rollout: Rollout) -> int:
    return len(rollout.prompt.tokens) + len(rollout.tokens)
