"""Observer of an active or ended run: it reads new lines of the run directory, and writes nothing."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.errors import RunDirError
from slipstream.reporting.terminal.events import Event, of_ledger, of_updates
from slipstream.reporting.terminal.metric_formats import listed
from slipstream.reporting.terminal.panel import View
from slipstream.reporting.terminal.progress import Quote, RunProgress, SampleSelector
from slipstream.reporting.terminal.state import Signs, State, state_of
from slipstream.reporting.terminal.tail import Tail
from slipstream.run_dir.atomic_files import LOCK, held, writer
from slipstream.run_dir.formats import SUSPECT, resumable
from slipstream.run_dir.reading import Line, RunDir
from slipstream.run_dir.writing import LEDGER, METRICS, SAMPLES, SOCKET

BACK = 1 << 20
"""Number of bytes at the end of large files that `look` reads at its first call."""
KEPT = 50
"""Largest number of samples, and of events, in memory."""
GROUPS = {"rolling": "rolling out", "waiting": "waiting to be scored", "scoring": "scoring", "ready": "scored"}


class Watched:
    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        """`now` is the time of file dates, `clock` is monotonic."""
        self.run, self.clock, self.now = RunDir(path), clock, now
        number = self.run.format
        self.metrics = Tail(path / METRICS, number=number)
        self.ledger, self.samples = (Tail(path / name, back=BACK, number=number) for name in (LEDGER, SAMPLES))
        self.turning = SampleSelector(clock)
        self.quotes = deque[Quote](maxlen=KEPT)
        self.losses: Sequence[Event] = ()
        self.written: tuple[float, float] | None = None
        """Time of the last write, by file date and by `clock`; None before the first look."""
        self.stamp: object = None
        """Identity of the config file that was read last: inode, date and size."""
        self.updates, self.every, self.proof = 0, 0, 0
        self._begin()
        self.look()

    def _begin(self) -> None:
        self.course = RunProgress()
        self.update: Line = {}
        self.evaluated: int | None = None
        self.changes: Sequence[Event] = ()
        """Events from metrics; `losses` holds the events from the ledger."""

    # --- reading ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        self._configure()
        self._metrics()
        anew, entries = self.ledger.look()
        self.losses = [*(() if anew else self.losses), *of_ledger(entries)][-KEPT:]
        anew, quotes = self.samples.look()
        if anew:
            self.quotes.clear()
        self.quotes += quotes
        if anew or quotes:
            newest = self.quotes[-1]["update"] if self.quotes else 0
            self.turning.gather(self.quotes, newest=[quote for quote in self.quotes if quote["update"] == newest])

    def _configure(self) -> None:
        """Read the config if the file changed, as it may after `resume`."""
        path = self.run.path / "config.toml"
        try:
            status = path.stat()
        except OSError as error:
            raise RunDirError(f"{path} cannot be read any more: {error.strerror}") from None
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp != self.stamp:
            config, self.stamp = self.run.config, stamp
            self.updates, self.proof = config.updates, config.health.proof
            self.every = config.eval.shortest if config.data.eval is not None and config.task.names else 0

    def _metrics(self) -> None:
        dated = max(modified(self.metrics.path) or 0.0, modified(self.run.path / LOCK) or 0.0)
        if self.written is None or dated != self.written[0]:
            ago = max(0.0, self.now() - dated) if self.written is None else 0.0
            self.written = dated, self.clock() - ago
        before = self.number
        anew, lines = self.metrics.look()
        if anew:
            self._begin()
        for line in lines:
            numbers = self.course.recall(line)
            if line["kind"] == "eval":
                self.evaluated = line["update"]
                continue
            self.changes = [*self.changes, *(of_updates(self.update, line) if self.update else ())][-KEPT:]
            self.course.made(numbers)
            self.update = line
        if self.number < before:
            self.changes = [*self.changes, Event(self.number, f"the run went back to here, from update {before}")]

    # --- current state ------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        return int(self.update.get("update", 0))

    @property
    def events(self) -> list[Event]:
        return sorted([*self.changes, *self.losses], key=lambda event: event.update)

    @property
    def silent(self) -> float:
        return self.clock() - self.written[1] if self.written else 0.0

    def state(self) -> State:
        path = self.run.path
        began, written = modified(path / LOCK), modified(self.metrics.path)
        who = writer(path)
        numbers, usual = self.course.numbers, self.course.sum("seconds/update") / max(len(self.course.lately), 1)
        return state_of(
            Signs(
                path=path,
                update=self.number,
                updates=self.updates,
                every=self.every,
                evaluated=self.evaluated,
                held=held(path),
                here=who.endswith(f" on {socket.gethostname()}"),
                writer=who,
                loading=began is not None and (written is None or began > written),
                connected=(path / SOCKET).exists(),
                checkpoint=max(resumable(path / "checkpoints", self.proof), default=None),
                suspect=any((path / "checkpoints").glob(f"*{SUSPECT}")),
                finished=self.run.finished,
                silent=self.silent,
                usual=usual,
                groups=listed((what, numbers.get(f"groups/{name}", 0.0)) for name, what in GROUPS.items()),
            )
        )

    def view(self, keys: str = "") -> View:
        state, quote = self.state(), self.turning.now()
        since = self.silent if state.alive and state.name != "loading" else 0.0
        others = [other for other in reversed(self.turning.quotes) if other is not quote]
        held = ", held" if self.turning.held else ""
        return View(
            title=self.run.path.resolve().name,
            update=self.number,
            updates=self.updates,
            elapsed=self.update.get("time", 0.0) + since,
            left=self.course.left(self.updates - self.number, since) if state.alive else None,
            state=state.name,
            style=state.style,
            doing=state.doing,
            course=self.course,
            quotes=[quote, *others] if quote else [],
            place=f"{self.turning.place() + 1} of {len(self.turning.quotes)}{held}",
            news=[f"update {event.update}: {event.text}" for event in self.events],
            keys=keys,
        )


def modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
