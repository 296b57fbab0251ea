"""Importance ratios for each unit of correction, and rollout correction: importance weights and rejection masks.

The unit of a ratio trades bias against variance. `token` ignores that the prefix was drawn by another policy; this bias
grows with drift and length. `sequence` is exact and explodes with length. The other units are in between. Every
log-ratio and every sum is clamped to ±20 before exp; gradients pass these bounds. Masked positions never contribute and
have ratio 0. Arithmetic is in float64. Results have the dtype of the log-ratio, at least float32.

Rollout correction is for the gap Δ_t = log π_old − log π_rollout of the emitted token. `decoupled`: old is the training
engine at the version that drew the token, so Δ is the difference between the engines. `bypass`: old is the current
policy, so Δ also includes staleness. Two rejection modes, `seq_max_kl` and `negative_seq`, always compare with the
current policy. Weights and masks are detached. Every level and mode has a scope (SCOPE): the tokens that its result
depends on. A batch may be cut after the correction of the whole batch; counts of the tokens left then come from the
whole batch.

Shapes: B rows, T positions.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.estimators.numerics import RATIO_BOUND, bounded, bounded_exp, floats, floored, same_rows, same_shape
from slipstream.estimators.options import unknown
from slipstream.estimators.tables.correction import (
    CTPO_CLIP,
    ONE_PER_ROW,
    RATIO_UNITS,
    Bounds,
    Threshold,
    Unit,
    checked,
)


def importance_ratio(
    unit: Unit, log_ratio_BT: Tensor, mask_BT: Tensor, *, turns: Tensor | None = None, c: float = CTPO_CLIP
) -> Tensor:
    """Return the ratio of two policies at each token, ρ_t = exp(log_ratio_t), combined over a unit; differentiable.

    token       ρ_t: low variance, for mild drift
    sequence    Π_t ρ_t: the exact weight of the whole row, for short rows
    geometric   exp(mean_t log ρ_t): does not grow with length  (GSPO, 2507.18071)
    prefix_min  (min_{s<t} ρ_s)·ρ_t, 1 for the empty prefix: causal, without the product  (MinPRO, 2601.22718)
    cumulative  Π_{s≤t} ρ_s, its log clipped to ±c√t, t the token's number in the row: causal, for drift that is spread
                evenly  (CTPO, 2605.07331)
    turn        Π of ρ over the tokens of the row with the same entry in `turns` (integers, [B, T]): for agents, whose
                actions are turns  (ST-PPO, 2511.20718)
    """
    same_rows(log_ratio=log_ratio_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    log_BT = bounded(log_ratio_BT.masked_fill(~valid_BT, 0.0).double(), -RATIO_BOUND, RATIO_BOUND)
    match unit:
        case "token":
            unit_BT = log_BT
        case "sequence":
            unit_BT = log_BT.sum(-1, keepdim=True).expand_as(log_BT)
        case "geometric":
            unit_BT = (log_BT.sum(-1) / valid_BT.sum(-1).clamp(min=1))[:, None].expand_as(log_BT)
        case "prefix_min":
            unit_BT = _least_before(log_BT, valid_BT) + log_BT
        case "cumulative":
            bound_BT = c * valid_BT.cumsum(-1).clamp(min=1).to(log_BT.dtype).sqrt()
            unit_BT = log_BT.cumsum(-1).clamp(-bound_BT, bound_BT)
        case "turn":
            unit_BT = turn_sum(log_BT, turns)
        case _:
            raise unknown("unit", unit, RATIO_UNITS)
    dtype = torch.promote_types(log_ratio_BT.dtype, torch.float32)
    return bounded_exp(unit_BT).masked_fill(~valid_BT, 0.0).to(dtype)


def truncate(ratio_BT: Tensor, threshold: Threshold) -> Tensor:
    """Return min(ρ, C) for one number. For a pair return ρ inside the band and 0 outside (IcePop, 2510.18855)."""
    if isinstance(threshold, tuple):
        low, high = threshold
        return torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, 0.0)
    return ratio_BT.clamp(max=threshold)


def normaliser(weights_BT: Tensor, mask_BT: Tensor, *, over_rows: bool = False) -> Tensor:
    """Return the mean of importance weights over tokens, or over non-empty rows; 1 if all are 0. Batch scope."""
    same_shape(weights=weights_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    mean = row_mean(weights_BT, valid_BT) if over_rows else token_mean(weights_BT, valid_BT)
    return torch.where(mean == 0, 1.0, mean)


def effective_sample_size(weights_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the effective sample size as a share of the tokens: 1 / E[w̃²], w̃ = w / E[w]; 0 if all weights are 0."""
    same_shape(weights=weights_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    second = token_mean(weights_BT.square(), valid_BT)
    return token_mean(weights_BT, valid_BT).square() / torch.where(second == 0, 1.0, second)


def weight_metrics(
    ratio_BT: Tensor, weights_BT: Tensor, mask_BT: Tensor, *, threshold: Threshold, over_rows: bool
) -> dict[str, Tensor]:
    """Return statistics of truncated importance weights over tokens, and the shares of ratios above C and below 1/C.

    With `over_rows` the shares are of rows. A single threshold C truncates only above: ratios below 1/C are counted and
    not changed. A pair (low, high) replaces 1/C and C; ratios outside the band get weight 0.
    """
    valid_BT = mask_BT != 0
    low, high = threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)
    mean = token_mean(weights_BT, valid_BT)
    least = weights_BT.masked_fill(~valid_BT, torch.inf).amin()
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": token_mean((weights_BT - mean).square(), valid_BT).sqrt(),
        "rollout_is_p99": percentile(weights_BT, valid_BT, 0.99),
        "rollout_is_min": torch.where(least.isinf(), 0.0, least),
        "rollout_is_max": weights_BT.masked_fill(~valid_BT, 0.0).amax(),
        "rollout_is_ratio_fraction_high": share(ratio_BT > high, valid_BT, of_rows=over_rows),
        "rollout_is_ratio_fraction_low": share(ratio_BT < low, valid_BT, of_rows=over_rows),
    }


def percentile(x_BT: Tensor, valid_BT: Tensor, share: float) -> Tensor:
    """Return the smallest value that this share of the valid tokens does not exceed; 0 if no token is valid."""
    values = x_BT[valid_BT].sort().values
    return values[math.ceil(share * len(values)) - 1] if len(values) else x_BT.new_zeros(())


def share(hit_BT: Tensor, valid_BT: Tensor, *, of_rows: bool = False) -> Tensor:
    """Return the share of valid tokens in `hit_BT`; with `of_rows` the share of non-empty rows with any such token."""
    if of_rows:
        hit_BT, valid_BT = (hit_BT & valid_BT).any(-1, keepdim=True), valid_BT.any(-1, keepdim=True)
    return token_mean(hit_BT.double(), valid_BT)


def token_mean(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return the mean over valid tokens; 0 if no token is valid."""
    return x_BT.masked_fill(~valid_BT, 0.0).sum() / valid_BT.sum().clamp(min=1)


def row_mean(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return the mean over non-empty rows of each row's mean; 0 if all rows are empty."""
    each_B = x_BT.masked_fill(~valid_BT, 0.0).sum(-1) / valid_BT.sum(-1).clamp(min=1)
    return each_B.sum() / valid_BT.any(-1).sum().clamp(min=1)


def _least_before(log_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return the smallest valid log-ratio strictly before each position; 0 if no valid token is before it."""
    least_BT = log_BT.masked_fill(~valid_BT, torch.inf).cummin(-1).values
    before_BT = pad(least_BT[:, :-1], (1, 0), value=torch.inf)
    return torch.where(before_BT.isinf(), 0.0, before_BT)


def turn_sum(x_BT: Tensor, turns_BT: Tensor | None) -> Tensor:
    """Return at each token the sum over the tokens of its row with the same entry in `turns`."""
    if turns_BT is None or turns_BT.is_floating_point():
        raise ValueError(
            "unit 'turn' needs turns, the number of each token's turn: an integer tensor of the mask's shape"
        )
    same_shape(log_ratio=x_BT, turns=turns_BT)
    turns, ids_BT = torch.unique(turns_BT, return_inverse=True)
    sums = x_BT.new_zeros(len(x_BT), len(turns)).scatter_add(-1, ids_BT, x_BT)
    return sums.gather(-1, ids_BT)


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
             whole vocabulary, infinite where unknown  (TRM, 2512.23075). seq_max_k3 of a bypass preset is its estimate.
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
            "rejection mode 'seq_max_kl' needs the KL of every token: give kl=kl_BT, or take 'seq_max_k3', its "
            "estimate in bypass mode"
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
