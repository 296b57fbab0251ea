"""Sandbox `none`: programs run as ordinary processes with resource limits, but with all rights of this user.

Limited are the time, output and memory of a call, and the files in its working directory. Not limited are the number of
processes, the memory of sockets and files elsewhere. When a program ends, its descendants are killed unless they
changed HOME. If this process is killed, a program is killed, too, but what it started may remain.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slipstream import processes
from slipstream.errors import SandboxError
from slipstream.sandbox.base import COPY_COMMAND, DEFAULT_LIMITS, Limits, Program, Ran, Sandbox, Session, Status, encode
from slipstream.sandbox.bubblewrap import system
from slipstream.sandbox.limits import check_installed, environment, finish, holds_more, memory, stdin_file, with_limits


class Unconfined(Sandbox):
    def __init__(self) -> None:
        check_installed(("prlimit", "setpriv"), "apt install util-linux")
        self.path = system()[0]

    async def execute(self, program: Program) -> Ran:
        with directory() as work:
            write(Path(work), program.files)
            return await self.call(program, work)

    async def session(self, limits: Limits = DEFAULT_LIMITS) -> UnconfinedSession:
        return UnconfinedSession(self, limits.disk)

    async def call(self, program: Program, work: str) -> Ran:
        since, limits = asyncio.get_running_loop().time(), program.limits

        def exceeded_limit(pid: int) -> Status | None:
            if memory([pid, *processes.descendants(pid)], limits.memory) > limits.memory:
                return "memory"
            return "disk" if holds_more(work, limits.disk, limits.files) else None

        with stdin_file(program.stdin) as stdin:
            process = await processes.start_program(
                [*processes.WITH_PARENT, *with_limits(program.argv, limits, processes=False, space=True)],
                stdin=stdin,
                env=environment(self.path, work),
                cwd=work,
            )
            try:
                ran = await finish(process, limits, since, exceeded_limit)
            finally:
                processes.kill_at_home(work)
        if ran.code is not None and holds_more(work, limits.disk, limits.files):
            return replace(ran, status="disk", code=None)
        return ran


def write(into: Path, files: Mapping[str, str]) -> None:
    """Write files into a new directory, which cannot contain symbolic links yet."""
    for name, content in files.items():
        file = into / encode(name).decode()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode(content))


class UnconfinedSession(Session):
    """Session with a temporary directory, removed by `close` or when the process that opened it exits normally."""

    def __init__(self, sandbox: Unconfined, disk: int) -> None:
        super().__init__()
        self.sandbox, self.disk = sandbox, disk
        self.directory: tempfile.TemporaryDirectory[str] | None = directory()

    async def copy(self, files: Mapping[str, str], limits: Limits) -> Ran:
        with directory() as new:
            write(Path(new), files)
            return await self.call(Program([*COPY_COMMAND, f"{new}/.", "."], limits=limits))

    async def call(self, program: Program) -> Ran:
        if self.directory is None:
            raise SandboxError("sandbox: the session is over")
        limits = replace(program.limits, disk=min(program.limits.disk, self.disk))
        return await self.sandbox.call(replace(program, limits=limits), self.directory.name)

    async def close(self) -> None:
        if self.directory is not None:
            self.directory.cleanup()
            self.directory = None


def directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slipstream-", ignore_cleanup_errors=True)
