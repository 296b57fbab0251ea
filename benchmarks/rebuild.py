"""Cost of a rebuild at every publish for the native sampler.

    python benchmarks/rebuild.py [--group 1] [--repeats 5]

The built-in student answers 512 samples of heavy-tailed arithmetic, 64 at a time, 16 draws, and takes in weights (its
own) after every 64 responses. CPU seconds of the engine's thread; medians and ranges over the repeats.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from schedules import spread
from slipstream.config.data import DataConfig
from slipstream.data.prompts import Prompts, load_rows
from slipstream.data.tokenizers import encode_rows, load_tokenizer, stop_ids
from slipstream.engines.native.model import load_model
from slipstream.engines.native.sampling.decoding import Decoder
from slipstream.engines.native.sampling.requests import FutureResult
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.engines.weights import export_weights
from slipstream.protocols import Sampling, WeightsRef
from slipstream.records import Prompt

MODEL, SAMPLES, SLOTS, BATCH, AHEAD = "builtin:student", 512, 64, 64, 256


class Timed(NativeSampler):
    rebuilding = working = rebuilt = 0.0

    def _read_again(self, slots: Sequence[int], decoder: Decoder) -> None:
        began = time.thread_time()
        super()._read_again(slots, decoder)
        self.rebuilding += time.thread_time() - began
        self.rebuilt += len(slots) > 0

    def _step(self) -> list[FutureResult]:
        began = time.thread_time()
        told = super()._step()
        self.working += time.thread_time() - began
        return told


async def work(sampler: Timed, prompts: list[Prompt], sampling: Sampling, weights: WeightsRef) -> int:
    """Groups as credits allow, and a publish whenever another batch of responses is there; returns the tokens."""
    credits, ready = asyncio.Semaphore(AHEAD // sampling.group), asyncio.Semaphore(0)

    async def one(prompt: Prompt) -> int:
        async with credits:
            group = await sampler.generate(prompt, sampling)
        ready.release()
        return sum(len(handle.body.tokens) for handle in group)

    async def publish() -> None:
        for version in range(1, SAMPLES // BATCH):
            for _ in range(BATCH // sampling.group):
                await ready.acquire()
            await sampler.publish(replace(weights, version=version), "keep")

    *tokens, _ = await asyncio.gather(*[one(prompt) for prompt in prompts], publish())
    return sum(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, lm = load_tokenizer(MODEL), load_model(MODEL, dtype="float32", device="cpu")
    rows = load_rows("builtin:arithmetic", split="eval", limit=SAMPLES // args.group)
    source = Prompts(rows, encode_rows(rows, tokenizer, DataConfig()), seed=0, shuffle=True)
    prompts = [source.at(number) for number in range(len(rows))]
    sampler = Timed(lm, SamplerSettings(slots=SLOTS), stop_ids=stop_ids(tokenizer, lm.model.generation_config))
    sampling, weights = Sampling(max_tokens=80, group=args.group, draws=16), export_weights(lm.model, "float32")
    found: dict[str, list[float]] = {"µs per token": [], "ms per rebuild": [], "% of it in rebuilds": []}
    for repeat in range(args.repeats + 1):  # the first one warms up
        sampler.rebuilding = sampler.working = sampler.rebuilt = 0.0
        tokens = asyncio.run(work(sampler, prompts, sampling, weights))
        if repeat:
            found["µs per token"].append(1e6 * sampler.working / tokens)
            found["ms per rebuild"].append(1e3 * sampler.rebuilding / sampler.rebuilt)
            found["% of it in rebuilds"].append(100 * sampler.rebuilding / sampler.working)
    sampler.close()
    for name, values in found.items():
        print(f"{name:20} {spread(values, '.1f')}")


if __name__ == "__main__":
    main()
