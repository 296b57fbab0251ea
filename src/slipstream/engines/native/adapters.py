"""Read and write adapter directories (LoRA), merge adapters into their base model, or load them for further training.

Names and formula are PEFT's: weight + alpha / rank · B A. `slipstream/models/adapters.py` lists the supported options.
Learner and sampler both run the base with separate adapters, so the fingerprint (checksum of weights) covers exactly
the weights in use. A saved model has the adapters merged; the adapters are also saved separately.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.engines.native.files import check_numbers
from slipstream.engines.quantisation import RoundedLinear
from slipstream.errors import ModelError, first_line
from slipstream.estimators.products import PLAIN
from slipstream.models.adapters import CONFIG, PREFIX, WEIGHTS, Adapter
from slipstream.models.resolve import model_path


def adapted_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "lora_A")]


def add_adapter(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return weight + scale · up · down, computed in at least float32 and cast back to the dtype of the weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + scale * (up.to(wide) @ down.to(wide))).to(weight.dtype)


def merged(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a copy of a state dict in which each adapter is merged into its base weight."""
    scales = {name: module.scaling["default"] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    whole: dict[str, Any] = {name: value for name, value in state.items() if ".lora_" not in name}
    for layer, scale in scales.items():
        down, up = (state[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        whole[f"{layer}.weight"] = add_adapter(whole.pop(f"{layer}.base_layer.weight"), down, up, scale)
        if f"{layer}.base_layer.bias" in whole:
            whole[f"{layer}.bias"] = whole.pop(f"{layer}.base_layer.bias")
    return whole


def weights_of(adapter: Adapter) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the matrices (A, B) of every layer of an adapter, by layer name."""
    try:
        tensors = load_file(adapter.path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{adapter.path / WEIGHTS}: cannot be read: {first_line(error)}") from None
    check_numbers(str(adapter.path), tensors.items())
    names = {layer: f"{PREFIX}{layer}.lora_" for layer in adapter.layers}
    return {layer: (tensors[f"{name}A.weight"], tensors[f"{name}B.weight"]) for layer, name in names.items()}


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers, rounded or not, that can have an adapter: no other layer uses their weight."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    shared = getattr(embeddings, "weight", None)
    linear = {name: part for name, part in model.named_modules() if type(part) in (*PLAIN, RoundedLinear)}
    uses = Counter(id(part.weight) for part in linear.values())
    return {n: part for n, part in linear.items() if part.weight is not shared and uses[id(part.weight)] == 1}


def check_base(adapter: Adapter, model: nn.Module) -> None:
    linear = linear_layers(model)
    for layer, (inputs, outputs) in adapter.layers.items():
        part = linear.get(layer)
        if part is None:
            raise ModelError(f"{adapter.path}: has an adapter for {layer}, but {adapter.base} has no such linear layer")
        if (part.in_features, part.out_features) != (inputs, outputs):
            raise ModelError(
                f"{adapter.path}: its adapter for {layer} has {inputs} inputs and {outputs} outputs, but that layer "
                f"of {adapter.base} has {part.in_features} and {part.out_features}"
            )


@torch.no_grad()
def merge(model: nn.Module, adapter: Adapter) -> None:
    check_base(adapter, model)
    for layer, (down, up) in weights_of(adapter).items():
        weight = model.get_submodule(layer).get_parameter("weight")
        weight.copy_(add_adapter(weight, down, up, adapter.scale))


@torch.no_grad()
def load_adapter(model: nn.Module, adapter: Adapter) -> None:
    """Copy an adapter's weights into the adapters of a model; raise a ModelError if the adapted layers differ."""
    weights = weights_of(adapter)
    if other := sorted(set(adapted_layers(model)) ^ weights.keys()):
        raise ModelError(f"{adapter.path}: {other[0]} has an adapter either in the file or in the model, not in both")
    for layer, parts in weights.items():
        for part, value in zip("AB", parts, strict=True):
            model.get_parameter(f"{layer}.lora_{part}.default.weight").copy_(value)


def write_adapter(path: Path, model: nn.Module, state: Mapping[str, Tensor], *, base: str) -> None:
    """Write the adapters of `model` as a directory that PEFT loads; `state` is the model's state dict."""
    layers, modules = adapted_layers(model), dict(model.named_modules())
    first = modules[layers[0]]
    alpha = first.lora_alpha["default"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": portable_name(base),
        "r": first.r["default"],
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,  # other readers expect an integer
        "target_modules": targets(layers, modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {
        f"{PREFIX}{layer}.lora_{part}.weight": state[f"{layer}.lora_{part}.default.weight"].detach().contiguous()
        for layer in layers
        for part in "AB"
    }
    path.mkdir(exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def portable_name(base: str) -> str:
    """Return the base model's absolute path or hub name, so that the adapter can be loaded from any directory."""
    try:
        path = Path(model_path(base))
    except ModelError:  # the base was moved or deleted during the run: save the adapter anyway
        return base
    return str(path.resolve()) if path.is_dir() else str(path)


def targets(layers: list[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return `target_modules` of adapter_config.json: the last parts of layer names if unambiguous, else full names."""
    short = sorted({name.rpartition(".")[2] for name in layers})
    meant = [name for name in modules if name.rpartition(".")[2] in short]
    return short if sorted(meant) == sorted(layers) else layers
