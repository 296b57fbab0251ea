"""HTTP client of one endpoint, with pooled connections, limited concurrency, short retries, and no key in messages.

Short failures (a cut connection, status 5xx, 408, 425 or 429) are retried here, after the pause that the server asks
for. Other and longer failures raise EndpointError; the pipeline then retries whole groups with longer pauses.

Servers are not trusted. At most as many bytes are read as the request can need, and compressed answers are refused. One
time limit covers a request from connecting to the last byte.

A circuit breaker sends no requests during an outage, or before the time in a Retry-After header (MAX_RETRY_AFTER):

    closed ──OUTAGE_FAILURES in a row──▶ open ──pause──▶ one probe request ──success──▶ closed
                                          ▲                      │
                                          └─ longer pause ◀───failure

Other calls wait during an outage. After MAX_OUTAGE seconds they raise the error. The pipeline then retries the group,
so an outage costs time but no group, until the retries of the pipeline are used up.
"""

import asyncio
import contextlib
import difflib
import json
import os
import random
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import httpx2
from pydantic import SecretStr

import slipstream
from slipstream.errors import ConfigError, EndpointError, first_line

T = TypeVar("T")
Caught = TypeVar("Caught", bound=Exception)
REQUEST_PAUSES = (0.25, 1.0, 4.0)
"""Mean seconds before each retry of a request; the actual pause is random."""
ENDPOINT_CONNECT_TIMEOUT = 10.0
"""Maximum seconds until the server accepts a connection."""
KEEPALIVE = 4.0
"""Seconds for which an idle connection is kept, less than the 5 s after which servers close it without notice."""
ASK_AGAIN = 408, 425, 429
"""Statuses below 500 after which a request is sent again."""
MAX_MODELS = 10
"""Maximum number of models that an error message lists."""
MAX_QUOTED = 200
"""Maximum characters of an answer in an error message."""
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
"""Names of OpenSSL's errors that occur if the server uses plain HTTP."""
SPARE_BYTES = 1 << 20
"""Bytes that an answer may have in addition to the expected ones, for example a list of models."""


@cache
def certificates() -> ssl.SSLContext:
    """Return the trusted certificates, which all clients of endpoints share: they take 20 to 40 ms to load."""
    return httpx2.create_ssl_context()


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
        """Return the endpoint's JSON answer of at most `expected` + SPARE_BYTES bytes; raise EndpointError on failure.

        With `bare` the answer's text means nothing, and None is returned.
        """
        await self._attach()

        async def once() -> bytes:
            async with self.breaker.passage():
                return await self._once(method, path, body, SPARE_BYTES + expected)

        try:
            content = await retried(
                once, REQUEST_PAUSES, Unavailable, lambda error: error.again and not self.breaker.open, spread=0.5
            )
        except Unavailable as error:
            raise EndpointError(f"{self.where} {error}") from None
        if bare:
            return None
        try:
            return await asyncio.to_thread(json.loads, content)
        except (ValueError, RecursionError):  # RecursionError: brackets nested too deeply
            excerpt = self._excerpt(content) or "it is empty"
            raise EndpointError(f"{self.where} gives an answer that is not JSON: {excerpt}", status=200) from None

    async def _once(self, method: str, path: str, body: dict[str, Any] | None, most: int) -> bytes:
        timeout, url, failure = self.endpoint.timeout, self.endpoint.url + path, "cannot be reached"
        async with self.room:
            sent: dict[str, Any] = {}
            if body is not None:  # in ASCII: a text may hold half a surrogate pair, which UTF-8 cannot encode
                text = json.dumps(body, allow_nan=False, separators=(",", ":"))
                sent = {"content": text.encode(), "headers": {"Content-Type": "application/json"}}
            try:
                async with asyncio.timeout(timeout), self.client.stream(method, url, **sent) as response:
                    failure = "breaks off its answer"
                    status, content = response.status_code, await self._read(response, most)
            except TimeoutError:
                raise Unavailable(f"gives no whole answer in {timeout:g} s (its timeout)", again=False) from None
            except httpx2.RequestError as error:
                if any(sign in str(error) for sign in NO_TLS) and url.startswith("https:"):
                    plain = self.endpoint.url.replace("https:", "http:", 1)
                    raise Unavailable(f"does not speak https: write base_url = {plain!r}", again=False) from None
                cause = self._excerpt(first_line(error).encode())
                raise Unavailable(f"{failure}: {type(error).__name__}: {cause}") from None
        if status == 200:
            return content
        refusal = f"answers {status}: {self._excerpt(content)}"
        if status in ASK_AGAIN or status >= 500:
            raise Unavailable(refusal, down=status >= 500, after=retry_after(response.headers.get("retry-after")))
        if 300 <= status < 400:
            target = self._excerpt(response.headers.get("location", "").encode()).removesuffix(path)
            refusal = f"answers {status} and redirects to {target}: write that address instead"
        raise EndpointError(f"{self.where} {refusal}", status=status)

    async def _read(self, response: httpx2.Response, most: int) -> bytes:
        """Return the whole answer, or the first bytes of an error answer."""
        packing, failed = response.headers.get("content-encoding", "").strip(), response.status_code >= 500
        if not failed and packing.lower() not in ("", "identity"):
            line = f"compresses its answers ({self._excerpt(packing.encode())}): switch compression off there"
            raise EndpointError(f"{self.where} {line}", status=response.status_code)
        content = bytearray()
        async for part in response.aiter_raw():
            content += part
            if response.status_code != 200 and len(content) > SPARE_BYTES:
                break
            if len(content) > most:
                line = f"sends more than {most >> 20} MiB, which is more than the request can need"
                raise EndpointError(f"{self.where} {line}", status=200)
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
            verify=certificates(),
            timeout=httpx2.Timeout(None, connect=ENDPOINT_CONNECT_TIMEOUT),
            limits=httpx2.Limits(
                max_connections=endpoint.concurrency,
                max_keepalive_connections=endpoint.concurrency,
                keepalive_expiry=KEEPALIVE,
            ),
        )
        closing = closed_with_its_loop(self.client)
        await anext(closing)
        OPEN_CLIENTS.setdefault(loop, []).append(closing)

    def _excerpt(self, content: bytes) -> str:
        """Return the beginning of an answer for a message, without the key, which some servers repeat."""
        text = content[: 100 * MAX_QUOTED].decode(errors="replace")
        if self.endpoint.key is not None:
            text = text.replace(self.endpoint.key.get_secret_value(), "[key]")
        line = " ".join(text.split())
        return line if len(line) <= MAX_QUOTED else f"{line[:MAX_QUOTED]}…"


def models_like(wanted: str, served: Collection[str]) -> str:
    """Return the names of some models for a message, the most similar first."""
    near = difflib.get_close_matches(wanted, served, MAX_MODELS, cutoff=0.0)
    more = f" and {len(served) - len(near)} more" if len(served) > len(near) else ""
    return ", ".join(map(repr, near)) + more


async def retried(
    work: Callable[[], Awaitable[T]],
    pauses: Sequence[float],
    kind: type[Caught],
    again: Callable[[Caught], bool],
    *,
    spread: float = 0.0,
) -> T:
    """Repeat work after each pause while its error of this kind allows it, and raise its last error.

    Pauses differ at random from their mean by at most the share `spread`.
    """
    for pause in pauses:
        try:
            return await work()
        except kind as error:
            if not again(error):
                raise
        await asyncio.sleep(pause * random.uniform(1 - spread, 1 + spread))
    return await work()


async def closed_with_its_loop(client: httpx2.AsyncClient) -> AsyncGenerator[None]:
    """Close the client when its event loop ends: asyncio then closes this generator."""
    try:
        yield
    finally:
        await client.aclose()


OPEN_CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncGenerator[None]]] = WeakKeyDictionary()
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


OUTAGE_FAILURES = 5
"""Number of failures in a row that counts as an outage."""
PROBE_PAUSES = (1.0, 30.0)
"""Seconds before the first probe request, and maximum seconds between two probe requests."""
MAX_RETRY_AFTER = 60.0
"""Maximum seconds that a Retry-After header holds requests back: some servers name hours, and accept them earlier."""
MAX_OUTAGE = 120.0
"""Maximum seconds that a call waits for the end of an outage."""
PROBE_SPREAD = 0.2
"""Seconds over which all calls that wait for `Breaker.earliest` are randomly spread."""


class Unavailable(Exception):
    """Failure of one request: `down` counts towards an outage, `again` permits a retry after `after` seconds."""

    def __init__(self, what: str, *, down: bool = True, again: bool = True, after: float = 0.0) -> None:
        super().__init__(what)
        self.down, self.again, self.after = down, again, after


class Breaker:
    def __init__(self, where: str) -> None:
        self.where = where
        self.failures, self.cause, self.since = 0, "", 0.0
        """Number of failures in a row, cause of the latest failure, and time of the first."""
        self.probing, self.pause = False, PROBE_PAUSES[0]
        self.earliest = 0.0
        """Time before which no request is sent."""
        self.changed = asyncio.Event()

    @property
    def open(self) -> bool:
        return self.failures >= OUTAGE_FAILURES

    @contextlib.asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Wait until a request may be sent, and record its success or failure."""
        probe = await self._admitted()
        try:
            yield
        except Unavailable as error:
            self._delay(min(error.after, MAX_RETRY_AFTER))
            if error.down:
                self._count_failure(str(error), probe)
            else:
                self._reset()
            raise
        except EndpointError:  # the endpoint has answered, so there is no outage
            self._reset()
            raise
        else:
            self._reset()
        finally:
            if probe:
                self.probing = False
                self.changed.set()

    async def _admitted(self) -> bool:
        """Wait until a request may be sent; return true if it is the probe request of an outage."""
        now = asyncio.get_running_loop().time
        began = now()
        while self.open or now() < self.earliest:
            if self.open and not self.probing and now() >= self.earliest:
                self.probing = True
                return True
            if now() - began >= MAX_OUTAGE:
                down = f"has been down for {now() - self.since:.0f} s: it {self.cause}"
                busy = f"asks to wait another {self.earliest - now():.0f} s"
                raise EndpointError(f"{self.where} {down if self.open else busy}")
            until = began + MAX_OUTAGE
            if now() < self.earliest:
                until = min(until, self.earliest + random.uniform(0, PROBE_SPREAD))
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), until - now())
        return False

    def _delay(self, seconds: float) -> None:
        if seconds > 0:
            self.earliest = max(self.earliest, asyncio.get_running_loop().time() + seconds)

    def _count_failure(self, cause: str, probe: bool) -> None:
        if not self.failures:
            self.since = asyncio.get_running_loop().time()
        self.failures, self.cause = self.failures + 1, cause
        if probe:
            self.pause = min(2 * self.pause, PROBE_PAUSES[1])
        if probe or self.failures == OUTAGE_FAILURES:
            self._delay(self.pause)

    def _reset(self) -> None:
        self.failures, self.pause = 0, PROBE_PAUSES[0]
        self.changed.set()
