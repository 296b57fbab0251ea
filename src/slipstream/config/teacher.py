"""Teachers: the place where a teacher runs, the responses that it scores, and the scores that it can provide.

A teacher behind an endpoint returns log-probs of the given tokens and of a few most likely tokens, at temperature 1. A
loss that needs more raises an error here, and the message names settings to write instead.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from slipstream.config.base import (
    HALVES,
    OWN,
    Dtype,
    Replicas,
    Section,
    TemplateArgs,
    Url,
    Variable,
    template_fields,
)
from slipstream.config.engines import ENGINES, EngineArgs, devices_of
from slipstream.config.losses import DISTILLATION_LOSSES, DistillationLoss, caches, without_hidden_states

SELF = "self"
"""Value of `model` that means the student's own weights at the start of the run."""
ATTEMPTS = ("best", "best_reward", "last", "last_reward")
"""Fields of a context template that show earlier attempts at the prompt."""
CONTEXT_FIELDS = ("prompt", "ground_truth", "response", *ATTEMPTS)
ENDPOINT_OPTIONS = ("tokenizer", "api_key_env", "max_logprobs", "concurrency", "timeout", "noise")
LOCAL_OPTIONS = ("engine", "engine_args", "devices", "dtype", "token_budget", "packing", "max_length")


class FollowConfig(Section):
    """Schedule by which a teacher's weights follow the student's: as a moving average, or as a copy."""

    ema: float | None = Field(None, gt=0, lt=1)
    """Decay of the moving average: the share of the teacher's own weights that stays at each step. 0.99 follows slowly,
    0.5 fast. None needs copy_every."""
    every: int = Field(1, ge=1)
    """Number of updates between two steps of the moving average. Each step is published to the teacher's scorers."""
    copy_every: int | None = Field(None, ge=1)
    """Number of updates after which the teacher becomes a copy of the current student. None needs ema."""

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
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
    """HF directory or hub name, builtin:teacher, self (the student's weights at the start), or a name at base_url."""
    engine: Literal["native", "vllm", "auto"] = "native"
    """Inference engine that runs a local teacher. auto: vLLM if it is installed and can score what the loss needs, and
    native otherwise; a line states the choice."""
    engine_args: EngineArgs = Field({})
    """Arguments of vLLM's engine, for example { tensor_parallel_size = 4, gpu_memory_utilization = 0.9 }. Only for
    engine = "vllm"."""
    devices: int = Field(1, ge=1)
    """Number of devices of one copy of the teacher: its layers are split over them, and its head is on the first. Only
    for engine = "native"; on a CPU all of them are the CPU."""
    base_url: Url | None = None
    """URL of an OpenAI-compatible endpoint, for example http://teacher:8000/v1. None runs the teacher locally."""
    tokenizer: str | None = None
    """HF directory or hub name of the endpoint's tokenizer. None uses `model`."""
    api_key_env: Variable | None = None
    """Name of the environment variable that holds the endpoint's key. None sends no key."""
    max_logprobs: int = Field(20, ge=1)
    """Number of log-probs per token that the endpoint returns. Set it to the server's limit (vLLM: --max-logprobs)."""
    concurrency: int = Field(32, ge=1)
    """Number of concurrent requests to the endpoint. Raise it if the server can serve more."""
    timeout: float = Field(120.0, gt=0)
    """Time limit of one request in seconds."""
    noise: float = Field(0.2, gt=0)
    """Largest root mean square difference between the endpoint's log-probs of equal texts at the start, in nats. Larger
    noise stops the run, and canaries would not notice changes below three times the measured noise."""
    key: str | None = None
    """Value of data_source (data.teacher_key) that selects this teacher's prompts. None: the teacher's name. A single
    teacher scores all prompts."""
    weight: float = Field(1.0, ge=0)
    """Weight of this teacher's samples in the distillation loss."""
    context: str | None = None
    """Template of the prompt that the teacher sees instead of the student's prompt. Fields: {prompt}, {ground_truth},
    {response}, and of earlier attempts at this prompt {best}, {best_reward}, {last}, {last_reward}. A user function,
    "./file.py:function" or "module:function", can return the text instead. The function receives the fields that its
    parameters name. None shows the student's prompt."""
    ends: Literal["same", "map"] = "same"
    """End tokens of the teacher. same: those of the student, and others are refused. map: in every distribution of the
    teacher the student's end token has the probability of all end tokens of both, and the other ends have none."""
    spelling: Literal["same", "own"] = "same"
    """Tokenizer of the teacher. same: the student's, and another is refused. own: another one; the teacher scores the
    bytes of a response in its own tokens, after the prompt in its own chat template."""
    template_args: TemplateArgs = Field({})
    """Arguments of the teacher's own chat template with spelling = "own", for example enable_thinking = false, over
    those of data.template_args that it reads."""
    follow: FollowConfig | None = None
    """Schedule by which the weights of a teacher with model = "self" follow the student: { ema = 0.99, every = 5 } is a
    moving average, { copy_every = 20 } is a copy. None keeps the weights of the start."""
    relabel: Literal["never", "stale", "always"] = "never"
    """Responses that are scored again just before the update. stale: responses for which the teacher's weights or the
    shown attempts changed. always: all; use this with a context written by a function. The KL between new and old
    scores is measured too (for an endpoint, and for spelling = "own", a lower bound)."""
    dtype: Dtype = "float32"
    """Number format of the teacher's weights and computations."""
    token_budget: int = Field(16384, ge=1)
    """Largest number of tokens, padding included, in one forward pass. Lower it if memory runs out."""
    packing: bool = True
    """Put several sequences into one row; a sequence attends only to itself. Write false for models without support."""
    max_length: int | None = Field(None, ge=2)
    """Largest number of tokens of a prompt with its response. None: the longest in the data (see sampler.max_length).
    vLLM reserves memory for this length, and no more."""
    replicas: Replicas = 1
    """Number of copies of the teacher. For an endpoint this is the number of clients that share `concurrency`. Each
    group goes to the least busy copy. "auto" starts with one, adds copies while the learner waits for scores and more
    copies help, and removes idle copies."""
    replicas_max: int = Field(8, ge=1)
    """Largest number of copies that replicas = "auto" can choose."""
    recheck: float = Field(0.01, ge=0, le=1)
    """Share of groups that are scored twice, by another copy if possible, to check that both scores agree. 0: none."""

    @property
    def promised(self) -> float:
        """Return the allowed root mean square difference between two scorings of one response, in log-probs."""
        # rounding depends on the other rows of a batch; the precision of an endpoint is unknown
        return 0.01 if self.exact else 0.25

    @property
    def noise_limit(self) -> float:
        """Return the largest noise of log-probs that is accepted at the start."""
        return self.noise if self.base_url is not None else 0.01 if self.exact else 0.1

    @property
    def devices_each(self) -> int:
        """Return the number of devices of one copy of this teacher; 0 for an endpoint."""
        return 0 if self.base_url is not None else self.devices * devices_of(self.engine_args)

    @property
    def exact(self) -> bool:
        return self.base_url is None and self.dtype not in HALVES

    @field_validator("context")
    @classmethod
    def _check_context(cls, template: str | None) -> str | None:
        if template is None or OWN.fullmatch(template):
            return template
        known, fields = ", ".join(f"{{{name}}}" for name in CONTEXT_FIELDS), template_fields(template)
        for name, spec, conversion in fields:
            if name not in CONTEXT_FIELDS or spec or conversion:
                raise ValueError(f"no field {{{name}}}: there are {known}, and {{{{ and }}}} stand for braces")
        if not fields:
            raise ValueError(f"would be the same for every prompt: use {known}")
        return template

    @property
    def own_context(self) -> bool:
        """Return whether a user function writes the context."""
        return self.context is not None and OWN.fullmatch(self.context) is not None

    @property
    def context_fields(self) -> frozenset[str]:
        """Return the names of the context fields that the template uses; all names for a user function."""
        if self.own_context:
            return frozenset(CONTEXT_FIELDS)
        return frozenset(name for name, *_ in template_fields(self.context or ""))

    @property
    def features(self) -> set[str]:
        """Return names of the features that this teacher needs from its engine, in addition to scoring."""
        changed = self.changed(*LOCAL_OPTIONS, "relabel", "follow", "ends")
        return {*changed, "user_context"} if self.own_context else set(changed)

    @property
    def shows(self) -> tuple[str, ...]:
        """Return the context fields about earlier attempts that the teacher sees."""
        return tuple(name for name in ATTEMPTS if name in self.context_fields)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        endpoint = self.base_url is not None
        for name in self.changed(*(LOCAL_OPTIONS if endpoint else ENDPOINT_OPTIONS)):
            what = "a model that runs here: drop it or" if endpoint else "an endpoint: drop it, or add"
            raise ValueError(f"{name} is for {what} base_url")
        for feature, why in ENGINES["http" if endpoint else self.engine].teacher_refuses.items():
            if feature in self.features:
                raise ValueError(why)
        if self.replicas == "auto" and endpoint:
            raise ValueError('replicas = "auto" is for a model that runs here: for an endpoint, set concurrency')
        if self.model == SELF and endpoint:
            raise ValueError('model = "self" runs here: drop base_url, or name the model that the endpoint serves')
        if self.model == SELF and self.ends == "map":
            raise ValueError('ends = "map" does nothing with model = "self", which ends as the student does: drop it')
        if self.template_args and self.spelling != "own":
            raise ValueError(
                'template_args is for spelling = "own": this teacher reads the prompt in the student\'s tokens; drop it'
            )
        if self.spelling == "own":
            if self.model == SELF:
                raise ValueError(
                    'spelling = "own" does nothing with model = "self", which spells as the student: drop it'
                )
            if self.ends == "map":
                raise ValueError(
                    'ends = "map" does nothing with spelling = "own", which maps end tokens itself: drop it'
                )
            if self.own_context:
                raise ValueError(
                    'spelling = "own" cuts responses to the room beside a context, and a function writes contexts of '
                    "unknown length: write context as a template, or drop one of both"
                )
        if self.model == SELF and self.context is None and self.follow is None:
            raise ValueError('model = "self" has nothing to teach before it sees more than the student: add a context')
        if self.own_context and self.max_length is None:
            raise ValueError("max_length is missing: a function writes the context, of unknown length; set max_length")
        if self.follow is not None and self.model != SELF:
            raise ValueError('follow is for model = "self", whose weights come from the student: drop one of them')
        if self.relabel != "never" and self.follow is None and not self.shows:
            raise ValueError(
                "relabel has nothing to do, because this teacher's scores never change: drop it, or add follow, or a "
                "context of attempts, such as {best}"
            )
        return self


def routed_by(teachers: Mapping[str, TeacherConfig]) -> dict[str, str]:
    """Return the name of the teacher for each value of the data column that data.teacher_key names."""
    return {name if teacher.key is None else teacher.key: name for name, teacher in teachers.items()}


def problems(teachers: Mapping[str, TeacherConfig], loss: DistillationLoss | None) -> Iterator[str]:
    """Yield a message for each conflict among these teachers, or between a teacher and the loss, if there is one."""
    last_with_key = routed_by(teachers)
    for name, teacher in teachers.items():
        key = name if teacher.key is None else teacher.key
        if (other := last_with_key[key]) != name:
            yield (
                f"teachers.{name} and teachers.{other} both have key = {key!r}: each prompt has one teacher, give "
                "one of them another key"
            )
    if loss is None:
        return
    for name, teacher in teachers.items():
        if teacher.spelling == "own":
            yield from spelling_problems(f"teachers.{name}", loss)
        if teacher.base_url is not None:
            yield from endpoint_problems(f"teachers.{name}", teacher, loss)


def spelling_problems(where: str, loss: DistillationLoss) -> Iterator[str]:
    """Yield a message for each setting that needs more than the log-prob of a span of bytes from a teacher."""
    own = f'{where}.spelling = "own"'
    if loss.spec.merges and loss.temperature != 1:
        yield f"loss.temperature = {loss.temperature:g}: {own} scores whole spans at temperature 1 only: write 1"
    if loss.spec.own_vocabulary:
        return
    if loss.spec.cache != "sampled":
        yield (
            f'loss.kind = "{loss.kind}": {own} gives no probabilities of the student\'s other tokens, only of bytes '
            'that it wrote: write loss.kind = "reverse_kl_mc", "common_topk", or a teacher with its tokenizer'
        )
    if loss.spec.draws > 1:
        yield f"loss.m = {loss.spec.draws}: {own} scores the emitted tokens and no other draws: write loss.m = 1"
    if loss.temperature != 1:
        yield f"loss.temperature = {loss.temperature:g}: {own} scores spans at temperature 1 only: write 1"
    if "reference" in loss.spec.takes:
        yield f"loss.reward_scale compares single tokens with the reference, and {own} scores spans: drop it"


def endpoint_problems(where: str, teacher: TeacherConfig, loss: DistillationLoss) -> Iterator[str]:
    cache, k, draws, here = loss.spec.cache, loss.spec.k, loss.spec.draws, "or run the teacher here (no base_url)"
    if loss.temperature != 1:
        yield (
            f"loss.temperature = {loss.temperature:g}: {where} is an endpoint, which scores at temperature 1 only: "
            f"write loss.temperature = 1, {here}"
        )
    if cache == "hidden":
        other = without_hidden_states(loss)
        yield f'loss.cache = "hidden": {where} is an endpoint, which gives no hidden states: write {other}, {here}'
    if cache == "student_topk":
        yield (
            f'loss.kind = "{loss.kind}": {where} is an endpoint, which scores the emitted token and none of the '
            f'student\'s other {k}: write loss.kind = "forward_kl", {here}'
        )
    if draws > 1:
        yield (
            f"loss.m = {draws}: {where} is an endpoint, which scores the emitted token and no other draws: write "
            f"loss.m = 1, {here}"
        )
    if cache == "teacher_topk" and k > teacher.max_logprobs:
        yield (
            f"loss.k = {k}: {where} gives {teacher.max_logprobs} log-probs per token: write loss.k = "
            f"{teacher.max_logprobs}, or start its server with --max-logprobs {k} and write {where}.max_logprobs = {k}"
        )


def spelling_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Return new defaults of a loss for teachers with another tokenizer, which score only the emitted token."""
    row = DISTILLATION_LOSSES.get(str(given.get("kind")))
    return {"m": 1} if row is not None and "m" in row.model_fields and "m" not in given else {}


def endpoint_defaults(given: dict[str, Any], max_logprobs: int) -> dict[str, Any]:
    """Return new defaults of a loss for endpoint teachers that return `max_logprobs` log-probs per token.

    `given` holds the loss options that the config file sets. Only defaults of other options are returned.
    """
    row = DISTILLATION_LOSSES.get(str(given.get("kind")))
    if row is None:
        return {}
    defaults = {name: info.default for name, info in row.model_fields.items()}
    changes: dict[str, Any] = {"m": 1} if "m" in defaults else {}
    if "teacher_topk" in caches(row):
        changes["cache"] = "teacher_topk"
        if given.get("cache", "teacher_topk") == "teacher_topk":
            changes["k"] = min(max_logprobs, defaults["k"])
    return {name: value for name, value in changes.items() if name not in given and value != defaults[name]}
