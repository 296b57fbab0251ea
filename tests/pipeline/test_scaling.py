"""More workers, and fewer: what is asked, the socket by which it is, and what becomes of the work."""

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schedule import Async
from slipstream.errors import ConfigError, RunDirError
from slipstream.pipeline.control.scaling import Room, check_room, requested_sizes
from slipstream.pipeline.run import Run
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runs.control_socket import SOCKET, scale, scale_server
from slipstream.simulation import virtual_clock as virtual
from support.mortal_workers import mortal
from support.scaling import scalable
from support.simulated_runs import PROMPTS, config, engines

NOW = {"sampler": 2, "teacher.main": 1}


def test_what_is_asked() -> None:
    assert requested_sizes([], NOW) == {}
    assert requested_sizes(["sampler=+2", "teacher.main=3"], NOW) == {"sampler": 4, "teacher.main": 3}
    assert requested_sizes(["teacher.größe=+1"], {"teacher.größe": 1}) == {"teacher.größe": 2}
    assert requested_sizes(["sampler=-1"], NOW) == {"sampler": 1}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("sampler", r"'sampler' is not a valid change: write sampler=\+2, teacher.main=-1 or sampler=3"),
        ("sampler=1.5", "is not a valid change"),
        ("sampler=٣", "is not a valid change"),
        (f"sampler={'1' * 5000}", "is not a valid change"),
        ("samplers=1", "no kind of worker is called 'samplers'; did you mean 'sampler'"),
        ("learner=2", "no kind of worker is called 'learner'; known: sampler, teacher.main"),
        ("sampler=-2", "sampler=-2: there are 2, and at least one must stay"),
        ("teacher.main=0", "teacher.main=0: there are 1, and at least one must stay"),
    ],
)
def test_what_cannot_be_asked(change: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        requested_sizes([change], NOW)
    with pytest.raises(ConfigError, match="sampler is named twice"):
        requested_sizes(["sampler=1", "sampler=2"], NOW)


def test_all_who_come_share_what_is_free() -> None:
    """Two GPUs and five CPUs."""
    takes = {"sampler": {"GPU": 1.0, "CPU": 0.0}, "teacher.main": {"GPU": 1.0, "CPU": 4.0}}
    room = Room({"GPU": 2.0, "CPU": 5.0}, takes)
    assert (room.of("sampler"), room.of("teacher.main")) == (2, 1)
    check_room({"sampler": 3, "teacher.main": 2}, NOW, room)
    check_room({"sampler": 4, "teacher.main": 1}, NOW, room)
    with pytest.raises(ConfigError, match="teacher.main=2: there is room for 0 more, by the GPUs and CPUs that are fr"):
        check_room({"sampler": 4, "teacher.main": 2}, NOW, room)
    with pytest.raises(ConfigError, match="teacher.main=3: there is room for 1 more"):
        check_room({"sampler": 1, "teacher.main": 3}, NOW, room)
    assert Room({}, {"sampler": {}}).of("sampler") == float("inf"), "where nobody counts"


# --- the socket -------------------------------------------------------------------------------------------------------


def told(changes: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    if changes == ["no"]:
        raise ConfigError("refused")
    return {"sampler": {"working": [*changes, "sampler"], "starting": [], "leaving": ["old"]}}


@pytest.mark.parametrize("depth", [1, 12])
def test_a_run_is_told_through_its_directory(tmp_path: Path, depth: int) -> None:
    """However long its path is."""
    run = tmp_path.joinpath(*["a-long-name-of-a-directory"] * depth)
    run.mkdir(parents=True)
    with pytest.raises(RunDirError, match="holds no run"):
        scale(run, [])
    (run / "config.toml").touch()
    (run / SOCKET).touch()  # left by one that was killed
    found: list[Any] = []

    async def main() -> None:
        async with scale_server(run, told, found.append):
            assert (run / SOCKET).stat().st_mode & 0o777 == 0o600
            found.append(await asyncio.to_thread(scale, run, ["x"]))
            found.append(await asyncio.to_thread(scale, run, []))
            with pytest.raises(ConfigError, match="refused"):
                await asyncio.to_thread(scale, run, ["no"])
        assert not (run / SOCKET).exists()

    asyncio.run(main())
    assert found == [
        ["sampler: 2 working (x, sampler); 1 leaving (old)"],
        ["sampler: 1 working (sampler); 1 leaving (old)"],
    ]
    with pytest.raises(RunDirError, match="no run is active there"):
        scale(run, [])


def test_a_run_that_was_killed_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET))
    assert (tmp_path / SOCKET).is_socket()
    with pytest.raises(RunDirError, match="no run is active there"):
        scale(tmp_path, [])


@pytest.mark.parametrize(
    "line", [b"{\n", b"[1]\n", b'{"scale": []}\n', b"\xff\n", b"x" * 70_000, b"[" * 60_000 + b"\n"]
)
def test_whoever_talks_nonsense_is_told_so(tmp_path: Path, line: bytes) -> None:
    def talk() -> Any:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(str(tmp_path / SOCKET))
            there.sendall(line)
            return json.loads(there.makefile().readline())

    async def main() -> Any:
        async with scale_server(tmp_path, told, print):
            return await asyncio.to_thread(talk)

    assert asyncio.run(main()) == {"error": 'expected one line of JSON, such as ["sampler=+2"]'}


def test_whoever_says_nothing_holds_up_no_end(tmp_path: Path) -> None:
    ended = threading.Event()

    def talk() -> bytes:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(str(tmp_path / SOCKET))
            there.sendall(b"[")
            ended.set()
            with suppress(ConnectionResetError):
                return there.recv(100)
            return b""

    async def main() -> bytes:
        async with scale_server(tmp_path, told, print):
            call = asyncio.create_task(asyncio.to_thread(talk))
            await asyncio.to_thread(ended.wait)
        return await call

    assert asyncio.run(main()) == b""


# --- the work ---------------------------------------------------------------------------------------------------------


def test_who_comes_takes_its_share_and_who_leaves_hands_over_what_it_has(tmp_path: Path) -> None:
    """Rollouts of 20 s, two at a time: 40 s for an update of four by one sampler, 20 s by two."""
    said, found = list[str](), list[Any]()

    async def main() -> None:
        made = scalable(lambda *_: 100, slots=2, learn=1.0)
        with RunLog(tmp_path, []) as log:
            run = Run(config(Async(tau=0), updates=12), made, PROMPTS, log, say=said.append)
            with pytest.raises(ConfigError, match="the run is still starting"):
                run.scale([], lambda _: None)
            task = asyncio.create_task(run.train())
            await asyncio.sleep(130.0)
            with pytest.raises(ConfigError, match="sampler=99: there is room for 8 more"):
                run.scale(["sampler=99"], lambda _: None)
            found.append(run.scale(["sampler=+1"], lambda _: None))
            run.scale(["sampler=+1"], lambda _: None)
            await asyncio.sleep(5.0)
            found.append(run.scale(["sampler=-1"], lambda _: None))
            await asyncio.sleep(145.0)
            found.append(run.scale(["sampler=-1"], lambda _: None))
            assert "sampler-1 is about to leave" in run.report()
            await task
            found.append(run.scale([], lambda _: None))

    virtual.run(main())
    lines, ledger = read_lines(tmp_path / "metrics.jsonl"), read_lines(tmp_path / "ledger.jsonl")
    assert [each["sampler"] for each in found] == [
        {"working": ["sampler"], "starting": ["sampler-1"], "leaving": []},
        {"working": ["sampler"], "starting": ["sampler-1"], "leaving": ["sampler-2"]},
        {"working": ["sampler"], "starting": [], "leaving": ["sampler-1"]},
        {"working": ["sampler"], "starting": [], "leaving": []},
    ]
    assert said == ["sampler-2 has left", "sampler-1 is at work after 10.0 s", "sampler-1 has left"]
    seconds = [round(line["seconds/update"]) for line in lines]
    assert seconds[1] == 42 and min(seconds) == 22 and seconds[-1] == 42
    assert lines[-1]["thrown_tokens"] == 0 and sorted(entry["number"] for entry in ledger) == list(range(48))
    assert "idle/sampler-1" in lines[5] and "idle/sampler-1" not in lines[-1]


def test_who_cannot_be_started_leaves_room_for_another(tmp_path: Path) -> None:
    said, made = list[str](), scalable(in_vain=True, most=2)

    async def main() -> None:
        with RunLog(tmp_path, []) as log:
            run = Run(config(Async(tau=1), updates=40), made, PROMPTS, log, say=said.append)
            task = asyncio.create_task(run.train())
            await asyncio.sleep(5.0)
            run.scale(["sampler=+1"], lambda _: None)
            await asyncio.sleep(60.0)
            assert made.free() == {"CPU": 1}
            run.scale(["sampler=+1"], lambda _: None)
            await task

    virtual.run(main())
    assert said[:3] == ["sampler-1 could not be started and is tried once more: no room"] * 3
    assert said[3].startswith("sampler-1 died 4 times in an hour") and said[4] == "sampler-1 has left"
    assert said[5] == "sampler-2 could not be started and is tried once more: no room"


def test_who_died_and_is_not_back_goes_first(tmp_path: Path) -> None:
    said, left = list[str](), list[Any]()

    async def dismiss(engine: Any) -> None:
        left.append(engine)

    made = replace(mortal(1, samplers=2, load=1e6), dismiss=dismiss, takes={"sampler": {"CPU": 1.0}})

    async def main() -> dict[str, Any]:
        with RunLog(tmp_path, []) as log:
            run = Run(config(Async(tau=1), updates=20), made, PROMPTS, log, say=said.append)
            task = asyncio.create_task(run.train())
            while not said:
                await asyncio.sleep(1.0)
            found = run.scale(["sampler=-1"], lambda _: None)
            await task
            return found

    found, _ = virtual.run(main())
    assert found["sampler"] == {"working": ["sampler-1"], "starting": [], "leaving": ["sampler-0"]}
    assert said == ["sampler-0 died and is started again: its process is gone", "sampler-0 has left"]
    assert left == [made.samplers[0]]


def test_where_all_share_a_process_nobody_comes_or_goes(tmp_path: Path) -> None:
    with RunLog(tmp_path, []) as log:
        run = Run(config(Async()), engines(), PROMPTS, log)
        with pytest.raises(ConfigError, match='runtime.kind = "inline" has all workers in one process'):
            run.scale([], lambda _: None)
