"""State of a run and its notable events, derived from signs in its directory, its metrics and its ledger."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.reporting.terminal.progress import hours

Line = Mapping[str, Any]
SILENT, SILENT_UPDATES = 60.0, 10
"""Longest normal time without a write: in seconds, and as a multiple of the usual duration of an update."""


@dataclass(frozen=True)
class Signs:
    path: Path
    update: int
    """Last update in metrics.jsonl; 0 for none."""
    updates: int
    every: int
    """Updates between two evaluations; the last update is always evaluated, too. 0 for no evaluations."""
    evaluated: int | None
    """Last update that was evaluated; None for no evaluation so far."""
    held: bool | None
    """True if a process holds the directory's lock; None if the file system does not support the check."""
    here: bool
    """True if the last writer ran on this machine, where `held` is reliable."""
    writer: str
    """Name of the last writer: process and machine."""
    loading: bool
    """True until the run has written metrics since its start."""
    connected: bool
    """True if the socket for `scale` commands exists; a run removes it when it ends."""
    checkpoint: int | None
    """Update of the checkpoint that `resume` uses; None for no checkpoint."""
    finished: bool
    """True if the final student was written."""
    silent: float
    """Seconds since the last write."""
    usual: float
    """Recent mean duration of an update in seconds; 0 before the first update."""
    groups: str
    """Number of groups in each stage after the last update, as text."""
    suspect: bool = False
    """True if the run stopped for a reason that may have damaged its weights."""


@dataclass(frozen=True)
class State:
    name: str
    doing: str
    style: str = "bold green"
    alive: bool = True


def state_of(signs: Signs) -> State:
    patience = max(SILENT, SILENT_UPDATES * signs.usual)
    certain = signs.held is False and signs.here
    left = signs.finished or (_ended_orderly(signs) and not signs.loading)
    if not signs.held and (certain or left or signs.silent >= patience):
        return _over(signs)
    if signs.loading:
        what = f"continues after update {signs.update}" if signs.update else "starts"
        return State("loading", f"the run {what}", "bold cyan")
    if signs.finished:
        return _over(signs)
    late = f"; nothing was written for {hours(signs.silent)}" if signs.silent >= patience else ""
    style = "bold yellow" if late else "bold green"
    due = signs.every and (signs.update % signs.every == 0 or signs.update == signs.updates)
    if due and signs.evaluated != signs.update:
        when = f"after update {signs.update}" if signs.update else "before the first update"
        return State("evaluating", f"held-out prompts {when}{late}", style)
    if not signs.update:
        return State("waiting", f"for the first update{late}", "bold yellow" if late else "bold cyan")
    if signs.update >= signs.updates:
        return State("ending", f"the last update is done, the student is being saved{late}", style)
    return State("training", f"{signs.groups or 'no groups in flight'}{late}", style)


def _ended_orderly(signs: Signs) -> bool:
    """Return True if the run stopped in an orderly way: it saved its state and removed its socket."""
    return not signs.connected and (signs.suspect or signs.checkpoint == signs.update)


def _over(signs: Signs) -> State:
    if signs.finished:
        return State("finished", f"the student is in {signs.path / 'final'}", alive=False)
    if signs.checkpoint is None:
        how = "there is no checkpoint to resume from"
    else:
        how = f"slipstream resume {shlex.quote(str(signs.path))} continues after update {signs.checkpoint}"
    if _ended_orderly(signs) or (not signs.connected and signs.checkpoint is None):
        when = f"after update {signs.update}" if signs.update else "before its first update"
        return State("stopped", f"{when}; {how}", "bold yellow", alive=False)
    who = f"process {signs.writer}" if signs.writer else "its process"
    gone = f"{who} is gone" if signs.here else f"{who} has written nothing for {hours(signs.silent)}"
    return State("probably dead", f"{gone}; {how}", "bold red", alive=False)


# --- events -----------------------------------------------------------------------------------------------------------


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
