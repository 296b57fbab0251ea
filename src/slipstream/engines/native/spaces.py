"""Two memory spaces of an engine: the device for its tensors while it works, and host memory while it waits.

On a CPU both spaces are host memory. The same code moves the values, so that tests need no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")


class Spaces:
    def __init__(self) -> None:
        self.parked: list[tuple[Tensor, Tensor]] = []
        """Tensors that are empty on their device, each with the copy in host memory that has its values."""

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        """Move these tensors to host memory; skip tensors that are there already.

        If this or `to_device` fails, no value is lost, and a second call continues.
        """
        for tensor in tensors:
            if tensor.numel():
                self.parked.append((tensor, copied(tensor, HOST)))
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        torch.cuda.empty_cache()  # else the next engine gets memory in pieces of the sizes of this one

    def to_device(self) -> None:
        while self.parked:
            tensor, copy = self.parked[-1]
            tensor.data = copied(copy, tensor.device)
            self.parked.pop()


def keep_on_host(width: int) -> AbstractContextManager[Any]:
    """Keep hidden states, which have `width` columns, in host memory from this context until the backward pass.

    With recomputation these are the inputs of all layers.
    """

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        hidden = tensor.dim() > 1 and tensor.shape[-1] == width and not isinstance(tensor, nn.Parameter)
        return (tensor.device, copied(tensor, HOST)) if hidden else tensor

    def unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else copied(kept[1], kept[0])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True)
