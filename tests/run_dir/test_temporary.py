"""Temporary directories of a killed process are removed by the next; those of a living one are not."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slipstream.environments.gateway.agent_processes import Agent, Programs
from slipstream.environments.gateway.server import Server
from slipstream.run_dir.temporary import TemporaryDirectory

HOLD = """
import sys
from slipstream.run_dir.temporary import TemporaryDirectory
made = TemporaryDirectory("kind-", sys.argv[1])
(made.path / "weights").write_text("w")
print(made.path, flush=True)
sys.stdin.read()
"""


def test_a_directory_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (tmp_path / "kind-link").symlink_to(theirs)
        (tmp_path / "kindred").mkdir()
        for _ in range(2):
            mine = TemporaryDirectory("kind-", str(tmp_path))
            assert (theirs / "weights").exists() and mine.path.stat().st_mode & 0o777 == 0o700
            mine.close()
            assert not mine.path.exists()
        other.kill()
    mine = TemporaryDirectory("kind-", str(tmp_path))
    mine.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kind-link", "kindred"]


def test_what_a_killed_process_left_of_agents_ends_before_its_directory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    home = tmp_path / "slipstream-agents-old" / "agent-x" / "home"
    home.mkdir(parents=True)
    sleeping = [sys.executable, "-S", "-c", "print(flush=True); import time; time.sleep(60)"]
    left, other = (
        subprocess.Popen(sleeping, env={"HOME": str(place)}, stdout=subprocess.PIPE) for place in (home, tmp_path)
    )
    for each in (left, other):
        assert each.stdout is not None and each.stdout.readline()
    try:
        Programs(Agent(command=("true",), workspace=None, verify=None)).close()
        assert left.wait(10) == -signal.SIGKILL and not home.exists()
        assert other.poll() is None, "its HOME is not below the directory"
    finally:
        for each in (left, other):
            each.kill()
            each.communicate()


def test_a_gateway_for_sandboxed_agents_removes_the_directory_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "slipstream-gateway-old").mkdir()
    server = Server("student", walled=True)
    try:
        assert [path.name for path in tmp_path.iterdir()] == [Path(server.walled_at).parent.name]
    finally:
        server.close()
    assert list(tmp_path.iterdir()) == []
