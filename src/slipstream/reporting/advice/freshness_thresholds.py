"""The rule about [freshness]: thresholds that a pilot run suggests, quantiles of what it measured at the lag meant."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles
from typing import Any

from slipstream.reporting.advice.answer import Found
from slipstream.reporting.advice.readings import Case, values_of

MANY = 50
"""Samples, or updates, that make a tenth of them known."""
NEAR = 0.2
"""By which share a setting may be off."""
KAPPAS = {"kappa_f": "buffer_f", "kappa_roll": "buffer_roll_coverage", "kappa_sup": "buffer_sup_coverage"}
"""Thresholds of a refresh, and what they are for."""


def thresholds(case: Case) -> Found | None:
    """ξ such that a tenth of the samples as old as tau count nothing; κ such that the stalest tenth of the buffers
    would have begun anew. Of those that do something where they are."""
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
    """The quantile below which a tenth lies, to two digits."""
    return float(f"{quantiles(values, n=10, method='inclusive')[0]:.2g}")
