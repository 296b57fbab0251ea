"""HTTP client of one endpoint, with pooled connections, limited concurrency, short retries, and no key in messages.

Short failures (a cut connection, status 5xx or 429) are retried here, after the pause that the server asks for. Other
and longer failures raise EndpointError; the pipeline then retries whole groups with longer pauses.

Servers are not trusted. At most as many bytes are read as the request can need, and compressed answers are refused. One
time limit covers a request from connecting to the last byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

import httpx2
from pydantic import SecretStr

import slipstream
from slipstream.engines.http.breaker import Breaker, Unavailable
from slipstream.errors import ConfigError, EndpointError, first_line

PAUSES = (0.25, 1.0, 4.0)
"""Mean seconds before each retry of a request; the actual pause is random."""
CONNECT = 10.0
"""Maximum seconds until the server accepts a connection."""
IDLE = 4.0
"""Seconds for which an idle connection is kept, less than the 5 s after which servers close it without notice."""
SHOWN = 200
"""Maximum characters of an answer in an error message."""
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
"""Names of OpenSSL's errors that occur if the server uses plain HTTP."""
SPARE = 1 << 20
"""Bytes that an answer may have in addition to the expected ones, for example a list of models."""


@dataclass(frozen=True)
class Endpoint:
    teacher: str
    url: str
    model: str
    key: SecretStr | None = None
    concurrency: int = 32
    timeout: float = 120.0

    @property
    def where(self) -> str:
        return f"teacher {self.teacher} at {self.url}"


TAKEN: dict[str, str] = {}
"""Values of environment variables that were removed from the environment."""


def key_from_environment(field: str, variable: str | None) -> SecretStr | None:
    """Return the key in an environment variable, and remove the variable so that child processes do not inherit it."""
    if variable is None:
        return None
    if variable in os.environ:
        TAKEN[variable] = os.environ.pop(variable)
    key = TAKEN.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{field} = {variable!r}: this environment variable is not set: export it, or drop {field}")
    if not re.fullmatch(r"[\x21-\x7e]+", key):  # HTTP libraries show a header that they refuse
        raise ConfigError(f"{field} = {variable!r}: the value of this environment variable cannot be a key")
    return SecretStr(key)


class Client:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.where = endpoint, endpoint.where
        self.loop: asyncio.AbstractEventLoop | None = None

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, expected: int = 0, bare: bool = False
    ) -> Any:
        """Return the endpoint's JSON answer of at most `expected` + SPARE bytes; raise EndpointError on failure.

        With `bare` the answer's text means nothing, and None is returned.
        """
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
        if bare:
            return None
        try:
            return await asyncio.to_thread(json.loads, content)
        except (ValueError, RecursionError):  # RecursionError: brackets nested too deeply
            shown = self._shown(content)
            raise EndpointError(f"{self.where} gives an answer that is not JSON: {shown}") from None

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
                cause = self._shown(first_line(error).encode())
                raise Unavailable(f"cannot be reached: {type(error).__name__}: {cause}") from None
        if status == 200:
            return content
        refusal = f"answers {status}: {self._shown(content)}"
        if status == 429 or status >= 500:
            raise Unavailable(refusal, down=status != 429, after=retry_after(response.headers.get("retry-after")))
        raise EndpointError(f"{self.where} {refusal}", status=status)

    async def _read(self, response: httpx2.Response, most: int) -> bytes:
        """Return the whole answer, or the first bytes of an error answer."""
        if (packing := response.headers.get("content-encoding", "identity")) != "identity":
            raise EndpointError(
                f"{self.where} compresses its answers ({self._shown(packing.encode())}): switch compression off there"
            )
        content = bytearray()
        async for part in response.aiter_raw():
            content += part
            if response.status_code != 200 and len(content) > SPARE:
                break
            if len(content) > most:
                raise EndpointError(
                    f"{self.where} sends more than {most >> 20} MiB, which is more than the request can need"
                )
        return bytes(content)

    async def _attach(self) -> None:
        """Open a connection pool for the running event loop; the pool closes together with the loop."""
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
        """Return the beginning of an answer for a message, without the key, which some servers repeat."""
        text = content[: 100 * SHOWN].decode(errors="replace")
        if self.endpoint.key is not None:
            text = text.replace(self.endpoint.key.get_secret_value(), "[key]")
        line = " ".join(text.split())
        return line if len(line) <= SHOWN else f"{line[:SHOWN]}…"


async def closed_with_its_loop(client: httpx2.AsyncClient) -> AsyncGenerator[None]:
    """Close the client when its event loop ends: asyncio then closes this generator."""
    try:
        yield
    finally:
        await client.aclose()


OPEN: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncGenerator[None]]] = WeakKeyDictionary()
"""Generators of `closed_with_its_loop` by event loop. These references keep each client open until its loop ends."""


def retry_after(header: str | None) -> float:
    """Return the seconds to wait by a Retry-After header (number or date); 0 if the header is missing or invalid."""
    if header is None:
        return 0.0
    if re.fullmatch(r"\d{1,6}(\.\d+)?", header):
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
