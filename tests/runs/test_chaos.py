"""Real runs whose processes are killed and stopped, a few times: `make chaos` does so a hundred times."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos import DEATHS, KILL, STOP, Change, Chaos, Fault, changes, drawn

STORY = [
    Fault(4, "sampler", KILL, 0.2),
    Fault(7, "coordinator", KILL, 0.5),
    Fault(10, "grader", KILL, 0.1),
    Fault(12, "scorer", STOP, 0.3),
    Fault(15, "learner", KILL, 0.6),
    Fault(18, "coordinator", STOP, 0.1),
    Fault(20, "launcher", KILL, 0.4),
    Fault(22, "sampler", STOP, 0.9),
]


STORY_OF_RANKS = [
    Fault(4, "learner-1", KILL, 0.2),
    Fault(7, "learner-0", STOP, 0.5),
    Fault(10, "learner-0", KILL, 0.9),
    Fault(12, "coordinator", KILL, 0.3),
    Fault(15, "learner-1", STOP, 0.7),
]


STORY_OF_TOOLS = [
    Fault(4, "environment", KILL, 0.2),
    Fault(6, "coordinator", KILL, 0.5),
    Fault(8, "environment", STOP, 0.6),
    Fault(10, "sampler", KILL, 0.3),
]


STORY_OF_SCALE = [
    Change(4, ("sampler=3", "teacher.main=2")),
    Fault(5, "sampler", KILL, 0.9),
    Fault(6, "coordinator", KILL, 0.5),
    Change(8, ("sampler=1", "teacher.main=2")),
    Fault(9, "scorer", KILL, 0.2),
    Change(11, ("sampler=2", "teacher.main=1")),
]


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("job", "story", "updates"),
    [
        ("arithmetic", STORY, 30),
        ("ranks", STORY_OF_RANKS, 21),
        ("tools", STORY_OF_TOOLS, 15),
        ("scale", STORY_OF_SCALE, 20),
    ],
    ids=["arithmetic", "ranks", "tools", "scale"],
)
def test_a_run_cannot_be_lost(tmp_path: Path, job: str, story: Sequence[Fault | Change], updates: int) -> None:
    said: list[str] = []
    chaos = Chaos(tmp_path, seed=0, updates=updates, prompts=4, job=job, say=said.append)
    status = chaos.live([*story])
    broken = [(name, found) for name, holds, found in chaos.laws(status) if not holds]
    assert not broken, "\n".join([*said, chaos.said])
    assert len(said) == len(story)
    too_late = sum("the run has ended" in line for line in said)
    assert chaos.struck.total() + too_late == sum(isinstance(event, Fault) for event in story)
    assert too_late + chaos.unchanged <= 1, "the updates after the last fault leave it time"
    assert chaos.changed + chaos.unchanged == sum(isinstance(event, Change) for event in story)


def test_a_seed_tells_the_same_story() -> None:
    assert drawn(3, 20, 60) == drawn(3, 20, 60) != drawn(4, 20, 60)
    assert min(fault.update for fault in drawn(0, 500, 30)) == 4, "none before the first checkpoint"


def test_a_story_holds_as_many_deaths_of_the_coordinator_as_are_asked_for() -> None:
    story = drawn(0, 20, 60, deaths=DEATHS)
    assert sum((fault.victim, fault.how) == ("coordinator", KILL) for fault in story) >= DEATHS == 10
    assert [fault.update for fault in story] == [fault.update for fault in drawn(0, 20, 60)]
    assert {fault.victim for fault in story} > {"coordinator"}, "others are struck, too"


def test_workers_come_and_go() -> None:
    asked = changes(0, 60)
    assert asked == changes(0, 60) and min(change.update for change in asked) == 4
    assert len({change.asked for change in asked}) > 5
