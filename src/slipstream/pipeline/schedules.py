"""Schedules as data: each schedule is a set of limits and modes for the same coroutines.

| schedule    | credits   | submit | stages  | learn | publish | lag of a token                  |
|-------------|-----------|--------|---------|-------|---------|---------------------------------|
| sync        | B         | batch  | turns   | batch | drain   | 0                               |
| periodic    | B         | stream | overlap | ready | drain   | 0                               |
| step_off(k) | (k+1)·B   | batch  | overlap | batch | drain   | k, after the first k updates    |
| replay(k)   | (k+1)·B   | batch  | turns   | batch | drain   | k, after the first k updates    |
| async(τ)    | (τ+1)·B·P | stream | overlap | batch | keep    | by order or max_lag             |

Credits count groups in flight. B groups make one update, and a publish follows every P updates. k and τ are settings.
With [reuse] of n times, B is a n-th of the groups of an update: those that are new. The others come from the store.
"""

from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Literal

from slipstream.config.schedule import Async, Periodic, Replay, ReuseConfig, ScheduleConfig, StepOff, Sync
from slipstream.pipeline.store import Reuse
from slipstream.protocols import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    groups: int
    """B, the number of groups of one update; with `reuse` the number of those that are new."""
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
    reuse: Reuse | None = None
    """Store of groups that later updates learn from again; None: each group is learned from once."""

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
        """Largest lag at the first use that the schedule allows; None if unlimited. `Admission.learn` raises above."""
        if self.max_lag is not None:
            return self.max_lag
        in_order = self.submit == "batch" or self.order == "submission" or self.reach == 0
        return self.reach if in_order else None

    @property
    def on_policy(self) -> bool:
        """Return whether every update learns from responses of its own weights alone."""
        return self.bound == 0 and self.reuse is None

    @property
    def kept_versions(self) -> int:
        """Return the usual largest lag of learned groups in updates: so long, earlier weights may be needed."""
        lag = max(self.reach, self.max_lag or 0)
        if self.reuse is None:
            return lag
        stays = self.reuse.most - 1 if self.reuse.order == "age" else ceil(self.reuse.capacity / self.groups)
        return lag + stays if self.reuse.max_lag is None else min(lag + stays, max(self.reuse.max_lag, lag))

    @property
    def held(self) -> int:
        """Return the largest number of groups whose records are in memory: those in flight and in the store."""
        return self.credits + (self.reuse.capacity if self.reuse is not None else 0)


def credits_of(tau: float, every: int, groups: int) -> int:
    """Return the largest number of groups in flight for this tau and a publish after every `every` updates."""
    return floor((tau + 1) * every * groups)


def schedule_of(settings: ScheduleConfig, groups: int, reuse: ReuseConfig | None = None) -> Schedule:
    """Return the schedule of updates of this many groups."""
    if reuse is None or reuse.times == 1:
        return first_uses(settings, groups)
    schedule = first_uses(settings, groups // reuse.times)
    stored = schedule.groups * (reuse.times - 1)
    capacity = stored if reuse.order == "age" else 2 * stored
    bounds = [bound for bound in (reuse.max_lag, schedule.max_lag) if bound is not None]
    return replace(
        schedule,
        reuse=Reuse(
            most=reuse.times if reuse.order == "age" else 2 * reuse.times,
            groups=stored,
            capacity=capacity if reuse.groups is None else reuse.groups,
            nbytes=None if reuse.gigabytes is None else 1e9 * reuse.gigabytes,
            max_lag=min(bounds, default=None),
            order=reuse.order,
            alpha=reuse.alpha,
            beta=reuse.beta,
            half_life=reuse.decay,
        ),
    )


def first_uses(settings: ScheduleConfig, groups: int) -> Schedule:
    """Return the schedule in which each group is learned from once."""
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
