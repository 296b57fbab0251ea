"""Low-rank adapters (peft) at linear layers of a model: only their weights are trained and sent to the sampler.

Learner and sampler both run the base with separate adapters, so the fingerprint (checksum of weights) covers exactly
the weights in use. A saved model has the adapters merged; the adapters are also saved separately.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slipstream.config.schema import LoraConfig
from slipstream.engines.native.adapters import add_adapter, linear_layers, load_adapter
from slipstream.engines.native.model import LanguageModel, split
from slipstream.errors import ConfigError
from slipstream.models.adapters import adapter_of


def with_adapters(lm: LanguageModel, config: LoraConfig, *, seed: int) -> LanguageModel:
    """Add an adapter to each target layer and freeze the base; if `lm.name` is an adapter, start from its weights."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError("learner.lora needs peft: pip install 'slipstream[lora]'") from None
    layers = called_layers(lm)
    if not layers:
        kind = type(lm.model).__name__
        raise ConfigError(f"learner.lora: {lm.name}: {kind} has no linear layers beside its head: drop [learner.lora]")
    # peft reinterprets names by model type; a holder module without a config avoids these rules
    holder = nn.Module()
    holder.add_module("adapted", lm.model)
    targets = [f"adapted.{name}" for name in config.among(layers)]
    settings = PeftConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, holder)
    if begun := adapter_of(lm.name):
        load_adapter(lm.model, begun)
    return split(lm.name, lm.model, longest=lm.longest)


@torch.no_grad()
def called_layers(lm: LanguageModel) -> list[str]:
    """Return the linear layers that a pass calls, except the head; Mamba uses some weights without calling a layer."""
    named = linear_layers(lm.model)
    called: set[nn.Module] = set()
    hooks = [module.register_forward_hook(lambda module, *_: called.add(module)) for module in named.values()]
    try:
        lm.backbone(torch.zeros(1, 2, dtype=torch.int64, device=lm.device))
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, module in named.items() if module in called and module is not lm.head.linear]


def merged(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a copy of a state dict in which each adapter is merged into its base weight."""
    scales = {name: module.scaling["default"] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    found: dict[str, Any] = {name: value for name, value in state.items() if ".lora_" not in name}
    for layer, scale in scales.items():
        down, up = (state[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        found[f"{layer}.weight"] = add_adapter(found.pop(f"{layer}.base_layer.weight"), down, up, scale)
        if f"{layer}.base_layer.bias" in found:
            found[f"{layer}.bias"] = found.pop(f"{layer}.base_layer.bias")
    return found
