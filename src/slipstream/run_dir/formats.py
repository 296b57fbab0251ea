"""What the files of a run directory hold: the version of their format, and the shape of their lines.

A run directory and each of its checkpoints carry a format number: `format` in meta.json and in standing.json, 1 where
there is none. What an older format says is brought to the present one by `UPGRADES` wherever it is read. A newer format
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite
from pathlib import Path
from types import NoneType
from typing import Any

import slipstream
from slipstream.errors import RunDirError, first_line

Line = dict[str, Any]
FORMAT = 1
"""Of the directories that this version of Slipstream writes."""
UPGRADES: Mapping[int, Mapping[str, Callable[[Line], Line]]] = {}
"""From format N to N + 1: by the name of a file, what becomes of its object, or of the object on each of its lines.

A run that goes on appends lines of the present format to older ones. So a step must leave alone what is new already.
"""
HUGE = 1e150
"""Finite numbers from here on have no squares."""
SUSPECT = ".suspect"
"""Behind the number of a checkpoint whose weights may be worse for what stopped the run."""
LARGEST = 1 << 53
"""Integers from here on are not exact as floats."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "meta.json": {"config": {}, "prompts?": ("", None), "packages?": {"*": ("", None)}, "command?": [""]},
    "metrics.jsonl": {"kind": "train|eval", "update": 0, "set?": "", "*": inf},
    "metrics.jsonl train": {"time?": 0.0, "tokens?": 0.0, "samples?": 0.0, "lag/max?": 0.0},
    "metrics.jsonl eval": {"accuracy?": 0.0, "samples?": 0.0},
    "ledger.jsonl": {"number": 0, "version?": 0, "end": "trained|dropped", "cause?": "", "causes?": [""]},
    "ledger.jsonl trained": {"tokens?": [0], "lag?": [0.0], "rewards?": [{"*": inf}], "f?": [(0.0, None)]},
    "ledger.jsonl dropped": {"reason": ""},
    "samples.jsonl": {
        **dict.fromkeys(("prompt_id", "prompt", "response", "teacher"), ""),
        **dict.fromkeys(("context?", "context_id?"), ("", None)),
        "update": 0,
        "index?": 0,
        "finish": "",
        "rewards": {"*": inf},
        "turns?": ([["", ""]], None),
        "versions": [[0, 0]],
        "tokens": [""],
        "logp": [(inf, None)],
        "teacher_logp": ([(inf, None)], None),
    },
    "trace.json": {"name": "", "ph": ""},
    "trace.json X": {"tid": 0, "ts": 0.0, "dur": 0.0},
    "trace.json M": {"tid": 0, "args": {}},
    "trace.json b": {"ts": 0.0, "id": ("", 0)},
    "trace.json e": {"ts": 0.0, "id": ("", 0)},
}
"""What readers rely on: by the name of a file, and by that and by what `DECIDES` finds in an object.

An example stands for its kind: 0 a count, 0.0 a finite number, inf any number, "" text, "a|b" one of these words. A
tuple lists alternatives, [x] is a list of x, [x, y] a pair. A key with ? may be missing, and * stands for all keys that
are not named.
"""
DECIDES = ("kind", "end", "ph")
PER_TOKEN = ("tokens", "logp", "teacher_logp")
PLAIN = {str, float, NoneType}
"""Types of which a list is looked at once for each type, however long it is."""


def written_by() -> Line:
    """Return what a checkpoint says of its format, and of the version that wrote it."""
    return {"format": FORMAT, "packages": {"slipstream": slipstream.__version__}}


def format_of(path: Path, said: Mapping[str, Any]) -> int:
    """Return the format that the object in this file names. One that is not known here is refused."""
    found, packages = said.get("format", 1), said.get("packages")
    by = packages.get("slipstream") if isinstance(packages, dict) else None
    if fits(found, 0) and 1 <= found <= FORMAT:
        return int(found)
    raise RunDirError(
        f"{path} is of format {found!r:.20}, and slipstream {slipstream.__version__} reads formats 1 to {FORMAT}: use "
        + (f"slipstream {by}, which wrote it, or a newer one" if fits(by, "") else "the version that wrote it")
    )


def upgraded(name: str, said: Line, number: int) -> Line:
    """Bring the object of a file of this name from format `number` to the present one."""
    for step in range(number, FORMAT):
        said = UPGRADES[step].get(name, dict)(said)
    return said


def resumable(checkpoints: Path, proof: int) -> list[int]:
    """Return the checkpoints that `resume` goes on from by itself: the last one, or one before it if that is damaged.

    Where a run went wrong, these are the ones with so many updates behind them (`proof`), or, without any, all earlier.
    """
    existing = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal())
    suspects = [int(path.stem) for path in checkpoints.glob(f"*{SUSPECT}") if path.stem.isdecimal()]
    if not suspects:
        return existing
    proven = [number for number in existing if number <= max(suspects) - proof]
    return proven or [number for number in existing if number < max(suspects)]


def parsed(path: Path, lines: Iterable[bytes], before: Callable[[], int] = int, *, number: int = FORMAT) -> list[Line]:
    """Return the object on each of these lines of a file of format `number`. A damaged line is refused.

    `before` tells how many lines the file has before them.
    """
    found: list[Line] = []
    for line in lines:
        try:
            found.append(checked(path.name, upgraded(path.name, object_of(line), number)))
        except (ValueError, RecursionError) as error:
            said = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
            raise RunDirError(f"{path} is damaged: {said}, in line {before() + len(found) + 1}") from None
    return found


def object_of(text: bytes) -> Line:
    said = json.loads(text.decode("utf-8"))
    if not isinstance(said, dict):
        raise ValueError(f"an object is expected, not {said!r:.40}")
    return said


def checked(name: str, said: Line) -> Line:
    kind = next((said[key] for key in DECIDES if isinstance(said.get(key), str)), "")
    if wrong := misfit(said, SHAPES.get(name, {})) or misfit(said, SHAPES.get(f"{name} {kind}", {})):
        raise ValueError(wrong)
    if name == "samples.jsonl" and len({len(each) for key in PER_TOKEN if (each := said[key]) is not None}) > 1:
        raise ValueError(f"{', '.join(PER_TOKEN)} are not of one length")
    return said


def misfit(said: Mapping[str, Any], shape: Mapping[str, Any]) -> str:
    """Return what of an object is not as `SHAPES` has it, or nothing."""
    missing = sorted(key for key in shape.keys() - said.keys() if key[-1] not in "?*")
    if missing:
        return f"{missing[0]} is missing"
    for key, value in said.items():
        expected = shape.get(key, shape.get(f"{key}?", shape.get("*", ...)))
        if expected is not ... and not fits(value, expected):
            return f"{key} cannot be {value!r:.40}"
    return ""


def fits(value: Any, shape: Any) -> bool:
    """Return whether a value is of the kind that an entry of `SHAPES` stands for."""
    match shape:
        case tuple():
            return any(fits(value, each) for each in shape)
        case [each] if isinstance(value, list):
            by_type = {type(inner): inner for inner in value}
            return all(fits(inner, each) for inner in (by_type.values() if by_type.keys() <= PLAIN else value))
        case [*_] if isinstance(value, list):
            return len(value) == len(shape) and all(map(fits, value, shape))
        case dict():
            return isinstance(value, dict) and not misfit(value, shape)
        case str():
            return isinstance(value, str) and (not shape or value in shape.split("|"))
        case int():
            return type(value) is int and 0 <= value < LARGEST
        case float():
            if type(value) is float:
                return abs(value) < HUGE if isfinite(value) else shape == inf
            return type(value) is int and abs(value) < LARGEST
    return value is shape
