"""Conversion of data rows to token ids by the model's tokenizer and chat template, and checks of tokenizers."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from slipstream.config.data import DataConfig
from slipstream.data.prompts import Row
from slipstream.errors import ConfigError, DataError, ModelError, first_line
from slipstream.models.adapters import is_adapter
from slipstream.models.resolve import check_reachable, model_path
from slipstream.records import Ints, Prompt

PROBED_TEXTS = 8
"""Number of prompts that show how many special tokens a tokenizer puts behind a text."""
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
)
"""File names of vocabularies; a directory without any of these has no tokenizer."""
Tokenizer = Any
"""PreTrainedTokenizerBase of transformers, which has no type annotations."""


def load_tokenizer(name: str) -> Tokenizer:
    check_reachable(name)
    from transformers import AutoTokenizer

    own = is_adapter(name) and (Path(name) / "tokenizer_config.json").exists()
    path = name if own else model_path(name)
    if Path(path).is_dir() and not any((Path(path) / file).exists() for file in TOKENIZERS):
        raise ModelError(
            f"{name}: no tokenizer there: expected tokenizer.json; copy it from the model that this one is based on"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{name}: cannot load a tokenizer there: {first_line(error)}") from None
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise ModelError(f"{name}: its tokenizer has only special tokens: one of its files is missing or empty")
    tokenizer.name_or_path = name  # error messages must show the name that the config uses
    return tokenizer


Tools = Sequence[dict[str, Any]] | None
"""JSON schemas of an environment's tools; None for a gateway."""


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    data: DataConfig,
    tools: Mapping[str, Tools] = MappingProxyType({}),
) -> list[Ints]:
    """Encode text prompts directly, and messages by the chat template. Rows without tools get their environment's."""
    text = isinstance(rows[0].prompt, str)
    for row in rows:
        if isinstance(row.prompt, str) != text:
            raise DataError(f"{row.place}: prompts must be all text or all messages, as that of {rows[0].place} is")
    if data.chat and not text:
        raise ConfigError("data.chat does nothing: prompts are messages already; drop it")
    plain = text and not data.chat
    if data.system_prompt is not None and plain:
        raise ConfigError("data.system_prompt needs prompts that are messages; these are plain text: write data.chat")
    if plain and any(each is not None for each in tools.values()):
        raise ConfigError("[environment] needs prompts that are messages; these are plain text: write data.chat = true")
    texts = [str(row.prompt) if plain else rendered(row, tokenizer, data, tools) for row in rows]
    for name in data.template_args:
        if plain or not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            template = f"the chat template of {tokenizer.name_or_path}"
            why = "prompts are plain text" if plain else f"{template} does not read it"
            raise ConfigError(f"data.template_args.{name} does nothing: {why}; drop it")
    # the text of a rendered template already includes the special tokens
    ids = encode_texts(texts, rows, tokenizer, special=plain, what="prompt")
    # an answer would begin behind an end token; a text that is itself an end token says nothing
    if plain and (ends := max((appended_tokens(tokenizer, text) for text in texts[:PROBED_TEXTS]), default=0)):
        ids = [tokens[:-ends] for tokens in ids]
    for row, tokens in zip(rows, ids, strict=True):
        if not tokens:
            raise DataError(f"{row.place}: the prompt has no tokens")
    return [np.array(tokens, np.int32) for tokens in ids]


def appended_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Return the number of special tokens that a tokenizer puts behind a text."""
    both = (tokenizer(text, add_special_tokens=special, verbose=False) for special in (False, True))
    bare, whole = (each["input_ids"] for each in both)
    places = range(len(whole) - len(bare) + 1)
    return next((n for n in places if whole[len(whole) - n - len(bare) : len(whole) - n] == bare), 0)


def encode_texts(
    texts: Sequence[str], rows: Sequence[Row], tokenizer: Tokenizer, *, special: bool, what: str
) -> list[list[int]]:
    """Encode a text of each row, with special tokens if `special`; raise DataError for the first that is impossible."""
    encode = partial(tokenizer, add_special_tokens=special, return_attention_mask=False, verbose=False)
    try:
        found: list[list[int]] = encode(texts)["input_ids"]
    except Exception:  # the library raises plain Exception
        for row, each in zip(rows, texts, strict=True):
            try:
                encode(each)
            except Exception as error:
                why = first_line(error)
                raise DataError(f"{row.place}: {tokenizer.name_or_path} cannot encode this {what}: {why}") from None
        raise
    return found


def rendered(
    row: Row, tokenizer: Tokenizer, data: DataConfig, tools: Mapping[str, Tools], *, begins_answer: bool = True
) -> str:
    if tokenizer.chat_template is None:
        why = "data.chat needs one: drop it" if data.chat else f"{row.place} holds messages: use text prompts"
        raise ModelError(f"{tokenizer.name_or_path} has no chat template, and {why}")
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
    if data.system_prompt is not None:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    schemas = row.tools or list(tools.get(row.environment) or ())
    options = data.template_args | ({"tools": schemas} if schemas else {})
    try:
        made = tokenizer.apply_chat_template(messages, add_generation_prompt=begins_answer, tokenize=False, **options)
        return str(made)
    except Exception as error:  # a template is a program, and may raise anything
        raise DataError(f"{row.place}: the chat template refuses these messages: {first_line(error)}") from None


def separates_answers(row: Row, tokenizer: Tokenizer, data: DataConfig, tools: Mapping[str, Tools]) -> bool:
    """Return whether a chat template writes something between a prompt and its answer, besides an end token."""
    whole = rendered(row, tokenizer, data, tools)
    content = (row.prompt if isinstance(row.prompt, str) else str(row.prompt[-1]["content"])).strip()
    behind = whole.rpartition(content)[2] if content else whole
    if behind.strip() not in ("", tokenizer.eos_token):
        return True
    try:
        return whole != rendered(row, tokenizer, data, tools, begins_answer=False)
    except DataError:  # it has another way to end a prompt
        return True


def check_fits(
    rows: Sequence[Row | Prompt], tokens: Sequence[Ints], *, max_tokens: int, context: int, model: str
) -> None:
    row, length = max(((row, len(ids)) for row, ids in zip(rows, tokens, strict=True)), key=lambda pair: pair[1])
    if length + max_tokens > context:
        raise DataError(
            f"{row.place or row.id}: {length} prompt tokens + sampler.max_tokens = {max_tokens} exceed "
            f"the context of {context} of {model}: shorten the prompt or lower sampler.max_tokens"
        )


def check_ids(rows: Sequence[Row | Prompt], tokens: Sequence[Ints], model: str, vocabulary: int) -> None:
    """Raise ModelError for a prompt token whose id is not below `vocabulary`, the number of the model's embeddings."""
    for row, ids in zip(rows, tokens, strict=True):
        if (highest := int(ids.max())) >= vocabulary:
            raise ModelError(
                f"{row.place or row.id}: token {highest} of the prompt is beyond the {vocabulary} embeddings of {model}"
                ": the tokenizer has more tokens than the model; use the tokenizer that the model was trained with"
            )


def check_same_vocabulary(
    student: Tokenizer,
    teacher: Tokenizer,
    *,
    names: tuple[str, str],
    other: str = "teacher",
    hint: str = 'write teachers.NAME.spelling = "own" to compare them on bytes',
) -> None:
    """Raise ModelError unless every token id has the same text in both tokenizers; numbers of embeddings may differ."""
    ours, theirs = ({index: token for token, index in t.get_vocab().items()} for t in (student, teacher))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise ModelError(
                f"student {names[0]} and {other} {names[1]} have different tokenizers: id {index} is "
                f"{ours.get(index)!r} in one and {theirs.get(index)!r} in the other; {hint}"
            )


def stop_ids(tokenizer: Tokenizer, generation_config: Any, stop: Sequence[int | str] = ()) -> set[int]:
    """Return the ids at which a model stops: those of its files, and the tokens `stop` of `sampler.stop`."""
    found = getattr(generation_config, "eos_token_id", None)
    ids = set(found if isinstance(found, list) else [found]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ModelError(
            f"{tokenizer.name_or_path} names no end-of-sequence token: set eos_token in its tokenizer config"
        )
    own = {int(index) for index in ids}
    return own | {_further_stop(tokenizer, each, own) for each in stop}


def _further_stop(tokenizer: Tokenizer, stop: int | str, own: Collection[int]) -> int:
    where, vocabulary = f"sampler.stop: {stop!r}", tokenizer.get_vocab()
    ids = [vocabulary[stop]] if stop in vocabulary else [stop]
    if isinstance(stop, str) and stop not in vocabulary:
        try:
            ids = tokenizer(stop, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                f"{where} is no text of {tokenizer.name_or_path} ({first_line(error)}): write one of its tokens"
            ) from None
    if len(ids) != 1:
        raise ConfigError(f"{where} is {len(ids)} tokens of {tokenizer.name_or_path}: write one token, or its id")
    if ids[0] not in vocabulary.values():
        raise ConfigError(f"{where} is no token of {tokenizer.name_or_path}: write an id below {len(tokenizer)}")
    if ids[0] in own:
        raise ConfigError(f"{where} does nothing: {tokenizer.name_or_path} stops there already; drop it")
    return int(ids[0])
