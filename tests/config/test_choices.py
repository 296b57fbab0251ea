"""Everything that a config can choose of corrections, advantages, policy losses and the reference really trains.

Each choice is a config of its own, read as a user's is, and makes two updates of one tiny student on answers that it
has drawn before, the second time one version late.
"""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from slipstream.config.file import parse
from slipstream.config.objective import CorrectionConfig, PolicyConfig, ReferenceConfig
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.estimators.tables.correction import LOSSES_OF, PRESETS, RS_MODES
from slipstream.objective.method import method_of
from slipstream.plan.engines import snapshots_of
from slipstream.protocols import GradingSampler, Sampling
from slipstream.records import Batch, Group, Handle, total
from support.engines import native_learner, native_sampler
from support.tiny_models import EOS, make_model, make_prompts, wrap

TREE: dict[str, Any] = {
    "student": "tiny",
    "updates": 2,
    "sampler": {"max_tokens": 8, "group": 3},
    "loss": {"weight": 0.0},
    "learner": {"batch_size": 12, "lr": 1e-3},
    "schedule": {"kind": "step_off", "k": 1},
    "policy": {"loss": "vanilla"},
    "task": {"reward": ["exact", "math"]},
}


def choices(section: Any, setting: str) -> list[str]:
    """The names that a setting takes, left out not counted."""
    annotation = section.model_fields[setting].annotation
    literals = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    return [name for literal in literals for name in get_args(literal)]


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    for loss in choices(PolicyConfig, "loss"):
        yield f"policy.loss = {loss}", {"policy": {"loss": loss}}
    for name in choices(PolicyConfig, "aggregation"):
        yield f"policy.aggregation = {name}", {"policy": {"aggregation": name}}
    for name in choices(PolicyConfig, "advantage"):
        beside = {"gae": {"critic": {}}, "grpo_turn": {"environment": {"use": "table"}}}.get(name, {})
        yield f"policy.advantage = {name}", {"policy": {"loss": "reinforce", "advantage": name}, **beside}
    truncated = {"advantage": "gae", "advantage_options": {"rho": 1.0, "c": 1.0}}
    yield "policy.advantage_options.rho", {"policy": truncated, "critic": {"bootstrap": True}}
    for old in choices(PolicyConfig, "old"):
        yield f"policy.old = {old}", {"policy": {"old": old}}
    for kind in choices(PolicyConfig, "centre"):
        centred: dict[str, Any] = {"policy": {"loss": "reinforce", "centre": kind, "centre_size": 4}}
        if kind == "support":
            centred = {
                "policy": {"loss": "reinforce", "centre": kind},
                "sampler": {"max_tokens": 8, "group": 3, "top_k": 5, "keep_mask": True},
            }
        yield f"policy.centre = {kind}", centred
        yield f"policy.centre = {kind}, weighed", {"correction": {"preset": "bypass_pg_token_icepop"}, **centred}
    averaged = {"policy": {"old": "average"}, "correction": {"preset": "decoupled_token_is"}}
    yield "policy.old = average, decoupled", averaged
    for name in ("optimal_token_baseline", "opob", "opob_exact"):
        weighed = {"correction": {"preset": "bypass_pg_is"}, "policy": {"loss": "reinforce", "advantage": name}}
        yield f"policy.advantage = {name}, weighed", weighed
    several = {"advantage": "optimal_token_baseline", "advantage_options": {"multi_turn": True}}
    yield "policy.advantage_options.multi_turn", {"policy": several}
    for preset in choices(CorrectionConfig, "preset"):
        yield f"correction.preset = {preset}", corrected(preset)
    for level in choices(CorrectionConfig, "is_level"):
        for preset in ("decoupled_geo_rs", "bypass_pg_is"):
            yield f"correction.is_level = {level}, {preset}", corrected(preset, is_level=level)
    rejection = {mode: 1.5 if mode.endswith("k1") else 9.0 for mode in RS_MODES}
    yield "correction.rs, every mode", corrected("decoupled_geo_rs", rs=rejection)
    for name, reference in references():
        yield f"reference.{name}", {"reference": {"weight": 0.1, **reference}}
    for control in choices(ReferenceConfig, "control"):
        steering = {"target": 1e-4, "horizon": 60.0} if control == "adaptive" else {}
        for into in choices(ReferenceConfig, "into"):
            reference = {"weight": 0.1, "into": into, "control": control, **steering}
            yield f"reference.control = {control}, in the {into}", {"reference": reference}


def corrected(preset: str, **settings: Any) -> dict[str, Any]:
    (loss, *_) = LOSSES_OF[PRESETS[preset].loss or "ppo_clip"]
    return {"policy": {"loss": loss}, "correction": {"preset": preset, **settings}}


def references() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every estimate where it has an effect."""
    for kind in choices(ReferenceConfig, "estimate"):
        if not kind.endswith("+"):
            yield f"estimate = {kind}", {"estimate": kind}
            yield f"estimate = {kind}, in the reward", {"estimate": kind, "into": "reward"}
        if kind != "k1":
            yield f"estimate = {kind}, as it is", {"estimate": kind, "importance": False}


CHOICES = dict(configs())


class Spelled:
    """Rewards answers for some of their tokens: two rewards that differ from answer to answer."""

    async def grade(self, group: Group) -> list[Handle]:
        tokens = [handle.body.tokens for handle in group]
        rewards = [{"exact": float(t[0] % 2), "math": float((t % 3 == 0).mean())} for t in tokens]
        return [Handle(replace(h.header, rewards=each), h.body) for h, each in zip(group, rewards, strict=True)]


@cache
def rolled(sampling: Sampling) -> list[list[Handle]]:
    """Eight groups that the first version has drawn."""

    async def work() -> list[list[Handle]]:
        sampler = native_sampler(wrap(student()), slots=32, stop_ids={EOS})
        generate = GradingSampler(sampler, Spelled()).generate
        groups = await asyncio.gather(*[generate(prompt, sampling) for prompt in make_prompts(8)])
        sampler.close()
        return groups

    return asyncio.run(work())


@cache
def student() -> Any:
    return make_model(seed=1)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_trains(choice: str) -> None:
    config = parse({**TREE, **CHOICES[choice]})
    groups = rolled(rollout_sampling(config))
    learner = native_learner(
        wrap(student()),
        method=method_of(config),
        config=config.learner,
        updates=config.updates,
        snapshots=snapshots_of(config, method_of(config)),
    )

    async def update(number: int) -> dict[str, float]:
        await learner.export()
        batch = Batch(tuple(groups[4 * number - 4 : 4 * number]), number)
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        return await learner.step()

    async def work() -> list[dict[str, float]]:
        return [await update(1), await update(2)]

    first, second = asyncio.run(work())
    learner.close()
    for found in (first, second):
        assert all(math.isfinite(value) for value in found.values()), found
    assert first["grad_norm"] > 0
    moved = [not torch.equal(a, b) for a, b in zip(learner.lm.model.parameters(), student().parameters(), strict=True)]
    assert all(moved)


def test_every_choice_of_every_setting_is_among_them() -> None:
    """A choice that is added to a config is trained here, or this test fails."""
    for section, name, settings in (
        ("policy", PolicyConfig, ("loss", "advantage", "aggregation", "old")),
        ("correction", CorrectionConfig, ("preset", "is_level")),
        ("reference", ReferenceConfig, ("estimate", "into", "control")),
    ):
        for setting in settings:
            given = {str(tree.get(section, {}).get(setting)) for tree in CHOICES.values()}
            default = name.model_fields[setting].default
            assert set(choices(name, setting)) <= given | {default}, f"{section}.{setting}"
