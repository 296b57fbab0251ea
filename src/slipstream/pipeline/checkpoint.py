"""Checkpoints: written beside, synced, then renamed, so that what has a name is whole; and found out if it is not.

checkpoints/N holds the learner after update N (a HF directory, and its optimizer), what was rolled out, scored and half
rolled out then, where admission and the run's files stood (`standing.json`), and a manifest of every byte
(`run_dir.atomic_files.seal`). A run that goes on from it forgets whatever came later and goes on with what was in flight:
every group still ends exactly once.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import RunDirError
from slipstream.pipeline.admission import Standing
from slipstream.protocols import Learner
from slipstream.records import Group
from slipstream.run_dir.atomic_files import beside_of, damage, reading, remove, remove_unfinished, seal, sync, writing
from slipstream.run_dir.formats import SUSPECT, format_of, object_of, resumable, upgraded, written_by
from slipstream.run_dir.writing import Mark

STANDING = "standing.json"
SMALL = 1 << 24
"""Bytes whose checksums are not worth a thread."""


@dataclass(frozen=True)
class Checkpoint:
    """What there is to go on from."""

    path: Path
    standing: Standing
    mark: Mark
    """Where the run's files stood."""
    attempts: Mapping[str, Any]
    """What was tried at each prompt, where that is remembered."""
    canaries: Mapping[str, Any]
    """What each teacher said of fixed texts at the start of the run."""


class Checkpoints:
    def __init__(self, directory: Path, *, every: int = 0, minutes: float = 0, keep: int = 1, proof: int = 0) -> None:
        """`proof` is how many updates it takes to see that weights are sound."""
        self.directory, self.every, self.minutes, self.keep, self.proof = directory, every, minutes, keep, proof
        self.last = 0.0
        """Seconds after the beginning at which there was one, or the run went on."""

    def due(self, update: int, now: float) -> bool:
        by_time = self.minutes > 0 and now - self.last >= 60 * self.minutes
        return by_time or (self.every > 0 and update % self.every == 0)

    @property
    def at_end(self) -> bool:
        return self.every > 0 or self.minutes > 0

    async def save(
        self,
        learner: Learner,
        standing: Standing,
        groups: Sequence[Group],
        mark: Mark,
        *,
        attempts: Mapping[str, Any] | None = None,
        canaries: Mapping[str, Any] | None = None,
        stopping: bool = False,
        suspect: bool = False,
    ) -> Path:
        """Nothing may happen between the standing, the groups, the attempts, the mark and this call: they are of one
        moment.

        At a stop older ones stay, as these weights may be worse. No run goes on from suspect ones by itself. They are
        removed when the run has gone on from others and saves again.
        """
        path = plain = self.directory / str(standing.version)
        if suspect:
            path = suspect_of(plain)
            if plain.exists():
                with writing(path):
                    shutil.rmtree(path, ignore_errors=True)
                    plain.rename(path)
        if standing.in_flight or not path.exists():  # what is in flight has gone on since
            with writing(path):
                self.directory.mkdir(exist_ok=True)
                remove_unfinished(self.directory)
            state = {"admission": asdict(standing), "log": mark, "attempts": attempts or {}, "canaries": canaries or {}}
            await save_whole(
                learner, path, {STANDING: json.dumps(state | written_by()).encode()}, groups, optimizer=True
            )
        for old in self.suspects() if not suspect else []:
            remove(old)
        if not stopping:
            self._prune(standing.version)
        self.last = mark["time"]
        return path

    def _prune(self, version: int) -> None:
        """All but the newest, the last that has proven sound and the one that will be next."""
        existing, proven = self.existing(), self.proven(version)
        stay = {*existing[-self.keep :], *proven[-1:], *existing[len(proven) :][:1]}
        with writing(self.directory):
            for old in set(existing) - stay:
                remove(self.directory / str(old))

    def proven(self, version: int) -> list[int]:
        """Of what exists, after so many updates."""
        return [number for number in self.existing() if number <= version - self.proof]

    def existing(self) -> list[int]:
        return sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdecimal())

    def suspects(self) -> list[Path]:
        return sorted(self.directory.glob(suspect_of(Path("*")).name))

    def forget_after(self, version: int) -> None:
        """A run goes on from here: what came later, and what was never finished, is in its way."""
        with writing(self.directory):
            remove_unfinished(self.directory)
            for later in self.existing():
                if later > version:
                    remove(self.directory / str(later))


def suspect_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{SUSPECT}")


async def save_whole(
    learner: Learner,
    path: Path,
    files: Mapping[str, bytes] | None = None,
    groups: Sequence[Group] = (),
    *,
    optimizer: bool = False,
) -> None:
    """The student; with `optimizer`, also what the learner needs to go on; and files by their names."""
    beside, before = beside_of(path), beside_of(path.with_name(f"{path.name}.old"))
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with writing(path):
            beside.mkdir()
            await learner.save(beside, groups, optimizer=optimizer)
            for name, data in (files or {}).items():
                (beside / name).write_bytes(data)
            await _sealed(beside)
            if path.exists():
                path.rename(before)
            beside.rename(path)
            sync(path.parent)
    finally:
        if before.exists() and not path.exists():
            before.rename(path)
        for left in (beside, before):
            shutil.rmtree(left, ignore_errors=True)


async def _sealed(path: Path) -> None:
    """Whoever waits for the learner's process meanwhile is not held up by checksums."""
    if sum(each.stat().st_size for each in path.rglob("*")) > SMALL:
        await asyncio.get_running_loop().run_in_executor(None, seal, path)
    else:
        seal(path)


def newest(run: Path, number: int | None = None, *, proof: int = 0, say: Callable[[str], None] = print) -> Checkpoint:
    """Return the last whole checkpoint of a run directory, or the one that is asked for. After a run that went wrong,
    it has `proof` updates behind it."""
    checkpoints = Checkpoints(run / "checkpoints")
    existing = checkpoints.existing()
    for path in checkpoints.suspects():
        if path.stem == str(number) or not existing:
            other = f"or write --from with one of {_listed(existing)}" if existing else "or begin a new run"
            raise RunDirError(
                f"{path} is of a run that went wrong there, and may be the cause: rename it to {path.stem} to go on "
                f"from it all the same, {other}"
            )
    if not existing:
        raise RunDirError(
            f"{run} has no checkpoint to go on from: it was stopped before the first (checkpoint.minutes)"
        )
    if number is not None and number not in existing:
        raise RunDirError(f"{run} has no checkpoint {number}: write --from with one of {_listed(existing)}")
    for version in [number] if number is not None else reversed(resumable(checkpoints.directory, proof)):
        path = checkpoints.directory / str(version)
        if (wrong := _wrong(path)) is None:
            return read(path)
        say(f"{path} is damaged: {wrong}")
    if number is not None:
        raise RunDirError(
            f"{run} has no whole checkpoint {number}: leave --from away, or write another of {_listed(existing)}"
        )
    raise RunDirError(f"{run} has no whole checkpoint to go on from: begin a new run")


def read(path: Path) -> Checkpoint:
    with reading(path / STANDING) as file:
        state = object_of(file.read())
    state = upgraded(STANDING, state, format_of(path / STANDING, state))
    saved = state["admission"]
    for by_number in ("in_flight", "versions", "sources"):
        saved[by_number] = {int(number): value for number, value in saved.get(by_number, {}).items()}
    return Checkpoint(path, Standing(**saved), state["log"], state.get("attempts", {}), state.get("canaries", {}))


def _wrong(path: Path) -> str | None:
    if (path / "learner.pt").exists():
        return "learner.pt is of an older version, which is not read any more"
    if not (path / STANDING).exists():
        return f"{STANDING} is missing"
    if wrong := damage(path):
        return wrong
    version = read(path).standing.version
    return None if version == int(path.name) else f"it is checkpoint {version} under another name"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
