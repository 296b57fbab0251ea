"""Directories of models with one fault each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

EMBEDDINGS, FIRST = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"
SINGLE, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
Weights = dict[str, torch.Tensor]


def weights(path: Path) -> Weights:
    return load_file(path / SINGLE)


def changed(path: Path, change: Callable[[Weights], Any]) -> None:
    held = weights(path)
    change(held)
    save_file(held, path / SINGLE, {"format": "pt"})


def with_config(path: Path, file: str = "config.json", **changes: Any) -> None:
    told = json.loads((path / file).read_text()) | changes
    (path / file).write_text(json.dumps({name: value for name, value in told.items() if value is not None}))


def sharded(path: Path, *, parts: int = 2) -> None:
    held = weights(path)
    names = {name: f"part-{i % parts}.safetensors" for i, name in enumerate(sorted(held))}
    for part in set(names.values()):
        save_file({name: held[name] for name, where in names.items() if where == part}, path / part, {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (path / SINGLE).unlink()


def pickled(path: Path) -> None:
    torch.save(weights(path), path / PICKLED)
    (path / SINGLE).unlink()


def without_part(path: Path) -> None:
    sharded(path)
    (path / "part-1.safetensors").unlink()


def planted(value: float) -> Callable[[Path], None]:
    return lambda path: changed(path, lambda held: held[FIRST].view(-1)[7:9].fill_(value))


def planted_and_pickled(path: Path) -> None:
    planted(float("inf"))(path)
    pickled(path)


def cut(path: Path) -> None:
    (path / SINGLE).write_bytes((path / SINGLE).read_bytes()[:-1000])


def without(*names: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        for name in names:
            (path / name).unlink()

    return remove


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def endless(path: Path) -> None:
    with_config(path, eos_token_id=None)
    with_config(path, "generation_config.json", eos_token_id=None)
    with_config(path, "tokenizer_config.json", eos_token=None)


def narrower(path: Path, size: int) -> None:
    """Number of embeddings that the model then has."""
    changed(path, lambda held: held.update({EMBEDDINGS: held[EMBEDDINGS][:size].clone()}))
    with_config(path, vocab_size=size)


DAMAGED = "its weights are damaged: 1 of them contain values that are not finite, first in " + FIRST
T5 = '{"model_type": "t5", "is_encoder_decoder": true, "vocab_size": 39, "d_model": 32, "num_layers": 1}'
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a number that is none": (planted(float("nan")), DAMAGED),
    "an infinite number": (planted(float("inf")), DAMAGED),
    "an infinite number, pickled": (planted_and_pickled, DAMAGED),
    "a weight is missing": (
        lambda path: changed(path, lambda held: held.pop(FIRST)),
        f"1 weights are missing or have another shape, first {FIRST}",
    ),
    "the config has a layer more": (
        lambda path: with_config(path, num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "11 weights are missing or have another shape, first model.layers.2.input_layernorm.weight",
    ),
    "weights of AWQ, whose package is not installed": (
        lambda path: with_config(path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128}),
        "its weights are quantised (awq), and cannot be loaded here: ",
    ),
    "a pad token beyond the vocabulary": (
        lambda path: with_config(path, pad_token_id=39),
        "pad_token_id = 39 in its config.json is beyond vocab_size = 39: write the values that the model was trained",
    ),
    "another width": (
        lambda path: with_config(path, intermediate_size=128),
        f"{FIRST} has shape [64, 192], but its config needs [64, 128]",
    ),
    "a negative width": (
        lambda path: with_config(path, hidden_size=-4),
        "model: hidden_size = -4 in its config.json, but it must be 1 or more: write the value that the model",
    ),
    "an activation that nobody knows": (
        lambda path: with_config(path, hidden_act="spline"),
        "model: cannot build a causal LM from its config.json: ",
    ),
    "an encoder beside the decoder": (
        lambda path: (path / "config.json").write_text(T5),
        "model: t5 has an encoder and a decoder, but students and teachers must be causal LMs: name a decoder-only",
    ),
    "a file that was cut off": (cut, f"{SINGLE} is damaged: "),
    "a part is missing": (without_part, f"part-1.safetensors is missing, but {INDEX} lists it as a file of weights"),
    "no weights": (without(SINGLE), f"no weights there: expected {SINGLE}, or {INDEX} and its parts"),
    "an empty directory": (emptied, "no model there: the directory has no config.json"),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "no tokenizer there: expected tokenizer.json"),
    "no tokens": (without("tokenizer.json"), "no tokenizer there: expected tokenizer.json"),
    "no end token": (endless, "names no end-of-sequence token: set eos_token in its tokenizer config"),
    "prompts beyond the embeddings": (lambda path: narrower(path, 12), "is beyond the 12 embeddings of model"),
    "an end token beyond the embeddings": (
        lambda path: narrower(path, 1),
        "its end token 1 is beyond its 1 embeddings, so that no answer could end",
    ),
}
