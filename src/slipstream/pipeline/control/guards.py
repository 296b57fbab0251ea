"""What a run does by itself when its numbers go wrong. Pure functions of the lines that it has written so far.

| guard        | acts while                                              | how                              |
|--------------|---------------------------------------------------------|----------------------------------|
| length_surge | responses are much longer than 100 updates before       | learning rate × factor           |
| ess          | few samples outweigh the others                         | learning rate × ess / target     |
| entropy      | the student has next to none                            | learning rate × factor           |
| kl           | the learner is far from what drew its tokens            | tau − 1, again and again         |
| gac          | the gradient of stale samples leads elsewhere           | learning rate × factor           |

They look at an update when it is made, and act on the next. Each number has two thresholds, so that no guard comes and
goes with the noise. Whoever goes on with a run shows them all its lines again, and they stand where they stood.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from statistics import fmean
from typing import Protocol

from slipstream.config.guards import EntropyFloor, EssGuard, GradientCosine, GuardsConfig, KLBrake, LengthSurge
from slipstream.metrics import Metrics

Line = Mapping[str, float]
"""The metrics of one update."""
LOOKS = 5
"""Numbers of which the mean counts: one alone is mostly noise."""
CALM = 50
"""Updates of little drift, after which more may be in flight again."""


@dataclass(frozen=True)
class Act:
    """What one guard does to the updates that follow."""

    lr: float = 1.0
    """What their learning rate is multiplied by."""
    lowered: int = 0
    """How much less than its tau is in flight."""
    said: str = ""
    """Why, where that is new."""


class Guard(Protocol):
    def look(self, line: Line) -> Act: ...


class Guards:
    def __init__(self, config: GuardsConfig, *, tau: float = 0.0, batches: float = 1.0) -> None:
        """`tau` is the schedule's, where a guard may lower it; and so many batches are in flight with it."""
        self.guards = made(config, tau, batches)
        self.acts = {name: Act() for name in self.guards}
        """As they stand after the last line."""

    def look(self, line: Line) -> list[str]:
        """After every update; returns what is new."""
        self.acts = {name: guard.look(line) for name, guard in self.guards.items()}
        return [f"guards.{name}: {act.said}" for name, act in self.acts.items() if act.said]

    @property
    def lr(self) -> float:
        return prod(act.lr for act in self.acts.values())

    @property
    def lowered(self) -> int:
        return sum(act.lowered for act in self.acts.values())

    @property
    def metrics(self) -> Metrics:
        """What each does to the update in hand."""
        return {f"guard/{name}": float(act.lowered) if name == "kl" else act.lr for name, act in self.acts.items()}


def made(config: GuardsConfig, tau: float, batches: float) -> dict[str, Guard]:
    found: dict[str, Guard] = {}
    if config.length_surge is not None:
        found["length_surge"] = surging(config.length_surge)
    if config.ess is not None:
        found["ess"] = Ess(config.ess)
    if config.entropy is not None:
        found["entropy"] = sure_of_all(config.entropy)
    if config.kl is not None:
        found["kl"] = Brake(config.kl, tau, batches)
    if config.gac is not None and config.gac.below is not None:
        found["gac"] = led_astray(config.gac, config.gac.below)
    return found


# --- on the learning rate ---------------------------------------------------------------------------------------------


class Latch:
    """On from where a number is beyond `on`, until it is back at `off`; above or below, as these two lie."""

    def __init__(self, on: float, off: float) -> None:
        self.sign = 1 if on > off else -1
        self.on, self.off, self.shut = on, off, False

    def look(self, value: float) -> bool:
        self.shut = self.sign * value > self.sign * (self.off if self.shut else self.on)
        return self.shut


class Slower:
    """Multiplies the learning rate by a factor as long as a mean of numbers is beyond its threshold."""

    def __init__(self, latch: Latch, factor: float, of: Callable[[Line], float | None], told: str, looks: int) -> None:
        """`of` a line is the number, if it has any; `told` of its mean, as a format."""
        self.latch, self.factor, self.of, self.told = latch, factor, of, told
        self.recent = deque[float](maxlen=looks)

    def look(self, line: Line) -> Act:
        before, value = self.latch.shut, self.of(line)
        if value is not None:
            self.recent.append(value)
            if len(self.recent) == self.recent.maxlen:
                self.latch.look(fmean(self.recent))
        if not self.latch.shut:
            return Act(said="over, the learning rate is as it was" if before else "")
        new = f"{self.told.format(fmean(self.recent))}: learning rate × {self.factor:g} until that is over"
        return Act(lr=self.factor, said="" if before else new)


def surging(length_surge: LengthSurge) -> Slower:
    """A surge comes before a collapse by tens of updates.  (2602.01826.)"""
    latch = Latch(length_surge.ratio, (1 + length_surge.ratio) / 2)
    told = "responses are {:.2f} times as long as 100 updates ago"
    return Slower(latch, length_surge.factor, lambda line: line.get("length/trend"), told, looks=1)


def sure_of_all(entropy: EntropyFloor) -> Slower:
    latch, told = Latch(entropy.floor, 1.1 * entropy.floor), "the student's entropy is down to {:.3g} nats"
    return Slower(latch, entropy.factor, lambda line: line.get("student/entropy"), told, looks=LOOKS)


def led_astray(gac: GradientCosine, below: float) -> Slower:
    """The halves of a batch that differ in age.  (Gradient alignment, after GAC, 2603.01501.)"""
    latch, told = Latch(below, below + 0.1), "the cosine of fresh and stale gradients is {:.2g}"
    return Slower(latch, gac.factor, lambda line: line.get("gradient/cosine"), told, looks=LOOKS)


class Ess:
    """Steps are as small as the batch really is.  (VCPO, 2602.17616.)"""

    def __init__(self, ess: EssGuard) -> None:
        self.target = ess.target
        self.latch = Latch(self.target, (1 + self.target) / 2)

    def look(self, line: Line) -> Act:
        ess = line.get("correction/ess", line.get("drift/ess"))
        if ess is None:
            return Act()
        before, now = self.latch.shut, self.latch.look(ess)
        new = f"the effective sample size is {ess:.2g}: the learning rate follows it"
        return Act(lr=min(ess / self.target, 1.0), said=new if now and not before else "")


# --- on what is in flight ---------------------------------------------------------------------------------------------


class Brake:
    """Lowers tau while drift is high, a step at a time: what one does is seen when all that was in flight is gone."""

    def __init__(self, kl: KLBrake, tau: float, batches: float) -> None:
        self.kl, self.most, self.flight = kl, int(tau), ceil(batches)
        self.recent = deque[float](maxlen=LOOKS)
        self.lowered = self.settling = self.calm = 0

    def look(self, line: Line) -> Act:
        if (lowered := line.get("guard/kl")) is None:
            return Act()  # before there was this guard
        if lowered != self.lowered:  # by other thresholds
            self._set(round(lowered))
        if self.settling:
            self.settling -= 1
        elif (drift := line.get("drift/k3_kl")) is not None:
            self.recent.append(drift)
            if len(self.recent) == LOOKS:
                return self._decided(fmean(self.recent))
        return Act(lowered=self.lowered)

    def _decided(self, drift: float) -> Act:
        self.calm = self.calm + 1 if drift < self.kl.low else 0
        if drift > self.kl.high and self.lowered < self.most:
            return self._set(self.lowered + 1, f"drift is {drift:.2g}")
        if self.lowered and self.calm >= CALM:
            return self._set(self.lowered - 1, f"drift has been below {self.kl.low:g} for {CALM} updates")
        return Act(lowered=self.lowered)

    def _set(self, lowered: int, why: str = "") -> Act:
        self.lowered = min(lowered, self.most)
        self.settling, self.calm = self.flight, 0
        self.recent.clear()
        return Act(lowered=self.lowered, said=f"{why}: tau is {self.lowered} less than it was set to")
