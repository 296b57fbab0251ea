"""Runs of real engines on modelled time: equal for one seed, and lags that follow the costs."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream import train
from slipstream.config.costs import Costs, load
from slipstream.config.file import parse
from slipstream.errors import ConfigError
from slipstream.plan.plan import fast_checks
from slipstream.run_dir.writing import read_lines
from slipstream.simulation import virtual_clock
from slipstream.simulation.virtual_clock import Deadlock, ModelledLoop
from support.slow_cases import with_slow

TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 6,
    "teachers": {"main": {"model": "builtin:teacher"}},
    "sampler": {"max_tokens": 24, "slots": 128},
    "learner": {"batch_size": 8, "lr": 1e-3},
    "schedule": {"kind": "async", "tau": 4},
    "task": {"reward": "exact"},
    "runtime": {"kind": "inline", "clock": "modelled", "device": "cpu"},
    "log": {"trace": False},
}
LOOKUP = {
    "student": "builtin:tool_student",
    "teachers": {"main": {"model": "builtin:tool_teacher"}},
    "data": {"train": "builtin:lookup"},
    "environment": {"use": "lookup", "calls": 4, "turns": 4},
    "sampler": {"max_tokens": 96, "slots": 64},
    "updates": 3,
}


@contextmanager
def busy_process() -> Iterator[None]:
    """Keep a core busy, so that real times differ from those of a quiet machine."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def lines_of(tree: dict[str, Any], path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train, and return the lines of metrics.jsonl and ledger.jsonl."""
    train(parse(tree | {"output": str(path)}))
    return read_lines(path / "metrics.jsonl"), read_lines(path / "ledger.jsonl")


@pytest.mark.parametrize("change", with_slow([{}, LOOKUP], quick=[LOOKUP]), ids=["answers", "episodes"])
def test_two_runs_of_one_seed_are_equal(tmp_path: Path, change: dict[str, Any]) -> None:
    first = lines_of(TREE | change, tmp_path / "first")
    with busy_process():
        second = lines_of(TREE | change, tmp_path / "second")
    assert first == second
    assert max(line["lag/max"] for line in first[0]) >= 2, "samples are stale"


def test_the_time_of_a_run_is_that_of_its_slowest_stage(tmp_path: Path) -> None:
    seconds = {}
    for name, step in (("quick", 0.0), ("slow", 2.0)):
        costs = tmp_path / f"{name}.toml"
        costs.write_text(f"decode.step = 1e-3\nlearn.step = {step}\nlengths.mean = 8.0\n")
        tree = TREE | {"runtime": TREE["runtime"] | {"costs": str(costs)}}
        seconds[name] = lines_of(tree, tmp_path / name)[0][-1]["time"]
    assert seconds["quick"] < 6 * 24 * 1e-3 * 5 < 6 * 2.0 <= seconds["slow"] < 6 * 2.0 + seconds["quick"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runtime": {"clock": "modelled"}}, 'needs all engines in this process: write kind = "inline"'),
        ({"runtime": {"costs": "costs.toml"}}, 'costs does nothing without clock = "modelled"'),
        ({"sampler": {"engine": "vllm"}}, "sampler runs in real time"),
        ({"teachers": {"main": {"engine": "vllm", "model": "m"}}}, "teachers.main runs in real time"),
        (
            {"environment": {"gateway": {"command": "ls"}, "sandbox": "none"}},
            "agents on environment.gateway run in real time",
        ),
        ({"runtime": TREE["runtime"] | {"costs": "absent.toml"}}, "absent.toml"),
    ],
)
def test_what_runs_in_real_time_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fast_checks(parse(TREE | change))


def test_the_shipped_costs_are_complete() -> None:
    costs = load("builtin")
    assert isinstance(costs, Costs) and costs.cores == 2
    assert min(costs.decode.step, costs.read.token, costs.score.token, costs.learn.token, costs.publish.load) > 0


# --- the event loop ---------------------------------------------------------------------------------------------------


def run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=ModelledLoop) as runner:
        return runner.run(main)


def test_work_in_a_thread_takes_no_modelled_time_and_keeps_its_order() -> None:
    async def main() -> tuple[list[str], float]:
        done = list[str]()

        async def compute(name: str, seconds: float) -> None:
            await asyncio.to_thread(time.sleep, seconds)
            done.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(compute("slow", 0.05))
            tasks.create_task(compute("quick", 0.0))
        return done, asyncio.get_running_loop().time()

    assert run(main()) == (["slow", "quick"], 0.0)


def test_the_clock_stands_still_while_another_process_is_awaited() -> None:
    async def main() -> tuple[float, str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ModelledLoop)
        answer: asyncio.Future[str] = loop.create_future()
        sleeper = loop.create_task(asyncio.sleep(3.0))
        async with loop.clock_stopped():
            threading.Timer(0.05, loop.call_soon_threadsafe, [answer.set_result, "answer"]).start()
            found = await answer
            assert not sleeper.done() and loop.time() == 0.0
        await sleeper
        return loop.time(), found

    assert run(main()) == (3.0, "answer")


def test_after_a_hang_of_another_process_the_clock_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_clock, "ANSWER_TIMEOUT", 0.05)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ModelledLoop)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0), loop.clock_stopped():
                await loop.create_future()
        return loop.time()

    assert run(main()) == 30.0


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run(main())
