"""Native engines that take turns on one device: only the engine that works has its weights there.

All other engines have their weights and optimizer state in host memory. A turn begins when no call of another engine
runs. During a turn further calls of the same engine begin at once, so a schedule must not let stages overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor

from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.sampling.kv import Slots
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.native.sampling.tape import Tape
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.native.spaces import Spaces
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Group, Handle, Prompt
from slipstream.runtimes.build import NativeKinds

T = TypeVar("T")


class Seat:
    """One engine among those that take turns. Its tensors move on its own thread, so never during its work."""

    def __init__(self, turns: Turns, thread: ThreadPoolExecutor, leave: Callable[[], Iterable[Tensor]]) -> None:
        """Add an engine; `leave` ends its turn, and returns the tensors on its device that its next turn needs."""
        self.turns, self.thread, self.leave, self.spaces = turns, thread, leave, Spaces()
        turns.seats.append(self)

    def park(self) -> None:
        self.spaces.to_host(self.leave())

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        await self.turns.begin(self)
        call = asyncio.get_running_loop().create_future()
        self.turns.calls.add(call)
        try:
            yield
        finally:
            self.turns.calls.remove(call)
            call.set_result(None)


class Turns:
    def __init__(self) -> None:
        self.seats: list[Seat] = []
        self.holder: Seat | None = None
        """Engine whose tensors are on the device; None while tensors move, and after a move that failed."""
        self.calls: set[asyncio.Future[None]] = set()
        """Calls of the holder that run now."""
        self.moving: asyncio.Task[None] | None = None

    def park_all(self) -> None:
        for seat in self.seats:
            seat.thread.submit(seat.park).result()

    async def begin(self, seat: Seat) -> None:
        """Wait until this engine may work, and its tensors are on the device."""
        while self.holder is not seat:
            if self.moving is not None and not self.moving.done():
                await asyncio.wait([self.moving])
            elif self.calls:
                await asyncio.wait(self.calls)
            else:
                self.holder, self.moving = None, asyncio.create_task(self._move(seat))
                await asyncio.wait([self.moving])  # if this call is cancelled, the move still ends
                self.moving.result()

    async def _move(self, seat: Seat) -> None:
        loop = asyncio.get_running_loop()
        for other in self.seats:
            if other is not seat:
                await loop.run_in_executor(other.thread, other.park)
        await loop.run_in_executor(seat.thread, seat.spaces.to_device)
        self.holder = seat


def in_turns() -> NativeKinds:
    turns = Turns()
    return NativeKinds(
        sampler=partial(SamplerInTurns, turns),
        scorer=partial(ScorerInTurns, turns),
        learner=partial(LearnerInTurns, turns),
        built=turns.park_all,
    )


class SamplerInTurns(NativeSampler):
    def __init__(self, turns: Turns, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.seat = Seat(turns, self.thread, self._leave)

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        async with self.seat.turn():
            return await super().generate(prompt, sampling, begun)

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        async with self.seat.turn():
            return await super().publish(weights, mode)

    def _leave(self) -> Iterable[Tensor]:
        """Drop the caches, which are empty between two turns, and return the weights."""
        self.parking.clear()
        self.tape = Tape(self.count, self.lm.device, self.tape.logp_STM.dtype)
        for decoder in self.decoders:
            decoder.slots = Slots(self.count, decoder.lm.model.config)
        return chain.from_iterable(decoder.lm.model.parameters() for decoder in self.decoders)


class ScorerInTurns(NativeScorer):
    def __init__(self, turns: Turns, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.seat = Seat(turns, self.thread, self.lm.model.parameters)

    async def publish(self, weights: WeightsRef) -> Loaded:
        async with self.seat.turn():
            return await super().publish(weights)

    async def _call(self, group: Group, *, again: bool) -> list[Handle]:
        async with self.seat.turn():
            return await super()._call(group, again=again)


class LearnerInTurns(NativeLearner):
    def __init__(self, turns: Turns, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.seat = Seat(turns, self.thread, self._leave)

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        async with self.seat.turn():
            return await super()._run(work, *args)

    def _leave(self) -> Iterable[Tensor]:
        """Return weights, gradients, moments, snapshots and the teachers' heads, if they are on the device."""
        states = chain.from_iterable(state.values() for state in self.optimizer.state.values())
        moments = [value for value in states if isinstance(value, Tensor)]
        gradients = [gradient for gradient in self._gradients() if gradient is not None]
        heads = chain.from_iterable(each.head.linear.parameters() for each in self.heads.values())
        found = [*self.lm.model.parameters(), *gradients, *moments, *chain(*self.snapshots.held.values()), *heads]
        return [tensor for tensor in found if tensor.device == self.lm.device]
