"""`slipstream train` and `slipstream resume`: from a config to a run. Errors are found before a file is written."""

import asyncio
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from slipstream.config.schema import Config
from slipstream.errors import EngineError, HungUp, LearnerDied, RunDirError, Stalled, Terminated, WorkerDied
from slipstream.metrics import digest, summary
from slipstream.pipeline.checkpoint import BEGINNING, Checkpoint, Checkpoints, RunState, newest
from slipstream.pipeline.ending import with_timeout
from slipstream.pipeline.failures import Restarts
from slipstream.pipeline.run import Run, admission_of, choice_of
from slipstream.plan.checks import first_prompts, raise_fatal, start_checks
from slipstream.plan.engine_plans import EnvironmentPlan
from slipstream.plan.plan import Plan, fast_checks, plan, plan_with_texts
from slipstream.plan.rules.machine import check_sizes
from slipstream.processes import leave_closed_terminal
from slipstream.protocols import Engines
from slipstream.reporting.terminal.progress import from_to
from slipstream.run_dir.atomic_files import directory_lock, private
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
from slipstream.runs.control_socket import scale_server
from slipstream.runs.display import Progress, waiting
from slipstream.runs.planner_process import planned
from slipstream.runtimes import local
from slipstream.runtimes.local import ProcessLauncher
from slipstream.simulation.virtual_clock import Deadlock, ModelledLoop

TOKEN = "gateway.token"
"""Name of the file, in a run directory, that has the access token of the gateway."""
IMPORTING = "checking the config and importing its own functions, at most 120 s each"
Home = ProcessLauncher | ExitStack
"""Owner of resources that engines need and that survive a restart of the engines."""


class Enough(Exception):
    """Raised by a callback on metrics to stop the run, which then ends without an error and can be resumed."""


class Caller:
    """The Python code that started a run: its callbacks for metrics lines, and a way to stop from any thread."""

    def __init__(self, callbacks: Mapping[str, Callable[[dict[str, Any]], None]] | None = None) -> None:
        self.callbacks = callbacks or {}
        self.stopped = False
        self._stop_run: Callable[[], None] | None = None

    def stop(self) -> None:
        """Stop the run as Ctrl-C does, now or as soon as it has started."""
        self.stopped = True
        if self._stop_run is not None:
            self._stop_run()

    @contextmanager
    def connected(self, stop_run: Callable[[], None]) -> Iterator[None]:
        """Let `stop` call `stop_run` in this context."""
        self._stop_run = stop_run
        if self.stopped:
            stop_run()
        try:
            yield
        finally:
            self._stop_run = None


NOBODY = Caller()


def train(config: Config, console: Console, *, name: str, checks: bool = True, caller: Caller = NOBODY) -> Path:
    path = run_path(config, name)
    check_free(path)
    with waiting(console, IMPORTING):
        fast_checks(config)
    with private(), process_launcher(config) as launcher, ExitStack() as lock:
        start = Start(planned_on(console, config, launcher, checks=checks), launcher, path, name, console, caller)

        def begin() -> None:
            with opened(start.plan, launcher, console) as engines:
                if checks:
                    run_start_checks(start.plan, engines, console)
                lock.enter_context(directory_lock(path))
                with RunLog.create(start.plan.config, path, prompts=start.plan.prompts.digest) as log:
                    start.loop(engines, log)

        start.with_restarts(begin)
    return path


def planned_on(console: Console, config: Config, launcher: Home, *, checks: bool = False) -> Plan:
    """Make the plan; with `checks`, also the texts that teachers score before the run."""
    more = ", scoring known texts by a forward pass of each teacher" if checks and config.teachers else ""
    with waiting(console, f"importing libraries, reading data and tokenizers{more}"):
        return planned(partial(plan_with_texts if checks else plan, config), launcher, say=line_printer(console))


def run_start_checks(made: Plan, engines: Engines, console: Console) -> None:
    """Test the engines on a few prompts, before any file is written; raise if training could not work."""
    prompts = first_prompts(made)
    with waiting(console, "testing the engines on a few prompts"):
        findings = asyncio.run(start_checks(made, engines, prompts, version=0))
    raise_fatal(findings)
    for finding in findings:
        text = f"{finding.name}: {finding.detail}" + (f"; {finding.fix}" if finding.fix else "")
        if finding.ok:
            line_printer(console)(f"checked: {text}")
        else:
            warn(console, text)


def warn(console: Console, text: str) -> None:
    console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def resume(
    path: Path,
    console: Console,
    *,
    number: int | None = None,
    updates: int | None = None,
    accepted: tuple[str, ...] = (),
    caller: Caller = NOBODY,
) -> Path:
    """Continue a run from a checkpoint; `accepted` are the settings that may differ in its config.toml."""
    config = RunDir(path).config
    if (path / "final").exists() and number is None and (updates or 0) <= config.updates:
        raise RunDirError(
            f"{path} is finished: the student is in {path / 'final'}; to extend, write --updates above {config.updates}"
        )
    if updates is not None:
        config, accepted = RunDir(path).config_with(("updates", str(updates))), (*accepted, "updates")
    check_unchanged(path, config, accepted=accepted)  # before user code is imported
    with waiting(console, IMPORTING):
        fast_checks(config)
    with private(), process_launcher(config) as launcher, directory_lock(path):
        checkpoint = newest(path, number, proof=config.health.proof, say=line_printer(console))
        check_lines(path, checkpoint.mark)
        made, state = planned_on(console, config, launcher), checkpoint.state
        check_prompts(path, made.config, made.prompts.digest, accepted=accepted)
        admission_of(made.config, choice_of(made.config, made.prompts, state.choice), state.admission)
        if config.reuse is not None and (changed := state.changed(made.config, made.prompts.digest)):
            raise RunDirError(
                f"{checkpoint.path} has samples that [reuse] learns from again, and {changed[0]} was changed since "
                "they were drawn: put it back, or begin a new run"
            )
        start = Start(made, launcher, path, path.name, console, caller)
        start.with_restarts(partial(start.continue_from, checkpoint))
    return path


@dataclass
class Start:
    """A run that begins or continues, and begins again from its last checkpoint whenever its learner dies."""

    plan: Plan
    launcher: Home
    path: Path
    title: str
    console: Console
    caller: Caller

    def __post_init__(self) -> None:
        self.restarts = Restarts(self.plan.config.runtime.restarts)
        self.say = line_printer(self.console)

    def with_restarts(self, part: Callable[[], None]) -> None:
        """Call `part`, which runs until the run ends or the learner dies; then continue from the last checkpoint."""
        while True:
            try:
                return part()
            except Enough:
                return None
            except LearnerDied as error:
                died = error
            try:
                checkpoint = newest(self.path, proof=self.plan.config.health.proof, say=self.say)
            except RunDirError as none:
                raise EngineError(f"{died}; {none}") from None
            pause = self.restarts.grant("learner", time.monotonic())
            if pause is None:
                print_resume_command(self.path, self.plan.config, self.console)
                raise EngineError(f"the learner died{self.restarts.describe('learner')}: {died}")
            self.say(f"{died}; the run restarts from its last checkpoint")
            time.sleep(pause)
            part = partial(self.continue_from, checkpoint)

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; when the learner has loaded it, delete later checkpoints and log lines."""
        config = self.plan.config
        try:
            with opened(self.plan, self.launcher, self.console) as engines:
                reading = checkpoint.restore(engines.learner)
                with waiting(self.console, f"reading {checkpoint.path}"):
                    state = asyncio.run(with_timeout(reading, config.runtime.patience, f"reading {checkpoint.path}"))
                go_on = "continue"
                if changed := state.changed(config, self.plan.prompts.digest):
                    go_on = f"begin again, because {changed[0]} was changed"
                    totals = checkpoint.mark["last"]
                    totals["thrown_tokens"] = totals.get("thrown_tokens", 0.0) + state.tokens
                    state = state.with_groups_begun_again(changed)
                self.say(
                    f"continuing from {checkpoint.path}; {len(state.admission.in_flight)} groups in flight {go_on}"
                )
                # before log lines are deleted, because later checkpoints need those lines
                Checkpoints(self.path / "checkpoints").forget_after(state.admission.version)
                with RunLog.reopen(config, self.path, checkpoint.mark, prompts=self.plan.prompts.digest) as log:
                    self.loop(engines, log, state)
        except WorkerDied as error:  # the learner, or any worker while it is loaded
            raise LearnerDied(str(error)) from None

    def loop(self, engines: Engines, log: RunLog, state: RunState = BEGINNING) -> None:
        """Run the training loop with display and signal handlers; at the end print a summary, or how to continue."""
        made, config = self.plan, self.plan.config
        modelled = made.engines.costs is not None
        announce_gateways(made.engines.sampler.environments, log.path, self.say)
        run = Run(
            config,
            engines,
            made.prompts,
            log,
            state=state,
            held_out=made.held_out,
            ends=made.end_ids,
            restarts=self.restarts,
            patience=None if modelled else config.runtime.patience,
            whole_batches=made.whole_batches,
            say=self.say,
        )

        scaling = partial(scale_server, log.path, partial(run.scale, check=partial(check_sizes, config)), run.say)

        async def main() -> None:
            async with nullcontext() if modelled else scaling():
                run.task = asyncio.current_task()  # only now: `train` saves a checkpoint when the task is cancelled
                if stop_reasons:
                    run.stop()
                await run.train()

        began = run.admission.version
        progress = Progress(
            self.console,
            updates=config.updates,
            title=self.title,
            admission=run.admission,
            evaluates=bool(made.held_out),
            before=log.time,
        )
        with progress:
            progress.recall(read_lines(log.path / "metrics.jsonl"))
            log.sinks.append(progress)
            log.callbacks = self.caller.callbacks
            try:
                runner = asyncio.Runner(loop_factory=ModelledLoop if modelled else None)
                with stoppable(run, self.console, runner.get_loop(), self.caller) as stop_reasons, runner:
                    try:
                        runner.run(main())
                    except asyncio.CancelledError:
                        raise stop_reasons[0] from None
                    except Deadlock as error:
                        raise Stalled(f"{error}\n{run.report()}") from None
            except WorkerDied as error:  # the learner; the run replaces other workers, or ends with an error of its own
                raise LearnerDied(str(error)) from None
            except BaseException:
                progress.stop()
                print_resume_command(log.path, config, self.console)
                raise
        lines = read_lines(log.path / "metrics.jsonl")
        for line in filter(None, (from_to(lines), *summary(digest(lines, since=began), resumed=began > 0))):
            self.say(line)


def print_resume_command(path: Path, config: Config, console: Console) -> None:
    if saved := resumable(path / "checkpoints", config.health.proof):
        line_printer(console)(
            f"stopped; saved after update {saved[-1]}; continue with: slipstream resume {shlex.quote(str(path))}"
        )


def line_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints plain lines, without markup and without inserted line breaks."""
    return partial(console.print, markup=False, soft_wrap=True)


def process_launcher(config: Config) -> AbstractContextManager[Home]:
    """Return the launcher from which local engines are forked; open it before this process starts any thread."""
    endpoints = [*config.teachers.values(), config.sampler.server]
    secrets = [each.api_key_env for each in endpoints if each is not None and each.api_key_env is not None]
    return ProcessLauncher(secrets, config.runtime.heartbeat) if config.runtime.kind == "local" else ExitStack()


@contextmanager
def opened(made: Plan, launcher: Home, console: Console) -> Iterator[Engines]:
    engines = open_engines(made, launcher, console)
    try:
        yield engines
    finally:
        engines.close()


def open_engines(made: Plan, launcher: Home, console: Console) -> Engines:
    say = line_printer(console)
    for warning in made.warnings:
        warn(console, warning)
    for note in (*made.notes, str(made.method)):
        say(note)
    with waiting(console, "starting engines") as still:
        match made.engines.runtime.kind:
            case "local":
                assert isinstance(launcher, ProcessLauncher)
                return local.open_engines(made.engines, made.tokenizer, launcher=launcher, say=say, still=still)
            case "ray":
                from slipstream.runtimes.ray import open_engines as open_on_ray

                assert isinstance(launcher, ExitStack)
                return open_on_ray(made.engines, made.tokenizer, home=launcher, say=say, still=still)
            case "inline":
                from slipstream.runtimes.inline import open_engines as open_here

                return open_here(made.engines, made.tokenizer, say=say)


def announce_gateways(
    environments: Mapping[str, EnvironmentPlan], directory: Path | None, say: Callable[[str], object]
) -> None:
    """Print address and access token of gateways for agents started elsewhere; write the token to a file, too."""
    for name, environment in environments.items():
        if environment.gateway is None or environment.gateway.agent is not None:
            continue
        port, token = environment.gateway, environment.gateway.token
        host = f"[{port.host}]" if ":" in port.host else port.host
        whose = f" of {name}" if name else ""
        text = f"agents take episodes{whose} at http://{host}:{port.port}/sessions with the token {token}"
        if directory is not None:
            file = directory / TOKEN
            file.unlink(missing_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                opened.write(f"{token}\n")
            text = f"{text}, which is also in {file}"
        say(text)


@contextmanager
def stoppable(
    run: Run, console: Console, loop: asyncio.AbstractEventLoop, caller: Caller
) -> Iterator[list[type[BaseException]]]:
    """Handle signals while the run is active; yield a list that collects an exception type for each stop signal.

    The first Ctrl-C, SIGTERM or SIGHUP stops the run and saves a checkpoint; the second stops without saving. SIGQUIT
    prints a report of what each stage waits for. Outside the main thread no signal is handled. Under nohup, SIGHUP is
    ignored. Handlers do not raise inside the event loop, because tasks would stay. They replace handlers set by Ray.
    """
    stop_reasons: list[type[BaseException]] = []

    def stop(how: type[BaseException]) -> None:
        run.at_once = bool(stop_reasons)
        stop_reasons.append(how)
        if how is HungUp:
            leave_closed_terminal()
        run.stop()

    def later(what: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(what)

    handlers: dict[int, Callable[[], None]] = {
        signal.SIGINT: partial(stop, KeyboardInterrupt),
        signal.SIGTERM: partial(stop, Terminated),
        signal.SIGHUP: partial(stop, HungUp),
        signal.SIGQUIT: lambda: console.print(run.report(), markup=False),
    }
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        del handlers[signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        handlers.clear()
    before = {number: signal.signal(number, lambda *_, what=what: later(what)) for number, what in handlers.items()}
    try:
        with caller.connected(partial(later, partial(stop, KeyboardInterrupt))):
            yield stop_reasons
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
