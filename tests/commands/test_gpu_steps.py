"""`slipstream doctor --gpu`: what each step is, what it says without GPUs or vLLM, and its report."""

import io
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

from slipstream.cli import main
from slipstream.commands import first_run
from slipstream.commands.first_run import Step, check_gpus, run, steps
from slipstream.run_dir.writing import read_lines

CPU = [("runtime.device", "cpu")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu"]) == 2
    expected = "error: doctor --gpu needs a CUDA GPU, and torch sees none: --runtime.device cpu tries its steps here\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("gpus", [1, 3, 8])
def test_a_step_says_what_it_lacks(gpus: int, tmp_path: Path) -> None:
    first, second, third = steps("run.toml", [("seed", "1")], tmp_path, gpus=gpus)
    assert not first.missing and "--small" not in first.command and not second.missing
    assert second.command[4:] == [
        "run.toml",
        "--seed=1",
        "--updates=3",
        "--output",
        tmp_path / "one",
        "--runtime.kind=inline",
    ]
    few = f"it needs 4 GPUs (two ranks, sampler, teacher), and there are {gpus}"
    vllm = "" if find_spec("vllm") else "vLLM is not installed (docs/install.md)"
    assert third.missing == (few if gpus < 4 else vllm)
    assert {"--learner.ranks=2", "--sampler.engine=vllm", "--sampler.max_tokens=1024"} <= set(map(str, third.command))


def test_a_failed_step_gives_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; [print(i) for i in range(30)]; print('no kernel', file=sys.stderr); sys.exit(3)"
    result, *lines = run(Step("it", 1, [sys.executable, "-c", code]), tmp_path / "log")
    assert re.fullmatch(r"exit status 3, after \d+ s", result)
    assert len(lines) == first_run.LOG_LINES and "no kernel" in lines
    assert len((tmp_path / "log").read_text().splitlines()) == 31
    assert run(Step("it", 0, [sys.executable, "-c", "input()"]), tmp_path / "log") == ["stopped after its 0 minutes"]


def test_the_report_has_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Step("one", 1, [sys.executable, "-c", "print('a'); print('b [i]')"]),
        Step("two", 2, [sys.executable, "-c", "raise SystemExit('no kernel')"]),
        Step("three", 3, [], "vLLM is not installed"),
    ]
    monkeypatch.setattr(first_run, "steps", lambda *args, **options: iter(found))
    out = io.StringIO()
    assert not check_gpus(None, CPU, Console(file=out, width=200), small=True)
    shown, _, report = out.getvalue().partition("\nReport, to paste into an issue:\n\n")
    assert shown.splitlines()[1] == "step 2, two: at most 2 minutes"
    version, *lines, last = report.splitlines()
    assert version.startswith("slipstream 0.") and "torch" in version
    assert re.sub(r"after \d+ s", "after 1 s", "\n".join(lines)) == (
        "step 1, one: ok\n    b [i]\nstep 2, two: exit status 1, after 1 s\n    no kernel\n"
        "step 3, three: not run: vLLM is not installed"
    )
    assert last.startswith("2 steps did not pass; logs in ")


@pytest.mark.processes
@pytest.mark.parametrize("number", [1, 2])
def test_the_steps_that_train_pass_in_miniature(number: int, tmp_path: Path) -> None:
    step = list(steps(None, CPU, tmp_path, gpus=None))[number]
    assert not step.missing
    assert run(step, tmp_path / "log")[0] == "ok", (tmp_path / "log").read_text()
    lines = read_lines(tmp_path / ("one", "two")[number - 1] / "metrics.jsonl")
    assert [line["update"] for line in lines] == [1, 2, 3]
