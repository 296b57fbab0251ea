"""Weights as flat bytes, which the learner publishes to other engines, and fingerprints of weights.

Weights are gathered, converted and hashed in buckets, so that no rank and no sampler holds the whole model twice. A
fingerprint is one hash over the checksums of all tensors that `fingerprinted` names. An engine that loads weights
returns the fingerprint of the tensors that it runs. A sampler that quantises weights returns one of the bytes that it
received and of the codes and scales that it made of them; the learner computes the same from the weights that it
exports.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.engines.checksums import checksum, raw
from slipstream.engines.quantisation import quantised_weights
from slipstream.engines.shared_memory import empty
from slipstream.errors import ModelError
from slipstream.estimators.products import forget_packed
from slipstream.protocols import Fingerprint, TensorSpec, WeightsRef

OUTPUTS = {"o_proj", "out_proj", "c_proj", "dense", "down_proj", "dense_4h_to_h", "fc2", "fc_out", "w2", "experts"}
"""Names of the last projection of an attention or feed-forward layer, and of experts, in all model families."""
BUCKET = 64 * 2**20
"""Largest number of bytes that are gathered, converted or copied at once."""


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def is_fingerprinted(name: str) -> bool:
    return is_adapter(name) or not OUTPUTS.isdisjoint(name.split("."))


def fingerprinted(names: Iterable[str]) -> list[str]:
    """Return the names of output projections, experts and adapters, or all names if there are none of these."""
    every = list(names)
    return list(filter(is_fingerprinted, every)) or every


def combined(checksums: Iterable[int]) -> Fingerprint:
    digest = hashlib.blake2b(digest_size=8)
    for each in checksums:
        digest.update(each.to_bytes(8, "little"))
    return digest.hexdigest()


def identity_of(model: nn.Module) -> str:
    """Return a hash of all weights with their names and precision, and not only of those that `fingerprint` reads."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} {checksum(weight)}".encode())
    return digest.hexdigest()


def view_of(spec: TensorSpec, flat: Tensor) -> Tensor:
    part = flat[spec.offset : spec.offset + spec.nbytes]
    return part.view(getattr(torch, spec.dtype)).view(spec.shape)


def tensor_of(spec: TensorSpec, weights: WeightsRef) -> Tensor:
    """Return a copy of a published tensor, whose bytes may be read-only."""
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    np.copyto(raw(tensor), weights.body[spec.offset : spec.offset + spec.nbytes])
    return tensor


def check_fits(shapes: Mapping[str, tuple[int, ...]], weights: WeightsRef) -> None:
    if missing := set(shapes.items()) ^ {(spec.name, spec.shape) for spec in weights.manifest}:
        names = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(missing)[:3])
        raise ModelError(f"weights do not fit the model: {names} on one side only")


# --- sharded tensors -------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """A range of the elements of one tensor, or of the shard that each rank has of it."""

    tensor: int
    begin: int
    end: int


def buckets(sizes: Sequence[int], limit: int) -> Iterator[list[Segment]]:
    """Yield all elements of tensors of these sizes, in order, as buckets of at most `limit` elements."""
    bucket, room = list[Segment](), limit
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            bucket.append(Segment(index, begin, end))
            room, begin = room - (end - begin), end
            if not room:
                yield bucket
                bucket, room = [], limit
    if bucket:
        yield bucket


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def gather(like: Sequence[Tensor], shards: Sequence[Tensor], dtype: torch.dtype, targets: Sequence[Tensor]) -> None:
    """Copy tensors into the flat `targets` on the host, which only the first rank has; other ranks pass none.

    `like` are the model's tensors, of which all or none are sharded by rows, and `shards` this rank's values. All ranks
    must call this function. Its extra memory is a bucket in all ranks together, and the received one on the first.
    """
    first = next((each for each in like if isinstance(each, DTensor)), None)
    if first is None:
        for target, shard in zip(targets, shards, strict=True):
            copy_in_buckets(shard, target)
        return
    ranks, group = first.device_mesh.size(), first.device_mesh.get_group()
    shares = [math.ceil(each.shape[0] / ranks) * (each.numel() // each.shape[0]) for each in like]
    for bucket in buckets(shares, max(1, BUCKET // dtype.itemsize // ranks)):
        mine = torch.zeros(sum(end - begin for _, begin, end in bucket), dtype=dtype, device=first.device)
        at = 0
        for index, begin, end in bucket:
            part = shards[index].reshape(-1)[begin:end]  # shorter on the last ranks
            mine[at : at + len(part)] = part
            at += end - begin
        parts = [torch.empty_like(mine) for _ in range(ranks)] if targets else None
        dist.gather(mine.view(torch.uint8), parts and [each.view(torch.uint8) for each in parts], group=group)
        for rank, theirs in enumerate(parts or ()):
            at = 0
            for index, begin, end in bucket:
                start = rank * shares[index]
                part = targets[index][start + begin : start + end]
                part.copy_(theirs[at : at + len(part)])
                at += end - begin
        del mine, parts


def copy_in_buckets(source: Tensor, target: Tensor) -> None:
    """Copy values between devices and formats; `target` has any shape of as many elements."""
    step = BUCKET // max(source.itemsize, target.itemsize)
    for part, values in zip(torch.split(target.view(-1), step), torch.split(source.reshape(-1), step), strict=True):
        part.copy_(values.to(target.dtype) if values.is_cuda else values)  # a GPU converts before the copy


def on_first_rank(own: Tensor, shard: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return a whole tensor in host memory on the first rank, and None on others; all ranks must call this.

    `shard` replaces this rank's part of the tensor.
    """
    dtype = dtype or own.dtype
    if not isinstance(own, DTensor):
        return (own if shard is None else shard).detach().to(dtype).to("cpu")
    whole = torch.empty(own.shape, dtype=dtype) if own.device_mesh.get_local_rank() == 0 else None
    gather([own], [local(own) if shard is None else shard], dtype, [] if whole is None else [whole.view(-1)])
    return whole


# --- models in this process ------------------------------------------------------------------------------


def published(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each trained parameter: adapters if any, else all; tied weights once, by first name."""
    pairs = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    yield from [pair for pair in pairs if is_adapter(pair[0])] or pairs


def export_weights(
    model: nn.Module, dtype: str, *, version: int = 0, keep: bool = True, others: Mapping[str, Tensor] | None = None
) -> WeightsRef:
    """Return a copy of the published weights in shared memory, converted to `dtype`.

    `others` has this rank's shards of weights that replace the model's own. All ranks of a sharded model must call this
    function. Ranks with `keep=False` get only the manifest.
    """
    manifest, offset, kind = [], 0, getattr(torch, dtype)
    own = dict(published(model))
    for name, tensor in own.items():
        nbytes = tensor.numel() * kind.itemsize
        manifest.append(TensorSpec(name, dtype, tuple(tensor.shape), offset, nbytes))
        offset += nbytes
    flat = empty(offset if keep else 0)
    targets = [view_of(spec, torch.from_numpy(flat)).view(-1) for spec in manifest] if keep else []
    shards = [local((others or {}).get(name, tensor)) for name, tensor in own.items()]
    gather(list(own.values()), shards, kind, targets)
    return WeightsRef(tuple(manifest), flat, version)


def load_weights(model: nn.Module, weights: WeightsRef) -> None:
    """Copy published weights into the model, converted to its dtype or quantised; names and shapes must match."""
    own, quantised = dict(published(model)), quantised_weights(model)
    check_fits({name: tuple(tensor.shape) for name, tensor in own.items()}, weights)
    forget_packed(model)  # first: what runs is what is stored, also if an error interrupts the copies
    for spec in weights.manifest:
        if layer := quantised.get(spec.name):
            layer.load(tensor_of(spec, weights))
        else:
            _load(own[spec.name], spec, weights)


def _load(target: Tensor, spec: TensorSpec, weights: WeightsRef) -> None:
    """Copy bytes into a tensor. The bytes may be read-only, which torch tensors do not support."""
    dtype, source = getattr(torch, spec.dtype), weights.body[spec.offset : spec.offset + spec.nbytes]
    if target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
        np.copyto(raw(target), source)
        return
    start = 0
    for part in torch.split(target.view(-1), BUCKET // dtype.itemsize) if target.is_contiguous() else (target,):
        staged = torch.empty(part.shape, dtype=dtype, pin_memory=target.is_cuda)
        np.copyto(raw(staged), source[start : start + staged.nbytes])
        part.copy_(staged)
        start += staged.nbytes


def fingerprint(
    model: nn.Module, dtype: str, *, exported: WeightsRef | None = None, still: dict[str, int] | None = None
) -> Fingerprint:
    """Return a hash of the model's weights, converted to `dtype`; of a sharded model, on the first rank only.

    Tensors in `exported` are not gathered again. `still` caches the checksums of all other tensors, which never change.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    specs = {spec.name: spec for spec in exported.manifest} if exported else {}
    still = {} if still is None else still

    def checksum_of(name: str) -> int:
        if exported and (spec := specs.get(name)):
            return checksum(torch.from_numpy(exported.body[spec.offset : spec.offset + spec.nbytes]))
        if name not in still:
            weight = parameters[name]
            whole = on_first_rank(weight) if isinstance(weight, DTensor) else weight
            still[name] = 0 if whole is None else checksum(whole, getattr(torch, dtype))
        return still[name]

    return combined(map(checksum_of, fingerprinted(parameters)))


def fingerprint_of_parts(weights: WeightsRef, parts: Callable[[str, Tensor], Sequence[Tensor]]) -> Fingerprint:
    """Return a hash of the tensors that `parts` returns for the name and value of each fingerprinted weight."""
    names, checksums = set(fingerprinted(spec.name for spec in weights.manifest)), list[int]()
    for spec in weights.manifest:
        if spec.name in names:
            checksums += [checksum(part) for part in parts(spec.name, tensor_of(spec, weights))]
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
