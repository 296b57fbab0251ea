"""Real runs whose processes are killed and stopped, a few times: `make chaos` does so a hundred times."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos import KILL, STOP, Chaos, Fault, drawn

STORY = [
    Fault(4, "sampler", KILL, 0.2),
    Fault(7, "coordinator", KILL, 0.5),
    Fault(10, "grader", KILL, 0.1),
    Fault(12, "scorer", STOP, 0.3),
    Fault(15, "learner", KILL, 0.6),
    Fault(18, "coordinator", STOP, 0.1),
    Fault(20, "nursery", KILL, 0.4),
    Fault(22, "sampler", STOP, 0.9),
]


STORY_OF_RANKS = [
    Fault(4, "learner-1", KILL, 0.2),
    Fault(7, "learner-0", STOP, 0.5),
    Fault(10, "learner-0", KILL, 0.9),
    Fault(12, "coordinator", KILL, 0.3),
    Fault(15, "learner-1", STOP, 0.7),
]


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("story", "updates", "ranks"), [(STORY, 24, 1), (STORY_OF_RANKS, 18, 2)], ids=["one", "ranks"])
def test_a_run_cannot_be_lost(tmp_path: Path, story: Sequence[Fault], updates: int, ranks: int) -> None:
    said: list[str] = []
    chaos = Chaos(tmp_path, seed=0, updates=updates, prompts=4, ranks=ranks, say=said.append)
    status = chaos.live([*story])
    broken = [(name, found) for name, holds, found in chaos.laws(status) if not holds]
    assert not broken, "\n".join([*said, chaos.said])
    assert len(said) == len(story)


def test_a_seed_tells_the_same_story() -> None:
    assert drawn(3, 20, 60) == drawn(3, 20, 60) != drawn(4, 20, 60)
    assert min(fault.update for fault in drawn(0, 500, 30)) == 4, "none before the first checkpoint"
