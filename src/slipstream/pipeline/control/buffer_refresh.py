"""The freshness of the buffer, and the decision when to refresh it. Pure code, without tasks and clock.

The buffer is all scored samples that are not learned from yet. Freshness is 1 for an on-policy sample and falls to 0
with age. Its mean is predicted from the drift at each lag (`Curve`), or measured by a pass over all samples. When the
mean is too low, all groups that began under older weights are rolled out again (`Admission.refresh`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, sqrt
from statistics import fmean

from slipstream.config.freshness import FreshnessConfig
from slipstream.metrics import Metrics
from slipstream.protocols import SampleFreshness
from slipstream.records import Header

RATE = 0.1
"""Weight of the newest update in the moving average of the drift at a lag."""
DRIFT = "freshness/drift/lag_"


class Curve:
    """Drift by lag: a moving average at each observed lag, linear interpolation between lags, and 0 at lag 0."""

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        self.known = dict(known or {})

    def learn(self, lag: int, drift: float) -> None:
        before = self.known.get(lag)
        self.known[lag] = drift if before is None else before + RATE * (drift - before)

    def __call__(self, lag: int) -> float:
        if lag in self.known:
            return self.known[lag]
        below = max((each for each in self.known if each < lag), default=None)
        above = min((each for each in self.known if each > lag), default=None)
        if above is None:
            return self.known[below] * lag / below if below else 0.0
        start = 0 if below is None else below
        low = 0.0 if below is None else self.known[below]
        return low + (self.known[above] - low) * (lag - start) / (above - start)


@dataclass(frozen=True, slots=True)
class Level:
    """Means over the buffer: freshness, and shares of tokens whose drift of sampling policy or of teacher is known."""

    f: float = 1.0
    roll_coverage: float = 1.0
    sup_coverage: float = 1.0


def level_of(weighed: Sequence[SampleFreshness]) -> Level:
    return Level(
        fmean(each.f for each in weighed),
        fmean(each.roll_coverage for each in weighed),
        fmean(each.sup_coverage for each in weighed),
    )


class Buffer:
    def __init__(
        self, freshness: FreshnessConfig, *, steps: int, last: Mapping[str, float], say: Callable[[str], None]
    ) -> None:
        """Restore the state from `last`, the last metrics line; `steps` is the optimizer steps of an update."""
        self.freshness, self.steps, self.say = freshness, steps, say
        self.curve = Curve({int(name.removeprefix(DRIFT)): x for name, x in last.items() if name.startswith(DRIFT)})
        self.sup = last.get("freshness/sup", 0.0)
        """Last measured drift of supervision (change of the teacher since it scored the samples)."""
        self.mean = Level(1.0, last.get("freshness/roll_coverage", 1.0), last.get("freshness/sup_coverage", 1.0))
        self.refreshes = round(last.get("freshness/refreshes", 0))
        self.refreshed = round(last.get("freshness/refreshed", 0))
        """The update after which the buffer was last refreshed; 0 for never."""
        self.tokens = round(last.get("freshness/refreshed_tokens", 0))
        """Tokens discarded by refreshes."""

    def look(self, weighed: Sequence[SampleFreshness]) -> Metrics:
        """Record the drift of the samples of an update, and return the freshness metrics of the update."""
        known = [each for each in weighed if isfinite(each.roll)]
        by_lag: dict[int, list[float]] = {}
        for each in known:
            by_lag.setdefault(each.lag, []).append(each.roll)
        for lag, drifts in by_lag.items():
            self.curve.learn(lag, fmean(drifts))
        self.mean = level_of(weighed)
        self.sup = fmean([each.sup for each in weighed if isfinite(each.sup)] or [0.0])
        return {
            "freshness/f": self.mean.f,
            "freshness/weight": fmean(each.w for each in weighed),
            "freshness/ess": effective_share([each.w for each in weighed]),
            "freshness/roll": fmean([each.roll for each in known] or [0.0]),
            "freshness/sup": self.sup,
            "freshness/gated": fmean(each.w == 0 for each in weighed),
            "freshness/invalid": fmean(each.f == 0 for each in weighed),
            "freshness/roll_coverage": self.mean.roll_coverage,
            "freshness/sup_coverage": self.mean.sup_coverage,
            **{f"{DRIFT}{lag}": drift for lag, drift in sorted(self.curve.known.items())},
        }

    def modelled(self, headers: Sequence[Header], version: int) -> Level:
        """Return the means over the buffer, predicted from the lags of its samples."""
        if not headers:
            return Level()
        f = fmean(self._freshness(max(0, version - header.oldest)) for header in headers)
        return Level(f, self.mean.roll_coverage, self.mean.sup_coverage)

    def _freshness(self, lag: int) -> float:
        """Return `estimators.freshness.score` of the average drift at a lag."""
        freshness, roll = self.freshness, max(0.0, self.curve(lag))
        drift = freshness.alpha * sqrt(roll) + freshness.beta * sqrt(max(0.0, self.sup))
        return exp(-drift) / ((lag if freshness.lag else 0) + 1)

    def measures(self, update: int) -> bool:
        """Return whether the learner must measure the freshness of the whole buffer after this update."""
        freshness = self.freshness
        every = freshness.measure or (1 if freshness.buffer == "measured" else 20)
        return freshness.refresh == "adaptive" and update % every == 0

    def level(
        self, headers: Sequence[Header], measured: Sequence[SampleFreshness], version: int
    ) -> tuple[Level, Metrics]:
        """Return the means over the buffer and their metrics; `measured` is empty without a pass over the buffer."""
        modelled = found = self.modelled(headers, version)
        numbers: Metrics = {}
        if measured:
            exact = level_of(measured)
            numbers["freshness/model_error"] = modelled.f - exact.f
            found = exact if self.freshness.buffer == "measured" else modelled
        return found, numbers | {
            "freshness/buffer_f": found.f,
            "freshness/buffer_roll_coverage": found.roll_coverage,
            "freshness/buffer_sup_coverage": found.sup_coverage,
        }

    def why(self, level: Level, update: int) -> str | None:
        freshness, since = self.freshness, update - self.refreshed
        match freshness.refresh:
            case "never":
                return None
            case "fixed":
                return f"every {freshness.every} updates" if since >= freshness.every else None
        if self.refreshed and since * self.steps < freshness.cooldown:
            return None
        if level.f <= freshness.kappa_f:
            return f"mean freshness {level.f:.3g} of the buffer <= {freshness.kappa_f:g}"
        if level.roll_coverage < freshness.kappa_roll:
            return f"the drift is known for only {level.roll_coverage:.0%} of the buffer"
        if level.sup_coverage < freshness.kappa_sup:
            return f"the drift of supervision is known for only {level.sup_coverage:.0%} of the buffer"
        return None

    def done(self, update: int, *, groups: int, tokens: int, why: str) -> None:
        self.refreshes, self.refreshed, self.tokens = self.refreshes + 1, update, self.tokens + tokens
        self.say(f"refresh after update {update}: {groups} groups begin again, {why}")

    @property
    def metrics(self) -> Metrics:
        """Metrics that a resumed run reads, in addition to those of the curve, to restore this state."""
        return {
            "freshness/refreshes": float(self.refreshes),
            "freshness/refreshed": float(self.refreshed),
            "freshness/refreshed_tokens": float(self.tokens),
        }


def effective_share(weights: Sequence[float]) -> float:
    """Return the effective sample size (Σw)² / Σw² as a share of the samples; 0 if all weights are 0."""
    squares = sum(w**2 for w in weights)
    return sum(weights) ** 2 / (squares * len(weights)) if squares else 0.0
