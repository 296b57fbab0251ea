"""Describe every estimator from the tables that the code itself runs by; docs/estimators.md and `slipstream estimators`
show what is here."""

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
COSTS: dict[Scope, str] = {"token": "–", "row": "rows stay whole", "batch": "one pass over the batch first"}


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
    "distillation": "Losses from a teacher's scores. `importance treatment`: how draws of an older student count.",
    "policy": "Losses from advantages, `policy_loss(NAME, …)`.",
    "advantage": "How much better a sample did than expected, `advantage(NAME, …)`; its baseline stands in the column "
    "of what it targets. Scope `group`: the answers to one prompt, which travel together.",
    "correction": "Presets of importance weights (IS) and rejection (RS) between the policy that drew and the one that "
    "learns, `PRESETS[NAME]`; their parts are the two families below.",
    "level": "Over what the ratios of tokens are multiplied to one weight, `importance_ratio(NAME, …)`: "
    "`correction.is_level`, in place of the preset's.",
    "rejection": "What leaves the batch, `correct(rs={NAME: bound, …})`: `correction.rs`, in place of the preset's.",
    "estimate": "Estimates of the KL to the reference from one token, `kl_estimate(kind=NAME)`: `reference.estimate`.",
    "controller": "What becomes of its coefficient β after an update: `reference.control`.",
}


def catalogue() -> dict[str, list[Entry]]:
    """Families of estimators, in the order in which they are shown."""
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
    """The entries of that name; several families may have one. A ValueError where a config cannot choose it."""
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
    # see PRESETS: a mean over few tokens scatters more than that
    length = ", answers of a thousand tokens" if "seq_mean_k1" in (preset.rs or {}) else ""
    stays = "the learner at the version that drew" if preset.mode == "decoupled" else "the policy that drew"
    return Entry(
        name=name,
        what=_corrects(preset),
        unit=preset.is_level or ("sequence" if preset.rs else "–"),
        scope=preset.scope,
        trust_region=f"rejects outside {rejection}" if rejection else "none",
        importance=weights,
        targets="nothing: metrics only" if preset.mode is None else _target(preset),
        cost="old log-probs: a forward pass" if preset.mode == "decoupled" else "–",
        use_when="drift is only to be watched"
        if preset.mode is None
        else f"{preset.mode}: the loss's old policy is {stays}; with {preset.loss or 'any loss'}{length}",
    )


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").split("\n")[0]


def _corrects(preset: CorrectionPreset) -> str:
    parts = ["weights"] * (preset.is_level is not None) + ["rejection"] * bool(preset.rs)
    return " and ".join(parts).capitalize() + "." if parts else "Nothing is corrected."


def _target(preset: CorrectionPreset) -> str:
    if preset.is_level and preset.rs:
        return "bias of stale rows, and outliers that weights would amplify"
    if preset.is_level:
        return "bias of mismatched rows" if preset.mode == "decoupled" else "bias of stale rows"
    return "outliers" if preset.rs else "nothing of its own: the loss's ratio holds it"


LEVELS: dict[Unit, tuple[str, str, str]] = {
    "token": ("ρ of the token alone", "variance of products", "mild drift"),
    "sequence": (
        "product over the row: exact",
        "prefixes that another policy drew",
        "short rows: it explodes with length",
    ),
    "geometric": ("geometric mean over the row", "the length trap of products", "long rows, weights that do not grow"),
    "prefix_min": ("least ρ before the token, times its own", "prefix bias, without a product", "long rows, staleness"),
    "cumulative": (
        "product up to the token, its log within ±c√t",
        "as prefix_min",
        "drift spread evenly; ctpo_clip is c",
    ),
    "turn": ("product over the tokens of one turn", "ratios that cross tool output", "agents, whose action is a turn"),
}
"""Importance treatment, failure it targets, when to use it."""
SPANS = {
    "token": ("of the token", "single tokens go astray"),
    "seq_sum": ("summed over the row", "short rows"),
    "seq_mean": ("averaged over the row", "long rows"),
    "seq_max": ("at the worst token of the row", "one bad token spoils a row"),
}
"""Where a rejection mode looks, and when to use it."""
MEASURES = {
    "k1": ("e^Δ in (L, U), Δ", "; tells directions apart"),
    "k2": ("½Δ²", ""),
    "k3": ("e^Δ − 1 − Δ", ""),
    "kl": ("the exact KL, drew ‖ current", ": a trust region without an estimate"),
}
"""What it compares there, and what that is good for."""
ESTIMATES: dict[str, tuple[str, str, str, str]] = {
    "k1": ("loss, with importance; reward", "none", "the simplest; unbiased", "in the reward: the default there"),
    "abs": ("loss; reward", "its sign", "single tokens with huge gaps", "for comparison"),
    "k2": ("loss; reward", "the KL's", "the missing gradient of k1", "on-policy: the default with importance = false"),
    "k3": ("loss; reward", "the forward KL's", "the variance of k1", "in the loss: the default, with importance"),
    "k1+": (
        "loss, without importance",
        "the KL's",
        "k2's biased value",
        "as k2, when the logged value should be the KL",
    ),
    "k3+": ("loss, without importance", "the KL's", "k2's bias and k1's variance", "as k1+, with a quieter value"),
}
"""Where it may stand, its own gradient, failure it targets, when to use it."""
CONTROL: dict[str, tuple[str, str, str, str]] = {
    "fixed": ("β stays", "oscillation", "–", "the default"),
    "adaptive": (
        "β·(1 + clip(KL/target − 1, ±0.2)·samples/horizon)",
        "a β that is right for a while only",
        "a number in every checkpoint",
        "a good β changes during the run",
    ),
}
"""What it does, failure it targets, cost, when to use it."""


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
        keeps, targets = "mean log π_rollout − log π_θ of rows with A < 0", "bad answers that the policy has left"
        use_when = "stale or mismatched rollouts push bad answers ever further away"
    else:
        keeps, targets = f"{MEASURES[measure][0]} {SPANS[span][0]}", "outliers"
        use_when = SPANS[span][1] + MEASURES[measure][1]
    return Entry(
        name=mode,
        what="Tokens leave." if SCOPE[mode] == "token" else "Rows leave.",
        unit=UNITS[SCOPE[mode]],
        scope=SCOPE[mode],
        trust_region=keeps,
        importance="none",
        targets=targets,
        cost="two passes for each version that drew" if measure == "kl" else COSTS[SCOPE[mode]],
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
