"""HTTP layer below the gateway's routes: access checks, limits of bodies, lost clients, and the uvicorn server."""

import asyncio
import hashlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from slipstream.environments.gateway import chat_json as wire
from slipstream.environments.gateway.sessions import Failed, Refused

MAX_HEAD = 64 << 10
"""Maximum bytes of a request's headers."""
BODY_TIMEOUT = 60.0
"""Seconds in which the body of a request must arrive."""
KEEP_ALIVE = 600
"""Maximum seconds between two requests of a connection."""
DISCARD_TIME = 2.0
"""Seconds in which the rest of a too large request is discarded; if cut off, a client would not read the answer."""
MAX_CONNECTIONS = 4096
"""Maximum connections at a time. A further one closes the oldest that waits for a request, or itself if none does."""
UVICORN_OPTIONS: dict[str, Any] = {
    "log_config": None,
    "log_level": "critical",
    "access_log": False,
    "server_header": False,
    "date_header": False,
    "proxy_headers": False,
    "timeout_keep_alive": KEEP_ALIVE,
    "h11_max_incomplete_event_size": MAX_HEAD,
}
HEADERS_BY_STATUS = {408: [(b"connection", b"close")], 413: [(b"connection", b"close")], 503: [(b"retry-after", b"1")]}
"""Further headers of answers by status."""
CONNECTION_NUMBERS = count()
LOCAL_HOST = re.compile(r"(127(\.\d{1,3}){3}|localhost|\[::1\])(:\d{1,5})?")
"""Host headers that name this machine."""
T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
"""ASGI application, which uvicorn calls once for each request."""


class Request:
    def __init__(self, scope: Any, receive: Receive) -> None:
        self.method, self.path, self.receive = str(scope["method"]), str(scope["path"]), receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes | AsyncIterator[bytes]  # JSON, or a stream of events

    async def send(self, request: Request, send: Send) -> None:
        """Send this response; if the client disconnects from a stream, end the stream."""
        if isinstance(self.body, bytes):
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
            headers += HEADERS_BY_STATUS.get(self.status, [])
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            await send({"type": "http.response.body", "body": self.body})
        else:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            await while_there(request, _stream(self.body, send))


async def _stream(parts: AsyncIterator[bytes], send: Send) -> None:
    async for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def app_of(answer: Callable[[Request], Awaitable[Response]]) -> App:
    """Return an app that answers requests, with an error response for each error.

    The app refuses requests from browser pages, and requests whose Host header names another machine.
    """

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            _check_origin(request)
            response = await answer(request)
        except Exception as error:
            response = error_response(error)
        await response.send(request, send)

    return app


def _check_origin(request: Request) -> None:
    host = request.header(b"host")
    if not LOCAL_HOST.fullmatch(host):
        raise Refused(403, f"the Host header is {host[:100]!r}: write 127.0.0.1 or localhost", code="forbidden")
    if b"origin" in request.headers:
        raise Refused(403, "the request has an Origin header: pages in a browser are not served", code="forbidden")


async def read(request: Request, most: int, too_large: Callable[[str], Refused]) -> bytes:
    """Return the body of a request, or refuse it while it arrives if it has more bytes than `most`."""
    body, size, large, more = bytearray(), int(request.header(b"content-length") or 0), False, True
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_TIMEOUT) as deadline:
            while more:
                event = await request.receive()
                if event["type"] == "http.disconnect":
                    raise Refused(400, "the client disconnected")  # nobody reads this answer
                part, more = event.get("body", b""), event.get("more_body", False)
                size = max(size, len(body) + len(part))
                if size <= most:
                    body += part
                elif not large:
                    large = True
                    body.clear()
                    deadline.reschedule(asyncio.get_running_loop().time() + DISCARD_TIME)
            if not large:
                return bytes(body)
    late = f"the body did not arrive in {BODY_TIMEOUT:g} s"
    raise too_large(f"the body has more than {most} bytes") if large else Refused(408, late, code="too_slow")


def request_digest(request: Request, body: bytes) -> tuple[bytes, bool]:
    """Return the digest of a request, and true if its client marks the request as a retry.

    OpenAI's clients count retries in a header. A repeated idempotency key also marks a retry.
    """
    key = request.headers.get(b"idempotency-key", b"")
    again = bool(key) or bool(request.header(b"x-stainless-retry-count").strip("0 "))
    return hashlib.blake2b(b"\0".join((request.path.encode(), key, body)), digest_size=16).digest(), again


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Wait for the work and return its result; cancel the work if the client disconnects."""
    here = asyncio.current_task()
    assert here is not None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        here.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    finally:
        watching.cancel()


def error_response(error: Exception) -> Response:
    found = as_refused(error)
    return Response(found.status, wire.dump_json(wire.error(found)))


def as_refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, Failed):
        return Refused(500, "the sampler failed; the output of the run shows why", code="sampler_failed")
    # a defect of the gateway fails this request only
    asyncio.get_running_loop().call_exception_handler({"message": "gateway", "exception": error})
    return Refused(500, f"the gateway failed: {type(error).__name__}", code="gateway_failed")


class Bounded(H11Protocol):
    """Connection of uvicorn that keeps the number of connections within MAX_CONNECTIONS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.number = next(CONNECTION_NUMBERS)
        if len(self.connections) > MAX_CONNECTIONS:
            known: Any = self.connections
            idle = [each for each in known if each is not self and each.conn.their_state is h11.IDLE]
            # those without any request yet may be about to send it, so they go last
            closing = min(idle, key=lambda each: (each.cycle is None, each.number), default=self)
            known.discard(closing)  # an aborted connection would leave the set only later
            closing.transport.abort()


async def listening(app: App, sockets: Sequence[socket.socket]) -> uvicorn.Server:
    """Start to serve these sockets on the running event loop, without uvicorn's signal handlers."""

    async def serve(scope: Any, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            if aborting.cancelling():  # the loop ends; uvicorn would answer a cancelled request with status 500
                abort(found)

    config = uvicorn.Config(serve, http=Bounded, ws="none", lifespan="off", **UVICORN_OPTIONS)
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
