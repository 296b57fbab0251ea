"""Ratios of tokens, of rows, or something between: which gradient makes most progress, by the length of an answer?

    python benchmarks/frontier.py [--seeds 5] > docs/findings/frontier.md
    python benchmarks/frontier.py --model --seeds 3 >> docs/findings/frontier.md

A policy of softmaxes, one for each of eight states, walks through them for T steps, of eight actions each; the reward
is one number for the whole walk, between 0 and 1. Its gradient is exact (the chance of every state at every step,
without sampling). Walks are drawn by the policy as it was, and the gradient is estimated from them with each of the
importance weights of `estimators/correction.py`, less the mean reward as a baseline. Progress of a batch of n walks is

    P = a / (a + tr Var ĝ / n + ‖E ĝ − g‖²),   a = <g, E ĝ>² / ‖g‖²

between 0 and 1, and in the same order as a / (tr Var ĝ / n + ‖E ĝ − g‖²), which has no bound. With `--model` the
policy is a real transformer of random weights, gradients are by all of them, and g is that of fresh responses.
"""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from slipstream.engines.native.model import LanguageModel
from slipstream.estimators.correction import effective_sample_size, importance_ratio, truncate
from slipstream.reporting.report.titles import mean_text
from slipstream.statistics import Verdict, estimate, p_value, verdict
from small_policy import drawn_by, gradient_of, logp_of, small_policy

STATES = ACTIONS = 8
LENGTHS, LAGS = (64, 128, 256, 512, 1024), (0.02, 0.1)
"""Walks, and the standard deviation by which every logit has moved since."""
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
    turns_NT = (torch.arange(log_ratio_NT.shape[1]) // TURN).expand_as(log_ratio_NT) if unit == "turn" else None
    found = importance_ratio(unit, log_ratio_NT, torch.ones_like(log_ratio_NT), turns=turns_NT)  # type: ignore[arg-type]
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
    """Return the text about the best policy, from the verdicts at several lengths."""
    return DIFFERS if len(found) > 1 else SEEN.get(next(iter(found), "open"), NEITHER)


def verdict_of(tables: Sequence[str]) -> str:
    """On the conjecture that something between is best."""
    between, extreme = (SEEN[each] in tables for each in ("holds", "does not hold"))
    if DIFFERS in tables or (between and extreme):
        says = "differs by case"
    else:
        says = "holds" if between else "fails" if extreme else "is open"
    cases = "; ".join(f"in {count} of {len(tables)} {each}" for each, count in Counter(tables).items())
    return f"The conjecture {says} here: {cases}."


def table(
    title: str, names: Sequence[str], between: Sequence[str], found: Mapping[int, Sequence[Mapping[str, float]]]
) -> str:
    """Print the progress of each weight by length; return who is best from LONG steps on."""
    print(f"| {title} | {' | '.join(f'T = {n}' for n in found)} |")
    print(f"|{' --- |' * (len(found) + 1)}")
    for name in names:
        cells = [estimate([each[name] for each in seeds]) for seeds in found.values()]
        print(f"| {name} | {' | '.join(mean_text(cell.mean, cell.se, share=True) for cell in cells)} |")
    rivals = [[best(seeds, of) for of in (EXTREMES, between)] for seeds in found.values()]
    print(f"| best extreme | {' | '.join(extreme for extreme, _ in rivals)} |")
    print(f"| best between | {' | '.join(between for _, between in rivals)} |")
    apart = [
        estimate([each[extreme] - each[between] for each in seeds])
        for seeds, (extreme, between) in zip(found.values(), rivals, strict=True)
    ]
    points = (mean_text(100 * (each.mean or 0.0), each.se and 100 * each.se) for each in apart)
    print(f"| the one less the other, by seed | {' | '.join(f'{each} points' for each in points)} |\n")
    says = seen({verdict(each, p_value(each)) for each, n in zip(apart, found, strict=True) if n >= LONG})
    print(f"From {LONG} steps on: {says}.\n")
    return says


def with_walks(seeds: Sequence[int]) -> None:
    began, tables = time.process_time(), list[str]()
    print(FRONTIER)
    for kind, lag in product(KINDS, LAGS):
        found = {n: [progress(seed, n, lag, kind) for seed in seeds] for n in LENGTHS}
        tables.append(table(f"{kind}, logits moved by {lag:g}", WEIGHTS, BETWEEN, found))
    print(f"{verdict_of(tables)}\n")
    print(f"Seeds {seeds[0]} to {seeds[-1]}, {WALKS} walks each, {time.process_time() - began:.0f} s on one core.")


# --- real gradients ---------------------------------------------------------------------------------------------------

TURN, REAL_TOKENS, STOP = 16, 8, 0
REAL_LENGTHS, REAL_KL, RESPONSES, FRESH, MICRO = (64, 128, 256, 512), 2e-3, 2048, 8192, 8
ESS = "effective sample size"
REAL_WEIGHTS = ("token", "turn", *BETWEEN, "sequence", "sequence, at most 2")
REAL = f"""
## With real gradients

The same question for a transformer of 21,000 random weights (two layers, a vocabulary of {REAL_TOKENS}). Gradients are
by all weights. The policy that drew has the same weights plus normal noise, as much as gives a KL of {REAL_KL:g} per
token. A reward adds a number for each pair of neighbouring tokens until the first token {STOP}, divided by T. It comes
about once in a response. So this is the second kind of walks, with a memory of all earlier tokens. The true
gradient is that of {FRESH} fresh responses. The others are from {RESPONSES} responses of the policy that drew.
Variances are measured between small batches of {MICRO}, and the chance of both means is subtracted from the bias.
Progress is for batches of {BATCH} responses. `turn` multiplies the ratios of {TURN} tokens, as if they were a turn.

```console
python benchmarks/frontier.py --model --seeds {{seeds}} --lengths {{lengths}} >> docs/findings/frontier.md
```
"""


@dataclass
class Moments:
    """Sum and squared norms of gradients of small batches."""

    total: Tensor
    squares: float = 0.0
    count: int = 0

    def add(self, gradient: Tensor) -> None:
        self.total += gradient
        self.squares += gradient.square().sum().item()
        self.count += 1

    @property
    def mean(self) -> Tensor:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Return the trace of the covariance of one small batch."""
        return (self.squares - self.count * self.mean.square().sum().item()) / (self.count - 1)


def rewards(seed: int, ids_BT: Tensor) -> Tensor:
    pairs = torch.rand(REAL_TOKENS, REAL_TOKENS, generator=torch.Generator().manual_seed(seed))
    before_BT = torch.cat([torch.full_like(ids_BT[:, :1], STOP), ids_BT[:, :-1]], 1)
    going_BT = (ids_BT != STOP).cumprod(-1)
    return (pairs[before_BT, ids_BT] * going_BT).mean(-1)


def moved(lm: LanguageModel, seed: int, length: int, offset_V: Tensor, fresh_BT: Tensor) -> LanguageModel:
    """Return the policy with noise in its weights, which gives REAL_KL on some responses."""
    old = small_policy(seed, REAL_TOKENS, length)
    noise = [torch.randn_like(weight) * weight.std() for weight in lm.model.parameters()]
    low, high = 0.0, 0.5
    with torch.no_grad():
        own_BT = logp_of(lm, fresh_BT, offset_V)
        for _ in range(12):
            size = (low + high) / 2
            for mine, theirs, each in zip(lm.model.parameters(), old.model.parameters(), noise, strict=True):
                theirs.copy_(mine + size * each)
            log_ratio_BT = logp_of(old, fresh_BT, offset_V) - own_BT
            # never negative, which makes few responses enough
            kl = (log_ratio_BT.exp() - 1 - log_ratio_BT).mean().item()
            low, high = (size, high) if kl < REAL_KL else (low, size)
    return old


def real_progress(seed: int, length: int) -> dict[str, float]:
    lm = small_policy(seed, REAL_TOKENS, length)
    offset_V = torch.zeros(REAL_TOKENS)
    offset_V[STOP] = -math.log(length / REAL_TOKENS)
    parts = [drawn_by(lm, AT_ONCE // 8, length, offset_V) for _ in range(8 * FRESH // AT_ONCE)]
    old = moved(lm, seed, length, offset_V, parts[0])
    mean = rewards(seed, torch.cat(parts)).mean()

    whole = list[Tensor]()

    def moments(drawn: Sequence[Tensor], names: Sequence[str]) -> dict[str, Moments]:
        size = sum(weight.numel() for weight in lm.model.parameters())
        found = {name: Moments(torch.zeros(size)) for name in names}
        for ids_BT in torch.cat(list(drawn)).split(MICRO):
            logp_BT = logp_of(lm, ids_BT, offset_V)
            with torch.no_grad():
                log_ratio_BT = logp_BT - logp_of(old, ids_BT, offset_V)
            whole.append(log_ratio_BT.double().sum(-1).exp())
            gain_B1 = (rewards(seed, ids_BT) - mean)[:, None]
            for name in names:
                loss = (weights(name, log_ratio_BT.detach()) * gain_B1 * logp_BT).sum() / MICRO
                found[name].add(gradient_of(lm, loss, again=name != names[-1]))
        return found

    fresh = moments(parts, ["none"])["none"]
    whole.clear()
    truth = fresh.mean.square().sum().item() - fresh.variance / fresh.count
    if truth <= 0:
        sys.exit(f"the gradient of {FRESH} responses of {length} tokens is below its own chance: raise FRESH")
    count = 8 * RESPONSES // AT_ONCE
    stale = moments([drawn_by(old, AT_ONCE // 8, length, offset_V) for _ in range(count)], REAL_WEIGHTS)
    ratio_B = torch.cat(whole)
    found = {ESS: effective_sample_size(ratio_B, torch.ones_like(ratio_B)).item()}
    for name, each in stale.items():
        apart = (each.mean - fresh.mean).square().sum().item()
        bias = max(apart - each.variance / each.count - fresh.variance / fresh.count, 0.0)
        along = (fresh.mean @ each.mean).item() ** 2 / truth
        found[name] = along / (along + each.variance * MICRO / BATCH + bias)
    return found


def with_model(seeds: Sequence[int], lengths: Sequence[int]) -> None:
    print(REAL.format(seeds=len(seeds), lengths=" ".join(map(str, lengths))))
    began = time.process_time()
    found = dict[int, list[dict[str, float]]]()
    for n, seed in product(lengths, seeds):
        found.setdefault(n, []).append(real_progress(seed, n))
        print(f"T = {n}, seed {seed}: {found[n][-1]}", file=sys.stderr, flush=True)
    says = table(f"KL of {REAL_KL:g} per token", REAL_WEIGHTS, ("turn", *BETWEEN), found)
    print(f"{verdict_of([says])}\n")
    sizes = [f"{fmean(each[ESS] for each in of):.0%} at T = {n}" for n, of in found.items()]
    print(f"The effective sample size of whole responses is {', '.join(sizes)}.\n")
    seconds = f"{time.process_time() - began:.0f} s on one core, torch {torch.__version__}"
    print(f"Seeds {seeds[0]} to {seeds[-1]}, {RESPONSES} responses each; {seconds}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", action="store_true", help="real gradients of a transformer instead of walks")
    parser.add_argument("--lengths", type=int, nargs="+", default=REAL_LENGTHS, help="of responses, with --model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(1, args.seeds + 1)
    with_model(seeds, args.lengths) if args.model else with_walks(seeds)


if __name__ == "__main__":
    main()
