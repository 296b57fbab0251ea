"""Model that `eval` evaluates, and the run that saved the model. Nothing is written, since the run may be active."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.errors import ConfigError, RunDirError, did_you_mean
from slipstream.pipeline.checkpoint import Checkpoints
from slipstream.run_dir.atomic_files import MANIFEST, damage
from slipstream.run_dir.reading import RunDir
from slipstream.run_dir.writing import LEDGER, METRICS

MAX_FOLDER_DEPTH = 3
"""Maximum number of directory levels above a model at which its run directory is searched."""


@dataclass(frozen=True)
class EvaluatedModel:
    model: str
    run: Path | None = None
    config: Config | None = None
    """Config of the run; None if no run directory was found for the model."""
    update: int | None = None
    """Number of the update after which the model was saved; None if unknown."""
    notes: tuple[str, ...] = ()


def evaluated_model(name: str) -> EvaluatedModel:
    path = Path(name)
    run = run_of(path)
    if run is None:
        check_no_run_is_meant(name)
        return EvaluatedModel(name)
    config = RunDir(run).config
    notes: list[str] = []
    if path.absolute() == run.absolute():
        path = student_of(run, notes)
    elif (path / MANIFEST).exists() and (wrong := damage(path)):
        notes.append(f"{path}: {wrong}")
    return EvaluatedModel(
        model=str(path),
        run=run,
        config=config,
        update=update_of(path, run, config.updates),
        notes=tuple(notes),
    )


def run_of(path: Path) -> Path | None:
    """Return the run directory that is `path` or contains `path`; None if there is no such directory."""
    if not path.is_dir():
        return None
    if is_run_directory(path):
        return path
    above = next((each for each in path.absolute().parents[:MAX_FOLDER_DEPTH] if is_run_directory(each)), None)
    return above.relative_to(Path.cwd()) if above and above.is_relative_to(Path.cwd()) else above


def check_no_run_is_meant(name: str) -> None:
    """Raise RunDirError if `name` is a directory of runs, or probably a mistyped run rather than a hub name."""
    path, beside = Path(name), "/" in name and not Path(name).is_dir()
    where = path.parent if beside else path
    runs = sorted(str(each) for each in where.glob("*") if os.access(each, os.X_OK) and is_run_directory(each))
    if runs and beside:
        raise RunDirError(f"{name}: no such directory; {did_you_mean(name, runs)}")
    if runs and not (path / "config.json").exists():
        raise RunDirError(f"{name} is not a run, but contains runs: name one of them, for example {runs[-1]}")


def is_run_directory(path: Path) -> bool:
    """Return True if `path` is a run directory, even if some of its files are lost."""
    begun = [name for name in (METRICS, "checkpoints", "final") if (path / name).exists()]
    return (path / LEDGER).exists() or ((path / "config.toml").exists() and bool(begun))


def student_of(run: Path, notes: list[str]) -> Path:
    """Return the directory of the final student, else the last undamaged checkpoint; append remarks to `notes`."""
    final, checkpoints = run / "final", Checkpoints(run / "checkpoints")
    if final.is_dir():
        if wrong := damage(final):
            notes.append(f"{final}: {wrong}")
        return final
    for number in reversed(checkpoints.existing()):
        path = checkpoints.directory / str(number)
        if (wrong := damage(path)) is None:
            notes.append(f"{run} has no final student yet: this is its checkpoint {number}")
            return path
        notes.append(f"{path} is damaged: {wrong}")
    raise RunDirError("; ".join([f"{run} has no student to evaluate, neither final nor in a checkpoint", *notes]))


def update_of(path: Path, run: Path, updates: int) -> int | None:
    """Return the number of the update after which a model in final, final-N or checkpoints/N was saved; else None."""
    inside = path.absolute().relative_to(run.absolute()).as_posix()
    if inside.split("/")[0] == "final":
        return updates
    number = re.match(r"(?:final-|checkpoints/)(\d+)", inside)
    return int(number[1]) if number else None


def check_known(subject: EvaluatedModel) -> None:
    """Raise ConfigError if a run saved this model but its run directory is missing, so that the task is unknown."""
    if subject.run is None and (Path(subject.model) / MANIFEST).exists():
        raise ConfigError(
            f"{subject.model} was saved by a run, but is outside of its run directory, which has the settings: write "
            "--data, --reward and other settings of its config.toml"
        )
