"""The built-in tasks for tools: their rows, their environments, and the tiny models that play them."""

import json
import pickle
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from build_tools import PIECES, POSITIONS, RECIPES, ROLES, build_tokenizer, example, plays
from slipstream.data.builtin import TOOL_TASKS, tool_problem
from slipstream.data.prompts import Row, load_rows
from slipstream.data.tokenizers import check_same_vocabulary, load_tokenizer
from slipstream.environments import Call
from slipstream.environments.builtin import Doors, Lookup, Table
from slipstream.environments.chat.renderer import Renderer
from slipstream.errors import DataError
from slipstream.models.resolve import model_path
from tool_episodes import OTHER, WRONG, act, call, episode, kind, opened

MODELS = ("builtin:tool_student", "builtin:tool_teacher")
ASKED = [
    {"role": "user", "content": "What is a+b?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get", "arguments": {"key": "a"}}}]},
    {"role": "tool", "content": "45", "name": "get"},
]


def rows(task: str, split: str = "train", limit: int = 300) -> Sequence[Row]:
    return load_rows(f"builtin:{task}", split=split, limit=limit)


# --- rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TOOL_TASKS)
def test_a_row_is_a_question_with_its_answer_and_the_table_that_it_is_about(task: str) -> None:
    for row in rows(task):
        (message,) = row.prompt
        assert isinstance(message, dict) and message["role"] == "user" and row.data_source == task
        table = row.meta["table"]
        assert json.loads(json.dumps(table)) == table and len(table) in (range(6, 10) if task == "doors" else [10])
        words = message["content"].rstrip("?.").split()
        if task == "table":
            value = eval(words[2], {"__builtins__": {}}, table)
            assert set(re.findall("[a-z]", words[2])) <= set(table)
        elif task == "doors":
            keys = list(table)
            assert words[2] == keys[0] and list(table.values())[:-1] == keys[1:]
            value = table[keys[-1]]
            assert value.isdecimal()
        else:
            value, way = words[2], {words[2]}
            for _ in range(int(words[5])):
                value = table[value]
                assert value not in way, "no way comes round"
                way.add(value)
        assert row.ground_truth == str(value)


@pytest.mark.parametrize("task", TOOL_TASKS)
def test_rows_are_a_pure_function_of_their_number_and_splits_share_none(task: str) -> None:
    train, held_out = rows(task, "train", 2000), rows(task, "eval", 2000)
    kept = [{f"{row.prompt} {row.meta}" for row in split} for split in (train, held_out)]
    assert not kept[0] & kept[1] and len(kept[0]) == len(kept[1]) == 2000
    assert rows(task, "eval", 5)[3] == held_out[3] == pickle.loads(pickle.dumps(held_out))[3]
    assert train[7].prompt[0]["content"] == tool_problem(task, "train", 7)[0]  # type: ignore[index]


def test_an_unknown_split_or_task_is_named_with_those_that_are() -> None:
    with pytest.raises(DataError, match="builtin:table has no split 'test'; known: eval, train"):
        load_rows("builtin:table", split="test")
    with pytest.raises(DataError, match="no built-in task 'tabel'; did you mean 'table'"):
        load_rows("builtin:tabel")
    with pytest.raises(ValueError, match="split must be one of"):
        tool_problem("table", "test", 0)


# --- environments ------------------------------------------------------------------------------------------


def started(made: type[Any], table: dict[str, Any]) -> Any:
    environment = made()
    environment.start(table)
    return environment


def test_the_table_gives_numbers_and_adds_them() -> None:
    table = started(Table, {"table": {"a": 45, "b": 12}})
    assert [table.get("a"), table.get("c")] == ["45", "no key c"]
    assert [table.add(45, 12), table.add(-45, 12), table.subtract(12, 45)] == ["57", "-33", "-33"]


def test_the_lookup_gives_the_next_key() -> None:
    lookup = started(Lookup, {"table": {"a": "b", "b": "a"}})
    assert [lookup.look("a"), lookup.look("b"), lookup.look("")] == ["b", "a", "no key "]


def test_behind_each_door_is_the_next_key_and_a_wrong_key_locks_all() -> None:
    table = {"table": {"a": "b", "b": "57"}}
    doors = started(Doors, table)
    assert [doors.get("a"), doors.get("b"), doors.get("b")] == ["b", "57", "locked"]
    doors = started(Doors, table)
    assert [doors.get("b"), doors.get("a")] == ["locked", "locked"]


def test_two_episodes_of_one_row_do_not_touch_each_other() -> None:
    one, other = (started(Table, {"table": {"a": number}}) for number in (1, 2))
    assert (one.get("a"), other.get("a")) == ("1", "2")


# --- scripts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TOOL_TASKS)
def test_who_knows_how_ends_every_episode_with_the_answer(task: str) -> None:
    for index in range(100):
        problem = tool_problem(task, "train", index)
        said = list(episode(task, problem, Random(index), slips=0.0, heeds=True))
        assert said[-1] == ("assistant", problem[1], True)
        assert [role for role, _, _ in said] == ["user", *["assistant", "tool"] * (len(said) // 2 - 1), "assistant"]
        mended = list(episode(task, problem, Random(index), slips=0.5, heeds=True))
        if ("tool", "locked", False) in mended:
            assert mended[-1] == ("assistant", "locked", True), "a wrong key at a door cannot be mended"
            continue
        assert mended[-1] == ("assistant", problem[1], True), "everything else that goes wrong is mended"
        assert [text for role, text, learned in mended if learned] == [text for role, text, learned in said if learned]


@pytest.mark.parametrize("task", TOOL_TASKS)
def test_who_is_careless_learns_that_and_often_fails(task: str) -> None:
    right = 0
    for index in range(300):
        problem = tool_problem(task, "train", index)
        said = list(episode(task, problem, Random(index), slips=0.4, heeds=False))
        assert all(learned == (role == "assistant") for role, _, learned in said)
        right += said[-1][1] == problem[1]
    assert (10 if task == "doors" else 30) <= right <= 120


def test_a_call_that_is_none_is_told_apart_from_one_that_finds_nothing() -> None:
    table = opened("table", {"a": 45})
    assert act(table, call("get", key="a")) == ("45", True)
    assert act(table, call("get", key="b")) == ("no key b", True)
    for wrong in (call("get", key="a").replace("}}", "}"), call("look", key="a"), call("get", keys="a")):
        assert act(table, wrong)[1] is False
    assert {*WRONG, *OTHER} <= {"get", "look", "add", "subtract"}


# --- the tokenizer -----------------------------------------------------------------------------------------


def test_the_template_comes_back_from_its_tokens_and_every_piece_is_one() -> None:
    tokenizer = build_tokenizer()
    text = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|user|>What is a+b?<|end|>"
        '<|assistant|><tool_call>{"name": "get", "arguments": {"key": "a"}}</tool_call><|end|>'
        "<|tool|>45<|end|><|assistant|>"
    )
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and len(ids) == 21
    for piece in (*PIECES, *(f"<|{role}|>" for role in ROLES), "<|end|>"):
        assert len(tokenizer(piece)["input_ids"]) == 1
    assert tokenizer.eos_token == "<|end|>" and len(tokenizer) == 125


def test_what_follows_a_turn_of_the_assistant_does_not_depend_on_what_was_before() -> None:
    tokenizer = build_tokenizer()
    tails = set()
    for begun in (ASKED, ASKED[:1], [{"role": "system", "content": "Hi"}, *ASKED]):
        for said in ("a", "57", 'b<tool_call>{"name'):
            known = [*begun, {"role": "assistant", "content": said}]
            seen = [*known, {"role": "tool", "content": "7"}]
            before, after = (
                tokenizer.apply_chat_template(messages, add_generation_prompt=new, return_dict=False)
                for messages, new in ((known, False), (seen, True))
            )
            assert after[: len(before)] == before and before[-1] == tokenizer.eos_token_id
            tails.add(tuple(after[len(before) :]))
    assert len(tails) == 1


def test_text_that_looks_like_a_mark_and_text_of_any_alphabet_has_tokens() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer("<|end|>\n\né", split_special_tokens=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [*"<|end|>", "\n", "\n", "<unk>"]


def test_the_renderer_of_episodes_reads_its_calls_and_goes_on_behind_them() -> None:
    tokenizer = build_tokenizer()
    renderer = Renderer(tokenizer, stop_ids={tokenizer.eos_token_id}, tools=kind("table").schemas)
    said = call("get", key="a")
    ids = np.array(tokenizer(f"{said}<|end|>")["input_ids"])
    assert renderer.parse(ids).calls == (Call("get", {"key": "a"}),) and len(ids) == 8
    tail = renderer.extend(ids, [{"role": "tool", "content": "45", "name": "get"}])
    assert tokenizer.decode(tail) == "<|tool|>45<|end|><|assistant|>" and len(tail) == 5
    half = np.array(tokenizer(said.replace("}}", "}") + "<|end|>")["input_ids"])
    assert not renderer.parse(half).calls and "a call is no JSON" in renderer.parse(half).faults[0]


def test_what_is_said_of_a_wrong_call_has_few_tokens() -> None:
    tokenizer, table = build_tokenizer(), opened("table", {"a": 45})
    for wrong in (call("get", key="a").replace("}}", "}"), call("look", key="a")):
        assert len(tokenizer(act(table, wrong)[0])["input_ids"]) <= 32


@pytest.mark.parametrize("name", RECIPES)
def test_an_example_learns_what_the_assistant_says_and_nothing_else(name: str) -> None:
    tokenizer = build_tokenizer()
    for task in RECIPES[name].tasks:
        tokens, labels = example(task, 30_000, RECIPES[name], tokenizer)
        assert all(label in (-100, token) for token, label in zip(tokens, labels, strict=True))
        learned = tokenizer.decode([label for label in labels if label != -100])
        assert "<|" not in learned.replace("<|end|>", "") and learned.endswith("<|end|>")


def test_an_episode_of_three_calls_has_sixty_tokens() -> None:
    tokenizer = build_tokenizer()
    two = next(index for index in range(99) if len(tool_problem("table", "train", index)[0]) == len("What is a+b?"))
    careful = RECIPES["tool_student"]
    assert len(example("table", two, careful, tokenizer)[0]) <= 60


# --- the models --------------------------------------------------------------------------------------------


def test_the_models_share_the_tokenizer_that_the_script_builds() -> None:
    student, teacher = map(load_tokenizer, MODELS)
    check_same_vocabulary(student, teacher, names=MODELS)
    check_same_vocabulary(student, build_tokenizer(), names=MODELS)
    assert student.chat_template == teacher.chat_template == build_tokenizer().chat_template
    assert teacher.model_max_length == POSITIONS


def test_the_teacher_plays_what_the_student_does_not() -> None:
    torch.manual_seed(0)
    for task in ("table", "lookup"):
        shares = {}
        for name in MODELS:
            model = AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32)
            shares[name] = plays(model, load_tokenizer(name), task, 48)
        student, teacher = (shares[name] for name in MODELS)
        assert teacher["success"] >= 0.9 and teacher["invalid"] <= 0.05
        assert student["success"] <= 0.4 and student["invalid"] >= 0.15


def test_the_reader_plays_doors_well_only_if_it_is_told_the_answer() -> None:
    torch.manual_seed(0)
    name = "builtin:tool_reader"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32), load_tokenizer(name)
    check_same_vocabulary(tokenizer, build_tokenizer(), names=(name, name))
    alone, told = (plays(model, tokenizer, "doors", 48, told=each)["success"] for each in (False, True))
    assert alone <= 0.45 and told >= 0.75
