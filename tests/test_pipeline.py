"""Admission as a state machine, and the loops over toy engines: order, credits, drops, failures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import Config, LearnerConfig, SamplerConfig, TeacherConfig
from slipstream.engines import toy
from slipstream.engines.base import Engines, Fingerprint, Mode, Sampling, WeightsRef
from slipstream.errors import ModelError, NonFiniteError
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.run import Run
from slipstream.pipeline.schedules import Schedule, sync
from slipstream.pipeline.stages import Signal
from slipstream.records import Group, Handle, Prompt
from slipstream.runlog import RunLog, read_lines
from slipstream.runtimes import virtual
from slipstream.tasks.data import Prompts, Row

SCHEDULES = [
    sync(3),
    Schedule(groups=3, credits=6, submit="batch", score="stream", publish="drain"),
    Schedule(groups=3, credits=9, submit="batch", score="batch", publish="drain"),
    Schedule(groups=3, credits=7, submit="stream", score="stream", publish="keep"),
    Schedule(groups=3, credits=9, submit="stream", score="stream", publish="keep", order="submission"),
]


# --- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@given(data=st.data())
def test_whatever_happens_credits_are_bounded_and_every_group_ends_once(schedule: Schedule, data: Any) -> None:
    """Any legal event in any order: the state machine gets to its end and keeps its promises on the way."""
    admission = Admission(schedule, updates=4)
    ended: list[int] = []
    consumed: list[int] = []
    steps = drops = 0
    while not admission.finished:
        choices = ["submit"] if admission.quota() else []
        choices += ["rolled"] if admission.rolling else []
        choices += ["take"] if admission.scorable() else []
        choices += ["scored"] if admission.scoring else []
        choices += ["train"] if admission.next_batch() and not admission.gated else []
        choices += ["publish"] if admission.gated else []
        if drops < 6:
            choices += ["drop"] if admission.rolling or admission.waiting or admission.scoring else []
        assert choices, "deadlock"
        match data.draw(st.sampled_from(choices)):
            case "submit":
                admission.submit()
            case "rolled":
                admission.rolled(data.draw(st.sampled_from(list(admission.rolling))))
            case "take":
                admission.take()
            case "scored":
                admission.scored(data.draw(st.sampled_from(list(admission.scoring))))
            case "train":
                numbers = admission.next_batch()
                admission.train(numbers)
                steps += 1
                consumed += numbers
                ended += numbers
            case "publish":
                admission.publish()
            case "drop":
                number = data.draw(
                    st.sampled_from([*admission.rolling, *admission.waiting, *admission.scoring]), label="dropped"
                )
                admission.drop(number, "test")
                ended.append(number)
                drops += 1
        outstanding = admission.submitted - admission.dropped.total() - admission.published
        assert outstanding == admission.in_use <= schedule.credits
        if admission.gated:
            assert admission.quota() == 0
    assert sorted(ended) == list(range(admission.submitted)), "each exactly once"
    assert len(consumed) == admission.target == 4 * schedule.groups
    assert admission.dropped.total() == drops
    if schedule.submit == "stream":
        assert steps == 4
    if schedule.order == "submission" or schedule.submit == "batch":
        assert consumed == sorted(consumed), "in the order of submission"


def test_sync_takes_turns() -> None:
    admission = Admission(sync(2), updates=2)
    assert admission.submit() == [0, 1]
    assert admission.quota() == 0
    admission.rolled(1)
    assert not admission.scorable(), "one still rolls out"
    admission.rolled(0)
    assert admission.take() == [1, 0]
    admission.scored(0)
    assert admission.next_batch() == []
    admission.scored(1)
    assert admission.next_batch() == [0, 1]
    admission.train([0, 1])
    assert admission.quota() == 0, "credits come back with the publish, not with the step"
    admission.publish()
    assert admission.submit() == [2, 3]


def test_a_batch_whose_members_drop_closes_short_and_the_rest_follows() -> None:
    admission = Admission(sync(3), updates=1)
    admission.submit()
    admission.drop(1, "broken")
    admission.rolled(0)
    admission.rolled(2)
    admission.take()
    admission.scored(2)
    admission.scored(0)
    assert admission.next_batch() == [0, 2]
    admission.train([0, 2])
    admission.publish()
    assert not admission.finished and admission.submit() == [3], "submitted − dropped must reach updates · B"


def test_what_a_drop_leaves_over_does_not_start_beside_the_batch() -> None:
    """It would be rolled out under weights that are old when it is learned from."""
    admission = Admission(sync(3), updates=1)
    admission.submit()
    admission.drop(1, "broken")
    assert admission.quota() == 0, "the other two still roll out"


def test_a_batch_that_drops_as_a_whole_makes_no_step() -> None:
    admission = Admission(sync(2), updates=1)
    admission.submit()
    admission.drop(0, "broken")
    admission.drop(1, "broken")
    assert admission.next_batch() == [] and admission.submit() == [2, 3]


def test_a_batch_that_can_never_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="2 credits can never fill a batch of 3 groups"):
        Schedule(groups=3, credits=2, submit="stream", score="stream", publish="keep")


# --- the loops, over toy engines --------------------------------------------------------------------------------------

VOCAB = 6
TEACHER = toy.random_table(VOCAB, seed=1, scale=2.0)


def config(**changes: Any) -> Config:
    return Config(
        student="toy",
        teachers={"main": TeacherConfig(model="toy")},
        updates=changes.pop("updates", 5),
        sampler=SamplerConfig(max_tokens=10, group=2),
        learner=LearnerConfig(batch_size=8),
        **changes,
    )


def prompts() -> Prompts:
    tokens = [np.array([1 + i % (VOCAB - 1)], np.int32) for i in range(10)]
    return Prompts([Row(id=str(i), prompt="x") for i in range(10)], tokens, seed=0, shuffle=True)


def toy_engines(**changes: Any) -> Engines:
    student = toy.random_table(VOCAB, seed=0)
    engines: dict[str, Any] = {
        "sampler": toy.ToySampler(student),
        "scorer": toy.ToyScorer(TEACHER),
        "learner": toy.ToyLearner(student),
        "grader": toy.ToyGrader(),
        "close": lambda: None,
    }
    return Engines(**(engines | changes))


def train(path: Path, engines: Engines, **changes: Any) -> Run:
    settings = config(**changes)
    with RunLog.create(settings, path) as log:
        run = Run(settings, engines, prompts(), log)
        asyncio.run(asyncio.wait_for(run.train(), timeout=30))
    return run


def test_a_toy_student_learns_its_teacher_on_policy(tmp_path: Path) -> None:
    learner = toy.ToyLearner(toy.random_table(VOCAB, seed=0), lr=3.0)
    train(tmp_path, toy_engines(learner=learner), updates=150)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["update"] for line in lines] == list(range(1, 151))
    assert {line["lag/max"] for line in lines} == {0.0}
    assert np.mean([line["loss"] for line in lines[-10:]]) < 0.1 * lines[0]["loss"]
    p, q = learner.table.detach().softmax(-1), TEACHER.softmax(-1)
    visited = slice(1, VOCAB)
    assert (p[visited] - q[visited]).abs().max() < 0.15


def test_the_ledger_accounts_for_every_group_once(tmp_path: Path) -> None:
    train(tmp_path, toy_engines())
    ledger = read_lines(tmp_path / "ledger.jsonl")
    assert sorted(entry["number"] for entry in ledger) == list(range(20))
    for entry in ledger:
        assert entry["end"] == "trained" and entry["lag"] == 0 and entry["update"] == 1 + entry["number"] // 4
        assert entry["version"] == entry["update"] - 1
    tokens = sum(sum(entry["tokens"]) for entry in ledger)
    assert tokens == sum(line["tokens"] for line in read_lines(tmp_path / "metrics.jsonl"))


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    for name in "ab":
        train(tmp_path / name, toy_engines())
    a, b = ([line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")] for name in "ab")
    assert a == b


def test_on_a_virtual_clock_a_synchronous_update_takes_the_sum_of_its_stages(tmp_path: Path) -> None:
    """Rollouts of 2 s at the same time, then scores of 1 s, then 3 s of learning: 200 times 6 s, in no time."""
    student = toy.random_table(VOCAB, seed=0)
    engines = toy_engines(
        sampler=toy.ToySampler(student, cost=lambda _: 2.0),
        scorer=toy.ToyScorer(TEACHER, cost=lambda _: 1.0),
        learner=toy.ToyLearner(student, cost=lambda _: 3.0),
    )
    settings = config(updates=200)
    with RunLog.create(settings, tmp_path) as log:
        _, seconds = virtual.run(Run(settings, engines, prompts(), log).train())
    assert seconds == pytest.approx(1200)
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert line["time"] == pytest.approx(6 * line["update"])
        assert (line["seconds/wait"], line["seconds/learn"]) == (pytest.approx(3), pytest.approx(3))
        assert line["samples_per_s"] == pytest.approx(8 / 6)


class Unreliable(toy.ToySampler):
    """Every third prompt fails."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> list[Handle]:
        group = await super().generate(prompt, sampling)
        if prompt.number % 3 == 0:
            return [Handle(replace(handle.header, finish="error"), handle.body) for handle in group]
        return group


def test_failed_rollouts_are_counted_and_their_credits_return(tmp_path: Path) -> None:
    run = train(tmp_path, toy_engines(sampler=Unreliable(toy.random_table(VOCAB, seed=0))))
    ledger = read_lines(tmp_path / "ledger.jsonl")
    dropped = [entry for entry in ledger if entry["end"] == "dropped"]
    assert [entry["number"] % 3 for entry in dropped] == [0] * len(dropped) and len(dropped) >= 6
    assert {entry["reason"] for entry in dropped} == {"rollout failed"}
    assert len(ledger) - len(dropped) == 20 == run.admission.target
    assert run.admission.in_use == 0


class Deaf(toy.ToySampler):
    """Ignores the weights of version 2 and says truthfully what it runs."""

    async def publish(self, weights: WeightsRef, version: int, mode: Mode) -> Fingerprint:
        if version == 2:
            return toy.fingerprint(self.table)
        return await super().publish(weights, version, mode)


def test_a_sampler_that_skips_a_load_is_caught_at_that_publish(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="publish of version 2: the sampler runs weights"):
        train(tmp_path, toy_engines(sampler=Deaf(toy.random_table(VOCAB, seed=0))))


class Failing(toy.ToyScorer):
    async def score(self, group: Group) -> list[Handle]:
        raise ConnectionError("the teacher is gone")


def test_a_failing_stage_surfaces_with_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="the teacher is gone"):
        train(tmp_path, toy_engines(scorer=Failing(TEACHER)))


class Diverging(toy.ToyLearner):
    """The third loss is NaN."""

    calls = 0

    async def accumulate(self, *args: Any) -> dict[str, float]:
        self.calls += 1
        if self.calls == 3:
            raise NonFiniteError("the loss of update 3 is nan")
        return await super().accumulate(*args)


def test_nan_stops_the_run_and_keeps_the_last_good_weights(tmp_path: Path) -> None:
    learner = Diverging(toy.random_table(VOCAB, seed=0))
    with pytest.raises(NonFiniteError, match=r"update 3 is nan; the weights of update 2 are in .*checkpoints/2"):
        train(tmp_path, toy_engines(learner=learner))
    saved = torch.from_numpy(np.load(tmp_path / "checkpoints" / "2" / "table.npy"))
    assert torch.equal(saved, learner.table.detach())
    assert not (tmp_path / "final").exists()
    ledger = read_lines(tmp_path / "ledger.jsonl")
    assert [entry["reason"] for entry in ledger if entry["end"] == "dropped"] == ["run stopped"] * 4
    assert sorted(entry["number"] for entry in ledger) == list(range(12)), "what was in flight is accounted for"


def test_checkpoints_are_kept_as_many_as_asked(tmp_path: Path) -> None:
    train(tmp_path, toy_engines(), checkpoint={"every": 1, "keep": 2})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]
    assert (tmp_path / "final" / "table.npy").exists()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_wait_has_a_name_and_ends_when_its_condition_holds() -> None:
    async def main() -> None:
        signal, box = Signal(), list[int]()
        tasks = [asyncio.create_task(signal.until(f"box {n}", lambda n=n: len(box) >= n)) for n in (1, 2)]  # type: ignore[misc]
        await asyncio.sleep(0)
        assert set(signal.waits) == {"box 1", "box 2"}
        box.append(0)
        signal.notify()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [True, False] and set(signal.waits) == {"box 2"}
        box.append(0)
        signal.notify()
        await asyncio.gather(*tasks)
        assert signal.waits == {}

    asyncio.run(main())


# --- the toy itself ---------------------------------------------------------------------------------------------------


@settings(max_examples=5)
@given(st.integers(0, 2**31))
def test_toy_rollouts_carry_the_exact_log_probs_of_the_table(seed: int) -> None:
    table = toy.random_table(VOCAB, seed=seed)
    prompt = Prompt(id="p", number=0, tokens=np.array([3], np.int32), seed=seed)
    handles = asyncio.run(toy.ToySampler(table).generate(prompt, Sampling(max_tokens=12, group=3, draws=4)))
    for handle in handles:
        rollout = handle.body
        logp = table.log_softmax(-1)[toy.previous(rollout)]
        expected = logp.gather(1, torch.from_numpy(rollout.actions).long()).numpy()
        np.testing.assert_allclose(rollout.action_logp, expected, atol=1e-12)
        assert (rollout.finish == "eos") == (rollout.tokens[-1] == toy.EOS)
