"""Every estimator on one page, made from the tables that the code itself runs by: it cannot say anything else.

python -m slipstream.estimators.catalogue > docs/estimators.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from slipstream.config.losses import LOSSES as DISTILLATION
from slipstream.estimators.advantage import ADVANTAGES
from slipstream.estimators.correction import PRESETS, CorrectionPreset
from slipstream.estimators.numerics import unknown
from slipstream.estimators.policy import scope_of
from slipstream.estimators.policy.table import ALIASES, LOSSES
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
    "learns, `PRESETS[NAME]`.",
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
            cost="–",
            use_when=estimator.use_when,
        )
        for name, estimator in ADVANTAGES.items()
    ]
    return {
        "distillation": distillation,
        "policy": policy,
        "advantage": advantages,
        "correction": [_preset(name, preset) for name, preset in PRESETS.items()],
    }


def find(name: str) -> list[Entry]:
    """The entries of that name; several families may have one."""
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


def markdown(families: Mapping[str, list[Entry]]) -> str:
    lines = [
        "# Estimators",
        "",
        "Made from the code by `python -m slipstream.estimators.catalogue`; `slipstream estimators` prints a summary, "
        "and with a name all of one.",
        "Scope says what the loss of one token may depend on, and so where a batch may be cut: anywhere (`token`), "
        "between rows (`row`), or only after a pass over the whole of it (`batch`).",
    ]
    for family, entries in families.items():
        lines += ["", f"## {family.capitalize()}", "", INTRODUCTIONS[family], ""]
        lines += [_line(TITLES), _line(["---"] * len(fields(Entry)))]
        lines += [_line([f"`{entry.name}`", *astuple(entry)[1:]]) for entry in entries]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(markdown(catalogue()), end="")
