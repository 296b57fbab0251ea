"""Nine families of models on the device against float64 on the CPU: scores by packed rows, and sampled answers."""

import asyncio
import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from on_gpu.report import Report, Setting
from on_gpu.sampler import prompts_of
from slipstream.config.losses import LossSpec
from slipstream.engines.native.model import split
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.settings import SamplerSettings, ScorerSettings
from slipstream.errors import ModelError
from slipstream.protocols import Sampling
from slipstream.records import Handle, Rollout, header_of

TESTS = Path(__file__).parents[2] / "tests"
FAMILIES = (
    "gpt_oss",
    "gemma2, small caps",
    "deepseek_v3",
    "llama4_text",
    "afmoe",
    "stablelm",
    "cohere, norms",
    "falcon_h1",
    "lfm2",
)
"""One of each kind of attention and of memory, as tests/project/test_zoo.py walks through them."""
FLOAT32 = 1e-3
"""Largest error of a log-prob in float32."""
BFLOAT16 = 1.6
"""Largest mean error in bfloat16, as a multiple of the error that HF's own pass in bfloat16 makes."""


def stage(setting: Setting, report: Report) -> None:
    sys.path.insert(0, str(TESTS))
    from zoo.families import VOCAB, make
    from zoo.trial import LONGEST, SAMPLES, apart, plain, taken

    for name in setting.of(FAMILIES, FAMILIES[:2]):
        model = make(name)
        for dtype in setting.of((torch.float32, torch.bfloat16), (torch.float32,)):
            lower = copy.deepcopy(model).to(dtype)
            exact, usual = apart(copy.deepcopy(lower).double()), split("tiny", copy.deepcopy(lower), max_length=LONGEST)

            def engine_model(lower: Any = lower) -> Any:
                return split("tiny", copy.deepcopy(lower).to(setting.device), max_length=LONGEST)

            for what, work in (("scores", partial(scores, packing=setting.small)), ("samples", sampled)):
                label = f"{name}, {str(dtype).removeprefix('torch.')}: {what} against float64"
                try:
                    pairs = work(engine_model, SAMPLES, VOCAB)
                except ModelError as error:
                    report.check(label, float("nan"), 0.0, note=str(error))
                    continue
                with torch.no_grad():
                    ours = [np.abs(logp - taken(plain(exact, r), r).numpy()) for logp, r in pairs]
                    theirs = [
                        (taken(plain(usual, r), r).double() - taken(plain(exact, r), r)).abs().numpy() for _, r in pairs
                    ]
                if dtype == torch.float32:
                    report.check(label, max(float(error.max()) for error in ours), FLOAT32)
                else:
                    ratio = np.concatenate(ours).mean() / (np.concatenate(theirs).mean() + 1e-6)
                    report.check(f"{label}, over HF's own error", float(ratio), BFLOAT16)


def scores(model: Any, rollouts: list[Rollout], vocabulary: int, *, packing: bool) -> list[tuple[Any, Rollout]]:
    """Score fixed responses; in packed rows where the model can take them.

    On a GPU they cannot, because FlexAttention needs heads of 16 and more. The stage `packing` compares its kinds.
    """
    settings = partial(
        ScorerSettings, spec=LossSpec(cache="sampled", formula=""), vocabulary=vocabulary, token_budget=64
    )
    try:
        scorer = NativeScorer(model(), settings(packing=packing))
    except ModelError:
        scorer = NativeScorer(model(), settings(packing=False))
    found = scorer._score([Handle(header_of(rollout), rollout) for rollout in rollouts])
    scorer.close()
    return [(handle.body.teacher_logp.astype(np.float64), r) for handle, r in zip(found, rollouts, strict=True)]


def sampled(model: Any, rollouts: list[Rollout], vocabulary: int) -> list[tuple[Any, Rollout]]:
    """Sample answers, whose recorded log-probs are to be those of a forward pass."""
    sampler = NativeSampler(model(), SamplerSettings(slots=6), stop_ids=set())

    async def work() -> list[list[Handle]]:
        sampling = Sampling(max_tokens=20, group=2)
        return await asyncio.gather(*[sampler.generate(prompt, sampling) for prompt in prompts_of(6, 9, vocabulary)])

    drawn = [handle.body for group in asyncio.run(work()) for handle in group]
    sampler.close()
    return [(rollout.logp.astype(np.float64), rollout) for rollout in drawn]
