"""Table of distillation losses. Each row (class) is a section of the config and contains all that other code needs.

The fields of a row are the loss options, with their bounds. Property `asks` describes what samplers, scorers,
endpoints, learner and objective must provide. `scope` is for schedules; `told` is for the page of estimators. Other
code does not depend on `kind`. A new loss needs a row here and in `LossConfig`, and a formula in estimators/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from slipstream.config.base import DRAWS, Epsilon, Section, Temperature
from slipstream.scope import Scope

Cache = Literal["sampled", "student_topk", "teacher_topk", "hidden"]
"""Kind of teacher scores: log-probs of draws (tokens sampled at a position, the emitted one included), of the student's
or the teacher's top-k ids; or the teacher's last hidden state."""
Operand = Literal["student", "behavior", "proximal", "teacher", "keep"]
"""Inputs of a loss formula: log-probs under the current student, the policy that sampled the tokens, the student when
the batch arrived, and the teacher. `keep` is the mask of draws that are selected over the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """Requirements of a loss on samplers, scorers and the learner."""

    cache: Cache
    draws: int = 1
    """Number of draws of the student at every position, the emitted token included."""
    k: int = 0
    """Number of ids at every position, for a top-k cache."""
    formula: str
    """Formula as module.function under slipstream.estimators: maps operands and options to one loss per position."""
    takes: tuple[Operand, ...] = ("student", "teacher")
    """Inputs of the formula, in the order of its parameters."""
    options: Mapping[str, Any] = field(default_factory=dict)
    chooses: str = ""
    """Formula that first selects draws of the whole batch; empty to use all draws. `choice` contains its options."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    compares: bool = False
    """True if the loss uses probabilities of the policy that sampled the tokens."""
    loss_max_clamp: float | None = None
    log_prob_min_clamp: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Description of a loss for users who choose one."""

    minimises: str
    unit: str
    trust_region: str = "none"
    importance: str
    """Correction for draws that an older student sampled."""
    targets: str
    """Problem that the loss is designed to avoid."""
    cost: str
    use_when: str


class DistillationLoss(Section):
    told: ClassVar[Mapping[str, Told]]
    """Description of the loss for each value of `kind`."""
    scope: ClassVar[Scope] = "token"

    weight: float = Field(1.0, ge=0)
    """Weight of the distillation loss in the total loss; 0 uses no distillation and no teacher."""
    temperature: Temperature = 1.0
    """Temperature applied to the distributions of student and teacher in the distillation loss."""

    @property
    def asks(self) -> Asks:
        raise NotImplementedError


class ReverseKLMC(DistillationLoss):
    told: ClassVar[Mapping[str, Told]] = {
        "reverse_kl_mc": Told(
            minimises="KL(p‖q) on draws of the student, weighted for the current student",
            unit="draw",
            trust_region="none; clip or ratio_cap if set",
            importance="token ratio to the sampling policy, advantage recomputed: unbiased at any staleness",
            targets="stale draws",
            cost="12·M bytes per position; variance 1/M",
            use_when="the default, for every schedule; raise m if the gradient is noisy",
        )
    }

    kind: Literal["reverse_kl_mc"] = "reverse_kl_mc"
    """Reverse KL on draws of the student (extra tokens sampled at the same position)."""
    m: int = Field(16, ge=1, le=DRAWS)
    """Number of draws at every position, the emitted token included. Raise it if the gradient is noisy."""
    advantage: Literal["current", "behavior"] = "current"
    """Policy p in log q − log p (teacher q). current: current student. behavior: policy that sampled the token."""
    clip: Epsilon | tuple[Epsilon, Epsilon] | None = None
    """PPO clip ε or [low, high] of p_current / p_behaviour. None does not clip."""
    importance: bool = True
    """Weight draws by p_current / p_behaviour. false is biased on stale draws; use it only for comparison."""
    ratio_cap: float | None = Field(None, gt=0)
    """Upper bound of importance weights; draws whose weight is reduced still have a gradient. None sets no bound."""

    @model_validator(mode="after")
    def _check_trust_region(self) -> ReverseKLMC:
        if self.clip is not None and self.ratio_cap is not None:
            raise ValueError("clip and ratio_cap both bound the ratio: keep one of them")
        if not self.importance and (self.clip is not None or self.ratio_cap is not None):
            raise ValueError("importance = false has no ratio for clip or ratio_cap to bound: drop them")
        if not self.importance and self.advantage == "behavior":
            raise ValueError('importance = false recomputes the advantage: write advantage = "current"')
        return self

    @property
    def asks(self) -> Asks:
        return Asks(
            cache="sampled",
            draws=self.m,
            formula="surrogate.mc_reverse_kl",
            takes=("student", "behavior", "teacher"),
            options=self.model_dump(include={"advantage", "clip", "importance", "ratio_cap"}),
            compares=self.importance,
        )


class DecoupledPPO(DistillationLoss):
    told: ClassVar[Mapping[str, Told]] = {
        "decoupled_ppo": Told(
            minimises="KL(p‖q) on draws, by clipped steps around the student when the batch arrived",
            unit="draw",
            trust_region="PPO clip around the learner when the batch arrived",
            importance="proximal/behaviour ratio, 0 above weight_cap",
            targets="a clip that measures staleness instead of the step",
            cost="as reverse_kl_mc, plus one forward pass for the proximal log-probs",
            use_when="several optimizer steps are made on one stale batch",
        )
    }

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    """PPO on draws of the student; the clip limits the change since the batch arrived, not the staleness."""
    m: int = Field(16, ge=1, le=DRAWS)
    """Number of draws at every position, the emitted token included."""
    advantage: Literal["behavior", "proximal", "current"] = "behavior"
    """Policy p of the advantage log q − log p (q: teacher). behavior: the policy that sampled the token. proximal: the
    student when the batch arrived. current: the current student."""
    clip: Epsilon | tuple[Epsilon, Epsilon] = 0.2
    """PPO clip ε or [low, high] of p_current / p_proximal."""
    weight_cap: float = Field(5.0, gt=0)
    """Upper bound of p_proximal / p_behaviour; draws with a larger ratio are left out."""

    @property
    def asks(self) -> Asks:
        return Asks(
            cache="sampled",
            draws=self.m,
            formula="surrogate.decoupled_ppo",
            takes=("student", "behavior", "proximal", "teacher"),
            options=self.model_dump(include={"advantage", "clip", "weight_cap"}),
            compares=True,
        )


class M2PO(DistillationLoss):
    told: ClassVar[Mapping[str, Told]] = {
        "m2po": Told(
            minimises="KL(p‖q) on draws of the student, without the most extreme ratios ρ",
            unit="draw",
            trust_region="bound on the batch mean of (log ρ)², by masking harmful draws",
            importance="token ratio of the kept draws",
            targets="extreme ratios ρ",
            cost="as reverse_kl_mc, plus one pass over the batch without gradient",
            use_when="data is very stale and a few ratios dominate the gradient",
        )
    }
    scope = "batch"

    kind: Literal["m2po"] = "m2po"
    """Reverse KL on draws of the student, without the draws of extreme importance ratios ρ."""
    m: int = Field(16, ge=1, le=DRAWS)
    """Number of draws at every position, the emitted token included."""
    budget: float = Field(0.04, gt=0)
    """Largest mean of (log ρ)² over the draws of a batch; draws are left out until the mean is below."""

    @property
    def asks(self) -> Asks:
        return Asks(
            cache="sampled",
            draws=self.m,
            formula="surrogate.kept_reverse_kl",
            takes=("student", "behavior", "teacher", "keep"),
            chooses="surrogate.m2po_mask",
            choice={"budget": self.budget},
            compares=True,
        )


class Divergence(DistillationLoss):
    """Losses that compare two distributions, or estimate a divergence between them."""

    loss_max_clamp: float | None = Field(None, gt=0)
    """Bound c: the loss of a position is clamped to ±c, without gradient at the clamp. None sets no bound."""
    log_prob_min_clamp: float | None = Field(None, lt=0)
    """Lower bound of the log-probs of student and teacher, applied before they are compared. None sets no bound."""

    @property
    def clamps(self) -> dict[str, Any]:
        return self.model_dump(include={"loss_max_clamp", "log_prob_min_clamp"})


def _check_k(section: Divergence, cache: Cache, k: int) -> None:
    if cache == "hidden" and k != type(section).model_fields["k"].default:
        raise ValueError(f"k = {k} does nothing: the hidden cache is the whole distribution; drop k, or the cache")


class ReverseKLTopK(Divergence):
    told: ClassVar[Mapping[str, Told]] = {
        "reverse_kl_topk": Told(
            minimises="KL(p‖q) on the student's top-k ids at the time of drawing",
            unit="support",
            importance="reweighted on the support; tokens outside are ignored (reweight = false: none)",
            targets="variance of sampling",
            cost="12·k bytes per position",
            use_when="rollouts are fresh and student_mass is near 1",
        )
    }

    kind: Literal["reverse_kl_topk"] = "reverse_kl_topk"
    """Reverse KL on the top-k ids of the student that sampled the token."""
    k: int = Field(64, ge=1)
    """Number of top-k ids of the student that sampled the token. Raise it if metric student_mass is far below 1."""
    reweight: bool = True
    """Weight ids by the current student. false weights by the policy that sampled the token: biased on stale tokens."""
    tail: bool = False
    """Add one more bucket: the probability mass outside the top-k, for both models. Needs renormalise = false."""
    renormalise: bool = True
    """Scale the probabilities of both models on the top-k to sum to 1."""

    @model_validator(mode="after")
    def _check_completion(self) -> ReverseKLTopK:
        if self.tail and self.renormalise:
            raise ValueError("tail adds the mass outside the top-k, renormalise drops it: write renormalise = false")
        return self

    @property
    def asks(self) -> Asks:
        return Asks(
            cache="student_topk",
            k=self.k,
            formula="divergence.reverse_kl_topk",
            takes=("student", "teacher") if self.reweight else ("student", "teacher", "behavior"),
            options=self.model_dump(include={"tail", "renormalise"}),
            compares=not self.reweight,
            **self.clamps,
        )


class ReverseKL(Divergence):
    told: ClassVar[Mapping[str, Told]] = {
        "reverse_kl": Told(
            minimises="KL(p‖q) over the whole vocabulary",
            unit="vocabulary",
            importance="not needed: exact at every visited prefix",
            targets="support mismatch and variance",
            cost="2·D bytes per position, and the teacher's head at the learner",
            use_when="the teacher's hidden states are available, above all if rollouts are stale",
        )
    }

    kind: Literal["reverse_kl"] = "reverse_kl"
    """Exact reverse KL, from hidden states."""
    cache: Literal["hidden"] = "hidden"
    """Scores from the teacher: the last hidden state, to which the learner applies the teacher's head."""

    @property
    def asks(self) -> Asks:
        return Asks(cache="hidden", formula="divergence.dense", options={"kind": "reverse"}, **self.clamps)


class ForwardKL(Divergence):
    told: ClassVar[Mapping[str, Told]] = {
        "forward_kl": Told(
            minimises="KL(q‖p) on the teacher's top-k ids, or over the whole vocabulary",
            unit="support",
            importance="not needed: weighted by the teacher",
            targets="stale supports; modes of the teacher that the student misses",
            cost="8·k bytes per position",
            use_when="rollouts are very stale, or the teacher is an endpoint with top-k; watch teacher_mass",
        )
    }

    kind: Literal["forward_kl"] = "forward_kl"
    """Forward KL on the teacher's most likely tokens."""
    cache: Literal["teacher_topk", "hidden"] = "teacher_topk"
    """Scores from the teacher: the top-k tokens, or the last hidden state, which is exact."""
    k: int = Field(32, ge=1)
    """Number of ids in the teacher's top-k. Raise it if the metric teacher_mass is far below 1."""
    tail: bool = False
    """Add one more bucket: the probability mass outside the top-k. Equal models then have no gradient."""
    renormalise: bool = False
    """Scale probabilities on the top-k to sum to 1. Equal models then have no gradient. Not allowed with tail."""

    @model_validator(mode="after")
    def _check_completion(self) -> ForwardKL:
        if self.cache == "hidden" and (self.tail or self.renormalise):
            raise ValueError("the hidden cache is the whole distribution: drop tail and renormalise")
        _check_k(self, self.cache, self.k)
        if self.tail and self.renormalise:
            raise ValueError("tail and renormalise exclude each other: keep one of them")
        return self

    @property
    def asks(self) -> Asks:
        if self.cache == "hidden":
            return Asks(cache="hidden", formula="divergence.dense", options={"kind": "forward"}, **self.clamps)
        options = self.model_dump(include={"tail", "renormalise"})
        return Asks(
            cache="teacher_topk", k=self.k, formula="divergence.forward_kl_topk", options=options, **self.clamps
        )


class JSD(Divergence):
    told: ClassVar[Mapping[str, Told]] = {
        "jsd": Told(
            minimises="β·KL(q‖m) + (1−β)·KL(p‖m) with m = βq + (1−β)p",
            unit="vocabulary, or support and tail",
            importance="not needed",
            targets="forward KL is too broad, reverse KL too narrow",
            cost="as reverse_kl, or forward_kl",
            use_when="student and teacher differ so much that one direction alone is unstable",
        )
    }

    kind: Literal["jsd"] = "jsd"
    """Generalised Jensen-Shannon divergence, between forward and reverse KL."""
    cache: Literal["hidden", "teacher_topk"] = "hidden"
    """Scores from the teacher: the last hidden state, which is exact, or the top-k tokens with one bucket for the mass
    of all other tokens."""
    k: int = Field(32, ge=1)
    """Number of ids in the teacher's top-k. Raise it if the metric teacher_mass is far below 1."""
    beta: float = Field(0.5, ge=0, le=1)
    """Interpolation between the two KL directions: 0 is forward KL, 1 is reverse KL."""

    @model_validator(mode="after")
    def _check_k_is_used(self) -> JSD:
        _check_k(self, self.cache, self.k)
        return self

    @property
    def asks(self) -> Asks:
        options = {"beta": self.beta}
        if self.cache == "hidden":
            return Asks(cache="hidden", formula="divergence.dense", options=options | {"kind": "jsd"}, **self.clamps)
        return Asks(cache="teacher_topk", k=self.k, formula="divergence.jsd_topk", options=options, **self.clamps)


def describe_estimate(minimises: str, *, importance: str, targets: str, use_when: str) -> Told:
    return Told(
        minimises=minimises,
        unit="emitted token",
        trust_region='none; PPO clip as = "reward"',
        importance=importance,
        targets=targets,
        cost="8 bytes per position",
        use_when=use_when,
    )


class KLEstimate(Divergence):
    told: ClassVar[Mapping[str, Told]] = {
        "k1": describe_estimate(
            "log p − log q of the emitted token, as a reward",
            importance="as a reward: token ratio; as a loss: no gradient",
            targets="none: the simplest reward",
            use_when='only with as = "reward": as a loss, its mean gradient is 0',
        ),
        "abs": describe_estimate(
            "|log p − log q| of the emitted token",
            importance="none; as a reward: token ratio",
            targets="single tokens with huge gaps",
            use_when="for comparison only: the gradient is that of no divergence",
        ),
        "k2": describe_estimate(
            "½ (log p − log q)² of the emitted token",
            importance="none: unbiased gradient only on-policy; as a reward: token ratio",
            targets="the missing gradient of k1",
            use_when="a loss with one draw, on-policy; the logged value is not the KL",
        ),
        "k3": describe_estimate(
            "q/p − 1 − log(q/p) of the emitted token",
            importance="none; as a reward: token ratio",
            targets="the variance of k1 as an estimate",
            use_when="to report a KL; as a loss it minimises the forward KL",
        ),
        "k1+": describe_estimate(
            "value of k1, gradient of k2",
            importance="none: unbiased only on-policy; as a reward: token ratio",
            targets="k2's biased value",
            use_when="as k2, if the logged loss should be the KL",
        ),
        "k3+": describe_estimate(
            "value of k3, gradient of k2",
            importance="none: unbiased only on-policy; as a reward: token ratio",
            targets="k2's biased value and k1's variance",
            use_when="as k1+, with a less noisy logged value",
        ),
    }

    kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k2"
    """Estimate of the reverse KL from the emitted token alone, as a loss or as a reward."""
    as_: Literal["loss", "reward"] = Field("loss", alias="as")
    """Use of the estimate. loss: differentiate it. reward: use it as the negative advantage of a clipped policy
    gradient (the only use of k1)."""
    clip: Epsilon | tuple[Epsilon, Epsilon] | None = None
    """PPO clip ε or [low, high] of p_current / p_behaviour, with as = "reward". None is 0.2."""
    dual_clip: float | None = Field(None, gt=1)
    """Largest ratio that counts for a token with a negative advantage, with as = "reward". None is 3."""

    @model_validator(mode="after")
    def _check_gradient(self) -> KLEstimate:
        if self.as_ == "reward":
            return self
        if self.kind == "k1":
            raise ValueError(
                'kind = "k1" as a loss has no teacher in its gradient: write as = "reward", or kind = "k1+"'
            )
        for name in ("clip", "dual_clip"):
            if getattr(self, name) is not None:
                raise ValueError(f'{name} is for as = "reward": drop one of them')
        return self

    @property
    def asks(self) -> Asks:
        if self.as_ == "loss":
            return Asks(cache="sampled", formula="divergence.kl_estimate", options={"kind": self.kind}, **self.clamps)
        trust = {"clip": 0.2 if self.clip is None else self.clip, "dual_clip": self.dual_clip or 3.0}
        return Asks(
            cache="sampled",
            formula="kl.kl_as_reward",
            takes=("student", "behavior", "teacher"),
            options={"kind": self.kind, **trust, **self.clamps},  # clamps of the estimate, not of the ratio
            compares=True,
        )


LossConfig = Annotated[
    ReverseKLMC | DecoupledPPO | M2PO | ReverseKLTopK | ReverseKL | ForwardKL | JSD | KLEstimate,
    Field(discriminator="kind"),
]
LOSSES: dict[str, type[DistillationLoss]] = {
    kind: row for row in get_args(get_args(LossConfig)[0]) for kind in row.told
}


def caches(row: type[DistillationLoss]) -> tuple[Cache, ...]:
    """Return the caches (kinds of teacher scores) that a loss can choose from; empty if there is no choice."""
    offered = row.model_fields.get("cache")
    return get_args(offered.annotation) if offered else ()


ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "forward_kl_topk": "forward_kl"}
"""Names that verl uses for losses, and the names of the same losses here."""
