"""What a run is doing, as far as its directory tells: a pure function of what lies there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.reporting.terminal.readings import hours

SILENT, TIMES = 60.0, 10
"""Nothing is amiss for so many seconds, nor for so many times what an update takes."""


@dataclass(frozen=True)
class Signs:
    path: Path
    update: int
    """The last one that is in its metrics."""
    updates: int
    every: int
    """Updates between two evaluations, of which there is also one after the last update; 0 evaluates never."""
    evaluated: int | None
    """The last update after which there was one."""
    held: bool | None
    """Whether somebody writes here; None where the file system does not tell."""
    here: bool
    """Whoever wrote last was on this machine, where `held` is the whole truth."""
    writer: str
    """What it called itself."""
    loading: bool
    """It has written nothing yet."""
    connected: bool
    """The socket by which it is told to scale is there, which is removed at the end."""
    checkpoint: int | None
    """The one that `resume` goes on from."""
    finished: bool
    """The student is there."""
    silent: float
    """Seconds for which nothing was written."""
    usual: float
    """Seconds of an update lately; 0 if there are none."""
    groups: str
    """Where they were after the last update."""
    suspect: bool = False
    """Whether what stopped the run may have harmed its weights."""


@dataclass(frozen=True)
class State:
    name: str
    doing: str
    style: str = "bold green"
    alive: bool = True


def state_of(signs: Signs) -> State:
    patience = max(SILENT, TIMES * signs.usual)
    certain = signs.held is False and signs.here
    left = signs.finished or (_said_goodbye(signs) and not signs.loading)
    if not signs.held and (certain or left or signs.silent >= patience):
        return _over(signs)
    if signs.loading:
        what = f"goes on after update {signs.update}" if signs.update else "begins"
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
        return State("ending", f"the last update is made, the student is being written{late}", style)
    return State("training", f"{signs.groups or 'no groups in flight'}{late}", style)


def _said_goodbye(signs: Signs) -> bool:
    """As it does who is told to stop: saves where it is, and removes its socket."""
    return not signs.connected and (signs.suspect or signs.checkpoint == signs.update)


def _over(signs: Signs) -> State:
    if signs.finished:
        return State("finished", f"the student is in {signs.path / 'final'}", alive=False)
    if signs.checkpoint is None:
        how = "there is no checkpoint to go on from"
    else:
        how = f"slipstream resume {signs.path} goes on after update {signs.checkpoint}"
    if _said_goodbye(signs) or (not signs.connected and signs.checkpoint is None):
        when = f"after update {signs.update}" if signs.update else "before its first update"
        return State("stopped", f"{when}; {how}", "bold yellow", alive=False)
    who = f"process {signs.writer}" if signs.writer else "its process"
    gone = f"{who} is gone" if signs.here else f"{who} has written nothing for {hours(signs.silent)}"
    return State("probably dead", f"{gone}; {how}", "bold red", alive=False)
