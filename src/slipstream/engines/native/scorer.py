"""Score responses with a teacher that is any Hugging Face causal LM; `cache` selects the values that are stored.

Calls that arrive during a pass are scored together in the next pass. New weights are loaded between two passes.

Shapes: N trained tokens, C trained tokens of a chunk, M scored ids per token, K top-k, D hidden, V vocabulary.
"""

import asyncio
import contextlib
import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.config.losses import Cache
from slipstream.engines.native.config import PASS_INTERVAL, PASS_SHARE
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.packing import pack
from slipstream.engines.native.resources import Offloading, compute_thread
from slipstream.engines.native.rows import Rows, by_sample, use_rows
from slipstream.engines.score_checks import Probed, failed, scored
from slipstream.engines.settings import ScorerSettings
from slipstream.engines.weights import fingerprint, load_weights
from slipstream.errors import ModelError, NoContext
from slipstream.estimators.divergence import dense
from slipstream.estimators.logprobs import held, logprobs_at
from slipstream.estimators.logprobs.sampling_support import all_read_as_one, read_as_one, with_ends
from slipstream.estimators.logprobs.tiles import Head, wide
from slipstream.estimators.numerics import joined
from slipstream.protocols import Context, Loaded, SamePrompt, WeightsRef
from slipstream.records import Group, Handle, Ints, Rollout, Scored, graded

GATHER_SECONDS = 0.002
"""Minimum seconds to wait for further calls before a pass, unless enough tokens wait already."""


class Call(NamedTuple):
    group: Group
    again: bool
    answer: asyncio.Future[list[Handle]]


class Needs(NamedTuple):
    """Scores that a loss needs."""

    cache: Cache
    k: int
    temperature: float


class EarlierScores(NamedTuple):
    """Hidden states (in host memory) and head that reproduce the scores of an earlier version of the teacher."""

    hidden_ND: Tensor
    head: Head


class NativeScorer(Probed, Offloading):
    def __init__(self, lm: LanguageModel, plan: ScorerSettings, context: Context | None = None) -> None:
        """Prepare a teacher for scores; `context` writes the prompt that it sees in place of the student's."""
        if plan.spec.cache == "teacher_topk" and plan.spec.k > (most := min(plan.vocabulary, lm.vocab_size)):
            raise ModelError(f"loss.k = {plan.spec.k} is more than the vocabulary of {most}")
        self.lm, self.plan, self.name, self.one_end = lm, plan, plan.name, plan.one_end
        self.needs = {False: Needs(plan.spec.cache, plan.spec.k, plan.temperature)}
        """Scores to compute, by whether a response is for a supervised update."""
        if (supervised := plan.supervised) is not None:
            self.needs[True] = Needs(supervised.cache, supervised.k, plan.supervised_temperature)
        self.version = 0
        """Version of the weights; 0: the initial weights."""
        self.stored = dict[int, WeightsRef]()
        """Published versions with which `relabel` can recompute old scores."""
        self.context = context or SamePrompt()
        use_rows(lm, packed=plan.packing, field=f"teachers.{plan.name}.packing")
        self.thread = compute_thread("scorer", plan.threads)
        self.waiting: list[Call] = []
        self.driver: asyncio.Task[None] | None = None
        self.ended = 0.0
        """Event-loop time at which the last pass ended."""
        self.enough = asyncio.Event()
        """Event that ends the wait for more calls: enough tokens wait for an efficient pass."""

    async def score(self, group: Group) -> list[Handle]:
        return await self._call(group, again=False)

    async def relabel(self, group: Group) -> list[Handle]:
        return await self._call(group, again=True)

    async def publish(self, weights: WeightsRef) -> Loaded:
        async with self.turn():
            return await asyncio.get_running_loop().run_in_executor(self.thread, self._load, weights)

    def on_device(self) -> Iterable[Tensor]:
        parameters: Iterable[Tensor] = self.lm.model.parameters()
        return parameters

    def close(self) -> None:
        self.thread.shutdown()
        self.context.close()

    async def _call(self, group: Group, *, again: bool) -> list[Handle]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Handle]] = loop.create_future()
        async with self.turn():
            self.waiting.append(Call(group, again, answer))
            if self.driver is None or self.driver.done():
                self.enough = asyncio.Event()  # must belong to the current event loop
                self.driver = loop.create_task(self._drive())
            tokens = sum(handle.header.tokens for call in self.waiting for handle in call.group)
            if tokens > self.plan.token_budget // PASS_SHARE:
                self.enough.set()
            return await answer

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        while self.waiting:
            # a small pass costs almost as much as a larger one: wait a short time for further calls
            since = max(0.0, loop.time() - self.ended)  # 0 if another loop, with another clock, ran the last pass
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.enough.wait(), max(GATHER_SECONDS, PASS_INTERVAL - since))
            taken, self.waiting = [call for call in self.waiting if not call.answer.cancelled()], []
            self.enough.clear()
            for again, supervised in product((False, True), self.needs):
                calls = [call for call in taken if call.again == again and is_supervised(call.group) == supervised]
                if calls:
                    await self._pass(calls)
            self.ended = loop.time()

    async def _pass(self, calls: Sequence[Call]) -> None:
        """Score these calls in one pass; if it fails, score each call alone, so that each caller gets its own error."""
        handles, again = [handle for call in calls for handle in call.group], calls[0].again
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self.thread, self._score, handles, again)
        except Exception as error:
            if len(calls) > 1:
                for call in calls:
                    await self._pass([call])
            elif not calls[0].answer.done():
                calls[0].answer.set_exception(error)
            return
        for call in calls:
            if not call.answer.done():
                call.answer.set_result(answers[: len(call.group)])
            answers = answers[len(call.group) :]

    def _load(self, weights: WeightsRef) -> Loaded:
        began = time.perf_counter()
        load_weights(self.lm.model, weights)
        self.version = weights.version
        if self.plan.keep:
            self.stored[self.version] = weights
            for old in sorted(self.stored)[: -self.plan.keep]:
                del self.stored[old]
        checksum = fingerprint(self.lm.model, weights.manifest[0].dtype)
        return Loaded(checksum, load=time.perf_counter() - began)

    @contextlib.contextmanager
    def _under(self, version: int) -> Iterator[None]:
        if version != self.version:
            load_weights(self.lm.model, self.stored[version])
        try:
            yield
        finally:
            if version != self.version:
                load_weights(self.lm.model, self.stored[self.version])

    @torch.no_grad()  # in inference mode FlexAttention would be compiled again
    def _score(self, handles: Sequence[Handle], again: bool = False) -> list[Handle]:
        """Score responses; if `again`, keep those whose scores cannot have changed, and record the KL of the others."""
        seen, answers = self._contexts(handles)
        earlier = dict[int, EarlierScores]()
        if again:
            for i, tokens in list(seen.items()):
                old: Scored = handles[i].body
                if np.array_equal(tokens, old.seen) and old.teacher_version == self.version:
                    del seen[i]
                    answers[i] = Handle(replace(handles[i].header, moved=handles[i].header.moved or 0.0), old)
            earlier = self._earlier({i: handles[i].body for i in seen})
        for i, answer in self._answered(handles, seen, earlier).items():
            if again and i not in earlier:
                answer["supervision_kl"] = np.full(handles[i].body.rollout.trained_tokens, np.nan, np.float32)
            answers[i] = scored(handles[i], teacher=self.name, version=self.version, seen=seen[i], **answer)
        return [answers[i] for i in range(len(handles))]

    def _contexts(self, handles: Sequence[Handle]) -> tuple[dict[int, Ints], dict[int, Handle]]:
        """Return the teacher's context (prompt tokens) by handle index, and failed handles for the others."""
        seen, failures = dict[int, Ints](), dict[int, Handle]()
        for i, handle in enumerate(handles):
            try:
                seen[i] = self.context(graded(handle), handle.header.attempts)
            except NoContext as error:
                failures[i] = failed(handle, f"teacher {self.name} has no context for it: {error}", teacher=self.name)
        return seen, failures

    def _earlier(self, scores: Mapping[int, Scored]) -> dict[int, EarlierScores]:
        """Recompute hidden states and head of earlier scores, by index; skip scores whose weights are not stored."""
        earlier = dict[int, EarlierScores]()
        for version in {old.teacher_version for old in scores.values()} & {self.version, *self.stored}:
            rollouts = {i: old.rollout for i, old in scores.items() if old.teacher_version == version}
            with self._under(version):
                head = self.lm.head if version == self.version else copy.deepcopy(self.lm.head)
                for members, hidden_ND in self._passes(rollouts, {i: scores[i].seen for i in rollouts}):
                    parts = by_sample(hidden_ND, [rollouts[i] for i in members])
                    earlier |= {i: EarlierScores(part.cpu(), head) for i, part in zip(members, parts, strict=True)}
        return earlier

    def _passes(self, rollouts: Mapping[int, Rollout], seen: Mapping[int, Ints]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield, per micro-batch, the indices of its responses and the hidden states that predict trained tokens."""
        indices, samples = list(seen), [with_prompt(rollouts[i], tokens) for i, tokens in seen.items()]
        packing, width = self.plan.packing, self.lm.head.weight.shape[1]
        # a prompt of several responses is read once
        for batch in pack(samples, budget=self.plan.token_budget, hidden=width, packing=packing):
            yield [indices[i] for i in batch.members], Rows(samples, batch, self.lm.device).hidden(self.lm.backbone)

    def _answered(
        self, handles: Sequence[Handle], seen: Mapping[int, Ints], earlier: Mapping[int, EarlierScores]
    ) -> dict[int, dict[str, Any]]:
        """Return the values to cache for each response, by index; add the KL to its scores in `earlier`, if any."""
        rollouts, answers = {i: graded(handles[i]) for i in seen}, dict[int, dict[str, Any]]()
        needs = self.needs[is_supervised(handles)]
        for members, hidden_ND in self._passes(rollouts, seen):
            chosen = [rollouts[i] for i in members]
            answers |= zip(members, self._answers(hidden_ND, chosen, needs), strict=True)
            for i, own_ND in zip(members, by_sample(hidden_ND, chosen), strict=True):
                if i in earlier:
                    kl_N = self._kl_to_earlier(own_ND, earlier[i], needs.temperature)
                    answers[i]["supervision_kl"] = _numpy(kl_N)
        return answers

    def _kl_to_earlier(self, hidden_ND: Tensor, before: EarlierScores, temperature: float) -> Tensor:
        """Return KL(current teacher ‖ earlier teacher) over the whole vocabulary at each trained token."""
        size, now = max(1, held(hidden_ND) // self.lm.vocab_size), self.lm.head
        parts = [
            dense(
                self._log_softmax(now, now_CD, temperature),
                self._log_softmax(before.head, before_CD, temperature),
                kind="reverse",
            )
            for now_CD, before_CD in zip(torch.split(hidden_ND, size), torch.split(before.hidden_ND, size), strict=True)
        ]
        return torch.cat(parts) if parts else hidden_ND.new_zeros(0)

    def _log_softmax(self, head: Head, hidden_CD: Tensor, temperature: float) -> Tensor:
        logits_CV = head(hidden_CD.to(self.lm.device))
        logp_CV = (logits_CV.to(wide(logits_CV)) / temperature).log_softmax(-1)
        return logp_CV if self.one_end is None else all_read_as_one(logp_CV, **self.one_end._asdict())

    def _logprobs_at(self, hidden_ND: Tensor, ids_NM: Tensor, temperature: float) -> Tensor:
        hidden, weight, bias = self.lm.head.inputs(hidden_ND)
        columns = ids_NM if self.one_end is None else with_ends(ids_NM, ends=self.one_end.ends)
        logp_NM = logprobs_at(hidden, weight, columns, bias=bias, temperature=temperature, **self.lm.head.bend)
        return logp_NM if self.one_end is None else read_as_one(logp_NM, ids_NM, **self.one_end._asdict())

    def _answers(self, hidden_ND: Tensor, rollouts: Sequence[Rollout], needs: Needs) -> list[dict[str, Any]]:
        """Return the values to cache for every sample of a micro-batch, as one dict per sample."""
        ids = [scored_ids(rollout, needs.cache) for rollout in rollouts]
        ids_NM = joined(ids, hidden_ND.device, torch.int64)
        if needs.cache == "teacher_topk":
            values = self._topk(hidden_ND, ids_NM, needs)
        else:
            logp_NM = self._logprobs_at(hidden_ND, ids_NM, needs.temperature)
            values = {"teacher_logp": logp_NM[:, 0]}
        match needs.cache:
            case "sampled":
                values["teacher_action_logp"] = logp_NM
            case "student_topk":
                values["teacher_best_logp"] = logp_NM[:, 1:]
            case "hidden":
                values["teacher_hidden"] = hidden_ND
        parts: dict[str, list[Any]] = {
            name: [_numpy(part) for part in by_sample(value, rollouts)] for name, value in values.items()
        }
        return [{name: part[i] for name, part in parts.items()} for i in range(len(rollouts))]

    def _topk(self, hidden_ND: Tensor, tokens_N1: Tensor, needs: Needs) -> dict[str, Tensor]:
        """Return log-probs of emitted and most likely tokens of the same products: others would differ by rounding."""
        size, parts = max(1, held(hidden_ND) // self.lm.vocab_size), list[tuple[Tensor, Tensor, Tensor]]()
        for hidden_CD, tokens_C1 in zip(torch.split(hidden_ND, size), torch.split(tokens_N1, size), strict=True):
            logp_CV = self._log_softmax(self.lm.head, hidden_CD, needs.temperature)
            best = logp_CV[:, : self.plan.vocabulary].topk(needs.k, -1)
            parts.append((logp_CV.gather(1, tokens_C1)[:, 0], best.indices.int(), best.values))
        names = "teacher_logp", "teacher_ids", "teacher_topk_logp"
        return {name: torch.cat(part) for name, part in zip(names, zip(*parts, strict=True), strict=True)}


def scored_ids(rollout: Rollout, cache: Cache) -> Ints:
    """Return the token ids [N, M] to score at each trained position; the first column is the emitted token."""
    if cache == "sampled":
        return rollout.actions
    emitted_N1 = rollout.tokens[rollout.loss_mask][:, None]
    if cache != "student_topk":
        return emitted_N1
    assert rollout.best_ids is not None, "the sampler recorded no best ids"
    return np.concatenate([emitted_N1, rollout.best_ids], 1)


def is_supervised(group: Group) -> bool:
    rollouts = [handle.body.rollout if isinstance(handle.body, Scored) else handle.body for handle in group]
    return any(rollout.prompt.supervised for rollout in rollouts)


def with_prompt(rollout: Rollout, tokens: Ints) -> Rollout:
    same = tokens is rollout.prompt.tokens
    prompt = replace(rollout.prompt, tokens=tokens)
    return rollout if same else replace(rollout, prompt=prompt, router=None, prompt_router=None)


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Convert a tensor to numpy; bfloat16 becomes uint16 with the same bits."""
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    array: np.ndarray[Any, Any] = bits.cpu().numpy().copy()
    return array
