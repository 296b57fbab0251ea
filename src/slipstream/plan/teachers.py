"""Teachers in a plan: which teacher scores which prompt, and checks that each teacher can score all its sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from slipstream.config.engines import ENGINES
from slipstream.config.schedule import Async
from slipstream.config.schema import Config, TeacherConfig
from slipstream.config.teacher import routed_by
from slipstream.data.layouts import told
from slipstream.data.prompts import Prompts, Row
from slipstream.data.teacher_context import TemplateContext
from slipstream.data.tokenizers import Tokenizer, check_fits, check_same_vocabulary, load_tokenizer
from slipstream.engines.http.check import Wanted, check
from slipstream.engines.native.config import context_length, load_config, vocabulary_of
from slipstream.errors import ConfigError, DataError, ModelError, did_you_mean
from slipstream.pipeline.watchdog import ResponseWatch
from slipstream.plan.ends import EndProbe, check_same_end, end_probes, template_end
from slipstream.plan.engines import endpoint_of
from slipstream.records import Ints

PROBED = 16
"""Number of prompt tokens that are sent to an endpoint as a test."""


def routes(config: Config, rows: Sequence[Row]) -> list[str]:
    """Return the name of the teacher of every row; names are empty if the run has no teacher."""
    if len(config.teachers) <= 1:
        return [next(iter(config.teachers), "")] * len(rows)
    column, by_key = config.data.teacher_key, routed_by(config.teachers)
    found = []
    for row in rows:
        key = row.data_source if column == "data_source" else row.meta.get(column)
        if key is None:
            raise DataError(
                f"{row.place}: has no {column!r} (data.teacher_key), which names the teacher of each prompt"
            )
        if str(key) not in by_key:
            raise ConfigError(
                f"{row.place}: no teacher has key = {str(key)!r}, its {column} (data.teacher_key): add [teachers.NAME] "
                f"with this key; {did_you_mean(str(key), by_key)}"
            )
        found.append(by_key[str(key)])
    for key, name in by_key.items():
        if name not in found:
            known_keys = sorted({str(row.data_source if column == "data_source" else row.meta[column]) for row in rows})
            raise ConfigError(
                f"teachers.{name}: no prompt has {column} = {key!r} (data.teacher_key), its key: write another "
                f"teachers.{name}.key, or drop it; prompts have {', '.join(known_keys)}"
            )
    return found


def sources_of(config: Config, rows: Sequence[Row], teachers: Sequence[str]) -> list[str]:
    """Return every row's mixture component (teacher, and value of `schedule.mixture`); updates keep their shares."""
    column = config.schedule.mixture if isinstance(config.schedule, Async) else None
    if column is None:
        return list(teachers)
    setting = f"schedule.mixture = {column!r}"
    values = [
        str(row.data_source if column == "data_source" else told(row.place, row.meta, column, "schedule.mixture"))
        for row in rows
    ]
    if len(set(values)) == 1:
        raise ConfigError(f"{setting} does nothing: every row has {values[0]!r} there; drop it")
    if len(set(values)) == len(values) > config.groups_per_update:
        raise ConfigError(
            f"{setting}: every row has a different value there: name a column with few values, or write "
            'schedule.order = "submission"'
        )
    return [f"{teacher} {value}" for teacher, value in zip(teachers, values, strict=True)]


def check_teachers(
    config: Config, tokenizer: Tokenizer, prompts: Prompts
) -> tuple[dict[str, int], dict[str, EndProbe]]:
    """Check vocabulary, end tokens and context length of teachers, and that token budgets fit the longest sequence.

    Returns the longest sequence of every teacher that runs here, and the end-token probes, both by teacher.
    """
    found, stops, ends = dict[str, int](), set[int](), dict[str, set[int]]()
    plain = isinstance(prompts.rows[0].prompt, str) and not config.data.chat
    template = None if plain else template_end(tokenizer, config.data.template_args)
    for name, teacher in config.teachers.items():
        theirs = check_vocabulary(config, name, tokenizer)
        names = config.student, teacher.tokenizer or config.model_of(teacher)
        stops, ids = check_same_end(f"teachers.{name}", names=names, tokenizers=(tokenizer, theirs), template=template)
        if teacher.context is None:
            ends[name] = ids
        if teacher.base_url is not None:
            continue
        model = config.model_of(teacher)
        check_embeddings(config.student, name, model)
        if teacher.own_context:
            found[name] = longest_of_function(config, name)
            continue
        seen, max_tokens = prompts_seen_by(config, name, tokenizer, prompts), longest_answer(config, teacher)
        rows, tokens = [row for row, _ in seen], [tokens for _, tokens in seen]
        check_fits(rows, tokens, max_tokens=max_tokens, context=context_length(load_config(model)), model=model)
        found[name] = max(map(len, tokens)) + max_tokens
        if ENGINES[teacher.engine].packs:
            check_budget(f"teachers.{name}", teacher.token_budget, found[name])
    return found, end_probes(stops, ends, tokenizer, prompts, max_tokens=config.sampler.max_tokens)


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


def check_embeddings(student: str, name: str, model: str) -> None:
    sizes = [vocabulary_of(each) for each in (student, model)]
    if sizes[0] > sizes[1]:
        raise ModelError(
            f"teachers.{name}: {model} has {sizes[1]} embeddings, {student} has {sizes[0]}: the teacher could "
            "not score all tokens that the student may sample"
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
    """Return the maximum tokens that a teacher sees in addition to the prompt: responses, also those in its context."""
    held = teacher.context_fields & {"response", "best", "last"}
    return config.sampler.max_tokens * (1 + len(held))


def longest_of_function(config: Config, name: str) -> int:
    """Return `longest` of a teacher whose context a user function writes; ConfigError if the model allows less."""
    teacher = config.teachers[name]
    model, longest = config.model_of(teacher), teacher.longest
    assert longest is not None
    if longest > (room := context_length(load_config(model))):
        raise ConfigError(f"teachers.{name}.longest = {longest} exceeds the context of {room} of {model}: lower it")
    check_budget(f"teachers.{name}", teacher.token_budget, longest)
    return longest


def check_endpoints(config: Config, tokenizer: Tokenizer, prompts: Prompts, say: Callable[[str], None]) -> None:
    asyncio.run(ask_endpoints(config, tokenizer, prompts, say))


async def ask_endpoints(config: Config, tokenizer: Tokenizer, prompts: Prompts, say: Callable[[str], None]) -> None:
    highest = vocabulary_of(config.student) - 1
    for name, teacher in config.teachers.items():
        endpoint = endpoint_of(config, name)
        if endpoint is None:
            continue
        asks = config.loss.asks
        tokens = [tokens for _, tokens in prompts_seen_by(config, name, tokenizer, prompts)]
        longest = max(map(len, tokens)) + longest_answer(config, teacher)
        some = [*tokens[0][:PROBED].tolist(), *tokens[-1][:2].tolist()]
        need = Wanted(tokens=some, highest=highest, longest=longest, k=asks.k)
        with ResponseWatch(f"teacher {name}", say).waiting():
            found = await check(endpoint, need)
        say(found)
