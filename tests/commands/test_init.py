"""`slipstream init`: configs for six situations, each of which the check accepts and trains in miniature."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import train
from slipstream.cli import main
from slipstream.commands.init import SITUATIONS, config_for
from slipstream.commands.table import COMMANDS
from slipstream.config.file import load
from slipstream.config.schema import Config
from slipstream.errors import ConfigError

SMALL = {
    "student": "builtin:student",
    "updates": "1",
    "data.train": "builtin:arithmetic",
    "data.split": "train",
    "data.chat": "false",
    "sampler.max_tokens": "8",
    "sampler.dtype": "float32",
    "learner.batch_size": "8",
    "learner.compute_dtype": "float32",
    "learner.warmup": "0",
    "runtime.kind": "inline",
    "runtime.device": "cpu",
    "checkpoint.minutes": "0",
    "health.stop": "false",
}
TOOLS = {"student": "builtin:tool_student", "data.train": "builtin:table", "sampler.max_tokens": "150"}
OWN: dict[str, dict[str, str]] = {
    "distil": {"teachers.main.model": "builtin:teacher"},
    "reward": {"teachers.main.model": "builtin:teacher", "data.eval": "none", "eval.every": "0"},
    "tools": {**TOOLS, "data.eval": "none", "eval.every": "0"},
    "self": {"teachers.main.context": "{prompt}{ground_truth}"},
    "one_gpu": {"teachers.main.model": "builtin:teacher"},
}


def written(situation: str, path: Path, changes: dict[str, str]) -> Config:
    path.write_text(config_for(situation), "utf-8")
    dtypes = {} if situation in ("tools", "agent") else {"teachers.main.dtype": "float32"}
    return load(path, [*(SMALL | dtypes | changes).items()], say=str)


def test_the_table_of_commands_lists_every_situation() -> None:
    (command,) = [command for command in COMMANDS if command.name == "init"]
    (choices,) = [option.settings["choices"] for option in command.options if "choices" in option.settings]
    assert choices == list(SITUATIONS)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_config_is_read_as_it_is(situation: str, tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(config_for(situation), "utf-8")
    assert load(tmp_path / "train.toml", say=str).updates >= 80


@pytest.mark.parametrize("situation", OWN)
def test_every_config_trains_in_miniature(situation: str, tmp_path: Path) -> None:
    changes = OWN[situation] | {"output": str(tmp_path / "run")}
    run = train(written(situation, tmp_path / "train.toml", changes))
    assert (run.path / "final" / "config.json").is_file()


def test_a_file_is_written_once_and_says_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--for", "tools"]) == 0
    assert "next: slipstream config train.toml --check" in capsys.readouterr().out
    assert main(["config", "train.toml", "--check"]) == 0
    capsys.readouterr()
    assert main(["init", "--for", "self"]) == 2
    assert "train.toml exists: name another file, or remove it" in capsys.readouterr().err
    assert main(["init", "missing/train.toml", "--for", "self"]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "kind"), [("3", "tools"), ("self", "self")])
def test_a_terminal_is_asked(
    answer: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    assert main(["init", str(tmp_path / "own.toml")]) == 0
    assert (tmp_path / "own.toml").read_text("utf-8") == config_for(kind)
    printed = capsys.readouterr().out
    assert all(what in printed for what in SITUATIONS.values())


@pytest.mark.parametrize("answer", ["7", "0", "none"])
def test_a_wrong_answer_names_the_choices(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: Any) -> str:
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", read)
    from slipstream.commands.init import ask

    with pytest.raises(ConfigError, match="is none of distil, reward"):
        ask()


def test_without_a_terminal_the_situation_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "never.toml"]) == 2
    assert "name a situation: --for distil, reward" in capsys.readouterr().err
