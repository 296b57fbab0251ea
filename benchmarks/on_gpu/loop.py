"""The whole loop in one process on one device: sync against async(4), with and without a CUDA stream per engine."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch

from on_gpu.report import SHAPES, Report, Setting
from slipstream.config.file import parse
from slipstream.data.tokenizers import load_tokenizer
from slipstream.metrics import throughput
from slipstream.models.resolve import model_path
from slipstream.pipeline.run import Run
from slipstream.plan.plan import plan
from slipstream.protocols import Engines
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes import inline

SCHEDULES: dict[str, dict[str, Any]] = {"sync": {"kind": "sync"}, "async(4)": {"kind": "async", "tau": 4}}


def stage(setting: Setting, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = [saved(setting, Path(folder) / name, seed) for seed, name in enumerate(("student", "teacher"))]
        found = {}
        for streams in setting.of((False, True), (False,)):
            for name, schedule in SCHEDULES.items():
                what = f"{name}{', a stream per engine' * streams}"
                speed, lag = run(setting, models, schedule, streams=streams)
                found[what] = speed
                note = f"mean lag {lag:.2f} updates; {speed / found['sync']:.2f}× sync"
                report.number(what, speed, "tokens/s", note=note)


def saved(setting: Setting, path: Path, seed: int) -> str:
    """Write a model with random weights and the tokenizer of the built-in student, whose ids are a part of its own."""
    lm = setting.model(SHAPES[0], seed=seed)
    lm.model.save_pretrained(path)
    load_tokenizer(model_path("builtin:student")).save_pretrained(path)
    return str(path)


def run(setting: Setting, models: list[str], schedule: dict[str, Any], *, streams: bool) -> tuple[float, float]:
    """Train a few updates; return trained tokens per second after the first two, and the mean lag."""
    student, teacher = models
    dtype = str(setting.dtype).removeprefix("torch.")
    size, tokens, updates = setting.of((64, 192, 7), (4, 6, 4))
    config = parse(
        {
            "student": student,
            "updates": updates,
            "teachers": {"main": {"model": teacher, "dtype": dtype, "recheck": 0.0}},
            "sampler": {"max_tokens": tokens, "slots": size, "dtype": dtype},
            "learner": {"batch_size": size, "lr": 1e-6, "dtype": dtype},
            "schedule": schedule,
            "runtime": {"kind": "inline", "device": str(setting.device)},
            "health": {"stop": False},
            "checkpoint": {"every": 0},
        }
    )
    job = plan(config)
    with tempfile.TemporaryDirectory() as folder:
        engines = inline.open_engines(job.engines, job.tokenizer, say=lambda _: None)
        try:
            if streams:
                give_streams(engines)
            with RunLog.create(config, Path(folder) / "run") as log:
                asyncio.run(Run(config, engines, job.prompts, log, say=lambda _: None).train())
        finally:
            engines.close()
        lines = [line for line in read_lines(Path(folder) / "run" / "metrics.jsonl") if line["kind"] == "train"]
    speed = throughput([line["tokens"] for line in lines], [line["time"] for line in lines], warmup=2)
    return speed, sum(line["lag/mean"] for line in lines) / len(lines)


def give_streams(engines: Engines) -> None:
    """Let the thread of each engine launch its kernels on a stream of its own.

    Engines exchange host memory only, and every copy to the host waits for its own stream, so nothing else changes.
    """
    torch.cuda.synchronize()
    native: list[Any] = [engines.learner, *(sampler.sampler for sampler in engines.samplers)]  # type: ignore[attr-defined]
    native += [scorer for group in engines.scorers.values() for scorer in group]
    for engine in native:
        engine.thread.submit(torch.cuda.set_stream, torch.cuda.Stream()).result()
