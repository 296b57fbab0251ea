"""A toy run on disks of every size: `unshare -rm python full_disk.py DIRECTORY` prints how each ended.

It fills a file system of its own, goes on once there is more room, and at last finds that nothing can be written.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.config.schedule import Sync
from slipstream.errors import RunDirError
from slipstream.pipeline.checkpoint import newest
from slipstream.run_dir.atomic_files import directory_lock
from slipstream.run_dir.writing import RunLog, read_lines
from support.toy_runs import ends, go

PAGE = 4096


def tried(disk: Path, pages: int) -> dict[str, object]:
    """Return the messages of a run on this number of pages, its files, and the result with more room."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * PAGE}", "tmpfs", disk], check=True)
    try:
        path, said = disk / "run", ""
        try:
            go(path, Sync(), keep=1)
        except RunDirError as error:
            said = str(error)
        tails = [text[-1:] for name in ("metrics.jsonl", "ledger.jsonl") for text in texts(path / name)]
        saved = (path / "checkpoints").exists() and bool(list((path / "checkpoints").iterdir()))
        found: dict[str, object] = {"said": said, "tails": tails, "saved": saved}
        if saved:
            found["newest"] = newest(path).state.admission.version
            subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
            if not (path / "final").exists():
                go(path, Sync(), keep=1)
            found["table"] = newest(path).path.joinpath("table.npy").read_bytes().hex()
            found["ends"] = ends(path)
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            found["closed"] = [refused(lambda: directory_lock(path).__enter__()), refused(lambda: again(path))]
            found["updates"] = [line["update"] for line in read_lines(path / "metrics.jsonl")]
        return found
    finally:
        subprocess.run(["umount", disk], check=True)


def again(path: Path) -> None:
    with RunLog(path, []):
        pass


def refused(work: Callable[[], object]) -> str:
    try:
        work()
    except RunDirError as error:
        return str(error)
    return "nothing"


def texts(path: Path) -> list[str]:
    return [text] if path.exists() and (text := path.read_text()) else []


if __name__ == "__main__":
    disk = Path(sys.argv[1])
    for pages in (*range(1, 20, 2), *range(20, 120, 12)):
        print(json.dumps({"pages": pages} | tried(disk, pages)), flush=True)
