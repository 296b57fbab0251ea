"""Adapter directories: merged into their base, put into adapters that are trained, and written.

Names and formula are PEFT's (`slipstream/models/adapters.py` says which of them): weight + alpha / rank · B A.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.engines.native.files import check_numbers
from slipstream.errors import ModelError, first_line
from slipstream.models.adapters import CONFIG, PREFIX, WEIGHTS, Adapter
from slipstream.models.resolve import model_path


def adapted(model: nn.Module) -> list[str]:
    """The layers that have one."""
    return [name for name, module in model.named_modules() if hasattr(module, "lora_A")]


def sum_of(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """A weight and its adapter, added in float32 or more."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (up.to(wide) @ down.to(wide))).to(weight.dtype)


def weights_of(adapter: Adapter) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every layer."""
    try:
        held = load_file(adapter.path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{adapter.path / WEIGHTS}: cannot be read: {first_line(error)}") from None
    check_numbers(str(adapter.path), held.items())
    a, b = ({layer: held[f"{PREFIX}{layer}.lora_{part}.weight"] for layer in adapter.layers} for part in "AB")
    return {layer: (a[layer], b[layer]) for layer in adapter.layers}


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Where an adapter can be: not where a weight is another layer's too, to which both adapters would be added."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    shared = getattr(embeddings, "weight", None)
    linear = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    uses = Counter(id(part.weight) for part in linear.values())
    return {n: part for n, part in linear.items() if part.weight is not shared and uses[id(part.weight)] == 1}


def check_stands_on(adapter: Adapter, model: nn.Module) -> None:
    """Every layer of an adapter is in its base, with the same inputs and outputs; no weight need be there."""
    linear = linear_layers(model)
    for layer, (inputs, outputs) in adapter.layers.items():
        part = linear.get(layer)
        if part is None:
            raise ModelError(f"{adapter.path}: has an adapter for {layer}, which is no linear layer of {adapter.base}")
        if (part.in_features, part.out_features) != (inputs, outputs):
            raise ModelError(
                f"{adapter.path}: its adapter for {layer} is for {inputs} inputs and {outputs} outputs, and that of "
                f"{adapter.base} has {part.in_features} and {part.out_features}"
            )


@torch.no_grad()
def merge(model: nn.Module, adapter: Adapter) -> None:
    """Into the weights of its base."""
    check_stands_on(adapter, model)
    for layer, (down, up) in weights_of(adapter).items():
        weight = model.get_submodule(layer).get_parameter("weight")
        weight.copy_(sum_of(weight, down, up, adapter.scale))


@torch.no_grad()
def put(model: nn.Module, adapter: Adapter) -> None:
    """Into the adapters that a model has, which are at the same layers."""
    held = weights_of(adapter)
    if other := sorted(set(adapted(model)) ^ held.keys()):
        raise ModelError(f"{adapter.path}: {other[0]} has an adapter on one side only; it cannot be trained here")
    for layer, parts in held.items():
        for part, value in zip("AB", parts, strict=True):
            model.get_parameter(f"{layer}.lora_{part}.default.weight").copy_(value)


def write(path: Path, model: nn.Module, state: Mapping[str, Tensor], *, base: str) -> None:
    """The adapters of a model, of which this is the state, as a directory that PEFT loads."""
    layers, modules = adapted(model), dict(model.named_modules())
    first = modules[layers[0]]
    alpha = first.lora_alpha["default"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lasting(base),
        "r": first.r["default"],
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,  # others expect a whole number
        "target_modules": targets(layers, modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    held = {
        f"{PREFIX}{layer}.lora_{part}.weight": state[f"{layer}.lora_{part}.default.weight"].detach().contiguous()
        for layer in layers
        for part in "AB"
    }
    path.mkdir(exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(held, path / WEIGHTS, metadata={"format": "pt"})


def lasting(base: str) -> str:
    """What names a base from wherever it is read."""
    try:
        path = Path(model_path(base))
    except ModelError:  # a run that ends does not fail by what was moved since it began
        return base
    return str(path.resolve()) if path.is_dir() else str(path)


def targets(layers: list[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """By the last part of their names, as others do, where that means these layers and no others."""
    short = sorted({name.rpartition(".")[2] for name in layers})
    meant = [name for name in modules if name.rpartition(".")[2] in short]
    return short if sorted(meant) == sorted(layers) else layers
