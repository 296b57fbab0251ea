"""Many runs that answer one question: begun, gone on with, and told while they run and when all are finished."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.live import Live

from slipstream.console import Screen
from slipstream.errors import ConfigError, printable
from slipstream.linux import LINUX
from slipstream.run_dir.atomic_files import alone_in, private
from slipstream.runs.display import lively
from slipstream.runs.start import Caller, saying, train, warn
from slipstream.studies.board import Board, summary
from slipstream.studies.cells import Event, Job, Tell, run
from slipstream.studies.directory import (
    Checked,
    check_points,
    check_prompts,
    check_unchanged,
    directory_of,
    emptied,
    finish,
    fitting,
    strays,
    write_study,
)
from slipstream.studies.export import write_csv, write_parquet
from slipstream.studies.results import Sweep, SweepCell
from slipstream.studies.study import Cell, Study

PRELOAD = ("slipstream.runs.start", "slipstream.runtimes.inline")
LOG = "output.txt"
WIDE = 200
"""Columns of a table where nobody says how many there are."""
LATE = 300.0
"""Seconds beyond runtime.patience, after which a run stops by itself, until a cell that says nothing hangs."""


def sweep(
    path: str | Path, console: Console, changes: Sequence[tuple[str, str]], *, jobs: int | None, check: bool
) -> bool:
    """Run what is not finished yet; whether all of it is, at the end."""
    study = Study.load(path, changes)
    directory = directory_of(study, Path(path).stem)
    say = saying(console)
    for note in dict.fromkeys(study.notes):
        say(note)
    there = Sweep(directory, study)
    if check:
        check_unchanged(there)
        checked(study, console)
        for point in study.points:
            seeds = [f"{c.seed}{' (finished)' if c.finished else ''}" for c in there.cells if c.cell.point is point]
            say(f"{point.name}: seed {', '.join(seeds)}")
        say(f"ok: {len(there.cells)} cells, {len(there.finished)} of them finished, in {directory}")
        return True
    try:
        with private(), alone_in(directory):
            return gone_through(there, console, jobs, how_to_go_on(path, changes, jobs))
    finally:
        with suppress(OSError):  # where nothing was begun nothing is left
            directory.rmdir()


def gone_through(there: Sweep, console: Console, jobs: int | None, again: str) -> bool:
    study, say = there.study, saying(console)
    check_unchanged(there)
    if stray := strays(there):
        say(f"{len(stray)} finished cells are not in the study any more and are left out: {stray[0]} …")
    todo, failed = [cell for cell in there.cells if not cell.finished], list[tuple[SweepCell, str]]()
    found = checked(study, console) if todo else []
    if found:
        check_prompts(there, found)
    write_study(study, there.path)
    if todo:
        at_a_time = jobs or study.sweep.jobs or fitting(study.points, found, cores())
        failed = run_cells(there, todo, at_a_time, console, again)
    for line in summary(there):
        wide = None if console.is_terminal else WIDE
        console.print(line, highlight=False, markup=False, width=wide, soft_wrap=isinstance(line, str))
    written(there, say)
    for cell, why in failed:
        warn(console, f"{cell.cell.name} failed: {why}; {cell.path / LOG}")
    if failed:
        say(f"{len(failed)} of {len(todo)} cells failed; begin them again with: {again}")
    return not failed


def how_to_go_on(path: str | Path, changes: Sequence[tuple[str, str]], jobs: int | None) -> str:
    options = [*changes, *([("jobs", str(jobs))] if jobs else [])]
    return shlex.join(
        ["slipstream", "sweep", str(path), *(word for key, text in options for word in (f"--{key}", text))]
    )


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if LINUX else os.cpu_count() or 1


def checked(study: Study, console: Console) -> list[Checked]:
    """Every point, planned where the libraries of models are."""
    with ExitStack() as stack:
        log = Path(stack.enter_context(TemporaryDirectory())) / LOG
        job = Job("check", partial(check_points, study.points, study.where), log, patience=LATE)
        told = stack.enter_context(console.status(f"checking {len(study.points)} configs")) if lively(console) else None
        for event in stack.enter_context(closing(run([job], 1, preload=PRELOAD))):
            match event:
                case Event(kind="moved", told=number) if told:
                    told.update(f"checking {len(study.points)} configs: {number + 1}")
                case Event(kind="failed", told=why):
                    if "Traceback" in (text := log.read_text()):  # a defect of ours
                        print(printable(text), file=sys.stderr)
                    raise ConfigError(why)
                case Event(kind="done", told=found):
                    for warning in dict.fromkeys(each for point in found for each in point.warnings):
                        warn(console, warning)
                    return list(found)
    raise AssertionError("a job ends, or fails")


def train_cell(cell: Cell, path: Path, checks: bool, keep: bool, tell: Tell) -> None:
    """One run, in a process of its own."""
    began, config = time.monotonic(), cell.config
    caller = Caller({"train": lambda line: tell(line["update"]), "eval": lambda line: tell(line["update"])})
    here = config.model_copy(update={"output": str(path)})
    train(here, Screen(), name=cell.name, checks=checks, caller=caller)
    finish(path, config, began, keep=keep)


def run_cells(
    there: Sweep, todo: Sequence[SweepCell], at_a_time: int, console: Console, again: str
) -> list[tuple[SweepCell, str]]:
    """All of them, so many at a time; those that failed, and why."""
    board, failed = Board(there, todo, at_a_time), list[tuple[SweepCell, str]]()
    say, options = saying(console), (there.study.sweep.checks, there.study.sweep.keep)

    def job(cell: SweepCell) -> Job:
        emptied(cell)
        config = cell.cell.config
        work = partial(train_cell, cell.cell, cell.path, *options)
        return Job(cell.cell.name, work, cell.path / LOG, config.runtime.patience + LATE, key=cell)

    say(f"{len(todo)} of {len(there.cells)} cells to run, {at_a_time} at a time, in {there.path}")
    with ExitStack() as stack:
        live = Live(get_renderable=board.panel, console=console, refresh_per_second=2) if lively(console) else None
        if live:
            stack.enter_context(live)
        events = stack.enter_context(closing(run(map(job, todo), at_a_time, preload=PRELOAD)))
        try:
            for event in events:
                if event is None:
                    continue
                board.told(event)
                if event.kind == "failed":
                    failed.append((event.job.key, event.told))
                if event.kind in ("done", "failed"):
                    write_csv(there)
                    if not live:
                        say(board.line(event))
        except BaseException:
            if live:
                live.stop()
            written(there, say)
            say(f"stopped; {len(there.finished)} of {len(there.cells)} cells are finished; go on with: {again}")
            raise
    return failed


def written(there: Sweep, say: Callable[[str], None]) -> None:
    """The files of the rows, if there are any."""
    if not there.finished:
        return
    say(f"results: {write_csv(there)}")
    if (parquet := write_parquet(there)) is not None:
        say(f"results: {parquet}")
    else:
        say("results.parquet is not written, it needs pyarrow: pip install 'slipstream[data]'")
