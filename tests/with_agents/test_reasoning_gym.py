"""reasoning-gym, unmodified: its tasks are rows, its scorers the reward, its curricula columns, and a run learns."""

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.config.schema import Config
from slipstream.data.prompts import Row, load_rows
from slipstream.errors import DataError
from slipstream.grades import Ungraded
from slipstream.plan.prompts import graded_rows
from slipstream.rewards.functions import Answer
from slipstream.rewards.grading import GradingProcess
from slipstream.run_dir.writing import read_lines

pytestmark = pytest.mark.usefixtures("packages")
TASKS = (
    "chain_sum",
    "leg_counting",
    "countdown",
    "knights_knaves",
    "gsm_symbolic",
    "graph_color",
    "isomorphic_strings",
)


BY_LEVEL = {"column": "level"}


def graded(row: Row, *texts: str) -> list[Any]:
    process = GradingProcess(["reasoning_gym"], timeout=20.0)
    given: dict[str, Any] = {"prompt": str(row.prompt), "ground_truth": row.ground_truth, "meta": row.meta}
    given |= {"messages": [], "tokens": [], "data_source": row.data_source, "finish": "eos", "outcome": {}}
    answers = [Answer(text=text, **given) for text in texts]
    try:
        return [each if isinstance(each, Ungraded) else each["reasoning_gym"] for each in process.grades(answers)]
    finally:
        process.close()


def test_questions_come_from_their_number_and_splits_share_none() -> None:
    name = f"reasoning_gym:{','.join(TASKS)}"
    rows, held_out = (load_rows(name, split=split, limit=140) for split in ("train", "eval"))
    assert Counter(row.data_source for row in rows) == dict.fromkeys(TASKS, 20)
    assert rows == load_rows(name, limit=140) and not {str(row.prompt) for row in rows} & {
        str(row.prompt) for row in held_out
    }
    assert rows[8].id == "leg_counting:train:1" and rows[8].prompt == rows[8].meta["reasoning_gym"]["question"]


def test_tasks_share_the_rows_by_their_weights_and_levels_are_a_column() -> None:
    rows = load_rows("reasoning_gym:chain_sum@0-2=3, leg_counting=1", limit=80)
    assert Counter(row.data_source for row in rows) == {"chain_sum": 60, "leg_counting": 20}
    sums = [row for row in rows if row.data_source == "chain_sum"]
    assert Counter(row.meta["level"] for row in sums) == {0: 20, 1: 20, 2: 20}
    terms = [{len(re.findall(r"\d+", str(row.prompt))) for row in sums if row.meta["level"] == n} for n in range(3)]
    assert [max(each) for each in terms] == [2, 3, 4] and all(min(each) == 2 for each in terms)


def test_the_scorer_of_the_task_grades_what_is_in_the_tags_or_the_whole_text() -> None:
    for row in load_rows(f"reasoning_gym:{','.join(TASKS)}", limit=len(TASKS)):
        if row.ground_truth is not None:
            assert graded(
                row, row.ground_truth, f"So <answer>0</answer>, no: <answer> {row.ground_truth}\n</answer>"
            ) == [1, 1]
        assert graded(row, "no idea") == [pytest.approx(0, abs=0.1)]
    (row,) = load_rows("reasoning_gym:graph_color", limit=1)
    graph = ast.literal_eval(row.meta["reasoning_gym"]["metadata"])["possible_answer"]
    coloured = str({str(place): colour for place, colour in graph.items()}).replace("'", '"')
    assert row.ground_truth is None and graded(row, coloured) == [1.0]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("chainsum", "there is no task 'chainsum'; did you mean 'chain_sum'?"),
        ("chain_sum,", "'' is no task: write, for example, chain_sum, chain_sum=2 (weight) or chain_sum@0-3 (levels)"),
        ("chain_sum=0", "'chain_sum=0' is no task"),
        ("acre@1", "'acre@1': the task has no levels"),
        ("chain_sum@3-1", "'chain_sum@3-1': the first level is above the last"),
        ("chain_sum@0-99", "chain_sum has the levels 0 to 10, and no level 11"),
    ],
)
def test_a_name_that_is_no_task_is_one_line(name: str, line: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"reasoning_gym:{name}: {line}")):
        load_rows(f"reasoning_gym:{name}", limit=3)


def test_another_split_and_rows_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no split 'test'; known: eval, train"):
        load_rows("reasoning_gym:chain_sum", split="test")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    with pytest.raises(DataError, match=r":1: the reward 'reasoning_gym' is for the rows of reasoning_gym:NAME"):
        graded_rows(load_rows(str(tmp_path / "rows.jsonl")), ["reasoning_gym"])


def test_a_run_learns_from_its_rewards_in_the_order_of_its_levels(tmp_path: Path, models: Path) -> None:
    config = Config(
        student=str(models / "student"),
        teachers={},
        loss={"kind": "reverse_kl_mc", "weight": 0.0},
        policy={"loss": "vanilla"},
        data={"train": "reasoning_gym:letter_counting@0-2", "limit": 60, "order": "curriculum", "curriculum": BY_LEVEL},
        task={"reward": "reasoning_gym"},
        sampler={"max_tokens": 12, "group": 4},
        learner={"batch_size": 8, "lr": 1e-3},
        runtime={"kind": "inline", "device": "cpu"},
        output=str(tmp_path / "run"),
        updates=2,
    )  # fmt: skip
    slipstream.train(config, quiet=True)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert len(lines) == 2 and all(0 <= line["reward/reasoning_gym"] <= 1 for line in lines)
    levels = {row.id: row.meta["level"] for row in load_rows("reasoning_gym:letter_counting@0-2", limit=60)}
    told = [line for line in read_lines(tmp_path / "run" / "ledger.jsonl") if "prompt" in line]
    assert told and {levels[line["prompt"]] for line in told} == {0}
