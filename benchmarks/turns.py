"""One response, and the same response made in several calls, parked in between or read again.

    python benchmarks/turns.py [--tokens 384] [--prompt 128] [--calls 1 4 8] [--repeats 5]

Groups of 8 by the native sampler: every member is continued by a call of its own, with all it has so far as its prompt,
as the turns of an episode are. A model of random weights in the shape of Qwen3 that never stops, so that all make the
same tokens; that they do is checked. Milliseconds of CPU of the process per response, and the tokens that go through
the model for it. The contenders take turns; medians and ranges over the repeats. `one group` is a single request for
all members, as without episodes.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from schedules import spread
from slipstream.engines.native.model import split
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.protocols import Sampling
from slipstream.records import Ints, Prompt

GROUP, VOCAB = 8, 512


def make_sampler(args: argparse.Namespace, slots: int) -> NativeSampler:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        head_dim=32,
        max_position_embeddings=args.prompt + args.tokens,
    )
    return NativeSampler(split("random", Qwen3ForCausalLM(config).eval()), SamplerSettings(slots=slots), stop_ids=set())


async def whole(sampler: NativeSampler, prompts: list[Prompt], tokens: int) -> list[list[int]]:
    sampling = Sampling(max_tokens=tokens, group=GROUP)
    groups = await asyncio.gather(*[sampler.generate(prompt, sampling) for prompt in prompts])
    return [handle.body.tokens.tolist() for group in groups for handle in group]


async def in_calls(
    sampler: NativeSampler, prompts: list[Prompt], tokens: int, *, calls: int, park: bool
) -> list[list[int]]:
    async def member(prompt: Prompt, index: int) -> list[int]:
        ids, first = prompt.tokens, len(prompt.tokens)
        for stop in np.linspace(0, tokens, calls + 1).astype(int)[1:]:
            drawn = len(ids) - first
            asked = replace(prompt, tokens=ids, offset=drawn, first=index)
            (handle,) = await sampler.generate(asked, Sampling(max_tokens=int(stop) - drawn, park=park))
            ids = np.concatenate([ids, handle.body.tokens])
        found: list[int] = ids[first:].tolist()
        return found

    return await asyncio.gather(*[member(prompt, index) for prompt in prompts for index in range(GROUP)])


def prompts_of(count: int, length: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    ids: list[Ints] = [rng.integers(2, VOCAB, length).astype(np.int32) for _ in range(count)]
    return [Prompt(id=f"p{number}", number=number, tokens=each, seed=number) for number, each in enumerate(ids)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sampler, prompts = make_sampler(args, GROUP * args.groups), prompts_of(args.groups, args.prompt)
    read = list[int]()
    sampler.lm.backbone.register_forward_pre_hook(
        lambda module, given, named: read.append(named["input_ids"].numel()), with_kwargs=True
    )
    contenders: dict[str, Callable[[], list[list[int]]]] = {
        "one group": lambda: asyncio.run(whole(sampler, prompts, args.tokens))
    }

    def calling(calls: int, park: bool) -> list[list[int]]:
        return asyncio.run(in_calls(sampler, prompts, args.tokens, calls=calls, park=park))

    for calls in args.calls:
        for park in (True, False) if calls > 1 else (False,):
            name = f"{calls} call{'s' * (calls > 1)}" + (", parked" if park else ", read again" if calls > 1 else "")
            contenders[name] = partial(calling, calls, park)
    costs: dict[str, list[float]] = {name: [] for name in contenders}
    through, responses = dict[str, float](), GROUP * args.groups
    expected = contenders["one group"]()  # and so warm
    for _ in range(args.repeats):
        for name, work in contenders.items():
            read.clear()
            began = time.process_time()
            found = work()
            costs[name].append(1e3 * (time.process_time() - began) / responses)
            through[name] = sum(read) / responses
            if found != expected:
                raise SystemExit(f"{name} drew other tokens than one group")
    sampler.close()
    size = sum(weight.numel() for weight in sampler.lm.model.parameters())
    print(f"{size / 1e6:.1f} M parameters, {args.groups} groups of {GROUP}, {args.prompt} + {args.tokens} tokens")
    base = statistics.median(costs["one group"])
    for name, values in costs.items():
        ratio = statistics.median(values) / base
        print(f"{name:20} {spread(values, '.1f')} ms   {ratio:.2f}×   {through[name]:,.0f} tokens through the model")


if __name__ == "__main__":
    main()
