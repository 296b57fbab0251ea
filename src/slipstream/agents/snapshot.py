"""Copy a workspace that an agent may have prepared as a trap: `python3 -I -S snapshot.py WORKSPACE COPY BYTES ENTRIES`.

No link is followed: every directory is opened below the descriptor of its parent. Files, directories, and links that
stay within the copy are copied. Everything is counted before anything is copied, and again during the copy.

This program runs beside the sampler, so that its time and memory can be limited. It imports only the standard library.
"""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

EXIT_REFUSED = 3
"""Exit status if the workspace cannot be copied by the agent's fault; the reason is on standard error."""
MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM)
"""Error numbers of a copy that come from this machine, not from the agent's work."""
MAX_DEPTH = 100
"""Maximum depth of nested directories."""
CHUNK = 1 << 20
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Refused(Exception):
    pass


class Budget:
    def __init__(self, size: int, entries: int) -> None:
        self.size, self.entries = size, entries
        self.size_left, self.entries_left = size, entries

    def spend(self, size: int = 0, entries: int = 0) -> None:
        self.size_left -= size
        self.entries_left -= entries
        if self.size_left < 0 or self.entries_left < 0:
            raise Refused(f"it has more than {self.size >> 20} MiB or {self.entries} files, and verify needs a copy")


def walk(source: int, copy: Path | None, budget: Budget, parents: tuple[str, ...] = ()) -> None:
    """Copy the directory with descriptor `source` to the existing directory `copy`; None: only count its contents."""
    if len(parents) > MAX_DEPTH:
        raise Refused(f"its directories are nested more than {MAX_DEPTH} deep")
    with os.scandir(source) as entries:
        for entry in entries:
            name = entry.name
            budget.spend(entries=1)
            status = os.lstat(name, dir_fd=source)
            if stat.S_ISDIR(status.st_mode):
                inner = os.open(name, OPEN_DIRECTORY, dir_fd=source)
                try:
                    if copy is not None:
                        (copy / name).mkdir()
                    walk(inner, copy and copy / name, budget, (*parents, name))
                finally:
                    os.close(inner)
            elif stat.S_ISREG(status.st_mode):
                if copy is None:
                    budget.spend(status.st_size)
                else:
                    copy_file(os.open(name, OPEN_FILE, dir_fd=source), copy / name, budget)
            elif stat.S_ISLNK(status.st_mode) and copy is not None:
                target = os.readlink(name, dir_fd=source)
                if within((*parents, name), target):
                    (copy / name).symlink_to(target)


def copy_file(source: int, copy: Path, budget: Budget) -> None:
    with open(source, "rb", buffering=0) as reading, copy.open("xb", buffering=0) as writing:
        mode = os.fstat(source).st_mode
        if not stat.S_ISREG(mode):
            raise Refused(f"{copy.name!r} changes while it is copied")
        while part := reading.read(CHUNK):
            budget.spend(len(part))
            writing.write(part)
        os.fchmod(writing.fileno(), 0o755 if mode & 0o100 else 0o644)


def within(link: Sequence[str], target: str) -> bool:
    """Return true if a link is relative, goes up at most to the top of the workspace, and then only down."""
    parts = PurePosixPath(target).parts
    up = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    return not target.startswith("/") and up < len(link) and ".." not in parts[up:]


def main() -> int:
    workspace, copy, size, entries = sys.argv[1:]
    try:
        source = os.open(workspace, OPEN_DIRECTORY)
        walk(source, None, Budget(int(size), int(entries)))
        # what an agent left elsewhere is not judged, and may fill the disk
        siblings = [each for each in Path(workspace).parent.iterdir() if str(each) != workspace]
        subprocess.run(["/bin/rm", "-rf", "--", *siblings], check=False)
        walk(source, Path(copy), Budget(int(size), int(entries)))
    except (OSError, Refused) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, OSError) and error.errno in MACHINE_ERRORS else EXIT_REFUSED
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
