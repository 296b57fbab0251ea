"""Guards: rules that lower the learning rate or tau (the limit of batches in flight) while metrics are bad.

| guard        | acts while                                              | action                           |
|--------------|---------------------------------------------------------|----------------------------------|
| length_surge | responses are much longer than 100 updates before       | learning rate × factor           |
| ess          | the effective sample size is small                      | learning rate × ess / target     |
| entropy      | the student's entropy is close to 0                     | learning rate × factor           |
| kl           | the drift (KL between sampler and learner) is high      | tau − 1, repeatedly              |
| gac          | gradients of stale and fresh samples disagree           | learning rate × factor           |

Guards read only metrics: after each update, to act on the next one. Each guard has two thresholds (hysteresis), so
that noise does not switch it on and off. A resumed run passes all its metrics lines to the guards again, which restores
their state.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil, prod
from statistics import fmean

from slipstream.config.guards import EssGuard, GuardsConfig, KLBrake
from slipstream.metrics import Metrics
from slipstream.pipeline.control.actions import Controller, Line, Say

AVERAGED_UPDATES = 5
"""Number of updates that are averaged, because one value is mostly noise."""
CALM_UPDATES = 50
"""Updates of low drift after which tau is raised again."""


@dataclass(frozen=True)
class Act:
    """The action of one guard on the following updates."""

    lr: float = 1.0
    """Factor on the learning rate."""
    lowered: int = 0
    """Amount by which tau is lowered."""
    message: str = ""
    """Message for the user if the action changed, else empty."""


class Guards(Controller):
    def __init__(self, config: GuardsConfig, *, tau: float = 0.0, batches: float = 1.0) -> None:
        """Create the configured guards; `tau` is the schedule's largest, with `batches` batches in flight."""
        self.guards = create_guards(config, tau, batches)
        self.acts = {name: Act() for name in self.guards}

    def on_update(self, line: Line) -> list[Say]:
        self.acts = {name: guard.on_update(line) for name, guard in self.guards.items()}
        return [Say(f"guards.{name}: {act.message}") for name, act in self.acts.items() if act.message]

    @property
    def lr(self) -> float:
        return prod(act.lr for act in self.acts.values())

    @property
    def lowered(self) -> int:
        return sum(act.lowered for act in self.acts.values())

    @property
    def metrics(self) -> Metrics:
        """Action of each guard on the current update: factor on the learning rate, or amount taken off tau."""
        return {f"guard/{name}": float(act.lowered) if name == "kl" else act.lr for name, act in self.acts.items()}


class Latch:
    """A switch with hysteresis: turns on when a value passes `on`, and off when the value is back at `off`."""

    def __init__(self, on: float, off: float) -> None:
        self.sign = 1 if on > off else -1
        self.on, self.off, self.shut = on, off, False

    def turn(self, value: float) -> bool:
        self.shut = self.sign * value > self.sign * (self.off if self.shut else self.on)
        return self.shut


class Slower:
    """A guard that multiplies the learning rate by a factor while the mean of a metric is beyond a threshold."""

    def __init__(self, metric: str, latch: Latch, factor: float, text: str, looks: int = AVERAGED_UPDATES) -> None:
        """Average the metric over `looks` updates; `text` is a format for the mean."""
        self.metric, self.latch, self.factor, self.text = metric, latch, factor, text
        self.recent = deque[float](maxlen=looks)

    def on_update(self, line: Line) -> Act:
        before = self.latch.shut
        if self.metric in line:
            self.recent.append(line[self.metric])
            if len(self.recent) == self.recent.maxlen:
                self.latch.turn(fmean(self.recent))
        if not self.latch.shut:
            return Act(message="the guard ended, the learning rate is back to normal" if before else "")
        new = f"{self.text.format(fmean(self.recent))}: learning rate × {self.factor:g} until that ends"
        return Act(lr=self.factor, message="" if before else new)


class Ess:
    """The guard that scales the learning rate with the effective sample size (VCPO, 2602.17616)."""

    def __init__(self, ess: EssGuard) -> None:
        self.target, self.power = ess.target, 0.5 if ess.scale == "sqrt" else 1.0
        self.latch = Latch(self.target, (1 + self.target) / 2)

    def on_update(self, line: Line) -> Act:
        known = [line["drift/ess"]] if "drift/ess" in line else []
        if "correction/rollout_is_mean" in line:  # weights of a decoupled correction leave staleness to the loss
            known = [line["correction/ess"], *(known if "mismatch/kl" in line else ())]
        if not known:
            return Act()
        ess = min(known)
        before, now = self.latch.shut, self.latch.turn(ess)
        begun = f"the effective sample size is {ess:.2g}: the learning rate is scaled by it"
        message = "" if now == before else begun if now else f"the guard ended, the effective sample size is {ess:.2g}"
        return Act(lr=min(ess / self.target, 1.0) ** self.power, message=message)


class Brake:
    """The guard that lowers tau by one while drift is high, then waits until all groups in flight are learned from."""

    def __init__(self, kl: KLBrake, tau: float, batches: float) -> None:
        self.kl, self.most, self.flight = kl, int(tau), ceil(batches)
        self.recent = deque[float](maxlen=AVERAGED_UPDATES)
        self.lowered = self.settling = self.calm = 0

    def on_update(self, line: Line) -> Act:
        if (lowered := line.get("guard/kl")) is None:
            return Act()  # the line is from before this guard was configured
        if lowered != self.lowered:  # the line was made with other thresholds
            self._set(round(lowered))
        if self.settling:
            self.settling -= 1
        elif (drift := line.get("drift/k3_kl")) is not None:
            self.recent.append(drift)
            if len(self.recent) == AVERAGED_UPDATES:
                return self._decide(fmean(self.recent))
        return Act(lowered=self.lowered)

    def _decide(self, drift: float) -> Act:
        self.calm = self.calm + 1 if drift < self.kl.low else 0
        if drift > self.kl.high and self.lowered < self.most:
            return self._set(self.lowered + 1, f"drift is {drift:.2g}")
        if self.lowered and self.calm >= CALM_UPDATES:
            return self._set(self.lowered - 1, f"drift has been below {self.kl.low:g} for {CALM_UPDATES} updates")
        return Act(lowered=self.lowered)

    def _set(self, lowered: int, why: str = "") -> Act:
        self.lowered = min(lowered, self.most)
        self.settling, self.calm = self.flight, 0
        self.recent.clear()
        return Act(lowered=self.lowered, message=f"{why}: tau is {self.lowered} below its configured value")


def create_guards(config: GuardsConfig, tau: float, batches: float) -> dict[str, Slower | Ess | Brake]:
    guards: dict[str, Slower | Ess | Brake] = {}
    if (length_surge := config.length_surge) is not None:  # it precedes a collapse by tens of updates (2602.01826)
        latch, text = (
            Latch(length_surge.ratio, (1 + length_surge.ratio) / 2),
            "responses are {:.2f} times as long as before (100 updates ago, or at the start)",
        )
        guards["length_surge"] = Slower("length/trend", latch, length_surge.factor, text, looks=1)
    if config.ess is not None:
        guards["ess"] = Ess(config.ess)
    if (entropy := config.entropy) is not None:
        latch, text = Latch(entropy.floor, 1.1 * entropy.floor), "the student's entropy is down to {:.3g} nats"
        guards["entropy"] = Slower("student/entropy", latch, entropy.factor, text)
    if config.kl is not None:
        guards["kl"] = Brake(config.kl, tau, batches)
    if (gac := config.gac) is not None and gac.below is not None:  # gradient alignment, after GAC (2603.01501)
        latch, text = Latch(gac.below, gac.below + 0.1), "the cosine of fresh and stale gradients is {:.2g}"
        guards["gac"] = Slower("gradient/cosine", latch, gac.factor, text)
    return guards
