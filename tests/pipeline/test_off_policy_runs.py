"""Runs with responses that the student does not draw, of toys on a virtual clock: order, origin, age and resuming."""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.losses import ForwardKL, ReverseKLMC
from slipstream.config.offpolicy import MixConfig, SupervisedConfig
from slipstream.config.schedule import Async, Periodic, Replay, StepOff, Sync
from slipstream.data.offpolicy import OffPolicy
from slipstream.data.prompts import Prompts
from slipstream.records import Given
from slipstream.run_dir.writing import read_lines
from support.toy_runs import PROMPTS, VOCAB, go

SUPERVISED, UPDATES, GROUPS = 2, 8, 3
SCHEDULES = [
    Sync(),
    Periodic(),
    StepOff(k=2),
    Replay(k=2),
    Async(tau=2),
    Async(tau=3, publish_every=3),
    Async(tau=2, order="submission"),
    Async(tau=2, max_lag=2),
    Async(tau=2, max_lag=1, on_old="restart"),
    Async(tau=2, on_publish="restart"),
]
MIX = MixConfig(source="file", path="trajectories.jsonl", share=0.5, final=0.25)
CHANGES = {
    "sft": SupervisedConfig(updates=SUPERVISED, loss=ForwardKL()),
    "mix": MIX,
    "loss": ReverseKLMC(m=1),
}


def given(length: int, logp: float) -> Given:
    return Given(np.arange(length, dtype=np.int32) % (VOCAB - 1) + 1, np.full(length, logp, np.float32), "length")


OFF_POLICY = OffPolicy(
    seed=0,
    supervised="data",
    first=SUPERVISED * GROUPS,
    mix=MIX,
    groups=GROUPS,
    updates=UPDATES - SUPERVISED,
    group=2,
    answers=[given(3 + row % 4, -1.0) for row in range(10)],
    trajectories={row: [given(2 + row % 3, -0.7), given(5, -0.3), given(4, -2.0)] for row in range(10)},
)


def prompts() -> Prompts:
    made = Prompts(PROMPTS.rows, PROMPTS.tokens, seed=0, shuffle=True)
    made.use(OFF_POLICY)
    return made


def run(path: Path, schedule: Any, **more: Any) -> Any:
    return go(path, schedule, prompts=prompts(), changes=CHANGES, **more)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_supervised_groups_come_first_and_each_later_group_has_the_origin_of_its_number(
    tmp_path: Path, schedule: Any
) -> None:
    run(tmp_path, schedule)
    ledger = read_lines(tmp_path / "ledger.jsonl")
    lines = {line["update"]: line for line in read_lines(tmp_path / "metrics.jsonl")}
    assert sorted(entry["number"] for entry in ledger) == list(range(UPDATES * GROUPS))
    tokens: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for entry in ledger:
        source, update = entry.get("source", ""), entry["update"]
        tokens[update][source] += sum(entry["tokens"])
        assert ("lag" in entry) == ("mean_lag" in entry) == (not source), "no age where the student drew no token"
        assert "failed" not in entry
        if update <= SUPERVISED:
            assert entry["number"] < SUPERVISED * GROUPS and (source, len(entry["tokens"])) == ("data", 1)
        else:
            assert source == OFF_POLICY.source(entry["number"]) and len(entry["tokens"]) == 2
        if not source:
            assert all(entry["version"] - lag >= SUPERVISED for lag in entry["lag"]), "drawn after supervision"
    for update, line in lines.items():
        assert line["sft"] == (update <= SUPERVISED)
        by_source = tokens[update]
        for source in ("data", "file"):
            share = by_source[source] / sum(by_source.values())
            assert line.get(f"off_policy/{source}", 0.0) == pytest.approx(share)
        drawn = sum(count for name, count in line.items() if name.startswith("lag/tokens_"))
        assert drawn == by_source[""]
        assert ("teacher/kl" in line) == (by_source[""] > 0)


@pytest.mark.parametrize("order", ["mixture", "submission"])
def test_an_update_keeps_its_share_although_known_responses_take_no_time(tmp_path: Path, order: Any) -> None:
    run(tmp_path, Async(tau=2, order=order))
    found = defaultdict(int)
    for entry in read_lines(tmp_path / "ledger.jsonl"):
        found[entry["update"]] += entry.get("source") == "file"
    due = [sum(bool(OFF_POLICY.source(u * GROUPS + i)) for i in range(GROUPS)) for u in range(SUPERVISED, UPDATES)]
    assert [found[update] for update in range(SUPERVISED + 1, UPDATES + 1)] == due and 0 < sum(due) < 18


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_resumed_from_any_checkpoint_the_run_is_that_of_one_never_stopped(tmp_path: Path, schedule: Any) -> None:
    whole = run(tmp_path / "whole", schedule, score=0.0, every=1)
    for version in (1, 2, 4):
        path = tmp_path / str(version)
        shutil.copytree(tmp_path / "whole", path)
        shutil.rmtree(path / "final")
        for later in range(version + 1, UPDATES + 1):
            shutil.rmtree(path / "checkpoints" / str(later), ignore_errors=True)
        if not (path / "checkpoints" / str(version)).exists():
            continue  # no publish, so no checkpoint
        parts = run(path, schedule, score=0.0, every=1)
        np.testing.assert_allclose(parts.table.detach().numpy(), whole.table.detach().numpy(), rtol=0, atol=1e-12)
        assert read_lines(path / "ledger.jsonl") == read_lines(tmp_path / "whole" / "ledger.jsonl")
