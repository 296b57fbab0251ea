"""Freshness at work: the loss of every arm against its formula, how drift is known, and runs that refresh."""

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.config.freshness import FreshnessConfig
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import LossConfig, ReverseKLMC
from slipstream.config.objective import PolicyConfig
from slipstream.config.schedule import Async, Periodic, Replay, StepOff, Sync
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.estimators.drift import rollout_kl_from_cache, score
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.pipeline.control.buffer_refresh import DRIFT_BY_LAG, Buffer, Curve, Level
from slipstream.protocols import SampleFreshness
from slipstream.records import ONE_COUNT, Batch, Handle, Scored, header_of, total
from slipstream.run_dir.writing import read_lines
from support import toy_runs
from support.engines import native_learner
from support.loss_formulas import (
    CHOSEN,
    FORMULAS,
    View,
    at,
    chosen,
    distributions,
    drew,
    grads_of,
    groups_for,
    likely,
    teacher_of,
)
from support.tiny_models import make_model, wrap

UPDATE = 6
ARMS = {
    "full": {},
    "stronger": {"alpha": 2.0, "threshold": 0.15, "anchor": 1.0},
    "weight": {"anchor": 0.0, "refresh": "never"},
    "lag only": {"weight": "lag", "anchor": 0.0, "refresh": "never"},
    "anchor only": {"weight": "equal", "anchor": 0.5, "refresh": "never"},
    "refresh only": {"weight": "equal", "anchor": 0.0},
    "fixed refresh": {"weight": "equal", "anchor": 0.0, "refresh": "fixed"},
    "without lag": {"lag": False},
    "not normalised": {"normalise": "off"},
    "variance kept": {"normalise": "variance", "normalise_by": "samples"},
    "common": {"weight": "common", "normalise": "off"},
    "over samples": {"normalise_by": "samples", "anchor": 1.0},
    "supervision moved": {"beta": 1.5},
    "supervision moved, over samples": {"beta": 1.5, "normalise_by": "samples"},
}


def stale(groups: Sequence[Sequence[Handle]], *, asked_again: bool = False) -> list[list[Handle]]:
    """Return records of several versions: every response of others, some of two.

    Their teacher was asked again, and gave other scores, where these can be compared.
    """
    found, rng = [], np.random.default_rng(0)
    for number, group in enumerate(groups):
        handles = []
        for index, handle in enumerate(group):
            rollout = handle.body.rollout
            versions = np.full(len(rollout.tokens), 5 - (2 * number + index) % 6, np.int32)
            versions[len(versions) // 2 :] = 5
            rollout = replace(rollout, versions=versions)
            body, drift = replace(handle.body, rollout=rollout), dict[str, float]()
            if asked_again:
                kl_N = rng.random(len(versions)) * 0.3
                kl_N[rng.random(len(kl_N)) < 0.3] = np.nan
                body = replace(body, supervision_kl=kl_N)
                drift = {"moved": float(np.nanmean(kl_N)), "aligned": float(1 - np.isnan(kl_N).mean())}
            handles.append(Handle(header_of(rollout, teacher="teacher", **drift), body))
        found.append(handles)
    return found


def moved(name: str = "phi") -> PreTrainedModel:
    """A student that is not the one that drew."""
    student = make_model(name, seed=0, dtype=torch.float64)
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype))
    return student


def learner_of(model: PreTrainedModel, loss: LossConfig, fresh: FreshnessConfig | None, **more: Any) -> NativeLearner:
    config = LearnerConfig(batch_size=8, dtype="float64", lr=0.01, clip_norm=1e9, token_budget=64)
    return native_learner(
        wrap(model),
        method=Method(loss=loss, max_tokens=9, freshness=fresh, **more),
        config=config,
        updates=UPDATE,
        teacher_heads={"teacher": TeacherHead(wrap(teacher_of(torch.float64)).head)}
        if loss.spec.cache == "hidden"
        else None,
    )


def written_out(
    loss_N: Tensor, kl_N: Tensor, samples: Sequence[Scored], fresh: FreshnessConfig
) -> tuple[Tensor, list[float]]:
    """Return Σ_i w_i (ℓ_i + λ D_i) / (s |M|) from the values of every token, and the weights; s normalises them."""
    parts, weights, n = [], list[float](), [sample.rollout.trained_tokens for sample in samples]
    for sample, loss_T, kl_T in zip(samples, loss_N.split(n), kl_N.split(n), strict=True):
        lag, sup, known_T = (
            UPDATE - 1 - int(sample.rollout.versions.min()),
            0.0,
            torch.ones_like(kl_T, dtype=torch.bool),
        )
        if sample.supervision_kl is not None:
            known_T = ~torch.from_numpy(sample.supervision_kl).isnan()
            sup = float(np.nanmean(sample.supervision_kl))
            loss_T = loss_T[known_T]
        drift = fresh.alpha * math.sqrt(float(kl_T.detach().mean())) + fresh.beta * math.sqrt(sup)
        f = math.exp(-drift) / ((lag if fresh.lag else 0) + 1)
        w = {"lag": 1 / (lag + 1), "equal": 1.0}.get(fresh.weight, max(0.0, f - fresh.threshold))
        mean = torch.sum if fresh.normalise_by == "tokens" else torch.mean
        parts.append((1.0 if fresh.weight == "common" else w) * (mean(loss_T) + fresh.anchor * mean(kl_T)))
        weights.append(w)
    mean_weight = sum(weights) / len(weights)
    mean_square = sum(w**2 for w in weights) / len(weights)
    divisor = {"off": 1.0, "mean": mean_weight, "variance": math.sqrt(mean_square)}[fresh.normalise]
    if fresh.weight == "common":
        divisor = 1 / mean_weight
    return torch.stack(parts).sum() / divisor / (sum(n) if fresh.normalise_by == "tokens" else len(samples)), weights


def gradients_of_steps(learner: NativeLearner) -> list[Tensor]:
    """A list to which every optimizer step of this learner adds the gradient that it is made with."""
    found = list[Tensor]()
    learner.steps.optimizer.register_step_pre_hook(lambda *_: found.append(grads_of(learner.lm.model).clone()))
    return found


@pytest.mark.parametrize(
    ("kind", "arm", "temperature"),
    [("reverse_kl_mc", arm, 1.0) for arm in ARMS if "moved" not in arm]
    + [(kind, "stronger", 1.0) for kind in CHOSEN if kind != "reverse_kl_mc"]
    + [("reverse_kl_mc", "stronger", 0.5), ("forward_kl", "over samples", 0.5)]
    + [("reverse_kl_mc", "supervision moved", 1.0), ("jsd", "supervision moved, over samples", 1.0)],
)
def test_the_gradient_of_every_arm_and_loss_is_that_of_its_formula(kind: str, arm: str, temperature: float) -> None:
    """Stale versions are mixed, at arrival and one step later, and samples get the weights of that moment."""
    loss, fresh = chosen(kind, CHOSEN[kind][0] | {"temperature": temperature}), FreshnessConfig(**ARMS[arm])
    teacher = teacher_of(torch.float64)
    groups = stale(groups_for(loss, "phi", torch.float64), asked_again="moved" in arm)

    async def work() -> tuple[list[Tensor], list[PreTrainedModel], list[SampleFreshness]]:
        learner = learner_of(moved(), loss, fresh)
        batch = Batch(tuple(groups), UPDATE)
        counts = await learner.prepare(batch)
        grads, models, weighed = gradients_of_steps(learner), list[PreTrainedModel](), list[SampleFreshness]()
        for half in (slice(0, 2), slice(2, 4)):
            models.append(make_model("phi", dtype=torch.float64))
            models[-1].load_state_dict(learner.lm.model.state_dict())
            weighed += await learner.accumulate(Batch(tuple(groups[half]), UPDATE), total(counts[half]))
            await learner.step()
        learner.close()
        return grads, models, weighed

    grads, models, weighed = asyncio.run(work())
    worth, first_NV = list[float](), torch.empty(0)
    for number, (half, grad) in enumerate(zip((slice(0, 2), slice(2, 4)), grads, strict=True)):
        now = models[number]
        now.zero_grad()
        of_half = [handle.body for group in groups[half] for handle in group]
        everyone = [handle.body for group in groups for handle in group]
        now_NV = distributions(now, everyone, temperature)
        first_NV = now_NV.detach() if number == 0 else first_NV
        frozen = View(
            now_NV,
            likely(drew(), loss, 1.0),
            first_NV,
            likely(teacher, loss, temperature),
            draws=torch.cat([_draws(sample) for sample in everyone]),
        )
        tokens = [sum(len(h.body.rollout.tokens) for h in group) for group in groups]
        its = slice(sum(tokens[: half.start]), sum(tokens[: half.stop]))
        plain_NV = now_NV if temperature == 1 else distributions(now, everyone, 1.0)
        log_ratio = (at(plain_NV, frozen.draws) - at(frozen.old, frozen.draws))[its]
        kl_N = (log_ratio.exp() * log_ratio - log_ratio.exp() + 1).mean(1)
        value, weights = written_out(FORMULAS[kind](frozen, CHOSEN[kind][0])[its], kl_N, of_half, fresh)
        value.backward()
        torch.testing.assert_close(grad, grads_of(now), rtol=1e-6, atol=1e-9)
        worth += weights
    assert [each.w for each in weighed] == pytest.approx(worth, abs=1e-9)
    assert len({each.lag for each in weighed}) > 3, "lags are mixed"
    if arm == "stronger":
        assert 0 < sum(each.w == 0 for each in weighed) < len(weighed), "some are gated, and not all"


def _draws(sample: Scored) -> Tensor:
    return torch.from_numpy(sample.rollout.actions).long()


def step_gradient(
    groups: Sequence[Sequence[Handle]],
    fresh: FreshnessConfig | None,
    *,
    loss: LossConfig | None = None,
    parts: bool = False,
    config: dict[str, Any] | None = None,
    **method: Any,
) -> Tensor:
    """The gradient of one optimizer step over these groups; in parts, group by group and scaled at the step."""

    async def work() -> Tensor:
        learner = learner_of(moved(), loss or ReverseKLMC(m=3), fresh, **method)
        learner.config = learner.passes.config = learner.steps.config = learner.config.model_copy(update=config or {})
        found, batch = gradients_of_steps(learner), Batch(tuple(groups), UPDATE)
        counts = total(await learner.prepare(batch))
        for part in [Batch((group,), UPDATE) for group in groups] if parts else [batch]:
            await learner.accumulate(part, ONE_COUNT if parts else counts)
        await learner.step(counts if parts else ONE_COUNT)
        learner.close()
        return found[0]

    return asyncio.run(work())


BY_LAG = FreshnessConfig(weight="lag", anchor=0.0, refresh="never")
RL = {"policy": PolicyConfig(loss="reinforce", advantage="rloo"), "rewards": {"exact": 1.0}}


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_how_a_batch_is_cut_changes_no_weight(unit: str) -> None:
    """Micro-batches of one sample, or groups that come one after the other and are scaled at the step."""
    groups, fresh = stale(groups_for(ReverseKLMC(m=3), "phi", torch.float64)), FreshnessConfig(normalise_by=unit)
    whole = step_gradient(groups, fresh, config={"token_budget": 4096})
    assert whole.abs().max() > 0
    for found in (
        step_gradient(groups, fresh, config={"token_budget": 1, "packing": False}),
        step_gradient(groups, fresh, parts=True),
    ):
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("lag", [1, 4])
def test_equal_weights_leave_the_gradient_and_its_limit_as_they_are(lag: int) -> None:
    """All of one lag: every weight is 1/(lag + 1), and no step is smaller for it."""
    groups = [[_of_lag(h, lag) for h in group] for group in groups_for(ReverseKLMC(m=3), "phi", torch.float64)]
    for clip_norm in (1e9, 1e-3):
        plain, weighed = (step_gradient(groups, f, config={"clip_norm": clip_norm}) for f in (None, BY_LAG))
        torch.testing.assert_close(weighed, plain, rtol=1e-9, atol=1e-15)
    assert float(weighed.norm()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("policy", ["reinforce", "gspo"])
def test_a_policy_loss_is_weighed_where_it_is_asked_for(policy: str) -> None:
    loss, how = ReverseKLMC(m=3, weight=0.0), PolicyConfig(loss=policy, advantage="rloo")
    groups = stale(groups_for(loss, "phi", torch.float64))
    also = BY_LAG.model_copy(update={"apply_to": ("policy",)})
    plain, unmoved, weighed = (
        step_gradient(groups, fresh, loss=loss, policy=how, rewards={"exact": 1.0}) for fresh in (None, BY_LAG, also)
    )
    torch.testing.assert_close(unmoved, plain, rtol=1e-9, atol=1e-15)
    assert not torch.allclose(weighed, plain, rtol=1e-2)
    alike = [[_of_lag(handle, 3) for handle in group] for group in groups]
    plain, weighed = (
        step_gradient(alike, fresh, loss=loss, policy=how, rewards={"exact": 1.0}) for fresh in (None, also)
    )
    torch.testing.assert_close(weighed, plain, rtol=1e-9, atol=1e-15)


def test_a_part_of_the_loss_that_is_not_weighed_is_not_scaled() -> None:
    """The gradient of both is the sum of the gradients of each: the mean weight divides distillation alone."""
    groups, fresh = stale(groups_for(ReverseKLMC(m=3), "phi", torch.float64)), FreshnessConfig()
    both = step_gradient(groups, fresh, **RL)
    distilled = step_gradient(groups, fresh)
    rewarded = step_gradient(groups, None, loss=ReverseKLMC(m=3, weight=0.0), **RL)
    assert rewarded.abs().max() > 0
    torch.testing.assert_close(both, distilled + rewarded, rtol=1e-6, atol=1e-12)


def test_weights_of_draws_from_the_store_multiply_the_anchor_too() -> None:
    groups = stale(groups_for(ReverseKLMC(m=3), "phi", torch.float64))
    drawn = [[handle.with_header(weight=0.25) for handle in group] for group in groups]
    plain, weighed = (step_gradient(each, FreshnessConfig(anchor=5.0)) for each in (groups, drawn))
    torch.testing.assert_close(weighed, 0.25 * plain, rtol=1e-9, atol=1e-15)


def test_mini_batches_are_weighed_before_the_first_step() -> None:
    """Each half has the same weights whether it is learned from before or after the other."""
    groups, fresh = stale(groups_for(ReverseKLMC(m=3), "phi", torch.float64)), FreshnessConfig(alpha=5.0)
    halves = [Batch(tuple(groups[half]), UPDATE) for half in (slice(0, 2), slice(2, 4))]

    async def work(order: Sequence[Batch]) -> dict[int, list[float]]:
        learner, found = learner_of(moved(), ReverseKLMC(m=3), fresh), dict[int, list[float]]()
        learner.config = learner.config.model_copy(update={"minibatches": 2})
        counts = total(await learner.prepare(Batch(tuple(groups), UPDATE)))
        for half in order:
            weighed = await learner.accumulate(half, counts)
            found[half.headers[0].number] = [each.w for each in weighed]
            await learner.step()
        learner.close()
        return found

    first, second = (asyncio.run(work(order)) for order in (halves, halves[::-1]))
    assert first == second and len(first) == 2


def test_where_every_weight_is_zero_nothing_is_learned_and_nothing_is_nan() -> None:
    groups = [[_of_lag(h, 5) for h in group] for group in groups_for(ReverseKLMC(m=3), "phi", torch.float64)]
    for method in ({}, RL | {"loss": ReverseKLMC(m=3)}):
        fresh = FreshnessConfig(threshold=0.9, apply_to="policy" if method else ())

        async def work(fresh: FreshnessConfig = fresh, method: dict[str, Any] = method) -> None:
            learner = learner_of(moved(), fresh=fresh, **{"loss": ReverseKLMC(m=3)} | method)
            before = {name: p.clone() for name, p in learner.lm.model.named_parameters()}
            batch = Batch(tuple(groups), UPDATE)
            weighed = await learner.accumulate(batch, total(await learner.prepare(batch)))
            assert all(each.w == 0 for each in weighed)
            metrics = await learner.step()
            assert metrics["grad_norm"] == 0 and metrics["loss"] == 0
            assert all(torch.equal(p, before[name]) for name, p in learner.lm.model.named_parameters())
            learner.close()

        asyncio.run(work())


def _of_lag(handle: Handle, lag: int) -> Handle:
    rollout = handle.body.rollout
    rollout = replace(rollout, versions=np.full_like(rollout.versions, UPDATE - 1 - lag))
    body = replace(handle.body, rollout=rollout)
    return Handle(replace(header_of(rollout, teacher="teacher"), rewards=rollout.rewards), body)


# --- how drift is known -----------------------------------------------------------------------------------------------


def test_the_estimate_is_the_exact_kl_in_value_and_gradient_and_its_variance_is_one_over_m() -> None:
    """Over all draws there can be, of two distributions over 5 ids."""
    generator = torch.Generator().manual_seed(0)
    logits, old = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    p_old = old.softmax(-1)

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    logp, logq = logits.log_softmax(-1), old.log_softmax(-1)
    exact = (logp.exp() * (logp - logq)).sum()
    one_V = rollout_kl_from_cache(logp[:, None], logq[:, None])
    mean = (p_old * one_V).sum()
    torch.testing.assert_close(mean, exact)
    torch.testing.assert_close(gradient(mean), gradient(exact))
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    two_P = rollout_kl_from_cache(logp[pairs], logq[pairs])
    chance_P = p_old[pairs].prod(-1)
    variance = ((one_V - mean) ** 2 * p_old).sum()
    torch.testing.assert_close(((two_P - mean) ** 2 * chance_P).sum(), variance / 2)


@pytest.mark.parametrize("m", [2, 16, 128])
def test_drift_from_the_cache_comes_near_that_by_snapshots(m: int) -> None:
    """Within five standard errors of the draws, which shrink with their number."""
    loss = ReverseKLMC(m=m)
    groups = [[_of_lag(handle, UPDATE - 1) for handle in group] for group in groups_for(loss, "phi", torch.float64)]
    batch = Batch(tuple(groups), UPDATE)

    async def weighed(fresh: FreshnessConfig) -> list[SampleFreshness]:
        learner = learner_of(make_model("phi", seed=0, dtype=torch.float64), loss, fresh)
        learner.weights.snapshots.keep = 1
        await learner.export()  # version 0, which drew
        with torch.no_grad():
            for p, q in zip(learner.lm.model.parameters(), moved().parameters(), strict=True):
                p.copy_(q)
        counts = await learner.prepare(batch)
        found = await learner.accumulate(batch, total(counts))
        learner.made = UPDATE - 1
        again = await learner.weigh(batch)
        assert [each.roll for each in again] == pytest.approx([each.roll for each in found], abs=1e-9)
        learner.close()
        return found

    exact = asyncio.run(weighed(FreshnessConfig(drift="snapshots")))
    cached = asyncio.run(weighed(FreshnessConfig()))
    tokens = [handle.header.tokens for group in groups for handle in group]
    difference = sum(n * (c.roll - e.roll) for n, c, e in zip(tokens, cached, exact, strict=True)) / sum(tokens)
    mean = sum(n * e.roll for n, e in zip(tokens, exact, strict=True)) / sum(tokens)
    assert mean > 0.01 and all(each.roll_coverage == 1 for each in exact)
    assert abs(difference) < 5 * 4 * mean / math.sqrt(m * sum(tokens)), "a draw's standard deviation is a few means"


def test_versions_that_are_gone_cover_less_and_a_sample_of_which_nothing_is_known_counts_nothing() -> None:
    loss, fresh = ReverseKLMC(m=3), FreshnessConfig(drift="snapshots", refresh="never")
    groups = stale(groups_for(loss, "phi", torch.float64))  # versions 0 … 4 are gone, 5 is the learner's own
    batch = Batch(tuple(groups), UPDATE)

    async def work() -> list[SampleFreshness]:
        learner = learner_of(moved(), loss, fresh)
        found = await learner.accumulate(batch, total(await learner.prepare(batch)))
        learner.close()
        return found

    for each, handle in zip(asyncio.run(work()), batch.handles, strict=True):
        known = float((handle.body.rollout.versions == 5).mean())
        assert each.roll_coverage == pytest.approx(known)
        assert (each.f == 0) == (known == 0) and each.sup_coverage == 1


# --- the buffer, and when to begin anew -------------------------------------------------------------------------------


def test_the_curve_goes_through_what_was_seen_and_in_straight_lines_between() -> None:
    curve = Curve()
    assert curve(3) == 0
    curve.learn(2, 0.4)
    assert (curve(0), curve(1), curve(2), curve(6)) == pytest.approx((0, 0.2, 0.4, 1.2))
    curve.learn(4, 0.6)
    curve.learn(2, 0.9)
    assert (curve(2), curve(3), curve(8)) == pytest.approx((0.45, 0.525, 1.2))


def buffer_of(**settings: Any) -> Buffer:
    return Buffer(FreshnessConfig(**settings), steps=1, last={})


def test_the_model_of_a_buffer_has_the_formula_of_the_estimator() -> None:
    buffer = buffer_of(alpha=1.5)
    buffer.measure([_worth(lag=2, roll=0.3), _worth(lag=2, roll=0.5)])
    (handle,) = [_of_lag(groups_for(ReverseKLMC(m=3), "phi", torch.float64)[0][0], 2)]
    assert buffer.predict([handle.header], UPDATE - 1).f == pytest.approx(float(score(2, 0.4, 0.0, alpha=1.5)))
    assert buffer.predict([], 3) == Level()


def _worth(**given: Any) -> SampleFreshness:
    plain = {"lag": 0, "roll": 0.0, "sup": 0.0, "roll_coverage": 1.0, "sup_coverage": 1.0, "f": 1.0, "w": 1.0}
    return SampleFreshness(**plain | given)


@pytest.mark.parametrize(
    ("settings", "level", "due"),
    [
        ({}, Level(0.06, 1, 1), False),
        ({}, Level(0.05, 1, 1), True),
        ({}, Level(1.0, 0.4, 1), True),
        ({}, Level(1.0, 1, 0.4), True),
        ({"kappa_f": 0.5}, Level(0.4, 1, 1), True),
        ({"refresh": "never"}, Level(0.0, 0, 0), False),
        ({"refresh": "fixed", "refresh_every": 12}, Level(0.0, 0, 0), False),
        ({"refresh": "fixed", "refresh_every": 11}, Level(1.0, 1, 1), True),
    ],
)
def test_a_refresh_is_due_when_it_is(settings: dict[str, Any], level: Level, due: bool) -> None:
    assert bool(buffer_of(**settings).on_update(level.metrics | {"version": 11.0})) == due


def test_a_pass_over_the_buffer_has_the_drift_of_a_teacher_that_moves() -> None:
    """Only samples of the last update were scored again: the others have the mean of these, 0.25."""
    buffer = buffer_of(estimate="measured", beta=2.0)
    asked_again = SampleFreshness(lag=1, roll=0.1, sup=0.25, roll_coverage=1.0, sup_coverage=0.5, f=0.1, w=0.1)
    buffer.measure([asked_again])
    stored = SampleFreshness(lag=1, roll=0.1, sup=0.0, roll_coverage=1.0, sup_coverage=1.0, f=0.4, w=0.4)
    found = buffer.level([], [stored, asked_again], 3)
    assert found["freshness/buffer_f"] == pytest.approx((0.4 * math.exp(-2.0 * 0.5) + 0.1) / 2)
    assert found["freshness/buffer_sup_coverage"] == 0.5


def test_between_two_refreshes_there_are_so_many_optimizer_steps() -> None:
    lines = [Level(0.0).metrics | {"version": float(update)} for update in (5, 6, 7)]
    buffer = Buffer(FreshnessConfig(cooldown=6), steps=2, last={})
    buffer.record_refresh(4, tokens=50)
    assert [bool(buffer.on_update(line)) for line in lines] == [False, False, True]
    again = Buffer(FreshnessConfig(cooldown=6), steps=2, last=buffer.metrics | {f"{DRIFT_BY_LAG}3": 0.2})
    assert again.metrics == buffer.metrics and again.curve(3) == 0.2
    assert [bool(again.on_update(line)) for line in lines] == [False, False, True]


# --- whole runs -------------------------------------------------------------------------------------------------------

SCHEDULES = [
    Sync(),
    Periodic(),
    StepOff(k=2),
    Replay(k=2),
    Async(tau=2),
    Async(tau=2, publish_every=2, order="submission"),
]
OFTEN = FreshnessConfig(kappa_f=1.0, cooldown=0, measure=2)
NOTHING = FreshnessConfig(alpha=0.0, beta=0.0, anchor=0.0, threshold=0.0, lag=False, refresh="never")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: str(schedule.kind))
def test_with_everything_off_a_run_is_the_plain_one(tmp_path: Path, schedule: Any) -> None:
    plain = toy_runs.go(tmp_path / "plain", schedule)
    fresh = toy_runs.go(tmp_path / "fresh", schedule, freshness=NOTHING)
    torch.testing.assert_close(fresh.table, plain.table, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "settings", [OFTEN, FreshnessConfig(refresh="fixed", refresh_every=2), FreshnessConfig(estimate="measured")]
)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: str(schedule.kind))
def test_whatever_begins_anew_is_trained_on_once_and_in_time(
    tmp_path: Path, schedule: Any, settings: FreshnessConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    toy_runs.go(tmp_path / "run", schedule, freshness=settings)
    assert toy_runs.ends(tmp_path / "run") == list(range(8 * 3))
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    ledger = list(read_lines(tmp_path / "run" / "ledger.jsonl"))
    refreshes = lines[-1]["freshness/refreshes"]
    told = re.findall(r"refresh after update (\d+): \d+ groups begin again, (.+)", capsys.readouterr().out)
    assert len(told) == refreshes and all(int(update) <= 8 and why for update, why in told)
    if settings.estimate == "modelled" and schedule.kind in ("step_off", "replay", "async"):
        assert refreshes > 0 and lines[-1]["restarted"] > 0
        assert lines[-1]["freshness/refreshed_tokens"] == lines[-1]["thrown_tokens"] > 0
    if schedule.kind in ("sync", "periodic"):
        assert refreshes == 0, "nothing is older than the weights that are published next"
    for entry in ledger:
        assert all(0 <= f <= 1 and 0 <= w <= 1 for f, w in zip(entry["f"], entry["w"], strict=True))
        assert len(entry["f"]) == len(entry["lag"]) == len(entry["roll"]) == 2
    after = {int(line["freshness/refreshed"]) + 1 for line in lines if line["freshness/refreshed"]}
    for line in lines:
        if line["update"] in after and schedule.kind != "async":
            assert line["lag/max"] == 0, "the update after a refresh learns from the newest weights only"


@pytest.mark.parametrize("schedule", [StepOff(k=2), Async(tau=2)], ids=lambda schedule: str(schedule.kind))
@pytest.mark.parametrize("until", [4.1, 6.3, 8.7, 11.2])
def test_stopped_at_any_time_a_run_that_refreshes_goes_on_as_if_it_had_not_been(
    tmp_path: Path, schedule: Any, until: float
) -> None:
    """Also between a refresh and what follows it: what is known of drift and of refreshes is the run's."""
    settings = FreshnessConfig(kappa_f=0.6, cooldown=2, measure=1)
    whole = toy_runs.go(tmp_path / "whole", schedule, every=1, freshness=settings)
    toy_runs.go(tmp_path / "cut", schedule, until=until, every=1, freshness=settings)
    again = toy_runs.go(tmp_path / "cut", schedule, every=1, freshness=settings)
    assert toy_runs.ends(tmp_path / "cut") == list(range(8 * 3))
    first, second = (
        [line for line in read_lines(tmp_path / name / "metrics.jsonl") if line["kind"] == "train"]
        for name in ("whole", "cut")
    )
    assert second[-1]["freshness/refreshes"] > 0
    if schedule.kind == "step_off":  # the same groups in the same order
        torch.testing.assert_close(again.table, whole.table, rtol=1e-9, atol=1e-12)
        assert [line["freshness/refreshed"] for line in first] == [line["freshness/refreshed"] for line in second]
