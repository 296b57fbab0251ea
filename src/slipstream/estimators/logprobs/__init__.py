"""Log-probs of a language model's head at chosen ids, without an N×V tensor.

`logprobs_at` is an ordinary differentiable function. It processes the vocabulary in tiles with a running log-sum-exp,
and computes the tiles again in the backward pass. Every column of the weight is read once per pass. `fused_loss` takes
a loss of a few rows as a function. It runs forward and backward of the head for these rows in one pass over all
columns. Losses are sums over given counts, so rows need no data of other rows, and products are computed once.

Shapes: N rows, C rows of a chunk, M ids per row, V vocabulary, W columns of a tile, H hidden. Products have the dtype
of `hidden`. Everything after them, and every sum over tiles, is in at least float32.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from slipstream.estimators.logprobs import tiles
from slipstream.estimators.logprobs.tiles import Bend, slices, wide
from slipstream.estimators.products import add_product, multiply_into
from slipstream.metric_names import extreme

HELD = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Default number of logits in memory at a time: on CPUs new memory is slow, and GPUs need large products."""
TILE_ROWS = 4096
"""Largest number of rows of a tile."""

Metrics = dict[str, Tensor]
ChunkLoss = Callable[..., tuple[Tensor, Metrics]]
"""Function from (log-probs of the chunk's rows, slice of rows) to (summed loss, metrics for `merge_metrics`)."""
Ids = Tensor | Callable[[slice], Tensor] | None
"""Ids [N, M]; or a function that returns [C, M] for the rows of a chunk, with any width; or None for the whole
vocabulary."""


def logprobs_at(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NM: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    cap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return log softmax(x / temperature) at `ids`, with x = scale · (hidden · weightᵀ + bias).

    The result is differentiable in hidden, weight and bias. With `cap`, which some models have, x becomes cap · tanh(x
    / cap). A row may contain an id twice. At id −1 (padding) result and gradient are 0. `chunk` is the number of logits
    held at a time.
    """
    bend = Bend(temperature, scale, cap)
    _check(hidden_NH, weight_VH, ids_NM, bias, bend, chunk)
    logp_NM: Tensor
    logp_NM, _ = _Head.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, ids_NM, bend, chunk or held(hidden_NH), False
    )
    return logp_NM


def logprobs_and_entropy_at(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NM: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    cap: float | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result of `logprobs_at` and the entropy of every row's distribution; both are differentiable."""
    bend = Bend(temperature, scale, cap)
    _check(hidden_NH, weight_VH, ids_NM, bias, bend, chunk)
    logp_NM, entropy_N = _Head.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, ids_NM, bend, chunk or held(hidden_NH), True
    )
    return logp_NM, entropy_N


def fused_loss(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NM: Ids,
    loss_fn: ChunkLoss,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    cap: float | None = None,
    chunk: int | None = None,
    best: int = 0,
    entropy: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return the sum of `loss_fn` over chunks of rows, with the gradients of the head already computed.

    For losses of token scope: the loss of a row must not depend on other rows. `loss_fn` receives log-probs at the ids,
    or over the whole vocabulary if `ids` is None. Only these log-probs carry a gradient. With `best` it also receives
    `best_ids`, the most likely ids of each row [C, best], and with `entropy` the entropies [C], both without gradient.
    `chunk` is the number of logits held at a time. `ids` may be a function of a chunk if the number of ids varies.
    """
    bend = Bend(temperature, scale, cap)
    _check(hidden_NH, weight_VH, ids_NM if isinstance(ids_NM, Tensor) else None, bias, bend, chunk)
    metrics: Metrics = {}
    rows = max(1, (chunk or held(hidden_NH)) // len(weight_VH))
    loss = _FusedHead.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias, ids_NM, loss_fn, bend, rows, metrics, best, entropy
    )
    return loss, metrics


def merge_metrics(into: Metrics, new: Metrics) -> None:
    """Merge `new` into the metrics `into`: minima and maxima (by name) stay extremes, other values are summed."""
    for name, value in new.items():
        into[name] = reduced(name, torch.stack([into[name], value])) if name in into else value


def reduced(name: str, values_N: Tensor) -> Tensor:
    match extreme(name):
        case "max":
            return values_N.amax()
        case "min":
            return values_N.amin()
        case "":
            return values_N.sum(0)


def held(like: Tensor) -> int:
    """Return the default number of logits in memory at a time on the device of this tensor."""
    return HELD["cuda" if like.is_cuda else "cpu"]


def _check(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ids_NM: Tensor | None,
    bias: Tensor | None,
    bend: Bend,
    chunk: int | None,
) -> None:
    if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        shapes = f"hidden {tuple(hidden_NH.shape)} and weight {tuple(weight_VH.shape)}"
        raise ValueError(f"{shapes} must be [N, H] and [V, H]")
    if ids_NM is not None and (ids_NM.ndim != 2 or len(ids_NM) != len(hidden_NH)):
        raise ValueError(f"ids {tuple(ids_NM.shape)} must be [N, M] with N = {len(hidden_NH)}")
    if bias is not None and bias.shape != weight_VH.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must be [V] with V = {len(weight_VH)}")
    for name, value in bend._asdict().items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk, the number of logits held at a time, must be at least 1, got {chunk}")
    # on a GPU this check would synchronise; torch's gather then reports an id out of range
    if ids_NM is not None and not ids_NM.is_cuda and ids_NM.numel() and int(ids_NM.max()) >= len(weight_VH):
        raise ValueError(f"id {int(ids_NM.max())} is outside the vocabulary of {len(weight_VH)}")


def _tiles(n: int, v: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns) of at most `chunk` logits. All columns of a block of rows follow each other."""
    for rows in slices(n, min(TILE_ROWS, chunk)):
        for columns in slices(v, max(1, chunk // (rows.stop - rows.start))):
            yield rows, columns


def backend(like: Tensor) -> ModuleType:
    """Return the module with `fold` and `to_gradient` for such tensors: Triton on CUDA if installed, else torch."""
    if like.is_cuda and like.dtype != torch.float64 and find_spec("triton") is not None:
        return import_module("slipstream.estimators.logprobs.tiles_triton")
    return tiles


class _Products:
    """Tiles of hidden · weightᵀ. All tiles use the same memory, because new memory causes page faults."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor) -> None:
        self.hidden, self.weight = hidden_NH, weight_VH
        self.memory = hidden_NH.new_empty(0)

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        if self.memory.numel() < shape[0] * shape[1]:
            self.memory = self.hidden.new_empty(shape[0] * shape[1])
        tile_CW = self.memory[: shape[0] * shape[1]].view(shape)
        multiply_into(tile_CW, self.hidden[rows], self.weight[columns])
        return tile_CW


def _local(ids_CM: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return the ids as columns of a tile, and a mask of the ids that are inside the tile."""
    inside_CM = (ids_CM >= columns.start) & (ids_CM < columns.stop)
    return (ids_CM - columns.start).clamp(0, columns.stop - columns.start - 1), inside_CM


def _at(tile_CW: Tensor, bias_W: Tensor | None, bend: Bend, local_CM: Tensor) -> Tensor:
    at_CM = tile_CW.gather(1, local_CM).to(wide(tile_CW))
    if bias_W is not None:
        at_CM = at_CM + bias_W[local_CM]
    return bend.logits(at_CM)


def _biased(tile_CW: Tensor, bias_W: Tensor | None) -> Tensor:
    """Return the logits of a tile before temperature, scale and cap, at least in float32."""
    wide_CW = tile_CW.to(wide(tile_CW))
    return wide_CW if bias_W is None else wide_CW + bias_W


class _Grads:
    """Gradients of the head's inputs, summed over tiles of the gradient with respect to the products."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> None:
        def zeros(like: Tensor) -> Tensor:
            return torch.zeros_like(like, dtype=wide(like))

        self.inputs = (hidden_NH, weight_VH, bias)
        narrow = hidden_NH.dtype
        if narrow == torch.float32 and hidden_NH.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            narrow = torch.get_autocast_dtype("cpu")  # products of gradients are rounded as those of the layers below
        self.factors = hidden_NH.to(narrow), weight_VH.to(narrow)
        self.hidden = zeros(hidden_NH) if needs[0] else None
        self.weight = zeros(weight_VH) if needs[1] else None
        self.bias = zeros(bias) if bias is not None and needs[2] else None

    def add(self, rows: slice, columns: slice, grad_CW: Tensor) -> None:
        if self.bias is not None:
            self.bias[columns] += grad_CW.sum(0, dtype=self.bias.dtype)
        hidden_NH, weight_VH = self.factors
        grad_CW = grad_CW.to(hidden_NH.dtype)
        if self.hidden is not None:
            add_product(self.hidden[rows], grad_CW, weight_VH[columns])
        if self.weight is not None:
            add_product(self.weight[columns], grad_CW.T, hidden_NH[rows])

    def done(self) -> tuple[Tensor | None, ...]:
        gradients = (self.hidden, self.weight, self.bias)
        return tuple(
            None if grad is None or like is None else grad.to(like.dtype)
            for grad, like in zip(gradients, self.inputs, strict=True)
        )


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias: Tensor | None,
        ids_NM: Tensor,
        bend: Bend,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype, n = wide(hidden_NH), len(hidden_NH)
        at_NM = hidden_NH.new_zeros(ids_NM.shape, dtype=dtype)
        lse_N = hidden_NH.new_full((n,), -torch.inf, dtype=dtype)
        mean_N = torch.zeros_like(lse_N)
        products, kernels = _Products(hidden_NH, weight_VH), backend(hidden_NH)
        for rows, columns in _tiles(n, len(weight_VH), chunk):
            tile_CW, bias_W = products(rows, columns), None if bias is None else bias[columns]
            local_CM, inside_CM = _local(ids_NM[rows], columns)
            at_NM[rows] = torch.where(inside_CM, _at(tile_CW, bias_W, bend, local_CM), at_NM[rows])
            parts = kernels.fold(tile_CW, bias_W, bend, entropy=entropy)
            lse_N[rows], mean_N[rows] = tiles.merge(lse_N[rows], mean_N[rows], *parts)
        entropy_N = lse_N - mean_N if entropy else mean_N
        ctx.save_for_backward(hidden_NH, weight_VH, bias, ids_NM, lse_N, entropy_N)
        ctx.bend, ctx.chunk, ctx.entropy = bend, chunk, entropy
        ctx.set_materialize_grads(False)  # an entropy without gradient then costs nothing
        return (at_NM - lse_N[:, None]).masked_fill_(ids_NM < 0, 0.0), entropy_N

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias, ids_NM, lse_N, entropy_N = ctx.saved_tensors
        grad_logp_NM, grad_entropy_N = outputs
        if grad_logp_NM is None:
            grad_logp_NM = torch.zeros_like(ids_NM, dtype=lse_N.dtype)
        spread = ctx.entropy and grad_entropy_N is not None
        grads = _Grads(hidden_NH, weight_VH, bias, ctx.needs_input_grad)
        grad_logp_NM = grad_logp_NM.masked_fill(ids_NM < 0, 0.0)
        total_N = grad_logp_NM.sum(1)
        products, kernels = _Products(hidden_NH, weight_VH), backend(hidden_NH)
        for rows, columns in _tiles(len(hidden_NH), len(weight_VH), ctx.chunk):
            tile_CW, bias_W = products(rows, columns), None if bias is None else bias[columns]
            local_CM, inside_CM = _local(ids_NM[rows], columns)
            slope_CM = ctx.bend.slope(_at(tile_CW, bias_W, ctx.bend, local_CM))  # before the tile is overwritten
            kernels.to_gradient(
                tile_CW,
                bias_W,
                ctx.bend,
                lse_C=lse_N[rows],
                total_C=total_N[rows],
                entropy_C=entropy_N[rows] if spread else None,
                grad_entropy_C=grad_entropy_N[rows] if spread else None,
            )
            chosen_CM = grad_logp_NM[rows] * inside_CM * slope_CM
            grads.add(rows, columns, tile_CW.scatter_add_(1, local_CM, chosen_CM.to(tile_CW.dtype)))
        return *grads.done(), None, None, None, None


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias: Tensor | None,
        ids_NM: Ids,
        loss_fn: ChunkLoss,
        bend: Bend,
        size: int,
        metrics: Metrics,
        best: int,
        entropy: bool,
    ) -> Tensor:
        loss = hidden_NH.new_zeros((), dtype=wide(hidden_NH))
        grads = _Grads(hidden_NH, weight_VH, bias, ctx.needs_input_grad)
        products, kernels, columns = _Products(hidden_NH, weight_VH), backend(hidden_NH), slice(0, len(weight_VH))
        for rows in slices(len(hidden_NH), size):
            tile_CV = products(rows, columns)
            lse_C, mean_C = kernels.fold(tile_CV, bias, bend, entropy=entropy)
            extras = {"entropy": lse_C - mean_C} if entropy else {}
            if best:  # the largest products are the largest logits
                extras["best_ids"] = (tile_CV if bias is None else _biased(tile_CV, bias)).topk(best, -1).indices
            if ids_NM is None:
                x_CM = bend.logits(_biased(tile_CV, bias))
                logp_CM = x_CM - lse_C[:, None]
            else:
                local_CM, inside_CM = _local(ids_NM[rows] if isinstance(ids_NM, Tensor) else ids_NM(rows), columns)
                x_CM = _at(tile_CV, bias, bend, local_CM)
                logp_CM = (x_CM - lse_C[:, None]).masked_fill_(~inside_CM, 0.0)
            with torch.enable_grad():
                part, chunk_metrics = loss_fn(logp_CM.requires_grad_(), rows, **extras)
            (grad_CM,) = torch.autograd.grad(part, logp_CM)
            if ids_NM is not None:
                grad_CM = grad_CM.masked_fill(~inside_CM, 0.0)
            loss += part.detach()
            merge_metrics(metrics, {name: value.detach() for name, value in chunk_metrics.items()})
            kernels.to_gradient(tile_CV, bias, bend, lse_C=lse_C, total_C=grad_CM.sum(1))
            chosen_CM = (grad_CM * bend.slope(x_CM)).to(tile_CV.dtype)
            grads.add(
                rows,
                columns,
                tile_CV.add_(chosen_CM) if ids_NM is None else tile_CV.scatter_add_(1, local_CM, chosen_CM),
            )
        ctx.save_for_backward(*grads.done())
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_loss,) = outputs
        if grad_loss == 1:  # backward starts at this loss: avoid a second copy of the weight's gradient
            return *ctx.saved_tensors, *[None] * 7
        scaled = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return *scaled, *[None] * 7
