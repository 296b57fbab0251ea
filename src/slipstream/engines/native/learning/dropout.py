"""Turn off dropout and router noise during training unless the user requests dropout, and check the result.

Rollouts are drawn without dropout, so a gradient with dropout would belong to another policy. Some models apply dropout
outside of modules, so training runs in evaluation mode, which has no randomness. Only modules that recompute
activations need training mode; their dropout probabilities are set to 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.rows import difference, probe, recompute_contexts
from slipstream.errors import ModelError, first_line


def prepare(lm: LanguageModel, *, dropout: bool, checkpointing: bool, packed: bool) -> None:
    """Set up a model for training; check that two passes give equal results, or different results if `dropout`."""
    if checkpointing:
        if not lm.model.supports_gradient_checkpointing:
            kind = type(lm.model).__name__
            raise ModelError(f"{lm.name}: {kind} cannot recompute activations: write learner.checkpointing = false")
        recompute_activations(lm.model)
    if dropout:
        lm.model.train()
    else:
        lm.model.eval()
        for module in lm.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
                _silence(module)
    _prove(lm, dropout=dropout, packed=packed)


def recompute_activations(model: PreTrainedModel) -> None:
    """Let every layer recompute its activations in the backward pass."""
    newer = "activation_checkpointing_enable"
    enable = getattr(model, newer if hasattr(model, newer) else "gradient_checkpointing_enable")
    enable({"use_reentrant": False, "context_fn": recompute_contexts})


def _silence(module: nn.Module) -> None:
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float):
            setattr(module, name, 0.0)


@torch.no_grad()
def _prove(lm: LanguageModel, *, dropout: bool, packed: bool) -> None:
    kind, trained = type(lm.model).__name__, [weight for weight in lm.model.parameters() if weight.requires_grad]
    # each gradient is freed at once, so that those of all weights are never in memory
    hooks: list[Any] = [weight.register_post_accumulate_grad_hook(_free_gradient) for weight in trained]
    try:
        with torch.enable_grad():
            once, again = probe(lm, packed), probe(lm, packed)
            torch.autograd.backward(torch.cat(again).sum())
    except Exception as error:  # any exception of the model's code means that it cannot be trained
        raise ModelError(f"{lm.name}: {kind} cannot be trained here: {first_line(error)}") from None
    finally:
        for hook in hooks:
            hook.remove()
    with deterministic(lm.model):
        plain = probe(lm, packed)
    drawn = max(difference(once, again), difference(once, plain))
    rounding = 1e-4 if lm.head.weight.dtype.itemsize >= 4 else 0.02
    if dropout and drawn <= rounding:
        raise ModelError(f"{lm.name}: {kind} has no dropout (its config disables it): drop learner.dropout = true")
    if not dropout and not drawn <= rounding:
        raise ModelError(
            f"{lm.name}: two passes of {kind} in training mode differ by {drawn:.1%}, without any dropout: "
            "write learner.checkpointing = false"
        )


def _free_gradient(weight: nn.Parameter) -> None:
    weight.grad = None


@contextmanager
def deterministic(model: nn.Module) -> Iterator[None]:
    """Switch the model to evaluation mode within this context, for passes without gradient."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
