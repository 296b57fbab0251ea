"""Every distillation loss that a config can choose: it trains, and its gradient is that of the formula written out.

The reference computes whole distributions with plain models in float64, and then what the loss says, by itself.
"""

import asyncio
import io
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.config.file import parse
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import DISTILLATION_LOSSES, DistillationLoss
from slipstream.config.objective import PolicyConfig
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.records import Batch, total
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import resume, train
from support.engines import native_learner
from support.loss_formulas import (
    CHOSEN,
    FORMULAS,
    View,
    chosen,
    distributions,
    drew,
    grads_of,
    groups_for,
    likely,
    teacher_of,
)
from support.tiny_models import make_model, wrap

OTHER_TOKENIZER = {"model": "builtin:pair_teacher", "spelling": "own"}
OTHER = ("uld", "gold", "gold_merged", "common_topk")
TOKEN_WEIGHTS = sorted({*get_args(DistillationLoss.model_fields["tokens"].annotation)} - {"all"})
ROWS = [(kind, options) for kind, variants in CHOSEN.items() for options in variants]


def test_every_row_of_the_table_is_here() -> None:
    assert set(CHOSEN) == set(DISTILLATION_LOSSES)


# --- the formulas, written out ----------------------------------------------------------------------------------------


# --- the same by the engines ------------------------------------------------------------------------------------------


def learner_of(
    model: PreTrainedModel, loss: DistillationLoss, teacher: PreTrainedModel, **changes: Any
) -> NativeLearner:
    config = LearnerConfig(batch_size=8, dtype="float64", lr=0.01, clip_norm=1e9, token_budget=64)
    heads = {"teacher": TeacherHead(wrap(teacher).head)} if loss.spec.cache == "hidden" else None
    method = Method(loss=loss, max_tokens=9, **changes)
    return native_learner(wrap(model), method=method, config=config, updates=3, teacher_heads=heads)


@pytest.mark.parametrize(
    ("kind", "options", "temperature"),
    [(*row, 1.0) for row in ROWS] + [(kind, variants[-1], 0.5) for kind, variants in CHOSEN.items()],
)
def test_the_gradient_is_that_of_the_formula_at_arrival_and_one_step_later(
    kind: str, options: dict[str, Any], temperature: float
) -> None:
    """The student that learns is not the one that drew; the second half of the batch meets one that has moved on."""
    loss = chosen(kind, options | {"temperature": temperature})
    student = make_model("phi", seed=0, dtype=torch.float64)
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype))
    teacher, groups = teacher_of(torch.float64), groups_for(loss, "phi", torch.float64)

    async def work() -> tuple[list[Tensor], list[PreTrainedModel]]:
        learner = learner_of(student, loss, teacher)
        batch = Batch(tuple(groups), 1)
        counts = await learner.prepare(batch)
        grads, models = list[Tensor](), list[PreTrainedModel]()
        for half in (slice(0, 2), slice(2, 4)):
            models.append(make_model("phi", dtype=torch.float64))
            models[-1].load_state_dict(learner.lm.model.state_dict())
            await learner.accumulate(Batch(tuple(groups[half]), 1), total(counts[half]))
            grads.append(grads_of(learner.lm.model).clone())
            await learner.step()
        learner.close()
        return grads, models

    grads, models = asyncio.run(work())
    first_NV = torch.empty(0)
    for number, (half, grad) in enumerate(zip((slice(0, 2), slice(2, 4)), grads, strict=True)):
        now = models[number]
        now.zero_grad()
        samples = [handle.body for group in groups for handle in group]
        now_NV = distributions(now, samples, temperature)
        first_NV = now_NV.detach() if number == 0 else first_NV
        frozen = View(
            now_NV,
            likely(drew(), loss, 1.0),
            first_NV,
            likely(teacher, loss, temperature),
            draws=torch.cat([torch.from_numpy(sample.rollout.actions).long() for sample in samples]),
        )
        rows = [len(h.body.rollout.tokens) for group in groups[half] for h in group]
        before = [len(h.body.rollout.tokens) for group in groups[: half.start] for h in group]
        its = slice(sum(before), sum(before) + sum(rows))
        (FORMULAS[kind](frozen, options)[its].sum() / sum(rows)).backward()
        torch.testing.assert_close(grad, grads_of(now), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("path", ["fused", "by row"])
@pytest.mark.parametrize(("kind", "options"), ROWS)
def test_every_loss_trains_alone_and_beside_a_policy_loss_over_rows(
    kind: str, options: dict[str, Any], path: str
) -> None:
    """Two updates in float32 by the native engines: finite, of this loss, and the weights have moved."""
    loss = chosen(kind, options)
    groups, teacher = groups_for(loss, "qwen3", torch.float32), teacher_of(torch.float32)
    beside = {"policy": PolicyConfig(loss="gspo"), "rewards": {"exact": 1.0}} if path == "by row" else {}

    async def work() -> list[dict[str, float]]:
        learner = native_learner(
            wrap(make_model()),
            method=Method(loss=loss, max_tokens=9, **beside),
            config=LearnerConfig(batch_size=8, lr=0.01),
            updates=2,
            teacher_heads={"teacher": TeacherHead(wrap(teacher).head)} if loss.spec.cache == "hidden" else None,
        )
        assert learner.phase.objective.single_pass == (path == "fused")
        metrics, prints = [], [(await learner.export())[1]]
        for update in (1, 2):
            batch = Batch(tuple(groups), update)
            counts = total(await learner.prepare(batch))
            await learner.accumulate(batch, counts)
            metrics.append(await learner.step())
            prints.append((await learner.export())[1])
        learner.close()
        assert len(set(prints)) == 3
        return metrics

    for metrics in asyncio.run(work()):
        assert all(np.isfinite(value) for value in metrics.values())
        assert metrics["distill/loss_abs"] > 0 and 0 < metrics["student/entropy"] < np.log(31)
        assert ("policy/loss" in metrics) == (path == "by row")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("k1", {}, 'kind = "k1" as a loss has no teacher in its gradient: write use = "advantage"'),
        ("k2", {"clip": 0.2}, 'clip is for use = "advantage"'),
        ("k3", {"dual_clip": 4.0}, 'dual_clip is for use = "advantage"'),
        ("k2", {"policy": "cispo"}, 'policy is for use = "advantage"'),
        ("k2", {"use": "advantage", "policy": "sapo", "clip": 0.1}, 'policy = "sapo" has no clip: drop clip'),
        ("k2", {"use": "advantage", "policy": "cispo", "dual_clip": 4.0}, 'policy = "cispo" has no dual clip'),
        ("reverse_kl_topk", {"tail": True}, "write renormalise = false"),
        ("forward_kl", {"use": "advantage"}, "Extra inputs are not permitted"),
        ("reverse_kl_mc", {"loss_max_clamp": 1.0}, "Extra inputs are not permitted"),
    ],
)
def test_what_makes_no_sense_is_refused(kind: str, options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        chosen(kind, options)


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "decoupled_ppo", "m": 2},
        {"kind": "m2po", "m": 2},
        {"kind": "reverse_kl_topk", "k": 8},
        {"kind": "reverse_kl_topk", "k": 8, "renormalise": False, "detach_mass": True},
        {"kind": "kl", "use": "advantage"},
        {"kind": "reverse_kl_mc", "m": 2, "reward_scale": 1.25},
        {"kind": "mopd", "k": 8},
        {"kind": "eopd", "cache": "teacher_topk", "k": 8},
        {"kind": "uld"},
        {"kind": "gold", "rest": 0.5},
        {"kind": "gold_merged"},
        {"kind": "common_topk", "k": 8, "beta": 1.0},
        {"kind": "common_topk", "cache": "teacher_topk", "k": 8},
    ],
    ids=lambda loss: loss["kind"],
)
def test_train_runs_losses_with_unusual_inputs(loss: dict[str, Any], tmp_path: Path) -> None:
    """Train from a config through plan and start checks, in mini-batches, on stale samples."""
    tree = {
        "student": "builtin:student",
        "updates": 2,
        "output": str(tmp_path / "run"),
        "teachers": {"main": OTHER_TOKENIZER if loss["kind"] in OTHER else {"model": "builtin:teacher"}},
        "sampler": {"max_tokens": 8, "group": 2},
        "learner": {"batch_size": 8, "minibatches": 2},
        "loss": loss,
        "schedule": {"kind": "step_off"},
        "runtime": {"kind": "inline"},
    }
    run = train(parse(tree), Console(file=io.StringIO()), name="losses")
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["version"] for line in lines] == [1, 2] and all(line["distill/loss_abs"] > 0 for line in lines)


@pytest.mark.parametrize("tokens", TOKEN_WEIGHTS)
def test_train_weighs_tokens_of_stale_episodes(tokens: str, tmp_path: Path) -> None:
    tree = {
        "student": "builtin:tool_student",
        "updates": 2,
        "output": str(tmp_path / "run"),
        "teachers": {"main": {"model": "builtin:tool_teacher"}},
        "data": {"train": "builtin:lookup"},
        "environment": {"use": "lookup", "calls": 2, "turns": 3},
        "sampler": {"max_tokens": 48},
        "learner": {"batch_size": 4},
        "loss": {"tokens": tokens},
        "schedule": {"kind": "step_off"},
        "runtime": {"kind": "inline"},
    }
    run = train(parse(tree), Console(file=io.StringIO()), name="tokens")
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["version"] for line in lines] == [1, 2] and all(line["grad_norm"] > 0 for line in lines)


def test_a_run_that_extrapolates_resumes_with_its_first_student_as_reference(tmp_path: Path) -> None:
    """Bit for bit; the first lines of the run say what is minimised."""
    tree: dict[str, Any] = {
        "student": "builtin:student",
        "updates": 3,
        "teachers": {"main": {"model": "builtin:teacher"}},
        "sampler": {"max_tokens": 8},
        "learner": {"batch_size": 4, "lr": 1e-3},
        "loss": {"m": 2, "reward_scale": 1.25},
        "schedule": {"kind": "sync"},
        "runtime": {"kind": "inline"},
    }
    said = io.StringIO()
    whole = train(parse(tree | {"output": str(tmp_path / "whole")}), Console(file=said, width=200), name="whole")
    assert "loss: 1 · reverse_kl_mc of 1.25 · teacher/start" in said.getvalue()
    parts = train(parse(tree | {"output": str(tmp_path / "parts"), "updates": 1}), Console(file=said), name="parts")
    resume(parts, Console(file=said), updates=3)
    plain = tree | {"output": str(tmp_path / "plain"), "loss": {"m": 2}}
    found = [(run / "final" / "model.safetensors").read_bytes() for run in (whole, parts)]
    assert found[0] == found[1]
    assert found[0] != (train(parse(plain), Console(file=said), name="plain") / "final/model.safetensors").read_bytes()
