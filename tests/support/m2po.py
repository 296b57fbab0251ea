"""The distillation loss m2po in one call. Runs call its two parts, because the batch is cut between them."""

from torch import Tensor

from slipstream.estimators.surrogate import Metrics, kept_reverse_kl, m2po_mask


def m2po(
    logp_NM: Tensor, behavior_logp_NM: Tensor, logq_NM: Tensor, *, mask: Tensor | None = None, budget: float = 0.04
) -> tuple[Tensor, Metrics]:
    """Choose draws from the given ones, and return their loss and metrics per position."""
    keep_NM, batch = m2po_mask(logp_NM, behavior_logp_NM, logq_NM, mask=mask, budget=budget)
    loss_N, metrics = kept_reverse_kl(logp_NM, behavior_logp_NM, logq_NM, keep_NM)
    return loss_N, metrics | {name: value.to(loss_N.dtype).expand(loss_N.shape) for name, value in batch.items()}
