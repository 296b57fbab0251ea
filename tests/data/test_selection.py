"""Rows that are left out or cut, and held-out prompts that are in the training data."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.prompts import Row, load_rows
from slipstream.data.selection import COMMON, FILTER_WORDS, difficulties, fitting, overlap_of, without_copies
from slipstream.errors import ConfigError, DataError
from slipstream.records import Ints


def ids(*texts: str) -> list[Ints]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def rows(*prompts: str) -> list[Row]:
    return [Row(f"r{i}", prompt, where=f"f:{i + 1}") for i, prompt in enumerate(prompts)]


def test_copies_have_the_same_prompt_and_the_same_answer() -> None:
    given_rows = [
        Row("a", "x", ground_truth="1", meta={"n": 1}, where="f:1"),
        Row("b", "x", ground_truth="2", meta={"n": 1}, where="f:2"),
        Row("c", "y", ground_truth="1", meta={"n": 1}, where="f:3"),
        Row("d", "x", ground_truth="1", meta={"n": 2}, where="f:4"),
        Row("e", "x", ground_truth="1", meta={"n": 1}, where="f:5"),
    ]
    tokens, said = ids("x", "x", "y", "x", "x"), list[str]()
    assert without_copies(given_rows, tokens, columns=False, say=said.append) == [0, 1, 2]
    assert without_copies(given_rows, tokens, columns=True, say=said.append) == [0, 1, 2, 3]
    assert said == [
        "data.deduplicate: 2 of 5 rows of data.train are dropped: f:4 equals f:1",
        "data.deduplicate: 1 of 5 rows of data.train are dropped: f:5 equals f:1",
    ]
    assert without_copies(given_rows[:3], tokens[:3], columns=False, say=said.append) == [0, 1, 2]
    assert said[-1] == "data.deduplicate: 0 of 3 rows of data.train are dropped"


def test_a_row_in_another_environment_is_no_copy() -> None:
    both = [replace(row, environment=name) for name in ("table", "doors") for row in rows("x", "x")]
    assert without_copies(both, ids("x", "x", "x", "x"), columns=True, say=str) == [0, 2]


# --- prompts that are too long ----------------------------------------------------------------------------------------


@given(st.text("ab", max_size=9), st.integers(1, 9), st.booleans(), st.booleans(), st.sampled_from(["left", "right"]))
def test_a_prompt_that_is_cut_keeps_its_special_tokens_and_one_end(
    text: str, limit: int, begins: bool, ends: bool, side: str
) -> None:
    whole = [0] * begins + [ord(c) for c in text] + [1] * ends
    if not whole:
        return
    ((_, found),) = fitting(
        rows("p"), [np.array(whole)], limit=limit, how=f"cut_{side}", special=[0, 1], what="data.train", say=str
    )
    assert len(found) == min(len(whole), limit)
    room = limit - begins - ends
    if len(whole) > limit and text and room >= 0:
        body = text[len(text) - room :] if side == "left" else text[:room]
        assert found.tolist() == [0] * begins + [ord(c) for c in body] + [1] * ends


def test_prompts_that_are_left_out_are_counted() -> None:
    said = list[str]()
    found = fitting(
        rows("abc", "abcdef", "ab", "abcde"),
        ids("abc", "abcdef", "ab", "abcde"),
        limit=4,
        how="skip",
        special=[],
        what="data.train",
        say=said.append,
    )
    assert [place for place, _ in found] == [0, 2]
    assert said == ["data.too_long: 2 of 4 prompts of data.train have more than 4 tokens and are left out, f:2 first"]
    with pytest.raises(DataError, match="data.eval: no prompt has at most 1 tokens: lower sampler.max_tokens"):
        fitting(rows("abc"), ids("abc"), limit=1, how="skip", special=[], what="data.eval", say=str)
    with pytest.raises(DataError, match="sampler.max_tokens leaves no token of the context to a prompt: lower it"):
        fitting(rows("abc"), ids("abc"), limit=-5, how="skip", special=[], what="data.eval", say=str)


# --- curricula --------------------------------------------------------------------------------------------------------


def test_difficulties_are_numbers_and_differ() -> None:
    def found(*values: object) -> list[float]:
        return difficulties(
            [Row("r", "x", meta={"a": {"b": value}}, where=f"f:{i}") for i, value in enumerate(values)], "a.b"
        )

    assert found(1, 2.5, "3") == [1.0, 2.5, 3.0]
    for wrong in (None, True, "easy", float("nan"), [1]):
        with pytest.raises(DataError, match=r"f:1: 'a.b' is .*, and data.curriculum.column needs a number"):
            found(1, wrong)
    with pytest.raises(
        ConfigError, match=r"data.curriculum.column = 'a.b' does nothing: every row has 2 there; name another column"
    ):
        found(2, "2")
    with pytest.raises(DataError, match=r"r: has no 'level' \(data.curriculum.column\)"):
        difficulties([Row("r", "x")], "level")


# --- overlap ----------------------------------------------------------------------------------------------------------

STORY = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"]


def story(*changes: int) -> str:
    return " ".join("changed" if i in changes else word for i, word in enumerate(STORY))


def test_held_out_prompts_overlap_if_equal_or_with_thirteen_words_in_a_row() -> None:
    train = rows("1 + 1", story(), "other words")
    held = rows("1 + 2", story(2), story(3), "Other, Words!", "1 + 1")

    found = overlap_of(train, ids(*(str(r.prompt) for r in train)), held, ids(*(str(r.prompt) for r in held)))
    assert FILTER_WORDS == 13
    assert found == ({4: 0}, {1: 1}), "story(2) has d … p; story(3) has twelve words in a row"
    assert overlap_of(train, ids("a", "b", "c"), held[2:4], ids("d", "e")) == ({}, {})


def test_case_and_marks_do_not_count_and_messages_are_read() -> None:
    talk = [{"role": "user", "content": story().upper().replace(" ", ", ")}]
    assert overlap_of(rows(story()), ids("a"), [Row("h", talk)], ids("b")) == ({}, {0: 0})


def test_words_that_many_training_rows_share_are_a_template() -> None:
    for copies, overlaps in ((COMMON, True), (COMMON + 1, False)):
        train = [f"{story()} {i}" for i in range(copies)]
        assert overlap_of(rows(*train), ids(*train), rows(story()), ids("x")) == ({}, {0: 0} if overlaps else {})


def test_words_in_a_row_are_of_one_row() -> None:
    train = [" ".join(STORY[:7]), " ".join(STORY[7:])]
    assert overlap_of(rows(*train), ids(*train), rows(story()), ids("x")) == ({}, {})


# --- data.where -------------------------------------------------------------------------------------------------------


def leveled(path: Path) -> str:
    levels = [1, 2, 2.0, "2", 3, None]
    rows = [{"prompt": f"p{i}", "extra": {"level": level}, "ok": i % 2 == 0} for i, level in enumerate(levels)]
    file = path / "leveled.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(
    ("where", "limit", "expected"),
    [
        ({}, None, [0, 1, 2, 3, 4, 5]),
        ({"extra.level": 2}, None, [1, 2, 3]),
        ({"extra.level": (1, 3)}, None, [0, 4]),
        ({"extra.level": (2, 3), "ok": True}, None, [2, 4]),
        ({"ok": False}, 2, [1, 3]),  # the limit counts rows that are used
    ],
)
def test_rows_are_chosen_by_their_columns(
    tmp_path: Path, where: dict[str, Any], limit: int | None, expected: list[int]
) -> None:
    said = list[str]()
    rows = load_rows(leveled(tmp_path), where=where, limit=limit, say=said.append)
    assert [row.prompt for row in rows] == [f"p{i}" for i in expected]
    if where:
        read = expected[-1] + 1 if limit else 6
        dropped = read - len(expected)
        assert said[-1].endswith(f": {len(expected)} rows are used, {dropped} of those that were read are not (where)")


def test_a_choice_that_leaves_no_row_is_told(tmp_path: Path) -> None:
    source = leveled(tmp_path)
    with pytest.raises(
        DataError, match=r"no rows with the values of data.where or data.eval_where: .*:1 has extra.level = 1"
    ):
        load_rows(source, where={"extra.level": 7})
    with pytest.raises(
        DataError, match=r":1: has no 'extra.levl' \(data.where or data.eval_where\); did you mean 'extra.level'"
    ):
        load_rows(source, where={"extra.levl": 7})
    with pytest.raises(ConfigError, match="builtin:arithmetic has none: drop them"):
        load_rows("builtin:arithmetic", where={"level": 7})
