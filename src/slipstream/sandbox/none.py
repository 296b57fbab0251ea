"""Sandbox `none`: programs run as ordinary processes with resource limits, but with all rights of this user.

Limited are the time, output and memory of a call and the size of each file. Not limited are the numbers of files and
processes and the memory of sockets. When a program ends, its descendants are killed unless they changed HOME.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.errors import SandboxError
from slipstream.sandbox import processes
from slipstream.sandbox.base import USUAL, Limits, Ran, Status, encoded, unrunnable
from slipstream.sandbox.bubblewrap import system


class Unconfined:
    def __init__(self) -> None:
        processes.check_installed(("prlimit",), "apt install util-linux")
        self.path = system()[0]

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", files: Mapping[str, str] = {}, limits: Limits = USUAL
    ) -> Ran:
        if (ran := unrunnable(argv, files, limits)) is not None:
            return ran
        with directory() as work:
            write(Path(work), files)
            return await self.call(argv, Path(work), stdin, limits)

    async def session(self, limits: Limits = USUAL) -> UnconfinedSession:
        return UnconfinedSession(self)

    async def close(self) -> None:
        pass

    async def call(self, argv: Sequence[str], work: Path, stdin: str, limits: Limits) -> Ran:
        since = asyncio.get_running_loop().time()
        with processes.sealed(encoded(stdin)) as given:
            process = await processes.start(
                processes.limited(argv, limits, processes=False, space=True),
                stdin=given,
                env=processes.environment(self.path, str(work)),
                cwd=str(work),
            )
            try:
                return await processes.finish(process, limits, since, lambda pid: over(pid, limits))
            finally:
                processes.kill_at_home(str(work))


def over(pid: int, limits: Limits) -> Status | None:
    return "memory" if processes.memory(processes.descendants(pid), limits.memory) > limits.memory else None


def write(into: Path, files: Mapping[str, str]) -> None:
    """Write files into a new directory, which cannot contain symbolic links yet."""
    for name, content in files.items():
        file = into / encoded(name).decode()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(content))


class UnconfinedSession:
    """Session with a temporary directory, removed by `close` or when the process that opened it exits normally."""

    def __init__(self, sandbox: Unconfined) -> None:
        self.sandbox, self.turn = sandbox, asyncio.Lock()
        self.directory: tempfile.TemporaryDirectory[str] | None = directory()

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", files: Mapping[str, str] = {}, limits: Limits = USUAL
    ) -> Ran:
        if (ran := unrunnable(argv, files, limits)) is not None:
            return ran
        async with self.turn:
            if self.directory is None:
                raise SandboxError("sandbox: the session is over")
            work = Path(self.directory.name)
            if files:
                with directory() as new:  # copied by a program: this process must not follow symbolic links
                    write(Path(new), files)
                    put = await self.sandbox.call(
                        ["cp", "-R", "--remove-destination", f"{new}/.", "."], work, "", limits
                    )
                if put.status != "ok":
                    return put
            return await self.sandbox.call(argv, work, stdin, limits)

    async def close(self) -> None:
        if self.directory is not None:
            self.directory.cleanup()
            self.directory = None


def directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slipstream-", ignore_cleanup_errors=True)
