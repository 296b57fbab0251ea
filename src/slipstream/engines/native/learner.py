"""The student under training: forward, fused head and loss, backward; then clip and AdamW.

Losses are sums divided by counts of the whole batch, so how samples are cut into micro-batches changes nothing.

Shapes: N predicted tokens, C rows of a chunk, M cached actions, K top-k, D teacher's hidden, V vocabulary.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.config import ForwardKL, LearnerConfig, LossConfig, ReverseKLMC
from slipstream.engines.base import Fingerprint, Metrics, WeightsRef
from slipstream.engines.native.model import LanguageModel, export_weights, fingerprint, load_model
from slipstream.engines.native.packing import full_length, joined, micro_batches, padded, predictions
from slipstream.errors import NonFiniteError
from slipstream.estimators.divergence import dense, forward_kl_topk, support_mass
from slipstream.estimators.logprobs import fused_loss, merge_metrics
from slipstream.estimators.surrogate import mc_reverse_kl
from slipstream.records import Batch, Counts, Scored

T = TypeVar("T")
LossOfRows = Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]
"""(student's log-probs at the ids, which rows) → (loss per row, metrics per row)."""


class NativeLearner:
    def __init__(
        self,
        lm: LanguageModel,
        *,
        loss: LossConfig,
        config: LearnerConfig,
        updates: int,
        export_dtype: str | None = None,
        tokenizer: Any = None,
        teacher_head: torch.nn.Linear | None = None,
        threads: int = 1,
    ) -> None:
        self.lm, self.loss, self.config, self.updates, self.teacher_head = lm, loss, config, updates, teacher_head
        self.tokenizer, self.export_dtype, self.steps = tokenizer, export_dtype or config.dtype, 0
        self.thread = ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(threads,))
        lm.model.train()
        for module in lm.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # the loss is of the policy that was sampled, which has no dropout
        self.optimizer = torch.optim.AdamW(
            lm.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )

    # --- the protocol ----------------------------------------------------------------------------------------

    async def prepare(self, batch: Batch) -> Counts:
        rows = [header.trained_tokens for header in batch.headers]
        return Counts(n_tokens=sum(rows), n_sequences=sum(count > 0 for count in rows))

    async def accumulate(self, batch: Batch, counts: Counts) -> Metrics:
        return await self._run(lambda: self._accumulate([handle.body for handle in batch.handles], counts))

    async def step(self, scale: float = 1.0) -> Metrics:
        return await self._run(lambda: self._step(scale))

    async def export(self) -> tuple[WeightsRef, Fingerprint]:
        model, dtype = self.lm.model, self.export_dtype
        return await self._run(lambda: (export_weights(model, dtype), fingerprint(model, dtype)))

    async def save(self, path: Path, *, optimizer: bool = True) -> None:
        await self._run(lambda: self._save(path, optimizer))

    async def restore(self, path: Path) -> None:
        await self._run(lambda: self._restore(path))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def close(self) -> None:
        self.thread.shutdown()

    # --- on the learner's thread -----------------------------------------------------------------------------

    def _accumulate(self, samples: Sequence[Scored], counts: Counts) -> Metrics:
        sums: dict[str, Tensor] = {}
        lengths = [full_length(sample.rollout) for sample in samples]
        for members in micro_batches(lengths, self.config.token_budget):
            loss, metrics = self._micro_batch([samples[i] for i in members], counts)
            if not math.isfinite(loss.item()):
                self.optimizer.zero_grad()
                raise NonFiniteError(f"the loss of update {self.steps + 1} is {loss.item()}")
            loss.backward()  # type: ignore[no-untyped-call]
            merge_metrics(sums, metrics)
        extremes = ("_max", "_min")
        return {k: v.item() if k.endswith(extremes) else v.item() / max(counts.n_tokens, 1) for k, v in sums.items()}

    def _micro_batch(self, samples: Sequence[Scored], counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        rollouts = [sample.rollout for sample in samples]
        device, head = self.lm.device, self.lm.head
        hidden_BLH = self.lm.backbone(padded(rollouts, device), use_cache=False).last_hidden_state
        hidden_NH = predictions(hidden_BLH, rollouts)
        ids_NM, loss_of_rows = self._objective(samples)
        mask_N = joined([rollout.loss_mask for rollout in rollouts], device, torch.bool)

        def loss_of_chunk(logp_CM: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            loss_C, metrics = loss_of_rows(logp_CM, rows)
            loss_C = loss_C.masked_fill(~mask_N[rows], 0.0)
            return loss_C.sum() / max(counts.n_tokens, 1), _summed(metrics | {"loss": loss_C.detach()}, mask_N[rows])

        return fused_loss(
            hidden_NH, head.weight, ids_NM, loss_of_chunk, bias=head.bias, temperature=self.loss.temperature
        )

    def _objective(self, samples: Sequence[Scored]) -> tuple[Tensor | None, LossOfRows]:
        """The ids whose log-probs the loss needs (None: all of them), and the loss of a row given those."""
        device, dtype, loss = self.lm.device, torch.promote_types(self.lm.head.weight.dtype, torch.float32), self.loss
        match loss:
            case ReverseKLMC():
                behavior_NM = joined([s.rollout.action_logp for s in samples], device, dtype)
                logq_NM = joined([_present(s.teacher_action_logp) for s in samples], device, dtype)

                def reverse(logp_CM: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
                    return mc_reverse_kl(
                        logp_CM,
                        behavior_NM[rows],
                        logq_NM[rows],
                        advantage=loss.advantage,
                        clip=loss.clip,
                        importance=loss.importance,
                        ratio_cap=loss.ratio_cap,
                    )

                return joined([s.rollout.actions for s in samples], device, torch.int64), reverse
            case ForwardKL(cache="teacher_topk"):
                ids_NK = joined([_present(s.teacher_ids) for s in samples], device, torch.int64)
                logq_NK = joined([_present(s.teacher_topk_logp) for s in samples], device, dtype)

                def forward(logp_CK: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
                    kl_C = forward_kl_topk(logp_CK, logq_NK[rows], tail=loss.tail, renormalise=loss.renormalise)
                    return kl_C, support_mass(logp_CK, logq_NK[rows])

                return ids_NK, forward
            case ForwardKL():
                teacher = self.teacher_head
                assert teacher is not None, "the hidden cache needs the teacher's head"
                hidden_ND = torch.cat([_hidden(_present(s.teacher_hidden)) for s in samples]).to(device)

                def exact(logp_CV: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
                    logits_CV = teacher(hidden_ND[rows]).to(dtype)[:, : logp_CV.shape[1]]
                    logq_CV = (logits_CV / loss.temperature).log_softmax(-1)
                    return dense(logp_CV, logq_CV, kind="forward"), {}

                return None, exact

    def _step(self, scale: float) -> Metrics:
        parameters = [p for p in self.lm.model.parameters() if p.grad is not None]
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in parameters], scale)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.clip_norm).item()
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise NonFiniteError(f"the gradient norm of update {self.steps + 1} is {norm}")
        lr = learning_rate(self.config, self.steps, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return {"grad_norm": norm, "lr": lr}

    def _save(self, path: Path, optimizer: bool) -> None:
        self.lm.model.save_pretrained(path)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(path)
        if optimizer:
            torch.save({"optimizer": self.optimizer.state_dict(), "steps": self.steps}, path / "learner.pt")

    def _restore(self, path: Path) -> None:
        saved = load_model(str(path), dtype=self.config.dtype, device=str(self.lm.device))
        self.lm.model.load_state_dict(saved.model.state_dict())
        state = torch.load(path / "learner.pt", map_location=self.lm.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def learning_rate(config: LearnerConfig, step: int, updates: int) -> float:
    """Linear warm-up, then constant or a cosine to zero."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.decay == "constant":
        return config.lr
    done = (step - config.warmup) / max(1, updates - config.warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _summed(metrics_C: dict[str, Tensor], mask_C: Tensor) -> dict[str, Tensor]:
    """Per-row metrics over the trained rows: the extreme where the name says so, else the sum."""
    out = {}
    for name, value_C in metrics_C.items():
        kept = value_C[mask_C]
        if not len(kept):
            continue
        out[name] = kept.amax() if name.endswith("_max") else kept.amin() if name.endswith("_min") else kept.sum()
    if "loss" in out:
        out |= {"loss_abs": metrics_C["loss"].abs().sum(), "loss_max": metrics_C["loss"].amax()}
        out |= {"loss_min": metrics_C["loss"].amin()}
    return out


def _present(cache: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    assert cache is not None, "the scorer filled another cache than the loss reads"
    return cache


def _hidden(array: np.ndarray[Any, Any]) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
