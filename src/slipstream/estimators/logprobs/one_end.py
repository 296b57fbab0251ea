"""Read a teacher's distribution q with all end tokens as one token, for a student that ends with another token.

The distribution that is read is q′(token) = Σ_ends q, q′(other ends) = e^NO_MASS, and q′ = q at all other tokens. It is
normalised if q is. `ends` holds the end tokens of student and teacher, `token` included.

Shapes: N positions, M ids per position, E end tokens, X = M + E, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NO_MASS = -20.0
"""Log-prob of the other end tokens. Its probability of 2e-9 is below the rounding of float32, so the sum stays 1. A
lower number, such as the −100 of records, would let one such token dominate the gradient of a batch."""


def with_ends(ids_NM: Tensor, *, ends: Sequence[int]) -> Tensor:
    """Return the ids followed by all end tokens: `read_as_one` needs the log-probs at both."""
    return torch.cat([ids_NM, ids_NM.new_tensor(ends).expand(len(ids_NM), -1)], 1)


def read_as_one(logp_NX: Tensor, ids_NM: Tensor, *, token: int, ends: Sequence[int]) -> Tensor:
    """Return log q′ at the ids, from log q at `with_ends(ids)`."""
    logp_NM, ends_NE = logp_NX[:, : -len(ends)], logp_NX[:, -len(ends) :]
    total_N1 = ends_NE.logsumexp(1, keepdim=True).clamp(max=0.0)
    logp_NM = logp_NM.masked_fill(torch.isin(ids_NM, ids_NM.new_tensor(ends)), NO_MASS)
    return torch.where(ids_NM == token, total_N1, logp_NM)


def all_read_as_one(logp_NV: Tensor, *, token: int, ends: Sequence[int]) -> Tensor:
    """Return log q′ over the whole vocabulary, from log q."""
    ids_1V = torch.arange(logp_NV.shape[1], device=logp_NV.device)[None]
    return read_as_one(torch.cat([logp_NV, logp_NV[:, list(ends)]], 1), ids_1V, token=token, ends=ends)
