"""A student that says what it is told to: scripted replies as tokens, with log-probs that a real model gives them."""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from slipstream.engines.draws import process
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.protocols import Sampling
from slipstream.records import Group, Handle, Ints, Prompt, Rollout, derive_seed, header_of, one_turn
from support.templates import TEMPLATES, tokenizer_with

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
CONTEXT = 16384
TOKENIZER = tokenizer_with(TEMPLATES["qwen"])
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def save_models(path: Path) -> Path:
    """student, a tiny one with room for what agents say before anything else, and teacher, which is much like it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=TOKENIZER.bos_token_id,
        eos_token_id=END,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    for name in ("student", "teacher"):
        model.save_pretrained(path / name)
        TOKENIZER.save_pretrained(path / name)
        for weights in model.parameters():
            weights.data += 0.1 * torch.randn_like(weights)
    return path


def bash(thought: str, command: str) -> str:
    """A call of the only tool that mini-swe-agent has."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{thought}\n<tool_call>\n{call}\n</tool_call>"


Script = Callable[[Prompt], Sequence[str]]
"""Texts that are said in an episode, turn by turn."""


class Dictated:
    """A native sampler, in place of whose draws comes what a script says: it follows from the tokens that were sampled
    before, as draws do. What is drawn beside it is drawn."""

    def __init__(self, policy: NativeSampler, script: Script) -> None:
        self.policy, self.script, self.read = policy, script, -1
        config = Qwen3Config.from_dict(policy.lm.model.config.to_dict())
        self.reads = Qwen3ForCausalLM(config).eval()
        """A copy that reads whole sequences, which the sampler's own does not."""
        self.publish, self.release, self.close = policy.publish, policy.release, policy.close
        self.asked: list[tuple[Prompt, Sampling]] = []

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if not sampling.park:  # by no agent: what is looked at before a run
            return await self.policy.generate(prompt, sampling)
        assert sampling.group == 1 and not begun
        if prompt.number >= 0:  # by no canary
            self.asked.append((prompt, sampling))
        said = self.next(prompt)
        made = partial(self.made, prompt, sampling, said)
        rollout = await asyncio.get_running_loop().run_in_executor(self.policy.thread, made)
        return [Handle(header_of(rollout), rollout)]

    def next(self, prompt: Prompt) -> list[int]:
        at = 0
        for reply in self.script(prompt):
            if at == prompt.offset:
                return encoded(reply)
            at += len(encoded(reply))
        raise AssertionError(f"after {prompt.offset} tokens nothing more is to be said")

    def made(self, prompt: Prompt, sampling: Sampling, said: list[int]) -> Rollout:
        """On the thread that weights are loaded on."""
        if self.read != self.policy.version:
            self.read = self.policy.version
            self.reads.load_state_dict(self.policy.lm.model.state_dict())
        ids = torch.tensor(said[: sampling.max_tokens])
        logp = log_probs(self.reads, prompt.tokens, ids.numpy(), sampling)
        drawing = torch.Generator().manual_seed(derive_seed(prompt.seed, prompt.first, prompt.offset))
        drawn = torch.multinomial(logp.exp(), sampling.draws, replacement=True, generator=drawing)
        actions = torch.cat([ids[:, None], drawn[:, 1:]], dim=1)
        return one_turn(
            prompt,
            prompt.first,
            actions=actions.numpy().astype(np.int32),
            action_logp=logp.gather(1, actions).numpy(),
            versions=np.full(len(ids), self.policy.version, np.int32),
            finish="eos" if len(said) <= sampling.max_tokens else "length",
        )


def encoded(reply: str) -> list[int]:
    return [*TOKENIZER(reply, add_special_tokens=False)["input_ids"], END]


@torch.no_grad()
def log_probs(model: Any, before: Ints, said: Ints, sampling: Sampling) -> torch.Tensor:
    """Return all texts that could have been said in the place of each token, by reading."""
    ids = torch.from_numpy(np.concatenate([before, said]).astype(np.int64))[None]
    return process(model(input_ids=ids).logits[0, len(before) - 1 : -1], sampling)
