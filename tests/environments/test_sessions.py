"""The calls of an agent as lineages: nothing that was sampled is tokenised again, left out or trained twice."""

import asyncio
import json
import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.environments import Message
from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.branches import History, history_of
from slipstream.environments.gateway.chat_json import chat_of, completion, dump_json
from slipstream.environments.gateway.sessions import Answer, Failed, Refused, Session
from slipstream.protocols import Sampling
from slipstream.records import Prompt, Rollout
from support.gateways import LOOK, STOPS, VOCABULARY, Babble, renderer

T = TypeVar("T")
WIDE = Limits(turns=1000, calls=1000, turn_tokens=None, seconds=60.0, step_seconds=10.0)
MUCH = Sampling(max_tokens=4000, group=4)


@cache
def qwen() -> Renderer:
    return renderer("qwen")


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def prompt_of(messages: Sequence[Message] = (user("And?"),), seed: int = 3) -> Prompt:
    return Prompt(id="p", number=5, tokens=qwen().open(messages), seed=seed)


def session_of(policy: Any, *, limits: Limits = WIDE, sampling: Sampling = MUCH, seed: int = 3) -> Session:
    return Session(policy, qwen(), prompt_of(seed=seed), sampling, 1, limits, VOCABULARY)


async def asked(
    session: Session, messages: Sequence[Message], tools: Any = (), again: bool = False, **rest: Any
) -> Answer:
    """Send everything through JSON, as a server does."""
    body = dump_json({"messages": list(messages), "tools": list(tools), **rest})
    chat = chat_of(body)
    return await session.answer_once(
        body, again, lambda: session.chat(chat.messages, chat.tools, chat.most, chat.stops)
    )


def told(answer: Answer) -> Message:
    """Return the message that a client gets, and sends back."""
    chat = chat_of(dump_json({"messages": [user("?")]}))
    message: Message = json.loads(completion(answer, chat))["choices"][0]["message"]
    return message


def seen(rng: random.Random, said: Message) -> list[Message]:
    if calls := said.get("tool_calls"):
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": rng.choice(["ok", "<|im_end|>", "{}"])}
            for call in calls
        ]
    return [user(rng.choice(["go on", "no\n", "<tool_call>", "  "]))]


def check(policy: Babble, rows: Sequence[Rollout]) -> None:
    """Every call is a prefix of a lineage, and every sampled token is trained once."""
    whole = [np.concatenate([row.prompt.tokens, row.tokens]) for row in rows]
    for prompt, said in policy.calls:
        call = np.concatenate([prompt, said])
        assert any(np.array_equal(row[: len(call)], call) for row in whole)
    trained = np.concatenate([row.logp[row.loss_mask] for row in rows])
    np.testing.assert_array_equal(np.sort(trained)[::-1], -1e-6 * (1 + np.arange(policy.drawn)))
    assert len({row.index for row in rows}) == len(rows) and {row.index % 4 for row in rows} == {1}
    assert {row.episode for row in rows} == {1} and [row.branch for row in rows] == list(range(len(rows)))


# --- proof 1 ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
def test_every_call_is_a_prefix_of_a_lineage_and_no_token_is_trained_twice(seed: int) -> None:
    """Random trees of calls: continued, forked, edited, with other tools, by subagents, several at a time."""
    rng, policy = random.Random(seed), Babble(gap=1e-4)

    async def main() -> list[Rollout]:
        session = session_of(policy, seed=seed)
        known: list[tuple[list[Message], list[Any]]] = [([user("And?")], [LOOK] * rng.randrange(2))]

        async def one() -> None:
            messages, tools = rng.choice(known)
            match rng.randrange(8):
                case 0:
                    messages = [{"role": "system", "content": "You are another."}, user(rng.choice("abc"))]
                case 1:
                    place = rng.randrange(len(messages))
                    messages = [*messages]
                    messages[place] = messages[place] | {"content": f"{messages[place]['content']}!"}
                case 2:
                    tools = [] if tools else [LOOK]
            most = rng.choice([None, None, rng.randint(1, 12)])
            answer = await asked(session, messages, tools, max_tokens=most)
            reply = told(answer)
            known.append(([*messages, reply, *seen(rng, reply)], tools))

        for _ in range(rng.randint(1, 8)):
            await asyncio.gather(*(one() for _ in range(rng.choice([1, 1, 3]))))
        session.close()
        return session.rollouts("eos", 4, {})

    check(policy, asyncio.run(main()))


# --- lineages ---------------------------------------------------------------------------------------------------------


async def conversed(session: Session, turns: int, tools: Sequence[Any] = (LOOK,)) -> list[Message]:
    rng, messages = random.Random(0), [user("And?")]
    for _ in range(turns):
        reply = told(await asked(session, messages, tools))
        messages += [reply, *seen(rng, reply)]
    return messages


def ran(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_a_conversation_is_one_lineage_though_thinking_and_blanks_never_reach_the_agent() -> None:
    async def main() -> None:
        for seed in range(6):
            policy = Babble()
            session = session_of(policy, seed=seed)
            await conversed(session, 9)
            (row,) = session.rollouts("eos", 4, {"reward": 1.0})
            np.testing.assert_array_equal(row.prompt.tokens, qwen().open([user("And?")], [LOOK]))
            assert row.outcome["turns"] == 9 and row.outcome["reward"] == 1 and row.outcome["branches"] == 1
            assert sorted(set(row.turn.tolist()) - {-1}) == list(range(9))
            check(policy, [row])

    ran(main())


def test_what_was_changed_opens_a_branch_and_both_are_trained() -> None:
    async def main() -> None:
        policy = Babble()
        session = session_of(policy)
        messages = await conversed(session, 3)
        edited = [messages[0], messages[1] | {"content": "I said otherwise."}, *messages[2:]]
        await asked(session, edited, [LOOK])
        await asked(session, messages, [LOOK])  # the first goes on
        first, second = sorted(session.rollouts("eos", 4, {}), key=lambda row: len(row.prompt.tokens))
        assert first.turn.max() == 3 and second.turn.max() == 0
        assert second.loss_mask.all() and "otherwise" in qwen().text(second.prompt.tokens)
        check(policy, session.rollouts("eos", 4, {}))

    ran(main())


def test_a_fork_begins_with_the_very_ids_that_were_sampled() -> None:
    """Not with those of the text that they are."""

    async def main() -> None:
        policy = Babble()
        session = session_of(policy)
        messages = await conversed(session, 3)
        early = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        await asked(session, [*messages[: early + 1], user("Otherwise.")], [LOOK])
        (old, new) = sorted(session.rollouts("eos", 4, {}), key=lambda row: len(row.prompt.tokens))
        shared = np.concatenate([old.prompt.tokens, old.tokens[old.turn == 0]])
        np.testing.assert_array_equal(new.prompt.tokens[: len(shared)], shared)

    ran(main())


def test_token_ids_that_go_on_from_a_lineage_continue_the_longest() -> None:
    async def main() -> None:
        policy = Babble()
        session = session_of(policy)
        ids = session.prompt.tokens
        for n in range(4):
            answer = await session.generate(ids)
            assert answer.read == len(ids)
            ids = np.concatenate([ids, answer.ids, [5 + n]]).astype(np.int32)
        await session.generate(ids[:-2])  # a part of what was sampled: a branch
        rows = session.rollouts("eos", 4, {})
        assert sorted(row.turn.max() for row in rows) == [0, 3]
        check(policy, rows)
        for wrong in ([], [-1], [VOCABULARY]):
            with pytest.raises(Refused, match=f"at least one id, each from 0 to {VOCABULARY - 1}"):
                await session.generate(np.array(wrong, np.int64))

    ran(main())


def test_draws_do_not_depend_on_when_calls_come_nor_on_what_runs_beside_them() -> None:
    opened = [[user(str(n))] for n in range(5)] + [[user("And?")]]

    async def main(order: Sequence[int], *, together: bool) -> dict[str, list[int]]:
        session = session_of(Babble(gap=1e-3))
        if together:
            found = await asyncio.gather(*(asked(session, opened[n]) for n in order))
        else:
            found = [await asked(session, opened[n]) for n in order]
        return {str(opened[n]): answer.ids.tolist() for n, answer in zip(order, found, strict=True)}

    expected = ran(main(range(6), together=False))
    assert ran(main([3, 5, 0, 1, 4, 2], together=False)) == ran(main([5, 4, 3, 2, 1, 0], together=True)) == expected


def test_the_same_conversation_asked_otherwise_is_drawn_anew() -> None:
    async def main() -> None:
        policy = Babble()
        session = session_of(policy)
        for most in (None, 200, 201, 202, 203):
            await asked(session, [user("And?")], max_tokens=most)
        assert len({(prompt.seed, prompt.offset) for prompt, _ in policy.asked}) == 5
        check(policy, session.rollouts("eos", 4, {}))

    ran(main())


VALUES = st.sampled_from([1, True, 1.0, "1", None, {"a": 1}, {"a": True}])


def called(arguments: Any) -> Any:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


ARGUMENTS = st.dictionaries(st.just("a"), VALUES, max_size=1)
SENT = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), st.text(max_size=3)
    ),
    st.builds(lambda given, as_text: called(json.dumps(given) if as_text else given), ARGUMENTS, st.booleans()),
)


@settings(max_examples=200, deadline=None)
@example([[called({"a": 1})], [called({"a": True})]], [True] * 4)
@given(st.lists(st.lists(SENT, max_size=4), min_size=1, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_what_is_kept_of_the_latest_request_changes_nothing(requests: list[list[Any]], with_tools: list[bool]) -> None:
    """Messages that equal earlier ones are not parsed again, though 1 equals True and they are not the same JSON."""
    known: Sequence[Any] = ()
    before = History()
    for sent, tooled in zip(requests, with_tools, strict=False):
        body = dump_json({"messages": [*sent, user("?")], "tools": [LOOK] * tooled})
        chat, alone = chat_of(body, known), chat_of(body)
        assert json.dumps(chat.messages) == json.dumps(alone.messages)
        known, before = chat.known, history_of(chat.messages, chat.tools, before)
        assert before == replace(history_of(alone.messages, alone.tools, History()), messages=chat.messages)


# --- retries and ends -------------------------------------------------------------------------------------------------


def test_a_retry_has_the_first_answer_even_while_that_is_being_written() -> None:
    async def main() -> None:
        policy = Babble(gap=1e-3)
        session = session_of(policy)
        first, again = await asyncio.gather(*(asked(session, [user("And?")], again=n > 0) for n in range(2)))
        assert first is again and await asked(session, [user("And?")], again=True) is first
        assert len(policy.calls) == 1

    ran(main())


def test_equal_requests_are_branches_with_draws_of_their_own() -> None:
    """At once, one after the other, at the beginning of a conversation and in its middle."""

    async def main() -> None:
        policy = Babble(gap=1e-3)
        session = session_of(policy)
        messages = [user("And?")]
        for turn in range(2):
            found = await asyncio.gather(*(asked(session, messages) for _ in range(3)))
            found.append(await asked(session, messages))
            assert len({answer.number for answer in found}) == 4
            messages += [told(found[0]), user(f"{turn}")]
        rows = session.rollouts("eos", 4, {})
        assert len(policy.calls) == 8 and len(rows) == 7
        assert len({(prompt.seed, prompt.offset) for prompt, _ in policy.asked}) == 8
        check(policy, rows)

    ran(main())


def test_a_request_that_failed_is_tried_anew_when_it_comes_again() -> None:
    async def main() -> None:
        session = session_of(Babble(), limits=replace(WIDE, turns=0))
        for _ in range(2):
            with pytest.raises(Refused, match="all of its 0 calls"):
                await asked(session, [user("And?")], again=True)
        session.limits = WIDE
        assert (await asked(session, [user("And?")], again=True)).number == 0

    ran(main())


def test_nothing_is_kept_of_a_request_that_was_refused() -> None:
    async def main() -> None:
        session = session_of(Babble(), limits=replace(WIDE, turns=0))
        for n in range(5):
            with pytest.raises(Refused):
                await asked(session, [user(f"{n}")])
        with pytest.raises(Refused, match="has .* bytes, more than"):
            await asked(session, [user("x" * (session.max_bytes + 1))])
        await asyncio.sleep(0)
        assert not session.answers and not session.lost

    ran(main())


def test_who_asks_no_more_cancels_nothing_and_gets_the_answer_when_he_comes_again() -> None:
    async def main() -> None:
        policy = Babble(gap=0.05)
        session = session_of(policy)
        call = asyncio.create_task(asked(session, [user("And?")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await asked(session, [user("And?")])
        assert len(policy.calls) == 1 and policy.cancelled == 0

    ran(main())


def test_a_session_that_ends_cancels_what_runs_and_answers_no_more() -> None:
    async def main() -> None:
        policy = Babble(gap=1e9)
        session = session_of(policy)
        call = asyncio.create_task(asked(session, [user("And?")]))
        await asyncio.sleep(0.01)
        session.close()
        with pytest.raises(Refused, match="closed before the answer"):
            await call
        with pytest.raises(Refused, match="this session is closed"):
            await asked(session, [user("And?")])
        assert policy.cancelled == 1 and session.rollouts("eos", 4, {}) == []

    ran(main())


def test_limits_are_told_in_the_word_at_which_agents_stop() -> None:
    async def main() -> None:
        session = session_of(Babble(), limits=replace(WIDE, turns=2, turn_tokens=3))
        messages = await conversed(session, 2)
        assert session.stopped is None
        with pytest.raises(Refused, match=r"all of its 2 calls \(environment.turns\)") as refused:
            await asked(session, messages)
        assert refused.value.code == "context_length_exceeded" and session.stopped == "turns"
        (row,) = session.rollouts("turns", 4, {})
        assert max(np.bincount(row.turn[row.loss_mask])) <= 3

        session = session_of(Babble(), sampling=Sampling(max_tokens=60))
        with pytest.raises(
            Refused,
            match=r"maximum context length is reached: this conversation has \d+ tokens; at most \d+ are allowed",
        ):
            await conversed(session, 30)
        assert session.stopped == "length"
        rows = session.rollouts("eos", 4, {})
        assert all(len(row.prompt.tokens) + len(row.tokens) <= session.max_tokens for row in rows)

    ran(main())


@pytest.mark.parametrize(
    ("said", "stops", "text", "stop"),
    [
        ("I look.\nObservation: a door", "Observation:", "I look.", "Observation:"),
        ("I look.\nObservation: a door", ["door", "tion"], "I look.\nObserva", "tion"),
        ("<think>an Observation: in thought</think>I look.", ["Observation:"], "I look.", ""),
        ("nothing of the kind", ["Observation:"], "nothing of the kind", ""),
        ("Observation: first", ["Observation:"], "", "Observation:"),
    ],
)
def test_a_turn_ends_with_the_token_that_completes_a_stop_sequence(said: str, stops: Any, text: str, stop: str) -> None:
    async def main() -> None:
        policy = Babble()
        policy.says = [said]
        session = session_of(policy)
        answer = await asked(session, [user("And?")], stop=stops)
        assert (answer.text, answer.stop, answer.finish) == (text, stop, "stop")
        ((_, drawn),) = policy.calls
        if stop:
            assert stop in qwen().visible(answer.ids) and stop not in qwen().visible(answer.ids[:-1])
        np.testing.assert_array_equal(answer.ids, drawn[: len(answer.ids)])
        assert (len(answer.ids) < len(drawn)) == bool(stop)
        again = await asked(session, [user("And?"), told(answer), user("go on")])
        assert again.finish in ("stop", "tool_calls")
        rows = session.rollouts("eos", 4, {})
        assert len(rows) == (2 if stop else 1), "text without the stop sequence is another conversation"
        np.testing.assert_array_equal(
            np.sort(rows[0].logp[rows[0].loss_mask])[::-1], -1e-6 * (1 + np.arange(rows[0].loss_mask.sum()))
        )

    asyncio.run(main())


def test_a_sampler_that_fails_is_told_to_the_run_and_not_to_the_agent() -> None:
    class Broken(Babble):
        async def generate(self, *given: Any, **more: Any) -> Any:
            raise ValueError("a secret of ours")

    async def main() -> None:
        session = session_of(Broken())
        with pytest.raises(Failed, match="^$"):
            await asked(session, [user("And?")])
        with pytest.raises(ValueError, match="a secret of ours"):
            await session.failure

    ran(main())


# --- from messages to tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["qwen", "coder", "llama", "mistral", "deep"])
def test_what_was_seen_holds_no_control_token_however_a_conversation_comes_to_be(template: str) -> None:
    """Rendered from its beginning, too. What the assistant said, and the first prompt, may hold some."""
    made = renderer(template)
    said = {"function": {"name": "look", "arguments": {"what": "there"}}}
    every = "".join(made.quoting.control)
    for shown in (every, "nothing"):
        messages = [user("Where?"), {"role": "assistant", "content": "", "tool_calls": [said]}]
        messages += [{"role": "tool", "content": shown}, {"role": "assistant", "content": "So."}, user(shown)]
        ids = made.open(messages, [LOOK])
        counts = {text: int((ids == index).sum()) for text, index in made.quoting.control.items()}
        if shown == every:
            found = counts
            assert made.text(ids).count("[RESULTS]") >= 2
    assert found == counts


def test_a_first_prompt_has_the_ids_that_a_row_has() -> None:
    made = renderer("qwen", template_args={"quiet": True})
    messages = [{"role": "system", "content": "Calls are <tool_call>…</tool_call>"}, user("And <think>?")]
    text = made.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, quiet=True)
    expected = made.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert made.open(messages).tolist() == expected and STOPS[0] in expected


def test_calls_are_written_into_the_text_where_a_template_knows_none() -> None:
    made = renderer("chatml", format="hermes")
    said = {"function": {"name": "look", "arguments": {"what": "there"}}}
    messages = [
        user("?"),
        {"role": "assistant", "content": "So", "tool_calls": [said]},
        {"role": "tool", "content": "x"},
    ]
    assert 'So\n<tool_call>\n{"name": "look", "arguments": {"what": "there"}}\n</tool_call><|im_end|>' in made.text(
        made.open(messages)
    )
