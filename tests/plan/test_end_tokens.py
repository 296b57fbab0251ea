"""Pairs that end answers with different tokens are refused, by their files or by what the teacher says."""

import asyncio
import json
import re
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import slipstream
from slipstream.cli import main
from slipstream.config.file import parse
from slipstream.models.resolve import model_path
from slipstream.plan.checks import PROMPTS, Finding, judged_ends, start_checks
from slipstream.plan.ends import EndProbe, template_end
from slipstream.plan.plan import plan, plan_with_texts
from slipstream.protocols import OneEnd
from slipstream.runtimes.inline import open_engines
from support.model_directories import build_tokenizer, save_model
from support.slow_cases import with_slow

EOS, OTHER = 1, 4
"""`<eos>`, with which the template of these models ends a turn, and `<system>`, which stands for another end token."""


def model(path: Path, *, eos: str, ends: Sequence[int], seed: int = 1) -> Path:
    """A miniature whose tokenizer ends with `eos`, and whose generation config stops at `ends`."""
    tokenizer = build_tokenizer()
    text = tokenizer.chat_template.replace("eos_token", "'<eos>'")
    save_model(path, tokenizer, layers=1, seed=seed)
    tokenizer.eos_token, tokenizer.chat_template = eos, text
    tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
    return path


def config(tmp_path: Path, *, chat: bool = False, **changes: Any) -> str:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    text = f"""
student = "{tmp_path}/student"
updates = 1
output = "{tmp_path}/run"
[data]
train = "{tmp_path}/rows.jsonl"
chat = {json.dumps(chat)}
[teachers.main]
model = "{tmp_path}/teacher"
[sampler]
max_tokens = 4
[learner]
batch_size = 2
[runtime]
kind = "inline"
device = "cpu"
"""
    (tmp_path / "run.toml").write_text(text)
    return text


def test_a_pair_with_different_ends_is_refused_with_both_ids_by_check_and_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The teacher's generation config lists the student's end token, too, as that of an instruct model does."""
    model(tmp_path / "student", eos="<eos>", ends=[EOS])
    model(tmp_path / "teacher", eos="<system>", ends=[OTHER, EOS])
    config(tmp_path)
    said = []
    for words in (["config", str(tmp_path / "run.toml"), "--check"], ["train", str(tmp_path / "run.toml")]):
        assert main(words) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1]
    assert said[0] == (
        f"error: teachers.main: {tmp_path}/teacher ends an answer with '<system>' (id 4), {tmp_path}/student stops "
        "only at '<eos>' (id 1): training would teach it not to stop; write sampler.stop = [\"<system>\"], so that the "
        'student stops there, too, or teachers.main.ends = "map", so that the teacher teaches the student\'s end token'
    )
    assert not (tmp_path / "run").exists()


PAIRS: list[tuple[str, list[int], str, list[int], bool, bool]] = [
    # the student's eos and ends, the teacher's, whether prompts are messages, whether the pair is legal
    ("<eos>", [EOS], "<eos>", [EOS], True, True),
    ("<eos>", [EOS, OTHER], "<eos>", [EOS, OTHER], True, True),
    ("<eos>", [EOS], "<eos>", [EOS, OTHER], True, True),
    ("<eos>", [EOS, OTHER], "<system>", [OTHER], False, True),  # an instruct student, a base teacher
    ("<eos>", [EOS], "<system>", [EOS, OTHER], True, True),  # in a conversation the template's end counts
    ("<system>", [OTHER], "<system>", [OTHER], True, True),  # two base models with a template that neither follows
    ("<system>", [OTHER], "<system>", [OTHER], False, True),
    ("<eos>", [EOS], "<system>", [EOS, OTHER], False, False),
    ("<system>", [OTHER], "<eos>", [EOS, OTHER], True, False),  # a base student, an instruct teacher
    ("<system>", [OTHER], "<system>", [EOS, OTHER], True, False),
    ("<system>", [OTHER], "<eos>", [EOS], False, False),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_only_pairs_whose_teacher_ends_where_the_student_does_not_stop_are_refused(
    pair: tuple[str, list[int], str, list[int], bool, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student, stops, teacher, ends, chat, legal = pair
    model(tmp_path / "student", eos=student, ends=stops)
    model(tmp_path / "teacher", eos=teacher, ends=ends)
    config(tmp_path, chat=chat)
    assert main(["config", str(tmp_path / "run.toml"), "--check"]) == (0 if legal else 2)
    assert ("ends an answer with" in capsys.readouterr().err) != legal
    if not legal:
        remedies = ["--teachers.main.ends", "map"], ["--sampler.stop", '["<eos>"]' if OTHER in stops else "[4]"]
        for remedy in remedies:
            assert main(["config", str(tmp_path / "run.toml"), "--check", *remedy]) == 0


def test_the_student_s_end_is_that_of_the_template_if_it_stops_there(tmp_path: Path) -> None:
    def one_end(student: str, stops: list[int], *, chat: bool, teacher: str = "<system>") -> OneEnd | None:
        for name, eos, ends in (("student", student, stops), ("teacher", teacher, [OTHER, EOS])):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            model(tmp_path / name, eos=eos, ends=ends)
        text = config(tmp_path, chat=chat)
        return plan(parse(tomllib.loads(text), [("teachers.main.ends", "map")])).engines.scorers["main"].one_end

    assert one_end("<eos>", [EOS], chat=False) == OneEnd(EOS, (EOS, OTHER))
    assert one_end("<system>", [OTHER], chat=True, teacher="<eos>") == OneEnd(OTHER, (EOS, OTHER))
    assert one_end("<system>", [OTHER, EOS], chat=True) == OneEnd(EOS, (EOS, OTHER))
    assert one_end("<system>", [OTHER, EOS], chat=False) == OneEnd(OTHER, (EOS, OTHER))


def test_the_end_of_a_template_is_read_off_a_conversation() -> None:
    assert template_end(build_tokenizer(), {}) == EOS
    assert template_end(build_tokenizer(template=None), {}) is None
    assert template_end(build_tokenizer(template="{{ messages[0].content }}"), {}) is None


# --- what a teacher says ----------------------------------------------------------------------------------------------


def ends_with_another_token(path: Path) -> Path:
    """The teacher of the demo, with `<eos>` and `<pad>` changed places in its weights, and the files as they were."""
    shutil.copytree(model_path("builtin:teacher"), path)
    weights = load_file(path / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name in weights:
            weights[name][[0, 1]] = weights[name][[1, 0]]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def widened(path: Path) -> Path:
    """Return the model unchanged, but with two end tokens in its generation config."""
    if not path.exists():
        shutil.copytree(model_path("builtin:teacher"), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    return path


DEMO = """
student = "builtin:student"
updates = 1
output = "run"
[data]
train = "builtin:arithmetic"
limit = 32
[teachers.main]
model = "teacher"
[sampler]
max_tokens = 16
[learner]
batch_size = 8
[runtime]
kind = "inline"
device = "cpu"
"""


def found_at_start(*changes: tuple[str, str]) -> list[Finding]:
    job = plan_with_texts(parse(tomllib.loads(DEMO), changes))
    engines = open_engines(job.engines, job.tokenizer, say=str)
    try:
        return asyncio.run(start_checks(job, engines, [job.prompts.at(number) for number in range(PROMPTS)], version=0))
    finally:
        engines.close()


LOSSES = [
    [],
    [("loss.kind", "reverse_kl_topk"), ("loss.k", "8")],
    [("loss.kind", "forward_kl"), ("loss.cache", "hidden")],
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_teacher_that_says_another_end_than_its_files_is_found_at_the_start(
    loss: list[tuple[str, str]], tmp_path: Path
) -> None:
    def said(teacher: Path) -> Finding:
        found = found_at_start(("teachers.main.model", str(teacher)), *loss)
        return next(each for each in found if each.name == "teacher main ends answers as the student does")

    ends = said(widened(ends_with_another_token(tmp_path / "teacher")))
    assert not ends.ok and ends.fatal and ends.fix.startswith('write sampler.stop = ["<pad>"], ')
    between = r"with '<eos>' \(id 1\) at probability .*, with '<pad>' \(id 0\), at which the student does not stop, at"
    assert re.search(between, ends.detail)
    assert said(widened(tmp_path / "honest")).ok


@pytest.mark.processes
def test_answers_with_an_end_travel_to_engines_in_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(DEMO.replace("inline", "local"))
    widened(ends_with_another_token(tmp_path / "teacher"))
    assert main(["train", "run.toml"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: teacher main ends answers as the student does: after 8 right answers ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "stop, other, ok",
    [(0.9, 1e-3, True), (1e-4, 0.5, False), (1e-4, 0.05, True), (0.01, 0.9, True), (0.0, 0.9, False), (0.0, 0.0, True)],
)
def test_an_end_is_judged_by_its_probability_beside_the_teachers_own(stop: float, other: float, ok: bool) -> None:
    probe = EndProbe((), {1: "<eos>"}, {0: "<pad>"})
    assert judged_ends("main", probe, {1: stop, 0: other}).ok == ok


# --- remedies ---------------------------------------------------------------------------------------------------------


def ends_with_pad(path: Path) -> Path:
    """A teacher whose weights and files end answers with `<pad>`, which is no end of the student."""
    ends_with_another_token(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<pad>", "pad_token": "<eos>"}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return path


TRAIN: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 8,
    "data": {"train": "builtin:arithmetic"},
    "sampler": {"max_tokens": 80},
    "learner": {"batch_size": 16, "lr": 3e-3},
    "schedule": {"kind": "sync"},
    "task": {"reward": "exact"},
    "runtime": {"kind": "inline", "device": "cpu"},
}


def trained(output: Path, teacher: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    config = TRAIN | {"teachers": {"main": teacher}, "output": str(output)} | changes
    return slipstream.train(config, quiet=True, checks=False).metrics


@pytest.mark.parametrize(
    "loss",
    with_slow([{}, {"kind": "forward_kl", "k": 8}, {"kind": "reverse_kl"}], quick=[{"kind": "forward_kl", "k": 8}]),
    ids=str,
)
def test_lengths_under_a_mapped_end_are_those_under_equal_ends(loss: dict[str, Any], tmp_path: Path) -> None:
    """The student reads `<pad>` and `<eos>` of the planted teacher as the other teacher's `<eos>` (and its `<pad>`)."""
    planted = {"model": str(ends_with_pad(tmp_path / "teacher")), "ends": "map"}
    control = trained(tmp_path / "control", {"model": "builtin:teacher"}, loss=loss)
    mapped = trained(tmp_path / "mapped", planted, loss=loss)
    for name in ("length/mean", "loss"):
        assert mapped[0][name] == pytest.approx(control[0][name], rel=0.02)
    last = [fmean(line["length/mean"] for line in lines[-4:]) for lines in (control, mapped)]
    assert last[1] == pytest.approx(last[0], rel=0.1)


def test_a_student_with_a_further_stop_keeps_it_in_its_saved_files(tmp_path: Path) -> None:
    """The stop is given as the text of a token, and is the teacher's end."""
    teacher = {"model": str(ends_with_pad(tmp_path / "teacher"))}
    sampler = {"max_tokens": 100, "stop": ["<pad>"]}
    lines = trained(tmp_path / "run", teacher, sampler=sampler, updates=2, checkpoint={"every": 1})
    assert lines[-1]["truncated"] < 0.5
    saved = json.loads((tmp_path / "run" / "final" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, 1]
    again = TRAIN | {"student": str(tmp_path / "run" / "final"), "teachers": {"main": teacher}}
    assert plan(parse(again)).end_ids == (0, 1)


def test_a_run_with_both_remedies_goes_on_to_the_bit(tmp_path: Path) -> None:
    teacher = {"model": str(ends_with_pad(tmp_path / "teacher")), "ends": "map"}
    changes = {"sampler": {"max_tokens": 40, "stop": [2]}, "loss": {"kind": "forward_kl", "k": 8}}
    whole = trained(tmp_path / "whole", teacher, updates=4, **changes)
    trained(tmp_path / "cut", teacher, updates=2, **changes)
    resumed = slipstream.resume(tmp_path / "cut", updates=4, quiet=True).metrics
    weights = [load_file(tmp_path / run / "final" / "model.safetensors") for run in ("whole", "cut")]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert [line["loss"] for line in whole] == [line["loss"] for line in resumed]


@pytest.mark.processes
def test_engines_in_other_processes_read_a_mapped_end_as_those_in_one(tmp_path: Path) -> None:
    """Scorer and learner both read it: the loss applies the teacher's head to hidden states."""
    teacher = {"model": str(ends_with_pad(tmp_path / "teacher")), "ends": "map"}
    rows = {"train": "builtin:arithmetic", "limit": 64}  # without a limit, a process of its own may read more than here
    changes: dict[str, Any] = {"loss": {"kind": "reverse_kl"}, "updates": 1, "data": rows}
    first = [
        trained(tmp_path / kind, teacher, runtime={"kind": kind}, **changes)[0]["loss"] for kind in ("inline", "local")
    ]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
