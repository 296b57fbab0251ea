"""Planning of a run; for local engines in a separate process, which has imported the model libraries."""

import asyncio
import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from slipstream.engines.http.client import TAKEN
from slipstream.errors import WorkerDied
from slipstream.plan.plan import Plan
from slipstream.runtimes import local
from slipstream.runtimes.exchange import RemoteWorker
from slipstream.runtimes.local import ProcessLauncher
from slipstream.runtimes.workers import WorkerSpec


class Planner:
    async def plan(self, make: Callable[[], Plan], keys: Mapping[str, str]) -> tuple[Plan, bytes]:
        """Return the plan without its tokenizer, and the pickled tokenizer; `keys` are the API keys of endpoints."""
        TAKEN.update(keys)
        made = await asyncio.to_thread(make)
        return replace(made, tokenizer=None), pickle.dumps(made.tokenizer)


class Sealed:
    """A pickled tokenizer. Unpickling this object returns the tokenizer, so this process need not import its class."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.packed,)


def planned(make: Callable[[], Plan], home: ProcessLauncher | ExitStack, *, say: Callable[[str], None]) -> Plan:
    """Make the plan; if `home` is a process launcher, make it in a new process and seal the plan's tokenizer."""
    if not isinstance(home, ProcessLauncher):
        return make()
    try:
        return _planned_in(home, make, say)
    except WorkerDied:
        if not home.gone:
            raise
        with home.another() as launcher:
            return _planned_in(launcher, make, say)


def _planned_in(launcher: ProcessLauncher, make: Callable[[], Plan], say: Callable[[str], None]) -> Plan:
    with ExitStack() as stack:
        (planner,) = local.start([WorkerSpec(RemoteWorker, "planner", 1, Planner)], launcher, stack, say=say).specs
        found: tuple[Plan, bytes] = asyncio.run(planner.call("plan", make, TAKEN))
    made, tokenizer = found
    return replace(made, tokenizer=Sealed(tokenizer))
