"""Scorer that runs a teacher in vLLM; one request returns log-probs for the tokens of a prompt and a response.

Every runner of vLLM returns log-probs of the emitted token and of the k best. Only the V2 runner on GPUs returns
log-probs of any other tokens, which losses with several draws need.

Shapes: T tokens, N trained tokens, M draws (tokens sampled at the same position), K top-k.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from slipstream.engines.http.scorer import together
from slipstream.engines.score_checks import Probed, scored
from slipstream.engines.settings import ScorerSettings
from slipstream.engines.vllm.core import Core, Settings
from slipstream.errors import ModelError
from slipstream.protocols import Context, SamePrompt
from slipstream.records import Group, Handle, Ints, Rollout, graded


class VllmScorer(Probed):
    def __init__(self, settings: Settings, plan: ScorerSettings, context: Context | None = None) -> None:
        """Start vLLM to score the k best tokens that the loss needs, or the draws if it needs none."""
        self.name, self.model, self.vocabulary = plan.name, settings.model, plan.vocabulary
        self.k, self.draws = plan.spec.k, plan.spec.draws
        self.context = context or SamePrompt()
        self.core = Core(settings, {"max_logprobs": max(self.k, self.draws), "enable_prefix_caching": False})
        self.numbers = count()

    def close(self) -> None:
        self.core.close()

    async def score(self, group: Group) -> list[Handle]:
        return await self.core.call(together(self._one(handle) for handle in group))

    async def _one(self, handle: Handle) -> Handle:
        rollout = graded(handle)
        prefix = self.context(rollout, handle.header.attempts)
        return scored(handle, teacher=self.name, seen=prefix, **await self._caches(rollout, prefix))

    async def _caches(self, rollout: Rollout, prefix: Ints) -> dict[str, Any]:
        tokens = [*prefix.tolist(), *rollout.tokens.tolist()]
        if len(tokens) >= self.core.context:  # vLLM needs room for one generated token
            raise ModelError(
                f"teacher {self.name}: prompt {rollout.prompt.id} and its response have {len(tokens)} tokens, and vLLM "
                f"scores at most {self.core.context - 1} by {self.model}"
            )
        options: dict[str, Any] = {"prompt_logprobs": self.k}
        if self.draws > 1:
            # vLLM needs the same number of ids for every token; for tokens that are not trained any ids will do
            ids_TM = np.repeat(rollout.tokens[:, None], self.draws, 1)
            ids_TM[rollout.loss_mask] = rollout.actions
            options = {"prompt_logprob_token_ids": ids_TM, "prompt_logprob_start": len(prefix) - 1}
        output = await self.core.request(tokens, str(next(self.numbers)), max_tokens=1, **options)
        trained = np.flatnonzero(rollout.loss_mask)
        if self.draws > 1:
            logp_NM = np.array(output.prompt_token_id_logprobs, np.float32)[trained]
            return {"teacher_logp": logp_NM[:, 0], "teacher_action_logp": logp_NM}
        rows = len(prefix) - 1 + trained  # the first token has no log-prob
        logp_NK = np.array(output.prompt_logprobs.logprobs, np.float32).reshape(len(tokens) - 1, -1)[rows]
        if not self.k:
            return {"teacher_logp": logp_NK[:, 0], "teacher_action_logp": logp_NK}
        ids_NK = np.array(output.prompt_logprobs.token_ids, np.int32).reshape(len(tokens) - 1, -1)[rows, 1:]
        if (ids_NK >= self.vocabulary).any():
            raise ModelError(
                f"teacher {self.name}: the best tokens of {self.model} include some that the student does not have; "
                f"write teachers.{self.name}.engine = 'native', which leaves them out"
            )
        return {"teacher_logp": logp_NK[:, 0], "teacher_ids": ids_NK, "teacher_topk_logp": logp_NK[:, 1:]}
