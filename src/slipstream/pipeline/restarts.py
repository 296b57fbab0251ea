"""Whether a worker that died is started again, and after which pause: decided here, without a task or a clock."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

HOUR = 3600.0
LONGEST = 60.0
"""Seconds between a death and a start, at most."""
METRIC = "restarts/"


class Restarts:
    """Of all workers of a run; they outlive the parts of it that its learner's deaths make."""

    def __init__(self, most: int) -> None:
        """`most` are granted to a worker in an hour."""
        self.most = most
        self.counts = Counter[str]()
        """Of each worker, in the whole run."""
        self.lately = defaultdict[str, deque[float]](deque)
        """When, in the last hour."""
        self.sizes: dict[str, int] = {}
        """How many workers of a kind there were told to be, while the run went on."""
        self.began: float | None = None
        """When the run began, by the event loop's clock, which goes on while nothing works."""

    def recall(self, metrics: Mapping[str, Any]) -> None:
        """What an earlier part of the run has written of itself."""
        for name, value in metrics.items():
            if name.startswith(METRIC):
                worker = name.removeprefix(METRIC)
                self.counts[worker] = max(self.counts[worker], round(value))

    def granted(self, name: str, now: float) -> float | None:
        """Seconds to wait until a worker is started again: 1, 2, 4 …; None if that has been done often enough."""
        lately = self.lately[name]
        while lately and now - lately[0] >= HOUR:
            lately.popleft()
        if len(lately) >= self.most:
            return None
        lately.append(now)
        self.counts[name] += 1
        return min(2.0 ** (len(lately) - 1), LONGEST)

    def often(self, name: str) -> str:
        """In a line about one that died and is not started again."""
        times = len(self.lately[name])
        return f" {times + 1} times in an hour (runtime.restarts = {self.most})" if times else ""

    @property
    def metrics(self) -> dict[str, float]:
        return {METRIC + name: float(count) for name, count in sorted(self.counts.items())}
