"""Child processes: all that a program started ends with it, and the end of each is told in one phrase."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path

import pytest

from slipstream import processes
from slipstream.errors import SandboxError


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_dead(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-15, "killed by SIGTERM")],
)
def test_an_end_is_a_status_or_a_signal(code: int, text: str) -> None:
    assert processes.exit_text(code) == text


@pytest.mark.parametrize("ends", [*permutations(range(3))])
def test_thresholds_of_garbage_collection_are_restored_whichever_user_ends_first(ends: tuple[int, ...]) -> None:
    """An agents' gateway begins in an inline run and ends after it."""
    before, wanted = gc.get_threshold(), [(50_000, 20, 100), (2_000, 5, 10_000), (50_000, 20, 100)]
    users = [processes.garbage_collection(*each) for each in wanted]
    for user in users:
        user.__enter__()
    left = [0, 1, 2]
    for number in ends:
        users[number].__exit__(None, None, None)
        left.remove(number)
        assert gc.get_threshold() == (wanted[left[-1]] if left else before)
    gc.set_threshold(701, 11, 12)  # what a user sets between two runs is kept, too
    try:
        with processes.garbage_collection(*wanted[0]):
            assert gc.get_threshold() == wanted[0]
        assert gc.get_threshold() == (701, 11, 12)
    finally:
        gc.set_threshold(*before)


async def started(code: str, count: int) -> tuple[asyncio.subprocess.Process, list[int]]:
    """A shell that runs code, and the ids of its descendants when there are this many."""
    process = await processes.start_program(["/bin/sh", "-c", code])
    while len(found := processes.descendants(process.pid)) < count:
        await asyncio.sleep(0.01)
    return process, found


def test_a_program_ends_with_all_of_its_descendants() -> None:
    async def main() -> list[int]:
        process, found = await started("sh -c 'sleep 60 & sleep 60' & setsid sleep 60 & wait", 4)
        await processes.end_program(process)
        assert process.returncode == -signal.SIGKILL, "it is killed before it can react to the end of its children"
        return found

    assert until_dead(asyncio.run(main()))


def test_a_program_that_has_ended_leaves_nothing_of_its_group() -> None:
    async def main() -> list[int]:
        process, found = await started("sleep 60 & sleep 0.2", 2)
        await processes.wait_for_exit(process)
        assert alive(found[0]) and process.returncode == 0
        await processes.end_program(process)
        return found

    assert until_dead(asyncio.run(main()))


def test_a_program_that_cannot_start_is_one_line() -> None:
    with pytest.raises(SandboxError, match="^sandbox: missing cannot be started: .*No such file"):
        asyncio.run(processes.start_program(["/nowhere/missing"]))


def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    async def main() -> None:
        starting = asyncio.create_task(processes.start_program(["sleep", "60"]))
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()

    before = processes.children(os.getpid())
    asyncio.run(main())
    assert processes.children(os.getpid()) == before


def test_a_group_that_is_not_there_is_told() -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as member,
        subprocess.Popen(["sleep", "60"], start_new_session=True) as leader,
    ):
        assert not processes.kill_group(member.pid) and processes.kill_group(leader.pid)
        processes.kill(member.pid)
        assert member.wait() == leader.wait() == -signal.SIGKILL


def test_a_child_dies_with_its_parent() -> None:
    code = """
import os, signal, time
from slipstream import processes
if (child := os.fork()) == 0:
    processes.die_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    assert until_dead([child])
