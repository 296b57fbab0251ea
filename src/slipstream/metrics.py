"""What a run says of itself: pure functions from headers and clock readings to numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import comb
from statistics import fmean

from slipstream.records import Header

Numbers = dict[str, float]


def lag_metrics(headers: Iterable[Header], version: int) -> Numbers:
    """Lag of a token: the learner's version when it is consumed, less its own. Exact, over trained tokens."""
    lags: Counter[int] = Counter()
    for header in headers:
        for made_at, count in header.versions:
            lags[version - made_at] += count
    tokens = lags.total()
    histogram = {f"lag/tokens_{lag}": float(count) for lag, count in sorted(lags.items()) if count}
    mean = sum(lag * count for lag, count in lags.items()) / max(tokens, 1)
    return {"lag/mean": mean, "lag/max": float(max((lag for lag in lags if lags[lag]), default=0)), **histogram}


def sample_metrics(headers: Sequence[Header]) -> Numbers:
    """Lengths, how responses ended, and mean rewards."""
    lengths = [header.tokens for header in headers]
    numbers: Numbers = {
        "samples": float(len(headers)),
        "tokens": float(sum(lengths)),
        "length/mean": fmean(lengths),
        "length/max": float(max(lengths)),
        "truncated": fmean(header.finish == "length" for header in headers),
    }
    for name in sorted({name for header in headers for name in header.rewards}):
        numbers[f"reward/{name}"] = fmean(header.rewards.get(name, 0.0) for header in headers)
    return numbers


def throughput(tokens: Sequence[float], finished: Sequence[float], *, warmup: int = 5) -> float:
    """Response tokens per second over the updates after the first `warmup`: Σ_{j>w} n_j / (t_J − t_w)."""
    if len(tokens) != len(finished):
        raise ValueError(f"{len(tokens)} token counts for {len(finished)} times")
    if len(tokens) <= warmup or warmup < 1:
        return float("nan")
    return sum(tokens[warmup:]) / (finished[-1] - finished[warmup - 1])


def avg_at_n(correct: Sequence[Sequence[float]]) -> float:
    """Mean over problems of the mean over their samples."""
    return fmean(fmean(samples) for samples in correct)


def pass_at_k(correct: Sequence[Sequence[float]], k: int) -> float:
    """The unbiased estimate from n ≥ k samples of each problem: 1 − C(n−c, k)/C(n, k).  (Chen et al., 2107.03374.)"""

    def one(samples: Sequence[float]) -> float:
        n, c = len(samples), sum(sample >= 1.0 for sample in samples)
        if k > n:
            raise ValueError(f"pass@{k} needs at least {k} samples of each problem, there are {n}")
        return 1.0 - comb(n - c, k) / comb(n, k)

    return fmean(one(samples) for samples in correct)
