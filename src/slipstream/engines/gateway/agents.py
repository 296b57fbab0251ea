"""A sampler whose responses are what agents did: each has a session for its calls, and every lineage is a row.

How an episode ends is told apart as in `Episodes`: by itself, at a limit (whatever the agent makes of that), or by a
failure of the agent, which is tried again and then left out. An agent that never calls has failed.

A session cannot move. A group that is handed over keeps its complete episodes; the others begin again where it goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from slipstream.engines.base import Sampling
from slipstream.engines.episodes import TRIES, Call, Left, Policy, failed
from slipstream.engines.gateway.server import Server
from slipstream.engines.gateway.sessions import Bounds, Session, Speaks
from slipstream.errors import EnvironmentFailed
from slipstream.records import Finish, Group, Handle, Prompt, Rollout, handed_over, header_of

T = TypeVar("T")


class Player(Protocol):
    """An agent at work."""

    async def ended(self) -> str:
        """Wait until it has; why it failed, or nothing."""
        ...

    async def end(self) -> None:
        """Its time is over."""
        ...

    async def rewards(self) -> dict[str, float]: ...


class Players(Protocol):
    def playing(self, row: dict[str, Any], base_url: str, session: str) -> AbstractAsyncContextManager[Player]:
        """One that has begun."""
        ...

    def close(self) -> None: ...


class Agents:
    def __init__(
        self,
        policy: Policy,
        renderer: Speaks,
        players: Players,
        server: Server,
        bounds: Bounds,
        *,
        seconds: float,
        step_seconds: float,
        at_once: int,
    ) -> None:
        """`seconds` of an episode, `step_seconds` for its rewards, `at_once` agents at a time."""
        self.policy, self.renderer, self.players, self.server = policy, renderer, players, server
        self.bounds, self.seconds, self.step_seconds = bounds, seconds, step_seconds
        self.publish = policy.publish
        self.at_once = at_once
        self.room: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self.calls: list[Call] = []

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if sampling.alone:
            return await self.policy.generate(prompt, replace(sampling, alone=False), begun)
        known: dict[int, list[Handle]] = {}
        for handle in begun:
            known.setdefault(handle.body.episode, []).append(Handle(header_of(handle.body), handle.body))
        await self.server.started()
        loop = asyncio.get_running_loop()
        call = Call(prompt, sampling, loop.create_future(), loop.create_future())
        self.calls.append(call)
        try:
            async with asyncio.TaskGroup() as tasks:  # whoever cancels, or fails, ends all
                members = [
                    tasks.create_task(self._member(call, index, known.get(index)))
                    for index in range(prompt.first, prompt.first + sampling.group)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.calls.remove(call)
            call.ended.set_result(None)
        found = [member.result() for member in members]
        handles = [handle for each in found for handle in each or ()]
        if None in found:
            return handed_over(handle.body for handle in handles if handle.body is not None)
        return sorted(handles, key=lambda handle: handle.header.index)

    async def release(self, numbers: Collection[int] = ()) -> None:
        calls = [call for call in self.calls if not numbers or call.prompt.number in numbers]
        for call in calls:
            if not call.leaving.done():
                call.leaving.set_result(None)
        await self.policy.release(numbers)  # of what has no agent
        if calls:
            await asyncio.wait([call.ended for call in calls])

    async def _member(self, call: Call, index: int, known: list[Handle] | None) -> list[Handle] | None:
        """The lineages of one episode; none if it is handed over before it is complete."""
        if known:
            return known
        error = EnvironmentFailed("", "")
        for failures in range(TRIES):
            try:
                rollouts = await _unless(call.leaving, self._in_turn(call, index, failures))
                return [Handle(header_of(rollout), rollout) for rollout in rollouts]
            except Left:
                return None
            except EnvironmentFailed as failure:
                error = failure
        return [Handle(failed(call.prompt, index, error), None)]

    async def _in_turn(self, call: Call, index: int, failures: int) -> list[Rollout]:
        loop = asyncio.get_running_loop()
        if self.room is None or self.room[0] is not loop:
            self.room = loop, asyncio.Semaphore(self.at_once)
        async with self.room[1]:
            return await self._played(call, index, failures)

    async def _played(self, call: Call, index: int, failures: int) -> list[Rollout]:
        session = Session(self.policy, self.renderer, call.prompt, call.sampling, index, self.bounds)
        name = self.server.open(session)
        try:
            async with self.players.playing(self._row(call.prompt), self.server.base_url(name), name) as player:
                session.began = asyncio.get_running_loop().time()
                why = await self._ended(session, player)
                session.close()
                finish = self._finish(session, why)
                rewards = await self._rewards(player)
        finally:
            self.server.shut(name)
        return session.rollouts(finish, call.sampling.group, {**rewards, "failures": float(failures)})

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        asked = self.renderer.text(prompt.tokens) if prompt.asked is None else prompt.asked
        return {
            "id": prompt.id,
            "prompt": asked,
            "ground_truth": prompt.ground_truth,
            "meta": prompt.meta,
            "data_source": prompt.data_source,
            "seed": prompt.seed,
        }

    async def _ended(self, session: Session, player: Player) -> str | None:
        """Why the agent failed, empty if it has ended well; none if its time was over before."""
        ended = asyncio.create_task(player.ended())
        either: list[asyncio.Future[Any]] = [ended, session.failure]
        try:
            await asyncio.wait(either, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                await session.failure
            return ended.result() if ended.done() else None
        finally:
            if not ended.done():
                ended.cancel()
                with suppress(asyncio.CancelledError):
                    await ended
                await player.end()

    def _finish(self, session: Session, why: str | None) -> Finish:
        if not session.counts["turns"]:
            if why is None:
                raise EnvironmentFailed("timeout", f"the agent got no answer in {self.seconds:g} s")
            raise EnvironmentFailed("error", f"the agent got no answer: {why or 'it ended before'}")
        if why is None:
            return "time"
        if why and session.stopped is None:
            raise EnvironmentFailed("crash" if why.startswith("killed") else "error", f"the agent failed: {why}")
        return session.stopped or "eos"

    async def _rewards(self, player: Player) -> Mapping[str, float]:
        try:
            async with asyncio.timeout(self.step_seconds):
                return await player.rewards()
        except TimeoutError:
            raise EnvironmentFailed("timeout", f"its rewards took more than {self.step_seconds:g} s") from None

    def close(self) -> None:
        self.server.close()
        self.players.close()
        self.policy.close()


async def _unless(leaving: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
    """Left if it is to be handed over first."""
    task = asyncio.ensure_future(work)
    either: list[asyncio.Future[Any]] = [task, leaving]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Left
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
