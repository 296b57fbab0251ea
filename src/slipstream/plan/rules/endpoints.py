"""Rules that ask endpoints: small requests show whether a teacher, the judge or a rollout server can serve the run."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from slipstream.config.base import check_url
from slipstream.config.schema import Config
from slipstream.data.prompts import Prompts
from slipstream.data.tokenizers import Tokenizer
from slipstream.engines.http.check import Requirements, check
from slipstream.engines.http.client import Endpoint, key_from_environment
from slipstream.engines.http.judge import Judge
from slipstream.engines.native.config import vocabulary_of
from slipstream.engines.server.api import APIS, Served, ServerEndpoint, served_name
from slipstream.errors import ConfigError, EndpointError
from slipstream.grades import ENDPOINT_DOWN, Grades, Ungraded
from slipstream.pipeline.failures import ResponseWatch
from slipstream.plan.engines import endpoint_of, server_settings
from slipstream.plan.graders import graders_apart
from slipstream.plan.lengths import longest_answer, prompts_seen_by
from slipstream.plan.prompts import DataFacts
from slipstream.rewards.functions import Answer

PROBED = 16
"""Number of prompt tokens that are sent to an endpoint as a test."""


def check_endpoints(data: DataFacts, longest: int) -> None:
    """Ask every endpoint of the run; `longest` is the largest number of tokens of a prompt with its response."""
    config, prompts, say = data.config, data.prompts, data.say
    own = {name: data.facts.tokenizers[name] for name, teacher in config.teachers.items() if teacher.spelling == "own"}
    check_teachers(config, data.tokenizer, prompts, say, {name: model.tokenizer for name, model in own.items()})
    check_judge(config, say)
    check_server(config, longest, prompts.tokens[0], say)


def check_teachers(
    config: Config,
    tokenizer: Tokenizer,
    prompts: Prompts,
    say: Callable[[str], None],
    own: Mapping[str, Tokenizer] = MappingProxyType({}),
) -> None:
    """Send a small request to every teacher's endpoint; raise ConfigError if it cannot serve what the loss needs.

    `own` are the tokenizers of teachers that do not have the student's `tokenizer`.
    """

    async def ask(endpoint: Endpoint, need: Requirements) -> str:
        with ResponseWatch(f"teacher {endpoint.teacher}", say).waiting():
            return await check(endpoint, need)

    for name, teacher in config.teachers.items():
        if endpoint := endpoint_of(config, name):
            highest = max(own[name].get_vocab().values()) if name in own else vocabulary_of(config.student) - 1
            seen = prompts_seen_by(config, name, own.get(name, tokenizer), prompts)
            tokens = [tokens for _, tokens in seen]
            longest = max(map(len, tokens)) + longest_answer(config, teacher)
            some = [*tokens[0][:PROBED].tolist(), *tokens[-1][:2].tolist()]
            need = Requirements(
                tokens=some, highest=highest, max_length=longest, k=config.loss.spec.k, best=teacher.max_logprobs
            )
            say(asyncio.run(ask(endpoint, need)))


def check_judge(config: Config, say: Callable[[str], None]) -> None:
    """Send one request to the judge, if there is one; raise ConfigError if it does not answer."""
    probe = Answer(
        text="", messages=[], tokens=[], prompt="", ground_truth="", meta={}, data_source="", finish="eos", outcome={}
    )

    async def ask(judge: Judge) -> Grades:
        with ResponseWatch(judge.endpoint.where, say).waiting():
            return (await judge.open().grades([("", probe)]))[0]

    for judge in graders_apart(config):
        if isinstance(judge, Judge):
            answer = asyncio.run(ask(judge))
            if isinstance(answer, Ungraded) and answer.cause in ("refused", ENDPOINT_DOWN):
                raise ConfigError(f"task.judge.base_url: {answer.text}: start it, or correct the address")
            say(f"{judge.endpoint.where} serves {judge.endpoint.model}, at most {judge.endpoint.timeout:g} s a request")
            if isinstance(answer, Ungraded):
                say(f"an empty response got no score: {answer.text}")


def check_server(config: Config, longest: int, prompt: Sequence[int], say: Callable[[str], None]) -> None:
    """Send small requests to the rollout server; raise ConfigError if it cannot serve the run."""
    if config.sampler.engine != "server":
        return
    settings = server_settings(config)
    api, url = APIS[settings.api](settings.endpoint, vocabulary_of(settings.model)), settings.endpoint.url

    async def ask() -> str:
        with ResponseWatch("the rollout server", say).waiting():
            await api.label()
            context = await api.context()
            if context is not None and context < longest:
                raise ConfigError(
                    f"sampler.server.url: {url} has a context of {context}, but prompt + sampler.max_tokens are up to "
                    f"{longest}: lower sampler.max_tokens, or start the server with {longest} or more"
                )
            if wrong := await api.unprocessed([int(token) for token in prompt], config.sampler.temperature):
                raise ConfigError(f"sampler.server.url: {url} {wrong}")
        return f"{api.where} answers" + (f", context {context}" if context is not None else "")

    try:
        say(asyncio.run(ask()))
    except EndpointError as error:
        if error.status in (401, 403) and "scale-out" not in str(error):
            hint = "sampler.server.api_key_env: the server wants a key: name its variable"
        else:
            hint = f"sampler.server.url = {url!r}: it cannot serve rollouts: {api.begin}"
        raise ConfigError(f"{hint} ({error})") from None


def served_model(config: Config, url: str, variable: str | None) -> Served:
    """Return the settings of a server that runs the model of an evaluation, which it must list by its name."""
    student, key = config.student, key_from_environment("--api-key-env", variable)
    try:
        endpoint = ServerEndpoint("", check_url(url), student, key, config.sampler.slots)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from None
    endpoint = replace(endpoint, model=served_name(endpoint, student))
    return Served(endpoint, "openai", student, config.sampler.dtype, folder="")
