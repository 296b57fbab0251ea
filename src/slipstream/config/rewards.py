"""Section `[task]`: rewards that grade answers, and a section for each built-in reward with settings, `[task.NAME]`."""

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from slipstream.config.base import Dtype, Section, Url, Variable, as_tuple, check_own, template_fields
from slipstream.config.environment import Where


def check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(check_pattern)]
REWARDS = ("exact", "math", "environment", "format", "overlong", "model", "judge", "reasoning_gym")


class FormatConfig(Section):
    tags: tuple[str, ...] = ("think", "answer")
    """Tags of which the whole response must consist, in this order, each once: <think>…</think><answer>…</answer>.
    Other text is allowed inside of tags only."""
    pattern: Pattern | None = None
    """Regular expression that the whole response must match, instead of `tags`; a dot matches line ends too. None uses
    the tags."""

    @field_validator("tags")
    @classmethod
    def _check_tags(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        wrong = next((tag for tag in tags if not re.fullmatch(r"[\w-]+", tag) or tags.count(tag) > 1), None)
        if wrong is not None or not tags:
            raise ValueError('write the names of different tags without brackets, such as ["think", "answer"]')
        return tags

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        if self.pattern is not None and self.changed("tags"):
            raise ValueError("pattern and tags both describe the response: keep one of them")
        return self


class OverlongConfig(Section):
    buffer: int = Field(ge=1)
    """Number of tokens below sampler.max_tokens in which the penalty grows from 0 to its full size, linearly."""
    penalty: float = Field(1.0, gt=0)
    """Penalty of a response with sampler.max_tokens tokens; its reward is the negative of this number."""


class RewardModelConfig(Section):
    path: str = Field(min_length=1)
    """HF directory of a model for sequence classification with one label, which is the reward."""
    max_length: int | None = Field(None, ge=1)
    """Largest number of tokens of a prompt with its response; longer ones are ungraded. None uses the model's
    context."""
    batch: int = Field(16, ge=1)
    """Largest number of responses in one pass."""
    dtype: Dtype = "float32"
    """Number format of weights and computations."""


class JudgeConfig(Section):
    base_url: Url
    """URL of an OpenAI-compatible endpoint with chat completions, for example http://judge:8000/v1."""
    model: str
    """Name of the model at the endpoint."""
    api_key_env: Variable | None = None
    """Name of the environment variable that holds the endpoint's key. None sends no key."""
    prompt: str
    """Template of the request, with the fields {prompt}, {response} and {ground_truth}; {{ and }} stand for braces."""
    pattern: Pattern | None = None
    """Regular expression whose first group is the score in the judge's answer; the last match counts. None needs
    `key`."""
    key: str | None = None
    """Key of the score in the JSON object that the judge answers with. None needs `pattern`."""
    max_tokens: int = Field(512, ge=1)
    """Largest number of tokens of the judge's answer; an answer that is cut off there gives no score."""
    concurrency: int = Field(32, ge=1)
    """Number of concurrent requests of each sampler."""
    timeout: float = Field(120.0, gt=0)
    """Time limit of one request in seconds."""

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        fields = template_fields(prompt)
        for name, spec, conversion in fields:
            if name not in ("prompt", "response", "ground_truth") or spec or conversion:
                raise ValueError(f"no field {{{name}}}: there are {{prompt}}, {{response}} and {{ground_truth}}")
        if "response" not in [name for name, *_ in fields]:
            raise ValueError("does not show the {response}, so all responses would get the same score")
        return prompt

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        if pattern is not None and re.compile(pattern).groups < 1:
            raise ValueError(f"{pattern!r} has no group for the score: write, for example, 'score: (\\d+)'")
        return pattern

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        if (self.pattern is None) == (self.key is None):
            raise ValueError("write pattern, or key for a judge that answers in JSON; one of the two")
        return self


def name_of(reward: str) -> str:
    return reward.rpartition(":")[2]


def check_reward(spec: str) -> str:
    check_own(spec, REWARDS, "reward", "function")
    return spec


class TaskConfig(Section):
    reward: tuple[str, ...] = ()
    """Rewards that grade answers; one name or a list: exact (text), math (by math-verify), environment (its own
    reward), format and overlong (form and length), model (a reward model), judge (a model behind an endpoint),
    reasoning_gym (the scorer of its tasks), or a user function "./file.py:function" or "module:function". All rewards
    are logged. The first one is the accuracy of evaluation. Empty grades nothing."""
    format: FormatConfig | None = None
    overlong: OverlongConfig | None = None
    model: RewardModelConfig | None = None
    judge: JudgeConfig | None = None
    sandbox: Where = None
    """Sandbox in which rewards that ask for `sandbox` run code: bubblewrap, the URL of a server with SandboxFusion's
    API, or "none", which isolates nothing. None provides no sandbox."""
    timeout: float = Field(10.0, gt=0)
    """Time limit in seconds of one reward for one answer, and of one function that writes a teacher's context. An
    answer that exceeds the limit is dropped and counted."""

    @field_validator("reward", mode="before")
    @classmethod
    def _one_or_several(cls, reward: Any) -> Any:
        return () if reward is None else as_tuple(reward)

    @field_validator("reward")
    @classmethod
    def _check_names(cls, reward: tuple[str, ...]) -> tuple[str, ...]:
        names = {name_of(check_reward(spec)) for spec in reward}
        if len(set(reward)) < len(reward):
            raise ValueError(f"{', '.join(reward)} names a reward twice: write each once")
        if len(names) < len(reward):
            raise ValueError(f"{', '.join(reward)}: two of these have one name in the metrics: rename a function")
        return reward

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        for name in ("format", "overlong", "model", "judge"):
            if getattr(self, name) is not None and name not in self.reward:
                raise ValueError(f'[task.{name}] does nothing: add "{name}" to task.reward, or drop it')
        examples = {"overlong": "{ buffer = 64 }", "model": '{ path = "DIRECTORY" }', "judge": "{ base_url = …, … }"}
        for name, example in examples.items():
            if name in self.reward and getattr(self, name) is None:
                raise ValueError(f'reward = "{name}" needs its settings: write, for example, {name} = {example}')
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the rewards in metrics and settings. A user function has its function name."""
        return tuple(map(name_of, self.reward))
