"""Accuracy of a saved model: avg@n, pass@k and greedy, through the sampler and the grader that training uses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from slipstream.config.schema import DataConfig
from slipstream.engines.base import Graded, Sampling
from slipstream.engines.native.model import load_model
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.errors import ConfigError, DataError, RunDirError
from slipstream.metrics import avg_at_n, pass_at_k
from slipstream.pipeline.evaluate import answers, correctness
from slipstream.plan.plan import eval_prompts
from slipstream.records import Handle, Prompt
from slipstream.runtimes.build import decoder
from slipstream.tasks.chat import Tokenizer, check_ids, load_tokenizer, stop_ids
from slipstream.tasks.rewards import PoolGrader

SLOTS = 64


@dataclass(frozen=True)
class Measured:
    greedy: float
    sampled: list[list[float]]
    """Rewards of every sample of every prompt."""
    best: list[Handle]
    """The greedy answers."""
    seconds: float
    tokens: int

    @property
    def avg(self) -> float:
        return avg_at_n(self.sampled)


def measure(
    model: str, prompts: Sequence[Prompt], grader: PoolGrader, tokenizer: Tokenizer, *, sampling: Sampling, reward: str
) -> Measured:
    """Sampled and greedy answers of one model."""
    torch.set_num_threads(1)
    longest = max(len(prompt.tokens) for prompt in prompts) + sampling.max_tokens
    lm = load_model(model, dtype="float32", longest=longest)
    check_ids(prompts, [prompt.tokens for prompt in prompts], model, lm.vocab_size)
    for prompt in prompts:
        if len(prompt.tokens) + sampling.max_tokens > lm.longest:
            raise DataError(f"{prompt.id}: prompt and --max-tokens exceed the context of {lm.longest} of {model}")
    sampler = NativeSampler(
        lm, slots=max(SLOTS, sampling.group), stop_ids=stop_ids(tokenizer, lm.model.generation_config)
    )
    greedy = Sampling(max_tokens=sampling.max_tokens, temperature=0)

    async def both() -> tuple[list[list[Handle]], list[list[Handle]]]:
        generate = Graded(sampler, grader).generate
        return await answers(generate, prompts, sampling), await answers(generate, prompts, greedy)

    began = time.perf_counter()
    try:
        sampled, best = asyncio.run(both())
    finally:
        sampler.close()
    return Measured(
        greedy=avg_at_n(correctness(best, reward)),
        sampled=correctness(sampled, reward),
        best=[group[0] for group in best],
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
    system_prompt: str | None,
    as_json: bool,
) -> None:
    if max(ks) > n:
        raise ConfigError(f"pass@{max(ks)} needs at least {max(ks)} samples of each prompt: write -n {max(ks)}")
    if (Path(model) / "ledger.jsonl").exists() and not (Path(model) / "final").is_dir():
        kept = sorted(str(path) for path in Path(model).glob("checkpoints/*"))
        raise RunDirError(f"{model}: this run has no final student; its checkpoints: {', '.join(kept) or 'none'}")
    if (Path(model) / "final").is_dir():
        model = str(Path(model) / "final")
    tokenizer = load_tokenizer(model)
    data = DataConfig(system_prompt=system_prompt)
    prompts = eval_prompts(tokenizer, data, source, split=split, limit=limit, seed=seed)
    grader = PoolGrader((reward,), decoder(tokenizer))
    try:
        sampling = Sampling(max_tokens=max_tokens, group=n, temperature=temperature)
        found = measure(model, prompts, grader, tokenizer, sampling=sampling, reward=reward)
    finally:
        grader.close()
    scores = {f"avg@{n}": found.avg, **{f"pass@{k}": pass_at_k(found.sampled, k) for k in ks}, "greedy": found.greedy}
    if as_json:
        print(json.dumps({"model": model, "prompts": len(prompts), "temperature": temperature, **scores}))
        return
    title = f"{model}: {len(prompts)} prompts of {source} ({split}), T = {temperature:g}"
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    table = Table()
    for name in scores:
        table.add_column(name, justify="right")
    table.add_row(*(f"{score:.1%}" for score in scores.values()))
    console.print(table)
    console.print(f"{found.tokens:,} tokens in {found.seconds:.1f} s", highlight=False)
