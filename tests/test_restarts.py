"""Workers that die or hang at any moment, on a virtual clock: others come, and nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config.schedule import Async, Sync
from slipstream.config.schema import CheckpointConfig, Config, LogConfig
from slipstream.engines.base import Engines, Loaded, Mode, Sampling, WeightsRef
from slipstream.engines.sleep import SleepLearner, SleepSampler, SleepScorer
from slipstream.errors import EngineError, ModelError, RunDirError, WorkerDied
from slipstream.metrics import digest, summary
from slipstream.pipeline.checkpoint import Checkpoints, newest
from slipstream.pipeline.restarts import Restarts
from slipstream.pipeline.run import Run
from slipstream.records import Batch, Counts, Group, Handle, Prompt
from slipstream.runlog import RunLog, read_lines
from slipstream.runtimes import virtual
from test_schedules import PROMPTS, Simulated, config, engines, long_tailed, schedules

HEARTBEAT = 5.0


class Fate:
    """When processes end, and how: not more often than that, or a run would never."""

    def __init__(self, seed: int, life: float, deaths: int) -> None:
        self.random, self.life, self.deaths = random.Random(seed), life, deaths

    def strikes(self) -> bool:
        self.deaths -= 1
        return self.deaths >= 0


class Process:
    """Its engine works until its time has come: then all calls fail at once, or, if it hangs, when that is noticed."""

    def __init__(self, engine: Any, fate: Fate) -> None:
        self.engine, self.fate = engine, fate
        self.calls: set[asyncio.Future[Any]] = set()
        self.begun = self.hung = self.gone = False

    async def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        loop = asyncio.get_running_loop()
        if not self.begun:
            self.begun = True
            loop.call_later(self.fate.random.expovariate(1 / self.fate.life), self.end)
        if self.gone:
            work.close()
            raise WorkerDied("its process is gone")
        answer, task = loop.create_future(), asyncio.ensure_future(work)
        self.calls.add(answer)
        task.add_done_callback(lambda done: self.hung or self.answers(answer, done))
        try:
            return await answer
        finally:
            self.calls.discard(answer)
            task.cancel()

    @staticmethod
    def answers(answer: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        if answer.done() or done.cancelled():
            return
        if error := done.exception():
            answer.set_exception(error)
        else:
            answer.set_result(done.result())

    def end(self) -> None:
        if self.fate.strikes():
            if self.fate.random.random() < 0.5:
                self.hung = True
                asyncio.get_running_loop().call_later(HEARTBEAT, self.kill)
            else:
                self.kill()

    def kill(self) -> None:
        self.hung = self.gone = True
        for answer in self.calls:
            if not answer.done():
                answer.set_exception(WorkerDied("its process is gone"))


class MortalSampler(Process):
    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        group: list[Handle] = await self.call(self.engine.generate(prompt, sampling, begun))
        return group

    async def release(self, numbers: Collection[int] = ()) -> None:
        await self.call(self.engine.release(numbers))

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        loaded: Loaded = await self.call(self.engine.publish(weights, mode))
        return loaded


class MortalScorer(Process):
    async def score(self, group: Group) -> list[Handle]:
        scored: list[Handle] = await self.call(self.engine.score(group))
        return scored


class MortalLearner(Process):
    async def prepare(self, batch: Batch) -> list[Counts]:
        counts: list[Counts] = await self.call(self.engine.prepare(batch))
        return counts

    async def accumulate(self, batch: Batch, counts: Counts) -> None:
        await self.call(self.engine.accumulate(batch, counts))

    async def step(self, *args: Any) -> Any:
        return await self.call(self.engine.step(*args))

    async def export(self) -> Any:
        return await self.call(self.engine.export())

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        await self.call(self.engine.save(path, groups, optimizer=optimizer))

    async def restore(self, path: Path) -> list[Group]:
        groups: list[Group] = await self.call(self.engine.restore(path))
        return groups


class World:
    """Engines in processes, and others in their place, which take their time to load, or fail."""

    def __init__(self, fate: Fate, seed: int, *, slots: int, load: float, score: float, learn: float) -> None:
        self.fate, self.seed, self.slots, self.load, self.score, self.learn = fate, seed, slots, load, score, learn

    def sampler(self) -> MortalSampler:
        made = SleepSampler(long_tailed(self.seed), step=lambda n: 0.1 + 0.01 * n, slots=self.slots, load=self.load)
        made.version = -1000  # whoever works under the weights it came with is found out
        return MortalSampler(made, self.fate)

    def scorer(self) -> MortalScorer:
        return MortalScorer(SleepScorer(lambda _: self.score), self.fate)

    async def replace(self, old: Process) -> Process:
        old.kill()
        await asyncio.sleep(self.fate.random.expovariate(1 / 3.0))
        if self.fate.strikes() and self.fate.random.random() < 0.3:
            raise OSError("no memory")
        return self.sampler() if isinstance(old, MortalSampler) else self.scorer()

    def engines(self, samplers: int, learner_dies: bool) -> Engines:
        learner: Any = SleepLearner(lambda _: self.learn)
        return Engines(
            samplers=tuple(self.sampler() for _ in range(samplers)),
            scorers={"": (self.scorer(), self.scorer())},
            learner=MortalLearner(learner, self.fate) if learner_dies else learner,
            close=lambda: None,
            replace=self.replace,
        )


async def lived(path: Path, settings: Config, world: World, restarts: Restarts, **made: Any) -> Run:
    """A run whose learner may die; it goes on from its last checkpoint, or begins again where there is none."""
    while True:
        these = world.engines(**made)
        where: dict[str, Any] = {}
        try:
            checkpoint = newest(path, say=lambda _: None)
        except RunDirError:
            for left in ("metrics.jsonl", "ledger.jsonl"):
                (path / left).unlink(missing_ok=True)
            log = RunLog(path, [], trace=False)
        else:
            groups = await these.learner.restore(checkpoint.path)
            where = {"standing": checkpoint.standing, "groups": groups}
            Checkpoints(path / "checkpoints").forget_after(checkpoint.standing.version)
            log = RunLog(path, [], trace=False, mark=checkpoint.mark)
        with log:
            try:
                run = Run(settings, these, PROMPTS, log, restarts=restarts, say=lambda _: None, **where)
                await run.train()
                return run
            except WorkerDied:
                restarts.granted("learner", asyncio.get_running_loop().time())


@settings(max_examples=100)
@given(
    schedule=schedules(),
    seed=st.integers(0, 2**16),
    life=st.sampled_from([3.0, 15.0, 60.0]),
    learner_dies=st.booleans(),
    groups=st.integers(1, 4),
    group=st.integers(1, 2),
    samplers=st.integers(1, 3),
    slots=st.sampled_from([3, 1000]),
    score=st.sampled_from([0.0, 2.0]),
    learn=st.sampled_from([0.0, 0.5, 5.0]),
    load=st.sampled_from([0.0, 0.7]),
)
def test_whoever_dies_or_hangs_a_run_ends_and_keeps_its_promises(
    schedule: Any, seed: int, life: float, learner_dies: bool, groups: int, group: int, samplers: int, **times: Any
) -> None:
    updates = 5
    made = config(schedule, updates=updates, groups=groups, group=group)
    made = made.model_copy(update={"checkpoint": CheckpointConfig(every=2, keep=9), "log": LogConfig(trace=False)})
    world, restarts = World(Fate(seed, life, 25), seed, **times), Restarts(10**6)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        run, _ = virtual.run(lived(path, made, world, restarts, samplers=samplers, learner_dies=learner_dies))
        ledger, lines = read_lines(path / "ledger.jsonl"), read_lines(path / "metrics.jsonl")
        assert (path / "final" / "steps").read_text() == str(updates), "each update is made once, of what survived"
    assert sorted(entry["number"] for entry in ledger) == list(range(run.admission.submitted)), "each ends once"
    ends = Counter(entry["end"] for entry in ledger)
    assert ends["trained"] == updates * groups and ends["dropped"] == run.admission.dropped.total()
    assert [line["update"] for line in lines] == list(range(1, updates + 1))
    bound = run.admission.schedule.bound
    for entry in ledger:
        if entry["end"] == "trained":
            assert 0 <= min(entry["lag"]) <= max(entry["lag"]) <= entry["update"] - 1
            assert bound is None or max(entry["lag"]) <= bound
    if not learner_dies:
        assert "restarts/learner" not in restarts.metrics


# --- one at a time ----------------------------------------------------------------------------------------------------


class Once(SleepSampler):
    """Dies at its fifth prompt; so do those that take its place, as often as is said."""

    deaths = 1

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if self.seated >= 5 and type(self).deaths:
            type(self).deaths -= 1
            self.seated = 10**9
        if self.seated >= 10**9:
            raise WorkerDied("its process is gone")
        return await super().generate(prompt, sampling, begun)


def mortal(deaths: int, *, samplers: int = 1, load: float = 10.0) -> Engines:
    """The first sampler is mortal."""

    class Kind(Once):
        pass

    Kind.deaths = deaths

    async def replace(old: Any) -> Any:
        await asyncio.sleep(load)
        return Kind(lambda *_: 10, step=lambda _: 0.2)

    others = engines(samplers=samplers).samplers[1:]
    made = engines()
    return Engines((Kind(lambda *_: 10, step=lambda _: 0.2), *others), made.scorers, made.learner, made.close, replace)


def test_calls_wait_for_the_only_sampler_and_others_go_on_without_it(tmp_path: Path) -> None:
    alone = Simulated(tmp_path / "alone", Sync(), mortal(1), updates=4)
    assert alone.lines_said == [
        "sampler died and is started again: its process is gone",
        "sampler is back after 11.0 s",
    ]
    assert alone.trained() == list(range(16)) and alone.seconds == pytest.approx(4 * 6 + 11)
    assert [line.get("restarts/sampler", 0) for line in alone.lines] == [0, 1, 1, 1]
    said = summary(digest([{"kind": "train", **line} for line in alone.lines]))
    assert said[-1] == "died and were started again: sampler 1 ×"
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
    again = "sampler-0 could not be started again and is tried once more: no room"
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
    assert run.lines_said[-1] == "sampler-0 is back after 21.0 s"
    published = [line["update"] for line in run.lines if "seconds/publish" in line]
    assert published == list(range(2, 13)) and run.seconds < 12 * 3 + 10
    assert max(line["lag/max"] for line in run.lines[8:]) <= 2


def test_a_run_does_not_wait_for_who_is_not_needed_any_more(tmp_path: Path) -> None:
    run = Simulated(tmp_path, Sync(), mortal(1, samplers=2, load=1e6), updates=4)
    assert run.seconds == pytest.approx(4 * 6)


def test_pauses_grow_and_an_hour_later_all_is_forgotten() -> None:
    restarts = Restarts(3)
    assert [restarts.granted("a", now) for now in (0.0, 10.0, 20.0, 30.0, 3599.0)] == [1, 2, 4, None, None]
    assert restarts.granted("b", 30.0) == 1 and restarts.granted("a", 3600.0) == 4
    assert restarts.metrics == {"restarts/a": 4, "restarts/b": 1}
    restarts.recall({"restarts/a": 2.0, "restarts/c": 5.0, "loss": 1.0})
    assert restarts.metrics == {"restarts/a": 4, "restarts/b": 1, "restarts/c": 5}
    assert Restarts(0).granted("a", 0.0) is None and Restarts(0).often("a") == ""
