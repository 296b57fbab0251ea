"""The learner on responses that the student did not draw: supervised updates, and true behaviour log-probs."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from slipstream.config.file import parse
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import CrossEntropy, ForwardKL, ReverseKLMC
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.errors import NonFiniteError
from slipstream.objective.method import Method, Supervised, method_of
from slipstream.records import Batch, Counts, Given, Handle, Scored, given_group, total
from support.engines import native_learner, native_sampler, native_scorer
from support.tiny_models import EOS, logits_of, make_model, make_prompts, wrap

NAN = float("nan")


def groups_of(source: str, *, logp: float = NAN, supervised: bool = False) -> list[list[Handle]]:
    rng = np.random.default_rng(0)
    found = []
    for prompt in make_prompts(4):
        tokens = np.array([*rng.integers(2, 20, 5 + prompt.number), EOS], np.int32)
        known = Given(tokens, np.full(len(tokens), logp, np.float64), "eos")
        found.append(given_group(replace(prompt, source=source, supervised=supervised), [known]))
    return found


def samples_of(groups: list[list[Handle]]) -> list[Scored]:
    bodies = [handle.body for group in groups for handle in group]
    return [body if isinstance(body, Scored) else Scored(rollout=body) for body in bodies]


def learner_of(model: Any, method: Method, supervised: Supervised | None = None, **changes: Any) -> NativeLearner:
    config = LearnerConfig(**{"batch_size": 4, "dtype": "float64", "lr": 0.01, "clip_norm": 1e9} | changes)
    return native_learner(wrap(model), method=method, supervised=supervised, config=config, updates=6)


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


async def accumulated(learner: NativeLearner, groups: list[list[Handle]], update: int) -> None:
    batch = Batch(tuple(groups), update)
    await learner.accumulate(batch, total(await learner.prepare(batch)))


async def scored_by(teacher: Any, groups: list[list[Handle]], **needs: Any) -> list[list[Handle]]:
    scorer = native_scorer(wrap(teacher), **needs)
    found = [await scorer.score(group) for group in groups]
    scorer.close()
    return found


def test_a_supervised_update_has_the_gradient_of_torchs_cross_entropy() -> None:
    model, groups = make_model(dtype=torch.float64), groups_of("data", supervised=True)
    stage = Supervised(method=Method(loss=CrossEntropy()), updates=2, lr=0.5, warmup=2)
    learner = learner_of(model, Method(loss=ReverseKLMC(m=1)), stage)

    async def work() -> dict[str, float]:
        await accumulated(learner, groups, 1)
        found = gradient(learner.lm.model)
        reference = make_model(dtype=torch.float64)
        logits = torch.cat(logits_of(reference, samples_of(groups)))
        tokens = torch.cat([torch.from_numpy(s.rollout.tokens).long() for s in samples_of(groups)])
        expected = cross_entropy(logits, tokens)
        expected.backward()
        torch.testing.assert_close(found, gradient(reference), rtol=1e-9, atol=1e-12)
        metrics = await learner.step()
        assert metrics["distill/loss"] == pytest.approx(expected.item(), rel=1e-9)
        return metrics

    metrics = asyncio.run(work())
    learner.close()
    assert not [name for name in metrics if name.startswith("drift/")], "the student drew nothing"


def test_learning_rates_warm_up_in_the_stage_and_again_after_it() -> None:
    """Two supervised updates of lr 0.5 with a warm-up of 2, then learner.lr 0.01 with a warm-up of 2 and a cosine."""
    stage = Supervised(method=Method(loss=CrossEntropy()), updates=2, lr=0.5, warmup=2)
    method = Method(loss=ForwardKL(k=5))
    learner = learner_of(make_model(dtype=torch.float64), method, stage, warmup=2, decay="cosine")

    async def work() -> list[float]:
        scored = await scored_by(
            make_model(seed=3, dtype=torch.float64), groups_of("file", logp=-1.0), cache="teacher_topk", k=5
        )
        found = []
        for update in range(1, 7):
            await accumulated(learner, groups_of("data", supervised=True) if update <= 2 else scored, update)
            found.append((await learner.step())["lr"])
        return found

    found = asyncio.run(work())
    learner.close()
    assert found == pytest.approx([0.25, 0.5, 0.005, 0.01, 0.01, 0.005])


def test_importance_weights_are_ratios_to_the_policy_that_drew_the_tokens() -> None:
    """The log-prob −2 is of no weights of the student: −ρ·(log q − log p)·∇log p with ρ = p / e^−2, by hand."""
    student, teacher = make_model(dtype=torch.float64), make_model(seed=3, dtype=torch.float64)
    learner = learner_of(student, Method(loss=ReverseKLMC(m=1)))

    async def work() -> Tensor:
        scored = await scored_by(teacher, groups_of("file", logp=-2.0))
        await accumulated(learner, scored, 1)
        assert all(handle.header.gap == 0 for group in scored for handle in group)
        return gradient(learner.lm.model)

    found = asyncio.run(work())
    learner.close()
    samples, reference = samples_of(groups_of("file", logp=-2.0)), make_model(dtype=torch.float64)
    tokens = torch.cat([torch.from_numpy(s.rollout.tokens).long() for s in samples])[:, None]
    p, q = (torch.cat(logits_of(m, samples)).log_softmax(-1).gather(1, tokens)[:, 0] for m in (reference, teacher))
    advantage = (q - p).detach()
    (-((p + 2.0).exp() * advantage)).mean().backward()
    torch.testing.assert_close(found, gradient(reference), rtol=1e-7, atol=1e-10)


def test_a_loss_that_uses_an_unknown_log_prob_is_not_finite() -> None:
    """The config refuses this; a mistake in a check must not pass silently."""
    learner = learner_of(make_model(dtype=torch.float64), Method(loss=ReverseKLMC(m=1)))

    async def work() -> None:
        await accumulated(learner, await scored_by(make_model(seed=3, dtype=torch.float64), groups_of("data")), 1)

    with pytest.raises(NonFiniteError):
        asyncio.run(work())
    learner.close()


def test_a_scorer_gives_supervised_responses_the_scores_of_their_own_loss() -> None:
    """In one pass of calls: top-5 at temperature 0.5 for supervised ones, draws at temperature 1 for the others."""
    teacher, stage = make_model(seed=3, dtype=torch.float64), ForwardKL(k=5)
    scorer = native_scorer(wrap(teacher), cache="sampled", supervised=stage.spec, supervised_temperature=0.5)

    async def work() -> list[list[Handle]]:
        groups = [*groups_of("data", supervised=True), *groups_of("file", logp=-1.0)]
        return await asyncio.gather(*map(scorer.score, groups))

    found = asyncio.run(work())
    scorer.close()
    for groups, temperature in ((found[:4], 0.5), (found[4:], 1.0)):
        samples = samples_of(groups)
        for sample, logits in zip(samples, logits_of(teacher, samples), strict=True):
            logq = (logits.detach() / temperature).log_softmax(-1)
            emitted = logq.gather(1, torch.from_numpy(sample.rollout.tokens).long()[:, None])[:, 0]
            np.testing.assert_allclose(sample.teacher_logp, emitted.numpy(), rtol=1e-6, atol=1e-6)
            if temperature == 0.5:
                best = logq.topk(5, -1).indices.numpy()
                assert (np.sort(sample.teacher_ids) == np.sort(best)).all() and sample.teacher_action_logp is None
            else:
                assert sample.teacher_ids is None and sample.teacher_action_logp is not None


RL = {
    "student": "tiny",
    "updates": 2,
    "sampler": {"max_tokens": 8, "group": 3},
    "learner": {"batch_size": 12},
    "teachers": {"main": {"model": "tiny"}},
    "loss": {"kind": "forward_kl", "k": 5},
    "schedule": {"kind": "step_off", "k": 1},
    "task": {"reward": "exact"},
}
POLICIES = {
    "vanilla": {"loss": "vanilla"},
    "whitened over the batch": {"loss": "reinforce", "advantage": "reinforce_plus_plus"},
    "of whole rows": {"loss": "gspo"},
    "chosen from the batch": {"loss": "m2po"},
    "previous weights": {"loss": "vanilla", "old": "previous"},
}
REFERENCES: list[dict[str, Any]] = [
    {},
    {"reference": {"weight": 0.1}},
    {"reference": {"weight": 0.1, "into": "reward"}},
]


@pytest.mark.parametrize("reference", REFERENCES, ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_mixed_in_groups_leave_the_policy_loss_of_own_groups_as_it_is(name: str, reference: dict[str, Any]) -> None:
    """Gradient of both losses on all groups = distillation on all + policy loss on own groups alone, by counts."""
    config = parse({**RL, **reference, "policy": POLICIES[name]})
    whole, distilled = method_of(config), method_of(parse(RL))
    alone = replace(whole, loss=replace_weight(config.loss))

    async def own_groups() -> list[list[Handle]]:
        sampler = native_sampler(wrap(make_model(seed=5, dtype=torch.float64)), slots=16, stop_ids={EOS})
        found = [list(await sampler.generate(p, rollout_sampling(config))) for p in make_prompts(6)[:3]]
        sampler.close()
        graded = [[h.with_header(rewards={"exact": float(h.body.tokens[0] % 2)}) for h in group] for group in found]
        assert len({h.header.rewards["exact"] for group in graded for h in group}) == 2
        return graded

    async def gradient_of(method: Method, groups: list[list[Handle]]) -> tuple[Tensor, Counts, dict[str, float]]:
        learner = learner_of(make_model(dtype=torch.float64), method)
        batch = Batch(tuple(groups), 1)
        counts = total(await learner.prepare(batch))
        await learner.accumulate(batch, counts)
        found = gradient(learner.lm.model)
        metrics = await learner.step()
        learner.close()
        return found, counts, {name: x for name, x in metrics.items() if name.startswith(("policy/", "reference/"))}

    async def work() -> None:
        teacher = make_model(seed=3, dtype=torch.float64)
        mixed = [[replace_number(h, 10) for h in group] for group in groups_of("data")]
        own = await scored_by(teacher, await own_groups(), cache="teacher_topk", k=5)
        others = await scored_by(teacher, mixed, cache="teacher_topk", k=5)
        both, counts, metrics = await gradient_of(whole, [*others[:2], *own, *others[2:]])
        distillation, _, _ = await gradient_of(distilled, [*own, *others])
        policy, its, expected = await gradient_of(alone, own)
        share = its.n_sequences / counts.n_sequences if whole.over_sequences else its.n_tokens / counts.n_tokens
        assert policy.abs().max() > 1e-6
        # as without mixed-in groups: the one pass for both losses rounds at 1e-7 of gradients of 0.1 to 0.5
        torch.testing.assert_close(both, distillation + share * policy, rtol=0, atol=2e-7)
        assert metrics.pop("policy/loss") == pytest.approx(share * expected.pop("policy/loss"), abs=1e-7)
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-9), "means over the tokens of the student"
        nothing, _, _ = await gradient_of(alone, others)
        assert nothing.abs().max() == 0, "an update of mixed-in groups alone"

    asyncio.run(work())


@pytest.mark.parametrize("into", ["loss", "reward"])
def test_an_update_of_mixed_in_groups_alone_changes_no_coefficient(into: str) -> None:
    """It has no token of the student, whose KL and ratio would be measured; 0 would lower both coefficients."""
    reference = {"weight": 0.1, "into": into, "control": "adaptive", "target": 0.1, "horizon": 100}
    policy = {"loss": "r2vpo", "variance_target": 0.01}
    method = method_of(parse({**RL, "reference": reference, "policy": policy}))

    async def work() -> list[dict[str, float]]:
        learner, steps = learner_of(make_model(dtype=torch.float64), method), []
        groups = await scored_by(make_model(seed=3, dtype=torch.float64), groups_of("data"), cache="teacher_topk", k=5)
        for update in (1, 2):
            await accumulated(learner, groups, update)
            steps.append(await learner.step())
        learner.close()
        return steps

    for step in asyncio.run(work()):
        assert step["grad_norm"] > 0
        assert (step["policy/variance_coef"], step["reference/beta"]) == (0.04, 0.1)
        of_own = {"policy/ratio", "policy/kl", *(["reference/kl"] if into == "loss" else [])}
        assert not of_own & step.keys(), "means over no token"


def replace_weight(loss: Any) -> Any:
    return loss.model_copy(update={"weight": 0.0})


def replace_number(handle: Handle, more: int) -> Handle:
    """The number of a group that no own group has."""
    rollout = handle.body
    prompt = replace(rollout.prompt, number=rollout.prompt.number + more)
    return Handle(replace(handle.header, number=prompt.number), replace(rollout, prompt=prompt))


@pytest.mark.parametrize(
    "loss",
    [ForwardKL(k=5), ReverseKLMC(m=1), ForwardKL(k=5, temperature=2.0)],
    ids=["forward_kl", "reverse_kl_mc", "another temperature"],
)
def test_forward_kl_is_estimated_on_the_responses_of_a_teacher_alone(loss: Any) -> None:
    """The mean of log q − log p over tokens of the source "teacher", whatever the loss; other sources do not count."""
    student, teacher = make_model(dtype=torch.float64), make_model(seed=3, dtype=torch.float64)
    learner = learner_of(student, Method(loss=loss), token_budget=40)
    groups = [*groups_of("teacher", logp=-1.0)[:2], *groups_of("file", logp=-1.0)[2:]]
    needs = {"cache": "teacher_topk", "k": 5} if isinstance(loss, ForwardKL) else {}

    async def work() -> dict[str, float]:
        await accumulated(learner, await scored_by(teacher, groups, temperature=loss.temperature, **needs), 1)
        return await learner.step()

    metrics = asyncio.run(work())
    learner.close()
    samples = samples_of(groups[:2])
    tokens = torch.cat([torch.from_numpy(s.rollout.tokens).long() for s in samples])[:, None]
    p, q = (
        (torch.cat(logits_of(m, samples)) / loss.temperature).log_softmax(-1).gather(1, tokens)
        for m in (make_model(dtype=torch.float64), teacher)
    )
    assert metrics["teacher/forward_kl"] == pytest.approx((q - p).mean().item(), rel=1e-6)
    assert "teacher/taught" not in metrics
