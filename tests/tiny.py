"""Tiny models of real architectures with weights large enough that every part of them shows in the logits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen3Config,
)

from slipstream.engines.native.model import LanguageModel, split
from slipstream.records import Prompt, Rollout, Scored, derive_seed

VOCAB, EOS = 31, 1
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SHAPE),
    "phi": lambda: PhiConfig(**SHAPE),  # LayerNorm with biases: the others round to fp32 in the middle of every norm
    "mistral-window": lambda: MistralConfig(**SHAPE, sliding_window=6),
    "gemma3-window": lambda: Gemma3TextConfig(
        **SHAPE, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
}


def make_model(name: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()


def wrap(model: PreTrainedModel) -> LanguageModel:
    """A copy, so that an engine's changes stay its own."""
    return split("tiny", copy.deepcopy(model))


def make_prompts(count: int, *, longest: int = 12, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [
        Prompt(
            id=f"p{i}",
            number=i,
            tokens=rng.integers(2, VOCAB, rng.integers(1, longest + 1)).astype(np.int32),
            seed=derive_seed(seed, i),
        )
        for i in range(count)
    ]


def random_rollouts(groups: Sequence[tuple[int, Sequence[int]]]) -> list[Rollout]:
    """A group for each (prompt, responses), by their lengths, of random tokens."""
    rng, found = np.random.default_rng(0), []
    for number, (length, responses) in enumerate(groups):
        prompt = Prompt(id=f"p{number}", number=number, tokens=rng.integers(2, VOCAB, length))
        for index, count in enumerate(responses):
            tokens, logp = rng.integers(2, VOCAB, count), np.zeros(count)
            found.append(
                Rollout(
                    prompt=prompt,
                    index=index,
                    tokens=tokens,
                    versions=np.zeros(count, np.int64),
                    logp=logp,
                    actions=tokens[:, None],
                    action_logp=logp[:, None],
                    finish="length",
                    loss_mask=np.ones(count, np.bool_),
                )
            )
    return found


def littered(sample: Scored, *, seed: int) -> Scored:
    """The same record with garbage in every masked row of every field, but for the tokens, which the others see."""
    rng, rollout = np.random.default_rng(seed), sample.rollout
    masked = ~rollout.loss_mask

    def spoilt(array: Any) -> Any:
        if array is None or not masked.any():
            return array
        junk = array.copy()
        if np.issubdtype(array.dtype, np.floating):
            junk[masked] = rng.choice([np.nan, np.inf, -np.inf, 1e30, -7.0], size=junk[masked].shape)
        else:
            junk[masked] = rng.integers(-100, 100, size=junk[masked].shape)
        return junk

    actions = spoilt(rollout.actions)
    actions[:, 0] = rollout.tokens
    names = ("versions", "logp", "action_logp")
    rollout = replace(rollout, actions=actions, **{name: spoilt(getattr(rollout, name)) for name in names})
    names = ("teacher_logp", "teacher_action_logp", "teacher_ids", "teacher_topk_logp", "teacher_hidden")
    return replace(sample, rollout=rollout, **{name: spoilt(getattr(sample, name)) for name in names})
