"""Environments whose tools are those of an MCP server, by the official SDK: `mcp:COMMAND` or `mcp:URL`.

A task of its own opens and closes each connection, because the SDK closes a connection only in the task that opened it.
A server that is lost fails the episode. The next try connects again, and sends it all earlier calls.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TextIO

from slipstream.environments import ToolError
from slipstream.environments.forms import Kind
from slipstream.environments.tools import ServedTool
from slipstream.errors import ConfigError, EnvironmentFailed, first_line

CONNECT_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between tries to connect to a server that runs elsewhere, which may be starting again."""
LIST_TIMEOUT = 60.0
"""Seconds in which a server must connect and list its tools."""
WATCHED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
"""Program that becomes another one, which is killed when this process ends, although it has its own session."""
HIDDEN_VARIABLES = ("PYTHONPATH", "PYTHONHASHSEED")
"""Environment variables of this process that a server does not get."""


class Connection:
    """Connection to a server, which a task of its own holds open."""

    def __init__(self, target: str | Sequence[str], log: TextIO | None = None) -> None:
        """Connect to a URL, or start a program whose standard error goes to `log`, or nowhere."""
        self.opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.closing = asyncio.Event()
        self.task = asyncio.create_task(self._hold(target, log))

    async def _hold(self, target: str | Sequence[str], log: TextIO | None) -> None:
        from mcp import Client

        try:
            with Path(os.devnull).open("w") as nowhere:
                async with Client(target if isinstance(target, str) else program(target, log or nowhere)) as client:
                    self.opened.set_result(client)
                    await self.closing.wait()
        except Exception as error:  # of the SDK, its transports, or the server
            if not self.opened.done():
                self.opened.set_exception(EnvironmentFailed("error", f"cannot connect: {cause_of(error)}"))
        finally:
            self.closing.set()

    async def client(self) -> Any:
        return await asyncio.shield(self.opened)

    async def close(self) -> None:
        self.closing.set()
        await asyncio.shield(self.task)


def program(argv: Sequence[str], log: TextIO) -> Any:
    """Return the transport to a program that is a server."""
    from mcp import StdioServerParameters, stdio_client

    env = {name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES}
    arguments = ["-I", "-c", WATCHED, *argv]
    return stdio_client(StdioServerParameters(command=sys.executable, args=arguments, env=env, cwd=Path.cwd()), log)


async def connect(target: str | Sequence[str], delays: Sequence[float] = ()) -> Connection:
    """Connect to a server; try again after each delay, and raise EnvironmentFailed at last."""
    for delay in (*delays, None):
        connection = Connection(target)
        try:
            await connection.client()
            return connection
        except EnvironmentFailed:
            if delay is None:
                raise
            await asyncio.sleep(delay)
        except asyncio.CancelledError:
            connection.task.cancel()
            raise
    raise AssertionError


class Served:
    """Environment with the tools of a server. Each episode has its own connection, or all of a process share one."""

    target: ClassVar[str | Sequence[str]]
    shared: ClassVar[bool]
    opening: ClassVar[asyncio.Task[Connection] | None] = None
    """Task that opens, or has opened, the shared connection of this process."""

    async def start(self) -> None:
        kind, delays = type(self), CONNECT_DELAYS if isinstance(self.target, str) else ()
        if not self.shared:
            self._connection = await connect(self.target, delays)
            return
        if kind.opening is None or is_lost(kind.opening):
            kind.opening = asyncio.create_task(connect(self.target, delays))
        self._connection = await asyncio.shield(kind.opening)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return what the student reads; raise ToolError for an error of the tool."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        client = await self._connection.client()
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT) or self._connection.closing.is_set():
                raise self._lost(name, error) from None
            raise ToolError(str(error)) from None
        except Exception as error:
            raise self._lost(name, error) from None
        text = text_of(name, result)
        if result.is_error:
            raise ToolError(text)
        return text

    def _lost(self, name: str, error: BaseException) -> EnvironmentFailed:
        self._connection.closing.set()  # the next episode connects anew
        return EnvironmentFailed("error", f"the server was lost in a call of {name}: {cause_of(error)}")

    async def close(self) -> None:
        if not self.shared:
            await self._connection.close()


def is_lost(opening: asyncio.Task[Connection]) -> bool:
    return opening.done() and (opening.exception() is not None or opening.result().closing.is_set())


def text_of(name: str, result: Any) -> str:
    """Return the texts of a result; raise EnvironmentFailed for an image or a sound."""
    texts = list[str]()
    for part in result.content:
        found = getattr(part, "text", None) or getattr(getattr(part, "resource", None), "text", None)
        if found is None and part.type not in ("text", "resource_link"):
            raise EnvironmentFailed("error", f"the tool {name} returned {part.type}, and a student reads only text")
        texts.append(str(part.uri) if part.type == "resource_link" else found or "")
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def cause_of(error: BaseException) -> str:
    """Return the innermost of the errors that a task group collected, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__


def kind_of(spec: str) -> Kind:
    """Connect to the server that a name has after its prefix, and read its tools."""
    prefix, _, name = spec.partition(":")
    try:
        target: str | list[str] = name if re.match(r"https?://", name) else shlex.split(name)
    except ValueError as error:
        raise ConfigError(f"the command cannot be split into words: {error}") from None
    if not isinstance(target, str) and (not target or shutil.which(target[0]) is None):
        raise ConfigError(f"there is no program {(target or [''])[0]!r} here, or it cannot be run")
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            tools = asyncio.run(asyncio.wait_for(tools_of(target, log), LIST_TIMEOUT))
        except EnvironmentFailed as error:
            log.seek(0)
            last = (log.read().strip().splitlines() or [""])[-1]
            raise ConfigError(f"{error}{last and f' ({last})'}") from None
        except TimeoutError:
            raise ConfigError(f"the server does not list its tools within {LIST_TIMEOUT:g} s") from None
    if not tools:
        raise ConfigError("the server has no tools")
    made = type("Served", (Served,), {"target": target, "shared": prefix == "mcp_shared"})
    return Kind(spec, made, (), {tool.name: tool for tool in tools})


async def tools_of(target: str | Sequence[str], log: TextIO) -> list[ServedTool]:
    connection, found, cursor = Connection(target, log), list[ServedTool](), None
    try:
        client = await connection.client()
        while True:
            page = await client.list_tools(cursor=cursor)
            found += [ServedTool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor
            if not cursor:
                return found
    except EnvironmentFailed:
        raise
    except Exception as error:  # of the SDK or the server
        raise EnvironmentFailed("error", f"cannot list its tools: {cause_of(error)}") from None
    finally:
        await connection.close()
