"""Loss of a micro-batch: distillation, policy loss and KL to the reference, in one pass of the head if possible.

Losses of token scope, at the temperature of the distillation loss, are computed in the fused head. A policy loss that
needs whole rows, or another temperature, has its own pass. Metrics are divided by the counts like the losses, so
metrics of micro-batches add up. Guarantor of invariant 5: every loss is a sum divided by given counts. The result
is the same for all cuts of a batch and all orders of its parts.

Shapes: N trained tokens, C rows of a chunk, M ids of a row, V vocabulary, B samples, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.estimators.auxiliary import kl_loss
from slipstream.estimators.drift import rollout_kl_from_cache
from slipstream.estimators.logprobs import Ids, fused_loss, held, reduced
from slipstream.estimators.logprobs.sampling_support import conditioned, kept_logprobs_and_entropy_at
from slipstream.estimators.logprobs.tiles import Head
from slipstream.estimators.numerics import bounded_exp, floored, histogram, joined
from slipstream.estimators.policy import policy_loss
from slipstream.estimators.tables.policy import POLICY_LOSSES
from slipstream.metric_names import extreme
from slipstream.objective.columns import COLUMNS, padded, present, support_of
from slipstream.objective.constants import UpdateConstants
from slipstream.objective.distillation import Distillation, LossOfRows, TeacherHeads
from slipstream.objective.method import Method
from slipstream.objective.sample_weights import SampleWeight, episode_of
from slipstream.records import Counts, Scored

Metrics = dict[str, Tensor]
MIXED = "policy/mixed"
"""Share of tokens that the student did not draw; the learner divides means over its own tokens by the rest."""
TAUGHT = "teacher/taught"
"""Share of tokens that a teacher drew; the learner divides the forward KL by it."""
PAIRS = "router/pairs"
"""Number of pairs of a token and a router; the learner divides their flips by it."""
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
        constants: Sequence[UpdateConstants],
        counts: Counts,
        judged: Sequence[SampleWeight] = (),
        slope_N: Tensor | None = None,
    ) -> tuple[Tensor, Metrics, Tensor]:
        """Return the differentiable loss, its metrics, and the emitted tokens' log-probs at sampling temperature.

        `slope_N` is the gradient from `ahead`, and NaN at tokens whose policy loss is still to be computed.
        """
        terms = Terms(self.method, samples, constants, counts, hidden_NH, judged, divisor=self.divisor)
        hidden_NH, weight, bias = head.inputs(hidden_NH)
        shape: dict[str, Any] = {"bias": bias, **head.bend}
        parts, entropy = list[tuple[Tensor, Metrics]](), Metrics()
        fused_N: Tensor | None = None
        """Log-probs of the emitted tokens at the temperature of the distillation loss."""
        if self.distillation or self.single_pass:
            loss, metrics, logp_N = self._fused(hidden_NH, weight, shape, samples, terms)
            parts.append((loss / self.scale, metrics))
            fused_N = logp_N if self.distillation else None
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
            parts += terms.anchored(logp_NM, slice(None))
            if slope_N is not None:
                slope_N = slope_N.to(logp_N)
                terms.others_N = terms.others_N & slope_N.isnan()
                parts.append(((slope_N.nan_to_num() * (logp_N - logp_N.detach())).sum(), {}))
            if self.has_policy_terms:
                centre_N = terms.centre(logp_NM, slice(None))
                centre_BT = None if centre_N is None else terms.rows(centre_N)
                parts.append(terms.others(terms.rows(logp_N), terms.rows, centre_BT))
        total, metrics = _summed_parts(parts)
        metrics = entropy | metrics | {"loss": total.detach()}  # the entropy of the fused pass comes first
        if fused_N is not None or self.method.loss.temperature == self.method.temperature:  # that of teacher_logp
            metrics |= terms.forward_kl(samples, (logp_N if fused_N is None else fused_N).detach())
        if terms.support is not None:
            sizes_N = torch.from_numpy(terms.support.sizes_N).to(hidden_NH.device)
            metrics["kept/size"] = sizes_N[terms.mask_N].sum() / max(counts.n_tokens, 1)
        return total, metrics, logp_N.detach()

    def ahead(
        self,
        samples: Sequence[Scored],
        constants: Sequence[UpdateConstants],
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
        terms = Terms(self.method, samples, constants, counts, logp_N, judged, divisor=self.divisor)
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
            ids_NM, distilled = row(samples, terms.constants, terms.tokens_N, terms.dtype)
            temperature, best, on_kept, on_draws = row.temperature, row.best, row.on_kept, row.on_draws
        requested = draws = slice(0, None if ids_NM is None else ids_NM.shape[1])
        """Columns of the log-probs: `requested` for the distillation loss, and `draws` for the draws."""
        draws_NM = terms.draws_NM if self.single_pass else None
        if draws_NM is not None and ids_NM is not None and not (on_draws and terms.of_draws):
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
            centre_C = None
            if draws_NM is not None:
                parts += terms.anchored(drawn_CM, rows)
                centre_C = terms.centre(drawn_CM, rows)
            if self.single_pass and self.has_policy_terms:
                centre_1C = None if centre_C is None else centre_C[None]
                parts.append(terms.others(emitted_C[None], lambda x_N: x_N[rows][None], centre_1C))
            loss, metrics = _summed_parts(parts)
            return loss * self.scale, metrics | terms.entropy(entropy, rows)

        loss, metrics = fused_loss(
            hidden_NH,
            weight_VH,
            terms.with_kept(ids_NM),
            loss_of_chunk,
            temperature=temperature,
            chunk=held(hidden_NH) // (1 if ids_NM is not None else DENSE),
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
        constants: Sequence[UpdateConstants],
        counts: Counts,
        like: Tensor,
        judged: Sequence[SampleWeight] = (),
        *,
        divisor: float = 1.0,
    ) -> None:
        device, dtype = like.device, torch.promote_types(like.dtype, torch.float32)
        self.method, self.constants, self.counts, self.device, self.dtype = method, constants, counts, device, dtype
        self.masks = [sample.rollout.loss_mask for sample in samples]
        self.tokens_N = self._of_mask([sample.rollout.tokens for sample in samples], torch.int64)
        self.support = support_of([sample.rollout for sample in samples], device)
        self.teachers = [sample.teacher for sample in samples]
        self.mask_N = self._joined([each.mask_T for each in constants])
        self.behavior_N = self._joined([each.behavior_T for each in constants])
        names = [name for name in constants[0].columns if COLUMNS[name].shape == "tokens"]
        self.columns_N = {name: self._joined([each.columns[name] for each in constants]) for name in names}
        counts_B = torch.tensor([mask_T.sum() for mask_T in self.masks], device=device)
        self.sample_N = torch.arange(len(samples), device=device).repeat_interleave(counts_B)
        drawn_B = torch.tensor([not sample.rollout.prompt.source for sample in samples], device=device)
        self.others_N = self.mask_N & drawn_B[self.sample_N]
        """Tokens at which the policy loss and the KL to the reference are computed; the student drew them."""
        self.mixed_N = self.mask_N & ~self.others_N
        scored = [sample.scored_tokens for sample in samples]
        self.taught_N = self.mask_N & joined(scored, device, torch.bool)
        """Tokens at which the distillation loss is computed: all, except those that a teacher left out."""
        episodes = [list(its) for _, its in groupby(range(len(samples)), lambda i: episode_of(samples[i]))]
        self.rows_B = [int(counts_B[its].sum()) for its in episodes]
        """Number of trained tokens of each row. Adjacent samples of one episode form a row."""
        self.of_rows = [constants[its[0]] for its in episodes]
        self.episode_tokens_B = torch.tensor([each.episode_tokens for each in self.of_rows], device=device)
        self.drawn_weight_N: Tensor | None = None
        """Importance weight of each token's sample, if samples were drawn from the store of [reuse]."""
        if any(sample.weight != 1 for sample in samples):
            weight_B = torch.tensor([sample.weight for sample in samples], device=device, dtype=dtype)
            self.drawn_weight_N = weight_B[self.sample_N]
        self.factor_N = self.anchor_N = None
        """With [freshness]: factors of each token in distillation and in the anchor. Else None."""
        self.draws_NM: Tensor | None = None
        """The emitted token, and others whose log-probs the anchor or the centre of the score need; None: no others."""
        self.of_draws = method.centre in ("", "centre_of_draws")
        """True if these are the draws, false if they are the sampler's most likely tokens."""
        rollouts = [sample.rollout for sample in samples]
        if method.anchored or (method.centre and self.of_draws):
            self.draws_NM = joined([rollout.actions for rollout in rollouts], device, torch.int64)
        elif method.centre:
            best_NK = joined([present(rollout.best_ids) for rollout in rollouts], device, torch.int64)
            self.draws_NM = torch.cat([self.tokens_N[:, None], best_NK], 1)
        self.centre_NM: Tensor | None = None
        """Coefficients of these log-probs in the centre of the score."""
        if method.centre:
            self.centre_NM = joined([each.columns[method.centre].numpy() for each in constants], device, dtype)
        if judged:
            self.factor_N = torch.cat([each.distill_N for each in judged]).to(device, dtype) / divisor
            self.weight_B = torch.tensor([each.weighed.w / divisor for each in judged], device=device, dtype=dtype)
        if method.anchored:
            self.anchor_N = torch.cat([each.anchor_N for each in judged]).to(device, dtype) / divisor
            self.drawn_logp_NM = joined([sample.rollout.action_logp for sample in samples], device, dtype)

    def _of_mask(self, arrays: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> Tensor:
        return joined([array[mask_T] for array, mask_T in zip(arrays, self.masks, strict=True)], self.device, dtype)

    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        dtype = self.dtype if values[0].is_floating_point() else values[0].dtype
        return self._of_mask([value_T.cpu().numpy() for value_T in values], dtype)

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
        return {"student/entropy": entropy_C.detach().masked_fill(~mask_C, 0.0).sum() / max(self.counts.n_tokens, 1)}

    def distilled(self, loss_C: Tensor, metrics: Metrics, rows: slice) -> tuple[Tensor, Metrics]:
        mask_C, n = self.taught_N[rows], float(max(self.counts.n_tokens, 1))
        loss_C = loss_C.masked_fill(~mask_C, 0.0)
        reported = _summed({"loss": loss_C.detach()} | metrics, mask_C, n)
        if len(self.method.teachers) > 1:
            reported |= self._by_teacher(loss_C.detach(), mask_C, rows, n)
        if (weights_N := self.columns_N.get("token_weights")) is not None:
            loss_C = loss_C * weights_N[rows]
        if any(weight != 1.0 for weight in self.method.teachers.values()):
            weight_B = torch.tensor([self.method.teachers.get(name, 1.0) for name in self.teachers], device=self.device)
            loss_C = loss_C * weight_B[self.sample_N[rows]]
        if self.drawn_weight_N is not None:
            loss_C = loss_C * self.drawn_weight_N[rows]
        if self.factor_N is not None:
            loss_C, n = loss_C * self.factor_N[rows], self.units
        return self.method.loss.weight * loss_C.sum() / n, reported

    def forward_kl(self, samples: Sequence[Scored], logp_N: Tensor) -> Metrics:
        """Return an estimate of the KL from teacher to student on responses of teachers; {} if there are none."""
        n, parts = max(self.counts.n_tokens, 1), list[Tensor]()
        counts = [int(mask_T.sum()) for mask_T in self.masks]
        split = zip(samples, torch.split(logp_N, counts), torch.split(self.mask_N, counts), strict=True)
        for sample, own_N, mask_N in split:
            if sample.rollout.prompt.source == "teacher" and sample.teacher_logp is not None:
                gap_N = torch.from_numpy(sample.teacher_logp).to(own_N) - own_N
                parts.append(torch.stack([gap_N[mask_N].sum(), mask_N.sum().to(own_N)]))
        if not parts:
            return {}
        gap, tokens = torch.stack(parts).sum(0) / n
        return {"teacher/forward_kl": gap, TAUGHT: tokens}

    @property
    def units(self) -> float:
        """Return the divisor of distillation and anchor with [freshness]."""
        return max(self.counts.n_sequences if self.method.over_samples else self.counts.n_tokens, 1)

    def anchored(self, logp_CM: Tensor, rows: slice) -> list[tuple[Tensor, Metrics]]:
        """Return the anchor (weighted KL to the sampling policy, estimated from the recorded draws) and its metric."""
        if self.anchor_N is None:
            return []
        kl_C = rollout_kl_from_cache(logp_CM, self.drawn_logp_NM[rows]) * self.anchor_N[rows]
        if self.drawn_weight_N is not None:
            kl_C = kl_C * self.drawn_weight_N[rows]
        loss = kl_C.sum() / self.units
        return [(loss, {"freshness/anchor": loss.detach()})]

    def centre(self, logp_CM: Tensor, rows: slice) -> Tensor | None:
        """Return the centre of the score at each token, a weighted sum of log-probs; None without centering."""
        return None if self.centre_NM is None else (self.centre_NM[rows] * floored(logp_CM)).sum(-1)

    def _by_teacher(self, loss_C: Tensor, mask_C: Tensor, rows: slice, n_tokens: float) -> Metrics:
        """Return the loss of each teacher's samples and their share of tokens. Both are divided by all tokens."""
        metrics = Metrics()
        for name in self.method.teachers:
            its_B = torch.tensor([teacher == name for teacher in self.teachers], device=self.device)
            its_C = mask_C & its_B[self.sample_N[rows]]
            metrics[f"teacher/{name}/loss"] = (loss_C * its_C).sum() / n_tokens
            metrics[f"teacher/{name}/share"] = its_C.to(loss_C.dtype).sum() / n_tokens
        return metrics

    def others(self, logp_BT: Tensor, cut: Cut, centre_BT: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """Return the sum of policy loss and reference KL, and metrics. `cut` gives every tensor the shape of `logp`."""
        policy, reference, counts = self.method.policy, self.method.reference, self.counts
        parts = list[tuple[Tensor, Metrics]]()
        # log-probs of tokens that the student did not draw may be unknown (NaN)
        tokens_N = self.columns_N | {"behavior": self.behavior_N}
        taken = {name: cut(value_N.masked_fill(~self.others_N, 0)) for name, value_N in tokens_N.items()}
        mask_BT, weights_BT = cut(self.others_N), taken.get("weights")
        drawn_BT = None if self.drawn_weight_N is None else cut(self.drawn_weight_N)
        fresh_BT = cut(self.weight_B[self.sample_N]) if self.method.weighs_policy else None
        for factor_BT in (each for each in (fresh_BT, drawn_BT) if each is not None):
            weights_BT = factor_BT if weights_BT is None else factor_BT * weights_BT
            centre_BT = None if centre_BT is None else factor_BT * centre_BT
        counted: dict[str, Any] = {
            "agg": self.method.aggregation,
            "n_tokens": counts.n_tokens,
            "n_sequences": counts.n_sequences,
            "scale": self.method.max_tokens,
            "sequence_tokens": self.episode_tokens_B if self.method.by_row else None,
        }
        if policy is not None:
            options: dict[str, Any] = dict(policy.options)
            if "variance" in self.method.adaptive:
                options["variance_coef"] = self.constants[0].coefficients.variance
            for name in POLICY_LOSSES[policy.loss].columns:
                of_episodes = [each.columns[name] for each in self.of_rows if name not in taken]
                options[name] = torch.stack(of_episodes).to(self.device) if of_episodes else taken[name]
            part, measured = policy_loss(
                policy.loss,
                logp_BT,
                taken["old"],
                taken["advantages"],
                mask_BT,
                weights=weights_BT,
                centre=centre_BT,
                **counted,
                **options,
            )
            metrics = {f"policy/{name}": value for name, value in measured.items()} | {"policy/loss": part.detach()}
            metrics["policy/ratio_p99"] = histogram(bounded_exp(logp_BT.detach() - taken["old"]), mask_BT)
            parts.append((policy.weight * part, metrics))
        if reference is not None and reference.into == "loss":
            part, measured = kl_loss(
                logp_BT,
                taken["reference"],
                mask_BT,
                logp_old=taken["behavior"] if reference.importance else None,
                weights=drawn_BT,
                kind=reference.estimate,
                **counted,
            )
            parts.append((self.constants[0].coefficients.beta * part, {"reference/kl": measured["kl_loss"]}))
        loss, metrics = _summed_parts(parts)
        if (mixed := cut(self.mixed_N).sum()) > 0:
            metrics[MIXED] = mixed.to(loss.dtype) / max(counts.n_tokens, 1)
        return loss, metrics


def _summed_parts(parts: Sequence[tuple[Tensor, Metrics]]) -> tuple[Tensor, Metrics]:
    loss = torch.stack([part for part, _ in parts]).sum()
    return loss, {name: value for _, metrics in parts for name, value in metrics.items()}


def _summed(metrics_C: Metrics, mask_C: Tensor, n_tokens: float) -> Metrics:
    """Reduce per-row metrics over the trained rows: the extreme if the name says so, else the sum over the count.

    Ratios whose 99th percentile is wanted are counted in a histogram.
    """
    out = Metrics()
    for name, value_C in metrics_C.items():
        if name == "ratio_p99":
            out[name] = histogram(value_C, mask_C[:, None].expand_as(value_C))
        elif len(values := value_C[mask_C]):
            out[name] = reduced(name, values) / (1 if extreme(name) else n_tokens)
    if "loss" in out:
        loss = metrics_C["loss"][mask_C]
        out |= {"loss_abs": loss.abs().sum() / n_tokens, "loss_max": loss.amax(), "loss_min": loss.amin()}
    return {f"distill/{name}": value for name, value in out.items()}
