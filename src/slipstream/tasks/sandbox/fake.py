"""A server of SandboxFusion's `/run_code` that ships, on loopback only: what it runs, it runs in one of ours.

    with FakeSandboxFusion(sandbox_of("bubblewrap")) as fake:
        fake.tell("broken", "cut")               # of the next two calls
        ...                                      # environment.sandbox = fake.url

It serves until the block ends. Without a sandbox it refuses to run anything.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

from slipstream.errors import SandboxError
from slipstream.tasks.sandbox.base import Limits, MiB, Ran, Sandbox, run_python

Fault = Literal["broken", "busy", "refused", "slow", "cut", "not json", "other", "sandbox", "endless"]


class FakeSandboxFusion:
    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self.sandbox = sandbox
        self.faults: deque[Fault] = deque()
        self.seconds = 0.05
        """How long slow is."""
        self.requests: list[dict[str, Any]] = []
        self.over = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def tell(self, *faults: Fault) -> None:
        """What goes wrong with the next calls, one by one."""
        self.faults.extend(faults)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                try:
                    fake.answer(self, body)
                except (BrokenPipeError, ConnectionResetError):  # who asked has gone
                    self.close_connection = True

        return Handler

    def answer(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.requests.append(body)
        fault = self.faults.popleft() if self.faults else None
        match fault:
            case "broken":
                return send(to, 500, b"Internal Server Error")
            case "busy":
                return send(to, 429, b"Too Many Requests")
            case "refused":
                return send(to, 422, b'{"detail": "language"}')
            case "not json":
                return send(to, 200, b"<html>")
            case "other":
                return send(to, 200, b'{"status": "Success", "run_result": {"status": "Finished", "stdout": 7}}')
            case "sandbox":
                return send(to, 200, b'{"status": "SandboxError", "message": "no room", "run_result": null}')
            case "endless":
                return send(to, 200, b" " * (64 * MiB))
            case "slow":
                self.over.wait(self.seconds)
        content = json.dumps(self.ran(body)).encode()
        if fault == "cut":
            to.close_connection = True
            to.wfile.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content[: len(content) // 2]
            )
            return None
        return send(to, 200, content)

    def ran(self, body: dict[str, Any]) -> dict[str, Any]:
        limits = Limits(seconds=body["run_timeout"])
        if (megabytes := body.get("memory_limit_MB", -1)) > 0:
            limits = Limits(seconds=body["run_timeout"], memory=megabytes * MiB)
        files = {name: base64.b64decode(content).decode() for name, content in body["files"].items()}
        try:
            return told(asyncio.run(self._run(body["language"], body["code"], body["stdin"] or "", files, limits)))
        except SandboxError as error:
            return {
                "status": "SandboxError",
                "message": str(error),
                "compile_result": None,
                "run_result": None,
                "files": {},
            }

    async def _run(self, language: str, code: str, stdin: str, files: dict[str, str], limits: Limits) -> Ran:
        if self.sandbox is None:
            raise SandboxError("this server runs no code")
        match language:
            case "python":
                return await run_python(self.sandbox, code, stdin=stdin, files=files, limits=limits)
            case "bash":
                return await self.sandbox.run(shlex.split(code), stdin=stdin, files=files, limits=limits)
            case _:
                raise SandboxError(f"this server runs no {language}")


def told(ran: Ran) -> dict[str, Any]:
    """What a server says of a program."""
    late = ran.status == "timeout"
    result = {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": ran.seconds,
        "return_code": None if late else 137 if ran.code is None else ran.code,
        "stdout": ran.out,
        "stderr": ran.err,
    }
    status = "Success" if ran.status == "ok" else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}


def send(to: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
    to.send_response(status)
    to.send_header("Content-Type", "application/json")
    to.send_header("Content-Length", str(len(content)))
    to.end_headers()
    to.wfile.write(content)
