"""Ratios of tokens, of rows, or something between: which gradient makes most progress, by the length of an answer?

    python benchmarks/frontier.py [--seeds 5] > docs/findings/frontier.md

A policy of softmaxes, one for each of eight states, walks through them for T steps, of eight actions each; the reward
is one number for the whole walk, between 0 and 1. Its gradient is exact (the chance of every state at every step,
without sampling). Walks are drawn by the policy as it was, and the gradient is estimated from them with each of the
importance weights of `estimators/ratio.py`, less the mean reward as a baseline. Progress of a batch of n walks is

    P = a / (a + tr Var ĝ / n + ‖E ĝ − g‖²),   a = <g, E ĝ>² / ‖g‖²

between 0 and 1, and in the same order as a / (tr Var ĝ / n + ‖E ĝ − g‖²), which has no bound.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from slipstream.estimators.ratio import importance_ratio, truncate
from slipstream.reporting.report.titles import estimate
from slipstream.studies.statistics import Verdict, verdict
from slipstream.studies.statistics import estimate as over_seeds

STATES = ACTIONS = 8
LENGTHS, LAGS = (64, 128, 256, 512, 1024), (0.02, 0.1)
"""Of walks; and how far every logit has moved since, as a standard deviation."""
NO_WAY_BACK, LOST = "no way back", STATES - 1
KINDS = ("all states again and again", NO_WAY_BACK)
"""Where a walk may go: everywhere at any time; or, by one wrong action, to a state that it does not leave."""
LONG = 200
BATCH, WALKS, AT_ONCE = 256, 16384, 512
WEIGHTS = ("none", "token", "prefix_min", "cumulative", "geometric", "sequence", "sequence, at most 2")
EXTREMES, BETWEEN = ("token", "sequence", "sequence, at most 2"), ("prefix_min", "cumulative", "geometric")
FRONTIER = """# Which ratio makes most progress, by length

A conjecture of "Off-Policy Drift" (its first open problem) concerns responses of at least 200 tokens and a policy
that has moved. It says that importance ratios of neither single tokens nor whole rows make most progress, but ratios
between these extremes: of prefixes, or of a geometric mean. It fails if an extreme is best at every such length. This
page tests it where the gradient is known exactly: random walks through eight states under a softmax policy, with one
reward per walk. Progress is a / (a + tr Var ĝ + ‖bias‖²) for batches of 256 walks, with a = 〈g, E ĝ〉² / ‖g‖². The
exact gradient has progress 1. The order is the same as by the conjecture's a / (tr Var ĝ + ‖bias‖²). `none` uses no
ratio. There are two kinds of walks. Some visit all states again and again, so early actions have little effect later.
In the others one wrong action leads to a state that the walk never leaves.

```console
python benchmarks/frontier.py > docs/findings/frontier.md
```
"""


def exact(theta_SA: Tensor, reward_SA: Tensor, leads_SA: Tensor, length: int) -> tuple[Tensor, float]:
    """The gradient of the mean reward of a walk, and that mean."""
    theta_SA = theta_SA.clone().requires_grad_()
    pi_SA = theta_SA.softmax(-1)
    moves_SS = torch.einsum("sa,sat->st", pi_SA, one_hot(leads_SA, STATES).double())
    at_S, value = one_hot(torch.tensor(0), STATES).double(), torch.zeros((), dtype=torch.float64)
    for _ in range(length):
        value = value + (at_S[:, None] * pi_SA * reward_SA).sum() / length
        at_S = at_S @ moves_SS
    (gradient,) = torch.autograd.grad(value, theta_SA)
    return gradient.flatten(), value.item()


def leads(kind: str) -> Tensor:
    """Where an action leads from a state; where there is no way back, the first action to the last state for good."""
    state, action = torch.arange(STATES)[:, None], torch.arange(ACTIONS)[None, :]
    found = (3 * state + action) % STATES
    if kind == NO_WAY_BACK:
        found = torch.where(found == LOST, 0, found)
        found[:, 0], found[LOST, :] = LOST, LOST
    return found


def walks(theta_SA: Tensor, leads_SA: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    """States and actions."""
    pi_SA = theta_SA.softmax(-1)
    state_N, states, actions = torch.zeros(count, dtype=torch.long), list[Tensor](), list[Tensor]()
    for _ in range(length):
        action_N = torch.multinomial(pi_SA[state_N], 1)[:, 0]
        states.append(state_N)
        actions.append(action_N)
        state_N = leads_SA[state_N, action_N]
    return torch.stack(states, 1), torch.stack(actions, 1)


def weights(name: str, log_ratio_NT: Tensor) -> Tensor:
    if name == "none":
        return torch.ones_like(log_ratio_NT)
    unit, _, bounded = name.partition(", ")
    found = importance_ratio(unit, log_ratio_NT, torch.ones_like(log_ratio_NT))  # type: ignore[arg-type]
    return truncate(found, 2.0) if bounded else found


def progress(seed: int, length: int, lag: float, kind: str) -> dict[str, float]:
    torch.manual_seed(seed)
    old_SA, reward_SA = torch.randn(2, STATES, ACTIONS).double()
    reward_SA, leads_SA = reward_SA.sigmoid(), leads(kind)
    if kind == NO_WAY_BACK:
        old_SA[:, 0] -= math.log(length)  # about one mistake in a walk
        reward_SA[LOST] = 0.0
    now_SA = old_SA + lag * torch.randn(STATES, ACTIONS).double()
    truth, mean = exact(now_SA, reward_SA, leads_SA, length)
    logp_SA, old_logp_SA = now_SA.log_softmax(-1), old_SA.log_softmax(-1)
    first = {name: torch.zeros(STATES * ACTIONS, dtype=torch.float64) for name in WEIGHTS}
    second = dict.fromkeys(WEIGHTS, 0.0)
    for _ in range(WALKS // AT_ONCE):
        states_NT, actions_NT = walks(old_SA, leads_SA, length, AT_ONCE)
        gain_N = reward_SA[states_NT, actions_NT].mean(1) - mean
        log_ratio_NT = (logp_SA - old_logp_SA)[states_NT, actions_NT]
        for name in WEIGHTS:
            weighed_NT = weights(name, log_ratio_NT) * gain_N[:, None]
            taken_NX = torch.zeros(AT_ONCE, STATES * ACTIONS, dtype=torch.float64)
            taken_NX.scatter_add_(1, states_NT * ACTIONS + actions_NT, weighed_NT)
            been_NS = taken_NX.view(AT_ONCE, STATES, ACTIONS).sum(-1, keepdim=True)
            each_NX = (taken_NX.view(AT_ONCE, STATES, ACTIONS) - been_NS * logp_SA.exp()).flatten(1)
            first[name] += each_NX.sum(0)
            second[name] += each_NX.square().sum().item()
    found = dict[str, float]()
    for name in WEIGHTS:
        expected = first[name] / WALKS
        variance = second[name] / WALKS - expected.square().sum().item()
        # of the squares of a mean over so many walks, that much is chance
        bias = max((expected - truth).square().sum().item() - variance / WALKS, 0.0)
        along = (truth @ expected).item() ** 2 / truth.square().sum().item()
        found[name] = along / (along + variance / BATCH + bias)
    return found


def best(seeds: Sequence[Mapping[str, float]], names: Sequence[str]) -> str:
    return max(names, key=lambda name: fmean(each[name] for each in seeds))


SEEN: dict[Verdict, str] = {"holds": "something between is best", "does not hold": "an extreme is best"}
NEITHER, DIFFERS = "neither is seen to be best", "it differs by length"


def seen(found: set[Verdict]) -> str:
    """Who is best, from what comes out at several lengths."""
    return DIFFERS if len(found) > 1 else SEEN.get(*found, NEITHER)


def verdict_of(tables: Sequence[str]) -> str:
    """On the conjecture that something between is best."""
    between, extreme = (SEEN[each] in tables for each in ("holds", "does not hold"))
    if DIFFERS in tables or (between and extreme):
        says = "differs by case"
    else:
        says = "holds" if between else "fails" if extreme else "is not visible"
    cases = "; ".join(f"in {count} of {len(tables)} {each}" for each, count in Counter(tables).items())
    return f"The conjecture {says} here: {cases}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, tables = time.process_time(), list[str]()
    print(FRONTIER)
    for kind, lag in product(KINDS, LAGS):
        found = {n: [progress(seed, n, lag, kind) for seed in range(1, args.seeds + 1)] for n in LENGTHS}
        print(f"| {kind}, logits moved by {lag:g} | {' | '.join(f'T = {n}' for n in LENGTHS)} |")
        print(f"|{' --- |' * (len(LENGTHS) + 1)}")
        for name in WEIGHTS:
            cells = [over_seeds([each[name] for each in found[n]]) for n in LENGTHS]
            print(f"| {name} | {' | '.join(estimate(cell.mean, cell.se, share=True) for cell in cells)} |")
        rivals = [[best(found[n], names) for names in (EXTREMES, BETWEEN)] for n in LENGTHS]
        print(f"| best extreme | {' | '.join(extreme for extreme, _ in rivals)} |")
        print(f"| best between | {' | '.join(between for _, between in rivals)} |")
        apart = [
            over_seeds([each[extreme] - each[between] for each in found[n]])
            for n, (extreme, between) in zip(LENGTHS, rivals, strict=True)
        ]
        points = (estimate(100 * (each.mean or 0.0), each.se and 100 * each.se) for each in apart)
        print(f"| the one less the other, by seed | {' | '.join(f'{each} points' for each in points)} |\n")
        long = {verdict(each) for each, n in zip(apart, LENGTHS, strict=True) if n >= LONG}
        tables.append(seen(long))
        print(f"From {LONG} steps on: {tables[-1]}.\n")
    print(f"{verdict_of(tables)}\n")
    print(f"Seeds 1 to {args.seeds}, {WALKS} walks each, {time.process_time() - began:.0f} s on one core.")


if __name__ == "__main__":
    main()
