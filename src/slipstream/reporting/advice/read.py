"""Read a run directory into a `Case` for the rules. The run may still be active."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from typing import Any

from slipstream.config.schema import Config
from slipstream.errors import ModelError
from slipstream.models.resolve import file_of
from slipstream.reporting.advice.measurements import Case
from slipstream.run_dir.reading import Line, RunDir
from slipstream.run_dir.writing import SAMPLES

POSITIONS = ("max_position_embeddings", "n_positions")
WIDE = 512
"""Hidden size of a model with large matrices."""
SAMPLES_READ = 400
"""Number of first samples that the rules read."""


def read(path: str | PathLike[str]) -> Case:
    run = RunDir(path)
    return case_of(run, run.config, run.metrics, run.evaluations)


def case_of(run: RunDir, config: Config, metrics: Sequence[Line], evaluations: Sequence[Line]) -> Case:
    local = [config.model_of(teacher) for teacher in config.teachers.values() if teacher.base_url is None]
    models = [settings_of(model) for model in (config.student, *local)]
    return Case(
        config=config,
        lines=[line for line in metrics if not line.get("sft")],
        evaluations=evaluations,
        samples=[each for each in run.picked(SAMPLES, lambda n, _: n < SAMPLES_READ) if not each.get("source")],
        ledger=run.ledger if config.freshness is not None else (),
        at=str(run.path),
        context=min((model[name] for model in models for name in POSITIONS if name in model), default=None),
        vocabulary=models[0].get("vocab_size"),
        large=models[0].get("hidden_size", 0) >= WIDE,
    )


def settings_of(model: str) -> dict[str, Any]:
    """Return the contents of the model's config.json; empty if the model is not on this machine."""
    try:
        file = file_of(model, "config.json")
    except ModelError:
        return {}
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file is not None else {}
    return {**found, **found.get("text_config", {})}
