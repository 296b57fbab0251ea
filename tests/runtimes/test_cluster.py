"""A Ray cluster of several machines, which are processes here: they join and die while a run goes on."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from slipstream.errors import ConfigError, RecordsLost
from slipstream.pipeline.run import Run
from slipstream.protocols import Engines
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes import ray as on_ray
from slipstream.runtimes.workers import RemoteLearner, RemoteSampler, RemoteScorer, WorkerSpec
from support.plain_engines import prompt
from support.runtime_cases import SAMPLING, TESTS, losses, prompts, settings, silent
from support.tabular_workers import ToyRollouts, toy_learner, toy_scorer

pytestmark = pytest.mark.processes

SYSTEM = {
    "max_direct_call_object_size": 1,  # all records are as large ones, which lie where they were made
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", TESTS)  # actors import their engines from there
    before = signal.getsignal(signal.SIGTERM)
    there = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "_system_config": SYSTEM})
    try:
        on_ray.start_there(there.address)
        yield there
    finally:
        ray.shutdown()
        there.shutdown()
        signal.signal(signal.SIGTERM, before)


async def until(what: Callable[[], Any], run: Run) -> None:
    assert run.task is not None
    for _ in range(1200):
        if what():
            return
        assert not run.task.done(), run.task.result()
        await asyncio.sleep(0.1)
    raise AssertionError(run.report())


def test_machines_that_join_are_used_and_machines_that_die_are_survived(cluster: Cluster, tmp_path: Path) -> None:
    said = list[str]()
    with ExitStack() as stack:
        manager = on_ray.start(
            [
                WorkerSpec(RemoteLearner, "learner", 1, toy_learner),
                WorkerSpec(RemoteSampler, "sampler", 1, ToyRollouts),
                WorkerSpec(RemoteScorer, "scorer", 1, toy_scorer, teacher="main"),
            ],
            stack,
            heartbeat=20.0,
            say=silent,
        )
        workers: Any = {place.name: worker for worker, place in manager.specs.items()}
        engines = Engines(
            (workers["sampler"],),
            {"main": (workers["scorer"],)},
            workers["learner"],
            lambda: None,
            replace=manager.replace,
            hire=manager.hire,
            dismiss=manager.dismiss,
            takes={kind: manager.resources_of(place) for kind, place in manager.kinds.items()},
            free=manager.free,
        )

        async def main() -> None:
            with RunLog.create(settings(updates=100_000), tmp_path / "there") as log:
                run = Run(settings(updates=100_000), engines, prompts(), log, say=said.append)
                run.task = asyncio.create_task(run.train())
                await until(lambda: run.admission.version > 2, run)
                machine = cluster.add_node(num_cpus=2)
                await until(lambda: manager.free()["CPU"] >= 2, run)
                with pytest.raises(ConfigError, match="teacher.main=3: there is room for 1 more"):
                    run.scale(["sampler=+1", "teacher.main=+2"], lambda _: None)
                run.scale(["sampler=+1", "teacher.main=+1"], lambda _: None)
                await until(lambda: len([line for line in said if "is at work" in line]) == 2, run)
                version = run.admission.version
                await until(lambda: run.admission.version > version + 3, run)
                cluster.remove_node(machine, allow_graceful=False)
                await until(lambda: len([line for line in said if "died and is started again" in line]) == 2, run)
                version = run.admission.version
                await until(lambda: run.admission.version > version + 3, run)
                machine = cluster.add_node(num_cpus=2)
                await until(lambda: len([line for line in said if "is at work" in line]) == 4, run)
                version = run.admission.version
                await until(lambda: run.admission.version > version + 3, run)
                run.stop()
                await asyncio.wait([run.task])
                await take_records_along(machine)

        async def take_records_along(machine: Any) -> None:
            """Only the worker that was to take them hears of it."""
            far: Any = next(worker for worker, place in manager.specs.items() if place.name == "sampler-1")
            lost, kept = [await worker.generate(prompt(), SAMPLING) for worker in (far, workers["sampler"])]
            cluster.remove_node(machine, allow_graceful=False)
            scorer = workers["scorer"]
            calls = scorer.score(lost), scorer.score(kept), scorer.cpu_seconds()
            found, *others = await asyncio.gather(*calls, return_exceptions=True)
            assert type(found) is RecordsLost, found
            assert str(found) == "records for scorer are lost: the machine that held them is gone"
            assert [handle.header.teacher for handle in others[0]] == ["toy"] and others[1] > 0

        asyncio.run(main())
    print(*said, sep="\n")
    lines = read_lines(tmp_path / "there" / "metrics.jsonl")
    here = Engines(samplers=(ToyRollouts(),), scorers={"": (toy_scorer(),)}, learner=toy_learner(), close=lambda: None)
    assert [line["loss"] for line in lines] == losses(tmp_path / "here", settings(updates=len(lines)), here)
    ledger = read_lines(tmp_path / "there" / "ledger.jsonl")
    assert sorted(entry["number"] for entry in ledger) == list(range(len(ledger)))
