"""`slipstream eval --suite`: lm-evaluation-harness as it comes, with a task of local data."""

import json
import math
import os
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from dictation import PYTHON, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.cli import main
from slipstream.models.resolve import model_path

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
CONFIG = """
student = "builtin:student"
updates = 1
output = "run"
[teachers.main]
model = "builtin:teacher"
[sampler]
max_tokens = 6
[learner]
batch_size = 4
[runtime]
kind = "inline"
device = "cpu"
"""
CALL = "import sys; from slipstream.cli import main; sys.exit(main())"
SUITE = ["--suite", "sums", "--suite-path", "tasks"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Questions of the built-in task, each with the right answer and one that is wrong at its end."""
    monkeypatch.chdir(tmp_path)
    asked = []
    for n in range(12):
        first, second = n % 10, (7 * n + 3) % 10
        right, wrong = (f"A{first}{first}B{second}{(first + second + more) % 10}" for more in (0, 1 + n % 3))
        both = [right, wrong] if n % 2 else [wrong, right]
        asked.append({"question": f"A{first}B{second}=", "choices": both, "label": both.index(right)})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    Path("tasks").mkdir()
    for name in ("sums", "other_sums"):
        Path(f"tasks/{name}.yaml").write_text(TASK.format(name=name, data=tmp_path / "rows.jsonl"))
    return asked


def accuracy(model: str, rows: list[dict[str, Any]]) -> float:
    """Return the share of questions whose right choice has the larger log-prob."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)

    def log_prob(question: str, choice: str) -> float:
        ids = tokenizer(question + choice, return_tensors="pt").input_ids
        with torch.no_grad():
            logp = lm(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        return float(logp[-len(tokenizer(choice).input_ids) :].sum())

    best = [max(range(2), key=lambda n: log_prob(row["question"], row["choices"][n])) for row in rows]
    return fmean(choice == row["label"] for choice, row in zip(best, rows, strict=True))


def command(*words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    there = {"PYTHONPATH": str(ROOT / "src"), "HF_DATASETS_CACHE": str(Path.cwd() / "cache"), "HF_HUB_OFFLINE": "1"}
    given = [PYTHON, "-W", "ignore", "-c", CALL, *words]
    done = subprocess.run(given, capture_output=True, text=True, timeout=280, env=os.environ | there)
    assert done.returncode == status, done.stderr
    return done


def scores(*words: str) -> list[dict[str, Any]]:
    said = command("eval", *words, "--json").stdout
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_a_task_is_scored_with_its_standard_error(rows: list[dict[str, Any]]) -> None:
    (line,) = scores("builtin:student", *SUITE)
    right = accuracy(model_path("builtin:student"), rows)
    assert (line["suite"], line["prompts"], line["acc"]) == ("sums", 12, pytest.approx(right))
    assert line["acc/error"] == pytest.approx(math.sqrt(right * (1 - right) / 11), abs=1e-6)
    assert f"{right:.4g} ±" in command("eval", "builtin:student", *SUITE).stdout


def test_results_of_several_tasks_are_kept_with_the_run(rows: list[dict[str, Any]]) -> None:
    Path("run.toml").write_text(CONFIG)
    assert main(["train", "run.toml"]) == 0
    lines = scores("run", "--suite", "sums", "other_sums", *SUITE[2:], "--limit", "5")
    assert [each["suite"] for each in lines] == ["sums", "other_sums"]
    assert [(each["prompts"], each["update"]) for each in lines] == [(5, 1)] * 2
    assert lines[0]["acc"] == pytest.approx(accuracy("run/final", rows[:5]))
    assert [json.loads(each) for each in Path("run/eval.jsonl").read_text().splitlines()] == lines


def test_an_unknown_task_is_one_line(rows: list[dict[str, Any]]) -> None:
    said = command("eval", "builtin:student", "--suite", "sum", *SUITE[2:], status=2).stderr
    assert "error: --suite: lm-evaluation-harness has no task 'sum'; did you mean " in said
    said = command("eval", "builtin:student", "--suite", "7" * 40, *SUITE[2:], status=2).stderr
    assert said.splitlines()[-1].endswith("'; `lm-eval ls` lists all")


def test_checkpoints_are_scored_while_a_run_goes_on(rows: list[dict[str, Any]]) -> None:
    suite = "[eval.suite]\ntasks = 'sums'\npath = 'tasks'\nevery = 2\nlimit = 5\ndevice = 'cpu'\n"
    Path("run.toml").write_text(CONFIG.replace("updates = 1", "updates = 3") + suite)
    command("train", "run.toml")
    lines = [json.loads(each) for each in Path("run/eval.jsonl").read_text().splitlines()]
    assert [(line["suite"], line["prompts"], line["update"]) for line in lines] == [("sums", 5, 2), ("sums", 5, 3)]
    assert lines[1]["acc"] == pytest.approx(accuracy("run/final", rows[:5]))
    card = Path("run/final/README.md").read_text()
    assert f"| `sums` | 3 | acc | {lines[1]['acc']:.4g} ± " in card and "| `sums` | 2 | acc | " in card
    assert main(["report", "run"]) == 0
    assert "Tasks of lm-evaluation-harness" in next(Path.cwd().rglob("*.html")).read_text()
    Path("run.toml").write_text(CONFIG.replace('"run"', '"other"') + suite.replace("'sums'", "'sum'"))
    said = command("config", "run.toml", "--check", status=2).stderr
    assert "error: eval.suite.tasks: lm-evaluation-harness has no task 'sum'; did you mean " in said
