"""Sessions behind HTTP: who asks is known by the path, and keeps nobody from the others.

POST /sessions/ID/v1/chat/completions       messages in and out, streamed if asked for
POST /sessions/ID/inference/v1/generate     token ids in and out, with their log-probs
GET  /sessions/ID/v1/models
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from slipstream.environments.gateway import web, wire
from slipstream.environments.gateway.guests import Guests
from slipstream.environments.gateway.sessions import Answer, Failed, Refused, Session, beside, over
from slipstream.environments.gateway.web import as_json, while_there
from slipstream.errors import ConfigError, first_line

STREAM = 10.0
"""Seconds after which a stream says that it still waits."""
BODY, ROUND = 32 << 20, 1 << 20
"""Most bytes of a request, and of what is in it beside its conversation."""
REMEMBERED = 10_000
"""Sessions that are closed, of which it is known that they were there."""


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Server:
    def __init__(
        self,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        guests: Guests | None = None,
        say: Callable[[str], object] = tell,
        walled: bool = False,
    ) -> None:
        """`name`: of the model. The port is taken at once, and answered when it is started; `walled`: so is a socket
        for agents that have no network."""
        self.name, self.guests, self.say = name, guests, say
        self.sessions: dict[str, Session] = {}
        self.closed = deque[str](maxlen=REMEMBERED)
        self.imposed = set[str]()
        """What agents say of sampling, in vain, that a person was told of."""
        try:
            self.socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"environment.gateway.listen: {host}:{port} cannot be had: {first_line(error)}") from None
        # connections inherit it; uvicorn writes the head and the body of an answer apart
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.place = Path(tempfile.mkdtemp(prefix="slipstream-gateway-")) if walled else None
        self.listening: uvicorn.Server | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def started(self) -> None:
        """On the loop that runs; one that is over has left the port to it."""
        if self.loop is asyncio.get_running_loop():
            return
        self._end()
        self.loop, sockets = asyncio.get_running_loop(), [self.socket.dup()]
        if self.place is not None:
            sockets.append(socket.socket(socket.AF_UNIX))
            Path(self.walled_at).unlink(missing_ok=True)
            sockets[1].bind(self.walled_at)
            self.place.chmod(0o711)  # whoever an agent is; to be answered takes the name of a session
            Path(self.walled_at).chmod(0o666)
        self.listening = await web.listening(self.app(), sockets)

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
        if (session := self.sessions.pop(name, None)) is not None:
            session.close()
            self.closed.append(name)

    def base_url(self, name: str) -> str:
        return f"{self.url}/sessions/{name}/v1"

    def close(self) -> None:
        for name in list(self.sessions):
            self.shut(name)
        self._end()
        self.socket.close()
        if self.place is not None:
            shutil.rmtree(self.place, ignore_errors=True)

    def _end(self) -> None:
        if self.listening is not None:
            web.end(self.listening)

    # --- what is answered ---------------------------------------------------------------------------------------------

    def app(self) -> Starlette:
        at, posts = "/sessions/{session}", ["POST"]
        routes = [
            Route(f"{at}/v1/chat/completions", self._chat, methods=posts),
            Route(f"{at}/inference/v1/generate", self._generate, methods=posts),
            Route(f"{at}/v1/models", self._models),
        ]
        if self.guests is not None:
            routes += [
                Route("/sessions", self._next, methods=posts),
                Route(f"{at}/close", self._close, methods=posts),
            ]
        served = "; ".join(f"{'GET' if each.endpoint == self._models else 'POST'} {each.path}" for each in routes)

        async def told(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                here = f"{request.method} {request.url.path[:200]}"
                error = Refused(error.status_code, f"nothing is served at {here}; there is {served}")
            return web.told(error) if not isinstance(error, ClientDisconnect) else Response()  # which nobody reads

        kinds: tuple[type[Exception], ...] = (Refused, Failed, HTTPException, ClientDisconnect, Exception)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, told))

    async def _chat(self, request: Request) -> Response:
        session, body, chat = await self._asked(request, wire.chat_of)
        asked = session.answered(*web.named(request, body), lambda: session.chat(chat.messages, chat.tools, chat.most))
        if not chat.stream:
            return as_json(wire.completion(await while_there(request, asked), chat))
        waiting = asyncio.ensure_future(asked)
        try:  # what is refused, is so before a stream begins
            await while_there(request, asyncio.wait([waiting], timeout=STREAM))
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        if waiting.done():
            waiting.result()
        headers = {"cache-control": "no-cache"}
        return StreamingResponse(_events(chat, waiting), media_type="text/event-stream", headers=headers)

    async def _generate(self, request: Request) -> Response:
        session, body, tokens = await self._asked(request, wire.tokens_of)
        wire.check_stops(tokens.stops, session.renderer.stop_ids)
        asked = session.answered(*web.named(request, body), lambda: session.generate(tokens.ids, tokens.most))
        return as_json(wire.generated(await while_there(request, asked)))

    async def _asked(self, request: Request, parse: Callable[[bytes], Any]) -> tuple[Session, bytes, Any]:
        """Return the session of a request, its body, and what that says."""
        session = self._session(request)
        most = min(BODY, ROUND + 6 * session.holds)  # JSON may need six bytes for one
        body = await web.read(request, most, partial(over, session, status=413))
        found = await beside(len(body), parse, body)
        for name in set(found.imposed) - self.imposed:  # once, of each
            self.imposed.add(name)
            self.say(f"gateway: an agent asks for a {name} of its own, in vain: [sampler] says how the student draws")
        return session, body, found

    async def _models(self, request: Request) -> Response:
        return as_json(wire.models(self.name, self._session(request).room))

    async def _next(self, request: Request) -> Response:
        return as_json(await while_there(request, self._guests(request).next()))

    async def _close(self, request: Request) -> Response:
        guests, too_large = self._guests(request), partial(Refused, 413)
        body = await web.read(request, ROUND, too_large)
        return as_json(guests.close_session(request.path_params["session"], body))

    def _guests(self, request: Request) -> Guests:
        assert self.guests is not None
        self.guests.check(request.headers.get("authorization", ""))
        return self.guests

    def _session(self, request: Request) -> Session:
        name = request.path_params["session"]
        if (session := self.sessions.get(name)) is not None:
            return session
        if name in self.closed:
            raise Refused(410, "this session is closed", code="session_closed")
        raise Refused(404, "there is no such session", code="session_not_found")


async def _events(chat: wire.Chat, waiting: asyncio.Future[Answer]) -> AsyncIterator[bytes]:
    try:
        while not waiting.done():
            yield wire.WAITING
            await asyncio.wait([waiting], timeout=STREAM)
        try:
            answer = waiting.result()
        except (Refused, Failed) as error:
            yield wire.event(wire.error(web.said(error)))
            yield wire.DONE
        else:
            for chunk in wire.chunks(answer, chat):
                yield chunk
    finally:
        waiting.cancel()
