"""Weights as flat bytes, which the learner publishes to other engines, and fingerprints of weights.

A fingerprint is one hash over the CRC-32 of each tensor that `fingerprinted` names. An engine that loads weights
returns the fingerprint of the tensors that it runs. A sampler that quantises weights returns one of the bytes that it
received and of the codes and scales that it made of them; the learner makes the same of the weights that it exports.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.engines.quantisation import quantised_weights
from slipstream.errors import ModelError
from slipstream.protocols import Fingerprint, TensorSpec, WeightsRef

OUTPUTS = {"o_proj", "out_proj", "c_proj", "dense", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "w2", "experts"}
"""Names of the last projection of an attention or feed-forward layer, and of experts, in all model families."""


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def is_fingerprinted(name: str) -> bool:
    return is_adapter(name) or not OUTPUTS.isdisjoint(name.split("."))


def fingerprinted(names: Iterable[str]) -> list[str]:
    """Return the names of output projections, experts and adapters, or all names if there are none of these."""
    every = list(names)
    return list(filter(is_fingerprinted, every)) or every


def raw(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a CPU tensor; a contiguous tensor is not copied."""
    return cast("np.ndarray[Any, Any]", tensor.contiguous().view(-1).view(torch.uint8).numpy())


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(raw(tensor).data)


def combined(checksums: Iterable[int]) -> Fingerprint:
    digest = hashlib.blake2b(digest_size=8)
    for each in checksums:
        digest.update(each.to_bytes(4, "little"))
    return digest.hexdigest()


def identity_of(model: nn.Module) -> str:
    """Return a hash of all weights with their names and precision, and not only of those that `fingerprint` reads."""
    found = hashlib.sha256()
    for name, weight in model.state_dict().items():
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)} {checksum(whole(weight).cpu())}".encode())
    return found.hexdigest()


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank. All ranks must call this function."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def view_of(spec: TensorSpec, flat: Tensor) -> Tensor:
    part = flat[spec.offset : spec.offset + spec.nbytes]
    return part.view(getattr(torch, spec.dtype)).view(spec.shape)


def tensor_of(spec: TensorSpec, weights: WeightsRef) -> Tensor:
    """Return a copy of a published tensor, whose bytes may be read-only."""
    found = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    np.copyto(raw(found), weights.body[spec.offset : spec.offset + spec.nbytes])
    return found


def check_fits(shapes: Mapping[str, tuple[int, ...]], weights: WeightsRef) -> None:
    if missing := set(shapes.items()) ^ {(spec.name, spec.shape) for spec in weights.manifest}:
        names = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(missing)[:3])
        raise ModelError(f"weights do not fit the model: {names} on one side only")


# --- models in this process ------------------------------------------------------------------------------


def published(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each trained parameter: adapters if any, else all; tied weights once, by first name."""
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    yield from [pair for pair in named if is_adapter(pair[0])] or named


def export_weights(
    model: nn.Module, dtype: str, *, version: int = 0, keep: bool = True, others: Mapping[str, Tensor] | None = None
) -> WeightsRef:
    """Return a copy of the published weights, converted to `dtype`; tensors in `others` replace the model's own.

    All ranks of a sharded model must call this function. Ranks with `keep=False` get only the manifest.
    """
    manifest, offset, kind = [], 0, getattr(torch, dtype)
    for name, tensor in published(model):
        nbytes = tensor.numel() * kind.itemsize
        manifest.append(TensorSpec(name, dtype, tuple(tensor.shape), offset, nbytes))
        offset += nbytes
    flat = np.empty(offset if keep else 0, np.uint8)
    for spec, (name, own) in zip(manifest, published(model), strict=True):
        gathered = whole((others or {}).get(name, own).to(kind))
        if keep:
            view_of(spec, torch.from_numpy(flat)).copy_(gathered)
    return WeightsRef(tuple(manifest), flat, version)


def load_weights(model: nn.Module, weights: WeightsRef) -> None:
    """Copy published weights into the model, converted to its dtype or quantised; names and shapes must match."""
    own, quantised = dict(published(model)), quantised_weights(model)
    check_fits({name: tuple(tensor.shape) for name, tensor in own.items()}, weights)
    for spec in weights.manifest:
        if layer := quantised.get(spec.name):
            layer.load(tensor_of(spec, weights))
        else:
            _load(own[spec.name], spec, weights)


def _load(target: Tensor, spec: TensorSpec, weights: WeightsRef) -> None:
    if target.dtype == getattr(torch, spec.dtype) and target.device.type == "cpu" and target.is_contiguous():
        np.copyto(raw(target), weights.body[spec.offset : spec.offset + spec.nbytes])
    else:
        target.copy_(tensor_of(spec, weights))


def fingerprint(
    model: nn.Module, dtype: str, *, exported: WeightsRef | None = None, still: dict[str, int] | None = None
) -> Fingerprint:
    """Return a hash of the model's weights, converted to `dtype`.

    The hash must be fast because samplers pause, and must only detect accidents. CRC-32 is twice as fast as SHA-256 in
    hardware, and misses one wrong tensor with probability 2^-32.

    Tensors in `exported` are not gathered again. `still` caches the checksums of all other tensors, which never change.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    specs = {spec.name: spec for spec in exported.manifest} if exported else {}
    still = {} if still is None else still

    def checksum_of(name: str) -> int:
        if exported and (spec := specs.get(name)):
            return zlib.crc32(exported.body[spec.offset : spec.offset + spec.nbytes])
        if name not in still:
            still[name] = checksum(whole(parameters[name]).to("cpu", getattr(torch, dtype)))
        return still[name]

    return combined(map(checksum_of, fingerprinted(parameters)))


def fingerprint_of_parts(weights: WeightsRef, parts: Callable[[str, Tensor], Sequence[Tensor]]) -> Fingerprint:
    """Return a hash of the tensors that `parts` returns for the name and value of each fingerprinted weight."""
    named, checksums = set(fingerprinted(spec.name for spec in weights.manifest)), list[int]()
    for spec in weights.manifest:
        if spec.name in named:
            checksums += [checksum(part.cpu()) for part in parts(spec.name, tensor_of(spec, weights))]
    return combined(checksums)


def fingerprint_of_loaded(model: nn.Module, weights: WeightsRef) -> Fingerprint:
    """Return the fingerprint of a model that has just loaded these weights, and may have quantised them."""
    layers, own = quantised_weights(model), dict(published(model))
    if not layers:
        return fingerprint(model, weights.manifest[0].dtype)

    def running(name: str, received: Tensor) -> Sequence[Tensor]:
        if layer := layers.get(name):
            return received, layer.weight.detach(), layer.scale
        return (own[name].to(received.dtype),)

    return fingerprint_of_parts(weights, running)
