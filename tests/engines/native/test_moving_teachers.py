"""Teachers that move: whose weights follow the student's, and what is recorded of it."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from slipstream.cli import main
from slipstream.config.file import parse
from slipstream.config.learner import LearnerConfig, LoraConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.rewards import TaskConfig
from slipstream.config.running import CheckpointConfig, HealthConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schedule import Async, Periodic, ReuseConfig, Sync
from slipstream.config.schema import Config
from slipstream.config.teacher import FollowConfig, TeacherConfig
from slipstream.data.teacher_context import check_function, context_of
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.model import LanguageModel, load_model, with_adapters
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.record_files import as_numbers
from slipstream.engines.score_checks import failed
from slipstream.engines.weights import export_weights, load_weights, raw
from slipstream.errors import ConfigError, ModelError, RunDirError, WorkerDied
from slipstream.objective.method import Method
from slipstream.pipeline.attempts import Memory
from slipstream.pipeline.checkpoint import BEGINNING, Checkpoints, newest
from slipstream.pipeline.run import Run
from slipstream.plan.engines import followers_of
from slipstream.protocols import Engines, Follower, GradingSampler, Loaded, WeightsRef
from slipstream.records import Attempts, Batch, Group, Handle, Prompt, Rollout, header_of, total
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from support import tabular_engines as toy
from support.engines import native_learner, native_scorer
from support.learners import roll_out, score
from support.slow_cases import with_slow
from support.tiny_models import make_model, masked, uniform, wrap
from support.toy_runs import PROMPTS, VOCAB

EMA, COPY = Follower(0.9, 2, "float64"), Follower(0.0, 3, "float32")
SELF: dict[str, Any] = {"model": "self", "context": "{prompt}{ground_truth}"}


def parsed(teacher: dict[str, Any], **tree: Any) -> Config:
    return parse({"student": "s", "teachers": {"me": SELF | teacher}, **tree})


# --- the configuration ------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "both": ({"follow": {"ema": 0.9, "copy_every": 2}}, {}, "teachers.me.follow: takes one of ema and copy_every"),
    "neither": ({"follow": {}}, {}, "teachers.me.follow: takes one of ema and copy_every"),
    "every of a copy": ({"follow": {"copy_every": 2, "every": 3}}, {}, "every is for ema: write copy_every alone"),
    "another model": (
        {"model": "t", "follow": {"copy_every": 2}},
        {},
        'follow is for model = "self", whose weights come from the student: drop one of them',
    ),
    "vllm": ({"engine": "vllm", "follow": {"copy_every": 2}}, {}, 'follow is for engine = "native"'),
    "nothing to learn": (
        {"context": None, "follow": {"ema": 0.9}},
        {},
        "teachers.me sees what the student sees and follows it: there is nothing to learn from; add a context, or",
    ),
    "the same at any time": (
        {"relabel": "stale"},
        {},
        "relabel has nothing to do, because this teacher's scores never",
    ),
    "relabelled in vllm": (
        {"engine": "vllm", "relabel": "stale", "context": "{prompt}{last}"},
        {},
        'relabel is for engine = "native", or an endpoint: drop it',
    ),
    "rounded away": (
        {"follow": {"ema": 0.9}},
        {"learner": {"dtype": "bfloat16"}},
        'bfloat16 rounds small changes to 0: write learner.compute_dtype = "bfloat16" instead',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_follow_is_told_in_one_line(case: str) -> None:
    teacher, tree, message = WRONG[case]
    with pytest.raises(ConfigError, match="^config: .*" + re.escape(message)) as caught:
        parsed(teacher, **tree)
    assert "\n" not in str(caught.value)


def test_a_teacher_may_follow_what_sees_the_same_where_rewards_teach() -> None:
    policy = {"policy": {"loss": "vanilla"}, "task": {"reward": "exact"}, "sampler": {"group": 2}}
    assert parsed({"context": None, "follow": {"ema": 0.9}}, **policy).teachers["me"].follow is not None


def test_the_learner_stores_earlier_teachers_where_freshness_reads_their_drift() -> None:
    teacher, schedule = {"follow": {"ema": 0.9, "every": 2}, "relabel": "stale"}, {"kind": "async", "tau": 6}
    batch = {"batch_size": 4}
    without, with_freshness = (
        followers_of(parsed(teacher, schedule=schedule, learner=batch, **more))["me"]
        for more in ({}, {"freshness": {}})
    )
    assert without == Follower(0.9, 2, "float32")
    # 6 updates in flight, at most 4 versions in them, and the newest version is not an earlier one
    assert with_freshness == replace(without, keep=4)
    never = parsed(teacher | {"relabel": "never"}, schedule=schedule, learner=batch, freshness={})
    assert followers_of(never)["me"].keep == 0
    hidden = parsed(teacher | {"relabel": "never"}, schedule=schedule, learner=batch, loss={"kind": "reverse_kl"})
    assert followers_of(hidden)["me"].keep == 4, "the learner applies the head of the version that sent hidden states"


# --- native -----------------------------------------------------------------------------------------------------------


def student(lora: LoraConfig | None) -> LanguageModel:
    lm = wrap(make_model("phi", dtype=torch.float64))
    return lm if lora is None else with_adapters(lm, lora, seed=3)


def learner(lora: LoraConfig | None = None, **follow: Follower) -> NativeLearner:
    config = LearnerConfig(lr=1e-2, dtype="float64", lora=lora)
    method = Method(loss=ReverseKLMC(m=3))
    return native_learner(student(lora), method=method, config=config, updates=9, follow=follow)


@pytest.fixture(scope="module")
def groups() -> tuple[list[Handle], ...]:
    return tuple(score(make_model("phi", seed=2), roll_out(make_model("phi", seed=0))))


async def update(made: NativeLearner, groups: tuple[list[Handle], ...], number: int) -> None:
    batch = Batch(groups, number)
    await made.accumulate(batch, total(await made.prepare(batch)))
    await made.step()


def flat(lm: LanguageModel) -> np.ndarray[Any, Any]:
    """Return all trained parameters in one array."""
    return np.concatenate([raw(p.detach()).view(np.float64) for p in lm.model.parameters() if p.requires_grad])


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "lora"])
def test_a_teacher_is_what_its_formula_says_and_its_scorer_proves_it(lora: Any, groups: Any) -> None:
    made = learner(lora, ema=EMA, copy=COPY)
    scorers = {name: native_scorer(student(lora), name=name) for name in made.plan.follow}
    scorers["copy"].lm.model.float()

    async def work() -> None:
        ema = copy = flat(made.lm)
        for number in range(1, 7):
            await update(made, groups, number)
            own = flat(made.lm)
            ema = 0.9 * ema + 0.1 * own if number % 2 == 0 else ema
            copy = own if number % 3 == 0 else copy
            for name, expected, version in (("ema", ema, number // 2 * 2), ("copy", copy, number // 3 * 3)):
                for _ in range(2):  # asked again, it does not move again
                    weights, fingerprint = await made.export(name)
                assert weights.version == version
                found = weights.body.view(made.plan.follow[name].dtype)
                np.testing.assert_allclose(found, expected, atol=1e-12 if name == "ema" else 1e-6, rtol=0)
                loaded = await scorers[name].publish(weights)
                assert loaded.fingerprint == fingerprint
                (handle, *_) = await scorers[name].score(groups[0])
                assert (handle.header.teacher_version, handle.body.teacher_version) == (version, version)
        assert np.abs(ema - flat(made.lm)).max() > 1e-3 and np.abs(ema - copy).max() > 1e-3

    asyncio.run(work())
    for each in (made, *scorers.values()):
        each.close()


def test_scores_are_those_of_the_weights_that_were_published(groups: Any) -> None:
    scorer, other = native_scorer(student(None)), make_model("phi", seed=5, dtype=torch.float64)
    made = native_learner(
        wrap(other), method=Method(loss=ReverseKLMC(m=3)), config=LearnerConfig(dtype="float64"), updates=1
    )
    weights, _ = asyncio.run(made.export())

    async def work() -> list[Handle]:
        await scorer.publish(weights)
        return await scorer.score(groups[0])

    found, expected = asyncio.run(work()), score(other, [groups[0]])[0]
    for one, same in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.body.teacher_action_logp, same.body.teacher_action_logp)
    fresh = wrap(make_model("phi", dtype=torch.float64))
    load_weights(fresh.model, weights)
    assert np.array_equal(flat(fresh), flat(made.lm))


def test_who_goes_on_has_the_teacher_as_it_was_to_the_bit(tmp_path: Path, groups: Any) -> None:
    made, again = learner(me=EMA), learner(me=EMA)

    async def moved(learner: NativeLearner, numbers: range) -> list[Any]:
        found = []
        for number in numbers:
            await update(learner, groups, number)
            weights, fingerprint = await learner.export("me")
            found.append((weights.version, fingerprint))
        return found

    async def work() -> None:
        await moved(made, range(1, 4))
        await made.save(tmp_path)
        await again.restore(tmp_path)
        assert (await again.export("me"))[1] == (await made.export("me"))[1]
        assert await moved(again, range(4, 7)) == await moved(made, range(4, 7))

    asyncio.run(work())
    with pytest.raises(RunDirError, match=r"does not hold the weights of teachers.other, which follows the student"):
        asyncio.run(learner(other=EMA).restore(tmp_path))


def test_a_teacher_that_was_to_move_when_the_run_was_stopped_moves_where_it_goes_on(
    tmp_path: Path, groups: Any
) -> None:
    made, again = learner(me=EMA), learner(me=EMA)

    async def work() -> None:
        for number in (1, 2):
            await update(made, groups, number)
        await made.save(tmp_path)  # before anybody asked for the teacher
        await again.restore(tmp_path)
        assert (await again.export("me"))[1] == (await made.export("me"))[1]

    asyncio.run(work())


def test_a_resumed_scorer_measures_the_same_drift_of_supervision(tmp_path: Path, groups: Any) -> None:
    how = Follower(0.5, 1, "float64", keep=2)
    made, again, scorer, fresh = learner(me=how), learner(me=how), self_scorer(), self_scorer()

    async def work() -> None:
        await scorer.publish((await made.export("me"))[0])
        in_flight = [await scorer.score(groups[0])]
        for number in (1, 2, 3):
            await update(made, groups, number)
            await scorer.publish((await made.export("me"))[0])
            in_flight.append(await scorer.score(groups[0]))
        await made.save(tmp_path, in_flight[1:])
        assert "earlier" in json.loads((tmp_path / "learner.json").read_text())
        unfinished = await again.restore(tmp_path)
        versions = []
        for _ in range(3):
            weights, fingerprint = await again.export("me")
            versions.append(weights.version)
            assert (await fresh.publish(weights)).fingerprint == fingerprint
        assert versions == [1, 2, 3]  # version 0 scored nothing that is in flight
        assert [(await each.export("me"))[0].version for each in (made, again)] == [3, 3]
        for before, restored in zip(in_flight[1:], unfinished, strict=True):
            for one, other in zip(await scorer.relabel(before), await fresh.relabel(restored), strict=True):
                np.testing.assert_array_equal(one.body.supervision_kl, other.body.supervision_kl)
                assert one.header.moved == other.header.moved
        first = (await fresh.relabel(unfinished[0]))[0].body.supervision_kl
        assert np.isfinite(first).all() and first.mean() > 0
        for each in (made, again):  # both go on alike
            await update(each, groups, 4)
        assert (await made.export("me"))[1] == (await again.export("me"))[1]
        assert made.weights.earlier == again.weights.earlier == {"me": [2, 3]}

    asyncio.run(work())
    for each in (made, again, scorer, fresh):
        each.close()


def self_scorer() -> NativeScorer:
    return native_scorer(student(None), name="me", keep=3)


def test_a_teacher_that_moves_as_a_run_resumes_hands_over_its_weights_before(tmp_path: Path, groups: Any) -> None:
    how = Follower(0.5, 1, "float64", keep=2)
    made, again = learner(me=how), learner(me=how)

    async def work() -> None:
        for number in (1, 2):
            await update(made, groups, number)
            await made.export("me")
        scored = [[handle.with_header(teacher_version=version) for handle in groups[0]] for version in (1, 2)]
        await update(made, groups, 3)
        await made.save(tmp_path, scored)  # before the teacher moved
        await again.restore(tmp_path)
        exported = [await again.export("me") for _ in range(4)]
        assert [weights.version for weights, _ in exported] == [1, 2, 3, 3]
        assert exported[2][1] == (await made.export("me"))[1]

    asyncio.run(work())
    for each in (made, again):
        each.close()


# --- a run, of toys ---------------------------------------------------------------------------------------------------


def config(schedule: Any, follow: FollowConfig, *, updates: int = 8) -> Config:
    return Config(
        student="toy",
        teachers={"me": TeacherConfig(model="self", context="{prompt}{ground_truth}", follow=follow, recheck=0.5)},
        updates=updates,
        sampler=SamplerConfig(max_tokens=10, group=2),
        learner=LearnerConfig(batch_size=6),
        schedule=schedule,
        checkpoint=CheckpointConfig(every=2, keep=9),
        health=HealthConfig(canary=0),  # which asks engines more often than these tests count
    )


class Mortal(toy.ToyScorer):
    """Dies of its twentieth group."""

    scored = 0

    async def score(self, group: Group) -> list[Handle]:
        self.scored += 1
        if self.scored == 20:
            raise WorkerDied("its process is gone")
        return await super().score(group)


def engines(settings: Config, scorer: type[toy.ToyScorer] = toy.ToyScorer) -> Engines:
    table, follow = toy.random_table(VOCAB, seed=0), settings.teachers["me"].follow
    assert follow is not None

    async def replace(old: Any) -> Any:
        return toy.ToyScorer(toy.random_table(VOCAB, seed=9))  # whatever it was loaded with

    how = Follower(follow.decay, follow.period, "float64", keep=4)
    learner = toy.ToyLearner(table, cost=lambda _: 1.0, follow={"me": how})
    learner.teachers["me"] = 0, toy.random_table(VOCAB, seed=1)  # of itself a toy would learn nothing
    return Engines(
        samplers=(GradingSampler(toy.ToySampler(table, seconds=0.3), toy.ToyGrader()),),
        scorers={"me": (scorer(table),)},
        learner=learner,
        close=lambda: None,
        replace=replace if scorer is not toy.ToyScorer else None,
    )


def go(path: Path, settings: Config, *, until: float | None = None, scorer: Any = toy.ToyScorer) -> toy.ToyLearner:
    made = engines(settings, scorer)
    run(path, settings, made, until=until)
    assert isinstance(made.learner, toy.ToyLearner)
    return made.learner


def run(path: Path, settings: Config, made: Engines, *, until: float | None = None) -> None:
    """Begin or go on, and stop as Ctrl-C does after so many virtual seconds."""

    async def work() -> None:
        state = BEGINNING
        if (path / "checkpoints").exists():
            checkpoint = newest(path)
            state = await checkpoint.restore(made.learner)
            Checkpoints(path / "checkpoints").forget_after(state.admission.version)
            log = RunLog.reopen(settings, path, checkpoint.mark)
        else:
            log = RunLog.create(settings, path)
        with log:
            task = asyncio.create_task(Run(settings, made, PROMPTS, log, state=state, say=lambda _: None).train())
            await asyncio.wait([task], timeout=until)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            else:
                task.result()

    virtual.run(work())


@pytest.mark.parametrize("schedule", [Sync(), Async(tau=2), Async(tau=2, publish_every=2), Periodic()], ids=str)
def test_every_score_says_which_teacher_gave_it(tmp_path: Path, schedule: Any) -> None:
    go(tmp_path, config(schedule, FollowConfig(ema=0.5, every=2)))
    lines, ledger = (read_lines(tmp_path / f"{name}.jsonl") for name in ("metrics", "ledger"))
    scored = {entry["update"]: entry.get("teacher_version", [0, 0]) for entry in ledger}
    assert all(version % 2 == 0 and version < update for update, both in scored.items() for version in both)
    assert max(max(both) for both in scored.values()) >= 4
    if schedule == Sync():
        assert [line["teacher/me/version"] for line in lines] == [0, 0, 2, 2, 4, 4, 6, 6]
        assert all(both == [(update - 1) // 2 * 2] * 2 for update, both in scored.items())
    quotes = read_lines(tmp_path / "samples.jsonl")
    assert {quote["teacher_version"] for quote in quotes} > {0}
    assert sum(line["teacher/rechecked"] for line in lines) > 0 == sum(line["teacher/differed"] for line in lines)
    assert any(line.get("teacher/me/seconds/publish") is not None for line in lines)


@pytest.mark.parametrize("follow", [FollowConfig(ema=0.8, every=1), FollowConfig(copy_every=3)], ids=str)
def test_a_run_that_was_stopped_ends_with_the_same_teacher(tmp_path: Path, follow: FollowConfig) -> None:
    settings = config(Sync(), follow)
    whole = go(tmp_path / "whole", settings)
    assert (whole.teachers["me"][1] - toy.random_table(VOCAB, seed=1)).abs().max() > 0.1
    for seconds in (3.0, 9.0, 14.5):
        path = tmp_path / str(seconds)
        go(path, settings, until=seconds)
        assert not (path / "final").exists()
        parts = go(path, settings)
        for one, other in (
            (parts.table.detach(), whole.table.detach()),
            (parts.teachers["me"][1], whole.teachers["me"][1]),
        ):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-12, atol=1e-12)
        assert parts.teachers["me"][0] == whole.teachers["me"][0]
        ledgers = [read_lines(each / "ledger.jsonl") for each in (path, tmp_path / "whole")]
        found = [{e["number"]: e.get("teacher_version") for e in entries if "update" in e} for entries in ledgers]
        assert found[0] == found[1]


@pytest.mark.parametrize(("seconds", "last"), [(19.0, 5), (24.0, 4)])
def test_a_resumed_run_may_change_how_often_its_teacher_moves(tmp_path: Path, seconds: float, last: int) -> None:
    """Stopped after updates 5 and 6 of 8: with the new period the teacher moves after update 5 only."""
    go(tmp_path, config(Sync(), FollowConfig(copy_every=4)), until=seconds)
    assert go(tmp_path, config(Sync(), FollowConfig(copy_every=5))).teachers["me"][0] == last


def test_who_takes_the_place_of_a_scorer_runs_the_newest_weights_and_proves_it(tmp_path: Path) -> None:
    settings = config(Sync(), FollowConfig(copy_every=1))
    made, same = go(tmp_path / "dies", settings, scorer=Mortal), go(tmp_path / "lives", settings)
    np.testing.assert_array_equal(made.table.detach().numpy(), same.table.detach().numpy())
    lines = read_lines(tmp_path / "dies" / "metrics.jsonl")
    assert lines[-1]["restarts/scorer"] == 1


def test_a_scorer_with_other_weights_stops_the_run(tmp_path: Path) -> None:
    class Deaf(toy.ToyScorer):
        async def publish(self, weights: WeightsRef) -> Loaded:
            return Loaded("of another")

    message = "publish of version 0: scorer runs weights of another, the learner exported .*: its scores would be of an"
    with pytest.raises(ModelError, match=message):
        go(tmp_path, config(Sync(), FollowConfig(copy_every=1)), scorer=Deaf)


# --- contexts that move -----------------------------------------------------------------------------------------------


def said(number: int, *texts: str, prompt: str = "p", reward: float | None = None) -> list[Handle]:
    """A group that was rolled out and graded: by default, a text that is a number is its reward."""
    found = []
    for index, text in enumerate(texts):
        made = uniform(Prompt(id=prompt, number=number, tokens=np.array([2])), index, [3, 4])
        rewards = {"exact": float(text) if reward is None else reward}
        found.append(Handle(replace(header_of(made), text=text, rewards=rewards), made))
    return found


ALL = ("best", "best_reward", "last", "last_reward")


def test_the_best_is_of_all_attempts_and_the_last_of_another_group() -> None:
    memory, other = Memory("exact"), said(9, "7", prompt="q")[0].header
    group = memory.note(said(0, "1", "3", "2"))
    assert all(handle.header.text == "" for handle in group)
    assert memory.attempts_for(group[0].header, ALL) == Attempts("3", 3.0, "", None)
    assert memory.attempts_for(other, ALL) == Attempts("", None, "", None)
    group = memory.note(said(4, "0", "3"))
    assert memory.attempts_for(group[0].header, ALL) == Attempts("3", 3.0, "2", 2.0)
    memory.note(said(4, "5", "0"))  # it began again
    assert memory.attempts_for(group[0].header, ALL) == Attempts("5", 5.0, "2", 2.0)
    assert memory.attempts_for(said(7, "0")[0].header, ALL) == Attempts("5", 5.0, "0", 0.0)
    assert memory.attempts_for(group[0].header, ("last",)) == Attempts(last="2")
    again = Memory("exact", before=json.loads(json.dumps(memory.state)))
    assert again.attempts_for(group[0].header, ALL) == memory.attempts_for(group[0].header, ALL)
    assert (json.dumps(again.state), again.size) == (json.dumps(memory.state), memory.size)


def test_what_is_remembered_is_bounded_and_what_was_not_tried_for_long_goes_first() -> None:
    memory = Memory("exact", limit=40)
    for number in range(30):
        memory.note(said(number, "1" * 8, prompt=f"p{number % 3 if number < 20 else 7}"))
        assert memory.size <= 40 == memory.limit
    assert list(memory.state)[-1] == "p7" and 1 < len(memory.state) < 4
    known = json.dumps(memory.state)
    (plain,) = memory.note([handle.with_header(prefix=1) for handle in said(99, "9")])
    assert plain.header.text == "" and json.dumps(memory.state) == known, "a half-given answer is no attempt"
    without = Memory()
    without.note(said(0, "a", reward=1.0))
    assert without.attempts_for(said(1, "0")[0].header, ALL) == Attempts("", None, "a", None)


class Telling(toy.ToyGrader):
    """Also tells what was said: the ids."""

    async def grade(self, group: Group) -> list[Handle]:
        return [
            Handle(
                replace(h.header, text=as_numbers(h.body.tokens.tolist()), rewards={"exact": float(-h.header.tokens)}),
                h.body,
            )
            for h in group
        ]


class Shown(toy.ToyScorer):
    """Remembers what it was shown, and changes with it."""

    async def score(self, group: Group) -> list[Handle]:
        self.seen = [*getattr(self, "seen", []), *(handle.header.attempts for handle in group)]
        return await super().score(group)


def shown_to(path: Path, *, until: float | None = None) -> list[tuple[int, Any]]:
    """Return the attempts that a run of toys has shown, by group number, when it is over or stopped."""
    teacher = TeacherConfig(model="toy", context="{prompt}{best}{last}{last_reward}", recheck=0.0)
    base = config(Sync(), FollowConfig(copy_every=1))
    settings = base.model_copy(update={"teachers": {"me": teacher}, "task": TaskConfig(reward=("exact",))})
    made, table = engines(base, Shown), toy.random_table(VOCAB, seed=0)
    learner = toy.ToyLearner(table, cost=lambda _: 1.0)
    sampler = GradingSampler(toy.ToySampler(table, seconds=0.3), Telling())
    made = replace(made, samplers=(sampler,), learner=learner)
    run(path, settings, made, until=until)
    entries = read_lines(path / "samples.jsonl")
    return [(entry["number"], entry["attempts"]) for entry in entries]


def test_a_teacher_is_shown_what_was_tried_also_after_a_stop(tmp_path: Path) -> None:
    whole = shown_to(tmp_path / "whole")
    assert all(set(attempts) == set(ALL) and attempts["best"] for _, attempts in whole)
    assert [bool(attempts["last"]) for _, attempts in whole] == [number >= 10 for number, _ in whole], "an epoch is 10"
    for seconds in (4.0, 10.0):
        shown_to(tmp_path / str(seconds), until=seconds)
        assert shown_to(tmp_path / str(seconds)) == whole


# --- what was said, and what is said now ------------------------------------------------------------------------------


class ByAttempts:
    """Shows a token for every letter of the best attempt, and then the prompt."""

    def __call__(self, rollout: Rollout, attempts: Attempts | None) -> Any:
        shown = [5] * len(attempts.best) if attempts else []
        return np.array([*shown, *rollout.prompt.tokens.tolist()], np.int32) if shown else rollout.prompt.tokens

    def close(self) -> None:
        pass


def showing(handle: Handle, best: str) -> Handle:
    return Handle(replace(handle.header, attempts=Attempts(best=best)), handle.body)


def enumerated(model: Any, context: Any, rollout: Rollout) -> torch.Tensor:
    """Return the distribution that drew each token of a response."""
    ids = torch.tensor([[*context.tolist(), *rollout.tokens.tolist()]])
    logits = model(ids).logits[0, len(context) - 1 : -1] / 0.8
    return logits.detach().log_softmax(-1)[torch.from_numpy(rollout.loss_mask)]


@pytest.mark.parametrize("cache", ["sampled", "hidden"])
def test_drift_of_supervision_is_the_kl_over_the_vocabulary_of_now_to_then(cache: Any, groups: Any) -> None:
    models = [make_model("phi", seed=seed, dtype=torch.float64) for seed in (0, 5, 6, 7)]
    scorer = native_scorer(wrap(models[0]), cache=cache, context=ByAttempts(), keep=3, temperature=0.8, token_budget=64)
    bests = ["", "aaa", "b"]
    group = [handle for each in groups for handle in each][:6]
    group = [Handle(each.header, each.body.rollout) for each in group]
    group[0] = Handle(group[0].header, masked(group[0].body, np.arange(len(group[0].body.tokens)) % 2 == 0))

    async def work() -> list[tuple[list[Handle], list[Handle], int]]:
        found, first = [], list[Handle]()
        for version, model in enumerate(models):
            await scorer.publish(export_weights(model, "float64", version=version))
            scored = await scorer.score([showing(each, bests[i % 3]) for i, each in enumerate(group)])
            first = first or scored
            now = [showing(each, bests[(i + version // 2) % 3]) for i, each in enumerate(first)]
            found.append((first, await scorer.relabel(now), version))
            fresh = await scorer.score([showing(each, bests[(i + version // 2) % 3]) for i, each in enumerate(group)])
            for one, other in zip(found[-1][1], fresh, strict=True):
                assert (one.body.context_id, one.body.teacher_version) == (other.body.context_id, version)
                np.testing.assert_allclose(one.body.teacher_logp, other.body.teacher_logp, atol=1e-12)
        return found

    context, kept = ByAttempts(), 3
    for first, again, version in asyncio.run(work()):
        for i, (old, new) in enumerate(zip(first, again, strict=True)):
            if version == 0:
                assert new.body is old.body and new.body.supervision_kl is None
                assert (new.header.moved, new.header.aligned) == (0.0, 1.0)
                continue
            if version >= kept:
                assert np.isnan(new.body.supervision_kl).all() and (new.header.moved, new.header.aligned) == (0.0, 0.0)
                continue
            was, shown = Attempts(best=bests[i % 3]), Attempts(best=bests[(i + version // 2) % 3])
            then = enumerated(models[0], context(old.body.rollout, was), old.body.rollout)
            now = enumerated(models[version], context(old.body.rollout, shown), old.body.rollout)
            expected = (now.exp() * (now - then)).sum(-1).numpy()
            assert new.body.supervision_kl.shape == (old.body.rollout.trained_tokens,)
            np.testing.assert_allclose(new.body.supervision_kl, expected, atol=1e-8, rtol=0)
            assert new.header.moved == pytest.approx(expected.mean()) and new.header.aligned == 1.0
            assert expected.max() > 0.01
    scorer.close()


def test_a_context_alone_may_move(groups: Any) -> None:
    model = make_model("phi", seed=2, dtype=torch.float64)
    scorer = native_scorer(wrap(model), context=ByAttempts(), temperature=0.8)
    (handle, other, *_) = [Handle(each.header, each.body.rollout) for group in groups for each in group]

    async def work() -> list[Handle]:
        first = await scorer.score([showing(handle, "aa"), showing(other, "a")])
        return await scorer.relabel([showing(first[0], "b"), showing(first[1], "b")])

    moved, same = asyncio.run(work())
    scorer.close()
    context = ByAttempts()
    now, then = (enumerated(model, context(handle.body, Attempts(best=x)), handle.body) for x in ("b", "aa"))
    np.testing.assert_allclose(moved.body.supervision_kl, (now.exp() * (now - then)).sum(-1), atol=1e-8, rtol=0)
    assert same.body.supervision_kl is None and same.header.moved == 0.0


@pytest.mark.parametrize("schedule", [Async(tau=2), Async(tau=2, publish_every=2), Async(tau=2, max_lag=2)], ids=str)
def test_what_is_learned_from_is_what_its_teacher_says_now(tmp_path: Path, schedule: Any) -> None:
    settings = config(schedule, FollowConfig(ema=0.5, every=2))
    teachers = {"me": settings.teachers["me"].model_copy(update={"relabel": "stale"})}
    go(tmp_path, settings.model_copy(update={"teachers": teachers}))
    lines, ledger = (read_lines(tmp_path / f"{name}.jsonl") for name in ("metrics", "ledger"))
    trained = [entry for entry in ledger if entry["end"] == "trained"]
    assert len(trained) == 24
    for entry in trained:
        assert entry.get("teacher_version", [0, 0]) == [(entry["update"] - 1) // 2 * 2] * 2
    again = [line for line in lines if "teacher/relabelled" in line]
    assert again and all(line["teacher/aligned"] == 1 and line["teacher/moved"] > 0 for line in again)
    assert all("seconds/relabel" in line for line in again)


def test_a_later_use_knows_the_drift_since_the_use_before_alone(tmp_path: Path) -> None:
    """The teacher moves every third update, and each group is learned from in three updates."""
    asked = list[int]()

    class Counting(toy.ToyScorer):
        async def relabel(self, group: Group) -> list[Handle]:
            asked.append(len(group))
            return await super().relabel(group)

    settings = config(Async(tau=2), FollowConfig(ema=0.5, every=3))
    teachers = {"me": settings.teachers["me"].model_copy(update={"relabel": "stale"})}
    go(tmp_path, settings.model_copy(update={"teachers": teachers, "reuse": ReuseConfig(times=3)}), scorer=Counting)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert sum(line.get("teacher/relabelled", 0) for line in lines) == sum(asked) > 0
    assert all(line["teacher/moved"] > 0 for line in lines if "teacher/relabelled" in line)


@pytest.mark.parametrize("every", [1, 2])
def test_the_drift_of_supervision_is_known_after_a_stop(every: int, tmp_path: Path) -> None:
    settings = config(Async(tau=2), FollowConfig(ema=0.5, every=every))
    teachers = {"me": settings.teachers["me"].model_copy(update={"relabel": "stale"})}
    settings = settings.model_copy(update={"teachers": teachers})
    for seconds in (3.0, 2.5, None):
        go(tmp_path, settings, until=seconds)
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "teacher/relabelled" in line]
    assert sum(line["teacher/moved"] > 0 for line in lines) > 2
    assert [line["teacher/aligned"] for line in lines] == [1] * len(lines)


def test_who_says_nothing_any_more_is_not_learned_from(tmp_path: Path) -> None:
    class Silent(toy.ToyScorer):
        async def relabel(self, group: Group) -> list[Handle]:
            if group[0].header.number % 4 == 1:
                return [failed(handle, "no context", teacher="toy") for handle in group]
            return await super().relabel(group)

    settings = config(Async(tau=2), FollowConfig(copy_every=1))
    teachers = {"me": settings.teachers["me"].model_copy(update={"relabel": "always", "recheck": 0.0})}
    lenient = {"teachers": teachers, "health": HealthConfig(stop=False, canary=0)}
    go(tmp_path, settings.model_copy(update=lenient), scorer=Silent)
    ledger = read_lines(tmp_path / "ledger.jsonl")
    assert {entry["number"] % 4 == 1 for entry in ledger if entry["end"] == "trained"} == {False}
    dropped = [entry for entry in ledger if entry["end"] == "dropped"]
    assert dropped and {(entry["reason"], entry["cause"]) for entry in dropped} == {("scoring failed", "no context")}
    assert len(ledger) - len(dropped) == 24


OWN = """
import os

def shows(prompt, best, last_reward=None, ground_truth="?"):
    if ground_truth == "loops":
        while True:
            pass
    if ground_truth == "crashes":
        os._exit(3)
    if ground_truth == "number":
        return 3
    if ground_truth == "long":
        return "x" * 100
    return f"{prompt}[{best}|{last_reward}]"

def strange(prompt, answer):
    return prompt
"""


def test_a_function_writes_a_context_in_a_process_of_its_own(
    tmp_path: Path, models_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    context = context_of(f"{tmp_path / 'own.py'}:shows", tokenizer, max_length=40, timeout=1.5)
    assert context is not None
    scorer = native_scorer(load_model(str(models_dir / "teacher"), dtype="float32"), name="me", context=context)
    tokens = np.array(tokenizer("2+3=", add_special_tokens=False)["input_ids"], np.int32)
    group, truths = [], ["5", "loops", "crashes", "number", "long", "6"]
    for index, truth in enumerate(truths):
        made = uniform(Prompt(id="p", number=0, tokens=tokens, ground_truth=truth), index, tokens[:2])
        group.append(Handle(replace(header_of(made), attempts=Attempts(best="23", last_reward=0.5)), made))
    found = asyncio.run(scorer.score(group))
    scorer.close()
    whys = ["", "took more than 1.5 s", "ended its process", "returned int 3, which is not text", "have 102 tokens", ""]
    for handle, why in zip(found, whys, strict=True):
        if why:
            assert handle.header.finish == "error" and why in handle.header.cause
            assert handle.header.cause.startswith("teacher me has no context for it: ")
        else:
            assert tokenizer.decode(handle.body.context) == "2+3=[23|0.5]" and handle.body.context_id != "prefix"
            assert handle.header.attempts == Attempts(best="23", last_reward=0.5)


def test_what_a_context_cannot_have_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    where = f"{tmp_path / 'own.py'}:"
    for teacher, tree, message in (
        ({"context": "{prompt}{best}"}, {}, "teachers.me.context shows {best}, which rewards decide: set task.reward"),
        ({"context": where + "shows"}, {}, "max_length is missing: a function writes the context"),
        (
            {"context": where + "shows", "engine": "vllm"},
            {},
            'a context that a function writes is for engine = "native": write a template',
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parsed(teacher, **tree)
    for name, graded, message in (
        ("nobody", True, "teachers.me.context = '.*own.py:nobody': no function 'nobody' in it; known: shows, strange"),
        ("strange", True, "no value is available for its parameter 'answer'; known: prompt, response"),
        ("shows", False, "teachers.me.context = .* asks for 'best', which needs rewards: set task.reward"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_function("me", where + name, graded=graded)
    check_function("me", where + "shows", graded=True)


# --- wherever engines run ---------------------------------------------------------------------------------------------

RUN = """
student = "builtin:student"
updates = 4
[teachers.me]
model = "self"
context = "{ground_truth}{prompt}"
follow = { ema = 0.5, every = 1 }
[data]
limit = 24
[sampler]
max_tokens = 8
[learner]
batch_size = 4
lr = 1e-3
[loss]
m = 2
[schedule]
kind = "sync"
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return trained(tmp_path_factory.mktemp("inline"), "inline")


def trained(path: Path, kind: str) -> list[tuple[float, float]]:
    """Return the loss and the teacher's version of every update."""
    (path / "run.toml").write_text(RUN)
    words = ["train", str(path / "run.toml"), "--skip-checks", "--runtime.kind", kind, "--output", str(path / "run")]
    assert main(words) == 0
    return [(line["loss"], line["teacher/me/version"]) for line in read_lines(path / "run" / "metrics.jsonl")]


@pytest.mark.processes
@pytest.mark.parametrize("kind", with_slow(["local", "ray"], quick=["local"]))
def test_a_teacher_moves_alike_in_one_process_and_in_many(kind: str, here: Any, tmp_path: Path) -> None:
    found = trained(tmp_path, kind)
    assert [version for _, version in found] == [version for _, version in here] == [0, 1, 2, 3]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in here], rel=1e-5)
    entries = read_lines(tmp_path / "run" / "ledger.jsonl")
    assert {(e["update"], *e.get("teacher_version", [0])) for e in entries} == {(1, 0), (2, 1), (3, 2), (4, 3)}
