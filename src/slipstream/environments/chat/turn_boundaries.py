"""Turn boundaries (tails) of chat templates, and the check that tails do not depend on the earlier conversation.

A tail is the text after an assistant's turn: the turn's end, the observations, and the header of the next turn.
"""

import copy
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.data.tokenizers import Tokenizer
from slipstream.environments import Call, Message
from slipstream.environments.chat.quoting import Part
from slipstream.environments.chat.tool_formats import call_message
from slipstream.errors import ModelError, first_line

DUMMY_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string", "description": "At it."}}},
    },
}
SYSTEM_PROMPT: Message = {"role": "system", "content": "Be brief."}
QUESTION: Message = {"role": "user", "content": "Which is it?"}
ANSWER: Message = {"role": "assistant", "content": "This."}
THINKING: Message = {"role": "assistant", "content": "<think>\nPerhaps that.\n</think>\n\nThis."}
RESULT: Message = {"role": "tool", "content": "Seen.", "tool_call_id": "000000000"}
SECOND_RESULT: Message = {"role": "tool", "content": "Seen, too.", "tool_call_id": "000000001"}


class Refused(Exception):
    """The chat template raises an error for some messages, or renders them wrongly."""


class Template:
    def __init__(
        self, tokenizer: Tokenizer, stops: re.Pattern[str], tools: Sequence[Any], args: Mapping[str, Any]
    ) -> None:
        """Copy the tokenizer. The pattern `stops` matches the texts of stop tokens."""
        self.name = tokenizer.name_or_path
        self.tokenizer = copy.deepcopy(tokenizer)  # tokenizers are not thread-safe
        self.stops, self.tools, self.args = stops, list(tools), dict(args)
        self.mark = secrets.token_hex(8)
        self.as_text: bool | None = None
        """Form of call arguments: JSON text (True) or objects (False). None: calls are part of the turn's text."""
        self.calling: dict[bool, bool] = {}
        """True if the turn before a tail must have calls. The key is True if the tail begins with a tool message."""

    def render(self, messages: Sequence[Message], header: bool, **args: Any) -> str:
        options = self.args | ({"tools": self.tools} if self.tools else {}) | args
        try:
            options |= {"add_generation_prompt": header, "tokenize": False}
            return str(self.tokenizer.apply_chat_template(list(messages), **options))
        except Exception as error:  # templates are programs and may raise anything
            raise Refused(f"the chat template refuses these messages: {first_line(error)}") from None

    def conversation(self, messages: Sequence[Message], tools: Sequence[Any], quoted: Sequence[int]) -> list[Part]:
        """Render a conversation and the header of the next turn; quote the contents of messages number `quoted`."""
        marked = [
            message | {"content": self._marked(n, message["content"])} if n in quoted else message
            for n, message in enumerate(messages)
        ]
        text = self.render(marked, True, tools=list(tools) or None)
        return self._parts(text, [m if n in quoted else m | {"content": ""} for n, m in enumerate(messages)])

    def after_prompt(self, messages: Sequence[Message]) -> tuple[str, list[Part]]:
        """Return the header that ends a prompt, and what takes its place if messages follow the prompt's."""
        marked = [message | {"content": self._marked(n, message["content"])} for n, message in enumerate(messages)]
        prompt = self.render([QUESTION], False)
        header, after = self.render([QUESTION], True), self.render([QUESTION, *marked], True)
        if not header.startswith(prompt) or not after.startswith(prompt):
            raise Refused("the chat template prints a prompt differently if a message follows")
        return header[len(prompt) :], self._parts(after[len(prompt) :], messages)

    def tail(self, messages: Sequence[Message]) -> tuple[str, list[Part]]:
        """Return the end of the assistant's turn up to its stop token, and the list of parts after the stop token."""
        tool = bool(messages) and messages[0]["role"] == "tool"
        return self._tail(messages, calling=self.calling[tool])

    def _tail(self, messages: Sequence[Message], *, calling: bool) -> tuple[str, list[Part]]:
        end, after = self._split([QUESTION, self._call_turn(messages) if calling else self._text_turn()], messages)
        return end, self._parts(after, messages)

    def _split(self, history: Sequence[Message], messages: Sequence[Message], **args: Any) -> tuple[str, str]:
        marked = [message | {"content": self._marked(n, message["content"])} for n, message in enumerate(messages)]
        pieces = self.render([*history, *marked], True, **args).split(f"{self.mark}z")
        after, called = pieces[-1], "tool_calls" in history[-1]
        if len(pieces) < 2 or (len(pieces) > 2 and not called):
            raise Refused("the chat template does not print the assistant's text exactly once")
        stop, shown = self.stops.search(after), f"{after}{self.mark}o".index(f"{self.mark}o")
        if stop and stop.start() < shown:  # the stop token ends the assistant's turn, not a message
            return stop[0] if called else after[: stop.end()], after[stop.end() :]
        if called:
            raise Refused("the chat template does not end a turn of calls with a stop token")
        return "", after

    def _text_turn(self, text: str = "") -> Message:
        return {"role": "assistant", "content": f"{text}It is {self.mark}z"}

    def _call_turn(self, messages: Sequence[Message] = (), name: str = "look") -> Message:
        """Return an assistant's message that has one call for each tool message, and at least one call."""
        count = max(1, sum(message["role"] == "tool" for message in messages))
        return call_message([Call(name, {"what": f"{self.mark}z"})] * count, as_text=bool(self.as_text))

    def _marked(self, number: int, content: str) -> str:
        """Put marks around a message's content, without its outer blanks, which templates may strip."""
        core = content.strip()
        if not core:
            return content
        lead, _, trail = content.partition(core)
        return f"{lead}{self.mark}o{number}.{core}{self.mark}c{number}.{trail}"

    def _parts(self, text: str, messages: Sequence[Message]) -> list[Part]:
        first, *pieces = re.split(rf"{self.mark}([oc])(\d+)\.", text)
        parts, shown, last = [Part(first, quoted=False)], set[str](), ("c", "")
        for side, number, piece in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            if (last[0] == "o") if side == "o" else (last != ("o", number)):
                raise Refused("the chat template splits a message")
            parts.append(Part(piece, quoted=side == "o"))
            shown.add(number)
            last = (side, number)
        if last[0] == "o":
            raise Refused("the chat template truncates a message")
        for place, message in enumerate(messages):
            if message["content"].strip() and str(place) not in shown:
                raise Refused(f"the chat template does not print messages whose role is {message['role']!r}")
        return parts

    # --- checks of turn boundaries ------------------------------------------------------------------------------------

    def refusal(self, *messages: Message) -> str:
        """Return the reason why these messages cannot follow an assistant's turn; empty if they can follow."""
        tool, why = messages[0]["role"] == "tool", ""
        for calling in (False, True) if tool and self.as_text is not None else (False,):
            try:
                self._tail(messages, calling=calling)
            except Refused as refused:
                why = why or str(refused)
            else:
                self.calling[tool] = calling
                return ""
        return why

    def prove(self, *messages: Message) -> None:
        """Raise ModelError if the tail of these messages depends on the earlier conversation."""
        tool = bool(messages) and messages[0]["role"] == "tool"
        calling = self.calling[tool]
        try:
            expected = self._split([QUESTION, self._call_turn(messages) if calling else self._text_turn()], messages)
        except Refused:  # the template will refuse these messages in a run, too
            return
        for cause, history, args in self._histories(messages):
            if self.as_text is None and any("tool_calls" in message for message in history):
                continue
            try:
                end, after = self._split(history, messages, **args)
            except Refused:  # the template allows no conversation with this history
                continue
            if calling or "tool_calls" in history[-1]:
                end = expected[0]  # some templates end calls with a different stop token
            if (end, after) != expected:
                instead = ', or write environment.format = "hermes"' if tool else ""
                raise ModelError(
                    f"{self.name}: what its chat template prints after an assistant's turn depends on {cause}, so that "
                    f"turns cannot be joined: give the tokenizer a template in which it does not{instead}"
                )

    def _histories(self, messages: Sequence[Message]) -> Iterator[tuple[str, list[Message], dict[str, Any]]]:
        text, calls = self._text_turn(), self._call_turn(messages)
        earlier = call_message([Call("look", {"what": "there"})], as_text=bool(self.as_text))
        twice = call_message([Call("look", {"what": "there"})] * 2, as_text=bool(self.as_text))
        other: Message = {"role": "user", "content": "And now something else:\n\n1. a longer question"}
        yield "whether the turn has calls", [QUESTION, calls], {}
        yield "whether the turn has calls", [QUESTION, text], {}
        yield "which tool was called", [QUESTION, self._call_turn(messages, "find")], {}
        yield "what the assistant said", [QUESTION, self._text_turn("Much.\n\n- and\n- more\n\n")], {}
        yield "the assistant's thinking", [QUESTION, self._text_turn("<think>\nPerhaps that.\n</think>\n\n")], {}
        for last in (text, calls):
            yield "the user's text", [other, last], {}
            yield "whether there is a system prompt", [SYSTEM_PROMPT, QUESTION, last], {}
            yield "the number of earlier turns", [QUESTION, ANSWER, other, last], {}
            yield "the number of earlier turns", [QUESTION, ANSWER, QUESTION, ANSWER, other, last], {}
            yield "the thinking of earlier turns", [QUESTION, THINKING, other, last], {}
            yield "what tools said earlier", [QUESTION, ANSWER, RESULT, last], {}
            yield "what tools said earlier", [QUESTION, ANSWER, RESULT, ANSWER, RESULT, SECOND_RESULT, last], {}
            yield "earlier calls of tools", [QUESTION, earlier, RESULT, last], {}
            yield "earlier calls of tools", [QUESTION, earlier, RESULT, twice, RESULT, SECOND_RESULT, last], {}
            yield "earlier calls of tools", [QUESTION, earlier, RESULT, ANSWER, other, last], {}
            yield "which tools there are", [QUESTION, last], {"tools": [DUMMY_TOOL]}
            yield "the date", [QUESTION, last], {"strftime_now": lambda form: "another day"}

    def strips_thinking(self) -> bool:
        try:
            return "Perhaps that." not in self.render([QUESTION, THINKING, QUESTION], True)
        except Refused:
            return False
