"""Task directories as the environment of a run: the shell's turns are trained, and the tests give the reward."""

from pathlib import Path

import pytest
from dictation import TOKENIZER, bash

from runs import check_calls, check_laws, trained
from support.sandboxes import NO_BUBBLEWRAP
from support.task_directories import FIX, HARBOR, written


@pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
def test_a_run_learns_from_task_directories(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "tasks" / "mean", HARBOR)
    said = {0: [bash("I repair it.", FIX), "Done."], 1: [bash("I look.", "cat mean.py"), "No idea."]}
    environment = {"use": f"tasks:{tmp_path / 'tasks'}", "sandbox": "bubblewrap"}
    data = {"train": f"tasks:{tmp_path / 'tasks'}"}
    run = trained(monkeypatch, tmp_path, models, [], environment, lambda p: said[p.first], data=data)
    check_calls(run)
    assert len(run.rollouts) == 4
    for number, rollout in enumerate(run.rollouts):
        check_laws(rollout, said[number % 2])
        assert rollout.outcome["reward"] == float(number % 2 == 0) and rollout.versions.max() == number // 2
        seen = str(TOKENIZER.decode(rollout.tokens[~rollout.loss_mask]))
        assert ("1 2 6" if number % 2 == 0 else "sum(values) / 2") in seen
    for line in run.lines:
        assert line["reward/environment"] == 0.5 and line["grad_norm"] > 0 and line["failed_samples"] == 0
        assert abs(line["distill/ratio_max"] - 1) < 1e-5
