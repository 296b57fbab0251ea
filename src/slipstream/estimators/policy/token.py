"""Formulas of policy losses of token scope, before weights and aggregation.

Each function returns (loss, acted): the loss of every token, and a mask of tokens where the trust region acted.

δ = logπ − logπ_old, r = exp(δ clamped to ±20), A advantage, sg stop-gradient, lo = clip_low, hi = clip_high.

Shapes: B rows, T positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.estimators.numerics import bounded_exp, floored, same_shape, zeroed
from slipstream.estimators.tables.policy import VARIANCE_COEF

Loss = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Tokens:
    """Emitted tokens of a batch: tensors [B, T] of one shape. Masked positions are 0."""

    logp: Tensor
    """Log-probs under the current policy, floored. Only these have a gradient."""
    old: Tensor
    """Log-probs under the old policy, floored."""
    advantage: Tensor
    mask: Tensor
    """Valid tokens, as bool."""

    @property
    def delta(self) -> Tensor:
        return self.logp - self.old

    @property
    def ratio(self) -> Tensor:
        return bounded_exp(self.delta)

    @property
    def no_tokens(self) -> Tensor:
        """Return a mask of no tokens, for losses without a trust region."""
        return torch.zeros_like(self.mask)


def vanilla(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0) -> Loss:
    """Clip the ratio as in PPO, with the dual clip (Schulman et al., 1707.06347; Ye et al., 1912.09729).

    max(−A r, −A clip(r, 1−lo, 1+hi)), and where A < 0 at most −A·dual_clip.
    Trust region: hard clip of the token ratio, and a bound on the loss of bad tokens.
    Importance: token ratio.
    Against: steps that are too large; bad tokens with exploding ratios.
    Use this loss by default, with rollouts of at most two updates ago. A token outside the clip range has no gradient.
    """
    loss_BT, clipped_BT = clipped_surrogate(tokens.ratio, tokens.advantage, clip_low, clip_high)
    most_BT = torch.where(tokens.advantage < 0, -tokens.advantage * dual_clip, torch.inf)
    return torch.minimum(loss_BT, most_BT), clipped_BT | (loss_BT > most_BT)


def reinforce(tokens: Tokens) -> Loss:
    """Apply the plain policy gradient (REINFORCE, Williams 1992; GPG is the same loss with its own advantages).

    −A logπ.
    Trust region: none.
    Importance: none; uses the weights of a correction preset.
    Against: bias of clipping.
    Use this loss on-policy, or with importance weights of a bypass preset that hold the whole correction. Use gpg as a
    baseline, with the gpg advantage.
    """
    return -tokens.advantage * tokens.logp, tokens.no_tokens


def cispo(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Loss:
    """Use the clipped ratio as a constant weight, so that every token keeps a gradient (MiniMax-M1, 2506.13585).

    −sg(clip(r, 1−lo, 1+hi)) A logπ.
    Trust region: none: the weight is bounded, but not the step.
    Importance: clipped token ratio, stop-gradient.
    Against: rare decisive tokens that lose their gradient by clipping.
    Use this loss if clipping removes the gradient of rare but decisive tokens. There is no trust region: watch the KL.
    """
    ratio_BT = tokens.ratio.detach()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return -weight_BT * tokens.advantage * tokens.logp, weight_BT != ratio_BT


def dispo(
    tokens: Tokens,
    *,
    clip_low_pos: float = 0.2,
    clip_high_pos: float = 10.0,
    clip_low_neg: float = 1.0,
    clip_high_neg: float = 100.0,
) -> Loss:
    """Use the ratio as a constant weight, with other bounds for good tokens than for bad ones (DISPO, 2602.00983).

    −sg(clip(r, 1−lo, 1+hi)) A logπ, with clip_low_pos and clip_high_pos where A > 0, else clip_low_neg and
    clip_high_neg. The paper chooses the bounds by right and wrong answers, which are the signs of A for a group's mean.
    Trust region: none: the weight is bounded, but not the step.
    Importance: token ratio with bounds by the sign of the advantage, stop-gradient.
    Against: entropy that drifts in good answers; repetitions and shrinking length from bad ones.
    Use this loss like cispo, if entropy, repetitions or length need other bounds in good than in bad answers.
    """
    ratio_BT = tokens.ratio.detach()
    good_BT = ratio_BT.clamp(1 - clip_low_pos, 1 + clip_high_pos)
    bad_BT = ratio_BT.clamp(1 - clip_low_neg, 1 + clip_high_neg)
    weight_BT = torch.where(tokens.advantage > 0, good_BT, bad_BT)
    return -weight_BT * tokens.advantage * tokens.logp, weight_BT != ratio_BT


def sapo(tokens: Tokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Loss:
    """Use a sigmoid instead of the clip: the gradient fades smoothly as r leaves 1 (SAPO, 2511.20347).

    −A σ(τ(r − 1))·4/τ with τ = tau_pos where A > 0, else tau_neg. The gradient at r = 1 is the plain policy gradient.
    Trust region: sigmoid: the gradient fades as the ratio leaves 1.
    Importance: token ratio, in the sigmoid.
    Against: gradients that jump at the edge of a hard clip.
    Use this loss if clip_fraction is high, and the hard edge of PPO's clip makes training unstable.
    """
    tau_BT = torch.full_like(tokens.advantage, tau_neg).masked_fill(tokens.advantage > 0, tau_pos)
    gate_BT = torch.sigmoid(tau_BT * (tokens.ratio - 1)) * 4 / tau_BT
    return -tokens.advantage * gate_BT, tokens.no_tokens


def dppo_tv(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dppo_truncation: float = 20.0) -> Loss:
    """Drop tokens whose probability, instead of the ratio, moved too far (DPPO-TV, 2602.04879).

    −A sg(min(r, dppo_truncation)) logπ, kept while π − π_old ≤ hi (A > 0) or π_old − π ≤ lo (A ≤ 0).
    Trust region: drops tokens whose probability changed too much.
    Importance: truncated token ratio (20), stop-gradient.
    Against: ratios that do not measure the distance of policies.
    Use this loss if inference and training engines disagree: rare tokens then have extreme ratios and little mass.
    """
    moved_BT = (tokens.logp.exp() - tokens.old.exp()).detach()
    keep_BT = torch.where(tokens.advantage > 0, moved_BT <= clip_high, -moved_BT <= clip_low)
    return _truncated(tokens, keep_BT, dppo_truncation), ~keep_BT


def dppo_kl(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dppo_truncation: float = 20.0) -> Loss:
    """Drop tokens with a large binary KL ("this token or another") between the two policies (DPPO-KL, 2602.04879).

    D = π_old log(π_old/π) + (1−π_old) log((1−π_old)/(1−π)). Dropped if D > hi and π > π_old (A > 0), or if D > lo and π
    < π_old (A ≤ 0).
    Trust region: drops tokens whose binary KL is too large.
    Importance: truncated token ratio (20), stop-gradient.
    Against: ratios that do not measure the distance of policies.
    Use this loss like dppo_tv, if tokens with probabilities near 0 or 1 need a stricter limit.
    """
    logp, old = tokens.logp.detach(), tokens.old
    kl_BT = old.exp() * (old - logp) + (-torch.expm1(old)) * (_log_rest(old) - _log_rest(logp))
    raised_BT, lowered_BT = (kl_BT > clip_high) & (logp > old), (kl_BT > clip_low) & (logp < old)
    dropped_BT = torch.where(tokens.advantage > 0, raised_BT, lowered_BT)
    return _truncated(tokens, ~dropped_BT, dppo_truncation), dropped_BT


def dro(tokens: Tokens, *, dro_beta: float = 0.5) -> Loss:
    """Add a quadratic penalty towards the old policy to the plain policy gradient (DRO, Richemond et al. 2024).

    −(A logπ − ½ dro_beta δ²).
    Trust region: quadratic penalty on δ.
    Importance: none.
    Against: exploding ratios on offline data.
    Use this loss for off-policy or offline data without importance ratios: none explodes, every token has a gradient.
    """
    return -(tokens.advantage * tokens.logp - dro_beta / 2 * tokens.delta.square()), tokens.no_tokens


def r2vpo(tokens: Tokens, *, variance_coef: float = VARIANCE_COEF) -> Loss:
    """Penalise the variance of the ratio instead of clipping it (R²VPO, 2601.03320).

    −(A r − variance_coef (r − 1)²): the mean of r under the old policy is 1, so (r − 1)² estimates its variance.
    The paper adapts the coefficient by dual ascent, so that the variance stays below a bound. Here this happens if
    policy.variance_target sets the bound. Otherwise variance_coef is constant; its default is not from the paper.
    Trust region: quadratic penalty on r − 1.
    Importance: token ratio.
    Against: rare tokens of high advantage that lose their gradient by clipping.
    Use this loss if clipping removes the gradient of rare tokens with high advantage.
    """
    return -(tokens.advantage * tokens.ratio - variance_coef * (tokens.ratio - 1).square()), tokens.no_tokens


def quatro(tokens: Tokens, *, spread: Tensor, radius: float = 0.02) -> Loss:
    """Solve a trust-region problem for each prompt, instead of clipping (QUATRO, 2602.04620).

    −(A r − λ (r log r − r + 1)), λ = spread / √(2 radius). The problem of a prompt: maximise the mean of A r over its
    answers, such that KL(π ‖ π_old) per token is at most `radius`, in nats. The mean of r log r − r + 1 under π_old is
    this KL. The loss is least at r = exp(A/λ), where the KL is about `radius` if that is small. `spread` [B, T] is the
    root mean square of A over the tokens of all answers to the prompt. If the mean of A is not 0, the KL stays below
    `radius`. Derived from descriptions of the paper, which was not at hand: its multiplier may differ.
    Trust region: KL penalty with one multiplier for each prompt.
    Importance: token ratio.
    Against: one clip range for all prompts, although their rewards are spread differently.
    Use this loss for stale tokens, if the spread of rewards differs much between prompts. Advantages that are divided
    by σ, as those of grpo are by default, have one spread, and then λ is the same for all prompts.
    """
    same_shape(logp=tokens.logp, spread=spread)
    (multiplier_BT,) = zeroed(tokens.mask, spread.detach().to(tokens.logp.dtype) / (2 * radius) ** 0.5)
    distance_BT = tokens.ratio * tokens.delta - tokens.ratio + 1
    return -(tokens.advantage * tokens.ratio - multiplier_BT * distance_BT), tokens.no_tokens


def decoupled_ppo(
    tokens: Tokens, *, proximal_logp: Tensor, clip_low: float = 0.2, clip_high: float = 0.2, weight_cap: float = 5.0
) -> Loss:
    """Apply PPO around a recent proximal policy, with weights for the policy that drew the token (AReaL, 2505.24298).

    −sg(w)·min(r A, clip(r, 1−lo, 1+hi) A), r = π/π_prox, w = π_prox/π_old, and w = 0 where w > weight_cap.
    π_old is the behaviour policy. `proximal_logp` [B, T] are the learner's log-probs when the batch arrived.
    Trust region: hard clip around the proximal policy.
    Importance: proximal/behaviour ratio, stop-gradient, 0 above a cap.
    Against: clips that measure staleness instead of the step.
    Use this loss for asynchronous rollouts and several steps per batch: the clip measures the change by this update and
    not the age of the sample.
    """
    same_shape(logp=tokens.logp, proximal_logp=proximal_logp)
    (proximal_BT,) = zeroed(tokens.mask, floored(proximal_logp.detach().to(tokens.old.dtype)))
    weight_BT = bounded_exp(proximal_BT - tokens.old)
    dropped_BT = weight_BT > weight_cap
    ratio_BT = bounded_exp(tokens.logp - proximal_BT)
    loss_BT, clipped_BT = clipped_surrogate(ratio_BT, tokens.advantage, clip_low, clip_high)
    return weight_BT.masked_fill(dropped_BT, 0.0) * loss_BT, clipped_BT | dropped_BT


def a3po(
    tokens: Tokens, *, lag: Tensor, clip_low: float = 0.2, clip_high: float = 0.2, weight_cap: float = 5.0
) -> Loss:
    """Interpolate the proximal policy of decoupled_ppo, which then needs no pass of its own (A-3PO, 2512.06547).

    `decoupled_ppo` with log π_prox = α logπ_old + (1 − α) sg(logπ), α = 1/max(lag, 1). So r = (π/π_old)^α.
    `lag` [B, T] is the age of each token in updates. AReaL's code counts from 1, so that α = 1/(lag + 1) there. The
    paper has no weight_cap.
    Trust region: hard clip around a proximal policy between the old and the current one.
    Importance: proximal/behaviour ratio, stop-gradient, 0 above a cap.
    Against: the cost of the proximal policy's pass.
    Use this loss instead of decoupled_ppo if the pass for the proximal policy takes too long.
    """
    same_shape(logp=tokens.logp, lag=lag)
    near_BT = 1 / lag.clamp(min=1).to(tokens.old.dtype)
    proximal_BT = near_BT * tokens.old + (1 - near_BT) * tokens.logp.detach()
    return decoupled_ppo(
        tokens, proximal_logp=proximal_BT, clip_low=clip_low, clip_high=clip_high, weight_cap=weight_cap
    )


def aspo(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0) -> Loss:
    """Invert PPO's ratio for good tokens, so that improbable ones are raised most (ASPO, 2510.06062).

    A ≤ 0: `vanilla`. A > 0: −A sg(1/r²)·r without a clip of r.
    The value 1/r is limited to dual_clip, and its gradient is kept (soft dual clip).
    Trust region: hard clip for bad tokens, a bound on the weight of good tokens.
    Importance: token ratio, inverted for good tokens.
    Against: entropy collapse, because probable tokens gain most.
    Use this loss if entropy collapses because probable good tokens are raised further and rare ones are not.
    """
    bad_BT, clipped_BT = vanilla(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    flipped_BT = bounded_exp(tokens.old - tokens.logp.detach())
    good_BT = -tokens.advantage * flipped_BT.clamp(max=dual_clip) * self_ratio(tokens.logp)
    good = tokens.advantage > 0
    return torch.where(good, good_BT, bad_BT), torch.where(good, flipped_BT > dual_clip, clipped_BT)


def clipped_surrogate(
    ratio_BT: Tensor, advantage_BT: Tensor, clip_low: float | Tensor, clip_high: float | Tensor
) -> Loss:
    """Return max(−A ratio, −A clip(ratio, 1−lo, 1+hi)), and a mask of positions where the clip changes the result."""
    plain_BT = -advantage_BT * ratio_BT
    kept_BT = torch.clamp(ratio_BT, 1 - clip_low, 1 + clip_high)  # type: ignore[arg-type]
    bounded_BT = -advantage_BT * kept_BT
    return torch.maximum(plain_BT, bounded_BT), bounded_BT > plain_BT


def self_ratio(logp_BT: Tensor) -> Tensor:
    """Return a tensor of ones whose gradient is ∇logπ."""
    return (logp_BT - logp_BT.detach()).exp()


def _truncated(tokens: Tokens, keep_BT: Tensor, truncation: float) -> Tensor:
    weight_BT = tokens.ratio.detach().clamp(max=truncation)
    return -tokens.advantage * weight_BT.masked_fill(~keep_BT, 0.0) * tokens.logp


def _log_rest(logp: Tensor) -> Tensor:
    """Return log(1 − p) of log-probs log p, at least LOG_FLOOR."""
    return floored((-torch.expm1(logp.clamp(max=0.0))).log())
