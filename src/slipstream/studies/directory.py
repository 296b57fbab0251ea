"""Directory of a study: checks before any cell starts, files of finished cells, and result rows as CSV and Parquet.

A finished cell is kept if its config is unchanged; an unfinished one starts again from the beginning.
"""

import csv
import io
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slipstream
from slipstream.config.file import differing, parse
from slipstream.config.renamed_keys import with_new_keys
from slipstream.config.schema import Config
from slipstream.config.sections import most_replicas
from slipstream.errors import ConfigError, RunDirError, SlipstreamError
from slipstream.processes import cpu_seconds
from slipstream.run_dir.atomic_files import beside_of, write_atomic, writing
from slipstream.run_dir.reading import RunDir
from slipstream.studies.results import CELLS, DONE, STUDY_FILE, Sweep, SweepCell
from slipstream.studies.study import Point, Study


@dataclass(frozen=True)
class Checked:
    """Results of planning one point of a study (an arm at one combination of settings)."""

    warnings: tuple[str, ...]
    prompts: str
    """Digest of the training prompts."""
    on_cpu: bool
    room: int
    """Number of runs of this point that fit into this machine's memory at the same time."""


def directory_of(study: Study, name: str) -> Path:
    """Return the directory of a study: always the same path, so that an interrupted study can continue."""
    path = Path(study.output or f"runs/{name}")
    if (path / "config.toml").exists():
        raise RunDirError(f"{path} holds a run: choose another directory with --output")
    return path


def check_unchanged(sweep: Sweep) -> None:
    """Raise RunDirError if a finished cell was run with a config that differs from its config in the study now."""
    for cell in sweep.finished:
        before = parse(with_new_keys(cell.done["config"]), where=str(cell.path / DONE), say=str)
        for name, then, now in differing(before, cell.config):
            raise RunDirError(
                f"{cell.path} was run with {name} = {value_text(then)}, but the study has {value_text(now)}: restore "
                "the setting, remove that cell, or choose another directory with --output"
            )


def value_text(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def check_prompts(sweep: Sweep, found: Sequence[Checked]) -> None:
    """Raise RunDirError if a finished cell was trained on prompts that differ from those in its data source now."""
    now = {id(point): each.prompts for point, each in zip(sweep.study.points, found, strict=True)}
    for cell in sweep.finished:
        if cell.run.meta.get("prompts") != now[id(cell.point)]:
            source = ", ".join(cell.config.data.sources.values())
            raise RunDirError(
                f"{source} has other prompts than {cell.path} was run on: restore the data, or "
                "choose another directory with --output"
            )


def write_study(study: Study, path: Path) -> None:
    import tomli_w

    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / STUDY_FILE, tomli_w.dumps(study.tree))


def removed_cells(sweep: Sweep) -> list[Path]:
    """Return the directories of finished cells that are no longer in the study."""
    known = {cell.path for cell in sweep.cells}
    return sorted(found.parent for found in (sweep.path / CELLS).rglob(DONE) if found.parent not in known)


def check_points(points: Sequence[Point], where: str, tell: Any) -> list[Checked]:
    """Plan every point as `train` does; raise ConfigError with the point's name at the first invalid point."""
    from slipstream.plan.facts import Facts
    from slipstream.plan.placement import memory
    from slipstream.plan.plan import plan
    from slipstream.plan.rules.machine import on_cpu

    found = []
    for number, point in enumerate(points):
        try:
            made = plan(point.config)
        except SlipstreamError as error:
            raise ConfigError(f"{where}: {point.name}: {error}") from None
        tell(number)
        room = memory(made.engines.runtime)[1] // max(1.0, sum(need.counted for need in made.needs))
        found.append(Checked(made.warnings, made.prompts.digest, on_cpu(made.config, Facts(made.config)), int(room)))
    return found


def parallel_cells(points: Sequence[Point], found: Sequence[Checked], cores: int) -> int:
    """Return the number of parallel cells that fit cores and memory; 1 if any cell uses GPUs."""
    if not all(each.on_cpu for each in found):
        return 1
    return max(1, min(cores // max(cores_of_cell(point.config) for point in points), *(each.room for each in found)))


def cores_of_cell(config: Config) -> int:
    """Return the number of CPU cores that a cell uses: its threads in one process, else the threads of all engines."""
    threads = config.runtime.threads
    if config.runtime.kind == "inline":
        return max(threads, config.learner.threads or 0)
    here = [teacher for teacher in config.teachers.values() if teacher.base_url is None]
    workers = most_replicas(config.sampler) + sum(map(most_replicas, here))
    return workers * threads + config.learner.ranks * (config.learner.threads or threads)


def clear_cell(cell: SweepCell) -> None:
    with writing(cell.path):
        shutil.rmtree(cell.path, ignore_errors=True)
        cell.path.mkdir(parents=True)


def finish_cell(path: Path, config: Config, began: float, *, keep: bool) -> None:
    """Write cell.json, which marks a cell as finished; delete its weights unless `keep`."""
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


# --- result rows ------------------------------------------------------------------------------------------------------


def write_csv(sweep: Sweep) -> Path:
    path, rows = sweep.path / "results.csv", sweep.rows()
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: csv_value(value) for key, value in row.items()} for row in rows)
    with writing(path):
        write_atomic(path, text.getvalue())
    return path


def write_parquet(sweep: Sweep) -> Path | None:
    """Write the rows as Parquet and return the path; None if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return None
    path, rows = sweep.path / "results.parquet", sweep.rows()
    columns = {key: parquet_column([row[key] for row in rows]) for key in rows[0]} if rows else {}
    with writing(path):
        pyarrow.parquet.write_table(pyarrow.table(columns), beside_of(path))
        beside_of(path).replace(path)
    return path


def csv_value(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict | bool) else value


def parquet_column(values: Sequence[Any]) -> list[Any]:
    """Return the values of a column; convert them to text if their types are mixed, which Parquet does not allow."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) == 1 and not kinds & {list, dict}):
        return list(values)
    return [None if value is None else str(csv_value(value)) for value in values]
