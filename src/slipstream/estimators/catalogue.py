"""Descriptions of all estimators, made from the tables and docstrings of the code.

docs/estimators.md and `slipstream estimators` show these descriptions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

from slipstream.config.losses import LOSSES as DISTILLATION_LOSSES
from slipstream.estimators.divergence import KL_KINDS
from slipstream.estimators.options import unknown
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.correction import PRESETS, RS_MODES, SCOPE, CorrectionPreset, Unit
from slipstream.estimators.tables.distillation import DISTILLATION
from slipstream.estimators.tables.policy import ALIASES, LOSSES, scope_of
from slipstream.scope import Scope

UNITS: dict[Scope, str] = {"token": "token", "row": "sequence", "batch": "batch"}
COSTS: dict[Scope, str] = {"token": "–", "row": "rows must not be cut", "batch": "one more pass over the batch"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    what: str
    unit: str = "token"
    scope: str = "token"
    trust_region: str = "–"
    importance: str = "–"
    targets: str
    cost: str = "–"
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
    return {
        "distillation": [
            Entry(name=kind, scope=row.scope, **asdict(DISTILLATION[kind])) for kind, row in DISTILLATION_LOSSES.items()
        ],
        "policy": [_policy(name) for name in LOSSES],
        "advantage": [_advantage(name) for name in ADVANTAGES],
        "correction": [_preset(name, preset) for name, preset in PRESETS.items()],
        "level": [_level(unit) for unit in get_args(Unit)],
        "rejection": [_rejection(mode) for mode in RS_MODES],
        "estimate": [_estimate(kind) for kind in KL_KINDS],
        "controller": CONTROLLERS,
    }


def find(name: str) -> list[Entry]:
    """Return all entries with this name, from every family. Raise a ValueError for an unknown or unusable name."""
    if name == "gae":
        raise ValueError("gae needs a critic, and there is none here: see reinforce_plus_plus, or remax")
    known = [entry for entries in catalogue().values() for entry in entries]
    found = [entry for entry in known if entry.name == ALIASES.get(name, name)]
    if not found:
        raise unknown("estimator", name, [entry.name for entry in known])
    return found


def _policy(name: str) -> Entry:
    row, scope = LOSSES[name], scope_of(name)
    summary, advice = _documentation(row.loss)
    return Entry(
        name=name,
        what=summary,
        unit=UNITS[scope],
        scope=scope,
        trust_region=row.trust_region,
        importance=row.importance,
        targets=row.targets,
        cost=COSTS[scope],
        use_when=advice,
    )


def _advantage(name: str) -> Entry:
    row = ADVANTAGES[name]
    summary, advice = _documentation(row.function)
    return Entry(
        name=name,
        what=summary,
        unit="token" if row.formula.startswith("token.") else "sequence",
        scope=row.scope,
        targets=f"baseline: {row.baseline}",
        cost=row.cost,
        use_when=advice,
    )


def _documentation(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the first line of a docstring, and its advice, which follows "Use this loss" or "Use this advantage"."""
    summary, _, rest = (inspect.getdoc(function) or "").partition("\n")
    return summary, " ".join(rest.partition("\nUse this ")[2].split()[1:]).removesuffix(".")


CORRECTIONS = {
    (True, True): ("Importance weights and rejection.", "bias of stale rows, and outliers that weights would amplify"),
    (True, False): ("Importance weights.", "bias of mismatched or stale rows"),
    (False, True): ("Rejection.", "outliers"),
    (False, False): ("No correction.", "none: the ratio of the loss corrects"),
}
"""Texts of a preset by (it has importance weights, it rejects): summary, problem that it avoids."""


def _preset(name: str, preset: CorrectionPreset) -> Entry:
    what, targets = CORRECTIONS[preset.is_level is not None, preset.rs is not None]
    rejection = ", ".join(f"{mode} {bound}" for mode, bound in (preset.rs or {}).items())
    shape = "band" if isinstance(preset.is_threshold, tuple) else "at most"
    weights = f"{preset.is_level} ratio, {shape} {preset.is_threshold}, stop-gradient"
    decoupled = preset.mode == "decoupled"
    old = "the learner at the version that drew the token" if decoupled else "the sampling policy"
    # see PRESETS: the mean over a few tokens varies more than these bounds
    length = ", for answers of a thousand tokens" if "seq_mean_k1" in rejection else ""
    use_when = f"{preset.mode}: the loss's old policy is {old}; with {preset.loss or 'any loss'}{length}"
    return Entry(
        name=name,
        what=what,
        unit=preset.is_level or ("sequence" if rejection else "–"),
        scope=preset.scope,
        trust_region=f"rejects outside {rejection}" if rejection else "none",
        importance=weights if preset.is_level else "none",
        targets=targets if preset.mode else "none: only metrics",
        cost="old log-probs: a forward pass" if decoupled else "–",
        use_when=use_when if preset.mode else "drift should only be measured",
    )


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
CONTROLLERS = [
    Entry(
        name="fixed",
        what="β is constant",
        unit="update",
        scope="batch",
        targets="oscillation",
        use_when="the default",
    ),
    Entry(
        name="adaptive",
        what="β·(1 + clip(KL/target − 1, ±0.2)·samples/horizon)",
        unit="update",
        scope="batch",
        targets="a β that is right only for a while",
        cost="a number in every checkpoint",
        use_when="the best β changes during the run",
    ),
]


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
        importance=f"with importance the KL's gradient; its own: {gradient}",
        targets=targets,
        cost="log-probs under the reference: a forward pass",
        use_when=use_when,
    )
