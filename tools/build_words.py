"""Build the bundled models of the task `words` and their tokenizer from nothing: `python tools/build_words.py`.

The teacher learns sentences of the language. The student, which is less than half its size, learns sentences of a
dialect: a share of the words does not fit the word before, and within every class other words are frequent. So it has
many words to learn again, and unlikely words to unlearn. On one machine the same command gives the same bytes.
"""

import argparse
import math
import random
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import build_arithmetic as build
from build_arithmetic import EOS, GROUP, PAD, Example, Recipe
from slipstream.data.words import CLASSES, END, RANKS, VOCABULARY_WORDS, drawn, grammatical, next_words, numbered
from slipstream.models.resolve import model_path

POSITIONS = 80
RECIPES = {
    "word_teacher": Recipe(
        layers=2, width=48, heads=2, head_width=24, mlp_width=96, rope_theta=50.0,
        steps=1000, learning_rate=6e-3, slips=0.0, seed=21,
        positions=POSITIONS, dtype=torch.bfloat16,
    ),
    "word_student": Recipe(
        layers=1, width=32, heads=2, head_width=16, mlp_width=64, rope_theta=50.0,
        steps=800, learning_rate=6e-3, slips=0.1, seed=22,
        positions=POSITIONS, dtype=torch.bfloat16,
    ),
}  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; words stand between blanks. There is no unknown token: a foreign word is an error."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate([PAD, EOS, *VOCABULARY_WORDS])}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",  # what generation needs; training pads for itself
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def dialect(seed: int) -> dict[str, str]:
    """The word that a speaker of a dialect says instead of each word: another one of its class."""
    rng, found = random.Random(seed), dict[str, str]()
    for first in range(0, len(VOCABULARY_WORDS), RANKS):
        words = VOCABULARY_WORDS[first : first + RANKS]
        found |= dict(zip(words, rng.sample(words, RANKS), strict=True))
    return found


def example(index: int, recipe: Recipe, says: dict[str, str]) -> list[str]:
    """A sentence, with slips: words of any class, after which the sentence goes on as if they were right."""
    rng = random.Random(f"{recipe.seed}/{index}")
    prompt, answer = numbered("train", index)
    words = f"{prompt} {answer}".split()
    if recipe.slips:
        slipped = (drawn(rng.randrange(CLASSES), rng) if rng.random() < recipe.slips else word for word in words)
        words = [says[word] for word in slipped]
    return words


def batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, torch.Tensor]]:
    """Training batches of similar lengths; every word after the first is learned, and that the sentence ends."""
    ids, says = tokenizer.get_vocab(), dialect(recipe.seed)

    def labelled(words: list[str]) -> Example:
        tokens = [*(ids[word] for word in words), tokenizer.eos_token_id][:POSITIONS]
        return tokens, tokens

    examples = (labelled(example(index, recipe, says)) for index in count())
    while group := sorted(islice(examples, GROUP), key=lambda each: len(each[0])):
        yield from build.packed(group, tokenizer.pad_token_id)


@torch.no_grad()
def quality(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, number: int = 400) -> dict[str, float]:
    """Share of grammatical continuations, and cross-entropy of held-out sentences above the language's entropy."""
    model.eval()
    prompts, answers = zip(*(numbered("eval", index) for index in range(number)), strict=True)
    batch = tokenizer(list(prompts), padding=True, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=64)[:, 2:]
    right = []
    for prompt, ids in zip(prompts, output, strict=True):
        finish = "eos" if tokenizer.eos_token_id in ids else "length"
        right.append(grammatical(prompt, tokenizer.decode(ids, skip_special_tokens=True), finish))
    excess = []
    for prompt, answer in zip(prompts, answers, strict=True):
        words = f"{prompt} {answer}".split()[: POSITIONS - 1]
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(words)])
        logp = model(input_ids=ids).logits[0].log_softmax(-1)
        for place, (word, after) in enumerate(zip(words[1:], [*words[2:], END], strict=True), 1):
            token = tokenizer.convert_tokens_to_ids(after) if after else tokenizer.eos_token_id
            excess.append(math.log(next_words(word)[after]) - logp[place, token].item())
    return {"grammatical": fmean(right), "excess": fmean(excess)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(model_path("builtin:student")).parent, help="default: the package's own"
    )
    parser.add_argument("--model", choices=RECIPES, nargs="*", default=list(RECIPES), help="default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the fastest for models this small, and the same sums in the same order
    tokenizer = build_tokenizer()
    for name in args.model:
        recipe = RECIPES[name]
        model = build.build_model(recipe, tokenizer)
        print(f"{name}: {model.num_parameters():,} parameters")
        build.train(model, recipe, batches(recipe, tokenizer))
        build.save(model.to(recipe.dtype), tokenizer, args.out / name)
        found = quality(model.to(torch.float32), tokenizer)
        print(f"  grammatical {found['grammatical']:.1%}, {found['excess']:.3f} nats above the entropy")


if __name__ == "__main__":
    main()
