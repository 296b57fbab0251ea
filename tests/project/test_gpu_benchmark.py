"""`make gpu` without a GPU: what it refuses, how it survives a stage that fails, and the arithmetic of its table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import gpu
from on_gpu import learner, report
from slipstream.engines.native.model import LanguageModel
from slipstream.estimators.logprobs.tiles import Head

ROOT = Path(__file__).parents[2]


def test_a_machine_without_a_gpu_is_one_line_and_exit_2() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "gpu.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: make gpu needs a CUDA GPU, and torch sees none here\n"


FIGURE = {
    "stage": "s",
    "what": "speed",
    "value": 12345.0,
    "unit": "tokens/s",
    "goal": "≥ 9",
    "note": "n",
    "wrong": False,
}


def test_a_stage_that_fails_keeps_its_figures_and_is_wrong(tmp_path: Path) -> None:
    code = f"print('noise'); print({json.dumps(FIGURE)!r}, flush=True); raise ValueError('too hot')"
    first, second = gpu.figures_of("s", [sys.executable, "-c", code], 60, tmp_path / "s.log")
    assert first == FIGURE
    assert second["wrong"] and second["what"] == "the stage failed: ValueError: too hot"
    assert (tmp_path / "s.log").read_text().startswith("Traceback")


def test_a_stage_that_is_cut_off_keeps_its_figures_and_is_not_wrong(tmp_path: Path) -> None:
    code = f"import time; print({json.dumps(FIGURE)!r}, flush=True); time.sleep(600)"
    figures = iter(gpu.figures_of("s", [sys.executable, "-c", code], 10.0, tmp_path / "s.log"))
    assert next(figures) == FIGURE
    (rest,) = figures
    assert not rest["wrong"] and rest["what"] == "cut off at its limit of 10 s"


def test_time_that_a_stage_leaves_goes_to_those_after_it() -> None:
    every = list(gpu.STAGES)
    assert gpu.limit_of(every, 340) == 2 * 340 * gpu.STAGES["device"] / sum(gpu.STAGES.values())
    assert gpu.limit_of(every[-2:], 90) == 90  # twice the share of `loop` is more than all that is left
    assert gpu.limit_of(every[-1:], 200) == 200


def test_a_check_is_wrong_above_its_limit_and_where_it_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    shown = report.Report("head")
    shown.check("fine", 1e-3, 1e-3)
    shown.check("off", 2e-3, 1e-3)
    shown.check("lost", float("nan"), 1e-3)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["value"], line["wrong"]) for line in lines] == [(1e-3, False), (2e-3, True), (None, True)]


def test_the_table_marks_what_is_wrong_and_leaves_unknown_values_empty() -> None:
    off = FIGURE | {"what": "a|b", "value": None, "wrong": True}
    page = gpu.table([FIGURE, off], "H200", ["--only", "head"])
    assert "`python benchmarks/gpu.py --only head`; torch" in page
    assert "| s | speed | 1.234e+04 tokens/s | ≥ 9 | n |" in page
    assert "| s | a/b | **wrong**  | ≥ 9 | n |" in page


@pytest.mark.parametrize(("shape", "billions"), [("qwen3_0.6b", 0.596), ("qwen3_4b", 4.022)])
def test_operations_are_those_of_the_published_sizes(shape: str, billions: float) -> None:
    """6 per trained weight and token, where the head (tied to the embedding) counts for answers only, and attention.

    Of 8 sequences of 512 tokens with prompts of 64: 4,096 tokens, 3,584 of answers.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(report.Setting(small=False).config(shape))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)
    lm = LanguageModel(shape, model, model.model, Head(model.lm_head), 512)
    head = model.lm_head.weight.numel()
    body = sum(p.numel() for p in model.parameters()) - head
    layers, width = {"qwen3_0.6b": (28, 16 * 128), "qwen3_4b": (36, 32 * 128)}[shape]
    expected = 6 * (body * 4096 + head * 3584) + 6 * layers * width * 8 * 512**2
    assert learner.flops(lm, 8, 512, 64) == expected


@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_every_stage_runs_in_miniature(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--small", "--minutes", "60", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (lines,) = tmp_path.glob("*.jsonl")
    figures = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {figure["stage"] for figure in figures} == set(gpu.STAGES)
    assert not [figure for figure in figures if figure["wrong"] or "cut off" in figure["what"]]
    (page,) = tmp_path.glob("*.md")
    assert page.read_text().count("\n| ") == len(figures) + 1
