"""Sampler that uses vLLM: token ids in and out, one request for every member of a group, weights change between tokens.

A publish pauses vLLM at a token boundary and clears its prefix cache, and `Loading` then replaces all weights or the
adapter. vLLM labels every token with the version that sampled it. In keep mode running requests continue, and their
prefixes are computed again with the new weights. In restart mode vLLM aborts the requests, and new ones follow.

vLLM has one stream of random numbers per request. The continuation of a response is a new request, whose stream depends
on seed, index and position. It is reproducible, but differs from the tokens of a single request. vLLM's prefix cache
serves tokens that requests share; `Sampling.park` has no effect.

Methods called by `generate` and `publish` run on the loop of `Core`.

Shapes: T tokens, M draws (tokens sampled at the same position, the emitted token first), K ids of the support.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.engines.native.config import vocabulary_of
from slipstream.engines.request_sampler import FINISHES, OpenGroup, RequestSampler, check_length, finished
from slipstream.engines.settings import SamplerSettings
from slipstream.engines.vllm.core import COLDEST, Core, Settings, failed, known, version
from slipstream.engines.vllm.loading import Loading
from slipstream.engines.weights import check_fits
from slipstream.errors import EngineError, NonFiniteError
from slipstream.protocols import Fingerprint, Loaded, Mode, Sampling, WeightsRef
from slipstream.records import (
    Group,
    Handle,
    Ints,
    Prompt,
    Rollout,
    SamplingSupport,
    derive_seed,
    one_turn,
    support_from_ids,
)

WRAPPED = re.compile(r".*Worker failed with error '(.*)', please check .*", re.DOTALL)
"""Error of a worker, with the text that vLLM adds around its message."""
TIES = 64
"""Number of ids with the log-prob of the last of the top_k that the sampling support may hold, too."""
PAUSE_MODES: dict[Mode, str] = {"keep": "keep", "drain": "wait", "restart": "abort"}


class VllmSampler(RequestSampler):
    abort_interval = 0.01

    def __init__(self, settings: Settings, plan: SamplerSettings, *, stop_ids: Collection[int]) -> None:
        """Start vLLM for the draws per position of a plan, or for one draw and its number of most likely ids."""
        super().__init__(stop_ids)
        self.settings, self.vocabulary = settings, vocabulary_of(settings.model)
        self.draws, self.best, self.top_k = draws, best, top_k = plan.draws, plan.best, plan.top_k
        self.kept = min(top_k + TIES, self.vocabulary) if top_k else 0
        """Number of ids that vLLM returns as the sampling support, some of which it may have cut."""
        self.loading = Loading(settings)
        most = max(draws, best) + self.kept
        own = self.loading.arguments | {"logprobs_mode": "processed_logprobs", "max_logprobs": most}
        # the draws are made in the V1 runner, which vLLM no longer chooses by itself on GPUs
        self.core = Core(settings, own, environment={"VLLM_USE_V2_MODEL_RUNNER": "0"} if draws > 1 or top_k else {})
        self.restarted = set[OpenGroup]()
        """Groups whose requests a restart has aborted, and whose tokens are not discarded yet."""
        try:
            self.core.wait(self._ready())
        except BaseException:
            self.core.close()
            raise

    async def _ready(self) -> None:
        self.publishing, self.counted = asyncio.Lock(), asyncio.Event()
        """`counted` is cleared while a restart counts the discarded tokens."""
        self.counted.set()
        hook = known(version()) and not self.best
        for answer in await self.loading.begin(self.core, hook=hook, draws=self.draws, kept=self.kept):
            if self.draws > 1 and not answer["hooked"]:
                raise EngineError(
                    f"loss.m = {self.draws}: vLLM {version()} runs {answer['runner']}, which samples only one token; "
                    "write loss.m = 1, or sampler.engine = 'native'"
                )
            if self.kept and not answer["hooked"]:
                raise EngineError(
                    f"sampler.keep_mask: vLLM {version()} runs {answer['runner']}, whose sampling support is unknown; "
                    "write sampler.engine = 'native'"
                )
        try:  # a first request finds errors before the run begins
            await self.loading.load_first(self.core)
            await self._group(Prompt(id="first", number=-1, tokens=np.zeros(1, np.int32)), Sampling(max_tokens=1))
        except Exception as error:
            raise failed(self.settings, self.core.report, error) from error
        await self.core.llm.update_weight_version("0")

    def close(self) -> None:
        self.core.close()

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        check_length(prompt, sampling, self.core.context)
        if sampling.draws > self.draws or sampling.best > self.best:
            raise EngineError(
                f"a call needs {sampling.draws} draws and {sampling.best} best ids, but the engine was started for "
                f"{self.draws} and {self.best}"
            )
        if sampling.keep_mask and (sampling.draws, sampling.top_k) != (self.draws, self.top_k):
            raise EngineError(f"Sampling.keep_mask needs {self.draws} draws and top_k = {self.top_k}, as at the start")
        if 0 < sampling.temperature < COLDEST:
            raise EngineError(
                f"vLLM does not sample at temperature {sampling.temperature}: write 0, or at least {COLDEST}"
            )
        return await self.core.call(self._group(prompt, sampling, begun))

    async def release(self, numbers: Collection[int] = ()) -> None:
        await self.core.call(self._release(numbers))

    async def offload(self) -> None:
        """Move the weights to host memory and drop the caches, so that another engine can use the device."""
        await self.core.call(self.core.llm.sleep(level=1))

    async def reload(self) -> None:
        await self.core.call(self.core.llm.wake_up())

    async def _abort(self, names: Collection[str]) -> None:
        await self.core.llm.abort(list(names))  # only requests that have reached vLLM

    async def _before_round(self, group: OpenGroup) -> None:
        await self.counted.wait()
        if group in self.restarted:
            self.restarted.remove(group)
            group.restart()

    async def _member(self, group: OpenGroup, index: int) -> None:
        if self.failure is not None:
            raise self.failure
        name, task = str(next(self.numbers)), asyncio.current_task()
        assert task is not None
        self.running[name] = group, task
        try:
            answer = await self._request(group, index, name)
        finally:
            del self.running[name]
        prompt, sampling = group.prompt, group.sampling
        if answer.finish_reason not in FINISHES:
            raise EngineError(f"vLLM ended a response to prompt {prompt.id} with {answer.finish_reason!r}")
        if answer.finish_reason == "abort" and not group.released:
            self.restarted.add(group)
        if answer.token_ids:
            kept, vocabulary = self._kept(sampling), self.vocabulary
            group.add(index, rollout_of(prompt, index, answer, sampling, kept=kept, vocabulary=vocabulary))

    async def _request(self, group: OpenGroup, index: int, name: str) -> Any:
        prompt, sampling = group.prompt, group.sampling
        begun = group.parts[index].tokens if index in group.parts else prompt.tokens[:0]
        drawn = prompt.offset + len(begun)
        cut = (drawn,) if drawn else ()
        output = await self.core.request(
            [*prompt.tokens.tolist(), *begun.tolist()],
            name,
            self.loading.adapter,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=derive_seed(prompt.seed, index, *cut),
            max_tokens=sampling.max_tokens - len(begun),
            stop_token_ids=self.stop_ids,
            logprobs=0 if sampling.temperature == 0 else (sampling.best or sampling.draws - 1) + self._kept(sampling),
        )
        (answer,) = output.outputs
        return answer

    def _kept(self, sampling: Sampling) -> int:
        return self.kept if sampling.keep_mask else 0

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        # checked first, because vLLM only warns of missing weights and crashes on a wrong shape
        check_fits(self.loading.shapes, weights)
        return await self.core.call(self._publish(weights, mode))

    async def _publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        called, llm = time.perf_counter(), self.core.llm
        async with self.publishing:
            try:
                if mode == "restart":
                    self.counted.clear()
                await llm.pause_generation(mode=PAUSE_MODES[mode], clear_cache=True)
                self.restarted &= self.open
                thrown = sum(group.tokens for group in self.restarted)
                still = time.perf_counter()
                # a load that has begun must end, even if the caller is cancelled
                with self.core.load():
                    checksum = await finished(asyncio.ensure_future(self._load(weights)))
                loaded = time.perf_counter()
            finally:
                self.counted.set()
                if self.failure is None:
                    await llm.resume_generation()
        return Loaded(checksum, wait=still - called, load=loaded - still, thrown=thrown)

    async def _load(self, weights: WeightsRef) -> Fingerprint:
        try:
            return await self.loading.load(self.core, weights)
        except Exception as error:
            cause = WRAPPED.sub(r"\1", str(error))
            self.failure = EngineError(f"vLLM could not load version {weights.version}: {cause}")
            await self.core.llm.abort(list(self.core.llm.output_processor.request_states), internal=True)
            raise self.failure from error


def rollout_of(
    prompt: Prompt, index: int, output: Any, sampling: Sampling, *, kept: int = 0, vocabulary: int = 0
) -> Rollout:
    tokens, support = np.array(output.token_ids, np.int32), None
    if sampling.temperature == 0:  # vLLM reports log-probs before greedy selection
        actions_TM = np.repeat(tokens[:, None], sampling.draws, 1)
        logp_TM = np.zeros(actions_TM.shape, np.float32)
        support = support_from_ids(list(tokens[:, None])) if kept else None
    else:
        columns = sampling.draws + sampling.best + kept
        actions_TM = np.array(output.logprobs.token_ids, np.int32).reshape(len(tokens), columns)
        logp_TM = np.array(output.logprobs.logprobs, np.float32).reshape(actions_TM.shape)
    if np.isnan(logp_TM).any():
        raise NonFiniteError("the student's logits are not finite: has training diverged? Lower learner.lr")
    if kept and support is None:
        support = support_of(prompt, actions_TM[:, -kept:], logp_TM[:, -kept:] > -np.inf, vocabulary)
    versions = np.empty(len(tokens), np.int32)
    for span in output.weight_versions:
        versions[span.start : span.end] = -1 if span.version == "default" else int(span.version)
    finish = FINISHES[output.finish_reason]
    drawn, best = slice(sampling.draws), slice(sampling.draws, sampling.draws + sampling.best)
    return one_turn(
        prompt,
        index,
        actions=actions_TM[:, drawn],
        action_logp=logp_TM[:, drawn],
        best_ids=actions_TM[:, best] if sampling.best else None,
        best_logp=logp_TM[:, best] if sampling.best else None,
        versions=versions,
        finish=finish,
        kept=support,
    )


def support_of(prompt: Prompt, ids_TK: Ints, inside_TK: NDArray[np.bool_], vocabulary: int) -> SamplingSupport:
    """Return the ids that were not cut, sorted; raise EngineError if there may be more than were returned."""
    if ids_TK.shape[1] < vocabulary and inside_TK.all(1).any():
        raise EngineError(
            f"prompt {prompt.id}: more than {TIES} ids have the log-prob of the last of sampler.top_k, and vLLM "
            "returns not all: write another top_k, or sampler.engine = 'native'"
        )
    return support_from_ids([np.sort(ids_K[inside_K]) for ids_K, inside_K in zip(ids_TK, inside_TK, strict=True)])
