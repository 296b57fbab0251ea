"""Do start checks, canaries or health rules accuse an honest run of the real pair? Runs in which nobody lies.

    make real
    python benchmarks/honest.py [--runs 50] [--first 0]

Each run makes two updates with the start checks, and canary checks after each update. Number formats of sampler,
teacher and learner, batch size, schedule, loss and the health of the student differ from run to run: a student without
eight or without fifteen layers, after a supervised start, after distillation, or the teacher itself. A run is accused
if it stops, or prints a line about health.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = 5, 7, 9, 11, 13, 14, 15, 16, 17, 18, 19, 21, 23, 25, 27
"""Layers without which a student writes no language at all."""
CONFIG = """
student = "{student}"
updates = 2
seed = {seed}
data = {{ train = "{root}/build/real/train.jsonl", chat = true }}
teachers.main = {{ model = "{root}/build/real/teacher.gguf", dtype = "{formats[1]}" }}
sampler = {{ max_tokens = 16, temperature = {temperature}, dtype = "{formats[0]}" }}
loss = {loss}
learner = {{ batch_size = {batch}, lr = 1e-5, compute_dtype = "{formats[2]}", token_budget = 1024 }}
schedule = {schedule}
health = {{ canary = 1, updates = 1 }}
checkpoint.minutes = 0
runtime = {{ kind = "inline", device = "cpu" }}
"""
FORMATS = ("float32", "float32", "float32"), ("bfloat16", "float32", "float32"), ("float32", "bfloat16", "float32")
FORMATS += ("float32", "float32", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16")
SCHEDULES = (
    '{ kind = "sync" }',
    '{ kind = "step_off", k = 1 }',
    '{ kind = "async", tau = 1 }',
    '{ kind = "async", tau = 4 }',
)
LOSSES = (
    '{ kind = "reverse_kl_mc", m = 4 }',
    '{ kind = "forward_kl", k = 32 }',
    '{ kind = "reverse_kl", cache = "hidden" }',
)
SECONDS = 1800
"""Time limit of a run."""


def students() -> Iterator[str]:
    """Yield the directories of all students; make the one without fifteen layers if it is missing."""
    ruined = ROOT / "build/real/ruined"
    if not ruined.exists():
        words = [sys.executable, ROOT / "tools/leave_out_layers.py", ROOT / "build/real/teacher.gguf", ruined]
        subprocess.run([*map(str, words), "--layers", *map(str, LEFT_OUT)], check=True)
    yield from ("build/real/student", "build/real/ruined", "runs/real/checkpoints/20", "runs/real/final")
    yield "build/real/teacher.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--formats", type=int, nargs="+", default=[*range(len(FORMATS))], help="rows of FORMATS")
    args = parser.parse_args()
    known, accused = [str(ROOT / each) for each in students()], 0
    for number in range(args.first, args.first + args.runs):
        rng, began = random.Random(number), time.monotonic()
        student, formats = known[number % len(known)], FORMATS[rng.choice(args.formats)]
        batch, schedule, loss = rng.choice((2, 4, 8)), rng.choice(SCHEDULES), rng.choice(LOSSES)
        temperature = rng.choice((0.7, 1.0))
        chosen = {"student": student, "formats": formats, "batch": batch, "schedule": schedule, "loss": loss}
        text = CONFIG.format(root=ROOT, seed=number, temperature=temperature, **chosen)
        lines = accusations(text)
        accused += bool(lines)
        about = f"{Path(student).name}, {'/'.join(formats)}, batch {batch}, {schedule}, {loss}, T {temperature}"
        print(f"{'ACCUSED' if lines else 'ok':7} {time.monotonic() - began:4.0f} s  {number}: {about}", flush=True)
        for line in lines:
            print(f"        {line}", flush=True)
    print(f"{accused} of {args.runs} honest runs were accused")


def accusations(config: str) -> list[str]:
    """Train; return what was said against sampler, teacher or student, and the error if the run ended with one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(config)
        words = [str(Path(sys.executable).with_name("slipstream")), "train", str(path), "--output", f"{folder}/run"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ran = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
    lines = [line for line in ran.stdout.splitlines() if "health:" in line or "cannot be trusted" in line]
    return lines + (ran.stderr.splitlines()[-3:] if ran.returncode else [])


if __name__ == "__main__":
    main()
