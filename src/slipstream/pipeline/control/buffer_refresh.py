"""The freshness of the buffer, and the decision when to refresh it. Pure code, without tasks and clock.

The buffer is all scored samples that are not learned from yet. Freshness is 1 for an on-policy sample and falls to 0
with age. Its mean is predicted from the drift at each lag (`Curve`), or measured by a pass over all samples. When the
mean is too low, all groups that began under older weights are rolled out again (`Admission.refresh`).

`measure` and `level` add their metrics to the line of an update, and `on_update` decides by this line. It is called
before the line is written, because the line also counts what the refresh discards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, sqrt
from statistics import fmean

from slipstream.config.freshness import FreshnessConfig
from slipstream.metrics import Metrics
from slipstream.pipeline.control.actions import Controller, Line, Refresh
from slipstream.protocols import SampleFreshness
from slipstream.records import Header

DRIFT_RATE = 0.1
"""Weight of the newest update in the moving average of the drift at a lag."""
DRIFT_BY_LAG = "freshness/drift/lag_"


class Curve:
    """Drift by lag: a moving average at each observed lag, linear interpolation between lags, and 0 at lag 0."""

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        self.known = dict(known or {})

    def learn(self, lag: int, drift: float) -> None:
        before = self.known.get(lag)
        self.known[lag] = drift if before is None else before + DRIFT_RATE * (drift - before)

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

    @property
    def metrics(self) -> Metrics:
        return {
            "freshness/buffer_f": self.f,
            "freshness/buffer_roll_coverage": self.roll_coverage,
            "freshness/buffer_sup_coverage": self.sup_coverage,
        }


def level_of(weighed: Sequence[SampleFreshness]) -> Level:
    return Level(
        fmean(each.f for each in weighed),
        fmean(each.roll_coverage for each in weighed),
        fmean(each.sup_coverage for each in weighed),
    )


class Buffer(Controller):
    def __init__(self, freshness: FreshnessConfig, *, steps: int, last: Line) -> None:
        """Restore the state from `last`, the last metrics line; `steps` is the optimizer steps of an update."""
        self.freshness, self.steps = freshness, steps
        self.curve = Curve(
            {int(name.removeprefix(DRIFT_BY_LAG)): x for name, x in last.items() if name.startswith(DRIFT_BY_LAG)}
        )
        self.sup = last.get("freshness/sup", 0.0)
        """Last measured drift of supervision (change of the teacher since it scored the samples)."""
        self.mean = Level(1.0, last.get("freshness/roll_coverage", 1.0), last.get("freshness/sup_coverage", 1.0))
        self.refreshes = round(last.get("freshness/refreshes", 0))
        self.refreshed = round(last.get("freshness/refreshed", 0))
        """The update after which the buffer was last refreshed; 0 for never."""
        self.tokens = round(last.get("freshness/refreshed_tokens", 0))
        """Tokens discarded by refreshes."""

    def measure(self, weighed: Sequence[SampleFreshness]) -> Metrics:
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
            **{f"{DRIFT_BY_LAG}{lag}": drift for lag, drift in sorted(self.curve.known.items())},
        }

    def predict(self, headers: Sequence[Header], version: int) -> Level:
        """Return the means over the buffer, predicted from the lags of its samples."""
        if not headers:
            return Level()
        f = fmean(self._freshness(max(0, version - header.oldest)) for header in headers)
        return Level(f, self.mean.roll_coverage, self.mean.sup_coverage)

    def _freshness(self, lag: int) -> float:
        """Return `estimators.drift.score` of the average drift at a lag."""
        freshness, roll = self.freshness, max(0.0, self.curve(lag))
        drift = freshness.alpha * sqrt(roll) + freshness.beta * sqrt(max(0.0, self.sup))
        return exp(-drift) / ((lag if freshness.lag else 0) + 1)

    def measures(self, update: int) -> bool:
        """Return whether the learner must measure the freshness of the whole buffer after this update."""
        freshness = self.freshness
        every = freshness.measure or (1 if freshness.estimate == "measured" else 20)
        return freshness.refresh == "adaptive" and update % every == 0

    def level(self, headers: Sequence[Header], measured: Sequence[SampleFreshness], version: int) -> Metrics:
        """Return metrics of the means over the buffer; `measured` is empty without a pass over the buffer."""
        level = modelled = self.predict(headers, version)
        error: Metrics = {}
        if measured:
            exact = level_of([self._with_teacher(each) for each in measured])
            error = {"freshness/model_error": modelled.f - exact.f}
            level = exact if self.freshness.estimate == "measured" else modelled
        return error | level.metrics

    def _with_teacher(self, sample: SampleFreshness) -> SampleFreshness:
        """Return the freshness of a sample in the buffer with the teacher's drift as in the last update.

        Samples are scored again only for their own update, so that the pass over the buffer cannot know it.
        """
        if sample.sup or not self.sup > 0:
            return sample
        f = sample.f * exp(-self.freshness.beta * sqrt(self.sup))
        return replace(sample, f=f, sup=self.sup, sup_coverage=self.mean.sup_coverage)

    def on_update(self, line: Line) -> list[Refresh]:
        why = self._reason(line)
        return [Refresh(why)] if why else []

    def _reason(self, line: Line) -> str:
        freshness, since = self.freshness, round(line["version"]) - self.refreshed
        match freshness.refresh:
            case "never":
                return ""
            case "fixed":
                return f"every {freshness.refresh_every} updates" if since >= freshness.refresh_every else ""
        if self.refreshed and since * self.steps < freshness.cooldown:
            return ""
        f, roll, sup = (line[f"freshness/buffer_{name}"] for name in ("f", "roll_coverage", "sup_coverage"))
        if f <= freshness.kappa_f:
            return f"mean freshness {f:.3g} of the buffer <= {freshness.kappa_f:g}"
        if roll < freshness.kappa_roll:
            return f"the drift is known for only {roll:.0%} of the buffer"
        return (
            f"the drift of supervision is known for only {sup:.0%} of the buffer" if sup < freshness.kappa_sup else ""
        )

    def record_refresh(self, update: int, *, tokens: int) -> None:
        self.refreshes, self.refreshed, self.tokens = self.refreshes + 1, update, self.tokens + tokens

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
