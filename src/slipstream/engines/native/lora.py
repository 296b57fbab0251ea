"""Low-rank adapters (peft) in place of the linear layers of a model: only they are trained, published and kept.

Learner and sampler both run base and adapters side by side, so weights travel as adapters alone and the fingerprint is
of what really runs. What is saved for others has them merged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import LoraConfig
from slipstream.engines.native.model import LanguageModel, split
from slipstream.errors import ConfigError, did_you_mean


def with_adapters(lm: LanguageModel, config: LoraConfig, *, seed: int) -> LanguageModel:
    """The same model with an adapter at every target; all else is frozen. Adapters start as nothing at all."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError("learner.lora needs peft: pip install 'slipstream[lora]'") from None
    linear = [name for name, module in lm.model.named_modules() if isinstance(module, nn.Linear)]
    layers = [name for name in linear if lm.model.get_submodule(name) is not lm.head]
    settings: dict[str, Any] = {"r": config.rank, "lora_alpha": config.alpha, "lora_dropout": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(PeftConfig(target_modules=_targets(layers, config), **settings), lm.model)
    return split(lm.name, lm.model)


def _targets(layers: list[str], config: LoraConfig) -> list[str]:
    if config.targets == "all-linear":
        return layers
    known = sorted({name.rpartition(".")[2] for name in layers})
    for target in config.targets:
        if target not in known:
            hint = did_you_mean(target, known)
            raise ConfigError(f"learner.lora.targets: {target!r} is no linear layer of the student; {hint}")
    return [name for name in layers if name.rpartition(".")[2] in config.targets]


def merged(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state dict without adapters, each added to the weight beside it. For a model without any: the same."""
    scales = {name: module.scaling["default"] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    found: dict[str, Any] = {name: value for name, value in state.items() if ".lora_" not in name}
    for layer, scale in scales.items():
        down, up = (state[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        weight: Tensor = found.pop(f"{layer}.base_layer.weight")
        found[f"{layer}.weight"] = (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)
        if f"{layer}.base_layer.bias" in found:
            found[f"{layer}.bias"] = found.pop(f"{layer}.base_layer.bias")
    return found
