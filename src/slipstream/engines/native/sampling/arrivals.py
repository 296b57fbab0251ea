"""Decide which waiting requests start, and plan the reads (token ranges to prefill) for them; no tensors here."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.engines.native.sampling.decoding import Read
from slipstream.engines.native.sampling.parking import Lineage, Parking
from slipstream.engines.native.sampling.requests import Publish, Request, Row

Member = tuple[Request, list[int]]
"""A request, and the indices of some members (responses) of its group."""


@dataclass(frozen=True)
class Arrivals:
    """Requests that start now. Slot order: members that earlier calls began, new members, parked sequences."""

    requests: Sequence[Request]
    """All admitted requests. Members in `Request.begun` continue from their last token."""
    fresh: Sequence[Sequence[Member]]
    """New members, which begin after their prompt. Each inner list has one prompt, which is read once for all."""
    resumed: Sequence[tuple[Request, int]]
    """Requests that continue a parked sequence, each with the number of prompt tokens that this sequence covers."""

    @property
    def rows(self) -> int:
        return sum(len(request.left) for request in self.requests)

    def places(self, stop: int) -> dict[Lineage, int]:
        """Return the slot of each continued parked sequence: the last slots below `stop`."""
        first = stop - len(self.resumed)
        return {request.lineage(0): slot for slot, (request, _) in enumerate(self.resumed, first)}


def admit(waiting: deque[Request], publishing: deque[Publish], parking: Parking, *, free: int, room: int) -> Arrivals:
    """Remove requests from the queue that can start: at most `free` rows and `room` tokens; none if a publish waits."""
    fresh, resumed = dict[bytes, list[Member]](), dict[Lineage, tuple[Request, int]]()
    admitted = list[Request]()
    while waiting and not publishing:
        request = waiting[0]
        if request.aborted:
            waiting.popleft()
            continue
        ids, lineage = request.ids, request.lineage(0)
        alone = request.sampling.group == 1 and not request.begun and lineage not in resumed
        known = parking.known(lineage, request.prompt.tokens) if alone else 0
        unread = 0 if not known and ids in fresh else len(request.prompt.tokens) - known
        free, room = free - len(request.left), room - unread
        if free < 0 or (admitted and room < 0):
            break
        admitted.append(waiting.popleft())
        members = [place for place in request.left if place not in request.begun]
        if known:
            resumed[lineage] = request, known
        elif members:
            fresh.setdefault(ids, []).append((request, members))
    return Arrivals(
        sorted(admitted, key=lambda request: len(request.prompt.tokens)),
        sorted(fresh.values(), key=lambda same: len(same[0][0].prompt.tokens)),
        sorted(resumed.values(), key=lambda pair: len(pair[0].prompt.tokens) - pair[1]),
    )


def prefix_reads(rows: Mapping[int, Row], *, recurrent: bool) -> list[Read]:
    """Plan reads of all tokens of each row except the newest; equal prompts are read once unless `recurrent`."""
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
