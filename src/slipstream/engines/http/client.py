"""One endpoint: pooled connections, so many requests at a time, short retries, and no secret in any message.

What is over in a second or two is tried again here: a cut connection, a 5xx, a 429, after as long as the server asks.
All else, and whatever lasts, is raised as an EndpointError: the pipeline tries whole groups again, with longer pauses.

A server may be anything: of an answer no more is read than the question can have asked for, as it comes, unpacked
already; from the first try to connect to its last byte it has one deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx2
from pydantic import SecretStr

import slipstream
from slipstream.engines.http.breaker import Breaker, Unavailable
from slipstream.errors import ConfigError, EndpointError, first_line

PAUSES = (0.25, 1.0, 4.0)
"""Seconds, more or less, before a request is tried again."""
CONNECT = 10.0
"""Seconds in which a connection must be accepted."""
IDLE = 4.0
"""Seconds for which an idle connection is kept: servers close theirs after 5, and not always in time to say so."""
SHOWN = 200
"""Characters of an answer that are shown."""
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
"""What OpenSSL calls it when the other side speaks plain HTTP."""
SPARE = 1 << 20
"""Bytes that an answer may have beside what was asked for: lists of models are long, too."""


@dataclass(frozen=True)
class Endpoint:
    """Where a teacher is, and how it may be asked."""

    teacher: str
    """Its name in the config."""
    url: str
    model: str
    """Its name there."""
    key: SecretStr | None = None
    concurrency: int = 32
    timeout: float = 120.0

    @property
    def where(self) -> str:
        return f"teacher {self.teacher} at {self.url}"


TAKEN: dict[str, str] = {}
"""What environment variables held that are no longer there."""


def key_from_environment(field: str, variable: str | None) -> SecretStr | None:
    """The key in an environment variable that a config names.

    It is taken from there: no process that is started later inherits it. Who calls the endpoint is handed the key.
    """
    if variable is None:
        return None
    if variable in os.environ:
        TAKEN[variable] = os.environ.pop(variable)
    key = TAKEN.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{field} = {variable!r}: this environment variable is not set: export it, or drop {field}")
    if not re.fullmatch(r"[\x21-\x7e]+", key):  # HTTP libraries repeat what they refuse
        raise ConfigError(f"{field} = {variable!r}: what this environment variable holds cannot be a key")
    return SecretStr(key)


class Client:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.where = endpoint, endpoint.where
        self.loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None, *, expected: int = 0) -> Any:
        """What the endpoint answers, from JSON of so many bytes, and SPARE more; raises EndpointError."""
        await self._attach()
        for pause in (*PAUSES, None):
            try:
                async with self.breaker.passage():
                    content = await self._once(method, path, body, SPARE + expected)
                break
            except Unavailable as error:
                if pause is None or not error.again or self.breaker.open:
                    raise EndpointError(f"{self.where} {error}") from None
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        try:
            return await asyncio.to_thread(json.loads, content)
        except (ValueError, RecursionError):  # brackets within brackets within brackets
            shown = self._shown(content)
            raise EndpointError(f"{self.where} answers what is not JSON: {shown}") from None

    async def _once(self, method: str, path: str, body: dict[str, Any] | None, most: int) -> bytes:
        timeout, url = self.endpoint.timeout, self.endpoint.url + path
        async with self.room:
            try:
                async with asyncio.timeout(timeout), self.client.stream(method, url, json=body) as response:
                    status, content = response.status_code, await self._read(response, most)
            except TimeoutError:
                raise Unavailable(f"gives no whole answer in {timeout:g} s (its timeout)", again=False) from None
            except httpx2.RequestError as error:
                if any(sign in str(error) for sign in NO_TLS) and url.startswith("https:"):
                    plain = self.endpoint.url.replace("https:", "http:", 1)
                    raise Unavailable(f"does not speak https: write base_url = {plain!r}", again=False) from None
                what = self._shown(first_line(error).encode())
                raise Unavailable(f"cannot be reached: {type(error).__name__}: {what}") from None
        if status == 200:
            return content
        said = f"answers {status}: {self._shown(content)}"
        if status == 429 or status >= 500:
            raise Unavailable(said, down=status != 429, after=retry_after(response.headers.get("retry-after")))
        raise EndpointError(f"{self.where} {said}", status=status)

    async def _read(self, response: httpx2.Response, most: int) -> bytes:
        """All of an answer, or the beginning of one that is a refusal."""
        if (packing := response.headers.get("content-encoding", "identity")) != "identity":
            raise EndpointError(
                f"{self.where} packs its answers ({self._shown(packing.encode())}), and was told not to"
            )
        content = bytearray()
        async for part in response.aiter_raw():
            content += part
            if response.status_code != 200 and len(content) > SPARE:
                break
            if len(content) > most:
                raise EndpointError(
                    f"{self.where} answers more than {most >> 20} MiB, which nothing that was asked for can take"
                )
        return bytes(content)

    async def _attach(self) -> None:
        """Connections belong to an event loop, and are closed with it."""
        loop, endpoint = asyncio.get_running_loop(), self.endpoint
        if loop is self.loop:
            return
        self.loop, self.breaker, self.room = loop, Breaker(self.where), asyncio.Semaphore(endpoint.concurrency)
        headers = {"User-Agent": f"slipstream/{slipstream.__version__}", "Accept-Encoding": "identity"}
        if endpoint.key is not None:
            headers["Authorization"] = f"Bearer {endpoint.key.get_secret_value()}"
        self.client = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT),
            limits=httpx2.Limits(
                max_connections=endpoint.concurrency,
                max_keepalive_connections=endpoint.concurrency,
                keepalive_expiry=IDLE,
            ),
        )
        closing = closed_with_its_loop(self.client)
        await anext(closing)
        OPEN.setdefault(loop, []).append(closing)

    def _shown(self, content: bytes) -> str:
        """The beginning of what a server said, without the key: some repeat it."""
        text = content[: 100 * SHOWN].decode(errors="replace")
        if self.endpoint.key is not None:
            text = text.replace(self.endpoint.key.get_secret_value(), "[key]")
        line = " ".join(text.split())
        return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"


async def closed_with_its_loop(client: httpx2.AsyncClient) -> AsyncGenerator[None]:
    """When asyncio ends a loop, it first closes the generators that are still open there."""
    try:
        yield
    finally:
        await client.aclose()


OPEN: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncGenerator[None]]] = WeakKeyDictionary()
"""Kept until their loop is gone, whoever lets go of the client before."""


def retry_after(header: str | None) -> float:
    """Seconds; a date is as good as nothing said."""
    return float(header) if header and re.fullmatch(r"\d{1,6}(\.\d+)?", header) else 0.0
