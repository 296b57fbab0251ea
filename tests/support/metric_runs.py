"""Runs that write every metric."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.data.offpolicy import OffPolicy
from slipstream.data.prompts import Prompts, Row
from slipstream.data.spelling import Spelling
from slipstream.engines.respelling import RespellingScorer
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import method_of, supervised_of
from slipstream.pipeline.run import Run
from slipstream.plan.engines import followers_of, snapshots_of
from slipstream.protocols import Engines, GradingSampler, Respelling, TeacherSampler, Unscored
from slipstream.records import Given, Group, Handle
from slipstream.run_dir.writing import RunLog, read_lines
from support.engines import native_learner, native_sampler, native_scorer
from support.tiny_experts import make_mixture
from support.tiny_models import EOS, VOCAB, make_model, wrap

TREE: dict[str, Any] = {
    "student": "tiny",
    "updates": 2,
    "teachers": {"main": {"model": "tiny"}},
    "sampler": {"max_tokens": 6, "group": 2, "slots": 8},
    "loss": {"m": 2},
    "learner": {"batch_size": 8, "lr": 1e-3},
    "schedule": {"kind": "sync"},
    "task": {"reward": "exact"},
}


class EveryOther:
    """Rewards every other answer, in two ways."""

    async def grade(self, group: Group) -> list[Handle]:
        rewards = [{"exact": float(handle.header.index % 2), "math": 0.5} for handle in group]
        return [Handle(replace(h.header, rewards=each), h.body) for h, each in zip(group, rewards, strict=True)]


def prompts(config: Config) -> Prompts:
    rng, teachers = np.random.default_rng(0), sorted(config.teachers) or [""]
    tokens = [rng.integers(2, VOCAB, rng.integers(1, 9)).astype(np.int32) for _ in range(8)]
    rows = [Row(id=str(i), prompt="x") for i in range(8)]
    respelled = tokens if any(teacher.spelling == "own" for teacher in config.teachers.values()) else ()
    routed = [teachers[i % len(teachers)] for i in range(8)]
    made = Prompts(rows, tokens, seed=0, shuffle=False, teachers=routed, respelled=respelled)
    if config.offpolicy_sources:
        answer = np.array([3, 4, EOS], np.int32)
        made.use(
            OffPolicy(
                seed=0,
                supervised=config.sft.source if config.sft else "",
                first=config.supervised_updates * config.groups_per_update,
                mix=config.mix,
                groups=config.groups_per_update,
                updates=config.updates,
                group=1,
                answers=[Given(answer, np.full(3, np.nan, np.float32), "eos")] * 8,
            )
        )
    return made


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a letter for each id of the tiny models."""
    backend = Tokenizer(WordLevel({chr(ord("A") + index): index for index in range(VOCAB)}))
    backend.pre_tokenizer = Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=chr(ord("A") + EOS))


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Sections are completed, and teachers replaced."""
    both = {
        name: {**tree[name], **changes[name]}
        for name in changes
        if isinstance(tree.get(name), dict) and name != "teachers"
    }
    if changes.get("loss", {}).get("kind"):
        both["loss"] = changes["loss"]
    return tree | changes | both


def native(changes: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """The lines of a run of two updates, all of it real and tiny."""
    config = parse(merged(TREE, changes))
    routed, teacher = config.learner.records_router, make_model(seed=2)
    student = wrap(make_mixture("mixtral", dtype=torch.float32) if routed else make_model(seed=1))
    cache, k, method = config.loss.spec.cache, config.loss.spec.k, method_of(config)
    learner = native_learner(
        wrap(student.model),
        method=method,
        supervised=supervised_of(config),
        config=config.learner,
        updates=config.updates,
        teacher_heads=dict.fromkeys(config.teachers, TeacherHead(wrap(teacher).head)) if cache == "hidden" else None,
        snapshots=snapshots_of(config, method),
        follow=followers_of(config),
        cosine_every=config.guards.gac.every if config.guards.gac else 0,
        cosine_limit=config.guards.gac.limit if config.guards.gac else None,
    )
    beside = wrap(teacher) if config.sampler.teacher_replaces else None
    sampler = native_sampler(
        student,
        slots=8,
        stop_ids={EOS},
        teacher=beside,
        router=routed,
        speculation=config.sampler.speculation,
    )
    scorers: dict[str, tuple[Any, ...]] = {
        name: (native_scorer(wrap(teacher), name=name, cache=cache, k=k),) for name in config.teachers
    }
    if any(each.spelling == "own" for each in config.teachers.values()):
        spelling, respelling = Spelling(letters()), Respelling("letters", VOCAB, {EOS: EOS}, 64)
        for name, (own,) in list(scorers.items()):
            scorers[name] = (RespellingScorer(own, name, spelling, spelling, respelling, loss=config.loss.spec),)
    drawing = [native_sampler(wrap(teacher), slots=8, stop_ids={EOS})] if "teacher" in config.offpolicy_sources else []
    engines = Engines(
        samplers=(GradingSampler(sampler, EveryOther()),),
        scorers=scorers or {"": (Unscored(),)},
        teacher_samplers={name: tuple(map(TeacherSampler, drawing)) for name in config.teachers if drawing},
        learner=learner,
        close=lambda: None,
    )
    made = prompts(config)
    with RunLog.create(config, path) as log:
        held_out = {"": [made.at(i) for i in range(config.eval.prompts)]} if config.eval.every else {}
        asyncio.run(Run(config, engines, made, log, held_out=held_out).train())
    for engine in (sampler, learner, *drawing, *(each for pair in scorers.values() for each in pair)):
        engine.close()
    return read_lines(path / "metrics.jsonl")
