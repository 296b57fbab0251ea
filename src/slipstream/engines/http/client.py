"""One endpoint: pooled connections, so many requests at a time, short retries, and no secret in any message.

What is over in a second or two is tried again here: a cut connection, a 5xx, a 429, after as long as the server asks.
All else, and whatever lasts, is raised as an EndpointError: the pipeline tries whole groups again, with longer pauses.
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


def key_from_environment(field: str, variable: str | None) -> SecretStr | None:
    """The key in an environment variable that a config names."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{field} = {variable!r}: this environment variable is not set: export it, or drop {field}")
    if not re.fullmatch(r"[\x21-\x7e]+", key):  # HTTP libraries repeat what they refuse
        raise ConfigError(f"{field} = {variable!r}: what this environment variable holds cannot be a key")
    return SecretStr(key)


class Client:
    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.where = endpoint, endpoint.where
        self.loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the endpoint answers, from JSON; raises EndpointError."""
        await self._attach()
        for pause in (*PAUSES, None):
            try:
                async with self.breaker.passage():
                    content = await self._once(method, path, body)
                break
            except Unavailable as error:
                if pause is None or not error.again or self.breaker.open:
                    raise EndpointError(f"{self.where} {error}") from None
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        try:
            return await asyncio.to_thread(json.loads, content)
        except ValueError:
            shown = self._shown(content.decode(errors="replace"))
            raise EndpointError(f"{self.where} answers what is not JSON: {shown}") from None

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        timeout = self.endpoint.timeout
        async with self.room:
            try:
                async with asyncio.timeout(timeout):
                    response = await self.client.request(method, self.endpoint.url + path, json=body)
            except TimeoutError:
                raise Unavailable(f"gives no answer in {timeout:g} s (its timeout)", again=False) from None
            except httpx2.RequestError as error:
                what = self._shown(first_line(error))
                raise Unavailable(f"cannot be reached: {type(error).__name__}: {what}") from None
        status = response.status_code
        if status == 200:
            return response.content
        said = f"answers {status}: {self._shown(response.text)}"
        if status == 429 or status >= 500:
            raise Unavailable(said, down=status != 429, after=retry_after(response.headers.get("retry-after")))
        raise EndpointError(f"{self.where} {said}", status=status)

    async def _attach(self) -> None:
        """Connections belong to an event loop, and are closed with it."""
        loop, endpoint = asyncio.get_running_loop(), self.endpoint
        if loop is self.loop:
            return
        self.loop, self.breaker, self.room = loop, Breaker(self.where), asyncio.Semaphore(endpoint.concurrency)
        headers = {"User-Agent": f"slipstream/{slipstream.__version__}"}
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

    def _shown(self, text: str) -> str:
        """The beginning of what a server said, without the key: some repeat it."""
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
