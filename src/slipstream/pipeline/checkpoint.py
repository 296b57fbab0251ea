"""Checkpoints: written under a temporary name, synced, then renamed, so that a checkpoint is complete or absent.

checkpoints/N holds the learner after update N (a HF directory and the optimizer state) and all groups in flight. It
also holds the state of the run (`RunState`) and of its files in `standing.json`, and a manifest with checksums
(`atomic_files.seal`). A resumed run discards everything later than its checkpoint and continues the groups in flight.
So every group still ends exactly once.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.config.file import flat
from slipstream.config.schema import Config
from slipstream.errors import RunDirError
from slipstream.pipeline.admission import NEW, AdmissionState
from slipstream.pipeline.store import Stored
from slipstream.protocols import Learner
from slipstream.records import Group
from slipstream.run_dir.atomic_files import beside_of, damage, reading, remove, remove_unfinished, seal, sync, writing
from slipstream.run_dir.formats import (
    SUSPECT,
    checkpoint_numbers,
    format_of,
    object_of,
    resumable,
    upgraded,
    written_by,
)
from slipstream.run_dir.writing import LogPosition, within

STATE_FILE = "standing.json"
CHECKPOINT_FIELDS_ON_DISK = {"zero_advantage": "alike"}
"""Names of fields of `AdmissionState` in standing.json, where they differ."""
REPLACED_SUFFIX = ".old"
"""Suffix of a checkpoint whose place a new one takes."""
RECORDED = (
    *("sampler", "loss", "teachers", "policy", "correction", "freshness", "critic", "mix", "task"),
    *("environment", "environments", "learner.router"),
)
"""Settings by which tokens are drawn, scored and rewarded, and that decide what is recorded of them."""
OPERATIONAL = {
    *("api_key_env", "base_url", "concurrency", "devices", "noise", "on_publish", "packing", "processes", "recheck"),
    *("replicas", "replicas_max", "sandbox", "seconds", "server", "slots", "step_seconds", "timeout", "token_budget"),
}
"""Names of settings in these sections that only say where and how fast the work is done."""
REFERENCE = ("teachers", "sampler", "loss", "data")
"""Sections on which a teacher's answers to fixed texts depend."""
SMALL_DIRECTORY = 1 << 24
"""Size of a directory in bytes above which checksums are computed in a thread, so that the event loop continues."""


@dataclass(frozen=True)
class RunState:
    """Everything that a run continues from, apart from the learner and the run's files."""

    admission: AdmissionState = NEW
    groups: Sequence[Group] = ()
    """Groups in flight that have tokens, with partial rollouts; the learner saves and restores them."""
    attempts: Mapping[str, Any] = field(default_factory=dict)
    """Attempts remembered for each prompt; empty if no teacher is shown attempts."""
    canaries: Mapping[str, Any] = field(default_factory=dict)
    """Reference answers of each teacher to the canary texts (fixed texts that test the teacher), by teacher name."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    """State of the choice of prompts, with the rows of the groups in flight; empty in older checkpoints."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the groups in flight (see RECORDED), by name; empty in older checkpoints."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Notes of the ledger about failures in the groups in flight; empty in older checkpoints."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the groups in flight have."""
        return sum(handle.header.tokens for group in self.groups for handle in group)

    def changed(self, config: Config, prompts: str) -> list[str]:
        """Return the names of the settings of `config` that the groups in flight do not have; `prompts` is a digest."""
        now, sections = recorded_settings(config), {section_of(name) for name in self.recorded}
        data = ["data.train"] if self.choice.get("prompts", prompts) != prompts else []
        # a single new name is a setting that an older version did not know
        added = [name for name in now if self.recorded and section_of(name) not in sections]
        return [*data, *(name for name, value in self.recorded.items() if now.get(name) != value), *added]

    def with_groups_begun_again(self, changed: Iterable[str]) -> RunState:
        """Return the state with the same groups in flight, none of which has a token.

        Reference answers of teachers are kept, unless one of the changed settings decides what they are.
        """
        begun = replace(self.admission, waiting=[], ready=[], zero_advantage=[], versions={})
        canaries = {} if any(name.startswith(REFERENCE) for name in changed) else self.canaries
        return replace(self, admission=begun, groups=(), canaries=canaries, notes={})


BEGINNING = RunState()


def recorded_settings(config: Config) -> dict[str, Any]:
    settings = flat(config.model_dump(mode="json"))
    kept = {name: value for name, value in settings.items() if any(within(name, each) for each in RECORDED)}
    return {name: value for name, value in kept.items() if OPERATIONAL.isdisjoint(name.split("."))}


def section_of(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: RunState
    """State without its groups, which `Learner.restore` returns."""
    mark: LogPosition
    """Sizes and checksums of the run's files at the checkpoint."""

    async def restore(self, learner: Learner) -> RunState:
        """Load the checkpoint into the learner, and return the whole state of the run."""
        return replace(self.state, groups=await learner.restore(self.path))


class Checkpoints:
    def __init__(self, directory: Path, *, every: int = 0, minutes: float = 0, keep: int = 1, proof: int = 0) -> None:
        """Manage a directory of checkpoints; a checkpoint counts as proven (sound) after `proof` more updates."""
        self.directory, self.every, self.minutes, self.keep, self.proof = directory, every, minutes, keep, proof
        self.last = 0.0
        """Time of the last checkpoint or resume, in seconds of the trace's clock."""
        self.in_use = set[int]()
        """Checkpoints that other processes read, which stay."""

    def due(self, update: int, now: float) -> bool:
        by_time = self.minutes > 0 and now - self.last >= 60 * self.minutes
        return by_time or (self.every > 0 and update % self.every == 0)

    @property
    def at_end(self) -> bool:
        return self.every > 0 or self.minutes > 0

    async def save(
        self,
        learner: Learner,
        state: RunState,
        mark: LogPosition,
        *,
        stopping: bool = False,
        suspect: bool = False,
    ) -> Path:
        """Save a checkpoint and return its directory; `state` and `mark` must describe the run at this call.

        When the run is `stopping`, older checkpoints are kept, because the newest weights may be worse. A checkpoint
        whose weights are `suspect` is never resumed automatically. It is removed before a resumed run saves again.
        """
        admission = state.admission
        path = plain = self.directory / str(admission.version)
        if suspect:
            path = suspect_of(plain)
            if plain.exists():
                with writing(path):
                    shutil.rmtree(path, ignore_errors=True)
                    plain.rename(path)
        else:  # before the new checkpoint: if the process is killed between them, `resume` uses the newest one
            self._remove_suspects()
        if admission.in_flight or not path.exists():  # an existing one has outdated groups
            with writing(path):
                self.directory.mkdir(exist_ok=True)
                remove_unfinished(self.directory)
            files = {STATE_FILE: json.dumps(on_disk(state, mark)).encode()}
            await save_whole(learner, path, files, state.groups, optimizer=True)
        if suspect:
            self._remove_suspects(but=path)
        if not stopping:
            self._prune(admission.version)
        self.last = mark["time"]
        return path

    def _prune(self, version: int) -> None:
        """Remove all checkpoints except the newest `keep`, the last proven one and the next to become proven."""
        existing, proven = self.existing(), self.proven_numbers(version)
        stay = {*existing[-self.keep :], *proven[-1:], *existing[len(proven) :][:1], *self.in_use}
        with writing(self.directory):
            for old in set(existing) - stay:
                remove(self.directory / str(old))

    def proven_numbers(self, version: int) -> list[int]:
        return [number for number in self.existing() if number <= version - self.proof]

    def existing(self) -> list[int]:
        return checkpoint_numbers(self.directory)

    def suspects(self) -> list[Path]:
        return sorted(self.directory.glob(suspect_of(Path("*")).name))

    def _remove_suspects(self, but: Path | None = None) -> None:
        for old in self.suspects():
            if old != but:
                remove(old)

    def forget_after(self, version: int) -> None:
        """Remove unfinished checkpoints and all later than `version`, from which a run is about to resume."""
        with writing(self.directory):
            remove_unfinished(self.directory)
            for later in self.existing():
                if later > version:
                    remove(self.directory / str(later))


def on_disk(state: RunState, mark: LogPosition) -> dict[str, Any]:
    admission = {CHECKPOINT_FIELDS_ON_DISK.get(name, name): value for name, value in asdict(state.admission).items()}
    choice = {"choice": state.choice} if state.choice else {}
    found = {"admission": admission, "log": mark, "attempts": state.attempts, "canaries": state.canaries}
    found |= {"recorded": state.recorded, "notes": state.notes}
    return found | choice | written_by()


def suspect_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{SUSPECT}")


def replaced_by(path: Path) -> Path:
    """Return the temporary path of a checkpoint while a new one takes its place."""
    return beside_of(path.with_name(f"{path.name}{REPLACED_SUFFIX}"))


def restore_replaced(directory: Path) -> None:
    """Give a checkpoint its name back if a kill prevented the new one from taking its place."""
    for before in directory.glob(f"*{REPLACED_SUFFIX}.tmp"):
        path = before.with_name(before.name.removesuffix(f"{REPLACED_SUFFIX}.tmp"))
        if not path.exists():
            before.rename(path)


async def save_whole(
    learner: Learner,
    path: Path,
    files: Mapping[str, bytes] | None = None,
    groups: Sequence[Group] = (),
    *,
    optimizer: bool = False,
) -> None:
    """Save the student and `files` atomically; if `optimizer` is True, also the learner's state for a resume."""
    beside, before = beside_of(path), replaced_by(path)
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with writing(path):
            beside.mkdir()
            await learner.save(beside, groups, optimizer=optimizer)
            for name, data in (files or {}).items():
                (beside / name).write_bytes(data)
            if sum(file.stat().st_size for file in beside.rglob("*")) > SMALL_DIRECTORY:
                await asyncio.get_running_loop().run_in_executor(None, seal, beside)
            else:
                seal(beside)
            if path.exists():
                path.rename(before)
            beside.rename(path)
            sync(path.parent)
    finally:
        if before.exists() and not path.exists():
            before.rename(path)
        for left in (beside, before):
            shutil.rmtree(left, ignore_errors=True)


def newest(run: Path, number: int | None = None, *, proof: int = 0, say: Callable[[str], None] = print) -> Checkpoint:
    """Return the last undamaged checkpoint of a run directory, or checkpoint `number`.

    If a suspect checkpoint exists, the result is at least `proof` updates older, or just older if none is that old.
    """
    checkpoints = Checkpoints(run / "checkpoints")
    with writing(checkpoints.directory):
        restore_replaced(checkpoints.directory)
    existing = checkpoints.existing()
    for path in checkpoints.suspects():
        if path.stem == str(number) or not existing:
            other = f"or write --from with one of {_list(existing)}" if existing else "or begin a new run"
            raise RunDirError(
                f"{path} was saved when the run went wrong, and its weights may be bad: rename it to {path.stem} to "
                f"go on from it all the same, {other}"
            )
    if not existing:
        raise RunDirError(
            f"{run} has no checkpoint to go on from: it was stopped before the first (checkpoint.minutes)"
        )
    if number is not None and number not in existing:
        raise RunDirError(f"{run} has no checkpoint {number}: write --from with one of {_list(existing)}")
    for version in [number] if number is not None else reversed(resumable(checkpoints.directory, proof)):
        path = checkpoints.directory / str(version)
        if (wrong := _wrong(path)) is None:
            return read(path)
        say(f"{path} is damaged: {wrong}")
    if number is not None:
        raise RunDirError(
            f"checkpoint {number} of {run} is damaged: leave --from away, or write another of {_list(existing)}"
        )
    raise RunDirError(f"{run} has no undamaged checkpoint to go on from: begin a new run")


def read(path: Path) -> Checkpoint:
    with reading(path / STATE_FILE) as file:
        found = object_of(file.read())
    found = upgraded(STATE_FILE, found, format_of(path / STATE_FILE, found))
    saved = found["admission"]
    saved |= {name: saved.pop(old) for name, old in CHECKPOINT_FIELDS_ON_DISK.items() if old in saved}
    for by_number in ("in_flight", "versions", "sources", "stored"):
        saved[by_number] = {int(number): value for number, value in saved.get(by_number, {}).items()}
    saved["stored"] = {number: Stored(**stored) for number, stored in saved["stored"].items()}
    others = {name: found.get(name, {}) for name in ("attempts", "canaries", "choice", "recorded", "notes")}
    return Checkpoint(path, RunState(AdmissionState(**saved), **others), found["log"])


def _wrong(path: Path) -> str | None:
    if (path / "learner.pt").exists():
        return "learner.pt is of an older version of slipstream, which this one does not read"
    if not (path / STATE_FILE).exists():
        return f"{STATE_FILE} is missing"
    if wrong := damage(path):
        return wrong
    version = read(path).state.admission.version
    return None if version == int(path.name) else f"it is checkpoint {version} under another name"


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
