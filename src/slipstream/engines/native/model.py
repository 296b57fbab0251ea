"""Load a Hugging Face causal LM and split it into backbone and head."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as hf_logging

from slipstream.engines.native.adapters import merge
from slipstream.engines.native.config import context_length
from slipstream.engines.native.files import check_numbers, missing
from slipstream.engines.native.head import find_head
from slipstream.engines.native.over_devices import devices_from, spread
from slipstream.engines.native.positions import pin
from slipstream.errors import ConfigError, ModelError, first_line
from slipstream.estimators.logprobs.head import Head
from slipstream.estimators.products import use_fast_layers
from slipstream.models.adapters import adapter_of
from slipstream.models.resolve import model_path

hf_logging.disable_progress_bar()  # Slipstream shows its own progress display while models are loaded and saved


@dataclass(frozen=True)
class LanguageModel:
    """A causal LM split so that `logits = head(backbone(ids).last_hidden_state)`, which `split` has checked."""

    name: str
    model: PreTrainedModel
    backbone: nn.Module
    head: Head
    longest: int
    """Maximum sequence length of this model in the run, in tokens."""

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.head.weight.device


def pick_device(device: str, where: str = "runtime.device") -> torch.device:
    """Return the torch device for `device` ("auto": GPU if present); `where` is the config key for error messages."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cpu:"):
        raise ConfigError(f'{where} = {device!r}: all CPUs are one device: write "cpu"')
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{where} = {device!r} cannot be used: {first_line(error)}") from None
    return torch.device(device)


def is_recurrent(config: Any) -> bool:
    """Return True if some layers have a recurrent state: linear attention, state spaces or convolutions."""
    return any(getattr(layer, "number_of_states", 0) for layer in DynamicCache(config=config).layers)


def has_windows(config: Any) -> bool:
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None) is not None


def attention_of(backbone: nn.Module) -> str | None:
    """Return the name of the attention in use; transformers only logs a warning if it cannot set another one."""
    return getattr(backbone.config, "_attn_implementation", None)


def load_model(
    name: str,
    *,
    dtype: str,
    device: str = "auto",
    devices: int = 1,
    longest: int | None = None,
    base: bool = False,
) -> LanguageModel:
    """Load and check a causal LM; merge its adapter unless `base`. `longest`: maximum sequence length of the run.

    The layers are split over `devices` devices, of which `device` is the first.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_path(name),
            dtype=getattr(torch, dtype),
            attn_implementation=REFERENCE,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{name}: cannot load a causal LM from it: {first_line(error)}") from None
    if absent := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ModelError(missing(name, absent))
    if not base and (adapter := adapter_of(name)):
        merge(model, adapter)
    check_numbers(name, model.named_parameters())
    first = pick_device(device)
    use_fast_layers(model)
    if devices > 1:
        spread(name, model, devices_from(first, devices))
    else:
        model.to(first)
    return split(name, model.eval(), longest=longest)


REFERENCE = "eager"
"""Attention implementation that every model supports completely. All other implementations are compared with it."""


def split(name: str, model: PreTrainedModel, *, longest: int | None = None) -> LanguageModel:
    """Split a model into backbone and head, check that they give its logits, and fix its rope factors for `longest`."""
    longest = min(longest or 1 << 30, context_length(model.config))
    pin(model, longest)
    if model.dtype == torch.float64:  # the fast kernels for experts do not support float64
        model.set_experts_implementation("eager")
    backbone = backbone_of(name, model)
    with widened(model):
        head = find_head(name, model, backbone)
    return LanguageModel(name, model, backbone, head, longest)


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Convert half-precision weights to float32 in this context, if memory suffices: rounding could hide errors."""
    halves = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and t.itemsize < 4]
    originals = [(tensor, tensor.dtype) for tensor in halves] if _fits_in_memory(halves) else []
    for tensor, _ in originals:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in originals:
            tensor.data = tensor.data.to(dtype)


def _fits_in_memory(halves: Sequence[Tensor]) -> bool:
    if halves and halves[0].is_cuda:
        free = torch.cuda.mem_get_info(halves[0].device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sum(4 * tensor.numel() for tensor in halves) < free / 2


def backbone_of(name: str, model: PreTrainedModel) -> PreTrainedModel:
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise ModelError(f"{name}: {type(model).__name__} is not made of one backbone and a head, which is required")
    return parts[0]
