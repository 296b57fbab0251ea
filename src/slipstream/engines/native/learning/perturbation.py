"""Learned noise on the input of every layer, in the training passes of a policy loss (ALP, Ye et al., 2603.19470).

The ratio of a policy loss then compares a perturbed learner with the unperturbed policy that drew the tokens. Layer l
receives h + σ_l·ε with ε ~ N(0, 1). The logarithms of all σ are trained with the loss, by an AdamW of their own.
Samplers, evaluations and passes without gradient have no noise.

Shapes: L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.schema import PerturbationConfig
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.over_devices import layers_of
from slipstream.engines.native.rows import probe
from slipstream.errors import ModelError
from slipstream.records import derive_seed


class Perturbation:
    def __init__(self, lm: LanguageModel, config: PerturbationConfig, *, packed: bool, seed: int) -> None:
        layers = layers_of_text(lm, packed=packed)
        if not layers:
            kind = type(lm.model).__name__
            raise ModelError(f"learner.perturbation: {lm.name}: {kind} does not name its layers: drop it")
        self.device, self.seed = lm.device, seed
        self.noise_seed: int | None = None
        """Seed of the current pass; None outside of passes with noise."""
        self.log_std_L = nn.Parameter(torch.full((len(layers),), math.log(config.std), device=lm.device))
        self.optimizer = torch.optim.AdamW([self.log_std_L], lr=config.lr, weight_decay=0.0)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._perturb, index), with_kwargs=True)

    @contextmanager
    def during(self, *pass_: int) -> Iterator[None]:
        """Perturb layers in this context. A pass that is recomputed or repeated with equal numbers has equal noise."""
        self.noise_seed = derive_seed(self.seed, "perturbation", *pass_)
        try:
            yield
        finally:
            self.noise_seed = None

    def _perturb(self, index: int, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.noise_seed is None:
            return None
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.noise_seed, "layer", index))
        hidden: Tensor = args[0] if args else named["hidden_states"]
        noise = torch.randn(hidden.shape, generator=generator, device=self.device)
        hidden = hidden + (self.log_std_L[index].exp() * noise).to(hidden)
        return ((hidden, *args[1:]), named) if args else (args, named | {"hidden_states": hidden})

    @property
    def std(self) -> float:
        """Return the mean standard deviation of the noise over all layers."""
        return float(self.log_std_L.detach().exp().mean())

    @property
    def gradients(self) -> list[Tensor]:
        return [] if self.log_std_L.grad is None else [self.log_std_L.grad]

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        moments = self.optimizer.state.get(self.log_std_L, {})
        return {"log_std": self.log_std_L.detach(), **moments}

    def load(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.log_std_L.copy_(state["log_std"])
        moments = {name: value for name, value in state.items() if name != "log_std"}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": {0: moments} if moments else {}})


@torch.no_grad()
def layers_of_text(lm: LanguageModel, *, packed: bool) -> list[nn.Module]:
    """Return the layers that a pass over text calls, without layers inside of other layers, such as Mamba's mixers."""
    layers, called = layers_of(lm.model), set[nn.Module]()
    inner = {module for layer in layers for module in layer.modules() if module is not layer}
    hooks = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in layers]
    try:
        probe(lm, packed)
    finally:
        for hook in hooks:
            hook.remove()
    return [layer for layer in layers if layer in called - inner]
