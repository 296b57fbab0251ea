"""The whole loop against TRL's DistillationTrainer: same student, teacher, prompts, lengths and cores.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 && /tmp/trl/bin/pip install trl==1.16.0
    python benchmarks/peers.py --trl-python /tmp/trl/bin/python [--updates 20] [--repeats 3] [--threads 2]

All roll out 64 prompts per update at temperature 1 (at most 80 tokens), score them with the teacher, and take one
AdamW step on the reverse KL in float32. The clocks cover the updates after the first three, in seconds and in CPU
seconds of all processes. The three take turns. TRL and the synchronous loop have one process with `--threads` threads;
async(4) has a process of one thread for each engine. The losses differ in one thing: TRL sums over the whole
vocabulary, Slipstream over 16 draws.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slipstream.data.prompts import load_rows
from slipstream.models.resolve import model_path
from slipstream.run_dir.writing import read_lines

BATCH, MAX_TOKENS, WARM_UP = 64, 80, 3
HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
UNITS = {"samples_per_s": "samples/s", "cpu_ms": "CPU ms per sample"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", required=True, help="the Python of an environment that has TRL")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    sync = f'schedule.kind = "sync"\nruntime = {{ kind = "inline", device = "cpu", threads = {args.threads} }}'
    overlapped = 'schedule = { kind = "async", tau = 4 }\nruntime = { kind = "local", device = "cpu", threads = 1 }'
    found: dict[str, list[dict[str, float]]] = {"trl": [], "sync": [], "async(4)": []}
    with tempfile.TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        rows = load_rows("builtin:arithmetic", limit=BATCH * args.updates)
        prompts.write_text("".join(json.dumps({"prompt": row.prompt}) + "\n" for row in rows))
        for repeat in range(args.repeats):
            found["trl"].append(run_trl(args.trl_python, prompts, args.updates, args.threads))
            for name, settings, threads in (("sync", sync, args.threads), ("async(4)", overlapped, 1)):
                output = Path(scratch) / f"{name}-{repeat}"
                found[name].append(run_slipstream(output, settings, prompts, args.updates, threads))
            last = {name: runs[-1]["samples_per_s"] for name, runs in found.items()}
            print(", ".join(f"{name} {speed:.1f}" for name, speed in last.items()), "samples/s", flush=True)
    print(f"\nmedians of {args.repeats}, {args.threads} thread(s), {args.updates - WARM_UP} updates of {BATCH} samples")
    for unit, title in UNITS.items():
        for name, runs in found.items():
            ratios = [run[unit] / trl[unit] for run, trl in zip(runs, found["trl"], strict=True)]
            values = [run[unit] for run in runs]
            print(f"{name:10} {spread(values, '.1f'):28} {title:18} {spread(ratios, '.2f')} of TRL")


def spread(values: list[float], form: str) -> str:
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle} [{low} … {high}]"


def run_slipstream(output: Path, settings: str, prompts: Path, updates: int, threads: int) -> dict[str, float]:
    config = output.with_suffix(".toml")
    config.write_text(
        f"""
        student = "builtin:student"
        updates = {updates}
        data.train = "{prompts}"
        teachers.main.model = "builtin:teacher"
        sampler = {{ max_tokens = {MAX_TOKENS}, slots = {BATCH} }}
        loss = {{ kind = "reverse_kl_mc", m = 16 }}
        learner = {{ batch_size = {BATCH}, lr = 1e-3 }}
        {settings}
        """
    )
    command = [str(Path(sys.executable).parent / "slipstream"), "train", str(config), "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    cpu = list[float]()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as run:
        for least in (WARM_UP, updates):
            while run.poll() is None and written(output) < least:
                time.sleep(0.01)
            cpu.append(cpu_seconds(run.pid))
        _, errors = run.communicate()
    if run.returncode:
        raise SystemExit(errors.decode())
    lines = read_lines(output / "metrics.jsonl")
    seconds, samples = lines[-1]["time"] - lines[WARM_UP - 1]["time"], sum(line["samples"] for line in lines[WARM_UP:])
    return {"samples_per_s": samples / seconds, "cpu_ms": 1000 * (cpu[1] - cpu[0]) / samples}


def written(output: Path) -> int:
    """Return the number of updates that a run has written."""
    metrics = output / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process and of all its descendants so far."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has just ended
            continue
        stats[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    total, family = 0.0, {process}
    while family:
        total += sum(stats[each][1] for each in family if each in stats)
        family = {each for each, (parent, _) in stats.items() if parent in family}
    return total


def run_trl(python: str, prompts: Path, updates: int, threads: int) -> dict[str, Any]:
    command = [python, str(HERE / "peers_trl.py"), "--prompts", str(prompts), "--updates", str(updates)]
    command += ["--student", model_path("builtin:student"), "--teacher", model_path("builtin:teacher")]
    command += ["--batch", str(BATCH), "--max-tokens", str(MAX_TOKENS), "--threads", str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
