"""Which waiting requests come in now, and what has to be read for rows: decided without a tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.engines.native.sampling.decoding import Read
from slipstream.engines.native.sampling.parking import Lineage, Parking
from slipstream.engines.native.sampling.requests import Publish, Request, Row

Member = tuple[Request, list[int]]
"""Some places of a request's group."""


@dataclass(frozen=True)
class Arrivals:
    """In the order in which they take their slots: what was handed over, what is new, what was parked."""

    requests: Sequence[Request]
    """All of them. Members that are handed over go on as if they had been running."""
    fresh: Sequence[Sequence[Member]]
    """Those that begin at their prompt; who has the same prompt, shares one read."""
    going: Sequence[tuple[Request, int]]
    """Those that go on from what is parked, and how many tokens of their prompt that is."""

    @property
    def rows(self) -> int:
        return sum(len(request.left) for request in self.requests)

    def places(self, stop: int) -> dict[Lineage, int]:
        """The slots of those that go on, if all slots until there are taken."""
        first = stop - len(self.going)
        return {request.lineage(0): slot for slot, (request, _) in enumerate(self.going, first)}


def arriving(
    waiting: deque[Request], publishing: deque[Publish], parking: Parking, *, free: int, room: int
) -> Arrivals:
    """From the head of the queue, into so many slots; at most `room` tokens are read for them, unless one needs more.

    Nobody comes in before a publish that waits."""
    fresh, going = dict[bytes, list[Member]](), dict[Lineage, tuple[Request, int]]()
    admitted = list[Request]()
    while waiting and not publishing:
        request = waiting[0]
        if request.aborted:
            waiting.popleft()
            continue
        ids, lineage = request.ids, request.lineage(0)
        alone = request.sampling.group == 1 and not request.begun and lineage not in going
        known = parking.known(lineage, request.prompt.tokens) if alone else 0
        unread = 0 if not known and ids in fresh else len(request.prompt.tokens) - known
        free, room = free - len(request.left), room - unread
        if free < 0 or (admitted and room < 0):
            break
        admitted.append(waiting.popleft())
        members = [place for place in request.left if place not in request.begun]
        if known:
            going[lineage] = request, known
        elif members:
            fresh.setdefault(ids, []).append((request, members))
    return Arrivals(
        sorted(admitted, key=lambda request: len(request.prompt.tokens)),
        sorted(fresh.values(), key=lambda same: len(same[0][0].prompt.tokens)),
        sorted(going.values(), key=lambda pair: len(pair[0].prompt.tokens) - pair[1]),
    )


def prefixes(rows: Mapping[int, Row], *, recurrent: bool) -> list[Read]:
    """All of rows in these slots but their newest tokens, which go through the model with the next step.

    What members of a group share, their prompt, is read once, and so by others that have the same; not by a model with
    recurrent states.
    """
    ids = {request: request.ids for request in {row.request for row in rows.values()}}
    groups, reads = dict[bytes, list[int]](), list[Read]()
    for slot, row in rows.items():
        groups.setdefault(ids[row.request], []).append(slot)
    for members in groups.values():
        shared = 0 if len(members) == 1 or recurrent else len(rows[members[0]].request.prompt.tokens)
        if shared:
            reads.append(Read(members, 0, shared))
        rests = [Read((slot,), shared, rows[slot].length - 1) for slot in members]
        reads += [rest for rest in rests if rest.count]
    return sorted(reads, key=lambda read: (read.first > 0, read.count))
