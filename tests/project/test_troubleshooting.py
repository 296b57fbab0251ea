"""The lines in docs/troubleshooting.md are those that the source has: none of them can outlive what says it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
ROW = re.compile(r"^\| `([^`|]+)` \|[^|]+\|[^|]+\|$", re.MULTILINE)
LINES = ROW.findall(PAGE.read_text("utf-8"))


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string but docstrings, with … for what an f-string fills in."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.JoinedStr(values=values):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in values)
            case ast.Constant(value=str(text)):
                yield text
        yield from texts(node)


@pytest.fixture(scope="module")
def said() -> list[str]:
    files = (ROOT / "src" / "slipstream").rglob("*.py")
    return [text for file in files for text in texts(ast.parse(file.read_text("utf-8")))]


@pytest.mark.parametrize("line", LINES)
def test_the_source_says_it(line: str, said: list[str]) -> None:
    assert any(line in text for text in said), "no string of the source has it: write what is said now"


def test_every_row_is_looked_at_and_tells_a_line_from_others() -> None:
    rows = [row for row in PAGE.read_text("utf-8").splitlines() if row.startswith("| ") and "| line |" not in row[:9]]
    assert len(rows) == len(LINES) == len(set(LINES)) <= 70
    assert [line for line in LINES if len(line.replace("…", "").split()) < 3] == []
