"""Episodes of several turns by a scripted policy: what is recorded, what stays the same, what counts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.config.objective import PolicyConfig, ReferenceConfig
from slipstream.engines.weights import export_weights
from slipstream.estimators.tables.correction import PRESETS
from slipstream.objective.method import Method
from slipstream.protocols import Sampling
from slipstream.records import Batch, Handle, Prompt, Rollout, Scored, header_of, total
from support import tabular_engines as toy
from support.engines import native_learner, native_scorer
from support.tiny_models import EOS, VOCAB, ByHand, littered, make_model, make_prompts, stitched, wrap

SCRIPT = ((4, 3), (1, 5), (6, 1), (3, 2))
"""At most so many tokens are sampled in a turn, and so many observed after it."""
SAMPLING = Sampling(max_tokens=1, draws=2)


@dataclass
class Episode:
    rollout: Rollout
    drawn: list[int]
    """In which step of the sampler each of its sampled tokens was drawn."""


def play(
    models: Sequence[PreTrainedModel],
    *,
    publishes: Sequence[int] = (),
    episodes: int = 3,
    dtype: str = "float32",
    sampling: Sampling = SAMPLING,
) -> list[Episode]:
    """The script, for several prompts at a time; before these steps the next model's weights come in."""
    prompts, clock = make_prompts(episodes), 0

    async def one(sampler: ByHand, prompt: Prompt) -> Episode:
        rng = np.random.default_rng(prompt.number)
        parts, drawn, tokens = list[Any](), list[int](), prompt.tokens
        for most, observed in SCRIPT:
            began = clock
            asked = replace(prompt, tokens=tokens, offset=len(drawn), first=1)
            (handle,) = await sampler.generate(asked, replace(sampling, max_tokens=most))
            seen = rng.integers(2, VOCAB, observed + prompt.number).astype(np.int32)
            parts += [handle.body, seen]
            drawn += range(began, began + len(handle.body.tokens))
            tokens = np.concatenate([tokens, handle.body.tokens, seen])
        return Episode(stitched(prompt, 1, parts), drawn)

    async def main() -> list[Episode]:
        nonlocal clock
        sampler, loaded = ByHand(wrap(models[0]), slots=16, stop_ids={EOS}), []
        running = [asyncio.create_task(one(sampler, prompt)) for prompt in prompts]
        while not all(task.done() for task in running):
            for _ in range(5):  # who has an answer asks for the next turn
                await asyncio.sleep(0)
            for version, step in enumerate(publishes, 1):
                if step == clock:
                    weights = export_weights(models[version], dtype, version=version)
                    loaded.append(asyncio.create_task(sampler.publish(weights, "keep")))
            clock += 1
            await sampler.step()
        found = await asyncio.gather(*running)
        await sampler.finish(*loaded)
        sampler.close()
        return found

    return asyncio.run(main())


@torch.no_grad()
def forced(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """Log-probs [T, V] of a full forward over the stitched row."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
    return model(ids[None]).logits[0, len(rollout.prompt.tokens) - 1 : -1].log_softmax(-1)


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_what_the_learner_says_of_the_stitched_row() -> None:
    """Calls that prefill what was observed, and one packed pass over it all; three episodes beside one another."""
    model = make_model("phi")
    samples = [Scored(rollout=episode.rollout) for episode in play([model])]
    learner = native_learner(wrap(model), method=Method(loss=ReverseKLMC(m=2)), config=LearnerConfig(), updates=1)
    for sample, logp_T in zip(samples, learner.passes.log_probs(samples), strict=True):
        mask = sample.rollout.loss_mask
        assert 0 < mask.sum() < len(mask) and set(sample.rollout.turn[mask]) == {0, 1, 2, 3}
        np.testing.assert_allclose(sample.rollout.logp[mask], logp_T[torch.from_numpy(mask)], rtol=0, atol=1e-5)
    learner.close()


@pytest.mark.parametrize("seed", range(8))
def test_every_token_of_every_turn_knows_its_version_exactly(seed: int) -> None:
    """Weights come in between turns and inside of them, at random moments; each draw is of those that it names."""
    models = [make_model("phi", seed=seed) for seed in range(4)]
    publishes = sorted(np.random.default_rng(seed).choice(12, 3, replace=False).tolist())
    inside = 0
    for episode in play(models, publishes=publishes):
        rollout = episode.rollout
        versions, turns = (each[rollout.loss_mask] for each in (rollout.versions, rollout.turn))
        assert versions.tolist() == [sum(at <= step for at in publishes) for step in episode.drawn]
        assert (rollout.versions[~rollout.loss_mask] == -1).all()
        inside += int(((np.diff(versions) > 0) & (np.diff(turns) == 0)).sum())
        for version in np.unique(versions):
            full = forced(models[version], rollout)[torch.from_numpy(rollout.loss_mask)]
            expected, at = full.gather(1, torch.from_numpy(rollout.actions).long()).numpy(), versions == version
            np.testing.assert_allclose(rollout.action_logp[at], expected[at], rtol=0, atol=1e-5)
    assert inside or seed != 0


# --- one response, however it was made --------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 11), max_size=4, unique=True).map(sorted))
def test_a_response_of_several_calls_is_the_same_record_to_the_bit(seed: int, cuts: list[int]) -> None:
    """But for its turns. On the toy, whose arithmetic is the same whatever came before."""
    sampler = toy.ToySampler(toy.random_table(7, seed=1))
    prompt = Prompt(id="p", number=0, tokens=np.array([3], np.int32), seed=seed)
    asked = Sampling(max_tokens=12, group=3, draws=4, top_p=0.9, keep_mask=True)
    for handle in asyncio.run(sampler.generate(prompt, asked)):
        whole, parts = handle.body, list[Rollout]()
        for start, stop in pairwise([0, *cuts, 12]):
            if start < len(whole.tokens):
                tokens = np.concatenate([prompt.tokens, whole.tokens[:start]])
                again = replace(prompt, tokens=tokens, offset=start, first=whole.index)
                (part,) = asyncio.run(sampler.generate(again, replace(asked, max_tokens=stop - start, group=1)))
                parts.append(part.body)
        made = stitched(prompt, whole.index, parts)
        for name in ("tokens", "versions", "logp", "loss_mask", "actions", "action_logp"):
            np.testing.assert_array_equal(getattr(made, name), getattr(whole, name))
        np.testing.assert_array_equal(made.kept.ids, whole.kept.ids)  # type: ignore[union-attr]
        assert made.turn.tolist() == [turn for turn, part in enumerate(parts) for _ in part.tokens]


@pytest.mark.parametrize("cuts", [[1], [11], [5, 6], [2, 4, 9]])
def test_a_response_of_several_calls_has_the_same_draws_to_the_bit(cuts: list[int]) -> None:
    """By a real model: its log-probs are as close as reading a prefix and writing it are."""
    model, prompt = make_model("phi", dtype=torch.float64), make_prompts(1)[0]

    async def ask(sampler: ByHand, prompt: Prompt, most: int) -> Rollout:
        job = asyncio.create_task(sampler.generate(prompt, replace(SAMPLING, max_tokens=most, draws=3)))
        ((handle,),) = await sampler.finish(job)
        found: Rollout = handle.body
        return found

    async def main() -> tuple[Rollout, Rollout]:
        sampler = ByHand(wrap(model), slots=4, stop_ids=set())
        whole, parts = await ask(sampler, prompt, 12), []
        for start, stop in pairwise([0, *cuts, 12]):
            tokens = np.concatenate([prompt.tokens, *[part.tokens for part in parts]])
            parts.append(await ask(sampler, replace(prompt, tokens=tokens, offset=start), stop - start))
        sampler.close()
        return whole, stitched(prompt, 0, parts)

    whole, made = asyncio.run(main())
    for name in ("tokens", "versions", "loss_mask", "actions"):
        np.testing.assert_array_equal(getattr(made, name), getattr(whole, name))
    np.testing.assert_allclose(made.action_logp, whole.action_logp, rtol=0, atol=1e-12)


# --- what counts ------------------------------------------------------------------------------------------------------


NOTHING = ReverseKLMC(m=2, weight=0.0)
METHODS: dict[str, dict[str, Any]] = {
    "draws": {"loss": ReverseKLMC(m=2)},
    "draws, rewards, a reference, corrections": {
        "loss": ReverseKLMC(m=2, weight=0.5),
        "policy": PolicyConfig(),
        "reference": ReferenceConfig(weight=0.1),
        "correction": PRESETS["decoupled_token_is"],
    },
    "rows": {"loss": NOTHING, "policy": PolicyConfig(loss="gspo", advantage="rloo")},
    "turns": {
        "loss": NOTHING,
        "policy": PolicyConfig(loss="reinforce"),
        "correction": replace(PRESETS["bypass_pg_is"], is_level="turn"),
    },
    "turns in the loss": {"loss": NOTHING, "policy": PolicyConfig(loss="st_ppo")},
}


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8, "keep_mask": True}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_what_was_observed_leaves_no_trace(name: str, cut: dict[str, Any]) -> None:
    """Garbage in every masked row of every field, and other ids after the last sampled token: not a bit changes."""
    model, teacher = (make_model("phi", seed=seed) for seed in range(2))
    played = [episode.rollout for episode in play([model], episodes=4, sampling=replace(SAMPLING, **cut))]
    found, rng = [], np.random.default_rng(0)
    for litter in (False, True):
        handles = []
        for i, rollout in enumerate(played):
            # one prompt, so that the episodes are a group
            asked = replace(rollout.prompt, number=0)
            rollout = replace(rollout, prompt=asked, index=i, episode=i, rewards={"exact": float(i % 2)})
            if litter:
                after = np.arange(len(rollout.tokens)) > np.flatnonzero(rollout.loss_mask)[-1]
                assert after.any()
                ids = np.where(after, rng.integers(2, VOCAB, len(after)), rollout.tokens)
                rollout = littered(Scored(rollout=replace(rollout, tokens=ids)), seed=i).rollout
            handles.append(Handle(header_of(rollout), rollout))

        async def work(handles: list[Handle] = handles) -> Any:
            scorer = native_scorer(wrap(teacher))
            learner = native_learner(
                wrap(model),
                method=Method(rewards={"exact": 1.0}, **METHODS[name]),
                config=LearnerConfig(token_budget=60),
                updates=1,
                snapshots=1,
            )
            batch = Batch((tuple(await scorer.score(handles)),), 1)
            await learner.export()
            await learner.accumulate(batch, total(await learner.prepare(batch)))
            gradients = [p.grad.clone() for p in learner.lm.model.parameters() if p.grad is not None]
            metrics = await learner.step()
            scorer.close()
            learner.close()
            return gradients, metrics

        found.append(asyncio.run(work()))
    (gradients, metrics), (its_gradients, its_metrics) = found
    assert metrics == its_metrics
    assert gradients and all(torch.equal(a, b) for a, b in zip(gradients, its_gradients, strict=True))
    assert any(gradient.any() for gradient in gradients)
