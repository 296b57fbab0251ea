"""Teachers in a plan: which teacher scores which prompt, and checks that each teacher can score all its sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream.config.engines import ENGINES
from slipstream.config.schedule import Async
from slipstream.config.schema import Config, TeacherConfig
from slipstream.config.teacher import routed_by
from slipstream.data.layouts import told
from slipstream.data.prompts import Prompts, Row
from slipstream.data.teacher_context import TemplateContext
from slipstream.data.tokenizers import Tokenizer, check_fits, check_same_vocabulary, load_tokenizer
from slipstream.engines.http.check import Requirements, check
from slipstream.engines.http.client import Endpoint
from slipstream.engines.http.judge import Judge
from slipstream.engines.native.config import vocabulary_of
from slipstream.errors import ConfigError, DataError, ModelError, did_you_mean
from slipstream.pipeline.watchdog import ResponseWatch
from slipstream.plan.ends import EndProbe, end_probes, end_tokens, template_end
from slipstream.plan.engines import endpoint_of, graders_apart
from slipstream.plan.environment import Tools
from slipstream.plan.placement import shape_of
from slipstream.plan.shapes import check_context
from slipstream.plan.templates import TemplateProbe, template_probe
from slipstream.plan.vllm import sampler_context, teacher_context
from slipstream.protocols import OneEnd
from slipstream.records import Ints, Ungraded
from slipstream.rewards.functions import Answer, Grades

PROBED = 16
"""Number of prompt tokens that are sent to an endpoint as a test."""


def routes(config: Config, rows: Sequence[Row], *, held_out: bool = False) -> list[str]:
    """Return the name of the teacher of every row; names are empty if the run has no teacher.

    `held_out`: teachers may have none of these rows.
    """
    if len(config.teachers) <= 1:
        return [next(iter(config.teachers), "")] * len(rows)
    column, by_key = config.data.teacher_key, routed_by(config.teachers)
    keys = [row.data_source if column == "data_source" else row.meta.get(column) for row in rows]
    for row, key in zip(rows, keys, strict=True):
        if key is None:
            raise DataError(
                f"{row.place}: has no {column!r} (data.teacher_key), which names the teacher of each prompt"
            )
        if str(key) not in by_key:
            raise ConfigError(
                f"{row.place}: no teacher has key = {str(key)!r}, its {column} (data.teacher_key): add [teachers.NAME] "
                f"with this key; {did_you_mean(str(key), by_key)}"
            )
    known = {str(key) for key in keys}
    for key, name in by_key.items():
        if key not in known and not held_out:
            raise ConfigError(
                f"teachers.{name}: no prompt has {column} = {key!r} (data.teacher_key), its key: write another "
                f"teachers.{name}.key, or drop it; prompts have {', '.join(sorted(known))}"
            )
    return [by_key[str(key)] for key in keys]


def sources_of(config: Config, rows: Sequence[Row], names: Sequence[str], teachers: Sequence[str]) -> list[str]:
    """Return every row's mixture component: teacher, source (`names`, if several), and value of `schedule.mixture`.

    Updates keep the share of every component.
    """
    if len(config.data.sources) > 1:
        teachers = [f"{teacher} {name}" for teacher, name in zip(teachers, names, strict=True)]
    column = config.schedule.mixture if isinstance(config.schedule, Async) else None
    if column is None:
        return list(teachers)
    setting, name = f"schedule.mixture = {column!r}", "schedule.mixture"
    values = [
        str(row.data_source if column == "data_source" else told(row.place, row.meta, column, name)) for row in rows
    ]
    if len(set(values)) == 1:
        raise ConfigError(f"{setting} does nothing: every row has {values[0]!r} there; drop it")
    if len(set(values)) == len(values) > config.groups_per_update:
        raise ConfigError(
            f"{setting}: every row has a different value there: name a column with few values, or write "
            'schedule.order = "submission"'
        )
    return [f"{teacher} {value}" for teacher, value in zip(teachers, values, strict=True)]


class CheckedTeachers(NamedTuple):
    longest: dict[str, int]
    """Longest sequence of every teacher that runs here."""
    probes: dict[str, EndProbe]
    one_ends: dict[str, OneEnd | None]
    templates: dict[str, TemplateProbe]


def check_teachers(config: Config, tokenizer: Tokenizer, prompts: Prompts, tools: Tools = None) -> CheckedTeachers:
    """Check vocabulary, end tokens and context length of teachers, and that token budgets fit the longest sequence."""
    found, stops, ends, one_ends = dict[str, int](), set[int](), dict[str, set[int]](), dict[str, OneEnd | None]()
    templates = dict[str, TemplateProbe]()
    plain = isinstance(prompts.rows[0].prompt, str) and not config.data.chat
    template = None if plain else template_end(tokenizer, config.data.template_args)
    for name, teacher in config.teachers.items():
        theirs = check_vocabulary(config, name, tokenizer)
        names = config.student, teacher.tokenizer or config.model_of(teacher)
        stops, ids, one_ends[name] = end_tokens(
            f"teachers.{name}",
            names=names,
            tokenizers=(tokenizer, theirs),
            template=template,
            stop=config.sampler.stop,
            mapped=teacher.ends == "map",
        )
        if teacher.context is None:
            ends[name] = ids
            its = ((row, prompts.row(i)) for i, row in enumerate(prompts.rows) if prompts.teachers[i] == name)
            probe = None if plain else template_probe(theirs, its, config.data, tools, more=config.sampler.max_tokens)
            templates |= {} if probe is None else {name: probe}
        if teacher.base_url is None:
            found[name] = longest_of(config, name, tokenizer, prompts)
    probes = end_probes(stops, ends, tokenizer, prompts, max_tokens=config.sampler.max_tokens)
    return CheckedTeachers(found, probes, one_ends, templates)


def check_vocabulary(config: Config, name: str, tokenizer: Tokenizer) -> Tokenizer:
    """Return the teacher's tokenizer; raise ModelError if its token ids differ from the student's."""
    teacher = config.teachers[name]
    theirs = teacher.tokenizer or config.model_of(teacher)
    try:
        loaded = load_tokenizer(theirs)
    except ModelError as error:
        if teacher.base_url is None:
            raise
        raise ConfigError(
            f"teachers.{name}.tokenizer: name the HF directory or hub name of the tokenizer that {teacher.base_url} "
            f"uses ({error})"
        ) from None
    check_same_vocabulary(tokenizer, loaded, names=(config.student, theirs))
    return loaded


def longest_of(config: Config, name: str, tokenizer: Tokenizer, prompts: Prompts) -> int:
    """Return the longest sequence that a teacher scores here; raise an error if its model cannot score all of them."""
    teacher = config.teachers[name]
    model = config.model_of(teacher)
    context = teacher_context(config, teacher)
    check_embeddings(config.student, model, f"teachers.{name}")
    check_layers(model, teacher.devices, f"teachers.{name}")
    if teacher.own_context:  # of unknown length, so that the config has to set `longest`
        longest = teacher.longest or 0
        if longest > context:
            raise ConfigError(
                f"teachers.{name}.longest = {longest} exceeds the context of {context} of {model}: lower it"
            )
    else:
        seen, max_tokens = prompts_seen_by(config, name, tokenizer, prompts), longest_answer(config, teacher)
        rows, tokens = [row for row, _ in seen], [tokens for _, tokens in seen]
        check_fits(rows, tokens, max_tokens=max_tokens, context=context, model=model)
        longest = max(map(len, tokens)) + max_tokens
    if ENGINES[teacher.engine].packs:
        check_budget(f"teachers.{name}", teacher.token_budget, longest)
    return longest


def possible_lengths(config: Config, say: Callable[[str], None]) -> tuple[int, dict[str, int]]:
    """Return the longest sequence of the sampler and of each local teacher, as far as it is known without data.

    Raise an error if the longest sequence that the config allows does not fit a model or a token budget.
    """
    drawn, student = config.sampler.max_tokens + 1, config.student  # a prompt has at least one token
    longest = config.sampler.longest or drawn
    if config.sampler.longest is None:
        say(f"sequences count as {drawn} tokens, one of them of a prompt: sampler.longest counts more")
    check_context("sampler", student, longest, sampler_context(config))
    check_budget("learner", config.learner.token_budget, longest)
    scored = dict[str, int]()
    for name, teacher in config.teachers.items():
        if teacher.base_url is not None:
            continue
        where, model = f"teachers.{name}", config.model_of(teacher)
        check_embeddings(student, model, where)
        ours, theirs = vocabulary_of(student), vocabulary_of(model)
        if ours != theirs:
            say(f"{where}: {model} has {theirs} embeddings, the student {ours}; tokens are not compared")
        scored[name] = longest
        if teacher.context is not None:  # its template has an unknown length
            scored[name] = (teacher.longest or 0) if teacher.own_context else longest_answer(config, teacher) + 1
        check_layers(model, teacher.devices, where)
        check_context(where, model, scored[name], teacher_context(config, teacher))
        if ENGINES[teacher.engine].packs:
            check_budget(where, teacher.token_budget, scored[name])
    return drawn, scored


def check_layers(model: str, devices: int, where: str) -> None:
    """Raise ConfigError if a teacher is split over more devices than it has layers."""
    if devices > 1 and devices > (most := len(shape_of(model).sizes[1])):
        raise ConfigError(f"{where}.devices = {devices}: {model} has {most} layers to split: write {most} or less")


def check_embeddings(student: str, teacher: str, where: str) -> None:
    """Raise ModelError if the teacher has fewer embeddings than the student."""
    ours, theirs = vocabulary_of(student), vocabulary_of(teacher)
    if ours > theirs:
        raise ModelError(
            f"{where}: {teacher} has {theirs} embeddings, {student} has {ours}: the teacher could not score all tokens "
            "that the student may sample"
        )


def check_budget(section: str, budget: int, longest: int) -> None:
    if budget < longest:
        raise ConfigError(
            f"{section}.token_budget = {budget} is less than the longest sequence of {longest} tokens: "
            f"write {section}.token_budget = {longest} or more, or a smaller sampler.max_tokens"
        )


def prompts_seen_by(config: Config, name: str, tokenizer: Tokenizer, prompts: Prompts) -> list[tuple[Row, Ints]]:
    """Return pairs of row and prompt tokens that a teacher sees; parts of its context made from responses are empty."""
    template = config.teachers[name].context
    context = None if template is None else TemplateContext(template, tokenizer)
    own = [index for index, teacher in enumerate(prompts.teachers) if teacher == name]
    seen = [prompts.tokens[each] if context is None else context.before(prompts.row(each)) for each in own]
    return [(prompts.rows[each], tokens) for each, tokens in zip(own, seen, strict=True)]


def longest_answer(config: Config, teacher: TeacherConfig) -> int:
    """Return the largest number of tokens that a teacher sees besides its prompt: responses, scored or in context."""
    held = teacher.context_fields & {"response", "best", "last"}
    return config.sampler.max_tokens * (1 + len(held))


def check_endpoints(config: Config, tokenizer: Tokenizer, prompts: Prompts, say: Callable[[str], None]) -> None:
    """Send a small request to every endpoint; raise ConfigError if it cannot serve what the loss needs."""

    async def ask(endpoint: Endpoint, need: Requirements) -> str:
        with ResponseWatch(f"teacher {endpoint.teacher}", say).waiting():
            return await check(endpoint, need)

    highest = vocabulary_of(config.student) - 1
    for name, teacher in config.teachers.items():
        if endpoint := endpoint_of(config, name):
            tokens = [tokens for _, tokens in prompts_seen_by(config, name, tokenizer, prompts)]
            longest = max(map(len, tokens)) + longest_answer(config, teacher)
            some = [*tokens[0][:PROBED].tolist(), *tokens[-1][:2].tolist()]
            need = Requirements(
                tokens=some, highest=highest, longest=longest, k=config.loss.spec.k, best=teacher.max_logprobs
            )
            say(asyncio.run(ask(endpoint, need)))


def check_judge(config: Config, say: Callable[[str], None]) -> None:
    """Send one request to the judge, if there is one; raise ConfigError if it does not answer."""
    probe = Answer(
        text="", messages=[], tokens=[], prompt="", ground_truth="", meta={}, data_source="", finish="eos", outcome={}
    )

    async def ask(judge: Judge) -> Grades:
        with ResponseWatch(judge.endpoint.where, say).waiting():
            return (await judge.open().grades([("", probe)]))[0]

    for judge in graders_apart(config):
        if isinstance(judge, Judge):
            answer = asyncio.run(ask(judge))
            if isinstance(answer, Ungraded) and answer.cause == "endpoint":
                raise ConfigError(f"task.judge.base_url: {answer.said}: start it, or correct the address")
            say(f"{judge.endpoint.where} serves {judge.endpoint.model}, at most {judge.endpoint.timeout:g} s a request")
