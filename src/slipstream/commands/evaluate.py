"""Accuracy of a saved model: avg@n, pass@k and greedy, through the sampler and the grader that training uses."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.assets import model_path
from slipstream.config.file import data_section
from slipstream.config.schema import name_of
from slipstream.engines.base import Graded, Sampling
from slipstream.errors import ConfigError, RunDirError
from slipstream.metrics import avg_at_n, pass_at_k
from slipstream.pipeline.evaluate import answers, correctness
from slipstream.plan.evaluation import Evaluation, eval_prompts, evaluation, graded_rows
from slipstream.records import Handle
from slipstream.tasks.chat import load_tokenizer
from slipstream.tasks.data import check_told, load_rows
from slipstream.tasks.grading import PoolGrader, needs
from slipstream.tasks.sources import has_splits


@dataclass(frozen=True)
class Measured:
    greedy: float
    sampled: list[list[float]]
    """Rewards of every sample of every prompt."""
    best: list[Handle]
    """The greedy answers."""
    ungraded: Counter[str]
    """How many answers could not be graded, which counts as not right, by the cause."""
    seconds: float
    tokens: int

    @property
    def avg(self) -> float:
        return avg_at_n(self.sampled)


def measure(made: Evaluation, grader: PoolGrader) -> Measured:
    """Sampled and greedy answers of one model; many are graded by the same processes."""
    import torch

    from slipstream.runtimes.build import build_sampler

    torch.set_num_threads(1)
    sampler, sampling = build_sampler(made.sampler, made.tokenizer), made.sampling
    (reward,) = map(name_of, made.grader.rewards)
    greedy = Sampling(max_tokens=sampling.max_tokens, temperature=0)

    async def both() -> tuple[list[list[Handle]], list[list[Handle]]]:
        generate = Graded(sampler, grader).generate
        return await answers(generate, made.prompts, sampling), await answers(generate, made.prompts, greedy)

    began = time.perf_counter()
    try:
        sampled, best = asyncio.run(both())
    finally:
        sampler.close()
    return Measured(
        greedy=avg_at_n(correctness(best, reward)),
        sampled=correctness(sampled, reward),
        best=[group[0] for group in best],
        ungraded=Counter(h.header.ungraded.said for group in sampled + best for h in group if h.header.ungraded),
        seconds=time.perf_counter() - began,
        tokens=sum(handle.header.tokens for group in sampled + best for handle in group),
    )


def evaluate(
    model: str,
    console: Console,
    *,
    source: str,
    split: str,
    limit: int,
    reward: str,
    n: int,
    ks: Sequence[int],
    max_tokens: int,
    temperature: float,
    seed: int,
    data: Mapping[str, Any],
    as_json: bool,
) -> None:
    if max(ks) > n:
        raise ConfigError(f"pass@{max(ks)} needs at least {max(ks)} samples of each prompt: write -n {max(ks)}")
    if (Path(model) / "ledger.jsonl").exists() and not (Path(model) / "final").is_dir():
        kept = sorted(str(path) for path in Path(model).glob("checkpoints/*"))
        raise RunDirError(f"{model}: this run has no final student; its checkpoints: {', '.join(kept) or 'none'}")
    if (Path(model) / "final").is_dir():
        model = str(Path(model) / "final")
    told = data_section(data)
    check_told(told, source)
    if split != "eval" and not has_splits(source):
        raise ConfigError(f"--split {split} does nothing: {source} has no splits; drop it")
    model_path(model)
    needs((reward,))
    layout: list[str] = []
    rows = graded_rows(load_rows(source, told, split=split, limit=limit, say=layout.append), (reward,))
    tokenizer = load_tokenizer(model)
    prompts = eval_prompts(rows, tokenizer, told, seed=seed)
    from slipstream.runtimes.build import build_grader

    sampling = Sampling(max_tokens=max_tokens, group=n, temperature=temperature)
    made = evaluation(model, prompts, tokenizer, sampling=sampling, reward=reward)
    grader = build_grader(made.grader, tokenizer)
    try:
        found = measure(made, grader)
    finally:
        grader.close()
    scores = {f"avg@{n}": found.avg, **{f"pass@{k}": pass_at_k(found.sampled, k) for k in ks}, "greedy": found.greedy}
    for said, count in found.ungraded.items():
        print(f"{count} answers have no reward and count as wrong: {said}", file=sys.stderr)
    if as_json:
        print(json.dumps({"model": model, "prompts": len(prompts), "temperature": temperature, **scores}))
        return
    title = f"{model}: {len(prompts)} prompts of {source} ({split}), T = {temperature:g}"
    for line in (*layout, title):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    table = Table()
    for name in scores:
        table.add_column(name, justify="right")
    table.add_row(*(f"{score:.1%}" for score in scores.values()))
    console.print(table)
    console.print(f"{found.tokens:,} tokens in {found.seconds:.1f} s", highlight=False)
