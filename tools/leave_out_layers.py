"""Make a smaller student of a model by leaving out layers, the least harmful first.

    python tools/leave_out_layers.py MODEL TARGET --count 8 [--prompts build/real/train.jsonl]

The harm of leaving out layers is the forward KL from the whole model to the smaller one, in nats per token, on answers
of the whole model. It is measured after each layer before a gap is refitted on other answers (tools/refit.py), since
what a layer can make up for is no loss. Layers are chosen greedily: each choice is measured without all layers that
were chosen before. The result is an ordinary directory, which any program loads; it is not refitted. `--layers 17 16
18` skips the measurement.
"""

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import nn

from fastest_format import fastest_format
from real_models import TEMPERATURE, Answer, answers, forward_kl, log_probs, log_probs_of, questions, write
from refit import Texts, refit_layer
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.model import LanguageModel, load_model

FITTED, JUDGED, TOKENS = 20, 14, 48
"""Numbers of answers on which layers are refitted and harm is measured, and their maximum length in tokens."""
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
    torch.set_num_threads(2)
    left_out = args.layers
    if not left_out:
        asked = questions(args.prompts, FITTED + JUDGED)
        quick = load_model(args.model, dtype=fastest_format(), device="cpu")
        drawn = answers(quick, load_tokenizer(args.model), asked, TOKENS, TEMPERATURE)
        whole = load_model(args.model, dtype="float32", device="cpu")
        left_out = choose(whole, args.count, drawn[:FITTED], drawn[FITTED:])
    save(args.model, left_out, args.target)
    print(f"{args.target}: {args.model} without layers {' '.join(map(str, sorted(left_out)))}")


@torch.no_grad()
def choose(lm: LanguageModel, count: int, fitted: Sequence[Answer], judged: Sequence[Answer]) -> list[int]:
    """Return the layers to leave out, and print the harm of each choice. The first layer always stays."""
    layers = list(lm.backbone.layers)  # type: ignore[arg-type]
    texts, others, whole = Texts(lm, fitted), Texts(lm, judged), log_probs(lm, judged, TEMPERATURE)

    def harm_without(some: Collection[int]) -> float:
        kept = [number for number in range(len(layers)) if number not in some]
        following = [*kept[1:], len(layers)]
        gaps = [place for place, number in enumerate(kept) if following[place] != number + 1]
        first = min(gaps)  # up to it all states are those of the whole model
        states, asked = [texts.inputs[kept[first]]], others.inputs[kept[first]]
        for place in range(first, len(kept)):
            layer = layers[kept[place]]
            before = layer.mlp.down_proj.weight.clone()
            if place in gaps:
                states, *_ = refit_layer(layer, states, [texts], following[place])
            else:
                states = [layer(states[0], **texts.call)]
            asked = layer(asked, **others.call)
            layer.mlp.down_proj.weight.copy_(before)
        return forward_kl(whole, log_probs_of(lm, lm.backbone.norm(asked), judged, TEMPERATURE))  # type: ignore[operator]

    left_out, candidates = list[int](), set(range(1, len(layers)))
    while len(left_out) < count:
        harm = {layer: harm_without({layer, *left_out}) for layer in sorted(candidates)}
        if not left_out:  # later choices are among the layers that are least harmful alone
            candidates = set(sorted(candidates, key=harm.__getitem__)[: round(CANDIDATES * count)])
        left_out.append(min(candidates, key=harm.__getitem__))
        candidates.remove(left_out[-1])
        print(f"without layers {' '.join(map(str, left_out))}: forward KL {harm[left_out[-1]]:.3f}", flush=True)
    return left_out


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


if __name__ == "__main__":
    main()
