"""Sampler that asks a model behind an OpenAI-compatible server; for evaluation, as no weights can be published to it.

The server must return token ids for prompts of token ids (`return_token_ids`), as vLLM does. Log-probs are not asked
for and are 0 in the records, because evaluation does not read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from slipstream.engines.http.answers import WrongAnswer
from slipstream.engines.http.client import Client
from slipstream.engines.native.config import vocabulary_of
from slipstream.engines.server.api import NO_FIELD, TOKEN, Drawn, Served, checked, named
from slipstream.engines.server.sampler import rollout_of
from slipstream.errors import EndpointError, EngineError
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Group, Handle, Prompt, Rollout, derive_seed, header_of


class CompletionsSampler:
    def __init__(self, settings: Served, *, stop_ids: Collection[int]) -> None:
        self.settings, self.ends = settings, sorted(stop_ids)
        self.client, self.vocabulary = Client(settings.endpoint), vocabulary_of(settings.model)

    def close(self) -> None:
        """Do nothing: connections are closed with their event loop."""

    async def release(self, numbers: Collection[int] = ()) -> None:
        """Do nothing: no response is continued elsewhere."""

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        raise EngineError(f"{self.client.where} takes no weights")

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        members = range(prompt.first, prompt.first + sampling.group)
        try:
            rollouts = await asyncio.gather(*(self._draw(prompt, index, sampling) for index in members))
        except EndpointError as error:
            raise EngineError(str(error)) from None
        return [Handle(header_of(rollout), rollout) for rollout in rollouts]

    async def _draw(self, prompt: Prompt, index: int, sampling: Sampling) -> Rollout:
        options = {each: getattr(sampling, each) for each in ("max_tokens", "temperature", "top_p", "top_k", "min_p")}
        seed = derive_seed(prompt.seed, index, *((prompt.offset,) if prompt.offset else ()))
        body = {"model": self.settings.endpoint.model, "prompt": prompt.tokens.tolist(), **options, "seed": seed}
        body |= {"stop_token_ids": self.ends, "ignore_eos": True, "return_token_ids": True}
        answer = await self.client.ask("POST", "/completions", body, expected=TOKEN * sampling.max_tokens)
        try:
            (choice,) = answer["choices"]
            if (tokens := choice.get("token_ids")) is None:
                raise WrongAnswer("no token_ids: the server must support return_token_ids, as vLLM does")
            logps, used = [(token, 0.0) for token in tokens], answer["usage"]["completion_tokens"]
            drawn = checked(
                Drawn(tokens, logps, used, choice["finish_reason"], ""), sampling, self.ends, self.vocabulary
            )
        except (WrongAnswer, *NO_FIELD) as error:
            raise EndpointError(f"{self.client.where} gives a wrong answer: {named(error)}") from None
        return rollout_of(prompt, index, drawn, 0, greedy=True)
