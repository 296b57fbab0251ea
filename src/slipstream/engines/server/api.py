"""HTTP interfaces of rollout servers: requests of vLLM and SGLang, and parsers that compare answers with requests.

Both interfaces generate from token ids, abort requests, and load weights from a directory. A label names the loaded
weights; every answer repeats it. `Client` retries short failures. All other failures raise EndpointError.
"""

import asyncio
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.engines.http.client import MAX_QUOTED, Client, Endpoint, models_like
from slipstream.engines.http.scorer import WrongAnswer, number
from slipstream.engines.score_checks import FLOOR, TOLERANCE
from slipstream.errors import ConfigError, EndpointError, NonFiniteError
from slipstream.protocols import Sampling

TOKEN_BYTES = 512
"""Upper bound of the mean bytes per token in an answer."""
CONTROL_REQUESTS = 8
"""Number of concurrent requests that are not generations, such as aborts."""
CLAMPED_LOGP = -9999.0
"""Log-prob that vLLM sends in place of NaN and −∞."""
CERTAIN_LOGP = -1e-3
"""Lowest log-prob of the only token that remains after truncation."""
NO_BYTES = hashlib.sha256().hexdigest()
"""Checksum of an empty tensor."""
NO_FIELD = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""Errors of a parser whose answer lacks a field."""
Body = dict[str, Any]


@dataclass(frozen=True)
class ServerEndpoint(Endpoint):
    @property
    def where(self) -> str:
        return f"the rollout server at {self.url}"


@dataclass(frozen=True)
class ServerSettings:
    endpoint: ServerEndpoint
    api: str
    model: str
    dtype: str
    folder: str
    max_length: int | None = None
    threads: int = 1
    devices: int = 0
    """Number of devices here: none, as the server has its own."""


class Served(ServerSettings):
    """A model on a server whose weights stay as they are; `model` is for its tokenizer and its end tokens."""


class Drawn(NamedTuple):
    """Answer to one request: its tokens, why it ended, and the label of the weights ("" without tokens)."""

    tokens: list[int]
    logps: list[tuple[int, float]]
    """Token id and log-prob at each position."""
    used: int
    """Number of tokens that the server counted."""
    finish: str
    label: str


class Api(ABC):
    path: str
    """Path of generations."""
    label_path: str
    """Path of the label of the loaded weights."""
    begin: str
    """Advice for a server that lacks an interface."""

    def __init__(self, endpoint: ServerEndpoint, vocabulary: int) -> None:
        """Serve a student whose token ids are below `vocabulary`."""
        self.vocabulary = vocabulary
        self.where, self.client = endpoint.where, Client(endpoint)
        # generations may occupy all connections of the first client
        self.control = Client(ServerEndpoint("", endpoint.url, "", endpoint.key, CONTROL_REQUESTS, endpoint.timeout))

    async def draw(self, name: str, prompt: list[int], sampling: Sampling, ends: Sequence[int], seed: int) -> Drawn:
        """Generate one response; `name` identifies the request for `abort`."""
        body = self.request(name, prompt, sampling, ends, seed)
        answer = await self.client.ask("POST", self.path, body, expected=TOKEN_BYTES * sampling.max_tokens)
        with reading(self.where):
            return checked(self.read(answer), sampling, ends, self.vocabulary)

    async def log_probs(self, tokens: list[int]) -> list[float]:
        """Return the log-prob of each token but the first, given the tokens before it."""
        answer = await self.control.ask("POST", self.path, self.probe(tokens), expected=TOKEN_BYTES * len(tokens))
        with reading(self.where, "no log-prob of a sent token: "):
            return [number(row[token]) for row, token in zip(self.rows(answer), tokens[1:], strict=True)]

    async def context(self) -> int | None:
        """Return the server's longest sequence in tokens; None if the server omits it."""
        answer = await self.control.ask("GET", "/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        first = models[0] if isinstance(models, list) and models else None
        length = first.get("max_model_len") if isinstance(first, dict) else None
        return length if isinstance(length, int) else None

    async def checksums(self) -> dict[str, tuple[str, ...]]:
        """Return the checksums of each tensor's shards, by `REPLICA:NAME`; empty if the server has none."""
        return {}

    async def do(self, path: str, body: Body | None = None, *, bare: bool = False) -> Any:
        return await self.control.ask("POST", path, body, bare=bare)

    async def label(self) -> str:
        """Return the label of the loaded weights."""
        answer = await self.control.ask("GET", self.label_path)
        with reading(self.where):
            return str(answer["weight_version"])

    async def first_logp(self, tokens: list[int], sampling: Sampling) -> float:
        """Return the log-prob of one drawn token."""
        drawn = await self.draw("check", tokens, sampling, (), 0)
        with reading(self.where):
            return drawn.logps[0][1]

    @asynccontextmanager
    async def paused(self, pause: tuple[str, Body | None], resume: tuple[str, Body | None]) -> AsyncIterator[None]:
        """Let the server end all requests and start none in this context, by requests of a path and a body.

        If both the work in this context and the resumption fail, the error of the work is raised.
        """
        await self.do(*pause)
        try:
            yield
        except BaseException:
            with suppress(EndpointError):
                await self.do(*resume)
            raise
        await self.do(*resume)

    @abstractmethod
    def request(self, name: str, prompt: list[int], sampling: Sampling, ends: Sequence[int], seed: int) -> Body: ...

    @abstractmethod
    def read(self, answer: Any) -> Drawn: ...

    @abstractmethod
    def probe(self, tokens: list[int]) -> Body: ...

    @abstractmethod
    def rows(self, answer: Any) -> list[dict[int, Any]]: ...

    @abstractmethod
    async def abort(self, names: Collection[str]) -> None:
        """End these requests, which then answer with the tokens drawn so far; ignore unknown names."""

    @abstractmethod
    async def load(self, path: str, label: str) -> None:
        """End all requests, load the weights in a directory, clear the prefix cache, and set the label."""

    @abstractmethod
    async def unprocessed(self, tokens: list[int], temperature: float) -> str:
        """Return the error message if log-probs do not belong to the sampling distribution, else an empty string."""


class VllmApi(Api):
    path, label_path = "/inference/v1/generate", "/weight_info"
    begin = "start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"

    def request(self, name: str, prompt: list[int], sampling: Sampling, ends: Sequence[int], seed: int) -> Body:
        options = {each: getattr(sampling, each) for each in ("max_tokens", "temperature", "top_p", "top_k", "min_p")}
        options |= {"seed": seed, "stop_token_ids": list(ends), "ignore_eos": True, "logprobs": 0, "detokenize": False}
        return {"request_id": name, "token_ids": prompt, "sampling_params": options}

    def read(self, answer: Any) -> Drawn:
        (choice,) = answer["choices"]
        tokens, spans = choice["token_ids"] or [], choice["weight_versions"] or []
        if len(spans) > 1 or any((span["start"], span["end"]) != (0, len(tokens)) for span in spans):
            raise WrongAnswer("another client changed the weights while a request was open")
        rows = [(row["token_id"], row["logprob"]) for row in present(choice["logprobs"])["content"]]
        label = spans[0]["version"] if spans else ""
        return Drawn(tokens, rows, answer["usage"]["completion_tokens"], choice["finish_reason"], label)

    def probe(self, tokens: list[int]) -> Body:
        return {"token_ids": tokens, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}}

    def rows(self, answer: Any) -> list[dict[int, Any]]:
        return [{int(token): entry["logprob"] for token, entry in row.items()} for row in answer["prompt_logprobs"][1:]]

    async def abort(self, names: Collection[str]) -> None:
        # vLLM puts this text before the names of requests
        await self.do("/abort_requests", {"request_ids": [f"generate-tokens-{name}" for name in names]})

    async def load(self, path: str, label: str) -> None:
        async with self.paused(("/pause?mode=abort", None), ("/resume", None)):  # also clears the prefix cache
            await self.do("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            await self.do("/update_weight_version", {"new_version": label})

    async def checksums(self) -> dict[str, tuple[str, ...]]:
        sums = dict[str, tuple[str, ...]]()
        answer = await self.do("/weight_checker", {"action": "checksum"})
        with reading(self.where):
            for place, sum in answer["checksums"].items():
                replica, *_, name = place.split(":")  # dp0:pp0:pcp0:tp0:NAME
                if sum != NO_BYTES:  # on CPUs vLLM keeps a packed copy in place of some tensors
                    key = f"{replica}:{name}"
                    sums[key] = (*sums.get(key, ()), sum)
        return sums

    async def unprocessed(self, tokens: list[int], temperature: float) -> str:
        if await self.first_logp(tokens, Sampling(max_tokens=1, top_k=1)) >= CERTAIN_LOGP:
            return ""
        return "gives log-probs before temperature and truncation: start vLLM with --logprobs-mode processed_logprobs"


class SglangApi(Api):
    path, label_path = "/generate", "/get_model_info"
    begin = "start an SGLang with /pause_generation and weight_version (0.5.4 or newer)"

    def request(self, name: str, prompt: list[int], sampling: Sampling, ends: Sequence[int], seed: int) -> Body:
        options = {each: getattr(sampling, each) for each in ("temperature", "top_p", "min_p")}
        options |= {"max_new_tokens": sampling.max_tokens, "top_k": sampling.top_k or -1, "stop_token_ids": list(ends)}
        options |= {"no_stop_trim": True, "skip_special_tokens": False}
        return {"rid": name, "input_ids": prompt, "sampling_params": options, "return_logprob": True}

    def read(self, answer: Any) -> Drawn:
        info, tokens = answer["meta_info"], answer["output_ids"]
        rows = [(row[1], row[0]) for row in present(info.get("output_token_logprobs"))] if tokens else []
        label = info["weight_version"] if tokens else ""
        return Drawn(tokens, rows, info["completion_tokens"], info["finish_reason"]["type"], label)

    def probe(self, tokens: list[int]) -> Body:
        options = {"max_new_tokens": 1, "temperature": 1.0}
        return {"input_ids": tokens, "sampling_params": options, "return_logprob": True, "logprob_start_len": 0}

    def rows(self, answer: Any) -> list[dict[int, Any]]:
        return [{row[1]: row[0]} for row in answer["meta_info"]["input_token_logprobs"][1:]]

    async def abort(self, names: Collection[str]) -> None:
        await asyncio.gather(*(self.do("/abort_request", {"rid": name}, bare=True) for name in names))

    async def load(self, path: str, label: str) -> None:
        async with self.paused(("/pause_generation", {"mode": "abort"}), ("/continue_generation", {})):
            body = {"model_path": path, "weight_version": label, "flush_cache": True}
            answer = await self.do("/update_weights_from_disk", body)
            if not isinstance(answer, dict) or answer.get("success") is not True:
                raise EndpointError(f"{self.where} does not load the weights: {str(answer)[:MAX_QUOTED]}", status=400)

    async def unprocessed(self, tokens: list[int], temperature: float) -> str:
        options = [Sampling(max_tokens=1, top_k=1, temperature=each) for each in (1.0, temperature)]
        plain, scaled = [await self.first_logp(tokens, each) for each in options]
        if temperature == 1 or plain != scaled or plain >= CERTAIN_LOGP:
            return ""
        return "gives log-probs before temperature: start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"


APIS: dict[str, type[Api]] = {"vllm": VllmApi, "sglang": SglangApi}


@contextmanager
def reading(where: str, before: str = "") -> Iterator[None]:
    """Turn errors about an answer that does not fit its request into one that names the server."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{where} gives {error}") from None
    except (WrongAnswer, *NO_FIELD) as error:
        name = "" if isinstance(error, WrongAnswer) else f"{type(error).__name__}: "
        line = f"{where} gives a wrong answer: {before}{name}{str(error)[:MAX_QUOTED]}"
        raise EndpointError(line, status=200) from None


def present(found: Any) -> Any:
    if found is None:
        raise WrongAnswer("no log-probs of the drawn tokens")
    return found


def checked(drawn: Drawn, sampling: Sampling, ends: Sequence[int], vocabulary: int) -> Drawn:
    """Return an answer that fits its request; raise WrongAnswer for others, and NonFiniteError for NaN and −∞.

    Log-probs that rounding has put above 0 become 0.
    """
    tokens, most, known = drawn.tokens, sampling.max_tokens, [token for token, _ in drawn.logps]
    if known != tokens or drawn.used != len(tokens):
        raise WrongAnswer(f"{len(tokens)} token ids, {len(known)} log-probs, and {drawn.used} tokens in its usage")
    if foreign := [token for token in tokens if type(token) is not int or not 0 <= token < vocabulary]:
        raise WrongAnswer(
            f"token id {foreign[0]!r}, and the student's ids are below {vocabulary}: is it another model?"
        )
    for token, logp in drawn.logps:
        if math.isnan(number(logp)) or logp <= CLAMPED_LOGP:
            raise NonFiniteError(
                f"the log-prob {logp:g}, which means that logits are not finite: if training has diverged, lower "
                "learner.lr"
            )
        if not FLOOR < logp <= TOLERANCE:
            raise WrongAnswer(f"the log-prob {logp:g} of the drawn token {token}")
    drawn = drawn._replace(logps=[(token, min(float(logp), 0.0)) for token, logp in drawn.logps])
    ended = [i for i, token in enumerate(tokens) if token in ends]
    at_end = [len(tokens) - 1]
    fits = {"stop": ended == at_end, "length": ended in ([], at_end) and len(tokens) == most, "abort": not ended}
    if not fits.get(drawn.finish) or len(tokens) > most:
        raise WrongAnswer(
            f"it ended with {drawn.finish!r} after {len(tokens)} of {most} tokens, with end tokens at {ended}"
        )
    return drawn


def served_name(endpoint: ServerEndpoint, model: str) -> str:
    """Return the name under which the server has the model: `model` if it lists it, or its only model."""
    try:
        answer = asyncio.run(Client(endpoint).ask("GET", "/models"))
        listed = [str(each["id"]) for each in answer["data"]]
    except (EndpointError, *NO_FIELD) as error:
        raise ConfigError(f"--url {endpoint.url}: it does not list its models ({error})") from None
    if model in listed or len(listed) == 1:
        return model if model in listed else listed[0]
    known = f"has the models {models_like(model, listed)}" if listed else "serves no model"
    raise ConfigError(f"--url: {endpoint.url} {known}: start it with --served-model-name {model}")
