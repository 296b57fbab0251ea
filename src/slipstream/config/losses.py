"""Table of distillation losses. Each row (class) is a section of the config and contains all that other code needs.

The fields of a row are the loss options, with their bounds. Property `spec` describes what samplers, scorers,
endpoints, learner and objective must provide. `scope` is for schedules. Other code does not depend on `kind`. A new
loss needs a row here and in `LossConfig` or `SupervisedLoss`, a formula in estimators/, and a description in its
tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from slipstream.config.base import DRAWS, Epsilon, Section, Temperature
from slipstream.errors import did_you_mean
from slipstream.estimators.options import signature
from slipstream.scope import Scope

Cache = Literal["none", "sampled", "student_topk", "teacher_topk", "hidden"]
"""Kind of teacher scores: log-probs of draws (tokens sampled at a position, the emitted one included), of the student's
or the teacher's top-k ids; or the teacher's last hidden state. none: the loss needs no scores."""
Operand = Literal["student", "behavior", "proximal", "teacher", "reference", "keep"]
"""Inputs of a loss formula: log-probs under the current student, the policy that sampled the tokens, the student when
the batch arrived, the teacher, and the student at the start of the run (reference). `keep` is the mask of draws that
are selected over the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
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
    own_vocabulary: bool = False
    """True if the formula compares distributions over two vocabularies, so that the teacher's tokenizer may differ."""
    merges: bool = False
    """True if spans of several tokens are compared, too: the later tokens of a span multiply the distributions at its
    first token by their own probabilities."""
    compares: bool = False
    """True if the loss uses probabilities of the policy that sampled the tokens."""
    loss_max_clamp: float | None = None
    log_prob_min_clamp: float | None = None


class DistillationLoss(Section):
    scope: ClassVar[Scope] = "token"

    kind: str
    weight: float = Field(1.0, ge=0)
    """Weight of the distillation loss in the total loss; 0 uses no distillation and no teacher."""
    temperature: Temperature = 1.0
    """Temperature applied to the distributions of student and teacher in the distillation loss."""
    tokens: Literal["all", "first", "last", "iw_opd", "tcod_f2b", "tcod_b2f", "turn_opd"] = "all"
    """Weights of tokens by their position in a response, with mean 1. all: equal. `slipstream estimators` explains the
    other names."""
    token_options: dict[str, float] = Field({})
    """Options of `tokens`, for example { share = 0.3 }. Empty uses its defaults."""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        known = signature(f"token_weights.{self.tokens}").settings if self.tokens != "all" else ()
        for name, value in self.token_options.items():
            if name not in known:
                hint = f"; {did_you_mean(name, known)}" if known else ""
                raise ValueError(f'token_options: tokens = "{self.tokens}" has no option {name}{hint}')
            if value <= 0:
                raise ValueError(f"token_options.{name} = {value:g} must be above 0")
        if self.tokens == "iw_opd" and self.spec.cache == "none":
            raise ValueError('tokens = "iw_opd" compares with a teacher, and this loss needs none: write "first"')
        return self

    @property
    def spec(self) -> LossSpec:
        raise NotImplementedError


class ReverseKLMC(DistillationLoss):
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
    baseline: bool = False
    """Subtract from each draw's advantage the mean advantage of the other draws at its position. The expected gradient
    stays. It has less noise far from the teacher, and can have more near it."""
    reward_scale: float = Field(1.0, gt=0)
    """Factor λ of the teacher's log-ratio to the reference, the student at the start of the run. Above 1 extrapolates
    beyond the teacher (ExOPD, for example 1.25), below 1 stays closer to the start. 1 is the plain reverse KL."""

    @model_validator(mode="after")
    def _check_trust_region(self) -> Self:
        if self.clip is not None and self.ratio_cap is not None:
            raise ValueError("clip and ratio_cap both bound the ratio: keep one of them")
        if not self.importance and (self.clip is not None or self.ratio_cap is not None):
            raise ValueError("importance = false has no ratio for clip or ratio_cap to bound: drop them")
        if not self.importance and self.advantage == "behavior":
            raise ValueError('importance = false recomputes the advantage: write advantage = "current"')
        if self.baseline and self.m < 2:
            raise ValueError(
                "baseline needs other draws at each position, and m = 1 has none: write m = 16, or drop it"
            )
        if self.baseline and self.clip is not None:
            raise ValueError(
                "baseline changes which draws clip bounds: write ratio_cap instead of clip, or drop baseline"
            )
        return self

    @property
    def spec(self) -> LossSpec:
        return LossSpec(
            cache="sampled",
            draws=self.m,
            formula="surrogate.mc_reverse_kl",
            takes=("student", "behavior", "teacher", *(("reference",) if self.reward_scale != 1 else ())),
            options=self.model_dump(
                include={"advantage", "clip", "importance", "ratio_cap", "baseline", "reward_scale"}
            ),
            compares=self.importance,
        )


class DecoupledPPO(DistillationLoss):
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
    def spec(self) -> LossSpec:
        return LossSpec(
            cache="sampled",
            draws=self.m,
            formula="surrogate.decoupled_ppo",
            takes=("student", "behavior", "proximal", "teacher"),
            options=self.model_dump(include={"advantage", "clip", "weight_cap"}),
            compares=True,
        )


class M2PO(DistillationLoss):
    scope = "batch"

    kind: Literal["m2po"] = "m2po"
    """Reverse KL on draws of the student, without the draws of extreme importance ratios ρ."""
    m: int = Field(16, ge=1, le=DRAWS)
    """Number of draws at every position, the emitted token included."""
    budget: float = Field(0.04, gt=0)
    """Largest mean of (log ρ)² over the draws of a batch; draws are left out until the mean is below."""

    @property
    def spec(self) -> LossSpec:
        return LossSpec(
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

    @model_validator(mode="after")
    def _check_k(self) -> Self:
        k = getattr(self, "k", None)
        if self.spec.cache == "hidden" and "k" not in self.spec.options and k is not None and self.changed("k"):
            raise ValueError(f"k = {k} does nothing: the hidden cache is the whole distribution; drop k, or the cache")
        return self


class ReverseKLTopK(Divergence):
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
    detach_mass: bool = False
    """Leave out the gradient of the student's mass on the top-k, which lowers this mass even where both models agree.
    Needs renormalise = false, tail = false and reweight = true."""

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.tail and self.renormalise:
            raise ValueError("tail adds the mass outside the top-k, renormalise drops it: write renormalise = false")
        if self.detach_mass and (self.renormalise or self.tail):
            given = "renormalise = true" if self.renormalise else "tail = true"
            raise ValueError(f"detach_mass changes nothing where the masses sum to 1, as {given} makes them: drop one")
        if self.detach_mass and not self.reweight:
            raise ValueError("reweight = false has no gradient of the mass: drop detach_mass")
        return self

    @property
    def spec(self) -> LossSpec:
        return LossSpec(
            cache="student_topk",
            k=self.k,
            formula="divergence.reverse_kl_topk",
            takes=("student", "teacher") if self.reweight else ("student", "teacher", "behavior"),
            options=self.model_dump(include={"tail", "renormalise", "detach_mass"}),
            compares=not self.reweight,
            **self.clamps,
        )


class ReverseKL(Divergence):
    kind: Literal["reverse_kl"] = "reverse_kl"
    """Exact reverse KL, from hidden states."""
    cache: Literal["hidden"] = "hidden"
    """Scores from the teacher: the last hidden state, to which the learner applies the teacher's head."""

    @property
    def spec(self) -> LossSpec:
        return LossSpec(cache="hidden", formula="divergence.dense", options={"kind": "reverse"}, **self.clamps)


class ForwardKL(Divergence):
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
    def _check_completion(self) -> Self:
        if self.cache == "hidden" and (self.tail or self.renormalise):
            raise ValueError("the hidden cache is the whole distribution: drop tail and renormalise")
        if self.tail and self.renormalise:
            raise ValueError("tail and renormalise exclude each other: keep one of them")
        return self

    @property
    def spec(self) -> LossSpec:
        if self.cache == "hidden":
            return LossSpec(cache="hidden", formula="divergence.dense", options={"kind": "forward"}, **self.clamps)
        options = self.model_dump(include={"tail", "renormalise"})
        return LossSpec(
            cache="teacher_topk", k=self.k, formula="divergence.forward_kl_topk", options=options, **self.clamps
        )


class MOPD(Divergence):
    kind: Literal["mopd"] = "mopd"
    """Generalised reverse KL on the teacher's most likely tokens, without scaling to a sum of 1."""
    k: int = Field(32, ge=1)
    """Number of ids in the teacher's top-k. Raise it if the metric teacher_mass is far below 1."""

    @property
    def spec(self) -> LossSpec:
        return LossSpec(cache="teacher_topk", k=self.k, formula="divergence.generalised_kl_topk", **self.clamps)


class EOPD(Divergence):
    kind: Literal["eopd"] = "eopd"
    """Reverse KL, plus forward KL at positions where the teacher's entropy is high."""
    cache: Literal["hidden", "teacher_topk"] = "hidden"
    """Scores from the teacher: the last hidden state, which is exact, or the top-k tokens with one bucket for the mass
    of all other tokens."""
    k: int = Field(32, ge=1)
    """Number of ids in the teacher's top-k. Raise it if the metric teacher_mass is far below 1."""
    threshold: float = Field(0.8, ge=0)
    """Entropy of the teacher, in nats, above which forward KL is added. Metric distill/unsure is the share of such
    positions. 0 adds it everywhere."""
    forward: float = Field(1.0, gt=0)
    """Weight of the forward KL."""

    @property
    def spec(self) -> LossSpec:
        topk = self.cache == "teacher_topk"
        return LossSpec(
            cache=self.cache,
            k=self.k if topk else 0,
            formula="divergence.entropy_gated",
            options={"threshold": self.threshold, "forward": self.forward, "tail": topk},
            **self.clamps,
        )


class JSD(Divergence):
    kind: Literal["jsd"] = "jsd"
    """Generalised Jensen-Shannon divergence, between forward and reverse KL."""
    cache: Literal["hidden", "teacher_topk"] = "hidden"
    """Scores from the teacher: the last hidden state, which is exact, or the top-k tokens with one bucket for the mass
    of all other tokens."""
    k: int = Field(32, ge=1)
    """Number of ids in the teacher's top-k. Raise it if the metric teacher_mass is far below 1."""
    beta: float = Field(0.5, ge=0, le=1)
    """Interpolation between the two KL directions: 0 is forward KL, 1 is reverse KL."""

    @property
    def spec(self) -> LossSpec:
        options = {"beta": self.beta}
        if self.cache == "hidden":
            return LossSpec(
                cache="hidden", formula="divergence.dense", options=options | {"kind": "jsd"}, **self.clamps
            )
        return LossSpec(cache="teacher_topk", k=self.k, formula="divergence.jsd_topk", options=options, **self.clamps)


class ULD(Divergence):
    kind: Literal["uld"] = "uld"
    """Distance of the sorted probabilities of student and teacher, for a teacher with another tokenizer."""
    cache: Literal["hidden"] = "hidden"
    """Scores from the teacher: the last hidden state, to which the learner applies the teacher's head."""

    @property
    def spec(self) -> LossSpec:
        return LossSpec(cache="hidden", formula="divergence.ranked", own_vocabulary=True, **self.clamps)


class GOLD(Divergence):
    kind: Literal["gold"] = "gold"
    """JSD on the tokens that student and teacher share, and the distance of the sorted probabilities of all others."""
    cache: Literal["hidden"] = "hidden"
    """Scores from the teacher: the last hidden state, to which the learner applies the teacher's head."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Interpolation of the JSD between forward KL (towards 0) and reverse KL (towards 1)."""
    rest: float = Field(1.0, ge=0)
    """Weight of the distance by rank of the tokens that are not shared."""

    @property
    def spec(self) -> LossSpec:
        return LossSpec(
            cache="hidden",
            formula="divergence.shared_and_ranked",
            options={"beta": self.beta, "rest": self.rest},
            own_vocabulary=True,
            merges=isinstance(self, GOLDMerged),
            compares=isinstance(self, GOLDMerged),
            **self.clamps,
        )


class GOLDMerged(GOLD):
    kind: Literal["gold_merged"] = "gold_merged"  # type: ignore[assignment]
    """gold, also at spans of several tokens, by the product of their probabilities."""


class CommonTopK(Divergence):
    kind: Literal["common_topk"] = "common_topk"
    """KL on the teacher's most likely tokens that the student has, too, with one bucket for all others."""
    cache: Literal["hidden", "teacher_topk"] = "hidden"
    """Scores from the teacher: the last hidden state, which gives its k most likely shared tokens, or its top-k tokens,
    of which those that the student lacks go to the bucket."""
    k: int = Field(32, ge=1)
    """Number of tokens that are compared one by one; with the top-k cache fewer if the student lacks some of them."""
    beta: float = Field(0.0, ge=0, le=1)
    """Interpolation by a JSD between the two KL directions: 0 is forward KL, 1 is reverse KL."""

    @property
    def spec(self) -> LossSpec:
        return LossSpec(
            cache=self.cache,
            k=self.k if self.cache == "teacher_topk" else 0,
            formula="divergence.common_topk",
            options={"k": self.k, "beta": self.beta},
            own_vocabulary=True,
            **self.clamps,
        )


class KLEstimate(Divergence):
    kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k2"
    """Estimate of the reverse KL from the emitted token alone, as a loss or as an advantage."""
    use: Literal["loss", "advantage"] = "loss"
    """Use of the estimate. loss: differentiate it. advantage: use its negative as the advantage of a clipped policy
    gradient (the only use of k1)."""
    policy: Literal["vanilla", "cispo", "sapo", "dppo_tv", "dppo_kl", "aspo"] = "vanilla"
    """Policy loss that uses the estimate, with use = "advantage": PPO's clip or another one that looks at single
    tokens."""
    clip: Epsilon | tuple[Epsilon, Epsilon] | None = None
    """Clip ε or [low, high] of p_current / p_behaviour, with use = "advantage"; of the change of probability or the KL
    for dppo. None is 0.2."""
    dual_clip: float | None = Field(None, gt=1)
    """Largest ratio that counts for a token with a negative advantage, for vanilla and aspo. None is 3."""

    @model_validator(mode="after")
    def _check_gradient(self) -> Self:
        if self.use == "advantage":
            if self.clip is not None and self.policy == "sapo":
                raise ValueError('policy = "sapo" has no clip: drop clip')
            if self.dual_clip is not None and self.policy not in ("vanilla", "aspo"):
                raise ValueError(f'policy = "{self.policy}" has no dual clip: drop dual_clip')
            return self
        if self.policy != "vanilla":
            raise ValueError('policy is for use = "advantage": write that, or drop policy')
        if self.kind == "k1":
            raise ValueError(
                'kind = "k1" as a loss has no teacher in its gradient: write use = "advantage", or kind = "k1+"'
            )
        for name in ("clip", "dual_clip"):
            if getattr(self, name) is not None:
                raise ValueError(f'{name} is for use = "advantage": drop one of them')
        return self

    @property
    def spec(self) -> LossSpec:
        if self.use == "loss":
            return LossSpec(
                cache="sampled", formula="divergence.kl_estimate", options={"kind": self.kind}, **self.clamps
            )
        trust = {"clip": 0.2 if self.clip is None else self.clip, "dual_clip": self.dual_clip or 3.0}
        return LossSpec(
            cache="sampled",
            formula="surrogate.kl_as_reward",
            takes=("student", "behavior", "teacher"),
            options={
                "kind": self.kind,
                "policy": self.policy,
                **trust,
                **self.clamps,
            },  # clamps of the estimate, not of the ratio
            compares=True,
        )


class CrossEntropy(DistillationLoss):
    kind: Literal["cross_entropy"] = "cross_entropy"
    """Negative log-likelihood of the tokens, without a teacher."""

    @property
    def spec(self) -> LossSpec:
        return LossSpec(cache="none", formula="divergence.cross_entropy", takes=("student",))


OnDraws = ReverseKLMC | DecoupledPPO | M2PO | KLEstimate
LossConfig = Annotated[
    OnDraws | ReverseKLTopK | ReverseKL | ForwardKL | MOPD | EOPD | JSD | ULD | GOLD | GOLDMerged | CommonTopK,
    Field(discriminator="kind"),
]
SupervisedLoss = Annotated[
    CrossEntropy | ForwardKL | ReverseKL | JSD | ULD | GOLD | CommonTopK, Field(discriminator="kind")
]
"""Losses that need no draws of the student. Cross-entropy on its own rollouts would only confirm what it drew."""
DISTILLATION_LOSSES: dict[str, type[DistillationLoss]] = {
    kind: row for row in (*get_args(get_args(LossConfig)[0]), CrossEntropy) for kind in row.kinds()
}


def caches(row: type[DistillationLoss]) -> tuple[Cache, ...]:
    """Return the caches (kinds of teacher scores) that a loss can choose from; empty if there is no choice."""
    offered = row.model_fields.get("cache")
    return get_args(offered.annotation) if offered else ()


def without_hidden_states(loss: DistillationLoss, name: str = "loss") -> str:
    """Return what to write for a loss like this one that caches no hidden states; `name` is its section."""
    if "teacher_topk" in caches(type(loss)):
        return f'{name}.cache = "teacher_topk"'
    supervised = "cross_entropy" if loss.spec.own_vocabulary else "forward_kl"
    return f'{name}.kind = "{"reverse_kl_mc" if name == "loss" else supervised}"'


ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "forward_kl_topk": "forward_kl"}
"""Names that verl uses for losses, and the names of the same losses here."""
