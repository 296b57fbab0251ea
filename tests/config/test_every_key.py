"""Every setting does something: another value of it changes the plan, or what a miniature training finds.

What neither can show has a consumer that is named here, and that reads it.
"""

import ast
import asyncio
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo
from transformers import LlamaConfig

import slipstream
from slipstream.config.file import fields, parse, read, to_toml
from slipstream.engines.sampling_options import eval_sampling
from slipstream.errors import ConfigError
from slipstream.pipeline.schedules import schedule_of
from slipstream.plan.plan import Plan, plan
from slipstream.protocols import Metrics, draw_after_prefix
from slipstream.records import Batch, Handle, Prompt, given_group, total
from slipstream.runtimes.build import OwnTeacherSampler, build_learner, build_sampler, build_scorer
from support.tiny_experts import save_mixture

SOURCE = Path(slipstream.__file__).parent
BASE = """
student = "builtin:student"
updates = 3
[teachers.main]
model = "builtin:teacher"
[data]
limit = 24
eval = "builtin:arithmetic"
[task]
reward = "exact"
[eval]
every = 1
prompts = 4
[sampler]
max_tokens = 8
group = 2
[learner]
batch_size = 8
lr = 1e-3
[loss]
m = 2
[runtime]
kind = "inline"
device = "cpu"
"""
ITSELF = "teachers.main.model=self teachers.main.context={prompt}{ground_truth}"
TOOLS = (
    "student=builtin:tool_student teachers.main.model=builtin:tool_teacher data.train=builtin:table "
    "data.eval=builtin:table sampler.max_tokens=150"
)
JUDGE = "task.reward=judge task.judge.base_url=http://127.0.0.1:1/v1 task.judge.model=m task.judge.prompt={response}"
STEERED = "reference.control=adaptive reference.target=0.001 reference.horizon=10"
WITH = {
    "policy.reward_weights": 'policy.loss=vanilla policy.advantage=gdpo task.reward=["exact","math"]',
    "policy.variance_": "policy.loss=r2vpo policy.options={variance_coef=2.0} policy.variance_target=0.1 "
    "learner.epochs=2",
    "policy.centre": "policy.loss=reinforce",
    "policy.centre_size": "policy.loss=reinforce policy.centre=draws loss.kind=forward_kl",
    "policy.": "policy.loss=vanilla",
    "critic.warmup": "policy.advantage=gae critic.lr=0.01",
    "critic.backbone_lr": "policy.advantage=gae critic.model=builtin:student",
    "critic.dtype": "policy.advantage=gae critic.model=builtin:student",
    "critic.lora.": "policy.advantage=gae critic.model=builtin:student critic.lora.rank=2",
    "critic.": "policy.advantage=gae critic.warmup=1",
    "correction.ctpo_clip": "policy.loss=vanilla correction.preset=decoupled_token_is correction.is_level=cumulative",
    "correction.verl_compat": "policy.loss=vanilla correction.preset=decoupled_geo_rs "
    "correction.rs={seq_mean_k1=[0.9,1.3]}",
    "correction.": "policy.loss=vanilla correction.preset=decoupled_token_is",
    "reference.target": f"policy.loss=vanilla reference.weight=0.1 learner.epochs=2 {STEERED}",
    "reference.horizon": f"policy.loss=vanilla reference.weight=0.1 {STEERED}",
    "reference.": "policy.loss=vanilla reference.weight=0.1",
    "freshness.m": "freshness.weight=freshness loss.kind=forward_kl",
    "freshness.normalise_by": "freshness.weight=freshness sampler.max_tokens=30",
    "freshness.apply_to": "freshness.weight=freshness policy.loss=vanilla",
    "freshness.": "freshness.weight=freshness",
    "sampler.teacher_replaces": "loss.kind=forward_kl",
    "sampler.fusion.difficulty": "sampler.fusion.alpha=0.5 data.order=adaptive",
    "sampler.fusion.": "sampler.fusion.alpha=0.5",
    "sampler.keep_mask": "sampler.top_k=5 loss.importance=false",
    "sampler.speculation.": "sampler.speculation.tokens=3",
    "sampler.server.": "sampler.engine=server sampler.server.url=http://127.0.0.1:1 sampler.server.folder=/tmp"
    " loss.m=1",
    "loss.tail:reverse_kl_topk": "loss.renormalise=false",
    "loss.detach_mass": "loss.renormalise=false",
    "loss.clip:k": "loss.use=advantage",
    "loss.clip:decoupled_ppo": "learner.epochs=2",
    "loss.dual_clip": "loss.use=advantage",
    "loss.policy": "loss.use=advantage",
    "loss.token_options": "loss.tokens=first",
    "sft.loss.token_options": "sft.updates=1 sft.loss.tokens=first",
    "loss.k:jsd": "loss.cache=teacher_topk",
    "loss.forward:eopd": "loss.threshold=0.0",
    "loss.k:common_topk": "teachers.main.model=builtin:pair_teacher teachers.main.spelling=own",
    "loss.rest:gold_merged": "teachers.main.model=builtin:pair_teacher teachers.main.spelling=own",
    "loss.rest:gold": "teachers.main.model=builtin:pair_teacher teachers.main.spelling=own",
    "loss.k:eopd": "loss.cache=teacher_topk",
    "sft.loss.k:jsd": "sft.updates=1 sft.loss.cache=teacher_topk",
    "sft.loss.rest:gold": "sft.updates=1 loss.m=1 teachers.main.model=builtin:pair_teacher teachers.main.spelling=own",
    "sft.cache": "sft.source=teacher sft.updates=1",
    "sft.path": "sft.source=file sft.path=given.jsonl sft.updates=1",
    "sft.": "sft.updates=1",
    "data.response": "data.train=rows.jsonl sft.updates=1 data.response=prompt",
    "mix.path": "mix.source=file mix.path=given.jsonl loss.kind=forward_kl sampler.group=1",
    "mix.over": "mix.source=data mix.final=0.1 loss.kind=forward_kl sampler.group=1",
    "mix.": "mix.source=data loss.kind=forward_kl sampler.group=1",
    "learner.lora.": "learner.lora.rank=2",
    "learner.router": "student=mixture",
    "learner.quantised": "sampler.quantisation=int8",
    "learner.perturbation.": "loss.kind=k1 loss.use=advantage learner.perturbation.std=0.02",
    "guards.gac.every": "guards.gac.below=0.5",
    "environment.sandbox": f"{TOOLS} environment.use=python environment.sandbox=http://127.0.0.1:1",
    "environment.gateway.listen": f"{TOOLS} environment.gateway.listen=127.0.0.1:8008",
    "environment.gateway.": f'{TOOLS} environment.sandbox="none" environment.gateway.command=ls',
    "environment.": f"{TOOLS} environment.use=table",
    "task.format.": 'task.reward=["exact","format"]',
    "task.overlong.": 'task.reward=["exact","overlong"] task.overlong.buffer=4',
    "task.model.": "task.reward=model task.model.path=graders/rm",
    "task.judge.key": f"{JUDGE} task.judge.key=mark",
    "task.judge.": f"{JUDGE} task.judge.pattern=(.)",
    "task.sandbox": "task.reward=./rewards.py:runs task.sandbox=http://127.0.0.1:1",
    "data.teacher_key": "data.train=rows.jsonl teachers.other.model=builtin:teacher",
    "data.weights": 'data.train={a="rows.jsonl",b="builtin:arithmetic"}',
    "data.weights_temperature": 'data.train={a="rows.jsonl",b="builtin:arithmetic"}',
    "data.deduplicate": "data.train=rows.jsonl",
    "data.order": "data.train=rows.jsonl",
    "data.curriculum.column": "data.train=rows.jsonl data.order=curriculum data.curriculum.column=easy",
    "data.curriculum.epochs": "data.train=rows.jsonl data.order=curriculum data.curriculum.column=easy",
    "data.where": "data.train=rows.jsonl",
    "data.eval_where": "data.eval=rows.jsonl",
    "data.prompt": "data.train=rows.jsonl",
    "data.answer": "data.train=rows.jsonl",
    "data.template": "data.train=rows.jsonl",
    "teachers.NAME.key": "data.train=rows.jsonl teachers.other.model=builtin:teacher",
    "teachers.NAME.follow.copy_every": f"{ITSELF} teachers.main.follow.copy_every=2",
    "teachers.NAME.ends": 'sampler.stop=["<pad>"]',
    "teachers.NAME.relabel": f"{ITSELF} teachers.main.follow.copy_every=2",
    "teachers.NAME.follow.": f"{ITSELF} teachers.main.follow.ema=0.9",
    "sampler.top_": "loss.importance=false",
    "sampler.min_p": "loss.importance=false",
    "task.reward": "task.reward=none eval.every=0 eval.prompts=200 data.eval=none",
    "runtime.device": "runtime.device=auto",
    "runtime.clock": "runtime.kind=inline",
    "runtime.costs": "runtime.kind=inline runtime.clock=modelled",
    "schedule.on_old": "schedule.max_lag=4",
    "reuse.order": "reuse.times=2",
    "reuse.max_lag": "reuse.times=2",
    "reuse.gigabytes": "reuse.times=2",
    "reuse.": "reuse.order=freshness",
    "schedule.mixture": "data.train=rows.jsonl",
    "schedule.tau_max": "schedule.tau=auto",
    "schedule.publish_max": "schedule.tau=auto schedule.publish_every=auto eval.every=4",
}
"""Settings that make others legal, by the beginning of their names."""


def named(line: str) -> str:
    """The same setting of one of several environments."""
    for source in ("data.train", "data.eval"):
        line = line.replace(f"{source}=builtin:table", f'{source}={{main="builtin:table"}}')
    return line.replace("environment.", "environments.main.")


WITH |= {
    start.replace("environment.", "environments.NAME."): named(line)
    for start, line in WITH.items()
    if start.startswith("environment.")
}
ENDPOINT = "teachers.main.base_url=http://127.0.0.1:1/v1 loss.kind=forward_kl"
WITH |= {f"teachers.NAME.{name}": ENDPOINT for name in ("tokenizer", "api_key_env", "max_logprobs", "concurrency")}
WITH |= {"teachers.NAME.timeout": ENDPOINT, "teachers.NAME.noise": ENDPOINT}

OTHER = {
    "student": "builtin:teacher",
    "data.train": "rows.jsonl",
    "data.split": "eval",
    "data.eval": "rows.jsonl",
    "data.eval_split": "train",
    "data.limit": "10",
    "data.where": '{level="main",easy=[1,3]}',
    "data.eval_where": "{easy=2}",
    "data.teacher_key": "level",
    "data.weights": "{a=1.0,b=9.0}",
    "data.weights_temperature": "9.0",
    "data.order": "curriculum data.curriculum.column=easy",
    "data.curriculum.column": "hard",
    "data.prompt": "question",
    "data.answer": "question",
    "data.template": "A{question}",
    "sampler.max_length": "150",
    "sampler.max_tokens": "20",
    "sampler.group": "4",
    "sampler.top_k": "5",
    "sampler.teacher_replaces": "3",
    "sampler.fusion.updates": "9",
    "sampler.speculation.tokens": "5",
    "sampler.stop": '["<pad>"]',
    "sampler.replicas": "2",
    "sampler.server.url": "http://127.0.0.1:2",
    "sampler.server.folder": "/var/tmp",
    "sampler.server.api_key_env": "SLIPSTREAM_TEST_KEY",
    "teachers.NAME.replicas": "2",
    "loss.m": "4",
    "loss.k": "5",
    "loss.kind": "abs",
    "loss.threshold": "0.0",
    "loss.loss_max_clamp": "0.01",
    "loss.log_prob_min_clamp": "-1.0",
    "loss.dual_clip": "1.0001",
    "loss.weight_cap": "0.5",
    "loss.budget": "100.0",
    "loss.clip": "0.001",
    "loss.ratio_cap": "1.0",
    "loss.baseline": "true",
    "policy.loss": "reinforce",
    "policy.options": "{clip_high=0.001}",
    "loss.token_options": "{share=0.5}",
    "sft.loss.token_options": "{share=0.5}",
    "policy.aggregation": "token-sum",
    "policy.advantage_options": "{norm=false}",
    "policy.variance_target": "0.2",
    "policy.variance_step": "0.1",
    "policy.reward_weights": "{exact=0.5}",
    "reference.weight": "0.7",
    "reference.control": "adaptive reference.target=0.001 reference.horizon=10",
    "reference.target": "1000.0",
    "reference.horizon": "20",
    "correction.preset": "bypass_ppo_clip",
    "correction.is_threshold": "1.0",
    "correction.is_level": "geometric",
    "correction.ctpo_clip": "0.001",
    "correction.rs": "{token_k1=[0.9999,1.0001]}",
    "environment.use": "lookup",
    "environment.turn_tokens": "30",
    "environment.sandbox": "http://127.0.0.1:2",
    "environment.format": "hermes",
    "environment.gateway.command": "cat",
    "environment.gateway.workspace": "given",
    "environment.gateway.verify": "cat",
    "environment.gateway.listen": "127.0.0.1:8009",
    "task.sandbox": "http://127.0.0.1:2",
    "task.format.tags": '["a"]',
    "task.format.pattern": "[0-9]+",
    "task.overlong.buffer": "5",
    "task.model.path": "graders/other",
    "task.model.max_length": "9",
    "task.model.dtype": "bfloat16",
    "task.judge.base_url": "http://127.0.0.1:2/v1",
    "task.judge.model": "other",
    "task.judge.api_key_env": "SLIPSTREAM_TEST_KEY",
    "task.judge.prompt": "{prompt}{response}",
    "task.judge.pattern": "(..)",
    "task.judge.key": "score",
    "sft.updates": "2",
    "sft.lr": "0.01",
    "sft.path": "others.jsonl",
    "sft.cache": "drawn",
    "sft.warmup": "2 sft.updates=2",
    "sft.source": "teacher",
    "sft.loss.k": "5",
    "sft.loss.loss_max_clamp": "0.01",
    "sft.loss.log_prob_min_clamp": "-1.0",
    "data.response": "question",
    "mix.share": "0.25",
    "mix.final": "0.0",
    "mix.over": "1",
    "mix.path": "others.jsonl",
    "mix.prefix": "0.5",
    "freshness.drift": "snapshots",
    "freshness.m": "3",
    "freshness.apply_to": "policy",
    "learner.batch_size": "4",
    "critic.model": "builtin:student",
    "critic.backbone_lr": "0.01",
    "critic.dtype": "bfloat16",
    "critic.lora.rank": "3",
    "critic.lora.targets": '["q_proj"]',
    "critic.clip": "0.001",
    "critic.weight": "3.0",
    "learner.lr": "0.01",
    "learner.minibatches": "2",
    "learner.warmup": "3",
    "learner.token_budget": "64",
    "learner.clip_norm": "0.01",
    "learner.betas": "[0.5,0.6]",
    "learner.weight_decay": "1.0",
    "learner.compute_dtype": "bfloat16",
    "learner.optimizer_dtype": "bfloat16",
    "learner.offload": '["optimizer"]',
    "learner.snapshots": "2",
    "learner.lora.rank": "3",
    "learner.lora.targets": '["q_proj"]',
    "learner.threads": "2",
    "schedule.max_lag": "6",
    "reuse.times": "4",
    "reuse.max_lag": "6",
    "reuse.groups": "7",
    "reuse.half_life": "3.0",
    "reuse.gigabytes": "0.5",
    "schedule.mixture": "level",
    "schedule.publish_every": "2 eval.every=2",
    "schedule.publish_max": "2",
    "runtime.device": "cpu",
    "runtime.costs": "costs.toml",
    "schedule.on_old": "restart",
    "task.reward": "math",
    "teachers.NAME.model": "builtin:student",
    "teachers.NAME.base_url": "http://127.0.0.1:1/v1",
    "teachers.NAME.api_key_env": "SLIPSTREAM_TEST_KEY",
    "teachers.NAME.max_logprobs": "7",
    "teachers.NAME.key": "other teachers.other.key=main",
    "teachers.NAME.context": "{prompt}{ground_truth}",
    "teachers.NAME.max_length": "150",
    "teachers.NAME.spelling": "own teachers.main.model=builtin:pair_teacher",
    "teachers.NAME.follow.ema": "0.5",
    "guards.gac.limit": "0.5",
    "teachers.NAME.follow.copy_every": "3",
}
"""Another value that is legal, where none follows from the schema, and what goes with it."""
OTHER |= {
    name.replace("environment.", "environments.NAME."): value
    for name, value in OTHER.items()
    if name.startswith("environment.")
}
ALSO = {
    "learner.ranks": "runtime.kind=local",
    "learner.snapshots": "learner.exact_drift=true",
    "teachers.NAME.base_url": "loss.kind=forward_kl",
    "teachers.NAME.spelling": "loss.m=1",
    "policy.old": "policy.loss=vanilla",
    "sft.warmup": "sft.updates=2",
}
"""Settings that must be written beside either value."""

READ_BY = {
    "output": "run_dir/writing.py",
    "runtime.time_share": "runtimes/inline.py",
    "updates": "pipeline/run.py",
    "sft.until": "pipeline/run.py",
    "sampler.engine": "plan/engines.py",
    "sampler.engine_args": "plan/engines.py",
    "teachers.NAME.engine_args": "plan/engines.py",
    "sampler.replicas_max": "config/sections.py",
    "teachers.NAME.replicas_max": "config/sections.py",
    "teachers.NAME.noise": "config/teacher.py",
    "teachers.NAME.engine": "plan/engines.py",
    "teachers.NAME.tokenizer": "plan/facts.py",
    "data.chat": "data/tokenizers.py",
    "data.system_prompt": "data/tokenizers.py",
    "data.template_args": "data/tokenizers.py",
    "teachers.NAME.template_args": "plan/spelling.py",
    "data.adaptive.weight_by": "pipeline/run.py",
    "data.adaptive.half_life": "pipeline/run.py",
    "data.adaptive.uniform_share": "pipeline/run.py",
    "data.too_long": "plan/prompts.py",
    "policy.refill": "config/sections.py",
    "policy.drop_alike": "objective/constants.py",
    "policy.old_decay": "objective/method.py",
    "eval.every": "pipeline/evaluate.py",
    "eval.suite.tasks": "pipeline/suites.py",
    "eval.suite.every": "pipeline/suites.py",
    "eval.suite.path": "pipeline/suites.py",
    "eval.suite.limit": "pipeline/suites.py",
    "eval.suite.device": "pipeline/suites.py",
    "eval.suite.seconds": "pipeline/suites.py",
    "policy.centre_size": "engines/sampling_options.py",
    "checkpoint.every": "pipeline/run.py",
    "checkpoint.minutes": "pipeline/run.py",
    "checkpoint.keep": "pipeline/run.py",
    "health.stop": "pipeline/control/health.py",
    "health.updates": "pipeline/control/health.py",
    "health.window": "pipeline/control/health.py",
    "health.kl": "pipeline/control/health.py",
    "health.invalid": "pipeline/control/health.py",
    "health.canary": "pipeline/canary_rounds.py",
    "health.grad_norm": "pipeline/control/health.py",
    "health.collapse": "pipeline/control/health.py",
    "health.rise": "pipeline/control/health.py",
    "health.repeated": "pipeline/control/health.py",
    "health.idle": "pipeline/control/health.py",
    "health.reward": "pipeline/control/health.py",
    "guards.length_surge.ratio": "pipeline/control/guards.py",
    "guards.length_surge.factor": "pipeline/control/guards.py",
    "guards.ess.target": "pipeline/control/guards.py",
    "guards.ess.scale": "pipeline/control/guards.py",
    "guards.entropy.floor": "pipeline/control/guards.py",
    "guards.entropy.factor": "pipeline/control/guards.py",
    "guards.kl.high": "pipeline/control/guards.py",
    "guards.kl.low": "pipeline/control/guards.py",
    "guards.gac.below": "pipeline/control/guards.py",
    "guards.gac.factor": "pipeline/control/guards.py",
    "teachers.NAME.recheck": "pipeline/stages.py",
    "sampler.fusion.alpha": "config/sampler.py",
    "sampler.fusion.updates": "config/sampler.py",
    "sampler.fusion.difficulty": "pipeline/run.py",
    "freshness.beta": "objective/sample_weights.py",
    "freshness.refresh": "pipeline/control/buffer_refresh.py",
    "freshness.refresh_every": "pipeline/control/buffer_refresh.py",
    "freshness.kappa_f": "pipeline/control/buffer_refresh.py",
    "freshness.kappa_roll": "pipeline/control/buffer_refresh.py",
    "freshness.kappa_sup": "pipeline/control/buffer_refresh.py",
    "freshness.cooldown": "pipeline/control/buffer_refresh.py",
    "freshness.estimate": "pipeline/control/buffer_refresh.py",
    "freshness.measure": "pipeline/control/buffer_refresh.py",
    "log.to": "run_dir/trackers.py",
    "log.project": "run_dir/trackers.py",
    "log.listen": "run_dir/trackers.py",
    "log.samples": "pipeline/run.py",
    "log.trace": "run_dir/writing.py",
    "schedule.drift": "pipeline/steering.py",
    "schedule.publish_max": "config/schedule.py",
    "runtime.kind": "runs/start.py",
    "runtime.address": "runtimes/ray.py",
    "runtime.heartbeat": "runtimes/local.py",
    "runtime.restarts": "runs/start.py",
    "environments.NAME.gateway.listen": "config/rules/workers.py",
}
"""Files that read settings of the run, not of its engines, or settings that need packages beside the usual ones."""
REFUSED = {"learner.dropout", "sft.loss.weight"}
"""Settings without effect on this student, or alone."""


def choices(info: FieldInfo) -> tuple[Any, ...]:
    options = [arg for arg in (info.annotation, *get_args(info.annotation)) if get_origin(arg) is Literal]
    return get_args(options[0]) if options else ()


def only_one(info: FieldInfo) -> bool:
    return get_origin(info.annotation) is Literal and len(choices(info)) == 1


KEYS = {f"{name}:{kind}" if kind else name: (name, info, kind) for name, info, kind in fields() if not only_one(info)}


def another(name: str, info: FieldInfo) -> str:
    """A value that is not the default."""
    if name in OTHER:
        return OTHER[name]
    if choices(info):
        return str(next(choice for choice in choices(info) if choice != info.default))
    match info.default:
        case bool():
            return json.dumps(not info.default)
        case int():
            return str(info.default + 1)
        case float():
            return str(info.default / 2 if info.default else 0.1)
    raise AssertionError(f"{name}: which other value is legal? Write it into OTHER")


def words(line: str) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, _, value in (pair.partition("=") for pair in line.split()))


def base_of(key: str, name: str, kind: str) -> str:
    line = next((line for start, line in WITH.items() if key.startswith(start)), "")
    kind = "k2" if kind.startswith("k1") else kind
    line += " loss.k=6" if kind == "reverse_kl_topk" else ""
    if kind and name.startswith(("loss.", "schedule.", "sft.loss.")):
        line += f" {name.rpartition('.')[0]}.kind={kind}"
    return line


@cache
def planned(changes: tuple[tuple[str, str], ...]) -> Plan:
    """The plan of a config, which a run directory can hold: what is written there is the same config."""
    made = plan(parse(read("base.toml"), changes, say=str), ask=False)
    assert parse(tomllib.loads(to_toml(made.config)), say=str) == made.config
    return made


def seen(made: Plan) -> list[Any]:
    """The plan without the sections that are handed on whole: those are seen when somebody reads them."""
    config, engines, method = made.config, made.engines, made.method
    learner = replace(engines.learner, settings=None, method=None, supervised=None)  # type: ignore[arg-type]
    scorers = [
        replace(each, spec=(each.spec.cache, each.spec.k, each.spec.draws), supervised=None, supervised_temperature=1.0)
        for each in engines.scorers.values()
    ]
    prompts = [made.prompts.at(number) for number in range(30)]
    return [
        replace(engines, learner=learner, scorers=scorers, runtime=None),  # type: ignore[arg-type]
        replace(method, loss=None, policy=None, reference=None, freshness=None),  # type: ignore[arg-type]
        made.sampling,
        [eval_sampling(config, name) for name in config.data.held_out],
        schedule_of(config.schedule, config.groups_per_update, config.reuse),
        [(p.tokens.tolist(), p.seed, p.teacher, p.ground_truth) for p in chain(prompts, *made.held_out.values())],
        [made.prompts.source(number) for number in range(30)],
        made.prompts.digest,
        list(map(str, made.needs)),
    ]


@cache
def trained(changes: tuple[tuple[str, str], ...]) -> tuple[str, list[Metrics]]:
    """Two updates of the engines of a plan, the second one on stale samples: weights, and what they say of it."""
    made = planned(changes)
    learner = build_learner(made.engines.learner, made.tokenizer)
    sampler = shared(build_sampler, made.engines.sampler, made.tokenizer)
    teachers = [shared(OwnTeacherSampler, each, made.tokenizer) for each in made.engines.teacher_samplers.values()]
    (scorer,) = [shared(build_scorer, each, made.tokenizer) for each in made.engines.scorers.values()]
    found: list[Metrics] = []

    async def responses(prompt: Prompt) -> Sequence[Handle]:
        if prompt.source in ("data", "file"):
            return given_group(prompt, made.prompts.responses(prompt, made.prompts.order.at(prompt.number)))
        return await draw_after_prefix(teachers[0] if prompt.source else sampler, prompt, made.sampling)

    async def updates() -> str:
        size, settings = made.config.groups_per_update, made.engines.learner.settings
        weights, _ = await learner.export()
        await sampler.publish(weights, "drain")
        for update in (1, 2):
            supervised = update <= made.config.supervised_updates
            prompts = [
                made.prompts.with_origin(made.prompts.at(number), made.prompts.order.at(number), supervised=supervised)
                for number in range(size)
            ]
            groups = [graded(each) for each in await asyncio.gather(*map(responses, prompts))]
            if not supervised or made.config.sft.loss.kind != "cross_entropy":
                groups = await asyncio.gather(*map(scorer.score, groups))
            batch = Batch(tuple(groups), update)
            counts = await learner.prepare(batch)
            for _ in range(settings.epochs):
                for part in batch.parts(settings.minibatches):
                    await learner.accumulate(part, total(counts))
                    found.append(await learner.step())
        return (await learner.export())[1]

    try:
        return asyncio.run(updates()), found
    finally:
        learner.close()


SHARED: dict[str, Any] = {}


def shared(build: Callable[..., Any], made: Any, tokenizer: Any) -> Any:
    """The engine of a plan, built once: a scorer never changes, and a sampler is given its weights before it draws."""
    name = f"{build.__name__}({made})"
    if name not in SHARED:
        SHARED[name] = build(made, tokenizer)
    return SHARED[name]


@pytest.fixture(scope="module", autouse=True)
def end() -> Iterator[None]:
    yield
    for engine in SHARED.values():
        engine.close()


def graded(group: Sequence[Handle]) -> list[Handle]:
    rewards = [{"exact": float(handle.header.index % 2), "math": handle.header.index / 7} for handle in group]
    return [Handle(replace(h.header, rewards=each), h.body) for h, each in zip(group, rewards, strict=True)]


def reads(path: str, name: str) -> bool:
    """Return True if a file has `….section.key`, or `self.key` in the section itself."""
    section, _, key = (
        name.replace("teachers.NAME.recheck", "teacher.settings.recheck")
        .replace("teachers.NAME", "teacher")
        .replace("environments.NAME", "each")
        .replace("guards.", "")
        .rpartition(".")
    )
    tree = ast.parse((SOURCE / path).read_text("utf-8"))
    found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return any(each.endswith((f"{section or 'config'}.{key}", f"self.{key}", f"self.settings.{key}")) for each in found)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student with experts, for the built-in task."""
    path = tmp_path_factory.mktemp("mixture")
    save_mixture(path, like="builtin:student")
    return path


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixture: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mixture").symlink_to(mixture)
    monkeypatch.setenv("SLIPSTREAM_TEST_KEY", "secret")
    Path("base.toml").write_text(BASE)
    rows = [
        {"prompt": f"A{i}B{i}=", "answer": "x", "question": f"C{i}D{i}=", "data_source": source, "level": level}
        | {"easy": i, "hard": -i}
        for i in range(4)
        for source, level in (("main", "other"), ("other", "main"))
    ]
    Path("given").mkdir()
    for name in ("rm", "other"):
        path = Path("graders") / name
        path.mkdir(parents=True)
        LlamaConfig(architectures=["LlamaForSequenceClassification"], num_labels=1).save_pretrained(path)
    Path("costs.toml").write_text("decode.step = 1.0\nlengths.mean = 8.0\n")
    Path("rewards.py").write_text("async def runs(text, sandbox): return 1.0")
    trajectory = {"tokens": [5] * 8, "logp": [-1.0] * 8}
    for name, token in (("given", 5), ("others", 6)):
        given = [trajectory | {"prompt": f"train:{i}", "tokens": [token] * 8} for i in range(24)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in given))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("key", KEYS)
def test_every_key_does_something(key: str) -> None:
    name, info, kind = KEYS[key]
    if name in READ_BY:
        assert reads(READ_BY[name], name)
        return
    line = f"{base_of(key, name, kind)} {ALSO.get(name, '')}"
    one, other = words(line), words(f"{line} {name.replace('.NAME', '.main')}={another(name, info)}")
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"{name} does nothing"):
            planned(other)
    elif seen(planned(one)) == seen(planned(other)):
        assert trained(one) != trained(other)


def test_nothing_is_named_that_is_no_key() -> None:
    known = {name for name, _, _ in KEYS.values()}
    assert (OTHER.keys() | ALSO.keys() | READ_BY.keys() | REFUSED) - known == set()
