"""Weights of tokens in the distillation loss, by their position in the response: formulas before normalisation.

`token_weights` divides the weights of a response by their mean, so that the loss keeps its size. The papers' texts were
not at hand; these are the ideas of their abstracts, and each docstring says where it departs.

Shape: T tokens of one response, of which the mask marks the trained ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.estimators.numerics import bounded_exp
from slipstream.estimators.options import check_options, formula, only


@dataclass(frozen=True)
class Response:
    mask: Tensor
    """True at trained tokens."""
    gap: Tensor
    """log p − log q of the emitted tokens: the student that drew them, minus the teacher. 0 at masked tokens."""
    turn: Tensor
    """Number of each token's turn, from 0 on."""
    update: int
    """Number of the update that learns from it, from 1 on."""


def token_weights(name: str, response: Response, **options: float) -> Tensor:
    """Return the weights [T] of a method, with mean 1 over the trained tokens; 0 at masked tokens.

    A response whose weights are all 0 stays at 0.
    """
    method = formula(f"token_weights.{name}")
    check_options(name, options, method)
    weights_T: Tensor = method(response, **only(options, method)).double().masked_fill(~response.mask, 0.0)
    mean = weights_T.sum() / max(int(response.mask.sum()), 1)
    return weights_T / torch.where(mean == 0, 1.0, mean)


def first(response: Response, *, share: float = 0.3) -> Tensor:
    """Weigh only the first tokens of each response (2606.22600, its finding that these carry most of what is taught).

    w_t = 1 for the first `share` of the trained tokens, rounded up, and 0 for the others.
    Against: scores of a teacher that reads a text unlike its own.
    Cost: the scores of the other tokens, which are computed and not used.
    Use this weight to find out how much the end of long answers teaches.
    """
    count = response.mask.sum()
    return response.mask.cumsum(0) <= torch.ceil(count.double() * min(share, 1.0) - 1e-9)


def last(response: Response, *, share: float = 0.3) -> Tensor:
    """Weigh only the last tokens of each response.

    w_t = 1 for the last `share` of the trained tokens, rounded up, and 0 for the others.
    Against: –
    Cost: the scores of the other tokens, which are computed and not used.
    Use this weight for comparison with first.
    """
    count, places_T = response.mask.sum(), response.mask.cumsum(0)
    return places_T > count - torch.ceil(count.double() * min(share, 1.0) - 1e-9)


def iw_opd(response: Response, *, rate: float = 0.1) -> Tensor:
    """Weigh tokens by how far the response before them has left the teacher (IW-OPD, 2606.22600).

    w_t = exp(−rate·max(0, Σ_{s<t} gap_s)), gap_s = log p_s − log q_s of the emitted token.
    Here the sum is bounded below by 0, so that a lucky token cannot raise a weight above 1.
    Against: scores of a teacher that reads a text unlike its own.
    Cost: –
    Use this weight with long answers, if the teacher's scores get worse towards their end.
    """
    before_T = response.gap.double().cumsum(0) - response.gap
    return bounded_exp(-rate * before_T.clamp(min=0))


def tcod_f2b(response: Response, *, updates: float = 100, turns: float = 1) -> Tensor:
    """Weigh only early turns at first, and later all (TCOD forward to backward, 2604.24005).

    w_t = 1 in the first `turns` + (all − `turns`)·min(1, (update − 1)/`updates`) turns, rounded down; else 0.
    Here the student plays every turn from the start: only the loss is limited.
    Against: errors that grow from turn to turn, and lead beyond what the teacher knows.
    Cost: turns that are played and not learned from.
    Use this weight with agents whose late turns make the KL rise.
    """
    return response.turn < _depth(response, updates, turns)


def tcod_b2f(response: Response, *, updates: float = 100, turns: float = 1) -> Tensor:
    """Weigh only late turns at first, and later all (TCOD backward to forward, 2604.24005).

    w_t = 1 in the last `turns` + (all − `turns`)·min(1, (update − 1)/`updates`) turns, rounded down; else 0.
    Here the student itself plays the turns before them; in the paper they come from the teacher.
    Against: a task whose outcome is clear only near its end.
    Cost: turns that are played and not learned from.
    Use this weight for comparison with tcod_f2b.
    """
    return response.turn > response.turn.max() - _depth(response, updates, turns)


def turn_opd(response: Response, *, updates: float = 100) -> Tensor:
    """Move from equal weights of tokens to equal weights of turns (TurnOPD, 2607.05804).

    w_t = 1 − λ + λ·N/(K·n_k), λ = min(1, (update − 1)/`updates`), for N trained tokens in K turns; the token's
    turn has n_k of them.
    Here the student plays every turn: the paper also limits the number of turns by what they teach.
    Against: long first turns that outweigh the short ones in which an agent decides.
    Cost: –
    Use this weight with agents whose turns differ much in length.
    """
    mask_T, turn_T = response.mask, response.turn.masked_fill(~response.mask, 0)
    sizes_K = torch.bincount(turn_T, mask_T.double(), minlength=1)
    mean = mask_T.sum() / (sizes_K > 0).sum().clamp(min=1)
    progress = min(1.0, (response.update - 1) / max(updates, 1.0))
    return 1 - progress + progress * mean / sizes_K[turn_T].clamp(min=1)


def _depth(response: Response, updates: float, turns: float) -> Tensor:
    every, progress = response.turn.max() + 1.0, min(1.0, (response.update - 1) / max(updates, 1.0))
    return torch.floor(turns + (every - turns).clamp(min=0) * progress + 1e-9)
