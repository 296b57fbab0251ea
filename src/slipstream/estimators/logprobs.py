"""Log-probs of a language model's head at chosen ids, without ever holding an N×V tensor.

Rows are worked on in chunks. `logprobs_at` is an ordinary differentiable function and recomputes the logits of a chunk
in its backward pass. `fused_loss` takes the loss of a chunk as a function and does forward and backward of the head in
one sweep: the losses are sums over given counts (so nothing global is needed) and nothing is recomputed.

Shapes: N rows, C rows of a chunk, M ids per row, V vocabulary, H hidden. Arithmetic is in the dtype of `hidden`,
float32 from the logits on if that is lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits held at a time when no chunk is given."""

Metrics = dict[str, Tensor]
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Metrics]]
"""(log-probs of the chunk's rows, which rows) → (their loss, summed; metrics, merged by `merge_metrics`)."""


def logprobs_at(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NM: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """log softmax((hidden · weightᵀ + bias) / temperature) at `ids`, differentiable in hidden, weight and bias.

    An id may stand twice in a row. Where an id is −1 (padding) the result is 0 and so is its gradient.
    """
    logp_NM, _ = logprobs_and_entropy_at(
        hidden_NH, weight_VH, ids_NM, bias=bias, temperature=temperature, chunk=chunk, entropy=False
    )
    return logp_NM


def logprobs_and_entropy_at(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NM: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """`logprobs_at`, and the entropy of every row's distribution (zeros with entropy=False)."""
    _check(hidden_NH, weight_VH, ids_NM, bias, temperature)
    rows = chunk or default_chunk(weight_VH)
    logp_NM, entropy_N = _Head.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, ids_NM, temperature, rows, entropy
    )
    return logp_NM, entropy_N


def fused_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NM: Tensor | None,
    loss_fn: ChunkLoss,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Metrics]:
    """The sum of `loss_fn` over chunks of rows, with the gradients of the head already computed.

    For losses of token scope: the loss of a row may not depend on other rows. `loss_fn` sees log-probs at the ids, or
    over the whole vocabulary where `ids` is None.
    """
    _check(hidden_NH, weight_VH, ids_NM, bias, temperature)
    metrics: Metrics = {}
    rows = chunk or default_chunk(weight_VH)
    loss = _FusedHead.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, ids_NM, loss_fn, temperature, rows, metrics
    )
    return loss, metrics


def merge_metrics(into: Metrics, new: Metrics) -> None:
    """Add `new` to `into`: by maximum or minimum where the name ends in _max or _min, else by sum."""
    for name, value in new.items():
        if name not in into:
            into[name] = value
        elif name.endswith("_max"):
            into[name] = torch.maximum(into[name], value)
        elif name.endswith("_min"):
            into[name] = torch.minimum(into[name], value)
        else:
            into[name] = into[name] + value


def default_chunk(weight_VH: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // weight_VH.shape[0])


def _check(
    hidden_NH: Tensor, weight_VH: Tensor, ids_NM: Tensor | None, bias: Tensor | None, temperature: float
) -> None:
    if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_NH.shape)} and weight {tuple(weight_VH.shape)} must be [N, H] and [V, H]"
        )
    if ids_NM is not None and (ids_NM.ndim != 2 or len(ids_NM) != len(hidden_NH)):
        raise ValueError(f"ids {tuple(ids_NM.shape)} must be [N, M] with N = {len(hidden_NH)}")
    if bias is not None and bias.shape != weight_VH.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must be [V] with V = {len(weight_VH)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _chunks(n: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, n)) for start in range(0, n, rows))


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits_CV = hidden_CH @ weight_VH.T
    if logits_CV.dtype in (torch.bfloat16, torch.float16):
        logits_CV = logits_CV.float()
    if bias is not None:
        logits_CV += bias
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _gather(logits_CV: Tensor, lse_C: Tensor, ids_CM: Tensor) -> Tensor:
    logp_CM = logits_CV.gather(1, ids_CM.clamp(min=0)) - lse_C[:, None]
    return logp_CM.masked_fill_(ids_CM < 0, 0.0)


class _HeadGrads:
    """Gradients of the head's inputs, gathered chunk by chunk from the gradient at the logits."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> None:
        self.hidden = torch.zeros_like(hidden_NH) if needs[0] else None
        self.weight = torch.zeros_like(weight_VH) if needs[1] else None
        self.bias = torch.zeros_like(bias) if bias is not None and needs[2] else None

    def add(self, at: slice, grad_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> None:
        if temperature != 1.0:
            grad_CV = grad_CV.div_(temperature)
        if self.bias is not None:
            self.bias += grad_CV.sum(0)
        grad_CV = grad_CV.to(hidden_CH.dtype)
        if self.hidden is not None:
            torch.mm(grad_CV, weight_VH, out=self.hidden[at])
        if self.weight is not None:
            self.weight.addmm_(grad_CV.T, hidden_CH)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias: Tensor | None,
        ids_NM: Tensor,
        temperature: float,
        rows: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logp_NM = hidden_NH.new_empty(ids_NM.shape, dtype=dtype)
        lse_N = hidden_NH.new_empty(len(hidden_NH), dtype=dtype)
        entropy_N = hidden_NH.new_zeros(len(hidden_NH), dtype=dtype)
        for at in _chunks(len(hidden_NH), rows):
            logits_CV = _logits(hidden_NH[at], weight_VH, bias, temperature)
            lse_N[at] = logits_CV.logsumexp(1)
            logp_NM[at] = _gather(logits_CV, lse_N[at], ids_NM[at])
            if entropy:
                logp_CV = logits_CV.sub_(lse_N[at, None])
                entropy_N[at] = -(logp_CV.exp() * logp_CV).sum(1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias, ids_NM, lse_N, entropy_N)
        ctx.temperature, ctx.rows, ctx.entropy = temperature, rows, entropy
        return logp_NM, entropy_N

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp_NM, grad_entropy_N = outputs
        hidden_NH, weight_VH, bias, ids_NM, lse_N, entropy_N = ctx.saved_tensors
        grads = _HeadGrads(hidden_NH, weight_VH, bias, ctx.needs_input_grad)
        grad_logp_NM = grad_logp_NM.masked_fill(ids_NM < 0, 0.0)
        for at in _chunks(len(hidden_NH), ctx.rows):
            logp_CV = _logits(hidden_NH[at], weight_VH, bias, ctx.temperature).sub_(lse_N[at, None])
            p_CV = logp_CV.exp()
            grad_CV = p_CV * -grad_logp_NM[at].sum(1, keepdim=True)
            grad_CV.scatter_add_(1, ids_NM[at].clamp(min=0), grad_logp_NM[at])
            if ctx.entropy:
                grad_CV -= p_CV * (logp_CV + entropy_N[at, None]) * grad_entropy_N[at, None]
            grads.add(at, grad_CV, hidden_NH[at], weight_VH, ctx.temperature)
        return grads.hidden, grads.weight, grads.bias, None, None, None, None


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias: Tensor | None,
        ids_NM: Tensor | None,
        loss_fn: ChunkLoss,
        temperature: float,
        rows: int,
        metrics: Metrics,
    ) -> Tensor:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        loss = hidden_NH.new_zeros((), dtype=dtype)
        grads = _HeadGrads(hidden_NH, weight_VH, bias, ctx.needs_input_grad)
        for at in _chunks(len(hidden_NH), rows):
            logits_CV = _logits(hidden_NH[at], weight_VH, bias, temperature)
            lse_C = logits_CV.logsumexp(1)
            logp_CV = logits_CV.sub_(lse_C[:, None])
            if ids_NM is None:
                seen = logp_CV.clone()
            else:
                seen = logp_CV.gather(1, ids_NM[at].clamp(min=0)).masked_fill_(ids_NM[at] < 0, 0.0)
            with torch.enable_grad():
                part, extra = loss_fn(seen.requires_grad_(), at)
            (grad_seen,) = torch.autograd.grad(part, seen)
            loss += part.detach()
            merge_metrics(metrics, extra)
            if ids_NM is None:
                grad_CV = logp_CV.exp_().mul_(-grad_seen.sum(1, keepdim=True)).add_(grad_seen)
            else:
                grad_seen.masked_fill_(ids_NM[at] < 0, 0.0)
                grad_CV = logp_CV.exp_().mul_(-grad_seen.sum(1, keepdim=True))
                grad_CV.scatter_add_(1, ids_NM[at].clamp(min=0), grad_seen)
            grads.add(at, grad_CV, hidden_NH[at], weight_VH, temperature)
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_loss,) = outputs
        scaled = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return *scaled, None, None, None, None, None
