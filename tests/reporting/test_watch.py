"""A run directory as it grows, is cut, and is left alone: what is read of it, and what it is said to be doing."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.cli import main
from slipstream.commands.watch import handle_keys, watch
from slipstream.config.schedule import Async, Sync
from slipstream.errors import RunDirError
from slipstream.reporting.terminal.state import SILENT, Event, Signs, of_ledger, of_updates, state_of
from slipstream.reporting.terminal.watch import REMEMBERED, Watched
from slipstream.run_dir.atomic_files import LOCK, directory_lock, held, writer
from slipstream.run_dir.writing import METRICS, SOCKET, read_lines
from support.toy_runs import go


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    go(path, Async(), updates=30, every=90)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def part(run: Path, *, updates: int) -> None:
    """Cut the run to its state after this number of updates, for all readers."""
    (run / "final").rename(run / "later")
    lines = (run / METRICS).read_text().splitlines(keepends=True)
    (run / METRICS).write_text("".join(lines[:updates]))


def seen(watched: Watched) -> dict[str, Any]:
    view = watched.view()
    return {
        "numbers": view.course.numbers,
        "recent": view.course.recent,
        "curves": {name: (curve.points, curve.pending) for name, curve in view.course.curves.items()},
        "update": (view.update, view.updates, view.state, view.doing),
        "samples": list(watched.turning.quotes),
        "losses": watched.losses,
    }


# --- the files --------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_read_whole(finished: Path) -> None:
    view = Watched(finished).view()
    train = read_lines(finished / METRICS)
    assert (view.title, view.update, view.updates, view.left) == ("finished", 30, 30, None)
    assert (view.state, view.doing) == ("finished", f"the student is in {finished / 'final'}")
    assert view.elapsed == train[-1]["time"]
    assert view.course.curves["teacher/kl"].points == [line["teacher/kl"] for line in train]
    assert len(view.quotes) == REMEMBERED and view.quotes[0]["update"] == 30 and view.place == "49 of 50"
    assert [quote["update"] for quote in view.quotes[1:4]] == [30, 29, 29]


def test_read_in_pieces_it_is_what_it_is_read_at_once(run: Path) -> None:
    """A look after every few bytes, in all files."""
    names = (METRICS, "ledger.jsonl", "samples.jsonl")
    whole = {name: (run / name).read_bytes() for name in names}
    for name in names:
        (run / name).write_bytes(b"")
    growing = Watched(run)
    for i in range(1, 42):
        for name, data in whole.items():
            (run / name).write_bytes(data[: len(data) * i // 41])
        growing.look()
    assert seen(growing) == seen(Watched(run))
    assert growing.course.numbers["train/loss"] == read_lines(run / METRICS)[-1]["loss"]


def test_a_run_that_is_resumed_goes_back_with_its_curves(tmp_path: Path) -> None:
    """Stopped, and gone on with from an earlier checkpoint by another lag; who watched sees what a newcomer sees."""
    path = tmp_path / "run"
    go(path, Sync(), updates=14, until=30)
    before = Watched(path)
    stopped = before.number
    assert 6 < stopped < 14
    go(path, Sync(), updates=14, number=4, until=3)
    before.look()
    assert 4 <= before.number < stopped
    assert seen(before) == seen(Watched(path))
    assert [event.text for event in before.events if "went back" in event.text] == [
        f"the run went back to here, from update {stopped}"
    ]
    go(path, Sync(), updates=12)
    before.look()
    assert before.view().updates == 12 and before.view().state == "finished"
    assert seen(before) == seen(Watched(path))


def test_one_that_is_no_run_and_one_that_is_removed_are_said_in_a_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="nothing holds no run: there is no config.toml in it"):
        Watched(tmp_path / "nothing")
    watched = Watched(run)
    shutil.rmtree(run)
    with pytest.raises(RunDirError, match=r"config.toml cannot be read any more: No such file"):
        watched.look()


def test_one_that_has_not_begun_is_waited_for(run: Path) -> None:
    part(run, updates=0)
    shutil.rmtree(run / "checkpoints")
    for name in ("ledger.jsonl", "samples.jsonl"):
        (run / name).unlink()
    with directory_lock(run):
        os.utime(run / METRICS)
        view = Watched(run).view()
        assert (view.state, view.doing, view.quotes, view.left) == ("waiting", "for the first update", [], None)


def test_time_goes_on_between_two_updates(run: Path) -> None:
    """Updates lately took so long on average; what has gone by since the last is taken off what is left."""
    part(run, updates=12)
    now = [1000.0]
    os.utime(run / METRICS, (500.0, 500.0))
    with directory_lock(run):
        os.utime(run / LOCK, (400.0, 400.0))
        watched = Watched(run, clock=lambda: now[0], now=lambda: 502.0)
        lines = read_lines(run / METRICS)
        each = sum(line["seconds/update"] for line in lines[2:]) / 10
        now[0] += 1.0
        view = watched.view()
    assert view.elapsed == pytest.approx(lines[-1]["time"] + 3.0)
    assert view.left == pytest.approx(each * 18 - 3.0)
    rolling, scoring, ready = (lines[-1][f"groups/{name}"] for name in ("rolling", "scoring", "ready"))
    assert view.state == "training"
    assert view.doing == f"{rolling:.0f} rolling out, {scoring:.0f} scoring, {ready:.0f} scored"


# --- what it is doing -------------------------------------------------------------------------------------------------

SIGNS = Signs(
    path=Path("runs/a"),
    update=20,
    updates=40,
    every=0,
    evaluated=None,
    held=True,
    here=True,
    writer="12 on host",
    loading=False,
    connected=True,
    checkpoint=16,
    finished=False,
    silent=1.0,
    usual=2.0,
    groups="4 rolling out",
)
RESUME = "; slipstream resume runs/a continues after update"
DEAD = "probably dead: process 12 on host is gone"
SILENTLY = "probably dead: process 12 on host has written nothing for 0:01 h"
GONE = {"held": False, "connected": False}
STATES: list[tuple[dict[str, Any], str]] = [
    ({}, "training: 4 rolling out"),
    ({"groups": ""}, "training: no groups in flight"),
    ({"silent": SILENT}, "training: 4 rolling out; nothing was written for 0:01 h"),
    ({"silent": SILENT, "usual": SILENT}, "training: 4 rolling out"),
    ({"update": 0, "checkpoint": None}, "waiting: for the first update"),
    ({"update": 0, "every": 10}, "evaluating: held-out prompts before the first update"),
    ({"update": 0, "every": 10, "evaluated": 0}, "waiting: for the first update"),
    ({"every": 10, "evaluated": 10}, "evaluating: held-out prompts after update 20"),
    ({"every": 10, "evaluated": 20}, "training: 4 rolling out"),
    ({"every": 15, "evaluated": 15}, "training: 4 rolling out"),
    ({"update": 40}, "ending: the last update is done, the student is being saved"),
    ({"update": 40, "every": 40, "evaluated": 0}, "evaluating: held-out prompts after update 40"),
    ({"loading": True}, "loading: the run continues after update 20"),
    ({"loading": True, "finished": True, "update": 40}, "loading: the run continues after update 40"),
    ({"loading": True, "update": 0}, "loading: the run starts"),
    ({"finished": True}, "finished: the student is in runs/a/final"),
    ({"finished": True, **GONE}, "finished: the student is in runs/a/final"),
    ({"checkpoint": 20, **GONE}, f"stopped: after update 20{RESUME} 20"),
    (
        {"update": 0, "checkpoint": None, **GONE},
        "stopped: before its first update; there is no checkpoint to resume from",
    ),
    ({"held": False}, f"{DEAD}{RESUME} 16"),
    ({"checkpoint": 20, "held": False}, f"{DEAD}{RESUME} 20"),
    (GONE, f"{DEAD}{RESUME} 16"),
    ({"held": False, "checkpoint": None}, f"{DEAD}; there is no checkpoint to resume from"),
    # a lock that is held on another machine cannot always be seen
    ({"held": False, "here": False}, "training: 4 rolling out"),
    ({"held": None}, "training: 4 rolling out"),
    ({"held": None, "finished": True}, "finished: the student is in runs/a/final"),
    ({"held": False, "here": False, "silent": SILENT}, f"{SILENTLY}{RESUME} 16"),
    ({"checkpoint": 20, "here": False, **GONE}, f"stopped: after update 20{RESUME} 20"),
    ({"checkpoint": 20, "here": False, "loading": True, **GONE}, "loading: the run continues after update 20"),
]  # fmt: skip


@pytest.mark.parametrize("changes, said", STATES, ids=[f"{i}" for i in range(len(STATES))])
def test_what_a_run_is_doing_is_found_in_its_directory(changes: dict[str, Any], said: str) -> None:
    state = state_of(replace(SIGNS, **changes))
    assert f"{state.name}: {state.doing}" == said
    assert state.alive == (state.name not in ("finished", "stopped", "probably dead"))


def test_a_lock_says_whether_somebody_writes(run: Path) -> None:
    """And who looks does not keep out who writes."""
    assert held(run) is False and writer(run) == ""
    part(run, updates=12)
    with directory_lock(run):
        assert held(run) is True and writer(run).startswith(f"{os.getpid()} on ")
        os.utime(run / METRICS)
        watched = Watched(run)
        assert watched.view().state == "training"
        os.utime(run / METRICS, (0, 0))
        assert watched.view().state == "loading"
    assert held(run) is False
    assert watched.view().state == "probably dead", "its last checkpoint is not its last update"
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / "12").mkdir(parents=True)
    assert watched.view().state == "stopped"
    (run / SOCKET).touch()
    assert watched.view().state == "probably dead", "who is told to stop takes its socket away"


# --- what happened ----------------------------------------------------------------------------------------------------


def test_what_an_update_says_that_the_one_before_did_not_is_news() -> None:
    before = {
        "update": 4,
        "idle/sampler": 0.1,
        "idle/scorer": 0.0,
        "guard/ess": 1.0,
        "guard/kl": 0.0,
        "tau": 4.0,
        "restarted": 1.0,
    }
    after = before | {
        "update": 5,
        "guard/ess": 0.25,
        "guard/kl": 1.0,
        "tau": 3.0,
        "restarts/scorer": 2.0,
        "restarted": 4.0,
    }
    assert list(of_updates(before, before | {"update": 5})) == []
    assert [said for _, said in of_updates(before, after)] == [
        "guards.ess: learning rate × 0.25",
        "guards.kl: tau is lowered by 1",
        "scorer died and was restarted (2 × so far)",
        "tau from 4 to 3",
        "3 groups became too old and were restarted",
    ]
    assert [said for _, said in of_updates(after, before | {"freshness/refreshes": 1.0, "restarted": 4.0})] == [
        "guards.ess: off",
        "guards.kl: off, tau is restored",
        "tau from 3 to 4",
        "refresh: all stale groups in flight were restarted",
    ]
    workers = {"update": 6, "idle/sampler": 0.1, "idle/sampler-1": 0.0}
    assert list(of_updates(before, workers)) == [Event(6, "sampler-1 joined"), Event(6, "scorer left")]
    steered = {"update": 1, "publish_every": 1.0}
    assert list(of_updates(steered, {"update": 2, "publish_every": 2.0})) == [Event(2, "publish_every from 1 to 2")]
    assert list(of_updates({"update": 1}, {"update": 2, "guard/ess": 0.5})) == [
        Event(2, "guards.ess: learning rate × 0.5")
    ]


def test_what_was_dropped_is_told_with_its_cause_and_once_for_many() -> None:
    dropped = {"end": "dropped", "reason": "scoring failed", "version": 7}
    lines = [
        {"end": "trained", "version": 6},
        *[dropped | {"cause": "no answer"}] * 3,
        {"end": "trained", "version": 7, "causes": ["the tool hung", "the tool hung"]},
        {"end": "trained", "version": 7},
        dropped,
    ]
    assert list(of_ledger(lines)) == [
        Event(7, "3 × group dropped, scoring failed: no answer"),
        Event(7, "2 × response left out: the tool hung"),
        Event(7, "group dropped, scoring failed"),
    ]
    assert list(of_ledger([])) == []


def test_groups_that_a_stop_dropped_are_told(tmp_path: Path) -> None:
    go(tmp_path / "run", Async(), updates=30, until=6)
    watched = Watched(tmp_path / "run")
    dropped = [line for line in read_lines(tmp_path / "run" / "ledger.jsonl") if line["end"] == "dropped"]
    assert [f"{update}: {said}" for update, said in watched.events] == [
        f"{watched.number}: {len(dropped)} × group dropped, run stopped"
    ]


# --- the command ------------------------------------------------------------------------------------------------------


def test_keys_leaf_hold_and_quit(finished: Path) -> None:
    watched = Watched(finished)
    first = watched.view().quotes[0]
    assert not handle_keys(b"n", watched)
    assert watched.view().quotes[0] is not first and watched.view().place == "50 of 50, held"
    assert not handle_keys(b"pp", watched)
    assert watched.view().place == "48 of 50, held"
    assert not handle_keys(b" x\xff", watched) and not watched.turning.paused
    assert handle_keys(b"xq", watched)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    yield tmp_path


def test_where_there_is_no_terminal_one_frame_is_printed_as_plain_text(
    run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["watch", "run"], ["watch", "run", "--once"]):
        assert main(words) == 0
        out, err = capsys.readouterr()
        lines = out.splitlines()
        assert err == "" and "\x1b" not in out and max(map(len, lines)) <= 100
        assert lines[0].startswith("run   ") and "  update 30/30  " in lines[0]
        assert lines[1] == "finished: the student is in run/final"
        assert any(line.startswith("KL to teacher ") for line in lines)
        assert any(line.startswith("── update 30, lag ") for line in lines)
    assert main(["watch", "nothing"]) == 2
    assert capsys.readouterr().err == "error: nothing holds no run: there is no config.toml in it\n"
    (run / METRICS).write_text('{"kind": "train"\n')
    assert main(["watch", "run"]) == 2
    assert capsys.readouterr().err.startswith("error: run/metrics.jsonl is damaged: ")


def test_once_keeps_the_colours_of_a_terminal(finished: Path) -> None:
    console = Console(force_terminal=True, width=80, height=5, color_system="standard", _environ={"TERM": "xterm"})
    with console.capture() as captured:
        watch(finished, console, once=True)
    text = captured.get()
    assert "\x1b[1;32mfinished" in text and "\x1b[?1049h" not in text and len(text.splitlines()) > 15


def test_a_line_of_metrics_that_no_vocabulary_knows_is_no_hindrance(run: Path) -> None:
    """A run of a later version is watched as far as it is understood."""
    lines = read_lines(run / METRICS)
    (run / METRICS).write_text("".join(json.dumps(line | {"new/name": 1.0, "also": 2.0}) + "\n" for line in lines))
    assert Watched(run).view().update == 30
