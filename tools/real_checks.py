"""Try each part of a laptop run once on the real model: `make real-checks`.

    python tools/real_checks.py TEACHER STUDENT PROMPTS [--only NAME …] [--python PYTHON]

Each part is a short run: three updates of eight answers of at most 24 tokens, with canaries after each update. A part
fails if its command fails, as it does when a start check or a canary complains, or if a metric is beyond its limit.
`--python` is a Python with Slipstream and vLLM, for the parts that need vLLM; without it they are left out.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.run_dir.writing import read_lines

CONFIG = """
student = {student}
updates = 3
output = {output}
data = {{ train = {prompts}, chat = true }}
teachers.main.model = {teacher}
sampler.max_tokens = 24
loss = {{ kind = "reverse_kl_mc", m = 4 }}
learner = {{ batch_size = 8, lr = 1e-5 }}
schedule.kind = "sync"
health.canary = 1
checkpoint = {{ every = 1, minutes = 0 }}
"""
SECONDS = 1200
"""Time limit of a part."""
HALF = ("--teachers.main.dtype", "bfloat16", "--sampler.dtype", "bfloat16", "--learner.compute_dtype", "bfloat16")
DENSE = ("--loss.kind", "forward_kl", "--loss.cache", "hidden")
DRAWS = ("--loss.m", "1")
Numbers = Mapping[str, float]


def same_policy(limit: float) -> Callable[[Numbers], bool]:
    """Return the condition that sampler and learner differ by at most this KL; each update is on-policy."""
    return lambda numbers: abs(numbers["drift/k3_kl"]) <= limit


@dataclass(frozen=True)
class Part:
    """One part of a run: the settings that it changes, and what its last update must show."""

    name: str
    settings: Sequence[str] = ()
    holds: Callable[[Numbers], bool] = field(default=lambda numbers: True)
    vllm: bool = False


PARTS = (
    Part("float32", holds=same_policy(1e-5)),
    Part("bfloat16", HALF, same_policy(0.05)),
    Part("the whole vocabulary", DENSE, same_policy(1e-5)),
    Part("async", ("--schedule.kind", "async", "--schedule.tau", "2", *HALF)),
    Part(
        "speculation",
        ("--sampler.speculation.lookup", "1", "--sampler.speculation.least", "0"),
        lambda numbers: numbers.get("sampler/drafted", 0) > 0,
    ),
    Part("int8 rollouts", ("--sampler.quantisation", "int8"), same_policy(0.05)),
    Part("int8 rollouts and learner", ("--sampler.quantisation", "int8", "--learner.quantised", "true")),
    Part("LoRA", ("--learner.lora.rank", "8", "--learner.lr", "1e-4"), same_policy(1e-5)),
    Part("vLLM rollouts", ("--sampler.engine", "vllm"), same_policy(1e-4), vllm=True),
    Part("vLLM teacher", ("--teachers.main.engine", "vllm", *DRAWS), vllm=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("teacher", "student", "prompts"):
        parser.add_argument(name)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--python", help="a Python with vLLM")
    args = parser.parse_args()
    checks = {"doctor": doctor} | {part.name: trains(part) for part in PARTS} | {"a kill and a resume": resumes}
    failed = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, check) in enumerate(checks.items()):
            needs_vllm = any(part.vllm for part in PARTS if part.name == name)
            if (args.only and name not in args.only) or (needs_vllm and not args.python):
                continue
            here = Path(folder) / str(number)
            here.mkdir()
            known = {"student": args.student, "teacher": args.teacher, "prompts": args.prompts, "output": here / "runs"}
            (here / "config.toml").write_text(CONFIG.format(**{k: f'"{v}"' for k, v in known.items()}))
            began = time.monotonic()
            fault = check(here / "config.toml", here / "runs" / "run", args.python if needs_vllm else sys.executable)
            print(f"{'failed' if fault else 'ok':6} {time.monotonic() - began:4.0f} s  {name}", flush=True)
            if fault:
                print(fault, flush=True)
                failed.append(name)
    sys.exit(bool(failed))


Check = Callable[[Path, Path, str], str]
"""Check of a part: its config, its run directory and its Python, to what is wrong; empty if nothing is."""


def doctor(config: Path, run: Path, python: str) -> str:
    return called(python, "doctor", config)


def trains(part: Part) -> Check:
    def check(config: Path, run: Path, python: str) -> str:
        if fault := called(python, "train", config, "--output", str(run), *part.settings):
            return fault
        numbers = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"][-1]
        return "" if part.holds(numbers) else f"its last update is out of limits: {numbers}"

    return check


def resumes(config: Path, run: Path, python: str) -> str:
    """Kill a run after its first checkpoint, and resume it."""
    words = command(python, "train", config, "--output", str(run), "--updates", "6")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as train:
        until = time.monotonic() + SECONDS
        while not any(run.glob("checkpoints/*/manifest.json")):
            if train.poll() is not None or time.monotonic() > until:
                return "the run ended before its first checkpoint"
            time.sleep(0.1)
        os.killpg(train.pid, signal.SIGKILL)
    if fault := called(python, "resume", run):
        return fault
    updates = [line["update"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    return "" if updates == list(range(1, 7)) else f"its updates are {updates}"


def command(python: str, job: str, *words: object) -> list[str]:
    return [str(Path(python).with_name("slipstream")), job, *map(str, words)]


def called(python: str, job: str, *words: object) -> str:
    """Run a command; return the end of its output if it failed, else an empty string."""
    ran = subprocess.run(command(python, job, *words), capture_output=True, text=True, timeout=SECONDS, check=False)
    return "" if ran.returncode == 0 else (ran.stdout + ran.stderr)[-2000:]


if __name__ == "__main__":
    main()
