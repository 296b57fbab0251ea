"""Native sampler against vLLM on the same CPU: same model, prompts and lengths, 64 sequences at a time.

    python benchmarks/engines.py --vllm-python .venv-vllm/bin/python [--prompts 512] [--repeats 5]
    python benchmarks/engines.py --vllm-python .venv-vllm/bin/python --train [--updates 100] [--seeds 3]

vLLM runs in a process of its own interpreter (`make test-vllm` makes one), the native sampler in this one. They take
turns on the built-in student, one thread each for the model, at temperature 1 until the end token, with 1 and 16 draws
at every position; the first round warms up; medians and ranges over the others. vLLM's own processes for requests and
scheduling come on top of its thread: CPU seconds per thousand tokens count all of them.

With --train the asynchronous pipeline trains the student in vLLM's interpreter, once with each sampler for
every seed, and the accuracy of both students on held-out prompts and the wall-clock time are printed.
"""

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.config.data import DataConfig
from slipstream.data.prompts import Prompts, load_rows
from slipstream.data.tokenizers import encode_rows, load_tokenizer, stop_ids
from slipstream.engines.native.model import load_model
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.protocols import Sampler, Sampling
from slipstream.records import Prompt

CONCURRENT, MAX_TOKENS, STUDENT, MANY = 64, 80, "builtin:student", 16
ENGINES = ("native", "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--arm", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        serve(prompts_of(args.prompts))
    elif args.arm:
        print(json.dumps(trained(args.arm, updates=args.updates, seed=args.seeds)), flush=True)
    elif args.train:
        compare_training(args)
    else:
        compare_speed(args)


def prompts_of(number: int) -> list[Prompt]:
    tokenizer = load_tokenizer(STUDENT)
    rows = load_rows("builtin:arithmetic", split="eval", limit=number)
    source = Prompts(rows, encode_rows(rows, tokenizer, DataConfig()), seed=0, shuffle=True)
    return [source.at(index) for index in range(len(rows))]


def compare_speed(args: argparse.Namespace) -> None:
    prompts = prompts_of(args.prompts)
    lm = load_model(STUDENT, dtype="float32", device="cpu")
    stop = stop_ids(load_tokenizer(STUDENT), lm.model.generation_config)
    native = NativeSampler(lm, SamplerSettings(slots=CONCURRENT), stop_ids=stop)
    command = [args.vllm_python, __file__, "--serve", "--prompts", str(args.prompts)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        versions = answer(child)
        print(f"native: Python {platform.python_version()}, torch {torch.__version__}; vllm: {versions['said']}")
        print(f"{STUDENT}, {len(prompts)} prompts, {CONCURRENT} at a time, up to {MAX_TOKENS} tokens")
        work: dict[str, Callable[[int], dict[str, Any]]] = {
            "native": lambda draws: measured(native, prompts, draws),
            "vllm": lambda draws: asked(child, draws),
        }
        for draws in (1, MANY):
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
            for repeat in range(args.repeats + 1):
                for name in ENGINES:
                    one = work[name](draws)
                    if repeat:
                        found[name].append(one)
            report(draws, found)
        native.close()
        assert child.stdin is not None
        child.stdin.close()


def report(draws: int, found: dict[str, list[dict[str, Any]]]) -> None:
    speeds = {name: [one["tokens"] / one["seconds"] for one in ones] for name, ones in found.items()}
    for name, values in speeds.items():
        cost = statistics.median(1000 * one["cpu"] / one["tokens"] for one in found[name])
        print(
            f"{draws:2} draws, {name:6} {statistics.median(values):9,.0f} tok/s   [{min(values):,.0f} … "
            f"{max(values):,.0f}]   {cost:.3f} CPU s per 1,000 tokens"
        )
    ratios = [ours / theirs for ours, theirs in zip(speeds["native"], speeds["vllm"], strict=True)]
    print(f"{draws:2} draws, native / vllm: {statistics.median(ratios):.2f}   [{min(ratios):.2f} … {max(ratios):.2f}]")


def asked(child: subprocess.Popen[str], draws: int) -> dict[str, Any]:
    assert child.stdin is not None
    print(draws, file=child.stdin, flush=True)
    return answer(child)


def answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that is ours; vLLM prints, too."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise SystemExit(f"{' '.join(map(str, child.args))} ended")  # type: ignore[arg-type]


def measured(sampler: Sampler, prompts: list[Prompt], draws: int) -> dict[str, Any]:
    """One round over all prompts."""

    async def work() -> int:
        jobs = [sampler.generate(prompt, Sampling(max_tokens=MAX_TOKENS, draws=draws)) for prompt in prompts]
        return sum(handle.header.tokens for group in await asyncio.gather(*jobs) for handle in group)

    cpu, began = cpu_seconds(), time.perf_counter()
    tokens = asyncio.run(work())
    return {"tokens": tokens, "seconds": time.perf_counter() - began, "cpu": cpu_seconds() - cpu}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, and in vLLM's interpreter of those that it started."""
    import psutil

    me = psutil.Process()
    others = me.children(recursive=True) if "--serve" in sys.argv else []
    times = [process.cpu_times() for process in (me, *others)]
    return sum(time.user + time.system for time in times)


def serve(prompts: list[Prompt]) -> None:
    """In vLLM's interpreter: a round for every line of input, which holds the number of draws."""
    from slipstream.engines.vllm.core import Settings, version
    from slipstream.engines.vllm.sampler import VllmSampler

    stop = stop_ids(load_tokenizer(STUDENT), None)
    sampler = VllmSampler(
        Settings(STUDENT, "float32", CONCURRENT, device="cpu"),
        SamplerSettings(slots=CONCURRENT, draws=MANY),
        stop_ids=stop,
    )
    said = f"Python {platform.python_version()}, torch {torch.__version__}, vLLM {version()}, numpy {np.__version__}"
    print(json.dumps({"said": said}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measured(sampler, prompts, int(line))), flush=True)
    sampler.close()


# --- training --------------------------------------------------------------------------------------------------------


def compare_training(args: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    for seed in range(args.seeds):
        for name in ENGINES:
            command = [args.vllm_python, __file__, "--arm", name, "--updates", str(args.updates), "--seeds", str(seed)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                found[name].append(answer(child))
            print(f"seed {seed}, {name:6}", show(found[name][-1]), flush=True)
    for name, runs in found.items():
        print(f"{name:6} median", show({key: statistics.median(run[key] for run in runs) for key in runs[0]}))


def show(run: dict[str, Any]) -> str:
    return (
        f"accuracy {run['accuracy']:.3f} from {run['before']:.3f}; {run['seconds']:.0f} s, {run['tokens_per_s']:,.0f} "
        f"trained tok/s, pause {1000 * run['pause']:.0f} ms, lag {run['lag']:.2f}, fresh probabilities within "
        f"{run['mismatch']:.1e}"
    )


def trained(engine: str, *, updates: int, seed: int) -> dict[str, float]:
    """One run of the asynchronous pipeline in this interpreter."""
    from slipstream.config.file import parse
    from slipstream.metrics import throughput
    from slipstream.pipeline.run import Run
    from slipstream.plan.plan import plan
    from slipstream.run_dir.writing import RunLog, read_lines
    from slipstream.runtimes import local

    config = parse(
        {
            "student": STUDENT,
            "updates": updates,
            "seed": seed,
            "teachers": {"main": {"model": "builtin:teacher"}},
            "sampler": {"engine": engine, "max_tokens": MAX_TOKENS, "slots": CONCURRENT},
            "learner": {"batch_size": 64, "lr": 1e-3},
            "data": {"eval": "builtin:arithmetic"},
            "task": {"reward": "exact"},
            "eval": {"every": updates, "prompts": 200},
            "schedule": {"kind": "async", "tau": 4},
        }
    )
    job = plan(config)
    with tempfile.TemporaryDirectory() as path:
        engines = local.open_engines(job.engines, job.tokenizer, say=lambda _: None)
        began = time.perf_counter()
        try:
            with RunLog.create(config, Path(path) / "run") as log:
                asyncio.run(Run(config, engines, job.prompts, log, held_out={"": job.held_out}).train())
        finally:
            engines.close()
        seconds = time.perf_counter() - began
        lines = read_lines(Path(path) / "run" / "metrics.jsonl")
    rows, evals = [[line for line in lines if line["kind"] == kind] for kind in ("train", "eval")]
    pauses = [
        row["publish/wait"] + row["publish/load"] + row["publish/rebuild"] for row in rows if "publish/wait" in row
    ]
    return {
        "accuracy": evals[-1]["accuracy"],
        "before": evals[0]["accuracy"],
        "seconds": seconds,
        "tokens_per_s": throughput([row["tokens"] for row in rows], [row["time"] for row in rows], warmup=6),
        "pause": statistics.median(pauses),
        "lag": statistics.fmean(row["lag/mean"] for row in rows),
        "mismatch": rows[0]["drift/probs_diff_max"],
    }


if __name__ == "__main__":
    main()
