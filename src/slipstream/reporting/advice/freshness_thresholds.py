"""The rule about [freshness]: it suggests thresholds from quantiles that the run measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles
from typing import Any

from slipstream.reporting.advice.measurements import Case, values_of
from slipstream.reporting.advice.rules import Found

MANY = 50
"""Smallest number of samples for a 10% quantile; for updates, half as many are enough."""
NEAR = 0.2
"""Relative difference between a setting and the suggestion, up to which no change is suggested."""
KAPPAS = {"kappa_f": "buffer_f", "kappa_roll": "buffer_roll_coverage", "kappa_sup": "buffer_sup_coverage"}
"""Thresholds of a refresh, and the metrics that they apply to (freshness/...)."""


def thresholds(case: Case) -> Found | None:
    """Suggest active thresholds: 10% quantiles of freshness at lag tau (the lag limit), and of buffer metrics."""
    fresh = case.config.freshness
    if fresh is None:
        return None
    aged = [(f, lag) for line in case.ledger for f, lag in zip(line.get("f", ()), line.get("lag", ()), strict=False)]
    known = [(f, lag) for f, lag in aged if f is not None]
    tau = case.config.schedule.most
    old = [f for f, lag in known if lag >= tau]
    values = old if len(old) >= MANY else [f for f, _ in known if f < 1]
    change = dict[str, Any]()
    if fresh.weight == "freshness" and len(values) >= MANY:
        change["freshness.threshold"] = tenth(values)
    for name, metric in KAPPAS.items() if fresh.refresh == "adaptive" else ():
        seen = values_of(case.lines[len(case.lines) // 4 :], f"freshness/{metric}")
        if len(seen) >= MANY // 2 and min(seen) < 1:
            change[f"freshness.{name}"] = tenth(seen)
    given = {key: getattr(fresh, key.rpartition(".")[2]) for key in change}
    if all(abs(change[key] - given[key]) <= NEAR * max(change[key], given[key]) for key in change):
        return None
    first = next(iter(change))
    metric = "freshness/f" if first == "freshness.threshold" else f"freshness/{KAPPAS[first.rpartition('.')[2]]}"
    return Found(metric=metric, value=change[first], limit=given[first], changes=[change])


def tenth(values: Sequence[float]) -> float:
    """Return the 10% quantile, rounded to two digits."""
    return float(f"{quantiles(values, n=10, method='inclusive')[0]:.2g}")
