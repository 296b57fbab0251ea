"""Location of a LoRA adapter's matrices in vLLM's layers, and checksums of the matrices that run. For vLLM 0.32.

vLLM keeps the matrices of each adapter in a slot of stacked tensors: B times the scale, and zeros up to the largest
rank. A layer that fuses several linear layers, such as q, k and v, has one pair of stacks for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.engines.checksums import checksum
from slipstream.engines.vllm.layers import same


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
