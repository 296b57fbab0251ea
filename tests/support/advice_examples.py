"""Runs written by hand, one for every rule of advice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sin
from typing import Any

from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.reporting.advice.measurements import Case

Value = float | Callable[[int], float] | None
"""Values of a metric: constant, or by the update; None where it is absent."""
UPDATES = 60


def after(start: int, then: float, before: float = 0.0) -> Callable[[int], float]:
    return lambda update: then if update > start else before


def rising(first: float, last: float) -> Callable[[int], float]:
    return lambda update: first + (last - first) * update / UPDATES


WELL: dict[str, Value] = {
    "samples": 32,
    "tokens": 640,
    "length/mean": 20,
    "length/max": 60,
    "truncated": 0.02,
    "grad_norm": 1,
    "student/entropy": 0.5,
    "gradient/noise": 0.01,
    "teacher/kl": rising(0.6, 0.4),
    "teacher/kl_error": 0.02,
    "reward/exact": rising(0.3, 0.5),
    "lag/mean": after(1, 1.5),
    "lag/max": after(1, 3),
    "lag/tokens_0": after(1, 64, 640),
    "lag/tokens_1": after(1, 300),
    "lag/tokens_2": after(1, 276),
    "drift/kl": after(1, 0.005),
    "drift/k3_kl": after(1, 0.005),
    "drift/kl/lag_0": 1e-8,
    "drift/kl/lag_1": 0.003,
    "drift/probs_pearson": after(1, 0.98, 1.0),
    "drift/probs_diff_max": after(1, 0.6, 1e-6),
    "drift/chi2_token": after(1, 0.02),
    "drift/ess": after(1, 0.98, 1.0),
    "distill/ratio_max": 4,
    "distill/clip_fraction": 0,
    "seconds/update": 1,
    "seconds/data": 0.3,
    "seconds/turn": 0,
    "seconds/weights": 0.02,
    "seconds/learn": 0.6,
    "groups/rolling": 80,
    "groups/waiting": 2,
    "groups/scoring": 5,
    "groups/ready": 10,
    "stage/rollout": 0.7,
    "stage/score": 0.3,
    "stage/learn": 0.6,
    "dropped": 0,
    "thrown_tokens": 0,
    "failed_samples": 0,
    "teacher/invalid": 0,
    "teacher/rechecked": 1,
    "teacher/differed": 0,
}
AWAY: dict[str, Value] = {"reward/exact": 0.3, "distill/loss": rising(0.4, 4.0)}
SYNC = {"schedule": {"kind": "sync"}}
FRESH: dict[str, Value] = {
    name: 1e-8 if name == "drift/kl/lag_0" else 640 if name == "lag/tokens_0" else 0
    for name in WELL
    if name.startswith(("lag/", "drift/kl", "drift/k3"))
} | {"drift/probs_pearson": 1, "drift/probs_diff_max": 1e-6}
POLICY = {
    "teachers": {},
    "loss": {"kind": "reverse_kl_mc", "weight": 0.0},
    "policy": {},
    "sampler": {"group": 4},
    "task": {"reward": "exact"},
}
DOWN: dict[str, Value] = {"reward/exact": rising(0.5, 0.3), "teacher/kl": rising(0.1, 0.6)}
FOLLOWED = {"teachers": {"main": {"model": "self", "context": "{ground_truth}{prompt}", "follow": {"ema": 0.9}}}}
ALONE: dict[str, Value] = {name: None for name in WELL if name.startswith(("teacher/", "distill/"))}


def config_of(changes: Mapping[str, Any]) -> Config:
    base = {
        "student": "builtin:student",
        "updates": 100,
        "teachers": {"main": {"model": "builtin:teacher"}},
        "learner": {"batch_size": 32, "lr": 1e-3},
    }
    sampler = {"max_tokens": 50, **changes.get("sampler", {})}
    return parse({**base, **changes, "sampler": sampler}, say=str)


def lines_of(metrics: Mapping[str, Value], updates: int = UPDATES, noise: float = 0.002) -> list[dict[str, Any]]:
    """Return the lines of a run that is well except for these values."""
    found = []
    for update in range(1, updates + 1):
        values = {name: value(update) if callable(value) else value for name, value in (WELL | dict(metrics)).items()}
        known = {name: value * (1 + noise * sin(7.0 * update)) for name, value in values.items() if value is not None}
        exact = {
            name: value for name, value in values.items() if name in ("lag/max", "old_logp_missing") and value == 0
        }
        found.append({"kind": "train", "update": update, **known, **exact})
    return found


def sample(update: int, gaps: list[float], *, other: bool = False) -> dict[str, Any]:
    """An answer of which the student thinks well, now and then less; the teacher, by `gaps` less than that."""
    logp = [-0.5 - 0.4 * sin(3.0 * place + update) for place in range(len(gaps))]
    theirs = [-0.5 - 0.4 * sin(5.1 * place + 9.0 * update) for place in range(len(gaps))] if other else logp
    return {"update": update, "logp": logp, "teacher_logp": [a - gap for a, gap in zip(theirs, gaps, strict=True)]}


def samples(head: float, rest: float, **how: Any) -> list[dict[str, Any]]:
    return [sample(update, [head] * 4 + [rest] * 16, **how) for update in range(1, 21)]


def ended(gap: float, finish: str = "eos") -> list[dict[str, Any]]:
    """Answers whose last token the teacher finds less likely by so much."""
    return [sample(update, [0.2] * 19 + [gap]) | {"finish": finish} for update in range(1, 21)]


@dataclass(frozen=True)
class Example:
    """Metrics beyond a threshold and just within it, in a run that is well but for these."""

    name: str
    beyond: Mapping[str, Value]
    within: Mapping[str, Value]
    config: Mapping[str, Any] = field(default_factory=dict)
    weight: str = "wrong"
    beyond_samples: tuple[dict[str, Any], ...] = ()
    within_samples: tuple[dict[str, Any], ...] = ()
    ledger: tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]] = ((), ())

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(self.beyond) or 'samples'}"

    def case(self, metrics: Mapping[str, Value], said: tuple[dict[str, Any], ...], number: int) -> Case:
        return Case(
            config_of(self.config),
            lines_of(metrics),
            samples=said,
            ledger=self.ledger[number],
            context=160,
            vocabulary=39,
        )

    @property
    def sick(self) -> Case:
        return self.case(self.beyond, self.beyond_samples, 0)

    @property
    def sound(self) -> Case:
        return self.case(self.within, self.within_samples, 1)


def engines(**values: Value) -> dict[str, Value]:
    """Metrics of a decoupled correction, which compares with the version that drew."""
    same: dict[str, Value] = {"kl": 1e-5, "k3_kl": 1e-5, "probs_pearson": 1, "probs_diff_max": 1e-3, **values}
    return {f"mismatch/{name}": value for name, value in same.items()} | {"old_logp_missing": 0}


HALF = {"sampler": {"dtype": "bfloat16"}}
GETS_WORSE: dict[str, Value] = {"teacher/kl": rising(0.4, 0.8), "reward/exact": 0.3}
RUINED: dict[str, Value] = {"student/entropy": after(3, 0.1, before=2.0), "student/repeated": after(3, 0.9)}
WEIGHED = {**POLICY, "correction": {"preset": "decoupled_token_is"}}
REJECTS = {**POLICY, "correction": {"preset": "decoupled_geo_rs"}}
SUMS = {**POLICY, "correction": {"preset": "decoupled_seq_is_rs"}}
FRESHNESS = {"freshness": {"cooldown": 6}, "schedule": {"kind": "async", "tau": 2}}
COOLED = {"freshness": {"anchor": 0.0, "cooldown": 6}, "schedule": {"kind": "async", "tau": 2}}
STUCK: dict[str, Value] = {"teacher/kl": 0.5, "reward/exact": 0.3}


def worth(f: float) -> tuple[dict[str, Any], ...]:
    return tuple({"f": [f], "lag": [2]} for _ in range(60))


def drifting(kl: float, *, later: float | None = None) -> tuple[dict[str, Any], ...]:
    """Samples of lag 2 with this drift of the student, or another one after 20 of 60 updates."""
    drifts = [kl if later is None or update < 20 else later for update in range(60)]
    return tuple(
        {"f": [0.02], "lag": [2], "roll": [drift], "sup": [0.0], "update": update}
        for update, drift in enumerate(drifts)
    )


EXAMPLES = [
    Example("teacher scores do not match", {"teacher/kl": -0.2}, {"teacher/kl": -0.04}),
    Example("teacher scores do not match", {"teacher/kl": -0.2}, {"teacher/kl": -0.2, "teacher/kl_error": 1.0}),
    Example("failing teacher", {"teacher/invalid": 4}, {"teacher/invalid": 3}),
    Example("failing teacher", {"teacher/invalid": 3, "teacher/b/invalid": 3},
            {"teacher/invalid": 3, "teacher/b/invalid": 3, "teacher/b/samples": 64}),
    Example("failing teacher", {"teacher/differed": 0.5}, {"teacher/differed": 0.08}),
    Example("router flips", engines(kl=0.06) | {"router/flips": 0.05}, engines(kl=0.06) | {"router/flips": 0.01},
            {"learner": {"router": "measure"}, **HALF}),
    Example("router flips", engines(kl=0.06) | {"router/flips": 0.05}, engines(kl=0.01) | {"router/flips": 0.05},
            {"learner": {"router": "measure"}, **HALF}),
    Example("engine mismatch", {"drift/kl/lag_0": 2e-4, "drift/k3_kl": 2e-4}, {"drift/kl/lag_0": 8e-6}, SYNC),
    Example("engine mismatch", engines(kl=0.06), engines(kl=0.01), HALF),
    Example("engine mismatch", engines(kl=0.03), engines(kl=0.015), HALF, weight="watch"),
    Example("engine mismatch", engines(kl=0.01, k3_kl=0.01, probs_pearson=0.94),
            engines(kl=0.01, k3_kl=0.01, probs_pearson=0.96), HALF),
    Example("engine mismatch", engines(kl=0.01, k3_kl=0.01, ppl_ratio=1.06),
            engines(kl=0.01, k3_kl=0.01, ppl_ratio=1.04), HALF),
    Example("engine mismatch", engines(probs_diff_max=0.6), engines(probs_diff_max=0.4), HALF),
    Example("engine mismatch", {"drift/kl/lag_0": 0.01}, {"drift/kl/lag_0": 8e-6}),
    Example("engine mismatch", {"drift/kl/lag_0": 2e-4, "lag/tokens_0": 2},
            {"drift/kl/lag_0": 8e-5, "lag/tokens_0": 2}),
    Example("agreement unknown", {"lag/max": 3, "lag/tokens_0": 0, "drift/k3_kl": 0.06},
            {"lag/max": 3, "lag/tokens_0": 0, "drift/k3_kl": 0.04}, weight="watch"),
    Example("wrong teacher", {}, {}, beyond_samples=tuple(samples(0.5, 0.5, other=True)),
            within_samples=tuple(samples(0.5, 0.5))),
    Example("wrong template", {}, {}, beyond_samples=tuple(samples(3.2, 0.5)), within_samples=tuple(samples(2.8, 0.5))),
    Example("wrong template", {}, {}, beyond_samples=tuple(samples(3.2, 0.5)), within_samples=tuple(samples(3.2, 3.3))),
    Example("wrong template", {}, {}, beyond_samples=tuple(samples(4.2, 2.0)), within_samples=tuple(samples(4.2, 2.2))),
    Example("wrong template", {}, {"student/repeated": 0.5}, beyond_samples=tuple(samples(3.2, 0.5)),
            within_samples=tuple(samples(3.2, 0.5))),
    Example("wrong template", {"teacher/kl": 2.6}, {"teacher/kl": 2.2}),
    Example("student too far", {"student/repeated": rising(0.0, 0.5), "teacher/kl": rising(1.7, 0.4)},
            {"student/repeated": rising(0.0, 0.2), "teacher/kl": rising(1.7, 0.4)}),
    Example("student too far", {"student/repeated": rising(0.0, 0.5), "teacher/kl": rising(1.7, 0.4)},
            {"student/repeated": rising(0.0, 0.5), "teacher/kl": rising(1.3, 0.4)}),
    Example("student too far", {"truncated": 0.9, "teacher/kl": rising(3.0, 1.8)},
            {"truncated": 0.9, "teacher/kl": rising(3.0, 1.0)}),
    Example("student too far", {"truncated": 0.9, "teacher/kl": rising(3.0, 1.8)},
            {"truncated": 0.3, "teacher/kl": rising(3.0, 1.8)}),
    Example("other end token", {}, {}, beyond_samples=tuple(ended(5.4)), within_samples=tuple(ended(4.4))),
    Example("other end token", {}, {}, beyond_samples=tuple(ended(5.4)),
            within_samples=tuple(ended(5.4, finish="length"))),
    Example("teacher lowers rewards", {"reward/exact": rising(0.5, 0.3)}, {"reward/exact": rising(0.5, 0.47)}),
    Example("teacher lowers rewards", {"reward/exact": rising(0.5, 0.3)},
            {"reward/exact": rising(0.5, 0.3), "teacher/kl": lambda update: 0.3 + 0.01 * abs(update - 40)}),
    Example("poor samples", STUCK, {}, {"learner": {"batch_size": 1, "lr": 1e-3}}),
    Example("poor samples", STUCK, {}, {"sampler": {"temperature": 0.2}}),
    Example("wrong direction", {**AWAY, "teacher/kl": rising(0.4, 4.0)},
            {**AWAY, "teacher/kl": rising(0.4, 0.6)}, SYNC),
    Example("wrong direction", {**AWAY, "teacher/kl": rising(0.4, 4.0)},
            {**AWAY, "teacher/kl": rising(0.4, 4.0), "distill/loss": rising(4.0, 0.4)}),
    Example("wrong direction", {**AWAY, "teacher/kl": after(9, 1.2, before=0.4)},
            {**AWAY, "teacher/kl": after(12, 1.2, before=0.4)}, SYNC),
    Example("moving teacher", DOWN, {**DOWN, "reward/exact": rising(0.5, 0.47)}, FOLLOWED),
    Example("moving teacher", DOWN, {**DOWN, "drift/kl/lag_1": 0.08}, FOLLOWED),
    Example("step too large", {**FRESH, **RUINED, **DOWN}, {**FRESH, **RUINED, "student/entropy": 0.5},
            FOLLOWED | SYNC),
    Example("step too large", {"drift/kl/lag_1": 0.08, **GETS_WORSE}, {"drift/kl/lag_1": 0.04}),
    Example("step too large", {"drift/kl/lag_1": 0.08}, {"drift/kl/lag_1": 0.04}, weight="watch"),
    Example("step too large", {**FRESH, **GETS_WORSE}, {**FRESH, "teacher/kl": 0.4, "reward/exact": 0.3}, SYNC),
    Example("step too large", {**FRESH, **ALONE, "reward/exact": rising(0.6, 0.3)},
            {**FRESH, **ALONE, "reward/exact": rising(0.6, 0.57)}, {**POLICY, **SYNC}),
    Example("step too large", {**FRESH, **RUINED},
            {**FRESH, **RUINED, "student/entropy": after(3, 0.3, before=2.0)}, SYNC),
    Example("step too large", {"drift/k3_kl_first": 0.005, "drift/k3_kl_last": 0.06, **GETS_WORSE},
            {"drift/k3_kl_first": 0.005, "drift/k3_kl_last": 0.05},
            {"learner": {"batch_size": 32, "minibatches": 2}}),
    Example("spikes", {"grad_norm": lambda update: 12 if update % 3 == 0 and update > 40 else 1},
            {"grad_norm": lambda update: 9 if update % 3 == 0 and update > 40 else 1}, weight="watch"),
    Example("wrong importance weights", {"drift/k3_kl": after(1, 0.06), **GETS_WORSE}, {"drift/k3_kl": after(1, 0.06)},
            {"loss": {"importance": False}}),
    Example("wrong importance weights", {"distill/clip_fraction": 0.0012, **GETS_WORSE},
            {"distill/clip_fraction": 0.0008, **GETS_WORSE}, {"loss": {"ratio_cap": 2.0}}),
    Example("wrong importance weights", {"lag/mean": 0.51, **GETS_WORSE}, {"lag/mean": 0.49, **GETS_WORSE},
            {"loss": {"importance": False}}),
    Example("wrong importance weights", {"lag/mean": 0.51, **GETS_WORSE}, {"lag/mean": 0.49, **GETS_WORSE},
            {"loss": {"kind": "k3"}}),
    Example("staleness", {"drift/k3_kl": after(1, 0.06), **GETS_WORSE}, {"drift/k3_kl": after(1, 0.048), **STUCK}),
    Example("staleness", {"drift/k3_kl": after(1, 0.06)}, {"drift/k3_kl": after(1, 0.048)}, weight="watch"),
    Example("variance blow-up", {**ALONE, "correction/ess": 0.45, "reward/exact": 0.3},
            {**ALONE, "correction/ess": 0.55, "correction/rollout_rs_masked_fraction": 0.0, "reward/exact": 0.3},
            WEIGHED),
    Example("variance blow-up", {"drift/chi2_token": 1.1, **STUCK}, {"drift/chi2_token": 0.9, **STUCK}),
    Example("variance blow-up", {"drift/chi2_token": 1.1}, {"drift/chi2_token": 0.9}, weight="watch"),
    Example("variance blow-up",
            {**ALONE, "gradient/noise": rising(0.01, 0.04), "correction/rollout_is_mean": 1},
            {**ALONE, "gradient/noise": rising(0.01, 0.018), "correction/rollout_is_mean": 1}, WEIGHED),
    Example("sequence weights", {**ALONE, "correction/ess": 0.45}, {**ALONE, "correction/ess": 0.55}, SUMS),
    Example("sequence weights", {**ALONE, "correction/ess": 0.9, "mismatch/chi2_seq": 110},
            {**ALONE, "correction/ess": 0.9, "mismatch/chi2_seq": 90}, SUMS),
    Example("sequence weights", {**ALONE, "correction/rollout_rs_seq_masked_fraction": 0.12},
            {**ALONE, "correction/rollout_rs_seq_masked_fraction": 0.08}, SUMS),
    Example("too much rejected", {**ALONE, "correction/rollout_rs_masked_fraction": 0.3},
            {**ALONE, "correction/rollout_rs_masked_fraction": 0.2}, REJECTS),
    Example("too much rejected",
            {**ALONE, "correction/rollout_is_ratio_fraction_high": 0.3, "correction/rollout_rs_masked_fraction": 0.0},
            {**ALONE, "correction/rollout_is_ratio_fraction_high": 0.2, "correction/rollout_rs_masked_fraction": 0.0},
            {**POLICY, "correction": {"preset": "decoupled_token_icepop"}}),
    Example("moderate drift", {"drift/chi2_token": 0.32}, {"drift/chi2_token": 0.28}, weight="watch"),
    Example("ratio tails", {"distill/ratio_max": 11, **STUCK}, {"distill/ratio_max": 9, **STUCK}, weight="watch"),
    Example("widened clip", {**ALONE, "policy/clip_fraction": 0.22}, {**ALONE, "policy/clip_fraction": 0.18},
            {**POLICY, "policy": {"options": {"clip_high": 0.5}}}),
    Example("clip saturation", {**ALONE, "policy/clip_fraction": rising(0.1, 0.25)},
            {**ALONE, "policy/clip_fraction": rising(0.1, 0.19)}, POLICY),
    Example("clip saturation", {"distill/clip_fraction": 0.25}, {"distill/clip_fraction": 0.19}, weight="watch"),
    Example("length surge", {**ALONE, "length/mean": rising(20, 30)}, {**ALONE, "length/mean": rising(20, 23)}, POLICY),
    Example("length surge", {"length/mean": rising(20, 30)}, {"length/mean": rising(20, 23)}, weight="watch"),
    Example("entropy collapse", {**ALONE, "student/entropy": rising(0.5, 0.02)},
            {**ALONE, "student/entropy": rising(0.5, 0.12)}, POLICY),
    Example("entropy collapse", {**ALONE, "student/entropy": after(40, 0.04, 0.12)},
            {**ALONE, "student/entropy": after(40, 0.07, 0.12)}, POLICY),
    Example("short answers", {**ALONE, "length/mean": rising(40, 2)}, {**ALONE, "length/mean": rising(40, 10)}, POLICY),
    Example("small support", {"distill/teacher_mass": 0.88}, {"distill/teacher_mass": 0.92},
            {"loss": {"kind": "forward_kl"}}),
    Example("small support", {"distill/student_mass": 0.88}, {"distill/student_mass": 0.92},
            {"loss": {"kind": "reverse_kl_topk", "k": 16}}),
    Example("gated samples", {"freshness/gated": 0.3, **STUCK}, {"freshness/gated": 0.2, **STUCK}, FRESHNESS),
    Example("freshness coefficients", {}, {}, COOLED, weight="tune", ledger=(drifting(0.04), drifting(0.48))),
    Example("freshness thresholds", {"freshness/buffer_f": 0.3}, {"freshness/buffer_f": 0.05}, FRESHNESS, weight="tune",
            ledger=(worth(0.1), worth(0.02))),
    Example("truncated answers", {"truncated": 0.6}, {"truncated": 0.08}),
    Example("truncated answers", {"truncated": 0.12}, {"truncated": 0.08}, weight="watch"),
    Example("no reward", {**ALONE, "reward/exact": 0}, {**ALONE, "reward/exact": after(30, 0.01)}, POLICY),
    Example("equal rewards", {**ALONE, "policy/rows_moved": 0.18, "reward/exact": 0.3},
            {**ALONE, "policy/rows_moved": 0.22, "reward/exact": 0.3}, POLICY),
    Example("blind critic", {**ALONE, "critic/explained_variance": -0.3}, {**ALONE, "critic/explained_variance": 0.3},
            {**POLICY, "policy": {"advantage": "gae"}, "critic": {}}, weight="watch"),
    Example("dropped groups", {"dropped": rising(0, 240), "dropped/too old": rising(0, 240)},
            {"dropped": rising(0, 200)}),
    Example("failing samples", {"failed_samples": rising(0, 240)}, {"failed_samples": rising(0, 200)}),
    Example("failing samples", {"ungraded/timeout": rising(0, 240)}, {"ungraded/timeout": rising(0, 200)}),
    Example("dying workers", {"restarts/sampler": rising(0, 2.1)}, {"restarts/sampler": rising(0, 1)}, weight="watch"),
    Example("slow teacher", {"seconds/data": 0.55, "groups/waiting": 90}, {"seconds/data": 0.45, "groups/waiting": 90},
            weight="speed"),
    Example("slow sampler", {"seconds/data": 0.55}, {"seconds/data": 0.45}, weight="speed"),
    Example("slow sampler", {**FRESH, "stage/rollout": 0.85}, {**FRESH, "stage/rollout": 0.75}, SYNC, weight="speed"),
    Example("slow learner", {"seconds/data": 0.05, "groups/ready": 40}, {"seconds/data": 0.12, "groups/ready": 40},
            weight="speed"),
    Example("slow learner", {"seconds/data": 0.05, "groups/ready": 40}, {"seconds/data": 0.05, "groups/ready": 25},
            weight="speed"),
    Example("slow learner", {"seconds/data": 0.05, "groups/ready": 40},
            {"seconds/data": 0.05, "seconds/weights": 0.2, "groups/ready": 40}, weight="speed"),
    Example("slow publish", {"seconds/weights": 0.55}, {"seconds/weights": 0.45}, SYNC, weight="speed"),
    Example("slow publish", {"seconds/weights": 0.55}, {"seconds/weights": 0.45}, weight="speed"),
    Example("waiting for the schedule", {"seconds/turn": 0.55}, {"seconds/turn": 0.45},
            {"schedule": {"kind": "async", "order": "submission"}}, weight="speed"),
    Example("discarded work", {"thrown_tokens": rising(0, 16000)}, {"thrown_tokens": rising(0, 12000)},
            {"schedule": {"kind": "async", "on_publish": "restart"}}, weight="speed"),
    Example("discarded work", {"thrown_tokens": rising(0, 24000), "refilled_tokens": rising(0, 8000)},
            {"thrown_tokens": rising(0, 24000), "refilled_tokens": rising(0, 12000)},
            {"schedule": {"kind": "async", "on_publish": "restart"}}, weight="speed"),
    Example("nothing to teach", {"teacher/kl": 0.018, "teacher/kl_error": 1e-3},
            {"teacher/kl": 0.022, "teacher/kl_error": 1e-3}, weight="watch"),
    Example("no progress", {"teacher/kl": 0.5, "reward/exact": 0.3}, {"teacher/kl": 0.5}, weight="watch"),
]  # fmt: skip
