"""`slipstream plan`: simulated speed and lag of a config for a number of devices, before any run."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from slipstream.commands.common import note
from slipstream.console import Screen
from slipstream.errors import ConfigError, RunDirError
from slipstream.reporting.report.titles import short
from slipstream.run_dir.atomic_files import check_page, write_atomic, writing
from slipstream.runs.display import waiting
from slipstream.runs.start import opened, planned_on, process_launcher

if TYPE_CHECKING:
    from slipstream.config.costs import Costs
    from slipstream.planning.planner import Offer, Outlook, PlannedConfig

HOW_TO_GIVE_COSTS = "write --measure to measure its engines, or --costs FILE, or name a run directory"


def run(args: Namespace) -> None:
    from slipstream.planning.planner import PlannedConfig, numbers

    console = Screen(quiet=args.json)
    subject = PlannedConfig.of(args.source, args.overrides, note)
    subject.check(args.devices)
    if args.to is not None and args.to.exists():
        raise RunDirError(f"{args.to} exists: -o writes a new file")
    for target in filter(None, (args.to, args.report)):
        check_page(target)
        if not target.parent.is_dir():
            raise RunDirError(f"{target} cannot be written: there is no {target.parent}")
    costs = costs_of(subject, args.costs, args.measure)
    if costs is None:
        raise ConfigError(f"{args.source}: nothing gives the costs of its stages: {HOW_TO_GIVE_COSTS}")
    if args.to is not None:
        with writing(args.to):
            write_atomic(args.to, costs.to_toml())
        note(f"costs are in {args.to}")
    with waiting(console, "simulating") as still:
        seen = subject.outlook(costs, args.devices, lambda text: still(f"simulating {text}"))
    if args.report is not None:
        words = ["--costs", str(args.costs)] if args.costs is not None else ["--measure"] if args.measure else []
        words += ["--devices", str(args.devices)] if args.devices is not None else []
        words += ["--report", str(args.report)]
        words += [word for key, value in args.overrides for word in (f"--{key}", value)]
        write_page(args.report, seen, subject, costs, shlex.join(["slipstream", "plan", args.source, *words]))
        note(f"figures are in {args.report}")
    if args.json:
        print(json.dumps(numbers(seen)))
        return
    for line in forecast_lines(seen, subject, costs):
        console.print(line)


def write_page(target: Path, seen: Outlook, subject: PlannedConfig, costs: Costs, command: str) -> None:
    from slipstream.reporting.report.forecast import page
    from slipstream.reporting.report.page import document

    own, updates = subject.config.schedule.label, subject.config.updates
    text = document(page(seen, costs, own=own, updates=updates, command=command))
    with writing(target):
        write_atomic(target, text)


def costs_of(subject: PlannedConfig, file: Path | None, measure: bool) -> Costs | None:
    from slipstream.config import costs
    from slipstream.planning import derive

    if measure:
        return measured_costs(subject)
    if file is not None:
        found = costs.load(file)
    elif subject.run is not None:
        found = derive.costs_of(subject.run)
    else:
        return None
    if subject.config.runtime.kind != "inline" or found.cores == 1:
        return found
    note('note: runtime.kind = "inline" has all engines in one process: cores = 1')
    return found.model_copy(update={"cores": 1.0})


def measured_costs(subject: PlannedConfig) -> Costs:
    """Measure the costs with the engines that `train` would start."""
    from slipstream.planning import measure

    quiet = Console(quiet=True)
    with process_launcher(subject.config) as launcher:
        planned = planned_on(quiet, subject.config, launcher)
        measure.check_measurable(planned)
        with opened(planned, launcher, quiet) as engines:
            return measure.measured(planned, engines, say=note)


def forecast_lines(seen: Outlook, subject: PlannedConfig, costs: Costs) -> list[str | Table]:
    own, best = subject.config.schedule.label, max(seen.best.values(), key=speed)
    shared = "" if costs.cores is None else f" that share {costs.cores:g} core{'s' * (costs.cores != 1)}"
    title = f"best splits of {seen.devices} devices{shared} into samplers + scorers + learner ranks"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("schedule", "split", "samples/s", "lag, max", "idle %", "time"):
        table.add_column(head, justify="left" if head in ("schedule", "split") else "right", no_wrap=True)
    table.add_column(f"with {seen.devices + 1}", no_wrap=True)
    for name, offer in seen.best.items():
        style = "bold" if offer is best else ""
        table.add_row(*cells(name + (" *" if name == own else ""), offer, seen.next[name]), style=style)
    lines: list[str | Table] = [table]
    if own in seen.best:
        others = [offer for offer in seen.offers if offer.schedule == own and offer is not seen.best[own]]
        lines += [f"* {own} split {offer.split}: {short(speed(offer))} samples/s" for offer in others]
    return [
        *lines,
        f"idle: rollout, scoring, learner; time: {subject.config.updates} updates without evaluation and checkpoints",
    ]


def cells(name: str, offer: Offer, more: Offer) -> list[str]:
    seen, gain = offer.forecast, speed(more) / speed(offer) - 1
    return [
        name,
        str(offer.split),
        short(seen.samples_per_s),
        f"{seen.lag:.1f}, {seen.max_lag:.0f}",
        " ".join(f"{100 * seen.idle[stage]:.0f}" if stage in seen.idle else "–" for stage in offer.split.workers),
        duration(offer.seconds),
        f"+{gain:.0%} {more.split}" if gain >= 0.005 else "no gain",
    ]


def speed(offer: Offer) -> float:
    return offer.forecast.samples_per_s


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"
