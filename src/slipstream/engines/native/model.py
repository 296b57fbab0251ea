"""Loading a HF causal LM and taking it apart into backbone and head."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as hf_logging

from slipstream.assets import model_path
from slipstream.engines.base import Fingerprint, TensorSpec, WeightsRef
from slipstream.engines.native.head import find_head
from slipstream.engines.native.positions import pin
from slipstream.engines.native.ranks import whole
from slipstream.errors import ConfigError, ModelError, first_line
from slipstream.estimators.logprobs.head import Head

hf_logging.disable_progress_bar()  # loading and saving happen under a progress display of our own


@dataclass(frozen=True)
class LanguageModel:
    """`hidden = backbone(ids)`, `logits = head(hidden)`: checked when it was loaded."""

    name: str
    model: PreTrainedModel
    backbone: nn.Module
    head: Head
    longest: int
    """The longest sequence it may be given."""

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.head.weight.device


def context_length(config: Any) -> int:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    stretched = float(rope.get("factor", 1.0)) if rope.get("rope_type") == "dynamic" else 1.0
    return int(stretched * (getattr(text, "max_position_embeddings", None) or 1 << 30))


def pick_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"runtime.device = {device!r} cannot be used: {first_line(error)}") from None
    return torch.device(device)


def is_recurrent(config: Any) -> bool:
    """Whether some layers keep a state instead of the past: linear attention, state spaces, convolutions."""
    return any(getattr(layer, "number_of_states", 0) for layer in DynamicCache(config=config).layers)


def has_windows(config: Any) -> bool:
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None) is not None


def load_config(name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(model_path(name))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: cannot read a model config there: {first_line(error)}") from None


def empty_model(name: str) -> PreTrainedModel:
    """Its modules, without weights: nothing is loaded."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(name))


def load_model(name: str, *, dtype: str, device: str = "auto", longest: int | None = None) -> LanguageModel:
    """`longest`: the longest sequence it will see, which chooses among its position factors where it has several."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_path(name), dtype=getattr(torch, dtype), attn_implementation=REFERENCE, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{name}: cannot load a causal LM there: {first_line(error)}") from None
    if absent := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ModelError(f"{name}: {len(absent)} weights are missing or of another shape, {absent[0]} first")
    return split(name, model.to(pick_device(device)).eval(), longest=longest)


REFERENCE = "eager"
"""The attention that every model has and that leaves nothing out: what all others are compared to."""


def split(name: str, model: PreTrainedModel, *, longest: int | None = None) -> LanguageModel:
    """Backbone and head, found to be all there is; positions mean the same in every pass from now on."""
    longest = min(longest or 1 << 30, context_length(model.config))
    pin(model, longest)
    if model.dtype == torch.float64:  # the fast kernels for experts end at float32
        model.set_experts_implementation("eager")
    backbone = backbone_of(name, model)
    with widened(model):
        head = find_head(name, model, backbone)
    return LanguageModel(name, model, backbone, head, longest)


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """In float32 for a moment, if there is room: what half precision rounds away would hide a fault as well."""
    halves = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and t.itemsize < 4]
    held = [(tensor, tensor.dtype) for tensor in halves] if _room(halves) else []
    for tensor, _ in held:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in held:
            tensor.data = tensor.data.to(dtype)


def _room(halves: Sequence[Tensor]) -> bool:
    """Half of what is free."""
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
        raise ModelError(f"{name}: {type(model).__name__} is no backbone with a head, as a causal LM here must be")
    return parts[0]


# --- weights as flat bytes -------------------------------------------------------------------------------


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def _parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What changes in training: the adapters, where there are any. Tied weights once, under their first name."""
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    return [pair for pair in named if is_adapter(pair[0])] or named


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a contiguous tensor on the CPU: no copy."""
    return cast("np.ndarray[Any, Any]", tensor.view(-1).view(torch.uint8).numpy())


def export_weights(model: nn.Module, dtype: str, *, version: int = 0, keep: bool = True) -> WeightsRef:
    """All weights, once each, in the precision in which the sampler runs them.

    Where several ranks share the model all must take part, and those that do not `keep` it get the manifest only.
    """
    manifest, offset, kind = [], 0, getattr(torch, dtype)
    for name, tensor in _parameters(model):
        nbytes = tensor.numel() * kind.itemsize
        manifest.append(TensorSpec(name, dtype, tuple(tensor.shape), offset, nbytes))
        offset += nbytes
    flat = np.empty(offset if keep else 0, np.uint8)
    for spec, (_, tensor) in zip(manifest, _parameters(model), strict=True):
        gathered = whole(tensor.to(kind))
        if keep:
            target = torch.from_numpy(flat[spec.offset : spec.offset + spec.nbytes])
            target.view(kind).view(spec.shape).copy_(gathered)
    return WeightsRef(tuple(manifest), flat, version)


def load_weights(model: nn.Module, weights: WeightsRef) -> None:
    """Copy into the model, converting to its dtype; every parameter must be there, in its shape."""
    own = dict(_parameters(model))
    here = {(name, tuple(tensor.shape)) for name, tensor in own.items()}
    if missing := here ^ {(spec.name, spec.shape) for spec in weights.manifest}:
        names = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(missing)[:3])
        raise ModelError(f"weights do not fit the model: {names} on one side only")
    for spec in weights.manifest:
        _load(own[spec.name], getattr(torch, spec.dtype), weights.body[spec.offset : spec.offset + spec.nbytes])


def _load(target: Tensor, dtype: torch.dtype, source: np.ndarray[Any, Any]) -> None:
    """`source` may be read-only, of which torch would not make a tensor."""
    if target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
        np.copyto(_bytes(target), source)
    else:
        staged = torch.empty(target.shape, dtype=dtype)
        np.copyto(_bytes(staged), source)
        target.copy_(staged)


OUTPUTS = {"o_proj", "out_proj", "c_proj", "dense", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "w2", "experts"}
"""How families name the last projection of an attention or a feed-forward layer; of experts all weights count."""


def is_fingerprinted(name: str) -> bool:
    return is_adapter(name) or not OUTPUTS.isdisjoint(name.split("."))


def fingerprint(
    model: nn.Module, dtype: str, *, exported: WeightsRef | None = None, still: dict[str, int] | None = None
) -> Fingerprint:
    """A hash of what really runs, as `dtype`: the output projections of layers, experts and adapters, or all weights.

    Samplers stand still while it is taken, and it guards against accidents only: so a CRC-32 of each tensor (twice as
    fast as SHA-256 in hardware), and a hash of those. A single wrong tensor goes unseen once in 2^32.

    Weights that were just `exported` are not gathered again; `still` keeps the checksums of all others, which never
    change, for the next time.
    """
    parameters = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    chosen = [pair for pair in parameters if is_fingerprinted(pair[0])] or parameters
    specs = {spec.name: spec for spec in exported.manifest} if exported else {}
    still, digest = {} if still is None else still, hashlib.blake2b(digest_size=8)
    for name, tensor in chosen:
        if exported and (spec := specs.get(name)):
            checksum = zlib.crc32(exported.body[spec.offset : spec.offset + spec.nbytes])
        else:
            if name not in still:
                raw = _bytes(whole(tensor).to("cpu", getattr(torch, dtype)).contiguous())
                still[name] = zlib.crc32(raw.data)
            checksum = still[name]
        digest.update(checksum.to_bytes(4, "little"))
    return digest.hexdigest()
