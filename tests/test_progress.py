"""What a person sees of a run."""

from __future__ import annotations

from io import StringIO

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from slipstream.commands.progress import BLOCKS, Progress, readings, sparkline
from slipstream.config.file import parse
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.schedules import schedule_of

CONFIG = parse({"student": "s", "teachers": {"main": {"model": "t"}}, "learner": {"batch_size": 4}})
TRAIN = {
    "train/loss": 0.12345,
    "reward/exact": 0.5,
    "lag/mean": 0.25,
    "lag/max": 2.0,
    "train/tokens_per_s": 12345.6,
    "train/samples_per_s": 9.87,
}


def progress_on(*, terminal: bool) -> tuple[Progress, StringIO]:
    text = StringIO()
    console = Console(file=text, force_terminal=terminal, width=200, color_system=None)
    return Progress(
        console,
        updates=8,
        title="[a]b",
        admission=Admission(schedule_of(CONFIG.schedule, CONFIG.groups_per_update), updates=8),
    ), text


def test_the_few_numbers_worth_a_look_are_readable() -> None:
    assert readings(TRAIN) == [
        ("loss", "0.1235"),
        ("exact", "50.0%"),
        ("lag", "0.2 (max 2)"),
        ("tok/s", "12,346"),
        ("samples/s", "9.9"),
    ]
    assert readings({"eval/accuracy": 0.25, "eval/reward/exact": 0.25}) == [("held-out accuracy", "25.0%")]


def test_where_there_is_no_terminal_every_update_is_one_plain_line() -> None:
    progress, text = progress_on(terminal=False)
    with progress:
        progress.log(TRAIN, 1)
        progress.log({"eval/accuracy": 0.25}, 1)
    assert text.getvalue().splitlines() == [
        "update 1/8  loss 0.1235  exact 50.0%  lag 0.2 (max 2)  tok/s 12,346  samples/s 9.9",
        "update 1/8  held-out accuracy 25.0%",
    ]


def test_on_a_terminal_a_panel_says_how_far_the_run_is_and_where_its_groups_are() -> None:
    progress, text = progress_on(terminal=True)
    with progress:
        progress.admission.submit()
        progress.log(TRAIN, 1)
        progress.log({"train/loss": 0.1}, 2)
    panel = text.getvalue()
    assert "[a]b" in panel and "update 2/8" in panel and "s to go" in panel
    assert "rolling out 20   scoring 0   scored 0   learning 0   dropped 0" in panel
    assert "loss █▁" in panel


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500))
def test_a_sparkline_fits_its_width_and_spans_its_range(values: list[float]) -> None:
    line = sparkline(values)
    assert len(line) <= 60 and set(line) <= set(BLOCKS)
    assert BLOCKS[0] in line
    assert sparkline(sorted(values))[0] == BLOCKS[0]
    assert len(values) > 60 or len(line) == len(values)
