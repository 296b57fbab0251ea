"""Which layers get an adapter, and whether a model that is one can be what it is asked to be. No weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from slipstream.config.schema import LoraConfig
from slipstream.errors import ConfigError, ModelError
from slipstream.models.adapters import adapter_of

if TYPE_CHECKING:
    from torch import nn


def continued(student: str, asked: LoraConfig | None, say: Callable[[str], object]) -> LoraConfig | None:
    """What is trained of a student: of one that is an adapter, that adapter, which a config cannot contradict."""
    adapter = adapter_of(student)
    if adapter is None:
        return asked
    own = LoraConfig(rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets)
    for name in asked.model_fields_set if asked else ():
        theirs, ours = getattr(asked, name), getattr(own, name)
        if theirs != ours and (name != "targets" or last_parts(student, theirs) != set(ours)):
            raise ConfigError(
                f"learner.lora.{name} = {json.dumps(theirs)}, and {student} is an adapter with {json.dumps(ours)}: "
                "write that, or drop it"
            )
    if asked is None:
        layers = ", ".join(adapter.targets)
        say(f"learner.lora: rank {adapter.rank}, alpha {adapter.alpha:g}, at {layers}, as {student} has them")
    return own


def last_parts(student: str, targets: Any) -> set[str]:
    """Of the names of the layers that these are."""
    return {name.rpartition(".")[2] for name in adapted(student, LoraConfig(targets=targets))}


def check_adapters(student: str, lora: LoraConfig | None, models: Iterable[str]) -> None:
    """What [learner.lora] asks for is there, and so is all that those of these models stand on that are adapters."""
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
            f"learner.lora.rank = {lora.rank} is more than any of these layers of {student} has: write {most} or less, "
            "or drop [learner.lora] to train all weights"
        )
    if begun and (other := sorted(layers.keys() ^ begun.layers.keys())):
        raise ModelError(
            f"{student}: has an adapter for some of the layers that are called {other[0].rpartition('.')[2]}, and none "
            f"for {other[0]}, which cannot be trained here: merge it into its base"
        )


def check_adapter(model: str) -> None:
    """One that is named as a model is of layers that its base has."""
    from slipstream.engines.native.adapters import check_stands_on
    from slipstream.engines.native.files import empty_model

    if adapter := adapter_of(model):
        check_stands_on(adapter, empty_model(model))


def adapted(student: str, lora: LoraConfig) -> dict[str, nn.Linear]:
    """The layers that get an adapter."""
    from torch import nn

    from slipstream.engines.native.files import empty_model

    model: Any = empty_model(student)
    head = model.get_output_embeddings()
    named = model.named_modules()
    linear = {name: part for name, part in named if type(part) is nn.Linear and part is not head}
    return {name: linear[name] for name in lora.among(list(linear))}
