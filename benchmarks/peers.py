"""The whole loop against TRL's DistillationTrainer: same student, teacher, prompts, lengths and cores.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 && /tmp/trl/bin/pip install trl==1.16.0
    python benchmarks/peers.py --trl-python /tmp/trl/bin/python [--updates 20] [--repeats 3] [--threads 2]
    python benchmarks/peers.py --trl-python /tmp/trl/bin/python --real build/real [--updates 4]

All roll out 64 prompts per update at temperature 1 (at most 80 tokens), score them with the teacher, and take one
AdamW step on the reverse KL in float32. The clocks cover the updates after the first three, in seconds and in CPU
seconds of all processes. All take turns. TRL and the synchronous loop have one process with `--threads` threads;
async(4) has a process of one thread for each engine. The losses differ in one thing: TRL sums over the whole
vocabulary, Slipstream over 16 draws.

`--real` takes teacher, student and prompts of `make real`: 8 prompts per update, at most 64 tokens, one update before
the clocks start. It adds TRL with two threads, and all programs in bfloat16. async(4) makes six updates more than the
others, and its clocks stop four updates before the end, because rollouts of the last updates start early.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.data.prompts import load_rows
from slipstream.models.resolve import model_path
from slipstream.run_dir.writing import read_lines

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
UNITS = {"samples_per_s": "samples/s", "cpu_ms": "CPU ms per sample"}
EXTRA, TAIL = 6, 4
"""Updates that async(4) makes beyond `--updates` with real models, and the number of those after its clocks."""


@dataclass(frozen=True)
class Case:
    """Models, prompts and sizes of a comparison."""

    student: str
    teacher: str
    prompts: list[str]
    batch: int = 64
    max_tokens: int = 80
    lr: float = 1e-3
    chat: bool = False
    warm_up: int = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", required=True, help="the Python of an environment that has TRL")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--real", type=Path, help="directory of teacher, student and train.jsonl")
    parser.add_argument("--only", nargs="+", help="names of the programs to compare, as the output shows them")
    args = parser.parse_args()
    case = real_case(args.real) if args.real else arithmetic_case(args.updates)
    found = dict[str, list[dict[str, float]]]()
    with tempfile.TemporaryDirectory() as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in case.prompts))
        runs = contenders(case, args, prompts)
        runs = {name: runs[name] for name in args.only or runs}
        for repeat in range(args.repeats):
            for number, (name, run) in enumerate(runs.items()):
                found.setdefault(name, []).append(run(Path(scratch) / f"{number}-{repeat}"))
                last, load = found[name][-1], os.getloadavg()[0]
                speeds = ", ".join(f"{last[unit]:.2f} {title}" for unit, title in UNITS.items())
                print(f"{name}: {speeds}; load {load:.1f}", flush=True)
    print(f"\nmedians of {args.repeats}, {args.threads} thread(s), {args.updates} updates of {case.batch} samples")
    first = next(iter(found))
    for unit, title in UNITS.items():
        for name, results in found.items():
            ratios = [run[unit] / other[unit] for run, other in zip(results, found[first], strict=True)]
            values = [run[unit] for run in results]
            form = ".0f" if min(values) > 100 else ".1f" if min(values) > 10 else ".3f"
            print(f"{name:18} {spread(values, form):28} {title:18} {spread(ratios, '.2f')} of {first}")


def arithmetic_case(updates: int) -> Case:
    rows = load_rows("builtin:arithmetic", limit=64 * updates)
    return Case(model_path("builtin:student"), model_path("builtin:teacher"), [row.prompt for row in rows])


def real_case(folder: Path) -> Case:
    teacher = folder / "teacher.gguf" if (folder / "teacher.gguf").exists() else folder / "teacher"
    prompts = [row.prompt for row in load_rows(str(folder / "train.jsonl"))]
    sizes: dict[str, Any] = {"batch": 8, "max_tokens": 64, "lr": 1e-5, "chat": True, "warm_up": 1}
    return Case(str(folder / "student"), model_path(str(teacher)), prompts, **sizes)


def contenders(case: Case, args: argparse.Namespace, prompts: Path) -> dict[str, Callable[[Path], dict[str, float]]]:
    """Return the programs to compare by name, as functions of a directory for their output; the first one is TRL."""
    inline = 'schedule.kind = "sync"\nruntime = {{ kind = "inline", device = "cpu", threads = {} }}'.format
    overlapped = 'schedule = { kind = "async", tau = 4 }\nruntime = { kind = "local", device = "cpu", threads = 1 }'
    theirs = partial(run_trl, args.trl_python, case, prompts, args.updates)
    ours = partial(run_slipstream, case=case, prompts=prompts, updates=args.updates)
    extra = {"extra": EXTRA, "tail": TAIL} if args.real else {}
    runs: dict[str, Callable[[Path], dict[str, float]]] = {
        "trl": partial(theirs, args.threads),
        "sync": partial(ours, settings=inline(args.threads), threads=args.threads),
        "async(4)": partial(ours, settings=overlapped, threads=1, **extra),
    }
    if args.real:
        runs["trl, 2 threads"] = partial(theirs, 2)
        runs["trl, bfloat16"] = partial(theirs, args.threads, options=("--bfloat16",))
        inlined = inline(args.threads)
        runs["sync, bfloat16"] = partial(ours, settings=inlined, threads=args.threads, dtype="bfloat16")
        runs["async(4), bfloat16"] = partial(ours, settings=overlapped, threads=1, dtype="bfloat16", **extra)
    return runs


def spread(values: list[float], form: str) -> str:
    low, middle, high = (format(f(values), form) for f in (min, statistics.median, max))
    return f"{middle} [{low} … {high}]"


def run_slipstream(
    output: Path,
    *,
    case: Case,
    settings: str,
    prompts: Path,
    updates: int,
    threads: int,
    dtype: str = "float32",
    extra: int = 0,
    tail: int = 0,
) -> dict[str, float]:
    config = output.with_suffix(".toml")
    config.write_text(
        f"""
        student = "{case.student}"
        updates = {updates + extra}
        data = {{ train = "{prompts}", chat = {str(case.chat).lower()} }}
        teachers.main = {{ model = "{case.teacher}", dtype = "{dtype}" }}
        sampler = {{ max_tokens = {case.max_tokens}, dtype = "{dtype}" }}
        loss = {{ kind = "reverse_kl_mc", m = 16 }}
        learner = {{ batch_size = {case.batch}, lr = {case.lr}, compute_dtype = "{dtype}" }}
        {settings}
        """
    )
    command = [str(Path(sys.executable).parent / "slipstream"), "train", str(config), "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    cpu, last = list[float](), updates + extra - tail
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as run:
        for least in (case.warm_up, last):
            while run.poll() is None and written(output) < least:
                time.sleep(0.01)
            cpu.append(cpu_seconds(run.pid))
        _, errors = run.communicate()
    if run.returncode:
        raise SystemExit(errors.decode())
    lines = read_lines(output / "metrics.jsonl")[:last]
    seconds = lines[-1]["time"] - lines[case.warm_up - 1]["time"]
    samples = sum(line["samples"] for line in lines[case.warm_up :])
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


def run_trl(
    python: str, case: Case, prompts: Path, updates: int, threads: int, output: Path, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    command = [python, str(HERE / "peers_trl.py"), "--prompts", str(prompts), "--updates", str(updates), *options]
    command += ["--student", case.student, "--teacher", case.teacher, "--lr", str(case.lr), *["--chat"] * case.chat]
    command += ["--batch", str(case.batch), "--max-tokens", str(case.max_tokens), "--threads", str(threads)]
    done = subprocess.run([*command, "--warm-up", str(case.warm_up)], check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
