"""Plan of an evaluation of one model on held-out prompts, for `eval` and the demo.

An evaluation is planned as a run is: from a config, which trains nothing, by the same facts and rules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.config.data import DataConfig
from slipstream.config.file import data_section
from slipstream.config.losses import ReverseKLMC
from slipstream.config.rewards import TaskConfig
from slipstream.config.running import EvalConfig, RuntimeConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schema import Config
from slipstream.data.tokenizers import Tokenizer, check_ids
from slipstream.engines.sampling_options import eval_sampling
from slipstream.errors import DataError
from slipstream.plan.engine_plans import EnvironmentPlan, GraderPlan, SamplerPlan
from slipstream.plan.engines import sampler_of
from slipstream.plan.facts import KINDS, Facts, ModelFacts
from slipstream.plan.graders import grader_of
from slipstream.plan.prompts import DataFacts
from slipstream.plan.rules import COMPLETED, EVALUATION, FAST, check
from slipstream.plan.rules.endpoints import served_model
from slipstream.plan.rules.memory import check_alone
from slipstream.protocols import Sampling
from slipstream.records import Prompt

INHERITED_DATA_KEYS = ("prompt", "answer", "template", "chat", "system_prompt", "template_args", "too_long")
SAMPLER = ("max_tokens", "dtype", "max_length", "slots", "engine_args")
RUNTIME = ("device", "threads", "graders")
"""Settings of a run that its evaluation has, too, of sections of which others do not count."""


@dataclass(frozen=True)
class EvalRequest:
    """An evaluation that is asked for."""

    config: Config
    """Config of the evaluation: the model is its student, and the sets are its held-out prompts."""
    url: str | None = None
    """OpenAI-compatible server that runs the model; None: the model runs here."""
    api_key_env: str | None = None
    environments: Mapping[str, EnvironmentPlan] = field(default_factory=dict)
    """Environments of the run by name, which name the run's student to agents."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the command line by the key of their setting."""


@dataclass(frozen=True)
class Evaluation:
    tokenizer: Tokenizer
    sets: Mapping[str, Sequence[Prompt]]
    sampler: SamplerPlan
    sampling: Mapping[str, Sampling]
    """Sampling of each set, by the set's name."""
    grader: GraderPlan


def config_of_model(model: str, **sections: Any) -> Config:
    """Return a config that evaluates a model and trains nothing; without sections on the built-in task.

    Rules between sections are about training, and are not tested.
    """
    own: dict[str, Any] = {
        "data": DataConfig(eval="builtin:arithmetic"),
        "sampler": SamplerConfig(max_tokens=96),
        "task": TaskConfig(reward=("exact",), timeout=30),
        "eval": EvalConfig(n=4),
        "runtime": RuntimeConfig(kind="inline"),
    }
    return Config.model_construct(student=model, loss=ReverseKLMC(weight=0), **own | sections)


def config_of_run(run: Config, model: str, *, other_data: bool = False) -> Config:
    """Return the config that evaluates a model of a run: on its held-out prompts, or else on its training prompts.

    With `other_data` the caller replaces them by a held-out set, to which no setting of training prompts applies.
    """
    data, sets = run.data, run.data.held_out or run.data.sources
    given = bool(data.held_out) or other_data
    most = None if given else data.limit
    prompts = {name: run.eval.of(name, "prompts") for name in sets}
    made = config_of_model(
        model,
        data=DataConfig(
            eval=data.eval if data.held_out else data.train,
            eval_split=data.eval_split if given else data.split,
            eval_where=data.eval_where if given else data.where,
            **values(data, INHERITED_DATA_KEYS),
        ),
        # whole students have these tokens among their own, and adapters those of their base model
        sampler=SamplerConfig(
            **values(run.sampler, SAMPLER), stop=run.sampler.stop if ModelFacts(model).is_adapter else ()
        ),
        task=run.task,
        eval=EvalConfig(
            prompts=same({name: min(each, most or each) for name, each in prompts.items()}),
            n=same({name: run.eval.of(name, "n") for name in sets}),
            temperature=run.eval.temperature,
        ),
        runtime=RuntimeConfig(kind="inline", **values(run.runtime, RUNTIME)),
    )
    return made.model_copy(update={"seed": run.seed, "environment": run.environment, "environments": run.environments})


def values(section: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}


def same(numbers: dict[str, int]) -> int | dict[str, int]:
    """Return the number of all sets, or the numbers by set if they differ."""
    return numbers if len(set(numbers.values())) > 1 else next(iter(numbers.values()))


def with_options(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the config with these values of settings, by dotted key. Other data have other columns."""
    changes = dict[str, dict[str, Any]]()
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        changes.setdefault(section, {})[name] = value
    data = changes.pop("data", {})
    if "eval" in data:
        data |= {"eval": data["eval"].get("", data["eval"]), "eval_where": {}, "too_long": "refuse"}
    # a template names its own columns: an option for the template unsets the prompt column, and the reverse
    data = {other: None for name, other in (("prompt", "template"), ("template", "prompt")) if name in data} | data
    columns = values(config.data, (*INHERITED_DATA_KEYS, "eval", "eval_split", "eval_where"))
    config = config.with_values(data=data_section(columns | data), **changes.pop("", {}))
    if rewards := changes.get("task", {}).get("reward"):
        idle = {name: None for name in ("format", "overlong", "model", "judge") if name not in rewards}
        own = {} if set(rewards) & set(config.task.reward) else {"sandbox": None}  # a sandbox belongs to the rewards
        changes["task"] = own | changes["task"] | idle
    return config.with_values(**changes)


def planned_evaluation(asked: EvalRequest, say: Callable[[str], None]) -> Evaluation:
    """Make the plan of an evaluation, as `plan` makes that of a run; no weights are loaded."""
    config, kinds = asked.config, KINDS - {"training"} - ({"weights"} if asked.url is not None else set())
    facts = Facts(config, kinds=kinds, options=asked.options)
    check(FAST, config, facts)
    check(EVALUATION, config, facts)
    other = "sampler.max_tokens" in asked.options  # max_length of the run has room for its own answers alone
    data = DataFacts(config.with_values(sampler={"max_length": None}) if other else config, facts, say)
    sets = {name: data.held_out_set(name)[1] for name in config.data.held_out}
    made = evaluation(asked, sets, data.tokenizer)
    check_alone(made.sampler, config.runtime.device)
    check(COMPLETED, config, facts)  # takes seconds, so after the fast checks
    return made


def evaluation(asked: EvalRequest, sets: Mapping[str, Sequence[Prompt]], tokenizer: Tokenizer) -> Evaluation:
    """Return the plan of an evaluation on these prompts; raise DataError if a prompt does not fit the model."""
    config, model = asked.config, ModelFacts(asked.config.student)
    longest = max(config.sampler.max_length or 0, *(longest_of(prompts, model, config) for prompts in sets.values()))
    slots = max(config.sampler.slots, *(config.eval.of(name, "n") for name in sets))
    config = config.with_values(sampler={"max_length": longest, "slots": slots})
    sampler = replace(sampler_of(config), environments=asked.environments)
    if asked.url is not None:
        sampler = replace(sampler, runs=served_model(config, asked.url, asked.api_key_env))
    sampling = {name: eval_sampling(config, name) for name in sets}
    return Evaluation(tokenizer, sets, sampler, sampling, grader_of(config))


def longest_of(prompts: Sequence[Prompt], model: ModelFacts, config: Config) -> int:
    """Return the length of the longest prompt with a response; raise DataError if it does not fit the model."""
    check_ids(prompts, [prompt.tokens for prompt in prompts], model.name, model.vocabulary)
    for prompt in prompts:
        if len(prompt.tokens) + config.sampler.max_tokens > model.context:
            raise DataError(
                f"{prompt.id}: prompt and --max-tokens exceed the context of {model.context} of {model.name}"
            )
    return max(len(prompt.tokens) for prompt in prompts) + config.sampler.max_tokens
