"""Processes that end in every way, and studies from end to end."""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from slipstream.cli import main
from slipstream.commands.sweep import PRELOAD
from slipstream.run_dir.atomic_files import directory_lock
from slipstream.run_dir.reading import RunDir
from slipstream.studies.cells import Job, run_jobs
from slipstream.studies.results import Sweep
from slipstream.studies.study import Study
from support import jobs
from support.slow_cases import with_slow
from support.small_study import STUDY

STUDIES = sorted((Path(__file__).parents[2] / "configs" / "lab").glob("*.toml"))


# --- processes ---------------------------------------------------------------------------------------------


def job(tmp_path: Path, work: Any, *, patience: float = 100.0) -> Job:
    name = getattr(work, "__name__", "counts")
    return Job(name, work, tmp_path / f"{name}.txt", patience)


@pytest.mark.processes
def test_a_job_that_ends_in_any_way_ends_no_other_one(tmp_path: Path) -> None:
    works = [jobs.is_killed, jobs.fails, jobs.refuses, jobs.leaves, partial(jobs.counts, 3)]
    events = [e for e in run_jobs([job(tmp_path, work) for work in works], 2, preload=PRELOAD) if e is not None]
    ends = {event.job.name: (event.kind, event.value) for event in events if event.kind in ("done", "failed")}
    assert ends == {
        "is_killed": (
            "failed",
            "its process ended unexpectedly: killed by SIGKILL, as the kernel does if memory runs out",
        ),
        "fails": ("failed", "KeyError: 'nobody'"),
        "refuses": ("failed", "student: there is none"),
        "leaves": ("failed", "its process ended unexpectedly: exit status 3"),
        "counts": ("done", 3),
    }
    assert [e.value for e in events if e.job.name == "counts" and e.kind == "moved"] == [0, 1, 2]
    assert (tmp_path / "counts.txt").read_text() == "counted\n"
    assert (tmp_path / "refuses.txt").read_text() == "error: student: there is none\n"
    assert "Traceback" in (tmp_path / "fails.txt").read_text()


def test_so_many_run_at_a_time_and_in_their_order(tmp_path: Path) -> None:
    todo = [Job(str(n), partial(jobs.counts, 1), tmp_path / f"{n}.txt", 100.0) for n in range(5)]
    there, most, order = set[str](), 0, list[str]()
    for event in run_jobs(todo, 2, preload=PRELOAD):
        if event is None:
            continue
        if event.kind == "begun":
            there.add(event.job.name)
            order.append(event.job.name)
        elif event.kind == "done":
            there.remove(event.job.name)
        most = max(most, len(there))
    assert order == ["0", "1", "2", "3", "4"] and most == 2 and not there


def gone(pid: int) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_job_of_which_nothing_is_heard_is_ended(tmp_path: Path) -> None:
    pid = 0
    for event in run_jobs([job(tmp_path, jobs.hangs, patience=5.0)], 1, preload=PRELOAD):
        if event is not None and event.kind == "moved":
            pid = event.value
        elif event is not None and event.kind == "failed":
            assert event.value == "it hung: no message for 5 s"
    assert pid and gone(pid)


def test_who_stops_listening_stops_the_jobs(tmp_path: Path) -> None:
    events = run_jobs([job(tmp_path, jobs.waits)], 1, preload=PRELOAD)
    pid = next(event.value for event in events if event is not None and event.kind == "moved")
    events.close()
    assert gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are forked from nobody")
def test_a_job_whose_parent_process_is_killed_is_ended_and_others_run(tmp_path: Path) -> None:
    words = [sys.executable, jobs.__file__, "orphaned", str(tmp_path / "log")]
    pid, *ends = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert ends == ["its process ended unexpectedly: the process from which it was forked is gone", "1"]
    assert gone(int(pid))


def test_jobs_end_with_whoever_began_them(tmp_path: Path) -> None:
    words = [sys.executable, jobs.__file__, "first", str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    assert gone(pid)


# --- from end to end ---------------------------------------------------------------------------------------


def miniature(path: Path, to: Path) -> Path:
    """Two cells of a study, as short as can be: its first and its last arm, or the ends of its grid."""
    tree = tomllib.loads(path.read_text("utf-8"))
    sweep = tree["sweep"]

    def ends(values: list[Any], count: int) -> list[Any]:
        return values[:1] if count == 1 else [values[0], values[-1]]

    arms = list(sweep.get("arms", {}))
    kept = ends(arms, min(2, len(arms))) if arms else []
    several = [2, *[1] * 9] if len(kept) < 2 else [1] * 10

    def cut(grid: dict[str, Any]) -> dict[str, Any]:
        return {k: cut(v) if isinstance(v, dict) else ends(v, several.pop(0)) if v else v for k, v in grid.items()}

    sweep["grid"] = cut(sweep.get("grid", {}))
    sweep["arms"] = {name: sweep["arms"][name] for name in kept}
    for arm in sweep["arms"].values():
        if "grid" in arm:
            arm["grid"] = cut(arm["grid"])
    sweep |= {"seeds": [1], "last": 1, "claims": []}
    sweep["conditions"] = dict(list(sweep.get("conditions", {}).items())[-1:])
    times = 4
    for condition in sweep["conditions"].values():
        condition.pop("updates", None)
        condition.pop("eval", None)
        tree["eval"]["every"] = tree["eval"].get("every", 1)
        times = max(times, condition.get("reuse", {}).get("times", 1))
    tree |= {"updates": 2, "output": str(to / "out")}
    if tree["student"].startswith("runs/real/"):  # its models are made by `make real`
        tree |= {"student": "builtin:student", "data": {"eval": "builtin:arithmetic"}}
        tree["teachers"]["main"]["model"] = "builtin:teacher"
    tree.setdefault("data", {})["limit"] = 40
    tree.setdefault("learner", {}).update(batch_size=times * tree.get("sampler", {}).get("group", 1), warmup=0)
    tree.setdefault("sampler", {})["max_tokens"] = 12
    if tree.get("eval", {}).get("every"):
        tree["eval"] |= {"every": 1, "prompts": 4}
    (to / path.name).write_text(tomli_w.dumps(tree))
    return to / path.name


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_config_of_every_study_is_valid(path: Path) -> None:
    assert Study.load(path).cells


@pytest.mark.parametrize("path", with_slow(STUDIES, quick=STUDIES[::3]), ids=lambda path: path.stem)
def test_two_cells_of_every_study_train(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(miniature(path, tmp_path)), "--jobs", "2"]) == 0, capsys.readouterr()
    sweep = Sweep(tmp_path / "out")
    assert len(sweep.finished) == 2
    for measure in sweep.measures:
        assert all(sweep.value(cell, measure) is not None for cell in sweep.cells), measure


def test_a_study_is_no_config_and_says_what_to_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    for command in (["train"], ["config"], ["config", "--check"]):
        assert main([*command, str(tmp_path / "study.toml")]) == 2
        told = f"error: {tmp_path}/study.toml is a study of several runs: slipstream sweep {tmp_path}/study.toml\n"
        assert capsys.readouterr().err == told


MINE = """
import os, signal
from pathlib import Path

def score(text, ground_truth):
    if ground_truth in text:  # right answers, which every check of the config tries, too
        return 1.0
    done = Path(__file__).with_name("done")
    times = len(done.read_text()) if done.exists() else 0
    done.write_text("x" * (times + 1))
    if times == 0:
        os.kill(os.getppid(), signal.SIGKILL)  # the run
    if times == 1:
        os.kill(SWEEP, signal.SIGINT)
    return 1.0
"""
"""Kills its run at the first wrong answer, and stops the study at the next one."""


@pytest.mark.processes
def test_a_study_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(STUDY)
    Path("mine.py").write_text(MINE.replace("SWEEP", str(os.getpid())))
    small = ["two.toml", "--sweep.grid.schedule.k", "[1]", "--sweep.seeds", "[1]", "--sweep.claims", "[]"]
    small += ["--sweep.arms.forward.task.reward", '["exact", "./mine.py:score"]']
    directory, arms = Path("runs/two"), ("reverse", "forward")
    paths = {arm: directory / "cells" / arm / "schedule.k=1" / "seed-1" for arm in arms}
    # every config is checked before anything is written
    assert main(["sweep", *small, "--data.train", "builtin:arithmetc"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: two.toml: reverse, schedule.k = 1: ") and told.count("\n") == 1
    assert main(["sweep", *small, "--check"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "reverse, schedule.k = 1: seed 1",
        "forward, schedule.k = 1: seed 1",
        "ok: 2 cells, 0 of them finished, in runs/two",
    ]
    assert not directory.exists()
    # a cell that is killed ends no other one
    assert main(["sweep", *small, "--jobs", "2"]) == 1
    out = capsys.readouterr().out
    assert "2 of 2 cells to run, 2 at a time, in runs/two" in out and "minus reverse," in out
    assert (
        "warning: forward, schedule.k = 1, seed 1 failed: its process ended unexpectedly: killed by SIGKILL, as the "
        f"kernel does if memory runs out; {paths['forward']}/output.txt"
    ) in out
    again = "1 of 2 cells failed; run them again with: slipstream sweep two.toml --sweep.grid.schedule.k '[1]'"
    assert out.splitlines()[-1].startswith(again)
    assert [cell.finished for cell in Sweep(directory).cells] == [True, False]
    kept = (paths["reverse"] / "meta.json").read_text()
    # nor does Ctrl-C
    assert main(["sweep", *small]) == 128 + signal.SIGINT
    out, err = capsys.readouterr()
    assert (
        "stopped; 1 of 2 cells are finished; continue with: slipstream sweep two.toml" in out and err == "interrupted\n"
    )
    # what is finished is kept, and what is not begins anew
    assert main(["sweep", *small, "--jobs=1"]) == 0
    assert "1 of 2 cells to run, 1 at a time" in capsys.readouterr().out
    assert (paths["reverse"] / "meta.json").read_text() == kept
    for cell in Sweep(directory).cells:
        run = RunDir(cell.path)
        assert cell.finished and run.finished and len(run.metrics) == 2 and run.config.seed == 1
        assert sorted(path.name for path in (cell.path / "final").iterdir()) == ["README.md"]
        assert not (cell.path / "checkpoints").exists() and "update 2/2" in (cell.path / "output.txt").read_text()
        assert cell.done["cpu_seconds"] > 0 and cell.done["updates"] == 2
        assert (cell.path / "metrics.jsonl").stat().st_mode & 0o077 == 0
    rows = csv.DictReader((directory / "results.csv").read_text().splitlines())
    assert [(row["arm"], row["updates"]) for row in rows] == [("reverse", "2"), ("forward", "2")]
    assert (directory / "results.parquet").exists() and not (directory / "lock").exists()
    # another config never comes beside them, nor do other prompts
    assert main(["sweep", *small, "--learner.lr", "1e-4"]) == 2
    assert capsys.readouterr().err == (
        f"error: {paths['reverse']} was run with learner.lr = 1e-05, but the study has 0.0001: restore the setting, "
        "remove that cell, or choose another directory with --output\n"
    )
    # a study may lose arms, and is then told without them
    assert main(["sweep", *small, "--sweep.arms", "{reverse = {}}"]) == 2
    assert "was run with loss.m = 4, but the study has 16" in capsys.readouterr().err
    lone = "{reverse = {loss.kind = 'reverse_kl_mc', loss.m = 4}}"
    assert main(["sweep", *small[:-2], "--sweep.arms", lone]) == 0
    assert "1 finished cells are not in the study any more" in capsys.readouterr().out


def test_a_directory_is_of_one_study_and_of_one_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "out").mkdir()
    words = ["sweep", str(tmp_path / "study.toml"), "--output", str(tmp_path / "out")]
    with directory_lock(tmp_path / "out"):
        assert main(words) == 2
    told = f"error: {tmp_path}/out is in use by process {os.getpid()} on {socket.gethostname()}: stop that first\n"
    assert capsys.readouterr().err == told
    (tmp_path / "out" / "config.toml").write_text("")
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/out holds a run: choose another directory with")
