"""Shortcuts that roll out, score and train with native engines."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from transformers import PreTrainedModel

from slipstream.protocols import Sampling
from slipstream.records import Handle
from support.engines import native_sampler, native_scorer
from support.tiny_models import (
    EOS,
    make_prompts,
    wrap,
)

T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    async def main() -> T:
        return await work

    return asyncio.run(main())


def roll_out(model: PreTrainedModel, *, draws: int = 3, count: int = 7) -> list[list[Handle]]:
    async def work() -> list[list[Handle]]:
        sampler = native_sampler(wrap(model), slots=16, stop_ids={EOS})
        sampling = Sampling(max_tokens=15, group=2, draws=draws)
        groups = await asyncio.gather(*[sampler.generate(p, sampling) for p in make_prompts(count)])
        sampler.close()
        return groups

    return run(work())


def score(model: PreTrainedModel, groups: list[list[Handle]], **options: Any) -> list[list[Handle]]:
    async def work() -> list[list[Handle]]:
        scorer = native_scorer(wrap(model), **options)
        scored = await asyncio.gather(*[scorer.score(group) for group in groups])
        scorer.close()
        return scored

    return run(work())
