"""Table of corrections: units, rejection modes, presets, and their valid combinations with losses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

from slipstream.estimators.options import formula, unknown
from slipstream.estimators.tables.policy import Ratio
from slipstream.scope import Scope

Unit = Literal["token", "sequence", "geometric", "prefix_min", "cumulative", "turn"]
"""Unit over which token ratios are multiplied to one weight: see `ratio.importance_ratio`."""
Threshold = float | tuple[float, float]
"""Bounds of importance weights: one number truncates from above, a pair is a band."""

RATIO_UNITS = get_args(Unit)
ONE_PER_ROW = frozenset({"sequence", "geometric"})
"""Units with the same ratio at every token of a row."""
CTPO_CLIP = 0.05
"""Bound c of ±c√t: the upper bound in the authors' released recipe (their lower bound is 0.025)."""

Bounds = Mapping[str, Threshold]
"""Bounds by rejection mode. A token or row that fails any mode is rejected."""

RS_MODES = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
    *("seq_max_kl", "negative_seq"),
)
PART_SCOPES: dict[str, Scope] = {
    part: "token" if part.startswith("token") else "row" for part in (*RATIO_UNITS, *RS_MODES)
}
PART_SCOPES["is_normalize"] = "batch"


def checked(
    is_level: str | None, is_threshold: Threshold, is_normalize: bool, rs: Bounds | None
) -> tuple[Threshold, dict[str, tuple[float, float]]]:
    """Return the threshold and for each mode the interval of its statistic. Raise a ValueError for invalid settings."""
    if is_level is not None and is_level not in RATIO_UNITS:
        raise unknown("is_level", str(is_level), RATIO_UNITS)
    if is_normalize and is_level is None:
        raise ValueError('is_normalize has no weights to normalise: set is_level, for example is_level = "token"')
    if not isinstance(rs, Mapping | None):
        raise ValueError(
            f"rs must be a dict of mode: bound, got {rs!r}; for example rs = {{ seq_mean_k1 = [0.5, 2.0] }}"
        )
    threshold = _bound("is_threshold", is_threshold, pair=True, above=0, example="2.0 or [0.5, 5.0]")
    intervals = dict[str, tuple[float, float]]()
    for mode, value in (rs or {}).items():
        if mode not in RS_MODES:
            raise unknown("rejection mode", str(mode), RS_MODES)
        k1 = mode.endswith("k1")
        example = f"rs = {{ {mode} = {'[0.5, 2.0]' if k1 else '0.01'} }}"
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
    expected = f"one number above {above}" + (" or a pair [low, high] with 0 < low < high" if pair else "")
    raise ValueError(f"{name} must be {expected}, got {value!r}; for example {example}")


def _positive(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf


@dataclass(frozen=True)
class CorrectionPreset:
    """Settings of a correction, and the policy loss that it is for (None: any). `mode` None: only metrics."""

    mode: Literal["decoupled", "bypass"] | None = None
    is_level: Unit | None = None
    is_threshold: Threshold = 2.0
    is_normalize: bool = False
    rs: Bounds | None = None
    loss: Literal["ppo_clip", "reinforce"] | None = None
    ctpo_clip: float = CTPO_CLIP
    verl_compat: bool = False

    def __post_init__(self) -> None:
        checked(self.is_level, self.is_threshold, self.is_normalize, self.rs)
        if self.mode not in ("decoupled", "bypass", None):
            raise unknown("correction mode", str(self.mode), ("decoupled", "bypass"))
        if self.loss not in (*LOSSES_OF, None):
            raise unknown("loss of a correction", str(self.loss), LOSSES_OF)
        if self.mode is None and self.corrects:
            raise ValueError(
                "importance weights and rejection need a mode: choose a preset 'decoupled_…' or 'bypass_…'"
            )

    @property
    def corrects(self) -> bool:
        return self.is_level is not None or bool(self.rs)

    def rejects(self, mode: str) -> bool:
        return mode in (self.rs or {})

    @property
    def scope(self) -> Scope:
        """Return the widest scope among level, rejection modes and normalisation."""
        parts = [*(self.rs or ()), *([self.is_level] if self.is_level else []), *["is_normalize"] * self.is_normalize]
        return max((PART_SCOPES[part] for part in parts), key=("token", "row", "batch").index, default="token")

    def apply(self, *tensors: Any, **evidence: Any) -> Any:
        """Call `correction.correct` with these settings. `evidence` can be `turns`, `kl`, `advantages`, `current`."""
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("mode", "loss")}
        return formula("correction.correct")(*tensors, **settings, **evidence)


LOSSES_OF = {"ppo_clip": ("vanilla",), "reinforce": ("reinforce", "gpg")}
"""Policy losses that are valid for each value of `loss` of a preset."""
DISTILLATION_RATIOS: dict[str, Ratio] = dict.fromkeys(("reverse_kl_mc", "decoupled_ppo", "m2po"), "behavior")
"""Ratios of the distillation losses that have one."""


def check_combination(loss: str, preset: CorrectionPreset, *, ratio: Ratio) -> None:
    """Raise a ValueError for a correction without effect, or one that counts a ratio twice. Guarantor of invariant 7.

    `ratio` is that of the loss: see `tables.policy` and `DISTILLATION_RATIOS`.
    """
    mode = preset.mode
    if preset.loss is not None and loss not in LOSSES_OF[preset.loss]:
        raise ValueError(f"this correction is meant for loss {' or '.join(LOSSES_OF[preset.loss])}, not {loss}")
    if preset.is_level and (ratio == "behavior" or (mode == "bypass" and ratio == "old")):
        raise ValueError(
            f"loss {loss} already holds the ratio to the rollout policy ({mode} mode): importance weights would count "
            "it twice. Drop is_level, or the preset that has it; rejection (rs) may stay"
        )
    if not preset.corrects and (mode == "decoupled" or (mode == "bypass" and ratio == "none")):
        raise ValueError(f"{mode} mode with loss {loss} corrects nothing: set is_level or rs, or use preset 'disabled'")


# verl's ±0.1 % on the mean of a row keeps a share erf(0.001·√(T/2)/σ) of rows with T log-ratios of deviation σ.
# For σ = 0.01 this is 99.8 % at 1,000 tokens and 31 % at 16: use these bounds for long answers and similar engines.
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
