"""Shared prompts against plain packing: one forward and backward pass of a small random model over one group.

    python benchmarks/shared_prompt.py [--prompts 64 512 2048] [--groups 4 16 32] [--response 64] [--repeats 5]

Both compute the hidden states and log-probs of the same responses, in micro-batches of the same number of tokens; plain
packing computes the prompt with every response. What arithmetic promises counts the operations that the task needs:
linear layers on every token, attention on every pair of tokens that see each other, the head on every response token.
Time over promise is how much of it is lost. The two take turns; medians and ranges over the repeats.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from slipstream.engines.native.model import LanguageModel, split
from slipstream.engines.native.packing import Item, MicroBatch, pack
from slipstream.engines.native.rows import Rows, use_rows
from slipstream.estimators.logprobs import logprobs_at
from slipstream.estimators.numerics import joined
from slipstream.records import Prompt, Rollout, one_turn

VOCABULARY = 4096


def make_model(hidden: int, layers: int) -> LanguageModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return split("random", AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def make_group(prompt_length: int, count: int, response_length: int) -> list[Rollout]:
    rng = np.random.default_rng(0)
    prompt = Prompt(id="p", number=0, tokens=rng.integers(0, VOCABULARY, prompt_length))
    group = []
    for index in range(count):
        rollout = one_turn(
            prompt,
            index,
            actions=rng.integers(0, VOCABULARY, (response_length, 1)),
            action_logp=np.zeros((response_length, 1)),
            versions=np.zeros(response_length, np.int64),
            finish="length",
        )
        group.append(rollout)
    return group


def work(lm: LanguageModel, rollouts: Sequence[Rollout], batches: Sequence[MicroBatch]) -> None:
    lm.model.zero_grad()
    for batch in batches:
        hidden_NH = Rows(rollouts, batch, lm.device).hidden(lm.backbone)
        ids_N = joined([rollouts[i].tokens for i in batch.members], lm.device, torch.int64)
        logprobs_at(hidden_NH, lm.head.weight, ids_N[:, None]).sum().backward()


def operations(lm: LanguageModel, item: Item) -> float:
    """Multiply-adds of a forward pass that the item needs."""
    layers = [p for name, p in lm.backbone.named_parameters() if p.ndim == 2 and "layers" in name]
    config = lm.model.config
    pairs = item.prompt**2 / 2 + sum(r * item.prompt + r**2 / 2 for r in item.responses)
    linear = item.tokens * sum(p.numel() for p in layers)
    attention = 2 * pairs * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return linear + attention + sum(item.responses) * lm.head.weight.numel()


def compare(lm: LanguageModel, rollouts: Sequence[Rollout], budget: int, repeats: int) -> None:
    plans = {
        name: pack(rollouts, budget=budget, hidden=lm.head.weight.shape[1], shared_prompt=name == "shared")
        for name in ("plain", "shared")
    }
    items = {name: [item for b in batches for row in b.rows for item in row] for name, batches in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for repeat in range(repeats + 1):  # the first round warms up
        for name, batches in plans.items():
            began = time.perf_counter()
            work(lm, rollouts, batches)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    tokens = {name: sum(batch.computed for batch in batches) for name, batches in plans.items()}
    promise = sum(operations(lm, i) for i in items["plain"]) / sum(operations(lm, i) for i in items["shared"])
    ratios = [plain / shared for plain, shared in zip(seconds["plain"], seconds["shared"], strict=True)]
    print(
        f"|p| {len(rollouts[0].prompt.tokens):5}  G {len(rollouts):3}   "
        f"tokens {tokens['plain']:7,} → {tokens['shared']:6,} (−{1 - tokens['shared'] / tokens['plain']:.0%})   "
        f"{statistics.median(seconds['plain']):7.2f} s → {statistics.median(seconds['shared']):6.2f} s   "
        f"{statistics.median(ratios):5.2f}× [{min(ratios):.2f} … {max(ratios):.2f}]   "
        f"arithmetic {promise:5.2f}×   time / promise {statistics.median(ratios) / promise:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget", type=int, default=4224, help="tokens of a micro-batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lm = make_model(args.hidden, args.layers)
    use_rows(lm)
    print(
        f"hidden {args.hidden}, {args.layers} layers, responses of {args.response} tokens, micro-batches of at most "
        f"{args.budget:,} tokens, {args.threads} thread(s)"
    )
    for prompt in args.prompts:
        for count in args.groups:
            compare(lm, make_group(prompt, count, args.response), args.budget, args.repeats)


if __name__ == "__main__":
    main()
