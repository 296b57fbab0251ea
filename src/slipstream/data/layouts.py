"""Layouts of data rows: which columns hold prompt and answer. A layout is recognised by column names or configured.

A path names a column, or a part of a column's value by dots: `reward_model.ground_truth`, `choices.0.text`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Literal

from slipstream.config.data import DataConfig
from slipstream.errors import DataError, did_you_mean

GSM8K_MARK = "####"


@dataclass(frozen=True, slots=True)
class Layout:
    """Alternative paths of the prompt and of the answer; in each row, the first path that has a value is used."""

    name: str
    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    take: Literal["all", "after mark", "last turn"] = "all"
    """Part of the value that is the answer: all, the text after `GSM8K_MARK`, or the last assistant turn."""

    def __str__(self) -> str:
        taken = f" after {GSM8K_MARK}" if self.take == "after mark" else ""
        answer = f"answer from {' or '.join(self.answer) or 'the last turn'}{taken}"
        looks = f"look like {self.name}: " if self.name else "are read as the config says: "
        return f"rows {looks}prompt from {' or '.join(self.prompt)}, {answer}"


PLAIN_LAYOUT = Layout("the plain layout", ("prompt", "messages"), ("ground_truth", "answer"))
VERL = Layout("verl", ("prompt",), ("reward_model.ground_truth",))
VERL_SOLUTION = "extra_info.answer"
"""Path of the whole solution beside verl's ground truth."""
TRL = Layout("TRL", ("prompt",), ("completion",), take="last turn")
OPENAI = Layout("OpenAI messages", ("messages",), (), take="last turn")
DEEPMATH = Layout("DeepMath", ("question",), ("final_answer",))
PROBLEM = Layout("MATH", ("problem",), ("answer",))
GSM8K = Layout("GSM8K", ("question",), ("answer",), take="after mark")


def layout_of(rows: Sequence[Any]) -> Layout:
    """Return the layout that fits the first row's columns and all answers; `PLAIN_LAYOUT` if no other fits."""
    first = next((row for row in rows if isinstance(row, dict)), {})
    columns = first.keys()
    prompts = columns & {"prompt", "messages"}
    if prompts and columns & {"ground_truth", "answer"}:
        return PLAIN_LAYOUT
    if "prompt" in columns and isinstance(first.get("reward_model"), dict):
        return VERL
    if {"prompt", "completion"} <= columns:
        return TRL
    if prompts:
        return OPENAI if prompts == {"messages"} else PLAIN_LAYOUT
    if {"question", "final_answer"} <= columns:
        return DEEPMATH
    marked = any(GSM8K_MARK in str(row.get("answer")) for row in rows if isinstance(row, dict))
    if {"question", "answer"} <= columns and marked:
        return GSM8K
    if {"problem", "answer"} <= columns and "question" not in columns:
        return PROBLEM
    return PLAIN_LAYOUT


def with_configured_paths(layout: Layout, data: DataConfig) -> Layout:
    prompt = data.prompt or (data.template and f"data.template = {data.template!r}")
    if prompt is not None:
        layout = replace(layout, prompt=(prompt,))
    if data.answer is not None:
        layout = replace(layout, answer=(data.answer,), take="all")
    if prompt is None and data.answer is None:
        return layout
    recognised = layout.name != PLAIN_LAYOUT.name and (prompt is None or data.answer is None)
    return layout if recognised else replace(layout, name="")


def reach(fields: Any, path: str) -> Any:
    """Return the value at a path; raise LookupError if none exists. Column names that contain dots are tried first."""
    if isinstance(fields, Mapping) and path in fields:
        return fields[path]
    head, dot, rest = path.partition(".")
    if isinstance(fields, list) and head.isdecimal():
        below = fields[int(head)]
    elif isinstance(fields, Mapping):
        below = fields[head]
    else:
        raise LookupError(path)
    return reach(below, rest) if dot else below


def without(fields: Any, path: str) -> Any:
    """Return the fields without the value at a path, if there is one."""
    if isinstance(fields, Mapping) and path in fields:
        return {name: value for name, value in fields.items() if name != path}
    head, dot, rest = path.partition(".")
    if isinstance(fields, Mapping) and dot and head in fields:
        return {**fields, head: without(fields[head], rest)}
    if isinstance(fields, list) and head.isdecimal() and int(head) < len(fields):
        at = int(head)
        return [*fields[:at], *([without(fields[at], rest)] if dot else ()), *fields[at + 1 :]]
    return fields


def first_of(fields: Mapping[str, Any], paths: Iterable[str]) -> Any:
    """Return the value at the first path that has a value other than None; None if no path has one."""
    for path in paths:
        try:
            found = reach(fields, path)
        except LookupError:
            continue
        if found is not None:
            return found
    return None


def told(where: str, fields: Mapping[str, Any], path: str, setting: str) -> Any:
    """Return the value at `path`, which a config setting names; raise DataError if the row has no such path."""
    try:
        return reach(fields, path)
    except LookupError:
        raise DataError(f"{where}: has no {path!r} ({setting}); {did_you_mean(path, _paths(fields))}") from None


def _paths(fields: Mapping[str, Any], before: str = "") -> list[str]:
    """List all paths of one or two levels in a row."""
    found = []
    for name, value in fields.items():
        inner = _paths(value, f"{name}.") if isinstance(value, Mapping) and not before else [f"{before}{name}"]
        found += inner
    return found


def filled(where: str, template: str, fields: Mapping[str, Any]) -> str:
    """Fill placeholders {path} of a template with a row's values; raise DataError for None, NaN, lists and objects."""
    parts = []
    for text, path, _, _ in Formatter().parse(template):
        parts.append(text)
        if path is not None:
            value = told(where, fields, path, "data.template")
            if value is None or value != value or isinstance(value, (Mapping, list)):
                found = "nothing" if value is None or value != value else "no text"
                raise DataError(f"{where}: {path!r} holds {found} (data.template)")
            parts.append(str(value))
    return "".join(parts)
