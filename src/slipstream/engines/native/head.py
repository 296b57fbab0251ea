"""Find the head of a causal LM: the linear layer that computes logits, and the scales and cap around this layer.

Some models scale or soft-cap their logits (Cohere, Granite, Gemma), or scale the hidden state (MiniCPM). These factors
are measured: known numbers replace the output of the linear layer, and the logits show how the model changes them. A
model that changes its logits in any other way is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.errors import ModelError, first_line
from slipstream.estimators.logprobs.head import Head
from slipstream.estimators.logprobs.tiles import Bend

LADDER = (0.0, 2**-10, 2**-5, 0.5, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 2.0**15)
"""Numbers that replace the output of the linear layer, from far below to far above any cap; used with both signs."""


@torch.no_grad()
def find_head(name: str, model: PreTrainedModel, backbone: nn.Module) -> Head:
    layer, kind = model.get_output_embeddings(), type(model).__name__
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"{name}: {kind} has no linear head, which is required")
    ids = torch.arange(1, 5, device=model.device)[None] % layer.out_features
    try:
        hidden = getattr(backbone(ids), "last_hidden_state", None)
        expected = model(ids).logits
    except Exception as error:  # any exception of the model's code means that it cannot be used
        raise ModelError(f"{name}: {kind} cannot run a forward pass in {model.dtype}: {first_line(error)}") from None
    if hidden is None:
        raise ModelError(f"{name}: the backbone of {kind} returns no hidden states")
    if not expected.isfinite().all():
        raise ModelError(f"{name}: its logits are not finite: the weights are damaged")
    before, bend = _scale_before(model, layer, ids, hidden), _bend_after(model, layer, ids)
    if before is None:
        raise ModelError(f"{name}: {kind} changes the hidden state before its head")
    if bend is None:
        raise ModelError(f"{name}: {kind} does more to its logits than scale and cap them")
    if layer.bias is not None and before != 1.0:
        raise ModelError(f"{name}: {kind} scales the hidden state before a head with a bias: that is not supported")
    head = Head(layer, before * bend.scale, bend.cap)
    difference = (head(hidden).double() - expected.double()).abs().max() / expected.double().abs().max()
    if not difference <= tolerance(layer.weight.dtype):
        raise ModelError(f"{name}: {kind} does more to its logits than scale and cap them")
    return head


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative difference that rounding can cause between two ways to compute the same values."""
    return 1e-4 if dtype.itemsize >= 4 else 0.05


def _scale_before(model: PreTrainedModel, layer: nn.Linear, ids: Tensor, hidden: Tensor) -> float | None:
    """Return the factor by which the model scales the hidden state before its head; None if it does anything else."""
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        model(ids)
    finally:
        hook.remove()
    found, given = seen[0].double(), hidden.to(seen[0].dtype).double()
    if torch.equal(found, given):
        return 1.0
    if found.shape != given.shape:
        return None
    scale = float((found * given).sum() / given.square().sum())
    explained = (found - scale * given).norm() <= tolerance(layer.weight.dtype) * found.norm()
    return scale if scale > 0 and explained else None


def _bend_after(model: PreTrainedModel, layer: nn.Linear, ids: Tensor) -> Bend | None:
    """Return scale and soft cap that the model applies to the linear layer's output; None if it does anything else."""
    ladder = torch.tensor([*LADDER, *(-x for x in LADDER)], device=model.device)
    x_V = ladder.repeat(-(-layer.out_features // len(ladder)))[: layer.out_features]
    rungs = min(len(LADDER), layer.out_features)

    def planted(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return x_V.expand(output.shape).clone()

    hook = layer.register_forward_hook(planted)
    try:
        logits_V = model(ids).logits[0, -1].double()
    finally:
        hook.remove()
    scale, most = float(logits_V[1] / x_V[1]), float(logits_V[rungs - 1])
    cap = None if most >= 0.5 * scale * float(x_V[rungs - 1]) else most
    if not (scale > 0 and (cap is None or cap > 0)):
        return None
    expected = Bend(1.0, scale, cap).logits(x_V.double())
    # a model may round its logits to half precision even if it receives float32
    if not torch.allclose(logits_V, expected, rtol=1e-5 if layer.weight.dtype.itemsize >= 4 else 0.01, atol=1e-6):
        return None
    return Bend(scale=_plain(scale), cap=cap if cap is None else _plain(cap))


def _plain(x: float) -> float:
    """Round to six digits, which removes float32 rounding errors."""
    return float(f"{x:.6g}")
