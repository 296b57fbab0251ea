"""The configuration: one schema, one set of defaults, unknown keys fail.

The text under each field is its help, printed by `slipstream config`. A section that needs other settings for another
kind (`loss`, `schedule`) is a union told apart by `kind`. Reading a file is the business of `config_file.py`.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

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
    replicas: int = Field(1, ge=1)
    """How many copies score; each group goes to the one with least to do."""


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
    replicas: int = Field(1, ge=1)
    """How many samplers; each group goes to the one with least to do."""
    slots: int = Field(64, ge=1)
    """Sequences generated at a time by each."""
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
    threads: int | None = Field(None, ge=1)
    """CPU threads of the learner; runtime.threads without it."""


class TaskConfig(Section):
    reward: Literal["exact", "math"] | None = None
    """How answers are graded: exact text, or math-verify. Rewards are logged, and are the accuracy of eval."""
    timeout: float = Field(10.0, gt=0)
    """Seconds that grading one answer may take; longer counts as wrong, and is counted."""


class Sync(Section):
    """Strictly on-policy: roll out a batch, score it, learn from it, publish, begin again."""

    kind: Literal["sync"] = "sync"
    """One stage at a time, strictly on-policy."""


class Periodic(Section):
    """On-policy like sync, but scoring and learning begin with the first finished sample."""

    kind: Literal["periodic"] = "periodic"
    """The stages of one update overlap, strictly on-policy."""


class StepOff(Section):
    """Whole batches, k of them ahead of the learner: tokens are exactly k updates old."""

    kind: Literal["step_off"] = "step_off"
    """Stages overlap across batches, a fixed number of updates off-policy."""
    k: int = Field(1, ge=1)
    """How many batches roll out ahead."""


class Async(Section):
    """Everything overlaps: groups start as credits allow, weights change in the middle of a response."""

    kind: Literal["async"] = "async"
    """All stages overlap, with bounded work in flight."""
    tau: float = Field(4.0, ge=0)
    """Work in flight: (tau + 1) batches between submission and publish. More overlaps more and is staler."""
    publish_every: int = Field(1, ge=1)
    """Updates between two publishes; work in flight grows with it."""
    on_publish: Literal["keep", "drain", "restart"] = "keep"
    """Running responses go on under the new weights, are finished first, or begin again."""
    order: Literal["completion", "submission"] = "completion"
    """Learn from groups as they finish, or as they were submitted, which bounds their age and waits for stragglers."""
    max_lag: int | None = Field(None, ge=0)
    """Most updates between a token's policy and the one that learns from it; none by default."""
    on_old: Literal["wait", "restart", "drop"] | None = None
    """What keeps max_lag: hold the learner (wait, unless told otherwise), roll the group out again, or drop it, which
    favours short responses."""

    @model_validator(mode="after")
    def _bounds(self) -> Async:
        if self.max_lag is None:
            if self.on_old is not None:
                raise ValueError("on_old does nothing without max_lag: set max_lag, or drop on_old")
            return self
        if self.order == "submission":
            raise ValueError('order = "submission" bounds the lag by itself: drop max_lag, or the order')
        reach = ceil((self.tau + 1) * self.publish_every) - 1
        if self.on_old in (None, "wait") and self.max_lag < reach:
            raise ValueError(
                f"max_lag = {self.max_lag} cannot be kept by waiting with work for {reach} more updates in flight: "
                f'write max_lag = {reach} or more, a smaller tau, or on_old = "restart"'
            )
        if self.max_lag < self.publish_every - 1:
            raise ValueError(
                f"max_lag = {self.max_lag} cannot be kept when weights are published every {self.publish_every} "
                f"updates: write max_lag = {self.publish_every - 1} or more"
            )
        return self


class Replay(Section):
    """Serial like sync, on batches that are k updates old: controlled staleness, for studies."""

    kind: Literal["replay"] = "replay"
    """One stage at a time, a fixed number of updates off-policy."""
    k: int = Field(1, ge=0)
    """Age of every batch in updates, once as many have been made."""


ScheduleConfig = Annotated[Sync | Periodic | StepOff | Async | Replay, Field(discriminator="kind")]


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
    trace: bool = True
    """Write trace.json, what every worker did when; opens in ui.perfetto.dev."""

    @field_validator("to", mode="before")
    @classmethod
    def _one_or_several(cls, to: Any) -> Any:
        names = [to] if isinstance(to, str) else to
        return tuple(names) if isinstance(names, list) else names


class RuntimeConfig(Section):
    kind: Literal["ray", "inline"] = "ray"
    """Each engine in a process of its own, started here or on a Ray cluster, or all in this process."""
    address: str | None = None
    """Address of a Ray cluster, or auto; without it Ray is started on this machine and stopped with the run."""
    patience: float = Field(1800.0, gt=0)
    """Seconds without any progress after which the run stops and says who waits for whom."""
    device: str = "auto"
    """Where models run: auto, cpu, cuda; with runtime.kind = inline also cuda:1 …"""
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
    schedule: ScheduleConfig = Async()
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
        if self.runtime.kind == "inline" and self.runtime.address is not None:
            raise ValueError('runtime.address is for runtime.kind = "ray": drop one of them')
        if self.eval.every and self.eval.n > self.sampler.slots:
            raise ValueError(f"eval.n = {self.eval.n} needs sampler.slots of at least {self.eval.n}")
        every = getattr(self.schedule, "publish_every", 1)
        if self.eval.every % every:
            raise ValueError(
                f"eval.every = {self.eval.every} is not a multiple of schedule.publish_every = {every}: "
                "samplers do not have the weights in between"
            )
        if self.eval.every and self.data.eval is None:
            raise ValueError("eval.every needs held-out prompts: set data.eval")
        if self.eval.every and self.task.reward is None:
            raise ValueError('eval.every needs a way to grade answers: set task.reward, for example "exact"')
        return self

    @property
    def groups_per_update(self) -> int:
        return self.learner.batch_size // self.sampler.group
