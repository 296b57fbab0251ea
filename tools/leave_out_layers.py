"""Make a smaller student of a model by leaving out layers, the least harmful first.

    python tools/leave_out_layers.py MODEL TARGET --count 8 [--prompts build/real/train.jsonl]

The harm of leaving out a layer is the forward KL from the whole model to the smaller one, in nats per token, on answers
of the whole model. Layers are chosen greedily: each choice is measured without all layers that were chosen before. The
result is an ordinary directory, which any program loads. `--layers 17 26 14` skips the measurement.
"""

import argparse
import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastest_format import fastest_format
from slipstream.data.tokenizers import Tokenizer, load_tokenizer, stop_ids
from slipstream.engines.native.model import LanguageModel, load_model
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.protocols import Sampling
from slipstream.records import Prompt

ANSWERS, TOKENS = 8, 48
"""Number of answers on which harm is measured, and their maximum length in tokens."""
CANDIDATES = 1.75
"""Number of layers that are tried after the first choice, as a multiple of the number of layers to leave out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("target", type=Path)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--layers", type=int, nargs="+", default=[])
    parser.add_argument("--prompts", type=Path, default=Path("build/real/train.jsonl"))
    args = parser.parse_args()
    lm = load_model(args.model, dtype=fastest_format(), device="cpu")
    left_out = args.layers
    if not left_out:
        asked = questions(args.prompts, ANSWERS)
        left_out = choose(lm, args.count, answers(lm, load_tokenizer(args.model), asked, TOKENS))
    save(args.model, left_out, args.target)
    print(f"{args.target}: {args.model} without layers {' '.join(map(str, sorted(left_out)))}")


@dataclass(frozen=True)
class Answer:
    prompt: Sequence[int]
    tokens: Sequence[int]
    ended: bool

    @property
    def ids(self) -> Tensor:
        return torch.tensor([*self.prompt, *self.tokens])


def questions(file: Path, count: int) -> list[str]:
    return [json.loads(line)["prompt"] for line in file.read_text("utf-8").splitlines()[:count]]


def answers(
    lm: LanguageModel, tokenizer: Tokenizer, asked: Sequence[str], max_tokens: int, temperature: float = 1.0
) -> list[Answer]:
    """Return one drawn answer to each question."""
    chats = [[{"role": "user", "content": each}] for each in asked]
    ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]
    ends = stop_ids(tokenizer, lm.model.generation_config)
    sampler = NativeSampler(lm, SamplerSettings(slots=len(ids)), stop_ids=ends)

    async def draw() -> list[Answer]:
        prompts = [Prompt(id=str(i), number=i, tokens=np.array(each, np.int32), seed=i) for i, each in enumerate(ids)]
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
        groups = await asyncio.gather(*(sampler.generate(each, sampling) for each in prompts))
        found = [group[0].body for group in groups]
        return [Answer(p, each.tokens.tolist(), each.finish == "eos") for p, each in zip(ids, found, strict=True)]

    try:
        return asyncio.run(draw())
    finally:
        sampler.close()
        lm.model.set_attn_implementation("sdpa")


@torch.no_grad()
def choose(lm: LanguageModel, count: int, drawn: Sequence[Answer]) -> list[int]:
    """Return the layers to leave out, and print the harm of each choice."""
    layers = list(lm.backbone.layers)  # type: ignore[arg-type, attr-defined]
    whole, left_out, candidates = log_probs(lm, drawn), list[int](), set(range(len(layers)))
    while len(left_out) < count:
        harm = dict[int, float]()
        for layer in sorted(candidates):
            without = (layer, *left_out)
            lm.backbone.layers = nn.ModuleList(each for number, each in enumerate(layers) if number not in without)
            harm[layer] = forward_kl(whole, log_probs(lm, drawn))
        if not left_out:  # later choices are among the layers that are least harmful alone
            candidates = set(sorted(candidates, key=harm.__getitem__)[: round(CANDIDATES * count)])
        left_out.append(min(candidates, key=harm.__getitem__))
        candidates.remove(left_out[-1])
        print(f"without layers {' '.join(map(str, left_out))}: forward KL {harm[left_out[-1]]:.3f}", flush=True)
    return left_out


def log_probs(lm: LanguageModel, drawn: Sequence[Answer], temperature: float = 1.0) -> Tensor:
    """Return the log-probs [tokens, vocabulary] of all tokens of the answers."""
    rows = nn.utils.rnn.pad_sequence([each.ids for each in drawn], batch_first=True)
    hidden_BTH = lm.backbone(input_ids=rows, use_cache=False).last_hidden_state  # padding comes after all real tokens
    parts = [h[len(each.prompt) - 1 : len(each.ids) - 1] for h, each in zip(hidden_BTH, drawn, strict=True)]
    return (lm.model.get_output_embeddings()(torch.cat(parts)).float() / temperature).log_softmax(-1)


def forward_kl(logp: Tensor, logq: Tensor) -> float:
    return float((logp.exp() * (logp - logq)).sum(-1).mean())


def save(model: str, left_out: Sequence[int], target: Path) -> None:
    """Write the model without these layers, in float32, with its tokenizer."""
    lm = load_model(model, dtype="float32", device="cpu").model
    config = lm.config
    lm.model.layers = nn.ModuleList(each for number, each in enumerate(lm.model.layers) if number not in left_out)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kind for number, kind in enumerate(kinds) if number not in left_out]
    config.num_hidden_layers = len(lm.model.layers)
    for number, layer in enumerate(lm.model.layers):
        layer.self_attn.layer_idx = number
    write(lm, load_tokenizer(model), target)


def write(model: PreTrainedModel, tokenizer: Tokenizer, target: Path) -> None:
    """Write an ordinary directory; one that a stopped program has begun has another name."""
    begun = target.with_name(f"{target.name}.begun")
    for part in (model, tokenizer, model.generation_config):
        part.save_pretrained(begun)
    if target.exists():
        shutil.rmtree(target)
    begun.rename(target)


if __name__ == "__main__":
    main()
