"""Sampler whose responses are episodes of external agents. Each episode has a session for the agent's calls.

Every lineage of a session is a row of the group. An episode ends when its agent ends, at a limit, or by a failure.
An episode that failed is retried, and dropped after the last try. An agent that never calls has failed.

A session cannot move to another sampler. Agents of a released group wait, and continue if the group continues at this
sampler. At another sampler, incomplete episodes start again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.episodes import EPISODE_TRIES, Call, Calls, Limits, Policy, failed, row_of
from slipstream.environments.gateway.sessions import Session
from slipstream.errors import EnvironmentFailed
from slipstream.protocols import Sampling
from slipstream.records import Finish, Group, Handle, Prompt, Rollout, handed_over, header_of

if TYPE_CHECKING:
    from slipstream.environments.gateway.server import Server

RELEASED_SECONDS = 300.0
"""Seconds that the agent of a released episode waits for the episode to continue."""
Key = tuple[int, int, int, Sampling]
"""Key of an episode: number and seed of its prompt, its index, and its sampling options."""


class Player(Protocol):
    @property
    def judged(self) -> bool:
        """True if a judge looks at the agent's work, also if the agent failed."""
        ...

    async def wait_for_end(self) -> str:
        """Wait until the agent ends; return the reason if it failed, else an empty string."""
        ...

    async def end(self) -> None:
        """Stop the agent, because the time of its episode is over."""
        ...

    async def rewards(self) -> dict[str, float]: ...


class Players(Protocol):
    def playing(
        self, row: dict[str, Any], base_url: str, session: str, *, hidden: Sequence[str]
    ) -> AbstractAsyncContextManager[Player]:
        """Play an episode of a row; agents must not see the values at the paths `hidden` in its `meta`."""

    def close(self) -> None: ...


class Agents:
    def __init__(
        self,
        policy: Policy,
        renderer: Renderer,
        players: Players,
        server: Server,
        limits: Limits,
        *,
        vocabulary: int,
        at_once: int,
    ) -> None:
        """Run at most `at_once` agents at a time; token ids of their requests must be below `vocabulary`."""
        self.policy, self.renderer, self.players, self.server = policy, renderer, players, server
        self.limits, self.vocabulary, self.at_once = limits, vocabulary, at_once
        self.publish = policy.publish
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
        await self.server.start()

        def member(call: Call, place: int) -> Coroutine[Any, Any, list[Handle]]:
            index = prompt.first + place
            return self._member(call, index, known.get(index, []))

        episodes = await self.calls.run(prompt, sampling, member)
        handles = [handle for lineages in episodes for handle in lineages]
        if any(not lineages or lineages[0].header.finish == "released" for lineages in episodes):
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
        if playing is not None and playing.expiry is not None:
            playing.expiry.cancel()
        if playing is not None and not known:  # the episode starts again
            await cancel_and_wait(playing.task)
            playing = None
        if playing is None:
            playing = Playing()
            playing.task = asyncio.create_task(self._episode(call, index, playing))
        elif playing.session is not None:
            playing.session.going.set()
        self.playing[key] = playing
        either: list[asyncio.Future[Any]] = [playing.task, call.released]
        stays = False
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if playing.task.done():
                return playing.task.result()
            stays = playing.session is not None and playing.session.counts["turns"] > 0
            if stays:
                playing.expiry = asyncio.get_running_loop().call_later(
                    RELEASED_SECONDS, lambda: self.playing.pop(key).task.cancel()
                )
            return playing.unfinished() if stays else []
        finally:
            if not stays:
                await cancel_and_wait(playing.task)
                self.playing.pop(key, None)

    async def _episode(self, call: Call, index: int, playing: Playing) -> list[Handle]:
        error = EnvironmentFailed("", "")
        for failures in range(EPISODE_TRIES):
            try:
                async with self._semaphore():
                    rollouts = await self._play(call, index, failures, playing)
                return [Handle(header_of(rollout), rollout) for rollout in rollouts]
            except EnvironmentFailed as failure:
                error = failure
        return [Handle(failed(call.prompt, index, error), None)]

    def _semaphore(self) -> asyncio.Semaphore:
        """Return the semaphore that limits running agents; each event loop needs a new one."""
        loop = asyncio.get_running_loop()
        if self.room is None or self.room[0] is not loop:
            self.room = loop, asyncio.Semaphore(self.at_once)
        return self.room[1]

    async def _play(self, call: Call, index: int, failures: int, playing: Playing) -> list[Rollout]:
        prompt, limit = call.prompt, self.limits.step_seconds
        session = Session(self.policy, self.renderer, prompt, call.sampling, index, self.limits, self.vocabulary)
        playing.session = session
        name = self.server.open(session)
        row = row_of(prompt, self.renderer.text(prompt.tokens) if prompt.asked is None else prompt.asked, prompt.seed)
        try:
            there = self.server.base_url(name)
            async with self.players.playing(row, there, name, hidden=prompt.hidden) as player:
                session.began = asyncio.get_running_loop().time()
                why = await self._wait_for_agent(session, player)
                session.close()
                finish = self._finish(session, why, player)
                try:
                    async with asyncio.timeout(limit):
                        rewards = await player.rewards()
                except TimeoutError:
                    raise EnvironmentFailed("timeout", f"the rewards took more than {limit:g} s") from None
        finally:
            playing.session = None
            self.server.shut(name)
        counts = {"failures": float(failures), "crashed": float(bool(why) and session.stopped is None)}
        return session.rollouts(finish, call.sampling.group, {**rewards, **counts})

    async def _wait_for_agent(self, session: Session, player: Player) -> str | None:
        """Return the reason why the agent failed, an empty string if it succeeded, or None if its time is over."""
        ended = asyncio.create_task(player.wait_for_end())
        either: list[asyncio.Future[Any]] = [ended, session.failure]
        try:
            await asyncio.wait(either, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                await session.failure
            return ended.result() if ended.done() else None
        finally:
            if not ended.done():
                ended.cancel()
                with suppress(asyncio.CancelledError):
                    await ended
                await player.end()

    def _finish(self, session: Session, why: str | None, player: Player) -> Finish:
        """Return how an episode ended; raise EnvironmentFailed if it must be played again.

        An agent with a judge that failed after a turn is judged: its student may have made it fail. Another try would
        let the student choose which of its episodes count.
        """
        if not session.counts["turns"]:
            if why is None:
                raise EnvironmentFailed("timeout", f"the agent got no answer in {self.limits.seconds:g} s")
            raise EnvironmentFailed("error", f"the agent got no answer: {why or 'it ended before'}")
        if why is None:
            return "time"
        if why and session.stopped is None and not player.judged:
            raise EnvironmentFailed("crash" if why.startswith("killed") else "error", f"the agent failed: {why}")
        return session.stopped or "eos"

    def close(self) -> None:
        self.close_environments()
        self.policy.close()

    def close_environments(self) -> None:
        for playing in self.playing.values():
            if not playing.task.done() and not playing.task.get_loop().is_closed():
                playing.task.cancel()
        self.server.close()
        self.players.close()


@dataclass(eq=False)
class Playing:
    """Running episode. After the release of a group, the agent of its episode waits here to continue."""

    task: asyncio.Task[list[Handle]] = field(init=False)
    session: Session | None = None
    expiry: asyncio.TimerHandle | None = None
    """Timer that ends a released episode; None while the episode runs."""

    def unfinished(self) -> list[Handle]:
        assert self.session is not None
        rollouts = self.session.rollouts("released", self.session.sampling.group, {})
        return [Handle(header_of(rollout), rollout) for rollout in rollouts]


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has cleaned up, even if the waiting task is cancelled meanwhile."""
    if not task.done():
        task.cancel()
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise
