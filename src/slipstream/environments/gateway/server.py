"""HTTP server of the agents' sessions. The path of a request names its session, and sessions do not share state.

POST /sessions/ID/v1/chat/completions       messages in and out, optionally streamed
POST /sessions/ID/v1/responses              the same in OpenAI's newer API
POST /sessions/ID/v1/messages               the same in Anthropic's API
POST /sessions/ID/inference/v1/generate     token ids in and out, with their log-probs
GET  /sessions/ID/v1/models
"""

import asyncio
import secrets
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from slipstream.environments.gateway import chat_json as wire
from slipstream.environments.gateway import web
from slipstream.environments.gateway.dialects import DIALECTS, Dialect
from slipstream.environments.gateway.external_agents import ExternalAgents
from slipstream.environments.gateway.sessions import (
    Answer,
    Failed,
    Refused,
    Session,
    error_of,
    in_parser_thread,
    limit_refusal,
)
from slipstream.environments.gateway.web import Request, Response, while_there
from slipstream.errors import ConfigError, first_line
from slipstream.processes import garbage_collection
from slipstream.run_dir.temporary import TemporaryDirectory

KEEP_ALIVE_INTERVAL = 10.0
"""Seconds between keep-alive lines of a stream that waits for its answer."""
MAX_BODY, MAX_OVERHEAD = 32 << 20, 1 << 20
"""Maximum bytes of a request, and of the parts of a request that are not the conversation."""
SERVER_COLLECTIONS = (2_000, 5, 10_000)
"""Thresholds of garbage collection while a server runs. A full collection would stop all calls for 0.3 s."""
MAX_REMEMBERED = 10_000
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
        """Bind the port that `start` will serve; if `walled`, also serve a socket for agents without a network."""
        self.name, self.guests, self.say = name, guests, say
        self.sessions: dict[str, Session] = {}
        self.closed = deque[str](maxlen=MAX_REMEMBERED)
        self.imposed = set[str]()
        """Sampling parameters of agents that are ignored and were already reported."""
        try:
            self.socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, OverflowError) as error:
            why = first_line(error)
            raise ConfigError(f"environment.gateway.listen: cannot listen at {host}:{port}: {why}") from None
        # connections inherit the option; uvicorn writes head and body of an answer separately
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.made = TemporaryDirectory("slipstream-gateway-") if walled else None
        self.listening: uvicorn.Server | None = None
        self.collections = ExitStack()
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Serve on the running event loop; if an earlier loop served, stop there first."""
        if self.loop is asyncio.get_running_loop():
            return
        self._end()
        self.collections.enter_context(garbage_collection(*SERVER_COLLECTIONS))
        self.loop, sockets = asyncio.get_running_loop(), [self.socket.dup()]
        if self.made is not None:
            sockets.append(socket.socket(socket.AF_UNIX))
            Path(self.walled_at).unlink(missing_ok=True)
            sockets[1].bind(self.walled_at)
            self.made.path.chmod(0o711)  # any user may connect: a request needs the secret name of a session
            Path(self.walled_at).chmod(0o666)
        self.listening = await web.listening(self.app(), sockets)

    @property
    def walled_at(self) -> str:
        return str(self.made.path / "socket") if self.made is not None else ""

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
        if self.made is not None:
            self.made.close()

    def _end(self) -> None:
        self.collections.close()
        if self.listening is not None:
            web.end(self.listening)

    # --- requests -----------------------------------------------------------------------------------------------------

    def app(self) -> web.App:
        """Return the routes as an app. The second part of a path names a session."""
        routes: dict[tuple[str, str], Callable[[Request, str], Awaitable[Response]]] = {
            **{
                ("POST", f"/sessions/{{session}}/v1/{path}"): partial(self._chat, dialect)
                for path, dialect in DIALECTS.items()
            },
            ("POST", "/sessions/{session}/inference/v1/generate"): self._generate,
            ("GET", "/sessions/{session}/v1/models"): self._models,
        }
        if self.guests is not None:
            routes["POST", "/sessions"] = self._next
            routes["POST", "/sessions/{session}/close"] = self._close
        served, paths = "; ".join(map(" ".join, routes)), {path for _, path in routes}

        async def answer(request: Request) -> Response:
            match request.path.split("/", 3):
                case ["", "sessions", name, rest]:
                    path = f"/sessions/{{session}}/{rest}"
                case _:
                    name, path = "", request.path
            handle = routes.get((request.method, path))
            if handle is None:
                here = f"{request.method} {request.path[:200]}"
                status = 405 if path in paths else 404
                raise Refused(status, f"nothing is served at {here}; the routes are {served}")
            return await handle(request, name)

        return web.app_of(answer)

    async def _chat(self, dialect: Dialect, request: Request, name: str) -> Response:
        session = self._session(name)
        body, chat = await self._parse(request, session, lambda body: dialect.parse(body, session.known))
        session.known = chat.known
        answer = session.answer_once(
            *web.request_digest(request, body), lambda: session.chat(chat.messages, chat.tools, chat.most, chat.stops)
        )
        if not chat.stream:
            return Response(200, dialect.completion(await while_there(request, answer), chat))
        waiting = asyncio.ensure_future(answer)
        waiting.add_done_callback(error_of)  # a stream may be cut off before it reads the error
        try:  # refuse a request before its stream begins, to send an error status
            await while_there(request, asyncio.wait([waiting], timeout=KEEP_ALIVE_INTERVAL))
        except asyncio.CancelledError:
            waiting.cancel()
            raise
        if waiting.done():
            waiting.result()
        return Response(200, _events(dialect, chat, waiting))

    async def _generate(self, request: Request, name: str) -> Response:
        session = self._session(name)
        body, tokens = await self._parse(request, session, wire.tokens_of)
        wire.check_stops(tokens.stops, session.renderer.stop_ids)
        answer = session.answer_once(
            *web.request_digest(request, body), lambda: session.generate(tokens.ids, tokens.most)
        )
        return Response(200, wire.generation(await while_there(request, answer)))

    async def _parse(self, request: Request, session: Session, parse: Callable[[bytes], Any]) -> tuple[bytes, Any]:
        most = min(MAX_BODY, MAX_OVERHEAD + 6 * session.max_bytes)  # JSON may need six bytes for one byte of text
        body = await web.read(request, most, partial(limit_refusal, session, status=413))
        found: Any = await in_parser_thread(len(body), parse, body)
        for parameter in set(found.imposed) - self.imposed:  # reported once for each parameter
            self.imposed.add(parameter)
            self.say(f"gateway: an agent sends {parameter}, which is ignored: {wire.IGNORED[parameter]}")
        return body, found

    async def _models(self, request: Request, name: str) -> Response:
        return Response(200, wire.models(self.name, self._session(name).max_tokens))

    async def _next(self, request: Request, _: str) -> Response:
        return Response(200, await while_there(request, self._guests(request).next()))

    async def _close(self, request: Request, name: str) -> Response:
        guests = self._guests(request)
        body = await web.read(request, MAX_OVERHEAD, partial(Refused, 413))
        return Response(200, guests.close_session(name, body))

    def _guests(self, request: Request) -> ExternalAgents:
        assert self.guests is not None
        self.guests.check(request.header(b"authorization"))
        return self.guests

    def _session(self, name: str) -> Session:
        if name in self.closed:
            raise Refused(410, "this session is closed", code="session_closed")
        if name not in self.sessions:
            raise Refused(404, "there is no such session", code="session_not_found")
        return self.sessions[name]


async def _events(dialect: Dialect, chat: wire.Chat, waiting: asyncio.Future[Answer]) -> AsyncIterator[bytes]:
    try:
        while not waiting.done():
            yield dialect.keep_alive
            await asyncio.wait([waiting], timeout=KEEP_ALIVE_INTERVAL)
        for chunk in dialect.chunks(waiting.result(), chat):
            yield chunk
    except (Refused, Failed) as error:
        yield dialect.failure(wire.error(web.as_refused(error)))
    finally:
        waiting.cancel()
