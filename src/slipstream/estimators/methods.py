"""What every distillation method is and is for, as data: the source of the documentation's table and of scope checks.

Imports nothing, so that a configuration can be checked without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["token", "row", "batch"]
Cache = Literal["sampled", "student_topk", "teacher_topk", "hidden", "dense"]


@dataclass(frozen=True, kw_only=True)
class Method:
    function: str
    """module.name, under slipstream.estimators."""
    scope: Scope
    """What the loss of one token may depend on besides that token; invariant 5 of docs/design.md."""
    caches: tuple[Cache, ...]
    """What the teacher may have scored (config `teacher.cache`)."""
    unit: str
    trust_region: str
    importance: str
    """How draws of an older student are accounted for."""
    targets: str
    """The failure it is made for."""
    cost: str
    use_when: str


WHOLE: tuple[Cache, ...] = ("hidden", "dense")


def _on_the_emitted(*, importance: str, targets: str, use_when: str) -> Method:
    return Method(
        function="divergence.kl_estimate",
        scope="token",
        caches=("sampled",),
        unit="emitted token",
        trust_region="none",
        importance=importance,
        targets=targets,
        cost="8 bytes per position",
        use_when=use_when,
    )


DISTILLATION: dict[str, Method] = {
    "reverse_kl_mc": Method(
        function="surrogate.mc_reverse_kl",
        scope="token",
        caches=("sampled",),
        unit="draw",
        trust_region="none; clip or ratio_cap on request",
        importance="token ratio to the policy that drew, advantage recomputed: unbiased however stale",
        targets="stale draws",
        cost="12·M bytes per position; variance 1/M",
        use_when="the default, synchronous or not; raise m when the gradient is noisy",
    ),
    "decoupled_ppo": Method(
        function="surrogate.decoupled_ppo",
        scope="token",
        caches=("sampled",),
        unit="draw",
        trust_region="PPO clip around the learner at arrival of the batch",
        importance="proximal/behaviour ratio, 0 above weight_cap",
        targets="a clip that measures staleness instead of the step",
        cost="as reverse_kl_mc, and one forward pass for the proximal log-probs",
        use_when="several optimizer steps are made on one stale batch",
    ),
    "m2po": Method(
        function="surrogate.m2po",
        scope="batch",
        caches=("sampled",),
        unit="draw",
        trust_region="mean (log ρ)² over the batch within a budget, by masking harmful draws",
        importance="token ratio of the draws that stay",
        targets="heavy tails of ρ",
        cost="as reverse_kl_mc, and one no-grad pass over the batch before its first part",
        use_when="data is very stale and a few ratios dominate the gradient",
    ),
    "reverse_kl_topk": Method(
        function="divergence.reverse_kl_topk",
        scope="token",
        caches=("student_topk",),
        unit="support",
        trust_region="none",
        importance="current weights on the support; tokens outside it stay unseen (plain: none)",
        targets="variance of sampling",
        cost="12·k bytes per position with behaviour log-probs, else 8·k",
        use_when="rollouts are fresh and the student is peaked: watch student_mass",
    ),
    "reverse_kl": Method(
        function="divergence.dense",
        scope="token",
        caches=WHOLE,
        unit="vocabulary",
        trust_region="none",
        importance="not needed: exact at every visited prefix",
        targets="support mismatch and variance",
        cost="2·D (hidden) or 4·V (dense) bytes per position, and the teacher's head at the learner",
        use_when="the teacher's hidden states can be had, or the vocabulary is small",
    ),
    "forward_kl": Method(
        function="divergence.forward_kl_topk",
        scope="token",
        caches=("teacher_topk", *WHOLE),
        unit="support",
        trust_region="none",
        importance="not needed: weighted by the teacher",
        targets="stale supports; modes that the student misses",
        cost="8·k bytes per position",
        use_when="rollouts are very stale, or the teacher is an endpoint that returns top-k: watch teacher_mass",
    ),
    "jsd": Method(
        function="divergence.dense",
        scope="token",
        caches=("teacher_topk", *WHOLE),
        unit="vocabulary, or support and tail",
        trust_region="none",
        importance="not needed",
        targets="forward KL too broad, reverse KL too narrow",
        cost="as forward_kl",
        use_when="student and teacher differ so much that one direction alone misbehaves",
    ),
    "k1": _on_the_emitted(
        importance="none",
        targets="no loss: as a reward, the simplest signal",
        use_when="as a reward under a policy loss; never as a loss, its mean gradient is zero",
    ),
    "abs": _on_the_emitted(
        importance="none",
        targets="single tokens with huge gaps",
        use_when="for comparison: the gradient is the sign of the gap, and of no divergence",
    ),
    "k2": _on_the_emitted(
        importance="none: unbiased gradient only on-policy",
        targets="the missing gradient of k1",
        use_when="one draw, on-policy, as a loss; its value is not the KL",
    ),
    "k3": _on_the_emitted(
        importance="none",
        targets="the variance of k1 as an estimate",
        use_when="to report a KL; as a loss it follows the forward KL",
    ),
    "k1+": _on_the_emitted(
        importance="none: unbiased only on-policy",
        targets="k2's biased value",
        use_when="one draw, on-policy, when the logged loss should be the KL",
    ),
    "k3+": _on_the_emitted(
        importance="none: unbiased only on-policy",
        targets="k2's biased value and k1's variance",
        use_when="as k1+, with a quieter value",
    ),
    "fopd": Method(
        function="freshness.fopd_loss",
        scope="row",
        caches=("sampled", "student_topk", "teacher_topk", *WHOLE),
        unit="sample",
        trust_region="gate at the freshness threshold, anchor λ·KL(p_θ‖p_old), refresh of the buffer",
        importance="freshness weight on top of any token-scope loss",
        targets="long horizons, contexts that are rebuilt, collapse",
        cost="rollout KL from the MC cache; relabelling by the teacher where contexts change",
        use_when="agents and tools make samples old in ways that lag alone does not tell",
    ),
}
