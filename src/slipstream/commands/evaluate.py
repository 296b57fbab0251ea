"""`slipstream eval`: accuracy of a saved model (avg@n, pass@k, greedy), with the sampler and grader of training.

For the model of a run, the defaults are the run's settings, and results are appended to the run's eval.jsonl.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from slipstream.config.file import data_section
from slipstream.config.schema import DataConfig, name_of
from slipstream.data.prompts import check_columns_used, load_rows
from slipstream.data.sources import has_splits
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.config import check_there
from slipstream.errors import ConfigError, RunDirError, printable
from slipstream.metrics import Metrics, avg_at_n, pass_at_k, sample_metrics, standard_error
from slipstream.pipeline.evaluate import answers, correctness
from slipstream.plan.adapters import check_adapter
from slipstream.plan.environment import tools_of
from slipstream.plan.evaluation import EvalSettings, Evaluation, eval_prompts, evaluation, graded_rows
from slipstream.plan.placement import check_alone
from slipstream.plan.plan import end_ids
from slipstream.plan.subject import EvaluatedModel, check_known, evaluated_model
from slipstream.protocols import Graded, Sampling
from slipstream.records import Handle
from slipstream.rewards.functions import APART
from slipstream.rewards.grading import PoolGrader, needs
from slipstream.run_dir.atomic_files import append
from slipstream.run_dir.writing import EVALS, as_lines
from slipstream.runs.start import announce_gateway

COLUMNS = {field.name for field in fields(EvalSettings) if field.name != "limit"} & DataConfig.model_fields.keys()
"""Names of fields of `EvalSettings` that are also in section [data] of a config, and that are the same for all sets."""
WIDEST = 160
"""Minimum width in columns of the console that prints the table."""
OF_RUNS = {
    *("where", "template_args", "longest", "slots", "threads", "graders", "timeout", "reward_settings", "apart"),
    "engine_args",
}
"""Fields of `EvalSettings` that no command-line option sets."""
SHARES = ("exact", "math", "environment", "format")
"""Rewards that are shown in percent."""


@dataclass(frozen=True)
class Measured:
    greedy: float
    """Mean reward of the greedy answers."""
    sampled: list[list[float]]
    """Rewards of the samples of every prompt."""
    best: list[Handle]
    """Greedy answers, one per prompt."""
    ungraded: Counter[str]
    """Number of answers that could not be graded, by cause; they count as wrong."""
    found: Metrics
    """Metrics of the sampled answers: lengths, truncation, rewards."""
    seconds: float
    tokens: int

    @property
    def avg(self) -> float:
        return avg_at_n(self.sampled)


class Watch(Progress):
    """A progress bar over answered prompts; invisible if the console is no terminal."""

    def __init__(self, console: Console) -> None:
        parts = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        super().__init__(*parts, console=console, transient=True, disable=not console.is_terminal)
        self.now = self.add_task("loading the model", total=None)

    def begin(self, what: str, prompts: int) -> None:
        self.reset(self.now, description=what, total=prompts)

    def answered(self) -> None:
        self.advance(self.now)


def measure(made: Evaluation, grader: PoolGrader, watch: Watch | None = None) -> dict[str, Measured]:
    """Let the model answer all prompts, sampled and greedily; return the results by name of the prompt set."""
    import torch

    from slipstream.runtimes.build import build_sampler

    torch.set_num_threads(made.sampler.threads)
    sampler = build_sampler(made.sampler, made.tokenizer)
    graded, reward = Graded(sampler, grader), name_of(made.grader.rewards[0])

    async def one_set(name: str) -> Measured:
        async def ask(sampling: Sampling, how: str) -> list[list[Handle]]:
            if watch:
                watch.begin(f"{name} {how}".strip(), len(made.sets[name]))
            return await answers(generate, made.sets[name], sampling)

        began, sampling = time.perf_counter(), made.sampling[name]
        sampled = await ask(sampling, "sampled")
        once = sampling.temperature == 0  # all samples are greedy
        best = sampled if once else await ask(replace(sampling, group=1, temperature=0), "greedy")
        drawn = [handle for group in (sampled if once else sampled + best) for handle in group]
        return Measured(
            greedy=avg_at_n(correctness(best, reward)),
            sampled=correctness(sampled, reward),
            best=[group[0] for group in best],
            ungraded=Counter(handle.header.ungraded.said for handle in drawn if handle.header.ungraded),
            found=sample_metrics([handle.header for group in sampled for handle in group]),
            seconds=time.perf_counter() - began,
            tokens=sum(handle.header.tokens for handle in drawn),
        )

    async def generate(prompt: Any, sampling: Sampling) -> list[Handle]:
        group = await graded.generate(prompt, sampling)
        if watch:
            watch.answered()
        return group

    try:
        with asyncio.Runner() as runner:
            return {name: runner.run(one_set(name)) for name in made.sets}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        sampler.close()


def evaluate(model: str, console: Console, *, options: Mapping[str, Any], ks: Sequence[int], as_json: bool) -> None:
    """Measure a model and print the results; `options` are the command-line options, by field of `EvalSettings`."""
    notes: list[str] = []
    subject = evaluated_model(model)
    settings = settings_of(subject, options, notes.append)
    if max(ks) > min(settings.of(name, "n") for name in settings.data):
        raise ConfigError(f"pass@{max(ks)} needs at least {max(ks)} samples of each prompt: write -n {max(ks)}")
    check_there(subject.model)
    needs(settings.reward, settings.sandbox, settings.reward_settings)
    data = data_section({name: getattr(settings, name) for name in COLUMNS})
    sets = {}
    for name, source in settings.data.items():
        split, limit, where = settings.split, settings.of(name, "limit"), settings.where
        rows = load_rows(source, data, split=split, limit=limit, where=where, say=notes.append)
        sets[name] = graded_rows(rows, settings.reward, settings.sandbox, settings.reward_settings)
    check_adapter(subject.model)
    tokenizer = load_tokenizer(subject.model)
    ends = end_ids(subject.model, tokenizer)
    tools = tools_of(settings.environment, tokenizer, ends, notes.append)
    with_agents = settings.environment is not None and settings.environment.gateway is not None
    with_text = with_agents or not set(APART).isdisjoint(settings.reward)
    prompts = {
        name: eval_prompts(rows, tokenizer, data, seed=settings.seed, tools=tools, tells=with_text)
        for name, rows in sets.items()
    }
    made = evaluation(subject.model, prompts, tokenizer, settings)
    from slipstream.engines.native.model import pick_device

    pick_device(settings.device, "--device" if "device" in options else "runtime.device")
    check_alone(made.sampler, settings.device)
    from slipstream.engines.native.files import (
        check_complete,
        check_quantisation,
    )  # takes seconds, so after the fast checks

    if settings.url is None:
        check_complete(subject.model)
        check_quantisation(subject.model)
    engine = "server" if settings.url is not None else settings.engine
    other = f"{subject.run} sampled with {subject.sampled_with}; this evaluation samples with {engine}"
    for note in (*subject.notes, *([other] if subject.run and engine != subject.sampled_with else [])):
        print(printable(f"note: {note}"), file=sys.stderr)
    if not as_json:
        for line in notes:
            console.print(line, markup=False, soft_wrap=True)
    from slipstream.runtimes.build import build_grader

    announce_gateway(made.sampler.environment, None, partial(print, file=sys.stderr))
    grader = build_grader(made.grader, tokenizer)
    try:
        with Watch(console) as watch:
            found = measure(made, grader, watch)
    finally:
        grader.close()
    for each in found.values():
        for why, count in each.ungraded.items():
            print(printable(f"{count} answers have no reward and count as wrong: {why}"), file=sys.stderr)
    lines = [line_of(subject, settings, name, each, ks) for name, each in found.items()]
    if as_json:
        print(as_lines(lines), end="")
    else:
        show_table(lines, console)
    if subject.run is not None:
        try:
            append(subject.run / EVALS, as_lines(lines))
        except RunDirError as error:  # the results are already printed
            print(f"note: these results are not saved: {error}", file=sys.stderr)


def settings_of(subject: EvaluatedModel, options: Mapping[str, Any], say: Callable[[str], object]) -> EvalSettings:
    """Return the settings of the run, or those of the built-in task, with the changes given on the command line."""
    if "data" not in options:
        check_known(subject)
    settings = subject.asked or EvalSettings()
    # a template names its own columns: an option for the template unsets the prompt column, and the reverse
    instead = {"prompt": "template", "template": "prompt"}
    changes: dict[str, Any] = {instead[name]: None for name in options if name in instead} | dict(options)
    if "data" in options:  # other data have other columns
        changes["where"] = {}
    settings = replace(settings, **changes)
    if settings.url is None and "api_key_env" in options:
        raise ConfigError("--api-key-env is for --url: drop it, or write both")
    if settings.url is not None and (idle := {"engine", "device", "dtype"} & options.keys()):
        raise ConfigError(f"--url: the server chooses its own --{min(idle)}: drop one of them")
    for option, key, value in ("-n", "n", settings.n), ("--limit", "prompts", settings.limit):
        if isinstance(value, Mapping) and value.keys() != settings.data.keys():
            raise ConfigError(
                f"--data: eval.{key} of the run has a number for each of its own sets, {', '.join(value)}: "
                f"write {option}"
            )
    if "split" in options and not any(map(has_splits, settings.data.values())):
        source = next(iter(settings.data.values()))
        raise ConfigError(f"--split {settings.split} does nothing: {source} has no splits; drop it")
    check_columns_used(
        data_section({name: options[name] for name in COLUMNS & options.keys()}), *settings.data.values()
    )
    if subject.run is not None:
        if not settings.reward:
            raise ConfigError(
                f"{subject.run / 'config.toml'} has no task.reward, which grading needs: write --reward, for example "
                "--reward exact"
            )
        say(settings_line(subject, settings, options))
    return settings


def settings_line(subject: EvaluatedModel, settings: EvalSettings, options: Mapping[str, Any]) -> str:
    texts = {name: f"{name} {option_text(value)}".strip() for name, value in chosen_settings(settings).items()}
    if settings.environment is not None:
        wanted = settings.environment.wanted
        texts["environment"] = f"environment {wanted.spec if wanted is not None else 'gateway'}"
    run, cli = (", ".join(text for name, text in texts.items() if (name in options) is it) for it in (False, True))
    assert subject.run is not None
    if "data" not in options and subject.trained_on:
        run += " (training prompts, because data.eval is not set)"
    return f"from {subject.run / 'config.toml'}: {run}" + (f"; from the command line: {cli}" if options else "")


def chosen_settings(settings: EvalSettings) -> dict[str, Any]:
    """Return the settings that options can set, by name; leave out unset settings and those without effect."""
    idle = [] if any(map(has_splits, settings.data.values())) else ["split"]
    idle += ["engine"] if settings.engine == "native" else []
    idle += ["dtype", "device"] if settings.url is not None else []
    return {
        name: value
        for name, value in asdict(settings).items()
        if name not in (*OF_RUNS, *idle) and value is not None and value is not False
    }


def option_text(value: Any) -> str:
    """Format a setting as a user would write it on the command line."""
    match value:
        case True:
            return ""
        case dict():
            return " ".join(f"{name}={source}" if name else source for name, source in value.items())
        case tuple():
            return " ".join(value)
        case float():
            return f"{value:g}"
        case str():
            return value if value and value.isprintable() and " " not in value else repr(value)
    return str(value)


def line_of(
    subject: EvaluatedModel, settings: EvalSettings, name: str, found: Measured, ks: Sequence[int]
) -> dict[str, Any]:
    rewards = {key: value for key, value in found.found.items() if key.startswith("reward/")}
    n = settings.of(name, "n")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": subject.model,
        **({} if subject.update is None else {"update": subject.update}),
        **({"set": name} if name else {}),
        **chosen_settings(settings),
        "data": settings.data[name],
        "limit": settings.of(name, "limit"),
        "n": n,
        "prompts": len(found.sampled),
        f"avg@{n}": found.avg,
        "error": standard_error(found.sampled),
        **{f"pass@{k}": pass_at_k(found.sampled, k) for k in ks},
        **{f"pass@{k}/error": standard_error([[pass_at_k([each], k)] for each in found.sampled]) for k in ks},
        "greedy": found.greedy,
        "truncated": found.found["truncated"],
        "length": found.found["length/mean"],
        **{name: value for name, value in found.found.items() if name.startswith(("episode/", "environment/"))},
        **rewards,
        "ungraded": found.ungraded.total(),
        "tokens": found.tokens,
        "seconds": round(found.seconds, 3),
    }


def show_table(lines: Sequence[Mapping[str, Any]], console: Console) -> None:
    first = lines[0]
    reward, several = first["reward"][0], len(lines) > 1
    at = f" after update {first['update']}" if "update" in first else ""
    title = f"{first['model']}{at}, graded by {name_of(reward)}, T = {first['temperature']:g}"
    console.print(title, markup=False, soft_wrap=True)
    scores = [name for name in first if name.startswith("pass@") and not name.endswith("/error")]
    numbers = {line["n"] for line in lines}
    mean = f"avg@{first['n']}" if len(numbers) == 1 else "avg@n"
    others = [f"reward/{name_of(each)}" for each in first["reward"][1:]]
    table = Table()
    heads = [*(["set"] if several else []), "prompts", *(["n"] if len(numbers) > 1 else []), mean]
    heads += [*scores, "greedy", *others, "cut off", "tokens"]
    heads += ["turns", "invalid"] if "episode/turns" in first else []
    for head in heads:
        table.add_column(head.removeprefix("reward/"), justify="left" if head == "set" else "right", no_wrap=True)

    def number(value: float, of: str = reward) -> str:
        return f"{value:.1%}" if of in SHARES else f"{value:.3g}"

    def with_error(text: str, error: float | None, of: str = reward) -> str:
        return text if error is None else f"{text} ± {number(error, of)}"

    for line in lines:
        table.add_row(
            *([line["set"]] if several else []),
            f"{line['prompts']:,}",
            *([str(line["n"])] if len(numbers) > 1 else []),
            with_error(number(line[f"avg@{line['n']}"]), line["error"]),
            *(with_error(f"{line[name]:.1%}", line[f"{name}/error"], "exact") for name in scores),
            number(line["greedy"]),
            *(number(line.get(name, 0.0), name.removeprefix("reward/")) for name in others),
            f"{line['truncated']:.1%}",
            f"{line['length']:,.0f}",
            *([f"{line['episode/turns']:.1f}", f"{line['episode/invalid']:.1%}"] if "episode/turns" in first else []),
        )
    console.width = max(console.width, WIDEST)  # so that a narrow terminal does not truncate numbers
    console.print(table)
    tokens, seconds = (sum(line[name] for line in lines) for name in ("tokens", "seconds"))
    console.print(f"{tokens:,} tokens in {seconds:.1f} s")
