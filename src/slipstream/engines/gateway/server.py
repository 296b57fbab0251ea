"""Sessions behind HTTP: a thin skin that knows who asks by the path, and lets nobody keep it from the others.

POST /sessions/ID/v1/chat/completions       messages in and out, streamed if asked for
POST /sessions/ID/inference/v1/generate     token ids in and out, with their log-probs
GET  /sessions/ID/v1/models
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import h11

from slipstream.engines.gateway import wire
from slipstream.engines.gateway.connection import Connection, Request, said
from slipstream.engines.gateway.sessions import Answer, Failed, Refused, Session
from slipstream.errors import ConfigError, first_line

STREAM = 10.0
"""Seconds after which a stream says that it still waits."""
CONNECTIONS = 4096
REMEMBERED = 100_000
"""Sessions that are closed, of which it is known that they were there."""

Other = Callable[[str, str, bytes], Coroutine[Any, Any, bytes]]
"""What else is answered: a method, a path and a body, by JSON. Refused if nothing is."""


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Server:
    def __init__(
        self,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        other: Other | None = None,
        say: Callable[[str], object] = tell,
        walled: bool = False,
    ) -> None:
        """`name`: of the model. The port is taken at once, and answered when it is started; `walled`: so is a socket
        for agents that have no network."""
        self.name, self.other, self.say = name, other, say
        self.sessions: dict[str, Session] = {}
        self.closed = deque[str](maxlen=REMEMBERED)
        self.gone = set[str]()
        self.imposed = set[str]()
        """What agents say of sampling, in vain, that a person was told of."""
        self.connections = set[asyncio.Task[None]]()
        try:
            self.socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"environment.gateway.listen: {host}:{port} cannot be had: {first_line(error)}") from None
        self.place = Path(tempfile.mkdtemp(prefix="slipstream-gateway-")) if walled else None
        self.servers: list[asyncio.Server] = []
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def started(self) -> None:
        """On the loop that runs; one that is over has left the port to it."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            for server in self.servers:
                server.close()
            self.loop, self.connections = loop, set()
            self.servers = [await asyncio.start_server(self._connected, sock=self.socket.dup(), backlog=1024)]
            if self.place is not None:
                self.servers.append(await asyncio.start_unix_server(self._connected, self.walled_at, backlog=1024))
                self.place.chmod(0o711)  # whoever an agent is; to be answered takes the name of a session
                Path(self.walled_at).chmod(0o666)

    @property
    def walled_at(self) -> str:
        return str(self.place / "socket") if self.place is not None else ""

    def open(self, session: Session) -> str:
        """The session's name, which nobody guesses."""
        name = secrets.token_urlsafe(24)
        self.sessions[name] = session
        return name

    def shut(self, name: str) -> None:
        """Whoever asks for it from now on is told that it was closed."""
        if (session := self.sessions.pop(name, None)) is None:
            return
        session.close()
        if len(self.closed) == REMEMBERED:
            self.gone.discard(self.closed[0])
        self.closed.append(name)
        self.gone.add(name)

    def base_url(self, name: str) -> str:
        return f"{self.url}/sessions/{name}/v1"

    def close(self) -> None:
        for name in list(self.sessions):
            self.shut(name)
        if self.loop is not None and not self.loop.is_closed():
            for task in self.connections:
                task.cancel()
        for server in self.servers:
            server.close()
        self.socket.close()
        if self.place is not None:
            shutil.rmtree(self.place, ignore_errors=True)

    # --- connections --------------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self.connections) >= CONNECTIONS:
            writer.close()
            return
        self.connections.add(task)
        try:
            await Connection(self.answer, reader, writer).served()
            writer.close()
        except (OSError, TimeoutError, h11.ProtocolError, asyncio.CancelledError):
            writer.transport.abort()  # whoever is at the other end has gone, or is too slow; nobody else is concerned
        finally:
            self.connections.discard(task)

    # --- what is answered ---------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> bytes | AsyncIterator[bytes]:
        """JSON, or a stream of events."""
        parts = request.path.partition("?")[0].strip("/").split("/")
        if parts[0] != "sessions" or len(parts) < 3:
            return await self._other(request)
        session, rest = self._session(parts[1]), "/".join(parts[2:])
        if rest in ROUTES and ROUTES[rest] != request.method:
            raise Refused(405, f"{request.method} is not served here: write {ROUTES[rest]}")
        digest = hashlib.blake2b(rest.encode() + b"\0" + request.body, digest_size=16).digest()
        match rest:
            case "v1/chat/completions":
                chat = wire.chat_of(request.body)
                self._told(chat.imposed)
                asked = session.answered(digest, lambda: session.chat(chat.messages, chat.tools, chat.most))
                return await self._streamed(chat, asked) if chat.stream else wire.completion(await asked, chat)
            case "inference/v1/generate":
                tokens = wire.tokens_of(request.body)
                self._told(tokens.imposed)
                return wire.generated(await session.answered(digest, lambda: session.generate(tokens.ids, tokens.most)))
            case "v1/models":
                return wire.models(self.name, session.room)
        return await self._other(request)

    def _session(self, name: str) -> Session:
        if (session := self.sessions.get(name)) is not None:
            return session
        if name in self.gone:
            raise Refused(410, "this session is closed", code="session_closed")
        raise Refused(404, "there is no such session", code="session_not_found")

    async def _other(self, request: Request) -> bytes:
        if self.other is None:
            raise Refused(404, f"nothing is served at {request.method} {request.path[:200]}")
        return await self.other(request.method, request.path, request.body)

    def _told(self, imposed: tuple[str, ...]) -> None:
        """Once, of each."""
        for name in set(imposed) - self.imposed:
            self.imposed.add(name)
            self.say(f"gateway: an agent asks for a {name} of its own, in vain: [sampler] says how the student draws")

    async def _streamed(self, chat: wire.Chat, asked: Coroutine[Any, Any, Answer]) -> AsyncIterator[bytes]:
        """What is refused, is so before a stream begins."""
        waiting = asyncio.ensure_future(asked)
        try:
            await asyncio.wait([waiting], timeout=STREAM)
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        if waiting.done():
            waiting.result()
        return self._stream(chat, waiting)

    async def _stream(self, chat: wire.Chat, waiting: asyncio.Future[Answer]) -> AsyncIterator[bytes]:
        try:
            while not waiting.done():
                yield wire.WAITING
                await asyncio.wait([waiting], timeout=STREAM)
            try:
                answer = waiting.result()
            except (Refused, Failed) as error:
                yield wire.event(wire.error(said(error)))
                yield wire.DONE
            else:
                for chunk in wire.chunks(answer, chat):
                    yield chunk
        finally:
            waiting.cancel()


ROUTES = {"v1/chat/completions": "POST", "inference/v1/generate": "POST", "v1/models": "GET"}
