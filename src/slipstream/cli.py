"""The command line. Each command imports heavy libraries only when it needs them, so that --help is fast."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import slipstream
from slipstream.errors import ConfigError, HungUp, SlipstreamError, Terminated, did_you_mean, printable
from slipstream.processes import leave_closed_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.config.schema import Config
    from slipstream.plan.gpus import Gpus

OVERRIDABLE = ("demo", "train", "config", "doctor", "gateway", "sweep", "plan")
FLAGS = (
    "--",
    "--help",
    "--check",
    "--shapes",
    "--gpus",
    "--skip-checks",
    "--jobs",
    "--measure",
    "--costs",
    "--devices",
    "--json",
    "--report",
    "--gpu",
)
"""Options of commands in OVERRIDABLE; every other argument that begins with -- is a setting."""
OVERRIDES = "--a.b VALUE overrides a setting, for example --learner.lr 1e-5; `slipstream config` lists all settings"

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
}
"""Defaults of environment variables: one thread, as engines set their own thread counts, and no library warnings."""
SIGNAL_NAMES: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGHUP: "hung up", signal.SIGTERM: "terminated"}
SIGNAL_OF: dict[type[BaseException], int] = {
    KeyboardInterrupt: signal.SIGINT,
    HungUp: signal.SIGHUP,
    Terminated: signal.SIGTERM,
}


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are a `ConfigError`, which is printed in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    os.environ |= ENVIRONMENT | os.environ
    received: list[int] = []
    try:
        with stoppable(received):
            words, changes = split_overrides(sys.argv[1:] if argv is None else argv)
            args = parser().parse_args(words)
            return args.run(args, changes) or 0
    except SlipstreamError as error:
        note(" ".join(["error:", *str(error).splitlines()]))
        return 2
    except (KeyboardInterrupt, Terminated) as stopped:
        number = received[0] if received else SIGNAL_OF[type(stopped)]
        print(SIGNAL_NAMES[number], file=sys.stderr)
        return 128 + number
    except BrokenPipeError:  # the reader of the output has closed it, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def stoppable(received: list[int]) -> Iterator[None]:
    """Let SIGTERM and SIGHUP, unless ignored (nohup), stop a command as Ctrl-C does; `received` gets their numbers."""

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGHUP:
            leave_closed_terminal()
        handler = signal.getsignal(signal.SIGINT)  # handler of a running event loop; not callable in a background job
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    here = threading.current_thread() is threading.main_thread()
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(n) == signal.SIG_DFL]
    for number in heeded:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="slipstream",
        description="On-policy distillation: train a student on its own rollouts, scored token by token by a teacher.",
    )
    top.add_argument("--version", action="version", version=f"slipstream {slipstream.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., int | None], help: str, **options: Any) -> argparse.ArgumentParser:
        if name in OVERRIDABLE:
            options["epilog"] = OVERRIDES
        added = commands.add_parser(name, help=help, **options)
        added.set_defaults(run=run)
        return added

    of_run = Parser(add_help=False)
    of_run.add_argument("directory", type=Path, metavar="RUN", help="a run directory")

    add("demo", run_demo, help="train a tiny student with a tiny teacher, on a CPU")

    train = add("train", run_train, help="train a student")
    train.add_argument("config", help="a TOML file")

    train.add_argument("--skip-checks", action="store_true", help="start training without testing the engines")

    examine = add("doctor", run_doctor, help="check that engines agree and that new weights arrive")
    examine.add_argument("config", nargs="?", help="a TOML file (default: the config of the demo)")

    examine.add_argument("--gpu", action="store_true", help="try the first three steps of docs/first_gpu_run.md")

    resume = add("resume", run_resume, help="continue a stopped run from its last checkpoint", parents=[of_run])
    resume.add_argument(
        "--from",
        type=partial(whole, least=0),
        dest="number",
        metavar="N",
        help="continue from this checkpoint; later checkpoints and log lines are deleted",
    )
    resume.add_argument("--updates", type=positive, metavar="N", help="total number of updates; extends a finished run")
    resume.add_argument(
        "--change", nargs="+", action="extend", default=[], metavar="KEY", help="accept these changes in config.toml"
    )

    scaling = add("scale", run_scale, help="list, add or remove workers of an active run", parents=[of_run])
    scaling.add_argument("changes", nargs="*", metavar="KIND=N", help="sampler=+2, teacher.NAME=-1 or sampler=3")

    evaluate = add(
        "eval",
        run_eval,
        help="measure the accuracy of a model: avg@n, pass@k, greedy",
        epilog="For the model of a run, defaults are the settings in the run's config.toml, otherwise those in "
        "parentheses. Options can also be written with the names of settings.",
        argument_default=argparse.SUPPRESS,
    )
    evaluate.add_argument("model", help="a run directory, HF directory or hub name, or builtin:student")
    evaluate.add_argument(
        "--data",
        type=held_out,
        nargs="+",
        metavar="[NAME=]SOURCE",
        help="one or several sets of prompts with answers (without a run: builtin:arithmetic)",
    )
    evaluate.add_argument("--split", "--data.eval_split", help="split of the data (without a run: eval)")
    evaluate.add_argument(
        "--reward", "--task.reward", type=reward, nargs="+", help="rewards; the first is accuracy (exact)"
    )
    evaluate.add_argument("--limit", "--eval.prompts", type=positive, help="use the first N prompts of each set (200)")
    evaluate.add_argument("-n", "--eval.n", dest="n", type=positive, help="samples of each prompt (4)")
    evaluate.add_argument("-k", type=positive, nargs="+", default=[1], help="values of k in pass@k (1)")
    evaluate.add_argument("--max-tokens", "--sampler.max_tokens", type=positive, help="longest response in tokens (96)")
    evaluate.add_argument("--temperature", "--eval.temperature", type=temperature, help="0 samples greedily (1.0)")
    evaluate.add_argument("--seed", type=int, help="seed of all sampling (0)")
    evaluate.add_argument(
        "--dtype", "--sampler.dtype", choices=["float32", "bfloat16", "float16", "float64"], help="precision (float32)"
    )
    evaluate.add_argument("--device", "--runtime.device", help="same as the setting runtime.device (auto)")
    evaluate.add_argument("--engine", "--sampler.engine", choices=["native", "vllm"], help="engine (native)")
    evaluate.add_argument("--url", help="OpenAI-compatible server that already runs the model")
    evaluate.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key of --url")
    for name in ("prompt", "answer", "template"):
        evaluate.add_argument(f"--data.{name}", dest=name, metavar="TEXT", help=f"same as the setting data.{name}")
    evaluate.add_argument(
        "--data.chat", dest="chat", action=argparse.BooleanOptionalAction, help="same as the setting data.chat"
    )
    evaluate.add_argument("--system-prompt", "--data.system_prompt", help="system message before every conversation")
    evaluate.add_argument("--json", action="store_true", default=False, help="print one JSON object for every set")

    serving = add("gateway", run_gateway, help="serve a student to external agents, record episodes")
    serving.add_argument("config", help="a TOML file with [environment.gateway]")
    serving.add_argument("-n", type=positive, metavar="N", help="number of prompts (default: every prompt once)")
    serving.add_argument(
        "-o",
        dest="to",
        type=Path,
        default=Path("lineages.jsonl"),
        metavar="FILE",
        help="file to write, which must not exist (default: %(default)s)",
    )

    study = add("sweep", run_sweep, help="run a study: arms and grids of settings, several seeds")
    study.add_argument("config", help="a TOML file with [sweep] (docs/lab.md)")
    study.add_argument("--check", action="store_true", help="check every config and list the cells, without running")
    add_shapes(study)
    study.add_argument("--jobs", type=positive, metavar="N", help="parallel runs (default: as many as the cores allow)")

    planning = add("plan", run_plan, help="simulate speed and lag of a run on a number of devices")
    planning.add_argument("source", metavar="CONFIG", help="a TOML file; or a run directory, whose own costs are used")
    planning.add_argument(
        "--devices", type=positive, metavar="N", help="number of devices (default: workers in CONFIG)"
    )
    source = planning.add_mutually_exclusive_group()
    source.add_argument("--measure", action="store_true", help="start the engines and measure the cost of each stage")
    source.add_argument("--costs", type=Path, metavar="FILE", help="file with the cost of each stage, as -o writes it")
    planning.add_argument("-o", dest="to", type=Path, metavar="FILE", help="write the costs to a new file, for editing")
    planning.add_argument("--json", action="store_true", help="print one JSON object")
    planning.add_argument("--report", type=Path, metavar="FILE", help="also write an HTML page with figures")

    sampled = add("samples", run_samples, help="print responses of the student in a run", parents=[of_run])
    sampled.add_argument("--update", type=positive, metavar="N", help="samples of this update (default: the last ones)")
    sampled.add_argument("-n", type=positive, default=2, help="largest number of samples (default: %(default)s)")

    reporting = add("report", run_report, help="write one HTML page about one or several runs, or about a study")
    reporting.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="a run directory, or one study")
    reporting.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file to write (default: report.html in the first directory)"
    )
    reporting.add_argument(
        "--markdown", type=Path, metavar="DIR", help="instead write a study as Markdown, with figures as SVG, to DIR"
    )

    watching = add("watch", run_watch, help="show an active or finished run on the whole terminal", parents=[of_run])
    watching.add_argument("--once", action="store_true", help="print the current state once as text")

    advice = add(
        "advise", run_advise, help="print problems of a run, their causes, and what to change", parents=[of_run]
    )
    advice.add_argument("--json", action="store_true", help="print one JSON object")

    config = add("config", run_config, help="print a resolved config, or all settings with help")
    config.add_argument("config", nargs="?", help="a TOML file (default: list all settings)")
    config.add_argument("--check", action="store_true", help="also read data, tokenizers and weights, as `train` does")
    add_shapes(config)

    estimators = add("estimators", run_estimators, help="list losses, corrections and advantages, and when to use them")
    estimators.add_argument("name", nargs="?", help="print all details of this estimator")
    return top


def reward(text: str) -> str:
    from slipstream.config.schema import check_reward

    try:
        return check_reward(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def held_out(text: str) -> tuple[str, str]:
    """Split `NAME=SOURCE` into name and source; the name is empty if none is given."""
    name, equals, source = text.partition("=")
    return (name, source) if equals and name.isidentifier() else ("", text)


def add_shapes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", action="store_true", help="with --check: read no more of the models than their config.json"
    )
    parser.add_argument(
        "--gpus",
        nargs="+",
        default=[],
        metavar="N",
        help="with --check: GPUs of each machine of the run, such as 8, or 8x80 with the GiB of each GPU (default: of "
        "this machine)",
    )


def positive(text: str) -> int:
    return whole(text, least=1)


def whole(text: str, *, least: int) -> int:
    if not text.isdecimal() or (value := int(text)) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def temperature(text: str) -> float:
    from slipstream.config.base import GREEDY

    if (value := float(text)) != 0 and not GREEDY <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is neither 0, which is greedy, nor between {GREEDY} and 100")
    return value


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split arguments into those for argparse and settings written as `--a.b value` or `--a.b=value`."""
    if not words or words[0] not in OVERRIDABLE:
        return list(words), []
    arguments, found, rest = [words[0]], list[tuple[str, str]](), list(words[1:])
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word.partition("=")[0] in FLAGS:
            arguments.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        if not equals and not rest:
            hint = did_you_mean(word, FLAGS[1:])
            raise ConfigError(f"--{key} needs a value" + (f"; {hint}" if hint.startswith("did") else ""))
        found.append((key, value if equals else rest.pop(0)))
    return arguments, found


def console() -> Console:
    from slipstream.console import Screen

    return Screen()


def note(text: str) -> None:
    print(printable(text), file=sys.stderr)


def load_config(path: str | Path, changes: list[tuple[str, str]]) -> Config:
    from slipstream.config.file import load

    return load(path, changes, say=note)


def run_train(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    config = load_config(args.config, changes)
    from slipstream.runs.start import train

    print_done(train(config, console(), name=Path(args.config).stem, checks=not args.skip_checks))


def run_doctor(args: argparse.Namespace, changes: list[tuple[str, str]]) -> int:
    from slipstream.models.resolve import DEMO

    config = load_config(args.config or DEMO, changes)
    if args.gpu:
        from slipstream.commands.first_run import check_gpus

        return 0 if check_gpus(args.config, changes, console(), small=config.runtime.device == "cpu") else 1
    from slipstream.commands.doctor import doctor

    return 0 if doctor(config, console()) else 1


def run_resume(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.runs.start import resume

    path = resume(args.directory, console(), number=args.number, updates=args.updates, accepted=tuple(args.change))
    print_done(path)


def print_done(path: Path) -> None:
    print(printable(f"done: student in {path / 'final'}, metrics in {path / 'metrics.jsonl'}"))


def run_scale(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.runs.control_socket import scale

    print(printable("\n".join(scale(args.directory, args.changes))))


def run_demo(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.models.resolve import DEMO

    config = load_config(DEMO, changes)
    from slipstream.commands.demo import demo

    demo(config, console())


def run_eval(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.commands.evaluate import evaluate

    others = ("command", "run", "model", "k", "json")
    options = {name: value for name, value in vars(args).items() if name not in others}
    if "data" in options:
        options["data"] = dict(args.data)
        if len(options["data"]) < len(args.data) or (len(args.data) > 1 and "" in options["data"]):
            raise ConfigError(
                "--data: give each of several sets a name of its own, as in math=math.jsonl code=code.csv"
            )
    if "reward" in options:
        options["reward"] = tuple(args.reward)
    evaluate(args.model, console(), options=options, ks=args.k, as_json=args.json)


def run_gateway(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    config = load_config(args.config, changes)
    from slipstream.commands.gateway import gateway
    from slipstream.plan.plan import plan

    gateway(plan(config, ask=False), args.to, prompts=args.n, say=note)


def gpus_of(args: argparse.Namespace) -> Gpus | None:
    """Return the GPUs that --gpus names; raise ConfigError if --shapes or --gpus stand without --check."""
    from slipstream.plan.gpus import Gpus

    if (args.shapes or args.gpus) and not args.check:
        raise ConfigError("--shapes and --gpus are for the check of a config: write --check beside them")
    return Gpus.parse(args.gpus) if args.gpus else None


def run_sweep(args: argparse.Namespace, changes: list[tuple[str, str]]) -> int:
    from slipstream.commands.sweep import check_study_shapes, sweep

    gpus = gpus_of(args)
    if args.shapes:
        for text in check_study_shapes(args.config, changes, gpus):
            print(printable(text))
        return 0
    if gpus is not None:
        raise ConfigError("--gpus of a study goes with --shapes")
    return 0 if sweep(args.config, console(), changes, jobs=args.jobs, check=args.check) else 1


def run_plan(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.commands.plan import plan_ahead

    plan_ahead(args, console(), changes, note)


def run_samples(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.commands.samples import samples

    samples(args.directory, console(), update=args.update, count=args.n)


def run_report(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.commands.report import report, write_markdown

    if args.markdown is not None:
        print(*write_markdown(args.paths, args.markdown), sep="\n")
    else:
        print(printable(str(report(args.paths, args.output))))


def run_watch(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.commands.watch import watch

    watch(args.directory, console(), once=args.once)


def run_advise(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.commands.advise import advise_on

    advise_on(args.directory, console(), as_json=args.json)


def run_config(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from slipstream.config.file import bounds, describe, fields, to_toml

    if args.config is None:
        if changes or args.check or args.shapes or args.gpus:
            raise ConfigError("name a config file: slipstream config CONFIG")
        for name, info, kind in fields():
            beside = "; ".join(filter(None, (bounds(info), kind and f"kind = {kind}")))
            print(f"{name}: {describe(info)}{beside and f'   ({beside})'}\n    {info.description or ''}")
        return
    gpus = gpus_of(args)
    config = load_config(args.config, changes)
    text = to_toml(config)
    print(printable(text) if sys.stdout.isatty() else text, end="")
    if args.shapes:
        from slipstream.commands.shapes import shape_lines
        from slipstream.plan.plan import check_shapes

        for text in shape_lines(check_shapes(config, gpus), gpus):
            print(printable(f"# {text}"))
    elif args.check:
        from slipstream.plan.placement import record_lines, turn_lines
        from slipstream.plan.plan import plan, prompt_preview, read_weights
        from slipstream.run_dir.writing import check_free, run_path
        from slipstream.runtimes.local import check_gpus

        check_free(run_path(config, Path(args.config).stem))
        made = plan(config, gpus=gpus)
        warnings = [f"warning: {each}" for each in made.warnings]
        counted = list[str]()
        if gpus is not None or made.engines.runtime.kind == "local":
            counted = check_gpus(made.engines, gpus.machines if gpus else (), warnings.append)
        counted += [*record_lines(made.engines), *turn_lines(made.engines)]
        read = read_weights(made.config)
        for line in (*warnings, *prompt_preview(made), *made.notes, made.method, *made.needs, *counted, *read):
            print(printable(f"# {line}"))
        print(f"# ok: {len(made.prompts.rows)} prompts; vocabularies match; everything fits the context")


def run_estimators(args: argparse.Namespace, changes: list[tuple[str, str]]) -> None:
    from dataclasses import asdict

    from rich.table import Table
    from rich.text import Text

    from slipstream.estimators.catalogue import TITLES, catalogue, find

    screen = console()
    if args.name is not None:
        try:
            entries = find(args.name)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for entry in entries:
            details = Table.grid(padding=(0, 2))
            for title, text in zip(TITLES, asdict(entry).values(), strict=True):
                details.add_row(f"{title}:", Text(text))
            screen.print(details)
        return
    for family, entries in catalogue().items():
        table = Table("name", "scope", "what it is", "when to use it", title=family, title_justify="left")
        for entry in entries:
            table.add_row(*map(Text, (entry.name, entry.scope, entry.what, entry.use_when)))
        screen.print(table)
    screen.print("slipstream estimators NAME prints all details of one")
