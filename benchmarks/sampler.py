"""Native sampler against HF `generate`: same model, same prompts, 64 sequences at a time, heavy-tailed lengths.

    python benchmarks/sampler.py [--model builtin:student] [--prompts 512] [--repeats 5]

Both sample at temperature 1 until the end token. HF generates left-padded batches of 64 in the order of the prompts; in
a second form the prompts are sorted by length first, which a training loop cannot do without bias but which shows how
much of the difference is padding and how much is the step. Tokens are those up to and including the end token. The
three take turns; medians and ranges over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np
import torch

from slipstream.config.schema import DataConfig
from slipstream.data.prompts import Prompts, load_rows
from slipstream.data.tokenizers import encode_rows, load_tokenizer, stop_ids
from slipstream.engines.native.model import load_model
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.protocols import Sampling
from slipstream.records import Prompt, Rollout

CONCURRENT, MAX_TOKENS = 64, 80


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="builtin:student")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.model)
    rows = load_rows("builtin:arithmetic", split="eval", limit=args.prompts)
    source = Prompts(rows, encode_rows(rows, tokenizer, DataConfig()), seed=0, shuffle=True)
    prompts = [source.at(number) for number in range(len(rows))]
    print(f"{args.model}, {len(prompts)} prompts, {CONCURRENT} at a time, {args.threads} thread(s)")

    native = load_model(args.model, dtype="float32", device="cpu")
    stop = stop_ids(tokenizer, native.model.generation_config)
    sampler = NativeSampler(native, slots=CONCURRENT, stop_ids=stop, threads=args.threads)
    rollouts: list[Rollout] = []

    def run_native() -> int:
        async def work() -> list[Rollout]:
            jobs = [sampler.generate(prompt, Sampling(max_tokens=MAX_TOKENS)) for prompt in prompts]
            return [handle.body for group in await asyncio.gather(*jobs) for handle in group]

        rollouts[:] = asyncio.run(work())
        return sum(len(rollout.tokens) for rollout in rollouts)

    hf = load_model(args.model, dtype="float32", device="cpu").model
    hf.set_attn_implementation("sdpa")  # its fastest
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id

    def run_hf(order: list[Prompt]) -> int:
        tokens = 0
        for start in range(0, len(order), CONCURRENT):
            batch = [prompt.tokens.tolist() for prompt in order[start : start + CONCURRENT]]
            padded = tokenizer.pad({"input_ids": batch}, padding_side="left", return_tensors="pt")
            out = hf.generate(**padded, do_sample=True, top_k=0, max_new_tokens=MAX_TOKENS, pad_token_id=pad)
            new = out[:, padded["input_ids"].shape[1] :]
            ended = (new == eos).int().cumsum(1)
            tokens += int(((ended == 0) | ((ended == 1) & (new == eos))).sum())
        return tokens

    run_native()
    exact = load_model(args.model, dtype="float64", device="cpu").model
    print_accuracy(rollouts, hf, exact)
    by_length = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    contenders = {
        "native": run_native,
        "hf generate": lambda: run_hf(prompts),
        "hf, sorted": lambda: run_hf(by_length),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    costs: dict[str, list[float]] = {name: [] for name in contenders}
    torch.manual_seed(0)
    for repeat in range(args.repeats + 1):  # the first round warms up
        for name, work in contenders.items():
            began, cpu = time.perf_counter(), time.process_time()
            tokens = work()
            if repeat:
                speeds[name].append(tokens / (time.perf_counter() - began))
                costs[name].append(1e6 * (time.process_time() - cpu) / tokens)
    sampler.close()
    for name, values in speeds.items():
        cost = costs[name]
        cpu = f"{statistics.median(cost):.0f} µs   [{min(cost):.0f} … {max(cost):.0f}] of CPU per token"
        print(f"{name:12} {statistics.median(values):9,.0f} tok/s   [{min(values):,.0f} … {max(values):,.0f}]   {cpu}")
    for name in ("hf generate", "hf, sorted"):
        ratios = [ours / theirs for ours, theirs in zip(speeds["native"], speeds[name], strict=True)]
        print(f"native / {name}: {statistics.median(ratios):.2f}   [{min(ratios):.2f} … {max(ratios):.2f}]")
        ratios = [theirs / ours for ours, theirs in zip(costs["native"], costs[name], strict=True)]
        print(f"  by CPU seconds: {statistics.median(ratios):.2f}   [{min(ratios):.2f} … {max(ratios):.2f}]")


@torch.no_grad()
def print_accuracy(rollouts: list[Rollout], model: torch.nn.Module, exact: torch.nn.Module) -> None:
    """Behaviour log-probs against full forward passes in float32, and both against float64."""

    def logp_of(rollout: Rollout, model: torch.nn.Module) -> np.ndarray:
        ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
        logp = model(ids[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1].log_softmax(-1)
        return logp.gather(1, ids[len(rollout.prompt.tokens) :, None])[:, 0].numpy()

    ours = np.concatenate([rollout.logp for rollout in rollouts])
    full, truth = (np.concatenate([logp_of(rollout, m) for rollout in rollouts]) for m in (model, exact))
    error = np.abs(ours - full)
    print(
        f"log-probs of {len(ours):,} tokens: |sampler − full forward| ≤ {error.max():.1e}, "
        f"{(error <= 1e-5).mean():.2%} within 1e-5"
    )
    print(f"against float64: sampler {np.abs(ours - truth).max():.1e}, full forward {np.abs(full - truth).max():.1e}")


if __name__ == "__main__":
    main()
