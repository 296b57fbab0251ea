"""HTTP/1.1 with one client: requests, one after the other, none of which may be too long or too slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11

from slipstream.engines.gateway import wire
from slipstream.engines.gateway.sessions import Failed, Refused

BODY = 32 << 20
"""Most bytes of a request."""
HEAD = 64 << 10
"""Most bytes of its headers."""
ARRIVES = 60.0
"""Seconds in which a request must be here once it has begun, and an answer be taken."""
IDLE = 600.0
"""Seconds in which a connection may say nothing."""
LINGERS = 2.0
"""Seconds in which the rest of a request that was refused is thrown away."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes


Answers = Callable[[Request], Awaitable[bytes | AsyncIterator[bytes]]]
"""By JSON, or by a stream of events."""


class Connection:
    """Requests, one after the other, over one connection."""

    def __init__(self, answers: Answers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answers, self.reader, self.writer = answers, reader, writer
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD)

    async def served(self) -> None:
        while True:
            try:
                request = await self._request()
                if request is None:
                    return
                found = await self._answer(request)
            except Refused as refused:  # before it is all there
                await self._end(refused)
                return
            except h11.RemoteProtocolError as error:
                if self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await self._end(Refused(error.error_status_hint, "this is no HTTP request"))
                return
            if isinstance(found, Refused):
                await self._tell(found)
            elif isinstance(found, bytes):
                await self._send(200, [(b"content-type", b"application/json")], found)
            else:
                await self._stream(found)
            if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
                return
            self.http.start_next_cycle()

    async def _answer(self, request: Request) -> bytes | AsyncIterator[bytes] | Refused:
        try:
            return await self.answers(request)
        except (Refused, Failed) as error:
            return said(error)
        except Exception as error:  # a defect of ours, which ends this call, and no other
            asyncio.get_running_loop().call_exception_handler({"message": "gateway", "exception": error})
            return Refused(500, f"the gateway failed: {type(error).__name__}", code="gateway_failed")

    async def _request(self) -> Request | None:
        """None at the end."""
        clock = asyncio.get_running_loop().time
        body, head = bytearray(), None
        begun = bool(self.http.trailing_data[0])
        until = clock() + (ARRIVES if begun else IDLE)
        while True:
            event = self.http.next_event()
            if event is h11.NEED_DATA:
                if self.http.they_are_waiting_for_100_continue:
                    await self._write(self.http.send(h11.InformationalResponse(status_code=100, headers=[])))
                async with asyncio.timeout_at(until):
                    data = await self.reader.read(1 << 16)
                if not begun:
                    begun, until = True, clock() + ARRIVES
                self.http.receive_data(data)
            elif isinstance(event, h11.Request):
                head = event
                if any(name == b"content-length" and int(value) > BODY for name, value in head.headers):
                    raise _too_large()
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > BODY:
                    raise _too_large()
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return Request(head.method.decode("latin-1"), head.target.decode("latin-1"), bytes(body))
            else:  # ConnectionClosed, or PAUSED behind an upgrade
                return None

    async def _end(self, refused: Refused) -> None:
        """What is still on its way is read, and thrown away, for a little while: who is cut off while it speaks never
        hears the answer."""
        await self._tell(refused, close=True)
        self.writer.write_eof()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGERS):
                while await self.reader.read(1 << 16):
                    pass

    async def _tell(self, refused: Refused, *, close: bool = False) -> None:
        headers = [(b"content-type", b"application/json")] + [(b"connection", b"close")] * close
        await self._send(refused.status, headers, wire.dumped(wire.error(refused)))

    async def _send(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        headers.append((b"content-length", str(len(body)).encode()))
        parts: list[Any] = [h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()]
        await self._write(*(self.http.send(each) for each in parts))

    async def _stream(self, events: AsyncIterator[bytes]) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await self._write(self.http.send(h11.Response(status_code=200, headers=headers)))
        async for event in events:
            await self._write(self.http.send(h11.Data(data=event)))
        await self._write(self.http.send(h11.EndOfMessage()))

    async def _write(self, *parts: bytes | None) -> None:
        self.writer.write(b"".join(filter(None, parts)))
        with suppress(ConnectionError):
            async with asyncio.timeout(ARRIVES):
                await self.writer.drain()


def _too_large() -> Refused:
    return Refused(413, f"the body has more than {BODY >> 20} MiB", code="request_too_large")


def said(error: Refused | Failed) -> Refused:
    if isinstance(error, Refused):
        return error
    return Refused(500, "the sampler failed; the run says why", code="sampler_failed")
