"""The pipeline against `examples/loop.py`, and its on-policy schedules against each other: same losses and weights."""

import asyncio
import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schedule import Async, Periodic, Sync
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.objective.method import Method
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines
from slipstream.run_dir.writing import RunLog, read_lines
from support.engines import native_learner, native_sampler, native_scorer
from support.tiny_models import EOS, VOCAB, make_model, wrap

UPDATES, BATCH, MAX_TOKENS, M, LR = 4, 6, 12, 5, 1e-2


@pytest.fixture
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loop", Path(__file__).parents[2] / "examples" / "loop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loop"] = module
    spec.loader.exec_module(module)
    return module


def make_prompts() -> Prompts:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(2, VOCAB, rng.integers(1, 9)).astype(np.int32) for _ in range(15)]
    return Prompts([Row(id=str(i), prompt="x") for i in range(15)], tokens, seed=3, shuffle=True)


def train(
    path: Path,
    *,
    model: str = "qwen3",
    lr: float = LR,
    schedule: Any = None,
    updates: int = UPDATES,
    budget: int = 10_000,
    **options: Any,
) -> NativeLearner:
    """The learner after so many updates, all in float64."""
    student, teacher = make_model(model, seed=1, dtype=torch.float64), make_model(model, seed=2, dtype=torch.float64)
    config = Config(
        student="tiny",
        teachers={"main": TeacherConfig(model="tiny")},
        updates=updates,
        sampler=SamplerConfig(max_tokens=MAX_TOKENS, slots=4),
        loss=ReverseKLMC(m=M),
        learner=LearnerConfig(batch_size=BATCH, lr=lr, token_budget=budget, dtype="float64", **options),
        schedule=schedule or Sync(),
    )
    learner = native_learner(wrap(student), method=Method(loss=config.loss), config=config.learner, updates=updates)
    engines = Engines(
        samplers=(native_sampler(wrap(student), slots=4, stop_ids={EOS}),),
        scorers={"": (native_scorer(wrap(teacher), token_budget=budget),)},
        learner=learner,
        close=lambda: None,
    )
    with RunLog.create(config, path) as log:
        asyncio.run(Run(config, engines, make_prompts(), log, whole_batches=bool(options)).train())
    return learner


def losses_of(path: Path) -> list[float]:
    return [line["loss"] for line in read_lines(path / "metrics.jsonl")]


@pytest.mark.parametrize("token_budget", [40, 10_000])
def test_pipeline_equals_the_readable_loop(oracle: ModuleType, tmp_path: Path, token_budget: int) -> None:
    learner = train(tmp_path / "run", budget=token_budget)
    student, teacher = make_model(seed=1, dtype=torch.float64), make_model(seed=2, dtype=torch.float64)
    expected = copy.deepcopy(student)
    expected_losses = oracle.train(
        expected, teacher, make_prompts(), updates=UPDATES, batch_size=BATCH, max_tokens=MAX_TOKENS, m=M, lr=LR, eos=EOS
    )

    np.testing.assert_allclose(losses_of(tmp_path / "run"), expected_losses, rtol=1e-9)
    moved = 0.0
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(learner.lm.model.get_parameter(name), parameter, rtol=1e-8, atol=1e-9)
        moved = max(moved, (parameter - student.get_parameter(name)).abs().max().item())
    assert moved > LR, "the comparison means something only if the weights moved"


def test_schedules_that_promise_to_be_on_policy_equal_sync(tmp_path: Path) -> None:
    """Twenty updates; what arrives in another order, or is learned from in parts, gives the same sums.

    A norm that rounds to fp32, or a larger learning rate, would amplify the last bit of those sums.
    """
    learners = {
        schedule.kind: train(tmp_path / schedule.kind, model="phi", lr=1e-3, schedule=schedule, updates=20)
        for schedule in (Sync(), Periodic(), Async(tau=0))
    }
    expected = dict(learners["sync"].lm.model.named_parameters())
    scale = max(parameter.abs().max().item() for parameter in expected.values())
    tokens = [line["tokens"] for line in read_lines(tmp_path / "sync" / "metrics.jsonl")]
    for kind in ("periodic", "async"):
        lines = read_lines(tmp_path / kind / "metrics.jsonl")
        assert [line["tokens"] for line in lines] == tokens and {line["lag/max"] for line in lines} == {0.0}
        np.testing.assert_allclose(losses_of(tmp_path / kind), losses_of(tmp_path / "sync"), rtol=1e-7)
        for name, parameter in learners[kind].lm.model.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-8, atol=1e-8 * scale)
    rolled = [read_lines(tmp_path / kind / "ledger.jsonl") for kind in learners]
    texts = [sorted((entry["number"], tuple(entry["tokens"])) for entry in ledger) for ledger in rolled]
    assert texts[0] == texts[1] == texts[2], "the same samples"


def test_periodic_with_several_steps_in_an_update_equals_sync(tmp_path: Path) -> None:
    """Rollouts and scores overlap as they do in one step; the passes with gradient wait for the whole batch."""
    made = {
        schedule.kind: train(tmp_path / schedule.kind, schedule=schedule, minibatches=2, epochs=2, lr=1e-3)
        for schedule in (Sync(), Periodic())
    }
    expected = dict(made["sync"].lm.model.named_parameters())
    for name, parameter in made["periodic"].lm.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-8, atol=1e-9)
    lines = read_lines(tmp_path / "periodic" / "metrics.jsonl")
    assert {line["lag/max"] for line in lines} == {0.0} and len(lines) == UPDATES
