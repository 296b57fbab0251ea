"""The documentation site says what its sources say: no code block, heading or title of a page is lost."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "SITE", tmp_path / "site")
    return module


def test_file_names_of_blocks_become_titles_and_those_of_links_the_title_of_their_page(
    tool: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "docs" / "data.md").write_text("# Data: where prompts come from\n")
    page = tmp_path / "docs" / "index.md"
    text = (
        "[data.md](data.md), [this](data.md), [code](../src/x.py)\n```python rows.py\nx = 1\n```\n```toml\ny = 2\n```\n"
    )
    assert tool.for_the_site(text, page) == (
        '[data](data.md), [this](data.md), code\n```python title="rows.py"\nx = 1\n```\n```toml\ny = 2\n```\n'
    )


def test_a_page_that_lost_a_block_a_title_or_a_heading_is_named(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs" / "data.md").write_text("# Data\n## Rows\n```python rows.py\n# no heading\n```\n")
    page = tmp_path / "site" / "data" / "index.html"
    page.parent.mkdir(parents=True)
    heading, block = '<a class="headerlink">', '<div class="highlight"><span class="filename">rows.py</span>'
    page.write_text(heading * 2 + block)
    assert list(tool.not_on_the_pages()) == []
    page.write_text(heading)
    assert list(tool.not_on_the_pages()) == [
        'data.md: 1 times <div class="highlight"> are expected, and the page has 0',
        'data.md: 1 times <span class="filename"> are expected, and the page has 0',
        'data.md: 2 times class="headerlink" are expected, and the page has 1',
    ]
