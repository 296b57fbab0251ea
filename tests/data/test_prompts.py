"""From rows to prompts, and from answers to rewards."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from multiprocessing import Pipe
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from slipstream import children
from slipstream.config.data import DataConfig
from slipstream.data import arithmetic
from slipstream.data.prompts import Prompts, Row, load_rows
from slipstream.data.teacher_context import check_function
from slipstream.data.tokenizers import (
    check_fits,
    check_ids,
    check_same_vocabulary,
    encode_rows,
    load_tokenizer,
    separates_answers,
    stop_ids,
)
from slipstream.errors import ConfigError, DataError, EngineError, ModelError
from slipstream.grades import Grades, Ungraded
from slipstream.records import Handle, Prompt, header_of
from slipstream.rewards import grading
from slipstream.rewards.functions import Answer, exact, grade, math, reward_of
from slipstream.rewards.grading import PoolGrader, needs
from support.hostile_answers import Deadly, Endless
from support.model_directories import build_tokenizer
from support.tiny_models import uniform

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
EXPECTED = "expected 'prompt' (text or a list of messages) or 'messages'"


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


# --- rows --------------------------------------------------------------------------------------------------


def test_a_jsonl_row_is_text_or_messages_with_an_answer_and_a_source(tmp_path: Path) -> None:
    source = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "answer": "2", "data_source": "sums", "level": 3},
        {"prompt": [USER], "ground_truth": 7, "id": "seven"},
        {"messages": [USER, ANSWER, USER, ANSWER, ANSWER], "answer": "x", "ground_truth": "y"},
        {"prompt": None, "messages": [USER], "id": None, "data_source": None},
    )
    assert load_rows(source) == [
        Row(f"{source}:1", "1+1=", "sums", "2", {"level": 3}),
        Row("seven", [USER], "default", 7),
        Row(f"{source}:3", [USER, ANSWER, USER], "default", "y"),
        Row(f"{source}:4", [USER], "default", None),
    ]


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CONVERSATION = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
]


def test_fields_of_tools_are_kept_and_a_call_needs_no_text(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"messages": [*CONVERSATION, ANSWER], "tools": [ADD]}, {"messages": [USER]})
    with_tools, without = load_rows(source)
    assert with_tools.prompt == CONVERSATION and with_tools.tools == [ADD] and with_tools.meta == {}
    assert without.tools is None


def test_parquet_gives_a_message_no_field_that_only_others_have(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": CONVERSATION}]), path)
    (row,) = load_rows(str(path))
    assert row.prompt == CONVERSATION


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [USER], "tools": "add"}, "'tools' must be a list of objects, the JSON schemas of functions"),
        ({"messages": [USER], "tools": ["add"]}, "'tools' must be a list of objects, the JSON schemas of functions"),
        ({"prompt": "Hi", "tools": [ADD]}, "'tools' are for a chat template: write the prompt as a list of messages"),
    ],
)
def test_tools_that_no_template_could_be_told_of_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    source = jsonl(tmp_path / "a.jsonl", fields)
    with pytest.raises(DataError, match=f"^{re.escape(f'{source}:1: {message}')}$"):
        load_rows(source)


def test_empty_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert [row.id for row in load_rows(str(tmp_path / "a.jsonl"))] == [f"{tmp_path}/a.jsonl:{n}" for n in (2, 4)]


def test_a_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\nnot JSON')
    assert [row.prompt for row in load_rows(str(tmp_path / "a.jsonl"), limit=2)] == ["a", "b"]


def test_parquet_holds_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": [USER, ANSWER], "ground_truth": "2", "data_source": "sums", "level": 1},
        {"prompt": [USER], "ground_truth": None, "data_source": None, "level": 2},
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load_rows(str(path)) == [
        Row(f"{path}:1", [USER], "sums", "2", {"level": 1}),
        Row(f"{path}:2", [USER], "default", None, {"level": 2}),
    ]


@pytest.fixture(scope="module")
def saved_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import datasets

    path = tmp_path_factory.mktemp("datasets")
    train = datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    test = datasets.Dataset.from_list([{"messages": [USER, ANSWER], "answer": "3"}])
    train.save_to_disk(path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(path / "two")
    datasets.Dataset.from_dict({"prompt": []}).save_to_disk(path / "none")
    return path


def test_a_saved_hf_dataset_holds_the_same_rows(saved_dataset: Path) -> None:
    for name in ("one", "two"):
        source = str(saved_dataset / name)
        rows = [Row(f"{source}[train]:1", "a", "default", "1"), Row(f"{source}[train]:2", "b", "default", "2")]
        assert load_rows(source) == rows
    (row,) = load_rows(source, split="test")
    assert (row.id, row.prompt, row.ground_truth) == (f"{source}[test]:1", [USER], "3")


def test_a_directory_of_data_files_is_a_hf_dataset(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"prompt": "a"})
    assert [row.prompt for row in load_rows(str(tmp_path))] == ["a"]


def test_the_builtin_task_answers_itself() -> None:
    rows = load_rows("builtin:arithmetic", limit=50)
    assert len(rows) == 50
    for row in rows:
        digits = [int(digit) for digit in re.findall(r"\d", str(row.prompt))]
        sums = [int(sum_) for sum_ in re.findall(r"[A-Z]\d(\d)", row.ground_truth)]
        assert sums == [sum(digits[: n + 1]) % 10 for n in range(len(digits))]
        assert row.data_source == "arithmetic"


def test_the_builtin_splits_have_no_prompt_in_common() -> None:
    train, held_out = (
        {row.prompt for row in load_rows("builtin:arithmetic", split=s, limit=3000)} for s in ("train", "eval")
    )
    assert not train & held_out
    assert list(arithmetic.problems("eval", 3)) == list(arithmetic.problems("eval", 5))[:3], "always the same ones"


BAD_ROWS: dict[str, tuple[str, str]] = {
    "not JSON": ("{prompt: 1}", "not a JSON object on one line: "),
    "no object": ('["a"]', "a row must be an object"),
    "no prompt": ('{"question": "a", "answer": 1}', f"{EXPECTED}; found 'question', 'answer'"),
    "nothing": ("{}", f"{EXPECTED}; found nothing"),
    "empty text": ('{"prompt": ""}', "the prompt is empty"),
    "no messages": ('{"prompt": []}', "the prompt is empty"),
    "nothing but an answer": ('{"messages": [{"role": "assistant", "content": "a"}]}', "the prompt is empty"),
    "number": ('{"prompt": 7}', "the prompt is 7"),
    "no content": ('{"prompt": [{"role": "user"}]}', "a message must have 'role' and 'content', both text"),
    "content of other parts than text": (
        '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]}',
        "a message must have 'role' and 'content', both text",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_malformed_row_is_named_with_file_line_and_what_is_expected(tmp_path: Path, case: str) -> None:
    line, message = BAD_ROWS[case]
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(DataError, match="^" + re.escape(f"{path}:2: {message}")) as caught:
        load_rows(str(path))
    assert EXPECTED in str(caught.value) or case == "not JSON"


def test_parquet_gives_a_tool_no_parameter_that_only_others_have(tmp_path: Path) -> None:
    def row(key: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {key: {"type": "string"}}}
        call = {"type": "function", "function": {"name": "look", "arguments": {key: "x"}}}
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
        return {"messages": [*asked, {"role": "tool", "content": "seen"}], "tools": tools}

    path, rows = tmp_path / "a.parquet", [row("city"), row("q")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    for found, original in zip(load_rows(str(path)), rows, strict=True):
        assert found.tools == original["tools"]
        assert found.prompt[1]["tool_calls"] == original["messages"][1]["tool_calls"]  # type: ignore[index]


def test_an_answer_that_no_checkpoint_holds_is_named_and_a_date_is_text_for_rewards(tmp_path: Path) -> None:
    path, when = tmp_path / "a.parquet", datetime(2026, 1, 2)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": ["b"], "when": [when], "level": [3]}), path)
    (row,) = load_rows(str(path))
    assert row.meta == {"when": when, "level": 3}, "teachers may be chosen by it"
    assert Prompts([row], [np.array([1])], seed=0, shuffle=False).at(0).meta == {
        "when": "2026-01-02T00:00:00",
        "level": 3,
    }
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "a"], "answer": [None, when]}), path)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: the answer is of type datetime, which cannot be stored")):
        load_rows(str(path))


def test_a_malformed_parquet_row_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), path)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: {EXPECTED}; found 'prompt'")):
        load_rows(str(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}: cannot be read: ") + ".*[Nn]o such file"):
        load_rows(str(tmp_path / name))


def test_files_of_another_format_are_named(tmp_path: Path) -> None:
    for name, why in {"a.jsonl": ":1: not UTF-8 (byte 0xff)", "a.parquet": ": cannot be read: "}.items():
        (tmp_path / name).write_bytes(b"\xff\xfe")
        with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}{why}")):
            load_rows(str(tmp_path / name))


def test_a_source_without_rows_is_named(tmp_path: Path, saved_dataset: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    for source in (jsonl(tmp_path / "a.jsonl"), str(tmp_path / "a.parquet")):
        with pytest.raises(DataError, match=f"^{re.escape(source)}: no rows$"):
            load_rows(source)
    with pytest.raises(DataError, match=r"none \(split 'train'\): cannot be loaded: "):
        load_rows(str(saved_dataset / "none"))


def test_a_split_that_is_not_there_is_named_with_those_that_are(saved_dataset: Path) -> None:
    with pytest.raises(DataError, match="two has no split 'trian'; did you mean 'train'"):
        load_rows(str(saved_dataset / "two"), split="trian")
    with pytest.raises(DataError, match="builtin:arithmetic has no split 'test'; known: eval, train"):
        load_rows("builtin:arithmetic", split="test")


def test_an_unknown_builtin_is_named_with_the_nearest_one() -> None:
    with pytest.raises(DataError, match="no built-in task 'arithmetics'; did you mean 'arithmetic'"):
        load_rows("builtin:arithmetics")


@pytest.mark.parametrize("source", ["no/such/place", "nosuchdataset"])
def test_a_dataset_that_is_nowhere_is_named_in_one_line(source: str) -> None:
    with pytest.raises(DataError, match=rf"^{source} \(split 'train'\): cannot be loaded: [^\n]+$"):
        load_rows(source)


# --- prompts -----------------------------------------------------------------------------------------------


def prompts_of(rows: int, *, seed: int = 0, shuffle: bool = True) -> Prompts:
    return Prompts(
        [Row(str(i), "x", ground_truth=i, meta={"i": i}) for i in range(rows)],
        [np.array([i]) for i in range(rows)],
        seed=seed,
        shuffle=shuffle,
    )


@given(rows=st.integers(1, 30), epoch=st.integers(0, 1000), seed=st.integers(), shuffle=st.booleans())
def test_every_epoch_has_every_row_once(rows: int, epoch: int, seed: int, shuffle: bool) -> None:
    prompts = prompts_of(rows, seed=seed, shuffle=shuffle)
    found = [prompts.at(number).id for number in range(epoch * rows, (epoch + 1) * rows)]
    assert sorted(found, key=int) == [str(i) for i in range(rows)]
    assert shuffle or found == sorted(found, key=int)


def test_a_prompt_is_a_function_of_seed_and_number_alone() -> None:
    forwards, backwards = prompts_of(7, seed=3), prompts_of(7, seed=3)
    first = [(prompt.id, prompt.seed) for prompt in map(forwards.at, range(50))]
    second = [(prompt.id, prompt.seed) for prompt in map(backwards.at, reversed(range(50)))][::-1]
    assert first == second
    assert len({seed for _, seed in first}) == 50, "every draw has a seed of its own, whatever its row"


def test_orders_and_seeds_differ_from_epoch_to_epoch_and_from_run_to_run() -> None:
    def order(seed: int, epoch: int) -> tuple[str, ...]:
        prompts = prompts_of(20, seed=seed)
        return tuple(prompts.at(20 * epoch + place).id for place in range(20))

    assert len({order(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25
    assert prompts_of(20, seed=0).at(0).seed != prompts_of(20, seed=1).at(0).seed


def test_a_prompt_carries_what_its_row_says() -> None:
    prompt = prompts_of(5).at(13)
    assert (prompt.number, prompt.tokens.tolist()) == (13, [int(prompt.id)])
    assert (prompt.ground_truth, prompt.meta) == (int(prompt.id), {"i": int(prompt.id)})


# --- tokens ------------------------------------------------------------------------------------------------

messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text("ab <>\n", max_size=8)}
    ),
    min_size=1,
    max_size=4,
)


@given(messages, st.booleans())
def test_messages_become_the_ids_of_the_chat_template(messages: list[dict[str, str]], quiet: bool) -> None:
    tokenizer = build_tokenizer()
    (ids,) = encode_rows([Row("r", messages)], tokenizer, DataConfig(template_args={"quiet": quiet}))
    direct = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, quiet=quiet)
    assert ids.tolist() == direct["input_ids"]


def test_special_tokens_come_from_the_template_or_from_the_tokenizer_but_never_twice(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    (chat,) = encode_rows([Row("r", [USER])], tokenizer, DataConfig())
    (plain,) = encode_rows([Row("r", "Hi")], tokenizer, DataConfig())
    assert tokenizer.convert_ids_to_tokens(chat) == ["<bos>", "<user>", "H", "i", "<eos>", "<assistant>"]
    assert tokenizer.convert_ids_to_tokens(plain) == ["<bos>", "H", "i"]


def test_no_end_token_stands_behind_a_text_whatever_the_tokenizer_appends() -> None:
    tokenizer = build_tokenizer()
    names = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<bos>", "<eos>")}
    for single in ("<bos> $A <eos>", "$A <eos> <eos>", "$A"):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[*names.items()])
        (plain,) = encode_rows([Row("r", "Hi")], tokenizer, DataConfig())
        bos = ["<bos>"] if "<bos>" in single else []
        assert tokenizer.convert_ids_to_tokens(plain) == [*bos, "H", "i"]
        *_, last = encode_rows([Row("q", "<eos>"), Row("r", "Hi")], tokenizer, DataConfig())
        assert tokenizer.convert_ids_to_tokens(last) == [*bos, "H", "i"], "the first text says nothing"


@pytest.mark.parametrize(
    ("template", "separates"),
    [
        ("{{ m['content'] }}{% if add_generation_prompt %}>{% endif %}", True),
        ("[INST] {{ m['content'] }} [/INST]", True),
        ("{{ m['content'] }}<eos>", False),
        ("{{ m['content'] }}", False),
        ("{{ m['content'] }}{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}", True),
    ],
)
def test_a_template_separates_an_answer_from_its_prompt_or_not(template: str, separates: bool) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{template}{{% endfor %}}"
    for message in USER, {"role": "user", "content": " "}:
        assert separates_answers(Row("r", [message]), tokenizer, DataConfig(), {}) is separates


def test_a_system_prompt_comes_first(tokenizer: PreTrainedTokenizerFast) -> None:
    (ids,) = encode_rows([Row("r", [USER])], tokenizer, DataConfig(system_prompt="Be!"))
    assert tokenizer.decode(ids) == "<bos><system>Be!<eos><user>Hi<eos><assistant>"


def test_a_prompt_longer_than_the_tokenizer_likes_is_encoded_without_a_word(
    tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    (ids,) = encode_rows([Row("r", "a" * 500)], tokenizer, DataConfig())
    assert len(ids) == 501 > tokenizer.model_max_length
    assert capfd.readouterr() == ("", "")


TOOL_TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name + "?" }}{% endfor %}\
{% for message in messages %}{% if message.tool_calls is defined %}\
{% for call in message.tool_calls %}{{ call.id + "=" + call.function.name + call.function.arguments }}{% endfor %}\
{% elif message.role == "tool" %}{{ message.name + "#" + message.tool_call_id + message.content }}\
{% else %}{{ message.content }}{% endif %}{% endfor %}"""


def test_tools_their_calls_and_their_results_reach_the_chat_template(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(template=TOOL_TEMPLATE)
    rows = load_rows(jsonl(tmp_path / "a.jsonl", {"messages": CONVERSATION, "tools": [ADD]}, {"messages": [USER]}))
    texts = [tokenizer.decode(ids) for ids in encode_rows(rows, tokenizer, DataConfig())]
    assert texts == ['add?Hicall_1=add{"a": 1, "b": 2}add#call_13', "Hi"]


def test_a_template_that_raises_whatever_it_likes_is_told_in_a_line() -> None:
    tokenizer = build_tokenizer(template="{{ messages[0].content + 1 }}")
    with pytest.raises(DataError, match="^r: the chat template refuses these messages: can only concatenate str"):
        encode_rows([Row("r", [USER])], tokenizer, DataConfig())


def test_a_token_that_the_model_has_no_embedding_for_is_named() -> None:
    rows = [Row("first", "a"), Row("second", "z")]
    tokens = [np.array([1, 2]), np.array([3, 40])]
    check_ids(rows, tokens, "tiny", 41)
    with pytest.raises(ModelError, match="^second: token 40 of the prompt is beyond the 40 embeddings of tiny: "):
        check_ids(rows, tokens, "tiny", 40)


def test_messages_without_a_template_are_an_error_that_says_so() -> None:
    tokenizer = build_tokenizer(template=None)
    with pytest.raises(ModelError, match="has no chat template, and r holds messages: use text prompts"):
        encode_rows([Row("r", [USER])], tokenizer, DataConfig())


def test_messages_that_the_template_refuses_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="^second: the chat template refuses these messages: no role judge$"):
        encode_rows([Row("first", [USER]), Row("second", [{"role": "judge", "content": ""}])], tokenizer, DataConfig())


def test_text_takes_no_system_prompt_and_does_not_mix_with_messages(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match=r"data\.system_prompt needs prompts that are messages"):
        encode_rows([Row("r", "Hi")], tokenizer, DataConfig(system_prompt="Be!"))
    with pytest.raises(DataError, match="prompts must be all text or all messages"):
        encode_rows([Row("r", "Hi"), Row("s", [USER])], tokenizer, DataConfig())


def test_text_that_a_tokenizer_has_no_tokens_for_is_an_error() -> None:
    with pytest.raises(DataError, match=r"^s: .*student cannot encode this prompt: .*UNK"):
        encode_rows([Row("r", "C3="), Row("s", "C3=ü")], load_tokenizer("builtin:student"), DataConfig())


def test_tokenizers_that_differ_are_rejected_with_the_first_id_that_does() -> None:
    student, teacher = build_tokenizer(alphabet="abc"), build_tokenizer(alphabet="acbd")
    check_same_vocabulary(student, build_tokenizer(alphabet="abc"), names=("s", "t"))
    with pytest.raises(
        ModelError, match="student s and teacher t have different tokenizers: id 8 is 'b' in one and 'c'"
    ):
        check_same_vocabulary(student, teacher, names=("s", "t"))
    with pytest.raises(ModelError, match="id 10 is None in one and 'd' in the other"):
        check_same_vocabulary(student, build_tokenizer(alphabet="abcd"), names=("s", "t"))


def test_the_longest_prompt_and_response_must_fit_the_context() -> None:
    rows, tokens = [Row("short", "x"), Row("long", "x")], [np.arange(2), np.arange(6)]
    check_fits(rows, tokens, max_tokens=4, context=10, model="m")
    message = (
        "long: 6 prompt tokens + sampler.max_tokens = 5 exceed the context of 10 of m: shorten the prompt or lower"
    )
    with pytest.raises(DataError, match="^" + re.escape(message)):
        check_fits(rows, tokens, max_tokens=5, context=10, model="m")


@pytest.mark.parametrize("name", ["no/such", "a/b/c", "./nowhere", ""])
def test_a_tokenizer_that_is_nowhere_is_named_in_one_line(name: str) -> None:
    with pytest.raises(
        ModelError, match=rf"^({re.escape(name)}: (cannot load a tokenizer there: |no such directory)|'' names)[^\n]*$"
    ):
        load_tokenizer(name)


def test_a_broken_tokenizer_is_named_in_one_line(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    for content in ("{", "{}", '{"added_tokens": []}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=r"cannot load a tokenizer there: [^\n]+$"):
            load_tokenizer(str(tmp_path))


def test_an_unknown_builtin_model_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ModelError, match="no built-in model 'techer'; did you mean 'teacher'"):
        load_tokenizer("builtin:techer")


class Generation:
    """Content of a model's generation_config.json."""

    def __init__(self, eos_token_id: int | list[int] | None) -> None:
        self.eos_token_id = eos_token_id


def test_a_response_ends_with_the_tokenizers_token_or_the_models(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.eos_token_id == 1
    assert (
        stop_ids(tokenizer, None) == stop_ids(tokenizer, Generation(None)) == stop_ids(tokenizer, Generation(1)) == {1}
    )
    assert stop_ids(tokenizer, Generation([5, 6])) == {1, 5, 6}
    endless = build_tokenizer()
    endless.eos_token = None
    with pytest.raises(ModelError, match="names no end-of-sequence token"):
        stop_ids(endless, Generation(None))


# --- rewards -----------------------------------------------------------------------------------------------


def test_exact_compares_text_without_the_space_around_it() -> None:
    assert exact(" 42\n", 42) == exact("42", "42 ") == 1.0
    assert exact("42.0", 42) == exact("4 2", "42") == exact("", 42) == 0.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("so it is 0.5", r"\frac{1}{2}"),
        (r"$\boxed{\frac{1}{2}}$", 0.5),
        (r"$\frac{2}{4}$", "1/2"),
        (r"the answer is $\boxed{1024}$", "2^{10}"),
        (r"$\boxed{\pi \cdot 3}$", r"3\pi"),
        (r"$\boxed{3 + 2x}$", "2x+3"),
        (r"$\boxed{(1, 2)}$", "(1,2)"),
        (r"$x = 5$", "$5$"),
        ("there were 72", "She sold 48/2 = 24 clips in May, and 48 in April. #### 72"),
    ],
)
def test_math_knows_an_answer_by_its_value(answer: str, truth: object) -> None:
    assert math(answer, truth) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("so it is 0.25", r"\frac{1}{2}"),
        ("I do not know", "5"),
        ("", "5"),
        # what is not right is the first number of the right answer
        ("the answer is 2", "2^{10}"),
        ("the answer is 3", r"3\pi"),
        ("the answer is 2", "2x+3"),
    ],
)
def test_math_knows_a_wrong_answer(answer: str, truth: object) -> None:
    assert math(answer, truth) == 0.0


def answer(text: str, truth: Any = None, **more: Any) -> Answer:
    given = {"tokens": [1], "prompt": "?", "meta": {}, "data_source": "default", "finish": "eos", "messages": []}
    given["outcome"] = {}
    return Answer(text=text, ground_truth=truth, **(given | more))


def grades(rewards: Sequence[str], text: str, truth: Any = None, timeout: float = 10.0, **more: Any) -> Grades:
    return grade([reward_of(spec) for spec in rewards], answer(text, truth, **more), timeout)


def test_an_answer_that_takes_too_long_has_no_reward_and_the_next_one_is_graded() -> None:
    before = signal.getsignal(signal.SIGALRM)
    late = Ungraded("timeout", "exact took more than 0.05 s (task.timeout)")
    assert [grades(("exact",), text, Endless(), 0.05) for text in "ab"] == [late, late]
    # math-verify catches every Exception on its way and tries the next thing
    late = Ungraded("timeout", "math took more than 1 s (task.timeout)")
    assert [grades(("math",), text, "3", 1.0) for text in ("$9^{9^{9^{9}}}$", "$3$")] == [late, {"math": 1.0}]
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_answer_is_graded_by_every_reward_that_is_named() -> None:
    both = [grades(("exact", "math"), text, "1/2") for text in ("0.5", "1/2", "2")]
    assert both == [{"exact": 0.0, "math": 1.0}, {"exact": 1.0, "math": 1.0}, {"exact": 0.0, "math": 0.0}]
    grader = PoolGrader(("exact", "math"), decode)
    assert grade_all(grader, group_of(["1"], Deadly())) == [[crash("exact, math")]]


def crash(rewards: str = "exact") -> Ungraded:
    return Ungraded("crash", f"{rewards} ended its process: exit status 1")


OWN = """
import math

def brief(text):
    return 1 / len(text)

def several(text, ground_truth=None, *, meta):
    return {"right": text == ground_truth, "level": meta["level"]}

def chosen(text):
    return {"reward": 2, "other": 3.5}

def everything(**given):
    return len(given)

def bad(text):
    return eval(text)

late = lambda: 0
"""


def own(tmp_path: Path, name: str, text: str = OWN) -> str:
    (tmp_path / "own.py").write_text(text)
    return f"{tmp_path / 'own.py'}:{name}"


def test_a_reward_of_ones_own_gets_what_it_asks_for(tmp_path: Path) -> None:
    brief, several, everything = (own(tmp_path, name) for name in ("brief", "several", "everything"))
    found = grades((brief, "exact", several, everything), "yes", "yes", meta={"level": 3})
    parts = {"several": 4.0, "several/right": 1.0, "several/level": 3.0}
    assert found == {"brief": 1 / 3, "exact": 1.0, **parts, "everything": 10.0}
    assert grades((own(tmp_path, "chosen"),), "") == {"chosen": 2.0, "chosen/other": 3.5}
    assert reward_of(several).needs == ("text", "meta")


BAD_RETURNS: dict[str, tuple[str, str, str]] = {
    "nothing": ("None", "type", "returned None, which is not a number"),
    "text": ("'1.0'", "type", "returned str '1.0', which is not a number"),
    "no number by name": ("{}", "type", "returned no number"),
    "text by name": ("{'a': 1, 'b': 'x'}", "type", "returned for 'b' str 'x', which is not a number"),
    "a name of two words": ("{'a b': 1}", "type", "returned a number under the name 'a b': a name is one word"),
    "not a number": ("math.nan", "nan", "returned nan"),
    "infinite by name": ("{'a': math.inf}", "nan", "returned inf for 'a'"),
    "an error": ("1 / 0", "error", "raised ZeroDivisionError: division by zero (own.py:17)"),
    "the end of a program": ("exit(3)", "error", "raised SystemExit: 3 (own.py:17)"),
}


@pytest.mark.parametrize("case", BAD_RETURNS)
def test_what_is_no_reward_is_not_a_reward_of_0(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    returned, cause, said = BAD_RETURNS[case]
    assert grades((own(tmp_path, "bad"), "exact"), returned) == Ungraded(cause, f"{tmp_path}/own.py:bad {said}")


BAD_FILES: dict[str, tuple[str, str, str]] = {
    "no file": ("./none.py:score", "", "there is no file none.py"),
    "no module": ("none.at_all:score", "", "there is no module 'none.at_all' here or among what is installed"),
    "no function": ("./own.py:skore", "def score(text): pass", "no function 'skore' in it; did you mean 'score'?"),
    "nothing in it": ("./own.py:score", "", "no function 'score' in it; it has none"),
    "a number": ("./own.py:score", "score = 1", "score is int 1, not a function"),
    "asks too much": (
        "own:score",
        "def score(text, answer): pass",
        "no value is available for its parameter 'answer'; known: text, messages, tokens, prompt, ground_truth, meta, "
        "data_source, finish, outcome, sandbox",
    ),
    "by position": ("own:score", "def score(text, /): pass", "no value is available for its parameter 'text'; known: "),
    "nowhere to run": (
        "own:score",
        "async def score(text, sandbox): pass",
        'the function asks for a sandbox: write task.sandbox = "bubblewrap"',
    ),
    "imports nothing": (
        "./own.py:score",
        "\n\nimport nothing_at_all",
        "cannot be imported: ModuleNotFoundError: No module named 'nothing_at_all' (own.py:3)",
    ),
    "no Python": ("./own.py:score", "\ndef score(:", "cannot be imported: SyntaxError: invalid syntax (own.py:2)"),
    "ends at once": ("own:score", "exit(7)", "cannot be imported: SystemExit: 7 (own.py:1)"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_reward_that_cannot_be_had_is_told_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec, text, said = BAD_FILES[case]
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"task.reward = {spec!r}: {said}")) as caught:
        needs((spec,))
    assert "\n" not in str(caught.value)


def test_a_sandbox_that_a_reward_cannot_use_is_told_by_its_own_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("async def score(text, sandbox): pass")
    with pytest.raises(ConfigError, match="^task.sandbox: write a URL of scheme, host, port and path only"):
        needs(("./own.py:score",), "http://user:secret@127.0.0.1:1")


def test_a_reward_that_takes_whatever_there_is_wants_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`**kwargs` is how rewards elsewhere are written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "anyhow.py").write_text("def score(text, ground_truth, **kwargs): return float('sandbox' in kwargs)")
    assert needs(("./anyhow.py:score",)) == {"./anyhow.py:score": ("text", "ground_truth")}


def group_of(texts: list[str], truth: Any) -> list[Handle]:
    prompt = Prompt(id="p", number=0, tokens=np.array([1]), ground_truth=truth)
    group = []
    for index, text in enumerate(texts):
        rollout = uniform(prompt, index, [ord(char) for char in text], finish="eos")
        group.append(Handle(header_of(rollout), rollout))
    return group


def grades_of(handle: Handle) -> Grades:
    return handle.header.ungraded or handle.header.rewards


def decode(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def grade_all(grader: PoolGrader, *groups: list[Handle]) -> list[list[Grades]]:
    """All groups at the same time, as a run does."""

    async def run() -> list[list[Handle]]:
        return await asyncio.gather(*(grader.grade(group) for group in groups))

    try:
        return [list(map(grades_of, graded)) for graded in asyncio.run(run())]
    finally:
        grader.close()


def test_a_grading_process_grades_group_after_group() -> None:
    grader = PoolGrader(("exact",), decode, processes=2)
    found = grade_all(grader, group_of(["1", "2"], 1), group_of(["2"], 2), group_of(["x"], "y"))
    assert found == [[{"exact": 1.0}, {"exact": 0.0}], [{"exact": 1.0}], [{"exact": 0.0}]]


def test_without_a_reward_groups_pass_ungraded() -> None:
    group = group_of(["1", "2"], 1)
    grader = PoolGrader((), decode)
    assert asyncio.run(grader.grade(group)) == group
    grader.close()


def test_a_grading_process_is_not_held_up_by_an_endless_answer() -> None:
    grader = PoolGrader(("exact",), decode, timeout=0.5)
    late = Ungraded("timeout", "exact took more than 0.5 s (task.timeout)")
    found = grade_all(grader, group_of(["a", "b"], Endless()), group_of(["1"], 1))
    assert found == [[late] * 2, [{"exact": 1.0}]]


DEAF = """
import signal

def deaf(text):
    if text == "1":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        while True:
            pass
    return 1
"""


def test_a_reward_that_hears_no_alarm_is_ended_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "REPORT_TIME", 0.5)
    spec = own(tmp_path, "deaf", DEAF)
    found = grade_all(PoolGrader((spec,), decode, timeout=1.0), group_of(["0", "1", "2"], None))
    late = Ungraded("timeout", f"{spec} took more than 1 s (task.timeout) and did not stop")
    assert found == [[{"deaf": 1.0}, late, {"deaf": 1.0}]]


def test_an_answer_that_kills_its_grading_process_has_no_reward_and_costs_no_other_answer() -> None:
    grader = PoolGrader(("exact",), decode)
    found = grade_all(grader, group_of(["1"], 1), group_of(["a", "b"], Deadly()), group_of(["2", "3"], 3))
    assert found == [[{"exact": 1.0}], [crash()] * 2, [{"exact": 0.0}, {"exact": 1.0}]]


def test_a_grading_process_that_is_killed_while_it_has_nothing_to_do_costs_nothing() -> None:
    grader = PoolGrader(("exact",), decode)

    async def run() -> list[Handle]:
        await grader.grade(group_of(["1"], 1))
        grader.processes.children[0].process.kill()
        grader.processes.children[0].process.wait()
        return await grader.grade(group_of(["1"], 1))

    (found,) = asyncio.run(run())
    grader.close()
    assert found.header.rewards == {"exact": 1.0}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_grading_process_that_is_lost_while_it_starts_costs_nothing(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "STARTED", 6.0)
    grader = PoolGrader(("exact",), decode)
    os.kill(grader.processes.children[0].process.pid, how)
    assert grade_all(grader, group_of(["1"], 1)) == [[{"exact": 1.0}]]


def test_a_reward_that_ends_its_process_is_a_crash_also_if_it_forked_before(tmp_path: Path) -> None:
    code = """
        import os, time
        def forks(text):
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(3)
    """
    grader = PoolGrader((own(tmp_path, "forks", dedent(code)),), decode, timeout=1000.0)
    ((found,),) = grade_all(grader, group_of(["1"], 1))
    assert found == Ungraded("crash", f"{grader.rewards[0]} ended its process: exit status 3")


def test_grading_processes_that_cannot_start_end_the_run(tmp_path: Path) -> None:
    grader = PoolGrader((own(tmp_path, "killer", "import os\nos._exit(3)"),), decode)
    with pytest.raises(
        EngineError, match=r"no grading process can start \(exit status 3\), importing .*own\.py:killer"
    ):
        grade_all(grader, group_of(["1"], 1))


@pytest.mark.parametrize("setting", ["task.reward", "teachers.main.context"])
def test_imports_that_take_too_long_name_their_setting(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "STARTED", 2.0)
    spec = own(tmp_path, "slow", "import time\ntime.sleep(600)\ndef slow(prompt): return prompt")
    with pytest.raises(ConfigError, match=f"^{setting} = '.*own.py:slow': its imports take more than 2 s$"):
        check_function("main", spec, graded=True) if "context" in setting else needs((spec,))


def test_a_cancelled_call_leaves_the_pool_whole() -> None:
    """One call is cancelled while its answer is graded and one while it waits for the only process."""
    grader = PoolGrader(("exact",), decode, timeout=0.5)

    async def run() -> list[Handle]:
        await grader.grade(group_of(["1"], 1))  # the process is there
        running, waiting = (asyncio.create_task(grader.grade(group_of(["a"], Endless()))) for _ in range(2))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await grader.grade(group_of(["1", "2"], 1))

    (process,) = grader.processes.children
    graded = asyncio.run(run())
    assert grader.processes.children == [process]
    grader.close()
    assert [handle.header.rewards for handle in graded] == [{"exact": 1.0}, {"exact": 0.0}]


UNGUARDED = """
import asyncio
import numpy as np
from slipstream.records import Handle, Prompt, header_of, one_turn
from slipstream.rewards.grading import PoolGrader

print("begun", flush=True)
rollout = one_turn(
    Prompt(id="p", number=0, tokens=np.array([1]), ground_truth="7"), 0, actions=np.array([[7]]),
    action_logp=np.zeros((1, 1), np.float32), versions=np.zeros(1, np.int32), finish="eos",
)
grader = PoolGrader(("exact",), lambda tokens: str(tokens[0]), processes=2)
(graded,) = asyncio.run(grader.grade([Handle(header_of(rollout), rollout)]))
print(graded.header.rewards)
grader.close()
"""


def test_a_script_that_grades_needs_no_guard(tmp_path: Path) -> None:
    """Its grading processes never run it."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    ran = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("begun\n{'exact': 1.0}\n", "")


KILLED = """
import os, signal
from slipstream.rewards.grading import PoolGrader

process = PoolGrader(("{reward}",), str).processes.children[0]
process.ready()
if {busy}:
    process.connection.send([None])
print(process.process.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("busy", [False, True])
def test_grading_processes_do_not_outlive_a_parent_that_is_killed(busy: bool, tmp_path: Path) -> None:
    """All its processes hold the other end of the pipe that is read here: it ends when the last of them has ended."""
    script = tmp_path / "killed.py"
    reward = own(tmp_path, "stuck", "def stuck(text):\n    while True:\n        pass")
    script.write_text(KILLED.format(busy=busy, reward=reward))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        try:
            parent.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            raise


@pytest.mark.parametrize("asked", [False, True])
def test_a_grading_process_whose_parent_is_gone_before_it_is_ready_says_nothing(asked: bool) -> None:
    ours, theirs = Pipe()
    if asked:
        ours.send(("reward", ("exact",), 1.0, None, None))
    ours.close()
    with theirs:
        ran = subprocess.run(
            [sys.executable, "-m", "slipstream.rewards.grader", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            start_new_session=True,
        )
    assert ran.stderr == ""
