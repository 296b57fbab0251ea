"""replicas = "auto": the right number of workers is found in a few steps, and kept, however noisy lengths are."""

import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schedule import Async, Sync
from slipstream.errors import ConfigError
from slipstream.pipeline.control.actions import Resize
from slipstream.pipeline.control.scaling import (
    SCALING_WINDOW,
    SETTLING_UPDATES,
    SIZE_MEMORY,
    Autoscale,
    Observation,
    Room,
)
from slipstream.pipeline.run import Run
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from support.scaling import scalable
from support.simulated_runs import PROMPTS, config, long_tailed

STEP = SETTLING_UPDATES + SCALING_WINDOW + 1
"""Updates from one decision to the next."""
PLENTY_OF_ROOM = Room({}, {"sampler": {}, "teacher.main": {}})


class Stages:
    """Updates of a run in which each sampler and each scorer makes so many of them in a second, and the learner one:
    whoever is slowest sets the pace."""

    def __init__(self, sampler: float, scorer: float, *, most: int = 16, noise: float = 0.0, seed: int = 0) -> None:
        self.each = {"sampler": sampler, "teacher.main": scorer}
        self.sizes = dict.fromkeys(self.each, 1)
        self.autoscale = Autoscale(dict.fromkeys(self.each, most))
        self.random, self.noise = random.Random(seed), noise
        self.changes: list[Resize] = []

    def go(self, updates: int) -> dict[str, int]:
        for _ in range(updates):
            power = {kind: self.sizes[kind] * each for kind, each in self.each.items()}
            power["sampler"] *= self.random.lognormvariate(0, self.noise)
            pace = min(1.0, *power.values())
            busy = {kind: self.sizes[kind] * pace / power[kind] for kind in self.each}
            seen = Observation(1 / pace, 1 / pace - 1, 1.0, busy, dict(self.sizes))
            if change := self.autoscale.decide(seen, PLENTY_OF_ROOM):
                self.changes.append(change)
                self.sizes |= change.sizes
        return dict(self.sizes)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize(("sampler", "scorer"), [(0.26, 2.0), (0.26, 0.3), (0.12, 0.6), (2.0, 2.0), (2.0, 0.2)])
def test_the_learner_gets_what_it_can_use_and_nobody_is_there_in_vain(
    sampler: float, scorer: float, noise: float
) -> None:
    run = Stages(sampler, scorer, noise=noise)
    sizes = run.go(14 * STEP)
    for kind, each in run.each.items():
        assert sizes[kind] * each > (0.85 if noise < 0.2 else 0.75)
        assert sizes[kind] <= 2 / each + 1
    settled = len(run.changes)
    assert settled <= 10
    run.go(400)
    assert len(run.changes) - settled <= (2 if noise < 0.2 else 9)


def test_who_is_not_needed_any_more_leaves_at_once_or_when_all_is_forgotten() -> None:
    run = Stages(0.26, 2.0)
    assert run.go(4 * STEP)["sampler"] == 4
    run.each["sampler"] = 2.0
    assert run.go(STEP)["sampler"] == 3, "two were not enough"
    assert run.go(SIZE_MEMORY)["sampler"] == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_size_is_gone_back_to_until_all_is_forgotten(seed: int) -> None:
    """A kind whose workers stay, as those do that are taken back, is left alone afterwards."""
    chance, most = random.Random(seed), 8
    autoscale, sizes = Autoscale({"sampler": most, "teacher.main": most}), {"sampler": 1, "teacher.main": 1}
    left: dict[str, list[int]] = {kind: [] for kind in sizes}
    for update in range(1, 8 * SIZE_MEMORY):
        if update in (SIZE_MEMORY, 2 * SIZE_MEMORY, 4 * SIZE_MEMORY):
            left = {kind: [] for kind in sizes}
        waited = chance.choice([0.0, 0.5, chance.random()])
        busy = {kind: chance.random() * size for kind, size in sizes.items()}
        seen = Observation(1.0, waited, chance.lognormvariate(0, 1), busy, dict(sizes))
        change = autoscale.decide(seen, PLENTY_OF_ROOM)
        if change:
            back = change.why == "the added workers brought too little"
            for kind, size in change.sizes.items():
                assert 1 <= size <= most and size != sizes[kind]
                assert back or size not in left[kind]
                left[kind] = [*left[kind], sizes[kind]] if not back else list(range(most + 1))
                sizes[kind] = size
    assert autoscale.update == 8 * SIZE_MEMORY - 1


def looks(autoscale: Autoscale, count: int, size: int, **changes: Any) -> list[int]:
    """The sizes after so many updates, of samplers that work all the time for a learner that waits for half of it."""
    found = []
    for _ in range(count):
        values: dict[str, Any] = {"seconds": 2.0, "waited": 1.0, "tokens": 1.0, "busy": {"sampler": size}}
        change = autoscale.decide(Observation(**(values | {"sizes": {"sampler": size}} | changes)), PLENTY_OF_ROOM)
        size = change.sizes["sampler"] if change else size
        found.append(size)
    return found


def test_more_that_bring_nothing_leave_again_and_are_not_tried_again_soon() -> None:
    """Updates take as long whatever is done: the slowest response decides."""
    assert looks(Autoscale({"sampler": 8}), SIZE_MEMORY - 1, 1) == (
        [1] * (STEP - 1) + [2] * STEP + [1] * (SIZE_MEMORY - 2 * STEP)
    )


def test_nobody_looks_while_workers_come_or_leave() -> None:
    autoscale = Autoscale({"sampler": 8})
    assert set(looks(autoscale, STEP - 1, 1)) == {1}
    assert set(looks(autoscale, 50, 1, sizes={})) == {1}
    assert looks(autoscale, STEP, 1) == [1] * (STEP - 1) + [2]


def test_who_never_comes_is_not_waited_for_again() -> None:
    autoscale = Autoscale({"sampler": 8})
    assert looks(autoscale, STEP, 1)[-1] == 2
    looks(autoscale, 3, 1, sizes={})
    assert set(looks(autoscale, SIZE_MEMORY - STEP - 4, 1)) == {1}


def test_no_more_come_than_there_is_room_for() -> None:
    autoscale, seen = Autoscale({"sampler": 8}), Observation(2.0, 1.0, 1.0, {"sampler": 4.0}, {"sampler": 4})
    one, none = (Room({"GPU": free}, {"sampler": {"GPU": 1.0}}) for free in (1.0, 0.0))
    found = [autoscale.decide(seen, one) for _ in range(STEP)]
    assert found[-1] is not None and found[-1].sizes == {"sampler": 5}
    autoscale = Autoscale({"sampler": 8})
    assert not any(autoscale.decide(seen, none) for _ in range(3 * STEP))


def test_two_kinds_are_not_promised_the_same_gpu() -> None:
    takes = {"sampler": {"GPU": 1.0}, "teacher.main": {"GPU": 1.0}}
    busy, sizes = {"sampler": 4.0, "teacher.main": 2.0}, {"sampler": 4, "teacher.main": 2}
    found = {}
    for free in (2.0, 3.0):
        autoscale = Autoscale({"sampler": 8, "teacher.main": 8})
        seen, room = Observation(3.0, 1.0, 1.0, busy, sizes), Room({"GPU": free}, takes)
        found[free] = [autoscale.decide(seen, room) for _ in range(STEP)][-1]
    assert found[2.0] is None, "more samplers alone bring nothing"
    assert found[3.0] is not None and found[3.0].sizes == {"sampler": 6, "teacher.main": 3}


# --- of a whole run ---------------------------------------------------------------------------------------------------


def auto(schedule: Any, *, updates: int, groups: int, most: int = 8) -> Any:
    settings = config(schedule, updates=updates, groups=groups)
    sampler = settings.sampler.model_copy(update={"replicas": "auto", "replicas_max": most})
    return settings.model_copy(update={"sampler": sampler})


@pytest.mark.parametrize("seed", range(5))
def test_a_run_finds_how_many_samplers_it_needs_and_keeps_them(tmp_path: Path, seed: int) -> None:
    said = list[str]()
    made = scalable(long_tailed(seed), most=17, slots=4, learn=2.0, score=0.01)
    with RunLog(tmp_path, []) as log:
        run = Run(auto(Async(tau=4), updates=150, groups=16, most=16), made, PROMPTS, log, say=said.append)
        virtual.run(run.train())
    lines = read_lines(tmp_path / "metrics.jsonl")
    late = lines[50:-1]  # the last one waits for the longest response, whoever is there
    assert sum(line["seconds/data"] for line in late) < 0.02 * sum(line["seconds/update"] for line in late)
    sizes = [int(line.partition(", because ")[0].split()[-1]) for line in said if line.startswith("replicas: ")]
    assert sizes[:2] == [2, 4] and sizes[-1] in (5, 6, 7) and len(sizes) <= 5


def test_who_asks_for_more_where_the_run_decides_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        with RunLog(tmp_path, []) as log:
            run = Run(auto(Sync(), updates=3, groups=2), scalable(), PROMPTS, log)
            await run.train()
            with pytest.raises(ConfigError, match='sampler: with replicas = "auto" the run chooses this number itself'):
                run.admission.updates += 1
                run.scale(["sampler=2"], lambda _: None)

    virtual.run(main())
