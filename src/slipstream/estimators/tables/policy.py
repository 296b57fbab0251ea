"""Table of policy losses: inputs, aggregation, and descriptions for users who choose one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from slipstream.estimators.options import Function, Options, formula, options_of, unknown
from slipstream.scope import Scope

Mode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
"""Reductions of token losses to one number: see `aggregate`."""
VARIANCE_COEF = 0.04
"""Coefficient of the variance of r2vpo if none is given."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    formula: str
    """Formula as scope.function: scopes are modules under slipstream.estimators.policy."""
    takes: tuple[str, ...] = ()
    agg: Mode = "token-mean"
    weighs_rows: bool = False
    """True if a row is multiplied by the geometric mean of its importance weights, instead of each token by its own."""
    trust_region: str
    importance: str
    targets: str

    @property
    def scope(self) -> Scope:
        return cast(Scope, self.formula.split(".")[0])

    @property
    def loss(self) -> Function:
        return formula(f"policy.{self.formula}")

    @property
    def choose(self) -> Function | None:
        """Return the function that selects tokens of the whole batch; None unless the scope is batch."""
        return formula(f"policy.{self.formula.replace('.', '.choose_')}") if self.scope == "batch" else None

    @property
    def options(self) -> Options:
        if self.choose is None:
            return options_of(self.loss)
        return {name: default for name, default in options_of(self.choose, self.loss).items() if name != "chosen"}


def find_loss(name: str) -> PolicyLoss:
    name = ALIASES.get(name, name)
    if name not in LOSSES:
        raise unknown("policy loss", name, [*LOSSES, *ALIASES])
    return LOSSES[name]


def scope_of(name: str, agg: Mode | None = None) -> Scope:
    """Return the scope of a policy loss that is reduced by `agg`. A mean over the row needs the whole row."""
    found = find_loss(name)
    by_row = (agg or found.agg) == "seq-mean-token-mean"
    return "row" if found.scope == "token" and by_row else found.scope


ALIASES = {"geo_mean": "gmpo"}
"""Other names of losses, used by verl."""

LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(
        formula="token.vanilla",
        takes=("clip_low", "clip_high", "dual_clip"),
        trust_region="hard clip of the token ratio, and a bound on the loss of bad tokens",
        importance="token ratio",
        targets="steps that are too large; bad tokens with exploding ratios",
    ),
    "reinforce": PolicyLoss(
        formula="token.reinforce",
        trust_region="none",
        importance="none; uses the weights of a correction preset",
        targets="bias of clipping",
    ),
    "gpg": PolicyLoss(
        formula="token.reinforce",
        trust_region="none",
        importance="none; uses the weights of a correction preset",
        targets="bias of clipping",
    ),
    "cispo": PolicyLoss(
        formula="token.cispo",
        takes=("clip_low", "clip_high"),
        trust_region="none: the weight is bounded, but not the step",
        importance="clipped token ratio, stop-gradient",
        targets="rare decisive tokens that lose their gradient by clipping",
    ),
    "dispo": PolicyLoss(
        formula="token.dispo",
        takes=("clip_low_pos", "clip_high_pos", "clip_low_neg", "clip_high_neg"),
        trust_region="none: the weight is bounded, but not the step",
        importance="token ratio with bounds by the sign of the advantage, stop-gradient",
        targets="entropy that drifts in good answers; repetitions and shrinking length from bad ones",
    ),
    "gspo": PolicyLoss(
        formula="row.gspo",
        takes=("clip_low", "clip_high"),
        agg="seq-mean-token-mean",
        trust_region="hard clip of the row's geometric mean ratio",
        importance="geometric mean over the row",
        targets="row ratios that explode with length; unstable routing in mixtures of experts",
    ),
    "gspo_token": PolicyLoss(
        formula="row.gspo_token",
        takes=("clip_low", "clip_high"),
        agg="seq-mean-token-mean",
        trust_region="hard clip of the row's geometric mean ratio",
        importance="geometric mean over the row, stop-gradient",
        targets="as gspo, with advantages per token",
    ),
    "tbpo": PolicyLoss(
        formula="row.tbpo",
        takes=("clip_low", "clip_high", "band_high"),
        agg="seq-mean-token-mean",
        trust_region="hard clip of the row's geometric mean ratio; bad rows outside of a band are dropped",
        importance="geometric mean over the row",
        targets="bad rows of quantised samplers with wrong tokens",
    ),
    "espo": PolicyLoss(
        formula="row.espo",
        takes=("entropy", "espo_share", "espo_alpha"),
        agg="seq-mean-token-mean",
        trust_region="hard clip of a part's geometric mean ratio, as wide as its entropy",
        importance="geometric mean over the uncertain or the certain tokens of the row, stop-gradient",
        targets="long rows that a clip of the whole row silences",
    ),
    "gmpo": PolicyLoss(
        formula="row.gmpo",
        takes=("clip_low", "clip_high"),
        agg="seq-mean-token-mean",
        weighs_rows=True,
        trust_region="log-ratio of each token clipped in the direction of its advantage",
        importance="geometric mean of clipped token ratios",
        targets="row ratios that explode with length; single outlier tokens",
    ),
    "sapo": PolicyLoss(
        formula="token.sapo",
        takes=("tau_pos", "tau_neg"),
        agg="seq-mean-token-mean",
        trust_region="sigmoid: the gradient fades as the ratio leaves 1",
        importance="token ratio, in the sigmoid",
        targets="gradients that jump at the edge of a hard clip",
    ),
    "dppo_tv": PolicyLoss(
        formula="token.dppo_tv",
        takes=("clip_low", "clip_high", "dppo_truncation"),
        trust_region="drops tokens whose probability changed too much",
        importance="truncated token ratio (20), stop-gradient",
        targets="ratios that do not measure the distance of policies",
    ),
    "dppo_kl": PolicyLoss(
        formula="token.dppo_kl",
        takes=("clip_low", "clip_high", "dppo_truncation"),
        trust_region="drops tokens whose binary KL is too large",
        importance="truncated token ratio (20), stop-gradient",
        targets="ratios that do not measure the distance of policies",
    ),
    "clip_cov": PolicyLoss(
        formula="batch.clip_cov",
        takes=("generator", "clip_low", "clip_high", "cov_low", "cov_high", "cov_fraction"),
        trust_region="hard clip, and no loss at a few tokens of high covariance",
        importance="token ratio",
        targets="entropy collapse",
    ),
    "kl_cov": PolicyLoss(
        formula="batch.kl_cov",
        takes=("cov_fraction", "kl_coef"),
        trust_region="|δ| penalty at the tokens of highest covariance",
        importance="token ratio",
        targets="entropy collapse",
    ),
    "dro": PolicyLoss(
        formula="token.dro",
        takes=("dro_beta",),
        trust_region="quadratic penalty on δ",
        importance="none",
        targets="exploding ratios on offline data",
    ),
    "r2vpo": PolicyLoss(
        formula="token.r2vpo",
        takes=("variance_coef",),
        trust_region="quadratic penalty on r − 1",
        importance="token ratio",
        targets="rare tokens of high advantage that lose their gradient by clipping",
    ),
    "quatro": PolicyLoss(
        formula="token.quatro",
        takes=("spread", "radius"),
        trust_region="KL penalty with one multiplier for each prompt",
        importance="token ratio",
        targets="one clip range for all prompts, although their rewards are spread differently",
    ),
    "m2po": PolicyLoss(
        formula="batch.m2po",
        takes=("budget",),
        trust_region="bound on the batch mean of δ²",
        importance="token ratio",
        targets="extreme ratios of stale tokens",
    ),
    "decoupled_ppo": PolicyLoss(
        formula="token.decoupled_ppo",
        takes=("proximal_logp", "clip_low", "clip_high", "weight_cap"),
        trust_region="hard clip around the proximal policy",
        importance="proximal/behaviour ratio, stop-gradient, 0 above a cap",
        targets="clips that measure staleness instead of the step",
    ),
    "a3po": PolicyLoss(
        formula="token.a3po",
        takes=("lag", "clip_low", "clip_high", "weight_cap"),
        trust_region="hard clip around a proximal policy between the old and the current one",
        importance="proximal/behaviour ratio, stop-gradient, 0 above a cap",
        targets="the cost of the proximal policy's pass",
    ),
    "topr": PolicyLoss(
        formula="row.topr",
        takes=("positive",),
        trust_region="none for good rows, truncation for bad ones",
        importance="row ratio in [0, 1] on bad rows, stop-gradient",
        targets="bad rows that are pushed down without limit",
    ),
    "aspo": PolicyLoss(
        formula="token.aspo",
        takes=("clip_low", "clip_high", "dual_clip"),
        trust_region="hard clip for bad tokens, a bound on the weight of good tokens",
        importance="token ratio, inverted for good tokens",
        targets="entropy collapse, because probable tokens gain most",
    ),
    "minpro": PolicyLoss(
        formula="row.minpro",
        trust_region="none: the smallest prefix ratio lowers the weight",
        importance="smallest prefix ratio times token ratio, stop-gradient",
        targets="prefix bias of token ratios; products that explode with length",
    ),
    "ctpo": PolicyLoss(
        formula="row.ctpo",
        takes=("ctpo_clip",),
        trust_region="log of the prefix product clipped to ±c√t",
        importance="prefix product, stop-gradient",
        targets="as minpro, with the whole product",
    ),
    "vespo": PolicyLoss(
        formula="row.vespo",
        takes=("c1_pos", "c2_pos", "c1_neg", "c2_neg"),
        trust_region="smooth weight of the row, which fades as its ratio leaves 1",
        importance="row ratio in that weight, stop-gradient",
        targets="variance of exact row ratios",
    ),
    "oapl": PolicyLoss(
        formula="row.oapl",
        takes=("oapl_beta",),
        agg="seq-mean-token-sum",
        trust_region="quadratic penalty on the row's log-ratio",
        importance="none",
        targets="ratios that explode on very old rows",
    ),
    "st_ppo": PolicyLoss(
        formula="row.st_ppo",
        takes=("turns", "clip_low", "clip_high"),
        trust_region="hard clip of the turn's geometric mean ratio",
        importance="the turn's ratio, shared out by clipped token ratios, stop-gradient",
        targets="stale turns of agents",
    ),
}
