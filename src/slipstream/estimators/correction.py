"""Rollout correction: importance weights and rejection masks for the gap between two policies.

Δ_t = log π_old − log π_rollout of the emitted token. `decoupled`: old is the training engine at the version that drew
the token, so Δ is what the engines disagree on. `bypass`: old is the current policy, so Δ is everything. Two rejections
look past Δ in either mode, at what the policy has become: `seq_max_kl` and `negative_seq`. Weights and masks are
detached. Every choice has a scope (SCOPE): what must be in sight to compute it. The result of a whole batch,
once frozen, may be cut anywhere; the counts of what rejection leaves are the batch's too.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.estimators.drift import floats
from slipstream.estimators.numerics import RATIO_BOUND, floored, unknown
from slipstream.estimators.ratio import (
    CTPO_CLIP,
    ONE_PER_ROW,
    Threshold,
    Unit,
    effective_sample_size,
    importance_ratio,
    normaliser,
    same_rows,
    share,
    truncate,
    weight_metrics,
)
from slipstream.estimators.ratio import SCOPE as UNIT_SCOPE
from slipstream.scope import Scope

Bounds = Mapping[str, Threshold]
"""Rejection modes and their bounds; a sample must pass all of them."""

RS_MODES = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
    *("seq_max_kl", "negative_seq"),
)
SCOPE: dict[str, Scope] = {
    **UNIT_SCOPE,
    **{mode: "token" if mode.startswith("token") else "row" for mode in RS_MODES},
    "is_normalize": "batch",
}


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
    threshold, intervals = _checked(is_level, is_threshold, is_normalize, rs)
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


# --- what may be asked for --------------------------------------------------------------------------------------------


def _checked(
    is_level: str | None, is_threshold: Threshold, is_normalize: bool, rs: Bounds | None
) -> tuple[Threshold, dict[str, tuple[float, float]]]:
    """The threshold, and for each mode the interval of the statistic that is kept; or what to write instead."""
    if is_level is not None and is_level not in UNIT_SCOPE:
        raise unknown("is_level", str(is_level), UNIT_SCOPE)
    if is_normalize and is_level is None:
        raise ValueError("is_normalize has no weights to normalise: set is_level, for example is_level='token'")
    if not isinstance(rs, Mapping | None):
        raise ValueError(f"rs must be a dict of mode: bound, got {rs!r}; for example rs={{'seq_mean_k1': (0.5, 2.0)}}")
    threshold = _bound("is_threshold", is_threshold, pair=True, above=0, example="2.0 or (0.5, 5.0)")
    intervals = dict[str, tuple[float, float]]()
    for mode, value in (rs or {}).items():
        if mode not in RS_MODES:
            raise unknown("rejection mode", str(mode), RS_MODES)
        k1 = mode.endswith("k1")
        example = f"rs={{{mode!r}: {'(0.5, 2.0)' if k1 else '0.01'}}}"
        bound = _bound(f"rs[{mode!r}]", value, pair=k1, above=int(k1), example=example)
        low, high = bound if isinstance(bound, tuple) else (1 / bound, bound)
        intervals[mode] = (math.log(low), math.log(high)) if k1 else (-math.inf, high)
    return threshold, intervals


def _bound(name: str, value: Any, *, pair: bool, above: int, example: str) -> Threshold:
    match value:
        case (low, high) if pair and _positive(low) and _positive(high) and low < high:
            return float(low), float(high)
        case int() | float() if _positive(value) and value > above:
            return float(value)
    wanted = f"one number above {above}" + (" or a pair (low, high) with 0 < low < high" if pair else "")
    raise ValueError(f"{name} must be {wanted}, got {value!r}; for example {example}")


def _positive(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf


# --- presets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorrectionPreset:
    """A correction and the mode and loss it is meant for. `mode` None: metrics only; `loss` None: any."""

    mode: Literal["decoupled", "bypass"] | None = None
    is_level: Unit | None = None
    is_threshold: Threshold = 2.0
    is_normalize: bool = False
    rs: Bounds | None = None
    loss: Literal["ppo_clip", "reinforce"] | None = None
    ctpo_clip: float = CTPO_CLIP
    verl_compat: bool = False

    def __post_init__(self) -> None:
        _checked(self.is_level, self.is_threshold, self.is_normalize, self.rs)
        if self.mode not in ("decoupled", "bypass", None):
            raise unknown("correction mode", str(self.mode), ("decoupled", "bypass"))
        if self.loss not in (*LOSSES_OF, None):
            raise unknown("loss of a correction", str(self.loss), LOSSES_OF)
        if self.mode is None and self.corrects:
            raise ValueError(
                "weights and rejection need a mode: a preset 'decoupled_…' or 'bypass_…' says what they are measured to"
            )

    @property
    def corrects(self) -> bool:
        return self.is_level is not None or bool(self.rs)

    @property
    def scope(self) -> Scope:
        """The widest scope of its parts."""
        parts = [*(self.rs or ()), *([self.is_level] if self.is_level else []), *["is_normalize"] * self.is_normalize]
        return max((SCOPE[part] for part in parts), key=("token", "row", "batch").index, default="token")

    def apply(self, logp_old_BT: Tensor, logp_rollout_BT: Tensor, mask_BT: Tensor, **evidence: Any) -> Correction:
        """`correct` with these settings; `evidence` may hold its `turns`, `kl`, `advantages` and `current`."""
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("mode", "loss")}
        return correct(logp_old_BT, logp_rollout_BT, mask_BT, **settings, **evidence)


LOSSES_OF = {"ppo_clip": ("vanilla",), "reinforce": ("reinforce", "gpg")}
"""Policy losses that a preset's `loss` stands for."""
RATIO_TO_BEHAVIOR = frozenset({"reverse_kl_mc", "decoupled_ppo", "m2po"})
"""Losses that hold the ratio to the policy that drew the token, in either mode."""
RATIO_TO_OLD = frozenset({"vanilla", "cispo", "gspo", "gspo_token", "gmpo", "geo_mean", "sapo", "dppo_tv", "dppo_kl"})
RATIO_TO_OLD |= {"clip_cov", "kl_cov", "topr", "aspo", "minpro", "ctpo"}
"""Losses that hold the ratio to the old policy: in bypass, that is the policy that drew the token."""


def check_combination(loss: str, preset: CorrectionPreset, *, policy: bool = False) -> None:
    """A ValueError where the correction would do nothing, or would count a ratio twice. Guarantor of invariant 7.

    `policy` says which m2po is meant: as a policy loss it holds the ratio to the old policy.
    """
    mode = preset.mode
    to_behavior, to_old = RATIO_TO_BEHAVIOR, RATIO_TO_OLD
    if policy:
        to_behavior, to_old = to_behavior - {"m2po"}, to_old | {"m2po"}
    if preset.loss is not None and loss not in LOSSES_OF[preset.loss]:
        raise ValueError(f"this correction is meant for loss {' or '.join(LOSSES_OF[preset.loss])}, not {loss}")
    if preset.is_level and (loss in to_behavior or (mode == "bypass" and loss in to_old)):
        raise ValueError(
            f"loss {loss} already holds the ratio to the rollout policy ({mode} mode): importance weights would count "
            f"it twice. Leave out is_level={preset.is_level!r}; rejection (rs) may stay"
        )
    looks_at_old = loss in to_behavior | to_old | {"dro"}  # dro: a penalty, no ratio
    if not preset.corrects and (mode == "decoupled" or (mode == "bypass" and not looks_at_old)):
        raise ValueError(f"{mode} mode with loss {loss} corrects nothing: set is_level or rs, or use preset 'disabled'")


# verl's ±0.1 % on the mean of a row: of rows whose T log-ratios scatter by σ, erf(0.001·√(T/2)/σ) stay. With σ = 0.01
# that is 99.8 % of 1,000 tokens and 31 % of 16, so it is for long answers and engines that agree; (0.99, 1.01) is not
_GEO, _K3, _ICEPOP = {"seq_mean_k1": (0.999, 1.001)}, {"seq_mean_k3": 0.01}, (0.5, 5.0)
_decoupled = partial(CorrectionPreset, "decoupled")
_bypass_ppo = partial(CorrectionPreset, "bypass", loss="ppo_clip")
_bypass_pg = partial(CorrectionPreset, "bypass", loss="reinforce")

PRESETS: dict[str, CorrectionPreset] = {
    "decoupled_token_is": _decoupled("token"),
    "decoupled_seq_is": _decoupled("sequence"),
    "decoupled_token_icepop": _decoupled("token", _ICEPOP),
    "decoupled_seq_is_rs": _decoupled("sequence", rs={"seq_sum_k1": (0.5, 2.0)}),
    "decoupled_geo_rs": _decoupled(rs=_GEO),
    "decoupled_geo_rs_seq_tis": _decoupled("sequence", rs=_GEO),
    "decoupled_geo_rs_token_tis": _decoupled("token", rs=_GEO),
    "decoupled_k3_rs": _decoupled(rs=_K3),
    "decoupled_k3_rs_seq_tis": _decoupled("sequence", rs=_K3),
    "decoupled_k3_rs_token_tis": _decoupled("token", rs=_K3),
    "bypass_ppo_clip": _bypass_ppo(),
    "bypass_ppo_clip_geo_rs": _bypass_ppo(rs=_GEO),
    "bypass_ppo_clip_k3_rs": _bypass_ppo(rs=_K3),
    "bypass_pg_is": _bypass_pg("sequence"),
    "bypass_pg_token_icepop": _bypass_pg("token", _ICEPOP),
    "bypass_pg_geo_rs": _bypass_pg(rs=_GEO),
    "bypass_pg_geo_rs_seq_tis": _bypass_pg("sequence", rs=_GEO),
    "bypass_pg_geo_rs_token_tis": _bypass_pg("token", rs=_GEO),
    "disabled": CorrectionPreset(),
}
