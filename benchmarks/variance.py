"""Noise of the reverse KL on stale rollouts that more draws remove, and the direction of its gradient.

    python benchmarks/variance.py [--seeds 5] > docs/findings/variance.md
    python benchmarks/variance.py --task words --seeds 3 > docs/findings/variance_words.md

The built-in student as it was k updates ago draws answers; the student of today, from `slipstream.train`, is to learn
from them. At every prefix M actions are drawn from the old one, and their loss is −1/M Σ ρ sg(A), as in training.
Everything is exact but what chance decides: teacher, old and new student give whole distributions at every prefix.

    local    E_s Var(L_M | s) / E_s Var(L_1 | s), the draws of one prefix redrawn
    fixed    the variance of the mean over the prefixes of one answer, all draws redrawn, likewise
    across   the variance of that mean over answers, each drawn anew

Cosines are of gradients by the student's weights, from 32 answers, to that of the exact KL on the same answers; the
last line is that of the exact KL on stale answers to that on as many of today's student. Mean ± standard error over
seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import slipstream
from slipstream.data import arithmetic, words
from slipstream.estimators.centring import centre_of_draws
from slipstream.estimators.divergence import dense, reverse_kl_topk
from slipstream.estimators.surrogate import mc_reverse_kl
from slipstream.models.resolve import model_path
from slipstream.reporting.report.titles import mean_text
from slipstream.statistics import estimate

DRAWS, BATCH = (1, 4, 16, 64), 32


@dataclass(frozen=True)
class Task:
    """A built-in task with its models, and how much of it is measured."""

    name: str
    student: str
    teacher: str
    numbered: Callable[[str, int], tuple[str, str]]
    lr: float
    longest: int
    answers: int
    redrawn: int
    ages: tuple[int, ...]
    tops: tuple[tuple[int, bool], ...]
    """Number of the old student's best tokens, and whether one more bucket holds all others."""
    rows: int = 20_000
    title: str = "How much noise more draws take out, and where their gradient points"
    command: str = "python benchmarks/variance.py > docs/findings/variance.md"


TASKS = {
    "arithmetic": Task(
        "arithmetic", "builtin:student", "builtin:teacher", arithmetic.numbered,
        lr=1e-3, longest=80, answers=512, redrawn=200, ages=(0, 16, 64), tops=((4, False),),
    ),
    "words": Task(
        "words", "builtin:word_student", "builtin:word_teacher", words.numbered,
        lr=1e-3, longest=40, answers=128, redrawn=64, ages=(0, 4, 16, 64, 128),
        tops=((16, False), (16, True), (64, False)), rows=4096,
        title="Noise of draws and directions of gradients with a wide vocabulary",
        command="python benchmarks/variance.py --task words --seeds 3 > docs/findings/variance_words.md",
    ),
}  # fmt: skip
VARIANCES = """# {title}

Appendix E of AsyncOPD: the variance of the loss with M draws at every position, as a share of the variance with one
draw. *Local* is the variance at one prefix; *fixed* is that of the mean over the prefixes of one response. Both are
1/M, because draws are independent. Deviations from 1/M come from the tail of the importance ratio ρ, which a limited
number of redraws over- or underestimates: one draw of an extreme ratio makes a cell many times 100 %. *Across* also
redraws the responses. The part that remains at M = 64 is the variance between responses. The paper's 11.2 % for
sequences may be this part, or come from that tail.

```console
{command}
```
"""
COSINES = """
The next table has the cosine between two gradients of 32 responses: that of the estimate, and that of the exact reverse
KL on the same responses. A baseline is the mean advantage of the other draws at the position (`loss.baseline`). In
centred rows the emitted token alone has an advantage (as `loss.use = "advantage"` has it), and the other draws give an
estimate of the mean of its score, which is subtracted (score centering). The last row compares stale with fresh
responses: it is the cost of stale prefixes alone.
"""
Found = dict[tuple[str, str], dict[int, float]]
"""By table and line: what it is at every age."""


@dataclass
class Answers:
    """Prompts and answers, left-padded, and which positions' next token is of an answer."""

    ids: Tensor
    there: Tensor
    answered: Tensor

    def of(self, rows: slice) -> Answers:
        return Answers(self.ids[rows], self.there[rows], self.answered[rows])

    def logp(self, model: Any) -> Tensor:
        """[positions of answers, V], of one answer after the other."""
        places = (self.there.cumsum(1) - 1).clamp(min=0)
        logits = model(self.ids, attention_mask=self.there, position_ids=places).logits
        found: Tensor = logits[self.answered].double().log_softmax(-1)
        return found

    @property
    def row_P(self) -> Tensor:
        """Return the index of the answer to which each position belongs."""
        return self.answered.nonzero()[:, 0]


def drawn_by(model: Any, tokenizer: Any, prompts: list[str], longest: int) -> Answers:
    tokenizer.padding_side = "left"
    asked = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        ids = model.generate(
            input_ids=asked["input_ids"],
            attention_mask=asked["attention_mask"],
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            pad_token_id=tokenizer.pad_token_id,
        )
    width = asked["input_ids"].shape[1]
    ended = (ids[:, width:] == tokenizer.eos_token_id).cumsum(1)
    real = (ended == 0) | ((ended == 1) & (ids[:, width:] == tokenizer.eos_token_id))
    there = torch.cat([asked["attention_mask"], real.long()], 1)
    answered = torch.zeros_like(there, dtype=torch.bool)
    answered[:, width - 1 : -1] = real
    return Answers(ids, there, answered)


def students(task: Task, seed: int, directory: Path) -> dict[int, Any]:
    """Return the students of training on fresh rollouts, by the number of updates."""
    trained = [age for age in task.ages if age]
    slipstream.train(
        {
            "student": task.student,
            "teachers": {"main": {"model": task.teacher}},
            "data": {"train": f"builtin:{task.name}", "limit": task.rows},
            "updates": max(trained),
            "seed": seed,
            "output": str(directory),
            "sampler": {"max_tokens": task.longest},
            "learner": {"batch_size": BATCH, "lr": task.lr, "warmup": 10},
            "schedule": {"kind": "sync"},
            "checkpoint": {"every": math.gcd(*trained), "keep": max(trained)},
            "runtime": {"kind": "inline", "device": "cpu"},
            "log": {"samples": 0, "trace": False},
        },
        quiet=True,
    )
    paths = {age: str(directory / "checkpoints" / str(age)) if age else model_path(task.student) for age in task.ages}
    return {age: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for age, path in paths.items()}


# --- variances --------------------------------------------------------------------------------------------------------


def variances(task: Task, answers: Answers, old: Any, now: Any, teacher: Any) -> Found:
    """Return the variances of the loss, at every M, as shares of that at M = 1."""
    with torch.no_grad():
        p_PV, old_PV, q_PV = (answers.logp(model) for model in (now, old, teacher))
    value_PV = mc_reverse_kl(*(x.reshape(-1, 1) for x in (p_PV, old_PV, q_PV)))[0].view_as(p_PV)
    rows = answers.row_P
    count = torch.bincount(rows, minlength=task.answers).double()
    found = defaultdict[str, dict[int, float]](dict)
    for m in DRAWS:
        mean_RA, local_P = list[Tensor](), list[Tensor]()
        for _ in range(task.redrawn):
            ids_PM = torch.multinomial(old_PV.exp(), m, replacement=True)
            loss_P = value_PV.gather(1, ids_PM).mean(1)
            local_P.append(loss_P)
            mean_RA.append(torch.zeros(task.answers, dtype=torch.float64).index_add(0, rows, loss_P) / count)
        means = torch.stack(mean_RA)
        found["local"][m] = torch.stack(local_P).var(0).mean().item()
        found["fixed"][m] = means.var(0).mean().item()
        found["across"][m] = means.var(1).mean().item()
    return {(name, f"M = {m}"): {0: v / by_m[1]} for name, by_m in found.items() for m, v in by_m.items()}


# --- directions -------------------------------------------------------------------------------------------------------


def gradient(model: Any, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([each.flatten() for each in found])


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0).item()


def directions(task: Task, answers: Answers, fresh: Answers, old: Any, now: Any, teacher: Any) -> Found:
    """Cosines, each the mean over batches."""
    found = defaultdict[str, list[float]](list)
    for first in range(0, task.answers // 2, BATCH):
        batch = answers.of(slice(first, first + BATCH))
        with torch.no_grad():
            old_PV, q_PV = batch.logp(old), batch.logp(teacher)

        def exact(of: Answers) -> Tensor:
            with torch.no_grad():
                scored = of.logp(teacher)
            return gradient(now, dense(of.logp(now), scored, kind="reverse").mean())

        def sampled(
            m: int,
            *,
            importance: bool = True,
            baseline: bool = False,
            batch: Answers = batch,
            old_PV: Tensor = old_PV,
            q_PV: Tensor = q_PV,
        ) -> Tensor:
            ids = torch.multinomial(old_PV.exp(), m, replacement=True)
            p, before, q = (x.gather(1, ids) for x in (batch.logp(now), old_PV, q_PV))
            return gradient(now, mc_reverse_kl(p, before, q, importance=importance, baseline=baseline)[0].mean())

        def centred(m: int, *, batch: Answers = batch, old_PV: Tensor = old_PV, q_PV: Tensor = q_PV) -> Tensor:
            ids = torch.multinomial(old_PV.exp(), m, replacement=True)
            p, before, q = (x.gather(1, ids) for x in (batch.logp(now), old_PV, q_PV))
            past, ratio = p.detach(), (p.detach() - before).exp()
            score = ratio[:, 0] * p[:, 0] - (centre_of_draws(past, before, lambda weight: weight) * p).sum(-1)
            return gradient(now, -((q - past)[:, 0] * score).mean())

        def best(k: int, *, tail: bool, batch: Answers = batch, old_PV: Tensor = old_PV, q_PV: Tensor = q_PV) -> Tensor:
            ids = old_PV.topk(k).indices
            p, q = batch.logp(now).gather(1, ids), q_PV.gather(1, ids)
            return gradient(now, reverse_kl_topk(p, q, tail=tail, renormalise=not tail).mean())

        truth = exact(batch)
        for m in DRAWS:
            found[f"M = {m}"].append(cosine(sampled(m), truth))
        found["M = 16, not weighed"].append(cosine(sampled(16, importance=False), truth))
        found["M = 16, with a baseline"].append(cosine(sampled(16, baseline=True), truth))
        unweighed = sampled(16, importance=False, baseline=True)
        found["M = 16, not weighed, with a baseline"].append(cosine(unweighed, truth))
        found["M = 4, with a baseline"].append(cosine(sampled(4, baseline=True), truth))
        for m in DRAWS[1:-1]:
            found[f"M = {m}, emitted token, centred"].append(cosine(centred(m), truth))
        for k, tail in task.tops:
            found[f"the old student's top {k}{', tail' if tail else ''}"].append(cosine(best(k, tail=tail), truth))
        found["stale answers to fresh ones, exact"].append(cosine(truth, exact(fresh.of(slice(first, first + BATCH)))))
    return {("cosine", name): {0: sum(values) / len(values)} for name, values in found.items()}


# --- what is written --------------------------------------------------------------------------------------------------


def measure(task: Task, seed: int, directory: Path) -> Found:
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path(task.student))
    teacher = AutoModelForCausalLM.from_pretrained(model_path(task.teacher), dtype=torch.float32).eval()
    asked = [task.numbered("train", seed * task.answers + index)[0] for index in range(task.answers)]
    trained, found = students(task, seed, directory), defaultdict[tuple[str, str], dict[int, float]](dict)
    old = trained[0]
    stale = drawn_by(old, tokenizer, asked, task.longest)
    for age, now in trained.items():
        fresh = drawn_by(now, tokenizer, asked, task.longest)
        values = variances(task, stale, old, now, teacher) | directions(task, stale, fresh, old, now, teacher)
        for key, value in values.items():
            found[key][age] = value[0]
    return found


def written(task: Task, seeds: list[Found], seconds: float, say: Callable[[str], None]) -> None:
    def at(age: int, key: tuple[str, str], *, share: bool) -> str:
        found = estimate([seed[key][age] for seed in seeds])
        return mean_text(found.mean, found.se, share=share)

    def cells(key: tuple[str, str], *, share: bool) -> str:
        return " | ".join(at(age, key, share=share) for age in task.ages)

    ages = " | ".join(f"{age} updates old" for age in task.ages)
    say(VARIANCES.format(title=task.title, command=task.command))
    say(f"| | 1/M | {ages} |\n|{' --- |' * (2 + len(task.ages))}")
    for name in ("local", "fixed", "across"):
        for m in DRAWS[1:]:
            say(f"| {name}, M = {m} | {100 / m:.3g} % | {cells((name, f'M = {m}'), share=True)} |")
    say(COSINES)
    say(f"| | {ages} |\n|{' --- |' * (1 + len(task.ages))}")
    for key in seeds[0]:
        if key[0] == "cosine":
            say(f"| {key[1]} | {cells(key, share=False)} |")
    most, usual = f"M = {DRAWS[-1]}", ("cosine", "M = 16")
    left = [f"{at(age, ('local', most), share=True)} and {at(age, ('across', most), share=True)}" for age in task.ages]
    towards = [at(age, usual, share=False) for age in task.ages]
    say(
        f"\nIn short: of rollouts that are {', '.join(map(str, task.ages))} updates old, {DRAWS[-1]} draws leave "
        f"{'; '.join(left)} of the variance at a prefix and of answers; the gradient of 16 has a cosine of "
        f"{', '.join(towards)} to the exact one."
    )
    size = f"{task.answers} answers each, of which cosines are of the first {task.answers // 2}"
    say(f"\nSeeds 1 to {len(seeds)}, {size},")
    say(f"{seconds:.0f} s on one core, torch {torch.__version__}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--task", choices=TASKS, default="arithmetic")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[args.task]
    began, found = time.process_time(), list[Found]()
    for seed in range(1, args.seeds + 1):
        with tempfile.TemporaryDirectory() as directory, redirect_stdout(sys.stderr):
            found.append(measure(task, seed, Path(directory)))
    written(task, found, time.process_time() - began, print)


if __name__ == "__main__":
    main()
