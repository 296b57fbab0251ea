"""What is decided about a batch before its first gradient, and then stays: masks, advantages, weights.

Everything here is small (some numbers per token), on the CPU and in float64, so ranks exchange it and each decides the
same about the whole batch. The branches of an episode are decided about as one sequence, one behind the other: an
episode has one reward, counts once in its group's baseline, and is one sequence for corrections that look at sequences.
Guarantor of invariant 6: what is rejected here is in no loss, denominator or baseline.

Shapes: B samples, or episodes; T positions (of one of them, or of the longest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.base import Metrics
from slipstream.estimators.advantage import advantage
from slipstream.estimators.drift import offpolicy_metrics
from slipstream.estimators.kl import kl_reward
from slipstream.estimators.policy import LOSSES
from slipstream.estimators.policy import prepare as choose
from slipstream.objective.method import Method
from slipstream.records import Scored, derive_seed


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A sample as seen before its first gradient: tensors over its T tokens."""

    group: int
    episode: int
    reward: float = 0.0
    mask_T: Tensor
    turn_T: Tensor
    behavior_T: Tensor
    """Log-probs of the emitted tokens under what drew them; the others are the learner's at some version."""
    old_T: Tensor | None = None
    current_T: Tensor | None = None
    reference_T: Tensor | None = None
    kl_T: Tensor | None = None
    """KL(what drew the token ‖ the learner as it is), over the vocabulary; infinite where that version is gone."""
    missing: int = 0
    """Tokens whose version the learner no longer has: what drew them stands for it."""


@dataclass(frozen=True, kw_only=True)
class Frozen:
    mask_T: Tensor
    """What is trained on: the loss mask less what was rejected."""
    behavior_T: Tensor
    old_T: Tensor | None = None
    """What the ratio of the policy loss is taken to."""
    advantage_T: Tensor | None = None
    weight_T: Tensor | None = None
    chosen_T: Tensor | None = None
    """What a batch-scope method picked."""
    proximal_T: Tensor | None = None
    reference_T: Tensor | None = None
    positive: bool = False
    """The advantages of its episode, as they are used, sum to more than 0."""
    episode_tokens: int = 0
    """Of its episode, that are left: in this row, or in another branch."""


def behavior_of(sample: Scored) -> Tensor:
    """Log-probs of its trained tokens under what drew them, [T]; 0 where a token is masked, whatever stands there."""
    rollout = sample.rollout
    return torch.from_numpy(np.where(rollout.loss_mask, rollout.logp, 0))


def freeze(samples: Sequence[Evidence], method: Method, *, update: int) -> tuple[list[Frozen], Metrics]:
    batch, places = episodes_of(samples)
    mask_BT = padded([sample.mask_T for sample in batch])
    behavior_BT, old_BT = padded([s.behavior_T for s in batch]), padded([_old(sample) for sample in batch])
    groups_B = torch.tensor([sample.group for sample in batch])
    found: dict[str, Tensor] = {"old_T": old_BT}
    metrics: Metrics = {}
    if method.decoupled:
        gap = offpolicy_metrics(old_BT, behavior_BT, mask_BT)
        metrics |= {f"mismatch/{name}": value for name, value in gap.items()}
        metrics["old_logp_missing"] = sum(sample.missing for sample in batch) / max(int((mask_BT != 0).sum()), 1)
    kept_BT = mask_BT
    if method.correction.corrects:
        correction = method.correction.apply(
            # decoupled, corrections compare the learner at a token's own version to what drew it; bypass, as it is now
            old_BT if method.decoupled else _current(batch),
            behavior_BT,
            mask_BT,
            **_evidence(batch, method, mask_BT, groups_B, old_BT),
        )
        kept_BT = correction.mask
        metrics |= {f"correction/{name}": value for name, value in correction.metrics.items()}
        if correction.weights is not None:
            found["weight_T"] = correction.weights
    if method.rejects("seq_max_kl"):
        gone_BT = padded([_present(sample.kl_T) for sample in batch]).isinf() & (mask_BT != 0)
        metrics["kl_missing"] = int(gone_BT.sum()) / max(int((mask_BT != 0).sum()), 1)
    positive_B = torch.zeros(len(batch), dtype=torch.bool)
    if method.policy is not None:
        policy = method.policy
        found["advantage_T"] = advantage_BT = _advantages(batch, method, kept_BT, groups_B, old_BT)
        positive_B = advantage_BT.masked_fill(kept_BT == 0, 0.0).sum(-1) > 0
        metrics |= _spread(batch, advantage_BT, kept_BT)
        if method.proximal:
            found["proximal_T"] = _current(batch)
        if method.chooses:
            found["chosen_T"], of_choice = choose(
                policy.loss, _current(batch), old_BT, advantage_BT, kept_BT, **_options(method, update)
            )
            metrics |= {f"policy/{name}": float(value) for name, value in of_choice.items()}
    return [
        Frozen(
            mask_T=kept_BT[row, at].bool(),
            behavior_T=sample.behavior_T,
            reference_T=sample.reference_T,
            positive=bool(positive_B[row]),
            episode_tokens=int((kept_BT[row] != 0).sum()),
            **{name: value_BT[row, at] for name, value_BT in found.items()},
        )
        for sample, (row, at) in zip(samples, places, strict=True)
    ], metrics


def episodes_of(samples: Sequence[Evidence]) -> tuple[list[Evidence], list[tuple[int, slice]]]:
    """The branches of every episode as one, in the order given; and for every sample in which it lies, and where."""
    branches: dict[tuple[int, int], list[Evidence]] = {}
    for sample in samples:
        branches.setdefault((sample.group, sample.episode), []).append(sample)
    rows, stop = {key: row for row, key in enumerate(branches)}, dict.fromkeys(branches, 0)
    places = []
    for sample in samples:
        key = sample.group, sample.episode
        at = slice(stop[key], stop[key] + len(sample.mask_T))
        places.append((rows[key], at))
        stop[key] = at.stop
    return [_joined(parts) for parts in branches.values()], places


def _joined(parts: Sequence[Evidence]) -> Evidence:
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(part.reward != first.reward for part in parts):
        raise ValueError(
            f"group {first.group}, episode {first.episode}: its branches have rewards "
            f"{', '.join(f'{part.reward:g}' for part in parts)}: an episode has one"
        )
    found: dict[str, Any] = {}
    for name in (each.name for each in fields(Evidence) if each.name.endswith("_T")):
        values = [getattr(part, name) for part in parts]
        found[name] = None if values[0] is None else torch.cat(values)
    # calls are numbered from 0 in every branch
    above = np.cumsum([0, *(1 + int(part.turn_T.max()) for part in parts[:-1])]).tolist()
    found["turn_T"] = torch.cat([part.turn_T + more for part, more in zip(parts, above, strict=True)])
    return replace(first, missing=sum(part.missing for part in parts), **found)


def padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _old(sample: Evidence) -> Tensor:
    return sample.behavior_T if sample.old_T is None else sample.old_T


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a pass that the method needs was not made"
    return tensor


def _current(batch: Sequence[Evidence]) -> Tensor:
    return padded([_present(sample.current_T) for sample in batch])


def _evidence(
    batch: Sequence[Evidence], method: Method, mask_BT: Tensor, groups_B: Tensor, old_BT: Tensor
) -> dict[str, Any]:
    """Rejection by the sign of advantages looks at them as they are before it."""
    found: dict[str, Any] = {"turns": padded([sample.turn_T for sample in batch])}
    if method.rejects("negative_seq"):
        found |= {"advantages": _advantages(batch, method, mask_BT, groups_B, old_BT), "current": _current(batch)}
    if method.rejects("seq_max_kl"):
        found["kl"] = padded([_present(sample.kl_T) for sample in batch])
    return found


def _advantages(batch: Sequence[Evidence], method: Method, mask_BT: Tensor, groups_B: Tensor, old_BT: Tensor) -> Tensor:
    """Rewards stand on the last token that is left of an episode."""
    assert method.policy is not None
    rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    for row, sample in enumerate(batch):
        if mask_BT[row].any():
            rewards_BT[row, int(mask_BT[row].nonzero().max())] = sample.reward
    reference = method.reference
    if reference is not None and reference.into == "reward":
        reference_BT = padded([_present(sample.reference_T) for sample in batch])
        rewards_BT, _ = kl_reward(rewards_BT, old_BT, reference_BT, mask_BT, beta=reference.weight)
    policy = method.policy
    if int((mask_BT != 0).sum()) < 2:
        return torch.zeros_like(rewards_BT)  # nothing is left to compare
    found: Tensor = advantage(policy.advantage, rewards_BT, mask_BT, groups=groups_B, **policy.advantage_options)
    return found


def _options(method: Method, update: int) -> dict[str, Any]:
    assert method.policy is not None
    options: dict[str, Any] = dict(method.policy.options)
    if "generator" in LOSSES[method.policy.loss].options:
        options["generator"] = torch.Generator().manual_seed(derive_seed(method.seed, "choice", update))
    return options


def _spread(batch: Sequence[Evidence], advantage_BT: Tensor, mask_BT: Tensor) -> Metrics:
    """Rewards, and how many rows an advantage moves: where a group agrees there is nothing to learn."""
    moved = ((advantage_BT != 0) & (mask_BT != 0)).any(-1).double().mean()
    rewards = torch.tensor([sample.reward for sample in batch], dtype=torch.float64)
    return {"policy/reward": float(rewards.mean()), "policy/rows_moved": float(moved)}
