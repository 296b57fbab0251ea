"""Runs with a teacher of another tokenizer. Its twin has the student's tokenizer and gives every text the same scores.

So a run with either must have the same losses, as long as every token is written alike.
"""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.config.file import parse
from slipstream.run_dir.writing import read_lines
from slipstream.runs import start as launch
from support.other_spelling import permuted
from support.slow_cases import with_slow

CONFIGS = Path(__file__).parents[2] / "configs"
SHORT: dict[str, Any] = {
    "updates": 2,
    "learner": {"batch_size": 8, "lr": 1e-3},
    "runtime": {"kind": "inline", "device": "cpu"},
    "schedule": {"kind": "sync"},
}
EPISODES: dict[str, Any] = {
    "student": "builtin:tool_student",
    "data": {"train": "builtin:table", "limit": 40},
    "environment": {"use": "table", "calls": 10, "turns": 12},
    "sampler": {"max_tokens": 96, "group": 2},
}
ANSWERS: dict[str, Any] = {
    "student": "builtin:student",
    "data": {"train": "builtin:arithmetic", "limit": 40},
    "sampler": {"max_tokens": 60, "group": 1},
}


def lines_of(tree: dict[str, Any], model: str, path: Path, **teacher: Any) -> list[dict[str, Any]]:
    config = parse(SHORT | tree | {"teachers": {"main": {"model": model, **teacher}}, "output": str(path)}, say=str)
    launch.train(config, Console(quiet=True), name="run")
    return [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]


CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "episodes": (EPISODES | {"loss": {"m": 1}}, "builtin:tool_teacher", {}),
    "answers of the data": (ANSWERS | {"loss": {"kind": "gold"}, "mix": {}}, "builtin:teacher", {}),
    "supervised on distributions, then on the log-probs of spans": (
        ANSWERS | {"loss": {"m": 1}, "sft": {"updates": 1, "loss": {"kind": "gold"}}},
        "builtin:teacher",
        {},
    ),
    "supervised on one span each, then on merged spans": (
        ANSWERS | {"loss": {"kind": "gold_merged"}, "sft": {"updates": 1, "loss": {"kind": "uld"}}},
        "builtin:teacher",
        {},
    ),
    "supervised alone": (
        ANSWERS | {"loss": {"weight": 0}, "sft": {"updates": 2, "loss": {"kind": "common_topk"}}},
        "builtin:teacher",
        {},
    ),
    "the teacher's most likely tokens": (
        ANSWERS | {"loss": {"kind": "common_topk", "cache": "teacher_topk", "k": 8, "beta": 0.5}},
        "builtin:teacher",
        {},
    ),
    "begun answers": (ANSWERS | {"loss": {"m": 1}, "mix": {"prefix": 0.9, "share": 1.0}}, "builtin:teacher", {}),
}


LOSSES: list[dict[str, Any]] = [{"m": 1}, {"kind": "gold"}, {"kind": "uld"}, {"kind": "common_topk"}]


QUICK = ["answers of the data", "supervised on one span each, then on merged spans", "begun answers"]


@pytest.mark.parametrize("name", with_slow(CASES, quick=QUICK))
def test_a_run_has_the_losses_of_its_twin(name: str, tmp_path: Path) -> None:
    tree, teacher, more = CASES[name]
    other = permuted(teacher, tmp_path / "other")
    ours = lines_of(tree, teacher, tmp_path / "ours", **more)
    theirs = lines_of(tree, str(other), tmp_path / "theirs", spelling="own", **more)
    for one, two in zip(ours, theirs, strict=True):
        assert one.get("sft") == (None if "sft" not in tree else float(one["update"] <= tree["sft"]["updates"]))
        measured = () if one.get("sft") else ("teacher/kl",)
        for key in ("distill/loss", "grad_norm", *measured):
            assert two[key] == pytest.approx(one[key], rel=1e-4), key
        assert two["failed_samples"] == 0


@pytest.mark.parametrize("loss", [*LOSSES, {"kind": "common_topk", "cache": "teacher_topk"}], ids=str)
def test_the_teacher_may_have_fewer_tokens_than_the_student(loss: dict[str, Any], tmp_path: Path) -> None:
    """The student writes two digits as one token, the teacher each digit: 139 tokens and 39."""
    tree = ANSWERS | {"student": "builtin:pair_teacher", "loss": loss}
    for line in lines_of(tree, "builtin:teacher", tmp_path / "run", spelling="own"):
        assert line["grad_norm"] > 0 and line["failed_samples"] == 0 and line["spelling/unwritten"] == 0
        assert line["teacher/floored"] == 0
        if loss.get("cache") == "teacher_topk":  # as many as the teacher has
            assert line["spelling/unpaired"] > 0
            for mass in ("distill/teacher_mass", "distill/student_mass"):
                assert line[f"{mass}_min"] <= line[mass] <= line[f"{mass}_max"]
            assert line["distill/teacher_mass"] == pytest.approx(1, abs=1e-3)


def test_supervised_updates_end_once_the_student_knows_the_teachers_tokens(tmp_path: Path) -> None:
    """Its mass is a mean over the tokens that are compared, so that those left out do not keep it low."""
    loss = {"kind": "common_topk", "cache": "teacher_topk", "k": 39}
    tree = ANSWERS | {"student": "builtin:pair_teacher", "loss": loss}
    tree |= {"sft": {"updates": 4, "until": 0.5, "loss": loss}, "updates": 5}
    lines = lines_of(tree, "builtin:teacher", tmp_path / "run", spelling="own")
    assert lines[0]["spelling/unpaired"] > 0 and [line.get("sft", 0.0) for line in lines][:2] == [1.0, 0.0]


def test_answers_of_one_open_token_teach_nothing_and_end_no_run(tmp_path: Path) -> None:
    """Every answer is one token without an end, so that its only span is open."""
    other = permuted("builtin:teacher", tmp_path / "other")
    tree = ANSWERS | {"loss": {"m": 1}, "sampler": {"max_tokens": 1}}
    lines = lines_of(tree, str(other), tmp_path / "run", spelling="own")
    assert len(lines) == 2
    for line in lines:
        assert line["spelling/open"] > 0 and line["failed_samples"] == 0


@pytest.mark.parametrize("section", [{"sft": {"source": "teacher", "updates": 1}}, {"mix": {"source": "teacher"}}])
def test_answers_of_the_teacher_train_the_student(section: dict[str, Any], tmp_path: Path) -> None:
    other = permuted("builtin:teacher", tmp_path / "other")
    tree = ANSWERS | {"loss": {"kind": "gold"}} | section
    lines = lines_of(tree, str(other), tmp_path / "run", spelling="own")
    for line in lines:
        assert line["grad_norm"] > 0 and line["failed_samples"] == 0
    assert lines[0].get("off_policy/teacher", 1.0) > 0
    if "sft" in section:  # a student that reads the ids of the teacher as its own would have a loss above 4
        assert lines[0]["sft"] == 1 and lines[0]["distill/loss"] < 2
