"""Rollouts of the quantised student, and training in float16 with a loss scale."""

import copy
import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from slipstream.config.file import load
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ForwardKL, ReverseKLMC
from slipstream.config.objective import PolicyConfig
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.learning.step import FIRST_SCALE, GROWTH_INTERVAL, LossScale
from slipstream.engines.native.learning.storage import LEARNER_NUMBERS
from slipstream.engines.native.model import called_layers
from slipstream.engines.quantisation import quantise, quantised
from slipstream.errors import NonFiniteError
from slipstream.objective.method import Method
from slipstream.protocols import Sampling
from slipstream.records import ONE_COUNT, Batch, Handle, Scored, total
from slipstream.runs import start as launch
from support.engines import native_learner, native_sampler
from support.learners import roll_out, run, score
from support.tiny_models import EOS, make_model, make_prompts, wrap


def learner_of(loss: Any = None, **given: Any) -> NativeLearner:
    config = {name: given.pop(name) for name in list(given) if name in LearnerConfig.model_fields}
    method = given.pop("method", None) or Method(loss=loss or ReverseKLMC(m=3))
    return native_learner(wrap(make_model()), method=method, config=LearnerConfig(**config), updates=9, **given)


def batch_of(number: int = 1) -> Batch:
    return Batch(tuple(score(make_model(seed=2), roll_out(make_model()))), number)


async def update(learner: NativeLearner, batch: Batch, number: int, *, summed: bool = False) -> dict[str, float]:
    batch = replace(batch, update=number)
    counts = total(await learner.prepare(batch))
    await learner.accumulate(batch, ONE_COUNT if summed else counts)
    return await learner.step(counts if summed else ONE_COUNT)


# --- quantised rollouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_quantised_sampler_proves_what_it_runs_and_records_its_own_log_probs(kind: str) -> None:
    """After every publish the log-probs are those of a plain model whose weights are codes times scales."""
    learner, batch = learner_of(lr=1e-2, quantisation=kind), batch_of()
    lm = wrap(make_model(seed=5))
    quantise(lm.model, called_layers(lm), kind)

    async def work() -> None:
        sampler = native_sampler(lm, slots=8, stop_ids={EOS})
        prints = set[str]()
        for version in range(2):
            weights, expected = await learner.export()
            assert (await sampler.publish(weights, "keep")).fingerprint == expected
            prints.add(expected)
            rollouts = [h.body for p in make_prompts(4) for h in await sampler.generate(p, Sampling(max_tokens=9))]
            plain = copy.deepcopy(learner.lm.model)
            with torch.no_grad():
                for name in called_layers(wrap(make_model())):
                    weight = plain.get_submodule(name).weight
                    codes, scale = quantised(weight, kind)
                    weight.copy_(codes.float() * scale)
            reference = native_learner(
                wrap(plain), method=Method(loss=ReverseKLMC()), config=LearnerConfig(), updates=1
            )
            same = reference.passes.log_probs([Scored(rollout=each) for each in rollouts])
            other = learner.passes.log_probs([Scored(rollout=each) for each in rollouts])
            for rollout, found, whole in zip(rollouts, same, other, strict=True):
                np.testing.assert_allclose(rollout.logp, found, atol=2e-5)
                assert np.abs(rollout.logp - whole.numpy()).max() > 1e-4, "another policy than the learner's"
            reference.close()
            await update(learner, batch, version + 1)
        assert len(prints) == 2
        sampler.close()

    run(work())
    learner.close()


# --- float16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("summed", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [
        {"loss": ReverseKLMC(m=3)},
        {"method": Method(loss=ReverseKLMC(m=3), policy=PolicyConfig(loss="gspo"), rewards={"exact": 1.0})},
    ],
    ids=["fused", "rows"],
)
def test_a_step_in_float16_is_that_of_float32_up_to_rounding(options: Any, summed: bool) -> None:
    groups = score(make_model(seed=2), roll_out(make_model()))
    for group in groups:
        for i, handle in enumerate(group):
            rollout = replace(handle.body.rollout, rewards={"exact": float(i % 2)})
            group[i] = Handle(handle.header, replace(handle.body, rollout=rollout))
    found = []
    for compute in (None, "float16"):
        learner = learner_of(**copy.deepcopy(options), compute_dtype=compute, token_budget=40)
        if not summed:  # a mean over few tokens has large gradients
            learner.steps.scale.value /= 64
        metrics = run(update(learner, Batch(tuple(groups), 1), 1, summed=summed))
        found.append((metrics, torch.cat([p.detach().flatten() for p in learner.lm.model.parameters()])))
        learner.close()
    (exact, weights), (rounded, others) = found
    assert rounded.pop("loss_scale") == FIRST_SCALE / (1 if summed else 64) and rounded.pop("steps_skipped") == 0
    assert rounded.keys() == exact.keys()
    for name in ("loss", "grad_norm", "gradient/signal"):
        assert rounded[name] == pytest.approx(exact[name], rel=0.02), name
    start = torch.cat([p.detach().flatten() for p in wrap(make_model()).model.parameters()])
    cosine = torch.nn.functional.cosine_similarity(weights - start, others - start, dim=0)
    assert cosine > 0.98


def test_small_gradients_survive_in_the_fused_head() -> None:
    """A loss of 1e-6 per token has gradients below 6e-8, the smallest number of float16, if nothing scales them."""
    norms = {}
    for on in (True, False):
        learner = learner_of(ForwardKL(k=5, weight=1e-6), compute_dtype="float16")
        learner.steps.scale = LossScale(on=on)
        batch = Batch(tuple(score(make_model(seed=2), roll_out(make_model()), cache="teacher_topk", k=5)), 1)
        norms[on] = run(update(learner, batch, 1))["grad_norm"]
        learner.close()
    exact = learner_of(ForwardKL(k=5, weight=1e-6))
    expected = run(update(exact, batch, 1))["grad_norm"]
    exact.close()
    assert norms[True] == pytest.approx(expected, rel=0.02)
    assert norms[False] < 0.5 * expected


def test_an_overflow_skips_the_step_halves_the_scale_and_is_counted(tmp_path: Path) -> None:
    learner, batch = learner_of(compute_dtype="float16", lr=1e-2), batch_of()
    before = [p.detach().clone() for p in learner.lm.model.parameters()]
    learner.steps.scale.value, learner.steps.scale.steps = 2.0**40, 7
    skipped = run(update(learner, batch, 1))
    assert skipped["steps_skipped"] == 1 and skipped["loss_scale"] == 2.0**40
    assert "grad_norm" not in skipped and all(map(math.isfinite, skipped.values())), "no guard sees a NaN"
    assert all(torch.equal(a, b) for a, b in zip(before, learner.lm.model.parameters(), strict=True))
    assert (learner.steps.scale.value, learner.steps.scale.steps) == (2.0**39, 0) and learner.made == 1
    assert not learner.steps.optimizer.state
    learner.steps.scale.value = 256.0
    assert run(update(learner, batch, 2))["steps_skipped"] == 0
    assert learner.steps.scale.steps == 1
    run(learner.save(tmp_path))
    other = learner_of(compute_dtype="float16")
    run(other.restore(tmp_path))
    assert (other.steps.scale.value, other.steps.scale.steps) == (256.0, 1)
    saved = json.loads((tmp_path / LEARNER_NUMBERS).read_text())
    del saved["loss_scale"]
    (tmp_path / LEARNER_NUMBERS).write_text(json.dumps(saved))
    run(other.restore(tmp_path))  # a checkpoint of an older format
    assert (other.steps.scale.value, other.steps.scale.steps) == (256.0, 0)
    learner.close()
    other.close()


@pytest.mark.parametrize("offload", [[], ["optimizer"]], ids=["on the device", "in host memory"])
@pytest.mark.parametrize("moments", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_of_any_precision_are_resumed_bit_for_bit(
    dtype: str, moments: str | None, offload: list[str], tmp_path: Path
) -> None:
    made = wrap(make_model(dtype=getattr(torch, dtype)))
    config = LearnerConfig(lr=1e-2, dtype=dtype, optimizer_dtype=moments, offload=offload)
    learner, other = (
        native_learner(copy.deepcopy(made), method=Method(loss=ReverseKLMC(m=3)), config=config, updates=9)
        for _ in range(2)
    )
    batch = batch_of()
    for number in (1, 2):
        run(update(learner, batch, number))
    run(learner.save(tmp_path))
    run(other.restore(tmp_path))
    for a, b in zip(learner.lm.model.parameters(), other.lm.model.parameters(), strict=True):
        one, resumed = learner.steps.optimizer.state[a], other.steps.optimizer.state[b]
        assert one.keys() == resumed.keys()
        assert all(one[name].dtype == resumed[name].dtype and torch.equal(one[name], resumed[name]) for name in one)
    assert run(update(learner, batch, 3)) == run(update(other, batch, 3))
    pairs = zip(learner.lm.model.parameters(), other.lm.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    learner.close()
    other.close()


def test_a_run_that_changes_to_float16_begins_with_the_first_scale(tmp_path: Path) -> None:
    """A checkpoint of a run without a loss scale has none: `resume --change learner.compute_dtype` starts one."""
    learner = learner_of(compute_dtype="bfloat16")
    run(update(learner, batch_of(), 1))
    run(learner.save(tmp_path))
    assert json.loads((tmp_path / LEARNER_NUMBERS).read_text())["loss_scale"] is None
    other = learner_of(compute_dtype="float16")
    run(other.restore(tmp_path))
    assert (other.steps.scale.value, other.steps.scale.steps) == (FIRST_SCALE, 0)
    learner.close()
    other.close()


def test_an_overflow_that_no_scale_prevents_stops_the_run() -> None:
    learner, batch = learner_of(ReverseKLMC(m=3, weight=1e30), compute_dtype="float16"), batch_of()
    learner.steps.scale.value = 1.0
    with pytest.raises(NonFiniteError, match=r"the gradient norm of update 1 is (nan|inf)$"):
        run(update(learner, batch, 1))
    with torch.no_grad():
        learner.lm.model.model.layers[0].mlp.down_proj.weight.fill_(1e5)
    message = r"the loss of update 2 is nan; learner.compute_dtype = 'float16' overflows above 65504: write 'bfloat16'"
    with pytest.raises(NonFiniteError, match=message):
        run(update(learner, batch, 2))
    learner.close()


def test_the_scale_grows_after_steps_without_overflow() -> None:
    scale = LossScale(on=True)
    for _ in range(GROWTH_INTERVAL - 1):
        scale.succeeded()
    assert scale.value == FIRST_SCALE
    scale.succeeded()
    assert (scale.value, scale.steps) == (2 * FIRST_SCALE, 0)
    assert scale.apply(summed=False) == 2 * FIRST_SCALE and scale.apply(summed=True) == 2.0
    for _ in range(17):
        assert scale.overflowed()
    assert scale.value == 1.0 and not scale.overflowed(), "then it is no overflow"
    exact = LossScale(on=False)
    assert exact.apply(summed=True) == exact.apply(summed=False) == 1.0 and not exact.overflowed()


# --- whole runs ------------------------------------------------------------------------------------------------------

RUNS = {
    "int8": (
        "--sampler.quantisation int8",
        'student with int8 weights; loss.kind = "reverse_kl_mc" weighs draws by the',
    ),
    "fp8": (
        "--sampler.quantisation fp8 --loss.importance false",
        "fp8 weights; nothing in the loss holds the ratio to it",
    ),
    "both int8": (
        "--sampler.quantisation int8 --learner.quantised true",
        "the learner computes with int8 weights, too",
    ),
    "both fp8": (
        "--sampler.quantisation fp8 --learner.quantised true --sampler.dtype bfloat16",
        "the learner computes with fp8 weights, too",
    ),
    "both int8, with a teacher that follows": (
        "--sampler.quantisation int8 --learner.quantised true --teachers.main.model self "
        "--teachers.main.follow.ema 0.9 --teachers.main.context {prompt}{ground_truth}",
        "the learner computes with int8 weights, too",
    ),
    "float16": ("--sampler.dtype float16 --learner.compute_dtype float16", "loss: 1 · reverse_kl_mc"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_starts_with_its_checks_and_learns_from_another_policy(kind: str, tmp_path: Path) -> None:
    words, said = RUNS[kind]
    (tmp_path / "run.toml").write_text(f"""
student = "builtin:student"
updates = 2
output = "{tmp_path}/run"
[teachers.main]
model = "builtin:teacher"
[sampler]
max_tokens = 16
[learner]
batch_size = 8
[schedule]
kind = "sync"
[runtime]
kind = "inline"
device = "cpu"
""")
    pairs = [each.removeprefix("--") for each in words.split()]
    config = load(tmp_path / "run.toml", list(zip(pairs[::2], pairs[1::2], strict=True)), say=str)
    out = StringIO()
    run_dir = launch.train(config, Console(width=400, file=out), name="x")
    assert said in out.getvalue()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    most = 1e-9 if kind.startswith("both int8") else 0.02
    assert len(lines) == 2 and all(0 < line["drift/k3_kl"] < most for line in lines)
    if kind == "float16":
        assert all(line["drift/k3_kl"] < 1e-4 and line["steps_skipped"] in (0, 1) for line in lines)
