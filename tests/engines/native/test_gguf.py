"""GGUF files as models: converted once, trained like any other model, and refused in one line if broken."""

import io
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from slipstream.config.file import parse
from slipstream.errors import ModelError
from slipstream.models.resolve import model_path
from slipstream.runs.start import train
from support.slow_cases import with_slow

HIDDEN, LAYERS, HEADS, INNER = 32, 2, 2, 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream" / "gguf"


def write(path: Path, *, quantised: bool) -> dict[str, np.ndarray]:
    """Write a tiny Llama whose tokens are bytes; return its tensors."""
    tokens = [*bytes_to_unicode().values(), "ab", "<|end|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in BLOCK.items()}
    tensors = {name: rng.normal(size=shape, scale=0.2).astype(np.float32) for name, shape in shapes.items()}
    for name, values in tensors.items():
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, packed := gguf.quants.quantize(values, kind), raw_dtype=kind)
            tensors[name] = gguf.quants.dequantize(packed, kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


BLOCK = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, HIDDEN)),
    "ffn_down": (HIDDEN, INNER),
}


@pytest.mark.parametrize("quantised", with_slow([False, True], quick=[True]))
def test_a_file_becomes_a_directory_once_with_exactly_its_weights(quantised: bool, tmp_path: Path, cache: Path) -> None:
    tensors = write(tmp_path / "tiny.gguf", quantised=quantised)
    path = Path(model_path(str(tmp_path / "tiny.gguf")))
    assert path.parent == cache and path.name.startswith("tiny-")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert model.dtype == torch.float32
    for name, own in (
        ("ffn_down", model.model.layers[1].mlp.down_proj),
        ("attn_v", model.model.layers[1].self_attn.v_proj),
    ):
        np.testing.assert_array_equal(own.weight.detach().numpy(), tensors[f"blk.1.{name}.weight"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer("Hi ä")["input_ids"]) == "Hi ä"
    written = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert model_path(str(tmp_path / "tiny.gguf")) == str(path)
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == written
    write(tmp_path / "tiny.gguf", quantised=not quantised)
    assert model_path(str(tmp_path / "tiny.gguf")) != str(path), "another file under the same name"


def test_student_and_teacher_may_be_gguf_files(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", quantised=True)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "abc"}\n' * 4)
    tree = {
        "student": str(tmp_path / "tiny.gguf"),
        "updates": 1,
        "output": str(tmp_path / "run"),
        "teachers": {"main": {"model": str(tmp_path / "tiny.gguf")}},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "sampler": {"max_tokens": 4},
        "learner": {"batch_size": 2},
        "runtime": {"kind": "inline", "device": "cpu"},
    }
    text = io.StringIO()
    run = train(parse(tree), Console(file=text), name="run", checks=False)
    assert AutoModelForCausalLM.from_pretrained(run / "final").config.num_hidden_layers == LAYERS


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and nothing else")
    with pytest.raises(ModelError, match=r"broken\.gguf: transformers cannot read this GGUF file: \S+"):
        model_path(str(tmp_path / "broken.gguf"))
    assert list(cache.iterdir()) == []
    with pytest.raises(ModelError, match=r"none\.gguf: no such file$"):
        model_path(str(tmp_path / "none.gguf"))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "tiny.gguf", quantised=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tiny.gguf"))
    with pytest.raises(ModelError, match=r"cannot be written: Not a directory; set XDG_CACHE_HOME to a directory of"):
        model_path(str(tmp_path / "tiny.gguf"))


def test_a_conversion_that_was_killed_leaves_nothing_for_long(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "tiny.gguf", quantised=False)
    (cache.parent / "converting-killed").mkdir(parents=True)
    path = Path(model_path(str(tmp_path / "tiny.gguf")))
    assert list(cache.iterdir()) == [path] and list(cache.parent.iterdir()) == [cache]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr("slipstream.models.gguf.find_spec", lambda name: None if name == "accelerate" else object())
    with pytest.raises(ModelError, match=r"needs accelerate: pip install 'slipstream\[gguf\]'"):
        model_path(str(tmp_path / "a.gguf"))
