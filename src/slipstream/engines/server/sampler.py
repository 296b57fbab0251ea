"""Sampler that uses an HTTP server of vLLM or SGLang: token ids in and out, weights through a shared folder.

While weights load, this sampler has no open request: in drain mode requests end first, in the other modes they are
aborted and answer with the tokens drawn so far. A response continues as a new request, whose prompt holds these tokens.
So every request runs under one version, and the versions of a response are exact at each token.

Every load is proven twice. The server's label names the loaded directory, and every answer repeats it; an answer with
another label is discarded, and the weights are loaded again (the server has started again, or another client loaded
weights). Then log-probs of fixed texts are compared with those of a copy of the student here, and after the first load
and the loads 1, 2, 4, 8 … after it checksums of all tensors, because a server may take long for them (`proof`).

The continuation of a response is reproducible with vLLM, which takes seeds, but differs from the tokens of a single
request. SGLang's draws depend on its load.

Shapes: T tokens, N tokens of the fixed texts, H hidden size.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from slipstream.engines.checksums import checksum
from slipstream.engines.http.client import Client, retried
from slipstream.engines.http.scorer import WrongAnswer, together
from slipstream.engines.native.config import vocabulary_of
from slipstream.engines.native.model import LanguageModel, load_model
from slipstream.engines.request_sampler import FINISHES, OpenGroup, RequestSampler, check_length, finished
from slipstream.engines.server.api import APIS, TOKEN_BYTES, Drawn, Served, ServerSettings, checked, reading
from slipstream.engines.server.proof import Answers, Checksums, apart, moved, objection, objection_to, texts
from slipstream.engines.vllm.core import COLDEST
from slipstream.engines.weights import fingerprint, load_weights
from slipstream.errors import ConfigError, EndpointError, EngineError
from slipstream.estimators.logprobs.tiles import Head
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import (
    Floats,
    Group,
    Handle,
    Prompt,
    Rollout,
    derive_seed,
    one_turn,
)
from slipstream.run_dir.temporary import TemporaryDirectory

T = TypeVar("T")
PUBLISH_PAUSES = (1.0, 4.0, 15.0, 30.0)
"""Seconds between the tries of a publish while the server is not available."""
ANSWER_PAUSES = (1.0, 4.0, 15.0)
"""Seconds between the tries of an answer for an evaluation while the server is not available."""
LOADS = 2
"""Number of loads of one version before a publish fails."""
MAX_LOST = 3
"""Number of answers in a row with other weights, or without a token, after which a request fails."""


class ServerSampler(RequestSampler):
    abort_interval = 0.05

    def __init__(self, settings: ServerSettings, *, stop_ids: Collection[int]) -> None:
        """Load a copy of the student into host memory; the server gets its weights before the first request."""
        super().__init__(stop_ids)
        self.settings = settings
        self.thread = ThreadPoolExecutor(1, "server", initializer=torch.set_num_threads, initargs=(settings.threads,))
        self.copy = load_model(settings.model, dtype=settings.dtype, device="cpu", max_length=settings.max_length)
        self.api = APIS[settings.api](settings.endpoint, self.copy.vocab_size)
        self.texts = texts(self.copy.vocab_size, self.copy.max_length)
        try:
            self.made = TemporaryDirectory("slipstream-weights-", settings.folder)
            self.folder = self.made.path
            self.folder.chmod(0o755)  # the server may run as another user
        except OSError as error:
            raise ConfigError(f"sampler.server.folder = {settings.folder!r} cannot be written: {error}") from None
        self.version, self.label = 0, ""
        """Version and label of the loaded weights; the label is empty before the first load."""
        self.proven: Answers | None = None
        """Answers for the last version that was proven; None before the first."""
        self.first_head = replace(self.copy.head, linear=deepcopy(self.copy.head.linear))
        """Output head of the student with which the server was started."""
        self.first_sums: Checksums | None = None
        """Checksums after the first load; None before it."""
        self.proofs = 0
        """Number of loads that were proven."""
        self.noise = 0.0
        """Root mean square difference between two equal requests for the log-probs of the fixed texts."""
        self.loads = count()
        self.gate: asyncio.Future[None] | None = None
        """Future that is pending while weights load; None while requests may start."""

    def close(self) -> None:
        self.thread.shutdown()
        self.made.close()

    async def _here(self, work: Callable[..., T], *given: object) -> T:
        """Run work of the copy on its thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, *given)

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        check_length(prompt, sampling, self.copy.max_length)
        if sampling.draws > 1 or sampling.best or sampling.keep_mask:
            raise EngineError("a rollout server returns one token per position, without draws, best ids and supports")
        if 0 < sampling.temperature < COLDEST:
            raise EngineError(f"a rollout server samples at temperature 0, or at least {COLDEST}")
        if not self.label and self.failure is None:
            await self._alone(self._load_first)
        return await self._group(prompt, sampling, begun)

    async def _member(self, group: OpenGroup, index: int) -> None:
        """Generate the rest of a response, in as many requests as weights change and aborts need."""
        restarts, lost = group.restarts, 0
        while not group.complete(index):
            while self.gate is not None:
                await asyncio.shield(self.gate)
            if group.released or group.restarts > restarts:
                return
            if self.failure is not None:
                raise self.failure
            before, label, name = group.parts.get(index), self.label, f"{self.folder.name}-{next(self.numbers)}"
            request = asyncio.create_task(self._request(group, index, name))
            self.running[name] = group, request
            try:
                version = await request
            finally:
                request.cancel()
                self.running.pop(name, None)
            lost = 0 if group.parts.get(index) is not before or self.gate is not None else lost + 1
            if version != label:
                if lost > MAX_LOST:
                    raise EndpointError(f"{self.api.where} serves weights {version!r}, although {label!r} were loaded")
                await self._alone(self._restore)
            elif lost > MAX_LOST:
                raise EndpointError(f"{self.api.where} ended a request {lost} times without a token")
            elif lost:
                await asyncio.sleep(self.abort_interval)

    async def _request(self, group: OpenGroup, index: int, name: str) -> str:
        """Make one request, add its tokens to the group if they are from the loaded weights, and return its label."""
        prompt, sampling, version, label = group.prompt, group.sampling, self.version, self.label
        begun = group.parts.get(index)
        tokens = prompt.tokens[:0] if begun is None else begun.tokens
        drawn = prompt.offset + len(tokens)
        part = await self.api.draw(
            name,
            [*prompt.tokens.tolist(), *tokens.tolist()],
            replace(sampling, max_tokens=sampling.max_tokens - len(tokens)),
            self.stop_ids,
            derive_seed(prompt.seed, index, *((drawn,) if drawn else ())),
        )
        if not part.tokens:  # vLLM's answer then has no label
            return label
        if part.label == label:
            group.add(index, rollout_of(prompt, index, part, version, greedy=sampling.temperature == 0))
        return part.label

    async def release(self, numbers: Collection[int] = ()) -> None:
        try:
            await self._release(numbers)
        except EndpointError:  # hand over the tokens that have arrived
            for group, request in list(self.running.values()):
                if group.released:
                    request.cancel()

    async def _abort(self, names: Collection[str]) -> None:
        await self.api.abort(names)

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        return await self._alone(partial(self._publish, weights, mode, time.perf_counter()))

    async def _alone(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work while no request starts; work that has begun ends, even if the caller is cancelled."""
        while self.gate is not None:
            await asyncio.shield(self.gate)
        self.gate = asyncio.get_running_loop().create_future()
        try:
            return await finished(asyncio.ensure_future(work()))  # type: ignore[no-any-return]
        finally:
            self.gate.set_result(None)
            self.gate = None

    async def _publish(self, weights: WeightsRef, mode: Mode, called: float) -> Loaded:
        await self._here(load_weights, self.copy.model, weights)
        if mode == "drain":
            while running := [request for _, request in self.running.values() if not request.done()]:
                await asyncio.wait(running)
        still, thrown = time.perf_counter(), 0
        try:
            if mode != "drain":
                await patiently(lambda: self._end(lambda _: True))
                still = time.perf_counter()
            if mode == "restart":
                thrown = sum(group.restart() for group in self.open)
            await self._load(weights.version)
        except EndpointError as error:
            self.failure = EngineError(
                f"publish of version {weights.version}: {error}; the server must be there, and read "
                f"sampler.server.folder = {self.settings.folder!r} under the same path"
            )
            raise self.failure from None
        checksum = await self._here(fingerprint, self.copy.model, weights.manifest[0].dtype)
        return Loaded(checksum, wait=still - called, load=time.perf_counter() - still, thrown=thrown)

    async def _load_first(self) -> None:
        if not self.label:  # another call may have loaded them
            await self._load(0)

    async def _load(self, version: int) -> None:
        """Write the copy's weights into a new directory, load and prove them, and delete the directory before."""
        before, label = self.label, f"{self.folder.name}-{next(self.loads)}-v{version}"
        await self._here(self._write, self.folder / label)
        try:
            await self._proven_load(label)
        except BaseException:  # each further try would leave another copy of the weights
            shutil.rmtree(self.folder / label, ignore_errors=True)
            raise
        self.version, self.label = version, label
        if before:
            await self._here(shutil.rmtree, self.folder / before, True)

    def _write(self, path: Path) -> None:
        """Write the copy's weights so that a server of another user can read them."""
        self.copy.model.save_pretrained(path)
        path.chmod(0o755)
        for file in path.iterdir():
            file.chmod(0o644)

    async def _proven_load(self, label: str) -> None:
        async def load() -> str:
            await self.api.load(str(self.folder / label), label)
            return await self._wrong()

        wrong = ""
        for _ in range(LOADS):
            if not (wrong := await patiently(load)):
                return
        self.failure = EngineError(f"{self.api.where} {wrong}")
        raise self.failure

    async def _restore(self) -> None:
        """Load the newest weights again if the server does not name them."""
        if await self.api.label() != self.label:
            await self._end(lambda _: True)
            await self._proven_load(self.label)

    async def _wrong(self) -> str:
        """Return why the server does not run the copy's weights; empty if it does."""
        now, known = Answers(await self._served(), *await self._here(self._log_probs)), self.settings.dtype
        if self.proven is None:
            self.noise = apart(now.served_N, await self._served())
        wrong = objection(now, self.proven, noise=self.noise, dtype=known)
        if not wrong and self.proofs & (self.proofs - 1) == 0:  # 0, 1, 2, 4, …
            wrong = await self._wrong_tensors()
        if not wrong and (self.proven is None or moved(now, self.proven, noise=self.noise, dtype=known)):
            self.proven = now
        self.proofs += not wrong
        return wrong

    async def _wrong_tensors(self) -> str:
        """Return which tensors of the server are old; empty if none is known to be."""
        if not (served := await self.api.checksums()):
            return ""
        sums = Checksums(served, await self._here(self._checksums))
        self.first_sums = self.first_sums or sums
        return objection_to(sums, self.first_sums)

    async def _served(self) -> Floats:
        return np.concatenate(await together(map(self.api.log_probs, self.texts)))

    def _log_probs(self) -> Floats:
        return np.concatenate([log_probs_of(self.copy, text, self.first_head) for text in self.texts], axis=1)

    def _checksums(self) -> dict[str, int]:
        return {name: checksum(tensor.detach()) for name, tensor in self.copy.model.named_parameters()}


async def patiently(work: Callable[[], Awaitable[T]], pauses: Sequence[float] | None = None) -> T:
    """Repeat work while the server is not available; raise its last error, or at once the error of a refusal."""
    return await retried(work, pauses or PUBLISH_PAUSES, EndpointError, lambda error: not error.status)


@torch.inference_mode()
def log_probs_of(lm: LanguageModel, tokens: Sequence[int], *heads: Head) -> Floats:
    """Return the log-prob of each token but the first, by the model's head and by each other one, [heads, N]."""
    ids_T = torch.tensor(tokens)
    hidden_TH = lm.backbone(ids_T[None]).last_hidden_state[0, :-1]
    logp = [head(hidden_TH).float().log_softmax(-1).gather(1, ids_T[1:, None])[:, 0] for head in (lm.head, *heads)]
    rows: Floats = torch.stack(logp).numpy()
    return rows


def rollout_of(prompt: Prompt, index: int, drawn: Drawn, version: int, *, greedy: bool) -> Rollout:
    tokens_T = np.array(drawn.tokens, np.int32)
    # servers report log-probs before greedy selection
    logp_T = np.array([0.0 if greedy else logp for _, logp in drawn.logps])
    return one_turn(
        prompt,
        index,
        actions=tokens_T[:, None],
        action_logp=logp_T[:, None].astype(np.float32),
        versions=np.full(len(tokens_T), version, np.int32),
        finish=FINISHES[drawn.finish],
    )


class CompletionsSampler(RequestSampler):
    """Sampler for evaluation: a model behind an OpenAI-compatible server, to which no weights can be published.

    The server must return token ids for prompts of token ids (`return_token_ids`), as vLLM does. Log-probs are not
    asked for and are 0 in the records, because evaluation does not read them.
    """

    def __init__(self, settings: Served, *, stop_ids: Collection[int]) -> None:
        super().__init__(stop_ids)
        self.settings = settings
        self.client, self.vocabulary = Client(settings.endpoint), vocabulary_of(settings.model)

    def close(self) -> None:
        """Do nothing: connections are closed with their event loop."""

    async def release(self, numbers: Collection[int] = ()) -> None:
        """Do nothing: no response is continued elsewhere."""

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        raise EngineError(f"{self.client.where} takes no weights")

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        try:
            return await self._group(prompt, sampling, begun)
        except EndpointError as error:
            raise EngineError(str(error)) from None

    async def _member(self, group: OpenGroup, index: int) -> None:
        prompt, sampling = group.prompt, group.sampling
        options = {each: getattr(sampling, each) for each in ("max_tokens", "temperature", "top_p", "top_k", "min_p")}
        seed = derive_seed(prompt.seed, index, *((prompt.offset,) if prompt.offset else ()))
        body = {"model": self.settings.endpoint.model, "prompt": prompt.tokens.tolist(), **options, "seed": seed}
        body |= {"stop_token_ids": self.stop_ids, "ignore_eos": True, "return_token_ids": True}
        most = TOKEN_BYTES * sampling.max_tokens
        answer = await patiently(lambda: self.client.ask("POST", "/completions", body, expected=most), ANSWER_PAUSES)
        with reading(self.client.where):
            (choice,) = answer["choices"]
            if (tokens := choice.get("token_ids")) is None:
                raise WrongAnswer("no token_ids: the server must support return_token_ids, as vLLM does")
            logps, used = [(token, 0.0) for token in tokens], answer["usage"]["completion_tokens"]
            drawn = checked(
                Drawn(tokens, logps, used, choice["finish_reason"], ""), sampling, self.stop_ids, self.vocabulary
            )
        group.add(index, rollout_of(prompt, index, drawn, 0, greedy=True))
