"""Display of a run on a terminal."""

import re
import threading
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from slipstream.config.file import parse
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.schedules import schedule_of
from slipstream.reporting.terminal.charts import SAMPLE_LINES, fold_to
from slipstream.reporting.terminal.progress import (
    CURVE_POINTS,
    SAMPLE_SECONDS,
    SPARK_BARS,
    Curve,
    from_to,
    hours,
    key_readings,
    sparkline,
)
from slipstream.runs import display
from slipstream.runs.display import Progress, waiting

CONFIG = parse({"student": "s", "teachers": {"main": {"model": "t"}}, "learner": {"batch_size": 4}})
TRAIN = {
    "train/loss": 0.12345,
    "reward/exact": 0.5,
    "lag/mean": 0.25,
    "lag/max": 2.0,
    "train/tokens_per_s": 12345.6,
    "train/samples_per_s": 9.87,
    "train/tokens": 3000.0,
    "seconds/update": 30.0,
}
MORE = TRAIN | {
    "teacher/kl": 0.61,
    "length/mean": 11.5,
    "train/truncated": 0.125,
    "student/entropy": 1.25,
    "train/grad_norm": 0.75,
}


def quote(number: int, **changes: Any) -> dict[str, Any]:
    usual = {
        "update": 3,
        "prompt": f"A{number}B{number}=",
        "response": f"A{number}",
        "finish": "eos",
        "rewards": {"exact": 1.0},
        "versions": [[1, 1], [2, 1]],
        "tokens": ["A", str(number)],
    }
    return usual | changes


def progress_on(*, terminal: bool, width: int = 200, height: int = 40, **given: Any) -> tuple[Progress, StringIO]:
    text = StringIO()
    console = Console(file=text, force_terminal=terminal, width=width, height=height, color_system=None, _environ={})
    return Progress(
        console,
        updates=8,
        title="[a]b",
        admission=Admission(schedule_of(CONFIG.schedule, CONFIG.groups_per_update), updates=8),
        **given,
    ), text


def panel(progress: Progress) -> list[str]:
    """Return the text that the terminal shows now."""
    with progress.console.capture() as captured:
        progress.console.print(progress.panel())
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_few_numbers_worth_a_look_are_readable() -> None:
    assert key_readings(TRAIN) == [
        ("loss", "0.1235"),
        ("exact", "50.0%"),
        ("lag", "0.2 (max 2)"),
        ("tok/s", "12,346"),
        ("samples/s", "9.9"),
    ]
    assert key_readings({"eval/accuracy": 0.25, "eval/reward/exact": 0.25}) == [("held-out accuracy", "25.0%")]


def test_outside_a_terminal_updates_are_plain_lines_at_most_every_five_seconds() -> None:
    now = [0.0]
    progress, text = progress_on(terminal=False, clock=lambda: now[0])
    for update in range(1, 9):
        now[0] += 1.5
        progress.log(TRAIN, update)
    progress.log({"eval/accuracy": 0.25}, 8)
    shown = [line.partition("  ") for line in text.getvalue().splitlines()]
    assert [first for first, _, _ in shown] == ["update 1/8", "update 5/8", "update 8/8", "update 8/8"]
    assert shown[-1][2] == "held-out accuracy 25.0%", "results of an evaluation are always printed"


def test_outside_a_terminal_a_line_holds_the_main_numbers() -> None:
    progress, text = progress_on(terminal=False)
    with progress:
        progress.log(MORE, 1)
        progress.samples([quote(1)], 1)
        progress.log({"eval/accuracy": 0.25}, 1)
    assert text.getvalue().splitlines() == [
        "update 1/8  loss 0.1235  exact 50.0%  lag 0.2 (max 2)  tok/s 12,346  samples/s 9.9",
        "update 1/8  held-out accuracy 25.0%",
    ]


def test_a_terminal_that_cannot_replace_what_it_shows_gets_plain_lines() -> None:
    text = StringIO()
    console = Console(file=text, force_terminal=True, width=80, _environ={"TERM": "dumb"})
    progress, _ = progress_on(terminal=False)
    dumb = Progress(console, updates=8, title="x", admission=progress.admission)
    with dumb, waiting(console, "loading") as still:
        still("loading more")
        dumb.log(TRAIN, 1)
    assert text.getvalue().startswith("update 1/8  loss 0.1235") and "loading" not in text.getvalue()


def test_a_wait_is_a_line_where_no_text_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 5 s in a run, and here at once."""
    monkeypatch.setattr(display, "FIRST_LINE", 0.0)
    lines, printed = StringIO(), threading.Event()

    class Watched(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*objects, **options)
            printed.set()

    with waiting(Watched(file=lines), "calling the judge"):
        assert printed.wait(60)
    assert re.match(r"calling the judge, \d+ s\n", lines.getvalue())


def test_before_the_first_update_the_panel_says_what_comes_first() -> None:
    progress, _ = progress_on(terminal=True, width=60)
    assert panel(progress)[1] == "samplers load the first weights"
    progress, _ = progress_on(terminal=True, width=60, evaluates=True)
    assert panel(progress)[1] == "samplers load the first weights and answer held-out prompts"
    progress.admission.submit()
    assert panel(progress) == ["[a]b" + "update 0/8  0 s".rjust(56), "first rollouts: 20 rolling out"]


def test_the_panel_says_how_far_the_run_is_how_it_goes_and_where_its_groups_are() -> None:
    """At 60 columns, as at 200, where there is a bar, too. Two updates of 30 s: six more take three minutes."""
    now = [100.0]
    expected = [
        "groups: 20 rolling out",
        "exact               75.0%  ▁█",
        "held-out accuracy   25.0%  ▁",
        "KL to teacher       0.310  █▁",
        "loss               0.1235  ▁▁",
        "length               11.5  ▁▁",
        "cut off           ! 12.5%  ▁▁  below 0.1",
        "entropy             1.250  ▁▁",
        "gradient norm        0.75  ▁▁",
        "lag                   0.2  ▁▁",
        "tok/s                 150  ▁▁",
    ]
    for width in (60, 200):
        now[0] = 100.0
        progress, _ = progress_on(terminal=True, width=width, clock=lambda: now[0])
        progress.admission.submit()
        progress.log(MORE, 1)
        progress.log({"eval/accuracy": 0.25}, 1)
        now[0] += 3725
        progress.log(MORE | {"reward/exact": 0.75, "teacher/kl": 0.31, "train/tokens": 6000.0}, 2)
        head, *rest = panel(progress)
        assert rest == expected
        assert head.startswith("[a]b") and "update 2/8" in head and head.endswith("  1:02 h, 0:03 h to go")
        assert ("━" in head) == (width == 200)


def test_a_run_that_goes_on_goes_on_with_its_curves() -> None:
    progress, text = progress_on(terminal=False, width=60)
    progress.recall([
        {"kind": "eval", "update": 0, "accuracy": 0.1},
        {"kind": "train", "update": 1, "loss": 2.0, "reward/exact": 0.0, "tokens_per_s": 9.0},
        {"kind": "train", "update": 2, "loss": 1.0, "reward/exact": 1.0, "tokens_per_s": 9.0},
    ])  # fmt: skip
    assert text.getvalue() == "" and progress.view().left is None
    assert panel(progress)[2:] == [
        "exact              100.0%  ▁█",
        "held-out accuracy   10.0%  ▁",
        "loss               1.0000  █▁",
    ]
    progress.log(TRAIN, 1)
    assert panel(progress)[2] == "exact               50.0%  ▁█▄"


def test_samples_are_shown_one_at_a_time_each_long_enough_to_be_read() -> None:
    now = [0.0]
    progress, _ = progress_on(terminal=True, width=60, clock=lambda: now[0])
    progress.log(TRAIN, 3)
    progress.samples([quote(1), quote(2)], 3)

    def shown() -> list[str]:
        return panel(progress)[-3:]

    first = ["── update 3, lag 0 to 1, exact 1, 2 tokens, ended ──────────", "A1B1=", "A1"]
    assert shown() == first
    now[0] = SAMPLE_SECONDS - 0.5
    progress.samples([quote(3), quote(4)], 4)
    assert shown() == first
    now[0] = SAMPLE_SECONDS
    assert shown()[1:] == ["A4B4=", "A4"]
    now[0] = 2 * SAMPLE_SECONDS
    assert shown()[1:] == ["A3B3=", "A3"]


@pytest.mark.parametrize("width, height", [(60, 24), (40, 16), (200, 50)])
def test_whatever_a_student_says_the_panel_keeps_its_size(width: int, height: int) -> None:
    """Also where characters are two columns wide, and where it says what a terminal would obey."""
    progress, _ = progress_on(terminal=True, width=width, height=height)
    progress.log(MORE, 3)
    for response in ("x" * 5000, "\n".join("abc"), "漢字" * 900, "\x1b[2J\x07 [bold]\t" * 99, "a\n" * 900, ""):
        progress.turning.current = None
        progress.samples([quote(1, prompt="system " * 90 + "end:\n", response=response)], 3)
        lines = panel(progress)
        assert len(lines) <= height and all(cell_len(line) <= width for line in lines)
        assert not any("\x1b" in line or "\x07" in line for line in lines)
        assert any(line.endswith("end:") for line in lines)


@given(st.text(alphabet="ab\n漢", max_size=400), st.integers(2, 20), st.integers(1, SAMPLE_LINES))
def test_the_beginning_and_the_end_of_a_text_are_kept(text: str, width: int, most: int) -> None:
    lines = fold_to(text, width, most)
    assert len(lines) <= most and all(cell_len(line) <= width for line in lines)
    if "…" in lines:
        before, after = lines[: lines.index("…")], lines[lines.index("…") + 1 :]
        assert text.replace("\n", "").startswith("".join(before)) and text.replace("\n", "").endswith("".join(after))
    else:
        assert "".join(lines) == text.replace("\n", "")


def test_a_run_without_colours_is_shown_without() -> None:
    text = StringIO()
    console = Console(file=text, force_terminal=True, width=60, _environ={"NO_COLOR": "1", "TERM": "xterm-256color"})
    progress, _ = progress_on(terminal=False)
    with Progress(console, updates=8, title="x", admission=progress.admission) as shown:
        shown.log(MORE, 1)
    assert "0.610" in text.getvalue() and "\x1b[3" not in text.getvalue()


@pytest.mark.parametrize("seconds, said", [(0.4, "0 s"), (59, "59 s"), (60, "0:01 h"), (3 * 3600 + 300, "3:05 h")])
def test_times_are_in_hours_and_minutes(seconds: float, said: str) -> None:
    assert hours(seconds) == said


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500))
def test_a_sparkline_fits_its_width_and_spans_its_range(values: list[float]) -> None:
    line = sparkline(values)
    assert len(line) <= 60 and set(line) <= set(SPARK_BARS)
    assert SPARK_BARS[0] in line
    assert sparkline(sorted(values))[0] == SPARK_BARS[0]
    assert len(values) > 60 or len(line) == len(values)


def test_what_is_no_number_is_no_point_of_a_curve() -> None:
    progress, _ = progress_on(terminal=True, width=60)
    for value in (1.0, float("nan"), float("inf"), 2.0):
        progress.course.remember({"teacher/kl": value})
    assert panel(progress)[2] == "KL to teacher  2.000  ▁█"


@given(st.integers(1, 2000))
def test_a_curve_is_of_the_whole_run_and_never_long(count: int) -> None:
    curve = Curve()
    for value in range(count):
        curve.add(float(value))
    assert len(curve.points) < CURVE_POINTS
    assert len(curve.points) == count // curve.size
    width = curve.size
    assert curve.points == [width * i + (width - 1) / 2 for i in range(len(curve.points))]


SETS = {"math": 0.0, "code": 0.5}


def test_at_the_end_a_line_says_what_the_run_brought_about() -> None:
    train = [{"kind": "train", "update": i, "reward/exact": i / 40, "teacher/kl": 1 - i / 40} for i in range(1, 41)]
    evals = [{"kind": "eval", "update": i, "accuracy": i / 80, "reward/exact": i / 80} for i in (0, 20, 40)]
    assert from_to([*train, *evals]) == (
        "first 10 updates → last 10: exact 13.8% → 88.8%, KL to teacher 0.863 → 0.113, held-out accuracy 0.0% → 50.0%"
    )
    assert from_to(train[:3]) == "first update → last: exact 2.5% → 7.5%, KL to teacher 0.975 → 0.925"
    assert from_to(train[:1]) == from_to([{"kind": "train", "update": i, "loss": 1.0} for i in (1, 2)]) == ""
    sets = [{**line, "set": name, "accuracy": line["accuracy"] + more} for line in evals for name, more in SETS.items()]
    assert from_to([*train, *sets]).endswith(
        "math held-out accuracy 0.0% → 50.0%, code held-out accuracy 50.0% → 100.0%"
    )
    several = [{"kind": "train", "update": i, "teacher/a/kl": 1.0, "teacher/b/kl": 2.0} for i in (1, 2)]
    assert from_to(several) == "first update → last: KL to teacher a 1.000 → 1.000, KL to teacher b 2.000 → 2.000"
