"""Descriptions of all estimators, made from the tables that the code uses.

docs/estimators.md and `slipstream estimators` show these descriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from slipstream.config.losses import LOSSES as DISTILLATION
from slipstream.estimators.control import CONTROLLERS
from slipstream.estimators.divergence import KL_KINDS
from slipstream.estimators.options import unknown
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.correction import PRESETS, RS_MODES, SCOPE, CorrectionPreset, Unit
from slipstream.estimators.tables.policy import ALIASES, LOSSES, scope_of
from slipstream.scope import Scope

UNITS: dict[Scope, str] = {"token": "token", "row": "sequence", "batch": "batch"}
COSTS: dict[Scope, str] = {"token": "–", "row": "rows must not be cut", "batch": "one more pass over the batch"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    what: str
    unit: str
    scope: str
    trust_region: str
    importance: str
    targets: str
    cost: str
    use_when: str


TITLES = [
    "name",
    "what it is",
    "unit",
    "scope",
    "trust region",
    "importance treatment",
    "failure it targets",
    "cost",
    "when to use it",
]
INTRODUCTIONS = {
    "distillation": "Losses from a teacher's scores. `importance treatment`: weight of draws from an older student.",
    "policy": "Losses from advantages, `policy_loss(NAME, …)`.",
    "advantage": "Estimators of how much better a sample is than expected, `advantage(NAME, …)`. The column of the "
    "targeted failure holds the baseline. Scope `group`: the answers to one prompt, which stay together.",
    "correction": "Presets of importance weights (IS) and rejection (RS) for the gap between sampling and learning "
    "policy, `PRESETS[NAME]`. Their parts are the next two families.",
    "level": "Units over which token ratios are multiplied to one weight, `importance_ratio(NAME, …)`: "
    "`correction.is_level`, which replaces the preset's level.",
    "rejection": "Rules that reject tokens or rows, `correct(rs={NAME: bound, …})`: `correction.rs`, not the preset's.",
    "estimate": "Estimates of the KL to the reference from one token, `kl_estimate(kind=NAME)`: `reference.estimate`.",
    "controller": "Change of the coefficient β of this KL after an update: `reference.control`.",
}


def catalogue() -> dict[str, list[Entry]]:
    """Return the entries of every family of estimators, in the order of the page."""
    distillation = [
        Entry(
            name=name,
            what=told.minimises,
            unit=told.unit,
            scope=row.scope,
            trust_region=told.trust_region,
            importance=told.importance,
            targets=told.targets,
            cost=told.cost,
            use_when=told.use_when,
        )
        for name, row in DISTILLATION.items()
        for told in [row.told[name]]
    ]
    policy = [
        Entry(
            name=name,
            what=_first_line(loss.loss),
            unit=UNITS[scope_of(name)],
            scope=scope_of(name),
            trust_region=loss.trust_region,
            importance=loss.importance,
            targets=loss.targets,
            cost=COSTS[scope_of(name)],
            use_when=loss.use_when,
        )
        for name, loss in LOSSES.items()
    ]
    advantages = [
        Entry(
            name=name,
            what=_first_line(estimator.function),
            unit="token" if estimator.function.__module__.endswith(".token") else "sequence",
            scope=estimator.scope,
            trust_region="–",
            importance="–",
            targets=f"baseline: {estimator.baseline}",
            cost=estimator.cost,
            use_when=estimator.use_when,
        )
        for name, estimator in ADVANTAGES.items()
        if not estimator.needs_critic
    ]
    return {
        "distillation": distillation,
        "policy": policy,
        "advantage": advantages,
        "correction": [_preset(name, preset) for name, preset in PRESETS.items()],
        "level": [_level(unit) for unit in get_args(Unit)],
        "rejection": [_rejection(mode) for mode in RS_MODES],
        "estimate": [_estimate(kind) for kind in KL_KINDS],
        "controller": [_controller(name) for name in CONTROLLERS],
    }


def find(name: str) -> list[Entry]:
    """Return all entries with this name, from every family. Raise a ValueError for an unknown or unusable name."""
    if name in ADVANTAGES and ADVANTAGES[name].needs_critic:
        raise ValueError(f"{name} needs a critic, and there is none here: see reinforce_plus_plus, or remax")
    known = [entry for entries in catalogue().values() for entry in entries]
    found = [entry for entry in known if entry.name == ALIASES.get(name, name)]
    if not found:
        raise unknown("estimator", name, [entry.name for entry in known])
    return found


def _preset(name: str, preset: CorrectionPreset) -> Entry:
    weights = "none"
    if preset.is_level is not None:
        shape = "band" if isinstance(preset.is_threshold, tuple) else "at most"
        weights = f"{preset.is_level} ratio, {shape} {preset.is_threshold}, stop-gradient"
    rejection = ", ".join(f"{mode} {bound}" for mode, bound in (preset.rs or {}).items())
    # see PRESETS: the mean over a few tokens varies more than these bounds
    length = ", for answers of a thousand tokens" if "seq_mean_k1" in (preset.rs or {}) else ""
    stays = "the learner at the version that drew the token" if preset.mode == "decoupled" else "the sampling policy"
    return Entry(
        name=name,
        what=_corrects(preset),
        unit=preset.is_level or ("sequence" if preset.rs else "–"),
        scope=preset.scope,
        trust_region=f"rejects outside {rejection}" if rejection else "none",
        importance=weights,
        targets="none: only metrics" if preset.mode is None else _target(preset),
        cost="old log-probs: a forward pass" if preset.mode == "decoupled" else "–",
        use_when="drift should only be measured"
        if preset.mode is None
        else f"{preset.mode}: the loss's old policy is {stays}; with {preset.loss or 'any loss'}{length}",
    )


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").split("\n")[0]


def _corrects(preset: CorrectionPreset) -> str:
    parts = ["importance weights"] * (preset.is_level is not None) + ["rejection"] * bool(preset.rs)
    return " and ".join(parts).capitalize() + "." if parts else "No correction."


def _target(preset: CorrectionPreset) -> str:
    if preset.is_level and preset.rs:
        return "bias of stale rows, and outliers that weights would amplify"
    if preset.is_level:
        return "bias of mismatched rows" if preset.mode == "decoupled" else "bias of stale rows"
    return "outliers" if preset.rs else "none: the ratio of the loss corrects"


LEVELS: dict[Unit, tuple[str, str, str]] = {
    "token": ("ratio ρ of the token alone", "variance of products", "drift is mild"),
    "sequence": (
        "product over the row: exact",
        "bias of prefixes drawn by another policy",
        "rows are short: the product explodes",
    ),
    "geometric": ("geometric mean over the row", "products that explode", "rows are long: weights do not grow"),
    "prefix_min": ("smallest ρ before the token, times its own ρ", "prefix bias", "rows are long and stale"),
    "cumulative": (
        "product up to token t, its log within ±c√t",
        "as prefix_min",
        "drift is spread evenly (ctpo_clip: c)",
    ),
    "turn": ("product over the tokens of one turn", "ratios that cross tool output", "agents, whose actions are turns"),
}
"""Texts of each level: importance treatment, problem that it avoids, when to use it."""
SPANS = {
    "token": ("of the token", "single tokens are outliers"),
    "seq_sum": ("summed over the row", "rows are short"),
    "seq_mean": ("averaged over the row", "rows are long"),
    "seq_max": ("at the worst token of the row", "one bad token spoils a row"),
}
"""Texts of each span of a rejection mode: tokens that are compared, when to use it."""
MEASURES = {
    "k1": ("e^Δ in (L, U), Δ", "; separates the directions of drift"),
    "k2": ("½Δ²", ""),
    "k3": ("e^Δ − 1 − Δ", ""),
    "kl": ("exact KL, sampling ‖ current policy,", ": a trust region without an estimate"),
}
"""Texts of each measure of a rejection mode: the compared quantity, and additional text on when to use it."""
ESTIMATES: dict[str, tuple[str, str, str, str]] = {
    "k1": ("loss, with importance, or in the reward", "none", "none: simple and unbiased", "the default in the reward"),
    "abs": ("loss or in the reward", "the sign of the gap", "single tokens with huge gaps", "for comparison"),
    "k2": ("loss or in the reward", "the KL's", "the missing gradient of k1", "the default with importance = false"),
    "k3": ("loss or in the reward", "the forward KL's", "the variance of k1", "the default with importance = true"),
    "k1+": ("loss, without importance", "the KL's", "k2's biased value", "as k2, to log the KL itself"),
    "k3+": (
        "loss, without importance",
        "the KL's",
        "k2's bias and k1's variance",
        "as k1+, with a less noisy logged value",
    ),
}
"""Texts of each estimate: place where it can be used, gradient as a loss, problem that it avoids, when to use it."""
CONTROL: dict[str, tuple[str, str, str, str]] = {
    "fixed": ("β is constant", "oscillation", "–", "the default"),
    "adaptive": (
        "β·(1 + clip(KL/target − 1, ±0.2)·samples/horizon)",
        "a β that is right only for a while",
        "a number in every checkpoint",
        "the best β changes during the run",
    ),
}
"""Texts of each controller: formula, problem that it avoids, cost, when to use it."""


def _level(unit: Unit) -> Entry:
    importance, targets, use_when = LEVELS[unit]
    return Entry(
        name=unit,
        what=importance,
        unit=unit,
        scope=SCOPE[unit],
        trust_region="correction.is_threshold",
        importance="the weight, stop-gradient",
        targets=targets,
        cost=COSTS[SCOPE[unit]],
        use_when=use_when,
    )


def _rejection(mode: str) -> Entry:
    span, _, measure = mode.rpartition("_")
    if mode == "negative_seq":
        keeps, targets = "mean log π_rollout − log π_θ of rows with A < 0", "bad answers that are already unlikely"
        use_when = "stale or mismatched rollouts push bad answers down without limit"
    else:
        keeps, targets = f"{MEASURES[measure][0]} {SPANS[span][0]}", "outliers"
        use_when = SPANS[span][1] + MEASURES[measure][1]
    return Entry(
        name=mode,
        what="Rejects tokens." if SCOPE[mode] == "token" else "Rejects rows.",
        unit=UNITS[SCOPE[mode]],
        scope=SCOPE[mode],
        trust_region=keeps,
        importance="none",
        targets=targets,
        cost="two passes for each weight version that drew tokens" if measure == "kl" else COSTS[SCOPE[mode]],
        use_when=use_when,
    )


def _estimate(kind: str) -> Entry:
    place, gradient, targets, use_when = ESTIMATES[kind]
    return Entry(
        name=kind,
        what=f"In the {place}.",
        unit="token",
        scope="token",
        trust_region="–",
        importance=f"with importance the KL's gradient; its own: {gradient}",
        targets=targets,
        cost="log-probs under the reference: a forward pass",
        use_when=use_when,
    )


def _controller(name: str) -> Entry:
    does, targets, cost, use_when = CONTROL[name]
    return Entry(
        name=name,
        what=does,
        unit="update",
        scope="batch",
        trust_region="–",
        importance="–",
        targets=targets,
        cost=cost,
        use_when=use_when,
    )
