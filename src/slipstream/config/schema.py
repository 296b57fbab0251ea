"""The configuration: one schema, one set of defaults, unknown keys fail.

The text under each field is its help, printed by `slipstream config`. A section that needs other settings for another
kind (`loss`, `schedule`) is a union told apart by `kind`. Reading a file is the business of `file.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from string import Formatter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from slipstream.config.base import GREEDY, OWN, THREADS, Beta, Dtype, Replicas, Section, Temperature, as_tuple
from slipstream.config.environment import EnvironmentConfig, Where
from slipstream.config.freshness import FreshnessConfig
from slipstream.config.guards import GuardsConfig
from slipstream.config.losses import LossConfig, ReverseKLMC
from slipstream.config.objective import CorrectionConfig, PolicyConfig, ReferenceConfig
from slipstream.config.schedule import Async, ScheduleConfig
from slipstream.config.teacher import SELF, problems
from slipstream.config.teacher import TeacherConfig as TeacherConfig
from slipstream.errors import ConfigError, did_you_mean

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
REWARDS = ("exact", "math", "environment")


class DataConfig(Section):
    train: str = "builtin:arithmetic"
    """Prompts: a .jsonl, .json, .csv (each also .gz) or .parquet file, a saved or hub HF dataset (with its subset:
    openai/gsm8k:main), or builtin:arithmetic, builtin:table, builtin:lookup."""
    split: str = "train"
    """Split of a HF dataset, or of a built-in task (train, eval)."""
    eval: str | dict[str, str] | None = None
    """Held-out prompts in the same formats, or several sets by name: { math = "math.jsonl", code = "code.csv" }.
    Without it nothing is evaluated during training."""
    eval_split: str = "eval"
    """Split of the held-out prompts."""
    limit: int | None = Field(None, ge=1)
    """Use only the first so many training rows."""
    prompt: str | None = None
    """Column of the prompt, text or a list of messages; dots lead into objects and lists (extra.question). What is well
    known by its columns needs none: docs/data.md."""
    answer: str | None = None
    """Column of the answer, likewise (reward_model.ground_truth); of a list of answers each is right."""
    template: str | None = None
    """Text of the prompt around columns of the row, for example "Solve: {question}"; {{ and }} stand for braces."""
    chat: bool = False
    """Send prompts that are text as the message of a user, through the chat template."""
    shuffle: bool = True
    """Draw the rows of every epoch in a new random order that follows from `seed`."""
    system_prompt: str | None = None
    """Put this system message before every conversation; needs a chat template."""
    template_args: dict[str, Any] = Field({})
    """Arguments of the chat template, for example enable_thinking = false."""
    teacher_key: str = "data_source"
    """Column that says which teacher scores the answers to a prompt, where there are several."""

    @property
    def held_out(self) -> dict[str, str]:
        """Every held-out set by its name, which is empty where there is one."""
        if self.eval is None:
            return {}
        return self.eval if isinstance(self.eval, dict) else {"": self.eval}

    @field_validator("eval")
    @classmethod
    def _named_plainly(cls, given: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if given == {}:
            raise ValueError('names no set of prompts: write one, as in { math = "math.jsonl" }, or drop it')
        for name in given if isinstance(given, dict) else ():
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"the name {name!r} must be a plain word, as metrics go by it: eval/NAME/accuracy")
        return given

    @field_validator("template")
    @classmethod
    def _of_columns(cls, template: str | None) -> str | None:
        if template is None:
            return None
        try:
            found = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
        except ValueError as error:
            raise ValueError(f"{error}; write {{{{ and }}}} for braces that are meant") from None
        if not found:
            raise ValueError("would be the same for every prompt: name a column, as in {question}")
        for name, spec, conversion in found:
            if not name or spec or conversion:
                raise ValueError("a column stands in it as {question}, and nothing else between the braces")
        return template

    @model_validator(mode="after")
    def _one_prompt(self) -> DataConfig:
        if self.prompt is not None and self.template is not None:
            raise ValueError("prompt does nothing beside template, which names the columns itself: drop one of them")
        return self

    @field_validator("template_args")
    @classmethod
    def _in_toml(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name, value in args.items():
            if value is None:
                raise ValueError(f"{name} cannot be none: leave it out")
        return args


class SamplerConfig(Section):
    engine: Literal["native", "vllm"] = "native"
    """What generates the rollouts."""
    engine_args: dict[str, Any] = Field({})
    """Arguments for vLLM's engine, for example gpu_memory_utilization = 0.8."""
    max_tokens: int = Field(256, ge=1)
    """Longest response, the end token included; in an environment all of an episode, with what is observed."""
    group: int = Field(1, ge=1)
    """Responses to one prompt (G): they share one prefill and travel together."""
    temperature: Temperature = 1.0
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens up to this mass. With less than 1 whatever holds a ratio to what drew a token needs
    keep_mask; so with top_k and min_p."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens less likely than this fraction of the most likely one."""
    keep_mask: bool = False
    """Send with every token the ids that top_p, top_k and min_p left: ratios and KLs are then exact, on those."""
    longest: int | None = Field(None, ge=2)
    """Longest prompt and response, in tokens; that of the data without it. Where a model has several sets of position
    factors (longrope, dynamic), this chooses one for the whole run."""
    replicas: Replicas = 1
    """How many samplers; each group goes to the one with least to do. "auto" begins with one, has more while the
    learner waits for groups and they help, and fewer where they are idle."""
    replicas_max: int = Field(8, ge=1)
    """The most that replicas = "auto" comes to."""
    slots: int = Field(64, ge=1)
    """Sequences generated at a time by each."""
    dtype: Dtype = "float32"
    """Precision in which the student generates."""
    on_publish: Literal["rebuild", "reuse"] = "rebuild"
    """What new weights find of responses that are running: rebuild computes their keys and values (and states) again;
    reuse keeps the old ones, which costs nothing and is approximate: log-probs are still those that drew, but no
    weights alone would give them."""


class LoraConfig(Section):
    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """Their scale is alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get one, for example ["q_proj", "v_proj"]; all but the head by default."""

    def among(self, layers: Sequence[str]) -> list[str]:
        """Which of these linear layers get an adapter; a ConfigError for a target that is none."""
        if self.targets == "all-linear":
            return list(layers)
        known = sorted({name.rpartition(".")[2] for name in layers})
        for target in self.targets:
            if target not in known:
                hint = did_you_mean(target, known)
                raise ConfigError(f"learner.lora.targets: {target!r} is no linear layer of the student; {hint}")
        return [name for name in layers if name.rpartition(".")[2] in self.targets]


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
    minibatches: int = Field(1, ge=1)
    """Optimizer steps that share out the groups of one update."""
    epochs: int = Field(1, ge=1)
    """How often each update goes through its groups."""
    token_budget: int = Field(16384, ge=1)
    """Tokens, padding included, of one micro-batch; at least the longest sequence."""
    packing: bool = True
    """Several sequences in a row, each seeing itself only; off for models that cannot (padded instead)."""
    shared_prompt: bool = False
    """Compute the prompt of a group once: its responses share a row, each seeing the prompt and itself."""
    dropout: bool = False
    """Train with the dropout that the model's config names; without it the gradient is of the policy that sampled."""
    checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, a third more time."""
    dtype: Dtype = "float32"
    """Precision of weights and gradients."""
    compute_dtype: Dtype | None = None
    """Precision of matrix products (autocast), over weights that stay as they are; that of weights without it."""
    optimizer_dtype: Dtype | None = None
    """Precision of AdamW's moments; that of weights without it."""
    ranks: int = Field(1, ge=1)
    """Processes that share the learner, weights and moments sharded over them (FSDP)."""
    exact_drift: bool = False
    """Measure KL(current policy ‖ the one that drew a token) over the whole vocabulary: two more passes per version."""
    snapshots: int | None = Field(None, ge=0)
    """Versions whose weights are kept, in host memory, to recompute what they thought of a token; as many as the
    method and the schedule ask for without it."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""
    threads: int | None = Field(None, ge=1, le=THREADS)
    """CPU threads of the learner; runtime.threads without it."""


def name_of(reward: str) -> str:
    return reward.rpartition(":")[2]


def check_reward(spec: str) -> str:
    if spec not in REWARDS and not OWN.fullmatch(spec):
        near = f"{did_you_mean(spec, REWARDS)}; " if ":" not in spec else ""
        raise ValueError(f'{spec!r} is no reward; {near}your own is "./file.py:function" or "module:function"')
    return spec


class TaskConfig(Section):
    reward: tuple[str, ...] = ()
    """How answers are graded: exact text, math (by math-verify), environment (what it says itself), or a function of
    your own, "./file.py:function" or "module:function"; one or a list. All are logged, the first one is the accuracy of
    eval."""
    sandbox: Where = None
    """Where rewards run code that ask for `sandbox`: bubblewrap, the URL of a server that speaks SandboxFusion's API,
    or "none", which isolates nothing."""
    timeout: float = Field(10.0, gt=0)
    """Seconds that grading one answer by one reward may take, and writing one teacher's context by a function; an
    answer that takes longer is dropped, and counted."""

    @field_validator("reward", mode="before")
    @classmethod
    def _one_or_several(cls, reward: Any) -> Any:
        return () if reward is None else as_tuple(reward)

    @field_validator("reward")
    @classmethod
    def _each_once(cls, reward: tuple[str, ...]) -> tuple[str, ...]:
        names = [name_of(check_reward(spec)) for spec in reward]
        if len(set(reward)) < len(reward):
            raise ValueError(f"{', '.join(reward)} names a reward twice: write each once")
        if len(set(names)) < len(names):
            raise ValueError(f"{', '.join(reward)}: two of these have one name, which metrics go by: rename a function")
        return reward

    @property
    def names(self) -> tuple[str, ...]:
        """What metrics and policy.reward_weights call them: a function of one's own by its name."""
        return tuple(map(name_of, self.reward))


class EvalConfig(Section):
    every: int = Field(0, ge=0)
    """Evaluate the student at the start, after every so many updates, and at the end; 0 evaluates never, whatever else
    is written here."""
    prompts: int = Field(200, ge=1)
    """How many held-out prompts of each set."""
    n: int = Field(1, ge=1)
    """Samples of each prompt; accuracy is their mean (avg@n)."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature; 0 is greedy."""

    @field_validator("temperature")
    @classmethod
    def _greedy_or_not(cls, temperature: float) -> float:
        if 0 < temperature < GREEDY:
            raise ValueError(f"{temperature:g} is as good as greedy: write 0, or {GREEDY} or more")
        return temperature


class CheckpointConfig(Section):
    every: int = Field(0, ge=0)
    """Save after so many updates; 0 leaves it to the minutes."""
    minutes: float = Field(10.0, ge=0)
    """Save at the end of the first update after so many minutes; 0 leaves it to `every`. With either, the end of a run
    is saved too, so that it can be extended; with neither, a run that is killed loses everything."""
    keep: int = Field(2, ge=1)
    """How many checkpoints to keep. The last proven one (docs/trust.md) and the next to be proven are kept as well."""


class HealthConfig(Section):
    stop: bool = True
    """Stop at a finding that no run recovers from; without it, findings are only said."""
    updates: int = Field(3, ge=1)
    """So many updates in a row make a finding."""
    window: int = Field(50, ge=5)
    """The updates before, by which it is judged what is usual."""
    kl: float = Field(0.05, ge=0)
    """How far below 0 the mean reverse KL to a teacher may be, in nats, beyond what chance allows."""
    invalid: float = Field(0.1, ge=0, le=1)
    """Share of responses whose scores cannot be used, and of rechecked groups whose scores were others, from which on
    a teacher is given up."""
    canary: int = Field(5, ge=0)
    """Updates after which every teacher and sampler is asked again what it was asked at the start (docs/trust.md);
    0 asks nobody."""
    grad_norm: float = Field(100.0, gt=1)
    """How many times its median the gradient norm may be."""
    collapse: float = Field(0.05, ge=0, lt=1)
    """Share of what they were at the start to which entropy and length may fall where neither KL nor reward gains."""
    rise: float = Field(5.0, gt=0)
    """How far the mean reverse KL to the teachers may rise above that at the start, in nats, where no reward gains."""
    idle: int = Field(50, ge=1)
    """Updates in a row without any gradient."""
    reward: int = Field(100, ge=2)
    """Updates in a row in which a reward is the same, which is said and stops nothing."""

    @property
    def proof(self) -> int:
        """Updates after a checkpoint until its weights count as proven: every rule and every canary has seen them."""
        return max(self.updates, self.canary)


class LogConfig(Section):
    to: tuple[Tracker, ...] = ()
    """Also send metrics there, and the samples of every tenth update: any of tensorboard, wandb, mlflow, trackio; one
    name or a list."""
    project: str = "slipstream"
    """Project name for trackers that have one."""
    samples: int = Field(2, ge=0)
    """Write so many samples of every update into samples.jsonl, whole, with what student and teacher thought of every
    token; `slipstream samples` prints them."""
    trace: bool = True
    """Write trace.json, what every worker did when; opens in ui.perfetto.dev."""

    @field_validator("to", mode="before")
    @classmethod
    def _one_or_several(cls, to: Any) -> Any:
        return as_tuple(to)


class RuntimeConfig(Section):
    kind: Literal["local", "ray", "inline"] = "local"
    """Each engine in a process of its own on this machine, or an actor of Ray, or all in this process."""
    address: str | None = None
    """Address of a Ray cluster, or auto: kind = ray then goes without saying. Without it Ray is started on this machine
    and stopped with the run."""
    patience: float = Field(1800.0, gt=0)
    """Seconds without any progress after which the run stops and says who waits for whom."""
    heartbeat: float = Field(60.0, gt=0)
    """Seconds without an answer after which an engine's process is taken to hang, and is killed. It answers while it
    computes; not in the middle of one call that holds Python up, such as writing a part of a checkpoint to a disk."""
    restarts: int = Field(3, ge=0)
    """How often in an hour each engine that died is started again: samplers and scorers while all others go on, and for
    a learner the run goes back to its last checkpoint. Beyond that the run goes on without it, if it can."""
    device: str = "auto"
    """Where models run: auto, cpu, cuda; with runtime.kind = inline also cuda:1 …"""
    threads: int = Field(1, ge=1, le=THREADS)
    """CPU threads of one engine; one is fastest for very small models."""
    graders: int = Field(1, ge=1)
    """Processes that grade answers."""

    @model_validator(mode="before")
    @classmethod
    def _at_an_address(cls, given: Any) -> Any:
        """An address is of a Ray cluster: who writes one need not write the kind."""
        there = isinstance(given, dict) and given.get("address") is not None
        return {"kind": "ray", **given} if there else given


class Config(Section):
    student: str
    """The model to train: HF directory or hub name, or builtin:student."""
    updates: int = Field(100, ge=1, le=10**9)
    """How many updates to make."""
    seed: int = Field(0, ge=0, lt=10**18)
    """Prompts, their order and every draw follow from it."""
    output: str | None = Field(None, min_length=1)
    """Run directory; runs/NAME-TIME without it."""
    teachers: dict[str, TeacherConfig] = Field({})
    """The teachers, each under a name of your choice; none with loss.weight = 0."""
    data: DataConfig = DataConfig()
    sampler: SamplerConfig = SamplerConfig()
    environment: EnvironmentConfig | None = None
    loss: LossConfig = ReverseKLMC()
    policy: PolicyConfig | None = None
    correction: CorrectionConfig = CorrectionConfig()
    reference: ReferenceConfig | None = None
    freshness: FreshnessConfig | None = None
    learner: LearnerConfig = LearnerConfig()
    task: TaskConfig = TaskConfig()
    schedule: ScheduleConfig = Async()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    health: HealthConfig = HealthConfig()
    guards: GuardsConfig = GuardsConfig()
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
        self._check_objective()
        self._check_learner()
        self._check_guards()
        if self.sampler.engine_args and self.sampler.engine != "vllm":
            raise ValueError('sampler.engine_args are for sampler.engine = "vllm": drop one of them')
        if self.sampler.keep_mask and self.sampler.engine == "vllm":
            raise ValueError(
                'sampler.keep_mask: vLLM does not tell what truncation left: write sampler.engine = "native", or '
                "top_p = 1, top_k = 0 and min_p = 0 without keep_mask"
            )
        if self.sampler.on_publish == "reuse" and self.sampler.engine == "vllm":
            raise ValueError(
                'sampler.on_publish = "reuse": vLLM recomputes what runs after a publish: write "rebuild", or '
                'sampler.engine = "native"'
            )
        if group > self.sampler.slots:
            raise ValueError(f"sampler.group = {group} needs sampler.slots of at least {group}")
        self._check_environment()
        if self.runtime.kind != "ray" and self.runtime.address is not None:
            raise ValueError('runtime.address is of a Ray cluster: write runtime.kind = "ray", or drop one of them')
        if self.eval.every and self.eval.n > self.sampler.slots:
            raise ValueError(f"eval.n = {self.eval.n} needs sampler.slots of at least {self.eval.n}")
        if self.runtime.kind == "inline" and self.most_workers:
            raise ValueError(
                'replicas = "auto": with runtime.kind = "inline" nobody comes or goes: write a number, or '
                'runtime.kind = "local"'
            )
        every = self.schedule.rarest
        if self.eval.every % every:
            raise ValueError(
                f"eval.every = {self.eval.every} is not a multiple of schedule.publish_every = {every}: "
                "samplers do not have the weights in between"
            )
        if self.eval.every and self.data.eval is None:
            raise ValueError("eval.every needs held-out prompts: set data.eval")
        if self.eval.every and not self.task.reward:
            raise ValueError('eval.every needs a way to grade answers: set task.reward, for example "exact"')
        for setting, needed in self._idle():
            raise ValueError(f"{setting} does nothing without {needed}: set that, or drop {setting}")
        return self

    def _idle(self) -> Iterator[tuple[str, str]]:
        """Settings that were changed and would do nothing, and what they need for it."""
        graded, evaluated = bool(self.task.reward), "every" in self.eval.model_fields_set
        apart = self.runtime.kind != "inline"
        written = any(teacher.own_context for teacher in self.teachers.values())
        auto = 'replicas = "auto"'
        several, tracked = len(self.teachers) > 1, bool(set(self.log.to) - {"tensorboard"})
        sections = [
            ("sampler", self.sampler, ("replicas_max",), self.sampler.replicas == "auto", auto),
            *(
                (f"teachers.{name}", t, ("replicas_max",), t.replicas == "auto", auto)
                for name, t in self.teachers.items()
            ),
            ("task", self.task, ("timeout",), graded or written, "task.reward, or a function that writes a context"),
            ("runtime", self.runtime, ("graders",), graded, "task.reward"),
            ("runtime", self.runtime, ("heartbeat", "restarts"), apart, 'runtime.kind = "local" or "ray"'),
            ("data", self.data, ("eval", "eval_split"), evaluated, "eval.every"),
            ("eval", self.eval, ("prompts", "n", "temperature"), evaluated, "eval.every"),
            ("log", self.log, ("project",), tracked, "a tracker in log.to that has projects"),
            ("data", self.data, ("teacher_key",), several, "several teachers"),
            ("health", self.health, ("kl", "invalid", "rise"), bool(self.teachers), "a teacher"),
            ("health", self.health, ("reward",), graded, "task.reward"),
            *((f"teachers.{name}", each, ("key",), several, "another teacher") for name, each in self.teachers.items()),
            ("loss", self.loss, tuple(type(self.loss).model_fields), self.loss.weight > 0, "loss.weight"),
        ]
        if not self.loss.weight and self.loss.kind != type(self).model_fields["loss"].default.kind:
            yield "loss.kind", "loss.weight"
        for where, section, names, used, needed in sections:
            for name in names if not used else ():
                field = type(section).model_fields[name]
                if name != "weight" and getattr(section, name) != field.default:
                    yield f"{where}.{field.alias or name}", needed

    def _check_objective(self) -> None:
        if self.loss.weight and not self.teachers:
            raise ValueError("distillation needs a teacher: add [teachers.main], or write loss.weight = 0")
        if self.teachers and not any(teacher.weight for teacher in self.teachers.values()):
            names = " and ".join(f"teachers.{name}.weight" for name in self.teachers)
            raise ValueError(
                f"{names} = 0 leaves nothing to distil: raise one, or drop [teachers] and write loss.weight = 0"
            )
        if not self.loss.weight and self.teachers:
            raise ValueError("loss.weight = 0 leaves the teacher nothing to do: drop [teachers], or the weight")
        for problem in problems(self.teachers, self.loss):
            raise ValueError(problem)
        for name, teacher in self.teachers.items():
            shown = [field for field in teacher.shows if field != "last"]
            if shown and not teacher.own_context and not self.task.reward:
                raise ValueError(
                    f"teachers.{name}.context shows {{{shown[0]}}}, which rewards decide: set task.reward, for example "
                    '"exact"'
                )
            if teacher.follow is not None and teacher.context is None and self.policy is None:
                raise ValueError(
                    f"teachers.{name} sees what the student sees and follows it: there is nothing to learn from; add a "
                    "context, or [policy], beside which it holds the student back"
                )
            averaged = teacher.follow is not None and teacher.follow.ema is not None
            if averaged and self.learner.dtype == "bfloat16":
                raise ValueError(
                    f"teachers.{name}.follow.ema is kept in learner.dtype, and bfloat16 rounds away what it gains: "
                    'write learner.compute_dtype = "bfloat16" instead'
                )
        if not self.loss.weight and self.policy is None:
            raise ValueError("loss.weight = 0 leaves nothing to learn from: add [policy] for a loss on task rewards")
        if self.policy is not None and not self.task.reward:
            raise ValueError('[policy] learns from rewards: set task.reward, for example "exact"')
        self._check_freshness()
        if self.reference is not None and self.reference.into == "reward" and self.policy is None:
            raise ValueError('reference.into = "reward" needs [policy], whose rewards it changes: write "loss"')

    def _check_freshness(self) -> None:
        fresh = self.freshness
        if fresh is None:
            return
        if fresh.also and self.policy is None:
            raise ValueError(
                'freshness.also = "policy" weighs a policy loss, and there is none: drop it, or add [policy]'
            )
        if not self.loss.weight and not fresh.also:
            raise ValueError(
                '[freshness] weighs the distillation loss, and loss.weight = 0: write freshness.also = "policy", or '
                "drop [freshness]"
            )
        if fresh.drift == "snapshots" and self.learner.snapshots == 0:
            raise ValueError(
                'freshness.drift = "snapshots" replays samples under the weights that drew them, and '
                "learner.snapshots = 0 keeps none: leave it out, and as many are kept as the schedule needs"
            )
        if fresh.m is not None and self.loss.weight and self.loss.asks.cache == "sampled":
            raise ValueError(
                f'freshness.m does nothing: loss.kind = "{self.loss.kind}" has draws of its own, by which drift is '
                "estimated; drop it, or raise loss.m"
            )
        if fresh.m is not None and fresh.drift == "snapshots" and not fresh.anchor:
            raise ValueError('freshness.m does nothing: drift = "snapshots" is exact, and anchor = 0: drop it')

    def _check_environment(self) -> None:
        there, limit = self.environment, self.sampler.max_tokens
        if there is None:
            if "environment" in self.task.reward:
                raise ValueError('task.reward = "environment" is what an environment says: add [environment]')
            return
        if there.gateway is not None and there.gateway.listen is not None and self.sampler.replicas != 1:
            raise ValueError("environment.gateway.listen is one port, of one sampler: drop sampler.replicas")
        if there.turn_tokens is not None and there.turn_tokens >= limit:
            raise ValueError(
                f"environment.turn_tokens = {there.turn_tokens} does nothing: sampler.max_tokens = {limit} is for a "
                "whole episode; write less, or drop it"
            )

    def _check_learner(self) -> None:
        learner, groups = self.learner, self.groups_per_update
        if groups % learner.minibatches:
            raise ValueError(
                f"learner.minibatches = {learner.minibatches} does not divide the {groups} groups of an update"
            )
        if groups // learner.minibatches < learner.ranks:
            raise ValueError(
                f"learner.ranks = {learner.ranks} is more than the {groups // learner.minibatches} groups of one step: "
                "some would have nothing to do; lower it, or raise learner.batch_size"
            )
        if self.schedule.learns_as_ready and learner.minibatches * learner.epochs > 1:
            raise ValueError(
                'schedule.kind = "periodic" learns from groups as they come, in one step: '
                "write minibatches = 1 and epochs = 1, or another schedule"
            )
        wide, narrow = learner.dtype, learner.compute_dtype
        if narrow not in (None, wide) and (wide, narrow) != ("float32", "bfloat16"):
            raise ValueError(
                f'learner.compute_dtype = "{narrow}" does nothing over weights in {wide}: autocast makes products of '
                f'float32 weights in bfloat16, and no others; drop it, or write learner.dtype = "{narrow}"'
            )
        if learner.shared_prompt and not learner.packing:
            raise ValueError("learner.shared_prompt is a way of packing: write packing = true, or drop it")
        if learner.shared_prompt and self.sampler.group == 1:
            raise ValueError("learner.shared_prompt has nothing to share with sampler.group = 1: drop it")
        if learner.ranks > 1 and self.runtime.kind == "inline":
            raise ValueError('learner.ranks needs a process for each: write runtime.kind = "local"')
        if learner.lora is not None and self.sampler.engine == "vllm":
            raise ValueError(
                '[learner.lora] sends adapters, and sampler.engine = "vllm" takes whole weights: write '
                'sampler.engine = "native", or drop [learner.lora]'
            )

    def _check_guards(self) -> None:
        """Of guards that look at ages, or change them, the schedule must have different ones."""
        guards, tau = self.guards, self.schedule.most
        if guards.kl is not None and self.schedule.finds_tau:
            raise ValueError('[guards.kl] lowers schedule.tau, and so does tau = "auto": drop one of them')
        if guards.kl is not None and tau < 1:
            raise ValueError(
                '[guards.kl] lowers schedule.tau by one and more: write schedule.kind = "async" with tau = 1 or more, '
                "or drop it"
            )
        if guards.gac is not None and not tau:
            raise ValueError(
                "[guards.gac] compares fresh samples with stale ones, and here all of an update are of one age: write "
                'schedule.kind = "async" with a tau above 0, or drop it'
            )

    def model_of(self, teacher: TeacherConfig) -> str:
        return self.student if teacher.model == SELF else teacher.model

    @property
    def most_workers(self) -> dict[str, int]:
        """Of each kind whose number is left to the run."""
        sampler = {"sampler": self.sampler.replicas_max} if self.sampler.replicas == "auto" else {}
        return sampler | {
            f"teacher.{name}": teacher.replicas_max
            for name, teacher in self.teachers.items()
            if teacher.replicas == "auto"
        }

    @property
    def groups_per_update(self) -> int:
        return self.learner.batch_size // self.sampler.group
