"""A model in another spelling: the ids of its tokens are permuted, and nothing else."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slipstream.models.resolve import model_path


def permuted(name: str, to: Path) -> Path:
    """Write a copy of a model whose ordinary tokens have other ids, so that both give every text the same scores."""
    shutil.copytree(model_path(name), to)
    file = to / "tokenizer.json"
    tree = json.loads(file.read_text())
    fixed = {each["id"] for each in tree["added_tokens"]}
    vocabulary = tree["model"]["vocab"]
    free = sorted(index for index in vocabulary.values() if index not in fixed)
    moved = dict(zip(free, reversed(free), strict=True))
    tree["model"]["vocab"] = {text: moved.get(index, index) for text, index in vocabulary.items()}
    file.write_text(json.dumps(tree))
    weights = load_file(to / "model.safetensors")
    for key in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        rows = weights[key].clone()
        rows[torch.tensor([*moved.values()])] = weights[key][torch.tensor([*moved.keys()])]
        weights[key] = rows
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to
