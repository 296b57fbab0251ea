"""Speculative knowledge distillation: what the student and the teacher draw together, and the log-probs of it."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from slipstream.engines.draws import draw_with_teacher, process, uniforms
from slipstream.engines.weights import export_weights
from slipstream.errors import NonFiniteError
from slipstream.protocols import Mode, Sampling
from slipstream.records import Prompt, Rollout, continued, header_of
from support.engines import native_sampler
from support.tiny_models import EOS, make_model, make_prompts, wrap

K = 5


def behavior(q_V: np.ndarray, p_V: np.ndarray, k: int) -> np.ndarray:
    """b(y) = q(y)·1[y in S] + (1 − q(S))·p_S(y), token by token."""
    inside = sorted(range(len(p_V)), key=lambda y: -p_V[y])[:k]
    left = 1 - sum(q_V[y] for y in inside)
    mass = sum(p_V[y] for y in inside)
    return np.array([q_V[y] + left * p_V[y] / mass if y in inside else 0.0 for y in range(len(p_V))])


def logits(seed: int, vocabulary: int = 9) -> torch.Tensor:
    return 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_log_probs_of_a_small_vocabulary_equal_the_formula(k: int, temperature: float) -> None:
    """Uniform numbers on a grid draw every token, and each has the log-prob and the frequency of the formula."""
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    pairs_N2 = torch.cartesian_prod(grid, grid)
    sampling = Sampling(max_tokens=1, temperature=temperature)
    q_V, p_V = (process(logits(seed)[None], sampling)[0] for seed in (1, 2))
    n = len(pairs_N2)
    ids, logp, replaced = draw_with_teacher(q_V.expand(n, -1), p_V.expand(n, -1), k, pairs_N2)
    expected = behavior(q_V.exp().numpy(), p_V.exp().numpy(), k)
    assert set(ids[:, 0].tolist()) == set(np.flatnonzero(expected > 1 / n))
    np.testing.assert_allclose(logp[:, 0].exp(), expected[ids[:, 0]], rtol=1e-12)
    np.testing.assert_allclose(np.bincount(ids[:, 0], minlength=9) / n, expected, atol=0.01)
    outside = 1 - sum(q_V.exp()[p_V.topk(k).indices].tolist())
    assert float(replaced.double().mean()) == pytest.approx(outside, abs=0.005)


def test_drawn_tokens_pass_a_chi_square_test_against_the_formula() -> None:
    n, k, vocabulary = 40_000, 4, 9
    q_V, p_V = (logits(seed, vocabulary).log_softmax(-1) for seed in (3, 4))
    uniform = uniforms(torch.arange(n), torch.zeros(n, dtype=torch.int64), 4)
    ids, *_ = draw_with_teacher(q_V.expand(n, -1), p_V.expand(n, -1), k, uniform)
    expected = n * behavior(q_V.exp().numpy(), p_V.exp().numpy(), k)
    for column in ids.T:
        counts = np.bincount(column, minlength=vocabulary)
        assert not counts[expected == 0].any()
        kept = expected > 0
        assert (((counts - expected) ** 2)[kept] / expected[kept]).sum() < 16.27  # 0.1 % of chi-square, 3 degrees


def test_logits_of_a_teacher_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(NonFiniteError, match="teacher's logits"):
        draw_with_teacher(logits(1)[None], torch.full((1, 9), torch.nan), 3, torch.zeros(1, 2).double())


def drawn(
    student: PreTrainedModel, teacher: PreTrainedModel, prompts: Sequence[Prompt], asked: Sequence[Sampling], slots: int
) -> list[Rollout]:
    async def main() -> list[Rollout]:
        sampler = native_sampler(wrap(student), slots=slots, stop_ids={EOS}, teacher=wrap(teacher))
        try:
            calls = [sampler.generate(*pair) for pair in zip(prompts, asked, strict=True)]
            return [handle.body for group in await asyncio.gather(*calls) for handle in group]
        finally:
            sampler.close()

    return asyncio.run(main())


@torch.no_grad()
def distribution(model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
    logits_TV = model(ids[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1]
    return (logits_TV / temperature).softmax(-1).numpy()


def check(rollout: Rollout, student: PreTrainedModel, teacher: PreTrainedModel, *, temperature: float = 1.0) -> None:
    """Compare log-probs of all draws, and marks, with plain passes of both models."""
    both = zip(*(distribution(model, rollout, temperature) for model in (student, teacher)), strict=True)
    expected_TV = np.stack([behavior(q_V, p_V, K) for q_V, p_V in both])
    np.testing.assert_allclose(
        rollout.action_logp, np.log(np.take_along_axis(expected_TV, rollout.actions.astype(int), 1)), atol=1e-10
    )
    assert rollout.replaced is not None and header_of(rollout).replaced == rollout.replaced.sum()


@pytest.mark.parametrize(("student", "teacher"), [("qwen3", "llama"), ("llama", "mistral-window")])
def test_log_probs_equal_plain_passes_of_both_models(student: str, teacher: str) -> None:
    """Requests with and without a teacher share few slots, so that rows move and start at different times."""
    models = make_model(student, dtype=torch.float64), make_model(teacher, seed=3, dtype=torch.float64)
    prompts = make_prompts(12, longest=20)
    asked = [
        Sampling(
            max_tokens=4 + 2 * i,
            group=1 + i % 3,
            draws=1 + i % 2,
            temperature=0.8 if i % 3 else 1.0,
            teacher_replaces=0 if i % 4 == 1 else K,
        )
        for i in range(12)
    ]
    rollouts = drawn(*models, prompts, asked, slots=5)
    assert len(rollouts) == sum(each.group for each in asked)
    replaced = []
    for rollout in rollouts:
        sampling = asked[rollout.prompt.number]
        if sampling.teacher_replaces:
            check(rollout, *models, temperature=sampling.temperature)
            replaced += rollout.replaced.tolist()
        else:
            assert rollout.replaced is None and header_of(rollout).replaced is None
            q_TV = distribution(models[0], rollout, sampling.temperature)
            np.testing.assert_allclose(rollout.logp, np.log(q_TV[np.arange(len(q_TV)), rollout.tokens]), atol=1e-10)
    assert 0.1 < np.mean(replaced) < 0.95


def test_tokens_before_the_first_replaced_one_are_those_of_the_student_alone() -> None:
    models, prompts = (make_model(), make_model(seed=1)), make_prompts(6)
    alone = drawn(*models, prompts, [Sampling(20)] * 6, slots=6)
    kept = []
    for rollout, other in zip(
        drawn(*models, prompts, [Sampling(20, teacher_replaces=25)] * 6, slots=6), alone, strict=True
    ):
        marks = [*np.flatnonzero(rollout.replaced), len(rollout.tokens)]
        kept.append(int(marks[0]))
        assert rollout.tokens[: marks[0]].tolist() == other.tokens[: marks[0]].tolist()
    assert sum(kept) > 6


@pytest.mark.parametrize("mode", ["keep", "drain", "restart"])
def test_a_released_group_continues_elsewhere_and_published_weights_count(mode: Mode) -> None:
    """The parts of a response have log-probs of the weights at that time, and the same constant teacher."""
    first, second = (make_model(seed=seed, dtype=torch.float64) for seed in (0, 1))
    teacher, sampling = make_model("llama", seed=3, dtype=torch.float64), Sampling(24, group=3, teacher_replaces=K)
    (prompt,) = make_prompts(1)

    async def main() -> list[Rollout]:
        one, other = (native_sampler(wrap(first), slots=4, stop_ids=set(), teacher=wrap(teacher)) for _ in range(2))
        try:
            call = asyncio.create_task(one.generate(prompt, sampling))
            while not one.rows or one.rows[0].tokens < 5:
                await asyncio.sleep(0.001)
            await one.release()
            call = asyncio.create_task(other.generate(prompt, sampling, await call))
            while not other.rows or other.rows[0].tokens < 10:
                await asyncio.sleep(0)
            await other.publish(export_weights(second, "float64", version=1), mode)
            return [handle.body for handle in await call]
        finally:
            one.close()
            other.close()

    for rollout in asyncio.run(main()):
        assert len(rollout.tokens) == len(rollout.replaced) == 24
        rows = {0: distribution(first, rollout), 1: distribution(second, rollout)}
        p_TV = distribution(teacher, rollout)
        for t, version in enumerate(rollout.versions):
            b_V = behavior(rows[int(version)][t], p_TV[t], K)
            assert rollout.logp[t] == pytest.approx(np.log(b_V[rollout.tokens[t]]), abs=1e-10)


def test_a_sampler_without_a_teacher_refuses() -> None:
    async def main() -> None:
        sampler = native_sampler(wrap(make_model()), slots=2, stop_ids={EOS})
        try:
            await sampler.generate(make_prompts(1)[0], Sampling(max_tokens=2, teacher_replaces=3))
        finally:
            sampler.close()

    with pytest.raises(ValueError, match="need a sampler with a teacher"):
        asyncio.run(main())


def test_marks_are_kept_when_parts_are_joined() -> None:
    (whole,) = drawn(make_model(), make_model(seed=2), make_prompts(1), [Sampling(9, teacher_replaces=K)], slots=1)
    assert continued(whole, whole).replaced.tolist() == [*whole.replaced, *whole.replaced]
