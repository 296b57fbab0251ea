"""Costs of stages, derived from the metrics of an existing run."""

from collections.abc import Sequence
from statistics import fmean

from slipstream.config.base import at_first
from slipstream.config.costs import Costs, DecodeCost, LearnCost, Lengths, PublishCost, ScoreCost, quantiles
from slipstream.errors import RunDirError
from slipstream.metrics import new_tokens
from slipstream.planning.fit import Paid, fitted
from slipstream.run_dir.reading import Line, RunDir

FIRST = 2
"""Number of first updates to leave out, because first updates are slower."""


def costs_of(run: RunDir) -> Costs:
    """Return the costs of a run's stages, in wall-clock seconds for each token of a response.

    Rollout and scoring are often ahead of the learner. Their seconds are divided by the tokens that they finished in
    the same time. If all samples of an update are decoded together, its longest response separates the cost of steps
    from that of rows. Otherwise rows get all the cost, which is right only for the same number of rows.
    """
    config, ledger = run.config, run.ledger
    lines = [line for line in run.metrics if not line.get("sft")][FIRST:]
    if len(lines) < 2:
        raise RunDirError(f"{run.path} has too few updates with rollouts: to derive costs it needs {FIRST + 2} or more")
    samplers, lengths = at_first(config.sampler.replicas), [n for entry in ledger for n in entry.get("tokens", ())]
    if not lengths or not finished(lines, "rollout"):
        raise RunDirError(
            f"{run.path} has no {'rollouts after its first updates' if lengths else 'ledger'}, so that no costs can be "
            "derived from it"
        )
    loads = [line["publish/load"] + line.get("publish/rebuild", 0.0) for line in lines if "publish/load" in line]
    return Costs(
        decode=decode_cost(run, lines, samplers),
        score=ScoreCost(token=scoring_seconds(lines) / max(finished(lines, "score"), 1.0)),
        learn=LearnCost(token=seconds(lines, "learn") / sum(line["tokens"] for line in lines) * config.learner.ranks),
        publish=PublishCost(load=fmean(loads) if loads else 0.0),
        lengths=Lengths(responses=quantiles(lengths)),
    )


def decode_cost(run: RunDir, lines: Sequence[Line], samplers: int) -> DecodeCost:
    config = run.config
    row = seconds(lines, "rollout") / finished(lines, "rollout") * samplers
    if config.schedule.kinds()[0] != "sync" or samplers > 1 or config.learner.batch_size > config.sampler.slots:
        return DecodeCost(step=0.0, row=row)
    paid = [
        Paid(seconds([line], "rollout"), {"step": line["length/max"], "row": tokens})
        for line in lines
        if 0 < (tokens := finished([line], "rollout")) < 1.01 * new_tokens(line)  # all that was drawn is in the batch
    ]
    return DecodeCost(**fitted(paid)) if len(paid) > 1 else DecodeCost(step=0.0, row=row)


def finished(lines: Sequence[Line], stage: str) -> float:
    """Return the tokens that a stage finished in these updates."""
    return float(sum(line.get(f"tokens_per_s/{stage}", 0.0) * line["seconds/update"] for line in lines))


def seconds(lines: Sequence[Line], stage: str) -> float:
    return float(sum(line[f"stage/{stage}"] * line["seconds/update"] for line in lines))


def scoring_seconds(lines: Sequence[Line]) -> float:
    """Return the seconds of all scorers together; stage/score counts a moment once, however many of them are busy."""
    total = 0.0
    for line in lines:
        busy = sum(1 - idle for name, idle in line.items() if name.startswith("idle/scorer"))
        total += line["stage/score"] * line["seconds/update"] * busy / max(line["busy/score"], 1e-9)
    return total
