"""A headless Chromium in which tests look at pages.

It is controlled over two pipes with the DevTools protocol (https://chromedevtools.github.io/devtools-protocol). No port
is opened, and the browser's network is off.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, first_line
from slipstream.reporting.report.svg import BROWSER_FLAGS, find_browser

BETWEEN = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Python code that moves the pipes to descriptors 3 (read) and 4 (write), below FREE, then starts the browser."""
FREE = 10
ENDED = "the browser ended, or did not start"
PATIENCE = 60.0
"""Timeout in seconds for each answer of the browser."""


class Tab:
    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def look(self, width: int = 1200, height: int = 900, *, dark: bool = False, phone: bool = False) -> None:
        """Set screen size, colour scheme and device, and bring the page to the front so that it is drawn."""
        self.call("Page.bringToFront")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        self.call("Page.enable")
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.browser.event("Page.loadEventFired", self.session)

    def run(self, script: str) -> Any:
        """Run a script and return its result; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            text = found["exceptionDetails"].get("exception", {}).get("description", found["exceptionDetails"]["text"])
            raise SlipstreamError(f"the page failed: {first_line(text)}")
        return found["result"].get("value")


class Browser:
    def __init__(self, to: int, back: int, process: subprocess.Popen[bytes]) -> None:
        self.to, self.back, self.process = to, back, process
        self._number, self._buffer, self._events = 0, b"", list[Mapping[str, Any]]()

    def tab(self) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Tab(self, session)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        left = json.dumps(message).encode() + b"\0"
        try:
            while left:
                left = left[os.write(self.to, left) :]
        except BrokenPipeError:
            raise SlipstreamError(ENDED) from None
        answer = self._until(lambda message: message.get("id") == self._number)
        if "error" in answer:
            raise SlipstreamError(f"{method}: {answer['error']['message']}")
        found: dict[str, Any] = answer["result"]
        return found

    def event(self, method: str, session: str) -> None:
        """Wait for the event `method` of a browser session."""

        def matches(message: Mapping[str, Any]) -> bool:
            return message.get("method") == method and message.get("sessionId") == session

        if not any(map(matches, self._events)):
            self._until(matches)
        self._events = [message for message in self._events if not matches(message)]

    def _until(self, wanted: Any) -> Mapping[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            whole, zero, rest = self._buffer.partition(b"\0")
            if zero:
                self._buffer = rest
                message: Mapping[str, Any] = json.loads(whole)
                if wanted(message):
                    return message
                if "method" in message:
                    self._events.append(message)
                continue
            ready, _, _ = select.select([self.back], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self.back, 1 << 20) if ready else b""
            if not part:
                raise SlipstreamError(f"the browser did not answer within {PATIENCE:g} s" if not ready else ENDED)
            self._buffer += part


@contextmanager
def browser() -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    (theirs, to), (back, answers) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="slipstream-browser-", ignore_cleanup_errors=True) as home:
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, FREE) for end in (theirs, answers)]
        words = [program, *BROWSER_FLAGS, "--remote-debugging-pipe", *sandbox, f"--user-data-dir={home}"]
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", BETWEEN, *map(str, high), *words],
            pass_fds=high, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (theirs, answers, *high):
            os.close(end)
        try:
            yield Browser(to, back, process)
        finally:
            os.close(to)  # the browser ends when its pipe is closed
            os.close(back)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
