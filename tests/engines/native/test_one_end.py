"""A teacher's distribution with all end tokens read as one, compared with a loop over the whole vocabulary.

Shapes: T positions, N trained tokens, V vocabulary.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import JSD, ForwardKL, LossConfig, ReverseKL
from slipstream.estimators.divergence import dense
from slipstream.estimators.logprobs.sampling_support import NO_MASS, all_read_as_one, read_as_one, with_ends
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.protocols import OneEnd
from slipstream.records import Batch, Handle, Scored, total
from support.engines import native_learner, native_scorer
from support.learners import roll_out, run, score
from support.tiny_models import VOCAB, logits_of, make_model, wrap

ENDS = OneEnd(1, (1, 7, 19))
"""Token 1 of the student stands for the ends 7 and 19 of the teacher, and for itself."""


def by_enumeration(logits_TV: Tensor) -> Tensor:
    """Return the log-probs that are read, from sums of single probabilities in float64."""
    found = []
    for probability in logits_TV.double().softmax(-1).tolist():
        row = [math.log(each) for each in probability]
        for end in ENDS.ends:
            row[end] = NO_MASS
        row[ENDS.token] = math.log(sum(probability[end] for end in ENDS.ends))
        found.append(row)
    return torch.tensor(found, dtype=torch.float64)


def test_three_ends_of_known_probabilities() -> None:
    """q = (0.1, 0.2, 0.3, 0.4) with the ends 1 and 3 read as 1: q′ = (0.1, 0.6, 0.3, e^−20), for any choice of ids."""
    logq, ends = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).double().log(), {"token": 1, "ends": (1, 3)}
    expected = torch.tensor([[0.1, 0.6, 0.3, math.exp(-20)]]).double()
    torch.testing.assert_close(all_read_as_one(logq, **ends).exp(), expected)
    ids = torch.tensor([[3, 1, 0, 1]])
    asked = logq.gather(1, with_ends(ids, ends=(1, 3)))
    torch.testing.assert_close(read_as_one(asked, ids, **ends).exp(), expected.gather(1, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distribution_stays_normalised_and_an_end_alone_changes_nothing(dtype: torch.dtype) -> None:
    logq = (10 * torch.randn(50, VOCAB, dtype=dtype)).log_softmax(-1)
    found = all_read_as_one(logq, **ENDS._asdict())
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(50, dtype=dtype), atol=1e-6, rtol=0)
    assert (found <= 0).all()
    torch.testing.assert_close(all_read_as_one(logq, token=5, ends=(5,)), logq)


def samples_with_ends() -> list[list[Handle]]:
    """Rollouts in which the emitted token and a draw are an end at some places, and every token is a best token."""
    groups = roll_out(make_model(seed=0))
    changed = []
    for group in groups:
        handles = []
        for handle in group:
            rollout = handle.body
            actions = rollout.actions.copy()
            actions[::3, 1], actions[1::3, 2] = ENDS.ends[1], ENDS.token
            best = np.tile(np.arange(VOCAB, dtype=np.int32), (len(actions), 1))
            body = replace(
                rollout, actions=actions, best_ids=best, best_logp=np.repeat(rollout.action_logp[:, :1], VOCAB, 1)
            )
            handles.append(Handle(handle.header, body))
        changed.append(handles)
    emitted = {int(token) for group in changed for handle in group for token in handle.body.tokens}
    assert emitted & set(ENDS.ends)
    return changed


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("cache", ["sampled", "student_topk", "teacher_topk", "hidden"])
def test_every_cache_holds_what_enumeration_gives(cache: str, temperature: float) -> None:
    teacher, groups = make_model("llama", seed=1), samples_with_ends()
    scored = score(teacher, groups, cache=cache, k=VOCAB - 2, temperature=temperature, one_end=ENDS)
    for handle in (handle for group in scored for handle in group):
        sample: Scored = handle.body
        logq = by_enumeration(logits_of(teacher, [sample])[0] / temperature)
        tokens = torch.from_numpy(sample.rollout.tokens).long()[:, None]
        expected: dict[str, Tensor] = {"teacher_logp": logq.gather(1, tokens)[:, 0]}
        match cache:
            case "sampled":
                ids = torch.from_numpy(sample.rollout.actions).long()
                expected["teacher_action_logp"] = logq.gather(1, ids)
            case "student_topk":
                expected["teacher_best_logp"] = logq
            case "teacher_topk":
                best = logq.topk(VOCAB - 2, -1)
                assert sample.teacher_ids is not None
                np.testing.assert_array_equal(sample.teacher_ids, best.indices.numpy())
                expected["teacher_topk_logp"] = best.values
        for name, values in expected.items():
            np.testing.assert_allclose(getattr(sample, name), values.numpy(), atol=2e-5)


@pytest.mark.parametrize("loss", [ReverseKL(), ForwardKL(cache="hidden", temperature=1.5), JSD(beta=0.3)], ids=str)
def test_the_learner_reads_hidden_states_in_the_same_way(loss: LossConfig) -> None:
    """The loss and its gradient are those of the divergence from the enumerated distribution."""
    student, teacher = (make_model(seed=seed, dtype=torch.float64) for seed in (0, 1))
    groups = score(teacher, samples_with_ends(), cache="hidden", temperature=loss.temperature, one_end=ENDS)
    samples = [handle.body for group in groups for handle in group]
    kind: Any = loss.spec.options["kind"]
    rows = [
        dense(
            (ours / loss.temperature).log_softmax(-1),
            by_enumeration(theirs.detach() / loss.temperature),
            kind=kind,
            **({"beta": 0.3} if kind == "jsd" else {}),
        )
        for ours, theirs in zip(logits_of(student, samples), logits_of(teacher, samples), strict=True)
    ]
    expected = torch.cat(rows).mean()
    expected.backward()
    learner = native_learner(
        wrap(student),
        method=Method(loss=loss),
        config=LearnerConfig(dtype="float64"),
        updates=1,
        teacher_heads={"teacher": TeacherHead(wrap(teacher).head, ENDS)},
    )

    async def work() -> float:
        batch = Batch(tuple(groups), 1)
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        return learner.measurements.sums["loss"].item()

    assert run(work()) == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(learner.lm.model.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-8)
    learner.close()


@torch.no_grad()
def test_the_kl_of_a_second_scoring_is_that_of_the_distributions_that_are_read() -> None:
    """The teacher sees another prompt at the second scoring."""
    teacher, groups = make_model("phi", seed=1, dtype=torch.float64), samples_with_ends()
    shown = [np.array([3, 4, 5], np.int32), np.array([6, 8], np.int32)]

    class Shown:
        now = 0

        def __call__(self, *_: object) -> Any:
            return shown[self.now]

        def close(self) -> None: ...

    async def work() -> tuple[list[Handle], list[Handle]]:
        scorer = native_scorer(wrap(teacher), one_end=ENDS, context=Shown())
        first = await scorer.score(groups[0])
        Shown.now = 1
        return first, await scorer.relabel(first)

    before, after = run(work())
    for old, new in zip(before, after, strict=True):
        then, now = (
            by_enumeration(
                logits_of(teacher, [replace(new.body, rollout=replace(
                    new.body.rollout, prompt=replace(new.body.rollout.prompt, tokens=tokens)))])[0]
            )
            for tokens in shown
        )  # fmt: skip
        expected = (now.exp() * (now - then)).sum(-1)
        np.testing.assert_allclose(new.body.supervision_kl, expected.numpy(), rtol=1e-4, atol=1e-6)
        assert not np.allclose(old.body.teacher_logp, new.body.teacher_logp)
