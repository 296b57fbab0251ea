"""Interface of all controllers: `on_update(line) -> actions`. Pure code: no tasks, no clock.

A controller gets the metrics line of every update and decides. An action is a small piece of data that says what to
do; `Run` carries it out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.metrics import Metrics

Line = Mapping[str, float]
"""The metrics of one update."""


@dataclass(frozen=True, slots=True)
class Say:
    text: str
    """Line for the user."""


@dataclass(frozen=True, slots=True)
class Stop:
    message: str
    """Description of the problem and of its remedy."""
    harmful: bool
    """True if the problem may have damaged the weights."""


@dataclass(frozen=True, slots=True)
class SetRate:
    factor: float
    """Factor on the learning rate of the next update."""


@dataclass(frozen=True, slots=True)
class SetLimits:
    credits: int
    """Largest number of groups in flight."""
    publish_every: int


@dataclass(frozen=True, slots=True)
class Resize:
    sizes: Mapping[str, int]
    """New number of workers, by kind."""
    why: str


@dataclass(frozen=True, slots=True)
class Refresh:
    """Roll out all groups again that began under older weights."""

    why: str


@dataclass(frozen=True, slots=True)
class CheckTeachers:
    """Ask all fixed teachers for the scores of their canary texts."""

    update: int


Action = Say | Stop | SetRate | SetLimits | Resize | Refresh | CheckTeachers


class Controller:
    def on_update(self, line: Line) -> Sequence[Action]:
        """Look at the metrics of an update; return actions that apply from now on."""
        raise NotImplementedError

    def recall(self, lines: Iterable[Line]) -> None:
        """Restore the state from the metrics lines of the run so far."""
        for line in lines:
            self.on_update(line)

    @property
    def metrics(self) -> Metrics:
        """Return what the controller adds to the metrics line of the current update."""
        return {}
