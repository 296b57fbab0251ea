"""The loops over toy engines: order, credits, drops, failures."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config.learner import LearnerConfig
from slipstream.config.objective import PolicyConfig
from slipstream.config.rewards import TaskConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schedule import Async, Sync
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.engines.sampling_options import eval_sampling, rollout_sampling
from slipstream.errors import EngineError, ModelError, NonFiniteError
from slipstream.grades import Ungraded
from slipstream.pipeline.evaluate import Evaluation, fall_of
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines, GradingSampler, Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Group, Handle, Prompt, Rollout, header_of
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy
from support.tiny_models import masked

# --- the loops, over toy engines --------------------------------------------------------------------------------------

VOCAB = 6
TEACHER = toy.random_table(VOCAB, seed=1, scale=2.0)


def config(**changes: Any) -> Config:
    return Config(
        student="toy",
        teachers={"main": TeacherConfig(model="toy")},
        updates=changes.pop("updates", 5),
        schedule=changes.pop("schedule", Sync()),
        sampler=SamplerConfig(max_tokens=10, group=2),
        learner=changes.pop("learner", LearnerConfig(batch_size=8)),
        health={"canary": 0} | changes.pop("health", {}),
        **changes,
    )


def prompts() -> Prompts:
    tokens = [np.array([1 + i % (VOCAB - 1)], np.int32) for i in range(10)]
    return Prompts([Row(id=str(i), prompt="x") for i in range(10)], tokens, seed=0, shuffle=True)


def toy_engines(*, sampler: Any = None, scorer: Any = None, learner: Any = None) -> Engines:
    student = toy.random_table(VOCAB, seed=0)
    return Engines(
        samplers=(GradingSampler(sampler or toy.ToySampler(student), toy.ToyGrader()),),
        scorers={"": (scorer or toy.ToyScorer(TEACHER),)},
        learner=learner or toy.ToyLearner(student),
        close=lambda: None,
    )


def train(path: Path, engines: Engines, **changes: Any) -> Run:
    """On a virtual clock: a wait that would never end raises at once."""
    settings = config(**changes)
    with RunLog.create(settings, path) as log:
        run = Run(settings, engines, prompts(), log)
        virtual.run(run.train())
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
        assert entry["end"] == "trained" and entry["lag"] == [0, 0] and entry["update"] == 1 + entry["number"] // 4
        assert entry["version"] == entry["update"] - 1
    tokens = sum(sum(entry["tokens"]) for entry in ledger)
    assert tokens == sum(line["tokens"] for line in read_lines(tmp_path / "metrics.jsonl"))


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    for name in "ab":
        train(tmp_path / name, toy_engines())
    a, b = ([line["loss"] for line in read_lines(tmp_path / name / "metrics.jsonl")] for name in "ab")
    assert a == b


class Unreliable(toy.ToySampler):
    """Every third prompt fails."""

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = await super().generate(prompt, sampling, begun)
        if prompt.number % 3 == 0:
            return [Handle(replace(handle.header, finish="error"), handle.body) for handle in group]
        return group


def test_failed_rollouts_are_counted_and_their_credits_return(tmp_path: Path) -> None:
    run = train(tmp_path, toy_engines(sampler=Unreliable(toy.random_table(VOCAB, seed=0))))
    ledger = read_lines(tmp_path / "ledger.jsonl")
    dropped = [entry for entry in ledger if entry["end"] == "dropped"]
    assert [entry["number"] % 3 for entry in dropped] == [0] * len(dropped) and len(dropped) >= 6
    assert {entry["reason"] for entry in dropped} == {"rollout failed"}
    assert len(ledger) == 20 and run.admission.version == 5, "short batches, and as many as were asked for"
    assert run.admission.in_use == 0


class Careless(toy.ToySampler):
    """One member of every third group fails, and has no record."""

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = await super().generate(prompt, sampling, begun)
        if prompt.number % 3 == 0:
            bad = prompt.number % 2
            group[bad] = Handle(replace(group[bad].header, finish="error"), None)
        return group


def test_a_failed_member_ends_alone_and_is_counted(tmp_path: Path) -> None:
    run = train(tmp_path, toy_engines(sampler=Careless(toy.random_table(VOCAB, seed=0))))
    ledger = read_lines(tmp_path / "ledger.jsonl")
    assert [entry["end"] for entry in ledger] == ["trained"] * 20 and run.admission.dropped.total() == 0
    for entry in ledger:
        failed = [entry["number"] % 2] if entry["number"] % 3 == 0 else []
        assert entry.get("failed", []) == failed
        assert len(entry["tokens"]) == len(entry["lag"]) == 2 - len(failed)
        assert all("ended" in rewards for rewards in entry["rewards"])
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["failed_samples"] for line in lines] == [2.0, 3.0, 4.0, 6.0, 7.0]
    assert [line["samples"] for line in lines] == [6.0, 7.0, 7.0, 6.0, 7.0]
    assert sum(sum(entry["tokens"]) for entry in ledger) == sum(line["tokens"] for line in lines)


def test_a_failed_member_is_not_graded() -> None:
    class Strict(toy.ToyGrader):
        async def grade(self, group: Group) -> list[Handle]:
            assert group and all(handle.body is not None for handle in group)
            return await super().grade(group)

    prompt = Prompt(id="p", number=3, tokens=np.array([3], np.int32))
    table = toy.random_table(VOCAB, seed=0)
    one, two = asyncio.run(GradingSampler(Careless(table), Strict()).generate(prompt, Sampling(max_tokens=4, group=2)))
    assert (one.header.index, two.header.index, two.header.rewards) == (0, 1, {}) and "ended" in one.header.rewards
    asyncio.run(GradingSampler(Useless(table), Strict()).generate(prompt, Sampling(max_tokens=4, group=2)))


class Partial(toy.ToyGrader):
    """Has no reward for one member of every third group, and for all of every fifth."""

    async def grade(self, group: Group) -> list[Handle]:
        return [self.look(handle) for handle in await super().grade(group)]

    def look(self, handle: Handle) -> Handle:
        header = handle.header
        if header.number % 5 == 2:
            return Handle(replace(header, ungraded=Ungraded("error", "ended raised KeyError: 'x'")), handle.body)
        if header.number % 3 == 0 and header.index == 1:
            return Handle(replace(header, ungraded=Ungraded("timeout", "ended took more than 1 s")), handle.body)
        return handle


def test_a_member_without_a_reward_is_not_learned_from_and_counted_by_its_cause(tmp_path: Path) -> None:
    engines = replace(
        toy_engines(), samplers=(GradingSampler(toy.ToySampler(toy.random_table(VOCAB, seed=0)), Partial()),)
    )
    said: list[str] = []
    settings = config()
    with RunLog.create(settings, tmp_path) as log:
        virtual.run(Run(settings, engines, prompts(), log, say=said.append).train())
    ledger = read_lines(tmp_path / "ledger.jsonl")
    for entry in ledger:
        if entry["number"] % 5 == 2:
            assert (entry["end"], entry["cause"]) == ("dropped", "ended raised KeyError: 'x'")
        elif entry["number"] % 3 == 0:
            assert (entry["failed"], entry["causes"]) == ([1], ["ended took more than 1 s"])
        else:
            assert "causes" not in entry and len(entry["tokens"]) == 2
    last = read_lines(tmp_path / "metrics.jsonl")[-1]
    assert last["failed_samples"] == 0 and last["samples"] < 8
    assert last["ungraded/timeout"] >= 5 and last["ungraded/error"] == 2 * last["dropped"] >= 8
    assert last["thrown_tokens"] >= last["ungraded/timeout"] + last["ungraded/error"], "each has a token at least"
    causes = sorted(line.partition("has no reward and is dropped: ")[2] for line in said)
    assert causes == ["ended raised KeyError: 'x'", "ended took more than 1 s"], "once for each"


def test_the_greedy_answer_leaves_its_reward_and_nothing_else() -> None:
    prompt, table = Prompt(id="p", number=0, tokens=np.array([3], np.int32), seed=5), toy.random_table(VOCAB, seed=0)
    sampling = Sampling(max_tokens=10, group=2, draws=3, top_p=0.9)
    plain = asyncio.run(GradingSampler(toy.ToySampler(table), toy.ToyGrader()).generate(prompt, sampling))
    (best,) = asyncio.run(
        GradingSampler(toy.ToySampler(table), toy.ToyGrader()).generate(prompt, Sampling(max_tokens=10, temperature=0))
    )
    group = asyncio.run(
        GradingSampler(toy.ToySampler(table), toy.ToyGrader()).generate(prompt, replace(sampling, greedy=True))
    )
    assert [h.body.tokens.tolist() for h in group] == [h.body.tokens.tolist() for h in plain]
    assert [h.header.greedy_tokens for h in group] == [best.header.tokens, 0]
    for handle, before in zip(group, plain, strict=True):
        ended = float(best.header.finish == "eos")
        assert handle.header.rewards == before.header.rewards | {"greedy_ended": ended}


class NotGreedily(toy.ToySampler):
    """Cannot say what it likes best."""

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = await super().generate(prompt, sampling, begun)
        if sampling.temperature:
            return group
        return [Handle(replace(handle.header, finish="error"), None) for handle in group]


def test_without_a_greedy_answer_a_group_has_nothing_to_learn() -> None:
    prompt, table = Prompt(id="p", number=0, tokens=np.array([3], np.int32)), toy.random_table(VOCAB, seed=0)
    sampling = Sampling(max_tokens=4, group=2, greedy=True)
    group = asyncio.run(GradingSampler(NotGreedily(table), toy.ToyGrader()).generate(prompt, sampling))
    assert [handle.header.finish for handle in group] == ["error", "error"]


def test_whoever_fails_beside_a_greedy_answer_fails_as_itself() -> None:
    class Broken(toy.ToySampler):
        async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
            if sampling.group > 1:
                raise ModelError("too long")
            return await super().generate(prompt, sampling, begun)

    prompt, table = Prompt(id="p", number=0, tokens=np.array([3], np.int32)), toy.random_table(VOCAB, seed=0)
    with pytest.raises(ModelError, match="too long"):
        asyncio.run(
            GradingSampler(Broken(table), toy.ToyGrader()).generate(
                prompt, Sampling(max_tokens=4, group=2, greedy=True)
            )
        )


def test_greedy_answers_are_paid_for_in_training_and_not_in_evaluation(tmp_path: Path) -> None:
    """Nobody trains on them, no eval draws them, and a run says what they cost."""
    engines, said = toy_engines(), []
    policy, reward = PolicyConfig(advantage="remax"), TaskConfig(reward=("exact",))
    train(tmp_path / "remax", engines, policy=policy, task=reward)
    train(tmp_path / "plain", toy_engines(), policy=PolicyConfig(), task=reward)
    for name in ("remax", "plain"):
        said.append(read_lines(tmp_path / name / "metrics.jsonl"))
    for ours, plain in zip(*said, strict=True):
        assert ours["tokens"] == plain["tokens"] and ours["samples"] == plain["samples"] == 8
        assert "greedy_tokens" not in plain and "reward/greedy_ended" not in plain
        assert ours["reward/ended"] == plain["reward/ended"] and 0 <= ours["reward/greedy_ended"] <= 1
    costs = [line["greedy_tokens"] for line in said[0]]
    assert costs == sorted(costs) and 4 * 5 <= costs[-1] <= 10 * 4 * 5, "one answer for each of four groups an update"
    assert rollout_sampling(config(policy=policy, task=reward)).greedy
    assert not eval_sampling(config(policy=policy, task=reward), "").greedy


def test_a_held_out_answer_that_failed_is_not_wrong(tmp_path: Path) -> None:
    class Kind:
        async def grade(self, group: Group) -> list[Handle]:
            return [Handle(replace(handle.header, rewards={"exact": 1.0}), handle.body) for handle in group]

    held_out = [Prompt(id="held out", number=-3, tokens=np.array([3], np.int32))]
    engines = replace(toy_engines(), samplers=(GradingSampler(Careless(toy.random_table(VOCAB, seed=0)), Kind()),))
    settings = config(updates=1, task={"reward": "exact"}, data={"eval": "x"}, eval={"every": 1, "n": 2})
    with RunLog.create(settings, tmp_path) as log:
        virtual.run(Run(settings, engines, prompts(), log, held_out={"": held_out}).train())
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["kind"] == "eval"]
    assert [(line["accuracy"], line["samples"]) for line in lines] == [(1.0, 1.0)] * 2


class Worse(toy.ToyGrader):
    """Grader whose share of right answers depends on the version that wrote them."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = shares

    async def grade(self, group: Group) -> list[Handle]:
        share = self.shares[int(group[0].body.versions[0])]
        right = float(group[0].header.number % 10 < 10 * share)
        return [Handle(replace(handle.header, rewards={"exact": right}), handle.body) for handle in group]


def test_a_held_out_accuracy_that_falls_is_told_once_until_it_is_back(tmp_path: Path) -> None:
    said, shares = list[str](), [0.9, 0.9, 0.4, 0.3, 0.8, 0.3]
    held_out = [Prompt(id=str(n), number=-n, tokens=np.array([3], np.int32)) for n in range(40)]
    sampler = GradingSampler(toy.ToySampler(toy.random_table(VOCAB, seed=0)), Worse(shares))
    settings = config(updates=5, task={"reward": "exact"}, data={"eval": "x"}, eval={"every": 1})
    with RunLog.create(settings, tmp_path) as log:
        engines = replace(toy_engines(), samplers=(sampler,))
        virtual.run(Run(settings, engines, prompts(), log, held_out={"": held_out}, say=said.append).train())
        resumed = Evaluation(*[None] * 6, groups=None, log=log)  # type: ignore[arg-type]
    told = [line for line in said if "fell" in line]
    assert [line.partition(": ")[0] for line in told] == ["evaluation at update 2", "evaluation at update 5"]
    assert "held-out accuracy fell from 0.9 ± 0.048 after update 0 to 0.4 ± 0.078: `slipstream advise` " in told[0]
    assert (resumed.best[""]["update"], resumed.fallen) == (0, {""}), "a resumed run knows it"


@pytest.mark.parametrize(
    ("before", "now", "falls"),
    [((0.5, 0.05), (0.2, 0.05), True), ((0.5, 0.05), (0.25, 0.05), False), ((0.5, 0.001), (0.45, 0.001), False)],
    ids=["far", "by chance", "a little"],
)
def test_an_accuracy_has_not_fallen_by_chance_or_by_little(
    before: tuple[float, float], now: tuple[float, float], falls: bool
) -> None:
    best, line = (
        {"update": 1, "accuracy": mean, "accuracy_error": error, "samples": 400.0} for mean, error in (before, now)
    )
    assert bool(fall_of(best, line)) == falls
    few = {"update": 1, "accuracy_error": 0.0, "samples": 2.0}
    assert not fall_of(few | {"accuracy": 1.0}, few | {"accuracy": 0.0}), "two answers"
    assert not fall_of({"update": 1, "accuracy": 1.0}, line), "one prompt alone has no error"


class Observing(toy.ToySampler):
    """The second token of every response was not drawn, and nothing of every third one was."""

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        return [self._seen(handle.body) for handle in await super().generate(prompt, sampling, begun)]

    def _seen(self, rollout: Rollout) -> Handle:
        mask = np.arange(len(rollout.tokens)) != 1
        if (rollout.prompt.number + rollout.index) % 3 == 0:
            mask[:] = False
        found = replace(masked(rollout, mask), logp=np.where(mask, rollout.logp, np.nan))
        return Handle(header_of(found), found)


def test_what_was_not_drawn_has_no_age_and_no_part_in_the_loss(tmp_path: Path) -> None:
    run = train(tmp_path, toy_engines(sampler=Observing(toy.random_table(VOCAB, seed=0))), schedule=Async(tau=1))
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert run.admission.version == 5 and all(np.isfinite(line["loss"]) for line in lines)
    assert all(0 <= line["lag/max"] <= 5 for line in lines)
    for entry in read_lines(tmp_path / "ledger.jsonl"):
        lags = enumerate(entry.get("lag", ()))
        assert all(lag == 0 for index, lag in lags if (entry["number"] + index) % 3 == 0), "nothing of it is trained"


class Deaf(toy.ToySampler):
    """Ignores the weights of version 2 and says truthfully what it runs."""

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        if weights.version == 2:
            return Loaded(toy.fingerprint(self.table))
        return await super().publish(weights, mode)


def test_a_sampler_that_skips_a_load_is_caught_at_that_publish(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="publish of version 2: sampler runs weights"):
        train(tmp_path, toy_engines(sampler=Deaf(toy.random_table(VOCAB, seed=0))))


class Failing(toy.ToyScorer):
    async def score(self, group: Group) -> list[Handle]:
        raise ConnectionError("the teacher is gone")


def test_a_teacher_that_is_down_is_tried_again_and_then_stops_the_run_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError,
        match=r"scoring failed at the last 15 tries, and none succeeded: ConnectionError: the teacher is gone",
    ) as caught:
        train(tmp_path, toy_engines(scorer=Failing(TEACHER)))
    assert isinstance(caught.value.__cause__, ConnectionError)
    reasons = [entry["reason"] for entry in read_lines(tmp_path / "ledger.jsonl")]
    assert reasons == ["scoring failed"] * 2 + ["run stopped"] * 2


class Useless(toy.ToySampler):
    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group = await super().generate(prompt, sampling, begun)
        return [Handle(replace(handle.header, finish="error"), handle.body) for handle in group]


def test_a_sampler_that_can_answer_nothing_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"rollout failed at the last 15 tries, and none succeeded: the engine could not answer it"
    ):
        train(tmp_path, toy_engines(sampler=Useless(toy.random_table(VOCAB, seed=0))))


class Defective(toy.ToyScorer):
    async def score(self, group: Group) -> list[Handle]:
        raise TypeError("a defect of ours")


def test_a_defect_is_not_tried_again_and_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a defect of ours"):
        train(tmp_path, toy_engines(scorer=Defective(TEACHER)))


class Flaky(toy.ToyScorer):
    """Every group fails twice; group 6 always."""

    def __init__(self) -> None:
        super().__init__(TEACHER)
        self.tries = Counter[int]()

    async def score(self, group: Group) -> list[Handle]:
        number = group[0].header.number
        self.tries[number] += 1
        if number == 6 or self.tries[number] <= 2:
            raise ConnectionError("busy")
        return await super().score(group)


def test_a_group_that_cannot_be_scored_is_dropped_and_others_are_tried_again(tmp_path: Path) -> None:
    run = train(tmp_path, toy_engines(scorer=Flaky()), schedule=Async(tau=1))
    dropped = [entry for entry in read_lines(tmp_path / "ledger.jsonl") if entry["end"] == "dropped"]
    assert [(entry["number"], entry["reason"], entry["cause"]) for entry in dropped] == [
        (6, "scoring failed", "ConnectionError: busy")
    ]
    assert run.admission.version == 5 and run.admission.in_use == 0


class Diverging(toy.ToyLearner):
    """The third loss is NaN."""

    calls = 0

    async def accumulate(self, *args: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            raise NonFiniteError("the loss of update 3 is nan")
        await super().accumulate(*args)


def test_nan_stops_the_run_and_keeps_the_last_good_weights(tmp_path: Path) -> None:
    learner = Diverging(toy.random_table(VOCAB, seed=0))
    with pytest.raises(
        NonFiniteError, match=r"update 3 is nan; the weights of update 2 are in .*checkpoints/2.suspect"
    ):
        train(tmp_path, toy_engines(learner=learner))
    saved = torch.from_numpy(np.load(tmp_path / "checkpoints" / "2.suspect" / "table.npy"))
    assert torch.equal(saved, learner.table.detach())
    assert not (tmp_path / "final").exists()
    ledger = read_lines(tmp_path / "ledger.jsonl")
    assert [entry["reason"] for entry in ledger if entry["end"] == "dropped"] == ["run stopped"] * 4
    assert sorted(entry["number"] for entry in ledger) == list(range(12)), "what was in flight is accounted for"


def test_an_update_with_some_of_its_steps_made_is_never_saved_as_the_one_before(tmp_path: Path) -> None:
    """With two mini-batches, the fourth loss is that of the second update's second one."""

    class DivergingLater(Diverging):
        calls = -1

    learner = DivergingLater(toy.random_table(VOCAB, seed=0))
    with pytest.raises(NonFiniteError, match="is nan$"):
        train(tmp_path, toy_engines(learner=learner), learner=LearnerConfig(batch_size=8, minibatches=2))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("epochs", [1, 3])
def test_minibatches_and_epochs_are_steps_of_one_version(tmp_path: Path, epochs: int) -> None:
    class Counting(toy.ToyLearner):
        steps = 0

        async def step(self, *args: Any) -> dict[str, float]:
            self.steps += 1
            return await super().step(*args)

    learner = Counting(toy.random_table(VOCAB, seed=0))
    train(tmp_path, toy_engines(learner=learner), learner=LearnerConfig(batch_size=8, minibatches=2, epochs=epochs))
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["version"] for line in lines] == [1, 2, 3, 4, 5]
    assert {line["lag/max"] for line in lines} == {0.0} and learner.steps == 5 * 2 * epochs


def test_checkpoints_are_kept_as_many_as_asked(tmp_path: Path) -> None:
    for updates, left in ((1, ["4", "5"]), (3, ["2", "3", "4", "5"])):  # 2 has proven sound in three, 3 will be next
        path = tmp_path / str(updates)
        train(path, toy_engines(), checkpoint={"every": 1, "keep": 2}, health={"updates": updates})
        assert sorted(each.name for each in (path / "checkpoints").iterdir()) == left
        assert (path / "final" / "table.npy").exists()


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


@given(st.integers(0, 2**31), st.lists(st.integers(1, 11), min_size=1, max_size=2, unique=True).map(sorted))
def test_a_toy_response_made_in_several_calls_is_the_same_to_the_bit(seed: int, cuts: list[int]) -> None:
    sampler = toy.ToySampler(toy.random_table(VOCAB, seed=1))
    prompt = Prompt(id="p", number=0, tokens=np.array([3], np.int32), seed=seed)
    sampling = Sampling(max_tokens=12, group=3, draws=4)
    for handle in asyncio.run(sampler.generate(prompt, sampling)):
        rollout, parts = handle.body, list[Any]()
        for start, stop in pairwise([0, *cuts, 12]):
            if start < len(rollout.tokens):
                tokens = np.concatenate([prompt.tokens, rollout.tokens[:start]])
                asked = replace(prompt, tokens=tokens, offset=start, first=rollout.index)
                (part,) = asyncio.run(sampler.generate(asked, replace(sampling, max_tokens=stop - start, group=1)))
                parts.append(part.body)
        assert {part.index for part in parts} == {rollout.index}
        for name in ("tokens", "actions", "logp", "action_logp", "versions"):
            whole = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(whole, getattr(rollout, name))
