"""Atomic files: complete or absent, readable by their owner only, written by one process at a time.

Files are written under a temporary name, synced and renamed. If the process is killed or the disk is full, the previous
version stays. `Lines` and `append` instead add lines to a file in place.
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
"""Number of tries to get a lock, and seconds between them, because `held` takes the lock for a moment."""
HTML_START = b"<!doctype html"
"""First bytes of every page of this package."""
BLOCK = 1 << 20
Extent = dict[str, Any]
"""Size of a file in bytes, and its SHA-256 checksum."""


@contextmanager
def private() -> Iterator[None]:
    """Make new files of this process and its children private, because prompts and answers may be confidential."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of a write (full or missing disk, no permission) into a one-line RunDirError."""
    try:
        yield
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror}") from None


def opened(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Return a descriptor of a regular file; refuse links and special files."""
    check_regular(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # in case the file was replaced since the check: do not follow a link, do not block on a pipe
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)


def check_regular(path: Path) -> None:
    if path.is_symlink() or not (path.is_file() or path.is_dir() or not path.exists()):
        what = "a link" if path.is_symlink() else "a device, a pipe or a socket"
        raise RunDirError(f"{path} is {what}, not a regular file: move it away, or name another path")


def check_page(path: Path) -> None:
    """Raise RunDirError unless the path is missing, an empty file, or an HTML page, which a new page may replace."""
    check_regular(path)
    if path.is_file():
        with reading(path) as file:
            if (begin := file.read(len(HTML_START)).lower()) and begin != HTML_START:
                raise RunDirError(f"{path} exists and is no HTML page: move it away, or name another file")


@contextmanager
def reading(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a run for reading; turn an OSError into a one-line RunDirError."""
    try:
        with os.fdopen(opened(path), "rb") as file:
            yield file
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def directory_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a directory, so that it has one writer; the system releases it when the process ends.

    Fork child processes before this call: children that are forked later also hold the lock.
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
                f"{path}: its file system has no locks ({error.strerror}): keep runs on another file system"
            ) from None
        if not os.fstat(file.fileno()).st_nlink:
            raise RunDirError(f"{path} was in use by a process that ended just now: try again")  # it removed the lock
        file.truncate(0)
        with suppress(OSError):  # on a full disk the lock file stays empty, but the lock is held
            file.write(f"{os.getpid()} on {socket.gethostname()}")
            file.flush()
        try:
            yield
        finally:
            if not (path / "config.toml").exists():  # no run was created
                with suppress(OSError):
                    (path / LOCK).unlink()


def _lock(file: IO[str]) -> None:
    for _ in range(TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(PAUSE)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def held(path: Path) -> bool | None:
    """Return whether a process holds the lock of a directory; None if its file system has no locks."""
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
    """Return the current or last writer of a directory as `PID on HOST`; empty if unknown."""
    try:
        with os.fdopen(opened(path / LOCK), errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise  # some network file systems cannot sync a directory, and do not need it
    finally:
        os.close(descriptor)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file so that a reader sees either the complete old text or the complete new one."""
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
    """Return the temporary path under which a file or directory is written."""
    return path.with_name(path.name + ".tmp")


def remove(path: Path) -> None:
    """Remove a directory, renamed first so that no reader finds an incomplete one."""
    beside = beside_of(path)
    shutil.rmtree(beside, ignore_errors=True)
    path.rename(beside)
    shutil.rmtree(beside)


def remove_unfinished(directory: Path) -> None:
    """Remove the temporary files and directories that a killed process has left."""
    for path in directory.glob("*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def append(path: Path, lines: str) -> None:
    """Append complete lines to a file, after removing an incomplete last one; several processes may do so at once."""
    # without a buffer, which would write the rest of the lines when the file is closed, after they were taken back
    with writing(path), os.fdopen(opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = os.fstat(file.fileno()).st_size
        if before and os.pread(file.fileno(), 1, before - 1) != b"\n":  # of a process that was killed
            before = os.pread(file.fileno(), before, 0).rfind(b"\n") + 1
            os.ftruncate(file.fileno(), before)
        left = memoryview(lines.encode())
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise


def seal(path: Path) -> None:
    """Sync all files of a directory, make them private, and write the manifest."""
    below = sorted(path.rglob("*"))
    for each in below:
        each.chmod(0o700 if each.is_dir() else 0o600)  # another process or machine may have written it
        sync(each)
    files = [each for each in below if each.is_file()]
    write_atomic(path / MANIFEST, _as_text({each.relative_to(path).as_posix(): extent(each) for each in files}))


def damage(path: Path, *, edited: str = "") -> str | None:
    """Return what differs from the manifest of a sealed directory, or None.

    Added files are ignored, and so is the file `edited`, which a person may have changed.
    """
    try:
        if not (path / MANIFEST).exists():
            return f"{MANIFEST} is missing"
        with reading(path / MANIFEST) as file:
            text = file.read().decode("utf-8")
        manifest = json.loads(text)
        for name, saved in manifest.items():
            if name == edited:
                continue
            if not (path / name).is_file():
                return f"{name} is missing"
            if (found := extent(path / name)) != saved:
                return f"{name} differs from what was saved, in its {found['bytes']:,} bytes"
    except RunDirError as error:
        return str(error)
    except (ValueError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    return None if _as_text(manifest) == text else f"{MANIFEST} differs from what was saved"


def _as_text(manifest: Mapping[str, Extent]) -> str:
    return json.dumps(manifest, indent=1) + "\n"


def extent(path: Path) -> Extent:
    with reading(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def prefix(path: Path, count: int) -> hashlib._Hash:
    """Return the running checksum of the first `count` bytes of a file, or of the whole file if it is shorter."""
    digest = hashlib.sha256()
    with reading(path) as file:
        while count and (block := file.read(min(count, BLOCK))):
            digest.update(block)
            count -= len(block)
    return digest


def begins_with(path: Path, end: Extent) -> hashlib._Hash:
    """Return the checksum object of the first bytes of a file; raise RunDirError if they differ from `end`."""
    digest = prefix(path, end["bytes"]) if path.exists() else hashlib.sha256()
    if digest.hexdigest() != end["sha256"]:
        raise RunDirError(
            f"{path} was changed: it does not begin with the {end['bytes']:,} bytes that it had at this checkpoint; "
            "put them back, or begin a new run from the checkpoint's student"
        )
    return digest


class Lines:
    """A file to which whole lines are appended; only a killed process can leave an incomplete last line.

    If a write fails, RunDirError is raised once and the incomplete line is removed. All later lines are discarded.
    """

    def __init__(self, path: Path, *, end: Extent | None = None, ahead: int = 0) -> None:
        """Open the file, truncated to the extent `end` if given; up to `ahead` bytes are buffered before a write."""
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
                if not os.path.samestat(self.path.stat(), os.fstat(self.descriptor)):
                    raise OSError(errno.ESTALE, "the file was replaced by another one")
                left = memoryview(data)
                while left:
                    left = left[os.write(self.descriptor, left) :]
        except RunDirError:
            self.failed = True
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(data)
        self.digest.update(data)

    def end(self) -> Extent:
        """Write everything to disk, and return the extent of the file."""
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
