"""Loading a HF causal LM and taking it apart into backbone and head."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from slipstream.assets import model_path
from slipstream.engines.base import Fingerprint, TensorSpec, WeightsRef
from slipstream.engines.native.ranks import whole
from slipstream.errors import ConfigError, ModelError, first_line

hf_logging.disable_progress_bar()  # loading and saving happen under a progress display of our own


@dataclass(frozen=True)
class LanguageModel:
    """`hidden = backbone(ids)`, `logits = head(hidden)`: checked when it was loaded."""

    name: str
    model: PreTrainedModel
    backbone: nn.Module
    head: nn.Linear

    @property
    def context(self) -> int:
        return context_length(self.model.config)

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.head.weight.device


def context_length(config: Any) -> int:
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30)


def pick_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"runtime.device = {device!r} cannot be used: {first_line(error)}") from None
    return torch.device(device)


def load_config(name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(model_path(name))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: cannot read a model config there: {first_line(error)}") from None


def empty_model(name: str) -> PreTrainedModel:
    """Its modules, without weights: nothing is loaded."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(name))


def load_model(name: str, *, dtype: str, device: str = "auto") -> LanguageModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_path(name), dtype=getattr(torch, dtype), attn_implementation="sdpa", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{name}: cannot load a causal LM there: {first_line(error)}") from None
    if absent := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ModelError(f"{name}: {len(absent)} weights are missing or of another shape, {absent[0]} first")
    return split(name, model.to(pick_device(device)).eval())


def split(name: str, model: PreTrainedModel) -> LanguageModel:
    """Backbone and head of a model whose logits are the head applied to the last hidden state, and nothing else."""
    head, backbone = model.get_output_embeddings(), model.base_model
    if not isinstance(head, nn.Linear) or backbone is model:
        raise ModelError(f"{name}: {type(model).__name__} has no linear head on a backbone")
    ids = torch.arange(1, 5, device=model.device)[None]
    with torch.no_grad():
        expected, found = model(ids).logits.float(), head(backbone(ids).last_hidden_state).float()
    if not expected.isfinite().all():
        raise ModelError(f"{name}: its logits are not finite: the weights are damaged")
    if not torch.allclose(expected, found, rtol=1e-2, atol=1e-2):
        raise ModelError(f"{name}: {type(model).__name__} changes its logits after the head (soft-capping or scaling)")
    return LanguageModel(name, model, backbone, head)


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


def export_weights(model: nn.Module, dtype: str, *, keep: bool = True) -> WeightsRef:
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
    return WeightsRef(tuple(manifest), flat)


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
