"""Asking vLLM's sampler, and what full forward passes say of the answers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from slipstream.engines.draws import process
from slipstream.engines.vllm.sampler import VllmSampler
from slipstream.protocols import Sampling, WeightsRef
from slipstream.records import Prompt, Rollout


def generate(sampler: VllmSampler, prompts: Sequence[Prompt], *samplings: Sampling) -> list[Rollout]:
    """One sampling for each prompt, or one for all."""

    async def work() -> list[Rollout]:
        each = samplings if len(samplings) > 1 else samplings * len(prompts)
        groups = await asyncio.gather(*[sampler.generate(p, s) for p, s in zip(prompts, each, strict=True)])
        return [handle.body for group in groups for handle in group]

    return asyncio.run(work())


@torch.no_grad()
def full_forward(model: PreTrainedModel, rollout: Rollout, sampling: Sampling) -> torch.Tensor:
    """Processed log-probs [T, V] at every response position."""
    ids = np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64)
    logits = model(torch.from_numpy(ids)[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1]
    return process(logits, sampling)


def assert_exact(
    models: Sequence[PreTrainedModel], rollout: Rollout, sampling: Sampling, *, atol: float = 5e-5
) -> None:
    """All draws' log-probs equal a full forward under the weights of that token's version."""
    versions = rollout.versions[rollout.loss_mask]
    for version in np.unique(versions):
        at = versions == version
        full = full_forward(models[version], rollout, sampling)[torch.from_numpy(rollout.loss_mask)]
        expected = full.gather(1, torch.from_numpy(rollout.actions).long()).numpy()
        np.testing.assert_allclose(rollout.action_logp[at], expected[at], rtol=0, atol=atol)


async def grown(sampler: VllmSampler, tokens: int) -> None:
    """Until a running response has so many tokens."""
    states = sampler.core.llm.output_processor.request_states
    while all(state.detokenizer.num_output_tokens() < tokens for state in list(states.values())):
        await asyncio.sleep(0.001)


class replaced:
    """Other weights get to vLLM than those that were sent."""

    def __init__(self, sampler: VllmSampler, patch: pytest.MonkeyPatch, weights: WeightsRef, folder: Path) -> None:
        self.llm, self.patch, self.weights, self.path = sampler.core.llm, patch, weights, folder / "weights"

    def __enter__(self) -> None:
        real = self.llm.update_weights
        self.weights.body.tofile(self.path)

        async def other(request: Any) -> None:
            request.update_info["path"] = str(self.path)
            kept = {spec.name for spec in self.weights.manifest}
            request.update_info["manifest"] = [s for s in request.update_info["manifest"] if s[0] in kept]
            await real(request)

        self.patch.setattr(self.llm, "update_weights", other)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
