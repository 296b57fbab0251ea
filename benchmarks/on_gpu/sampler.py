"""The native sampler: tokens per second by slots, log-probs against a forward pass, and a publish in mid-response."""

import asyncio
import threading
import time

import numpy as np
import torch
from transformers import StaticCache

from on_gpu.report import SHAPES, Report, Setting, seconds_of
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.sampling.requests import FutureResult
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.engines.weights import export_weights
from slipstream.protocols import Sampling
from slipstream.records import Prompt, Rollout

GRAPHED = 64
"""Rows of the decoding step whose graph is timed."""


def stage(setting: Setting, report: Report) -> None:
    exactness(setting, report)
    lm = setting.model(SHAPES[0])
    for slots in setting.of((1, 8, 64, 256), (2,)):
        for draws in (1, 16):
            took, tokens, busy = speed(setting, lm, slots, draws)
            goal = "within 2× of vLLM" if slots == 64 and draws == 1 else ""
            note = f"device busy {busy:.0%} of the time" if busy else ""
            report.number(f"{slots} slots, {draws} draws", tokens / took, "tokens/s", goal=goal, note=note)
    graph(setting, report)


def prompts_of(count: int, length: int, vocabulary: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(id=str(i), number=i, tokens=rng.integers(2, vocabulary, length), seed=i) for i in range(count)]


def speed(setting: Setting, lm: LanguageModel, slots: int, draws: int) -> tuple[float, int, float]:
    """Answer as many prompts as there are slots; return seconds, tokens, and the share of time the device was busy."""
    sampler = NativeSampler(lm, SamplerSettings(slots=slots), stop_ids=set())
    length, answer = setting.of((128, 256), (4, 6))
    sampling = Sampling(max_tokens=answer, draws=draws)

    async def work(tokens: int) -> None:
        some = Sampling(max_tokens=tokens, draws=draws)
        await asyncio.gather(*[sampler.generate(p, some) for p in prompts_of(slots, length, lm.vocab_size)])

    asyncio.run(work(8))
    setting.synchronize()
    began = time.perf_counter()
    asyncio.run(work(sampling.max_tokens))
    setting.synchronize()
    took, busy = time.perf_counter() - began, 0.0
    if not setting.small:
        steps = 32
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            began = time.perf_counter()
            asyncio.run(work(steps))
            torch.cuda.synchronize()
            wall = time.perf_counter() - began
        busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / wall
    sampler.close()
    return took, slots * answer, busy


class PausedSampler(NativeSampler):
    """Stops before the token at which a first row is `pause_at` tokens long, until `go_on` is set."""

    def __init__(self, lm: LanguageModel, pause_at: int) -> None:
        self.paused, self.go_on, self.pause_at = threading.Event(), threading.Event(), pause_at
        super().__init__(lm, SamplerSettings(slots=4), stop_ids=set())

    def _draw(self) -> list[FutureResult]:
        if any(row.tokens >= self.pause_at for row in self.rows):
            self.paused.set()
            self.go_on.wait()
        return super()._draw()


def exactness(setting: Setting, report: Report) -> None:
    """Ragged answers in float32 with a publish in mid-response: log-probs are those of their version."""
    lm, after = (setting.model(SHAPES[0], torch.float32, seed=seed) for seed in (0, 1))
    with torch.no_grad():  # near the first weights: as after an update
        for old, new in zip(lm.model.parameters(), after.model.parameters(), strict=True):
            new.copy_(old + 0.02 * (new - old))
    before = setting.model(SHAPES[0], torch.float32)
    answer = setting.of(96, 12)
    sampler = PausedSampler(lm, answer // 3)
    weights = export_weights(after.model, "float32", version=1)

    async def work() -> list[Rollout]:
        prompts = [p for length in setting.of((16, 100, 333), (2, 5)) for p in prompts_of(2, length, lm.vocab_size)]
        jobs = [asyncio.ensure_future(sampler.generate(p, Sampling(max_tokens=answer, draws=4))) for p in prompts]
        await asyncio.to_thread(sampler.paused.wait)
        published = asyncio.ensure_future(sampler.publish(weights, "keep"))
        await asyncio.sleep(0)  # the request to publish is there before the next token
        sampler.go_on.set()
        await published
        return [handle.body for group in await asyncio.gather(*jobs) for handle in group]

    rollouts = asyncio.run(work())
    sampler.close()
    seen = {int(version) for rollout in rollouts for version in rollout.versions}
    report.check(
        "versions of tokens around a publish (0: both were seen, in order)", float(not in_order(rollouts, seen)), 0
    )
    worst = max(
        float(np.abs(rollout.action_logp[at] - forward(model, rollout)[at]).max())
        for rollout in rollouts
        for version, model in enumerate((before, after))
        if (at := rollout.versions == version).any()
    )
    report.check("log-probs of draws against a forward pass of their version, float32", worst, 2e-3)


def in_order(rollouts: list[Rollout], seen: set[int]) -> bool:
    return seen == {0, 1} and all((np.diff(rollout.versions) >= 0).all() for rollout in rollouts)


@torch.no_grad()
def forward(lm: LanguageModel, rollout: Rollout) -> np.ndarray:
    """Return log-probs of the rollout's draws [T, M] by one forward pass over the whole sequence."""
    lm.model.set_attn_implementation("eager")
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64)).to(lm.device)
    logits = lm.model(ids[None], use_cache=False).logits[0, len(rollout.prompt.tokens) - 1 : -1]
    actions = torch.from_numpy(rollout.actions.astype(np.int64)).to(lm.device)
    return logits.float().log_softmax(-1).gather(1, actions).cpu().numpy()


def graph(setting: Setting, report: Report) -> None:
    """Report the speed that a CUDA graph of the decoding step could reach: HF's static cache, without sampling."""
    lm = setting.model(SHAPES[0])
    lm.model.set_attn_implementation("sdpa")
    rows, length = setting.of(GRAPHED, 2), setting.of(512, 16)
    cache = StaticCache(config=lm.model.config, max_cache_len=length)
    ids = torch.ones(rows, 1, dtype=torch.int64, device=setting.device)
    at = torch.full((1,), length // 2, dtype=torch.int64, device=setting.device)

    @torch.inference_mode()
    def step() -> None:
        lm.model(ids, past_key_values=cache, cache_position=at, position_ids=at[None], use_cache=True)

    eager = seconds_of(step, setting)
    report.number(f"one step of {rows} rows by HF's static cache, eager", rows / eager, "tokens/s")
    if setting.small:
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    took = seconds_of(captured.replay, setting)
    report.number("the same step as a CUDA graph", rows / took, "tokens/s", note=f"{eager / took:.1f}× eager")
