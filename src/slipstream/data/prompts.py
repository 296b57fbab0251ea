"""Rows of a dataset, and the endless sequence of prompts that a run makes from these rows.

A row becomes a prompt (text or a list of messages) and an optional answer, whose columns `layouts` finds. Columns
`id`, `data_source` and `tools` are read, too. `tools` holds JSON schemas; the prompt must then be messages.
"""

import hashlib
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

import numpy as np

from slipstream.config.data import DataConfig
from slipstream.config.integrations import makes_rows
from slipstream.data import arithmetic, builtin, generated, sources, words
from slipstream.data.layouts import (
    GSM8K_MARK,
    PLAIN_LAYOUT,
    VERL_SOLUTION,
    Layout,
    filled,
    first_of,
    layout_of,
    told,
    with_configured_paths,
)
from slipstream.data.offpolicy import OffPolicy
from slipstream.data.order import Epochs, Mixture
from slipstream.errors import ConfigError, DataError
from slipstream.records import Given, Ints, Prompt, derive_seed, is_json

Messages = list[dict[str, Any]]
EXPECTED = "expected 'prompt' (text or a list of messages) or 'messages'"
LIKELY = ("question", "problem", "instruction", "query", "input", "text")
"""Usual names of prompt columns, which the error message for a missing prompt suggests."""
ROWS_LOOKED_AT = 8
"""Number of rows at the start of a source from which the layout is recognised."""
MAX_NESTING = 50
"""Largest nesting depth of lists and objects in a row."""
BUILT_IN_ROWS = 20_000
"""Number of rows that a built-in task has if `data.limit` is not set."""


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    prompt: str | Messages
    data_source: str = "default"
    ground_truth: Any = None
    meta: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of tools for the chat template; None if the row names no tools."""
    response: str | None = field(default=None, compare=False)
    """Whole text of the answer, for [sft] and [mix]; None if the row has none."""
    hidden: tuple[str, ...] = field(default=(), compare=False)
    """Paths in `meta` of the answer, which agents must not see."""
    environment: str = ""
    """Name of the environment in which the row is answered; empty if the run has one or none."""
    where: str = field(default="", compare=False)
    """File and line of the row; empty if unknown."""

    @property
    def place(self) -> str:
        return self.where or self.id


def check_there(source: str, split: str) -> None:
    """Raise DataError if a source does not exist. Contents are not read, and names on the hub are not checked."""
    if source.startswith("builtin:"):
        builtin.check(source.removeprefix("builtin:"), split)
    elif makes_rows(source):
        generated.check_there(source)
    else:
        sources.check_there(source)


def check_columns_used(data: DataConfig, *given: str) -> None:
    """Raise ConfigError if the config names columns, but all sources are built-in tasks, which have no columns."""
    if all(source.startswith("builtin:") for source in given):
        for name in ("prompt", "answer", "template"):
            if getattr(data, name) is not None:
                raise ConfigError(f"data.{name} does nothing: {given[0]} has no columns; drop it")


def check_where(source: str, where: Mapping[str, Any]) -> None:
    """Raise ConfigError if rows that are made, as many as asked for, shall be chosen by their columns."""
    if where and (source.startswith("builtin:") or makes_rows(source)):
        raise ConfigError(f"data.where and data.eval_where choose rows by columns, and {source} has none: drop them")


def load_rows(
    source: str,
    data: DataConfig | None = None,
    *,
    split: str = "train",
    limit: int | None = None,
    where: Mapping[str, Any] = MappingProxyType({}),
    say: Callable[[str], object] = str,
) -> list[Row]:
    """Load and check all rows of a source; raise DataError for the first bad row. `say` prints the layout.

    `where` is data.where, or data.eval_where: the values that a row must have, by column.
    """
    data = data or DataConfig()
    if source.startswith("builtin:"):
        name = source.removeprefix("builtin:")
        builtin.check(name, split)
        check_where(source, where)
        return [built_in_row(name, split, index) for index in range(limit or BUILT_IN_ROWS)]
    chosen = Filter(source, where)
    if makes_rows(source):
        check_where(source, where)
        every: sources.Rows = generated.rows_of(source, split, limit or generated.GENERATED_ROWS)
    else:
        every = sources.rows_of(source, split)
    found = islice(filter(chosen, every), limit)
    first = list(islice(found, ROWS_LOOKED_AT))
    layout = with_configured_paths(layout_of([fields for _, fields in first]), data)
    rows = [_row(where, fields, layout, data) for where, fields in chain(first, found)]
    if not rows:
        why = f" with the values of data.where or data.eval_where: {'; '.join(chosen.seen.values())}"
        raise DataError(f"{source}: no rows" + (why if chosen.seen else ""))
    if not makes_rows(source):
        say(f"{source}: {layout}")
    if where:
        say(f"{source}: {len(rows)} rows are used, {chosen.dropped} of those that were read are not (where)")
    return rows


class Filter:
    """Choice of rows by the values of their columns."""

    def __init__(self, source: str, where: Mapping[str, Any]) -> None:
        self.source = source
        self.where = {path: values if isinstance(values, tuple) else (values,) for path, values in where.items()}
        self.dropped, self.seen = 0, dict[str, str]()
        """Number of rows that are left out, and for each column a value that left out a row."""

    def __call__(self, row: tuple[str, Any]) -> bool:
        place, fields = row
        if not isinstance(fields, dict):  # the reader of rows refuses it
            return True
        for path, values in self.where.items():
            found = told(place, fields, path, "data.where or data.eval_where")
            if not any(found == value or str(found) == str(value) for value in values):
                self.seen.setdefault(path, f"{place} has {path} = {reprlib.repr(found)}")
                self.dropped += 1
                return False
        return True


def built_in_row(task: str, split: str, index: int) -> Row:
    if task in ("arithmetic", "words"):
        question, answer = (arithmetic if task == "arithmetic" else words).numbered(split, index)
        return Row(f"{split}:{index}", question, task, answer, response=answer)
    question, answer, table = builtin.tool_problem(task, split, index)
    return Row(f"{split}:{index}", [{"role": "user", "content": question}], task, answer, {"table": table})


def _row(where: str, fields: Any, layout: Layout, data: DataConfig) -> Row:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a row must be an object; {EXPECTED}")
    for name, value in fields.items():
        if fault := fault_of(name) or fault_of(value):
            raise DataError(f"{where}: {name!r} {fault}")
    prompt, last_turn = _prompt(where, fields, layout, data), None
    if isinstance(prompt, list):
        prompt, last_turn = _conversation(where, prompt)
    elif not isinstance(prompt, str):
        raise DataError(f"{where}: the prompt is {reprlib.repr(prompt)}; {EXPECTED}")
    elif not prompt.strip():
        raise DataError(f"{where}: the prompt is empty; {EXPECTED}")
    tools = fields.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: 'tools' must be a list of objects, the JSON schemas of functions")
    if tools is not None and isinstance(prompt, str):
        raise DataError(f"{where}: 'tools' are for a chat template: write the prompt as a list of messages")
    truth = _answer(where, fields, layout, data)
    if not is_json(truth):
        kind, write = type(truth).__name__, "write it as text, a number, or lists and objects of those"
        raise DataError(f"{where}: the answer is of type {kind}, which cannot be stored as JSON: {write}")
    known = {"data_source", "id", "tools", *layout.prompt, *layout.answer} & fields.keys()
    return Row(
        id=str(fields["id"]) if fields.get("id") is not None else where,
        prompt=prompt,
        data_source=str(fields.get("data_source") or "default"),
        ground_truth=last_turn if truth is None and data.answer is None else truth,
        meta={key: value for key, value in fields.items() if key not in known},
        tools=tools,
        response=_response(where, fields, layout, data, last_turn, truth),
        hidden=tuple(path for path in (*layout.answer, data.response, VERL_SOLUTION) if path and path not in known),
        where=where,
    )


def with_dates_as_text(value: Any) -> Any:
    """Return a value of a table with its dates and times as text (ISO 8601), which JSON can represent."""
    match value:
        case dict():
            return {key: with_dates_as_text(below) for key, below in value.items()}
        case list():
            return list(map(with_dates_as_text, value))
        case date() | time():
            return value.isoformat()
    return value


def _response(
    where: str, fields: dict[str, Any], layout: Layout, data: DataConfig, last_turn: str | None, truth: Any
) -> str | None:
    """Return the text of a whole answer, of which the ground truth may be only a part; None if there is none."""
    if data.response is not None:
        found = told(where, fields, data.response, "data.response")
    else:
        whole = first_of(fields, layout.answer)
        found = last_turn if last_turn is not None else whole if isinstance(whole, str) else truth
    found = found[0] if isinstance(found, list) and found else found
    return str(found) if isinstance(found, str | int | float) and not isinstance(found, bool) else None


def fault_of(value: Any, depth: int = 0) -> str:
    """Return the reason why a value cannot be stored or tokenized; empty if it can be."""
    if isinstance(value, str):
        if "\0" in value:
            return "holds a NUL character"
        try:
            value.encode()
        except UnicodeEncodeError:
            return "holds half of a surrogate pair, which is not a character"
    elif isinstance(value, dict | list):
        if depth == MAX_NESTING:
            return f"is nested deeper than {MAX_NESTING} levels"
        for each in chain(value, value.values()) if isinstance(value, dict) else value:
            if isinstance(each, str | list | dict) and (fault := fault_of(each, depth + 1)):
                return fault
    return ""


def _prompt(where: str, fields: dict[str, Any], layout: Layout, data: DataConfig) -> Any:
    if data.template is not None:
        return filled(where, data.template, fields)
    if data.prompt is not None:
        return told(where, fields, data.prompt, "data.prompt")
    prompt = first_of(fields, layout.prompt)
    if prompt is None:
        expected = (
            EXPECTED if layout.prompt == PLAIN_LAYOUT.prompt else f"expected {' or '.join(map(repr, layout.prompt))}"
        )
        likely = next((name for name in LIKELY if isinstance(fields.get(name), str)), None)
        hint = f': if {likely!r} is the prompt, write data.prompt = "{likely}"' if likely else ""
        raise DataError(f"{where}: {expected}; found {', '.join(map(repr, fields)) or 'nothing'}{hint}")
    return prompt


def _answer(where: str, fields: dict[str, Any], layout: Layout, data: DataConfig) -> Any:
    if data.answer is not None:
        return told(where, fields, data.answer, "data.answer")
    answer = first_of(fields, layout.answer)
    if layout.take == "last turn" and isinstance(answer, list):
        said = [turn.get("content") for turn in answer if isinstance(turn, dict) and turn.get("role") == "assistant"]
        return _joined(said[-1]) if said else None
    if layout.take == "after mark" and answer is not None:
        _, mark, answer = str(answer).rpartition(GSM8K_MARK)
        if not mark:
            raise DataError(
                f"{where}: no {GSM8K_MARK} before the answer, unlike other rows; set data.answer to another column"
            )
        return answer.strip().replace(",", "")
    return answer


def _conversation(where: str, messages: list[Any]) -> tuple[Messages, str | None]:
    """Return the messages before the student's turn, and the text of the removed assistant turn (None without one).

    A message that calls tools may have no text. Fields that are None are dropped: tables fill missing fields with None.
    """
    conversation: Messages = []
    for given in messages:
        message = dict(given) if isinstance(given, dict) else {}
        content = _joined(message.get("content"))
        without_text = content is None and message.get("tool_calls")
        if not isinstance(message.get("role"), str) or not (isinstance(content, str) or without_text):
            raise DataError(f"{where}: a message must have 'role' and 'content', both text; {EXPECTED}")
        if "content" in message:
            message["content"] = content
        conversation.append({name: value for name, value in message.items() if value is not None or name == "content"})
    last_turn = None
    while conversation and conversation[-1]["role"] == "assistant":
        last = conversation.pop().get("content")
        last_turn = last if last_turn is None else last_turn
    asked = conversation[-1] if conversation else {}
    if not (asked.get("content") or "").strip() and not asked.get("tool_calls"):
        raise DataError(f"{where}: the prompt is empty; {EXPECTED}")
    return conversation, last_turn


def _joined(content: Any) -> Any:
    """Join a message content that is a list of text parts; return any other content unchanged."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else content


class Ragged(Sequence[Ints]):
    """Arrays of different lengths, stored in one array."""

    def __init__(self, arrays: Iterable[Ints]) -> None:
        each = list(arrays)
        self.flat = np.concatenate(each) if each else np.zeros(0, np.int32)
        self.ends = np.cumsum([0, *map(len, each)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]  # refuses an index beyond the end, and makes one from the end positive
        return self.flat[self.ends[index] : self.ends[index + 1]]


class Prompts:
    """Prompts of a run by number i ≥ 0. A prompt depends only on the seed and i, so a run can resume at any prompt."""

    def __init__(
        self,
        rows: Sequence[Row],
        tokens: Iterable[Ints],
        *,
        seed: int,
        shuffle: bool,
        teachers: Sequence[str] = (),
        sources: Sequence[str] = (),
        respelled: Sequence[Ints | None] = (),
        tells: bool = False,
        order: Mixture | None = None,
    ) -> None:
        """Set teacher and mixture component (`sources`) of each row. `tells`: prompts keep their text or messages.

        `respelled` are the prompts of teachers with another tokenizer. `order` is the order of the rows; None makes
        epochs over all rows, shuffled if `shuffle` is True.
        """
        self.rows, self.tokens = rows, Ragged(tokens)
        self.teachers = list(teachers) or [""] * len(rows)
        self.sources = list(sources) or self.teachers
        self.respelled = list(respelled) or [None] * len(rows)
        self.seed, self.tells = seed, tells
        self.order = order or Mixture([Epochs(range(len(rows)), seed=seed, shuffle=shuffle)])
        self.off_policy: OffPolicy | None = None
        """Responses that the student does not draw; None if it draws all."""
        self.digest = digest(self.rows, self.tokens, self.teachers)
        """Hash of all rows and of the known responses; a resumed run must find the same."""

    def use(self, off_policy: OffPolicy | None) -> None:
        self.off_policy = off_policy
        if off_policy is not None and (known := off_policy.digest):
            self.digest = hashlib.sha256(f"{self.digest} {known}".encode()).hexdigest()

    def move_rollouts(self, first: int, updates: int) -> None:
        """Let [mix] begin at this group, and spread its shares over this number of updates."""
        if self.off_policy is not None:
            self.off_policy = replace(self.off_policy, first=first, updates=updates)

    def at(self, number: int) -> Prompt:
        return self.row(self.order.at(number), number)

    def with_origin(self, prompt: Prompt, row: int, *, supervised: bool = False) -> Prompt:
        """Return the prompt of this row with the origin of its responses in `source`; empty if the student draws them.

        With `mix.prefix` the student draws them, too, but after the prefix of a known response.
        """
        if (off_policy := self.off_policy) is None:
            return prompt
        if supervised:
            return replace(prompt, source=off_policy.supervised, supervised=True)
        source = off_policy.source(prompt.number)
        if not source or off_policy.mix is None or off_policy.mix.prefix is None:
            return replace(prompt, source=source)
        return replace(prompt, prefix=off_policy.prefix(prompt.number, row, self._visits(prompt.number, row)))

    def responses(self, prompt: Prompt, row: int) -> Sequence[Given]:
        """Return the responses of an off-policy group with this row that are known before the run."""
        assert self.off_policy is not None
        return self.off_policy.responses(prompt, row, self._visits(prompt.number, row))

    def _visits(self, number: int, row: int) -> int:
        """Return how often this row came before; a random number if an adaptive order has chosen it."""
        return self.order.visits(number) if self.order.at(number) == row else derive_seed(self.seed, "visit", number)

    def source(self, number: int) -> str:
        """Return the mixture component of prompt `number` in the fixed order."""
        return self.component(self.order.at(number), number)

    def component(self, row: int, number: int) -> str:
        """Return the mixture component of a group, which includes the origin; updates keep the share of each."""
        source = self.off_policy.source(number) if self.off_policy is not None else ""
        return f"{self.sources[row]} from {source}" if source else self.sources[row]

    def row(self, index: int, number: int = 0) -> Prompt:
        row = self.rows[index]
        return Prompt(
            id=row.id,
            number=number,
            tokens=self.tokens[index],
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            teacher=self.teachers[index],
            environment=row.environment,
            seed=derive_seed(self.seed, number),
            meta={name: told for name, value in row.meta.items() if is_json(told := with_dates_as_text(value))},
            hidden=list(row.hidden),
            asked=row.prompt if self.tells else None,
            place=row.where,
            respelled=self.respelled[index],
        )


def digest(rows: Iterable[Row], tokens: Iterable[Ints], teachers: Iterable[str]) -> str:
    """Hash tokens, teacher, source, answer and metadata of all rows in order. Paths and ids of rows are not hashed."""
    found = hashlib.sha256()
    for row, ids, teacher in zip(rows, tokens, teachers, strict=True):
        found.update(repr((len(ids), teacher, row.data_source, row.ground_truth, row.meta)).encode())
        found.update(ids.astype(np.int64).tobytes())
    return found.hexdigest()
