"""JSON of the chat API: parse requests, refuse options that are not supported, and format answers."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import numpy as np

from slipstream.environments import Message
from slipstream.environments.chat.tool_calls import finite
from slipstream.environments.gateway.sessions import Answer, Refused
from slipstream.errors import first_line
from slipstream.records import Ints

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
UNSUPPORTED: dict[str, Any] = {
    name: value
    for value, names in (
        (0, "presence_penalty frequency_penalty top_logprobs min_tokens"),
        (1, "n repetition_penalty"),
        (False, "logprobs ignore_eos"),
        (True, "parallel_tool_calls"),
        ([], "stop_token_ids"),
        ({}, "logit_bias chat_template_kwargs"),
        ({"type": "text"}, "response_format format"),
    )
    for name in names.split()
}
"""Parameters that are not supported, with the only accepted value: the default. Null is accepted for any parameter."""
INSTEAD = {
    "n": "send the request n times",
    "logprobs": "/inference/v1/generate returns them",
    "chat_template_kwargs": "write data.template_args in the run's config",
    **dict.fromkeys(("response_format", "format"), "a grammar changes what the student is learning from"),
    "previous_response_id": "no conversation is stored: send all of it",
    "conversation": "no conversation is stored: send all of it",
}
"""Advice in the refusal of a parameter."""
HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "request_id", "priority", "cache_salt", "stream_options", "model"),
}
"""Parameters that are accepted and do not change what is sampled."""
JSON = json.JSONDecoder(parse_float=finite, parse_constant=finite)
COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
IMPOSED = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Sampling parameters that the run's config sets; values of an agent are ignored."""
IGNORED = dict.fromkeys(IMPOSED, "the [sampler] section sets how to sample")
IGNORED["tool_choice"] = "the student decides whether it calls a tool, and which one"
"""Reason why a value of an agent is ignored."""
CHAT_PARAMETERS = {"messages", "tools", "tool_choice", "max_completion_tokens", "max_tokens", "stream", "stop"}
GENERATE_PARAMETERS = {"token_ids", "sampling_params", "stream"}
SAMPLING_PARAMETERS = {"max_tokens", "logprobs", "stop_token_ids", "detokenize"}
SAMPLING_PARAMETERS |= {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
"""Supported parameters of each kind of request, and of `sampling_params`; some affect only text and are ignored."""
MAX_REQUEST_TOKENS = 1 << 22
"""Maximum number of tokens in a request, and maximum of its token limit."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    messages: list[Message]
    known: list[tuple[Any, Message]]
    """Messages as sent and as parsed, up to the first one whose arguments were not sent as text."""
    tools: list[dict[str, Any]]
    most: int | None
    model: str
    stream: bool
    usage: bool
    """True if a stream must end with the token usage."""
    imposed: tuple[str, ...]
    """Names of parameters in the request that are ignored, of IGNORED."""
    stops: tuple[str, ...] = ()
    """Sequences after which the student's turn is cut."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    ids: Ints
    most: int | None
    stops: list[int]
    imposed: tuple[str, ...]


def wrong(param: str, why: str) -> Refused:
    return Refused(400, f"{param}: {why}", code="invalid_value", param=param)


def load_json(body: bytes | str) -> dict[str, Any]:
    try:
        found = JSON.decode(body if isinstance(body, str) else body.decode(json.detect_encoding(body), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {first_line(error)}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise Refused(400, "the body is not a JSON object", code="invalid_json")
    return found


def check_options(given: dict[str, Any], served: set[str], section: str = "") -> tuple[str, ...]:
    """Refuse unsupported parameters that differ from their default; return the names of ignored sampling parameters."""
    for name, value in given.items():
        nothing = UNSUPPORTED.get(name)
        if value is None or name in served or name in HARMLESS or name in IMPOSED:
            continue
        if nothing is None or value != nothing or isinstance(value, bool) != isinstance(nothing, bool):
            instead = INSTEAD.get(name, "leave it out")
            raise wrong(f"{section}{name}"[:100], f"{json.dumps(value)[:60]} is not supported; {instead}")
    return tuple(name for name in IMPOSED if given.get(name) is not None)


# --- requests ---------------------------------------------------------------------------------------------------------


def chat_of(body: bytes, known: Sequence[tuple[Any, Message]] = ()) -> Chat:
    """Parse a request; its messages up to the first one that differs from those in `known` need no parsing."""
    return chat_from(load_json(body), known)


def chat_from(given: dict[str, Any], known: Sequence[tuple[Any, Message]] = ()) -> Chat:
    """Read the fields of a request of chat completions."""
    imposed = check_options(given, CHAT_PARAMETERS)
    choice = given.get("tool_choice")
    if choice not in (None, "auto", "none"):
        imposed += ("tool_choice",)
    stream = given.get("stream", False)
    if not isinstance(stream, bool | None):
        raise wrong("stream", "must be true or false")
    options = given.get("stream_options")
    found = _messages(given.get("messages"), known)
    return Chat(
        messages=[message for _, message in found],
        known=list(takewhile(_sent_as_text, found)),
        tools=[] if choice == "none" else _tools(given.get("tools")),
        most=_most(given, "max_completion_tokens", "max_tokens"),
        model=given["model"] if isinstance(given.get("model"), str) else "student",
        stream=bool(stream),
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        imposed=imposed,
        stops=_stops(given.get("stop")),
    )


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise wrong("stop", "must be text or a list of texts, none of them empty")
    return tuple(stops)


def tokens_of(body: bytes) -> Tokens:
    given = load_json(body)
    check_options(given, GENERATE_PARAMETERS)
    ids, sampling = given.get("token_ids"), given.get("sampling_params") or {}
    if (
        not isinstance(ids, list)
        or not ids
        or len(ids) > MAX_REQUEST_TOKENS
        or not all(type(each) is int for each in ids)
    ):
        raise wrong("token_ids", "must be a list of at least one token id")
    if max(ids) >= 1 << 31 or min(ids) < 0:
        raise wrong("token_ids", "must be a list of token ids from 0 to 2^31 - 1")
    if not isinstance(sampling, dict):
        raise wrong("sampling_params", "must be an object")
    imposed = check_options(sampling, SAMPLING_PARAMETERS, "sampling_params.")
    if sampling.get("logprobs") not in (None, 0, 1):
        raise wrong("sampling_params.logprobs", "must be 1: the answer has the log-prob of each sampled token")
    stops = sampling.get("stop_token_ids") or []
    if not isinstance(stops, list) or not all(type(each) is int for each in stops):
        raise wrong("sampling_params.stop_token_ids", "must be a list of token ids")
    if given.get("stream") not in (None, False):
        raise wrong("stream", "is not supported here; leave it out")
    return Tokens(ids=np.array(ids, np.int32), most=_most(sampling, "max_tokens"), stops=stops, imposed=imposed)


def check_stops(requested: Collection[int], stop_ids: Collection[int]) -> None:
    """Refuse stop tokens other than those that always end a turn of the student."""
    if not set(requested) <= set(stop_ids):
        raise wrong("sampling_params.stop_token_ids", f"the student's turns end only at {sorted(stop_ids)}")


def _most(given: dict[str, Any], *names: str) -> int | None:
    for name in names:
        if (most := given.get(name)) is not None:
            if type(most) is not int or most < 1:
                raise wrong(name, "must be a number of tokens, at least 1")
            return int(min(most, MAX_REQUEST_TOKENS))
    return None


def _messages(given: Any, known: Sequence[tuple[Any, Message]]) -> list[tuple[Any, Message]]:
    """Return the messages as sent and as parsed."""
    if not isinstance(given, list) or not given:
        raise wrong("messages", "must be a list of at least one message")
    found = [pair for _, pair in takewhile(lambda both: both[0] == both[1][0], zip(given, known, strict=False))]
    found += [(each, _message(f"messages[{n}]", each)) for n, each in enumerate(given[len(found) :], len(found))]
    if found[-1][1]["role"] == "assistant":
        raise wrong(f"messages[{len(found) - 1}]", "must not be the assistant's: a message is not continued")
    return _in_order_of_calls(found)


def _in_order_of_calls(found: Sequence[tuple[Any, Message]]) -> list[tuple[Any, Message]]:
    """Sort the results after each turn by the turn's calls: agents may send them as they finish, named by id."""
    in_order, place = list[tuple[Any, Message]](), dict[str, int]()
    for is_tool, run in groupby(found, lambda pair: bool(pair[1]["role"] == "tool")):
        some = list(run)
        if is_tool:
            some.sort(key=lambda pair: place.get(str(pair[0].get("tool_call_id")), len(place)))
        else:
            place = {str(call.get("id")): n for n, call in enumerate(some[-1][0].get("tool_calls") or [])}
        in_order += some
    return in_order


def _sent_as_text(message: tuple[Any, Message]) -> bool:
    """Return true if equal messages have equal arguments: objects with 1 and with true count as equal in Python."""
    sent, parsed = message
    return "tool_calls" not in parsed or all(isinstance(c["function"]["arguments"], str) for c in sent["tool_calls"])


def _message(place: str, given: Any) -> Message:
    if not isinstance(given, dict):
        raise wrong(place, "must be an object")
    role = ROLES.get(given["role"]) if isinstance(given.get("role"), str) else None
    if role is None:
        raise wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}")
    calls = _calls(f"{place}.tool_calls", given.get("tool_calls")) if role == "assistant" else []
    message: Message = {"role": role, "content": _content(f"{place}.content", given.get("content"))}
    if role == "tool" and isinstance(given.get("name"), str):
        message["name"] = given["name"]
    return message | ({"tool_calls": calls} if calls else {})


def _content(place: str, given: Any) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise wrong(place, "must be text or a list of parts")
    texts = []
    for n, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise wrong(f"{place}[{n}].type", f"is {json.dumps(kind)[:60]}, but only text is supported")
        texts.append(text_in(f"{place}[{n}]", part))
    return "".join(texts)


def text_in(place: str, part: Mapping[str, Any]) -> str:
    """Return the text of a part of a message."""
    if not isinstance(text := part.get("text"), str):
        raise wrong(f"{place}.text", "must be text")
    return text


def _functions(place: str, given: Any, fault: str) -> list[dict[str, Any]]:
    """Return the named function in each entry of a list; refuse other entries for the reason `fault`."""
    if not isinstance(given, list | None):
        raise wrong(place, "must be a list")
    functions = list[dict[str, Any]]()
    for n, each in enumerate(given or []):
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"{place}[{n}]", fault)
        functions.append(function)
    return functions


def _calls(place: str, given: Any) -> list[dict[str, Any]]:
    calls = []
    for n, function in enumerate(_functions(place, given, "has no function with a name")):
        arguments = function.get("arguments")
        try:
            arguments = load_json(arguments) if isinstance(arguments, str) else arguments
        except Refused:
            arguments = None
        if not isinstance(arguments, dict):
            raise wrong(f"{place}[{n}].function.arguments", "must be a JSON object")
        calls.append({"function": {"name": function["name"], "arguments": arguments}})
    return calls


def _tools(given: Any) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = given or []
    for n, function in enumerate(_functions("tools", given, "must be a function with a name")):
        parameters = {} if function.get("parameters") is None else function["parameters"]
        properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
        if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
            raise wrong(f"tools[{n}].function.parameters", "must be a JSON schema of an object")
    return tools


# --- answers ----------------------------------------------------------------------------------------------------------


def dump_json(found: Any) -> bytes:
    return COMPACT.encode(found).encode("utf-8", "replace")


def completion(answer: Answer, chat: Chat) -> bytes:
    return dump_json(
        {
            **_head(answer, chat, "chat.completion"),
            "choices": [{"index": 0, "message": _message_of(answer), "logprobs": None, "finish_reason": answer.finish}],
            "usage": _usage(answer),
        }
    )


def chunks(answer: Answer, chat: Chat) -> Iterator[bytes]:
    """Yield the completion as a stream of events; one event holds the whole message, which is already complete."""
    head = _head(answer, chat, "chat.completion.chunk")
    message = _message_of(answer)
    calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", ()))]
    delta = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
    for each, finish in ((delta, None), ({}, answer.finish)):
        yield event({**head, "choices": [{"index": 0, "delta": each, "logprobs": None, "finish_reason": finish}]})
    if chat.usage:
        yield event({**head, "choices": [], "usage": _usage(answer)})
    yield STREAM_END


STREAM_END = b"data: [DONE]\n\n"
KEEP_ALIVE_LINE = b": the answer is being written\n\n"
"""Comment line that keeps a stream alive; clients ignore comments."""


def event(found: Any) -> bytes:
    return b"data: " + dump_json(found) + b"\n\n"


def generation(answer: Answer) -> bytes:
    """Return an answer's token ids as JSON, and the log-prob of each id under the distribution that sampled it."""
    rows = zip(answer.ids.tolist(), answer.logp.tolist(), strict=True)
    logprobs = [{"token": f"token_id:{id}", "logprob": logp, "bytes": None, "top_logprobs": []} for id, logp in rows]
    return dump_json(
        {
            "request_id": f"generate-{answer.number}",
            "choices": [
                {
                    "index": 0,
                    "token_ids": answer.ids.tolist(),
                    "logprobs": {"content": logprobs},
                    "finish_reason": "length" if answer.finish == "length" else "stop",
                }
            ],
            "usage": _usage(answer),
        }
    )


def models(name: str, longest: int) -> bytes:
    card = {"id": name, "object": "model", "created": 0, "owned_by": "slipstream", "max_model_len": longest}
    return dump_json({"object": "list", "data": [card]})


def error(refused: Refused) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def _head(answer: Answer, chat: Chat, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": 0, "model": chat.model}


def _message_of(answer: Answer) -> dict[str, Any]:
    if not answer.calls:
        return {"role": "assistant", "content": answer.text}
    calls = [
        {
            "id": f"call_{answer.number}_{n}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for n, call in enumerate(answer.calls)
    ]
    return {"role": "assistant", "content": answer.text or None, "tool_calls": calls}


def _usage(answer: Answer) -> dict[str, Any]:
    sampled = len(answer.ids)
    return {"prompt_tokens": answer.read, "completion_tokens": sampled, "total_tokens": answer.read + sampled}
