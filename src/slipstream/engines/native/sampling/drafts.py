"""Drafts: proposals for the next tokens of a sequence, which one pass verifies together; no tensors here.

A sampler draws the token of every position from its own distribution, with random numbers of that position, as without
a draft. It keeps the draws up to the first that differs from the draft, because the later ones follow a token that was
not drawn. So a draft changes no token: a proposed token is accepted with its probability, and a token in its place has
the distribution of the others, renormalised. This is rejection sampling with a draft of one certain token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

RARELY = 32
"""Steps from one with drafts to the next, while few of the proposed tokens are accepted."""
MEMORY = 256
"""Number of proposed tokens after which the share of accepted tokens has mostly forgotten older ones."""


class Acceptance:
    """Numbers of proposed and accepted tokens, and the decision whether a step proposes tokens.

    The decision depends on counts alone, and not on time: repeated runs make the same drafts.
    """

    def __init__(self, least: float) -> None:
        self.least, self.share, self.waited = least, 1.0, 0
        """`share`: share of the latest proposed tokens that was accepted, 1 at first."""
        self.drafted = self.accepted = 0

    def pays(self) -> bool:
        """Return whether this step proposes tokens: every step, or one of RARELY if few were accepted."""
        self.waited = 0 if self.share >= self.least else (self.waited + 1) % RARELY
        return self.waited == 0

    def add(self, drafted: int, accepted: int) -> None:
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self.share += (accepted - self.share * drafted) / (drafted + MEMORY)

    def take(self) -> tuple[int, int]:
        """Return the numbers of proposed and accepted tokens since the last call."""
        taken, self.drafted, self.accepted = (self.drafted, self.accepted), 0, 0
        return taken


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
