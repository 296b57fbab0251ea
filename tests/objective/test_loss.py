"""The learner's whole loss, gradient by gradient, against one dense computation of it from full log-softmaxes."""

import asyncio
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.objective import PolicyConfig, ReferenceConfig
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.estimators import policy
from slipstream.estimators.advantage import advantage
from slipstream.estimators.auxiliary import kl_loss, kl_reward
from slipstream.estimators.drift import offpolicy_metrics
from slipstream.estimators.numerics import aggregate
from slipstream.estimators.policy import policy_loss
from slipstream.estimators.surrogate import mc_reverse_kl
from slipstream.estimators.tables.correction import PRESETS, CorrectionPreset, Unit
from slipstream.estimators.tables.policy import POLICY_LOSSES
from slipstream.objective.columns import OLD, SampleInputs
from slipstream.objective.constants import compute_constants, explained_variance
from slipstream.objective.method import Method
from slipstream.protocols import Sampling
from slipstream.records import ONE_COUNT, Batch, Counts, Handle, Scored, derive_seed, header_of, total
from support.engines import native_learner, native_sampler, native_scorer
from support.learners import run
from support.tiny_models import EOS, littered, logits_of, make_model, make_prompts, masked, masked_sample, wrap

DTYPE = torch.float64
TEMPERATURE = 0.8


class Update(NamedTuple):
    """Results of a learner for one batch."""

    counts: Counts
    tokens: dict[str, int]
    """Tokens of its passes."""
    loss: float
    gradients: list[Tensor]
    metrics: dict[str, float]


@dataclass
class Case:
    """Weights of the versions 0, 1 and 2, a teacher, and stale samples: drawn by 0 and 1, learned from at 2."""

    versions: list[PreTrainedModel]
    teacher: PreTrainedModel
    groups: list[list[Handle]]
    updates: dict[str, Update] = field(default_factory=dict)
    """Numbers that `update` found with the groups as they are, by the name of the method."""

    @property
    def samples(self) -> list[Scored]:
        return [handle.body for group in self.groups for handle in group]

    @cached_property
    def logits(self) -> list[list[Tensor]]:
        """Logits [T, V] by each version at each sample."""
        with torch.no_grad():
            return [logits_of(version, self.samples) for version in self.versions]

    def log_probs(self, version: int, temperature: float = TEMPERATURE) -> list[Tensor]:
        return [(logits / temperature).log_softmax(-1) for logits in self.logits[version]]

    def emitted(self, version: int) -> Tensor:
        return emitted(self.logits[version], self.samples)


def nudged(model: PreTrainedModel, *, seed: int, by: float = 0.01) -> PreTrainedModel:
    """Return a copy of the model that is a few updates ahead."""
    later, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator, dtype=DTYPE)
    return later


@pytest.fixture(scope="module")
def case() -> Case:
    first = make_model("phi", seed=0, dtype=DTYPE)
    versions = [first, nudged(first, seed=1), nudged(nudged(first, seed=1), seed=2)]
    teacher = make_model("phi", seed=9, dtype=DTYPE)

    async def work() -> list[list[Handle]]:
        sampler = native_sampler(wrap(versions[0]), slots=16, stop_ids={EOS})
        sampling = Sampling(max_tokens=12, group=3, draws=2, best=5, temperature=TEMPERATURE)
        rolled = await asyncio.gather(*[sampler.generate(p, sampling) for p in make_prompts(5)])
        sampler.close()
        scorer = native_scorer(wrap(teacher))
        scored = [await scorer.score([aged(handle, versions) for handle in group]) for group in rolled]
        scorer.close()
        return scored

    return Case(versions, teacher, run(work()))


def aged(handle: Handle, versions: list[PreTrainedModel]) -> Handle:
    """Version 1 continues every other response from its middle; one response has a stretch that is not trained.

    A second turn begins after a third of it.
    """
    rollout = handle.body
    number, index, n = rollout.prompt.number, rollout.index, len(rollout.tokens)
    rewards = {"exact": float((number + index) % 3 == 0), "math": (2 * number + index) % 5 / 4}
    rewards |= {"greedy_exact": float(number % 2), "greedy_math": 0.25}
    turn = (np.arange(n) >= n // 3).astype(np.int32)
    made_by, logp, actions = np.zeros(n, np.int64), rollout.logp.copy(), rollout.action_logp.copy()
    assert rollout.best_ids is not None and rollout.best_logp is not None
    best = rollout.best_logp.copy()
    if (number + index) % 2:
        made_by[n // 2 :] = 1
        dense = log_probs(versions[1], rollout, TEMPERATURE).detach()
        logp[n // 2 :] = dense[torch.arange(n), torch.from_numpy(rollout.tokens).long()].numpy()[n // 2 :]
        actions[n // 2 :] = dense.gather(1, torch.from_numpy(rollout.actions).long()).numpy()[n // 2 :]
        actions[:, 0] = logp
        best[n // 2 :] = dense.gather(1, torch.from_numpy(rollout.best_ids).long()).numpy()[n // 2 :]
    mask = rollout.loss_mask.copy()
    mask[1:3] = (number, index) != (2, 1)
    drawn = {"logp": logp, "action_logp": actions, "best_logp": best}
    rollout = replace(rollout, versions=made_by, rewards=rewards, turn=turn, **drawn)
    rollout = masked(rollout, mask)
    return Handle(header_of(rollout), rollout)


def log_probs(model: PreTrainedModel, rollout: Any, temperature: float) -> Tensor:
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
    logits = model(ids[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def emitted(logits: list[Tensor], samples: list[Scored], temperature: float = TEMPERATURE) -> Tensor:
    """Return the log-probs [B, T] of the tokens of these samples."""
    found = []
    for logits_TV, sample in zip(logits, samples, strict=True):
        tokens = torch.from_numpy(sample.rollout.tokens).long()
        found.append((logits_TV / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    return pad_sequence(found, batch_first=True)


def of(samples: list[Scored], name: str) -> Tensor:
    return pad_sequence([torch.from_numpy(getattr(s.rollout, name)) for s in samples], batch_first=True)


def dense(case: Case, method: Method, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The loss and what is left of the mask, on the whole batch in one piece."""
    samples = case.samples
    mask, rollout_logp, made_by = of(samples, "loss_mask"), of(samples, "logp").double(), of(samples, "versions")
    logits = logits_of(model, samples)
    logp = emitted(logits, samples)
    with torch.no_grad():
        by_version = [case.emitted(version) for version in range(3)]
        old = rollout_logp
        if method.decoupled:
            old = torch.where(made_by == 0, by_version[0], by_version[1])
        if method.policy is not None and method.policy.old == "previous":
            old = by_version[1]
        kept, weights = mask, None
        if method.correction.corrects:
            anchor = old if method.decoupled else by_version[2]
            turns = {"turns": of(samples, "turn")} if method.correction.is_level == "turn" else {}
            found = method.correction.apply(anchor, rollout_logp, mask, **turns)
            kept, weights = found.mask, found.weights
    counts = {"n_tokens": float(kept.sum()), "n_sequences": float(kept.any(-1).sum())}
    loss = torch.zeros((), dtype=DTYPE)
    if method.policy is not None:
        groups = torch.tensor([s.rollout.prompt.number for s in samples])
        rewards = torch.zeros(mask.shape, dtype=DTYPE)
        for row, sample in enumerate(samples):
            if kept[row].any():
                rewards[row, kept[row].nonzero().max()] = reward_of(sample, method)
        if method.reference is not None and method.reference.into == "reward":
            kind = method.reference.estimate or "k1"
            rewards, _ = kl_reward(rewards, old, by_version[0], kept, beta=method.reference.weight, kind=kind)
        name, options = method.policy.loss, dict(method.policy.options)
        known = method.policy.advantage_options | evidence(case, method, by_version[2], kept, weights)
        advantages = advantage(method.policy.advantage, rewards, kept, groups=groups, **known)
        extra: dict[str, Any] = {}
        if name == "topr":
            extra["positive"] = (advantages * kept).sum(-1) > 0
        if name == "decoupled_ppo":
            extra["proximal_logp"] = by_version[2]
        if name == "a3po":
            extra["lag"] = 2 - made_by
        if name == "st_ppo":
            extra["turns"] = of(samples, "turn").long()
        if name == "quatro":
            squares = [
                (((advantages * kept) ** 2).sum(-1)[groups == g].sum() / kept[groups == g].sum()) for g in groups
            ]
            extra["spread"] = torch.stack(squares).sqrt()[:, None].expand_as(advantages)
        if name == "espo":
            full = pad_sequence(case.log_probs(2), batch_first=True)
            extra["entropy"] = -(full.exp() * full).sum(-1) / math.log(full.shape[-1])
        if name in ("clip_cov", "kl_cov", "m2po"):
            chooser = dict(options) | (
                {"generator": torch.Generator().manual_seed(derive_seed(0, "choice", 3))} if name == "clip_cov" else {}
            )
            extra["chosen"], _ = policy.prepare(name, by_version[2], old, advantages, kept, **chooser)
        if method.policy.centre:
            extra["centre"] = centre_of(case, method, logits)
        part, _ = policy_loss(
            *(name, logp, old, advantages, kept),
            weights=weights,
            agg=method.policy.aggregation,
            scale=method.max_tokens,
            **counts,
            **options,
            **extra,
        )
        loss = loss + method.policy.weight * part
    if method.reference is not None and method.reference.into == "loss":
        drew = rollout_logp if method.reference.importance else None
        kind = method.reference.estimate
        agg, scale = method.aggregation, method.max_tokens
        part, _ = kl_loss(logp, by_version[0], kept, logp_old=drew, kind=kind, agg=agg, scale=scale, **counts)
        loss = loss + method.reference.weight * part
    if method.loss.weight:
        rows = []
        for sample, logits_TV in zip(samples, logits, strict=True):
            ids, trained = torch.from_numpy(sample.rollout.actions).long(), torch.from_numpy(sample.rollout.loss_mask)
            at = (logits_TV / method.loss.temperature).log_softmax(-1)[trained].gather(1, ids)
            behavior = torch.from_numpy(sample.rollout.action_logp).double()
            loss_N, _ = mc_reverse_kl(at, behavior, torch.from_numpy(sample.teacher_action_logp).double())
            loss_N = loss_N * weights_by_hand(sample, method)
            rows.append(torch.zeros(len(trained), dtype=DTYPE).index_put((trained,), loss_N))
        part = aggregate(pad_sequence(rows, batch_first=True), kept, "token-mean", n_tokens=counts["n_tokens"])
        loss = loss + method.loss.weight * part
    return loss, kept


def centre_of(case: Case, method: Method, logits: list[Tensor]) -> Tensor:
    """Return Σ_v q_v w_v·log p_v at every token; the weights are those of version 2, before the gradient."""
    assert method.policy is not None
    bound, rows = method.correction.is_threshold, list[Tensor]()

    def weight(ratio: Tensor) -> Tensor:
        if method.correction.is_level is None:
            return torch.ones_like(ratio)
        if isinstance(bound, tuple):
            return ratio * ((ratio >= bound[0]) & (ratio <= bound[1]))
        return torch.minimum(ratio, torch.tensor(bound, dtype=DTYPE))

    for sample, now_TV, before_TV in zip(case.samples, logits, case.log_probs(2), strict=True):
        logp_TV, row_T = (now_TV / TEMPERATURE).log_softmax(-1), list[Tensor]()
        ids_of = sample.rollout.actions if method.policy.centre == "draws" else sample.rollout.best_ids
        q_of = sample.rollout.action_logp if method.policy.centre == "draws" else sample.rollout.best_logp
        trained = sample.rollout.loss_mask.nonzero()[0].tolist()
        for t in range(len(logp_TV)):
            if t not in trained:
                row_T.append(torch.zeros((), dtype=DTYPE))
                continue
            ids = torch.from_numpy(ids_of[trained.index(t)]).long()
            q, p = torch.from_numpy(q_of[trained.index(t)]).double().exp(), before_TV[t][ids].exp()
            if method.policy.centre == "draws":
                row_T.append((weight(p[1] / q[1])) * logp_TV[t][ids[1]])
            else:
                tail = (1 - q.sum()) / (1 - p.sum())
                row_T.append(((q * weight(p / q) - tail * weight(1 / tail) * p) * logp_TV[t][ids]).sum())
        rows.append(torch.stack(row_T))
    return pad_sequence(rows, batch_first=True)


def weights_by_hand(sample: Scored, method: Method) -> Tensor:
    """Return the weights of the trained tokens, by the formulas of `loss.tokens` written out."""
    n = sample.rollout.trained_tokens
    weights_N = torch.ones(n, dtype=DTYPE)
    if method.loss.tokens == "first":
        weights_N[math.ceil(0.3 * n) :] = 0
    if method.loss.tokens == "last":
        weights_N[: n - math.ceil(0.3 * n)] = 0
    if method.loss.tokens == "turn_opd":  # the third update: turns weigh equally
        turn_N = sample.rollout.turn[sample.rollout.loss_mask].tolist()
        weights_N = torch.tensor([1 / turn_N.count(turn) for turn in turn_N], dtype=DTYPE)
    if method.loss.tokens == "iw_opd":
        gap_N = sample.rollout.logp[sample.rollout.loss_mask] - sample.teacher_logp
        weights_N = torch.tensor([math.exp(-0.5 * max(0.0, float(gap_N[:t].sum()))) for t in range(n)], dtype=DTYPE)
    if method.loss.tokens.startswith("tcod"):
        turn_N = sample.rollout.turn[sample.rollout.loss_mask]
        early_N = turn_N < 1 if method.loss.tokens == "tcod_f2b" else turn_N > sample.rollout.turn.max() - 1
        weights_N = torch.from_numpy(early_N).to(DTYPE)
    return weights_N / (weights_N.mean() or 1.0)


def reward_of(sample: Scored, method: Method, prefix: str = "") -> float:
    return sum(weight * sample.rollout.rewards[prefix + name] for name, weight in method.rewards.items())


def evidence(case: Case, method: Method, current: Tensor, kept: Tensor, weights: Tensor | None) -> dict[str, Any]:
    """Return the inputs of advantages besides rewards; for OPOB every row's gradient is really computed."""
    samples = case.samples
    full = case.log_probs(2)
    match method.policy and method.policy.advantage:
        case "gdpo":
            named = {name: torch.tensor([s.rollout.rewards[name] for s in samples]).double() for name in method.rewards}
            return {"components": named, "component_weights": dict(method.rewards)}
        case "remax":
            return {"greedy_rewards": torch.tensor([reward_of(s, method, "greedy_") for s in samples]).double()}
        case "optimal_token_baseline":
            squares = pad_sequence([logp.exp().square().sum(-1) for logp in full], batch_first=True)
            return {"logp": current, "sum_pi_squared": squares, "weights": weights}
        case "opob":
            energy = []
            for row, (sample, logp) in enumerate(zip(samples, full, strict=True)):
                n, logits = len(logp), logp.clone().requires_grad_()
                weight = kept[row, :n].double() if weights is None else (weights[row, :n] * kept[row, :n])
                ids = torch.from_numpy(sample.rollout.tokens).long()[:, None]
                chosen = logits.log_softmax(-1).gather(1, ids)[:, 0]
                (gradient,) = torch.autograd.grad((weight * chosen).sum(), logits)
                energy.append(gradient.square().sum())
            return {"weights": torch.ones(len(samples)), "grad_norm_squared": torch.stack(energy)}
    return {}


def make_learner(case: Case, method: Method, **config: Any) -> NativeLearner:
    """At version 2, with the snapshots of 0 and 1, as if it had made two updates."""
    learner = native_learner(
        wrap(case.versions[0]),
        method=method,
        config=LearnerConfig(dtype="float64", **config),
        updates=9,
        snapshots=2,
    )
    for version in (0, 1, 2):
        with torch.no_grad():
            for ours, theirs in zip(learner.lm.model.parameters(), case.versions[version].parameters(), strict=True):
                ours.copy_(theirs)
        if version < 2:
            run(learner.export())
            if method.keeps_old:
                learner.weights.snapshots.take(OLD)
        learner.now.number = learner.made = version + (version < 2)
    return learner


def update(case: Case, method: Method, groups: Sequence[Sequence[Handle]], **config: Any) -> Update:
    """Make the third update from these groups with a learner of this method."""
    learner, batch = make_learner(case, method, **config), Batch(tuple(groups), 3)

    async def work() -> Update:
        counts = total(await learner.prepare(batch))
        await learner.accumulate(batch, counts)
        gradients = [p.grad.clone() for p in learner.lm.model.parameters() if p.grad is not None]
        loss = learner.measurements.sums["loss"].item()
        return Update(counts, dict(learner.passes.tokens), loss, gradients, await learner.step())

    try:
        return run(work())
    finally:
        learner.close()


def whole_update(case: Case, name: str) -> Update:
    """Return the update by this method with every sample in one piece, which is made once."""
    if name not in case.updates:
        case.updates[name] = update(case, METHODS[name], case.groups, token_budget=90)
    return case.updates[name]


NOTHING = ReverseKLMC(m=2, weight=0.0)
SOME = ReverseKLMC(m=2, weight=0.5, temperature=TEMPERATURE)
APART = ReverseKLMC(m=2, weight=0.5, temperature=1.0)


def method(
    loss: Any = NOTHING,
    preset: str = "disabled",
    reference: ReferenceConfig | None = None,
    correction: CorrectionPreset | None = None,
) -> Method:
    return Method(
        loss=loss,
        correction=correction or PRESETS[preset],
        reference=reference,
        rewards={"exact": 1.0},
        temperature=TEMPERATURE,
        max_tokens=12,
    )


METHODS = {
    "distillation with rejection": method(SOME, "decoupled_geo_rs"),
    "distillation apart with rejection": method(APART, "decoupled_k3_rs"),
    "distillation and reference": method(SOME, reference=ReferenceConfig(weight=0.1)),
    "distillation apart and reference": method(APART, reference=ReferenceConfig(weight=0.1)),
}
for name in POLICY_LOSSES:
    METHODS[f"{name} on rewards"] = replace(method(), policy=PolicyConfig(loss=name))
for name in ("vanilla", "gspo", "m2po", "reinforce"):
    for preset in ("decoupled_token_is", "decoupled_geo_rs_seq_tis", "decoupled_token_icepop"):
        METHODS[f"{name}, {preset}"] = replace(method(SOME, preset), policy=PolicyConfig(loss=name, weight=2.0))
METHODS |= {
    "bypass weights": replace(method(preset="bypass_pg_is"), policy=PolicyConfig(loss="reinforce")),
    "bypass rejection": replace(method(preset="bypass_ppo_clip_k3_rs"), policy=PolicyConfig(loss="vanilla")),
    "two temperatures": replace(method(APART), policy=PolicyConfig(loss="vanilla")),
    "two temperatures by row": replace(method(APART), policy=PolicyConfig(loss="gmpo")),
    "sums over rows": replace(method(SOME), policy=PolicyConfig(aggregation="seq-mean-token-sum-norm")),
    "means over rows, and reference": replace(
        method(SOME, reference=ReferenceConfig(weight=0.1)), policy=PolicyConfig(aggregation="seq-mean-token-mean")
    ),
    "everything": replace(
        method(SOME, "decoupled_seq_is_rs", ReferenceConfig(weight=0.1)),
        policy=PolicyConfig(loss="gspo", advantage="rloo", options={"clip_low": 3e-3, "clip_high": 4e-3}),
    ),
    "reference in the reward": replace(
        method(reference=ReferenceConfig(weight=0.5, into="reward")),
        policy=PolicyConfig(advantage="reinforce_plus_plus"),
    ),
    "against the weights before": replace(method(), policy=PolicyConfig(old="previous")),
    "a choice of the batch, means of rows": replace(
        method(SOME), policy=PolicyConfig(loss="m2po", aggregation="seq-mean-token-mean")
    ),
    **{
        f"weights by {level}, decoupled": replace(
            method(correction=replace(PRESETS["decoupled_token_is"], is_level=level)), policy=PolicyConfig()
        )
        for level in get_args(Unit)
    },
    **{
        f"weights by {level}, bypass": replace(
            method(correction=replace(PRESETS["bypass_pg_is"], is_level=level, is_threshold=1.05)),
            policy=PolicyConfig(loss="reinforce"),
        )
        for level in get_args(Unit)
    },
    "several rewards": replace(method(), rewards={"exact": 1.0, "math": -0.5}, policy=PolicyConfig(advantage="rloo")),
    "several rewards apart": replace(
        method(), rewards={"exact": 1.0, "math": 0.5}, policy=PolicyConfig(advantage="gdpo")
    ),
    "against the greedy answer": replace(
        method(), rewards={"exact": 1.0, "math": 0.5}, policy=PolicyConfig(loss="reinforce", advantage="remax")
    ),
    **{
        f"{advantage}, {name}": replace(
            method(preset=preset), policy=PolicyConfig(loss="reinforce", advantage=advantage, advantage_options=options)
        )
        for advantage, options in (("optimal_token_baseline", {"multi_turn": True}), ("opob", {}))
        for name, preset in (("alone", "disabled"), ("weighed", "bypass_pg_is"), ("icepop", "decoupled_token_icepop"))
    },
    "OTB by position": replace(method(), policy=PolicyConfig(advantage="optimal_token_baseline")),
    **{
        f"reference in the loss by {kind}": method(SOME, reference=ReferenceConfig(weight=0.3, estimate=kind))
        for kind in ("k1", "abs", "k2", "k3")
    },
    **{
        f"reference in the loss by {kind} as it is": method(
            SOME, reference=ReferenceConfig(weight=0.3, estimate=kind, importance=False)
        )
        for kind in ("abs", "k2", "k3", "k1+", "k3+")
    },
    **{
        f"reference in the reward by {kind}": replace(
            method(reference=ReferenceConfig(weight=0.3, estimate=kind, into="reward")), policy=PolicyConfig()
        )
        for kind in ("k1", "abs", "k2", "k3")
    },
    **{
        f"centred by {kind}, {name}": replace(method(loss, preset), policy=PolicyConfig(centre=kind, **options))
        for kind in ("draws", "top_k")
        for name, loss, preset, options in (
            ("alone", NOTHING, "disabled", {"loss": "reinforce"}),
            ("weighed", NOTHING, "bypass_pg_token_icepop", {"loss": "reinforce"}),
            ("beside distillation", SOME, "bypass_pg_token_icepop", {"loss": "gpg"}),
            ("beside distillation apart", APART, "disabled", {"loss": "reinforce"}),
            ("means of rows", NOTHING, "disabled", {"loss": "reinforce", "aggregation": "seq-mean-token-mean"}),
        )
    },
    **{
        f"tokens by {tokens}, {preset}": method(
            SOME.model_copy(update={"tokens": tokens, "token_options": options}), preset
        )
        for tokens, options in (
            ("first", {}),
            ("last", {}),
            ("iw_opd", {"rate": 0.5}),
            ("tcod_f2b", {}),
            ("tcod_b2f", {}),
            ("turn_opd", {"updates": 2}),
        )
        for preset in ("disabled", "decoupled_k3_rs")
    },
    "unnormalised": replace(method(), policy=PolicyConfig(advantage_options={"norm": False})),
}


@pytest.mark.parametrize("name", METHODS)
def test_gradients_equal_the_dense_ones_however_the_batch_is_cut(case: Case, name: str) -> None:
    method = METHODS[name]
    reference = copy.deepcopy(case.versions[2])
    expected, kept = dense(case, method, reference)
    expected.backward()
    gradients = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
    found = [whole_update(case, name)]
    if name in ("everything", "two temperatures by row"):
        for cut in ({"token_budget": 100_000}, {"packing": False}, {"checkpointing": True}):
            found.append(update(case, method, case.groups, **cut))
    for each in found:
        assert each.counts == Counts(int(kept.sum()), int(kept.any(-1).sum()))
        assert each.loss == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
        for ours, dense_one in zip(each.gradients, gradients, strict=True):
            torch.testing.assert_close(ours, dense_one, rtol=1e-8, atol=1e-11)


LITTERED = {
    **{name: METHODS[name] for name in METHODS if name in POLICY_LOSSES or " on rewards" in name},
    **{name: METHODS[name] for name in ("everything", "two temperatures by row", "reference in the reward")},
    "drift and regions": replace(
        method(SOME), correction=replace(PRESETS["bypass_ppo_clip_geo_rs"], loss=None, rs={"seq_max_kl": 0.05})
    ),
}


@pytest.mark.parametrize("name", LITTERED)
def test_values_in_masked_rows_do_not_change_a_bit(case: Case, name: str) -> None:
    """Compare loss, gradients, metrics and passes. One response is masked as a whole."""
    groups = [list(group) for group in case.groups]
    last = groups[0][0].body
    groups[0][0] = Handle(groups[0][0].header, masked_sample(last, last.rollout.loss_mask & False))
    found = []
    for litter in (False, True):
        handles = [
            [
                Handle(header_of(sample.rollout), sample)
                for handle in group
                for sample in [littered(handle.body, seed=handle.header.index) if litter else handle.body]
            ]
            for group in groups
        ]
        found.append(update(case, LITTERED[name], handles, token_budget=90, exact_drift=True))
    (*plain, gradients, metrics), (*other, its_gradients, its_metrics) = found
    assert plain == other and metrics == its_metrics
    assert gradients and all(torch.equal(a, b) for a, b in zip(gradients, its_gradients, strict=True))


def in_branches(group: list[Handle], cuts: list[int]) -> list[Handle]:
    """Split every member into two lineages; each trains the tokens on its side of the cut and observes the others."""
    found = []
    for handle, cut in zip(group, cuts, strict=True):
        sample, mask = handle.body, handle.body.rollout.loss_mask
        first = np.arange(len(mask)) < cut
        for branch, its in enumerate((mask & first, mask & ~first)):
            part = masked_sample(sample, its)
            rollout = replace(part.rollout, index=2 * handle.header.index + branch, branch=branch)
            found.append(Handle(header_of(rollout), replace(part, rollout=rollout)))
    return found


IN_BRANCHES = [
    name
    for name, each in METHODS.items()
    if each.policy is None or each.policy.loss != "clip_cov"
    if name not in ("weights by turn, bypass", "st_ppo on rewards", "OTB by position")
    and not name.startswith(("tokens by tcod", "tokens by turn"))
]
"""All but those by turn, since a branch is a call of its own, and methods that draw or compare by position."""


@pytest.mark.parametrize("name", IN_BRANCHES)
def test_an_episode_in_branches_is_learned_as_in_one_piece(case: Case, name: str) -> None:
    """Compare counts, loss, gradients and metrics of episodes: an episode has one reward, and a token counts once."""
    rng = np.random.default_rng(0)
    cuts = [[int(rng.integers(0, 1 + len(handle.body.rollout.tokens))) for handle in group] for group in case.groups]
    branches = [in_branches(list(group), cut) for group, cut in zip(case.groups, cuts, strict=True)]
    whole, found = whole_update(case, name), update(case, METHODS[name], branches, token_budget=90)
    assert found.counts == whole.counts and whole.counts.n_sequences <= len(case.samples)
    assert found.loss == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)
    for one, other in zip(whole.gradients, found.gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-11)
    of_episodes = {"policy/reward", "policy/rows_moved", "correction/rollout_rs_masked_fraction", "mismatch/chi2_seq"}
    for key in of_episodes & whole.metrics.keys():
        assert found.metrics[key] == pytest.approx(whole.metrics[key], rel=1e-9)


def test_branches_of_an_episode_share_a_reward(case: Case) -> None:
    (group, *_), learner = case.groups, make_learner(case, METHODS["vanilla on rewards"])
    split = in_branches(list(group), [2] * len(group))
    other = replace(split[1].body.rollout, rewards={"exact": 0.5})
    split[1] = Handle(header_of(other), replace(split[1].body, rollout=other))
    with pytest.raises(ValueError, match=r"group 0, episode 0: its branches have rewards .*0.5"):
        run(learner.prepare(Batch((split,), 3)))
    learner.close()


def test_a_check_before_an_update_counts_no_tokens_of_it(case: Case) -> None:
    learner, batch = make_learner(case, METHODS["vanilla on rewards"], token_budget=90), Batch(tuple(case.groups), 3)

    async def work() -> dict[str, float]:
        await learner.compare(Batch((tuple(case.groups[0]),), 3))
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        return await learner.step()

    found, whole = run(work()), whole_update(case, "vanilla on rewards").metrics
    learner.close()
    assert {name: found[name] for name in ("rows/filled", "saved/prompt")}.items() <= whole.items()


def test_drift_is_that_of_the_learner_to_what_drew_its_tokens_by_lag(case: Case) -> None:
    learner, samples = make_learner(case, method(SOME)), case.samples
    batch = Batch(tuple(case.groups), 3)

    async def work() -> dict[str, float]:
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        return await learner.step()

    found = run(work())
    logp = case.emitted(2)
    lag = 2 - of(samples, "versions")
    expected = offpolicy_metrics(logp, of(samples, "logp"), of(samples, "loss_mask"), lag=lag)
    assert {"kl/lag_1", "kl/lag_2-3"} <= set(expected)
    for name, value in expected.items():
        assert found[f"drift/{name}"] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("cut", [{}, {"token_budget": 90}, {"packing": False}])
def test_99_percent_of_the_ratios_are_below_their_percentile(case: Case, cut: dict[str, Any]) -> None:
    method_of_both = replace(method(SOME), policy=PolicyConfig(loss="vanilla"))
    found = update(case, method_of_both, case.groups, **cut).metrics
    drawn = torch.cat([torch.from_numpy(sample.rollout.action_logp).flatten() for sample in case.samples]).double()
    by = [
        logp_TV[sample.rollout.loss_mask].gather(1, torch.from_numpy(sample.rollout.actions).long()).flatten()
        for sample, logp_TV in zip(case.samples, case.log_probs(2), strict=True)
    ]
    emitted = (case.emitted(2) - of(case.samples, "logp"))[of(case.samples, "loss_mask") != 0]
    for name, log_ratios in (("distill", torch.cat(by) - drawn), ("policy", emitted)):
        wanted = log_ratios.exp().quantile(0.99, interpolation="higher").item()
        assert found[f"{name}/ratio_p99"] == pytest.approx(wanted, rel=0.006)
        assert found[f"{name}/ratio"] <= found[f"{name}/ratio_p99"] <= found[f"{name}/ratio_max"] * 1.006


def test_a_decoupled_correction_measures_the_engines_apart_from_staleness(case: Case) -> None:
    """Sampler and learner are the same code here: at its own version, a token has the same log-prob in both."""
    learner = make_learner(case, replace(method(preset="decoupled_token_is"), policy=PolicyConfig()))
    run(learner.prepare(Batch(tuple(case.groups), 3)))
    ((_, noted),) = learner.measurements.notes
    assert noted["mismatch/k3_kl"] < 1e-20 and noted["old_logp_missing"] == 0
    assert noted["correction/rollout_is_mean"] == pytest.approx(1.0)


def test_a_turn_is_one_unit_and_several_are_several(case: Case) -> None:
    """By turns of the record: another weight in each, and the whole row's where all of it is one turn."""

    def weights(groups: list[list[Handle]], level: Unit) -> dict[Any, Tensor]:
        by_level = replace(PRESETS["bypass_pg_is"], is_level=level, is_threshold=1e9)
        learner = make_learner(case, replace(method(correction=by_level), policy=PolicyConfig(loss="reinforce")))
        run(learner.prepare(Batch(tuple(groups), 3)))
        return {
            key: each.columns["weights"][each.mask_T]
            for key, each in learner.now.constants.items()
            if "weights" in each.columns
        }

    def in_one_turn(handle: Handle) -> Handle:
        rollout = handle.body.rollout
        return replace(handle, body=replace(handle.body, rollout=replace(rollout, turn=np.zeros_like(rollout.turn))))

    by_turn, by_row = weights(case.groups, "turn"), weights(case.groups, "sequence")
    assert max(len(weight.unique()) for weight in by_turn.values()) == 2
    for key, weight in by_turn.items():
        torch.testing.assert_close(weight.unique().prod(), by_row[key][0])
    assert {len(weight.unique()) for weight in by_row.values()} == {1}
    once = weights([[in_one_turn(handle) for handle in group] for group in case.groups], "turn")
    for key, weight in by_row.items():
        torch.testing.assert_close(once[key], weight, rtol=1e-14, atol=0)


def test_the_squares_of_all_probabilities_come_with_the_log_probs_of_the_drawn(case: Case) -> None:
    learner = make_learner(case, method())
    logp, squares = learner.passes.log_probs_and_squares(case.samples)
    for sample, logp_T, square_T, full in zip(case.samples, logp, squares, case.log_probs(2), strict=True):
        mask = torch.from_numpy(sample.rollout.loss_mask)
        torch.testing.assert_close(square_T[mask], full.exp().square().sum(-1)[mask], rtol=1e-10, atol=0)
        ids = torch.from_numpy(sample.rollout.tokens).long()
        torch.testing.assert_close(logp_T[mask], full[torch.arange(len(ids)), ids][mask], rtol=1e-10, atol=1e-12)
        assert (square_T[~mask] == 0).all()


def test_bad_answers_that_the_policy_has_left_are_rejected_in_both_modes(case: Case) -> None:
    """The engines agree, so a decoupled correction that looked at the old policy would never reject anything."""
    samples = case.samples
    mask, behavior = of(samples, "loss_mask"), of(samples, "logp").double()
    gap = ((behavior - case.emitted(2)) * mask).sum(-1) / mask.sum(-1)
    rewards = torch.tensor([sample.rollout.rewards["exact"] for sample in samples])
    groups = torch.tensor([sample.rollout.prompt.number for sample in samples])
    bad = torch.tensor([bool(r < rewards[groups == g].mean()) for r, g in zip(rewards, groups, strict=True)])
    middle = len(gap[bad]) // 2
    bound = float(gap[bad].sort().values[middle - 1 : middle + 1].mean())  # between two: the last bit decides nothing
    expected = ~(bad & (gap > bound))
    assert 0 < expected.sum() < len(expected)
    for preset, loss in (("decoupled_geo_rs", "vanilla"), ("bypass_ppo_clip_geo_rs", "vanilla")):
        rejecting = replace(PRESETS[preset], rs={"negative_seq": bound})
        learner = make_learner(case, replace(method(), policy=PolicyConfig(loss=loss), correction=rejecting))
        counts = run(learner.prepare(Batch(tuple(case.groups), 3)))
        kept = torch.tensor([bool(learner.now.constants[key].mask_T.any()) for key in learner.now.samples])
        assert torch.equal(kept, expected), preset
        assert total(counts).n_sequences == expected.sum()


def test_rows_beyond_the_trust_region_are_rejected_by_their_exact_kl(case: Case) -> None:
    """max_t KL(what drew ‖ current), over the whole vocabulary; a token whose weights are gone is in no region."""
    samples, worst = case.samples, []
    for rollout, now, *before in zip([s.rollout for s in samples], *map(case.log_probs, (2, 0, 1)), strict=True):
        kl = torch.stack([(old.exp() * (old - now)).sum(-1) for old in before])
        at = torch.from_numpy(rollout.versions)[None].clamp(min=0)
        worst.append(float(kl.gather(0, at)[0][torch.from_numpy(rollout.loss_mask)].max()))
    bound = sorted(worst)[len(worst) // 2] * 1.000001
    by_kl = replace(
        method(SOME), correction=replace(PRESETS["bypass_ppo_clip_geo_rs"], loss=None, rs={"seq_max_kl": bound})
    )
    learner = make_learner(case, by_kl, token_budget=60)
    run(learner.prepare(Batch(tuple(case.groups), 3)))
    kept = [bool(learner.now.constants[key].mask_T.any()) for key in learner.now.samples]
    assert kept == [each <= bound for each in worst] and 0 < sum(kept) < len(kept)
    ((_, noted),) = learner.measurements.notes
    assert noted["kl_missing"] == 0

    learner = make_learner(case, by_kl)
    del learner.weights.snapshots.weights[0]
    run(learner.prepare(Batch(tuple(case.groups), 3)))
    assert not any(each.mask_T.any() for each in learner.now.constants.values()), (
        "version 0 drew the beginning of every row"
    )
    gone = sum(int((s.rollout.loss_mask & (s.rollout.versions == 0)).sum()) for s in samples)
    ((_, noted),) = learner.measurements.notes
    assert noted["kl_missing"] == gone / sum(int(s.rollout.loss_mask.sum()) for s in samples) > 0


@pytest.mark.parametrize(
    ("rewards", "reference", "positive"),
    [
        ([0.2, 0.9], None, [False, True]),  # graded: both earned something
        ([-1.0, -0.2], None, [False, True]),  # nobody did
        ([1.0, 1.0], [0.0, 0.8], [False, True]),  # equal, but the first has left the reference
    ],
)
def test_toprs_sign_is_that_of_the_advantage_as_used(
    rewards: list[float], reference: list[float] | None, positive: list[bool]
) -> None:
    logp, mask = torch.full((3,), -1.0, dtype=DTYPE), torch.ones(3, dtype=torch.bool)
    batch = [
        SampleInputs(
            group=0,
            episode=i,
            rewards={"exact": reward},
            mask_T=mask,
            behavior_T=logp,
            columns={"reference": logp - 1 + near},
        )
        for i, (reward, near) in enumerate(zip(rewards, reference or [1.0, 1.0], strict=True))
    ]
    of_reward = ReferenceConfig(weight=0.5, into="reward") if reference else None
    topr = replace(method(reference=of_reward), policy=PolicyConfig(loss="topr"))
    frozen, _ = compute_constants(batch, topr, update=1)
    assert [bool(each.columns["positive"]) for each in frozen] == positive


def test_tokens_whose_version_is_gone_are_corrected_by_what_drew_them_and_counted(case: Case) -> None:
    learner = make_learner(case, replace(method(preset="decoupled_token_is"), policy=PolicyConfig()))
    del learner.weights.snapshots.weights[0]
    run(learner.prepare(Batch(tuple(case.groups), 3)))
    gone = sum(int((s.rollout.loss_mask & (s.rollout.versions == 0)).sum()) for s in case.samples)
    ((_, noted),) = learner.measurements.notes
    assert noted["old_logp_missing"] == gone / sum(int(s.rollout.loss_mask.sum()) for s in case.samples) > 0
    for sample in case.samples:
        frozen = learner.now.constants[sample.rollout.prompt.number, sample.rollout.index]
        zero = torch.from_numpy((sample.rollout.versions == 0) & sample.rollout.loss_mask)
        assert torch.equal(frozen.columns["old"][zero], torch.from_numpy(sample.rollout.logp).double()[zero])


def test_the_ring_keeps_the_newest_versions_and_the_reference_stays(case: Case) -> None:
    learner = make_learner(case, method(SOME, reference=ReferenceConfig(weight=0.1, host=True)))
    for version in range(3, 7):
        learner.made = version
        run(learner.export())
    assert set(learner.weights.snapshots.weights) == {5, 6, "reference"}


@pytest.mark.parametrize("cut", [1, 2])
def test_what_was_frozen_stays_through_minibatches_and_epochs(case: Case, cut: int) -> None:
    """Two epochs of mini-batches: every gradient is the dense one at today's weights and the first look's decisions."""
    method = replace(METHODS["gspo, decoupled_token_icepop"], loss=NOTHING)
    learner = make_learner(case, method, lr=1e-4, epochs=2, minibatches=cut, clip_norm=1e9)
    batch = Batch(tuple(case.groups), 3)

    async def work() -> list[float]:
        counts, norms = await learner.prepare(batch), []
        first = dict(learner.now.constants)
        for _ in range(2):
            left = list(counts)
            for part in batch.parts(cut):
                of_part, left = total(left[: len(part.groups)]), left[len(part.groups) :]
                expected = dense_part(case, method, learner, part, of_part)
                await learner.accumulate(part, of_part)
                assert learner.measurements.sums["loss"].item() == pytest.approx(expected, rel=1e-8, abs=1e-12)
                norms.append((await learner.step())["grad_norm"])
        assert learner.now.constants == first
        return norms

    norms = run(work())
    assert len(set(norms)) == 2 * cut and all(np.isfinite(norms))


def dense_part(case: Case, method: Method, learner: NativeLearner, part: Batch, counts: Counts) -> float:
    samples = [handle.body for handle in part.handles]
    frozen = [learner.now.constants[s.rollout.prompt.number, s.rollout.index] for s in samples]
    model = copy.deepcopy(learner.lm.model)
    model.set_attn_implementation("sdpa")
    assert method.policy is not None
    loss, _ = policy_loss(
        method.policy.loss,
        emitted(logits_of(model, samples), samples),
        *(pad_sequence([each.columns[name] for each in frozen], batch_first=True) for name in ("old", "advantages")),
        pad_sequence([each.mask_T for each in frozen], batch_first=True),
        weights=pad_sequence([each.columns["weights"] for each in frozen], batch_first=True),
        n_tokens=counts.n_tokens,
        n_sequences=counts.n_sequences,
    )
    return method.policy.weight * loss.item()


@pytest.mark.parametrize("name", ["gspo on rewards", "vanilla on rewards"])
def test_parts_that_do_not_know_the_whole_add_up_to_it(case: Case, name: str) -> None:
    """Periodic order: plain sums, one division at the step. For a loss over sequences too."""
    whole, parts = make_learner(case, METHODS[name]), make_learner(case, METHODS[name])
    batch = Batch(tuple(case.groups), 3)

    async def work() -> tuple[dict[str, float], dict[str, float]]:
        await whole.accumulate(batch, total(await whole.prepare(batch)))
        counts = []
        for group in reversed(case.groups):
            part = Batch((group,), 3)
            counts += await parts.prepare(part)
            await parts.accumulate(part, ONE_COUNT)
        return await whole.step(), await parts.step(total(counts))

    one, other = run(work())
    for metric in ("loss", "grad_norm", "drift/kl", "policy/ratio", "policy/reward"):
        assert other[metric] == pytest.approx(one[metric], rel=1e-9), metric


def test_half_precision_products_leave_the_weights_whole(case: Case) -> None:
    batch, gradients = Batch(tuple(case.groups), 1), []

    async def work(learner: NativeLearner) -> None:
        await learner.accumulate(batch, total(await learner.prepare(batch)))

    for config in (LearnerConfig(), LearnerConfig(compute_dtype="bfloat16")):
        learner = native_learner(wrap(make_model("qwen3", seed=3)), method=method(SOME), config=config, updates=3)
        run(work(learner))
        parameters = list(learner.lm.model.parameters())
        assert all(
            p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in parameters
        )
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0).item()
    assert 0.99 < cosine < 0.999999, "bfloat16 was used, and is close"


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_moments_of_another_precision_follow_those_of_torch(moments: str) -> None:
    from slipstream.engines.native.learning.step import load_moments, make_optimizer
    from slipstream.engines.native.learning.storage import moments_of

    config = {"lr": 1e-2, "weight_decay": 0.1, "dtype": "float64"}
    start = torch.randn(5, 7, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
    exact, mixed = (torch.nn.Parameter(start.clone()) for _ in range(2))
    ours = make_optimizer([mixed], LearnerConfig(optimizer_dtype=moments, **config))
    theirs = make_optimizer([exact], LearnerConfig(**config))
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        exact.grad = torch.randn(5, 7, dtype=DTYPE, generator=generator)
        mixed.grad = exact.grad.clone()
        ours.step()
        theirs.step()
        if step == 4:
            state = moments_of(ours)
            ours = make_optimizer([mixed], LearnerConfig(optimizer_dtype=moments, **config))
            load_moments(ours, state, in_host_memory=False)
    kept = ours.state[mixed]
    assert kept["exp_avg"].dtype == kept["exp_avg_sq"].dtype == getattr(torch, moments)
    torch.testing.assert_close(mixed, exact, atol={"float32": 1e-7, "bfloat16": 2e-3}[moments], rtol=0)
    assert not torch.equal(mixed, exact)


def test_a_transposed_weight_goes_on_with_moments_of_a_checkpoint_which_are_contiguous() -> None:
    from slipstream.engines.native.learning.step import make_optimizer

    config, generator = LearnerConfig(lr=1e-2, dtype="float64"), torch.Generator().manual_seed(1)
    start = torch.randn(5, 7, dtype=DTYPE, generator=generator)
    weights = [torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.t().contiguous().t())]
    optimizers = [make_optimizer([weight], config) for weight in weights]
    for _ in range(3):
        gradient = torch.randn(5, 7, dtype=DTYPE, generator=generator)
        for i, weight in enumerate(weights):
            weight.grad = torch.empty_like(weight).copy_(gradient)
            optimizers[i].step()
            state = optimizers[i].state_dict()
            moments = {
                name: value.clone(memory_format=torch.contiguous_format) for name, value in state["state"][0].items()
            }
            optimizers[i] = make_optimizer([weight], config)
            optimizers[i].load_state_dict(state | {"state": {0: moments}})
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("moments", ["float32", "float64"])
def test_the_measured_step_is_the_change_of_the_weights(moments: str) -> None:
    from slipstream.engines.native.learning.step import make_optimizer, squared_step

    lr, generator = 1e-2, torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(shape, dtype=DTYPE, generator=generator)) for shape in ((5, 7), (3,))]
    config = LearnerConfig(lr=lr, weight_decay=0.0, dtype="float64", optimizer_dtype=moments)
    optimizer, measured = make_optimizer(weights, config), []
    assert squared_step(optimizer) == (0.0, 0), "there was no step"
    for _ in range(6):
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.grad = torch.randn(weight.shape, dtype=DTYPE, generator=generator)
        optimizer.step()
        moved = sum(float((weight.detach() - old).square().sum()) for weight, old in zip(weights, before, strict=True))
        squares, count = squared_step(optimizer)
        assert squares == pytest.approx(moved / lr**2, rel=1e-5) and count == 38
        measured.append(squares / count)
    assert measured[0] == pytest.approx(1.0, rel=1e-5), "the first step of AdamW is lr for every weight"
    assert measured[-1] < 0.5, "gradients without a common direction make small steps"


def test_exact_drift_is_the_dense_kl_to_the_version_that_drew(case: Case) -> None:
    learner = make_learner(case, method(SOME), exact_drift=True, token_budget=60)
    run(learner.prepare(Batch(tuple(case.groups), 3)))
    kl, tokens = 0.0, 0
    for rollout, now, *before in zip([s.rollout for s in case.samples], *map(case.log_probs, (2, 0, 1)), strict=True):
        for version, old in enumerate(before):
            here = torch.from_numpy(rollout.loss_mask & (rollout.versions == version))
            kl += float((now.exp() * (now - old)).sum(-1)[here].sum())
            tokens += int(here.sum())
    ((_, noted),) = learner.measurements.notes
    assert noted["drift/rollout_kl"] == pytest.approx(kl / tokens, rel=1e-9)
    assert noted["drift/rollout_kl_coverage"] == 1.0


def test_the_trust_region_and_exact_drift_make_their_passes_once(case: Case) -> None:
    by_kl = replace(
        method(SOME), correction=replace(PRESETS["bypass_ppo_clip_geo_rs"], loss=None, rs={"seq_max_kl": 9})
    )
    computed, noted = [], []
    for given, config in ((by_kl, {}), (method(SOME), {"exact_drift": True}), (by_kl, {"exact_drift": True})):
        learner = make_learner(case, given, **config)
        run(learner.prepare(Batch(tuple(case.groups), 3)))
        computed.append(learner.passes.tokens["computed"])
        noted.append({name: value for _, part in learner.measurements.notes for name, value in part.items()})
        learner.close()
    region, drift, both = computed
    plain = make_learner(case, replace(by_kl, correction=PRESETS["bypass_ppo_clip_geo_rs"]))
    run(plain.prepare(Batch(tuple(case.groups), 3)))
    plain_pass = plain.passes.tokens["computed"]
    plain.close()
    assert region - plain_pass == drift and both == region, "the current policy's own pass, and each version's"
    assert noted[2] == noted[0] | noted[1]


def test_rewards_of_samples_that_nobody_trains_on_are_in_no_mean() -> None:
    logp, some = torch.full((3,), -1.0, dtype=DTYPE), torch.tensor([True, True, False])
    batch = [
        SampleInputs(group=0, episode=i, rewards={"exact": reward}, mask_T=mask, behavior_T=logp)
        for i, (reward, mask) in enumerate(((1.0, some), (0.0, some), (100.0, some & False)))
    ]
    _, metrics = compute_constants(batch, replace(method(), policy=PolicyConfig()), update=1)
    assert metrics["policy/reward"] == 0.5 and metrics["policy/rows_moved"] == 1.0
    _, metrics = compute_constants(batch[2:], replace(method(), policy=PolicyConfig()), update=1)
    assert metrics["policy/reward"] == metrics["policy/rows_moved"] == 0.0


def test_the_prompt_explains_the_variance_between_groups() -> None:
    """Groups {0, 1} and {1, 1}: two thirds of the variance are within the first; equal rewards have none."""
    groups = torch.tensor([0, 0, 1, 1])
    rewards = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=DTYPE)
    assert explained_variance(rewards, groups) == pytest.approx(1 - 0.5 / 0.75)
    assert explained_variance(torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=DTYPE), groups) == 1.0
    assert explained_variance(torch.full((4,), 0.1, dtype=DTYPE), groups) is None
    assert explained_variance(rewards[:0], groups[:0]) is None
    assert explained_variance(rewards[:2], groups[:2]) is None, "a group that comes alone is compared with none"


def graded_alike(group: list[Handle]) -> list[Handle]:
    """The group, with the same rewards for all its responses."""
    found = [replace(h.body, rollout=replace(h.body.rollout, rewards={"exact": 1.0, "math": 0.5})) for h in group]
    return [Handle(h.header, body) for h, body in zip(group, found, strict=True)]


@pytest.mark.parametrize("preset", ["disabled", "decoupled_token_is"])
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "m2po", "oapl"])
def test_groups_whose_rewards_are_alike_are_left_out_of_loss_and_denominators(
    case: Case, loss: str, preset: str
) -> None:
    """The update is the one without these groups; without such groups nothing changes."""
    leaving = replace(method(preset=preset), policy=PolicyConfig(loss=loss, drop_alike=True))
    some = [graded_alike(group) if i in (1, 4) else group for i, group in enumerate(case.groups)]
    found, without = update(case, leaving, some), update(case, leaving, [case.groups[i] for i in (0, 2, 3)])
    assert found.counts == without.counts and found.loss == pytest.approx(without.loss, rel=1e-12)
    torch.testing.assert_close(found.gradients, without.gradients)
    assert found.metrics["policy/rows_moved"] == pytest.approx(3 / 5) and without.metrics["policy/rows_moved"] == 1
    keeping = replace(leaving, policy=PolicyConfig(loss=loss))
    assert update(case, keeping, some).counts.n_sequences == without.counts.n_sequences + 6
    one, other = (update(case, each, case.groups) for each in (leaving, keeping))
    assert one.counts == other.counts and one.loss == other.loss


def test_alike_means_the_sum_of_rewards_or_each_of_them_for_gdpo() -> None:
    """Sums agree in the first group, and each reward in the second; the last sample is not the student's."""
    logp, mask = torch.full((3,), -1.0, dtype=DTYPE), torch.ones(3, dtype=torch.bool)
    rewards = [(0, 1.0, 0.0), (0, 0.0, 1.0), (1, 0.5, 0.5), (1, 0.5, 0.5), (2, 1.0, 0.0), (2, 0.0, 0.0), (3, 1.0, 1.0)]
    batch = [
        SampleInputs(
            group=group,
            episode=i,
            rewards={"exact": exact, "math": math},
            mask_T=mask,
            behavior_T=logp,
        )
        for i, (group, exact, math) in enumerate(rewards)
    ]
    batch.append(replace(batch[0], group=4, episode=9, rewards={}, drawn=False))
    for advantage_name, left in (
        ("grpo", [False] * 4 + [True] * 2 + [False]),
        ("gdpo", [True] * 2 + [False] * 2 + [True] * 2 + [False]),
    ):
        policy = PolicyConfig(advantage=advantage_name, drop_alike=True)  # type: ignore[arg-type]
        frozen, metrics = compute_constants(
            batch, replace(method(), rewards={"exact": 1.0, "math": 1.0}, policy=policy), update=1
        )
        assert [bool(each.mask_T.any()) for each in frozen] == [*left, True]
        assert metrics["policy/rows_moved"] == pytest.approx(2 / 7), "of all rows, as without the setting"


def test_teachers_have_weights_and_metrics_of_their_own(case: Case) -> None:
    """Every other prompt is another teacher's, whose samples count three times."""
    names = {sample.rollout.prompt.number: "ab"[sample.rollout.prompt.number % 2] for sample in case.samples}
    groups = tuple(
        [Handle(h.header, replace(h.body, teacher=names[h.header.number])) for h in group] for group in case.groups
    )
    learner = make_learner(case, replace(method(SOME), teachers={"a": 1.0, "b": 3.0}), token_budget=50)

    async def work() -> dict[str, float]:
        batch = Batch(groups, 3)
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        return await learner.step()

    found = run(work())
    sums, tokens = {"a": 0.0, "b": 0.0}, {"a": 0, "b": 0}
    for sample, logp in zip(case.samples, case.log_probs(2), strict=True):
        ids, name = torch.from_numpy(sample.rollout.actions).long(), names[sample.rollout.prompt.number]
        mask = torch.from_numpy(sample.rollout.loss_mask)
        at = logp[mask].gather(1, ids)
        behavior, logq = torch.from_numpy(sample.rollout.action_logp), torch.from_numpy(sample.teacher_action_logp)
        sums[name] += mc_reverse_kl(at, behavior.double(), logq.double())[0].sum().item()
        tokens[name] += int(mask.sum())
    everyone = tokens["a"] + tokens["b"]
    assert found["loss"] == pytest.approx(SOME.weight * (sums["a"] + 3 * sums["b"]) / everyone, rel=1e-9)
    assert found["distill/loss"] == pytest.approx((sums["a"] + sums["b"]) / everyone, rel=1e-9)
    for name in "ab":
        assert found[f"teacher/{name}/loss"] == pytest.approx(sums[name] / tokens[name], rel=1e-9)
        assert found[f"teacher/{name}/share"] == pytest.approx(tokens[name] / everyone, rel=1e-9)


def test_an_update_of_which_nothing_is_left_leaves_no_trace(case: Case) -> None:
    learner = make_learner(case, METHODS["distillation with rejection"], lr=1e-2)
    batch = Batch(tuple(case.groups), 3)

    async def work() -> None:
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        await learner.step()  # AdamW has momentum now
        before = [p.detach().clone() for p in learner.lm.model.parameters()]
        none = Batch(tuple(case.groups), 4)
        await learner.prepare(none)
        learner.now.constants = {
            key: replace(each, mask_T=each.mask_T & False) for key, each in learner.now.constants.items()
        }
        await learner.accumulate(none, Counts(0, 0))
        assert (await learner.step())["grad_norm"] == 0
        assert all(torch.equal(a, b) for a, b in zip(before, learner.lm.model.parameters(), strict=True))

    run(work())


def test_a_stop_between_gradient_and_step_is_resumed_from_the_update_before(case: Case, tmp_path: Path) -> None:
    stale = replace(method(), policy=PolicyConfig(old="previous"))
    first, again = make_learner(case, stale), make_learner(case, stale)

    async def work() -> None:
        await first.prepare(Batch(tuple(case.groups), 3))
        await first.save(tmp_path)
        await again.restore(tmp_path)
        assert again.made == 2
        await again.export()
        assert max(version for version in again.weights.snapshots.weights if isinstance(version, int)) == 2
        await again.prepare(Batch(tuple(case.groups), 3))

    run(work())
    for key, one in first.now.constants.items():
        assert torch.equal(one.columns["old"], again.now.constants[key].columns["old"])


@pytest.mark.parametrize(
    "name", ["distillation apart and reference", "vanilla on rewards", "gspo, decoupled_token_icepop", "KL alone"]
)
def test_the_weight_of_a_stored_sample_multiplies_its_losses(case: Case, name: str) -> None:
    """Gradients are linear in the weight; counts and the measured KL do not change."""
    alone = method(NOTHING, reference=ReferenceConfig(weight=0.5))
    chosen = alone if name == "KL alone" else METHODS[name]

    def weighted(weight: float) -> Update:
        first, *rest = case.groups
        return update(case, chosen, [[handle.with_header(weight=weight) for handle in first], *rest], token_budget=90)

    none, half, whole = (weighted(weight) for weight in (0.0, 0.5, 1.0))
    assert none.counts == whole.counts
    for at_0, at_half, at_1 in zip(none.gradients, half.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(at_half, (at_0 + at_1) / 2)
    assert any(not torch.allclose(a, b) for a, b in zip(none.gradients, whole.gradients, strict=True))
