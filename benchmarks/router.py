"""What flips of a router cost the gradient with token ratios, beside what token KL says.

    python benchmarks/router.py > docs/findings/router.md

The walks of `frontier.py`, under a policy with eight experts, of which the router takes one at every state; an expert
adds a table of its own to the logits. The sampler's router takes another one, by chance, at a share p of all steps
(with one expert in K at work a flip changes two of K: K·δ = 2p), and records the log-prob under which it drew, so that
every token ratio is right. What is left is that prefixes, and what follows, are another policy's. Nothing is sampled:
gradient and bias are sums over all states, actions and steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from statistics import fmean, linear_regression

import torch
from frontier import ACTIONS, KINDS, LOST, NO_WAY_BACK, STATES, leads
from torch import Tensor

from slipstream.insight.report.findings import estimate
from slipstream.lab.statistics import estimate as over_seeds

EXPERTS, LENGTHS, SHARES, SIZES, KLS, SEEDS = 8, (64, 256, 1024), (0.001, 0.01, 0.1), (0.1, 1.0), (1e-3,), 5
HALFWAY = 0.5
"""Below it an exponent is closer to 0 than to the conjecture's 1."""
TEXT = """# Flips of a router, and the bias that they leave

A conjecture of "Off-Policy Drift" (its third open problem): flips of a router in the sampler bias the gradient with
token ratios by Θ(T·K·δ), beside what token KL says. It fails if the bias is sublinear in K·δ, or if token KL alone
tells it. Tried where all is known exactly: the walks of [frontier](frontier.md), eight experts of which one is at work,
K·δ = 2p. The bias is ‖E ĝ − g‖ / ‖g‖: a share of the gradient, for that changes with length, too.

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


def flipped(seed: int, length: int, share: float, size: float, kind: str) -> tuple[float, float]:
    """The bias, and the token KL of what drew to the policy."""
    torch.manual_seed(seed)
    base_SA, reward_SA = torch.randn(2, STATES, ACTIONS).double()
    expert_ESA, reward_SA = size * torch.randn(EXPERTS, STATES, ACTIONS).double(), reward_SA.sigmoid()
    if kind == NO_WAY_BACK:
        base_SA[:, 0] -= math.log(length)
        reward_SA[LOST] = 0.0
    policy_ESA = (base_SA + expert_ESA).softmax(-1)
    pi_SA, others_ESA = policy_ESA[0], policy_ESA[1:]
    mu_SA = (1 - share) * pi_SA + share * others_ESA.mean(0)
    kl = share * (others_ESA * (others_ESA / pi_SA).log()).sum(-1).mean().item()
    truth, found = (gradient(pi_SA, drew, reward_SA, leads(kind), length) for drew in (pi_SA, mu_SA))
    return ((found - truth).norm() / truth.norm()).item(), kl


def sized(seed: int, length: int, share: float, kl: float, kind: str) -> float:
    """The size of experts at which flips come to this KL."""
    low, high = 0.0, 16.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if flipped(seed, length, share, middle, kind)[1] < kl else (low, middle)
    return low


def cell(values: list[float]) -> str:
    found = over_seeds(values)
    return estimate(found.mean, found.se, share=True)


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of x, in a power law through the points."""
    return linear_regression(list(map(math.log, xs)), list(map(math.log, ys))).slope


def main() -> None:
    torch.set_num_threads(1)
    print(TEXT)
    seeds, of_length, of_share = range(1, SEEDS + 1), list[float](), list[float]()
    for kind in KINDS:
        print(f"| {kind} | {' | '.join(f'T = {n}' for n in LENGTHS)} | token KL |\n|{' --- |' * (2 + len(LENGTHS))}")
        means = dict[tuple[str, float, int], float]()
        for what, values in (("experts of", SIZES), ("token KL held at", KLS)):
            for value, share in product(values, SHARES):
                held, cells = what != "experts of", list[str]()
                for n in LENGTHS:
                    sizes = [sized(seed, n, share, value, kind) if held else value for seed in seeds]
                    found = [flipped(seed, n, share, size, kind) for seed, size in zip(seeds, sizes, strict=True)]
                    cells.append(cell([bias for bias, _ in found]))
                    means[f"{what} {value:g}", share, n] = fmean(bias for bias, _ in found)
                    kl = fmean(kl for _, kl in found)
                print(f"| {what} {value:g}, p = {share:g} | {' | '.join(cells)} | {kl:.1e} |")

        def by_share(what: str, means: dict[tuple[str, float, int], float] = means) -> float:
            return exponent(SHARES, [means[what, share, LENGTHS[0]] for share in SHARES])

        by_length = exponent(LENGTHS, [means[f"experts of {SIZES[-1]:g}", SHARES[1], n] for n in LENGTHS])
        of_length.append(by_length)
        of_share.append(by_share(f"token KL held at {KLS[-1]:g}"))
        print(
            f"\nThe bias goes with p^{by_share(f'experts of {SIZES[-1]:g}'):.2f} for given experts, with "
            f"p^{of_share[-1]:.2f} where token KL is held, and with T^{by_length:.2f}.\n"
        )
    why = ["the bias is sublinear in K·δ where token KL is held"] if max(of_share) < HALFWAY else []
    why += ["long walks are hardly more biased than short ones"] if max(of_length) < HALFWAY else []
    print("The conjecture", f"fails here: {' and '.join(why)}.\n" if why else "holds here.\n")
    print(f"Seeds 1 to {SEEDS}; logits of the policy are as of a normal distribution, and so is what an expert adds.")


if __name__ == "__main__":
    main()
