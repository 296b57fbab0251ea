"""The picture of a run on terminals of every size: nothing is wider or higher, and what matters most is there."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

from slipstream.errors import printable
from slipstream.reporting.terminal.charts import (
    OBSERVATION,
    choose_rows,
    displayed_rows,
    lag_text,
    loss_text,
    row_lines,
    sample_lines,
    stage_bars,
    stage_shares,
    unhealthy_rows,
    wait_text,
)
from slipstream.reporting.terminal.panel import Block, View, allot, beside, inline, page, screen, stack
from slipstream.reporting.terminal.progress import (
    SAMPLE_SECONDS,
    RunProgress,
    SampleSelector,
    band_of,
    counts_text,
    displayed_names,
)

LINE = {
    "kind": "train",
    "loss": 0.5,
    "grad_norm": 1.5,
    "student/entropy": 0.2,
    "reward/exact": 0.25,
    "teacher/kl": 0.75,
    "drift/k3_kl": 0.3,
    "drift/ess": 0.9,
    "length/mean": 20.0,
    "truncated": 0.5,
    "lag/mean": 2.0,
    "lag/max": 5.0,
    "lag/tokens_0": 10.0,
    "lag/tokens_2": 30.0,
    "lag/tokens_5": 40.0,
    "busy/rollout": 1.0,
    "busy/score": 0.5,
    "busy/learn": 0.25,
    "seconds/update": 10.0,
    "seconds/publish": 1.0,
    "seconds/data": 4.0,
    "seconds/turn": 0.0,
    "seconds/weights": 0.5,
    "tokens": 1000.0,
    "tokens_per_s": 100.0,
    "dropped": 3.0,
    "dropped/scoring failed": 2.0,
    "dropped/too old": 1.0,
    "restarted": 0.0,
    "thrown_tokens": 1234.0,
    "failed_samples": 0.0,
    "time": 100.0,
}
KEYS = "q quit"
SIZES = [(60, 15), (60, 24), (80, 24), (100, 30), (119, 40), (120, 20), (160, 50), (250, 70)]


def course_of(*lines: dict[str, Any]) -> RunProgress:
    course = RunProgress()
    for line in lines:
        numbers = course.recall(line)
        if line["kind"] == "train":
            course.add_update(numbers)
    return course


def quote(number: int, **changes: Any) -> dict[str, Any]:
    usual = {
        "update": 12,
        "prompt": f"question {number}",
        "response": f"answer {number}",
        "finish": "eos",
        "rewards": {"exact": 1.0},
        "versions": [[11, 2]],
        "tokens": ["a", "b"],
        "turns": None,
    }
    return usual | changes


def view(**changes: Any) -> View:
    usual: dict[str, Any] = {
        "title": "a name [bold] that is long enough to be in the way",
        "update": 12,
        "updates": 40,
        "elapsed": 100.0,
        "left": 300.0,
        "state": "training",
        "style": "bold green",
        "doing": "94 rolling out, 10 scoring, 24 scored",
        "course": course_of({"kind": "eval", "update": 0, "accuracy": 0.1}, *[LINE | {"update": i} for i in range(12)]),
        "quotes": [quote(i) for i in range(20)],
        "place": "3 of 20",
        "news": [f"update {i}: something happened that takes more than one line to be told of" for i in range(9)],
        "keys": KEYS,
    }
    return View(**usual | changes)


def shown(lines: list[Text], width: int) -> list[str]:
    """Return the lines of a terminal of this width."""
    console = Console(width=width, force_terminal=True, color_system=None, _environ={})
    with console.capture() as captured:
        console.print(Group(*lines))
    return [line.rstrip() for line in captured.get().splitlines()]


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width, height", SIZES)
def test_at_every_size_nothing_is_too_long_and_what_matters_is_there(width: int, height: int) -> None:
    lines = shown(screen(view(), width, height), width)
    assert len(lines) == height and max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    for part in (
        "update 12/40",
        "0:02 h, 0:05 h to go",
        "training: 94 rolling out",
        "exact",
        "held-out",
        "KL to teacher",
    ):
        assert part in text, part
    for part in (
        "rollout",
        "lag 3.2, at most 5",
        "lost: 3 groups dropped",
        "── update 12, lag 0",
        "question 0",
        "answer 0",
    ):
        assert part in text, part
    assert "cut off" in text, "it is outside its band"
    assert "update 8: something" in text and "3 of 20 ──" in text
    assert lines[-1] == KEYS
    assert ("━" in lines[0]) == (width >= 80)


def test_with_more_room_more_is_shown() -> None:
    def has(width: int, height: int) -> set[str]:
        text = "\n".join(shown(screen(view(), width, height), width))
        parts = ("gradient norm", "tok/s", "drift/k3_kl", "update 5: something", "question 1", "the learner waited")
        return {part for part in parts if part in text}

    small, usual, large = has(60, 15), has(80, 30), has(250, 70)
    assert small < usual < large
    assert len(large) == 6


@settings(max_examples=40)
@given(st.integers(20, 260), st.integers(1, 80), st.text(alphabet="ab \n\t漢\x1b\x07[", max_size=300), st.booleans())
def test_whatever_is_said_a_frame_keeps_its_size(width: int, height: int, text: str, turned: bool) -> None:
    turns = [["said", text], ["seen", text], ["said", text]] if turned else None
    quotes = [quote(0, prompt=text, response=text, turns=turns), quote(1)]
    for draw in (screen, inline):
        lines = shown(draw(view(title=text.replace("\n", " "), quotes=quotes, news=[text]), width, height), width)
        assert len(lines) <= height and all(cell_len(line) <= width for line in lines)
        assert not any("\x1b" in line or "\x07" in line for line in lines)


def test_a_page_has_everything() -> None:
    text = "\n".join(shown(page(view(), 80), 80))
    for part in ("tok/s", "gradient norm", "drift/k3_kl", "learn", "publish", "the learner waited", "update 8: some"):
        assert part in text
    assert KEYS not in text


def test_before_anything_is_known_a_frame_says_so() -> None:
    empty = view(course=RunProgress(), update=0, elapsed=3.0, left=None, state="waiting", doing="for the first update")
    lines = shown(screen(View(**vars(empty) | {"quotes": (), "news": ()}), 60, 15), 60)
    assert lines[0].endswith("update 0/40  3 s") and lines[1] == "waiting: for the first update"
    assert lines[2:-1] == [""] * 12


# --- lines shared out -------------------------------------------------------------------------------------------------


def block(rank: int, least: int, good: int, most: int, uses: int | None = None) -> Block:
    return Block(rank, least, good, most, lambda n: [Text(str(rank))] * min(n, most if uses is None else uses))


BLOCKS_OF = st.builds(
    lambda rank, sizes, uses: block(rank, *sorted(sizes), uses),
    st.integers(0, 5),
    st.lists(st.integers(0, 9), min_size=3, max_size=3),
    st.one_of(st.none(), st.integers(0, 9)),
)


@given(st.lists(BLOCKS_OF, max_size=6), st.integers(0, 40))
def test_no_more_lines_are_given_than_there_are_and_none_below_what_is_of_use(blocks: list[Block], room: int) -> None:
    given = allot(blocks, room)
    assert sum(given) <= room
    for n, each in zip(given, blocks, strict=True):
        assert n == 0 or each.least <= n <= each.most
    assert sum(given) == room or all(n in (0, each.most) for n, each in zip(given, blocks, strict=True))
    assert len(stack(blocks, room)) <= room


def test_lines_go_by_rank_first_what_is_least_then_what_is_good_then_the_rest() -> None:
    blocks = [block(2, 1, 3, 9), block(1, 2, 4, 5), block(3, 4, 4, 4)]
    assert [allot(blocks, room) for room in (1, 2, 3, 5, 7, 8, 11, 12, 18)] == [
        [1, 0, 0],
        [0, 2, 0],
        [1, 2, 0],
        [1, 4, 0],
        [1, 2, 4],
        [1, 3, 4],
        [3, 4, 4],
        [3, 5, 4],
        [9, 5, 4],
    ]


def test_what_one_does_not_use_the_others_get() -> None:
    assert len(stack([block(1, 1, 5, 9, uses=2), block(2, 1, 1, 20)], 10)) == 10


def test_columns_stand_beside_each_other_and_no_line_is_lost() -> None:
    lines = beside([Text("漢字"), Text("b" * 9)], [Text("1"), Text("2"), Text("3")], 6)
    assert [line.plain for line in lines] == ["漢字  1", "bbbbb…2", "      3"]


# --- parts ------------------------------------------------------------------------------------------------------------


def test_values_outside_their_band_are_marked_and_say_what_is_healthy() -> None:
    course = course_of(LINE | {"update": 1}, LINE | {"update": 2, "truncated": 0.05})
    assert [row.name for row in displayed_rows(course) if row.missed] == []
    rows = displayed_rows(course_of(LINE | {"update": 1}))
    (missed,) = (row for row in rows if row.missed)
    assert (missed.name, missed.value, str(missed.missed)) == ("cut off", "50.0%", "below 0.1")
    drawn = [line.plain for line in row_lines(rows, 80, 18)]
    assert [line for line in drawn if "!" in line] == ["cut off       ! 50.0%  ▁  below 0.1"]
    assert {line.index("▁") for line in drawn} == {23}


def test_what_nobody_watches_is_shown_where_it_is_outside_on_average() -> None:
    """drift/k3_kl is 0.3, and below 0.02 is healthy; one update of 0.0 does not change that."""
    assert [(row.name, row.value) for row in unhealthy_rows(course_of(LINE))] == [("drift/k3_kl", "0.3")]
    course = course_of(LINE, LINE | {"drift/k3_kl": 0.0})
    assert [(row.name, row.value) for row in unhealthy_rows(course)] == [("drift/k3_kl", "0.15")]
    assert unhealthy_rows(course_of(LINE | {"drift/k3_kl": 0.0})) == []
    assert band_of("train/truncated") is not None and band_of("train/loss") is None


def test_the_first_rows_and_those_outside_are_the_last_to_go() -> None:
    rows = displayed_rows(course_of({"kind": "eval", "update": 0, "accuracy": 0.1}, LINE))
    assert [row.name for row in choose_rows(rows, 4)] == ["exact", "held-out accuracy", "KL to teacher", "cut off"]
    assert choose_rows(rows, 99) == rows


def test_a_stage_was_busy_for_its_share_of_the_time_and_a_publish_for_its_seconds() -> None:
    """Updates of 10 and 30 s: rollout (1 · 10 + 0.5 · 30) / 40; a publish of 1 s in each."""
    found = dict(stage_shares(course_of(LINE, LINE | {"seconds/update": 30.0, "busy/rollout": 0.5})))
    assert found == {"rollout": 0.625, "score": 0.5, "learn": 0.25, "publish": 0.05}
    assert stage_shares(RunProgress()) == []
    bars = [("rollout", 1.0), ("score", 0.5), ("learn", 0.0), ("publish", 0.04)]
    assert [line.plain for line in stage_bars(bars, 60, 1)] == ["rollout 100%   score 50%   learn 0%   publish 4%"]
    assert [line.plain for line in stage_bars(bars, 24, 4)] == [
        "rollout  █████████ 100%",
        "score    ████░░░░░  50%",
        "learn    ░░░░░░░░░   0%",
        "publish  ░░░░░░░░░   4%",
    ]


def test_lags_are_counted_in_powers_of_two() -> None:
    """10 tokens of lag 0, 30 of 2 and 40 of 5: (60 + 200) / 80 on average."""
    assert lag_text(course_of(LINE)) == "lag 3.2, at most 5:  0 ▃  1 ▁  2-3 ▆  4-7 █"
    assert lag_text(course_of(LINE, LINE)) == lag_text(course_of(LINE))
    assert lag_text(RunProgress()) == ""


def test_what_was_lost_is_told_with_its_reasons() -> None:
    assert (
        loss_text(course_of(LINE)) == "lost: 3 groups dropped (2 scoring failed, 1 too old), 1,234 tokens thrown away"
    )
    more = {"restarts/sampler-1": 2.0, "ungraded/nan": 4.0, "failed_samples": 5.0, "failed/crash": 5.0, "dropped": 0.0}
    nothing = {"dropped/scoring failed": 0.0, "dropped/too old": 0.0, "thrown_tokens": 0.0}
    assert loss_text(course_of(LINE | nothing | more)) == (
        "lost: 5 answers failed (5 crash), 4 without a reward (4 nan), sampler-1 died 2 ×"
    )
    assert loss_text(course_of(LINE | nothing | {"dropped": 0.0})) == ""


def test_what_the_learner_waited_for_is_a_share_of_the_time() -> None:
    assert wait_text(course_of(LINE)) == "the learner waited 40% for data, 5% for publishes and evaluations"
    calm = course_of(LINE | {"seconds/data": 0.0, "seconds/weights": 0.0})
    assert wait_text(calm) == "the learner waited for nothing"
    assert wait_text(RunProgress()) == ""


def test_what_is_watched_has_its_order_and_what_is_zero_is_not_listed() -> None:
    assert displayed_names(["lag/mean", "lr", "eval/accuracy", "reward/b", "reward/a"]) == [
        "reward/b",
        "reward/a",
        "eval/accuracy",
        "lag/mean",
    ]
    assert counts_text([("a", 2), ("b", 0.0), ("c", 1500)]) == "2 a, 1,500 c"


# --- samples ----------------------------------------------------------------------------------------------------------


def test_of_an_episode_what_was_seen_is_set_off() -> None:
    turns = [["said", "call\n"], ["seen", "12345678"], ["said", "done"]]
    lines = [line.plain for line in sample_lines(quote(1, turns=turns), 8, 20)]
    assert lines[1:] == ["question", " 1", "call", f"{OBSERVATION}123456", f"{OBSERVATION}78", "done"]
    short = [line.plain for line in sample_lines(quote(1, turns=turns), 8, 6)]
    assert short == [lines[0], "question", " 1", "call", "…", "done"]


def test_a_sample_in_few_lines_keeps_its_heading_then_its_end_of_the_prompt() -> None:
    both = quote(1, prompt="a\nb\nc", response="x\ny\nz")
    assert [[line.plain for line in sample_lines(both, 60, n, beside="1 of 2")][1:] for n in range(5)] == [
        [],
        [],
        [],
        ["c", "x…"],
        ["b", "c", "x…"],
    ]
    heading = sample_lines(both, 60, 1, beside="1 of 2")[0].plain
    assert heading == "── update 12, lag 0, exact 1, 2 tokens, ended ──── 1 of 2 ──"


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printable("a\x1b[2J\n\t\x9b\r") == "a\\x1b[2J\n\t\\x9b\\r"


def test_samples_turn_by_themselves_until_somebody_leafs_through_them() -> None:
    now = [0.0]
    turning = SampleSelector(lambda: now[0])
    assert turning.now() is None
    quotes = [quote(i) for i in range(4)]
    turning.gather(quotes, newest=quotes[2:])
    assert turning.now() is quotes[2] and turning.place() == 2
    now[0] = SAMPLE_SECONDS
    assert turning.now() is quotes[3]
    turning.step(+1)
    assert turning.now() is quotes[0] and turning.place() == 0
    now[0] = 9 * SAMPLE_SECONDS
    assert turning.now() is quotes[0], "it is held"
    turning.step(-2)
    assert turning.now() is quotes[2]
    turning.paused = False
    now[0] = 20 * SAMPLE_SECONDS
    assert turning.now() is quotes[2] and turning.turn == 3
