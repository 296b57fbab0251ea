"""Table of advantages. Formulas and descriptions are beside the functions, in `estimators.advantage`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slipstream.estimators.options import Function, formula, signature

Scope = Literal["row", "group", "batch"]
"""Data that a token's advantage depends on. Groups are never split, so group scope costs no more than row scope."""


@dataclass(frozen=True)
class Estimator:
    name: str
    """Function of slipstream.estimators.advantage."""
    scope: Scope = "group"
    compares: bool = True
    """True if answers to one prompt are compared with each other. A single answer then has no advantage."""
    by_token: bool = False
    """True if the tokens of a row may have different advantages."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Columns of its parameters, if their names differ; a parameter with the column "" is left out."""

    @property
    def function(self) -> Function:
        return formula(f"advantage.{self.name}")

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the options that users set."""
        return signature(f"advantage.{self.name}").settings

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns that it takes, by parameter."""
        columns = {name: self.sources.get(name, name) for name in signature(f"advantage.{self.name}").columns}
        return {name: column for name, column in columns.items() if column}


ADVANTAGES: dict[str, Estimator] = {
    each.name: each
    for each in (
        Estimator("grpo"),
        Estimator("grpo_passk"),
        Estimator("grpo_turn", by_token=True),
        Estimator("rloo"),
        Estimator("opo"),
        # the importance weights of the tokens are in these norms already
        Estimator("opob", sources={"grad_norm_squared": "norm_by_logits", "weights": ""}),
        Estimator("opob_exact", sources={"grad_norm_squared": "norm_by_weights", "weights": ""}),
        Estimator("gpg", scope="batch"),
        Estimator("gdpo", scope="batch"),
        Estimator("oapl"),
        Estimator("reinforce_plus_plus_baseline", scope="batch"),
        Estimator("reinforce_plus_plus", scope="batch", compares=False, by_token=True),
        Estimator("gae", scope="batch", compares=False, by_token=True, sources={"log_ratios": "value_ratios"}),
        Estimator("remax", scope="row", compares=False, by_token=True),
        Estimator("optimal_token_baseline", by_token=True, sources={"logp": "current"}),
    )
}
