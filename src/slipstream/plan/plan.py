"""Planning of a run: turn a config into a plan, or raise an error whose message states what to write instead."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from slipstream.config.base import at_first
from slipstream.config.costs import load as load_costs
from slipstream.config.engines import ENGINES
from slipstream.config.losses import DistillationLoss
from slipstream.config.schema import Config, DataConfig, LoraConfig, RuntimeConfig, most_replicas
from slipstream.data.given import Limits, answers_of, read_trajectories
from slipstream.data.offpolicy import OffPolicy
from slipstream.data.order import Epochs, Mixture, shares_of
from slipstream.data.prompts import Prompts, Row, check_columns_used, check_there, check_where, load_rows
from slipstream.data.selection import WORDS, difficulties, fitting, overlap_of, without_copies
from slipstream.data.sources import has_splits
from slipstream.data.teacher_context import check_function
from slipstream.data.tokenizers import Tokenizer, check_fits, check_ids, encode_rows, load_tokenizer, stop_ids
from slipstream.engines.native.config import check_there as check_model
from slipstream.engines.native.config import (
    experts_of,
    generation_of,
    load_config,
    position_note,
    vocabulary_of,
)
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.engines.vllm import VERSION
from slipstream.engines.vllm.core import check_installed
from slipstream.errors import ConfigError, DataError, ModelError
from slipstream.models.adapters import is_adapter
from slipstream.models.resolve import model_path, without_weights
from slipstream.objective.method import Method, method_of, quantisation_notes, schedule_notes, whole_batch_reason
from slipstream.pipeline.control import canary
from slipstream.pipeline.schedules import schedule_of
from slipstream.plan.adapters import adapted, check_adapters, lora_of_student
from slipstream.plan.ends import EndProbe, template_end
from slipstream.plan.engines import (
    EnginesPlan,
    check_reward_model,
    endpoint_of,
    engines_of,
    environment_of,
    reward_settings,
)
from slipstream.plan.environment import Tools, tools_of
from slipstream.plan.evaluation import eval_prompts, graded_rows, reward_warnings
from slipstream.plan.gpus import Gpus
from slipstream.plan.known_texts import KnownTexts, TextMaker
from slipstream.plan.placement import Need, check_room, host_memory, needs, size
from slipstream.plan.precision import precision_advice
from slipstream.plan.shapes import ShapeCheck, check_heads, check_selection, check_split_heads, shape_line
from slipstream.plan.teachers import (
    check_budget,
    check_endpoints,
    check_judge,
    check_teachers,
    possible_lengths,
    routes,
    sources_of,
)
from slipstream.plan.templates import TemplateProbe
from slipstream.plan.versions import installed_versions, version_warnings
from slipstream.plan.vllm import (
    check_folder,
    check_server,
    sampler_context,
    teacher_context,
    with_server,
    with_vllm,
)
from slipstream.processes import RARE, garbage_collection
from slipstream.protocols import Sampling
from slipstream.records import Given, Ints, Prompt
from slipstream.rewards import grading
from slipstream.rewards.functions import APART, is_own
from slipstream.run_dir.writing import check_trackers
from slipstream.sandbox.cgroups import in_force, writable

LEAKED = 0.01
"""Share of held-out prompts in the training data above which their number is a warning; below, it is a note."""
TOO_FAST = 0.1
"""Smallest learning rate that causes a warning, because training of any model would diverge."""
SAMPLE = 1 << 10
"""Minimum memory in bytes of a sample in flight (submitted, but not learned from yet)."""
PROCESS, OPEN_FILES, PER_CPU = 50 << 20, 4, 32
"""Minimum bytes of a process; open files per engine process; maximum engines (or threads of an engine) per CPU."""


@dataclass(frozen=True)
class Plan:
    """All decisions about a run before its start, after the files that its config names were read and checked."""

    config: Config
    """The config, completed with values that depend on files and on installed engines."""
    method: Method
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    prompts: Prompts
    held_out: Mapping[str, Sequence[Prompt]]
    """Held-out prompts, by the name of their set; empty if the run does not evaluate."""
    engines: EnginesPlan
    sampling: Sampling
    notes: tuple[str, ...]
    """Lines to print about decisions that the config leaves open."""
    warnings: tuple[str, ...]
    ends: Mapping[str, EndProbe]
    """Tests of end tokens in the start checks, by teacher; teachers that need no test are absent."""
    templates: Mapping[str, TemplateProbe]
    """Tests of chat templates in the start checks, by teacher; teachers that need no test are absent."""
    known: Mapping[str, KnownTexts] = field(default_factory=dict)
    """Texts that teachers score in the start checks, by teacher; empty in a plan without start checks."""

    @property
    def needs(self) -> list[Need]:
        return needs(self.engines)

    @property
    def whole_batches(self) -> bool:
        """Return whether a periodic schedule learns only when all groups of an update are scored."""
        return bool(whole_batch_reason(self.config, self.method))


@garbage_collection(*RARE)
def plan(config: Config, *, ask: bool = True, gpus: Gpus | None = None) -> Plan:
    """Make the plan of a run; raise an error if the config is invalid or does not fit its files.

    `ask`: send small requests to endpoints, to test that they can serve the run. `gpus`: GPUs of the run on other
    machines; None: the run is for this machine.
    """
    if gpus is not None:
        config = config.model_copy(update={"runtime": on_gpus(config.runtime)})
    fast_checks(config)
    notes: list[str] = []
    lora = lora_of_student(config.student, config.learner.lora, notes.append)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})
    if gpus is None:
        check_device(config)
    config = with_server(with_vllm(config, notes.append), notes.append)
    method = method_of(config)
    tokenizer = load_tokenizer(config.student)
    check_weights(config)
    check_base_precision(config)
    stops = end_ids(config.student, tokenizer, config.sampler.stop)
    tools = tools_of(environment_of(config), tokenizer, stops, notes.append)
    prompts = training_prompts(config, tokenizer, tools, notes.append)
    prompts.use(off_policy(config, prompts, tokenizer, notes.append))
    check_adapters(config.student, config.learner.lora, models_here(config))
    check_effects(config)
    teachers = check_teachers(config, tokenizer, prompts, tools)
    leaks = list[str]()
    held_out = held_out_prompts(config, tokenizer, tools, prompts, notes, leaks) if config.eval.every else {}
    sequences = chain(prompts.tokens, (each.tokens for of_set in held_out.values() for each in of_set))
    longest = max(map(len, sequences))
    config = with_lengths(config, longest + config.sampler.max_tokens, teachers.longest)
    if ask:
        check_endpoints(config, tokenizer, prompts, notes.append)
        check_judge(config, notes.append)
        check_server(config, longest + config.sampler.max_tokens, prompts.tokens[0], notes.append)
    notes += [*model_notes(config), *clip_notes(config), *freshness_notes(config)]
    notes += [*off_policy_notes(config), *running_notes(config), *quantisation_notes(config, method)]
    notes += schedule_notes(config, method)
    slow = list[str]()
    if on_cpu(config) and config.runtime.address is None:
        advised, slow = precision_advice(config.student, formats_of(config))
        notes += advised
    engines = engines_of(config, method, teachers.one_ends)
    warnings = [
        *warnings_of(config),
        *slow,
        *beyond_embeddings(config, tokenizer),
        *version_warnings(installed_versions()),
    ]
    warnings += check_room_on(engines, gpus)
    if config.environment is None:  # in an environment, rows with equal prompts may still differ
        warnings += [*copy_warnings(prompts), *leaks]
        compares = [each for each in config.task.reward if each == "math" or is_own(each)]
        if compares and config.task.sandbox is None:
            warnings += reward_warnings(prompts.rows, compares, config.task.timeout)
    return Plan(
        config=config,
        method=method,
        tokenizer=tokenizer,
        end_ids=tuple(sorted(stops)),
        prompts=prompts,
        held_out=held_out,
        engines=engines,
        sampling=rollout_sampling(config),
        notes=tuple(notes),
        warnings=tuple(warnings),
        ends=teachers.probes,
        templates=teachers.templates,
    )


def plan_with_texts(config: Config) -> Plan:
    """Make the plan of a run with start checks; it holds the known texts of every teacher."""
    return with_known_texts(plan(config))


def with_known_texts(made: Plan) -> Plan:
    several, found = len(made.config.teachers) > 1, dict[str, KnownTexts]()
    for name, settings in made.config.teachers.items():
        prompts = canary.prompts_of(made.prompts, name if several else None, canary.TEXTS)
        maker = TextMaker(settings, made.engines.scorers[name], prompts, made.tokenizer, made.end_ids, made.sampling)
        found[name] = maker.make()
    return replace(made, known=found)


def check_shapes(config: Config, gpus: Gpus | None = None) -> ShapeCheck:
    """Check the rules that need no more of the models than their config.json; raise the error of the first broken rule.

    `gpus`: devices of the run, whose memory is compared with its needs. None: nothing is compared.
    """
    notes = list[str]()
    config = with_shapes(config)
    if gpus is not None:
        config = config.model_copy(update={"runtime": on_gpus(config.runtime)})
    check_data_settings(config)
    check_adapter_engines(config)
    check_models(config)
    lora = lora_of_student(config.student, config.learner.lora, notes.append)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})
    config = with_server(with_vllm(config, notes.append, planned=VERSION), notes.append)
    method, models = method_of(config), models_here(config)
    for model in models:
        check_heads(model)
    check_adapters(config.student, config.learner.lora, models)
    check_effects(config)
    config = with_lengths(config, *possible_lengths(config, notes.append))
    notes += [*model_notes(config), *clip_notes(config), *freshness_notes(config), *off_policy_notes(config)]
    notes += [*quantisation_notes(config, method), *schedule_notes(config, method)]
    engines, warnings = engines_of(config, method), warnings_of(config)
    if gpus is not None:
        warnings += check_room_on(engines, gpus)
    return ShapeCheck(method, engines, tuple(map(shape_line, models)), tuple(notes), tuple(warnings))


def with_shapes(config: Config) -> Config:
    """Return the config with `shapes:NAME` for every model on the hub whose config.json is part of this package."""
    local = {n: t for n, t in config.teachers.items() if t.base_url is None and config.model_of(t) == t.model}
    teachers = {n: t.model_copy(update={"model": without_weights(t.model)}) for n, t in local.items()}
    update = {"student": without_weights(config.student), "teachers": {**config.teachers, **teachers}}
    return config.model_copy(update=update)


def check_room_on(engines: EnginesPlan, gpus: Gpus | None) -> list[str]:
    """Check the memory of this machine, or that of `gpus` if it is known; return warnings."""
    if gpus is None:
        return check_room(engines)
    return check_room(engines, room) if (room := gpus.room(engines.runtime)) else []


def on_gpus(runtime: RuntimeConfig) -> RuntimeConfig:
    if runtime.device == "cpu":
        raise ConfigError('--gpus: runtime.device = "cpu" uses no GPU: drop one of them')
    return runtime.model_copy(update={"device": "cuda"}) if runtime.device == "auto" else runtime


INSTALL_CHECKS = {"vllm": check_installed}
"""Functions that raise ConfigError if an engine's package is not installed, by engine."""


def fast_checks(config: Config) -> None:
    """Check for contradictions in the config, missing packages and missing files. No data and no model is loaded."""
    check_trackers(config.log.to)
    check_runtime(config)
    check_folder(config)
    check_adapter_engines(config)
    chosen = {"sampler": config.sampler.engine, **{f"teachers.{n}": t.engine for n, t in config.teachers.items()}}
    for where, engine in chosen.items():
        if check := INSTALL_CHECKS.get(engine):
            check(f"{where}.engine")
    check_models(config)
    grading.needs(config.task.reward, config.task.sandbox, reward_settings(config))
    for name, teacher in config.teachers.items():
        if teacher.context is not None and teacher.own_context:
            check_function(name, teacher.context, graded=bool(config.task.reward))
    if (config.learner.lora is not None or is_adapter(config.student)) and find_spec("peft") is None:
        raise ConfigError("learner.lora needs peft: pip install 'slipstream[lora]'")
    if config.has_agents and find_spec("uvicorn") is None:
        raise ConfigError("environment.gateway needs uvicorn: pip install 'slipstream[gateway]'")
    for name, teacher in config.teachers.items():
        endpoint_of(config, name)
        if teacher.tokenizer is not None:
            model_path(teacher.tokenizer)
    check_data_settings(config)
    for name, given in sources_by_split(config).items():
        for source in given:
            check_there(source, getattr(config.data, name))


def check_adapter_engines(config: Config) -> None:
    """Raise ConfigError if an adapter is a model of an engine that takes only whole models."""
    student, *others = engines_here(config)
    # a student that is an adapter is trained as one, and vLLM's sampler takes the adapters that a learner trains
    for model, engine in [*others, *([student] if config.sampler.engine != "vllm" else [])]:
        if not ENGINES[engine].loads_adapters and is_adapter(model):
            what = {"vllm": "vLLM", "server": "a rollout server"}[engine]
            raise ConfigError(
                f'{model} is an adapter, and {what} takes only whole models here: write engine = "native"'
            )


def check_models(config: Config) -> None:
    """Check the rules that need no more of a model than its config.json."""
    for model in models_here(config):
        check_model(model)
    check_split_heads(config.student, config.sampler.engine_args, "sampler")
    for name, teacher in config.teachers.items():
        if teacher.engine_args:
            check_split_heads(config.model_of(teacher), teacher.engine_args, f"teachers.{name}")
    method_of(config)
    check_reward_model(config)


def sources_by_split(config: Config) -> dict[str, list[str]]:
    """Return the sources of the run's data, by the key in [data] that names their split."""
    evaluated = [*config.data.held_out.values()] if config.eval.every else []
    return {"split": [*config.data.sources.values()], "eval_split": evaluated}


def check_data_settings(config: Config) -> None:
    """Check settings of [data] that have no effect on these sources, without reading the sources."""
    given = sources_by_split(config)
    check_columns_used(config.data, *chain(*given.values()))
    for name, sources in given.items():
        check_split(config.data, name, sources)
        for source in sources:
            check_where(source, config.data.where if name == "split" else config.data.eval_where)


def check_weights(config: Config) -> None:
    """Raise ModelError unless all weight files exist. Read those of vLLM teachers: vLLM does not check for NaN."""
    from slipstream.engines.native.files import check_complete, check_quantisation, read_through

    native = [model for model, engine in engines_here(config) if engine == "native"]
    for model in {config.student: None, **dict.fromkeys(native)}:  # the learner always is native
        check_quantisation(model)
    for model in models_here(config):
        check_complete(model)
    for teacher in config.teachers.values():
        if not ENGINES[teacher.engine].checks_weights and teacher.base_url is None:
            read_through(config.model_of(teacher))


def check_base_precision(config: Config) -> None:
    """Raise ConfigError if engines round the weights beside the adapters differently, which no publish contains."""
    from slipstream.engines.native.files import only_bfloat16

    if config.learner.lora is None or config.learner.dtype != "bfloat16":
        return
    dtypes = {"sampler": config.sampler.dtype}
    dtypes |= {f"teachers.{name}": each.dtype for name, each in config.teachers.items() if each.follow is not None}
    other = next((name for name, dtype in dtypes.items() if dtype != "bfloat16"), None)
    if other is not None and not only_bfloat16(config.student):
        raise ConfigError(
            f'[learner.lora] publishes adapters alone: learner.dtype = "bfloat16" rounds the other weights of '
            f'{config.student}, and {other}.dtype = "{dtypes[other]}" does not: write "bfloat16" there, too, or '
            'learner.compute_dtype = "bfloat16" instead of learner.dtype'
        )


def read_weights(config: Config) -> list[str]:
    """Read all weights of models that run here; raise if one is not finite. Return a line to print for each model."""
    from slipstream.engines.native.files import read_through, weights_of

    found = []
    for model in models_here(config):
        began, files = time.perf_counter(), weights_of(model)
        if not files:
            found.append(f"weights of {model}: not checked, as they are not on this machine yet")
            continue
        count, read = read_through(model), sum(file.stat().st_size for file in files)
        seconds = time.perf_counter() - began
        found.append(f"weights of {model}: complete, {count:,} finite numbers ({size(read)} read in {seconds:.1f} s)")
    if config.runtime.address is not None:
        found.append("memory: not checked, as engines run on a cluster")
    return found


def end_ids(student: str, tokenizer: Tokenizer, stop: Sequence[int | str] = ()) -> set[int]:
    """Return the tokens at which the student stops; raise ModelError if it cannot generate any of them."""
    ends, vocabulary = stop_ids(tokenizer, generation_of(student), stop), vocabulary_of(student)
    if min(ends) >= vocabulary:
        raise ModelError(
            f"{student}: its end token {min(ends)} is beyond its {vocabulary} embeddings, so that no answer "
            "could end: use the tokenizer that it was trained with"
        )
    return ends


def changed(made: Plan, config: Config) -> Plan:
    """Return the plan for a changed config whose files (models, data) are the same, without reading them again."""
    method = method_of(config)
    one_ends = {name: scorer.one_end for name, scorer in made.engines.scorers.items()}
    engines, sampling = engines_of(config, method, one_ends), rollout_sampling(config)
    return replace(made, config=config, method=method, engines=engines, sampling=sampling)


def check_runtime(config: Config) -> None:
    runtime, device = config.runtime, config.runtime.device
    if runtime.clock == "modelled":
        load_costs(runtime.costs)
    if runtime.kind == "ray" and find_spec("ray") is None:
        raise ConfigError("runtime.kind = 'ray' needs Ray: pip install 'slipstream[ray]'")
    if runtime.kind != "inline" and device.startswith("cuda") and device != "cuda":
        raise ConfigError(f"runtime.device = {device!r}: each engine gets a GPU of its own; write 'cuda'")
    check_processes(config)
    check_in_flight(config)


def formats_of(config: Config) -> dict[str, str]:
    """Return the number formats of all matrix products of native engines in this run, by their key."""
    learner, formats = config.learner, dict[str, str]()
    if config.sampler.engine == "native":
        formats["sampler.dtype"] = config.sampler.dtype
    native = {name: each for name, each in config.teachers.items() if each.base_url is None and each.engine == "native"}
    formats |= {f"teachers.{name}.dtype": each.dtype for name, each in native.items()}
    return formats | {"learner.compute_dtype": learner.compute_dtype or learner.dtype}


def on_cpu(config: Config) -> bool:
    if config.runtime.device != "auto" or config.runtime.address is not None:
        return config.runtime.device == "cpu"
    from torch import cuda

    return not cuda.is_available()


def check_device(config: Config) -> None:
    """Check that the device exists on this machine; on a cluster, the engines check their own devices."""
    if config.runtime.address is None and config.runtime.device not in ("auto", "cpu"):
        from slipstream.engines.native.model import pick_device

        pick_device(config.runtime.device)
    if config.runtime.kind == "inline" and not on_cpu(config):
        from torch import cuda

        first, there = int(config.runtime.device.partition(":")[2] or 0), cuda.device_count()
        for name, teacher in config.teachers.items():
            if first + teacher.devices > there:
                raise ConfigError(
                    f"teachers.{name}.devices = {teacher.devices}: this machine has {there} GPUs, and runtime.device "
                    f"begins at number {first}: lower it"
                )


def check_processes(config: Config) -> None:
    """Raise ConfigError if engines on this machine need more processes, threads or open files than allowed."""
    runtime, samplers = config.runtime, most_replicas(config.sampler)
    if runtime.address is not None:
        return
    engines = samplers + config.learner.ranks + sum(map(most_replicas, config.teachers.values()))
    if "teacher" in config.offpolicy_sources:
        engines += sum(at_first(teacher.replicas) for teacher in config.teachers.values())
    threads = max(runtime.threads, config.learner.threads or 1)
    for number, what, setting in (
        (engines, "engines", "sampler.replicas or those of a teacher"),
        (threads, "threads of an engine", "runtime.threads or learner.threads"),
    ):
        if number > (room := PER_CPU * (os.cpu_count() or 1)):
            raise ConfigError(f"{number} {what} are more than {room} ({PER_CPU} for each CPU here): lower {setting}")
    if runtime.kind == "inline":
        return
    graders = runtime.graders if config.task.reward else 0
    environments = config.environment.processes if config.environment is not None else 0
    beside, available = samplers * (graders + environments), host_memory()
    needed = (engines + beside) * PROCESS
    if needed > available:
        raise ConfigError(
            f"{engines} engines and {beside} processes beside them need {size(needed)} without their models, this "
            f"machine has {size(available)}: lower sampler.replicas or those of a teacher"
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if runtime.kind == "local" and files != resource.RLIM_INFINITY and engines * OPEN_FILES > files:
        raise ConfigError(
            f"{engines} engines need {engines * OPEN_FILES} open files, the limit is {files} (ulimit -Hn): lower "
            "sampler.replicas or those of a teacher"
        )


def check_sizes(config: Config, sizes: Mapping[str, int]) -> None:
    """Run `check_processes` with the numbers of workers in `sizes`, by kind (`sampler`, `teacher.NAME`)."""
    sizes = {kind: number for kind, number in sizes.items() if kind not in config.most_workers}
    samplers = config.sampler.model_copy(update={"replicas": sizes.get("sampler", config.sampler.replicas)})
    teachers = {
        name: teacher.model_copy(update={"replicas": sizes.get(f"teacher.{name}", teacher.replicas)})
        for name, teacher in config.teachers.items()
    }
    check_processes(config.model_copy(update={"sampler": samplers, "teachers": teachers}))


def check_in_flight(config: Config) -> None:
    """Raise ConfigError if the samples that the schedule allows in flight cannot fit into memory, even if tiny."""
    schedule = schedule_of(config.schedule, config.groups_per_update)
    samples, available = schedule.credits * config.sampler.group, host_memory()
    if samples * SAMPLE > available:
        raise ConfigError(
            f"learner.batch_size = {config.learner.batch_size} and the schedule have {samples} samples in flight, "
            f"which need at least {size(samples * SAMPLE)}; this machine has {size(available)}: lower it"
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = 2 * schedule.credits  # for records in shared memory, and for those that replace them
    if config.runtime.kind == "local" and files != resource.RLIM_INFINITY and needed > files:
        raise ConfigError(
            f"learner.batch_size = {config.learner.batch_size} and the schedule have {schedule.credits} groups in "
            f"flight, which need {needed} open files; the limit is {files} (ulimit -Hn): lower it"
        )


def check_effects(config: Config) -> None:
    """Raise ConfigError if loss.k exceeds the student's vocabulary, or if learner.dropout has no effect."""
    student, vocabulary = config.student, vocabulary_of(config.student)
    losses: dict[str, DistillationLoss] = {"loss": config.loss} if config.loss.weight else {}
    if config.sft is not None:
        losses["sft.loss"] = config.sft.loss
    for name, loss in losses.items():
        if loss.spec.k > vocabulary:
            raise ConfigError(
                f"{name}.k = {loss.spec.k} is more than the vocabulary of {vocabulary}: write that or less"
            )
    if config.sampler.interleave >= vocabulary:
        raise ConfigError(
            f"sampler.interleave = {config.sampler.interleave} replaces no token, because the vocabulary has "
            f"{vocabulary}: write less"
        )
    if config.sampler.quantisation is not None and is_adapter(student):
        raise ConfigError(
            f"sampler.quantisation quantises published weights, and {student} is an adapter, which is published alone: "
            "drop it"
        )
    if config.sampler.quantisation is not None and not adapted(student, LoraConfig()):
        raise ConfigError(f"sampler.quantisation: {student} has no linear layers beside its head: drop it")
    check_router(config)
    check_speculation(config)
    named = load_config(student).get_text_config().to_dict() if config.learner.dropout else {}
    rates = [value for name, value in named.items() if "drop" in name and isinstance(value, float)]
    if config.learner.dropout and not any(rate > 0 for rate in rates):
        raise ConfigError(f"learner.dropout does nothing: the config of {student} names none; drop it")


def check_speculation(config: Config) -> None:
    """Raise ConfigError if a model that a sampler runs has states, which tokens that are not accepted would change."""
    if config.sampler.speculation is None:
        return
    from slipstream.engines.native.model import is_recurrent  # slow import

    runs = [config.student]
    if config.sampler.interleave or "teacher" in config.offpolicy_sources:
        runs += map(config.model_of, config.teachers.values())
    if found := next((model for model in runs if is_recurrent(load_config(model))), None):
        raise ConfigError(
            f"sampler.speculation: {found} has recurrent layers, whose states cannot forget a proposed token that is "
            "not accepted: drop it"
        )


def check_router(config: Config) -> None:
    """Raise ConfigError if [learner] names routers that the student does not have, or a loss that it lacks."""
    learner, found = config.learner, load_config(config.student)
    for key in learner.changed("router", "router_aux"):
        if not experts_of(found):
            raise ConfigError(
                f"learner.{key} is for a mixture of experts, and {config.student} has no experts: drop it"
            )
    if learner.router_aux is not None and getattr(found.get_text_config(), "router_aux_loss_coef", None) is None:
        raise ConfigError(
            f"learner.router_aux: the config of {config.student} has no router_aux_loss_coef, as its routers are not "
            "balanced by this loss: drop it"
        )


def models_here(config: Config) -> list[str]:
    return list(dict.fromkeys(model for model, _ in engines_here(config)))


def engines_here(config: Config) -> list[tuple[str, str]]:
    """Return pairs of model and engine for the student and every teacher without an endpoint."""
    teachers = [each for each in config.teachers.values() if each.base_url is None]
    return [(config.student, config.sampler.engine), *((config.model_of(each), each.engine) for each in teachers)]


def training_prompts(config: Config, tokenizer: Tokenizer, tools: Tools, say: Callable[[str], object]) -> Prompts:
    data, max_tokens = config.data, config.sampler.max_tokens
    rows, names = list[Row](), list[str]()
    for name, source in data.sources.items():
        loaded = load_rows(source, data, split=data.split, limit=data.limit, where=data.where, say=say)
        rows += [replace(row, data_source=name) if name and row.data_source == "default" else row for row in loaded]
        names += [name] * len(loaded)
    graded_rows(rows, config.task.reward, config.task.sandbox, reward_settings(config))
    tokens = encode_rows(rows, tokenizer, data, tools)
    if isinstance(rows[0].prompt, str) and not data.chat and tokenizer.chat_template is not None:
        say(f"prompts are text, sent to {config.student} unchanged: data.chat = true sends it as a user's message")
    if data.deduplicate:
        kept = without_copies(rows, tokens, columns=config.environment is not None, say=say)
        rows, names, tokens = [rows[i] for i in kept], [names[i] for i in kept], [tokens[i] for i in kept]
    chosen = prompts_that_fit(config, tokenizer, rows, tokens, "data.train", say)
    rows, names, tokens = [rows[i] for i, _ in chosen], [names[i] for i, _ in chosen], [ids for _, ids in chosen]
    if missing := sorted(data.sources.keys() - {*names}):
        raise DataError(f"{data.sources[missing[0]]}: no row is left of it (data.deduplicate, data.too_long): drop it")
    check_prompts(config, rows, tokens)
    check_budget("learner", config.learner.token_budget, max(map(len, tokens)) + max_tokens)
    teachers = routes(config, rows)
    return Prompts(
        rows,
        tokens,
        seed=config.seed,
        shuffle=data.shuffle,
        teachers=teachers,
        sources=sources_of(config, rows, names, teachers),
        tells=tells_prompts(config),
        order=order_of(config, rows, names),
    )


def order_of(config: Config, rows: Sequence[Row], names: Sequence[str]) -> Mixture:
    """Return the order of the training prompts; `names` are the sources of the rows."""
    data, orders = config.data, list[Epochs]()
    hard = difficulties(rows, data.by) if data.by is not None else []
    for name in data.sources:
        own = [place for place, each in enumerate(names) if each == name]
        ramp: Any = {"difficulty": [hard[place] for place in own], "ramp": data.ramp} if hard else {}
        orders.append(Epochs(own, seed=config.seed, shuffle=data.shuffle, name=name, **ramp))
    weights = [data.weights.get(name, float(len(order.rows))) for name, order in zip(data.sources, orders, strict=True)]
    return Mixture(orders, shares_of(weights, data.weights_temperature))


def prompts_that_fit(
    config: Config,
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    tokens: Sequence[Ints],
    what: str,
    say: Callable[[str], object],
) -> list[tuple[int, Ints]]:
    """Return place and tokens of the prompts to use, of which data.too_long may cut or leave out some."""
    how, sampler = config.data.too_long, config.sampler
    if how == "refuse":
        return list(enumerate(tokens))
    if how != "skip" and (config.data.chat or not isinstance(rows[0].prompt, str)):
        raise ConfigError(
            f'data.too_long = "{how}" is for text prompts, and would cut a part off the chat template: write "skip"'
        )
    same = [each for each in config.teachers.values() if each.base_url is None and each.context is None]
    contexts = [teacher_context(config, teacher) for teacher in same]
    longest = [each for each in (sampler.longest, *(teacher.longest for teacher in same)) if each is not None]
    limit = min(sampler_context(config), *contexts, *longest) - sampler.max_tokens
    special = list(tokenizer.all_special_ids)
    return fitting(rows, tokens, limit=limit, how=how, special=special, what=what, say=say)


def copy_warnings(prompts: Prompts) -> list[str]:
    """Return a warning if most training prompts are copies."""
    hashes = [hash(tokens.tobytes()) for tokens in prompts.tokens]
    times = Counter(hashes)
    most, copies = times.most_common(1)[0]
    if copies == 1 or len(times) > len(hashes) / 2:
        return []
    place = prompts.rows[hashes.index(most)].place
    return [
        f"data.train: {len(hashes)} rows have {len(times)} different prompts; that of {place} occurs {copies} times"
    ]


def overlap_line(what: str, prompts: Prompts, rows: Sequence[Row], tokens: Sequence[Ints]) -> tuple[str, float]:
    """Return a line about the held-out rows that are in the training data, and their share; empty if none is."""
    equal, similar = overlap_of(prompts.rows, prompts.tokens, rows, tokens)
    both = sorted((equal | similar).items())
    if not both:
        return "", 0.0
    theirs, ours = rows[both[0][0]].place, prompts.rows[both[0][1]].place
    return (
        f"{what}: {len(both)} of {len(rows)} held-out prompts are in data.train too, {len(equal)} equal and "
        f"{len(similar)} with {WORDS} words in a row in common, as {theirs} and {ours}: accuracy on them measures "
        "memorization",
        len(both) / len(rows),
    )


def tells_prompts(config: Config) -> bool:
    """Return whether prompts keep their text or messages, for agents and for graders that read conversations."""
    return config.has_agents or not set(APART).isdisjoint(config.task.reward)


def off_policy(
    config: Config, prompts: Prompts, tokenizer: Tokenizer, say: Callable[[str], object]
) -> OffPolicy | None:
    """Return the responses that the student does not draw; None if it draws all."""
    sft, mix, groups, longest = config.sft, config.mix, config.groups_per_update, config.sampler.max_tokens
    if sft is None and mix is None:
        return None
    rows, vocabulary = prompts.rows, vocabulary_of(config.student)
    stops = stop_ids(tokenizer, generation_of(config.student), config.sampler.stop)
    answers, limits = list[Given](), Limits(vocabulary=vocabulary, longest=longest, stops=stops)
    lessons, trajectories = dict[int, Sequence[Given]](), dict[int, Sequence[Given]]()
    if "data" in config.offpolicy_sources:
        plain = isinstance(rows[0].prompt, str) and not config.data.chat
        template = None if plain else template_end(tokenizer, config.data.template_args)
        end = next(token for token in (template, tokenizer.eos_token_id, *sorted(stops)) if token in stops)
        answers = answers_of(rows, tokenizer, end=end, longest=longest, vocabulary=vocabulary)
        if cut := sum(answer.finish == "length" for answer in answers):
            say(f"{cut} of {len(answers)} answers are longer than sampler.max_tokens, and are cut there")
    if sft is not None and sft.cache is not None and Path(sft.cache).exists() and not Path(sft.cache).is_dir():
        raise ConfigError(f"sft.cache: {sft.cache} is a file, and rollouts are stored in a directory: name another")
    if sft is not None and sft.path is not None:
        lessons = read_trajectories(sft.path, rows, limits, least=1, drawn=False)
    if mix is not None and mix.path is not None:
        least, drawn = (config.sampler.group, True) if mix.prefix is None else (1, False)
        trajectories = read_trajectories(mix.path, rows, limits, least=least, drawn=drawn)
    return OffPolicy(
        seed=config.seed,
        supervised=sft.source if sft is not None else "",
        first=config.supervised_updates * groups,
        mix=mix,
        groups=groups,
        updates=config.updates - config.supervised_updates,
        group=config.sampler.group,
        answers=answers,
        trajectories=trajectories,
        lessons=lessons,
    )


def check_prompts(config: Config, rows: Sequence[Row] | Sequence[Prompt], tokens: Sequence[Ints]) -> None:
    """Raise DataError for a prompt that with a response exceeds the student's context, or has unknown token ids."""
    student, context = config.student, sampler_context(config)
    check_fits(rows, tokens, max_tokens=config.sampler.max_tokens, context=context, model=student)
    check_ids(rows, tokens, student, vocabulary_of(student))


def check_split(data: DataConfig, name: str, given: Collection[str]) -> None:
    if data.changed(name) and given and not any(map(has_splits, given)):
        value, all_of_them = getattr(data, name), ", ".join(given)
        raise ConfigError(f"data.{name} = {value!r} does nothing: {all_of_them} has no splits; drop it")


def with_lengths(config: Config, drawn: int, scored: Mapping[str, int]) -> Config:
    """Return the config with missing `longest` settings of the sampler and of local teachers filled in."""
    teachers = {
        name: teacher.model_copy(update={"longest": length_for(f"teachers.{name}", teacher.longest, scored[name])})
        if name in scored
        else teacher
        for name, teacher in config.teachers.items()
    }
    sampler = config.sampler.model_copy(update={"longest": length_for("sampler", config.sampler.longest, drawn)})
    check_selection("learner", config.student, sampler.longest)
    for name, teacher in teachers.items():
        if teacher.base_url is None and teacher.engine == "native":
            check_selection(f"teachers.{name}", config.model_of(teacher), teacher.longest)
    return config.model_copy(update={"sampler": sampler, "teachers": teachers})


def length_for(section: str, given: int | None, longest: int) -> int:
    if given is not None and given < longest:
        raise ConfigError(
            f"{section}.longest = {given} is less than the longest prompt and response of {longest} tokens: write "
            "that or more, or drop it"
        )
    return given or longest


def held_out_prompts(
    config: Config, tokenizer: Tokenizer, tools: Tools, trained: Prompts, notes: list[str], leaks: list[str]
) -> dict[str, Sequence[Prompt]]:
    """Return the held-out prompts, by the name of their set. Add notes, and warnings about training prompts."""
    data, found = config.data, dict[str, Sequence[Prompt]]()
    for name, source in data.held_out.items():
        split, limit = data.eval_split, config.eval.of(name, "prompts")
        loaded = load_rows(source, data, split=split, limit=limit, where=data.eval_where, say=notes.append)
        rows = graded_rows(loaded, config.task.reward, config.task.sandbox, reward_settings(config))
        judges = [] if config.task.reward else routes(config, rows, held_out=True)
        shown: Any = {"seed": config.seed, "tools": tools, "tells": tells_prompts(config)}
        every = eval_prompts(rows, tokenizer, data, teachers=judges, **shown)
        what, tokens = f"data.eval{name and '.'}{name}", [prompt.tokens for prompt in every]
        fit = prompts_that_fit(config, tokenizer, rows, tokens, what, notes.append)
        rows, tokens = [rows[place] for place, _ in fit], [ids for _, ids in fit]
        found[name] = [replace(every[place], tokens=ids) for place, ids in fit]
        check_prompts(config, rows, tokens)
        if config.environment is None:  # in an environment, rows with equal prompts may still differ
            line, share = overlap_line(what, trained, rows, tokens)
            (leaks if share > LEAKED else notes).extend(filter(None, [line]))
    return found


def prompt_preview(made: Plan) -> list[str]:
    seen = str(made.tokenizer.decode(made.prompts.tokens[0]))
    answer = made.prompts.rows[0].ground_truth
    return [f"first prompt: {shortened(seen)}", f"its answer: {'none' if answer is None else shortened(answer)}"]


def shortened(value: Any, width: int = 120) -> str:
    """Return the repr of a value, which escapes control characters; cut out its middle if it is too long."""
    text = repr(value)
    return text if len(text) <= width else f"{text[: width * 2 // 3]} … {text[-width // 3 :]}"


# --- notes and warnings -----------------------------------------------------------------------------------------------


def model_notes(config: Config) -> list[str]:
    models = {config.student: config.sampler.longest}
    models |= {config.model_of(t): t.longest for t in config.teachers.values() if t.base_url is None}
    notes = {name: position_note(load_config(name), longest) for name, longest in models.items() if longest}
    found = [f"{name}: {note}" for name, note in notes.items() if note]
    if config.policy is not None and config.policy.advantage == "remax":
        group = config.sampler.group
        found.append(
            f'policy.advantage = "remax" answers every prompt once more, greedily, for the reward alone: {group + 1} '
            f"answers are drawn where {group} are trained on"
        )
    draws, vocabulary = config.loss.spec.draws, vocabulary_of(config.student)
    if config.loss.weight and draws > vocabulary:
        found.append(
            f'loss.m = {draws} draws of {vocabulary} tokens: loss.kind = "reverse_kl" computes all of them, exactly '
            "and at less cost"
        )
    return found


def running_notes(config: Config) -> list[str]:
    found = [f"{kind}: one at first, up to {n} as the run needs them" for kind, n in config.most_workers.items()]
    checkpoint = config.checkpoint
    times = [f"every {checkpoint.every} updates"] if checkpoint.every else []
    times += [f"every {checkpoint.minutes:g} minutes"] if checkpoint.minutes else []
    if times:
        found.append(f"checkpoints {', '.join(times)} and at the end, of which {checkpoint.keep} are kept")
    return found + sandbox_notes(config)


def sandbox_notes(config: Config) -> list[str]:
    env = config.environment
    judged = env is not None and env.gateway is not None and env.gateway.verify is not None
    named = [config.task.sandbox, env.sandbox if env is not None and env.gateway is None else None]
    return [in_force(writable())] if judged or "bubblewrap" in named else []


def clip_notes(config: Config) -> list[str]:
    """Return a note for each clip setting without effect: ratios are 1 if every update is one on-policy step."""
    schedule = schedule_of(config.schedule, config.groups_per_update)
    if schedule.bound != 0 or config.learner.minibatches * config.learner.epochs > 1:
        return []
    policy, loss = config.policy, config.loss
    given = [f"policy.options.{name}" for name in (policy.options if policy else ()) if name.startswith("clip")]
    bounds = ("clip", "dual_clip", "ratio_cap")
    given += [f"loss.{name}" for name in bounds if loss.weight and getattr(loss, name, None) is not None]
    return [
        f"{name} has almost no effect: every update is one step on answers of its own weights, so that ratios are 1 "
        "up to rounding"
        for name in given
    ]


def freshness_notes(config: Config) -> list[str]:
    if config.freshness is None:
        return []
    if schedule_of(config.schedule, config.groups_per_update).bound == 0:
        return [
            "[freshness] has almost no effect: every update trains on answers of its own weights, so that their "
            "freshness is 1"
        ]
    if all(teacher.relabel == "never" for teacher in config.teachers.values()):
        return ["freshness: no teacher scores answers again (relabel), so that supervision drift is taken to be 0"]
    known = f"{config.loss.spec.k} tokens" if config.loss.spec.k else "the emitted token"
    return [
        f"freshness: supervision drift of teachers.{name} is a lower bound, as its endpoint scores {known} only"
        for name, teacher in config.teachers.items()
        if teacher.base_url is not None and teacher.relabel != "never"
    ]


def off_policy_notes(config: Config) -> list[str]:
    found, sft, mix = list[str](), config.sft, config.mix
    if k := config.sampler.interleave:
        found.append(f"tokens outside of the teacher's {k} most likely are replaced by its draws (SKD)")
    names = {"data": "answers of the data", "teacher": "rollouts of the teacher"}
    if sft is not None:
        responses = names.get(sft.source, f"responses of {sft.path}")
        end = "" if sft.until is None else f", until distill/student_mass is {sft.until:g}"
        found.append(f"first {sft.updates} updates{end}: {sft.loss.kind} on {responses}, without rollouts")
    if mix is not None:
        change = "" if mix.final is None else f" to {mix.final:.0%}"
        kind = "groups that the student does not draw"
        if mix.prefix is not None:
            kind = f"groups that begin with up to {mix.prefix:.0%} of a known response"
        found.append(f"{kind}: {mix.share:.0%}{change} of an update, {names.get(mix.source, mix.path)}")
    return found


def beyond_embeddings(config: Config, tokenizer: Tokenizer) -> list[str]:
    vocabulary = vocabulary_of(config.student)
    beyond = sorted(index for index in tokenizer.get_vocab().values() if index >= vocabulary)
    if not beyond:
        return []
    return [
        f"the tokenizer of {config.student} has {len(beyond)} tokens beyond the {vocabulary} embeddings of the model, "
        f"{tokenizer.convert_ids_to_tokens(beyond[0])!r} first: prompts with such a token are refused"
    ]


def warnings_of(config: Config) -> list[str]:
    never = {
        "checkpoint.every": (config.checkpoint.every, "only what checkpoint.minutes asks for is saved, and the end"),
        "eval.every": (config.eval.shortest, "only the first and the final student are evaluated"),
        "learner.warmup": (config.learner.warmup, "learner.lr is never reached"),
    }
    found = [
        f"{setting} = {every} is more than updates = {config.updates}: {effect}"
        for setting, (every, effect) in never.items()
        if every > config.updates
    ]
    to_host = {
        "reference.host = true": config.reference is not None and config.reference.host,
        f"learner.offload = {list(config.learner.offload)}": bool(config.learner.offload),
    }
    if on_cpu(config):
        found += [
            f"{key} does nothing on a CPU, whose memory is the host's" for key, is_set in to_host.items() if is_set
        ]
    if not config.checkpoint.every and not config.checkpoint.minutes:
        found.append("checkpoint.every = 0 and checkpoint.minutes = 0: a run that is killed loses everything")
    if len(config.teachers) > 1 and not config.data.shuffle:
        found.append("several teachers and data.shuffle = false: updates may hold prompts of one of them only")
    if config.loss.weight and config.reference is not None:
        found.append("the loss has both a teacher and a reference; drop [reference] if that is not intended")
    if config.learner.lr >= TOO_FAST:
        found.append(
            f"learner.lr = {config.learner.lr:g}: an AdamW update changes every weight by about this much, which is "
            "more than most weights: write 1e-3 or less, 1e-6 to 1e-5 for a whole language model"
        )
    if config.learner.dtype == "bfloat16":
        found.append("learner.dtype = 'bfloat16' rounds small updates away: write compute_dtype = 'bfloat16' instead")
    proximal = config.loss.weight and "proximal" in config.loss.spec.takes
    if proximal and config.learner.minibatches * config.learner.epochs == 1:
        found.append(
            f'loss.kind = "{config.loss.kind}" clips the steps of an update around its first, and there is one: set '
            "learner.minibatches, or learner.epochs"
        )
    return found
