"""How much is in flight, and how often weights are published, where "auto" leaves that to the run. Pure: no task, no
clock.

    drift is above its budget, or samples no longer count             less in flight, as much as it takes
    it is not, the learner waits for groups, and publishes take long  publish half as often
    it is not, and the learner waits for groups                       more in flight, as far as drift leaves room
    publishes take hardly any time                                    publish twice as often
    the learner does not wait for them                                nothing changes

More in flight, or a publish less, is an experiment: it stays if the learner waits less for it. What was too stale, or
brought nothing, is not gone back to, nor a tau that was too small, so what is still possible only narrows: noise can
end that at a wrong tau, but never makes it swing. What was learned is forgotten after 25 updates, 50, 100 …, for
lengths and drift change as a student learns, and most at the start. Between two publishes at most half of what is in
flight is learned from, or the samplers would stand still. Who goes on with a run shows all its lines again.
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
LONG, BRIEF = 0.1, 0.02
"""Shares of the time: publishes that take more are halved, and those that take less come twice as often."""

Measured = tuple[float, float]
"""A mean, and its standard error."""


@dataclass(frozen=True)
class Seen:
    """What one update tells."""

    waited: float
    """The share of it in which the learner waited for groups."""
    busy: float
    """The share in which it waited neither for these nor for a publish."""
    drift: float
    ess: float
    gated: float
    publish: float
    """Seconds that it took until samplers had new weights."""
    seconds: float


@dataclass(frozen=True)
class Trial:
    """What was before, and how busy the learner was with it: as long as nobody knows if it is better now."""

    ahead: int
    every: int
    busy: Measured


def seen(line: Line) -> Seen:
    """What nobody measures is as it should be."""
    seconds, groups = line["seconds/update"], line["seconds/data"] + line["seconds/turn"]
    return Seen(
        waited=groups / seconds,
        busy=1 - (groups + line["seconds/weights"]) / seconds,
        drift=line.get("drift/k3_kl", 0.0),
        ess=line.get("drift/ess", 1.0),
        gated=line.get("freshness/gated", 0.0),
        publish=line.get("seconds/publish", 0.0),
        seconds=seconds,
    )


def measured(values: Sequence[float]) -> Measured:
    return fmean(values), stdev(values) / sqrt(len(values))


class Autopilot:
    def __init__(self, most: int, drift: float, *, often: int = 1, rarest: int = 1) -> None:
        """`most` that tau may be, the `drift` that it is to stay within, and the least and the most updates that there
        may be between two publishes."""
        self.most, self.budget, self.often, self.rarest = most, drift, often, rarest
        self.ahead, self.every = min(FIRST, most), often
        """What tau would be if publishes came as often as they may, and the updates from one to the next."""
        self.low, self.high = -1, most + 1
        """Up to the one it is too small, from the other on too large."""
        self.too_rare = 2 * rarest
        """Publishes that come so seldom are too stale, or brought nothing."""
        self.window = deque[Seen](maxlen=LONGEST)
        self.settling, self.update, self.memory = (self.ahead + 1) * often, 0, MEMORY
        self.trial: Trial | None = None

    @property
    def tau(self) -> float:
        """(tau + 1) · every batches are in flight."""
        return (self.ahead + 1) * self.often / self.every - 1

    def look(self, line: Line) -> str:
        """After every update; says why something is otherwise from now on, if it is."""
        self.update += 1
        if self.update == self.memory:
            self.memory *= 2
            self.low, self.high, self.too_rare = -1, self.most + 1, 2 * self.rarest
        tau, every = line.get("tau", self.tau), round(line.get("publish_every", self.every))
        ahead = round((tau + 1) * every / self.often) - 1
        if (ahead, every) != (self.ahead, self.every):  # a config that was changed, and other decisions
            self._set(ahead, every)
        if self.settling:
            self.settling -= 1
            return ""
        if "seconds/eval" in line:  # it waited for an evaluation, which says nothing of tau
            return ""
        self.window.append(seen(line))
        return self._decide() if len(self.window) >= max(WINDOW, self.every) else ""

    def _decide(self) -> str:
        drift, off = measured([each.drift for each in self.window])
        busy = measured([each.busy for each in self.window])
        waited = fmean(each.waited for each in self.window)
        before, self.trial = self.trial, None
        if self.ahead and (why := self._too_stale(drift - CHANCE * off)):
            return self._take_back(before, why) if before and before.every != self.every else self._lower(drift, why)
        if before is not None:
            gained = busy[0] - (1 + WORTH) * before.busy[0]
            if abs(gained) < CHANCE * hypot(busy[1], before.busy[1]) and len(self.window) < LONGEST:
                self.trial = before
                return ""
            if gained < 0:
                return self._take_back(before, "that brought nothing")
            self.low = before.ahead if before.every == self.every else self.low
        published = self._published()
        told = f"publishes take {published:.0%} of the time"
        if self.every > self.often and published < BRIEF:
            return self._set(self.ahead, self.every // 2, told)
        if published > LONG and busy[0] < 1 - SHORT and (rarer := self._rarer(drift)):
            self.trial = Trial(self.ahead, self.every, busy)
            return self._set(*rarer, told)
        return self._raise(drift, waited, busy) if waited > SHORT else ""

    def _too_stale(self, drift: float) -> str:
        """Why, if it is; this is how much drift there is at least."""
        ess, gated = fmean(each.ess for each in self.window), fmean(each.gated for each in self.window)
        if drift > self.budget:
            return f"drift is above {drift:.2g}"
        if ess < LEAST:
            return f"the effective sample size is {ess:.2g}"
        return f"{gated:.0%} of the samples count nothing" if gated > GATED else ""

    def _published(self) -> float:
        """The share of the time in which weights were on their way, over whole rounds of publishes."""
        lately = list(self.window)[-(len(self.window) // self.every * self.every) :]
        return sum(each.publish for each in lately) / sum(each.seconds for each in lately)

    def _rarer(self, drift: float) -> tuple[int, int] | None:
        """What publishes that come half as often would need in flight, and how often that is, if it may be."""
        every = 2 * self.every
        ahead = max(self.ahead, 2 * every // self.often - 1)
        fits = ahead == self.ahead or (self.ahead > 0 and drift * ahead <= self.budget * self.ahead)
        return (ahead, every) if fits and every < self.too_rare and every <= self._rarest_of(ahead) else None

    def _rarest_of(self, ahead: int) -> int:
        """Publishes may not come less often than this, with so much in flight."""
        return max(self.often, min(self.rarest, (min(ahead, self.most) + 1) * self.often // 2))

    def _lower(self, drift: float, why: str) -> str:
        """To where drift would be within its budget, were it in proportion to tau; not below what was too small."""
        self.high = self.ahead
        self.low = min(self.low, self.ahead - 2)
        fits = floor(self.ahead * min(self.budget / drift, 1.0)) if drift else 0
        return self._set(max(min(fits, self.ahead - 1), self.low + 1), self.every, why)

    def _take_back(self, before: Trial, why: str) -> str:
        if before.every != self.every:
            self.too_rare = self.every
        else:
            self.high = before.ahead + 1
        return self._set(before.ahead, before.every, why)

    def _raise(self, drift: float, waited: float, busy: Measured) -> str:
        """By one, if that is within the budget where drift is in proportion to tau; by more, if it is where drift grows
        with its square; and by half of what is still possible, where a larger one was too large."""
        now, room = self.ahead, self.budget / drift if drift else inf
        ahead = max(min(now + 1, now * room), min(BOLD * now, now * sqrt(room))) if now else 1
        ahead = min(floor(ahead), self.high - 1 if self.high > self.most else (now + self.high) // 2)
        if ahead <= now:
            return ""
        self.trial = Trial(now, self.every, busy)
        return self._set(ahead, self.every, f"the learner waits for groups {waited:.0%} of the time")

    def _set(self, ahead: int, every: int, why: str = "") -> str:
        tau, before = self.tau, self.every
        self.settling = (max(self.ahead, ahead) + 1) * self.often
        self.ahead = ahead
        while every > self._rarest_of(ahead):
            every //= 2
        if every != self.every:
            self.every, self.low, self.high = every, -1, self.most + 1
        self.window.clear()
        told = [f"publish_every from {before} to {every}"] * (every != before)
        return f"{', '.join([*told, *([f'tau from {tau:g} to {self.tau:g}'] if self.tau != tau else [])])}, as {why}"
