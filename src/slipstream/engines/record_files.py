"""Groups of records on disk: arrays in `groups.safetensors`, all other fields in `groups.json`, nothing pickled.

Reading returns exactly what was written, including data types. A prompt shared by several members is written once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from slipstream.errors import RunDirError, first_line
from slipstream.records import Attempts, Group, Handle, Header, Prompt, Rollout, SamplingSupport, Scored, is_json
from slipstream.run_dir.atomic_files import writing

ARRAYS, REST = "groups.safetensors", "groups.json"
NESTED: dict[str, type[Any]] = {"rollout": Rollout, "kept": SamplingSupport}
"""Fields that are records themselves. Prompts are stored in a separate list, and records hold the position in it."""


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write groups into a directory; raise RunDirError if JSON cannot hold a value or the disk is full."""
    writer = Writer()
    written = [[writer.member(handle) for handle in group] for group in groups]
    with writing(path):
        try:
            save_file(writer.arrays, path / ARRAYS)
        except SafetensorError as error:
            raise RunDirError(f"{path} cannot be written: {first_line(error)}") from None
        (path / REST).write_text(json.dumps({"prompts": writer.prompts, "groups": written}))


def read_groups(path: Path) -> list[list[Handle]]:
    arrays, rest = load_file(path / ARRAYS), json.loads((path / REST).read_text())
    prompts = [record(Prompt, prompt, arrays, []) for prompt in rest["prompts"]]

    def body(found: dict[str, Any] | None) -> Any:
        return None if found is None else record(Scored if "rollout" in found else Rollout, found, arrays, prompts)

    return [[Handle(header(each["header"]), body(each["body"])) for each in group] for group in rest["groups"]]


class Writer:
    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self.prompts: list[dict[str, Any]] = []
        self.numbers: dict[int, int] = {}
        """Positions in `prompts` by `id(prompt)`; the ids stay valid because the caller holds the prompts."""

    def member(self, handle: Handle) -> dict[str, Any]:
        return {"header": asdict(handle.header), "body": None if handle.body is None else self.record(handle.body)}

    def record(self, source: Any) -> dict[str, Any]:
        """Return all fields in a dict: array fields as their names in `arrays`, and nested records as dicts."""
        found: dict[str, Any] = {}
        for name in (field.name for field in fields(source)):
            match value := getattr(source, name):
                case np.ndarray():
                    found.setdefault("arrays", {})[name] = self.array(value)
                case Rollout() | SamplingSupport():
                    found[name] = self.record(value)
                case Prompt():
                    found[name] = self.prompt(value)
                case _:
                    if not is_json(value):
                        prompt = getattr(source, "prompt", source).id
                        raise RunDirError(f"prompt {prompt}: {name} = {value!r} cannot be saved: JSON does not hold it")
                    found[name] = value
        return found

    def array(self, value: NDArray[Any]) -> str:
        name = str(len(self.arrays))
        self.arrays[name] = np.ascontiguousarray(value)  # safetensors ignores strides and writes memory order
        return name

    def prompt(self, prompt: Prompt) -> int:
        if id(prompt) not in self.numbers:
            self.prompts.append(self.record(prompt))
            self.numbers[id(prompt)] = len(self.prompts) - 1
        return self.numbers[id(prompt)]


def record(kind: type[Any], found: dict[str, Any], arrays: dict[str, NDArray[Any]], prompts: Sequence[Prompt]) -> Any:
    given = {name: value for name, value in found.items() if name != "arrays"}
    given |= {name: arrays[key] for name, key in found.get("arrays", {}).items()}
    for name, nested in NESTED.items():
        if given.get(name) is not None:
            given[name] = record(nested, given[name], arrays, prompts)
    if "prompt" in given:
        given["prompt"] = prompts[given["prompt"]]
    return kind(**given)


def header(found: dict[str, Any]) -> Header:
    found = {**found, **{name: tuple(map(tuple, found[name])) for name in ("versions", "spans")}}
    if found.get("attempts") is not None:
        found["attempts"] = Attempts(**found["attempts"])
    return Header(**found)
