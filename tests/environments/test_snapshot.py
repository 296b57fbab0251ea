"""The copy of a workspace for its judge: random trees, and trees that change while they are copied."""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from slipstream.agents.workspace import snapshot_of

SECRET = "the reference solution"
TARGETS = (
    "..",
    "../..",
    ".",
    "/",
    "{secret}",
    "a",
    "b/c",
    "../secret",
    "a/../..",
    "./a/./b",
    "/proc/self/root{secret}",
)
RACES = {
    "a directory and a link": """
        os.rename(W + "/a", W + "/hidden"); os.symlink(SECRET, W + "/a")
        os.unlink(W + "/a"); os.rename(W + "/hidden", W + "/a")
    """,
    "a file and a link": """
        os.symlink(SECRET + "/solution.py", W + "/new"); os.rename(W + "/new", W + "/a/f0.py")
        open(W + "/new", "w").close(); os.rename(W + "/new", W + "/a/f0.py")
    """,
    "a file and a pipe": """
        os.mkfifo(W + "/new"); os.rename(W + "/new", W + "/a/f0.py")
        open(W + "/new", "w").close(); os.rename(W + "/new", W + "/a/f0.py")
    """,
    "a file that grows": "open(W + '/a/f0.py', 'a').write('x' * 4096)",
    "the workspace and a link": """
        os.rename(W, OLD); os.symlink(SECRET, W)
        os.unlink(W); os.rename(OLD, W)
    """,
    "a directory that moves out": "os.rename(W + '/a', W + '/../../a'); os.rename(W + '/../../a', W + '/a')",
}


def copied(place: Path, *, seconds: float = 60.0, size: int = 1 << 20, entries: int = 500) -> str:
    workspace = place / "agent" / "workspace"
    return asyncio.run(snapshot_of(workspace, place / "copy", seconds=seconds, size=size, entries=entries))


def check(place: Path) -> None:
    """Nothing in the copy is the secret, leads out of the copy, or is no file, directory or link."""
    copy = place / "copy"
    for each in copy.rglob("*"):
        if each.is_symlink():
            resolved = Path(os.path.realpath(each))
            assert resolved == copy or copy in resolved.parents, (each, each.readlink())
        else:
            assert each.is_dir() or (each.is_file() and SECRET not in each.read_text("latin-1")), each


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for each in ("agent/workspace", "agent/home", "secret"):
        (tmp_path / each).mkdir(parents=True)
    (tmp_path / "secret" / "solution.py").write_text(SECRET)
    return tmp_path


def grow(rng: random.Random, top: Path, secret: Path) -> dict[str, str]:
    """Fill a directory; return the contents of its files by path."""
    directories, files = [top], dict[str, str]()
    for number in range(rng.randint(1, 60)):
        parent = rng.choice(directories)
        name = rng.choice(["a", "b", "c", "..a", "a\\b", " ", "\n", "-rf", "é", "\udcff", "x" * 255, f"n{number}"])
        each = parent / name
        if os.path.lexists(each):
            continue
        match rng.choice(["file", "file", "directory", "directory", "link", "link", "hard link", "pipe", "sparse"]):
            case "directory":
                each.mkdir(mode=rng.choice([0o700, 0o755, 0o777]))
                directories.append(each)
            case "link":
                each.symlink_to(rng.choice(TARGETS).format(secret=secret))
            case "pipe":
                os.mkfifo(each)
            case "hard link" if files:
                first = rng.choice(sorted(files))
                each.hardlink_to(top / first)
                files[str(each.relative_to(top))] = files[first]
            case "sparse":
                with each.open("wb") as file:
                    file.truncate(1000)
                files[str(each.relative_to(top))] = "\0" * 1000
            case _:
                each.write_text(text := f"text {number}")
                files[str(each.relative_to(top))] = text
    return files


@pytest.mark.parametrize("seed", range(40))
def test_a_copy_has_the_files_of_a_workspace_and_no_link_out_of_it(seed: int, place: Path) -> None:
    files = grow(random.Random(seed), place / "agent" / "workspace", place / "secret")
    (place / "agent" / "home" / "large").write_text("x")
    assert copied(place) == ""
    check(place)
    found = {
        str(each.relative_to(place / "copy")): each.read_text("latin-1")
        for each in (place / "copy").rglob("*")
        if each.is_file() and not each.is_symlink()
    }
    assert found == files
    assert [each.name for each in (place / "agent").iterdir()] == ["workspace"], (
        "what lies beside a workspace is deleted before the copy"
    )


@pytest.mark.parametrize("race", RACES)
def test_a_workspace_that_changes_during_its_copy_shows_nothing_else(race: str, place: Path) -> None:
    workspace = place / "agent" / "workspace"
    (workspace / "a").mkdir()
    for number in range(20):
        (workspace / "a" / f"f{number}.py").write_text("own")
    steps = "\n    ".join(dedent(RACES[race]).strip().splitlines())
    # not beside the workspace, where the program that copies deletes everything
    names = [str(path) for path in (workspace, place / "secret", place / "old")]
    code = f"import os\nW, SECRET, OLD = {names!r}\nwhile True:\n    {steps}\n"
    racing = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
    try:
        for _ in range(15):
            copied(place, seconds=5.0)
            assert racing.poll() is None
            check(place)
            subprocess.run(["rm", "-rf", place / "copy"], check=True)
    finally:
        racing.kill()
        racing.wait()
