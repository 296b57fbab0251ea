"""All sections of the configuration, and what follows from several of them; `schema.py` adds the rules between them.

The string under each field is the help text that `slipstream config` prints. A section whose settings depend on its
`kind` (`loss`, `schedule`) is a union of sections.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import Field, ValidationInfo, field_validator

from slipstream.config.base import HALVES, Rounding, Section, at_first
from slipstream.config.data import DataConfig
from slipstream.config.engines import devices_of
from slipstream.config.environment import EnvironmentConfig
from slipstream.config.freshness import FreshnessConfig
from slipstream.config.guards import GuardsConfig
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import LossConfig, ReverseKLMC
from slipstream.config.objective import CorrectionConfig, CriticConfig, PolicyConfig, ReferenceConfig
from slipstream.config.offpolicy import MixConfig, SupervisedConfig
from slipstream.config.rewards import TaskConfig
from slipstream.config.running import CheckpointConfig, EvalConfig, HealthConfig, LogConfig, RuntimeConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schedule import Async, ReuseConfig, ScheduleConfig
from slipstream.config.teacher import SELF, TeacherConfig

Clashes = Iterator[str]
"""Messages that name settings which do not fit together, and what to write instead."""


def most_replicas(workers: SamplerConfig | TeacherConfig) -> int:
    return workers.replicas_max if workers.replicas == "auto" else workers.replicas


class Sections(Section):
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
    environments: dict[str, EnvironmentConfig] = Field({})
    """Several environments, each under a name of your choice, instead of `environment`. A row uses the one that its
    column `environment` names, or else the one with the name of its source in data.train or data.eval. Empty: one
    environment or none."""
    sft: SupervisedConfig | None = None
    mix: MixConfig | None = None
    loss: LossConfig = ReverseKLMC()
    policy: PolicyConfig | None = None
    critic: CriticConfig | None = None
    correction: CorrectionConfig = CorrectionConfig()
    reference: ReferenceConfig | None = None
    freshness: FreshnessConfig | None = None
    learner: LearnerConfig = LearnerConfig()
    task: TaskConfig = TaskConfig()
    schedule: ScheduleConfig = Async()
    reuse: ReuseConfig | None = None
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    health: HealthConfig = HealthConfig()
    guards: GuardsConfig = GuardsConfig()
    log: LogConfig = LogConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @field_validator("teachers", "environments")
    @classmethod
    def _check_names(cls, sections: dict[str, Section], info: ValidationInfo) -> dict[str, Section]:
        for name in sections:
            if not name.isidentifier():
                raise ValueError(f"the name {name!r} must be a plain word, as in [{info.field_name}.main]")
        return sections

    @field_validator("output")
    @classmethod
    def _check_output(cls, output: str | None) -> str | None:
        if output is not None and (output.startswith("~") or not output.isprintable()):
            raise ValueError(f"{output!r} is no plain path: write it in full, without ~ and control characters")
        return output

    def with_values(self, teachers: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any) -> Self:
        """Return a copy with other values, without the rules. A mapping changes single settings of a section.

        `teachers`: changes of teachers by name.
        """
        for name, value in changes.items():
            if isinstance(value, Mapping):
                changes[name] = getattr(self, name).model_copy(update=dict(value))
        if teachers:
            changed = {name: self.teachers[name].model_copy(update=dict(values)) for name, values in teachers.items()}
            changes["teachers"] = {**self.teachers, **changed}
        return self.model_copy(update=changes)

    @property
    def supervised_updates(self) -> int:
        return self.sft.updates if self.sft is not None else 0

    @property
    def all_supervised(self) -> bool:
        """Return whether the run has supervised updates alone."""
        return self.supervised_updates == self.updates

    @property
    def sft_asks_teachers(self) -> bool:
        return self.sft is not None and (self.sft.source == "teacher" or self.sft.loss.spec.cache != "none")

    @property
    def offpolicy_sources(self) -> set[str]:
        """Return the origins of the responses that the student does not draw: data, teacher, file."""
        return {section.source for section in (self.sft, self.mix) if section is not None}

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
        names = (
            "engine_args",
            "keep_mask",
            "on_publish",
            "server",
            "teacher_replaces",
            "fusion",
            "quantisation",
            "speculation",
        )
        changed, learner = self.sampler.changed(*names), self.learner
        return {*changed, *["lora"] * (learner.lora is not None), *["router"] * learner.records_router}

    def model_of(self, teacher: TeacherConfig) -> str:
        return self.student if teacher.model == SELF else teacher.model

    @property
    def every_environment(self) -> dict[str, EnvironmentConfig]:
        """Return every environment by its name, which is "" for the one in [environment]."""
        return self.environments if self.environment is None else {"": self.environment}

    @property
    def has_agents(self) -> bool:
        """Return whether external agents (programs behind a gateway) sample from the student."""
        return any(each.gateway is not None for each in self.every_environment.values())

    @property
    def workers(self) -> dict[str, SamplerConfig | TeacherConfig]:
        """Return the sections of all engines that sample or score, by their names in the config."""
        teachers = {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}
        return {"sampler": self.sampler, **teachers}

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
    def uses(self) -> int:
        """Return the largest number of updates that learn from a group."""
        return self.reuse.times if self.reuse is not None else 1

    @property
    def new_groups(self) -> int:
        """Return the number of groups of an update that no update has learned from before."""
        return self.groups_per_update // self.uses

    @property
    def most_refilled(self) -> int:
        """Return the largest number of groups that further prompts may replace for an update (policy.refill)."""
        refill = self.policy.refill if self.policy is not None else None
        return 0 if refill is None else int((refill - 1) * self.new_groups + 1e-9)
