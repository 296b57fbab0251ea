"""Teachers behind endpoints: every fault ends in a retry that succeeds, or in an error that says who and what."""

import asyncio
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import SecretStr

import slipstream
from slipstream.config.file import parse, to_toml
from slipstream.data.prompts import Prompts, Row
from slipstream.engines import score_checks as trust
from slipstream.engines.http import client, scorer
from slipstream.engines.http.check import Requirements, check
from slipstream.engines.http.client import (
    OUTAGE_FAILURES,
    Breaker,
    Client,
    Endpoint,
    Unavailable,
    key_from_environment,
    retry_after,
)
from slipstream.engines.http.scorer import HttpScorer, WrongAnswer, read
from slipstream.engines.native.model import split
from slipstream.errors import ConfigError, EndpointError, EngineError, NoContext, Stalled
from slipstream.pipeline import failures
from slipstream.pipeline.run import Run
from slipstream.plan.facts import Facts
from slipstream.plan.notes import freshness_notes
from slipstream.protocols import Engines, GradingSampler, Sampling
from slipstream.records import Attempts, Handle, Prompt, Rollout, Scored, header_of
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from slipstream.testing.endpoint import model, prompt_logprobs, send
from support import tabular_engines as toy
from support.engines import http_scorer, native_sampler, native_scorer
from support.fake_endpoint import FakeEndpoint, Fault, table
from support.learners import run
from support.tiny_models import EOS, VOCAB, make_model, make_prompts, masked, uniform, wrap

SECRET = "sk-very-secret-4711"
TOY = 6
TEACHER = toy.random_table(TOY, seed=1, scale=2.0)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, in milliseconds."""
    monkeypatch.setattr(client, "REQUEST_PAUSES", (0.005, 0.01, 0.02))
    monkeypatch.setattr(client, "PROBE_PAUSES", (0.02, 0.1))
    monkeypatch.setattr(client, "PROBE_SPREAD", 0.01)


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    with FakeEndpoint(table(TEACHER.log_softmax(-1).numpy()), vocabulary=TOY, key=SECRET) as endpoint:
        yield endpoint


def endpoint(fake: FakeEndpoint, **changes: Any) -> Endpoint:
    key = SecretStr(fake.key) if fake.key else None
    return Endpoint(**{"teacher": "main", "url": fake.url, "model": fake.name, "key": key} | changes)


async def toy_group(group: int = 2, number: int = 0) -> list[Handle]:
    prompt = Prompt(id=f"p{number}", number=number, tokens=np.array([3, 2], np.int32), seed=number)
    sampler = toy.ToySampler(toy.random_table(TOY, seed=0))
    return await sampler.generate(prompt, Sampling(max_tokens=8, group=group))


def score(fake: FakeEndpoint, *, groups: int = 1, k: int = 0, **changes: Any) -> list[Handle]:
    async def work() -> list[Handle]:
        scorer = http_scorer(endpoint(fake, **changes), k=k)
        made = [await toy_group(number=number) for number in range(groups)]
        return [
            handle for scored in await asyncio.gather(*[scorer.score(group) for group in made]) for handle in scored
        ]

    return run(work())


# --- what it gives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache, k", [("sampled", 0), ("teacher_topk", 5)])
def test_an_endpoint_scores_as_the_model_itself_does(cache: Any, k: int, tmp_path: Path) -> None:
    teacher = make_model("llama", seed=1)
    teacher.save_pretrained(tmp_path)

    async def work(url: str) -> list[list[Handle]]:
        sampler = native_sampler(wrap(make_model(seed=0)), slots=16, stop_ids={EOS})
        groups = [await sampler.generate(p, Sampling(max_tokens=12, group=2, draws=1)) for p in make_prompts(4)]
        sampler.close()
        for group in groups[:2]:  # some tokens were observed: nothing is said of them
            seen = [masked(h.body, np.arange(len(h.body.tokens)) % 3 != 1) for h in group]
            group[:] = [Handle(header_of(rollout), rollout) for rollout in seen]
        native = native_scorer(split("tiny", teacher), cache=cache, k=max(k, 1), name="main")
        remote = http_scorer(Endpoint("main", url, "teacher"), k=k)
        both = [[handle for group in groups for handle in await each.score(group)] for each in (native, remote)]
        native.close()
        return both

    with FakeEndpoint(model(str(tmp_path)), vocabulary=VOCAB) as fake:
        for here, there in zip(*run(work(fake.url)), strict=True):
            a, b = here.body, there.body
            assert isinstance(a, Scored) and isinstance(b, Scored)
            assert there.header.teacher == "main" == b.teacher and b.context_id == "prefix"
            np.testing.assert_allclose(a.teacher_logp, b.teacher_logp, atol=2e-5)
            for name in ("teacher_action_logp", "teacher_ids", "teacher_topk_logp"):
                one, other = getattr(a, name), getattr(b, name)
                assert (one is None) == (other is None)
                if one is not None:
                    assert len(one) == a.rollout.trained_tokens
                    np.testing.assert_allclose(one, other, atol=2e-5)


def test_the_emitted_token_comes_besides_the_best_also_where_it_is_not_among_them(fake: FakeEndpoint) -> None:
    """The endpoint returns 2 of 6 tokens: some emitted tokens are among them, some are not."""
    handles = score(fake, groups=4, k=2)
    logq_VV, inside = TEACHER.log_softmax(-1), set[bool]()
    for scored in (handle.body for handle in handles):
        logq_TV = logq_VV[toy.previous(scored.rollout)]
        best = logq_TV.topk(2, -1)
        np.testing.assert_array_equal(scored.teacher_ids, best.indices)
        np.testing.assert_allclose(scored.teacher_topk_logp, best.values, atol=1e-6)
        emitted = logq_TV.gather(1, torch.from_numpy(scored.rollout.tokens).long()[:, None])[:, 0]
        np.testing.assert_allclose(scored.teacher_logp, emitted, atol=1e-6)
        inside |= set((scored.teacher_ids == scored.rollout.tokens[:, None]).any(1).tolist())
    assert inside == {True, False}


class Behind:
    """Shows a token before the prompt that depends on the last attempt."""

    def __call__(self, rollout: Rollout, attempts: Attempts | None) -> Any:
        if attempts is not None and attempts.last == "none":
            raise NoContext("nothing is to be seen")
        shown = [] if attempts is None else [len(attempts.last)]
        return np.array([*rollout.prompt.tokens.tolist(), *shown], np.int32) if shown else rollout.prompt.tokens

    def close(self) -> None:
        pass


@pytest.mark.parametrize("k", [0, 2, TOY])
def test_asked_again_it_has_moved_by_no_more_than_over_the_vocabulary(k: int, fake: FakeEndpoint) -> None:
    logq_VV = TEACHER.log_softmax(-1).double().numpy()

    def showing(handle: Handle, last: str) -> Handle:
        return Handle(replace(handle.header, attempts=Attempts(last=last)), handle.body)

    async def work() -> tuple[list[Handle], list[Handle]]:
        scorer = http_scorer(endpoint(fake), k=k, context=Behind())
        first = await scorer.score([showing(each, "a") for each in await toy_group(3)])
        asked = [showing(first[0], "aa"), showing(first[1], "a"), showing(first[2], "none")]
        return first, await scorer.relabel(asked)

    first, (moved, same, gone) = run(work())
    assert same.body is first[1].body and same.header.moved == 0.0
    assert gone.header.finish == "error" and "teacher main has no context for it" in gone.header.cause
    then, now = logq_VV[1], logq_VV[2]  # of the first token; behind it both see the same
    exact = (np.exp(now) * (now - then)).sum()
    emitted = int(moved.body.rollout.tokens[0])
    p, q = np.exp([now[emitted], then[emitted]])
    least = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    found_N = moved.body.supervision_kl
    assert moved.body.context_id != first[0].body.context_id and found_N[1:] == pytest.approx(0.0, abs=1e-5)
    assert least - 1e-5 <= found_N[0] <= exact + 1e-5 and exact > 0.1
    if k in (0, TOY):
        assert found_N[0] == pytest.approx(exact if k else least, abs=1e-5)


def test_a_teacher_at_an_endpoint_is_asked_again_where_attempts_have_moved(tmp_path: Path) -> None:
    with FakeEndpoint(model("builtin:teacher")) as fake:
        config = {
            "student": "builtin:student",
            "updates": 6,
            "output": str(tmp_path / "run"),
            "teachers": {
                "main": {
                    "model": fake.name,
                    "base_url": fake.url,
                    "tokenizer": "builtin:teacher",
                    "context": "{last}{prompt}",
                    "relabel": "stale",
                }
            },
            "data": {"limit": 2},
            "sampler": {"max_tokens": 8, "temperature": 4.0},  # attempts differ
            "loss": {"kind": "forward_kl", "k": 4},
            "learner": {"batch_size": 4},
            "schedule": {"kind": "step_off", "k": 2},
            "freshness": {},
            "runtime": {"kind": "inline", "device": "cpu"},
        }
        said = list[str]()
        lines = slipstream.train(config, quiet=True, checks=False).metrics
        made = parse(config, say=said.append)
        assert list(freshness_notes(made, Facts(made))) == [
            "freshness: supervision drift of teachers.main is a lower bound, as its endpoint scores 4 tokens only"
        ]
    again = [line for line in lines if line.get("teacher/relabelled")]
    assert (
        again and any(line["teacher/moved"] > 0 for line in again) and any(line["freshness/sup"] > 0 for line in again)
    )


def test_rewards_travel_and_requests_hold_token_ids(fake: FakeEndpoint) -> None:
    async def work() -> list[Handle]:
        group = await toy_group()
        graded = await toy.ToyGrader().grade(group)
        return await http_scorer(endpoint(fake)).score(graded)

    handles = run(work())
    assert [handle.header.index for handle in handles] == [0, 1]
    assert all(handle.header.rewards == handle.body.rollout.rewards != {} for handle in handles)
    sent = sorted(request["prompt"] for request in fake.requests)
    assert sent == sorted([3, 2, *handle.body.rollout.tokens.tolist()] for handle in handles)
    assert {(r["max_tokens"], r["prompt_logprobs"], r["temperature"]) for r in fake.requests} == {(1, 0, 1.0)}


def test_no_more_requests_at_a_time_than_the_config_says(fake: FakeEndpoint) -> None:
    fake.always = "slow"
    score(fake, groups=12, concurrency=3)
    assert 1 < fake.most <= 3


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults", [["slow"], ["busy"], ["broken"], ["cut"], ["late"], ["busy", "cut", "broken"]], ids=str
)
def test_what_passes_is_tried_again_and_nobody_notices(faults: list[Fault], fake: FakeEndpoint) -> None:
    expected = [handle.body.teacher_logp for handle in score(fake)]
    fake.tell(*faults)
    for handle, logp in zip(score(fake), expected, strict=True):
        np.testing.assert_array_equal(handle.body.teacher_logp, logp)
    assert len(fake.requests) == 4 + len(faults) - faults.count("slow")


LASTING: dict[Fault, str] = {
    "busy": "answers 429: .*too many requests",
    "broken": "answers 500: .*internal error",
    "cut": r"breaks off its answer: RemoteProtocolError: peer closed connection",
    "refused": "answers 400: .*the server does not like it",
    "moved": "answers 307 and redirects to https://elsewhere/v1: write that address instead",
    "empty": "gives an answer that is not JSON: it is empty",
    "not json": "gives an answer that is not JSON: <html>It works!</html>",
    "no logprobs": "a wrong answer: no prompt_logprobs: the server must support them",
    "short": r"a wrong answer: \d+ rows of prompt_logprobs for \d+ tokens",
    "deep": r"gives an answer that is not JSON: \[\[\[\[",
    "endless": r"sends more than 1 MiB, which is more than the request can need",
    "packed": r"compresses its answers \(gzip\): switch compression off there",
    "null": r"a wrong answer: position \d+ is not a table of token ids and their log-probs",
    "no ids": r"a wrong answer: position \d+ holds -1, which is not a token id",
    "shifted": r"a wrong answer: position \d+ holds no log-prob of the sent token \d, but of \d",
    "other ids": r"a wrong answer: position 1 holds no log-prob of the sent token 2, but of 3",
    "not tables": "a wrong answer: position 1 is not a table of token ids and their log-probs",
}
ANSWERED = {"refused": 400, "moved": 307} | dict.fromkeys(("not json", "deep", "empty", "endless", "packed"), 200)
"""Status by fault of an endpoint that answered, so that the same request would get the same answer."""
ONLY_OF_SEVERAL: dict[Fault, str] = {
    "few": r"a wrong answer: position \d+ holds 2 log-probs, but the request was for the token and 3",
    "shifted": r"a wrong answer: position \d+ (holds no log-prob of the sent token|adds \d to its 3 best, not token)",
}


@pytest.mark.parametrize(
    "fault, k, message", [*((f, 0, m) for f, m in LASTING.items()), *((f, 3, m) for f, m in ONLY_OF_SEVERAL.items())]
)
def test_what_lasts_is_an_error_that_names_teacher_endpoint_and_fault(
    fault: Fault, k: int, message: str, fake: FakeEndpoint
) -> None:
    fake.always = fault
    with pytest.raises(EndpointError) as caught:
        score(fake, k=k)
    said = str(caught.value)
    assert re.match(f"teacher main at {fake.url} (gives )?{message}", said), said
    assert re.search(r"the request was for response p0/[01]$", said) and "\n" not in said
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == said and again.status == caught.value.status == ANSWERED.get(fault, 0)


def test_an_answer_that_does_not_come_is_an_error_and_not_asked_for_again_at_once(fake: FakeEndpoint) -> None:
    fake.always, fake.seconds = "slow", 0.3
    with pytest.raises(EndpointError, match=r"gives no whole answer in 0\.1 s \(its timeout\)"):
        score(fake, timeout=0.1)
    assert len(fake.requests) <= 2, "one for each response"


def test_an_answer_that_comes_byte_by_byte_has_the_same_deadline(fake: FakeEndpoint) -> None:
    fake.always, fake.seconds = "trickle", 0.01
    with pytest.raises(EndpointError, match=r"gives no whole answer in 0\.2 s \(its timeout\)"):
        score(fake, timeout=0.2)


def test_an_answer_without_end_is_not_held(fake: FakeEndpoint) -> None:
    fake.always = "endless"
    with pytest.raises(EndpointError, match="sends more than"):
        run(Client(endpoint(fake)).ask("POST", "/completions", {"prompt": []}))
    assert fake.sent < 64 << 20, "what lies in buffers on the way, and no more"


def test_more_is_read_where_more_was_asked_for(monkeypatch: pytest.MonkeyPatch, fake: FakeEndpoint) -> None:
    """The answer has as much as 256 bytes for each log-prob of each token."""
    monkeypatch.setattr(client, "SPARE_BYTES", 0)
    assert len(score(fake, k=5)) == 2
    monkeypatch.setattr(scorer, "ENTRY_BYTES", 1)
    with pytest.raises(EndpointError, match="sends more than 0 MiB"):
        score(fake, k=5)


UNUSABLE: dict[Fault, str] = {
    "nan": "a log-prob of nan, which is not a usable number",
    "narrow": "a log-prob of -inf, which is not a usable number",
    "clamp": "a log-prob of -9999, which is a placeholder for an unknown log-prob",
    "positive": "a log-prob of 0.5, which is above 0",
    "bad rank": r"probabilities at position \d+ that add up to 2.\d+",
}


@pytest.mark.parametrize("fault", UNUSABLE)
def test_a_number_that_is_no_log_prob_costs_its_response_and_no_other(fault: Fault, fake: FakeEndpoint) -> None:
    fake.tell(fault)
    handles = score(fake, k=3 if fault == "bad rank" else 0)
    failed, sound = sorted(handles, key=lambda handle: handle.header.finish != "error")
    assert failed.header.finish == "error" and sound.header.finish != "error"
    assert re.search(f"^teacher main gives .*{UNUSABLE[fault]}", failed.header.cause), failed.header.cause
    assert isinstance(sound.body, Scored)


@pytest.mark.parametrize("fault", ["nan", "clamp", "positive"])
def test_such_an_endpoint_is_refused_before_a_run(fault: Fault, fake: FakeEndpoint) -> None:
    fake.always = fault
    with pytest.raises(ConfigError, match=f"teachers.main.base_url = .* gives {UNUSABLE[fault]}"):
        run(check(endpoint(fake), NEED))


def test_a_token_that_the_student_does_not_have_is_named(fake: FakeEndpoint) -> None:
    async def work() -> None:
        await http_scorer(endpoint(fake), k=TOY, vocabulary=TOY - 1).score(await toy_group())

    with pytest.raises(EndpointError, match="has token 5 among its best, which the student does not have: use"):
        run(work())


def test_https_at_a_plain_port_is_named() -> None:
    def serve(listening: socket.socket) -> None:
        with listening.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}/v1"
        with pytest.raises(
            EndpointError, match=f"does not speak https: write base_url = '{url.replace('s:', ':', 1)}'"
        ):
            run(Client(Endpoint("main", url, "m")).ask("GET", "/models"))
        thread.join()


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(EndpointError, match=f"teacher main at {url} cannot be reached: ConnectError: ."):
            run(Client(Endpoint("main", url, "m")).ask("GET", "/models"))


def test_a_cancelled_call_leaves_nothing_behind(fake: FakeEndpoint) -> None:
    fake.always, fake.seconds = "slow", 0.1

    async def work() -> list[Handle]:
        scorer = http_scorer(endpoint(fake, concurrency=1))
        call = asyncio.create_task(scorer.score(await toy_group()))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await scorer.score(await toy_group())

    assert len(run(work())) == 2


def test_one_client_serves_one_event_loop_after_the_other(fake: FakeEndpoint) -> None:
    asks = Client(endpoint(fake))
    assert run(asks.ask("GET", "/models")) == run(asks.ask("GET", "/models"))


def test_the_server_says_when_to_come_back_and_all_calls_wait_for_it(fake: FakeEndpoint) -> None:
    fake.retry_after = "0.3"
    fake.tell("busy")

    async def work() -> tuple[float, list[Any]]:
        asks, loop = Client(endpoint(fake)), asyncio.get_running_loop()
        await asks.ask("GET", "/models")
        began = loop.time()
        scorer = http_scorer(endpoint(fake))
        scorer.client = asks
        first = asyncio.create_task(scorer.score(await toy_group(1)))
        while not fake.requests:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        both = await asyncio.gather(first, scorer.score(await toy_group(1)))
        return loop.time() - began, both

    seconds, both = run(work())
    assert seconds >= 0.3 and len(both) == 2 and len(fake.requests) == 3


@pytest.mark.parametrize("header, seconds", [("3", 3.0), ("0.5", 0.5), (None, 0.0), ("Wed, 21 Oct", 0.0), ("-1", 0.0)])
def test_retry_after_is_read(header: str | None, seconds: float) -> None:
    assert retry_after(header) == seconds


def test_retry_after_may_be_a_date() -> None:
    assert 3000 < retry_after(formatdate(time.time() + 3600, usegmt=True)) <= 3600
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after("Wed, 21 Oct 99999 07:28:00 GMT") == 0


# --- the breaker -----------------------------------------------------------------------------------------------------


async def ask(gate: Breaker, fault: Unavailable | None = None) -> None:
    async with gate.passage():
        await asyncio.sleep(0.001)
        if fault:
            raise fault


async def trip(gate: Breaker) -> None:
    for _ in range(OUTAGE_FAILURES):
        with pytest.raises(Unavailable):
            await ask(gate, Unavailable("is broken"))


def test_while_it_is_down_one_call_goes_to_see_and_the_others_wait() -> None:
    async def work() -> list[int]:
        gate, went, up = Breaker("teacher main"), list[float](), False
        await trip(gate)
        assert gate.open

        async def call() -> None:
            while True:
                try:
                    async with gate.passage():
                        went.append(asyncio.get_running_loop().time())
                        await asyncio.sleep(0.001)
                        if not up:
                            raise Unavailable("is broken")
                        return
                except Unavailable:
                    pass

        calls = [asyncio.create_task(call()) for _ in range(20)]
        await asyncio.sleep(0.25)
        tried = len(went)
        up = True
        await asyncio.gather(*calls)
        return [tried, len(went), gate.failures]

    monkey = pytest.MonkeyPatch()
    monkey.setattr(client, "PROBE_SPREAD", 0.0)
    (tried, went, failures), _ = virtual.run(work())
    monkey.undo()
    assert 2 <= tried <= 5, "after pauses of 20, 40, 80 and then 100 ms"
    assert went == tried + 20 and failures == 0


def test_whoever_waits_too_long_hears_what_is_wrong() -> None:
    async def work() -> None:
        gate = Breaker("teacher main at URL")
        await trip(gate)
        prober = asyncio.create_task(hang(gate))
        await asyncio.sleep(0.1)
        with pytest.raises(EndpointError, match=r"^teacher main at URL has been down for 1\d\d s: it is broken$"):
            await ask(gate)
        prober.cancel()
        await asyncio.wait([prober])
        await ask(gate)
        assert not gate.open, "a probe that was cancelled makes room for another"

    async def hang(gate: Breaker) -> None:
        async with gate.passage():
            await asyncio.sleep(1e6)

    _, seconds = virtual.run(work())
    assert client.MAX_OUTAGE <= seconds < client.MAX_OUTAGE + 1


def test_too_many_requests_are_no_outage_and_neither_is_a_wrong_answer() -> None:
    async def work() -> None:
        gate = Breaker("teacher main at URL")
        for _ in range(OUTAGE_FAILURES + 1):
            with pytest.raises(Unavailable):
                await ask(gate, Unavailable("is busy", down=False))
        for _ in range(OUTAGE_FAILURES - 1):
            with pytest.raises(Unavailable):
                await ask(gate, Unavailable("is broken"))
        with pytest.raises(EndpointError):
            async with gate.passage():
                raise EndpointError("wrong")
        assert not gate.failures

    virtual.run(work())


def test_a_long_retry_after_delays_requests_by_at_most_a_minute() -> None:
    async def one(gate: Breaker, seconds: float) -> float:
        with suppress(Unavailable):
            async with gate.passage():
                await asyncio.sleep(seconds)
                raise Unavailable("is busy", down=False, after=86_400)
        await ask(gate)
        return asyncio.get_running_loop().time()

    async def work() -> list[float]:
        gate = Breaker("teacher main at URL")
        return await asyncio.gather(*(one(gate, 0.1 * n) for n in range(32)))

    ends, _ = virtual.run(work())
    assert all(60 <= end < 65 for end in ends)


def test_a_call_that_waits_longer_than_an_outage_may_last_fails() -> None:
    async def work() -> None:
        gate = Breaker("teacher main at URL")
        gate.earliest = asyncio.get_running_loop().time() + 180
        with pytest.raises(EndpointError, match="teacher main at URL asks to wait another 60 s"):
            await ask(gate)

    virtual.run(work())


# --- in a run ---------------------------------------------------------------------------------------------------------


def train(path: Path, fake: FakeEndpoint, *, patience: float | None = None, said: list[str] | None = None) -> Run:
    config = parse(
        {
            "student": "toy",
            "teachers": {"main": {"model": "teacher", "base_url": fake.url}},
            "updates": 4,
            "sampler": {"max_tokens": 6, "group": 2},
            "learner": {"batch_size": 8},
            "schedule": {"kind": "async", "tau": 1},
            "health": {"canary": 0},  # what the endpoint is told to do is for the run's own questions
        },
        say=lambda _: None,
    )
    student = toy.random_table(TOY, seed=0)
    engines = Engines(
        samplers=(GradingSampler(toy.ToySampler(student), toy.ToyGrader()),),
        scorers={"main": (http_scorer(endpoint(fake, timeout=2.0, concurrency=4)),)},
        learner=toy.ToyLearner(student),
        close=lambda: None,
    )
    tokens = [np.array([1 + i % (TOY - 1)], np.int32) for i in range(10)]
    rows = [Row(id=str(i), prompt="x") for i in range(10)]
    prompts = Prompts(rows, tokens, seed=0, shuffle=True, teachers=["main"] * 10)
    with RunLog.create(config, path) as log:
        made = Run(config, engines, prompts, log, patience=patience, say=(said if said is not None else []).append)
        asyncio.run(made.train())
    return made


def test_a_run_goes_through_passing_faults_and_loses_nothing(tmp_path: Path, fake: FakeEndpoint) -> None:
    faults: list[Fault] = ["busy", "cut", "slow", "broken", "busy"]
    fake.tell(*faults * 3)
    made = train(tmp_path, fake)
    assert made.admission.version == 4 and not made.admission.dropped
    assert {entry["end"] for entry in read_lines(tmp_path / "ledger.jsonl")} == {"trained"}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "GROUP_PAUSES", (0.01, 0.01, 0.01, 0.01))


def test_an_outage_costs_time_and_no_group(
    tmp_path: Path, fake: FakeEndpoint, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls fail until one group has used all tries but the last, whichever groups are hit."""
    score_first, calls = HttpScorer.score, 0

    async def score(self: HttpScorer, group: Any) -> list[Handle]:
        nonlocal calls
        calls += 1
        if calls == 6:
            fake.faults.extend(["broken"] * len(failures.GROUP_PAUSES))
        return await score_first(self, group)

    monkeypatch.setattr(HttpScorer, "score", score)
    made = train(tmp_path, fake)
    assert calls > 6 and not fake.faults, "the outage was, and ended"
    assert made.admission.version == 4 and not made.admission.dropped
    assert len(fake.requests) < 100, "it was not hammered"


def test_a_teacher_that_stays_down_stops_the_run_by_its_name(
    tmp_path: Path, fake: FakeEndpoint, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_OUTAGE", 0.1)
    fake.always, said = "broken", list[str]()
    with pytest.raises(EngineError, match=f"scoring failed .* teacher main at {fake.url} .*answers 500") as caught:
        train(tmp_path, fake, said=said)
    assert any(re.match(rf"scoring has failed at the last 5 tries, .* retried: .*{fake.url}", line) for line in said)
    dropped = [entry for entry in read_lines(tmp_path / "ledger.jsonl") if entry["reason"] == "scoring failed"]
    assert len(dropped) == 2 and all(fake.url in entry["cause"] for entry in dropped)
    everything = "".join(
        path.read_text() for path in tmp_path.rglob("*") if path.suffix in (".toml", ".json", ".jsonl")
    )
    assert SECRET not in everything + str(caught.value) + "".join(said)


def test_a_teacher_that_does_not_answer_is_named_long_before_anything_is_given_up(
    tmp_path: Path, fake: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FIRST_WARNING", 0.05)
    fake.seconds, said = 0.3, list[str]()
    fake.tell("slow", "slow", "slow", "slow")
    made = train(tmp_path, fake, said=said)
    assert made.admission.version == 4
    assert any(re.match(r"teacher main has given no scores for 0 s \(\d+ requests are open\)", line) for line in said)
    assert any(line.startswith("teacher main answers again") for line in said)


def test_one_bad_answer_costs_one_response_of_a_run_and_the_ledger_says_why(tmp_path: Path, fake: FakeEndpoint) -> None:
    fake.tell("clamp")
    said = list[str]()
    train(tmp_path, fake, said=said)
    (entry,) = [entry for entry in read_lines(tmp_path / "ledger.jsonl") if "failed" in entry]
    assert (
        len(entry["failed"]) == 1
        and "a log-prob of -9999, which is a placeholder for an unknown log-prob" in entry["causes"][0]
    )
    assert sum(line["teacher/invalid"] for line in read_lines(tmp_path / "metrics.jsonl")) == 1
    assert [line for line in said if "is left out, and later ones silently" in line] == [said[0]]


def test_what_a_stalled_run_prints_names_the_teacher_that_is_down(
    tmp_path: Path, fake: FakeEndpoint, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PROBE_PAUSES", (60.0, 60.0))  # on a busy machine probes would use up the tries first
    fake.always = "broken"
    with pytest.raises(Stalled, match=r"nothing has moved for 1 s") as caught:
        train(tmp_path, fake, patience=1.0)
    line = next(line for line in str(caught.value).splitlines() if line.startswith("scoring"))
    assert re.match(
        rf"scoring has failed at the last \d+ tries, for \d\.\d s: EndpointError: teacher main at {fake.url}", line
    )


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["broken", "cut", "refused", "not json", "null", "busy"])
def test_the_key_is_in_no_error_or_log(fault: Fault, fake: FakeEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fake.always = fault
    with pytest.raises(EndpointError) as caught:
        score(fake)
    error: BaseException | None = caught.value
    shown = [repr(endpoint(fake)), caplog.text, "".join(traceback.format_exception(caught.value))]
    while error is not None:
        shown += [str(error), repr(error)]
        error = error.__cause__ or error.__context__
    assert SECRET not in "".join(shown)
    if fault == "broken":
        assert "Bearer [key]" in str(caught.value), "a server that repeats it is silenced"


def test_a_refused_key_is_told_by_the_name_of_its_variable(fake: FakeEndpoint) -> None:
    other = SecretStr("sk-another-one")
    with pytest.raises(ConfigError, match="teachers.main.api_key_env: the endpoint wants another key .*401") as caught:
        run(check(endpoint(fake, key=other), NEED))
    assert "sk-another-one" not in str(caught.value)
    with pytest.raises(ConfigError, match="teachers.main.api_key_env: the endpoint wants a key: name its variable"):
        run(check(endpoint(fake, key=None), NEED))


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    field = "teachers.main.api_key_env"
    assert key_from_environment(field, None) is None
    monkeypatch.setenv("TEACHER_KEY", f"{SECRET}\n")
    key = key_from_environment(field, "TEACHER_KEY")
    assert key is not None and key.get_secret_value() == SECRET and SECRET not in repr(key)
    assert "TEACHER_KEY" not in os.environ, "whatever is started from now on does not inherit it"
    assert key_from_environment(field, "TEACHER_KEY") == key, "whoever plans again has it"
    monkeypatch.setenv("TEACHER_KEY", f"{SECRET}\nx")
    with pytest.raises(ConfigError, match="cannot be a key") as caught:
        key_from_environment(field, "TEACHER_KEY")
    assert SECRET not in str(caught.value)
    with pytest.raises(
        ConfigError, match="teachers.main.api_key_env = 'NO_SUCH': this environment variable is not set"
    ):
        key_from_environment(field, "NO_SUCH")


@pytest.mark.parametrize(
    "teacher",
    [
        {"base_url": f"http://user:{SECRET}@host:8000/v1"},
        {"base_url": f"http://{SECRET}@host:8000/v1"},
        {"base_url": f"user:{SECRET}@host:8000/v1"},
        {"base_url": f"http://user:{SECRET}@host:port/v1"},
        {"base_url": f"http://host/v1?key={SECRET}"},
        {"base_url": "http://host/v1", "api_key_env": SECRET},
    ],
    ids=str,
)
def test_a_config_that_holds_a_secret_is_refused_and_the_secret_not_repeated(teacher: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="config: teachers.main.(base_url|api_key_env): ") as caught:
        parse({"student": "s", "teachers": {"main": {"model": "t", **teacher}}})
    assert SECRET not in str(caught.value) and caught.value.__cause__ is None


def test_the_saved_config_holds_the_name_of_the_variable_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", SECRET)
    teacher = {"model": "t", "base_url": "http://host/v1/", "api_key_env": "TEACHER_KEY"}
    saved = to_toml(parse({"student": "s", "teachers": {"main": teacher}}, say=lambda _: None))
    assert "TEACHER_KEY" in saved and SECRET not in saved and 'base_url = "http://host/v1"' in saved


# --- before a run -----------------------------------------------------------------------------------------------------

NEED = Requirements(tokens=[1, 2, 3], highest=TOY - 1, max_length=100)


def checked(fake: FakeEndpoint, need: Requirements = NEED, **changes: Any) -> str:
    return run(check(endpoint(fake, **changes), need))


DISTRIBUTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "honest": (lambda logp: logp, ""),
    "temperature 2": (lambda logp: logp / 2 - np.logaddexp.reduce(logp / 2, -1, keepdims=True), ""),
    "times 3": (lambda logp: logp * 3, "with all others at most the probability 0"),
    "divided by 3": (lambda logp: logp / 3, r"have at least the probability \d\."),
    "plus 0.5": (lambda logp: np.minimum(logp + 0.5, 0), r"have at least the probability 1\."),
    "minus 0.5": (lambda logp: logp - 0.5, "with all others at most the probability 0"),
    "hates the end token": (lambda logp: logp - 5.0 * (np.arange(logp.shape[-1]) == 1), "with all others at most"),
}


@pytest.mark.parametrize("case", DISTRIBUTIONS)
def test_log_probs_of_no_distribution_are_refused(case: str) -> None:
    """Its own words end within 24 tokens, so that the end token is likely somewhere."""
    change, why = DISTRIBUTIONS[case]
    honest = model("builtin:teacher")
    need = Requirements([10, 37, 11, 34, 12, 33, 38], 38, 300, best=20)  # I9J6K5=
    with FakeEndpoint(lambda tokens: change(honest(tokens))) as fake:
        if why:
            with pytest.raises(ConfigError, match=f"teachers.main: .* gives log-probs of no distribution: .*{why}"):
                checked(fake, need)
        else:
            assert checked(fake, need).endswith("context 4096")


def test_a_server_that_returns_fewer_log_probs_is_used_and_that_is_said(fake: FakeEndpoint) -> None:
    fake.max_logprobs = 2
    assert "; its log-probs are not tested, because it returns fewer than teachers.main.max_logprobs = 5 (" in checked(
        fake, Requirements([1, 2, 3], TOY - 1, 100, best=5)
    )


def test_an_endpoint_that_can_is_found_so_in_a_few_tiny_requests(fake: FakeEndpoint) -> None:
    need = Requirements(tokens=[1, 2, 3], highest=TOY - 1, max_length=100, k=5)
    assert checked(fake, need) == f"teacher main at {fake.url} serves teacher, context 4096"
    assert [(r["prompt"], r["prompt_logprobs"]) for r in fake.requests] == [
        ([1, 2, 3], 0),
        ([1, 2, 3], 5),
        ([1, 2, 3, TOY - 1], 0),
    ]


def refusing(change: Callable[[FakeEndpoint], None] = lambda _: None, need: Requirements = NEED, **changes: Any) -> Any:
    return change, need, changes


CANNOT = {
    "another model": (
        refusing(model="qwen"),
        "teachers.main.model = 'qwen': http://.* does not serve it; write one of its models: 'teacher'",
    ),
    "short context": (
        refusing(need=Requirements([1, 2], 3, max_length=4096)),
        r"teachers.main: .* context of 4096, but prompt \+ sampler.max_tokens \+ 1 are up to 4097: lower "
        r"sampler.max_tokens, shorten the prompts, or start the server with --max-model-len 4097",
    ),
    "too few log-probs": (
        refusing(need=Requirements([1, 2], 3, 10, k=21)),
        "teachers.main.max_logprobs: the loss needs 21 log-probs .* start the server with --max-logprobs 21, .*max all",
    ),
    "fewer embeddings": (
        refusing(need=Requirements([1, 2], TOY, 10)),
        "teachers.main: the endpoint cannot score token 6, the highest that the student may sample: does ",
    ),
    "other token ids": (
        refusing(lambda fake: fake.tell("other ids")),
        "teachers.main.base_url = 'http://.*/v1': it cannot score .*holds no log-prob of the sent token 2",
    ),
    "no prompt_logprobs": (
        refusing(lambda fake: setattr(fake, "always", "no logprobs")),
        "teachers.main.base_url = .* no prompt_logprobs: the server must support them",
    ),
    "down": (refusing(lambda fake: setattr(fake, "always", "broken")), "teachers.main.base_url = .* answers 500"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_an_endpoint_cannot_do_is_told_with_what_to_write(case: str, fake: FakeEndpoint) -> None:
    (change, need, changes), message = CANNOT[case]
    change(fake)
    with pytest.raises(ConfigError, match=message) as caught:
        checked(fake, need, **changes)
    assert "\n" not in str(caught.value)


class Lists(FakeEndpoint):
    """Endpoint with another list of models."""

    models: Any = ()

    def get(self, to: BaseHTTPRequestHandler) -> None:
        send(to, 200, {"object": "list", "data": list(self.models)})


def test_an_endpoint_without_any_model_is_refused() -> None:
    with (
        Lists(table(TEACHER.numpy())) as fake,
        pytest.raises(ConfigError, match=r"main.model = 'teacher': http://.* serves no model: load it there$"),
    ):
        checked(fake)


def test_of_many_models_the_most_similar_are_listed() -> None:
    with Lists(table(TEACHER.numpy())) as fake, pytest.raises(ConfigError) as caught:
        fake.models = [{"id": ["odd"]}, *({"id": f"other-{n}"} for n in range(500)), {"id": "teacher-2"}]
        checked(fake)
    assert "write one of its models: 'teacher-2', " in str(caught.value)
    assert str(caught.value).endswith(" and 491 more") and len(str(caught.value)) < 400


def test_half_a_surrogate_pair_is_sent_as_json_writes_it(fake: FakeEndpoint) -> None:
    with pytest.raises(EndpointError, match="answers 4"):
        run(client.Client(endpoint(fake)).ask("POST", "/completions", {"model": "other", "prompt": "\ud83d"}))
    assert fake.requests[-1]["prompt"] == "\ud83d"


def test_a_gateway_that_lists_no_models_is_tried(fake: FakeEndpoint) -> None:
    fake.lists = False
    assert checked(fake) == f"teacher main at {fake.url} serves teacher"
    with pytest.raises(ConfigError, match="it usually ends in /v1 .*404"):
        checked(fake, url=fake.url.removesuffix("/v1"))


# --- answers ----------------------------------------------------------------------------------------------------------


def test_rows_shifted_by_one_are_found_whichever_way_and_however_many_are_asked_for() -> None:
    """A shifted row may hold the right token by chance: not all along a response."""
    logp_TV = np.log(np.random.default_rng(0).dirichlet(np.ones(50), 40))
    sent = np.random.default_rng(1).integers(0, 50, 40).tolist()
    for k in (0, 5, 20):
        rows = prompt_logprobs(logp_TV, sent, k)
        answer = {"choices": [{"prompt_logprobs": rows}]}
        assert read(answer, sent, range(10, 40), k=k).logp_N.shape == (30,)
        for shifted in ([None, *rows[2:], rows[1]], [None, rows[-1], *rows[1:-1]]):
            with pytest.raises(WrongAnswer):
                read({"choices": [{"prompt_logprobs": shifted}]}, sent, range(10, 40), k=k)


@pytest.mark.parametrize("answer", [None, [], {}, {"choices": []}, {"choices": [{}, {}]}, {"choices": "x"}], ids=str)
def test_what_is_no_answer_is_refused(answer: Any) -> None:
    with pytest.raises(WrongAnswer, match="exactly one choice for one prompt|no prompt_logprobs"):
        read(answer, [1, 2], [1], k=0)


def test_rounding_above_zero_is_forgiven() -> None:
    answer = {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": 1e-6}}]}]}
    handle = Handle(header_of(rollout := uniform(make_prompts(1)[0], 0, [7])), rollout)
    logp_N = read(answer, [5, 7], [1], k=0).logp_N
    assert trust.scored(handle, teacher="main", teacher_logp=logp_N).body.teacher_logp.tolist() == [0.0]


# --- the fake, from a terminal ----------------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_fake_serves_a_model_from_a_terminal_and_ends() -> None:
    command = [sys.executable, "-m", "slipstream.testing.endpoint", "builtin:teacher"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split('"')[1]
    assert url.startswith("http://127.0.0.1:")
    assert run(check(Endpoint("main", url, "teacher"), Requirements([5, 6, 7], 8, 50, k=3))).endswith("context 4096")
    process.send_signal(2)
    assert process.wait(10) == 0
    process.stdout.close()
