"""Linear layers whose weights have eight bits: a code for each weight, and a scale for each output.

A layer stores codes and scales only. Each pass computes one layer's weight at a time from them, in the dtype of its
input. The log-probs are therefore exactly those of the quantised model; no kernel computes in eight bits.

Codes and scales are computed on the CPU in float32, from published weights. Every process computes the same bits, so
the learner can check what a sampler runs. int8: code = round(w / scale), scale = max|w| / 127 over the inputs of an
output. fp8: the nearest float8 (e4m3) to w / scale, scale = max|w| / 448.

Shapes: O outputs, I inputs.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.estimators.products import FastLinear, linear

CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Dtype of the codes, and the largest code."""


def quantised(weight_OI: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return codes [O, I] and scales [O, 1] of a weight on the CPU. An output whose weights are all 0 has scale 1."""
    dtype, most = CODES[kind]
    wide_OI = weight_OI.float()
    scale_O1 = wide_OI.abs().amax(-1, keepdim=True) / most
    scale_O1 = scale_O1.where(scale_O1 > 0, 1.0)
    wide_OI = wide_OI.div(scale_O1).clamp_(-most, most)
    return (wide_OI if dtype.is_floating_point else wide_OI.round_()).to(dtype), scale_O1


class QuantisedLinear(nn.Module):
    """A linear layer with a quantised weight. `weight` holds the codes, so that names and shapes stay the same."""

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind, self.bias = kind, layer.bias
        codes_OI, scale_O1 = quantised(layer.weight.detach().cpu(), kind)
        self.weight = nn.Parameter(codes_OI.to(layer.weight.device), requires_grad=False)
        self.scale: Tensor
        self.register_buffer("scale", scale_O1.to(layer.weight.device))  # no parameter: it is not published

    def load(self, weight_OI: Tensor) -> None:
        """Quantise a weight on the CPU and copy its codes and scales into this layer."""
        codes_OI, scale_O1 = quantised(weight_OI, self.kind)
        self.weight.copy_(codes_OI)
        self.scale.copy_(scale_O1)

    def forward(self, x: Tensor) -> Tensor:
        weight_OI = (self.weight.float() * self.scale).to(x.dtype)
        return linear(x, weight_OI, self.bias)


class Rounded(torch.autograd.Function):
    """Codes times scales of a weight; the gradient passes to the weight as if nothing was rounded."""

    @staticmethod
    def forward(ctx: Any, weight_OI: Tensor, kind: str, exported: torch.dtype) -> Tensor:
        codes_OI, scale_O1 = quantised(weight_OI.to(exported), kind)
        return (codes_OI.float() * scale_O1).to(weight_OI.dtype)

    @staticmethod
    def backward(ctx: Any, grad_OI: Tensor) -> tuple[Tensor, None, None]:
        return grad_OI, None, None


class RoundedLinear(nn.Linear):
    """A linear layer that is trained in full precision and computes with its weight as samplers quantise it."""

    kind: str
    exported: torch.dtype
    """Dtype in which weights are published."""

    def forward(self, x: Tensor) -> Tensor:
        weight_OI: Tensor = Rounded.apply(self.weight, self.kind, self.exported)  # type: ignore[no-untyped-call]
        return linear(x, weight_OI, self.bias)


def compute_rounded(model: nn.Module, layers: Collection[str], kind: str, exported: str) -> None:
    """Let these linear layers of a learner compute what the quantised layers of samplers compute."""
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.__class__ = RoundedLinear
        layer.kind, layer.exported = kind, getattr(torch, exported)


@contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """Let all layers of a learner compute with their weights as they are within this context."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, RoundedLinear)]
    for layer in layers:
        layer.__class__ = FastLinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = RoundedLinear


def quantise(model: nn.Module, layers: Collection[str], kind: str) -> None:
    """Replace these linear layers of a model by quantised ones."""
    for name in layers:
        model.set_submodule(name, QuantisedLinear(model.get_submodule(name), kind))  # type: ignore[arg-type]


def quantised_weights(model: nn.Module) -> dict[str, QuantisedLinear]:
    """Return the quantised layers of a model, by the names of their weights."""
    return {f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, QuantisedLinear)}
