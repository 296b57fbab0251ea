"""Tools of agents: a workspace that goes into the sandbox and comes back, and their commands."""

import asyncio
import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slipstream.agents.mini import SUBMISSION_MARK, Sandboxed
from slipstream.agents.workspace import put, take, unpack, within
from slipstream.environments.gateway.agent_processes import Agent
from slipstream.errors import ConfigError, SandboxError
from slipstream.plan.environment import check_agent
from slipstream.sandbox import sandbox_of
from slipstream.sandbox.base import Limits, MiB, Session
from support.sandboxes import NO_BUBBLEWRAP

WALLED = pytest.mark.skipif(bool(NO_BUBBLEWRAP), reason=NO_BUBBLEWRAP)
SMALL = Limits(disk=4 * MiB)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    (place / "a" / "b").mkdir(parents=True)
    (place / "a" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (place / "a" / "run.sh").chmod(0o755)
    (place / "binary").write_bytes(bytes(range(256)) * 100)
    (place / "a" / "up").symlink_to("../binary")
    return place


def contents(place: Path) -> dict[str, Any]:
    """Return the content of every file and whether it is a program, and the target of every link."""

    def of(each: Path) -> Any:
        if each.is_symlink():
            return str(each.readlink())
        return None if each.is_dir() else (each.read_bytes(), os.access(each, os.X_OK))

    return {str(each.relative_to(place)): of(each) for each in place.rglob("*")}


def session(work: Callable[[Session], Any], sandbox: str = "bubblewrap") -> Any:
    async def main() -> Any:
        opened = await sandbox_of(sandbox).session(SMALL)
        try:
            return await work(opened)
        finally:
            await opened.close()

    return asyncio.run(main())


# --- workspaces -----------------------------------------------------------------------------------------------------


@WALLED
def test_a_workspace_comes_back_as_it_went_but_for_what_was_done(workspace: Path) -> None:
    before = contents(workspace)

    async def work(opened: Session) -> str:
        await put(opened, workspace, SMALL)
        await opened.run(["sh", "-c", "rm binary a/up; a/run.sh > said; ln said again; mkfifo pipe; ln -s /etc out"])
        return await take(opened, workspace, SMALL)

    assert session(work) == ""
    said = {"said": (b"ran\n", False), "again": (b"ran\n", False)}
    gone = {"binary", "a/up"}
    assert contents(workspace) == {name: what for name, what in before.items() if name not in gone} | said
    assert [each.name for each in workspace.parent.iterdir()] == ["workspace"]


@WALLED
def test_what_is_too_large_to_come_back_leaves_a_workspace_as_it_was(workspace: Path) -> None:
    before = contents(workspace)

    async def work(opened: Session) -> str:
        await put(opened, workspace, SMALL)
        await opened.run(["sh", "-c", "for n in 1 2 3 4 5; do truncate -s 3M sparse$n; done"], limits=SMALL)
        return await take(opened, workspace, SMALL)

    assert session(work) == "the sandbox's files cannot be read: output"
    assert contents(workspace) == before


@WALLED
def test_a_workspace_that_does_not_fit_is_no_fault_of_the_agent(workspace: Path) -> None:
    (workspace / "large").write_bytes(bytes(SMALL.disk))
    with pytest.raises(SandboxError, match=r"cannot be copied into the sandbox: /bin/tar: \./large: "):
        session(lambda opened: put(opened, workspace, SMALL))


def test_an_archive_writes_nothing_outside(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, kind, target in (
            ("../above", tarfile.REGTYPE, ""),
            ("/absolute", tarfile.REGTYPE, ""),
            ("out", tarfile.SYMTYPE, ".."),
            ("out/through", tarfile.REGTYPE, ""),
            ("far", tarfile.SYMTYPE, "/etc"),
            ("in", tarfile.SYMTYPE, "out"),
            ("hard", tarfile.LNKTYPE, "../secret"),
            ("device", tarfile.CHRTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member, io.BytesIO())
    (tmp_path / "secret").write_text("secret")
    into = tmp_path / "into"
    into.mkdir()
    unpack(archive.getvalue(), into)
    assert contents(into) == {"out": None, "out/through": (b"", False), "in": "out"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["into", "secret"]


def test_links_stay_within() -> None:
    for target in ("b", "../b", "../../b", "c/d/./e"):
        assert within(("x", "y", "link"), target), target
    for target in ("/b", "../../../b", "c/../b", "../c/../../b"):
        assert not within(("x", "y", "link"), target), target


# --- commands -------------------------------------------------------------------------------------------------------


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Exception by which mini-swe-agent recognises an end."""
    found = type("Submitted", (Exception,), {})
    module = ModuleType("minisweagent.exceptions")
    module.Submitted = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "minisweagent", ModuleType("minisweagent"))
    monkeypatch.setitem(sys.modules, "minisweagent.exceptions", module)
    return found


@WALLED
def test_commands_share_a_workspace_and_nothing_else_until_one_submits(
    workspace: Path, submitted: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "much")
    there = Sandboxed(workspace=str(workspace), env={"PAGER": "cat"}, timeout=20.0)
    hasty = Sandboxed(workspace=str(workspace), timeout=1.0)

    def ran(command: str, cwd: str = "", by: Sandboxed = there) -> tuple[str, int, str]:
        found = by.execute({"command": command}, cwd)
        return found["output"], found["returncode"], found["exception_info"]

    assert ran("echo a; echo b >&2; exit 3") == ("a\nb\n", 3, "")
    assert ran("cd a && X=1 && pwd; echo $PAGER $SECRET") == ("/work/a\ncat\n", 0, "")
    assert ran("pwd; echo [$X]; id -u; echo new > new", "a") == ("/work/a\n[]\n65534\n", 0, "")
    assert ran("ls; cat new", "/work/a") == ("b\nnew\nrun.sh\nup\nnew\n", 0, "")
    assert ran("sleep 60", by=hasty) == ("", -1, "the command was stopped after 1 s")
    assert ran(f"echo x; echo {SUBMISSION_MARK}")[0] == f"x\n{SUBMISSION_MARK}\n"
    assert ran(f"echo {SUBMISSION_MARK}; exit 1")[1] == 1
    assert not (workspace / "a" / "new").exists()
    with pytest.raises(submitted) as told:
        there.execute({"command": f"echo {SUBMISSION_MARK}; echo all; echo of it"})
    (message,) = told.value.args
    assert message["role"] == "exit" and message["extra"]["exit_status"] == "Submitted"
    assert message["content"] == message["extra"]["submission"] == "all\nof it\n"
    assert (workspace / "a" / "new").read_text() == "new\n"
    there.close()
    hasty.close()


@WALLED
def test_what_an_agent_did_comes_back_however_it_ends(workspace: Path) -> None:
    code = (
        "from slipstream.agents.mini import Sandboxed\n"
        "Sandboxed().execute({'command': 'echo done > done'})\n"
        "raise RuntimeError\n"
    )
    env = {**os.environ, "SLIPSTREAM_WORKSPACE": str(workspace), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=False, stderr=subprocess.DEVNULL)
    assert (workspace / "done").read_text() == "done\n"


def test_an_agent_without_a_workspace_is_told() -> None:
    with pytest.raises(ConfigError, match=r"environment\.workspace = '/nowhere' is not a directory"):
        Sandboxed(workspace="/nowhere")


# --- agents ---------------------------------------------------------------------------------------------------------


def test_an_agent_dies_with_whoever_started_it(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from slipstream.environments.gateway.agent_processes import Agent, Programs

async def main():
    agent = Agent(command=("sh", "-c", "echo $$ > {tmp_path}/pid; sleep 600"), workspace=None, verify=None)
    async with Programs(agent).playing({{"prompt": "?"}}, "http://127.0.0.1:1/sessions/x/v1", "x"):
        await asyncio.sleep(600)

asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    file, until = tmp_path / "pid", time.monotonic() + 30
    while not (file.exists() and file.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    agent = Path("/proc", file.read_text().strip())
    while agent.exists() and "State:\tZ" not in (agent / "status").read_text() and time.monotonic() < until:
        time.sleep(0.02)
    assert time.monotonic() < until


def test_a_program_that_an_agent_would_not_find_where_it_begins_is_missed_before_a_run(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.parent)
    check_agent(Agent(command=("a/run.sh",), workspace="workspace", verify=("cat",)))
    for command, place in ((("workspace/a/run.sh",), "workspace"), (("workspace/a/run.sh",), None)):
        with pytest.raises(ConfigError, match=r"no program 'workspace/a/run.sh' in the workspace, where it starts"):
            check_agent(Agent(command=command, workspace=place, verify=None))
