"""Sections `[eval]`, `[checkpoint]`, `[health]`, `[log]` and `[runtime]`: everything beside the method and the data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from slipstream.config.base import GREEDY, THREADS, LocalAddress, Section, as_tuple

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
BySet = Annotated[dict[str, Annotated[int, Field(ge=1)]], Field(min_length=1)]
"""A number for each held-out set, by the set's name."""


class SuiteConfig(Section):
    """Tasks of lm-evaluation-harness, which score checkpoints while a run goes on."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1)]
    """Names of tasks, as in `slipstream eval --suite`."""
    every: int = Field(ge=1)
    """Number of updates from one scored checkpoint to the next; the last checkpoint is always scored, too."""
    path: str | None = Field(None, min_length=1)
    """Directory with more tasks. None uses those of lm-evaluation-harness alone."""
    limit: int | None = Field(None, ge=1)
    """Number of prompts of each task to use. None uses all."""
    device: str = "auto"
    """Device that scores, which has room for one more copy of the student: auto, cpu, cuda or cuda:N."""
    seconds: float = Field(86400.0, gt=0)
    """Time limit in seconds for scoring one checkpoint. A checkpoint that takes longer gets no scores."""


class EvalConfig(Section):
    every: Annotated[int, Field(ge=0)] | BySet = 0
    """Number of updates between two evaluations: one number, or one for each held-out set by name, as in
    { math = 10, code = 50 }. The student is also evaluated at the start and at the end. 0 never evaluates;
    `prompts`, `n` and `temperature` are then those of `slipstream eval` alone. With task.reward it measures accuracy,
    without it the reverse KL to the teacher."""
    prompts: Annotated[int, Field(ge=1)] | BySet = 200
    """Number of held-out prompts of each set; one number, or one for each set by name."""
    n: Annotated[int, Field(ge=1)] | BySet = 1
    """Number of samples for each prompt; one number, or one for each set by name. Accuracy is the mean over them
    (avg@n)."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Sampling temperature of evaluation; 0 is greedy."""
    suite: SuiteConfig | None = None
    """Tasks of lm-evaluation-harness that score checkpoints; they need neither `every` nor data.eval. None has none."""

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
    """Largest share of a teacher's responses that may be unusable. The same limit holds for the share of rechecked
    groups whose two scores differ."""
    canary: int = Field(5, ge=0)
    """Number of updates between two canary checks: all teachers and samplers process fixed inputs again, and the
    results are compared with those of the start (docs/trust.md). 0 makes no checks."""
    grad_norm: float = Field(100.0, gt=1)
    """Limit of the gradient norm, as a multiple of its median over `window` updates. A norm that occurred `updates`
    times in them and in the run's first updates is never too large."""
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
    listen: LocalAddress | None = None
    """Address at which a run serves its latest metrics for Prometheus, as http://ADDRESS/metrics, such as
    "127.0.0.1:9464". None serves none."""
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
    time_share: bool = False
    """Let engines take turns on the same devices. Weights and optimizer state of engines that wait are in host memory.
    kind = "inline": sampler, teachers and learner on one device, native engines only. kind = "local": all samplers, and
    all ranks of the learner, on the same devices; vLLM then sleeps; teachers have their own devices. Needs
    schedule.kind = "sync" or "replay". Experimental: tried on CPUs only."""
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
