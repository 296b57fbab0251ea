"""A critic on the student or on a model of its own: its values, gradients, warm-up and checkpoints."""

from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import train
from slipstream.config.learner import LearnerConfig, LoraConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.objective import CriticConfig, PolicyConfig
from slipstream.engines.native.learning.critic import ValueHead
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.model import with_adapters
from slipstream.errors import RunDirError
from slipstream.objective.columns import present
from slipstream.objective.method import Method
from slipstream.protocols import Metrics
from slipstream.records import Batch, Handle, Scored, total
from slipstream.run_dir.writing import read_lines
from support.engines import native_learner
from support.learners import roll_out, run
from support.slow_cases import with_slow
from support.tiny_models import make_model, wrap

DTYPE = torch.float64


def method(critic: CriticConfig | None, **options: Any) -> Method:
    policy = PolicyConfig(advantage="gae" if critic else "grpo", advantage_options=options)
    return Method(loss=ReverseKLMC(weight=0.0), policy=policy, critic=critic, rewards={"exact": 1.0})


def learner_of(critic: CriticConfig | None, *, seed: int | None = 5, **options: Any) -> NativeLearner:
    """A learner whose values are random numbers (None: 0, as at the start of a run)."""
    config = LearnerConfig(lr=1e-3, dtype="float64", token_budget=60, **options)
    learner = native_learner(wrap(make_model("qwen3", dtype=DTYPE)), method=method(critic), config=config, updates=9)
    if critic is not None and seed is not None:
        with torch.no_grad():
            weight = head_of(learner).weight
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE) / 10)
    return learner


def learner_with_model(critic: CriticConfig, **options: Any) -> NativeLearner:
    """A learner whose critic has a model of its own, of another architecture, and the value 0 for every state."""
    assert critic.model is not None
    config = LearnerConfig(lr=1e-3, dtype="float64", token_budget=60, **options)
    student, own = wrap(make_model("qwen3", dtype=DTYPE)), wrap(make_model(critic.model, dtype=DTYPE, seed=3))
    if critic.lora is not None:
        own = with_adapters(own, critic.lora, seed=4)
    return native_learner(student, method=method(critic), config=config, updates=9, critic=own)


def critic_weights(learner: NativeLearner) -> torch.Tensor:
    return weights_of(present(learner.critic).passes.lm.model)


def head_of(learner: NativeLearner) -> ValueHead:
    return present(learner.critic).head


@pytest.fixture(scope="module")
def batch() -> Batch:
    groups = roll_out(make_model("qwen3", dtype=DTYPE), draws=1, count=5)
    for group in groups:
        for i, handle in enumerate(group):
            rewards = {"exact": float(i % 2)}
            group[i] = Handle(replace(handle.header, rewards=rewards), replace(handle.body, rewards=rewards))
    return Batch(tuple(groups), 1)


async def accumulate(learner: NativeLearner, batch: Batch, number: int) -> None:
    batch = replace(batch, update=number)
    await learner.accumulate(batch, total(await learner.prepare(batch)))


async def update(learner: NativeLearner, batch: Batch, number: int) -> Metrics:
    await accumulate(learner, batch, number)
    return await learner.step()


def weights(learner: NativeLearner) -> torch.Tensor:
    return weights_of(learner.lm.model)


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def hidden_of(model: Any, sample: Scored) -> torch.Tensor:
    """The last hidden states [T + 1, H] before each token of a response, and behind it, by the model alone."""
    rollout = sample.rollout
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
    hidden: torch.Tensor = model.model(ids[None]).last_hidden_state[0]
    return hidden[len(rollout.prompt.tokens) - 1 :]


def test_values_are_those_of_the_states_and_of_the_end_that_a_limit_has_cut(batch: Batch) -> None:
    learner, model = learner_of(CriticConfig(bootstrap=True)), make_model("qwen3", dtype=DTYPE)
    samples = [Scored(rollout=handle.body) for handle in batch.handles]
    assert {sample.rollout.finish for sample in samples} == {"eos", "length"}
    values, ends = present(learner.critic).values(samples)
    for sample, value_T, end in zip(samples, values, ends, strict=True):
        expected = head_of(learner)(hidden_of(model, sample)).detach()
        torch.testing.assert_close(value_T, expected[:-1])
        cut = sample.rollout.finish == "length"
        torch.testing.assert_close(end, expected[-1] if cut else torch.zeros((), dtype=DTYPE))
    _, ends = present(learner_of(CriticConfig()).critic).values(samples)
    assert not torch.stack(ends).any()


def test_the_value_loss_has_the_gradient_of_one_written_out(batch: Batch) -> None:
    """In the update that computes the values none is clipped: ½ Σ (V − R)² / tokens, for student and head."""
    critic = CriticConfig(weight=0.5)
    learner, without = learner_of(critic), learner_of(replace_weight(critic, 1e-9))
    for each in (learner, without):
        run(accumulate(each, batch, 1))
    found = [p.grad.clone() for p in learner.lm.model.parameters() if p.grad is not None]
    policy = [p.grad.clone() for p in without.lm.model.parameters() if p.grad is not None]
    model, head = make_model("qwen3", dtype=DTYPE), head_of(learner_of(critic))
    tokens = sum(handle.header.trained_tokens for handle in batch.handles)
    loss = torch.zeros((), dtype=DTYPE)
    for handle in batch.handles:
        returns = learner.now.constants[handle.header.number, handle.header.index].columns["returns"]
        value_T = head(hidden_of(model, Scored(rollout=handle.body)))[:-1]
        loss = loss + 0.5 * (value_T - returns).square().sum() / tokens
    (0.5 * loss).backward()
    for ours, policy_part, parameter in zip(found, policy, model.parameters(), strict=True):
        theirs = torch.zeros_like(ours) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours - policy_part, theirs, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(head_of(learner).weight.grad, head.weight.grad)
    assert run(learner.step())["critic/loss"] == pytest.approx(loss.item())


def replace_weight(critic: CriticConfig, weight: float) -> CriticConfig:
    return critic.model_copy(update={"weight": weight})


def test_advantages_are_rewards_above_the_values(batch: Batch) -> None:
    """λ = γ = 1 without bootstrapping: the reward minus V at every token."""
    options = {"lam": 1.0, "normalised": False}
    learner = learner_of(CriticConfig())
    learner.phase = learner.phase._replace(method=method(CriticConfig(), **options))
    learner.phases[0] = learner.phase
    run(accumulate(learner, batch, 1))
    for handle in batch.handles:
        columns = learner.now.constants[handle.header.number, handle.header.index].columns
        reward = handle.header.rewards["exact"]
        torch.testing.assert_close(columns["advantages"], reward - columns["values"])
        torch.testing.assert_close(columns["returns"], torch.full_like(columns["values"], reward))


def test_the_student_does_not_move_while_its_critic_warms_up(batch: Batch) -> None:
    learner = learner_of(CriticConfig(warmup=2, weight=1.0), seed=None, weight_decay=0.1)
    before, values = weights(learner), [head_of(learner).weight.detach().clone()]
    for number in (1, 2):
        metrics = run(update(learner, batch, number))
        values.append(head_of(learner).weight.detach().clone())
        assert metrics["grad_norm"] == 0 and torch.equal(weights(learner), before)
    assert not torch.equal(values[0], values[1]) and not torch.equal(values[1], values[2])
    assert run(update(learner, batch, 3))["grad_norm"] > 0 and not torch.equal(weights(learner), before)


def test_weight_0_trains_the_head_alone(batch: Batch) -> None:
    apart = learner_of(CriticConfig(weight=0.0))
    tiny = learner_of(CriticConfig(weight=1e-12))
    for each in (apart, tiny):
        run(accumulate(each, batch, 1))
    for a, b in zip(apart.lm.model.parameters(), tiny.lm.model.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)
    assert head_of(apart).weight.grad is not None and head_of(apart).weight.grad.abs().max() > 1e-3


def test_a_resumed_learner_has_the_same_values(batch: Batch, tmp_path: Path) -> None:
    learner, other = learner_of(CriticConfig()), learner_of(CriticConfig(), seed=None)
    run(update(learner, batch, 1))
    run(learner.save(tmp_path))
    run(other.restore(tmp_path))
    assert run(update(learner, batch, 2)) == run(update(other, batch, 2))
    assert torch.equal(head_of(other).weight, head_of(learner).weight)
    assert torch.equal(weights(other), weights(learner))
    plain = tmp_path / "plain"
    plain.mkdir()
    run(learner_of(None).save(plain))
    with pytest.raises(RunDirError, match=r"does not hold the values of a critic: write the \[critic\] it was saved"):
        run(learner_of(CriticConfig()).restore(plain))


def test_values_of_a_constant_reward_are_learned(batch: Batch) -> None:
    """Every answer is worth 1: after some updates the values explain it, and advantages fade."""
    sure = Batch(tuple([h.with_header(rewards={"exact": 1.0}) for h in group] for group in batch.groups), 1)
    learner, losses = learner_of(CriticConfig(lr=0.005, weight=0.0, clip=1e9), seed=None), list[float]()
    for number in range(1, 21):
        losses.append(run(update(learner, sure, number))["critic/loss"])
    assert losses[-1] < 0.2 * losses[0]


# --- a model of its own -----------------------------------------------------------------------------------------------

OWN = CriticConfig(model="phi", lr=0.01, backbone_lr=3e-3, clip=1e9)
"""phi has an output head that is no embedding."""


def test_a_model_of_its_own_gets_the_gradient_of_the_value_loss_written_out(batch: Batch) -> None:
    """Σ ½ (V − R)² / tokens, with values V that depend on the state."""
    learner, model = learner_with_model(OWN), make_model("phi", dtype=DTYPE, seed=3)
    head = head_of(learner)
    with torch.no_grad():
        head.weight[:-1] = torch.linspace(-0.1, 0.1, len(head.weight) - 1, dtype=DTYPE)
    run(accumulate(learner, batch, 1))
    tokens = sum(handle.header.trained_tokens for handle in batch.handles)
    loss = torch.zeros((), dtype=DTYPE)
    for handle in batch.handles:
        columns = learner.now.constants[handle.header.number, handle.header.index].columns
        value_T = head(hidden_of(model, Scored(rollout=handle.body)))[:-1]
        torch.testing.assert_close(value_T.detach(), columns["values"])
        loss = loss + 0.5 * (value_T - columns["returns"]).square().sum() / tokens
    loss.backward()
    pairs = zip(present(learner.critic).passes.lm.model.named_parameters(), model.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        assert (ours.grad is None) == name.startswith("lm_head"), "the output head is not trained"
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-9, rtol=1e-6)


def test_the_student_has_no_gradient_of_the_values_of_another_model(batch: Batch) -> None:
    """With the value 0 for every state both critics give the same advantages."""
    learner, apart = learner_with_model(OWN), learner_of(CriticConfig(weight=0.0), seed=None)
    for each in (learner, apart):
        run(accumulate(each, batch, 1))
    for ours, theirs in zip(learner.lm.model.parameters(), apart.lm.model.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, present(theirs.grad))
    norms = [run(each.step())["grad_norm"] for each in (learner, apart)]
    assert norms[0] == norms[1] > 0 and torch.equal(weights(learner), weights(apart))


def test_a_model_of_its_own_warms_up_before_the_student_moves(batch: Batch) -> None:
    learner = learner_with_model(OWN.model_copy(update={"warmup": 1}), weight_decay=0.1)
    student, critic = weights(learner), critic_weights(learner)
    head_of(learner).weight.data += 0.1
    assert run(update(learner, batch, 1))["grad_norm"] == 0 and torch.equal(weights(learner), student)
    assert not torch.equal(critic_weights(learner), critic)
    assert run(update(learner, batch, 2))["grad_norm"] > 0 and not torch.equal(weights(learner), student)


@pytest.mark.parametrize(
    "changes, options",
    [
        ({}, {"optimizer_dtype": "float32", "minibatches": 2}),
        ({"lora": LoraConfig(rank=2)}, {"offload": ("optimizer",)}),
    ],
    ids=["all weights", "adapters, offloaded"],
)
def test_a_resumed_critic_of_its_own_model_is_the_same_to_the_bit(
    batch: Batch, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    critic = OWN.model_copy(update={"warmup": 1, **changes})
    learner, other = learner_with_model(critic, **options), learner_with_model(critic, **options)
    for number in (1, 2):
        run(update(learner, batch, number))
    assert not torch.equal(critic_weights(learner), critic_weights(other))
    run(learner.save(tmp_path))
    run(other.restore(tmp_path))
    for number in (3, 4):
        assert run(update(learner, batch, number)) == run(update(other, batch, number))
    assert torch.equal(head_of(other).weight, head_of(learner).weight)
    assert torch.equal(critic_weights(other), critic_weights(learner)) and torch.equal(weights(other), weights(learner))


def test_a_checkpoint_of_another_critic_is_refused(batch: Batch, tmp_path: Path) -> None:
    shared, own = learner_of(CriticConfig()), learner_with_model(OWN)
    for name, learner, other in (("shared", shared, own), ("own", own, shared)):
        (tmp_path / name).mkdir()
        run(learner.save(tmp_path / name))
        with pytest.raises(RunDirError, match="does not hold the values of this critic: write the critic.model it was"):
            run(other.restore(tmp_path / name))


@pytest.mark.parametrize("lora", with_slow([None, LoraConfig(rank=4)], quick=[None]), ids=["all weights", "adapters"])
def test_a_model_of_its_own_learns_which_prompts_are_rewarded(batch: Batch, lora: LoraConfig | None) -> None:
    """Answers to prompts with an even number are worth 1, others 0: the true value of every state is known."""
    table = Batch(
        tuple([h.with_header(rewards={"exact": 1.0 - h.header.number % 2}) for h in g] for g in batch.groups), 1
    )
    learner = learner_with_model(OWN.model_copy(update={"lora": lora, "warmup": 100}), clip_norm=1e9)
    explained = [run(update(learner, table, number))["critic/explained_variance"] for number in range(1, 41)]
    assert explained[0] == 0 and explained[-1] > 0.95
    values, _ = present(learner.critic).values([Scored(rollout=handle.body) for handle in table.handles])
    for handle, value_T in zip(table.handles, values, strict=True):
        torch.testing.assert_close(value_T, torch.full_like(value_T, 1.0 - handle.header.number % 2), atol=0.25, rtol=0)


def test_a_learner_that_waits_moves_the_model_of_its_critic_too() -> None:
    learner = learner_with_model(OWN)
    own = {id(each) for each in present(learner.critic).passes.lm.model.parameters()}
    assert own <= {id(each) for each in learner.on_device()}


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("sync", None),
        ("periodic", "builtin:student"),
        ("step_off", None),
        ("async", "builtin:student"),
        ("replay", None),
    ],
)
def test_every_schedule_learns_values(kind: str, model: str | None, tmp_path: Path) -> None:
    tree = {
        "student": "builtin:student",
        "updates": 4,
        "output": str(tmp_path / "run"),
        "loss": {"weight": 0.0},
        "policy": {"advantage": "gae", "loss": "vanilla"},
        "critic": {"warmup": 1, "lr": 0.05, "model": model},
        "task": {"reward": "exact"},
        "sampler": {"max_tokens": 40},
        "learner": {"batch_size": 8},
        "schedule": {"kind": kind},
        "runtime": {"kind": "inline", "device": "cpu"},
    }
    lines = [line for line in read_lines(train(tree, quiet=True).path / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["update"] for line in lines] == [1, 2, 3, 4]
    assert all(isfinite(line["critic/loss"]) for line in lines) and any(line["critic/loss"] for line in lines)
    assert any("critic/explained_variance" in line for line in lines), "some answers are right, and others are not"
