"""When what happens: one kind of schedule each, and what there is to choose about it."""

from __future__ import annotations

from math import ceil
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from slipstream.config.base import Section


class ScheduleSection(Section):
    """Properties that every schedule has, so that no other file needs to ask which kind it is."""

    serial: ClassVar[bool] = False
    """Roll out, score and learn one after the other."""
    learns_as_ready: ClassVar[bool] = False
    """Gather gradients from groups as they come, and make one step at the end of an update."""

    @property
    def label(self) -> str:
        """Name with the setting that matters most, such as `step_off(2)`."""
        return self.kinds()[0]

    @property
    def most(self) -> float:
        """Largest tau that may be reached; 0 for schedules without tau."""
        return 0.0

    @property
    def rarest(self) -> int:
        """Most updates that may pass between two publishes."""
        return 1

    @property
    def batches(self) -> float:
        """Most batches that tau allows in flight."""
        return 1.0

    @property
    def finds_tau(self) -> bool:
        """Return whether the run chooses tau."""
        return False


class Sync(ScheduleSection):
    """Strictly on-policy: roll out a batch, score it, learn from it, publish, begin again."""

    kind: Literal["sync"] = "sync"
    """One stage at a time, strictly on-policy."""
    serial: ClassVar[bool] = True


class Periodic(ScheduleSection):
    """On-policy like sync, but scoring and learning begin with the first finished sample."""

    kind: Literal["periodic"] = "periodic"
    """The stages of one update overlap, strictly on-policy."""
    learns_as_ready: ClassVar[bool] = True


class StepOff(ScheduleSection):
    """Whole batches, k of them ahead of the learner: tokens are exactly k updates old."""

    kind: Literal["step_off"] = "step_off"
    """Stages overlap across batches, a fixed number of updates off-policy."""
    k: int = Field(1, ge=1)
    """How many batches roll out ahead."""

    @property
    def label(self) -> str:
        return f"{self.kind}({self.k})"


class Async(ScheduleSection):
    """Everything overlaps: groups start as credits allow, weights change in the middle of a response."""

    kind: Literal["async"] = "async"
    """All stages overlap, with bounded work in flight."""
    tau: Annotated[float, Field(ge=0)] | Literal["auto"] = 4.0
    """Work in flight: (tau + 1) batches between submission and publish. More overlaps more and is staler. "auto" begins
    with 1, raises it while the learner waits for groups, and lowers it when drift is above its budget."""
    tau_max: int = Field(8, ge=1)
    """The most that tau = "auto" comes to."""
    drift: float = Field(0.02, gt=0)
    """Drift (drift/k3_kl) that tau = "auto" stays within."""
    publish_every: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Updates between two publishes; work in flight grows with it. "auto", beside tau = "auto", begins with 1 and
    doubles while the learner waits and publishes take long; what is too stale, or saves nothing, is taken back."""
    publish_max: int = Field(4, ge=2)
    """The most that publish_every = "auto" comes to, a power of two."""
    on_publish: Literal["keep", "drain", "restart"] = "keep"
    """Running responses go on under the new weights, are finished first, or begin again."""
    order: Literal["mixture", "completion", "submission"] = "mixture"
    """Learn from groups as they finish, of each teacher as many as it has of the prompts (mixture) or whosever they are
    (completion); or as they were submitted, which bounds their age and waits for stragglers."""
    mixture: str | None = Field(None, min_length=1)
    """Column whose values keep their shares, too, with order = "mixture": every update has as many groups of each value
    as in the order of submission. Dots lead into objects and lists. For a column that tells long answers from short."""
    max_lag: int | None = Field(None, ge=0)
    """Most updates between a token's policy and the one that learns from it; none by default."""
    on_old: Literal["wait", "restart", "drop"] | None = None
    """What keeps max_lag: hold the learner (wait, unless told otherwise), roll the group out again, or drop it, which
    favours short responses."""

    @property
    def most(self) -> float:
        """The largest that tau may ever be."""
        return self.tau_max if self.tau == "auto" else self.tau

    @property
    def often(self) -> int:
        """The fewest updates that there may ever be between two publishes."""
        return 1 if self.publish_every == "auto" else self.publish_every

    @property
    def rarest(self) -> int:
        """The most updates that there may ever be between two publishes."""
        return self.publish_max if self.publish_every == "auto" else self.publish_every

    @property
    def batches(self) -> float:
        """The most that may ever be in flight. Publishes that come less often leave it as it is where that is found."""
        return (self.most + 1) * self.often

    @property
    def finds_tau(self) -> bool:
        return self.tau == "auto"

    @property
    def label(self) -> str:
        return f"async({self.tau if self.tau == 'auto' else f'{self.tau:g}'})"

    @model_validator(mode="after")
    def _left_to_the_run(self) -> Async:
        idle = {"tau_max": "tau", "drift": "tau", "publish_max": "publish_every"}
        for name, auto in idle.items():
            if getattr(self, auto) != "auto" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} does nothing without {auto} = "auto": set that, or drop {name}')
        if self.publish_every != "auto":
            return self
        if self.tau != "auto":
            raise ValueError('publish_every = "auto" is found together with tau: write tau = "auto", or a number here')
        if self.publish_max & (self.publish_max - 1):
            raise ValueError(f"publish_max = {self.publish_max} is no power of two: write 2, 4, 8 …")
        if 2 * self.publish_max > self.tau_max + 1:
            raise ValueError(
                f"publish_max = {self.publish_max} needs twice as many batches in flight: write "
                f"tau_max = {2 * self.publish_max - 1} or more"
            )
        return self

    @model_validator(mode="after")
    def _bounds(self) -> Async:
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
        reach = ceil(self.batches) - 1
        if self.on_old in (None, "wait") and self.max_lag < reach:
            raise ValueError(
                f"max_lag = {self.max_lag} cannot be kept by waiting with work for {reach} more updates in flight: "
                f"write max_lag = {reach} or more, a smaller {'tau_max' if self.tau == 'auto' else 'tau'}, or "
                'on_old = "restart"'
            )
        if self.max_lag < self.rarest - 1:
            raise ValueError(
                f"max_lag = {self.max_lag} cannot be kept when weights are published every {self.rarest} "
                f"updates: write max_lag = {self.rarest - 1} or more"
            )
        return self


class Replay(ScheduleSection):
    """Serial like sync, on batches that are k updates old: controlled staleness, for studies."""

    kind: Literal["replay"] = "replay"
    """One stage at a time, a fixed number of updates off-policy."""
    serial: ClassVar[bool] = True
    k: int = Field(1, ge=0)
    """Age of every batch in updates, once as many have been made."""

    @property
    def label(self) -> str:
        return f"{self.kind}({self.k})"


ScheduleConfig = Annotated[Sync | Periodic | StepOff | Async | Replay, Field(discriminator="kind")]
