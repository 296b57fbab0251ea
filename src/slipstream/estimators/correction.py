"""Rollout correction: importance weights and rejection masks for the gap between two policies.

Δ_t = log π_old − log π_rollout of the emitted token. `decoupled`: old is the training engine at the version that drew
the token, so Δ is what the engines disagree on. `bypass`: old is the current policy, so Δ is everything. Two rejections
look past Δ in either mode, at what the policy has become: `seq_max_kl` and `negative_seq`. Weights and masks are
detached. Every choice has a scope (SCOPE): what must be in sight to compute it. The result of a whole batch,
once frozen, may be cut anywhere; the counts of what rejection leaves are the batch's too.

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
from slipstream.estimators.tables.correction import (
    CTPO_CLIP,
    ONE_PER_ROW,
    PRESETS,
    RS_MODES,
    Bounds,
    CorrectionPreset,
    Threshold,
    Unit,
    check_combination,
    checked,
)

__all__ = ["PRESETS", "RS_MODES", "Correction", "CorrectionPreset", "check_combination", "correct"]


@dataclass(frozen=True)
class Correction:
    weights: Tensor | None
    """[B, T], 0 where the mask is; None when no importance weights were asked for."""
    mask: Tensor
    """The mask given, less what was rejected."""
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
    """Importance weights at `is_level`, and the mask that `rs = {mode: bound, …}` leaves.  (verl's rollout correction.)

    weights  the ratio of the unit (see `importance_ratio`) truncated to min(w, C) or to the band (low, high), then with
             `is_normalize` divided by its mean over what is kept: over tokens, or rows where a row has one ratio.
             They reweight all that was drawn: unbiased up to truncation, noisy under strong drift.
    rs       token_… masks tokens, seq_… whole rows: outliers leave instead of being amplified. Distances of clamped Δ:
             k2 ½Δ² and k3 e^Δ − 1 − Δ, kept while ≤ bound. k1: a ratio, exp of Δ_t, ΣΔ or mean Δ, kept while in
             (L, U); U alone means (1/U, U). (`verl_compat` compares −Δ, as verl does: it keeps [1/U, 1/L].)
             seq_max_kl: max_t KL_t ≤ bound, KL_t in `kl` [B, T] that of the policy that drew to the current one over
             the whole vocabulary, infinite where it is not known  (TRM, 2512.23075). seq_max_k3 is its estimate.
             negative_seq: a row leaves when its `advantages` [B, T] sum to less than 0 and its mean of log π_rollout −
             log π_θ is > bound, π_θ from `current` [B, T], whatever old is: bad answers that the policy has left, by
             staleness or by the engines' gap  (DeepSeek-V3.2, 2512.02556).
    metrics  named as verl's. rollout_is_…: see `weight_metrics`, before normalisation. rollout_rs_[MODE_]…: share of
             tokens rejected (masked_fraction), of rows that lost any (seq_masked_fraction). ess of the weights, of ρ
             without weights. All but the rejected shares are over what is kept.
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
                statistic_BT = _left_behind(logp_rollout_BT, current, advantages, valid_BT)
            case _:
                statistic_BT = _statistic(mode, delta_BT, valid_BT)
        if verl_compat and mode.endswith("k1"):
            statistic_BT = -statistic_BT
        passed_BT = valid_BT & (statistic_BT >= low) & (statistic_BT <= high)
        metrics |= _rejected(f"rollout_rs_{mode}", passed_BT, valid_BT)
        kept_BT = kept_BT & passed_BT
    metrics |= _rejected("rollout_rs", kept_BT, valid_BT)

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
    """What a mode compares: of each token, [B, T], or of each row, [B, 1]. For k1 a log-ratio, else a distance."""
    span, _, measure = mode.rpartition("_")
    match measure:
        case "k1":
            x_BT = delta_BT
        case "k2":
            x_BT = delta_BT.square() / 2
        case _:
            x_BT = torch.expm1(delta_BT) - delta_BT
    return _over(span, x_BT, valid_BT)


def _largest_kl(kl_BT: Tensor | None, valid_BT: Tensor) -> Tensor:
    if kl_BT is None:
        raise ValueError(
            "rejection mode 'seq_max_kl' needs the KL of every token: give kl=kl_BT, or take 'seq_max_k3', its estimate"
        )
    same_rows(kl=kl_BT, mask=valid_BT)
    return _over("seq_max", kl_BT.detach().double().masked_fill(~valid_BT, 0.0), valid_BT)


def _left_behind(
    rollout_BT: Tensor, current_BT: Tensor | None, advantages_BT: Tensor | None, valid_BT: Tensor
) -> Tensor:
    """How much likelier a bad row was when it was drawn, by token; −∞ for the others."""
    if advantages_BT is None or current_BT is None:
        raise ValueError(
            "rejection mode 'negative_seq' needs advantages and the policy as it is now: "
            "correct(..., advantages=advantages_BT, current=logp_BT)"
        )
    same_rows(advantages=advantages_BT, current=current_BT, mask=valid_BT)
    negative_B1 = _over("seq_sum", advantages_BT.masked_fill(~valid_BT, 0.0), valid_BT) < 0
    gap_BT = _log_ratio(rollout_BT, current_BT, valid_BT)
    return torch.where(negative_B1, _over("seq_mean", gap_BT, valid_BT), -torch.inf)


def _over(span: str, x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    match span:
        case "seq_sum":
            return x_BT.sum(-1, keepdim=True)
        case "seq_mean":
            return x_BT.sum(-1, keepdim=True) / valid_BT.sum(-1, keepdim=True).clamp(min=1)
        case "seq_max":
            return x_BT.amax(-1, keepdim=True)
    return x_BT


def _rejected(prefix: str, passed_BT: Tensor, valid_BT: Tensor) -> dict[str, Tensor]:
    return {
        f"{prefix}_masked_fraction": share(~passed_BT, valid_BT),
        f"{prefix}_seq_masked_fraction": share(~passed_BT, valid_BT, of_rows=True),
    }
