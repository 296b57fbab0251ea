"""Fake of SandboxFusion's `/run_code` server, on the loopback interface; it runs programs in a given sandbox.

    with FakeSandboxFusion(sandbox_of("bubblewrap")) as fake:
        fake.tell("broken", "cut")               # faults of the next two calls
        ...                                      # environment.sandbox = fake.url

The server runs until the block ends. Without a sandbox it refuses every program.
"""

import asyncio
import base64
import json
import shlex
from collections import deque
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

from slipstream.errors import SandboxError
from slipstream.sandbox.base import Limits, MiB, Ran, Sandbox, run_python
from slipstream.testing.endpoint import Loopback, send
from support.fake_endpoint import cut_off

Fault = Literal["broken", "busy", "refused", "slow", "cut", "not json", "other", "sandbox", "endless"]

ANSWERS: dict[Fault | None, tuple[int, bytes]] = {
    "broken": (500, b"Internal Server Error"),
    "busy": (429, b"Too Many Requests"),
    "refused": (422, b'{"detail": "language"}'),
    "not json": (200, b"<html>"),
    "other": (200, b'{"status": "Success", "run_result": {"status": "Finished", "stdout": 7}}'),
    "sandbox": (200, b'{"status": "SandboxError", "message": "no room", "run_result": null}'),
}
"""Faults that replace the whole answer: status and content."""


class FakeSandboxFusion(Loopback):
    def __init__(self, sandbox: Sandbox | None = None) -> None:
        super().__init__()
        self.sandbox = sandbox
        self.faults: deque[Fault] = deque()
        self.seconds = 0.05
        """Delay in seconds of the fault `slow`."""
        self.requests: list[dict[str, Any]] = []

    def tell(self, *faults: Fault) -> None:
        self.faults.extend(faults)

    def post(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.requests.append(body)
        fault = self.faults.popleft() if self.faults else None
        if fault in ANSWERS:
            return send(to, *ANSWERS[fault])
        if fault == "endless":
            return send(to, 200, b" " * (64 * MiB))
        if fault == "slow":
            self.over.wait(self.seconds)
        content = json.dumps(self.ran(body)).encode()
        if fault == "cut":
            return cut_off(to, content[: len(content) // 2])
        return send(to, 200, content)

    def ran(self, body: dict[str, Any]) -> dict[str, Any]:
        limits = Limits(seconds=body["run_timeout"])
        if (megabytes := body.get("memory_limit_MB", -1)) > 0:
            limits = replace(limits, memory=megabytes * MiB)
        files = {name: base64.b64decode(content).decode() for name, content in body["files"].items()}
        try:
            return told(asyncio.run(self._run(body["language"], body["code"], body["stdin"] or "", files, limits)))
        except SandboxError as error:
            failure = {"status": "SandboxError", "message": str(error)}
            return failure | {"compile_result": None, "run_result": None, "files": {}}

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
