"""Attention code that sampler and learner share: soft caps, sinks, windows, chunks, and checks of inputs.

Shapes: N rows, Q queries, L keys, H heads, J key/value heads, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from slipstream.errors import ModelError

torch.backends.cuda.enable_cudnn_sdp(False)
"""CuDNN plans its attention anew for every shape, which took 80 ms at each token of an answer (H100)."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Limits on the keys that a query sees: the last `window` positions, or its own `chunk`; None: no limit."""

    window: int | None = None
    chunk: int | None = None

    def hides(self, query: Tensor, key: Tensor) -> Tensor:
        """Return a mask over pairs of positions: True if the query must not see the key."""
        hidden = key > query
        if self.window is not None:
            hidden = hidden | (key <= query - self.window)
        if self.chunk is not None:
            hidden = hidden | (key // self.chunk != query // self.chunk)
        return hidden


def reach_of(module: nn.Module, sliding_window: int | None) -> Reach:
    """Return a layer's reach; models pass only the window to the attention, so the chunk size comes from the config."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds and index is not None and index < len(kinds) else None
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None  # type: ignore[union-attr]
    return Reach(sliding_window, chunk)


KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position"}
"""Tensor arguments that are accepted: attention sinks, and positions, which are ignored because they are known."""


def check_arguments(module: nn.Module, mask: Tensor | None, extra: Mapping[str, Any]) -> None:
    kind = type(module).__name__
    if mask is not None:
        raise ModelError(f"{kind} passes its own mask, which is not supported")
    if unknown := [name for name, value in extra.items() if isinstance(value, Tensor) and name not in KNOWN_TENSORS]:
        raise ModelError(f"{kind} passes {unknown[0]} to its attention, which is not supported")


def attend(
    query_NHQD: Tensor,
    key_NJLD: Tensor,
    value_NJLD: Tensor,
    mask_N1QL: Tensor,
    *,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the attention output [N, H, Q, D]; the mask is added to the scores; sinks are logits [1, H, 1 or Q, 1]."""
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query_NHQD, key_NJLD, value_NJLD, attn_mask=mask_N1QL, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
    n, h, q, d = query_NHQD.shape
    j = key_NJLD.shape[1]
    scores = query_NHQD.reshape(n, j, h // j * q, d) @ key_NJLD.transpose(2, 3)
    scores = scores.view(n, h, q, -1).to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores * (d**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores + mask_N1QL
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(n, h, q, 1)], -1)
    weights = scores.softmax(-1)[..., : key_NJLD.shape[2]].to(value_NJLD.dtype)
    weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
    return (weights.view(n, j, h // j * q, -1) @ value_NJLD).view(n, h, q, -1)


# --- differences between two computations of the same hidden states ---------------------------------------------------


def errors(found_NH: Tensor, expected_NH: Tensor) -> list[float]:
    """Return the relative error of each hidden state (each row of `found`)."""
    found, expected = found_NH.double(), expected_NH.double()
    return [float(error) for error in (found - expected).norm(dim=-1) / expected.norm(dim=-1)]


def limit(dtype: torch.dtype, usual: Sequence[float]) -> float:
    """Return the largest relative error that rounding can cause, given errors that are `usual` for this model."""
    few = 8 * median(usual)
    return min(1e-3, 1e-4 + few) if dtype.itemsize >= 4 else min(0.5, 0.02 + few)
