"""Table of policy losses. Formulas and descriptions are beside the functions, in `estimators.policy`."""

from dataclasses import dataclass
from typing import Literal, cast

from slipstream.estimators.options import Function, formula, signature, unknown
from slipstream.scope import Scope

Mode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
"""Reductions of token losses to one number: see `numerics.aggregate`."""
Estimate = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
"""Estimates of the KL from one drawn token: see `divergence.kl_estimate`."""
Ratio = Literal["old", "behavior", "penalty", "none"]
"""Policy in the denominator of a loss's ratio: the old policy, which in bypass mode is the one that drew the token; or
the one that drew the token in every mode. penalty: a penalty on the distance to the old policy, and no ratio."""
CENTRED = "token.reinforce"
"""Formula of the losses that score centering is for: no clip, and no ratio with a gradient."""
Centre = Literal["draws", "top_k", "support"]
"""Tokens over which score centering sums: see `estimators.centring`."""
CENTRE_SIZES = {"draws": 8, "top_k": 32}
"""Default numbers of tokens of a centre; a support has as many as sampler.top_k."""
VARIANCE_COEF = 0.04
"""Coefficient of the variance of r2vpo if none is given."""


@dataclass(frozen=True)
class PolicyLoss:
    formula: str
    """Formula as scope.function: scopes are modules under slipstream.estimators.policy."""
    agg: Mode = "token-mean"
    ratio: Ratio = "old"
    weighs_rows: bool = False
    """True if a row is multiplied by the geometric mean of its importance weights, instead of each token by its own."""

    @property
    def scope(self) -> Scope:
        return cast(Scope, self.formula.split(".")[0])

    @property
    def formulas(self) -> list[str]:
        """Return the names of its functions; a loss of batch scope first chooses tokens by another one."""
        choosing = [self.formula.replace(".", ".choose_")] * (self.scope == "batch")
        return [f"policy.{name}" for name in (*choosing, self.formula)]

    @property
    def loss(self) -> Function:
        return formula(self.formulas[-1])

    @property
    def choose(self) -> Function | None:
        """Return the function that selects tokens of the whole batch; None unless the scope is batch."""
        return formula(self.formulas[0]) if self.scope == "batch" else None

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the options that users set."""
        return signature(*self.formulas).settings

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that its loss takes."""
        return signature(self.formulas[-1]).columns


def find_loss(name: str) -> PolicyLoss:
    name = POLICY_ALIASES.get(name, name)
    if name not in POLICY_LOSSES:
        raise unknown("policy loss", name, [*POLICY_LOSSES, *POLICY_ALIASES])
    return POLICY_LOSSES[name]


def scope_of(name: str, agg: Mode | None = None) -> Scope:
    """Return the scope of a policy loss that is reduced by `agg`. A mean over the row needs the whole row."""
    row = find_loss(name)
    by_row = (agg or row.agg) == "seq-mean-token-mean"
    return "row" if row.scope == "token" and by_row else row.scope


POLICY_ALIASES = {"geo_mean": "gmpo"}
"""Other names of losses, used by verl."""

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss("token.vanilla"),
    "reinforce": PolicyLoss("token.reinforce", ratio="none"),
    "gpg": PolicyLoss("token.reinforce", ratio="none"),
    "cispo": PolicyLoss("token.cispo"),
    "dispo": PolicyLoss("token.dispo"),
    "gspo": PolicyLoss("row.gspo", "seq-mean-token-mean"),
    "gspo_token": PolicyLoss("row.gspo_token", "seq-mean-token-mean"),
    "tbpo": PolicyLoss("row.tbpo", "seq-mean-token-mean"),
    "espo": PolicyLoss("row.espo", "seq-mean-token-mean"),
    "gmpo": PolicyLoss("row.gmpo", "seq-mean-token-mean", weighs_rows=True),
    "sapo": PolicyLoss("token.sapo", "seq-mean-token-mean"),
    "dppo_tv": PolicyLoss("token.dppo_tv"),
    "dppo_kl": PolicyLoss("token.dppo_kl"),
    "clip_cov": PolicyLoss("batch.clip_cov"),
    "kl_cov": PolicyLoss("batch.kl_cov"),
    "dro": PolicyLoss("token.dro", ratio="penalty"),
    "r2vpo": PolicyLoss("token.r2vpo"),
    "quatro": PolicyLoss("token.quatro"),
    "m2po": PolicyLoss("batch.m2po"),
    "decoupled_ppo": PolicyLoss("token.decoupled_ppo", ratio="behavior"),
    "a3po": PolicyLoss("token.a3po", ratio="behavior"),
    "topr": PolicyLoss("row.topr"),
    "aspo": PolicyLoss("token.aspo"),
    "minpro": PolicyLoss("row.minpro"),
    "ctpo": PolicyLoss("row.ctpo"),
    "vespo": PolicyLoss("row.vespo"),
    "oapl": PolicyLoss("row.oapl", "seq-mean-token-sum"),
    "st_ppo": PolicyLoss("row.st_ppo"),
}
