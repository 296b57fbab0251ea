"""Plan which samples are computed in one forward pass; works on lengths only, without tensors.

A micro-batch is a few rows. A row is a sequence of items. An item is a prompt and one response, or a prompt with as
many responses of its group as fit: the prompt is then computed once. Attention never crosses items, nor the responses
of an item (rows.py), so every plan gives the same results. This file searches for a cheap plan.

Rows are filled best-fit-decreasing, up to a small multiple of the length of the longest item. Longer rows are filled
better; shorter rows compute less masked attention. The model's width decides which rows are cheaper. Rows are assigned
to micro-batches by cost and not by length, because a long row costs mostly attention.

A model that cannot separate items gets one sample per row, padded on the right. Because attention is causal, no real
token sees a pad, and no mask is needed.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from slipstream.records import Rollout

MOST_PADDED = 1.25
"""Maximum ratio of computed tokens (with padding) to real tokens in a micro-batch of several unpacked samples."""
ROW_LENGTHS = (1, 2, 4, 8)
"""Candidate row lengths, as multiples of the longest item."""


@dataclass(frozen=True, slots=True)
class Item:
    """Lengths of a prompt and of responses to this prompt; `members` are the sample indices of the responses."""

    prompt: int
    responses: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)

    @property
    def apart(self) -> int:
        """Number of tokens if every response had its own copy of the prompt."""
        return len(self.responses) * self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass. If `packed` is False, each row is one sample and the model gets no mask."""

    rows: tuple[tuple[Item, ...], ...]
    packed: bool = True

    @property
    def members(self) -> list[int]:
        """Indices of the samples, in the order of `Rows.hidden`: row by row, item by item."""
        return [member for row in self.rows for item in row for member in item.members]

    @property
    def length(self) -> int:
        """Number of tokens of the longest row; shorter rows are padded to this length."""
        return max(map(_tokens, self.rows), default=0)

    @property
    def computed(self) -> int:
        """Number of tokens that the model computes, padding included."""
        return len(self.rows) * self.length

    @property
    def real(self) -> int:
        return sum(map(_tokens, self.rows))


def pack(
    rollouts: Sequence[Rollout],
    *,
    budget: int,
    hidden: int,
    packing: bool = True,
    shared_prompt: bool = True,
) -> list[MicroBatch]:
    """Return micro-batches of similar cost, each with at most `budget` tokens, padding included.

    A sample longer than the budget becomes a micro-batch of its own. The relative cost of attention depends on
    `hidden`, the model's width.
    """
    if packing and shared_prompt:
        return spread(fill(shared(rollouts, budget), budget, hidden), budget, hidden)
    items = [Item(len(each.prompt.tokens), (len(each.tokens),), (i,)) for i, each in enumerate(rollouts)]
    if packing:
        return spread(fill(items, budget, hidden), budget, hidden)
    batches = micro_batches([item.tokens for item in items], budget)
    return [MicroBatch(tuple((items[i],) for i in members), packed=False) for members in batches]


def _tokens(row: Iterable[Item]) -> int:
    return sum(item.tokens for item in row)


def shared(rollouts: Sequence[Rollout], budget: int) -> list[Item]:
    """Return one item per prompt with all its responses, or several items if one would exceed the budget.

    Prompts whose tokens went to different experts count as different prompts.
    """
    groups: dict[tuple[int, bytes, bytes], list[int]] = {}
    for i, rollout in enumerate(rollouts):
        earlier, rest = rollout.prompt_router, rollout.router
        routed = b"" if earlier is None or rest is None else earlier.tobytes() + rest[:1].tobytes()
        groups.setdefault((rollout.prompt.number, rollout.prompt.tokens.tobytes(), routed), []).append(i)
    items = []
    for group in groups.values():
        prompt = len(rollouts[group[0]].prompt.tokens)
        for chosen in best_fit([len(rollouts[i].tokens) for i in group], budget - prompt):
            members = tuple(group[i] for i in sorted(chosen))
            items.append(Item(prompt, tuple(len(rollouts[i].tokens) for i in members), members))
    return items


def fill(items: Sequence[Item], budget: int, hidden: int) -> list[tuple[Item, ...]]:
    """Return rows of items; the maximum length of a row is the cheaper one of ROW_LENGTHS."""
    sizes = [item.tokens for item in items]
    longest = max(sizes, default=0)
    lengths = [min(budget, times * longest, sum(sizes)) for times in ROW_LENGTHS]
    filled = {length: best_fit(sizes, length) for length in lengths}
    best = min(filled, key=lambda length: len(filled[length]) * cost(length, hidden))
    return [tuple(items[i] for i in row) for row in filled[best]]


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of indices: each size, largest first, goes to the fullest bin with enough room, or to a new bin."""
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
    """Return the relative cost of a row: each token costs 1, and its attention costs tokens / (6 · hidden) more."""
    return tokens * (1 + tokens / (6 * hidden))


def spread(rows: Sequence[tuple[Item, ...]], budget: int, hidden: int) -> list[MicroBatch]:
    """Return micro-batches; each row, longest first, goes to the cheapest micro-batch with room."""
    ordered = sorted(rows, key=_tokens, reverse=True)
    for number in count(-(-sum(map(_tokens, rows)) // budget)):
        batches: list[list[tuple[Item, ...]]] = [[] for _ in range(number)]
        costs = [0.0] * number
        for row in ordered:
            # the first row of a micro-batch is its longest
            fits = [i for i, batch in enumerate(batches) if not batch or (len(batch) + 1) * _tokens(batch[0]) <= budget]
            if not fits:
                break
            chosen = min(fits, key=costs.__getitem__)
            batches[chosen].append(row)
            costs[chosen] += cost(_tokens(row), hidden)
        else:
            return [MicroBatch(tuple(batch)) for batch in batches if batch]
    raise AssertionError("a micro-batch for each row is always enough")


def micro_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield batches of sample indices, longest first, limited to `budget` padded tokens and the ratio MOST_PADDED."""
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
