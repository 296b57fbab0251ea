"""Estimate how much of a step's gradient is noise, from the contributions of its groups.

The estimate uses the gradient of a virtual bias added to every last hidden state: the sum over tokens of the loss
gradient with respect to these states. The backward pass of the head computes this gradient anyway. A group's
contribution therefore costs only a sum, for any loss, packing and number of ranks. Samples of one group are dependent,
so the sample size of the estimate is the number of groups.

Shapes: N trained tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engines.native.ranks import Ranks
from slipstream.estimators.drift import gradient_noise
from slipstream.protocols import Metrics
from slipstream.records import Scored

NAMES = {
    "gradient/signal": "proxy1_signal_strength",
    "gradient/power": "proxy2_total_power",
    "gradient/noise": "proxy3_pure_noise",
}


class Noise:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums: dict[int, Tensor] = {}
        """Sum [H] of the gradients of each group since the last step, by group number."""

    def watch(self, hidden_NH: Tensor, samples: Sequence[Scored]) -> None:
        """Register a hook that adds the gradients of these hidden states to `sums` during the backward pass."""
        counts = [sample.rollout.trained_tokens for sample in samples]
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)

        def add(gradient_NH: Tensor) -> None:
            for sample, part_NH in zip(samples, torch.split(gradient_NH.detach(), counts), strict=True):
                number, sum_H = sample.rollout.prompt.number, part_NH.sum(0, dtype=wide)
                self.sums[number] = self.sums[number] + sum_H if number in self.sums else sum_H

        hidden_NH.register_hook(add)  # type: ignore[no-untyped-call]

    def metrics(self, scale: float) -> Metrics:
        """Return a step's noise metrics over all ranks; gradients are multiplied by `scale`. Empty below two groups."""
        mine = [sum_H.double().cpu() * scale for sum_H in self.sums.values()]
        zero = torch.zeros((), dtype=torch.float64)
        everyone = self.ranks.gathered(([sum_H.square().sum() for sum_H in mine], sum(mine, start=zero)))
        squares = [square for of_rank, _ in everyone for square in of_rank]
        if (n := len(squares)) < 2:
            return {}
        whole = sum((sum_H for _, sum_H in everyone), start=zero)
        # n times a group's contribution estimates the whole gradient, and the mean of these estimates is the gradient
        found = gradient_noise(n**2 * torch.stack(squares), whole.square().sum())
        return {name: found[verls] for name, verls in NAMES.items()}
