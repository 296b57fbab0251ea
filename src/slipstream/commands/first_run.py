"""`slipstream doctor --gpu`: the first steps on a machine with GPUs, and a report about them (docs/first_gpu_run.md).

Each step is a command in a process of its own, with a time limit and a log. A step that fails stops no other step. With
`runtime.device = "cpu"` the same steps run in miniature.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

import slipstream
from slipstream.commands.doctor import versions
from slipstream.config.file import load
from slipstream.errors import ConfigError
from slipstream.models.resolve import DEMO, model_path

BENCHMARK = Path(slipstream.__file__).parents[2] / "benchmarks" / "gpu.py"
TRAIN = (sys.executable, "-c", "import sys; from slipstream.cli import main; sys.exit(main())", "train")
TOKENS = 1024
LISTED = 20
"""Largest number of lines of the log of a failed step that the report has."""


@dataclass(frozen=True)
class Step:
    name: str
    minutes: int
    command: Sequence[str | Path]
    missing: str = ""
    """What the machine lacks, so that the step is not run; "" if nothing."""


def check_gpus(config: str | None, changes: Sequence[tuple[str, str]], console: Console) -> bool:
    """Run all steps and print the report; return True if every step passed."""
    import torch

    gpus = torch.cuda.device_count()
    if not (small := load(config or DEMO, changes, say=str).runtime.device == "cpu") and not gpus:
        raise ConfigError(
            "doctor --gpu needs a CUDA GPU, and torch sees none: --runtime.device cpu tries its steps here"
        )
    folder = Path(tempfile.mkdtemp(prefix="slipstream-gpu-"))
    report, failed = [f"slipstream {slipstream.__version__}, {versions()}"], 0
    for number, step in enumerate(steps(config, changes, folder, gpus=gpus, small=small), 1):
        console.print(f"step {number}, {step.name}: at most {step.minutes} minutes", soft_wrap=True)
        found = [f"not run: {step.missing}"] if step.missing else run(step, folder / f"step{number}.log")
        failed += found[0] != "ok"
        report += [f"step {number}, {step.name}: {found[0]}", *(f"    {line}" for line in found[1:])]
    report.append(
        f"all steps passed; logs in {folder}" if not failed else f"{failed} steps did not pass; logs in {folder}"
    )
    console.print("\n".join(["", "Report, to paste into an issue:", "", *report]), markup=False, soft_wrap=True)
    return not failed


def steps(
    config: str | None, changes: Sequence[tuple[str, str]], folder: Path, *, gpus: int, small: bool
) -> Iterator[Step]:
    command = [sys.executable, BENCHMARK, "--out", folder / "gpu", *["--small"] * small]
    checkout = (
        "" if BENCHMARK.exists() else f"{BENCHMARK} is missing: install Slipstream from a checkout (pip install -e .)"
    )
    yield Step("make gpu", 15, command, checkout)
    settings = [word for key, value in changes for word in (f"--{key}", value)] + ["--updates", "3"]
    if config is None:
        for key, name in ("student", "student"), ("teachers.main.model", "teacher"):
            settings += [f"--{key}", str(with_long_context(name, folder))]
    train = [*TRAIN, config or DEMO, *settings, "--output"]
    yield Step("one device, three updates", 10, [*train, folder / "one", "--runtime.kind", "inline"])
    vllm = "" if small or find_spec("vllm") else "vLLM is not installed (docs/install.md)"
    few = "" if small or gpus >= 4 else f"it needs 4 GPUs (two ranks, sampler, teacher), and there are {gpus}"
    options = {"runtime.kind": "local", "learner.ranks": "2", "sampler.max_tokens": str(TOKENS)}
    options |= {} if small else {"sampler.engine": "vllm"}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    yield Step(f"two ranks and vLLM, {TOKENS} tokens", 20, [*train, folder / "two", *words], few or vllm)


def with_long_context(name: str, folder: Path) -> Path:
    """Copy a built-in model, and let it take prompts and responses of TOKENS tokens."""
    copy = shutil.copytree(model_path(f"builtin:{name}"), folder / name)
    written = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(written | {"max_position_embeddings": 2 * TOKENS}))
    return copy


def run(step: Step, log: Path) -> list[str]:
    """Return "ok" or how the step failed, and the last lines of its log: one if it passed."""
    began = time.monotonic()
    with log.open("wb") as file:
        try:
            code = subprocess.run(step.command, stdout=file, stderr=file, timeout=60 * step.minutes).returncode
            result = f"exit status {code}, after {time.monotonic() - began:.0f} s" if code else "ok"
        except subprocess.TimeoutExpired:
            result = f"stopped after its {step.minutes} minutes"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return [result, *lines[-1 if result == "ok" else -LISTED :]]
