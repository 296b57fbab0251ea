"""The gateway over HTTP: agents in any language, at any speed, with any manners."""

import asyncio
import gc
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.environments import Message, Reply
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway import server, web
from slipstream.environments.gateway.agents import Agents
from slipstream.environments.gateway.external_agents import ExternalAgents
from slipstream.environments.gateway.server import Server
from slipstream.environments.gateway.sessions import Refused, Session
from slipstream.protocols import Sampling
from slipstream.records import Ints, Prompt, Rollout, derive_seed, unfinished
from support import tabular_engines as toy
from support.gateways import ASKED, LIMITS, LOOK, PROMPT, RENDERER, VOCABULARY, Babble, post, sent, serving
from support.toy_episodes import WIDE, Numbers, World

TOKEN = {"authorization": "Bearer the token"}
FEW = replace(LIMITS, turns=9, turn_tokens=4)


def chat(url: str) -> str:
    return f"{url}/v1/chat/completions"


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_connection_that_an_agent_keeps_open_is_closed_with_the_event_loop() -> None:
    made = Server("student", say=lambda line: None)

    async def main() -> socket.socket:
        await made.start()
        client = socket.create_connection(made.socket.getsockname())
        while not made.listening.server_state.connections:  # type: ignore[union-attr]
            await asyncio.sleep(0)
        return client

    with asyncio.run(main()) as client:
        client.settimeout(10)
        assert client.recv(1) == b"", "the server has ended the connection"
        made.close()
    gc.collect()  # an open transport would be reported


def test_full_garbage_collections_are_rare_while_a_server_runs() -> None:
    """One among a million objects stops all calls for 0.3 s. Each call leaves about 25 objects in its session."""
    before = gc.get_threshold()

    async def main() -> None:
        async with serving() as (made, _, url):
            assert gc.get_threshold() == server.SERVER_COLLECTIONS
            await made.start()
            assert (await sent(chat(url), ASKED))[0] == 200
        assert gc.get_threshold() == before

    asyncio.run(main())


# --- what is answered -------------------------------------------------------------------------------------------------


def test_a_completion_and_the_same_as_a_stream() -> None:
    async def main() -> None:
        for seed in range(5):
            async with serving() as (_, session, url):
                session.prompt = replace(session.prompt, seed=seed)
                body = ASKED | {"tools": [LOOK], "model": "gpt"}
                status, whole = await sent(chat(url), body)
                assert status == 200 and whole["object"] == "chat.completion" and whole["model"] == "gpt"
                (choice,) = whole["choices"]
                usage = whole["usage"]
                assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
                assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in choice["message"] else "stop")
            async with serving() as (_, session, url):
                session.prompt = replace(session.prompt, seed=seed)
                streamed = {"stream": True, "stream_options": {"include_usage": True}}
                status, text = await sent(chat(url), body | streamed)
                first, last, cost = events(text)
                delta = first["choices"][0]["delta"]
                for n, call in enumerate(delta.get("tool_calls", ())):
                    assert call.pop("index") == n
                assert delta == choice["message"] and cost["usage"] == usage
                assert last["choices"][0]["finish_reason"] == choice["finish_reason"]

    asyncio.run(main())


def test_ids_come_back_with_the_log_probs_of_what_drew_them() -> None:
    async def main() -> None:
        async with serving(policy := Babble()) as (_, session, url):
            body = {"token_ids": PROMPT.tokens.tolist(), "sampling_params": {"max_tokens": 6, "temperature": 0.1}}
            status, said = await sent(f"{url}/inference/v1/generate", body)
            (choice,) = said["choices"]
            (row,) = session.rollouts("eos", 1, {})
            assert status == 200 and choice["token_ids"] == row.tokens.tolist() == policy.calls[0][1].tolist()
            assert [each["logprob"] for each in choice["logprobs"]["content"]] == row.logp.tolist()
            status, said = await sent(f"{url}/v1/models", None, method="GET")
            assert status == 200 and said["data"][0]["max_model_len"] == len(PROMPT.tokens) + 4000

    asyncio.run(main())


def test_how_to_draw_is_not_the_agents_to_say_and_a_person_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with serving(policy := Babble()) as (made, _, url):
            made.say = server.tell
            for n in range(2):
                await sent(chat(url), ASKED | {"temperature": 0.1, "max_tokens": 5 + n})
            assert [sampling.temperature for _, sampling in policy.asked] == [1.0, 1.0]
            assert [sampling.max_tokens for _, sampling in policy.asked] == [5, 6]

    asyncio.run(main())
    assert capsys.readouterr().err == (
        "gateway: an agent sends temperature, which is ignored: the [sampler] section sets how to sample\n"
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_the_student_chooses_its_tools_though_an_agent_asks_for_one(choice: Any, capsys: Any) -> None:
    async def main() -> None:
        async with serving() as (made, _, url):
            made.say, body = server.tell, ASKED | {"tools": [LOOK]}
            answers = [await sent(chat(url), body | {"tool_choice": each}) for each in (choice, choice)]
        async with serving() as (_, _, url):
            free = [await sent(chat(url), body) for _ in range(2)]
        assert answers == free and answers[0][0] == 200

    asyncio.run(main())
    assert capsys.readouterr().err == (
        "gateway: an agent sends tool_choice, which is ignored: the student decides whether it calls a tool, and which "
        "one\n"
    )


UNSERVED: dict[str, Any] = {
    "n": 2,
    "logprobs": True,
    "top_logprobs": 3,
    "stop_token_ids": [5],
    "response_format": {"type": "json_object"},
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 100},
    "min_tokens": 5,
    "ignore_eos": True,
    "guided_json": {},
    "guided_choice": ["a", "b"],
    "structured_outputs": {"choice": ["a"]},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "parallel_tool_calls": False,
    "something_new": 1,
}
REFUSED: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "the body is not JSON"),
    "too deep": (b"[" * 100_000, "the body is not JSON"),
    "a list": ([], "the body is not a JSON object"),
    "no messages": ({}, "messages: must be a list of at least one message"),
    "a role": ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role: must be one of"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        'messages[0].content[0].type: is "image_url", but only text is supported',
    ),
    "a beginning": (
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So"}]},
        "messages[1]: must not be the assistant's",
    ),
    "arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments: must be a JSON object",
    ),
    "infinity": (b'{"messages": [], "metadata": 1e400}', "the body is not JSON: 1e400 is no finite number"),
    "NaN": (b'{"messages": [], "metadata": NaN}', "the body is not JSON: NaN is no finite number"),
    "infinity in a call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"n": 1e400}'}}]}]},
        "messages[0].tool_calls[0].function.arguments: must be a JSON object",
    ),
    **{
        name: (ASKED | {name: value}, f"{name}: {json.dumps(value)} is not supported; ")
        for name, value in UNSERVED.items()
    },
    "an empty stop": (ASKED | {"stop": ["end", ""]}, "stop: must be text or a list of texts, none of them empty"),
    "a stop that is no text": (ASKED | {"stop": [3]}, "stop: must be text or a list of texts, none of them empty"),
    "a tool": (ASKED | {"tools": [{"function": {}}]}, "tools[0]: must be a function with a name"),
    "no tokens": (ASKED | {"max_tokens": 0}, "max_tokens: must be a number of tokens, at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_its_name(name: str) -> None:
    body, says = REFUSED[name]

    async def main() -> None:
        async with serving(policy := Babble()) as (_, _, url):
            status, said = await sent(chat(url), body)
            assert status == 400 and said["error"]["type"] == "invalid_request_error"
            assert said["error"]["message"].startswith(says) and "\n" not in said["error"]["message"]
            assert not policy.asked and (await sent(chat(url), ASKED))[0] == 200

    asyncio.run(main())


def test_what_asks_for_nothing_or_changes_nothing_is_served() -> None:
    """Requests in the form in which mini-swe-agent, verifiers and OpenAI's clients send them."""
    harmless = {
        "n": 1,
        "logprobs": False,
        "stop": None,
        "stop_token_ids": [],
        "response_format": {"type": "text"},
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "chat_template_kwargs": {},
        "parallel_tool_calls": True,
        "reasoning_effort": None,
        "guided_json": None,
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "seed": 3,
        "temperature": 0.0,
    }
    sampling = {"logprobs": 1, "skip_special_tokens": False, "stop_token_ids": sorted(RENDERER.stop_ids)[:1]}

    async def main() -> None:
        async with serving() as (_, _, url):
            assert (await sent(chat(url), ASKED | harmless))[0] == 200
            where, body = f"{url}/inference/v1/generate", {"model": "x", "token_ids": PROMPT.tokens.tolist()}
            assert (await sent(where, body | {"sampling_params": sampling}))[0] == 200
            for more, says in (
                ({"stop_token_ids": [5]}, "sampling_params.stop_token_ids: the student's turns end only at ["),
                ({"min_tokens": 5}, "sampling_params.min_tokens: 5 is not supported"),
                ({"logprobs": 5}, "sampling_params.logprobs: must be 1"),
            ):
                status, said = await sent(where, body | {"sampling_params": more})
                assert status == 400 and said["error"]["message"].startswith(says), said

    asyncio.run(main())


def test_paths_that_are_not_there_are_told_what_is() -> None:
    paths = "v1/chat/completions", "v1/responses", "v1/messages", "inference/v1/generate"
    served = "".join(f"POST /sessions/{{session}}/{path}; " for path in paths)

    async def main() -> None:
        async with serving() as (made, _, url):
            name = url.rpartition("/")[2]
            assert len(name) == 32
            for path, method, status, says in (
                (
                    "/",
                    "GET",
                    404,
                    f"nothing is served at GET /; the routes are {served}GET /sessions/{{session}}/v1/models",
                ),
                ("/sessions", "POST", 404, "nothing is served at POST /sessions; the routes are POST"),
                ("/sessions/x/v1/models", "GET", 404, "there is no such session"),
                (f"/sessions/{name}/v1/embeddings", "POST", 404, f"/v1/embeddings; the routes are {served}"),
                (f"/sessions/{name}/v1/models", "POST", 405, f"/v1/models; the routes are {served}"),
            ):
                got, said = await sent(f"{made.url}{path}", b"{}", method=method)
                assert (got, says in said["error"]["message"]) == (status, True), said
            made.shut(name)
            got, said = await sent(chat(url), ASKED)
            assert got == 410 and said["error"]["message"] == "this session is closed"

    asyncio.run(main())


def test_pages_of_browsers_and_names_of_other_machines_are_refused() -> None:
    async def main() -> None:
        async with serving() as (made, _, url):
            port = made.url.rpartition(":")[2]
            for headers, status in (
                ({"host": f"localhost:{port}"}, 200),
                ({"host": "[::1]:8008"}, 200),
                ({"host": "127.0.0.1"}, 200),
                ({"host": "evil.example"}, 403),
                ({"host": f"127.0.0.1.evil.example:{port}"}, 403),
                ({"host": ""}, 403),
                ({"origin": "http://evil.example"}, 403),
                ({"origin": "null"}, 403),
                ({"origin": made.url}, 403),
            ):
                got, said = await sent(f"{url}/v1/models", None, method="GET", headers=headers)
                assert got == status, (headers, said)

    asyncio.run(main())


# --- large requests ---------------------------------------------------------------------------------------------------


def test_a_message_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act like an agent whose history has grown too long: it stops, and the session is at its limit."""

    def never(*_: Any) -> Any:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(RENDERER, "open", never)

    async def main() -> None:
        async with serving() as (_, session, url):
            most = session.max_tokens * RENDERER.longest
            assert RENDERER.longest < 50 and session.max_bytes == most
            call = {"function": {"name": "f", "arguments": json.dumps({"a": "x" * most})}}
            for n, body in enumerate(
                (
                    {"messages": [{"role": "user", "content": "x" * (most + 1)}]},
                    {"messages": [{"role": "user", "content": "ä" * (most // 2 + 1)}]},
                    {"messages": [{"role": "user", "content": "x" * 1000}] * (most // 1000 + 1)},
                    {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "?"}]},
                    {"messages": [{"role": "tool", "name": "x" * (most + 1), "content": "?"}]},
                    ASKED | {"tools": [LOOK | {"more": "x" * most}]},
                    {
                        "messages": [{"role": "user", "content": "x" * (server.MAX_OVERHEAD + 6 * most)}]
                    },  # not even read
                )
            ):
                session.stopped = None
                status, said = await sent(chat(url), body)
                assert status == (413 if n == 6 else 400) and said["error"]["code"] == "context_length_exceeded", said
                assert session.stopped == "length"

    asyncio.run(main())


def test_a_body_that_is_too_large_is_refused_as_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 1000)

    async def main() -> None:
        async with serving() as (made, _, url):
            got, said = await sent(chat(url), b" " * 2000)
            assert got == 413 and said["error"]["message"].endswith("the body has more than 1000 bytes")
            path = chat(url).removeprefix(made.url).encode()
            head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            chunk = b"200\r\n" + b" " * 512 + b"\r\n"
            found = await asyncio.to_thread(raw, made, head, *[chunk] * 20, b"0\r\n\r\n")
            assert found.startswith(b"HTTP/1.1 413 ")

    asyncio.run(main())


def test_while_a_large_request_is_tokenised_everybody_else_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight large ones, one after the other in one thread. Those that wait when their session ends are not begun."""
    entered, go_on = threading.Event(), threading.Event()
    opens, threads = RENDERER.open, set[threading.Thread]()

    def slow(messages: Sequence[Message], tools: Any = ()) -> Ints:
        if len(messages[0]["content"]) > 10_000:
            threads.add(threading.current_thread())
            entered.set()
            assert go_on.wait(60)
        return opens(messages, tools)

    monkeypatch.setattr(RENDERER, "open", slow)

    async def main() -> None:
        async with serving() as (_, session, url):
            large = {"messages": [{"role": "user", "content": "word " * 20_000}]}
            session.sampling = replace(session.sampling, max_tokens=40_000)
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
            calls = [asyncio.create_task(sent(chat(url), large)) for _ in range(8)]
            assert await asyncio.to_thread(entered.wait, 60)
            assert (await sent(chat(url), ASKED))[0] == 200 and not any(call.done() for call in calls)
            session.close()
            go_on.set()
            assert [(await call)[0] for call in calls] == [410] * 8
        assert len(threads) == 1 and threading.main_thread() not in threads

    asyncio.run(main())


# --- limits -----------------------------------------------------------------------------------------------------------


def test_limits_are_bad_requests_also_where_a_stream_was_asked_for() -> None:
    async def main() -> None:
        async with serving(limits=replace(LIMITS, turns=1)) as (_, session, url):
            assert (await sent(chat(url), ASKED))[0] == 200
            for more in ({}, {"stream": True}):
                status, said = await sent(chat(url), ASKED | more | {"max_tokens": 7})
                assert status == 400 and said["error"]["code"] == "context_length_exceeded"
            assert session.stopped == "turns"

    asyncio.run(main())


# --- bad manners ------------------------------------------------------------------------------------------------------


def raw(made: Server, *parts: bytes, wait: float = 0.0) -> bytes:
    """Return the answer up to its end."""
    host, port = made.socket.getsockname()
    with socket.create_connection((host, port), timeout=20) as connected:
        for part in parts:
            connected.sendall(part)
            time.sleep(wait)
        found = b""
        with suppress(ConnectionResetError):  # what it sent was not read to the end
            while part := connected.recv(1 << 16):
                found += part
        return found


JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "tools",
    "n",
    "max_tokens",
    "stream",
    "tool_choice",
    "stop",
    "token_ids",
    "sampling_params",
    "model",
    "input",
    "instructions",
    "text",
    "system",
    "stop_sequences",
]


@settings(max_examples=240, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=4),
    st.lists(
        st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "name", "type", "output"]), JUNK | st.just("user")
        ),
        max_size=3,
    ),
    st.sampled_from(["v1/chat/completions", "v1/responses", "v1/messages", "inference/v1/generate"]),
)
def test_no_request_is_answered_by_a_defect(given: Any, messages: Any, path: str) -> None:
    async def main() -> None:
        session = Session(Babble(), RENDERER, PROMPT, Sampling(max_tokens=400), 0, LIMITS, VOCABULARY)
        made = Server("student", say=lambda line: None)
        app: Any = httpx2.ASGITransport(made.app())
        try:
            async with httpx2.AsyncClient(transport=app, base_url="http://localhost") as client:
                url = f"/sessions/{made.open(session)}/{path}"
                for body in (given, ASKED | given, given | {"messages": messages, "input": messages}):
                    answer = await client.post(url, content=json.dumps(body).encode())
                    assert answer.status_code == 200 or (400 <= answer.status_code < 500 and answer.json()["error"])
        finally:
            made.close()

    asyncio.run(main())


def test_who_is_slow_or_speaks_no_http_is_told_and_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "BODY_TIMEOUT", 0.5)

    async def main() -> None:
        async with serving() as (made, _, url):
            path = f"POST {chat(url).removeprefix(made.url)} HTTP/1.1\r\nHost: localhost\r\n".encode()
            sends = {
                "a body that never ends": (path + b"Content-Length: 9\r\n\r\nabc", b"HTTP/1.1 408"),
                "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", b"HTTP/1.1 400"),
                "a negative length": (path + b"Content-Length: -1\r\n\r\n", b"HTTP/1.1 400"),
            }
            for said, answer in sends.values():
                assert (await asyncio.to_thread(raw, made, said))[:12] == answer
            long = await asyncio.to_thread(raw, made, b"GET /" + b"a" * 200_000)
            assert long[:12] in (b"", b"HTTP/1.1 400")
            assert (await sent(chat(url), ASKED))[0] == 200

    asyncio.run(main())


def test_connections_that_say_nothing_keep_nobody_from_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_CONNECTIONS", 3)

    async def main() -> None:
        async with serving(policy := Babble()) as (made, session, url):
            policy.hold = asyncio.Event()
            call = asyncio.create_task(sent(chat(url), ASKED))
            while not session.running:
                await asyncio.sleep(0.01)
            with ExitStack() as stack:
                for _ in range(10):
                    silent = stack.enter_context(socket.create_connection(made.socket.getsockname(), timeout=20))
                    silent.sendall(b"POST /sess")
                for _ in range(3):
                    assert (await sent(f"{url}/v1/models", None, method="GET"))[0] == 200
                policy.hold.set()
                assert (await call)[0] == 200

    asyncio.run(main())


def test_a_burst_of_connections_stays_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are accepted in one step of the event loop. Idle ones that were answered go first, then the oldest silent."""
    monkeypatch.setattr(web, "MAX_CONNECTIONS", 4)

    async def main() -> None:
        async with serving(policy := Babble()) as (made, session, url):
            assert made.listening is not None
            here = made.listening.server_state.connections
            policy.hold = asyncio.Event()
            call = asyncio.create_task(sent(chat(url), ASKED))
            while not session.running:
                await asyncio.sleep(0.01)
            with ExitStack() as stack:
                address = made.socket.getsockname()
                clients = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(30)]
                ports = [client.getsockname()[1] for client in clients]
                while len(here) < 4 or ports[-1] not in {each.client[1] for each in here}:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
                newest = {each.client[1] for each in here} & set(ports)  # type: ignore[union-attr]
                assert len(here) == 4 and newest == set(ports[-3:])
                policy.hold.set()
                assert (await call)[0] == 200

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["fails", "session", "server"])
def test_a_stream_whose_client_has_gone_ends_in_silence(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_INTERVAL", 0.01)

    class Failing(Babble):
        async def generate(self, *given: Any) -> Any:
            await super().generate(*given)
            raise ValueError("a sampler that fails")

    async def main() -> list[Any]:
        reported = list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with serving(policy := Failing()) as (made, session, url):
            policy.hold = asyncio.Event()
            body = json.dumps(ASKED | {"stream": True}).encode()
            head = f"POST {chat(url).removeprefix(made.url)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
            reader, writer = await asyncio.open_connection(*made.socket.getsockname())
            writer.write(head.encode() + b"\r\n\r\n" + body)
            while b"being written" not in await reader.readline():
                pass
            if ends == "fails":
                policy.hold.set()
            elif ends == "session":
                session.close()
            else:
                made.close()
            writer.transport.abort()
            while session.running or made.listening.server_state.connections:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        gc.collect()
        return reported

    assert asyncio.run(main()) == []


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_and_comes_again_is_answered_from_the_first_call(streams: bool) -> None:
    async def main() -> None:
        async with serving(policy := Babble()) as (made, session, url):
            policy.hold = asyncio.Event()
            body = json.dumps(ASKED | {"stream": streams}).encode()
            path = chat(url).removeprefix(made.url)
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            with socket.create_connection(made.socket.getsockname(), timeout=5) as left:
                left.sendall(head + body)
                while not session.running:
                    await asyncio.sleep(0.01)
            while not session.lost:
                await asyncio.sleep(0.01)
            again = asyncio.create_task(sent(chat(url), body))
            while session.lost:
                await asyncio.sleep(0.01)
            policy.hold.set()
            assert (await again)[0] == 200
            assert len(policy.calls) == 1 and policy.cancelled == 0

    asyncio.run(main())


def test_a_client_is_watched_from_the_beginning() -> None:
    """An answer may need only milliseconds."""

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def main() -> None:
        request = web.Request({"method": "POST", "path": "/", "headers": []}, receive)
        waiting = asyncio.create_task(web.while_there(request, asyncio.get_running_loop().create_future()))
        for _ in range(5):
            await asyncio.sleep(0)
        assert waiting.cancelled()

    asyncio.run(main())


RETRIES = {
    "nothing": ({}, {}, 2),
    "a first try": ({"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "0"}, 2),
    "a count": ({"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}, 1),
    "a key": ({"idempotency-key": "a"}, {"idempotency-key": "a"}, 1),
    "two keys": ({"idempotency-key": "a"}, {"idempotency-key": "b"}, 2),
}


@pytest.mark.parametrize("name", RETRIES)
def test_equal_requests_are_as_many_answers_unless_one_says_that_it_is_a_retry(name: str) -> None:
    first, second, draws = RETRIES[name]

    async def main() -> None:
        for at_once in (True, False):
            async with serving(policy := Babble(gap=1e-3)) as (_, session, url):
                if at_once:
                    policy.hold = asyncio.Event()
                calls = [asyncio.create_task(sent(chat(url), ASKED, headers=first))]
                while not session.running and at_once:
                    await asyncio.sleep(0.01)
                if not at_once:
                    await calls[0]
                calls.append(asyncio.create_task(sent(chat(url), ASKED, headers=second)))
                while at_once and session.running < draws:
                    await asyncio.sleep(0.01)
                if policy.hold is not None:
                    await asyncio.sleep(0.05)  # a retry has no sign of its own
                    policy.hold.set()
                found = [await call for call in calls]
                assert [status for status, _ in found] == [200, 200] and len(policy.calls) == draws
                assert (found[0][1] == found[1][1]) == (draws == 1)
                assert len(session.rollouts("eos", 4, {})) == draws
                assert len({(prompt.seed, prompt.offset) for prompt, _ in policy.asked}) == draws

    asyncio.run(main())


def test_a_stream_says_that_it_waits_and_parallel_calls_are_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_INTERVAL", 0.01)

    async def main() -> None:
        async with serving(Babble(gap=0.2)) as (_, session, url):
            bodies = [{"messages": [{"role": "user", "content": str(n)}], "stream": True} for n in range(8)]
            found = await asyncio.gather(*(sent(chat(url), body) for body in bodies))
            assert all(status == 200 and events(text) for status, text in found)
            assert any(text.startswith(": the answer is being written") for _, text in found)
            rows = session.rollouts("eos", 4, {})
            assert len(rows) == 8 and sorted(row.branch for row in rows) == list(range(8))

    asyncio.run(main())


def test_a_connection_takes_one_request_after_the_other() -> None:
    async def main() -> None:
        async with serving() as (made, _, url):
            path = url.removeprefix(made.url)
            one = f"GET {path}/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            last = f"GET {path}/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            found = await asyncio.to_thread(raw, made, one + one, last)
            assert found.count(b"HTTP/1.1 200") == 3

    asyncio.run(main())


# --- proof 7 ----------------------------------------------------------------------------------------------------------


class Spoken(Numbers):
    """A conversation of numbers is their ids."""

    longest = 100

    def open(self, messages: Sequence[Message], tools: Any = ()) -> Ints:
        return np.array([int(each) for message in messages for each in message["content"].split()], np.int32)

    def parse(self, ids: Ints, *, cut: bool = False, tools: Any = None) -> Reply:
        return super().parse(ids, cut=cut)

    def visible(self, ids: Ints) -> str:
        return self.parse(ids).text


TABLE = toy.random_table(7, seed=0)
SAY = {"type": "function", "function": {"name": "say"}}
TOY = Prompt(id="p", number=7, tokens=np.array([1, 2], np.int32), seed=derive_seed(0, 7))


def shown(said: Sequence[int], turn: int) -> str:
    """Answer as `turns.Room` does."""
    return f"{1 + sum(said) % 5} {2 + turn % 3}"


def by_chat(base_url: str, turns: int) -> None:
    messages: list[Any] = [{"role": "user", "content": "1 2"}]
    for turn in range(1, turns + 1):
        status, said = post(f"{base_url}/chat/completions", {"messages": messages, "tools": [SAY]})
        if status == 400:
            return
        message = said["choices"][0]["message"]
        (call,) = message["tool_calls"]
        ids = json.loads(call["function"]["arguments"])["ids"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": shown(ids, turn)}]


def by_tokens(base_url: str, turns: int) -> None:
    ids = [1, 2]
    for turn in range(1, turns + 1):
        status, said = post(f"{base_url.removesuffix('/v1')}/inference/v1/generate", {"token_ids": ids})
        if status == 400:
            return
        more = said["choices"][0]["token_ids"]
        seen = shown([each for each in more if each != toy.EOS], turn)
        ids = [*ids, *more, *([] if more[-1] == toy.EOS else [toy.EOS]), *map(int, seen.split())]


def guests(policy: Any, limits: Limits = FEW) -> Agents:
    players = ExternalAgents("the token")
    served = Server("toy", guests=players, say=lambda line: None)
    return Agents(policy, Spoken(), players, served, limits, vocabulary=7, at_once=100)


@pytest.mark.parametrize("closes", [True, False])
def test_a_guest_whose_time_is_over_may_still_close_with_its_rewards(closes: bool) -> None:
    """It is trained either way: what it said is there."""
    policy: Any = toy.ToySampler(TABLE)
    policy.close = lambda: None
    agents = guests(policy, replace(FEW, seconds=1.0, step_seconds=60.0))
    agents.players.grace = 30.0 if closes else 0.2  # type: ignore[attr-defined]

    def attend() -> None:
        _, offer = post(f"{agents.server.url}/sessions", b"", headers=TOKEN)
        ask = {"messages": [{"role": "user", "content": "1 2"}]}
        status, _ = post(f"{offer['base_url']}/chat/completions", ask)
        while closes and status == 200:
            time.sleep(0.05)  # the answer that it had, until its time is over
            again = {"x-stainless-retry-count": "1"}
            status, _ = post(f"{offer['base_url']}/chat/completions", ask, headers=again)
        assert status == (410 if closes else 200)
        if closes:
            close = f"{agents.server.url}/sessions/{offer['id']}/close"
            assert post(close, {"rewards": 0.5}, headers=TOKEN)[0] == 200

    async def main() -> list[Any]:
        attending = asyncio.create_task(asyncio.to_thread(attend))
        group = await agents.generate(TOY, Sampling(max_tokens=40))
        await attending
        agents.close()
        await asyncio.sleep(0)
        return list(group)

    group = asyncio.run(main())
    assert {handle.header.finish for handle in group} == {"time"}
    assert group[0].header.outcome.get("reward") == (0.5 if closes else None)


def through(plays: Callable[[str, int], None], sampling: Sampling, turns: int, most: int) -> list[Rollout]:
    policy: Any = toy.ToySampler(TABLE)
    policy.version, policy.close = 3, lambda: None
    agents = guests(policy, replace(FEW, turns=most))

    def attend() -> None:
        for _ in range(sampling.group):
            _, offer = post(f"{agents.server.url}/sessions", b"", headers=TOKEN)
            plays(offer["base_url"], turns)
            status, _ = post(
                f"{agents.server.url}/sessions/{offer['id']}/close", {"rewards": {"reward": turns}}, headers=TOKEN
            )
            assert status == 200

    async def main() -> list[Rollout]:
        attending = asyncio.create_task(asyncio.to_thread(attend))
        group = await agents.generate(TOY, sampling)
        await attending
        agents.close()
        await asyncio.sleep(0)
        return [handle.body for handle in group]

    return asyncio.run(main())


@pytest.mark.parametrize(("turns", "tokens", "most"), [(3, 40, 9), (9, 13, 9), (9, 40, 2)])
def test_a_loop_here_chat_and_tokens_make_the_same_records(turns: int, tokens: int, most: int) -> None:
    """Go on to the end of a task, of an episode's tokens, and of its turns."""
    sampling = Sampling(max_tokens=tokens, group=3, draws=4, top_p=0.9, keep_mask=True)
    policy: Any = toy.ToySampler(TABLE)
    policy.version = 3
    loop = World(turns=turns).sampler(policy, replace(WIDE, turns=most))
    expected = [handle.body for handle in asyncio.run(loop.generate(TOY, sampling))]
    for plays in (by_chat, by_tokens):
        found = through(plays, sampling, turns, most)
        for row, other in zip(found, expected, strict=True):
            for name in (
                "tokens",
                "loss_mask",
                "versions",
                "turn",
                "logp",
                "actions",
                "action_logp",
                "index",
                "episode",
            ):
                np.testing.assert_array_equal(getattr(row, name), getattr(other, name), err_msg=name)
            assert row.finish == other.finish and row.kept is not None
            assert row.outcome["turns"] == other.outcome["turns"] and row.outcome["reward"] == turns


# --- handing over -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("here", [True, False])
def test_who_is_handed_over_goes_on_here_and_begins_again_elsewhere(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at any token: the records are those of an episode that was never interrupted."""
    monkeypatch.setattr("slipstream.environments.gateway.external_agents.MAX_POLL", 0.1)
    sampling = Sampling(max_tokens=40, group=3, draws=4)
    expected = through(by_chat, sampling, 3, 9)
    policies = list[Any]()
    urls, taken, over = list[str](), list[str](), threading.Event()

    def attend() -> None:
        while not over.is_set():
            status, offer = 0, None
            with suppress(OSError, http.client.HTTPException):
                status, offer = post(f"{urls[-1]}/sessions", b"", headers=TOKEN)
            if status == 200:
                taken.append(offer["id"])
                threading.Thread(target=play, args=(urls[-1], offer)).start()

    def play(url: str, offer: Any) -> None:
        with suppress(OSError, KeyError, http.client.HTTPException):  # it was over
            by_chat(offer["base_url"], 3)
            post(f"{url}/sessions/{offer['id']}/close", {"rewards": {"reward": 3}}, headers=TOKEN)

    def opened() -> Agents:
        policy: Any = toy.ToySampler(TABLE, seconds=0.04)
        policy.version, policy.close = 3, lambda: None
        policies.append(guests(policy))
        urls.append(policies[-1].server.url)
        return policies[-1]

    async def main() -> tuple[list[Rollout], int]:
        rng, cuts, begun = random.Random(0), 0, list[Any]()
        agents, attending = opened(), None
        while True:
            call = asyncio.create_task(agents.generate(TOY, sampling, begun))
            await asyncio.sleep(0)
            attending = attending or asyncio.create_task(asyncio.to_thread(attend))
            await asyncio.wait([call], timeout=rng.uniform(0.1, 0.2) if cuts < 4 else 20)
            await agents.release([TOY.number])
            begun = await call
            if not unfinished(begun):
                break
            cuts += 1
            if not here:
                agents = opened()
        over.set()
        for each in policies:
            each.close()
        await attending
        return [handle.body for handle in begun], cuts

    found, cuts = asyncio.run(main())
    assert cuts >= 2 and (3 <= len(taken) < 3 * (cuts + 1) if here else len(taken) > 3)
    for row, other in zip(found, expected, strict=True):
        for name in ("tokens", "loss_mask", "versions", "turn", "logp", "actions", "action_logp"):
            np.testing.assert_array_equal(getattr(row, name), getattr(other, name), err_msg=name)
        assert row.finish == "eos" and row.outcome["reward"] == 3


# --- agents that are elsewhere ----------------------------------------------------------------------------------------


WRONG_REWARDS: dict[str, tuple[Any, str]] = {
    "text": ("much", "returned str 'much', which is not a number"),
    "too much": (1e30, "returned 1e+30, which is larger than 1e+06"),
    "too little": ({"a": -2e6}, "returned -2e+06 for 'a', which is larger than 1e+06"),
    "a path": ({"../a": 1}, "returned rewards by the names '../a': write up to 32 plain words"),
    "nothing": ({"": 1}, "write up to 32 plain words"),
    "a long name": ({"a" * 65: 1}, "write up to 32 plain words"),
    "a control character": ({"a\x1b[2J": 1}, "write up to 32 plain words"),
    "many": ({f"a{n}": 1 for n in range(33)}, "write up to 32 plain words"),
    "a list": ([1], "which is not a number"),
}


def test_only_who_has_the_token_takes_episodes_and_grades_them() -> None:
    """The name of a session, which its agent knows, is not enough."""
    policy: Any = toy.ToySampler(TABLE)
    policy.close = lambda: None
    agents = guests(policy)
    truth = replace(TOY, ground_truth="forty two")

    def attend() -> None:
        url = agents.server.url
        forged = ({}, *({"authorization": each} for each in ("", "Bearer", "Bearer ", "Bearer the toke", "the token")))
        for headers in (*forged, {"authorization": "Bearer the token\xe4"}):
            status, said = post(f"{url}/sessions", b"", headers=headers)
            assert status == 401 and said["error"]["code"] == "invalid_api_key" and "forty" not in json.dumps(said)
            assert post(f"{url}/sessions", None, method="GET", headers=headers)[0] == 405
        _, offer = post(f"{url}/sessions", b"", headers=TOKEN)
        assert offer["row"]["ground_truth"] == "forty two" and "the token" not in json.dumps(offer)
        by_chat(offer["base_url"], 2)
        close = f"{url}/sessions/{offer['id']}/close"
        for headers in (*forged, {"authorization": f"Bearer {offer['id']}"}):
            assert post(close, {"rewards": 1.0}, headers=headers)[0] == 401
        for rewards, says in WRONG_REWARDS.values():
            status, said = post(close, {"rewards": rewards}, headers=TOKEN)
            assert status == 400 and says in said["error"]["message"], said
        status, said = post(close, b'{"rewards": 1e400}', headers=TOKEN)
        assert status == 400 and said["error"]["message"] == "the body is not JSON: 1e400 is no finite number"
        assert post(close, {"rewards": {"right": 0.5, "x": 0.25}}, headers=TOKEN)[0] == 200

    async def main() -> None:
        attending = asyncio.create_task(asyncio.to_thread(attend))
        (handle,) = await agents.generate(truth, Sampling(max_tokens=40, group=1))
        await attending
        agents.close()
        await asyncio.sleep(0)
        assert handle.header.outcome["reward"] == 0.75 and handle.header.outcome["reward/right"] == 0.5

    asyncio.run(main())


async def offered(agents: ExternalAgents, name: str) -> None:
    async with agents.playing({}, f"http://127.0.0.1/sessions/{name}/v1", name):
        pass


def test_a_thousand_requests_wait_for_their_episodes_and_each_gets_its_own() -> None:
    async def main() -> list[str]:
        agents = ExternalAgents("the token")
        requests = [asyncio.create_task(agents.next()) for _ in range(1000)]
        await asyncio.sleep(0)
        assert not any(request.done() for request in requests)
        await asyncio.gather(*(offered(agents, str(n)) for n in range(1000)))
        return [json.loads(offer)["id"] for offer in await asyncio.gather(*requests)]

    assert asyncio.run(main()) == [str(n) for n in range(1000)]


@pytest.mark.parametrize("ready", [False, True])
def test_an_episode_goes_to_the_next_request_if_its_client_has_left(ready: bool) -> None:
    """With `ready`, the client leaves after the episode came, and before its request could go on."""

    async def main() -> str:
        agents = ExternalAgents("the token")
        left = asyncio.create_task(agents.next())
        await asyncio.sleep(0)
        offering = asyncio.create_task(offered(agents, "it"))
        if ready:
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        found = str(json.loads(await agents.next())["id"])
        await offering
        return found if left.cancelled() else "the first request was answered"

    assert asyncio.run(main()) == "it"


def test_a_request_without_an_episode_is_told_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.environments.gateway.external_agents.MAX_POLL", 0.01)

    async def main() -> Any:
        try:
            return await ExternalAgents("the token").next()
        except Refused as error:
            return web.error_response(error)

    answer = asyncio.run(main())
    assert answer.status == 503 and (b"retry-after", b"1") in web.HEADERS_BY_STATUS[503]


def test_guests_that_never_close_never_call_or_share_a_session() -> None:
    """The first ends at its time, the second is left out, the third is one episode."""
    policy: Any = toy.ToySampler(TABLE)
    policy.close = lambda: None
    agents = guests(policy, replace(FEW, seconds=2.0))

    def attend() -> None:
        offers = [post(f"{agents.server.url}/sessions", b"", headers=TOKEN)[1] for _ in range(3)]
        assert {offer["row"]["id"] for offer in offers} == {"p"} and len({offer["id"] for offer in offers}) == 3
        by_chat(offers[0]["base_url"], 2)
        both = [threading.Thread(target=by_chat, args=(offers[2]["base_url"], 2)) for _ in range(2)]
        for each in both:
            each.start()
        for each in both:
            each.join()
        where = f"{agents.server.url}/sessions/{offers[2]['id']}"
        assert post(f"{where}/close", {"rewards": "much"}, headers=TOKEN)[0] == 400
        assert [post(f"{where}/close", {"rewards": 1.0}, headers=TOKEN)[0] for _ in range(2)] == [200, 410]
        assert post(f"{where}/v1/chat/completions", ASKED)[0] == 410
        for _ in range(2):  # it is tried again
            post(f"{agents.server.url}/sessions", b"", headers=TOKEN)

    async def main() -> None:
        attending = asyncio.create_task(asyncio.to_thread(attend))
        group = await agents.generate(TOY, Sampling(max_tokens=40, group=3))
        await attending
        agents.close()
        await asyncio.sleep(0)
        assert len({handle.header.episode for handle in group}) == 3
        by = {handle.header.finish: handle for handle in group}
        assert set(by) == {"time", "error", "eos"}
        assert by["error"].header.cause == "the agent got no answer in 2 s"
        assert by["error"].header.outcome == {"failed/timeout": 1.0, "failures": 3.0}
        assert by["eos"].header.outcome["turns"] == 4 and by["eos"].header.outcome["reward"] == 1.0

    asyncio.run(main())
