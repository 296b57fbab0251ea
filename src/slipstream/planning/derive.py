"""What stages cost in a run that was made, from its own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from slipstream.config.base import at_first
from slipstream.errors import RunDirError
from slipstream.planning.costs import Costs, DecodeCost, LearnCost, Lengths, PublishCost, ScoreCost, quantiles
from slipstream.planning.fit import Paid, fitted
from slipstream.run_dir.reading import Line, RunDir

FIRST = 2
"""Updates that are slower than others."""


def costs_of(run: RunDir) -> Costs:
    """Wall clock, so cores that its engines shared are in it, and every sequence counts by its response alone.

    Where each update rolled out by itself, and at once, its longest response and all of its tokens tell apart what a
    step and what a row of it costs. Elsewhere all of it is put on the rows, which is right for as many of them.
    """
    config, lines, ledger = run.config, run.metrics[FIRST:], run.ledger
    if len(lines) < 2:
        raise RunDirError(f"{run.path} has made {len(run.metrics)} updates: {FIRST + 2} at least say what stages cost")
    samplers, scorers = at_first(config.sampler.replicas), sum(at_first(t.replicas) for t in config.teachers.values())
    loads = [line["publish/load"] + line.get("publish/rebuild", 0.0) for line in lines if "publish/load" in line]
    return Costs(
        decode=decode_cost(run, lines, samplers),
        score=ScoreCost(token=spent(lines, "score") * scorers),
        learn=LearnCost(token=spent(lines, "learn") * config.learner.ranks),
        publish=PublishCost(load=fmean(loads) if loads else 0.0),
        lengths=Lengths(responses=quantiles([n for entry in ledger for n in entry.get("tokens", ())])),
    )


def decode_cost(run: RunDir, lines: Sequence[Line], samplers: int) -> DecodeCost:
    config = run.config
    serial = config.schedule.serial and samplers == 1
    if not serial or config.learner.batch_size > config.sampler.slots:
        return DecodeCost(step=0.0, row=spent(lines, "rollout") * samplers)
    paid = [
        Paid(line["stage/rollout"] * line["seconds/update"], {"step": line["length/max"], "row": line["tokens"]})
        for line in lines
    ]
    return DecodeCost(**fitted(paid))


def spent(lines: Sequence[Line], stage: str) -> float:
    """Seconds of a stage for each token of a response."""
    seconds = sum(line[f"stage/{stage}"] * line["seconds/update"] for line in lines)
    return float(seconds / sum(line["tokens"] for line in lines))
