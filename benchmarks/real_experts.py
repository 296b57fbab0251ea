"""A real mixture of experts whose responses are enumerated, and routers that swap experts, for `router.py`.

Shapes: B responses, T tokens of each, N = B · T, R routers, E experts, X chosen experts, P prefixes, K rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import torch
from torch import Tensor

from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.routers import Choices, Routers, choosing, routers_of, together
from slipstream.estimators.correction import importance_ratio
from small_policy import CHOSEN, gradient_of, logp_of, small_policy

TOKENS, MODULUS, ROUNDS = 2, 3, 2
REWARDS = ("mean of steps", "at the end")


class Swaps(Choices):
    """Choices in which the last expert of some tokens is another one than the router's own."""

    def __init__(self, routers: Routers, swapped_NR: Tensor, other_NRE: Tensor) -> None:
        super().__init__(routers, torch.zeros(*swapped_NR.shape, routers.chosen, dtype=torch.long))
        self.swapped_NR, self.other_NRE = swapped_NR, other_NRE

    def choose(self, number: int, scores_TE: Tensor, found: torch.return_types.topk) -> torch.return_types.topk:
        assert self.given_TRX is not None
        free_NE = self.other_NRE[:, number].scatter(1, found.indices, -1.0)
        swapped_NX = torch.cat([found.indices[:, :-1], free_NE.argmax(-1, keepdim=True)], 1)
        self.given_TRX[:, number] = torch.where(self.swapped_NR[:, number, None], swapped_NX, found.indices)
        return super().choose(number, scores_TE, found)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Enumerated:
    """All responses of a length, with what each is worth, and a number for each prefix (that of a binary heap)."""

    ids_BT: Tensor
    prefix_BT: Tensor
    rewards_KB: Tensor

    @classmethod
    def of(cls, seed: int, length: int) -> Enumerated:
        ids_BT = torch.cartesian_prod(*[torch.arange(TOKENS)] * length)
        prefix_BT = torch.zeros_like(ids_BT)
        for t in range(1, length):
            prefix_BT[:, t] = TOKENS * prefix_BT[:, t - 1] + ids_BT[:, t - 1] + 1
        pairs = torch.rand(TOKENS + 1, TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        before_BT = torch.cat([torch.full_like(ids_BT[:, :1], TOKENS), ids_BT[:, :-1]], 1)
        ended_B = (ids_BT.sum(-1) % MODULUS == 0).double()
        return cls(ids_BT, prefix_BT, torch.stack([pairs[before_BT, ids_BT].mean(-1), ended_B]))


@dataclass(frozen=True)
class Measured:
    """Squared norms of one model by reward, as shares of that of the learner's own gradient."""

    own: list[float]
    replayed: list[float]
    """Against the gradient with the sampler's experts."""
    apart: list[float]
    """Squared norm of the difference of these two gradients."""
    truth: list[float]
    """Squared norm of the learner's own gradient."""
    changes: float
    """K·δ."""
    kl: float


def square_of(vectors: Sequence[Tensor]) -> float:
    """Return the squared norm of the expected vector, from independent ones: their own noise is not counted."""
    stacked, n = torch.stack(list(vectors)), len(vectors)
    return (stacked.sum(0).square().sum() - stacked.square().sum()).item() / (n * (n - 1))


class Mixture:
    def __init__(self, seed: int, experts: int, length: int) -> None:
        self.seed, self.all = seed, Enumerated.of(seed, length)
        self.lm: LanguageModel = small_policy(seed, TOKENS, length, experts=experts, dtype="float64")
        self.routers = routers_of(self.lm, field="--model")

    def scaled(self, size: float) -> None:
        """Scale what experts add."""
        for name, weight in self.lm.model.named_parameters():
            if name.endswith("experts.down_proj"):
                weight.data *= size

    def logp(self, choices: Choices) -> Tensor:
        with choosing(choices):
            return logp_of(self.lm, self.all.ids_BT)

    def swaps(self, parts: int, number: int, round_: int = 0) -> Swaps:
        """Return swaps that depend on the prefix alone, as those of a sampler do: the `number`-th of `parts`."""
        rng = torch.Generator().manual_seed(1000 * self.seed + round_)
        shape = int(self.all.prefix_BT.max()) + 1, len(self.routers.modules)
        swapped_PR = (torch.randperm(shape[0] * shape[1], generator=rng) % parts == number).view(shape)
        other_PRE = torch.rand(*shape, self.routers.experts, generator=rng)
        at_N = self.all.prefix_BT.flatten()
        return Swaps(self.routers, swapped_PR[at_N], other_PRE[at_N])

    @torch.no_grad()
    def kl(self, parts: int) -> float:
        """Return the KL per token from the policy that drew to the learner's, of a few draws of swaps."""
        own_BT = self.logp(Choices(self.routers))
        drawn = [self.logp(self.swaps(parts, number)) for number in range(4)]
        return fmean((drew_BT.sum(-1).exp() * (drew_BT - own_BT).mean(-1)).sum().item() for drew_BT in drawn)

    def hold_kl(self, parts: int, kl: float) -> None:
        """Scale the experts so that swaps come to this KL."""
        low, high, now = 1 / 16, 16.0, 1.0
        for _ in range(10):
            middle = math.sqrt(low * high)
            self.scaled(middle / now)
            now = middle
            low, high = (middle, high) if self.kl(parts) < kl else (low, middle)

    def measured(self, parts: int) -> Measured:
        own_BT = self.logp(free := Choices(self.routers))
        mine_TRX, rewards = together(free.used).sort(-1).values, self.all.rewards_KB
        truths = [gradient_of(self.lm, (own_BT.sum(-1).exp() * r).sum(), again=True) for r in rewards]
        token, replay = ([[torch.zeros_like(truths[0])] * ROUNDS for _ in rewards] for _ in range(2))
        changes, kls = list[float](), list[float]()
        for round_, number in product(range(ROUNDS), range(parts)):
            with torch.no_grad():
                drew_BT = self.logp(swaps := self.swaps(parts, number, round_))
            theirs_TRX = together(swaps.used)
            replayed_BT = self.logp(Choices(self.routers, theirs_TRX))
            assert torch.equal(replayed_BT, drew_BT), "a replayed pass is the sampler's"
            p_B = drew_BT.sum(-1).exp()
            same_TR = (mine_TRX[..., :, None] == theirs_TRX[..., None, :]).sum((-1, -2))
            changed_BT = 2 * (CHOSEN - same_TR).double().mean(-1).view_as(drew_BT)
            changes.append((p_B * changed_BT.mean(-1)).sum().item())
            kls.append((p_B * (drew_BT - own_BT.detach()).mean(-1)).sum().item())
            ratio_BT = importance_ratio("token", own_BT.detach() - drew_BT, torch.ones_like(drew_BT))
            for i, reward_B in enumerate(rewards):
                weighed_B = (ratio_BT * own_BT).sum(-1) * p_B * reward_B
                token[i][round_] = token[i][round_] + gradient_of(self.lm, weighed_B.sum(), again=True) / parts
                expected = (replayed_BT.sum(-1).exp() * reward_B).sum()
                replay[i][round_] = replay[i][round_] + gradient_of(self.lm, expected, again=True) / parts
        squares = [truth.square().sum().item() for truth in truths]
        rows = list(zip(token, replay, truths, squares, strict=True))
        return Measured(
            [square_of([each - g for each in t]) / square for t, _, g, square in rows],
            [square_of([a - b for a, b in zip(t, r, strict=True)]) / square for t, r, _, square in rows],
            [square_of([each - g for each in r]) / square for _, r, g, square in rows],
            squares,
            fmean(changes),
            fmean(kls),
        )
