"""From a config to a run. Everything that can be wrong is found before a file is written."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

from slipstream.commands.progress import Progress
from slipstream.config.file import load
from slipstream.config.schema import Config
from slipstream.engines.base import Engines
from slipstream.errors import RunDirError, Terminated
from slipstream.metrics import digest, summary
from slipstream.pipeline.admission import Standing
from slipstream.pipeline.checkpoint import newest
from slipstream.pipeline.run import Run
from slipstream.plan.checks import PROMPTS, quick, raised
from slipstream.plan.plan import Plan, plan
from slipstream.runlog import RunLog, check_free, read_lines, run_path
from slipstream.runtimes import inline, local
from slipstream.runtimes.local import Nursery


def train(config: Config, console: Console, *, name: str, checks: bool = True) -> Path:
    """Run it all; returns the run directory."""
    path = run_path(config, name)
    check_free(path)
    with nursery(config) as born:
        made = plan(config)
        with opened(made, born, console) as engines:
            if checks:
                try_out(made, engines, console)
            with RunLog.create(made.config, path) as log:
                go(made, engines, log, console, name=name)
    return path


def try_out(made: Plan, engines: Engines, console: Console) -> None:
    """A few prompts, before anything is written."""
    prompts = [made.prompts.at(number) for number in range(PROMPTS)]
    findings = asyncio.run(quick(made, engines, prompts, version=0))
    raised(findings)
    for finding in findings:
        mark = "checked:" if finding.ok else "[yellow]warning:[/]"
        fix = f"; {finding.fix}" if finding.fix else ""
        console.print(f"{mark} {finding.name}: {finding.said}{fix}", highlight=False, soft_wrap=True)


def resume(path: Path, console: Console) -> Path:
    """Go on with a run from its last checkpoint."""
    config = stopped_run(path)
    checkpoint, standing = newest(path)
    with nursery(config) as born:
        made = plan(config)
        with opened(made, born, console) as engines:
            in_flight = len(standing.in_flight)
            said = f"going on from {checkpoint}; {in_flight} groups that were in flight start again"
            console.print(said, highlight=False)
            with RunLog.reopen(made.config, path, update=standing.version, ended=standing.ended) as log:
                go(made, engines, log, console, name=path.name, standing=standing, checkpoint=checkpoint)
    return path


def stopped_run(path: Path) -> Config:
    if not (path / "config.toml").exists():
        raise RunDirError(f"{path} holds no run: there is no config.toml in it")
    if (path / "final").exists():
        raise RunDirError(f"{path} is finished: the student is in {path / 'final'}")
    return load(path / "config.toml", [])


def nursery(config: Config) -> AbstractContextManager[Nursery | None]:
    """Where engines will be forked from, if they are: to be opened before anything here starts a thread."""
    secrets = [teacher.api_key_env for teacher in config.teachers.values() if teacher.api_key_env is not None]
    return Nursery(secrets) if config.runtime.kind == "local" else nullcontext()


@contextmanager
def opened(made: Plan, born: Nursery | None, console: Console) -> Iterator[Engines]:
    """The engines, after what a person should know of the plan."""
    engines = open_engines(made, born, console)
    try:
        yield engines
    finally:
        engines.close()


def open_engines(made: Plan, born: Nursery | None, console: Console) -> Engines:

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    for warning in made.warnings:
        console.print(f"[yellow]warning:[/] {warning}", highlight=False)
    for note in (*made.notes, str(made.method)):
        say(note)
    match made.engines.runtime.kind:
        case "local":
            return local.open_engines(made.engines, made.tokenizer, nursery=born, say=say)
        case "ray":
            from slipstream.runtimes.ray import open_engines as open_on_ray

            return open_on_ray(made.engines, made.tokenizer, say=say)
        case "inline":
            return inline.open_engines(made.engines, made.tokenizer, say=say)


def go(
    made: Plan,
    engines: Engines,
    log: RunLog,
    console: Console,
    *,
    name: str,
    standing: Standing | None = None,
    checkpoint: Path | None = None,
) -> None:
    """From the first rollout to the last update, with a display, signals and a last line that says how to go on."""
    run = Run(
        made.config,
        engines,
        made.prompts,
        log,
        held_out=made.held_out,
        standing=standing,
        patience=made.config.runtime.patience,
        say=lambda text: console.print(text, highlight=False, markup=False),
    )

    async def main() -> None:
        if checkpoint is not None:
            await engines.learner.restore(checkpoint)
        with heeding_signals(run, console):
            await run.train()

    began = run.admission.version
    with Progress(console, updates=made.config.updates, title=name, admission=run.admission) as progress:
        log.sinks.append(progress)
        try:
            asyncio.run(main())
        except BaseException:
            progress.stop()
            if saved := run.checkpoints.existing():
                console.print(
                    f"stopped; saved after update {saved[-1]}; go on with: slipstream resume {log.path}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
            raise
    for line in summary(digest(read_lines(log.path / "metrics.jsonl"), since=began)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def heeding_signals(run: Run, console: Console) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop in order, a second one at once; Ctrl-\\ says who waits for whom, and stops nothing.

    Set here, because Ray sets handlers of its own when it starts.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told: list[type[BaseException]] = []

    def stop(how: type[BaseException]) -> None:
        if told:
            raise KeyboardInterrupt
        told.append(how)
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, stop, KeyboardInterrupt)
    loop.add_signal_handler(signal.SIGTERM, stop, Terminated)
    loop.add_signal_handler(signal.SIGQUIT, lambda: console.print(run.report(), highlight=False, markup=False))
    try:
        yield
    except asyncio.CancelledError:
        if told:
            raise told[0] from None
        raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            loop.remove_signal_handler(number)
