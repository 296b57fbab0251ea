"""The configuration: one schema, one set of defaults. Unknown keys are errors.

The string under each field is the help text that `slipstream config` prints. A section whose settings depend on its
`kind` (`loss`, `schedule`) is a union of sections. `file.py` reads config files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from slipstream.config.base import (
    GREEDY,
    HALVES,
    THREADS,
    Beta,
    Dtype,
    Quantisation,
    Replicas,
    Rounding,
    Section,
    Temperature,
    as_tuple,
    at_first,
    check_own,
    template_fields,
)
from slipstream.config.engines import ENGINES, EngineArgs, check_reserved, devices_of
from slipstream.config.environment import EnvironmentConfig, Where
from slipstream.config.freshness import FreshnessConfig
from slipstream.config.guards import GuardsConfig
from slipstream.config.losses import LossConfig, ReverseKLMC
from slipstream.config.objective import CorrectionConfig, PolicyConfig, ReferenceConfig
from slipstream.config.offpolicy import MixConfig, SupervisedConfig
from slipstream.config.rewards import FormatConfig, JudgeConfig, OverlongConfig, RewardModelConfig
from slipstream.config.schedule import Async, ScheduleConfig
from slipstream.config.server import ServerConfig
from slipstream.config.speculation import SpeculationConfig
from slipstream.config.teacher import SELF, problems
from slipstream.config.teacher import TeacherConfig as TeacherConfig
from slipstream.errors import ConfigError, did_you_mean

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
REWARDS = ("exact", "math", "environment", "format", "overlong", "model", "judge")


Value = str | int | float | bool


def check_filter(given: dict[str, Any]) -> dict[str, Any]:
    for column, values in given.items():
        if values == ():
            raise ValueError(f"{column} = [] leaves out every row: write the values of the rows to use, or drop it")
    return given


RowFilter = Annotated[dict[str, Value | tuple[Value, ...]], AfterValidator(check_filter)]
"""Values that a row must have, by the path of a column; of several values a row has one."""


class DataConfig(Section):
    train: str | dict[str, str] = "builtin:arithmetic"
    """Training prompts: a .jsonl, .json, .csv (each also .gz) or .parquet file; a HF dataset, saved or on the hub, with
    its subset (openai/gsm8k:main); or builtin:arithmetic, builtin:table, builtin:lookup, builtin:doors,
    builtin:words. Several sources have names: { math = "math.jsonl", code = "code.csv" }."""
    weights: dict[str, float] = Field({})
    """Weights of several training sources, for example { math = 3, code = 1 }. A source has its weight as share of the
    prompts, after `weights_temperature`. Empty weighs every source by its number of rows."""
    weights_temperature: float = Field(1.0, ge=0.01, le=100)
    """Temperature of the weights of several training sources: shares are weights to the power 1 / temperature. Above 1
    the shares are more equal."""
    split: str = "train"
    """Split of `train`, for a HF dataset or a built-in task (train, eval)."""
    eval: str | dict[str, str] | None = None
    """Held-out prompts in the same formats, or several sets by name: { math = "math.jsonl", code = "code.csv" }. None
    evaluates nothing during training."""
    eval_split: str = "eval"
    """Split of the held-out prompts, like `split`."""
    where: RowFilter = Field({})
    """Training rows to use, by columns and their values, with dots as in `prompt`: { level = [4, 5], type = "algebra" }
    uses rows with one of these levels and this type. Empty uses all rows."""
    eval_where: RowFilter = Field({})
    """Held-out rows to use, like `where`."""
    limit: int | None = Field(None, ge=1)
    """Number of training rows to use, from the first row of each source. None uses all rows."""
    deduplicate: bool = False
    """Drop every training row that has the same prompt and answer as an earlier row. With [environment] the other
    columns must be the same, too."""
    too_long: Literal["refuse", "skip", "cut_left", "cut_right"] = "refuse"
    """Treatment of prompts that are too long: with sampler.max_tokens they exceed sampler.longest or the context of a
    model. refuse: end with an error. skip: leave them out and print their number. cut_left, cut_right: remove tokens
    from this side of a text prompt."""
    prompt: str | None = None
    """Column of the prompt: text or a list of messages. Dots select fields of objects and items of lists
    (extra.question). None finds the prompt by well-known column names (docs/data.md)."""
    answer: str | None = None
    """Column of the answer, with dots as in `prompt` (reward_model.ground_truth). In a list of answers each one is
    correct. None finds the answer by well-known column names."""
    response: str | None = None
    """Column of the response that [sft] and [mix] learn from with source = "data", with dots as in `prompt`. None uses
    the last assistant turn, or the whole text in the column of the answer."""
    template: str | None = None
    """Template of the prompt with columns of the row, for example "Solve: {question}"; write {{ and }} for braces. None
    uses the prompt column."""
    chat: bool = False
    """Send a text prompt as a user message through the chat template. false sends the text without a template."""
    shuffle: bool = True
    """Shuffle the rows again in every epoch, by `seed`. false keeps the order of the file."""
    order: Literal["epochs", "curriculum", "adaptive"] = "epochs"
    """Choice of prompts. epochs: every row once in each epoch. curriculum: first from easy to hard rows, then epochs.
    adaptive: each prompt with a weight by what earlier answers to it have shown."""
    by: str | None = Field(None, min_length=1)
    """Column of numbers that a curriculum sorts by, smallest first, with dots as in `prompt`."""
    ramp: float = Field(1.0, gt=0, le=1000)
    """Number of epochs that the curriculum lasts. In each, every row occurs once; in a part of an epoch, a random part
    of the rows."""
    adapt: Literal["reward", "kl"] = "reward"
    """Weight of a prompt with order = "adaptive". reward: p·(1 − p), with p the mean of the first reward in
    task.reward, between 0 and 1. kl: KL to the teacher per token."""
    half_life: float = Field(20.0, gt=0)
    """Number of updates after which an answer counts half as much for the weight of its prompt."""
    floor: float = Field(0.1, gt=0, le=1)
    """Part of the prompts that are drawn evenly with order = "adaptive". Of R rows each is drawn within R / floor draws
    on average."""
    system_prompt: str | None = None
    """System message that is put before every conversation; needs a chat template. None adds no message."""
    template_args: dict[str, Any] = Field({})
    """Arguments of the chat template, for example enable_thinking = false. Empty passes none."""
    teacher_key: str = "data_source"
    """Column whose value selects the teacher of a prompt, if there are several teachers (see teachers.NAME.key)."""

    @property
    def held_out(self) -> dict[str, str]:
        """Return every held-out set by its name, which is "" for a single set."""
        if self.eval is None:
            return {}
        return self.eval if isinstance(self.eval, dict) else {"": self.eval}

    @property
    def sources(self) -> dict[str, str]:
        """Return every source of training prompts by its name, which is "" for a single source."""
        return self.train if isinstance(self.train, dict) else {"": self.train}

    @field_validator("eval", "train")
    @classmethod
    def _check_set_names(cls, given: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if given == {}:
            raise ValueError('names no set of prompts: write one, as in { math = "math.jsonl" }, or drop it')
        for name in given if isinstance(given, dict) else ():
            if not re.fullmatch(r"\w+", name):
                raise ValueError(f"the name {name!r} must be a plain word, because metrics use it: eval/NAME/accuracy")
        return given

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str | None) -> str | None:
        if template is None:
            return None
        fields = template_fields(template)
        if not fields:
            raise ValueError("would be the same for every prompt: name a column, as in {question}")
        for name, spec, conversion in fields:
            if not name or spec or conversion:
                raise ValueError("write only the name of a column between braces, as in {question}")
        return template

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.prompt is not None and self.template is not None:
            raise ValueError("prompt does nothing beside template, which names the columns itself: drop one of them")
        if self.eval_where and self.eval is None:
            raise ValueError("eval_where has no held-out rows to choose from: set data.eval, or drop it")
        return self

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.order == "curriculum" and self.by is None:
            raise ValueError('order = "curriculum" sorts by a column: name it, by = "level", for example')
        if self.order != "epochs" and not self.shuffle:
            raise ValueError(f'shuffle = false is for order = "epochs", and order = "{self.order}": drop one of them')
        for name, weight in self.weights.items():
            if name not in self.sources:
                raise ValueError(f"weights: there is no source {name!r} in train; {did_you_mean(name, self.sources)}")
            if weight <= 0:
                raise ValueError(f"weights.{name} = {weight:g} must be above 0: drop the source instead")
        if self.weights and (missing := sorted(self.sources.keys() - self.weights.keys())):
            raise ValueError(f"weights: {missing[0]!r} has none: write one for every source of train")
        return self

    @field_validator("template_args")
    @classmethod
    def _check_template_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name in args:
            if args[name] is None:
                raise ValueError(f"{name} cannot be none: leave it out")
        return args


class SamplerConfig(Section):
    engine: Literal["native", "vllm", "server"] = "native"
    """Inference engine that generates the rollouts. server: an HTTP server that runs elsewhere (docs/servers.md)."""
    server: ServerConfig | None = None
    """Rollout server, for engine = "server"."""
    engine_args: EngineArgs = Field({})
    """Arguments of vLLM's engine, for example gpu_memory_utilization = 0.8. With tensor_parallel_size = 2 each sampler
    runs on two GPUs. Only for engine = "vllm"."""
    max_tokens: int = Field(256, ge=1)
    """Largest number of tokens of a response with its end token, or of a whole episode with its observations."""
    group: int = Field(1, ge=1)
    """Number of responses to one prompt (G), rolled out and scored together. Most advantages of [policy] need more than
    1."""
    temperature: Temperature = 1.0
    """Sampling temperature of rollouts."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this probability mass; 1 keeps all. With truncation by top_p,
    top_k or min_p, importance weights need keep_mask = true."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens to sample from; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Minimum probability of a token, as a fraction of the most likely token's probability; 0 keeps all."""
    keep_mask: bool = False
    """Record the sampling support of each token: ids that top_p, top_k and min_p kept. Ratios and KLs are then
    exact."""
    interleave: int = Field(0, ge=0)
    """Number K for speculative knowledge distillation (SKD): a token that is not among the teacher's K most likely
    tokens at its position is replaced by a draw of the teacher among these K. The sampler holds a copy of the teacher.
    0: the student draws alone."""
    speculation: SpeculationConfig | None = None
    """Speculative sampling: propose tokens that occurred before, and verify several in one pass. It changes no token
    and no log-prob, and is faster where responses repeat themselves or their prompt. None proposes no tokens."""
    stop: Annotated[tuple[int | str, ...], BeforeValidator(as_tuple)] = ()
    """Further tokens at which a response stops, each as an id or as the text of one token, for example
    ["<|im_end|>"]. The trained student is saved with them. Empty: only the end tokens in the student's files."""
    longest: int | None = Field(None, ge=2)
    """Largest number of tokens of a prompt with its response. None uses the longest sequence that the data allow. For
    models with several sets of position factors (longrope, dynamic) this length selects one set for the whole run."""
    replicas: Replicas = 1
    """Number of samplers. Each group goes to the least busy sampler. "auto" starts with one, adds samplers while the
    learner waits for groups and they help, and removes idle ones."""
    replicas_max: int = Field(8, ge=1)
    """Largest number of samplers that replicas = "auto" can choose."""
    slots: int = Field(64, ge=1)
    """Number of sequences that each sampler generates concurrently. Lower it if memory runs out."""
    dtype: Dtype = "float32"
    """Number format of weights and computations in the samplers."""
    quantisation: Quantisation | None = None
    """Eight-bit weights of the samplers' linear layers, made at every publish (docs/learner.md). The rollouts are of
    the quantised student, another policy than the learner's, and so are their log-probs. None: weights in dtype."""
    on_publish: Literal["rebuild", "reuse"] = "rebuild"
    """Treatment of the KV cache of running responses when new weights arrive. rebuild: compute the cache again with the
    new weights. reuse: keep the old cache, which costs nothing and is approximate. The recorded log-probs then are
    still those of the sampling policy, but no single set of weights reproduces them."""

    @property
    def truncation(self) -> list[str]:
        """Return the names of the settings that leave tokens out of the sampling distribution."""
        return self.changed("top_p", "top_k", "min_p")


class LoraConfig(Section):
    rank: int = Field(16, ge=1)
    """Rank of the low-rank adapters."""
    alpha: float = Field(32.0, gt=0)
    """Numerator of the adapters' scale, which is alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers with an adapter, such as ["q_proj", "v_proj"]. "all-linear": all except the head."""

    def among(self, layers: Sequence[str]) -> list[str]:
        """Return the linear layers that get an adapter. Raise a ConfigError for an unknown target."""
        if self.targets == "all-linear":
            return list(layers)
        known = sorted({name.rpartition(".")[2] for name in layers})
        for target in self.targets:
            if target not in known:
                hint = did_you_mean(target, known)
                raise ConfigError(f"learner.lora.targets: {target!r} is no linear layer of the student; {hint}")
        return [name for name in layers if name.rpartition(".")[2] in self.targets]


class PerturbationConfig(Section):
    std: float = Field(1e-2, gt=0)
    """Initial standard deviation σ of the noise on the input of every layer."""
    lr: float = Field(5e-4, ge=0)
    """Learning rate of log σ, which each layer has for itself. 0 keeps σ."""


class LearnerConfig(Section):
    batch_size: int = Field(64, ge=1)
    """Number of samples in one update; a multiple of sampler.group."""
    lr: float = Field(1e-5, gt=0, le=1)
    """Peak learning rate of AdamW, after the warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW; 0 is off."""
    warmup: int = Field(0, ge=0)
    """Number of updates over which the learning rate rises linearly; 0 starts at lr."""
    decay: Literal["constant", "cosine"] = "constant"
    """Learning rate schedule after the warm-up: constant, or a cosine decay over the rest of the run."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm. Larger gradients are scaled down (gradient clipping)."""
    minibatches: int = Field(1, ge=1)
    """Number of optimizer steps per pass over the samples of an update, each on an equal part of the groups."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the samples of an update. With more than 1 the later passes are off-policy."""
    token_budget: int = Field(16384, ge=1)
    """Largest number of tokens, padding included, in one micro-batch. Lower it if memory runs out."""
    packing: bool = True
    """Put several sequences into one row; a sequence attends only to itself. Write false for models without support."""
    shared_prompt: bool = False
    """Compute the prompt of a group only once: its responses share a row. Each attends to the prompt and to itself."""
    dropout: bool = False
    """Train with the dropout rates of the model's config. false uses no dropout, so that learner and sampler compute
    the same policy."""
    checkpointing: bool = False
    """Recompute activations in the backward pass (gradient checkpointing): less memory, a third more time."""
    offload: tuple[Literal["optimizer", "activations"], ...] = ()
    """States that are in host memory while the GPU does not need them. optimizer: AdamW's moments, which come to the
    GPU for the step of their weight. activations: inputs of all layers between forward and backward pass; needs
    checkpointing. Empty keeps both on the GPU. Experimental: tried on CPUs only."""
    dtype: Dtype = "float32"
    """Number format of weights and gradients."""
    compute_dtype: Dtype | None = None
    """Number format of matrix products (autocast); weights keep dtype. Write "bfloat16" for speed. "float16" rounds
    eight times less than bfloat16 and uses a dynamic loss scale (docs/learner.md). None uses dtype."""
    quantised: bool = False
    """Compute with the weights as sampler.quantisation rounds them, so that learner and sampler are one policy (QaRL).
    AdamW changes the unrounded weights, with the gradient of the rounded ones (docs/learner.md)."""
    optimizer_dtype: Dtype | None = None
    """Number format of AdamW's moments. None uses dtype."""
    ranks: int = Field(1, ge=1)
    """Number of processes that share the learner; weights and optimizer states are sharded over them (FSDP)."""
    exact_drift: bool = False
    """Measure KL(current policy ‖ sampling policy) over the whole vocabulary: two more passes per weight version."""
    snapshots: int | None = Field(None, ge=0)
    """Number of old weight versions that stay in host memory, to recompute log-probs under the policy that sampled a
    token. None keeps as many as the method and the schedule need."""
    router: Literal["free", "measure", "replay_rollout", "replay_old"] = "free"
    """Experts that the learner's passes use, for a student with a mixture of experts. free: those that its routers
    choose. measure: the same, and the sampler records its choices, so that router/flips is known. replay_rollout (R3):
    those that the sampler recorded. replay_old (R2): those of the learner before the update's first step, or before its
    last update with policy.old = "previous"."""
    router_aux: Annotated[float, Field(gt=0)] | Literal["model"] | None = None
    """Coefficient of the auxiliary loss that spreads tokens over the experts. "model" takes router_aux_loss_coef of the
    student's config. None: no such loss."""
    lora: LoraConfig | None = None
    """Train low-rank adapters (LoRA) instead of all weights."""
    perturbation: PerturbationConfig | None = None
    """Learned noise on the input of every layer, in the training passes of a policy loss (ALP, docs/learner.md). Needs
    one rank, and loss.weight = 0 or loss.as = "reward"."""
    threads: int | None = Field(None, ge=1, le=THREADS)
    """Number of CPU threads of the learner. None uses runtime.threads."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if len(set(self.offload)) < len(self.offload):
            raise ValueError(f"offload = {list(self.offload)} names a part twice: write each once")
        if "activations" in self.offload and not self.checkpointing:
            raise ValueError(
                'offload = ["activations"] moves the inputs of layers that the backward pass computes again: write '
                "checkpointing = true, too"
            )
        return self

    @property
    def records_router(self) -> bool:
        """Return whether samplers record the experts that their routers choose."""
        return self.router in ("measure", "replay_rollout")


def name_of(reward: str) -> str:
    return reward.rpartition(":")[2]


def check_reward(spec: str) -> str:
    check_own(spec, REWARDS, "reward", "function")
    return spec


class TaskConfig(Section):
    reward: tuple[str, ...] = ()
    """Rewards that grade answers; one name or a list: exact (text), math (by math-verify), environment (its own
    reward), format and overlong (form and length), model (a reward model), judge (a model behind an endpoint), or a
    user function "./file.py:function" or "module:function". All rewards are logged. The first one is the accuracy of
    evaluation. Empty grades nothing."""
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


BySet = dict[str, Annotated[int, Field(ge=1)]]
"""A number for each held-out set, by the set's name."""


class EvalConfig(Section):
    every: Annotated[int, Field(ge=0)] | BySet = 0
    """Number of updates between two evaluations: one number, or one for each held-out set by name, as in
    { math = 10, code = 50 }. The student is also evaluated at the start and at the end. 0 never evaluates, and the
    other settings of [eval] then have no effect. With task.reward it measures accuracy, without it the reverse KL to
    the teacher."""
    prompts: Annotated[int, Field(ge=1)] | BySet = 200
    """Number of held-out prompts of each set; one number, or one for each set by name."""
    n: Annotated[int, Field(ge=1)] | BySet = 1
    """Number of samples for each prompt; one number, or one for each set by name. Accuracy is the mean over them
    (avg@n)."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature of evaluation; 0 is greedy."""

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if 0 < temperature < GREEDY:
            raise ValueError(f"{temperature:g} is as good as greedy: write 0, or {GREEDY} or more")
        return temperature

    def of(self, name: str, key: Literal["every", "prompts", "n"]) -> int:
        """Return a setting of one held-out set."""
        value: int | dict[str, int] = getattr(self, key)
        return value[name] if isinstance(value, dict) else value

    @property
    def shortest(self) -> int:
        """Return the number of updates between two evaluations of the set that is evaluated most often."""
        return min(self.every.values()) if isinstance(self.every, dict) else self.every


class CheckpointConfig(Section):
    every: int = Field(0, ge=0)
    """Number of updates between two checkpoints; 0 saves by `minutes` only."""
    minutes: float = Field(10.0, ge=0)
    """Minutes after which a checkpoint is saved, at the end of the next update; 0 saves by `every` only. With either
    setting the end of a run is saved too. If both are 0, a run that is killed loses everything."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep. The last proven one and the next to prove (docs/trust.md) also stay."""


class HealthConfig(Section):
    stop: bool = True
    """Stop the run at a finding that no run recovers from. false only prints findings."""
    updates: int = Field(3, ge=1)
    """Number of consecutive updates with the same problem that count as a finding."""
    window: int = Field(50, ge=5)
    """Number of preceding updates that define the usual values."""
    kl: float = Field(0.05, ge=0)
    """Largest amount in nats by which the measured reverse KL to a teacher may be below 0, in addition to its standard
    errors. A true KL is never negative."""
    invalid: float = Field(0.1, ge=0, le=1)
    """Share of unusable responses above which a teacher counts as failing. The same limit holds for the share of
    rechecked groups whose two scores differ."""
    canary: int = Field(5, ge=0)
    """Number of updates between two canary checks: all teachers and samplers process fixed inputs again, and the
    results are compared with those of the start (docs/trust.md). 0 makes no checks."""
    grad_norm: float = Field(100.0, gt=1)
    """Limit of the gradient norm, as a multiple of its median over `window` updates."""
    collapse: float = Field(0.05, ge=0, lt=1)
    """Limit below which entropy or response length count as collapsed, as a share of their value at the start. A
    finding also requires that neither KL nor any reward improved."""
    rise: float = Field(5.0, gt=0)
    """Rise in nats of the mean reverse KL to the teachers since the start that is a finding if no reward improved."""
    repeated: float = Field(0.5, gt=0, le=1)
    """Share of repeated 4-grams in the student's responses (student/repeated) that is a finding, if it was below half
    of that at the start and no reward improved. 1 is never exceeded."""
    idle: int = Field(50, ge=1)
    """Number of consecutive updates with a gradient of zero that count as a finding."""
    reward: int = Field(100, ge=2)
    """Number of consecutive updates with an unchanged reward that cause a report. The run is not stopped."""

    @property
    def proof(self) -> int:
        """Return the number of updates in which all health rules and canary checks test a checkpoint's weights."""
        return max(self.updates, self.canary)


class LogConfig(Section):
    to: Annotated[tuple[Tracker, ...], BeforeValidator(as_tuple)] = ()
    """Trackers that also receive the metrics, and the samples of every tenth update: tensorboard, wandb, mlflow,
    trackio; one name or a list. Empty sends nothing."""
    project: str = "slipstream"
    """Project name in trackers that have projects."""
    samples: int = Field(2, ge=0)
    """Number of samples per update that are written to samples.jsonl, with the log-probs of student and teacher for
    every token. `slipstream samples` prints them. 0 writes none."""
    trace: bool = True
    """Write trace.json, a timeline of all workers; open it in ui.perfetto.dev."""


class RuntimeConfig(Section):
    kind: Literal["local", "ray", "inline"] = "local"
    """Placement of engines. local: processes on this machine. ray: actors of Ray. inline: all in this process."""
    clock: Literal["real", "modelled"] = "real"
    """Clock of the run. modelled: every stage takes the time that `costs` says, so that runs of one seed are equal on
    any machine; for studies. Needs kind = "inline" and native engines."""
    costs: str = "builtin"
    """File of costs for clock = "modelled", as `slipstream plan --measure -o FILE` writes it. builtin: costs of the
    built-in models on CPU cores, one for each engine."""
    address: str | None = None
    """Address of a Ray cluster, or auto; implies kind = "ray". None starts Ray on this machine and stops it later."""
    patience: float = Field(1800.0, gt=0)
    """Seconds without any progress after which the run stops and reports which worker waits for which. On modelled
    time a run whose workers all wait stops at once."""
    heartbeat: float = Field(60.0, gt=0)
    """Seconds without an answer after which an engine's process counts as hanging and is killed. Engines answer while
    they compute, except inside a call that blocks Python, such as writing part of a checkpoint to a slow disk."""
    restarts: int = Field(3, ge=0)
    """Number of restarts per hour of each engine that died; above it the run continues without the engine, if possible.
    Samplers and scorers restart while others continue. For the learner the run goes back to its last checkpoint."""
    device: str = "auto"
    """Device of the models: auto, cpu or cuda; with kind = "inline" also cuda:1 and so on."""
    turns: bool = False
    """Let sampler, teachers and learner take turns on one device. Weights and optimizer state of engines that wait are
    in host memory. Needs kind = "inline", schedule.kind = "sync" or "replay", and native engines. Experimental: tried
    on CPUs only."""
    threads: int = Field(1, ge=1, le=THREADS)
    """Number of CPU threads of one engine. One is fastest for very small models."""
    graders: int = Field(1, ge=1)
    """Number of processes that grade answers. Raise it if grading is slower than the rollout."""

    @model_validator(mode="before")
    @classmethod
    def _address_implies_ray(cls, given: Any) -> Any:
        there = isinstance(given, dict) and given.get("address") is not None
        return {"kind": "ray", **given} if there else given

    @model_validator(mode="after")
    def _check_clock(self) -> RuntimeConfig:
        if self.clock == "modelled" and self.kind != "inline":
            raise ValueError('clock = "modelled" needs all engines in this process: write kind = "inline"')
        if self.clock == "real" and self.costs != "builtin":
            raise ValueError('costs does nothing without clock = "modelled": set that, or drop costs')
        return self


def most_replicas(workers: SamplerConfig | TeacherConfig) -> int:
    return workers.replicas_max if workers.replicas == "auto" else workers.replicas


class Config(Section):
    student: str
    """Model to train: HF directory or hub name, or builtin:student."""
    updates: int = Field(100, ge=1, le=10**9)
    """Number of updates to make."""
    seed: int = Field(0, ge=0, lt=10**18)
    """Random seed of the prompts, their order, and all sampling."""
    output: str | None = Field(None, min_length=1)
    """Run directory. None creates runs/NAME-TIME."""
    teachers: dict[str, TeacherConfig] = Field({})
    """Teachers, each under a name of your choice. Empty needs loss.weight = 0."""
    data: DataConfig = DataConfig()
    sampler: SamplerConfig = SamplerConfig()
    environment: EnvironmentConfig | None = None
    sft: SupervisedConfig | None = None
    mix: MixConfig | None = None
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
    def _check_teacher_names(cls, teachers: dict[str, TeacherConfig]) -> dict[str, TeacherConfig]:
        for name in teachers:
            if not name.isidentifier():
                raise ValueError(f"the name {name!r} must be a plain word, as in [teachers.main]")
        return teachers

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        group, batch = self.sampler.group, self.learner.batch_size
        if batch % group:
            raise ValueError(f"learner.batch_size = {batch} is not a multiple of sampler.group = {group}")
        self._check_objective()
        self._check_learner()
        self._check_guards()
        self._check_offpolicy()
        self._check_interleaved()
        bounded = {"keep_mask"} if self.sampler.engine == "vllm" and self.sampler.top_k else set[str]()
        for feature, why in ENGINES[self.sampler.engine].sampler_refuses.items():
            if feature in self.sampler_features - bounded:
                raise ValueError(why)
        if self.sampler.quantisation is not None and self.learner.lora is not None:
            raise ValueError(
                "[learner.lora] publishes adapters, and sampler.quantisation quantises published weights: drop one"
            )
        if self.learner.quantised and self.sampler.quantisation is None:
            raise ValueError('learner.quantised rounds as the sampler does: write sampler.quantisation = "int8"')
        self._check_server()
        check_reserved("sampler", "student", self.sampler.engine_args)
        for name, teacher in self.teachers.items():
            check_reserved(f"teachers.{name}", f"teachers.{name}.model", teacher.engine_args)
        if self.sampler.keep_mask and not self.sampler.truncation:
            raise ValueError("sampler.keep_mask does nothing: top_p, top_k and min_p leave out no token; drop it")
        if self.sampler.speculation is not None and self.sampler.max_tokens < 3:
            raise ValueError(
                "sampler.speculation proposes tokens between the first and the last of a response, and "
                f"sampler.max_tokens = {self.sampler.max_tokens} leaves none: drop it"
            )
        if group > self.sampler.slots:
            raise ValueError(f"sampler.group = {group} needs sampler.slots of at least {group}")
        self._check_environment()
        self._check_clock()
        self._check_turns()
        if self.task.overlong is not None and self.task.overlong.buffer > self.sampler.max_tokens:
            raise ValueError(
                f"task.overlong.buffer = {self.task.overlong.buffer} is more than sampler.max_tokens = "
                f"{self.sampler.max_tokens}: every response would be punished; lower it"
            )
        if self.runtime.kind != "ray" and self.runtime.address is not None:
            raise ValueError('runtime.address names a Ray cluster: write runtime.kind = "ray", or drop one of them')
        if self.runtime.kind == "inline" and self.most_workers:
            raise ValueError(
                'replicas = "auto": with runtime.kind = "inline" no worker can be added: write a number, or '
                'runtime.kind = "local"'
            )
        self._check_evaluation()
        self._check_unused()
        return self

    def _check_evaluation(self) -> None:
        if not self.eval.every:
            return
        if self.data.eval is None:
            raise ValueError("eval.every needs held-out prompts: set data.eval")
        if not self.task.reward and not self.teachers:
            raise ValueError('eval.every needs a way to grade answers: set task.reward, for example "exact"')
        if not self.task.reward and self.eval.changed("temperature"):
            raise ValueError(
                "eval.temperature does nothing without task.reward: the KL to the teacher is that of the policy that "
                "training samples from; drop it"
            )
        for key in "every", "prompts", "n":
            named = getattr(self.eval, key)
            if isinstance(named, dict) and (other := sorted(named.keys() ^ self.data.held_out.keys())):
                raise ValueError(
                    f"eval.{key} is a table, and data.eval, too, must be one with the same names: {other[0]!r} is in "
                    "one of them only"
                )
        publish_every = self.schedule.max_publish_every
        for name in self.data.held_out:
            every, n = self.eval.of(name, "every"), self.eval.of(name, "n")
            if n > self.sampler.slots:
                raise ValueError(f"eval.n = {n} needs sampler.slots of at least {n}")
            if every % publish_every:
                raise ValueError(
                    f"eval.every = {every} is not a multiple of schedule.publish_every = {publish_every}: samplers do "
                    "not have the weights in between"
                )

    def _check_unused(self) -> None:
        """Raise ValueError for the first setting that was changed but has no effect without another setting."""
        graded, evaluated = bool(self.task.reward), "every" in self.eval.model_fields_set
        adapts = self.data.order == "adaptive"
        several, tracked = len(self.teachers) > 1, bool(set(self.log.to) - {"tensorboard"})
        apart, written = self.runtime.kind != "inline", any(each.own_context for each in self.teachers.values())
        teachers = {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        workers: dict[str, SamplerConfig | TeacherConfig] = {"sampler": self.sampler, **teachers}
        loss_options = [name for name in type(self.loss).model_fields if name != "weight"]
        sections: list[tuple[str, Section, Iterable[str], bool, str]] = [
            *(
                (name, each, ("replicas_max",), each.replicas == "auto", 'replicas = "auto"')
                for name, each in workers.items()
            ),
            ("task", self.task, ("timeout",), graded or written, "task.reward, or a function that writes a context"),
            ("runtime", self.runtime, ("graders",), graded, "task.reward"),
            ("runtime", self.runtime, ("heartbeat", "restarts"), apart, 'runtime.kind = "local" or "ray"'),
            ("data", self.data, ("eval", "eval_split"), evaluated, "eval.every"),
            ("eval", self.eval, ("prompts", "n", "temperature"), evaluated, "eval.every"),
            ("log", self.log, ("project",), tracked, "a tracker in log.to that has projects"),
            ("data", self.data, ("teacher_key",), several, "several teachers"),
            (
                "data",
                self.data,
                ("weights", "weights_temperature"),
                len(self.data.sources) > 1,
                "several sources in data.train",
            ),
            ("data", self.data, ("by", "ramp"), self.data.order == "curriculum", 'data.order = "curriculum"'),
            ("data", self.data, ("adapt", "half_life", "floor"), adapts, 'data.order = "adaptive"'),
            ("data", self.data, ("response",), "data" in self.offpolicy_sources, '[sft] or [mix] with source = "data"'),
            ("health", self.health, ("kl", "invalid", "rise"), bool(self.teachers), "a teacher"),
            ("health", self.health, ("reward",), graded, "task.reward"),
            *((name, each, ("key",), several, "another teacher") for name, each in teachers.items()),
            ("loss", self.loss, loss_options, self.loss.weight > 0, "loss.weight"),
        ]
        if not self.loss.weight and self.loss.kind != type(self).model_fields["loss"].default.kind:
            raise ValueError("loss.kind does nothing without loss.weight: set that, or drop loss.kind")
        for where, section, names, used, needed in sections:
            for name in section.changed(*names) if not used else ():
                setting = f"{where}.{type(section).model_fields[name].alias or name}"
                raise ValueError(f"{setting} does nothing without {needed}: set that, or drop {setting}")

    @property
    def supervised_updates(self) -> int:
        return self.sft.updates if self.sft is not None else 0

    @property
    def all_supervised(self) -> bool:
        """Return whether the run has supervised updates alone."""
        return self.supervised_updates == self.updates

    @property
    def _sft_asks_teachers(self) -> bool:
        return self.sft is not None and (self.sft.source == "teacher" or self.sft.loss.spec.cache != "none")

    @property
    def offpolicy_sources(self) -> set[str]:
        """Return the origins of the responses that the student does not draw: data, teacher, file."""
        return {section.source for section in (self.sft, self.mix) if section is not None}

    def _check_offpolicy(self) -> None:
        for name in ("sft", "mix"):
            section: SupervisedConfig | MixConfig | None = getattr(self, name)
            if section is None:
                continue
            if self.environment is not None:
                raise ValueError(f"[{name}] has responses of one turn, and [environment] makes episodes: drop one")
            if section.source == "teacher":
                self._check_teachers_roll(name)
        if self.sft is not None:
            self._check_supervised(self.sft)
        if self.mix is not None:
            self._check_mix(self.mix)

    def _check_interleaved(self) -> None:
        """Raise ValueError if a section cannot use tokens that a teacher replaced, or if the teacher cannot follow."""
        where, spec = "sampler.interleave", self.loss.spec
        if not self.sampler.interleave:
            return
        if len(self.teachers) != 1:
            raise ValueError(f"{where} needs exactly one teacher, and there are {len(self.teachers)}: drop it")
        if names := [*self.sampler.truncation, *self.sampler.changed("keep_mask")]:
            raise ValueError(f"{where}: the teacher may draw tokens outside of sampler.{names[0]}: drop one of them")
        for name in ("policy", "freshness", "environment"):
            if getattr(self, name) is not None:
                raise ValueError(f"{where} does not work with [{name}]: drop one of them")
        if self.correction.preset != "disabled":
            raise ValueError(
                f'{where}: correction.preset = "{self.correction.preset}" rejects tokens that the student would not '
                "draw, which are those of the teacher: drop one of them"
            )
        if self.guards.gac is not None:
            raise ValueError(f"[guards.gac] compares samples by the age of the student's weights: drop it, or {where}")
        drift = {f"[guards.{name}]": getattr(self.guards, name) is not None for name in ("kl", "ess")}
        drift['schedule.tau = "auto"'] = getattr(self.schedule, "tau", None) == "auto"
        if found := next((name for name, used in drift.items() if used), None):
            raise ValueError(
                f"{found} acts on drift, which the tokens of the teacher raise without staleness: drop it, or {where}"
            )
        if self.runtime.clock == "modelled":
            raise ValueError(f'runtime.clock = "modelled" has no cost for the teacher of {where}: drop one of them')
        if spec.cache == "student_topk" or (spec.cache == "sampled" and not spec.compares):
            raise ValueError(
                f'loss.kind = "{self.loss.kind}" takes every token for a draw of the student alone, and {where} has '
                'others: write "forward_kl", "reverse_kl", "jsd", or "reverse_kl_mc" with importance'
            )
        for key, teacher in self.teachers.items():
            if teacher.base_url is not None or teacher.engine != "native":
                what = "is an endpoint" if teacher.base_url is not None else f"runs in {teacher.engine}"
                raise ValueError(
                    f"{where}: teachers.{key} {what}, and only a native one steps with the sampler: drop {where}, or "
                    'write engine = "native" without base_url'
                )
            if option := next(iter(teacher.changed("ends", "context", "follow", "devices")), None):
                raise ValueError(
                    f"{where} needs a teacher with constant weights, the student's prompt and its end tokens: drop it, "
                    f"or teachers.{key}.{option}"
                )

    def _check_teachers_roll(self, name: str) -> None:
        """Raise ValueError unless every teacher can generate responses: a constant model that runs here natively."""
        if not self.teachers:
            raise ValueError(f'{name}.source = "teacher" needs a teacher: add [teachers.main], or write "data"')
        for key, teacher in self.teachers.items():
            if teacher.base_url is not None or teacher.engine != "native":
                what = "is an endpoint" if teacher.base_url is not None else f"runs in {teacher.engine}"
                raise ValueError(
                    f'{name}.source = "teacher": teachers.{key} {what}, and only a native engine here rolls out for '
                    'the student: write source = "data", or engine = "native" without base_url'
                )
            if teacher.devices > 1:
                raise ValueError(
                    f'{name}.source = "teacher": teachers.{key} runs on {teacher.devices} devices, and rolls out on '
                    'one only: drop its devices, or write source = "data"'
                )
            if teacher.ends == "map":
                raise ValueError(
                    f'{name}.source = "teacher": the rollouts of teachers.{key} would end with its own tokens, and '
                    'ends = "map" changes only its scores: write sampler.stop instead, or source = "data"'
                )
            for option in ("context", "follow"):
                if getattr(teacher, option) is not None:
                    raise ValueError(
                        f'{name}.source = "teacher" rolls out from the student\'s prompt with constant weights, and '
                        f'teachers.{key}.{option} changes that: drop it, or write source = "data"'
                    )

    def _check_supervised(self, sft: SupervisedConfig) -> None:
        if sft.updates > self.updates:
            raise ValueError(f"sft.updates = {sft.updates} is more than updates = {self.updates}, which counts both")
        if self.all_supervised:
            idle = ["loss.weight"] if self.loss.weight else []
            idle += ["sft.until"] if sft.until is not None else []
            idle += [f"[{name}]" for name in ("policy", "mix", "freshness") if getattr(self, name) is not None]
            if idle:
                drop = "write loss.weight = 0" if idle == ["loss.weight"] else f"drop {idle[-1]}"
                raise ValueError(
                    f"sft.updates = {sft.updates} leaves no update for rollouts, and {idle[-1]} is for these: {drop}, "
                    "or raise updates"
                )
        if self.reference is not None or "reference" in self.loss.spec.takes:
            what = "[reference]" if self.reference is not None else "the reference of loss.reward_scale"
            raise ValueError(
                f"{what} is the student at the start of the run, before [sft] has taught it anything: drop one of "
                "them, or make the supervised updates in a run of their own"
            )
        if sft.loss.weight != 1:
            raise ValueError("sft.loss.weight does nothing: the supervised updates have no other loss; drop it")
        if sft.loss.kind == "cross_entropy":
            return
        if not self.teachers:
            raise ValueError(f'sft.loss.kind = "{sft.loss.kind}" needs a teacher: write "cross_entropy"')
        for key, teacher in self.teachers.items():
            if teacher.base_url is not None or teacher.engine != "native":
                raise ValueError(
                    f'sft.loss.kind = "{sft.loss.kind}" needs scores that only a native teacher gives beside those of '
                    f'[loss], and teachers.{key} is none: write sft.loss.kind = "cross_entropy"'
                )
        for problem in problems(self.teachers, sft.loss):
            raise ValueError(f"sft: {problem}")

    def _check_mix(self, mix: MixConfig) -> None:
        if mix.prefix is not None:  # the student draws every trained token, so all losses and corrections work
            return
        spec, where = self.loss.spec, f'[mix] with source = "{mix.source}"'
        if not self.loss.weight:
            raise ValueError(
                "[mix] with loss.weight = 0 teaches nothing: the policy loss learns only from tokens that the student "
                "draws; add [teachers.main] and raise loss.weight, or drop [mix]"
            )
        if self.freshness is not None:
            raise ValueError("[freshness] weighs samples by the student's weights that drew them: drop it, or [mix]")
        if self.correction.preset != "disabled":
            raise ValueError(
                f'correction.preset = "{self.correction.preset}" rejects tokens that the student would not draw, which '
                "are those of [mix]: drop one of them"
            )
        if self.guards.gac is not None:
            raise ValueError("[guards.gac] compares samples by the age of the student's weights: drop it, or [mix]")
        if self.sampler.keep_mask:
            raise ValueError("sampler.keep_mask records the support of the student's sampler alone: drop it, or [mix]")
        if spec.cache == "student_topk":
            raise ValueError(
                f'loss.kind = "{self.loss.kind}" uses the top-k ids of the student that drew, and [mix] has tokens '
                'that it did not draw: write loss.kind = "forward_kl", "reverse_kl" or "jsd"'
            )
        if spec.cache == "sampled" and not spec.compares:
            raise ValueError(
                f'loss.kind = "{self.loss.kind}" takes every token for one of the student, without importance weights: '
                'write "forward_kl", "reverse_kl" or "jsd", or "reverse_kl_mc" with importance'
            )
        if mix.source == "data" and spec.compares:
            raise ValueError(
                f'{where} has tokens whose behaviour log-prob is unknown, and loss.kind = "{self.loss.kind}" divides '
                'by it: write "forward_kl", "reverse_kl" or "jsd"'
            )
        if mix.source == "file" and spec.draws > 1:
            raise ValueError(
                f"loss.m = {spec.draws}: {where} knows the emitted token and no other draws: write loss.m = 1"
            )
        if mix.source == "data" and self.sampler.group > 1:
            raise ValueError(f"{where} has one answer for each prompt: write sampler.group = 1")

    def _check_objective(self) -> None:
        if self.loss.weight and not self.teachers:
            raise ValueError("distillation needs a teacher: add [teachers.main], or write loss.weight = 0")
        if self.teachers and not any(teacher.weight for teacher in self.teachers.values()):
            names = " and ".join(f"teachers.{name}.weight" for name in self.teachers)
            raise ValueError(
                f"{names} = 0 leaves nothing to distil: raise one, or drop [teachers] and write loss.weight = 0"
            )
        if not self.loss.weight and self.teachers and not (self.all_supervised and self._sft_asks_teachers):
            raise ValueError("loss.weight = 0 leaves the teacher nothing to do: drop [teachers], or the weight")
        for problem in problems(self.teachers, self.loss):
            raise ValueError(problem)
        for name, teacher in self.teachers.items():
            self._check_teacher(f"teachers.{name}", teacher)
        if not self.loss.weight and self.policy is None and not self.all_supervised:
            raise ValueError("loss.weight = 0 leaves nothing to learn from: add [policy] for a loss on task rewards")
        if self.policy is not None and not self.task.reward:
            raise ValueError('[policy] learns from rewards: set task.reward, for example "exact"')
        if self.data.order == "adaptive" and self.data.adapt == "reward" and not self.task.reward:
            raise ValueError('data.order = "adaptive" learns from rewards: set task.reward, or data.adapt = "kl"')
        if self.data.order == "adaptive" and self.data.adapt == "kl" and not self.teachers:
            raise ValueError(
                'data.adapt = "kl" compares with a teacher, and there is none: write data.adapt = "reward"'
            )
        self._check_freshness()
        self._check_reference()
        if self.policy is not None:
            self._check_rewards(self.policy)

    def _check_teacher(self, where: str, teacher: TeacherConfig) -> None:
        by_rewards = [field for field in teacher.shows if field != "last"]
        if by_rewards and not teacher.own_context and not self.task.reward:
            raise ValueError(
                f'{where}.context shows {{{by_rewards[0]}}}, which rewards decide: set task.reward, for example "exact"'
            )
        if teacher.follow is not None and teacher.context is None and self.policy is None:
            raise ValueError(
                f"{where} sees what the student sees and follows it: there is nothing to learn from; add a context, or "
                "[policy], whose loss this teacher then regularises"
            )
        if teacher.follow is not None and teacher.follow.ema is not None and self.learner.dtype == "bfloat16":
            raise ValueError(
                f"{where}.follow.ema is kept in learner.dtype, and bfloat16 rounds small changes to 0: write "
                'learner.compute_dtype = "bfloat16" instead'
            )

    def _check_reference(self) -> None:
        reference, samples = self.reference, self.learner.batch_size
        if reference is None:
            return
        if reference.into == "reward" and self.policy is None:
            raise ValueError('reference.into = "reward" needs [policy], whose rewards it changes: write "loss"')
        if reference.horizon is not None and reference.horizon <= samples / 5:
            raise ValueError(
                f"reference.horizon = {reference.horizon:g} is not above a fifth of learner.batch_size = {samples}, "
                f"and β could become 0 in one update: write the samples of several updates, for example {10 * samples}"
            )

    def _check_rewards(self, policy: PolicyConfig) -> None:
        names, weights = self.task.names, policy.reward_weights
        if policy.old == "average" and self.learner.dtype == "bfloat16":
            raise ValueError(
                'policy.old = "average" is kept in learner.dtype, and bfloat16 rounds small changes to 0: write '
                'learner.compute_dtype = "bfloat16" instead'
            )
        for name in policy.filters:
            if self.loss.weight:
                raise ValueError(
                    f"policy.{name} drops groups whose rewards are alike, and distillation learns from these, too: "
                    f"write loss.weight = 0, or drop policy.{name}"
                )
            if self.reference is not None and self.reference.into == "reward":
                raise ValueError(
                    f'policy.{name} drops groups whose rewards are alike, and reference.into = "reward" makes them '
                    f'differ: write reference.into = "loss", or drop policy.{name}'
                )
        if policy.refill is not None and not self.most_refilled:
            raise ValueError(
                f"policy.refill = {policy.refill:g} allows no further group beside the {self.groups_per_update} of "
                f"an update: write {1 + 1 / self.groups_per_update:.4g} or more, or drop it"
            )
        if policy.advantage == "gdpo" and len(names) == 1:
            raise ValueError(
                'policy.advantage = "gdpo" normalises each of several rewards by itself, and task.reward is '
                f'{names[0]!r} alone: name another, or write policy.advantage = "grpo"'
            )
        if policy.advantage == "gdpo" and self.reference is not None and self.reference.into == "reward":
            raise ValueError(
                'policy.advantage = "gdpo" uses task.reward\'s rewards alone, so reference.into = "reward" would '
                'have no effect: write reference.into = "loss"'
            )
        if weights and len(names) == 1:
            raise ValueError(
                "policy.reward_weights weighs several rewards against each other, and task.reward is "
                f"{names[0]!r} alone: drop it, or write policy.weight"
            )
        for name in weights:
            if name not in names:
                raise ValueError(f"policy.reward_weights: there is no reward {name!r}; {did_you_mean(name, names)}")
        if weights and not any(weights.get(name, 1.0) for name in names):
            raise ValueError("policy.reward_weights gives every reward weight 0, and nothing is left to learn from")

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
                "learner.snapshots = 0 keeps none: drop learner.snapshots, and as many are kept as needed"
            )
        if fresh.m is not None and self.loss.weight and self.loss.spec.cache == "sampled":
            raise ValueError(
                f'freshness.m does nothing: loss.kind = "{self.loss.kind}" has draws of its own, by which drift is '
                "estimated; drop it, or raise loss.m"
            )
        if fresh.m is not None and fresh.drift == "snapshots" and not fresh.anchor:
            raise ValueError('freshness.m does nothing: drift = "snapshots" is exact, and anchor = 0: drop it')

    def _check_environment(self) -> None:
        environment, limit = self.environment, self.sampler.max_tokens
        if environment is None:
            if "environment" in self.task.reward:
                raise ValueError('task.reward = "environment" is the reward of an environment: add [environment]')
            return
        if environment.gateway is not None and environment.gateway.listen is not None and self.sampler.replicas != 1:
            raise ValueError("environment.gateway.listen is one port, of one sampler: drop sampler.replicas")
        if environment.turn_tokens is not None and environment.turn_tokens >= limit:
            raise ValueError(
                f"environment.turn_tokens = {environment.turn_tokens} does nothing: sampler.max_tokens = {limit} "
                "is for a whole episode; write less, or drop it"
            )

    def _check_server(self) -> None:
        sampler, server = self.sampler, self.sampler.server
        if sampler.engine != "server":
            return
        if server is None:
            raise ValueError(
                'sampler.engine = "server" needs [sampler.server]: write url = "http://HOST:PORT" and folder = '
                '"/SHARED/DIRECTORY"'
            )
        if sampler.replicas != 1:
            raise ValueError(
                "sampler.replicas: one sampler serves a whole server: drop it, and start the server with data "
                "parallelism (vLLM: --data-parallel-size, SGLang: --dp-size)"
            )
        if sampler.truncation and server.api == "sglang":
            raise ValueError(
                f"sampler.{sampler.truncation[0]}: SGLang gives log-probs before truncation: drop it, or write "
                'sampler.server.api = "vllm"'
            )

    def _check_clock(self) -> None:
        if self.runtime.clock == "real":
            return
        if self.sampler.speculation is not None:
            raise ValueError('runtime.clock = "modelled" has no cost for sampler.speculation: drop one of them')
        engines = {"sampler": self.sampler.engine} | {f"teachers.{n}": t.engine for n, t in self.teachers.items()}
        for where, engine in engines.items():
            if not ENGINES[engine].keeps_modelled_time:
                raise ValueError(
                    f'{where} runs in real time: with runtime.clock = "modelled" write engine = "native" without '
                    "base_url"
                )
        if self.task.model is not None or self.task.judge is not None:
            raise ValueError(
                'the rewards "model" and "judge" take real time: write runtime.clock = "real", or another task.reward'
            )
        if self.environment is not None and self.environment.gateway is not None:
            raise ValueError(
                'agents on environment.gateway run in real time: write runtime.clock = "real", or drop the gateway'
            )

    def _check_turns(self) -> None:
        """Raise ValueError if engines cannot take turns on one device."""
        if not self.runtime.turns:
            return
        if self.runtime.kind != "inline":
            raise ValueError('runtime.turns is for one device in one process: write runtime.kind = "inline"')
        if self.runtime.clock == "modelled":
            raise ValueError('runtime.clock = "modelled" has no cost for runtime.turns: drop one of them')
        if not self.schedule.serial:
            raise ValueError(
                f'runtime.turns lets one engine work at a time, and the stages of schedule.kind = "'
                f'{self.schedule.kinds()[0]}" overlap: write schedule.kind = "sync"'
            )
        teachers = {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        workers: dict[str, SamplerConfig | TeacherConfig] = {"sampler": self.sampler, **teachers}
        for where, each in workers.items():
            if getattr(each, "base_url", None) is not None:
                raise ValueError(f"runtime.turns cannot move {where}, which is an endpoint: drop one of them")
            if each.engine != "native":
                raise ValueError(
                    f'runtime.turns cannot move {where}.engine = "{each.engine}": write "native", or drop runtime.turns'
                )
            for option in ("replicas", "devices"):
                if getattr(each, option, 1) != 1:
                    raise ValueError(f"runtime.turns has one device and one worker of each kind: drop {where}.{option}")

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
        wide, narrow = learner.dtype, learner.compute_dtype
        if narrow not in (None, wide) and not (wide == "float32" and narrow in HALVES):
            raise ValueError(
                f'learner.compute_dtype = "{narrow}" does nothing over weights in {wide}: autocast makes products of '
                f'float32 weights in bfloat16 or float16, and no others; drop it, or write learner.dtype = "{narrow}"'
            )
        for name in ("dtype", "optimizer_dtype"):
            if getattr(learner, name) == "float16":
                raise ValueError(
                    f'learner.{name} = "float16" would round small steps and squares of gradients to 0: write '
                    f'"float32", and learner.compute_dtype = "float16"'
                )
        if learner.shared_prompt and not learner.packing:
            raise ValueError("learner.shared_prompt is a way of packing: write packing = true, or drop it")
        if learner.shared_prompt and self.sampler.group == 1:
            raise ValueError("learner.shared_prompt has nothing to share with sampler.group = 1: drop it")
        distils = self.loss.weight > 0 and getattr(self.loss, "as_", "loss") != "reward"
        if learner.perturbation is not None and (distils or self.sft is not None):
            raise ValueError(
                '[learner.perturbation] is for policy losses: write loss.weight = 0 or loss.as = "reward", and no [sft]'
            )
        if learner.perturbation is not None and learner.ranks > 1:
            raise ValueError("[learner.perturbation] needs learner.ranks = 1: drop it")
        if learner.ranks > 1 and self.runtime.kind == "inline":
            raise ValueError('learner.ranks needs a process for each: write runtime.kind = "local"')

    @property
    def rounding(self) -> Rounding:
        """Return the coarsest number format of samplers and learner."""
        formats = {self.learner.dtype, self.learner.compute_dtype, self.sampler.dtype}
        coarse = None if self.learner.quantised else self.sampler.quantisation
        return coarse or ("exact" if HALVES.isdisjoint(formats) else "half")

    @property
    def devices(self) -> int:
        """Return the number of devices of all workers at the start of the run."""
        scorers = [at_first(each.replicas) * each.devices_each for each in self.teachers.values()]
        samplers = at_first(self.sampler.replicas) * devices_of(self.sampler.engine_args)
        return samplers + sum(scorers) + self.learner.ranks

    @property
    def sampler_features(self) -> set[str]:
        """Return names of the features that samplers of this config need from their engine, in addition to sampling."""
        names = ("engine_args", "keep_mask", "on_publish", "server", "interleave", "quantisation", "speculation")
        changed, learner = self.sampler.changed(*names), self.learner
        return {*changed, *["lora"] * (learner.lora is not None), *["router"] * learner.records_router}

    @field_validator("output")
    @classmethod
    def _check_output(cls, output: str | None) -> str | None:
        if output is not None and (output.startswith("~") or not output.isprintable()):
            raise ValueError(f"{output!r} is no plain path: write it in full, without ~ and control characters")
        return output

    def _check_guards(self) -> None:
        guards, tau = self.guards, self.schedule.max_tau
        if guards.kl is not None and self.schedule.adapts_tau:
            raise ValueError('[guards.kl] lowers schedule.tau, and so does tau = "auto": drop one of them')
        if guards.kl is not None and tau < 1:
            raise ValueError(
                '[guards.kl] lowers schedule.tau by one and more: write schedule.kind = "async" with tau = 1 or more, '
                "or drop it"
            )
        if guards.gac is not None and not tau:
            use = "guards.gac.limit takes out what stale samples repeat of the previous update"
            if guards.gac.limit is None:
                use = "[guards.gac] compares fresh samples with stale ones"
            raise ValueError(
                f"{use}, and here all of an update are of one age: write "
                'schedule.kind = "async" with a tau above 0, or drop it'
            )

    def model_of(self, teacher: TeacherConfig) -> str:
        return self.student if teacher.model == SELF else teacher.model

    @property
    def has_agents(self) -> bool:
        """Return whether external agents (programs behind a gateway) sample from the student."""
        return self.environment is not None and self.environment.gateway is not None

    @property
    def most_workers(self) -> dict[str, int]:
        """Return the largest number of workers for each kind of worker that has replicas = "auto"."""
        sampler = {"sampler": self.sampler.replicas_max} if self.sampler.replicas == "auto" else {}
        teachers = {name: teacher for name, teacher in self.teachers.items() if teacher.replicas == "auto"}
        return sampler | {f"teacher.{name}": teacher.replicas_max for name, teacher in teachers.items()}

    @property
    def groups_per_update(self) -> int:
        return self.learner.batch_size // self.sampler.group

    @property
    def most_refilled(self) -> int:
        """Return the largest number of groups that further prompts may replace for an update (policy.refill)."""
        refill = self.policy.refill if self.policy is not None else None
        return 0 if refill is None else int((refill - 1) * self.groups_per_update + 1e-9)
