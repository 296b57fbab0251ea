"""A schedule is data: the same loops run every one of them.

| schedule    | credits   | submit | stages  | learn | publish | lag of a token                  |
|-------------|-----------|--------|---------|-------|---------|---------------------------------|
| sync        | B         | batch  | turns   | batch | drain   | 0                               |
| periodic    | B         | stream | overlap | ready | drain   | 0                               |
| step_off(k) | (k+1)·B   | batch  | overlap | batch | drain   | k, once k updates are made      |
| replay(k)   | (k+1)·B   | batch  | turns   | batch | drain   | k, once k updates are made      |
| async(τ)    | (τ+1)·B·P | stream | overlap | batch | keep    | by order or max_lag             |

Units are groups; B groups make one update, P updates are between two publishes.
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
    """B, the groups of one update."""
    credits: int
    """Most groups that are submitted and not yet trained and published."""
    submit: Literal["batch", "stream"]
    """Admit whole batches, when there is room for one, or single groups."""
    stages: Literal["turns", "overlap"]
    """Roll out, then score, then learn; or all at the same time."""
    learn: Literal["batch", "ready"] = "batch"
    """Learn from a whole batch, or gather gradients from its groups as they come."""
    publish: Mode
    """What a publish does to running requests."""
    publish_every: int = 1
    """P, the updates between two publishes; the least, where that may change."""
    order: Literal["mixture", "completion", "submission"] = "mixture"
    """Whose turn it is among scored groups: `admission` says how a mixture is kept."""
    max_lag: int | None = None
    """Most updates between a group's first token and the update that learns from it."""
    on_old: Literal["wait", "restart", "drop"] = "wait"
    """How max_lag is kept."""

    def __post_init__(self) -> None:
        if self.credits < self.groups * self.publish_every:
            raise ValueError(
                f"{self.credits} credits can never fill the {self.publish_every} batches of {self.groups} groups "
                "that come before a publish"
            )

    @property
    def reach(self) -> int:
        """Updates after a submission by which all that was submitted before it has been consumed, if in order."""
        return ceil(self.credits / self.groups) - 1

    @property
    def bound(self) -> int | None:
        """The lag that is promised, if any: consumption raises beyond it."""
        if self.max_lag is not None:
            return self.max_lag
        in_order = self.submit == "batch" or self.order == "submission" or self.reach == 0
        return self.reach if in_order else None


def sync(groups: int) -> Schedule:
    """Three serial phases; nothing is in flight when weights change, so every token is on-policy."""
    return replay(groups, 0)


def replay(groups: int, k: int) -> Schedule:
    """The serial phases of sync, always on the oldest of k + 1 batches."""
    return Schedule(groups=groups, credits=(k + 1) * groups, submit="batch", stages="turns", publish="drain")


def step_off(groups: int, k: int) -> Schedule:
    """k batches roll out and are scored while the learner works on the oldest."""
    return Schedule(groups=groups, credits=(k + 1) * groups, submit="batch", stages="overlap", publish="drain")


def periodic(groups: int) -> Schedule:
    """One update's stages overlap; all is consumed before weights change, so every token is on-policy."""
    return Schedule(groups=groups, credits=groups, submit="stream", stages="overlap", learn="ready", publish="drain")


def credits_of(tau: float, every: int, groups: int) -> int:
    """So many groups may be in flight with this tau and so many updates between two publishes."""
    return floor((tau + 1) * every * groups)


def asynchronous(groups: int, knobs: Async) -> Schedule:
    return Schedule(
        groups=groups,
        credits=credits_of(knobs.most, knobs.often, groups),
        submit="stream",
        stages="overlap",
        publish=knobs.on_publish,
        publish_every=knobs.often,
        order=knobs.order,
        max_lag=knobs.max_lag,
        on_old=knobs.on_old or "wait",
    )


def schedule_of(settings: ScheduleConfig, groups: int) -> Schedule:
    match settings:
        case Sync():
            return sync(groups)
        case Replay(k=k):
            return replay(groups, k)
        case StepOff(k=k):
            return step_off(groups, k)
        case Periodic():
            return periodic(groups)
        case Async() as knobs:
            return asynchronous(groups, knobs)
