"""Directory and sandbox for the judge of an agent's work, the program in `environment.gateway.verify`.

Nothing that the agent wrote can influence the judge. The judge starts in a new directory with a new HOME, and in a
separate sandbox if the agent had one. Only the judge has the row with its answer, and the file for the verdict.

The solution is a copy of the workspace, made after all processes of the agent have ended. The copy follows no link and
has limits of size, number and time; a workspace that exceeds one is worth 0. The judge asks over a socket to run
programs of the solution. These programs run in another sandbox, which holds only the copy.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.agents import judge
from slipstream.agents.workspace import put
from slipstream.errors import SlipstreamError
from slipstream.sandbox import sandbox_of
from slipstream.sandbox.base import Limits, MiB, Ran, Session
from slipstream.sandbox.limits import holds_more

MAX_WORKSPACE_BYTES = 256 * MiB
"""Maximum bytes of a workspace that is judged."""
MAX_WORKSPACE_FILES = 50_000
"""Maximum files and directories of a workspace that is judged."""
SOLUTION_LIMITS = Limits(seconds=60.0, memory=1024 * MiB, disk=1024 * MiB, output=MiB, processes=64)
"""Limits of the solution's sandbox; `disk` is larger than any workspace that is judged."""
JUDGE_DIRECTORY = "judge"
"""Directory in which the judge starts."""


def too_large(workspace: Path) -> str:
    """Return the reason why a workspace cannot be judged, or an empty string if it can be judged."""
    if holds_more(workspace, MAX_WORKSPACE_BYTES, MAX_WORKSPACE_FILES):
        return (
            f"it has more than {MAX_WORKSPACE_BYTES // MiB} MiB or {MAX_WORKSPACE_FILES} files, and verify needs a copy"
        )
    return ""


def prepare(place: Path, row: dict[str, Any], prompt: str) -> None:
    """Fill the judge's directory, except for the workspace."""
    for each in (JUDGE_DIRECTORY, "home", "tmp"):
        (place / each).mkdir()
    shutil.copyfile(str(judge.__file__), place / JUDGE_DIRECTORY / "judge.py")
    (place / "task.json").write_text(json.dumps(row, ensure_ascii=False), "utf-8", "replace")
    (place / "prompt.txt").write_text(prompt, "utf-8", "replace")


@dataclass(eq=False)
class Solution:
    """Sandbox in which a judge runs the solution; the first request opens it."""

    workspace: Path
    seconds: float
    """Seconds left for its copy and all programs, so that a slow solution fails before the judge's time is over."""
    fault: str = ""
    """Reason why the sandbox failed, which is no fault of the agent; empty if it did not fail."""
    session: Session | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def serve(self, path: Path) -> AsyncIterator[None]:
        """Serve a socket: requests are JSON of {"argv", "stdin", "seconds"}, answers are JSON of a `Ran`."""
        answering = list[asyncio.Task[None]]()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answering.append(asyncio.create_task(self._answer(reader, writer)))

        server = await asyncio.start_unix_server(begin, path)
        try:
            yield
        finally:
            server.close()
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
            if self.session is not None:
                await self.session.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = json.dumps(asdict(await self._run(**json.loads(await reader.read())))).encode()
        except (SlipstreamError, ValueError, TypeError, OSError) as error:
            self.fault = str(error)
        else:
            with suppress(ConnectionError):  # a judge that no longer waits may still have its verdict
                writer.write(answer)
                await writer.drain()
        finally:
            writer.close()

    async def _run(self, argv: list[str], stdin: str = "", seconds: float = 10.0) -> Ran:
        async with self.turn:
            if self.session is None:
                self.session = await sandbox_of("bubblewrap").session(SOLUTION_LIMITS)
                since = asyncio.get_running_loop().time()
                with suppress(TimeoutError):  # its time is used up
                    await put(self.session, self.workspace, replace(SOLUTION_LIMITS, seconds=self.seconds))
                self.seconds -= asyncio.get_running_loop().time() - since
            if self.seconds <= 0:
                return Ran("timeout", None, "", "the solution has used all its time\n", 0.0)
            limits = replace(SOLUTION_LIMITS, seconds=min(seconds, self.seconds))
            ran = await self.session.run(argv, stdin=stdin, limits=limits)
            self.seconds -= ran.seconds
            return ran
