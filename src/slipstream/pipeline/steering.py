"""Steering of a run: all controllers, and the learning rate and limits that follow from their state."""

from collections.abc import Iterator

from slipstream.config.guards import GuardsConfig
from slipstream.config.running import HealthConfig
from slipstream.config.schedule import Async, ScheduleConfig
from slipstream.metrics import Metrics
from slipstream.pipeline.control.actions import Action, Controller, Line, SetLimits, SetRate
from slipstream.pipeline.control.autopilot import Autopilot
from slipstream.pipeline.control.guards import Guards
from slipstream.pipeline.control.health import Health
from slipstream.pipeline.schedules import credits_of
from slipstream.run_dir.writing import RunLog


class Steering:
    def __init__(
        self, schedule: ScheduleConfig, guards: GuardsConfig, health: HealthConfig, groups: int, log: RunLog
    ) -> None:
        """Create the controllers; restore their state from the metrics lines in `log`, if the run is resumed.

        `groups` is the number of groups of one update.
        """
        self.schedule, self.groups = schedule, groups
        self.guards = Guards(guards, tau=schedule.max_tau, batches=schedule.max_batches)
        self.controllers: list[Controller] = [Health(health), self.guards]
        self.autopilot: Autopilot | None = None
        if isinstance(schedule, Async) and schedule.adapts_tau:
            often, rarest = schedule.min_publish_every, schedule.max_publish_every
            self.autopilot = Autopilot(schedule.tau_max, schedule.drift, often=often, rarest=rarest)
            self.controllers.append(self.autopilot)
        self.tau_changes = self.autopilot is not None or guards.kl is not None
        for controller in self.controllers:
            controller.recall(log.lines("train"))

    @property
    def tau(self) -> float:
        """The current tau: at most (tau + 1) · `publish_every` batches may be in flight."""
        return (self.autopilot.tau if self.autopilot else self.schedule.max_tau) - self.guards.lowered

    @property
    def metrics(self) -> Metrics:
        metrics = {name: value for each in self.controllers for name, value in each.metrics.items()}
        if self.tau_changes:
            metrics["tau"] = float(self.tau)
        if self.autopilot and self.autopilot.rarest > self.autopilot.often:
            metrics["publish_every"] = float(self.autopilot.every)
        return metrics

    def on_update(self, line: Line) -> Iterator[Action]:
        """Yield the actions of all controllers, then the settings of the next update."""
        for controller in self.controllers:
            yield from controller.on_update(line)
        yield from self.settings()

    def settings(self) -> Iterator[Action]:
        yield SetRate(self.guards.lr)
        if isinstance(self.schedule, Async):
            every = self.autopilot.every if self.autopilot else self.schedule.min_publish_every
            yield SetLimits(credits_of(self.tau, every, self.groups), every)
