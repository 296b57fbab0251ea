"""Check of an endpoint before a run, by a few small requests.

The endpoint must serve the model, accept token ids, and return the log-probs that the loss needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.engines.http.client import Client, Endpoint, models_like
from slipstream.engines.http.scorer import LogProbs, log_probs
from slipstream.engines.score_checks import MASS, fault_of, first_invalid
from slipstream.errors import ConfigError, EndpointError

OWN_TOKENS = 24
"""Number of the teacher's most likely next tokens, after tokens of the data, at which it is surer than elsewhere."""
MAX_MISSING = 0.02
"""Largest probability that may be missing from a distribution, because servers round."""
KEY_REFUSED = (401, 403)
NOT_THERE = (404, 405, 501)


@dataclass(frozen=True)
class Requirements:
    tokens: Sequence[int]
    """At least two tokens of the run's data."""
    highest: int
    """Highest token id that the student may sample."""
    max_length: int
    """Maximum number of tokens of a prompt and its response together."""
    k: int = 0
    best: int = 0
    """Number of best tokens that the endpoint returns, for the test that they are of a distribution."""


async def check(endpoint: Endpoint, need: Requirements) -> str:
    """Check an endpoint and return a line that describes it; raise ConfigError with advice if it cannot be used."""
    client, where = Client(endpoint), f"teachers.{endpoint.teacher}"
    try:
        context = await _served(client, endpoint, where)
        if context is not None and context < need.max_length + 1:
            raise ConfigError(
                f"{where}: {endpoint.url} serves {endpoint.model} with a context of {context}, but prompt + "
                f"sampler.max_tokens + 1 are up to {need.max_length + 1}: lower sampler.max_tokens, shorten the "
                f"prompts, or start the server with --max-model-len {need.max_length + 1}"
            )
        check_log_probs(await _ask(client, endpoint, need.tokens, 0), endpoint)
    except EndpointError as error:
        raise ConfigError(_explained(error, endpoint, where)) from None
    await _gives(client, endpoint, need, where)
    served = f"{endpoint.where} serves {endpoint.model}" + (f", context {context}" if context is not None else "")
    return served + await _is_distribution(client, endpoint, need, where)


async def _ask(client: Client, endpoint: Endpoint, tokens: Sequence[int], k: int) -> LogProbs:
    return await log_probs(client, endpoint.model, list(tokens), np.arange(1, len(tokens)), k=k)


def check_log_probs(found: LogProbs, endpoint: Endpoint) -> None:
    logp_NX = np.column_stack([found.logp_N, found.logp_NK])
    if (at := first_invalid(logp_NX)) is not None:
        raise EndpointError(f"{endpoint.where} gives {fault_of(float(logp_NX[at]))}")


async def _served(client: Client, endpoint: Endpoint, where: str) -> int | None:
    """Raise ConfigError if the model is not served; return its context length, or None if the server omits it."""
    try:
        answer = await client.ask("GET", "/models")
    except EndpointError as error:
        if error.status in NOT_THERE:  # some gateways do not list their models; the next request tests the model
            return None
        raise
    listed = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        raise EndpointError(f"{endpoint.where} gives a wrong answer: no list of models")
    models = {each["id"]: each for each in listed if isinstance(each, dict) and isinstance(each.get("id"), str)}
    if not models:
        raise ConfigError(f"{where}.model = {endpoint.model!r}: {endpoint.url} serves no model: load it there")
    if endpoint.model not in models:
        raise ConfigError(
            f"{where}.model = {endpoint.model!r}: {endpoint.url} does not serve it; write one of its models: "
            f"{models_like(endpoint.model, models)}"
        )
    length = models[endpoint.model].get("max_model_len")
    return length if isinstance(length, int) else None


async def _gives(client: Client, endpoint: Endpoint, need: Requirements, where: str) -> None:
    """Raise ConfigError unless the endpoint returns `k` log-probs per token and can score the highest token id."""
    try:
        if need.k:
            check_log_probs(await _ask(client, endpoint, need.tokens, need.k), endpoint)
    except EndpointError as error:
        raise ConfigError(
            f"{where}.max_logprobs: the loss needs {need.k} log-probs per token, which the endpoint does not return: "
            f"start the server with --max-logprobs {need.k}, or lower loss.k ({error})"
        ) from None
    try:
        await _ask(client, endpoint, [*need.tokens, need.highest], 0)
    except EndpointError as error:
        raise ConfigError(
            f"{where}: the endpoint cannot score token {need.highest}, the highest that the student may sample: does "
            f"the teacher have fewer embeddings? ({error})"
        ) from None


async def _is_distribution(client: Client, endpoint: Endpoint, need: Requirements, where: str) -> str:
    """Raise ConfigError if the best log-probs are of no distribution; return a note if the endpoint returns too few."""
    k, tokens = min(need.best, need.highest + 1), list(need.tokens)
    if not k:
        return ""
    try:
        while len(tokens) < min(len(need.tokens) + OWN_TOKENS, need.max_length):
            after = await _ask(client, endpoint, [*tokens, tokens[-1]], k)
            tokens.append(min(int(after.ids_NK[-1, 0]), need.highest))
        best = await _ask(client, endpoint, tokens, k)
    except EndpointError as error:
        return f"; its log-probs are not tested, because it returns fewer than {where}.max_logprobs = {k} ({error})"
    check_log_probs(best, endpoint)
    p_NK = np.exp(best.logp_NK.astype(np.float64))
    least_N = p_NK.sum(1)
    most_N = least_N + p_NK[:, -1] * 2 * (need.highest + 1)  # a model may have more embeddings than the student
    wrong = least_N > MASS, most_N < 1 - MAX_MISSING
    for wrong_N, total_N, how in zip(wrong, (least_N, most_N), ("at least", "with all others at most"), strict=True):
        if wrong_N.any():
            n = int(wrong_N.argmax())
            raise ConfigError(
                f"{where}: {endpoint.url} gives log-probs of no distribution: after {n + 1} tokens the {k} best tokens "
                f"have {how} the probability {total_N[n]:.3f}: are they scaled, shifted, or changed for some tokens?"
            )
    return ""


def _explained(error: EndpointError, endpoint: Endpoint, where: str) -> str:
    if error.status in KEY_REFUSED:
        other = "another key" if endpoint.key else "a key: name its variable"
        hint = f"{where}.api_key_env: the endpoint wants {other}"
    elif error.status in NOT_THERE and not endpoint.url.endswith("/v1"):
        hint = f"{where}.base_url = {endpoint.url!r}: it usually ends in /v1"
    else:
        hint = f"{where}.base_url = {endpoint.url!r}: it cannot score"
    return f"{hint} ({error})"
