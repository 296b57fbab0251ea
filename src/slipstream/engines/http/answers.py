"""What an endpoint answered, held against what it was sent.

`prompt_logprobs` has an entry for each token that was sent, from the second on: the log-prob of that very token, and of
the k best, among which it may be. Servers were seen that return nothing of it, rows of another request, or rows that
are shifted by one: so every position must hold the token that was sent there, and as many others as were asked for.
What the numbers themselves may be is the business of `engines/score_checks`.

Shapes: N places that were asked about, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.engines.score_checks import TOLERANCE

HIGHEST = 1 << 31
"""No token id reaches it."""
SHOWN = 5


class WrongAnswer(Exception):
    """Says what is wrong."""


@dataclass(frozen=True)
class LogProbs:
    logp_N: NDArray[np.float32]
    """Of the tokens that were sent."""
    ids_NK: NDArray[np.int32]
    logp_NK: NDArray[np.float32]
    """Of the k best, the best first."""


def read(answer: Any, sent: Sequence[int], places: Sequence[int], *, k: int) -> LogProbs:
    """Log-probs of the tokens at these places, and of the k best beside each; all places are checked."""
    rows = _rows(answer)
    if len(rows) != len(sent):
        raise WrongAnswer(f"{len(rows)} rows of prompt_logprobs for {len(sent)} tokens")
    found = [_entries(row, place) for place, row in enumerate(rows[1:], 1)]
    for place, entries in enumerate(found, 1):
        if sent[place] not in entries:
            held = ", ".join(map(str, list(entries)[:SHOWN])) or "nothing"
            raise WrongAnswer(
                f"place {place} holds no log-prob of token {sent[place]}, which was sent there, but of {held} "
                "(other token ids, or a shifted row?)"
            )
    n = len(places)
    logp_N, ids_NK, logp_NK = np.empty(n), np.empty((n, k), np.int32), np.empty((n, k))
    for i, place in enumerate(places):
        entries, token = found[place - 1], sent[place]
        logp_N[i] = entries[token]
        if k:
            best = _best(entries, token, k, place)
            ids_NK[i], logp_NK[i] = [index for index, _ in best], [logp for _, logp in best]
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is found
        return LogProbs(logp_N.astype(np.float32), ids_NK, logp_NK.astype(np.float32))


def _rows(answer: Any) -> list[Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise WrongAnswer("not one choice for one prompt")
    rows = choices[0].get("prompt_logprobs")
    if not isinstance(rows, list):
        raise WrongAnswer("no prompt_logprobs: the server must support them (vLLM does), for token ids as the prompt")
    return rows


def _entries(row: Any, place: int) -> dict[int, float]:
    """Log-probs by token id."""
    try:
        entries = {int(token): number(entry["logprob"]) for token, entry in row.items()}
    except (AttributeError, TypeError, KeyError, ValueError, OverflowError):
        raise WrongAnswer(f"place {place} is not a table of token ids and their log-probs") from None
    if (odd := next((token for token in entries if not 0 <= token < HIGHEST), None)) is not None:
        raise WrongAnswer(f"place {place} holds {odd}, which is no token id")
    return entries


def number(logp: Any) -> float:
    """NaN and infinite ones too, which Python reads from JSON."""
    if isinstance(logp, bool) or not isinstance(logp, int | float):
        raise TypeError
    return float(logp)


def _best(entries: dict[int, float], token: int, k: int, place: int) -> list[tuple[int, float]]:
    """The k best: with one more in the row, that is the token that was sent, and worse than they."""
    if len(entries) not in (k, k + 1):
        raise WrongAnswer(f"place {place} holds {len(entries)} log-probs, asked for were the token's and {k}")
    best = sorted(entries.items(), key=lambda entry: float("inf") if isnan(entry[1]) else -entry[1])
    if len(best) > k:
        if entries[token] > best[-1][1] + TOLERANCE:
            odd = best[-1][0]
            raise WrongAnswer(f"place {place} holds {odd} beside its {k} best, not token {token} (a shifted row?)")
        best = [entry for entry in best if entry[0] != token]
    return best
