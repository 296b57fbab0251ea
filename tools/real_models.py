"""Answers of the real models of `make real`, how far apart two models are on them, and the models' directories."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.data.tokenizers import Tokenizer, stop_ids
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.protocols import Sampling
from slipstream.records import Prompt

SLOTS = 128
"""Maximum number of answers that are drawn at the same time."""
TEMPERATURE = 0.7
"""Temperature of answers and of KL, as in configs/real.toml."""


@dataclass(frozen=True)
class Answer:
    prompt: Sequence[int]
    tokens: Sequence[int]
    ended: bool

    @property
    def ids(self) -> Tensor:
        return torch.tensor([*self.prompt, *self.tokens])


def questions(file: Path, count: int) -> list[str]:
    return [json.loads(line)["prompt"] for line in file.read_text("utf-8").splitlines()[:count]]


def answers(
    lm: LanguageModel, tokenizer: Tokenizer, asked: Sequence[str], max_tokens: int, temperature: float = 1.0
) -> list[Answer]:
    """Return one drawn answer to each question."""
    chats = [[{"role": "user", "content": each}] for each in asked]
    ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]
    ends = stop_ids(tokenizer, lm.model.generation_config)
    settings = SamplerSettings(slots=min(len(ids), SLOTS), threads=torch.get_num_threads())
    sampler = NativeSampler(lm, settings, stop_ids=ends)

    async def draw() -> list[Answer]:
        prompts = [Prompt(id=str(i), number=i, tokens=np.array(each, np.int32), seed=i) for i, each in enumerate(ids)]
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
        groups = await asyncio.gather(*(sampler.generate(each, sampling) for each in prompts))
        found = [group[0].body for group in groups]
        return [Answer(p, each.tokens.tolist(), each.finish == "eos") for p, each in zip(ids, found, strict=True)]

    try:
        return asyncio.run(draw())
    finally:
        sampler.close()
        lm.model.set_attn_implementation("sdpa")


def padded(drawn: Sequence[Answer]) -> Tensor:
    """Return prompts and answers as one batch; padding comes after all real tokens."""
    return nn.utils.rnn.pad_sequence([each.ids for each in drawn], batch_first=True)


def log_probs(lm: LanguageModel, drawn: Sequence[Answer], temperature: float = 1.0) -> Tensor:
    """Return the log-probs [tokens, vocabulary] of all tokens of the answers."""
    hidden_BTH = lm.backbone(input_ids=padded(drawn), use_cache=False).last_hidden_state
    return log_probs_of(lm, hidden_BTH, drawn, temperature)


def log_probs_of(lm: LanguageModel, hidden_BTH: Tensor, drawn: Sequence[Answer], temperature: float = 1.0) -> Tensor:
    parts = [h[len(each.prompt) - 1 : len(each.ids) - 1] for h, each in zip(hidden_BTH, drawn, strict=True)]
    return (lm.model.get_output_embeddings()(torch.cat(parts)).float() / temperature).log_softmax(-1)


def forward_kl(logp: Tensor, logq: Tensor) -> float:
    return float((logp.exp() * (logp - logq)).sum(-1).mean())


def write(model: PreTrainedModel, tokenizer: Tokenizer, target: Path) -> None:
    """Write an ordinary directory; one that a stopped program has begun has another name."""
    begun = target.with_name(f"{target.name}.begun")
    for part in (model, tokenizer, model.generation_config):
        part.save_pretrained(begun)
    if target.exists():
        shutil.rmtree(target)
    begun.rename(target)
