"""Scorer for a teacher behind an OpenAI-compatible endpoint; one request holds the ids of a prompt and a response.

The answer's `prompt_logprobs` has a row for each sent token; the first row is empty. A row holds the log-prob of this
token and of the k most likely tokens, which may include this token. Some servers return no rows, rows of another
request, or rows shifted by one. Therefore each row must hold the sent token, and each requested row k or k + 1 tokens.
`engines/score_checks` checks the log-probs.

Shapes: N requested positions, K top-k.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.engines.http.client import Client, Endpoint
from slipstream.engines.score_checks import TOLERANCE, Probed, failed, kl_of_known, probability, scored
from slipstream.engines.settings import ScorerSettings
from slipstream.errors import EndpointError, NoContext
from slipstream.protocols import Context, SamePrompt
from slipstream.records import Floats, Group, Handle, Ints, Rollout, Scored, graded

MAX_TOKEN_ID = 1 << 31
"""Upper bound of token ids, exclusive."""
MAX_LISTED = 5

T = TypeVar("T")


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
    by_place = [_entries(row, place) for place, row in enumerate(rows[1:], 1)]
    for place, entries in enumerate(by_place, 1):
        if sent[place] not in entries:
            listed = ", ".join(map(str, list(entries)[:MAX_LISTED])) or "nothing"
            raise WrongAnswer(
                f"position {place} holds no log-prob of the sent token {sent[place]}, but of {listed} "
                "(other token ids, or a shifted row?)"
            )
    n = len(places)
    logp_N, ids_NK, logp_NK = np.empty(n), np.empty((n, k), np.int32), np.empty((n, k))
    for i, place in enumerate(places):
        entries, token = by_place[place - 1], sent[place]
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
    if (odd := next((token for token in entries if not 0 <= token < MAX_TOKEN_ID), None)) is not None:
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


ENTRY_BYTES = 256
"""Upper bound of the mean bytes per log-prob in an answer, including the token's id, rank and text."""


class HttpScorer(Probed):
    def __init__(self, endpoint: Endpoint, plan: ScorerSettings, context: Context | None = None) -> None:
        """Request the k best tokens per position that the loss needs; if it needs none, only the emitted one."""
        self.client, self.name, self.model = Client(endpoint), endpoint.teacher, endpoint.model
        self.k, self.vocabulary, self.context = plan.spec.k, plan.vocabulary, context or SamePrompt()

    async def score(self, group: Group) -> list[Handle]:
        return await together(self._scored(handle) for handle in group)

    async def relabel(self, group: Group) -> list[Handle]:
        return await together(self._scored(handle, before=handle.body) for handle in group)

    def close(self) -> None:
        """Do nothing: connections are closed with their event loop."""

    async def _scored(self, handle: Handle, before: Scored | None = None) -> Handle:
        """Score a response, and record the KL from earlier scores `before`; return `before` if the context is equal."""
        rollout = graded(handle)
        try:
            seen = self.context(rollout, handle.header.attempts)
        except NoContext as error:
            return failed(handle, f"teacher {self.name} has no context for it: {error}", teacher=self.name)
        if before is not None and np.array_equal(seen, before.seen):
            return Handle(replace(handle.header, moved=handle.header.moved or 0.0), before)
        answer = await self._answer(rollout, seen)
        if before is not None:
            answer["supervision_kl"] = kl_lower_bound(answer, before)
        return scored(handle, teacher=self.name, seen=seen, **answer)

    async def _answer(self, rollout: Rollout, seen: Ints) -> dict[str, Any]:
        tokens, places = [*seen.tolist(), *rollout.tokens.tolist()], len(seen) + np.flatnonzero(rollout.loss_mask)
        try:
            best = await log_probs(self.client, self.model, tokens, places, k=self.k)
            if (best.ids_NK >= self.vocabulary).any():
                raise EndpointError(
                    f"{self.client.where} has token {best.ids_NK.max()} among its best, which the student does not "
                    'have: use a loss on the emitted token (loss.kind = "reverse_kl_mc"), or a local teacher'
                )
        except EndpointError as error:
            where = f"{rollout.prompt.id}/{rollout.index}"
            raise EndpointError(f"{error}; the request was for response {where}", status=error.status) from None
        cached: dict[str, Any] = (
            {"teacher_ids": best.ids_NK, "teacher_topk_logp": best.logp_NK}
            if self.k
            else {"teacher_action_logp": best.logp_N[:, None]}
        )
        return {"teacher_logp": best.logp_N, **cached}


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently; if one fails, cancel the rest. A TaskGroup would lose a cancellation at that moment."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def kl_lower_bound(now: dict[str, Any], before: Scored) -> Floats:
    """Return a lower bound of KL(new ‖ old distribution of the teacher) at every trained position.

    Tokens whose log-prob is known in both scores count separately, and all others count as one token.
    """
    assert before.teacher_logp is not None
    p_NB, q_NB = probability(now["teacher_logp"])[:, None], probability(before.teacher_logp)[:, None]
    if "teacher_ids" in now:
        assert before.teacher_ids is not None and before.teacher_topk_logp is not None
        emitted_N1 = before.rollout.tokens[before.rollout.loss_mask][:, None]
        same_NKK = now["teacher_ids"][:, :, None] == before.teacher_ids[:, None, :]
        both_NK = same_NKK.any(2) & (now["teacher_ids"] != emitted_N1)
        then_NK = (same_NKK * probability(before.teacher_topk_logp)[:, None, :]).sum(2)
        p_NB = np.concatenate([p_NB, probability(now["teacher_topk_logp"]) * both_NK], 1)
        q_NB = np.concatenate([q_NB, then_NK * both_NK], 1)
    return kl_of_known(p_NB, q_NB)


async def log_probs(client: Client, model: str, sent: list[int], places: Ints, *, k: int) -> LogProbs:
    """Request log-probs of the tokens at `places`; the one token that a server must generate is discarded."""
    body = {"model": model, "prompt": sent, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}
    answer = await client.ask("POST", "/completions", body, expected=ENTRY_BYTES * len(sent) * (k + 1))
    try:
        return await asyncio.to_thread(read, answer, sent, places.tolist(), k=k)
    except WrongAnswer as error:
        raise EndpointError(f"{client.where} gives a wrong answer: {error}") from None
