"""Figures of a report: the numbers that they draw, and their titles."""

import json
import math
import re
from pathlib import Path

import pytest

from slipstream import metric_names as vocabulary
from slipstream.config.file import parse
from slipstream.metric_names import above, below
from slipstream.reporting.report import charts, figures, timeline
from slipstream.reporting.report.figures import Series
from slipstream.reporting.report.runs import Reading, binomial_error, changed_settings, read, unique_names
from slipstream.reporting.report.sections import held_out_of
from slipstream.reporting.report.titles import Change, change, course, duration, inside, mean_text, short
from support.written_runs import write_run

WORDS = {
    "N": "1", "LAGS": "2-3", "STAGE": "learn", "WORKER": "sampler", "TEACHER": "main", "REWARD": "exact",
    "CAUSE": "crash", "GUARD": "ess", "NAME": "steps", "MODE": "token_k1", "REASON": "too old", "ORIGIN": "data",
    "ENVIRONMENT": "doors",
}  # fmt: skip


def reading(path: Path, **given: object) -> Reading:
    return read([write_run(path, **given)])[0]  # type: ignore[arg-type]


# --- points ----------------------------------------------------------------------------------------------------


def test_a_long_curve_keeps_its_extremes_and_a_short_one_all_of_itself() -> None:
    y = [0.0] * 1000
    y[123], y[877] = 5.0, -5.0
    xs, ys = figures.thin(range(1000), y, most=40)
    assert len(xs) <= 40 and (max(ys), min(ys)) == (5.0, -5.0)
    assert xs[ys.index(5.0)] == 123 and xs == sorted(xs)
    assert figures.thin([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_the_mean_over_neighbours_leaves_a_line_where_it_is_and_levels_what_goes_up_and_down() -> None:
    assert figures.window(41) == 3 and figures.window(100) == 5 and figures.window(10_000) == 501
    flat = figures.smooth(range(100), [2.0] * 100)
    assert flat[1] == pytest.approx([2.0] * 100)
    xs, ys = figures.smooth(range(100), [float(x) for x in range(100)])
    assert ys[2:-2] == pytest.approx(xs[2:-2])
    # at the ends there are three of the five: (0 + 1 + 2) / 3
    assert ys[0] == 1.0 and ys[-1] == 98.0
    assert len(figures.smooth(range(5000), [1.0] * 5000)[0]) == figures.MEAN_POINTS


def test_an_axis_reaches_a_little_beyond_the_numbers_and_shows_a_band_that_is_near() -> None:
    assert figures.reach([1.0, 2.0, math.nan]) == (pytest.approx(0.94), pytest.approx(2.06))
    assert figures.reach([0.0, 1.0]) == (0.0, pytest.approx(1.06))
    assert figures.reach([3.0]) == (pytest.approx(2.7), pytest.approx(3.3)) and figures.reach([]) is None
    assert figures.beside(below(2.0), (0.0, 1.0)) == (0.0, pytest.approx(2.1))
    assert figures.beside(below(20.0), (0.0, 1.0)) == (0.0, 1.0)
    assert figures.beside(above(0.5), (0.8, 1.0)) == (pytest.approx(0.475), 1.0)


def test_the_healthy_part_of_a_figure_is_shaded_within_its_axes() -> None:
    drawn = figures.curves("", "", [Series("a", [1, 2], [0.0, 1.0])], x="", y="", band=below(2.0))
    (shape,) = drawn.layout["shapes"]
    assert (shape["y0"], shape["y1"]) == (0.0, 2.0) and drawn.layout["yaxis"]["range"] == [0.0, 2.1]
    far = figures.curves("", "", [Series("a", [1, 2], [0.0, 1.0])], x="", y="", band=above(50.0))
    assert (far.layout["shapes"][0]["y0"], far.layout["shapes"][0]["y1"]) == (1.06, 1.06)  # none of it is in sight


def test_many_points_are_a_faint_line_and_a_mean_and_few_are_points() -> None:
    few, many = Series("a", range(40), [1.0] * 40), Series("a", range(41), [1.0] * 41)
    assert [t["mode"] for t in figures.curves("", "", [few], x="", y="").data] == ["lines+markers"]
    assert [t["line"]["color"] for t in figures.curves("", "", [many], x="", y="").data] == [
        "var(--s1/0.3)",
        "var(--s1)",
    ]
    assert len(figures.curves("", "", [many], x="", y="", marks=True).data) == 1
    step = Series("a", range(100), [0.0] * 50 + [1.0] * 50)  # what is set, and not measured, has no mean
    (exact,) = figures.curves("", "", [step], x="", y="", exact=True).data
    assert exact["y"] == [0.0] * 50 + [1.0] * 50 and exact["line"]["color"] == "var(--s1)"


def test_runs_beyond_the_eighth_have_colours_again_and_other_lines() -> None:
    lines = [figures.points(Series("a", [1], [1.0], slot))[0]["line"] for slot in (0, 8, 16)]
    assert [line["color"] for line in lines] == ["var(--s1)"] * 3
    assert [line["dash"] for line in lines] == ["solid", "dash", "dot"]


def test_numbers_are_short_and_what_is_none_is_left_out() -> None:
    assert figures.numbers([1 / 3, math.nan, math.inf, None, 12345.678]) == [0.33333, None, None, None, 12346.0]
    assert figures.plain("<b>a & b</b>") == "&lt;b&gt;a &amp; b&lt;/b&gt;"


# --- findings --------------------------------------------------------------------------------------------------


def test_a_change_is_between_the_first_and_the_last_ten() -> None:
    assert change([0.0] * 10 + [9.0] * 7 + [1.0] * 10) == Change(0.0, 1.0, 0.0)
    assert change([1.0, 3.0]).error == math.inf and not change([1.0, 3.0]).is_significant
    # 0, 1, 0, 1 … has variance 10/36 over ten: √(2 · (10/36) / 10) = 0.2357
    assert change([0.0, 1.0] * 20).error == pytest.approx(math.sqrt(2 * 10 / 36 / 10))


@pytest.mark.parametrize(
    "runs, said",
    [
        ({"a": [1.0] * 20}, "It stayed at 1"),
        ({"a": [1.0] * 10 + [2.0] * 10}, "It rose from 1 to 2"),
        ({"a": [2.0] * 10 + [1.0] * 10}, "It fell from 2 to 1"),
        ({"a": [0.0, 1.0] * 10}, "It: 0.5 on average, no clear trend"),
        ({"a": [1.0], "b": [2.0]}, "It ended at 1 (a), 2 (b)"),
        ({"a": [1.0], "b": [1.0001]}, "It ended at 1 in every run"),
        ({name: [float(i)] for i, name in enumerate("abcd")}, "It ended between 0 (a) and 3 (d)"),
        ({"a": [1.0], "b": []}, "It stayed at 1"),
    ],
)
def test_a_title_says_where_it_went_or_where_it_ended(runs: dict[str, list[float]], said: str) -> None:
    assert course("It", runs) == said


def test_numbers_are_written_as_a_person_writes_them() -> None:
    numbers = (0.0, 0.00001234, 0.1234, 12.34, 1234.5, math.nan)
    assert short(0.2125, share=True) == short((0.2 + 0.225) / 2, share=True) == "21.2 %"
    assert [short(x) for x in numbers] == ["0", "1.2e-5", "0.123", "12.3", "1,234", "unknown"]
    assert short(0.1234, share=True) == "12.3 %"
    assert mean_text(0.62, 0.0058) == "0.6200 ± 0.0058" and mean_text(0.62, 0.0058, share=True) == "62.00 ± 0.58 %"
    assert [mean_text(None, None), mean_text(0.5, None), mean_text(0.5, 0.0)] == ["–", "0.5", "0.5 ± 0"]
    assert [mean_text(1e-4, 0.0), mean_text(3e-7, 2e-8)] == ["0.0001 ± 0", "3e-07 ± 2e-08"]


def test_a_time_is_told_in_the_units_that_it_is_of() -> None:
    assert [duration(x) for x in (0.4, 59.6, 754, 5000)] == ["0 s", "1 min 00 s", "12 min 34 s", "1 h 23 min"]


def test_health_is_told_by_run_unless_all_are_well() -> None:
    band = below(0.5, ", or mend")
    assert inside(band, {"a": [0.1], "b": [0.5]}) == "Healthy in all updates: below 0.5, or mend."
    assert inside(band, {"a": [0.1, 0.6]}) == "Healthy in 1 of 2 updates: below 0.5, or mend."
    assert (
        inside(band, {"a": [0.1], "b": [0.6]})
        == "Healthy in 1 of 1 updates (a), 0 of 1 updates (b): " + str(band) + "."
    )


# --- runs ------------------------------------------------------------------------------------------------------


def test_runs_of_one_name_are_told_apart() -> None:
    def names(*paths: str) -> list[str]:
        return unique_names([Path(path) for path in paths])

    assert names("/a/x", "/a/y") == ["x", "y"]
    assert names("/a/x/run", "/a/y/run", "/b/z") == ["x/run", "y/run", "z"]
    assert names("/run", "/a/run") == ["run", "a/run"]
    assert names("/a/run", "/a/run") == ["a/run (1)", "a/run (2)"]


def test_a_config_that_says_nothing_differs_in_nothing_and_one_that_says_something_in_that() -> None:
    least = {"student": "s", "teachers": {"t": {"model": "m"}}}
    assert changed_settings(parse(least)) == {}
    more = {
        "learner": {"lr": 1e-3},
        "schedule": {"kind": "step_off", "k": 2},
        "teachers": {"t": {"model": "m", "weight": 2.0}},
    }
    assert changed_settings(parse(least | more)) == {
        "learner.lr": (1e-5, 1e-3),
        "schedule.k": (1, 2),
        "schedule.kind": ("async", "step_off"),
        "teachers.t.weight": (1.0, 2.0),
    }
    assert changed_settings(parse(least | {"freshness": {}})) == {"[freshness]": (None, "in use")}


def test_accuracy_has_the_error_of_its_prompts_and_the_clock_of_its_update(tmp_path: Path) -> None:
    run = reading(tmp_path / "run", updates=30, evaluations=[(0, 0.1), (30, 0.5)])
    ((key, (updates, values, errors)),) = run.held_out.items()
    assert (key, updates, values) == (("accuracy", ""), [0.0, 30.0], [0.1, 0.5])
    assert errors == [pytest.approx(0.03), pytest.approx(0.05)]  # √(p (1 − p) / 100)
    assert binomial_error(3.0, 100) is None
    of_updates, of_time = charts.held_out([run])
    assert of_updates.data[0]["x"] == [0.0, 30.0] and of_time.data[0]["x"] == [0.0, 15.0]
    assert of_updates.title == "Held-out accuracy against updates: 10 % → 50 %"
    assert of_time.title == "Held-out accuracy against wall clock: 50 % after 15 s"
    once = reading(tmp_path / "once", evaluations=[(0, 0.1)])
    assert next(iter(charts.held_out([once]))).title == "Held-out accuracy against updates: 10 %"
    assert held_out_of(once, key) == "10 ± 3 %" and held_out_of(run, key) == "10 → 50 ± 5 %"


# --- charts ----------------------------------------------------------------------------------------------------


def test_the_histogram_of_lags_is_of_all_tokens_and_ends(tmp_path: Path) -> None:
    figure = charts.lags([reading(tmp_path / "run", more={"lag/tokens_50": 1000.0})])
    assert figure is not None
    labels, shares = figure.data[0]["x"], figure.data[0]["y"]
    assert len(labels) == charts.MAX_LAG + 1 and labels[-1] == "32 +"
    assert shares[1:4] == [0.125, 0.25, 0.125] and shares[-1] == 0.5
    assert figure.title == "Lag of trained tokens: 26 on average, 50 at most"  # (250 + 1000 + 750 + 50000) / 2000


def test_what_the_learner_waited_for_adds_up_to_all_its_time(tmp_path: Path) -> None:
    figure = charts.waits([reading(tmp_path / "run")])
    assert figure is not None
    parts = {trace["name"]: trace["x"][0] for trace in figure.data}
    assert parts == pytest.approx(
        {"learning": 0.6, "waiting for scored groups": 0.2, "waiting for publishes and evaluations": 0.1, "other": 0.1}
    )
    assert figure.title == "The learner was training 60 % of the time"
    assert charts.waits([reading(tmp_path / "untimed", more={"seconds/update": 0.0})]) is None


def test_a_publish_has_its_parts_and_no_figure_where_there_is_none(tmp_path: Path) -> None:
    one = reading(tmp_path / "one", more={"publish/wait": 0.25, "publish/load": 0.5})
    other = reading(tmp_path / "other")
    assert charts.publishes([other]) is None
    figure = charts.publishes([one, other])
    assert figure is not None and {t["name"]: t["x"] for t in figure.data} == {
        "waiting for requests to pause": [0.25, None],
        "loading weights": [0.5, None],
    }
    assert figure.title == "A sampler spent 0.75 s on a publish (one), 0 s on a publish (other)"


def test_work_is_lost_by_reason_or_no_figure_is_drawn(tmp_path: Path) -> None:
    well = reading(tmp_path / "well")
    bad = reading(tmp_path / "bad", more={"dropped/too old": 3.0, "failed/crash": 2.0, "thrown_tokens": 1234.0})
    assert charts.lost_work([well]) is None
    figure = charts.lost_work([well, bad])
    assert figure is not None and figure.data[1]["x"] == ["too old", "failed: crash"]
    assert (figure.data[0]["y"], figure.data[1]["y"]) == ([0.0, 0.0], [3.0, 2.0])
    assert figure.title == "Lost work: 0 tokens (well), 1,234 tokens (bad)"
    again = charts.lost_work([well, reading(tmp_path / "again", more={"thrown_tokens": 850.0})])
    assert again is not None and again.data[1]["x"] == ["tokens thrown away"] and again.data[1]["y"] == [850.0]
    assert again.title == "Lost work: 0 tokens (well), 850 tokens (again)"


def test_drift_by_lag_has_an_error_over_updates(tmp_path: Path) -> None:
    figure = charts.drift_by_lag([reading(tmp_path / "run")])
    assert figure is not None and figure.data[0]["x"] == ["1", "2-3"]
    assert figure.data[0]["y"][0] == pytest.approx(0.01) and figure.data[0]["error_y"]["array"][0] == pytest.approx(0)
    assert figure.data[0]["error_y"]["array"][1] > 0


def test_the_drift_of_runs_with_different_lags_is_that_of_known_lags(tmp_path: Path) -> None:
    lagged = reading(tmp_path / "lagged")
    fresh = reading(tmp_path / "fresh", more={"drift/kl/lag_0": 0.0})
    figure = charts.drift_by_lag([lagged, fresh])
    assert figure is not None and figure.title.startswith("KL by lag: 0.01 at lag 1, and at most 0.0")


# --- panels ----------------------------------------------------------------------------------------------------


def examples() -> list[str]:
    """A name for every name of the vocabulary."""
    return [re.sub(r"[A-Z]+", lambda match: WORDS[match[0]], name) for name in vocabulary.names()]


def test_every_metric_can_be_drawn(tmp_path: Path) -> None:
    more = {name: 0.25 for name in examples() if "/" in name and not name.startswith("groups/")}
    run = reading(tmp_path / "run", more=more)
    sections = dict.fromkeys(row.section for row in vocabulary.rows() if row.section)
    drawn = [figure for section in sections for figure in charts.of_metrics(section, [run])]
    titles = [figure.title for figure in drawn]
    assert len(drawn) > 60 and len(set(titles)) == len(titles)
    assert all(figure.layout["yaxis"]["title"]["text"] and figure.note.endswith(".") for figure in drawn)


def test_what_never_happened_is_not_drawn(tmp_path: Path) -> None:
    calm = reading(tmp_path / "calm", more={"guard/ess": 1.0, "teacher/invalid": 0.0})
    acted = reading(tmp_path / "acted", more={"guard/ess": 0.5, "teacher/invalid": 2.0})
    assert list(charts.of_metrics("guards", [calm])) == []
    assert [f.title for f in charts.of_metrics("guards", [acted])] == ["Guard ess stayed at 0.5"]
    assert len(list(charts.of_metrics("guards", [calm, acted]))) == 1


# --- the timeline ----------------------------------------------------------------------------------------------


def test_workers_are_busy_for_the_share_that_the_trace_says(tmp_path: Path) -> None:
    run = reading(tmp_path / "run")
    found = timeline.slices(run)
    assert len(found) == 90 and {each.kind for each in found} == {"rollout", "score", "update"}
    figure = timeline.busy(run, found, named=False)
    assert figure.data[0]["y"] == ["learner", "scorer", "sampler"]
    assert [row[7] for row in figure.data[0]["z"]] == pytest.approx([0.6, 0.4, 1.0])
    assert figure.title == "Busiest: sampler, 100 % of the time"


def test_a_gantt_shows_some_updates_of_many_and_is_bounded(tmp_path: Path) -> None:
    run = reading(tmp_path / "run", updates=3000, evaluations=())
    found = timeline.slices(run)
    figure = timeline.gantt([run], [found])
    bars = sum(len(trace["x"]) for trace in figure.data)
    assert 60 <= bars <= 100  # three slices for each of 24 updates, and a few at the edges
    low, high = figure.layout["xaxis"]["range"]
    assert high - low == pytest.approx(0.5 * timeline.SIGHT)
    assert figure.layout["yaxis"]["categoryarray"] == ["learner", "scorer", "sampler"]
    short_run = reading(tmp_path / "short", updates=5, evaluations=())
    assert "see all 24." in str(figure.note)
    assert "see all 5." in str(timeline.gantt([short_run], [timeline.slices(short_run)]).note)


def test_a_gantt_of_many_slices_takes_those_in_the_middle(tmp_path: Path) -> None:
    run = reading(tmp_path / "run")
    dense = [timeline.Slice("sampler", "rollout", i / 1000, 0.0005) for i in range(15_000)]
    whole = timeline.stretch(run, dense)
    inside = [each for each in dense if whole.start <= each.start < whole.end]
    assert len(inside) == timeline.SLICES and whole.start <= whole.sight[0] < whole.sight[1] <= whole.end


def test_a_gantt_of_two_runs_has_a_row_for_every_worker_of_each(tmp_path: Path) -> None:
    runs = read([write_run(tmp_path / "a"), write_run(tmp_path / "b", updates=200, evaluations=())])
    figure = timeline.gantt(runs, [timeline.slices(run) for run in runs])
    rows = ["b · learner", "b · scorer", "b · sampler", "a · learner", "a · scorer", "a · sampler"]
    assert figure.layout["yaxis"]["categoryarray"] == rows
    assert figure.layout["xaxis"]["range"][0] == 0.0  # both begin where one looks first


def test_episodes_are_drawn_from_their_own_beginning(tmp_path: Path) -> None:
    run = reading(tmp_path / "run", updates=4, evaluations=())
    spans = (("turn", 0, 0.3), ("step", 0.3, 0.4), ("turn", 0.4, 0.5))
    events = [
        {"ph": phase, "cat": "episode", "id": f"{number}/0", "pid": 1, "ts": round((at + when) * 1e6), "name": name}
        for number, at in ((1, 0.1), (2, 1.5), (3, 1.6))
        for name, start, end in ((f"episode {number}/0", 0, 0.5), *spans)
        for phase, when in (("b", start), ("e", end))
    ]
    with (run.run.path / "trace.json").open("a") as file:
        file.writelines(json.dumps(event) + ",\n" for event in events)
    figure = timeline.episodes(run)
    assert figure is not None
    turns, steps = figure.data
    assert (turns["name"], steps["name"]) == ("turn", "step")
    assert turns["y"] == ["group 2/0", "group 2/0", "group 3/0", "group 3/0"]  # the first was before the middle
    assert turns["base"] == pytest.approx([0, 0.4, 0, 0.4]) and steps["x"] == pytest.approx([0.1, 0.1])
    assert figure.title == "Time of an episode: 80 % turn, 20 % step"
