"""Reports in a real browser: every figure is drawn and can be read, in light, in the dark, on a phone and on paper."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.reporting.report.svg import find_browser, with_stable_names
from support.browser import Browser, Tab, browser
from support.reports import HOSTILE
from support.written_runs import QUOTE, write_run, write_study

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed: apt-get install chromium"),
]
LOOKS = Path(__file__).parents[1].joinpath("fixtures", "looks.js").read_text("utf-8")
LONG = "a-run-with-a-long-name-of-its-own"


@pytest.fixture(scope="module")
def program() -> Iterator[Browser]:
    with browser() as program:
        yield program


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("reports")
    hostile = {**QUOTE, "prompt": HOSTILE, "response": HOSTILE, "tokens": [HOSTILE, "."]}
    long = {**QUOTE, "response": "x" * 900, "tokens": ["x" * 899, "x"]}
    one = write_run(path / "a<b>run", samples=[hostile, long], more={"dropped/too old": 2.0, "reward/exact": 0.5})
    two = write_run(path / LONG, updates=300, evaluations=[(0, 0.2), (300, 0.7)], seed=1)
    study = write_study(path / "study")
    assert main(["report", str(one)]) == 0
    assert main(["report", str(one), str(two), "--output", str(path / "both.html")]) == 0
    assert main(["report", str(study)]) == 0
    return {"run": one / "report.html", "runs": path / "both.html", "study": study / "report.html"}


@pytest.fixture(scope="module")
def tabs(program: Browser, pages: dict[str, Path]) -> dict[str, Tab]:
    return {name: opened(program, path) for name, path in pages.items()}


@pytest.fixture(params=["run", "runs", "study"])
def tab(request: pytest.FixtureRequest, tabs: dict[str, Tab]) -> Tab:
    return tabs[request.param]


@pytest.fixture
def both(tabs: dict[str, Tab]) -> Tab:
    tabs["runs"].look()
    return tabs["runs"]


def opened(program: Browser, path: Path) -> Tab:
    tab = program.tab()
    tab.look()
    tab.open(path)
    tab.run("slipstream.drawn")
    tab.run(LOOKS)
    return tab


@pytest.mark.parametrize(
    "how", [{}, {"dark": True}, {"width": 390, "height": 844, "phone": True}], ids=["light", "dark", "phone"]
)
def test_every_figure_is_drawn_and_can_be_read(how: dict[str, Any], tab: Tab) -> None:
    tab.look(**how)
    tab.run("looks.seen()")
    assert tab.run("document.documentElement.dataset.error ?? null") is None
    drawn = tab.run("looks.drawn()")
    assert len(drawn) >= 8 and min(drawn) > 0, drawn
    assert tab.run("[document.documentElement.scrollWidth, innerWidth]") == [how.get("width", 1200)] * 2
    assert tab.run("looks.tooWide()") == [] and tab.run("looks.beyond()") <= 0.5
    found = tab.run("looks.contrasts()")
    assert found["text"] > 4.5 and found["line"] > 3, found
    assert (found["paper"] < 0.05) == how.get("dark", False)
    assert tab.run("performance.getEntriesByType('resource').length") == 0


def test_names_are_what_they_are(tab: Tab) -> None:
    titles = ("a<b>run", f"a<b>run and {LONG}", "Forward against reverse KL")
    assert tab.run("document.title") in titles and tab.run("document.querySelector('h1').textContent") in titles


def test_a_run_that_is_chosen_away_is_gone_from_all_figures(both: Tab) -> None:
    assert both.run("looks.of(1)") > 20
    both.run("looks.chip(1).click(), slipstream.drawn")
    assert both.run("[looks.of(1), looks.chip(1).getAttribute('aria-pressed')]") == [0, "false"]
    assert both.run("looks.of(0)") > 20
    both.run("looks.chip(1).click(), slipstream.drawn")
    assert both.run("looks.of(1)") > 20


def test_one_looks_around_in_a_gantt_by_its_buttons(both: Tab) -> None:
    def sight(step: str) -> list[float]:
        both.run(f"looks.step('{step}')")
        found: list[float] = both.run("looks.sight()")
        return found

    low, high = both.run("looks.sight()")
    width = high - low
    assert sight("in") == pytest.approx([low + width / 4, high - width / 4])
    assert sight("out") == pytest.approx([low, high])
    assert sight("on") == pytest.approx([low + width / 2, high + width / 2])
    assert sight("back") == pytest.approx([low, high])
    assert sight("all")[1] > high + width


def test_the_figures_of_a_study_become_svg_on_white(
    pages: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(pages["study"].parent), "--markdown", str(tmp_path)]) == 0
    names = ["study.md", "study.svg", "study-teacher-kl.svg"]
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/{name}" for name in names]
    text = tmp_path.joinpath("study.svg").read_text("utf-8")
    assert text.startswith("<svg") and text.endswith("</svg>\n") and len(text) < 30_000
    assert "fill: rgb(255, 255, 255)" in text and "<script" not in text
    assert "Holds: reverse KL starts higher" in text and text.count('class="yerror"') == 6


def test_a_figure_is_the_same_text_every_time(tabs: dict[str, Tab]) -> None:
    tabs["study"].look()
    once, again = (tabs["study"].run("slipstream.svg('figure-1', 800)") for _ in range(2))
    assert once != again and with_stable_names(once) == with_stable_names(again)


def test_on_paper_everything_is_light_and_fits(both: Tab) -> None:
    """The page is as wide as A4 without its margins, printed with a dark theme."""
    both.call("Emulation.setDeviceMetricsOverride", width=688, height=1000, deviceScaleFactor=1, mobile=False)
    both.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    both.run("dispatchEvent(new Event('beforeprint')), looks.seen()")
    found = both.run("looks.contrasts()")
    assert found["paper"] == 1.0 and found["text"] > 4.5
    assert both.run("looks.beyond()") <= 0.5 and both.run("looks.tooWide()") == []
    assert min(both.run("looks.drawn()")) > 0
