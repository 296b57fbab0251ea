"""A report: one file, everything escaped, and one line where there is nothing to report."""

import base64
import copy
import gzip
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from math import log2
from pathlib import Path
from typing import Any

import pytest

from findings import index
from slipstream.cli import main
from slipstream.reporting.report import charts, page, sections
from slipstream.reporting.report import study_figures as arms
from slipstream.reporting.report.figures import Figure
from slipstream.reporting.report.page import Page, Paragraph, Samples, Section, as_json, document
from slipstream.reporting.report.samples import sample_of
from slipstream.reporting.report.sections import ending
from slipstream.reporting.report.study import markdown_page
from slipstream.run_dir.writing import read_lines
from slipstream.studies.results import Sweep
from support.reports import HOSTILE
from support.written_runs import QUOTE, STUDY, write_lines, write_run, write_study


class Structure(HTMLParser):
    """Content of a page as a browser reads it: its elements, and the text of its scripts."""

    VOID = ("meta", "img", "link", "br", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.scripts, self.links = list[str](), list[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag == "script":
            self.scripts.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def report(*words: object) -> str:
    assert main(["report", *map(str, words)]) == 0
    return Path(str(words[0]), "report.html").read_text("utf-8")


def titles(text: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_a_report_is_one_file_with_a_section_for_all_that_a_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run")
    text = report(path)
    assert capsys.readouterr().out == f"{path}/report.html\n"
    assert titles(text) == [
        "At a glance", "Advice", "Configuration", "Accuracy and rewards", "Learning", "Overlap of the stages",
        "Throughput", "Waits", "Staleness", "Drift", "Noise", "Lengths", "Samples", "Lost work",
    ]  # fmt: skip
    found = Structure(text)
    assert found.open == [] and len(found.scripts) == 3
    assert [link for link in found.links if not link.startswith("#")] == []
    (library,) = re.findall('id="plotly">(.*?)</script>', text)
    assert gzip.decompress(base64.b64decode(library)).count(b"* plotly.js (cartesian") == 1
    assert f"slipstream report {path}" in text and "slipstream train" in text
    figures = json.loads(found.scripts[0])
    assert len(figures) == text.count("<figure") == text.count('class="plot')


def test_the_same_run_makes_the_same_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    assert report(path) == report(path)


def test_what_a_model_says_is_text_and_never_part_of_the_page(tmp_path: Path) -> None:
    tokens = [HOSTILE, "."]
    quote = {**QUOTE, "prompt": HOSTILE, "response": HOSTILE + ".", "tokens": tokens, "teacher": HOSTILE,
             "context": HOSTILE, "context_id": HOSTILE, "finish": HOSTILE, "rewards": {HOSTILE: 1.0}}  # fmt: skip
    turns = {**quote, "turns": [["said", HOSTILE + "."], ["seen", HOSTILE], [HOSTILE, HOSTILE]]}
    lost = {"number": 1, "end": "dropped", "reason": HOSTILE, "version": 0, "cause": HOSTILE}
    more = {"dropped/</script>": 1.0, "reward/exact/<b>": 1.0}
    path = write_run(tmp_path / "run<b>&", samples=[quote, turns], ledger=[lost], more=more)
    text = report(path)
    found = Structure(text)
    assert found.open == [] and len(found.scripts) == 3 and "img" not in found.tags
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text
    shown = text[: text.index("<script")]
    assert not [char for char in "\x00\x1b\u202e\u2028\ud800" if char in shown]
    assert "␀␛[31m" in shown and "\\u202e\\u2028" in shown
    assert "<title>run&lt;b&gt;&amp;</title>" in text


def sample_html(quote: dict[str, Any]) -> str:
    """A sample as it stands in a page."""
    text = document(Page("k", "t", "", [Section("S", "", [Samples([sample_of(quote)], 4.0)])], {}, ""))
    return text[text.index("<article") : text.index("</article>")]


def test_a_token_is_coloured_by_how_much_less_likely_the_teacher_finds_it() -> None:
    text = sample_html({**QUOTE, "tokens": ["a", "b", "c"], "response": "abc", "logp": [-1.0, -1.0, -1.0],
                          "teacher_logp": [-1.05, -3.0, -0.5]})  # fmt: skip
    assert '<span title="student -1.00, teacher -1.05">a</span>' in text
    # 2 nats of 4: 0.12 + 0.68 / 2; half a nat of 4: 0.12 + 0.68 / 8
    assert '<span class="less" style="--a:0.46" title="student -1.00, teacher -3.00">b</span>' in text
    assert '<span class="more" style="--a:0.21" title="student -1.00, teacher -0.50">c</span>' in text
    assert "finds a token 0.517 nats less likely than" in text  # (0.05 + 2 − 0.5) / 3


def test_an_episode_shows_what_was_said_and_what_was_seen() -> None:
    turns = [["said", "ab"], ["seen", "no"], ["said", "c"]]
    text = sample_html({**QUOTE, "turns": turns, "response": "abnoc", "tokens": ["a", "b", "c"],
                          "logp": [0.0, None, 0.0], "teacher_logp": [-9.0, 0.0, 0.0]})  # fmt: skip
    said = re.findall(r'<div class="turn (\w+)">.*?<pre>(.*?)</pre>', text)
    assert [(kind, re.sub("<.*?>", "", inner)) for kind, inner in said] == [
        ("prompt", "1+1="), ("said", "ab"), ("seen", "no"), ("said", "c"),
    ]  # fmt: skip
    assert 'class="less"' in said[1][1] and "class" not in said[3][1]


def test_tokens_that_do_not_add_up_to_the_text_stand_below_it() -> None:
    text = sample_html({**QUOTE, "response": "é", "tokens": ["\ufffd", "\ufffd"]})
    assert "its tokens" in text and "<pre>é</pre>" in text
    unscored = sample_html({**QUOTE, "teacher_logp": None})
    assert "<pre>2.</pre>" in unscored and "nats" not in unscored


def test_a_sample_of_any_length_has_its_place() -> None:
    many = 16_000
    long = {**QUOTE, "prompt": "p" * 99_999, "response": "ab" * many, "tokens": ["ab"] * many}
    text = sample_html({**long, "logp": [-1.0] * many, "teacher_logp": [-9.0] * many})
    assert len(text) < 150_000 and "… and 14,800 more tokens" in text


def test_several_runs_are_one_colour_each_and_the_settings_that_differ_come_first(tmp_path: Path) -> None:
    a = write_run(tmp_path / "x" / "run", changes={"learner": {"lr": 1e-3}})
    b = write_run(tmp_path / "y" / "run", changes={"schedule": {"kind": "sync"}}, updates=200, evaluations=())
    text = report(a, b)
    assert "<h1>x/run and y/run</h1>" in text and text.count("data-slot=") == 2
    settings = text[text.index('<section id="configuration"') :]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", settings)
    assert rows[:3] == [
        ("learner.lr", "0.001", "1e-05", "1e-05"),
        ("schedule.kind", "async", "sync", "async"),
        ("updates", "30", "200", "100"),
    ]
    figures = json.loads(Structure(text).scripts[0])
    one = [figure for figure in figures.values() if figure["layout"]["xaxis"]["title"]["text"] == "update"]
    assert one and all({trace["meta"] for trace in figure["data"]} <= {0, 1} for figure in one)
    assert sum({trace["meta"] for trace in figure["data"]} == {0, 1} for figure in one) >= len(one) - 1


def test_a_page_of_many_runs_names_some_of_them() -> None:
    assert [sections.title_of("abcdefg"[:n]) for n in (1, 2, 3, 5, 7)] == [
        "a", "a and b", "a, b and c", "a, b, c, d and e", "a, b, c, d, e and 2 others",
    ]  # fmt: skip


@pytest.mark.parametrize("updates", [1, 2])
def test_a_run_may_be_as_short_as_it_likes(updates: int, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", updates=updates, evaluations=())
    with path.joinpath("trace.json").open("a") as file:
        file.write('{"ph": "X", "pid": 1, "ti')  # it was killed here
    assert "Overlap of the stages" in titles(report(path))


def test_a_run_that_goes_on_says_so_and_one_that_wrote_little_has_less(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", updates=1, trace=False, samples=(), evaluations=(), finished=False)
    path.joinpath("config.toml").write_text(
        path.joinpath("config.toml").read_text().replace("updates = 1", "updates = 9")
    )
    text = report(path)
    assert "1 of 9, not finished" in text
    assert {"Overlap of the stages", "Samples"}.isdisjoint(titles(text))


def test_advice_is_given_of_every_run_or_that_nothing_is_wrong(tmp_path: Path) -> None:
    well, ill = write_run(tmp_path / "well"), write_run(tmp_path / "ill", more={"truncated": 0.6})
    assert "<p>Nothing is wrong.</p>" in report(well)
    text = report(well, ill)
    assert "<p>Nothing is wrong with well.</p>" in text
    assert "<td>ill</td><td>truncated answers</td><td>truncated = 0.6</td>" in text
    assert "<td>--sampler.max_tokens 512</td>" in text


def test_advice_in_a_report_fits_the_context_of_the_models(tmp_path: Path) -> None:
    """Twice 100 tokens are more than the 160 that the shipped models take; `slipstream advise` says 160, too."""
    models = {"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"}}}
    changes = {**models, "sampler": {"max_tokens": 100}}
    assert "<td>--sampler.max_tokens 160</td>" in report(
        write_run(tmp_path / "run", changes=changes, more={"truncated": 0.6})
    )


def test_what_was_lost_is_told_with_its_cause(tmp_path: Path) -> None:
    line = {"number": 7, "end": "dropped", "reason": "too old", "version": 3, "cause": "the teacher is away"}
    many = [line, *({**line, "number": 100 + i, "end": "trained"} for i in range(20))]
    path = write_run(tmp_path / "run", ledger=many, more={"dropped/too old": 1.0})
    assert "<td>run</td><td>7</td><td>too old</td><td>the teacher is away</td>" in report(path)


@pytest.mark.parametrize(
    "words, said",
    [
        (["empty"], "empty holds no run: there is no config.toml in it"),
        (
            ["run", "--markdown", "here", "-o", "page.html"],
            "--output is the file of the HTML page: leave it out with --markdown",
        ),
        (["empty", "--markdown", "here"], "--markdown writes one study: name the directory of one sweep"),
        (["young"], "young has made no update yet: there is nothing to report"),
        (["run", "study"], "a report shows one study, or runs: name one study, or the directories of its cells"),
        (["unstarted"], "unstarted has no finished run yet: there is nothing to report"),
        (["run", "-o", "empty"], "empty cannot be written: Is a directory"),
        (
            ["run", "-o", "run/metrics.jsonl"],
            "run/metrics.jsonl exists and is no HTML page: move it away, or name another file",
        ),
    ],
)
def test_where_there_is_nothing_to_report_one_line_says_so(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    write_run(Path("run"))
    write_run(Path("young"), updates=0, evaluations=[(0, 0.1)])
    write_study(Path("study"), left_out=17)
    write_study(Path("unstarted"), left_out=18)
    assert main(["report", *words]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"
    assert not Path("here").exists()


def test_without_a_browser_svg_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHROME", "/nowhere/chromium")
    path = write_study(tmp_path / "study")
    assert main(["report", str(path), "--markdown", str(tmp_path / "page")]) == 2
    said = "figures are drawn as SVG by a browser, and none was found: install chromium, or set CHROME to a browser"
    assert capsys.readouterr().err == f"error: {said}\n"


def test_a_browser_that_draws_nothing_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CHROME", "/bin/false")
    path = write_study(tmp_path / "study")
    assert main(["report", str(path), "--markdown", str(tmp_path / "page")]) != 0
    assert capsys.readouterr().err == "error: the browser did not draw the figures: it ended with code 1\n"


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    code = f"""
import sys
from slipstream.cli import main
assert main(["report", {str(path)!r}]) == 0
print([name for name in ("torch", "transformers", "pandas", "ray") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# --- the page --------------------------------------------------------------------------------------------------


def test_figures_are_numbered_as_they_stand_between_what_else_there_is() -> None:
    one, two, three = (Figure(title, "", [], {}) for title in "abc")
    sections = [Section("S", "", [one, Paragraph("x"), two]), Section("Empty", "", []), Section("T", "", [three])]
    text = document(Page("k", "t", "", sections, {}, ""))
    assert re.findall(r'<b>(\w)</b>.*?id="(figure-\d)"', text) == [
        ("a", "figure-1"),
        ("b", "figure-2"),
        ("c", "figure-3"),
    ]
    assert titles(text) == ["S", "T"] and 'href="#empty"' not in text


def test_json_in_a_script_cannot_end_it() -> None:
    data = {"a": HOSTILE}
    text = as_json(data)
    assert "<" not in text and "\u2028" not in text and json.loads(text) == data


def test_a_title_that_is_drawn_has_lines() -> None:
    drawn = page.page_figure(Figure("word " * 40, "", [], {}))["title"].split("<br>")
    assert len(drawn) == 3 and max(map(len, drawn)) <= page.TITLE_WIDTH


# --- studies ---------------------------------------------------------------------------------------------------


def test_the_figure_of_a_study_has_a_line_for_every_arm_with_its_error(tmp_path: Path) -> None:
    sweep = Sweep(write_study(tmp_path / "study"))
    figure = arms.result_figure(sweep, "reward/exact")
    reverse, forward = figure.data
    assert (reverse["name"], forward["name"]) == ("reverse", "forward")
    # steps of log2(x + 1), as the largest x is sixteen times the smallest above 0
    assert reverse["x"] == pytest.approx([0.0, 1.0, 4.0875]) == forward["x"]
    assert reverse["y"] == pytest.approx([0.62, 0.54, 0.293], abs=1e-4)
    assert reverse["error_y"]["array"] == pytest.approx([0.01 / 3**0.5] * 3, rel=1e-3)
    assert figure.layout["xaxis"]["ticktext"] == ["0", "1", "16"]
    assert figure.title == "Holds: reverse KL starts higher; reverse KL falls faster."
    other = arms.result_figure(sweep, "teacher/kl")
    assert other.title.startswith("KL to the teacher from 0.302 (") and other.title.endswith("at 16)")
    assert other.layout["yaxis"]["title"]["text"] == "KL to the teacher, nats per token"


def test_a_study_without_an_axis_has_bars(tmp_path: Path) -> None:
    tree: dict[str, Any] = copy.deepcopy(STUDY)
    tree["sweep"] = {key: value for key, value in tree["sweep"].items() if key not in ("x", "grid", "claims")}
    tree["schedule"] = {"kind": "sync"}
    sweep = Sweep(write_study(tmp_path / "study", tree))
    figure = arms.result_figure(sweep, "reward/exact")
    assert [trace["x"] for trace in figure.data] == [["reverse", "forward"]] * 2
    assert [trace["y"] for trace in figure.data] == [[0.62, None], [None, 0.52]]
    assert figure.title == "Reward exact from 52 % (forward) to 62 % (reverse)"


def test_a_study_of_time_says_what_was_learned_when_the_first_arm_was_done(tmp_path: Path) -> None:
    tree: dict[str, Any] = copy.deepcopy(STUDY)
    tree["sweep"] = {key: value for key, value in tree["sweep"].items() if key not in ("x", "grid", "claims")}
    tree["sweep"]["measure"] = ["time", "reward/exact"]
    tree["sweep"]["arms"]["reverse, shorter"] = {"loss.kind": "reverse_kl_mc", "updates": 20}
    tree["schedule"] = {"kind": "sync"}
    sweep = Sweep(write_study(tmp_path / "study", tree))
    assert list(arms.result_figures(sweep)) == ["study.svg", "study-reward-exact.svg", "study-clock.svg"]
    figure = arms.result_figures(sweep)["study-clock.svg"]
    assert {trace["name"] for trace in figure.data if "name" in trace} == {"reverse", "forward"}
    assert re.fullmatch(r"reverse ends first, after \d+ s, at 62 %", figure.title) and figure.legend
    first, _ = (trace for trace in figure.data if trace.get("fill") is None)
    assert first["x"][0] < first["x"][-1] and first["name"] == "reverse"
    assert arms.by_clock(Sweep(write_study(tmp_path / "plain"))) is None


def test_many_arms_are_points_below_one_another_and_claims_go_by_what_became_of_them(tmp_path: Path) -> None:
    tree: dict[str, Any] = copy.deepcopy(STUDY)
    tree["schedule"] = {"kind": "sync"}
    tree["sweep"] = {key: value for key, value in tree["sweep"].items() if key not in ("x", "grid")}
    tree["sweep"]["arms"] = {f"arm {k}": {"loss.kind": "forward_kl", "loss.k": k} for k in range(1, 7)}
    tree["sweep"]["claims"] = [{"says": f"claim {k}", "less": 0.0, "than": f"arm {k}"} for k in range(1, 6)]
    tree["sweep"]["claims"].insert(0, {"says": "claim 6", "less": "arm 6", "than": 0.0})
    figure = arms.result_figure(Sweep(write_study(tmp_path / "study", tree)), "reward/exact")
    assert figure.layout["yaxis"]["categoryarray"] == [f"arm {k}" for k in range(6, 0, -1)]
    assert [trace["x"].index(0.52) for trace in figure.data] == list(range(6))
    assert figure.title == "Does not hold: claim 6. Holds: claim 1; claim 2; claim 3; claim 4. And 1 more."


def test_a_study_over_learning_rates_has_steps_of_their_doublings(tmp_path: Path) -> None:
    tree: dict[str, Any] = copy.deepcopy(STUDY)
    rates = [1e-4, 2e-4, 4e-4]
    tree["schedule"] = {"kind": "sync"}
    tree["sweep"] |= {"x": "learner.lr", "grid": {"learner.lr": rates}, "claims": []}
    sweep = Sweep(write_study(tmp_path / "study", tree))
    assert sweep.doublings == "log2(learner.lr)"
    first, *_, last = arms.result_figure(sweep, "reward/exact").data[0]["x"]
    assert last - first == pytest.approx(2)
    lags = Sweep(write_study(tmp_path / "lags"))
    assert lags.doublings == "log2(schedule.k + 1)"


def test_the_title_of_one_learning_curve_says_that_it_fell(tmp_path: Path) -> None:
    """The only series ends at one value, which is not where it was all the time."""
    tree: dict[str, Any] = copy.deepcopy(STUDY)
    tree["schedule"] = {"kind": "sync"}
    tree["sweep"] = {key: value for key, value in tree["sweep"].items() if key not in ("x", "grid", "claims")}
    tree["sweep"]["arms"] = {"reverse": {"loss.kind": "reverse_kl_mc"}}
    path = write_study(tmp_path / "study", tree)
    for cell in Sweep(path).finished:
        lines = read_lines(cell.path / "metrics.jsonl")
        for line in lines:
            line["reward/exact"] = 0.65 - 0.02 * line["update"]
        write_lines(cell.path / "metrics.jsonl", lines)
    titles = [figure.title for figure in arms.curves(Sweep(path))]
    assert titles[0] == "Reward exact fell from 54 % to 14 %"


@pytest.mark.parametrize(
    "xs, places, texts",
    [
        ([1, 2, 3], [1.0, 2.0, 3.0], ["1", "2", "3"]),
        (list(range(11)), [log2(x + 1) for x in range(11)], [str(x) for x in range(11)]),
        ([x / 10 for x in range(10, 25)], [x / 10 for x in range(10, 25)], None),
        ([0, 1, 8], [0.0, 1.0, 3.1699], ["0", "1", "8"]),
        ([-1.0, 0.5, 9.0], [-1.0, 0.5, 9.0], ["-1", "0.5", "9"]),
        (["a", "b"], [0.0, 1.0], ["a", "b"]),
        ([True, False], [0.0, 1.0], ["true", "false"]),
    ],
)
def test_x_lies_where_it_can_be_read(xs: list[Any], places: list[float], texts: list[str] | None) -> None:
    found, axis = arms.scale(xs)
    assert [found[repr(x)] for x in xs] == pytest.approx(places, abs=1e-4)
    assert axis.get("ticktext") == texts


def test_the_page_of_a_study_has_its_tables_and_verdicts(tmp_path: Path) -> None:
    about = {"sweep": {**STUDY["sweep"], "about": "One is said to be\nbetter."}}
    text = report(write_study(tmp_path / "study", {**STUDY, **about}))
    assert '<p class="lead">One is said to be better.</p>' in text
    assert titles(text) == ["Result", "Claims", "Table", "Paired by seed", "Learning curves", "How it was run"]
    assert "<h1>Forward against reverse KL</h1>" in text
    assert "<td>reverse</td><td>62.00 ± 0.58 %</td><td>54.00 ± 0.58 %</td>" in text
    row = ["Reward exact: forward − reverse at 0", "-10.000 ± 0.012 points", "3", "2.7e-06", "holds"]
    assert "".join(f"<td>{cell}</td>" for cell in row) in text
    assert "<td>forward − reverse</td><td>-10.000 ± 0.012 points (-866.0 errors)</td>" in text
    assert "Reward exact at schedule.k = 16 ended at 29.3 % (reverse), 47.9 % (forward)" in text
    assert len(json.loads(Structure(text).scripts[0])) == 2 + 2 * 3


def test_a_study_that_is_not_finished_says_of_how_many_seeds_it_tells(tmp_path: Path) -> None:
    text = report(write_study(tmp_path / "study", left_out=8))  # all of seed 1, and four of six points of seed 2
    assert "10 of 18 runs; the others are not finished" in text
    assert "(2 of 3 seeds)" in text and "(1 of 3 seeds)" in text


def test_a_page_of_findings_tells_what_the_pages_of_its_chapters_say(tmp_path: Path) -> None:
    study, other = tmp_path / "study.md", tmp_path / "other.md"
    study.write_text("\n".join(markdown_page(Sweep(write_study(tmp_path / "runs" / "study")), tmp_path)))
    other.write_text("# Something else\n\n| a | b |\n\nThe conjecture fails here.\n\nIn short: nothing is left.\n")
    text = "\n".join(index([study, other]))
    there = tmp_path.name
    assert f"python tools/findings.py {study} {other} > docs/findings.md" in text
    claims = "*Holds:* reverse KL starts higher; reverse KL falls faster."
    assert f"\n| [Forward against reverse KL]({there}/study.md) | {claims} |\n" in text
    other_result = "The conjecture fails here. Nothing is left."
    assert text.endswith(f"\n| [Something else]({there}/other.md) | {other_result} |")


def test_a_study_as_markdown_has_its_claims_its_numbers_and_how_it_is_made_again(tmp_path: Path) -> None:
    path = write_study(tmp_path / "study")
    text = "\n".join(markdown_page(Sweep(path), Path("docs")))
    assert f"slipstream sweep {path}/study.toml --output {path}\nslipstream report {path} --markdown docs\n" in text
    assert "| Reward exact | schedule.k = 0 |" in text and "18 runs; seeds 1, 2, 3;" in text
    assert "| reverse | 62.00 ± 0.58 % |" in text and "| -10.000 ± 0.012 points | 2.7e-06 | **holds** |" in text
    assert "![Reward exact: mean over seeds ± one standard error.](study.svg)" in text
    assert "](study-teacher-kl.svg)" in text and "| KL to teacher |" not in text
    assert "\n\nIn short: of 2 claims, 2 hold, 0 do not hold, 0 are open.\n" in text
    assert (
        "| slope against log2(schedule.k + 1) | Reward exact |" in text
        and "| reverse | -" in text.partition("slope")[2]
    )


def test_held_out_rewards_of_a_study_are_shares_only_between_0_and_1(tmp_path: Path) -> None:
    tree: dict[str, Any] = copy.deepcopy(STUDY)
    claim = {"says": "better", "less": "forward", "than": "reverse", "at": 0}
    tree["sweep"] |= {"measure": ["eval/accuracy"], "claims": [claim]}
    tree |= {"data": {"eval": "held-out"}, "eval": {"every": 10}}
    path = write_study(tmp_path / "study", tree)
    shares = "\n".join(markdown_page(Sweep(path), tmp_path))
    for file in path.rglob("metrics.jsonl"):
        lines = [line | {"accuracy": 10 * line.get("accuracy", 0.0)} for line in read_lines(file)]
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rewards = "\n".join(markdown_page(Sweep(path), tmp_path))
    assert "| better | Held-out accuracy: forward − reverse at 0 | 0 ± 0 points |" in shares
    assert "| reverse | 60 ± 0 % | 60 ± 0 % | 60 ± 0 % |" in shares
    assert "| better | Held-out reward: forward − reverse at 0 | 0 ± 0 |" in rewards
    assert "| reverse | 6 ± 0 | 6 ± 0 | 6 ± 0 |" in rewards and "%" not in rewards


def test_a_study_as_markdown_says_what_its_names_say(tmp_path: Path) -> None:
    tree = copy.deepcopy(STUDY)
    tree["sweep"]["claims"][0]["says"] = "KL(p|q)\nstarts higher"
    path = write_study(tmp_path / "my study", tree)
    text = "\n".join(markdown_page(Sweep(path), Path("docs")))
    assert "| KL(p\\|q) starts higher | Reward exact" in text
    assert f"slipstream report '{path}' --markdown docs\n" in text and "](my%20study.svg)" in text


def test_results_of_an_arm_that_sets_an_empty_table_say_so(tmp_path: Path) -> None:
    tree = copy.deepcopy(STUDY)
    tree["sweep"]["arms"] = {"guarded": {"guards.ess": {}}, "plain": {}}
    tree["sweep"] |= {"claims": [], "measure": ["tokens"]}
    rows = Sweep(write_study(tmp_path / "study", tree)).rows()
    assert {row["arm"]: row["guards.ess"] for row in rows} == {"guarded": {}, "plain": None}
    assert {(row["measure/tokens"], row["tokens"]) for row in rows} == {(1000.0, 30000.0)}


def test_an_update_of_a_collapse_is_counted_from_the_start_of_the_run() -> None:
    rewards = [0.8] * 40 + [0.0] * 40
    assert ending([*range(101, 181)], rewards) == "0.8, collapsed at update 144"
    assert ending([*range(1, 81)], rewards) == "0.8, collapsed at update 44"


def test_measures_on_several_held_out_sets_are_told_apart() -> None:
    assert [charts.measure_row(name).title for name in ("eval/accuracy", "eval/hard/accuracy")] == [
        "Held-out accuracy",
        "Held-out accuracy on hard",
    ]


def test_a_study_without_x_has_one_table_of_the_measures_that_claims_are_about(tmp_path: Path) -> None:
    tree = copy.deepcopy(STUDY)
    claims = [{"says": "reverse is better", "less": "forward", "than": "reverse"}]
    tree["sweep"] = {key: value for key, value in tree["sweep"].items() if key not in ("x", "grid")} | {
        "claims": claims
    }
    one = "\n".join(markdown_page(Sweep(write_study(tmp_path / "one", tree)), Path("docs")))
    assert "|  | Reward exact |\n| --- | --- |\n| reverse | 62.00 ± 0.58 % |\n| forward | 52.00 ± 0.59 % |\n" in one
    tree["sweep"]["claims"].append(
        {"says": "forward is nearer", "measure": "teacher/kl", "less": "forward", "than": 9.0}
    )
    both = "\n".join(markdown_page(Sweep(write_study(tmp_path / "both", tree)), Path("docs")))
    assert "| reverse | 62.00 ± 0.58 % | 0.30200 ± 0.00058 |\n" in both and "of 2 claims, 2 hold" in both


def test_a_learning_curve_is_the_mean_of_its_seeds(tmp_path: Path) -> None:
    sweep = Sweep(write_study(tmp_path / "study"))
    runs = arms.lines_of(sweep)[("reverse", "0")]
    curve = arms.learning_curve(runs, "reward/exact", clock=False)
    assert curve is not None
    updates, values, errors = curve
    assert updates == [float(i) for i in range(1, 31)] and values == pytest.approx([0.62] * 30)
    assert errors == pytest.approx([0.01 / 3**0.5] * 30)
    by_time = arms.learning_curve(runs, "reward/exact", clock=True)
    assert by_time is not None and by_time[0] == [i / 2 for i in range(1, 31)]
    assert (
        arms.learning_curve([], "reward/exact", clock=False) is arms.learning_curve(runs, "none", clock=False) is None
    )


def test_a_study_that_measures_time_shows_what_is_learned_in_it(tmp_path: Path) -> None:
    tree: dict[str, Any] = copy.deepcopy(STUDY)
    tree["sweep"] |= {"measure": ["eval/accuracy", "time"], "claims": []}
    tree |= {"data": {"eval": "held-out"}, "eval": {"every": 10}}
    path = write_study(tmp_path / "study", tree)
    found = json.loads(Structure(report(path)).scripts[0])
    axes = [figure["layout"]["xaxis"]["title"]["text"] for figure in found.values()]
    assert axes == ["age of rollouts, updates (schedule.k)"] * 2 + ["update", "seconds since the run began"] * 3
    over_time = found["figure-4"]
    assert over_time["data"][1]["x"] == [0.0, 5.0, 10.0, 15.0] and over_time["data"][1]["y"] == [0.1, 0.3, 0.5, 0.6]
