"""Sampling supports travel with every token: ratios and KLs on them are exact, whatever was left out."""

import asyncio
import copy
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ForwardKL, ReverseKLMC
from slipstream.config.objective import PolicyConfig, ReferenceConfig
from slipstream.engines.draws import kept_ids, process
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.weights import export_weights
from slipstream.estimators.divergence import dense
from slipstream.estimators.logprobs import sampling_support as kept_module
from slipstream.estimators.logprobs.sampling_support import Support, conditioned
from slipstream.estimators.surrogate import mc_reverse_kl
from slipstream.estimators.tables.correction import PRESETS
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.protocols import Sampling
from slipstream.records import (
    ONE_COUNT,
    Batch,
    Group,
    Handle,
    Prompt,
    Rollout,
    SamplingSupport,
    Scored,
    header_of,
    one_turn,
    support_from_ids,
    total,
)
from support import tabular_engines as toy
from support.engines import native_learner, native_sampler, native_scorer
from support.tiny_models import EOS, VOCAB, littered, make_model, make_prompts, masked_sample, wrap

DTYPE = torch.float64
CUTS = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.2},
    "all": {"top_p": 0.8, "top_k": 6, "min_p": 0.05},
}


def sampling(**options: Any) -> Sampling:
    return Sampling(**{"max_tokens": 12, "group": 3, "draws": 2, "keep_mask": True} | options)


def logits_of(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """[T, V]"""
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
    return model(ids[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1]


def on_support(logits: Tensor, table_NK: Tensor) -> Tensor:
    """Log-probs [N, V] of what is left; −inf elsewhere."""
    out = torch.ones(logits.shape, dtype=torch.bool)
    for row, ids in zip(out, table_NK, strict=True):
        row[ids[ids >= 0]] = False
    return logits.masked_fill(out, -torch.inf).log_softmax(-1)


def table(kept: SamplingSupport) -> Tensor:
    """[N, K]"""
    return Support(kept.ids, kept.sizes, torch.device("cpu"))[0 : len(kept.sizes)]


def roll_out(model: PreTrainedModel, *samplings: Sampling, count: int = 5, publish: Any = None) -> list[Group]:
    async def work() -> list[Group]:
        sampler = native_sampler(wrap(model), slots=8, stop_ids={EOS})
        prompts = make_prompts(count)
        asked = [samplings[i % len(samplings)] for i in range(count)]
        running = [asyncio.create_task(sampler.generate(p, s)) for p, s in zip(prompts, asked, strict=True)]
        if publish is not None:
            await asyncio.sleep(0)
            await sampler.publish(export_weights(publish, "float64", version=1), "restart")
        groups = await asyncio.gather(*running)
        sampler.close()
        return groups

    return asyncio.run(work())


def score(model: PreTrainedModel, groups: list[Group], **options: Any) -> list[Group]:
    async def work() -> list[Group]:
        scorer = native_scorer(wrap(model), **options)
        scored = [await scorer.score(group) for group in groups]
        scorer.close()
        return scored

    return asyncio.run(work())


def learned(learner: NativeLearner, batch: Batch, counts: Any = None) -> tuple[list[Tensor], dict[str, float]]:
    """Gradients of a batch, and the metrics of the step."""

    async def work() -> Any:
        found = await learner.prepare(batch)
        await learner.accumulate(batch, counts or total(found))
        gradients = [p.grad.clone() for p in learner.lm.model.parameters() if p.grad is not None]
        return gradients, await learner.step()

    found: tuple[list[Tensor], dict[str, float]] = asyncio.run(work())
    return found


# --- the record -------------------------------------------------------------------------------------------------------


def test_a_table_has_a_row_for_each_trained_token() -> None:
    kept = support_from_ids([np.array([4, 2]), np.array([7]), np.array([1, 0, 3])])
    assert table(kept).tolist() == [[4, 2, -1], [7, -1, -1], [1, 0, 3]]
    assert table(SamplingSupport(np.zeros(0, np.int32), np.zeros(0, np.int32))).shape == (0, 1)


def test_a_support_is_cut_where_its_tables_would_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of six ids among rows of one or two: never more than 10 numbers, but for a row that has more alone."""
    monkeypatch.setattr(kept_module, "held", lambda like: 10)
    sizes = np.array([1, 2, 1, 6, 1, 12, 1, 1], np.int32)
    ids = np.arange(sizes.sum())
    support = Support(ids, sizes, torch.device("cpu"))
    cuts = [rows for rows, _ in support.tables(1)]
    assert [(cut.start, cut.stop) for cut in cuts] == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 8)]
    tables = [support[cut] for cut in cuts]
    assert [tuple(table.shape) for table in tables] == [(3, 2), (1, 6), (1, 1), (1, 12), (2, 1)]
    assert torch.cat([table[table >= 0] for table in tables]).tolist() == ids.tolist()
    assert tables[0].tolist() == [[0, -1], [1, 2], [3, -1]]


@pytest.mark.parametrize(
    ("ids", "sizes", "said"),
    [
        ([5, 6, 5], [2], r"kept.sizes has shape \(1,\), must be \(2,\), an entry for each trained token"),
        ([5, 6, 5], [2, 2], r"kept.ids has shape \(3,\), must be \(4,\), the sum of kept.sizes"),
        ([5, 6, 5], [2, 1], "actions holds ids that are not in kept, so that no sampler could draw them"),
        ([5, 6], [2, 0], "actions holds ids that are not in kept, so that no sampler could draw them"),
    ],
)
def test_what_was_drawn_is_among_what_could_be(ids: list[int], sizes: list[int], said: str) -> None:
    fields: Any = {
        "actions": np.array([[5, 6], [5, 7]]),
        "action_logp": np.full((2, 2), -1.0),
        "versions": np.zeros(2, np.int32),
        "finish": "eos",
    }
    prompt = make_prompts(1)[0]
    assert one_turn(prompt, 0, kept=SamplingSupport(np.array([5, 6, 5, 7]), np.array([2, 2])), **fields)
    with pytest.raises(ValueError, match=f"^rollout p0/0: {said}$"):
        one_turn(prompt, 0, kept=SamplingSupport(np.array(ids), np.array(sizes)), **fields)


# --- samplers ---------------------------------------------------------------------------------------------------------


def test_the_sampler_tells_what_each_token_could_have_been() -> None:
    """Several truncations at a time, in fewer slots than rows, after a restart under other weights."""
    first, second = (make_model("phi", seed=seed, dtype=DTYPE) for seed in range(2))
    samplings = [sampling(**cut) for cut in CUTS.values()] + [sampling(top_p=0.7, keep_mask=False)]
    for publish in (None, second):
        for handle in (h for group in roll_out(first, *samplings, publish=publish) for h in group):
            rollout, asked = handle.body, samplings[handle.header.number]
            if not asked.keep_mask:
                assert rollout.kept is None
                continue
            model = first if rollout.versions[0] == 0 else second
            with torch.no_grad():
                expected = process(logits_of(model, rollout), asked)
            ids = [row.nonzero()[:, 0].tolist() for row in expected > -torch.inf]
            assert [row[row >= 0].tolist() for row in table(rollout.kept)] == ids
    assert any(len(row) > 1 for row in ids) and all(len(row) < VOCAB for row in ids)


def test_a_toy_tells_it_too() -> None:
    weights, asked = toy.random_table(9, seed=0), sampling(**CUTS["all"])
    prompt = Prompt(id="p", number=0, tokens=np.array([3], np.int32), seed=5)
    for handle in asyncio.run(toy.ToySampler(weights).generate(prompt, asked)):
        expected = kept_ids(process(weights[toy.previous(handle.body)], asked))
        assert [row[row >= 0].tolist() for row in table(handle.body.kept)] == [ids.tolist() for ids in expected]


# --- against enumeration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
def test_stale_truncated_draws_give_the_gradient_of_the_divergence_of_what_is_left(cut: str, draws: int) -> None:
    """Σ over all that can be drawn, by its probability. The teacher's mass there is a constant of A: not asked for."""
    rng = torch.Generator().manual_seed(3)
    theta, behind, teacher = (torch.randn(4, 7, generator=rng, dtype=DTYPE) for _ in range(3))
    behavior = process(behind, sampling(**CUTS[cut]))
    support = table(support_from_ids(kept_ids(behavior)))
    logits, found = theta.requires_grad_(), torch.zeros((), dtype=DTYPE)
    for actions in product(range(7), repeat=draws):
        ids = torch.tensor(actions).expand(len(theta), -1)
        drawn = behavior.gather(1, ids)
        weight = drawn.sum(-1).exp()
        possible = weight > 0
        logp = logits.log_softmax(-1)
        ours = conditioned(logp.gather(1, ids), logp.gather(1, support.clamp(min=0)), support)
        loss, _ = mc_reverse_kl(ours[possible], drawn[possible], teacher.log_softmax(-1).gather(1, ids)[possible])
        found = found + (weight[possible] * loss).sum()
    (gradient,) = torch.autograd.grad(found, logits)
    exact = dense(on_support(logits, support), on_support(teacher, support), kind="reverse").sum()
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("cut", CUTS)
def test_the_learner_is_exact_on_stale_truncated_draws(cut: str) -> None:
    """A response of one token, each that could have been, weighed by its probability, through scorer and learner."""
    behind, student, teacher = (make_model("phi", seed=seed, dtype=DTYPE) for seed in range(3))
    prompt, asked = make_prompts(1)[0], sampling(**CUTS[cut])
    start = one_turn(
        prompt,
        0,
        actions=np.full((1, 1), 2),
        action_logp=np.zeros((1, 1)),
        versions=np.zeros(1, np.int32),
        finish="length",
    )
    with torch.no_grad():
        behavior = process(logits_of(behind, start), asked)
    kept, learner = support_from_ids(kept_ids(behavior)), make_learner(student, Method(loss=ReverseKLMC(m=1)))
    found: list[Tensor] = []
    for token in kept.ids.tolist():
        logp = behavior[:, token].numpy()
        one = replace(
            start,
            tokens=np.array([token]),
            actions=np.array([[token]]),
            logp=logp,
            action_logp=logp[:, None],
            kept=kept,
        )
        ((scored,),) = score(teacher, [[Handle(header_of(one), one)]])
        batch = Batch(((scored,),), 1)

        async def work(batch: Batch = batch) -> list[Tensor]:
            learner.steps.optimizer.zero_grad()
            await learner.prepare(batch)
            await learner.accumulate(batch, ONE_COUNT)
            return [p.grad.clone() for p in learner.lm.model.parameters()]

        gradients = [float(np.exp(logp[0])) * g for g in asyncio.run(work())]
        found = [a + b for a, b in zip(found, gradients, strict=True)] if found else gradients
    learner.close()
    reference = copy.deepcopy(student)
    support = table(kept)
    q = on_support(logits_of(teacher, start).detach(), support)
    dense(on_support(logits_of(reference, start), support), q, kind="reverse").sum().backward()
    for ours, parameter in zip(found, reference.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-8, atol=1e-11)


def test_the_toy_learner_is_exact_on_stale_truncated_draws() -> None:
    behind, student, teacher = (toy.random_table(7, seed=seed) for seed in range(3))
    asked, state = sampling(top_p=0.7), 3
    behavior = process(behind[state][None], asked)
    kept, learner = support_from_ids(kept_ids(behavior)), toy.ToyLearner(student)
    prompt, found = Prompt(id="p", number=0, tokens=np.array([state], np.int32)), torch.zeros(7, 7, dtype=DTYPE)
    for token in kept.ids.tolist():
        logp = behavior[:, token].numpy()[:, None]
        ids, versions = np.array([[token]]), np.zeros(1, np.int32)
        one = one_turn(prompt, 0, actions=ids, action_logp=logp, versions=versions, finish="length", kept=kept)
        (scored,) = asyncio.run(toy.ToyScorer(teacher).score([Handle(header_of(one), one)]))
        asyncio.run(learner.prepare(batch := Batch(((scored,),), 1)))
        asyncio.run(learner.accumulate(batch, ONE_COUNT))
        assert learner.table.grad is not None
        found += float(np.exp(logp[0, 0])) * learner.table.grad
        learner.table.grad = None
    support, weights = table(kept), student.clone().requires_grad_()
    dense(
        on_support(weights[state][None], support), on_support(teacher[state][None], support), kind="reverse"
    ).backward()
    torch.testing.assert_close(found, weights.grad, rtol=1e-10, atol=1e-12)


# --- one policy, whoever looks at it ----------------------------------------------------------------------------------


SOME = ReverseKLMC(m=2, weight=0.5)
NOTHING = ReverseKLMC(m=2, weight=0.0)
METHODS: dict[str, dict[str, Any]] = {
    "draws": {"loss": SOME},
    "draws at another temperature": {
        "loss": ReverseKLMC(m=2, weight=0.5, temperature=0.8),
        "policy": PolicyConfig(),
    },
    "a ratio": {"loss": NOTHING, "policy": PolicyConfig()},
    "a ratio of rows": {"loss": NOTHING, "policy": PolicyConfig(loss="gmpo")},
    "both": {"loss": SOME, "policy": PolicyConfig()},
    "beside the whole vocabulary": {"loss": ForwardKL(cache="hidden"), "policy": PolicyConfig()},
    "beside the teacher's best": {"loss": ForwardKL(k=5), "policy": PolicyConfig()},
    "the version that drew": {"loss": NOTHING, "policy": PolicyConfig(), "correction": PRESETS["decoupled_token_is"]},
    "a reference": {"loss": SOME, "reference": ReferenceConfig(weight=0.1)},
}


def make_learner(model: PreTrainedModel, method: Method, **options: Any) -> NativeLearner:
    config = LearnerConfig(dtype="float64", token_budget=40, **options.pop("config", {}))
    return native_learner(wrap(model), method=method, config=config, updates=9, **options)


def rewarded(groups: list[Group]) -> list[Group]:
    return [
        [Handle(replace(h.header, rewards={"exact": float(i % 2)}), h.body) for i, h in enumerate(group)]
        for group in groups
    ]


@pytest.mark.parametrize("name", METHODS)
def test_a_policy_has_a_ratio_of_1_to_itself_whatever_was_left_out(name: str) -> None:
    """But without what was left: there the kept mass stands between them."""
    student, teacher = (make_model("phi", seed=seed, dtype=DTYPE) for seed in range(2))
    method = Method(rewards={"exact": 1.0}, **METHODS[name])
    cache = {"cache": method.loss.cache, "k": method.loss.k} if isinstance(method.loss, ForwardKL) else {}
    groups = score(teacher, rewarded(roll_out(student, *(sampling(**cut) for cut in CUTS.values()))), **cache)
    found = {}
    for kept in (True, False):
        seen = [
            [h if kept else Handle(h.header, replace(h.body, rollout=replace(h.body.rollout, kept=None))) for h in g]
            for g in groups
        ]
        learner = make_learner(student, method, teacher_heads={"teacher": TeacherHead(wrap(teacher).head)}, snapshots=1)
        _, found[kept] = learned(learner, Batch(tuple(seen), 1))
        learner.close()
    for key, value in (("drift/kl", 0.0), ("drift/chi2_token", 0.0), ("drift/tv", 0.0), ("drift/ess", 1.0)):
        assert found[True][key] == pytest.approx(value, abs=1e-9)
    assert found[False]["drift/tv"] > 0.05
    sizes = np.concatenate([h.body.rollout.kept.sizes for group in groups for h in group])
    assert found[True]["kept/size"] == pytest.approx(sizes.mean()) and "kept/size" not in found[False]
    for key in ("policy/ratio", "policy/ratio_max", *(["distill/ratio"] * (method.loss.temperature == 1.0))):
        if key in found[True]:
            assert found[True][key] == pytest.approx(1.0, abs=1e-9), key
    if method.decoupled:
        assert found[True]["mismatch/tv"] == pytest.approx(0.0, abs=1e-9) and found[False]["mismatch/tv"] > 0.05
    if method.reference is not None:
        assert found[True]["reference/kl"] == pytest.approx(0.0, abs=1e-9)


def test_the_exact_kl_to_what_drew_is_over_what_could_be_drawn() -> None:
    behind, student, teacher = (make_model("phi", seed=seed, dtype=DTYPE) for seed in range(3))
    groups = score(teacher, roll_out(behind, sampling(top_k=4), sampling(top_p=0.7)))
    learner = make_learner(behind, Method(loss=SOME), config={"exact_drift": True}, snapshots=2)
    asyncio.run(learner.export())
    with torch.no_grad():
        for ours, theirs in zip(learner.lm.model.parameters(), student.parameters(), strict=True):
            ours.copy_(theirs)
    learner.made = 1
    _, metrics = learned(learner, Batch(tuple(groups), 2))
    learner.close()
    kl = []
    with torch.no_grad():
        for rollout in (h.body.rollout for group in groups for h in group):
            support = table(rollout.kept)
            p, old = (on_support(logits_of(model, rollout), support) for model in (student, behind))
            kl.append(dense(p, old, kind="reverse"))
    assert metrics["drift/rollout_kl"] == pytest.approx(torch.cat(kl).mean().item(), rel=1e-9)
    assert metrics["drift/rollout_kl"] > 0.01


@pytest.mark.parametrize("preset", ["disabled", "bypass_pg_is"])
def test_score_centering_over_the_support_has_the_gradient_of_all_tokens_that_could_be_drawn(preset: str) -> None:
    behind, student, teacher = (make_model("phi", seed=seed, dtype=DTYPE) for seed in range(3))
    groups = score(teacher, rewarded(roll_out(behind, sampling(top_k=4, draws=1, best=4), count=4)))
    correction = replace(PRESETS[preset], is_level=PRESETS[preset].is_level and "token")
    policy = PolicyConfig(loss="reinforce", centre="support", advantage_options={"norm": False})
    method = Method(loss=NOTHING, policy=policy, correction=correction, rewards={"exact": 1.0})
    learner = make_learner(student, method)
    gradients, _ = learned(learner, Batch(tuple(groups), 1))
    learner.close()
    loss, count = torch.zeros((), dtype=DTYPE), 0
    for group in groups:
        rewards = [handle.header.rewards["exact"] for handle in group]
        for handle, reward in zip(group, rewards, strict=True):
            rollout: Rollout = handle.body.rollout
            logp_TV = on_support(logits_of(student, rollout), table(rollout.kept)).clamp(min=-50)
            q_TV = on_support(logits_of(behind, rollout), table(rollout.kept)).detach().exp()
            weight_TV = torch.ones_like(q_TV)
            if preset != "disabled":
                weight_TV = (logp_TV.detach().exp() / q_TV.clamp(min=1e-20)).clamp(max=correction.is_threshold)
            centre_T = (q_TV * weight_TV * logp_TV).sum(-1)
            at_T1 = torch.from_numpy(rollout.tokens).long()[:, None]
            emitted_T = (weight_TV * logp_TV).gather(1, at_T1)[:, 0]
            loss = loss - (reward - np.mean(rewards)) * (emitted_T - centre_T).sum()
            count += len(rollout.tokens)
    (loss / count).backward()
    expected = [p.grad for p in student.parameters() if p.grad is not None]
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)
    assert max(float(each.abs().max()) for each in expected) > 1e-4


def test_it_is_learned_from_in_any_micro_batches_and_masked_tokens_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    student, teacher = (make_model("phi", seed=seed, dtype=DTYPE) for seed in range(2))
    groups = score(teacher, rewarded(roll_out(student, sampling(top_p=0.7), sampling(top_k=3))))
    rng = np.random.default_rng(0)
    handles: list[Handle] = []
    for handle in (h for group in groups for h in group):
        sample: Scored = masked_sample(handle.body, rng.random(len(handle.body.rollout.tokens)) < 0.6)
        handles.append(Handle(header_of(sample.rollout), sample))
    found = []
    for budget, litter in ((40, False), (10_000, False), (40, True)):
        monkeypatch.setattr(kept_module, "held", lambda like, most=20 if budget == 40 else 1 << 24: most)
        bodies = [replace(h, body=littered(h.body, seed=i)) if litter else h for i, h in enumerate(handles)]
        learner = native_learner(
            wrap(student),
            method=Method(loss=SOME, policy=PolicyConfig(loss="gmpo"), rewards={"exact": 1.0}),
            config=LearnerConfig(dtype="float64", token_budget=budget),
            updates=1,
        )
        found.append(learned(learner, Batch((tuple(bodies),), 1))[0])
        learner.close()
    for one, whole, other in zip(*found, strict=True):
        torch.testing.assert_close(one, whole, rtol=1e-9, atol=1e-12)
        assert torch.equal(one, other)


def test_a_response_made_in_several_calls_could_have_been_the_same() -> None:
    model, prompt, asked = make_model("phi", dtype=DTYPE), make_prompts(1)[0], sampling(top_p=0.7)

    async def work() -> None:
        sampler = native_sampler(wrap(model), slots=8, stop_ids=set())
        for handle in await sampler.generate(prompt, asked):
            rollout, parts = handle.body, []
            for start, stop in pairwise([0, 3, 8, 12]):
                tokens = np.concatenate([prompt.tokens, rollout.tokens[:start]])
                again = replace(prompt, tokens=tokens, offset=start, first=rollout.index)
                (part,) = await sampler.generate(again, replace(asked, max_tokens=stop - start, group=1))
                parts.append(part.body.kept)
            np.testing.assert_array_equal(np.concatenate([part.ids for part in parts]), rollout.kept.ids)
        sampler.close()

    asyncio.run(work())
