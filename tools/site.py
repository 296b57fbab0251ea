"""Build the documentation as a site: `python tools/site.py` writes it to build/site.

The pages in docs/ also link to files of the repository, which a site does not have: those links become plain text.
Zensical builds the copy strictly, so a missing page or heading ends the build. Afterwards every file that a page loads
is looked up in the site, so that no page needs another host.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urldefrag

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
LOADED = re.compile(r'<(?:script|img|link|source)\b[^>]*?\b(?:src|href)="([^"]+)"')


def main() -> int:
    for directory in (PAGES, SITE):
        shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for page in PAGES.rglob("*.md"):
        original = ROOT / "docs" / page.relative_to(PAGES)
        page.write_text(without_outside_links(page.read_text("utf-8"), original), "utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    status = subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode
    if status == 0 and (missing := not_in_the_site()):
        print("error: pages load files that are not in the site:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    return status


def without_outside_links(text: str, page: Path) -> str:
    """Replace each link to a file outside docs/ by its text."""

    def replace(match: re.Match[str]) -> str:
        target = urldefrag(match[2]).url
        if not target or "://" in target:
            return match[0]
        inside = (page.parent / target).resolve().is_relative_to(ROOT / "docs")
        return match[0] if inside else match[1]

    return LINK.sub(replace, text)


def not_in_the_site() -> list[str]:
    """Return the scripts, styles and images that some page loads and the site does not hold."""
    missing = set[str]()
    for page in SITE.rglob("*.html"):
        for target in LOADED.findall(page.read_text("utf-8")):
            address = target.partition("?")[0].partition("#")[0]
            if address.startswith("data:") or not address:
                continue
            if "://" in address or (not (page.parent / address).exists() and not (SITE / address.lstrip("/")).exists()):
                missing.add(f"{page.relative_to(SITE)}: {target}")
    return sorted(missing)


if __name__ == "__main__":
    sys.exit(main())
