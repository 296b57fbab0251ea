"""The times at which every worker is busy, for the overlap and idle metrics, trace.json and the stall report.

trace.json is in Chrome's format (a list of events that need not be closed) and opens in ui.perfetto.dev. It has one
track per worker and one slice per busy interval. An arrow leads from each group's rollout to the update that learned
from it. Every episode in an environment has its own row with its turns and steps.

Guarantor of invariant 8: the pipeline reads time only from the event loop's clock, which `Trace` gets as `clock`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol
from zlib import crc32

from slipstream.metrics import Interval, Workers
from slipstream.records import Header

Kind = Literal["stage", "other", "pause"]
"""Kind of a call to a worker: work of its stage, other work, or a pause of its work."""


class Written(Protocol):
    def write(self, text: str, /) -> object: ...


class BusyWindow(NamedTuple):
    """The busy intervals of all workers, by stage, in a period of `seconds`."""

    seconds: float
    busy: dict[str, Workers]
    """Intervals in which a worker did any work."""
    stages: dict[str, Workers]
    """Intervals in which a worker did the work of its stage: rollout, scoring or learning."""


class Spans:
    """The time intervals in which a state was on, including a current interval that has not ended."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._over: list[Interval] = []

    def turn(self, on: bool, now: float) -> None:
        if on and self.since is None:
            self.since = now
        elif not on and self.since is not None:
            self._over.append((self.since, now))
            self.since = None

    def take(self, start: float, end: float) -> list[Interval]:
        """Return the intervals cut to the given period, and forget the intervals that have ended."""
        found = [*self._over, *([] if self.since is None else [(self.since, end)])]
        self._over = []
        return [(max(a, start), min(b, end)) for a, b in found if b > start]


class Track:
    """The timeline of one worker, which is busy while it has at least one call."""

    def __init__(self, trace: Trace, tid: int, stage: str, name: str, there: bool) -> None:
        self.trace, self.tid, self.stage, self.name, self.there = trace, tid, stage, name, there
        self.calls: dict[str | int, float] = {}
        """Start time of each call that the worker has now."""
        self.kinds: dict[str | int, Kind] = {}
        self.tokens = 0
        self.since = 0.0
        """Start time of the current slice, if the worker is busy."""
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
            self.trace.slice(self, self.label, self.since, now)

    @contextmanager
    def busy(self, call: str, kind: Kind = "stage") -> Iterator[None]:
        """Record the worker as busy during this context; `call` is also the name of the slice in the trace."""
        self.label = call
        self.begin(call, kind)
        try:
            yield
        finally:
            self.end(call)

    def relabel(self, label: str) -> None:
        if self.calls:
            now = self.trace.now()
            self.trace.slice(self, self.label, self.since, now)
            self.since = now
        self.label = label

    def report(self) -> str:
        if not self.calls:
            return f"{self.name} is idle"
        now, oldest = self.trace.now(), sorted(self.calls.items(), key=lambda call: call[1])[:3]
        names = [f"group {call}" if isinstance(call, int) else call for call, _ in oldest]
        calls = ", ".join(f"{name} for {now - since:.1f} s" for name, (_, since) in zip(names, oldest, strict=True))
        more = f" and {len(self.calls) - len(oldest)} more" if len(self.calls) > len(oldest) else ""
        return f"{self.name} works on {calls}{more}"

    def _turn(self, kind: Kind, change: int, now: float) -> None:
        self._count[kind] += change
        at_stage = self._count["stage"] > 0 and not self._count["pause"]
        self.busy_at.turn(bool(self.calls), now)
        self.stage_at.turn(at_stage, now)
        if at_stage and self.trace.at is None:
            self.trace.at = now


class Trace:
    def __init__(self, file: Written | None, clock: Callable[[], float], *, before: float = 0.0) -> None:
        """Start a trace in `file` (None: no file); `before` is the seconds that the run took before a resume."""
        self.file, self.clock, self.began = file, clock, clock() - before
        self.tracks: list[Track] = []
        self.at: float | None = None
        """Start of the next period of `busy_window`: end of the last one, or start of the first work; None before."""

    def now(self) -> float:
        """Return the seconds since the run began."""
        return self.clock() - self.began

    def busy_window(self) -> BusyWindow:
        """Return the busy intervals since the last call, or since the first stage began to work."""
        assert self.at is not None, "no work has begun"
        start, now = self.at, self.now()
        self.at = now
        busy, stages = dict[str, Workers](), dict[str, Workers]()
        for track in self.tracks:
            if track.there:
                busy.setdefault(track.stage, {})[track.name] = track.busy_at.take(start, now)
                stages.setdefault(track.stage, {})[track.name] = track.stage_at.take(start, now)
        return BusyWindow(now - start, busy, stages)

    def track(self, stage: str, name: str, *, there: bool = True) -> Track:
        """Add a track for a worker; its idle time counts while `there` is true."""
        tid = crc32(name.encode())  # not a count: after a resume with more workers, it would be another worker's
        track = Track(self, tid, stage, name, there)
        self.tracks.append(track)
        for kind, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": len(self.tracks)})):
            self._write({"ph": "M", "pid": 1, "tid": track.tid, "name": kind, "args": value})
        return track

    def slice(self, track: Track, name: str, start: float, end: float) -> None:
        at, duration = round(start * 1e6), max(1, round((end - start) * 1e6))
        self._write({"ph": "X", "pid": 1, "tid": track.tid, "ts": at, "dur": duration, "name": name})

    def leaves(self, track: Track, number: int) -> None:
        """Write the start of a group's arrow, at its rollout; the worker must still be busy with the group."""
        self._arrow("s", track, number)

    def arrives(self, track: Track, number: int) -> None:
        """Write the end of a group's arrow, where an update begins to learn from the group."""
        self._arrow("f", track, number)

    def _arrow(self, phase: str, track: Track, number: int) -> None:
        event = {"ph": phase, "pid": 1, "tid": track.tid, "ts": round(self.now() * 1e6), "id": number}
        self._write(event | {"name": "group", "cat": "group", "bp": "e"})

    def episodes(self, headers: Iterable[Header]) -> None:
        """Write the turns and steps of a group that has just been rolled out; each episode is a row in the viewer."""
        now = self.now()
        for header in headers:
            name = f"{header.number}/{header.index}"
            spans = [(what, now - before, now - before + seconds) for what, before, seconds in header.spans]
            if spans:
                self._write_nested(name, f"episode {name}", spans[0][1], spans[-1][2])
            for span in spans:
                self._write_nested(name, *span)

    def _write_nested(self, episode: str, name: str, start: float, end: float) -> None:
        for phase, at in (("b", start), ("e", end)):
            event = {"ph": phase, "cat": "episode", "id": episode, "pid": 1, "ts": round(at * 1e6), "name": name}
            self._write(event)

    def _write(self, event: dict[str, object]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(event) + ",\n")

    def write_current(self) -> None:
        """Write the current slices so far: a resume from here does not know when they began."""
        for track in self.tracks:
            track.relabel(track.label)

    def report(self) -> list[str]:
        return [track.report() for track in self.tracks if track.there]
