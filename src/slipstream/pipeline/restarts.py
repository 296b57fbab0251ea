"""The decision whether to restart a dead worker, and after which pause. Pure code: no tasks, no clock."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

HOUR = 3600.0
LONGEST = 60.0
"""Largest pause in seconds before a restart."""
METRIC = "restarts/"


class Restarts:
    """The counts of worker restarts in a run. If the learner dies, the run restarts with the same object."""

    def __init__(self, most: int) -> None:
        """Allow each worker `most` restarts per hour."""
        self.most = most
        self.counts = Counter[str]()
        """Restarts of each worker in the whole run."""
        self.lately = defaultdict[str, deque[float]](deque)
        """Times of each worker's restarts in the last hour."""
        self.sizes: dict[str, int] = {}
        """Number of workers by kind, for kinds whose number was changed during the run."""
        self.began: float | None = None
        """Start of the run in seconds of the event loop's clock; None before the start."""

    def recall(self, metrics: Mapping[str, Any]) -> None:
        """Restore the counts from the last metrics line of an earlier part of the run."""
        for name, value in metrics.items():
            if name.startswith(METRIC):
                worker = name.removeprefix(METRIC)
                self.counts[worker] = max(self.counts[worker], round(value))

    def granted(self, name: str, now: float) -> float | None:
        """Count a restart and return the pause before it in seconds (1, 2, 4, …), or None if the limit is reached."""
        lately = self.lately[name]
        while lately and now - lately[0] >= HOUR:
            lately.popleft()
        if len(lately) >= self.most:
            return None
        lately.append(now)
        self.counts[name] += 1
        return min(2.0 ** (len(lately) - 1), LONGEST)

    def often(self, name: str) -> str:
        """Return how often a worker died, as text for the message that it is not restarted; empty if once."""
        times = len(self.lately[name])
        return f" {times + 1} times in an hour (runtime.restarts = {self.most})" if times else ""

    @property
    def metrics(self) -> dict[str, float]:
        return {METRIC + name: float(count) for name, count in sorted(self.counts.items())}
