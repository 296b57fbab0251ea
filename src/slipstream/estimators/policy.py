"""Policy losses by name: one door, one table.

A method is a formula for the loss of a token (`policy_token`, `policy_row`, `policy_batch`) and what is known about it
(`LOSSES`, from which the docs are made). The door floors log-probs, silences masked positions, weighs and sums.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.estimators import policy_batch, policy_row, policy_token
from slipstream.estimators.aggregate import Mode, aggregate
from slipstream.estimators.numerics import RATIO_BOUND, blanked, floored, same_shape, unknown
from slipstream.estimators.options import Options, check_options, only, options_of
from slipstream.estimators.ratio import Scope, same_rows

Metrics = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A method: its formula, what it may look at, and what to know before choosing it."""

    loss: Callable[..., tuple[Tensor, Tensor]]
    scope: Scope
    agg: Mode = "token-mean"
    choose: Callable[..., tuple[Tensor, Metrics]] | None = None
    """Batch scope: the choice of tokens that `prepare` freezes."""
    weighs_rows: bool = False
    """Importance weights enter as their geometric mean over the row."""
    trust_region: str
    importance: str
    targets: str
    use_when: str

    @property
    def options(self) -> Options:
        """The hyper-parameters it takes, with their defaults (`options.REQUIRED` where there is none)."""
        if self.choose is None:
            return options_of(self.loss)
        return {name: default for name, default in options_of(self.choose, self.loss).items() if name != "chosen"}


def policy_loss(
    name: str,
    logp_BT: Tensor,
    logp_old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    weights: Tensor | None = None,
    agg: Mode | None = None,
    n_tokens: float | None = None,
    n_sequences: float | None = None,
    scale: float | None = None,
    **hyper: Any,
) -> tuple[Tensor, Metrics]:
    """The loss of a method of `LOSSES`, differentiable in `logp`, and its metrics.

    `logp_old` are the log-probs of the policy that the ratio is taken to. `weights` [B, T] (detached) multiply the loss
    of each token. `agg` is the method's own aggregation unless given, with the counts of the global batch (`aggregate`).
    `hyper` are the method's options; a batch-scope method takes the choice of `prepare` as `chosen`, and without it
    chooses from what it is given.

    Metrics are scalars: `kl` (mean −δ), `ratio` and `ratio_max` of tokens, `clip_fraction` (tokens at which the trust
    region acted). Means are sums over the tokens given, divided by n_tokens, so those of micro-batches add up.
    """
    method = _method(name)
    same_rows(logp=logp_BT, logp_old=logp_old_BT, advantages=advantages_BT, mask=mask_BT)
    tensors = _tensors(logp_BT, logp_old_BT, advantages_BT, mask_BT)
    metrics: Metrics = {}
    known = method.options if method.choose is None else {**method.options, "chosen": None}
    if method.choose is not None and hyper.get("chosen") is None:
        hyper["chosen"], metrics = prepare(name, *tensors, **{k: v for k, v in hyper.items() if k != "chosen"})
    else:
        check_options(name, hyper, known)
    loss_BT, acted_BT = method.loss(*tensors, **only(hyper, method.loss))

    logp, old, _, mask = tensors
    if weights is not None:
        same_shape(logp=logp_BT, weights=weights)
        (weights,) = blanked(mask, weights.detach())
        loss_BT = loss_BT * (_row_weight(weights, mask) if method.weighs_rows else weights)
    loss = aggregate(loss_BT, mask, agg or method.agg, n_tokens=n_tokens, n_sequences=n_sequences, scale=scale)
    return loss, metrics | _metrics(logp.detach() - old, acted_BT, mask, n_tokens)


def prepare(
    name: str, logp_BT: Tensor, logp_old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, **hyper: Any
) -> tuple[Tensor, Metrics]:
    """The tokens [B, T] that a batch-scope method picks from the whole batch, without gradient, and metrics of the pick.

    Cut it with the batch and hand each piece to `policy_loss` as `chosen`. `hyper` as for `policy_loss`.
    """
    method = _method(name)
    if method.choose is None:
        raise ValueError(f"{name} has {method.scope} scope: there is nothing to prepare")
    same_rows(logp=logp_BT, logp_old=logp_old_BT, advantages=advantages_BT, mask=mask_BT)
    check_options(name, hyper, method.options)
    tensors = _tensors(logp_BT.detach(), logp_old_BT, advantages_BT, mask_BT)
    return method.choose(*tensors, **only(hyper, method.choose))


def scope_of(name: str, agg: Mode | None = None) -> Scope:
    """The scope of a method with its aggregation: a mean over each row needs whole rows, whatever the method needs."""
    method = _method(name)
    by_row = (agg or method.agg) == "seq-mean-token-mean"
    return "row" if method.scope == "token" and by_row else method.scope


def _method(name: str) -> PolicyLoss:
    name = ALIASES.get(name, name)
    if name not in LOSSES:
        raise unknown("policy loss", name, [*LOSSES, *ALIASES])
    return LOSSES[name]


def _tensors(logp_BT: Tensor, old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, ...]:
    """In one dtype, float32 at least; floored; 0 where masked; only `logp` differentiable. And the mask as bool."""
    dtype = torch.promote_types(torch.promote_types(logp_BT.dtype, old_BT.dtype), torch.float32)
    logp, old = floored(logp_BT.to(dtype)), floored(old_BT.detach().to(dtype))
    return *blanked(mask_BT, logp, old, advantages_BT.detach().to(dtype)), mask_BT != 0


def _row_weight(weights_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The geometric mean of a row's weights, [B, 1]; 0 if any of them is."""
    logs_BT = weights_BT.log().masked_fill(~mask_BT, 0.0)
    return (logs_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)).exp()


def _metrics(delta_BT: Tensor, acted_BT: Tensor, mask_BT: Tensor, n_tokens: float | None) -> Metrics:
    tokens = n_tokens if n_tokens is not None else mask_BT.sum().clamp(min=1)
    ratio_BT = delta_BT.clamp(-RATIO_BOUND, RATIO_BOUND).exp() * mask_BT
    return {
        "kl": -delta_BT.sum() / tokens,
        "ratio": ratio_BT.sum() / tokens,
        "ratio_max": ratio_BT.max() if ratio_BT.numel() else ratio_BT.sum(),
        "clip_fraction": (acted_BT & mask_BT).to(delta_BT.dtype).sum() / tokens,
    }


ALIASES = {"geo_mean": "gmpo"}
"""verl's names where ours is the paper's."""

LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(
        loss=policy_token.vanilla,
        scope="token",
        trust_region="hard clip of the token ratio, and a ceiling on bad tokens",
        importance="token ratio",
        targets="too large a step; bad tokens with exploding ratios",
        use_when="rollouts are at most an update or two old",
    ),
    "reinforce": PolicyLoss(
        loss=policy_token.reinforce,
        scope="token",
        trust_region="none",
        importance="none of its own: weights from outside",
        targets="bias from clipping",
        use_when="on-policy, or with importance weights of a bypass preset",
    ),
    "gpg": PolicyLoss(
        loss=policy_token.reinforce,
        scope="token",
        trust_region="none",
        importance="none of its own: weights from outside",
        targets="bias from clipping",
        use_when="as a baseline, with the gpg advantage",
    ),
    "cispo": PolicyLoss(
        loss=policy_token.cispo,
        scope="token",
        trust_region="none: the weight is bounded, the step is not",
        importance="clipped token ratio, stop-gradient",
        targets="rare decisive tokens silenced by the clip",
        use_when="reflective tokens lose their gradient under vanilla",
    ),
    "gspo": PolicyLoss(
        loss=policy_row.gspo,
        scope="row",
        agg="seq-mean-token-mean",
        trust_region="hard clip of the row's geometric mean ratio",
        importance="geometric mean over the row",
        targets="length trap; routing flips of mixtures of experts",
        use_when="one reward per answer, long answers; with clips near 3e-4",
    ),
    "gspo_token": PolicyLoss(
        loss=policy_row.gspo_token,
        scope="row",
        agg="seq-mean-token-mean",
        trust_region="hard clip of the row's geometric mean ratio",
        importance="geometric mean over the row, stop-gradient",
        targets="as gspo, with credit by token",
        use_when="gspo, but advantages differ within an answer",
    ),
    "gmpo": PolicyLoss(
        loss=policy_row.gmpo,
        scope="row",
        agg="seq-mean-token-mean",
        weighs_rows=True,
        trust_region="log-ratio of each token clipped on the side its advantage pushes to",
        importance="geometric mean of clipped token ratios",
        targets="length trap; single outlier tokens",
        use_when="gspo suffers from outliers; with clips near 0.4",
    ),
    "sapo": PolicyLoss(
        loss=policy_token.sapo,
        scope="token",
        agg="seq-mean-token-mean",
        trust_region="sigmoid: the gradient fades as the ratio leaves 1",
        importance="token ratio, in the sigmoid",
        targets="jumps at the edge of a hard clip",
        use_when="clip_fraction is high and training is jumpy",
    ),
    "dppo_tv": PolicyLoss(
        loss=policy_token.dppo_tv,
        scope="token",
        trust_region="drops tokens whose probability moved too far",
        importance="truncated token ratio (20), stop-gradient",
        targets="ratios as a bad proxy of distance",
        use_when="rare tokens have wild ratios, as under engine mismatch",
    ),
    "dppo_kl": PolicyLoss(
        loss=policy_token.dppo_kl,
        scope="token",
        trust_region="drops tokens whose binary KL is too large",
        importance="truncated token ratio (20), stop-gradient",
        targets="ratios as a bad proxy of distance",
        use_when="as dppo_tv, stricter near probabilities 0 and 1",
    ),
    "clip_cov": PolicyLoss(
        loss=policy_batch.clip_cov,
        choose=policy_batch.choose_clip_cov,
        scope="batch",
        trust_region="hard clip, and no loss at a few tokens of high covariance",
        importance="token ratio",
        targets="entropy collapse",
        use_when="entropy falls too fast",
    ),
    "kl_cov": PolicyLoss(
        loss=policy_batch.kl_cov,
        choose=policy_batch.choose_kl_cov,
        scope="batch",
        trust_region="|δ| penalty at the tokens of highest covariance",
        importance="token ratio",
        targets="entropy collapse",
        use_when="entropy falls too fast, and leaving tokens out is too coarse",
    ),
    "dro": PolicyLoss(
        loss=policy_token.dro,
        scope="token",
        trust_region="quadratic penalty on δ",
        importance="none",
        targets="ratio blow-up on offline data",
        use_when="data are so old that ratios mean nothing",
    ),
    "m2po": PolicyLoss(
        loss=policy_batch.m2po,
        choose=policy_batch.choose_m2po,
        scope="batch",
        trust_region="budget for the batch mean of δ²",
        importance="token ratio",
        targets="heavy tails of stale ratios",
        use_when="rollouts are many updates old",
    ),
    "decoupled_ppo": PolicyLoss(
        loss=policy_token.decoupled_ppo,
        scope="token",
        trust_region="hard clip around the proximal policy",
        importance="proximal to behaviour, stop-gradient, dropped above a cap",
        targets="clip used up by staleness",
        use_when="asynchronous rollouts, log-probs recomputed on arrival",
    ),
    "topr": PolicyLoss(
        loss=policy_row.topr,
        scope="row",
        trust_region="none for good rows, truncation for bad ones",
        importance="whole-row ratio in [0, 1] on bad rows, stop-gradient",
        targets="bad rows pushed away without end",
        use_when="very stale or offline data with right and wrong answers",
    ),
    "aspo": PolicyLoss(
        loss=policy_token.aspo,
        scope="token",
        trust_region="hard clip for bad tokens, a cap on the weight of good ones",
        importance="token ratio, inverted for good tokens",
        targets="entropy collapse: the probable is rewarded most",
        use_when="vanilla only sharpens what the student already does",
    ),
    "minpro": PolicyLoss(
        loss=policy_row.minpro,
        scope="row",
        trust_region="none; the weight is bounded by its own ratio where the prefix drifted down",
        importance="least prefix ratio times token ratio, stop-gradient",
        targets="prefix bias of token ratios, length trap of products",
        use_when="long answers under staleness",
    ),
    "ctpo": PolicyLoss(
        loss=policy_row.ctpo,
        scope="row",
        trust_region="log of the prefix product clipped to ±c√t",
        importance="prefix product, stop-gradient",
        targets="as minpro, with the whole product",
        use_when="as minpro, drift spread evenly over the row",
    ),
}
