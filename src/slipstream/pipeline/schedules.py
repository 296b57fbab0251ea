"""Schedules as data: each schedule is a set of limits and modes for the same coroutines.

| schedule    | credits   | submit | stages  | learn | publish | lag of a token                  |
|-------------|-----------|--------|---------|-------|---------|---------------------------------|
| sync        | B         | batch  | turns   | batch | drain   | 0                               |
| periodic    | B         | stream | overlap | ready | drain   | 0                               |
| step_off(k) | (k+1)·B   | batch  | overlap | batch | drain   | k, after the first k updates    |
| replay(k)   | (k+1)·B   | batch  | turns   | batch | drain   | k, after the first k updates    |
| async(τ)    | (τ+1)·B·P | stream | overlap | batch | keep    | by order or max_lag             |

Credits count groups in flight. B groups make one update, and a publish follows every P updates. k and τ are settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import Literal

from slipstream.config.schedule import Async, Periodic, Replay, ScheduleConfig, StepOff, Sync
from slipstream.protocols import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    groups: int
    """B, the number of groups of one update."""
    credits: int
    """Largest number of groups that are submitted and not yet trained and published."""
    submit: Literal["batch", "stream"]
    """Mode of submission: batch submits B groups together when all have credits, stream submits single groups."""
    stages: Literal["turns", "overlap"]
    """Mode of the stages (rollout, scoring, learning): turns runs one after the other, overlap all at the same time."""
    learn: Literal["batch", "ready"] = "batch"
    """Mode of learning: batch learns from a whole batch, ready accumulates gradients of groups as they are scored."""
    publish: Mode
    """Mode of a publish: its effect on running requests."""
    publish_every: int = 1
    """P: a publish follows every P updates. If the autopilot may change P, this is the smallest value."""
    order: Literal["mixture", "completion", "submission"] = "mixture"
    """Order in which scored groups are learned from; `admission` explains the mixture."""
    max_lag: int | None = None
    """Maximum updates between a group's first token and the update that learns from it; None for no bound."""
    on_old: Literal["wait", "restart", "drop"] = "wait"
    """Action that keeps max_lag: updates wait for old groups, or groups that are too old restart or are dropped."""

    def __post_init__(self) -> None:
        if self.credits < self.groups * self.publish_every:
            raise ValueError(
                f"{self.credits} credits can never fill the {self.publish_every} batches of {self.groups} groups "
                "before a publish"
            )

    @property
    def reach(self) -> int:
        """Largest lag in updates if groups are learned from in the order of submission."""
        return ceil(self.credits / self.groups) - 1

    @property
    def bound(self) -> int | None:
        """Largest lag in updates that the schedule allows; None if unlimited. `Admission.learn` raises above it."""
        if self.max_lag is not None:
            return self.max_lag
        in_order = self.submit == "batch" or self.order == "submission" or self.reach == 0
        return self.reach if in_order else None


def credits_of(tau: float, every: int, groups: int) -> int:
    """Return the largest number of groups in flight for this tau and a publish after every `every` updates."""
    return floor((tau + 1) * every * groups)


def schedule_of(settings: ScheduleConfig, groups: int) -> Schedule:
    match settings:
        case Sync():  # serial phases: no group is in flight when weights change, so all tokens are on-policy
            return Schedule(groups=groups, credits=groups, submit="batch", stages="turns", publish="drain")
        case Replay(k=k):  # serial phases as in sync; each update learns from the oldest of k + 1 batches
            return Schedule(groups=groups, credits=(k + 1) * groups, submit="batch", stages="turns", publish="drain")
        case StepOff(k=k):  # k batches are rolled out and scored while the learner works on the oldest
            return Schedule(groups=groups, credits=(k + 1) * groups, submit="batch", stages="overlap", publish="drain")
        case Periodic():  # stages overlap within one update; weights change after all its groups are learned from
            return Schedule(
                groups=groups, credits=groups, submit="stream", stages="overlap", learn="ready", publish="drain"
            )
        case Async():
            return Schedule(
                groups=groups,
                credits=credits_of(settings.max_tau, settings.min_publish_every, groups),
                submit="stream",
                stages="overlap",
                publish=settings.on_publish,
                publish_every=settings.min_publish_every,
                order=settings.order,
                max_lag=settings.max_lag,
                on_old=settings.on_old or "wait",
            )
