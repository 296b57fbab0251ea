"""Read responses that exist before the run: the answers of the data, and a file of trajectories with log-probs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.data.prompts import Row
from slipstream.data.sources import json_rows
from slipstream.data.tokenizers import Tokenizer, encode_texts
from slipstream.errors import DataError, did_you_mean
from slipstream.records import Finish, Given

LINE = '{"prompt": "id of a row", "tokens": [5, 7, 2], "logp": [-0.1, -1.2, -0.3]}'
LOWEST = -999.0
"""Log-probs from here on are placeholders for unknown values; no softmax gets so low."""


@dataclass(frozen=True)
class Limits:
    """Bounds of a trajectory: ids of the student, at most `longest` tokens, and none after an end token."""

    vocabulary: int
    longest: int
    stops: Collection[int]


def answers_of(rows: Sequence[Row], tokenizer: Tokenizer, *, end: int, limits: Limits) -> list[Given]:
    """Return every row's answer as tokens with the end token; an answer beyond the longest is cut, without it.

    An answer may have an end token already, as its last one.
    """
    for row in rows:
        if not (row.response or "").strip():
            raise DataError(
                f'{row.place}: has no answer in text, from which [sft] and [mix] learn with source = "data": name its '
                'column in data.response, or write source = "teacher"'
            )
    found, texts = list[Given](), [str(row.response) for row in rows]
    for row, ids in zip(rows, encode_texts(texts, rows, tokenizer, special=False, what="answer"), strict=True):
        if max(ids, default=0) >= limits.vocabulary:
            raise DataError(f"{row.place}: token {max(ids)} of the answer is beyond the {limits.vocabulary} embeddings")
        whole = [*ids] if ids and ids[-1] in limits.stops else [*ids, end]
        if (early := next((token for token in whole[:-1] if token in limits.stops), None)) is not None:
            raise DataError(f"{row.place}: the answer has the end token {early} before its end")
        finish: Finish = "eos" if len(whole) <= limits.longest else "length"
        tokens = np.array(whole[: limits.longest], np.int32)
        found.append(Given(tokens, np.full(len(tokens), np.nan, np.float32), finish))
    return found


def read_trajectories(
    path: str, rows: Sequence[Row], limits: Limits, *, least: int, drawn: bool
) -> dict[int, Sequence[Given]]:
    """Read a JSONL file of trajectories; raise DataError, with its line, for the first that is wrong.

    Every prompt needs at least `least` trajectories. If `drawn` is True, every token needs its log-prob under the
    policy that drew it; otherwise a line may leave log-probs out.
    """
    indices: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(row.id, []).append(index)
    found: dict[str, list[Given]] = {}
    needed = ("prompt", "tokens", "logp") if drawn else ("prompt", "tokens")
    for where, entry in json_rows(path):
        if not isinstance(entry, dict) or any(entry.get(name) is None for name in needed):
            raise DataError(f"{where}: expected an object such as {LINE}")
        if (prompt := str(entry["prompt"])) not in indices:
            raise DataError(f"{where}: no row of the data has the id {prompt!r}; {did_you_mean(prompt, indices)}")
        if fault := fault_of(entry["tokens"], entry.get("logp"), limits):
            raise DataError(f"{where}: {fault}")
        tokens = np.array(entry["tokens"], np.int32)
        logp = np.full(len(tokens), np.nan) if entry.get("logp") is None else np.array(entry["logp"])
        ended = int(tokens[-1]) in limits.stops
        given = Given(tokens, logp.astype(np.float32), "eos" if ended else "length")
        found.setdefault(prompt, []).append(given)
    for row in rows:
        if (count := len(found.get(row.id, ()))) < least:
            raise DataError(
                f"{row.place}: {path} has {count} trajectories of prompt {row.id!r}, and every prompt needs {least}: "
                f"add them, or lower {'sampler.group or ' if drawn else ''}data.limit"
            )
    return {index: found[each] for each, its in indices.items() for index in its}


def fault_of(tokens: Any, logp: Any, limits: Limits) -> str:
    """Return what is wrong with a trajectory; empty if nothing is. `logp` is None if the log-probs are unknown."""
    logp = [0.0] * len(tokens) if logp is None and isinstance(tokens, list) else logp
    if not isinstance(tokens, list) or not tokens or not isinstance(logp, list):
        return "tokens and logp must be lists, and not empty"
    if len(tokens) != len(logp):
        return f"{len(tokens)} tokens and {len(logp)} log-probs: each token needs one"
    if len(tokens) > limits.longest:
        return f"{len(tokens)} tokens are more than sampler.max_tokens = {limits.longest}"
    for place, (token, value) in enumerate(zip(tokens, logp, strict=True)):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limits.vocabulary:
            return f"token {token!r} at position {place} is no id below {limits.vocabulary}"
        if token in limits.stops and place < len(tokens) - 1:
            return f"token {token} at position {place} is an end token, and others follow"
        if isinstance(value, bool) or not isinstance(value, int | float) or not LOWEST < value <= 0:
            return f"log-prob {value!r} at position {place} is no usable number of at most 0"
    if tokens[-1] not in limits.stops and len(tokens) < limits.longest:
        return f"ends without an end token after {len(tokens)} tokens, fewer than sampler.max_tokens"
    return ""
