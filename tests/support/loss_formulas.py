"""Every distillation loss as a formula over whole distributions, written with plain torch."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import nll_loss
from transformers import PreTrainedModel

from slipstream.config.losses import DISTILLATION_LOSSES, Cache, DistillationLoss
from slipstream.protocols import Sampling
from slipstream.records import Handle, Scored
from support.engines import native_sampler, native_scorer
from support.tiny_models import EOS, logits_of, make_model, make_prompts, wrap

CHOSEN: dict[str, list[dict[str, Any]]] = {
    "reverse_kl_mc": [
        {"m": 3},
        {"m": 3, "advantage": "behavior"},
        {"m": 3, "clip": 0.2},
        {"m": 3, "ratio_cap": 1.5},
        {"m": 3, "importance": False},
        {"m": 3, "baseline": True},
        {"m": 3, "reward_scale": 1.25},
        {"m": 3, "reward_scale": 0.5, "clip": 0.2},
    ],
    "decoupled_ppo": [{"m": 3}, {"m": 2, "advantage": "proximal", "clip": (0.1, 0.3)}, {"advantage": "current"}],
    "m2po": [{"m": 3}, {"m": 2, "budget": 1e-3}],
    "reverse_kl_topk": [
        {"k": 5},
        {"k": 5, "reweight": False},
        {"k": 5, "renormalise": False, "tail": True},
        {"k": 5, "renormalise": False, "detach_mass": True},
    ],
    "reverse_kl": [{}],
    "forward_kl": [{"k": 5}, {"k": 5, "tail": True}, {"k": 5, "renormalise": True}, {"cache": "hidden"}],
    "mopd": [{"k": 5}],
    "eopd": [{"threshold": 3.0}, {"cache": "teacher_topk", "k": 5, "threshold": 1.7, "forward": 0.5}],
    "jsd": [{}, {"cache": "teacher_topk", "k": 5}],
    "uld": [{}],
    "gold": [{}, {"beta": 0.5, "rest": 2.0}],
    "gold_merged": [{}],
    "common_topk": [{"k": 5, "beta": 0.5}, {"k": 5}],
    "k1": [
        {"use": "advantage"},
        *({"use": "advantage", "policy": name} for name in ("cispo", "sapo", "dppo_tv", "aspo")),
    ],
    "abs": [{}, {"use": "advantage"}],
    "k2": [{}, {"loss_max_clamp": 0.5}, {"log_prob_min_clamp": -2.0}],
    "k3": [{}, {"use": "advantage", "clip": 0.1}],
    "k1+": [{}],
    "k3+": [{}],
    "cross_entropy": [{}],
}


def chosen(kind: str, options: Mapping[str, Any]) -> DistillationLoss:
    return DISTILLATION_LOSSES[kind].model_validate({"kind": kind} | dict(options))


class View(NamedTuple):
    """Whole distributions at N trained tokens, as log-probs [N, V], and what was drawn there."""

    now: Tensor
    old: Tensor
    proximal: Tensor
    teacher: Tensor
    draws: Tensor


def at(logp_NV: Tensor, ids_NM: Tensor) -> Tensor:
    return logp_NV.gather(1, ids_NM)


def clip_of(clip: Any) -> tuple[float, float]:
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    return 1 - low, 1 + high


def on_draws(view: View, o: Mapping[str, Any]) -> Tensor:
    p, old, q = (at(x, view.draws) for x in (view.now, view.old, view.teacher))
    scale = o.get("reward_scale", 1.0)  # the learner starts with the weights of `proximal`
    q = q + (scale - 1) * (q - at(view.proximal, view.draws))
    ratio, advantage = (p - old).exp(), (q - (old if o.get("advantage") == "behavior" else p)).detach()
    if o.get("baseline"):  # its gradient, not its value
        advantage = advantage - (advantage.sum(1, keepdim=True) - advantage) / (advantage.shape[1] - 1)
    if o.get("importance") is False:
        return -(advantage * p).mean(1)
    if "ratio_cap" in o:
        return -(ratio.detach().clamp(max=o["ratio_cap"]) * advantage * p).mean(1)  # its gradient, not its value
    if "clip" in o:
        return -torch.minimum(ratio * advantage, ratio.clamp(*clip_of(o["clip"])) * advantage).mean(1)
    return -(ratio * advantage).mean(1)


def around_proximal(view: View, o: Mapping[str, Any]) -> Tensor:
    p, old, prox, q = (at(x, view.draws) for x in (view.now, view.old, view.proximal, view.teacher))
    whose = {"behavior": old, "proximal": prox, "current": p}[o.get("advantage", "behavior")]
    advantage, ratio, weight = (q - whose).detach(), (p - prox).exp(), (prox - old).exp()
    weight = torch.where(weight > 5.0, 0.0, weight)
    return -(weight * torch.minimum(ratio * advantage, ratio.clamp(*clip_of(o.get("clip", 0.2))) * advantage)).mean(1)


def within_budget(view: View, o: Mapping[str, Any]) -> Tensor:
    """The choice is made where the batch came: with the student of then."""
    prox, old, q = (at(x, view.draws) for x in (view.proximal, view.old, view.teacher))
    square, harmful = (prox - old) ** 2, (q - prox) * (prox - old) > 0
    keep = torch.ones_like(harmful)
    for index in torch.where(harmful, square, -1.0).flatten().argsort(descending=True):
        if square[keep].mean() <= o.get("budget", 0.04) or not harmful.flatten()[index]:
            break
        keep.view(-1)[index] = False
    p = at(view.now, view.draws)
    return -(keep * (p - old).exp() * (q - p).detach()).mean(1)


def on_own_best(view: View, o: Mapping[str, Any]) -> Tensor:
    ids = view.old.topk(o["k"], 1).indices
    parts = [at(x, ids) for x in (view.now, view.teacher, view.old)]
    if o.get("tail"):
        parts = [torch.cat([x, (1 - x.exp().sum(1, keepdim=True)).log()], 1) for x in parts]
    elif not o.get("detach_mass"):
        parts = [x - x.logsumexp(1, keepdim=True) for x in parts]
    p, q, old = parts
    if o.get("detach_mass"):
        slope = (p.exp() * (p - q)).detach()
        return (slope * (p - p.detach() + 1)).sum(1)
    if o.get("reweight") is False:
        return -((old.exp() * (q - p)).detach() * p).sum(1)
    return (p.exp() * (p - q)).sum(1)


def on_teachers_best(view: View, o: Mapping[str, Any]) -> Tensor:
    if o.get("cache") == "hidden":
        return (view.teacher.exp() * (view.teacher - view.now)).sum(1)
    ids = view.teacher.topk(o["k"], 1).indices
    p, q = at(view.now, ids), at(view.teacher, ids)
    if o.get("tail"):
        p, q = (torch.cat([x, (1 - x.exp().sum(1, keepdim=True)).log()], 1) for x in (p, q))
    if o.get("renormalise"):
        p, q = (x - x.logsumexp(1, keepdim=True) for x in (p, q))
    return (q.exp() * (q - p)).sum(1)


def between(view: View, o: Mapping[str, Any]) -> Tensor:
    p, q = view.now, view.teacher
    if "k" in o:
        ids = q.topk(o["k"], 1).indices
        p, q = (torch.cat([at(x, ids), (1 - at(x, ids).exp().sum(1, keepdim=True)).log()], 1) for x in (p, q))
    m = ((p.exp() + q.exp()) / 2).log()
    return 0.5 * (q.exp() * (q - m)).sum(1) + 0.5 * (p.exp() * (p - m)).sum(1)


def by_rank(view: View, o: Mapping[str, Any]) -> Tensor:
    p, q = view.now.exp(), view.teacher.exp()
    return sum(abs(p.kthvalue(n, 1).values - q.kthvalue(n, 1).values) for n in range(1, p.shape[1] + 1))  # type: ignore[return-value]


def generalised(view: View, o: Mapping[str, Any]) -> Tensor:
    ids = view.teacher.topk(o["k"], 1).indices
    p, q = at(view.now, ids).exp(), at(view.teacher, ids).exp()
    return (p * (p / q).log() - p + q).sum(1)


def gated(view: View, o: Mapping[str, Any]) -> Tensor:
    p, q = view.now, view.teacher
    if "k" in o:
        ids = q.topk(o["k"], 1).indices
        p, q = (torch.cat([at(x, ids), (1 - at(x, ids).exp().sum(1, keepdim=True)).log()], 1) for x in (p, q))
    unsure = torch.distributions.Categorical(logits=q).entropy() > o["threshold"]
    assert unsure.any() and not unsure.all()
    reverse, forward = (p.exp() * (p - q)).sum(1), (q.exp() * (q - p)).sum(1)
    return torch.where(unsure, reverse + o.get("forward", 1.0) * forward, reverse)


def on_the_emitted(kind: str) -> Callable[[View, Mapping[str, Any]], Tensor]:
    def estimate(view: View, o: Mapping[str, Any]) -> Tensor:
        s, old, t = (at(x, view.draws[:, :1])[:, 0] for x in (view.now, view.old, view.teacher))
        ratio = (s - old).exp()
        if "log_prob_min_clamp" in o:
            s, t = s.clamp(min=o["log_prob_min_clamp"]), t.clamp(min=o["log_prob_min_clamp"])
        k1, k2, k3 = s - t, 0.5 * (s - t) ** 2, (t - s).exp() - 1 - (t - s)
        k3 = k3.clamp(max=10) if o.get("use") == "advantage" else k3  # what is bounded is the value
        found = {"k1": k1, "abs": k1.abs(), "k2": k2, "k3": k3, "k1+": k2, "k3+": k2}[kind]  # by their gradients
        if o.get("use") == "advantage":
            advantage, policy = -found.detach(), o.get("policy", "vanilla")
            if policy == "cispo":
                return -ratio.detach().clamp(0.8, 1.2) * advantage * s
            if policy == "sapo":
                tau = torch.full_like(advantage, 1.05).masked_fill(advantage > 0, 1.0)
                return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
            if policy == "dppo_tv":
                moved = (s.exp() - old.exp()).detach() * advantage.sign()
                return torch.where(moved > 0.2, 0.0, -ratio.detach() * advantage * s)
            gain = torch.minimum(ratio * advantage, ratio.clamp(*clip_of(o.get("clip", 0.2))) * advantage)
            clipped = torch.where(advantage < 0, torch.minimum(-gain, -3 * advantage), -gain)
            flipped = -advantage * (1 / ratio.detach()).clamp(max=3) * s  # by its gradient
            return torch.where(advantage > 0, flipped, clipped) if policy == "aspo" else clipped
        return found.clamp(max=o.get("loss_max_clamp", torch.inf))

    return estimate


FORMULAS: dict[str, Callable[[View, Mapping[str, Any]], Tensor]] = {
    "reverse_kl_mc": on_draws,
    "decoupled_ppo": around_proximal,
    "m2po": within_budget,
    "reverse_kl_topk": on_own_best,
    "reverse_kl": lambda view, o: (view.now.exp() * (view.now - view.teacher)).sum(1),
    "forward_kl": on_teachers_best,
    "mopd": generalised,
    "eopd": gated,
    "jsd": between,
    "uld": by_rank,
    "gold": lambda view, o: between(view, {}),
    "gold_merged": lambda view, o: between(view, {}),
    "common_topk": lambda view, o: between(view, o) if "beta" in o else on_teachers_best(view, {**o, "tail": True}),
    "cross_entropy": lambda view, o: nll_loss(view.now, view.draws[:, 0], reduction="none"),
    **{kind: on_the_emitted(kind) for kind in ("k1", "abs", "k2", "k3", "k1+", "k3+")},
}


@cache
def collected(
    name: str, dtype: torch.dtype, asked: Cache, draws: int, k: int, temperature: float
) -> list[list[Handle]]:
    """Groups that a student drew and a teacher scored: the same for all losses that ask for the same."""

    async def work() -> list[list[Handle]]:
        sampler = native_sampler(wrap(make_model(name, dtype=dtype)), slots=16, stop_ids={EOS})
        sampling = Sampling(max_tokens=9, group=2, draws=draws, best=k if asked == "student_topk" else 0)
        groups = await asyncio.gather(*[sampler.generate(prompt, sampling) for prompt in make_prompts(4)])
        scorer = native_scorer(wrap(teacher_of(dtype)), cache=asked, k=k, temperature=temperature)
        scored = await asyncio.gather(*[scorer.score(group) for group in groups])
        sampler.close()
        scorer.close()
        for group in scored:
            for index, handle in enumerate(group):
                handle.body.rollout.rewards["exact"] = float(index)
        return scored

    return asyncio.run(work())


@cache
def teacher_of(dtype: torch.dtype) -> PreTrainedModel:
    return make_model("llama", seed=2, dtype=dtype)


def groups_for(loss: DistillationLoss, name: str, dtype: torch.dtype) -> list[list[Handle]]:
    return collected(name, dtype, loss.spec.cache, loss.spec.draws, loss.spec.k, loss.temperature)


def distributions(model: PreTrainedModel, samples: Sequence[Scored], temperature: float) -> Tensor:
    """Return the log-probs [N, V] of the whole vocabulary at every token of these samples."""
    return (torch.cat(logits_of(model, samples)) / temperature).log_softmax(-1)


@cache
def drew() -> PreTrainedModel:
    """The student that drew all groups."""
    return make_model("phi", seed=0, dtype=torch.float64)


def likely(model: PreTrainedModel, loss: DistillationLoss, temperature: float) -> Tensor:
    """Distributions of all that was drawn for such a loss, by a model that never moves: computed once."""
    return _likely(model, loss.spec.cache, loss.spec.draws, loss.spec.k, loss.temperature, temperature)


@cache
def _likely(model: PreTrainedModel, asked: Cache, draws: int, k: int, of_teacher: float, temperature: float) -> Tensor:
    groups = collected("phi", torch.float64, asked, draws, k, of_teacher)
    with torch.no_grad():
        return distributions(model, [handle.body for group in groups for handle in group], temperature)


def grads_of(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
