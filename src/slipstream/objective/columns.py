"""Columns: the inputs of losses, advantages, corrections and choices, one row of a table for each.

A method names the columns that it takes (`Method.columns`). Columns of samples come from records, or from passes of the
learner before an update's first gradient. Columns of the batch are computed from those, on the CPU, in float64: ranks
(processes of the learner) exchange the columns of samples and compute equal columns of the whole batch. Micro-batches
carry those that their losses take. All data are small, a few numbers per token.

The branches of an episode are joined to one sequence. An episode has one reward, counts once in its group's baseline,
and is one sequence for corrections.

Shapes: B samples, or episodes; T positions (of one of them, or of the longest); N trained tokens, M draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.estimators.advantage import advantage, logit_energy
from slipstream.estimators.auxiliary import kl_reward
from slipstream.estimators.centring import CENTRES
from slipstream.estimators.correction import truncate
from slipstream.estimators.logprobs.sampling_support import Support
from slipstream.estimators.options import formula, signature
from slipstream.estimators.policy import prepare
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.policy import POLICY_LOSSES
from slipstream.estimators.token_weights import Response, token_weights
from slipstream.estimators.values import first_of_steps, lambda_returns
from slipstream.objective.coefficients import Coefficients
from slipstream.objective.method import Method
from slipstream.protocols import Metrics, greedy
from slipstream.records import Rollout, Scored, derive_seed

T = TypeVar("T")
OLD, REFERENCE = "old", "reference"
"""Names of stored weights: those of the old policy, and those of the student at the start."""


@dataclass(frozen=True)
class Column:
    shape: Literal["tokens", "draws", "episode", "batch"]
    """Values of a sample: one for each of its T tokens, [N, M] for its draws, or one for its episode. A column of the
    shape "batch" is no tensor over samples."""
    compute: Callable[..., Any]
    """For a column of samples, a function of (policies, samples) to one value per sample, or to several columns by
    name; `policies` makes passes (`FirstPasses`). For a column of the batch, a function of `Episodes`."""
    needs: tuple[str, ...] = ()


def of_records(read: Callable[[Scored], Any]) -> Callable[[Any, Sequence[Scored]], list[Tensor]]:
    """Return a function that reads a column from each record."""
    return lambda policies, samples: [torch.from_numpy(np.asarray(read(sample))) for sample in samples]


def _lag(policies: Any, samples: Sequence[Scored]) -> list[Tensor]:
    """Return the age of each token: the learner's version minus the version that drew it."""
    ages = [np.where(s.rollout.loss_mask, policies.version - s.rollout.versions, 0) for s in samples]
    return [torch.from_numpy(age_T) for age_T in ages]


def _gap(policies: Any, samples: Sequence[Scored]) -> list[Tensor]:
    """Return log p − log q of each token, for the student that drew it and its teacher; 0 where one is unknown."""
    gaps = list[Tensor]()
    for sample in samples:
        mask_T = sample.rollout.loss_mask
        gap_T = np.zeros(len(mask_T))
        if sample.teacher_logp is not None:
            whole = sample.byte_spans is not None
            logq_N = present(sample.compared_logp)[:, 0] if whole else sample.teacher_logp
            gap_T[mask_T] = np.nan_to_num(sample.rollout.logp[mask_T] - logq_N)
        gaps.append(torch.from_numpy(gap_T))
    return gaps


def _squares(policies: Any, samples: Sequence[Scored]) -> dict[str, list[Tensor]]:
    current, squares = policies.log_probs_and_squares(samples)
    return {"current": current, "sum_pi_squared": squares}


def _by_version(policies: Any, samples: Sequence[Scored]) -> dict[str, list[Tensor]]:
    old, unversioned = policies.at_own_version(samples)
    return {"old_by_version": old, "unversioned": unversioned}


def _values(policies: Any, samples: Sequence[Scored]) -> dict[str, list[Tensor]]:
    values, ends = policies.critic.values(samples)
    return {"values": values, "bootstrap": ends}


def _turn_rewards(sample: Scored) -> Any:
    """Return for each trained token the reward of its turn, [T]; 0 at other tokens."""
    rollout, turn_T = sample.rollout, np.where(sample.rollout.loss_mask, sample.rollout.turn, -1)
    found_T = np.zeros(len(turn_T))
    for turn, reward in enumerate(() if rollout.turn_rewards is None else rollout.turn_rewards):
        found_T[turn_T == turn] = reward
    return found_T


SAMPLE_COLUMNS: dict[str, Column] = {
    "turns": Column("tokens", of_records(lambda s: np.where(s.rollout.loss_mask, s.rollout.turn, -1))),
    "turn_rewards": Column("tokens", of_records(_turn_rewards), ("turns",)),
    "lag": Column("tokens", _lag),
    "gap": Column("tokens", _gap),
    "sum_pi_squared": Column("tokens", _squares),
    "current": Column("tokens", lambda policies, samples: policies.log_probs(samples)),
    "entropy": Column("tokens", lambda policies, samples: policies.passes.relative_entropies(samples)),
    "gradient_norm": Column("episode", lambda policies, samples: policies.gradient_norms(samples)),
    "values": Column("tokens", _values),
    "bootstrap": Column("episode", _values),
    "reference": Column("tokens", lambda policies, samples: policies.log_probs(samples, REFERENCE)),
    "old_snapshot": Column("tokens", lambda policies, samples: policies.log_probs(samples, OLD)),
    "old_by_version": Column("tokens", _by_version),
    "unversioned": Column("tokens", _by_version),
    "current_draws": Column("draws", lambda policies, samples: policies.log_probs_of_draws(samples)),
    "behavior_draws": Column("draws", of_records(lambda s: s.rollout.action_logp.astype(np.float64))),
    "teacher_draws": Column("draws", of_records(lambda s: present(s.compared_logp).astype(np.float64))),
    "reference_draws": Column("draws", lambda policies, samples: policies.log_probs_of_draws(samples, REFERENCE)),
    "rollout_kl": Column("tokens", lambda policies, samples: policies.kl_from_rollout(samples)),
    "current_beside": Column("draws", lambda policies, samples: policies.passes.beside(samples, policies.centre)),
    "behavior_best": Column("draws", of_records(lambda s: present(s.rollout.best_logp).astype(np.float64))),
}
"""Columns of samples, in the order in which they are measured."""


@dataclass(frozen=True, kw_only=True)
class SampleInputs:
    """A sample of an update, with its columns."""

    group: int
    episode: int
    rewards: Mapping[str, float] = field(default_factory=dict)
    drawn: bool = True
    """True if the student drew the sample; other samples have no rewards, and no part in advantages."""
    mask_T: Tensor
    behavior_T: Tensor
    """Log-probs of the emitted tokens, recorded by the sampler. The learner computes all other log-probs."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)


def measure(samples: Sequence[Scored], method: Method, policies: Any) -> list[SampleInputs]:
    """Return samples with the columns that a method needs, directly or for columns of the batch.

    `policies` computes log-probs under the policies of a learner (`FirstPasses`); all ranks compute together.
    """
    left, needed, columns = list(method.columns), set[str](), dict[str, Sequence[Tensor]]()
    while left:
        if (name := left.pop()) not in needed:
            needed.add(name)
            left += COLUMNS[name].needs
    for name in SAMPLE_COLUMNS:
        if name in needed and name not in columns:
            measured = SAMPLE_COLUMNS[name].compute(policies, samples)
            columns |= measured if isinstance(measured, dict) else {name: measured}
    return [
        SampleInputs(
            group=sample.rollout.prompt.number,
            episode=sample.rollout.episode,
            rewards=sample.rollout.rewards,
            drawn=not sample.rollout.prompt.source,
            mask_T=torch.tensor(sample.rollout.loss_mask),
            behavior_T=behavior_of(sample).double(),
            columns={name: values[i] for name, values in columns.items()},
        )
        for i, sample in enumerate(samples)
    ]


def behavior_of(sample: Scored) -> Tensor:
    """Return log-probs of a sample's trained tokens under the sampling policy, [T]; 0 at masked tokens."""
    rollout = sample.rollout
    return torch.from_numpy(np.where(rollout.loss_mask, rollout.logp, 0))


# --- columns of the batch ---------------------------------------------------------------------------------------------


class Episodes:
    """Episodes of an update as rows, and their columns, for the tokens that are left and their importance weights."""

    def __init__(
        self, samples: Sequence[SampleInputs], method: Method, *, update: int, coefficients: Coefficients
    ) -> None:
        self.samples, self.method, self.update, self.coefficients = samples, method, update, coefficients
        self.rows, self.places = episodes_of(samples)
        self.mask_BT = padded([row.mask_T for row in self.rows])
        self.behavior_BT = padded([row.behavior_T for row in self.rows])
        self.others_B1 = torch.tensor([not row.drawn for row in self.rows])[:, None]
        self.group_B = torch.tensor([row.group for row in self.rows])
        self.rewards = {name: self.reward(name) for name in method.rewards}
        self.reward_B = self.weighted(self.rewards)
        self.columns: dict[str, Any] = {}
        self.metrics: Metrics = {}
        """Metrics of the columns that were computed."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.columns:
            self.columns[name] = self._of_samples(name) if name in SAMPLE_COLUMNS else COLUMNS[name].compute(self)
        return self.columns[name]

    def _of_samples(self, name: str) -> Any:
        if SAMPLE_COLUMNS[name].shape == "draws":
            return [present(sample.columns.get(name)) for sample in self.samples]
        values = [present(row.columns.get(name)) for row in self.rows]
        return padded(values) if SAMPLE_COLUMNS[name].shape == "tokens" else torch.stack(values)

    def left(self, mask_BT: Tensor, weights_BT: Tensor | None = None) -> Episodes:
        """Return these episodes with other tokens left, and with importance weights."""
        rest = copy(self)
        rest.mask_BT, rest.metrics = mask_BT, {}
        rest.columns = {name: values for name, values in self.columns.items() if name in SAMPLE_COLUMNS}
        rest.columns["weights"] = weights_BT
        return rest

    def reward(self, name: str) -> Tensor:
        values = [row.rewards[name] if row.drawn else 0.0 for row in self.rows]
        return torch.tensor(values, dtype=torch.float64)

    def weighted(self, rewards: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of rewards, which are given by name."""
        zero_B = torch.zeros(len(self.rows), dtype=torch.float64)
        return sum((weight * rewards[name] for name, weight in self.method.rewards.items()), start=zero_B)

    @property
    def old_BT(self) -> Tensor:
        """Log-probs under the old policy; 0 where the student drew nothing: there they may be unknown."""
        old = self.method.old
        return (self.behavior_BT if old == "behavior" else self[old]).masked_fill(self.others_B1, 0)


def episodes_of(samples: Sequence[SampleInputs]) -> tuple[list[SampleInputs], list[tuple[int, slice]]]:
    """Join the branches of every episode, in the given order. Return the episodes and each sample's (row, slice)."""
    branches: dict[tuple[int, int], list[SampleInputs]] = {}
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


def _joined(parts: Sequence[SampleInputs]) -> SampleInputs:
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(part.rewards != first.rewards for part in parts):
        raise ValueError(
            f"group {first.group}, episode {first.episode}: its branches have rewards "
            f"{', '.join(str(dict(part.rewards)) for part in parts)}: an episode has one set"
        )
    columns = dict(first.columns)
    for name in columns:
        if SAMPLE_COLUMNS[name].shape == "tokens":
            columns[name] = torch.cat([part.columns[name] for part in parts])
    if "turns" in columns:  # they are numbered from 0 in every branch
        turns = [part.columns["turns"] for part in parts]
        above = np.cumsum([0, *(1 + int(turn_T.max()) for turn_T in turns[:-1])]).tolist()
        columns["turns"] = torch.cat([turn_T + more for turn_T, more in zip(turns, above, strict=True)])
    mask_T, behavior_T = (torch.cat([getattr(part, name) for part in parts]) for name in ("mask_T", "behavior_T"))
    return replace(first, mask_T=mask_T, behavior_T=behavior_T, columns=columns)


def _rewards(episodes: Episodes) -> Tensor:
    """Return the rewards of tokens, [B, T].

    The environment's reward of a turn is at the last token in the mask up to the end of the turn. A reward before all
    tokens in the mask is nobody's. The rest of the row's reward is at the last token of the row in the mask.
    """
    method, mask_BT = episodes.method, episodes.mask_BT
    reference, rewards_BT, rest_B = method.reference, torch.zeros(mask_BT.shape, dtype=torch.float64), episodes.reward_B
    if method.rewards_turns:
        flipped = padded([row.mask_T for row in episodes.rows]).flip(-1), episodes["turns"].flip(-1)
        ends_BT = first_of_steps(*flipped, by_turn=True).flip(-1)
        at_ends_BT = method.rewards["environment"] * episodes["turn_rewards"].double() * ends_BT
        rest_B = rest_B - at_ends_BT.sum(-1)
        numbers_T = torch.arange(mask_BT.shape[1])
        kept_BT = torch.where(mask_BT != 0, numbers_T, -1).cummax(-1).values
        rewards_BT = rewards_BT.scatter_add(1, kept_BT.clamp(min=0), at_ends_BT * (kept_BT >= 0))
    for row, mask_T in enumerate(mask_BT):
        if mask_T.any():
            rewards_BT[row, int(mask_T.nonzero().max())] += rest_B[row]
    if reference is not None and reference.into == "reward":
        kind, beta = reference.estimate or "k1", episodes.coefficients.beta
        old_BT, reference_BT = episodes.old_BT, episodes["reference"]
        rewards_BT, metrics = kl_reward(rewards_BT, old_BT, reference_BT, mask_BT, beta=beta, kind=kind)
        episodes.metrics["reference/kl"] = float(metrics["kl_reward"])
    return rewards_BT


def _advantages(episodes: Episodes) -> Tensor:
    """Return the advantages of the tokens that are left, [B, T]."""
    policy, rewards_BT, mask_BT = present(episodes.method.policy), episodes["rewards"], episodes.mask_BT
    if int((mask_BT != 0).sum()) < 2:
        return torch.zeros_like(rewards_BT)  # nothing is left to compare
    columns = {name: episodes[column] for name, column in ADVANTAGES[policy.advantage].columns.items()}
    return advantage(
        policy.advantage, rewards_BT, mask_BT, groups=episodes.group_B, **policy.advantage_options, **columns
    )


def _value_ratios(episodes: Episodes) -> Tensor | None:
    """Return log-ratios of the current policy to the one that drew, [B, T]; None if returns have no ratios."""
    return episodes["current"] - episodes.behavior_BT if episodes.method.truncates_values else None


def _returns(episodes: Episodes) -> Tensor:
    """Return the targets of the values, [B, T], and note how much of the rewards to come the values explain."""
    rewards_BT, values_BT, mask_BT = episodes["rewards"], episodes["values"], episodes.mask_BT
    columns = {name: episodes[name] for name in ("bootstrap", "turns")}
    options: dict[str, Any] = present(episodes.method.policy).values_options
    ratios = {"log_ratios": episodes["value_ratios"]}
    _, returns_BT = lambda_returns(rewards_BT, values_BT, mask_BT, **columns, **ratios, **options)
    plain = {**options, "lam": 1.0, "rho": 0.0, "c": 0.0}
    _, to_go_BT = lambda_returns(rewards_BT, torch.zeros_like(values_BT), mask_BT, **columns, **plain)
    to_go_N, values_N = to_go_BT[mask_BT != 0], values_BT.double()[mask_BT != 0]
    if len(to_go_N) > 1 and float(to_go_N.var()):
        episodes.metrics["critic/explained_variance"] = 1 - float((to_go_N - values_N).var() / to_go_N.var())
    return returns_BT


def _norm_by_logits(episodes: Episodes) -> Any:
    """Return ‖Σ_t w_t g_t‖² of each weighted answer, which is w²‖g‖² for equal weights; g is by the logits."""
    weights_BT = episodes["weights"]
    energy_BT = logit_energy(episodes["current"], episodes["sum_pi_squared"]) * (episodes.mask_BT != 0)
    return (energy_BT if weights_BT is None else energy_BT * weights_BT.square()).sum(-1)


def _norm_by_weights(episodes: Episodes) -> Any:
    """Return w²‖g‖² of each answer, by the trained weights; all tokens of an answer have one importance weight."""
    norm_B, weights_BT = episodes["gradient_norm"], episodes["weights"]
    return norm_B if weights_BT is None else norm_B * weights_BT.amax(-1).square()


def _spread(episodes: Episodes) -> Any:
    """Return for each token the root mean square of the advantages in its group, [B, T]."""
    advantage_BT, mask_BT = episodes["advantages"], episodes.mask_BT
    same_BB = (episodes.group_B[:, None] == episodes.group_B).double()
    squares_BT = advantage_BT.double().square().masked_fill(mask_BT == 0, 0.0)
    mean_B = same_BB @ squares_BT.sum(-1) / (same_BB @ (mask_BT != 0).double().sum(-1)).clamp(min=1)
    return mean_B.sqrt()[:, None].expand_as(advantage_BT)


def _chosen(episodes: Episodes) -> Tensor:
    """Return the mask of the tokens that a policy loss of batch scope selects from the whole batch."""
    method, policy = episodes.method, present(episodes.method.policy)
    options: dict[str, Any] = dict(policy.options)
    if "generator" in signature(*POLICY_LOSSES[policy.loss].formulas).columns:
        options["generator"] = torch.Generator().manual_seed(derive_seed(method.seed, "choice", episodes.update))
    tensors = episodes["current"], episodes.old_BT, episodes["advantages"], episodes.mask_BT
    chosen_BT, metrics = prepare(policy.loss, *tensors, **options)
    episodes.metrics |= {f"policy/{name}": float(value) for name, value in metrics.items()}
    return chosen_BT


def _kept_draws(episodes: Episodes) -> Sequence[Tensor]:
    """Return masks of the draws that a distillation loss of batch scope keeps, one for each sample."""
    spec, samples = episodes.method.loss.spec, episodes.samples
    draws = [torch.cat(episodes[f"{name}_draws"]) for name in ("current", "behavior", "teacher")]
    places = zip(samples, episodes.places, strict=True)
    left = [episodes.mask_BT[row, at][sample.mask_T] for sample, (row, at) in places]
    keep_NM, metrics = formula(spec.chooses)(*draws, mask=torch.cat(left), **spec.choice)
    episodes.metrics |= {f"distill/{name}": float(value) for name, value in metrics.items()}
    return torch.split(keep_NM, [len(left_N) for left_N in left])


def _centre(episodes: Episodes) -> Sequence[Tensor]:
    """Return the coefficients of log-probs in the centre of the score, one tensor for each sample."""
    policy, correction = present(episodes.method.policy), episodes.method.correction
    kind = present(policy.centre)

    def weigh(ratio: Tensor) -> Tensor:
        return torch.ones_like(ratio) if correction.is_level is None else truncate(ratio, correction.is_threshold)

    behavior = episodes["behavior_draws" if kind == "draws" else "behavior_best"]
    pairs = zip(episodes["current_beside"], behavior, strict=True)
    return [CENTRES[kind](logp_NX, behavior_NX, weigh) for logp_NX, behavior_NX in pairs]


def _token_weights(episodes: Episodes) -> Tensor:
    """Return the weights of tokens by their position in the episode, [B, T]."""
    loss, columns = episodes.method.loss, (episodes["gap"], episodes["turns"])
    weights = list[Tensor]()
    for row, gap_T, turn_T in zip(episodes.rows, *columns, strict=True):
        n = len(row.mask_T)
        response = Response(row.mask_T, gap_T[:n], turn_T[:n], episodes.update)
        weights.append(token_weights(loss.tokens, response, **loss.token_options))
    return padded(weights)


def _positive(episodes: Episodes) -> Any:
    """Return a mask [B]: True if the advantages of an episode sum to more than 0."""
    return episodes["advantages"].masked_fill(episodes.mask_BT == 0, 0.0).sum(-1) > 0


COLUMNS: dict[str, Column] = SAMPLE_COLUMNS | {
    "old": Column("tokens", lambda episodes: episodes.old_BT),
    "weights": Column("tokens", lambda episodes: None),
    "rewards": Column("tokens", _rewards),
    "returns": Column("tokens", _returns, ("values", "bootstrap", "turns")),
    "value_ratios": Column("tokens", _value_ratios),
    "advantages": Column("tokens", _advantages),
    "proximal_logp": Column("tokens", lambda episodes: episodes["current"], ("current",)),
    "components": Column("batch", lambda episodes: episodes.rewards),
    "component_weights": Column("batch", lambda episodes: episodes.method.rewards),
    "greedy_rewards": Column(
        "episode",
        lambda episodes: episodes.weighted({name: episodes.reward(greedy(name)) for name in episodes.method.rewards}),
    ),
    "norm_by_logits": Column("episode", _norm_by_logits, ("current", "sum_pi_squared")),
    "norm_by_weights": Column("episode", _norm_by_weights, ("gradient_norm",)),
    "spread": Column("tokens", _spread),
    "positive": Column("episode", _positive),
    "chosen": Column("tokens", _chosen, ("current",)),
    "kept_draws": Column("draws", _kept_draws, ("current_draws", "behavior_draws", "teacher_draws")),
    "centre_of_draws": Column("draws", _centre, ("current_beside", "behavior_draws")),
    "centre_of_top_k": Column("draws", _centre, ("current_beside", "behavior_best")),
    "centre_of_support": Column("draws", _centre, ("current_beside", "behavior_best")),
    "token_weights": Column("tokens", _token_weights, ("gap", "turns")),
    "proximal_draws": Column("draws", lambda episodes: episodes["current_draws"], ("current_draws",)),
}
"""All columns, by the names under which losses, advantages and corrections take them."""


def padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def present(found: T | None) -> T:
    assert found is not None, "a pass or a cache that the method needs is missing"
    return found


def support_of(rollouts: Sequence[Rollout], device: torch.device) -> Support | None:
    """Return the sampling supports of all trained tokens in sample order; None if no support was recorded."""
    kept = [rollout.kept for rollout in rollouts if rollout.kept is not None]
    if not kept:
        return None
    assert len(kept) == len(rollouts), "some samples have a sampling support, and others do not"
    ids_S, sizes_N = (np.concatenate([getattr(each, name) for each in kept]) for name in ("ids", "sizes"))
    return Support(ids_S, sizes_N, device)
