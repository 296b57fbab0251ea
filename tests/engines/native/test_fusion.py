"""Logit fusion: rollouts of a mixture of student and teacher, its share over updates, and what learns from them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import train
from slipstream.config.file import parse
from slipstream.config.sampler import FusionConfig
from slipstream.engines.draws import fused
from slipstream.errors import NonFiniteError
from slipstream.pipeline.admission import AdmissionState
from slipstream.pipeline.run import admission_of, choice_of, sampling_of
from slipstream.plan.plan import plan
from slipstream.protocols import Sampling
from slipstream.records import Handle, Header, Rollout
from slipstream.run_dir.writing import read_lines
from support.engines import native_sampler
from support.tiny_models import EOS, make_model, make_prompts, wrap


def test_the_mixture_is_the_geometric_mean_of_both() -> None:
    generator = torch.Generator().manual_seed(0)
    student_NV, teacher_NV = torch.randn(2, 3, 9, generator=generator, dtype=torch.float64)
    mixed_NV = fused(student_NV, teacher_NV, 0.3).softmax(-1)
    mean_NV = student_NV.softmax(-1) ** 0.7 * teacher_NV.softmax(-1) ** 0.3
    torch.testing.assert_close(mixed_NV, mean_NV / mean_NV.sum(-1, keepdim=True))
    torch.testing.assert_close(fused(student_NV, teacher_NV, 1.0).softmax(-1), teacher_NV.softmax(-1))
    with pytest.raises(NonFiniteError, match="sampler.fusion draws from them"):
        fused(student_NV, torch.full_like(teacher_NV, torch.nan), 0.3)


@torch.no_grad()
def log_probs(rollout: Rollout, models: tuple[torch.nn.Module, ...], sampling: Sampling) -> Tensor:
    """Return the log-probs of the mixture at every token, from plain passes of both models."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
    start = len(rollout.prompt.tokens) - 1
    student_TV, teacher_TV = (model(ids[None]).logits[0, start:-1].log_softmax(-1) for model in models)
    mixed_TV = (1 - sampling.fusion) * student_TV + sampling.fusion * teacher_TV
    return (mixed_TV / sampling.temperature).log_softmax(-1)


def test_recorded_log_probs_are_those_of_the_mixture() -> None:
    """Requests with several shares, and some of the student alone, share few slots."""
    models = make_model("qwen3", dtype=torch.float64), make_model("llama", seed=3, dtype=torch.float64)
    prompts = make_prompts(9, longest=20)
    shares = (0.0, 0.25, 0.8)
    asked = [Sampling(4 + i, group=1 + i % 2, draws=2, temperature=0.8, fusion=shares[i % 3]) for i in range(9)]

    async def main() -> list[Rollout]:
        sampler = native_sampler(wrap(models[0]), slots=4, stop_ids={EOS}, teacher=wrap(models[1]))
        try:
            calls = [sampler.generate(*pair) for pair in zip(prompts, asked, strict=True)]
            return [handle.body for group in await asyncio.gather(*calls) for handle in group]
        finally:
            sampler.close()

    for rollout in asyncio.run(main()):
        expected_TV = log_probs(rollout, models, asked[rollout.prompt.number])
        ids_TM = torch.from_numpy(rollout.actions).long()
        np.testing.assert_allclose(rollout.action_logp, expected_TV.gather(1, ids_TM), atol=1e-10)


def test_the_share_falls_to_zero_with_the_updates_and_with_easy_prompts() -> None:
    fusion = FusionConfig(alpha=0.8, updates=4)
    assert [fusion.share(update) for update in range(1, 7)] == [0.8, 0.6, 0.4, 0.2, 0.0, 0.0]
    assert FusionConfig(alpha=0.8).share(1000) == 0.8
    assert fusion.share(1, difficulty=0.5) == 0.4 and fusion.share(1, difficulty=0.0) == 0.0


TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 3,
    "teachers": {"main": {"model": "builtin:teacher"}},
    "sampler": {"max_tokens": 8, "fusion": {"alpha": 1.0, "updates": 2}},
    "learner": {"batch_size": 8, "lr": 1e-3},
    "schedule": {"kind": "sync"},
    "task": {"reward": "exact"},
    "runtime": {"kind": "inline", "device": "cpu"},
    "log": {"trace": False},
}


def test_difficulty_is_measured_by_the_adaptive_order() -> None:
    fusion = {"sampler": {"max_tokens": 8, "fusion": {"alpha": 0.8, "difficulty": True}}}
    made = plan(parse(TREE | {"data": {"order": "adaptive"}} | fusion), ask=False)
    choice = choice_of(made.config, made.prompts, None)
    choice.source(0)
    admission = admission_of(made.config, choice, AdmissionState())
    admission.submit()
    options = sampling_of(made.config, made.sampling, choice, admission, choice.prompt(0))
    assert options.fusion == 0.4, "without answers the mean reward counts as one half"
    what = {"prompt": "p", "number": 0, "data_source": "", "prompt_tokens": 1, "tokens": 4, "versions": ((0, 4),)}
    header = Header(**what, index=0, episode=0, finish="eos")  # type: ignore[arg-type]
    right = [replace(header, index=i, episode=i, rewards={"exact": float(i < 3)}) for i in range(4)]
    choice.note([Handle(each, None) for each in right])
    choice.update(live={0})
    options = sampling_of(made.config, made.sampling, choice, admission, choice.prompt(0))
    assert options.fusion == FusionConfig(alpha=0.8).share(1, choice.difficulty(0)) < 0.4, "three of four were right"


def test_the_share_falls_with_updates_after_the_supervised_ones() -> None:
    """Not with groups: those that policy.refill drops do not count."""
    tree = TREE | {"sft": {"updates": 3, "source": "teacher"}, "updates": 5}
    made = plan(parse(tree), ask=False)
    choice = choice_of(made.config, made.prompts, None)
    admission = admission_of(made.config, choice, AdmissionState(version=3, submitted=70, supervised=3, first=24))
    (number, *_) = admission.submit()
    options = sampling_of(made.config, made.sampling, choice, admission, choice.prompt(number))
    assert options.fusion == 1.0
    admission.live[number].version = 4
    options = sampling_of(made.config, made.sampling, choice, admission, choice.prompt(number))
    assert options.fusion == 0.5


def test_a_run_draws_like_its_teacher_at_first_and_like_the_student_later(tmp_path: Path) -> None:
    train(parse(TREE | {"output": str(tmp_path / "run")}))
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    first, *_, last = (line["teacher/kl"] for line in lines)
    assert abs(first) < 1e-3 < last, "the first rollouts are those of the teacher"
