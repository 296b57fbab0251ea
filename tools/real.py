"""Compare the students of `make real` with their teacher, on held-out prompts.

    python tools/real.py TEACHER STUDENT RUN [--prompts FILE] [--count 64] [--answers 1]

STUDENT is the student before its layers were refitted, and RUN the run directory. The table has, for each model:
forward KL from the teacher on the teacher's own answers and reverse KL on the model's own answers (nats per token), the
share of answers that end by themselves, and the share of 4-grams that repeat an earlier one of the same answer. The
shares have standard errors over prompts; a few answers that repeat one line decide the last one. Below the table, the
first prompts with the answers of all models. Answers and KL have the temperature of configs/real.toml, and the models
the processor's faster number format.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fastest_format import fastest_format
from real_models import TEMPERATURE, Answer, answers, log_probs, questions
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.model import LanguageModel, load_model
from slipstream.records import REPEATED_N, repetition
from slipstream.run_dir.reading import RunDir
from slipstream.statistics import standard_error

TOKENS, PRINTED = 128, 4
"""Maximum tokens of an answer, and number of prompts whose answers are printed."""
ROWS = 8
"""Number of answers in one forward pass."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("build/real/held_out.jsonl"))
    parser.add_argument("--count", type=int, default=64, help="number of held-out prompts")
    parser.add_argument("--answers", type=int, default=1, help="answers to each prompt")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.teacher)
    prompts = questions(args.prompts, args.count)
    asked = prompts * args.answers
    dtype = fastest_format()
    torch.set_num_threads(2)
    teacher = load_model(args.teacher, dtype=dtype, device="cpu")
    theirs = answers(teacher, tokenizer, asked, TOKENS, TEMPERATURE)
    console, table = Console(), Table("", "forward KL", "reverse KL", "ended", "repeated", box=None)
    drawn = dict[str, list[Answer]]()
    stages = {name: path for name, path in students(args.run).items() if path != args.student}
    for name, path in {"before": args.student, **stages}.items():
        student = load_model(path, dtype=dtype, device="cpu")
        drawn[name] = own = answers(student, tokenizer, asked, TOKENS, TEMPERATURE)
        forward, reverse = kl(teacher, student, theirs, TEMPERATURE), kl(student, teacher, own, TEMPERATURE)
        table.add_row(name, f"{forward:.3f}", f"{reverse:.3f}", *shares(own, args.answers))
    drawn["teacher"] = theirs
    table.add_row("teacher", "0", "0", *shares(theirs, args.answers))
    console.print(table)
    for number, prompt in enumerate(prompts[:PRINTED]):
        console.print(f"\n[bold]{prompt}[/]", highlight=False)
        for name, each in drawn.items():
            text = tokenizer.decode(each[number].tokens, skip_special_tokens=True)
            console.print(f"  {name}: ", end="", style="cyan")
            console.print(" ".join(text.split()), markup=False, highlight=False)


def students(run: Path) -> dict[str, str]:
    """Return the directories of a run's student: before the run, in its oldest checkpoint, and after the run."""
    start = {"refitted": RunDir(run).config.student}
    checkpoints = sorted(run.glob("checkpoints/*/model.safetensors"), key=lambda file: int(file.parent.name))
    stages = {f"update {file.parent.name}": str(file.parent) for file in checkpoints[:1]}
    return start | stages | {"distilled": str(run / "final")}


@torch.no_grad()
def kl(one: LanguageModel, other: LanguageModel, drawn: Sequence[Answer], temperature: float) -> float:
    """Return KL(one ‖ other) over the whole vocabulary, in nats per token, on answers that `one` has drawn."""
    total, count = 0.0, 0
    by_length = sorted(drawn, key=lambda each: len(each.ids))  # less padding
    for start in range(0, len(drawn), ROWS):
        some = by_length[start : start + ROWS]
        logp, logq = log_probs(one, some, temperature), log_probs(other, some, temperature)
        total += float((logp.exp() * (logp - logq)).sum())
        count += len(logp)
    return total / count


def shares(drawn: Sequence[Answer], times: int) -> list[str]:
    """Return two columns of the table: the shares of answers that end, and of 4-grams that repeat an earlier one.

    `times` is the number of answers to each prompt. Standard errors are over prompts, because these answers are alike.
    """
    columns = []
    for values in (ended(drawn), repeated(drawn)):
        by_prompt = [fmean(values[i :: len(drawn) // times]) for i in range(len(drawn) // times)]
        error = standard_error(by_prompt)
        columns.append(f"{fmean(values):.1%}" + (f" ± {error:.1%}" if error is not None else ""))
    return columns


def ended(drawn: Sequence[Answer]) -> list[float]:
    return [float(each.ended) for each in drawn]


def repeated(drawn: Sequence[Answer]) -> list[float]:
    """Return `student/repeated` of each answer."""
    return [repetition(np.array(each.tokens), REPEATED_N) for each in drawn]


if __name__ == "__main__":
    main()
