"""Every command, target, script, option and setting that the documentation names exists."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import slipstream
from slipstream import metric_names as vocabulary
from slipstream.cli import parser, split_overrides
from slipstream.config.costs import parse as parse_costs
from slipstream.config.file import fields, parse
from slipstream.studies.study import Study
from slipstream.studies.table import SweepConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "CHANGELOG.md"})
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"(?<![\w-])--([a-z_]+(?:\.[a-z_]+)+)")
SHELLS = {"", "sh", "bash", "shell", "console", "text"}


def blocks(languages: set[str]) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for language, text in FENCE.findall(page.read_text("utf-8")):
            if language in languages:
                yield page, text


def commands(program: str) -> list[list[str]]:
    """The words of every documented call of a program, without prompt, comment, environment and directory."""
    call = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?({program}(?: .*)?)")
    lines = [line for _, text in blocks(SHELLS) for line in text.replace("\\\n", " ").splitlines()]
    found = [call.fullmatch(part.strip()) for line in lines for part in line.split("&&")]
    return [shlex.split(match[1], comments=True) for match in found if match]


def is_setting(dotted: str) -> bool:
    if dotted.startswith("sweep."):
        return dotted.split(".")[1] in SweepConfig.settings()
    name = re.sub(r"^teachers\.\w+", "teachers.NAME", dotted)
    return any(name == known or re.match(r"(data|teachers\.NAME)\.template_args\.", name) for known, _, _ in fields())


def is_metric(name: str) -> bool:
    return bool(vocabulary.find(name)) or name in vocabulary.names()


def test_the_documentation_shows_commands() -> None:
    assert commands("slipstream") and commands("make") and commands("python")


@pytest.mark.parametrize("words", commands("slipstream"), ids=" ".join)
def test_a_documented_command_is_understood(words: list[str]) -> None:
    kept, changes = split_overrides(words[1:])
    args = parser().parse_args(kept)
    assert [key for key, _ in changes if not is_setting(key)] == []
    config = getattr(args, "config", None)
    if config is not None and "/" in config and not config.startswith("runs/"):
        assert (ROOT / config).is_file()


@pytest.mark.parametrize("words", commands("make"), ids=" ".join)
def test_a_documented_target_is_in_the_makefile(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for name, value in re.findall(r"^(\w+) := (\S+)$", text, re.MULTILINE):
        text = text.replace(f"$({name})", value)
    targets = set(re.findall(r"^([\w./-]+):", text, re.MULTILINE))
    assert set(words[1:]) <= targets


@pytest.mark.parametrize("words", commands("python"), ids=" ".join)
def test_a_documented_script_is_there_and_knows_its_options(words: list[str]) -> None:
    if any(f"```python {words[1]}\n" in page.read_text("utf-8") for page in PAGES):
        return  # the page has it written, and tests/project/test_first_run.py runs it
    if words[1] == "-m":
        spec = find_spec(words[2])
        assert spec is not None and spec.origin is not None
        script = Path(spec.origin)
    else:
        script = ROOT / words[1]
    assert script.is_file()
    text = script.read_text("utf-8")
    assert [word for word in words[2:] if word.startswith("--") and f'"{word.partition("=")[0]}"' not in text] == []


def test_every_setting_that_is_mentioned_exists() -> None:
    mentioned = {name for page in PAGES for name in SETTING.findall(page.read_text("utf-8"))} - {"a.b"}
    assert {name for name in mentioned if not is_setting(name)} == set()


def test_every_setting_and_metric_in_backticks_exists() -> None:
    known = [known for known, _, _ in fields()]
    sections = "|".join(sorted({name.partition(".")[0] for name in known if "." in name} - {"teachers"}))
    for page in PAGES:
        text = page.read_text("utf-8")
        for name in re.findall(rf"`((?:{sections})\.(?!jsonl|safetensors)[a-z_.]+)\b(?!/)", text):
            assert is_setting(name) or any(each.startswith(f"{name}.") for each in known), f"{page.name}: {name}"
    for page in (ROOT / "docs" / "choosing.md", ROOT / "docs" / "troubleshooting.md"):
        for name in re.findall(r"`([a-z_]+/[a-z_0-9/A-Z]+)`", page.read_text("utf-8")):
            assert is_metric(name) or (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("text", [text for _, text in blocks({"toml"})])
def test_every_config_that_is_shown_is_valid(text: str) -> None:
    tree = tomllib.loads(text)
    needed = {"student": "s", "teachers": {"main": {"model": "t"}}}
    if "sweep" in tree:
        assert Study(needed | tree).cells
    elif "decode" in tree:
        parse_costs(tree, where="costs")
    else:
        parse(needed | tree)


def test_every_file_that_is_linked_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_heading_that_is_linked_exists() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text("utf-8")):
            assert anchor in anchors(page.parent / target if target else page), f"{page.name}: {target}#{anchor}"


def test_what_the_documentation_calls_from_python_is_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"slipstream\.([A-Za-z]\w*)(?=\()", page.read_text("utf-8"))}
    assert named == {"train", "resume", "Run"}
    assert named < set(slipstream.__all__)


def test_the_readme_names_the_command_that_runs_the_demo_and_the_one_that_runs_the_tests() -> None:
    start = (ROOT / "README.md").read_text("utf-8").partition("## Start")[2].partition("\n## ")[0]
    assert re.findall(r"^make (\w+)", start, re.M) == ["demo", "test"]


def test_the_text_under_a_figure_of_the_readme_names_its_axes() -> None:
    figures = re.findall(r"^!\[.*\]\((.*\.svg)\)\n\n((?:.+\n)+)", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert figures
    for path, text in figures:
        svg = (ROOT / path).read_text("utf-8")
        titles = re.findall(r'class="[xy]title"[^>]*>([^<]+)<', svg)
        assert titles, f"{path} names no axis"
        missing = [title for title in titles if title.partition(",")[0].lower() not in text.replace("\n", " ").lower()]
        assert not missing, f"the text under {path} does not name {missing}"
