"""Teachers with another tokenizer: prompts in their own templates, roles of special tokens, and checks of both."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from slipstream.config.schema import Config
from slipstream.data.prompts import Row
from slipstream.data.spelling import Spelling
from slipstream.data.tokenizers import Tokenizer, Tools, encode_rows
from slipstream.environments.chat.renderer import Renderer
from slipstream.errors import ConfigError, ModelError
from slipstream.plan.ends import template_end
from slipstream.plan.facts import Facts, ModelFacts
from slipstream.protocols import Respelling
from slipstream.records import Ints

CHECKED_ROWS = 64
"""Number of rows whose texts both tokenizers must be able to spell exactly."""


def model_with_tokenizer(config: Config, facts: Facts, name: str) -> ModelFacts:
    """Return the model whose tokenizer a teacher has; raise an error if there is none on this machine."""
    teacher, model = config.teachers[name], facts.tokenizers[name]
    try:
        model.tokenizer  # noqa: B018  # reads it
    except ModelError as error:
        if teacher.base_url is None:
            raise
        raise ConfigError(
            f"teachers.{name}.tokenizer: name the HF directory or hub name of the tokenizer that {teacher.base_url} "
            f"uses ({error})"
        ) from None
    return model


def respelled_prompts(
    config: Config, facts: Facts, rows: Sequence[Row], teachers: Sequence[str], tools: Mapping[str, Tools]
) -> list[Ints | None]:
    """Return each row's prompt in the tokens of its teacher; None if the teacher has the student's tokenizer."""
    found: list[Ints | None] = [None] * len(rows)
    for name, teacher in config.teachers.items():
        places = [place for place, each in enumerate(teachers) if each == name]
        if teacher.spelling == "own" and places:
            tokenizer = model_with_tokenizer(config, facts, name).tokenizer
            if teacher.template_args and isinstance(rows[0].prompt, str) and not config.data.chat:
                raise ConfigError(f"teachers.{name}.template_args does nothing: prompts are plain text; drop it")
            data = config.data.model_copy(update={"template_args": template_args(config, name, tokenizer)})
            own = encode_rows([rows[i] for i in places], tokenizer, data, tools)
            for place, tokens in zip(places, own, strict=True):
                found[place] = tokens
    return found


def template_args(config: Config, name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the arguments of a teacher's own template: its own ones, and those of the data that it reads."""
    teacher, read = config.teachers[name], re.findall(r"\w+", str(tokenizer.chat_template))
    if odd := next((key for key in teacher.template_args if key not in read), None):
        template = f"the chat template of {tokenizer.name_or_path}"
        raise ConfigError(f"teachers.{name}.template_args.{odd} does nothing: {template} does not read it; drop it")
    return {key: value for key, value in config.data.template_args.items() if key in read} | teacher.template_args


def respelling_of(
    config: Config,
    facts: Facts,
    name: str,
    rows: Sequence[Row],
    *,
    stops: Collection[int],
    limit: int,
    tools: Mapping[str, Tools],
) -> Respelling:
    """Return how responses are spelled for a teacher; raise an error if its tokenizer cannot spell the data's texts.

    `rows` are those of its prompts, `stops` the end tokens of the student, `tools` those of every environment.
    """
    where, model, ours = f"teachers.{name}", facts.tokenizers[name], facts.student.tokenizer
    theirs = model.tokenizer
    if ours.get_vocab() == theirs.get_vocab():
        raise ConfigError(
            f'{where}.spelling = "own" does nothing: {model.name} has the tokenizer of {config.student}; drop it'
        )
    texts = [text for row in islice(rows, CHECKED_ROWS) for text in texts_of(row)]
    for tokenizer in (ours, theirs):
        Spelling(tokenizer).check(texts)
    plain = isinstance(rows[0].prompt, str) and not config.data.chat
    args = {} if plain else template_args(config, name, theirs)
    end = None if plain else template_end(theirs, args)
    end = theirs.eos_token_id if end is None else end
    if end is None:
        raise ModelError(f"{where}: {model.name} names no end-of-sequence token: set eos_token in its tokenizer config")
    first = ours.eos_token_id if plain else template_end(ours, config.data.template_args)
    ordered = sorted(stops, key=lambda stop: (stop != first, stop))  # the first one has the probability of the end
    roles = {**dict.fromkeys(ordered, int(end)), **roles_of(ours, theirs), **dict.fromkeys(ordered, int(end))}
    renderers = renderers_of(config, theirs, int(end), args, tools)
    return Respelling(model.name, max(theirs.get_vocab().values()) + 1, roles, limit, renderers)


def renderers_of(
    config: Config, tokenizer: Tokenizer, end: int, args: Mapping[str, Any], tools: Mapping[str, Tools]
) -> dict[str, Any]:
    """Return the arguments of a teacher's `Renderer` for each environment; raise ModelError if its template fails."""
    ends = tuple(sorted({end, *filter(None, [tokenizer.eos_token_id])}))
    found: dict[str, dict[str, Any]] = {
        name: {"stop_ids": ends, "tools": tools.get(name) or [], "template_args": args, "format": environment.format}
        for name, environment in config.every_environment.items()
    }
    for each in found.values():
        Renderer(tokenizer, **each)
    return found


def texts_of(row: Row) -> list[str]:
    """Return the texts of a row that a student may repeat: its prompt or messages, and its answer."""
    turns: Sequence[Mapping[str, Any]] = [{"content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return [text for text in (*(turn.get("content") for turn in turns), row.ground_truth) if isinstance(text, str)]


def roles_of(student: Tokenizer, teacher: Tokenizer) -> dict[int, int]:
    """Return the teacher's counterparts of special tokens: those of the same text, and the beginning of a text."""
    theirs = special_tokens(teacher)
    found = {index: theirs[text] for text, index in special_tokens(student).items() if text in theirs}
    if student.bos_token_id is not None and teacher.bos_token_id is not None:
        found[student.bos_token_id] = teacher.bos_token_id
    return found


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
