"""Log-probs on the support of truncated sampling, and with all end tokens read as one.

Log-probs on a support are conditioned on the ids that could be drawn. Two policies on one support have the same
possible tokens, and their ratio is 1 at tokens where both agree. The mean ratio over draws of one policy is 1 for any
other policy. (Keep Sampling Mask: DeepSeek-V3.2, 2512.02556.)

Shapes: N rows, C rows of a chunk, M ids per row, S ids of all supports, H hidden, V vocabulary, E end tokens, X = M +
E. K is the number of ids in the largest support of a chunk (−1 pads smaller ones).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.estimators.logprobs import held, logprobs_and_entropy_at, logprobs_at


class Support:
    """Sampling supports of N rows: the ids that could have been drawn. Tables are built for a few rows at a time.

    A single table of all rows could be as large as the logits, if one support has thousands of ids.
    """

    def __init__(self, ids_S: np.ndarray[Any, Any], sizes_N: np.ndarray[Any, Any], device: torch.device) -> None:
        self.ids_S, self.sizes_N = torch.from_numpy(ids_S).to(device, torch.int64), sizes_N
        self.ends = np.concatenate([[0], np.cumsum(sizes_N, dtype=np.int64)])

    def __getitem__(self, rows: slice) -> Tensor:
        """Return the table [C, K] of these rows, padded with −1."""
        sizes_C, device = self.sizes_N[rows], self.ids_S.device
        place_K = torch.arange(int(sizes_C.max(initial=1)), device=device)
        inside_CK = place_K < torch.from_numpy(sizes_C).to(device)[:, None]
        table_CK = torch.full(inside_CK.shape, -1, device=device)
        return table_CK.masked_scatter_(inside_CK, self.ids_S[self.ends[rows.start] : self.ends[rows.stop]])

    def tables(self, columns: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, table) in chunks of at most `held` numbers, with `columns` more per row, or of a single row."""
        cuts, widest = [0], 0
        for row, size in enumerate(self.sizes_N.tolist()):
            widest = max(widest, size)
            if row > cuts[-1] and (row + 1 - cuts[-1]) * (widest + columns) > held(self.ids_S):
                cuts.append(row)
                widest = size
        for start, stop in zip(cuts, [*cuts[1:], len(self.sizes_N)], strict=True):
            yield slice(start, stop), self[start:stop]


def conditioned(logp_CM: Tensor, support_logp_CK: Tensor, support_CK: Tensor) -> Tensor:
    """Return log p(a | a ∈ S), differentiable in both inputs. No support may be empty."""
    return logp_CM - support_logp_CK.masked_fill(support_CK < 0, -torch.inf).logsumexp(-1, keepdim=True)


def only(logits_CV: Tensor, support_CK: Tensor) -> Tensor:
    """Return the logits with −inf at ids outside the support."""
    # padding is written to an extra column, which is removed afterwards
    out_CV = torch.ones(len(logits_CV), logits_CV.shape[1] + 1, dtype=torch.bool, device=logits_CV.device)
    out_CV.scatter_(1, support_CK.where(support_CK >= 0, logits_CV.shape[1]), False)
    return logits_CV.masked_fill(out_CV[:, :-1], -torch.inf)


def kept_logprobs_at(
    hidden_NH: Tensor, weight_VH: Tensor, ids_NM: Tensor, support: Support | None, **options: Any
) -> Tensor:
    """Return `logprobs_at`, conditioned on the support. If `support` is None, log-probs are over the vocabulary."""
    if support is None:
        return logprobs_at(hidden_NH, weight_VH, ids_NM, **options)
    m, parts = ids_NM.shape[1], []
    for rows, support_CK in support.tables(m):
        logp = logprobs_at(hidden_NH[rows], weight_VH, torch.cat([ids_NM[rows], support_CK], 1), **options)
        parts.append(conditioned(logp[:, :m], logp[:, m:], support_CK))
    return torch.cat(parts)


def kept_logprobs_and_entropy_at(
    hidden_NH: Tensor, weight_VH: Tensor, ids_NM: Tensor, support: Support | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the result of `kept_logprobs_at`, and the entropy of the distribution over the whole vocabulary."""
    if support is None:
        return logprobs_and_entropy_at(hidden_NH, weight_VH, ids_NM, **options)
    m, found = ids_NM.shape[1], []
    for rows, support_CK in support.tables(m):
        columns = torch.cat([ids_NM[rows], support_CK], 1)
        logp, entropy_C = logprobs_and_entropy_at(hidden_NH[rows], weight_VH, columns, **options)
        found.append((conditioned(logp[:, :m], logp[:, m:], support_CK), entropy_C))
    logp_NM, entropy_N = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logp_NM, entropy_N


# --- end tokens -------------------------------------------------------------------------------------------------------
#
# A teacher's distribution q is read for a student that ends with another token. The distribution that is read is
# q′(token) = Σ_ends q, q′(other ends) = e^NO_MASS, and q′ = q at all other tokens. It is normalised if q is. `ends`
# holds the end tokens of student and teacher, `token` included.


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
