"""Dropout and router noise: off in training unless asked for, wherever a model draws them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PhimoeConfig, Starcoder2Config

from slipstream.config.learner import LearnerConfig
from slipstream.engines.native.learning.student import deterministic
from slipstream.engines.native.model import LanguageModel, split
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.rows import probe
from slipstream.errors import ModelError
from support.engines import student_passes
from support.tiny_models import SHAPE, VOCAB, make_model, wrap

CONFIGS: dict[str, Any] = {
    "in the attention": lambda: LlamaConfig(**SHAPE, attention_dropout=0.5),
    "in the layers": lambda: Starcoder2Config(
        **SHAPE, attention_dropout=0.5, residual_dropout=0.5, embedding_dropout=0.5
    ),
    "in the layers themselves": lambda: OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, dropout=0.5
    ),
    "in the router": lambda: PhimoeConfig(
        **SHAPE, num_local_experts=4, router_jitter_noise=0.5, input_jitter_noise=0.5
    ),
}


def make(name: str) -> LanguageModel:
    torch.manual_seed(0)
    return split("tiny", AutoModelForCausalLM.from_config(CONFIGS[name]()).eval())


def gradients(lm: LanguageModel, packed: bool) -> dict[str, Tensor]:
    lm.model.zero_grad()
    hidden_NH = torch.cat(probe(lm, packed))
    (hidden_NH * torch.arange(hidden_NH.numel()).cos().view_as(hidden_NH)).sum().backward()
    return {name: p.grad.clone() for name, p in lm.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_the_policy_that_sampled(name: str, packing: bool, checkpointing: bool) -> None:
    lm, config = make(name), LearnerConfig(packing=packing, checkpointing=checkpointing)
    plain = make(name)
    plain.model.set_attn_implementation("eager")
    expected = gradients(plain, False)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    student_passes(lm, config, Ranks(), temperature=1.0)
    for _ in range(2):
        found = gradients(lm, packing)
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-4 * largest)


@pytest.mark.parametrize("packing", [True, False])
def test_dropout_that_was_asked_for_is_drawn_in_training_only(packing: bool) -> None:
    lm = make("in the attention")
    passes = student_passes(lm, LearnerConfig(packing=packing, dropout=True), Ranks(), temperature=1.0)
    once, again = probe(lm, packing), probe(lm, packing)
    assert not any(torch.allclose(one, other) for one, other in zip(once, again, strict=True))
    with deterministic(passes.lm.model):
        once, again = probe(lm, packing), probe(lm, packing)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    assert lm.model.training


def test_dropout_that_a_model_does_not_have_cannot_be_asked_for() -> None:
    with pytest.raises(ModelError, match="tiny: Qwen3ForCausalLM has no dropout .* drop learner.dropout = true"):
        student_passes(wrap(make_model()), LearnerConfig(dropout=True), Ranks(), temperature=1.0)


def test_a_model_that_draws_all_the_same_is_refused() -> None:
    lm = wrap(make_model())
    lm.model.model.layers[0].register_forward_hook(
        lambda module, inputs, out: out * torch.rand(1) if module.training else out
    )
    student_passes(lm, LearnerConfig(), Ranks(), temperature=1.0)
    with pytest.raises(ModelError, match="two passes of Qwen3ForCausalLM in training mode differ by"):
        student_passes(lm, LearnerConfig(checkpointing=True), Ranks(), temperature=1.0)
