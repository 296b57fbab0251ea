"""Data as it is found: good files and bad ones, layouts, columns that a config names, answers that can be compared."""

import gzip
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from slipstream.cli import main
from slipstream.commands.config import prompt_preview, shortened
from slipstream.config.data import DataConfig
from slipstream.config.file import load
from slipstream.data.layouts import (
    DEEPMATH,
    GSM8K,
    OPENAI,
    PLAIN_LAYOUT,
    PROBLEM,
    TRL,
    VERL,
    layout_of,
    reach,
    with_configured_paths,
    without,
)
from slipstream.data.prompts import Row, load_rows
from slipstream.data.tokenizers import encode_rows
from slipstream.errors import ConfigError, DataError
from slipstream.plan.plan import plan
from slipstream.plan.prompts import check_ids_differ, graded_rows
from slipstream.rewards.functions import exact, math, unfit
from slipstream.run_dir.writing import read_lines
from slipstream.runs import start as launch
from support.model_directories import build_tokenizer

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello"}
EXPECTED = "expected 'prompt' (text or a list of messages) or 'messages'"


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def written(path: Path, content: bytes | list[dict[str, Any]]) -> str:
    """Write a file of the kind that its name says."""
    if path.suffix == ".parquet" and isinstance(content, list):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    else:
        assert isinstance(content, bytes)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


# --- good files --------------------------------------------------------------------------------------------

MATH = {"question": "3+4?", "answer": "3 and 4 make 7.\n#### 7"}
DEEP = {"question": "3+4?", "final_answer": "7", "difficulty": 2.0, "topic": "sums", "r1_solution_1": "…"}
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 0, "answer": "#### 7"},
}
NESTED = {"item": {"asked": ["Why?", "When?"]}, "truth": {"aliases": ["a", "b"]}, "a.b": "dots"}

GOOD: dict[str, tuple[str, Any, dict[str, Any], tuple[Any, Any], str]] = {
    "plain": ("a.jsonl", lines({"prompt": "a", "answer": 7}), {}, ("a", 7), "the plain layout"),
    "ground truth first": ("a.jsonl", lines({"prompt": "a", "answer": 1, "ground_truth": 2}), {}, ("a", 2), "plain"),
    "gzip": ("a.jsonl.gz", lines({"prompt": "a", "answer": "7"}), {}, ("a", "7"), "plain"),
    "a list": ("a.json", b' [\n {"prompt": "a",\n "answer": "7"}]\n', {}, ("a", "7"), "plain"),
    "a list after an empty line": ("a.json", b'\n[{"prompt": "a",\n "answer": "7"}]', {}, ("a", "7"), "plain"),
    "a list in one line": ("a.json", b'[{"prompt": "a", "answer": "7"}]', {}, ("a", "7"), "plain"),
    "a list, gzip": ("a.json.gz", b'[{"prompt": "a", "answer": "7"}]', {}, ("a", "7"), "plain"),
    "lines in .json": ("a.json", lines({"prompt": "a", "answer": "7"}), {}, ("a", "7"), "plain"),
    "byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + lines({"prompt": "a"}), {}, ("a", None), "plain"),
    "Windows lines": ("a.jsonl", b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n', {}, ("a", None), "plain"),
    "a huge integer": ("a.jsonl", b'{"prompt": "a", "answer": 1%s}' % (b"0" * 4000), {}, ("a", 10**4000), "plain"),
    "csv": ("a.csv", b"prompt,answer\na,7\n", {}, ("a", "7"), "plain"),
    "csv, gzip": ("a.csv.gz", b"prompt,answer\na,7\n", {}, ("a", "7"), "plain"),
    "csv of Excel": ("a.csv", b"\xef\xbb\xbfprompt,answer\r\na,7\r\n", {}, ("a", "7"), "plain"),
    "csv with commas and lines": ("a.csv", b'prompt,answer\n"a,\nb",7\n', {}, ("a,\nb", "7"), "plain"),
    "csv with an index": ("a.csv", b",prompt,answer\n0,a,7\n", {}, ("a", "7"), "plain"),
    "csv with an empty cell": ("a.csv", b"prompt,answer\na,\n", {}, ("a", None), "plain"),
    "csv with long cells": ("a.csv", b"prompt\n" + b"a" * 200_000, {}, ("a" * 200_000, None), "plain"),
    "parquet": ("a.parquet", [{"prompt": "a", "answer": 7}], {}, ("a", 7), "plain"),
    "several answers": ("a.jsonl", lines({"prompt": "a", "answer": ["7", "VII"]}), {}, ("a", ["7", "VII"]), "plain"),
    "duplicate ids": ("a.jsonl", lines(*[{"prompt": "a", "id": 1}] * 2), {}, ("a", None), "plain"),
    "parts": (
        "a.jsonl",
        lines({"messages": [{**USER, "content": [{"type": "text", "text": "Hi"}]}]}),
        {},
        ([USER], None),
        "",
    ),
    "GSM8K": ("a.jsonl", lines(MATH), {}, ("3+4?", "7"), "GSM8K: prompt from question, answer from answer after ####"),
    "GSM8K, thousands": ("a.jsonl", lines({**MATH, "answer": "#### 1,234"}), {}, ("3+4?", "1234"), "GSM8K"),
    "GSM8K, the whole answer": ("a.jsonl", lines(MATH), {"answer": "answer"}, ("3+4?", MATH["answer"]), "from answer"),
    "GSM8K in a template": ("a.jsonl", lines(MATH), {"template": "Q: {question}"}, ("Q: 3+4?", "7"), "look like GSM8K"),
    "verl": ("a.jsonl", lines(VERL_ROW), {}, ([USER], "7"), "verl: prompt from prompt, answer from reward_model.gro"),
    "verl as parquet": ("a.parquet", [VERL_ROW], {}, ([USER], "7"), "verl"),
    "DeepMath": ("a.jsonl", lines(DEEP), {}, ("3+4?", "7"), "DeepMath: prompt from question, answer from final_a"),
    "TRL text": ("a.jsonl", lines({"prompt": "a", "completion": "b"}), {}, ("a", "b"), "TRL"),
    "TRL messages": ("a.jsonl", lines({"prompt": [USER], "completion": [SAID]}), {}, ([USER], "Hello"), "TRL"),
    "TRL prompts": ("a.jsonl", lines({"prompt": [USER]}), {}, ([USER], None), "plain"),
    "OpenAI": ("a.jsonl", lines({"messages": [USER, SAID]}), {}, ([USER], "Hello"), "answer from the last turn"),
    "OpenAI, a question": (
        "a.jsonl",
        lines({"messages": [USER, SAID, USER]}),
        {},
        ([USER, SAID, USER], None),
        "OpenAI",
    ),
    "OpenAI, a call": (
        "a.jsonl",
        lines({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
        {},
        ([USER], None),
        "OpenAI",
    ),
    "last turn beside an answer": ("a.jsonl", lines({"messages": [USER, SAID], "answer": 1}), {}, ([USER], 1), "plain"),
    "last turn without an answer": ("a.jsonl", lines({"prompt": [USER, SAID]}), {}, ([USER], "Hello"), "plain"),
    "a column": (
        "a.csv",
        b"q,r\na,7\n",
        {"prompt": "q", "answer": "r"},
        ("a", "7"),
        "as the config says: prompt from q",
    ),
    "a column beside prompt": ("a.csv", b"prompt,q\na,b\n", {"prompt": "q"}, ("b", None), "as the config says"),
    "a path": ("a.jsonl", lines(NESTED), {"prompt": "item.asked.1"}, ("When?", None), "prompt from item.asked.1"),
    "a path to a list": (
        "a.jsonl",
        lines(NESTED),
        {"prompt": "item.asked.0", "answer": "truth.aliases"},
        ("Why?", ["a", "b"]),
        "answer from truth.aliases",
    ),
    "a column with a dot": ("a.jsonl", lines(NESTED), {"prompt": "a.b"}, ("dots", None), "prompt from a.b"),
    "a template": ("a.csv", b"q,n\na,7\n", {"template": "{{{q}}} {n}."}, ("{a} 7.", None), "prompt from data.template"),
    "a template of paths": ("a.jsonl", lines(NESTED), {"template": "{item.asked.0} {a.b}"}, ("Why? dots", None), ""),
}


@pytest.mark.parametrize("case", GOOD)
def test_data_is_taken_as_it_is_found_and_what_it_looks_like_is_said(tmp_path: Path, case: str) -> None:
    name, content, told, (prompt, answer), layout = GOOD[case]
    source, said = written(tmp_path / name, content), list[str]()
    row, *_ = load_rows(source, DataConfig(**told), say=said.append)
    assert (row.prompt, row.ground_truth) == (prompt, answer)
    (line,) = said
    assert line.startswith(f"{source}: rows ") and layout in line


def test_columns_that_are_no_prompt_and_no_answer_stay_with_a_row(tmp_path: Path) -> None:
    (row,) = load_rows(written(tmp_path / "a.jsonl", lines({**DEEP, "id": 5, "data_source": "deep"})))
    assert (row.id, row.data_source, row.place) == ("5", "deep", f"{tmp_path}/a.jsonl:1")
    assert row.meta == {"difficulty": 2.0, "topic": "sums", "r1_solution_1": "…"}


def test_a_subset_of_a_dataset_is_named_behind_a_colon(tmp_path: Path) -> None:
    home = tmp_path / "gsm"
    home.mkdir()
    configs = [f"- config_name: {name}\n  data_files: {name}.jsonl" for name in ("main", "socratic")]
    (home / "README.md").write_text("\n".join(["---", "configs:", *configs, "---", ""]))
    for name in ("main", "socratic"):
        (home / f"{name}.jsonl").write_bytes(lines({"question": name, "answer": "#### 7"}))
    (row,) = load_rows(f"{home}:socratic")
    assert (row.prompt, row.ground_truth, row.id) == ("socratic", "7", f"{home}:socratic[train]:1")
    with pytest.raises(
        DataError, match=r"it has the subsets \['main', 'socratic'\]: name one of them, as in .*:SUBSET"
    ):
        load_rows(str(home))
    with pytest.raises(DataError, match=r"cannot be loaded: [^\n]*'mian' not found"):
        load_rows(f"{home}:mian")


def test_a_table_that_was_saved_alone_has_no_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_list([{"prompt": "B1=", "answer": "1"}]).save_to_disk("saved")
    config = [("data", '{train = "saved"}'), ("task.reward", "none")]
    Path("run.toml").write_text(CONFIG)
    assert len(plan(load("run.toml", config)).prompts.rows) == 1
    with pytest.raises(ConfigError, match="data.split = 'test' does nothing: saved has no splits; drop it"):
        plan(load("run.toml", [*config, ("data.split", "test")]))
    with pytest.raises(DataError, match="^saved:main: saved was saved without subsets: write saved$"):
        load_rows("saved:main")


# --- layouts -----------------------------------------------------------------------------------------------

LAYOUTS = [
    ([MATH], GSM8K),
    ([{**MATH, "answer": "none"}, MATH], GSM8K),
    ([{**MATH, "answer": "7"}], PLAIN_LAYOUT),
    ([{**MATH, "prompt": "x"}], PLAIN_LAYOUT),
    ([DEEP], DEEPMATH),
    ([{"problem": "a", "answer": "7", "solution": "b"}], PROBLEM),
    ([{"problem": "a", "answer": "7", "prompt": "b"}], PLAIN_LAYOUT),
    ([{"problem": "a", "answer": "7", "question": "b"}], PLAIN_LAYOUT),
    ([VERL_ROW], VERL),
    ([{**VERL_ROW, "reward_model": "path"}], PLAIN_LAYOUT),
    ([{**VERL_ROW, "answer": "7"}], PLAIN_LAYOUT),
    ([{"prompt": "a", "completion": "b"}], TRL),
    ([{"prompt": [USER], "completion": [SAID]}], TRL),
    ([{"prompt": "a"}], PLAIN_LAYOUT),
    ([{"messages": [USER, SAID]}], OPENAI),
    ([{"messages": [USER], "tools": []}], OPENAI),
    ([{"messages": [USER], "answer": 1}], PLAIN_LAYOUT),
    ([{"prompt": None, "messages": [USER]}], PLAIN_LAYOUT),
    ([{"text": "a"}], PLAIN_LAYOUT),
    (["no object", MATH], GSM8K),
    ([["no object"]], PLAIN_LAYOUT),
    ([], PLAIN_LAYOUT),
]


@pytest.mark.parametrize(("rows", "layout"), LAYOUTS)
def test_a_layout_is_known_by_the_columns_of_the_first_rows(rows: list[Any], layout: Any) -> None:
    assert layout_of(rows) == layout


def test_a_config_wins_over_what_rows_look_like() -> None:
    assert with_configured_paths(GSM8K, DataConfig()) == GSM8K
    assert with_configured_paths(GSM8K, DataConfig(prompt="q")).answer == ("answer",)
    told = with_configured_paths(GSM8K, DataConfig(prompt="q", answer="a"))
    assert (told.name, told.prompt, told.answer, told.take) == ("", ("q",), ("a",), "all")


def test_a_path_leads_into_objects_and_lists() -> None:
    fields = {"a": {"b": [1, {"c": 2}]}, "a.b": 3, "d": {"e.f": 4}}
    found = {path: reach(fields, path) for path in ("a", "a.b", "a.b.0", "a.b.1.c", "d.e.f")}
    assert found == {"a": fields["a"], "a.b": 3, "a.b.0": 1, "a.b.1.c": 2, "d.e.f": 4}
    for path in ("x", "a.x", "a.b.c", "a.b.2", "a.b.-1", "", ".", "a."):
        with pytest.raises(LookupError):
            reach(fields, path)


def test_a_value_is_left_out_at_its_path() -> None:
    fields = {"a": {"b": [1, {"c": 2}]}, "a.b": 3, "d": 4}
    assert without(fields, "d") == {"a": fields["a"], "a.b": 3}
    assert without(fields, "a.b") == {"a": fields["a"], "d": 4}
    assert without(fields, "a.b.1.c") == fields | {"a": {"b": [1, {}]}}
    assert without(fields["a"], "b.0") == {"b": [{"c": 2}]}
    for path in ("x", "a.x", "a.b.c", "a.b.2", "a.b.-1", "", ".", "a."):
        assert without(fields, path) == fields


@pytest.mark.parametrize(
    ("row", "data", "hidden"),
    [
        ({"prompt": "q", "reward_model": {"ground_truth": "7"}}, {}, "reward_model.ground_truth"),
        ({"prompt": "q", "info": {"gold": "7"}}, {"answer": "info.gold"}, "info.gold"),
        ({"prompt": "q", "answer": "7", "solution": "thus 7"}, {"response": "solution"}, "solution"),
    ],
)
def test_a_row_knows_where_its_answer_is(row: Any, data: Any, hidden: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (made,) = load_rows(str(tmp_path / "a.jsonl"), DataConfig(**data))
    assert made.ground_truth == "7" and "7" in str(made.meta)
    assert hidden in made.hidden and "7" not in str(without(made.meta, hidden))


def test_two_prompts_with_one_id_are_refused_where_answers_are_found_by_it() -> None:
    rows = [Row("0", "a", where="x.jsonl:1"), Row("1", "b"), Row("0", "a", where="x.jsonl:3"), Row("1", "b")]
    check_ids_differ(rows)
    with pytest.raises(DataError, match=r"^y.jsonl:1: id '0' is that of x.jsonl:1, too, and attempts or trajectories"):
        check_ids_differ([*rows, Row("0", "c", where="y.jsonl:1")])


# --- bad files ---------------------------------------------------------------------------------------------

DEEPLY = b'{"prompt": "a", "x": %s1%s}'
BAD: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "empty": ("a.jsonl", b"", {}, ": no rows"),
    "blank lines": ("a.jsonl", b"\n \n", {}, ": no rows"),
    "empty csv": ("a.csv", b"", {}, ": no rows"),
    "csv of a header": ("a.csv", b"prompt,answer\n", {}, ": no rows"),
    "empty list": ("a.json", b"[]", {}, ": no rows"),
    "another encoding": (
        "a.jsonl",
        '{"prompt": "a"}\n{"prompt": "é"}'.encode("latin-1"),
        {},
        ":2: not UTF-8 (byte 0xe9)",
    ),
    "UTF-16": ("a.csv", "prompt\na\n".encode("utf-16"), {}, ":1: not UTF-8 (byte 0xff): save it with this encoding"),
    "no gzip": ("a.jsonl", b"", {"gz": lines({"prompt": "a"})}, ": cannot be read: Not a gzipped file"),
    "half a gzip": (
        "a.jsonl",
        b"",
        {"gz": gzip.compress(lines({"prompt": "a"}))[:-9]},
        ": cannot be read: Compressed file",
    ),
    "no parquet": ("a.parquet", b"PAR1", {}, ": cannot be read: "),
    "a list that does not end": ("a.json", b'[{"prompt": "a"},', {}, ": not a JSON list: "),
    "an object over lines": ("a.json", b'{\n"prompt": "a"}', {}, ":1: not a JSON object on one line: "),
    "a list of text": ("a.json", b'["a"]', {}, ":1: a row must be an object"),
    "half a line": ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b', {}, ":2: not a JSON object on one line: "),
    "nested for ever": ("a.jsonl", DEEPLY % (b"[" * 100_000, b"]" * 100_000), {}, ":1: nested too deeply"),
    "nested deeply": ("a.jsonl", DEEPLY % (b"[" * 60, b"]" * 60), {}, ":1: 'x' is nested deeper than 50 levels"),
    "objects nested deeply": ("a.jsonl", DEEPLY % (b'{"a":' * 60, b"}" * 60), {}, ":1: 'x' is nested deeper than 50"),
    "an endless integer": (
        "a.jsonl",
        b'{"prompt": "a", "answer": 1%s}' % (b"0" * 9999),
        {},
        ":1: a number of more than",
    ),
    "half a character": ("a.jsonl", rb'{"prompt": "\ud800"}', {}, ":1: 'prompt' holds half of a surrogate pair"),
    "half a character inside": (
        "a.jsonl",
        rb'{"messages": [{"role": "user", "content": "\udc00"}]}',
        {},
        ":1: 'messages' holds h",
    ),
    "half a character in a name": ("a.jsonl", rb'{"prompt": "a", "\ud800": 1}', {}, r":1: '\ud800' holds half"),
    "NUL": ("a.jsonl", rb'{"prompt": "a\u0000"}', {}, ":1: 'prompt' holds a NUL character"),
    "NUL in an answer": ("a.jsonl", rb'{"prompt": "a", "answer": "\u0000"}', {}, ":1: 'answer' holds a NUL"),
    "NUL in csv": ("a.csv", b"prompt\na\0\n", {}, ":2: 'prompt' holds a NUL"),
    "blank prompt": ("a.jsonl", lines({"prompt": "a"}, {"prompt": " \n"}), {}, ":2: the prompt is empty; "),
    "blank message": ("a.jsonl", lines({"messages": [{**USER, "content": " "}]}), {}, ":1: the prompt is empty; "),
    "NaN prompt": ("a.jsonl", b'{"prompt": NaN}', {}, f":1: the prompt is nan; {EXPECTED}"),
    "boolean prompt": ("a.jsonl", b'{"prompt": true}', {}, ":1: the prompt is True; "),
    "object as prompt": ("a.jsonl", b'{"prompt": {"text": "a"}}', {}, ":1: the prompt is {'text': 'a'}; "),
    "message of text": ("a.jsonl", b'{"messages": ["a"]}', {}, ":1: a message must have 'role' and 'content'"),
    "another layout": (
        "a.jsonl",
        lines({"question": "a", "answer": 1}),
        {},
        f":1: {EXPECTED}; found 'question', 'answer': if 'question' is the prompt, write data.prompt = \"question\"",
    ),
    "another layout later": ("a.jsonl", lines(MATH, {"prompt": "a"}), {}, ":2: expected 'question'; found 'prompt'"),
    "no mark": ("a.jsonl", lines(MATH, {**MATH, "answer": "7"}), {}, ":2: no #### before the answer, unlike"),
    "ragged csv": ("a.csv", b"prompt,answer\na,1\nb\n", {}, ":3: has 1 cells, and the header 2"),
    "csv with too many cells": ("a.csv", b'prompt,answer\n"a\nb",1\nc,2,3\n', {}, ":4: has 3 cells, and the header 2"),
    "csv with an open quote": ("a.csv", b'prompt,answer\na,1\n"b,2\n', {}, ":3: not CSV: unexpected end of data"),
    "csv with names twice": ("a.csv", b"prompt,prompt\na,b\n", {}, ":1: two columns are named 'prompt'"),
    "csv by semicolons": ("a.csv", b"prompt;answer\na;1\n", {}, ":2: expected 'prompt' (text or a list of messages)"),
    "csv with an empty prompt": ("a.csv", b"prompt,answer\n,1\n", {}, ":2: expected 'prompt'"),
    "no column": (
        "a.csv",
        b"question,answer\na,1\n",
        {"prompt": "questoin"},
        ":2: has no 'questoin' (data.prompt); did you mean 'question'?",
    ),
    "no answer column": (
        "a.csv",
        b"prompt,answer\na,1\n",
        {"answer": "x"},
        ":2: has no 'x' (data.answer); known: answer, prompt",
    ),
    "no path": (
        "a.jsonl",
        lines({"prompt": "a", "x": {"answer": 1}}),
        {"answer": "x.anwser"},
        ":1: has no 'x.anwser' (data.answer); did you mean 'x.answer'?",
    ),
    "path beyond a list": (
        "a.jsonl",
        lines({"prompt": "a", "x": [1]}),
        {"answer": "x.1"},
        ":1: has no 'x.1' (data.answer)",
    ),
    "path into text": (
        "a.jsonl",
        lines({"prompt": "a"}),
        {"answer": "prompt.b"},
        ":1: has no 'prompt.b' (data.answer)",
    ),
    "nothing in a column": ("a.jsonl", lines({"q": None}), {"prompt": "q"}, ":1: the prompt is None; "),
    "no column of a template": (
        "a.jsonl",
        lines({"q": "a"}, {"x": 1}),
        {"template": "{q}"},
        ":2: has no 'q' (data.template); known: x",
    ),
    "nothing for a template": ("a.csv", b"q,r\n,1\n", {"template": "{q}"}, ":2: 'q' holds nothing (data.template)"),
    "NaN for a template": ("a.jsonl", b'{"q": NaN}', {"template": "{q}"}, ":1: 'q' holds nothing (data.template)"),
    "a list for a template": (
        "a.jsonl",
        lines({"q": [1]}),
        {"template": "{q}"},
        ":1: 'q' holds no text (data.template)",
    ),
    "a blank template": ("a.jsonl", lines({"q": " "}), {"template": "{q}"}, ":1: the prompt is empty"),
    "tools that are text": ("a.jsonl", lines({"messages": [USER], "tools": "x"}), {}, ":1: 'tools' must be a list"),
    "parquet without a prompt": ("a.parquet", [{"x": 1}], {}, f":1: {EXPECTED}; found 'x'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_costs_one_line_with_file_and_row(tmp_path: Path, case: str) -> None:
    name, content, told, message = BAD[case]
    told = dict(told)
    if packed := told.pop("gz", None):
        path = tmp_path / f"{name}.gz"
        path.write_bytes(packed)
    else:
        path = tmp_path / name
        written(path, content)
    with pytest.raises(DataError, match="^" + re.escape(f"{path}{message}")) as caught:
        load_rows(str(path), DataConfig(**told))
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "round.jsonl").symlink_to(tmp_path / "round.jsonl")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.txt").write_text("a")
    found = {
        "pipe.jsonl": "is a pipe or a device, where a file is expected",
        "zero.csv": "is a pipe or a device",
        "folder.jsonl": "is a directory, where a file is expected",
        "round.jsonl": "cannot be read: Too many levels of symbolic links",
        "no.csv.gz": "cannot be read: No such file or directory",
        "nul\0.jsonl": "cannot be read: embedded null byte",
        "a" * 300 + ".jsonl": "cannot be read: File name too long",
        "pipe": "the name of a file of data ends in one of .jsonl, .json, .csv, .parquet, or that and .gz",
        "a.txt": "the name of a file of data ends in one of",
    }
    for name, message in found.items():
        with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}: {message}")):
            load_rows(str(tmp_path / name))
    source = written(tmp_path / "good.jsonl", lines({"prompt": "a"}))
    with pytest.raises(DataError, match="good.jsonl is one file, without subsets: drop ':main'"):
        load_rows(f"{source}:main")
    for nowhere in (f"{tmp_path}/gone", f"{tmp_path}/gone:main", "./gone", "../gone/away"):
        with pytest.raises(DataError, match=f"^{re.escape(nowhere)}: no such file or directory$"):
            load_rows(nowhere)
    for nothing in ("", " "):
        with pytest.raises(DataError, match="names no data: write a file"):
            load_rows(nothing)


# --- answers -----------------------------------------------------------------------------------------------

ANSWERS: list[tuple[str, Any, str]] = [
    ("exact", "7", ""),
    ("exact", 7, ""),
    ("exact", 10**4000, ""),
    ("exact", ["7", 7], ""),
    ("math", 0.5, ""),
    ("math", "7", ""),
    ("exact", 0.5, 'may be written in several ways: make it text, or write "math"'),
    ("exact", None, "an answer is None"),
    ("exact", " ", "it is blank"),
    ("exact", True, 'may be written in several ways: make it text, "yes" or "true"'),
    ("math", False, "may be written in several ways"),
    ("exact", float("nan"), "it is nan"),
    ("math", float("inf"), "it is inf"),
    ("exact", {"value": 7}, "it is {'value': 7}, where text or a number is expected"),
    ("exact", [["7"]], "it is ['7'], where text or a number is expected"),
    ("exact", [], "the list is empty"),
    ("exact", ["7", None], "an answer is None"),
    ("math", b"7", "it is b'7'"),
]


@pytest.mark.parametrize(("reward", "truth", "why"), ANSWERS)
def test_an_answer_that_a_reward_cannot_compare_is_refused_with_its_row(reward: str, truth: Any, why: str) -> None:
    assert why in unfit(reward, truth) and bool(why) == bool(unfit(reward, truth))
    rows = [Row("a", "x", ground_truth="7"), Row("b", "x", ground_truth=truth, where="a.jsonl:2")]
    assert graded_rows(rows, ()) == rows
    if why:
        with pytest.raises(
            DataError, match=r"^a\.jsonl:2: (the reward '(exact|math)' cannot compare the answer|has no answer, which)"
        ):
            graded_rows(rows, (reward,))
    else:
        assert graded_rows(rows, (reward,)) == rows


def test_of_several_answers_each_is_right() -> None:
    found = [(exact(text, ["7", "VII"]), math(text, ["7", "VII"])) for text in ("VII", "7.0", "8")]
    assert found == [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]


# --- through a template of the tokenizer -------------------------------------------------------------------


def test_text_goes_through_the_chat_template_if_asked_to() -> None:
    tokenizer, text = build_tokenizer(), [Row("r", "Hi", where="a.csv:2")]
    (ids,) = encode_rows(text, tokenizer, DataConfig(chat=True, system_prompt="Be!"))
    assert tokenizer.decode(ids) == "<bos><system>Be!<eos><user>Hi<eos><assistant>"
    with pytest.raises(ConfigError, match="data.chat does nothing: prompts are messages already; drop it"):
        encode_rows([Row("r", [USER])], tokenizer, DataConfig(chat=True))
    bare = build_tokenizer(template=None)
    with pytest.raises(Exception, match="has no chat template, and data.chat needs one: drop it"):
        encode_rows(text, bare, DataConfig(chat=True))
    with pytest.raises(DataError, match="^a.csv:3: prompts must be all text or all messages, as that of a.csv:2 is$"):
        encode_rows([*text, Row("s", [USER], where="a.csv:3")], tokenizer, DataConfig())


def test_text_for_a_model_that_chats_is_noted(tmp_path: Path, models_dir: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.replace("builtin:", f"{models_dir}/").replace("table.csv", f"{tmp_path}/table.csv"))
    (tmp_path / "table.csv").write_text(TABLE)
    made = plan(load(path))
    assert any("data.chat = true sends it as a user's message" in note for note in made.notes)
    chatting = plan(load(path, [("data.chat", "true")]))
    assert not any("data.chat" in note for note in chatting.notes)
    assert prompt_preview(chatting)[0] == "first prompt: '<bos><user>A1B0=<eos><assistant>'"


# --- commands ----------------------------------------------------------------------------------------------

CONFIG = """
student = "builtin:student"
updates = 2
output = "run"
[data]
train = "table.csv"
template = "A1{question}"
answer = "worked.out"
[teachers.main]
model = "builtin:teacher"
[sampler]
max_tokens = 8
group = 2
[learner]
batch_size = 4
[loss]
m = 2
[task]
reward = "exact"
[runtime]
kind = "inline"
device = "cpu"
"""
TABLE = "question,worked.out\n" + "".join(f"B{i}=,A1B{(i + 1) % 10}\n" for i in range(8))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "table.csv").write_text(TABLE)
    return tmp_path


def test_a_table_trains_by_a_template_and_a_column(home: Path) -> None:
    path = launch.train(load("run.toml"), Console(quiet=True), name="run")
    found = [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["update"] for line in found] == [1, 2] and (path / "final" / "config.json").exists()


def test_check_shows_the_first_prompt_as_the_student_sees_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "run.toml", "--check"]) == 0
    told = capsys.readouterr().out
    assert "# first prompt: 'A1B0='\n# its answer: 'A1B1'\n" in told
    layout = "prompt from data.template = 'A1{question}', answer from worked.out"
    assert f"# table.csv: rows are read as the config says: {layout}\n" in told
    (home / "long.jsonl").write_bytes(lines({"prompt": "A1" * 60 + "B2="}))
    changes = [("data", '{"train": "long.jsonl"}'), ("task.reward", "none")]
    made = plan(load("run.toml", [("data", '{train = "long.jsonl"}'), *changes[1:]]))
    prompt, answer = prompt_preview(made)
    assert prompt.endswith("B2='") and len(prompt) < 150 and answer == "its answer: none"


def test_what_is_shown_is_one_line_with_both_ends() -> None:
    assert shortened("a\nb\x1b[2J") == r"'a\nb\x1b[2J'"
    long = shortened("a" * 500 + "z")
    assert long.startswith("'aaa") and " … " in long and long.endswith("az'") and len(long) < 130


REFUSED = {
    "no column": (
        "--data.answer",
        "solution",
        "table.csv:2: has no 'solution' (data.answer); did you mean 'question'?",
    ),
    "no column of a template": ("--data.template", "{q}", "table.csv:2: has no 'q' (data.template); known: question"),
    "no answer": ("--data.train", "bare.jsonl", "bare.jsonl:1: has no 'worked.out' (data.answer)"),
    "blank": (
        "--data.train",
        "blank.csv",
        "blank.csv:3: has no answer, which the reward 'exact' needs: set data.answer to its column",
    ),
    "a pipe": ("--data.train", "pipe.csv", "pipe.csv: is a pipe or a device, where a file is expected"),
    "a template of nothing": ("--data.template", "A1", "data.template: would be the same for every prompt"),
    "a template of conversions": ("--data.template", "{q!r}", "data.template: write only the name of a column"),
    "an open brace": ("--data.template", "{q", "data.template: expected '}' before end of string; write {{ and }}"),
    "a column beside a template": ("--data.prompt", "question", "data: prompt does nothing beside template"),
    "columns of the built-in task": (
        "--data.train",
        "builtin:arithmetic",
        "data.answer does nothing: builtin:arithmetic has",
    ),
    "a system prompt for text": ("--data.system_prompt", "Be", "data.system_prompt needs prompts that are messages"),
    "chat without a template": ("--data.chat", "true", "has no chat template, and data.chat needs one: drop it"),
    "an encoding": ("--data.train", "latin.csv", "latin.csv:2: not UTF-8 (byte 0xe9)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_check_and_train_refuse_data_with_the_same_line(
    home: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "bare.jsonl").write_bytes(lines({"question": "B1="}))
    (home / "blank.csv").write_text("question,worked.out\nB1=,1\nB2=,\n")
    (home / "latin.csv").write_bytes("question,worked.out\né,1\n".encode("latin-1"))
    os.mkfifo(home / "pipe.csv")
    key, value, message = REFUSED[case]
    said = []
    for command in (["config", "run.toml", "--check"], ["train", "run.toml"]):
        assert main([*command, key, value]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and said[0].count("\n") == 1 and message in said[0]
    assert not (home / "run").exists()


def test_eval_reads_data_as_training_does(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["eval", "builtin:student", "--data", "table.csv", "-n", "1", "--max-tokens", "4"]
    assert main([*base, "--data.template", "A1{question}", "--data.answer", "worked.out"]) == 0
    assert "table.csv: rows are read as the config says: prompt from data.template" in capsys.readouterr().out
    for words, message in {
        ("--data.prompt", "questoin"): "table.csv:2: has no 'questoin' (data.prompt); did you mean 'question'?",
        (
            "--data.prompt",
            "question",
        ): "table.csv:2: has no answer, which the reward 'exact' needs: set data.answer to its column",
        ("--data.template", "A1"): "data.template: would be the same for every prompt",
        (
            "--data",
            "builtin:arithmetic",
            "--data.answer",
            "x",
        ): "data.answer does nothing: builtin:arithmetic has no col",
        ("--data.prompt", "question", "--data.template", "{question}"): "data: prompt does nothing beside template",
    }.items():
        assert main([*base, *words]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1


def test_the_tables_are_large() -> None:
    assert len(GOOD) + len(BAD) + len(ANSWERS) + len(REFUSED) >= 100
    assert sys.getrecursionlimit() < 100_000, "what is nested for ever is deeper than Python"


def test_a_damaged_archive_in_a_folder_of_data_costs_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.zip").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match=r"\(split 'train'\): cannot be loaded: File is not a zip file"):
        list(load_rows(str(tmp_path)))
