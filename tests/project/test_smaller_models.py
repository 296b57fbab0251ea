"""The tools that make the student of `make real`: they leave out layers, and make up for them by least squares."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from leave_out_layers import choose, save
from real_models import Answer, forward_kl, log_probs
from refit import refit
from slipstream.commands.config import load_config
from slipstream.engines.native.model import LanguageModel, load_model
from support.model_directories import build_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """A model of six layers, in which the third and the fourth do little."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, num_hidden_layers=6, vocab_size=len(tokenizer), initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in model.model.layers[2:4]:
            for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
                matrix.weight *= 0.2
    path = tmp_path_factory.mktemp("whole")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return load_model(str(path), dtype="float32", device="cpu")


def drawn(count: int, seed: int) -> list[Answer]:
    ids = np.random.default_rng(seed).integers(3, 90, (count, 24)).tolist()
    return [Answer(each[:4], each[4 : 24 - number % 5], ended=True) for number, each in enumerate(ids)]


def test_the_least_harmful_layers_are_left_out_and_the_others_make_up_for_them(whole: LanguageModel) -> None:
    fitted, judged = drawn(160, 1), drawn(16, 2)
    before = {name: each.clone() for name, each in whole.model.state_dict().items()}
    left_out = choose(whole, 2, fitted, judged)
    assert sorted(left_out) == [2, 3]
    assert len(whole.backbone.layers) == 6  # type: ignore[arg-type]
    assert all(torch.equal(each, before[name]) for name, each in whole.model.state_dict().items()), "as it was"

    target = Path(whole.name).parent / "student"
    save(whole.name, left_out, target)
    student = load_model(str(target), dtype="float32", device="cpu")
    with torch.no_grad():
        theirs, own = log_probs(whole, judged), log_probs(student, judged)
        errors = refit(whole, student, fitted, 0.01)
        after = log_probs(student, judged)
    assert errors[0] == (0, 0) and all(after < before for before, after in errors[1:])
    assert forward_kl(theirs, after) < 0.8 * forward_kl(theirs, own), "on other texts"


def test_what_begins_after_the_supervised_start_names_a_checkpoint_that_make_real_keeps() -> None:
    config = load_config(ROOT / "configs" / "real.toml", [])
    files = [each for folder in ("benchmarks", "configs") for each in (ROOT / folder).rglob("*") if each.is_file()]
    begun = [each for each in files if each.suffix in (".py", ".toml")]
    named = {int(n) for each in begun for n in re.findall(r"runs/real/checkpoints/(\d+)", each.read_text("utf-8"))}
    assert config.sft is not None and named == {config.sft.updates} == {config.checkpoint.every}
    assert config.updates // config.checkpoint.every < config.checkpoint.keep, "the oldest one stays"
