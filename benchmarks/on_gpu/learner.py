"""The learner's update: model FLOP utilisation, tokens per second, and peak memory against the plan's arithmetic."""

import asyncio
import gc
import tempfile
import time

import torch

from on_gpu.report import SHAPES, Report, Setting, peak_tflops, samples, seconds_of
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import LossConfig, ReverseKL, ReverseKLMC
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.settings import LearnerSettings
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.plan import placement
from slipstream.plan.engine_plans import LearnerPlan, ModelPlan
from slipstream.records import Batch, total

PROMPT_SHARE = 8
"""One token in eight is a prompt's."""


def stage(setting: Setting, report: Report) -> None:
    for shape in SHAPES:
        for tokens in setting.of((4096, 16_384), (128,)):
            for checkpointing in (False, True):
                attempt(setting, report, shape, tokens, checkpointing, ReverseKLMC(m=16), "16 draws")
    attempt(setting, report, SHAPES[0], setting.of(16_384, 128), False, ReverseKL(), "exact over the vocabulary")
    optimizers(setting, report)


def attempt(
    setting: Setting, report: Report, shape: str, tokens: int, checkpointing: bool, loss: LossConfig, name: str
) -> None:
    """Measure one setting; running out of memory is a result as well."""
    what = f"{shape}, {tokens:,} tokens, {name}{', recomputed' * checkpointing}"
    try:
        update(setting, report, what, shape, tokens, checkpointing, loss)
    except torch.cuda.OutOfMemoryError:
        report.skip(what, "out of memory")
    gc.collect()
    if not setting.small:
        torch.cuda.empty_cache()


def update(
    setting: Setting, report: Report, what: str, shape: str, tokens: int, checkpointing: bool, loss: LossConfig
) -> None:
    lm = setting.model(shape)
    exact = isinstance(loss, ReverseKL)
    size = lm.head.weight.shape[1]
    count = setting.of(8, 2)
    length = tokens // count
    prompt = length // PROMPT_SHARE
    handles = samples(count, prompt, length - prompt, lm.vocab_size, hidden=size if exact else 0)
    dtype = str(setting.dtype).removeprefix("torch.")
    config = LearnerConfig(dtype=dtype, checkpointing=checkpointing, token_budget=tokens, lr=1e-6)
    heads = {"teacher": TeacherHead(setting.model(shape, seed=1).head)} if exact else None
    learner = NativeLearner(lm, LearnerSettings(method=Method(loss=loss), settings=config, updates=9), heads=heads)
    if not setting.small:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks: list[tuple[float, float]] = []

    async def work() -> None:
        for number in range(1, 5):
            batch = Batch(tuple([handle] for handle in handles), number)
            setting.synchronize()
            began = time.perf_counter()
            counts = total(await learner.prepare(batch))
            await learner.accumulate(batch, counts)
            setting.synchronize()
            backward = time.perf_counter()
            await learner.step()
            setting.synchronize()
            marks.append((backward - began, time.perf_counter() - backward))

    try:
        asyncio.run(work())
    finally:
        learner.close()
    backward, step = (sorted(each)[1] for each in zip(*marks[1:], strict=True))
    needed = flops(lm, count, length, prompt)
    peak = peak_tflops(setting)
    rate = needed / (backward + step) / 1e12
    report.number(f"{what}: speed", tokens / (backward + step), "tokens/s", note=f"step alone {1e3 * step:.1f} ms")
    if peak:
        note = f"{rate:.0f} of {peak:.0f} TFLOP/s; {rate * (backward + step) / backward / peak:.1%} without the step"
        report.number(f"{what}: MFU", 100 * rate / peak, "%", goal="≥ 45", note=note)
    held = 0.0 if setting.small else torch.cuda.max_memory_allocated() / 2**30
    report.number(
        f"{what}: peak memory", held, "GiB", note=planned(setting, config, learner.plan.method, shape, tokens)
    )


def flops(lm: LanguageModel, count: int, length: int, prompt: int) -> float:
    """Return the operations that the task needs: 6 per weight and token, and causal attention.

    The input embedding costs nothing. The head is counted for predicted tokens only. Recomputation does not count.
    """
    config = lm.model.config
    head = lm.head.weight.numel()
    embedding = 0 if config.tie_word_embeddings else head
    body = sum(parameter.numel() for parameter in lm.model.parameters()) - head - embedding
    linear = 6 * (body * count * length + head * count * (length - prompt))
    return linear + 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * count * length**2


def planned(setting: Setting, config: LearnerConfig, method: Method, shape: str, tokens: int) -> str:
    """Return what `slipstream config --check` counts for such a learner; activations are its estimate."""
    with tempfile.TemporaryDirectory() as folder:
        setting.config(shape).save_pretrained(folder)
        student = ModelPlan(name=folder, dtype=config.dtype, device="cuda")
        parts = placement.learner(
            LearnerPlan(
                student=student,
                settings=config,
                method=method,
                updates=1,
                width=setting.config(shape).hidden_size,
                step_tokens=tokens,
                export_dtype=config.dtype,
                teachers={},
                one_ends={},
                snapshots=0,
                follow={},
                cosine_every=0,
                cosine_limit=None,
                threads=1,
                patience=0.0,
            ),
        )
    counted = sum(value for name, value in parts.items() if not name.startswith("~"))
    return f"planned {counted / 2**30:.1f} GiB, and about {parts['~activations'] / 2**30:.1f} of activations"


def optimizers(setting: Setting, report: Report) -> None:
    """AdamW by torch's fused kernel against its loop over tensors."""
    model = setting.model(SHAPES[0], torch.float32).model
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for name, options in (("foreach", {"foreach": True}), ("fused", {"fused": True})):
        adam = torch.optim.AdamW(model.parameters(), lr=1e-6, **options)
        report.number(f"AdamW, {name}, float32", 1e3 * seconds_of(adam.step, setting, repeats=3), "ms")
