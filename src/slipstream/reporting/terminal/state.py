"""State of a run, derived from signs in its directory by pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.reporting.terminal.metric_formats import hours

SILENT, TIMES = 60.0, 10
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
    patience = max(SILENT, TIMES * signs.usual)
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
        how = f"slipstream resume {signs.path} continues after update {signs.checkpoint}"
    if _ended_orderly(signs) or (not signs.connected and signs.checkpoint is None):
        when = f"after update {signs.update}" if signs.update else "before its first update"
        return State("stopped", f"{when}; {how}", "bold yellow", alive=False)
    who = f"process {signs.writer}" if signs.writer else "its process"
    gone = f"{who} is gone" if signs.here else f"{who} has written nothing for {hours(signs.silent)}"
    return State("probably dead", f"{gone}; {how}", "bold red", alive=False)
