"""Docstrings and comments are plain: none begins with a word that hides its subject, and no sentence is long."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    each for folder in ("src", "tests", "tools", "benchmarks", "examples") for each in (ROOT / folder).rglob("*.py")
)
COMMENTED = [ROOT / "Makefile", *sorted((ROOT / "configs").rglob("*.toml"))]
MAX_WORDS = 25
"""Largest number of words of a sentence in a comment."""
LONG_STRING = re.compile(r'"""(?:.|\n)*?"""')
BEFORE_COMMENT = re.compile(r"""(?:[^"'#]|"(?:[^"\\]|\\.)*"|'[^']*')*""")
COMMAND = re.compile(r" *(?:slipstream|python3?|VLLM\w+=\S+|GPUs:) ?")
"""Beginning of a comment line that is a command, or is read by a test."""
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_names_its_subject_first(path: Path) -> None:
    found = [(line, text.split("\n")[0]) for line, text in docstrings(ast.parse(path.read_text("utf-8")))]
    assert [(line, text) for line, text in found if opening(text) in OPENINGS] == []


def test_the_rule_sees_modules_fields_and_functions() -> None:
    code = '"""Of a file."""\nx: int = 0\n"""How many."""\ndef f():\n    """What it is."""\n    return 1\n'
    assert [opening(text) for _, text in docstrings(ast.parse(code))] == ["of", "how", "what"]


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs of comments and comments behind code, with their first line; commands end a paragraph."""
    paragraph, first = list[str](), 0
    text = LONG_STRING.sub(lambda string: "\n" * string[0].count("\n"), text)
    for number, line in enumerate([*text.splitlines(), ""], 1):
        start = BEFORE_COMMENT.match(line)
        code, comment = line[: start.end()] if start else line, line[start.end() + 1 :] if start else ""
        if comment and not code.strip() and not COMMAND.match(comment):
            paragraph, first = [*paragraph, comment.strip()], first or number
            continue
        if paragraph:
            yield first, " ".join(paragraph)
        paragraph, first = [], 0
        if comment and code.strip():
            yield number, comment.strip()


def long_sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.?!:;])\s", text) if len(part.split()) > MAX_WORDS]


def hides_its_subject(text: str) -> bool:
    """Return True if a sentence other than a question opens with a word of OPENINGS."""
    parts = [part for part in re.split(r"(?<=[.?!])\s", text) if not part.endswith("?")]
    return any(opening(part) in OPENINGS for part in parts)


@pytest.mark.parametrize("path", COMMENTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_comment_names_its_subject_first_in_short_sentences(path: Path) -> None:
    found = list(comments(path.read_text("utf-8")))
    assert [(line, text) for line, text in found if hides_its_subject(text)] == []
    assert [(line, part) for line, text in found for part in long_sentences(text)] == []


def test_the_rule_sees_paragraphs_comments_behind_code_and_no_strings() -> None:
    code = 'a = "#1"  # of the last\n# One. What\n# it is.\n# slipstream x\nb = """\n#### 16\n"""\n# How much?\n'
    assert list(comments(code)) == [(1, "of the last"), (2, "One. What it is."), (8, "How much?")]
    assert [hides_its_subject(text) for _, text in comments(code)] == [True, True, False]
    assert long_sentences("one " * 26) and not long_sentences("one " * 20 + "two; " + "three " * 20)


def constants(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and value of every constant of a module; a type variable is none."""
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name.isupper() and not ast.unparse(value).startswith("TypeVar("):
                yield name, ast.unparse(value)


def test_a_constant_has_one_value_in_all_modules() -> None:
    values: dict[str, dict[str, list[str]]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name, value in constants(path):
            values.setdefault(name, {}).setdefault(value, []).append(str(path.relative_to(ROOT)))
    assert len(values) > 500
    assert {name: found for name, found in values.items() if len(found) > 1} == {}
