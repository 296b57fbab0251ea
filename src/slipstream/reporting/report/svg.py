"""Figures as SVG files on white, drawn by the code of a report in a headless Chromium without network."""

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
from slipstream.reporting.report.page import Page, Section, document

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
BROWSER_FLAGS = (
    "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--no-default-browser-check",
    "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--font-render-hinting=none",
)  # fmt: skip
DRAWING_SECONDS = 60
"""Seconds after which a browser that has not drawn all figures is stopped."""
SVG_WIDTH = 800
SCRIPT = """<script>
slipstream.drawn.then(async () => {
  const urls = [], figures = JSON.parse(document.getElementById("figure-data").textContent);
  for (const id in figures) urls.push(await slipstream.svg(id, %d));
  document.body.replaceChildren(...urls.map(url => Object.assign(document.createElement("pre"), { textContent: url })));
});
</script>"""
"""Script that replaces the page by the data URLs of its figures as SVG."""
RANDOM_NAME = re.compile(r"\b(defs-|topdefs-|clip|legend|trace|g)([0-9a-f]{6})")
"""Names of SVG parts that contain random digits."""


def find_browser() -> str | None:
    """Return the browser program, or None; the environment variable CHROME overrides the search."""
    named = os.environ.get("CHROME")
    return next(filter(None, map(shutil.which, [named] if named else BROWSERS)), None)


def draw_svg(figures: Sequence[Figure]) -> list[str]:
    """Return each figure as SVG text; the same figure always gives the same text."""
    program = find_browser()
    if program is None:
        raise ConfigError(
            "figures are drawn as SVG by a browser, and none was found: install chromium, or set CHROME to a browser"
        )
    page = document(Page("", "figures", "", [Section("figures", "", figures)], {}, ""))
    with TemporaryDirectory(prefix="slipstream-browser-", ignore_cleanup_errors=True) as directory:
        path = Path(directory) / "figures.html"
        path.write_text(page + SCRIPT % SVG_WIDTH, "utf-8")
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        size = [f"--window-size={SVG_WIDTH},900", f"--virtual-time-budget={1000 * DRAWING_SECONDS}"]
        command = [
            program,
            *BROWSER_FLAGS,
            *sandbox,
            *size,
            f"--user-data-dir={directory}",
            "--dump-dom",
            path.as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DRAWING_SECONDS)
        except subprocess.TimeoutExpired:
            raise SlipstreamError(f"the browser did not draw the figures within {DRAWING_SECONDS} s") from None
    urls = re.findall(r"<pre>(data:[^<]*)</pre>", done.stdout)
    if len(urls) != len(figures):
        error = re.search(r'data-error="([^"]*)"', done.stdout)
        cause = error[1] if error else done.stderr.strip() or f"it ended with code {done.returncode}"
        raise SlipstreamError(f"the browser did not draw the figures: {cause}")
    return [with_stable_names(url) for url in urls]


def with_stable_names(url: str) -> str:
    """Return the SVG of a data URL, with random names replaced by numbers."""
    text = unquote(url.partition(",")[2]).replace(' style=""', "")
    names = dict.fromkeys(name for _, name in RANDOM_NAME.findall(text))
    numbers = {name: f"{number:06x}" for number, name in enumerate(names)}
    return RANDOM_NAME.sub(lambda match: match[1] + numbers[match[2]], text) + "\n"
