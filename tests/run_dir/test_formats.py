"""A file of a run is looked at before it is used: its format, the shape of its lines, and whether it is a file.

No command that reads it ends in a traceback.
"""

import json
import os
import random
import shutil
import zlib
from pathlib import Path

import pytest

import frozen
from slipstream.cli import main
from slipstream.errors import RunDirError
from slipstream.pipeline.checkpoint import newest
from slipstream.run_dir import formats as runfiles
from slipstream.run_dir.atomic_files import seal
from slipstream.run_dir.formats import FORMAT, checked, fits
from slipstream.run_dir.reading import RunDir
from support.odd_files import FILES, LINES, variants

KEPT = Path(__file__).parents[1] / "fixtures" / "format_1"
READERS = {
    "watch": ["watch", "run", "--once"],
    "report": ["report", "run", "-o", "page.html"],
    "advise": ["advise", "run"],
    "samples": ["samples", "run", "-n", "9"],
}
EACH = 12
"""Odd files of every kind for each reader."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of format 1, in the working directory."""
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said_in_a_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the message of a command that must refuse."""
    capsys.readouterr()
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


# --- odd lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("command", READERS)
def test_no_odd_line_gives_a_traceback(home: Path, file: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "run" / file
    if file == "eval.jsonl":
        path.write_text(json.dumps({"time": "now", "prompts": 4, "n": 2}) + "\n")
    rng = random.Random(zlib.crc32(f"{file} {command}".encode()))
    odd = list(variants(path.read_bytes(), of_lines=file != "meta.json", rng=rng))
    for name, content in [*odd[: len(LINES)], *rng.sample(odd[len(LINES) :], EACH)]:
        path.write_bytes(content)
        capsys.readouterr()
        code, error = main(READERS[command]), capsys.readouterr().err
        assert code in (0, 2), name
        assert (error == "") if code == 0 else (error.count("\n") == 1 and f"run/{file} " in error), (name, error)
        if code == 2 and file != "meta.json":
            assert ", in line " in error, (name, error)


@pytest.mark.parametrize("file", FILES)
def test_no_odd_line_gives_a_traceback_in_eval_and_resume(
    home: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen.models(home)
    path = home / "run" / file
    if file == "eval.jsonl":
        path.write_text(json.dumps({"time": "now", "prompts": 4, "n": 2}) + "\n")
    rng = random.Random(zlib.crc32(file.encode()))
    odd = rng.sample(list(variants(path.read_bytes(), of_lines=file != "meta.json", rng=rng)), 3)
    for name, content in odd:
        path.write_bytes(content)
        for words in (["eval", "run", "--limit", "1", "-n", "1"], ["resume", "run", "--from", "3"]):
            capsys.readouterr()
            assert main(words) in ((0, 2) if words[0] == "eval" else (2,)), name
            assert capsys.readouterr().err.count("\n") <= 2, name


def test_the_line_that_is_damaged_is_named_also_where_a_file_is_not_read_from_its_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipstream.reporting.terminal.watch.FIRST_LOOK", 100)
    path = home / "run" / "ledger.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, "[]"]) + "\n")
    error = said_in_a_line(capsys, "watch", "run", "--once")
    assert error == f"error: run/ledger.jsonl is damaged: an object is expected, not [], in line {len(lines) + 1}\n"


def test_a_shape_says_of_which_kind_a_value_is() -> None:
    assert fits(3, 0) and not fits(-1, 0) and not fits(True, 0) and not fits(1 << 60, 0) and not fits(1.0, 0)
    assert (
        fits(1, 0.0) and fits(-0.5, 0.0) and not fits(float("nan"), 0.0) and not fits("1", 0.0) and not fits(1e200, 0.0)
    )
    assert fits(float("nan"), float("inf")) and not fits(10**400, float("inf"))
    for wrong in (float("nan"), 1e200, -1e200, "", None):  # wherever it stands in a long list
        for place in range(3):
            assert not fits([0.5] * place + [wrong] + [0.5] * 2, [0.0])
    assert not fits([1e200, 0.5], [(float("inf"), None)]) and fits([float("nan"), 0.5, None], [(float("inf"), None)])
    assert fits("a", "a|b") and not fits("c", "a|b") and fits("c", "") and fits(None, ("", None)) and not fits(None, "")
    assert fits([[1, 2], [3, 4]], [[0, 0]]) and not fits([[1]], [[0, 0]]) and not fits({}, [0])
    assert (
        fits({"a": 1.0}, {"*": 0.0})
        and not fits({"a": "b"}, {"*": 0.0})
        and not fits({}, {"a": 0})
        and fits({}, {"a?": 0})
    )


def test_every_line_that_a_run_writes_has_its_shape() -> None:
    for file in ("metrics.jsonl", "ledger.jsonl", "samples.jsonl"):
        for line in (KEPT / "run" / file).read_text().splitlines():
            checked(file, json.loads(line))


# --- links and what is no file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["lock", "metrics.jsonl", "ledger.jsonl", "samples.jsonl", "trace.json", "meta.json"])
def test_a_link_in_the_place_of_a_file_is_refused_and_what_it_points_to_is_left_alone(
    home: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen.models(home)
    other = home / "other"
    path = home / "run" / file
    other.write_bytes(path.read_bytes() if path.exists() else b"precious\n")
    before = other.read_bytes()
    path.unlink(missing_ok=True)
    path.symlink_to(other)
    said = f"run/{file} is a link, not a regular file: "
    assert said in said_in_a_line(capsys, "resume", "run")
    assert other.read_bytes() == before
    if file != "trace.json":
        assert said in said_in_a_line(capsys, "watch", "run", "--once")


@pytest.mark.parametrize("file", ["config.toml", "metrics.jsonl"])
def test_nobody_waits_for_a_pipe(home: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "run" / file).unlink()
    os.mkfifo(home / "run" / file)
    for command in ("watch", "report"):
        assert f"run/{file} is a device, a pipe or a socket, not" in said_in_a_line(capsys, *READERS[command])


def test_a_checkpoint_in_which_a_file_is_a_link_is_damaged(home: Path) -> None:
    at = home / "run" / "checkpoints" / "4" / "model.safetensors"
    at.rename(home / "weights")
    at.symlink_to(home / "weights")
    said: list[str] = []
    with pytest.raises(RunDirError, match="has no undamaged checkpoint"):
        newest(home / "run", say=said.append)
    assert "model.safetensors is a link" in said[0]


@pytest.mark.parametrize("command", [["report", "run", "-o"], ["report", "run", "--output"]])
def test_a_page_replaces_nothing_but_a_file(home: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(home / "pipe")
    (home / "link").symlink_to(home / "page.html")
    for target, what in (("pipe", "a device, a pipe or a socket"), ("link", "a link"), ("/dev/null", "a device")):
        assert f"{target} is {what}" in said_in_a_line(capsys, *command, target)
    frozen.models(home)
    (home / "run.toml").write_text(frozen.CONFIG)
    (home / "nowhere").symlink_to("elsewhere")
    for option in ("--report", "-o"):
        assert "nowhere is a link" in said_in_a_line(capsys, "plan", "run.toml", option, "nowhere")
    assert Path("/dev/null").is_char_device() and (home / "pipe").is_fifo() and (home / "link").is_symlink()
    assert main([*command, "page.html"]) == 0 == main([*command, "page.html"])


# --- formats ----------------------------------------------------------------------------------------------------------


def test_a_run_of_the_first_format_is_read_and_goes_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frozen.models(home)
    for words in READERS.values():
        assert main(words) == 0
    assert main(["resume", "run"]) == 0
    assert [line["update"] for line in RunDir("run").metrics] == [1, 2, 3, 4, 5, 6]
    assert RunDir("run").meta["format"] == 1
    for words in READERS.values():
        assert main(words) == 0


def unversioned(run: Path) -> None:
    """Change a run to its state before directories named their format."""
    checkpoint = run / "checkpoints" / "4"
    for path in (run / "meta.json", checkpoint / "standing.json"):
        said = json.loads(path.read_text())
        del said["format"]
        path.write_text(json.dumps(said))
    (checkpoint / "manifest.json").unlink()
    seal(checkpoint)


def test_a_directory_without_a_format_is_of_the_first(home: Path) -> None:
    unversioned(home / "run")
    assert RunDir("run").format == 1
    assert newest(home / "run").state.admission.version == 4


@pytest.mark.parametrize("number", [FORMAT + 1, 0, "2", None])
def test_a_format_that_is_not_known_is_refused_with_the_version_that_reads_it(
    home: Path, number: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / "run" / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"format": number, "packages": {"slipstream": "9.8.7"}}))
    for words in (*READERS.values(), ["resume", "run"]):
        error = said_in_a_line(capsys, *words)
        assert f"run/meta.json is of format {number!r}, and slipstream " in error and "use slipstream 9.8.7" in error


def test_a_checkpoint_of_a_format_that_is_not_known_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = home / "run" / "checkpoints" / "4"
    said = json.loads((checkpoint / "standing.json").read_text())
    (checkpoint / "standing.json").write_text(
        json.dumps(said | {"format": FORMAT + 1, "packages": {"slipstream": "9.8.7"}})
    )
    (checkpoint / "manifest.json").unlink()
    seal(checkpoint)
    error = said_in_a_line(capsys, "resume", "run")
    assert "run/checkpoints/4/standing.json is of format 2, and " in error and "use slipstream 9.8.7" in error


def test_what_an_older_format_says_is_brought_to_the_present_one_wherever_it_is_read(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a step that renames a metric, and leaves lines alone that were written after it."""

    def renamed(line: runfiles.Line) -> runfiles.Line:
        return {("objective" if key == "loss" else key): value for key, value in line.items()}

    monkeypatch.setattr(runfiles, "FORMAT", 2)
    monkeypatch.setattr(
        runfiles,
        "UPGRADES",
        {1: {"metrics.jsonl": renamed, "standing.json": lambda said: said | {"attempts": {"new": 1}}}},
    )
    lines = RunDir("run").metrics
    assert all("objective" in line and "loss" not in line for line in lines)
    assert newest(home / "run").state.attempts == {"new": 1}


# --- what is the user's -----------------------------------------------------------------------------------------------


def test_the_config_is_compared_before_anything_of_the_users_is_imported(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen.models(home)
    (home / "mine.py").write_text("from pathlib import Path\nPath('imported').touch()\ndef score(text): return 1.0\n")
    config = home / "run" / "config.toml"
    config.write_text(config.read_text().replace('"exact"', '"mine.py:score"'))
    assert "was changed: task.reward = " in said_in_a_line(capsys, "resume", "run")
    assert not (home / "imported").exists()
