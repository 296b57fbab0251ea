"""How much of a step's gradient is noise, told by the groups that it is made of.

What would a vector that is added to every last hidden state have as its gradient? The sum over tokens of the gradient
of the loss in those states; where a model ends in a layer norm with a bias, that is the bias's own. It passes through
the head's backward pass anyway, token by token, so what each group contributes costs a sum, whatever the loss, the
packing and the ranks are. Groups are drawn independently and their samples are not: N is the groups of a step.

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
        """Of each group by its number, since the last step: what is added up of it, [H]."""

    def watch(self, hidden_NH: Tensor, samples: Sequence[Scored]) -> None:
        """Adds up the gradient of these hidden states, of the trained tokens of these samples, once it is known."""
        counts = [sample.rollout.trained_tokens for sample in samples]
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)

        def add(gradient_NH: Tensor) -> None:
            for sample, part_NH in zip(samples, torch.split(gradient_NH.detach(), counts), strict=True):
                number, sum_H = sample.rollout.prompt.number, part_NH.sum(0, dtype=wide)
                self.sums[number] = self.sums[number] + sum_H if number in self.sums else sum_H

        hidden_NH.register_hook(add)  # type: ignore[no-untyped-call]

    def metrics(self, scale: float) -> Metrics:
        """Of the groups of a step on all ranks, whose gradient is divided as the loss is; none of one group alone."""
        mine = [sum_H.double().cpu() * scale for sum_H in self.sums.values()]
        zero = torch.zeros((), dtype=torch.float64)
        everyone = self.ranks.gathered(([sum_H.square().sum() for sum_H in mine], sum(mine, start=zero)))
        squares, whole = (
            [each for of_rank, _ in everyone for each in of_rank],
            sum((x for _, x in everyone), start=zero),
        )
        if (n := len(squares)) < 2:
            return {}
        # a group would make n times its part of the gradient, if all were like it: the mean of these is the whole
        found = gradient_noise(n**2 * torch.stack(squares), whole.square().sum())
        return {name: found[verls] for name, verls in NAMES.items()}
