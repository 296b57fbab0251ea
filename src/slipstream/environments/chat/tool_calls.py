"""Parser of tool calls in a student's text.

Four formats are known. (1) JSON between marks: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. (2) The name
between two marks, then the arguments as JSON. (3) JSON without marks; the turn contains nothing but calls. (4) Tags:
`<function=NAME><parameter=KEY>value</parameter></function>`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.environments import Call

LOOKS_BARE = re.compile(r'[{\[]\s*(\{\s*)?("type"\s*:\s*"function"|"(name|function|arguments|parameters)")')


class Fault(Exception):
    """A tool call is malformed. The student reads this error's message."""


@dataclass(frozen=True, kw_only=True)
class Format:
    begin: str
    end: str
    middle: str | None = None
    """Mark between the tool's name and the arguments; None if the JSON contains the name."""
    outer: tuple[str, ...] = ()
    """Marks before and after all calls of a turn together; empty if the format has no such marks."""
    tags: bool = False
    """True: calls are written as `<function=NAME>` tags. False: as JSON."""
    as_text: bool = False
    """True: the chat template expects arguments as JSON text. False: as an object."""

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.middle, self.end, *self.outer)))

    def read(self, text: str, *, cut: bool = False, schemas: Mapping[str, Any] | None = None) -> Found:
        """Parse the calls in a turn. `schemas`: argument schemas by tool. `cut`: the turn reached its length limit."""
        return Reading(self, text, cut, schemas).all()


HERMES = Format(begin="<tool_call>", end="</tool_call>")


JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
JSON_TYPES |= {list: "array", dict: "object"}
"""Types of JSON by the types of their values in Python."""


def _types(schema: Any, definitions: Mapping[str, Any], depth: int = 8) -> set[str]:
    """Return the types of JSON that a schema allows, through unions and references; a string if it does not say."""
    if not isinstance(schema, dict) or not depth:
        return {"string"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if "type" not in schema and isinstance(values, list):
        return {JSON_TYPES.get(type(value), "string") for value in values}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(definitions.get(reference.rpartition("/")[2]), definitions, depth - 1)
    if isinstance(parts := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"), list):
        return set[str]().union(*(_types(part, definitions, depth - 1) for part in parts))
    types = schema.get("type")
    return {each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)} or {"string"}


@dataclass
class Found:
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    text: str = ""
    """Text of the turn outside of tool calls."""


class Reading:
    def __init__(self, form: Format, text: str, cut: bool = False, schemas: Mapping[str, Any] | None = None) -> None:
        self.form, self.text, self.cut, self.schemas, self.found = form, text, cut, schemas or {}, Found()

    def all(self) -> Found:
        if not self.form.begin:
            self._bare()
            return self.found
        at, around = 0, list[str]()
        while (start := self.text.find(self.form.begin, at)) >= 0:
            around.append(self.text[at:start])
            at = self.one(start + len(self.form.begin))
        around.append(self.text[at:])
        rest = "".join(around)
        for mark in self.form.outer:
            rest = rest.replace(mark, "")
        for stray in ("<function=",) * self.form.tags + (self.form.end,) * bool(self.form.end):
            if stray in rest:
                self.found.faults.append(f"{stray} without {self.form.begin} before it")
        self.found.text = rest
        return self.found

    def one(self, at: int) -> int:
        """Parse the call after a begin mark; return the position after the call."""
        end, text = self.form.end, self.text
        try:
            calls, after = self._tags(at) if self.form.tags else self._json(at)
            after = _past_blanks(text, after)
            if text.startswith(end, after):
                self.found.calls += calls
                return after + len(end)
            why = f"a call is followed by {_short(text[after:])} where {end} is expected"
        except Fault as fault:
            after, why = at, str(fault)
        close, following = text.find(end, after) if end else -1, text.find(self.form.begin, after)
        if close >= 0 and not 0 <= following < close:
            self.found.faults.append(why)
            return close + len(end)
        if self.cut and following < 0:
            why = "a call was cut off: the turn was too long"
        elif end:
            why = f"a call is not closed by {end}: {_short(text[at:])}"
        self.found.faults.append(why)
        return following if following >= 0 else len(text)

    def _json(self, at: int) -> tuple[list[Call], int]:
        if self.form.middle is None:
            value, after = value_at(self.text, at)
            return _calls(value), after
        close = self.text.find(self.form.middle, at)
        if close < 0:
            raise Fault(f"a call has no {self.form.middle} after its name: {_short(self.text[at:])}")
        value, after = value_at(self.text, close + len(self.form.middle))
        return [_call(self.text[at:close].strip(), value)], after

    def _tags(self, at: int) -> tuple[list[Call], int]:
        opened = re.compile(r"\s*<function=([^>\n]+)>\s*").match(self.text, at)
        if not opened:
            raise Fault(f"a call does not begin with <function=NAME>: {_short(self.text[at:])}")
        name, at, arguments = opened[1].strip(), opened.end(), dict[str, Any]()
        each = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.S)
        while given := each.match(self.text, at):
            arguments[given[1].strip()] = self._typed(name, given[1].strip(), given[2])
            at = given.end()
        if not self.text.startswith("</function>", at):
            raise Fault(f"<parameter=NAME>…</parameter> or </function> is expected, not {_short(self.text[at:])}")
        return [Call(name, arguments)], at + len("</function>")

    def _typed(self, tool: str, key: str, text: str) -> Any:
        """Parse a parameter as JSON unless its schema allows only strings; return text that is not JSON unchanged."""
        parameters = self.schemas.get(tool, {})
        definitions = parameters.get("definitions", {}) | parameters.get("$defs", {})
        types = _types(parameters.get("properties", {}).get(key), definitions)
        given = {"True": "true", "False": "false", "None": "null"}.get(text, text)
        if types <= {"string", "null"}:
            return None if given == "null" and "null" in types else text
        try:
            value, end = value_at(given, 0)
        except Fault:
            return text
        kind = JSON_TYPES[type(value)]
        is_other = "string" in types and kind not in types and not (kind == "integer" and "number" in types)
        return text if is_other or given[end:].strip() else value

    def _bare(self) -> None:
        """Parse a turn in the format without marks: either the whole turn consists of calls, or it has no calls."""
        text, at, calls = self.text.strip(), 0, list[Call]()
        self.found.text = text
        if not LOOKS_BARE.match(text):
            return
        try:
            while at < len(text):
                value, at = value_at(text, at)
                calls += _calls(value)
                at = _past_blanks(text, at, ";")
        except Fault as fault:
            self.found.faults.append("a call was cut off: the turn was too long" if self.cut else str(fault))
        else:
            self.found.calls, self.found.text = calls, ""


def finite(text: str) -> float:
    """Parse a number; raise ValueError for NaN, Infinity and overflows such as 1e400, which JSON cannot represent."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:60]} is no finite number")
    return value


DECODER = json.JSONDecoder(parse_float=finite, parse_constant=finite)


def value_at(text: str, at: int) -> tuple[Any, int]:
    at = _past_blanks(text, at)
    try:
        value, after = DECODER.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Fault(f"a call holds half a character: {_short(text[at:])}") from None
    except json.JSONDecodeError as error:
        place = f"at character {error.pos - at + 1} of {_short(text[at:])}"
        raise Fault(f"a call is no JSON: {error.msg} {place}") from None
    except RecursionError:
        raise Fault("a call is nested too deeply") from None
    except ValueError as error:
        raise Fault(f"a call is no JSON: {_short(str(error))}") from None
    return value, after


def _calls(value: Any) -> list[Call]:
    calls = []
    if value == []:
        raise Fault('a call is {"name": …, "arguments": {…}}, not []')
    for each in value if isinstance(value, list) else [value]:
        inner = each.get("function", each) if isinstance(each, dict) else each
        if not isinstance(inner, dict):
            raise Fault(f'a call is {{"name": …, "arguments": {{…}}}}, not {_short(json.dumps(each))}')
        if "arguments" not in inner and "parameters" not in inner:
            raise Fault(f'a call has no "arguments": {_short(json.dumps(each))}')
        calls.append(_call(inner.get("name"), inner.get("arguments", inner.get("parameters"))))
    return calls


def _call(name: Any, arguments: Any) -> Call:
    if not isinstance(name, str) or not name:
        raise Fault('a call has no "name"')
    if isinstance(arguments, str):  # some models write the arguments as JSON text inside of the JSON
        text = arguments
        arguments, after = value_at(text, 0)
        if text[after:].strip():
            raise Fault(f"the arguments of {_short(name)} are followed by {_short(text[after:])}")
    if not isinstance(arguments, dict):
        raise Fault(f"the arguments of {_short(name)} are no object: {_short(json.dumps(arguments))}")
    return Call(name, arguments)


def _past_blanks(text: str, at: int, also: str = "") -> int:
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
