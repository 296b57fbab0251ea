"""Lines of samples.jsonl, which show responses as text; they are made in the process that holds the records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from slipstream.protocols import Quote
from slipstream.records import Header, Scored, turns_of, version_runs

Decode = Callable[[Sequence[int]], str]


def quote(header: Header, sample: Scored, update: int, decode: Decode) -> Quote:
    """Return a line of samples.jsonl: texts include special tokens, and log-probs have one entry per trained token."""
    rollout, teacher = sample.rollout, sample.teacher_logp
    trained = rollout.loss_mask
    turns = [("said" if said else "seen", decode(tokens.tolist())) for said, tokens in turns_of(rollout)]
    return {
        "update": update,
        "number": header.number,
        "index": header.index,
        "prompt_id": header.prompt,
        "prompt": decode(rollout.prompt.tokens.tolist()),
        "response": decode(rollout.tokens.tolist()),
        "turns": turns if len(turns) > 1 else None,
        "finish": header.finish,
        "rewards": header.rewards,
        "teacher": header.teacher,
        "teacher_version": sample.teacher_version,
        "attempts": None if header.attempts is None else asdict(header.attempts),
        "context_id": sample.context_id,
        "context": None if sample.context is None else decode(sample.context.tolist()),
        "source": header.source,
        "versions": [] if header.source else version_runs(rollout.versions, trained),
        "tokens": [decode([token]) for token in rollout.tokens[trained].tolist()],
        "logp": rounded(rollout.logp[trained].tolist()),
        "teacher_logp": None if teacher is None else rounded(teacher.tolist()),
    }


def rounded(numbers: Iterable[float]) -> list[float | None]:
    """Round to 4 decimals, and replace NaN and infinite numbers, which JSON cannot hold, by None."""
    return [round(x, 4) if math.isfinite(x) else None for x in numbers]


def as_numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
