"""Every end of a run, as a command that is killed, stopped and told to stop: nothing is left of it, and it goes on."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.protocols import Engines
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runs import start as command
from support.coordinators import Coordinators, below, open_files, semaphores
from support.runtime_cases import Fate
from support.slow_cases import with_slow

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

RUN = """
student = "{models}/student"
updates = 100000
output = "run"
[data]
train = "rows.jsonl"
[teachers.main]
model = "{models}/teacher"
[sampler]
max_tokens = 8
slots = 8
[loss]
m = 2
[learner]
batch_size = 4
[task]
reward = "exact"
"""


def write_run(home: Path, models: Path) -> None:
    (home / "run.toml").write_text(RUN.format(models=models))
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def updates_of(coordinators: Coordinators) -> list[dict[str, Any]]:
    return read_lines(coordinators.home / "run" / "metrics.jsonl")


def wait_for(coordinators: Coordinators, what: Callable[[], bool], seconds: float = 100) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, coordinators.output()
        time.sleep(0.05)


def check_exact(run: Path) -> None:
    """Every update is made once, and every group ends once."""
    lines, ledger = read_lines(run / "metrics.jsonl"), read_lines(run / "ledger.jsonl")
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))
    assert sorted(entry["number"] for entry in ledger) == list(range(len(ledger)))
    assert sum(entry["end"] == "trained" for entry in ledger) == 4 * len(lines)


def daemons(coordinator: int) -> dict[str, int]:
    """Processes of its Ray."""
    return {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in below(coordinator)}


def listening() -> set[str]:
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    return {f"socket:[{line.split()[9]}]" for table in tables for line in table if line.split()[3] == "0A"}


@pytest.fixture(scope="module")
def coordinators(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinators]:
    home = tmp_path_factory.mktemp("ends")
    write_run(home, models_dir)
    made = Coordinators(home)
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_run_whose_learner_dies_goes_back_to_its_last_checkpoint(
    kind: str, tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, models_dir)
    monkeypatch.chdir(tmp_path)
    go, fates = command.Start.loop, {5: "learner"}

    def with_a_fate(start: Any, engines: Engines, log: RunLog, *args: Any) -> None:
        log.sinks.append(Fate(signal.SIGKILL, fates, lambda _: engines.learner.pid))  # type: ignore[attr-defined]
        go(start, engines, log, *args)

    monkeypatch.setattr(command.Start, "loop", with_a_fate)
    changes = ["--runtime.kind", kind, "--updates", "8", "--checkpoint.every", "3"]
    assert main(["train", "run.toml", "--skip-checks", *changes]) == 0
    said = capsys.readouterr().out
    assert re.search(r"learner \(pid \d+\) is gone: .*; the run restarts from its last checkpoint", said)
    assert "continuing from run/checkpoints/3; " in said and "died and were restarted: learner 1 ×" in said
    lines, ledger = read_lines(tmp_path / "run" / "metrics.jsonl"), read_lines(tmp_path / "run" / "ledger.jsonl")
    assert [line["update"] for line in lines] == list(range(1, 9))
    assert [line.get("restarts/learner") for line in lines] == [None] * 3 + [1] * 5
    assert sorted((entry["number"], entry["end"]) for entry in ledger) == [(number, "trained") for number in range(32)]
    events = json.loads((tmp_path / "run" / "trace.json").read_text().rstrip(",\n") + "]")
    (gap,) = [event for event in events if event["name"] == "gone"]
    assert gap["ts"] == pytest.approx(lines[2]["time"] * 1e6, abs=1) and lines[3]["time"] * 1e6 > gap["ts"] + gap["dur"]


def test_workers_come_and_go_while_a_run_goes_on(
    coordinators: Coordinators, capsys: pytest.CaptureFixture[str]
) -> None:
    def scale(*changes: str) -> str:
        code = main(["scale", str(coordinators.home / "run"), *changes])
        output = capsys.readouterr()
        return output.out if code == 0 else output.err

    def until(lines: str) -> None:
        ends = time.monotonic() + 120
        while scale() != lines:
            assert time.monotonic() < ends, (scale(), coordinators.output())
            time.sleep(0.1)

    pids = coordinators.running("--updates", "1000000")
    until("sampler: 1 working (sampler)\nteacher.main: 1 working (scorer)\n")
    assert "1 starting (sampler-1)" in scale("sampler=+1", "teacher.main=2")
    until("sampler: 2 working (sampler, sampler-1)\nteacher.main: 2 working (scorer, scorer-1)\n")
    assert scale("sampler=+1", "teacher.main=-2") == "error: teacher.main=-2: there are 2, and at least one must stay\n"
    assert scale("sampler=99999").startswith("error: 100002 engines are more than ")
    scale("sampler=-1", "teacher.main=1")
    until("sampler: 1 working (sampler)\nteacher.main: 1 working (scorer)\n")
    names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in below(pids["launcher"])]
    assert sorted(names) == ["learner", "sampler", "scorer"]
    os.kill(pids["coordinator"], signal.SIGINT)
    assert coordinators.end() == 130
    assert re.search(r"^sampler-1 is at work after .*^sampler-1 has left$", coordinators.output(), re.M | re.S)
    assert scale("sampler=+1").endswith("continues a stopped run\n")
    assert not (coordinators.home / "run" / "scale.sock").exists()


def test_nothing_is_left_of_a_run_that_is_done_or_refused(coordinators: Coordinators) -> None:
    coordinators.train("--updates", "2")
    assert coordinators.end() == 0 and "done: student in" in coordinators.output()
    coordinators.train("--student", "nowhere")
    assert coordinators.end() == 2 and coordinators.output().startswith("error: ")


@pytest.mark.parametrize(
    ("victim", "number", "status", "says"),
    [
        ("coordinator", signal.SIGINT, 130, "interrupted"),
        ("coordinator", signal.SIGTERM, 143, "terminated"),
        ("coordinator", signal.SIGHUP, 129, "hung up"),
        ("coordinator", signal.SIGKILL, -signal.SIGKILL, ""),
        ("launcher", signal.SIGKILL, 2, "is gone: the process launcher, its parent process, was killed"),
        ("learner", signal.SIGKILL, 2, "has no checkpoint to go on from: it was stopped before the first"),
        ("sampler", signal.SIGKILL, 2, "the last sampler died: sampler (pid"),
        ("scorer", signal.SIGTERM, 2, "is gone: killed by SIGTERM"),
    ],
)
def test_nothing_is_left_however_a_run_ends(
    coordinators: Coordinators, victim: str, number: int, status: int, says: str
) -> None:
    pids = coordinators.running("--runtime.restarts", "0")
    assert pids.keys() == {"coordinator", "launcher", "learner", "sampler", "scorer", "grader"}
    shared = set[str]().union(*map(semaphores, pids.values()))
    assert not listening() & set[str]().union(*map(open_files, pids.values())), "nobody can connect to any of them"
    # a terminal sends Ctrl-C and its end to the whole group of processes, and others to one of them
    if number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(pids[victim], number)
    else:
        os.kill(pids[victim], number)
    assert coordinators.end() == status, coordinators.output()
    assert says in coordinators.output()
    assert not [name for name in shared if Path(name).exists()]


def test_who_was_stopped_does_not_outlive_a_run_that_is_killed(coordinators: Coordinators) -> None:
    pids = coordinators.running()
    for victim in ("grader", "sampler", "launcher"):
        os.kill(pids[victim], signal.SIGSTOP)
    os.kill(pids["coordinator"], signal.SIGKILL)
    assert coordinators.end() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "status"),
    [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_nothing_is_left_of_a_ray_that_was_started_here(coordinators: Coordinators, number: int, status: int) -> None:
    coordinator = coordinators.trains("--runtime.kind", "ray")
    commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in below(coordinator)]
    (directory,) = [Path(words[3]) for words in commands if words[0] == "sh"]
    assert list(directory.rglob("session_*")), "sockets and logs of Ray"
    shared = semaphores(coordinator)
    os.kill(coordinator, number)
    assert coordinators.end() == status, coordinators.output()
    assert not directory.exists() and not [name for name in shared if Path(name).exists()]
    assert not (coordinators.home / ".ray").exists(), "a token that all may read"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("daemon", with_slow(["raylet", "gcs_server"], quick=["gcs_server"]))
def test_a_daemon_of_ray_that_hangs_holds_up_no_end(coordinators: Coordinators, daemon: str) -> None:
    coordinator = coordinators.trains("--runtime.kind", "ray")
    os.kill(daemons(coordinator)[daemon], signal.SIGSTOP)
    os.kill(coordinator, signal.SIGTERM)
    assert coordinators.end() == 143, coordinators.output()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("daemon", with_slow(["raylet", "gcs_server"], quick=["raylet"]))
def test_a_daemon_of_ray_that_dies_costs_the_updates_since_the_last_checkpoint(
    coordinators: Coordinators, daemon: str
) -> None:
    coordinator = coordinators.trains("--runtime.kind", "ray", "--checkpoint.every", "2", "--runtime.heartbeat", "15")
    wait_for(coordinators, (coordinators.home / "run" / "checkpoints" / "2").exists)
    os.kill(daemons(coordinator)[daemon], signal.SIGKILL)
    wait_for(coordinators, lambda: any("restarts/learner" in line for line in updates_of(coordinators)), 200)
    os.kill(coordinator, signal.SIGTERM)
    assert coordinators.end() == 143, coordinators.output()
    check_exact(coordinators.home / "run")
    said = coordinators.output()
    assert f"{daemon}, a daemon of Ray, has ended; the run restarts from its last checkpoint\n" in said
    assert said.count("starting Ray\n") == 2 and "Traceback" not in said and "(raylet)" not in said


def test_a_run_that_is_told_again_and_again_to_stop_ends_without_a_word_of_tasks(coordinators: Coordinators) -> None:
    pids = coordinators.running()
    for _ in range(3):
        os.killpg(pids["coordinator"], signal.SIGINT)
        time.sleep(0.01)  # signals that are pending are one
    assert coordinators.end() == 130
    said = coordinators.output()
    assert "interrupted" in said and "Task" not in said and "Traceback" not in said


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["sampler", "scorer", "learner", "launcher"])
def test_a_run_outlives_its_engines_and_nothing_is_left_of_any(
    coordinators: Coordinators, victim: str, how: signal.Signals
) -> None:
    if (victim, how) == ("launcher", signal.SIGSTOP):
        pytest.skip("nobody needs it until somebody dies")
    pids = coordinators.running("--checkpoint.every", "2", "--runtime.heartbeat", "5")
    wait_for(coordinators, (coordinators.home / "run" / "checkpoints" / "2").exists)
    os.kill(pids[victim], how)
    again = "learner" if victim == "launcher" else victim
    wait_for(coordinators, lambda: any(f"restarts/{again}" in line for line in updates_of(coordinators)))
    os.kill(pids["coordinator"], signal.SIGTERM)
    assert coordinators.end() == 143, coordinators.output()
    check_exact(coordinators.home / "run")


def test_a_run_goes_on_when_a_grader_is_killed(coordinators: Coordinators) -> None:
    pids = coordinators.running()
    os.kill(pids["grader"], signal.SIGKILL)
    seen = len(updates_of(coordinators))
    wait_for(coordinators, lambda: len(updates_of(coordinators)) >= seen + 5)
    os.kill(pids["coordinator"], signal.SIGTERM)
    assert coordinators.end() == 143
