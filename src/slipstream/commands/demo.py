"""`slipstream demo`: a tiny student learns arithmetic from a tiny teacher, first synchronously, then asynchronously."""

import time
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from slipstream.commands.evaluate import Measured, measure
from slipstream.config.schedule import Sync
from slipstream.config.schema import Config
from slipstream.console import Screen
from slipstream.data.prompts import load_rows
from slipstream.data.tokenizers import load_tokenizer
from slipstream.errors import ConfigError
from slipstream.metrics import digest
from slipstream.plan.engine_plans import GraderPlan
from slipstream.plan.evaluation import EvalRequest, config_of_model, evaluation, with_options
from slipstream.plan.plan import fast_checks
from slipstream.plan.prompts import eval_prompts
from slipstream.run_dir.writing import check_free, read_lines, run_path
from slipstream.runs.start import train

DEMO_PROMPTS, DEMO_SAMPLES = 200, 2
"""Number of held-out prompts, and of samples of each."""
EXAMPLES, EXAMPLE_TOKENS = 4, 13
"""Number of prompts shown, and their longest length in tokens that fits a terminal line."""


def run(args: Namespace) -> None:
    demo(args.settings, Screen())


def demo(config: Config, console: Console) -> None:
    began = time.perf_counter()
    if len(config.teachers) != 1:
        raise ConfigError(f"the demo compares a student with one teacher, and [teachers] has {len(config.teachers)}")
    for one in configs_to_compare(config):
        check_free(run_path(one, "demo"))
        fast_checks(one)
    from slipstream.runtimes.build import build_grader, decoder

    tokenizer = load_tokenizer(config.student)
    rows = load_rows("builtin:arithmetic", split="eval", limit=DEMO_PROMPTS)
    prompts = eval_prompts(rows, tokenizer, config)
    grader = build_grader(GraderPlan(rewards=("exact",)), tokenizer)
    settings = {"sampler.max_tokens": config.sampler.max_tokens, "eval.n": DEMO_SAMPLES}

    def examine(model: str) -> Measured:
        asked = EvalRequest(with_options(config_of_model(model), settings))
        return measure(evaluation(asked, {"": prompts}, tokenizer), grader)[""]

    try:
        console.print(
            "A prompt is a chain of letters and digits; the answer copies it and adds the running sum mod 10:\n"
            "  C3D8E5=  →  C33D81E56      (3, 3+8=11→1, 1+5=6)\n"
            f"The student answers, the teacher scores every token, the student learns: {config.updates} updates of "
            f"{config.learner.batch_size} samples,\none stage after the other, and then again from the start with all "
            "stages at the same time.\n",
        )
        (teacher,) = config.teachers.values()
        console.print(f"measuring teacher and student on {DEMO_PROMPTS} held-out prompts")
        expert, before = examine(teacher.model), examine(config.student)
        runs: dict[str, tuple[Path, Measured]] = {}
        for one in configs_to_compare(config):
            kind = one.schedule.kind
            console.print(f"\n[bold]{kind}[/]")
            path = train(one, console, name=f"demo-{kind}")
            runs[kind] = path, examine(str(path / "final"))
    finally:
        grader.close()

    table = number_table(f"Accuracy on {DEMO_PROMPTS} held-out prompts", "sampled", "greedy", "relative to teacher")
    after = {f"student after {kind}": found for kind, (_, found) in runs.items()}
    for name, found in {"student before": before, **after, "teacher": expert}.items():
        share = f"{found.avg / expert.avg:.0%}" if expert.avg else "–"
        table.add_row(name, f"{found.avg:.1%}", f"{found.greedy:.1%}", share)
    console.print(table)
    console.print(speed_table({kind: path for kind, (path, _) in runs.items()}))

    path, last = list(runs.values())[-1]
    columns = [Column(name, overflow="fold") for name in ("prompt", "before", "after", "right answer")]
    samples = Table(*columns, title="\nGreedy answers that were wrong before", title_justify="left")
    text = decoder(tokenizer)
    wrong = [i for i in range(DEMO_PROMPTS) if before.best[i].header.rewards["exact"] < 1]
    for index in [i for i in wrong if len(prompts[i].tokens) <= EXAMPLE_TOKENS][:EXAMPLES]:
        prompt, answers = prompts[index], (before.best[index], last.best[index])
        marked = [marked_answer(text(handle.body.tokens), str(prompt.ground_truth)) for handle in answers]
        samples.add_row(text(prompt.tokens), *marked, str(prompt.ground_truth))
    console.print(samples)
    console.print(f"\n{time.perf_counter() - began:.0f} s in total. Student, metrics, ledger: {path}")


def configs_to_compare(config: Config) -> list[Config]:
    """Return the given config, preceded by a synchronous one in one process unless it is synchronous itself."""
    if config.schedule.kind == "sync":
        return [config]
    output = config.output
    alone = config.with_values(
        schedule=Sync(), runtime={"kind": "inline", "address": None}, sampler={"on_publish": "rebuild"}
    )
    both = [alone, config]
    return [one.with_values(output=f"{output}/{one.schedule.kind}") if output else one for one in both]


def number_table(title: str, *columns: str) -> Table:
    numbers = [Column(name, justify="right") for name in columns]
    return Table("", *numbers, title=f"\n{title}", title_justify="left")


def speed_table(paths: dict[str, Path]) -> Table:
    table = number_table("Speed, on the same cores", "training", "samples/s", "overlap", "mean lag")
    for kind, path in paths.items():
        if run := digest(read_lines(path / "metrics.jsonl")):
            numbers = f"{run['samples_per_s']:.0f}", f"{run['overlap/stages']:.2f}", f"{run['lag/mean']:.1f}"
            table.add_row(kind, f"{run['seconds']:.0f} s", *numbers)
    return table


def marked_answer(answer: str, truth: str) -> str:
    return (
        "".join(f"[green]{char}[/]" if truth[i : i + 1] == char else f"[red]{char}[/]" for i, char in enumerate(answer))
        or "[red](nothing)[/]"
    )
