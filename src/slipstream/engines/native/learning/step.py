"""An optimizer step: gradients scaled, projected and clipped, then AdamW, with the size of its step.

Moments can have their own precision, and be in host memory between steps.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config.learner import LearnerConfig
from slipstream.engines.native.learning.storage import State, not_saved
from slipstream.engines.native.learning.student import Perturbation
from slipstream.engines.native.ranks import Ranks, part_of, slice_of
from slipstream.engines.native.resources import HOST, copied
from slipstream.engines.settings import LearnerSettings
from slipstream.engines.weights import local
from slipstream.protocols import Metrics

PREVIOUS_GRADIENT = "gradient"
"""Name of the previous update's gradient in the optimizer's state of a weight."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's two moments in the optimizer's state."""
MEASURED_CHUNKS = {"cpu": 2**18, "cuda": 2**24}
"""Number of weights whose step is measured at once: temporary values fit in a CPU's cache, or fill a GPU."""
EPSILON = 1e-8
"""Number that AdamW adds to the root of the second moment."""
GROWTH_INTERVAL = 100
"""Number of steps in a row without overflow after which the scale is doubled."""
FIRST_SCALE, LEAST_SCALE = 2.0**16, 1.0
"""First scale, and smallest scale: gradients that are not finite at it are an error."""
OF_SUMS = 2.0**-16
"""Further factor if the loss is a sum over an update's tokens whose gradients are divided by a count at the step."""


class Steps:
    """The optimizer of all trained weights, and of the noise on their layers."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        config: LearnerConfig,
        ranks: Ranks,
        perturbation: Perturbation | None,
    ) -> None:
        self.config, self.ranks, self.perturbation = config, ranks, perturbation
        self.optimizer = make_optimizer(parameters, config)
        self.scale = LossScale(on=config.compute_dtype == "float16")

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's shard of each gradient; None for a weight that has no gradient."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        return [None if p.grad is None else local(p.grad) for p in parameters]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the gradients and the optimizer's state."""
        yield from (gradient for gradient in self.gradients() if gradient is not None)
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()
        if self.perturbation is not None:
            self.perturbation.optimizer.zero_grad()

    def perturbed(self, *pass_: int) -> AbstractContextManager[None]:
        """Return a context for a training pass with these numbers, in which layers have noise, if any."""
        return nullcontext() if self.perturbation is None else self.perturbation.during(*pass_)

    def norm(self, factor: float, *, limit: float | None) -> tuple[float, Metrics]:
        """Multiply the gradients by a factor, and project them on a limit; return their norm, and the cosine."""
        grads = self._all_gradients()
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        metrics = {} if limit is None else project(self.optimizer, self.ranks, limit=limit)
        return math.hypot(*self.ranks.gathered(torch.nn.utils.get_total_norm(grads).item())), metrics

    def make(self, norm: float, lr: float, *, stores: bool) -> Metrics:
        """Clip gradients of this norm and make a step, unless all are 0; return its size.

        `stores`: keep the gradients, with which those of the next update are compared.
        """
        if (shrink := self.config.clip_norm / (norm + 1e-6)) < 1:  # same formula as torch's clip_grad_norm_
            torch._foreach_mul_(self._all_gradients(), shrink)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics: Metrics = {}
        if norm > 0:  # without any gradient, weight decay and momentum must not change the weights either
            if "optimizer" in self.config.offload:
                step_from_host(self.optimizer)
            else:
                self.optimizer.step()
            self.scale.succeeded()
            if self.perturbation is not None:
                self.perturbation.optimizer.step()
            if stores:
                store_gradient(self.optimizer)
            squares, weights = zip(*self.ranks.gathered(squared_step(self.optimizer)), strict=True)
            metrics["step_rms"] = math.sqrt(sum(squares) / sum(weights))
        if self.perturbation is not None:
            metrics["perturbation/std"] = self.perturbation.std
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the fields of a checkpoint's `State` about steps, besides the optimizer."""
        return {
            "perturbation": {} if self.perturbation is None else self.perturbation.state(),
            "loss_scale": (self.scale.value, self.scale.steps) if self.scale.on else None,
        }

    def restore(self, path: Path, found: State) -> None:
        load_moments(self.optimizer, found.moments, in_host_memory="optimizer" in self.config.offload)
        if self.perturbation is not None:
            if not found.perturbation:
                raise not_saved(path, "the learned noise on the layers", "learner.perturbation")
            self.perturbation.load(found.perturbation)
        if self.scale.on:
            self.scale.value, self.scale.steps = found.loss_scale or (self.scale.value, 0)

    def _all_gradients(self) -> list[Tensor]:
        noise = [] if self.perturbation is None else self.perturbation.gradients
        return [*(gradient for gradient in self.gradients() if gradient is not None), *noise]


def learning_rate(plan: LearnerSettings, number: int, stage: int) -> float:
    """Return the learning rate of an update (from 1): linear warm-up, then constant or a cosine decay to zero.

    Both begin again after the first `stage` updates, which are supervised.
    """
    if (supervised := plan.supervised) is not None and number <= stage:
        return supervised.lr * min(1.0, number / max(supervised.warmup, 1))
    config, start = plan.settings, 0 if supervised is None else stage
    if (update := number - 1 - start) < config.warmup:
        return config.lr * (update + 1) / config.warmup
    if config.decay == "constant":
        return config.lr
    done = (update - config.warmup) / max(1, plan.updates - start - config.warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


# --- loss scale -------------------------------------------------------------------------------------------------------
#
# Passes in float16 round gradients below 6e-8 to 0 and overflow above 65504. The loss is multiplied by the scale before
# the backward pass; gradients are divided by it before the step. A step with gradients that are not finite is skipped,
# and the scale is halved. It is doubled after `GROWTH_INTERVAL` steps in a row without an overflow.  (Micikevicius et
# al., 1710.03740)


class LossScale:
    def __init__(self, *, on: bool) -> None:
        self.on, self.value, self.steps = on, FIRST_SCALE if on else 1.0, 0
        self.applied = 1.0
        """Factor of the gradients since the last step."""

    def apply(self, *, summed: bool) -> float:
        """Return the factor of the losses until the next step."""
        self.applied = self.value * (OF_SUMS if summed and self.on else 1.0)
        return self.applied

    def overflowed(self) -> bool:
        """Halve the scale after gradients that are not finite; return False if it is already the smallest."""
        if not self.on or self.value <= LEAST_SCALE:
            return False
        self.value, self.steps = self.value / 2, 0
        return True

    def succeeded(self) -> None:
        self.steps += 1
        if self.on and self.steps == GROWTH_INTERVAL:
            self.value, self.steps = self.value * 2, 0


# --- AdamW ------------------------------------------------------------------------------------------------------------


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


def load_moments(optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor], *, in_host_memory: bool) -> None:
    """Give an optimizer the state that `moments_of` returned, on any number of ranks.

    torch's own `load_state_dict` loads the step counts alone: it would round moments to the dtype of the weights, and
    move all of them to the weights' device.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = dict[int, dict[str, Tensor]]()
    for key, value in saved.items():
        index, _, name = key.partition(".")
        own.setdefault(int(index), {})[name] = value
    counts = {i: {"step": state.pop("step")} for i, state in own.items()}
    # learning rate, betas and weight decay do not change
    optimizer.load_state_dict({"state": counts, "param_groups": optimizer.state_dict()["param_groups"]})
    for i, state in own.items():
        like = parameters[i]
        for name, value in state.items():  # sharded like its weight
            is_moment = name in MOMENTS
            dtype = getattr(optimizer, "moments", like.dtype) if is_moment else like.dtype
            shard = slice_of(value, like)
            there = local(shard).to(HOST) if in_host_memory and is_moment else shard.to(like.device)
            optimizer.state[like][name] = there.to(dtype)


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

    This is the squared norm of AdamW's last step divided by the learning rate, without weight decay. m̂ = m / (1 − β₁ᵗ)
    and v̂ = v / (1 − β₂ᵗ) are the moments corrected for their number of steps t. With these factors outside of the sum
    the moments are read once.
    """
    sums, count = list[Tensor](), 0  # of all weights, so that a GPU is waited for once
    for group in optimizer.param_groups:
        low, high = group["betas"]
        states = [(each, state) for each in group["params"] if (state := optimizer.state.get(each))]
        steps = torch.stack([state["step"] for _, state in states]).tolist() if states else ()
        for (parameter, state), step in zip(states, steps, strict=True):
            moments = [local(state[name]).flatten() for name in MOMENTS]
            mean_factor, square_factor = 1 - low**step, 1 - high**step
            size = MEASURED_CHUNKS.get(parameter.device.type, MEASURED_CHUNKS["cuda"])
            for start in range(0, len(moments[0]), size):
                mean, square = (each[start : start + size].to(parameter.device, torch.float32) for each in moments)
                ratio = square.sqrt().add_(EPSILON * square_factor**0.5)
                torch.div(mean, ratio, out=ratio)
                sums.append(torch.dot(ratio, ratio).double() * (square_factor / mean_factor**2))
            count += len(moments[0])
    return torch.stack([each.to(sums[0].device) for each in sums]).sum().item() if sums else 0.0, count


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


# --- gradient of the previous update ----------------------------------------------------------------------------------


@torch.no_grad()
def project(optimizer: torch.optim.Optimizer, ranks: Ranks, *, limit: float) -> Metrics:
    """Reduce the gradient's part along that of the previous update until their cosine is `limit`; return the cosine.

    g − p (a − limit·b/√(1 − limit²))/‖p‖ if cos(g, p) > limit, with g = a·p/‖p‖ + a part of length b orthogonal to p
    (GAC, 2603.01501). p is the previous gradient before its own projection. Return {} if one of the gradients is zero,
    or the new one is not finite.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    pairs = [
        (local(each.grad), local(optimizer.state[each][PREVIOUS_GRADIENT]))
        for each in parameters
        if PREVIOUS_GRADIENT in optimizer.state[each]
    ]
    parts, zero = list[Tensor](), torch.zeros(3, dtype=torch.float64)
    for one, before in pairs:
        wide, past = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (one, before))
        parts.append(torch.stack([(wide * past).sum(), wide.square().sum(), past.square().sum()]).double())
    sums = torch.stack(parts).sum(0).cpu() if parts else zero
    dot, now, old = sum(ranks.gathered(sums), start=zero).tolist()
    if not now or not old or not math.isfinite(now):
        return {}
    across = math.sqrt(max(now - dot**2 / old, 0.0) / (1 - limit**2))
    excess = max(dot / math.sqrt(old) - limit * across, 0.0) / math.sqrt(old)
    for one, before in pairs:
        raw = one.clone()
        one.sub_(before, alpha=excess)
        before.copy_(raw)
    return {"gradient/cosine_previous": dot / math.sqrt(now * old)}


@torch.no_grad()
def store_gradient(optimizer: torch.optim.Optimizer) -> None:
    """Store the gradient of each weight that has none from an earlier update; call it after the optimizer's step."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None and PREVIOUS_GRADIENT not in optimizer.state[each]:
                optimizer.state[each][PREVIOUS_GRADIENT] = each.grad.clone()
