"""Compare the students of `make real` with their teacher, on held-out prompts.

    python tools/real.py TEACHER STUDENT RUN

STUDENT is the student before training, and RUN the run directory. The table has, for each model: forward KL from the
teacher on the teacher's own answers and reverse KL on the model's own answers (nats per token), the share of answers
that end by themselves, and the share of 4-grams that repeat an earlier one of the same answer. Below it, the first
prompts with the answers of all models.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from slipstream.data.tokenizers import Tokenizer, load_tokenizer, stop_ids
from slipstream.engines.native.model import LanguageModel, load_model
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.protocols import Sampling
from slipstream.records import Prompt

PROMPTS, TOKENS, PRINTED = 48, 64, 4
"""Number of held-out prompts, maximum tokens of an answer, and number of prompts whose answers are printed."""
ROWS = 8
"""Number of answers in one forward pass."""


@dataclass(frozen=True)
class Answer:
    prompt: Sequence[int]
    tokens: Sequence[int]
    ended: bool

    @property
    def ids(self) -> Tensor:
        return torch.tensor([*self.prompt, *self.tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("build/real/held_out.jsonl"))
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.teacher)
    asked = [json.loads(line)["prompt"] for line in args.prompts.read_text("utf-8").splitlines()[:PROMPTS]]
    teacher = load_model(args.teacher, dtype="float32", device="cpu")
    theirs = answers(teacher, tokenizer, asked)
    console, table = Console(), Table("", "forward KL", "reverse KL", "ended", "repeated", box=None)
    drawn = {"teacher": theirs}
    for name, path in {"before": args.student, **students(args.run)}.items():
        student = load_model(path, dtype="float32", device="cpu")
        drawn[name] = own = answers(student, tokenizer, asked)
        forward, reverse = kl(teacher, student, theirs), kl(student, teacher, own)
        table.add_row(name, f"{forward:.3f}", f"{reverse:.3f}", f"{share_ended(own):.0%}", f"{repeated(own):.1%}")
    table.add_row("teacher", "0", "0", f"{share_ended(theirs):.0%}", f"{repeated(theirs):.1%}")
    console.print(table)
    for number, prompt in enumerate(asked[:PRINTED]):
        console.print(f"\n[bold]{prompt}[/]", highlight=False)
        for name, each in drawn.items():
            text = tokenizer.decode(each[number].tokens, skip_special_tokens=True)
            console.print(f"  {name}: ", end="", style="cyan")
            console.print(" ".join(text.split()), markup=False, highlight=False)


def students(run: Path) -> dict[str, str]:
    """Return the directories of the student in the oldest checkpoint, and after the run."""
    checkpoints = sorted(run.glob("checkpoints/*/model.safetensors"), key=lambda file: int(file.parent.name))
    stages = {f"update {file.parent.name}": str(file.parent) for file in checkpoints[:1]}
    return stages | {"distilled": str(run / "final")}


def answers(lm: LanguageModel, tokenizer: Tokenizer, asked: Sequence[str]) -> list[Answer]:
    """Return one answer to each prompt, drawn at temperature 1."""
    chats = [[{"role": "user", "content": each}] for each in asked]
    ids = [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=True)["input_ids"] for each in chats
    ]
    sampler = NativeSampler(lm, slots=len(ids), stop_ids=stop_ids(tokenizer, lm.model.generation_config))

    async def draw() -> list[Answer]:
        prompts = [Prompt(id=str(i), number=i, tokens=np.array(each, np.int32), seed=i) for i, each in enumerate(ids)]
        groups = await asyncio.gather(*(sampler.generate(each, Sampling(max_tokens=TOKENS)) for each in prompts))
        found = [group[0].body for group in groups]
        return [Answer(p, each.tokens.tolist(), each.finish == "eos") for p, each in zip(ids, found, strict=True)]

    try:
        return asyncio.run(draw())
    finally:
        sampler.close()
        lm.model.set_attn_implementation("sdpa")


@torch.no_grad()
def kl(one: LanguageModel, other: LanguageModel, drawn: Sequence[Answer]) -> float:
    """Return KL(one ‖ other) over the whole vocabulary, in nats per token, on answers that `one` has drawn."""
    total, count = 0.0, 0
    for start in range(0, len(drawn), ROWS):
        some = drawn[start : start + ROWS]
        logp, logq = log_probs(one, some), log_probs(other, some)
        total += float((logp.exp() * (logp - logq)).sum())
        count += len(logp)
    return total / count


def log_probs(lm: LanguageModel, drawn: Sequence[Answer]) -> Tensor:
    rows = torch.nn.utils.rnn.pad_sequence([each.ids for each in drawn], batch_first=True)
    hidden_BTH = lm.backbone(input_ids=rows, use_cache=False).last_hidden_state
    parts = [h[len(each.prompt) - 1 : len(each.ids) - 1] for h, each in zip(hidden_BTH, drawn, strict=True)]
    return lm.model.get_output_embeddings()(torch.cat(parts)).float().log_softmax(-1)


def share_ended(drawn: Sequence[Answer]) -> float:
    return sum(each.ended for each in drawn) / len(drawn)


def repeated(drawn: Sequence[Answer], n: int = 4) -> float:
    """Return the share of n-grams that occur earlier in the same answer."""
    total = again = 0
    for each in drawn:
        grams = [tuple(each.tokens[i : i + n]) for i in range(len(each.tokens) - n + 1)]
        total += len(grams)
        again += len(grams) - len(set(grams))
    return again / max(total, 1)


if __name__ == "__main__":
    main()
