"""Native sampler against HF `generate`: same model, same prompts, 64 sequences at a time, heavy-tailed lengths.

    python benchmarks/sampler.py [--model builtin:student] [--prompts 512] [--repeats 5]
    python benchmarks/sampler.py --speculation 3 8 [--slots 64 8 1] [--least 0.3] [--repeats 5]

Both sample at temperature 1 until the end token. HF generates left-padded batches of 64 in the order of the prompts; in
a second form the prompts are sorted by length first, which a training loop cannot do without bias but which shows how
much of the difference is padding and how much is the step. Tokens are those up to and including the end token. The
three take turns; medians and ranges over the repeats.

`--speculation LOOKUP TOKENS` compares the native sampler with and without speculative sampling instead, in turns, on
answers that repeat nothing (arithmetic), on answers that copy their prompt (by a model that is first trained to copy,
15 s), and on the tool calls of builtin:tool_teacher. The tokens have to be the same.
"""

import argparse
import asyncio
import copy
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipstream.config.data import DataConfig
from slipstream.config.file import parse
from slipstream.config.sampler import SpeculationConfig
from slipstream.data.prompts import Prompts, load_rows
from slipstream.data.tokenizers import Tokenizer, encode_rows, load_tokenizer, stop_ids
from slipstream.engines.native.model import LanguageModel, load_model, split
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.models.resolve import model_path
from slipstream.plan.plan import plan
from slipstream.protocols import Sampling
from slipstream.records import Prompt, Rollout
from slipstream.runtimes.build import build_sampler

CONCURRENT, MAX_TOKENS = 64, 80


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="builtin:student")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--speculation", type=int, nargs=2, metavar=("LOOKUP", "TOKENS"))
    parser.add_argument("--least", type=float, default=SpeculationConfig().least)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 8, 1])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.speculation:
        compare_speculation(args)
        return
    tokenizer = load_tokenizer(args.model)
    prompts = arithmetic(args, tokenizer)
    print(f"{args.model}, {len(prompts)} prompts, {CONCURRENT} at a time, {args.threads} thread(s)")

    native = load_model(args.model, dtype="float32", device="cpu")
    stop = stop_ids(tokenizer, native.model.generation_config)
    sampler = NativeSampler(native, SamplerSettings(slots=CONCURRENT, threads=args.threads), stop_ids=stop)
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


def arithmetic(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Prompt]:
    rows = load_rows("builtin:arithmetic", split="eval", limit=args.prompts)
    source = Prompts(rows, encode_rows(rows, tokenizer, DataConfig()), seed=0, shuffle=True)
    return [source.at(number) for number in range(len(rows))]


# --- speculative sampling ---------------------------------------------------------------------------------------------


def copying(count: int) -> tuple[LanguageModel, list[Prompt]]:
    """Train a model of two layers to copy 24 random tokens; return it with prompts."""
    rng, vocabulary, length, separator, end = np.random.default_rng(0), 39, 24, 2, 1

    def lines(number: int) -> np.ndarray:
        body, column = rng.integers(3, vocabulary, (number, length)), np.ones((number, 1), np.int64)
        return np.concatenate([body, separator * column, body, end * column], 1)

    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(model_path("builtin:student"))
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        ids = torch.from_numpy(lines(64))
        labels = ids.clone()
        labels[:, : length + 1] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    asked = [
        Prompt(id=str(i), number=i, tokens=line[: length + 1].astype(np.int32), seed=i)
        for i, line in enumerate(lines(count))
    ]
    return split("copying", model.eval()), asked


def compare_speculation(args: argparse.Namespace) -> None:
    lookup, tokens = args.speculation
    settings = SpeculationConfig(lookup=lookup, tokens=tokens, least=args.least)
    tokenizer = load_tokenizer(args.model)
    student, (copier, lines) = load_model(args.model, dtype="float32", device="cpu"), copying(args.prompts)
    stop = stop_ids(tokenizer, student.model.generation_config)
    sampling = Sampling(max_tokens=MAX_TOKENS)
    print(f"lookup {lookup}, up to {tokens} tokens, least {args.least:g}; µs of CPU per token, without and with")
    for slots in args.slots:
        for name, lm, prompts, ends in (
            ("arithmetic", student, arithmetic(args, tokenizer), stop),
            ("copying", copier, lines, {1}),
        ):
            pair = [
                NativeSampler(
                    copy.deepcopy(lm),
                    SamplerSettings(slots=slots, threads=args.threads, speculation=each),
                    stop_ids=ends,
                )
                for each in (None, settings)
            ]
            print_speculation(f"{name}, {slots} slots", pair, pair[1], prompts[: 8 * slots], sampling, args.repeats)
            for each in pair:
                each.close()
    line = (
        "student=builtin:tool_teacher teachers.main.model=builtin:tool_teacher data.train=builtin:table updates=1 "
        "environment.use=table sampler.max_tokens=150 sampler.slots=16 runtime.kind=inline runtime.device=cpu"
    )
    changes = [tuple(word.split("=")) for word in line.split()]
    plans = [
        plan(parse({"sampler": {"speculation": each}} if each else {}, changes, say=str), ask=False)
        for each in (None, settings.model_dump())
    ]
    engines = [build_sampler(made.engines.sampler, made.tokenizer) for made in plans]
    prompts = [plans[0].prompts.at(number) for number in range(128)]
    policy = engines[1].policy
    print_speculation("tool calls, 16 slots", engines, policy, prompts, plans[0].sampling, args.repeats)
    for engine in engines:
        engine.policy.close()
        engine.environments.close()


def print_speculation(
    name: str,
    pair: list[Any],
    speculative: NativeSampler,
    prompts: list[Prompt],
    sampling: Sampling,
    repeats: int,
) -> None:
    """Print costs, their ratio, and how many tokens were proposed and accepted; both samplers draw the same tokens."""

    async def work(sampler: Any) -> list[Rollout]:
        groups = await asyncio.gather(*[sampler.generate(prompt, sampling) for prompt in prompts])
        return [handle.body for group in groups for handle in group]

    costs: list[list[float]] = [[], []]
    for repeat in range(repeats + 1):  # the first round warms up
        found = list[list[int]]()
        speculative.acceptance.take()
        for i, sampler in enumerate(pair):
            cpu = time.process_time()
            rollouts = asyncio.run(work(sampler))
            drawn = sum(int(rollout.loss_mask.sum()) for rollout in rollouts)
            if repeat:
                costs[i].append(1e6 * (time.process_time() - cpu) / drawn)
            found.append([token for rollout in rollouts for token in rollout.tokens.tolist()])
    assert found[0] == found[1], "speculation changed a token"
    proposed, accepted = speculative.acceptance.take()
    ratios = [one / other for one, other in zip(*costs, strict=True)]
    print(
        f"{name:22} {statistics.median(costs[0]):6.0f} {statistics.median(costs[1]):6.0f}   "
        f"{statistics.median(ratios):.2f} [{min(ratios):.2f} … {max(ratios):.2f}]   "
        f"{proposed / drawn:.2f} proposed per token, {accepted / max(1, proposed):.0%} of them accepted"
    )


if __name__ == "__main__":
    main()
