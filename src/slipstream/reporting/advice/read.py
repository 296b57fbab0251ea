"""Read a run directory into a `Case` for the rules. The run may still be active."""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

from slipstream.errors import ModelError
from slipstream.models.resolve import file_of
from slipstream.reporting.advice.measurements import Case
from slipstream.run_dir.reading import RunDir

POSITIONS = ("max_position_embeddings", "n_positions")


def read(path: str | PathLike[str]) -> Case:
    run = RunDir(path)
    config = run.config
    here = [config.model_of(teacher) for teacher in config.teachers.values() if teacher.base_url is None]
    student = settings_of(config.student)
    rooms = [room for model in (config.student, *here) if (room := room_of(settings_of(model))) is not None]
    return Case(
        config=config,
        lines=run.metrics,
        evaluations=run.evaluations,
        samples=run.samples,
        ledger=run.ledger if config.freshness is not None else (),
        at=str(path),
        context=min(rooms, default=None),
        vocabulary=student.get("vocab_size"),
    )


def settings_of(model: str) -> dict[str, Any]:
    """Return the contents of the model's config.json; empty if the model is not on this machine."""
    try:
        file = file_of(model, "config.json")
    except ModelError:
        return {}
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file is not None else {}
    below: dict[str, Any] = found.get("text_config", {})
    return {**found, **below}


def room_of(settings: dict[str, Any]) -> int | None:
    return next((settings[name] for name in POSITIONS if name in settings), None)
