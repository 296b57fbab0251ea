"""Trace of all workers: it agrees with the metrics, and an arrow leads from each rollout to its update."""

import asyncio
import json
import random
from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config.schedule import Async, Periodic, Sync
from slipstream.errors import EngineError, WorkerDied
from slipstream.metrics import digest, usage
from slipstream.pipeline.failures import Restarts
from slipstream.pipeline.pool import Pool, Worker
from slipstream.pipeline.trace import Trace
from slipstream.protocols import Engines
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepLearner
from support.simulated_runs import Simulated, engines, long_tailed


def events_of(path: Path) -> list[dict[str, Any]]:
    """Read the trace like a viewer, which closes the list by itself."""
    events: list[dict[str, Any]] = json.loads((path / "trace.json").read_text().rstrip(",\n") + "]")
    return events


def inside(event: dict[str, Any], piece: dict[str, Any]) -> bool:
    return bool(event["tid"] == piece["tid"] and piece["ts"] <= event["ts"] <= piece["ts"] + piece["dur"])


@pytest.mark.parametrize("schedule", [Sync(), Periodic(), Async(tau=2)], ids=lambda s: s.kind)
def test_slices_are_the_busy_time_and_arrows_join_rollouts_to_updates(tmp_path: Path, schedule: Any) -> None:
    run = Simulated(tmp_path, schedule, engines(long_tailed(3), samplers=2, load=0.25), updates=6)
    events = events_of(tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == ["sampler-0", "sampler-1", "scorer", "learner"]
    slices = [event for event in events if event["ph"] == "X"]
    for tid, name in names.items():
        mine = sorted((piece["ts"], piece["ts"] + piece["dur"]) for piece in slices if piece["tid"] == tid)
        assert all(end <= start + 1 for (_, end), (start, _) in pairwise(mine)), "one at a time"
        last = run.lines[-1]["time"] * 1e6
        busy = sum(min(end, last) - min(start, last) for start, end in mine) / 1e6
        idle = sum(line[f"idle/{name}"] * line["seconds/update"] for line in run.lines)
        published = 0.25 if name.startswith("sampler") else 0  # before the first rollout
        assert busy - published + idle == pytest.approx(run.lines[-1]["time"] - 0.25, rel=1e-4)
    leaves = {event["id"]: event for event in events if event["ph"] == "s"}
    arrives = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(arrives) == set(run.trained())
    for number, head in arrives.items():
        tail = leaves[number]
        assert tail["ts"] <= head["ts"]
        assert any(inside(tail, piece) and piece["name"].startswith("rollout") for piece in slices)
        (update,) = (entry["update"] for entry in run.ledger if entry["number"] == number)
        assert any(inside(head, piece) and piece["name"] == f"update {update}" for piece in slices)


def test_a_stage_is_its_own_work_and_busy_is_everything_else_too() -> None:
    """Publish 0-2; roll out 2-8, held by a publish 5-6; learn 8-10, export 10-11, checkpoint 11-12; roll out 10-12."""
    clock = [0.0]
    trace = Trace(None, lambda: clock[0])
    sampler, learner = trace.track("rollout", "sampler"), trace.track("learn", "learner")

    def at(time: float, call: Callable[..., None], *args: Any) -> None:
        clock[0] = time
        call(*args)

    def told() -> dict[str, float]:
        seconds, busy, stages = trace.busy_window()
        return usage(busy, stages, seconds)

    at(0, sampler.begin, "publish 0", "other")
    at(2, sampler.end, "publish 0")
    at(2, sampler.begin, 1)
    at(5, sampler.begin, "publish 1", "pause")
    at(6, sampler.end, "publish 1")
    at(8, sampler.end, 1)
    at(8, learner.begin, "update 1")
    at(10, learner.end, "update 1")
    first = told()  # 8 s, from the first rollout to the end of the learning
    assert (first["stage/rollout"], first["busy/rollout"]) == pytest.approx((5 / 8, 6 / 8))
    assert (first["stage/learn"], first["busy/learn"]) == pytest.approx((2 / 8, 2 / 8))
    assert (first["overlap/stages"], first["overlap/busy"]) == pytest.approx((7 / 8, 1))

    at(10, learner.begin, "export", "other")
    at(10, sampler.begin, 2)
    at(11, learner.end, "export")
    at(11, learner.begin, "checkpoint", "other")
    at(12, learner.end, "checkpoint")
    second = told()  # the 2 s since then; the rollout goes on
    assert (second["stage/rollout"], second["stage/learn"]) == (1, 0)
    assert (second["overlap/stages"], second["overlap/busy"]) == (1, 2)


def test_a_serial_run_overlaps_by_one_whatever_its_publishes_take(tmp_path: Path) -> None:
    run = Simulated(tmp_path, Sync(), engines(load=0.5), updates=6)
    # rollout 2 s, four scores of ¼ s, learning 3 s; half a second of every update but the first is a publish
    assert run.lines[0]["overlap/stages"] == run.lines[0]["overlap/busy"] == pytest.approx(1)
    for line in run.lines[1:]:
        assert line["overlap/busy"] == pytest.approx(1) and line["overlap/stages"] == pytest.approx(6 / 6.5)
    whole = digest([{"kind": "train", **line} for line in run.lines])
    assert whole["overlap/stages"] == pytest.approx(36 / (36 + 5 * 0.5))


def test_work_that_goes_on_at_a_checkpoint_is_written_up_to_it() -> None:
    clock, file = [0.0], StringIO()
    trace = Trace(file, lambda: clock[0])
    sampler = trace.track("rollout", "sampler")
    trace.track("learn", "learner")
    with sampler.busy("group 1"):
        clock[0] = 3.0
        trace.write_current()
        clock[0] = 4.0
    slices = [
        event for event in map(json.loads, file.getvalue().replace(",\n", "\n").splitlines()) if event["ph"] == "X"
    ]
    assert [(each["ts"], each["dur"], each["name"]) for each in slices] == [
        (0, 3_000_000, "group 1"),
        (3_000_000, 1_000_000, "group 1"),
    ]


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    trace = Trace(None, lambda: 0.0)
    with trace.track("rollout", "sampler").busy("group 1"):
        trace.leaves(trace.tracks[0], 1)
    assert trace.report() == ["sampler is idle"]


# --- the pool ---------------------------------------------------------------------------------------------------------


def pool(count: int, said: list[str]) -> Pool[str]:
    trace = Trace(StringIO(), lambda: 0.0)
    these: Any = {"say": said.append, "tasks": asyncio.TaskGroup(), "restarts": Restarts(0)}
    these |= {"engines": Engines((), {}, SleepLearner(lambda _: 0.0), lambda: None)}
    return Pool([f"engine {i}" for i in range(count)], trace, kind="sampler", stage="rollout", name="sampler", **these)


def test_the_least_loaded_worker_is_taken_and_of_equals_the_one_that_waited_longest() -> None:
    workers = pool(3, [])
    taken = [workers._take() for _ in range(5)]
    assert [worker.name for worker in taken] == ["sampler-0", "sampler-1", "sampler-2", "sampler-0", "sampler-1"]
    workers._shift(taken[1], -1)
    workers._shift(taken[1], -1)
    assert [workers._take().name for _ in range(3)] == ["sampler-1", "sampler-2", "sampler-1"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32))
def test_the_worker_taken_is_the_one_that_a_search_through_all_finds(count: int, seed: int) -> None:
    """Over 600 calls that begin and end in any order, while workers leave."""
    rng, workers, running = random.Random(seed), pool(count, []), list[Worker[str]]()
    for _ in range(600):
        if running and rng.random() < rng.choice([0.3, 0.9]):
            workers._shift(running.pop(rng.randrange(len(running))), -1)
        elif len(workers.workers) > 1 and rng.random() < 0.01:
            workers.retire(rng.choice(list(workers.workers)))
        else:
            expected = min(workers.workers, key=lambda worker: (worker.load, worker.last_change))
            running.append(workers._take())
            assert running[-1] is expected
    assert len(workers._loads) <= 4 * count + 101


def test_calls_move_on_when_a_worker_dies_until_there_is_none() -> None:
    said: list[str] = []
    workers = pool(2, said)

    async def work(worker: Worker[str]) -> str:
        if worker.engine == "engine 0":
            raise WorkerDied("gone")
        return worker.engine

    async def broken(worker: Worker[str]) -> str:
        raise WorkerDied("gone as well")

    async def main() -> None:
        assert await workers.call(1, work) == "engine 1"
        assert await workers.call(2, work) == "engine 1"
        with pytest.raises(EngineError, match="the last sampler died: gone as well"):
            await workers.call(3, broken)
        with pytest.raises(EngineError, match="the last sampler died: gone as well"):
            await workers.call(4, work)

    virtual.run(main())
    assert said == ["sampler-0 died and its groups go to others: gone"]


def test_a_run_that_goes_on_with_more_workers_renames_none_of_them(tmp_path: Path) -> None:
    with (tmp_path / "trace.json").open("w") as file:
        file.write("[\n")
        for samplers in (["sampler"], ["sampler-0", "sampler-1"]):
            trace = Trace(file, lambda: 0.0)
            for track in [trace.track("rollout", name) for name in [*samplers, "learner"]]:
                with track.busy(f"work of {track.name}"):
                    pass
    events = events_of(tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    done = [f"work of {names[event['tid']]}" for event in events if event["ph"] == "X"]
    assert done == [event["name"] for event in events if event["ph"] == "X"] and len(done) == 5
