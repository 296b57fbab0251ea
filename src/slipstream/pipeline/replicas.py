"""The replicas: all workers whose number can be changed while a run continues, by request or by `replicas = "auto"`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from slipstream.errors import ConfigError
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.control.scaling import ReplicaState, Room, check_room, requested_sizes
from slipstream.pipeline.failures import Restarts
from slipstream.pipeline.pool import Pool
from slipstream.protocols import Engines

Names = dict[str, dict[str, list[str]]]
"""Names of workers, by kind and by state (working, starting, leaving)."""


class Replicas:
    def __init__(self, pools: Sequence[Pool[Any]], engines: Engines, restarts: Restarts, admission: Admission) -> None:
        """Manage those pools that can grow; `restarts` keeps the sizes if the run restarts."""
        self.pools = {pool.kind: pool for pool in pools if pool.kind in engines.takes}
        self.engines, self.restarts, self.admission = engines, restarts, admission

    @property
    def room(self) -> Room:
        return Room(self.engines.free(), self.engines.takes)

    @property
    def sizes(self) -> dict[str, int]:
        return {kind: pool.size for kind, pool in self.pools.items()}

    def state(self) -> ReplicaState | None:
        """Return what the choice of sizes depends on; None at the end of the run."""
        if self.admission.finished:
            return None
        settled = not any(pool.coming or pool.leaving for pool in self.pools.values())
        names = {kind: [worker.name for worker in pool.workers] for kind, pool in self.pools.items()}
        return ReplicaState(names, self.sizes if settled else {}, self.room)

    def resize(self, sizes: Mapping[str, int]) -> None:
        self.restarts.sizes |= sizes
        for kind, size in sizes.items():
            self.pools[kind].resize(size)

    def scale(
        self, changes: Sequence[str], automatic: Collection[str], check: Callable[[Mapping[str, int]], None]
    ) -> Names:
        """Change the number of workers as requested, and return the names of all workers.

        The run itself chooses the number of kinds in `automatic`. `check` raises if the machine has no room. On an
        error nothing is changed.
        """
        now = self.sizes
        sizes = requested_sizes(changes, now)
        for kind in sizes.keys() & automatic:
            raise ConfigError(f'{kind}: with replicas = "auto" the run chooses this number itself')
        check_room(sizes, now, self.room)
        check(now | sizes)
        self.resize(sizes)
        return {kind: pool.names_by_state for kind, pool in self.pools.items()}
