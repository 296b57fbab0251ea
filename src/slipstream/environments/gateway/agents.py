"""Sampler whose responses are episodes of external agents. Each episode has a session for the agent's calls.

Every lineage of a session is a row of the group. An episode ends when its agent ends, at a limit, or by a failure.
An episode that failed is retried, and dropped after the last try. An agent that never calls has failed.

A session cannot move to another sampler. Agents of a released group wait, and continue if the group continues at this
sampler. At another sampler, incomplete episodes start again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.environments.episodes import TRIES, Call, Calls, Policy, failed
from slipstream.environments.gateway.sessions import Bounds, Session, Speaks
from slipstream.errors import EnvironmentFailed
from slipstream.protocols import Sampling
from slipstream.records import Finish, Group, Handle, Prompt, Rollout, handed_over, header_of

if TYPE_CHECKING:
    from slipstream.environments.gateway.server import Server

KEPT = 300.0
"""Seconds that the agent of a released episode waits for the episode to continue."""
Key = tuple[int, int, int, Sampling]
"""Key of an episode: number and seed of its prompt, its index, and its sampling options."""


class Player(Protocol):
    async def ended(self) -> str:
        """Wait until the agent ends; return the reason if it failed, else an empty string."""
        ...

    async def end(self) -> None:
        """Stop the agent, because the time of its episode is over."""
        ...

    async def rewards(self) -> dict[str, float]: ...


class Players(Protocol):
    def playing(self, row: dict[str, Any], base_url: str, session: str) -> AbstractAsyncContextManager[Player]:
        """Start an agent for this row, and yield it."""
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
        """Limit an episode to `seconds`, its rewards to `step_seconds`, and the running agents to `at_once`."""
        self.policy, self.renderer, self.players, self.server = policy, renderer, players, server
        self.bounds, self.seconds, self.step_seconds = bounds, seconds, step_seconds
        self.publish = policy.publish
        self.at_once = at_once
        self.room: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self.calls = Calls(policy)
        self.playing: dict[Key, Playing] = {}
        """Running episodes, including released ones that may continue here."""

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if sampling.alone:
            return await self.policy.generate(prompt, replace(sampling, alone=False), begun)
        known: dict[int, list[Handle]] = {}
        for handle in begun:
            known.setdefault(handle.body.episode, []).append(Handle(header_of(handle.body), handle.body))
        await self.server.started()

        async def member(call: Call, place: int) -> list[Handle]:
            index = prompt.first + place
            return await self._member(call, index, known.get(index, []))

        found = await self.calls.answered(prompt, sampling, member)
        handles = [handle for each in found for handle in each]
        if any(not each or each[0].header.finish == "released" for each in found):
            return handed_over(handle.body for handle in handles if handle.body is not None)
        return sorted(handles, key=lambda handle: handle.header.index)

    async def release(self, numbers: Collection[int] = ()) -> None:
        for (number, *_), playing in self.playing.items():
            if playing.session is not None and (not numbers or number in numbers):
                playing.session.going.clear()
        await self.calls.release(numbers)

    async def _member(self, call: Call, index: int, known: list[Handle]) -> list[Handle]:
        """Return the lineages of one episode: unchanged if complete in `known`, incomplete if the group is released."""
        if known and all(handle.body.finish != "released" for handle in known):
            return known
        key = call.prompt.number, call.prompt.seed, index, call.sampling
        playing = self.playing.pop(key, None)
        if playing is not None and playing.waits is not None:
            playing.waits.cancel()
        if playing is not None and not known:  # the episode starts again
            await ended(playing.task)
            playing = None
        if playing is None:
            playing = Playing()
            playing.task = asyncio.create_task(self._episode(call, index, playing))
        elif playing.session is not None:
            playing.session.going.set()
        self.playing[key] = playing
        either: list[asyncio.Future[Any]] = [playing.task, call.leaving]
        stays = False
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if playing.task.done():
                return playing.task.result()
            stays = playing.session is not None and playing.session.counts["turns"] > 0
            if stays:
                playing.waits = asyncio.get_running_loop().call_later(KEPT, self._forget, key)
            return playing.so_far() if stays else []
        finally:
            if not stays:
                await ended(playing.task)
                self.playing.pop(key, None)

    def _forget(self, key: Key) -> None:
        """End a released episode that did not continue here within KEPT seconds."""
        self.playing.pop(key).task.cancel()

    async def _episode(self, call: Call, index: int, playing: Playing) -> list[Handle]:
        error = EnvironmentFailed("", "")
        for failures in range(TRIES):
            try:
                rollouts = await self._in_turn(call, index, failures, playing)
                return [Handle(header_of(rollout), rollout) for rollout in rollouts]
            except EnvironmentFailed as failure:
                error = failure
        return [Handle(failed(call.prompt, index, error), None)]

    async def _in_turn(self, call: Call, index: int, failures: int, playing: Playing) -> list[Rollout]:
        loop = asyncio.get_running_loop()
        if self.room is None or self.room[0] is not loop:
            self.room = loop, asyncio.Semaphore(self.at_once)
        async with self.room[1]:
            return await self._played(call, index, failures, playing)

    async def _played(self, call: Call, index: int, failures: int, playing: Playing) -> list[Rollout]:
        session = Session(self.policy, self.renderer, call.prompt, call.sampling, index, self.bounds)
        playing.session = session
        name = self.server.open(session)
        try:
            async with self.players.playing(self._row(call.prompt), self.server.base_url(name), name) as player:
                session.began = asyncio.get_running_loop().time()
                why = await self._ended(session, player)
                session.close()
                finish = self._finish(session, why)
                rewards = await self._rewards(player)
        finally:
            playing.session = None
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
        """Return the reason why the agent failed, an empty string if it succeeded, or None if its time is over."""
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
            raise EnvironmentFailed("timeout", f"the rewards took more than {self.step_seconds:g} s") from None

    def close(self) -> None:
        for playing in self.playing.values():
            if not playing.task.done() and not playing.task.get_loop().is_closed():
                playing.task.cancel()
        self.server.close()
        self.players.close()
        self.policy.close()


@dataclass(eq=False)
class Playing:
    """Running episode. After the release of a group, the agent of its episode waits here to continue."""

    task: asyncio.Task[list[Handle]] = field(init=False)
    session: Session | None = None
    waits: asyncio.TimerHandle | None = None
    """Timer that ends a released episode; None while the episode runs."""

    def so_far(self) -> list[Handle]:
        assert self.session is not None
        rollouts = self.session.rollouts("released", self.session.sampling.group, {})
        return [Handle(header_of(rollout), rollout) for rollout in rollouts]


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has cleaned up, even if the waiting task is cancelled meanwhile."""
    if not task.done():
        task.cancel()
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise
