"""Plan of an evaluation of one model on held-out prompts, for `eval` and the demo."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from slipstream.config.base import check_url
from slipstream.config.schema import DataConfig, name_of
from slipstream.data.prompts import Prompts, Row
from slipstream.data.tokenizers import Tokenizer, check_ids, encode_rows
from slipstream.engines.http.client import key_from_environment
from slipstream.engines.native.config import context_length, load_config, vocabulary_of
from slipstream.engines.server.api import Served, ServerEndpoint, served_name
from slipstream.engines.vllm.core import COLDEST, Settings, check_installed
from slipstream.errors import ConfigError, DataError
from slipstream.models.adapters import is_adapter
from slipstream.plan.engines import EnvironmentPlan, GraderPlan, ModelPlan, SamplerPlan
from slipstream.plan.environment import Tools
from slipstream.protocols import Sampling
from slipstream.records import Prompt, Ungraded
from slipstream.rewards import grading
from slipstream.rewards.functions import Answer, RewardSettings, unfit

SLOW = 1.0
"""Seconds for one answer from which a reward gets a warning."""
FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "The answer is {}.", "<answer>{}</answer>")
"""Usual forms in which a response contains its answer; `reward_warnings` tests rewards with them."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Settings of an evaluation, named like command-line options. Defaults are for a model that no run saved."""

    data: Mapping[str, str] = field(default_factory=lambda: {"": "builtin:arithmetic"})
    """Data source of each set of prompts, by the set's name. The name may be empty if there is only one set."""
    split: str = "eval"
    where: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    answer: str | None = None
    template: str | None = None
    chat: bool = False
    system_prompt: str | None = None
    reward: tuple[str, ...] = ("exact",)
    limit: int | Mapping[str, int] = 200
    """Number of prompts of each set; one number, or one for each set by name."""
    n: int | Mapping[str, int] = 4
    """Samples of each prompt, like `limit`."""
    max_tokens: int = 96
    temperature: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    template_args: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None
    """Longest sequence in tokens, by which some models choose position factors. None: computed from the prompts."""
    slots: int = 64
    threads: int = 1
    graders: int = 1
    timeout: float = 30.0
    sandbox: str | None = None
    """Kind of sandbox in which rewards run code; None if rewards get no sandbox."""
    reward_settings: RewardSettings = field(default_factory=dict)
    """Settings of the rewards, by name; only a run has them."""
    apart: tuple[Any, ...] = ()
    """Reward model and judge of the run."""
    environment: EnvironmentPlan | None = None
    engine: str = "native"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine, from the run."""
    url: str | None = None
    """OpenAI-compatible server that runs the model; None: the model runs here."""
    api_key_env: str | None = None

    def of(self, name: str, key: Literal["n", "limit"]) -> int:
        value: int | Mapping[str, int] = getattr(self, key)
        return value if isinstance(value, int) else value[name]

    def sampling(self, name: str) -> Sampling:
        return Sampling(max_tokens=self.max_tokens, group=self.of(name, "n"), temperature=self.temperature)


@dataclass(frozen=True)
class Evaluation:
    tokenizer: Tokenizer
    sets: Mapping[str, Sequence[Prompt]]
    sampler: SamplerPlan
    sampling: Mapping[str, Sampling]
    """Sampling of each set, by the set's name."""
    grader: GraderPlan


def graded_rows(
    rows: Sequence[Row], rewards: Sequence[str], sandbox: str | None = None, settings: RewardSettings | None = None
) -> Sequence[Row]:
    """Return the rows unchanged; raise DataError for a row whose answer is missing or unusable for a reward."""
    needed = grading.needs(rewards, sandbox, settings)
    for row in rows if rewards else ():
        for reward in rewards:
            if row.ground_truth is None:
                if "ground_truth" in needed[reward]:
                    raise DataError(
                        f"{row.place}: has no answer, which the reward {reward!r} needs: set data.answer to its column"
                    )
            elif why := unfit(reward, row.ground_truth):
                raise DataError(f"{row.place}: the reward {reward!r} cannot compare the answer: {why}")
    return rows


def eval_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    seed: int,
    tools: Tools = None,
    tells: bool = False,
    teachers: Sequence[str] = (),
) -> list[Prompt]:
    """Return the prompts in the order of the rows. `tells`: prompts keep their text or messages, which agents need.

    `teachers` are the names of the rows' teachers, if they score answers.
    """
    tokens = encode_rows(rows, tokenizer, data, tools)
    prompts = Prompts(rows, tokens, seed=seed, shuffle=False, tells=tells, teachers=teachers)
    return [prompts.at(number) for number in range(len(rows))]


def reward_warnings(rows: Sequence[Row], rewards: Sequence[str], timeout: float) -> list[str]:
    """Return a warning for each reward that gives 0 to the first right answers of the data in every form of `FORMS`.

    Raise ConfigError if grading the first answer takes more than `timeout` seconds.
    """
    answered = [row for row in rows[:3] if isinstance(row.ground_truth, str | int | float)]
    answers = [
        Answer(text=text, messages=[{"role": "assistant", "content": text}], tokens=[], prompt=str(row.prompt),
               ground_truth=row.ground_truth, meta=row.meta, data_source=row.data_source, finish="eos", outcome={})
        for row in answered
        for text in (form.format(row.ground_truth) for form in FORMS)
    ]  # fmt: skip
    process = grading.GradingProcess(rewards, timeout=timeout)
    try:
        process.ready()
        began = time.monotonic()
        graded = process.grades(answers[:1])
        seconds = time.monotonic() - began
        if seconds > SLOW:
            limit = f"task.timeout = {timeout:g} s"
            if all(isinstance(each, Ungraded) and each.cause == "timeout" for each in graded):
                raise ConfigError(
                    f"task.reward: {', '.join(rewards)} took more than {limit} for the first answer: make it faster, "
                    "or raise the limit"
                )
            return [f"task.reward: {', '.join(rewards)} took {seconds:.1f} s for the first answer, {limit}"]
        grades = [each for each in process.grades(answers) if isinstance(each, dict)]
    finally:
        process.close()
    return [
        f"task.reward = {reward!r} gives 0 to the right answer of {answered[0].place} and others, {answers[0].text!r}, "
        f"in every form that was tried ({answers[3].text!r} …): check that it can give more"
        for reward in rewards
        if grades and not any(each[name_of(reward)] for each in grades)
    ]


def evaluation(
    model: str, sets: Mapping[str, Sequence[Prompt]], tokenizer: Tokenizer, asked: EvalSettings
) -> Evaluation:
    """Make the plan of an evaluation; raise DataError if a prompt does not fit the model. No weights are loaded."""
    longest, context = asked.longest or 0, context_length(load_config(model))
    for prompts in sets.values():
        check_ids(prompts, [prompt.tokens for prompt in prompts], model, vocabulary_of(model))
        for prompt in prompts:
            drawn = len(prompt.tokens) + asked.max_tokens
            if drawn > context:
                raise DataError(f"{prompt.id}: prompt and --max-tokens exceed the context of {context} of {model}")
            longest = max(longest, drawn)
    slots = max(asked.slots, *(asked.of(name, "n") for name in sets))
    return Evaluation(
        tokenizer=tokenizer,
        sets=sets,
        sampler=SamplerPlan(
            runs=engine_of(model, asked, longest, slots),
            slots=slots,
            threads=asked.threads,
            environment=asked.environment,
        ),
        sampling={name: asked.sampling(name) for name in sets},
        grader=GraderPlan(
            rewards=asked.reward,
            processes=asked.graders,
            timeout=asked.timeout,
            sandbox=asked.sandbox,
            settings=asked.reward_settings,
            apart=tuple(each for each in asked.apart if each.name in asked.reward),
        ),
    )


def engine_of(model: str, asked: EvalSettings, longest: int, slots: int) -> ModelPlan | Settings | Served:
    """Return the plan of the engine that samples; ConfigError if it cannot run the model as asked."""
    if asked.url is not None:
        try:
            url = check_url(asked.url)
        except ValueError as error:
            raise ConfigError(f"--url: {error}") from None
        endpoint = ServerEndpoint("", url, model, key_from_environment("--api-key-env", asked.api_key_env), slots)
        endpoint = replace(endpoint, model=served_name(endpoint, model))
        return Served(endpoint, "openai", model, asked.dtype, folder="")
    if asked.engine == "native":
        return ModelPlan(name=model, dtype=asked.dtype, device=asked.device, longest=longest)
    check_installed("--engine")
    if is_adapter(model):
        raise ConfigError(f"--engine vllm: {model} is an adapter: name the directory above it, a model with it merged")
    if 0 < asked.temperature < COLDEST:
        raise ConfigError(f"--temperature {asked.temperature:g}: vLLM would sample at {COLDEST}; write that or more")
    args = {"max_model_len": longest, **asked.engine_args}
    return Settings(model, asked.dtype, slots, args, threads=asked.threads, device=asked.device, seed=asked.seed)
