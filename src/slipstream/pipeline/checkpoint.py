"""Checkpoints: written beside, then renamed, so that what has a name is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

from slipstream.engines.base import Learner


class Checkpoints:
    def __init__(self, directory: Path, *, every: int, keep: int) -> None:
        self.directory, self.every, self.keep = directory, every, keep

    def due(self, update: int) -> bool:
        return self.every > 0 and update % self.every == 0

    async def save(self, learner: Learner, update: int) -> Path:
        path = self.directory / str(update)
        if not path.exists():
            await save_whole(learner, path)
            for old in sorted(self.existing())[: -self.keep]:
                shutil.rmtree(self.directory / str(old))
        return path

    def existing(self) -> list[int]:
        return [int(path.name) for path in self.directory.glob("*") if path.name.isdigit()]


async def save_whole(learner: Learner, path: Path, *, optimizer: bool = True) -> None:
    beside = path.with_name(path.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    await learner.save(beside, optimizer=optimizer)
    beside.rename(path)
