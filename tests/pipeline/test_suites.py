"""Checkpoints that are scored in a process beside the run; tests/with_agents has lm-evaluation-harness itself."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.running import EvalConfig, SuiteConfig
from slipstream.config.schedule import Sync
from slipstream.models.model_card import task_scores
from slipstream.pipeline.checkpoint import Checkpoints
from slipstream.pipeline.suites import SuiteRuns
from slipstream.run_dir.writing import suite_lines, suite_scores
from support.toy_runs import go

SCORER = """
import sys, time
from pathlib import Path
checkpoint, *options = sys.argv[1:]
gate = Path(checkpoint, "gate")
while gate.exists():
    time.sleep(0.01)
if "broken" in options:
    sys.exit("error: no such task")
Path(checkpoint, "scored").write_text(" ".join(options))
"""
"""A program in place of `slipstream eval`: it waits while its checkpoint has a file `gate`."""


class Scored:
    """A run with these settings, whose lines are in `said`."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory, self.said = directory / "checkpoints", list[str]()
        self.directory.mkdir()
        self.checkpoints = Checkpoints(self.directory, keep=1)
        given = SuiteConfig(**{"tasks": ("sums",), "every": 2, "device": "cpu"} | settings)
        command = (sys.executable, "-c", SCORER)
        self.suites = SuiteRuns(given, "bfloat16", self.checkpoints.in_use, self.said.append, command)

    def checkpoint(self, number: int, *, gated: bool = False) -> Path:
        path = self.directory / str(number)
        path.mkdir()
        if gated:
            (path / "gate").touch()
        return path


def test_a_checkpoint_is_scored_with_the_options_of_the_config_and_the_last_one_before_the_end(tmp_path: Path) -> None:
    async def main(run: Scored) -> None:
        assert [update for update in range(1, 8) if run.suites.due(update)] == [2, 4, 6]
        first = run.checkpoint(2, gated=True)
        run.suites.start(first)
        run.suites.start(run.checkpoint(4))
        assert run.said == [
            "eval.suite leaves out update 4, because update 2 is still being scored: raise eval.suite.every"
        ]
        run.checkpoints._prune(4)
        assert run.checkpoints.existing() == [2, 4], "one that is read stays"
        (first / "gate").unlink()
        await run.suites.finish(last := run.checkpoint(7))
        options = "--suite sums more --suite-path tasks --limit 5 --dtype bfloat16 --device cpu --json"
        assert (first / "scored").read_text() == (last / "scored").read_text() == options
        assert not (run.directory / "4" / "scored").exists() and len(run.said) == 1
        run.checkpoints._prune(7)
        assert run.checkpoints.existing() == [7] and not run.checkpoints.in_use

    asyncio.run(main(Scored(tmp_path, tasks=("sums", "more"), path="tasks", limit=5)))


@pytest.mark.parametrize(
    ("settings", "gated", "why"),
    [
        ({"tasks": ("broken",)}, False, "exit status 1: error: no such task"),
        ({"seconds": 0.2}, True, "it took more than 0.2 s (eval.suite.seconds)"),
    ],
)
def test_tasks_that_fail_or_take_too_long_are_named_and_the_run_goes_on(
    tmp_path: Path, settings: dict[str, Any], gated: bool, why: str
) -> None:
    run = Scored(tmp_path, **settings)
    asyncio.run(run.suites.finish(run.checkpoint(2, gated=gated)))
    assert run.said == [f"eval.suite has no scores of update 2: {why}"] and not run.checkpoints.in_use


def test_a_scorer_that_cannot_start_costs_its_scores_and_not_the_run(tmp_path: Path) -> None:
    async def main(run: Scored) -> None:
        run.suites.command = ("/nowhere/python",)
        for number in 2, 4:
            run.suites.start(run.checkpoint(number))
            await asyncio.sleep(0.2)
        await run.suites.finish(run.checkpoint(7))
        why = "sandbox: python cannot be started: [Errno 2] No such file or directory: b'/nowhere/python'"
        assert run.said == [f"eval.suite has no scores of update {number}: {why}" for number in (2, 4, 7)]

    asyncio.run(main(Scored(tmp_path)))


def test_a_lost_working_directory_costs_the_scores_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, gone = Scored(tmp_path), tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    asyncio.run(run.suites.finish(run.checkpoint(2)))
    assert run.said == ["eval.suite has no scores of update 2: [Errno 2] No such file or directory"]


@pytest.mark.parametrize("ending", [False, True])
def test_a_run_that_stops_ends_its_tasks_and_says_so(tmp_path: Path, ending: bool) -> None:
    async def main(run: Scored) -> None:
        path = run.checkpoint(2, gated=True)
        if ending:
            last = asyncio.create_task(run.suites.finish(path))
            await asyncio.sleep(0)
            last.cancel()
            await asyncio.wait([last])
        else:
            run.suites.start(path)
            await asyncio.sleep(0)
        await run.suites.stop()
        (path / "gate").unlink()
        assert run.suites.running is not None and run.suites.running.cancelled()
        assert run.said == ["eval.suite has no scores of update 2: the run stops while it is being scored"]
        assert not run.checkpoints.in_use

    asyncio.run(main(Scored(tmp_path)))


@pytest.mark.parametrize(
    ("updates", "scored", "found"),
    [([2, 4, 5], [2], 4), ([2, 4, 5], [4], None), ([3], [], None), ([0], [], None), ([], [], None)],
)
def test_a_run_that_goes_on_scores_the_newest_checkpoint_that_is_due_and_has_no_scores(
    tmp_path: Path, updates: list[int], scored: list[int], found: int | None
) -> None:
    async def main(run: Scored) -> None:
        for update in updates:
            run.checkpoint(update)
        run.suites.resume(updates, tmp_path)
        if run.suites.running is not None:
            await run.suites.running
        assert [path.parent.name for path in run.directory.glob("*/scored")] == ([] if found is None else [str(found)])
        assert not run.said

    (tmp_path / "eval.jsonl").write_text("".join(f'{{"suite": "sums", "update": {n}}}\n' for n in scored))
    asyncio.run(main(Scored(tmp_path)))


@pytest.mark.parametrize(("slow", "begun"), [("4", ["4", "4", "8"]), ("8", ["4", "8", "8"]), ("", ["4", "8"])])
def test_a_checkpoint_whose_scores_a_stop_has_cost_is_scored_once_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str, begun: list[str]
) -> None:
    """The toy run ends after less than 60 virtual seconds, unless it waits for the scores of the `slow` update."""
    found = list[str]()

    async def score(_: SuiteRuns, checkpoint: Path) -> str:
        found.append(checkpoint.name)
        if found.count(slow) == 1 and checkpoint.name == slow:
            await asyncio.sleep(1000.0)
        with (tmp_path / "eval.jsonl").open("a") as file:
            file.write(json.dumps({"suite": "sums", "update": int(checkpoint.name)}) + "\n")
        return ""

    monkeypatch.setattr(SuiteRuns, "_run_child", score)
    sections = {"eval": EvalConfig(suite=SuiteConfig(tasks=("sums",), every=4))}
    for stop in 20.0 if slow == "4" else 60.0, None:
        if not (tmp_path / "final").exists():
            go(tmp_path, Sync(), until=stop, sections=sections)
    assert found == begun


def test_without_tasks_nothing_is_scored(tmp_path: Path) -> None:
    suites = SuiteRuns(None, "float32", set(), print)
    assert not suites.due(2)
    asyncio.run(suites.finish(tmp_path))


def test_the_latest_scores_of_each_task_are_in_the_model_card(tmp_path: Path) -> None:
    def line(task: str, update: int, acc: float, **more: Any) -> dict[str, Any]:
        about = {"model": "m", "update": update, "seed": 0, "limit": None, "seconds": 1.0, "suite": task, "prompts": 5}
        return about | {"acc": acc, "acc/error": 0.125} | more

    lines = [line("a", 4, 0.5), line("a", 2, 0.25), {"set": "x", "avg@1": 1.0}, line("b", 4, 1.0), line("a", 4, 0.75)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert [each["acc"] for each in suite_lines(tmp_path)] == [0.75, 0.25, 1.0]
    assert suite_scores(line("a", 2, 0.25, f1=0.5)) == {"acc": "0.25 ± 0.12", "f1": "0.5"}
    assert list(task_scores(tmp_path)) == [
        ("`a`", "2", "acc", "0.25 ± 0.12"),
        ("`a`", "4", "acc", "0.75 ± 0.12"),
        ("`b`", "4", "acc", "1 ± 0.12"),
    ]
    assert suite_lines(tmp_path / "nowhere") == []
