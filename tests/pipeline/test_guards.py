"""Each guard on a run in which it must act, and on one in which it must not; and what it does to a real one."""

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from slipstream.config.file import parse
from slipstream.config.guards import EntropyFloor, EssGuard, GradientCosine, GuardsConfig, KLBrake, LengthSurge
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.schedule import Async
from slipstream.engines.native.learning.learner import NativeLearner, key_of
from slipstream.errors import ConfigError
from slipstream.metrics import trend
from slipstream.objective.method import Method
from slipstream.pipeline.control.actions import Line
from slipstream.pipeline.control.guards import AVERAGED_UPDATES, CALM_UPDATES, Guards
from slipstream.pipeline.run import Run
from slipstream.protocols import Metrics
from slipstream.records import Batch, Counts, total
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.timed_engines import SleepLearner
from support.engines import native_learner
from support.learners import roll_out, score
from support.metric_runs import native
from support.simulated_runs import PROMPTS, config, engines
from support.tiny_models import make_model, wrap

TAU = 3


def acts(lines: Iterable[Line], every: int = 1, **guards: Any) -> tuple[list[float], list[int], list[str]]:
    """After every line: the factor on the learning rate, and by how much tau is lowered; and all that was said."""
    watched, said = Guards(GuardsConfig(**guards), tau=TAU, batches=(TAU + 1) * every), list[str]()
    factors, lowered = list[float](), list[int]()
    for line in lines:
        said += [action.text for action in watched.on_update({**line, **watched.metrics})]  # as a run writes it
        factors.append(watched.lr)
        lowered.append(watched.lowered)
    return factors, lowered, said


def of(name: str, values: Iterable[float]) -> list[Line]:
    return [{name: value} for value in values]


def noisy(mean: float, count: int, *, noise: float = 0.3, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [mean * chance.lognormvariate(-(noise**2) / 2, noise) for _ in range(count)]


def lengths(values: list[float]) -> list[Line]:
    return [trend(values[: i + 1]) for i in range(len(values))]


# --- each guard -------------------------------------------------------------------------------------------------------


def test_length_surge_acts_while_responses_grow_and_lets_go_when_they_have_stopped() -> None:
    grown = [100.0] * 120 + [100.0 + 0.5 * i for i in range(100)] + [150.0] * 150
    factors, _, said = acts(lengths(grown), length_surge=LengthSurge())
    acting = [i for i, factor in enumerate(factors) if factor == 0.5]
    assert set(factors) == {1.0, 0.5}
    # + 20 % after 40 updates, seen 5 later in the mean of ten; and below + 10 % when the last ten are not much above
    # the ten that came a hundred before
    assert 160 < acting[0] < 170 and 290 < acting[-1] < 320
    assert acting == list(range(acting[0], acting[-1] + 1)), "it comes once and goes once"
    assert len(said) == 2 and said[0].startswith("guards.length_surge: responses are 1.2") and "ended" in said[1]


def test_length_surge_leaves_slow_growth_and_noise_alone() -> None:
    slow = [100.0 + 0.1 * i for i in range(400)]
    assert acts(lengths(slow), length_surge=LengthSurge())[0] == [1.0] * 400
    assert acts(lengths(noisy(100.0, 400, noise=0.1)), length_surge=LengthSurge())[2] == []


def test_ess_makes_steps_as_small_as_the_batch_really_is() -> None:
    found = acts(of("drift/ess", [1.0, 0.93, 0.45, 0.45, 0.92, 0.99, 0.6]), ess=EssGuard(target=0.9))
    assert found[0] == pytest.approx([1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.6 / 0.9])
    scaled = "guards.ess: the effective sample size is 0.{}: the learning rate is scaled by it"
    ended = "guards.ess: the guard ended, the effective sample size is 0.99"
    assert found[2] == [scaled.format(45), ended, scaled.format(6)]
    # of the weights, where there are any
    found = acts(of("drift/ess", [0.225, 0.9]), ess=EssGuard(target=0.9, scale="sqrt"))
    assert found[0] == pytest.approx([0.5, 1]), "√(0.225 / 0.9)"
    weighed = {"drift/ess": 0.1, "correction/ess": 0.95, "correction/rollout_is_mean": 1.0}
    assert acts([weighed], ess=EssGuard())[0] == [1.0]
    assert acts([{"drift/ess": 0.45, "correction/ess": 1.0}], ess=EssGuard())[0] == [0.5], "it only rejects"
    assert acts([{**weighed, "drift/ess": 0.45, "mismatch/kl": 0.0}], ess=EssGuard())[0] == [0.5], "of the engines"
    assert acts(of("drift/ess", noisy(0.96, 99, noise=0.01)), ess=EssGuard())[0] == [1.0] * 99
    assert acts([{}], ess=EssGuard())[0] == [1.0], "nothing was measured"


def test_entropy_has_a_floor() -> None:
    falls = [0.5] * 10 + [0.05] * 20 + [0.105] * 10 + [0.3] * 10
    factors, _, said = acts(of("student/entropy", falls), entropy=EntropyFloor(floor=0.1, factor=0.2))
    acting = [i for i, factor in enumerate(factors) if factor == 0.2]
    assert acting == list(range(14, 40)), "0.105 is not yet above the floor, 0.3 is"
    assert len(said) == 2
    assert acts(of("student/entropy", noisy(0.3, 200)), entropy=EntropyFloor())[2] == []


def test_kl_lowers_tau_step_by_step_and_raises_it_after_a_long_calm() -> None:
    high = of("drift/k3_kl", [0.1] * 40)
    _, lowered, said = acts(high, kl=KLBrake())
    step = AVERAGED_UPDATES + TAU + 1
    assert [lowered.index(n) for n in (1, 2, 3)] == [AVERAGED_UPDATES - 1 + step * n for n in range(3)]
    assert max(lowered) == TAU and len(said) == TAU
    _, lowered, _ = acts(of("drift/k3_kl", [0.1] * 60), every=4, kl=KLBrake())
    assert lowered.index(2) - lowered.index(1) == AVERAGED_UPDATES + 4 * (TAU + 1), "four times as much is in flight"
    _, lowered, said = acts([*high[:6], *of("drift/k3_kl", [0.01] * 100)], kl=KLBrake())
    back = lowered.index(0, 6)
    assert set(lowered[AVERAGED_UPDATES - 1 : back]) == {1} and back > CALM_UPDATES
    assert len(said) == 2 and "has been below 0.02 for 50 updates" in said[1]


def test_kl_leaves_tau_alone_inside_its_band() -> None:
    inside = noisy(0.035, 300, noise=0.2)
    assert set(acts(of("drift/k3_kl", inside), kl=KLBrake())[1]) == {0}
    outside = [*[0.1] * 5, *inside]
    assert set(acts(of("drift/k3_kl", outside), kl=KLBrake())[1][4:]) == {1}, "and stays where it was braked to"


def test_gac_acts_when_stale_samples_lead_elsewhere() -> None:
    guard = GradientCosine(every=2, below=0.0)
    lines = [line for value in [0.3] * 5 + [-0.4] * 10 + [0.3] * 9 for line in ({"gradient/cosine": value}, {})]
    factors, _, said = acts(lines, gac=guard)
    acting = [i for i, factor in enumerate(factors) if factor == 0.5]
    assert acting == list(range(acting[0], acting[-1] + 1)) and len(said) == 2
    assert acts(of("gradient/cosine", noisy(0.3, 100)), gac=guard)[2] == []


def test_guards_multiply_and_those_that_are_not_written_do_nothing() -> None:
    lines: list[Line] = [{"student/entropy": 0.01, "drift/ess": 0.45}] * AVERAGED_UPDATES
    both = {"entropy": EntropyFloor(factor=0.1), "ess": EssGuard(target=0.9)}
    assert acts(lines, **both)[0] == pytest.approx([0.5] * (AVERAGED_UPDATES - 1) + [0.05])
    assert acts(lines)[0] == [1.0] * AVERAGED_UPDATES and Guards(GuardsConfig()).metrics == {}


@pytest.mark.parametrize("seed", range(5))
def test_whoever_goes_on_shows_them_the_lines_again_and_they_stand_where_they_stood(seed: int) -> None:
    chance = random.Random(seed)
    names = ("length/trend", "drift/ess", "student/entropy", "drift/k3_kl", "gradient/cosine")
    levels = [0.01, 0.5, 1.5]
    lines: list[Line] = []
    while len(lines) < 400:
        level = {name: chance.choice(levels) for name in names if chance.random() < 0.9}
        lines += [level] * chance.randint(1, 80)
    every: Any = {
        "length_surge": LengthSurge(),
        "ess": EssGuard(),
        "entropy": EntropyFloor(),
        "kl": KLBrake(),
        "gac": GradientCosine(below=0.2),
    }
    one, written = Guards(GuardsConfig(**every), tau=TAU, batches=TAU + 1), list[Line]()
    for at, line in enumerate(lines):
        written.append({**line, **one.metrics})
        one.on_update(written[-1])
        if at % 97 == 0:
            other = Guards(GuardsConfig(**every), tau=TAU, batches=TAU + 1)
            for before in written:
                other.on_update(before)
            assert (other.metrics, other.lr, other.lowered) == (one.metrics, one.lr, one.lowered)
            one = other


def test_a_brake_that_comes_later_begins_there_and_one_with_other_thresholds_where_it_stood() -> None:
    old = of("drift/k3_kl", [0.2] * 50)
    guards = Guards(GuardsConfig(kl=KLBrake()), tau=TAU, batches=TAU + 1)
    for each in old:
        guards.on_update(each)
    assert guards.lowered == 0, "they were made without it"
    guards.on_update({"drift/k3_kl": 0.03, "guard/kl": 2.0})
    assert guards.lowered == 2


# --- in a run ---------------------------------------------------------------------------------------------------------


class Drifting(SleepLearner):
    """Its drift grows with the lag of what it learns from."""

    async def prepare(self, batch: Batch) -> list[Counts]:
        lags = [batch.update - 1 - version for h in batch.headers for version, n in h.versions for _ in range(n)]
        self.drift = 0.03 * sum(lags) / len(lags)
        return await super().prepare(batch)

    async def step(self, *args: Any) -> Metrics:
        return await super().step(*args) | {"drift/k3_kl": self.drift}


def braked(path: Path, updates: int, kl: KLBrake) -> list[dict[str, Any]]:
    """Rollouts that take longer than updates, so that tokens are as old as tau lets them be."""
    settings = config(Async(tau=3), updates=updates).model_copy(update={"guards": GuardsConfig(kl=kl)})
    made = replace(engines(learn=0.2, token=0.3, score=0.01), learner=Drifting(lambda _: 0.2))
    with RunLog(path, []) as log:
        virtual.run(Run(settings, made, PROMPTS, log, say=lambda _: None).train())
    return read_lines(path / "metrics.jsonl")


def test_a_run_whose_tokens_are_too_old_keeps_less_in_flight(tmp_path: Path) -> None:
    lines = braked(tmp_path, 60, KLBrake(high=0.05, low=0.01))
    lowered = [line["guard/kl"] for line in lines]
    assert lowered[0] == 0 and lowered == sorted(lowered)
    settled = lines[-10:]
    assert lowered[-1] >= 1 and fmean(line["drift/k3_kl"] for line in settled) <= 0.05
    assert all(line["credits"] <= 4 * (3 - lowered[-1] + 1) for line in settled)


def test_every_guard_acts_on_a_real_learner_and_shows_in_its_metrics(tmp_path: Path) -> None:
    guards = {
        "ess": {"target": 1.0},
        "entropy": {"floor": 99.0, "factor": 0.25},
        "kl": {"high": 2e-9, "low": 1e-9},
        "gac": {"every": 1, "below": 0.999, "factor": 0.5},
    }
    changes = {"guards": guards, "schedule": {"kind": "async", "tau": 1.5}, "updates": 12}
    lines = native(changes, tmp_path)
    names = [f"guard/{name}" for name in ("ess", "entropy", "gac")]
    for line in lines:
        expected = 1e-3 * torch.tensor([line[name] for name in names], dtype=torch.float64).prod().item()
        assert line["lr"] == pytest.approx(expected)
    last = lines[-1]
    assert lines[0]["lr"] == 1e-3 and 0.9 < last["guard/ess"] < 1 and last["guard/entropy"] == 0.25
    assert last["guard/gac"] == 0.5 and last["guard/kl"] >= 1


@pytest.mark.parametrize("budget", [1000, 40])
def test_the_cosine_is_that_of_the_gradients_of_both_halves(budget: int) -> None:
    """And what is learned is the same as without looking."""
    scored = score(make_model("phi", seed=2), roll_out(make_model("phi", seed=0)))
    for number, handle in enumerate(handle for group in scored for handle in group):
        handle.body.rollout.versions[:] = number % 3  # the same array as in the record
    batch = Batch(tuple(scored), 4)

    def learner(every: int) -> NativeLearner:
        config = LearnerConfig(token_budget=budget, dtype="float64")
        model = make_model("phi", seed=0, dtype=torch.float64)
        return native_learner(
            wrap(model), method=Method(loss=ReverseKLMC(m=3)), config=config, updates=9, cosine_every=every
        )

    async def update(one: NativeLearner) -> Metrics:
        await one.accumulate(batch, total(await one.prepare(batch)))
        return await one.step()

    plain, looking, alone = learner(0), learner(2), learner(0)
    without, found = asyncio.run(update(plain)), asyncio.run(update(looking))
    cosine = found.pop("gradient/cosine")
    rows = {"rows/filled", "saved/prompt"}
    assert {k: v for k, v in found.items() if k not in rows} == pytest.approx(
        {k: v for k, v in without.items() if k not in rows}, rel=1e-9, abs=1e-12
    )

    async def flat(fresh: bool) -> torch.Tensor:
        counts = total(await alone.prepare(batch))
        keys = [key_of(header) for header in batch.headers]
        by_age = sorted(keys, key=lambda key: (float(alone.now.samples[key].rollout.versions.mean()), key))
        cut = len(keys) // 2
        alone._accumulate(by_age[cut:] if fresh else by_age[:cut], counts)
        gradient = torch.cat([g.clone().flatten() for g in alone.steps.gradients() if g is not None])
        alone._drop()
        return gradient

    one, other = asyncio.run(flat(True)), asyncio.run(flat(False))
    assert cosine == pytest.approx(torch.cosine_similarity(one, other, dim=0).item(), abs=1e-6)
    for each in (plain, looking, alone):
        each.close()


# --- what is refused --------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"student": "s", "teachers": {"main": {"model": "t"}}}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"guards": {"kl": {}}, "schedule": {"kind": "sync"}}, r"\[guards.kl\] lowers schedule.tau"),
        ({"guards": {"kl": {}}, "schedule": {"kind": "async", "tau": 0.5}}, r"\[guards.kl\] lowers schedule.tau"),
        ({"guards": {"kl": {"low": 0.1, "high": 0.1}}}, "low = 0.1 is not below high = 0.1"),
        ({"guards": {"gac": {}}, "schedule": {"kind": "step_off"}}, "all of an update are of one age"),
        ({"guards": {"gac": {}}, "schedule": {"kind": "async", "tau": 0}}, "all of an update are of one age"),
        ({"guards": {"gac": {"factor": 0.1}}}, "factor does nothing without below"),
        ({"guards": {"entropi": {}}}, "did you mean 'entropy'"),
    ],
)
def test_what_would_do_nothing_is_refused(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(BASE | tree)


def test_none_is_there_unless_it_is_written_and_an_empty_section_is_enough() -> None:
    assert parse(BASE).guards == GuardsConfig()
    assert parse(BASE | {"guards": {"ess": {}}}).guards.ess == EssGuard()
