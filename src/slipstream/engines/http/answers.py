"""Parser for an endpoint's answer, which compares the answer with the tokens that were sent.

`prompt_logprobs` has a row for each sent token; the first row is empty. A row holds the log-prob of this token and of
the k most likely tokens, which may include this token. Some servers return no rows, rows of another request, or rows
shifted by one. Therefore each row must hold the sent token, and each requested row k or k + 1 tokens.
`engines/score_checks` checks the log-probs.

Shapes: N requested positions, K top-k.
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
"""Upper bound of token ids, exclusive."""
SHOWN = 5


class WrongAnswer(Exception):
    """Answer that does not fit the request; the message describes the error."""


@dataclass(frozen=True)
class LogProbs:
    logp_N: NDArray[np.float32]
    """Log-probs of the sent tokens at the requested positions."""
    ids_NK: NDArray[np.int32]
    logp_NK: NDArray[np.float32]
    """Log-probs of the k most likely tokens, in descending order."""


def read(answer: Any, sent: Sequence[int], places: Sequence[int], *, k: int) -> LogProbs:
    """Return log-probs of the tokens at `places` and of the k best tokens at these positions; check all positions."""
    rows = _rows(answer)
    if len(rows) != len(sent):
        raise WrongAnswer(f"{len(rows)} rows of prompt_logprobs for {len(sent)} tokens")
    found = [_entries(row, place) for place, row in enumerate(rows[1:], 1)]
    for place, entries in enumerate(found, 1):
        if sent[place] not in entries:
            listed = ", ".join(map(str, list(entries)[:SHOWN])) or "nothing"
            raise WrongAnswer(
                f"position {place} holds no log-prob of the sent token {sent[place]}, but of {listed} "
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
    # numbers too large for float32 become infinite, and `engines/score_checks` reports them
    with np.errstate(over="ignore"):
        return LogProbs(logp_N.astype(np.float32), ids_NK, logp_NK.astype(np.float32))


def _rows(answer: Any) -> list[Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise WrongAnswer("it must have exactly one choice for one prompt")
    rows = choices[0].get("prompt_logprobs")
    if not isinstance(rows, list):
        raise WrongAnswer("no prompt_logprobs: the server must support them for prompts of token ids, as vLLM does")
    return rows


def _entries(row: Any, place: int) -> dict[int, float]:
    try:
        entries = {int(token): number(entry["logprob"]) for token, entry in row.items()}
    except (AttributeError, TypeError, KeyError, ValueError, OverflowError):
        raise WrongAnswer(f"position {place} is not a table of token ids and their log-probs") from None
    if (odd := next((token for token in entries if not 0 <= token < HIGHEST), None)) is not None:
        raise WrongAnswer(f"position {place} holds {odd}, which is not a token id")
    return entries


def number(logp: Any) -> float:
    """Return a number as a float, including NaN and infinity, which Python reads from JSON; else raise TypeError."""
    if isinstance(logp, bool) or not isinstance(logp, int | float):
        raise TypeError
    return float(logp)


def _best(entries: dict[int, float], token: int, k: int, place: int) -> list[tuple[int, float]]:
    """Return the k best entries of a row; a further entry must be the sent token, with a lower log-prob."""
    if len(entries) not in (k, k + 1):
        raise WrongAnswer(f"position {place} holds {len(entries)} log-probs, but the request was for the token and {k}")
    best = sorted(entries.items(), key=lambda entry: float("inf") if isnan(entry[1]) else -entry[1])
    if len(best) > k:
        if entries[token] > best[-1][1] + TOLERANCE:
            odd = best[-1][0]
            raise WrongAnswer(f"position {place} adds {odd} to its {k} best, not token {token} (a shifted row?)")
        best = [entry for entry in best if entry[0] != token]
    return best
