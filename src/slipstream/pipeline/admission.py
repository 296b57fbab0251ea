"""Credits, as a pure state machine: no task, clock or tensor. The unit is the group, known by its number.

    submit ─▶ rolling ─rolled─▶ waiting ─take─▶ scoring ─scored─▶ ready ─learn─▶ learning ─train─▶ trained
                 ▲                                                  │                                 │
                 └───────────────── restart ────────────────────────┤            publish: credit returned
                                                     drop(reason): credit returned

Guarantor of invariant 1: a credit comes back only when its group has been trained on and the weights of that update
are published, so `submitted − published ≤ credits` always; and where the schedule promises a bound on age, an update
that would break it is held, and one that has broken it raises. Guarantor of invariant 2: every submitted group ends
exactly once, trained or dropped, and admission ends when as many updates are made as were asked for: of B groups each,
or of fewer where batches are submitted whole and members of one were dropped.

Guarantor, too, that updates keep the mixture of what was submitted. A group has a source: its teacher, and with
`schedule.mixture` also its value in a column of the data. The turns of the sources come in the order of submission;
which group of a source takes its next turn is decided by who comes first. So an update is made of as many groups of
every source as in the order of submission, whatever the lengths of their answers, and waits for no group that another
of its source can stand in for.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from itertools import islice

from slipstream.errors import ConfigError
from slipstream.pipeline.schedules import Schedule

Line = dict[int, None]
"""An ordered set: numbers in the order in which they came."""


@dataclass(slots=True)
class Ticket:
    """What is remembered of a group between submission and training."""

    batch: int
    """First number of those that were submitted together."""
    version: int
    """No token of the group is from an older policy; exact once it is rolled out."""
    source: str
    """Of which an update has its share."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands at the end of an update: enough to go on from there."""

    version: int
    submitted: int
    dropped: dict[str, int]
    restarted: int
    in_flight: dict[int, int]
    """Groups that had not ended, and the batch each was submitted with."""
    versions: dict[int, int] = field(default_factory=dict)
    """Of each of them, what its oldest token cannot be older than."""
    waiting: list[int] = field(default_factory=list)
    """Those of them that are rolled out, in the order in which they are scored."""
    ready: list[int] = field(default_factory=list)
    """And those that are scored, in the order in which they came."""
    sources: dict[int, str] = field(default_factory=dict)
    """Of every group that had not ended."""
    turns: list[str] = field(default_factory=list)
    """Whose turn comes when."""


class Admission:
    def __init__(
        self,
        schedule: Schedule,
        *,
        updates: int,
        source: Callable[[int], str] = lambda _: "",
        standing: Standing | None = None,
    ) -> None:
        """`source` tells of which a group is, by its number."""
        self.schedule, self.updates = schedule, updates
        self.credits, self.publish_every = schedule.credits, schedule.publish_every
        """`credits` are how many groups may be in flight now: what the schedule has, or fewer."""
        self.source = source if schedule.order == "mixture" else lambda _: ""
        self.version = self.published_version = standing.version if standing else 0
        """Updates made, and those whose weights are in every sampler."""
        self.submitted = standing.submitted if standing else 0
        self.dropped = Counter[str](standing.dropped if standing else {})
        self.restarted = standing.restarted if standing else 0
        in_flight, versions = (standing.in_flight, standing.versions) if standing else ({}, {})
        sources = standing.sources if standing else {}
        self.live = {
            n: Ticket(batch, versions.get(n, self.version), sources.get(n, "")) for n, batch in in_flight.items()
        }
        """Groups between submission and training, in the order of submission."""
        self.turns = list(standing.turns if standing else ()) or [ticket.source for ticket in self.live.values()]
        """A source for every live group: whose turn it is first, and so on."""
        assert Counter(self.turns) == Counter(ticket.source for ticket in self.live.values())
        self.batches = Counter(in_flight.values())
        """How many groups are live of those that were submitted together; oldest first."""
        self.waiting: Line = dict.fromkeys(standing.waiting if standing else ())
        self.ready: Line = dict.fromkeys(standing.ready if standing else ())
        self.rolling: Line = {n: None for n in in_flight if n not in self.waiting and n not in self.ready}
        self.scoring: Line = {}
        self.learning: Line = {}
        self.trained: Line = {}
        self.published = self.submitted - self.dropped.total() - len(self.live)
        self.gated = False
        """From the end of an update until its weights are in every sampler: nothing may start under old weights."""
        if len(self.live) > schedule.credits:
            raise ConfigError(
                f"{len(self.live)} groups were in flight and this schedule has {schedule.credits} credits: write the "
                "schedule that the run had"
            )
        if self.remaining < 0:
            least = updates - self.remaining // schedule.groups
            raise ConfigError(f"updates = {updates}: more than that is submitted already, write at least {least}")

    # --- what may happen -------------------------------------------------------------------------------------

    @property
    def in_use(self) -> int:
        return len(self.live) + len(self.trained)

    @property
    def coming(self) -> bool:
        """Whether anything is on its way to the learner."""
        return bool(self.rolling or self.waiting or self.scoring)

    @property
    def remaining(self) -> int:
        """Groups that are still to be submitted. A drop adds one, or closes its batch short."""
        if self.schedule.submit == "batch":
            return (self.updates - self.version - len(self.batches)) * self.schedule.groups
        return self.updates * self.schedule.groups - (self.submitted - self.dropped.total())

    @property
    def finished(self) -> bool:
        return self.remaining == 0 and self.in_use == 0

    def quota(self) -> int:
        """How many groups may be submitted now, if any."""
        if self.gated:
            return 0
        if self.schedule.submit == "stream":
            # where fewer credits are allowed than updates hold that are not published, the next one still comes about
            allowed = max(self.credits, len(self.trained) + self.schedule.groups)
            return min(allowed - self.in_use, self.remaining)
        # whole batches, however many of their groups were dropped: each is an update by which those behind it age
        room = len(self.batches) < self.schedule.credits // self.schedule.groups
        return min(self.schedule.groups, self.remaining) if room else 0

    def scorable(self) -> bool:
        """Whether the scoring of what waits may begin: at once, or when nothing rolls out any more."""
        return bool(self.waiting) and (self.schedule.stages == "overlap" or not self.rolling)

    @property
    def size(self) -> int:
        """Groups of the next update; fewer where members of a batch that was submitted whole were dropped."""
        oldest = next(iter(self.batches.values()), 0) if self.schedule.submit == "batch" else 0
        return oldest or self.schedule.groups

    @property
    def enough(self) -> bool:
        """Whether the learner has something to learn from, were it not for order and age."""
        return len(self.ready) >= (1 if self.schedule.learn == "ready" else self.size)

    def learnable(self) -> list[int]:
        """What the learner may take now, in the order in which it is consumed; empty while it must wait."""
        schedule = self.schedule
        if not self.enough or (schedule.stages == "turns" and (self.gated or self.coming)):
            return []
        if schedule.submit == "batch" or schedule.order == "submission":
            oldest = list(islice(self.live, self.size - len(self.learning)))
            return oldest if all(number in self.ready for number in oldest) else []
        return self._whose_turn_it_is(self.ready) if schedule.max_lag is None else self._oldest_within(schedule.max_lag)

    @property
    def full(self) -> bool:
        """Whether what is being learned from makes an update."""
        return len(self.learning) == self.size

    @property
    def publishes_next(self) -> bool:
        """Whether weights are published after the next update; where the cadence was shortened, at the latest then."""
        after = self.version + 1
        return after % self.publish_every == 0 or after - self.published_version >= self.publish_every

    def outdated(self) -> list[int]:
        """Groups that are older than max_lag and cannot be learned from any more: to be restarted or dropped."""
        if self.schedule.max_lag is None or self.schedule.on_old == "wait" or self.gated:
            return []
        oldest = self.version - self.schedule.max_lag
        rolled = (*self.waiting, *self.scoring, *self.ready)  # the others may not have a token yet
        return [number for number in rolled if self.live[number].version < oldest]

    @property
    def standing(self) -> Standing:
        """What is being scored, or learned from, is so anew where this is gone on with."""
        return Standing(
            version=self.version,
            submitted=self.submitted,
            dropped=dict(self.dropped),
            restarted=self.restarted,
            in_flight={number: ticket.batch for number, ticket in self.live.items()},
            versions={number: ticket.version for number, ticket in self.live.items()},
            waiting=[*self.scoring, *self.waiting],
            ready=[*self.learning, *self.ready],
            sources={number: ticket.source for number, ticket in self.live.items()},
            turns=list(self.turns),
        )

    # --- what happens ----------------------------------------------------------------------------------------

    def submit(self) -> list[int]:
        """Take credits for as many groups as may start; returns their numbers."""
        first = self.submitted
        while (count := self.quota()) > 0:
            batch = self.submitted
            for number in range(batch, batch + count):
                self.live[number] = Ticket(batch, self.published_version, self.source(number))
                self.turns.append(self.live[number].source)
                self.rolling[number] = None
            self.batches[batch] = count
            self.submitted += count
        return list(range(first, self.submitted))

    def allow(self, credits: int, publish_every: int) -> None:
        """From now on so many groups may be in flight, and so many updates are made between two publishes. If there are
        more, none starts until enough are published: what is there stays, so order and bounds hold as before."""
        assert self.schedule.groups * publish_every <= credits <= self.schedule.credits
        assert self.schedule.submit == "stream"
        self.credits, self.publish_every = credits, publish_every

    def rolled(self, number: int, version: int) -> None:
        """A group has come back; its oldest token is of this version."""
        _move(number, self.rolling, self.waiting)
        assert version >= self.live[number].version, f"group {number} holds tokens from before its submission"
        self.live[number].version = version

    def take(self) -> list[int]:
        """Begin to score what may be scored; returns the numbers."""
        numbers = list(self.waiting) if self.scorable() else []
        for number in numbers:
            _move(number, self.waiting, self.scoring)
        return numbers

    def scored(self, number: int) -> None:
        _move(number, self.scoring, self.ready)

    def rescore(self, number: int) -> bool:
        """Have a group scored once more, if it is being scored or ready; returns whether it is."""
        place = self.scoring if number in self.scoring else self.ready
        if number not in place:
            return False
        _move(number, place, self.waiting)
        return True

    def learn(self) -> list[int]:
        """Take what the learner may take; returns the numbers."""
        numbers, bound = self.learnable(), self.schedule.bound
        for number in numbers:
            _move(number, self.ready, self.learning)
            lag = self.version - self.live[number].version
            if bound is not None and lag > bound:
                raise RuntimeError(f"group {number} is {lag} updates old, the schedule promises at most {bound}")
        return numbers

    def train(self) -> None:
        """An update has been made of what was learned from. Credits stay out until its weights are published."""
        assert self.full
        for number in list(self.learning):
            _move(number, self.learning, self.trained)
            self.turns.remove(self._leave(number).source)
        published = self.publishes_next
        self.version += 1
        nothing_left = self.remaining == 0 and not self.live
        self.gated = nothing_left or published

    def publish(self) -> None:
        """The weights of all updates so far are in every sampler."""
        self.published += len(self.trained)
        self.trained.clear()
        self.published_version = self.version
        self.gated = False

    def restart(self, number: int) -> None:
        """A group begins again under the weights that are published now, on the same credit; also one that the learner
        was to take, if it could not."""
        del self._place(number)[number]
        self.rolling[number] = None
        self.live[number].version = self.published_version
        self.restarted += 1

    def refresh(self, begun: Container[int]) -> list[int]:
        """All that has begun under older weights than are published next, and is not learned from, begins again under
        those, on the same credits and in the same turns; returns the numbers. Nothing may be rolling out."""
        assert self.gated, "there are no newer weights to begin under"
        older = [number for number, ticket in self.live.items() if ticket.version < self.version]
        stale = [number for number in older if number in begun and number not in self.learning]
        for number in stale:
            self.restart(number)
            self.live[number].version = self.version
        return stale

    def drop(self, number: int, reason: str) -> None:
        """A group ends without being trained on, and its credit returns at once."""
        del self._place(number)[number]
        source = self._leave(number).source
        last = len(self.turns) - 1 - self.turns[::-1].index(source)
        del self.turns[last]  # the others come as they were
        self.dropped[reason] += 1

    # --- how ---------------------------------------------------------------------------------------------------

    def _place(self, number: int) -> Line:
        places = (self.rolling, self.waiting, self.scoring, self.ready, self.learning)
        found = [place for place in places if number in place]
        assert found, f"group {number} is not on its way to the learner"
        return found[0]

    def _leave(self, number: int) -> Ticket:
        ticket = self.live.pop(number)
        self.batches[ticket.batch] -= 1
        if not self.batches[ticket.batch]:
            del self.batches[ticket.batch]
        return ticket

    def _whose_turn_it_is(self, candidates: Iterable[int]) -> list[int]:
        """The first of them that, with what is learned from already, have the next B turns; none, if some cannot be
        taken and a whole batch is asked for."""
        missing, chosen = self.size - len(self.learning), list[int]()
        wanted = Counter(self.turns[: self.size])
        wanted.subtract(self.live[number].source for number in self.learning)
        for number in candidates:
            if len(chosen) == missing:
                break
            if wanted[self.live[number].source]:
                wanted[self.live[number].source] -= 1
                chosen.append(number)
        return chosen if self.schedule.learn == "ready" or len(chosen) == missing else []

    def _oldest_within(self, max_lag: int) -> list[int]:
        """The oldest ready groups, if all that stay behind can still be consumed in time.

        After this update everybody left, the oldest first, gets the next turn of its source, B of which make an update:
        nobody's may come too late. Holding only for groups that are not finished would not be enough.
        """
        v, groups = self.version, self.schedule.groups
        age = {number: (self.live[number].version, number) for number in self.live}
        within = [number for number in self.ready if v - self.live[number].version <= max_lag]
        chosen = self._whose_turn_it_is(sorted(within, key=age.__getitem__))
        if self.schedule.on_old == "wait" and chosen:
            left = defaultdict[str, deque[int]](deque)
            for number in sorted(self.live.keys() - {*chosen}, key=age.__getitem__):
                left[self.live[number].source].append(self.live[number].version)
            for place, source in enumerate(self.turns[groups:]):
                if v + 1 + place // groups > left[source].popleft() + max_lag:
                    return []
        return chosen


def _move(number: int, before: Line, after: Line) -> None:
    assert number in before, f"group {number} is not where it should be"
    del before[number]
    after[number] = None
