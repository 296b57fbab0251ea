"""What flips of a router cost the gradient with token ratios, beside what token KL says.

    python benchmarks/router.py > docs/findings/router.md

The walks of `frontier.py`, under a policy with K experts, of which the router takes one at every state; an expert adds
a table of its own to the logits. The sampler's router takes another one, by chance, at a share p of all steps (with one
expert in K at work a flip changes two of K: K·δ = 2p), and records the log-prob under which it drew, so that every
token ratio is right. What is left is that prefixes, and what follows, are another policy's. Nothing is sampled:
gradient and bias are sums over all states, actions and steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, linear_regression

import torch
from torch import Tensor

from frontier import ACTIONS, KINDS, LOST, NO_WAY_BACK, STATES, leads
from slipstream.reporting.report.titles import estimate
from slipstream.studies.statistics import estimate as over_seeds

EXPERTS, LENGTHS, SHARES, SIZES, KL, SEEDS = (2, 8, 32), (64, 256, 1024), (0.001, 0.01, 0.1), (0.1, 1.0), 1e-3, 5
USUAL = 8
"""Experts, where nothing else is said."""
LINEAR, HALFWAY, APART = 0.9, 0.5, 2.0
"""Ours: the exponent from which on growth is linear; that below which it is nearer to none; and by which factor biases
at one KL differ, if that alone does not tell them."""
TEXT = """# Flips of a router, and the bias that they leave

A conjecture of "Off-Policy Drift" (its third open problem) concerns mixtures of experts. If the sampler's router
chooses other experts than the learner's (flips), the gradient with token ratios has a bias of Θ(T·K·δ), while the
token KL of everything else stays fixed. The conjecture fails if the bias is sublinear in K·δ, or if token KL alone
predicts it. This page tests it where everything is known exactly: the walks of [frontier](frontier.md), with a reward
between 0 and 1 at every length. One of K experts acts at each step. A share p of steps with another expert means K·δ
= 2p. All else agrees. The bias is ‖E ĝ − g‖. The first three columns show it as a share of ‖g‖, because the gradient
changes with length.

```console
python benchmarks/router.py > docs/findings/router.md
```
"""


def gradient(pi_SA: Tensor, mu_SA: Tensor, reward_SA: Tensor, leads_SA: Tensor, length: int) -> Tensor:
    """Expected, by the logits of π, with token ratios and walks of μ; the exact one where both are the same."""
    after_S, q_TSA = torch.zeros(STATES, dtype=torch.float64), list[Tensor]()
    for _ in range(length):
        q_TSA.insert(0, reward_SA / length + after_S[leads_SA])
        after_S = (mu_SA * q_TSA[0]).sum(-1)
    at_S, found_SA = torch.zeros(STATES, dtype=torch.float64), torch.zeros_like(pi_SA)
    at_S[0] = 1.0
    for q_SA in q_TSA:
        found_SA += at_S[:, None] * pi_SA * (q_SA - (pi_SA * q_SA).sum(-1, keepdim=True))
        at_S = torch.zeros_like(at_S).index_add(0, leads_SA.flatten(), (at_S[:, None] * mu_SA).flatten())
    return found_SA


@dataclass(frozen=True)
class Flipped:
    bias: float
    share: float
    """Of the gradient."""
    kl: float
    """Per token, of what drew to the policy."""


def flipped(seed: int, length: int, share: float, size: float, kind: str, experts: int = USUAL) -> Flipped:
    torch.manual_seed(seed)
    base_SA, reward_SA = torch.randn(2, STATES, ACTIONS).double()
    expert_ESA, reward_SA = size * torch.randn(experts, STATES, ACTIONS).double(), reward_SA.sigmoid()
    if kind == NO_WAY_BACK:
        base_SA[:, 0] -= math.log(length)
        reward_SA[LOST] = 0.0
    policy_ESA = (base_SA + expert_ESA).softmax(-1)
    pi_SA, others_ESA = policy_ESA[0], policy_ESA[1:]
    mu_SA = (1 - share) * pi_SA + share * others_ESA.mean(0)
    kl = share * (others_ESA * (others_ESA / pi_SA).log()).sum(-1).mean().item()
    truth, found = (gradient(pi_SA, drew, reward_SA, leads(kind), length) for drew in (pi_SA, mu_SA))
    bias = (found - truth).norm()
    return Flipped(bias.item(), (bias / truth.norm()).item(), kl)


def sized(seed: int, length: int, share: float, kl: float, kind: str) -> float:
    """The size of experts at which flips come to this KL."""
    low, high = 0.0, 16.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if flipped(seed, length, share, middle, kind).kl < kl else (low, middle)
    return low


def cell(values: list[float]) -> str:
    found = over_seeds(values)
    return estimate(found.mean, found.se, share=True)


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of x, in a power law through the points."""
    return linear_regression(list(map(math.log, xs)), list(map(math.log, ys))).slope


def table(kind: str) -> tuple[float, float, float, float]:
    """Printed; and how the bias goes with p, with K where K·δ is held, with T, and what it differs by at one KL."""
    seeds = range(1, SEEDS + 1)
    shares, biases = dict[tuple[str, float, int], float](), dict[int, float]()
    print(f"| {kind} | {' | '.join(f'T = {n}' for n in LENGTHS)} | bias, T = {LENGTHS[-1]} | token KL |")
    print(f"|{' --- |' * (3 + len(LENGTHS))}")
    rows = [(f"experts of {size:g}", size, USUAL) for size in SIZES] + [(f"token KL held at {KL:g}", None, USUAL)]
    rows += [(f"{experts} experts of {SIZES[-1]:g}", SIZES[-1], experts) for experts in EXPERTS if experts != USUAL]
    for (what, given, experts), share in product(rows, SHARES):
        if experts != USUAL and share != SHARES[1]:
            continue
        cells, found = list[str](), list[Flipped]()
        for n in LENGTHS:
            sizes = [sized(seed, n, share, KL, kind) if given is None else given for seed in seeds]
            found = [flipped(seed, n, share, size, kind, experts) for seed, size in zip(seeds, sizes, strict=True)]
            cells.append(cell([each.share for each in found]))
            shares[what, share, n] = fmean(each.share for each in found)
            if (given, experts, share) == (SIZES[-1], USUAL, SHARES[1]):
                biases[n] = fmean(each.bias for each in found)
        bias, kl = fmean(each.bias for each in found), fmean(each.kl for each in found)
        print(f"| {what}, p = {share:g} | {' | '.join(cells)} | {bias:.2g} | {kl:.1e} |")

    usual, held = f"experts of {SIZES[-1]:g}", f"token KL held at {KL:g}"
    of_share = exponent(SHARES, [shares[usual, share, LENGTHS[0]] for share in SHARES])
    named = {experts: usual if experts == USUAL else f"{experts} {usual}" for experts in EXPERTS}
    of_experts = exponent(EXPERTS, [shares[name, SHARES[1], LENGTHS[0]] for name in named.values()])
    at_one_kl = [shares[held, share, LENGTHS[0]] for share in SHARES]
    return of_share, of_experts, exponent(LENGTHS, [biases[n] for n in LENGTHS]), max(at_one_kl) / min(at_one_kl)


def main() -> None:
    torch.set_num_threads(1)
    print(TEXT)
    began, linear, told, grows = time.process_time(), list[bool](), list[bool](), list[bool]()
    for kind in KINDS:
        of_share, of_experts, of_length, factor = table(kind)
        print(
            f"\nThe bias goes with p^{of_share:.2f}, with K^{of_experts:.2f} where p, and so K·δ, is held, and with "
            f"T^{of_length:.2f}. At one token KL it differs by a factor of {factor:.1f}.\n"
        )
        linear.append(of_share >= LINEAR and abs(of_experts) < HALFWAY)
        told.append(factor < APART)
        grows.append(of_length >= LINEAR)
    print(verdict(all(linear), any(told), all(grows)))
    print(
        f"\nSeeds 1 to {SEEDS}; logits of the policy are as of a normal distribution, and so is what an expert adds; "
        f"{time.process_time() - began:.0f} s on one core."
    )


def verdict(linear: bool, told: bool, grows: bool) -> str:
    """By what would refute it; Θ(T) is not among that, and is said beside it."""
    length = "it grows with T, too" if grows else "it does not grow with T as that says"
    if linear and not told:
        says = "holds" if grows else "holds in part"
        return f"The conjecture {says} here: the bias is linear in K·δ, and token KL alone does not tell it; {length}."
    why = [*([] if linear else ["the bias is not linear in K·δ"]), *(["token KL alone tells it"] if told else [])]
    return f"The conjecture fails here: {' and '.join(why)}; {length}."


if __name__ == "__main__":
    main()
