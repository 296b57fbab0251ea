"""Workers that die or hang at any moment, on a virtual clock: others come, and nothing is lost or done twice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fates import live
from slipstream.config.running import CheckpointConfig
from slipstream.config.schedule import Async, Periodic, StepOff, Sync
from slipstream.errors import AllDied, EngineError, ModelError, RecordsLost
from slipstream.metrics import digest, summary
from slipstream.pipeline.failures import Restarts
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines, Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Batch, Counts, Group, Handle, Prompt
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepLearner, SleepSampler, SleepScorer
from support.mortal_workers import mortal
from support.simulated_runs import PROMPTS, Simulated, config, long_tailed
from support.slow_cases import with_slow


@pytest.mark.parametrize("first", with_slow(range(0, 200, 50), quick=[0]))
def test_whatever_happens_to_its_processes_a_run_ends_and_keeps_its_promises(first: int) -> None:
    """Fifty lives from each of these seeds; `make chaos` lives many more."""
    for seed in range(first, first + 50):
        live(seed)


def test_a_life_can_be_lived_again() -> None:
    said = [(life.said, life.schedule) for life in (live(601), live(601))]
    assert said[0] == said[1] and said[0][0]


# --- one at a time ----------------------------------------------------------------------------------------------------


def test_calls_wait_for_the_only_sampler_and_others_go_on_without_it(tmp_path: Path) -> None:
    alone = Simulated(tmp_path / "alone", Sync(), mortal(1), updates=4)
    assert alone.lines_said == [
        "sampler died and is started again: its process is gone",
        "sampler is at work after 11.0 s",
    ]
    assert alone.trained() == list(range(16)) and alone.seconds == pytest.approx(4 * 6 + 11)
    assert [line.get("restarts/sampler", 0) for line in alone.lines] == [0, 1, 1, 1]
    said = summary(digest([{"kind": "train", **line} for line in alone.lines]))
    assert said[-1] == "workers died and were restarted: sampler 1 ×"
    two = Simulated(tmp_path / "two", Sync(), mortal(1, samplers=2), updates=8)
    assert two.seconds == pytest.approx(8 * 6) and two.trained() == list(range(32))
    assert two.lines[-1]["restarts/sampler-0"] == 1


def test_after_too_many_deaths_the_run_goes_on_without_a_worker_or_ends(tmp_path: Path) -> None:
    two = Simulated(tmp_path / "two", Async(tau=1), mortal(99, samplers=2, load=0.0), updates=40)
    assert two.lines_said[-1] == (
        "sampler-0 died 4 times in an hour (runtime.restarts = 3) and its groups go to others: its process is gone"
    )
    assert sorted(two.trained()) == list(range(160)) and two.lines[-1]["restarts/sampler-0"] == 3
    why = r"the last sampler died 4 times in an hour \(runtime.restarts = 3\): its process is gone"
    with pytest.raises(EngineError, match=why):
        Simulated(tmp_path / "alone", Async(tau=1), mortal(99), updates=40)
    ledger = read_lines(tmp_path / "alone" / "ledger.jsonl")
    assert sorted(entry["number"] for entry in ledger) == list(range(len(ledger)))


def test_who_cannot_be_started_again_is_tried_as_often_and_not_more(tmp_path: Path) -> None:
    made = mortal(1, samplers=2)

    async def replace(old: Any) -> Any:
        raise MemoryError("no room")

    made = Engines(made.samplers, made.scorers, made.learner, made.close, replace)
    run = Simulated(tmp_path, Async(tau=1), made, updates=20)
    again = "sampler-0 could not be started and is tried once more: no room"
    assert run.lines_said[1:3] == [again] * 2
    assert run.lines_said[3].startswith("sampler-0 died 4 times in an hour") and len(run.lines_said) == 4


def test_a_sampler_that_comes_with_other_weights_stops_the_run(tmp_path: Path) -> None:
    class Deaf(SleepSampler):
        async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
            return Loaded("of another")

    made = mortal(1)

    async def replace(old: Any) -> Any:
        return Deaf(lambda *_: 10, step=lambda _: 0.2)

    made = Engines(made.samplers, made.scorers, made.learner, made.close, replace)
    with pytest.raises(ModelError, match="publish of version 1: sampler runs weights of another"):
        Simulated(tmp_path, Sync(), made)


def test_publishes_go_on_while_another_sampler_loads_and_it_gets_the_newest(tmp_path: Path) -> None:
    run = Simulated(tmp_path, Async(tau=1), mortal(1, samplers=2, load=20.0), updates=12)
    assert run.lines_said[-1] == "sampler-0 is at work after 21.0 s"
    published = [line["update"] for line in run.lines if "seconds/publish" in line]
    assert published == list(range(2, 13)) and run.seconds < 12 * 3 + 10
    assert max(line["lag/max"] for line in run.lines[8:]) <= 2


def test_a_run_does_not_wait_for_who_is_not_needed_any_more(tmp_path: Path) -> None:
    run = Simulated(tmp_path, Sync(), mortal(1, samplers=2, load=1e6), updates=4)
    assert run.seconds == pytest.approx(4 * 6)


def test_pauses_grow_and_an_hour_later_all_is_forgotten() -> None:
    restarts = Restarts(3)
    assert [restarts.grant("a", now) for now in (0.0, 10.0, 20.0, 30.0, 3599.0)] == [1, 2, 4, None, None]
    assert restarts.grant("b", 30.0) == 1 and restarts.grant("a", 3600.0) == 4
    assert restarts.metrics == {"restarts/a": 4, "restarts/b": 1}
    restarts.recall({"restarts/a": 2.0, "restarts/c": 5.0, "loss": 1.0})
    assert restarts.metrics == {"restarts/a": 4, "restarts/b": 1, "restarts/c": 5}
    assert Restarts(0).grant("a", 0.0) is None and Restarts(0).describe("a") == ""


def test_where_all_have_died_the_run_does_not_wait_for_one_of_them(tmp_path: Path) -> None:
    """The learner may have nothing to do, and nobody would hear of its death."""

    async def replace(old: Any) -> Any:
        raise AllDied("there is nothing to start from")

    made = mortal(1)
    with pytest.raises(AllDied, match="there is nothing to start from"):
        Simulated(tmp_path, Sync(), Engines(made.samplers, made.scorers, made.learner, made.close, replace), updates=4)


# --- a machine takes records along ------------------------------------------------------------------------------------


class Losing:
    """Every so often a call finds that what it was to take with it is gone."""

    every, calls = 7, 0

    def lose(self) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            raise RecordsLost("gone with their machine")


class LosingSampler(SleepSampler, Losing):
    every = 2

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if begun:
            self.lose()
        return await super().generate(prompt, sampling, begun)


class LosingScorer(SleepScorer, Losing):
    async def score(self, group: Group) -> list[Handle]:
        self.lose()
        return await super().score(group)


class LosingLearner(SleepLearner, Losing):
    every = 4

    async def prepare(self, batch: Batch) -> list[Counts]:
        self.lose()
        return await super().prepare(batch)

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        if groups:
            self.lose()
        await super().save(path, groups, optimizer=optimizer)


@pytest.mark.parametrize("schedule", [Sync(), Periodic(), StepOff(k=2), Async(tau=2), Async(tau=2, max_lag=2)])
def test_records_that_are_lost_are_made_again(tmp_path: Path, schedule: Any) -> None:
    samplers = tuple(LosingSampler(long_tailed(0), step=lambda _: 0.2, slots=3) for _ in range(2))
    scorers = {"": (LosingScorer(lambda _: 0.25),)}
    made = Engines(samplers, scorers, LosingLearner(lambda _: 3.0), lambda: None)
    settings = config(schedule, updates=40).model_copy(update={"checkpoint": CheckpointConfig(every=2, minutes=0)})
    said = list[str]()
    with RunLog(tmp_path, []) as log:
        run = Run(settings, made, PROMPTS, log, say=said.append)
        virtual.run(run.train())
    ledger = read_lines(tmp_path / "ledger.jsonl")
    assert sorted(entry["number"] for entry in ledger) == list(range(160))
    assert {entry["end"] for entry in ledger} == {"trained"}
    bound = run.admission.schedule.bound
    assert bound is None or max(max(entry["lag"]) for entry in ledger) <= bound
    assert run.admission.restarted and any("of its groups begin again" in line for line in said)
    assert not run.responses
