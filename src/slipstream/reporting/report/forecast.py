"""Report page of a plan: speed, staleness and waits of every schedule, and the gain from one more device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from slipstream.config.costs import Costs
from slipstream.planning.planner import Offer, Outlook
from slipstream.reporting.report.figures import Figure, Series, bars
from slipstream.reporting.report.page import Folded, Page, Section, Table
from slipstream.reporting.report.titles import duration

STAGE_WORKERS = {"rollout": "samplers", "score": "scorers", "learn": "learner"}
FIGURE_HEIGHT = 300


def page(seen: Outlook, costs: Costs, *, own: str, updates: int, command: str) -> Page:
    best = max(seen.best.values(), key=speed)
    return Page(
        kicker="Slipstream plan",
        title=f"{best.schedule} on {seen.devices} devices: {speed(best):,.3g} samples per second",
        lead="Simulated from the cost of each stage. A split is samplers + scorers + learner ranks. The config has "
        f"{own}, and {updates} updates.",
        sections=[
            Section("Forecast", "The fastest split of every schedule.", list(figures(seen))),
            Section("All simulated splits", "", [splits(seen)]),
            Section("Costs", "", [Folded("costs.toml", costs.to_toml())]),
        ],
        legend={},
        command=command,
    )


def speed(offer: Offer) -> float:
    return offer.forecast.samples_per_s


def figures(seen: Outlook) -> Iterator[Figure]:
    offers = list(seen.best.values())
    names = [f"{offer.schedule}, {offer.split}" for offer in offers]

    def drawn(title: str, note: str, y: str, values: Mapping[str, Sequence[float]], *, share: bool = False) -> Figure:
        series = [Series(label, [], each, slot) for slot, (label, each) in enumerate(values.items())]
        return replace(bars(title, note, names, series, y=y, share=share), wide=True, legend=True, height=FIGURE_HEIGHT)

    slowest, fastest = min(offers, key=speed), max(offers, key=speed)
    ratio = f"{speed(fastest) / speed(slowest):.2g}"
    times = f"{fastest.schedule} is {ratio} times as fast as {slowest.schedule}"
    yield drawn(
        "All schedules are about equally fast" if ratio == "1" else times,
        "Trained samples per second, also with one more device, which may stay idle.",
        "samples per second",
        {
            f"{seen.devices} devices": [speed(offer) for offer in offers],
            f"{seen.devices + 1} devices": [speed(seen.next[offer.schedule]) for offer in offers],
        },
    )
    forecasts = [offer.forecast for offer in offers]
    oldest = max(offers, key=lambda offer: offer.forecast.lag)
    yield drawn(
        f"Tokens of {oldest.schedule} are {oldest.forecast.lag:.1f} updates old on average",
        "Lag of the trained tokens.",
        "updates",
        {"mean": [each.lag for each in forecasts], "largest": [each.max_lag for each in forecasts]},
    )
    idle = fastest.forecast.idle
    waits = max(idle, key=lambda stage: idle[stage])
    yield drawn(
        f"With {fastest.schedule} the {STAGE_WORKERS[waits]} wait most: {idle[waits]:.0%} of the time",
        "A stage that waits has more devices than it needs.",
        "share of the time",
        {STAGE_WORKERS[stage]: [each.idle[stage] for each in forecasts] for stage in idle},
        share=True,
    )


def splits(seen: Outlook) -> Table:
    idle = [f"{label} idle" for label in STAGE_WORKERS.values()]
    head = ["schedule", "split", "samples/s", "tokens/s", "lag", "max lag", *idle, "time"]
    rows = []
    for offer in sorted(seen.offers, key=speed, reverse=True):
        found = offer.forecast
        speeds = [f"{found.samples_per_s:,.3g}", f"{found.tokens_per_s:,.0f}"]
        lags = [f"{found.lag:.1f}", f"{found.max_lag:.0f}"]
        shares = [f"{found.idle[stage]:.0%}" if stage in found.idle else "–" for stage in STAGE_WORKERS]
        rows.append([offer.schedule, str(offer.split), *speeds, *lags, *shares, duration(offer.seconds)])
    return Table(head, rows, numbers=True)
