"""The whole synchronous loop against TRL's DistillationTrainer: same student, teacher, prompts, lengths and threads.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 && /tmp/trl/bin/pip install trl==1.16.0
    python benchmarks/peers.py --trl-python /tmp/trl/bin/python [--updates 20] [--repeats 3] [--threads 1]

Both roll out 64 prompts per update at temperature 1 (at most 80 tokens), score them with the teacher, and take one
AdamW step on the reverse KL in float32; both clocks cover the updates after the first three. They take turns, and each
runs in a process of its own. The losses differ in one thing: TRL sums over the whole vocabulary, Slipstream over 16
draws.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from slipstream.data.prompts import load_rows
from slipstream.models.resolve import model_path
from slipstream.run_dir.writing import read_lines

BATCH, MAX_TOKENS, WARM_UP = 64, 80, 3
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", required=True, help="the Python of an environment that has TRL")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    speeds: dict[str, list[float]] = {"slipstream": [], "trl": []}
    with tempfile.TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        rows = load_rows("builtin:arithmetic", limit=BATCH * args.updates)
        prompts.write_text("".join(json.dumps({"prompt": row.prompt}) + "\n" for row in rows))
        for repeat in range(args.repeats):
            ours = run_slipstream(Path(scratch) / str(repeat), prompts, args.updates, args.threads)
            theirs = run_trl(args.trl_python, prompts, args.updates, args.threads)
            for name, found in (("slipstream", ours), ("trl", theirs)):
                print(
                    f"{name:10} {found['samples_per_s']:7.1f} samples/s {found['tokens_per_s']:9,.0f} tok/s", flush=True
                )
                speeds[name].append(found["samples_per_s"])
    print(f"\nmedians of {args.repeats}, {args.threads} thread(s), {args.updates - WARM_UP} updates of {BATCH} samples")
    for name, values in speeds.items():
        print(f"{name:10} {statistics.median(values):7.1f} samples/s   [{min(values):.1f} … {max(values):.1f}]")
    ratios = [a / b for a, b in zip(speeds["slipstream"], speeds["trl"], strict=True)]
    print(f"ratio      {statistics.median(ratios):7.2f}             [{min(ratios):.2f} … {max(ratios):.2f}]")


def run_slipstream(output: Path, prompts: Path, updates: int, threads: int) -> dict[str, float]:
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
        schedule.kind = "sync"
        runtime = {{ device = "cpu", threads = {threads} }}
        """
    )
    command = [str(Path(sys.executable).parent / "slipstream"), "train", str(config), "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    lines = read_lines(output / "metrics.jsonl")
    seconds = lines[-1]["time"] - lines[WARM_UP - 1]["time"]
    timed = lines[WARM_UP:]
    return {name + "_per_s": sum(line[name] for line in timed) / seconds for name in ("samples", "tokens")}


def run_trl(python: str, prompts: Path, updates: int, threads: int) -> dict[str, Any]:
    command = [python, str(HERE / "peers_trl.py"), "--prompts", str(prompts), "--updates", str(updates)]
    command += ["--student", model_path("builtin:student"), "--teacher", model_path("builtin:teacher")]
    command += ["--batch", str(BATCH), "--max-tokens", str(MAX_TOKENS), "--threads", str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
