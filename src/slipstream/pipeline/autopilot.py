"""How much is in flight where `tau = "auto"` leaves it to the run. Pure: no task, no clock.

    drift is above its budget, or samples no longer count             less, as much as it takes
    it is not, and the learner waits for groups                       more, as far as drift leaves room
    the learner does not wait for them                                nothing changes

More in flight is an experiment: it stays if the learner waits less for it. A tau that was too stale, or brought
nothing, is not gone back to, nor one that was too small, so what is still possible only narrows: noise can end that at
a wrong tau, but never makes it swing. What was learned is forgotten after 25 updates, 50, 100 …, for lengths and
drift change as a student learns, and most at the start. Who goes on with a run shows all its lines again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, hypot, inf, sqrt
from statistics import fmean, stdev

Line = Mapping[str, float]
"""The metrics of one update."""
FIRST = 1
"""The tau that a run begins with."""
WINDOW, LONGEST = 5, 20
"""Updates of one tau that a decision looks at, at least and at most; then a trial is judged, whatever chance did."""
SHORT = 0.02
"""Share of the time that the learner waits for groups, from which on it has too few."""
BOLD = 4
"""How many times as much is tried at once."""
WORTH = 0.02
"""By how much the learner must be busier for a larger tau to stay."""
CHANCE = 2.0
"""Standard errors that are no longer chance."""
LEAST, GATED = 0.5, 0.25
"""Samples are too stale, whatever the drift, where the effective sample size of token weights, as a share, is below the
one, or the share of those that freshness lets count nothing is above the other."""
MEMORY = 25
"""Updates until what was learned is forgotten for the first time."""


Measured = tuple[float, float]
"""A mean, and its standard error."""


@dataclass(frozen=True)
class Seen:
    """What one update tells."""

    waited: float
    """The share of it in which the learner waited for groups."""
    drift: float
    ess: float
    gated: float


def seen(line: Line) -> Seen:
    """What nobody measures is as it should be."""
    waited = (line["seconds/data"] + line["seconds/turn"]) / line["seconds/update"]
    return Seen(waited, line.get("drift/k3_kl", 0.0), line.get("drift/ess", 1.0), line.get("freshness/gated", 0.0))


def measured(values: Sequence[float]) -> Measured:
    return fmean(values), stdev(values) / sqrt(len(values))


class Autopilot:
    def __init__(self, most: int, drift: float) -> None:
        """`most` that tau may be, and the `drift` that it is to stay within."""
        self.most, self.budget = most, drift
        self.tau = min(FIRST, most)
        self.low, self.high = -1, most + 1
        """Up to the one tau is too small, from the other on too large."""
        self.window = deque[Seen](maxlen=LONGEST)
        self.settling, self.update, self.memory = self.tau + 1, 0, MEMORY
        self.trial: tuple[int, Measured] | None = None
        """The tau before this one, and how busy the learner was with it: as long as nobody knows if more is better."""

    def look(self, line: Line) -> str:
        """After every update; says why tau is another from now on, if it is."""
        self.update += 1
        if self.update == self.memory:
            self.memory *= 2
            self.low, self.high = -1, self.most + 1
        if (tau := round(line.get("tau", self.tau))) != self.tau:  # a config that was changed, and other decisions
            self._set(tau)
        if self.settling:
            self.settling -= 1
            return ""
        self.window.append(seen(line))
        return self._decide() if len(self.window) >= WINDOW else ""

    def _decide(self) -> str:
        drift, off = measured([each.drift for each in self.window])
        busy = measured([1 - each.waited for each in self.window])
        why = self._too_stale(drift - CHANCE * off)
        if self.tau and why:
            return self._lower(drift, why)
        if self.trial is not None:
            before, then = self.trial
            gained = busy[0] - (1 + WORTH) * then[0]
            if abs(gained) < CHANCE * hypot(busy[1], then[1]) and len(self.window) < LONGEST:
                return ""
            self.trial = None
            if gained < 0:
                self.high = before + 1
                return self._set(before, "more in flight brought nothing")
            self.low = before
        return self._raise(drift, busy) if busy[0] < 1 - SHORT else ""

    def _too_stale(self, drift: float) -> str:
        """Why, if it is; this is how much drift there is at least."""
        ess, gated = fmean(each.ess for each in self.window), fmean(each.gated for each in self.window)
        if drift > self.budget:
            return f"drift is above {drift:.2g}"
        if ess < LEAST:
            return f"the effective sample size is {ess:.2g}"
        return f"{gated:.0%} of the samples count nothing" if gated > GATED else ""

    def _lower(self, drift: float, why: str) -> str:
        """To where drift would be within its budget, were it in proportion to tau; not below what was too small."""
        self.high, self.trial = self.tau, None
        self.low = min(self.low, self.tau - 2)
        fits = floor(self.tau * min(self.budget / drift, 1.0)) if drift else 0
        return self._set(max(min(fits, self.tau - 1), self.low + 1), why)

    def _raise(self, drift: float, busy: Measured) -> str:
        """By one, if that is within the budget where drift is in proportion to tau; by more, if it is where drift grows
        with its square; and by half of what is still possible, where a larger one was too large."""
        room = self.budget / drift if drift else inf
        tau = max(min(self.tau + 1, self.tau * room), min(BOLD * self.tau, self.tau * sqrt(room))) if self.tau else 1
        tau = min(floor(tau), self.high - 1 if self.high > self.most else (self.tau + self.high) // 2)
        if tau <= self.tau:
            return ""
        self.trial = self.tau, busy
        return self._set(tau, f"the learner waits for groups {1 - busy[0]:.0%} of the time")

    def _set(self, tau: int, why: str = "") -> str:
        told = f"tau from {self.tau} to {tau}, as {why}"
        self.settling = max(self.tau, tau) + 1
        self.tau = tau
        self.window.clear()
        return told
