"""A schedule is data: the same loops run every one of them.

Units are groups; B groups make one update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.config import Config
from slipstream.engines.base import Mode


@dataclass(frozen=True, slots=True)
class Schedule:
    groups: int
    """B, the groups of one update."""
    credits: int
    """Most groups that are submitted and not yet trained and published."""
    submit: Literal["batch", "stream"]
    """Admit whole batches, when there is room for one, or single groups."""
    score: Literal["batch", "stream"]
    """Score when nothing is rolling out any more, so that the stages take turns, or as groups come in."""
    publish: Mode
    """What a publish does to running requests."""
    order: Literal["completion", "submission"] = "completion"
    """Whose turn it is among scored groups."""

    def __post_init__(self) -> None:
        if self.credits < self.groups:
            raise ValueError(f"{self.credits} credits can never fill a batch of {self.groups} groups")


def sync(groups: int) -> Schedule:
    """Three serial phases; nothing is in flight when weights change, so every token is on-policy."""
    return Schedule(groups=groups, credits=groups, submit="batch", score="batch", publish="drain")


def schedule_of(config: Config) -> Schedule:
    match config.schedule.kind:
        case "sync":
            return sync(config.groups_per_update)
