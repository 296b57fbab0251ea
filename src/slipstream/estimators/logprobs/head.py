"""The head of a language model: a linear layer, and what some models do to its products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from slipstream.estimators.logprobs.tiles import Bend, wide


@dataclass(frozen=True)
class Head:
    """logits = cap · tanh(scale · (hidden · weightᵀ + bias) / cap), without a cap only scaled."""

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
        """What the estimators of log-probs take beside weight and bias."""
        return {"scale": self.scale, "cap": self.cap}

    def inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden state, weight and bias in the lower of their precisions: the first one's under autocast."""
        dtype = min(hidden.dtype, self.weight.dtype, key=lambda each: each.itemsize)
        return hidden.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def __call__(self, hidden: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Logits, by these weights or others in their place; bent ones in float32 at least."""
        own = self.inputs(hidden)
        x = linear(*own) if weight is None else linear(own[0], weight, bias)
        if self.scale == 1.0 and self.cap is None:
            return x
        return Bend(1.0, self.scale, self.cap).logits(x.to(wide(x)))

    def to(self, device: torch.device) -> Head:
        return Head(self.linear.to(device), self.scale, self.cap)
