"""CPU seconds of sampler, scorer and learner on the real model, and their share of the machine's GEMM speed.

    python benchmarks/stages.py build/real [--dtype bfloat16] [--updates 3]
    python benchmarks/stages.py build/real --shared 512 8 64

One thread for each stage, 8 prompts, at most 64 tokens, 16 draws. Operations are those that the task needs: two for
each weight of the layers and token, two for each weight of the head and trained token, three times as many for the
learner. Products have the speed of `torch.nn.functional.linear` in a perceptron. The first update warms up.

`--shared PROMPT GROUP RESPONSE` compares passes over a group instead: with the prompt computed once, and with every
response.
"""

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.config.file import parse
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.model import load_model
from slipstream.engines.native.packing import pack
from slipstream.engines.native.rows import Rows, placeholder, use_rows
from slipstream.engines.native.scorer import NativeScorer
from slipstream.estimators.logprobs import logprobs_at
from slipstream.plan.plan import plan
from slipstream.records import ONE_COUNT, Batch, total
from slipstream.runtimes.build import build_learner, build_sampler, build_scorer

PROMPTS, TOKENS, DRAWS = 8, 64, 16
GEMM_ROWS, SECONDS = 600, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="directory of teacher, student and train.jsonl, made by `make real`")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--shared", type=int, nargs=3, metavar=("PROMPT", "GROUP", "RESPONSE"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.folder
    teacher = str(folder / "teacher.gguf" if (folder / "teacher.gguf").exists() else folder / "teacher")
    if args.shared:
        compare_shared(teacher, str(folder / "student"), *args.shared)
    else:
        asyncio.run(measure(teacher, folder, args.dtype, args.updates))
    print(f"load {os.getloadavg()[0]:.1f}")


def gemm_speed(width: int, inner: int, dtype: str) -> float:
    """Return operations per CPU second of `linear`, at the sizes of a perceptron."""
    x, weight = (torch.randn(rows, width, dtype=getattr(torch, dtype)) for rows in (GEMM_ROWS, inner))
    best, begun = float("inf"), time.process_time()
    while time.process_time() - begun < SECONDS:
        before = time.process_time()
        torch.nn.functional.linear(x, weight)
        best = min(best, time.process_time() - before)
    return 2 * GEMM_ROWS * width * inner / best


async def measure(teacher: str, folder: Path, dtype: str, updates: int) -> None:
    tree: dict[str, Any] = {
        "student": str(folder / "student"),
        "updates": updates,
        "data": {"train": str(folder / "train.jsonl"), "chat": True},
        "teachers": {"main": {"model": teacher, "dtype": dtype}},
        "sampler": {"max_tokens": TOKENS, "slots": PROMPTS, "dtype": dtype},
        "loss": {"kind": "reverse_kl_mc", "m": DRAWS},
        "learner": {"batch_size": PROMPTS, "lr": 1e-5, "compute_dtype": dtype},
        "schedule": {"kind": "sync"},
        "runtime": {"kind": "inline", "device": "cpu", "threads": 1},
    }
    made = plan(parse(tree))
    sampler = build_sampler(made.engines.sampler, made.tokenizer)
    scorer: Any = build_scorer(made.engines.scorers["main"], made.tokenizer)
    learner: Any = build_learner(made.engines.learner, made.tokenizer)
    assert isinstance(scorer, NativeScorer) and isinstance(learner, NativeLearner)
    head = scorer.lm.head.weight.numel()
    sizes = [sum(each.numel() for each in engine.lm.model.parameters()) - head for engine in (learner, scorer)]
    found = dict[str, list[tuple[float, float]]]()
    for update in range(1, updates + 1):
        prompts = [made.prompts.at(number) for number in range((update - 1) * PROMPTS, update * PROMPTS)]
        marks = [time.process_time()]
        groups = await asyncio.gather(*[sampler.generate(prompt, made.sampling) for prompt in prompts])
        marks.append(time.process_time())
        scored = await asyncio.gather(*[scorer.score(group) for group in groups])
        marks.append(time.process_time())
        batch = Batch(tuple(scored), update)
        counts = total(await learner.prepare(batch))
        await learner.accumulate(batch, ONE_COUNT)
        marks.append(time.process_time())
        await learner.step(counts)
        marks.append(time.process_time())
        trained = sum(handle.header.tokens for group in scored for handle in group)
        tokens = trained + sum(handle.header.prompt_tokens for group in scored for handle in group)
        of_student, of_teacher = (2 * (size * tokens + head * trained) for size in sizes)
        work = {"sampler": of_student, "scorer": of_teacher, "learner": 3 * of_student, "optimizer step": 0}
        for (name, operations), seconds in zip(work.items(), np.diff(marks), strict=True):
            found.setdefault(name, []).append((float(seconds), operations / float(seconds)))
    config = learner.lm.model.config
    speed = gemm_speed(config.hidden_size, config.intermediate_size, dtype)
    print(f"products in {dtype}: {speed / 1e9:.0f} GFLOP/s")
    for name, values in found.items():
        seconds, reached = (statistics.median(column) for column in zip(*values[1:], strict=True))
        print(f"{name:16} {seconds:6.2f} CPU s   {reached / 1e9:6.0f} GFLOP/s   {reached / speed:6.0%}")
    for engine in (sampler, scorer, learner):
        engine.close()


def compare_shared(teacher: str, student: str, prompt: int, group: int, response: int) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, prompt)
    rollouts = [placeholder(tokens, rng.integers(0, 1000, response), number=0, index=i) for i in range(group)]
    for name, path, learns in (("teacher", teacher, False), ("student, with gradient", student, True)):
        lm, seconds = load_model(path, dtype="float32", device="cpu"), dict[bool, list[float]]()
        use_rows(lm)
        for shared in (False, True) * 3:
            before = time.process_time()
            with torch.set_grad_enabled(learns):
                for batch in pack(rollouts, budget=4096, hidden=lm.head.weight.shape[1], shared_prompt=shared):
                    hidden_NH = Rows(rollouts, batch, lm.device).hidden(lm.backbone)
                    ids = torch.from_numpy(np.concatenate([rollouts[i].tokens for i in batch.members]))[:, None]
                    logp_N1 = logprobs_at(hidden_NH, lm.head.weight, ids)
                    if learns:
                        logp_N1.sum().backward()  # type: ignore[no-untyped-call]
            seconds.setdefault(shared, []).append(time.process_time() - before)
            lm.model.zero_grad()
        apart, together = (statistics.median(seconds[shared]) for shared in (False, True))
        print(f"{name}: {apart:.1f} CPU s with a prompt for each response, {together:.1f} with one prompt")


if __name__ == "__main__":
    main()
