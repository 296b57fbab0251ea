"""The gateway over HTTP: agents in any language, at any speed, with any manners."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateways import LOOK, VOCABULARY, Babble, post, renderer
from slipstream.engines import toy
from slipstream.engines.base import Sampling
from slipstream.engines.gateway import connection, server
from slipstream.engines.gateway.agents import Agents
from slipstream.engines.gateway.guests import Guests
from slipstream.engines.gateway.server import Server
from slipstream.engines.gateway.sessions import Bounds, Session
from slipstream.records import Ints, Prompt, Rollout, derive_seed, unfinished
from slipstream.tasks.environments import Message, Reply
from turns import WIDE, Numbers, World

ASKED = {"messages": [{"role": "user", "content": "And?"}]}
BOUNDS = Bounds(turns=1000, turn_tokens=None, vocabulary=VOCABULARY)
RENDERER = renderer("qwen")
PROMPT = Prompt(id="p", number=5, tokens=RENDERER.open(ASKED["messages"]), seed=3)


@asynccontextmanager
async def serving(policy: Any = None, *, bounds: Bounds = BOUNDS) -> AsyncIterator[tuple[Server, Session, str]]:
    said: list[str] = []
    made = Server("student", say=said.append)
    await made.started()
    session = Session(policy or Babble(), RENDERER, PROMPT, Sampling(max_tokens=4000), 0, bounds)
    try:
        yield made, session, made.base_url(made.open(session)).removesuffix("/v1")
    finally:
        made.close()
        await asyncio.sleep(0)


async def sent(url: str, body: Any, **given: Any) -> tuple[int, Any]:
    return await asyncio.to_thread(lambda: post(url, body, **given))


def chat(url: str) -> str:
    return f"{url}/v1/chat/completions"


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


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
        "gateway: an agent asks for a temperature of its own, in vain: [sampler] says how the student draws\n"
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "the body is no JSON"),
    "too deep": (b"[" * 100_000, "the body is no JSON"),
    "a list": ([], "the body is no JSON object"),
    "no messages": ({}, "messages: is a list of messages"),
    "a role": ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role: is none of"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        'messages[0].content[0].type: is "image_url", and only text is served',
    ),
    "a beginning": (
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "So"}]},
        "messages[1]: is the assistant's",
    ),
    "arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments: is no JSON object",
    ),
    "several": (ASKED | {"n": 2}, "n: 2 is not served; leave it out"),
    "log-probs": (ASKED | {"logprobs": True}, "logprobs: true is not served"),
    "stops": (ASKED | {"stop": ["\n"]}, "stop: "),
    "a format": (ASKED | {"response_format": {"type": "json_object"}}, "response_format: "),
    "a choice": (ASKED | {"tool_choice": "required"}, 'tool_choice: is "auto" or "none"'),
    "a tool": (ASKED | {"tools": [{"function": {}}]}, "tools[0]: is no function with a name"),
    "no tokens": (ASKED | {"max_tokens": 0}, "max_tokens: is a number of tokens, at least 1"),
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


def test_paths_and_sessions_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY", 1000)

    async def main() -> None:
        async with serving() as (made, _, url):
            name = url.rpartition("/")[2]
            assert len(name) == 32
            for path, method, status, says in (
                ("/", "GET", 404, "nothing is served at GET /"),
                ("/sessions", "POST", 404, "nothing is served"),
                ("/sessions/x/v1/models", "GET", 404, "there is no such session"),
                (f"/sessions/{name}/v1/embeddings", "POST", 404, "nothing is served"),
                (f"/sessions/{name}/v1/models", "POST", 405, "write GET"),
            ):
                got, said = await sent(f"{made.url}{path}", b"{}", method=method)
                assert (got, says in said["error"]["message"]) == (status, True), said
            got, said = await sent(chat(url), b" " * 2000)
            assert got == 413 and said["error"]["code"] == "request_too_large"
            made.shut(name)
            got, said = await sent(chat(url), ASKED)
            assert got == 410 and said["error"]["message"] == "this session is closed"

    asyncio.run(main())


def test_limits_are_bad_requests_also_where_a_stream_was_asked_for() -> None:
    async def main() -> None:
        async with serving(bounds=replace(BOUNDS, turns=1)) as (_, session, url):
            assert (await sent(chat(url), ASKED))[0] == 200
            for more in ({}, {"stream": True}):
                status, said = await sent(chat(url), ASKED | more | {"max_tokens": 7})
                assert status == 400 and said["error"]["code"] == "context_length_exceeded"
            assert session.stopped == "turns"

    asyncio.run(main())


# --- bad manners ------------------------------------------------------------------------------------------------------


def raw(made: Server, *parts: bytes, wait: float = 0.0) -> bytes:
    """What comes back, up to the end."""
    host, port = made.socket.getsockname()
    with socket.create_connection((host, port), timeout=20) as connected:
        for part in parts:
            connected.sendall(part)
            time.sleep(wait)
        found = b""
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
]


@settings(max_examples=120, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=4),
    st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), JUNK | st.just("user")), max_size=3
    ),
    st.sampled_from(["v1/chat/completions", "inference/v1/generate"]),
)
def test_no_request_is_answered_by_a_defect(given: Any, messages: Any, path: str) -> None:
    async def main() -> None:
        session = Session(Babble(), RENDERER, PROMPT, Sampling(max_tokens=400), 0, BOUNDS)
        made = Server("student", say=lambda line: None)
        try:
            name = made.open(session)
            for body in (given, ASKED | given, given | {"messages": messages}):
                request = connection.Request("POST", f"/sessions/{name}/{path}", json.dumps(body).encode())
                try:
                    await made.answer(request)
                except connection.Refused as refused:
                    assert 400 <= refused.status < 500 and str(refused)
        finally:
            made.close()

    asyncio.run(main())


def test_who_is_slow_or_speaks_no_http_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ARRIVES", 0.5)

    async def main() -> None:
        async with serving() as (made, _, url):
            slow = asyncio.to_thread(raw, made, b"POST /sess", b"ions", wait=0.05)
            headless = asyncio.to_thread(raw, made, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
            junk = asyncio.to_thread(raw, made, b"\x16\x03\x01 hello\r\n\r\n")
            long = asyncio.to_thread(raw, made, b"GET /" + b"a" * 200_000)
            wrong = asyncio.to_thread(raw, made, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n")
            tasks = [asyncio.ensure_future(each) for each in (slow, headless, junk, long, wrong)]
            began = time.monotonic()
            assert (await sent(chat(url), ASKED))[0] == 200
            found = await asyncio.gather(*tasks)
            assert found[:2] == [b"", b""] and time.monotonic() - began < 10
            assert [each.partition(b"\r\n")[0].split()[1] for each in found[2:]] == [b"400", b"431", b"400"]

    asyncio.run(main())


def test_a_client_that_goes_away_and_comes_again_is_answered_from_the_first_call() -> None:
    async def main() -> None:
        async with serving(policy := Babble()) as (made, session, url):
            policy.hold = asyncio.Event()
            body = json.dumps(ASKED | {"stream": True}).encode()
            path = chat(url).removeprefix(made.url)
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

            def leave() -> None:
                with socket.create_connection(made.socket.getsockname(), timeout=5) as connected:
                    connected.sendall(head + body)

            await asyncio.to_thread(leave)
            while not session.running:
                await asyncio.sleep(0.01)
            again = [asyncio.create_task(sent(chat(url), body)) for _ in range(3)]
            await asyncio.sleep(0.05)
            policy.hold.set()
            again = [await each for each in again]
            assert len({text for _, text in again}) == 1 and len(policy.calls) == 1 and policy.cancelled == 0

    asyncio.run(main())


def test_a_stream_says_that_it_waits_and_parallel_calls_are_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAM", 0.01)

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
            one = f"GET {path}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            last = f"GET {path}/v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            found = await asyncio.to_thread(raw, made, one + one, last)
            assert found.count(b"HTTP/1.1 200") == 3

    asyncio.run(main())


# --- proof 7 ----------------------------------------------------------------------------------------------------------


class Spoken(Numbers):
    """A conversation of numbers is their ids."""

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
    """As `turns.Room` answers."""
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


def guests(policy: Any, bounds: Bounds, **given: Any) -> Agents:
    players = Guests()
    served = Server("toy", other=players.answer, say=lambda line: None)
    times = {"seconds": 60.0, "step_seconds": 10.0, "at_once": 100} | given
    return Agents(policy, Spoken(), players, served, bounds, **times)


def through(plays: Callable[[str, int], None], sampling: Sampling, turns: int, most: int) -> list[Rollout]:
    policy: Any = toy.ToySampler(TABLE)
    policy.version, policy.close = 3, lambda: None
    agents = guests(policy, Bounds(turns=most, turn_tokens=4, vocabulary=7))

    def attend() -> None:
        for _ in range(sampling.group):
            _, offer = post(f"{agents.server.url}/sessions", b"")
            plays(offer["base_url"], turns)
            status, _ = post(f"{agents.server.url}/sessions/{offer['id']}/close", {"rewards": {"reward": turns}})
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
    """To the end of a task, of an episode's tokens, and of its turns."""
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
    monkeypatch.setattr("slipstream.engines.gateway.guests.POLL", 0.1)
    sampling, bounds = Sampling(max_tokens=40, group=3, draws=4), Bounds(turns=9, turn_tokens=4, vocabulary=7)
    expected = through(by_chat, sampling, 3, 9)
    policies = list[Any]()
    urls, taken, over = list[str](), list[str](), threading.Event()

    def attend() -> None:
        while not over.is_set():
            status, offer = 0, None
            with suppress(OSError, http.client.HTTPException):
                status, offer = post(f"{urls[-1]}/sessions", b"")
            if status == 200:
                taken.append(offer["id"])
                threading.Thread(target=play, args=(urls[-1], offer)).start()

    def play(url: str, offer: Any) -> None:
        with suppress(OSError, KeyError, http.client.HTTPException):  # it was over
            by_chat(offer["base_url"], 3)
            post(f"{url}/sessions/{offer['id']}/close", {"rewards": {"reward": 3}})

    def opened() -> Agents:
        policy: Any = toy.ToySampler(TABLE, seconds=0.04)
        policy.version, policy.close = 3, lambda: None
        policies.append(guests(policy, bounds))
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


def test_guests_that_never_close_never_call_or_share_a_session() -> None:
    """The first ends at its time, the second is left out, the third is one episode."""
    policy: Any = toy.ToySampler(TABLE)
    policy.close = lambda: None
    agents = guests(policy, Bounds(turns=9, turn_tokens=4, vocabulary=7), seconds=2.0)

    def attend() -> None:
        offers = [post(f"{agents.server.url}/sessions", b"")[1] for _ in range(3)]
        assert {offer["row"]["id"] for offer in offers} == {"p"} and len({offer["id"] for offer in offers}) == 3
        by_chat(offers[0]["base_url"], 2)
        both = [threading.Thread(target=by_chat, args=(offers[2]["base_url"], 2)) for _ in range(2)]
        for each in both:
            each.start()
        for each in both:
            each.join()
        where = f"{agents.server.url}/sessions/{offers[2]['id']}"
        assert post(f"{where}/close", {"rewards": "much"})[0] == 400
        assert [post(f"{where}/close", {"rewards": 1.0})[0] for _ in range(2)] == [200, 410]
        assert post(f"{where}/v1/chat/completions", ASKED)[0] == 410
        for _ in range(2):  # it is tried again
            post(f"{agents.server.url}/sessions", b"")

    async def main() -> None:
        attending = asyncio.create_task(asyncio.to_thread(attend))
        group = await agents.generate(TOY, Sampling(max_tokens=40, group=3))
        await attending
        agents.close()
        await asyncio.sleep(0)
        late, never, shared = sorted(group, key=lambda handle: handle.header.episode)
        by = {handle.header.finish: handle for handle in (late, never, shared)}
        assert set(by) == {"time", "error", "eos"}
        assert by["error"].header.cause == "the agent got no answer in 2 s"
        assert by["error"].header.outcome == {"failed/timeout": 1.0, "failures": 3.0}
        assert by["eos"].header.outcome["turns"] == 2 and by["eos"].header.outcome["reward"] == 1.0

    asyncio.run(main())
