"""Records on disk: groups of a checkpoint, rollouts of constant weights, lines of samples.jsonl. Nothing is pickled.

Groups are arrays in `groups.safetensors` and all other fields in `groups.json`. Reading returns exactly what was
written, including data types. A prompt shared by several members is written once.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save, save_file

from slipstream.errors import RunDirError, first_line
from slipstream.protocols import Draw, Quote, Sampling
from slipstream.records import (
    Attempts,
    Group,
    Handle,
    Header,
    Prompt,
    Rollout,
    SamplingSupport,
    Scored,
    header_of,
    is_json,
    one_turn,
    turns_of,
    version_runs,
)
from slipstream.run_dir.atomic_files import reading, sync, writing

GROUP_ARRAYS, GROUP_REST = "groups.safetensors", "groups.json"
NESTED_RECORDS: dict[str, type[Any]] = {"rollout": Rollout, "kept": SamplingSupport}
"""Fields that are records themselves. Prompts are stored in a separate list, and records hold the position in it."""
RECORD_FIELDS_ON_DISK = {"text": "said"}
"""Names of header fields in `groups.json`, where they differ."""


def write_groups(path: Path, groups: Sequence[Group]) -> None:
    """Write groups into a directory; raise RunDirError if JSON cannot hold a value or the disk is full."""
    writer = Writer()
    written = [[writer.member(handle) for handle in group] for group in groups]
    with writing(path):
        try:
            save_file(writer.arrays, path / GROUP_ARRAYS)
        except SafetensorError as error:
            raise RunDirError(f"{path} cannot be written: {first_line(error)}") from None
        (path / GROUP_REST).write_text(json.dumps({"prompts": writer.prompts, "groups": written}))


def read_groups(path: Path) -> list[list[Handle]]:
    arrays, rest = load_file(path / GROUP_ARRAYS), json.loads((path / GROUP_REST).read_text())
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
        header = {RECORD_FIELDS_ON_DISK.get(name, name): value for name, value in asdict(handle.header).items()}
        return {"header": header, "body": None if handle.body is None else self.record(handle.body)}

    def record(self, source: Any) -> dict[str, Any]:
        """Return all fields in a dict: array fields as their names in `arrays`, and nested records as dicts."""
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(source)):
            match value := getattr(source, name):
                case np.ndarray():
                    values.setdefault("arrays", {})[name] = self.array(value)
                case Rollout() | SamplingSupport():
                    values[name] = self.record(value)
                case Prompt():
                    values[name] = self.prompt(value)
                case _:
                    if not is_json(value):
                        prompt = getattr(source, "prompt", source).id
                        raise RunDirError(f"prompt {prompt}: {name} = {value!r} cannot be saved: JSON does not hold it")
                    values[name] = value
        return values

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
    for name, nested in NESTED_RECORDS.items():
        if given.get(name) is not None:
            given[name] = record(nested, given[name], arrays, prompts)
    if "prompt" in given:
        given["prompt"] = prompts[given["prompt"]]
    return kind(**given)


def header(found: dict[str, Any]) -> Header:
    found = {**found, **{name: tuple(map(tuple, found[name])) for name in ("versions", "spans")}}
    found |= {name: found.pop(old) for name, old in RECORD_FIELDS_ON_DISK.items() if old in found}
    if found.get("left_out") is not None:
        found["left_out"] = tuple(found["left_out"])
    if found.get("attempts") is not None:
        found["attempts"] = Attempts(**found["attempts"])
    return Header(**found)


# --- cache of rollouts ------------------------------------------------------------------------------------------------
#
# A sampler with constant weights draws the same group only once, over all runs. Each group is one file, `KEY.rollouts`:
# the SHA-256 of the rest, then safetensors. The key is a hash of everything that determines the draws: the sampler's
# identity (weights, precision, end tokens), the tokens of the prompt, its seed, and the sampling options. A damaged
# file is never used: the group is drawn again, and a line says so.


STORED_ARRAYS = ("actions", "action_logp", "versions", "best_ids", "best_logp")
"""Arrays of a rollout that are stored; the others follow from them."""
DIGEST_SIZE = hashlib.sha256().digest_size


class RolloutCache:
    """Store the complete groups of supervised updates in a directory, and read those that are already there."""

    def __init__(self, draw: Draw, directory: Path, identity: str) -> None:
        """Wrap a sampler with constant weights; `identity` names everything in it that determines its draws."""
        self.draw, self.directory, self.identity = draw, directory, identity

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        if not prompt.supervised:
            return await self.draw(prompt, sampling, begun)
        path, cause = self.path_of(prompt, sampling), ""
        if path.exists():
            with reading(path) as file:
                stored = file.read()
            try:
                return restored(stored, prompt)
            except (ValueError, KeyError, SafetensorError) as fault:
                cause = f"{path} is damaged ({fault}): its rollouts are drawn again"
        group = await self.draw(prompt, sampling, begun)
        if group and all(handle.header.finish in ("eos", "length") for handle in group):
            self._write(path, stored_group([handle.body for handle in group]))
        return [handle.with_header(cause=cause) for handle in group] if cause else group

    def path_of(self, prompt: Prompt, sampling: Sampling) -> Path:
        key = hashlib.sha256(self.identity.encode())
        options = asdict(sampling) | {"park": False}  # parking keeps memory, and changes no draw
        del options["router"]  # of the student, and here a teacher draws
        key.update(json.dumps([options, prompt.seed, prompt.offset, prompt.first], sort_keys=True).encode())
        key.update(prompt.tokens.astype("<i8").tobytes())
        return self.directory / f"{key.hexdigest()}.rollouts"

    def _write(self, path: Path, stored: bytes) -> None:
        """Write a file so that other processes see it complete or not at all."""
        with writing(path):
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor, beside = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(stored)
                sync(Path(beside))
                Path(beside).replace(path)
            except BaseException:
                Path(beside).unlink(missing_ok=True)
                raise


def stored_group(rollouts: list[Rollout]) -> bytes:
    """Return the bytes of a file for the rollouts of a group, each of one turn."""
    arrays: dict[str, Any] = {}
    for place, rollout in enumerate(rollouts):
        columns = {name: getattr(rollout, name) for name in STORED_ARRAYS}
        if (kept := rollout.kept) is not None:
            columns |= {"kept.ids": kept.ids, "kept.sizes": kept.sizes}
        arrays |= {f"{place}.{name}": np.ascontiguousarray(each) for name, each in columns.items() if each is not None}
    data = save(arrays, {"finish": json.dumps([rollout.finish for rollout in rollouts])})
    return hashlib.sha256(data).digest() + data


def restored(stored: bytes, prompt: Prompt) -> list[Handle]:
    """Return the group of a file, for this prompt; raise ValueError for a damaged file."""
    data = stored[DIGEST_SIZE:]
    if hashlib.sha256(data).digest() != stored[:DIGEST_SIZE]:
        raise ValueError("its checksum differs")
    length = int.from_bytes(data[:8], "little")
    finishes, arrays = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["finish"]), load(data)
    group = []
    for place, finish in enumerate(finishes):
        own: dict[str, Any] = {name: arrays[f"{place}.{name}"] for name in STORED_ARRAYS if f"{place}.{name}" in arrays}
        kept = [arrays[f"{place}.kept.{name}"] for name in ("ids", "sizes") if f"{place}.kept.{name}" in arrays]
        own["kept"] = SamplingSupport(*kept) if kept else None
        rollout = one_turn(prompt, prompt.first + place, finish=finish, **own)
        group.append(Handle(header_of(rollout), rollout))
    return group


Decode = Callable[[Sequence[int]], str]


def quote(header: Header, sample: Scored, update: int, decode: Decode) -> Quote:
    """Return a line of samples.jsonl: texts include special tokens, and log-probs have one entry per trained token."""
    rollout, teacher = sample.rollout, sample.teacher_logp
    trained = rollout.loss_mask
    turns = [("said" if said else "seen", decode(tokens.tolist())) for said, tokens in turns_of(rollout)]
    return {
        "update": update,
        "number": header.number,
        "index": header.index,
        "prompt_id": header.prompt,
        "prompt": decode(rollout.prompt.tokens.tolist()),
        "response": decode(rollout.tokens.tolist()),
        "turns": turns if len(turns) > 1 else None,
        "finish": header.finish,
        "rewards": header.rewards,
        "teacher": header.teacher,
        "teacher_version": sample.teacher_version,
        "attempts": None if header.attempts is None else asdict(header.attempts),
        "context_id": sample.context_id,
        "context": None if sample.context is None else decode(sample.context.tolist()),
        "source": header.source,
        "versions": [] if header.source else version_runs(rollout.versions, trained),
        "tokens": [decode([token]) for token in rollout.tokens[trained].tolist()],
        "logp": rounded(rollout.logp[trained].tolist()),
        "teacher_logp": None if teacher is None else rounded(teacher.tolist()),
    }


def rounded(numbers: Iterable[float]) -> list[float | None]:
    """Round to 4 decimals, and replace NaN and infinite numbers, which JSON cannot hold, by None."""
    return [round(x, 4) if math.isfinite(x) else None for x in numbers]


def as_numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
