"""A file that somebody else writes, line by line: each look reads what has come since the last one, and no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slipstream.errors import RunDirError
from slipstream.run_dir.atomic_files import opened, reading
from slipstream.run_dir.formats import FORMAT, parsed

PROOF = 256
"""Bytes before the place up to which a file was read that must still be what they were."""


class Look(NamedTuple):
    anew: bool
    """What was read before is no longer in the file, or there is another file."""
    lines: list[dict[str, Any]]


class Tail:
    def __init__(self, path: Path, *, back: int | None = None, number: int = FORMAT) -> None:
        """At first all of it is read, or its last so many bytes. `number` is the format of the run."""
        self.path, self.back, self.number = path, back, number
        self.forget()

    def forget(self) -> None:
        self.file = (0, 0)
        self.at, self.proof = 0, b""

    def look(self) -> Look:
        """Whole lines. Half of one at the end waits for the rest of it, as do zeros, which some network disks show
        where lines are about to be."""
        known = self.file != (0, 0)
        try:
            file = os.fdopen(opened(self.path), "rb")
        except FileNotFoundError:
            self.forget()
            return Look(known, [])
        except OSError as error:
            raise RunDirError(f"{self.path} cannot be read: {error.strerror}") from None
        with file:
            anew = known and not self._goes_on(file)
            if anew or not known:
                self._begin(file)
            file.seek(self.at)
            data = file.read().partition(b"\0")[0]
        data = data[: data.rfind(b"\n") + 1]
        at = self.at
        self.at += len(data)
        self.proof = (self.proof + data)[-PROOF:]

        def before() -> int:
            with reading(self.path) as file:
                return file.read(at).count(b"\n")

        return Look(anew, parsed(self.path, data.split(b"\n")[:-1], before, number=self.number))

    def _goes_on(self, file: BinaryIO) -> bool:
        """A run that is resumed cuts its files where a checkpoint was, and writes on from there."""
        if identity(file) != self.file:
            return False
        file.seek(self.at - len(self.proof))
        return file.read(len(self.proof)) == self.proof

    def _begin(self, file: BinaryIO) -> None:
        self.forget()
        self.file = identity(file)
        start = max(0, os.fstat(file.fileno()).st_size - self.back) if self.back is not None else 0
        if start:
            file.seek(start - 1)
            self.at = start - 1 + len(file.readline())  # of the line in which that is, the beginning is missing


def identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino
