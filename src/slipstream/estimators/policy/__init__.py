"""Policy losses by name.

`policy_loss` floors log-probs, zeroes masked positions, applies importance weights and reduces to one number. The
formula for the loss of each token is in `token`, `row` or `batch`. `tables.policy` lists the losses.

Shapes: B rows, T positions.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.estimators.numerics import aggregate, floored, same_rows, same_shape, zeroed
from slipstream.estimators.options import check_options, only
from slipstream.estimators.policy.token import Tokens
from slipstream.estimators.tables.policy import CENTRED, Mode, find_loss

Metrics = dict[str, Tensor]


def policy_loss(
    name: str,
    logp_BT: Tensor,
    logp_old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    weights: Tensor | None = None,
    centre: Tensor | None = None,
    agg: Mode | None = None,
    n_tokens: float | None = None,
    n_sequences: float | None = None,
    scale: float | None = None,
    sequence_tokens: Tensor | None = None,
    **hyper: Any,
) -> tuple[Tensor, Metrics]:
    """Return the loss of a method of `LOSSES`, differentiable in `logp`, and its metrics.

    `logp_old` are the log-probs of the policy in the denominator of the ratio. `weights` [B, T] (detached) multiply the
    loss of each token. `centre` [B, T] is Σ_v q_v w_v·log π_v of score centering, differentiable (see `centring`), for
    losses without a ratio. `agg` None uses the aggregation of the method. The counts are those of the global batch; see
    `aggregate` for several rows that are one sequence. `hyper` are the options of the method. For a batch-scope method
    they may include the result of `prepare` as `chosen`. If `chosen` is missing, tokens are chosen from the given rows.

    Metrics are scalars: `kl` (mean of log π_old − log π), `ratio` and `ratio_max` of tokens, `ratio_variance` (mean of
    (r − 1)²), and `clip_fraction` (share of tokens at which the trust region acted). Means are sums over the given
    tokens divided by n_tokens, so metrics of micro-batches add up. If tokens are chosen here, the metrics of `prepare`
    are added.
    """
    method = find_loss(name)
    same_rows(logp=logp_BT, logp_old=logp_old_BT, advantages=advantages_BT, mask=mask_BT)
    tokens = _tokens(logp_BT, logp_old_BT, advantages_BT, mask_BT)
    metrics: Metrics = {}
    if method.choose is not None and "chosen" not in hyper:
        hyper["chosen"], metrics = prepare(name, logp_BT, logp_old_BT, advantages_BT, mask_BT, **hyper)
    check_options(name, hyper, method.loss, method.choose)
    if method.choose is not None:
        same_shape(mask=mask_BT, chosen=hyper["chosen"])
    loss_BT, acted_BT = method.loss(tokens, **only(hyper, method.loss))

    if weights is not None:
        same_shape(logp=logp_BT, weights=weights)
        (weights,) = zeroed(tokens.mask, weights.detach().to(loss_BT.dtype))
        loss_BT = loss_BT * (_row_weight(weights, tokens.mask) if method.weighs_rows else weights)
    if centre is not None:
        same_shape(logp=logp_BT, centre=centre)
        if method.formula != CENTRED:
            raise ValueError(f"{name} has a ratio: score centering is for losses without, such as reinforce")
        (centre,) = zeroed(tokens.mask, centre.to(loss_BT.dtype))
        loss_BT = loss_BT + tokens.advantage * centre
        metrics["centred"] = _mean((tokens.advantage * centre).detach(), tokens, n_tokens)
    counts: dict[str, Any] = {"n_tokens": n_tokens, "n_sequences": n_sequences, "sequence_tokens": sequence_tokens}
    loss = aggregate(loss_BT, tokens.mask, agg or method.agg, scale=scale, **counts)
    return loss, metrics | _metrics(tokens, acted_BT, n_tokens)


def prepare(
    name: str, logp_BT: Tensor, logp_old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, **hyper: Any
) -> tuple[Tensor, Metrics]:
    """Return the tokens that a batch-scope method picks from the whole batch, [B, T] of bool, and metrics.

    Cut the result like the batch, and pass each piece to `policy_loss` as `chosen`. `hyper` is as in `policy_loss`.
    Metrics are those of the whole batch. clip_cov: `cov_candidates`. m2po: `second_moment` of the tokens left,
    `second_moment_before`, `masked_fraction`, `budget_missed`.
    """
    method = find_loss(name)
    if method.choose is None:
        raise ValueError(f"{name} has {method.scope} scope: there is nothing to prepare")
    same_rows(logp=logp_BT, logp_old=logp_old_BT, advantages=advantages_BT, mask=mask_BT)
    check_options(name, hyper, method.choose, method.loss)
    tokens = _tokens(logp_BT.detach(), logp_old_BT, advantages_BT, mask_BT)
    choice: tuple[Tensor, Metrics] = method.choose(tokens, **only(hyper, method.choose))
    return choice


def _tokens(logp_BT: Tensor, old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tokens:
    dtype = torch.promote_types(torch.promote_types(logp_BT.dtype, old_BT.dtype), torch.float32)
    logp, old = floored(logp_BT.to(dtype)), floored(old_BT.detach().to(dtype))
    logp, old, advantages = zeroed(mask_BT, logp, old, advantages_BT.detach().to(dtype))
    return Tokens(logp, old, advantages, mask_BT != 0)


def _row_weight(weights_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the geometric mean of each row's importance weights, [B, 1]; 0 if any of them is 0."""
    logs_BT = weights_BT.log().masked_fill(~mask_BT, 0.0)
    return (logs_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)).exp()


def _mean(x_BT: Tensor, tokens: Tokens, n_tokens: float | None) -> Tensor:
    count = max(n_tokens, 1) if n_tokens is not None else tokens.mask.sum().clamp(min=1)
    return (x_BT * tokens.mask).sum() / count


def _metrics(tokens: Tokens, acted_BT: Tensor, n_tokens: float | None) -> Metrics:
    delta_BT, ratio_BT = tokens.delta.detach(), tokens.ratio.detach() * tokens.mask
    means = {
        "kl": -delta_BT,
        "ratio": ratio_BT,
        "ratio_variance": (ratio_BT - 1).square(),
        "clip_fraction": acted_BT.to(delta_BT.dtype),
    }
    largest = ratio_BT.max() if ratio_BT.numel() else ratio_BT.sum()
    return {name: _mean(x_BT, tokens, n_tokens) for name, x_BT in means.items()} | {"ratio_max": largest}
