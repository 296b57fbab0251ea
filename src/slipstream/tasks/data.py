"""Rows of a dataset, and the endless sequence of prompts that a run draws from them.

A row has `prompt` (text, or a list of messages) or `messages`; optionally `data_source`, and `ground_truth` or
`answer`; beside messages, `tools`, the JSON schemas of what the student may call.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import DataError, did_you_mean, first_line
from slipstream.records import Ints, Prompt, derive_seed, is_json
from slipstream.tasks import arithmetic

Messages = list[dict[str, Any]]
EXPECTED = "expected 'prompt' (text or a list of messages) or 'messages'"
FILES = (".jsonl", ".json", ".parquet")
ARITHMETIC_ROWS = 20_000
"""Rows of builtin:arithmetic when no limit is given."""


@dataclass(frozen=True, slots=True)
class Row:
    id: str
    prompt: str | Messages
    data_source: str = "default"
    ground_truth: Any = None
    meta: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    """What the chat template is told of tools."""


def check_there(source: str, split: str) -> None:
    """Whether a source is there, without a look into it; hub names are for their library to find."""
    kind, _, name = source.partition(":")
    if kind == "builtin":
        check_builtin(name, split)
    elif Path(source).suffix in FILES and not Path(source).exists():
        raise DataError(f"{source}: cannot be read: No such file or directory")


def load_rows(source: str, *, split: str = "train", limit: int | None = None) -> Sequence[Row]:
    """All rows of a source, checked one by one; the first bad one is named."""
    path = Path(source)
    if source.startswith("builtin:"):
        check_builtin(source.removeprefix("builtin:"), split)
        return Problems(split, limit or ARITHMETIC_ROWS)
    if path.suffix in (".jsonl", ".json"):
        found = _jsonl(path)
    elif path.suffix == ".parquet":
        found = _parquet(path)
    else:
        found = _hf_dataset(source, split)
    rows = []
    for where, fields in found:
        rows.append(_row(where, fields))
        if len(rows) == limit:
            break
    if not rows:
        raise DataError(f"{source}: no rows")
    return rows


def check_builtin(name: str, split: str) -> None:
    if name != "arithmetic":
        raise DataError(f"no built-in task {name!r}; {did_you_mean(name, ['arithmetic'])}")
    if split not in arithmetic.SPLITS:
        raise DataError(f"builtin:arithmetic has no split {split!r}; {did_you_mean(split, arithmetic.SPLITS)}")


class Problems(Sequence[Row]):
    """Rows of the built-in task, each made when it is first asked for."""

    def __init__(self, split: str, size: int) -> None:
        self.split, self.size = split, size
        self.made: dict[int, Row] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(self.size)[index]]
        index = range(self.size)[index]
        if index not in self.made:
            prompt, answer = arithmetic.numbered(self.split, index)
            self.made[index] = Row(f"{self.split}:{index}", prompt, data_source="arithmetic", ground_truth=answer)
        return self.made[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return Problems, (self.split, self.size)


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield f"{path}:{number}", json.loads(line)
                    except json.JSONDecodeError as error:
                        raise DataError(
                            f"{path}:{number}: not a JSON object on one line: {error}; {EXPECTED}"
                        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error.strerror if isinstance(error, OSError) else error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("parquet needs pyarrow: pip install 'slipstream[data]'") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for fields in batch.to_pylist():
                    yield f"{path}:{(number := number + 1)}", fields
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from None


def _hf_dataset(source: str, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source}: HF datasets need the datasets library: pip install 'slipstream[data]'") from None
    try:
        if (Path(source) / "dataset_dict.json").exists() or (Path(source) / "state.json").exists():
            data = datasets.load_from_disk(source)
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise DataError(f"{source} has no split {split!r}; {did_you_mean(split, data)}")
                data = data[split]
        else:
            data = datasets.load_dataset(source, split=split)
    except (OSError, ValueError, LookupError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source} (split {split!r}): cannot be loaded: {first_line(error)}") from None
    for number, fields in enumerate(data):
        yield f"{source}[{split}]:{number + 1}", fields


def _row(where: str, fields: Any) -> Row:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a row must be an object; {EXPECTED}")
    prompt = fields.get("prompt") if fields.get("prompt") is not None else fields.get("messages")
    if prompt is None:
        raise DataError(f"{where}: {EXPECTED}; found {', '.join(map(repr, fields)) or 'nothing'}")
    if not isinstance(prompt, str):
        prompt = _messages(where, prompt)
    if not prompt:
        raise DataError(f"{where}: the prompt is empty; {EXPECTED}")
    tools = fields.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: 'tools' must be a list of objects, the JSON schemas of functions")
    if tools is not None and isinstance(prompt, str):
        raise DataError(f"{where}: 'tools' are for a chat template: write the prompt as a list of messages")
    known = ("prompt", "messages", "data_source", "ground_truth", "answer", "id", "tools")
    truth = fields.get("ground_truth") if fields.get("ground_truth") is not None else fields.get("answer")
    if not is_json(truth):
        raise DataError(
            f"{where}: the answer is of type {type(truth).__name__}, which no checkpoint holds: write it as text, a "
            "number, or lists and objects of those"
        )
    return Row(
        id=str(fields["id"]) if fields.get("id") is not None else where,
        prompt=prompt,
        data_source=str(fields.get("data_source") or "default"),
        ground_truth=truth,
        meta={key: value for key, value in fields.items() if key not in known},
        tools=tools,
    )


def _messages(where: str, messages: Any) -> Messages:
    """A conversation up to the turn that the student will write, with every field: trailing answers are cut off.

    A message that calls tools may have no text. Tables have every column in every message: what is None is not there.
    """
    if not (isinstance(messages, list) and all(isinstance(m, dict) and _is_message(m) for m in messages)):
        raise DataError(f"{where}: a message must have 'role' and 'content', both text; {EXPECTED}")
    kept = list(messages)
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()
    return [{name: value for name, value in m.items() if value is not None or name == "content"} for m in kept]


def _is_message(message: dict[str, Any]) -> bool:
    content = message.get("content")
    silent = content is None and bool(message.get("tool_calls"))
    return isinstance(message.get("role"), str) and (isinstance(content, str) or silent)


class Ragged(Sequence[Ints]):
    """Arrays of many lengths, end to end in one."""

    def __init__(self, arrays: Iterable[Ints]) -> None:
        each = list(arrays)
        self.flat = np.concatenate(each) if each else np.zeros(0, np.int32)
        self.ends = np.cumsum([0, *map(len, each)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        index = range(len(self))[index]
        return self.flat[self.ends[index] : self.ends[index + 1]]


class Prompts:
    """Prompt number i of a run, for every i: a pure function of the seed, so a run can begin anywhere."""

    def __init__(
        self, rows: Sequence[Row], tokens: Iterable[Ints], *, seed: int, shuffle: bool, teachers: Sequence[str] = ()
    ) -> None:
        """`teachers` names, for each row, the one that scores the answers."""
        self.rows, self.tokens = rows, Ragged(tokens)
        self.teachers = list(teachers) or [""] * len(rows)
        self.seed, self.shuffle = seed, shuffle
        self.digest = digest(self.rows, self.tokens, self.teachers)
        self._epoch, self._order = -1, np.arange(len(rows))

    def at(self, number: int) -> Prompt:
        epoch, place = divmod(number, len(self.rows))
        if self.shuffle and epoch != self._epoch:
            order = list(range(len(self.rows)))
            random.Random(derive_seed(self.seed, "epoch", epoch)).shuffle(order)
            self._epoch, self._order = epoch, np.array(order)
        return self.row(int(self._order[place]), number)

    def row(self, index: int, number: int = 0) -> Prompt:
        row = self.rows[index]
        return Prompt(
            id=row.id,
            number=number,
            tokens=self.tokens[index],
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            teacher=self.teachers[index],
            seed=derive_seed(self.seed, number),
            meta={name: value for name, value in row.meta.items() if is_json(value)},
        )


def digest(rows: Iterable[Row], tokens: Iterable[Ints], teachers: Iterable[str]) -> str:
    """Of what is asked and how it is graded, in order: the same rows under another path are the same."""
    found = hashlib.sha256()
    for row, ids, teacher in zip(rows, tokens, teachers, strict=True):
        found.update(repr((len(ids), teacher, row.data_source, row.ground_truth, row.meta)).encode())
        found.update(ids.astype(np.int64).tobytes())
    return found.hexdigest()
