"""The APIs in which agents talk to a student: chat completions, OpenAI's responses, and Anthropic's messages.

Each request is translated to one of chat completions, so that all agents share parsing, refusals and branches. Each
answer is complete before its first byte is sent: a stream sends it in the events that clients of its API expect.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from slipstream.environments import Message
from slipstream.environments.gateway import chat_json as wire
from slipstream.environments.gateway.chat_json import Chat, chat_from, check_options, dump_json, load_json, wrong
from slipstream.environments.gateway.sessions import Answer

Known = Sequence[tuple[Any, Message]]


class Dialect(NamedTuple):
    parse: Callable[[bytes, Known], Chat]
    completion: Callable[[Answer, Chat], bytes]
    chunks: Callable[[Answer, Chat], Iterator[bytes]]
    keep_alive: bytes
    """Event, or comment, that keeps a stream alive."""
    failure: Callable[[dict[str, Any]], bytes]
    """Function that returns the last events of a stream that failed, from the error as in chat completions."""


def named_event(kind: str, found: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\n".encode() + wire.event({"type": kind, **found})


def parts_of(place: str, given: Any, kinds: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kind and object of each part of a list; refuse parts of other kinds. Text counts as one part."""
    parts = [{"type": "text", "text": given}] if isinstance(given, str) else given
    if not isinstance(parts, list):
        raise wrong(place, "must be text or a list of parts")
    for n, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise wrong(f"{place}[{n}].type", f"is {json.dumps(kind)[:60]}, but only {', '.join(kinds)} are supported")
        yield kind, part


def text_of(place: str, given: Any) -> str:
    """Return the text of a tool's result, which may be a list of parts."""
    parts = parts_of(place, "" if given is None else given, dict.fromkeys(("text", "input_text", "output_text")))
    return "".join(wire.text_in(f"{place}[{n}]", part) for n, (_, part) in enumerate(parts))


def each_tool(given: Any, translate: Callable[[Any], Any]) -> Any:
    return [translate(tool) for tool in given] if isinstance(given, list) else given


# --- OpenAI's responses -----------------------------------------------------------------------------------------------

RESPONSES_PARAMETERS = {"input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "text"}
RESPONSES_PARAMETERS |= {"reasoning", "include", "truncation", "background"}
"""Supported parameters; the last four change nothing here."""
ITEMS = dict.fromkeys(("message", "function_call", "function_call_output", "reasoning", "item_reference"))


def chat_of_responses(body: bytes, known: Known = ()) -> Chat:
    given = load_json(body)
    check_options(given, RESPONSES_PARAMETERS)
    if isinstance(text := given.get("text"), dict):
        check_options({"format": text.get("format")}, set(), "text.")
    if given.get("background"):
        raise wrong("background", "is not supported; leave it out")
    chat = {
        "messages": list(messages_of_responses(given)),
        "tools": each_tool(given.get("tools"), tool_of_responses),
        "tool_choice": given.get("tool_choice"),
        "max_tokens": given.get("max_output_tokens"),
        "stream": given.get("stream"),
        "model": given.get("model"),
        **{name: given.get(name) for name in wire.IMPOSED},
    }
    return chat_from({name: value for name, value in chat.items() if value is not None}, known)


def tool_of_responses(tool: Any) -> Any:
    """Return a tool as chat completions have it; what is no function is refused later."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def messages_of_responses(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield chat messages; calls follow the assistant's text in the same message, and reasoning is left out."""
    if (instructions := given.get("instructions")) is not None:
        if not isinstance(instructions, str):
            raise wrong("instructions", "must be text")
        yield {"role": "system", "content": instructions}
    items = given.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise wrong("input", "must be text or a list of at least one item")
    reply: dict[str, Any] | None = None
    for n, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in ITEMS:
            raise wrong(f"input[{n}].type", f"is {json.dumps(kind)[:60]}, but only {', '.join(ITEMS)} are supported")
        if kind == "function_call":
            reply = reply or {"role": "assistant", "content": ""}
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            reply.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        if kind in ("function_call", "reasoning", "item_reference"):
            continue
        if reply is not None:
            yield reply
            reply = None
        if kind == "function_call_output":
            content = text_of(f"input[{n}].output", item.get("output"))
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        elif item.get("role") == "assistant":
            reply = {"role": "assistant", "content": item.get("content")}
        else:
            yield {"role": item.get("role"), "content": item.get("content")}
    if reply is not None:
        yield reply


def response_of(answer: Answer, chat: Chat, status: str = "", output: Sequence[Any] | None = None) -> dict[str, Any]:
    cut = answer.finish == "length"
    usage = {
        "input_tokens": answer.read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": len(answer.ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.read + len(answer.ids),
    }
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": 0,
        "status": status or ("incomplete" if cut else "completed"),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut and not status else None,
        "instructions": None,
        "metadata": {},
        "model": chat.model,
        "output": outputs_of(answer) if output is None else output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None if status else usage,
    }


def outputs_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the items of an answer: its text, if there is any, and its calls."""
    part = {"type": "output_text", "text": answer.text, "annotations": []}
    items: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        head = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "status": "completed"}
        items.append(head | {"content": [part]})
    for n, call in enumerate(answer.calls):
        name = f"{answer.number}_{n}"
        head = {"id": f"fc_{name}", "type": "function_call", "call_id": f"call_{name}", "status": "completed"}
        items.append(head | {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)})
    return items


def response_events(answer: Answer, chat: Chat) -> Iterator[bytes]:
    numbers = count()

    def event(kind: str, **found: Any) -> bytes:
        return named_event(f"response.{kind}", {"sequence_number": next(numbers), **found})

    begun = response_of(answer, chat, "in_progress", [])
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(outputs_of(answer)):
        at = {"output_index": index, "item_id": item["id"]}
        text = item["type"] == "message"
        empty: dict[str, Any] = {"content": []} if text else {"arguments": ""}
        yield event("output_item.added", output_index=index, item=item | empty)
        if text:
            (part,) = item["content"]
            at["content_index"] = 0
            yield event("content_part.added", part=part | {"text": ""}, **at)
            yield event("output_text.delta", delta=part["text"], logprobs=[], **at)
            yield event("output_text.done", text=part["text"], logprobs=[], **at)
            yield event("content_part.done", part=part, **at)
        else:
            yield event("function_call_arguments.delta", delta=item["arguments"], **at)
            yield event("function_call_arguments.done", arguments=item["arguments"], name=item["name"], **at)
        yield event("output_item.done", output_index=index, item=item)
    done = response_of(answer, chat)
    yield event(done["status"], response=done)


# --- Anthropic's messages ---------------------------------------------------------------------------------------------

MESSAGES_PARAMETERS = {"messages", "system", "max_tokens", "tools", "tool_choice", "stream", "stop_sequences"}
MESSAGES_PARAMETERS |= {"thinking"}
"""Supported parameters; the last one changes nothing here."""
MESSAGES_BLOCKS = dict.fromkeys(("text", "tool_use", "tool_result", "thinking", "redacted_thinking"))


def chat_of_messages(body: bytes, known: Known = ()) -> Chat:
    given = load_json(body)
    check_options(given, MESSAGES_PARAMETERS)
    choice = given.get("tool_choice")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        raise wrong("tool_choice.disable_parallel_tool_use", "true is not supported; leave it out")
    chat = {
        "messages": list(messages_of_messages(given)),
        "tools": each_tool(given.get("tools"), tool_of_messages),
        "tool_choice": choice.get("type") if isinstance(choice, dict) else choice,
        "max_tokens": given.get("max_tokens"),
        "stop": given.get("stop_sequences"),
        "stream": given.get("stream"),
        "model": given.get("model"),
        **{name: given.get(name) for name in wire.IMPOSED},
    }
    return chat_from({name: value for name, value in chat.items() if value is not None}, known)


def tool_of_messages(tool: Any) -> Any:
    """Return a tool as chat completions have it; what is no function of the agent is refused later."""
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        return tool
    function = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def messages_of_messages(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield chat messages: results of tools before the text of the same message, and no thinking."""
    if given.get("system"):
        yield {"role": "system", "content": text_of("system", given["system"])}
    if not isinstance(given.get("messages"), list) or not given["messages"]:
        raise wrong("messages", "must be a list of at least one message")
    for n, message in enumerate(given["messages"]):
        place = f"messages[{n}]"
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise wrong(f"{place}.role", "must be user or assistant")
        texts, calls = list[str](), list[dict[str, Any]]()
        results = list[dict[str, Any]]()
        for number, (kind, block) in enumerate(parts_of(f"{place}.content", message.get("content"), MESSAGES_BLOCKS)):
            part = f"{place}.content[{number}]"
            match kind:
                case "text":
                    texts.append(wire.text_in(part, block))
                case "tool_use":
                    function = {"name": block.get("name"), "arguments": block.get("input")}
                    calls.append({"id": block.get("id"), "function": function})
                case "tool_result":
                    content = text_of(f"{part}.content", block.get("content"))
                    results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        yield from results
        if texts or calls or not results:
            calls_of = {"tool_calls": calls} if calls else {}
            yield {"role": message["role"], "content": "".join(texts)} | calls_of


STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Reasons why a message ended, by `Answer.finish`."""


def message_of(answer: Answer, chat: Chat) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": chat.model,
        "content": blocks_of(answer),
        "stop_reason": "stop_sequence" if answer.stop else STOPS[answer.finish],
        "stop_sequence": answer.stop or None,
        "usage": {"input_tokens": answer.read, "output_tokens": len(answer.ids)},
    }


def blocks_of(answer: Answer) -> list[dict[str, Any]]:
    texts = [{"type": "text", "text": answer.text}] if answer.text else []
    calls = [
        {"type": "tool_use", "id": f"toolu_{answer.number}_{n}", "name": call.name, "input": call.arguments}
        for n, call in enumerate(answer.calls)
    ]
    return [*texts, *calls]


def message_events(answer: Answer, chat: Chat) -> Iterator[bytes]:
    message = message_of(answer, chat)
    begun = {"content": [], "stop_reason": None, "usage": message["usage"] | {"output_tokens": 0}}
    yield named_event("message_start", {"message": message | begun})
    for index, block in enumerate(message["content"]):
        text = block["type"] == "text"
        empty: dict[str, Any] = {"text": ""} if text else {"input": {}}
        delta: dict[str, Any] = {"type": "text_delta", "text": block["text"]} if text else {"type": "input_json_delta"}
        if not text:
            delta["partial_json"] = json.dumps(block["input"], ensure_ascii=False)
        yield named_event("content_block_start", {"index": index, "content_block": block | empty})
        yield named_event("content_block_delta", {"index": index, "delta": delta})
        yield named_event("content_block_stop", {"index": index})
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield named_event("message_delta", {"delta": ended, "usage": {"output_tokens": len(answer.ids)}})
    yield named_event("message_stop", {})


DIALECTS: dict[str, Dialect] = {
    "chat/completions": Dialect(
        wire.chat_of,
        wire.completion,
        wire.chunks,
        wire.KEEP_ALIVE_LINE,
        lambda error: wire.event(error) + wire.STREAM_END,
    ),
    "responses": Dialect(
        chat_of_responses,
        lambda answer, chat: dump_json(response_of(answer, chat)),
        response_events,
        wire.KEEP_ALIVE_LINE,
        lambda error: named_event("error", {"sequence_number": 0, **error["error"]}),
    ),
    "messages": Dialect(
        chat_of_messages,
        lambda answer, chat: dump_json(message_of(answer, chat)),
        message_events,
        named_event("ping", {}),
        lambda error: named_event("error", error),
    ),
}
"""APIs by their path below /v1."""
