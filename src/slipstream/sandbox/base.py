"""What runs a program that a model wrote, and what came of it.

Whatever such a program does is in `Ran`. That it could not be run at all is a SandboxError, and no fault of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

MiB = 1 << 20
Status = Literal["ok", "failed", "timeout", "output", "memory", "disk"]
"""`failed`: it ended with another code than 0. All further ones: it was ended, since it took too much of that."""
PYTHON = ("env", "PYTHONHASHSEED=0", "PYTHONDONTWRITEBYTECODE=1", "python3")
"""Sets are in the same order in every run."""
LONGEST = 100_000
"""Bytes of one argument: Linux takes 128 KiB."""


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0
    memory: int = 512 * MiB
    """Bytes, of each process and of all together."""
    disk: int = 64 * MiB
    """Bytes of the working directory, and of a file."""
    output: int = 64 << 10
    """Bytes of standard output and of standard error that are read."""
    processes: int = 32
    """And threads, at a time."""

    @property
    def files(self) -> int:
        """How many there may be: an empty one takes memory, too."""
        return max(1024, self.disk // 4096)


USUAL = Limits()


@dataclass(frozen=True)
class Ran:
    status: Status
    code: int | None
    """None of what was ended; 128 and the signal of what a signal has ended."""
    out: str
    err: str
    seconds: float


class Session(Protocol):
    """Keeps its working directory from call to call, and nothing else; takes one call at a time."""

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", files: Mapping[str, str] = {}, limits: Limits = USUAL
    ) -> Ran: ...

    async def close(self) -> None: ...


class Sandbox(Protocol):
    """Every call begins in a working directory that holds these files and nothing else."""

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", files: Mapping[str, str] = {}, limits: Limits = USUAL
    ) -> Ran: ...

    async def session(self, limits: Limits = USUAL) -> Session:
        """Its disk is bounded by these limits; all else by those of a call."""
        ...

    async def close(self) -> None: ...


async def run_python(
    sandbox: Sandbox | Session,
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] = {},
    limits: Limits = USUAL,
) -> Ran:
    """As main.py beside these files."""
    return await sandbox.run([*PYTHON, "main.py"], stdin=stdin, files={**files, "main.py": code}, limits=limits)


def unrunnable(argv: Sequence[str], files: Mapping[str, str], limits: Limits) -> Ran | None:
    """What came of a program that no system would start."""
    if not argv:
        raise ValueError("argv is empty: it begins with the name of a program")
    for name in files:
        parts = name.split("/")
        if {"", ".", ".."} & set(parts) or "\0" in name or any(len(encoded(part)) > 255 for part in parts):
            raise ValueError(f"files: {name!r} is no path below the working directory, such as 'src/main.py'")
        if any("/".join(parts[:depth]) in files for depth in range(1, len(parts))):
            raise ValueError(f"files: {name!r} lies in a file, and not in a directory")
    if any("\0" in each for each in argv):
        return Ran("failed", 126, "", "an argument contains a null character\n", 0.0)
    if any(len(encoded(each)) > LONGEST for each in argv) or len(argv) > 1000:
        return Ran("failed", 126, "", "Argument list too long\n", 0.0)
    if sum(len(encoded(each)) for each in files.values()) > limits.disk or len(files) > limits.files:
        return Ran("disk", None, "", "No space left on device\n", 0.0)
    return None


def encoded(text: str) -> bytes:
    """Half a surrogate pair, which models write, becomes a question mark."""
    return text.encode(errors="replace")
