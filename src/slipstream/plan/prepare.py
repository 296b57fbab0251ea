"""A config and its files: read, and found to fit together, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.config.schema import Config, DataConfig
from slipstream.engines.native import positions
from slipstream.engines.native.model import load_config
from slipstream.errors import ConfigError, DataError
from slipstream.objective.method import Method, method_of
from slipstream.plan.teachers import check_budget, check_teachers, routes
from slipstream.records import Prompt
from slipstream.runlog import check_trackers
from slipstream.runtimes.build_vllm import sampler_context, vocabulary_of
from slipstream.tasks import rewards
from slipstream.tasks.chat import Tokenizer, check_fits, check_ids, encode_rows, load_tokenizer
from slipstream.tasks.data import Prompts, load_rows


@dataclass(frozen=True)
class Job:
    """A config whose files were read and found to fit together."""

    config: Config
    """With what only the files could tell: the longest sequence of every model."""
    method: Method
    tokenizer: Tokenizer
    prompts: Prompts
    held_out: list[Prompt]


def prepare(config: Config) -> Job:
    data, max_tokens = config.data, config.sampler.max_tokens
    check_trackers(config.log.to)
    method = method_of(config)
    if config.task.reward:
        rewards.check_installed(config.task.reward)
    tokenizer = load_tokenizer(config.student)
    rows = load_rows(data.train, split=data.split, limit=data.limit)
    if config.task.reward and any(row.ground_truth is None for row in rows):
        row = next(row for row in rows if row.ground_truth is None)
        raise ConfigError(
            f"task.reward = {config.task.reward!r} needs 'ground_truth' or 'answer'; {row.id} has neither"
        )
    tokens = encode_rows(rows, tokenizer, data)
    context = sampler_context(config)
    check_fits(rows, tokens, max_tokens=max_tokens, context=context, model=config.student)
    check_ids(rows, tokens, config.student, vocabulary_of(config.student))
    check_budget("learner", config.learner.token_budget, max(map(len, tokens)) + max_tokens)
    prompts = Prompts(rows, tokens, seed=config.seed, shuffle=data.shuffle, teachers=routes(config, rows))
    scored = check_teachers(config, tokenizer, prompts)
    held_out = held_out_prompts(config, tokenizer) if config.eval.every else []
    drawn = max(map(len, [*tokens, *(prompt.tokens for prompt in held_out)])) + max_tokens
    return Job(with_lengths(config, drawn, scored), method, tokenizer, prompts, held_out)


def with_lengths(config: Config, drawn: int, scored: Mapping[str, int]) -> Config:
    """The longest sequence that is drawn, and that each teacher scores, where the config does not say."""
    teachers = {
        name: teacher.model_copy(update={"longest": long_enough(f"teachers.{name}", teacher.longest, scored[name])})
        if name in scored
        else teacher
        for name, teacher in config.teachers.items()
    }
    sampler = config.sampler.model_copy(update={"longest": long_enough("sampler", config.sampler.longest, drawn)})
    return config.model_copy(update={"sampler": sampler, "teachers": teachers})


def long_enough(section: str, given: int | None, longest: int) -> int:
    if given is not None and given < longest:
        raise ConfigError(
            f"{section}.longest = {given} is less than the longest prompt and response of {longest} tokens: write "
            "that or more, or drop it"
        )
    return given or longest


def held_out_prompts(config: Config, tokenizer: Tokenizer) -> list[Prompt]:
    data, student = config.data, config.student
    assert data.eval is not None
    prompts = eval_prompts(
        tokenizer, data, data.eval, split=data.eval_split, limit=config.eval.prompts, seed=config.seed
    )
    tokens, context = [prompt.tokens for prompt in prompts], sampler_context(config)
    check_fits(prompts, tokens, max_tokens=config.sampler.max_tokens, context=context, model=student)
    check_ids(prompts, tokens, student, vocabulary_of(student))
    return prompts


def eval_prompts(
    tokenizer: Tokenizer, data: DataConfig, source: str, *, split: str, limit: int | None, seed: int
) -> list[Prompt]:
    """Prompts whose answers can be graded, in the order of the rows."""
    rows = load_rows(source, split=split, limit=limit)
    for row in rows:
        if row.ground_truth is None:
            raise DataError(f"{row.id}: has neither 'ground_truth' nor 'answer' to grade against")
    prompts = Prompts(rows, encode_rows(rows, tokenizer, data), seed=seed, shuffle=False)
    return [prompts.at(number) for number in range(len(rows))]


# --- what a person should know of it ----------------------------------------------------------------------------------


def position_notes(config: Config) -> list[str]:
    """Of every model that chooses its position factors by the length of what it sees."""
    models = {config.student: config.sampler.longest}
    models |= {config.model_of(t): t.longest for t in config.teachers.values() if t.base_url is None}
    notes = {name: positions.said(load_config(name), longest) for name, longest in models.items() if longest}
    return [f"{name}: {note}" for name, note in notes.items() if note]


def warnings_of(config: Config) -> list[str]:
    found: list[str] = []
    if config.data.eval is not None and not config.eval.every:
        found.append("data.eval is not used: set eval.every to evaluate during training")
    if len(config.teachers) > 1 and not config.data.shuffle:
        found.append("several teachers and data.shuffle = false: updates may hold prompts of one of them only")
    if config.loss.weight and config.reference is not None:
        found.append("the teacher and the reference both pull at the student; drop [reference] if that is not meant")
    if config.learner.dtype == "bfloat16":
        found.append("learner.dtype = 'bfloat16' rounds small updates away: write compute_dtype = 'bfloat16' instead")
    return found
