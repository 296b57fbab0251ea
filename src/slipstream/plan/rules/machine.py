"""Rules between the config and this machine: packages, devices, processes, memory of samples in flight."""

from collections.abc import Mapping

from slipstream.config.base import at_first
from slipstream.config.costs import load as load_costs
from slipstream.config.integrations import fault_of
from slipstream.config.schema import Config
from slipstream.config.sections import most_replicas
from slipstream.engines.vllm.core import check_installed
from slipstream.errors import ConfigError
from slipstream.pipeline.schedules import schedule_of
from slipstream.plan.facts import Facts
from slipstream.plan.placement import size
from slipstream.run_dir.trackers import check_trackers

SAMPLE = 1 << 10
"""Minimum memory in bytes of a sample in flight (submitted, but not learned from yet)."""
PROCESS, OPEN_FILES, PER_CPU = 50 << 20, 4, 32
"""Minimum bytes of a process; open files per engine process; maximum engines (or threads of an engine) per CPU."""
INSTALL_CHECKS = {"vllm": check_installed}
"""Functions that raise ConfigError if an engine's package is not installed, by engine."""


def check_packages(config: Config, facts: Facts) -> None:
    """Raise ConfigError if a package that the config needs is not installed."""
    check_trackers(config.log.to)
    if config.runtime.kind == "ray" and not facts.has("ray"):
        raise ConfigError("runtime.kind = 'ray' needs Ray: pip install 'slipstream[ray]'")
    for where, each in config.workers.items():
        if check := INSTALL_CHECKS.get(each.engine):
            check(facts.name_of(f"{where}.engine"))
    if (config.learner.lora is not None or facts.student.is_adapter) and not facts.has("peft"):
        raise ConfigError("learner.lora needs peft: pip install 'slipstream[lora]'")
    for use in [each.integration for each in config.every_environment.values()]:
        if use is not None and (fault := fault_of(use)):
            raise ConfigError(f"environment.use = {use!r} {fault}")
    if config.eval.suite is not None and not facts.has("lm_eval"):
        raise ConfigError("eval.suite needs lm-evaluation-harness: pip install 'slipstream[suite]'")
    if config.has_agents and not facts.has("uvicorn"):
        raise ConfigError("environment.gateway needs uvicorn: pip install 'slipstream[gateway]'")


def check_runtime(config: Config, facts: Facts) -> None:
    runtime, device = config.runtime, config.runtime.device
    if runtime.clock == "modelled":
        load_costs(runtime.costs)
    if runtime.kind != "inline" and device.startswith("cuda") and device != "cuda":
        raise ConfigError(f"runtime.device = {device!r}: each engine gets a GPU of its own; write 'cuda'")


def check_device(config: Config, facts: Facts) -> None:
    """Check that the device exists on this machine; on a cluster, the engines check their own devices."""
    if facts.gpus is not None:
        return
    if config.runtime.address is None and config.runtime.device not in ("auto", "cpu"):
        from slipstream.engines.native.model import pick_device

        pick_device(config.runtime.device, facts.name_of("runtime.device"))
    if config.runtime.kind == "inline" and not on_cpu(config, facts):
        first = int(config.runtime.device.partition(":")[2] or 0)
        for name, teacher in config.teachers.items():
            if first + teacher.devices > facts.gpus_here:
                raise ConfigError(
                    f"teachers.{name}.devices = {teacher.devices}: this machine has {facts.gpus_here} GPUs, and "
                    f"runtime.device begins at number {first}: lower it"
                )


def on_cpu(config: Config, facts: Facts) -> bool:
    if config.runtime.device != "auto" or config.runtime.address is not None:
        return config.runtime.device == "cpu"
    return facts.gpus_here == 0


def check_processes(config: Config, facts: Facts) -> None:
    """Raise ConfigError if engines on this machine need more processes, threads or open files than allowed."""
    runtime, samplers = config.runtime, most_replicas(config.sampler)
    if runtime.address is not None:
        return
    engines = samplers + config.learner.ranks + sum(map(most_replicas, config.teachers.values()))
    if "teacher" in config.offpolicy_sources:
        engines += sum(at_first(teacher.replicas) for teacher in config.teachers.values())
    threads, room = max(runtime.threads, config.learner.threads or 1), PER_CPU * facts.cpus
    for number, what, setting in (
        (engines, "engines", "sampler.replicas or those of a teacher"),
        (threads, "threads of an engine", "runtime.threads or learner.threads"),
    ):
        if number > room:
            raise ConfigError(f"{number} {what} are more than {room} ({PER_CPU} for each CPU here): lower {setting}")
    if runtime.kind == "inline":
        return
    graders = runtime.graders if config.task.reward else 0
    environments = sum(each.processes for each in config.every_environment.values())
    beside = samplers * (graders + environments)
    needed = (engines + beside) * PROCESS
    if needed > facts.memory:
        raise ConfigError(
            f"{engines} engines and {beside} processes beside them need {size(needed)} without their models, this "
            f"machine has {size(facts.memory)}: lower sampler.replicas or those of a teacher"
        )
    if runtime.kind == "local" and facts.open_files is not None and engines * OPEN_FILES > facts.open_files:
        raise ConfigError(
            f"{engines} engines need {engines * OPEN_FILES} open files, the limit is {facts.open_files} (ulimit -Hn): "
            "lower sampler.replicas or those of a teacher"
        )


def check_sizes(config: Config, sizes: Mapping[str, int]) -> None:
    """Run `check_processes` with the numbers of workers in `sizes`, by kind (`sampler`, `teacher.NAME`)."""
    sizes = {kind: number for kind, number in sizes.items() if kind not in config.most_workers}
    replicas = {kind: {"replicas": number} for kind, number in sizes.items()}
    teachers = {name: replicas.get(f"teacher.{name}", {}) for name in config.teachers}
    check_processes(config.with_values(teachers, sampler=replicas.get("sampler", {})), Facts(config))


def check_in_flight(config: Config, facts: Facts) -> None:
    """Raise ConfigError if the samples that the schedule allows in flight cannot fit into memory, even if tiny."""
    schedule = schedule_of(config.schedule, config.groups_per_update, config.reuse)
    samples = schedule.held * config.sampler.group
    if samples * SAMPLE > facts.memory:
        raise ConfigError(
            f"learner.batch_size = {config.learner.batch_size} and the schedule have {samples} samples in flight, "
            f"which need at least {size(samples * SAMPLE)}; this machine has {size(facts.memory)}: lower it"
        )
    needed = 2 * schedule.held  # for records in shared memory, and for those that replace them
    if config.runtime.kind == "local" and facts.open_files is not None and needed > facts.open_files:
        raise ConfigError(
            f"learner.batch_size = {config.learner.batch_size} and the schedule have {schedule.held} groups in "
            f"flight, which need {needed} open files; the limit is {facts.open_files} (ulimit -Hn): lower it"
        )
