"""A Chromium without a window, for what only a browser can: draw a figure as SVG, and show whether a page is sound.

It is spoken to in its own protocol (https://chromedevtools.github.io/devtools-protocol), over two pipes: nothing
listens anywhere. The network is not needed, and is off.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError, first_line

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
FLAGS = (
    "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--no-default-browser-check",
    "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--font-render-hinting=none", "--remote-debugging-pipe",
)  # fmt: skip
BETWEEN = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""It reads at 3 and writes at 4, whatever numbers the pipes have here; from FREE on they are in nobody's way."""
FREE = 10
ENDED = "the browser ended, or did not even begin"
PATIENCE = 60.0
"""Seconds for any one answer."""


def find() -> str | None:
    """The program, if there is one; CHROME says which."""
    named = os.environ.get("CHROME")
    found = next(filter(None, map(shutil.which, [named] if named else NAMES)), None)
    return found or (MAC if not named and Path(MAC).exists() else None)


class Tab:
    """A page that is open."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def look(self, width: int = 1200, height: int = 900, *, dark: bool = False, phone: bool = False) -> None:
        """What it is seen on; one that nobody sees is not drawn."""
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
        """What a script comes to, once it does."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            said = found["exceptionDetails"].get("exception", {}).get("description", found["exceptionDetails"]["text"])
            raise SlipstreamError(f"the page failed: {first_line(said)}")
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
        answer = self._until(lambda told: told.get("id") == self._number)
        if "error" in answer:
            raise SlipstreamError(f"{method}: {answer['error']['message']}")
        found: dict[str, Any] = answer["result"]
        return found

    def event(self, method: str, session: str) -> None:
        """Wait until it has been told."""

        def is_it(told: Mapping[str, Any]) -> bool:
            return told.get("method") == method and told.get("sessionId") == session

        if not any(map(is_it, self._events)):
            self._until(is_it)
        self._events = [told for told in self._events if not is_it(told)]

    def _until(self, wanted: Any) -> Mapping[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while True:
            whole, zero, rest = self._buffer.partition(b"\0")
            if zero:
                self._buffer = rest
                told: Mapping[str, Any] = json.loads(whole)
                if wanted(told):
                    return told
                if "method" in told:
                    self._events.append(told)
                continue
            ready, _, _ = select.select([self.back], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self.back, 1 << 20) if ready else b""
            if not part:
                raise SlipstreamError(f"the browser did not answer within {PATIENCE:g} s" if not ready else ENDED)
            self._buffer += part


@contextmanager
def browser() -> Iterator[Browser]:
    program = find()
    if program is None:
        raise ConfigError(
            "figures become SVG in a browser, and there is none: install chromium, or let CHROME name one"
        )
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    (theirs, to), (back, answers) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="slipstream-browser-", ignore_cleanup_errors=True) as home:
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, FREE) for end in (theirs, answers)]
        words = [program, *FLAGS, *sandbox, f"--user-data-dir={home}"]
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", BETWEEN, *map(str, high), *words],
            pass_fds=high, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (theirs, answers, *high):
            os.close(end)
        try:
            yield Browser(to, back, process)
        finally:
            os.close(to)  # it ends when nobody speaks to it any more
            os.close(back)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
