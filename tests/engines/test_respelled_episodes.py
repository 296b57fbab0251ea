"""Episodes for a teacher with another tokenizer: its own template between turns, and the exact bytes within them."""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from slipstream.config.losses import LossSpec
from slipstream.data.spelling import Spelling
from slipstream.engines.respelling import RespellingScorer
from slipstream.engines.score_checks import scored
from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.sessions import Session
from slipstream.protocols import Respelling, Sampling
from slipstream.records import (
    TOO_LONG,
    UNWRITTEN,
    Group,
    Handle,
    Ints,
    Prompt,
    Rollout,
    graded,
    header_of,
    lineage,
    one_turn,
)
from support.gateways import LOOK, VOCABULARY, Babble
from support.templates import LLAMA, QWEN, SPECIAL, backend, tokenizer_with

CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "there"}}\n</tool_call>'
RESULT = "found<|im_end|>, I think"
QUESTION = [{"role": "user", "content": "And?"}]


@cache
def tokenizers() -> tuple[Any, Any]:
    """Return tokenizers of the student and of the teacher, whose merges and templates differ."""
    return tokenizer_with(QWEN), tokenizer_with(LLAMA, backend(300))


def writer(of: Any) -> Renderer:
    stops = of.convert_tokens_to_ids(["<|im_end|>", "<|eom|>"])
    return Renderer(of, stop_ids=stops, tools=[LOOK])


class Counting:
    """Engine that gives each token a log-prob by its place, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked = list[Rollout]()

    async def score(self, group: Group) -> list[Handle]:
        self.asked += [graded(handle) for handle in group]
        logq = [-0.001 * np.arange(1, len(each.tokens) + 1, dtype=np.float32) for each in map(graded, group)]
        return [
            scored(handle, teacher="t", teacher_logp=each, teacher_action_logp=each[:, None])
            for handle, each in zip(group, logq, strict=True)
        ]

    def close(self) -> None:
        pass


def scorer(limit: int = 4000) -> RespellingScorer:
    student, teacher = tokenizers()
    roles = dict(zip(*(each.convert_tokens_to_ids(SPECIAL) for each in (student, teacher)), strict=True))
    respelling = Respelling("other", len(teacher), roles, limit)
    loss, spellings = LossSpec(cache="sampled", formula=""), (Spelling(student), Spelling(teacher))
    return RespellingScorer(Counting(), "t", *spellings, respelling, loss=loss, renderers={"": writer(teacher)})


def said(text: str) -> Rollout:
    ids = np.array(tokenizers()[0](text, add_special_tokens=False)["input_ids"], np.int32)
    prompt = Prompt(id="p", number=0, tokens=ids[:1])
    zeros = np.zeros((len(ids), 1), np.float32)
    return one_turn(prompt, 0, actions=ids[:, None], action_logp=zeros - 0.5, versions=ids * 0, finish="eos")


def episode(*turns: str, first: Sequence[Any] = (), results: Sequence[Any] | None = None) -> Rollout:
    """Return an episode of these turns, with one result of a tool between every two."""
    student, teacher = tokenizers()
    mine, theirs = writer(student), writer(teacher)
    results = [[{"role": "tool", "content": RESULT}]] * (len(turns) - 1) if results is None else results
    prompt = Prompt(id="p", number=0, tokens=mine.open(QUESTION), respelled=theirs.open(QUESTION))
    parts: list[Rollout | Ints] = [said(turns[0])]
    for turn, result in zip(turns[1:], results, strict=True):
        parts += [mine.extend(parts[-1].tokens, result or []), said(turn)]  # type: ignore[union-attr]
    return lineage(prompt, 0, parts, finish="eos", conversation=[{"added": first}, *results])


def score(engine: RespellingScorer, rollout: Rollout) -> tuple[Handle, Rollout]:
    (handle,) = asyncio.run(engine.score([Handle(header_of(rollout), rollout)]))
    engine.close()
    return handle, next(iter(engine.engine.asked), rollout)


def text_of(ids: Any) -> str:
    return str(tokenizers()[1].decode(ids, skip_special_tokens=False))


def header(role: str) -> str:
    return f"<|start|>{role}<|header|>\n\n"


def test_an_episode_is_the_teachers_conversation_with_the_students_bytes() -> None:
    rollout = episode(f"{CALL}<|im_end|>", "I think so<|im_end|>")
    handle, asked = score(scorer(), rollout)
    assert text_of(asked.prompt.tokens).endswith(f"{header('user')}And?<|im_end|>{header('assistant')}")
    between = f"{header('ipython')}{json.dumps(RESULT)}<|im_end|>{header('assistant')}"
    assert text_of(asked.tokens) == f"{CALL}<|im_end|>{between}I think so<|im_end|>"
    end = tokenizers()[1].convert_tokens_to_ids("<|im_end|>")
    assert (asked.tokens == end).sum() == 3, "the result of the tool holds the name of an end token, and no end token"
    assert handle.header.left_out == (0, 0, 0, 0) and handle.body.scored_tokens.all()
    trained_Q = np.isin(asked.tokens, asked.tokens)
    places = [match.span() for match in re.finditer(re.escape(between), text_of(asked.tokens))]
    for place in range(len(asked.tokens)):
        at = len(text_of(asked.tokens[:place]))
        trained_Q[place] = not any(start <= at < stop for start, stop in places)
    expected = -0.001 * np.flatnonzero(trained_Q).sum() - 0.001 * trained_Q.sum()
    assert handle.body.teacher_logp.sum() == pytest.approx(expected, rel=1e-5), "tokens between turns have no score"


def test_a_turn_that_was_cut_gets_the_teachers_end() -> None:
    handle, asked = score(scorer(), episode("I think", "so<|im_end|>"))
    assert text_of(asked.tokens).startswith(f"I think<|im_end|>{header('ipython')}")
    assert handle.header.left_out is not None and handle.header.left_out[0] >= 1, "its last span is open"
    assert handle.header.left_out[1:] == (0, 0, 0)


def test_the_first_observation_stands_in_the_teachers_prompt() -> None:
    first = [{"role": "user", "content": "Now."}]
    _, asked = score(scorer(), episode("so<|im_end|>", first=first))
    end = f"{header('user')}And?<|im_end|>{header('user')}Now.<|im_end|>{header('assistant')}"
    assert text_of(asked.prompt.tokens).endswith(end)


def test_turns_behind_something_unknown_are_left_out() -> None:
    rollout = episode("so<|im_end|>", "is it<|im_end|>", "the answer<|im_end|>", results=[None, QUESTION])
    handle, asked = score(scorer(), rollout)
    first = len(said("so<|im_end|>").tokens)
    assert text_of(asked.tokens) == "so<|im_end|>"
    assert handle.body.scored_tokens.tolist() == [True] * first + [False] * (rollout.trained_tokens - first)
    assert set(handle.body.byte_spans[first:].tolist()) == {UNWRITTEN}


@pytest.mark.parametrize("room", [3, 12, 40])
def test_turns_beyond_the_teachers_context_are_left_out(room: int) -> None:
    rollout = episode("so<|im_end|>", "is it forty two<|im_end|>")
    engine = scorer(limit=len(rollout.prompt.respelled) + room)  # type: ignore[arg-type]
    handle, asked = score(engine, rollout)
    assert len(asked.tokens) <= room
    whole, _ = score(scorer(), rollout)
    inside = handle.body.scored_tokens
    assert set(handle.body.byte_spans[~inside].tolist()) == {TOO_LONG}
    np.testing.assert_allclose(handle.body.teacher_logp[inside], whole.body.teacher_logp[inside], rtol=1e-6)


def test_a_member_fails_whose_messages_the_teachers_template_refuses() -> None:
    rollout = episode("so<|im_end|>", "is it<|im_end|>")
    handle, _ = score(scorer(), replace(rollout, conversation=[{"added": []}, [{"role": "tool", "content": None}]]))
    assert handle.header.finish == "error" and "cannot read it" in handle.header.cause


def test_calls_of_an_agent_are_rebuilt_in_the_teachers_template() -> None:
    """A branch that continues, one with an edited history, and one that is asked by token ids."""
    student, teacher = tokenizers()
    prompt = Prompt(id="p", number=0, tokens=writer(student).open(QUESTION), respelled=writer(teacher).open(QUESTION))
    policy = Babble()
    policy.says += ["so", "is it", "sunny", "today"]
    edited = [{"role": "user", "content": "Or?"}, {"role": "assistant", "content": "Yes."}, *QUESTION]

    async def rows() -> list[Rollout]:
        limits = Limits(turns=9, calls=9, turn_tokens=None, seconds=60.0, step_seconds=10.0)
        session = Session(policy, writer(student), prompt, Sampling(max_tokens=4000, group=1), 0, limits, VOCABULARY)
        answer = await session.chat(QUESTION)
        reply = {"role": "assistant", "content": answer.text}
        await session.chat([*QUESTION, reply, *QUESTION])
        await session.chat(edited, [LOOK])
        await session.generate(prompt.tokens[:-1])
        session.close()
        return session.rollouts("eos", 1, {})

    first, second, third = asyncio.run(rows())
    _, asked = score(scorer(), first)
    assert text_of(asked.tokens).count(f"{header('user')}And?<|im_end|>{header('assistant')}") == 1
    _, asked = score(scorer(), second)
    assert text_of(asked.prompt.tokens) == text_of(writer(teacher).open(edited, [LOOK]))
    assert f"{header('assistant')}Yes.<|im_end|>" in text_of(asked.prompt.tokens)
    handle, _ = score(scorer(), third)
    assert handle.body.byte_spans.tolist() == [UNWRITTEN] * third.trained_tokens
