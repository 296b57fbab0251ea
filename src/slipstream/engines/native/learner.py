"""The student under training: packed rows forward, fused head and losses, backward; then clip and AdamW.

Losses are sums divided by counts of the whole step, so how samples are cut into micro-batches, rows and ranks changes
nothing. `prepare` takes a batch in and freezes what is decided before its first gradient; `accumulate` names groups of
it; they are let go when the next update comes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slipstream.config import LearnerConfig
from slipstream.engines.base import Fingerprint, Metrics, WeightsRef
from slipstream.engines.native.drift import Seen, drift_metrics
from slipstream.engines.native.frozen import Evidence, Frozen, freeze
from slipstream.engines.native.lora import merged
from slipstream.engines.native.method import Method
from slipstream.engines.native.model import LanguageModel, export_weights, fingerprint, is_adapter, load_model
from slipstream.engines.native.objective import Objective
from slipstream.engines.native.optimizer import make_optimizer
from slipstream.engines.native.packing import MicroBatch, joined, pack
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.rows import Rows, use_rows
from slipstream.engines.native.snapshots import PREVIOUS, REFERENCE, Snapshots
from slipstream.errors import NonFiniteError
from slipstream.estimators.logprobs import logprobs_at, merge_metrics
from slipstream.records import ONE, Batch, Counts, Group, Handle, Header, Scored, counts_of

T = TypeVar("T")
Key = tuple[int, int]
"""Number of the group, index in it."""
PER_STEP = ("policy/loss", "loss")
"""Metrics that are divided as the loss is; all others are divided by tokens."""


class Student(nn.Module):
    """Backbone and head under one root, so that sharded weights are gathered once for both."""

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__()
        self.model, self.parts = lm.model, (lm.backbone, lm.head)

    def forward(self, rows: Rows, then: Callable[[Tensor, nn.Linear], T]) -> T:
        backbone, head = self.parts
        return then(rows.hidden(backbone), head)


class NativeLearner:
    def __init__(
        self,
        lm: LanguageModel,
        *,
        method: Method,
        config: LearnerConfig,
        updates: int,
        export_dtype: str | None = None,
        tokenizer: Any = None,
        teacher_head: nn.Linear | None = None,
        snapshots: int = 0,
        threads: int = 1,
    ) -> None:
        self.lm, self.method, self.config, self.updates = lm, method, config, updates
        self.tokenizer, self.export_dtype = tokenizer, export_dtype or config.dtype
        self.thread = ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(threads,))
        self.ranks = Ranks()
        self.hidden_size = int(lm.model.config.get_text_config().hidden_size)
        if config.packing:
            use_rows(lm)
        lm.model.train()
        for module in lm.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # the loss is of the policy that was sampled, which has no dropout
        if config.checkpointing:
            lm.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.student, self.objective = Student(lm), Objective(method, teacher_head)
        self.optimizer = make_optimizer([p for p in lm.model.parameters() if p.requires_grad], config)
        self.snapshots = Snapshots(lm.model, keep=snapshots)
        if method.reference is not None:
            self.snapshots.take(REFERENCE, host=method.reference.host)
        self.update = 0
        """The update in hand, or the last one that was made."""
        self.samples: dict[Key, Scored] = {}
        self.frozen: dict[Key, Frozen] = {}
        self.seen: list[Seen] = []
        self.sums: dict[str, Tensor] = {}
        """Metrics since the last step."""
        self.noted: Metrics = {}
        """What `prepare` found out about the update."""

    # --- the protocol ----------------------------------------------------------------------------------------

    async def prepare(self, batch: Batch) -> list[Counts]:
        return await self._run(lambda: self._prepare(batch))

    async def accumulate(self, batch: Batch, counts: Counts) -> None:
        await self._run(lambda: self._accumulate([key_of(header) for header in batch.headers], counts))

    async def step(self, counts: Counts = ONE) -> Metrics:
        return await self._run(lambda: self._step(counts))

    async def export(self) -> tuple[WeightsRef, Fingerprint]:
        return await self._run(self._export)

    async def save(self, path: Path, *, optimizer: bool = True) -> None:
        await self._run(lambda: self._save(path, optimizer))

    async def restore(self, path: Path) -> None:
        await self._run(lambda: self._restore(path))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def close(self) -> None:
        self.thread.shutdown()

    # --- before the first gradient ---------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> list[Counts]:
        if batch.update != self.update:
            self._begin(batch.update)
        samples = {key_of(handle.header): scored(handle) for handle in batch.handles}
        self.samples |= samples
        if not self.method.looks_first:
            self.frozen |= {key: as_it_is(sample) for key, sample in samples.items()}
            return [counts_of(group) for group in batch.groups]
        keys, evidence = list(samples), self._look(list(samples.values()))
        # ranks see the whole batch, in one order, whoever holds what
        everyone = [pair for part in self.ranks.gathered(list(zip(keys, evidence, strict=True))) for pair in part]
        everyone.sort(key=lambda pair: pair[0])
        frozen, noted = freeze([sample for _, sample in everyone], self.method)
        decided = {key: each for (key, _), each in zip(everyone, frozen, strict=True)}
        self.frozen |= {key: decided[key] for key in keys}
        self.noted |= noted
        return [self._counts(group) for group in batch.groups]

    def _begin(self, update: int) -> None:
        """Let go of the update before."""
        self.samples, self.frozen, self.noted, self.update = {}, {}, {}, update
        if self.method.policy is not None and self.method.policy.old == "previous":
            self.snapshots.roll()

    def _look(self, samples: Sequence[Scored]) -> list[Evidence]:
        """The log-probs of the emitted tokens under every policy that the method asks for."""
        method, version = self.method, self.update - 1
        drew = [{int(v) for v in sample.rollout.versions} for sample in samples]
        fresh = any(version in versions for versions in drew)
        current = self._log_probs(samples) if method.current_first or (method.decoupled and fresh) else None
        reference = self._log_probs(samples, REFERENCE) if method.reference is not None else None
        old, missing = None, [0] * len(samples)
        if method.policy is not None and method.policy.old == "previous":
            old = self._log_probs(samples, PREVIOUS)
        elif method.decoupled:
            old, missing = self._at_own_version(samples, drew, current)
        return [
            Evidence(
                group=sample.rollout.prompt.number,
                reward=sample.rollout.rewards.get(method.reward, 0.0),
                mask_T=torch.from_numpy(sample.rollout.loss_mask),
                behavior_T=torch.from_numpy(sample.rollout.logp).double(),
                old_T=old[i] if old else None,
                current_T=current[i] if current else None,
                reference_T=reference[i] if reference else None,
                missing=missing[i],
            )
            for i, sample in enumerate(samples)
        ]

    def _at_own_version(
        self, samples: Sequence[Scored], drew: Sequence[set[int]], current: list[Tensor] | None
    ) -> tuple[list[Tensor], list[int]]:
        """Each token under the weights that drew it; where those are gone, what the sampler said of it."""
        old = [torch.from_numpy(sample.rollout.logp).double() for sample in samples]
        versions = [torch.from_numpy(sample.rollout.versions) for sample in samples]
        left = [torch.from_numpy(sample.rollout.loss_mask).clone() for sample in samples]
        for version in sorted(set().union(*drew)):
            chosen = [i for i, each in enumerate(drew) if version in each]
            if version == self.update - 1 and current is not None:
                found = [current[i] for i in chosen]
            elif version in self.snapshots:
                found = self._log_probs([samples[i] for i in chosen], version)
            else:
                continue
            for i, logp_T in zip(chosen, found, strict=True):
                here_T = versions[i] == version
                old[i] = torch.where(here_T, logp_T, old[i])
                left[i] &= ~here_T
        return old, [int(left_T.sum()) for left_T in left]

    @torch.no_grad()
    def _log_probs(self, samples: Sequence[Scored], version: int | str | None = None) -> list[Tensor]:
        """Of the emitted tokens, at sampling temperature, by the weights as they are or as they were."""

        def at_tokens(hidden_NH: Tensor, head: nn.Linear, chosen: Sequence[Scored]) -> Tensor:
            ids_N1 = joined([s.rollout.tokens for s in chosen], hidden_NH.device, torch.int64)[:, None]
            weight, bias = head.weight.to(hidden_NH.dtype), head.bias
            return logprobs_at(hidden_NH, weight, ids_N1, bias=bias, temperature=self.method.temperature)[:, 0]

        found: dict[int, Tensor] = {}
        with self.snapshots.worn(version) if version is not None else nullcontext(), self._precision():
            for rows, members in self._micro_batches(samples):
                chosen = [samples[i] for i in members]
                logp_N = self.student(rows, lambda h, head, chosen=chosen: at_tokens(h, head, chosen))
                lengths = [len(sample.rollout.tokens) for sample in chosen]
                found |= zip(members, torch.split(logp_N.cpu().double(), lengths), strict=True)
        return [found[i] for i in range(len(samples))]

    def _counts(self, group: Group) -> Counts:
        left = [int(self.frozen[key_of(handle.header)].mask_T.sum()) for handle in group]
        return Counts(n_tokens=sum(left), n_sequences=sum(count > 0 for count in left))

    # --- gradients and steps ---------------------------------------------------------------------------------

    def _accumulate(self, keys: Sequence[Key], counts: Counts) -> None:
        samples, frozen = [self.samples[key] for key in keys], [self.frozen[key] for key in keys]
        total = torch.zeros((), dtype=torch.float64, device=self.lm.device)
        for rows, members in self._micro_batches(samples):
            chosen, theirs = [samples[i] for i in members], [frozen[i] for i in members]
            with self._precision():
                loss, metrics, logp_N = self.student(
                    rows, lambda h, head, c=chosen, f=theirs: self.objective(h, head, c, f, counts)
                )
            loss.backward()
            total += loss.detach()
            merge_metrics(self.sums, metrics)
            self._note(chosen, theirs, logp_N)
        if not all(self.ranks.gathered(math.isfinite(total.item()))):
            self._drop()
            raise NonFiniteError(f"the loss of update {self.update} is {total.item()}")

    def _micro_batches(self, samples: Sequence[Scored]) -> Iterator[tuple[Rows, list[int]]]:
        """Rows, and which samples are in them."""
        config = self.config

        def plan(parts: int) -> list[MicroBatch]:
            return pack(
                [sample.rollout for sample in samples],
                budget=config.token_budget,
                hidden=self.hidden_size,
                shared_prompt=config.shared_prompt,
                packing=config.packing,
                parts=parts,
            )

        batches = plan(1)
        for batch in batches:
            yield Rows([sample.rollout for sample in samples], batch, self.lm.device), batch.members

    def _precision(self) -> AbstractContextManager[Any]:
        config = self.config
        if config.compute_dtype in (None, config.dtype):
            return nullcontext()
        return torch.autocast(self.lm.device.type, dtype=getattr(torch, config.compute_dtype))

    def _note(self, samples: Sequence[Scored], frozen: Sequence[Frozen], logp_N: Tensor) -> None:
        lengths = [len(sample.rollout.tokens) for sample in samples]
        for sample, each, logp_T in zip(samples, frozen, torch.split(logp_N, lengths), strict=True):
            self.seen.append(Seen(logp_T, each.behavior_T, each.mask_T, torch.from_numpy(sample.rollout.versions)))

    def _step(self, counts: Counts) -> Metrics:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        loss_scale = 1 / max(counts.n_sequences if self.method.over_sequences else counts.n_tokens, 1)
        if loss_scale != 1.0:
            torch._foreach_mul_([p.grad for p in parameters], loss_scale)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.clip_norm).item()
        if not math.isfinite(norm):
            self._drop()
            raise NonFiniteError(f"the gradient norm of update {self.update} is {norm}")
        lr = learning_rate(self.config, self.update - 1, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return self._metrics(loss_scale, 1 / max(counts.n_tokens, 1)) | {"grad_norm": norm, "lr": lr}

    def _metrics(self, loss_scale: float, token_scale: float) -> Metrics:
        """Of everything since the last step."""
        found = {name: value.item() for name, value in self.sums.items()}
        for name in found:
            if not name.endswith(("_max", "_min")):
                found[name] *= loss_scale if name in PER_STEP else token_scale
        seen = [each for part in self.ranks.gathered([each.on_cpu() for each in self.seen]) for each in part]
        self._drop()
        return found | self.noted | drift_metrics(seen, version=self.update - 1)

    def _drop(self) -> None:
        """Gradients and metrics since the last step."""
        self.optimizer.zero_grad()
        self.sums, self.seen = {}, []

    # --- weights ---------------------------------------------------------------------------------------------

    def _export(self) -> tuple[WeightsRef, Fingerprint]:
        if self.snapshots.keep:
            self.snapshots.take(self.update)
        return export_weights(self.lm.model, self.export_dtype), fingerprint(self.lm.model, self.export_dtype)

    def _save(self, path: Path, optimizer: bool) -> None:
        state = self.lm.model.state_dict()
        self.lm.model.save_pretrained(path, state_dict=merged(state, self.lm.model))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(path)
        if optimizer:
            adapters = {name: value for name, value in state.items() if is_adapter(name)}
            own = {"optimizer": self.optimizer.state_dict(), "update": self.update, "adapters": adapters}
            torch.save(own, path / "learner.pt")

    def _restore(self, path: Path) -> None:
        state = torch.load(path / "learner.pt", map_location=self.lm.device, weights_only=True)
        if self.config.lora is None:
            saved = load_model(str(path), dtype=self.config.dtype, device=str(self.lm.device))
            self.lm.model.load_state_dict(saved.model.state_dict())
        else:  # the base is what it was
            self.lm.model.load_state_dict(state["adapters"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.update = state["update"]


def key_of(header: Header) -> Key:
    return header.number, header.index


def scored(handle: Handle) -> Scored:
    """The record, which without a teacher is still a rollout."""
    body = handle.body
    return body if isinstance(body, Scored) else Scored(rollout=replace(body, rewards=handle.header.rewards))


def as_it_is(sample: Scored) -> Frozen:
    """Nothing is rejected, and nothing weighed."""
    rollout = sample.rollout
    return Frozen(mask_T=torch.from_numpy(rollout.loss_mask), behavior_T=torch.from_numpy(rollout.logp))


def learning_rate(config: LearnerConfig, update: int, updates: int) -> float:
    """Linear warm-up over updates, then constant or a cosine to zero."""
    if update < config.warmup:
        return config.lr * (update + 1) / config.warmup
    if config.decay == "constant":
        return config.lr
    done = (update - config.warmup) / max(1, updates - config.warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
