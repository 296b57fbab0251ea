"""Checkpoints: written beside, then renamed, so that what has a name is whole.

checkpoints/N holds the learner after update N (a HF directory, and its optimizer) and `standing.json`, where the run
stood then. A run that goes on from it forgets whatever came later and submits what was in flight again, with the same
seeds: every group still ends exactly once.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from slipstream.engines.base import Learner
from slipstream.errors import RunDirError
from slipstream.pipeline.admission import Standing

STANDING = "standing.json"


class Checkpoints:
    def __init__(self, directory: Path, *, every: int, keep: int, proof: int = 0) -> None:
        """`proof` is how many updates it takes to see that weights are sound."""
        self.directory, self.every, self.keep, self.proof = directory, every, keep, proof

    def due(self, update: int) -> bool:
        return self.every > 0 and update % self.every == 0

    async def save(self, learner: Learner, standing: Standing) -> Path:
        """And remove older ones, but neither the last that has proven sound nor the one that will be next."""
        path, existing = await self.keep_all(learner, standing), self.existing()
        proven = self.proven(standing.version)
        stay = {*existing[-self.keep :], *proven[-1:], *existing[len(proven) :][:1]}
        for old in set(existing) - stay:
            shutil.rmtree(self.directory / str(old))
        return path

    async def keep_all(self, learner: Learner, standing: Standing, *, suspect: bool = False) -> Path:
        """At a stop: what is older stays, as these weights may be worse. No run goes on from suspect ones by itself."""
        path = self.directory / (f"{standing.version}.suspect" if suspect else str(standing.version))
        if not path.exists():
            await save_whole(learner, path, standing=standing)
        return path

    def proven(self, version: int) -> list[int]:
        """Of what exists, after so many updates."""
        return [number for number in self.existing() if number <= version - self.proof]

    def existing(self) -> list[int]:
        return sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdigit())


async def save_whole(learner: Learner, path: Path, *, standing: Standing | None = None) -> None:
    """The student; with a standing, also what is needed to go on from here."""
    beside = path.with_name(path.name + ".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    await learner.save(beside, optimizer=standing is not None)
    if standing is not None:
        (beside / STANDING).write_text(json.dumps(asdict(standing)))
    beside.rename(path)


def newest(run: Path) -> tuple[Path, Standing]:
    """The last checkpoint of a run directory."""
    found = Checkpoints(run / "checkpoints", every=0, keep=1).existing()
    if not found:
        raise RunDirError(f"{run} has no checkpoint to go on from: set checkpoint.every")
    path = run / "checkpoints" / str(found[-1])
    saved = json.loads((path / STANDING).read_text())
    in_flight = {int(number): batch for number, batch in saved.pop("in_flight").items()}
    return path, Standing(**saved, in_flight=in_flight)
