"""Predictions of a run elsewhere: hand arithmetic, laws of devices, costs and their file, and the command."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import B200, QWEN3_4B, QWEN3_30B_A3B, Reached, costs_on, room
from slipstream.cli import main
from slipstream.commands.plan import cells
from slipstream.config.costs import Costs, load, parse, quantiles
from slipstream.config.file import parse as parse_config
from slipstream.config.file import to_toml
from slipstream.config.schedule import Async, Periodic, ReuseConfig, ScheduleConfig, StepOff, Sync
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, RunDirError
from slipstream.pipeline.run import Run
from slipstream.planning.derive import costs_of
from slipstream.planning.fit import Paid, fitted, fitted_to_fastest
from slipstream.planning.planner import (
    Offer,
    PlannedConfig,
    Split,
    estimate,
    numbers,
    outlook,
    promising_splits,
    splits,
)
from slipstream.planning.simulate import Work, engines, forecast, prompts
from slipstream.run_dir.reading import RunDir
from slipstream.run_dir.writing import RunLog
from slipstream.simulation import virtual_clock as virtual
from slipstream.simulation.cores import Cores

CONSTANT: dict[str, Any] = {
    "decode": {"step": 0.125, "row": 0.0625},
    "read": {"token": 0.015},
    "score": {"token": 0.03},
    "learn": {"token": 0.0625, "step": 0.5},
    "publish": {"export": 0.25, "load": 0.5},
    "lengths": {"prompt": 4, "mean": 12},
}
"""All responses have 12 tokens, all sequences 16."""
WORK = Work(batch=8, max_tokens=100, slots=64)
ROLL, SCORE, LEARN, PUBLISH = (
    12 * (0.125 + 8 * 0.0625) + 8 * 4 * 0.015,
    8 * 16 * 0.03,
    8 * 16 * 0.0625 + 0.5,
    0.75,
)
"""Seconds of an update: 7.98, 3.84, 8.5 and 0.75."""


def costs(**changes: Any) -> Costs:
    return parse(CONSTANT | changes, where="costs.toml")


# --- hand arithmetic --------------------------------------------------------------------------------------------------


ONE = Split(1, 1, 1)


def speed(schedule: ScheduleConfig, split: Split = ONE, **changes: Any) -> float:
    return forecast(costs(**changes), split, schedule, WORK, updates=8).samples_per_s


def test_a_synchronous_update_is_the_sum_of_its_stages() -> None:
    assert speed(Sync()) == pytest.approx(8 / (ROLL + SCORE + LEARN + PUBLISH))


def test_groups_that_are_used_twice_are_rolled_out_and_scored_once() -> None:
    """Four of eight samples are new; the learner learns from eight."""
    work = replace(WORK, reuse=ReuseConfig(times=2))
    seen = forecast(costs(), ONE, Sync(), work, updates=8)
    roll, score = 12 * (0.125 + 4 * 0.0625) + 4 * 4 * 0.015, SCORE / 2
    assert seen.samples_per_s == pytest.approx(8 / (roll + score + LEARN + PUBLISH))
    assert seen.lag == pytest.approx(0.5) and seen.max_lag == 1
    assert estimate(costs(), work, ONE, Sync())[0] >= seen.samples_per_s


def test_stages_that_overlap_are_as_fast_as_the_slowest() -> None:
    """The learner's 8.5 s and its export of 0.25 s, while the samplers load beside it."""
    assert speed(Async(tau=4)) == pytest.approx(8 / (LEARN + 0.25), rel=0.02)


def test_shares_of_workers_are_of_their_devices() -> None:
    """Two samplers have four rows each, two ranks half an update each."""
    roll, learn = 12 * (0.125 + 4 * 0.0625) + 4 * 4 * 0.015, 8 * 16 * 0.0625 / 2 + 0.5
    assert speed(Sync(), Split(2, 1, 2)) == pytest.approx(8 / (roll + SCORE + learn + PUBLISH))


def test_a_core_that_all_share_does_one_thing_at_a_time() -> None:
    """Stages in sequence need no more cores than one; stages that overlap on one core are no faster."""
    assert speed(Sync(), cores=1) == pytest.approx(speed(Sync()))
    assert speed(Periodic(), cores=1) == pytest.approx(speed(Sync()), rel=0.15)
    assert speed(StepOff(k=1)) > 1.5 * speed(StepOff(k=1), cores=1)
    assert speed(Async(tau=1), cores=1) < 0.7 * speed(Async(tau=1), cores=2) < speed(Async(tau=1), cores=3)
    assert speed(Sync(), cores=1, others=1) == pytest.approx(speed(Sync()) / 2)


def test_lag_and_idle_shares_are_told() -> None:
    seen = forecast(costs(), ONE, StepOff(k=2), WORK, updates=8)
    assert (seen.lag, seen.max_lag) == (2, 2)
    sync = forecast(costs(), ONE, Sync(), WORK, updates=8)
    whole = ROLL + SCORE + LEARN + PUBLISH
    assert sync.idle["score"] == pytest.approx(1 - SCORE / whole)
    assert sync.idle["learn"] == pytest.approx(1 - (LEARN + 0.25) / whole)
    assert sync.seconds(100, 8) == pytest.approx(100 * whole, rel=0.01)
    assert sync.work == pytest.approx(whole / 8, rel=0.05)  # the first publish is beside the updates


def test_mini_batches_and_no_teacher() -> None:
    several = Work(batch=8, max_tokens=100, slots=64, minibatches=4, scored=False)
    seen = forecast(costs(), ONE, Sync(), several, updates=8)
    assert seen.samples_per_s == pytest.approx(8 / (ROLL + LEARN + 3 * 0.5 + PUBLISH))
    assert seen.idle.keys() == {"rollout", "score", "learn"}
    unscored = forecast(costs(), Split(1, 0, 1), Sync(), several, updates=8)
    assert unscored.idle.keys() == {"rollout", "learn"}  # nobody waits where there are no workers
    offer = Offer(schedule="sync", split=Split(1, 0, 1), forecast=unscored, seconds=60.0)
    assert cells("sync", offer, offer)[4].split()[1] == "–"


def test_a_pass_takes_what_waits_and_comes_no_sooner_than_it_may() -> None:
    """Each pass costs a second: with little patience nearly every response has its own, with much they share."""
    lengths = {"prompt": 1, "responses": [4, 8, 12, 16, 20, 24, 28, 32]}
    eager = speed(Periodic(), score={"call": 1.0}, lengths=lengths)
    patient = speed(Periodic(), score={"call": 1.0, "apart": 6.0, "enough": 1000}, lengths=lengths)
    assert eager != patient and min(eager, patient) > 0


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [Sync(), Async(tau=4)], ids=lambda each: each.label)
def test_the_best_split_of_more_devices_is_never_slower(schedule: ScheduleConfig) -> None:
    speeds = []
    for devices in (3, 4):
        seen = outlook(costs(), WORK, devices=devices, updates=10, schedules=[schedule])
        (best,), (more,) = seen.best.values(), seen.next.values()
        assert more.forecast.samples_per_s >= best.forecast.samples_per_s
        speeds.append(best.forecast.samples_per_s)
    assert speeds == sorted(speeds)


@settings(max_examples=6)
@given(
    st.builds(Split, *[st.integers(1, 3)] * 3),
    st.sampled_from([Sync(), Periodic(), StepOff(k=2), Async(tau=2)]),
    st.sampled_from([1.0, 2.0]),
)
def test_cores_are_never_busier_than_always(split: Split, schedule: ScheduleConfig, cores: float) -> None:
    seen = forecast(costs(cores=cores), split, schedule, WORK, updates=12)
    assert seen.samples_per_s * seen.work <= cores * 1.1
    assert seen.samples_per_s <= forecast(costs(), split, schedule, WORK, updates=12).samples_per_s * 1.02


def test_sensible_splits_are_those_with_the_highest_estimates() -> None:
    """Learning takes nearly all: the split of the most ranks comes first, one with a single rank not at all."""
    slow = costs(learn={"token": 10.0})
    chosen = promising_splits(slow, WORK, list(splits(6)), Async(tau=4))
    assert chosen[0] == Split(1, 1, 4) and all(split.ranks > 1 for split in chosen)


def test_splits_leave_nobody_without_a_device() -> None:
    assert sorted(splits(4)) == [Split(1, 1, 2), Split(1, 2, 1), Split(2, 1, 1)]
    assert sorted(splits(3, scorers=5)) == [Split(1, 5, 2), Split(2, 5, 1)], "scorers that need no device"


# --- costs ------------------------------------------------------------------------------------------------------------


def test_costs_go_through_their_file() -> None:
    whole = costs(cores=2.0, others=0.5, coordinator=0.001, lengths={"prompt": 7, "responses": list(range(1, 60))})
    text = whole.to_toml()
    assert parse(tomllib.loads(text), where="x") == whole
    assert "# seconds of a decoding step, independent of its rows.\nstep = 0.125" in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"decoding": {}}, "unknown key 'decoding'; did you mean 'decode'?"),
        ({"decode": {"stepp": 1}}, "unknown key 'decode.stepp'; did you mean 'step'?"),
        ({"decode": {"row": 1}}, "'decode.step' is missing: slipstream plan --measure -o FILE writes all costs"),
        ({"decode": {"step": 0}}, "decode: a decoding step must take time: write step or row"),
        ({"cores": 0}, "cores: input should be greater than or equal to 0.01, got 0"),
        ({"score": {"token": -1}}, "score.token: input should be greater than or equal to 0, got -1"),
        ({"publish": {"export": 1e30}}, "publish.export: input should be less than or equal to 1000000, got 1e+30"),
        (
            {"lengths": {"prompt": 10**12}},
            "lengths.prompt: input should be less than or equal to 10000000, got 1000000000000",
        ),
        ({"lengths": {"prompt": 1}}, "lengths: write either mean (with sigma) or responses"),
        ({"lengths": {"mean": 5, "responses": [5]}}, "lengths: write either mean (with sigma) or responses"),
        (
            {"lengths": {"responses": [0]}},
            "lengths: responses takes lengths of at least 1, and sigma is not allowed beside it",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        costs(**changes)
    assert str(caught.value).startswith(f"costs.toml: {line}") and "\n" not in str(caught.value)


def test_slower_engines_have_more_to_do_and_wait_as_long() -> None:
    slower = costs(score={"call": 0.5, "apart": 2.0, "enough": 9}).scaled(2)
    assert (slower.decode.row, slower.learn.step, slower.publish.export) == (0.125, 1.0, 0.5)
    assert (slower.score.call, slower.score.apart, slower.score.enough) == (1.0, 2.0, 9)


def test_quantiles_stand_for_all() -> None:
    assert quantiles([3, 1, 2]) == (1, 2, 3)
    assert quantiles(range(1000), most=4) == (125, 375, 625, 875)


@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=2))
def test_a_fit_finds_what_was_paid(prices: list[float]) -> None:
    counts = [(1, 10), (2, 70), (5, 20), (9, 300)]
    paid = [Paid(prices[0] * a + prices[1] * b, {"call": a, "token": b}) for a, b in counts]
    assert list(fitted(paid).values()) == pytest.approx(prices, rel=1e-6)


def test_a_fit_says_nothing_is_cheaper_than_free() -> None:
    """The second costs the less the more there is of it: it is left out."""
    paid = [Paid(1.0, {"call": 1, "token": 1}), Paid(0.9, {"call": 1, "token": 5}), Paid(0.8, {"call": 1, "token": 9})]
    found = fitted(paid)
    assert found["token"] == 0 and 0.8 < found["call"] < 1


def test_what_was_disturbed_does_not_count() -> None:
    """One repeat of every kind is right, and the others took up to twice as long."""
    kinds, slower = {"a": (1, 10), "b": (1, 200), "c": (8, 90)}, (1.0, 1.7, 2.0)
    paid = [
        Paid(s * (0.5 * calls + 0.01 * tokens), {"call": calls, "token": tokens}, kind)
        for s in slower
        for kind, (calls, tokens) in kinds.items()
    ]
    assert list(fitted_to_fastest(paid).values()) == pytest.approx([0.5, 0.01])


def test_what_a_run_cost_is_read_off_it(tmp_path: Path) -> None:
    """A synchronous run whose costs are known, on a virtual clock; prompts count with the responses behind them."""
    known = costs(read={}, lengths={"prompt": 4, "responses": [4, 8, 12, 16, 20]})
    wanted = config(schedule={"kind": "sync"}, learner={"batch_size": 8})
    with RunLog.create(wanted, tmp_path / "run") as log:
        virtual.run(Run(wanted, engines(known, ONE, WORK, Cores()), prompts(known), log, say=lambda _: None).train())
    found = costs_of(RunDir(tmp_path / "run"))
    assert (found.decode.step, found.decode.row) == pytest.approx((0.125, 0.0625), rel=0.02)
    assert found.publish.load == pytest.approx(0.5)
    assert set(found.lengths.responses) == {4, 8, 12, 16, 20}
    again = forecast(found, ONE, Sync(), WORK, updates=20).samples_per_s
    assert again == pytest.approx(forecast(known, ONE, Sync(), WORK, updates=20).samples_per_s, rel=0.05)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines[: len(lines) // 2]:
        line |= {"sft": 1.0, "stage/rollout": 0.0}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert costs_of(RunDir(tmp_path / "run")).decode.row == pytest.approx(0.0625, rel=0.02), "the rest is supervised"
    halved = [dict(line) for line in lines]
    for line in halved:
        line["reuse/new_tokens"] = line.get("tokens", 0.0) / 2
        line["tokens_per_s/rollout"] = line.get("tokens_per_s/rollout", 0.0) / 2
    metrics.write_text("".join(json.dumps(line) + "\n" for line in halved))
    assert costs_of(RunDir(tmp_path / "run")).decode.row == pytest.approx(0.125, rel=0.02), "half of the tokens are new"
    metrics.write_text("".join(json.dumps(line | {"tokens": line.get("tokens", 0.0) / 2}) + "\n" for line in lines))
    found = costs_of(RunDir(tmp_path / "run")).decode
    assert found.step == 0 and found.row > 0.0625, "the longest response may be among those that were left out"


@pytest.mark.parametrize("schedule", [{"kind": "async", "tau": 4}, {"kind": "replay", "k": 2}], ids=str)
def test_what_a_rollout_cost_counts_for_the_tokens_that_were_drawn_meanwhile(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    """Rollouts are ahead of the learner at first, and there are none in the last updates."""
    known = costs(read={}, decode={"step": 0.0, "row": 0.0625}, lengths={"prompt": 4, "responses": [4, 8, 12, 16, 20]})
    wanted, work = config(schedule=schedule, learner={"batch_size": 8}), replace(WORK, slots=8)
    with RunLog.create(wanted, tmp_path / "run") as log:
        virtual.run(Run(wanted, engines(known, ONE, work, Cores()), prompts(known), log, say=lambda _: None).train())
    run = RunDir(tmp_path / "run")
    assert costs_of(run).decode.row == pytest.approx(0.0625, rel=0.15)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) | {"tokens_per_s/rollout": 0.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunDirError, match="has no rollouts after its first updates, so that no costs can be derived"):
        costs_of(RunDir(tmp_path / "run"))
    (tmp_path / "run" / "ledger.jsonl").write_text("")
    with pytest.raises(RunDirError, match="has no ledger, so that no costs can be derived"):
        costs_of(RunDir(tmp_path / "run"))


def test_a_learner_has_no_more_ranks_than_groups_of_a_step() -> None:
    """2 groups of an update: 5 of 8 devices would have nothing to do as ranks."""
    small = config(sampler={"group": 4}, learner={"batch_size": 8})
    dear = costs(learn={"token": 6.0})
    seen = PlannedConfig(small).outlook(dear, 8, lambda _: None)
    assert {offer.split.ranks for offer in (*seen.offers, *seen.more)} == {2}
    config(sampler={"group": 4}, learner={"batch_size": 8, "ranks": 2})
    with pytest.raises(ConfigError, match="more than the 2 groups of one step"):
        config(sampler={"group": 4}, learner={"batch_size": 8, "ranks": 3})
    periodic = [each.split for each in seen.offers if each.schedule == "periodic"]
    assert periodic[0].samplers > 1 and periodic[0].devices == 8, "the learner is the slowest; the others get the rest"
    assert Split(1, 1, 6) in splits(8) and {split.ranks for split in splits(8, most_ranks=2)} == {1, 2}


def test_a_run_of_one_update_takes_the_time_of_one() -> None:
    seen = forecast(costs(), ONE, Sync(), WORK, updates=8)
    assert seen.seconds(1, 8) == pytest.approx(seen.seconds(10, 8) / 10, rel=0.05)


def test_the_cost_of_scoring_is_the_same_however_many_copies_of_the_teacher_shared_it(tmp_path: Path) -> None:
    """Four copies are each idle for half of the time, and not at the same moments."""
    known = costs(read={}, lengths={"prompt": 4, "responses": [4, 8, 12, 16, 20]}, score={"call": 0.0, "token": 0.03})
    teachers = {"main": {"model": "builtin:teacher", "replicas": 4}}
    wanted = config(
        schedule={"kind": "async", "tau": 2},
        learner={"batch_size": 8},
        updates=40,
        teachers=teachers,
        health={"canary": 0},
    )
    found = list[Costs]()
    for split in (ONE, Split(1, 4, 1)):
        with RunLog.create(wanted, tmp_path / str(split)) as log:
            virtual.run(
                Run(wanted, engines(known, split, WORK, Cores()), prompts(known), log, say=lambda _: None).train()
            )
        found.append(costs_of(RunDir(tmp_path / str(split))))
    assert found[1].score.token == pytest.approx(found[0].score.token, rel=0.1)


def test_what_a_gpu_costs_follows_from_its_data_sheet() -> None:
    """8 GB of weights at 5.6 TB/s are 1.43 ms; 147,456 bytes of keys and values 26 ns; 8 GFLOP at 0.9 PFLOP/s 9 µs."""
    found = costs_on(B200, QWEN3_4B, QWEN3_30B_A3B, costs().lengths, Reached())
    assert found.decode.step == pytest.approx(3e-3 + 8e9 / 5.6e12)
    assert found.decode.context == pytest.approx(2 * 36 * 1024 * 2 / 5.6e12)
    assert found.decode.row == pytest.approx(Reached().per_row + 8e9 / 0.9e15)
    assert found.learn.token == pytest.approx(8 * 4e9 / (0.25 * 2.25e15))
    assert found.score.token == pytest.approx(2 * 3.3e9 / (0.1 * 2.25e15))
    assert room(B200, QWEN3_4B, context=1000) == int((153e9 - 8e9) / 147456 / 1000)


# --- the command ------------------------------------------------------------------------------------------------------


def config(**sections: Any) -> Config:
    return parse_config(
        {
            "student": "builtin:student",
            "updates": 12,
            "teachers": {"main": {"model": "builtin:teacher"}},
            "checkpoint": {"minutes": 0},
            **sections,
        }
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text(to_toml(config(learner={"batch_size": 8}, updates=6)))
    Path("costs.toml").write_text(costs().to_toml())
    return tmp_path


def test_schedules_are_those_that_the_config_could_have() -> None:
    names = [each.label for each in PlannedConfig(config(schedule={"kind": "async", "tau": 2})).schedules]
    assert names == ["sync", "periodic", "step_off(1)", "step_off(2)", "async(1)", "async(4)", "async(2)"]
    several = PlannedConfig(config(learner={"batch_size": 8, "minibatches": 2})).schedules
    assert "periodic" not in [each.label for each in several]


def test_a_plan_is_a_table(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train.toml", "--costs", "costs.toml"]) == 0
    out, err = capsys.readouterr()
    out = out[out.index("best splits of 3 devices") :]  # a slow machine says before this what it waits for
    assert "async(4) *" in out and "with 4" in out and err == ""
    assert all(len(line) <= 80 for line in out.splitlines())


def test_and_plain_numbers(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.runs.display.FIRST_LINE", 0.0)  # as if it took long
    assert main(["plan", "train.toml", "--costs=costs.toml", "--json", "--learner.batch_size", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 3 and found["best"]["sync"]["split"] == {"samplers": 1, "scorers": 1, "ranks": 1}
    seen = outlook(costs(), Work.of(config(learner={"batch_size": 4})), devices=3, updates=6, schedules=[Sync()])
    assert found["best"]["sync"] == numbers(seen)["best"]["sync"]


def test_engines_of_one_process_share_one_core(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "train.toml", "--costs", "costs.toml", "--json", "--learner.batch_size", "4"]
    assert main([*words, "--runtime.kind", "inline"]) == 0
    out, err = capsys.readouterr()
    assert 'note: runtime.kind = "inline" has all engines in one process: cores = 1' in err
    one = costs().model_copy(update={"cores": 1.0})
    seen = outlook(one, Work.of(config(learner={"batch_size": 4})), devices=3, updates=6, schedules=[Sync()])
    assert json.loads(out)["best"]["sync"] == numbers(seen)["best"]["sync"]


def test_and_a_page_with_figures(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "train.toml", "--costs", "costs.toml", "--learner.batch_size", "4"]
    assert main([*words, "--report", "plan.html"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].endswith("figures are in plan.html")
    text = Path("plan.html").read_text()
    again = " ".join(["slipstream", *words[:4], "--report plan.html", *words[4:]])
    assert text.count("<figure") == 3 and f"<code>{again}</code>" in text
    assert "The config has async(4), and 6 updates" in text and "[decode]" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["train.toml"],
            "train.toml: nothing gives the costs of its stages: write --measure to measure its engines, or ",
        ),
        (["train.toml", "--costs", "none.toml"], "none.toml: no such file"),
        (["train.toml", "--costs", "costs.toml", "--measure"], "argument --measure: not allowed with argument --costs"),
        (
            ["train.toml", "--costs", "costs.toml", "--devices", "2"],
            "--devices 2: sampler, scorer and learner need one each: write 3 or more",
        ),
        (
            [
                "train.toml",
                "--costs",
                "costs.toml",
                "--devices",
                "1",
                "--teachers.main.base_url",
                "http://127.0.0.1:1/v1",
                "--loss.m",
                "1",
            ],
            "--devices 1: sampler and learner need one each: write 2 or more",
        ),
        (["train.toml", "--costs", "costs.toml", "--devices", "9999"], "--devices 9999: at most 256 can be planned"),
        (["train.toml", "--costs", "costs.toml", "--report", "costs.toml"], "costs.toml exists and is no HTML page: "),
        (
            ["train.toml", "--costs", "costs.toml", "--devices", "4", "--runtime.kind", "inline"],
            '--devices: runtime.kind = "inline" has all engines in one process: write "local" or "ray"',
        ),
        (["train.toml", "--costs", "costs.toml", "-o", "costs.toml"], "costs.toml exists: -o writes a new file"),
        (
            ["train.toml", "--costs", "costs.toml", "--report", "nowhere/plan.html"],
            "nowhere/plan.html cannot be written: there is no nowhere",
        ),
        (["."], ". holds no run: there is no config.toml in it"),
    ],
)
def test_what_is_missing_is_said(words: list[str], line: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {line}")


def test_costs_are_measured_by_the_engines_of_a_config(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--runtime.kind",
        "inline",
        "--learner.batch_size",
        "4",
        "--sampler.slots",
        "8",
        "--sampler.max_tokens",
        "8",
    ]
    assert main(["plan", "train.toml", "--measure", "-o", "found.toml", "--loss.m", "2", *small]) == 0
    out, err = capsys.readouterr()
    assert "async(4) *" in out and "costs are in found.toml" in err
    found = load("found.toml")
    assert found.cores == 1 and found.decode.step + found.decode.row > 0 and found.learn.token + found.learn.call > 0
    assert found.coordinator > 0 and max(found.lengths.responses) <= 8 and found.lengths.prompt > 1
