"""Incremental reader for a file of lines that another process writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slipstream.errors import RunDirError
from slipstream.run_dir.atomic_files import opened, reading
from slipstream.run_dir.formats import FORMAT, parsed

PROOF = 256
"""Number of bytes before the read position that are compared to detect a rewritten file."""


class Look(NamedTuple):
    anew: bool
    """True if the file was replaced or cut since the last look, so that earlier lines are no longer valid."""
    lines: list[dict[str, Any]]


class Tail:
    def __init__(self, path: Path, *, back: int | None = None, number: int = FORMAT) -> None:
        """`back` limits the first read to the last bytes of the file (None: all); `number` is the format version."""
        self.path, self.back, self.number = path, back, number
        self.forget()

    def forget(self) -> None:
        self.file = (0, 0)
        self.at, self.proof = 0, b""

    def look(self) -> Look:
        """Return the complete lines since the last look; an incomplete last line is left for the next look."""
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
            data = file.read().partition(b"\0")[0]  # some network disks show zeros until the data arrives
        data = data[: data.rfind(b"\n") + 1]
        at = self.at
        self.at += len(data)
        self.proof = (self.proof + data)[-PROOF:]

        def before() -> int:
            with reading(self.path) as file:
                return file.read(at).count(b"\n")

        return Look(anew, parsed(self.path, data.split(b"\n")[:-1], before, number=self.number))

    def _goes_on(self, file: BinaryIO) -> bool:
        """Return False if the file was replaced or cut; a resumed run cuts its files back to the checkpoint."""
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
            self.at = start - 1 + len(file.readline())  # skip a line whose beginning was not read


def identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino
