"""The plan's estimate of activations against those that a pass stores, and the number of tokens of a pass."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slipstream.config.file import parse
from slipstream.config.learner import LearnerConfig
from slipstream.engines.native.model import LanguageModel, load_model
from slipstream.engines.native.packing import pack
from slipstream.engines.native.rows import Rows, placeholder, use_rows
from slipstream.plan.engine_plans import LearnerPlan, ModelPlan
from slipstream.plan.placement import WIDTHS, learner, pass_tokens, shape_of, stored_bytes
from slipstream.plan.plan import plan


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    size = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "intermediate_size": 160}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 80, "head_dim": 16}
    made = {
        "llama": LlamaForCausalLM(LlamaConfig(**size)),
        "experts": Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, **experts)),
    }
    folder = tmp_path_factory.mktemp("models")
    for name, model in made.items():
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in made} | {"builtin": "builtin:student", "words": "builtin:word_student"}


def stored(lm: LanguageModel, *, half: bool) -> float:
    """Return the bytes per token and layer that a pass over packed rows stores, without weights."""
    rollouts = [placeholder(np.arange(40) % 30, np.arange(60) % 30, number=i) for i in range(8)]
    (batch,) = pack(rollouts, budget=10_000, hidden=lm.model.config.hidden_size)
    rows, storages = Rows(rollouts, batch, lm.device), dict[int, int]()
    weights = {each.untyped_storage().data_ptr() for each in lm.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=half):
        rows.hidden(lm.backbone)
    layers = [part for part in lm.backbone.modules() if isinstance(part, nn.Linear)]
    rounded = sum(2 * part.weight.numel() for part in layers) if half else 0
    return (sum(storages.values()) - rounded) / batch.computed / lm.model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["llama", "builtin", "words", "experts"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_the_estimate_is_near_what_a_pass_stores(models: dict[str, str], name: str, dtypes: tuple[str, str]) -> None:
    dtype, compute_dtype = dtypes
    lm = load_model(models[name], dtype=dtype, device="cpu")
    use_rows(lm)
    if name == "experts":
        lm.model.set_experts_implementation("eager")
    found = stored(lm, half=dtype != compute_dtype)
    expected = stored_bytes(shape_of(models[name]), WIDTHS[dtype], WIDTHS[compute_dtype], cpu=True)
    assert found / 1.21 < expected < found * 1.2


def planned(**changes: object) -> LearnerPlan:
    tree = {"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"}}, "data": {"limit": 40}}
    tree |= {"sampler": {"max_tokens": 60, "max_length": 100, "group": 2}}
    return plan(parse(tree | {"learner": {"batch_size": 8} | changes})).engines.learner


def test_a_pass_has_no_more_tokens_than_a_step() -> None:
    """Eight samples of at most 100 tokens are 800; a minibatch or a rank has half of them."""
    assert [pass_tokens(planned(**each)) for each in ({}, {"minibatches": 2}, {"ranks": 2})] == [800, 400, 400]
    assert pass_tokens(planned(token_budget=300)) == 300


def test_the_only_pass_of_a_step_frees_activations_while_it_makes_gradients() -> None:
    shape = shape_of("builtin:student")
    per_token = shape.layers * stored_bytes(shape, 4, 4, cpu=True)
    gradients = 4 * (shape.parameters - shape.outside)
    assert learner(planned())["~activations"] == 800 * per_token - gradients
    assert learner(planned(token_budget=799))["~activations"] == 799 * per_token


@pytest.mark.parametrize(
    ("tokens", "recomputed", "peak"),
    [(4096, False, 12.3), (4096, True, 4.9), (16_384, False, 35.5), (16_384, True, 5.9)],
)
def test_the_plan_of_a_0_6b_student_is_near_the_peaks_of_an_h100(
    tmp_path: Path, tokens: int, recomputed: bool, peak: float
) -> None:
    """Peaks in GiB of `make gpu` on 2026-11-27, with weights in bfloat16 and chunks of 2^24 logits, now 2^27."""
    size: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
    size |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936, "tie_word_embeddings": True}
    Qwen3Config(**size).save_pretrained(tmp_path)
    settings = LearnerConfig(dtype="bfloat16", checkpointing=recomputed, token_budget=tokens)
    student = ModelPlan(name=str(tmp_path), dtype="bfloat16", device="cuda")
    parts = learner(replace(planned(), student=student, settings=settings, step_tokens=tokens, teachers={}))
    assert parts.pop("logits") == 2 * 2**27
    assert peak < sum(parts.values()) / 2**30 < 1.15 * peak
