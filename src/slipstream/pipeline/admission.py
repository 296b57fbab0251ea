"""Admission of groups. A credit is a permit for one group in flight. Pure code: no tasks, no clock, no tensors.

    submit ─▶ rolling ─rolled─▶ waiting ─start─▶ scoring ─scored─▶ ready ─learn─▶ learning ─train─▶ trained
                 ▲                                                  │                                 │
                 └───────────────── restart ────────────────────────┤            publish: credit returned
                                                     drop(reason): credit returned

Guarantor of invariant 1: a credit returns only after its group is trained and the weights of that update are published.
So `submitted − published ≤ credits` always holds. Lag is the age of tokens in updates. If the schedule bounds the lag,
an update that would exceed the bound waits, and learning from a group that is too old raises RuntimeError.
Guarantor of invariant 2: every submitted group ends exactly once, trained or dropped. An update has B groups, or fewer
if the schedule submits whole batches and groups of the batch were dropped.

A trained group may stay in the `store`, from which later updates learn again. It has no credit there: credits bound
the work in flight, and `store` its own size. It ends when it leaves the store.

With policy.refill, `refill` drops rolled-out groups without any advantage, and other prompts take their places. Only
the rewards and the order of submission decide, so long answers are at no disadvantage. Updates keep the mixture of
sources (`mixture`).
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType

from slipstream.errors import ConfigError
from slipstream.metrics import NO_ADVANTAGE
from slipstream.pipeline.mixture import all_in_time, chosen_by_turn, give_up_turn
from slipstream.pipeline.schedules import Schedule
from slipstream.pipeline.store import Store, Stored

Ordered = dict[int, None]
"""A set of group numbers, in the order of arrival."""


@dataclass(slots=True)
class Ticket:
    """The state of a group between submission and training."""

    batch: int
    """Number of the first group that was submitted together with this one."""
    version: int
    """Weights version of the group's oldest token; before the rollout ends, a lower bound of that version."""
    source: str
    """Source of the group, for the mixture; empty if the schedule ignores sources."""


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """The saved state of admission, from which a run continues."""

    version: int = 0
    submitted: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    restarted: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    """Batch of each group that had not ended, by group number."""
    versions: dict[int, int] = field(default_factory=dict)
    """`Ticket.version` of each group that had not ended, by group number."""
    waiting: list[int] = field(default_factory=list)
    """Groups that are rolled out and not scored, in the order of scoring."""
    ready: list[int] = field(default_factory=list)
    """Groups that are scored, in the order of arrival."""
    sources: dict[int, str] = field(default_factory=dict)
    """Source of each group that had not ended, by group number."""
    turns: list[str] = field(default_factory=list)
    """Sources in the order of their turns, one for each group that had not ended."""
    zero_advantage: list[int] = field(default_factory=list)
    """Groups without any advantage about which `refill` has not decided."""
    refilled: int = 0
    """Number of groups that `refill` has dropped beyond what the updates since then allow."""
    supervised: int | None = None
    """Number of supervised updates, if the stage ended early; None: as configured."""
    first: int | None = None
    """Number of the first group after a supervised stage that ended early; None: as configured."""
    stored: dict[int, Stored] = field(default_factory=dict)
    """Groups that later updates may learn from again, by number."""


NEW = AdmissionState()


@dataclass
class Refill:
    """Groups without any advantage, and the limits of how many of them are dropped."""

    most: int
    """Largest number of groups that may be dropped for an update."""
    undecided: Ordered
    """Groups without any advantage, in waiting, about which `refill` has not decided."""
    dropped: int
    """Number of groups dropped so far, less `most` for every update since, but not below 0."""


class Admission:
    def __init__(
        self,
        schedule: Schedule,
        *,
        updates: int,
        supervised: int = 0,
        source: Callable[[int], str] = lambda _: "",
        most_refilled: int = 0,
        seed: int = 0,
        state: AdmissionState = NEW,
    ) -> None:
        """Create the state of a new run, or continue from `state`.

        `source` returns the source of a group number. It is called once for each number, when the group is submitted.
        `most_refilled` is the largest number of groups that `refill` may drop for an update. `seed` decides which
        stored groups are drawn.

        No group of a later update starts before update `supervised` is published, so that the two kinds of groups are
        never in flight together, and the first rollouts have the weights that supervision has made.
        """
        self.schedule, self.updates = schedule, updates
        self.credits, self.publish_every = schedule.credits, schedule.publish_every
        """Current limits: groups in flight (at most the schedule's credits), and updates between two publishes."""
        self.source = source
        self.refilling = Refill(most_refilled, dict.fromkeys(state.zero_advantage), state.refilled)
        self.planned, self.supervised = supervised, supervised if state.supervised is None else state.supervised
        """Number of supervised updates as configured, and as known now."""
        self.first = supervised * schedule.groups if state.first is None else state.first
        """Number of the first group after the supervised updates."""
        self.version = self.published_version = state.version
        """Number of updates made, and the last update whose weights are in every sampler."""
        self.submitted, self.restarted, self.dropped = state.submitted, state.restarted, Counter[str](state.dropped)
        self.live = {
            number: Ticket(batch, state.versions.get(number, self.version), state.sources.get(number, ""))
            for number, batch in state.in_flight.items()
        }
        """Groups between submission and training, in the order of submission."""
        self.turns = list(state.turns) or [ticket.source for ticket in self.live.values()]
        """Sources in the order of their turns, one for each live group."""
        assert Counter(self.turns) == Counter(ticket.source for ticket in self.live.values())
        self.batches = Counter(sorted(state.in_flight.values()))
        """Number of live groups in each batch, by the number of the batch's first group, oldest batch first."""
        self.waiting: Ordered = dict.fromkeys(state.waiting)
        self.ready: Ordered = dict.fromkeys(state.ready)
        self.rolling: Ordered = dict.fromkeys(n for n in self.live if n not in self.waiting and n not in self.ready)
        self.scoring: Ordered = {}
        self.learning: Ordered = {}
        self.trained: Ordered = {}
        self.store = Store(schedule.reuse, {n: replace(s, uses=list(s.uses)) for n, s in state.stored.items()}, seed)
        self.published = self.submitted - self.dropped.total() - len(self.live)
        self.gated = False
        """True while a publish is due or running: no group may start until all samplers have the new weights."""
        check_resumed(self)

    # --- queries ---------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> int:
        return len(self.live) + len(self.trained)

    @property
    def coming(self) -> bool:
        return bool(self.rolling or self.waiting or self.scoring)

    @property
    def supervising(self) -> bool:
        """Return whether the groups that start now, and all live ones, are for supervised updates."""
        return self.published_version < self.supervised

    @property
    def remaining(self) -> int:
        """Number of groups that must still be submitted. Dropped groups are replaced only with submit = "stream"."""
        return self._remaining_until(self.updates)

    def _remaining_until(self, update: int) -> int:
        if self.schedule.submit == "batch":
            return (update - self.version - len(self.batches)) * self.schedule.groups
        return update * self.schedule.groups - (self.submitted - self.dropped.total())

    @property
    def finished(self) -> bool:
        return self.remaining == 0 and self.in_use == 0

    def quota(self) -> int:
        """Return the number of groups that may be submitted now; not positive if none may."""
        if self.gated:
            return 0
        remaining = self._remaining_until(self.supervised if self.supervising else self.updates)
        if self.schedule.submit == "stream":
            # `set_limits` may set fewer credits than unpublished updates hold; the next update must still fill
            allowed = max(self.credits, len(self.trained) + self.schedule.groups)
            return min(allowed - self.in_use, remaining)
        # count batches, not groups: a batch with dropped groups is still an update, by which later batches age
        room = len(self.batches) < self.schedule.credits // self.schedule.groups
        return min(self.schedule.groups, remaining) if room else 0

    def scorable(self) -> bool:
        """Return whether waiting groups may be scored now; with serial stages only after all groups are rolled out."""
        return bool(self.waiting) and (self.schedule.stages == "overlap" or not self.rolling)

    @property
    def size(self) -> int:
        """Number of groups of the next update; smaller if groups of a batch that was submitted whole were dropped."""
        oldest = next(iter(self.batches.values()), 0) if self.schedule.submit == "batch" else 0
        return oldest or self.schedule.groups

    @property
    def enough(self) -> bool:
        """Return whether the learner has enough ready groups, regardless of order and age."""
        return len(self.ready) >= (1 if self.schedule.learn == "ready" else self.size)

    def learnable(self) -> list[int]:
        """Return the groups that the learner may take now, in learning order; empty while the learner must wait.

        The first groups of an update come with stored ones, evenly spread among them.
        """
        new, stored = self._learnable(), list(self.store.chosen(self.version)) if not self.learning else []
        if not new or not stored:
            return new
        places = {number: (i + 0.5) / len(part) for part in (new, stored) for i, number in enumerate(part)}
        return sorted(places, key=lambda number: places[number])

    def _learnable(self) -> list[int]:
        schedule = self.schedule
        if not self.enough or (schedule.stages == "turns" and (self.gated or self.coming)):
            return []
        if schedule.submit == "batch" or schedule.order == "submission":
            batch = next(iter(self.batches)) if schedule.submit == "batch" else None
            members = (number for number, ticket in self.live.items() if batch in (None, ticket.batch))
            oldest = list(islice(members, self.size - len(self.learning)))
            return oldest if all(number in self.ready for number in oldest) else []
        return self._chosen(self.ready) if schedule.max_lag is None else self._oldest_within(schedule.max_lag)

    @property
    def full(self) -> bool:
        return len(self.learning) == self.size

    @property
    def publishes_next(self) -> bool:
        """Return whether the next update is published; two publishes are at most `publish_every` updates apart.

        The last supervised update is published, too.
        """
        after = self.version + 1
        due = after % self.publish_every == 0 or after == self.supervised
        return due or after - self.published_version >= self.publish_every

    def outdated(self) -> list[int]:
        """Return the rolled-out groups that are older than max_lag and must be restarted or dropped now."""
        if self.schedule.max_lag is None or self.schedule.on_old == "wait" or self.gated:
            return []
        oldest = self.version - self.schedule.max_lag
        rolled = (*self.waiting, *self.scoring, *self.ready)  # groups that are rolling may not have a token yet
        return [number for number in rolled if self.live[number].version < oldest]

    @property
    def state(self) -> AdmissionState:
        """State to save; a resumed run repeats the scoring and the learning that are not finished."""
        return saved_state(self)

    # --- transitions -----------------------------------------------------------------------------------------

    def submit(self) -> list[int]:
        """Submit all groups that may start now, with one credit each, and return their numbers."""
        first = self.submitted
        while (count := self.quota()) > 0:
            self._enter(self.submitted, count)
        return list(range(first, self.submitted))

    def set_limits(self, credits: int, publish_every: int) -> None:
        """Change the limits. Groups in flight continue; no group starts while more are in flight than allowed."""
        assert self.schedule.groups * publish_every <= credits <= self.schedule.credits
        assert self.schedule.submit == "stream"
        self.credits, self.publish_every = credits, publish_every

    def finish_rollout(self, number: int, version: int, *, zero_advantage: bool = False) -> None:
        """Record that a group is rolled out, the version of its oldest token, and whether its advantage is zero."""
        _move(number, self.rolling, self.waiting)
        assert version >= self.live[number].version, f"group {number} holds tokens from before its submission"
        self.live[number].version = version
        if zero_advantage and self.refilling.most:
            self.refilling.undecided[number] = None

    def refill(self) -> tuple[list[int], list[int]]:
        """Drop groups without any advantage while the limit allows it; return them, and the groups that replace them.

        In n updates, at most `most` groups are dropped for each, and for each update that may be in flight.
        With submit = "stream" the next `submit` replaces them. Groups beyond the limit are learned from. In a batch
        that is submitted whole, a group is decided about after all earlier groups of the batch are rolled out. So the
        members of the batch do not depend on which answers end first.
        """
        dropped, first, incomplete = list[int](), self.submitted, set[int]()
        whole, refilling = self.schedule.submit == "batch", self.refilling
        for number, ticket in list(self.live.items()) if refilling.undecided and not (whole and self.gated) else ():
            if number in self.rolling:
                incomplete.add(ticket.batch)
            if number not in refilling.undecided or (whole and ticket.batch in incomplete):
                continue
            del refilling.undecided[number]
            if refilling.dropped < refilling.most * self.schedule.credits // self.schedule.groups:
                refilling.dropped += 1
                if whole:
                    self._enter(ticket.batch, 1)
                self.drop(number, NO_ADVANTAGE)
                dropped.append(number)
        return dropped, list(range(first, self.submitted))

    def start_scoring(self) -> list[int]:
        numbers = (
            [number for number in self.waiting if number not in self.refilling.undecided] if self.scorable() else []
        )
        for number in numbers:
            _move(number, self.waiting, self.scoring)
        return numbers

    def finish_scoring(self, number: int) -> None:
        _move(number, self.scoring, self.ready)

    def rescore(self, number: int) -> bool:
        """Move a group from scoring or ready back to waiting; return False if the group is in neither state."""
        place = self.scoring if number in self.scoring else self.ready
        if number not in place:
            return False
        _move(number, place, self.waiting)
        return True

    def learn(self) -> list[int]:
        """Move the learnable groups to learning, and return their numbers; raise if a group is older than promised."""
        numbers, bound = self.learnable(), self.schedule.bound
        if not self.learning:
            self.store.learn(self.store.chosen(self.version), self.version)
        for number in self._new(numbers):
            _move(number, self.ready, self.learning)
            lag = self.version - self.live[number].version
            if bound is not None and lag > bound:
                raise RuntimeError(f"group {number} is {lag} updates old, the schedule promises at most {bound}")
        return numbers

    def _new(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if number not in self.store.groups]

    def train(self, measured: Mapping[int, tuple[float, int]] = MappingProxyType({})) -> None:
        """Record that the groups in learning made an update; their credits return when the update is published.

        `measured` has priority and bytes of the groups in learning, for the store.
        """
        assert self.full
        first = dict[int, Stored]()
        for number in list(self.learning):
            _move(number, self.learning, self.trained)
            ticket = self._leave(number)
            self.turns.remove(ticket.source)
            first[number] = Stored(ticket.version, [self.version + 1], *measured.get(number, ()))
        self.store.train(first, self.version + 1, last=self.version + 1 == self.updates)
        published = self.publishes_next
        self.version += 1
        self.refilling.dropped = max(self.refilling.dropped - self.refilling.most, 0)
        nothing_left = self.remaining == 0 and not self.live
        self.gated = nothing_left or published

    def end_supervision(self) -> list[int]:
        """Make the last update the last supervised one; return the groups in flight, which the caller must drop."""
        assert self.supervising and not self.learning
        self.supervised, self.first = self.version, self.submitted
        self.gated = True  # no group may start before the weights of this update are in every sampler
        return list(self.live)

    def publish(self) -> None:
        """Record that the weights of all updates so far are in every sampler."""
        self.published += len(self.trained)
        self.trained.clear()
        self.published_version = self.version
        self.gated = False

    def restart(self, number: int) -> None:
        """Move a group from any state back to rolling, under the published weights and with the same credit."""
        del self._place(number)[number]
        self.refilling.undecided.pop(number, None)
        self.rolling[number] = None
        self.live[number].version = self.published_version
        self.restarted += 1

    def refresh(self, begun: Container[int]) -> list[int]:
        """Restart the groups begun under older weights than the next published ones; return their numbers.

        `begun` contains the groups that have tokens. Groups in learning do not restart. No rollout may be running.
        """
        assert self.gated, "there are no newer weights to begin under"
        older = [number for number, ticket in self.live.items() if ticket.version < self.version]
        stale = [number for number in older if number in begun and number not in self.learning]
        for number in stale:
            self.restart(number)
            self.live[number].version = self.version
        return stale

    def drop(self, number: int, reason: str) -> None:
        """End a group without training on it; its credit returns at once."""
        del self._place(number)[number]
        self.refilling.undecided.pop(number, None)
        give_up_turn(self.turns, self._leave(number).source)
        self.dropped[reason] += 1

    def _enter(self, batch: int, count: int) -> None:
        """Submit the next groups as members of a batch."""
        for number in range(self.submitted, self.submitted + count):
            source = self.source(number)
            self.live[number] = Ticket(
                batch, self.published_version, source if self.schedule.order == "mixture" else ""
            )
            self.turns.append(self.live[number].source)
            self.rolling[number] = None
        self.batches[batch] += count
        self.submitted += count

    def _place(self, number: int) -> Ordered:
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

    def _chosen(self, candidates: Iterable[int]) -> list[int]:
        """Return the groups whose turn it is; if the schedule learns from whole batches, all of an update or none."""
        sources, learning = {number: ticket.source for number, ticket in self.live.items()}, list(self.learning)
        chosen = chosen_by_turn(self.turns, candidates, sources, learning, self.size)
        complete = len(chosen) == self.size - len(learning)
        return chosen if complete or self.schedule.learn == "ready" else []

    def _oldest_within(self, max_lag: int) -> list[int]:
        """Return the oldest ready groups for an update; empty if another group would then exceed max_lag.

        After this update, all other live groups get the later turns of their sources: oldest first, B turns per update.
        With on_old = "wait", each of these groups must get its turn before the group is older than max_lag.
        """
        by_age = sorted(self.live, key=lambda number: (self.live[number].version, number))
        limit = {number: ticket.version + max_lag for number, ticket in self.live.items()}  # last version for each
        chosen = self._chosen([number for number in by_age if number in self.ready and limit[number] >= self.version])
        if self.schedule.on_old == "wait" and chosen:
            others = [(self.live[number].source, limit[number]) for number in by_age if number not in chosen]
            if not all_in_time(self.turns[self.schedule.groups :], others, self.version + 1, self.schedule.groups):
                return []
        return chosen


def check_resumed(admission: Admission) -> None:
    """Raise ConfigError if the groups that were in flight do not fit the schedule or the number of updates."""
    live, schedule, updates = len(admission.live), admission.schedule, admission.updates
    if live > schedule.credits:
        raise ConfigError(
            f"{live} groups were in flight and this schedule has {schedule.credits} credits: write the schedule that "
            "the run began with"
        )
    if admission.remaining < 0:
        least = updates - admission.remaining // schedule.groups
        raise ConfigError(f"updates = {updates}: groups of later updates are in flight, write at least {least}")


def saved_state(admission: Admission) -> AdmissionState:
    return AdmissionState(
        version=admission.version,
        submitted=admission.submitted,
        dropped=dict(admission.dropped),
        restarted=admission.restarted,
        in_flight={number: ticket.batch for number, ticket in admission.live.items()},
        versions={number: ticket.version for number, ticket in admission.live.items()},
        waiting=[*admission.scoring, *admission.waiting],
        ready=[*admission.learning, *admission.ready],
        sources={number: ticket.source for number, ticket in admission.live.items()},
        turns=list(admission.turns),
        zero_advantage=list(admission.refilling.undecided),
        refilled=admission.refilling.dropped,
        supervised=None if admission.supervised == admission.planned else admission.supervised,
        first=None if admission.supervised == admission.planned else admission.first,
        stored={number: replace(stored, uses=list(stored.uses)) for number, stored in admission.store.groups.items()},
    )


def _move(number: int, before: Ordered, after: Ordered) -> None:
    assert number in before, f"group {number} is not where it should be"
    del before[number]
    after[number] = None
