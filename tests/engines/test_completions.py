"""The sampler that asks an OpenAI-compatible server, against a table whose answers are known."""

import asyncio
import contextlib

import numpy as np
import pytest

from slipstream.engines.http import client
from slipstream.engines.http.scorer import WrongAnswer
from slipstream.engines.server import sampler as served
from slipstream.engines.server.api import Drawn, Served, ServerEndpoint, checked, served_name
from slipstream.engines.server.sampler import CompletionsSampler
from slipstream.errors import EngineError
from slipstream.protocols import Sampling
from slipstream.records import Prompt, Rollout
from support.fake_endpoint import FakeEndpoint, table

VOCAB, END = 8, 5
LOGQ_VV = np.log(np.full((VOCAB, VOCAB), 0.02) + 0.84 * np.roll(np.eye(VOCAB), 1, axis=1))
"""After each token the next number is likely."""


def sampler_of(server: FakeEndpoint) -> CompletionsSampler:
    endpoint = ServerEndpoint("", server.url, served_name(ServerEndpoint("", server.url, "m"), "m"))
    return CompletionsSampler(Served(endpoint, "openai", "builtin:student", "float32", ""), stop_ids={END})


def answers(sampler: CompletionsSampler, sampling: Sampling, *, first: int = 0, seed: int = 1) -> list[Rollout]:
    prompt = Prompt(id="p", number=0, tokens=np.array([0, 1], np.int32), seed=seed, first=first)
    return [handle.body for handle in asyncio.run(sampler.generate(prompt, sampling))]


def test_greedy_answers_follow_the_table_and_end_at_an_end_token() -> None:
    with FakeEndpoint(table(LOGQ_VV)) as server:
        sampler = sampler_of(server)
        (whole,) = answers(sampler, Sampling(max_tokens=9, temperature=0))
        (cut,) = answers(sampler, Sampling(max_tokens=2, temperature=0))
    assert (whole.tokens.tolist(), whole.finish) == ([2, 3, 4, END], "eos")
    assert (cut.tokens.tolist(), cut.finish) == ([2, 3], "length")
    assert (whole.action_logp == 0).all() and set(whole.versions) == {0}


def test_members_have_seeds_of_their_own() -> None:
    sampling = Sampling(max_tokens=6, group=4, temperature=3.0)
    with FakeEndpoint(table(LOGQ_VV)) as server:
        sampler = sampler_of(server)
        group = answers(sampler, sampling)
        assert [rollout.index for rollout in group] == [0, 1, 2, 3]
        assert len({tuple(rollout.tokens) for rollout in group}) > 1
        assert [r.tokens.tolist() for r in answers(sampler, sampling)] == [r.tokens.tolist() for r in group]
        (third,) = answers(sampler, Sampling(max_tokens=6, temperature=3.0), first=2)
        assert third.tokens.tolist() == group[2].tokens.tolist()
        asked = server.requests[0]
    assert asked["stop_token_ids"] == [END] and asked["ignore_eos"] and asked["prompt"] == [0, 1]


def test_an_outage_costs_time_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in ((client, "REQUEST_PAUSES"), (client, "PROBE_PAUSES"), (served, "PUBLISH_PAUSES")):
        monkeypatch.setattr(where, name, (0.01, 0.02))
    with FakeEndpoint(table(LOGQ_VV)) as server:
        sampler = sampler_of(server)
        server.tell(*["broken"] * 6)
        assert len(answers(sampler, Sampling(max_tokens=6, group=8))) == 8


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no ids", "gives a wrong answer: no token_ids: the server must support return_token_ids, as vLLM does"),
        ("short", "gives a wrong answer: 4 token ids, 4 log-probs, and 5 tokens in its usage"),
        ("refused", "answers 400: "),
        ("not json", "gives an answer that is not JSON"),
    ],
)
def test_an_answer_that_does_not_fit_is_an_error(fault: str, message: str) -> None:
    with FakeEndpoint(table(LOGQ_VV)) as server:
        sampler = sampler_of(server)
        server.tell(fault)  # type: ignore[arg-type]
        with pytest.raises(EngineError, match=message):
            answers(sampler, Sampling(max_tokens=9, temperature=0))


@pytest.mark.parametrize(
    ("tokens", "fits"), [([1, 2, 3, 4], True), ([1, 2, 3, END], True), ([1, END, 2, 3], False), ([END, 1, 2, 3], False)]
)
def test_no_token_follows_an_end_token(tokens: list[int], fits: bool) -> None:
    drawn = Drawn(tokens, [(token, -0.5) for token in tokens], 4, "length", "")
    with contextlib.nullcontext() if fits else pytest.raises(WrongAnswer, match="with end tokens at"):
        assert checked(drawn, Sampling(max_tokens=4), [END], 100) == drawn
