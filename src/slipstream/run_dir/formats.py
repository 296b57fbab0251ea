"""The format of the files of a run directory: its version, and the shape of each line.

A run directory and each of its checkpoints have a format number: `format` in meta.json and in standing.json. A missing
number means 1. Data of an older format is converted by `UPGRADES` whenever it is read. A newer format is refused.
"""

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
"""Format of the directories that this version of Slipstream writes."""
UPGRADES: Mapping[int, Mapping[str, Callable[[Line], Line]]] = {}
"""Conversions from format N to N + 1, by file name; each converts the object of a file, or of one line.

A resumed run appends lines of the current format to older ones. So a conversion must not change new lines.
"""
HUGE = 1e150
"""Limit of numbers that can be squared without overflow."""
SUSPECT = ".suspect"
"""Suffix of a checkpoint saved when an unhealthy run or a non-finite loss was stopped: its weights may be bad."""
LARGEST = 1 << 53
"""Limit of integers that are exact as floats."""
FILE_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "meta.json": {
        "config": {},
        "prompts?": ("", None),
        "packages?": {"*": ("", None)},
        "command?": [""],
        "trackers?": {"*": ""},
    },
    "metrics.jsonl": {"kind": "train|eval", "update": 0, "set?": "", "*": inf},
    "metrics.jsonl train": {"time?": 0.0, "tokens?": 0.0, "samples?": 0.0, "lag/max?": 0.0},
    "metrics.jsonl eval": {"accuracy?": 0.0, "samples?": 0.0},
    "ledger.jsonl": {
        "number": 0,
        "version?": 0,
        "end": "trained|dropped",
        "cause?": "",
        "causes?": [""],
        "source?": "",
    },
    "ledger.jsonl trained": {
        "tokens?": [0],
        "lag?": [0.0],
        "rewards?": [{"*": inf}],
        "uses?": [0],
        "f?": [(0.0, None)],
    },
    "ledger.jsonl dropped": {"reason": ""},
    "samples.jsonl": {
        **dict.fromkeys(("prompt_id", "prompt", "response", "teacher"), ""),
        **dict.fromkeys(("context?", "context_id?"), ("", None)),
        "update": 0,
        "index?": 0,
        "finish": "",
        "source?": "",
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
"""Shape of each line that readers rely on, by file name, or by file name and kind (the value of a `DECIDES` key).

An example stands for its type: 0 a count, 0.0 a finite number, inf any number, "" text, "a|b" one of these strings. A
tuple lists alternatives, [x] is a list of x, [x, y] a pair. A key with ? may be missing, and * stands for all keys that
are not named.
"""
DECIDES = ("kind", "end", "ph")
PER_TOKEN = ("tokens", "logp", "teacher_logp")


def written_by() -> Line:
    """Return the format entry of a checkpoint, with the version of Slipstream that writes it."""
    return {"format": FORMAT, "packages": {"slipstream": slipstream.__version__}}


def format_of(path: Path, data: Mapping[str, Any]) -> int:
    """Return the format number in the object of a file; raise RunDirError if this version does not know it."""
    found, packages = data.get("format", 1), data.get("packages")
    by = packages.get("slipstream") if isinstance(packages, dict) else None
    if fits(found, 0) and 1 <= found <= FORMAT:
        return int(found)
    raise RunDirError(
        f"{path} is of format {found!r:.20}, and slipstream {slipstream.__version__} reads formats 1 to {FORMAT}: use "
        + (f"slipstream {by}, which wrote it, or a newer one" if fits(by, "") else "the version that wrote it")
    )


def upgraded(name: str, data: Line, number: int) -> Line:
    for step in range(number, FORMAT):
        data = UPGRADES[step].get(name, dict)(data)
    return data


def checkpoint_numbers(checkpoints: Path) -> list[int]:
    """Return the numbers of all checkpoints; other names, also those that only look like a number, are ignored."""
    names = [path.name for path in checkpoints.glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and name == str(int(name)))


def resumable(checkpoints: Path, proof: int) -> list[int]:
    """Return the numbers of the checkpoints that `resume` may use; it uses the last undamaged one of them.

    If a suspect checkpoint exists, the list contains only checkpoints that are at least `proof` updates older. If no
    checkpoint is that old, the list contains all checkpoints before the suspect one.
    """
    existing = checkpoint_numbers(checkpoints)
    suspects = [int(path.stem) for path in checkpoints.glob(f"*{SUSPECT}") if path.stem.isdecimal()]
    if not suspects:
        return existing
    proven = [number for number in existing if number <= max(suspects) - proof]
    return proven or [number for number in existing if number < max(suspects)]


def parsed(path: Path, lines: Iterable[bytes], before: Callable[[], int] = int, *, number: int = FORMAT) -> list[Line]:
    """Return the objects on these lines of a file of format `number`; raise RunDirError for a damaged line.

    `before` returns the number of the file's lines before `lines`, for the error message.
    """
    found: list[Line] = []
    for line in lines:
        try:
            found.append(checked(path.name, upgraded(path.name, object_of(line), number)))
        except (ValueError, RecursionError) as error:
            cause = error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)
            raise RunDirError(f"{path} is damaged: {cause}, in line {before() + len(found) + 1}") from None
    return found


def object_of(text: bytes) -> Line:
    data = json.loads(text.decode("utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"an object is expected, not {data!r:.40}")
    return data


def checked(name: str, data: Line) -> Line:
    kind = next((data[key] for key in DECIDES if isinstance(data.get(key), str)), "")
    if wrong := misfit(data, FILE_SHAPES.get(name, {})) or misfit(data, FILE_SHAPES.get(f"{name} {kind}", {})):
        raise ValueError(wrong)
    if name == "samples.jsonl" and len({len(each) for key in PER_TOKEN if (each := data[key]) is not None}) > 1:
        raise ValueError(f"{', '.join(PER_TOKEN)} differ in length")
    return data


def misfit(data: Mapping[str, Any], shape: Mapping[str, Any]) -> str:
    """Return how an object deviates from a shape of `FILE_SHAPES`, or an empty string."""
    missing = sorted(key for key in shape.keys() - data.keys() if key[-1] not in "?*")
    if missing:
        return f"{missing[0]} is missing"
    for key, value in data.items():
        expected = shape.get(key, shape.get(f"{key}?", shape.get("*", ...)))
        if expected is not ... and not fits(value, expected):
            return f"{key} cannot be {value!r:.40}"
    return ""


def fits(value: Any, shape: Any) -> bool:
    match shape:
        case tuple():
            return any(fits(value, each) for each in shape)
        case [each] if isinstance(value, list):
            return all(fits(inner, each) for inner in representatives(value))
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


def representatives(values: list[Any]) -> list[Any]:
    """Return values of a list that fit a shape only if all do, for speed: extremes of numbers, one of each other type.

    Lists with other values than numbers with a point, texts and None are returned whole.
    """
    finite = [value for value in values if type(value) is float and isfinite(value)]
    other = {type(value): value for value in values if type(value) is not float or not isfinite(value)}
    if not other.keys() <= {str, float, NoneType}:
        return values
    return [*other.values(), *([min(finite), max(finite)] if finite else [])]
