"""HTTP layer below the gateway's routes: access checks, limits of bodies, lost clients, and the uvicorn server."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import h11
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.environments.gateway import chat_json as wire
from slipstream.environments.gateway.sessions import Failed, Refused

HEAD = 64 << 10
"""Maximum bytes of a request's headers."""
ARRIVES = 60.0
"""Seconds in which the body of a request must arrive."""
IDLE = 600
"""Maximum seconds between two requests of a connection."""
LINGERS = 2.0
"""Seconds in which the rest of a too large request is discarded; if cut off, a client would not read the answer."""
SOON = 0.05
"""Age of a request in seconds at which a task starts to watch whether the client disconnects."""
CONNECTIONS = 4096
"""Maximum connections at a time. A further connection closes an idle connection, or itself if none is idle."""
OPTIONS: dict[str, Any] = {
    "log_config": None,
    "log_level": "critical",
    "access_log": False,
    "server_header": False,
    "date_header": False,
    "proxy_headers": False,
    "timeout_keep_alive": IDLE,
    "h11_max_incomplete_event_size": HEAD,
}
HEADERS = {408: {"connection": "close"}, 413: {"connection": "close"}, 503: {"retry-after": "1"}}
"""Further headers of answers by status."""
HERE = re.compile(r"(127(\.\d{1,3}){3}|localhost|\[::1\])(:\d{1,5})?")
"""Host headers that name this machine."""
T = TypeVar("T")


def guarded(app: ASGIApp) -> ASGIApp:
    """Wrap an app: refuse requests from browser pages, and requests whose Host header names another machine."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        host, why = headers.get(b"host", b"").decode("latin-1"), ""
        if not HERE.fullmatch(host):
            why = f"the Host header is {host[:100]!r}: write 127.0.0.1 or localhost"
        elif b"origin" in headers:
            why = "the request has an Origin header: pages in a browser are not served"
        await (error_response(Refused(403, why, code="forbidden")) if why else app)(scope, receive, send)

    return guard


async def read(request: Request, most: int, too_large: Callable[[str], Refused]) -> bytes:
    """Return the body of a request, or refuse it while it arrives if it has more bytes than `most`."""
    body, size, large = bytearray(), int(request.headers.get("content-length", 0)), False
    with suppress(TimeoutError):
        async with asyncio.timeout(ARRIVES) as deadline:
            async for part in request.stream():
                size = max(size, len(body) + len(part))
                if size <= most:
                    body += part
                elif not large:
                    large = True
                    body.clear()
                    deadline.reschedule(asyncio.get_running_loop().time() + LINGERS)
            if not large:
                return bytes(body)
    late = f"the body did not arrive in {ARRIVES:g} s"
    raise too_large(f"the body has more than {most} bytes") if large else Refused(408, late, code="too_slow")


def named(request: Request, body: bytes) -> tuple[bytes, bool]:
    """Return the digest of a request, and true if its client marks the request as a retry.

    OpenAI's clients count retries in a header. A repeated idempotency key also marks a retry.
    """
    path, key = request.url.path, request.headers.get("idempotency-key", "")
    again = bool(key) or bool(request.headers.get("x-stainless-retry-count", "").strip("0 "))
    return hashlib.blake2b(b"\0".join((path.encode(), key.encode(), body)), digest_size=16).digest(), again


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Wait for the work and return its result; cancel the work if the client disconnects."""
    here = asyncio.current_task()
    assert here is not None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        here.cancel()

    watching = list[asyncio.Task[None]]()
    loop = asyncio.get_running_loop()
    begins = loop.call_later(SOON, lambda: watching.append(loop.create_task(watch())))
    try:
        return await work
    finally:
        begins.cancel()
        for task in watching:
            task.cancel()


def as_json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, HEADERS.get(status), media_type="application/json")


def error_response(error: Exception) -> Response:
    found = as_refused(error)
    return as_json(wire.dumped(wire.error(found)), found.status)


def as_refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, Failed):
        return Refused(500, "the sampler failed; the output of the run shows why", code="sampler_failed")
    # a defect of the gateway fails this request only
    asyncio.get_running_loop().call_exception_handler({"message": "gateway", "exception": error})
    return Refused(500, f"the gateway failed: {type(error).__name__}", code="gateway_failed")


class Bounded(H11Protocol):
    """Connection of uvicorn that keeps the number of connections within CONNECTIONS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            known: Any = self.connections
            idle = (each for each in known if each is not self and each.conn.their_state is h11.IDLE)
            next(idle, self).transport.abort()


async def listening(app: ASGIApp, sockets: Sequence[socket.socket]) -> uvicorn.Server:
    """Start to serve these sockets on the running event loop, without uvicorn's signal handlers."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await guard(scope, receive, send)
        finally:
            if aborting.cancelling():  # the loop ends; uvicorn would answer a cancelled request with status 500
                abort(found)

    guard = guarded(app)
    config = uvicorn.Config(serve, http=Bounded, ws="none", lifespan="off", **OPTIONS)
    config.load()
    found = uvicorn.Server(config)
    found.lifespan = config.lifespan_class(config)
    aborting = asyncio.create_task(abort_with_loop(found))
    await found.startup(list(sockets))
    found.server_state.tasks.add(aborting)
    return found


async def abort_with_loop(server: uvicorn.Server) -> None:
    """Close all connections when this task is cancelled; the event loop cancels it at the latest when the loop ends."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        abort(server)


def abort(server: uvicorn.Server) -> None:
    for connection in list(server.server_state.connections):
        connection.transport.abort()


def end(server: uvicorn.Server) -> None:
    """Stop a server at once; open requests get no answer."""
    for listener in server.servers:
        listener.close()
    if not server.servers[0].get_loop().is_closed():
        for task in server.server_state.tasks:
            task.cancel()
        abort(server)
