"""HTTP server of the agents' sessions. The path of a request names its session, and sessions do not share state.

POST /sessions/ID/v1/chat/completions       messages in and out, optionally streamed
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

from slipstream.environments.gateway import chat_json as wire
from slipstream.environments.gateway import web
from slipstream.environments.gateway.external_agents import ExternalAgents
from slipstream.environments.gateway.sessions import Answer, Failed, Refused, Session, beside, over
from slipstream.environments.gateway.web import as_json, while_there
from slipstream.errors import ConfigError, first_line

STREAM = 10.0
"""Seconds between keep-alive lines of a stream that waits for its answer."""
BODY, ROUND = 32 << 20, 1 << 20
"""Maximum bytes of a request, and of the parts of a request that are not the conversation."""
REMEMBERED = 10_000
"""Number of closed sessions that are remembered, to answer 410 and not 404."""


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Server:
    def __init__(
        self,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        guests: ExternalAgents | None = None,
        say: Callable[[str], object] = tell,
        walled: bool = False,
    ) -> None:
        """Bind the port that `started` will serve; if `walled`, also serve a socket for agents without a network."""
        self.name, self.guests, self.say = name, guests, say
        self.sessions: dict[str, Session] = {}
        self.closed = deque[str](maxlen=REMEMBERED)
        self.imposed = set[str]()
        """Sampling parameters of agents that are ignored and were already reported."""
        try:
            self.socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, OverflowError) as error:
            why = first_line(error)
            raise ConfigError(f"environment.gateway.listen: cannot listen at {host}:{port}: {why}") from None
        # connections inherit the option; uvicorn writes head and body of an answer separately
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.place = Path(tempfile.mkdtemp(prefix="slipstream-gateway-")) if walled else None
        self.listening: uvicorn.Server | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def started(self) -> None:
        """Serve on the running event loop; if an earlier loop served, stop there first."""
        if self.loop is asyncio.get_running_loop():
            return
        self._end()
        self.loop, sockets = asyncio.get_running_loop(), [self.socket.dup()]
        if self.place is not None:
            sockets.append(socket.socket(socket.AF_UNIX))
            Path(self.walled_at).unlink(missing_ok=True)
            sockets[1].bind(self.walled_at)
            self.place.chmod(0o711)  # any user may connect: a request needs the secret name of a session
            Path(self.walled_at).chmod(0o666)
        self.listening = await web.listening(self.app(), sockets)

    @property
    def walled_at(self) -> str:
        return str(self.place / "socket") if self.place is not None else ""

    def open(self, session: Session) -> str:
        name = secrets.token_urlsafe(24)
        self.sessions[name] = session
        return name

    def shut(self, name: str) -> None:
        """Close a session; later requests for it get status 410."""
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

    # --- requests -----------------------------------------------------------------------------------------------------

    def app(self) -> Starlette:
        posts = {"/v1/chat/completions": self._chat, "/inference/v1/generate": self._generate}
        routes = [Route(f"/sessions/{{session}}{path}", handle, methods=["POST"]) for path, handle in posts.items()]
        routes.append(Route("/sessions/{session}/v1/models", self._models))
        if self.guests is not None:
            routes.append(Route("/sessions", self._next, methods=["POST"]))
            routes.append(Route("/sessions/{session}/close", self._close, methods=["POST"]))
        served = "; ".join(f"{'GET' if each.endpoint == self._models else 'POST'} {each.path}" for each in routes)

        async def answer_error(request: Request, error: Exception) -> Response:
            if isinstance(error, HTTPException):
                here = f"{request.method} {request.url.path[:200]}"
                error = Refused(error.status_code, f"nothing is served at {here}; the routes are {served}")
            return web.error_response(error) if not isinstance(error, ClientDisconnect) else Response()

        kinds: tuple[type[Exception], ...] = (Refused, Failed, HTTPException, ClientDisconnect, Exception)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, answer_error))

    async def _chat(self, request: Request) -> Response:
        session, body, chat = await self._parsed(request, wire.chat_of)
        answer = session.answered(*web.named(request, body), lambda: session.chat(chat.messages, chat.tools, chat.most))
        if not chat.stream:
            return as_json(wire.completion(await while_there(request, answer), chat))
        waiting = asyncio.ensure_future(answer)
        try:  # refuse a request before its stream begins, to send an error status
            await while_there(request, asyncio.wait([waiting], timeout=STREAM))
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        if waiting.done():
            waiting.result()
        headers = {"cache-control": "no-cache"}
        return StreamingResponse(_events(chat, waiting), media_type="text/event-stream", headers=headers)

    async def _generate(self, request: Request) -> Response:
        session, body, tokens = await self._parsed(request, wire.tokens_of)
        wire.check_stops(tokens.stops, session.renderer.stop_ids)
        answer = session.answered(*web.named(request, body), lambda: session.generate(tokens.ids, tokens.most))
        return as_json(wire.generated(await while_there(request, answer)))

    async def _parsed(self, request: Request, parse: Callable[[bytes], Any]) -> tuple[Session, bytes, Any]:
        session = self._session(request)
        most = min(BODY, ROUND + 6 * session.max_bytes)  # JSON may need six bytes for one byte of text
        body = await web.read(request, most, partial(over, session, status=413))
        found = await beside(len(body), parse, body)
        for name in set(found.imposed) - self.imposed:  # reported once for each parameter
            self.imposed.add(name)
            self.say(f"gateway: an agent sends {name}, which is ignored: the [sampler] section sets how to sample")
        return session, body, found

    async def _models(self, request: Request) -> Response:
        return as_json(wire.models(self.name, self._session(request).max_tokens))

    async def _next(self, request: Request) -> Response:
        return as_json(await while_there(request, self._guests(request).next()))

    async def _close(self, request: Request) -> Response:
        guests = self._guests(request)
        body = await web.read(request, ROUND, partial(Refused, 413))
        return as_json(guests.close_session(request.path_params["session"], body))

    def _guests(self, request: Request) -> ExternalAgents:
        assert self.guests is not None
        self.guests.check(request.headers.get("authorization", ""))
        return self.guests

    def _session(self, request: Request) -> Session:
        name = request.path_params["session"]
        if name in self.closed:
            raise Refused(410, "this session is closed", code="session_closed")
        if name not in self.sessions:
            raise Refused(404, "there is no such session", code="session_not_found")
        return self.sessions[name]


async def _events(chat: wire.Chat, waiting: asyncio.Future[Answer]) -> AsyncIterator[bytes]:
    try:
        while not waiting.done():
            yield wire.WAITING
            await asyncio.wait([waiting], timeout=STREAM)
        for chunk in wire.chunks(waiting.result(), chat):
            yield chunk
    except (Refused, Failed) as error:
        yield wire.event(wire.error(web.as_refused(error)))
        yield wire.DONE
    finally:
        waiting.cancel()
