"""`slipstream config`: all settings, a resolved config, and its check; the check needs no more than shapes if asked."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.commands.common import gpus_of, note
from slipstream.config.file import bounds, describe, fields, load, to_toml
from slipstream.engines.vllm import VERSION
from slipstream.errors import ConfigError, printable

if TYPE_CHECKING:
    from slipstream.config.schema import Config
    from slipstream.plan.engine_plans import EnginesPlan
    from slipstream.plan.gpus import Gpus
    from slipstream.plan.plan import Plan

UNSEEN = (
    "tokenizers, chat templates and end tokens: only the sizes of vocabularies are compared",
    "data: no prompt and no answer is read, and no length of a prompt is known",
    "weights: no file is opened",
    f"engines and packages: nothing is started or looked up, and vLLM is taken to be version {VERSION}",
    "endpoints, rewards, environments and agents: nothing is asked, loaded or run",
    "this machine: its devices, memory and processors are not those of the run",
)
"""Things that a check of shapes does not look at."""


def run(args: Namespace) -> None:
    if args.config is None:
        if args.overrides or args.check or args.shapes or args.gpus:
            raise ConfigError("name a config file: slipstream config CONFIG")
        print_settings()
        return
    gpus = gpus_of(args)
    config = load_config(args.config, args.overrides)
    text = to_toml(config)
    print(printable(text) if sys.stdout.isatty() else text, end="")
    if args.shapes:
        lines = iter(shape_lines(config, gpus))
    else:
        lines = check_lines(config, Path(args.config).stem, gpus) if args.check else iter(())
    for line in lines:
        print(printable(f"# {line}"))


def load_config(path: str | Path, overrides: list[tuple[str, str]]) -> Config:
    """Read a config for any command, and print notes about it."""
    return load(path, overrides, say=note)


def print_settings() -> None:
    for name, info, kind in fields():
        beside = "; ".join(filter(None, (bounds(info), kind and f"kind = {kind}")))
        print(f"{name}: {describe(info)}{beside and f'   ({beside})'}\n    {info.description or ''}")


def check_lines(config: Config, name: str, gpus: Gpus | None) -> Iterator[str]:
    """Read everything that `train` reads before a run; yield the lines to print about it."""
    from slipstream.plan.placement import record_lines, turn_lines
    from slipstream.plan.plan import plan
    from slipstream.run_dir.writing import check_free, run_path
    from slipstream.runtimes.local import check_gpus

    check_free(run_path(config, name))
    made = plan(config, gpus=gpus)
    warnings = [f"warning: {each}" for each in made.warnings]
    counted = list[str]()
    if gpus is not None or made.engines.runtime.kind == "local":
        counted = check_gpus(made.engines, gpus.machines if gpus else (), warnings.append)
    counted += [*record_lines(made.engines), *turn_lines(made.engines)]
    read = read_weights(made.config)
    yield from map(str, (*warnings, *prompt_preview(made), *made.notes, made.method, *made.needs, *counted, *read))
    yield f"ok: {len(made.prompts.rows)} prompts; vocabularies match; everything fits the context"


def prompt_preview(made: Plan) -> list[str]:
    text = str(made.tokenizer.decode(made.prompts.tokens[0]))
    answer = made.prompts.rows[0].ground_truth
    return [f"first prompt: {shortened(text)}", f"its answer: {'none' if answer is None else shortened(answer)}"]


def shortened(value: Any, width: int = 120) -> str:
    """Return the repr of a value, which escapes control characters; cut out its middle if it is too long."""
    text = repr(value)
    return text if len(text) <= width else f"{text[: width * 2 // 3]} … {text[-width // 3 :]}"


def read_weights(config: Config) -> list[str]:
    """Read all weights of models that run here; raise if one is not finite. Return a line to print for each model."""
    from slipstream.engines.native.files import read_through, weights_of
    from slipstream.plan.facts import Facts
    from slipstream.plan.placement import size

    lines = []
    for model in (each.name for each in Facts(config).models):
        began, files = time.perf_counter(), weights_of(model)
        if not files:
            lines.append(f"weights of {model}: not checked, as they are not on this machine yet")
            continue
        count, read = read_through(model), sum(file.stat().st_size for file in files)
        seconds = time.perf_counter() - began
        lines.append(f"weights of {model}: complete, {count:,} finite numbers ({size(read)} read in {seconds:.1f} s)")
    if config.runtime.address is not None:
        lines.append("memory: not checked, as engines run on a cluster")
    return lines


# --- shapes -----------------------------------------------------------------------------------------------------------


def shape_lines(config: Config, gpus: Gpus | None) -> list[str]:
    """Check a config by shapes; return the lines to print about it. Raise ConfigError if there are too few GPUs."""
    from slipstream.plan.placement import needs, record_lines
    from slipstream.plan.plan import check_shapes

    check = check_shapes(config, gpus)
    gpu_lines, unseen = placement(check.engines, gpus), list(UNSEEN)
    if gpus is None or gpus.memory is None:
        unseen.append("memory of the GPUs: --gpus 8x80 compares the needs with 8 GPUs of 80 GiB")
    return [
        *(f"warning: {each}" for each in check.warnings),
        *(*check.notes, str(check.method), *map(str, needs(check.engines))),
        *(*record_lines(check.engines), *gpu_lines),
        *(f"not looked at: {each}" for each in unseen),
        "ok: everything that shapes can tell was checked",
    ]


def placement(plan: EnginesPlan, gpus: Gpus | None) -> list[str]:
    """Return lines about the GPUs of the run; raise ConfigError if there are too few."""
    from slipstream.plan.gpus import crews_of, sum_line
    from slipstream.plan.placement import turn_lines
    from slipstream.runtimes.local import check_gpus

    if plan.runtime.device == "cpu":
        return []
    if plan.runtime.kind == "inline":
        return ["all engines share one GPU", *turn_lines(plan)]
    lines = [sum_line(crews_of(plan))] if gpus is None else check_gpus(plan, gpus.machines, str)
    return [*lines, *turn_lines(plan)]
