"""Distance between two policies on tokens that one of the two drew: metrics, and the freshness of samples.

Δ_t = log π_old − log π_rollout of the emitted token, ρ = exp(Δ) with Δ clamped to ±20. Statistics are over valid tokens
and non-empty rows, in float64. Names are verl's names if verl has the metric.

Shapes: B rows (samples), T positions, N valid tokens, samples or flat positions, M cached draws.
"""

import math

import torch
from torch import Tensor

from slipstream.estimators.correction import effective_sample_size
from slipstream.estimators.numerics import RATIO_BOUND, bounded, bounded_exp, floats, floored, same_rows, same_shape

DRIFT_METRICS = (
    *("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl"),
    *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio"),
    *(
        "kl",
        "k3_kl",
        "chi2_token",
        "chi2_seq",
        "chi2_row_p95",
        "tv",
        "tv_p95",
        "ratio_p99",
        "ess",
        "ess_seq",
        "ess_row",
        "ess_row_min",
    ),
    *("probs_pearson", "probs_diff_mean", "probs_diff_max"),
)


def offpolicy_metrics(
    logp_old_BT: Tensor, logp_rollout_BT: Tensor, mask_BT: Tensor, *, lag: Tensor | None = None
) -> dict[str, float]:
    """Return all DRIFT_METRICS, and with `lag` (updates, [B, T]) also kl and chi2_token by lag (Liu, Off-Policy Drift).

    ppl       exp(−mean log-prob) of each row, averaged; log_ppl_diff: rollout's mean log-prob − training's, by row
    kl        mean −Δ, unbiased for KL(rollout‖old), noisy;  k3_kl: mean ρ − 1 − Δ ≥ 0
    chi2      mean ρ² − 1 over tokens, and mean (Πρ)² − 1 over rows: the variance added by importance weights;
              chi2_row_p95: 95th percentile over rows of the token mean
    tv        ½ mean |1 − ρ|: bounds the bias of token-level surrogates; tv_p95: 95th percentile of ½ |1 − ρ|
    ratio_p99 99th percentile of ρ: how heavy the tail of importance ratios is
    ess       effective sample size 1 / E[ρ̃²] over all tokens; ess_seq: of Πρ over rows; ess_row: over the tokens of
              each row, averaged; ess_row_min: the smallest of these
    probs_…   agreement of the probabilities
    kl/lag_2-3, chi2_token/lag_2-3 …: over the tokens of lag 0, 1, 2–3, 4–7 …; buckets without tokens are left out

    Log these metrics in every update. Lag 0 shows the difference between engines, other lags show staleness. All
    metrics are 0 if nothing is valid.
    """
    same_rows(logp_old=logp_old_BT, logp_rollout=logp_rollout_BT, mask=mask_BT)
    valid_BT = mask_BT != 0
    rows_B = valid_BT.any(-1)
    if not rows_B.any():
        return dict.fromkeys(DRIFT_METRICS, 0.0)
    valid_BT = valid_BT[rows_B]
    old_BT, rollout_BT = (
        floored(logp.detach()[rows_B].double()).masked_fill(~valid_BT, 0.0) for logp in (logp_old_BT, logp_rollout_BT)
    )
    delta_N = (old_BT - rollout_BT)[valid_BT]
    metrics = _of_rows(old_BT, rollout_BT, valid_BT) | _of_tokens(delta_N)
    ratio_N = delta_N.clamp(-RATIO_BOUND, RATIO_BOUND).exp()
    metrics |= {"ratio_p99": _quantile(ratio_N, 0.99), "tv_p95": _quantile((ratio_N - 1).abs() / 2, 0.95)}
    metrics |= _of_probabilities(old_BT[valid_BT].exp(), rollout_BT[valid_BT].exp())
    if lag is not None:
        same_rows(logp_old=logp_old_BT, lag=lag)
        metrics |= _by_lag(delta_N, lag[rows_B][valid_BT])
    return floats(metrics)


def gradient_noise(square_norms_N: Tensor, square_norm_of_mean: Tensor) -> dict[str, float]:
    """Return signal ‖ḡ‖², power E‖ĝ‖² and noise (power − signal)/(N − 1) of N gradients of one batch (verl's proxies).

    Noise is an unbiased estimate of the variance of ḡ. If noise rises with importance weights, they add more variance
    than they remove bias.
    """
    n = square_norms_N.numel()
    if square_norms_N.ndim != 1 or n < 2 or square_norm_of_mean.numel() != 1:
        raise ValueError(
            f"square_norms {tuple(square_norms_N.shape)} must be [N] with N ≥ 2, "
            f"square_norm_of_mean {tuple(square_norm_of_mean.shape)} one number"
        )
    signal, power = square_norm_of_mean.detach().double().reshape(()), square_norms_N.detach().double().mean()
    return floats(
        {
            "proxy1_signal_strength": signal,
            "proxy2_total_power": power,
            "proxy3_pure_noise": (power - signal) / (n - 1),
        }
    )


def _of_rows(old_BT: Tensor, rollout_BT: Tensor, valid_BT: Tensor) -> dict[str, Tensor]:
    count_B = valid_BT.sum(-1)
    training_B, rollout_B = -old_BT.sum(-1) / count_B, -rollout_BT.sum(-1) / count_B
    diff_B = training_B - rollout_B
    delta_BT = (old_BT - rollout_BT).clamp(-RATIO_BOUND, RATIO_BOUND)
    product_B = delta_BT.sum(-1)
    weight_B = (product_B - product_B.max()).exp()
    ratio_BT = delta_BT.exp().masked_fill(~valid_BT, 0.0)
    square_B = ratio_BT.square().sum(-1) / count_B
    ess_B = (ratio_BT.sum(-1) / count_B).square() / square_B
    return {
        "training_ppl": bounded_exp(training_B).mean(),
        "training_log_ppl": training_B.mean(),
        "rollout_ppl": bounded_exp(rollout_B).mean(),
        "rollout_log_ppl": rollout_B.mean(),
        "log_ppl_diff": diff_B.mean(),
        "log_ppl_abs_diff": diff_B.abs().mean(),
        "log_ppl_diff_max": diff_B.max(),
        "log_ppl_diff_min": diff_B.min(),
        "ppl_ratio": bounded_exp(diff_B).mean(),
        "chi2_seq": torch.expm1(2 * product_B.clamp(-RATIO_BOUND, RATIO_BOUND)).mean(),
        "chi2_row_p95": torch.quantile(square_B - 1, 0.95),
        "ess_seq": effective_sample_size(weight_B, torch.ones_like(weight_B)),
        "ess_row": ess_B.mean(),
        "ess_row_min": ess_B.min(),
    }


def _of_tokens(delta_N: Tensor) -> dict[str, Tensor]:
    safe_N = delta_N.clamp(-RATIO_BOUND, RATIO_BOUND)
    return {
        "kl": -delta_N.mean(),
        "k3_kl": (torch.expm1(safe_N) - safe_N).mean(),
        "chi2_token": torch.expm1(2 * safe_N).mean(),
        "tv": torch.expm1(safe_N).abs().mean() / 2,
        "ess": effective_sample_size(safe_N.exp(), torch.ones_like(safe_N)),
    }


def _quantile(x_N: Tensor, share: float) -> Tensor:
    """Return the smallest value that at least this share of the values does not exceed."""
    return x_N.kthvalue(max(1, math.ceil(share * len(x_N)))).values


def _of_probabilities(old_N: Tensor, rollout_N: Tensor) -> dict[str, Tensor]:
    difference_N = (old_N - rollout_N).abs()
    a_N, b_N = old_N - old_N.mean(), rollout_N - rollout_N.mean()
    spread = a_N.norm() * b_N.norm()
    # if all values are equal the correlation is undefined: use 1 if the two policies agree, else 0
    without = (difference_N.max() == 0).to(spread.dtype)
    return {
        "probs_pearson": torch.where(spread > 0, (a_N * b_N).sum() / torch.where(spread > 0, spread, 1.0), without),
        "probs_diff_mean": difference_N.mean(),
        "probs_diff_max": difference_N.max(),
    }


def _by_lag(delta_N: Tensor, lag_N: Tensor) -> dict[str, Tensor]:
    if (lag_N < 0).any():
        raise ValueError(
            f"lag must not be negative, got {int(lag_N.min())}: is it the learner's version less the token's?"
        )
    metrics, low, high = dict[str, Tensor](), 0, 0
    while low <= lag_N.max():
        inside_N = (lag_N >= low) & (lag_N <= high)
        if inside_N.any():
            label = str(low) if low == high else f"{low}-{high}"
            bucket = _of_tokens(delta_N[inside_N])
            metrics |= {f"{name}/lag_{label}": bucket[name] for name in ("kl", "chi2_token")}
        low, high = high + 1, 2 * high + 1
    return metrics


# --- freshness of buffered samples ------------------------------------------------------------------------------------
#
# Chen, Zhang and Wu, "f-OPD: Stabilizing Long-Horizon On-Policy Distillation with Freshness-Aware Control", equations
# 10 to 13 and 16. The paper gives no default values; the defaults here are our own. The baselines of its ablation are
# special cases: alpha = beta = 0 weights by lag only, anchor = 0 has no anchor, and a weight of 1 is no weighting.


def score(
    lag: Tensor | float,
    rollout_kl: Tensor | float,
    supervision_kl: Tensor | float,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """Return the freshness f = exp(−α√D_roll − β√D_sup) / (lag + 1), 1 for a sample of the current policy (Eq. 11).

    Drifts are means over the aligned positions (`aligned_mean`). A sample without aligned positions has an infinite
    drift, and its score is 0. Negative drifts are rounding errors and count as 0. Scalars broadcast; there is no
    gradient. If contexts are just prefixes and the teacher is frozen, supervision_kl is 0.
    """
    lag, rollout_kl, supervision_kl = _tensor(lag), _tensor(rollout_kl), _tensor(supervision_kl)
    shaped = {"lag": lag, "rollout_kl": rollout_kl, "supervision_kl": supervision_kl}
    if shaped := {name: x for name, x in shaped.items() if x.ndim}:
        same_shape(**shaped)
    invalid = rollout_kl.isinf() | supervision_kl.isinf()
    roll, sup = (x.masked_fill(x.isinf(), 0.0).clamp(min=0).sqrt() for x in (rollout_kl, supervision_kl))
    return (torch.exp(-alpha * roll - beta * sup) / (lag + 1)).masked_fill(invalid, 0.0)


def weight(f: Tensor, *, threshold: float = 0.02) -> Tensor:
    """Return the weight w = sg(relu(f − ξ)): 0 at or below the threshold (f-OPD, Eq. 13)."""
    return (f.detach() - threshold).clamp(min=0)


def rollout_kl_from_cache(logp_NM: Tensor, behavior_logp_NM: Tensor) -> Tensor:
    """Estimate KL(p_θ‖p_old) from draws of p_old: 1/M Σ (ρ log ρ − ρ + 1), each term ≥ 0. Differentiable.

    Value and gradient are unbiased while no ratio is clamped and p_θ is processed exactly like p_old (temperature,
    sampling support). If the processing differs, the estimate is above 0 even at lag 0. Stored weights give the exact
    value: `dense(logp, logp_old, kind="reverse")`.
    """
    same_shape(logp=logp_NM, behavior_logp=behavior_logp_NM)
    log_ratio_NM = bounded(floored(logp_NM) - floored(behavior_logp_NM), -RATIO_BOUND, RATIO_BOUND)
    # ρ·x − expm1(x) with x = log ρ does not cancel near ρ = 1; if exp is off by an ulp the result may still be below 0
    return (log_ratio_NM.exp() * log_ratio_NM - torch.expm1(log_ratio_NM)).clamp(min=0).mean(-1)


def aligned_mean(kl_BT: Tensor, aligned_BT: Tensor) -> Tensor:
    """Return each sample's mean drift over aligned positions (with known drift); infinite without such positions."""
    same_shape(kl=kl_BT, aligned=aligned_BT)
    count_B = (aligned_BT != 0).sum(-1)
    mean_B = kl_BT.masked_fill(aligned_BT == 0, 0.0).sum(-1) / count_B.clamp(min=1)
    return mean_B.masked_fill(count_B == 0, torch.inf)


def _tensor(x: Tensor | float) -> Tensor:
    return x.detach() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
