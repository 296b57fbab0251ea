"""LoRA adapters: layers that get an adapter, and checks that adapters fit models and settings. Loads no weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from slipstream.config.schema import LoraConfig
from slipstream.errors import ConfigError, ModelError
from slipstream.models.adapters import adapter_of

if TYPE_CHECKING:
    from torch import nn


def lora_of_student(student: str, requested: LoraConfig | None, say: Callable[[str], object]) -> LoraConfig | None:
    """Return the requested LoRA settings, or those of a student that is an adapter; ConfigError if they disagree."""
    adapter = adapter_of(student)
    if adapter is None:
        return requested
    adapter_lora = LoraConfig(rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets)
    for name in requested.model_fields_set if requested else ():
        wanted, own = getattr(requested, name), getattr(adapter_lora, name)
        if wanted == own:
            continue
        # targets agree if they select the layers that have an adapter, compared by the last part of their names
        selected = adapted(student, LoraConfig(targets=wanted)) if name == "targets" else {}
        if not selected or {layer.rpartition(".")[2] for layer in selected} != set(own):
            raise ConfigError(
                f"learner.lora.{name} = {json.dumps(wanted)}, and {student} is an adapter with {json.dumps(own)}: "
                "write that, or drop it"
            )
    if requested is None:
        layers = ", ".join(adapter.targets)
        say(f"learner.lora: rank {adapter.rank}, alpha {adapter.alpha:g}, at {layers}, as {student} has them")
    return adapter_lora


def check_adapters(student: str, lora: LoraConfig | None, models: Iterable[str]) -> None:
    """Check that [learner.lora] fits the student, and that every model that is an adapter fits its base model."""
    for model in models:
        check_adapter(model)
    if lora is None:
        return
    layers, begun = adapted(student, lora), adapter_of(student)
    if not layers:
        raise ConfigError(f"learner.lora: {student} has no linear layers beside its head: drop [learner.lora]")
    most = max(min(part.in_features, part.out_features) for part in layers.values())
    if lora.rank > most:
        raise ConfigError(
            f"learner.lora.rank = {lora.rank} is more than the width of any of these layers of {student}: write {most} "
            "or less, or drop [learner.lora] to train all weights"
        )
    if begun and (other := sorted(layers.keys() ^ begun.layers.keys())):
        raise ModelError(
            f"{student}: has an adapter for some of the layers named {other[0].rpartition('.')[2]}, but none for "
            f"{other[0]}, which cannot be trained here: merge the adapter into its base model"
        )


def check_adapter(model: str) -> None:
    """Raise an error if `model` is an adapter, and its base model lacks some of the adapted layers."""
    from slipstream.engines.native.adapters import check_base
    from slipstream.engines.native.files import empty_model

    if adapter := adapter_of(model):
        check_base(adapter, empty_model(model))


def adapted(student: str, lora: LoraConfig) -> dict[str, nn.Linear]:
    """Return the linear layers of the student that get an adapter, by layer name."""
    from torch import nn

    from slipstream.engines.native.files import empty_model

    model: Any = empty_model(student)
    head = model.get_output_embeddings()
    named = model.named_modules()
    linear = {name: part for name, part in named if type(part) is nn.Linear and part is not head}
    return {name: linear[name] for name in lora.among(list(linear))}
