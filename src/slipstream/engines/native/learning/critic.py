"""Value head of a critic: a linear function of the student's last hidden state, with an optimizer of its own.

The head is no part of the student: it is never published, and every rank has the whole of it.

Shapes: N trained tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config.objective import CriticConfig
from slipstream.engines.native.learning.storage import not_saved
from slipstream.engines.native.ranks import Ranks
from slipstream.estimators.numerics import joined
from slipstream.estimators.values import value_loss
from slipstream.objective.constants import UpdateConstants
from slipstream.records import Counts, Scored, one_turn

CLIP_NORM = 1.0
"""Largest norm of the head's gradient."""
CUT = ("length", "turns", "time")
"""Reasons for an end that a limit has caused."""


class ValueHead:
    def __init__(self, config: CriticConfig, width: int, like: Tensor, ranks: Ranks) -> None:
        """Begin with the value 0 for every state, on the device of `like` and in at least float32."""
        self.config, self.ranks = config, ranks
        wide = torch.promote_types(like.dtype, torch.float32)
        self.weight = torch.nn.Parameter(torch.zeros(width + 1, dtype=wide, device=like.device))
        """Weights [H] and bias."""
        self.optimizer = torch.optim.AdamW([self.weight], lr=config.lr, weight_decay=0.0)

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        """Return the value [N] of each state, in at least float32 under every autocast."""
        wide_NH = hidden_NH.to(torch.promote_types(hidden_NH.dtype, torch.float32))
        weight = self.weight.to(wide_NH.dtype)
        return (wide_NH * weight[:-1]).sum(-1) + weight[-1]

    def is_warming(self, update: int) -> bool:
        """Return whether this update, counted from the first with rewards, trains the head alone."""
        return update <= self.config.warmup

    def added_to(
        self,
        found: tuple[Tensor, dict[str, Tensor]],
        hidden_NH: Tensor,
        samples: Sequence[Scored],
        constants: Sequence[UpdateConstants],
        counts: Counts,
        *,
        update: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the value loss to the loss of a micro-batch; while the critic warms up, it is the only one."""
        (loss, metrics), alone = found, self.is_warming(update)
        part, measured = self.loss(hidden_NH, samples, constants, counts, alone=alone)
        return (0.0 if alone else 1.0) * loss + part, metrics | measured

    def loss(
        self,
        hidden_NH: Tensor,
        samples: Sequence[Scored],
        constants: Sequence[UpdateConstants],
        counts: Counts,
        *,
        alone: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted value loss of a micro-batch, and metrics; `alone`: hidden states get no gradient."""
        alone = alone or not self.config.weight
        values_N = self(hidden_NH.detach() if alone else hidden_NH)
        drawn = [
            each.mask_T & (not sample.rollout.prompt.source) for each, sample in zip(constants, samples, strict=True)
        ]
        masks = [sample.rollout.loss_mask for sample in samples]

        def of(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
            arrays = [each.cpu().numpy()[mask_T] for each, mask_T in zip(tensors, masks, strict=True)]
            return joined(arrays, values_N.device, dtype)

        old_N, returns_N = (
            of([each.columns[name] for each in constants], values_N.dtype) for name in ("values", "returns")
        )
        weights = [
            torch.full(each.mask_T.shape, sample.weight) for each, sample in zip(constants, samples, strict=True)
        ]
        loss, metrics = value_loss(
            values_N,
            old_N,
            returns_N,
            of(drawn, torch.bool),
            clip=self.config.clip,
            n_tokens=counts.n_tokens,
            weight_N=of(weights, values_N.dtype),
        )
        return (1.0 if alone else self.config.weight) * loss, {f"critic/{name}": x for name, x in metrics.items()}

    def step(self, factor: float) -> None:
        """Multiply the sum of all ranks' gradients by a factor, clip it, and make a step."""
        own = torch.zeros_like(self.weight) if self.weight.grad is None else self.weight.grad
        total = sum((each.to(own) for each in self.ranks.gathered(own)), torch.zeros_like(own)) * factor
        self.weight.grad = total * min(1.0, CLIP_NORM / (float(total.norm()) + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight.detach(), **self.optimizer.state.get(self.weight, {})}

    def load(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Continue with the state of the checkpoint at `path`, which is empty if its run had no critic."""
        if not state:
            raise not_saved(path, "the values of a critic", "[critic]")
        with torch.no_grad():
            self.weight.copy_(state["weight"])
        moments: dict[str, Any] = {name: value for name, value in state.items() if name != "weight"}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": {0: moments} if moments else {}})


def is_cut(sample: Scored) -> bool:
    """Return whether a limit has cut an episode, so that rewards might have come later."""
    return sample.rollout.finish in CUT


def with_end(sample: Scored) -> Scored:
    """Return a sample whose last trained token follows the whole response: its state is the end of the response.

    No sample of the update has its index.
    """
    rollout = sample.rollout
    tokens = np.append(rollout.tokens, rollout.tokens[-1:])
    drawn: dict[str, Any] = {"actions": tokens[:, None], "action_logp": np.zeros((len(tokens), 1))}
    drawn["versions"] = np.zeros(len(tokens), np.int32)
    return Scored(rollout=one_turn(rollout.prompt, -1 - rollout.index, finish=rollout.finish, **drawn))
