"""Whole runs with supervised updates and off-policy parts: what they write, and that stopping changes nothing."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from slipstream.cli import main
from slipstream.config.file import parse
from slipstream.data.prompts import load_rows
from slipstream.data.tokenizers import load_tokenizer
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import resume, train

QUIET = Console(quiet=True)
TREE = {
    "student": "builtin:student",
    "updates": 6,
    "data": {"limit": 16},
    "teachers": {"main": {"model": "builtin:teacher"}},
    "sampler": {"max_tokens": 80},
    "learner": {"batch_size": 8, "lr": 1e-3, "warmup": 2, "decay": "cosine"},
    "schedule": {"kind": "sync"},
    "task": {"reward": "exact"},
    "checkpoint": {"every": 1, "keep": 9},
    "runtime": {
        "kind": "inline",
        "device": "cpu",
        "clock": "modelled",
    },  # on which calls always meet in the same passes
    "log": {"trace": False},
}


def trajectories(path: Path) -> str:
    """The answers of the data, as if some policy had drawn them with these log-probs."""
    tokenizer, rng = load_tokenizer("builtin:student"), np.random.default_rng(0)
    with path.open("w") as file:
        for row in load_rows("builtin:arithmetic", limit=16):
            tokens = [*tokenizer(row.response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            logp = (-rng.exponential(0.2, len(tokens))).tolist()
            file.write(json.dumps({"prompt": row.id, "tokens": tokens, "logp": logp}) + "\n")
    return str(path)


CASES = {
    "answers, then a file of trajectories beside rollouts": {
        "sft": {"updates": 2},
        "mix": {"source": "file", "share": 0.5},
        "loss": {"m": 1},
    },
    "rollouts of the teacher, with scores, then draws of the teacher beside rollouts": {
        "sft": {"updates": 2, "source": "teacher", "loss": {"kind": "forward_kl", "k": 8}},
        "mix": {"source": "teacher", "share": 0.5},
        "loss": {"m": 4},
    },
    "GKD, whose share falls to nothing": {"mix": {"share": 1.0, "final": 0.0}, "loss": {"kind": "jsd"}},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_stopped_anywhere_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    changes = CASES[name]
    if changes["mix"].get("source") == "file":
        changes = {**changes, "mix": {**changes["mix"], "path": trajectories(tmp_path / "given.jsonl")}}
    config = parse({**TREE, **changes, "output": str(tmp_path / "whole")})
    whole = train(config, QUIET, name="whole", checks=False)
    supervised, source = config.supervised_updates, changes["mix"].get("source", "data")
    ledger = read_lines(whole / "ledger.jsonl")
    origins = {update: Counter(e.get("source", "") for e in ledger if e["update"] == update) for update in range(1, 7)}
    lines = {line["update"]: line for line in read_lines(whole / "metrics.jsonl")}
    for update, found in origins.items():
        assert lines[update].get("sft", 0) == (update <= supervised)
        if update <= supervised:
            assert found == {changes["sft"].get("source", "data"): 8} and "teacher/kl" not in lines[update]
        else:
            assert lines[update]["lag/max"] == 0 and lines[update]["grad_norm"] > 0
            assert (f"off_policy/{source}" in lines[update]) == (found[source] > 0)
    shares = [origins[update][source] / 8 for update in range(supervised + 1, 7)]
    assert shares == ([0.5] * 4 if supervised else pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0], abs=1 / 8))
    weights = load_file(whole / "final" / "model.safetensors")
    for version in (1, 3):
        path = tmp_path / str(version)
        shutil.copytree(whole, path)
        shutil.rmtree(path / "final")
        resume(path, QUIET, number=version)
        assert read_lines(path / "ledger.jsonl") == ledger
        for key, value in load_file(path / "final" / "model.safetensors").items():
            np.testing.assert_array_equal(value, weights[key], err_msg=f"{key} from checkpoint {version}")


def test_engines_in_their_own_processes_make_the_same_run(tmp_path: Path) -> None:
    """A sampler with the teacher's weights has a process of its own, and two ranks share the learner."""
    changes = CASES["rollouts of the teacher, with scores, then draws of the teacher beside rollouts"]
    runtime = {"kind": "local", "device": "cpu"}
    learner = {**TREE["learner"], "ranks": 2}
    lines = {}
    for name, more in {"inline": {}, "local": {"runtime": runtime, "learner": learner}}.items():
        config = parse({**TREE, **changes, **more, "updates": 4, "output": str(tmp_path / name)})
        lines[name] = read_lines(train(config, QUIET, name=name, checks=False) / "metrics.jsonl")
    for one, other in zip(lines["inline"], lines["local"], strict=True):
        for key in ("loss", "grad_norm", "tokens", "lr"):
            assert one[key] == pytest.approx(other[key], rel=1e-3), (one["update"], key)


def test_samples_and_report_say_who_wrote_a_response(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers of the data have no version, no log-prob and no reward; whoever reads them does without."""
    changes = {"sft": {"updates": 1}, "mix": {"share": 0.5}, "loss": {"kind": "jsd"}, "log": {"samples": 8}}
    path = train(parse({**TREE, **changes, "updates": 2, "output": str(tmp_path / "run")}), QUIET, name="run")
    by = Counter(quote["source"] for quote in read_lines(path / "samples.jsonl"))
    assert by == {"data": 12, "": 4}
    assert main(["samples", str(path), "-n", "16"]) == 0
    said = capsys.readouterr().out
    assert said.count("tokens by the data, ended") == 12 and said.count("tokens by version 1, ") == 4
    assert main(["report", str(path)]) == 0
    assert "Supervised updates" in (path / "report.html").read_text()
    assert main(["advise", str(path)]) == 0
