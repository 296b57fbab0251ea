"""Triton kernels for `fold` and `to_gradient` of `tiles`, which process a tile in its own dtype.

Shapes: C rows, W columns of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.estimators.logprobs.tiles import Bend

TRITON_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _tanh(x: tl.tensor) -> tl.tensor:
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    tile,
    bias,
    lse,
    mean,
    stride,
    width,
    inner,
    outer,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    TRITON_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, width, TRITON_BLOCK):
        at = start + tl.arange(0, TRITON_BLOCK)
        inside = at < width
        x = tl.load(tile + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            x = tl.maximum(x + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32), -1e30)
        x = x * inner
        if CAP:
            x = _tanh(x)
        x = tl.where(inside, x * outer, -float("inf"))
        top = tl.maximum(largest, tl.max(x, 0))
        e = tl.exp(x - top)
        shrink = tl.exp(largest - top)
        total = total * shrink + tl.sum(e, 0)
        if ENTROPY:
            weighted = weighted * shrink + tl.sum(e * tl.where(inside, x, 0.0), 0)
        largest = top
    tl.store(lse + row, largest + tl.log(total))
    if ENTROPY:
        tl.store(mean + row, weighted / total)


@triton.jit  # type: ignore[untyped-decorator]
def _to_gradient(  # type: ignore[no-untyped-def]
    tile,
    bias,
    lse,
    total,
    entropy,
    grad_entropy,
    stride,
    width,
    inner,
    outer,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    TRITON_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TRITON_BLOCK + tl.arange(0, TRITON_BLOCK)
    inside = at < width
    x = tl.load(tile + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x = tl.maximum(x + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32), -1e30)
    x = x * inner
    slope = inner * outer
    if CAP:
        x = _tanh(x)
        slope = (1 - x * x) * slope
    logp = x * outer - tl.load(lse + row)
    factor = -tl.load(total + row)
    if ENTROPY:
        factor = factor - (logp + tl.load(entropy + row)) * tl.load(grad_entropy + row)
    tl.store(tile + row * stride + at, (tl.exp(logp) * factor * slope).to(tile.dtype.element_ty), mask=inside)


def _factors(bend: Bend) -> tuple[float, float]:
    """Return two factors: one multiplies a product before tanh, the other after tanh."""
    cap = bend.cap or 1.0
    return bend.scale / cap, cap / bend.temperature


def fold(tile_CW: Tensor, bias_W: Tensor | None, bend: Bend, *, entropy: bool) -> tuple[Tensor, Tensor]:
    lse_C = torch.empty(len(tile_CW), dtype=torch.float32, device=tile_CW.device)
    mean_C = torch.zeros_like(lse_C)
    rows, width = tile_CW.shape
    with torch.cuda.device_of(tile_CW):  # type: ignore[no-untyped-call]  # Triton starts on the current device
        _fold[(rows,)](
            tile_CW,
            tile_CW if bias_W is None else bias_W,
            lse_C,
            mean_C,
            tile_CW.stride(0),
            width,
            *_factors(bend),
            BIAS=bias_W is not None,
            CAP=bend.cap is not None,
            ENTROPY=entropy,
            TRITON_BLOCK=TRITON_BLOCK,
        )
    return lse_C, mean_C


def to_gradient(
    tile_CW: Tensor,
    bias_W: Tensor | None,
    bend: Bend,
    *,
    lse_C: Tensor,
    total_C: Tensor,
    entropy_C: Tensor | None = None,
    grad_entropy_C: Tensor | None = None,
) -> None:
    rows, width = tile_CW.shape
    with_entropy = entropy_C is not None and grad_entropy_C is not None
    with torch.cuda.device_of(tile_CW):  # type: ignore[no-untyped-call]  # Triton starts on the current device
        _to_gradient[(rows, triton.cdiv(width, TRITON_BLOCK))](
            tile_CW,
            tile_CW if bias_W is None else bias_W,
            lse_C,
            total_C,
            entropy_C if with_entropy else lse_C,
            grad_entropy_C if with_entropy else lse_C,
            tile_CW.stride(0),
            width,
            *_factors(bend),
            BIAS=bias_W is not None,
            CAP=bend.cap is not None,
            ENTROPY=with_entropy,
            TRITON_BLOCK=TRITON_BLOCK,
        )
