"""Score centering: a baseline for every direction of the logits, which removes what a biased sampler alone would teach.

At one prefix let q be the policy that drew, p the current one, and s_v = ∇log p_v. Under p the mean of s is 0. Under q
it is μ = Σ_v q_v s_v: an advantage that all tokens share then moves the weights along μ, whatever was learned. With a
detached weight w_v = f(p_v/q_v) of a correction, the centred loss of the emitted token a is

    −A [w_a·log p_a − Σ_v q_v w_v·log p_v],

whose gradient has the mean 0 under q for a constant advantage A, and for any f. With w = p/q over all tokens the sum
has no gradient, and nothing changes. (2609.20807; the paper was not at hand: the formula is that of public
implementations. The estimate from draws is ours.)

Each function returns coefficients of log-probs whose sum is an estimate of Σ_v q_v w_v·log p_v. Column 0 belongs to the
emitted token, and is 0: a token must not be its own baseline.

Shapes: N trained tokens, M draws (the emitted token first), K most likely tokens of q.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.estimators.numerics import bounded_exp, floored

Weigh = Callable[[Tensor], Tensor]
"""Function f from ratios p/q to importance weights."""
LEAST_TAIL = 1e-6
"""Probability of all other tokens together, below which they are left out of a centre from the most likely tokens."""


def centre_of_draws(logp_NM: Tensor, behavior_NM: Tensor, weigh: Weigh) -> Tensor:
    """Average over other draws at the same position: unbiased for every f.

    The coefficients are w_j/(M − 1), [N, M]. Their noise falls as 1/(M − 1).
    Against: drift of the policy towards what its sampler draws too often.
    Cost: 12 bytes per draw and position, and its log-prob under the learner.
    Use this centre by default: it needs no probability of a token that was not drawn.
    """
    others_NM = weigh(_ratio(logp_NM[:, 1:], behavior_NM[:, 1:])) / (logp_NM.shape[1] - 1)
    return pad(others_NM, (1, 0))


def centre_of_top_k(logp_NK: Tensor, behavior_NK: Tensor, weigh: Weigh) -> Tensor:
    """Sum over the most likely tokens: no noise, and an approximation of all others.

    The coefficients are q_v f(p_v/q_v) − α f(1/α) p_v, [N, 1 + K]. All other tokens have the probability 1 − P under p
    and 1 − Q under q. For them q is taken as α·p, with α = (1 − Q)/(1 − P): exact if these keep their proportions.
    Against: the same, and the noise of draws.
    Cost: 8 bytes per token and position, and its log-prob under the learner.
    Use this centre with peaked distributions, or a sampler that draws one token per position.
    """
    p_NK, q_NK = logp_NK.double().exp(), behavior_NK.double().exp()
    rest_N, rest_of_q_N = 1 - p_NK.sum(-1), (1 - q_NK.sum(-1)).clamp(min=0)
    alpha_N = torch.where(rest_N > LEAST_TAIL, rest_of_q_N / rest_N.clamp(min=LEAST_TAIL), 0.0)
    tail_N = torch.where(alpha_N > 0, alpha_N * weigh(1 / alpha_N.clamp(min=LEAST_TAIL)), 0.0)
    return pad(q_NK * weigh(_ratio(logp_NK, behavior_NK)) - tail_N[:, None] * p_NK, (1, 0))


def centre_of_support(logp_NK: Tensor, behavior_NK: Tensor, weigh: Weigh) -> Tensor:
    """Sum over all tokens that truncated sampling could draw: exact, without noise.

    The coefficients are q_v f(p_v/q_v), [N, 1 + K]; p and q are normalised over the recorded support. A token outside
    of it has q_v = 0.
    Against: the same, and the noise of draws.
    Cost: 8 bytes per token of sampler.top_k and position, and its log-prob under the learner.
    Use this centre with a sampler that keeps few tokens (sampler.top_k, keep_mask).
    """
    return pad(behavior_NK.double().exp() * weigh(_ratio(logp_NK, behavior_NK)), (1, 0))


def _ratio(logp: Tensor, behavior: Tensor) -> Tensor:
    return bounded_exp(floored(logp.detach().double()) - floored(behavior.double()))


CENTRES = {"draws": centre_of_draws, "top_k": centre_of_top_k, "support": centre_of_support}
