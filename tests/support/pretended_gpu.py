"""A pretended GPU: tensors that compute on the CPU and say that they are on `cuda`, to run CUDA branches without one.

As on a real GPU, an operation refuses tensors of both devices, but for scalars, index tensors and copies; a tensor must
come to the host before numpy sees it; and `is_cuda` is true. Kernels are the CPU's, so Triton and compiled attention
must be replaced by whoever uses this. Factories (`torch.empty(…, device="cuda")`) are seen inside `pretend_gpu()` only,
in the thread that entered it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
MIXING = {aten.copy_.default, aten._to_copy.default, aten.set_.source_Tensor}
JOINED = {aten.cat.default, aten.stack.default}
COMPOSITE = {aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.to.other}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class OnGpu(Tensor):
    """A tensor on the pretended GPU; `held` is the same memory as a CPU tensor, which is what torch itself sees."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        found = Tensor._make_subclass(cls, held, held.requires_grad)
        found.held = held
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnGpu({self.held!r})"

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.held.tolist()

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.to("cpu")

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, dtype, _, _ = torch._C._nn._parse_to(*[host_of(x) for x in args], **kwargs)
        wanted = next((x.device for x in args if isinstance(x, OnGpu)), device)
        if wanted is not None and wanted.type == "cpu":
            return aten._to_copy(self, dtype=dtype, device=wanted)
        if dtype in (None, self.dtype):
            return self.clone() if copy else self
        return super().to(dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


def host_of(x: Any) -> Any:
    return x.held if isinstance(x, OnGpu) else x


def dispatched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = any(isinstance(x, OnGpu) for x in tensors)
    target = kwargs.get("device")
    goes = there if target is None else is_cuda(target)
    if in_backward() and func is not aten._to_copy.default:
        goes = there or not tensors
    if there and func not in MIXING:
        checked = tensors if func not in INDEXED else [args[0], *args[2:3]]
        mixed = [x for x in checked if not isinstance(x, OnGpu) and (x.ndim > 0 or func in JOINED)]
        if mixed:
            shapes = [(type(x).__name__, tuple(x.shape)) for x in tensors]
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found cuda:0 and cpu: {shapes}")
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten._to_copy.default and goes != there:  # a copy between devices is a copy
        kwargs = {key: value for key, value in kwargs.items() if key != "non_blocking"}
    out = func(*tree_map(host_of, args), **tree_map(host_of, kwargs))
    if func is aten._to_copy.default and goes != there and out is host_of(args[0]):
        out = out.clone()
    if not goes:
        return out
    known = {id(x.held): x for x in tensors if isinstance(x, OnGpu)}  # what is done in place returns its argument
    return tree_map(lambda x: known[id(x)] if id(x) in known else OnGpu(x) if isinstance(x, Tensor) else x, out)


def in_backward() -> bool:
    """In torch's own formulas of gradients new tensors are made where torch believes the others to be: on the CPU."""
    return torch._C._current_autograd_node() is not None


class Factories(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COMPOSITE:  # under inference mode they come as they are
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return dispatched(func, args, kwargs or {})


class Moves(TorchFunctionMode):
    """Handles ways to the device on which torch asks no dispatch mode, or puts new tensors on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], OnGpu) and not isinstance(args[0], OnGpu):
            return args[0].to(CUDA, args[1].dtype)
        if func in (torch.tensor, torch.as_tensor) and is_cuda(kwargs.get("device")):
            return func(*args, **kwargs | {"device": "cpu"}).to(CUDA)
        if func is torch._C._nn.pad_sequence:
            found = func([host_of(x) for x in args[0]], *args[1:], **kwargs)
            return OnGpu(found) if isinstance(args[0][0], OnGpu) else found
        return func(*args, **kwargs)


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


@contextmanager
def pretend_gpu() -> Iterator[None]:
    initialise, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None  # torch asks for it before it dispatches
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `module.to` makes parameters of OnGpu
    try:
        with Moves(), Factories():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch.cuda._lazy_init = initialise
