"""What every worker did when: the trace agrees with the metrics, and an arrow leads from each rollout to its update."""

from __future__ import annotations

import json
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.config_schedule import Async, Periodic, Sync
from slipstream.errors import EngineError, WorkerDied
from slipstream.pipeline.pool import Pool, Worker
from slipstream.pipeline.trace import Trace
from slipstream.runtimes import virtual
from test_schedules import Simulated, engines, long_tailed


def events_of(path: Path) -> list[dict[str, Any]]:
    """As a viewer reads it, which closes the list by itself."""
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
        assert busy + idle == pytest.approx(run.lines[-1]["time"], rel=1e-4)
    leaves = {event["id"]: event for event in events if event["ph"] == "s"}
    arrives = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(arrives) == set(run.trained())
    for number, head in arrives.items():
        tail = leaves[number]
        assert tail["ts"] <= head["ts"]
        assert any(inside(tail, piece) and piece["name"].startswith("rollout") for piece in slices)
        (update,) = (entry["update"] for entry in run.ledger if entry["number"] == number)
        assert any(inside(head, piece) and piece["name"] == f"update {update}" for piece in slices)


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    trace = Trace(None, lambda: 0.0)
    with trace.track("rollout", "sampler").busy("group 1"):
        trace.leaves(trace.tracks[0], 1)
    assert trace.report() == ["sampler is idle"]


# --- the pool ---------------------------------------------------------------------------------------------------------


def pool(count: int, said: list[str]) -> Pool[str]:
    trace = Trace(StringIO(), lambda: 0.0)
    return Pool([f"engine {i}" for i in range(count)], trace, stage="rollout", name="sampler", say=said.append)


def test_the_least_loaded_worker_is_taken_and_of_equals_the_one_that_waited_longest() -> None:
    workers = pool(3, [])
    taken = [workers._take() for _ in range(5)]
    assert [worker.name for worker in taken] == ["sampler-0", "sampler-1", "sampler-2", "sampler-0", "sampler-1"]
    workers._shift(taken[1], -1)
    workers._shift(taken[1], -1)
    assert [workers._take().name for _ in range(3)] == ["sampler-1", "sampler-2", "sampler-1"]


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

    virtual.run(main())
    assert said == ["sampler-0 died and its groups go to others: gone"]
