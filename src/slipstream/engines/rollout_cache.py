"""Cache of rollouts on disk: a sampler with constant weights draws the same group only once, over all runs.

Each group is one file, `KEY.rollouts`: the SHA-256 of the rest, then safetensors. The key is a hash of everything that
determines the draws: the sampler's identity (weights, precision, end tokens), the tokens of the prompt, its seed, and
the sampling options. A damaged file is never used: the group is drawn again, and a line says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slipstream.protocols import Sampling
from slipstream.records import Group, Handle, Prompt, Rollout, SamplingSupport, header_of, one_turn
from slipstream.run_dir.atomic_files import reading, sync, writing

KEPT = ("actions", "action_logp", "versions", "best_ids", "best_logp")
"""Arrays of a rollout that are stored; the others follow from them."""
DIGEST = hashlib.sha256().digest_size


Draw = Callable[[Prompt, Sampling, Group], Awaitable[list[Handle]]]
"""Method `generate` of a sampler."""


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
        found = {name: getattr(rollout, name) for name in KEPT}
        if (kept := rollout.kept) is not None:
            found |= {"kept.ids": kept.ids, "kept.sizes": kept.sizes}
        arrays |= {f"{place}.{name}": np.ascontiguousarray(each) for name, each in found.items() if each is not None}
    data = save(arrays, {"finish": json.dumps([rollout.finish for rollout in rollouts])})
    return hashlib.sha256(data).digest() + data


def restored(stored: bytes, prompt: Prompt) -> list[Handle]:
    """Return the group of a file, for this prompt; raise ValueError for a damaged file."""
    data = stored[DIGEST:]
    if hashlib.sha256(data).digest() != stored[:DIGEST]:
        raise ValueError("its checksum differs")
    length = int.from_bytes(data[:8], "little")
    finishes, arrays = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["finish"]), load(data)
    group = []
    for place, finish in enumerate(finishes):
        own: dict[str, Any] = {name: arrays[f"{place}.{name}"] for name in KEPT if f"{place}.{name}" in arrays}
        kept = [arrays[f"{place}.kept.{name}"] for name in ("ids", "sizes") if f"{place}.kept.{name}" in arrays]
        own["kept"] = SamplingSupport(*kept) if kept else None
        rollout = one_turn(prompt, prompt.first + place, finish=finish, **own)
        group.append(Handle(header_of(rollout), rollout))
    return group
