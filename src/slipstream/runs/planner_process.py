"""The plan of a run, made where the libraries of models are: for local engines that is not in this process."""

from __future__ import annotations

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
from slipstream.runtimes.local import Nursery
from slipstream.runtimes.places import Place


class Planner:
    """Lives in a process forked from the nursery, which has imported what knows tokenizers and models."""

    async def plan(self, make: Callable[[], Plan], keys: Mapping[str, str]) -> tuple[Plan, bytes]:
        """The plan, and its tokenizer apart. It asks endpoints, which takes their keys."""
        TAKEN.update(keys)
        made = await asyncio.to_thread(make)
        return replace(made, tokenizer=None), pickle.dumps(made.tokenizer)


class Sealed:
    """What is unpacked by whoever unpickles this: a tokenizer, on its way through a process that knows none."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.packed,)


def planned(make: Callable[[], Plan], home: Nursery | ExitStack, *, say: Callable[[str], None]) -> Plan:
    """Its tokenizer is sealed if there is a nursery: for engines."""
    if not isinstance(home, Nursery):
        return make()
    try:
        return _planned_in(home, make, say)
    except WorkerDied:
        if not home.gone:
            raise
        with home.another() as nursery:
            return _planned_in(nursery, make, say)


def _planned_in(nursery: Nursery, make: Callable[[], Plan], say: Callable[[str], None]) -> Plan:
    with ExitStack() as stack:
        (planner,) = local.start([Place(RemoteWorker, "planner", 1, Planner)], nursery, stack, say=say).places
        found: tuple[Plan, bytes] = asyncio.run(planner.call("plan", make, TAKEN))
    made, tokenizer = found
    return replace(made, tokenizer=Sealed(tokenizer))
