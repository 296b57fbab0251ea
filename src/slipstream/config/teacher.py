"""Teachers: where each runs, whose answers it scores, and what it can give.

A teacher behind an endpoint gives what such servers give: log-probs of the tokens it is sent, at temperature 1, and of
its few best. What a loss asks beyond that is refused here, with what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from slipstream.config.base import OWN, Dtype, Replicas, Section
from slipstream.config.losses import LOSSES, LossConfig, caches

SELF = "self"
"""As `model`: the student as it was at the start."""
ATTEMPTS = ("best", "best_reward", "last", "last_reward")
"""What a context may show of the attempts at a prompt."""
CONTEXT_FIELDS = ("prompt", "ground_truth", "response", *ATTEMPTS)
OF_ENDPOINTS = ("tokenizer", "api_key_env", "max_logprobs", "concurrency", "timeout")
OF_MODELS_HERE = ("engine", "dtype", "token_budget", "packing", "longest")
OF_NATIVE = ("token_budget", "packing", "longest")


class FollowConfig(Section):
    """How a teacher's weights follow the student's: as a moving average, or as a copy."""

    ema: float | None = Field(None, gt=0, lt=1)
    """The teacher becomes so much of itself and the rest of the student: 0.99 moves slowly, 0.5 fast."""
    every: int = Field(1, ge=1)
    """Updates between two moves of the average, each of which is published to its scorers."""
    copy_every: int | None = Field(None, ge=1)
    """Updates after which the teacher becomes the student as it then is; in place of ema."""

    @model_validator(mode="after")
    def _one_way(self) -> FollowConfig:
        if (self.ema is None) == (self.copy_every is None):
            raise ValueError("takes one of ema and copy_every, as in { ema = 0.99, every = 5 } or { copy_every = 20 }")
        if self.ema is None and self.every != 1:
            raise ValueError("every is for ema: write copy_every alone")
        return self

    @property
    def decay(self) -> float:
        return self.ema or 0.0

    @property
    def period(self) -> int:
        return self.copy_every or self.every


class TeacherConfig(Section):
    model: str
    """HF directory or hub name, builtin:teacher, self (the student as it started), or its name at an endpoint."""
    engine: Literal["native", "vllm"] = "native"
    """What scores, where the model runs here."""
    base_url: str | None = None
    """OpenAI-compatible endpoint that serves it, for example http://teacher:8000/v1; without one, it runs here."""
    tokenizer: str | None = None
    """HF directory or hub name of an endpoint's tokenizer; `model` without it."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key."""
    max_logprobs: int = Field(20, ge=1)
    """Log-probs per token that the endpoint gives (vLLM: --max-logprobs)."""
    concurrency: int = Field(32, ge=1)
    """Requests to the endpoint at a time."""
    timeout: float = Field(120.0, gt=0)
    """Seconds that one request may take."""
    key: str | None = None
    """The data_source of the prompts that it scores; its own name without it. One teacher scores all."""
    weight: float = Field(1.0, ge=0)
    """How much its samples count in the distillation loss."""
    context: str | None = None
    """Template of the prompt that it sees instead of the student's: {prompt}, {ground_truth}, {response}, and of the
    attempts at this prompt so far {best}, {best_reward}, {last}, {last_reward}. Or a function that returns its text,
    "./file.py:function" or "module:function", which is given those of the same names that it asks for."""
    follow: FollowConfig | None = None
    """With model = "self": the teacher's weights follow the student's, { ema = 0.99, every = 5 } as their moving
    average, or { copy_every = 20 } as a copy; without it they stay as they were at the start."""
    relabel: Literal["never", "stale", "always"] = "never"
    """Score answers again just before they are learned from, with the exact KL of what it says now to what it said
    then (of an endpoint a lower bound): where its weights or the attempts have moved since (stale), or also where
    only a function that writes its context could know (always)."""
    dtype: Dtype = "float32"
    """Precision in which the teacher runs."""
    token_budget: int = Field(16384, ge=1)
    """Tokens, padding included, of one forward pass."""
    packing: bool = True
    """Several sequences in a row, each seeing itself only; off for models that cannot (padded instead)."""
    longest: int | None = Field(None, ge=2)
    """Longest prompt and response that it scores, in tokens; that of the data without it (see sampler.longest)."""
    replicas: Replicas = 1
    """How many copies score (of an endpoint: clients share its concurrency); groups go to the one with least to do.
    "auto" begins with one, has more while the learner waits for them and they help, and fewer where they are idle."""
    replicas_max: int = Field(8, ge=1)
    """The most that replicas = "auto" comes to."""

    recheck: float = Field(0.01, ge=0, le=1)
    """Share of its groups that are scored again, by another copy if there is one; what comes back must be the same."""

    @property
    def promised(self) -> float:
        """By how much log-probs of one response, scored twice, may be apart (root mean square): what is computed beside
        other rows rounds otherwise, and of an endpoint nobody knows in which precision."""
        return 0.01 if self.exact else 0.25

    @property
    def exact(self) -> bool:
        """Whether it computes in full precision, here."""
        return self.base_url is None and self.dtype != "bfloat16"

    @field_validator("base_url")
    @classmethod
    def _plain_url(cls, url: str | None) -> str | None:
        """Nothing secret may be in it: it is printed and saved. So no message here repeats it."""
        if url is None:
            return None
        form = "write http://HOST:PORT/v1, and nothing else"
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ValueError(f"not a URL: {form}") from None
        if parts.username is not None or parts.password is not None or "@" in url:
            raise ValueError(
                f"holds a user name or a password, which would be printed and saved: {form}; put the key into an "
                "environment variable and its name into api_key_env"
            )
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError(f"not a URL of an endpoint: {form}")
        if parts.query or parts.fragment:
            raise ValueError(f"goes on after the path: {form}")
        return url.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _name_of_variable(cls, name: str | None) -> str | None:
        """Keys are not all capitals, so whoever writes one here does not see it again in a log."""
        if name is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            raise ValueError(
                'is not the name of an environment variable, in capitals, such as "TEACHER_API_KEY"; never write the '
                "key itself into a config"
            )
        return name

    @field_validator("context")
    @classmethod
    def _template(cls, template: str | None) -> str | None:
        known = ", ".join(f"{{{name}}}" for name in CONTEXT_FIELDS)
        if template is None or OWN.fullmatch(template):
            return template
        try:
            found = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
        except ValueError as error:
            raise ValueError(f"{error}; write {{{{ and }}}} for braces that are meant") from None
        for name, spec, conversion in found:
            if name not in CONTEXT_FIELDS or spec or conversion:
                raise ValueError(f"no field {{{name}}}: there are {known}, and {{{{ and }}}} stand for braces")
        if not found:
            raise ValueError(f"would be the same for every prompt: use {known}")
        return template

    @property
    def own_context(self) -> bool:
        """Whether a function of the user's own writes what it sees."""
        return self.context is not None and OWN.fullmatch(self.context) is not None

    @property
    def context_fields(self) -> frozenset[str]:
        """What its template holds; whatever there is, of a function."""
        if self.context is None:
            return frozenset()
        if self.own_context:
            return frozenset(CONTEXT_FIELDS)
        return frozenset(name for _, name, *_ in Formatter().parse(self.context) if name is not None)

    @property
    def shows(self) -> tuple[str, ...]:
        """What it is shown of the attempts at a prompt."""
        return tuple(name for name in ATTEMPTS if name in self.context_fields)

    @model_validator(mode="after")
    def _one_place(self) -> TeacherConfig:
        endpoint = self.base_url is not None
        for name in OF_MODELS_HERE if endpoint else OF_ENDPOINTS:
            if getattr(self, name) != type(self).model_fields[name].default:
                what = "a model that runs here: drop it or" if endpoint else "an endpoint: drop it, or add"
                raise ValueError(f"{name} is for {what} base_url")
        for name in OF_NATIVE if self.engine == "vllm" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} is for engine = "native": drop one of them, as vLLM makes its own passes')
        if self.replicas == "auto" and endpoint:
            raise ValueError('replicas = "auto" is for a model that runs here: of an endpoint, write concurrency')
        if self.model == SELF and endpoint:
            raise ValueError('model = "self" runs here: drop base_url, or name the model that the endpoint serves')
        if self.model == SELF and self.context is None and self.follow is None:
            raise ValueError('model = "self" has nothing to teach before it sees more than the student: add a context')
        if self.own_context and (endpoint or self.engine != "native"):
            raise ValueError('a context that a function writes is for engine = "native": write a template')
        if self.own_context and self.longest is None:
            raise ValueError("longest is missing: nobody knows how long a context is that a function writes; say so")
        if self.follow is not None and self.model != SELF:
            raise ValueError('follow is for model = "self", whose weights come from the student: drop one of them')
        if self.relabel != "never" and not endpoint and self.engine != "native":
            raise ValueError('relabel is for engine = "native", or an endpoint: drop it')
        if self.relabel != "never" and self.follow is None and not self.shows:
            raise ValueError(
                "relabel has nothing to do, as this teacher says the same at any time: drop it, or add follow, or a "
                "context of attempts, such as {best}"
            )
        if self.follow is not None and self.engine != "native":
            raise ValueError('follow is for engine = "native": no weights are published to a teacher in vLLM')
        return self


def routed_by(teachers: Mapping[str, TeacherConfig]) -> dict[str, str]:
    """From the key of prompts to the name of their teacher."""
    return {name if teacher.key is None else teacher.key: name for name, teacher in teachers.items()}


def problems(teachers: Mapping[str, TeacherConfig], loss: LossConfig) -> Iterator[str]:
    """What these teachers cannot do together, or for this loss."""
    keys: dict[str, str] = {}
    for name, teacher in teachers.items():
        key = name if teacher.key is None else teacher.key
        if len(teachers) > 1 and key in keys:
            yield (
                f"teachers.{keys[key]} and teachers.{name} both have key = {key!r}: each prompt has one teacher, give "
                "one of them another key"
            )
        keys[key] = name
    if len(teachers) > 1 and loss.asks.cache == "hidden":
        yield (
            f'loss.kind = "{loss.kind}" with cache = "hidden" applies the head of one teacher: with several write '
            'cache = "teacher_topk", or loss.kind = "reverse_kl_mc"'
        )
    for name, teacher in teachers.items():
        if teacher.base_url is not None:
            yield from beyond_endpoint(f"teachers.{name}", teacher, loss)
        if teacher.follow is not None and loss.asks.cache == "hidden":
            yield (
                f'loss.kind = "{loss.kind}" with cache = "hidden" applies the head of one that stays as it is, and '
                f'teachers.{name}.follow moves it: write cache = "teacher_topk", or loss.kind = "reverse_kl_mc"'
            )


def beyond_endpoint(where: str, teacher: TeacherConfig, loss: LossConfig) -> Iterator[str]:
    asks, here = loss.asks, "or run the teacher here (no base_url)"
    if loss.temperature != 1:
        yield (
            f"loss.temperature = {loss.temperature:g}: {where} is an endpoint, which scores at temperature 1 only: "
            f"write loss.temperature = 1, {here}"
        )
    if asks.cache == "hidden":
        topk = "teacher_topk" in caches(type(loss))
        other = 'loss.cache = "teacher_topk"' if topk else 'loss.kind = "reverse_kl_mc"'
        yield f'loss.cache = "hidden": {where} is an endpoint, which gives no hidden states: write {other}, {here}'
    if asks.cache == "student_topk":
        yield (
            f'loss.kind = "{loss.kind}": {where} is an endpoint, which scores the emitted token and none of the '
            f'student\'s other {asks.k}: write loss.kind = "forward_kl", {here}'
        )
    if asks.draws > 1:
        yield (
            f"loss.m = {asks.draws}: {where} is an endpoint, which scores the emitted token and no other draws: write "
            f"loss.m = 1, {here}"
        )
    if asks.cache == "teacher_topk" and asks.k > teacher.max_logprobs:
        yield (
            f"loss.k = {asks.k}: {where} gives {teacher.max_logprobs} log-probs per token: write loss.k = "
            f"{teacher.max_logprobs}, or start its server with --max-logprobs {asks.k} and write {where}.max_logprobs "
            f"= {asks.k}"
        )


def suited(loss: dict[str, Any], most: int) -> dict[str, Any]:
    """What defaults of a loss become where endpoints score, which give at most so many log-probs per token.

    `loss` is what was written: only what it leaves open changes.
    """
    row = LOSSES.get(str(loss.get("kind")))
    if row is None:
        return {}
    changes: dict[str, Any] = {}
    defaults = {name: info.default for name, info in row.model_fields.items()} | loss
    if "m" in defaults and "m" not in loss:
        changes["m"] = 1
    if "teacher_topk" in caches(row):
        if "cache" not in loss and defaults["cache"] == "hidden":
            changes["cache"] = "teacher_topk"
        if (defaults | changes)["cache"] == "teacher_topk" and "k" not in loss and most < defaults["k"]:
            changes["k"] = most
    return changes
