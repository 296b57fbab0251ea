"""Agents that are started elsewhere: each takes an episode that waits, and says when it has ended.

POST /sessions              the next one: its id, base_url and row
POST /sessions/ID/close     with {"rewards": a number, or several by name}, if it has any
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from slipstream.engines.gateway import wire
from slipstream.engines.gateway.sessions import Refused
from slipstream.tasks.environments.forms import rewards_of

POLL = 20.0
"""Seconds in which who asks for an episode waits for one."""


@dataclass(eq=False)
class Guest:
    offer: dict[str, Any]
    taken: asyncio.Future[None]
    closed: asyncio.Future[dict[str, float]]

    async def ended(self) -> str:
        await asyncio.shield(self.closed)
        return ""

    async def end(self) -> None:
        """It is told so when it asks for more."""

    async def rewards(self) -> dict[str, float]:
        return self.closed.result() if self.closed.done() else {}


class Guests:
    def __init__(self) -> None:
        self.waiting = deque[Guest]()
        self.playing_now: dict[str, Guest] = {}
        self.asking = deque[asyncio.Future[Guest]]()

    @asynccontextmanager
    async def playing(self, row: dict[str, Any], base_url: str, session: str) -> AsyncIterator[Guest]:
        loop = asyncio.get_running_loop()
        guest = Guest({"id": session, "base_url": base_url, "row": row}, loop.create_future(), loop.create_future())
        self._offer(guest)
        try:
            await guest.taken
            self.playing_now[session] = guest
            yield guest
        finally:
            self.playing_now.pop(session, None)
            if guest in self.waiting:
                self.waiting.remove(guest)

    def _offer(self, guest: Guest) -> None:
        while self.asking:
            if not (asking := self.asking.popleft()).done():
                guest.taken.set_result(None)
                asking.set_result(guest)
                return
        self.waiting.append(guest)

    async def answer(self, method: str, path: str, body: bytes) -> bytes:
        parts = path.partition("?")[0].strip("/").split("/")
        if (method, parts) == ("POST", ["sessions"]):
            return wire.dumped((await self._next()).offer)
        if method == "POST" and len(parts) == 3 and parts[2] == "close":
            return self._close(parts[1], wire.loaded(body) if body.strip() else {})
        raise Refused(404, f"nothing is served at {method} {path[:200]}")

    async def _next(self) -> Guest:
        if self.waiting:
            guest = self.waiting.popleft()
            guest.taken.set_result(None)
            return guest
        asking: asyncio.Future[Guest] = asyncio.get_running_loop().create_future()
        self.asking.append(asking)
        try:
            async with asyncio.timeout(POLL):
                return await asking
        except TimeoutError:
            raise Refused(503, "no episode waits; ask again", code="no_episode") from None

    def _close(self, session: str, said: dict[str, Any]) -> bytes:
        guest = self.playing_now.get(session)
        if guest is None or guest.closed.done():
            raise Refused(410, "this session is closed", code="session_closed")
        try:
            rewards = rewards_of(said.get("rewards"))
        except Exception as error:  # whatever is wrong with them is for who sent them
            raise wire.wrong("rewards", f"{error}: a number, or several by name") from None
        guest.closed.set_result(rewards)
        return wire.dumped({"id": session, "closed": True})

    def close(self) -> None:
        """There is nothing to end: they are told when they ask for more."""
