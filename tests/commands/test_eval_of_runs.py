"""`slipstream eval` of a run measures what the run itself measures: its sources, prompts, splits and end tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.cli import main
from slipstream.data.arithmetic import problems
from slipstream.run_dir.writing import read_lines

GRADES = """
def graded(text, data_source):
    return float(data_source in ("math", "code"))


def one(text):
    return 1.0
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grades.py").write_text(GRADES)
    for name, split, count in (("math", "train", 8), ("code", "eval", 6)):
        rows = [{"prompt": question, "answer": answer} for question, answer in problems(split, count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained(**more: Any) -> list[dict[str, Any]]:
    config: dict[str, Any] = {
        "student": "builtin:student",
        "updates": 1,
        "output": "run",
        "data": {"train": "math.jsonl"},
        "teachers": {"main": {"model": "builtin:teacher"}},
        "sampler": {"max_tokens": 12},
        "learner": {"batch_size": 4},
        "loss": {"kind": "reverse_kl_mc", "m": 2},
        "schedule": {"kind": "sync"},
        "task": {"reward": "./grades.py:graded"},
        "runtime": {"kind": "inline", "device": "cpu"},
        **more,
    }
    slipstream.train(config, quiet=True, checks=False)
    return [line for line in read_lines(Path("run") / "metrics.jsonl") if line["kind"] == "eval"]


def measured(capsys: pytest.CaptureFixture[str], *words: str, model: str = "run") -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", model, "--json", "-n", "1", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rewards_see_the_name_of_a_held_out_set_as_that_of_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    sources = {"math": "math.jsonl", "code": "code.jsonl"}
    lines = trained(data={"train": sources, "eval": sources}, eval={"every": 1, "prompts": 4})
    assert [line["accuracy"] for line in lines] == [1.0] * 4
    assert [line["avg@1"] for line in measured(capsys)] == [1.0, 1.0]


def test_prompts_that_a_run_leaves_out_as_too_long_are_left_out_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path("math.jsonl").read_text()
    Path("math.jsonl").write_text(rows + json.dumps({"prompt": "A1" * 75 + "=", "answer": "1"}) + "\n")
    data = {"train": "math.jsonl", "eval": "math.jsonl", "too_long": "skip"}
    sampler = {"max_tokens": 12, "max_length": 60}
    lines = trained(data=data, eval={"every": 1, "prompts": 9}, task={"reward": "./grades.py:one"}, sampler=sampler)
    (line,) = measured(capsys)
    assert lines[0]["samples"] == line["prompts"] == 8
    (line,) = measured(capsys, "--max-tokens", "40")
    assert line["prompts"] == 8, "the length that is set for the run's own answers drops none of longer ones"


def test_other_data_have_no_setting_of_training_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    trained(data={"train": "math.jsonl", "limit": 4}, task={"reward": "./grades.py:one"})
    assert measured(capsys)[0]["prompts"] == 4, "the run's own training prompts"
    assert measured(capsys, "--data", "code.jsonl")[0]["prompts"] == 6
    (line,) = measured(capsys, "--data", "builtin:arithmetic", "--limit", "7")
    assert line["split"] == "eval" and line["prompts"] == 7


def test_an_adapter_ends_where_its_whole_student_ends(capsys: pytest.CaptureFixture[str]) -> None:
    trained(
        data={"train": "math.jsonl", "eval": "math.jsonl"},
        eval={"every": 1, "prompts": 8},
        sampler={"max_tokens": 30, "stop": ["7"]},
        learner={"batch_size": 4, "lora": {"rank": 2}},
        task={"reward": "exact"},
    )
    (whole,), (adapter,) = measured(capsys), measured(capsys, model="run/final/adapter")
    names = "avg@1", "greedy", "length", "tokens", "truncated"
    assert [whole[name] for name in names] == [adapter[name] for name in names]
