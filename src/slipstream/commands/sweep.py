"""`slipstream sweep`: run or continue all runs of a study, show their progress, and print a summary."""

import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.live import Live

from slipstream.commands.common import gpus_of
from slipstream.commands.config import shape_lines
from slipstream.console import Screen
from slipstream.errors import ConfigError, printable
from slipstream.plan.gpus import Gpus
from slipstream.run_dir.atomic_files import directory_lock, private
from slipstream.runs.display import is_live
from slipstream.runs.start import Caller, line_printer, train, warn
from slipstream.studies.board import Board, summary
from slipstream.studies.cells import Event, Job, Tell, run_jobs
from slipstream.studies.directory import (
    Checked,
    check_points,
    check_prompts,
    check_unchanged,
    clear_cell,
    directory_of,
    finish_cell,
    parallel_cells,
    removed_cells,
    write_csv,
    write_parquet,
    write_study,
)
from slipstream.studies.results import Sweep, SweepCell
from slipstream.studies.study import Cell, Study

PRELOAD = ("slipstream.runs.start", "slipstream.runtimes.inline")
CELL_LOG = "output.txt"
FILE_WIDTH = 200
"""Width in columns of a table if the console is no terminal."""
EXTRA_PATIENCE = 300.0
"""Seconds added to runtime.patience: after so long without a message, a cell counts as hanging."""


def run(args: Namespace) -> int:
    gpus = gpus_of(args)
    if args.shapes:
        for text in check_study_shapes(args.config, args.overrides, gpus):
            print(printable(text))
        return 0
    if gpus is not None:
        raise ConfigError("--gpus of a study goes with --shapes")
    return 0 if sweep(args.config, Screen(), args.overrides, jobs=args.jobs, check=args.check) else 1


def sweep(
    path: str | Path, console: Console, changes: Sequence[tuple[str, str]], *, jobs: int | None, check: bool
) -> bool:
    """Run all unfinished cells (runs of a study), or only check them if `check`; return True if none failed."""
    study = Study.load(path, changes)
    directory = directory_of(study, Path(path).stem)
    say = line_printer(console)
    for note in dict.fromkeys(study.notes):
        say(note)
    results = Sweep(directory, study)
    if check:
        check_unchanged(results)
        check_configs(study, console)
        for point in study.points:
            seeds = [f"{c.seed}{' (finished)' if c.finished else ''}" for c in results.cells if c.point is point]
            say(f"{point.name}: seed {', '.join(seeds)}")
        say(f"ok: {len(results.cells)} cells, {len(results.finished)} of them finished, in {directory}")
        return True
    try:
        with private(), directory_lock(directory):
            words = [word for key, text in changes for word in (f"--{key}", text)]
            words += ["--jobs", str(jobs)] if jobs else []
            return run_study(results, console, jobs, shlex.join(["slipstream", "sweep", str(path), *words]))
    finally:
        with suppress(OSError):  # remove the directory only if it is empty: no run was started
            directory.rmdir()


def check_study_shapes(path: str | Path, changes: Sequence[tuple[str, str]], gpus: Gpus | None) -> Iterator[str]:
    """Check every config of a study by the shapes of its models; yield the lines of each point."""
    for point in Study.load(path, changes).points:
        yield f"{point.name}:"
        yield from (f"  {text}" for text in shape_lines(point.config, gpus))


def run_study(results: Sweep, console: Console, jobs: int | None, resume_command: str) -> bool:
    study, say = results.study, line_printer(console)
    check_unchanged(results)
    if removed := removed_cells(results):
        say(f"{len(removed)} finished cells are not in the study any more and are left out: {removed[0]} …")
    todo, failed = [cell for cell in results.cells if not cell.finished], list[tuple[SweepCell, str]]()
    found = check_configs(study, console) if todo else []
    if found:
        check_prompts(results, found)
    write_study(study, results.path)
    if todo:
        cores = len(os.sched_getaffinity(0))
        at_a_time = jobs or study.sweep.jobs or parallel_cells(study.points, found, cores)
        failed = run_cells(results, todo, at_a_time, console, resume_command)
    for line in summary(results):
        width = None if console.is_terminal else FILE_WIDTH
        console.print(line, markup=False, width=width, soft_wrap=isinstance(line, str))
    write_results(results, say)
    for cell, why in failed:
        warn(console, f"{cell.name} failed: {why}; {cell.path / CELL_LOG}")
    if failed:
        say(f"{len(failed)} of {len(todo)} cells failed; run them again with: {resume_command}")
    return not failed


def check_configs(study: Study, console: Console) -> list[Checked]:
    """Plan every point of the study in a separate process that imports model libraries; print each warning once."""
    with ExitStack() as stack:
        log = Path(stack.enter_context(TemporaryDirectory())) / CELL_LOG
        job = Job("check", partial(check_points, study.points, study.where), log, patience=EXTRA_PATIENCE)
        doing = f"checking {len(study.points)} configs"
        status = stack.enter_context(console.status(doing)) if is_live(console) else None
        for event in stack.enter_context(closing(run_jobs([job], 1, preload=PRELOAD))):
            match event:
                case Event(kind="moved", value=number) if status:
                    status.update(f"{doing}: {number + 1}")
                case Event(kind="failed", value=why):
                    if "Traceback" in (text := log.read_text()):  # an unexpected error
                        print(printable(text), file=sys.stderr)
                    raise ConfigError(why)
                case Event(kind="done", value=found):
                    for warning in dict.fromkeys(each for point in found for each in point.warnings):
                        warn(console, warning)
                    return list(found)
    raise AssertionError("a job ends or fails")


def train_cell(cell: Cell, path: Path, checks: bool, keep: bool, tell: Tell) -> None:
    """Train one cell (one run) of a study; called in a separate process."""
    began, config = time.monotonic(), cell.config
    caller = Caller({"train": lambda line: tell(line["update"]), "eval": lambda line: tell(line["update"])})
    train(config.with_values(output=str(path)), Screen(), name=cell.name, checks=checks, caller=caller)
    finish_cell(path, config, began, keep=keep)


def run_cells(
    results: Sweep, todo: Sequence[SweepCell], at_a_time: int, console: Console, resume_command: str
) -> list[tuple[SweepCell, str]]:
    """Run the cells, `at_a_time` in parallel; return those that failed, with the cause."""
    board, failed = Board(results, todo, at_a_time), list[tuple[SweepCell, str]]()
    say, options = line_printer(console), (results.study.sweep.checks, results.study.sweep.keep)

    def job(cell: SweepCell) -> Job:
        clear_cell(cell)
        config = cell.config
        work = partial(train_cell, cell, cell.path, *options)
        return Job(cell.name, work, cell.path / CELL_LOG, config.runtime.patience + EXTRA_PATIENCE, key=cell)

    say(f"{len(todo)} of {len(results.cells)} cells to run, {at_a_time} at a time, in {results.path}")
    with ExitStack() as stack:
        live = Live(get_renderable=board.panel, console=console, refresh_per_second=2) if is_live(console) else None
        if live:
            stack.enter_context(live)
        events = stack.enter_context(closing(run_jobs(map(job, todo), at_a_time, preload=PRELOAD)))
        try:
            for event in events:
                if event is None:
                    continue
                board.handle(event)
                if event.kind == "failed":
                    failed.append((event.job.key, event.value))
                if event.kind in ("done", "failed"):
                    write_csv(results)
                    if not live:
                        say(board.line(event))
        except BaseException:
            if live:
                live.stop()
            write_results(results, say)
            finished = f"{len(results.finished)} of {len(results.cells)} cells are finished"
            say(f"stopped; {finished}; continue with: {resume_command}")
            raise
    return failed


def write_results(results: Sweep, say: Callable[[str], None]) -> None:
    if not results.finished:
        return
    say(f"results: {write_csv(results)}")
    if (parquet := write_parquet(results)) is not None:
        say(f"results: {parquet}")
    else:
        say("results.parquet is not written, it needs pyarrow: pip install 'slipstream[data]'")
