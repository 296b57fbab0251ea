"""The table of policy losses: what each may look at, how it is summed, and what to know before choosing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.estimators.options import Function, Options, formula, options_of, unknown
from slipstream.scope import Scope

Mode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
"""From per-token losses to one number: see `aggregate`."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A method: its formula, what it may look at, and what to know before choosing it."""

    formula: str
    """module.function, under slipstream.estimators.policy."""
    takes: tuple[str, ...] = ()
    """Its hyper-parameters."""
    scope: Scope
    agg: Mode = "token-mean"
    choice: str = ""
    """Batch scope: formula of the choice of tokens that `prepare` freezes."""
    weighs_rows: bool = False
    """Importance weights enter as their geometric mean over the row."""
    trust_region: str
    importance: str
    targets: str
    use_when: str

    @property
    def loss(self) -> Function:
        return formula(f"policy.{self.formula}")

    @property
    def choose(self) -> Function | None:
        return formula(f"policy.{self.choice}") if self.choice else None

    @property
    def options(self) -> Options:
        """What it takes, with the defaults (`options.REQUIRED` where there is none)."""
        if self.choose is None:
            return options_of(self.loss)
        return {name: default for name, default in options_of(self.choose, self.loss).items() if name != "chosen"}


def method(name: str) -> PolicyLoss:
    name = ALIASES.get(name, name)
    if name not in LOSSES:
        raise unknown("policy loss", name, [*LOSSES, *ALIASES])
    return LOSSES[name]


def scope_of(name: str, agg: Mode | None = None) -> Scope:
    """The scope of a method together with its aggregation: a mean over the row needs the whole row anyway."""
    found = method(name)
    by_row = (agg or found.agg) == "seq-mean-token-mean"
    return "row" if found.scope == "token" and by_row else found.scope


ALIASES = {"geo_mean": "gmpo"}
"""verl's names where ours is the paper's."""

LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(
        formula="token.vanilla",
        takes=("clip_low", "clip_high", "dual_clip"),
        scope="token",
        trust_region="hard clip of the token ratio, and a ceiling on bad tokens",
        importance="token ratio",
        targets="too large a step; bad tokens with exploding ratios",
        use_when="rollouts are at most an update or two old",
    ),
    "reinforce": PolicyLoss(
        formula="token.reinforce",
        scope="token",
        trust_region="none",
        importance="none of its own: weights from outside",
        targets="bias from clipping",
        use_when="on-policy, or with importance weights of a bypass preset",
    ),
    "gpg": PolicyLoss(
        formula="token.reinforce",
        scope="token",
        trust_region="none",
        importance="none of its own: weights from outside",
        targets="bias from clipping",
        use_when="as a baseline, with the gpg advantage",
    ),
    "cispo": PolicyLoss(
        formula="token.cispo",
        takes=("clip_low", "clip_high"),
        scope="token",
        trust_region="none: the weight is bounded, the step is not",
        importance="clipped token ratio, stop-gradient",
        targets="rare decisive tokens silenced by the clip",
        use_when="reflective tokens lose their gradient under vanilla",
    ),
    "gspo": PolicyLoss(
        formula="row.gspo",
        takes=("clip_low", "clip_high"),
        scope="row",
        agg="seq-mean-token-mean",
        trust_region="hard clip of the row's geometric mean ratio",
        importance="geometric mean over the row",
        targets="length trap; routing flips of mixtures of experts",
        use_when="one reward per answer, long answers; with clips near 3e-4",
    ),
    "gspo_token": PolicyLoss(
        formula="row.gspo_token",
        takes=("clip_low", "clip_high"),
        scope="row",
        agg="seq-mean-token-mean",
        trust_region="hard clip of the row's geometric mean ratio",
        importance="geometric mean over the row, stop-gradient",
        targets="as gspo, with credit by token",
        use_when="gspo, but advantages differ within an answer",
    ),
    "gmpo": PolicyLoss(
        formula="row.gmpo",
        takes=("clip_low", "clip_high"),
        scope="row",
        agg="seq-mean-token-mean",
        weighs_rows=True,
        trust_region="log-ratio of each token clipped on the side its advantage pushes to",
        importance="geometric mean of clipped token ratios",
        targets="length trap; single outlier tokens",
        use_when="gspo suffers from outliers; with clips near 0.4",
    ),
    "sapo": PolicyLoss(
        formula="token.sapo",
        takes=("tau_pos", "tau_neg"),
        scope="token",
        agg="seq-mean-token-mean",
        trust_region="sigmoid: the gradient fades as the ratio leaves 1",
        importance="token ratio, in the sigmoid",
        targets="jumps at the edge of a hard clip",
        use_when="clip_fraction is high and training is jumpy",
    ),
    "dppo_tv": PolicyLoss(
        formula="token.dppo_tv",
        takes=("clip_low", "clip_high", "dppo_truncation"),
        scope="token",
        trust_region="drops tokens whose probability moved too far",
        importance="truncated token ratio (20), stop-gradient",
        targets="ratios as a bad proxy of distance",
        use_when="rare tokens have wild ratios, as under engine mismatch",
    ),
    "dppo_kl": PolicyLoss(
        formula="token.dppo_kl",
        takes=("clip_low", "clip_high", "dppo_truncation"),
        scope="token",
        trust_region="drops tokens whose binary KL is too large",
        importance="truncated token ratio (20), stop-gradient",
        targets="ratios as a bad proxy of distance",
        use_when="as dppo_tv, stricter near probabilities 0 and 1",
    ),
    "clip_cov": PolicyLoss(
        formula="batch.clip_cov",
        takes=("generator", "clip_low", "clip_high", "cov_low", "cov_high", "cov_fraction"),
        choice="batch.choose_clip_cov",
        scope="batch",
        trust_region="hard clip, and no loss at a few tokens of high covariance",
        importance="token ratio",
        targets="entropy collapse",
        use_when="entropy falls too fast",
    ),
    "kl_cov": PolicyLoss(
        formula="batch.kl_cov",
        takes=("cov_fraction", "kl_coef"),
        choice="batch.choose_kl_cov",
        scope="batch",
        trust_region="|δ| penalty at the tokens of highest covariance",
        importance="token ratio",
        targets="entropy collapse",
        use_when="entropy falls too fast, and leaving tokens out is too coarse",
    ),
    "dro": PolicyLoss(
        formula="token.dro",
        takes=("dro_beta",),
        scope="token",
        trust_region="quadratic penalty on δ",
        importance="none",
        targets="ratio blow-up on offline data",
        use_when="data are so old that ratios mean nothing",
    ),
    "m2po": PolicyLoss(
        formula="batch.m2po",
        takes=("budget",),
        choice="batch.choose_m2po",
        scope="batch",
        trust_region="budget for the batch mean of δ²",
        importance="token ratio",
        targets="heavy tails of stale ratios",
        use_when="rollouts are many updates old",
    ),
    "decoupled_ppo": PolicyLoss(
        formula="token.decoupled_ppo",
        takes=("proximal_logp", "clip_low", "clip_high", "weight_cap"),
        scope="token",
        trust_region="hard clip around the proximal policy",
        importance="proximal to behaviour, stop-gradient, dropped above a cap",
        targets="clip used up by staleness",
        use_when="asynchronous rollouts, log-probs recomputed on arrival",
    ),
    "topr": PolicyLoss(
        formula="row.topr",
        takes=("positive",),
        scope="row",
        trust_region="none for good rows, truncation for bad ones",
        importance="whole-row ratio in [0, 1] on bad rows, stop-gradient",
        targets="bad rows pushed away without end",
        use_when="very stale or offline data with right and wrong answers",
    ),
    "aspo": PolicyLoss(
        formula="token.aspo",
        takes=("clip_low", "clip_high", "dual_clip"),
        scope="token",
        trust_region="hard clip for bad tokens, a cap on the weight of good ones",
        importance="token ratio, inverted for good tokens",
        targets="entropy collapse: the probable is rewarded most",
        use_when="vanilla only sharpens what the student already does",
    ),
    "minpro": PolicyLoss(
        formula="row.minpro",
        scope="row",
        trust_region="none of its own: the least prefix ratio damps the weight",
        importance="least prefix ratio times token ratio, stop-gradient",
        targets="prefix bias of token ratios, length trap of products",
        use_when="long answers under staleness",
    ),
    "ctpo": PolicyLoss(
        formula="row.ctpo",
        takes=("ctpo_clip",),
        scope="row",
        trust_region="log of the prefix product clipped to ±c√t",
        importance="prefix product, stop-gradient",
        targets="as minpro, with the whole product",
        use_when="as minpro, drift spread evenly over the row",
    ),
}
