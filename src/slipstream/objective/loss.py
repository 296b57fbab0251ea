"""Loss of a micro-batch: distillation, policy loss and KL to the reference, in one pass of the head if possible.

Losses of token scope, at the temperature of the distillation loss, are computed in the fused head. A policy loss that
needs whole rows, or another temperature, has its own pass. Metrics are divided by the counts like the losses, so
metrics of micro-batches add up. Guarantor of invariant 5: every loss is a sum divided by given counts. The result
is the same for all cuts of a batch and all orders of its parts.

Shapes: N trained tokens, C rows of a chunk, M ids of a row, V vocabulary, B samples, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.estimators.freshness import rollout_kl_from_cache
from slipstream.estimators.kl import kl_loss
from slipstream.estimators.logprobs import HELD, Ids, fused_loss, reduced
from slipstream.estimators.logprobs.head import Head
from slipstream.estimators.logprobs.sampling_support import conditioned, kept_logprobs_and_entropy_at
from slipstream.estimators.numerics import joined
from slipstream.estimators.policy import policy_loss
from slipstream.metric_names import extreme
from slipstream.objective.distillation import Distillation, LossOfRows, TeacherHeads
from slipstream.objective.frozen import Frozen, padded
from slipstream.objective.method import Method
from slipstream.objective.sample_weights import SampleWeight, episode_of
from slipstream.objective.sampling_support import support_of
from slipstream.records import Counts, Scored

Metrics = dict[str, Tensor]
MIXED = "policy/mixed"
"""Share of tokens that the student did not draw; the learner divides means over its own tokens by the rest."""
TAUGHT = "teacher/taught"
"""Share of tokens that a teacher drew; the learner divides the forward KL by it."""
DENSE = 4
"""Divisor of the chunk size for a loss over the vocabulary, which needs about twelve tensors of that size."""
Cut = Callable[[Tensor], Tensor]
"""Function that converts a tensor over N to the shape [B, T] of a policy loss."""


class Objective:
    def __init__(self, method: Method, heads: TeacherHeads | None = None) -> None:
        self.method, loss, reference = method, method.loss, method.reference
        self.distillation = Distillation(loss, heads) if loss.weight else None
        self.has_policy_terms = method.policy is not None or (reference is not None and reference.into == "loss")
        self.single_pass = not method.by_row and not (self.distillation and loss.temperature != method.temperature)
        """True if no loss needs whole rows and all use one temperature: one pass of the fused head computes them."""
        self.divisor = 1.0
        """Number by which freshness weights are divided; 1 if the whole gradient is divided instead."""
        self.scale = 1.0
        """Loss scale of the next backward pass. The fused head computes its gradients in the forward pass already."""

    def __call__(
        self,
        hidden_NH: Tensor,
        head: Head,
        samples: Sequence[Scored],
        frozen: Sequence[Frozen],
        counts: Counts,
        judged: Sequence[SampleWeight] = (),
        slope_N: Tensor | None = None,
    ) -> tuple[Tensor, Metrics, Tensor]:
        """Return the differentiable loss, its metrics, and the emitted tokens' log-probs at sampling temperature.

        `slope_N` is the gradient from `ahead`, and NaN at tokens whose policy loss is still to be computed.
        """
        terms = Terms(self.method, samples, frozen, counts, hidden_NH, judged, divisor=self.divisor)
        hidden_NH, weight, bias = head.inputs(hidden_NH)
        shape: dict[str, Any] = {"bias": bias, **head.bend}
        parts, entropy = list[tuple[Tensor, Metrics]](), Metrics()
        if self.distillation or self.single_pass:
            loss, metrics, logp_N = self._fused(hidden_NH, weight, shape, samples, terms)
            parts.append((loss / self.scale, metrics))
        if not self.single_pass:
            with torch.set_grad_enabled(self.has_policy_terms or terms.draws_NM is not None):
                logp_NM, entropy_N = kept_logprobs_and_entropy_at(
                    hidden_NH,
                    weight,
                    terms.tokens_N[:, None] if terms.draws_NM is None else terms.draws_NM,
                    terms.support,
                    temperature=self.method.temperature,
                    **shape,
                )
            logp_N, entropy = logp_NM[:, 0], terms.entropy(entropy_N, slice(None))
            if terms.draws_NM is not None:
                parts.append(terms.anchored(logp_NM, slice(None)))
            if slope_N is not None:
                slope_N = slope_N.to(logp_N)
                terms.others_N = terms.others_N & slope_N.isnan()
                parts.append(((slope_N.nan_to_num() * (logp_N - logp_N.detach())).sum(), {}))
            if self.has_policy_terms:
                parts.append(terms.others(terms.rows(logp_N), terms.rows))
        total, metrics = _summed_parts(parts)
        metrics = entropy | metrics | {"loss": total.detach()}  # the entropy of the fused pass comes first
        metrics |= terms.forward_kl(samples, logp_N.detach())
        if terms.support is not None:
            sizes_N = torch.from_numpy(terms.support.sizes_N).to(hidden_NH.device)
            metrics["kept/size"] = sizes_N[terms.mask_N].sum() / max(counts.n_tokens, 1)
        return total, metrics, logp_N.detach()

    def ahead(
        self,
        samples: Sequence[Scored],
        frozen: Sequence[Frozen],
        logp: Sequence[Tensor],
        counts: Counts,
        judged: Sequence[SampleWeight] = (),
    ) -> tuple[Tensor, Metrics, Sequence[Tensor]]:
        """Return the policy loss of whole episodes, its metrics, and its gradient in the log-probs of each sample.

        For losses of episodes whose branches may be in different micro-batches. The gradient with respect to the
        weights follows from this gradient. `samples` are all branches of these episodes, sorted by episode. `logp` [T]
        are the current learner's log-probs of each sample.
        """
        masks = [sample.rollout.loss_mask for sample in samples]
        logp_N = torch.cat([logp_T[mask_T] for logp_T, mask_T in zip(logp, masks, strict=True)]).requires_grad_()
        terms = Terms(self.method, samples, frozen, counts, logp_N, judged, divisor=self.divisor)
        loss, metrics = terms.others(terms.rows(logp_N), terms.rows)
        (slope_N,) = torch.autograd.grad(loss, logp_N)
        return loss.detach(), metrics | {"loss": loss.detach()}, torch.split(slope_N, [int(m.sum()) for m in masks])

    def _fused(
        self, hidden_NH: Tensor, weight_VH: Tensor, shape: Mapping[str, Any], samples: Sequence[Scored], terms: Terms
    ) -> tuple[Tensor, Metrics, Tensor]:
        method, support, emitted_N = self.method, terms.support, torch.zeros_like(terms.behavior_N)
        ids_NM: Tensor | None = terms.tokens_N[:, None]
        distilled: LossOfRows | None = None
        temperature, best, on_kept, on_draws = method.temperature, 0, False, False
        if (row := self.distillation) is not None:
            ids_NM, distilled = row(samples, terms.frozen, terms.tokens_N, terms.dtype)
            temperature, best, on_kept, on_draws = row.temperature, row.best, row.on_kept, row.on_draws
        requested = draws = slice(0, None if ids_NM is None else ids_NM.shape[1])
        """Columns of the log-probs: `requested` for the distillation loss, and `draws` for the draws."""
        draws_NM = terms.draws_NM if self.single_pass else None
        if draws_NM is not None and ids_NM is not None and not on_draws:
            draws = slice(ids_NM.shape[1], ids_NM.shape[1] + draws_NM.shape[1])
            ids_NM = torch.cat([ids_NM, draws_NM], 1)

        def loss_of_chunk(logp_CX: Tensor, rows: slice, *, entropy: Tensor, **beside: Tensor) -> tuple[Tensor, Metrics]:
            """Return loss and metrics of a chunk. X: requested ids, then the sampling support; or the vocabulary."""
            m = logp_CX.shape[1] if ids_NM is None else ids_NM.shape[1]
            requested_CM, emitted_C1 = logp_CX[:, requested], logp_CX[:, :1]
            if ids_NM is None:
                emitted_C1 = logp_CX.gather(1, terms.tokens_N[rows, None])
            if draws_NM is not None:
                drawn_CM = logp_CX[:, draws] if ids_NM is not None else logp_CX.gather(1, draws_NM[rows])
            if support is not None:
                kept_CK = support[rows]
                kept_logp_CK = logp_CX.gather(1, kept_CK.clamp(min=0)) if ids_NM is None else logp_CX[:, m:]
                emitted_C1 = conditioned(emitted_C1, kept_logp_CK, kept_CK)
                if on_kept:
                    requested_CM = conditioned(requested_CM, kept_logp_CK, kept_CK)
                if draws_NM is not None:
                    drawn_CM = conditioned(drawn_CM, kept_logp_CK, kept_CK)
            emitted_C = emitted_C1[:, 0]
            emitted_N[rows] = emitted_C.detach()
            parts = list[tuple[Tensor, Metrics]]()
            if distilled is not None:
                parts.append(terms.distilled(*distilled(requested_CM, rows, **beside), rows))
            if draws_NM is not None:
                parts.append(terms.anchored(drawn_CM, rows))
            if self.single_pass and self.has_policy_terms:
                parts.append(terms.others(emitted_C[None], lambda x_N: x_N[rows][None]))
            loss, metrics = _summed_parts(parts)
            return loss * self.scale, metrics | terms.entropy(entropy, rows)

        loss, metrics = fused_loss(
            hidden_NH,
            weight_VH,
            terms.with_kept(ids_NM),
            loss_of_chunk,
            temperature=temperature,
            chunk=HELD if ids_NM is not None else HELD // DENSE,
            best=best,
            entropy=True,
            **shape,
        )
        return loss, metrics, emitted_N


class Terms:
    """Losses of the samples of a micro-batch, whose trained tokens are joined to tensors over N.

    The tensors have the device of `like`, and at least its precision and that of float32.
    """

    def __init__(
        self,
        method: Method,
        samples: Sequence[Scored],
        frozen: Sequence[Frozen],
        counts: Counts,
        like: Tensor,
        judged: Sequence[SampleWeight] = (),
        *,
        divisor: float = 1.0,
    ) -> None:
        device, dtype = like.device, torch.promote_types(like.dtype, torch.float32)
        self.method, self.frozen, self.counts, self.device, self.dtype = method, frozen, counts, device, dtype
        self.masks = [sample.rollout.loss_mask for sample in samples]
        self.tokens_N = self._of_mask([sample.rollout.tokens for sample in samples], torch.int64)
        self.support = support_of([sample.rollout for sample in samples], device)
        self.teachers = [sample.teacher for sample in samples]
        self.mask_N, self.behavior_N = self._joined("mask_T", torch.bool), self._joined("behavior_T", dtype)
        names = [each.name for each in fields(Frozen) if each.name.endswith("_T")]
        present = [name for name in names if getattr(frozen[0], name) is not None]
        self.frozen_N = {name: self._joined(name, torch.bool if name == "chosen_T" else dtype) for name in present}
        counts_B = torch.tensor([mask_T.sum() for mask_T in self.masks], device=device)
        self.sample_N = torch.arange(len(samples), device=device).repeat_interleave(counts_B)
        drawn_B = torch.tensor([not sample.rollout.prompt.source for sample in samples], device=device)
        self.others_N = self.mask_N & drawn_B[self.sample_N]
        """Tokens at which the policy loss and the KL to the reference are computed; the student drew them."""
        self.mixed_N = self.mask_N & ~self.others_N
        episodes = [list(its) for _, its in groupby(range(len(samples)), lambda i: episode_of(samples[i]))]
        self.rows_B = [int(counts_B[its].sum()) for its in episodes]
        """Number of trained tokens of each row. Adjacent samples of one episode form a row."""
        self.of_rows = [frozen[its[0]] for its in episodes]
        self.episode_tokens_B = torch.tensor([each.episode_tokens for each in self.of_rows], device=device)
        self.factor_N = self.anchor_N = self.draws_NM = None
        """With [freshness]: factors of each token in distillation and in the anchor, and its draws. Else None."""
        if judged:
            self.factor_N = torch.cat([each.distill_N for each in judged]).to(device, dtype) / divisor
            self.weight_B = torch.tensor([each.weighed.w / divisor for each in judged], device=device, dtype=dtype)
        if method.anchored:
            self.anchor_N = torch.cat([each.anchor_N for each in judged]).to(device, dtype) / divisor
            self.draws_NM = joined([sample.rollout.actions for sample in samples], device, torch.int64)
            self.drawn_logp_NM = joined([sample.rollout.action_logp for sample in samples], device, dtype)

    def _of_mask(self, arrays: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> Tensor:
        return joined([array[mask_T] for array, mask_T in zip(arrays, self.masks, strict=True)], self.device, dtype)

    def _joined(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._of_mask([getattr(each, name).cpu().numpy() for each in self.frozen], dtype)

    def with_kept(self, ids_NM: Tensor | None) -> Ids:
        """Return `ids_NM`, or a function that appends the sampling support to the ids if samples recorded one."""
        support = self.support
        if ids_NM is None or support is None:
            return ids_NM
        return lambda rows: torch.cat([ids_NM[rows], support[rows]], 1)

    def rows(self, x_N: Tensor) -> Tensor:
        """Return the values of trained tokens as padded rows [B, T]; a row is a sample or an episode."""
        return padded(torch.split(x_N, self.rows_B))

    def entropy(self, entropy_C: Tensor, rows: slice) -> Metrics:
        """Return the student's entropy at the trained tokens, at the temperature of the pass."""
        mask_C = self.mask_N[rows]
        return {"student/entropy": entropy_C.detach()[mask_C].sum() / max(self.counts.n_tokens, 1)}

    def distilled(self, loss_C: Tensor, metrics: Metrics, rows: slice) -> tuple[Tensor, Metrics]:
        mask_C, n = self.mask_N[rows], float(max(self.counts.n_tokens, 1))
        loss_C = loss_C.masked_fill(~mask_C, 0.0)
        found = _summed({"loss": loss_C.detach()} | metrics, mask_C, n)
        if len(self.method.teachers) > 1:
            found |= self._by_teacher(loss_C.detach(), mask_C, rows, n)
        if any(weight != 1.0 for weight in self.method.teachers.values()):
            weight_B = torch.tensor([self.method.teachers.get(name, 1.0) for name in self.teachers], device=self.device)
            loss_C = loss_C * weight_B[self.sample_N[rows]]
        if self.factor_N is not None:
            loss_C, n = loss_C * self.factor_N[rows], self.units
        return self.method.loss.weight * loss_C.sum() / n, found

    def forward_kl(self, samples: Sequence[Scored], logp_N: Tensor) -> Metrics:
        """Return an estimate of the KL from teacher to student on responses of teachers; {} if there are none."""
        n, found = max(self.counts.n_tokens, 1), list[Tensor]()
        counts = [int(mask_T.sum()) for mask_T in self.masks]
        split = zip(samples, torch.split(logp_N, counts), torch.split(self.mask_N, counts), strict=True)
        for sample, own_N, mask_N in split:
            if sample.rollout.prompt.source == "teacher" and sample.teacher_logp is not None:
                gap_N = torch.from_numpy(sample.teacher_logp).to(own_N) - own_N
                found.append(torch.stack([gap_N[mask_N].sum(), mask_N.sum().to(own_N)]))
        if not found:
            return {}
        gap, tokens = torch.stack(found).sum(0) / n
        return {"teacher/forward_kl": gap, TAUGHT: tokens}

    @property
    def units(self) -> float:
        """Return the divisor of distillation and anchor with [freshness]."""
        return max(self.counts.n_sequences if self.method.over_samples else self.counts.n_tokens, 1)

    def anchored(self, logp_CM: Tensor, rows: slice) -> tuple[Tensor, Metrics]:
        """Return the anchor (weighted KL to the sampling policy, estimated from the recorded draws) and its metric."""
        assert self.anchor_N is not None
        kl_C = rollout_kl_from_cache(logp_CM, self.drawn_logp_NM[rows]) * self.anchor_N[rows]
        loss = kl_C.sum() / self.units
        return loss, {"freshness/anchor": loss.detach()}

    def _by_teacher(self, loss_C: Tensor, mask_C: Tensor, rows: slice, n_tokens: float) -> Metrics:
        """Return the loss of each teacher's samples and their share of tokens. Both are divided by all tokens."""
        found = Metrics()
        for name in self.method.teachers:
            its_B = torch.tensor([teacher == name for teacher in self.teachers], device=self.device)
            its_C = mask_C & its_B[self.sample_N[rows]]
            found[f"teacher/{name}/loss"] = (loss_C * its_C).sum() / n_tokens
            found[f"teacher/{name}/share"] = its_C.to(loss_C.dtype).sum() / n_tokens
        return found

    def others(self, logp_BT: Tensor, cut: Cut) -> tuple[Tensor, Metrics]:
        """Return the sum of policy loss and reference KL, and metrics. `cut` gives every tensor the shape of `logp`."""
        policy, reference, counts = self.method.policy, self.method.reference, self.counts
        parts = list[tuple[Tensor, Metrics]]()
        # log-probs of tokens that the student did not draw may be unknown (NaN)
        known = {name: cut(value_N.masked_fill(~self.others_N, 0)) for name, value_N in self.frozen_N.items()}
        if self.method.weighs_policy:
            factor_BT = cut(self.weight_B[self.sample_N])
            known["weight_T"] = factor_BT * known["weight_T"] if "weight_T" in known else factor_BT
        mask_BT = cut(self.others_N)
        if policy is not None:
            part, found = policy_loss(
                policy.loss,
                logp_BT,
                known["old_T"],
                known["advantage_T"],
                mask_BT,
                weights=known.get("weight_T"),
                agg=policy.aggregation,
                n_tokens=counts.n_tokens,
                n_sequences=counts.n_sequences,
                scale=self.method.max_tokens,
                sequence_tokens=self.episode_tokens_B if self.method.by_row else None,
                **(policy.options | self._evidence(known)),
            )
            metrics = {f"policy/{name}": value for name, value in found.items()} | {"policy/loss": part.detach()}
            parts.append((policy.weight * part, metrics))
        if reference is not None and reference.into == "loss":
            part, found = kl_loss(
                logp_BT,
                known["reference_T"],
                mask_BT,
                logp_old=known["behavior_T"] if reference.importance else None,
                kind=reference.estimate,
                n_tokens=counts.n_tokens,
            )
            parts.append((self.frozen[0].coefficients.beta * part, {"reference/kl": found["kl_loss"]}))
        loss, metrics = _summed_parts(parts)
        if (mixed := cut(self.mixed_N).sum()) > 0:
            metrics[MIXED] = mixed.to(loss.dtype) / max(counts.n_tokens, 1)
        return loss, metrics

    def _evidence(self, known: dict[str, Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.method.chooses:
            found["chosen"] = known["chosen_T"]
        if self.method.proximal:
            found["proximal_logp"] = known["proximal_T"]
        if self.method.by_lag:
            found["lag"] = known["lag_T"]
        if self.method.by_turn:
            found["turns"] = known["turn_T"].long()
        if self.method.by_entropy:
            found["entropy"] = known["entropy_T"]
        if self.method.by_spread:
            found["spread"] = known["spread_T"]
        if "variance" in self.method.adaptive:
            found["variance_coef"] = self.frozen[0].coefficients.variance
        if self.method.policy is not None and self.method.policy.loss == "topr":
            found["positive"] = torch.tensor([each.positive for each in self.of_rows], device=self.device)
        return found


def _summed_parts(parts: Sequence[tuple[Tensor, Metrics]]) -> tuple[Tensor, Metrics]:
    loss = torch.stack([part for part, _ in parts]).sum()
    return loss, {name: value for _, metrics in parts for name, value in metrics.items()}


def _summed(metrics_C: Metrics, mask_C: Tensor, n_tokens: float) -> Metrics:
    """Reduce per-row metrics over the trained rows: the extreme if the name says so, else the sum over the count."""
    out = Metrics()
    for name, value_C in metrics_C.items():
        kept = value_C[mask_C]
        if len(kept):
            out[name] = reduced(name, kept) / (1 if extreme(name) else n_tokens)
    if "loss" in out:
        loss_C = metrics_C["loss"]
        out |= {"loss_abs": loss_C.abs().sum() / n_tokens, "loss_max": loss_C.amax(), "loss_min": loss_C.amin()}
    return {f"distill/{name}": value for name, value in out.items()}
