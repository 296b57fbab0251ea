"""Sampler that uses vLLM: token ids in and out, one request for every member of a group, weights change between tokens.

A publish pauses vLLM at a token boundary and clears its prefix cache, and `Loading` then replaces all weights or the
adapter. vLLM labels every token with the version that sampled it. In keep mode running requests continue, and their
prefixes are computed again with the new weights. In restart mode vLLM aborts the requests, and `_group` sends new
requests.

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
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.engines.native.config import vocabulary_of
from slipstream.engines.vllm.core import COLDEST, Core, Settings, failed, known, version
from slipstream.engines.vllm.loading import Loading
from slipstream.engines.weights import check_fits
from slipstream.errors import EngineError, ModelError, NonFiniteError
from slipstream.protocols import Fingerprint, Loaded, Mode, Sampling, WeightsRef
from slipstream.records import (
    Finish,
    Group,
    Handle,
    Ints,
    Prompt,
    Rollout,
    SamplingSupport,
    continued,
    derive_seed,
    handed_over,
    header_of,
    one_turn,
    support_from_ids,
)

ENDS: dict[str, Finish] = {"stop": "eos", "length": "length", "abort": "released"}
AGAIN = 0.01
"""Seconds after which an abort is repeated, because a request may not have reached vLLM before."""
WRAPPED = re.compile(r".*Worker failed with error '(.*)', please check .*", re.DOTALL)
"""Error of a worker, with the text that vLLM adds around its message."""
TIES = 64
"""Number of ids with the log-prob of the last of the top_k that the sampling support may hold, too."""
PAUSES: dict[Mode, str] = {"keep": "keep", "drain": "wait", "restart": "abort"}


@dataclass(eq=False)
class Open:
    """Running group of responses to one prompt, and the results of its ended requests."""

    prompt: Prompt
    sampling: Sampling
    begun: dict[int, Rollout] = field(default_factory=dict)
    """Members with tokens from earlier calls, by index."""
    done: dict[int, Any] = field(default_factory=dict)
    calls: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Tasks of the requests to vLLM, by request id."""
    released: bool = False
    kept: int = 0
    """Number of ids returned as the sampling support of each token; 0: none."""
    vocabulary: int = 0

    @property
    def indices(self) -> range:
        return range(self.prompt.first, self.prompt.first + self.sampling.group)

    @property
    def left(self) -> list[int]:
        found = self.begun
        return [i for i in self.indices if i not in found or found[i].finish == "released"]

    @property
    def aborted(self) -> bool:
        return any(output.finish_reason == "abort" for output in self.done.values())

    @property
    def tokens(self) -> int:
        begun = sum(len(rollout.tokens) for rollout in self.begun.values())
        return begun + sum(len(output.token_ids) for output in self.done.values())

    def member(self, index: int) -> Rollout | None:
        """Return a member with all its tokens, including those of earlier calls; None if it has no token."""
        begun, output = self.begun.get(index), self.done.get(index)
        if output is None or not output.token_ids:
            return begun
        rest = rollout_of(self.prompt, index, output, self.sampling, kept=self.kept, vocabulary=self.vocabulary)
        return continued(begun, rest) if begun else rest


class VllmSampler:
    def __init__(
        self, settings: Settings, *, stop_ids: set[int], draws: int = 1, best: int = 0, top_k: int = 0
    ) -> None:
        """Start vLLM for at most `draws` draws per position, or for one draw and at most `best` most likely ids.

        `top_k` is that of requests with `Sampling.keep_mask`; 0: there are none.
        """
        self.settings, self.draws, self.best, self.stop_ids = settings, draws, best, sorted(stop_ids)
        self.top_k, self.vocabulary = top_k, vocabulary_of(settings.model)
        self.kept = min(top_k + TIES, self.vocabulary) if top_k else 0
        """Number of ids that vLLM returns as the sampling support, some of which it may have cut."""
        self.loading = Loading(settings)
        most = max(draws, best) + self.kept
        own = self.loading.arguments | {"logprobs_mode": "processed_logprobs", "max_logprobs": most}
        # the draws are made in the V1 runner, which vLLM no longer chooses by itself on GPUs
        self.core = Core(settings, own, environment={"VLLM_USE_V2_MODEL_RUNNER": "0"} if draws > 1 or top_k else {})
        self.open: set[Open] = set()
        self.numbers = count()
        self.failure: EngineError | None = None
        """Error of a publish that failed halfway; no tokens are sampled afterwards. None if no publish failed."""
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
        for found in await self.loading.begin(self.core, hook=hook, draws=self.draws, kept=self.kept):
            if self.draws > 1 and not found["hooked"]:
                raise EngineError(
                    f"loss.m = {self.draws}: vLLM {version()} runs {found['runner']}, which samples only one token; "
                    "write loss.m = 1, or sampler.engine = 'native'"
                )
            if self.kept and not found["hooked"]:
                raise EngineError(
                    f"sampler.keep_mask: vLLM {version()} runs {found['runner']}, whose sampling support is unknown; "
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

    # --- generating ------------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if len(prompt.tokens) + sampling.max_tokens > self.core.context:
            raise ModelError(
                f"prompt {prompt.id} has {len(prompt.tokens)} tokens: with max_tokens = {sampling.max_tokens} it "
                f"exceeds the context of {self.core.context}"
            )
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

    async def _release(self, numbers: Collection[int]) -> None:
        for group in [group for group in self.open if not numbers or group.prompt.number in numbers]:
            group.released = True
            while running := [call for call in group.calls.values() if not call.done()]:
                await self.core.llm.abort(list(group.calls))  # only requests that have reached vLLM
                await asyncio.wait(running, timeout=AGAIN)

    async def _group(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = Open(prompt, sampling, {handle.body.index: handle.body for handle in begun})
        group.kept, group.vocabulary = self._kept(sampling), self.vocabulary
        self.open.add(group)
        try:
            while not group.released and group.left and (not group.done or group.aborted):
                await self.counted.wait()
                if group.aborted:
                    group.begun.clear()
                group.done.clear()
                if group.released:
                    break
                async with asyncio.TaskGroup() as members:  # one failure or cancellation aborts all
                    group.calls = {
                        name: members.create_task(self._member(group, index, name))
                        for index, name in zip(group.left, map(str, self.numbers), strict=False)
                    }
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.open.discard(group)
        rollouts = [rollout for index in group.indices if (rollout := group.member(index))]
        if len(rollouts) < sampling.group or any(rollout.finish == "released" for rollout in rollouts):
            return handed_over(rollouts)
        return [Handle(header_of(rollout), rollout) for rollout in rollouts]

    async def _member(self, group: Open, index: int, name: str) -> None:
        """Generate the rest of a response; earlier tokens of the response are part of vLLM's prompt."""
        if self.failure is not None:
            raise self.failure
        prompt, sampling = group.prompt, group.sampling
        begun = group.begun[index].tokens if index in group.begun else prompt.tokens[:0]
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
        if answer.finish_reason not in ("stop", "length", "abort"):
            raise EngineError(f"vLLM ended a response to prompt {prompt.id} with {answer.finish_reason!r}")
        group.done[index] = answer

    def _kept(self, sampling: Sampling) -> int:
        return self.kept if sampling.keep_mask else 0

    # --- publishing ------------------------------------------------------------------------------------------

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
                await llm.pause_generation(mode=PAUSES[mode], clear_cache=True)
                thrown = sum(group.tokens for group in self.open if group.aborted)
                still = time.perf_counter()
                # a load that has begun must end, even if the caller is cancelled
                with self.core.load():
                    found = await finished(asyncio.ensure_future(self._load(weights)))
                loaded = time.perf_counter()
            finally:
                self.counted.set()
                if self.failure is None:
                    await llm.resume_generation()
        return Loaded(found, wait=still - called, load=loaded - still, thrown=thrown)

    async def _load(self, weights: WeightsRef) -> Fingerprint:
        try:
            return await self.loading.load(self.core, weights)
        except Exception as error:
            cause = WRAPPED.sub(r"\1", str(error))
            self.failure = EngineError(f"vLLM could not load version {weights.version}: {cause}")
            await self.core.llm.abort(list(self.core.llm.output_processor.request_states), internal=True)
            raise self.failure from error


async def finished(task: asyncio.Future[Any]) -> Any:
    """Return a task's result; if the caller is cancelled, raise the cancellation only after the task has ended."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


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
    finish = ENDS[output.finish_reason]
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
