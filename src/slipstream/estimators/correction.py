"""Rollout correction: importance weights and rejection masks for the gap between two policies.

Δ_t = log π_old − log π_rollout of the emitted token. `decoupled`: old is the training engine at the version that drew
the token, so Δ is the difference between the engines. `bypass`: old is the current policy, so Δ also includes
staleness. Two rejection modes, `seq_max_kl` and `negative_seq`, always compare with the current policy. Weights and
masks are detached. Every level and mode has a scope (SCOPE): the tokens that its result depends on. A batch may be cut
after the correction of the whole batch; counts of the tokens left then come from the whole batch.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.estimators.drift import floats
from slipstream.estimators.numerics import RATIO_BOUND, floored
from slipstream.estimators.ratio import (
    effective_sample_size,
    importance_ratio,
    normaliser,
    same_rows,
    share,
    truncate,
    weight_metrics,
)
from slipstream.estimators.tables.correction import CTPO_CLIP, ONE_PER_ROW, Bounds, Threshold, Unit, checked


@dataclass(frozen=True)
class Correction:
    weights: Tensor | None
    """Importance weights [B, T], 0 at masked or rejected tokens. None if no weights are requested."""
    mask: Tensor
    """Given mask without the rejected tokens."""
    metrics: dict[str, float]


def correct(
    logp_old_BT: Tensor,
    logp_rollout_BT: Tensor,
    mask_BT: Tensor,
    *,
    is_level: Unit | None = None,
    is_threshold: Threshold = 2.0,
    is_normalize: bool = False,
    rs: Bounds | None = None,
    turns: Tensor | None = None,
    kl: Tensor | None = None,
    advantages: Tensor | None = None,
    current: Tensor | None = None,
    ctpo_clip: float = CTPO_CLIP,
    verl_compat: bool = False,
) -> Correction:
    """Compute importance weights at `is_level` and the mask after rejection by `rs` (verl's rollout correction).

    weights  the ratio of the unit (see `importance_ratio`) truncated to min(w, C) or to the band (low, high). With
             `is_normalize` divided by its mean over the tokens left, or over rows for units with one ratio per row.
             Weights correct all drawn tokens: unbiased up to truncation, noisy under strong drift.
    rs       {mode: bound, …}. token_… masks tokens, seq_… whole rows: outliers are removed and not amplified. Distances
             of clamped Δ: k2 ½Δ² and k3 e^Δ − 1 − Δ, kept while ≤ bound. k1: a ratio, exp of Δ_t, ΣΔ or mean Δ, kept
             while in (L, U); U alone means (1/U, U). (`verl_compat` compares −Δ, as verl does: it keeps [1/U, 1/L].)
             seq_max_kl: max_t KL_t ≤ bound. `kl` [B, T] is the KL from the policy that drew to the current one over the
             whole vocabulary, infinite where unknown  (TRM, 2512.23075). seq_max_k3 is its estimate.
             negative_seq: rejects a row if its `advantages` [B, T] sum to less than 0 and its mean of log π_rollout −
             log π_θ is > bound. `current` [B, T] is log π_θ. Such bad answers are already unlikely,
             because of staleness or of a difference between engines  (DeepSeek-V3.2, 2512.02556).
    metrics  named as in verl. rollout_is_…: see `weight_metrics`, before normalisation. rollout_rs_[MODE_]…: share of
             tokens rejected (masked_fraction), and of rows with a rejected token (seq_masked_fraction). ess of the
             weights, or of ρ without weights. All except the rejected shares are over the tokens left.
    """
    same_rows(logp_old=logp_old_BT, logp_rollout=logp_rollout_BT, mask=mask_BT)
    threshold, intervals = checked(is_level, is_threshold, is_normalize, rs)
    valid_BT = mask_BT != 0
    delta_BT = _log_ratio(logp_old_BT, logp_rollout_BT, valid_BT)

    kept_BT, metrics = valid_BT, dict[str, Tensor]()
    for mode, (low, high) in intervals.items():
        match mode:
            case "seq_max_kl":
                statistic_BT = _largest_kl(kl, valid_BT)
            case "negative_seq":
                statistic_BT = _negative_row_gap(logp_rollout_BT, current, advantages, valid_BT)
            case _:
                statistic_BT = _statistic(mode, delta_BT, valid_BT)
        if verl_compat and mode.endswith("k1"):
            statistic_BT = -statistic_BT
        passed_BT = valid_BT & (statistic_BT >= low) & (statistic_BT <= high)
        metrics |= _rejection_metrics(f"rollout_rs_{mode}", passed_BT, valid_BT)
        kept_BT = kept_BT & passed_BT
    metrics |= _rejection_metrics("rollout_rs", kept_BT, valid_BT)

    ratio_BT = importance_ratio(is_level or "token", delta_BT, valid_BT, turns=turns, c=ctpo_clip)
    weights_BT = None
    if is_level is not None:
        over_rows = is_level in ONE_PER_ROW
        weights_BT = truncate(ratio_BT, threshold).masked_fill(~kept_BT, 0.0)
        metrics |= weight_metrics(ratio_BT, weights_BT, kept_BT, threshold=threshold, over_rows=over_rows)
        if is_normalize:
            factor = normaliser(weights_BT, kept_BT, over_rows=over_rows)
            weights_BT, metrics["rollout_is_batch_norm_factor"] = weights_BT / factor, factor
    metrics["ess"] = effective_sample_size(ratio_BT if weights_BT is None else weights_BT, kept_BT)
    if weights_BT is not None:
        weights_BT = weights_BT.to(torch.promote_types(logp_old_BT.dtype, torch.float32))
    return Correction(weights_BT, mask_BT * kept_BT.to(mask_BT.dtype), floats(metrics))


def _log_ratio(logp_BT: Tensor, to_BT: Tensor, valid_BT: Tensor) -> Tensor:
    difference_BT = floored(logp_BT.detach().double()) - floored(to_BT.detach().double())
    return difference_BT.masked_fill(~valid_BT, 0.0).clamp(-RATIO_BOUND, RATIO_BOUND)


def _statistic(mode: str, delta_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return the statistic of a mode for each token, [B, T], or row, [B, 1]: a log-ratio for k1, else a distance."""
    span, _, measure = mode.rpartition("_")
    match measure:
        case "k1":
            x_BT = delta_BT
        case "k2":
            x_BT = delta_BT.square() / 2
        case _:
            x_BT = torch.expm1(delta_BT) - delta_BT
    return _reduce(span, x_BT, valid_BT)


def _largest_kl(kl_BT: Tensor | None, valid_BT: Tensor) -> Tensor:
    if kl_BT is None:
        raise ValueError(
            "rejection mode 'seq_max_kl' needs the KL of every token: give kl=kl_BT, or take 'seq_max_k3', its estimate"
        )
    same_rows(kl=kl_BT, mask=valid_BT)
    return _reduce("seq_max", kl_BT.detach().double().masked_fill(~valid_BT, 0.0), valid_BT)


def _negative_row_gap(
    rollout_BT: Tensor, current_BT: Tensor | None, advantages_BT: Tensor | None, valid_BT: Tensor
) -> Tensor:
    """Return the row mean of log π_rollout − log π_θ for rows with a negative sum of advantages, and −∞ for others."""
    if advantages_BT is None or current_BT is None:
        raise ValueError(
            "rejection mode 'negative_seq' needs advantages and the policy as it is now: "
            "correct(..., advantages=advantages_BT, current=logp_BT)"
        )
    same_rows(advantages=advantages_BT, current=current_BT, mask=valid_BT)
    negative_B1 = _reduce("seq_sum", advantages_BT.masked_fill(~valid_BT, 0.0), valid_BT) < 0
    gap_BT = _log_ratio(rollout_BT, current_BT, valid_BT)
    return torch.where(negative_B1, _reduce("seq_mean", gap_BT, valid_BT), -torch.inf)


def _reduce(span: str, x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    match span:
        case "seq_sum":
            return x_BT.sum(-1, keepdim=True)
        case "seq_mean":
            return x_BT.sum(-1, keepdim=True) / valid_BT.sum(-1, keepdim=True).clamp(min=1)
        case "seq_max":
            return x_BT.amax(-1, keepdim=True)
    return x_BT


def _rejection_metrics(prefix: str, passed_BT: Tensor, valid_BT: Tensor) -> dict[str, Tensor]:
    return {
        f"{prefix}_masked_fraction": share(~passed_BT, valid_BT),
        f"{prefix}_seq_masked_fraction": share(~passed_BT, valid_BT, of_rows=True),
    }
