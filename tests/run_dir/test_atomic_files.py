"""Faults of a disk or a process: whole files stay whole, others are detected, in one line."""

from __future__ import annotations

import builtins
import fcntl
import inspect
import io
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config.schedule import Sync
from slipstream.errors import RunDirError
from slipstream.pipeline.checkpoint import Checkpoints, newest
from slipstream.run_dir.atomic_files import Lines, append, damage, directory_lock, held, writer
from slipstream.run_dir.writing import RunLog, check_lines, read_lines
from support.toy_runs import ends, go

TESTS = Path(__file__).parents[1]


# --- what is not whole is found out -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy run that made eight updates, with checkpoints after 2, 4, 6 and 8."""
    path = tmp_path_factory.mktemp("toy") / "run"
    go(path, Sync())
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found(run: Path) -> None:
    checkpoint = run / "checkpoints" / "8"
    assert damage(checkpoint) is None
    for file in checkpoint.iterdir():
        whole = file.read_bytes()
        for place in range(0, len(whole), 3):
            broken = bytearray(whole)
            broken[place] ^= 1 << place % 7
            file.write_bytes(broken)
            assert damage(checkpoint) is not None, f"{file.name}, byte {place}"
        file.write_bytes(whole)
    assert damage(checkpoint) is None


def test_what_is_added_to_a_checkpoint_does_no_harm(run: Path) -> None:
    (run / "checkpoints" / "8" / "notes.txt").write_text("the good one")
    assert newest(run).state.admission.version == 8


def renamed(path: Path) -> None:
    shutil.rmtree(path / "8")
    (path / "6").rename(path / "8")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda c: os.truncate(c / "8" / "table.npy", 100),
        "table.npy differs from what was saved, in its 100 by",
    ),
    "emptied": (lambda c: (c / "8" / "manifest.json").write_text(""), "manifest.json cannot be read"),
    "missing": (lambda c: (c / "8" / "table.npy").unlink(), "table.npy is missing"),
    "without a manifest": (lambda c: (c / "8" / "manifest.json").unlink(), "manifest.json is missing"),
    "changed by hand": (
        lambda c: (c / "8" / "standing.json").write_text((c / "8" / "standing.json").read_text().replace("8", "9", 1)),
        "standing.json differs from what was saved",
    ),
    "no checkpoint but a student": (
        lambda c: shutil.rmtree(c / "8") or (c.parent / "final").rename(c / "8"),
        "standing.json is missing",
    ),
    "an old one": (lambda c: (c / "8" / "learner.pt").touch(), "learner.pt is of an older version"),
    "another's": (renamed, "it is checkpoint 6 under another name"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_one_line(run: Path, name: str) -> None:
    harm, says = DAMAGES[name]
    harm(run / "checkpoints")
    said: list[str] = []
    if name != "another's":
        assert newest(run, say=said.append).state.admission.version == 6
    else:
        assert newest(run, say=said.append).state.admission.version == 4
    (line,) = said
    assert line.startswith(f"{run / 'checkpoints' / '8'} is damaged: ") and says in line
    said.clear()
    with pytest.raises(RunDirError, match="checkpoint 8 of .* is damaged: leave --from away, or write another of 2, 4"):
        newest(run, 8, say=said.append)
    assert newest(run, 2, say=said.append).state.admission.version == 2
    with pytest.raises(RunDirError, match="has no checkpoint 3: write --from with one of 2, 4"):
        newest(run, 3)


def test_a_run_goes_on_from_an_older_checkpoint_to_the_same_end(run: Path, finished: Path) -> None:
    shutil.rmtree(run / "final")
    os.truncate(run / "checkpoints" / "8" / "table.npy", 100)
    (run / "checkpoints" / "10.tmp").mkdir()
    go(run, Sync())
    for name in ("final/table.npy", "checkpoints/8/table.npy"):
        assert (run / name).read_bytes() == (finished / name).read_bytes()
    assert ends(run) == list(range(24))
    assert [line["update"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, 9))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2", "4", "6", "8"]


# --- a process that is killed -----------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


class Power:
    """Count the calls that write to the disk; call number `until` is half done, and nothing follows it."""

    CALLS = ("fsync", "ftruncate", "rename", "replace", "mkdir", "unlink", "rmdir", "chmod")

    def __init__(self, patch: pytest.MonkeyPatch, until: int | None = None) -> None:
        self.until, self.calls, self.on = until, list[str](), False
        for name in self.CALLS:
            patch.setattr(os, name, self.counted(name, getattr(os, name)))
        write, opened = os.write, io.open
        patch.setattr(os, "write", lambda file, data: self.write(lambda part: write(file, part), data))

        def open_counted(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "r" in mode or not self.on:
                return opened(file, mode, *args, **options)
            self.count("open")
            return Counted(opened(file, mode, *args, **options), self)

        patch.setattr(io, "open", open_counted)
        patch.setattr(builtins, "open", open_counted)

    @property
    def out(self) -> bool:
        return self.until is not None and len(self.calls) > self.until

    def count(self, name: str) -> None:
        if self.on:
            self.calls.append(name)
            if self.out:
                raise Killed

    def counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any, **options: Any) -> Any:
            self.count(name)
            return call(*args, **options)

        return counts

    def write(self, write: Callable[[Any], Any], data: Any) -> Any:
        try:
            self.count("write")
        except Killed:
            if len(self.calls) == (self.until or 0) + 1:
                write(data[: len(data) // 2])
            raise
        return write(data)


class Counted:
    """A file that is written to while the power may fail."""

    def __init__(self, file: Any, power: Power) -> None:
        self.file, self.power = file, power

    def write(self, data: Any) -> Any:
        data = bytes(data) if isinstance(data, memoryview) else data
        return self.power.write(self.file.write, data)

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def with_power(path: Path, until: int | None, holder: type, name: str, **options: Any) -> Power:
    """Go on, and lose power while this method is at work."""
    with pytest.MonkeyPatch.context() as patch:
        power, method = Power(patch, until), getattr(holder, name)

        def watched(*args: Any, **settings: Any) -> Any:
            power.on = True
            try:
                return method(*args, **settings)
            finally:
                power.on = power.out

        async def awaited(*args: Any, **settings: Any) -> Any:
            power.on = True
            try:
                return await method(*args, **settings)
            finally:
                power.on = power.out

        patch.setattr(holder, name, awaited if inspect.iscoroutinefunction(method) else watched)
        if until is None:
            go(path, Sync(), **options)
        else:
            with pytest.raises(Killed):
                go(path, Sync(), **options)
    return power


@pytest.mark.processes
def test_a_kill_at_any_write_of_a_checkpoint_loses_nothing_of_the_one_before(tmp_path: Path) -> None:
    """At every boundary, of one that takes the place of an older one; and then the run ends as it would have."""
    begun = tmp_path / "begun"
    go(begun, Sync(), keep=1, updates=6, until=22.0)
    assert newest(begun).state.admission.version == 5
    whole = Path(shutil.copytree(begun, tmp_path / "whole"))
    calls = with_power(whole, None, Checkpoints, "save", keep=1).calls
    assert {"write", "open", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "chmod"} <= set(calls)
    found = set()
    for until in range(len(calls)):
        path = Path(shutil.copytree(begun, tmp_path / str(until)))
        with_power(path, until, Checkpoints, "save", keep=1)
        said: list[str] = []
        found.add(newest(path, say=said.append).state.admission.version)
        assert said == [], "what has a name is whole"
        go(path, Sync(), keep=1)
        assert (path / "final" / "table.npy").read_bytes() == (whole / "final" / "table.npy").read_bytes()
        assert ends(path) == list(range(24))
        left = sorted(each.name for each in (path / "checkpoints").iterdir())
        assert left[-1] == "8" and all(map(str.isdecimal, left)), "and the last that has proven sound"
        shutil.rmtree(path)
    assert found == {5, 6, 8}


@pytest.mark.parametrize(("holder", "name"), [(Checkpoints, "forget_after"), (RunLog, "reopen")])
def test_a_kill_at_any_write_as_a_run_goes_on_leaves_it_to_go_on_again(
    finished: Path, tmp_path: Path, holder: type, name: str
) -> None:
    """From an older checkpoint, whose later ones are in the way; asked again, or without a word."""
    whole = Path(shutil.copytree(finished, tmp_path / "whole"))
    calls = with_power(whole, None, holder, name, number=4).calls
    assert len(calls) > 10
    for until in range(len(calls)):
        path = Path(shutil.copytree(finished, tmp_path / str(until)))
        with_power(path, until, holder, name, number=4)
        go(path, Sync(), number=4 if until % 2 else None)
        assert (path / "final" / "table.npy").read_bytes() == (whole / "final" / "table.npy").read_bytes()
        assert ends(path) == list(range(24))
        assert [line["update"] for line in read_lines(path / "metrics.jsonl")] == list(range(1, 9))
        shutil.rmtree(path)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_everything_is_on_disk_before_a_checkpoint_has_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses power has these files."""
    happened: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def synced(file: int) -> None:
        happened.append(("sync", str(Path(f"/proc/self/fd/{file}").readlink())))
        fsync(file)

    def named(old: Path, new: Path) -> None:
        happened.append(("name", str(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", named)
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "8")
    go(run, Sync())
    directory = run / "checkpoints"
    at = happened.index(("name", str(directory / "8")))
    files = {("sync", str(directory / "8.tmp" / file.name)) for file in (directory / "8").iterdir()}
    files -= {("sync", str(directory / "8.tmp" / "manifest.json"))}
    files |= {("sync", str(directory / "8.tmp" / "manifest.json.tmp")), ("sync", str(directory / "8.tmp"))}
    files |= {("sync", str(run / name)) for name in ("metrics.jsonl", "ledger.jsonl", "trace.json")}
    assert files <= set(happened[:at])
    assert ("sync", str(directory)) in happened[at:]


# --- a disk that is full, closed or gone ------------------------------------------------------------------------------


def namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    mounted = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(mounted, capture_output=True, check=False).returncode == 0


@pytest.mark.processes
@pytest.mark.skipif(not namespaces(), reason="no file systems of one's own here")
def test_on_a_disk_of_any_size_a_run_ends_in_one_line_and_goes_on_when_there_is_room(
    tmp_path: Path, finished: Path
) -> None:
    script = ["unshare", "-rm", sys.executable, str(TESTS / "support" / "full_disk.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path()})
    assert done.stderr == ""
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    table = (finished / "final" / "table.npy").read_bytes().hex()
    for each in seen:
        assert "\n" not in each["said"] and set(each["tails"]) <= {"\n"}, "whole lines"
        if each["said"]:
            assert "cannot be written: " in each["said"] and "No space left on device" in each["said"]
        if each["saved"]:
            assert (each["table"], each["ends"]) == (table, list(range(24)))
            assert each["updates"] == list(range(1, 9))
            assert all(said.endswith("run cannot be written: Read-only file system") for said in each["closed"])
    assert {bool(each["said"]) for each in seen} == {True, False}, "some were too small, and some were not"
    assert {each.get("newest") for each in seen} >= {None, 2, 8}


def path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def test_a_line_that_cannot_be_written_is_taken_back_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, write, calls = Lines(tmp_path / "lines"), os.write, count()
    lines.write("one\n")

    def full(file: int, data: Any) -> int:
        if next(calls):
            raise OSError(28, "No space left on device")
        return write(file, data[:2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunDirError, match="lines cannot be written: No space left on device"):
        lines.write("two\n")
    monkeypatch.undo()
    lines.write("three\n")
    with pytest.raises(RunDirError, match="lacks lines that could not be written"):
        lines.end()
    lines.close()
    assert (tmp_path / "lines").read_text() == "one\n"


def test_a_line_that_does_not_fit_is_taken_back_whole(tmp_path: Path) -> None:
    """A file that several processes extend, on a disk with room for half a line."""
    file = tmp_path / "eval.jsonl"
    append(file, "one\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(RunDirError, match="eval.jsonl cannot be written: File too large"):
            append(file, f"{'x' * 100_000}\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    append(file, "two\n")
    assert file.read_text() == "one\ntwo\n"


def gone(run: Path) -> None:
    shutil.rmtree(run)


def moved(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def replaced(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").write_text("")


@pytest.mark.parametrize("happens", [gone, moved, replaced])
def test_a_directory_that_disappears_stops_a_run_and_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Path], None]
) -> None:
    run, metrics = tmp_path / "run", RunLog.metrics

    def then(self: RunLog, kind: str, numbers: Any, *, update: int) -> None:
        metrics(self, kind, numbers, update=update)
        if update == 3:
            happens(run)

    monkeypatch.setattr(RunLog, "metrics", then)
    with pytest.raises(RunDirError, match="cannot be written: (No such file|the file was replaced)"):
        go(run, Sync())
    assert run.exists() == (happens is replaced)


# --- one writer -------------------------------------------------------------------------------------------------------


def test_a_directory_has_one_writer_who_lets_go_when_it_is_killed(tmp_path: Path) -> None:
    code = "import sys, pathlib; from slipstream.run_dir.atomic_files import directory_lock\n"
    code += "with directory_lock(pathlib.Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], text=True, **pipes) as holder:
        assert holder.stdout and holder.stdout.readline() == "mine\n"
        with pytest.raises(RunDirError, match=f"is in use by process {holder.pid} on .*: stop that first"):
            directory_lock(tmp_path).__enter__()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with directory_lock(tmp_path), pytest.raises(RunDirError, match=f"in use by process {os.getpid()} on"):
        directory_lock(tmp_path).__enter__()
    with directory_lock(tmp_path):
        pass
    assert not (tmp_path / "lock").exists(), "no run came about here"


def test_a_lock_that_its_holder_removes_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder who made no run removes the lock as it leaves; another has opened it already, and waits."""
    holder = directory_lock(tmp_path)
    holder.__enter__()
    monkeypatch.setattr(time, "sleep", lambda _: holder.__exit__(None, None, None))
    with pytest.raises(RunDirError, match="was in use by a process that ended just now: try again"):
        directory_lock(tmp_path).__enter__()
    with directory_lock(tmp_path):
        assert held(tmp_path)


def test_who_only_looks_whether_somebody_writes_keeps_nobody_out(tmp_path: Path) -> None:
    """A look holds the lock for a moment; this one is as long as a try that fails and no longer."""
    (tmp_path / "lock").touch()
    look = (tmp_path / "lock").open()
    fcntl.flock(look, fcntl.LOCK_SH)

    def tried(lock: Any, how: int) -> None:
        try:
            flock(lock, how)
        finally:
            look.close()

    flock = fcntl.flock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", tried)
        with directory_lock(tmp_path):
            patch.undo()
            assert held(tmp_path) is True
            assert writer(tmp_path).startswith(f"{os.getpid()} on ")
    assert held(tmp_path) is False and writer(tmp_path) == "", "nobody ever wrote here"


# --- what was changed by hand -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Path:
    """A real run of four updates, with checkpoints after 2 and 4."""
    home = tmp_path_factory.mktemp("real")
    rows = [{"prompt": f"{i} and {i}?"} for i in range(20)]
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "run.toml").write_text(
        f"""
student = "{models_dir / "student"}"
updates = 4
output = "{home / "run"}"
data.train = "{home / "data.jsonl"}"
teachers.main.model = "{models_dir / "teacher"}"
sampler.max_tokens = 6
learner.batch_size = 4
loss.m = 2
checkpoint.every = 2
runtime.kind = "inline"
"""
    )
    assert main(["train", str(home / "run.toml"), "--skip-checks"]) == 0
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path) -> Iterator[Path]:
    """It is where its config says; what a test does to it is undone."""
    kept = shutil.copytree(trained, tmp_path / "kept")
    yield trained
    shutil.rmtree(trained)
    shutil.copytree(kept, trained)


def test_what_a_run_writes_is_for_its_owner_only(trained: Path) -> None:
    for each in [trained / "run", *(trained / "run").rglob("*")]:
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600), each
    assert os.umask(os.umask(0o022)) != 0o077, "and the umask is what it was"


def rewrite(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text((run / name).read_text().replace(old, new))


def fewer_lines(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text("".join((run / name).read_text().splitlines(True)[:-1]))


def damaged(run: Path) -> None:
    for number in ("2", "4"):
        os.truncate(run / "checkpoints" / number / "learner.safetensors", 100)


def other_data(run: Path) -> None:
    rows = (run.parent / "data.jsonl").read_text().splitlines(True)
    (run.parent / "data.jsonl").write_text("".join(rows[1:]))


FAULTS: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "finished": (lambda run: None, [], "is finished: the student is in"),
    "no more updates": (lambda run: None, ["--updates", "4"], "write --updates above 4"),
    "fewer updates than there are": (
        lambda run: None,
        ["--from", "4", "--updates", "3"],
        "updates = 3: groups of later",
    ),
    "no such checkpoint": (lambda run: None, ["--from", "3"], "has no checkpoint 3: write --from with one of 2, 4"),
    "none is whole": (damaged, ["--updates", "6"], "has no undamaged checkpoint to go on from: begin a new run"),
    "no checkpoints": (
        lambda run: shutil.rmtree(run / "checkpoints"),
        ["--updates", "6"],
        "it was stopped before the first (checkpoint.minutes)",
    ),
    "a setting": (
        rewrite("config.toml", "lr = 1e-05", "lr = 0.5"),
        ["--updates", "6"],
        "was changed: learner.lr = 0.5 (it was 1e-05); put it back, or confirm the change: --change learner.lr",
    ),
    "two settings, one meant": (
        lambda run: [rewrite("config.toml", a, b)(run) for a, b in (("lr = 1e-05", "lr = 0.5"), ("m = 2", "m = 3"))],
        ["--updates", "6", "--change", "learner.*"],
        "was changed: loss.m = 3 (it was 2); put it back, or confirm the change: --change loss.m",
    ),
    "the seed": (
        rewrite("config.toml", "seed = 0", "seed = 1"),
        ["--updates", "6", "--change", "seed"],
        "seed = 1 (it was 0) cannot change in a run: put it back, or begin a new run",
    ),
    "a change that is none": (
        lambda run: None,
        ["--updates", "6", "--change", "learner.lr"],
        "--change learner.lr: ",
    ),
    "a change of a setting that was dropped": (
        lambda run: None,
        ["--updates", "6", "--change", "learner.shared_prompt"],
        "--change learner.shared_prompt: it was dropped: the prompt of a group is computed once",
    ),
    "other data": (other_data, ["--updates", "6"], "does not give the prompts that"),
    "no meta.json": (
        lambda run: (run / "meta.json").unlink(),
        ["--updates", "6"],
        "meta.json does not exist: it holds the settings",
    ),
    "an emptied ledger": (
        lambda run: (run / "ledger.jsonl").write_text(""),
        ["--updates", "6"],
        "ledger.jsonl was changed: it does not begin with the",
    ),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), ["--updates", "6"], "metrics.jsonl was changed: "),
    "a shortened ledger": (fewer_lines("ledger.jsonl"), ["--updates", "6"], "ledger.jsonl was changed: "),
    "metrics of another run": (
        rewrite("metrics.jsonl", '"loss": ', '"loss": 1'),
        ["--updates", "6"],
        "metrics.jsonl was changed: ",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_was_changed_by_hand_is_refused_in_one_line_and_nothing_is_lost(
    home: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, options, says = FAULTS[name]
    run = home / "run"
    harm(run)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "lock"}
    capsys.readouterr()
    assert main(["resume", str(run), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
    after = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != "lock"}
    assert after == before


def test_a_run_that_is_going_on_is_left_alone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with directory_lock(home / "run"):
        assert main(["resume", str(home / "run"), "--updates", "6"]) == 2
    assert f"run is in use by process {os.getpid()} on " in capsys.readouterr().err


def test_a_finished_run_is_extended_with_changes_that_are_meant(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the checkpoint before, because the last is damaged; the student that there was stays."""
    run = home / "run"
    student = (run / "final" / "model.safetensors").read_bytes()
    os.truncate(run / "checkpoints" / "4" / "learner.safetensors", 100)
    rewrite("config.toml", "lr = 1e-05", "lr = 0.001")(run)
    assert main(["resume", str(run), "--updates", "6", "--change", "learner.lr"]) == 0
    said = capsys.readouterr().out
    assert said.count("is damaged: ") == 1 and f"continuing from {run / 'checkpoints' / '2'}; " in said
    lines = read_lines(run / "metrics.jsonl")
    assert [line["update"] for line in lines] == list(range(1, 7))
    assert [line["lr"] for line in lines] == [1e-5] * 2 + [1e-3] * 4
    assert ends(run) == list(range(24))
    assert (run / "final-4" / "model.safetensors").read_bytes() == student
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2", "4", "6"], "2 has proven sound"
    assert damage(run / "final") is None
    assert main(["resume", str(run), "--updates", "7"]) == 0, "what was meant is no change any more"
    earlier = [(run / name / "model.safetensors").read_bytes() for name in ("final-4", "final-6", "final")]
    assert main(["resume", str(run), "--updates", "7", "--from", "6"]) == 0
    assert main(["resume", str(run), "--updates", "7", "--from", "6"]) == 0
    assert {"final-4", "final-6", "final-7", "final-7.1"} < {path.name for path in run.iterdir()}
    kept = [(run / name / "model.safetensors").read_bytes() for name in ("final-4", "final-6", "final-7")]
    assert kept == earlier, "no student is lost"


# --- how much is looked at --------------------------------------------------------------------------------------------


def test_checkpoints_come_by_time_and_by_count() -> None:
    both = Checkpoints(Path(), every=3, minutes=2)
    assert [both.due(update, 0) for update in range(1, 7)] == [False, False, True, False, False, True]
    assert [both.due(1, seconds) for seconds in (119, 120)] == [False, True]
    both.last = 120
    assert [both.due(1, seconds) for seconds in (239, 240)] == [False, True]
    assert not Checkpoints(Path()).due(1, 1e9)


def test_a_run_saves_by_the_clock(tmp_path: Path) -> None:
    """8 updates of about 4 virtual seconds each are saved: the first one after 12 seconds, and so on, and the end."""
    go(tmp_path, Sync(), every=0, minutes=0.2)
    times = {line["update"]: line["time"] for line in read_lines(tmp_path / "metrics.jsonl")}
    expected, last = [], 0.0
    for update, now in times.items():
        if now - last >= 12:
            expected.append(update)
            last = now
    assert Checkpoints(tmp_path / "checkpoints").existing() == sorted({*expected, 8}) and len(expected) > 1


def test_a_run_that_goes_on_reads_its_files_in_blocks(tmp_path: Path) -> None:
    """However long they are: only their checksums are looked at, and what came later is cut off."""
    with RunLog(tmp_path, []) as log:
        for name in ("metrics.jsonl", "ledger.jsonl", "trace.json"):
            os.truncate(tmp_path / name, 1 << 25)
    with RunLog(tmp_path, []) as log:
        mark = log.mark()
        log.ledger({"number": 1})
    tracemalloc.start()
    check_lines(tmp_path, mark)
    with RunLog(tmp_path, [], mark=mark) as log:
        log.ledger({"number": 2})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 23
    with (tmp_path / "ledger.jsonl").open("rb") as file:
        assert file.seek(1 << 25) and file.read() == b'{"number": 2}\n'
