"""Whole runs with supervised updates and off-policy parts: what they write, and that stopping changes nothing."""

import io
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
from support.slow_cases import with_slow

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
    "a file of responses, then a file of trajectories beside rollouts": {
        "sft": {"updates": 2, "source": "file"},
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
    for section, its in changes.items():
        if its.get("source") == "file":
            changes = {**changes, section: {**its, "path": trajectories(tmp_path / f"{section}.jsonl")}}
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


@pytest.mark.parametrize("source", ["data", "file"])
def test_groups_that_begin_with_a_part_of_the_answer_learn_from_their_rest(source: str, tmp_path: Path) -> None:
    """Every loss works then, a policy loss too; tokens of the prefix have no version. A resumed run is the same."""
    mix = {"source": source, "share": 0.5, "prefix": 0.9}
    if source == "file":
        mix["path"] = trajectories(tmp_path / "given.jsonl")
    sampler = {"max_tokens": 80, "group": 2}
    tree = {**TREE, "updates": 4, "mix": mix, "sampler": sampler, "policy": {"loss": "vanilla"}, "loss": {"m": 2}}
    whole = train(parse({**tree, "output": str(tmp_path / "whole")}), QUIET, name="whole", checks=False)
    ledger = read_lines(whole / "ledger.jsonl")
    for update in range(1, 5):
        given = [entry for entry in ledger if entry["update"] == update and entry.get("prefix")]
        assert 1 <= len(given) <= 2 and all("source" not in entry for entry in given)
        assert all(entry["prefix"] < min(entry["tokens"]) for entry in given)
    lines = read_lines(whole / "metrics.jsonl")
    assert all(0 < line["mix/prefix"] < 0.5 and line["lag/max"] == 0 for line in lines if "mix/prefix" in line)
    samples = {line["number"]: line for line in read_lines(whole / "samples.jsonl")}
    for entry in ledger:
        if entry.get("prefix") and entry["number"] in samples:
            assert [next(iter(turn)) for turn in samples[entry["number"]]["turns"]] == ["seen", "said"]
    shutil.copytree(whole, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "final")
    resume(tmp_path / "again", QUIET, number=2)
    assert read_lines(tmp_path / "again" / "ledger.jsonl") == ledger


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


def test_rollouts_with_a_teacher_beside_the_sampler_are_the_same_in_processes_and_after_a_resume(
    tmp_path: Path,
) -> None:
    changes = {"updates": 3, "sampler": {"max_tokens": 24, "teacher_replaces": 3}, "loss": {"m": 2}}
    lines = {}
    for kind in ("inline", "local"):
        tree = {**TREE, **changes, "runtime": {"kind": kind, "device": "cpu"}, "output": str(tmp_path / kind)}
        lines[kind] = read_lines(train(parse(tree), QUIET, name=kind, checks=False) / "metrics.jsonl")
    shutil.copytree(tmp_path / "inline", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "final")
    resume(tmp_path / "again", QUIET, number=1)
    lines["again"] = read_lines(tmp_path / "again" / "metrics.jsonl")
    for kind in ("local", "again"):
        for one, other in zip(lines["inline"], lines[kind], strict=True):
            assert 0 < one["sampler/replaced"] < 1 and one["lag/max"] == 0
            for key in ("loss", "grad_norm", "tokens", "sampler/replaced"):
                assert one[key] == pytest.approx(other[key], rel=1e-3), (kind, one["update"], key)


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
    page = (path / "report.html").read_text()
    assert "Supervised updates" in page
    assert "Loss in supervised updates stayed at" in page and "Loss in later updates stayed at" in page
    assert main(["advise", str(path)]) == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_policy_loss_learns_beside_groups_of_the_teacher(kind: str, tmp_path: Path) -> None:
    """Groups of the teacher have no rewards; those of the student count alone in every measure of them."""
    changes = {
        "mix": {"source": "teacher", "share": 0.5},
        "loss": {"kind": "forward_kl", "k": 4},
        "policy": {"loss": "vanilla"},
        "sampler": {"max_tokens": 80, "group": 4},
        "learner": {"batch_size": 16, "lr": 1e-3},
        "schedule": {"kind": kind},
    }
    whole = train(
        parse({**TREE, **changes, "updates": 4, "output": str(tmp_path / "run")}), QUIET, name="run", checks=False
    )
    ledger = [entry for entry in read_lines(whole / "ledger.jsonl") if entry["end"] == "trained"]
    lines = read_lines(whole / "metrics.jsonl")
    for line in lines:
        its = [entry for entry in ledger if entry["update"] == line["update"]]
        rewards = [each["exact"] for entry in its for each in entry["rewards"] if each]
        assert Counter(entry.get("source", "") for entry in its) == {"": 2, "teacher": 2}
        assert all(bool(each) == ("source" not in entry) for entry in its for each in entry["rewards"])
        assert line["reward/exact"] == pytest.approx(np.mean(rewards)) == line["policy/reward"]
        assert all(np.isfinite(value) for value in line.values() if isinstance(value, float))
    if kind == "sync":
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        shutil.rmtree(copy / "final")
        resume(copy, QUIET, number=2)
        assert read_lines(copy / "ledger.jsonl") == read_lines(whole / "ledger.jsonl")
        for one, other in zip(read_lines(copy / "metrics.jsonl"), lines, strict=True):
            assert [one[name] for name in ("loss", "grad_norm", "policy/loss")] == [
                other[name] for name in ("loss", "grad_norm", "policy/loss")
            ]


@pytest.mark.parametrize("source", ["data", "teacher"])
def test_a_run_may_have_supervised_updates_alone(source: str, tmp_path: Path) -> None:
    """Its updates are those of a run whose later updates learn from rollouts."""
    sft, alone = {"updates": 2, "source": source}, {"loss": {"weight": 0.0}, "updates": 2}
    alone |= {} if source == "teacher" else {"teachers": {}}
    found = []
    for name, changes in {"both": {"updates": 3}, "alone": alone}.items():
        config = parse({**TREE, **changes, "sft": sft, "output": str(tmp_path / name)})
        found.append(read_lines(train(config, QUIET, name=name, checks=False) / "metrics.jsonl"))
    both, lines = found
    assert [line["sft"] for line in lines] == [1, 1]
    assert [line["loss"] for line in lines] == [line["loss"] for line in both[:2]]
    assert (tmp_path / "alone" / "final" / "model.safetensors").exists()


UNTIL = {
    "sft": {"updates": 6, "loss": {"kind": "forward_kl", "k": 1}},
    "mix": {"share": 1.0, "final": 0.0},
    "loss": {"kind": "forward_kl"},
    "updates": 9,
}


@pytest.mark.parametrize("kind", with_slow(["sync", "async", "periodic"], quick=["async"]))
def test_the_supervised_stage_ends_with_the_first_update_whose_mass_passes_the_bound(kind: str, tmp_path: Path) -> None:
    """The bound lies between the masses of updates 4 and all earlier ones; both runs agree until then."""
    changes = {**TREE, **UNTIL, "schedule": {"kind": kind}}
    whole = parse({**changes, "output": str(tmp_path / "all")})
    lines = read_lines(train(whole, QUIET, name="all", checks=False) / "metrics.jsonl")
    mass = [line["distill/student_mass"] for line in lines]
    assert [line["sft"] for line in lines] == [1] * 6 + [0] * 3 and max(mass[:3]) < mass[3]
    bound = (max(mass[:3]) + mass[3]) / 2
    config = parse({**changes, "sft": {**UNTIL["sft"], "until": bound}, "output": str(tmp_path / "run")})
    path = train(config, QUIET, name="run", checks=False)
    found, ledger = read_lines(path / "metrics.jsonl"), read_lines(path / "ledger.jsonl")
    assert [line["sft"] for line in found] == [1] * 4 + [0] * 5
    assert [line["distill/student_mass"] for line in found[:4]] == mass[:4]
    assert [line["lr"] for line in found] == pytest.approx(
        [1e-3] * 4 + [5e-4, 1e-3, *(1e-3 * (1 + np.cos(np.pi * k / 3)) / 2 for k in range(3))]
    )
    shares = [
        Counter(e.get("source", "") for e in ledger if e.get("update") == update)["data"] for update in range(5, 10)
    ]
    assert shares == pytest.approx([8, 6, 4, 2, 0], abs=1), "the shares begin after the stage"
    dropped = [entry for entry in ledger if entry["end"] == "dropped"]
    assert {entry["reason"] for entry in dropped} <= {"supervised stage ended"}
    assert bool(dropped) == (kind == "async"), "groups of later supervised updates were in flight"
    assert sorted(entry["number"] for entry in ledger) == list(range(len(ledger)))
    for version in (3, 4, 6):  # before the end of the stage, at it, and after it
        copy = tmp_path / str(version)
        shutil.copytree(path, copy)
        shutil.rmtree(copy / "final")
        resume(copy, QUIET, number=version)
        assert [line["sft"] for line in read_lines(copy / "metrics.jsonl")] == [1] * 4 + [0] * 5
        if kind != "async":  # which of its groups are in flight depends on the time
            assert read_lines(copy / "ledger.jsonl") == ledger


def test_a_second_run_reads_the_rollouts_of_the_teacher_and_draws_a_damaged_one_again(tmp_path: Path) -> None:
    """Only runs that draw take modelled time for it; all three runs learn the same."""
    sft = {"updates": 2, "source": "teacher", "loss": {"kind": "forward_kl", "k": 8}, "cache": str(tmp_path / "drawn")}
    said = io.StringIO()

    def go(name: str) -> tuple[Path, float]:
        config = parse({**TREE, "sft": sft, "loss": {"m": 2}, "updates": 3, "output": str(tmp_path / name)})
        path = train(config, Console(file=said, width=400), name=name, checks=False)
        return path, read_lines(path / "metrics.jsonl")[1]["time"]

    first, drawing = go("first")
    files = sorted((tmp_path / "drawn").iterdir())
    before = {file: file.stat().st_mtime_ns for file in files}
    assert len(files) == 16
    second, reading = go("second")
    assert {file: file.stat().st_mtime_ns for file in files} == before and reading < drawing
    files[3].write_bytes(files[3].read_bytes()[:-1] + b"?")
    assert "damaged" not in said.getvalue()
    third, _ = go("third")
    assert said.getvalue().count(f"{files[3]} is damaged (its checksum differs): its rollouts are drawn again") == 1
    assert [file for file in files if file.stat().st_mtime_ns != before[file]] == [files[3]]
    weights = load_file(first / "final" / "model.safetensors")
    for path in (second, third):
        assert read_lines(path / "ledger.jsonl") == read_lines(first / "ledger.jsonl")
        for key, value in load_file(path / "final" / "model.safetensors").items():
            np.testing.assert_array_equal(value, weights[key])
    sft["cache"] = str(tmp_path / "drawn")
    config = parse({**TREE, "sft": sft, "loss": {"m": 2}, "seed": 1, "updates": 3, "output": str(tmp_path / "other")})
    train(config, QUIET, name="other", checks=False)
    assert len(list((tmp_path / "drawn").iterdir())) == 32, "another seed draws others"
