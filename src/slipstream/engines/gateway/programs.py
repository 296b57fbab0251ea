"""Agents that are started here: a process for every episode, in a workspace of its own, and what it leaves there."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slipstream.engines.gateway.walls import PORT, Walls
from slipstream.errors import EnvironmentFailed, SandboxError, first_line
from slipstream.linux import LINUX
from slipstream.tasks.environments.forms import rewards_of
from slipstream.tasks.sandbox import processes

SAID = 4096
"""Most bytes of what an agent prints that are kept: the last ones."""
REWARD = "reward.json"
LARGEST = 1 << 20
"""Most bytes of that."""
MORTAL = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--") if LINUX else ()
"""Before a command that is to end with whoever started it."""
TOLD = "ground_truth"
"""What of its row an agent is not told, and what verifies its work is."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    command: tuple[str, ...]
    """Placeholders are {base_url}, {session}, {workspace}, {prompt} and {prompt_file}."""
    workspace: str | None
    """A directory of which every episode has a copy."""
    verify: tuple[str, ...] | None
    """What is run there when the agent has ended."""
    walled: bool = False
    """Both in a sandbox, out of which only the gateway is reached."""


class Programs:
    def __init__(self, agent: Agent, *, socket: str = "", seconds: float = 600.0) -> None:
        """`socket`: of the gateway, for those inside walls; `seconds` of computing, for each process of theirs."""
        self.agent, self.socket, self.seconds = agent, socket, seconds

    @asynccontextmanager
    async def playing(self, row: dict[str, Any], base_url: str, session: str) -> AsyncIterator[Program]:
        place = Path(tempfile.mkdtemp(prefix="slipstream-agent-"))
        try:
            walls = Walls.new() if self.agent.walled else None
            program = Program(self, place, row, base_url, session, walls)
            await beside(program.prepare)
            try:
                await program.start(self.agent.command)
                yield program
            finally:
                await program.end()
        finally:
            await beside(shutil.rmtree, place, True)

    def close(self) -> None:
        """There is nothing to end: every process has, with its episode."""


async def beside(work: Any, *given: Any) -> None:
    """In a thread, and not half of it."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *given))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@dataclass(eq=False)
class Program:
    kind: Programs
    place: Path
    row: dict[str, Any]
    base_url: str
    session: str
    walls: Walls | None
    process: asyncio.subprocess.Process | None = None
    reading: list[asyncio.Task[None]] = field(default_factory=list)
    said: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))

    @property
    def agent(self) -> Agent:
        return self.kind.agent

    @property
    def url(self) -> str:
        """As the agent sees it."""
        path = urlsplit(self.base_url).path
        return self.base_url if self.walls is None else f"http://127.0.0.1:{PORT}{path}"

    @property
    def workspace(self) -> Path:
        return self.place / "workspace"

    @property
    def prompt(self) -> str:
        """As text: what was asked last."""
        asked = self.row["prompt"]
        return asked if isinstance(asked, str) else str(asked[-1]["content"])

    def prepare(self) -> None:
        if self.agent.workspace is None:
            self.workspace.mkdir()
        else:
            shutil.copytree(self.agent.workspace, self.workspace, symlinks=True)
        for each in ("home", "tmp"):
            (self.place / each).mkdir()
        told = {name: value for name, value in self.row.items() if name != TOLD}
        (self.workspace / "task.json").write_text(json.dumps(told, ensure_ascii=False), "utf-8", "replace")
        (self.place / "prompt.txt").write_text(self.prompt, "utf-8", "replace")
        if self.walls is not None:
            self.walls.give(self.place)

    async def start(self, command: Sequence[str], **more: str) -> None:
        given = {
            "base_url": self.url,
            "session": self.session,
            "workspace": str(self.workspace),
            "prompt_file": str(self.place / "prompt.txt"),
            "prompt": self.prompt,
        }
        words, env = [filled(each, given) for each in command], self._environment() | more
        try:
            if self.walls is None:
                self.process = await processes.start([*MORTAL, *words], env=env, cwd=str(self.workspace))
            else:
                around = self.walls.around(words, command, self.place, env, self.kind.socket, self.kind.seconds)
                with around as (inside, keeps):
                    self.process = await processes.start(inside, keeps=keeps)
        except SandboxError as error:
            raise EnvironmentFailed("error", str(error).removeprefix("sandbox: ")) from None
        assert self.process.stdout is not None and self.process.stderr is not None
        for each in self.said:
            each.clear()
        streams = zip((self.process.stdout, self.process.stderr), self.said, strict=True)
        self.reading = [asyncio.create_task(_read(stream, into)) for stream, into in streams]

    def _environment(self) -> dict[str, str]:
        """Nothing of ours, where keys may be."""
        return {
            "PATH": os.environ.get("PATH", processes.PATH),
            "LANG": "C.UTF-8",
            "HOME": str(self.place / "home"),
            "TMPDIR": str(self.place / "tmp"),
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_BASE": self.url,
            "OPENAI_API_KEY": self.session,
            "SLIPSTREAM_BASE_URL": self.url,
            "SLIPSTREAM_SESSION": self.session,
            "SLIPSTREAM_WORKSPACE": str(self.workspace),
            "SLIPSTREAM_TASK": str(self.workspace / "task.json"),
        }

    async def ended(self) -> str:
        """Wait until it has; why it failed, or nothing."""
        assert self.process is not None
        code = await self.process.wait()
        await self.end()
        if code == 0:
            return ""
        how = f"exit status {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        return f"{how}{self._last()}"

    def _last(self) -> str:
        """The last line that it said."""
        for said in reversed(self.said):
            if lines := said.decode(errors="replace").split("\n"):
                for line in reversed(lines):
                    if line.strip():
                        return f": {line.strip()[:200]}"
        return ""

    async def end(self) -> None:
        """Of it and all that it started."""
        if self.process is None:
            return
        processes.kill(self.process)
        await self.process.wait()
        if self.reading:
            await asyncio.wait(self.reading, timeout=processes.DRAINED)
            for task in self.reading:
                task.cancel()
        processes.release(self.process)

    async def rewards(self) -> dict[str, float]:
        """As it left them, or as what verifies its work says."""
        verify = self.agent.verify
        file = self.workspace / REWARD
        code = 0
        if verify is not None:
            with suppress(OSError):
                file.unlink()  # whoever wrote it was not to
            told = self.place / "task.json"
            told.write_text(json.dumps(self.row, ensure_ascii=False), "utf-8", "replace")
            told.chmod(0o644)
            await self.start(verify, SLIPSTREAM_TASK=str(told))
            why = await self.ended()
            assert self.process is not None and self.process.returncode is not None
            code = self.process.returncode
            if code < 0:
                raise EnvironmentFailed("crash", f"environment.gateway.verify: {why}")
        try:
            found = written(file)
            if found is not None or verify is None:
                return rewards_of(found)
        except Exception as error:  # whatever is wrong with it is theirs
            raise EnvironmentFailed("error", f"{REWARD}: {first_line(error)}") from None
        return rewards_of(float(code == 0))


def filled(text: str, given: dict[str, str]) -> str:
    """Each placeholder once: what comes in is as it is."""
    for name, value in given.items():
        before, mark, after = text.partition(f"{{{name}}}")
        if mark:
            return f"{filled(before, given)}{value}{filled(after, given)}"
    return text


def written(file: Path) -> Any:
    """What an agent has left there; none if nothing, and nothing but a file is read."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("is no file")
        said = opened.read(LARGEST + 1)
    if len(said) > LARGEST:
        raise ValueError(f"has more than {LARGEST} bytes")
    return json.loads(said)


async def _read(stream: asyncio.StreamReader, into: bytearray) -> None:
    """To its end, whatever it says; the last of it is kept."""
    while part := await stream.read(1 << 16):
        into += part
        del into[:-SAID]
