"""`slipstream eval --suite`: tasks of lm-evaluation-harness, for the student of a run or any other model."""

import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.commands.common import note
from slipstream.config.schema import Config
from slipstream.data.prompts import load_rows
from slipstream.errors import ConfigError, DataError, first_line
from slipstream.models.adapters import is_adapter
from slipstream.models.resolve import model_path
from slipstream.plan.rules.suite import task_manager
from slipstream.plan.subject import EvaluatedModel
from slipstream.run_dir.writing import suite_scores

SUITE_OPTIONS = {"suite", "suite_path", "limit", "seed", "dtype", "device", "chat"}
"""Options that work together with --suite; a task has its own data, prompts and scores."""


def check_suite_options(options: Mapping[str, Any]) -> None:
    if other := sorted(options.keys() - SUITE_OPTIONS):
        raise ConfigError(f"--suite: its tasks have their own data, prompts and scores: drop {', '.join(other)}")
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--suite needs lm-evaluation-harness: pip install 'slipstream[suite]'")


def template_settings(config: Config | None, options: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Return whether prompts go through the chat template, and the system message. By default as the run's prompts."""
    if config is None:
        return bool(options.get("chat", False)), None
    chat = bool(options["chat"] if "chat" in options else config.data.chat or has_messages(config))
    return chat, config.data.system_prompt if chat else None


def has_messages(config: Config) -> bool:
    """Return whether the run's prompts are messages, which a system message and tools need; read a row if neither is.

    Raise ConfigError if the row cannot be read.
    """
    data = config.data
    if config.every_environment or data.system_prompt is not None:
        return True
    source = next(iter(data.sources.values()))
    try:
        (row,) = load_rows(source, data, split=data.split, limit=1, where=data.where)
    except DataError as error:
        why = "a row of the run's data decides whether prompts of tasks go through the chat template"
        raise ConfigError(f"{error}: {why}: write --data.chat or --no-data.chat") from None
    return not isinstance(row.prompt, str)


def measure_suite(subject: EvaluatedModel, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Let lm-evaluation-harness score a model; return one line for every task and group of tasks."""
    import torch
    from lm_eval import simple_evaluate

    tasks = options["suite"]
    manager = task_manager(tasks, options.get("suite_path"), "--suite", "--suite-path")
    config = subject.config
    device = options.get("device", "auto" if config is None else config.runtime.device)
    chat, system = template_settings(config, options)
    form = "go through the chat template" if chat else "are plain text"
    whose = ", as those of the run" if config is not None and "chat" not in options else ""
    note(f"note: prompts of tasks {form}{whose}")
    seed, dtype = (0, "float32") if config is None else (config.seed, config.sampler.dtype)
    settings = {"seed": options.get("seed", seed), "dtype": options.get("dtype", dtype), "chat": chat}
    model: dict[str, Any] = {"pretrained": model_path(subject.model), "dtype": settings["dtype"]}
    if chat and config is not None and config.data.template_args:
        model["chat_template_args"] = dict(config.data.template_args)
    if is_adapter(subject.model):
        model["peft"] = subject.model
    began = time.perf_counter()
    try:
        found = simple_evaluate(
            "hf",
            model_args=model,
            tasks=tasks,
            task_manager=manager,
            limit=options.get("limit"),
            device=("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device,
            batch_size=8,
            apply_chat_template=chat,
            system_instruction=system,
            log_samples=False,
            **dict.fromkeys(
                ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), settings["seed"]
            ),
        )
    except Exception as error:  # a task is code of others: its data may be missing, and it may raise anything
        raise ConfigError(f"--suite {' '.join(tasks)}: {first_line(error)}") from None
    about = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": subject.model,
        **({} if subject.update is None else {"update": subject.update}),
        **settings,
        "limit": options.get("limit"),
        "seconds": round(time.perf_counter() - began, 3),
    }
    counts = found["n-samples"]
    return [
        about | {"suite": name, "prompts": counts[name]["effective"] if name in counts else None} | dict(scores_of(row))
        for name, row in found["results"].items()
    ]


def scores_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield scores by name, such as acc or exact_match/strict, and their standard errors with /error behind it."""
    for key, value in row.items():
        name, _, filtered = key.partition(",")
        if isinstance(value, int | float) and filtered:
            error = name.endswith("_stderr")
            name = name.removesuffix("_stderr") + ("" if filtered == "none" else f"/{filtered}")
            yield name + ("/error" if error else ""), float(value)


def show_suite(lines: Sequence[Mapping[str, Any]], console: Console) -> None:
    first = lines[0]
    at = f" after update {first['update']}" if "update" in first else ""
    console.print(f"{first['model']}{at}, tasks of lm-evaluation-harness", markup=False, soft_wrap=True)
    table = Table("task", "prompts", "score", "value")
    for line in lines:
        prompts = "" if line["prompts"] is None else f"{line['prompts']:,}"
        for name, score in suite_scores(line).items():
            table.add_row(line["suite"], prompts, name, score)
    console.print(table)
    if first["limit"] is not None:
        note(f"note: --limit {first['limit']} scores a part of every task")
