"""Rollouts by vLLM, where it is installed: tokens per second, a publish, and agreement with a forward pass."""

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np

from on_gpu.loop import saved
from on_gpu.report import SHAPES, Report, Setting, installed
from on_gpu.sampler import forward, prompts_of
from slipstream.engines.settings import SamplerSettings
from slipstream.engines.weights import export_weights, fingerprint
from slipstream.protocols import Sampling
from slipstream.records import Handle


def stage(setting: Setting, report: Report) -> None:
    if not installed("vllm"):
        report.skip("rollouts by vLLM", "vLLM is not installed")
        return
    from slipstream.engines.vllm.core import Settings
    from slipstream.engines.vllm.sampler import VllmSampler

    dtype = str(setting.dtype).removeprefix("torch.")
    rows, length, answer = setting.of((64, 128, 256), (4, 4, 8))
    with tempfile.TemporaryDirectory() as folder:
        path = saved(setting, Path(folder) / "student", 0)
        settings = Settings(
            path, dtype, rows, args={"max_model_len": 2 * (length + answer)}, device=setting.device.type
        )
        sampler = VllmSampler(settings, SamplerSettings(slots=settings.slots, draws=16), stop_ids=set())
        lm, after = setting.model(SHAPES[0]), setting.model(SHAPES[0], seed=1)

        async def work(draws: int) -> list[list[Handle]]:
            sampling = Sampling(max_tokens=answer, draws=draws)
            return await asyncio.gather(
                *[sampler.generate(prompt, sampling) for prompt in prompts_of(rows, length, lm.vocab_size)]
            )

        asyncio.run(work(1))
        for draws in (1, 16):
            began = time.perf_counter()
            asyncio.run(work(draws))
            speed = rows * answer / (time.perf_counter() - began)
            report.number(f"vLLM, {rows} at a time, {draws} draws", speed, "tokens/s")
        for version, model in ((0, lm), (1, after)):
            if version:
                weights = export_weights(after.model, dtype, version=1)
                loaded = asyncio.run(sampler.publish(weights, "keep"))
                differs = loaded.fingerprint != fingerprint(after.model, dtype, exported=weights)
                report.check("fingerprints after a publish to vLLM (0: equal)", float(differs), 0)
            rollouts = [handle.body for group in asyncio.run(work(1)) for handle in group][:8]
            gaps = [np.abs(rollout.action_logp - forward(model, rollout)).mean() for rollout in rollouts]
            limit = setting.of(0.05, 1e-3)
            report.check(f"vLLM's log-probs against a forward pass, version {version}, mean", max(gaps), limit)
        sampler.close()
