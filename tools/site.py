"""Build the documentation as a site: `python tools/site.py` writes it to build/site.

The sources are written for readers of the repository. The copy for the site differs in four ways: links to files of the
repository become plain text, because a site does not have them; a link whose text is a page's file name has the page's
title; a file name after the language of a code block becomes its title; figures are inverted in dark mode.

Zensical builds the copy strictly, so a missing page or heading ends the build. Afterwards the site is compared with the
sources: every code block and heading must be on its page, and every file that a page loads must be in the site.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urldefrag

ROOT = Path(__file__).parents[1]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
LOADED = re.compile(r'<(?:script|img|link|source)\b[^>]*?\b(?:src|href)="([^"]+)"')
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*) ?(?P<file>\S*)\n.*?^(?P=indent)```$", re.M | re.S)
HEADING = re.compile(r"^#+ .+$", re.M)
DARK_MODE = '[data-md-color-scheme="slate"] img[src$=".svg"] { filter: invert(1) hue-rotate(180deg); }\n'


def main() -> int:
    for directory in (PAGES, SITE):
        shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    (PAGES / "dark.css").write_text(DARK_MODE, "utf-8")
    for page in PAGES.rglob("*.md"):
        original = ROOT / "docs" / page.relative_to(PAGES)
        page.write_text(for_the_site(page.read_text("utf-8"), original), "utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    status = subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode
    if status:
        return status
    # a site that is opened as files, without a server, reads its search index from a script
    (SITE / "search.js").write_text(f"var __index = {(SITE / 'search.json').read_text('utf-8')}", "utf-8")
    if faults := [*not_in_the_site(), *not_on_the_pages()]:
        print("error: the site differs from its sources:", *faults, sep="\n  ", file=sys.stderr)
        return 1
    return 0


def for_the_site(text: str, page: Path) -> str:
    """Return the text of a page with its links and code blocks as the site needs them."""

    def link(match: re.Match[str]) -> str:
        target = urldefrag(match[2]).url
        if not target or "://" in target:
            return match[0]
        file = (page.parent / target).resolve()
        if not file.is_relative_to(ROOT / "docs"):
            return match[1]
        return f"[{title_of(file)}]({match[2]})" if match[1] == target and target.endswith(".md") else match[0]

    def block(match: re.Match[str]) -> str:
        opening, _, rest = match[0].partition("\n")
        title = f' title="{match["file"]}"' if match["file"] else ""
        return f"{opening.removesuffix(match['file']).rstrip()}{title}\n{rest}"

    return BLOCK.sub(block, LINK.sub(link, text))


def title_of(page: Path) -> str:
    """Return the first words of a page's heading, up to a colon, with a small first letter."""
    title = page.read_text("utf-8").partition("\n")[0].removeprefix("# ").partition(":")[0]
    return title if title[:2].isupper() else title[0].lower() + title[1:]


def not_in_the_site() -> Iterator[str]:
    """Yield the scripts, styles and images that some page loads and the site does not hold."""
    for page in SITE.rglob("*.html"):
        for target in sorted(set(LOADED.findall(page.read_text("utf-8")))):
            address = target.partition("?")[0].partition("#")[0]
            if address.startswith("data:") or not address:
                continue
            if "://" in address or (not (page.parent / address).exists() and not (SITE / address.lstrip("/")).exists()):
                yield f"{page.relative_to(SITE)}: {target} is not in the site"


def not_on_the_pages() -> Iterator[str]:
    """Yield the pages that have fewer code blocks, file names of code blocks or headings than their sources."""
    for source in sorted((ROOT / "docs").rglob("*.md")):
        text, name = source.read_text("utf-8"), source.relative_to(ROOT / "docs")
        folder = name.parent if source.name == "index.md" else name.with_suffix("")
        page = (SITE / folder / "index.html").read_text("utf-8")
        blocks = list(BLOCK.finditer(text))
        expected = {
            '<div class="highlight">': len(blocks),
            '<span class="filename">': sum(bool(block["file"]) for block in blocks),
            'class="headerlink"': len(HEADING.findall(BLOCK.sub("", text))),
        }
        for part, count in expected.items():
            if (seen := page.count(part)) != count:
                yield f"{name}: {count} times {part} are expected, and the page has {seen}"


if __name__ == "__main__":
    raise SystemExit(main())
