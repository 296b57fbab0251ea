"""Where everything will run and what memory it will need, worked out from configs alone: no weight is loaded.

Weights, gradients, moments and caches are counted; activations are an estimate, marked by ~.

Shapes: P parameters of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slipstream.config.schema import Config
from slipstream.engines.native.model import context_length, load_config
from slipstream.errors import ConfigError, did_you_mean
from slipstream.pipeline.pool import names

GIB = 2**30
ACTIVATIONS = 34
"""Bytes per token and unit of width that a layer keeps for its backward pass in 16 bits.  (Korthikanti et al.)"""


@dataclass(frozen=True)
class Shape:
    parameters: int
    width: int
    layers: int
    cache: int
    """Numbers that one token leaves in the key and value caches."""
    context: int


@dataclass
class Need:
    """What one process asks of its device."""

    name: str
    where: str
    parts: dict[str, float] = field(default_factory=dict)
    """Bytes by what they are for."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size(value)}" for name, value in self.parts.items() if value)
        return f"{self.name}: {self.where}, {size(self.total)} ({parts})"


def size(value: float) -> str:
    return f"{value / GIB:,.1f} GiB" if value >= GIB / 10 else f"{value / 2**20:,.1f} MiB"


@cache
def shape_of(model: str) -> Shape:
    config = load_config(model)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1  # a model that is recurrent throughout has none
    per_head = getattr(text, "head_dim", None) or text.hidden_size // heads
    grouped = getattr(text, "num_key_value_heads", None) or heads
    return Shape(
        parameters=sum(parameter.numel() for parameter in made.parameters()),
        width=text.hidden_size,
        layers=text.num_hidden_layers,
        cache=2 * text.num_hidden_layers * grouped * per_head,
        context=context_length(config),
    )


def needs(config: Config) -> list[Need]:
    """Of every process."""
    gpu = config.runtime.device not in ("auto", "cpu") or (
        config.runtime.device == "auto" and torch.cuda.is_available()
    )
    own = "a GPU" if config.runtime.kind == "ray" else "the one GPU"
    where = own if gpu else f"{config.runtime.threads} CPU thread{'s' * (config.runtime.threads > 1)}"
    found = [Need(name, where, learner(config)) for name in names("learner", config.learner.ranks)]
    found += [Need(name, where, sampler(config)) for name in names("sampler", config.sampler.replicas)]
    for teacher_name, teacher in config.teachers.items():
        if teacher.base_url is not None:
            found.append(Need(f"teacher {teacher_name}", f"at {teacher.base_url}"))
            continue
        shape = shape_of(config.model_of(teacher))
        parts = {
            "weights": shape.parameters * width(teacher.dtype),
            "~activations": 8.0 * teacher.token_budget * shape.width * width(teacher.dtype),
        }
        found += [Need(name, where, parts) for name in names(f"teacher {teacher_name}", teacher.replicas)]
    return found


def learner(config: Config) -> dict[str, float]:
    """Of one rank."""
    settings, shape = config.learner, shape_of(config.student)
    trained = shape.parameters if settings.lora is None else adapters(config)
    kept = trained if config.reference is not None and not config.reference.host else 0
    # the weights set aside while others are tried on, and with policy.old = "previous" two more versions
    others = int(config.reference is not None or config.correction.preset.startswith("decoupled"))
    others += 3 if config.policy is not None and config.policy.old == "previous" else 0
    per_token = ACTIVATIONS * shape.width * width(settings.compute_dtype or settings.dtype) / 2
    layers, kept_inputs = shape.layers, 0
    if settings.checkpointing:  # the inputs of all layers, in 32 bits, and all of one
        layers, kept_inputs = 1, 4 * shape.width * shape.layers
    return {
        "weights": shape.parameters * width(settings.dtype) / settings.ranks,
        "gradients": trained * width(settings.dtype) / settings.ranks,
        "moments": 2 * trained * width(settings.optimizer_dtype or settings.dtype) / settings.ranks,
        "reference": kept * width(settings.dtype) / settings.ranks,
        "versions before": others * trained * width(settings.dtype) / settings.ranks,
        "~activations": settings.token_budget * (per_token * layers + kept_inputs),
    }


def adapters(config: Config) -> int:
    """Trained numbers: rank · (in + out) of every layer that gets one."""
    lora = config.learner.lora
    assert lora is not None
    return sum(lora.rank * (part.in_features + part.out_features) for part in adapted(config))


def adapted(config: Config) -> list[torch.nn.Linear]:
    """The layers that get an adapter; a ConfigError for a target that is none."""
    lora = config.learner.lora
    assert lora is not None
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(load_config(config.student))
    head = model.get_output_embeddings()
    named = model.named_modules()
    linear = {name: part for name, part in named if type(part) is torch.nn.Linear and part is not head}
    if lora.targets == "all-linear":
        return list(linear.values())
    known = sorted({name.rpartition(".")[2] for name in linear})
    for target in lora.targets:
        if target not in known:
            hint = did_you_mean(target, known)
            raise ConfigError(f"learner.lora.targets: {target!r} is no linear layer of the student; {hint}")
    return [part for name, part in linear.items() if name.rpartition(".")[2] in lora.targets]


def sampler(config: Config) -> dict[str, float]:
    shape, settings = shape_of(config.student), config.sampler
    if settings.engine == "vllm":  # which takes what it is given for keys and values, and queues the rest
        return {"weights": shape.parameters * width(settings.dtype)}
    longest = min(settings.longest or shape.context, shape.context)
    return {
        "weights": shape.parameters * width(settings.dtype),
        "keys and values": settings.slots * longest * shape.cache * width(settings.dtype),
    }


def width(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
