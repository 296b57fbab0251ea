"""The choice of tau (limit of batches in flight) and of the publish interval for "auto" settings. No tasks, no clock.

    drift is above its budget, or samples are too stale              lower tau until drift fits
    drift is in budget, the learner waits, publishes take long       publish half as often
    drift is in budget, the learner waits for groups                 raise tau as far as drift allows
    publishes take hardly any time                                   publish twice as often
    otherwise                                                        change nothing

A larger tau, or a longer publish interval, is a trial: it stays if the learner is busier with it. The range of possible
values only narrows, because rejected values are not tried again. So noise can lead to a wrong tau, but tau never
oscillates. Because lengths and drift change during training, bounds are forgotten after 25 updates, 50, 100 and so on.
At most half of the groups in flight are learned from between two publishes, or samplers would be idle. A resumed run
passes all its metrics lines to the autopilot again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, hypot, inf, sqrt
from statistics import fmean

from slipstream.pipeline.control.actions import Controller, Line, Say
from slipstream.statistics import standard_error

FIRST_TAU = 1
"""Initial tau."""
MIN_WINDOW, MAX_WINDOW = 5, 20
"""Minimum and maximum number of updates before a decision; after the maximum a trial is judged despite noise."""
MIN_WAIT = 0.02
"""Share of the time that the learner waits for groups: above it, the learner has too few groups."""
MAX_TAU_STEP = 4
"""Largest factor by which one decision raises tau."""
MIN_GAIN = 0.02
"""Relative gain in the learner's busy time that a trial must bring to stay."""
REAL_DIFFERENCE = 2.0
"""Number of standard errors above which a difference counts as real."""
MIN_ESS, MAX_GATED = 0.5, 0.25
"""Limits of staleness: lowest effective sample size as a share, highest share of samples with freshness weight 0."""
TAU_MEMORY = 25
"""Updates until the bounds found so far are forgotten for the first time."""
LONG_PUBLISH, BRIEF_PUBLISH = 0.1, 0.02
"""Shares of the time that publishes take: above the first, publish half as often; below the second, twice as often."""

Estimate = tuple[float, float]
"""Mean and standard error."""


@dataclass(frozen=True)
class Observation:
    """Measurements of one update."""

    waited: float
    """Share of the time in which the learner waited for groups."""
    busy: float
    """Share of the time in which the learner waited neither for groups nor for a publish."""
    drift: float
    ess: float
    gated: float
    publish: float
    """Seconds until all samplers had new weights; 0 without a publish."""
    seconds: float


@dataclass(frozen=True)
class Trial:
    """The settings before a change that is not judged yet, and how busy the learner was with them."""

    ahead: int
    every: int
    busy: Estimate


def observe(line: Line) -> Observation:
    """Read the measurements from a metrics line; metrics that are missing count as healthy."""
    seconds, groups = line["seconds/update"], line["seconds/data"] + line["seconds/turn"]
    return Observation(
        waited=groups / seconds,
        busy=1 - (groups + line["seconds/weights"]) / seconds,
        drift=line.get("drift/k3_kl", 0.0),
        ess=line.get("drift/ess", 1.0),
        gated=line.get("freshness/gated", 0.0),
        publish=line.get("seconds/publish", 0.0),
        seconds=seconds,
    )


def mean_and_error(values: Sequence[float]) -> Estimate:
    return fmean(values), standard_error(values) or 0.0


class Autopilot(Controller):
    def __init__(self, most: int, drift: float, *, often: int = 1, rarest: int = 1) -> None:
        """Set the limits: tau up to `most`, drift up to `drift`, and a publish every `often` to `rarest` updates."""
        self.most, self.budget, self.often, self.rarest = most, drift, often, rarest
        self.ahead, self.every = min(FIRST_TAU, most), often
        """`ahead`: the tau that allows as much in flight at the interval `often`. `every`: the current interval."""
        self.low, self.high = -1, most + 1
        """Bounds of `ahead`: values up to `low` proved too small, values from `high` on too large."""
        self.too_rare = 2 * rarest
        """Smallest publish interval that made samples too stale or brought nothing; larger ones are not tried."""
        self.window = deque[Observation](maxlen=max(MAX_WINDOW, often))
        self.settling, self.update, self.memory = (self.ahead + 1) * often, 0, TAU_MEMORY
        self.trial: Trial | None = None

    @property
    def tau(self) -> float:
        """The current tau; (tau + 1) · every batches are in flight."""
        return (self.ahead + 1) * self.often / self.every - 1

    @property
    def intervals(self) -> list[int]:
        """Publish intervals that may be tried, each twice the one before."""
        return [self.often << n for n in range((self.rarest // self.often).bit_length())]

    def on_update(self, line: Line) -> list[Say]:
        if "tau" not in line or line.get("sft"):  # from a part of the run in which nothing was to be chosen
            return []
        change = self._change(line)
        return [Say(f"schedule: {change}")] if change else []

    def _change(self, line: Line) -> str:
        """Return what changes from now on and why, or an empty string."""
        self.update += 1
        if self.update == self.memory:
            self.memory *= 2
            self.low, self.high, self.too_rare = -1, self.most + 1, 2 * self.rarest
        tau, every = line.get("tau", self.tau), round(line.get("publish_every", self.every))
        ahead = min(max(round((tau + 1) * every / self.often) - 1, 0), self.most)
        if every not in self.intervals:
            every = self.often
        if (ahead, every) != (self.ahead, self.every):  # the line is from an earlier part with another config
            self._set(ahead, every)
        if self.settling:
            self.settling -= 1
            return ""
        if "seconds/eval" in line:  # the learner waited for an evaluation, so its waits say nothing about tau
            return ""
        self.window.append(observe(line))
        return self._decide() if len(self.window) >= max(MIN_WINDOW, self.every) else ""

    def _decide(self) -> str:
        drift, off = mean_and_error([each.drift for each in self.window])
        busy = mean_and_error([each.busy for each in self.window])
        waited = fmean(each.waited for each in self.window)
        before, self.trial = self.trial, None
        if self.ahead and (why := self._too_stale(drift - REAL_DIFFERENCE * off)):
            return self._take_back(before, why) if before and before.every != self.every else self._lower(drift, why)
        if before is not None:
            gained = busy[0] - (1 + MIN_GAIN) * before.busy[0]
            if abs(gained) < REAL_DIFFERENCE * hypot(busy[1], before.busy[1]) and len(self.window) < MAX_WINDOW:
                self.trial = before
                return ""
            if gained < 0:
                return self._take_back(before, "that change brought nothing")
            self.low = before.ahead if before.every == self.every else self.low
        published = self._publish_share()
        reason = f"publishes take {published:.0%} of the time"
        if self.every > self.often and published < BRIEF_PUBLISH:
            return self._set(self.ahead, self.every // 2, reason)
        if published > LONG_PUBLISH and busy[0] < 1 - MIN_WAIT and (rarer := self._rarer(drift)):
            self.trial = Trial(self.ahead, self.every, busy)
            return self._set(*rarer, reason)
        return self._raise(drift, waited, busy) if waited > MIN_WAIT else ""

    def _too_stale(self, drift: float) -> str:
        """Return why samples are too stale, or an empty string; `drift` is a lower bound of the mean drift."""
        ess, gated = fmean(each.ess for each in self.window), fmean(each.gated for each in self.window)
        if drift > self.budget:
            return f"drift is above {drift:.2g}"
        if ess < MIN_ESS:
            return f"the effective sample size is {ess:.2g}"
        return f"{gated:.0%} of the samples have freshness weight 0" if gated > MAX_GATED else ""

    def _publish_share(self) -> float:
        """Return the share of the time spent on publishes, over whole publish intervals."""
        window = list(self.window)[-(len(self.window) // self.every * self.every) :]
        return sum(each.publish for each in window) / sum(each.seconds for each in window)

    def _rarer(self, drift: float) -> tuple[int, int] | None:
        """Return `ahead` and `every` for publishes half as often; None if drift or limits do not allow that."""
        every = 2 * self.every
        ahead = max(self.ahead, 2 * every // self.often - 1)
        fits = ahead == self.ahead or (self.ahead > 0 and drift * ahead <= self.budget * self.ahead)
        return (ahead, every) if fits and every < self.too_rare and every <= self._rarest_of(ahead) else None

    def _rarest_of(self, ahead: int) -> int:
        """Return the longest publish interval that is allowed for this value of `ahead`."""
        return max(self.often, min(self.rarest, (min(ahead, self.most) + 1) * self.often // 2))

    def _lower(self, drift: float, why: str) -> str:
        """Lower tau until drift fits the budget, if drift is proportional to tau; skip values known as too small."""
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

    def _raise(self, drift: float, waited: float, busy: Estimate) -> str:
        """Raise tau as far as the drift budget allows.

        Tau rises by one if drift proportional to tau would stay in the budget. Tau rises by more if drift proportional
        to tau squared would stay in it. If some tau proved too large, tau rises half of the way to that value.
        """
        now, room = self.ahead, self.budget / drift if drift else inf
        ahead = max(min(now + 1, now * room), min(MAX_TAU_STEP * now, now * sqrt(room))) if now else 1
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
        self.window = deque(maxlen=max(MAX_WINDOW, self.every))  # at least one publish
        news = [f"publish_every from {before} to {every}"] * (every != before)
        return (
            f"{', '.join([*news, *([f'tau from {tau:g} to {self.tau:g}'] if self.tau != tau else [])])}, because {why}"
        )
