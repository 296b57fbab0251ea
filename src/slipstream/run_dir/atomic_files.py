"""Files that survive: whole or not there, for their owner only, written by one process at a time.

Whoever is killed at any moment, or runs out of disk, leaves what was whole before, and what has a name has all its
bytes on disk: everything is written beside, synced, and renamed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from slipstream.errors import RunDirError

MANIFEST = "manifest.json"
LOCK = "lock"
TRIES, PAUSE = 20, 0.01
"""How often a lock is tried, and seconds between: whoever only looks whether it is held has it for a moment."""
BLOCK = 1 << 20
Extent = dict[str, Any]
"""How many bytes, and their checksum."""


@contextmanager
def private() -> Iterator[None]:
    """What this process and its children write is for their owner only: prompts and answers may be confidential."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A disk that is full, closed or gone is said in one line."""
    try:
        yield
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror}") from None


def opened(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Return a descriptor of a file of a run. Links and what is no regular file are refused, whoever put them there."""
    check_regular(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # what has come to its place since is neither followed nor waited for
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)


def check_regular(path: Path) -> None:
    """Refuse a link, a device, a pipe or a socket in the place of a file."""
    if path.is_symlink() or not (path.is_file() or path.is_dir() or not path.exists()):
        what = "a link" if path.is_symlink() else "a device, a pipe or a socket"
        raise RunDirError(f"{path} is {what}, not a regular file: move it away, or name another path")


@contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a run for reading. What cannot be read is said in one line."""
    try:
        with os.fdopen(opened(path), "rb") as file:
            yield file
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """One writer per directory. The lock is let go however its process ends.

    Children that are forked in here would hold it too: fork first.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(opened(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+")
    with file:
        try:
            _lock(file)
        except BlockingIOError:
            file.seek(0)
            raise RunDirError(f"{path} is in use by process {file.read().strip()}: stop that first") from None
        except OSError as error:
            raise RunDirError(
                f"{path}: its file system knows no locks ({error.strerror}): keep runs on another"
            ) from None
        file.truncate(0)
        with suppress(OSError):  # on a full disk nobody learns our name, but the lock is ours
            file.write(f"{os.getpid()} on {socket.gethostname()}")
            file.flush()
        try:
            yield
        finally:
            if not (path / "config.toml").exists():  # no run came about
                with suppress(OSError):
                    (path / LOCK).unlink()


def _lock(file: IO[str]) -> None:
    for pause in (*[PAUSE] * TRIES, None):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if pause is None:
                raise
            time.sleep(pause)


def held(path: Path) -> bool | None:
    """Whether somebody writes in a directory; None where its file system knows no locks."""
    try:
        with os.fdopen(opened(path / LOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def writer(path: Path) -> str:
    """Who writes there, or did last: `PID on HOST`, or nothing where nobody knows."""
    try:
        with os.fdopen(opened(path / LOCK), errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def sync(path: Path) -> None:
    """A file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise  # some network file systems cannot sync a directory, and keep names in order by themselves
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str) -> None:
    """Whoever reads sees the old file or the new one, whole."""
    check_regular(path)
    beside = beside_of(path)
    try:
        with os.fdopen(opened(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
        sync(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def beside_of(path: Path) -> Path:
    """Where it is while it is not whole."""
    return path.with_name(path.name + ".tmp")


def remove(path: Path) -> None:
    """A directory. It loses its name first, so that nobody finds half of it."""
    beside = beside_of(path)
    shutil.rmtree(beside, ignore_errors=True)
    path.rename(beside)
    shutil.rmtree(beside)


def remove_unfinished(directory: Path) -> None:
    """What somebody who was killed has left."""
    for path in directory.glob("*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def append(path: Path, lines: str) -> None:
    """Whole lines after those that are there, whoever else appends some at the same time."""
    with writing(path), os.fdopen(opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = os.fstat(file.fileno()).st_size
        try:
            file.write(lines)
            file.flush()
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise


# --- a directory that says what is in it ------------------------------------------------------------------------------


def seal(path: Path) -> None:
    """Put all of a directory on disk, for its owner only, and a manifest with it."""
    below = sorted(path.rglob("*"))
    for each in below:
        each.chmod(0o700 if each.is_dir() else 0o600)  # whoever wrote it, on whichever machine
        sync(each)
    files = [each for each in below if each.is_file()]
    write_atomic(path / MANIFEST, _as_text({each.relative_to(path).as_posix(): extent(each) for each in files}))


def damage(path: Path) -> str | None:
    """What is wrong with a sealed directory; nothing, if every byte is as it was. What was added does not count."""
    try:
        if not (path / MANIFEST).exists():
            return f"{MANIFEST} is missing"
        with reading(path / MANIFEST) as file:
            text = file.read().decode("utf-8")
        said = json.loads(text)
        for name, saved in said.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if (found := extent(path / name)) != saved:
                return f"{name} is not as it was saved, in its {found['bytes']:,} bytes"
    except RunDirError as error:
        return str(error)
    except (ValueError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None if _as_text(said) == text else f"{MANIFEST} is not as it was saved"


def _as_text(manifest: Mapping[str, Extent]) -> str:
    return json.dumps(manifest, indent=1) + "\n"


def extent(path: Path) -> Extent:
    with reading(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def prefix(path: Path, count: int) -> hashlib._Hash:
    """The checksum so far of the first so many bytes, or of all that there are."""
    digest = hashlib.sha256()
    with reading(path) as file:
        while count and (block := file.read(min(count, BLOCK))):
            digest.update(block)
            count -= len(block)
    return digest


def begins_with(path: Path, end: Extent) -> hashlib._Hash:
    """The checksum so far of a file that still begins with what it held then."""
    digest = prefix(path, end["bytes"]) if path.exists() else hashlib.sha256()
    if digest.hexdigest() != end["sha256"]:
        raise RunDirError(
            f"{path} was changed: it does not begin with the {end['bytes']:,} bytes that it had at this checkpoint; "
            "put them back, or begin a new run from the checkpoint's student"
        )
    return digest


# --- a file that only grows -------------------------------------------------------------------------------------------


class Lines:
    """Whole lines, or none, whatever ends the run.

    A line that cannot be written raises, once, and is taken back; those that come after it are lost with the run.
    """

    def __init__(self, path: Path, *, end: Extent | None = None, ahead: int = 0) -> None:
        """`end` is what the file holds that counts, and is to hold; `ahead`, how many bytes may wait to be written."""
        self.path, self.ahead = path, ahead
        self.waiting = bytearray()
        self.failed = False
        digest = begins_with(path, end) if end else None
        self.descriptor = opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.size: int = end["bytes"] if end else os.fstat(self.descriptor).st_size
        self.digest = digest or prefix(path, self.size)
        os.ftruncate(self.descriptor, self.size)

    def write(self, text: str) -> None:
        self.waiting += text.encode()
        if len(self.waiting) > self.ahead:
            self.flush()

    def flush(self) -> None:
        data = bytes(self.waiting)
        self.waiting.clear()
        if self.failed or not data:
            return
        try:
            with writing(self.path):
                self._append(memoryview(data))
        except RunDirError:
            self.failed = True
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(data)
        self.digest.update(data)

    def _append(self, data: memoryview) -> None:
        if not os.path.samestat(self.path.stat(), os.fstat(self.descriptor)):
            raise OSError(errno.ESTALE, "another file has come to its place")
        while data:
            data = data[os.write(self.descriptor, data) :]

    def end(self) -> Extent:
        """All that is written so far, which is on disk when this returns."""
        self.flush()
        if self.failed:
            raise RunDirError(f"{self.path} lacks lines that could not be written")
        with writing(self.path):
            os.fsync(self.descriptor)
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}

    def close(self) -> None:
        try:
            self.flush()
        finally:
            os.close(self.descriptor)
