"""Docstrings are plain: none begins with a word that hides its subject."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "slipstream"
OPENINGS = {"of", "who", "whoever", "what", "whatever", "whether", "how", "without", "as", "to", "that"}
"""First words of a sentence that names no subject and no action."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every string that stands alone, so also those behind fields, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def opening(text: str) -> str:
    return text.split()[0].strip(":,").lower() if text.split() else ""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_docstring_names_its_subject_first(path: Path) -> None:
    found = [(line, text.split("\n")[0]) for line, text in docstrings(ast.parse(path.read_text("utf-8")))]
    assert [(line, text) for line, text in found if opening(text) in OPENINGS] == []


def test_the_rule_sees_modules_fields_and_functions() -> None:
    code = '"""Of a file."""\nx: int = 0\n"""How many."""\ndef f():\n    """What it is."""\n    return 1\n'
    assert [opening(text) for _, text in docstrings(ast.parse(code))] == ["of", "how", "what"]
