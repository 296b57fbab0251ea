"""Routers of a mixture of experts: record which experts they choose in a pass, or prescribe the choice.

A router scores all experts for every token; `torch.topk` then chooses X of them. This file changes nothing else: inside
of a router's forward, the last call of topk returns the prescribed experts with their current scores. The weights of
the experts (gates) follow from these scores as the model computes them, so gradients pass through the gates.

Shapes: T tokens of a pass, R routers in the order in which a pass runs them, E experts, X of which a router chooses.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slipstream.engines.native.config import experts_of
from slipstream.engines.native.model import LanguageModel
from slipstream.errors import ModelError, first_line
from slipstream.records import Ints, Rollout

FREE = -1
"""Value in place of an expert id if no choice is prescribed, or none is known."""
NO_EXPERTS = torch.empty(0)
TEST_TOKENS = 23
"""Number of tokens of the passes that check the routers."""


@dataclass(frozen=True)
class Routers:
    """The routers of a model, which `routers_of` has prepared."""

    modules: tuple[nn.Module, ...]
    experts: int
    chosen: int
    """Number of experts that a router chooses for a token (X)."""


class Choices:
    """Choices of all routers in one pass."""

    def __init__(self, routers: Routers, given_TRX: Tensor | None = None, *, keeps_logits: bool = False) -> None:
        """Prescribe experts. FREE leaves one choice to the router, and None leaves all choices to the routers.

        With `keeps_logits` the scores of all experts before the softmax are kept, with their gradient.
        """
        self.given_TRX, self.keeps_logits = given_TRX, keeps_logits
        self.own, self.used, self.logits = ([NO_EXPERTS] * len(routers.modules) for _ in range(3))
        """For each router the experts [T, X] that it would choose by itself, those that it uses, and its scores."""

    def choose(self, number: int, scores_TE: Tensor, found: Any) -> Any:
        """Return the result of topk for a router: its own, or the prescribed experts with their scores."""
        own_TX = used_TX = found.indices
        if self.given_TRX is not None:
            given_TX = self.given_TRX[:, number].to(own_TX)
            used_TX = torch.where(given_TX == FREE, own_TX, given_TX)
            found = torch.return_types.topk((scores_TE.gather(-1, used_TX), used_TX))
        self.own[number], self.used[number] = own_TX, used_TX  # a recomputation of activations finds the same
        return found


def together(of_routers: Sequence[Tensor]) -> Tensor:
    """Return the experts [T, X] of all routers, which may be on several devices, as [T, R, X] on the first."""
    return torch.stack([each.to(of_routers[0]) for each in of_routers], 1)


def experts_of_record(rollout: Rollout) -> Ints | None:
    """Return the recorded choices of all passes before the last token, [T, R, X], FREE if unknown; None: no record."""
    if rollout.router is None or rollout.prompt_router is None:
        return None
    first = len(rollout.prompt.tokens) - 1
    both = np.concatenate([rollout.prompt_router[:first], rollout.router])
    return np.where(both == np.iinfo(both.dtype).max, FREE, both.astype(np.int16))


def with_experts(rollout: Rollout, chosen_TRX: Tensor, experts: int) -> Rollout:
    """Return a rollout that holds the choices of all passes before its last token."""
    narrow: Ints = chosen_TRX.cpu().numpy().astype(np.uint8 if experts < 256 else np.uint16)  # FREE: the largest number
    first = len(rollout.prompt.tokens) - 1
    return replace(rollout, router=narrow[first:], prompt_router=narrow[:first])


CURRENT_CHOICES: ContextVar[Choices | None] = ContextVar("choices", default=None)
"""Choices of the current pass; None: routers run as the model has them, and nothing is recorded."""


@contextmanager
def choosing(choices: Choices | None) -> Iterator[None]:
    token = CURRENT_CHOICES.set(choices)
    try:
        yield
    finally:
        CURRENT_CHOICES.reset(token)


class Watch(TorchFunctionMode):
    """Call a function at every topk in this context, with its scores and its result; it returns the result to use."""

    def __init__(self, at_topk: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.at_topk = at_topk

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return self.at_topk(args[0], result) if function in (torch.topk, Tensor.topk) else result


def _routed(forward: Callable[..., Any], number: int, calls: int, *args: Any, **rest: Any) -> Any:
    """Run a router; the last of its `calls` calls of topk chooses the experts."""
    if (choices := CURRENT_CHOICES.get()) is None:
        return forward(*args, **rest)
    left = calls

    def at_topk(scores: Tensor, found: Any) -> Any:
        nonlocal left
        left -= 1
        return choices.choose(number, scores, found) if left == 0 else found

    with Watch(at_topk):
        out = forward(*args, **rest)
    if choices.keeps_logits and choices.logits[number] is NO_EXPERTS:  # a recomputation has none with this gradient
        choices.logits[number] = out[0]
    return out


def routers_of(lm: LanguageModel, *, field: str, logits: bool = False) -> Routers:
    """Prepare the routers of a model; raise a ModelError if their choices cannot be prescribed exactly.

    `field` is the config key that asks for it. With `logits` the routers must return their scores, too.
    """
    kind, training = type(lm.model).__name__, lm.model.training
    lm.model.eval()  # dropout would make any two passes differ
    try:
        routers = _find(lm)
        reason = "they call no topk over all experts" if routers is None else _failure(lm, routers, logits)
    except Exception as error:  # any exception of the model's code means that its routers cannot be used
        routers, reason = None, first_line(error)
    lm.model.train(training)
    if routers is None or reason:
        raise ModelError(f"{lm.name}: the routers of {kind} cannot be recorded and replayed: {reason}: drop {field}")
    return routers


def _pass(lm: LanguageModel, choices: Choices | None) -> Tensor:
    ids = (torch.arange(TEST_TOKENS, device=lm.device) * 7 + 3) % lm.vocab_size
    with choosing(choices):
        out: Tensor = lm.backbone(input_ids=ids[None], use_cache=False).last_hidden_state
    return out


@torch.no_grad()
def _find(lm: LanguageModel) -> Routers | None:
    """Wrap the forward of every module in which a topk over all experts is called; None if there is none."""
    experts = experts_of(lm.model.config)
    stack: list[nn.Module] = []
    found: dict[nn.Module, list[tuple[int, ...]]] = {}

    def at_topk(scores: Tensor, result: Any) -> Any:
        if stack:
            found.setdefault(stack[-1], []).append((*scores.shape, result.indices.shape[-1]))
        return result

    hooks = []
    for module in lm.backbone.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, args: stack.append(module)))
        hooks.append(module.register_forward_hook(lambda module, args, out: stack.pop() and None, always_call=True))
    with Watch(at_topk):
        _pass(lm, None)
    for hook in hooks:
        hook.remove()
    chosen = {module: shapes for module, shapes in found.items() if shapes[-1][:-1] == (TEST_TOKENS, experts)}
    sizes = {shapes[-1][-1] for shapes in chosen.values()}
    if len(sizes) != 1 or not experts:
        return None
    for number, (module, shapes) in enumerate(chosen.items()):
        module.forward = partial(_routed, module.forward, number, len(shapes))
    return Routers(tuple(chosen), experts, sizes.pop())


@torch.no_grad()
def _failure(lm: LanguageModel, routers: Routers, logits: bool) -> str | None:
    """Return an error text if replayed choices do not reproduce a pass bit by bit, or others do; else None."""
    if routers.chosen == routers.experts:
        return "every token uses all experts"
    plain, free = _pass(lm, None), Choices(routers, keeps_logits=logits)
    again = _pass(lm, free)
    used_TRX = together(free.used)
    replayed, prescribed_TRX = _pass(lm, Choices(routers, used_TRX)), (used_TRX + 1) % routers.experts
    # some kernels add in any order: then two equal passes differ, and bits prove nothing
    if torch.equal(plain, again) and not torch.equal(replayed, plain):
        return "a pass with the choices of another one gives other hidden states"
    outputs: list[list[Tensor]] = []

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        tensors = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        outputs.append([x for x in tensors if x.shape == (TEST_TOKENS, routers.chosen)])

    hooks = [module.register_forward_hook(keep) for module in routers.modules]
    moved = _pass(lm, Choices(routers, prescribed_TRX))
    for hook in hooks:
        hook.remove()
    if torch.equal(moved, plain):
        return "a pass with other choices gives the same hidden states"
    for number, found in enumerate(outputs):
        gates = [x for x in found if x.is_floating_point()]
        if len(gates) != 1 or not bool((gates[0].isfinite() & (gates[0] != 0)).all()):
            return "an expert that they do not choose themselves gets no weight"
        if not all(torch.equal(x, prescribed_TRX[:, number].to(x)) for x in found if x is not gates[0]):
            return "they return other experts than those that topk chose"
    if logits and any(x.shape != (TEST_TOKENS, routers.experts) for x in free.logits):
        return "they do not return a score of each expert"
    return None
