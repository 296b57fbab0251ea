"""Converter between conversations of several turns and tokens. Sampled tokens keep their ids.

Text of the chat template is appended to sampled tokens. Text of tool results never becomes control tokens.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import count, groupby
from typing import Any

import numpy as np

from slipstream.data.tokenizers import Tokenizer
from slipstream.environments import Call, Message, Reply
from slipstream.environments.chat.quoting import Part, Quoting
from slipstream.environments.chat.tool_calls import HERMES, Format, Reading
from slipstream.environments.chat.tool_formats import call_message, format_of
from slipstream.environments.chat.turn_boundaries import DUMMY_TOOL, QUESTION, RESULT, SECOND_RESULT, Refused, Template
from slipstream.errors import ConfigError, DataError, ModelError
from slipstream.records import Ints

Rendered = tuple[str, list[Part]]
"""Text before some messages (the end of a turn, or the header of the next one), and the parts of the messages."""
WRITE_HERMES = (
    'write environment.format = "hermes", and say in the system prompt that calls are '
    '<tool_call>{"name": …, "arguments": {…}}</tool_call>'
)


class Renderer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_ids: Collection[int],
        template_args: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] = (),
        format: str = "auto",
    ) -> None:
        """Inspect the tokenizer's chat template; raise ModelError if it cannot be used."""
        self.name = tokenizer.name_or_path
        if tokenizer.chat_template is None:
            raise ModelError(f"{self.name} has no chat template, and episodes of several turns need one")
        self.stop_ids = frozenset(stop_ids)
        self.quoting = Quoting(tokenizer)
        stops = [text for text, index in self.quoting.control.items() if index in self.stop_ids]
        self.template = Template(tokenizer, any_of(stops), tools, template_args or {})
        self.tokenizer = self.template.tokenizer
        self.format = self._format(format)
        self.template.as_text = self.format.as_text if format == "auto" else None
        special = [each.content for each in self.tokenizer.added_tokens_decoder.values() if each.special]
        self.special = any_of([text for text in special if not any(text in mark for mark in self.format.marks)])
        self.schemas = schemas_of(tools)
        self.spells = format == "hermes"
        """True if calls are written into the assistant's text, and the template's own call format is not used."""
        self.wraps = self._wraps(format)
        """True if tool results are written as turns of the user, since the template has no role for tool results."""
        end, tail = self.template.tail([QUESTION])
        tails = [tail] if self.wraps else [tail, self.template.tail([RESULT])[1]]
        headers = [parts[-1].text for parts in tails]
        self.thinks = all(text.rfind("<think>") > text.rfind("</think>") for text in headers)
        """True if the header of a turn begins the thinking."""
        self.notes = tuple(self._notes(end))
        """Lines for the log about properties of this template that users should know."""
        self._check_tokens([Part(end, quoted=False), *(part for part in tail if not part.quoted)])

    @cached_property
    def longest(self) -> int:
        """Upper bound of the number of bytes of a token; some vocabularies write one byte as two."""
        return max(len(token.encode("utf-8", "replace")) for token in self.tokenizer.get_vocab())

    def parse(self, ids: Ints, *, cut: bool = False, tools: Sequence[dict[str, Any]] | None = None) -> Reply:
        """Parse one sampled turn. `cut`: its length limit was reached. `tools` replace the schemas of the renderer."""
        schemas = self.schemas if tools is None else schemas_of(tools)
        found = self.format.read(self.visible(ids), cut=cut, schemas=schemas)
        return Reply(found.text.strip(), tuple(found.calls), tuple(found.faults))

    def visible(self, ids: Ints) -> str:
        """Return the text of one sampled turn, tool calls included, thinking and special tokens excluded."""
        text = self.text(ids[:-1] if len(ids) and int(ids[-1]) in self.stop_ids else ids)
        return self.special.sub("", without_thinking(text, self.format, begun=self.thinks))

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Ints:
        """Return the tokens of a conversation and of the header of the assistant's next turn.

        Tool results, and other messages after the first assistant turn, cannot contain control tokens; the prompt can.
        """
        messages = [self._with_written_calls(message) for message in messages]
        messages = wrap_tool_results(messages) if self.wraps else number_tool_results(messages)
        first = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        quoted = [
            n
            for n, message in enumerate(messages)
            if (n > first or message["role"] == "tool")
            and message["role"] != "assistant"
            and self.quoting.pattern.search(message["content"])
        ]
        try:
            parts = self.template.conversation(messages, tools, quoted)
        except Refused as refused:
            raise DataError(f"{self.name}: {refused}") from None
        if quoted:
            return np.array(self.quoting.encode(parts), np.int32)
        text = "".join(part.text for part in parts).encode("utf-8", "replace").decode()
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)

    def _with_written_calls(self, message: Message) -> Message:
        """Convert the tool calls of a message to the template's form, or write the calls into the message's text."""
        if not message.get("tool_calls"):
            return message
        calls = [Call(each["function"]["name"], each["function"]["arguments"]) for each in message["tool_calls"]]
        if not self.spells:
            return call_message(calls, content=message["content"], as_text=self.format.as_text)
        written = [json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in calls]
        text = "\n".join([message["content"], *(f"<tool_call>\n{each}\n</tool_call>" for each in written)])
        return {"role": "assistant", "content": text.strip()}

    def extend(self, ids: Ints, messages: Sequence[Message]) -> Ints:
        """Return the tokens after a sampled turn: a missing stop token, the messages, and the next turn's header."""
        end, tail = self._observed(self.template.tail, messages)
        tokens = self.quoting.encode([Part(end, quoted=False), *tail])
        if end and len(ids) and int(ids[-1]) in self.stop_ids:
            tokens = tokens[next(place for place, index in enumerate(tokens) if index in self.stop_ids) + 1 :]
        return np.array(tokens, np.int32)

    def insert(self, prompt: Ints, messages: Sequence[Message]) -> Ints:
        """Return the tokens of a prompt with further messages before the header of the first turn."""
        header, parts = self._observed(self.template.after_prompt, messages)
        before = prompt[: len(prompt) - len(header_ids := self.quoting.encode([Part(header, quoted=False)]))]
        if prompt[len(before) :].tolist() != header_ids:
            raise DataError(f"{self.name}: no message can follow this prompt, which ends with no header of a turn")
        return np.concatenate([before, np.array(self.quoting.encode(parts), prompt.dtype)])

    def _observed(self, render: Callable[[Sequence[Message]], Rendered], messages: Sequence[Message]) -> Rendered:
        """Render messages of an environment; raise DataError if one is wrong, or if the template refuses them."""
        for message in messages:
            self._check(message)
        try:
            return render(wrap_tool_results(messages) if self.wraps else number_tool_results(messages))
        except Refused as refused:
            raise DataError(f"{self.name}: {refused}") from None

    def text(self, ids: Ints) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _check(self, message: Message) -> None:
        if not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str):
            raise DataError(f"a message of an environment must have a role and a content, both text, not {message!r}")
        others = {key: value for key, value in message.items() if key != "content"}
        rest = json.dumps(others, ensure_ascii=False, default=str)
        if found := self.quoting.pattern.search(rest):
            raise DataError(f"{found[0]!r} is a control token: only the content of a message may hold it, not {rest}")

    # --- inspection of the template -----------------------------------------------------------------------------------

    def _format(self, format: str) -> Format:
        if format == "hermes":
            return HERMES
        if format != "auto":
            raise ConfigError(f'environment.format = {format!r} is not known: write "auto" or "hermes"')
        tools = self.template.tools or [DUMMY_TOOL]
        found = format_of(
            lambda messages, header: self.template.render(messages, header, tools=tools),
            self.template.stops,
            self.template.mark,
        )
        if found is None:
            raise ModelError(f"{self.name}: its chat template has no tool calls, or an unknown format: {WRITE_HERMES}")
        return found

    def _wraps(self, format: str) -> bool:
        if why := self.template.refusal(QUESTION):
            raise ModelError(f"{self.name}: no turn can follow one of the assistant: {why}")
        for messages in [QUESTION], []:
            self.template.prove(*messages)
        why = self.template.refusal(RESULT)
        if why and format == "auto":
            raise ModelError(f"{self.name}: its chat template has no role for tool results: {why}: {WRITE_HERMES}")
        try:
            for messages in [] if why else [[RESULT], [RESULT, SECOND_RESULT], [RESULT, QUESTION]]:
                self.template.prove(*messages)
        except ModelError:
            if format == "auto":
                raise
            return True
        return bool(why)

    def _notes(self, end: str) -> list[str]:
        notes = []
        if self.template.strips_thinking():
            notes.append(f"the chat template of {self.name} would strip thinking from earlier turns; it is kept")
        if self.wraps:
            instead = "they are written as turns of the user"
            notes.append(f"the chat template of {self.name} has no role for tool results; {instead}")
        if not end:
            notes.append(f"the chat template of {self.name} does not end the assistant's turn with a stop token")
        return notes

    def _check_tokens(self, parts: Sequence[Part]) -> None:
        """Raise ModelError if the renamed tokenizer gives other ids to unquoted text than the original one."""
        try:
            ours = self.quoting.encode(parts)
        except DataError as error:
            raise ModelError(f"the text of the chat template cannot be encoded: {error}") from None
        text = self.quoting.anchor + "".join(part.text for part in parts)
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids[bool(self.quoting.anchor) :] != ours:
            raise ModelError(f"{self.name}: its control tokens cannot be separated from the text around them")


def schemas_of(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of the arguments of each tool, by the tool's name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {each["name"]: each.get("parameters") or {} for each in functions}


def any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def without_thinking(text: str, form: Format, *, begun: bool) -> str:
    """Remove the thinking from a turn's text. If `</think>` is missing, all text after `<think>` is thinking.

    `begun`: `<think>` is in the turn's header. A `</think>` before any `<think>` or call has the same effect.
    """
    begin, shown, at = form.begin or "{", list[str](), 0
    if begun and not text.lstrip().startswith("<think>"):
        at = _after(text, "</think>", 0)
    elif (ends := _place(text, "</think>", 0)) < min(_place(text, "<think>", 0), _place(text, begin, 0)):
        at = ends + len("</think>")
    while at < len(text):
        thinking, call = _place(text, "<think>", at), _place(text, begin, at)
        if thinking <= call:
            shown.append(text[at:thinking])
            at = _after(text, "</think>", thinking)
        else:
            after = Reading(form, text).one(call + len(begin)) if form.end else len(text)
            shown.append(text[at:after])
            at = after
    return "".join(shown)


def _place(text: str, mark: str, at: int) -> int:
    found = text.find(mark, at)
    return found if found >= 0 else len(text)


def _after(text: str, mark: str, at: int) -> int:
    return min(_place(text, mark, at) + len(mark), len(text))


def number_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Add `tool_call_id` to tool messages, since some templates print the id of the answered call.

    The calls of each turn are numbered from 0 (`call_message`), and so are the results after it.
    """
    numbered, number = list[Message](), count()
    for message in messages:
        number = count() if message["role"] == "assistant" else number
        numbered.append({"tool_call_id": f"{next(number):09d}"} | message if message["role"] == "tool" else message)
    return numbered


def wrap_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Convert tool messages to turns of the user; consecutive tool messages share one turn."""
    turns = list[Message]()
    for is_tool, group in groupby(messages, lambda message: bool(message["role"] == "tool")):
        if is_tool:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            turns.append({"role": "user", "content": "\n".join(results)})
        else:
            turns += group
    return turns
