"""The named waits of a run: for its reports, and to end a run in which nothing changes any more.

Guarantor of invariant 9: every wait has a name, and `Progress.watch` bounds it.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slipstream.errors import Stalled
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.pool import Pool
from slipstream.pipeline.trace import Trace


class Progress:
    def __init__(self, trace: Trace, admission: Admission, pools: Sequence[Pool[Any]]) -> None:
        self.trace, self.admission, self.pools = trace, admission, pools
        self.last_change = trace.now()
        """Time of the last change, in seconds of the trace's clock."""
        self.waits: dict[str, float] = {}
        """Time at which each current wait of the learner began, by the name of the wait."""
        self.changed = asyncio.Event()
        """Set to let `until` check its condition again."""
        self.stalled = False
        """True if the run is being stopped because nothing has changed for too long."""

    def note_change(self) -> None:
        self.last_change = self.trace.now()
        self.changed.set()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        self.waits[name] = self.trace.now()
        try:
            yield
        finally:
            del self.waits[name]

    async def until(self, name: str, ready: Callable[[], bool]) -> float:
        """Wait until `ready` returns true, and return the seconds waited; reports show the wait under this name."""
        began = self.trace.now()
        with self.waiting(name):
            while not ready():
                self.changed.clear()
                await self.changed.wait()
        return self.trace.now() - began

    async def watch(self, patience: float) -> None:
        """Stop the run when nothing changes for `patience` seconds."""
        while True:
            await asyncio.sleep(patience / 10)
            if self.trace.now() - self.last_change > patience:
                self.stalled = True
                raise Stalled(f"nothing has moved for {patience:.0f} s (runtime.patience)\n{self.report()}")

    def report(self) -> str:
        now, admission = self.trace.now(), self.admission
        states = ("rolling", "waiting", "scoring", "ready", "learning", "trained")
        counts = ", ".join(f"{len(getattr(admission, state))} {state}" for state in states)
        used = f"{admission.in_use} of {admission.credits} credits in use"
        since_change = f"{now - self.last_change:.1f} s after the last change"
        return "\n".join([
            f"after {now:.1f} s, {since_change}, at version {admission.version}",
            f"groups: {counts}; {used}" + (", publish pending" if admission.gated else ""),
            *(f"learner waits for {name}, for {now - began:.1f} s" for name, began in self.waits.items()),
            *(line for pool in self.pools for line in pool.report()),
            *self.trace.report(),
        ])  # fmt: skip
