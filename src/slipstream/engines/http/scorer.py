"""A teacher behind an OpenAI-compatible endpoint: each response, as token ids after its prompt, is one request.

The answer to `prompt_logprobs` is the teacher's log-prob of every token that was sent, and with `teacher_topk` of its k
best: the emitted token comes besides them, also where it is not among them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from slipstream.engines.base import Context, SamePrompt
from slipstream.engines.http.answers import HIGHEST, LogProbs, WrongAnswer, read
from slipstream.engines.http.client import Client, Endpoint
from slipstream.engines.trust import scored
from slipstream.errors import EndpointError
from slipstream.records import Group, Handle, Ints, graded

ENTRY = 256
"""Bytes, at most and on average, of one log-prob in an answer: its id, rank and text are there too."""


class HttpScorer:
    def __init__(
        self,
        endpoint: Endpoint,
        *,
        k: int = 0,
        vocabulary: int = HIGHEST,
        context: Context | None = None,
    ) -> None:
        """`k` of the teacher's best tokens with each position; without, the emitted token's log-prob alone.

        `vocabulary` is the student's.
        """
        self.client, self.name, self.model = Client(endpoint), endpoint.teacher, endpoint.model
        self.k, self.vocabulary, self.context = k, vocabulary, context or SamePrompt()

    async def score(self, group: Group) -> list[Handle]:
        # not a TaskGroup, which loses a cancellation that comes together with an error
        asked = [asyncio.create_task(self._score(handle)) for handle in group]
        try:
            return list(await asyncio.gather(*asked))
        finally:
            for task in asked:
                task.cancel()

    def close(self) -> None:
        """Connections end with the event loop that made them."""

    async def _score(self, handle: Handle) -> Handle:
        rollout = graded(handle)
        try:
            prefix = self.context(rollout, handle.header.attempts)
            sent, places = [*prefix.tolist(), *rollout.tokens.tolist()], len(prefix) + np.flatnonzero(rollout.loss_mask)
            found = await log_probs(self.client, self.model, sent, places, k=self.k)
            if (found.ids_NK >= self.vocabulary).any():
                raise EndpointError(
                    f"{self.client.where} names token {found.ids_NK.max()} among its best, which the student does not "
                    'have: write a loss on the emitted token (loss.kind = "reverse_kl_mc"), or run the teacher here'
                )
        except EndpointError as error:
            where = f"{rollout.prompt.id}/{rollout.index}"
            raise EndpointError(f"{error}; it was asked about {where}", status=error.status) from None
        cached: dict[str, Any] = (
            {"teacher_ids": found.ids_NK, "teacher_topk_logp": found.logp_NK}
            if self.k
            else {"teacher_action_logp": found.logp_N[:, None]}
        )
        return scored(handle, teacher=self.name, seen=prefix, teacher_logp=found.logp_N, **cached)


async def log_probs(client: Client, model: str, sent: list[int], places: Ints, *, k: int) -> LogProbs:
    """Of the tokens at these places. The one token that a server generates at least is thrown away."""
    body = {"model": model, "prompt": sent, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}
    answer = await client.ask("POST", "/completions", body, expected=ENTRY * len(sent) * (k + 1))
    try:
        return await asyncio.to_thread(read, answer, sent, places.tolist(), k=k)
    except WrongAnswer as error:
        raise EndpointError(f"{client.where} gives a wrong answer: {error}") from None
