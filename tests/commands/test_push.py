"""`slipstream push`: what would be sent, what is sent, and what is refused. The hub is a service, and a fake here."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError

from slipstream import train
from slipstream.cli import main
from slipstream.config.file import parse
from slipstream.models.model_card import loading
from slipstream.run_dir.reading import RunDir

TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 1,
    "teachers": {"main": {"model": "builtin:teacher"}},
    "sampler": {"max_tokens": 8},
    "learner": {"batch_size": 8},
    "schedule": {"kind": "sync"},
    "runtime": {"kind": "inline", "device": "cpu"},
}
EXPECTED = {"README.md", "config.json", "model.safetensors", "run/config.toml", "run/metrics.jsonl", "run/report.html"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(parse(TREE | {"output": str(tmp_path_factory.mktemp("runs") / "run")})).path


class Hub:
    """A hub that remembers what it got."""

    sent: ClassVar[list[dict[str, bytes]]] = []
    made: ClassVar[list[tuple[str, bool]]] = []

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        if "/" not in name:
            raise HFValidationError("Repo id must be in the form 'namespace/repo_name'")
        if name == "nobody/there":
            raise httpx2.ConnectError("no route to the hub")
        self.made.append((name, private))
        assert exist_ok
        return f"hub:{name}"

    def create_commit(self, name: str, operations: list[Any], *, commit_message: str) -> None:
        self.sent.append({each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations})


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    Hub.sent, Hub.made = [], []
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


def test_a_dry_run_lists_the_files_and_sends_nothing(
    finished: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(finished), "--to", "me/student", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPECTED)
    assert "would be sent to the private repository me/student" in printed and not hub.sent and not hub.made


@pytest.mark.parametrize("public", [False, True])
def test_the_student_is_sent_in_one_commit(
    public: bool, finished: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(finished), "--to", "me/student", *["--public"] * public]) == 0
    assert hub.made == [("me/student", not public)] and "done: hub:me/student" in capsys.readouterr().out
    (sent,) = hub.sent
    assert sent.keys() >= EXPECTED
    assert sent["model.safetensors"] == (finished / "final" / "model.safetensors").read_bytes()
    assert json.loads(sent["run/metrics.jsonl"].splitlines()[-1])["update"] == 1
    assert b"<html" in sent["run/report.html"]


def test_the_card_that_is_sent_loads_the_student_from_the_hub(
    tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its other text stays as a person has edited it; the base of an adapter must be somewhere, too."""
    learner = {"batch_size": 8, "lora": {"rank": 2}}
    monkeypatch.chdir(tmp_path)
    shutil.move(train(parse(TREE | {"output": "first/run", "learner": learner})).path, run := tmp_path / "run")
    card = run / "final" / "README.md"
    card.write_text("# My student\n" + card.read_text("utf-8") + "\n## Thanks\n", "utf-8")
    assert main(["push", str(run / "final"), "--to", "me/student"]) == 0
    sent = hub.sent[0]["README.md"].decode()
    assert sent.startswith("# My student\n") and sent.endswith("```\n\n## Thanks\n") and "first/run" not in sent
    assert 'AutoModelForCausalLM.from_pretrained("me/student")' in sent
    assert "peft" not in sent, "its base is built in, and so on no hub"
    config = RunDir(run).config.model_dump(mode="json") | {"student": "someone/small-model"}
    on_hub = loading(config, run / "final", "me/student")
    assert 'base = AutoModelForCausalLM.from_pretrained("someone/small-model")' in on_hub
    assert 'model = PeftModel.from_pretrained(base, "me/student", subfolder="adapter")' in on_hub
    assert "vllm serve me/student --dtype bfloat16" in sent and "slipstream export" not in sent
    assert "note: final/adapter names a directory of this machine as its base (/" in capsys.readouterr().err


def test_what_cannot_be_sent_costs_one_line(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").touch()
    damaged = shutil.copytree(finished, tmp_path / "damaged")
    with (damaged / "final" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    for directory, name, line in (
        (tmp_path, "me/student", "has no finished student: final is written when the run ends"),
        (finished, "student", "--to student: write OWNER/NAME, by which the card loads the student"),
        (finished, "me/a/student", "--to me/a/student: Repo id must be in the form"),
        (finished, "nobody/there", "the hub did not take nobody/there: no route to the hub"),
        (damaged, "me/student", "final is damaged: model.safetensors differs from what was saved"),
    ):
        dry = [] if name == "nobody/there" else ["--dry-run"]
        assert main(["push", str(directory), "--to", name, *dry]) == 2
        (only,) = capsys.readouterr().err.splitlines()
        assert line in only
