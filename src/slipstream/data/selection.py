"""Selection of rows: drop copies, treat prompts that are too long, find held-out prompts in the training data."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.data.layouts import told
from slipstream.data.prompts import Row
from slipstream.errors import ConfigError, DataError
from slipstream.records import Ints

FILTER_WORDS = 13
"""Number of equal words in a row by which two prompts overlap."""
COMMON = 10
"""Number of training rows above which these words in a row belong to a template, and are no overlap."""
WORD = re.compile(r"\w+")
Grams = np.ndarray[Any, np.dtype[np.uint64]]


def without_copies(
    rows: Sequence[Row], tokens: Sequence[Ints], *, columns: bool, say: Callable[[str], object]
) -> list[int]:
    """Return the places of rows whose prompt, answer and environment no earlier row has.

    `columns`: compare other columns, too.
    """
    keys = [
        (ids.tobytes(), repr((row.environment, row.ground_truth, row.meta if columns else None)))
        for row, ids in zip(rows, tokens, strict=True)
    ]
    first = {key: place for place, key in reversed(list(enumerate(keys)))}
    copy = next((place for place, key in enumerate(keys) if first[key] != place), None)
    example = "" if copy is None else f": {rows[copy].place} equals {rows[first[keys[copy]]].place}"
    say(f"data.deduplicate: {len(rows) - len(first)} of {len(rows)} rows of data.train are dropped{example}")
    return sorted(first.values())


def fitting(
    rows: Sequence[Any],
    tokens: Sequence[Ints],
    *,
    limit: int,
    how: str,
    special: Sequence[int],
    what: str,
    say: Callable[[str], object],
) -> list[tuple[int, Ints]]:
    """Return place and tokens of the prompts of at most `limit` tokens; longer ones are cut or left out (`how`)."""
    long = [place for place, ids in enumerate(tokens) if len(ids) > limit]
    if long:
        done = {"skip": "left out", "cut_left": "cut on the left", "cut_right": "cut on the right"}[how]
        say(
            f"data.too_long: {len(long)} of {len(rows)} prompts of {what} have more than {limit} tokens and are "
            f"{done}, {rows[long[0]].place or rows[long[0]].id} first"
        )
    if how == "skip":
        found = [(place, ids) for place, ids in enumerate(tokens) if len(ids) <= limit]
    else:
        found = [(place, _cut(ids, limit, how == "cut_left", special)) for place, ids in enumerate(tokens)]
    if limit <= 0:
        raise DataError(f"{what}: sampler.max_tokens leaves no token of the context to a prompt: lower it")
    if not found:
        raise DataError(f"{what}: no prompt has at most {limit} tokens: lower sampler.max_tokens")
    return found


def _cut(ids: Ints, limit: int, left: bool, special: Sequence[int]) -> Ints:
    """Remove tokens from the left or the right side; special tokens of the tokenizer at both ends stay."""
    text = np.flatnonzero(~np.isin(ids, list(special)))
    if len(ids) <= limit or not len(text):
        return ids[:limit]
    begin, end = int(text[0]), int(text[-1]) + 1
    room = limit - begin - (len(ids) - end)
    body = ids[max(end - room, begin) : end] if left else ids[begin : begin + room]
    return np.concatenate([ids[:begin], body, ids[end:]])[:limit]


def difficulties(rows: Sequence[Row], column: str) -> list[float]:
    """Return every row's number in a column; raise an error for another value, or if all are equal."""
    found = []
    for row in rows:
        value = told(row.place, row.meta, column, "data.curriculum.column")
        try:
            number = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError):
            number = float("nan")
        if number != number:
            raise DataError(f"{row.place}: {column!r} is {value!r:.40}, and data.curriculum.column needs a number")
        found.append(number)
    if len(set(found)) == 1:
        raise ConfigError(
            f"data.curriculum.column = {column!r} does nothing: every row has {found[0]:g} there; name another column"
        )
    return found


def overlap_of(
    train: Sequence[Row], train_tokens: Sequence[Ints], held: Sequence[Row], held_tokens: Sequence[Ints]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the held-out rows with the tokens of a training row, and others that share words with one.

    Both are places of held-out rows with the place of such a training row. To share is to have
    `FILTER_WORDS` words in a row.
    """
    places = {ids.tobytes(): place for place, ids in reversed(list(enumerate(train_tokens)))}
    equal = {place: places[ids.tobytes()] for place, ids in enumerate(held_tokens) if ids.tobytes() in places}
    similar = dict[int, int]()
    wanted_G, held_G = _grams(held)
    found_G, train_G = _grams(train)
    if len(wanted_G) and len(found_G):
        known_U, which_G = np.unique(wanted_G, return_inverse=True)
        at_G = np.minimum(np.searchsorted(known_U, found_G), len(known_U) - 1)
        hit_G = known_U[at_G] == found_G
        rows_of = dict[int, set[int]]()
        for gram, row in zip(at_G[hit_G].tolist(), train_G[hit_G].tolist(), strict=True):
            rows_of.setdefault(gram, set()).add(row)
        for place, gram in zip(held_G.tolist(), which_G.tolist(), strict=True):
            if place not in equal and 0 < len(rows_of.get(gram, ())) <= COMMON:
                similar.setdefault(place, min(rows_of[gram]))
    return equal, similar


def _grams(rows: Sequence[Row]) -> tuple[Grams, Ints]:
    """Return a hash of every `FILTER_WORDS` words in a row, and the place of its row. G: grams of all rows."""
    words = [np.fromiter(map(hash, WORD.findall(_text(row).lower())), np.int64) for row in rows]
    flat = np.concatenate(words).view(np.uint64)
    row_W = np.repeat(np.arange(len(words)), [len(each) for each in words])
    count = max(len(flat) - FILTER_WORDS + 1, 0)
    gram_G = np.zeros(count, np.uint64)
    for shift in range(FILTER_WORDS):
        gram_G = gram_G * np.uint64(0x9E3779B97F4A7C15) + flat[shift : shift + count]
    whole_G = row_W[:count] == row_W[len(row_W) - count :]
    return gram_G[whole_G], row_W[:count][whole_G]


def _text(row: Row) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(str(message.get("content") or "") for message in row.prompt)
