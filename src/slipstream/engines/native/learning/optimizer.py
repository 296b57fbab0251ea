"""AdamW whose moments can have their own precision and be in host memory, and the size of its steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.config.schema import LearnerConfig
from slipstream.engines.native.ranks import part_of
from slipstream.engines.native.spaces import HOST, copied
from slipstream.engines.weights import local

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's two moments in the optimizer's state."""
CHUNKS = {"cpu": 2**18, "cuda": 2**24}
"""Number of weights whose step is measured at once: temporary values fit in a CPU's cache, or fill a GPU."""
EPSILON = 1e-8
"""Number that AdamW adds to the root of the second moment."""


def make_optimizer(parameters: list[torch.nn.Parameter], config: LearnerConfig) -> torch.optim.Optimizer:
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": EPSILON,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer_dtype in (None, config.dtype):
        # one kernel, and no temporary copies of weights; on CPUs it reads weights and moments as they lie in memory
        fused = all(parameter.is_contiguous() for parameter in parameters)
        return torch.optim.AdamW(parameters, fused=fused or None, **options)
    return MixedAdamW(parameters, moments=getattr(torch, config.optimizer_dtype), **options)


def park(optimizer: torch.optim.Optimizer) -> None:
    """Move all moments to host memory; of sharded weights, those of this rank's shard."""
    for state in optimizer.state.values():
        state |= {name: copied(local(state[name]), HOST) for name in MOMENTS if name in state}


def step_from_host(optimizer: torch.optim.Optimizer) -> None:
    """Make a step with moments in host memory. Move those of one weight at a time to its device and back."""
    groups = optimizer.param_groups
    try:
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, device = optimizer.state[parameter], parameter.device
                state |= {name: part_of(copied(state[name], device), parameter) for name in MOMENTS if name in state}
                optimizer.param_groups = [group | {"params": [parameter]}]
                optimizer.step()
                state |= {name: copied(local(state[name]), HOST) for name in MOMENTS}
    finally:
        optimizer.param_groups = groups


@torch.no_grad()
def squared_step(optimizer: torch.optim.Optimizer) -> tuple[float, int]:
    """Return Σ (m̂ / (√v̂ + ε))² over this rank's weights, and their number.

    This is the squared norm of AdamW's last step divided by the learning rate, without weight decay. m̂ and v̂ are the
    moments corrected for their number of steps.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in optimizer.param_groups:
        low, high = group["betas"]
        for parameter in group["params"]:
            if not (state := optimizer.state.get(parameter)):
                continue
            step = float(state["step"])
            moments = [local(state[name]).flatten() for name in MOMENTS]
            size = CHUNKS.get(parameter.device.type, CHUNKS["cuda"])
            for start in range(0, len(moments[0]), size):
                mean, square = (each[start : start + size].to(parameter.device, torch.float32) for each in moments)
                scale = (square / (1 - high**step)).sqrt_().add_(EPSILON)
                total += (mean / (1 - low**step)).div_(scale).square_().sum().cpu()
            count += len(moments[0])
    return total.item(), count


class MixedAdamW(torch.optim.Optimizer):
    """AdamW with moments stored in the dtype `moments`; arithmetic is in at least float32."""

    def __init__(self, parameters: list[torch.nn.Parameter], *, moments: torch.dtype, **options: Any) -> None:
        super().__init__(parameters, options)
        self.moments = moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(parameter, dtype=self.moments) for name in MOMENTS}
        state["step"] += 1
        wide = torch.promote_types(parameter.dtype, torch.float32)
        (low, high), lr, grad = group["betas"], group["lr"], grad.to(wide)
        mean = state["exp_avg"].to(wide).lerp_(grad, 1 - low)
        square = state["exp_avg_sq"].to(wide).mul_(high).addcmul_(grad, grad, value=1 - high)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        step = state["step"].item()
        scale = square.sqrt_().div_((1 - high**step) ** 0.5).add_(EPSILON)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.copy_(parameter.to(wide).addcdiv_(mean, scale, value=-lr / (1 - low**step)))

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state and cast the moments back to dtype `moments`: torch casts them to the dtype of the weights."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in MOMENTS:
                state[name] = state[name].to(self.moments)
