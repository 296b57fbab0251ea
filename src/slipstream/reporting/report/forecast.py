"""Report page of a plan: speed, staleness and waits of every schedule, and the gain from one more device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from slipstream.config.costs import Costs
from slipstream.planning.planner import Offer, Outlook
from slipstream.reporting.report.figures import Figure, Series, bars
from slipstream.reporting.report.page import Page, Part, Section, folded, table
from slipstream.reporting.report.sections import made_by
from slipstream.reporting.report.titles import duration

STAGES = {"rollout": "samplers", "score": "scorers", "learn": "learner"}
HEIGHT = 300


def page(seen: Outlook, costs: Costs, *, own: str, updates: int, command: str) -> Page:
    best = max(seen.best.values(), key=speed)
    return Page(
        kicker="Slipstream plan",
        title=f"{best.schedule} on {seen.devices} devices: {speed(best):,.3g} samples per second",
        lead="Simulated from the cost of each stage. A split is samplers + scorers + learner ranks. The config has "
        f"{own}, and {updates} updates.",
        sections=[
            Section("Forecast", "The fastest split of every schedule.", list(figures(seen))),
            Section("All simulated splits", "", list(rows(seen))),
            Section("Costs", "", [folded("costs.toml", costs.to_toml())]),
        ],
        legend={},
        footer=made_by(command),
    )


def speed(offer: Offer) -> float:
    return offer.forecast.samples_per_s


def figures(seen: Outlook) -> Iterator[Figure]:
    offers = list(seen.best.values())
    names = [f"{offer.schedule}, {offer.split}" for offer in offers]
    slowest, fastest = min(offers, key=speed), max(offers, key=speed)
    title = f"{fastest.schedule} is {speed(fastest) / speed(slowest):.2g} times as fast as {slowest.schedule}"
    more = [speed(seen.next[offer.schedule]) for offer in offers]
    count = seen.devices
    both = (
        Series(f"{count} devices", [], [speed(o) for o in offers]),
        Series(f"{count + 1} devices", [], more, slot=1),
    )
    note = "Trained samples per second, also with one more device, which may stay idle."
    yield drawn(title, note, names, both, y="samples per second")
    most = max(offers, key=lambda offer: offer.forecast.lag)
    lags = (
        Series("mean", [], [offer.forecast.lag for offer in offers]),
        Series("largest", [], [offer.forecast.max_lag for offer in offers], slot=1),
    )
    title = f"Tokens of {most.schedule} are {most.forecast.lag:.1f} updates old on average"
    yield drawn(title, "Lag of the trained tokens.", names, lags, y="updates")
    idle = [
        Series(label, [], [offer.forecast.idle[stage] for offer in offers], slot)
        for slot, (stage, label) in enumerate(STAGES.items())
    ]
    waits = max(STAGES, key=lambda stage: fastest.forecast.idle[stage])
    title = f"With {fastest.schedule} the {STAGES[waits]} wait most: {fastest.forecast.idle[waits]:.0%} of the time"
    yield drawn(
        title, "A stage that waits has more devices than it needs.", names, idle, y="share of the time", share=True
    )


def drawn(
    title: str, note: str, names: Sequence[str], series: Sequence[Series], *, y: str, share: bool = False
) -> Figure:
    figure = bars(title, note, names, series, y=y, share=share, wide=True, height=HEIGHT)
    return replace(figure, legend=True)


def rows(seen: Outlook) -> Iterator[Part]:
    head = [
        "schedule",
        "split",
        "samples/s",
        "tokens/s",
        "lag",
        "max lag",
        *(f"{n} idle" for n in STAGES.values()),
        "time",
    ]
    yield table(head, map(cells, sorted(seen.offers, key=speed, reverse=True)), numbers=True)


def cells(offer: Offer) -> list[str]:
    found = offer.forecast
    return [
        offer.schedule,
        str(offer.split),
        f"{found.samples_per_s:,.3g}",
        f"{found.tokens_per_s:,.0f}",
        f"{found.lag:.1f}",
        f"{found.max_lag:.0f}",
        *(f"{found.idle[stage]:.0%}" for stage in STAGES),
        duration(offer.seconds),
    ]
