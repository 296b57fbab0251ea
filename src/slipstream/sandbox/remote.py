"""Sandbox on a server with SandboxFusion's API. The server is responsible for the isolation.

Requests are retried after temporary failures. Other failures of the server raise SandboxError, not a failed `Ran`.
"""

import asyncio
import base64
import json
import random
import shlex
from typing import Any, NoReturn

import httpx2

from slipstream.errors import ConfigError, SandboxError, first_line
from slipstream.sandbox.base import DEFAULT_LIMITS, PYTHON_COMMAND, Limits, MiB, Program, Ran, Sandbox, Status, encode

SANDBOX_RETRY_PAUSES = (0.25, 1.0, 4.0)
"""Seconds before each retry of a request, randomised by ±50 %."""
MAX_QUEUE_TIME = 60.0
"""Maximum seconds for which a program may wait in the server's queue."""
SANDBOX_CONNECT_TIMEOUT = 10.0
"""Timeout in seconds for connecting to the server."""
SPARE_BYTES = 1 << 20
"""Bytes that the server's answer may have in addition to the program's output."""
MAX_EXCERPT = 200
"""Maximum characters of the server's answer that error messages show."""
MAX_REQUESTS = 64
"""Maximum number of simultaneous connections to the server."""


class Passing(Exception):
    """Temporary failure of a request; the request is retried."""


class Remote(Sandbox):
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.loop: asyncio.AbstractEventLoop | None = None

    async def execute(self, program: Program) -> Ran:
        limits, body = program.limits, request_body(program)
        most = SPARE_BYTES + 12 * limits.output  # two outputs, and JSON may write one byte as six
        since = asyncio.get_running_loop().time()
        for pause in (*SANDBOX_RETRY_PAUSES, None):
            try:
                content = await self._once(body, limits, most)
                break
            except Passing as error:
                if pause is None:
                    raise SandboxError(f"sandbox at {self.url} {error}") from None
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        seconds = asyncio.get_running_loop().time() - since
        if len(content) > most:
            return Ran("output", None, "", "", seconds)
        return self._ran(content, limits, seconds)

    async def session(self, limits: Limits = DEFAULT_LIMITS) -> NoReturn:
        raise ConfigError(f'sandbox at {self.url}: a server has no sessions: write environment.sandbox = "bubblewrap"')

    async def close(self) -> None:
        if self.loop is not None:
            self.loop = None
            await self.client.aclose()

    async def _once(self, body: dict[str, Any], limits: Limits, most: int) -> bytes:
        if self.loop is not (loop := asyncio.get_running_loop()):
            connections = httpx2.Limits(
                max_connections=MAX_REQUESTS, max_keepalive_connections=MAX_REQUESTS, keepalive_expiry=4.0
            )
            timeout = httpx2.Timeout(None, connect=SANDBOX_CONNECT_TIMEOUT)
            self.loop = loop
            self.client = httpx2.AsyncClient(
                headers={"Accept-Encoding": "identity"}, timeout=timeout, limits=connections
            )
        patience = limits.seconds + MAX_QUEUE_TIME
        content = bytearray()
        try:
            async with (
                asyncio.timeout(patience),
                self.client.stream("POST", f"{self.url}/run_code", json=body) as response,
            ):
                async for part in response.aiter_raw():
                    content += part
                    if len(content) > most:
                        break
        except TimeoutError:
            raise SandboxError(f"sandbox at {self.url} gives no whole answer in {patience:g} s") from None
        except httpx2.RequestError as error:
            raise Passing(f"cannot be reached: {type(error).__name__}: {first_line(error)[:MAX_EXCERPT]}") from None
        status = response.status_code
        if status == 429 or status >= 500:
            raise Passing(f"answers {status}: {excerpt(content)}")
        if status != 200:
            raise SandboxError(f"sandbox at {self.url} answers {status}: {excerpt(content)}")
        return bytes(content)

    def _ran(self, content: bytes, limits: Limits, seconds: float) -> Ran:
        try:
            answer = json.loads(content)
            status, result = answer["status"], answer.get("run_result") or answer.get("compile_result") or {}
            if status not in ("Success", "Failed") or result.get("status") not in ("Finished", "TimeLimitExceeded"):
                raise SandboxError(
                    f"sandbox at {self.url} ran nothing: {status}: {excerpt(str(answer.get('message')).encode())}"
                )
            late, code = result["status"] == "TimeLimitExceeded", result.get("return_code")
            if not late and type(code) is not int:
                raise ValueError
            out, err = (_text(result.get(name)) for name in ("stdout", "stderr"))
            took = result.get("execution_time")
            took = float(took) if isinstance(took, int | float) else seconds
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise SandboxError(f"sandbox at {self.url} gives no SandboxFusion answer: {excerpt(content)}") from None
        flood = max(len(encode(out)), len(encode(err))) > limits.output
        outcome: Status = "timeout" if late else "output" if flood else "ok" if code == 0 else "failed"
        out, err = (encode(each)[: limits.output].decode(errors="replace") for each in (out, err))
        return Ran(outcome, code if outcome in ("ok", "failed") else None, out, err, took)


def request_body(program: Program) -> dict[str, Any]:
    """Return the request body for `/run_code`. Python programs are sent as Python, other commands as a bash line."""
    argv, files, limits = program.argv, program.files, program.limits
    assert isinstance(program.stdin, str)
    if tuple(argv[:-1]) == PYTHON_COMMAND and argv[-1] in files:
        language, code = "python", files[argv[-1]]
        files = {name: content for name, content in files.items() if name != argv[-1]}
    else:
        language, code = "bash", shlex.join(argv)
    return {
        "language": language,
        "code": encode(code).decode(),
        "stdin": encode(program.stdin).decode(),
        "files": {name: base64.b64encode(encode(content)).decode() for name, content in files.items()},
        "fetch_files": [],
        "compile_timeout": limits.seconds,
        "run_timeout": limits.seconds,
        "memory_limit_MB": max(1, limits.memory // MiB),
    }


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError
    return value or ""


def excerpt(content: bytes | bytearray) -> str:
    line = " ".join(bytes(content[: 10 * MAX_EXCERPT]).decode(errors="replace").split())
    return line if len(line) <= MAX_EXCERPT else f"{line[:MAX_EXCERPT]}…"
