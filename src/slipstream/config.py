"""The configuration: one schema, one set of defaults, unknown keys fail.

A file is TOML; `--a.b value` on the command line overrides `a.b`. The text under each field is its help, printed by
`slipstream config`. A field whose values need different settings (`loss`, `schedule`) is a union told apart by `kind`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slipstream.errors import ConfigError, did_you_mean

Dtype = Literal["float32", "bfloat16", "float64"]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Epsilon = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class DataConfig(Section):
    train: str = "builtin:arithmetic"
    """Prompts: a .jsonl or .parquet file, a saved or hub HF dataset, or builtin:arithmetic."""
    split: str = "train"
    """Split of a HF dataset, or of builtin:arithmetic (train, eval)."""
    eval: str | None = None
    """Held-out prompts in the same formats; without it nothing is evaluated during training."""
    eval_split: str = "eval"
    """Split of the held-out prompts."""
    limit: int | None = Field(None, ge=1)
    """Use only the first so many training rows."""
    shuffle: bool = True
    """Draw the rows of every epoch in a new random order that follows from `seed`."""
    system_prompt: str | None = None
    """Put this system message before every conversation; needs a chat template."""
    template_args: dict[str, Any] = {}
    """Arguments of the chat template, for example enable_thinking = false."""

    @field_validator("template_args")
    @classmethod
    def _in_toml(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name, value in args.items():
            if value is None:
                raise ValueError(f"{name} cannot be none: leave it out")
        return args


class TeacherConfig(Section):
    model: str
    """HF directory or hub name, or builtin:teacher."""
    dtype: Dtype = "float32"
    """Precision in which the teacher runs."""
    token_budget: int = Field(16384, ge=1)
    """Tokens, padding included, of one forward pass."""


class SamplerConfig(Section):
    engine: Literal["native"] = "native"
    """What generates the rollouts."""
    max_tokens: int = Field(256, ge=1)
    """Longest response, the end token included."""
    group: int = Field(1, ge=1)
    """Responses to one prompt (G): they share one prefill and travel together."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens up to this mass. Less than 1 biases importance weights."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens less likely than this fraction of the most likely one."""
    slots: int = Field(64, ge=1)
    """Sequences generated at a time."""
    dtype: Dtype = "float32"
    """Precision in which the student generates."""


class ReverseKLMC(Section):
    """Reverse KL on M draws of the student at every position, importance-corrected: the default."""

    kind: Literal["reverse_kl_mc"] = "reverse_kl_mc"
    """Reverse KL on draws of the student."""
    m: int = Field(16, ge=1)
    """Draws at every position, the emitted token among them."""
    advantage: Literal["current", "behavior"] = "current"
    """Recompute log q − log p under the current student, or keep that of the policy that drew the token."""
    clip: Epsilon | tuple[Epsilon, Epsilon] | None = None
    """PPO clip ε or [low, high]; none by default."""
    importance: bool = True
    """Weight draws by p_current / p_behaviour; off only to see what that costs."""
    ratio_cap: float | None = Field(None, gt=0)
    """Truncate importance weights at this value; capped draws keep a gradient."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of student and teacher in the loss."""

    @model_validator(mode="after")
    def _one_trust_region(self) -> ReverseKLMC:
        if self.clip is not None and self.ratio_cap is not None:
            raise ValueError("clip and ratio_cap both bound the ratio: keep one of them")
        if not self.importance and (self.clip is not None or self.ratio_cap is not None):
            raise ValueError("importance = false has no ratio for clip or ratio_cap to bound: drop them")
        if not self.importance and self.advantage == "behavior":
            raise ValueError('importance = false recomputes the advantage: write advantage = "current"')
        return self


class ForwardKL(Section):
    """Forward KL on the teacher's top-k tokens, or on the whole vocabulary by way of the teacher's hidden states."""

    kind: Literal["forward_kl"] = "forward_kl"
    """Forward KL on what the teacher finds likely."""
    cache: Literal["teacher_topk", "hidden"] = "teacher_topk"
    """What the teacher sends: its k best tokens, or its last hidden state, which is exact."""
    k: int = Field(32, ge=1)
    """Size of the teacher's top-k."""
    tail: bool = False
    """Add the remaining mass of both models as one more bucket."""
    renormalise: bool = False
    """Renormalise both models on the top-k."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of student and teacher in the loss."""

    @model_validator(mode="after")
    def _one_completion(self) -> ForwardKL:
        if self.tail and self.renormalise:
            raise ValueError("tail and renormalise exclude each other: keep one of them")
        if self.cache == "hidden" and (self.tail or self.renormalise):
            raise ValueError("the hidden cache is the whole distribution: drop tail and renormalise")
        return self


LossConfig = Annotated[ReverseKLMC | ForwardKL, Field(discriminator="kind")]


class LearnerConfig(Section):
    batch_size: int = Field(64, ge=1)
    """Samples of one update; a multiple of sampler.group."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly."""
    decay: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    token_budget: int = Field(16384, ge=1)
    """Tokens, padding included, of one micro-batch; at least the longest sequence."""
    dtype: Dtype = "float32"
    """Precision of weights, gradients and optimizer."""


class TaskConfig(Section):
    reward: Literal["exact", "math"] | None = None
    """How answers are graded: exact text, or math-verify. Rewards are logged, and are the accuracy of eval."""
    timeout: float = Field(10.0, gt=0)
    """Seconds that grading one answer may take; longer counts as wrong, and is counted."""


class Sync(Section):
    """Strictly on-policy: roll out a batch, score it, learn from it, publish, begin again."""

    kind: Literal["sync"] = "sync"
    """What may run at the same time: here, nothing."""


class EvalConfig(Section):
    every: int = Field(0, ge=0)
    """Evaluate after so many updates; 0 evaluates never."""
    prompts: int = Field(200, ge=1)
    """How many held-out prompts."""
    n: int = Field(1, ge=1)
    """Samples of each prompt; accuracy is their mean (avg@n)."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""


class CheckpointConfig(Section):
    every: int = Field(0, ge=0)
    """Save after so many updates; 0 saves only the final student."""
    keep: int = Field(2, ge=1)
    """How many checkpoints to keep."""


class LogConfig(Section):
    to: tuple[Tracker, ...] = ()
    """Also send the metrics there: any of tensorboard, wandb, mlflow, trackio; one name or a list."""
    project: str = "slipstream"
    """Project name for trackers that have one."""

    @field_validator("to", mode="before")
    @classmethod
    def _one_or_several(cls, to: Any) -> Any:
        names = [to] if isinstance(to, str) else to
        return tuple(names) if isinstance(names, list) else names


class RuntimeConfig(Section):
    device: str = "auto"
    """Where models run: auto, cpu, cuda, cuda:1 …"""
    threads: int = Field(1, ge=1)
    """CPU threads of one engine; one is fastest for very small models."""
    graders: int = Field(1, ge=1)
    """Processes that grade answers."""


class Config(Section):
    student: str
    """The model to train: HF directory or hub name, or builtin:student."""
    updates: int = Field(100, ge=1)
    """How many updates to make."""
    seed: int = 0
    """Prompts, their order and every draw follow from it."""
    output: str | None = None
    """Run directory; runs/NAME-TIME without it."""
    teachers: dict[str, TeacherConfig] = Field(min_length=1, max_length=1)
    """The teacher, under a name of your choice."""
    data: DataConfig = DataConfig()
    sampler: SamplerConfig = SamplerConfig()
    loss: LossConfig = ReverseKLMC()
    learner: LearnerConfig = LearnerConfig()
    task: TaskConfig = TaskConfig()
    schedule: Sync = Sync()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @field_validator("teachers")
    @classmethod
    def _path_safe(cls, teachers: dict[str, TeacherConfig]) -> dict[str, TeacherConfig]:
        for name in teachers:
            if not name.isidentifier():
                raise ValueError(f"the name {name!r} must be a plain word, as in [teachers.main]")
        return teachers

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        group, batch = self.sampler.group, self.learner.batch_size
        if batch % group:
            raise ValueError(f"learner.batch_size = {batch} is not a multiple of sampler.group = {group}")
        if group > self.sampler.slots:
            raise ValueError(f"sampler.group = {group} needs sampler.slots of at least {group}")
        if self.eval.every and self.eval.n > self.sampler.slots:
            raise ValueError(f"eval.n = {self.eval.n} needs sampler.slots of at least {self.eval.n}")
        if self.eval.every and self.data.eval is None:
            raise ValueError("eval.every needs held-out prompts: set data.eval")
        if self.eval.every and self.task.reward is None:
            raise ValueError('eval.every needs a way to grade answers: set task.reward, for example "exact"')
        return self

    @property
    def groups_per_update(self) -> int:
        return self.learner.batch_size // self.sampler.group


def load(path: str | Path, overrides: Sequence[tuple[str, str]] = (), *, say: Any = print) -> Config:
    """Read a TOML file, apply `(dotted key, text)` overrides and validate."""
    return parse(read(path), overrides, where=str(path), say=say)


def read(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; name its config.toml") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def parse(
    tree: dict[str, Any], overrides: Sequence[tuple[str, str]] = (), *, where: str = "config", say: Any = print
) -> Config:
    tree, notes = _with_kinds(tree), list[str]()
    # kinds come first, so that a kind cannot discard what was written next to it
    for key, text in sorted(overrides, key=lambda override: not override[0].endswith(".kind")):
        tree = _override(tree, key.split("."), _value(text), notes.append)
    try:
        # by way of JSON: its strict mode takes a list for a tuple, as TOML must, but neither true nor "7" for a number
        config = Config.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError("; ".join(f"{where}: {_explain(detail)}" for detail in error.errors()[:3])) from None
    for note in notes:
        say(note)
    return config


def _with_kinds(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy in which every section of several kinds names its own: the default, where the file does not say."""
    kinds = {name: info.default.kind for name, info in Config.model_fields.items() if hasattr(info.default, "kind")}
    below = {name: tree.get(name, {}) for name in kinds}
    return tree | {name: {"kind": kinds[name], **own} for name, own in below.items() if isinstance(own, dict)}


def _value(text: str) -> Any:
    """What a TOML file would hold: `1e-5`, `true`, `[1, 2]`, `"x"`; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text == "none" else text


def _override(tree: dict[str, Any], path: list[str], value: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """A copy of the tree with one value replaced. A new `kind` discards the settings of the old one, and says so."""
    head, *rest = path
    if rest:
        below = tree.get(head, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--{'.'.join(path)}: {head} is a value, not a section")
        return {**tree, head: _override(below, rest, value, say)}
    if head == "kind" and tree.get("kind", value) != value:
        dropped = sorted(set(tree) - {"kind"})
        if dropped:
            say(f"note: kind = {value!r} replaces {tree['kind']!r}; its settings {', '.join(dropped)} are discarded")
        return {"kind": value}
    return {**tree, head: value}


def _explain(detail: ErrorDetails) -> str:
    """One line: where, what, and what to write instead."""
    names, holder = _locate(detail["loc"])
    dotted = ".".join(names)
    match detail["type"]:
        case "extra_forbidden" if holder:
            return f"unknown key {dotted!r}; {did_you_mean(names[-1], holder.model_fields)}"
        case "missing" if holder:
            return f"{dotted!r} is missing: {holder.model_fields[names[-1]].description}"
        case "union_tag_invalid":
            kinds = detail["ctx"]["expected_tags"].replace("'", "").split(", ")
            return f"{dotted}.kind: {did_you_mean(detail['ctx']['tag'], kinds)}"
        case "value_error":
            return f"{dotted}: {detail['ctx']['error']}" if dotted else str(detail["ctx"]["error"])
        case _:
            return f"{dotted}: {detail['msg'].lower()}, got {detail['input']!r}"


def _locate(loc: Sequence[int | str]) -> tuple[list[str], type[Section] | None]:
    """The dotted name at a pydantic location, and the section that holds it; none for a part of a value."""
    names: list[str] = []
    holder: type[Section] | None = None
    here: Any = Config
    for part in map(str, loc):
        members = _members(here)
        if get_origin(here) is dict and members:
            names.append(part)
            here = members[0]
        elif len(members) > 1:
            here = next(member for member in members if member.model_fields["kind"].default == part)
        elif members:
            holder = members[0]
            names.append(part)
            here = holder.model_fields[part].annotation if part in holder.model_fields else None
        else:
            holder = None
    return names, holder


def _members(annotation: Any) -> list[type[Section]]:
    """The sections that an annotation may hold: one, those of a union, or the values of a dict."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for arg in get_args(annotation) for section in _members(arg)]


def fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Every setting as (dotted name, field, which kind it belongs to), for help texts."""
    for name, info in section.model_fields.items():
        members = _members(info.annotation)
        dotted = f"{prefix}{name}"
        if get_origin(info.annotation) is dict and members:
            dotted += ".NAME"
        if not members:
            yield dotted, info, ""
        for member in members:
            kind = member.model_fields["kind"].default if len(members) > 1 else ""
            for inner, field, _ in fields(member, f"{dotted}."):
                yield inner, field, kind


def to_toml(config: Config) -> str:
    import tomli_w

    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def describe(info: FieldInfo) -> str:
    """`type = default` of one setting, as it is written in TOML; `none` for what can only be left out."""
    kind = _type_name(info.annotation)
    if info.is_required():
        return kind
    return f"{kind} = {'none' if info.default is None else json.dumps(info.default)}"


def _type_name(annotation: Any) -> str:
    args = get_args(annotation)
    match get_origin(annotation):
        case origin if origin is Literal:
            return " | ".join(map(str, args))
        case origin if origin in (Union, UnionType):
            return " | ".join(map(_type_name, args))
        case origin if origin is Annotated:
            return _type_name(args[0])
        case origin if origin is tuple:
            return f"[{', '.join('…' if arg is ... else _type_name(arg) for arg in args)}]"
        case origin if origin is dict:
            return "table"
    return "none" if annotation is NoneType else str(annotation.__name__)
