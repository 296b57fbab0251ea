"""From a config to a run. Everything that can be wrong is found before a file is written."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from slipstream.config.schema import Config
from slipstream.errors import EngineError, HungUp, LearnerDied, RunDirError, Terminated, WorkerDied
from slipstream.linux import let_go_of_terminal
from slipstream.metrics import digest, summary
from slipstream.pipeline.admission import Standing
from slipstream.pipeline.checkpoint import Checkpoint, Checkpoints, newest
from slipstream.pipeline.restarts import Restarts
from slipstream.pipeline.run import Run, admission_of, in_time
from slipstream.plan.checks import PROMPTS, quick, raised
from slipstream.plan.engines import EnvironmentPlan
from slipstream.plan.plan import Plan, at_a_glance, check_sizes, plan
from slipstream.protocols import Engines
from slipstream.records import Group
from slipstream.reporting.terminal.readings import from_to
from slipstream.run_dir.atomic_files import alone_in, private
from slipstream.run_dir.formats import resumable
from slipstream.run_dir.reading import RunDir
from slipstream.run_dir.writing import (
    RunLog,
    check_free,
    check_lines,
    check_prompts,
    check_unchanged,
    read_lines,
    run_path,
)
from slipstream.runs.control_socket import reachable
from slipstream.runs.display import Progress, waiting
from slipstream.runs.planner_process import planned
from slipstream.runtimes import local
from slipstream.runtimes.local import Nursery

TOKEN = "gateway.token"
"""The file with the token of a run's gateway."""
Home = Nursery | ExitStack
"""What outlives the engines of one part of a run, and serves those of the next."""
Part = Callable[[Restarts], None]
"""Of a run: from where it stands until it ends."""


class Enough(Exception):
    """Whoever is told of a run's lines wants no more of them: it ends as if it had been stopped, without an error."""


class Caller:
    """Who called from Python: is told of lines of the metrics, by their kind, and may stop it from another thread."""

    def __init__(self, heard: Mapping[str, Callable[[dict[str, Any]], None]] | None = None) -> None:
        self.heard = heard or {}
        self.asked = False
        self._way: Callable[[], None] | None = None

    def stop(self) -> None:
        """As Ctrl-C does; as soon as there is something to stop."""
        self.asked = True
        if self._way is not None:
            self._way()

    @contextmanager
    def reaching(self, way: Callable[[], None]) -> Iterator[None]:
        self._way = way
        if self.asked:
            way()
        try:
            yield
        finally:
            self._way = None


NOBODY = Caller()


def train(config: Config, console: Console, *, name: str, checks: bool = True, caller: Caller = NOBODY) -> Path:
    """Run it all; returns the run directory."""
    path = run_path(config, name)
    check_free(path)
    at_a_glance(config)
    with private(), nursery(config) as born, ExitStack() as lock:
        made = planned_on(console, config, born)

        def begin(restarts: Restarts) -> None:
            with opened(made, born, console) as engines:
                if checks:
                    try_out(made, engines, console)
                lock.enter_context(alone_in(path))
                with RunLog.create(made.config, path, prompts=made.prompts.digest) as log:
                    go(made, engines, log, console, name=name, restarts=restarts, caller=caller)

        see_through(begin, made, born, path, console, caller)
    return path


def planned_on(console: Console, config: Config, born: Home) -> Plan:
    with waiting(console, "importing libraries, reading data and tokenizers"):
        return planned(partial(plan, config), born, say=saying(console))


def try_out(made: Plan, engines: Engines, console: Console) -> None:
    """A few prompts, before anything is written."""
    prompts = [made.prompts.at(number) for number in range(PROMPTS)]
    with waiting(console, "trying a few prompts: do the engines agree?"):
        findings = asyncio.run(quick(made, engines, prompts, version=0))
    raised(findings)
    for finding in findings:
        said = f"{finding.name}: {finding.said}" + (f"; {finding.fix}" if finding.fix else "")
        if finding.ok:
            saying(console)(f"checked: {said}")
        else:
            warn(console, said)


def warn(console: Console, said: str) -> None:
    console.print(f"[yellow]warning:[/] {escape(said)}", highlight=False, soft_wrap=True)


def resume(
    path: Path,
    console: Console,
    *,
    number: int | None = None,
    updates: int | None = None,
    meant: tuple[str, ...] = (),
    caller: Caller = NOBODY,
) -> Path:
    """Go on with a run from a checkpoint; `meant` are settings that its config.toml may have changed."""
    config = stopped_run(path, number=number, updates=updates)
    if updates is not None:
        config, meant = RunDir(path).config_with(("updates", str(updates))), (*meant, "updates")
    check_unchanged(path, config, meant=meant)  # before anything of the user's is imported
    at_a_glance(config)
    with private(), nursery(config) as born, alone_in(path):
        checkpoint = newest(path, number, proof=config.health.proof, say=saying(console))
        check_lines(path, checkpoint.mark)
        made = planned_on(console, config, born)
        check_prompts(path, made.config, made.prompts.digest, meant=meant)
        admission_of(made.config, made.prompts, checkpoint.standing)
        again = partial(go_on, made, born, path, console, caller, checkpoint)
        see_through(again, made, born, path, console, caller)
    return path


def go_on(
    made: Plan,
    born: Home,
    path: Path,
    console: Console,
    caller: Caller,
    checkpoint: Checkpoint,
    restarts: Restarts,
) -> None:
    """From a checkpoint. What came later is forgotten once the learner has it."""
    try:
        with opened(made, born, console) as engines:
            reading = engines.learner.restore(checkpoint.path)
            with waiting(console, f"reading {checkpoint.path}"):
                groups = asyncio.run(in_time(reading, made.config.runtime.patience, f"reading {checkpoint.path}"))
            in_flight = len(checkpoint.standing.in_flight)
            saying(console)(f"going on from {checkpoint.path}; {in_flight} groups that were in flight go on")
            # before the lines that they need
            Checkpoints(path / "checkpoints").forget_after(checkpoint.standing.version)
            with RunLog.reopen(made.config, path, checkpoint.mark, prompts=made.prompts.digest) as log:
                where: Any = {"standing": checkpoint.standing, "groups": groups, "attempts": checkpoint.attempts}
                where["canaries"] = checkpoint.canaries
                go(made, engines, log, console, name=path.name, restarts=restarts, caller=caller, **where)
    except WorkerDied as error:  # any of them, while it is loaded, or the learner
        raise LearnerDied(str(error)) from None


def see_through(part: Part, made: Plan, born: Home, path: Path, console: Console, caller: Caller) -> None:
    """A part of a run, and another from its last checkpoint whenever its learner dies."""
    restarts = Restarts(made.config.runtime.restarts)
    while True:
        try:
            return part(restarts)
        except Enough:
            return None
        except LearnerDied as error:
            died = error
        try:
            checkpoint = newest(path, proof=made.config.health.proof, say=saying(console))
        except RunDirError as none:
            raise EngineError(f"{died}; {none}") from None
        pause = restarts.granted("learner", time.monotonic())
        if pause is None:
            say_how_to_go_on(path, made.config, console)
            raise EngineError(f"the learner died{restarts.often('learner')}: {died}")
        saying(console)(f"{died}; the run goes back to its last checkpoint")
        time.sleep(pause)
        part = partial(go_on, made, born, path, console, caller, checkpoint)


def say_how_to_go_on(path: Path, config: Config, console: Console) -> None:
    if saved := resumable(path / "checkpoints", config.health.updates):
        saying(console)(f"stopped; saved after update {saved[-1]}; go on with: slipstream resume {path}")


def saying(console: Console) -> Callable[[str], None]:
    """Plain lines, which a terminal wraps and nobody else does."""
    return partial(console.print, highlight=False, markup=False, soft_wrap=True)


def stopped_run(path: Path, *, number: int | None, updates: int | None) -> Config:
    config = RunDir(path).config
    if (path / "final").exists() and number is None and (updates or 0) <= config.updates:
        raise RunDirError(
            f"{path} is finished: the student is in {path / 'final'}; --updates with more than {config.updates} goes on"
        )
    return config


def nursery(config: Config) -> AbstractContextManager[Home]:
    """Where engines will be forked from, if they are: to be opened before anything here starts a thread."""
    secrets = [teacher.api_key_env for teacher in config.teachers.values() if teacher.api_key_env is not None]
    return Nursery(secrets, config.runtime.heartbeat) if config.runtime.kind == "local" else ExitStack()


@contextmanager
def opened(made: Plan, born: Home, console: Console) -> Iterator[Engines]:
    """The engines, after what a person should know of the plan."""
    engines = open_engines(made, born, console)
    try:
        yield engines
    finally:
        engines.close()


def open_engines(made: Plan, born: Home, console: Console) -> Engines:
    say = saying(console)
    for warning in made.warnings:
        warn(console, warning)
    for note in (*made.notes, str(made.method)):
        say(note)
    with waiting(console, "starting engines") as still:
        match made.engines.runtime.kind:
            case "local":
                assert isinstance(born, Nursery)
                return local.open_engines(made.engines, made.tokenizer, nursery=born, say=say, still=still)
            case "ray":
                from slipstream.runtimes.ray import open_engines as open_on_ray

                assert isinstance(born, ExitStack)
                return open_on_ray(made.engines, made.tokenizer, home=born, say=say, still=still)
            case "inline":
                from slipstream.runtimes.inline import open_engines as open_here

                return open_here(made.engines, made.tokenizer, say=say)


def go(
    made: Plan,
    engines: Engines,
    log: RunLog,
    console: Console,
    *,
    name: str,
    restarts: Restarts,
    caller: Caller,
    standing: Standing | None = None,
    groups: Sequence[Group] = (),
    attempts: Mapping[str, Any] | None = None,
    canaries: Mapping[str, Any] | None = None,
) -> None:
    """From the first rollout to the last update, with a display, signals and a last line that says how to go on."""
    invite(made.engines.sampler.environment, log.path, saying(console))
    run = Run(
        made.config,
        engines,
        made.prompts,
        log,
        held_out=made.held_out,
        standing=standing,
        groups=groups,
        attempts=attempts,
        canaries=canaries,
        ends=made.end_ids,
        restarts=restarts,
        patience=made.config.runtime.patience,
        say=saying(console),
    )

    async def main() -> None:
        run.task = asyncio.current_task()
        if told:
            run.stop()
        async with reachable(log.path, partial(run.scale, check=partial(check_sizes, made.config)), run.say):
            await run.train()

    began = run.admission.version
    progress = Progress(
        console,
        updates=made.config.updates,
        title=name,
        admission=run.admission,
        evaluates=bool(made.held_out),
    )
    with progress:
        progress.recall(read_lines(log.path / "metrics.jsonl"))
        log.sinks.append(progress)
        log.heard = caller.heard
        try:
            runner = asyncio.Runner()
            with stoppable(run, console, runner.get_loop(), caller) as told, runner:
                try:
                    runner.run(main())
                except asyncio.CancelledError:
                    raise told[0] from None
        except WorkerDied as error:  # who else dies is replaced while the run goes on, or ends it in words of its own
            raise LearnerDied(str(error)) from None
        except BaseException:
            progress.stop()
            say_how_to_go_on(log.path, made.config, console)
            raise
    lines = read_lines(log.path / "metrics.jsonl")
    for line in filter(None, (from_to(lines), *summary(digest(lines, since=began)))):
        saying(console)(line)


def invite(there: EnvironmentPlan | None, directory: Path | None, say: Callable[[str], object]) -> None:
    """Tell agents that are started elsewhere where to take episodes, and by which token; leave that in a file, too."""
    if there is None or there.gateway is None or there.gateway.agent is not None:
        return
    port, token = there.gateway, there.gateway.token
    host = f"[{port.host}]" if ":" in port.host else port.host
    said = f"agents take episodes at http://{host}:{port.port}/sessions with the token {token}"
    if directory is not None:
        file = directory / TOKEN
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(f"{token}\n")
        said = f"{said}, which is also in {file}"
    say(said)


@contextmanager
def stoppable(
    run: Run, console: Console, loop: asyncio.AbstractEventLoop, caller: Caller
) -> Iterator[list[type[BaseException]]]:
    """Ctrl-C, SIGTERM and SIGHUP stop in order, a second one at once; what they mean is told. Ctrl-\\ says who waits
    for whom, and stops nothing. In a thread that gets no signals, whoever called it stops the run.

    Nothing is raised inside the loop, which would leave tasks behind. Set here, because Ray sets handlers of its own
    when it starts. Under nohup, SIGHUP stays ignored.
    """
    told: list[type[BaseException]] = []

    def stop(how: type[BaseException]) -> None:
        run.at_once = bool(told)
        told.append(how)
        if how is HungUp:
            let_go_of_terminal()
        run.stop()

    def later(what: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(what)

    heeded: dict[int, Callable[[], None]] = {
        signal.SIGINT: partial(stop, KeyboardInterrupt),
        signal.SIGTERM: partial(stop, Terminated),
        signal.SIGHUP: partial(stop, HungUp),
        signal.SIGQUIT: lambda: console.print(run.report(), highlight=False, markup=False),
    }
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        del heeded[signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        heeded.clear()
    before = {number: signal.signal(number, lambda *_, what=what: later(what)) for number, what in heeded.items()}
    try:
        with caller.reaching(partial(later, partial(stop, KeyboardInterrupt))):
            yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
