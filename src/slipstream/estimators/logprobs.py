"""Log-probs of a language model's head at chosen ids, without ever holding an N×V tensor.

`logprobs_at` is an ordinary differentiable function. It walks over the vocabulary in tiles, keeping a running
log-sum-exp, and computes the tiles again in its backward pass: every column of the weight is read once per pass.
`fused_loss` takes the loss of a few rows as a function and does forward and backward of the head for those rows in one
sweep over all columns: losses are sums over given counts, so nothing global is needed and nothing is computed twice.

Shapes: N rows, C rows of a chunk, M ids per row, V vocabulary, W columns of a tile, H hidden. Products are in the
dtype of `hidden`; what follows, and every sum over tiles, is in float32 if that is lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

HELD = 1 << 24
"""Logits held at a time, unless told otherwise."""
BLOCK = 4096
"""Most rows of a tile."""
PART = 1 << 13
"""Columns whose exponentials are held at a time."""

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

    An id may stand twice in a row. Where an id is −1 (padding) the result is 0 and so is its gradient. `chunk` is how
    many logits are held at a time.
    """
    logp_NM, _ = _apply(hidden_NH, weight_VH, ids_NM, bias, temperature, chunk, entropy=False)
    return logp_NM


def logprobs_and_entropy_at(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NM: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`logprobs_at`, and the entropy of every row's distribution; differentiable in both."""
    return _apply(hidden_NH, weight_VH, ids_NM, bias, temperature, chunk, entropy=True)


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
    over the whole vocabulary where `ids` is None. `chunk` is how many logits are held at a time.
    """
    _check(hidden_NH, weight_VH, ids_NM, bias, temperature)
    metrics: Metrics = {}
    rows = max(1, (chunk or HELD) // len(weight_VH))
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


def _apply(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NM: Tensor,
    bias: Tensor | None,
    temperature: float,
    chunk: int | None,
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    _check(hidden_NH, weight_VH, ids_NM, bias, temperature)
    logp_NM, entropy_N = _Head.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, ids_NM, temperature, chunk or HELD, entropy
    )
    return logp_NM, entropy_N


def _check(
    hidden_NH: Tensor, weight_VH: Tensor, ids_NM: Tensor | None, bias: Tensor | None, temperature: float
) -> None:
    if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        shapes = f"hidden {tuple(hidden_NH.shape)} and weight {tuple(weight_VH.shape)}"
        raise ValueError(f"{shapes} must be [N, H] and [V, H]")
    if ids_NM is not None and (ids_NM.ndim != 2 or len(ids_NM) != len(hidden_NH)):
        raise ValueError(f"ids {tuple(ids_NM.shape)} must be [N, M] with N = {len(hidden_NH)}")
    if bias is not None and bias.shape != weight_VH.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must be [V] with V = {len(weight_VH)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _slices(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _tiles(n: int, v: int, held: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) of at most `held` logits; all columns of a block of rows follow each other."""
    for rows in _slices(n, min(BLOCK, held)):
        for columns in _slices(v, max(1, held // (rows.stop - rows.start))):
            yield rows, columns


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _Logits:
    """Computes tiles of logits, all of them in the same memory: a fresh tile costs its page faults every time."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, bias: Tensor | None, temperature: float) -> None:
        self.hidden, self.weight, self.bias, self.temperature = hidden_NH, weight_VH, bias, temperature
        self.memory = hidden_NH.new_empty(0)

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        if self.memory.numel() < shape[0] * shape[1]:
            self.memory = self.hidden.new_empty(shape[0] * shape[1])
        tile_CW = self.memory[: shape[0] * shape[1]].view(shape)
        torch.mm(self.hidden[rows], self.weight[columns].T, out=tile_CW)
        logits_CW = tile_CW.to(_wide(tile_CW))
        if self.bias is not None:
            logits_CW += self.bias[columns]
        return logits_CW if self.temperature == 1.0 else logits_CW.div_(self.temperature)


def _logsumexp(logits_CV: Tensor) -> Tensor:
    """[C, 1], by parts: in one go it would need as much memory again."""
    parts = [part.logsumexp(1, keepdim=True) for part in torch.split(logits_CV, PART, 1)]
    return torch.cat(parts, 1).logsumexp(1, keepdim=True)


def _local(ids_CM: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Ids as columns of a tile, and which of them lie in it."""
    inside_CM = (ids_CM >= columns.start) & (ids_CM < columns.stop)
    return (ids_CM - columns.start).clamp(0, columns.stop - columns.start - 1), inside_CM


class _Grads:
    """Gradients of the head's inputs, summed over tiles of the gradient at the logits."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> None:
        def zeros(like: Tensor) -> Tensor:
            return torch.zeros_like(like, dtype=_wide(like))

        self.inputs = (hidden_NH, weight_VH, bias)
        self.hidden = zeros(hidden_NH) if needs[0] else None
        self.weight = zeros(weight_VH) if needs[1] else None
        self.bias = zeros(bias) if bias is not None and needs[2] else None

    def add(self, rows: slice, columns: slice, grad_CW: Tensor, temperature: float) -> None:
        hidden_CH, weight_WH = self.inputs[0][rows], self.inputs[1][columns]
        if temperature != 1.0:
            grad_CW = grad_CW.div_(temperature)
        if self.bias is not None:
            self.bias[columns] += grad_CW.sum(0)
        grad_CW = grad_CW.to(hidden_CH.dtype)
        if self.hidden is not None:
            _add_product(self.hidden[rows], grad_CW, weight_WH)
        if self.weight is not None:
            _add_product(self.weight[columns], grad_CW.T, hidden_CH)

    def done(self) -> tuple[Tensor | None, ...]:
        found = (self.hidden, self.weight, self.bias)
        return tuple(
            None if grad is None or like is None else grad.to(like.dtype)
            for grad, like in zip(found, self.inputs, strict=True)
        )


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left · right; in float32 for lower inputs, as rounding every product would bias the sum."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    elif into.is_cuda:
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(left.to(into.dtype), right.to(into.dtype))


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias: Tensor | None,
        ids_NM: Tensor,
        temperature: float,
        held: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype, n = _wide(hidden_NH), len(hidden_NH)
        at_NM = hidden_NH.new_zeros(ids_NM.shape, dtype=dtype)
        lse_N = hidden_NH.new_full((n,), -torch.inf, dtype=dtype)
        mean_N = hidden_NH.new_zeros(n, dtype=dtype)
        """Mean logit under the distribution so far."""
        logits = _Logits(hidden_NH, weight_VH, bias, temperature)
        for rows, columns in _tiles(n, len(weight_VH), held):
            logits_CW = logits(rows, columns)
            local_CM, inside_CM = _local(ids_NM[rows], columns)
            at_NM[rows] = torch.where(inside_CM, logits_CW.gather(1, local_CM), at_NM[rows])
            tile_C = _logsumexp(logits_CW)[:, 0]
            both_C = torch.logaddexp(lse_N[rows], tile_C)
            if entropy:
                inner_C = ((logits_CW - tile_C[:, None]).exp_() * logits_CW).sum(1)
                mean_N[rows] = (lse_N[rows] - both_C).exp() * mean_N[rows] + (tile_C - both_C).exp() * inner_C
            lse_N[rows] = both_C
        entropy_N = lse_N - mean_N if entropy else mean_N
        ctx.save_for_backward(hidden_NH, weight_VH, bias, ids_NM, lse_N, entropy_N)
        ctx.temperature, ctx.held, ctx.entropy = temperature, held, entropy
        return (at_NM - lse_N[:, None]).masked_fill_(ids_NM < 0, 0.0), entropy_N

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_logp_NM, grad_entropy_N = outputs
        hidden_NH, weight_VH, bias, ids_NM, lse_N, entropy_N = ctx.saved_tensors
        grads = _Grads(hidden_NH, weight_VH, bias, ctx.needs_input_grad)
        grad_logp_NM = grad_logp_NM.masked_fill(ids_NM < 0, 0.0)
        total_N1 = grad_logp_NM.sum(1, keepdim=True)
        logits = _Logits(hidden_NH, weight_VH, bias, ctx.temperature)
        for rows, columns in _tiles(len(hidden_NH), len(weight_VH), ctx.held):
            logp_CW = logits(rows, columns).sub_(lse_N[rows, None])
            factor_CW = -total_N1[rows]
            if ctx.entropy:
                factor_CW = factor_CW - (logp_CW + entropy_N[rows, None]) * grad_entropy_N[rows, None]
            grad_CW = logp_CW.exp_().mul_(factor_CW)
            local_CM, inside_CM = _local(ids_NM[rows], columns)
            grad_CW.scatter_add_(1, local_CM, grad_logp_NM[rows] * inside_CM)
            grads.add(rows, columns, grad_CW, ctx.temperature)
        return *grads.done(), None, None, None, None


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
        size: int,
        metrics: Metrics,
    ) -> Tensor:
        loss = hidden_NH.new_zeros((), dtype=_wide(hidden_NH))
        grads = _Grads(hidden_NH, weight_VH, bias, ctx.needs_input_grad)
        logits, columns = _Logits(hidden_NH, weight_VH, bias, temperature), slice(0, len(weight_VH))
        for rows in _slices(len(hidden_NH), size):
            logits_CV = logits(rows, columns)
            logp_CV = logits_CV.sub_(_logsumexp(logits_CV))
            ids_CM = None if ids_NM is None else ids_NM[rows]
            seen = logp_CV.clone() if ids_CM is None else logp_CV.gather(1, ids_CM.clamp(min=0))
            if ids_CM is not None:
                seen.masked_fill_(ids_CM < 0, 0.0)
            with torch.enable_grad():
                part, extra = loss_fn(seen.requires_grad_(), rows)
            (grad_seen,) = torch.autograd.grad(part, seen)
            loss += part.detach()
            merge_metrics(metrics, extra)
            if ids_CM is not None:
                grad_seen = grad_seen.masked_fill(ids_CM < 0, 0.0)
            grad_CV = logp_CV.exp_().mul_(-grad_seen.sum(1, keepdim=True))
            if ids_CM is None:
                grad_CV += grad_seen
            else:
                grad_CV.scatter_add_(1, ids_CM.clamp(min=0), grad_seen)
            grads.add(rows, columns, grad_CV, temperature)
        ctx.save_for_backward(*grads.done())
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_loss,) = outputs
        if grad_loss == 1:  # a loss that is what backward starts from: no second copy of the weight's gradient
            return *ctx.saved_tensors, None, None, None, None, None
        scaled = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return *scaled, None, None, None, None, None
