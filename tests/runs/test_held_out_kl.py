"""Evaluations of a run without rewards: the reverse KL to the teacher on held-out prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.commands.report import report
from slipstream.data.prompts import load_rows
from slipstream.run_dir.writing import read_lines


def trained(path: Path, teachers: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    config: dict[str, Any] = {
        "student": "builtin:student",
        "updates": 4,
        "output": str(path / "run"),
        "data": {"eval": "builtin:arithmetic"},
        "teachers": teachers,
        "sampler": {"max_tokens": 24},
        "learner": {"batch_size": 8, "lr": 3e-3},
        "schedule": {"kind": "sync"},
        "eval": {"every": 2, "prompts": 8, "n": 2},
        "runtime": {"kind": "inline", "device": "cpu"},
        **more,
    }
    slipstream.train(config, quiet=True, checks=False)
    return [line for line in read_lines(path / "run" / "metrics.jsonl") if line["kind"] == "eval"]


@pytest.mark.parametrize(
    "loss",
    [{"kind": "reverse_kl_mc", "m": 4}, {"kind": "forward_kl", "k": 8}, {"kind": "reverse_kl_topk", "k": 4},
     {"kind": "reverse_kl", "cache": "hidden"}],
    ids=lambda loss: loss["kind"],
)  # fmt: skip
def test_it_is_measured_for_every_kind_of_scores(tmp_path: Path, loss: dict[str, Any]) -> None:
    lines = trained(tmp_path, {"main": {"model": "builtin:teacher"}}, loss=loss)
    assert [(line["update"], line["samples"], "accuracy" in line) for line in lines] == [
        (update, 16, False) for update in (0, 2, 4)
    ]
    assert all(line["kl"] > 0.3 and 0 < line["kl_error"] < line["kl"] for line in lines)
    kept = {(line["update"], round(line["kl"], 9)) for line in lines}
    assert len({kl for _, kl in kept}) == 3, "three different students"


def test_the_kl_of_a_student_to_itself_is_zero_and_grows_with_training(tmp_path: Path) -> None:
    teachers = {
        "own": {"model": "builtin:student", "key": "own"},
        "other": {"model": "builtin:teacher", "key": "other"},
    }
    prompts = [row.prompt for row in load_rows("builtin:arithmetic", limit=40)]
    for name, own in (("train", 1), ("held_out", 40)):
        rows = [{"prompt": each, "data_source": "own" if i < own else "other"} for i, each in enumerate(prompts)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "train": str(tmp_path / "train.jsonl"),
        "eval": str(tmp_path / "held_out.jsonl"),
        "teacher_key": "data_source",
    }
    begin, *_, end = trained(tmp_path, teachers, data=data, loss={"kind": "reverse_kl_mc", "m": 4})
    assert begin["kl"] == pytest.approx(0, abs=1e-5), "all held-out prompts are scored by the student's own weights"
    assert end["kl"] > 1e-3


def test_a_report_shows_it(tmp_path: Path) -> None:
    lines = trained(tmp_path, {"main": {"model": "builtin:teacher"}})
    page = report([tmp_path / "run"], None).read_text()
    assert "Held-out KL to the teacher against updates" in page and "held-out KL to the teacher" in page
    assert f"{lines[-1]['kl']:.3g}" in page
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "KL to the teacher |" in card and f"{lines[-1]['kl']:.4g}" in card
