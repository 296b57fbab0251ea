"""OpenAI's responses and Anthropic's messages: the same turns, tokens and branches as chat completions."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from slipstream.environments.gateway.dialects import DIALECTS, chat_of_messages, chat_of_responses
from slipstream.environments.gateway.sessions import Refused
from slipstream.records import Rollout
from support.gateways import FUNCTION, LOOK, Babble, sent, serving

TURNS = 6


class Client(NamedTuple):
    """A conversation in one of the APIs."""

    path: str
    begin: dict[str, Any]
    history: str
    """Key of the list that holds the conversation."""
    reply: Callable[[dict[str, Any]], list[Any]]
    """Function from an answer to the entries that an agent appends: the answer, and results or a question."""


def reply_to_chat(answer: dict[str, Any]) -> list[Any]:
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls", [])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls]
    return [message, *(results or [{"role": "user", "content": "And then?"}])]


def reply_to_response(answer: dict[str, Any]) -> list[Any]:
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "seen"} for call in calls]
    return [*answer["output"], *(results or [{"role": "user", "content": "And then?"}])]


def reply_to_message(answer: dict[str, Any]) -> list[Any]:
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "seen"} for call in calls]
    said = {"role": "assistant", "content": answer["content"]}
    return [said, {"role": "user", "content": results or "And then?"}]


QUESTION = {"role": "user", "content": "And?"}
CLIENTS = {
    "chat": Client("chat/completions", {"messages": [QUESTION], "tools": [LOOK]}, "messages", reply_to_chat),
    "responses": Client(
        "responses", {"input": [QUESTION], "tools": [{"type": "function", **FUNCTION}]}, "input", reply_to_response
    ),
    "messages": Client(
        "messages",
        {
            "messages": [QUESTION],
            "max_tokens": 4000,
            "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
        },
        "messages",
        reply_to_message,
    ),
}


def played(client: Client, seed: int, *, stream: bool = False) -> tuple[list[Rollout], list[Any]]:
    """Play some turns; return the lineages, and the answers as sent."""

    async def main() -> tuple[list[Rollout], list[Any]]:
        async with serving() as (_, session, url):
            session.prompt = replace(session.prompt, seed=seed)
            body, answers = {**client.begin, "stream": stream}, []
            for _ in range(TURNS):
                status, answer = await sent(f"{url}/v1/{client.path}", body)
                assert status == 200, answer
                answers.append(answer)
                if stream:
                    break
                body = body | {client.history: [*body[client.history], *client.reply(answer)]}
            return session.rollouts("eos", 1, {}), answers

    return asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["responses", "messages"])
def test_a_conversation_is_one_branch_with_the_tokens_of_chat_completions(name: str, seed: int) -> None:
    (by_chat,), _ = played(CLIENTS["chat"], seed)
    (here,), _ = played(CLIENTS[name], seed)
    assert here.tokens.tolist() == by_chat.tokens.tolist()
    assert here.loss_mask.tolist() == by_chat.loss_mask.tolist()
    assert here.outcome["turns"] == TURNS


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the data of all events; check that each is named by its type."""
    found = []
    for block in text.strip().split("\n\n"):
        kind, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def from_response_stream(events: list[dict[str, Any]]) -> list[Any]:
    """Put the output together from its pieces, and compare it with the last event."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[Any] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                items.append(event["item"])
            case "response.content_part.added":
                items[-1]["content"].append(event["part"])
            case "response.output_text.delta":
                items[-1]["content"][0]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
    assert events[0]["response"]["status"] == "in_progress" and events[-1]["response"]["output"] == items
    return items


def from_message_stream(events: list[dict[str, Any]]) -> list[Any]:
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[-1]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            blocks[-1]["input"] = json.loads(event["delta"]["partial_json"])
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] in ("end_turn", "tool_use", "stop_sequence")
    return blocks


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_holds_the_same_answer(seed: int) -> None:
    _, (whole, *_) = played(CLIENTS["responses"], seed)
    _, (text,) = played(CLIENTS["responses"], seed, stream=True)
    assert from_response_stream(events_of(text)) == whole["output"]
    _, (whole, *_) = played(CLIENTS["messages"], seed)
    _, (text,) = played(CLIENTS["messages"], seed, stream=True)
    assert from_message_stream(events_of(text)) == whole["content"]


def test_an_answer_that_is_cut_says_so() -> None:
    async def main() -> None:
        async with serving() as (_, _, url):
            short = CLIENTS["responses"].begin | {"max_output_tokens": 1}
            _, answer = await sent(f"{url}/v1/responses", short)
            assert answer["status"] == "incomplete" and answer["incomplete_details"]["reason"] == "max_output_tokens"
            _, answer = await sent(f"{url}/v1/messages", CLIENTS["messages"].begin | {"max_tokens": 1})
            assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 1

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_a_message_and_is_named(stream: bool) -> None:
    async def main() -> None:
        policy = Babble()
        policy.says = ["I look. Observation: a door"]
        async with serving(policy) as (_, _, url):
            body = CLIENTS["messages"].begin | {"stop_sequences": ["Observation:"], "stream": stream}
            _, answer = await sent(f"{url}/v1/messages", body)
        if stream:
            (ended,) = [each for each in events_of(answer) if each["type"] == "message_delta"]
            assert from_message_stream(events_of(answer)) == [{"type": "text", "text": "I look."}]
            answer = ended["delta"]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Observation:")

    asyncio.run(main())


def test_requests_are_translated_with_instructions_reasoning_and_thinking_in_their_places() -> None:
    given: dict[str, Any] = {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
            {"type": "reasoning", "summary": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I do."}]},
            {"type": "function_call", "name": "look", "arguments": '{"a": 1}', "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "seen"}]},
        ],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "store": False,
    }
    expected = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "I do.",
            "tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "seen"},
    ]
    assert chat_of_responses(json.dumps(given).encode()).messages == expected
    given = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I do."},
                    {"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "seen"}]},
        ],
        "max_tokens": 9,
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    }
    assert chat_of_messages(json.dumps(given).encode()).messages == expected


def test_results_stand_in_the_order_of_their_calls() -> None:
    """An agent may send them as its tools finish, since each names its call."""
    order = ["b", "c", "a"]
    calls = [{"id": each, "function": {"name": each, "arguments": "{}"}} for each in "abc"]
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    results = [{"role": "tool", "tool_call_id": each, "content": each} for each in order]
    items = [{"type": "function_call", "call_id": each, "name": each, "arguments": "{}"} for each in "abc"]
    outputs = [{"type": "function_call_output", "call_id": each, "output": each} for each in order]
    blocks = [{"type": "tool_use", "id": each, "name": each, "input": {}} for each in "abc"]
    told = [{"type": "tool_result", "tool_use_id": each, "content": each} for each in order]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": blocks}]
    for path, given in {
        "chat/completions": {"messages": [*chat, *results]},
        "responses": {"input": [{"role": "user", "content": "?"}, *items, *outputs]},
        "messages": {"messages": [*messages, {"role": "user", "content": told}], "max_tokens": 9},
    }.items():
        found = DIALECTS[path].parse(json.dumps(given).encode(), ()).messages
        assert [each["content"] for each in found if each["role"] == "tool"] == ["a", "b", "c"], path


REFUSED: list[tuple[str, Any, str]] = [
    ("responses", {"input": "?", "previous_response_id": "resp_1"}, "no conversation is stored: send all of it"),
    ("responses", {"input": "?", "text": {"format": {"type": "json_schema"}}}, "a grammar changes what"),
    ("responses", {"input": "?", "background": True}, "background: is not supported"),
    ("responses", {"input": "?", "tools": [{"type": "web_search"}]}, "tools[0]: must be a function with a name"),
    ("responses", {"input": []}, "input: must be text or a list of at least one item"),
    ("responses", {"input": [{"type": "image"}]}, 'input[0].type: is "image", but only message'),
    ("responses", {"input": "?", "something_new": 1}, "something_new: 1 is not supported"),
    (
        "messages",
        {"messages": [QUESTION], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_choice.disable_parallel_tool_use: true is not supported; leave it out",
    ),
    ("messages", {"messages": [QUESTION], "stop_sequences": [""]}, "stop: must be text or a list of texts"),
    (
        "messages",
        {"messages": [QUESTION], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0]: must be a function with a name",
    ),
    ("messages", {"messages": [{"role": "tool", "content": ""}]}, "messages[0].role: must be user or assistant"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 'type: is "image", but only text'),
    ("messages", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content: must be text or a list"),
    ("messages", {"messages": 3}, "messages: must be a list of at least one message"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "messages[0].content[0].text: must be text",
    ),
    ("responses", {"input": "?", "instructions": ["be kind"]}, "instructions: must be text"),
    ("responses", {"input": "?", "text": {"format": {"type": "json_schema"}}}, "text.format: "),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text: must be text",
    ),
    ("messages", [], "the body is not a JSON object"),
]


@pytest.mark.parametrize(("path", "body", "line"), REFUSED)
def test_what_cannot_be_served_is_refused_by_its_name(path: str, body: Any, line: str) -> None:
    with pytest.raises(Refused) as refused:
        DIALECTS[path].parse(json.dumps(body).encode(), ())
    assert refused.value.status == 400 and line in str(refused.value)
