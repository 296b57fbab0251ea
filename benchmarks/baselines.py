"""CPU seconds of an update, by `policy.advantage`: grpo, opob (one pass more), opob_exact (a gradient of each answer).

    python benchmarks/baselines.py [CONFIG] [--repeats 5] [--batch 64]

The settings are those of configs/vcpo.toml, or of CONFIG, in one process. The student draws one batch of answers. Then
each learner makes one update from these answers in every repeat, in turn; the first repeat warms up. `sampling` draws
the batch again. CPU seconds are those of the process; medians and ranges over the repeats, and of the ratios to grpo.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from schedules import spread
from slipstream.config.file import load
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.plan.plan import plan
from slipstream.protocols import Engines, Learner
from slipstream.records import Batch, total
from slipstream.runtimes import inline

ADVANTAGES, SAMPLING = ("grpo", "opob", "opob_exact"), "sampling"
HERE = [("runtime.kind", "inline"), ("runtime.device", "cpu"), ("schedule.kind", "sync")]


def opened(path: str, batch: int, advantage: str) -> tuple[Engines, Callable[[], Coroutine[Any, Any, Batch]]]:
    """Return engines for one advantage, and what draws and grades a batch."""
    config = load(path, [*HERE, ("learner.batch_size", str(batch)), ("policy.advantage", advantage)], say=str)
    job = plan(config)
    engines = inline.open_engines(job.engines, job.tokenizer, say=str)

    async def draw() -> Batch:
        prompts = [job.prompts.at(number) for number in range(config.groups_per_update)]
        calls = [engines.samplers[0].generate(prompt, rollout_sampling(config)) for prompt in prompts]
        return Batch(tuple(await asyncio.gather(*calls)), 1)

    return engines, draw


async def update(learner: Learner, batch: Batch, number: int) -> None:
    batch = Batch(batch.groups, number)
    await learner.accumulate(batch, total(await learner.prepare(batch)))
    await learner.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", default=str(Path(__file__).parents[1] / "configs" / "vcpo.toml"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    made = {name: opened(args.config, args.batch, name) for name in ADVANTAGES}
    draw = made[ADVANTAGES[0]][1]
    batch = asyncio.run(draw())
    tokens = sum(header.trained_tokens for header in batch.headers)
    print(f"{len(batch.headers)} answers, {tokens:,} tokens")
    seconds: dict[str, list[float]] = {name: [] for name in (SAMPLING, *ADVANTAGES)}
    for repeat in range(args.repeats + 1):
        work = {name: partial(update, engines.learner, batch, repeat + 1) for name, (engines, _) in made.items()}
        for name, job in {SAMPLING: draw, **work}.items():
            began = time.process_time()
            asyncio.run(job())
            if repeat:
                seconds[name].append(time.process_time() - began)
    for name, values in seconds.items():
        ratios = [value / usual for value, usual in zip(values, seconds[ADVANTAGES[0]], strict=True)]
        print(f"{name:10}  {spread(values, '.3f')} s   {spread(ratios, '.2f')} times {ADVANTAGES[0]}")
    for engines, _ in made.values():
        engines.close()


if __name__ == "__main__":
    main()
