"""Learned noise on the layers: where it acts, its gradient, and what a checkpoint keeps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config.file import parse
from slipstream.config.freshness import FreshnessConfig
from slipstream.config.learner import LearnerConfig, PerturbationConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.objective import PolicyConfig
from slipstream.console import Console
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.over_devices import layers_of
from slipstream.engines.native.rows import probe
from slipstream.errors import RunDirError
from slipstream.objective.method import Method
from slipstream.protocols import Metrics
from slipstream.records import Batch, Counts, Handle, total
from slipstream.run_dir.writing import read_lines
from slipstream.runs import start
from support.engines import native_learner
from support.learners import roll_out, run, score
from support.tiny_models import make_model, wrap
from zoo import families

METHOD = Method(loss=ReverseKLMC(weight=0.0), policy=PolicyConfig(loss="gspo"), rewards={"exact": 1.0})


def learner_of(std: float | None, *, lr: float = 5e-4, method: Method = METHOD, **options: Any) -> NativeLearner:
    noise = None if std is None else PerturbationConfig(std=std, lr=lr)
    config = LearnerConfig(lr=1e-3, perturbation=noise, **options)
    return native_learner(wrap(make_model("qwen3")), method=method, config=config, updates=9)


@pytest.fixture(scope="module")
def batch() -> Batch:
    groups = score(make_model("qwen3", seed=2), roll_out(make_model("qwen3")))
    for group in groups:
        for i, handle in enumerate(group):
            rollout = replace(handle.body.rollout, rewards={"exact": float(i % 2)})
            group[i] = Handle(handle.header, replace(handle.body, rollout=rollout))
    return Batch(tuple(groups), 1)


async def accumulate(learner: NativeLearner, batch: Batch, number: int) -> None:
    batch = replace(batch, update=number)
    await learner.accumulate(batch, total(await learner.prepare(batch)))


async def update(learner: NativeLearner, batch: Batch, number: int) -> Metrics:
    await accumulate(learner, batch, number)
    return await learner.step()


def weights(learner: NativeLearner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.lm.model.parameters()])


def test_noise_that_is_almost_0_changes_almost_nothing_and_more_noise_lowers_confidence(batch: Batch) -> None:
    plain, tiny, loud = (learner_of(std) for std in (None, 1e-12, 3.0))
    for each in (plain, tiny):
        run(accumulate(each, batch, 1))
    for ours, theirs in zip(tiny.lm.model.parameters(), plain.lm.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
    expected, found, far = run(plain.step()), run(tiny.step()), run(update(loud, batch, 1))
    assert found["perturbation/std"] == pytest.approx(1e-12, rel=1e-3) and "perturbation/std" not in expected
    assert far["policy/kl"] > 0.1 > abs(expected["policy/kl"]), "the perturbed policy is far from the old one"


def test_passes_without_gradient_have_no_noise(batch: Batch) -> None:
    plain, loud = learner_of(None), learner_of(3.0)
    samples = [handle.body for handle in batch.handles]
    for ours, theirs in zip(loud.passes.log_probs(samples), plain.passes.log_probs(samples), strict=True):
        assert torch.equal(ours, theirs)


def test_freshness_weights_come_from_a_pass_without_noise(batch: Batch) -> None:
    method = replace(
        METHOD, policy=PolicyConfig(loss="vanilla"), freshness=FreshnessConfig(weight="freshness", apply_to=("policy",))
    )

    async def weighed(std: float | None) -> list[tuple[float, float]]:
        learner = learner_of(std, method=method)
        return [(each.roll, each.w) for each in await learner.accumulate(batch, total(await learner.prepare(batch)))]

    assert run(weighed(3.0)) == run(weighed(None))


def test_the_gradient_of_log_std_is_that_of_the_loss_and_a_recomputed_pass_has_the_same(batch: Batch) -> None:
    found = {}
    for checkpointing in (False, True):
        learner = learner_of(0.3, dtype="float64", checkpointing=checkpointing, token_budget=60)
        assert learner.steps.perturbation is not None
        run(accumulate(learner, batch, 1))
        found[checkpointing] = learner.steps.perturbation.log_std_L.grad.clone()
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=1e-9)
    step, losses = 1e-2, []
    for sign in (1, -1):
        learner = learner_of(0.3, dtype="float64", token_budget=60)
        assert learner.steps.perturbation is not None
        with torch.no_grad():
            learner.steps.perturbation.log_std_L[1] += sign * step
        losses.append(run(update(learner, batch, 1))["loss"])
    assert found[False][1] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_norm_and_its_bound_are_over_the_gradients_of_weights_and_noise(batch: Batch, dtype: str) -> None:
    """AdamW's first moment after one step is 0.1·g, here with g times clip/norm."""
    learner = learner_of(0.5, dtype=dtype, clip_norm=1e-3)
    assert learner.steps.perturbation is not None
    run(accumulate(learner, batch, 1))
    log_std_L = learner.steps.perturbation.log_std_L
    noise_L = log_std_L.grad.double().clone() / len(batch.handles)
    weights_N = torch.cat([p.grad.flatten().double() for p in learner.lm.model.parameters()]) / len(batch.handles)
    norm = run(learner.step(Counts(len(batch.handles), len(batch.handles))))["grad_norm"]
    expected = torch.cat([weights_N, noise_L]).norm().item()
    assert norm == pytest.approx(expected, rel=1e-2 if dtype == "bfloat16" else 1e-5)
    assert norm > 1.001 * weights_N.norm(), "the noise counts"
    moved_L = learner.steps.perturbation.optimizer.state[log_std_L]["exp_avg"].double()
    torch.testing.assert_close(moved_L, 0.1 * noise_L * 1e-3 / norm, rtol=1e-2 if dtype == "bfloat16" else 1e-4, atol=0)


def test_a_resumed_learner_has_the_same_noise(batch: Batch, tmp_path: Path) -> None:
    learner, other = learner_of(0.1, lr=0.5), learner_of(0.1, lr=0.5)
    run(update(learner, batch, 1))
    run(learner.save(tmp_path))
    run(other.restore(tmp_path))
    assert learner.steps.perturbation is not None and other.steps.perturbation is not None
    assert (learner.steps.perturbation.log_std_L - math.log(0.1)).abs().max() > 0.1
    assert [run(update(each, batch, 2)) for each in (learner, other)].count(run(update(learner_of(0.1), batch, 1))) == 0
    assert torch.equal(other.steps.perturbation.log_std_L, learner.steps.perturbation.log_std_L)
    assert torch.equal(weights(other), weights(learner))


def test_a_checkpoint_without_noise_cannot_be_resumed_with_it_and_the_opposite_drops_it(
    batch: Batch, tmp_path: Path
) -> None:
    for name, std in (("plain", None), ("noisy", 0.1)):
        learner = learner_of(std)
        run(update(learner, batch, 1))
        (tmp_path / name).mkdir()
        run(learner.save(tmp_path / name))
    with pytest.raises(RunDirError) as error:
        run(learner_of(0.1).restore(tmp_path / "plain"))
    assert str(error.value) == (
        f"{tmp_path / 'plain'} does not hold the learned noise on the layers: write the learner.perturbation it was "
        "saved under, or begin a new run"
    )
    learner = learner_of(None)
    run(learner.restore(tmp_path / "noisy"))
    assert "perturbation/std" not in run(update(learner, batch, 2))


@pytest.mark.parametrize(
    ("family", "inner"),
    [("mamba", "MambaMixer"), ("gemma3", "SiglipEncoderLayer")],
    ids=["layers in layers", "layers of images"],
)
def test_noise_is_added_once_to_each_layer_that_reads_text(family: str, inner: str) -> None:
    model = families.make(family, dtype=torch.float32)
    assert inner in {type(layer).__name__ for layer in layers_of(model)}
    packed = family == "gemma3"
    config = LearnerConfig(perturbation=PerturbationConfig(std=0.1), packing=packed)
    learner = native_learner(wrap(model), method=METHOD, config=config, updates=1)
    assert learner.steps.perturbation is not None
    with learner.steps.perturbation.during(1, 1):
        torch.cat(probe(learner.lm, packed)).square().sum().backward()
    grad_L = learner.steps.perturbation.log_std_L.grad
    assert grad_L is not None and len(grad_L) == model.config.get_text_config().num_hidden_layers and grad_L.all()


TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 2,
    "task": {"reward": "exact"},
    "sampler": {"max_tokens": 16, "group": 4},
    "learner": {"batch_size": 8, "perturbation": {"std": 0.01}},
    "policy": {"loss": "vanilla"},
    "loss": {"weight": 0.0},
    "schedule": {"kind": "sync"},
    "runtime": {"kind": "inline", "device": "cpu"},
}


def test_a_run_trains_with_it(tmp_path: Path) -> None:
    run_dir = start.train(parse({**TREE, "output": str(tmp_path / "run")}, [], say=str), Console(), name="x")
    lines = read_lines(run_dir / "metrics.jsonl")
    assert len(lines) == 2 and all(line["perturbation/std"] == pytest.approx(0.01, rel=0.01) for line in lines)


def test_a_student_whose_layers_have_no_name_is_refused() -> None:
    lm = wrap(make_model("qwen3"))
    lm.model._no_split_modules = None
    with pytest.raises(Exception, match=r"learner.perturbation: .* Qwen3ForCausalLM does not name its layers: drop it"):
        native_learner(lm, method=METHOD, config=LearnerConfig(perturbation=PerturbationConfig()), updates=1)
