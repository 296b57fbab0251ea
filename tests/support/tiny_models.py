"""Tiny models of real architectures with weights large enough that every part of them shows in the logits."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.protocols import Loaded
from slipstream.records import Finish, Prompt, Rollout, SamplingSupport, Scored, derive_seed, one_turn

T = TypeVar("T")
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
            found.append(uniform(prompt, index, rng.integers(2, VOCAB, count)))
    return found


def uniform(prompt: Prompt, index: int, tokens: Any, *, finish: Finish = "length") -> Rollout:
    """A response of these tokens by version 0, one draw each, with log-prob 0."""
    ids = np.asarray(tokens)
    zeros, versions = np.zeros((len(ids), 1), np.float32), np.zeros(len(ids), np.int32)
    return one_turn(prompt, index, actions=ids[:, None], action_logp=zeros, versions=versions, finish=finish)


def masked(rollout: Rollout, mask: np.ndarray) -> Rollout:
    """The same tokens, of which fewer are trained."""
    kept, support = mask[rollout.loss_mask], rollout.kept
    if support is not None:
        support = SamplingSupport(support.ids[np.repeat(kept, support.sizes)], support.sizes[kept])
    return replace(
        rollout,
        versions=np.where(mask, rollout.versions, -1),
        logp=np.where(mask, rollout.logp, 0).astype(rollout.logp.dtype),
        turn=np.where(mask, rollout.turn, -1),
        loss_mask=mask,
        actions=rollout.actions[kept],
        action_logp=rollout.action_logp[kept],
        best_ids=None if rollout.best_ids is None else rollout.best_ids[kept],
        best_logp=None if rollout.best_logp is None else rollout.best_logp[kept],
        kept=support,
    )


TEACHERS = ("teacher_logp", "teacher_action_logp", "teacher_ids", "teacher_topk_logp", "teacher_hidden")


def masked_sample(sample: Scored, mask: np.ndarray) -> Scored:
    """The same with what its teacher said."""
    kept = mask[sample.rollout.loss_mask]
    rows = {name: rows[kept] for name in TEACHERS if (rows := getattr(sample, name)) is not None}
    return replace(sample, rollout=masked(sample.rollout, mask), **rows)


def littered(sample: Scored, *, seed: int) -> Scored:
    """The same record with garbage in every masked row there is; but not in the tokens, which the others see."""
    rng, rollout = np.random.default_rng(seed), sample.rollout
    masked = ~rollout.loss_mask

    def spoilt(array: Any) -> Any:
        junk = array.copy()
        if np.issubdtype(array.dtype, np.floating):
            junk[masked] = rng.choice([np.nan, np.inf, -np.inf, 1e30, -7.0], size=junk[masked].shape)
        else:
            junk[masked] = rng.integers(-100, 100, size=junk[masked].shape)
        return junk

    names = ("versions", "logp", "turn")
    return replace(sample, rollout=replace(rollout, **{name: spoilt(getattr(rollout, name)) for name in names}))


def logits_of(model: PreTrainedModel, samples: Sequence[Scored]) -> list[Tensor]:
    """Return the logits [T, V] that predict each sample's tokens, from one pass over all samples, padded on the right.

    Causal attention does not see the padding, so every sample has the logits that it has alone.
    """
    rows = [np.concatenate([sample.rollout.prompt.tokens, sample.rollout.tokens]) for sample in samples]
    ids_BL = pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], batch_first=True, padding_value=2)
    logits_BLV = model(ids_BL).logits
    starts = [len(sample.rollout.prompt.tokens) - 1 for sample in samples]
    return [logits_BLV[b, start : len(row) - 1] for b, (row, start) in enumerate(zip(rows, starts, strict=True))]


class ByHand(NativeSampler):
    """Steps when the test says so, on the test's own thread: every token boundary can be reached."""

    def __init__(
        self, lm: LanguageModel, *, stop_ids: set[int], teacher: LanguageModel | None = None, **settings: Any
    ) -> None:
        super().__init__(lm, SamplerSettings(**settings), stop_ids=stop_ids, teacher=teacher)

    def _wake(self) -> None:
        pass

    async def step(self, count: int = 1) -> None:
        """Give every running response so many tokens; a request that was made before comes in with its first."""
        for _ in range(count):
            await asyncio.sleep(0)  # new calls reach their queues
            while self._tell():  # weights were loaded, and no token drawn
                pass
        await asyncio.sleep(0)  # answers reach those who wait

    def _tell(self) -> bool:
        told = self._step()
        for answer, result in told:
            if not answer.done():
                answer.set_result(result)
        return any(isinstance(result, Loaded) for _, result in told)

    async def finish(self, *jobs: asyncio.Future[T]) -> list[T]:
        await asyncio.sleep(0)
        while self.rows or self.waiting or self.publishing:
            await self.step()
        return await asyncio.gather(*jobs)


def stitched(prompt: Prompt, index: int, parts: Sequence[Rollout | np.ndarray]) -> Rollout:
    """One lineage of several calls, each of which continued the tokens before it, and of what was observed between."""
    fields: dict[str, list[Any]] = {name: [] for name in ("tokens", "versions", "logp", "turn", "loss_mask")}
    calls = [part for part in parts if isinstance(part, Rollout)]
    turn = 0
    for part in parts:
        if isinstance(part, Rollout):
            row: Any = (part.tokens, part.versions, part.logp, part.turn + turn, part.loss_mask)
            turn += 1
        else:
            n = len(part)
            row = (part, np.full(n, -1), np.zeros(n), np.full(n, -1), np.zeros(n, np.bool_))
        for values, value in zip(fields.values(), row, strict=True):
            values.append(value)
    joined: dict[str, Any] = {name: np.concatenate(values) for name, values in fields.items()}
    kept = [call.kept for call in calls if call.kept is not None]
    support = (
        SamplingSupport(*(np.concatenate([getattr(k, name) for k in kept]) for name in ("ids", "sizes")))
        if kept
        else None
    )
    return Rollout(
        prompt=prompt,
        index=index,
        episode=index,
        actions=np.concatenate([call.actions for call in calls]),
        action_logp=np.concatenate([call.action_logp for call in calls]),
        kept=support,
        finish=calls[-1].finish,
        **joined,
    )
