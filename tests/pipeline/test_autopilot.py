"""tau = "auto": as fast as the best fixed tau within the drift that is allowed, found in a few steps, and kept."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from slipstream.config.file import parse
from slipstream.config.schedule import Async
from slipstream.errors import ConfigError
from slipstream.pipeline.control.autopilot import MAX_WINDOW, TAU_MEMORY, Autopilot
from slipstream.pipeline.run import Run
from slipstream.protocols import Metrics
from slipstream.records import Batch, Counts, Prompt
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepLearner
from support.simulated_runs import PROMPTS, config, engines
from support.slow_cases import with_slow

BUDGET, MOST = 0.02, 8


def line(tau: float, waited: float, drift: float, ess: float = 1.0, **more: float) -> dict[str, float]:
    return more | {
        "tau": tau,
        "seconds/update": 1.0,
        "seconds/data": waited,
        "seconds/turn": 0.0,
        "seconds/weights": 0.0,
        "drift/k3_kl": drift,
        "drift/ess": ess,
    }


class Model:
    """Rollouts that take `need` updates of the learner, samplers that reach `cap` of its speed, and a drift that grows
    with a power of the lag, which follows tau."""

    def __init__(self, need: float, cap: float, slope: float, power: float, noise: float, seed: int = 0) -> None:
        self.need, self.cap, self.slope, self.power, self.noise = need, cap, slope, power, noise
        self.random, self.lag = random.Random(seed), 0.0

    def pace(self, tau: float) -> float:
        return min(1.0, self.cap, (tau + 1) / (self.need + 1))

    @property
    def best(self) -> float:
        """Return the pace of the best setting within the budget."""
        return max(self.pace(tau) for tau in range(MOST + 1) if self.slope * tau**self.power <= BUDGET)

    def update(self, tau: float) -> dict[str, float]:
        self.lag += (tau - self.lag) / (max(tau, 1) if tau > self.lag else 2)
        pace = min(1.0, self.pace(tau) * self.random.lognormvariate(0, self.noise))
        drift = self.slope * self.lag**self.power * self.random.lognormvariate(-2 * self.noise**2, 2 * self.noise)
        return line(tau, 1 - pace, drift)


def change(autopilot: Autopilot, line: dict[str, float]) -> str:
    return "".join(action.text.removeprefix("schedule: ") for action in autopilot.on_update(line))


def go(autopilot: Autopilot, model: Model, updates: int) -> list[dict[str, float]]:
    lines = []
    for _ in range(updates):
        lines.append(model.update(autopilot.tau))
        change(autopilot, lines[-1])
    return lines


def taus(lines: list[dict[str, float]]) -> list[float]:
    return [each["tau"] for each in lines]


def changes(values: list[float]) -> int:
    return sum(a != b for a, b in pairwise(values))


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("drift", [(0.001, 1.0), (0.003, 1.0), (0.006, 1.0), (0.0006, 2.0), (0.002, 2.0), (0.05, 1.0)])
@pytest.mark.parametrize(("need", "cap"), [(0.7, 1.2), (2, 0.6), (4, 1.2), (7, 0.6), (7, 1.2)])
def test_autopilot_is_as_fast_as_the_best_tau_that_is_fresh_enough(
    need: float, cap: float, drift: tuple[float, float], noise: float
) -> None:
    model = Model(need, cap, *drift, noise, seed=0)
    lines = go(Autopilot(MOST, BUDGET), model, 400)
    late = lines[50:]
    # the same noise at the speed of the best
    chance, fixed = random.Random(0), list[float]()
    for _ in range(400):
        fixed.append(min(1.0, model.best * chance.lognormvariate(0, noise)))
        chance.random()
    reached = fmean(1 / pace for pace in fixed[50:]) / fmean(1 / (1 - each["seconds/data"]) for each in late)
    assert reached >= (0.95 if noise < 0.2 else 0.93)
    assert fmean(each["drift/k3_kl"] for each in late) <= (1 + noise / 4) * BUDGET
    assert changes(taus(lines)) <= 20 and changes(taus(lines[200:])) <= 4, "a try or two each time all is forgotten"


@pytest.mark.parametrize("every", [3, 10])
def test_what_an_evaluation_holds_up_says_nothing_of_tau(every: int) -> None:
    """Or a trial would seem to gain wherever one fell into what was before it."""

    def found(seed: int, seconds: float) -> list[float]:
        autopilot, model, made = Autopilot(MOST, BUDGET), Model(2, 1.2, 0.001, 1.0, 0.1, seed), list[float]()
        for update in range(1, 201):
            told = model.update(autopilot.tau)
            if update % every == 0:
                told |= {"seconds/eval": seconds, "seconds/weights": seconds, "seconds/update": 1 + seconds}
            change(autopilot, told)
            made.append(autopilot.tau)
        return made

    for seed in range(5):
        assert len(set(found(seed, 0.0))) > 1 and found(seed, 0.0) == found(seed, 30.0)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_tau_is_gone_back_to_until_all_is_forgotten(seed: int) -> None:
    """But for those that a trial is taken back to, and after these nothing more is tried."""
    chance, autopilot = random.Random(seed), Autopilot(MOST, BUDGET)
    left, settled = set[int](), False
    for update in range(1, 8 * TAU_MEMORY):
        if update in (TAU_MEMORY, 2 * TAU_MEMORY, 4 * TAU_MEMORY):
            left, settled = set(), False
        before = autopilot.tau
        drift = BUDGET * chance.choice([0.1, 0.5, 1.5]) * chance.lognormvariate(0, 0.3)
        told = change(autopilot, line(before, chance.choice([0.0, 0.5, chance.random()]), drift))
        assert 0 <= autopilot.tau <= MOST and bool(told) == (autopilot.tau != before)
        if autopilot.tau > before:
            assert not settled and autopilot.tau not in left
        if told:
            left.add(before)
            settled |= "brought nothing" in told
    assert autopilot.update == 8 * TAU_MEMORY - 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_publishes_come_neither_too_seldom_nor_again_as_seldom_as_was_too_seldom(seed: int) -> None:
    chance, autopilot = random.Random(seed), Autopilot(15, BUDGET, rarest=8)
    refused = 16
    for update in range(1, 8 * TAU_MEMORY):
        if update in (TAU_MEMORY, 2 * TAU_MEMORY, 4 * TAU_MEMORY):
            refused = 16
        before = autopilot.tau, autopilot.every
        drift = BUDGET * chance.choice([0.1, 0.5, 0.5, 0.5, 1.5]) * chance.lognormvariate(0, 0.3)
        seconds = {"seconds/publish": chance.choice([0.01, 0.3]), "publish_every": before[1]}
        told = change(autopilot, line(before[0], chance.choice([0.0, 0.5, chance.random()]), drift, **seconds))
        now = autopilot.tau, autopilot.every
        assert bool(told) == (now != before)
        assert now[1] in (1, 2, 4, 8) and (now[1] == 1 or now[0] >= 1), "half of what is in flight, at most"
        assert (now[0] + 1) * now[1] <= 16
        if now[1] > before[1]:
            assert now[1] < refused
        if now[1] < before[1] and ("nothing" in told or "drift" in told) and now[0] > before[0]:
            refused = before[1]


def test_publishes_that_take_long_come_half_as_often_with_as_much_in_flight_and_back_when_they_are_brief() -> None:
    autopilot = Autopilot(MOST, BUDGET, rarest=4)
    said = list[str]()

    def look(updates: int, publish: float) -> None:
        for _ in range(updates):
            waited = 0.6 / (autopilot.ahead + 1) + 0.3 / autopilot.every
            seconds = {"seconds/publish": publish, "publish_every": autopilot.every}
            said.append(change(autopilot, line(autopilot.tau, waited, 0.001, **seconds)))

    look(60, 0.3)
    assert autopilot.every == 4 and autopilot.tau >= 1
    look(60, 0.001)
    assert autopilot.every == 1 and autopilot.tau >= 7, "what is in flight stays"
    assert [each.partition(" ")[0] + each.partition("because")[2] for each in said if "publish_every" in each] == [
        *2 * ["publish_every publishes take 30% of the time"],
        *2 * ["publish_every publishes take 0% of the time"],
    ]


def test_fewer_publishes_that_bring_nothing_or_are_too_stale_are_taken_back() -> None:
    for stale in (0.0, 0.1):
        autopilot = Autopilot(MOST, BUDGET, rarest=4)
        tried = set[int]()
        for _ in range(80):
            drift = stale if autopilot.every > 1 else 0.001
            seconds = {"seconds/publish": 0.3, "publish_every": autopilot.every}
            change(autopilot, line(autopilot.tau, 0.5, drift, **seconds))
            tried.add(autopilot.every)
        assert tried == {1, 2} and autopilot.every == 1


def test_it_begins_small_and_grows_boldly_where_drift_is_far_away() -> None:
    lines = go(Autopilot(MOST, BUDGET), Model(7, 1.0, 0.0005, 1.0, 0.0), 60)
    assert sorted(set(taus(lines))) == [1, 4, 8] and taus(lines).index(8) < 25


def test_it_takes_a_step_where_a_square_would_not_fit() -> None:
    lines = go(Autopilot(MOST, BUDGET), Model(7, 1.0, 0.006, 1.0, 0.0), 60)
    assert sorted(set(taus(lines))) == [1, 2, 3]


def test_more_in_flight_that_brings_nothing_is_taken_back_and_not_tried_again_soon() -> None:
    """The samplers are busy: the learner waits whatever is in flight."""
    lines = go(Autopilot(MOST, BUDGET), Model(1, 0.5, 0.0, 1.0, 0.0), TAU_MEMORY - 1)
    assert sorted(set(taus(lines))) == [1, 4] and changes(taus(lines)) == 2 and lines[-1]["tau"] == 1


def test_a_learner_that_does_not_wait_gets_no_staler_samples() -> None:
    assert set(taus(go(Autopilot(MOST, BUDGET), Model(1, 2.0, 0.001, 1.0, 0.0), 300))) == {1}


def test_it_gives_way_when_drift_or_few_samples_outweigh() -> None:
    model = Model(7, 1.0, 0.001, 1.0, 0.1)
    autopilot = Autopilot(MOST, BUDGET)
    assert go(autopilot, model, 60)[-1]["tau"] == MOST
    model.slope = 0.005
    assert go(autopilot, model, 30)[-1]["tau"] in (3, 4), "a learning rate that rises, say"
    for _ in range(3 * MAX_WINDOW):
        change(autopilot, line(autopilot.tau, 0.0, 0.001, ess=0.3))
    assert autopilot.tau == 0


@pytest.mark.parametrize("often", [1, 32])
def test_drift_lowers_tau_however_rare_publishes_are(often: int) -> None:
    autopilot = Autopilot(MOST, BUDGET, often=often, rarest=32)
    for _ in range(200 * often):
        change(autopilot, line(autopilot.tau, 0.0, 0.5) | {"publish_every": float(autopilot.every)})
    assert autopilot.ahead == 0


def test_samples_that_freshness_lets_count_nothing_are_too_stale() -> None:
    autopilot = Autopilot(MOST, BUDGET)
    for _ in range(TAU_MEMORY - 1):
        change(autopilot, line(autopilot.tau, 0.5, 0.0) | {"freshness/gated": 0.3 * (autopilot.tau > 0)})
    assert autopilot.tau == 0


def test_drift_that_is_there_on_policy_leaves_the_smallest_tau() -> None:
    """Engines that disagree: nothing in flight mends that."""
    autopilot = Autopilot(MOST, BUDGET)
    for _ in range(TAU_MEMORY - 1):
        change(autopilot, line(autopilot.tau, 0.5, 0.1))
    assert autopilot.tau == 0


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_whoever_goes_on_shows_it_the_lines_again_and_it_stands_where_it_stood(noise: float) -> None:
    autopilot, model = Autopilot(MOST, BUDGET), Model(4, 0.9, 0.002, 1.0, noise)
    before = go(autopilot, model, 130)
    again = Autopilot(MOST, BUDGET)
    for each in before:
        change(again, each)
    assert vars(again) == vars(autopilot)


def test_a_tau_that_was_another_in_an_earlier_part_is_gone_on_with() -> None:
    autopilot = Autopilot(MOST, BUDGET)
    for _ in range(3):
        change(autopilot, line(6, 0.0, 0.001))
    assert autopilot.tau == 6


@pytest.mark.parametrize(
    ("limits", "tau", "every"),
    [((2, 1, 1), 2, 1), ((MOST, 4, 4), 1, 4), ((MOST, 2, 2), 3, 2), ((MOST, 1, 8), 6, 1)],
)
def test_limits_that_were_others_in_an_earlier_part_are_kept(
    limits: tuple[int, int, int], tau: int, every: int
) -> None:
    """The line is of a part with tau = 6 and a publish after each update."""
    most, often, rarest = limits
    autopilot = Autopilot(most, BUDGET, often=often, rarest=rarest)
    change(autopilot, line(6, 0.0, 0.001) | {"publish_every": 1.0})
    assert autopilot.every == every and 0 <= autopilot.ahead <= most
    assert autopilot.tau == tau


# --- of a whole run ---------------------------------------------------------------------------------------------------


class Drifting(SleepLearner):
    """Its drift grows with the lag of what it learns from, and is noisy."""

    def __init__(self, cost: Callable[[int], float], slope: float, seed: int = 0) -> None:
        super().__init__(cost)
        self.slope, self.random = slope, random.Random(seed)

    async def prepare(self, batch: Batch) -> list[Counts]:
        lags = [(batch.update - 1 - version, n) for header in batch.headers for version, n in header.versions]
        self.lag = sum(lag * n for lag, n in lags) / sum(n for _, n in lags)
        return await super().prepare(batch)

    async def step(self, *args: Any) -> Metrics:
        drift = self.slope * self.lag * self.random.lognormvariate(-0.02, 0.2)
        return await super().step(*args) | {"drift/k3_kl": drift}


def lengths(sigma: float) -> Callable[[Prompt, int], int]:
    return lambda prompt, _: 1 + int(random.Random(prompt.number).lognormvariate(4, sigma))


def run(
    path: Path, schedule: Any, *, learn: float, sigma: float, slope: float, updates: int, load: float = 0.0
) -> list[dict[str, Any]]:
    """`learn` is how long an update takes beside a response, and `load` how long the samplers stand still for a
    publish."""
    token, groups = 0.02, 6
    made = replace(
        engines(lengths(sigma), token=token, score=1e-3, load=load),
        learner=Drifting(lambda tokens: learn * token * tokens / groups, slope),
    )
    path.mkdir()
    with RunLog(path, []) as log:
        settings = config(schedule, updates=updates, groups=groups)
        virtual.run(Run(settings, made, PROMPTS, log, say=lambda _: None).train())
    return read_lines(path / "metrics.jsonl")


def speed(lines: list[dict[str, Any]]) -> float:
    return sum(each["tokens"] for each in lines) / sum(each["seconds/update"] for each in lines)


@pytest.mark.processes
@pytest.mark.parametrize("slope", [0.001, 0.008])
@pytest.mark.parametrize("sigma", [0.0, 0.7])
@pytest.mark.parametrize("learn", with_slow([0.2, 0.5, 2.0], quick=[0.2, 2.0]))
def test_a_run_is_as_fast_as_with_the_best_tau_that_stays_within_its_drift(
    tmp_path: Path, learn: float, sigma: float, slope: float
) -> None:
    costs: Any = {"learn": learn, "sigma": sigma, "slope": slope}
    fixed = {tau: run(tmp_path / str(tau), Async(tau=tau), updates=80, **costs)[20:] for tau in (0, 1, 2, 4, 8)}
    fresh = [lines for lines in fixed.values() if fmean(each["drift/k3_kl"] for each in lines) <= BUDGET]
    lines = run(tmp_path / "auto", Async(tau="auto"), updates=160, **costs)
    late = lines[60:]
    assert speed(late) >= 0.95 * max(map(speed, fresh))
    assert fmean(each["drift/k3_kl"] for each in late) <= 1.05 * BUDGET
    assert changes([each["tau"] for each in late]) <= 5
    assert all(each["credits"] <= 6 * 9 for each in lines)


@pytest.mark.processes
@pytest.mark.parametrize("slope", [0.001, 0.004])
@pytest.mark.parametrize("load", with_slow([0.02, 0.3, 1.0], quick=[0.02, 1.0]))
def test_weights_are_published_as_often_as_pays(tmp_path: Path, load: float, slope: float) -> None:
    """Every number in flight and every cadence is tried; a response takes about a second, an update half of one."""
    costs: Any = {"learn": 0.5, "sigma": 0.7, "slope": slope, "load": load}
    fixed = {
        (tau, every): run(tmp_path / f"{tau}-{every}", Async(tau=tau, publish_every=every), updates=80, **costs)[20:]
        for every in (1, 2, 4)
        for tau in range(9 // every)
    }
    fresh = {knobs: lines for knobs, lines in fixed.items() if fmean(each["drift/k3_kl"] for each in lines) <= BUDGET}
    lines = run(tmp_path / "auto", Async(tau="auto", publish_every="auto"), updates=240, **costs)
    late = lines[100:]
    assert speed(late) >= 0.95 * max(map(speed, fresh.values()))
    assert fmean(each["drift/k3_kl"] for each in late) <= 1.05 * BUDGET
    assert changes([each["publish_every"] for each in lines]) <= 2 and changes(taus(late)) <= 4
    assert (lines[-1]["publish_every"] > 1) == (load > 0.1)
    assert all(each["credits"] <= 6 * 9 for each in lines)


def test_a_run_that_is_gone_on_with_has_the_tau_that_it_had(tmp_path: Path) -> None:
    path = tmp_path / "run"
    lines = run(path, Async(tau="auto"), learn=0.2, sigma=0.0, slope=0.004, updates=40)
    assert lines[0]["tau"] == 1 and lines[-1]["tau"] > 1
    with RunLog(path, []) as log:
        again = Run(config(Async(tau="auto"), updates=80, groups=6), engines(), PROMPTS, log)
    assert again.steering.tau == lines[-1]["tau"] and again.admission.credits == 6 * (again.steering.tau + 1)


# --- what is refused --------------------------------------------------------------------------------------------------

AUTO = {"kind": "async", "tau": "auto", "publish_every": "auto"}
EVALUATED = {"data": {"eval": "x"}, "task": {"reward": "exact"}}
BASE: dict[str, Any] = {"student": "s", "teachers": {"main": {"model": "t"}}}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"schedule": {"kind": "async", "tau": 4, "tau_max": 9}}, 'tau_max does nothing without tau = "auto"'),
        ({"schedule": {"kind": "async", "drift": 0.1}}, 'drift does nothing without tau = "auto"'),
        ({"schedule": {"kind": "async", "tau": "auto", "max_lag": 3}}, "a smaller tau_max"),
        ({"schedule": {"kind": "async", "tau": "auto"}, "guards": {"kl": {}}}, 'so does tau = "auto"'),
        ({"schedule": {"kind": "async", "tau": "much"}}, "schedule.tau"),
        ({"schedule": {"kind": "async", "publish_max": 8}}, 'publish_max does nothing without publish_every = "auto"'),
        ({"schedule": {"kind": "async", "publish_every": "auto"}}, "write that, or a number for publish_every"),
        ({"schedule": AUTO | {"publish_max": 3}}, "publish_max = 3 is no power of two: write 2, 4, 8"),
        ({"schedule": AUTO | {"publish_max": 8}}, "write tau_max = 15 or more"),
        ({"schedule": AUTO | {"publish_every": "seldom"}}, "schedule.publish_every"),
        ({"schedule": AUTO, "eval": {"every": 6}, **EVALUATED}, "not a multiple of schedule.publish_every = 4"),
    ],
)
def test_what_would_do_nothing_is_refused(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(BASE | tree)
