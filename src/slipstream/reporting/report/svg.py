"""Figures as SVG files on white, drawn by the code of a report in a headless Chromium without network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.reporting.report.figures import Figure
from slipstream.reporting.report.page import numbered, shell

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
FLAGS = (
    "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--no-default-browser-check",
    "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--font-render-hinting=none",
)  # fmt: skip
PATIENCE = 60
"""Seconds after which a browser that has not drawn all figures is stopped."""
WIDTH = 800
SCRIPT = """<script>
slipstream.drawn.then(async () => {
  for (const id in JSON.parse(document.getElementById("figures").textContent)) {
    document.getElementById(id).textContent = await slipstream.svg(id, %d);
  }
});
</script>"""
"""Script that replaces each figure by the data URL of its SVG."""
CHANCE = re.compile(r"\b(defs-|topdefs-|clip|legend|trace|g)([0-9a-f]{6})")
"""Names of SVG parts that contain random digits."""


def find() -> str | None:
    """Return the browser program, or None; the environment variable CHROME overrides the search."""
    named = os.environ.get("CHROME")
    return next(filter(None, map(shutil.which, [named] if named else NAMES)), None)


def draw(figures: Sequence[Figure]) -> list[str]:
    """Return each figure as SVG text; the same figure always gives the same text."""
    program = find()
    if program is None:
        raise ConfigError(
            "figures are drawn as SVG by a browser, and none was found: install chromium, or set CHROME to a browser"
        )
    named = numbered(figures)
    body = "".join(f'<div id="{name}"></div>' for name in named)
    with TemporaryDirectory(prefix="slipstream-browser-", ignore_cleanup_errors=True) as directory:
        path = Path(directory) / "figures.html"
        path.write_text(shell("figures", body, named) + SCRIPT % WIDTH, "utf-8")
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        size = [f"--window-size={WIDTH},900", f"--virtual-time-budget={1000 * PATIENCE}"]
        command = [program, *FLAGS, *sandbox, *size, f"--user-data-dir={directory}", "--dump-dom", path.as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise SlipstreamError(f"the browser did not draw the figures within {PATIENCE} s") from None
    urls = re.findall(r'<div id="figure-\d+"[^>]*>(data:[^<]*)</div>', done.stdout)
    if len(urls) != len(named):
        error = re.search(r'data-error="([^"]*)"', done.stdout)
        cause = error[1] if error else done.stderr.strip() or f"it ended with code {done.returncode}"
        raise SlipstreamError(f"the browser did not draw the figures: {cause}")
    return [settled(url) for url in urls]


def settled(url: str) -> str:
    """Return the SVG of a data URL, with random names replaced by numbers."""
    text = unquote(url.partition(",")[2]).replace(' style=""', "")
    names = dict.fromkeys(name for _, name in CHANCE.findall(text))
    numbers = {name: f"{number:06x}" for number, name in enumerate(names)}
    return CHANCE.sub(lambda match: match[1] + numbers[match[2]], text) + "\n"
