"""Scorer for a teacher behind an OpenAI-compatible endpoint; one request holds the ids of a prompt and a response.

The answer's `prompt_logprobs` hold the teacher's log-prob of each sent token, and if `k` is not 0, those of the k
best tokens. The log-prob of the emitted token is always included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.engines.http.answers import HIGHEST, LogProbs, WrongAnswer, read
from slipstream.engines.http.client import Client, Endpoint
from slipstream.engines.score_checks import FLOOR, Probed, failed, scored
from slipstream.errors import EndpointError, NoContext
from slipstream.protocols import Context, SamePrompt
from slipstream.records import Floats, Group, Handle, Ints, Rollout, Scored, graded

TINY = 1e-12
"""Lower bound for the probability of a token, or of all other tokens together, because answers are rounded."""
ENTRY = 256
"""Upper bound of the mean bytes per log-prob in an answer, including the token's id, rank and text."""


class HttpScorer(Probed):
    def __init__(
        self,
        endpoint: Endpoint,
        *,
        k: int = 0,
        vocabulary: int = HIGHEST,
        context: Context | None = None,
    ) -> None:
        """Request the `k` best tokens per position (0: only the emitted one); `vocabulary` is the student's size."""
        self.client, self.name, self.model = Client(endpoint), endpoint.teacher, endpoint.model
        self.k, self.vocabulary, self.context = k, vocabulary, context or SamePrompt()

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
        found = await self._answer(rollout, seen)
        if before is not None:
            found["supervision_kl"] = kl_lower_bound(found, before)
        return scored(handle, teacher=self.name, seen=seen, **found)

    async def _answer(self, rollout: Rollout, seen: Ints) -> dict[str, Any]:
        sent, places = [*seen.tolist(), *rollout.tokens.tolist()], len(seen) + np.flatnonzero(rollout.loss_mask)
        try:
            found = await log_probs(self.client, self.model, sent, places, k=self.k)
            if (found.ids_NK >= self.vocabulary).any():
                raise EndpointError(
                    f"{self.client.where} has token {found.ids_NK.max()} among its best, which the student does not "
                    'have: use a loss on the emitted token (loss.kind = "reverse_kl_mc"), or a local teacher'
                )
        except EndpointError as error:
            where = f"{rollout.prompt.id}/{rollout.index}"
            raise EndpointError(f"{error}; the request was for response {where}", status=error.status) from None
        cached: dict[str, Any] = (
            {"teacher_ids": found.ids_NK, "teacher_topk_logp": found.logp_NK}
            if self.k
            else {"teacher_action_logp": found.logp_N[:, None]}
        )
        return {"teacher_logp": found.logp_N, **cached}


async def together(calls: Iterable[Coroutine[Any, Any, Handle]]) -> list[Handle]:
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
    p_NB, q_NB = (np.concatenate([x, 1 - x.sum(1, keepdims=True)], 1).clip(TINY) for x in (p_NB, q_NB))
    kl_N: Floats = (p_NB * np.log(p_NB / q_NB)).sum(1)
    return kl_N.clip(0).astype(np.float32)


def probability(logp: Floats) -> Floats:
    found: Floats = np.exp(logp.astype(np.float64).clip(FLOOR, 0))
    return found


async def log_probs(client: Client, model: str, sent: list[int], places: Ints, *, k: int) -> LogProbs:
    """Request log-probs of the tokens at `places`; the one token that a server must generate is discarded."""
    body = {"model": model, "prompt": sent, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}
    answer = await client.ask("POST", "/completions", body, expected=ENTRY * len(sent) * (k + 1))
    try:
        return await asyncio.to_thread(read, answer, sent, places.tolist(), k=k)
    except WrongAnswer as error:
        raise EndpointError(f"{client.where} gives a wrong answer: {error}") from None
