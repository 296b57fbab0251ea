"""Inline engines share one thread if their stages never overlap and their operations are parallel."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config.file import parse
from slipstream.console import Console
from slipstream.data.tokenizers import load_tokenizer
from slipstream.objective.method import method_of
from slipstream.plan.engines import engines_of
from slipstream.run_dir.writing import read_lines
from slipstream.runs import start
from slipstream.runtimes import inline

TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 2,
    "teachers": {"main": {"model": "builtin:teacher"}},
    "sampler": {"max_tokens": 8, "group": 2},
    "learner": {"batch_size": 8, "lr": 1e-3},
    "schedule": {"kind": "sync"},
    "runtime": {"kind": "inline", "device": "cpu", "threads": 2},
    "log": {"trace": False},
}


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ([], True),
        ([("schedule.kind", "replay"), ("schedule.k", "2")], True),
        ([("schedule.kind", "periodic")], False),
        ([("runtime.threads", "1")], False),
        ([("learner.threads", "1")], False),
    ],
    ids=str,
)
def test_which_engines_share_a_thread(changes: list[tuple[str, str]], shared: bool) -> None:
    config = parse(TREE, changes, say=str)
    own = torch.get_num_threads()
    engines = inline.open_engines(engines_of(config, method_of(config)), load_tokenizer("builtin:student"), say=str)
    try:
        workers: list[Any] = [engines.learner, engines.samplers[0].sampler, engines.scorers["main"][0]]
        assert len({id(each.thread) for each in workers}) == (1 if shared else 3)
        wanted = [config.learner.threads or config.runtime.threads, *[config.runtime.threads] * 2]
        assert [each.thread.submit(torch.get_num_threads).result() for each in workers] == wanted
    finally:
        engines.close()
        torch.set_num_threads(own)


def test_a_run_on_one_thread_ends(tmp_path: Path) -> None:
    own = torch.get_num_threads()
    try:
        run_dir = start.train(parse({**TREE, "output": str(tmp_path / "run")}, [], say=str), Console(), name="x")
    finally:
        torch.set_num_threads(own)
    assert [line["update"] for line in read_lines(run_dir / "metrics.jsonl")] == [1, 2]
