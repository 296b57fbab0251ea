"""Adapters: what is trained, what travels, what is saved."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.config.learner import LearnerConfig, LoraConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.engines.native.adapters import linear_layers
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.model import LanguageModel, with_adapters
from slipstream.engines.weights import fingerprint, load_weights
from slipstream.errors import ConfigError
from slipstream.objective.method import Method
from slipstream.records import Batch, Handle, total
from support.engines import native_learner
from support.learners import roll_out, run, score
from support.tiny_models import make_model, wrap

Groups = tuple[list[Handle], ...]
IDS = torch.arange(2, 20)[None]
LORA = LoraConfig(rank=2, targets=("q_proj", "down_proj"))


def student(lora: LoraConfig = LORA, **options: Any) -> LanguageModel:
    return with_adapters(wrap(make_model(**options)), lora, seed=7)


def learner(**config: Any) -> NativeLearner:
    settings = LearnerConfig(lr=1e-2, lora=LORA, **config)
    return native_learner(student(), method=Method(loss=ReverseKLMC(m=3)), config=settings, updates=9, snapshots=2)


@pytest.fixture(scope="module")
def groups() -> Groups:
    return tuple(score(make_model(seed=2), roll_out(make_model(seed=0))))


async def update(learner: NativeLearner, groups: Groups, number: int = 1) -> None:
    batch = Batch(groups, number)
    await learner.accumulate(batch, total(await learner.prepare(batch)))
    await learner.step()


@pytest.mark.parametrize("lora", [LORA, LoraConfig(rank=2)], ids=["some", "all"])
def test_adapters_begin_as_nothing_and_the_same_everywhere(lora: LoraConfig) -> None:
    one, other, plain = student(lora), student(lora), make_model()
    assert torch.equal(one.model(IDS).logits, plain(IDS).logits)
    trained = [name for name, parameter in one.model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * (2 if lora is LORA else 7) and all(".lora_" in name for name in trained)
    assert fingerprint(one.model, "float32") == fingerprint(other.model, "float32")


def test_only_adapters_change_and_travel_and_the_sampler_then_runs_the_same(groups: Groups) -> None:
    made, sampler = learner(), student()
    base = {name: p.clone() for name, p in made.lm.model.named_parameters() if not p.requires_grad}
    asyncio.run(update(made, groups))
    weights, expected = run(made.export())
    assert all(".lora_" in spec.name for spec in weights.manifest)
    assert weights.body.nbytes < 0.2 * sum(p.numel() * 4 for p in made.lm.model.parameters())
    for name, parameter in base.items():
        assert torch.equal(parameter, made.lm.model.get_parameter(name))
    assert fingerprint(sampler.model, "float32") != expected
    load_weights(sampler.model, weights)
    assert fingerprint(sampler.model, "float32") == expected
    ids, positions = IDS, torch.arange(IDS.shape[1])[None]
    made.lm.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(made.lm.model(ids, position_ids=positions).logits, sampler.model(ids).logits)


def test_the_fingerprint_covers_the_base_that_adapters_stand_on() -> None:
    one, other = student(), student()
    with torch.no_grad():
        other.model.get_parameter("model.layers.0.self_attn.o_proj.weight")[0, 0] += 1.0
    assert fingerprint(one.model, "float32") != fingerprint(other.model, "float32")


def test_what_is_saved_is_an_ordinary_model_with_the_adapters_merged(tmp_path: Path, groups: Groups) -> None:
    made, again = learner(), learner()

    async def work() -> None:
        await update(made, groups)
        await made.save(tmp_path)
        await again.restore(tmp_path)
        await update(made, groups, 2)
        await update(again, groups, 2)

    asyncio.run(work())
    for ours, theirs in zip(made.lm.model.parameters(), again.lm.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    plain, fresh = AutoModelForCausalLM.from_pretrained(tmp_path), learner()
    run(fresh.restore(tmp_path))
    fresh.lm.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, fresh.lm.model(IDS).logits, atol=2e-5, rtol=1e-4)
    assert not any("lora" in name for name, _ in plain.named_parameters())


def test_snapshots_hold_adapters_only_and_give_back_what_they_were(groups: Groups) -> None:
    made = learner()

    async def work() -> None:
        await made.export()
        await update(made, groups)

    asyncio.run(work())
    assert all(held.numel() <= 2 * 48 for held in made.weights.snapshots.weights[0])
    after = [p.detach().clone() for p in made.lm.model.parameters()]
    with made.weights.snapshots.under(0):
        zeros = [p for name, p in made.lm.model.named_parameters() if "lora_B" in name]
        assert not any(p.any() for p in zeros)
    assert all(torch.equal(a, b) for a, b in zip(after, made.lm.model.parameters(), strict=True))


def test_a_target_that_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"learner.lora.targets: 'qproj' is no linear layer .*did you mean 'q_proj'"):
        student(LoraConfig(targets=("qproj",)))
    with pytest.raises(ConfigError, match="'lm_head' is no linear layer .*; known: down_proj, gate_proj"):
        student(LoraConfig(targets=("q_proj", "lm_head")))


def test_layers_that_share_a_weight_have_no_adapter() -> None:
    """Each would add its own to the one weight, and the merged student would be another model."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    layers[2].weight = layers[0].weight
    assert list(linear_layers(layers)) == ["1"]
