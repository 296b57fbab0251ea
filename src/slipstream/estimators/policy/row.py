"""Policy losses of row scope: the loss of a token depends on the other tokens of its row. See `token` for the symbols.

A row is a whole sequence. For an episode with several branches the row is the trained tokens of all branches, one after
the other.

Shapes: B rows, T positions.
"""

import torch
from torch import Tensor

from slipstream.estimators.correction import importance_ratio, turn_sum
from slipstream.estimators.numerics import RATIO_BOUND, bounded_exp
from slipstream.estimators.policy.token import Loss, Tokens, clipped_surrogate, self_ratio
from slipstream.estimators.tables.correction import CTPO_CLIP


def gspo(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Loss:
    """Apply PPO to the length-normalised ratio of the whole row (GSPO, 2507.18071).

    s = exp(mean_t δ), max(−A s, −A clip(s, 1−lo, 1+hi)), gradient through s.
    Trust region: hard clip of the row's geometric mean ratio.
    Importance: geometric mean over the row.
    Against: row ratios that explode with length; unstable routing in mixtures of experts.
    Use this loss for one reward per long answer and for mixture-of-experts models. s changes far less than r: the
    paper's clips are near 3e-4, not 0.2.
    """
    ratio_BT = importance_ratio("geometric", tokens.delta, tokens.mask)
    return clipped_surrogate(ratio_BT, tokens.advantage, clip_low, clip_high)


def gspo_token(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Loss:
    """Apply GSPO with one gradient per token (GSPO-token, 2507.18071; the form that verl calls gspo).

    `gspo` with sg(s)·exp(logπ − sg logπ) in place of s.
    Trust region: hard clip of the row's geometric mean ratio.
    Importance: geometric mean over the row, stop-gradient.
    Against: as gspo, with advantages per token.
    Use this loss instead of gspo if advantages differ from token to token; else both gradients are equal.
    """
    ratio_BT = importance_ratio("geometric", tokens.delta.detach(), tokens.mask) * self_ratio(tokens.logp)
    return clipped_surrogate(ratio_BT, tokens.advantage, clip_low, clip_high)


def tbpo(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4, band_high: float = 7e-4) -> Loss:
    """Apply GSPO to good rows, and drop bad rows whose ratio leaves a band (TBPO, the loss of QaRL, 2604.07853).

    s = exp(mean_t δ), gradient through s. Where A > 0: max(−A s, −A min(s, 1+clip_high)). Where A < 0: −A s if
    1−clip_low ≤ s ≤ 1+band_high, else 0. The paper also weights each row by the ratio of the old policy to the sampler,
    a geometric mean of at most 2: use a decoupled correction with is_level "geometric".
    Trust region: hard clip of the row's geometric mean ratio; bad rows outside of a band are dropped.
    Importance: geometric mean over the row.
    Against: bad rows of quantised samplers with wrong tokens.
    Use this loss for rollouts in eight bits, whose rare wrong tokens give bad rows large ratios.
    """
    ratio_BT = importance_ratio("geometric", tokens.delta, tokens.mask)
    good_BT = tokens.advantage > 0
    outside_BT = (ratio_BT < 1 - clip_low) | (ratio_BT > 1 + band_high)
    acted_BT = torch.where(good_BT, ratio_BT > 1 + clip_high, outside_BT & (tokens.advantage < 0))
    bounded_BT = torch.where(good_BT, ratio_BT.clamp(max=1 + clip_high), ratio_BT.masked_fill(acted_BT, 0.0))
    return -tokens.advantage * bounded_BT, acted_BT


def espo(tokens: Tokens, *, entropy: Tensor, espo_share: float = 0.2, espo_alpha: float = 0.02) -> Loss:
    """Apply GSPO to each of two parts of a row: its most uncertain tokens, and the rest (ESPO, 2512.00499).

    `entropy` [B, T] is that of the learner's distribution before the first step, divided by log V. The uncertain part
    of a row of n tokens has the ⌈espo_share·n⌉ tokens with the largest entropy. Each part has one ratio s = exp(mean δ)
    and one width ε = espo_alpha·(mean entropy). Let s' = sg(s)·exp(logπ − sg logπ). The loss of a token is max(−A s',
    −A clip(s', 1−ε, 1+ε)) times n/(number of parts · size of its part), so both parts have equal weight in the mean
    over a row. The paper also multiplies s' by the ratio of the token.
    Trust region: hard clip of a part's geometric mean ratio, as wide as its entropy.
    Importance: geometric mean over the uncertain or the certain tokens of the row, stop-gradient.
    Against: long rows that a clip of the whole row silences.
    Use this loss like gspo, if its clip silences long answers because of a few uncertain tokens.
    """
    mask_BT = tokens.mask
    count_B1 = mask_BT.sum(-1, keepdim=True)
    order_BT = entropy.masked_fill(~mask_BT, -1.0).argsort(dim=-1, descending=True, stable=True)
    rank_BT = order_BT.argsort(-1)
    uncertain_B1 = (espo_share * count_B1.double() - 1e-9).ceil()  # 0.07 · 100 is a little above 7
    part_BT = (rank_BT >= uncertain_B1).long()

    def mean(x_BT: Tensor) -> Tensor:
        return turn_sum(x_BT.masked_fill(~mask_BT, 0.0), part_BT) / size_BT

    size_BT = turn_sum(mask_BT.to(tokens.logp.dtype), part_BT).clamp(min=1)
    ratio_BT = bounded_exp(mean(bounded_delta(tokens))) * self_ratio(tokens.logp)
    width_BT = espo_alpha * mean(entropy.to(size_BT.dtype))
    loss_BT, clipped_BT = clipped_surrogate(ratio_BT, tokens.advantage, width_BT, width_BT)
    parts_B1 = 1 + ((part_BT == 1) & mask_BT).any(-1, keepdim=True)
    return loss_BT * count_B1 / (parts_B1 * size_BT), clipped_BT


def gmpo(tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Loss:
    """Use the geometric mean of ratios that are clipped token by token (GMPO, 2507.20673).

    −Ā R at every token of the row, R = exp(mean_t sgnA·min(sgnA δ, sgnA clip(δ, −lo, hi))), Ā the row's mean advantage.
    Trust region: log-ratio of each token clipped in the direction of its advantage.
    Importance: geometric mean of clipped token ratios.
    Against: row ratios that explode with length; single outlier tokens.
    Use this loss instead of gspo if single outlier tokens dominate rows. The clip is on δ: the paper uses 0.4.
    """
    sign_BT, delta_BT = tokens.advantage.sign(), tokens.delta
    clipped_BT = sign_BT * delta_BT.clamp(-clip_low, clip_high)
    kept_BT = sign_BT * torch.minimum(sign_BT * delta_BT, clipped_BT)
    ratio_BT = importance_ratio("geometric", kept_BT, tokens.mask)
    tokens_B1 = tokens.mask.sum(-1, keepdim=True).clamp(min=1)
    return -tokens.advantage.sum(-1, keepdim=True) / tokens_B1 * ratio_BT, clipped_BT < sign_BT * delta_BT


def topr(tokens: Tokens, *, positive: Tensor) -> Loss:
    """Imitate good rows, and push bad rows down only while they are likely (TOPR, 2503.14286).

    −w A logπ. w = 1 on the rows that `positive` [B] marks, whose advantages sum to more than 0, else sg(min(Π_t r, 1)).
    Trust region: none for good rows, truncation for bad ones.
    Importance: row ratio in [0, 1] on bad rows, stop-gradient.
    Against: bad rows that are pushed down without limit.
    Use this loss for very stale or offline data with right and wrong answers: bad rows have no effect once they are
    unlikely under the policy.
    """
    if positive.shape != tokens.logp.shape[:1]:
        raise ValueError(f"positive {tuple(positive.shape)} must be [B] with B = {len(tokens.logp)}")
    row_BT = importance_ratio("sequence", tokens.delta.detach(), tokens.mask)
    truncated_BT = (row_BT > 1) & ~positive.bool()[:, None]
    weight_BT = torch.where(positive.bool()[:, None], 1.0, row_BT.clamp(max=1.0))
    return -weight_BT * tokens.advantage * tokens.logp, truncated_BT


def minpro(tokens: Tokens) -> Loss:
    """Weight each token by the smallest prefix ratio times its own ratio (MinPRO, 2601.22718).

    −sg(w) A logπ, w_t = (min_{s<t} r_s)·r_t.
    Trust region: none: the smallest prefix ratio lowers the weight.
    Importance: smallest prefix ratio times token ratio, stop-gradient.
    Against: prefix bias of token ratios; products that explode with length.
    Use this loss for long, stale answers, where token ratios are biased and products of ratios explode.
    """
    weight_BT = importance_ratio("prefix_min", tokens.delta.detach(), tokens.mask)
    return -weight_BT * tokens.advantage * tokens.logp, tokens.no_tokens


def ctpo(tokens: Tokens, *, ctpo_clip: float = CTPO_CLIP) -> Loss:
    """Weight each token by the prefix product of ratios, with a clip that widens along the row (CTPO, 2605.07331).

    −sg(w) A logπ, log w_t = Σ_{s≤t} δ_s clipped to ±ctpo_clip·√t.
    Trust region: log of the prefix product clipped to ±c√t.
    Importance: prefix product, stop-gradient.
    Against: as minpro, with the whole product.
    Use this loss like minpro, if drift is spread evenly over the row.
    """
    delta_BT = tokens.delta.detach()
    weight_BT = importance_ratio("cumulative", delta_BT, tokens.mask, c=ctpo_clip)
    free_BT = importance_ratio("cumulative", delta_BT, tokens.mask, c=RATIO_BOUND)  # c√t ≥ 20: no clip at all
    return -weight_BT * tokens.advantage * tokens.logp, weight_BT != free_BT


def vespo(
    tokens: Tokens, *, c1_pos: float = 2.0, c2_pos: float = 3.0, c1_neg: float = 3.0, c2_neg: float = 2.0
) -> Loss:
    """Weight each row by a smooth function of its whole ratio, which fades on both sides of 1 (VESPO, 2602.10693).

    −sg(φ(W)) A logπ, W = Π_t r_t, φ(W) = W^c1·exp(c2 (1 − W)), with c1_pos and c2_pos where A > 0, else c1_neg and
    c2_neg. Importance weights of a decoupled correction multiply the loss; the authors' code multiplies W by them.
    Trust region: smooth weight of the row, which fades as its ratio leaves 1.
    Importance: row ratio in that weight, stop-gradient.
    Against: variance of exact row ratios.
    Use this loss for very stale rows with one reward each, and for mixture-of-experts models.
    """
    log_B1 = bounded_delta(tokens).double().sum(-1, keepdim=True).clamp(-RATIO_BOUND, RATIO_BOUND)
    good_BT, below_B1 = tokens.advantage > 0, 1 - log_B1.exp()
    log_weight_BT = torch.where(good_BT, c1_pos * log_B1 + c2_pos * below_B1, c1_neg * log_B1 + c2_neg * below_B1)
    return -log_weight_BT.exp().to(tokens.logp.dtype) * tokens.advantage * tokens.logp, tokens.no_tokens


def oapl(tokens: Tokens, *, oapl_beta: float = 1e-3) -> Loss:
    """Regress the log-ratio of the row on its advantage, without ratio or clip (OAPL, 2602.19362).

    −(A_t − ½ oapl_beta S) δ_t, S = Σ_t δ_t. With one advantage per row the row's sum is ((oapl_beta S − A)² − A²) /
    (2 oapl_beta): the paper's square, less its constant, divided by 2β so that the gradient at r = 1 is the plain one.
    The old policy must be the one that drew the row: a decoupled correction and policy.old are refused. The paper
    publishes weights every 50 steps and then empties its buffer; here the schedule decides.
    Trust region: quadratic penalty on the row's log-ratio.
    Importance: none.
    Against: ratios that explode on very old rows.
    Use this loss with the advantage oapl, for rows that are tens or hundreds of updates old.
    """
    row_B1 = tokens.delta.sum(-1, keepdim=True)
    return -(tokens.advantage - oapl_beta / 2 * row_B1) * tokens.delta, tokens.no_tokens


def st_ppo(tokens: Tokens, *, turns: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> Loss:
    """Apply PPO to the ratio of a turn, and normalise its token weights after their clip (ST-PPO, 2511.20718).

    −sg(w c / mean_turn c) A logπ, and 0 where PPO's clip acts on w. w = exp(mean_turn δ) is the ratio of the turn, c =
    clip(r, 1−lo, 1+hi) that of the token. The mean weight of a turn is w, whatever its clipped tokens. `turns` [B, T]
    numbers the turns of a row. The paper divides the gradient by the norm of what the clip removed, and has a critic.
    Trust region: hard clip of the turn's geometric mean ratio.
    Importance: the turn's ratio, shared out by clipped token ratios, stop-gradient.
    Against: stale turns of agents.
    Use this loss for agents, whose actions are turns. An answer of one turn is one turn.
    """
    mask_BT, delta_BT = tokens.mask, bounded_delta(tokens)
    count_BT = turn_sum(mask_BT.to(delta_BT.dtype), turns).clamp(min=1)
    turn_BT = bounded_exp(turn_sum(delta_BT * mask_BT, turns) / count_BT)
    token_BT = bounded_exp(delta_BT).clamp(1 - clip_low, 1 + clip_high)
    mean_BT = turn_sum(token_BT * mask_BT, turns) / count_BT
    _, clipped_BT = clipped_surrogate(turn_BT, tokens.advantage, clip_low, clip_high)
    weight_BT = turn_BT * token_BT / torch.where(mean_BT > 0, mean_BT, 1.0)
    return -weight_BT.masked_fill(clipped_BT, 0.0) * tokens.advantage * tokens.logp, clipped_BT


def bounded_delta(tokens: Tokens) -> Tensor:
    """Return each token's log-ratio without gradient, bounded before any sum: one outlier cannot decide for a row."""
    return tokens.delta.detach().clamp(-RATIO_BOUND, RATIO_BOUND)
