"""Study files, numbers of several seeds, and the content of a study's directory."""

import csv
import io
import json
import sys
import time
import tomllib
from math import atan, inf, pi, sqrt
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from rich.console import Console

from slipstream.commands.sweep import write_results as tell_files
from slipstream.config.file import parse
from slipstream.errors import ConfigError, RunDirError
from slipstream.reporting.report.study import comparison
from slipstream.reporting.report.study_figures import row_in
from slipstream.run_dir.reading import RunDir
from slipstream.statistics import Estimate, difference, estimate, holm, p_value, slope, verdict
from slipstream.studies.board import Board, Columns, seconds_left, summary, text_of
from slipstream.studies.cells import Event, Job
from slipstream.studies.directory import (
    Checked,
    check_prompts,
    check_unchanged,
    cores_of_cell,
    finish_cell,
    parallel_cells,
    parquet_column,
    write_csv,
    write_parquet,
)
from slipstream.studies.results import Sweep, value_of_measure
from slipstream.studies.study import Study, file_name
from slipstream.studies.table import Claim, SweepConfig
from support.small_study import STUDY


def study(**overrides: str) -> Study:
    return Study(tomllib.loads(STUDY), [(key.replace("__", "."), text) for key, text in overrides.items()])


# --- what a file says --------------------------------------------------------------------------------------


def test_cells_are_all_combinations_seed_by_seed() -> None:
    cells = study().cells
    assert [cell.name for cell in cells] == [
        f"{arm}, schedule.k = {k}, seed {seed}" for seed in (1, 2) for arm in ("reverse", "forward") for k in (0, 1)
    ]
    assert cells[3].folder == Path("forward/schedule.k=1/seed-1")
    losses = [(c.config.loss.kind, c.config.schedule.k, c.config.seed) for c in cells[:4]]
    assert losses == [("reverse_kl_mc", 0, 1), ("reverse_kl_mc", 1, 1), ("forward_kl", 0, 1), ("forward_kl", 1, 1)]
    assert cells[0].config.loss.m == 4
    assert study().varied == ["loss.kind", "loss.m", "schedule.k", "loss.k"]


def test_a_study_may_be_shorter_than_the_default_of_the_updates_that_are_measured() -> None:
    short = STUDY.replace("last = 2\n", "")
    assert short != STUDY
    made = Study(tomllib.loads(short), [])
    assert made.sweep.last == 20 > made.points[0].config.updates == 2


def test_lists_along_the_axis_are_points_like_others() -> None:
    made = study(
        sweep__x="learner.betas",
        sweep__grid='{"learner.betas" = [[0.9, 0.95], [0.9, 0.99]], "schedule.k" = [0]}',
        sweep__claims='[{says = "it falls", less = "reverse", than = "forward", at = "[0.9, 0.95]"}]',
    )
    assert [point.x for point in made.points] == ["[0.9, 0.95]", "[0.9, 0.99]"] * 2
    assert made.points[0].config.learner.betas == (0.9, 0.95)


def test_arms_may_have_grids_of_their_own_and_settings_that_are_not_varied() -> None:
    arms = {
        "sync": {"schedule": {"kind": "sync"}, "grid": {"schedule": {"k": []}}},
        "off": {"schedule": {"kind": "step_off"}, "grid": {"schedule.k": [1, 2]}},
        "auto": {"schedule": {"kind": "async", "tau": "auto"}, "grid": {"schedule": {"k": []}}},
        "async": {"schedule.kind": "async", "grid": {"schedule.k": [], "schedule.tau": [1, 4]}},
        "fixed": {"schedule": {"k": 7}},
    }
    tree = tomllib.loads(STUDY)
    tree["sweep"] |= {"arms": arms, "claims": []}
    points = Study(tree).points
    assert [point.name for point in points] == [
        "sync",
        "off, schedule.k = 1",
        "off, schedule.k = 2",
        "auto",
        "async, schedule.tau = 1",
        "async, schedule.tau = 4",
        "fixed",
    ]
    assert [point.x for point in points] == [None, 1, 2, None, None, None, 7]
    assert [point.series for point in points][4:] == ["async, schedule.tau = 1", "async, schedule.tau = 4", "fixed"]


def test_all_arms_are_compared_under_every_condition() -> None:
    tree = tomllib.loads(STUDY)
    del tree["sweep"]["grid"], tree["sweep"]["x"]
    tree["sweep"]["conditions"] = {
        "fresh": {"schedule": {"kind": "sync"}},
        "stale": {"schedule": {"kind": "replay", "k": 3}},
    }
    tree["sweep"]["claims"] = [{"says": "it falls", "less": "reverse", "than": "forward", "at": "stale"}]
    one = Study(tree)
    assert [point.name for point in one.points] == [
        f"{arm}, condition = {name}" for arm in ("reverse", "forward") for name in ("fresh", "stale")
    ]
    assert [(p.x, p.series, p.config.schedule.kind) for p in one.points[:2]] == [
        ("fresh", "reverse", "sync"),
        ("stale", "reverse", "replay"),
    ]
    assert one.x == "condition" and one.varied == ["loss.kind", "loss.m", "loss.k", "schedule.kind", "schedule.k"]
    assert one.cells[1].folder == Path("reverse/condition=stale/seed-1")
    assert [cell.config for cell in Study(one.tree).cells] == [cell.config for cell in one.cells]


def test_without_arms_there_is_one() -> None:
    tree = tomllib.loads(STUDY)
    del tree["sweep"]["arms"], tree["sweep"]["claims"]
    assert [point.name for point in Study(tree).points] == ["all, schedule.k = 0", "all, schedule.k = 1"]


def test_a_long_value_has_a_directory() -> None:
    """File systems allow names of 255 bytes."""
    names = [file_name(f"data.system_prompt={text}") for text in ("short", "请" * 100, "请" * 101)]
    assert names[0] == "data.system_prompt=short" and len(set(names)) == 3 and max(map(len, names)) == 255


def test_a_study_is_written_as_it_was_read() -> None:
    one = study(**{"learner.lr": "1e-4", "sweep.seeds": "[3]", "output": "elsewhere", "loss.clip": "none"})
    assert one.output == "elsewhere" and one.cells[0].config.output is None
    again = Study(tomllib.loads(tomli_w.dumps(one.tree)))
    assert [cell.config for cell in again.cells] == [cell.config for cell in one.cells]
    assert again.sweep == one.sweep and again.cells[0].config.learner.lr == 1e-4


NO_SEEDS = STUDY.replace("seeds = [1, 2]\n", "")
MISTAKES = {
    (): (STUDY.partition("[sweep]")[0], "study is no study: it has no table [sweep]"),
    ("a",): (NO_SEEDS, "study: 'sweep.seeds' is missing: Seeds; every combination of settings runs "),
    ("sweep.mesure=1",): (STUDY, "study: unknown key 'sweep.mesure'; did you mean 'measure'?"),
    ("sweep.seeds=3",): (STUDY, "study: sweep.seeds: input should be a valid array, got 3"),
    ("sweep.seeds=[1, 1]",): (STUDY, "study: sweep.seeds: 1 is given twice: write it once"),
    ("sweep.seeds=[]",): (STUDY, "study: sweep.seeds: tuple should have at least 1 item"),
    ("seed=3",): (STUDY, "study: seed does nothing in a study: sweep.seeds are the seeds"),
    ("sweep.grid.seed=[1]",): (STUDY, "study: seed cannot be varied: sweep.seeds are the seeds"),
    ("sweep.arms.forward.output=x",): (STUDY, "study: forward: output cannot be varied: output is the directory of"),
    ("sweep.grid.schedule.k=3",): (STUDY, "study: schedule.k in a grid is a list of values, got 3"),
    ("sweep.grid.schedule.k=[0, 0]",): (STUDY, "study: schedule.k has a value twice in [0, 0]: write each once"),
    ("sweep.arms.forward.grid=3",): (STUDY, "study: sweep.arms.forward.grid is a table of settings and lists of"),
    ("sweep.conditions.long.grid.learner.lr=[1e-5]",): (STUDY, "study: the condition long has a grid: write a conditi"),
    ("sweep.conditions.long.loss.m=8",): (STUDY, "study: reverse and long both set loss.m: drop one of them"),
    ("sweep.title.a=3",): (STUDY, "--sweep.title.a: title is a value, not a table"),
    ("schedule.k=3",): (STUDY, "study: --schedule.k does nothing, as the study sets it everywhere: write --sw"),
    ("sweep.arms.forward.loss.kk=1",): (STUDY, "study: forward, schedule.k = 0: unknown key 'loss.kk'; did you mean"),
    ("sweep.arms.forward.loss.kind=reverse_kl_mc", "sweep.arms.forward.loss.k=4"): (
        STUDY,
        "study: forward, schedule.k = 0: unknown key 'loss.k'; known: advantage",
    ),
    ("sweep.grid.learner.lr=[1e-5, -1]",): (STUDY, "study: reverse, schedule.k = 0, learner.lr = -1: learner.lr: inpu"),
    ("sweep.arms.third.loss.kind=forward_kl", "sweep.arms.third.loss.k=8"): (
        STUDY,
        "study: third, schedule.k = 0 and forward, schedule.k = 0 are the same run: drop one of them",
    ),
    ("sweep.x=schedule.kk",): (STUDY, "study: sweep.x = 'schedule.kk' is no setting of any run; did you mean 'schedu"),
    ("sweep.measure=reward/math",): (
        STUDY,
        "study: sweep.measure = 'reward/math': reverse, schedule.k = 0 has no such reward; did you mean 'reward",
    ),
    ("sweep.measure=los",): (STUDY, "study: sweep.measure: 'los' is no metric; did you mean 'loss'?"),
    ("sweep.measure=qqqqqqqq",): (STUDY, "study: sweep.measure: 'qqqqqqqq' is no metric; docs/metrics.md has all nam"),
    ("sweep.measure=eval/accuracy",): (
        STUDY,
        "study: sweep.measure = 'eval/accuracy': reverse, schedule.k = 0 evaluates nothing: set eval.every",
    ),
    ("sweep.measure=eval/acuracy",): (STUDY, "study: sweep.measure: 'eval/acuracy'; did you mean 'eval/accuracy'?"),
    ("sweep.last=3",): (STUDY, "study: sweep.last = 3 is more than the 2 updates of reverse, schedule.k = 0"),
    ("sweep.grid.schedule.k=[0]",): (
        STUDY,
        "study: the claim 'reverse falls': slope needs numbers along x, two at lea",
    ),
    ('sweep.claims=[{says="a", less="forwrd", than="reverse"}]',): (
        STUDY,
        "study: the claim 'a': no arm 'forwrd'; did you mean 'forward'?",
    ),
    ('sweep.claims=[{says="a", less=1, than=2}]',): (STUDY, "study: the claim 'a' compares two numbers: name an arm"),
    ('sweep.claims=[{says="a", less="forward"}]',): (
        STUDY,
        "study: 'sweep.claims.0.than' is missing: Arm, series or number that `less` is compared with.",
    ),
    ('sweep.claims=[{says="a", less="forward", than="reverse", at=2}]',): (
        STUDY,
        "study: the claim 'a': forward has no x = 2; known: 0, 1",
    ),
    ("sweep.arms.forward.grid.schedule.k=[3]", 'sweep.claims=[{says="a", less="forward", than="reverse"}]'): (
        STUDY,
        "study: the claim 'a': forward and reverse have no x in common: name other arms",
    ),
    ('sweep.claims=[{says="a", less="forward", than="reverse", than_at=1}]',): (
        STUDY,
        "study: the claim 'a': than_at is the x of than, and at that of less: give both",
    ),
    ('sweep.claims=[{says="a", less="forward", than=0, at=1, than_at=0}]',): (
        STUDY,
        "study: the claim 'a': than is a number, which is the same everywhere: drop than_at",
    ),
    ('sweep.claims=[{says="a", less="forward", than="forward", at=1}]',): (
        STUDY,
        "study: the claim 'a' compares an arm with itself: name another one, or give at and than_at",
    ),
    ('sweep.claims=[{says="a", less="forward", than="reverse", at=1, than_at=2}]',): (
        STUDY,
        "study: the claim 'a': reverse has no x = 2; known: 0, 1",
    ),
    ('sweep.claims=[{says="a", less="forward", than="reverse", at=1, slope=true}]',): (
        STUDY,
        "study: the claim 'a': a slope is over all x: drop at, or slope",
    ),
    ('sweep.claims=[{says="a", less="forward", than=0, measure="loss"}]',): (
        STUDY,
        "study: the claim 'a': measure = 'loss'; known: reward/exact, tokens",
    ),
}


@pytest.mark.parametrize("changes", MISTAKES, ids="; ".join)
def test_a_mistake_is_one_line(changes: tuple[str, ...]) -> None:
    text, line = MISTAKES[changes]
    overrides = [(key, value) for key, equals, value in (each.partition("=") for each in changes) if equals]
    with pytest.raises(ConfigError) as caught:
        Study(tomllib.loads(text), overrides)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_a_narrow_terminal_shows_whole_columns_and_names_the_others() -> None:
    rows = [("reverse, schedule.k = 10", "2815 ± 130", "0.5621 ± 0.0059"), ("forward", "6353 ± 300", "0.4 ± 0.01")]
    table = Columns(["", "tokens_per_s", "minus reverse, 0.1, by seed"], rows)

    def drawn(width: int) -> list[str]:
        console = Console(width=width)
        with console.capture() as caught:
            console.print(table)
        return [line.rstrip() for line in caught.get().splitlines()]

    assert drawn(80)[1:] == [
        "                          tokens_per_s     0.1, by seed",
        "reverse, schedule.k = 10    2815 ± 130  0.5621 ± 0.0059",
        "forward                     6353 ± 300       0.4 ± 0.01",
    ]
    assert drawn(50)[1:] == [
        "reverse, schedule.k = 10    2815 ± 130",
        "forward                     6353 ± 300",
        "columns left out: minus reverse, 0.1, by seed",
    ]
    assert [text_of(Estimate(5, *each)) for each in ((2815.2, 130.4), (0.56213, 0.00588), (3e-7, None))] == [
        "2815 ± 130",
        "0.5621 ± 0.0059",
        "3e-07 ± –",
    ]


def test_so_many_cells_run_as_there_are_cores_and_memory_for() -> None:
    points, room = study().points, [Checked((), "", on_cpu=True, room=3), Checked((), "", on_cpu=True, room=9)]
    assert [parallel_cells(points, room, cores) for cores in (1, 2, 8)] == [1, 2, 3]
    assert parallel_cells(study(runtime__threads="4").points, room, 8) == 2
    assert parallel_cells(points, [Checked((), "", on_cpu=True, room=0)], 8) == 1
    assert parallel_cells(points, [*room, Checked((), "", on_cpu=False, room=9)], 8) == 1


def test_a_cell_takes_as_many_cores_as_it_has_engines_at_work() -> None:
    assert cores_of_cell(study().cells[0].config) == 1
    assert cores_of_cell(study(runtime__threads="3").cells[0].config) == 3
    more = {"runtime.kind": "local", "sampler.replicas": "2", "learner.threads": "4", "learner.ranks": "2"}
    assert cores_of_cell(study(**more).cells[0].config) == 2 + 1 + 2 * 4


def test_who_compares_rewards_of_old_samples_is_told_of_whom_they_are() -> None:
    assert study(sweep__grid__schedule__k="[0, 1]").notes == []
    (note,) = study(sweep__grid__schedule__k="[0, 8]").notes
    assert note.startswith("sweep.measure = 'reward/exact' measures the student that sampled, up to 8 updates earlier")


# --- numbers -----------------------------------------------------------------------------------------------


def test_a_mean_has_its_standard_error() -> None:
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, sd² = 14 / 3, se = √(14 / 3 / 4)
    assert estimate([1, 2, 3, 6]) == Estimate(4, 3.0, pytest.approx(sqrt(14 / 12)))
    assert estimate([5]) == Estimate(1, 5.0, None)
    assert estimate([]) == Estimate(0, None, None)
    assert estimate([0.1, 0.2, -0.3]).mean == 0  # and not 9e-18


def test_a_value_that_is_not_finite_decides_nothing() -> None:
    found = difference({0: -inf, 1: 5.0, 2: 5.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert p_value(found) is None and verdict(found, p_value(found)) == "open"


def test_differences_are_paired_by_seed() -> None:
    # seeds 2, 3, 4 are in both: −1, −2, −3; mean −2, sd 1
    found = difference({1: 9.0, 2: 1.0, 3: 2.0, 4: 3.0}, {2: 2.0, 3: 4.0, 4: 6.0, 5: 0.0})
    assert found == Estimate(3, -2.0, pytest.approx(1 / sqrt(3)))


def test_what_is_common_to_a_seed_falls_out_of_a_paired_difference() -> None:
    one, noise = {1: 0.1, 2: 0.2, 3: 0.4}, {1: 5.0, 2: -9.0, 3: 7.0}
    other = {1: 0.3, 2: 0.1, 3: 0.2}
    shifted = difference({s: v + noise[s] for s, v in one.items()}, {s: v + noise[s] for s, v in other.items()})
    plain = difference(one, other)
    assert plain.n == shifted.n and shifted.mean == pytest.approx(plain.mean) and shifted.se == pytest.approx(plain.se)


def test_a_slope_is_against_the_logarithm() -> None:
    xs = [0, 1, 3, 7]  # logarithms 0, 1, 2, 3
    assert slope(xs, [5, 3, 1, -1]) == pytest.approx(-2)
    # 1, 0, 2, 3 against 0 … 3: Σ (x − 1.5)(y − 1.5) = 0.75 + 0.75 + 0.25 + 2.25 = 4, Σ (x − 1.5)² = 5
    assert slope(xs, [1, 0, 2, 3]) == pytest.approx(4 / 5)
    rates = [1e-4, 2e-4, 4e-4]  # of doublings; log2(1e-4 + 1) and log2(4e-4 + 1) are nearly equal
    assert slope(rates, [0.1, 0.3, 0.5], shift=0) == pytest.approx(0.2)
    ys = [0.3, 0.1, 0.7]
    assert slope([0, 4, 16], ys) == pytest.approx(-slope([0, 4, 16], [1 - y for y in ys]))


@pytest.mark.parametrize(
    ("mean", "se", "n", "said"),
    [
        # two-sided 5 % points of Student's t with 4, 2 and 1 degrees of freedom: 2.776, 4.303, 12.706
        (-2.78, 1.0, 5, "holds"),
        (2.78, 1.0, 5, "does not hold"),
        (-2.77, 1.0, 5, "open"),
        (-4.31, 1.0, 3, "holds"),
        (-4.30, 1.0, 3, "open"),
        (-12.71, 1.0, 2, "holds"),
        (-12.70, 1.0, 2, "open"),
        (0.0, 0.0, 5, "open"),
        # equal differences: a half for each further sign
        (-0.1, 0.0, 2, "open"),
        (-0.1, 1e-17, 5, "open"),
        (-0.1, 0.0, 6, "holds"),
        (-9.0, None, 1, "open"),
        (None, None, 0, "open"),
    ],
)
def test_a_claim_is_decided_by_its_p_value(mean: float | None, se: float | None, n: int, said: str) -> None:
    found = Estimate(n, mean, se)
    assert verdict(found, p_value(found)) == said


def test_of_claims_about_nothing_at_most_one_in_twenty_is_decided() -> None:
    rng = np.random.default_rng(0)
    for seeds in (2, 3, 5):
        decided = [
            verdict(found, p_value(found)) != "open"
            for found in (estimate(list(rng.normal(size=seeds))) for _ in range(4000))
        ]
        assert 0.04 < np.mean(decided) < 0.06  # two standard errors of this mean are 0.007


def test_a_measure_is_of_the_end() -> None:
    updates = [{"loss": 4.0, "time": 1.0}, {"loss": 2.0, "time": 2.0}, {"time": 3.0}, {"loss": 1.0, "time": 4.0}]
    evaluations = [{"accuracy": 0.1}, {"accuracy": 0.2}, {"accuracy": 0.3, "set": "hard"}]
    assert value_of_measure("loss", updates, [], last=3) == 1.5
    assert value_of_measure("loss", updates, [], last=2) == 1.0
    assert value_of_measure("time", updates, [], last=3) == 4.0
    totals = [{"thrown_tokens": 100.0 * n, "dropped/too old": 1.0 * n} for n in range(1, 41)]
    assert value_of_measure("thrown_tokens", totals, [], last=20) == 4000.0
    assert value_of_measure("dropped/too old", totals, [], last=20) == 40.0
    assert value_of_measure("collapse/reward/exact", [{"reward/exact": 0.5}] * 19, [], last=9) is None
    assert value_of_measure("collapse/reward/exact", [{"reward/exact": 0.5}] * 20, [], last=9) == 0.0
    assert value_of_measure("eval/accuracy", updates, evaluations, last=3) == 0.2
    assert value_of_measure("eval/hard/accuracy", updates, evaluations, last=3) == 0.3
    assert value_of_measure("reward/exact", updates, [], last=4) is None
    assert value_of_measure("eval/accuracy", updates, [], last=4) is None
    by_kl = [
        {"update": update, "kl": kl, **of} for update, kl, of in ((0, 2.0, {}), (2, 0.5, {}), (2, 0.25, {"set": "a"}))
    ]
    assert [value_of_measure(name, updates, by_kl, last=1) for name in ("eval/kl", "eval/a/kl", "eval/accuracy")] == [
        0.5,
        0.25,
        None,
    ]
    rewards = [{"reward/exact": value} for value in [0.6] * 40 + [0.1] * 40]
    assert value_of_measure("collapse/reward/exact", rewards, [], last=3) == 1
    assert value_of_measure("collapse/reward/exact", rewards[:40], [], last=3) == 0
    assert value_of_measure("peak_to_end/reward/exact", rewards, [], last=3) == pytest.approx(0.5)
    assert value_of_measure("collapse/reward/exact", updates, [], last=3) is None


def test_what_is_left_is_shared_out() -> None:
    assert seconds_left([10, 10, 10, 10], 2) == 20
    assert seconds_left([30, 10], 2) == 30
    assert seconds_left([], 2) == 0


# --- a directory -------------------------------------------------------------------------------------------


def written(path: Path, of: Study, values: dict[tuple[str, int, int], float]) -> Sweep:
    """Write cells as if they had been run: their reward by arm, x and seed."""
    path.mkdir()
    (path / "study.toml").write_text(tomli_w.dumps(of.tree))
    for cell in Sweep(path).cells:
        if (value := values.get((cell.point.arm, cell.point.x, cell.seed))) is not None:
            cell.path.mkdir(parents=True)
            (cell.path / "config.toml").write_text('student = "builtin:student"\nloss.weight = 0\n')
            lines = [{"kind": "train", "update": 1, "reward/exact": 9.0, "tokens": 1}] * 3
            lines += [{"kind": "train", "update": n, "reward/exact": value, "tokens": 1} for n in (4, 5)]
            (cell.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            done = {"config": cell.config.model_dump(mode="json"), "seconds": 2.0, "cpu_seconds": 3.0, "updates": 5}
            done["tokens"] = 7.0
            (cell.path / "cell.json").write_text(json.dumps(done))
            (cell.path / "meta.json").write_text(json.dumps({"config": {}, "prompts": "these"}))
    return Sweep(path)


VALUES = {
    ("reverse", 0, 1): 0.8,
    ("reverse", 0, 2): 0.6,
    ("reverse", 1, 1): 0.5,
    ("reverse", 1, 2): 0.4,
    ("forward", 0, 1): 0.5,
    ("forward", 0, 2): 0.4,
    ("forward", 1, 1): 0.6,
}


CLAMPS = {
    "sweep__arms": '{forward = {loss = {kind = "forward_kl", k = 4}}}',
    "sweep__x": "loss.log_prob_min_clamp",
    "sweep__grid": '{"loss.log_prob_min_clamp" = [-20, -5], "schedule.k" = [0]}',
    "sweep__claims": "[]",
}


def test_a_study_along_negative_numbers_has_results_and_no_slopes(tmp_path: Path) -> None:
    made = study(**CLAMPS)
    values = {("forward", x, seed): 0.5 - x / 100 for x in (-20, -5) for seed in (1, 2)}
    sweep = written(tmp_path / "study", made, values)
    assert [row.mean for row in sweep.table()] == pytest.approx([0.7, 0.55]) and sweep.slopes() == {}
    assert list(summary(sweep))
    with pytest.raises(ConfigError, match=r"a slope is against log2\(x \+ 1\), and x has -20: drop slope"):
        study(**CLAMPS | {"sweep__claims": '[{says = "it falls", less = "forward", than = 0, slope = true}]'})


def test_results_are_read_from_finished_cells(tmp_path: Path) -> None:
    claims = (
        '[{says="at 0", less="forward", than="reverse", at=0}, {says="all", less="forward", than="reverse"},'
        '{says="falls", less="reverse", than=0, slope=true}, {says="level", less=-9, than="reverse", at=0},'
        '{says="rises", less="reverse", at=0, than="reverse", than_at=1}]'
    )
    sweep = written(tmp_path / "study", study(sweep__claims=claims), VALUES)
    assert [cell.finished for cell in sweep.cells] == [True] * 7 + [False]
    table = sweep.table()
    assert [(row.series, row.x, row.n) for row in table] == [
        ("reverse", 0, 2),
        ("reverse", 1, 2),
        ("forward", 0, 2),
        ("forward", 1, 1),
    ]
    assert [row.mean for row in table] == pytest.approx([0.7, 0.45, 0.45, 0.6])
    # of two numbers a and b the standard error is |a − b| / 2
    assert [row.se for row in table[:3]] == pytest.approx([0.1, 0.05, 0.05]) and table[3].se is None
    assert [row.mean for row in sweep.table("tokens")] == [1.0] * 4
    d = sweep.differences()
    assert [(each.series, each.base, each.x, each.difference.n) for each in d] == [
        ("forward", "reverse", 0, 2),
        ("forward", "reverse", 1, 1),
    ]
    assert d[0].difference.mean == pytest.approx(-0.25) and d[0].difference.se == pytest.approx(0.05)  # −0.3 and −0.2
    reverse, forward = sweep.slopes().values()  # log2(1) = 0 and log2(2) = 1: one less the other
    assert reverse == Estimate(2, pytest.approx(-0.25), pytest.approx(0.05))
    assert forward == Estimate(1, pytest.approx(0.1), None)  # seed 2 has no other x
    at_0, everywhere, falls, level, rises = sweep.claims()
    assert (at_0.verdict, at_0.difference.n) == (
        "open",
        2,
    )  # five standard errors; two seeds need 12.7, and Holm's method more
    # seed 1 alone is everywhere: (0.5 + 0.6) / 2 − (0.8 + 0.5) / 2
    assert (everywhere.verdict, everywhere.difference) == ("open", Estimate(1, pytest.approx(-0.1), None))
    assert falls.verdict == "open" and falls.difference.mean == pytest.approx(-0.25)
    assert level.verdict == "holds" and level.difference.mean == pytest.approx(-9 - 0.7)  # 97 standard errors
    assert rises.verdict == "open" and rises.difference.mean == pytest.approx(0.25)
    assert comparison(rises, row_in(sweep, "reward/exact")) == "Reward exact: reverse at 0 − reverse at 1"
    # t = 5 and t = 97 with one degree of freedom, times the number of claims that have no smaller p
    assert at_0.p == falls.p == pytest.approx(4 * (1 - 2 / pi * atan(5)))
    assert level.p == pytest.approx(5 * (1 - 2 / pi * atan(97))) and everywhere.p is None


@pytest.mark.parametrize(("t", "n"), [(12.7062, 2), (4.30265, 3), (2.77645, 5), (2.57058, 6), (2.26216, 10)])
def test_p_values_are_those_of_students_t(t: float, n: int) -> None:
    """The two-sided 5 % quantiles of published tables."""
    assert p_value(Estimate(n, -t, 1.0)) == pytest.approx(0.05, abs=1e-6)


def test_holm_corrects_for_the_number_of_claims() -> None:
    assert holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
    assert holm([0.01, 0.04, None, 0.03]) == [0.04, 0.09, None, 0.09], "a claim without a result yet is one of four"
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []
    assert p_value(Estimate(1, 0.3, None)) is None


def test_rows_are_written_as_csv_and_parquet(tmp_path: Path) -> None:
    import pyarrow.parquet

    sweep = written(tmp_path / "study", study(), VALUES)
    rows = list(csv.DictReader(write_csv(sweep).read_text().splitlines()))
    assert len(rows) == 7
    names = ("arm", "loss.kind", "loss.m", "loss.k", "schedule.k", "seed")
    assert [rows[5][name] for name in names] == ["reverse", "reverse_kl_mc", "4", "", "1", "2"]
    assert rows[5]["reward/exact"] == "0.4" and rows[5]["path"] == "cells/reverse/schedule.k=1/seed-2"
    path = write_parquet(sweep)
    assert path is not None
    assert [
        {key: "" if v is None else str(v) for key, v in row.items()}
        for row in pyarrow.parquet.read_table(path).to_pylist()
    ] == rows


def test_without_pyarrow_a_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, told = written(tmp_path / "study", study(), VALUES), list[str]()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    tell_files(sweep, told.append)
    assert told == [
        f"results: {tmp_path}/study/results.csv",
        "results.parquet is not written, it needs pyarrow: pip install 'slipstream[data]'",
    ]
    assert not (tmp_path / "study" / "results.parquet").exists()


def test_a_column_has_one_type() -> None:
    assert parquet_column([1, 2.5, None]) == [1, 2.5, None]
    assert parquet_column(["a", None]) == ["a", None] and parquet_column([True, False]) == [True, False]
    assert parquet_column([4, "auto"]) == ["4", "auto"]
    assert parquet_column([[1, 2], None]) == ["[1, 2]", None]


def test_no_cell_is_kept_that_was_another_run(tmp_path: Path) -> None:
    sweep = written(tmp_path / "study", study(), VALUES)
    check_unchanged(sweep)
    check_unchanged(Sweep(sweep.path, study(sweep__seeds="[1, 2, 3]")))
    with pytest.raises(RunDirError, match=r"reverse/schedule.k=0/seed-1 was run with learner.lr = 1e-05, but the"):
        check_unchanged(Sweep(sweep.path, study(learner__lr="1e-4")))
    same = [Checked((), "these", on_cpu=True, room=8)] * 4
    check_prompts(sweep, same)
    other = [*same[:2], Checked((), "those", on_cpu=True, room=8), same[3]]
    with pytest.raises(RunDirError, match=r"^builtin:arithmetic has other prompts than .*forward/schedule.k=0"):
        check_prompts(sweep, other)
    (sweep.cells[0].path / "cell.json").write_text("{")
    for text in ("{", '{"config": {}}', '{"config": {}, "updates": 1, "tokens": 2.0, "seconds": 3.0}'):
        (sweep.cells[0].path / "cell.json").write_text(text)
        with pytest.raises(RunDirError, match=r"seed-1/cell.json is damaged: .*; remove "):
            check_unchanged(Sweep(sweep.path))


def test_a_cell_without_its_last_updates_is_damaged(tmp_path: Path) -> None:
    sweep = written(tmp_path / "study", study(), VALUES)
    metrics = sweep.cells[0].path / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(RunDirError, match=r"seed-1/metrics.jsonl is damaged: it ends at update \d+, and the cell at"):
        Sweep(sweep.path).table()


def test_a_measure_with_the_name_of_a_cost_has_its_own_column(tmp_path: Path) -> None:
    sweep = written(tmp_path / "study", study(sweep__measure='["tokens", "lag/mean"]', sweep__claims="[]"), VALUES)
    (row, *_), (cell, *_) = sweep.rows(), sweep.finished
    assert row["tokens"] == cell.done["tokens"] != row["measure/tokens"] and "measure/lag/mean" not in row


def test_a_measure_that_was_never_written_is_missed(tmp_path: Path) -> None:
    sweep = written(tmp_path / "study", study(sweep__measure="grad_norm", sweep__claims="[]"), VALUES)
    assert [row.n for row in sweep.table()] == [0] * 4 and sweep.rows()[0]["grad_norm"] is None
    said = [each for each in summary(sweep) if isinstance(each, str)]
    assert said == ["7 finished cells have no value of grad_norm: reverse, schedule.k = 0, seed 1 …"]


def test_what_holds_no_study_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=f"^{tmp_path} holds no study: there is no study.toml in it$"):
        Sweep(tmp_path)


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_large_goes_with_a_finished_cell(keep: bool, tmp_path: Path) -> None:
    for name in ("final/README.md", "final/model.safetensors", "checkpoints/2/model.safetensors", "config.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    lines = [{"kind": "train", "update": n, "tokens": 10 * n} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = study().cells[0].config
    finish_cell(tmp_path, config, time.monotonic(), keep=keep)
    assert RunDir(tmp_path).finished and (tmp_path / "final" / "README.md").exists()
    assert [(tmp_path / name).exists() for name in ("final/model.safetensors", "checkpoints")] == [keep, keep]
    done = json.loads((tmp_path / "cell.json").read_text())
    assert (done["updates"], done["tokens"]) == (2, 30) and parse(done["config"]) == config


# --- how far it is -----------------------------------------------------------------------------------------


def test_a_board_knows_how_far_a_study_is(tmp_path: Path) -> None:
    sweep = written(tmp_path / "study", study(), {key: value for key, value in VALUES.items() if key[0] == "reverse"})
    todo, now = [cell for cell in sweep.cells if not cell.finished], [0.0]
    board = Board(sweep, todo, 2, clock=lambda: now[0])
    jobs = [Job(cell.name, str, Path("output.txt"), 1.0, key=cell) for cell in todo]
    # four are left, and what is finished took 2 s: two at a time
    assert board.remaining() == ", about 0:04 left"
    for job in jobs[:2]:
        board.handle(Event(job, "begun"))
    now[0] = 6.0
    board.handle(Event(jobs[0], "moved", 1))
    # half of it in 6 s: 6 are left, and its like takes 12; for others the mean, (4 · 2 + 12) / 5 = 4: 6 + 12 + 4 + 4
    assert board.remaining() == ", about 0:13 left"
    board.handle(Event(jobs[1], "failed", "student: there is none", 6.0))
    assert board.line(Event(jobs[1], "failed", "student: there is none", 6.0)).startswith(
        "5/8  forward, schedule.k = 1, seed 1: failed: student: there is none; output.txt  (6 s, about 0:"
    )
    screen = Console(width=120, file=io.StringIO(), color_system=None)
    screen.print(board.panel())
    lines = [line.rstrip() for line in screen.file.getvalue().splitlines()]
    assert lines[0] == "Two losses"
    assert lines[1].startswith("4 of 8 cells finished, 1 running, 1 failed, 0:06, about 0:")
    assert lines[3].split("  ")[0] == "reverse, schedule.k = 0" and "✓✓" in lines[3] and "0.7 ± 0.1" in lines[3]
    assert "▸·" in lines[5] and "✗·" in lines[6] and "–" in lines[6]
    assert lines[7] == "forward, schedule.k = 0, seed 1 1/2"


def test_a_summary_says_what_came_out(tmp_path: Path) -> None:
    screen = Console(width=120, file=io.StringIO(), color_system=None)
    for each in summary(written(tmp_path / "study", study(), VALUES)):
        screen.print(each, soft_wrap=isinstance(each, str))
    lines = [" ".join(line.split()) for line in screen.file.getvalue().splitlines()]
    for line in (
        "reward/exact, mean ± standard error over seeds",
        "reverse, schedule.k = 0 2 0.7 ± 0.1",
        "forward, schedule.k = 0 2 0.45 ± 0.05 -0.25 ± 0.05 2",
        "forward, schedule.k = 1 1 0.6 ± – 0.1 ± – 1",
        "slopes of reward/exact against log2(schedule.k + 1)",
        "reverse -0.25 ± 0.05 2",
        "± –: only one seed, so no standard error (forward …)",
        "open: reverse is better (reward/exact: -0.1 ± –, 1 seeds, p = – (Holm))",
        "open: reverse falls (tokens: 0 ± 0, 2 seeds, p = 1 (Holm))",
    ):
        assert line in lines, lines


def test_every_key_of_a_study_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lab.md").read_text("utf-8")
    names = [*SweepConfig.settings(), *(name for name in Claim.settings() if name not in ("says", "measure"))]
    assert [name for name in names if f"`{name}`" not in page and f"`{name} = " not in page] == []
