"""`slipstream eval`: accuracy of a saved model (avg@n, pass@k, greedy), with the sampler and grader of training.

For the model of a run, the defaults are the run's settings, and results are appended to the run's eval.jsonl.
"""

import asyncio
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from slipstream.commands.common import note
from slipstream.commands.suite import check_suite_options, measure_suite, show_suite
from slipstream.config.file import data_section
from slipstream.config.rewards import name_of
from slipstream.console import Screen
from slipstream.data.prompts import check_columns_used
from slipstream.data.sources import has_splits
from slipstream.errors import ConfigError, EngineError, RunDirError
from slipstream.metric_names import SHARE_REWARDS
from slipstream.metrics import Metrics, avg_at_n, pass_at_k, sample_metrics
from slipstream.pipeline.evaluate import answers, by_episode, correctness, reason_ungraded
from slipstream.plan.environment import environments_of
from slipstream.plan.evaluation import (
    INHERITED_DATA_KEYS,
    EvalRequest,
    Evaluation,
    config_of_model,
    config_of_run,
    planned_evaluation,
    with_options,
)
from slipstream.plan.subject import EvaluatedModel, check_known, evaluated_model
from slipstream.protocols import GradingSampler, Sampling
from slipstream.records import Handle
from slipstream.rewards.grading import PoolGrader
from slipstream.run_dir.atomic_files import append
from slipstream.run_dir.writing import EVALS, as_lines
from slipstream.runs.start import announce_gateways
from slipstream.statistics import standard_error

SETTINGS = {
    "data": "data.eval",
    "split": "data.eval_split",
    **{name: f"data.{name}" for name in ("prompt", "answer", "template", "chat", "system_prompt")},
    "reward": "task.reward",
    "sandbox": "task.sandbox",
    "limit": "eval.prompts",
    "n": "eval.n",
    "max_tokens": "sampler.max_tokens",
    "temperature": "eval.temperature",
    "seed": "seed",
    "dtype": "sampler.dtype",
    "device": "runtime.device",
    "engine": "sampler.engine",
}
"""Settings by the name of the option that sets each, in the order of the output."""
WIDEST = 160
"""Minimum width in columns of the console that prints the table."""
PERCENT_REWARDS = (*SHARE_REWARDS, "environment", "format")
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
    """Number of answers that could not be graded, by cause; they count as 0, or as the lowest reward below 0."""
    failed: list[str]
    """Reasons of answers that could not be made, or whose judge was down; they are left out."""
    metrics: Metrics
    """Metrics of the sampled answers: lengths, truncation, rewards."""
    seconds: float
    tokens: int

    @property
    def avg(self) -> float:
        return avg_at_n(self.sampled)

    def passed(self, k: int) -> list[float]:
        """Return pass@k of each prompt that has k answers; others have failed."""
        return [pass_at_k([each], k) for each in self.sampled if len(each) >= k]


class UnansweredError(EngineError):
    """No prompt of a set has an answer that counts."""

    measured: Mapping[str, Measured] = {}
    """Results of the other sets."""


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
    """Let the model answer all prompts, sampled and greedily; return the results by name of the prompt set.

    If a set has no answer at all, raise UnansweredError, with the results of the others.
    """
    import torch

    from slipstream.runtimes.build import build_sampler

    torch.set_num_threads(made.sampler.threads)
    sampler = build_sampler(made.sampler, made.tokenizer)
    graded, reward = GradingSampler(sampler, grader), name_of(made.grader.rewards[0])

    async def one_set(name: str) -> Measured:
        async def ask(sampling: Sampling, how: str) -> list[list[Handle]]:
            if watch:
                watch.begin(f"{name} {how}".strip(), len(made.sets[name]))
            every = await answers(generate, made.sets[name], sampling)
            reasons = [reason for group in every for reason in by_episode(group, lambda h: h.missing_reason)]
            failed.extend(reasons)
            kept = [[h for h in group if not h.header.missing_reason] for group in every]
            if not any(kept):
                raise UnansweredError(
                    f"no prompt{f' of {name}' if name else ''} has an answer that counts: {reasons[0]}"
                )
            return [group for group in kept if group]

        began, sampling, failed = time.perf_counter(), made.sampling[name], list[str]()
        sampled = await ask(sampling, "sampled")
        once = sampling.temperature == 0  # all samples are greedy
        best = sampled if once else await ask(replace(sampling, group=1, temperature=0), "greedy")
        asked = sampled if once else sampled + best
        drawn = [handle for group in asked for handle in group]
        return Measured(
            greedy=avg_at_n(correctness(best, reward)),
            sampled=correctness(sampled, reward),
            best=[group[0] for group in best],
            ungraded=Counter(reason for group in asked for reason in by_episode(group, reason_ungraded)),
            failed=failed,
            metrics=sample_metrics([handle.header for group in sampled for handle in group]),
            seconds=time.perf_counter() - began,
            tokens=sum(handle.header.tokens for handle in drawn),
        )

    async def generate(prompt: Any, sampling: Sampling) -> list[Handle]:
        group = await graded.generate(prompt, sampling)
        if watch:
            watch.answered()
        return group

    found, unanswered = dict[str, Measured](), list[UnansweredError]()
    try:
        with asyncio.Runner() as runner:
            for name in made.sets:
                try:
                    found[name] = runner.run(one_set(name))
                except UnansweredError as error:
                    unanswered.append(error)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        sampler.close()
    if unanswered:
        unanswered[0].measured = found
        raise unanswered[0]
    return found


def run(args: Namespace) -> None:
    others = ("command", "overrides", "model", "k", "json")
    options = {name: value for name, value in vars(args).items() if name not in others}
    if "data" in options:
        options["data"] = dict(args.data)
        if len(options["data"]) < len(args.data) or (len(args.data) > 1 and "" in options["data"]):
            raise ConfigError(
                "--data: give each of several sets a name of its own, as in math=math.jsonl code=code.csv"
            )
    if "reward" in options:
        options["reward"] = tuple(args.reward)
    evaluate(args.model, Screen(), options=options, ks=args.k, as_json=args.json)


def evaluate(model: str, console: Console, *, options: Mapping[str, Any], ks: Sequence[int], as_json: bool) -> None:
    """Measure a model and print the results; `options` are the command-line options, by their names."""
    notes: list[str] = []
    if "suite" in options or "suite_path" in options:
        evaluate_suite(model, console, options, as_json)
        return
    subject = evaluated_model(model)
    asked = request_of(subject, options, notes.append)
    config = asked.config
    if max(ks) > min(config.eval.of(name, "n") for name in config.data.held_out):
        raise ConfigError(f"pass@{max(ks)} needs at least {max(ks)} samples of each prompt: write -n {max(ks)}")
    made = planned_evaluation(asked, notes.append)
    engine = "server" if asked.url is not None else config.sampler.engine
    other = list[str]()
    if subject.config is not None and engine != (sampled_with := subject.config.sampler.engine):
        other = [f"{subject.run} sampled with {sampled_with}; this evaluation samples with {engine}"]
    for text in (*subject.notes, *other):
        note(f"note: {text}")
    if not as_json:
        for line in notes:
            console.print(line, markup=False, soft_wrap=True)
    from slipstream.runtimes.build import build_grader

    announce_gateways(made.sampler.environments, None, note)
    grader, unanswered = build_grader(made.grader, made.tokenizer), None
    try:
        with Watch(console) as watch:
            found: Mapping[str, Measured] = measure(made, grader, watch)
    except UnansweredError as error:
        if not error.measured:
            raise
        found, unanswered = error.measured, error
    finally:
        grader.close()
    for each in found.values():
        for why, count in each.ungraded.items():
            note(f"{count} answers have no reward and count as wrong: {why}")
        if each.failed:
            note(f"{len(each.failed)} answers are missing and left out, one of them because {each.failed[0]}")
    show(
        subject, [line_of(subject, asked, name, each, ks) for name, each in found.items()], show_table, console, as_json
    )
    if unanswered is not None:
        raise unanswered


def evaluate_suite(model: str, console: Console, options: Mapping[str, Any], as_json: bool) -> None:
    if "suite" not in options:
        raise ConfigError("--suite-path: name the tasks in that directory with --suite")
    check_suite_options(options)
    subject = evaluated_model(model)
    for text in subject.notes:
        note(f"note: {text}")
    show(subject, measure_suite(subject, options), show_suite, console, as_json)


def show(
    subject: EvaluatedModel,
    lines: Sequence[Mapping[str, Any]],
    as_table: Callable[[Sequence[Mapping[str, Any]], Console], None],
    console: Console,
    as_json: bool,
) -> None:
    """Print results, and append them to the run's eval.jsonl if the model is that of a run."""
    if as_json:
        print(as_lines(lines), end="")
    else:
        as_table(lines, console)
    if subject.run is not None:
        try:
            append(subject.run / EVALS, as_lines(lines))
        except RunDirError as error:  # the results are already printed
            note(f"note: these results are not saved: {error}")


def request_of(subject: EvaluatedModel, options: Mapping[str, Any], say: Callable[[str], object]) -> EvalRequest:
    """Return the evaluation as its run makes it, or that of the built-in task, with the options of the command line."""
    if "data" not in options:
        check_known(subject)
    run = subject.config
    settings = {SETTINGS[name]: value for name, value in options.items() if name in SETTINGS}
    model, other_data = subject.model, "data" in options
    config = config_of_model(model) if run is None else config_of_run(run, model, other_data=other_data)
    asked = EvalRequest(
        config=with_options(config, settings),
        url=options.get("url"),
        api_key_env=options.get("api_key_env"),
        environments={} if run is None else environments_of(run),
        options={key: f"--{key.rpartition('.')[2]}" for key in settings},
    )
    check_options(asked, options)
    if subject.run is not None:
        if not asked.config.task.reward:
            raise ConfigError(
                f"{subject.run / 'config.toml'} has no task.reward, which grading needs: write --reward, for example "
                "--reward exact"
            )
        say(settings_line(subject, asked, options))
    return asked


def check_options(asked: EvalRequest, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options without effect, and for settings of the run's own sets with other data."""
    config, data = asked.config, asked.config.data
    sets = data.held_out
    if asked.url is None and "api_key_env" in options:
        raise ConfigError("--api-key-env is for --url: drop it, or write both")
    if asked.url is not None and (idle := {"engine", "device", "dtype"} & options.keys()):
        raise ConfigError(f"--url: the server chooses its own --{min(idle)}: drop one of them")
    for option, key, value in ("-n", "n", config.eval.n), ("--limit", "prompts", config.eval.prompts):
        if isinstance(value, Mapping) and value.keys() != sets.keys():
            raise ConfigError(
                f"--data: eval.{key} of the run has a number for each of its own sets, {', '.join(value)}: "
                f"write {option}"
            )
    if "split" in options and not any(map(has_splits, sets.values())):
        source = next(iter(sets.values()))
        raise ConfigError(f"--split {data.eval_split} does nothing: {source} has no splits; drop it")
    columns = {name: value for name, value in options.items() if name in INHERITED_DATA_KEYS}
    check_columns_used(data_section(columns), *sets.values())


def settings_line(subject: EvaluatedModel, asked: EvalRequest, options: Mapping[str, Any]) -> str:
    texts = {name: f"{name} {option_text(value)}".strip() for name, value in chosen_settings(asked).items()}
    if every := asked.environments.values():
        names = [each.wanted.spec if each.wanted is not None else "gateway" for each in every]
        texts["environment"] = f"environment {' '.join(names)}"
    run, cli = (", ".join(text for name, text in texts.items() if (name in options) is it) for it in (False, True))
    assert subject.run is not None and subject.config is not None
    if "data" not in options and not subject.config.data.held_out:
        run += " (training prompts, because data.eval is not set)"
    return f"from {subject.run / 'config.toml'}: {run}" + (f"; from the command line: {cli}" if options else "")


def chosen_settings(asked: EvalRequest) -> dict[str, Any]:
    """Return the settings that options can set, by name; leave out unset settings and those without effect."""
    config = asked.config
    given: dict[str, Any] = {name: attrgetter(key)(config) for name, key in SETTINGS.items()}
    environments = {name: asdict(each) for name, each in asked.environments.items()}
    given |= {"data": config.data.held_out, "environment": environments.get("", environments) or None}
    given |= {"engine": given.pop("engine"), "url": asked.url, "api_key_env": asked.api_key_env}
    idle = [] if any(map(has_splits, config.data.held_out.values())) else ["split"]
    idle += ["engine"] if config.sampler.engine == "native" else []
    idle += ["dtype", "device"] if asked.url is not None else []
    return {
        name: value for name, value in given.items() if name not in idle and value is not None and value is not False
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
    subject: EvaluatedModel, asked: EvalRequest, name: str, result: Measured, ks: Sequence[int]
) -> dict[str, Any]:
    rewards = {key: value for key, value in result.metrics.items() if key.startswith("reward/")}
    config, n = asked.config, asked.config.eval.of(name, "n")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": subject.model,
        **({} if subject.update is None else {"update": subject.update}),
        **({"set": name} if name else {}),
        **chosen_settings(asked),
        "data": config.data.held_out[name],
        "limit": config.eval.of(name, "prompts"),
        "n": n,
        "prompts": len(result.sampled),
        f"avg@{n}": result.avg,
        "error": standard_error([fmean(samples) for samples in result.sampled]),
        **{f"pass@{k}": fmean(passed) if (passed := result.passed(k)) else None for k in ks},
        **{f"pass@{k}/error": standard_error(result.passed(k)) for k in ks},
        "greedy": result.greedy,
        "truncated": result.metrics["truncated"],
        "length": result.metrics["length/mean"],
        **{name: value for name, value in result.metrics.items() if name.startswith(("episode/", "environment/"))},
        **rewards,
        "ungraded": result.ungraded.total(),
        "tokens": result.tokens,
        "seconds": round(result.seconds, 3),
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
        return f"{value:.1%}" if of in PERCENT_REWARDS else f"{value:.3g}"

    def with_error(text: str, error: float | None, of: str = reward) -> str:
        return text if error is None else f"{text} ± {number(error, of)}"

    for line in lines:
        table.add_row(
            *([line["set"]] if several else []),
            f"{line['prompts']:,}",
            *([str(line["n"])] if len(numbers) > 1 else []),
            with_error(number(line[f"avg@{line['n']}"]), line["error"]),
            *(
                "–" if line[name] is None else with_error(f"{line[name]:.1%}", line[f"{name}/error"], "exact")
                for name in scores
            ),
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
