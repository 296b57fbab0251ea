"""Rows of reasoning-gym, whose tasks draw their questions: `reasoning_gym:chain_sum=2,leg_counting@0-4`.

Several tasks are separated by commas, each with its weight after `=`. Levels of a task's curriculum come after `@`.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from slipstream.data.order import Epochs, Mixture
from slipstream.errors import DataError, did_you_mean

FIRST_SEEDS = {"train": 0, "eval": 1_000_000_000}
"""Seed of the first question of each split; question i of a task has this seed plus i."""
TASK = re.compile(r"(\w+)(?:@(\d+)(?:-(\d+))?)?(?:=(\d+(?:\.\d+)?))?")


class Task(NamedTuple):
    name: str
    levels: tuple[int, ...]
    """Levels of the curriculum, of which row i has one in turn; empty for the task's own defaults."""
    weight: float


def rows(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield this number of questions, shared among tasks by their weights."""
    tasks = list(map(task_of, name.split(",")))
    if split not in FIRST_SEEDS:
        raise DataError(f"there is no split {split!r}; {did_you_mean(split, FIRST_SEEDS)}")
    order = Mixture([Epochs([0], seed=0)] * len(tasks), [task.weight for task in tasks])
    sets = [[set_of(task, level, FIRST_SEEDS[split], count) for level in task.levels or (None,)] for task in tasks]
    for number in range(count):
        which, place = order.place(number)
        task, own = tasks[which], sets[which]
        entry = own[place % len(own)][place]
        metadata = repr(plain(entry["metadata"]))
        meta: dict[str, Any] = {"task": task.name, "question": entry["question"], "metadata": metadata}
        level = {"level": task.levels[place % len(own)]} if task.levels else {}
        where = f"{task.name}:{split}:{place}"
        yield {"id": where, "prompt": entry["question"], "answer": entry["answer"], "data_source": task.name,
               "reasoning_gym": meta, **level}  # fmt: skip


def task_of(text: str) -> Task:
    from reasoning_gym.factory import CURRICULA, DATASETS

    found = TASK.fullmatch(text.strip())
    if found is None or (found[4] is not None and not float(found[4])):
        raise DataError(
            f"{text!r} is no task: write, for example, chain_sum, chain_sum=2 (weight) or chain_sum@0-3 (levels)"
        )
    name, first, last, weight = found.groups()
    if name not in DATASETS or name == "composite":
        raise DataError(f"there is no task {name!r}; {did_you_mean(name, DATASETS)}")
    levels = () if first is None else tuple(range(int(first), int(last or first) + 1))
    if first is not None and (name not in CURRICULA or not levels):
        raise DataError(f"{text!r}: {'the first level is above the last' if not levels else 'the task has no levels'}")
    return Task(name, levels, float(weight or 1))


def set_of(task: Task, level: int | None, seed: int, count: int) -> Any:
    """Return the questions of a task at a level of its curriculum; None stands for the task's own defaults."""
    from reasoning_gym.factory import DATASETS, create_curriculum, create_dataset

    if level is None:
        return create_dataset(task.name, seed=seed, size=count)
    curriculum = create_curriculum(task.name)
    highest = max(len(each.levels) for each in curriculum.attributes.values()) - 1
    if level > highest:
        raise DataError(f"{task.name} has the levels 0 to {highest}, and no level {level}")
    curriculum.set_global_level(level)
    return DATASETS[task.name][0](curriculum.generate_configuration({"seed": seed, "size": count}))


def plain(value: Any) -> Any:
    """Return metadata that Python can read from its repr: objects of the package's own classes become text."""
    match value:
        case dict():
            return {plain(key): plain(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(plain, value)) if type(value) in (list, tuple) else tuple(map(plain, value))
    try:
        return value if ast.literal_eval(repr(value)) == value else str(value)
    except (ValueError, SyntaxError):
        return str(value)
