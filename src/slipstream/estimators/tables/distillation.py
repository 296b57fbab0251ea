"""Descriptions of the distillation losses, for the page of estimators. `config/losses` has their options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Columns of the page of estimators; `catalogue.Entry` has the same names."""

    what: str
    unit: str
    trust_region: str = "none"
    importance: str
    """Correction for draws that an older student sampled."""
    targets: str
    """Problem that the loss is designed to avoid."""
    cost: str
    use_when: str


_estimate = partial(
    Description, unit="emitted token", trust_region='none; PPO clip as = "reward"', cost="8 bytes per position"
)

DISTILLATION = {
    "reverse_kl_mc": Description(
        what="KL(p‖q) on draws of the student, weighted for the current student",
        unit="draw",
        trust_region="none; clip or ratio_cap if set",
        importance="token ratio to the sampling policy, advantage recomputed: unbiased at any staleness",
        targets="stale draws",
        cost="12·M bytes per position; variance 1/M",
        use_when="the default, for every schedule; raise m if the gradient is noisy. reward_scale > 1 goes beyond the "
        "teacher (ExOPD, 2602.12125, with the student at the start as reference)",
    ),
    "decoupled_ppo": Description(
        what="KL(p‖q) on draws, by clipped steps around the student when the batch arrived",
        unit="draw",
        trust_region="PPO clip around the learner when the batch arrived",
        importance="proximal/behaviour ratio, 0 above weight_cap",
        targets="a clip that measures staleness instead of the step",
        cost="as reverse_kl_mc, plus one forward pass for the proximal log-probs",
        use_when="several optimizer steps are made on one stale batch",
    ),
    "m2po": Description(
        what="KL(p‖q) on draws of the student, without the most extreme ratios ρ",
        unit="draw",
        trust_region="bound on the batch mean of (log ρ)², by masking harmful draws",
        importance="token ratio of the kept draws",
        targets="extreme ratios ρ",
        cost="as reverse_kl_mc, plus one pass over the batch without gradient",
        use_when="data is very stale and a few ratios dominate the gradient",
    ),
    "reverse_kl_topk": Description(
        what="KL(p‖q) on the student's top-k ids at the time of drawing",
        unit="support",
        importance="reweighted on the support; tokens outside are ignored (reweight = false: none)",
        targets="variance of sampling",
        cost="12·k bytes per position",
        use_when="rollouts are fresh and student_mass is near 1",
    ),
    "reverse_kl": Description(
        what="KL(p‖q) over the whole vocabulary",
        unit="vocabulary",
        importance="not needed: exact at every visited prefix",
        targets="support mismatch and variance",
        cost="2·D bytes per position, and the teacher's head at the learner",
        use_when="the teacher's hidden states are available, above all if rollouts are stale",
    ),
    "forward_kl": Description(
        what="KL(q‖p) on the teacher's top-k ids, or over the whole vocabulary",
        unit="support",
        importance="not needed: weighted by the teacher",
        targets="stale supports; modes of the teacher that the student misses",
        cost="8·k bytes per position",
        use_when="rollouts are very stale, or the teacher is an endpoint with top-k; watch teacher_mass",
    ),
    "mopd": Description(
        what="Σ p (log p − log q) − p + q on the teacher's top-k ids: the generalised KL (MOPD, 2606.30406)",
        unit="support",
        importance="not needed: the teacher chooses the support",
        targets="the truncated reverse KL, which moves the student's mass out of the support",
        cost="8·k bytes per position",
        use_when="reverse KL is wanted and the teacher is an endpoint with top-k; watch teacher_mass",
    ),
    "eopd": Description(
        what="KL(p‖q) + λ·1[H(q) > τ]·KL(q‖p): forward KL where the teacher's entropy is high (EOPD, 2603.07079)",
        unit="vocabulary, or support and tail",
        importance="not needed",
        targets="a student that loses the teacher's variety at its unsure tokens",
        cost="as reverse_kl, or forward_kl",
        use_when="student/entropy falls, or pass@k stays behind; both KLs are sums, unlike the paper's surrogate",
    ),
    "jsd": Description(
        what="β·KL(q‖m) + (1−β)·KL(p‖m) with m = βq + (1−β)p",
        unit="vocabulary, or support and tail",
        importance="not needed",
        targets="forward KL is too broad, reverse KL too narrow",
        cost="as reverse_kl, or forward_kl",
        use_when="student and teacher differ so much that one direction alone is unstable",
    ),
    "k1": _estimate(
        what="log p − log q of the emitted token, as a reward",
        importance="as a reward: token ratio; as a loss: no gradient",
        targets="none: the simplest reward",
        use_when='only with as = "reward": as a loss, its mean gradient is 0',
    ),
    "abs": _estimate(
        what="|log p − log q| of the emitted token",
        importance="none; as a reward: token ratio",
        targets="single tokens with huge gaps",
        use_when="for comparison only: the gradient is that of no divergence",
    ),
    "k2": _estimate(
        what="½ (log p − log q)² of the emitted token",
        importance="none: unbiased gradient only on-policy; as a reward: token ratio",
        targets="the missing gradient of k1",
        use_when="a loss with one draw, on-policy; the logged value is not the KL",
    ),
    "k3": _estimate(
        what="q/p − 1 − log(q/p) of the emitted token",
        importance="none; as a reward: token ratio",
        targets="the variance of k1 as an estimate",
        use_when="to report a KL; as a loss it minimises the forward KL",
    ),
    "k1+": _estimate(
        what="value of k1, gradient of k2",
        importance="none: unbiased only on-policy; as a reward: token ratio",
        targets="k2's biased value",
        use_when="as k2, if the logged loss should be the KL",
    ),
    "k3+": _estimate(
        what="value of k3, gradient of k2",
        importance="none: unbiased only on-policy; as a reward: token ratio",
        targets="k2's biased value and k1's variance",
        use_when="as k1+, with a less noisy logged value",
    ),
    "cross_entropy": Description(
        what="−log p of tokens from the data, or from the teacher's rollouts",
        unit="given token",
        importance="not needed: the student drew no token",
        targets="a student whose own rollouts teach it nothing",
        cost="none: no teacher scores",
        use_when="in [sft], before the first rollout",
    ),
}
"""Description of each loss, by `loss.kind` or `sft.loss.kind`."""
