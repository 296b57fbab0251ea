"""Fingerprints cover weights family by family, and one wrong number in any of them shows."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig, PhiConfig, Qwen3MoeConfig

from slipstream.engines import weights as module
from slipstream.engines.weights import buckets, export_weights, fingerprint, is_fingerprinted, load_weights
from support.tiny_models import SHAPE

OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 31}
FAMILIES: dict[str, tuple[Callable[[], Any], str, list[str]]] = {
    "llama": (lambda: LlamaConfig(**SHAPE), "model.layers.1.", ["self_attn.o_proj.weight", "mlp.down_proj.weight"]),
    "experts": (
        lambda: Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        "model.layers.1.",
        ["self_attn.o_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
    "gpt2": (
        lambda: GPT2Config(**OLD),
        "transformer.h.1.",
        ["attn.c_proj.weight", "attn.c_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"],
    ),
    "phi": (
        lambda: PhiConfig(**SHAPE),
        "model.layers.1.",
        ["self_attn.dense.weight", "self_attn.dense.bias", "mlp.fc2.weight", "mlp.fc2.bias"],
    ),
    "mamba": (
        lambda: MambaConfig(vocab_size=31, hidden_size=32, num_hidden_layers=2),
        "backbone.layers.1.",
        ["mixer.out_proj.weight"],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_wrong_number_in_the_output_of_any_layer_shows(family: str) -> None:
    config, layer, expected = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(config())
    weights = {name: parameter.detach() for name, parameter in model.named_parameters() if is_fingerprinted(name)}
    assert sorted(weights) == sorted(f"{layer.replace('1', number)}{name}" for name in expected for number in "01")
    before = fingerprint(model, "bfloat16")
    assert before == fingerprint(model, "bfloat16", exported=export_weights(model, "bfloat16"))
    for name, weight in weights.items():
        last = weight.view(-1)[-1]
        kept = last.clone()
        last.add_(1)
        assert fingerprint(model, "bfloat16") != before, name
        last.copy_(kept)
    assert fingerprint(model, "bfloat16") == before


def test_where_no_name_is_known_all_weights_count() -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(3, 3), "other": torch.nn.Linear(3, 3)})
    before = fingerprint(model, "float32")
    with torch.no_grad():
        model["other"].bias.add_(1)
    assert fingerprint(model, "float32") != before


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 7))
def test_buckets_hold_every_element_once_and_in_order(sizes: list[int], limit: int) -> None:
    found = list(buckets(sizes, limit))
    elements = [(i, j) for i, begin, end in chain(*found) for j in range(begin, end)]
    assert elements == [(i, j) for i, size in enumerate(sizes) for j in range(size)]
    filled = [sum(end - begin for _, begin, end in bucket) for bucket in found]
    assert all(each == limit for each in filled[:-1]) and all(0 < each <= limit for each in filled)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_buckets_carry_the_same_bytes_and_fingerprints(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    config = FAMILIES["gpt2"][0]()
    source, target = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config).bfloat16()
    exported, expected = export_weights(source, dtype), fingerprint(source, dtype)
    monkeypatch.setattr(module, "BUCKET", 100)
    again = export_weights(source, dtype)
    assert again.manifest == exported.manifest and np.array_equal(again.body, exported.body)
    assert fingerprint(source, dtype) == expected
    with torch.no_grad():
        load_weights(target, again)
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(ours.to(getattr(torch, dtype)).bfloat16(), theirs)
