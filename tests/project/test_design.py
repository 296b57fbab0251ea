"""The page about the house and the code say the same, and neither leans on a document that is not here."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "slipstream"
TEXTS = {
    path: path.read_text("utf-8")
    for folder in ("src", "docs", "examples", "benchmarks", "configs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".toml")
}


def promised() -> dict[int, str]:
    """The guarantor of every invariant, as the page has it."""
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    return {int(number): file for number, file in re.findall(r"^\| (\d+) \|.*?\| \[`([\w/]+\.py)`\]", page, re.M)}


def test_every_invariant_has_the_guarantor_that_says_so() -> None:
    claimed = [
        (int(number), path.relative_to(PACKAGE).as_posix())
        for path, text in TEXTS.items()
        for number in re.findall(r"[Gg]uarantor of\s+invariant (\d+)", text)
        if path.is_relative_to(PACKAGE)
    ]
    assert sorted(claimed) == sorted(promised().items())
    assert list(promised()) == list(range(1, 11))


def test_an_invariant_that_is_mentioned_is_on_the_page() -> None:
    mentioned = {int(number) for text in TEXTS.values() for number in re.findall(r"invariants? (\d+)", text)}
    assert mentioned <= set(promised())


def test_nothing_refers_to_documents_that_are_not_here() -> None:
    elsewhere = re.compile(r"\bDESIGN\b|\bSTYLE\.md|\bspec[ /]\d|\bseed 0\d\d\b")
    assert {path.name: found for path, text in TEXTS.items() if (found := elsewhere.findall(text))} == {}


def test_a_module_that_a_docstring_names_as_a_file_is_there() -> None:
    missing = {
        (path.name, name)
        for path, text in TEXTS.items()
        if path.is_relative_to(PACKAGE)
        for name in re.findall(r"`(?:[\w]+/)*(\w+\.py)`", text)
        if not any(file.name == name for file in TEXTS)
    }
    assert missing == set()
