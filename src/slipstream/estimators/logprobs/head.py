"""Head (output layer) of a language model: a linear layer, with the scale and the cap of some models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.estimators.logprobs.tiles import Bend, wide
from slipstream.estimators.products import linear


@dataclass(frozen=True)
class Head:
    """Head with logits = cap · tanh(scale · (hidden · weightᵀ + bias) / cap); without a cap only scaled."""

    linear: nn.Linear
    scale: float = 1.0
    cap: float | None = None

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    @property
    def bend(self) -> dict[str, Any]:
        return {"scale": self.scale, "cap": self.cap}

    def inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden state, weight and bias in the lower of the two precisions of hidden state and weight."""
        dtype = min(hidden.dtype, self.weight.dtype, key=lambda each: each.itemsize)
        return hidden.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return logits by the given or the head's own weights. Scaled or capped logits are in at least float32."""
        own = self.inputs(hidden)
        x = linear(*own) if weight is None else linear(own[0], weight, bias)
        if self.scale == 1.0 and self.cap is None:
            return x
        return Bend(1.0, self.scale, self.cap).logits(x.to(wide(x)))

    def to(self, device: torch.device) -> Head:
        return Head(self.linear.to(device), self.scale, self.cap)
