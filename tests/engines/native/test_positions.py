"""Position factors that a model chooses by the longest position of a pass: one set for a whole run."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig, PreTrainedModel

from slipstream.engines.native.config import context_length, position_note
from slipstream.engines.native.model import split
from support.tiny_models import SHAPE

ORIGINAL = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": ORIGINAL,
}
CONFIGS: dict[str, Any] = {
    "longrope": lambda: Phi3Config(**SHAPE, original_max_position_embeddings=ORIGINAL, rope_parameters=LONGROPE),
    "longrope, scaled": lambda: PhimoeConfig(
        **SHAPE, num_local_experts=2, rope_parameters=LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}
    ),
    "dynamic": lambda: LlamaConfig(
        **SHAPE | {"max_position_embeddings": ORIGINAL},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
}
IDS = torch.arange(1, 31)[None]


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()


@torch.no_grad()
def logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    return model(IDS[:, :length], use_cache=False).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_short_sequence_is_the_same_beside_a_long_one(name: str) -> None:
    as_it_comes = make(name)
    apart = (logits(as_it_comes, 30)[:10] - logits(as_it_comes, 10)).abs().max()
    assert apart > 0.05, "the model as it comes changes with the length of the pass"
    lm = split("tiny", make(name), max_length=30)
    torch.testing.assert_close(logits(lm.model, 30)[:10], logits(lm.model, 10))
    torch.testing.assert_close(logits(lm.model, 30), logits(as_it_comes, 30))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_of_short_sequences_has_the_factors_of_short_ones(name: str) -> None:
    lm, as_it_comes = split("tiny", make(name), max_length=12), make(name)
    torch.testing.assert_close(logits(lm.model, 12), logits(as_it_comes, 12))
    assert lm.max_length == 12


def test_what_was_chosen_is_said() -> None:
    phi, llama = CONFIGS["longrope"](), CONFIGS["dynamic"]()
    assert (
        position_note(phi, 30)
        == "longrope positions: a run uses the factors for 30 tokens (long: the original context is 16)"
    )
    assert (
        position_note(phi, 16)
        == "longrope positions: a run uses the factors for 16 tokens (short: the original context is 16)"
    )
    assert "dynamic positions" in str(position_note(llama, 20))
    assert position_note(LlamaConfig(**SHAPE), 20) is None
    assert context_length(llama) == 4 * ORIGINAL
