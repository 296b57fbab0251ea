"""The demo: a tiny student learns a tiny teacher's arithmetic while you watch."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from slipstream.accuracy import Measured, measure
from slipstream.assets import HERE
from slipstream.config_file import load
from slipstream.engines.base import Sampling
from slipstream.launch import eval_prompts, train
from slipstream.runtimes.build import decoder
from slipstream.tasks.chat import load_tokenizer
from slipstream.tasks.rewards import PoolGrader

PROMPTS, SAMPLES = 200, 2
SHOWN, LONGEST_SHOWN = 4, 13  # answers to so many prompts, short enough for one line of a terminal


def demo(changes: list[tuple[str, str]], console: Console, *, say: Callable[[str], None]) -> None:
    began = time.perf_counter()
    config = load(HERE / "demo.toml", changes, say=say)
    tokenizer = load_tokenizer(config.student)
    prompts = eval_prompts(tokenizer, config.data, "builtin:arithmetic", split="eval", limit=PROMPTS, seed=config.seed)
    grader = PoolGrader("exact", decoder(tokenizer))
    sampling = Sampling(max_tokens=config.sampler.max_tokens, group=SAMPLES)

    def examine(model: str) -> Measured:
        return measure(model, prompts, grader, tokenizer, sampling=sampling, reward="exact")

    try:
        console.print(
            "A prompt is a chain of letters and digits; the answer copies it and adds the running sum mod 10:\n"
            "  C3D8E5=  →  C33D81E56      (3, 3+8=11→1, 1+5=6)\n"
            f"The student answers, the teacher scores every token, the student learns. {config.updates} updates of "
            f"{config.learner.batch_size} samples on one CPU.\n",
            highlight=False,
        )
        (teacher,) = config.teachers.values()
        console.print(f"measuring teacher and student on {PROMPTS} held-out prompts", highlight=False)
        expert, before = examine(teacher.model), examine(config.student)
        path = train(config, console, name="demo")
        after = examine(str(path / "final"))
    finally:
        grader.close()

    table = Table(title=f"\nAccuracy on {PROMPTS} held-out prompts", title_justify="left")
    for name, justify in (("", "left"), ("sampled", "right"), ("greedy", "right"), ("of the teacher's", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, found in (("student before", before), ("student after", after), ("teacher", expert)):
        share = f"{found.avg / expert.avg:.0%}" if expert.avg else "–"
        table.add_row(name, f"{found.avg:.1%}", f"{found.greedy:.1%}", share)
    console.print(table)

    samples = Table(title="\nGreedy answers that were wrong before", title_justify="left")
    for column in ("prompt", "before", "after", "right answer"):
        samples.add_column(column, overflow="fold")
    text = decoder(tokenizer)
    wrong = [i for i in range(PROMPTS) if before.best[i].header.rewards["exact"] < 1]
    for index in [i for i in wrong if len(prompts[i].tokens) <= LONGEST_SHOWN][:SHOWN]:
        prompt, answers = prompts[index], (before.best[index], after.best[index])
        marked = [marks(text(handle.body.tokens), str(prompt.ground_truth)) for handle in answers]
        samples.add_row(text(prompt.tokens), *marked, str(prompt.ground_truth))
    console.print(samples)
    console.print(f"\n{time.perf_counter() - began:.0f} s in all. Student, metrics and ledger: {path}", highlight=False)


def marks(answer: str, truth: str) -> str:
    """The answer, green as far as it is right and red where it is not."""
    return (
        "".join(f"[green]{char}[/]" if truth[i : i + 1] == char else f"[red]{char}[/]" for i, char in enumerate(answer))
        or "[red](nothing)[/]"
    )
