"""The origin of groups is a pure function of seed and number, and known responses are checked line by line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.data import DataConfig
from slipstream.config.offpolicy import MixConfig
from slipstream.data.given import Limits, answers_of, read_trajectories
from slipstream.data.offpolicy import OffPolicy
from slipstream.data.prompts import Row, load_rows
from slipstream.data.tokenizers import load_tokenizer
from slipstream.errors import DataError
from slipstream.records import Prompt

GROUPS, UPDATES = 8, 200


def plan_of(seed: int = 0, first: int = 16, **mix: Any) -> OffPolicy:
    return OffPolicy(
        seed=seed,
        supervised="",
        first=first,
        mix=MixConfig(**mix),
        groups=GROUPS,
        updates=UPDATES,
        group=1,
    )


def counts(plan: OffPolicy) -> list[int]:
    start = plan.first
    return [sum(plan.source(start + u * GROUPS + i) == "data" for i in range(GROUPS)) for u in range(UPDATES)]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 1.0])
def test_every_update_has_the_share_rounded_down_or_up_and_all_have_it_on_average(share: float) -> None:
    found = counts(plan_of(share=share))
    assert set(found) <= {int(share * GROUPS), int(share * GROUPS) + 1}
    # a number that is rounded by chance has a variance of at most 1/4: three standard errors of the mean
    assert np.mean(found) == pytest.approx(share * GROUPS, abs=3 * 0.5 / UPDATES**0.5)


def test_the_share_changes_linearly_and_then_stays() -> None:
    mix = MixConfig(share=0.8, final=0.2, over=4)
    assert [round(mix.share_at(update, 100), 9) for update in range(6)] == [0.8, 0.65, 0.5, 0.35, 0.2, 0.2]
    whole = MixConfig(share=1.0, final=0.0)
    assert [round(whole.share_at(update, 5), 9) for update in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert counts(plan_of(share=1.0, final=0.0, over=UPDATES - 1))[0] == GROUPS
    assert counts(plan_of(share=1.0, final=0.0, over=UPDATES - 1))[-1] == 0


def test_the_origin_depends_on_seed_and_number_only() -> None:
    numbers = range(16, 16 + GROUPS * 20)
    one = [plan_of(share=0.5).source(number) for number in numbers]
    assert one == [plan_of(share=0.5).source(number) for number in reversed(numbers)][::-1]
    assert one != [plan_of(seed=1, share=0.5).source(number) for number in numbers]
    assert {plan_of(share=1.0).source(number) for number in range(16)} == {""}, "before, all is supervised"


# --- trajectories -----------------------------------------------------------------------------------------------------

ROWS = [Row(id=name, prompt="x") for name in ("a", "b")]
LIMITS = Limits(vocabulary=10, longest=4, stops={0})
GOOD = {"prompt": "a", "tokens": [3, 9, 0], "logp": [-0.1, 0.0, -20.5]}


def write(path: Path, *entries: Any) -> str:
    file = path / "given.jsonl"
    lines = [each if isinstance(each, str | bytes) else json.dumps(each) for each in entries]
    file.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return str(file)


def test_trajectories_are_read_in_their_order(tmp_path: Path) -> None:
    long = {"prompt": "b", "tokens": [1, 2, 3, 4], "logp": [-1, -2, -3, -4]}
    path = write(tmp_path, GOOD, "", long, GOOD | {"tokens": [5, 5, 0]}, long)
    found = read_trajectories(path, ROWS, LIMITS, least=2, drawn=True)
    assert [[given.tokens.tolist() for given in found[row]] for row in (0, 1)] == [
        [[3, 9, 0], [5, 5, 0]],
        [[1, 2, 3, 4], [1, 2, 3, 4]],
    ]
    assert [given.finish for given in (found[0][0], found[1][0])] == ["eos", "length"]
    np.testing.assert_array_equal(found[0][0].logp, np.array([-0.1, 0.0, -20.5], np.float32))


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("{", "not a JSON object on one line"),
        (b'{"prompt": "\xff"}', "not UTF-8 (byte 0xff): save it with this encoding"),
        ([1], "expected an object such as"),
        ({"prompt": "a", "tokens": [1]}, "expected an object such as"),
        (GOOD | {"logp": None}, "expected an object such as"),
        (GOOD | {"prompt": "c"}, "no row of the data has the id 'c'"),
        (GOOD | {"tokens": []}, "tokens and logp must be lists, and not empty"),
        (GOOD | {"logp": "x"}, "tokens and logp must be lists, and not empty"),
        (GOOD | {"logp": [-1.0]}, "3 tokens and 1 log-probs: each token needs one"),
        (GOOD | {"tokens": [1, 10, 0]}, "token 10 at position 1 is no id below 10"),
        (GOOD | {"tokens": [1, -1, 0]}, "token -1 at position 1 is no id below 10"),
        (GOOD | {"tokens": [1.0, 1, 0]}, "token 1.0 at position 0 is no id below 10"),
        (GOOD | {"tokens": [0, 1, 0]}, "token 0 at position 0 is an end token, and others follow"),
        (GOOD | {"tokens": [1, 2, 3]}, "ends without an end token after 3 tokens, fewer than sampler.max_tokens"),
        (GOOD | {"tokens": [1] * 5, "logp": [-1] * 5}, "5 tokens are more than sampler.max_tokens = 4"),
        (GOOD | {"logp": [-1, 0.1, -1]}, "log-prob 0.1 at position 1 is no usable number of at most 0"),
        (GOOD | {"logp": [-1, -9999, -1]}, "log-prob -9999 at position 1 is no usable number of at most 0"),
        (GOOD | {"logp": [None, -1, -1]}, "log-prob None at position 0 is no usable number of at most 0"),
        ('{"prompt": "a", "tokens": [3, 0], "logp": [NaN, -1]}', "log-prob nan at position 0 is no usable number"),
        ('{"prompt": "a", "tokens": [3, 0], "logp": [-Infinity, -1]}', "log-prob -inf at position 0 is no usable"),
    ],
)
def test_a_wrong_trajectory_is_found_at_its_line(entry: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_trajectories(write(tmp_path, GOOD, "", entry), ROWS, LIMITS, least=1, drawn=True)
    assert f"given.jsonl:3: {fault}" in str(error.value)


@pytest.mark.parametrize("name", ["given", "a folder", "rows.csv", "nobody.jsonl", "."])
def test_a_file_that_holds_no_trajectories_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,tokens")
    (tmp_path / "a folder").mkdir()
    (tmp_path / "given").write_text(json.dumps(GOOD))
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path / name))}: (the name of a file|cannot be read)"):
        read_trajectories(str(tmp_path / name), ROWS, LIMITS, least=1, drawn=True)


def test_every_prompt_needs_a_trajectory_for_each_member_of_its_group(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 0 trajectories of prompt 'b', and every prompt needs 1"):
        read_trajectories(write(tmp_path, GOOD), ROWS, LIMITS, least=1, drawn=True)


def test_responses_to_supervise_on_need_no_log_probs_and_may_be_fewer_than_a_group(tmp_path: Path) -> None:
    entries = [
        {"prompt": "a", "tokens": [3, 0]},
        GOOD | {"prompt": "b"},
        {"prompt": "b", "tokens": [4, 0], "logp": None},
    ]
    found = read_trajectories(write(tmp_path, *entries), ROWS, LIMITS, least=1, drawn=False)
    assert [np.isnan(given.logp).all() for row in (0, 1) for given in found[row]] == [True, False, True]
    with pytest.raises(DataError, match=r"given.jsonl:1: token 10 at position 0 is no id below 10"):
        read_trajectories(write(tmp_path, {"prompt": "a", "tokens": [10]}), ROWS, LIMITS, least=1, drawn=False)
    plan = replace(plan_of(), supervised="file", group=2, lessons=found, trajectories={0: (), 1: ()})
    prompt = Prompt(id="b", number=0, tokens=np.ones(1, np.int32), source="file", supervised=True)
    assert [len(plan.responses(prompt, row, epoch)) for row in (0, 1) for epoch in (0, 1)] == [1, 1, 2, 2]
    assert plan.digest and plan.digest != replace(plan, lessons={0: found[0]}).digest


# --- answers of the data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "settings", "response"),
    [
        ({"question": "q", "answer": "so 3 + 4\n#### 7"}, {}, "so 3 + 4\n#### 7"),
        ({"prompt": "q", "answer": "7"}, {}, "7"),
        ({"prompt": "q", "answer": ["7", "seven"]}, {}, "7"),
        ({"prompt": "q", "answer": 7, "text": "it is 7"}, {"response": "text"}, "it is 7"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}]}, {}, "a b"),
        ({"prompt": "q", "completion": [{"role": "assistant", "content": "done"}]}, {}, "done"),
        ({"prompt": "q"}, {}, None),
    ],
)
def test_the_response_is_the_whole_text_of_the_answer(
    row: dict[str, Any], settings: dict[str, Any], response: str | None, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = load_rows(str(tmp_path / "rows.jsonl"), DataConfig(**settings))
    assert found.response == response


def test_answers_end_with_the_end_token_or_are_cut() -> None:
    tokenizer = load_tokenizer("builtin:student")
    rows = [Row(id=str(i), prompt="x", response=text, where=f"rows:{i}") for i, text in enumerate(("A1", "A1B2C3"))]
    end = tokenizer.eos_token_id
    limits = Limits(vocabulary=39, longest=4, stops={end})
    short, cut = answers_of(rows, tokenizer, end=end, limits=limits)
    plain = tokenizer("A1B2C3", add_special_tokens=False)["input_ids"]
    assert short.tokens.tolist() == [*plain[:2], tokenizer.eos_token_id] and short.finish == "eos"
    assert cut.tokens.tolist() == plain[:4] and cut.finish == "length"
    assert np.isnan(short.logp).all() and short.logp.shape == short.tokens.shape
    with pytest.raises(DataError, match="rows:9: has no answer in text"):
        answers_of([*rows, Row(id="9", prompt="x", where="rows:9")], tokenizer, end=0, limits=limits)
    written = replace(rows[0], response=f"A1{tokenizer.eos_token}")
    assert answers_of([written], tokenizer, end=end, limits=limits)[0].tokens.tolist() == short.tokens.tolist()
    early = replace(rows[0], response=f"A{tokenizer.eos_token}1")
    with pytest.raises(DataError, match=f"rows:0: the answer has the end token {end} before its end"):
        answers_of([early], tokenizer, end=end, limits=limits)
    odd = Row(id="9", prompt="x", response="ä", where="rows:9")
    with pytest.raises(DataError, match="rows:9: builtin:student cannot encode this answer"):
        answers_of([*rows, odd], tokenizer, end=0, limits=limits)
