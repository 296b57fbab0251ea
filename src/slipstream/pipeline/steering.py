"""The decisions after every update: health checks, guards on the learning rate and tau, and the autopilot of tau."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.config.guards import GuardsConfig
from slipstream.config.schedule import Async, ScheduleConfig
from slipstream.config.schema import HealthConfig
from slipstream.metrics import Metrics
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.control.autopilot import Autopilot
from slipstream.pipeline.control.guards import Guards
from slipstream.pipeline.control.health import Health
from slipstream.pipeline.schedules import credits_of
from slipstream.run_dir.writing import RunLog


class Steering:
    def __init__(
        self,
        schedule: ScheduleConfig,
        guards: GuardsConfig,
        health: HealthConfig,
        admission: Admission,
        log: RunLog,
        say: Callable[[str], None],
    ) -> None:
        """Create the rules; restore their state from the metrics lines in `log`, if the run is resumed."""
        self.schedule, self.admission, self.say = schedule, admission, say
        self.guards = Guards(guards, tau=schedule.max_tau, batches=schedule.max_batches)
        self.autopilot: Autopilot | None = None
        if isinstance(schedule, Async) and schedule.adapts_tau:
            self.autopilot = Autopilot(
                schedule.tau_max, schedule.drift, often=schedule.min_publish_every, rarest=schedule.max_publish_every
            )
        self.tau_changes = self.autopilot is not None or guards.kl is not None
        for line in log.updates():
            self._decide(line)
        self.health = Health(health, say)
        self.health.recall(log.updates())
        self._apply()

    @property
    def lr(self) -> float:
        """Return the factor on the learning rate of the next update."""
        return self.guards.lr

    @property
    def tau(self) -> float:
        """The current tau: at most (tau + 1) · `publish_every` batches may be in flight."""
        return (self.autopilot.tau if self.autopilot else self.schedule.max_tau) - self.guards.lowered

    @property
    def publish_every(self) -> int:
        return self.autopilot.every if self.autopilot else self.admission.schedule.publish_every

    @property
    def metrics(self) -> Metrics:
        metrics = self.guards.metrics
        if self.tau_changes:
            metrics["tau"] = float(self.tau)
        if self.autopilot and self.autopilot.rarest > self.autopilot.often:
            metrics["publish_every"] = float(self.publish_every)
        return metrics

    def look(self, line: Metrics) -> None:
        """Check the metrics of an update, and decide about the next one; raise Unhealthy if the run must stop."""
        self.health.look(line)
        for message in self._decide(line):
            self.say(message)
        self._apply()

    def _decide(self, line: Mapping[str, Any]) -> list[str]:
        messages = self.guards.look(line)
        if self.autopilot and "tau" in line and not line.get("sft") and (change := self.autopilot.look(line)):
            messages.append(f"schedule: {change}")
        return messages

    def _apply(self) -> None:
        if isinstance(self.schedule, Async):
            every = self.publish_every
            self.admission.allow(credits_of(self.tau, every, self.admission.schedule.groups), every)
