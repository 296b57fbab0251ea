"""The pipeline against `examples/loop.py`: same seeds, same models, same losses and weights."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from slipstream.config import Config, LearnerConfig, ReverseKLMC, SamplerConfig, TeacherConfig
from slipstream.engines.base import Engines
from slipstream.engines.native.learner import NativeLearner
from slipstream.engines.native.sampler import NativeSampler
from slipstream.engines.native.scorer import NativeScorer
from slipstream.pipeline.run import Run
from slipstream.runlog import RunLog, read_lines
from slipstream.tasks.data import Prompts, Row
from slipstream.tasks.rewards import PoolGrader
from tiny import EOS, VOCAB, make_model, wrap

UPDATES, BATCH, MAX_TOKENS, M, LR = 4, 6, 12, 5, 1e-2


@pytest.fixture
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loop", Path(__file__).parents[1] / "examples" / "loop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loop"] = module
    spec.loader.exec_module(module)
    return module


def make_prompts() -> Prompts:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(2, VOCAB, rng.integers(1, 9)).astype(np.int32) for _ in range(15)]
    return Prompts([Row(id=str(i), prompt="x") for i in range(15)], tokens, seed=3, shuffle=True)


@pytest.mark.parametrize("token_budget", [40, 10_000])
def test_pipeline_equals_the_readable_loop(oracle: ModuleType, tmp_path: Path, token_budget: int) -> None:
    student, teacher = make_model(seed=1, dtype=torch.float64), make_model(seed=2, dtype=torch.float64)
    config = Config(
        student="tiny",
        teachers={"main": TeacherConfig(model="tiny")},
        updates=UPDATES,
        sampler=SamplerConfig(max_tokens=MAX_TOKENS, slots=4),
        loss=ReverseKLMC(m=M),
        learner=LearnerConfig(batch_size=BATCH, lr=LR, token_budget=token_budget, dtype="float64"),
    )
    learner = NativeLearner(wrap(student), loss=config.loss, config=config.learner, updates=UPDATES)
    engines = Engines(
        sampler=NativeSampler(wrap(student), slots=4, stop_ids={EOS}),
        scorer=NativeScorer(wrap(teacher), token_budget=token_budget),
        learner=learner,
        grader=PoolGrader(None, str),
        close=lambda: None,
    )
    with RunLog.create(config, tmp_path / "run") as log:
        asyncio.run(Run(config, engines, make_prompts(), log).train())
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]

    expected = copy.deepcopy(student)
    expected_losses = oracle.train(
        expected, teacher, make_prompts(), updates=UPDATES, batch_size=BATCH, max_tokens=MAX_TOKENS, m=M, lr=LR, eos=EOS
    )

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
    moved = 0.0
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(learner.lm.model.get_parameter(name), parameter, rtol=1e-8, atol=1e-9)
        moved = max(moved, (parameter - student.get_parameter(name)).abs().max().item())
    assert moved > LR, "the comparison means something only if the weights moved"
