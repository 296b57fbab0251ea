"""Decisions about a batch, made before its first gradient and then constant: masks, advantages, importance weights.

All data are small (a few numbers per token), on the CPU, in float64. Ranks (processes of the learner) exchange the data
and compute equal decisions for the whole batch. The branches of an episode are joined to one sequence. An episode
has one reward, counts once in its group's baseline, and is one sequence for corrections. Guarantor of invariant 6:
rejected tokens, and groups that `drop_alike` leaves out, are in no loss, denominator or baseline.

Shapes: B samples, or episodes; T positions (of one of them, or of the longest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.estimators.advantage import advantage
from slipstream.estimators.advantage.token import logit_energy
from slipstream.estimators.drift import offpolicy_metrics
from slipstream.estimators.kl import kl_reward
from slipstream.estimators.options import formula
from slipstream.estimators.policy import prepare as choose
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.policy import LOSSES
from slipstream.objective.method import REPORTED, Coefficients, Method
from slipstream.protocols import Metrics, greedy
from slipstream.records import Scored, derive_seed

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Log-probs of all draws (tokens sampled at each position), at the temperature of the distillation loss."""

    current_NM: Tensor
    behavior_NM: Tensor
    teacher_NM: Tensor


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Inputs of the decisions about a sample: tensors over its T tokens."""

    group: int
    episode: int
    rewards: Mapping[str, float] = field(default_factory=dict)
    drawn: bool = True
    """True if the student drew the sample; other samples have no rewards, and no part in advantages."""
    mask_T: Tensor
    turn_T: Tensor
    behavior_T: Tensor
    """Log-probs of the emitted tokens, recorded by the sampler. The learner computes all other log-probs."""
    lag_T: Tensor | None = None
    """Age of each token: the learner's version minus the version that drew it."""
    old_T: Tensor | None = None
    current_T: Tensor | None = None
    squares_T: Tensor | None = None
    """Σ_v π_v² over the vocabulary, for the current learner."""
    entropy_T: Tensor | None = None
    """Entropy of the current learner's distribution over the vocabulary, divided by its maximum, log V."""
    reference_T: Tensor | None = None
    kl_T: Tensor | None = None
    """KL(sampling policy ‖ current learner) over the vocabulary; infinite if the sampling weights are not stored."""
    draws: Draws | None = None
    reference_NM: Tensor | None = None
    """Log-probs of all draws under the reference, at the temperature of the distillation loss."""
    norm: float | None = None
    """Squared norm of the gradient of the episode's log-prob with respect to the trained weights."""
    missing: int = 0
    """Number of tokens whose weight version is no longer stored. For them `old_T` contains the sampler's log-probs."""


@dataclass(frozen=True, kw_only=True)
class Frozen:
    mask_T: Tensor
    """Loss mask without the rejected tokens."""
    behavior_T: Tensor
    old_T: Tensor | None = None
    """Log-probs under the old policy, which is the denominator of the policy loss's ratio."""
    advantage_T: Tensor | None = None
    weight_T: Tensor | None = None
    chosen_T: Tensor | None = None
    """Mask of the tokens that a batch-scope policy loss selected from the whole batch."""
    proximal_T: Tensor | None = None
    lag_T: Tensor | None = None
    turn_T: Tensor | None = None
    """Number of each token's turn in its episode, for a policy loss of turns."""
    entropy_T: Tensor | None = None
    reference_T: Tensor | None = None
    proximal_NM: Tensor | None = None
    """Log-probs of all draws when the batch arrived; `reference_NM`: the same under the reference. `keep_NM` is the
    mask of draws that a batch-scope loss keeps."""
    reference_NM: Tensor | None = None
    keep_NM: Tensor | None = None
    spread_T: Tensor | None = None
    """Root mean square of the advantages of all tokens of the prompt's answers."""
    coefficients: Coefficients = field(default_factory=Coefficients)
    positive: bool = False
    """True if the advantages of the sample's episode sum to more than 0."""
    episode_tokens: int = 0
    """Number of tokens left in the sample's episode, in all its branches."""


def behavior_of(sample: Scored) -> Tensor:
    """Return log-probs of a sample's trained tokens under the sampling policy, [T]; 0 at masked tokens."""
    rollout = sample.rollout
    return torch.from_numpy(np.where(rollout.loss_mask, rollout.logp, 0))


def unrejected(sample: Scored) -> Frozen:
    """Return decisions for a sample that reject no token and have no weights."""
    return Frozen(mask_T=torch.tensor(sample.rollout.loss_mask), behavior_T=behavior_of(sample))


def freeze(
    samples: Sequence[Evidence], method: Method, *, update: int, coefficients: Coefficients | None = None
) -> tuple[list[Frozen], Metrics]:
    """Return the decisions about each sample, and metrics. `coefficients` are the current ones, if not the first."""
    coefficients = coefficients or method.coefficients
    batch, places = episodes_of(samples)
    mask_BT = padded([sample.mask_T for sample in batch])
    behavior_BT = padded([sample.behavior_T for sample in batch])
    others_B1 = torch.tensor([not sample.drawn for sample in batch])[:, None]
    old_BT = padded([sample.behavior_T if sample.old_T is None else sample.old_T for sample in batch])
    old_BT = old_BT.masked_fill(others_B1, 0)  # it may be unknown, and policy losses never read it
    rewards = Rewards(batch, method, old_BT, coefficients.beta)
    found: dict[str, Tensor] = {"old_T": old_BT}
    metrics: Metrics = {REPORTED[name]: getattr(coefficients, name) for name in method.adaptive}
    if method.by_version:
        gap = offpolicy_metrics(old_BT, behavior_BT, mask_BT)
        metrics |= {f"mismatch/{name}": value for name, value in gap.items()}
        metrics["old_logp_missing"] = sum(sample.missing for sample in batch) / max(int((mask_BT != 0).sum()), 1)
    dropped_B1 = rewards.alike()[:, None] & ~others_B1 if method.drops_alike else torch.zeros_like(others_B1)
    kept_BT = mask_BT.masked_fill(dropped_B1, 0)
    if method.correction.corrects:
        correction = method.correction.apply(
            # decoupled: compare the sampler with the learner at a token's version; bypass: with the current learner
            old_BT if method.decoupled else _current(batch),
            behavior_BT,
            kept_BT,
            **_evidence(batch, method, rewards, kept_BT),
        )
        kept_BT = correction.mask
        metrics |= {f"correction/{name}": value for name, value in correction.metrics.items()}
        if correction.weights is not None:
            found["weight_T"] = correction.weights
    if method.rejects("seq_max_kl"):
        lost_BT = padded([present(sample.kl_T) for sample in batch]).isinf() & (mask_BT != 0)
        metrics["kl_missing"] = int(lost_BT.sum()) / max(int((mask_BT != 0).sum()), 1)
    positive_B = torch.zeros(len(batch), dtype=torch.bool)
    if method.policy is not None:
        policy, own_BT = method.policy, kept_BT.masked_fill(others_B1, 0)
        found["advantage_T"] = advantage_BT = rewards.advantages(own_BT, found.get("weight_T"))
        positive_B = advantage_BT.masked_fill(own_BT == 0, 0.0).sum(-1) > 0
        metrics |= rewards.metrics(advantage_BT, torch.where(dropped_B1, mask_BT, own_BT))
        if method.proximal:
            found["proximal_T"] = _current(batch)
        if method.by_turn:
            found["turn_T"] = padded([sample.turn_T for sample in batch])
        if method.by_spread:
            found["spread_T"] = rewards.spread(advantage_BT, own_BT)
        if method.chooses:
            found["chosen_T"], of_choice = choose(
                policy.loss, _current(batch), old_BT, advantage_BT, own_BT, **_options(method, update)
            )
            metrics |= {f"policy/{name}": float(value) for name, value in of_choice.items()}
    keep: Sequence[Tensor | None] = [None] * len(samples)
    if method.loss.weight and method.loss.spec.chooses:
        left = [kept_BT[row, at][sample.mask_T] for sample, (row, at) in zip(samples, places, strict=True)]
        keep, of_choice = _kept_draws(samples, method, left)
        metrics |= {f"distill/{name}": float(value) for name, value in of_choice.items()}
    return [
        Frozen(
            mask_T=kept_BT[row, at].bool(),
            behavior_T=sample.behavior_T,
            lag_T=sample.lag_T,
            entropy_T=sample.entropy_T,
            reference_T=sample.reference_T,
            proximal_NM=sample.draws.current_NM if sample.draws is not None else None,
            reference_NM=sample.reference_NM,
            keep_NM=keep_NM,
            coefficients=coefficients,
            positive=bool(positive_B[row]),
            episode_tokens=int((kept_BT[row] != 0).sum()),
            **{name: value_BT[row, at] for name, value_BT in found.items()},
        )
        for sample, (row, at), keep_NM in zip(samples, places, keep, strict=True)
    ], metrics


def episodes_of(samples: Sequence[Evidence]) -> tuple[list[Evidence], list[tuple[int, slice]]]:
    """Join the branches of every episode, in the given order. Return the episodes and each sample's (row, slice)."""
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
    if any(part.rewards != first.rewards for part in parts):
        raise ValueError(
            f"group {first.group}, episode {first.episode}: its branches have rewards "
            f"{', '.join(str(dict(part.rewards)) for part in parts)}: an episode has one set"
        )
    found: dict[str, Any] = {}
    for name in (each.name for each in fields(Evidence) if each.name.endswith("_T")):
        values = [getattr(part, name) for part in parts]
        found[name] = None if values[0] is None else torch.cat(values)
    # turns are numbered from 0 in every branch
    above = np.cumsum([0, *(1 + int(part.turn_T.max()) for part in parts[:-1])]).tolist()
    found["turn_T"] = torch.cat([part.turn_T + more for part, more in zip(parts, above, strict=True)])
    return replace(first, missing=sum(part.missing for part in parts), **found)


def padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def present(found: T | None) -> T:
    assert found is not None, "a pass or a cache that the method needs is missing"
    return found


def _current(batch: Sequence[Evidence]) -> Tensor:
    return padded([present(sample.current_T) for sample in batch])


def _evidence(batch: Sequence[Evidence], method: Method, rewards: Rewards, mask_BT: Tensor) -> dict[str, Any]:
    """Return the additional inputs of corrections. Advantages are computed before any rejection."""
    found: dict[str, Any] = {}
    if method.correction.is_level == "turn":
        found["turns"] = padded([sample.turn_T for sample in batch])
    if method.rejects("negative_seq"):
        found |= {"advantages": rewards.advantages(mask_BT, None), "current": _current(batch)}
    if method.rejects("seq_max_kl"):
        found["kl"] = padded([present(sample.kl_T) for sample in batch])
    return found


class Rewards:
    """Advantages of a batch from its rewards, for any mask."""

    def __init__(self, batch: Sequence[Evidence], method: Method, old_BT: Tensor, beta: float) -> None:
        self.batch, self.method, self.old_BT, self.beta = batch, method, old_BT, beta
        self.kl_metric: Metrics = {}
        """Metric of the mean KL that `advantages` subtracted from the rewards; empty if no KL was subtracted."""
        self.group_B = torch.tensor([sample.group for sample in batch])
        self.by_name = {name: self._named(name) for name in method.rewards}
        self.reward_B = self._summed(self.by_name)

    def advantages(self, mask_BT: Tensor, weight_BT: Tensor | None) -> Tensor:
        """Return the advantages of the tokens in the mask, [B, T]. A row's reward is at its last token in the mask."""
        policy, reference = self.method.policy, self.method.reference
        assert policy is not None
        rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
        for row, mask_T in enumerate(mask_BT):
            if mask_T.any():
                rewards_BT[row, int(mask_T.nonzero().max())] = self.reward_B[row]
        if reference is not None and reference.into == "reward":
            reference_BT = padded([present(sample.reference_T) for sample in self.batch])
            kind = reference.estimate or "k1"
            rewards_BT, found = kl_reward(rewards_BT, self.old_BT, reference_BT, mask_BT, beta=self.beta, kind=kind)
            self.kl_metric = {"reference/kl": float(found["kl_reward"])}
        if int((mask_BT != 0).sum()) < 2:
            return torch.zeros_like(rewards_BT)  # nothing is left to compare
        evidence = self._evidence(mask_BT, weight_BT)
        advantage_BT: Tensor = advantage(
            policy.advantage, rewards_BT, mask_BT, groups=self.group_B, **policy.advantage_options, **evidence
        )
        return advantage_BT

    def _evidence(self, mask_BT: Tensor, weight_BT: Tensor | None) -> dict[str, Any]:
        assert self.method.policy is not None
        found: dict[str, Any] = {}
        for name in ADVANTAGES[self.method.policy.advantage].evidence:
            match name:
                case "components":
                    found[name] = self.by_name
                case "component_weights":
                    found[name] = self.method.rewards
                case "greedy_rewards":
                    found[name] = self._summed({each: self._named(greedy(each)) for each in self.method.rewards})
                case "logp":
                    found[name] = _current(self.batch)
                case "sum_pi_squared":
                    found[name] = self._squares()
                case "weights":
                    found[name] = weight_BT
                case "grad_norm_squared" if self.method.exact_norms:  # all tokens of an answer have one weight
                    norm_B = torch.tensor([present(sample.norm) for sample in self.batch], dtype=torch.float64)
                    found[name] = norm_B if weight_BT is None else norm_B * weight_BT.amax(-1).square()
                case "grad_norm_squared":  # ‖Σ_t w_t g_t‖² of the weighted answer, which is w²‖g‖² for equal weights
                    energy_BT = logit_energy(_current(self.batch), self._squares()) * (mask_BT != 0)
                    found[name] = (energy_BT if weight_BT is None else energy_BT * weight_BT.square()).sum(-1)
        return found

    def _named(self, name: str) -> Tensor:
        values = [sample.rewards[name] if sample.drawn else 0.0 for sample in self.batch]
        return torch.tensor(values, dtype=torch.float64)

    def _summed(self, by_name: Mapping[str, Tensor]) -> Tensor:
        zero_B = torch.zeros(len(self.batch), dtype=torch.float64)
        return sum((weight * by_name[name] for name, weight in self.method.rewards.items()), start=zero_B)

    def _squares(self) -> Tensor:
        return padded([present(sample.squares_T) for sample in self.batch])

    def alike(self) -> Tensor:
        """Return a mask [B] of the rows whose group has equal rewards; with gdpo each reward must be equal."""
        apart = self.method.policy is not None and self.method.policy.advantage == "gdpo"
        values = torch.stack(list(self.by_name.values()) if apart else [self.reward_B])
        same_BB = self.group_B[:, None] == self.group_B
        differ_BB = (values[:, :, None] != values[:, None]).any(0)
        return ~(same_BB & differ_BB).any(-1)

    def spread(self, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return for each token the root mean square of the advantages in its group, [B, T]."""
        same_BB = (self.group_B[:, None] == self.group_B).double()
        squares_BT = advantage_BT.double().square().masked_fill(mask_BT == 0, 0.0)
        mean_B = same_BB @ squares_BT.sum(-1) / (same_BB @ (mask_BT != 0).double().sum(-1)).clamp(min=1)
        return mean_B.sqrt()[:, None].expand_as(advantage_BT)

    def metrics(self, advantage_BT: Tensor, mask_BT: Tensor) -> Metrics:
        left_B = (mask_BT != 0).any(-1)
        moved_B = ((advantage_BT != 0) & (mask_BT != 0)).any(-1)
        rows = max(int(left_B.sum()), 1)
        parts = self.by_name if len(self.by_name) > 1 else {}
        return self.kl_metric | {
            "policy/reward": float(self.reward_B[left_B].sum()) / rows,
            "policy/rows_moved": int(moved_B.sum()) / rows,
            **{f"policy/reward/{name}": float(reward_B[left_B].sum()) / rows for name, reward_B in parts.items()},
        }


def _kept_draws(
    samples: Sequence[Evidence], method: Method, left: Sequence[Tensor]
) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
    """Return masks of the draws that a batch-scope distillation loss keeps, one mask per sample, and metrics."""
    select, options = formula(method.loss.spec.chooses), method.loss.spec.choice
    draws = [present(sample.draws) for sample in samples]
    policies = [[each.current_NM, each.behavior_NM, each.teacher_NM] for each in draws]
    joined = [torch.cat(parts) for parts in zip(*policies, strict=True)]
    keep_NM, metrics = select(*joined, mask=torch.cat(list(left)), **options)
    return torch.split(keep_NM, [len(left_N) for left_N in left]), metrics


def _options(method: Method, update: int) -> dict[str, Any]:
    assert method.policy is not None
    options: dict[str, Any] = dict(method.policy.options)
    if "generator" in LOSSES[method.policy.loss].takes:
        options["generator"] = torch.Generator().manual_seed(derive_seed(method.seed, "choice", update))
    return options
