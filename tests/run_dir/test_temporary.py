"""Temporary directories of a killed process are removed by the next; those of a living one are not."""

import subprocess
import sys
from pathlib import Path

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
