"""Descriptions of all estimators, from the tables and the docstrings of the formulas.

docs/estimators.md and `slipstream estimators` show these descriptions.
"""

from typing import NamedTuple, get_args

from slipstream.config.losses import DISTILLATION_LOSSES, DistillationLoss
from slipstream.estimators.options import description, unknown
from slipstream.estimators.tables.advantage import ADVANTAGES
from slipstream.estimators.tables.correction import LOSSES_OF, PART_SCOPES, PRESETS, RS_MODES, CorrectionPreset, Unit
from slipstream.estimators.tables.policy import POLICY_ALIASES, POLICY_LOSSES, Centre, scope_of
from slipstream.scope import Scope

SCOPE_UNITS: dict[Scope, str] = {"token": "token", "row": "sequence", "batch": "batch"}
SCOPE_COSTS: dict[Scope, str] = {"token": "–", "row": "rows must not be cut", "batch": "one more pass over the batch"}
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


class Entry(NamedTuple):
    """Columns of the page, with the titles in `TITLES`."""

    name: str
    what: str
    unit: str
    scope: str
    trust_region: str
    importance: str
    targets: str
    cost: str
    use_when: str


def catalogue() -> dict[str, list[Entry]]:
    """Return the entries of every family of estimators, in the order of the page."""
    return {
        "distillation": [_distillation(kind, row) for kind, row in DISTILLATION_LOSSES.items()],
        "policy": [_policy(name) for name in POLICY_LOSSES],
        "tokens": [_tokens(name) for name in get_args(DistillationLoss.model_fields["tokens"].annotation)[1:]],
        "advantage": [_advantage(name) for name in ADVANTAGES],
        "correction": [_preset(name, preset) for name, preset in PRESETS.items()],
        "level": [_level(unit) for unit in get_args(Unit)],
        "rejection": [_rejection(mode) for mode in RS_MODES],
        "estimate": [_estimate(kind) for kind in ESTIMATES],
        "controller": BETA_CONTROLLERS,
        "centre": [_centre(kind) for kind in get_args(Centre)],
    }


def find(name: str) -> list[Entry]:
    """Return all entries with this name, from every family. Raise a ValueError for an unknown or unusable name."""
    known = [entry for entries in catalogue().values() for entry in entries]
    found = [entry for entry in known if entry.name == POLICY_ALIASES.get(name, name)]
    if not found:
        raise unknown("estimator", name, [entry.name for entry in known])
    return found


def _distillation(kind: str, row: type[DistillationLoss]) -> Entry:
    if kind in ESTIMATES:
        (what, use_when), (_, gradient, targets, _) = KL_LOSSES[kind], ESTIMATES[kind]
        importance = f"as an advantage: token ratio; as a loss: none (its gradient: {gradient})"
        trust_region, cost = 'none; PPO clip use = "advantage"', "8 bytes per position"
        return Entry(kind, what, "emitted token", row.scope, trust_region, importance, targets, cost, use_when)
    formula = "divergence.jsd_topk" if kind == "jsd" else row(kind=kind).spec.formula
    what, unit, *texts = description(formula, "Unit", "Trust region", "Importance", "Against", "Cost")
    return Entry(kind, what, unit, row.scope, *texts)


def _policy(name: str) -> Entry:
    scope, labels = scope_of(name), ("Trust region", "Importance", "Against")
    what, trust_region, importance, targets, use_when = description(POLICY_LOSSES[name].formulas[-1], *labels)
    return Entry(name, what, SCOPE_UNITS[scope], scope, trust_region, importance, targets, SCOPE_COSTS[scope], use_when)


def _tokens(name: str) -> Entry:
    what, targets, cost, use_when = description(f"token_weights.{name}", "Against", "Cost")
    return Entry(name, what, "response", "row", "–", "–", targets, cost, use_when)


def _advantage(name: str) -> Entry:
    row = ADVANTAGES[name]
    what, baseline, cost, use_when = description(f"advantage.{name}", "Baseline", "Cost")
    unit = "token" if row.by_token else "sequence"
    return Entry(name, what, unit, row.scope, "–", "–", f"baseline: {baseline}", cost, use_when)


CORRECTIONS = {
    (True, True): ("Importance weights and rejection.", "bias of {rows}, and outliers that weights would amplify"),
    (True, False): ("Importance weights.", "bias of {rows}"),
    (False, True): ("Rejection.", "outliers"),
    (False, False): ("No correction.", "none: the ratio of the loss corrects"),
}
"""Texts of a preset by (it has importance weights, it rejects): summary, problem that it avoids for some rows."""


def _preset(name: str, preset: CorrectionPreset) -> Entry:
    what, targets = CORRECTIONS[preset.is_level is not None, preset.rs is not None]
    rejection = ", ".join(f"{mode} {bound}" for mode, bound in (preset.rs or {}).items())
    shape = "band" if isinstance(preset.is_threshold, tuple) else "at most"
    decoupled = preset.mode == "decoupled"
    old = "the learner at the version that drew the token" if decoupled else "the sampling policy"
    # see PRESETS: the mean over a few tokens varies more than these bounds
    rows = "rows whose sampler and learner differ at the same weights" if decoupled else "mismatched or stale rows"
    length = ", for answers of a thousand tokens" if "seq_mean_k1" in rejection else ""
    losses = " or ".join(LOSSES_OF[preset.loss]) if preset.loss else "any loss"
    use_when = f"{preset.mode}: the loss's old policy is {old}; with {losses}{length}"
    return Entry(
        name,
        what,
        preset.is_level or ("sequence" if rejection else "–"),
        preset.scope,
        f"rejects outside {rejection}" if rejection else "none",
        f"{preset.is_level} ratio, {shape} {preset.is_threshold}, stop-gradient" if preset.is_level else "none",
        targets.format(rows=rows) if preset.mode else "none: only metrics",
        "old log-probs: a forward pass" if decoupled else "–",
        use_when if preset.mode else "drift should only be measured",
    )


LEVEL_TEXTS: dict[Unit, tuple[str, str, str]] = {
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
SPAN_TEXTS = {
    "token": ("of the token", "single tokens are outliers"),
    "seq_sum": ("summed over the row", "rows are short"),
    "seq_mean": ("averaged over the row", "rows are long"),
    "seq_max": ("at the worst token of the row", "one bad token spoils a row"),
}
"""Texts of each span of a rejection mode: tokens that are compared, when to use it."""
MEASURE_TEXTS = {
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
        "as k1+, with less noise in the log",
    ),
}
"""Texts of each estimate: place where it can be used, gradient as a loss, problem that it avoids, when to use it."""
KL_LOSSES = {
    "k1": ("log p − log q, as an advantage", 'only with use = "advantage": as a loss, its mean gradient is 0'),
    "abs": ("|log p − log q|", "for comparison only: the gradient is that of no divergence"),
    "k2": ("½ (log p − log q)²", "a loss with one draw, on-policy; the logged value is not the KL"),
    "k3": ("q/p − 1 − log(q/p)", "to report a KL; as a loss it minimises the forward KL"),
    "k1+": ("value of k1, gradient of k2", "as k2, if the logged loss should be the KL"),
    "k3+": ("value of k3, gradient of k2", "as k1+, with a less noisy logged value"),
}
"""Formula of each estimate as a distillation loss, and when to use it."""
BETA_CONTROLLERS = [
    Entry("fixed", "β is constant", "update", "batch", "–", "–", "oscillation", "–", "the default"),
    Entry(
        "adaptive",
        "β·(1 + clip(KL/target − 1, ±0.2)·samples/horizon)",
        *("update", "batch", "–", "–", "a β that is right only for a while"),
        "a number in every checkpoint",
        "the best β changes during the run",
    ),
]


def _level(unit: Unit) -> Entry:
    (what, targets, use_when), scope = LEVEL_TEXTS[unit], PART_SCOPES[unit]
    trust_region, importance = "correction.is_threshold", "the weight, stop-gradient"
    return Entry(unit, what, unit, scope, trust_region, importance, targets, SCOPE_COSTS[scope], use_when)


def _rejection(mode: str) -> Entry:
    (span, _, measure), scope = mode.rpartition("_"), PART_SCOPES[mode]
    what, cost = "Rejects tokens." if scope == "token" else "Rejects rows.", SCOPE_COSTS[scope]
    if measure == "kl":
        cost = "two passes for each weight version that drew tokens"
    if mode == "negative_seq":
        keeps, targets = "mean log π_rollout − log π_θ of rows with A < 0", "bad answers that are already unlikely"
        use_when = "stale or mismatched rollouts push bad answers down without limit"
    else:
        keeps, targets = f"{MEASURE_TEXTS[measure][0]} {SPAN_TEXTS[span][0]}", "outliers"
        use_when = SPAN_TEXTS[span][1] + MEASURE_TEXTS[measure][1]
    return Entry(mode, what, SCOPE_UNITS[scope], scope, keeps, "none", targets, cost, use_when)


def _centre(kind: str) -> Entry:
    what, targets, cost, use_when = description(f"centring.centre_of_{kind}", "Against", "Cost")
    importance = "that of the correction, at every token of the centre"
    return Entry(kind, what, "token", "token", "–", importance, targets, cost, use_when)


def _estimate(kind: str) -> Entry:
    place, gradient, targets, use_when = ESTIMATES[kind]
    importance = f"with importance the KL's gradient; its own: {gradient}"
    cost = "log-probs under the reference: a forward pass"
    return Entry(kind, f"In the {place}.", "token", "token", "–", importance, targets, cost, use_when)
