"""The directory of a study: what may go on in it, what is checked before anything starts, and what a cell leaves.

A cell that is finished is kept, if its config is what it was; one that is not begins anew.
"""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slipstream
from slipstream.config.file import differing, parse
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, RunDirError, SlipstreamError
from slipstream.run_dir.atomic_files import write_atomic, writing
from slipstream.run_dir.reading import RunDir
from slipstream.studies.results import CELLS, DONE, STUDY_FILE, Sweep, SweepCell
from slipstream.studies.study import Point, Study


@dataclass(frozen=True)
class Checked:
    """What the plan of a point says beside that it is possible."""

    warnings: tuple[str, ...]
    prompts: str
    """Their digest."""
    on_cpu: bool
    room: int
    """How many of its kind this machine has memory for."""


def directory_of(study: Study, name: str) -> Path:
    """Always the same one, so that a study goes on."""
    path = Path(study.output or f"runs/{name}")
    if (path / "config.toml").exists():
        raise RunDirError(f"{path} holds a run: choose another directory with --output")
    return path


def check_unchanged(sweep: Sweep) -> None:
    """No finished cell was another run than the one that the study now means by it."""
    for cell in sweep.finished:
        before = parse(cell.done["config"], where=str(cell.path / DONE), say=str)
        for name, then, now in differing(before, cell.cell.config):
            raise RunDirError(
                f"{cell.path} was run with {name} = {said(then)}, and the study says {said(now)}: put it back, remove "
                "that cell, or choose another directory with --output"
            )


def said(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def check_prompts(sweep: Sweep, found: Sequence[Checked]) -> None:
    """Nor on other prompts than those that its source now gives."""
    now = {id(point): each.prompts for point, each in zip(sweep.study.points, found, strict=True)}
    for cell in sweep.finished:
        if cell.run.meta.get("prompts") != now[id(cell.cell.point)]:
            raise RunDirError(
                f"{cell.cell.config.data.train} does not give the prompts that {cell.path} was run on: put it back, or "
                "choose another directory with --output"
            )


def write_study(study: Study, path: Path) -> None:
    import tomli_w

    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / STUDY_FILE, tomli_w.dumps(study.tree))


def strays(sweep: Sweep) -> list[Path]:
    """Finished cells that are there and no longer in the study."""
    known = {cell.path for cell in sweep.cells}
    return sorted(found.parent for found in (sweep.path / CELLS).rglob(DONE) if found.parent not in known)


def check_points(points: Sequence[Point], where: str, tell: Any) -> list[Checked]:
    """Each of them, as `train` would before it begins. The first mistake is told with the name of its point."""
    from slipstream.plan.placement import memory
    from slipstream.plan.plan import on_cpu, plan

    found = []
    for number, point in enumerate(points):
        try:
            made = plan(point.config)
        except SlipstreamError as error:
            raise ConfigError(f"{where}: {point.name}: {error}") from None
        tell(number)
        room = memory(made.engines.runtime)[1] // max(1.0, sum(need.counted for need in made.needs))
        found.append(Checked(made.warnings, made.prompts.digest, on_cpu(made.config), int(room)))
    return found


def fitting(points: Sequence[Point], found: Sequence[Checked], cores: int) -> int:
    """Cells that so many cores have time for, and this machine memory; one, where they would share its GPUs."""
    if not all(each.on_cpu for each in found):
        return 1
    return max(1, min(cores // max(cores_of(point.config) for point in points), *(each.room for each in found)))


def cores_of(config: Config) -> int:
    """How many a cell keeps busy: in one process as many as it has threads, else every engine has its own."""
    runtime, threads = config.runtime, config.runtime.threads
    if runtime.kind == "inline":
        return max(threads, config.learner.threads or 0)
    here = [teacher for teacher in config.teachers.values() if teacher.base_url is None]
    most = [teacher.replicas_max if teacher.replicas == "auto" else teacher.replicas for teacher in here]
    sampler = config.sampler
    samplers = sampler.replicas_max if sampler.replicas == "auto" else sampler.replicas
    return (samplers + sum(most)) * threads + config.learner.ranks * (config.learner.threads or threads)


def emptied(cell: SweepCell) -> None:
    """What a cell that was not finished has left is of no use."""
    with writing(cell.path):
        shutil.rmtree(cell.path, ignore_errors=True)
        cell.path.mkdir(parents=True)


def finish(path: Path, config: Config, began: float, *, keep: bool) -> None:
    """Say that a cell is finished, what it was and what it took. Without `keep` its weights go."""
    lines = RunDir(path).metrics
    if not keep:
        shutil.rmtree(path / "checkpoints", ignore_errors=True)
        for file in (path / "final").iterdir():
            if file.name != "README.md":
                shutil.rmtree(file) if file.is_dir() else file.unlink()
    done = {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(time.monotonic() - began, 3),
        "cpu_seconds": round(cpu_seconds(), 3),
        "updates": lines[-1]["update"],
        "tokens": sum(line.get("tokens", 0) for line in lines),
        "version": slipstream.__version__,
        "config": config.model_dump(mode="json", exclude_none=True),
    }
    write_atomic(path / DONE, json.dumps(done, indent=1) + "\n")


def cpu_seconds() -> float:
    """Of this process since it began, and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
