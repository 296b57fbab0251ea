"""Files in a model's directory: every fault is one line, the same from `config --check` and `train`."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.cli import main
from slipstream.engines.native import files
from slipstream.engines.native.files import check_complete, finite, read_through, weights_of
from slipstream.errors import ModelError
from slipstream.models.resolve import model_path
from support.model_files import EMBEDDINGS, FAULTS, FIRST, changed, narrower, pickled, sharded, weights

BASE = """
student = "model"
updates = 1
output = "run"
[teachers.main]
model = "builtin:teacher"
[data]
limit = 8
[sampler]
max_tokens = 8
[learner]
batch_size = 4
[runtime]
kind = "inline"
device = "cpu"
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(BASE)
    shutil.copytree(model_path("builtin:student"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_model_is_one_line_from_check_and_train(
    fault: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage, line = FAULTS[fault]
    damage(model)
    said = []
    for words in (["config", "run.toml", "--check"], ["train", "run.toml"]):
        assert main(words) == 2
        said.append(capfd.readouterr().err.splitlines())
    assert said[0] == said[1] and len(said[0]) == 1
    assert said[0][0].startswith("error: ") and line in said[0][0]
    assert not (model.parent / "run").exists()


@pytest.mark.parametrize("written", [lambda path: None, sharded, pickled])
def test_sound_weights_are_counted_however_they_are_written(
    written: Callable[[Path], None], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sum(tensor.numel() for tensor in weights(model).values())
    written(model)
    check_complete("model")
    assert read_through("model") == expected
    monkeypatch.setattr(files, "READ_BYTES", 100)
    assert read_through("model") == expected


def test_check_says_what_it_read_and_what_it_did_not(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["config", "run.toml", "--check"]) == 0
    said = capsys.readouterr().out
    assert "# weights of model: complete, 142,208 finite numbers (0.5 MiB read in 0." in said
    assert "# weights of builtin:teacher: complete, 317,952 finite numbers (1.2 MiB read in 0." in said
    monkeypatch.setattr(files, "is_local", lambda name: name != "model")
    known = files.file_of
    monkeypatch.setattr(files, "file_of", lambda name, file: None if name == "model" else known(name, file))
    assert main(["config", "run.toml", "--check"]) == 0
    assert "# weights of model: not checked, as they are not on this machine yet" in capsys.readouterr().out


def test_names_that_only_a_loader_knows_are_left_to_it(model: Path) -> None:
    changed(model, lambda held: held.update({"model.layers.0.mlp.down.weight": held.pop(FIRST)}))
    check_complete("model")


def test_either_of_two_tied_weights_may_be_the_one_that_is_there(model: Path) -> None:
    changed(model, lambda held: held.update({"lm_head.weight": held.pop(EMBEDDINGS)}))
    check_complete("model")
    changed(model, lambda held: held.update({EMBEDDINGS: held["lm_head.weight"].clone()}))
    check_complete("model")


def test_a_tokenizer_with_more_tokens_than_the_model_is_warned_of(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrower(model, 38)
    (model.parent / "rows.jsonl").write_text('{"prompt": "A1"}\n' * 8)
    assert main(["config", "run.toml", "--check", "--data.train", "rows.jsonl"]) == 0
    warning = "# warning: the tokenizer of model has 1 tokens beyond the 38 embeddings of the model, '=' first: prompts"
    assert warning in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_sum_that_overflows_is_no_fault_and_a_cancelled_infinity_is(dtype: torch.dtype) -> None:
    assert finite(torch.full((4,), torch.finfo(dtype).max, dtype=dtype))
    assert finite(torch.zeros(0, dtype=dtype))
    assert not finite(torch.tensor([float("inf"), -float("inf")], dtype=dtype))
    assert not finite(torch.tensor([0.0, float("nan")], dtype=dtype))


def test_where_nothing_lies_there_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        weights_of(str(tmp_path / "nowhere"))
