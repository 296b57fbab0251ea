"""Adapters that a learner trains, in vLLM: exact at every token, proven after every publish, and small on the way."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from slipstream.config.learner import LoraConfig
from slipstream.engines.native.model import load_model, with_adapters
from slipstream.engines.vllm.core import Settings
from slipstream.engines.vllm.sampler import VllmSampler
from slipstream.engines.weights import export_weights, fingerprint
from slipstream.errors import ModelError
from slipstream.protocols import Mode, Sampling, WeightsRef
from support.engines import vllm_sampler
from support.tiny_models import SHAPE, make_model, make_prompts
from support.vllm_calls import assert_exact, generate, grown

LORA = LoraConfig(rank=3, alpha=7)
LONG = Sampling(max_tokens=60, group=2, draws=3)


class Student:
    """The tiny Qwen3 in a directory, and three versions of adapters on it; the first as a learner begins."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 32}, tie_word_embeddings=True)).save_pretrained(path)
        self.path = str(path)
        self.models = [self.adapted(version) for version in range(3)]
        self.weights = [export_weights(model, "float32", version=v) for v, model in enumerate(self.models)]

    def adapted(self, version: int) -> PreTrainedModel:
        base = load_model(self.path, dtype="float32", device="cpu", base=True)
        model = with_adapters(base, LORA, seed=0).model
        torch.manual_seed(version)
        for name, weight in model.named_parameters():
            if version and "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        return model

    def settings(self) -> Settings:
        return Settings(self.path, "float32", 16, lora=LORA)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def sampler(student: Student) -> Iterator[VllmSampler]:
    sampler = vllm_sampler(student.settings(), stop_ids=set(), draws=3)
    try:
        yield sampler
    finally:
        sampler.close()


def test_the_first_adapter_is_the_one_with_which_a_learner_begins(sampler: VllmSampler, student: Student) -> None:
    for rollout in generate(sampler, make_prompts(3), LONG):
        assert set(rollout.versions) == {0}
        assert_exact(student.models, rollout, LONG)


@pytest.mark.parametrize("mode", ["keep", "drain", "restart"])
def test_every_token_is_of_the_version_that_it_names(sampler: VllmSampler, student: Student, mode: Mode) -> None:
    asyncio.run(sampler.publish(student.weights[0], "keep"))

    async def work() -> list[object]:
        running = [asyncio.create_task(sampler.generate(prompt, LONG)) for prompt in make_prompts(12)]
        for version in (1, 2):
            await grown(sampler, 15 * version)
            loaded = await sampler.publish(student.weights[version], mode)
            assert loaded.fingerprint == fingerprint(student.models[version], "float32")
            assert (loaded.thrown > 0) == (mode == "restart")
        return [handle.body for group in await asyncio.gather(*running) for handle in group]

    rollouts = asyncio.run(work())
    for rollout in rollouts:
        assert len(rollout.tokens) == LONG.max_tokens and (np.diff(rollout.versions) >= 0).all()
        assert_exact(student.models, rollout, LONG)
    mixed = [set(rollout.versions) for rollout in rollouts if len(set(rollout.versions)) > 1]
    assert bool(mixed) == (mode == "keep"), "only kept responses have tokens of several versions"


@pytest.mark.parametrize("part", ["A", "B"])
@pytest.mark.parametrize("layer", ["self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"])
def test_another_adapter_than_the_published_one_is_found(
    sampler: VllmSampler, student: Student, monkeypatch: pytest.MonkeyPatch, layer: str, part: str
) -> None:
    """vLLM loads an adapter in which one number of one matrix differs."""
    name, load = f"model.layers.1.{layer}.lora_{part}.default.weight", sampler.loading._load_adapter
    (spec,) = [spec for spec in student.weights[1].manifest if spec.name == name]

    async def other(core: object, path: str, weights: WeightsRef) -> None:
        flat = np.memmap(path, np.uint8, mode="r+")
        last = flat[spec.offset + spec.nbytes - 4 :][:4].view(np.float32)
        last *= 2
        await load(core, path, weights)  # type: ignore[arg-type]
        last /= 2

    monkeypatch.setattr(sampler.loading, "_load_adapter", other)
    found = asyncio.run(sampler.publish(replace(student.weights[1], version=3), "keep"))
    monkeypatch.undo()
    assert found.fingerprint != fingerprint(student.models[1], "float32")
    found = asyncio.run(sampler.publish(student.weights[1], "keep"))
    assert found.fingerprint == fingerprint(student.models[1], "float32")


def test_another_base_than_the_learners_is_found(sampler: VllmSampler, student: Student) -> None:
    other = student.adapted(1)
    with torch.no_grad():
        other.get_submodule("model.layers.1.mlp.down_proj").base_layer.weight[0, 0] += 1
    found = asyncio.run(sampler.publish(export_weights(other, "float32", version=1), "keep"))
    assert found.fingerprint != fingerprint(other, "float32")


def test_a_publish_moves_the_adapter_alone(student: Student) -> None:
    """Rank times inputs plus outputs, of 4 bytes each, for each of the seven linear layers of both blocks."""
    hidden, inner, heads, groups = SHAPE["hidden_size"], SHAPE["intermediate_size"], 32 * 4, 32 * 2
    assert (SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["num_hidden_layers"]) == (4, 2, 2)
    attention = 2 * (hidden + heads) + 2 * (hidden + groups)
    assert student.weights[0].body.nbytes == 2 * LORA.rank * (attention + 3 * (hidden + inner)) * 4


def test_whole_weights_do_not_fit(sampler: VllmSampler) -> None:
    with pytest.raises(ModelError, match="weights do not fit the model"):
        asyncio.run(sampler.publish(export_weights(make_model("qwen3"), "float32", version=1), "keep"))
