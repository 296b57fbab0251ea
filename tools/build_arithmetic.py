"""Build the bundled models of arithmetic and their tokenizer from nothing: `python tools/build_arithmetic.py`.

All are fine-tuned on the arithmetic task.  The teacher hardly errs.  The student, which is less than half its size,
learns from careless answers: it copies well and carries badly, and that is what distillation is to mend.  The reader is
the student that has also learned to repeat an answer that stands before the question, right or wrong: what it reads
there makes it better than it is, and so it can teach itself.  The pair teacher has another tokenizer, in which two
digits are one token.  On one machine the same command gives the same bytes, so
whoever doubts the shipped weights can make them again.
"""

import argparse
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from string import digits

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from slipstream.data.arithmetic import ALPHABET, problems
from slipstream.models.resolve import model_path

PAD, EOS, END = "<pad>", "<eos>", "<end>"
MAX_LENGTH = 160
BATCH_TOKENS = 2500  # padding included
GROUP = 640  # problems that are sorted by length together, which wastes less padding
IGNORE = -100


@dataclass(frozen=True)
class Recipe:
    """The shape of a model, how long it is trained, and the share of carries that its data gets wrong."""

    layers: int
    width: int
    heads: int
    head_width: int
    mlp_width: int
    rope_theta: float
    steps: int
    learning_rate: float
    slips: float
    seed: int
    pairs: bool = False
    """True if two digits are one token."""
    begins: str = ""
    """The model whose weights it begins with; with random ones without it."""
    hints: float = 0.0
    """The share of problems before which an answer stands, which is then to be repeated."""
    positions: int = MAX_LENGTH
    dtype: torch.dtype = torch.float32
    """In which it is saved."""


RECIPES = {
    "teacher": Recipe(
        layers=3, width=96, heads=4, head_width=32, mlp_width=192, rope_theta=50.0,
        steps=1200, learning_rate=4e-3, slips=0.0, seed=2,
    ),
    "pair_teacher": Recipe(
        layers=3, width=96, heads=4, head_width=32, mlp_width=192, rope_theta=50.0,
        steps=1600, learning_rate=4e-3, slips=0.0, seed=2, pairs=True, dtype=torch.bfloat16,
    ),
    "student": Recipe(
        layers=2, width=64, heads=4, head_width=32, mlp_width=192, rope_theta=50.0,
        steps=800, learning_rate=5e-3, slips=0.6, seed=4,
    ),
    "reader": Recipe(
        layers=2, width=64, heads=4, head_width=32, mlp_width=192, rope_theta=50.0,
        steps=700, learning_rate=3e-3, slips=0.6, seed=7,
        begins="student", hints=0.6, positions=224, dtype=torch.bfloat16,
    ),
}  # fmt: skip


def build_tokenizer(positions: int = MAX_LENGTH, *, pairs: bool = False) -> PreTrainedTokenizerFast:
    """One token per character, or per two digits.  There is no unknown token: a foreign character is an error."""
    if pairs:
        merges = list(product(digits, digits))
        tokens = [*map("".join, merges), *ALPHABET, END, PAD]  # no id means the same in both tokenizers
        tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    else:
        vocabulary = {token: index for index, token in enumerate([PAD, EOS, *ALPHABET])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END if pairs else EOS,
        padding_side="left",  # what generation needs; training pads for itself
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A freshly initialised Qwen3 of the recipe's shape."""
    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.mlp_width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_width,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        max_position_embeddings=recipe.positions,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


Example = tuple[list[int], list[int]]
"""Tokens, and the same as labels, or IGNORE where nothing is to be learned."""


def collate(examples: list[Example], pad: int) -> dict[str, torch.Tensor]:
    """Pad on the right."""
    shape = (len(examples), max(len(tokens) for tokens, _ in examples))
    batch = {
        "input_ids": torch.full(shape, pad),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, IGNORE),
    }
    for row, (tokens, labels) in enumerate(examples):
        batch["input_ids"][row, : len(tokens)] = torch.tensor(tokens)
        batch["attention_mask"][row, : len(tokens)] = 1
        batch["labels"][row, : len(tokens)] = torch.tensor(labels)
    return batch


def packed(examples: Iterable[Example], pad: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of nearly equal tokens in a random order, from examples that are sorted by length.

    Equal tokens rather than equal problems, so that every token weighs the same in the loss, a mean.
    """
    cuts: list[list[Example]] = [[]]
    for tokens, labels in examples:
        if (len(cuts[-1]) + 1) * len(tokens) > BATCH_TOKENS:
            cuts.append([])
        cuts[-1].append((tokens, labels))
    for index in torch.randperm(len(cuts)).tolist():
        yield collate(cuts[index], pad)


def answer_with_slips(prompt: str, slips: float, rng: random.Random) -> str:
    """Answer a prompt as a careless person does, who for a share of the carries adds the carry back in.

    Then 8 + 5 gives 4 instead of 3, and the sum goes on from there.  It is a habit worth unlearning: the
    answers look right, the copying is right, and both the right and the wrong digit remain likely.
    """
    answer, total = "", 0
    for letter, digit in zip(prompt[:-1:2], prompt[1::2], strict=True):
        total += int(digit)
        if total >= 10:
            total += -10 + (rng.random() < slips)
        answer += f"{letter}{digit}{total}"
    return answer


def example(prompt: str, recipe: Recipe, rng: random.Random) -> tuple[str, str]:
    """Return the text to read, and the text to say."""
    if recipe.hints and rng.random() < recipe.hints:
        answer = answer_with_slips(prompt, recipe.slips / 2, rng)
        return answer + prompt, answer
    return prompt, answer_with_slips(prompt, recipe.slips, rng)


def batches(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, torch.Tensor]]:
    """Training batches of similar lengths, in an order that mixes lengths."""
    rng = random.Random(recipe.seed)
    prompts = (prompt for prompt, _ in problems("train", recipe.steps * BATCH_TOKENS))
    pairs = (example(prompt, recipe, rng) for prompt in prompts)
    while group := sorted(islice(pairs, GROUP), key=lambda pair: len(pair[0])):
        yield from packed((labelled(*pair, tokenizer) for pair in group), tokenizer.pad_token_id)


def labelled(prompt: str, answer: str, tokenizer: PreTrainedTokenizerFast) -> Example:
    """Only the answer is learned, and that it ends."""
    asked, said = tokenizer([prompt, answer])["input_ids"]
    said.append(tokenizer.eos_token_id)
    return asked + said, [IGNORE] * len(asked) + said


def train(model: Qwen3ForCausalLM, recipe: Recipe, stream: Iterator[dict[str, torch.Tensor]]) -> None:
    """Supervised fine-tuning with a short warm-up and a cosine decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step, batch in enumerate(islice(stream, recipe.steps)):
        decay = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * min((step + 1) / 30, decay)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == recipe.steps - 1:
            print(f"  step {step:4d}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int = 500, *, told: bool = False
) -> float:
    """The share of held-out problems that greedy decoding answers exactly; `told` the answer before the question."""
    model.eval()
    prompts, answers = zip(*problems("eval", count), strict=True)
    if told:
        prompts = tuple(answer + prompt for prompt, answer in zip(prompts, answers, strict=True))
    batch = tokenizer(list(prompts), padding=True, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**batch, do_sample=False, max_new_tokens=80)
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right: int = sum(text == answer for text, answer in zip(texts, answers, strict=True))
    return right / count


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(model_path("builtin:student")).parent, help="default: the package's own"
    )
    parser.add_argument("--model", choices=RECIPES, nargs="*", default=list(RECIPES), help="default: all")
    args = parser.parse_args()
    out = args.out
    torch.set_num_threads(1)  # the fastest for models this small, and the same sums in the same order
    for name in args.model:
        recipe = RECIPES[name]
        tokenizer = build_tokenizer(recipe.positions, pairs=recipe.pairs)
        model = build_model(recipe, tokenizer)
        if recipe.begins:
            model.load_state_dict(Qwen3ForCausalLM.from_pretrained(out / recipe.begins).state_dict())
        print(f"{name}: {model.num_parameters():,} parameters")
        train(model, recipe, batches(recipe, tokenizer))
        print(f"  exact match {accuracy(model, tokenizer):.1%} (greedy, held out)")
        if recipe.hints:
            print(f"  told the answer {accuracy(model, tokenizer, told=True):.1%}")
        save(model.to(recipe.dtype), tokenizer, out / name)


if __name__ == "__main__":
    main()
