"""Runs of tiny students whose prompts are chosen, mixed, replaced or cut: they train, and go on exactly."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.config.file import load
from slipstream.plan.plan import plan
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import resume, train

BASE = """
student = "builtin:student"
updates = 4
output = "whole"
[data]
train = "rows.jsonl"
[sampler]
max_tokens = 6
group = 4
[learner]
batch_size = 8
lr = 1e-3
[runtime]
kind = "inline"
device = "cpu"
[checkpoint]
every = 2
keep = 9
"""
TEACHER = "teachers.main.model=builtin:teacher sampler.group=2"
RL = "loss.weight=0 task.reward=exact policy.loss=vanilla schedule.kind=sync"
RUNS = {
    "adaptive by rewards, with refill": f"{RL} data.order=adaptive policy.refill=3.0",
    "adaptive by KL, stale": f"{TEACHER} data.order=adaptive data.adaptive.weight_by=kl schedule.tau=1 "
    "runtime.clock=modelled",
    "curriculum": f"{TEACHER} data.order=curriculum data.curriculum.column=level data.curriculum.epochs=0.5 "
    "schedule.kind=sync",
    "two sources": f'{TEACHER} data.train={{a="rows.jsonl",b="builtin:arithmetic"}} data.limit=8 '
    "data.weights_temperature=2.0 schedule.kind=sync",
    "without copies and long prompts": f"{TEACHER} data.deduplicate=true data.too_long=skip sampler.max_length=14 "
    "schedule.kind=sync",
    "cut": f"{TEACHER} data.too_long=cut_left sampler.max_length=12 schedule.kind=sync",
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE)
    rows = [
        {"prompt": f"A{i % 9}B{i % 7}{'C1' * (i % 3)}=", "answer": "0" if i % 2 else "A", "level": i % 5}
        for i in range(20)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(name: str) -> None:
    changes = [(key, value) for key, _, value in (pair.partition("=") for pair in RUNS[name].split())]
    quiet = Console(file=io.StringIO())
    whole = train(load("base.toml", changes), quiet, name="whole", checks=False)
    shutil.copytree(whole, "parts")
    shutil.rmtree("parts/final")
    shutil.rmtree("parts/checkpoints/4")
    resume(Path("parts"), quiet)
    weights = [(Path(run) / "final" / "model.safetensors").read_bytes() for run in (whole, "parts")]
    assert weights[0] == weights[1]
    ledgers = [read_lines(Path(run) / "ledger.jsonl") for run in (whole, "parts")]
    assert ledgers[0] == ledgers[1]
    if "refill" in name:
        assert any(entry.get("reason") == "no advantage" for entry in ledgers[0])
    if name == "curriculum":
        levels = [int(entry["prompt"].partition(":")[2]) - 1 for entry in ledgers[0][:10]]
        found = [level % 20 % 5 for level in levels]
        assert found == sorted(found)


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    changes = [("data.deduplicate", "true"), ("data.too_long", "skip"), ("sampler.max_length", "14")]
    changes += [("teachers.main.model", "builtin:teacher"), ("data.eval", "rows.jsonl"), ("eval.every", "2")]
    made = plan(load("base.toml", [*changes, ("task.reward", "exact")]))
    notes = [note for note in made.notes if note.startswith("data.")]
    assert notes == [
        "data.deduplicate: 1 of 21 rows of data.train are dropped: rows.jsonl:21 equals rows.jsonl:1",
        "data.too_long: 6 of 20 prompts of data.train have more than 8 tokens and are left out, rows.jsonl:3 first",
        "data.too_long: 6 of 21 prompts of data.eval have more than 8 tokens and are left out, rows.jsonl:3 first",
    ]
    (warning,) = [each for each in made.warnings if each.startswith("data.eval")]
    assert warning == (
        "data.eval: 15 of 15 held-out prompts are in data.train too, 15 equal and 0 with 13 words in a row in common, "
        "as rows.jsonl:1 and rows.jsonl:1: accuracy on them measures memorization"
    )
    assert len(made.prompts.rows) == 14 and max(map(len, made.prompts.tokens)) <= 8
