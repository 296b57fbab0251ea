"""docs/map.md: the settings that it names are accepted, and choose something."""

import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.file import parse
from slipstream.errors import ConfigError
from slipstream.plan.plan import fast_checks

PAGE = Path(__file__).parents[2] / "docs" / "map.md"
ROWS = re.findall(r"^\| ([^|]+) \| (works|in part|planned|no) \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
SETTING = re.compile(r"`([a-z_.]+\.[a-z_]+) = ([^`]+)`")
CHOSEN = {name: SETTING.findall(text) for name, answer, text in ROWS if answer in ("works", "in part")}
BASE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 2,
    "task": {"reward": "exact"},
    "sampler": {"max_tokens": 8, "group": 4},
    "learner": {"batch_size": 8},
    "policy": {"loss": "vanilla"},
    "loss": {"weight": 0.0},
    "runtime": {"kind": "inline", "device": "cpu"},
}


def beside(settings: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the sections of a run with a teacher, for settings that need one."""
    teaches = any(key.startswith(("loss.tokens", "sampler.fusion")) for key, _ in settings)
    return {"loss": {"weight": 1.0}, "teachers": {"main": {"model": "builtin:teacher"}}} if teaches else {}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_settings_of_a_method_are_accepted(name: str) -> None:
    assert CHOSEN[name], "a method that works has settings"
    fast_checks(parse(BASE | beside(CHOSEN[name]), CHOSEN[name], say=lambda _: None))
    with pytest.raises(ConfigError):
        key, _ = CHOSEN[name][0]
        parse(BASE, [(key, "[[]]")], say=lambda _: None)


def test_every_row_is_read_and_named_once() -> None:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    assert len(lines) - len(ROWS) == 4, "beside the rows there are the headings of four tables"
    assert len({name for name, _, _ in ROWS}) == len(ROWS) >= 48
