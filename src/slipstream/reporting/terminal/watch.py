"""Observer of an active or ended run: it reads new lines of the run directory, and writes nothing."""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slipstream.errors import RunDirError
from slipstream.reporting.terminal.panel import View
from slipstream.reporting.terminal.progress import Quote, RunProgress, SampleSelector, counts_text
from slipstream.reporting.terminal.state import Event, Signs, State, of_ledger, of_updates, state_of
from slipstream.run_dir.atomic_files import LOCK, held, opened, reading, writer
from slipstream.run_dir.formats import FORMAT, SUSPECT, parsed, resumable
from slipstream.run_dir.reading import Line, RunDir
from slipstream.run_dir.writing import LEDGER, METRICS, SAMPLES, SOCKET

FIRST_LOOK = 1 << 20
"""Number of bytes at the end of large files that `look` reads at its first call."""
REMEMBERED = 50
"""Largest number of samples, and of events, in memory."""
GROUPS = {"rolling": "rolling out", "waiting": "waiting to be scored", "scoring": "scoring", "ready": "scored"}
PROOF = 256
"""Number of bytes before the read position that are compared to detect a rewritten file."""


class Look(NamedTuple):
    anew: bool
    """True if the file was replaced or cut since the last look, so that earlier lines are no longer valid."""
    lines: list[dict[str, Any]]


class Tail:
    def __init__(self, path: Path, *, back: int | None = None, number: int = FORMAT) -> None:
        """`back` limits the first read to the last bytes of the file (None: all); `number` is the format version."""
        self.path, self.back, self.number = path, back, number
        self.forget()

    def forget(self) -> None:
        self.file = (0, 0)
        self.at, self.proof = 0, b""

    def look(self) -> Look:
        """Return the complete lines since the last look; an incomplete last line is left for the next look."""
        known = self.file != (0, 0)
        try:
            file = os.fdopen(opened(self.path), "rb")
        except FileNotFoundError:
            self.forget()
            return Look(known, [])
        except OSError as error:
            raise RunDirError(f"{self.path} cannot be read: {error.strerror}") from None
        with file:
            anew = known and not self._goes_on(file)
            if anew or not known:
                self._begin(file)
            file.seek(self.at)
            data = file.read().partition(b"\0")[0]  # some network disks show zeros until the data arrives
        data = data[: data.rfind(b"\n") + 1]
        at = self.at
        self.at += len(data)
        self.proof = (self.proof + data)[-PROOF:]

        def before() -> int:
            with reading(self.path) as file:
                return file.read(at).count(b"\n")

        return Look(anew, parsed(self.path, data.split(b"\n")[:-1], before, number=self.number))

    def _goes_on(self, file: BinaryIO) -> bool:
        """Return False if the file was replaced or cut; a resumed run cuts its files back to the checkpoint."""
        if identity(file) != self.file:
            return False
        file.seek(self.at - len(self.proof))
        return file.read(len(self.proof)) == self.proof

    def _begin(self, file: BinaryIO) -> None:
        self.forget()
        self.file = identity(file)
        start = max(0, os.fstat(file.fileno()).st_size - self.back) if self.back is not None else 0
        if start:
            file.seek(start - 1)
            self.at = start - 1 + len(file.readline())  # skip a line whose beginning was not read


def identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


class Watched:
    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        """`now` is the time of file dates, `clock` is monotonic."""
        self.run, self.clock, self.now = RunDir(path), clock, now
        number = self.run.format
        self.metrics = Tail(path / METRICS, number=number)
        self.ledger, self.samples = (Tail(path / name, back=FIRST_LOOK, number=number) for name in (LEDGER, SAMPLES))
        self.turning = SampleSelector(clock)
        self.quotes = deque[Quote](maxlen=REMEMBERED)
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
        self.losses = [*(() if anew else self.losses), *of_ledger(entries)][-REMEMBERED:]
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
            self.every = config.eval.shortest if config.data.eval is not None else 0

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
            self.changes = [*self.changes, *(of_updates(self.update, line) if self.update else ())][-REMEMBERED:]
            self.course.add_update(numbers)
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
        numbers, usual = self.course.numbers, self.course.sum("seconds/update") / max(len(self.course.recent), 1)
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
                groups=counts_text((what, numbers.get(f"groups/{name}", 0.0)) for name, what in GROUPS.items()),
            )
        )

    def view(self, keys: str = "") -> View:
        state, quote = self.state(), self.turning.now()
        since = self.silent if state.alive and state.name != "loading" else 0.0
        others = [other for other in reversed(self.turning.quotes) if other is not quote]
        held = ", held" if self.turning.paused else ""
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
