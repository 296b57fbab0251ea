"""Constants of an update: decided before its first gradient, as rejected tokens, advantages and importance weights are.

Ranks decide the same for the whole batch. Guarantor of invariant 6: rejected tokens, and groups that `drop_alike`
leaves out, are in no loss, denominator or baseline.

Shapes: B episodes; T positions (of one of them, or of the longest).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.estimators.drift import offpolicy_metrics
from slipstream.objective.coefficients import REPORTED, Coefficients
from slipstream.objective.columns import COLUMNS, Episodes, SampleInputs, behavior_of
from slipstream.objective.method import Method
from slipstream.protocols import Metrics
from slipstream.records import Scored


@dataclass(frozen=True, kw_only=True)
class UpdateConstants:
    """Decisions about a sample, and the columns that the losses of its micro-batch take."""

    mask_T: Tensor
    """Loss mask without the rejected tokens."""
    behavior_T: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    coefficients: Coefficients = field(default_factory=Coefficients)
    episode_tokens: int = 0
    """Number of tokens left in the sample's episode, in all its branches."""


def unrejected(sample: Scored) -> UpdateConstants:
    """Return decisions for a sample that reject no token and have no weights."""
    return UpdateConstants(mask_T=torch.tensor(sample.rollout.loss_mask), behavior_T=behavior_of(sample))


def compute_constants(
    samples: Sequence[SampleInputs], method: Method, *, update: int, coefficients: Coefficients | None = None
) -> tuple[list[UpdateConstants], Metrics]:
    """Return the decisions about each sample, and metrics. `coefficients` are the current ones, if not the first."""
    coefficients = coefficients or method.coefficients
    episodes = Episodes(samples, method, update=update, coefficients=coefficients)
    mask_BT, others_B1 = episodes.mask_BT, episodes.others_B1
    tokens = max(int((mask_BT != 0).sum()), 1)
    metrics: Metrics = {REPORTED[name]: getattr(coefficients, name) for name in method.adaptive}
    if method.old == "old_by_version":
        gap = offpolicy_metrics(episodes.old_BT, episodes.behavior_BT, mask_BT)
        metrics |= {f"mismatch/{name}": value for name, value in gap.items()}
        metrics["old_logp_missing"] = int(episodes["unversioned"].sum()) / tokens
    alike_B1 = torch.zeros_like(others_B1)
    if method.policy is not None and method.policy.drop_alike:
        alike_B1 = alike(episodes)[:, None] & ~others_B1
    kept_BT, weights_BT = mask_BT.masked_fill(alike_B1, 0), None
    if (correction := method.correction).corrects:
        # decoupled: compare the sampler with the learner at a token's version; bypass: with the current learner
        compared_BT = episodes.old_BT if method.decoupled else episodes["current"]
        columns = correction_columns(episodes.left(kept_BT))
        corrected = correction.apply(compared_BT, episodes.behavior_BT, kept_BT, **columns)
        kept_BT, weights_BT = corrected.mask, corrected.weights
        metrics |= {f"correction/{name}": value for name, value in corrected.metrics.items()}
    if method.correction.rejects("seq_max_kl"):
        metrics["kl_missing"] = int((episodes["rollout_kl"].isinf() & (mask_BT != 0)).sum()) / tokens
    distilled, learned = episodes.left(kept_BT), episodes.left(kept_BT.masked_fill(others_B1, 0), weights_BT)
    carried = {
        name: (distilled if COLUMNS[name].shape == "draws" else learned)[name] for name in sorted(method.carried)
    }
    if method.policy is not None:
        metrics |= reward_metrics(learned, torch.where(alike_B1, mask_BT, learned.mask_BT))
    metrics |= learned.metrics | distilled.metrics

    def columns_of(i: int, row: int, at: slice) -> dict[str, Any]:
        places = {"tokens": (row, at), "draws": i, "episode": row}
        return {name: values[places[COLUMNS[name].shape]] for name, values in carried.items()}

    return [
        UpdateConstants(
            mask_T=kept_BT[row, at].bool(),
            behavior_T=sample.behavior_T,
            columns=columns_of(i, row, at),
            coefficients=coefficients,
            episode_tokens=int((kept_BT[row] != 0).sum()),
        )
        for i, (sample, (row, at)) in enumerate(zip(samples, episodes.places, strict=True))
    ], metrics


def correction_columns(episodes: Episodes) -> dict[str, Any]:
    """Return the columns that the correction takes. Advantages are computed before any rejection."""
    method, columns = episodes.method, dict[str, Any]()
    if method.correction.is_level == "turn":
        columns["turns"] = episodes["turns"]
    if method.correction.rejects("negative_seq"):
        columns |= {name: episodes[name] for name in ("advantages", "current")}
    if method.correction.rejects("seq_max_kl"):
        columns["kl"] = episodes["rollout_kl"]
    return columns


def alike(episodes: Episodes) -> Tensor:
    """Return a mask [B] of the rows whose group has equal rewards; with gdpo each reward must be equal."""
    apart = episodes.method.policy is not None and episodes.method.policy.advantage == "gdpo"
    values = torch.stack(list(episodes.rewards.values()) if apart else [episodes.reward_B])
    same_BB = episodes.group_B[:, None] == episodes.group_B
    differ_BB = (values[:, :, None] != values[:, None]).any(0)
    return ~(same_BB & differ_BB).any(-1)


def reward_metrics(episodes: Episodes, mask_BT: Tensor) -> Metrics:
    left_B = (mask_BT != 0).any(-1)
    moved_B = ((episodes["advantages"] != 0) & (mask_BT != 0)).any(-1)
    rows = max(int(left_B.sum()), 1)
    parts = episodes.rewards if len(episodes.rewards) > 1 else {}
    explained = explained_variance(episodes.reward_B[left_B], episodes.group_B[left_B])
    return {
        **({} if explained is None else {"policy/explained_variance": explained}),
        "policy/reward": float(episodes.reward_B[left_B].sum()) / rows,
        "policy/rows_moved": int(moved_B.sum()) / rows,
        **{f"policy/reward/{name}": float(reward_B[left_B].sum()) / rows for name, reward_B in parts.items()},
    }


def explained_variance(reward_B: Tensor, group_B: Tensor) -> float | None:
    """Return 1 − (variance within groups) / (variance); None if all rewards are equal, or all of one group."""
    if not (reward_B != reward_B[:1]).any() or not (group_B != group_B[:1]).any():
        return None
    same_BB = (group_B[:, None] == group_B).double()
    within_B = reward_B - same_BB @ reward_B / same_BB.sum(-1)
    return 1 - float(within_B.square().sum() / (reward_B - reward_B.mean()).square().sum())
