"""Table of all commands with their options. Nothing here imports what a command does, so that --help is fast."""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple


class Option(NamedTuple):
    names: Sequence[str]
    settings: Mapping[str, Any]
    """Arguments of `add_argument`."""
    group: str = ""
    """Name of a group of options that exclude each other; empty for none."""


class Command:
    def __init__(
        self,
        name: str,
        help: str,
        *options: Option,
        file: str = "",
        function: str = "run",
        takes: Literal["", "changes", "config"] = "",
        **settings: Any,
    ) -> None:
        """Describe a command, which is a function in a file of this package, by default `run` in the file of its name.

        `takes`: "changes" for settings as `--a.b VALUE`, "config" for a Config with these changes. `settings` are
        arguments of the command's parser.
        """
        self.name, self.help, self.options, self.takes = name, help, options, takes
        self.file, self.function, self.settings = file or name, function, settings

    @property
    def flags(self) -> set[str]:
        """Names of all options that begin with --."""
        return {name for option in self.options for name in option.names if name.startswith("--")}


def option(*names: str, help: str, group: str = "", **settings: Any) -> Option:
    return Option(names, {"help": help, **settings}, group)


def flag(name: str, help: str, **settings: Any) -> Option:
    return option(name, help=help, action="store_true", **settings)


# --- types of values --------------------------------------------------------------------------------------------------


def whole(text: str, *, least: int) -> int:
    if not text.isdecimal() or (value := int(text)) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def positive(text: str) -> int:
    return whole(text, least=1)


def temperature(text: str) -> float:
    from slipstream.config.base import GREEDY

    if (value := float(text)) != 0 and not GREEDY <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is neither 0, which is greedy, nor between {GREEDY} and 100")
    return value


def reward(text: str) -> str:
    from slipstream.config.rewards import check_reward

    try:
        return check_reward(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def held_out(text: str) -> tuple[str, str]:
    """Split `NAME=SOURCE` into name and source; the name is empty if none is given."""
    name, equals, source = text.partition("=")
    return (name, source) if equals and name.isidentifier() else ("", text)


# --- commands ---------------------------------------------------------------------------------------------------------

RUN = option("directory", type=Path, metavar="RUN", help="a run directory")
CONFIG_ARGUMENT = option("config", help="a TOML file")
AS_JSON = flag("--json", "print one JSON object")
SHAPES_FLAG = (
    flag("--shapes", "with --check: read no more of the models than their config.json"),
    option("--gpus", nargs="+", default=[], metavar="N",
           help="with --check: GPUs of each machine of the run, such as 8, or 8x80 with the GiB of each GPU (default: "
           "of this machine)"),
)  # fmt: skip
COMMANDS = (
    Command("demo", "train a tiny student with a tiny teacher, on a CPU", takes="config"),
    Command("init", "write a commented config for one of six situations",
            option("file", type=Path, nargs="?", default=Path("train.toml"), help="file to write (%(default)s)"),
            option("--for", dest="situation", choices=["distil", "reward", "tools", "agent", "self", "one_gpu"],
                   help="distil from a teacher; also learn from rewards; tools; an agent of yours; self-distillation; "
                   "one GPU for all (default: ask)")),
    Command("train", "train a student", CONFIG_ARGUMENT,
            flag("--skip-checks", "start training without testing the engines"), takes="config"),
    Command("doctor", "check that engines agree and that new weights arrive",
            option("config", nargs="?", help="a TOML file (default: the config of the demo)"),
            flag("--gpu", "try the first three steps of docs/first_gpu_run.md"), takes="config"),
    Command("resume", "continue a stopped run from its last checkpoint", RUN,
            option("--from", type=partial(whole, least=0), dest="number", metavar="N",
                   help="continue from this checkpoint; later checkpoints and log lines are deleted"),
            option("--updates", type=positive, metavar="N", help="total number of updates; extends a finished run"),
            option("--change", nargs="+", action="extend", default=[], metavar="KEY",
                   help="accept these changes in config.toml"), file="train", function="resume_run"),
    Command("scale", "list, add or remove workers of an active run", RUN,
            option("changes", nargs="*", metavar="KIND=N", help="sampler=+2, teacher.NAME=-1 or sampler=3"),
            file="train", function="scale_run"),
    Command("eval", "measure the accuracy of a model: avg@n, pass@k, greedy",
            option("model", help="a run directory, HF directory or hub name, or builtin:student"),
            option("--data", type=held_out, nargs="+", metavar="[NAME=]SOURCE",
                   help="one or several sets of prompts with answers (without a run: builtin:arithmetic)"),
            option("--split", "--data.eval_split", help="split of the data (without a run: eval)"),
            option("--reward", "--task.reward", type=reward, nargs="+", help="rewards; the first is accuracy (exact)"),
            option("--sandbox", "--task.sandbox", metavar="NAME",
                   help="sandbox of rewards that ask for one: bubblewrap, none or the URL of a server"),
            option("--limit", "--eval.prompts", type=positive, help="use the first N prompts of each set (200)"),
            option("-n", "--eval.n", dest="n", type=positive, help="samples of each prompt (4)"),
            option("-k", type=positive, nargs="+", default=[1], help="values of k in pass@k (1)"),
            option("--max-tokens", "--sampler.max_tokens", type=positive, help="longest response in tokens (96)"),
            option("--temperature", "--eval.temperature", type=temperature, help="0 samples greedily (1.0)"),
            option("--seed", type=int, help="seed of all sampling (0)"),
            option("--dtype", "--sampler.dtype", choices=["float32", "bfloat16", "float16", "float64"],
                   help="precision (float32)"),
            option("--device", "--runtime.device", help="same as the setting runtime.device (auto)"),
            option("--engine", "--sampler.engine", choices=["native", "vllm"], help="engine (native)"),
            option("--suite", nargs="+", metavar="TASK", help="tasks of lm-evaluation-harness, in place of --data"),
            option("--suite-path", metavar="DIR", help="directory with more tasks for --suite"),
            option("--url", help="OpenAI-compatible server that already runs the model"),
            option("--api-key-env", metavar="NAME", help="environment variable with the key of --url"),
            *(option(f"--data.{name}", dest=name, metavar="TEXT", help=f"same as the setting data.{name}")
              for name in ("prompt", "answer", "template")),
            option("--data.chat", dest="chat", action=argparse.BooleanOptionalAction,
                   help="same as the setting data.chat"),
            option("--system-prompt", "--data.system_prompt", help="system message before every conversation"),
            flag("--json", "print one JSON object for every set", default=False),
            file="evaluate", argument_default=argparse.SUPPRESS,
            epilog="For the model of a run, defaults are the settings in the run's config.toml, otherwise those in "
            "parentheses. Options can also be written with the names of settings."),
    Command("gateway", "serve a student to external agents, record episodes",
            option("config", help="a TOML file with [environment.gateway]"),
            option("-n", type=positive, metavar="N", help="number of prompts (default: every prompt once)"),
            option("-o", dest="to", type=Path, default=Path("lineages.jsonl"), metavar="FILE",
                   help="file to write, which must not exist (default: %(default)s)"), takes="config"),
    Command("sweep", "run a study: arms and grids of settings, several seeds",
            option("config", help="a TOML file with [sweep] (docs/lab.md)"),
            flag("--check", "check every config and list the cells, without running"), *SHAPES_FLAG,
            option("--jobs", type=positive, metavar="N", help="parallel runs (default: as many as the cores allow)"),
            takes="changes"),
    Command("plan", "simulate speed and lag of a run on a number of devices",
            option("source", metavar="CONFIG", help="a TOML file; or a run directory, whose own costs are used"),
            option("--devices", type=positive, metavar="N", help="number of devices (default: workers in CONFIG)"),
            flag("--measure", "start the engines and measure the cost of each stage", group="costs"),
            option("--costs", type=Path, metavar="FILE", group="costs",
                   help="file with the cost of each stage, as -o writes it"),
            option("-o", dest="to", type=Path, metavar="FILE", help="write the costs to a new file, for editing"),
            AS_JSON, option("--report", type=Path, metavar="FILE", help="also write an HTML page with figures"),
            takes="changes"),
    Command("samples", "print responses of the student in a run", RUN,
            option("--update", type=positive, metavar="N", help="samples of this update (default: the last ones)"),
            option("-n", type=positive, default=2, help="largest number of samples (default: %(default)s)")),
    Command("report", "write one HTML page about one or several runs, or about a study",
            option("paths", nargs="+", type=Path, metavar="RUN", help="a run directory, or one study"),
            option("-o", "--output", type=Path, metavar="FILE",
                   help="file to write (default: report.html in the first directory)"),
            option("--markdown", type=Path, metavar="DIR",
                   help="instead write a study as Markdown, with figures as SVG, to DIR")),
    Command("watch", "show an active or finished run on the whole terminal", RUN,
            flag("--once", "print the current state once as text")),
    Command("advise", "print problems of a run, their causes, and what to change", RUN, AS_JSON),
    Command("push", "upload the student of a finished run to the hub", RUN,
            option("--to", required=True, metavar="OWNER/NAME", help="repository of the hub; created if it is missing"),
            flag("--public", "create a public repository (default: private)"),
            flag("--dry-run", "list the files and send nothing")),
    Command("export", "write the student of a run as a GGUF file, by llama.cpp's converter", RUN,
            option("--gguf", type=Path, required=True, metavar="FILE", help="file to write"),
            option("--type", choices=["f32", "f16", "bf16", "q8_0"], default="bf16",
                   help="number format of the weights (default: bf16)"),
            flag("--adapter", "the adapter alone (with learner.lora), for its base model as a GGUF file")),
    Command("config", "print a resolved config, or all settings with help",
            option("config", nargs="?", help="a TOML file (default: list all settings)"),
            flag("--check", "also read data, tokenizers and weights, as `train` does"), *SHAPES_FLAG, takes="changes"),
    Command("estimators", "list losses, corrections and advantages, and when to use them",
            option("name", nargs="?", help="print all details of this estimator")),
)  # fmt: skip
