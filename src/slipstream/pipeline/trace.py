"""What every worker does when: the source of overlap and idle time, of trace.json and of the stall report.

trace.json is in Chrome's format (a list of events that need not be closed) and opens in ui.perfetto.dev: one track per
worker, one slice per busy interval, an arrow from the rollout of every group to the update that learned from it; and a
line for every episode in an environment, with its turns and steps.
Guarantor of invariant 8: whoever in the pipeline wants to know the time asks `Trace.now`, the event loop's clock.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol

from slipstream.metrics import Interval, Workers
from slipstream.records import Header

Kind = Literal["stage", "other", "pause"]
"""What a call is to its worker: the work of its stage, something else beside it, or something that holds it up."""


class Written(Protocol):
    def write(self, text: str, /) -> object: ...


class Lately(NamedTuple):
    """What everybody did in so many seconds: the intervals of every stage's workers."""

    seconds: float
    busy: dict[str, Workers]
    """At anything."""
    stages: dict[str, Workers]
    """At the work of their stage: rolling out, scoring, learning."""


class Spans:
    """When something goes on, and when it went on."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._over: list[Interval] = []

    def turn(self, on: bool, now: float) -> None:
        if on and self.since is None:
            self.since = now
        elif not on and self.since is not None:
            self._over.append((self.since, now))
            self.since = None

    def between(self, start: float, end: float) -> list[Interval]:
        """Intervals between two times; what lies before `end` is forgotten."""
        found = [*self._over, *([] if self.since is None else [(self.since, end)])]
        self._over = []
        return [(max(a, start), min(b, end)) for a, b in found if b > start]


class Track:
    """One worker's time. It is busy while at least one call is with it."""

    def __init__(self, trace: Trace, tid: int, stage: str, name: str, there: bool) -> None:
        self.trace, self.tid, self.stage, self.name, self.there = trace, tid, stage, name, there
        self.calls: dict[str | int, float] = {}
        """What is with the worker now, and since when."""
        self.kinds: dict[str | int, Kind] = {}
        self.tokens = 0
        self.since = 0.0
        """Since when its slice goes on, if it is busy."""
        self.label = stage
        self.busy_at, self.stage_at = Spans(), Spans()
        self._count = Counter[Kind]()

    def begin(self, call: str | int, kind: Kind = "stage") -> None:
        now = self.trace.now()
        if not self.calls:
            self.since = now
        self.calls[call], self.kinds[call] = now, kind
        self._turn(kind, +1, now)

    def end(self, call: str | int) -> None:
        now = self.trace.now()
        del self.calls[call]
        self._turn(self.kinds.pop(call), -1, now)
        if not self.calls:
            self._close(now)

    @contextmanager
    def busy(self, call: str, kind: Kind = "stage") -> Iterator[None]:
        """With one thing at a time, after which its slice is called."""
        self.label = call
        self.begin(call, kind)
        try:
            yield
        finally:
            self.end(call)

    def relabel(self, label: str) -> None:
        """What it does from now on is called otherwise."""
        if self.calls:
            now = self.trace.now()
            self._close(now)
            self.since = now
        self.label = label

    def _turn(self, kind: Kind, change: int, now: float) -> None:
        self._count[kind] += change
        at_stage = self._count["stage"] > 0 and not self._count["pause"]
        self.busy_at.turn(bool(self.calls), now)
        self.stage_at.turn(at_stage, now)
        if at_stage and self.trace.at is None:
            self.trace.at = now

    def _close(self, now: float) -> None:
        self.trace.slice(self, self.label, self.since, now)


class Trace:
    def __init__(self, file: Written | None, clock: Callable[[], float], *, before: float = 0.0) -> None:
        """`before` is how long the run had gone on when it was stopped, if this is its continuation."""
        self.file, self.clock, self.began = file, clock, clock() - before
        self.tracks: list[Track] = []
        self.at: float | None = None
        """Until when `lately` has told; before that, when the work of any stage began."""

    def now(self) -> float:
        """Seconds since the run began."""
        return self.clock() - self.began

    def lately(self) -> Lately:
        """Since this was last asked for, and the first time since the first rollout began."""
        assert self.at is not None, "nothing has begun"
        start, now = self.at, self.now()
        self.at = now
        busy, stages = dict[str, Workers](), dict[str, Workers]()
        for track in self._there():
            busy.setdefault(track.stage, {})[track.name] = track.busy_at.between(start, now)
            stages.setdefault(track.stage, {})[track.name] = track.stage_at.between(start, now)
        return Lately(now - start, busy, stages)

    def track(self, stage: str, name: str, *, there: bool = True) -> Track:
        """Of a worker, whose idle time counts while it is `there`."""
        track = Track(self, len(self.tracks) + 1, stage, name, there)
        self.tracks.append(track)
        for kind, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track.tid})):
            self._write({"ph": "M", "pid": 1, "tid": track.tid, "name": kind, "args": value})
        return track

    def _there(self) -> list[Track]:
        return [track for track in self.tracks if track.there]

    def slice(self, track: Track, name: str, start: float, end: float) -> None:
        at, duration = round(start * 1e6), max(1, round((end - start) * 1e6))
        self._write({"ph": "X", "pid": 1, "tid": track.tid, "ts": at, "dur": duration, "name": name})

    def leaves(self, track: Track, number: int) -> None:
        """A group has been rolled out: the tail of its arrow. Call it while the worker is busy with it."""
        self._arrow("s", track, number, self.now())

    def arrives(self, track: Track, number: int) -> None:
        """An update begins to learn from a group: the head of its arrow."""
        self._arrow("f", track, number, self.now())

    def _arrow(self, phase: str, track: Track, number: int, at: float) -> None:
        if self.file is not None:
            self.file.write(
                f'{{"ph":"{phase}","pid":1,"tid":{track.tid},"ts":{round(at * 1e6)},"id":{number},"name":"group",'
                '"cat":"group","bp":"e"},\n'
            )

    def episodes(self, headers: Iterable[Header]) -> None:
        """Turns and steps of a group that has just been rolled out, each episode on a line of its own."""
        now = self.now()
        for header in headers:
            name = f"{header.number}/{header.index}"
            spans = [(what, now - before, now - before + seconds) for what, before, seconds in header.spans]
            if spans:
                self._nested(name, f"episode {name}", spans[0][1], spans[-1][2])
            for span in spans:
                self._nested(name, *span)

    def _nested(self, episode: str, name: str, start: float, end: float) -> None:
        for phase, at in (("b", start), ("e", end)):
            event = {"ph": phase, "cat": "episode", "id": episode, "pid": 1, "ts": round(at * 1e6), "name": name}
            self._write(event)

    def _write(self, event: dict[str, object]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(event) + ",\n")

    def report(self) -> list[str]:
        """For every worker, what is with it and since when."""
        now, lines = self.now(), []
        for track in self._there():
            oldest = sorted(track.calls.items(), key=lambda call: call[1])[:3]
            if oldest:
                names = ", ".join(f"{_named(call)} for {now - since:.1f} s" for call, since in oldest)
                more = f" and {len(track.calls) - len(oldest)} more" if len(track.calls) > len(oldest) else ""
                lines.append(f"{track.name} works on {names}{more}")
            else:
                lines.append(f"{track.name} is idle")
        return lines


def _named(call: str | int) -> str:
    return f"group {call}" if isinstance(call, int) else call
