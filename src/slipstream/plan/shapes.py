"""Shapes of models, which config.json alone tells, and checks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.engines.native.config import fully_attended, load_config
from slipstream.engines.vllm import VERSION
from slipstream.errors import ConfigError, ModelError
from slipstream.objective.method import Method
from slipstream.plan.engines import EnginesPlan
from slipstream.plan.placement import shape_of

UNSEEN = (
    "tokenizers, chat templates and end tokens: only the sizes of vocabularies are compared",
    "data: no prompt and no answer is read, and no length of a prompt is known",
    "weights: no file is opened",
    f"engines and packages: nothing is started or looked up, and vLLM is taken to be version {VERSION}",
    "endpoints, rewards, environments and agents: nothing is asked, loaded or run",
    "this machine: its devices, memory and processors are not those of the run",
)
"""Things that a check of shapes does not look at."""


@dataclass(frozen=True)
class ShapeCheck:
    method: Method
    engines: EnginesPlan
    shapes: tuple[str, ...]
    """A line about the shape of each model."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def text_config(model: str) -> Any:
    return load_config(model).get_text_config()


def check_heads(model: str) -> None:
    """Raise ModelError if attention heads cannot share heads of keys and values, or do not divide the width."""
    text = text_config(model)
    heads, grouped = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if heads and grouped and heads % grouped:
        raise ModelError(f"{model}: {heads} attention heads cannot share {grouped} heads of keys and values evenly")
    if heads and not getattr(text, "head_dim", None) and text.hidden_size % heads:
        raise ModelError(f"{model}: a width of {text.hidden_size} cannot be divided by {heads} attention heads")


def check_split_heads(model: str, args: Mapping[str, Any], section: str) -> None:
    """Raise ConfigError if tensor parallelism by these arguments of vLLM would cut an attention head."""
    devices, where = args.get("tensor_parallel_size", 1), f"{section}.engine_args.tensor_parallel_size"
    if devices == 1:
        return
    heads = getattr(text_config(model), "num_attention_heads", None) or devices
    if heads % devices:
        fitting = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        raise ConfigError(f"{where} = {devices} does not divide the {heads} heads of {model}: write one of {fitting}")


def check_context(where: str, model: str, longest: int, context: int) -> None:
    if longest > context:
        raise ConfigError(
            f"{where}: sequences of {longest} tokens exceed the context of {context} of {model}: lower "
            "sampler.max_tokens, or sampler.longest"
        )


def check_selection(where: str, model: str, longest: int | None) -> None:
    """Raise ConfigError if sequences are so long that a sparse attention selects keys by scores with ties."""
    most = fully_attended(load_config(model))
    if most is not None and longest is not None and longest > most:
        raise ConfigError(
            f"{where}: sequences have up to {longest} tokens, and {model} attends to {most} selected keys: beyond that "
            "the log-probs of a sequence depend on the others in its pass: lower sampler.max_tokens, or use shorter "
            "prompts"
        )


def shape_line(model: str) -> str:
    shape, text = shape_of(model), text_config(model)
    heads = getattr(text, "num_attention_heads", None)
    grouped = getattr(text, "num_key_value_heads", None) or heads
    attention = f", {heads} heads, {grouped} of keys and values" if heads else ""
    return (
        f"{model}: {shape.parameters:,} parameters, {shape.layers} layers of width {shape.width:,}{attention}, "
        f"vocabulary {text.vocab_size:,}, context {shape.context:,}"
    )
