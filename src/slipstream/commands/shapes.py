"""`slipstream config CONFIG --check --shapes`: what a run needs, from the shapes of its models alone."""

from __future__ import annotations

from slipstream.plan.engines import EnginesPlan
from slipstream.plan.gpus import Gpus, crews_of, sum_line
from slipstream.plan.placement import needs, record_lines, turn_lines
from slipstream.plan.shapes import UNSEEN, ShapeCheck
from slipstream.runtimes.local import check_gpus


def shape_lines(found: ShapeCheck, gpus: Gpus | None) -> list[str]:
    """Return the lines to print about a checked config; raise ConfigError if there are too few GPUs."""
    placed, unseen = placement(found.engines, gpus), list(UNSEEN)
    if gpus is None or gpus.memory is None:
        unseen.append("memory of the GPUs: --gpus 8x80 compares the needs with 8 GPUs of 80 GiB")
    return [
        *(f"warning: {each}" for each in found.warnings),
        *(*found.shapes, *found.notes, str(found.method), *map(str, needs(found.engines))),
        *(*record_lines(found.engines), *placed),
        *(f"not looked at: {each}" for each in unseen),
        "ok: everything that shapes can tell was checked",
    ]


def placement(plan: EnginesPlan, gpus: Gpus | None) -> list[str]:
    """Return lines about the GPUs of the run; raise ConfigError if there are too few."""
    if plan.runtime.device == "cpu":
        return []
    if plan.runtime.kind == "inline":
        return ["all engines share one GPU", *turn_lines(plan)]
    return [sum_line(crews_of(plan))] if gpus is None else check_gpus(plan, gpus.machines, str)
