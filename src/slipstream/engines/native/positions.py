"""Make rotary embeddings of a sequence independent of the other sequences in a pass.

Two rope types select their factors by the largest position of the whole pass: longrope (Phi-3, Phi-3.5, Phi-4-mini) and
dynamic NTK. Results of a short sequence would depend on its neighbours, and cached keys would not match later queries.
Here every pass uses the factors for the longest sequence of the run: its last position is appended to the positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.engines.native.config import depends_on_length


def pin(model: nn.Module, longest: int) -> None:
    """Make the model always use the rope factors for sequences of `longest` tokens."""
    for module in model.modules():
        if depends_on_length(getattr(module, "rope_type", None)):
            module.forward = Pinned(module, longest - 1)


class Pinned:
    """Forward pass of a rotary embedding with the position `furthest` in every pass."""

    def __init__(self, module: nn.Module, furthest: int) -> None:
        self.module, self.furthest = module, furthest

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        most = position_ids.new_full((*position_ids.shape[:-1], 1), self.furthest)
        found = type(self.module).forward(self.module, x, torch.cat([position_ids, most], -1), *args, **options)
        return tuple(part[..., :-1, :] for part in found) if isinstance(found, tuple) else found[..., :-1, :]
