"""Rotary positions that do not depend on what else is in a pass.

Two kinds of them choose their factors by the longest position of the whole pass: longrope (Phi-3, Phi-3.5, Phi-4-mini)
between two sets, dynamic NTK among as many as there are lengths. So a short sequence would change with its neighbours,
and a cached key would not fit the next query. Here the longest sequence of the run chooses once and for all: every pass
is shown that position too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.engines.native.config import by_length


def pin(model: nn.Module, longest: int) -> None:
    """From now on, factors are those of sequences of `longest` tokens."""
    for module in model.modules():
        if by_length(getattr(module, "rope_type", None)):
            module.forward = _shown(type(module).forward.__get__(module), longest - 1)


def _shown(forward: Callable[..., Any], furthest: int) -> Callable[..., Any]:
    def pinned(x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        most = position_ids.new_full((*position_ids.shape[:-1], 1), furthest)
        found = forward(x, torch.cat([position_ids, most], -1), *args, **options)
        return tuple(part[..., :-1, :] for part in found) if isinstance(found, tuple) else found[..., :-1, :]

    return pinned
