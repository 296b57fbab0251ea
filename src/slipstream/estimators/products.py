"""Matrix products by oneDNN on CPUs: float32 where MKL leaves much of the machine unused, and packed weights.

MKL uses AVX-512 on Intel's processors only, and packs both matrices for every product. oneDNN uses AVX-512 on all
processors. So it multiplies large matrices about twice as fast on other processors. The choice depends on the processor
and the size of the weight, and not on a measured time: a repeated run must round alike.

A product with few rows takes most of its time to bring the weight into oneDNN's layout. A sampler, which multiplies by
the same weights many times, keeps them in this layout.

Shapes: I input features, O output features; `x` is […, I].
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MIN_WEIGHT_SIZE = 100_000
"""Minimum number of elements of a weight; for smaller ones both libraries are equally fast."""
PRIVATE = "_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported"
"""Functions of oneDNN that are private in torch, so that another version may lack them."""
CPU_INFO = Path("/proc/cpuinfo")
PRODUCT_COLUMNS = 8192
"""Number of columns of a large product that are computed at a time: memory for more would be new pages every time."""
PACKED_ROWS = 8
"""Number of rows for which oneDNN chooses the layout of packed weights; it serves products of any number of rows."""


@cache
def uses_avx512() -> bool:
    """Return True if oneDNN is part of this torch and uses AVX-512 on this processor."""
    if not torch._C._has_mkldnn or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return all(hasattr(torch.ops.mkldnn, name) for name in PRIVATE)


@cache
def prefers_onednn() -> bool:
    """Return True if this processor has AVX-512 and is not Intel's."""
    return uses_avx512() and CPU_INFO.exists() and "GenuineIntel" not in CPU_INFO.read_text()


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Return True if oneDNN computes this product, in the precision of its operands, faster than `torch.mm` does."""
    return x.dtype == torch.float32 and is_large(x, weight) and prefers_onednn()


def is_large(x: Tensor, weight: Tensor) -> bool:
    """Return True for a product on a CPU of operands in one precision, with a large weight."""
    return x.dtype == weight.dtype and weight.numel() >= MIN_WEIGHT_SIZE and bool(x.numel()) and x.device.type == "cpu"


def by_onednn(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias; both operands may be transposed views."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return out


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias, differentiable in all three, by the faster library."""
    if torch.is_autocast_enabled("cpu") or not is_faster(x, weight_OI):
        return nn.functional.linear(x, weight_OI, bias_O)
    out: Tensor = _Linear.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return by_onednn(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_NO = outputs[0].reshape(-1, len(weight_OI))
        return (
            by_onednn(grad_NO, weight_OI.T).view_as(x) if needs_x else None,
            by_onednn(grad_NO.T, x.reshape(-1, x.shape[-1]).T) if needs_weight else None,
            grad_NO.sum(0) if needs_bias else None,
        )


class FastLinear(nn.Linear):
    """A linear layer that computes by the faster library."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def use_fast_layers(model: nn.Module) -> None:
    """Let the linear layers of a model compute by the faster library; names and weights stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


class PackedLinear(FastLinear):
    """A linear layer that keeps a copy of its weight in oneDNN's layout, for passes without gradient."""

    packed: tuple[Tensor, tuple[int, int]] | None = None
    """The copy, made by the first pass after a change, and which weight it is of: its address and its version."""

    def forward(self, x: Tensor) -> Tensor:
        computes_as_given = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
        if not (computes_as_given and is_large(x, self.weight) and packs(x.dtype)):
            return linear(x, self.weight, self.bias)
        current = self.weight.data_ptr(), self.weight._version
        if self.packed is None or self.packed[1] != current:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACKED_ROWS), current
        return by_onednn(x, self.packed[0], self.bias)


def packs(dtype: torch.dtype) -> bool:
    """Return True if packed weights of this dtype save time on this processor."""
    if dtype == torch.bfloat16:
        return uses_avx512() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and prefers_onednn()


PLAIN = (nn.Linear, FastLinear, PackedLinear)
"""Types of layers that compute x · weightᵀ + bias."""


def pack_layers(model: nn.Module) -> None:
    """Let the linear layers of a model keep packed weights."""
    for module in model.modules():
        if type(module) in (nn.Linear, FastLinear):
            module.__class__ = PackedLinear


def forget_packed(model: nn.Module) -> None:
    """Drop packed weights, after the weights were written by another library or before they move."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.packed = None


def multiply_into(out_CW: Tensor, left_CI: Tensor, right_WI: Tensor) -> None:
    """Write left · rightᵀ to `out`."""
    if not is_faster(left_CI, right_WI):
        torch.mm(left_CI, right_WI.T, out=out_CW)
        return
    for out_CP, right_PI in zip(
        torch.split(out_CW, PRODUCT_COLUMNS, 1), torch.split(right_WI, PRODUCT_COLUMNS), strict=True
    ):
        out_CP.copy_(by_onednn(left_CI, right_PI))


def add_product(into_CW: Tensor, left_CI: Tensor, right_IW: Tensor) -> None:
    """Add left · right to `into`, in at least float32: a sum of many products in low precision would lose small parts.

    On CPUs each single product is rounded to bfloat16, in which they multiply several times as fast.
    """
    faster = is_faster(left_CI, right_IW)
    if faster or (left_CI.dtype == torch.bfloat16 and left_CI.device.type == "cpu"):
        multiply = by_onednn if faster else nn.functional.linear
        for into_PW, left_PI in zip(
            torch.split(into_CW, PRODUCT_COLUMNS), torch.split(left_CI, PRODUCT_COLUMNS), strict=True
        ):
            into_PW.add_(multiply(left_PI, right_IW.T))
    elif into_CW.dtype == left_CI.dtype:
        into_CW.addmm_(left_CI, right_IW)
    elif into_CW.is_cuda:
        into_CW += torch.mm(left_CI, right_IW, out_dtype=into_CW.dtype)
    else:
        into_CW.addmm_(left_CI.to(into_CW.dtype), right_IW.to(into_CW.dtype))
