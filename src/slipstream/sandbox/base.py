"""Interface of sandboxes, which run programs that a model wrote.

`Ran` is the result of a program that ran, even if it failed. SandboxError means that a program could not be run.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

MiB = 1 << 20
Status = Literal["ok", "failed", "timeout", "output", "memory", "disk"]
"""`failed`: the exit code was not 0. `timeout`, `output`, `memory`, `disk`: the program exceeded that limit."""
PYTHON_COMMAND = ("env", "PYTHONHASHSEED=0", "PYTHONDONTWRITEBYTECODE=1", "python3")
"""Command for Python with a fixed hash seed, so that the order of sets is the same in every run."""
MAX_ARGUMENT_BYTES = 100_000
"""Maximum bytes of one command-line argument; Linux allows 128 KiB."""
COPY_COMMAND = ("cp", "-R", "--remove-destination")
"""Command that copies new files of a session. It runs in the sandbox, so symbolic links of a program stay inside."""


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0
    memory: int = 512 * MiB
    """Maximum memory in bytes of each process, and also of all processes of one call together."""
    disk: int = 64 * MiB
    """Maximum bytes of the working directory, and also of each file."""
    output: int = 64 << 10
    """Maximum bytes of standard output; standard error has the same, separate limit."""
    processes: int = 32
    """Maximum number of processes and threads that exist at the same time."""

    @property
    def files(self) -> int:
        """Maximum number of files, which limits the memory of empty files."""
        return max(1024, self.disk // 4096)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Ran:
    status: Status
    code: int | None
    """Exit code; 128 + signal number after a signal, None if a limit ended the program."""
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class Program:
    argv: Sequence[str]
    stdin: str | Path = ""
    """Text, or a file of this machine, which only sandboxes on this machine can read."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of new files, by path below the working directory."""
    limits: Limits = DEFAULT_LIMITS


class Runner(ABC):
    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | Path = "",
        files: Mapping[str, str] = {},
        limits: Limits = DEFAULT_LIMITS,
    ) -> Ran:
        program = Program(argv, stdin, files, limits)
        return unrunnable(program) or await self.execute(program)

    @abstractmethod
    async def execute(self, program: Program) -> Ran: ...

    async def close(self) -> None:  # noqa: B027 (a sandbox may hold nothing)
        """Free what the sandbox or session holds."""


class Session(Runner):
    """Several calls that share one working directory (and /tmp, in bubblewrap). Calls run one after the other."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()

    async def execute(self, program: Program) -> Ran:
        async with self.turn:
            if program.files:
                copied = await self.copy(program.files, program.limits)
                if copied.status != "ok":
                    return copied
            return await self.call(replace(program, files={}))

    @abstractmethod
    async def copy(self, files: Mapping[str, str], limits: Limits) -> Ran:
        """Copy files into the working directory by the program `COPY_COMMAND`."""

    @abstractmethod
    async def call(self, program: Program) -> Ran: ...


class Sandbox(Runner):
    """Runner of programs. Every call of `run` gets a new working directory that contains only `files`."""

    @abstractmethod
    async def session(self, limits: Limits = DEFAULT_LIMITS) -> Session:
        """Open a session. Only `limits.disk` is used, for its directories; each call has its own other limits."""


async def run_python(
    sandbox: Runner,
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] = {},
    limits: Limits = DEFAULT_LIMITS,
) -> Ran:
    """Run Python code as main.py, in a working directory with these files."""
    return await sandbox.run([*PYTHON_COMMAND, "main.py"], stdin=stdin, files={**files, "main.py": code}, limits=limits)


def unrunnable(program: Program) -> Ran | None:
    """Return the result if Linux cannot start this program, else None; raise ValueError for empty argv or bad paths."""
    argv, files, limits = program.argv, program.files, program.limits
    if not argv:
        raise ValueError("argv is empty: it begins with the name of a program")
    for name in files:
        parts = name.split("/")
        if {"", ".", ".."} & set(parts) or "\0" in name or any(len(encode(part)) > 255 for part in parts):
            raise ValueError(f"files: {name!r} is not a path below the working directory, such as 'src/main.py'")
        if any("/".join(parts[:depth]) in files for depth in range(1, len(parts))):
            raise ValueError(f"files: {name!r} is below a file, not below a directory")
    if any("\0" in each for each in argv):
        return Ran("failed", 126, "", "an argument contains a null character\n", 0.0)
    if any(len(encode(each)) > MAX_ARGUMENT_BYTES for each in argv) or len(argv) > 1000:
        return Ran("failed", 126, "", "Argument list too long\n", 0.0)
    if sum(len(encode(each)) for each in files.values()) > limits.disk or len(files) > limits.files:
        return Ran("disk", None, "", "No space left on device\n", 0.0)
    return None


def encode(text: str) -> bytes:
    """Encode text as UTF-8. An unpaired surrogate, which models may write, becomes a question mark."""
    return text.encode(errors="replace")
