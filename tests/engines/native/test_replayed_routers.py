"""The learner's passes with prescribed experts: they agree with the sampler, and gradients pass through the gates."""

import asyncio
import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from slipstream.config.learner import LearnerConfig, LoraConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.objective import PolicyConfig
from slipstream.engines.native.config import experts_of
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.learning.passes import Passes, at_tokens
from slipstream.engines.native.model import split, with_adapters
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.routers import Choices, choosing, routers_of, together
from slipstream.errors import ModelError
from slipstream.estimators.auxiliary import balance_loss
from slipstream.objective.columns import OLD, REFERENCE
from slipstream.objective.method import Method
from slipstream.protocols import Sampling
from slipstream.records import Batch, Handle, Rollout, Scored, header_of, total
from support.engines import native_learner, native_sampler, student_passes
from support.learners import run, score
from support.tiny_experts import (
    CHOSEN,
    EXPERTS,
    MIXTURES,
    any_experts,
    choices_in,
    dense,
    flipped,
    make_mixture,
    routers_in,
    with_noise,
)
from support.tiny_models import EOS, make_model, make_prompts, wrap
from zoo.families import config_of, make, names

WAYS: dict[str, dict[str, Any]] = {
    "packed": {},
    "small batches": {"token_budget": 40},
    "unpacked": {"packing": False},
    "recomputed": {"checkpointing": True},
}
NOISE = 0.3


def drawn(model: PreTrainedModel, *, count: int = 4) -> list[Handle]:
    async def work() -> list[list[Handle]]:
        sampler = native_sampler(wrap(model), slots=12, stop_ids={EOS}, router=True)
        sampling = Sampling(max_tokens=8, group=3, draws=2, router=True)
        groups = await asyncio.gather(*[sampler.generate(each, sampling) for each in make_prompts(count, longest=6)])
        sampler.close()
        return groups

    return [handle for group in run(work()) for handle in group]


@cache
def noisy_samples(name: str) -> list[Scored]:
    """Responses of a sampler whose routers have noise."""
    return [Scored(rollout=handle.body) for handle in drawn(with_noise(make_mixture(name), NOISE))]


def passes_of(model: PreTrainedModel, router: str, *, lora: LoraConfig | None = None, **options: Any) -> Passes:
    lm = wrap(model)
    if lora is not None:
        lm = with_adapters(lm, lora, seed=7)
    config = LearnerConfig(dtype="float64", lora=lora, **{"router": router} | options)
    return student_passes(lm, config, Ranks(), temperature=1.0, snapshots=2)


def gap(passes: Passes, samples: Sequence[Scored]) -> float:
    """The largest difference between the sampler's log-probs and the learner's."""
    pairs = zip(passes.log_probs(samples), samples, strict=True)
    return max(float((logp_T - torch.from_numpy(sample.rollout.logp)).abs().max()) for logp_T, sample in pairs)


# --- agreement with the sampler -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MIXTURES)
def test_replay_alone_makes_sampler_and_learner_agree_under_noise(name: str, way: str) -> None:
    samples, model = noisy_samples(name), make_mixture(name)
    assert gap(passes_of(model, "replay_rollout", **WAYS[way]), samples) < 1e-6
    if way == "packed":
        assert gap(passes_of(model, "measure"), samples) > 0.1
        assert gap(passes_of(model, "free"), samples) > 0.1


def test_replay_holds_with_adapters() -> None:
    """New adapters change nothing, so the learner still agrees."""
    passes = passes_of(make_mixture("qwen3_moe"), "replay_rollout", lora=LoraConfig(rank=2))
    assert gap(passes, noisy_samples("qwen3_moe")) < 1e-9


def test_stored_versions_replay_and_the_reference_does_not() -> None:
    model, samples = make_mixture("mixtral"), noisy_samples("mixtral")
    passes, free = passes_of(model, "replay_rollout"), passes_of(model, "free")
    for version in (0, OLD, REFERENCE):
        passes.snapshots.take(version)
    with torch.no_grad():
        for parameter in passes.lm.model.parameters():
            parameter.mul_(1.05)
    assert gap(passes, samples) > 0.01
    of_sampler, plain = [torch.from_numpy(sample.rollout.logp) for sample in samples], free.log_probs(samples)
    for version, expected in ((0, of_sampler), (OLD, of_sampler), (REFERENCE, plain)):
        for found, logp_T in zip(passes.log_probs(samples, version), expected, strict=True):
            torch.testing.assert_close(found, logp_T, rtol=0, atol=1e-9)


def test_responses_without_a_record_and_unknown_rows_choose_freely() -> None:
    model, samples = make_mixture("mixtral"), noisy_samples("mixtral")
    without = [replace(each, rollout=replace(each.rollout, router=None, prompt_router=None)) for each in samples]
    unknown = []
    for each in samples:
        found = {name: np.full_like(getattr(each.rollout, name), 255) for name in ("router", "prompt_router")}
        unknown.append(replace(each, rollout=replace(each.rollout, **found)))
    passes, expected = passes_of(model, "replay_rollout"), passes_of(model, "free").log_probs(samples)
    mixed = [*without[:2], *samples[2:]]
    for found, logp_T in zip(passes.log_probs(mixed)[:2], expected, strict=False):
        torch.testing.assert_close(found, logp_T, rtol=0, atol=1e-12)
    for found, logp_T in zip(passes.log_probs(unknown), expected, strict=True):
        torch.testing.assert_close(found, logp_T, rtol=0, atol=1e-12)


def test_responses_whose_prompts_were_routed_differently_share_no_prompt() -> None:
    model, samples = make_mixture("qwen3_moe"), noisy_samples("qwen3_moe")
    first = max(samples, key=lambda each: len(each.rollout.prompt.tokens)).rollout
    twin = replace(first, index=1, prompt_router=(first.prompt_router + 1) % EXPERTS)
    both = [Scored(rollout=first), Scored(rollout=twin)]
    alone = passes_of(model, "replay_rollout", packing=False).log_probs(both)
    together = passes_of(model, "replay_rollout").log_probs(both)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert (alone[0] - alone[1]).abs().max() > 0.01


# --- gradients -------------------------------------------------------------------------------------------------------


def logp_of(model: PreTrainedModel, rollout: Rollout, chosen_TRX: Tensor) -> Tensor:
    """The sum of a response's log-probs, by the written-out mixture."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens])).long()
    logits_TV = dense(model, chosen_TRX)(ids[None, :-1], use_cache=False).logits[0]
    first = len(rollout.prompt.tokens) - 1
    return logits_TV.log_softmax(-1)[first:].gather(1, ids[first + 1 :, None]).sum()


@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_through_the_gates_equal_those_of_the_written_out_mixture(name: str) -> None:
    model = make_mixture(name)
    routers = len(routers_in(model))
    samples = [Scored(rollout=any_experts(each.rollout, routers)) for each in noisy_samples(name)[:4]]
    reference = copy.deepcopy(model)
    for sample in samples:
        both = np.concatenate([sample.rollout.prompt_router, sample.rollout.router])
        logp_of(reference, sample.rollout, torch.from_numpy(both).long()).backward()
    for way in ("unpacked", "recomputed"):
        passes = passes_of(model, "replay_rollout", **WAYS[way])
        for rows, members in passes.micro_batches(samples):
            chosen = [samples[i].rollout for i in members]
            passes.student(rows, lambda h, head, c=chosen: at_tokens(h, head, c, temperatures=[1.0]).sum()).backward()
        for key, parameter in reference.named_parameters():
            found = passes.lm.model.get_parameter(key).grad
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found = torch.zeros_like(parameter) if found is None else found
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=3e-5, msg=lambda m, key=key: f"{key}: {m}")
    assert all(router.weight.grad.abs().max() > 1e-6 for router in routers_in(reference))


# --- whole updates --------------------------------------------------------------------------------------------------


def learner_of(model: PreTrainedModel, **changes: Any) -> NativeLearner:
    policy = changes.pop("policy", None)
    loss = ReverseKLMC(m=2) if policy is None else ReverseKLMC(weight=0.0)
    method = Method(loss=loss, policy=policy, rewards={"right": 1.0} if policy else {})
    config = LearnerConfig(dtype="float64", lr=1e-2, **changes)
    return native_learner(wrap(model), method=method, config=config, updates=9, snapshots=2)


@cache
def batch_of(name: str) -> Batch:
    handles = [Handle(header_of(sample.rollout), sample.rollout) for sample in noisy_samples(name)]
    rewarded = [h.with_header(rewards={"right": float(h.header.index == 0)}) for h in handles]
    groups = [rewarded[i : i + 3] for i in range(0, len(rewarded), 3)]
    return Batch(tuple(score(make_model(seed=2, dtype=torch.float64), groups)), 1)


async def update(learner: NativeLearner, batch: Batch, number: int = 1) -> dict[str, float]:
    batch = replace(batch, update=number)
    await learner.accumulate(batch, total(await learner.prepare(batch)))
    return await learner.step()


@pytest.mark.parametrize("way", ["small batches", "unpacked", "recomputed"])
def test_flips_are_the_share_of_other_sets_and_are_known_without_replay(way: str) -> None:
    batch, shares = batch_of("qwen3_moe"), list[float]()
    for sample in (handle.body for handle in batch.handles):
        ids = np.concatenate([sample.rollout.prompt.tokens, sample.rollout.tokens[:-1]])
        own = choices_in(make_mixture("qwen3_moe"), ids)[len(sample.rollout.prompt.tokens) - 1 :]
        shares += [flipped(own, torch.from_numpy(sample.rollout.router))] * len(sample.rollout.tokens)
    learner = learner_of(make_mixture("qwen3_moe"), router="measure", **WAYS[way])
    found = run(update(learner, batch))
    learner.close()
    assert found["router/flips"] == pytest.approx(sum(shares) / len(shares))
    assert 0.1 < found["router/flips"] < 0.9 and "router/pairs" not in found


def test_replay_removes_the_drift_that_noise_causes() -> None:
    batch, found = batch_of("deepseek_v3"), dict[str, dict[str, float]]()
    for router in ("free", "replay_rollout"):
        learner = learner_of(make_mixture("deepseek_v3"), router=router)
        found[router] = run(update(learner, batch))
        learner.close()
    assert found["free"]["drift/k3_kl"] > 0.01 and found["replay_rollout"]["drift/k3_kl"] < 1e-9
    assert "router/flips" not in found["free"] and found["replay_rollout"]["router/flips"] > 0.1


def test_the_old_policys_experts_stay_while_the_weights_move() -> None:
    """R2: ratios to the old policy come from weights alone. Choices of the first pass return in the later ones."""
    learner, batch = learner_of(make_mixture("mixtral"), router="replay_old", epochs=2), batch_of("mixtral")
    samples = [handle.body for handle in batch.handles]

    async def work() -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        passes, routers = learner.passes, len(routers_in(learner.lm.model))
        free = passes_of(make_mixture("mixtral"), "free").log_probs(samples)
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        before = passes.log_probs(samples)
        kept = copy.deepcopy(learner.passes.routing.old)
        await learner.step()
        for router in routers_in(learner.lm.model):
            router.weight.data.neg_()  # whatever they would choose, they now choose the contrary
        moved = passes.log_probs(samples)
        replayed = []
        for sample in samples:
            chosen = kept[sample.rollout.prompt.number, sample.rollout.index]
            assert chosen.shape[1:] == (routers, CHOSEN)
            plain = copy.deepcopy(learner.lm.model)
            plain.set_attn_implementation("eager")
            for router in routers_in(plain):
                del router.forward
            replayed.append(logp_of(plain, sample.rollout, torch.from_numpy(chosen).long()).detach())
        await learner.prepare(replace(batch, update=2))
        assert any((kept[key] != fresh).any() for key, fresh in passes.routing.old.items())
        return free, before, moved, replayed

    free, before, moved, replayed = run(work())
    learner.close()
    for one, other in zip(free, before, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for logp_T, expected in zip(moved, replayed, strict=True):
        torch.testing.assert_close(logp_T.sum(), expected, rtol=1e-7, atol=1e-6)


def test_with_the_previous_policy_its_experts_are_used() -> None:
    policy = PolicyConfig(loss="vanilla", old="previous")
    learner, batch = learner_of(make_mixture("mixtral"), router="replay_old", policy=policy), batch_of("mixtral")

    async def work() -> tuple[Any, Any]:
        await update(learner, batch)
        for router in routers_in(learner.lm.model):
            router.weight.data.neg_()
        await learner.prepare(replace(batch, update=2))
        expected = learner.passes.experts([h.body for h in batch.handles], OLD)
        return list(learner.passes.routing.old.values()), expected

    old, expected = run(work())
    learner.close()
    plain = choices_in(make_mixture("mixtral"), batch.handles[0].body.rollout.prompt.tokens)[:-1]
    np.testing.assert_array_equal(old[0][: len(plain)], plain.numpy())
    for one, other in zip(old, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# --- the auxiliary loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_balance_loss_and_its_gradient_are_those_of_transformers(name: str) -> None:
    """Over all trained positions at once, however the batch is cut; the coefficient is that of the model's config."""
    batch, model, coefficient = batch_of(name), make_mixture(name), 0.25
    model.config.router_aux_loss_coef = coefficient
    reference, logits = copy.deepcopy(model), [list[Tensor]() for _ in routers_in(model)]
    for rollout in (handle.body.rollout for handle in batch.handles):
        ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens[:-1]])).long()
        last = slice(-len(rollout.tokens), None)
        hooks = [
            router.register_forward_hook(lambda m, args, out, i=i, last=last: logits[i].append(out[0][last]))
            for i, router in enumerate(routers_in(reference))
        ]
        reference(ids[None], use_cache=False)
        for hook in hooks:
            hook.remove()
    joined = tuple(torch.cat(each) for each in logits)
    expected = load_balancing_loss_func(joined, EXPERTS, CHOSEN)
    (coefficient * expected).backward()

    async def work(learner: NativeLearner) -> tuple[dict[str, Any], float]:
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        gradients = {name: p.grad for name, p in learner.lm.model.named_parameters() if p.grad is not None}
        value = (
            learner.measurements.sums["router/balance"].item() if "router/balance" in learner.measurements.sums else 0.0
        )
        return gradients, value

    without = learner_of(model)
    plain, _ = run(work(without))
    for way in ("small batches", "recomputed"):
        learner = learner_of(model, router_aux="model", **WAYS[way])
        found, value = run(work(learner))
        assert value == pytest.approx(expected.item(), rel=1e-6)
        for key, parameter in reference.named_parameters():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[key] - plain[key], own, rtol=1e-4, atol=1e-7)
        learner.close()
    without.close()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(2, 6), st.integers(0, 2**31))
def test_the_balance_loss_is_a_sum_over_tokens_and_equals_the_reference(
    routers: int, tokens: int, experts: int, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = [torch.randn(tokens, experts, generator=rng) for _ in range(routers)]
    chosen = torch.stack([each.topk(1, -1).indices for each in logits], 1)
    share_E = torch.bincount(chosen.flatten(), minlength=experts) / (tokens * routers)
    whole = balance_loss(logits, share_E, n_tokens=tokens)
    parts = [
        balance_loss([each[cut] for each in logits], share_E, n_tokens=tokens) for cut in (slice(1), slice(1, None))
    ]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(whole, load_balancing_loss_func(tuple(logits), experts, 1))


def test_equal_experts_have_the_smallest_balance_loss() -> None:
    """Working: f_e = X/E and P_e = 1/E give E · E · X/E · 1/E = X."""
    share_E = torch.full((EXPERTS,), CHOSEN / EXPERTS)
    assert balance_loss([torch.zeros(4, EXPERTS)], share_E, n_tokens=4) == pytest.approx(CHOSEN)


# --- the proof at the start -----------------------------------------------------------------------------------------


UNPROVEN = {
    **dict.fromkeys(["jamba", "jetmoe", "llama4_text"], "an expert that they do not choose themselves gets no weight"),
    **dict.fromkeys(["doge", "gemma4_text", "longcat_flash", "phimoe", "zaya"], "they call no topk over all experts"),
}
"""Families whose replay cannot be proven, and what the refusal says."""


def test_every_family_with_experts_is_proven_or_refused_by_name(subtests: pytest.Subtests) -> None:
    """One test, because only building every family shows which of them have experts."""
    for family in (name for name in names() if "," not in name):
        if not experts_of(config := config_of(family)):
            continue
        with subtests.test(family):
            model = make(family, dtype=torch.float32)
            text = config.get_text_config().model_type
            if (why := UNPROVEN.get(text, UNPROVEN.get(family))) is None:
                assert routers_of(split("tiny", model), field="learner.router").chosen < experts_of(model.config)
                continue
            name = type(model).__name__
            line = f"tiny: the routers of {name} cannot be recorded and replayed: {why}: drop learner.router"
            with pytest.raises(ModelError, match=re.escape(line)):
                routers_of(split("tiny", model), field="learner.router")


def test_scores_are_needed_for_the_balance_loss_alone() -> None:
    routers_of(split("tiny", make("granitemoe", dtype=torch.float32)), field="learner.router")
    with pytest.raises(ModelError, match=r"they do not return a score of each expert: drop learner.router_aux"):
        routers_of(split("tiny", make("granitemoe", dtype=torch.float32)), field="learner.router_aux", logits=True)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_router_that_sorts_once_more_is_refused(name: str) -> None:
    model = make_mixture(name)
    for router in routers_in(model):

        def own(hidden: Tensor, forward: Any = router.forward) -> Any:
            with choosing(None):
                torch.topk(hidden.new_zeros(len(hidden), EXPERTS), CHOSEN)
                logits, _, _ = found = forward(hidden)
                ids = logits.argsort(-1, descending=True)[:, :CHOSEN]
            return found[0], found[1], ids

        router.forward = own
    with pytest.raises(ModelError, match="they return other experts than those that topk chose: drop learner.router"):
        routers_of(wrap(model), field="learner.router")


def test_models_that_use_all_experts_have_nothing_to_replay() -> None:
    model = make_mixture("mixtral")
    for router in routers_in(model):
        router.top_k = EXPERTS
    with pytest.raises(ModelError, match="every token uses all experts: drop learner.router"):
        routers_of(wrap(model), field="learner.router")


def test_outside_of_a_recorded_pass_a_model_is_as_it_was() -> None:
    model = make_mixture("deepseek_v3")
    lm, ids = wrap(model), torch.arange(2, 12)[None]
    routers, plain = routers_of(lm, field="learner.router"), model(ids).logits
    choices = Choices(routers)
    with choosing(choices):
        recorded = lm.model(ids).logits
    assert torch.equal(lm.model(ids).logits, plain) and torch.equal(recorded, plain)
    np.testing.assert_array_equal(together(choices.used).numpy(), choices_in(model, ids[0]).numpy())
