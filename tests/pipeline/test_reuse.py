"""Groups that several updates learn from: what the store promises, in any order of events and on the virtual clock."""

import json
import shutil
from collections import Counter
from dataclasses import asdict
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from slipstream.cli import main
from slipstream.config.schedule import Async, Periodic, Replay, ReuseConfig, StepOff, Sync
from slipstream.pipeline.admission import Admission, AdmissionState
from slipstream.pipeline.groups import measured
from slipstream.pipeline.schedules import Schedule, schedule_of
from slipstream.pipeline.store import Reuse, Store, Stored, inclusion, systematic
from slipstream.records import Handle
from slipstream.run_dir.writing import read_lines
from support.simulated_runs import Simulated, engines, long_tailed
from support.toy_runs import go

SCHEDULES = [
    Sync(),
    Periodic(),
    StepOff(k=2),
    Replay(k=1),
    Async(tau=2),
    Async(tau=2, order="submission"),
    Async(tau=1, publish_every=2),
    Async(tau=2, max_lag=4),
    Async(tau=2, max_lag=3, on_old="restart"),
    Async(tau=2, max_lag=3, on_old="drop"),
]
ORDERS = [
    ReuseConfig(times=2),
    ReuseConfig(times=4),
    ReuseConfig(times=4, max_lag=3),
    ReuseConfig(times=2, order="freshness", groups=7),
    ReuseConfig(times=4, order="freshness", alpha=1.0, beta=1.0, half_life=1.0, max_lag=5),
]


# --- draws ------------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.floats(0.01, 100), min_size=1, max_size=9), count=st.integers(1, 9))
def test_each_group_is_drawn_with_its_probability(sizes: list[float], count: int) -> None:
    """The draw is a function of one uniform number: the share of a grid of them that draws a group is its chance."""
    odds = inclusion(sizes, count)
    assert fsum(odds) == pytest.approx(min(count, len(sizes))) and max(odds) <= 1
    left = [(size, each) for size, each in zip(sizes, odds, strict=True) if each < 1 - 1e-9]
    assert all(each / size == pytest.approx(left[0][1] / left[0][0]) for size, each in left), "in proportion"
    steps, drawn = 2000, Counter[int]()
    for i in range(steps):
        found = systematic(odds, (i + 0.5) / steps)
        assert len(found) == len(set(found)) == min(count, len(sizes))
        drawn.update(found)
    for i, each in enumerate(odds):
        assert drawn[i] / steps == pytest.approx(each, abs=2 / steps)


def test_importance_weights_undo_the_priorities() -> None:
    """With beta = 1 the expected weight of each group is the same, by hand: priorities 1, 1, 2 and two draws.

    The probabilities are ½, ½ and 1, and the weights (½ / ½, ½ / ½, ½ / 1).
    """
    reuse = Reuse(most=2, groups=2, capacity=9, order="advantage", beta=1.0)
    stored = {n: Stored(version=0, uses=[1], priority=p) for n, p in ((0, 1.0), (1, 1.0), (2, 2.0))}
    chosen = Store(reuse, stored, seed=0).chosen(1)
    assert chosen in ({0: 1.0, 2: 0.5}, {1: 1.0, 2: 0.5})
    weights = [Store(reuse, stored, seed=seed).chosen(1) for seed in range(400)]
    sums = [fsum(each.get(number, 0.0) for each in weights) for number in range(3)]
    assert sums == pytest.approx([200] * 3, abs=40), "within four deviations"
    half = Store(Reuse(most=2, groups=2, capacity=9, order="advantage", beta=0.5), stored, 0).chosen(1)
    assert half[2] == pytest.approx(0.5**0.5), "PER: (1 / (N π))^β, divided by the largest"


def test_a_priority_is_halved_by_age() -> None:
    """Lags 0, 2 and 4 at a half-life of 2: 1, ½ and ¼, so that one draw has the odds 4 : 2 : 1."""
    reuse = Reuse(most=9, groups=1, capacity=9, order="freshness", half_life=2.0)
    stored = {n: Stored(version=n, uses=[n + 1]) for n in (0, 2, 4)}
    seen = Counter[int]()
    for seed in range(1400):
        seen.update(Store(reuse, stored, seed).chosen(4))
    assert [seen[n] / 200 for n in (0, 2, 4)] == pytest.approx([1, 2, 4], abs=0.35)


def test_the_priority_of_rewards_is_their_mean_distance_to_the_mean() -> None:
    class Header:
        def __init__(self, episode: int, reward: float) -> None:
            self.episode, self.rewards, self.nbytes = episode, {"exact": reward, "math": 9.0}, 10

    reuse = Reuse(most=2, groups=1, capacity=2, order="advantage")
    group: Any = [Handle(Header(n, reward), None) for n, reward in enumerate((1.0, 0.0, 0.0, 0.0))]  # type: ignore[arg-type]
    assert measured({"exact": 2.0}, reuse, group) == (pytest.approx(0.01 + 2 * (0.75 + 3 * 0.25) / 4), 40)
    assert measured({"exact": 2.0}, None, group) == (1.0, 0)


def test_a_full_store_loses_its_oldest_groups() -> None:
    store = Store(Reuse(most=9, groups=9, capacity=9, nbytes=100), {}, seed=0)
    for update in (1, 2, 3):
        store.train({update: Stored(version=update - 1, uses=[update], nbytes=40)}, update, last=False)
    assert list(store.groups) == [2, 3] and list(store.take_left()) == [1]
    assert store.metrics == {"reuse/stored": 2.0, "reuse/bytes": 80.0}
    store.train({4: Stored(version=3, uses=[4], nbytes=101)}, 4, last=False)
    assert list(store.groups) == [] and list(store.take_left()) == [2, 3, 4], "also one that is larger than the bound"


def test_priorities_choose_though_all_groups_are_used_as_often_on_average() -> None:
    """Forty updates with 4 new groups each, of which every fourth has 20 times the priority of the others."""
    schedule = schedule_of(Sync(), 16, ReuseConfig(times=4, order="advantage", alpha=1.0))
    assert schedule.reuse is not None and schedule.reuse.most == 8
    store, left = Store(schedule.reuse, {}, seed=0), dict[int, Stored]()
    for update in range(1, 41):
        chosen = store.chosen(update - 1)
        store.learn(chosen, update - 1)
        first = {4 * update + i: Stored(update - 1, [update], priority=1.0 if i else 20.0) for i in range(4)}
        store.train(first, update, last=False)
        assert update < 10 or (len(chosen) == 12 < len(store.groups) == 24), "twice as many as an update takes"
        left |= store.take_left()
    uses = {number: len(stored.uses) for number, stored in left.items() if number >= 40}
    often = [count for number, count in uses.items() if number % 4 == 0]
    assert max(uses.values()) <= 8 and fmean(uses.values()) == pytest.approx(4, abs=0.2)
    assert fmean(often) > 6 > 4 > fmean(count for number, count in uses.items() if number % 4)


def test_age_beyond_all_half_lives_leaves_weights() -> None:
    reuse = Reuse(most=9, groups=2, capacity=9, order="freshness", half_life=0.002, beta=1.0)
    stored = {n: Stored(version=n, uses=[n + 1]) for n in range(5)}
    chosen = Store(reuse, stored, seed=0).chosen(50)
    assert len(chosen) == 2 and max(chosen.values()) == 1.0


# --- admission --------------------------------------------------------------------------------------------------------


@given(
    settings=st.sampled_from(SCHEDULES), reuse=st.sampled_from(ORDERS), groups=st.sampled_from([4, 8]), data=st.data()
)
def test_whatever_happens_no_group_is_used_too_often_or_too_old(
    settings: Any, reuse: ReuseConfig, groups: int, data: Any
) -> None:
    schedule = schedule_of(settings, groups, reuse)
    admission = Admission(schedule, updates=7, seed=data.draw(st.integers(0, 9)))
    versions, uses, ended = dict[int, int](), Counter[int](), list[int]()
    drops = stops = 0
    while not admission.finished:
        choices = ["submit"] if admission.quota() else []
        choices += ["rolled"] if admission.rolling else []
        choices += ["take"] if admission.scorable() else []
        choices += ["scored"] if admission.scoring else []
        choices += ["learn"] if admission.learnable() and not admission.full else []
        choices += ["train"] if admission.full and not admission.gated else []
        choices += ["publish"] if admission.gated else []
        choices += ["renew"] if admission.outdated() else []
        assert choices, f"deadlock: {vars(admission)}"
        choices += ["stop"] if stops < 3 else []
        choices += ["drop"] if (admission.rolling or admission.scoring) and drops < 3 else []
        choices += ["lose"] if admission.store.groups and drops < 3 else []
        match data.draw(st.sampled_from(choices)):
            case "submit":
                versions |= dict.fromkeys(admission.submit(), admission.published_version)
            case "rolled":
                number = data.draw(st.sampled_from(list(admission.rolling)))
                admission.finish_rollout(number, versions[number])
            case "take":
                admission.start_scoring()
            case "scored":
                admission.finish_scoring(next(iter(admission.scoring)))
            case "learn":
                learned = admission.learn()
                for number in learned:
                    bounds = (
                        [schedule.bound]
                        if number in admission.learning
                        else [schedule.reuse and schedule.reuse.max_lag]
                    )
                    assert all(admission.version - versions[number] <= bound for bound in bounds if bound is not None)
                again = admission.store.learning
                assert len(again) <= schedule.groups * (reuse.times - 1)
            case "train":
                uses.update([*admission.learning, *admission.store.learning])
                admission.train()
                left = admission.store.take_left()
                assert all(uses[number] == len(stored.uses) for number, stored in left.items())
                ended += left
            case "publish":
                admission.publish()
            case "renew":
                for number in admission.outdated():
                    if schedule.on_old == "drop":
                        admission.drop(number, "old")
                        ended.append(number)
                    else:
                        admission.restart(number)
                        versions[number] = admission.published_version
            case "stop":
                text = json.dumps(asdict(admission.state))
                state = AdmissionState(**json.loads(text, object_hook=with_numbers))
                stored = {number: Stored(**each) for number, each in state.stored.items()}  # type: ignore[arg-type]
                state = AdmissionState(**{**vars_of(state), "stored": stored})
                assert state == admission.state
                admission = Admission(schedule, updates=7, seed=admission.store.seed, state=state)
                stops += 1
            case "drop":
                number = data.draw(st.sampled_from([*admission.rolling, *admission.scoring]))
                admission.drop(number, "test")
                ended.append(number)
                drops += 1
            case "lose":
                admission.store.end(data.draw(st.sampled_from(list(admission.store.groups))))
                ended += admission.store.take_left()
                drops += 1
        assert admission.in_use <= schedule.credits, "stored groups have no credit"
        assert schedule.reuse is not None and len(admission.store.groups) <= schedule.reuse.capacity
        assert max(uses.values(), default=0) <= schedule.reuse.most
    assert sorted(ended) == list(range(admission.submitted)), "each exactly once"
    assert not admission.store.groups and admission.version == 7


def with_numbers(found: dict[str, Any]) -> dict[Any, Any]:
    return {int(name) if name.isdecimal() else name: value for name, value in found.items()}


def vars_of(state: AdmissionState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in AdmissionState.__dataclass_fields__}


@pytest.mark.parametrize(
    ("settings", "reuse", "kept", "held"),
    [
        (Sync(), None, 0, 8),
        (Sync(), ReuseConfig(times=1), 0, 8),
        (Sync(), ReuseConfig(times=4), 3, 2 + 6),
        (StepOff(k=2), ReuseConfig(times=2), 3, 12 + 4),
        (Sync(), ReuseConfig(times=4, order="freshness"), 6, 2 + 12),
        (Sync(), ReuseConfig(times=4, order="freshness", max_lag=4), 4, 2 + 12),
        (Async(tau=1, max_lag=5), ReuseConfig(times=2), 5, 8 + 4),
    ],
)
def test_what_a_schedule_keeps(settings: Any, reuse: ReuseConfig | None, kept: int, held: int) -> None:
    schedule = schedule_of(settings, 8, reuse)
    assert (schedule.kept_versions, schedule.held) == (kept, held)
    assert schedule.on_policy == (schedule.bound == 0 and schedule.reuse is None)
    assert (schedule.reuse is None) == (schedule == plain(settings, reuse))


def plain(settings: Any, reuse: ReuseConfig | None) -> Schedule:
    return schedule_of(settings, 8 // (reuse.times if reuse else 1))


# --- runs on the virtual clock ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", ORDERS, ids=lambda r: f"{r.order}{r.times}")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_use_is_in_the_books(tmp_path: Path, schedule: Any, reuse: ReuseConfig) -> None:
    run = Simulated(tmp_path, schedule, engines(long_tailed(0), samplers=2), updates=12, groups=8, reuse=reuse)
    assert sorted(entry["number"] for entry in run.ledger) == list(range(run.run.admission.submitted))
    trained, made = [entry for entry in run.ledger if entry["end"] == "trained"], Counter[int]()
    data = schedule_of(schedule, 8, reuse)
    assert data.reuse is not None
    for entry in trained:
        uses = entry.get("uses", [entry["update"]])
        made.update(uses)
        assert len(uses) <= data.reuse.most and uses == sorted(set(uses)) and entry["update"] == uses[-1]
        first, last = entry["lag"][0] - (uses[-1] - uses[0]), entry["lag"][0]
        assert data.bound is None or first <= data.bound
        assert len(uses) == 1 or data.reuse.max_lag is None or last <= data.reuse.max_lag
        if reuse.order == "age":
            assert uses == list(range(uses[0], uses[-1] + 1)), "in consecutive updates"
            if data.reuse.max_lag is None:
                assert uses[-1] == 12 or len(uses) == reuse.times
    assert [made[line["update"]] for line in run.lines] == [line["samples"] for line in run.lines]
    drawn = sum(line["reuse/new_tokens"] for line in run.lines)
    assert drawn == sum(sum(entry["tokens"]) for entry in trained)
    assert run.lines[-1]["reuse/stored"] == 0 and not run.run.responses
    new = 8 // reuse.times
    assert [line["samples"] for line in run.lines][: reuse.times] == [new * (i + 1) for i in range(reuse.times)]


def test_a_group_that_is_used_again_takes_no_time_to_roll_out(tmp_path: Path) -> None:
    """Two of four groups are new: 2 s of rollouts, two scores of ¼ s and 3 s of learning."""
    run = Simulated(tmp_path, Sync(), engines(), updates=20, reuse=ReuseConfig(times=2))
    assert run.seconds == pytest.approx(20 * (2 + 2 * 0.25 + 3), abs=3)
    assert run.trained() == list(range(40))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_one_use_changes_nothing(tmp_path: Path, schedule: Any) -> None:
    go(tmp_path / "plain", schedule)
    go(tmp_path / "once", schedule, changes={"reuse": ReuseConfig(times=1)})
    for name in ("ledger.jsonl", "metrics.jsonl", "samples.jsonl", "final/table.npy"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


@pytest.mark.parametrize("reuse", [ReuseConfig(times=3), ReuseConfig(times=3, order="freshness", beta=1.0)], ids=str)
@pytest.mark.parametrize("schedule", [Sync(), StepOff(k=1), Async(tau=2)], ids=str)
def test_a_run_goes_on_with_its_store_to_the_bit(tmp_path: Path, schedule: Any, reuse: ReuseConfig) -> None:
    changes = {"reuse": reuse}
    whole = go(tmp_path / "whole", schedule, score=0.0, changes=changes)
    for version in (2, 4, 6):
        path = tmp_path / str(version)
        shutil.copytree(tmp_path / "whole", path)
        shutil.rmtree(path / "final")
        for later in range(version + 1, 9):
            shutil.rmtree(path / "checkpoints" / str(later), ignore_errors=True)
        saved = json.loads((path / "checkpoints" / str(version) / "standing.json").read_text())["admission"]["stored"]
        assert saved
        parts = go(path, schedule, score=0.0, changes=changes)
        np.testing.assert_array_equal(parts.table.detach().numpy(), whole.table.detach().numpy())
        assert read_lines(path / "ledger.jsonl") == read_lines(tmp_path / "whole" / "ledger.jsonl")


NATIVE = """
student = "builtin:student"
updates = 4
output = "whole"
[data]
train = "builtin:arithmetic"
limit = 24
[sampler]
max_tokens = 12
group = 2
[loss]
weight = 0.0
[policy]
advantage = "gae"
[critic]
model = "builtin:student"
backbone_lr = 1e-3
[reference]
weight = 0.1
[task]
reward = "exact"
[learner]
batch_size = 8
lr = 1e-3
[schedule]
kind = "sync"
[reuse]
times = 2
order = "freshness"
alpha = 1.0
half_life = 1.0
[checkpoint]
every = 2
[log]
trace = false
[runtime]
kind = "inline"
device = "cpu"
"""


def test_native_engines_go_on_with_their_store_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each later update is from the store, with importance weights; the critic has a model of its own."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(NATIVE)
    assert main(["train", "run.toml"]) == 0
    shutil.copytree("whole", "parts")
    shutil.rmtree("parts/final")
    shutil.rmtree("parts/checkpoints/4")
    assert json.loads(Path("parts/checkpoints/2/standing.json").read_text())["admission"]["stored"]
    assert main(["resume", "parts"]) == 0
    assert Path("parts/final/model.safetensors").read_bytes() == Path("whole/final/model.safetensors").read_bytes()
    weights = [load_file(f"{run}/checkpoints/4/learner.safetensors") for run in ("whole", "parts")]
    assert weights[0].keys() == weights[1].keys() and any("critic/model/" in name for name in weights[0])
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())
    assert read_lines(Path("parts/ledger.jsonl")) == read_lines(Path("whole/ledger.jsonl"))
    again = [line for line in read_lines(Path("whole/ledger.jsonl")) if len(line.get("uses", ())) > 1]
    assert again and {line["update"] for line in read_lines(Path("parts/metrics.jsonl"))} == {1, 2, 3, 4}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_run_that_is_stopped_writes_what_is_stored_and_takes_it_back(tmp_path: Path, schedule: Any) -> None:
    changes = {"reuse": ReuseConfig(times=3)}
    go(tmp_path, schedule, until=6.1, changes=changes)
    stopped = read_lines(tmp_path / "ledger.jsonl")
    assert any(entry["end"] == "trained" and len(entry.get("uses", "1")) < 3 for entry in stopped)
    numbers = sorted(entry["number"] for entry in stopped)
    assert numbers == list(range(len(numbers))), "each exactly once, also here"
    go(tmp_path, schedule, changes=changes)
    ledger = read_lines(tmp_path / "ledger.jsonl")
    assert sorted(entry["number"] for entry in ledger) == list(range(len(ledger)))
    early = [each for each in ledger if each["end"] == "trained" and each["update"] < 8 and len(each["uses"]) < 3]
    assert all(max(entry["lag"]) == getattr(schedule, "max_lag", None) for entry in early), "too old for a further use"
