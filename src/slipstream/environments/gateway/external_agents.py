"""External agents: another program requests a waiting episode, runs its agent, and reports the episode's end.

POST /sessions              request the next episode; the answer holds id, base_url and row
POST /sessions/ID/close     end an episode, with optional {"rewards": a number, or several by name}

Both requests need the run's token. The program grades the episode itself, so a row includes the ground truth. An agent
gets only the base_url of its session, which permits completions but no grading.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from slipstream.environments.gateway import chat_json as wire
from slipstream.environments.gateway.sessions import Refused
from slipstream.rewards.functions import rewards_of

MAX_POLL = 600.0
"""Maximum seconds that a request for an episode waits. A client that disconnects earlier gets no episode."""


@dataclass(eq=False)
class ExternalAgent:
    offer: dict[str, Any]
    taken: asyncio.Future[None]
    closed: asyncio.Future[dict[str, float]]
    grace: float
    """Seconds after an episode's time limit in which the program may still send rewards."""
    judged: bool = False

    async def wait_for_end(self) -> str:
        await asyncio.shield(self.closed)
        return ""

    async def end(self) -> None:
        """Do nothing: the agent's next request is refused."""

    async def rewards(self) -> dict[str, float]:
        await asyncio.wait([self.closed], timeout=self.grace)
        return self.closed.result() if self.closed.done() else {}


class ExternalAgents:
    def __init__(self, token: str, grace: float = 0.0) -> None:
        """Require `token` as the bearer token of requests that start or close an episode."""
        self.token, self.grace = token, grace
        self.waiting = deque[ExternalAgent]()
        self.playing_now: dict[str, ExternalAgent] = {}
        self.requests = deque[asyncio.Future[ExternalAgent]]()
        """Requests for an episode that wait because none is offered."""

    @asynccontextmanager
    async def playing(
        self, row: dict[str, Any], base_url: str, session: str, *, hidden: Sequence[str] = ()
    ) -> AsyncIterator[ExternalAgent]:
        """Offer an episode with its whole row, because external agents compute their own rewards."""
        loop = asyncio.get_running_loop()
        offer = {"id": session, "base_url": base_url, "row": row}
        guest = ExternalAgent(offer, loop.create_future(), loop.create_future(), self.grace)
        self._offer(guest)
        try:
            await guest.taken
            self.playing_now[session] = guest
            yield guest
        finally:
            self.playing_now.pop(session, None)
            if guest in self.waiting:
                self.waiting.remove(guest)

    def _offer(self, guest: ExternalAgent) -> None:
        while self.requests:
            if not (request := self.requests.popleft()).done():
                request.set_result(guest)
                return
        self.waiting.append(guest)

    def check(self, authorization: str) -> None:
        if not secrets.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
            why = "write the header Authorization: Bearer TOKEN, with the token in gateway.token of the run's directory"
            raise Refused(401, why, code="invalid_api_key")

    async def next(self) -> bytes:
        """Wait at most MAX_POLL seconds for an episode; return its id, base_url and row as JSON."""
        guest = self.waiting.popleft() if self.waiting else await self._handed_over()
        if not guest.taken.done():
            guest.taken.set_result(None)
        return wire.dump_json(guest.offer)

    async def _handed_over(self) -> ExternalAgent:
        request: asyncio.Future[ExternalAgent] = asyncio.get_running_loop().create_future()
        self.requests.append(request)
        try:
            async with asyncio.timeout(MAX_POLL):
                try:
                    return await request
                except asyncio.CancelledError:
                    if not request.cancelled():  # the client left at the moment when an episode came
                        self._offer(request.result())
                    raise
        except TimeoutError:
            raise Refused(503, "no episode is waiting; repeat the request", code="no_episode") from None

    def close_session(self, session: str, body: bytes) -> bytes:
        """End an episode with the rewards in the body; return the receipt as JSON."""
        given = wire.load_json(body) if body.strip() else {}
        guest = self.playing_now.get(session)
        if guest is None or guest.closed.done():
            raise Refused(410, "this session is closed", code="session_closed")
        try:
            rewards = rewards_of(given.get("rewards"))
        except Exception as error:  # any error in rewards is an error of their sender
            raise wire.wrong("rewards", f"{error}: write a number, or several by name") from None
        guest.closed.set_result(rewards)
        return wire.dump_json({"id": session, "closed": True})

    def close(self) -> None:
        """Do nothing: further requests of external agents are refused."""
