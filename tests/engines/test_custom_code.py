"""Code in the directory of a model is not run, even if somebody at the terminal would answer "y"."""

import io
import json
import shutil
from pathlib import Path

import pytest

from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.config import load_config
from slipstream.engines.native.model import load_model
from slipstream.engines.native.reward_model import Scorer
from slipstream.engines.native.reward_process import RewardModel
from slipstream.errors import ModelError
from slipstream.models.resolve import model_path

CLASSES = "AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModelForSequenceClassification"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose code would write the file `ran`."""
    path, own = tmp_path / "model", dict.fromkeys(CLASSES, "own.Own")
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "tokenizer.json").write_text("{}")
    (path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return path


def test_code_of_a_model_is_not_run(model: Path) -> None:
    why = "contains custom code"
    with pytest.raises(ModelError, match=why):
        load_config(str(model))
    with pytest.raises(ModelError, match=why):
        load_tokenizer(str(model))
    with pytest.raises(ModelError, match=why):
        load_model(str(model), dtype="float32", device="cpu")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model_path("builtin:student")) / file, model / file)
    settings = RewardModel(path=str(model), max_length=9, batch=1, dtype="float32", device="cpu", timeout=9.0)
    with pytest.raises(ValueError, match=why):
        Scorer(settings)
    assert not (model.parent / "ran").exists()
