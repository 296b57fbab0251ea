"""The table of distillation losses: a row is a section of the config, and all that anybody needs to know of a loss.

Its fields are the options, with their bounds. What it `asks` is read by samplers (how many draws), scorers and
endpoints (which cache), the learner (which passes; chosen ids of the head, or the whole vocabulary) and the objective
(which formula); its `scope` by the schedules; what is `told` of it by the page of estimators. Nobody asks which kind it
is. To add one: a row here, with its place in `LossConfig`, and its formula in estimators/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from slipstream.config.base import DRAWS, Epsilon, Section, Temperature
from slipstream.scope import Scope

Cache = Literal["sampled", "student_topk", "teacher_topk", "hidden"]
"""What a teacher's answer holds: its log-probs of the draws, of the student's best ids, of its own best, or its last
hidden state."""
Operand = Literal["student", "behavior", "proximal", "teacher", "keep"]
"""Log-probs of the student as it is, of what drew, of the student as the batch came, of the teacher; and what a choice
made over the whole batch keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What a loss asks of everybody else."""

    cache: Cache
    draws: int = 1
    """Draws of the student at every position, the emitted token among them."""
    k: int = 0
    """Ids at every position, where the cache holds the best of somebody."""
    formula: str
    """module.function, under slipstream.estimators: operands and options in, a loss per position out."""
    takes: tuple[Operand, ...] = ("student", "teacher")
    """The operands, in the order of the formula."""
    options: Mapping[str, Any] = field(default_factory=dict)
    chooses: str = ""
    """Formula of the choice that is made over a whole batch first, and its options."""
    choice: Mapping[str, Any] = field(default_factory=dict)
    compares: bool = False
    """It looks at probabilities of the policy that drew the tokens."""
    loss_max_clamp: float | None = None
    log_prob_min_clamp: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What to know of a loss before choosing it."""

    minimises: str
    unit: str
    trust_region: str = "none"
    importance: str
    """How draws of an older student count."""
    targets: str
    """The failure it is made for."""
    cost: str
    use_when: str


class DistillationLoss(Section):
    told: ClassVar[Mapping[str, Told]]
    """By kind."""
    scope: ClassVar[Scope] = "token"

    weight: float = Field(1.0, ge=0)
    """How much distillation counts beside a policy loss; 0 leaves it out, and with it the teacher."""
    temperature: Temperature = 1.0
    """Temperature of student and teacher in the loss."""

    @property
    def asks(self) -> Asks:
        raise NotImplementedError


class ReverseKLMC(DistillationLoss):
    told: ClassVar[Mapping[str, Told]] = {
        "reverse_kl_mc": Told(
            minimises="KL(p‖q) on draws of the student, weighted to the student as it is",
            unit="draw",
            trust_region="none; clip or ratio_cap on request",
            importance="token ratio to the policy that drew, advantage recomputed: unbiased however stale",
            targets="stale draws",
            cost="12·M bytes per position; variance 1/M",
            use_when="the default, synchronous or not; raise m when the gradient is noisy",
        )
    }

    kind: Literal["reverse_kl_mc"] = "reverse_kl_mc"
    """Reverse KL on draws of the student."""
    m: int = Field(16, ge=1, le=DRAWS)
    """Draws at every position, the emitted token among them."""
    advantage: Literal["current", "behavior"] = "current"
    """Recompute log q − log p under the current student, or keep that of the policy that drew the token."""
    clip: Epsilon | tuple[Epsilon, Epsilon] | None = None
    """PPO clip ε or [low, high]; none by default."""
    importance: bool = True
    """Weight draws by p_current / p_behaviour; off only to see what that costs."""
    ratio_cap: float | None = Field(None, gt=0)
    """Truncate importance weights at this value; capped draws keep a gradient."""

    @model_validator(mode="after")
    def _one_trust_region(self) -> ReverseKLMC:
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
            minimises="KL(p‖q) on draws of the student, one clipped step around the student as the batch came",
            unit="draw",
            trust_region="PPO clip around the learner at arrival of the batch",
            importance="proximal/behaviour ratio, 0 above weight_cap",
            targets="a clip that measures staleness instead of the step",
            cost="as reverse_kl_mc, and one forward pass for the proximal log-probs",
            use_when="several optimizer steps are made on one stale batch",
        )
    }

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    """PPO on draws of the student, around the student as the batch came."""
    m: int = Field(16, ge=1, le=DRAWS)
    """Draws at every position, the emitted token among them."""
    advantage: Literal["behavior", "proximal", "current"] = "behavior"
    """Whose log-prob is taken from the teacher's: that of what drew, of the student as the batch came, or as it is."""
    clip: Epsilon | tuple[Epsilon, Epsilon] = 0.2
    """PPO clip ε or [low, high] of p_current / p_proximal."""
    weight_cap: float = Field(5.0, gt=0)
    """Draws whose p_proximal / p_behaviour exceeds this are left out."""

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
            minimises="KL(p‖q) on those draws of the student that keep its ratios together",
            unit="draw",
            trust_region="mean (log ρ)² over the batch within a budget, by masking harmful draws",
            importance="token ratio of the draws that stay",
            targets="heavy tails of ρ",
            cost="as reverse_kl_mc, and one no-grad pass over the batch before its first part",
            use_when="data is very stale and a few ratios dominate the gradient",
        )
    }
    scope = "batch"

    kind: Literal["m2po"] = "m2po"
    """Reverse KL on draws of the student, without those whose ratios are extreme."""
    m: int = Field(16, ge=1, le=DRAWS)
    """Draws at every position, the emitted token among them."""
    budget: float = Field(0.04, gt=0)
    """Largest mean of (log ρ)² over the draws of a batch that stay."""

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
    """Rows that compare two distributions, or estimate what lies between them."""

    loss_max_clamp: float | None = Field(None, gt=0)
    """Bound the loss of a position by ± this; no gradient beyond."""
    log_prob_min_clamp: float | None = Field(None, lt=0)
    """Raise log-probs of student and teacher to at least this, before they are compared."""

    @property
    def clamps(self) -> dict[str, Any]:
        return self.model_dump(include={"loss_max_clamp", "log_prob_min_clamp"})


def _check_k(section: Divergence, cache: Cache, k: int) -> None:
    if cache == "hidden" and k != type(section).model_fields["k"].default:
        raise ValueError(f"k = {k} does nothing: the hidden cache is the whole distribution; drop it, or the cache")


class ReverseKLTopK(Divergence):
    told: ClassVar[Mapping[str, Told]] = {
        "reverse_kl_topk": Told(
            minimises="KL(p‖q) on the ids that the student found likeliest when it drew",
            unit="support",
            importance="current weights on the support; tokens outside it stay unseen (reweight = false: none)",
            targets="variance of sampling",
            cost="12·k bytes per position",
            use_when="rollouts are fresh and the student is peaked: watch student_mass",
        )
    }

    kind: Literal["reverse_kl_topk"] = "reverse_kl_topk"
    """Reverse KL on the student's own top-k."""
    k: int = Field(64, ge=1)
    """Size of the student's top-k, as it was when it drew."""
    reweight: bool = True
    """Weigh the ids by the student as it is; by the policy that drew without it, which is biased when stale."""
    tail: bool = False
    """Add the remaining mass of both models as one more bucket; needs renormalise = false."""
    renormalise: bool = True
    """Renormalise both models on the top-k."""

    @model_validator(mode="after")
    def _one_completion(self) -> ReverseKLTopK:
        if self.tail and self.renormalise:
            raise ValueError("tail completes the support and renormalise cuts it off: write renormalise = false, too")
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
            use_when="the teacher's hidden states can be had: above all when rollouts are stale",
        )
    }

    kind: Literal["reverse_kl"] = "reverse_kl"
    """Exact reverse KL, from hidden states."""
    cache: Literal["hidden"] = "hidden"
    """What the teacher sends: its last hidden state; the learner applies the teacher's head."""

    @property
    def asks(self) -> Asks:
        return Asks(cache="hidden", formula="divergence.dense", options={"kind": "reverse"}, **self.clamps)


class ForwardKL(Divergence):
    told: ClassVar[Mapping[str, Told]] = {
        "forward_kl": Told(
            minimises="KL(q‖p) on the ids that the teacher finds likeliest, or over the whole vocabulary",
            unit="support",
            importance="not needed: weighted by the teacher",
            targets="stale supports; modes that the student misses",
            cost="8·k bytes per position",
            use_when="rollouts are very stale, or the teacher is an endpoint that returns top-k: watch teacher_mass",
        )
    }

    kind: Literal["forward_kl"] = "forward_kl"
    """Forward KL on what the teacher finds likely."""
    cache: Literal["teacher_topk", "hidden"] = "teacher_topk"
    """What the teacher sends: its k best tokens, or its last hidden state, which is exact."""
    k: int = Field(32, ge=1)
    """Size of the teacher's top-k."""
    tail: bool = False
    """Add the remaining mass of both models as one more bucket."""
    renormalise: bool = False
    """Renormalise both models on the top-k."""

    @model_validator(mode="after")
    def _one_completion(self) -> ForwardKL:
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
            targets="forward KL too broad, reverse KL too narrow",
            cost="as reverse_kl, or forward_kl",
            use_when="student and teacher differ so much that one direction alone misbehaves",
        )
    }

    kind: Literal["jsd"] = "jsd"
    """Between forward and reverse KL."""
    cache: Literal["hidden", "teacher_topk"] = "hidden"
    """What the teacher sends: its last hidden state, which is exact, or its k best tokens; the rest is one bucket."""
    k: int = Field(32, ge=1)
    """Size of the teacher's top-k."""
    beta: float = Field(0.5, ge=0, le=1)
    """0 is forward KL, 1 reverse KL."""

    @model_validator(mode="after")
    def _a_k_with_an_effect(self) -> JSD:
        _check_k(self, self.cache, self.k)
        return self

    @property
    def asks(self) -> Asks:
        options = {"beta": self.beta}
        if self.cache == "hidden":
            return Asks(cache="hidden", formula="divergence.dense", options=options | {"kind": "jsd"}, **self.clamps)
        return Asks(cache="teacher_topk", k=self.k, formula="divergence.jsd_topk", options=options, **self.clamps)


def on_the_emitted(minimises: str, *, importance: str, targets: str, use_when: str) -> Told:
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
        "k1": on_the_emitted(
            "log p − log q of the emitted token, as a reward",
            importance="as a reward: token ratio; as a loss it has no gradient",
            targets="no loss: as a reward, the simplest signal",
            use_when='with as = "reward"; as a loss its mean gradient is zero, and it is refused',
        ),
        "abs": on_the_emitted(
            "|log p − log q| of the emitted token",
            importance="none; as a reward: token ratio",
            targets="single tokens with huge gaps",
            use_when="for comparison: the gradient is the sign of the gap, and of no divergence",
        ),
        "k2": on_the_emitted(
            "½ (log p − log q)² of the emitted token",
            importance="none: unbiased gradient only on-policy; as a reward: token ratio",
            targets="the missing gradient of k1",
            use_when="one draw, on-policy, as a loss; its value is not the KL",
        ),
        "k3": on_the_emitted(
            "q/p − 1 − log(q/p) of the emitted token",
            importance="none; as a reward: token ratio",
            targets="the variance of k1 as an estimate",
            use_when="to report a KL; as a loss it follows the forward KL",
        ),
        "k1+": on_the_emitted(
            "the value of k1 by the gradient of k2",
            importance="none: unbiased only on-policy; as a reward: token ratio",
            targets="k2's biased value",
            use_when="one draw, on-policy, when the logged loss should be the KL",
        ),
        "k3+": on_the_emitted(
            "the value of k3 by the gradient of k2",
            importance="none: unbiased only on-policy; as a reward: token ratio",
            targets="k2's biased value and k1's variance",
            use_when="as k1+, with a quieter value",
        ),
    }

    kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k2"
    """An estimate of the KL on the emitted token alone, as a loss or as a reward."""
    as_: Literal["loss", "reward"] = Field("loss", alias="as")
    """Differentiate it, or take it as the (negative) advantage of a clipped policy gradient; k1 only as a reward."""
    clip: Epsilon | tuple[Epsilon, Epsilon] | None = None
    """As a reward: PPO clip ε or [low, high] of p_current / p_behaviour; 0.2 without it."""
    dual_clip: float | None = Field(None, gt=1)
    """As a reward: most that a bad token counts, whatever its ratio; 3 without it."""

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KLEstimate:
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
            options={"kind": self.kind, **trust, **self.clamps},  # of the KL, and not of the ratio
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
    """Those that its config may choose from; none where there is nothing to choose."""
    offered = row.model_fields.get("cache")
    return get_args(offered.annotation) if offered else ()


ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "forward_kl_topk": "forward_kl"}
"""verl's names."""
