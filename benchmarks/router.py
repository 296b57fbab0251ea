"""Cost of a router's flips for the gradient with token ratios, beside the message of token KL.

    python benchmarks/router.py > docs/findings/router.md
    python benchmarks/router.py --model >> docs/findings/router.md

The walks of `frontier.py`, under a policy with K experts, of which the router takes one at every state; an expert adds
a table of its own to the logits. The sampler's router takes another one, by chance, at a share p of all steps (with one
expert in K at work a flip changes two of K: K·δ = 2p), and records the log-prob under which it drew, so that every
token ratio is right. What is left is that prefixes, and what follows, are another policy's. Nothing is sampled:
gradient and bias are sums over all states, actions and steps. With `--model` the policy is a real Qwen3-MoE of random
weights, with two tokens: every response is enumerated, so nothing is sampled but which choices flip.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, linear_regression

import torch
from torch import Tensor

from frontier import ACTIONS, KINDS, LOST, NO_WAY_BACK, STATES, leads
from real_experts import MODULUS, REWARDS, ROUNDS, Measured, Mixture
from slipstream.reporting.report.titles import mean_text
from slipstream.statistics import estimate

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
    """Bias as a share of the gradient."""
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
    found = estimate(values)
    return mean_text(found.mean, found.se, share=True)


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Exponent of x in a power law through the points with y above 0."""
    seen = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True) if y > 0]
    return linear_regression(*zip(*seen, strict=True)).slope


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


def with_walks() -> None:
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


# --- a real mixture of experts ----------------------------------------------------------------------------------------

REAL_EXPERTS, REAL_LENGTHS, PARTS = (4, 8, 16, 32), (3, 6, 10), (64, 16, 4)
"""One in so many of the routers' choices is swapped at a time; that many draws swap each of them once."""
REAL_USUAL, REAL_LENGTH, REAL_PART, REAL_KL, REAL_SEEDS = 8, 8, 16, 1e-3, 4
REAL_TEXT = f"""
## With a real mixture of experts

The same question for real gradients. The policy is a Qwen3-MoE of two layers with random weights. Every token uses two
of K experts. Responses have T tokens, each one of two. All 2^T are enumerated, so gradients by all weights are exact.
The sampler's routers swap the second expert for another one, by chance, at a share p of all tokens and layers. A swap
depends on the response so far. The sampler records the log-prob under which it drew, so token ratios are right. The
learner's routers choose freely. `K·δ` is the measured number of changes in the set of experts, per token and layer: a
swap counts two, and later choices change with it.

`bias` is the distance from the expected gradient with token ratios to the gradient of the learner's own policy.
`against replay` is its distance to the gradient of the policy that drew, which `learner.router = "replay_rollout"`
computes. `replay to own` is the distance between these two: the bias that replay leaves, if the own policy is what
counts. All are shares of the norm of the own gradient. They are expectations over swaps: averages over draws that swap
each choice once. Norms are products of {ROUNDS} such rounds, so chance does not add to them, and root mean squares over
models. One reward is the mean over steps of a number for each pair of tokens. The other is 1 if the number of ones is a
multiple of {MODULUS}, else 0. Where KL is held, the experts' outputs are scaled. A bias of 0.00 is below its own
chance, and counts in no exponent. Lengths are short, because enumeration doubles with every token.

```console
python benchmarks/router.py --model >> docs/findings/router.md
```
"""


def root(squares: Sequence[float]) -> tuple[float, float]:
    """Return the root of a mean, and its standard error; 0 if the mean is not above 0."""
    found = estimate(squares)
    mean = math.sqrt(max(found.mean or 0.0, 0.0))
    return mean, (found.se or 0.0) / (2 * mean) if mean else 0.0


MEANS = """
The exponent of K·δ compares the same models. Those of K and T compare different ones, whose biases have errors of up to
half of them, so they say only that nothing grows as fast as T does. Responses of up to ten tokens cannot show what
hundreds do. Replay is no closer to the gradient of the own policy than token ratios are: it is exact for the policy
that drew. These are expectations; what replay saves in variance is not measured here.
"""
Row = tuple[bool, int, int, int]
"""True if token KL is held; experts, length, and one in how many choices is swapped."""


def real(seed: int, row: Row) -> Measured:
    held, experts, length, parts = row
    mixture = Mixture(seed, experts, length)
    if held:
        mixture.hold_kl(parts, REAL_KL)
    return mixture.measured(parts)


def with_model() -> None:
    print(REAL_TEXT)
    began = time.process_time()
    of_share = [(False, REAL_USUAL, REAL_LENGTH, parts) for parts in PARTS]
    of_experts = [(False, experts, REAL_LENGTH, REAL_PART) for experts in REAL_EXPERTS]
    of_length = [(False, REAL_USUAL, length, REAL_PART) for length in REAL_LENGTHS]
    at_one_kl = [(True, REAL_USUAL, REAL_LENGTH, parts) for parts in PARTS]
    rows = list(dict.fromkeys([*of_share, *of_experts, *of_length, *at_one_kl]))
    found = {row: [real(seed, row) for seed in range(1, REAL_SEEDS + 1)] for row in rows}
    linear, told, grows = list[bool](), list[bool](), list[bool]()
    for i, reward in enumerate(REWARDS):
        print(f"| reward: {reward} | K·δ | token KL | bias | against replay | replay to own | bias, absolute |")
        print(f"|{' --- |' * 7}")
        bias, absolute = dict[Row, float](), dict[Row, float]()
        for row, each in found.items():
            held, experts, length, parts = row
            shapes = [[m.own for m in each], [m.replayed for m in each], [m.apart for m in each]]
            norms = [root([values[i] for values in of]) for of in shapes]
            bias[row], absolute[row] = norms[0][0], root([m.own[i] * m.truth[i] for m in each])[0]
            name = f"K = {experts}, T = {length}, p = 1/{parts}{f', token KL held at {REAL_KL:g}' if held else ''}"
            numbers = f"{fmean(m.changes for m in each):.3f} | {fmean(m.kl for m in each):.1e}"
            shares = " | ".join(mean_text(*norm, share=True) for norm in norms)
            print(f"| {name} | {numbers} | {shares} | {absolute[row]:.2g} |")
        changes = [fmean(m.changes for m in found[row]) for row in of_share]
        by_changes = exponent(changes, [bias[row] for row in of_share])
        by_experts = exponent(REAL_EXPERTS, [bias[row] for row in of_experts])
        by_length = exponent(REAL_LENGTHS, [absolute[row] for row in of_length])
        seen = [bias[row] for row in at_one_kl if bias[row] > 0]
        factor = max(seen) / min(seen)
        print(
            f"\nReward {reward}: the bias goes with (K·δ)^{by_changes:.2f}, with K^{by_experts:.2f} where p is held, "
            f"and with T^{by_length:.2f} (absolute). At one token KL it differs by a factor of {factor:.1f}.\n"
        )
        linear.append(by_changes >= LINEAR and abs(by_experts) < HALFWAY)
        told.append(factor < APART)
        grows.append(by_length >= LINEAR)
    print(verdict(all(linear), any(told), all(grows)))
    print(MEANS)
    seconds = f"{time.process_time() - began:.0f} s on one core, torch {torch.__version__}"
    print(f"Seeds 1 to {REAL_SEEDS}, {ROUNDS} rounds; {seconds}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="store_true", help="a real mixture of experts instead of walks")
    torch.set_num_threads(1)
    with_model() if parser.parse_args().model else with_walks()


if __name__ == "__main__":
    main()
