"""Held-out prompts whose environment or teacher fails: evaluations leave them out, and runs go on."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.cli import main
from slipstream.commands.evaluate import Measured
from slipstream.errors import EngineError
from slipstream.pipeline import evaluate
from slipstream.run_dir.writing import read_lines

SHOP = """
class Shop:
    def start(self, meta):
        if meta.get("bad"):
            raise ValueError("this row is broken")

    def step(self, reply):
        return None


def one(text):
    return 1.0
"""
CONTEXT = """
def shown(prompt, ground_truth):
    if ground_truth == "7":
        raise ValueError("there is no hint")
    return prompt
"""
BASE: dict[str, Any] = {
    "updates": 2,
    "sampler": {"max_tokens": 8},
    "learner": {"batch_size": 4},
    "schedule": {"kind": "sync"},
    "eval": {"every": 1, "prompts": 8},
    "runtime": {"kind": "inline", "device": "cpu"},
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(SHOP)
    Path("context.py").write_text(CONTEXT)


def write(name: str, bad: list[int]) -> None:
    rows = [{"prompt": f"A{i}B{i}=", "answer": "7" if i in bad else "1", "bad": i in bad} for i in range(8)]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_environment(bad: list[int]) -> dict[str, Any]:
    write("train.jsonl", [])
    write("eval.jsonl", bad)
    return BASE | {
        "student": "builtin:tool_student",
        "teachers": {"main": {"model": "builtin:tool_teacher"}},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "chat": True},
        "environment": {"use": "./shop.py:Shop"},
        "task": {"reward": "./shop.py:one"},
        "output": "run",
    }


def evaluations(run: str = "run") -> list[dict[str, Any]]:
    return [line for line in read_lines(Path(run) / "metrics.jsonl") if line["kind"] == "eval"]


def test_an_answer_that_its_environment_ruins_is_left_out_and_not_counted_as_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slipstream.train(with_environment([3]))
    said = capsys.readouterr().out
    assert [(line["update"], line["accuracy"], line["samples"]) for line in evaluations()] == [
        (update, 1.0, 7) for update in range(3)
    ]
    why = "1 of 8 answers are missing and left out, one of them because start raised ValueError"
    assert said.count(why) == 3
    assert main(["eval", "run", "--json", "-n", "2", "-k", "2"]) == 0
    said, noted = capsys.readouterr()
    (line,) = map(json.loads, said.splitlines())
    assert (line["prompts"], line["avg@2"], line["pass@2"], line["greedy"]) == (7, 1.0, 1.0, 1.0)
    assert (
        "3 answers are missing and left out, one of them because start raised ValueError: this row is broken" in noted
    )


def test_an_evaluation_keeps_no_records_which_each_hold_a_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, summary = list[Any](), evaluate.summary

    def watched(groups: Any, reward: str) -> Any:
        seen.extend(handle.body for group in groups for handle in group)
        return summary(groups, reward)

    monkeypatch.setattr(evaluate, "summary", watched)
    slipstream.train(with_environment([]))
    assert seen == [None] * 3 * 8


def test_a_probability_of_several_answers_is_unknown_if_one_of_each_prompt_failed() -> None:
    measured = Measured(0.0, [[1.0], [0.0, 1.0]], [], Counter(), ["crash"], {}, 1.0, 1)
    assert measured.passed(2) == [1.0] and measured.passed(3) == []


def test_a_run_whose_model_card_cannot_be_written_saves_its_student(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> str:
        raise KeyError("license")

    monkeypatch.setattr("slipstream.pipeline.run.card", broken)
    slipstream.train(with_environment([]))
    assert (Path("run") / "final" / "model.safetensors").exists()
    assert not (Path("run") / "final" / "README.md").exists()
    assert "the final student has no model card: KeyError: 'license'" in capsys.readouterr().out


def test_a_set_without_any_answer_has_no_line_and_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    slipstream.train(with_environment([*range(8)]))
    assert evaluations() == []
    assert "8 of 8 answers are missing" in capsys.readouterr().out
    assert main(["eval", "run", "--json"]) == 2
    assert "no prompt has an answer that counts: start raised ValueError: this row is broken" in capsys.readouterr().err
    write("healthy.jsonl", [])
    assert main(["eval", "run", "--json", "--data", "broken=eval.jsonl", "healthy=healthy.jsonl"]) == 2
    said, noted = capsys.readouterr()
    assert [json.loads(line)["set"] for line in said.splitlines()] == ["healthy"]
    assert "error: no prompt of broken has an answer that counts: start raised ValueError: this row is broken" in noted
    assert len(list(read_lines(Path("run") / "eval.jsonl"))) == 1


def test_an_evaluation_whose_episodes_all_fail_fifteen_times_in_a_row_ends_the_run() -> None:
    tree = with_environment([])
    rows = [{"prompt": f"A{i}B{i}=", "answer": "1", "bad": True} for i in range(16)]
    Path("eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(EngineError, match="failed at the last 15 tries, and none succeeded: start raised ValueError"):
        slipstream.train(tree | {"eval": {"every": 1, "prompts": 16}})


def test_an_answer_that_no_teacher_can_score_is_left_out_of_the_kl(capsys: pytest.CaptureFixture[str]) -> None:
    write("train.jsonl", [])
    write("eval.jsonl", [2, 5])
    slipstream.train(
        BASE
        | {
            "student": "builtin:reader",
            "teachers": {"self": {"model": "self", "context": "./context.py:shown", "max_length": 100}},
            "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
            "output": "run",
        }
    )
    assert [line["samples"] for line in evaluations()] == [6] * 3
    assert "2 of 8 answers are missing" in capsys.readouterr().out


def test_the_held_out_kl_is_of_the_student_alone_where_a_teacher_replaces_its_draws() -> None:
    measured = []
    for replaces in (0, 1):
        config = BASE | {
            "student": "builtin:student",
            "teachers": {"main": {"model": "builtin:teacher"}},
            "data": {"train": "builtin:arithmetic", "eval": "builtin:arithmetic"},
            "sampler": {"max_tokens": 8, "teacher_replaces": replaces},
            "loss": {"kind": "forward_kl"},
            "updates": 1,
        }
        slipstream.train(config | {"output": f"run-{replaces}"}, quiet=True)
        measured.append(evaluations(f"run-{replaces}")[0]["kl"])
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)
