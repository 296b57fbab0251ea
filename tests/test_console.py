"""Text of models, endpoints and data is shown on a terminal and never obeyed by it, whichever command prints it."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slipstream.cli import main
from slipstream.commands import table as table_of_commands
from slipstream.console import Screen
from slipstream.errors import ConfigError, printable

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\r\b\u202eevil\u2066\u200b\u2028\ud800"
OBEYED = set(HOSTILE) - set("]0;title[2J31mevil")
KEPT = Path(__file__).parent / "fixtures" / "format_1"


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert printable("a\n\tb é 漢字 \U0001f600") == "a\n\tb é 漢字 \U0001f600"
    assert printable("\x1b[2J\r\u202e\u200b\u2028\ud800\x9b") == r"\x1b[2J\r\u202e\u200b\u2028\ud800\x9b"
    assert printable(printable(HOSTILE)) == printable(HOSTILE) and not OBEYED & set(printable(HOSTILE))


def test_the_screen_of_all_commands_keeps_its_own_styles_and_nothing_else() -> None:
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=True, color_system="standard", width=60)
    screen.print(Text(HOSTILE, style="bold red"))
    screen.print(HOSTILE, markup=False, highlight=False, soft_wrap=True)
    table = Table()
    table.add_column(Text(HOSTILE))
    table.add_row(Text(HOSTILE))
    with Live(table, console=screen, auto_refresh=False) as live:
        live.refresh()
    text = file.getvalue()
    assert "\x1b[1;31m" in text and not {"\x07", "\x9b", "\b", "\u202e", "\u2066", "\ud800"} & set(text)
    assert "\x1b]0" not in text and "\x1b[2J" not in text
    commands = [path.read_text("utf-8") for path in Path(table_of_commands.__file__).parent.glob("*.py")]
    assert {words for text in commands for words in re.findall(r"\bConsole\((.*?)\)", text)} == {"quiet=True"}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose prompts, answers, ids, teacher, rewards and causes say what no terminal should hear."""
    shutil.copytree(KEPT, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    quotes = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for quote in quotes:
        quote |= dict.fromkeys(
            ("prompt", "response", "prompt_id", "teacher", "context", "context_id", "finish"), HOSTILE
        )
        quote |= {"rewards": {HOSTILE: 1.0}, "tokens": [HOSTILE for _ in quote["tokens"]]}
    (run / "samples.jsonl").write_text("".join(json.dumps(quote) + "\n" for quote in quotes))
    dropped = {"number": 99, "end": "dropped", "reason": HOSTILE, "cause": HOSTILE, "version": 4}
    with (run / "ledger.jsonl").open("a") as ledger:
        ledger.write(json.dumps(dropped) + "\n")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {f"reward/{HOSTILE}": 1.0, f"teacher/{HOSTILE}/kl": -1.0, f"restarts/{HOSTILE}": 1.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize(
    "words",
    [
        ["watch", "run", "--once"],
        ["samples", "run", "-n", "9"],
        ["advise", "run"],
        ["report", "run", "-o", "page.html"],
        ["report", "run", "-o", f"{HOSTILE[:-1]}/page.html"],
        ["train", f"{HOSTILE[:-1]}.toml"],
        ["config", "run/config.toml", f"--{HOSTILE[:-1]}", "1"],
        ["eval", f"no/{HOSTILE[:-1]}"],
        ["resume", HOSTILE[:-1]],
        ["estimators", HOSTILE[:-1]],
        ["scale", HOSTILE[:-1]],
    ],
    ids=lambda words: f"{words[0]} {len(words)}",
)
def test_no_command_hands_it_on(hostile: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(words)
    out, err = capsys.readouterr()
    assert (out or err) and not OBEYED & set(out.replace("\n", "") + err.replace("\n", ""))


def test_an_error_of_an_endpoint_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> int:
        raise ConfigError(f"teachers.main: the endpoint said {HOSTILE}\nand more")

    monkeypatch.setattr("slipstream.commands.estimators.run", fails)
    assert main(["estimators"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not OBEYED & set(error.replace("\n", "")) and error.endswith(" and more\n")
