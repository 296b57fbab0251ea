"""Sources whose rows a package makes, in a process of its own: rows in order, and one line for each way to fail."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config.data import DataConfig
from slipstream.config.integrations import INTEGRATIONS, Integration
from slipstream.data.prompts import check_there, load_rows
from slipstream.data.sources import has_splits
from slipstream.errors import ConfigError, DataError
from slipstream.rewards import grading

WAYS = ("squares", "refuses", "raises", "leaves", "says_nothing", "bad_row")


@pytest.fixture(autouse=True)
def makers(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in WAYS:
        monkeypatch.setitem(INTEGRATIONS, way, Integration("", f"support.row_makers:{way}"))
    monkeypatch.setitem(
        INTEGRATIONS, "absent_package", Integration("no_such_module", "nowhere:rows", "nowhere:kind_of")
    )
    monkeypatch.setitem(INTEGRATIONS, "directory", Integration("", "nowhere:rows", has_splits=False))


def test_rows_are_the_same_in_every_process_and_a_limit_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    rows = load_rows("squares:of", split="eval", limit=40, say=lines.append)
    assert [row.ground_truth for row in rows] == [str(number**2) for number in range(40)]
    assert rows[7].place == "squares:of[eval]:8" and str(rows[7].prompt).endswith(" 7^2")
    assert rows == load_rows("squares:of", split="eval", limit=40) and not lines
    monkeypatch.setattr("slipstream.data.generated.GENERATED_ROWS", 3)
    assert len(load_rows("squares:of")) == 3
    given = DataConfig(template="{prompt}=")
    assert str(load_rows("squares:of", given, limit=1)[0].prompt).endswith(" 0^2=")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("refuses:x", "refuses:x: there is no 'x'"),
        ("raises:x", "raises:x: KeyError: 'x'"),
        ("leaves:x", "leaves:x: the process that makes its rows ends: exit status 3"),
        ("says_nothing:x", "says_nothing:x: no rows"),
        ("bad_row:x", "bad_row:x[train]:1: the prompt is empty"),
        ("squares:", "squares:: names nothing: write squares:NAME"),
        ("absent_package:x", "absent_package:x: needs no-such-module: pip install 'slipstream[absent-package]'"),
    ],
)
def test_every_failure_is_one_line_with_the_source(source: str, line: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(line)}"):
        load_rows(source, limit=20)


def test_a_source_without_package_or_rows_to_choose_is_refused_before_anything_starts() -> None:
    with pytest.raises(DataError, match="needs no-such-module"):
        check_there("absent_package:x", "train")
    check_there("squares:x", "train")
    with pytest.raises(ConfigError, match="choose rows by columns, and squares:x has none: drop them"):
        load_rows("squares:x", where={"level": 3})
    assert has_splits("squares:x") and not has_splits("directory:x")


def test_check_refuses_an_absent_package_as_train_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(
        'student = "builtin:student"\nteachers.main.model = "builtin:teacher"\n[data]\ntrain = "absent_package:x"\n'
    )
    path, played = str(tmp_path / "c.toml"), ["--environment.use", "absent_package:x", "--data.train", "builtin:table"]
    for command in (["config", path, "--check"], ["train", path]):
        assert main(command) == 2
        assert "absent_package:x: needs no-such-module: pip install" in capsys.readouterr().err
        assert main([*command, *played]) == 2
        assert "environment.use = 'absent_package:x' needs no-such-module: pip" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed")
def test_the_scorer_of_reasoning_gym_is_refused_without_its_package() -> None:
    line = "task.reward = 'reasoning_gym' needs reasoning-gym: pip install 'slipstream[reasoning-gym]'"
    with pytest.raises(ConfigError, match=re.escape(line)):
        grading.needs(["reasoning_gym"])
