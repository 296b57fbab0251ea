"""Sampled ids stay as they are; the template writes everything else, and the text of tools controls nothing."""

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.environments import Call, Message
from slipstream.environments.chat.quoting import Part, Quoting
from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.chat.tool_calls import Format
from slipstream.environments.chat.tool_formats import call_message
from slipstream.errors import ConfigError, DataError, ModelError
from support.model_directories import build_tokenizer
from support.templates import ADDED, CHATML, DEEP, GEMMA, MISTRAL, QWEN, SPECIAL, TEMPLATES, backend, tokenizer_with

INNER = backend()
STOPS = [INNER.token_to_id(text) for text in ("<|im_end|>", "<|end|>", "<|eom|>")]
STOP = STOPS[0]
NATIVE = ["qwen", "coder", "llama", "mistral", "deep"]
"""Templates that write calls themselves."""
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "boolean"}},
        },
    },
}


def tool(content: str, **rest: Any) -> Message:
    return {"role": "tool", "content": content, **rest}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return tokenizer_with(TEMPLATES[name], INNER)


@cache
def renderer(name: str, format: str = "auto") -> Renderer:
    return Renderer(tokenizer_of(name), stop_ids=STOPS, format=format, tools=[LOOK])


def renderer_of(template: str, **options: Any) -> Renderer:
    return Renderer(tokenizer_with(template, INNER), stop_ids=STOPS, **options)


def ids_of(text: str) -> np.ndarray[Any, Any]:
    return np.array(INNER.encode(text, add_special_tokens=False).ids, np.int32)


def text_of(ids: Any) -> str:
    return str(INNER.decode([int(index) for index in ids], skip_special_tokens=False))


def odd_ids(text: str, rng: random.Random) -> list[int]:
    """Tokens that make a text, and not those that a tokenizer would give."""
    found = list[int]()
    for token in INNER.encode(text, add_special_tokens=False).tokens:
        at = rng.randrange(len(token)) if INNER.token_to_id(token) < INNER.get_vocab_size(False) else 0
        for piece in filter(None, (token[:at], token[at:])):
            whole = INNER.token_to_id(piece)
            found += [whole] if whole is not None else [INNER.token_to_id(letter) for letter in piece]
    return found


# --- the tail ---------------------------------------------------------------------------------------------------------

TAILS = {
    "qwen": "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama": '<|start|>ipython<|header|>\n\n"7"<|im_end|><|start|>assistant<|header|>\n\n',
    "mistral": '[RESULT]{"content": "7", "id": "000000000"}[/RESULT]',
    "deep": "[RESULTS][RESULT]7[/RESULT][/RESULTS]<|header|><think>\n",
}


@pytest.mark.parametrize("name", TAILS)
def test_behind_a_stop_token_come_the_separator_what_was_seen_and_the_next_header(name: str) -> None:
    assert text_of(renderer(name).extend(np.array([70, STOP]), [tool("7")])) == TAILS[name]


@pytest.mark.parametrize("name", TAILS)
def test_a_turn_that_was_cut_is_ended_first(name: str) -> None:
    ended, cut = (renderer(name).extend(np.array(ids), [tool("7")]) for ids in ([70, STOP], [70]))
    assert cut.tolist() == [STOP, *ended]
    assert renderer(name).extend(np.array([], int), [tool("7")]).tolist() == cut.tolist()


def test_any_stop_token_ends_a_turn() -> None:
    tails = [renderer("llama").extend(np.array([70, stop]), [tool("7")]).tolist() for stop in STOPS]
    assert tails[0] == tails[1] == tails[2]


def test_a_template_that_ends_no_turn_is_noted_and_what_was_sampled_stays() -> None:
    ours = renderer_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:", format="hermes")
    assert ours.notes == ("the chat template of a/model does not end the assistant's turn with a stop token",)
    for ids in ([70, STOP], [70]):
        assert text_of(ours.extend(np.array(ids), [user("7")])) == "\nuser: 7\nassistant:"


def test_one_answer_at_a_time_is_enough() -> None:
    again = "loop.index > 1 and messages[loop.index0 - 1].role == 'tool'"
    raises = "{% if " + again + " %}{{ raise_exception('two') }}{% endif %}"
    ours = renderer_of(QWEN.replace('{% elif m.role == "tool" %}', '{% elif m.role == "tool" %}' + raises))
    assert text_of(ours.extend(np.array([STOP]), [tool("7")])) == TAILS["qwen"]
    with pytest.raises(DataError, match="refuses these messages: two"):
        ours.extend(np.array([STOP]), [tool("7"), tool("8")])


def test_several_answers_are_put_where_the_template_puts_them() -> None:
    said = text_of(renderer("qwen").extend(np.array([STOP]), [tool("a"), tool("b"), user("c")]))
    assert said.count("<|im_start|>user") == 2
    assert "a\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n<|im_start|>user\nc<|im_end|>" in said
    said = text_of(renderer("mistral").extend(np.array([STOP]), [tool("a"), tool("b", tool_call_id="123456789")]))
    assert '"a", "id": "000000000"' in said
    assert '"b", "id": "123456789"' in said


def test_template_args_reach_the_header() -> None:
    quiet = renderer_of(QWEN, template_args={"quiet": True})
    assert text_of(quiet.extend(np.array([STOP]), [])).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_of_a_tail_are_those_of_the_whole_conversation(name: str) -> None:
    tokenizer, messages = tokenizer_of(name), [user("how is it?"), {"role": "assistant", "content": "so"}]
    seen = [user("the weather is 'sunny'\n\n    and more")]
    whole = tokenizer.apply_chat_template([*messages, *seen], tokenize=False, add_generation_prompt=True)
    tail = renderer(name, "hermes").extend(np.array([70]), seen)
    assert tokenizer(whole, add_special_tokens=False)["input_ids"][-len(tail) :] == tail.tolist()


WORDS = st.lists(st.sampled_from(["so", " I", " think", "\n", "é", " 42", '{"a": 1}', ",", " the weather", "    "]))
CALLS = [
    '<tool_call>\n{"name": "look", "arguments": {"what": "there"}}\n</tool_call>',
    '<tool_call>{"name":"look","arguments":{"what":"the answer"}}</tool_call>',
    '<tool_call>{"name":"look"',
]
SAID = st.tuples(WORDS, st.sampled_from(["", "<think>\nhm, so\n</think>\n\n"]), st.sampled_from(["", *CALLS]))
SEEN = st.lists(st.sampled_from(["7", " ok ", "\n", "😀", '{"status": "ok"}\n', *SPECIAL, *ADDED]), max_size=5)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(
    turns=st.lists(st.tuples(SAID, st.lists(SEEN, min_size=1, max_size=2), st.booleans()), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_every_prompt_goes_on_from_all_that_was_there(name: str, turns: list[Any], seed: int) -> None:
    """And says what the template would, where that keeps what was there."""
    rng, tokenizer, ours = random.Random(seed), tokenizer_of(name), renderer(name, "hermes")
    messages = [user("which is it?")]
    render = {"tokenize": False, "add_generation_prompt": True, "tools": [LOOK]}
    prompts = [tokenizer(tokenizer.apply_chat_template(messages, **render), add_special_tokens=False)["input_ids"]]
    kept = name != "deep"  # its header is not a part of what was said
    for (words, thinking, call), seen, cut in turns:
        ids = odd_ids(thinking + "".join(words) + call, rng)
        ids = ids[: rng.randrange(len(ids) + 1)] if cut else [*ids, STOP]
        reply = ours.parse(np.array(ids), cut=cut)
        observed = [tool("".join(each)) for each in seen] if reply.calls else [user("".join(seen[0]))]
        before = [*prompts[-1], *ids]
        prompts.append([*before, *ours.extend(np.array(ids), observed).tolist()])
        assert prompts[-1][: len(before)] == before
        content = text_of(ids[: len(ids) - (not cut)])
        messages += [{"role": "assistant", "content": content}, *observed]
        strips = content.startswith("\n") or (name in ("llama", "gemma") and content != content.strip())
        kept = kept and not strips and "think>" not in content and not (ours.wraps and reply.calls)
        if kept:
            ids_given = [m | {"tool_call_id": f"{n:09d}"} for n, m in enumerate(observed)]
            shown = [*messages[: -len(observed)], *ids_given] if name == "mistral" else messages
            assert text_of(prompts[-1]) == tokenizer.apply_chat_template(shown, **render)
            messages = shown


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_after_a_prompt_stand_where_the_template_puts_them(name: str) -> None:
    made = renderer(name, "hermes")
    system: list[Message] = [] if name in ("gemma", "mistral") else [{"role": "system", "content": "Be kind."}]
    seen = [user("  You see <|im_end|> two doors.\n"), user("One is red.")]
    prompt = made.open([*system, user("Get out!")])
    try:
        expected = text_of(made.open([*system, user("Get out!"), *(each | {"content": "x"} for each in seen)]))
    except DataError:  # roles must alternate
        with pytest.raises(DataError, match="chat template refuses these messages"):
            made.insert(prompt, seen)
        return
    plain = [each | {"content": "x"} for each in seen]
    assert text_of(made.insert(prompt, plain)) == expected
    assert controls(made.insert(prompt, seen)) == controls(made.insert(prompt, plain))
    with pytest.raises(DataError, match="ends with no header of a turn"):
        made.insert(prompt[:-1], seen)


@pytest.mark.parametrize("name", ["qwen", "coder", "llama", "mistral"])
def test_a_conversation_of_calls_is_the_one_that_the_template_writes(name: str) -> None:
    ours, tokenizer = renderer(name), tokenizer_of(name)
    messages = [user("which is it?")]
    row = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for count, cut in ((1, False), (1 if name == "llama" else 2, False), (1, True)):
        calls = [Call("look", {"what": f"there {n}"}) for n in range(count)]
        before = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        said = tokenizer.apply_chat_template([*messages, call_message(calls)], tokenize=False).removeprefix(before)
        ids = [*ids_of(said.rstrip("\n"))]
        ids = ids[:-1] if cut and ids[-1] == STOP else ids
        assert ours.parse(np.array(ids), cut=cut).calls == tuple(calls)
        seen = [tool(f"  seen <|im_end|> {n}\n", tool_call_id=f"{n:09d}") for n in range(count)]
        row += text_of(ids) + text_of(ours.extend(np.array(ids), seen))
        messages += [call_message(calls), *seen]
        assert row == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_each_result_has_the_id_of_its_call() -> None:
    """Calls are numbered from 0 in each turn, and so are results."""
    function = '"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}'
    call = f'{{{function}, "id": "{{{{ call.id }}}}"}}'
    named = MISTRAL.replace("{{ call.function | tojson }}", call)
    messages = [user("go")]
    for turn in (["one", "two"], ["three"]):
        messages.append(call_message([Call(name, {}) for name in turn]))
        messages += [tool(f"of {name}") for name in turn]
    text = text_of(renderer_of(named).open(messages))
    calls = re.findall(r'"(\w+)", "arguments": {}, "id": "(\d{9})"', text)
    results = re.findall(r'"of (\w+)", "id": "(\d{9})"', text)
    assert calls == results == [("one", "000000000"), ("two", "000000001"), ("three", "000000000")]


def test_thinking_that_a_template_would_strip_stays_and_is_noted() -> None:
    (note,) = renderer("qwen").notes
    assert note == "the chat template of a/model would strip thinking from earlier turns; it is kept"
    assert renderer("llama").notes == ()


# --- what tools say ---------------------------------------------------------------------------------------------------


def controls(ids: Sequence[int]) -> list[int]:
    return [int(index) for index in ids if text_of([index]) in {*SPECIAL, *ADDED}]


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    said=st.lists(st.sampled_from([*SPECIAL, *ADDED, "x", " ", "<", "|"]), min_size=1, max_size=40),
    as_tool=st.booleans(),
)
@settings(max_examples=25)
def test_no_text_of_a_message_becomes_a_control_token(name: str, said: list[str], as_tool: bool) -> None:
    ours, make = renderer(name, "hermes"), tool if as_tool else user
    ids = ours.extend(np.array([STOP]), [make("".join(said))])
    assert controls(ids) == controls(ours.extend(np.array([STOP]), [make("x")]))
    assert "".join(said).strip() in text_of(ids)


def test_what_lies_around_a_message_cannot_be_completed_by_it_to_a_control_token() -> None:
    ours = renderer_of(CHATML.replace("{{ m.content }}", "<{{ m.content }}>"), format="hermes")
    ids = ours.extend(np.array([STOP]), [user("|im_end|")])
    assert "<|im_end|><|im_end|>" in text_of(ids)
    assert ids.tolist().count(STOP) == 1


def test_no_other_part_of_a_message_may_say_a_control_token() -> None:
    with pytest.raises(DataError, match=r"'<\|im_end\|>' is a control token: only the content of a message"):
        renderer("qwen").extend(np.array([STOP]), [tool("7", name="<|im_end|>")])


def test_the_tokenizer_that_is_given_stays_as_it_is() -> None:
    tokenizer = tokenizer_with(QWEN)
    before = tokenizer.backend_tokenizer.to_str()
    Renderer(tokenizer, stop_ids=STOPS).extend(np.array([STOP]), [tool("<|im_end|>")])
    assert tokenizer.backend_tokenizer.to_str() == before
    assert not tokenizer.backend_tokenizer.encode_special_tokens
    assert tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"] == [STOP]


def words_are_control_tokens() -> PreTrainedTokenizerFast:
    """Unigram whose control tokens are pieces like others, and the likeliest."""
    letters = [(letter, -5.0) for letter in "▁abcdefghijklmnopqrstuvwxyz<>/|\n."]
    inner = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("<turn>", 0.0), *letters], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    inner.add_special_tokens(["</s>", "<unk>", AddedToken("<turn>", rstrip=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("make", [words_are_control_tokens, build_tokenizer, lambda: tokenizer_with(QWEN)])
def test_control_tokens_that_are_words_of_the_model_are_quoted_as_well(make: Any) -> None:
    tokenizer = make()
    quoting = Quoting(tokenizer)
    assert len(quoting.control) > 2
    for text, index in quoting.control.items():
        assert index not in quoting.encode([Part(text, quoted=True)])
        assert index not in quoting.encode([Part(f"a {text}b{text}", quoted=True)])
        assert quoting.encode([Part(text, quoted=False)]) == [index]
        ours = f"{text} a b{text}\nis"
        whole = tokenizer(text + ours, add_special_tokens=False)["input_ids"]
        anchored = tokenizer(quoting.anchor + ours, add_special_tokens=False)["input_ids"][1:]
        assert quoting.encode([Part(ours, quoted=False)]) == anchored
        assert len(anchored) == len(whole) - 1


def test_a_token_that_eats_blanks_behind_it_eats_those_of_the_template_and_none_of_a_message() -> None:
    inner = Tokenizer.from_str(INNER.to_str().replace('"rstrip":false', '"rstrip":true'))
    ours = Renderer(tokenizer_with(CHATML, inner), stop_ids=STOPS, format="hermes")
    assert text_of(ours.extend(np.array([STOP]), [user("<|im_end|>  7")])) == (
        "<|im_start|>user\n<|im_end|>  7<|im_end|><|im_start|>assistant\n"
    )


def test_what_a_template_writes_has_tokens() -> None:
    inner = Tokenizer(models.WordLevel({"<|im_end|>": 0, "<bos>": 1, "<pad>": 2, "a": 3}))
    inner.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    inner.add_special_tokens(["<|im_end|>", "<bos>", "<pad>"])
    with pytest.raises(ModelError, match="the text of the chat template cannot be encoded: a/model cannot encode"):
        Renderer(tokenizer_with(CHATML, inner), stop_ids=[0], format="hermes")


def test_blanks_that_were_added_stay_tokens() -> None:
    assert INNER.token_to_id("    ") in renderer("qwen").extend(np.array([STOP]), [tool("if:\n    go")])


def test_a_control_token_that_cannot_be_spelled_is_refused() -> None:
    inner = backend()
    inner.add_tokens([AddedToken("a", normalized=False)])
    with pytest.raises(ModelError, match="a/model: the text 'a' of a control token cannot be written without it"):
        Renderer(tokenizer_with(QWEN, inner), stop_ids=STOPS)


def test_text_that_a_tokenizer_cannot_write_is_told() -> None:
    inner = Tokenizer(models.WordLevel({"<|im_end|>": 0, **{each: n for n, each in enumerate("abcusertoln>", 1)}}))
    inner.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    inner.add_special_tokens(["<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    with pytest.raises(DataError, match="cannot encode 'ab9'"):
        Quoting(tokenizer).encode([Part("ab9", quoted=True)])


def test_half_a_character_is_a_question_mark() -> None:
    assert "a?b" in text_of(renderer("qwen").extend(np.array([STOP]), [tool("a\ud800b")]))


# --- templates that cannot be used ------------------------------------------------------------------------------------

TURN = "<|im_start|>{{ m.role }}"
DEPENDENT = {
    "the user's text": CHATML.replace("assistant\n", "assistant on {{ messages[0].content }}\n"),
    "whether there is a system prompt": CHATML.replace(
        "assistant\n", "assistant{{ ' now' if messages[0].role == 'system' }}\n"
    ),
    "the number of earlier turns": CHATML.replace(
        "assistant\n", "assistant {{ messages | selectattr('role', 'eq', 'assistant') | list | length }}\n"
    ),
    "the thinking of earlier turns": CHATML.replace(
        "assistant\n", "assistant{{ ' now' if 'Perhaps that' in messages[1].content and messages | length > 3 }}\n"
    ),
    "earlier calls of tools": QWEN.replace(
        "assistant\n{% if quiet", "assistant{{ ' again' if 'there' in messages[1].tool_calls | string }}\n{% if quiet"
    ),
    "whether the turn has calls": QWEN.replace(
        "{%- endfor %}<|im_end|>", "{%- endfor %}<|im_end|>{{ 'called' if m.tool_calls }}"
    ),
    "which tool was called": QWEN.replace(
        "{%- endfor %}<|im_end|>", "{%- endfor %}<|im_end|>{{ 'found' if 'find' in m.tool_calls | string }}"
    ),
    "what tools said earlier": CHATML.replace(
        "assistant\n", "assistant{{ ' again' if 'Seen' in messages[:-2] | string }}\n"
    ),
    "which tools there are": CHATML.replace("assistant\n", "assistant with {{ (tools or []) | length }}\n"),
    "the date": CHATML.replace(TURN, "{{ strftime_now('%d %b %Y') }}" + TURN),
    "what the assistant said": CHATML.replace(
        "<|im_end|>\n", "<|im_end|>{{ 'much' if 'Much' in m.content and m.role == 'assistant' }}\n"
    ),
    "the assistant's thinking": CHATML.replace(
        "<|im_end|>\n", "<|im_end|>{{ 'thought' if '</think>' in m.content }}\n"
    ),
}


@pytest.mark.parametrize("what", DEPENDENT)
def test_a_template_whose_tail_depends_on_the_past_is_refused_by_what(what: str) -> None:
    template = DEPENDENT[what]
    with pytest.raises(ModelError, match=f"a/model: what its chat template prints after .* depends on {what}, so that"):
        renderer_of(template, format="auto" if "tool_call>" in template else "hermes")


def test_a_template_that_cannot_be_used_is_told_in_a_line() -> None:
    with pytest.raises(ModelError, match="a/model has no chat template"):
        renderer_of(None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match='a/model: its chat template has no tool calls.*environment.format = "hermes"'):
        renderer_of(CHATML)
    with pytest.raises(ModelError, match="its chat template has no role for tool results: .*'tool'.*= \"hermes\""):
        renderer_of(QWEN.replace('m.role == "tool"', 'm.role == "observation"'))
    with pytest.raises(ModelError, match="no turn can follow one of the assistant: the chat template refuses.*: no"):
        renderer_of("{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}" + CHATML, format="hermes")
    with pytest.raises(ModelError, match="does not print the assistant's text exactly once"):
        renderer_of(CHATML.replace("{{ m.content }}", "{{ m.content }} {{ m.content }}"), format="hermes")
    with pytest.raises(ConfigError, match="environment.format = 'xml' is not known"):
        renderer_of(QWEN, format="xml")


def test_a_message_that_a_template_does_not_show_is_told() -> None:
    with pytest.raises(DataError, match="does not print messages whose role is 'note'"):
        renderer("qwen").extend(np.array([STOP]), [{"role": "note", "content": "7"}])
    with pytest.raises(DataError, match="refuses these messages: no role note"):
        renderer("mistral").extend(np.array([STOP]), [{"role": "note", "content": "7"}])
    with pytest.raises(DataError, match="must have a role and a content, both text"):
        renderer("qwen").extend(np.array([STOP]), [{"role": "tool", "content": None}])


def test_a_template_without_tools_is_usable_by_hermes() -> None:
    ours = renderer_of(GEMMA, format="hermes")
    said = text_of(ours.extend(np.array([STOP]), [tool("a"), tool("b")]))
    assert said == (
        "\n<|start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|start|>model\n"
    )
    assert ours.notes == (
        "the chat template of a/model has no role for tool results; they are written as turns of the user",
    )
    assert ours.parse(ids_of(CALLS[0])).calls == (Call("look", {"what": "there"}),)


def test_hermes_puts_what_tools_say_into_turns_of_the_user_where_their_own_depend_on_the_past() -> None:
    first = "{{ 'first ' if not messages[:-1] | selectattr('role', 'eq', 'tool') | list }}"
    template = CHATML.replace("{{ m.content }}", "{% if m.role == 'tool' %}" + first + "{% endif %}{{ m.content }}")
    ours = renderer_of(template, format="hermes")
    assert "user\n<tool_response>\n7\n</tool_response>" in text_of(ours.extend(np.array([STOP]), [tool("7")]))
    with pytest.raises(ModelError, match="depends on what tools said earlier"):
        renderer_of(QWEN.replace("<tool_response>", first + "<tool_response>"))


def test_a_template_that_wants_calls_before_what_tools_say_is_given_them() -> None:
    wants = "{% if m.role == 'tool' and not messages | selectattr('tool_calls') | list %}"
    wants += "{{ raise_exception('no call') }}{% endif %}"
    ours = renderer_of(MISTRAL.replace('{%- if m.role == "user" %}', wants + '{%- if m.role == "user" %}'))
    assert text_of(ours.extend(np.array([70]), [tool("7")])) == "<|im_end|>" + TAILS["mistral"]


# --- what a student says ----------------------------------------------------------------------------------------------

WRITTEN = {
    "qwen": '<tool_call>\n{"name": "look", "arguments": {"what": "there", "count": 3}}\n</tool_call>',
    "coder": "<tool_call>\n<function=look>\n<parameter=what>\nthere\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama": '{"name": "look", "parameters": {"what": "there", "count": 3}}',
    "mistral": '[CALLS] [{"name": "look", "arguments": {"what": "there", "count": 3}}]',
    "deep": 'hm</think>[CALLS][CALL]function[SEP]look\n```json\n{"what": "there", "count": 3}\n```[/CALL][/CALLS]',
}


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("stop", [[STOP], [STOPS[2]], []])
def test_a_call_is_read_as_the_template_writes_it(name: str, stop: list[int]) -> None:
    reply = renderer(name).parse(np.array([*ids_of(WRITTEN[name]), *stop]))
    assert (reply.text, reply.calls, reply.faults) == ("", (Call("look", {"what": "there", "count": 3}),), ())


@pytest.mark.parametrize("name", NATIVE)
def test_several_calls_and_text_before_them(name: str) -> None:
    each = [{"what": what} for what in ("here", "there")]
    calls = [{"function": {"name": "look", "arguments": json.dumps(a) if name == "deep" else a}} for a in each]
    before = "" if name in ("llama", "mistral") else "Let me see."
    message = {"role": "assistant", "content": before, "tool_calls": calls}
    if name == "llama":
        said = '{"name": "look", "parameters": {"what": "here"}}; {"name": "look", "parameters": {"what": "there"}}'
    else:
        whole = tokenizer_of(name).apply_chat_template([user("?"), message], tokenize=False)
        said = before + whole.rpartition(before or "[/INST]")[2].removesuffix("\n")
        said = f"</think>{said}" if name == "deep" else said
    reply = renderer(name).parse(ids_of(said))
    assert reply.calls == (Call("look", {"what": "here"}), Call("look", {"what": "there"}))
    assert (reply.text, reply.faults) == (before, ())


def test_calls_are_read_however_they_are_spaced() -> None:
    for said in (
        '<tool_call>{"name":"look","arguments":{"what":"there"}}</tool_call>',
        '<tool_call>\n\n {"arguments" : {"what": "there"}, "name": "look"} \n</tool_call>\n\n',
        '<tool_call>{"name": "look", "arguments": "{\\"what\\": \\"there\\"}"}</tool_call>',
        '<tool_call>{"type": "function", "function": {"name": "look", "parameters": {"what": "there"}}}</tool_call>',
        '<tool_call>[{"name": "look", "arguments": {"what": "there"}}]</tool_call>',
    ):
        reply = renderer("qwen").parse(ids_of(said))
        assert (reply.calls, reply.faults) == ((Call("look", {"what": "there"}),), ())
    within = '<tool_call>{"name": "look", "arguments": {"what": "</tool_call> <tool_call>"}}</tool_call>'
    assert renderer("qwen").parse(ids_of(within)).calls == (Call("look", {"what": "</tool_call> <tool_call>"}),)


FAULTS = {
    '<tool_call>{"name": "look", "arguments": {"what": }}</tool_call>': "a call is no JSON: Expecting value at char",
    '<tool_call>{"name": "look", "arguments": {"n": NaN}}</tool_call>': "a call is no JSON: 'NaN is no finite number'",
    '<tool_call>{"name": "look", "arguments": {"n": 1e400}}</tool_call>': "a call is no JSON: '1e400 is no finite n",
    '<tool_call>{"arguments": {}}</tool_call>': 'a call has no "name"',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>': 'a call has no "name"',
    '<tool_call>{"name": "look"}</tool_call>': 'a call has no "arguments"',
    '<tool_call>{"name": "look", "arguments": [1]}</tool_call>': "the arguments of 'look' are no object: '[1]'",
    '<tool_call>{"name": "look", "arguments": "there"}</tool_call>': "a call is no JSON",
    '<tool_call>{"name": "look", "arguments": "{} {}"}</tool_call>': "the arguments of 'look' are followed by ' {}'",
    "<tool_call>7</tool_call>": 'a call is {"name": …, "arguments": {…}}, not \'7\'',
    "<tool_call>[]</tool_call>": 'a call is {"name": …, "arguments": {…}}, not []',
    "<tool_call></tool_call>": "a call is no JSON",
    '<tool_call>{"name": "look", "arguments": {}} so</tool_call>': "a call is followed by 'so</tool_call>' where",
    '<tool_call>{"name": "look", "arguments": {}}': "a call is not closed by </tool_call>",
    '<tool_call>{"name": "look", "argu': "a call is not closed by </tool_call>",
    '{"name": "look"}</tool_call>': "</tool_call> without <tool_call> before it",
    '<tool_call>{"name": "look", "arguments": {"a": "\\ud800"}}</tool_call>': "a call holds half a character",
    "<tool_call>" + "[" * 100_000 + "</tool_call>": "a call is nested too deeply",
    "<tool_call>" + "9" * 5_000 + "</tool_call>": "a call is no JSON: 'Exceeds the limit",
}


@pytest.mark.parametrize("said", FAULTS, ids=range(len(FAULTS)))
def test_what_looks_like_a_call_and_is_none_is_told_in_a_line(said: str) -> None:
    reply = renderer("qwen").parse(ids_of(said))
    assert reply.calls == ()
    assert [fault[: len(FAULTS[said])] for fault in reply.faults] == [FAULTS[said]]
    assert all(len(fault) < 200 and "\n" not in fault for fault in reply.faults)


def test_a_fault_takes_no_other_call_with_it() -> None:
    good = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    for bad in ("<tool_call>{</tool_call>", '<tool_call>{"name": '):
        reply = renderer("qwen").parse(ids_of(f"One{good}two{bad}{good}three"))
        assert (len(reply.calls), len(reply.faults)) == (2, 1)
        assert reply.text == "Onetwothree"


def test_a_call_that_was_cut_off_is_told_as_one() -> None:
    cut = "a call was cut off: the turn was too long"
    for name, said in [("qwen", CALLS[2]), ("coder", "<tool_call><function=look><par"), ("mistral", '[CALLS] [{"na')]:
        assert renderer(name).parse(ids_of(said), cut=True).faults == (cut,)
    assert renderer("llama").parse(ids_of('{"name": "look", "param'), cut=True).faults == (cut,)
    assert renderer("deep").parse(ids_of("</think>[CALLS][CALL]function[SEP]lo"), cut=True).faults == (cut,)


def test_a_call_in_thinking_is_none() -> None:
    reply = renderer("qwen").parse(ids_of(f"<think>\nPerhaps {CALLS[0]}\n</think>\n\nNo."))
    assert (reply.text, reply.calls, reply.faults) == ("No.", (), ())
    reply = renderer("qwen").parse(ids_of(f"<think>\nPerhaps {CALLS[0]}"), cut=True)
    assert (reply.text, reply.calls, reply.faults) == ("", (), ())
    about = '<tool_call>{"name": "look", "arguments": {"what": "MARK"}}</tool_call>'
    for mark in ("<think>", "</think>", "</think> <think>", "</tool_call> <think>x</think> y"):
        reply = renderer("qwen").parse(ids_of(about.replace("MARK", mark)))
        assert (reply.calls, reply.faults) == ((Call("look", {"what": mark}),), ())
    deep = renderer("deep")  # whose header begins the thinking
    assert deep.parse(ids_of("Perhaps</think>No.")).text == "No."
    assert deep.parse(ids_of("Perhaps")).text == ""
    sometimes = DEEP.replace("{%- if add_gen", '{%- if messages[-1].role != "tool" and add_gen')
    ours = renderer_of(sometimes)  # not behind what tools say
    assert ours.parse(ids_of("Perhaps</think>No.")).text == "No."
    assert ours.parse(ids_of("No.")).text == "No."


def test_tags_give_text_where_the_schema_says_text() -> None:
    def arguments(key: str, value: str) -> dict[str, Any]:
        said = f"<tool_call><function=look><parameter={key}>\n{value}\n</parameter></function></tool_call>"
        (call,) = renderer("coder").parse(ids_of(said)).calls
        return call.arguments

    assert arguments("what", "3") == {"what": "3"}
    assert arguments("what", "a\n\n</parameter> b\n") == {"what": "a\n\n</parameter> b\n"}
    assert arguments("count", "3") == {"count": 3}
    assert arguments("count", "three") == {"count": "three"}
    assert arguments("count", "12 apples") == {"count": "12 apples"}
    assert arguments("count", "2024-01-01") == {"count": "2024-01-01"}
    assert arguments("deep", "True") == {"deep": True}
    assert arguments("unknown", "{}") == {"unknown": "{}"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"items": {"type": "integer"}, "type": "array"}, {"type": "null"}]}, "[1, 2]", [1, 2]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"type": ["string", "null"]}, "12139", "12139"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["number", "null"]}, "0.5", 0.5),
        ({"$ref": "#/$defs/Size"}, "7", 7),
        ({"allOf": [{"$ref": "#/$defs/Size"}], "description": "of a page"}, "7", 7),
        ({"$ref": "#/$defs/Name"}, "7", "7"),
        ({"$ref": "#/$defs/Loop"}, "7", "7"),
        ({"$ref": "#/$defs/Nothing"}, "7", "7"),
        ({"$ref": "#/definitions/Old"}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}]}, "2024", "2024"),
        ({"anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}]}, '["a"]', ["a"]),
        ({"type": ["string", "number"]}, "7", 7),
        ({"enum": ["auto", 1, 2]}, "1", 1),
        ({"enum": ["auto", 1, 2]}, "auto", "auto"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 0}, "0", 0),
        ({"const": None}, "null", None),
        ({"type": {}}, "7", "7"),
        (True, "7", "7"),
    ],
)
def test_tags_give_what_unions_and_references_allow(schema: Any, text: str, value: Any) -> None:
    named = {"Size": {"type": "integer"}, "Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    parameters = {"properties": {"key": schema}, "$defs": named, "definitions": {"Old": {"type": "integer"}}}
    said = f"<tool_call><function=look><parameter=key>\n{text}\n</parameter></function></tool_call>"
    (call,) = Format(begin="<tool_call>", end="</tool_call>", tags=True).read(said, schemas={"look": parameters}).calls
    assert call.arguments == {"key": value}


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>look</tool_call>",
        "<tool_call><function=look><parameter=what>there</function></tool_call>",
        "<tool_call><function=look>there</function></tool_call>",
        "<function=look></function>",
    ],
)
def test_tags_that_are_no_call_are_told(said: str) -> None:
    reply = renderer("coder").parse(ids_of(said))
    assert (reply.calls, len(reply.faults)) == ((), 1)


def test_bare_json_is_a_call_only_if_it_looks_like_one() -> None:
    llama = renderer("llama")
    assert llama.parse(ids_of('The answer: {"name": 1}')).faults == ()
    assert llama.parse(ids_of('{"answer": 42}')).text == '{"answer": 42}'
    assert llama.parse(ids_of('<|start|>{"name": "look", "parameters": {}}')).calls == (Call("look", {}),)
    for said in ('{"name": "look"}', '{"name": "look", "parameters": {}} so'):
        reply = llama.parse(ids_of(said))
        assert (reply.text, reply.calls, len(reply.faults)) == (said, (), 1)


def test_special_tokens_are_not_a_part_of_what_is_said() -> None:
    reply = renderer("qwen").parse(np.array([STOPS[1], *ids_of("It is<|im_start|> so."), STOP]))
    assert reply.text == "It is so."


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=a>", "<parameter=b>", "</parameter>"]
MARKS += [
    "</function>",
    "[CALLS]",
    "[CALL]function[SEP]",
    "```json",
    "[/CALL]",
    '{"name": "a", "arguments": {}}',
    "{",
    "é",
]


@pytest.mark.parametrize("name", NATIVE)
@given(st.lists(st.sampled_from([*MARKS, '"', "x", "\n"]), max_size=12), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=100)
def test_nothing_that_is_said_is_an_error(name: str, said: list[str], cut: bool, seed: int) -> None:
    reply = renderer(name).parse(ids_of("".join(said)), cut=cut)
    assert all(isinstance(call.arguments, dict) and call.name for call in reply.calls)
    drawn = np.random.default_rng(seed).integers(0, INNER.get_vocab_size() + 5, 20)
    renderer(name).parse(drawn, cut=cut)
