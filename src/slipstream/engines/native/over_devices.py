"""Split a model's layers over several devices; its embeddings and its head, which computes results, are on the first.

Each device holds a contiguous run of layers, and the hidden states move from device to device during a pass. A pass
starts and ends on the first device.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError


def devices_from(first: torch.device, number: int) -> list[torch.device]:
    """Return `number` devices, beginning with `first`; all CPUs are one device."""
    if first.type == "cpu":
        return [first] * number
    start = first.index or 0
    return [torch.device(first.type, start + i) for i in range(number)]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: the modules that the model lists in `_no_split_modules`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in {id(each): each for each in tensors}.values())


def tensors_of(module: nn.Module) -> Iterable[Tensor]:
    return chain(module.parameters(), module.buffers())


def sizes_of(model: nn.Module) -> tuple[int, list[int]]:
    """Return the bytes of all weights outside the layers, and the bytes of each layer."""
    layers = [bytes_of(tensors_of(layer)) for layer in layers_of(model)]
    return bytes_of(tensors_of(model)) - sum(layers), layers


def split_of(outside: int, layers: Sequence[int], devices: int) -> list[int]:
    """Return the device of each layer, so that the fullest device has as few bytes as possible.

    The first device also holds the bytes `outside` the layers. Every device gets at least one layer.
    """
    assert devices <= len(layers)

    def filled(most: int) -> list[int] | None:
        """Return the split that fills each device up to `most` bytes in turn; None if the last one has too little."""
        split, device, used = list[int](), 0, outside
        for number, layer in enumerate(layers):
            left = len(layers) - number
            empty = device not in split
            if not empty and (used + layer > most or left < devices - device):
                device, used = device + 1, 0
            used += layer
            split.append(device)
            if device == devices or (used > most and device > 0):
                return None
        return split

    low, high = 1, outside + sum(layers)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if filled(middle) else (middle + 1, high)
    best = filled(low)
    assert best is not None
    return best


def fullest(outside: int, layers: Sequence[int], devices: int) -> int:
    """Return the bytes of the fullest device of `split_of`."""
    used = [outside] + [0] * (devices - 1)
    for device, layer in zip(split_of(outside, layers, devices), layers, strict=True):
        used[device] += layer
    return max(used)


def spread(name: str, model: nn.Module, devices: Sequence[torch.device]) -> None:
    """Move the model's layers to these devices, and everything else to the first."""
    layers, (outside, sizes) = layers_of(model), sizes_of(model)
    if len(layers) < len(devices):
        raise ModelError(f"{name}: its {len(layers)} layers cannot be split over {len(devices)} devices")
    for layer, index in zip(layers, split_of(outside, sizes, len(devices)), strict=True):
        layer.to(devices[index])
        layer.register_forward_pre_hook(partial(_move_inputs, devices[index]), with_kwargs=True)
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in inside:
            module._apply(lambda tensor: tensor.to(devices[0]), recurse=False)  # type: ignore[no-untyped-call]
    layers[-1].register_forward_hook(lambda module, inputs, output: moved(output, devices[0]))


def _move_inputs(device: torch.device, module: nn.Module, inputs: Any, options: Any) -> tuple[Any, Any]:
    return moved(inputs, device), moved(options, device)


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with all tensors in it (also in tuples, lists and dicts) on this device."""
    match value:
        case Tensor():
            return value.to(device)
        case tuple() | list():
            return type(value)(moved(each, device) for each in value)
        case dict():
            return {name: moved(each, device) for name, each in value.items()}
    return value
