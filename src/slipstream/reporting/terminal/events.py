"""Notable events of a run, found in its metrics and its ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

Line = Mapping[str, Any]


class Event(NamedTuple):
    update: int
    """Update after which the event was known."""
    text: str


def of_updates(before: Line, line: Line) -> Iterator[Event]:
    """Yield the changes from one update to the next: guards, workers, and work in flight."""
    for text in (*_guards(before, line), *_workers(before, line), *_flight(before, line)):
        yield Event(line["update"], text)


def _guards(before: Line, line: Line) -> Iterator[str]:
    for name, value in line.items():
        kind, _, guard = name.partition("/")
        if kind != "guard" or value == before.get(name, 0.0 if guard == "kl" else 1.0):
            continue
        if guard == "kl":
            yield f"guards.kl: tau is lowered by {value:g}" if value else "guards.kl: off, tau is restored"
        else:
            yield f"guards.{guard}: " + ("off" if value == 1 else f"learning rate × {value:.3g}")


def _workers(before: Line, line: Line) -> Iterator[str]:
    for name, value in line.items():
        if name.startswith("restarts/") and value > before.get(name, 0):
            yield f"{name.removeprefix('restarts/')} died and was restarted ({value:.0f} × so far)"
    now, then = ({name.removeprefix("idle/") for name in each if name.startswith("idle/")} for each in (line, before))
    if then:
        yield from (f"{name} joined" for name in sorted(now - then))
        yield from (f"{name} left" for name in sorted(then - now))


def _flight(before: Line, line: Line) -> Iterator[str]:
    for name in ("tau", "publish_every"):
        if name in before and line.get(name, before[name]) != before[name]:
            yield f"{name} from {before[name]:g} to {line[name]:g}"
    if line.get("freshness/refreshes", 0) > before.get("freshness/refreshes", 0):
        yield "refresh: all stale groups in flight were restarted"
    if line.get("restarted", 0) > before.get("restarted", 0):
        yield f"{line['restarted'] - before.get('restarted', 0):.0f} groups became too old and were restarted"


def of_ledger(lines: Iterable[Line]) -> Iterator[Event]:
    """Yield dropped groups and left-out responses with their causes; equal events in a row are counted as one."""
    for event, equal in groupby(Event(line.get("version", 0), text) for line in lines for text in _left_out(line)):
        count = len(list(equal))
        yield event._replace(text=f"{count} × {event.text}") if count > 1 else event


def _left_out(line: Line) -> Iterator[str]:
    if line["end"] == "dropped":
        yield f"group dropped, {line['reason']}" + (f": {line['cause']}" if "cause" in line else "")
    else:
        yield from (f"response left out: {cause}" for cause in line.get("causes", ()))
