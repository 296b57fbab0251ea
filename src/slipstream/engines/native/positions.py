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

KINDS = ("longrope", "dynamic")


def by_length(kind: Any) -> bool:
    """Whether this rope type, or one of those of several kinds of layers, chooses by length."""
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(each in str(one) for one in kinds for each in KINDS)


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


def said(config: Any, longest: int) -> str | None:
    """What a person should know of it; nothing for a model whose positions mean the same whatever the length."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    each = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    chosen = [part for part in each if by_length(part.get("rope_type"))]
    if not chosen:
        return None
    kind = chosen[0]["rope_type"]
    original = chosen[0].get("original_max_position_embeddings") or text.max_position_embeddings
    side = "long" if longest > original else "short"
    return (
        f"{kind} positions: one set of factors, that of {longest} tokens ({side}: the original context is {original})"
    )
