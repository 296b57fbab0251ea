"""Schedules, one section per kind: order of rollout, scoring, learning and publishing. tau bounds work in flight.

Section `[reuse]` is for every kind: groups that several updates learn from.
"""

from __future__ import annotations

from math import ceil
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from slipstream.config.base import Section


class ScheduleSection(Section):
    """Properties of all schedules, so that other code does not depend on the kind."""

    serial: ClassVar[bool] = False
    """True if rollout, scoring and learning run one after the other."""
    learns_as_ready: ClassVar[bool] = False
    """True if the learner adds up gradients of groups as they arrive, unless the method needs all groups at once."""

    @property
    def label(self) -> str:
        """Return the name of the schedule and its most important setting, such as `step_off(2)`."""
        kind, k = self.kinds()[0], getattr(self, "k", None)
        return kind if k is None else f"{kind}({k})"

    @property
    def max_tau(self) -> float:
        """Return the largest possible tau; 0 for schedules without tau."""
        return 0.0

    @property
    def max_publish_every(self) -> int:
        """Return the largest possible number of updates between two publishes."""
        return 1

    @property
    def max_batches(self) -> float:
        """Return the largest number of batches that tau allows in flight."""
        return 1.0

    @property
    def adapts_tau(self) -> bool:
        """Return whether the run itself adapts tau (tau = "auto")."""
        return False


class Sync(ScheduleSection):
    kind: Literal["sync"] = "sync"
    """One stage at a time, strictly on-policy: roll out a batch, score it, learn from it, publish the new weights."""
    serial: ClassVar[bool] = True


class Periodic(ScheduleSection):
    kind: Literal["periodic"] = "periodic"
    """Strictly on-policy, with overlap inside one update: scoring and learning start with the first finished group."""
    learns_as_ready: ClassVar[bool] = True


class StepOff(ScheduleSection):
    kind: Literal["step_off"] = "step_off"
    """Stages overlap across whole batches. After the first k updates every token is exactly k updates old."""
    k: int = Field(1, ge=1)
    """Number of batches that are rolled out ahead of the learner. More batches overlap more and make samples staler."""


class Async(ScheduleSection):
    kind: Literal["async"] = "async"
    """All stages overlap, with bounded work in flight. Weights can change in the middle of a response."""
    tau: Annotated[float, Field(ge=0, le=1_000_000)] | Literal["auto"] = 4.0
    """Bound on work in flight: (tau + 1) batches between submission and publish. A larger tau gives more overlap and
    staler samples. "auto" starts with 1, rises while the learner waits for groups, and falls when drift is too high."""
    tau_max: int = Field(8, ge=1)
    """Largest tau that tau = "auto" can choose."""
    drift: float = Field(0.02, gt=0)
    """Drift in nats (metric drift/k3_kl) above which tau = "auto" lowers tau."""
    publish_every: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Number of updates between two publishes of weights. Work in flight grows in proportion. "auto" needs tau =
    "auto". It starts with 1 and doubles while the learner waits and publishes take long. A change that makes samples
    too stale, or saves no time, is reverted."""
    publish_max: int = Field(4, ge=2)
    """Largest number of updates that publish_every = "auto" can choose; a power of two."""
    on_publish: Literal["keep", "drain", "restart"] = "keep"
    """Treatment of running responses when new weights are published. keep: continue under the new weights. drain:
    finish running responses first. restart: start the responses again."""
    order: Literal["mixture", "completion", "submission"] = "mixture"
    """Order in which groups enter updates. mixture: as groups finish, with each teacher's share of the prompts in every
    update. completion: as groups finish. submission: in the order of submission, which bounds staleness, but a slow
    group blocks the others."""
    mixture: str | None = Field(None, min_length=1)
    """Column of the data whose values also keep their shares, with order = "mixture". Every update has as many groups
    of each value as in the order of submission. Dots select fields of objects and items of lists. None uses no column.
    Set this if a column separates prompts with long answers from prompts with short answers."""
    max_lag: int | None = Field(None, ge=0)
    """Largest lag in updates between the policy that sampled a token and the policy that learns from it. None: no
    limit."""
    on_old: Literal["wait", "restart", "drop"] | None = None
    """Action that keeps max_lag. wait (the default): updates wait for old groups. restart: roll out the group again.
    drop: drop the group, which favours short responses. Needs max_lag."""

    @property
    def max_tau(self) -> float:
        return self.tau_max if self.tau == "auto" else self.tau

    @property
    def min_publish_every(self) -> int:
        return 1 if self.publish_every == "auto" else self.publish_every

    @property
    def max_publish_every(self) -> int:
        return self.publish_max if self.publish_every == "auto" else self.publish_every

    @property
    def max_batches(self) -> float:
        """Return the largest possible number of batches in flight, which publish_every = "auto" does not raise."""
        return (self.max_tau + 1) * self.min_publish_every

    @property
    def adapts_tau(self) -> bool:
        return self.tau == "auto"

    @property
    def label(self) -> str:
        return f"async({self.tau if self.tau == 'auto' else f'{self.tau:g}'})"

    @model_validator(mode="after")
    def _check_auto(self) -> Async:
        idle = {"tau_max": "tau", "drift": "tau", "publish_max": "publish_every"}
        for name in self.changed(*idle):
            auto = idle[name]
            if getattr(self, auto) != "auto":
                raise ValueError(f'{name} does nothing without {auto} = "auto": set that, or drop {name}')
        if self.publish_every != "auto":
            return self
        if self.tau != "auto":
            raise ValueError('publish_every = "auto" needs tau = "auto": write that, or a number for publish_every')
        if self.publish_max & (self.publish_max - 1):
            raise ValueError(f"publish_max = {self.publish_max} is no power of two: write 2, 4, 8 …")
        if 2 * self.publish_max > self.tau_max + 1:
            raise ValueError(
                f"publish_max = {self.publish_max} needs twice as many batches in flight: write "
                f"tau_max = {2 * self.publish_max - 1} or more"
            )
        return self

    @model_validator(mode="after")
    def _check_lag(self) -> Async:
        if self.mixture is not None and self.order != "mixture":
            raise ValueError(
                f'mixture does nothing with order = "{self.order}": write order = "mixture", or drop mixture'
            )
        if self.max_lag is None:
            if self.on_old is not None:
                raise ValueError("on_old does nothing without max_lag: set max_lag, or drop on_old")
            return self
        if self.order == "submission":
            raise ValueError('order = "submission" bounds the lag by itself: drop max_lag, or the order')
        reach = ceil(self.max_batches) - 1
        if self.on_old in (None, "wait") and self.max_lag < reach:
            raise ValueError(
                f"max_lag = {self.max_lag} cannot be kept by waiting with work for {reach} more updates in flight: "
                f"write max_lag = {reach} or more, a smaller {'tau_max' if self.tau == 'auto' else 'tau'}, or "
                'on_old = "restart"'
            )
        if self.max_lag < self.max_publish_every - 1:
            raise ValueError(
                f"max_lag = {self.max_lag} cannot be kept when weights are published every {self.max_publish_every} "
                f"updates: write max_lag = {self.max_publish_every - 1} or more"
            )
        return self


class Replay(ScheduleSection):
    kind: Literal["replay"] = "replay"
    """One stage at a time, on batches that are a fixed number of updates old: controlled staleness, for studies."""
    serial: ClassVar[bool] = True
    k: int = Field(1, ge=0)
    """Age of every batch in updates. The first batches are younger, because fewer updates have been made."""


ScheduleConfig = Annotated[Sync | Periodic | StepOff | Async | Replay, Field(discriminator="kind")]


class ReuseConfig(Section):
    """Experience replay: a store of groups that an update has learned from, and later updates learn from again."""

    times: int = Field(2, ge=1)
    """Number of updates that learn from a group: the largest with order = "age"; otherwise the mean, and half of the
    largest. Of an update's groups, 1/times are new, and the rest come from the store; the first updates are smaller,
    because the store is empty. 1 stores nothing."""
    order: Literal["age", "freshness", "advantage"] = "age"
    """Groups that an update takes from the store. age: the oldest, so that each group is in consecutive updates.
    freshness, advantage: drawn at random, with a probability proportional to priority^alpha. freshness: the priority is
    1, halved by every half_life updates of lag. advantage: the mean |reward − mean reward of the group|, plus 0.01."""
    alpha: float = Field(0.6, gt=0, le=1)
    """Exponent of priorities. Towards 0, all stored groups are drawn alike."""
    beta: float = Field(0.4, ge=0, le=1)
    """Exponent of the importance weights (uniform probability / probability)^beta, divided by the largest one, which
    multiply the losses of drawn groups. 1 corrects the priorities entirely, 0 does not correct them."""
    half_life: float | None = Field(None, gt=0)
    """Lag in updates that halves a priority. None: 2 with order = "freshness", and no decay with "advantage"."""
    max_lag: int | None = Field(None, ge=1)
    """Largest lag in updates at which a stored group is learned from; older groups leave the store. schedule.max_lag
    holds at each use, too. None: no further limit."""
    groups: int | None = Field(None, ge=1)
    """Largest number of groups in the store (sampler.group samples each); the oldest leave first. None: those that the
    next update takes with order = "age", and otherwise twice as many."""
    gigabytes: float | None = Field(None, gt=0)
    """Largest size of the stored records in 10^9 bytes; the oldest groups leave first. None: no limit."""

    @property
    def decay(self) -> float | None:
        """Return the lag in updates that halves a priority; None if lag does not count."""
        return self.half_life or (2.0 if self.order == "freshness" else None)

    @model_validator(mode="after")
    def _check_effect(self) -> ReuseConfig:
        idle = self.changed(*(name for name in type(self).model_fields if name != "times"))
        if self.times == 1 and idle:
            raise ValueError(f"{idle[0]} does nothing with times = 1: drop it, or write times = 2 or more")
        if self.order == "age" and (idle := self.changed("alpha", "beta", "half_life", "groups")):
            raise ValueError(f'{idle[0]} does nothing with order = "age": drop it, or write order = "freshness"')
        if self.max_lag is not None and self.max_lag < self.times - 1:
            raise ValueError(
                f"max_lag = {self.max_lag} leaves no time for {self.times} uses in different updates: write max_lag = "
                f"{self.times - 1} or more, or times = {self.max_lag + 1}"
            )
        return self
