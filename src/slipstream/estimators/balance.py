"""Auxiliary loss that spreads tokens over the experts of a mixture.

Fedus et al., "Switch Transformers" (2101.03961), equations 4 to 6, with several experts for each token and pooled over
layers, as in transformers. Here it covers the trained tokens, and the shares are those of the whole update, so that
micro-batches and ranks change nothing.

Shapes: N tokens, E experts, X of which a router chooses for a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balance_loss(logits_NE: Sequence[Tensor], share_E: Tensor, *, n_tokens: float) -> Tensor:
    """Return E · Σ_e f_e P_e: f_e is `share_E`, and P_e the mean of the softmax over n_tokens tokens and all routers.

    `logits_NE` has one tensor for each router. `share_E` is the number of choices of an expert, divided by the number
    of tokens and routers; it has no gradient. If all experts are alike, the loss is X.
    """
    p_E = torch.stack([logits.float().softmax(-1).sum(0) for logits in logits_NE]).sum(0) / (n_tokens * len(logits_NE))
    return len(share_E) * (share_E.to(p_E) * p_E).sum()
