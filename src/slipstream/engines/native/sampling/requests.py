"""Requests to a sampler (one per group of responses), their running rows, and drafts of their next tokens.

A draft proposes tokens, which one pass verifies together. A sampler draws the token of every position from its own
distribution, with random numbers of that position, as without a draft. It keeps the draws up to the first that differs
from the draft, because the later ones follow a token that was not drawn. So a draft changes no token: a proposed token
is accepted with its probability, and a token in its place has the distribution of the others, renormalised. This is
rejection sampling with a draft of one certain token. No tensors here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from slipstream.config.sampler import SpeculationConfig
from slipstream.engines.request_sampler import OpenGroup
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Handle, Ints

FutureResult = tuple[asyncio.Future[Any], Any]
"""A caller's future, and the result to set in this future."""
Lineage = tuple[int, int, float]
"""Identity of a sequence across turns: prompt seed, index, temperature (different for greedy answers)."""
DRAFT_INTERVAL = 32
"""Steps from one with drafts to the next, while few of the proposed tokens are accepted."""
ACCEPTANCE_MEMORY = 256
"""Number of proposed tokens after which the share of accepted tokens has mostly forgotten older ones."""


@dataclass(eq=False)
class Request(OpenGroup):
    """A group whose `parts` are complete responses, and unfinished ones that do not run in a slot."""

    answer: asyncio.Future[list[Handle]] = field(kw_only=True)
    draws: Sampling = field(init=False)
    """Sampling options that affect the choice of a token; requests with equal options share one object."""

    def __post_init__(self) -> None:
        self.draws = interned(replace(self.sampling, max_tokens=1, group=1, park=False))

    @property
    def ids(self) -> bytes:
        """Token ids of the prompt as bytes, to compare prompts."""
        return self.prompt.tokens.astype(np.int64).tobytes()

    @property
    def aborted(self) -> bool:
        """True if the caller of `generate` was cancelled."""
        return self.answer.cancelled()

    def lineage(self, index: int) -> Lineage:
        return self.prompt.seed, index, self.sampling.temperature


@lru_cache(64)
def interned(sampling: Sampling) -> Sampling:
    return sampling


@dataclass(eq=False)
class Row:
    """One running response: its index, and its length in tokens, prompt included."""

    request: Request
    index: int
    length: int
    kept: list[Ints] = field(default_factory=list)
    """Sampling support: the token ids that could be drawn at each position; empty if not requested."""
    lookup: Lookup | None = None
    """All tokens of the row, if drafts for it are looked up in them; None without speculation."""

    @property
    def tokens(self) -> int:
        return self.length - len(self.request.prompt.tokens)

    @property
    def lineage(self) -> Lineage:
        return self.request.lineage(self.index)


def new_row(request: Request, index: int, lookup: int | None) -> Row:
    """Return the row of a response without tokens; drafts continue runs of `lookup` tokens, if given."""
    row = Row(request, index, len(request.prompt.tokens))
    if lookup is not None:
        row.lookup = Lookup(lookup)
        row.lookup.extend(request.prompt.tokens.tolist())
    return row


@dataclass(eq=False)
class Publish:
    weights: WeightsRef
    mode: Mode
    answer: asyncio.Future[Loaded]
    called: float
    """Time of the call from `time.perf_counter`: engines use real time even if the pipeline uses a virtual clock."""


# --- drafts -----------------------------------------------------------------------------------------------------------


class Acceptance:
    """Numbers of proposed and accepted tokens, and the decision whether a step proposes tokens.

    The decision depends on counts alone, and not on time: repeated runs make the same drafts.
    """

    def __init__(self, least: float) -> None:
        self.least, self.share, self.waited = least, 1.0, 0
        """`share`: share of the latest proposed tokens that was accepted, 1 at first."""
        self.drafted = self.accepted = 0

    def pays(self) -> bool:
        """Return whether this step proposes tokens: every step, or one of DRAFT_INTERVAL if few were accepted."""
        self.waited = 0 if self.share >= self.least else (self.waited + 1) % DRAFT_INTERVAL
        return self.waited == 0

    def add(self, drafted: int, accepted: int) -> None:
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.share += (accepted - self.share * drafted) / (drafted + ACCEPTANCE_MEMORY)

    def take(self) -> tuple[int, int]:
        """Return the numbers of proposed and accepted tokens since the last call."""
        taken, self.drafted, self.accepted = (self.drafted, self.accepted), 0, 0
        return taken


class Drafting:
    """Proposals of tokens that occurred before."""

    def __init__(self, settings: SpeculationConfig) -> None:
        self.tokens, self.lookup, self.acceptance = settings.tokens, settings.lookup, Acceptance(settings.least)

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        """Propose tokens for rows in the first slots, within their limits; shorter drafts come first."""
        if not self.acceptance.pays():
            return []
        drafts = list[Draft]()
        for slot, row in enumerate(rows):
            assert row.lookup is not None
            left = row.request.sampling.max_tokens - row.tokens - 1  # one token is drawn after the last proposed one
            if tokens := row.lookup.propose(min(self.tokens, left)):
                drafts.append(Draft(slot, row.length, tokens))
        return sorted(drafts, key=lambda draft: len(draft.tokens))


class Lookup:
    """Tokens of a sequence, and the end of the latest occurrence of every run of `n` tokens in it."""

    def __init__(self, n: int) -> None:
        self.n, self.ids = n, list[int]()
        self.ends = dict[tuple[int, ...], int]()
        self.earlier: int | None = None
        """End of the latest earlier occurrence of the last `n` tokens; None if they are new."""

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.ids.append(token)
            if len(self.ids) >= self.n:
                run = tuple(self.ids[-self.n :])
                self.earlier = self.ends.get(run)
                self.ends[run] = len(self.ids)

    def propose(self, count: int) -> list[int]:
        """Return the next `count` tokens after the earlier occurrence; a draft that reaches its own start repeats."""
        if self.earlier is None:
            return []
        known = self.ids[self.earlier : self.earlier + count]
        return [known[i % len(known)] for i in range(count)]


@dataclass(frozen=True, slots=True)
class Draft:
    slot: int
    first: int
    """Position of the first proposed token."""
    tokens: Sequence[int]


def emitted_draws(tokens: Sequence[int], rows: int, drafts: Sequence[Draft], stops: Collection[int]) -> list[list[int]]:
    """Return which draws each row keeps: the first, and those after proposed tokens that were drawn themselves.

    The first `rows` of the drawn `tokens` follow the newest token of each row. The others follow the proposed tokens,
    draft after draft. A response has no token after one of `stops`.
    """
    found, start = [[row] for row in range(rows)], rows
    for draft in drafts:
        kept = found[draft.slot]
        for i, proposed in enumerate(draft.tokens, start):
            if tokens[kept[-1]] != proposed or proposed in stops:
                break
            kept.append(i)
        start += len(draft.tokens)
    return found
