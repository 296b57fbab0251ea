"""A teacher on any HF causal LM: one forward pass, then its head where the cache asks for it.

Calls that arrive while a pass runs are scored together in the next one. Its weights stay as they are unless others are
published to it, which happens between two passes.

Shapes: N trained tokens, C rows of a chunk, M cached actions, K top-k, D hidden, V vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config.losses import Cache
from slipstream.engines.base import Context, Loaded, SamePrompt, WeightsRef
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.packing import pack
from slipstream.engines.native.rows import Rows, by_sample, use_rows
from slipstream.engines.trust import failed, scored
from slipstream.engines.weights import fingerprint, load_weights
from slipstream.errors import ModelError, NoContext
from slipstream.estimators.logprobs import HELD, logprobs_at
from slipstream.estimators.numerics import joined
from slipstream.records import Group, Handle, Ints, Rollout, graded

TOGETHER = 0.002
"""Seconds between calls that were made at the same time."""
APART = 0.05
"""Seconds between two passes, if little waits."""


class NativeScorer:
    def __init__(
        self,
        lm: LanguageModel,
        *,
        name: str = "teacher",
        cache: Cache = "sampled",
        k: int = 32,
        temperature: float = 1.0,
        token_budget: int = 16384,
        packing: bool = True,
        vocabulary: int | None = None,
        context: Context | None = None,
        threads: int = 1,
    ) -> None:
        """`vocabulary` is the student's, where the teacher's is padded to more: no id beyond it is ever sent."""
        self.vocabulary = vocabulary or lm.vocab_size
        if cache == "teacher_topk" and k > self.vocabulary:
            raise ModelError(f"loss.k = {k} is more than the vocabulary of {self.vocabulary}")
        self.lm, self.name, self.cache, self.k = lm, name, cache, k
        self.version = 0
        """Of the weights, where any were published."""
        self.context = context or SamePrompt()
        self.temperature, self.token_budget, self.packing = temperature, token_budget, packing
        use_rows(lm, packed=packing, field=f"teachers.{name}.packing")
        self.thread = ThreadPoolExecutor(1, "scorer", initializer=torch.set_num_threads, initargs=(threads,))
        self.waiting: list[tuple[Group, asyncio.Future[list[Handle]]]] = []
        self.driver: asyncio.Task[None] | None = None
        self.ended = 0.0
        """When the last pass did."""
        self.enough = asyncio.Event()
        """Set when so much waits that a pass is not made better by more."""

    async def score(self, group: Group) -> list[Handle]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Handle]] = loop.create_future()
        self.waiting.append((group, answer))
        if self.driver is None or self.driver.done():
            self.enough = asyncio.Event()  # of this loop
            self.driver = loop.create_task(self._drive())
        if sum(handle.header.tokens for group, _ in self.waiting for handle in group) > self.token_budget // 8:
            self.enough.set()
        return await answer

    async def _drive(self) -> None:
        while self.waiting:
            await self._gather()
            taken, self.waiting = [call for call in self.waiting if not call[1].cancelled()], []
            self.enough.clear()
            if taken:
                await self._pass(taken)
            self.ended = asyncio.get_running_loop().time()

    async def _pass(self, calls: Sequence[tuple[Group, asyncio.Future[list[Handle]]]]) -> None:
        """Score these together; if that fails, one by one, so that each hears of its own fault only."""
        handles = [handle for group, _ in calls for handle in group]
        try:
            found = await asyncio.get_running_loop().run_in_executor(self.thread, self._score, handles)
        except Exception as error:
            if len(calls) > 1:
                for call in calls:
                    await self._pass([call])
            elif not calls[0][1].done():
                calls[0][1].set_exception(error)
            return
        for group, answer in calls:
            if not answer.done():
                answer.set_result(found[: len(group)])
            found = found[len(group) :]

    async def _gather(self) -> None:
        """Small passes cost hardly less than larger ones: calls that come close behind one another share one."""
        now = asyncio.get_running_loop().time()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.enough.wait(), max(TOGETHER, self.ended + APART - now))

    async def publish(self, weights: WeightsRef) -> Loaded:
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._load, weights)

    def close(self) -> None:
        self.thread.shutdown()
        self.context.close()

    def _load(self, weights: WeightsRef) -> Loaded:
        began = time.perf_counter()
        load_weights(self.lm.model, weights)
        self.version = weights.version
        found = fingerprint(self.lm.model, weights.manifest[0].dtype)
        return Loaded(found, load=time.perf_counter() - began)

    @torch.inference_mode()
    def _score(self, handles: Sequence[Handle]) -> list[Handle]:
        found = dict[int, Handle]()
        seen = dict[int, Ints]()
        for i, handle in enumerate(handles):
            try:
                seen[i] = self.context(graded(handle), handle.header.attempts)
            except NoContext as error:
                found[i] = failed(handle, f"teacher {self.name} has no context for it: {error}", teacher=self.name)
        answers = self._answered([graded(handles[i]) for i in seen], list(seen.values()))
        for (i, tokens), answer in zip(seen.items(), answers, strict=True):
            found[i] = scored(handles[i], teacher=self.name, version=self.version, seen=tokens, **answer)
        return [found[i] for i in range(len(handles))]

    def _answered(self, rollouts: Sequence[Rollout], contexts: Sequence[Ints]) -> list[dict[str, Any]]:
        """What the cache holds, for every response behind its context."""
        answers: dict[int, dict[str, Any]] = {}
        seen = [with_prompt(rollout, tokens) for rollout, tokens in zip(rollouts, contexts, strict=True)]
        batches = pack(seen, budget=self.token_budget, hidden=self.lm.head.weight.shape[1], packing=self.packing)
        for batch in batches:
            chosen = [rollouts[i] for i in batch.members]
            hidden_ND = Rows(seen, batch, self.lm.device).hidden(self.lm.backbone)
            answers.update(zip(batch.members, self._answers(hidden_ND, chosen), strict=True))
        return [answers[i] for i in range(len(rollouts))]

    def _answers(self, hidden_ND: Tensor, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
        """What the cache holds, for every sample of a micro-batch."""
        ids_NM = joined([self._asked(rollout) for rollout in rollouts], hidden_ND.device, torch.int64)
        logp_NM = self._logp(hidden_ND, ids_NM)
        found = {"teacher_logp": logp_NM[:, 0]}
        match self.cache:
            case "sampled":
                found["teacher_action_logp"] = logp_NM
            case "student_topk":
                found["teacher_best_logp"] = logp_NM[:, 1:]
            case "teacher_topk":
                found |= self._topk(hidden_ND, ids_NM[:, 0], logp_NM[:, 0])
            case "hidden":
                found["teacher_hidden"] = hidden_ND
        parts: dict[str, list[Any]] = {
            name: [_numpy(part) for part in by_sample(value, rollouts)] for name, value in found.items()
        }
        return [{name: part[i] for name, part in parts.items()} for i in range(len(rollouts))]

    def _asked(self, rollout: Rollout) -> Ints:
        """The ids whose log-probs are asked for at every trained position, the emitted one first."""
        if self.cache == "sampled":
            return rollout.actions
        emitted_N1 = rollout.tokens[rollout.loss_mask][:, None]
        if self.cache != "student_topk":
            return emitted_N1
        assert rollout.best_ids is not None, "the sampler recorded no best ids"
        return np.concatenate([emitted_N1, rollout.best_ids], 1)

    def _logp(self, hidden_ND: Tensor, ids_NM: Tensor) -> Tensor:
        hidden_ND, weight, bias = self.lm.head.inputs(hidden_ND)
        return logprobs_at(hidden_ND, weight, ids_NM, bias=bias, temperature=self.temperature, **self.lm.head.bend)

    def _topk(self, hidden_ND: Tensor, tokens_N: Tensor, logp_N: Tensor) -> dict[str, Tensor]:
        ids, logps = [], []
        for hidden_CD in torch.split(hidden_ND, max(1, HELD // self.lm.vocab_size)):
            logits_CV = self.lm.head(hidden_CD).to(logp_N.dtype) / self.temperature
            best = logits_CV[:, : self.vocabulary].topk(self.k, -1)
            ids.append(best.indices.int())
            logps.append(best.values - logits_CV.logsumexp(-1, keepdim=True))
        ids_NK, logp_NK = torch.cat(ids), torch.cat(logps)
        # one number for one token, whichever way it was computed
        return {
            "teacher_ids": ids_NK,
            "teacher_topk_logp": torch.where(ids_NK == tokens_N[:, None], logp_N[:, None], logp_NK),
        }


def with_prompt(rollout: Rollout, tokens: Ints) -> Rollout:
    """The same response, to another prompt."""
    same = tokens is rollout.prompt.tokens
    return rollout if same else replace(rollout, prompt=replace(rollout.prompt, tokens=tokens))


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """bf16 travels as its 16 bits."""
    tensor = tensor.cpu()
    array: np.ndarray[Any, Any] = (
        (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
    )
    return array
