"""From a config to a run. Everything that can be wrong is found before a file is written."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slipstream.commands.progress import Progress
from slipstream.config.file import load
from slipstream.config.schema import Config, DataConfig
from slipstream.engines.base import Engines
from slipstream.engines.native import positions
from slipstream.engines.native.model import load_config
from slipstream.errors import ConfigError, DataError, RunDirError, Terminated
from slipstream.metrics import digest, summary
from slipstream.objective.method import Method, method_of
from slipstream.pipeline.admission import Standing
from slipstream.pipeline.checkpoint import newest
from slipstream.pipeline.run import Run
from slipstream.plan.checks import PROMPTS, quick, raised
from slipstream.plan.teachers import check_budget, check_endpoints, check_teachers, routes
from slipstream.records import Prompt
from slipstream.runlog import RunLog, check_free, check_trackers, read_lines, run_path
from slipstream.runtimes import inline
from slipstream.runtimes.build_vllm import sampler_context, vocabulary_of, with_vllm
from slipstream.tasks import rewards
from slipstream.tasks.chat import (
    Tokenizer,
    check_fits,
    check_ids,
    encode_rows,
    load_tokenizer,
)
from slipstream.tasks.data import Prompts, load_rows


@dataclass(frozen=True)
class Job:
    """A config whose files were read and found to fit together."""

    config: Config
    """With what only the files could tell: the longest sequence of every model."""
    method: Method
    tokenizer: Tokenizer
    prompts: Prompts
    held_out: list[Prompt]


def prepare(config: Config) -> Job:
    data, max_tokens = config.data, config.sampler.max_tokens
    check_trackers(config.log.to)
    method = method_of(config)
    if config.task.reward:
        rewards.check_installed(config.task.reward)
    tokenizer = load_tokenizer(config.student)
    rows = load_rows(data.train, split=data.split, limit=data.limit)
    if config.task.reward and any(row.ground_truth is None for row in rows):
        row = next(row for row in rows if row.ground_truth is None)
        raise ConfigError(
            f"task.reward = {config.task.reward!r} needs 'ground_truth' or 'answer'; {row.id} has neither"
        )
    tokens = encode_rows(rows, tokenizer, data)
    context = sampler_context(config)
    check_fits(rows, tokens, max_tokens=max_tokens, context=context, model=config.student)
    check_ids(rows, tokens, config.student, vocabulary_of(config.student))
    check_budget("learner", config.learner.token_budget, max(map(len, tokens)) + max_tokens)
    prompts = Prompts(rows, tokens, seed=config.seed, shuffle=data.shuffle, teachers=routes(config, rows))
    scored = check_teachers(config, tokenizer, prompts)
    held_out = held_out_prompts(config, tokenizer) if config.eval.every else []
    drawn = max(map(len, [*tokens, *(prompt.tokens for prompt in held_out)])) + max_tokens
    return Job(with_lengths(config, drawn, scored), method, tokenizer, prompts, held_out)


def with_lengths(config: Config, drawn: int, scored: Mapping[str, int]) -> Config:
    """The longest sequence that is drawn, and that each teacher scores, where the config does not say."""
    teachers = {
        name: teacher.model_copy(update={"longest": long_enough(f"teachers.{name}", teacher.longest, scored[name])})
        if name in scored
        else teacher
        for name, teacher in config.teachers.items()
    }
    sampler = config.sampler.model_copy(update={"longest": long_enough("sampler", config.sampler.longest, drawn)})
    return config.model_copy(update={"sampler": sampler, "teachers": teachers})


def long_enough(section: str, given: int | None, longest: int) -> int:
    if given is not None and given < longest:
        raise ConfigError(
            f"{section}.longest = {given} is less than the longest prompt and response of {longest} tokens: write "
            "that or more, or drop it"
        )
    return given or longest


def held_out_prompts(config: Config, tokenizer: Tokenizer) -> list[Prompt]:
    data, student = config.data, config.student
    assert data.eval is not None
    prompts = eval_prompts(
        tokenizer, data, data.eval, split=data.eval_split, limit=config.eval.prompts, seed=config.seed
    )
    tokens, context = [prompt.tokens for prompt in prompts], sampler_context(config)
    check_fits(prompts, tokens, max_tokens=config.sampler.max_tokens, context=context, model=student)
    check_ids(prompts, tokens, student, vocabulary_of(student))
    return prompts


def eval_prompts(
    tokenizer: Tokenizer, data: DataConfig, source: str, *, split: str, limit: int | None, seed: int
) -> list[Prompt]:
    """Prompts whose answers can be graded, in the order of the rows."""
    rows = load_rows(source, split=split, limit=limit)
    for row in rows:
        if row.ground_truth is None:
            raise DataError(f"{row.id}: has neither 'ground_truth' nor 'answer' to grade against")
    prompts = Prompts(rows, encode_rows(rows, tokenizer, data), seed=seed, shuffle=False)
    return [prompts.at(number) for number in range(len(rows))]


def train(config: Config, console: Console, *, name: str, checks: bool = True) -> Path:
    """Run it all; returns the run directory."""
    path = run_path(config, name)
    check_free(path)
    config = with_vllm(config, console.print)
    job = prepare(config)
    config = job.config
    warn(config, console)
    engines = open_engines(config, job, console)
    try:
        if checks:
            try_out(config, job, engines, console)
        with RunLog.create(config, path) as log:
            go(config, job, engines, log, console, name=name)
    finally:
        engines.close()
    return path


def try_out(config: Config, job: Job, engines: Engines, console: Console) -> None:
    """A few prompts, before anything is written."""
    prompts = [job.prompts.at(number) for number in range(PROMPTS)]
    findings = asyncio.run(quick(config, engines, prompts, version=0))
    raised(findings)
    for finding in findings:
        mark = "checked:" if finding.ok else "[yellow]warning:[/]"
        fix = f"; {finding.fix}" if finding.fix else ""
        console.print(f"{mark} {finding.name}: {finding.said}{fix}", highlight=False, soft_wrap=True)


def resume(path: Path, console: Console) -> Path:
    """Go on with a run from its last checkpoint."""
    config = with_vllm(stopped_run(path), console.print)
    checkpoint, standing = newest(path)
    job = prepare(config)
    config = job.config
    warn(config, console)
    engines = open_engines(config, job, console)
    in_flight = len(standing.in_flight)
    console.print(f"going on from {checkpoint}; {in_flight} groups that were in flight start again", highlight=False)
    try:
        with RunLog.reopen(config, path, update=standing.version, ended=standing.ended) as log:
            go(config, job, engines, log, console, name=path.name, standing=standing, checkpoint=checkpoint)
    finally:
        engines.close()
    return path


def stopped_run(path: Path) -> Config:
    if not (path / "config.toml").exists():
        raise RunDirError(f"{path} holds no run: there is no config.toml in it")
    if (path / "final").exists():
        raise RunDirError(f"{path} is finished: the student is in {path / 'final'}")
    return load(path / "config.toml", [])


def open_engines(config: Config, job: Job, console: Console) -> Engines:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    check_endpoints(config, job.tokenizer, job.prompts, say)
    say(str(job.method))
    for note in position_notes(config):
        say(note)

    match config.runtime.kind:
        case "ray":
            from slipstream.runtimes.ray import open_engines as open_on_ray

            return open_on_ray(config, job.tokenizer, say=say)
        case "inline":
            return inline.open_engines(config, job.tokenizer, say=say)


def position_notes(config: Config) -> list[str]:
    """Of every model that chooses its position factors by the length of what it sees."""
    models = {config.student: config.sampler.longest}
    models |= {config.model_of(t): t.longest for t in config.teachers.values() if t.base_url is None}
    notes = {name: positions.said(load_config(name), longest) for name, longest in models.items() if longest}
    return [f"{name}: {note}" for name, note in notes.items() if note]


def go(
    config: Config,
    job: Job,
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
        config,
        engines,
        job.prompts,
        log,
        held_out=job.held_out,
        standing=standing,
        patience=config.runtime.patience,
        say=lambda text: console.print(text, highlight=False, markup=False),
    )

    async def main() -> None:
        if checkpoint is not None:
            await engines.learner.restore(checkpoint)
        with heeding_signals(run, console):
            await run.train()

    began = run.admission.version
    with Progress(console, updates=config.updates, title=name, admission=run.admission) as progress:
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


def warn(config: Config, console: Console) -> None:
    for warning in warnings_of(config):
        console.print(f"[yellow]warning:[/] {warning}", highlight=False)


def warnings_of(config: Config) -> list[str]:
    found: list[str] = []
    if config.data.eval is not None and not config.eval.every:
        found.append("data.eval is not used: set eval.every to evaluate during training")
    if len(config.teachers) > 1 and not config.data.shuffle:
        found.append("several teachers and data.shuffle = false: updates may hold prompts of one of them only")
    if config.loss.weight and config.reference is not None:
        found.append("the teacher and the reference both pull at the student; drop [reference] if that is not meant")
    if config.learner.dtype == "bfloat16":
        found.append("learner.dtype = 'bfloat16' rounds small updates away: write compute_dtype = 'bfloat16' instead")
    return found
