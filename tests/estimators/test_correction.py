"""Rollout correction: verl's weights and masks, where ours differs on purpose, laws of rejection, presets, failures."""

import json
import math
import tomllib
from math import exp, inf, log, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.estimators.correction import Correction, correct
from slipstream.estimators.numerics import aggregate
from slipstream.estimators.tables.correction import (
    DISTILLATION_RATIOS,
    PART_SCOPES,
    PRESETS,
    RS_MODES,
    CorrectionPreset,
    check_combination,
)
from slipstream.estimators.tables.policy import POLICY_ALIASES, POLICY_LOSSES, Ratio, find_loss

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures" / "verl_vectors.json").read_text())
CASES = [case for case in GOLDEN["cases"] if case["fn"] == "correct"]
LEVELS = ("token", "sequence", "geometric", "prefix_min", "cumulative", "turn")


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def on_golden(**options: Any) -> Correction:
    old, rollout, mask = (tensor(GOLDEN["inputs"][name]) for name in ("logp_old", "logp_rollout", "mask"))
    return correct(old, rollout, mask, **options)


def batch(seed: int, rows: int = 6, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and a mask with holes; row 1 is empty."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    old = rollout + torch.randn(rows, width, generator=generator, dtype=torch.float64) * 0.3
    mask = torch.rand(rows, width, generator=generator) < 0.8
    mask[1], mask[0, 0] = False, True
    return old, rollout, mask


def evidence(mask: Tensor) -> dict[str, Tensor]:
    """Return the inputs that some modes need besides log-probs."""
    generator = torch.Generator().manual_seed(7)
    shape = mask.shape
    return {
        "turns": torch.arange(shape[1]).expand(shape) // 2,
        "kl": torch.rand(shape, generator=generator, dtype=torch.float64) / 10,
        "advantages": torch.randn(shape[0], 1, generator=generator, dtype=torch.float64).expand(shape),
        "current": -2 * torch.rand(shape, generator=generator, dtype=torch.float64),
    }


def bound_of(mode: str) -> Any:
    return (0.8, 1.2) if mode.endswith("k1") else 0.05


# --- verl -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case["args"]))
def test_as_verl(case: dict[str, Any]) -> None:
    """Weights, masks and every metric that verl has as well; its means carry 1e-8 in the count, some are float32."""
    found = on_golden(**case["args"])
    assert torch.equal(found.mask, tensor(case["mask"]))
    if "weights" in case:
        assert found.weights is not None
        torch.testing.assert_close(found.weights, tensor(case["weights"]), atol=1e-8, rtol=0)
    verl = {name.removeprefix("rollout_corr/"): value for name, value in case["verl_metrics"].items()}
    verl["ess"] = verl.get("rollout_is_eff_sample_size")
    if case["args"].get("is_level") == "sequence":
        del verl["rollout_is_max"]  # see the next test
    if "is_level" not in case["args"]:
        del verl["ess"]
    shared = found.metrics.keys() & verl.keys()
    assert len(shared) >= 4
    for name in shared:
        assert found.metrics[name] == pytest.approx(verl[name], abs=3e-8), name


def test_the_largest_weight_is_of_truncated_weights_also_for_sequences() -> None:
    """verl logs the largest sequence ratio before truncation, but the largest token weight after."""
    (case,) = [
        case for case in CASES if case["args"].get("is_threshold") == 2.0 and "sequence" in case["args"].values()
    ]
    verl = case["verl_metrics"]["rollout_corr/rollout_is_max"]
    assert verl == pytest.approx(4.2267, abs=1e-4)
    assert on_golden(is_level="sequence").metrics["rollout_is_max"] == 2.0


# Ratios of a row as given, as log-probs: rollout's is −1 everywhere
def row(*ratios: float) -> tuple[Tensor, Tensor, Tensor]:
    delta = tensor([ratios]).log()
    return delta - 1, torch.full_like(delta, -1), torch.ones_like(delta)


@pytest.mark.parametrize(
    ("mode", "ratios", "bound", "kept", "kept_by_verl"),
    [
        # verl keeps what lies in [1/4, 1/0.5]
        ("token_k1", (0.3, 3.0, 1.0), (0.5, 4.0), [0, 1, 1], [1, 0, 1]),
        ("seq_sum_k1", (1.5, 2.0), (0.5, 4.0), [1, 1], [0, 0]),  # product 3
        ("seq_mean_k1", (0.2, 0.45), (0.5, 4.0), [0, 0], [1, 1]),  # geometric mean 0.3
        # reciprocal bounds have no sign
        ("token_k1", (0.3, 3.0, 1.0), 2.0, [0, 0, 1], [0, 0, 1]),
        ("token_k1", (0.6, 1.9, 1.0), (0.5, 2.0), [1, 1, 1], [1, 1, 1]),
    ],
)
def test_k1_bounds_are_ratios_unless_verl_is_asked_for(
    mode: str, ratios: tuple[float, ...], bound: Any, kept: list[int], kept_by_verl: list[int]
) -> None:
    old, rollout, mask = row(*ratios)
    assert correct(old, rollout, mask, rs={mode: bound}).mask.tolist() == [kept]
    assert correct(old, rollout, mask, rs={mode: bound}, verl_compat=True).mask.tolist() == [kept_by_verl]
    preset = CorrectionPreset("decoupled", rs={mode: bound}, verl_compat=True)
    assert preset.apply(old, rollout, mask).mask.tolist() == [kept_by_verl]


def test_verl_compat_concerns_k1_only() -> None:
    old, rollout, mask = row(0.3, 3.0, 1.0)
    for mode in ("token_k2", "token_k3", "seq_max_k3"):
        same = [correct(old, rollout, mask, rs={mode: 0.5}, verl_compat=compat).mask for compat in (False, True)]
        assert torch.equal(*same)


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "threshold", "normalize", "expected"),
    [
        # ρ = 2, ½ | 4, (masked) | 1, ½
        ("token", 3.0, False, [2, 0.5, 3, 0, 1, 0.5]),
        ("token", (0.6, 3.0), False, [2, 0, 0, 0, 1, 0]),
        ("token", 3.0, True, [x / 1.4 for x in (2, 0.5, 3, 0, 1, 0.5)]),  # (2 + ½ + 3 + 1 + ½) / 5
        # products 1 | 4 | ½; the mean over rows, (1 + 3 + ½) / 3, not over tokens
        ("sequence", 3.0, False, [1, 1, 3, 0, 0.5, 0.5]),
        ("sequence", 3.0, True, [x / 1.5 for x in (1, 1, 3, 0, 0.5, 0.5)]),
        ("geometric", 3.0, False, [1, 1, 3, 0, 0.5**0.5, 0.5**0.5]),
        # before the second token: 2 and 1
        ("prefix_min", 3.0, False, [2, 1, 3, 0, 1, 0.5]),
        ("turn", 3.0, False, [1, 1, 3, 0, 0.5, 0.5]),
    ],
)
def test_weights_of_six_tokens_by_hand(level: Any, threshold: Any, normalize: bool, expected: list[float]) -> None:
    delta = tensor([[2, 0.5], [4, nan], [1, 0.5]]).log()
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    turns = torch.zeros_like(mask)
    found = correct(
        delta - 9,
        torch.full_like(delta, -9),
        mask,
        is_level=level,
        is_threshold=threshold,
        is_normalize=normalize,
        turns=turns,
    )
    torch.testing.assert_close(found.weights, tensor(expected).reshape(3, 2))
    assert torch.equal(found.mask, mask)


def test_every_statistic_by_hand() -> None:
    """ρ = 2, ½: Δ = ±ln 2. Bounds a hair above and below the statistic keep and reject."""
    ln2, old_rollout_mask = log(2), row(2, 0.5)
    k3 = [2 - 1 - ln2, 0.5 - 1 + ln2]
    statistics = {
        "token_k2": ln2**2 / 2,
        "seq_sum_k2": ln2**2,
        "seq_mean_k2": ln2**2 / 2,
        "seq_max_k2": ln2**2 / 2,
        "seq_sum_k3": sum(k3),
        "seq_mean_k3": sum(k3) / 2,
        "seq_max_k3": k3[0],
    }
    for mode, value in statistics.items():
        assert correct(*old_rollout_mask, rs={mode: value * 1.001}).mask.sum() == 2, mode
        assert correct(*old_rollout_mask, rs={mode: value * 0.999}).mask.sum() == 0, mode
    assert correct(*old_rollout_mask, rs={"token_k3": 0.25}).mask.tolist() == [[0, 1]]  # 0.307 and 0.193


def test_trust_region_masking_takes_the_given_kl_and_no_estimate() -> None:
    old, rollout, _ = batch(0, rows=3, width=2)
    kl, mask = tensor([[0.1, 0.01], [0.01, nan], [0.01, 0.02]]), torch.tensor([[1, 1], [1, 0], [1, 1]])
    assert correct(old, rollout, mask, rs={"seq_max_kl": 0.05}, kl=kl).mask.tolist() == [[0, 0], [1, 0], [1, 1]]
    kl[2, 0] = inf  # not known: not within the region
    assert correct(old, rollout, mask, rs={"seq_max_kl": 0.05}, kl=kl).mask.tolist() == [[0, 0], [1, 0], [0, 0]]
    with pytest.raises(ValueError, match="'seq_max_kl' needs the KL .* kl=kl_BT, or take 'seq_max_k3', its estimate"):
        correct(old, rollout, mask, rs={"seq_max_kl": 0.05})


def test_negative_rows_that_drifted_are_rejected() -> None:
    """Mean log π_rollout − log π_θ is 0.2, 0.2, −0.2: only a bad row with positive drift beyond 0.1 goes."""
    drift, advantage = tensor([0.2, 0.2, -0.2])[:, None], tensor([-1.0, 1.0, -1.0])[:, None]
    current, advantages = (drift * -1 - 3).expand(3, 2), advantage.expand(3, 2)
    rollout, mask = torch.full_like(current, -3), torch.ones(3, 2)
    for old in (current, rollout):  # bypass, and decoupled with engines that agree
        found = correct(old, rollout, mask, rs={"negative_seq": 0.1}, advantages=advantages, current=current)
        assert found.mask[:, 0].tolist() == [0, 1, 1]
        kept = correct(old, rollout, mask, rs={"negative_seq": 0.3}, advantages=advantages, current=current)
        assert kept.mask.all()
    needed = {"advantages": advantages, "current": current}
    for missing in needed:
        given = {name: value for name, value in needed.items() if name != missing}
        with pytest.raises(ValueError, match="'negative_seq' needs .*advantages=advantages_BT, current=logp_BT"):
            correct(rollout, rollout, mask, rs={"negative_seq": 0.1}, **given)


def test_metrics_of_rejection_by_hand() -> None:
    """Rows ρ = (1, 3) and (1, 1) and an empty one: one of four tokens, one of two rows."""
    delta = tensor([[1, 3], [1, 1], [nan, nan]]).log()
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    rs = {"token_k1": 2.0, "seq_sum_k1": 2.0}
    found = correct(delta - 2, torch.full_like(delta, -2), mask, rs=rs)
    assert found.weights is None and found.mask.tolist() == [[0, 0], [1, 1], [0, 0]]
    assert found.metrics == {
        "rollout_rs_token_k1_masked_fraction": 0.25,
        "rollout_rs_token_k1_seq_masked_fraction": 0.5,
        "rollout_rs_seq_sum_k1_masked_fraction": 0.5,
        "rollout_rs_seq_sum_k1_seq_masked_fraction": 0.5,
        "rollout_rs_masked_fraction": 0.5,
        "rollout_rs_seq_masked_fraction": 0.5,
        "ess": 1.0,  # ρ of what is left
    }


# --- laws -------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1000))
def test_equal_policies_need_no_correction(seed: int) -> None:
    old, _, mask = batch(seed)
    tiny = {mode: (0.999, 1.001) if mode.endswith("k1") else 1e-9 for mode in RS_MODES}
    same = evidence(mask) | {"kl": torch.zeros_like(old), "current": old}
    for level in LEVELS:
        found = correct(old, old, mask, is_level=level, is_normalize=True, rs=tiny, **same)  # type: ignore[arg-type]
        assert torch.equal(found.mask, mask) and found.weights is not None
        torch.testing.assert_close(found.weights, mask.double())
        assert found.metrics["ess"] == pytest.approx(1)


@given(seed=st.integers(0, 1000), first=st.sampled_from(RS_MODES), second=st.sampled_from(RS_MODES))
def test_several_modes_are_their_conjunction(seed: int, first: str, second: str) -> None:
    old, rollout, mask = batch(seed)
    one, two, both = (
        correct(old, rollout, mask, rs={mode: bound_of(mode) for mode in modes}, **evidence(mask)).mask
        for modes in ([first], [second], [first, second])
    )
    assert torch.equal(both, one & two)


@given(seed=st.integers(0, 1000), mode=st.sampled_from(RS_MODES), factor=st.floats(1.01, 10))
def test_a_wider_bound_keeps_more_and_never_revives_a_masked_token(seed: int, mode: str, factor: float) -> None:
    old, rollout, mask = batch(seed)
    tight = bound_of(mode)
    wide = (tight[0] / factor, tight[1] * factor) if isinstance(tight, tuple) else tight * factor
    small, large = (correct(old, rollout, mask, rs={mode: b}, **evidence(mask)).mask for b in (tight, wide))
    assert (small <= large).all() and (large <= mask).all()
    if not mode.startswith("token"):
        assert ((small == mask).all(-1) | ~small.any(-1)).all()  # whole rows


@given(seed=st.integers(0, 1000), level=st.sampled_from(LEVELS), normalize=st.booleans())
def test_rejected_rows_leave_no_trace(seed: int, level: Any, normalize: bool) -> None:
    """Weights, their mean and the metrics are those of a batch in which the rejected rows never were (invariant 6)."""
    old, rollout, mask = batch(seed)
    options = {"is_level": level, "is_threshold": 1.2, "is_normalize": normalize, "turns": evidence(mask)["turns"]}
    found = correct(old, rollout, mask, rs={"seq_mean_k1": (0.8, 1.1)}, **options)
    alone = correct(old, rollout, found.mask, **options)
    assert torch.equal(found.mask, alone.mask) and found.weights is not None and alone.weights is not None
    torch.testing.assert_close(found.weights, alone.weights)
    for name, value in alone.metrics.items():
        assert "rollout_rs" in name or found.metrics[name] == pytest.approx(value), name


@given(seed=st.integers(0, 1000))
def test_order_of_rows_and_masked_junk_are_of_no_interest(seed: int) -> None:
    old, rollout, mask = batch(seed)
    rs = {mode: bound_of(mode) for mode in ("token_k3", "seq_mean_k1")}
    plain = correct(old, rollout, mask, is_level="sequence", is_normalize=True, rs=rs)
    flipped = correct(
        *(old.masked_fill(~mask, nan).flip(0), rollout.masked_fill(~mask, -inf).flip(0), mask.flip(0)),
        is_level="sequence",
        is_normalize=True,
        rs=rs,
    )
    assert torch.equal(flipped.mask.flip(0), plain.mask) and plain.weights is not None and flipped.weights is not None
    torch.testing.assert_close(flipped.weights.flip(0), plain.weights)
    assert flipped.metrics == pytest.approx(plain.metrics)


def test_the_result_is_constant_for_autograd() -> None:
    old, rollout, mask = batch(0)
    found = correct(old.requires_grad_(), rollout, mask, is_level="token", rs={"token_k3": 0.1})
    assert found.weights is not None and not found.weights.requires_grad and not found.mask.requires_grad


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_the_mask_keeps_its_dtype(dtype: torch.dtype) -> None:
    old, rollout, mask = batch(0)
    found = correct(old.bfloat16(), rollout.bfloat16(), mask.to(dtype), is_level="token", rs={"token_k3": 0.1})
    assert found.mask.dtype == dtype and found.weights is not None and found.weights.dtype == torch.float32


# --- scope ------------------------------------------------------------------------------------------------------------


def pieces(preset: CorrectionPreset, cut: int, dim: int) -> tuple[Tensor, Tensor]:
    """Masks and weights of a batch that is cut into pieces of `cut` rows (dim 0) or positions (dim 1) first."""
    old, rollout, mask = batch(3)
    given = {"old": old, "rollout": rollout, "mask": mask, **evidence(mask)}
    split = {name: x.split(cut, dim) for name, x in given.items()}
    found = []
    for at in range(len(split["mask"])):
        part = {name: x[at] for name, x in split.items()}
        found.append(preset.apply(part.pop("old"), part.pop("rollout"), part.pop("mask"), **part))
    weights = [each.mask.double() if each.weights is None else each.weights for each in found]
    return torch.cat([each.mask for each in found], dim), torch.cat(weights, dim)


def unchanged(preset: CorrectionPreset, cut: int, dim: int) -> bool:
    whole, parts = pieces(preset, 99, 0), pieces(preset, cut, dim)
    return torch.equal(whole[0], parts[0]) and torch.allclose(whole[1], parts[1], rtol=1e-12)


BY_PART = {
    **{level: CorrectionPreset("decoupled", level, is_threshold=9.0) for level in LEVELS},  # type: ignore[arg-type]
    **{mode: CorrectionPreset("decoupled", rs={mode: bound_of(mode)}) for mode in RS_MODES},
    "is_normalize": CorrectionPreset("decoupled", "token", is_normalize=True),
}


@pytest.mark.parametrize("part", sorted(PART_SCOPES))
def test_scope_is_what_it_says(part: str) -> None:
    """Token scope survives every cut, row scope every cut between rows, batch scope none; and no less."""
    preset = BY_PART[part]
    assert preset.scope == PART_SCOPES[part]
    between_rows = all(unchanged(preset, cut, dim=0) for cut in (1, 2, 4))
    inside_rows = all(unchanged(preset, cut, dim=1) for cut in (1, 2, 3))
    assert (between_rows, inside_rows) == {"token": (True, True), "row": (True, False), "batch": (False, False)}[
        preset.scope
    ]


def test_the_scope_of_a_preset_is_that_of_its_widest_part() -> None:
    assert PRESETS["decoupled_token_is"].scope == "token"
    assert PRESETS["decoupled_geo_rs_token_tis"].scope == "row"
    assert CorrectionPreset("decoupled", "token", is_normalize=True, rs={"seq_sum_k2": 1.0}).scope == "batch"
    assert PRESETS["disabled"].scope == "token"


def test_a_frozen_correction_of_a_batch_may_be_cut_anywhere() -> None:
    """Batch scope in practice: correct the whole batch once, then sum losses over parts with its counts."""
    old, rollout, mask = batch(5)
    loss = batch(6)[0]
    found = correct(old, rollout, mask, is_level="sequence", is_normalize=True, rs={"token_k2": 0.1})
    weighted, kept = loss * found.weights, found.mask
    counts = {"n_tokens": float(kept.sum()), "n_sequences": float(kept.any(-1).sum())}
    whole = aggregate(weighted, kept, "seq-mean-token-sum")
    for cut, dim in ((1, 0), (4, 0), (2, 1), (3, 1)):
        parts = [
            aggregate(part, part_mask, "seq-mean-token-sum", **counts)
            for part, part_mask in zip(weighted.split(cut, dim), kept.split(cut, dim), strict=True)
        ]
        torch.testing.assert_close(torch.stack(parts).sum(), whole)


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("level", LEVELS)
def test_impossible_and_certain_tokens_stay_finite(dtype: torch.dtype, level: Any) -> None:
    old = torch.tensor([[-inf, 0.0, -1e4], [-inf, -inf, nan], [nan, nan, nan]], dtype=dtype)
    rollout = torch.tensor([[0.0, -inf, -1e4], [-inf, 0.0, nan], [nan, nan, nan]], dtype=dtype)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    for modes in ((), *((mode,) for mode in RS_MODES)):
        rs = {mode: (1e-9, 1e9) if mode.endswith("k1") else 1e9 for mode in modes}
        for normalize in (False, True):
            found = correct(
                *(old, rollout, mask),
                is_level=level,
                is_threshold=1e9,
                is_normalize=normalize,
                rs=rs,
                turns=torch.zeros(3, 3, dtype=torch.long),
                advantages=torch.ones(3, 3),
                kl=torch.zeros(3, 3),
                current=old,
            )
            assert found.weights is not None and found.weights.isfinite().all()
            assert all(math.isfinite(value) for value in found.metrics.values())


@pytest.mark.parametrize("options", [{}, {"is_normalize": True}, {"is_threshold": (0.5, 2.0), "is_normalize": True}])
def test_nothing_valid_and_everything_rejected_are_zeros(options: dict[str, Any]) -> None:
    old, rollout, mask = batch(0)
    empty = correct(old, rollout, torch.zeros_like(mask), is_level="sequence", **options)
    gone = correct(old - 9, rollout, mask, is_level="sequence", rs={"seq_max_k2": 0.1}, **options)
    outside = correct(old - 9, rollout, mask, is_level="sequence", is_threshold=(0.5, 2.0), is_normalize=True)
    for found in (empty, gone, outside):
        assert found.weights is not None and not found.weights.any()
        assert all(math.isfinite(value) for value in found.metrics.values()) and found.metrics["ess"] == 0
    assert not empty.mask.any() and not gone.mask.any() and torch.equal(outside.mask, mask)
    assert gone.metrics["rollout_rs_masked_fraction"] == 1 and empty.metrics["rollout_rs_masked_fraction"] == 0


def test_a_huge_ratio_is_bounded_by_e_to_the_20() -> None:
    old, rollout, mask = torch.zeros(1, 2), torch.full((1, 2), -1e4), torch.ones(1, 2)
    for level in ("token", "sequence"):
        found = correct(old, rollout, mask, is_level=level, is_threshold=1e12)  # type: ignore[arg-type]
        assert found.metrics["rollout_is_max"] == pytest.approx(exp(20))


# --- presets ----------------------------------------------------------------------------------------------------------

GEO, K3, BAND = {"seq_mean_k1": (0.999, 1.001)}, {"seq_mean_k3": 0.01}, (0.5, 5.0)
TABLE = {
    # name: mode, level, threshold, rs, loss
    "decoupled_token_is": ("decoupled", "token", 2.0, None, None),
    "decoupled_seq_is": ("decoupled", "sequence", 2.0, None, None),
    "decoupled_token_icepop": ("decoupled", "token", BAND, None, None),
    "decoupled_seq_is_rs": ("decoupled", "sequence", 2.0, {"seq_sum_k1": (0.5, 2.0)}, None),
    "decoupled_geo_rs": ("decoupled", None, 2.0, GEO, None),
    "decoupled_geo_rs_seq_tis": ("decoupled", "sequence", 2.0, GEO, None),
    "decoupled_geo_rs_token_tis": ("decoupled", "token", 2.0, GEO, None),
    "decoupled_k3_rs": ("decoupled", None, 2.0, K3, None),
    "decoupled_k3_rs_seq_tis": ("decoupled", "sequence", 2.0, K3, None),
    "decoupled_k3_rs_token_tis": ("decoupled", "token", 2.0, K3, None),
    "bypass_ppo_clip": ("bypass", None, 2.0, None, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": ("bypass", None, 2.0, GEO, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": ("bypass", None, 2.0, K3, "ppo_clip"),
    "bypass_pg_is": ("bypass", "sequence", 2.0, None, "reinforce"),
    "bypass_pg_token_icepop": ("bypass", "token", BAND, None, "reinforce"),
    "bypass_pg_geo_rs": ("bypass", None, 2.0, GEO, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("bypass", "sequence", 2.0, GEO, "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("bypass", "token", 2.0, GEO, "reinforce"),
    "disabled": (None, None, 2.0, None, None),
}


def test_the_presets_are_the_table() -> None:
    found = {name: (p.mode, p.is_level, p.is_threshold, p.rs, p.loss) for name, p in PRESETS.items()}
    assert found == TABLE and len(found) == 19
    assert not any(p.is_normalize or p.verl_compat for p in PRESETS.values())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_correct_with_its_settings(name: str) -> None:
    old, rollout, mask = batch(1)
    _, level, threshold, rs, _ = TABLE[name]
    found = PRESETS[name].apply(old, rollout, mask)
    expected = correct(old, rollout, mask, is_level=level, is_threshold=threshold, rs=rs)  # type: ignore[arg-type]
    assert torch.equal(found.mask, expected.mask) and found.metrics == expected.metrics
    assert (found.weights is None) == (level is None)
    if name == "disabled":
        assert torch.equal(found.mask, mask) and found.metrics["rollout_rs_masked_fraction"] == 0


@pytest.mark.parametrize(("tokens", "scatter"), [(16, 0.01), (1000, 0.01), (1000, 0.05), (10_000, 0.05)])
def test_the_geometric_presets_are_for_long_answers(tokens: int, scatter: float) -> None:
    """Rows whose log-ratios scatter by σ around 0 are kept with erf(0.001·√(T/2)/σ): 31, 99.8, 47 and 95 %."""
    noise = torch.randn(400, tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rollout = torch.full_like(noise, -3)
    kept = PRESETS["decoupled_geo_rs"].apply(rollout + scatter * noise, rollout, torch.ones_like(noise)).mask[:, 0]
    assert kept.mean().item() == pytest.approx(math.erf(0.001 * math.sqrt(tokens / 2) / scatter), abs=0.06)


WITH_RATIO_TO_OLD = sorted(
    {"geo_mean", *(name for name, row in POLICY_LOSSES.items() if row.ratio == "old")} - {"m2po"}
)
WITH_RATIO_TO_BEHAVIOR = sorted({*DISTILLATION_RATIOS, "a3po"})


def ratio_of(loss: str) -> Ratio:
    """Return the ratio of a distillation loss, or of a policy loss whose name no distillation loss has."""
    return (
        find_loss(loss).ratio
        if loss in {*POLICY_LOSSES, *POLICY_ALIASES} - {*DISTILLATION_RATIOS}
        else DISTILLATION_RATIOS.get(loss, "none")
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_goes_with_the_loss_it_is_meant_for(name: str) -> None:
    loss = "reinforce" if PRESETS[name].loss == "reinforce" else "vanilla"
    check_combination(loss, PRESETS[name], ratio=ratio_of(loss))


@pytest.mark.parametrize(
    ("loss", "preset", "message"),
    [
        *((loss, CorrectionPreset("bypass", "token"), "twice. Drop is_level") for loss in WITH_RATIO_TO_OLD),
        *((loss, PRESETS["decoupled_seq_is"], "twice.*rejection.*may stay") for loss in WITH_RATIO_TO_BEHAVIOR),
        ("vanilla", PRESETS["bypass_pg_is"], "meant for loss reinforce or gpg, not vanilla"),
        ("gspo", PRESETS["bypass_ppo_clip"], "meant for loss vanilla, not gspo"),
        ("vanilla", CorrectionPreset("decoupled"), "decoupled mode with loss vanilla corrects nothing"),
        ("reinforce", CorrectionPreset("bypass"), "bypass mode with loss reinforce corrects nothing"),
        ("forward_kl", CorrectionPreset("bypass"), "corrects nothing.*'disabled'"),
    ],
)
def test_corrections_that_count_twice_or_do_nothing_are_refused(
    loss: str, preset: CorrectionPreset, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_combination(loss, preset, ratio=ratio_of(loss))


@pytest.mark.parametrize(
    ("loss", "preset"),
    [
        ("reverse_kl_mc", PRESETS["decoupled_geo_rs"]),  # rejection does not touch the ratio
        ("reverse_kl_mc", PRESETS["disabled"]),
        ("gspo", PRESETS["decoupled_token_is"]),  # its ratio starts at old, the weight ends there
        ("gspo", CorrectionPreset("bypass", rs=GEO)),
        ("gspo", CorrectionPreset("bypass")),
        ("gpg", PRESETS["bypass_pg_is"]),
        ("forward_kl", PRESETS["decoupled_token_is"]),
        ("dro", CorrectionPreset("bypass")),  # pulls back to the policy that drew
        ("dro", CorrectionPreset("bypass", "token")),
    ],
)
def test_corrections_that_count_once_are_accepted(loss: str, preset: CorrectionPreset) -> None:
    check_combination(loss, preset, ratio=ratio_of(loss))


def test_every_policy_loss_is_known_to_hold_a_ratio_or_not() -> None:
    ratios = {name: row.ratio for name, row in POLICY_LOSSES.items() if row.ratio != "old"}
    assert ratios == {
        "reinforce": "none",
        "gpg": "none",
        "dro": "penalty",
        "decoupled_ppo": "behavior",
        "a3po": "behavior",
    }
    assert find_loss("m2po").ratio == "old", "unlike the distillation loss of this name"


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", RS_MODES)
@pytest.mark.parametrize(
    "bound", [0, -0.1, nan, inf, "0.5_2.0", None, True, (2.0, 0.5), (0.5, 0.5), (0, 2), (0.5, nan), (1.5,)]
)
def test_wrong_bounds_name_the_mode_and_show_a_right_one(mode: str, bound: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"rs\['{mode}'\] must be one number.*for example rs = {{ {mode} = .* }}"
    ) as error:
        CorrectionPreset("decoupled", rs={mode: bound})
    assert repr(bound) in str(error.value)
    example = tomllib.loads(str(error.value).split("for example ")[1])
    CorrectionPreset("decoupled", **example)


def test_a_pair_where_one_number_is_needed_and_a_number_that_is_no_interval() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"rs\['seq_mean_k3'\] must be one number above 0, got \(0.5, 2.0\)"):
        correct(x, x, x, rs={"seq_mean_k3": (0.5, 2.0)})
    with pytest.raises(ValueError, match=r"rs\['token_k1'\] must be one number above 1 or a pair .*, got 0.5"):
        correct(x, x, x, rs={"token_k1": 0.5})


@pytest.mark.parametrize("threshold", [0, -2.0, nan, (5.0, 0.5), [0.5], "2.0", None, False])
def test_wrong_thresholds_are_refused(threshold: Any) -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(
        ValueError, match=r"is_threshold must be one number above 0 or a pair .*example 2.0 or \[0.5, 5.0\]"
    ):
        correct(x, x, x, is_level="token", is_threshold=threshold)


def test_a_list_is_as_good_as_a_tuple() -> None:
    old, rollout, mask = batch(0)
    lists = correct(old, rollout, mask, is_level="token", is_threshold=[0.8, 1.2], rs={"token_k1": [0.8, 1.2]})  # type: ignore[arg-type, dict-item]
    tuples = correct(old, rollout, mask, is_level="token", is_threshold=(0.8, 1.2), rs={"token_k1": (0.8, 1.2)})
    assert lists.weights is not None and tuples.weights is not None
    assert torch.equal(lists.weights, tuples.weights) and torch.equal(lists.mask, tuples.mask)


def test_wrong_names_and_kinds_are_refused() -> None:
    x, ones = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"unknown rejection mode 'seq_max_k1'.*did you mean 'seq_max_k"):
        correct(x, x, ones, rs={"seq_max_k1": 2.0})
    with pytest.raises(ValueError, match=r"rs must be a dict of mode: bound, got 'seq_mean_k1'"):
        correct(x, x, ones, rs="seq_mean_k1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown is_level 'seq'.*sequence"):
        correct(x, x, ones, is_level="seq")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'is_normalize has no weights.*is_level = "token"'):
        correct(x, x, ones, is_normalize=True)
    with pytest.raises(ValueError, match="needs turns"):
        correct(x, x, ones, is_level="turn")
    with pytest.raises(ValueError, match="unknown correction mode 'both'"):
        CorrectionPreset("both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown loss of a correction 'ppo_clp'.*did you mean 'ppo_clip'"):
        CorrectionPreset("bypass", loss="ppo_clp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need a mode"):
        CorrectionPreset(is_level="token")


def test_wrong_shapes_are_refused() -> None:
    x, ones = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"logp_rollout \(1, 1\)"):
        correct(x, x[:, :1], ones)
    with pytest.raises(ValueError, match=r"\[B, T\], one row per sample"):
        correct(x[0], x[0], ones[0])
    with pytest.raises(ValueError, match=r"kl \(1, 1\)"):
        correct(x, x, ones, rs={"seq_max_kl": 0.1}, kl=x[:, :1])
    with pytest.raises(ValueError, match=r"advantages \(1, 1\)"):
        correct(x, x, ones, rs={"negative_seq": 0.1}, advantages=x[:, :1], current=x)
    with pytest.raises(ValueError, match=r"current \(1, 1\)"):
        correct(x, x, ones, rs={"negative_seq": 0.1}, advantages=x, current=x[:, :1])
