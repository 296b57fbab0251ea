"""`slipstream export`: what llama.cpp's converters are asked for, and what is refused; the converters are fakes."""

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slipstream import train
from slipstream.cli import main
from slipstream.config.file import parse
from slipstream.models.resolve import model_path

TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 1,
    "teachers": {"main": {"model": "builtin:teacher"}},
    "sampler": {"max_tokens": 8},
    "learner": {"batch_size": 8, "lora": {"rank": 2}},
    "schedule": {"kind": "sync"},
    "runtime": {"kind": "inline", "device": "cpu"},
}
CONVERTER = """
import json, os, sys
if os.environ.get("FAILS") == "loudly":
    sys.exit("a line\\nError: no tokenizer")
if os.environ.get("FAILS") != "silently":
    with open(sys.argv[sys.argv.index("--outfile") + 1], "wb") as file:
        file.write(b"GGUF" + json.dumps(sys.argv).encode())
"""
"""A converter that writes its arguments."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(parse(TREE | {"output": str(tmp_path_factory.mktemp("runs") / "run")})).path


@pytest.fixture
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "llama.cpp"
    path.mkdir()
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        (path / name).write_text(CONVERTER)
    monkeypatch.setenv("LLAMA_CPP", str(path))
    return path


def arguments(file: Path) -> list[str]:
    """Return what the converter was asked for; it writes beside the file, which appears when it is whole."""
    found: list[str] = json.loads(file.read_bytes().removeprefix(b"GGUF"))
    return [word.replace(f"part-{os.getpid()}-", "") for word in found]


def test_the_merged_student_or_its_adapter_alone(finished: Path, llama_cpp: Path, tmp_path: Path) -> None:
    whole, alone = tmp_path / "whole.gguf", tmp_path / "alone.gguf"
    assert main(["export", str(finished), "--gguf", str(whole)]) == 0
    final = str(finished / "final")
    to = ["--outfile", str(whole), "--outtype", "bf16"]
    assert arguments(whole) == [str(llama_cpp / "convert_hf_to_gguf.py"), final, *to]
    assert main(["export", str(finished), "--gguf", str(alone), "--adapter", "--type", "f32"]) == 0
    to = ["--base", model_path("builtin:student"), "--outfile", str(alone), "--outtype", "f32"]
    assert arguments(alone) == [str(llama_cpp / "convert_lora_to_gguf.py"), f"{final}/adapter", *to]


def test_the_base_of_an_adapter_may_be_a_name_on_the_hub(finished: Path, llama_cpp: Path, tmp_path: Path) -> None:
    run, file = shutil.copytree(finished, tmp_path / "run"), tmp_path / "alone.gguf"
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('"builtin:student"', '"someone/small-model"'))
    adapter = run / "final" / "adapter" / "adapter_config.json"
    adapter.write_text(json.dumps(json.loads(adapter.read_text()) | {"base_model_name_or_path": "someone/small-model"}))
    assert main(["export", str(run), "--gguf", str(file), "--adapter"]) == 0
    assert arguments(file)[2:4] == ["--base-model-id", "someone/small-model"]


def test_the_base_is_the_adapters_own_wherever_the_command_runs(
    llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path of the config would name another model, or a stranger's on the hub."""
    shutil.copytree(model_path("builtin:student"), tmp_path / "models" / "own")
    monkeypatch.chdir(tmp_path)
    run = train(parse(TREE | {"student": "models/own", "output": str(tmp_path / "run")})).path
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["export", str(run), "--gguf", "alone.gguf", "--adapter"]) == 0
    assert arguments(Path("alone.gguf"))[2:4] == ["--base", str(tmp_path / "models" / "own")]


def test_an_interrupted_conversion_leaves_no_file(
    finished: Path, llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: list[str], **how: Any) -> None:
        Path(command[command.index("--outfile") + 1]).write_bytes(b"GGUF and a half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    before = set(tmp_path.iterdir())
    with suppress(KeyboardInterrupt, SystemExit):
        main(["export", str(finished), "--gguf", str(tmp_path / "a.gguf")])
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("fails", "why"), [("loudly", "Error: no tokenizer"), ("silently", "it wrote no GGUF file")])
def test_a_converter_that_fails_is_quoted(
    finished: Path, llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], fails: str, why: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAILS", fails)
    assert main(["export", str(finished), "--gguf", str(tmp_path / "a.gguf")]) == 2
    said = f"error: {llama_cpp / 'convert_hf_to_gguf.py'} cannot convert {finished / 'final'}: {why}\n"
    assert capsys.readouterr().err == said and not (tmp_path / "a.gguf").exists()


def test_what_cannot_be_exported_is_refused(
    finished: Path, llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(["export", *words]) != 0
        return capsys.readouterr().err

    (tmp_path / "there.gguf").touch()
    assert "there.gguf: this file exists: name another, or remove it" in refused(
        str(finished), "--gguf", str(tmp_path / "there.gguf")
    )
    to = ("--gguf", str(tmp_path / "new.gguf"))
    assert "nowhere/a.gguf: there is no directory nowhere" in refused(str(finished), "--gguf", "nowhere/a.gguf")
    adapter = finished / "final" / "adapter"
    assert f"{adapter} is an adapter: name its run, with --adapter" in refused(str(adapter), *to, "--adapter")
    assert f"{adapter} is an adapter: name its run, with --adapter" in refused(str(adapter), *to)
    assert "builtin:student is no run: name the directory of a run" in refused("builtin:student", *to)
    (llama_cpp / "convert_hf_to_gguf.py").unlink()
    line = f"and {llama_cpp} (LLAMA_CPP) has none: clone https://github.com/ggml-org/llama.cpp and set LLAMA_CPP"
    assert line in refused(str(finished), *to)
    monkeypatch.delenv("LLAMA_CPP")
    assert "there is none on the PATH, and LLAMA_CPP is not set: clone" in refused(str(finished), *to)
    plain = train(parse(TREE | {"output": str(tmp_path / "run"), "learner": {"batch_size": 8}})).path
    assert (
        f"--adapter: {plain / 'final'} has no adapter, because the run trained none (learner.lora): drop it"
        in refused(str(plain), *to, "--adapter")
    )
    unfinished = shutil.copytree(finished, tmp_path / "unfinished")
    shutil.rmtree(unfinished / "final")
    assert "has no adapter, because a run saves it at its end" in refused(str(unfinished), *to, "--adapter")
