"""Planner: the best split of devices between stages for every schedule, and the gain of one more device.

A quick estimate from the slowest stage selects the splits that are worth a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.config.base import at_first
from slipstream.config.costs import Costs, Lengths
from slipstream.config.engines import devices_of
from slipstream.config.file import load
from slipstream.config.schedule import Async, Periodic, ScheduleConfig, StepOff, Sync
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.pipeline.schedules import schedule_of
from slipstream.planning.simulate import Forecast, Split, Work, forecast
from slipstream.run_dir.reading import RunDir

USUAL: tuple[ScheduleConfig, ...] = (Sync(), Periodic(), StepOff(k=1), StepOff(k=2), Async(tau=1), Async(tau=4))
WITHIN, MOST = 0.7, 4
"""Splits are simulated if their estimate is at least WITHIN × the best estimate, at most MOST splits per schedule."""
SAMPLES, LEAST_UPDATES, MOST_UPDATES = 2500, 10, 25
"""Number of samples of a simulation after warm-up, and least and largest number of its updates."""
MOST_DEVICES = 256
"""Largest number of devices of a plan; all their splits are estimated."""


ONE_SPLIT = Split(1, 1, 1)


def splits(
    devices: int, scorers: int | None = None, each: Split = ONE_SPLIT, most_ranks: int | None = None
) -> Iterator[Split]:
    """Yield all splits of the devices that give every stage at least one worker, and the learner the rest.

    The learner has at most `most_ranks`; further devices stay idle.
    `scorers` is the number of scorers that need no device: endpoints, or 0 without teachers. If it is None, each scorer
    needs devices. `each` has the number of devices of one sampler and of one scorer; a rank of the learner has one.
    """
    for samplers in range(1, devices // each.samplers + 1):
        left = devices - samplers * each.samplers
        used = each.scorers if scorers is None else 0
        for own in range(1, (left - 1) // used + 1) if used else [scorers or 0]:
            if (ranks := left - own * used) > 0:
                yield Split(samplers, own, min(ranks, most_ranks or ranks))


def check_enough(devices: int, scorers: int | None, each: Split) -> None:
    """Raise a ConfigError if some stage would have no worker; see `splits`."""
    least = each.samplers + (each.scorers if scorers is None else 0) + 1
    if devices < least:
        counts = [each.samplers, *([each.scorers] if scorers is None else []), 1]
        needed = "one each" if set(counts) == {1} else f"{', '.join(map(str, counts[:-1]))} and 1"
        stages = "sampler, scorer and learner" if scorers is None else "sampler and learner"
        raise ConfigError(f"--devices {devices}: {stages} need {needed}: write {least} or more")


@dataclass(frozen=True, kw_only=True)
class Offer:
    schedule: str
    split: Split
    forecast: Forecast
    seconds: float
    """Seconds of the whole run."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    devices: int
    offers: Sequence[Offer]
    """All simulations with `devices` devices."""
    more: Sequence[Offer]
    """All simulations with one more device."""

    @property
    def best(self) -> dict[str, Offer]:
        return fastest(self.offers)

    @property
    def next(self) -> dict[str, Offer]:
        """Fastest offers with one more device, which may stay idle."""
        return fastest([*self.best.values(), *self.more])


def fastest(offers: Sequence[Offer]) -> dict[str, Offer]:
    best = dict[str, Offer]()
    for offer in offers:
        other = best.setdefault(offer.schedule, offer)
        if offer.forecast.samples_per_s > other.forecast.samples_per_s:
            best[offer.schedule] = offer
    return best


def outlook(
    costs: Costs,
    work: Work,
    *,
    devices: int,
    updates: int,
    schedules: Sequence[ScheduleConfig] = USUAL,
    scorers: int | None = None,
    each: Split = ONE_SPLIT,
    say: Callable[[str], None] = lambda _: None,
) -> Outlook:
    check_enough(devices, scorers, each)
    simulated = max(LEAST_UPDATES, min(MOST_UPDATES, SAMPLES // work.batch))

    def offers(count: int) -> list[Offer]:
        found = list[Offer]()
        for schedule in schedules:
            for split in promising_splits(costs, work, list(splits(count, scorers, each, work.most_ranks)), schedule):
                say(f"{schedule.label} on {count} devices, split {split}")
                seen = forecast(costs, split, schedule, work, updates=simulated)
                seconds = seen.seconds(updates, work.batch)
                found.append(Offer(schedule=schedule.label, split=split, forecast=seen, seconds=seconds))
        return found

    return Outlook(devices=devices, offers=offers(devices), more=offers(devices + 1))


def promising_splits(costs: Costs, work: Work, splits: Sequence[Split], schedule: ScheduleConfig) -> list[Split]:
    """Return the splits with the best estimates; of equal ones, those whose stages are faster together."""
    estimates = {split: estimate(costs, work, split, schedule) for split in splits}
    least = WITHIN * max(estimates.values())[0]
    return sorted((s for s in splits if estimates[s][0] >= least), key=estimates.__getitem__, reverse=True)[:MOST]


def estimate(costs: Costs, work: Work, split: Split, schedule: ScheduleConfig) -> tuple[float, float]:
    """Return upper bounds on samples per second: as far as stages overlap, and if they did not.

    The first is set by the slowest stage, stages in turn, or shared cores. A decoding step is shared by the rows of a
    batch if whole batches roll out, else by all rows in flight.
    """
    knobs = schedule_of(schedule, work.batch // work.group, work.reuse)
    together = (knobs.groups if knobs.submit == "batch" else knobs.credits) * work.group
    rows = min(work.slots, max(1.0, together / split.samplers))
    each, uses = per_sample(costs, work, rows=rows), work.reuse.times if work.reuse is not None else 1
    each |= {stage: each[stage] / uses for stage in ("rollout", "score")}
    workers = {"rollout": split.samplers, "score": max(1, split.scorers), "learn": split.ranks, "coordinator": 1}
    seconds = [each[stage] / count for stage, count in workers.items()]
    cores = sum(each.values()) / costs.cores if costs.cores is not None else 0.0
    return 1 / max(sum(seconds) if knobs.stages == "turns" else max(seconds), cores), 1 / sum(seconds)


def per_sample(costs: Costs, work: Work, *, rows: float) -> dict[str, float]:
    """Return the minimum device seconds per sample of each stage, with `rows` rows per step and no cost per pass."""
    lengths, decode, learn = costs.lengths, costs.decode, costs.learn
    mean, context = mean_lengths(lengths, work.max_tokens)
    passed = lengths.prompt + mean
    return {
        "rollout": mean * (decode.step / rows + decode.row)
        + decode.context * context
        + costs.read.token * lengths.prompt / work.group,
        "score": costs.score.token * passed * (1 + work.rechecked) if work.scored else 0.0,
        "learn": learn.token * passed * work.epochs + learn.step * work.minibatches * work.epochs / work.batch,
        "coordinator": costs.coordinator,
    }


@cache
def mean_lengths(lengths: Lengths, max_tokens: int) -> tuple[float, float]:
    """Return the mean length of a response, and its mean sum of the lengths of the context of all tokens."""
    drawn = [min(max_tokens, lengths.draw(number, 0)) for number in range(1000)]
    return fmean(drawn), fmean(n * (lengths.prompt + n / 2) for n in drawn)


@dataclass(frozen=True)
class PlannedConfig:
    config: Config
    run: RunDir | None = None

    @classmethod
    def of(cls, source: str, changes: Sequence[tuple[str, str]], say: Callable[[str], None]) -> PlannedConfig:
        if Path(source).is_dir():
            run = RunDir(source)
            return cls(load(run.path / "config.toml", changes, say=say), run)
        return cls(load(source, changes, say=say))

    def check(self, devices: int | None) -> None:
        if self.config.sampler.engine == "server":
            raise ConfigError(
                'sampler.engine = "server": no costs of a rollout server are known, so no plan can be made'
            )
        if self.config.runtime.kind == "inline" and devices is not None:
            raise ConfigError(
                '--devices: runtime.kind = "inline" has all engines in one process: write "local" or "ray"'
            )
        if devices is not None and devices > MOST_DEVICES:
            raise ConfigError(f"--devices {devices}: at most {MOST_DEVICES} can be planned")
        if devices is not None:
            check_enough(devices, self.scorers, self.each)

    @property
    def each(self) -> Split:
        """Number of devices of one worker of each stage; of several teachers, the one with most devices counts."""
        scorers = [1, *(teacher.devices_each for teacher in self.config.teachers.values())]
        return Split(devices_of(self.config.sampler.engine_args), max(scorers), 1)

    @property
    def schedules(self) -> list[ScheduleConfig]:
        """Usual schedules that are valid for the config, then its own one unless its tau is "auto"."""
        learner, own = self.config.learner, self.config.schedule
        several = learner.minibatches * learner.epochs > 1
        usual = [each for each in USUAL if not (several and isinstance(each, Periodic))]
        if isinstance(own, Async) and own.tau == "auto":
            return usual
        return [each for each in usual if each.label != own.label] + [own]

    @property
    def scorers(self) -> int | None:
        """Number of scorers if none needs a device, else None."""
        teachers = self.config.teachers.values()
        return sum(at_first(each.replicas) for each in teachers) if all(each.base_url for each in teachers) else None

    def outlook(self, costs: Costs, devices: int | None, say: Callable[[str], None]) -> Outlook:
        return outlook(
            costs,
            Work.of(self.config),
            devices=devices or self.config.devices,
            updates=self.config.updates,
            schedules=self.schedules,
            scorers=self.scorers,
            each=self.each,
            say=say,
        )


def numbers(outlook: Outlook) -> dict[str, Any]:
    """Return an outlook as plain data, for JSON."""

    def plain(offer: Offer) -> Mapping[str, Any]:
        return {
            "schedule": offer.schedule,
            "split": asdict(offer.split),
            "seconds": offer.seconds,
            **asdict(offer.forecast),
        }

    return {
        "devices": outlook.devices,
        "best": {name: plain(offer) for name, offer in outlook.best.items()},
        "next": {name: plain(offer) for name, offer in outlook.next.items()},
        "offers": [plain(offer) for offer in outlook.offers],
    }
