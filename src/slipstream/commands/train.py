"""From a config to a run. Everything that can be wrong is found before a file is written."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from slipstream.commands.progress import Progress
from slipstream.config.file import load
from slipstream.config.schema import Config
from slipstream.engines.base import Engines
from slipstream.errors import EngineError, LearnerDied, RunDirError, Terminated, WorkerDied
from slipstream.metrics import digest, summary
from slipstream.pipeline.admission import Standing
from slipstream.pipeline.checkpoint import Checkpoints, newest
from slipstream.pipeline.restarts import Restarts
from slipstream.pipeline.run import Run
from slipstream.plan.checks import PROMPTS, quick, raised
from slipstream.plan.plan import Plan, plan
from slipstream.runlog import RunLog, check_free, read_lines, run_path
from slipstream.runtimes import inline, local
from slipstream.runtimes.local import Nursery

Home = Nursery | ExitStack
"""What outlives the engines of one part of a run, and serves those of the next."""
Part = Callable[[Restarts], None]
"""Of a run: from where it stands until it ends."""


def train(config: Config, console: Console, *, name: str, checks: bool = True) -> Path:
    """Run it all; returns the run directory."""
    path = run_path(config, name)
    check_free(path)
    with nursery(config) as born:
        made = plan(config)

        def begin(restarts: Restarts) -> None:
            with opened(made, born, console) as engines:
                if checks:
                    try_out(made, engines, console)
                with RunLog.create(made.config, path) as log:
                    go(made, engines, log, console, name=name, restarts=restarts)

        again = partial(go_on, made, born, path, console)
        see_through(begin, again, path, Restarts(config.runtime.restarts), console)
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
    newest(path)
    with nursery(config) as born:
        again = partial(go_on, plan(config), born, path, console)
        see_through(again, again, path, Restarts(config.runtime.restarts), console)
    return path


def go_on(made: Plan, born: Home, path: Path, console: Console, restarts: Restarts) -> None:
    checkpoint, standing = newest(path)
    with opened(made, born, console) as engines:
        in_flight = len(standing.in_flight)
        said = f"going on from {checkpoint}; {in_flight} groups that were in flight start again"
        console.print(said, highlight=False)
        with RunLog.reopen(made.config, path, update=standing.version, ended=standing.ended) as log:
            where: Any = {"standing": standing, "checkpoint": checkpoint}
            go(made, engines, log, console, name=path.name, restarts=restarts, **where)


def see_through(part: Part, again: Part, path: Path, restarts: Restarts, console: Console) -> None:
    """A part of a run, and another from its last checkpoint whenever its learner dies."""
    while True:
        try:
            return part(restarts)
        except LearnerDied as error:
            died = error
        try:
            newest(path)
        except RunDirError as none:
            raise EngineError(f"{died}; {none}") from None
        pause = restarts.granted("learner", time.monotonic())
        if pause is None:
            say_how_to_go_on(path, console)
            raise EngineError(f"the learner died{restarts.often('learner')}: {died}")
        said = f"{died}; the run goes back to its last checkpoint"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
        time.sleep(pause)
        part = again


def say_how_to_go_on(path: Path, console: Console) -> None:
    if saved := Checkpoints(path / "checkpoints", every=0, keep=1).existing():
        said = f"stopped; saved after update {saved[-1]}; go on with: slipstream resume {path}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)


def stopped_run(path: Path) -> Config:
    if not (path / "config.toml").exists():
        raise RunDirError(f"{path} holds no run: there is no config.toml in it")
    if (path / "final").exists():
        raise RunDirError(f"{path} is finished: the student is in {path / 'final'}")
    return load(path / "config.toml", [])


def nursery(config: Config) -> AbstractContextManager[Home]:
    """Where engines will be forked from, if they are: to be opened before anything here starts a thread."""
    return Nursery() if config.runtime.kind == "local" else ExitStack()


@contextmanager
def opened(made: Plan, born: Home, console: Console) -> Iterator[Engines]:
    """The engines, after what a person should know of the plan."""
    engines = open_engines(made, born, console)
    try:
        yield engines
    finally:
        engines.close()


def open_engines(made: Plan, born: Home, console: Console) -> Engines:

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    for warning in made.warnings:
        console.print(f"[yellow]warning:[/] {warning}", highlight=False)
    for note in (*made.notes, str(made.method)):
        say(note)
    match made.engines.runtime.kind:
        case "local":
            assert isinstance(born, Nursery)
            return local.open_engines(made.engines, made.tokenizer, nursery=born, say=say)
        case "ray":
            from slipstream.runtimes.ray import open_engines as open_on_ray

            assert isinstance(born, ExitStack)
            return open_on_ray(made.engines, made.tokenizer, home=born, say=say)
        case "inline":
            return inline.open_engines(made.engines, made.tokenizer, say=say)


def go(
    made: Plan,
    engines: Engines,
    log: RunLog,
    console: Console,
    *,
    name: str,
    restarts: Restarts,
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
        restarts=restarts,
        patience=made.config.runtime.patience,
        say=lambda text: console.print(text, highlight=False, markup=False),
    )

    async def main() -> None:
        run.task = asyncio.current_task()
        if checkpoint is not None:
            await engines.learner.restore(checkpoint)
        await run.train()

    began = run.admission.version
    with Progress(console, updates=made.config.updates, title=name, admission=run.admission) as progress:
        log.sinks.append(progress)
        try:
            runner = asyncio.Runner()
            with heeding_signals(run, console, runner.get_loop()) as told, runner:
                try:
                    runner.run(main())
                except asyncio.CancelledError:
                    raise told[0] from None
        except WorkerDied as error:  # who else dies is replaced while the run goes on, or ends it in words of its own
            raise LearnerDied(str(error)) from None
        except BaseException:
            progress.stop()
            say_how_to_go_on(log.path, console)
            raise
    for line in summary(digest(read_lines(log.path / "metrics.jsonl"), since=began)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def heeding_signals(run: Run, console: Console, loop: asyncio.AbstractEventLoop) -> Iterator[list[type[BaseException]]]:
    """Ctrl-C and SIGTERM stop in order, a second one at once; what they mean is told. Ctrl-\\ says who waits for whom,
    and stops nothing.

    Nothing is raised inside the loop, which would leave tasks behind. Set here, because Ray sets handlers of its own
    when it starts.
    """
    told: list[type[BaseException]] = []

    def stop(how: type[BaseException]) -> None:
        run.at_once = bool(told)
        told.append(how)
        run.stop()

    def heed(number: int, *what: Any) -> Any:
        return signal.signal(number, lambda *_: None if loop.is_closed() else loop.call_soon_threadsafe(*what))

    before = {
        signal.SIGINT: heed(signal.SIGINT, stop, KeyboardInterrupt),
        signal.SIGTERM: heed(signal.SIGTERM, stop, Terminated),
        signal.SIGQUIT: heed(signal.SIGQUIT, lambda: console.print(run.report(), highlight=False, markup=False)),
    }
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
