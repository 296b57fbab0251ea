"""Held-out KL and quality of answers against seconds, on the real pair: `sync`, `async` and TRL's DistillationTrainer.

    make real
    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 && /tmp/trl/bin/pip install trl==1.16.0
    python benchmarks/real_clock.py --trl-python /tmp/trl/bin/python [--updates 24] [--repeats 1]

All begin with the student of `make real` after its supervised start, and make the same updates: 16 own answers of at
most 64 tokens at temperature 0.7, and one AdamW step on the reverse KL over the whole vocabulary. All have two cores:
TRL and `sync` one process with two threads, `async` a process of one thread for each engine and two for the learner.
They take turns. The student is saved every few updates. Then all saved students are measured: forward KL on the
teacher's answers to held-out prompts, reverse KL on own answers, and the share of own answers that end. Seconds are
those of updates; for Slipstream they include saving. The results are lines of JSON in `--output`, and the figure is
docs/real_clock.svg. `--arms async` trains only `async` again, and `--arms` nothing: all are measured.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from fastest_format import fastest_format
from peers import cpu_seconds
from real import ended, kl, repeated
from real_models import Answer, answers, questions
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.model import load_model
from slipstream.models.resolve import model_path
from slipstream.run_dir.writing import read_lines

BATCH, MAX_TOKENS, TEMPERATURE, LR = 16, 64, 0.7, 1e-4
HELD_OUT, ANSWER = 48, 128
"""Number of held-out prompts, and maximum tokens of an answer to them."""
ARMS = {
    "sync": ("--schedule.kind", "sync", "--runtime.kind", "inline", "--runtime.threads", "2"),
    "async": ("--schedule.kind", "async", "--schedule.tau", "4", "--runtime.kind", "local", "--learner.threads", "2"),
}
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--start", type=Path, default=ROOT / "runs/real/checkpoints/20", help="the first student")
    parser.add_argument("--parts", type=Path, default=ROOT / "build/real")
    parser.add_argument("--output", type=Path, default=ROOT / "build/real_clock")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=fastest_format())
    parser.add_argument(
        "--arms", nargs="*", choices=("trl", *ARMS), default=("trl", *ARMS), help="train only these again"
    )
    args = parser.parse_args()
    start, teacher = args.start, model_path(str(args.parts / "teacher.gguf"))
    saved = [{"arm": name, "update": 0, "seconds": 0.0, "cpu": 0.0, "path": str(start)} for name in args.arms]
    args.output.mkdir(parents=True, exist_ok=True)
    trained = args.output / f"trained-{args.dtype}.json"
    if others := {"trl", *ARMS} - set(args.arms):
        saved += [line for line in json.loads(trained.read_text("utf-8")) if line["arm"] in others]
    for repeat in range(args.repeats):
        for name in args.arms:
            began, place = time.monotonic(), args.output / f"{name}-{repeat}"
            shutil.rmtree(place, ignore_errors=True)
            run = run_trl if name == "trl" else run_slipstream
            saved += [{"arm": name, "repeat": repeat, **each} for each in run(args, name, str(start), teacher, place)]
            trained.write_text(json.dumps(saved), "utf-8")
            print(f"{name}: {args.updates} updates, {time.monotonic() - began:.0f} s with start and end", flush=True)
    lines = list(measured(saved, teacher, args.parts / "held_out.jsonl"))
    (args.output / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (ROOT / "docs/real_clock.svg").write_text(picture(lines), "utf-8")


def run_slipstream(
    args: argparse.Namespace, name: str, student: str, teacher: str, place: Path
) -> Iterator[dict[str, Any]]:
    half = args.dtype
    words = ["train", str(HERE / "real_clock.toml"), "--student", student, "--teachers.main.model", teacher]
    words += ["--data.train", str(args.parts / "train.jsonl"), "--updates", str(args.updates), "--output", str(place)]
    words += ["--sampler.max_tokens", str(MAX_TOKENS), "--sampler.temperature", str(TEMPERATURE)]
    words += ["--learner.batch_size", str(BATCH), "--learner.lr", str(LR), "--checkpoint.every", str(args.every)]
    words += ["--sampler.dtype", half, "--teachers.main.dtype", half, "--learner.compute_dtype", half, *ARMS[name]]
    environment = os.environ | {"OMP_NUM_THREADS": ARMS[name][-1]}
    command, cpu = [str(Path(sys.executable).with_name("slipstream")), *words], [0.0]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as run:
        while run.poll() is None:
            time.sleep(0.5)
            cpu.append(cpu_seconds(run.pid))
    if run.returncode:
        raise SystemExit(f"{name} failed: {' '.join(command)}")
    lines = [line for line in read_lines(place / "metrics.jsonl") if line["kind"] == "train"]
    began = lines[0]["time"] - lines[0]["seconds/update"]
    for line in lines:
        if (update := int(line["update"])) % args.every == 0:
            path = place / ("final" if update == args.updates else f"checkpoints/{update}")
            yield {"update": update, "seconds": line["time"] - began, "cpu": max(cpu), "path": str(path)}


def run_trl(args: argparse.Namespace, name: str, student: str, teacher: str, place: Path) -> Iterator[dict[str, Any]]:
    words = ["--student", student, "--teacher", teacher, "--prompts", str(args.parts / "train.jsonl")]
    words += ["--output", str(place), "--updates", str(args.updates), "--every", str(args.every), "--threads", "2"]
    words += ["--batch", str(BATCH), "--max-tokens", str(MAX_TOKENS), "--temperature", str(TEMPERATURE)]
    words += ["--lr", str(LR), "--dtype", args.dtype]
    command = [args.trl_python, str(HERE / "real_clock_trl.py"), *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for update, seconds, cpu in json.loads(done.stdout.splitlines()[-1]):
        yield {"update": update, "seconds": seconds, "cpu": cpu, "path": str(place / str(update))}


def measured(saved: Sequence[dict[str, Any]], teacher: str, held_out: Path) -> Iterator[dict[str, Any]]:
    """Add to each saved student its distance to the teacher, and the quality of its answers."""
    tokenizer, asked = load_tokenizer(teacher), questions(held_out, HELD_OUT)
    teaching = load_model(teacher, dtype="float32", device="cpu")
    theirs = answers(teaching, tokenizer, asked, ANSWER, TEMPERATURE)
    known = dict[str, dict[str, float]]()
    for line in saved:
        if line["path"] not in known:
            student = load_model(line["path"], dtype="float32", device="cpu")
            own: list[Answer] = answers(student, tokenizer, asked, ANSWER, TEMPERATURE)
            known[line["path"]] = {
                "forward_kl": kl(teaching, student, theirs, TEMPERATURE),
                "reverse_kl": kl(student, teaching, own, TEMPERATURE),
                "ended": fmean(ended(own)),
                "repeated": fmean(repeated(own)),
            }
        found = line | known[line["path"]]
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}, flush=True)
        yield found


# --- the figure -------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP = 330, 200, 52, 34
COLORS = {"async": "#1b6ca8", "sync": "#2a9d5c", "trl": "#c2412d"}
TITLES = {"async": "Slipstream async", "sync": "Slipstream sync", "trl": "TRL 1.16"}


def panel(x0: int, title: str, key: str, lines: Sequence[dict[str, Any]], top: float, end: float) -> str:
    def at(line: dict[str, Any]) -> tuple[float, float]:
        return x0 + line["seconds"] / end * WIDTH, TOP + (1 - line[key] / top) * HEIGHT

    parts = [f'<text x="{x0 + WIDTH / 2}" y="18" text-anchor="middle" font-weight="bold" class="ytitle">{title}</text>']
    for part in range(5):
        x, y = x0 + part / 4 * WIDTH, TOP + (1 - part / 4) * HEIGHT
        parts.append(f'<path d="M{x:.1f} {TOP}v{HEIGHT}M{x0} {y:.1f}h{WIDTH}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{part / 4 * end:.0f}</text>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{part / 4 * top:.3g}</text>')
    middle = f'x="{x0 + WIDTH / 2}" text-anchor="middle"'
    parts.append(f'<text {middle} y="{TOP + HEIGHT + 34}" class="xtitle">seconds of training</text>')
    for number, (arm, color) in enumerate(COLORS.items()):
        points = [at(line) for line in lines if line["arm"] == arm and line.get("repeat", 0) == 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        y = TOP + HEIGHT - 44 + 16 * number
        parts.append(f'<path d="M{x0 + WIDTH - 130} {y - 4}h18" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{x0 + WIDTH - 106}" y="{y}">{TITLES[arm]}</text>')
    return "\n".join(parts)


def picture(lines: Sequence[dict[str, Any]]) -> str:
    end = 40 * math.ceil(max(line["seconds"] for line in lines) / 40)
    most = 0.2 * math.ceil(max(line["reverse_kl"] for line in lines) / 0.2)
    style = "text{font:12px sans-serif;fill:#222}.grid{stroke:#ddd;stroke-width:1}"
    second = 2 * LEFT + WIDTH + 12
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {second + WIDTH + 20} {TOP + HEIGHT + 44}">',
            f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>',
            panel(LEFT, "KL to the teacher on own held-out answers, nats", "reverse_kl", lines, most, end),
            panel(second, "share of own answers that end", "ended", lines, 1.0, end),
            "</svg>",
        ]
    )


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
