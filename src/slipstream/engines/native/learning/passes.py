"""Passes of the student over packed rows, and what they say of the emitted tokens under any version of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from slipstream.config.schema import LearnerConfig
from slipstream.engines.native.learning.dropout import deterministic, prepare
from slipstream.engines.native.learning.dummy_batch import dummy_batch, nothing
from slipstream.engines.native.learning.snapshots import Snapshots
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.packing import MicroBatch, pack
from slipstream.engines.native.ranks import Ranks, layers_of
from slipstream.engines.native.rows import Rows, by_sample, over_tokens, use_rows
from slipstream.estimators.divergence import dense
from slipstream.estimators.logprobs import HELD
from slipstream.estimators.logprobs.head import Head
from slipstream.estimators.logprobs.sampling_support import kept_logprobs_at, only
from slipstream.estimators.numerics import joined
from slipstream.objective.sampling_support import support_of
from slipstream.protocols import Metrics
from slipstream.records import Rollout, Scored

T = TypeVar("T")
Kind = Literal["forward", "reverse"]
"""KL(as it was ‖ as it is), KL(as it is ‖ as it was)."""


class Student(nn.Module):
    """Backbone and head under one root, so that sharded weights are gathered once for both."""

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__()
        self.model, self.parts = lm.model, (lm.backbone, lm.head)

    def forward(self, rows: Rows, then: Callable[[Tensor, Head], T]) -> T:
        backbone, head = self.parts
        return then(rows.hidden(backbone), head)


class Passes:
    def __init__(self, lm: LanguageModel, config: LearnerConfig, ranks: Ranks, *, temperature: float) -> None:
        """`temperature` is that of sampling."""
        self.lm, self.config, self.ranks, self.temperature = lm, config, ranks, temperature
        self.hidden_size = int(lm.model.config.get_text_config().hidden_size)
        use_rows(lm, packed=config.packing)
        prepare(lm, dropout=config.dropout, checkpointing=config.checkpointing, packed=config.packing)
        self.tokens = Counter[str]()
        """Of all passes since `economy` was asked for."""
        self.student = Student(lm)
        ranks.shard(self.student, layers_of(lm.model))

    def micro_batches(self, samples: Sequence[Scored]) -> Iterator[tuple[Rows, list[int]]]:
        """Rows, and which samples are in them: none in those of a rank that has fewer micro-batches than another."""
        config, rollouts = self.config, [sample.rollout for sample in samples]
        planned = pack(
            rollouts,
            budget=config.token_budget,
            hidden=self.hidden_size,
            shared_prompt=config.shared_prompt,
            packing=config.packing,
        )
        batches = [batch for batch in planned if batch.rows]
        empty = max(self.ranks.gathered(len(batches))) - len(batches)
        self.tokens += tokens_of(batches)
        for batch in batches:
            yield Rows(rollouts, batch, self.lm.device), batch.members
        for _ in range(empty):
            yield dummy_batch(config.packing, self.lm.device), []

    def economy(self) -> Metrics:
        """How much of the rows was not padding, and what sharing prompts saved, on all ranks since the last time."""
        tokens = sum(self.ranks.gathered(self.tokens), Counter[str]())
        self.tokens = Counter()
        found = {"rows/filled": tokens["real"] / max(tokens["computed"], 1)}
        if self.config.shared_prompt:
            found["saved/prompt"] = 1 - tokens["real"] / max(tokens["apart"], 1)
        return found

    def precision(self) -> AbstractContextManager[Any]:
        config = self.config
        if config.compute_dtype in (None, config.dtype):
            return nullcontext()
        # sharded weights leave after use, and what is cached of them would not
        cached = self.ranks.size == 1
        return torch.autocast(self.lm.device.type, dtype=getattr(torch, config.compute_dtype), cache_enabled=cached)

    @contextmanager
    def _as_at(self, snapshots: Snapshots | None, version: int | str | None) -> Iterator[None]:
        """For passes without gradient: under the weights of a version, or as they are, and without any dropout."""
        under = snapshots.under(version) if snapshots and version is not None else nullcontext()
        with under, deterministic(self.lm.model):
            yield

    @torch.no_grad()
    def log_probs(
        self,
        samples: Sequence[Scored],
        snapshots: Snapshots | None = None,
        version: int | str | None = None,
        *,
        temperature: float | None = None,
    ) -> list[Tensor]:
        """Of the emitted tokens, at sampling temperature unless another is given, by the weights as they are or as a
        snapshot has them.

        Among what could be drawn, where samples tell; 0 where a token is masked.
        """
        found = self._at_tokens(samples, [temperature or self.temperature], snapshots, version)
        return [logp_T1[:, 0] for logp_T1 in found]

    @torch.no_grad()
    def log_probs_and_squares(self, samples: Sequence[Scored]) -> tuple[list[Tensor], list[Tensor]]:
        """Of the emitted tokens their log-probs, and at every trained one Σ_v π_v² over the vocabulary, in one pass.

        At half the temperature T a logit is 2x/T, so log Σπ² = lse(2x/T) − 2·lse(x/T) = 2·log π_T(y) − log π_{T/2}(y).
        """
        found = self._at_tokens(samples, [self.temperature, self.temperature / 2], None, None)
        masks = [torch.from_numpy(sample.rollout.loss_mask) for sample in samples]
        squares = [
            (2 * logp_T2[:, 0] - logp_T2[:, 1]).exp().masked_fill(~mask_T, 0.0)
            for logp_T2, mask_T in zip(found, masks, strict=True)
        ]
        return [logp_T2[:, 0] for logp_T2 in found], squares

    def _at_tokens(
        self,
        samples: Sequence[Scored],
        temperatures: Sequence[float],
        snapshots: Snapshots | None,
        version: int | str | None,
    ) -> list[Tensor]:
        """Log-probs of the emitted tokens, [T, a column for each temperature]; 0 where a token is masked."""

        def at_tokens(hidden_NH: Tensor, head: Head, chosen: Sequence[Rollout]) -> Tensor:
            ids_N1 = joined([r.tokens[r.loss_mask] for r in chosen], hidden_NH.device, torch.int64)[:, None]
            hidden_NH, weight, bias = head.inputs(hidden_NH)
            support = support_of(chosen, hidden_NH.device)
            shape: dict[str, Any] = {"bias": bias, **head.bend}
            return torch.cat(
                [kept_logprobs_at(hidden_NH, weight, ids_N1, support, temperature=t, **shape) for t in temperatures], 1
            )

        with self._as_at(snapshots, version):
            found = self._of_each(samples, at_tokens)
        return over_tokens(torch.cat(found), [sample.rollout for sample in samples]) if found else []

    @torch.no_grad()
    def log_probs_of_draws(self, samples: Sequence[Scored], *, temperature: float) -> list[Tensor]:
        """By the weights as they are, among what could be drawn: [N, M] for the trained tokens of each sample."""

        with self._as_at(None, None):
            return self._of_each(samples, partial(at_draws, temperature=temperature))

    def _of_each(
        self, samples: Sequence[Scored], found_by: Callable[[Tensor, Head, Sequence[Rollout]], Tensor]
    ) -> list[Tensor]:
        """What a pass without gradient finds for the trained tokens of each sample, in float64."""
        found: dict[int, Tensor] = {}
        with self.precision():
            for rows, members in self.micro_batches(samples):
                if not members:
                    self.student(rows, nothing)
                    continue
                chosen = [samples[i].rollout for i in members]
                found_N = self.student(rows, lambda h, head, chosen=chosen: found_by(h, head, chosen))
                found |= zip(members, by_sample(found_N.cpu().double(), chosen), strict=True)
        return [found[i] for i in range(len(samples))]

    @torch.no_grad()
    def rollout_kl(
        self, samples: Sequence[Scored], snapshots: Snapshots, version: int, *, kinds: Sequence[Kind]
    ) -> list[Tensor]:
        """KL(the policy as it is ‖ as it was at that version), or `forward` the other way round: [T, a column of each].

        Exact, over the whole vocabulary, or what could be drawn of it where samples tell; 0 where a token is masked.
        However many kinds, the passes are made once.
        """
        now: list[Tensor] = []
        heads: list[tuple[Tensor, Tensor | None]] = []

        def keep(hidden_NH: Tensor, head: Head) -> None:
            heads[:] = heads or [
                (head.weight.detach().clone(), None if head.bias is None else head.bias.detach().clone())
            ]
            now.append(hidden_NH)

        def kl_to(before_NH: Tensor, head: Head, chosen: Sequence[Rollout]) -> Tensor:
            hidden_NH, (weight, bias) = now.pop(0), heads[0]
            support = support_of(chosen, hidden_NH.device)
            found = [hidden_NH.new_empty(0, len(kinds))]
            size = max(1, HELD // len(weight))
            for start in range(0, len(hidden_NH), size):
                rows = slice(start, min(start + size, len(hidden_NH)))
                both = [head(hidden_NH[rows], weight, bias), head(before_NH[rows])]
                if support is not None:
                    support_CK = support[rows]
                    both = [only(x_CV, support_CK) for x_CV in both]
                logp_CV, old_CV = ((wide(x_CV) / self.temperature).log_softmax(-1) for x_CV in both)
                found.append(torch.stack([dense(logp_CV, old_CV, kind=kind) for kind in kinds], 1))
            return torch.cat(found)

        kl: dict[int, Tensor] = {}
        with self._as_at(None, None), self.precision():
            for rows, members in self.micro_batches(samples):
                self.student(rows, keep if members else nothing)
        with self._as_at(snapshots, version), self.precision():
            for rows, members in self.micro_batches(samples):
                if not members:
                    self.student(rows, nothing)
                    continue
                chosen = [samples[i].rollout for i in members]
                kl_N = self.student(rows, lambda h, head, chosen=chosen: kl_to(h, head, chosen))
                kl |= zip(members, over_tokens(kl_N.cpu(), chosen), strict=True)
        return [kl[i] for i in range(len(samples))]


def at_draws(hidden_NH: Tensor, head: Head, rollouts: Sequence[Rollout], *, temperature: float) -> Tensor:
    """Log-probs of all draws, among what could be drawn, [N, M] for the trained tokens of all of them."""
    ids_NM = joined([rollout.actions for rollout in rollouts], hidden_NH.device, torch.int64)
    hidden_NH, weight, bias = head.inputs(hidden_NH)
    support = support_of(rollouts, hidden_NH.device)
    shape: dict[str, Any] = {"bias": bias, **head.bend}
    return kept_logprobs_at(hidden_NH, weight, ids_NM, support, temperature=temperature, **shape)


def tokens_of(batches: Sequence[MicroBatch]) -> Counter[str]:
    """Computed, padding included; real; and as many as the same samples have each by itself."""
    items = [item for batch in batches for row in batch.rows for item in row]
    return Counter(
        computed=sum(batch.computed for batch in batches),
        real=sum(batch.real for batch in batches),
        apart=sum(item.apart for item in items),
    )


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
