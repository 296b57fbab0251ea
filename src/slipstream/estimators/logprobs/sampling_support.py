"""A policy on what truncated sampling left: log-probs conditioned on the ids that could have been drawn.

Two policies that are conditioned on one support share their actions: the ratio between them is 1 where they agree, and
its mean over draws of the one is 1 whatever the other has learned.  (Keep Sampling Mask: DeepSeek-V3.2, 2512.02556.)

Shapes: N rows, C rows of a chunk, M ids per row, K ids of the largest support of a chunk (−1 where a row has fewer),
S ids of all supports, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.estimators.logprobs import HELD, logprobs_and_entropy_at, logprobs_at


class Support:
    """What could have been drawn at each of N rows: a table of any few of them, and never of all.

    A support of thousands of ids among many of ten would make a table of all rows as large as the logits.
    """

    def __init__(self, ids_S: np.ndarray[Any, Any], sizes_N: np.ndarray[Any, Any], device: torch.device) -> None:
        self.ids_S, self.sizes_N = torch.from_numpy(ids_S).to(device, torch.int64), sizes_N
        self.ends = np.concatenate([[0], np.cumsum(sizes_N, dtype=np.int64)])

    def __getitem__(self, rows: slice) -> Tensor:
        """[C, K]"""
        sizes_C, device = self.sizes_N[rows], self.ids_S.device
        place_K = torch.arange(int(sizes_C.max(initial=1)), device=device)
        inside_CK = place_K < torch.from_numpy(sizes_C).to(device)[:, None]
        table_CK = torch.full(inside_CK.shape, -1, device=device)
        return table_CK.masked_scatter_(inside_CK, self.ids_S[self.ends[rows.start] : self.ends[rows.stop]])

    def tables(self, columns: int) -> Iterator[tuple[slice, Tensor]]:
        """Of all rows, cut so that a table and so many columns beside it are at most HELD numbers, or one row."""
        cuts, widest = [0], 0
        for row, size in enumerate(self.sizes_N.tolist()):
            widest = max(widest, size)
            if row > cuts[-1] and (row + 1 - cuts[-1]) * (widest + columns) > HELD:
                cuts.append(row)
                widest = size
        for start, stop in zip(cuts, [*cuts[1:], len(self.sizes_N)], strict=True):
            yield slice(start, stop), self[start:stop]


def conditioned(logp_CM: Tensor, support_logp_CK: Tensor, support_CK: Tensor) -> Tensor:
    """Less the log of the support's mass: log p(a | a ∈ S). Differentiable in both; no support is empty."""
    return logp_CM - support_logp_CK.masked_fill(support_CK < 0, -torch.inf).logsumexp(-1, keepdim=True)


def only(logits_CV: Tensor, support_CK: Tensor) -> Tensor:
    """The logits of the support, −inf elsewhere."""
    # what pads a row lands in a column of its own, which is cut off
    out_CV = torch.ones(len(logits_CV), logits_CV.shape[1] + 1, dtype=torch.bool, device=logits_CV.device)
    out_CV.scatter_(1, support_CK.where(support_CK >= 0, logits_CV.shape[1]), False)
    return logits_CV.masked_fill(out_CV[:, :-1], -torch.inf)


def kept_logprobs_at(
    hidden_NH: Tensor, weight_VH: Tensor, ids_NM: Tensor, support: Support | None, **options: Any
) -> Tensor:
    """`logprobs_at`, conditioned on the support where there is one."""
    if support is None:
        return logprobs_at(hidden_NH, weight_VH, ids_NM, **options)
    m, found = ids_NM.shape[1], []
    for rows, support_CK in support.tables(m):
        logp = logprobs_at(hidden_NH[rows], weight_VH, torch.cat([ids_NM[rows], support_CK], 1), **options)
        found.append(conditioned(logp[:, :m], logp[:, m:], support_CK))
    return torch.cat(found)


def kept_logprobs_and_entropy_at(
    hidden_NH: Tensor, weight_VH: Tensor, ids_NM: Tensor, support: Support | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The same, and the entropy of the whole distribution."""
    if support is None:
        return logprobs_and_entropy_at(hidden_NH, weight_VH, ids_NM, **options)
    m, found = ids_NM.shape[1], []
    for rows, support_CK in support.tables(m):
        columns = torch.cat([ids_NM[rows], support_CK], 1)
        logp, entropy_C = logprobs_and_entropy_at(hidden_NH[rows], weight_VH, columns, **options)
        found.append((conditioned(logp[:, :m], logp[:, m:], support_CK), entropy_C))
    logp_NM, entropy_N = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logp_NM, entropy_N
