"""Location of fingerprinted weights in vLLM's model, and checksums of the weights that run. For vLLM 0.32.

A learner publishes weights under the names of transformers' modules, and vLLM's loaders use the names of checkpoints.
The names differ where transformers fuses weights that checkpoints hold separately, for example of experts.

Shapes: K inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from slipstream.engines.checksums import checksum
from slipstream.engines.native.files import empty_model

MAX_PROBED = 256
"""Maximum columns of a packed weight that are compared with the loaded weight."""
FUSED_EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
PLAIN_KERNELS = (UnquantizedMoeBackend.CPU, UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that keep the checkpoint's layout of experts, except for packing on CPUs."""


@cache
def twin_of(name: str) -> PreTrainedModel:
    """Return transformers' version of the model, without weights."""
    return empty_model(name)


def as_saved(twin: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under a checkpoint's names, one layer at a time, because splitting fused weights copies them."""
    for _, layer in groupby(weights, key=lambda pair: _layer(pair[0])):
        yield from revert_weight_conversion(twin, dict(layer)).items()


def _layer(name: str) -> str:
    """Return the name's prefix up to its layer number, such as `model.layers.3`; "" if the name has no number."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


# --- where a weight is ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Home:
    layer: Any
    attribute: str
    turned: bool
    """True if transformers stores the transpose of vLLM's weight."""


def place_of(name: str, model: nn.Module, twin: PreTrainedModel) -> Home | str:
    """Return the location of transformers' weight `name` in vLLM's model, or the reason why it cannot be checked."""
    owner, attribute = name.rpartition(".")[::2]
    module = twin.get_submodule(owner)
    saved, _ = next(as_saved(twin, [(name, twin.get_parameter(name))]))
    if attribute in FUSED_EXPERTS:
        experts = _module(model, saved.partition(".experts.")[0] + ".experts") or _module(model, owner)
        layer = next((m for m in experts.modules() if isinstance(m, RoutedExperts)), None) if experts else None
        if layer is None:
            return f"vLLM does not keep {name} under this name"
        method = layer.quant_method
        if not isinstance(method, UnquantizedFusedMoEMethod) or method.unquantized_backend not in PLAIN_KERNELS:
            return f"vLLM's kernel changes the layout of {name} (engine_args.moe_backend = 'triton' keeps it)"
        return Home(layer, FUSED_EXPERTS[attribute], turned=getattr(module, "is_transposed", False))
    layer = _module(model, saved.rpartition(".")[0])
    layer = getattr(layer, "base_layer", layer)  # the layer inside one with an adapter
    if not isinstance(getattr(layer, attribute, None), Tensor):
        return f"vLLM does not keep {name} under this name"
    return Home(layer, attribute, turned=isinstance(module, Conv1D) and attribute == "weight")


def _module(model: nn.Module, name: str) -> nn.Module | None:
    """Return a module by its name in a checkpoint, renamed as vLLM's parent modules demand; None if it is missing."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        prefix = f"{path}." if path else ""
        if (mapper := getattr(module, "hf_to_vllm_mapper", None)) and name.startswith(prefix):
            name = prefix + mapper.get_rename_mapper().map_name(name.removeprefix(prefix))
    return modules.get(name)


# --- weights that run ----------------------------------------------------------------------------------------


def checksum_of(place: Home, loaded: Tensor) -> int:
    """Return the checksum of `loaded` if this worker runs its part of it; if not, of the weight that it runs."""
    layer, running = place.layer, getattr(place.layer, place.attribute)
    expected = loaded.mT if place.turned else loaded
    if running.device.type != "cpu" and running.shape == expected.shape:  # whole, and laid out as in checkpoints
        return checksum(running.mT if place.turned else running, loaded.dtype)
    if isinstance(layer, RoutedExperts):
        expected = _experts(layer, expected, running, inputs=place.attribute == "w2_weight")
    else:
        expected = _part(layer, expected)
        if not running.numel():
            running, expected = _unpacked(layer, expected)
    running = running.to(loaded.dtype)
    return checksum(loaded if same(running, expected) else running)


def _part(layer: Any, loaded: Tensor) -> Tensor:
    if isinstance(layer, ColumnParallelLinear):
        loaded = loaded.chunk(layer.tp_size, 0)[layer.tp_rank]
    elif isinstance(layer, RowParallelLinear) and loaded.ndim == 2:
        loaded = loaded.chunk(layer.tp_size, 1)[layer.tp_rank]
    return loaded


def _unpacked(layer: Any, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns of a CPU's packed weight, found by multiplying unit vectors, and the same expected columns."""
    size = expected.shape[1]
    columns = torch.linspace(0, size - 1, min(size, MAX_PROBED)).long()
    units_KK = torch.zeros(len(columns), size, dtype=expected.dtype)
    units_KK[torch.arange(len(columns)), columns] = 1
    running, expected = layer.cpu_linear(units_KK, layer.weight, None).t(), expected[:, columns]
    return running, expected + 0.0  # negative zeros come back as zeros


def _experts(layer: Any, loaded: Tensor, running: Tensor, *, inputs: bool) -> Tensor:
    """Return this worker's part of the experts in its kernel's layout; CPUs pad the inner width and pack it."""
    if layer.expert_map is not None:
        loaded = loaded[layer.expert_map[: len(loaded)].cpu() >= 0]
    size, rank = layer.moe_config.tp_size, layer.moe_config.tp_rank
    pieces, axis = ((loaded,), 2) if inputs else (loaded.chunk(2, 1), 1)  # gate and up are cut apart
    parts = [piece.chunk(size, axis)[rank] for piece in pieces]
    missing = running.shape[axis] // len(parts) - parts[0].shape[axis]
    expected = torch.cat([pad(part, (0, 0) * (2 - axis) + (0, missing)) for part in parts], axis)
    kernel = layer.quant_method.moe_kernel.fused_experts
    if isinstance(kernel, CPUUnquantizedExperts) and not kernel._use_zentorch:
        expected = cpu_prepack_moe_weight(expected, kernel.isa)
    return expected


def same(one: Tensor, other: Tensor) -> bool:
    """Return true if two tensors have the same shape and the same bits, compared where the first one is."""
    bits, expected = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other.to(one.device)))
    return one.shape == other.shape and torch.equal(bits, expected)


# --- adapters ---------------------------------------------------------------------------------------------------------
#
# vLLM keeps the matrices of each LoRA adapter in a slot of stacked tensors: B times the scale, and zeros up to the
# largest rank. A layer that fuses several linear layers, such as q, k and v, has one pair of stacks for each of them.


@dataclass(frozen=True)
class AdapterHome:
    layer: Any
    part: str
    """Matrix "A" or "B"."""
    at: int
    """Number of the linear layer among those that `layer` fuses."""
    fused: int
    """Number of linear layers that `layer` fuses."""
    scale: float


def adapter_place_of(name: str, runner: Any, scale: float) -> AdapterHome | str:
    """Return the location of the adapter matrix `name` in vLLM's model, or the reason why it cannot be checked."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = runner.lora_manager._adapter_manager
    owner, part = name.split(".lora_")
    mapper = getattr(runner.get_model(), "hf_to_vllm_mapper", None)
    path, _ = parse_fine_tuned_lora_name(
        f"base_model.model.{owner}.lora_{part[0]}.weight", mapper and mapper.get_rename_mapper()
    )
    for module, layer in manager.modules.items():
        fused = manager.packed_modules.get(module, [module])
        if path in fused and len(fused) == len(layer.lora_a_stacked):
            return AdapterHome(layer, part[0], fused.index(path), len(fused), scale)
    return f"vLLM has no place for an adapter at {owner}"


def adapter_checksum_of(place: AdapterHome, loaded: Tensor, slot: int) -> int:
    """Return the checksum of `loaded` if this worker runs its part of that matrix; if not, another number."""
    layer = place.layer
    stacks, part = (layer.lora_a_stacked, loaded) if place.part == "A" else (layer.lora_b_stacked, loaded * place.scale)
    running = stacks[place.at][slot, 0].cpu()
    if layer.tp_size > 1:
        cut, alone = layer.slice_lora_a if place.part == "A" else layer.slice_lora_b, place.fused == 1
        part = cut(part) if alone else cut([part if at == place.at else None for at in range(place.fused)])[place.at]
    expected = torch.zeros_like(running)
    expected[: part.shape[0], : part.shape[1]] = part
    return checksum(loaded) if same(running, expected) else checksum(loaded) ^ 1
