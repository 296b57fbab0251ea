"""Options of `eval --suite`; tests/with_agents has lm-evaluation-harness itself."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.commands import suite
from slipstream.commands.suite import template_settings
from slipstream.config.file import parse
from slipstream.errors import ConfigError
from slipstream.plan.subject import EvaluatedModel

REFUSED = {
    "tasks without names": (["--suite-path", "tasks"], "--suite-path: name the tasks in that directory with --suite"),
    "other data": (
        ["--suite", "sums", "--data", "math.jsonl", "-n", "4"],
        "--suite: its tasks have their own data, prompts and scores: drop data, n",
    ),
    "an engine": (
        ["--suite", "sums", "--engine", "vllm"],
        "--suite: its tasks have their own data, prompts and scores: drop engine",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_a_suite_ignores_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, line = REFUSED[name]
    assert main(["eval", "builtin:student", *words]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


TEMPLATES: list[tuple[dict[str, Any], dict[str, Any], tuple[bool, str | None]]] = [
    ({}, {}, (False, None)),
    ({"data": {"chat": True}}, {}, (True, None)),
    ({"environment": {"use": "table"}}, {}, (True, None)),
    ({"environment": {"use": "table"}}, {"chat": False}, (False, None)),
    ({"data": {"system_prompt": "Be brief."}}, {}, (True, "Be brief.")),
    ({"data": {"system_prompt": "Be brief."}}, {"chat": False}, (False, None)),
    ({}, {"chat": True}, (True, None)),
]


@pytest.mark.parametrize(("sections", "options", "settings"), TEMPLATES)
def test_the_template_and_system_message_are_those_of_the_run(
    sections: dict[str, Any], options: dict[str, Any], settings: tuple[bool, str | None]
) -> None:
    config = parse({"student": "s", "teachers": {"main": {"model": "t"}}, **sections})
    assert template_settings(config, options) == settings
    assert template_settings(None, options) == (options.get("chat", False), None)


def test_the_rows_of_the_run_say_whether_prompts_are_messages(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "?"}], "answer": "x"}\n')
    sections: dict[str, Any] = {"student": "s", "teachers": {"main": {"model": "t"}}}
    config = parse({**sections, "data": {"train": {"a": str(tmp_path / "rows.jsonl"), "b": "builtin:arithmetic"}}})
    assert template_settings(config, {}) == (True, None)
    assert template_settings(config, {"chat": False}) == (False, None)
    gone = parse({**sections, "data": {"train": str(tmp_path / "gone.jsonl")}})
    assert template_settings(gone, {"chat": True}) == (True, None), "no row is read"
    with pytest.raises(
        ConfigError, match=r"gone.jsonl.*: a row of the run's data decides .*: write --data.chat or --no-data.chat"
    ):
        template_settings(gone, {})


def test_a_missing_harness_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "lm_eval" else find(name, *rest)
    )
    assert main(["eval", "builtin:student", "--suite", "sums"]) == 2
    assert capsys.readouterr().err == ("error: --suite needs lm-evaluation-harness: pip install 'slipstream[suite]'\n")


def test_tasks_are_scored_with_the_settings_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def simple_evaluate(_: str, **options: Any) -> dict[str, Any]:
        asked.append(options)
        return {"n-samples": {}, "results": {}}

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))
    monkeypatch.setattr(suite, "task_manager", lambda *_: None)
    data = {"chat": True, "template_args": {"enable_thinking": False}}
    run = {"seed": 7, "data": data, "sampler": {"dtype": "bfloat16"}, "runtime": {"device": "cpu"}}
    config = parse({"student": "builtin:student", "teachers": {"main": {"model": "t"}}, **run})
    suite.measure_suite(EvaluatedModel("builtin:student", config=config), {"suite": ["sums"]})
    suite.measure_suite(EvaluatedModel("builtin:student", config=config), {"suite": ["sums"], "seed": 3, "chat": False})
    suite.measure_suite(EvaluatedModel("builtin:student"), {"suite": ["sums"]})
    of_run, given, alone = asked
    assert (of_run["random_seed"], given["random_seed"], alone["random_seed"]) == (7, 3, 0)
    assert [each["model_args"]["dtype"] for each in asked] == ["bfloat16", "bfloat16", "float32"]
    assert of_run["model_args"]["chat_template_args"] == {"enable_thinking": False} and of_run["device"] == "cpu"
    assert "chat_template_args" not in given["model_args"] | alone["model_args"]
